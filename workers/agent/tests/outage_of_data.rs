//! Programs that fetch data while the broker does not answer. Nothing of it is their fault.

use std::path::PathBuf;
use std::time::Duration;

use crate::common::{Running, World, poll, result};
use crate::packages::of_python;
use fiec_broker::store;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::package::Manifest;
use fiec_schemas::{Cause, Digest, ExecutionId};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// The program's `boundary_ms`.
const BOUNDARY: Duration = Duration::from_secs(5);
/// How long it computes after its fetch: within its limit, also on a busy machine.
const COMPUTES: Duration = Duration::from_millis(2_500);
const DATA: &[u8] = b"an input";

/// Reaches a boundary, fetches when it may, and computes.
const PROGRAM: &str = "import os, time
import fiec

def main(run):
    p = run.params
    for step in run.steps(until=2):
        if step == 0:
            continue
        open(p['here'], 'w').close()
        while not os.path.exists(p['go']):
            time.sleep(0.005)
        open(p['asked'], 'w').close()
        data = run.fetch(p['digest'])
        time.sleep(p['computes'])
    return {'bytes': len(data)}

fiec.main(main)
";

/// The package of the program, with the Python kit.
fn package() -> (Manifest, Vec<u8>) {
    let limits = json!({ "boundary_ms": BOUNDARY.as_millis() as u64 });
    of_python(PROGRAM, limits)
}

/// The broker is stopped until this goes, however the test ends.
pub struct Stopped(Pid);

impl Stopped {
    pub fn now(world: &World) -> Self {
        let pid = Pid::from_raw(world.servers.nats.pid().try_into().unwrap()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        kill_process(self.0, Signal::CONT).unwrap();
    }
}

/// An execution of the program that computes on an agent.
struct Fetching {
    world: World,
    agent: Running,
    id: ExecutionId,
    go: PathBuf,
    asked: PathBuf,
}

impl Fetching {
    /// Returns when the program is about to fetch.
    async fn start() -> Self {
        let world = World::start().await;
        let mut options = world.options("n1");
        options.allow_programs = vec!["*".to_owned()];
        let agent = world.agent_with(options).await;
        let (manifest, artifact) = package();
        world.register_as("x@1", manifest, &artifact).await;
        let digest = Digest::of(DATA);
        store::put_data(&world.broker, digest, DATA).await.unwrap();
        let [here, go, asked] = ["here", "go", "asked"].map(|name| world.folder.path().join(name));
        let params = json!({ "here": here, "go": go, "asked": asked, "digest": digest,
            "computes": COMPUTES.as_secs_f64() });
        let line = json!({ "program": "x@1", "params": params, "commit": { "every": 1 },
            "retries": 0 });
        let id = world.submit(&line.to_string(), &agent).await;
        poll("the program to be about to fetch", async || {
            here.exists().then_some(())
        })
        .await;
        Self {
            world,
            agent,
            id,
            go,
            asked,
        }
    }

    /// Lets the program fetch, and returns when it does.
    async fn fetches(&self) {
        std::fs::write(&self.go, "").unwrap();
        poll("the program to fetch", async || {
            self.asked.exists().then_some(())
        })
        .await;
    }

    /// Stops the broker for this long while the program fetches. Nothing of that is its fault.
    async fn completes_after(self, silence: Duration) {
        let stopped = Stopped::now(&self.world);
        self.fetches().await;
        // The length of the silence is what the test is about.
        tokio::time::sleep(silence).await;
        drop(stopped);
        let last = self
            .world
            .wait(self.id, "the end", |m| m.state.phase.is_terminal())
            .await;
        let found = (last.state.phase.as_str(), last.state.totals.crashes);
        assert_eq!(found, ("completed", 0), "{:?}", last.events);
        assert_eq!(result(&last), json!({ "bytes": DATA.len() }));
        self.agent.leave().await;
    }
}

#[tokio::test]
async fn a_program_has_its_whole_time_to_the_next_boundary_once_its_data_has_come() {
    // Shorter than a request may take. With the computation it exceeds the limit.
    let silence = BOUNDARY - Duration::from_millis(1_000);
    assert!(silence + COMPUTES > BOUNDARY);
    Fetching::start().await.completes_after(silence).await;
}

#[tokio::test]
async fn a_fetch_waits_for_a_broker_that_does_not_answer_and_the_program_has_not_crashed() {
    let silence = BOUNDARY * 2 + Duration::from_secs(2);
    Fetching::start().await.completes_after(silence).await;
}

/// A program whose fetch nobody answers, while the rest of the broker works.
async fn without_its_data() -> Fetching {
    let fetching = Fetching::start().await;
    let js = &fetching.world.broker.js;
    js.delete_stream("OBJ_FIEC_DATA").await.unwrap();
    fetching.fetches().await;
    fetching
}

#[tokio::test]
async fn a_program_that_waits_for_its_data_is_cancelled_like_any_other() {
    let waiting = without_its_data().await;
    let request = ControlRequest::Cancel {
        execution: waiting.id,
        who: "ann".to_owned(),
    };
    let node = &waiting.agent.node;
    let reply = waiting.world.control(node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    waiting.world.wait_phase(waiting.id, "cancelled").await;
}

#[tokio::test]
async fn a_program_that_waits_for_its_data_takes_a_pause_and_can_be_given_up() {
    let waiting = without_its_data().await;
    let (id, node) = (waiting.id, &waiting.agent.node);
    let pause = ControlRequest::Pause {
        execution: id,
        who: "ann".to_owned(),
    };
    let reply = waiting.world.control(node, &pause).await.unwrap();
    assert_eq!(reply.error, None);
    let epoch = waiting.world.last(id).await.message.state.epoch;
    let give_up = ControlRequest::GiveUp {
        execution: id,
        epoch,
        cause: Cause::Balance,
    };
    waiting.world.control(node, &give_up).await;
    // A pause that was confirmed holds.
    waiting.world.wait_phase(id, "paused").await;
}
