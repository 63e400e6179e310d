//! The README: what it shows can be submitted as it stands, and its contents lead to its sections.
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

/// The headings outside of code, with their level.
fn headings(text: &str) -> Vec<(usize, &str)> {
    let mut in_code = false;
    let headings = text.lines().filter_map(|line| {
        in_code ^= line.starts_with("```");
        let name = line.trim_start_matches('#');
        let level = line.len() - name.len();
        (!in_code && level > 0).then(|| (level, name.trim()))
    });
    headings.collect()
}

/// How a link names a heading.
fn anchor(heading: &str) -> String {
    let text = heading.to_lowercase().replace(' ', "-");
    text.chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_'))
        .collect()
}

#[test]
fn the_contents_lead_to_the_sections_and_the_first_tour_shows_outputs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let text = std::fs::read_to_string(path).unwrap();
    let anchors: Vec<_> = headings(&text)
        .iter()
        .map(|(_, name)| anchor(name))
        .collect();
    let links = |text: &str| -> Vec<String> {
        let links = text.split("](#").skip(1);
        links
            .map(|rest| rest.split(')').next().unwrap().to_owned())
            .collect()
    };
    for link in links(&text) {
        assert!(anchors.contains(&link), "no heading for the link #{link}");
    }
    let (opening, _) = text.split_once("\n## ").unwrap();
    let contents = links(opening);
    let sections = headings(&text).into_iter().filter(|(level, _)| *level == 2);
    // "Two commands" follows the contents at once.
    for (_, name) in sections.skip(1) {
        let missing = format!("the contents do not name the section {name:?}");
        assert!(contents.contains(&anchor(name)), "{missing}");
    }
    let tour = text.split("## A cluster to work with").nth(1).unwrap();
    let tour = tour.split("\n#").next().unwrap();
    assert!(
        tour.contains("\nfiec output "),
        "the first tour shows no `fiec output`"
    );
}
