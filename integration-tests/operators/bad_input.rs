//! Input that breaks a rule: it is refused with file, line, field and rule; nothing else is
//! affected, and nothing is half-created.

use crate::stage::{Lab, audit, until, workers_with_history};
use fiec_schemas::Event;
use serde_json::json;

/// A line, the field that is named, and words of the rule.
const BAD_LINES: [(&str, &str, &[&str]); 22] = [
    (
        r#"{"id":"b1","program":"synthetic@1","colour":"red"}"#,
        "colour",
        &["unknown field"],
    ),
    (
        r#"{"id":"b2","program":"synthetic@1","params":{"capsules":1,"colour":1}}"#,
        "params",
        &["unknown field", "colour"],
    ),
    (
        r#"{"id":"b3","program":"synthetic@1","viability":{"memory":{"high":0.9,"low":0.5,"dwell_ms":1,"hi":1}}}"#,
        "viability.memory",
        &["unknown field", "hi"],
    ),
    (r#"{"id":"b4","program":7}"#, "program", &["string"]),
    (
        r#"{"id":"b5","program":"synthetic@1","retries":"often"}"#,
        "retries",
        &["often"],
    ),
    (
        r#"{"id":"b6","program":"synthetic@1","retries":-1}"#,
        "retries",
        &["-1"],
    ),
    (
        r#"{"id":"b7","program":"synthetic@1","params":{"capsules":1.5}}"#,
        "params.capsules",
        &["1.5"],
    ),
    (
        r#"{"id":"b8","program":"quantum@9"}"#,
        "program",
        &["does not exist", "cg@1"],
    ),
    (r#"{"id":"b9"}"#, "program", &["missing field"]),
    (
        r#"{"id":"a b","program":"synthetic@1"}"#,
        "id",
        &["128 characters"],
    ),
    (
        r#"{"id":"b11","program":"synthetic@1","viability":{"memory":{"high":-0.5,"low":0.1,"dwell_ms":1}}}"#,
        "viability.memory.high",
        &["above 0", "-0.5"],
    ),
    (
        r#"{"id":"b12","program":"synthetic@1","viability":{"memory":{"high":0.5,"low":-0.1,"dwell_ms":1}}}"#,
        "viability.memory.low",
        &["at least 0", "-0.1"],
    ),
    (
        r#"{"id":"b13","program":"synthetic@1","viability":{"thermal":{"high":0.5,"low":0.5,"dwell_ms":1}}}"#,
        "viability.thermal.low",
        &["below high"],
    ),
    (
        r#"{"id":"b14","program":"synthetic@1","viability":{"memory":{"high":0.5,"low":0.1,"dwell_ms":-1}}}"#,
        "viability.memory.dwell_ms",
        &["-1"],
    ),
    (
        r#"{"id":"b15","program":"cg@1","params":{"matrix":{"poisson2d":{"n":1}}}}"#,
        "params.matrix.poisson2d.n",
        &["2 to 20000"],
    ),
    (
        r#"{"id":"b16","program":"cg@1","params":{}}"#,
        "params",
        &["matrix"],
    ),
    (
        r#"{"id":"b17","program":"cg@1","params":{"matrix":{"file":"x.mtx"},"tolerance":0}}"#,
        "params.tolerance",
        &["above 0"],
    ),
    (
        r#"{"id":"b18","program":"synthetic@1""#,
        "",
        &["not valid JSON"],
    ),
    (
        r#"{"id":"b20","program":"synthetic@1","params":[3]}"#,
        "params",
        &["object"],
    ),
    (r#"["b19","sweep","synthetic@1"]"#, "", &["object"]),
    (
        r#"{"id":"b21","program":"synthetic@1","viability":{"memory":[0.9,0.5,1]}}"#,
        "viability.memory",
        &["must be an object"],
    ),
    (
        r#"{"id":"b22","program":"cg@1","params":{"matrix":{"poisson2d":[8]}}}"#,
        "params.matrix",
        &["must be an object"],
    ),
];

#[tokio::test]
async fn each_bad_line_is_refused_with_its_field_and_the_good_ones_go_on() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let good =
        |id: &str| format!(r#"{{"id":"{id}","program":"synthetic@1","params":{{"capsules":2}}}}"#);
    // Good lines stand before, between and after; a line of 2 MB is among the bad ones.
    let mut lines = vec![good("g0")];
    lines.extend(BAD_LINES.iter().map(|(line, ..)| (*line).to_owned()));
    lines.insert(8, good("g1"));
    lines.push(format!(
        r#"{{"id":"huge","program":"{}"}}"#,
        "x".repeat(2 << 20)
    ));
    lines.push(good("g2"));
    let file = lab.file("mixed.jsonl", lines.join("\n"));
    let name = file.display().to_string();

    let ran = lab.fiec(&["submit", "--wait", &name]).await.expect(2);
    let place = |line: &str| lines.iter().position(|l| l == line).unwrap() + 1;
    for (line, field, words) in BAD_LINES {
        let prefix = if field.is_empty() {
            format!("{name}: line {}: ", place(line))
        } else {
            format!("{name}: line {}, field {field}", place(line))
        };
        let said = ran.stderr.lines().find(|said| said.starts_with(&prefix));
        let said = said.unwrap_or_else(|| panic!("no {prefix:?} in\n{}", ran.stderr));
        assert!(
            words.iter().all(|word| said.contains(word)),
            "{words:?} in {said}"
        );
    }
    let huge = format!("{name}: line {}: the line has ", lines.len() - 1);
    assert!(ran.stderr.contains(&huge), "{huge} in\n{}", ran.stderr);
    assert_eq!(
        ran.stdout.lines().count(),
        3,
        "an id for each good line:\n{}",
        ran.stdout
    );

    for id in ["g0", "g1", "g2"] {
        lab.journal.ended(lab.id(id), "completed").await;
        assert!(ran.stdout.contains(&lab.id(id).to_string()));
    }
    lab.recorded(3).await;
    assert_eq!(
        lab.journal.by_execution().len(),
        3,
        "nothing else was created"
    );
    let all = i64::try_from(BAD_LINES.len()).unwrap();
    until(
        "every line that the service refused is in PostgreSQL",
        async || (lab.count("SELECT count(*) FROM rejections").await == all).then_some(()),
    )
    .await;
    let query = "SELECT DISTINCT tenant FROM rejections WHERE reason <> ''";
    assert_eq!(lab.sql(query).await.rows, [[Some("lab".to_owned())]]);
    let query = "SELECT count(*) FROM rejections WHERE field = 'viability.thermal.low' \
                 AND excerpt LIKE '%b13%'";
    assert_eq!(lab.count(query).await, 1);

    // The same as JSON, for scripts.
    let one = lab.file("one.jsonl", BAD_LINES[12].0);
    let ran = lab
        .fiec(&["submit", "--json", &one.display().to_string()])
        .await
        .expect(2);
    let answer = &ran.json_lines()[0];
    assert_eq!(answer["line"], 1);
    assert_eq!(answer["error"]["field"], "viability.thermal.low");
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn bad_lines_on_the_stream_are_rejected_and_files_that_are_none_are_named() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let missing = lab
        .fiec(&["submit", "/nonexistent/batch.jsonl"])
        .await
        .expect(2);
    assert!(
        missing.stderr.contains("/nonexistent/batch.jsonl"),
        "{missing:?}"
    );
    let empty = lab.file("empty.jsonl", "\n\n");
    let empty = lab
        .fiec(&["submit", &empty.display().to_string()])
        .await
        .expect(2);
    assert!(empty.stderr.contains("no submission"), "{empty:?}");
    let noise = lab.file("noise.bin", [0u8, 159, 146, 150, b'\n', 255, 254]);
    let noise = lab
        .fiec(&["submit", &noise.display().to_string()])
        .await
        .expect(2);
    assert!(
        noise.stderr.contains("line 1") && noise.stderr.contains("line 2"),
        "{noise:?}"
    );

    lab.publish_text("{\"program\":\"nope@1\"}\n{\"id\":\"s1\",\"program\":\"synthetic@1\"}\n{]")
        .await;
    lab.publish_text("not json at all").await;
    lab.journal.ended(lab.id("s1"), "completed").await;
    until(
        "the lines from the stream are in PostgreSQL with their place",
        async || {
            let query = "SELECT count(*) FROM rejections WHERE submission_seq IS NOT NULL";
            (lab.count(query).await == 3).then_some(())
        },
    )
    .await;
    let query = "SELECT line, field FROM rejections WHERE submission_seq IS NOT NULL ORDER BY 1, 2";
    let text = |t: &str| Some(t.to_owned());
    let rows = lab.sql(query).await.rows;
    assert_eq!(
        rows,
        [
            [text("1"), text("")],
            [text("1"), text("program")],
            [text("3"), text("")]
        ]
    );
    assert_eq!(lab.journal.by_execution().len(), 1);
    lab.none_ended().unwrap();
    lab.end().await;
}

/// A name, the file's text, the line at fault (0: the file as a whole) and words of the rule.
const BAD_MATRICES: [(&str, &str, u32, &str); 8] = [
    (
        "truncated",
        "%%MatrixMarket matrix coordinate real symmetric\n3 3 5\n1 1 4.0\n2 2 4.0\n",
        4,
        "truncated",
    ),
    (
        "non-square",
        "%%MatrixMarket matrix coordinate real general\n2 3 2\n1 1 4.0\n2 2 4.0\n",
        2,
        "square",
    ),
    (
        "out-of-range",
        "%%MatrixMarket matrix coordinate real symmetric\n2 2 3\n1 1 4.0\n2 2 4.0\n3 1 1.0\n",
        5,
        "outside",
    ),
    (
        "nan",
        "%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 4.0\n2 2 NaN\n",
        4,
        "not finite",
    ),
    (
        "not-symmetric",
        "%%MatrixMarket matrix coordinate real general\n2 2 4\n1 1 4.0\n2 2 4.0\n1 2 1.0\n2 1 2.0\n",
        6,
        "not symmetric",
    ),
    (
        "no-number",
        "%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 four\n2 2 4.0\n",
        3,
        "number",
    ),
    ("empty", "", 0, "empty"),
    ("no-header", "hello\n", 1, "header"),
];

#[tokio::test]
async fn a_bad_matrix_fails_its_execution_with_file_and_line_and_is_not_retried() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let submission = |id: &str, file: &str| json!({"id": id, "program": "cg@1", "params": {"matrix": {"file": file}}, "retries": 3});
    let mut lines = Vec::new();
    for (name, text, ..) in BAD_MATRICES {
        let file = lab.file(&format!("{name}.mtx"), text).display().to_string();
        lines.push(submission(name, &file).to_string());
    }
    let gone = lab.path("gone.mtx").display().to_string();
    lines.push(submission("gone", &gone).to_string());
    let batch = lab.file("matrices.jsonl", lines.join("\n"));
    let name = batch.display().to_string();
    let waited = lab.fiec(&["submit", "--wait", &name]).await.expect(1);
    for (name, .., rule) in BAD_MATRICES {
        let words = waited.stderr.lines().find(|l| l.starts_with(name));
        let words = words.unwrap_or_else(|| panic!("{name}: {waited:?}"));
        assert!(
            words.contains("failed: ") && words.contains(rule),
            "{words}"
        );
        let status = lab.fiec(&["status", name]).await.expect(0);
        assert!(status.stdout.contains(rule), "{status:?}");
    }

    for (name, _, line, rule) in BAD_MATRICES
        .into_iter()
        .chain([("gone", "", 0, "cannot be read")])
    {
        let id = lab.id(name);
        let last = lab.journal.ended(id, "failed").await;
        let file = lab.path(&format!("{name}.mtx")).display().to_string();
        let place = if line == 0 {
            file
        } else {
            format!("{file}:{line}")
        };
        let reason = last.message.events.iter().find_map(|event| match event {
            Event::Failed { reason, .. } => Some(reason.clone()),
            _ => None,
        });
        let reason = reason.unwrap();
        assert!(
            reason.contains(&place) && reason.contains(rule),
            "{name}: {reason}"
        );
        let ledger = lab.journal.of(id);
        audit(&ledger);
        assert_eq!(
            (last.state().totals.crashes, last.state().epoch),
            (0, 1),
            "{name}: retried"
        );
        let status = lab.fiec(&["status", name]).await.expect(0);
        assert!(status.stdout.contains("failed"), "{status:?}");
    }
    lab.recorded(BAD_MATRICES.len() + 1).await;
    let query =
        "SELECT count(*) FROM execution_summary WHERE phase = 'failed' AND failure LIKE '%.mtx%'";
    assert_eq!(lab.count(query).await, 9);

    // The node that refused them all is as good as before.
    let id = lab
        .publish("well", "cg@1", &json!({"matrix": {"poisson2d": {"n": 20}}}))
        .await;
    lab.journal.ended(id, "completed").await;
    lab.none_ended().unwrap();
    lab.end().await;
}
