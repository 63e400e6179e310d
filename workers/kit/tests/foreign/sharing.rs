//! Programs of packages whose range of tiles is shared.

use fiec_kit::frames::{Merge, Order, Reason, Report, Shares};
use fiec_schemas::package::Grant;
use fiec_schemas::programs::TileRange;
use serde_json::{Value, json};

use crate::harness::{Child, Made, Next, every, json_lines, state_dir};

/// Squares of the tiles in order; says where its range ends.
const SQUARES: &str = r#"
run = hear()
tiles, shares = run["params"]["tiles"], run.get("spread") or {}
parts = shares.get("parts", 0)
done, end = unpack(run["state"]) if run["state"] else ([], tiles["to"])
merge = run.get("merge")
while merge or tiles["from"] + len(done) < end:
    if merge:
        done += unpack(merge["state"])[0] if merge["state"] else []
        end, merge = merge["to"], None
    else:
        done.append((tiles["from"] + len(done)) ** 2)
    if tiles["from"] + len(done) == end and not merge:
        break
    say(**{"is": "boundary", "of": tiles["to"]})
    while True:
        told = hear()
        if told["is"] == "go":
            break
        if told["is"] == "state":
            say(**{"is": "state", "state": pack([done, end])})
        if told["is"] == "split":
            gives = (end - tiles["from"] - len(done)) // 2
            if gives == 0:
                say(**{"is": "whole"})
            else:
                say(**{"is": "split", "from": end - gives, "to": end})
                end, parts = end - gives, parts + 1
state = None if run["params"].get("mute") else pack([done, end])
say(**{"is": "completed", "state": state, "result": done})
"#;

fn squares() -> Made {
    json_lines(SQUARES, json!({}))
}

fn tiles(from: u64, to: u64) -> Value {
    json!({ "tiles": { "from": from, "to": to } })
}

/// The last boundary, and the result behind it.
fn end(child: &Child) -> (u64, Vec<u8>, bool, Value) {
    loop {
        match child.next() {
            Next::Boundary(report, mut body) if report.reason == Reason::End => {
                body.truncate(usize::try_from(report.bytes).unwrap());
                let Next::End(Report::Completed { result, .. }, _) = child.next() else {
                    panic!("no completion behind the end")
                };
                return (report.index, body, report.merged, result);
            }
            Next::Boundary(..) => {}
            Next::End(report, _) => panic!("{report:?}"),
        }
    }
}

#[test]
fn a_program_of_lines_splits_ends_with_its_state_and_takes_a_part_back() {
    let made = squares();
    let whole = Child::outcome(&made.package, &tiles(0, 20), None);
    let child = Child::start();
    let given = || (every(1), Grant::default());
    let shares = Some(Shares::default());
    let (package, params) = (&made.package, tiles(0, 20));
    child.run_shared(package, &params, None, given(), (shares, None));
    child.send(&Order::Split);
    let (split, of) = loop {
        match child.next() {
            Next::Boundary(report, _) if report.split.is_some() => {
                break (report.split.unwrap(), report.of);
            }
            Next::Boundary(..) => {}
            Next::End(report, _) => panic!("{report:?}"),
        }
    };
    let TileRange { from, to } = split;
    assert!(from > 9 && to == 20, "{split:?}");
    assert_eq!(
        of,
        Some(from),
        "what was given away is no longer ahead of it"
    );
    let (index, state, merged, _) = end(&child);
    assert_eq!((index, merged), (from, false));

    let part = Some(Shares {
        part: true,
        parts: 0,
    });
    child.run_shared(package, &tiles(from, to), None, given(), (part, None));
    let (_, of_part, _, _) = end(&child);
    let merge = Merge {
        from,
        to,
        bytes: Some(of_part.len() as u64),
    };
    let returns = (shares, Some((merge, &of_part[..])));
    child.run_shared(package, &params, Some((index, &state)), given(), returns);
    let (at, _, merged, result) = end(&child);
    assert_eq!((at, merged), (index + 1, true));
    assert_eq!(&result, whole.result().0);
    // A part that did nothing: all of its tiles are done here, behind a boundary that says so.
    let merge = Merge {
        bytes: None,
        ..merge
    };
    let returns = (shares, Some((merge, &[][..])));
    child.run_shared(package, &params, Some((index, &state)), given(), returns);
    let outcome = child.all();
    assert!(outcome.boundaries[0].0.merged);
    assert_eq!(outcome.result().0, whole.result().0);
}

#[test]
fn a_program_that_keeps_its_last_state_to_itself_or_does_not_merge_fails_for_good() {
    let made = squares();
    let child = Child::start();
    let given = || (every(1), Grant::default());
    let part = Some(Shares {
        part: true,
        parts: 0,
    });
    let mut params = tiles(3, 5);
    params["mute"] = json!(true);
    child.run_shared(&made.package, &params, None, given(), (part, None));
    let outcome = child.all();
    let (permanent, reason) = outcome.failure();
    assert!(permanent && reason.contains("without its σ"), "{reason}");
    let made = state_dir("exit 0", json!({}));
    let merge = Merge {
        from: 3,
        to: 5,
        bytes: None,
    };
    let returns = (Some(Shares::default()), Some((merge, &[][..])));
    child.run_shared(&made.package, &json!({}), None, given(), returns);
    let outcome = child.all();
    let (permanent, reason) = outcome.failure();
    assert!(permanent && reason.contains("does not spread"), "{reason}");
}
