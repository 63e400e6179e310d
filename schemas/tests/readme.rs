//! What the README shows can be submitted as it stands.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use fiec_schemas::Submission;
use fiec_schemas::programs::BUILT_IN;

/// The blocks of JSON in the README.
fn blocks(text: &str) -> Vec<&str> {
    let blocks = text.split("```json\n").skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

#[test]
fn the_submissions_in_the_readme_are_valid_and_name_programs_that_exist() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut seen = 0;
    for block in blocks(&text) {
        let stream = serde_json::Deserializer::from_str(block).into_iter::<serde_json::Value>();
        // A block that shows a part of a submission is no JSON by itself.
        for value in stream
            .map_while(Result::ok)
            .filter(|v| v.get("program").is_some())
        {
            let line = value.to_string();
            let submission = Submission::parse(line.as_bytes());
            let submission = submission.unwrap_or_else(|error| panic!("{error}: {line}"));
            let program = submission.program.as_str();
            assert!(
                BUILT_IN.contains(&program),
                "there is no program {program}: {line}"
            );
            seen += 1;
        }
    }
    assert!(seen >= 5, "only {seen} submissions were found");
}
