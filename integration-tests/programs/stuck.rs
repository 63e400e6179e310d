//! Processes that their parents cannot end: frozen ones, and those of programs that kill their own
//! parent.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fiec_kit::foreign::container::Engine;
use fiec_schemas::NodeId;
use fiec_schemas::duty::Actor;
use fiec_schemas::messages::Viability;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::python_program::package;
use crate::stage::python::{root, say};
use crate::stage::{BINARY, Lab, args, proc, slots, until, workers};

/// Counts for long, and notes the process of its program.
const COUNTS: &str = "import os, time
import fiec

def main(run):
    with open(run.params['pid'] + '.new', 'w') as file:
        file.write(str(os.getpid()))
    os.rename(run.params['pid'] + '.new', run.params['pid'])
    for _ in run.steps(until=1_000_000):
        time.sleep(0.02)

fiec.main(main)
";

/// Leaves processes in sessions of their own, and kills its parent, if it is asked to.
const BETRAYS: &str = "import os, signal, time
import fiec

def daemon(path):
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(path + '.new', 'w') as file:
        file.write(str(os.getpid()))
    os.rename(path + '.new', path)
    if os.fork() == 0:
        os._exit(0)
    time.sleep(600)
    os._exit(0)

def main(run):
    for _ in run.steps(until=1):
        for number in range(run.params['daemons']):
            path = run.params['path'] + str(number)
            daemon(path)
            while not os.path.exists(path):
                time.sleep(0.005)
        if run.params['daemons']:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)

fiec.main(main)
";

async fn push(lab: &Lab, name: &str, code: &str, protocol: &str) -> String {
    let code = lab.file(&format!("{name}.py"), code);
    let folder = lab.path(&format!("{name}-{protocol}"));
    std::fs::create_dir_all(&folder).unwrap();
    let entry = ["python3", "-B", &format!("{name}.py")];
    package(&folder, &code, &entry, protocol, &[]);
    let program = format!("{name}-{}@1", protocol.replace('_', "-"));
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", &program, &folder])
        .await
        .expect(0);
    program
}

fn noted(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.parse().ok()
}

/// A control group whose processes do not run, and cannot be ended until they do.
struct Freezer(PathBuf);

impl Freezer {
    /// None, with a word on stderr, where this kernel or this user has none.
    fn new() -> Option<Self> {
        let folder = format!("/sys/fs/cgroup/freezer/fiec-test-{}", std::process::id());
        match std::fs::create_dir(&folder) {
            Ok(()) => Some(Self(folder.into())),
            Err(error) => {
                say(&format!("skipped: no control group of a freezer: {error}"));
                None
            }
        }
    }

    fn set(&self, state: &str) {
        std::fs::write(self.0.join("freezer.state"), state).unwrap();
    }

    async fn freeze(&self, pid: u32) {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
        self.set("FROZEN");
        let state = self.0.join("freezer.state");
        until("the process is frozen", async || {
            let state = std::fs::read_to_string(&state).unwrap();
            (state.trim() == "FROZEN").then_some(())
        })
        .await;
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("freezer.state"), "THAWED");
        let until = Instant::now() + Duration::from_secs(10);
        while std::fs::remove_dir(&self.0).is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[tokio::test]
async fn a_child_that_sigkill_cannot_end_costs_its_slot_and_nothing_else() {
    let Some(freezer) = Freezer::new() else {
        return;
    };
    let mut options = workers(1);
    options.worker_args = slots(3);
    options
        .worker_args
        .extend(args(&["--allow-program", "*@1"]));
    let mut lab = Lab::start(options).await;
    let mut frozen = Vec::new();
    for protocol in ["frames", "json_lines"] {
        let program = push(&lab, "counts", COUNTS, protocol).await;
        let noted_at = lab.path(&format!("pid-{protocol}"));
        let params = json!({"pid": noted_at.display().to_string()});
        let id = lab.publish(protocol, &program, &params).await;
        lab.journal.computing(id, 3).await;
        let pid = noted(&noted_at).unwrap();
        freezer.freeze(pid).await;
        let since = Instant::now();
        lab.fiec(&["cancel", protocol]).await.expect(0);
        lab.journal.ended(id, "cancelled").await;
        let took = since.elapsed();
        assert!(took < Duration::from_secs(10), "{protocol}: {took:?}");
        frozen.push(pid);
    }
    let node = async || -> Value {
        let ran = lab.fiec(&["--json", "nodes"]).await.expect(0);
        ran.json_lines().remove(0)
    };
    until("both slots are lost", async || {
        let vector = node().await["vector"].clone();
        let listed = vector["stuck"].as_array().cloned().unwrap_or_default();
        let listed: Vec<&Value> = listed.iter().map(|stuck| &stuck["pid"]).collect();
        let all = frozen.iter().all(|pid| listed.contains(&&json!(pid)));
        (all && vector["slots"] == 1).then_some(())
    })
    .await;
    let table = lab.fiec(&["nodes"]).await.expect(0).stdout;
    for pid in &frozen {
        let words = format!("process {pid} (python3) does not end");
        assert!(table.contains(&words), "{table}");
    }
    // The slot that is left computes, one execution after the other.
    let next = lab
        .publish("next", "synthetic@1", &json!({"capsules": 3}))
        .await;
    lab.journal.ended(next, "completed").await;

    freezer.set("THAWED");
    for pid in &frozen {
        until("they end", async || (!proc::is_alive(*pid)).then_some(())).await;
    }
    until("both slots are back", async || {
        let vector = node().await["vector"].clone();
        (vector["slots"] == 3 && vector.get("stuck").is_none()).then_some(())
    })
    .await;

    // A worker that leaves does not wait for such a process.
    let noted_at = lab.path("pid-last");
    let params = json!({"pid": noted_at.display().to_string()});
    let last = lab.publish("last", "counts-frames@1", &params).await;
    let place = lab.journal.computing(last, 3).await;
    freezer.freeze(noted(&noted_at).unwrap()).await;
    lab.fiec(&["cancel", "last"]).await.expect(0);
    lab.journal.ended(last, "cancelled").await;
    let worker = lab.worker(&place);
    worker.signal(Signal::TERM).unwrap();
    until("the worker ends", async || worker.ended().map(drop)).await;
    drop(freezer);
    lab.end().await;
}

/// A worker as the first process of a process namespace, with its number outside. None, with a word on
/// stderr, where this user may not make one.
async fn first_process(lab: &Lab) -> Option<(tokio::process::Child, u32)> {
    let words = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        BINARY,
    ];
    let mut process = lab.own_worker(&words, "first");
    let node = NodeId::new("first").unwrap();
    let worker = until("a worker as the first process", async || {
        if process.try_wait().unwrap().is_some() {
            return Some(None);
        }
        let status = lab.status_of(&node).await.ok()?;
        let is_viable = status.viability == Viability::Viable;
        let children = proc::descendants(process.id()?);
        is_viable.then(|| children.first().copied())
    })
    .await;
    if worker.is_none() {
        let words = std::fs::read_to_string(lab.path("first.log")).unwrap();
        assert!(words.contains("unshare"), "{words}");
        say(&format!("skipped: no process namespace: {words}"));
    }
    Some((process, worker?))
}

/// Both protocols, on this worker.
async fn betray(lab: &Lab, name: &str, worker: u32) {
    for protocol in ["frames", "json-lines"] {
        let name = format!("{name}-{protocol}");
        let program = format!("betrays-{protocol}@1");
        let path = lab.path(&name).display().to_string();
        let id = lab
            .publish_json(&json!({"id": name, "program": program, "retries": 0,
                "params": {"daemons": 5, "path": path}}))
            .await;
        lab.journal.ended(id, "failed").await;
        assert!((0..5).all(|n| noted(Path::new(&format!("{path}{n}"))).is_some()));
        // A warm program is its keeper's child.
        until("nothing is left of it, not even the dead", async || {
            let left = proc::children(worker).into_iter();
            (!left.map(proc::name).any(|name| name == "python3")).then_some(())
        })
        .await;
        let next = lab
            .publish(&format!("{name}-next"), &program, &json!({"daemons": 0}))
            .await;
        lab.journal.ended(next, "completed").await;
    }
}

#[tokio::test]
async fn what_a_program_hides_from_its_parent_is_ended_by_the_worker() {
    let mut options = workers(1);
    options
        .worker_args
        .extend(args(&["--allow-program", "*@1"]));
    let mut lab = Lab::start(options).await;
    for protocol in ["frames", "json_lines"] {
        push(&lab, "betrays", BETRAYS, protocol).await;
    }
    let worker = lab.worker(&NodeId::new("n1").unwrap()).pid();
    betray(&lab, "plain", worker).await;
    for protocol in ["frames", "json-lines"] {
        for n in 0..5 {
            let pid = noted(&lab.path(&format!("plain-{protocol}{n}"))).unwrap();
            assert!(!proc::is_alive(pid), "{protocol} {n}: {pid}");
        }
    }
    // To the first process all orphans come, whatever it asked for.
    if let Some((mut process, worker)) = first_process(&lab).await {
        lab.fiec(&["cordon", "n1"]).await.expect(0);
        betray(&lab, "first", worker).await;
        process.kill().await.unwrap();
    }
    lab.end().await;
}

#[tokio::test]
async fn a_worker_whose_file_is_removed_starts_programs_all_the_same() {
    let lab = Lab::start(workers(1)).await;
    let copy = lab.path("fiec-copy");
    std::fs::copy(BINARY, &copy).unwrap();
    let mut process = lab.own_worker(&[copy.to_str().unwrap()], "copy");
    let node = NodeId::new("copy").unwrap();
    until("the worker", async || {
        let status = lab.status_of(&node).await.ok()?;
        (status.viability == Viability::Viable).then_some(())
    })
    .await;
    std::fs::remove_file(&copy).unwrap();
    push(&lab, "betrays", BETRAYS, "frames").await;
    push(&lab, "betrays", BETRAYS, "json_lines").await;
    for program in ["betrays-frames@1", "betrays-json-lines@1", "synthetic@1"] {
        let params = match program {
            "synthetic@1" => json!({"capsules": 3}),
            _ => json!({"daemons": 0}),
        };
        let id = lab
            .publish_json(
                &json!({"id": program.replace('@', "-"), "program": program, "params": params,
                "requires": {"nodes": ["copy"]}}),
            )
            .await;
        lab.journal.ended(id, "completed").await;
    }
    process.kill().await.unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_container_ends_when_its_worker_is_killed() {
    let engine = match Engine::find() {
        Ok(engine) => engine,
        Err(reason) => return say(&format!("skipped: {reason}")),
    };
    let mut options = workers(1);
    options
        .worker_args
        .extend(args(&["--allow-program", "*@1"]));
    let mut lab = Lab::start(options).await;
    let folder = lab.path("package");
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["collatz.sh", "fiec.json", "image.sh"] {
        std::fs::copy(
            root().join("examples/container").join(file),
            folder.join(file),
        )
        .unwrap();
    }
    let mut made = std::process::Command::new(folder.join("image.sh"));
    let made = made.arg(&engine.program).output().unwrap();
    if !made.status.success() {
        let words = String::from_utf8_lossy(&made.stderr).into_owned();
        return say(&format!("skipped: no image can be made: {words}"));
    }
    let path = folder.display().to_string();
    lab.fiec(&["program", "push", "walled@1", &path])
        .await
        .expect(0);
    // One capsule takes hours.
    let params = json!({"upto": 1_000_000_000, "step": 100_000_000});
    let id = lab.publish("walled", "walled@1", &params).await;
    // Every container of this program, whatever its state, by what it mounts.
    let cache = lab.data_dir().join("run").display().to_string();
    let there = || -> Vec<String> {
        let ask = |words: &[&str]| {
            let output = std::process::Command::new(&engine.program)
                .args(words)
                .output()
                .unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let all = ask(&["ps", "--all", "--quiet"]);
        let all = all.split_whitespace().map(str::to_owned);
        all.filter(|container| ask(&["inspect", container]).contains(&cache))
            .collect()
    };
    until("its container", async || {
        (!there().is_empty()).then_some(())
    })
    .await;
    let place = lab.journal.computing(id, 0).await;
    lab.worker(&place).kill();
    until("its container is removed", async || {
        there().is_empty().then_some(())
    })
    .await;
    lab.fiec(&["cancel", "walled"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    lab.killed_on_purpose(&[Actor::Worker]);
    lab.end().await;
}
