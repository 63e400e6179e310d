//! What programs of packages emit travels with the next boundary that is committed.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fiec_kit::frames::{Emit, Report};
use serde_json::json;

use crate::harness::{Child, Outcome, json_lines, state_dir};

fn said(emits: &[Emit]) -> Vec<(String, u64, u32, String)> {
    let text = |data: &str| String::from_utf8(STANDARD.decode(data).unwrap()).unwrap();
    emits
        .iter()
        .map(|e| (e.name.clone(), e.boundary, e.index, text(&e.data)))
        .collect()
}

fn last(outcome: &Outcome) -> &[Emit] {
    match &outcome.end {
        Some((Report::Completed { emits, .. }, _)) => emits,
        end => panic!("not completed: {end:?}"),
    }
}

fn is(name: &str, boundary: u64, index: u32, text: &str) -> (String, u64, u32, String) {
    (name.to_owned(), boundary, index, text.to_owned())
}

#[test]
fn files_in_the_outbox_of_a_state_folder_are_emitted_in_the_order_of_their_names() {
    let script = r#"
n=$((FIEC_BOUNDARY + 1))
[ -z "$(ls "$FIEC_OUTBOX")" ] || exit 65
echo "b$n" > "$FIEC_OUTBOX/beta"; echo "a$n" > "$FIEC_OUTBOX/alpha.1"
printf again > "$FIEC_OUTBOX/alpha.2"
[ $n -lt 2 ] && exit 85
exit 0
"#;
    let made = state_dir(script, json!({}));
    let outcome = Child::outcome(&made.package, &json!({}), None);
    assert_eq!(
        said(&outcome.boundaries[0].0.emits),
        [
            is("alpha", 1, 0, "a1\n"),
            is("alpha", 1, 1, "again"),
            is("beta", 1, 2, "b1\n")
        ]
    );
    assert_eq!(said(last(&outcome)).len(), 3);
    assert_eq!(said(last(&outcome))[0], is("alpha", 2, 0, "a2\n"));
}

#[test]
fn lines_emit_text_and_bytes_with_a_boundary_and_with_the_end() {
    let script = r#"
hear()
say(**{"is": "boundary", "emit": [{"name": "a", "text": "one"}, {"name": "b", "data": "dHdv"}]})
while (told := hear())["is"] != "go":
    say(**{"is": "state", "state": pack(1)})
say(**{"is": "completed", "emit": [{"name": "a", "text": "end"}]})
"#;
    let made = json_lines(script, json!({}));
    let outcome = Child::outcome(&made.package, &json!({}), None);
    assert_eq!(
        said(&outcome.boundaries[0].0.emits),
        [is("a", 1, 0, "one"), is("b", 1, 1, "two")]
    );
    assert_eq!(said(last(&outcome)), [is("a", 2, 0, "end")]);
}

#[test]
fn what_cannot_be_emitted_is_a_failure_that_says_why() {
    for (script, word) in [
        (
            "echo x > \"$FIEC_OUTBOX/a b\"; exit 85",
            "\"a b\" must be 1 to 64",
        ),
        (
            "i=0; while [ $i -lt 129 ]; do echo > \"$FIEC_OUTBOX/a.$i\"; i=$((i+1)); done; exit 85",
            "more than 128 messages",
        ),
        (
            "head -c 300000 /dev/zero > \"$FIEC_OUTBOX/a\"; exit 85",
            "262144 bytes",
        ),
    ] {
        let made = state_dir(script, json!({}));
        let outcome = Child::outcome(&made.package, &json!({}), None);
        let (permanent, reason) = outcome.failure();
        assert!(permanent && reason.contains(word), "{reason}");
    }
    let neither = "hear(); say(**{\"is\": \"boundary\", \"emit\": [{\"name\": \"a\"}]}); hear()";
    let made = json_lines(neither, json!({}));
    let outcome = Child::outcome(&made.package, &json!({}), None);
    let (permanent, reason) = outcome.failure();
    assert!(permanent && reason.contains("both or neither"), "{reason}");
}
