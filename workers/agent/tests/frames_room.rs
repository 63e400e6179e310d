//! Programs whose reports cannot be kept: of more bytes than there is room for, or with such values.

use fiec_schemas::{Event, Fault};
use serde_json::{Value, json};

use crate::common::{Running, World};

/// Speaks frames by itself. Reports what its parameters say, and goes on to send bytes.
const PROGRAM: &str = "from raw_frames import hear, say, sock

say({'is': 'ready'})
while True:
    order = hear()
    if order['is'] == 'run':
        break
params = order['params']
at = '2026-01-01T00:00:00Z'
if 'report' in params:
    say(params['report'], params['body'])
    sent = 0
    while True:
        sock.sendall(bytes(1 << 20))
        sent += 1 << 20
        with open(params['sent'], 'w') as file:
            file.write(str(sent))
say({'is': 'completed', 'capsules': 1, 'computing_since': at, 'computed_until': at,
       'result': {'n': 2 ** params.get('bits', 0)}})
hear()
";

const MIB: u64 = 1 << 20;

async fn with_a_program(limits: Value) -> (World, Running) {
    let world = World::start().await;
    let mut options = world.options("n1");
    options.allow_programs = vec!["*".to_owned()];
    let agent = world.agent_with(options).await;
    world.with_raw_frames(PROGRAM, &limits).await;
    (world, agent)
}

#[tokio::test]
async fn a_report_without_room_fails_its_program_before_its_bytes_are_read() {
    let (world, agent) = with_a_program(json!({ "state_bytes": MIB })).await;
    let boundary = |state: u64, outputs: u64| {
        json!({ "is": "boundary", "index": 1, "bytes": state, "compute_us": 1,
            "computed_at": "2026-01-01T00:00:00Z", "reason": "commit",
            "outputs": [{ "name": "o", "bytes": outputs }] })
    };
    for (report, body, word) in [
        (
            boundary(6 << 30, 0),
            6 << 30,
            "limits.state_bytes of 1048576",
        ),
        // Many that are small take as much.
        (boundary(MIB, 2 << 30), MIB + (2 << 30), "limit outputs"),
    ] {
        let sent = world.folder.path().join("sent");
        let params = json!({ "report": report, "body": body, "sent": sent });
        let line = json!({ "program": "x@1", "params": params, "retries": 3 });
        let id = world.submit(&line.to_string(), &agent).await;
        let last = world.wait_phase(id, "failed").await;
        let Some(Event::Failed { reason, fault, .. }) = last.events.last() else {
            panic!("{last:?}")
        };
        assert!(reason.contains(word) && reason.contains("x@1"), "{reason}");
        assert_eq!(fault.as_deref(), Some(&Fault::Limit));
        // What lay in the socket, and no more.
        let sent = std::fs::read_to_string(sent).unwrap_or_default();
        let sent: u64 = sent.parse().unwrap_or(0);
        assert!(sent <= 16 * MIB, "the worker has read {sent} bytes");
    }
    // A report that has no body by its nature is not believed to have one.
    let params = json!({ "report": { "is": "progress", "index": 1 }, "body": 6u64 << 30,
        "sent": world.folder.path().join("progress") });
    let line = json!({ "program": "x@1", "params": params, "retries": 0 });
    let id = world.submit(&line.to_string(), &agent).await;
    let last = world.wait_phase(id, "failed").await;
    let words = format!("{:?}", last.events);
    assert!(words.contains("where the report describes 0"), "{words}");
    // The next one computes.
    let id = world.submit(r#"{"program":"x@1"}"#, &agent).await;
    world.wait_phase(id, "completed").await;
    agent.leave().await;
}

#[tokio::test]
async fn a_result_that_cannot_be_kept_fails_its_program_at_once() {
    let (world, agent) = with_a_program(json!({})).await;
    let line = json!({ "program": "x@1", "params": { "bits": 70 }, "retries": 3 });
    let id = world.submit(&line.to_string(), &agent).await;
    let last = world.wait_phase(id, "failed").await;
    let Some(Event::Failed { reason, fault, .. }) = last.events.last() else {
        panic!("{last:?}")
    };
    assert!(
        reason.contains("result.n") && reason.contains("64 bits"),
        "{reason}"
    );
    assert_eq!(fault.as_deref(), Some(&Fault::WrongAnswer));
    assert_eq!(last.state.totals.crashes, 0);
    agent.leave().await;
}
