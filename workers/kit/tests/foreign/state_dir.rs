//! A process per capsule.

use fiec_kit::foreign::pack;
use fiec_kit::frames::{Order, Reason, Report};
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use serde_json::{Value, json};

use crate::harness::{Child, Next, every, state_dir};

/// Sums 1 to `upto`, a number a capsule, with an output for each tenth and a result.
const SUM: &str = r#"
upto=$(sed 's/[^0-9]//g' "$FIEC_PARAMS")
n=0; sum=0
[ -f "$FIEC_STATE_DIR/at" ] && read -r n sum < "$FIEC_STATE_DIR/at"
[ "$n" = "$FIEC_BOUNDARY" ] || { echo "boundary is $FIEC_BOUNDARY, state says $n" >&2; exit 65; }
n=$((n + 1)); sum=$((sum + n))
if [ $((n % 10)) = 0 ]; then echo "$sum" > "$FIEC_OUTPUTS/tenth-$n"; fi
mkdir -p "$FIEC_STATE_DIR/deep/er"
echo "$n $sum" > "$FIEC_STATE_DIR/at"
echo "$sum" > "$FIEC_STATE_DIR/deep/er/copy"
echo "$n $upto sum is $sum" > "$FIEC_STATE_DIR/progress"
[ "$n" -lt "$upto" ] && exit 85
echo "{\"sum\": $sum}" > "$FIEC_RESULT"
"#;

fn sum() -> crate::harness::Made {
    state_dir(SUM, json!({ "outputs": ["tenth-*"] }))
}

#[test]
fn a_shell_program_goes_from_boundary_to_boundary_to_its_result() {
    let made = sum();
    let outcome = Child::outcome(&made.package, &json!({ "upto": 12 }), None);
    assert_eq!(outcome.result(), (&json!({ "sum": 78 }), 12));
    assert_eq!(outcome.boundaries.len(), 11);
    let (report, body) = &outcome.boundaries[9];
    assert_eq!(report.digest, Some(Digest::of(outcome.state(9))));
    assert_eq!(report.note.as_deref(), Some("sum is 55"));
    assert_eq!((report.index, report.of), (10, Some(12)));
    assert_eq!(report.outputs[0].name, "tenth-10");
    assert_eq!(&body[report.bytes as usize..], b"55\n");
    let files = pack::list(outcome.state(9)).unwrap();
    let names: Vec<_> = files
        .iter()
        .map(|(name, _)| name.to_str().unwrap())
        .collect();
    assert_eq!(names, ["at", "deep/er/copy", "progress"]);
}

#[test]
fn resumed_anywhere_in_another_child_it_comes_to_the_same_end() {
    let made = sum();
    let params = json!({ "upto": 6 });
    let whole = Child::outcome(&made.package, &params, None);
    for at in 0..5 {
        let rest = Child::outcome(
            &made.package,
            &params,
            Some((at as u64 + 1, whole.state(at))),
        );
        assert_eq!(rest.result(), whole.result(), "from boundary {}", at + 1);
        for (index, (report, body)) in rest.boundaries.iter().enumerate() {
            assert_eq!(report.index as usize, at + index + 2);
            assert_eq!(body, &whole.boundaries[at + index + 1].1);
        }
    }
}

#[test]
fn outputs_wait_for_the_commit_that_carries_them() {
    let made = sum();
    let child = Child::start();
    let params = json!({ "upto": 25 });
    child.run_with(&made.package, &params, None, every(7), Grant::default());
    let outcome = child.all();
    let carried: Vec<_> = outcome
        .boundaries
        .iter()
        .map(|(report, _)| {
            let names: Vec<_> = report.outputs.iter().map(|o| o.name.as_str()).collect();
            (report.index, names.join(" "))
        })
        .collect();
    let expected = [(7, ""), (14, "tenth-10"), (21, "tenth-20")];
    assert_eq!(carried, expected.map(|(at, name)| (at, name.to_owned())));
}

#[test]
fn one_child_serves_several_runs_each_from_clean_folders() {
    let made = sum();
    let child = Child::start();
    for upto in [3, 2, 3] {
        child.run(&made.package, &json!({ "upto": upto }), None);
        assert_eq!(child.all().result().1, upto);
    }
}

#[test]
fn a_program_is_told_of_a_yield_while_it_computes_and_may_come_to_a_boundary_sooner() {
    // Its only capsule would take for ever.
    let made = state_dir(
        r#"
[ -f "$FIEC_STATE_DIR/cause" ] && { echo 1 > "$FIEC_STATE_DIR/again"; exit 0; }
while [ ! -f "$FIEC_STATE_DIR/yield" ]; do sleep 0.02; done
cat "$FIEC_STATE_DIR/yield" > "$FIEC_STATE_DIR/cause"
exit 85
"#,
        json!({}),
    );
    let child = Child::start();
    child.run(&made.package, &json!({}), None);
    assert!(matches!(child.hear().0, Report::Began { .. }));
    child.order_yield(None);
    let Next::Boundary(report, body) = child.next() else {
        panic!("no boundary")
    };
    assert_eq!((report.reason, report.index), (Reason::Yield, 1));
    let files = pack::list(&body[..report.bytes as usize]).unwrap();
    let files: Vec<_> = files
        .iter()
        .map(|(name, text)| (name.to_str().unwrap(), *text))
        .collect();
    assert_eq!(files, [("cause", &b"memory pressure"[..])]);
    child.run(&made.package, &json!({}), Some((1, &body)));
    assert_eq!(child.all().result(), (&Value::Null, 2));
}

#[test]
fn a_yield_that_is_not_due_yet_comes_at_its_boundary() {
    let made = sum();
    let child = Child::start();
    child.run_with(
        &made.package,
        &json!({ "upto": 9 }),
        None,
        every(1_000),
        Grant::default(),
    );
    child.send(&Order::Yield(fiec_kit::frames::Yield {
        at: Some(4),
        ..Default::default()
    }));
    let outcome = child.all();
    assert_eq!(outcome.boundaries.len(), 1);
    assert_eq!(outcome.boundaries[0].0.index, 4);
}

#[test]
fn after_the_deadline_a_boundary_that_it_still_reaches_counts_and_nothing_else() {
    for (trap, counts) in [
        ("trap 'echo saved > $FIEC_STATE_DIR/s; exit 85' TERM", true),
        ("", false),
    ] {
        let script = format!("{trap}\nwhile :; do sleep 0.02; done");
        let made = state_dir(&script, json!({}));
        let child = Child::start();
        child.run(&made.package, &json!({}), None);
        assert!(matches!(child.hear().0, Report::Began { .. }));
        child.order_yield(Some(2_000));
        let outcome = child.all();
        if counts {
            assert_eq!(pack::list(outcome.state(0)).unwrap()[0].1, b"saved\n");
        } else {
            let (permanent, reason) = outcome.failure();
            assert!(
                !permanent && reason.contains("within the 2000 ms"),
                "{reason}"
            );
        }
    }
}

#[test]
fn a_cancel_ends_a_capsule_in_its_middle_even_one_that_ignores_sigterm() {
    for trap in ["", "trap '' TERM"] {
        let made = state_dir(&format!("{trap}\nwhile :; do sleep 0.02; done"), json!({}));
        let child = Child::start();
        child.run(&made.package, &json!({}), None);
        assert!(matches!(child.hear().0, Report::Began { .. }));
        child.send(&Order::Cancel);
        assert!(matches!(child.next(), Next::End(Report::Cancelled, _)));
    }
}

#[test]
fn the_grant_and_the_environment_are_what_was_promised() {
    let made = state_dir(
        r#"
[ -d "$FIEC_INPUTS" ] && cp "$FIEC_INPUTS/in.txt" "$FIEC_OUTPUTS/copy"
[ "$PWD" -ef "$(dirname "$0")" ] || [ "$(pwd -P)" = "$(cd "$(dirname "$0")" && pwd -P)" ] || exit 65
env | grep -c NATS_URL >&2
[ "$(dirname "$FIEC_OUTPUTS")/result/result.json" = "$FIEC_RESULT" ] || exit 65
[ -n "$FIEC_EXECUTION" ] || exit 65
printf '%s' "$FIEC_GRANT" > "$FIEC_RESULT"
"#,
        json!({ "outputs": ["copy"] }),
    );
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("in.txt"), "input").unwrap();
    let child = Child::start_in(data.path());
    let grant = Grant {
        threads: Some(3),
        cpus: vec![0],
        ..Grant::default()
    };
    child.run_with(&made.package, &json!({}), None, every(1), grant.clone());
    let outcome = child.all();
    assert_eq!(outcome.result().0, &serde_json::to_value(&grant).unwrap());
    assert_eq!(outcome.end.unwrap().1, b"input");
}

#[test]
fn a_new_grant_holds_from_the_next_boundary_on() {
    let made = state_dir(
        r#"
printf '%s' "$FIEC_GRANT" > "$FIEC_STATE_DIR/grant"
[ "$FIEC_BOUNDARY" -lt 200 ] && case "$FIEC_GRANT" in *'"threads":7'*) ;; *) exit 85 ;; esac
cp "$FIEC_STATE_DIR/grant" "$FIEC_RESULT"
"#,
        json!({}),
    );
    let child = Child::start();
    child.run(&made.package, &json!({}), None);
    let Next::Boundary(report, body) = child.next() else {
        panic!()
    };
    assert_eq!(report.index, 1);
    assert_eq!(pack::list(&body).unwrap()[0].1, b"{}");
    let grant = Grant {
        threads: Some(7),
        ..Grant::default()
    };
    child.send(&Order::Reconfigure { grant });
    assert_eq!(child.all().result().0, &json!({ "threads": 7 }));
}

#[test]
fn objects_that_parameters_name_are_fetched_and_lie_under_their_digests() {
    let made = state_dir(r#"cat "$FIEC_OBJECTS"/* > "$FIEC_RESULT""#, json!({}));
    let bytes = b"{\"pushed\": true}";
    let digest = Digest::of(bytes);
    let params = json!({ "where": [{ "object": digest }] });
    for error in [None, Some("no such object")] {
        let child = Child::start();
        child.run(&made.package, &params, None);
        let (report, _) = child.hear();
        assert_eq!(report, Report::Fetch { digest, bytes: 0 });
        let data = Order::Data {
            digest,
            error: error.map(str::to_owned),
            permanent: true,
        };
        let body: &[u8] = if error.is_none() { bytes } else { b"" };
        fiec_kit::frames::write(&child.socket, &data, &[body]).unwrap();
        let outcome = child.all();
        match error {
            None => assert_eq!(outcome.result().0, &json!({ "pushed": true })),
            Some(error) => {
                let (permanent, reason) = outcome.failure();
                assert!(permanent && reason.contains(error), "{reason}");
            }
        }
    }
}
