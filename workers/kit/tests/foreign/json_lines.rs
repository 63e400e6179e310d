//! A process that speaks JSON lines.

use fiec_kit::frames::{Order, Reason, Report};
use fiec_kit::{Asked, GrantChange, Reserve, Reserved};
use fiec_schemas::package::Grant;
use serde_json::{Value, json};

use crate::harness::{Child, Made, Next, every, json_lines};

/// Sums 1 to `upto`; answers for σ when it is asked, with an output since the last time.
const SUM: &str = r#"
run = hear()
n, total = unpack(run["state"]) if run["state"] else (0, 0)
assert run["is"] == "run" and (run["boundary"] or 0) == n
grants, made = [run["grant"]], []
while n < run["params"]["upto"]:
    n += 1
    total += n
    if n % 3 == 0:
        with open(os.path.join(run["outputs"], "third-%d" % n), "w") as out:
            out.write(str(total))
        made.append("third-%d" % n)
    say(**{"is": "boundary", "of": run["params"]["upto"], "note": "sum %d" % total})
    while True:
        told = hear()
        if told["is"] == "go":
            break
        if told["is"] == "state":
            say(**{"is": "state", "state": pack([n, total]), "outputs": made})
            made = []
        if told["is"] == "reconfigure":
            grants.append(told["grant"])
        if told["is"] in ("yield", "cancel"):
            if "left" in run["params"]:
                with open(run["params"]["left"], "w") as out:
                    out.write(json.dumps(told))
            sys.exit(0)
say(**{"is": "completed", "result": {"sum": total, "grants": grants}, "outputs": made})
"#;

fn sum() -> Made {
    json_lines(SUM, json!({ "outputs": ["third-*"] }))
}

#[test]
fn a_python_program_goes_from_boundary_to_boundary_to_its_result() {
    let made = sum();
    let outcome = Child::outcome(&made.package, &json!({ "upto": 5 }), None);
    assert_eq!(outcome.result(), (&json!({ "sum": 15, "grants": [{}] }), 6));
    assert_eq!(outcome.boundaries.len(), 5);
    assert_eq!(outcome.state(4), b"[5, 15]");
    let (report, body) = &outcome.boundaries[2];
    assert_eq!(report.note.as_deref(), Some("sum 6"));
    assert_eq!(report.of, Some(5));
    assert_eq!(report.outputs[0].name, "third-3");
    assert_eq!(&body[report.bytes as usize..], b"6");
}

#[test]
fn resumed_anywhere_in_another_child_it_comes_to_the_same_end() {
    let made = sum();
    let params = json!({ "upto": 4 });
    let whole = Child::outcome(&made.package, &params, None);
    for at in 0..4 {
        let rest = Child::outcome(
            &made.package,
            &params,
            Some((at as u64 + 1, whole.state(at))),
        );
        assert_eq!(rest.result(), whole.result(), "from boundary {}", at + 1);
    }
}

#[test]
fn where_no_commit_is_due_no_state_is_asked_for() {
    let made = json_lines(
        r#"
run = hear()
asked = 0
for _ in range(30):
    say(**{"is": "boundary"})
    while True:
        told = hear()
        if told["is"] == "go":
            break
        asked += 1
        say(**{"is": "state", "state": pack(asked)})
say(**{"is": "completed", "result": asked})
"#,
        json!({}),
    );
    let child = Child::start();
    child.run_with(&made.package, &json!({}), None, every(10), Grant::default());
    let outcome = child.all();
    assert_eq!(outcome.result(), (&json!(3), 31));
}

#[test]
fn state_that_comes_with_a_boundary_is_not_asked_for_again() {
    let made = json_lines(
        r#"
run = hear()
for n in range(3):
    say(**{"is": "boundary", "state": pack(n)})
    assert hear()["is"] == "go"
say(**{"is": "completed"})
"#,
        json!({}),
    );
    let outcome = Child::outcome(&made.package, &json!({}), None);
    assert_eq!(outcome.result(), (&Value::Null, 4));
    assert_eq!(outcome.state(2), b"2");
}

#[test]
fn a_yield_reaches_it_with_its_cause_and_a_cancel_as_cancel() {
    // One that is computing when a cancel comes is asked to end by SIGTERM; this one goes on to
    // its boundary and is told there.
    let script = format!("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SUM}");
    let made = json_lines(&script, json!({ "outputs": ["third-*"] }));
    let left = made.folder.path().join("left.json");
    for (order, expected) in [
        (None, json!({ "is": "yield", "cause": "memory pressure" })),
        (Some(Order::Cancel), json!({ "is": "cancel" })),
    ] {
        let child = Child::start();
        let params = json!({ "upto": 1_000_000_000, "left": left });
        child.run_with(&made.package, &params, None, every(1), Grant::default());
        assert!(matches!(child.next(), Next::Boundary(..)));
        let cancels = order.is_some();
        match order {
            None => child.order_yield(None),
            Some(order) => child.send(&order),
        }
        let outcome = child.all();
        match outcome.end {
            Some((Report::Cancelled, _)) => assert!(cancels),
            None => assert_eq!(outcome.boundaries.last().unwrap().0.reason, Reason::Yield),
            other => panic!("{other:?}"),
        }
        // The child has let it end by itself before it takes the next order.
        drop(child);
        let told: Value = serde_json::from_slice(&std::fs::read(&left).unwrap()).unwrap();
        assert_eq!(told, expected);
        std::fs::remove_file(&left).unwrap();
    }
}

#[test]
fn a_new_grant_is_told_at_a_boundary() {
    let made = json_lines(
        r#"
run = hear()
told = {"is": "go"}
while told["is"] != "reconfigure":
    say(**{"is": "boundary", "state": pack(0)})
    told = hear()
assert hear()["is"] == "go"
say(**{"is": "completed", "result": [run["grant"], told["grant"]]})
"#,
        json!({}),
    );
    let child = Child::start();
    let grant = |threads| Grant {
        threads: Some(threads),
        ..Grant::default()
    };
    child.run_with(&made.package, &json!({}), None, every(1), grant(2));
    assert!(matches!(child.next(), Next::Boundary(..)));
    child.send(&Order::Reconfigure { grant: grant(1) });
    assert_eq!(
        child.all().result().0,
        &json!([{ "threads": 2 }, { "threads": 1 }])
    );
}

#[test]
fn megabytes_of_state_pass_both_ways() {
    let made = json_lines(
        r#"
run = hear()
state = base64.b64decode(run["state"]) if run["state"] else b"x" * 20000000
say(**{"is": "boundary", "state": base64.b64encode(state + b"y").decode()})
hear()
say(**{"is": "completed", "result": len(state)})
"#,
        json!({}),
    );
    let first = Child::outcome(&made.package, &json!({}), None);
    assert_eq!(first.state(0).len(), 20_000_001);
    let second = Child::outcome(&made.package, &json!({}), Some((1, first.state(0))));
    assert_eq!(second.result().0, &json!(20_000_001));
}

#[test]
fn a_program_asks_where_it_is_and_for_another_grant_within_its_capsule() {
    let made = json_lines(
        r#"
run = hear()
say(**{"is": "surroundings"})
around = hear()
say(**{"is": "ask", "threads": 2})
asked = hear()
say(**{"is": "reserve", "memory_bytes": 8192})
got = hear()
free = around["offers"]["nodes"][0]["free_slots"]
said = [got["is"], got["answer"], got["grant"]["memory_bytes"]]
say(**{"is": "completed", "result": [around["node"], free, asked["answer"], asked["reason"], said]})
"#,
        json!({}),
    );
    let child = Child::start();
    child.run(&made.package, &json!({}), None);
    let until = |is: fn(&Report) -> bool| while !is(&child.hear().0) {};
    until(|r| *r == Report::Surroundings);
    let around = json!({ "node": "n1", "offers": { "at": "2026-05-01T12:00:00.000001Z", "nodes":
        [{ "node": "n2", "free_slots": 3, "slots": 4, "cores": 8 }] } });
    let around = serde_json::from_value(around).unwrap();
    child.send(&Order::Surroundings(around));
    until(|r| *r == Report::Ask(GrantChange::threads(2)));
    child.send(&Order::Asked(Asked::Refused {
        reason: "busy".to_owned(),
    }));
    until(|r| *r == Report::Reserve(Reserve::memory(8192)));
    let grant = Grant {
        memory_bytes: Some(8192),
        ..Grant::default()
    };
    child.send(&Order::Reserved(Reserved::Granted { grant }));
    let outcome = child.all();
    let reserved = json!(["reserved", "granted", 8192]);
    assert_eq!(
        outcome.result().0,
        &json!(["n1", 3, "refused", "busy", reserved])
    );
}
