//! `fiec bench NAME --against BINARY` with scripts in place of builds: what each figure's verdict
//! is, in which order the builds run, how often, and with which arguments.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fiec_lab::bench::against::{Plan, Verdict, compare};

/// A build that notes its arguments in `log` and prints these lines.
fn build(folder: &Path, name: &str, lines: &str) -> PathBuf {
    let path = folder.join(name);
    let log = folder.join("log");
    let text = format!(
        "#!/bin/sh\necho \"{name} $*\" >> '{}'\ncat <<'END'\n{lines}\nEND\n",
        log.display()
    );
    script(&path, &text);
    path
}

/// Writes a script by a process of its own: a child that another test forks at this moment would
/// keep a file open that is written here, and the script could not be started.
fn script(path: &Path, text: &str) {
    let mut writer = Command::new("sh")
        .args(["-c", "cat > \"$1\" && chmod 755 \"$1\"", "sh"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = writer.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    assert!(writer.wait().unwrap().success());
}

fn figure(metric: &str, value: &str) -> String {
    format!(
        r#"{{"bench":"x","case":"c","metric":"{metric}","value":{value},"unit":"u","floor":null,"ratio":null}}"#
    )
}

fn plan<'a>(old: &'a Path, new: &'a Path) -> Plan<'a> {
    Plan {
        old,
        new,
        args: ["bench", "x", "--json"].map(Into::into).to_vec(),
        pairs: 10,
    }
}

#[tokio::test]
async fn builds_run_in_alternating_order_and_every_figure_has_its_verdict() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |figures: &[(&str, &str)]| {
        let lines: Vec<_> = figures.iter().map(|(m, v)| figure(m, v)).collect();
        lines.join("\n")
    };
    let old = lines(&[
        ("gap_p50_ms", "10"),
        ("gap_p99_ms", "10"),
        ("rows_per_s", "1000"),
        ("cpu_percent", "null"),
        ("resident_mb", "7"),
    ]);
    let new = lines(&[
        ("gap_p50_ms", "10.5"),
        ("gap_p99_ms", "10.5"),
        ("rows_per_s", "900"),
        ("cpu_percent", "1"),
        ("open_ms", "3"),
    ]);
    let old = build(folder.path(), "old", &old);
    let new = build(folder.path(), "new", &new);
    let all = compare(&plan(&old, &new), |_| ()).await.unwrap();
    let verdicts: Vec<_> = all.iter().map(|c| (c.metric.as_str(), c.verdict)).collect();
    assert_eq!(
        verdicts,
        [
            ("gap_p50_ms", Verdict::Worse),
            ("gap_p99_ms", Verdict::NotWorse),
            ("rows_per_s", Verdict::Worse),
            ("cpu_percent", Verdict::NotCompared),
            ("resident_mb", Verdict::NotCompared),
            ("open_ms", Verdict::NotCompared),
        ]
    );
    assert_eq!((all[0].low, all[0].high), (Some(1.05), Some(1.05)));
    assert!(all[0].chance.unwrap() > 0.95);
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    let runs: Vec<_> = log.lines().collect();
    let (o, n) = ("old bench x --json", "new bench x --json");
    assert_eq!(runs.len(), 20);
    assert_eq!(runs[..6], [o, n, n, o, o, n]);
}

#[tokio::test]
async fn an_undecided_figure_takes_forty_pairs_and_is_not_called_not_worse() {
    let folder = tempfile::tempdir().unwrap();
    let old = build(folder.path(), "old", &figure("rows_per_s", "100"));
    // Every second run of the new build is slow.
    let new = build(folder.path(), "new", "");
    let (slow, fast) = (figure("rows_per_s", "90"), figure("rows_per_s", "110"));
    let text = std::fs::read_to_string(&new).unwrap();
    let text = text.replace(
        "cat <<",
        &format!(
            "[ $(($(grep -c new '{}') % 2)) = 0 ] && echo '{slow}' || echo '{fast}'\ncat <<",
            folder.path().join("log").display()
        ),
    );
    std::fs::write(&new, text).unwrap();
    let all = compare(&plan(&old, &new), |_| ()).await.unwrap();
    let only = &all[0];
    assert_eq!((only.verdict, only.pairs), (Verdict::Undecided, 40));
    assert_eq!((only.low, only.high), (Some(0.9), Some(1.1)));
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert_eq!(log.lines().count(), 80);
}

#[tokio::test]
async fn a_run_that_fails_is_named_with_its_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let old = build(folder.path(), "old", "");
    let new = folder.path().join("new");
    script(&new, "#!/bin/sh\necho 'no such bench' >&2\nexit 2\n");
    let error = compare(&plan(&old, &new), |_| ()).await.unwrap_err();
    let words = format!("{error:#}");
    assert!(
        words.contains("no such bench") && words.contains("new"),
        "{words}"
    );
    let none = folder.path().join("none");
    let error = compare(&plan(&none, &new), |_| ()).await.unwrap_err();
    assert!(format!("{error:#}").contains("cannot start"), "{error:#}");
}
