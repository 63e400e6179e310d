//! What programs print: every byte is stored, or told as dropped, before their end is.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, Running, World, poll};
use crate::outage_of_data::Stopped;
use crate::packages::{of_any_program, of_python, tar};
use async_nats::jetstream::consumer::{AckPolicy, pull};
use base64::Engine as _;
use fiec_agent::logs::Logs;
use fiec_broker::store;
use fiec_schemas::messages::{ControlRequest, LogStream};
use fiec_schemas::package::Manifest;
use fiec_schemas::trust::Segment;
use fiec_schemas::{Cause, ExecutionId, NodeId, Submission, Timestamp, subjects};
use futures_util::StreamExt as _;
use serde_json::{Value, json};

/// A piece of output, as it is stored.
#[derive(Debug)]
struct Stored {
    at: Timestamp,
    stream: String,
    bytes: Vec<u8>,
    part: bool,
    offset: u64,
    /// Lines and bytes.
    dropped: Option<(u64, u64)>,
}

impl Stored {
    fn new(payload: &[u8]) -> Self {
        let piece: Value = serde_json::from_slice(payload).unwrap();
        let coded = piece["bytes"].as_str();
        let decode = |coded| base64::prelude::BASE64_STANDARD.decode(coded).unwrap();
        let text = || piece["line"].as_str().unwrap().as_bytes().to_vec();
        let dropped = &piece["dropped"];
        Self {
            at: serde_json::from_value(piece["at"].clone()).unwrap(),
            stream: piece["stream"].as_str().unwrap().to_owned(),
            bytes: coded.map_or_else(text, decode),
            part: piece["part"] == true,
            offset: piece["offset"].as_u64().unwrap_or(0),
            dropped: dropped
                .is_object()
                .then(|| (number(&dropped["lines"]), number(&dropped["bytes"]))),
        }
    }
}

/// The pieces of an execution that are stored now.
async fn stored(world: &World, id: ExecutionId) -> Vec<Stored> {
    let config = pull::Config {
        ack_policy: AckPolicy::None,
        filter_subject: subjects::log(&world.tenant, id),
        ..Default::default()
    };
    let js = &world.broker.js;
    let consumer = js.create_consumer_on_stream(config, subjects::LOG_STREAM);
    let consumer = consumer.await.unwrap();
    let there = usize::try_from(consumer.cached_info().num_pending).unwrap();
    if there == 0 {
        return Vec::new();
    }
    let messages = consumer.fetch().max_messages(there).messages().await;
    let messages = messages
        .unwrap()
        .map(|message| message.unwrap().payload.clone());
    let mut messages: Vec<_> = messages.collect().await;
    // A worker that is not sure that its last message is stored publishes it again.
    messages.dedup();
    messages
        .iter()
        .map(|message| Stored::new(message))
        .collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// What a stream says, and the lines and bytes that were dropped of it. The offsets join.
fn read(pieces: &[Stored], stream: &str) -> (Vec<u8>, (u64, u64)) {
    let (mut text, mut dropped) = (Vec::new(), (0, 0));
    for piece in pieces.iter().filter(|p| p.stream == stream) {
        assert_eq!(piece.offset, text.len() as u64 + dropped.1, "{piece:?}");
        match piece.dropped {
            Some((lines, bytes)) => dropped = (dropped.0 + lines, dropped.1 + bytes),
            None => {
                text.extend(&piece.bytes);
                text.extend((!piece.part).then_some(b'\n'));
            }
        }
    }
    (text, dropped)
}

/// When the server has stored the last message of a subject.
async fn stored_at(world: &World, stream: &str, subject: &str) -> i128 {
    let stream = world.broker.js.get_stream_no_info(stream).await.unwrap();
    let last = stream.get_last_raw_message_by_subject(subject).await;
    last.unwrap().time.unix_timestamp_nanos()
}

impl World {
    /// Runs a shell script by `state_dir`.
    async fn script(&self, program: &str, script: &str, agent: &Running) -> ExecutionId {
        let text = r#"{"entry":["sh","./run.sh"],"protocol":"state_dir"}"#;
        let manifest = Manifest::parse(text.as_bytes()).unwrap();
        let artifact = tar(&[("fiec.json", Some(text)), ("run.sh", Some(script))]);
        self.register_as(program, manifest, &artifact).await;
        let line = json!({"program": program, "retries": 0});
        self.submit(&line.to_string(), agent).await
    }

    /// Runs the body of a Python program over frames.
    async fn python(
        &self,
        program: &str,
        text: &str,
        params: Value,
        agent: &Running,
    ) -> ExecutionId {
        let (manifest, artifact) = of_python(text, json!({}));
        self.register_as(program, manifest, &artifact).await;
        let line = json!({"program": program, "params": params, "retries": 0});
        self.submit(&line.to_string(), agent).await
    }
}

#[tokio::test]
async fn last_words_without_a_newline_arrive_before_the_end() {
    let (world, agent) = of_any_program().await;
    for (name, end, phase) in [
        ("completes@1", "exit 0", "completed"),
        ("fails@1", "echo reason >&2; exit 65", "failed"),
        ("crashes@1", "kill -KILL $$", "failed"),
    ] {
        let script = format!("echo first; printf 'last words'; {end}\n");
        let id = world.script(name, &script, &agent).await;
        ends_after_its_words(&world, id, phase).await;
    }
    for (name, end, phase) in [
        ("pcompletes@1", "return {}", "completed"),
        ("pfails@1", "raise fiec.Failed('reason')", "failed"),
        ("pcrashes@1", "os._exit(7)", "failed"),
    ] {
        let text = format!(
            "import os, fiec\n\ndef main(run):\n    print('first')\n    \
             os.write(1, b'last words')\n    {end}\n\nfiec.main(main)\n"
        );
        let id = world.python(name, &text, json!({}), &agent).await;
        ends_after_its_words(&world, id, phase).await;
    }
    agent.leave().await;
}

async fn ends_after_its_words(world: &World, id: ExecutionId, phase: &str) {
    world.wait_phase(id, phase).await;
    let pieces = stored(world, id).await;
    let (text, dropped) = read(&pieces, "stdout");
    let text = String::from_utf8(text).unwrap();
    assert_eq!(
        (&*text, dropped),
        ("first\nlast words", (0, 0)),
        "{pieces:?}"
    );
    let printed = stored_at(
        world,
        subjects::LOG_STREAM,
        &subjects::log(&world.tenant, id),
    )
    .await;
    let ledger = subjects::ledger(&world.tenant, id);
    let ended = stored_at(world, subjects::LEDGER_STREAM, &ledger).await;
    assert!(printed <= ended, "stored {} ns too late", printed - ended);
}

#[tokio::test]
async fn what_a_program_prints_while_it_yields_is_in_its_log() {
    const PROGRAM: &str = "import time
import fiec

def main(run):
    state = run.state(n=0)
    print('first')
    try:
        while state.n < 100_000:
            state.n += 1
            time.sleep(0.01)
            run.boundary()
    finally:
        time.sleep(0.1)
        print('last words')

fiec.main(main)
";
    let (world, agent) = of_any_program().await;
    let id = world.python("x@1", PROGRAM, json!({}), &agent).await;
    world.wait_phase(id, "started").await;
    let request = ControlRequest::Yield {
        execution: id,
        epoch: 1,
        cause: Cause::Operator { who: "ops".into() },
        to: None,
        decision: None,
    };
    let reply = world.control(&agent.node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    world.wait_phase(id, "pending").await;
    poll("its last words", async || {
        let pieces = stored(&world, id).await;
        (read(&pieces, "stdout").0 == b"first\nlast words\n").then_some(())
    })
    .await;
    agent.leave().await;
}

#[tokio::test]
async fn output_between_runs_belongs_to_nobody() {
    const PROGRAM: &str = "import os, threading, time
import fiec

def between(run):
    while not os.path.exists(run['between']):
        time.sleep(0.005)
    print('between runs')
    os.write(2, b'unfinished')
    open(run['said'], 'w').close()

def main(run):
    print('run', run.params['number'])
    if run.params['number'] == 1:
        threading.Thread(target=between, args=[dict(run.params)], daemon=True).start()
    return {'pid': os.getpid()}

fiec.main(main)
";
    let (world, agent) = of_any_program().await;
    let [between, said] = ["between", "said"].map(|name| world.folder.path().join(name));
    let params = |number: u64| json!({"number": number, "between": between, "said": said});
    let first = world.python("x@1", PROGRAM, params(1), &agent).await;
    let ended = world.wait_phase(first, "completed").await;
    std::fs::write(&between, "").unwrap();
    poll("the idle program to print", async || {
        said.exists().then_some(())
    })
    .await;
    let line = json!({"program": "x@1", "params": params(2)});
    let line = Submission::parse(line.to_string().as_bytes()).unwrap();
    let (digest, line) = (line.digest(), line.to_json());
    // The policy service has stored it.
    store::put_data(&world.broker, digest, &line).await.unwrap();
    let line = String::from_utf8(line).unwrap();
    let second = world.submit(&line, &agent).await;
    let again = world.wait_phase(second, "completed").await;
    let pid = |message| crate::common::result(message)["pid"].clone();
    assert_eq!(pid(&ended), pid(&again), "the same process");
    // A part of the second is computed once more, by the process that ran it.
    let mut verdicts = world
        .broker
        .client
        .subscribe(subjects::VERDICT)
        .await
        .unwrap();
    let request = ControlRequest::Verify {
        question: 1,
        execution: second,
        tenant: world.tenant.clone(),
        segment: Segment {
            from: None,
            to: None,
            keep: None,
        },
    };
    let reply = world.control(&agent.node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    let verdict = tokio::time::timeout(PATIENCE, async {
        loop {
            let said = verdicts.next().await.unwrap();
            let said = String::from_utf8_lossy(&said.payload);
            assert!(!said.contains("error"), "{said}");
            if said.contains("finding") {
                return;
            }
        }
    });
    verdict.await.unwrap();
    for (id, expected) in [(first, "run 1\n"), (second, "run 2\n")] {
        let pieces = stored(&world, id).await;
        assert_eq!(read(&pieces, "stdout").0, expected.as_bytes(), "{pieces:?}");
        assert_eq!(read(&pieces, "stderr").0, b"", "{pieces:?}");
    }
    agent.leave().await;
}

#[tokio::test]
async fn lines_of_any_length_arrive_whole() {
    let (world, agent) = of_any_program().await;
    let script = "x() { head -c $1 /dev/zero | tr '\\0' x; }
x 8197; echo; x 20000; echo; yes é | head -n 4095 | tr -d '\\n'; echo
x 1000000; echo; echo end\n";
    let id = world.script("long@1", script, &agent).await;
    world.wait_phase(id, "completed").await;
    let pieces = stored(&world, id).await;
    let (text, dropped) = read(&pieces, "stdout");
    let exact = [
        "x".repeat(8_197),
        "x".repeat(20_000),
        "é".repeat(4_095),
        String::new(),
    ];
    let exact = exact.join("\n");
    assert!(text.starts_with(exact.as_bytes()), "{pieces:?}");
    assert!(text.ends_with(b"x\nend\n"));
    let rest = text.len() as u64 + dropped.1 - exact.len() as u64;
    assert_eq!(rest, 1_000_000 + 1 + 4, "dropped {dropped:?}");
    agent.leave().await;
}

#[tokio::test]
async fn a_prompt_and_a_bar_are_seen_while_the_program_goes_on() {
    let (world, agent) = of_any_program().await;
    let go = world.folder.path().join("go");
    let script = format!(
        "printf 'name? '; while [ ! -e '{}' ]; do sleep 0.05; done; echo
i=0; while [ $i -le 100 ]; do printf '\\r%s %%' $i; sleep 0.02; i=$((i + 1)); done; echo\n",
        go.display()
    );
    let id = world.script("bar@1", &script, &agent).await;
    let first = poll("the prompt to be stored", async || {
        stored(&world, id).await.into_iter().next()
    })
    .await;
    assert_eq!((&first.bytes[..], first.part), (&b"name? "[..], true));
    std::fs::write(&go, "").unwrap();
    world.wait_phase(id, "completed").await;
    let pieces = stored(&world, id).await;
    let (text, dropped) = read(&pieces, "stdout");
    let bar: String = (0..=100).map(|i| format!("\r{i} %")).collect();
    assert_eq!(String::from_utf8(text).unwrap(), format!("name? \n{bar}\n"));
    assert_eq!(dropped, (0, 0));
    let bar = &pieces[2..];
    let took = bar[bar.len() - 1].at.micros() - bar[0].at.micros();
    let took = Duration::from_micros(took.try_into().unwrap());
    let most = 4.0 * took.as_secs_f64() + 2.0;
    assert!(
        bar.len() > 2 && bar.len() as f64 <= most,
        "{} in {took:?}",
        bar.len()
    );
    agent.leave().await;
}

#[tokio::test]
async fn a_drop_at_the_end_is_told_in_lines_and_bytes() {
    let (world, agent) = of_any_program().await;
    let id = world.script("burst@1", "seq 1 3000\n", &agent).await;
    world.wait_phase(id, "completed").await;
    let pieces = stored(&world, id).await;
    let (text, dropped) = read(&pieces, "stdout");
    let written: String = (1..=3_000).map(|i| format!("{i}\n")).collect();
    let lines = text.iter().filter(|b| **b == b'\n').count() as u64;
    assert!(text.ends_with(b"\n2999\n3000\n"), "the last words are kept");
    assert!(dropped.0 > 0, "a burst is over the budget");
    assert_eq!(lines + dropped.0, 3_000);
    assert_eq!(text.len() as u64 + dropped.1, written.len() as u64);
    agent.leave().await;
}

/// A program that prints lines until it is told to stop. Returns the bytes that it has written, and
/// its longest wait.
fn printing(
    mut pipe: std::fs::File,
    stop: Arc<AtomicBool>,
) -> std::thread::JoinHandle<(u64, Duration)> {
    std::thread::spawn(move || {
        let line = [&[b'x'; 999][..], b"\n"].concat();
        let (mut written, mut longest) = (0, Duration::ZERO);
        while !stop.load(Ordering::Relaxed) {
            let since = Instant::now();
            pipe.write_all(&line).unwrap();
            longest = longest.max(since.elapsed());
            written += line.len() as u64;
            // Over the budget, and slow enough for a machine that does other things.
            std::thread::sleep(Duration::from_micros(500));
        }
        (written, longest)
    })
}

#[tokio::test]
async fn a_broker_that_reads_nothing_blocks_no_program_and_the_loss_is_counted() {
    /// Enough to fill the socket and the queue of the connection in about a second.
    const PROGRAMS: usize = 12;
    const STOPPED: Duration = Duration::from_secs(8);
    const WAIT: Duration = Duration::from_secs(4);
    let world = World::start().await;
    let stop = Arc::new(AtomicBool::new(false));
    let node = NodeId::new("n1").unwrap();
    let mut programs = Vec::new();
    for _ in 0..PROGRAMS {
        let logs = Logs::new(&world.broker, &node);
        let (ours, theirs) = rustix::pipe::pipe().unwrap();
        logs.follow(ours, LogStream::Stdout).unwrap();
        let id = ExecutionId(uuid::Uuid::now_v7());
        logs.serve(&world.tenant, id, 1, 0, [0, 0]);
        programs.push((logs, id, printing(theirs.into(), stop.clone())));
    }
    let stopped = Stopped::now(&world);
    tokio::time::sleep(STOPPED).await;
    stop.store(true, Ordering::Relaxed);
    let mut ended = Vec::new();
    for (logs, id, program) in programs {
        let (written, longest) = program.join().unwrap();
        assert!(longest < WAIT, "a program has waited for {longest:?}");
        ended.push((logs, id, written));
    }
    drop(stopped);
    for (logs, id, written) in ended {
        logs.rest().await;
        let what = format!("{written} bytes of {id} are stored or counted");
        let dropped = poll(&what, async || {
            let (text, dropped) = read(&stored(&world, id).await, "stdout");
            (text.len() as u64 + dropped.1 == written).then_some(dropped.1)
        })
        .await;
        assert!(dropped > 0, "nothing was dropped");
    }
}
