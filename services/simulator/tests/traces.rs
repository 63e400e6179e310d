//! The policy decides as it did when its traces were committed, and a trace shows each difference.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use fiec_policy::{Action, Config, Policy};
use fiec_schemas::{Event, InstanceId};
use fiec_simulator::trace::committed::{Committed, is_update};
use fiec_simulator::trace::{Digested, Recorder, TraceError, replay, sources};
use fiec_simulator::{Decide, Scenario};

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A trace's name, and its scenario.
type Source = (String, Scenario);

fn scenarios() -> Vec<Source> {
    let files: Vec<PathBuf> = sources::scenarios(&package().join("scenarios")).unwrap();
    let read = |file: PathBuf| {
        let scenario = Scenario::parse(&std::fs::read(&file).unwrap()).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        (format!("services/simulator/scenarios/{name}"), scenario)
    };
    files.into_iter().map(read).collect()
}

fn drawn(seeds: impl Iterator<Item = u64>) -> impl Iterator<Item = Source> {
    seeds.map(|seed| (sources::name_of_seed(seed), sources::drawn(seed)))
}

fn digest(scenario: &Scenario) -> Digested {
    sources::record(scenario, &Recorder::digest()).unwrap()
}

/// Text that a recorder writes and the test reads.
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

impl Text {
    fn lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.borrow().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

fn recorded(scenario: &Scenario) -> Text {
    let text = Text::default();
    sources::record(scenario, &Recorder::to(text.clone())).unwrap();
    text
}

fn replayed<D: Decide>(trace: &Text, make: impl FnMut(&Config, InstanceId) -> D) -> Text {
    let (text, mut make) = (Text::default(), make);
    let recorder = Recorder::to(text.clone());
    replay(&**trace.0.borrow(), &recorder, &mut make).unwrap();
    text
}

fn production(config: &Config, id: InstanceId) -> Policy {
    Policy::new(config.clone(), id)
}

#[test]
fn scenarios_and_drawn_seeds_have_the_traces_that_were_committed() {
    let path = package().join("traces.txt");
    let committed = Committed::read(&path).unwrap();
    let all: Vec<Source> = scenarios()
        .into_iter()
        .chain(drawn(sources::SEEDS))
        .collect();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let part = |n: usize| {
        let mine = all.iter().skip(n).step_by(cores);
        let digested = mine.map(|(name, scenario)| (name.clone(), digest(scenario)));
        digested.collect::<Vec<_>>()
    };
    let found: Vec<(String, Digested)> = std::thread::scope(|scope| {
        let part = &part;
        let threads: Vec<_> = (0..cores).map(|n| scope.spawn(move || part(n))).collect();
        let parts = threads.into_iter().map(|thread| thread.join().unwrap());
        parts.flatten().collect()
    });
    let found = Committed(found.into_iter().collect());
    if is_update() {
        std::fs::write(&path, found.to_text()).unwrap();
        return;
    }
    let differ = found
        .0
        .iter()
        .filter_map(|(name, of)| committed.compare(name, of).err());
    let stale = committed
        .0
        .keys()
        .filter(|name| !found.0.contains_key(*name));
    let stale = stale.map(|name| format!("the committed trace {name} has no source any more"));
    let all: Vec<String> = differ.chain(stale).collect();
    assert!(
        all.is_empty(),
        "{}\n\
         To see the first step that differs: `fiec trace NAME > FILE` here and in a tree of the \
         commit before, then `diff` (services/simulator/src/trace/mod.rs). If the differences are \
         meant: FIEC_UPDATE=1 cargo test -p fiec-simulator --test traces, and say why in the commit",
        all.join("\n")
    );
}

/// The policy's own tests replay each of their traces.
#[test]
fn a_trace_replays_to_itself() {
    let small = ["calm", "dag", "pressure"];
    let all = scenarios().into_iter();
    let all = all.filter(|(name, _)| small.iter().any(|small| name.contains(small)));
    let holding = drawn(sources::HOLDING..=sources::HOLDING + 3);
    for (name, scenario) in all.chain(drawn(1..=8)).chain(holding) {
        let trace = recorded(&scenario);
        let again = replayed(&trace, production).lines();
        let trace = trace.lines();
        let differs = trace.iter().zip(&again).find(|(one, other)| one != other);
        assert_eq!(differs, None, "{name}");
        assert_eq!(trace.len(), again.len(), "{name}");
    }
}

/// A policy with one action dropped or altered on its way out.
struct Spoiled {
    policy: Policy,
    /// Number of appends before that one.
    before: Rc<Cell<u32>>,
    drops: bool,
}

impl Spoiled {
    fn spoil(&self, out: &mut Vec<Action>) {
        let mut at = 0;
        while let Some(action) = out.get_mut(at) {
            at += 1;
            let Action::Append { events, .. } = action else {
                continue;
            };
            let left = self.before.get();
            self.before.set(left.wrapping_sub(1));
            if left == 0 && self.drops {
                out.remove(at - 1);
                return;
            } else if left == 0 {
                events.push(Event::Submitted);
            }
        }
    }
}

impl Decide for Spoiled {
    fn policy(&self) -> &Policy {
        &self.policy
    }
    fn policy_mut(&mut self) -> &mut Policy {
        &mut self.policy
    }
    fn alter(&mut self, out: &mut Vec<Action>) {
        self.spoil(out);
    }
}

#[test]
fn submissions_are_held_and_appended_in_traces_of_services_that_may_hold_them() {
    let (mut held, mut in_vain) = (0, 0);
    for (name, scenario) in drawn(sources::HOLDING..=*sources::SEEDS.end()) {
        let lines = recorded(&scenario).lines();
        let holds = lines.iter().filter(|line| line.ends_with(" out hold"));
        let no_more = lines.iter().filter(|line| {
            line.contains(" in submission ") && !line.contains(r#""may_hold":true"#)
        });
        let submitted = lines.iter().filter(|line| line.contains(r#""expected":0"#));
        assert!(submitted.count() > 0, "{name}");
        held += holds.count();
        in_vain += no_more.count();
    }
    assert!(held > 100 && in_vain > 10, "{held} held, {in_vain} in vain");
}

#[test]
fn an_action_that_is_dropped_or_altered_differs_at_its_step_alone() {
    let trace = recorded(&sources::drawn(7));
    let lines = trace.lines();
    let is_append = |line: &str| line.contains(" out append ");
    // What begins a ledger is the answer to its submission, and no action.
    let begins = |line: &str| line.contains(r#""expected":0,"#);
    let mut appends = lines.iter().filter(|line| is_append(line) && !begins(line));
    let spoiled = appends.nth(20).expect("more than 20 appends").clone();
    for drops in [true, false] {
        let before = Rc::new(Cell::new(20));
        let now = replayed(&trace, |config, id| Spoiled {
            policy: production(config, id),
            before: Rc::clone(&before),
            drops,
        });
        let now = now.lines();
        let gone: Vec<&String> = lines.iter().filter(|line| !now.contains(line)).collect();
        assert_eq!(gone, [&spoiled]);
        let new: Vec<&String> = now.iter().filter(|line| !lines.contains(line)).collect();
        assert_eq!(new.len(), usize::from(!drops), "{new:?}");
        let step = |line: &str| line.split(' ').next().map(str::to_owned);
        assert!(
            new.iter().all(|line| step(line) == step(&spoiled)),
            "{new:?}"
        );
    }
}

#[test]
fn a_trace_that_cannot_be_read_names_its_line() {
    let new = r#"0 p0 in new {"config":{},"id":"00000000-0000-0000-0000-000000000001"}"#;
    let at = "86400000 2026-01-01T00:00:00.000000Z";
    for (text, line, word) in [
        (format!("1 p0 in tick {at}"), 1, "p0 is not known"),
        (format!("{new}\n1 p0 in tack {at}"), 2, "tack"),
        (format!("{new}\n1 p0 in gone {at} {{}}"), 2, "node"),
        (format!("{new}\n1 p0 in tick"), 2, "clocks"),
        (
            new.replace(r#""config":{}"#, r#""config":{"colour":1}"#),
            1,
            "colour",
        ),
        (new.replace("p0", "p1"), 1, "p0 is next"),
    ] {
        let read = replay(text.as_bytes(), &Recorder::digest(), &mut |config, id| {
            production(config, id)
        });
        let Err(TraceError::Unreadable {
            line: found,
            problem,
        }) = read
        else {
            panic!("{text}: {read:?}")
        };
        assert_eq!(found, line, "{problem}");
        assert!(problem.contains(word), "{problem}");
    }
}
