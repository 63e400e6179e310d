//! The numbers that programs of packages report travel with the next boundary that is committed.

use fiec_kit::frames::Report;
use fiec_schemas::series::Series;
use serde_json::{Value, json};

use crate::harness::{Child, Outcome, json_lines, state_dir};

fn written(series: &Series) -> Value {
    serde_json::to_value(series).unwrap()
}

fn last(outcome: &Outcome) -> &Series {
    match &outcome.end {
        Some((Report::Completed { numbers, .. }, _)) => numbers,
        end => panic!("not completed: {end:?}"),
    }
}

#[test]
fn the_file_of_a_state_folders_program_is_read_after_each_capsule_and_removed() {
    let script = r#"
n=$((FIEC_BOUNDARY + 1))
[ ! -e "$FIEC_NUMBERS" ] || exit 65
[ $n -eq 2 ] || echo "{\"loss\": 0.$n, \"val/acc\": \"NaN\"}" > "$FIEC_NUMBERS"
[ $n -lt 3 ] && exit 85
exit 0
"#;
    let made = state_dir(script, json!({}));
    let outcome = Child::outcome(&made.package, &json!({}), None);
    let all: Vec<Value> = outcome
        .boundaries
        .iter()
        .map(|b| written(&b.0.numbers))
        .collect();
    let first = json!({"loss": [[1, 0.1]], "val/acc": [[1, "NaN"]]});
    assert_eq!(all, [first, json!({})]);
    assert_eq!(
        written(last(&outcome)),
        json!({"loss": [[3, 0.3]], "val/acc": [[3, "NaN"]]})
    );
}

#[test]
fn lines_have_numbers_with_a_boundary_and_with_the_end() {
    let script = r#"
hear()
say(**{"is": "boundary", "numbers": {"loss": 0.5, "n": 7}})
while (told := hear())["is"] != "go":
    say(**{"is": "state", "state": pack(1)})
say(**{"is": "completed", "numbers": {"loss": 0.25}})
"#;
    let made = json_lines(script, json!({}));
    let outcome = Child::outcome(&made.package, &json!({}), None);
    let first = written(&outcome.boundaries[0].0.numbers);
    assert_eq!(first, json!({"loss": [[1, 0.5]], "n": [[1, 7.0]]}));
    assert_eq!(written(last(&outcome)), json!({"loss": [[2, 0.25]]}));
}

#[test]
fn what_is_no_number_is_a_failure_that_says_why() {
    for (wrote, word) in [
        (r#"{\"loss\": \"low\"}"#, "no JSON object of numbers"),
        ("loss 0.3", "no JSON object of numbers"),
        (r#"{\"a b\": 1}"#, "the name \"a b\" must be 1 to 64"),
    ] {
        let script = format!("echo \"{wrote}\" > \"$FIEC_NUMBERS\"; exit 85");
        let made = state_dir(&script, json!({}));
        let outcome = Child::outcome(&made.package, &json!({}), None);
        let (permanent, reason) = outcome.failure();
        assert!(permanent && reason.contains(word), "{wrote}: {reason}");
    }
    let large = "head -c 20000 /dev/zero | tr '\\0' ' ' > $FIEC_NUMBERS; exit 85";
    let made = state_dir(large, json!({}));
    let outcome = Child::outcome(&made.package, &json!({}), None);
    assert!(
        outcome.failure().1.contains("more than 16384 bytes"),
        "{outcome:?}"
    );
    let pipe = "mkfifo $FIEC_NUMBERS; exit 85";
    let made = state_dir(pipe, json!({}));
    let outcome = Child::outcome(&made.package, &json!({}), None);
    assert!(outcome.failure().0, "{outcome:?}");
}
