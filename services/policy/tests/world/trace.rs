//! The trace of a simulated cluster, compared with the committed one when the cluster is dropped.
//!
//! A trace is named by its test, so the names of tests differ in all of this folder. The second
//! cluster of a test has `-2` at the end of its name. `FIEC_TRACES=DIR` writes each trace to
//! `DIR/NAME.txt`; `FIEC_UPDATE=1` rewrites the committed digests.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use fiec_policy::{Config, Policy};
use fiec_schemas::InstanceId;
use fiec_simulator::trace::committed::{Committed, is_update};
use fiec_simulator::trace::{Digested, Recorder, Traced, replay};

thread_local! {
    /// Number of clusters that the test of this thread has made.
    static MADE: Cell<u32> = const { Cell::new(0) };
    static IS_TRACED: Cell<bool> = const { Cell::new(true) };
}

/// Turns traces off for the clusters that this test makes from now on: their inputs differ from run
/// to run, or there are too many of them.
pub fn untraced() {
    IS_TRACED.set(false);
}

/// The trace of one cluster.
pub struct Trace {
    /// None: the trace is not recorded.
    name: Option<String>,
    recorder: Recorder,
    text: Text,
}

/// Text that the recorder writes and the replay reads.
#[derive(Clone, Default)]
struct Text(Rc<RefCell<Vec<u8>>>);

impl Write for Text {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn production(config: &Config, id: InstanceId) -> Policy {
    Policy::new(config.clone(), id)
}

/// The committed digests.
pub fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces.txt")
}

impl Trace {
    pub fn begin() -> Self {
        let name = IS_TRACED.get().then(name_of_next);
        let text = Text::default();
        let recorder = match name {
            Some(_) => Recorder::to(text.clone()),
            None => Recorder::off(),
        };
        Self {
            name,
            recorder,
            text,
        }
    }

    /// Adds a policy service to the cluster.
    pub fn policy(&self, config: &Config, id: InstanceId) -> Traced<Policy> {
        self.recorder.policy(config, id, production)
    }

    fn check(&self, name: &str) {
        let found = self.recorder.finish().unwrap();
        let text = self.text.0.take();
        if let Some(folder) = std::env::var_os("FIEC_TRACES") {
            let folder = PathBuf::from(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(format!("{name}.txt")), &text).unwrap();
        }
        let again = replay(&*text, &Recorder::digest(), &mut production).unwrap();
        assert_eq!(found, again, "the trace {name} does not replay to itself");
        if is_update() {
            update(|committed| drop(committed.insert(name.to_owned(), found)));
            return;
        }
        let committed = Committed::read(&path()).unwrap();
        if let Err(difference) = committed.compare(name, &found) {
            panic!(
                "{difference}\n\
                 To see the first step that differs: FIEC_TRACES=DIR cargo test -p fiec-policy here \
                 and in a tree of the commit before, then diff the two DIR/{name}.txt. If the \
                 difference is meant: FIEC_UPDATE=1 cargo test -p fiec-policy, and say why in the \
                 commit. A test with inputs of chance calls world::untraced() first"
            );
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Some(name) = self.name.take()
            && !std::thread::panicking()
        {
            self.check(&name);
        }
    }
}

fn name_of_next() -> String {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    assert_ne!(test, "main", "tests run in threads that have their names");
    let test = test.rsplit("::").next().unwrap_or_default();
    let nth = MADE.get() + 1;
    MADE.set(nth);
    match nth {
        1 => test.to_owned(),
        nth => format!("{test}-{nth}"),
    }
}

/// Changes the committed digests. Other tests and binaries may do so at the same time.
pub fn update(change: impl FnOnce(&mut BTreeMap<String, Digested>)) {
    let lock = File::create(Path::new(env!("CARGO_TARGET_TMPDIR")).join("traces.lock")).unwrap();
    lock.lock().unwrap();
    let mut committed = Committed::read(&path()).unwrap();
    change(&mut committed.0);
    std::fs::write(path(), committed.to_text()).unwrap();
}
