//! What foreign programs do wrong, and what comes of it: named, bounded, ended.

use std::time::{Duration, Instant};

use fiec_kit::frames::Report;
use fiec_schemas::{Fault, StartError};
use serde_json::json;

use crate::harness::{Child, Made, Next, json_lines, runs, state_dir, until};

#[track_caller]
fn fails(made: &Made, permanent: bool, words: &[&str]) {
    let outcome = Child::outcome(&made.package, &json!({}), None);
    let (found, reason) = outcome.failure();
    assert_eq!(found, permanent, "{reason}");
    for word in words {
        assert!(reason.contains(word), "{word:?} is not in: {reason}");
    }
}

fn fault_of(made: &Made) -> Fault {
    let outcome = Child::outcome(&made.package, &json!({}), None);
    outcome.fault().unwrap().clone()
}

#[test]
fn each_end_of_a_process_is_charged_to_whom_it_belongs() {
    let end = |script: &str| fault_of(&state_dir(script, json!({})));
    assert_eq!(end("exit 3"), Fault::Exited { status: 3 });
    assert_eq!(end("kill -KILL $$"), Fault::Signalled { signal: 9 });
    // What a script does not find is its own fault. What `env` is to start for it is not.
    assert_eq!(end("no-such-command-here"), Fault::Exited { status: 127 });
    let mut made = state_dir("exit 0", json!({}));
    made.package.manifest.entry = vec!["env".to_owned(), "no-such-command-here".to_owned()];
    let command = "env no-such-command-here".to_owned();
    let error = StartError::NotFound;
    assert_eq!(fault_of(&made), Fault::CannotStart { command, error });
    made.package.manifest.entry = vec!["no-such-command-here".to_owned()];
    let command = "no-such-command-here".to_owned();
    let error = StartError::NotFound;
    assert_eq!(fault_of(&made), Fault::CannotStart { command, error });
    made.package.manifest.entry = vec!["./missing.sh".to_owned()];
    assert_eq!(fault_of(&made), Fault::BrokenPackage);
    let made = json_lines("hear(); sys.exit(4)", json!({}));
    assert_eq!(fault_of(&made), Fault::Exited { status: 4 });
}

#[test]
fn an_exit_without_a_word_or_by_a_signal_is_a_crash() {
    for (script, words) in [
        (
            "echo no more disk >&2; exit 3",
            ["exit status 3", "no more disk"],
        ),
        ("kill -KILL $$", ["signal 9", "capsule 1"]),
        ("exit 1", ["exit status 1", "test@1"]),
    ] {
        fails(&state_dir(script, json!({})), false, &words);
    }
    for (script, words) in [
        (
            "hear(); sys.exit(4)",
            ["exit status 4", "before it completed"],
        ),
        ("hear(); sys.exit(0)", ["exit status 0", "capsule 1"]),
        (
            "os.kill(os.getpid(), 11)",
            ["signal 11", "before it completed"],
        ),
        (
            "hear(); link.close(); lines.close(); time.sleep(600)",
            ["closed its socket", "capsule 1"],
        ),
    ] {
        fails(&json_lines(script, json!({})), false, &words);
    }
    // One that never connects is seen to have ended.
    let mut made = json_lines("", json!({}));
    made.package.manifest.entry = vec!["true".to_owned()];
    fails(&made, false, &["exit status 0"]);
}

#[test]
fn a_failure_for_good_says_why() {
    let made = state_dir(
        "echo one >&2; echo 'column 3 is empty' >&2; exit 65",
        json!({}),
    );
    let outcome = Child::outcome(&made.package, &json!({}), None);
    assert_eq!(outcome.failure(), (true, "column 3 is empty"));
    for permanent in [true, false] {
        let script = format!(
            "hear(); say(**{{'is': 'failed', 'reason': 'no data', 'permanent': {}}})",
            if permanent { "True" } else { "False" }
        );
        let made = json_lines(&script, json!({}));
        let outcome = Child::outcome(&made.package, &json!({}), None);
        assert_eq!(outcome.failure(), (permanent, "no data"));
    }
}

#[test]
fn garbage_on_the_socket_is_shown_and_what_is_json_at_least_is_tried_again() {
    let garbage = r"hear(); lines.write(b'\x00\xff\xfe garbage\n'); lines.flush(); time.sleep(600)";
    fails(
        &json_lines(garbage, json!({})),
        true,
        &["not JSON", "garbage"],
    );
    for (written, words) in [
        (r#"b'{"is":"dance"}\n'"#, ["dance", "unknown variant"]),
        (
            r#"b'{"is":"state","state":"AA=="}\n'"#,
            ["\"state\"", "without a request"],
        ),
        (
            r#"b'{"is":"boundary","state":"%%"}\n'"#,
            ["base64", "test@1"],
        ),
    ] {
        let script = format!("hear(); lines.write({written}); lines.flush(); time.sleep(600)");
        fails(&json_lines(&script, json!({})), false, &words);
    }
}

#[test]
fn a_line_over_the_bound_is_refused_before_it_is_held() {
    let script = "hear()\nwhile True: lines.write(b'x' * 1000000)";
    fails(
        &json_lines(script, json!({})),
        true,
        &["a line of over", "limits.state_bytes", "xxxx"],
    );
}

#[test]
fn a_program_that_reaches_no_boundary_fails_with_the_name_of_its_limit() {
    let limits = json!({ "limits": { "boundary_ms": 300 } });
    for made in [
        state_dir("sleep 600", limits.clone()),
        state_dir("trap '' TERM; while :; do sleep 0.1; done", limits.clone()),
        json_lines("hear(); time.sleep(600)", limits.clone()),
    ] {
        fails(&made, true, &["limits.boundary_ms of 300", "capsule 1"]);
    }
    // Or it is waited for, where it says so.
    let made = state_dir(
        "sleep 0.4; exit 0",
        json!({ "limits": { "boundary_ms": 100, "on_silence": "wait" } }),
    );
    let outcome = Child::outcome(&made.package, &json!({}), None);
    assert_eq!(outcome.result().1, 1);
}

#[test]
fn a_state_over_its_limit_fails_with_the_name_of_the_limit() {
    let limits = json!({ "limits": { "state_bytes": 1000 } });
    let words = ["limits.state_bytes of 1000", "σ has"];
    let script = "head -c 2000 /dev/zero > $FIEC_STATE_DIR/big; exit 85";
    fails(&state_dir(script, limits.clone()), true, &words);
    let script = "hear(); say(**{'is': 'boundary', 'state': 'A' * 2000}); hear()";
    fails(&json_lines(script, limits), true, &words);
}

#[test]
fn outputs_outside_the_declaration_fail_with_their_name() {
    let outputs = json!({ "outputs": ["good-*"] });
    let script = "echo 1 > $FIEC_OUTPUTS/good-1; echo 2 > $FIEC_OUTPUTS/evil; exit 85";
    fails(
        &state_dir(script, outputs.clone()),
        true,
        &["\"evil\"", "does not declare", "good-*"],
    );
    let script = "run = hear(); open(run['outputs'] + '/evil', 'w').close()\n\
                  say(**{'is': 'completed', 'outputs': ['evil']})";
    fails(
        &json_lines(script, outputs.clone()),
        true,
        &["\"evil\"", "good-*"],
    );
    let script = "hear(); say(**{'is': 'completed', 'outputs': ['good-2']})";
    fails(
        &json_lines(script, outputs.clone()),
        true,
        &["good-2", "no such file"],
    );
    let script = "hear(); say(**{'is': 'completed', 'outputs': ['good-/../../params.json']})";
    fails(
        &json_lines(script, outputs.clone()),
        true,
        &["no such file"],
    );
    let script = "ln -s /etc/passwd $FIEC_OUTPUTS/good-3; exit 0";
    fails(
        &state_dir(script, outputs),
        true,
        &["good-3", "symbolic link"],
    );
}

#[test]
fn state_with_links_or_special_files_is_refused_by_name() {
    for (make, words) in [
        (
            "ln -s /etc/passwd $FIEC_STATE_DIR/l",
            ["\"l\"", "symbolic link"],
        ),
        ("mkfifo $FIEC_STATE_DIR/p", ["\"p\"", "named pipe"]),
        (
            "echo > $FIEC_STATE_DIR/a; ln $FIEC_STATE_DIR/a $FIEC_STATE_DIR/b",
            ["hard link", "only regular files"],
        ),
    ] {
        fails(
            &state_dir(&format!("{make}; exit 85"), json!({})),
            true,
            &words,
        );
    }
}

#[test]
fn processes_that_a_capsule_leaves_behind_are_ended_with_it() {
    let made = state_dir(
        "sleep 600 & echo $! > $FIEC_STATE_DIR/pid; exit 85",
        json!({}),
    );
    let child = Child::start();
    child.run(&made.package, &json!({}), None);
    let Next::Boundary(_, state) = child.next() else {
        panic!()
    };
    let files = fiec_kit::foreign::pack::list(&state).unwrap();
    let pid: u32 = std::str::from_utf8(files[0].1)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    // The boundary is reported once the group was ended.
    until("the end of the process left behind", || !runs(pid));
}

#[test]
fn a_program_goes_when_its_agent_does() {
    let made = json_lines(
        "run = hear()\nopen(run['params']['pid'], 'w').write(str(os.getpid()) + '\\n')\ntime.sleep(600)",
        json!({}),
    );
    let path = made.folder.path().join("pid");
    let child = Child::start();
    child.run(&made.package, &json!({ "pid": path }), None);
    let read = || std::fs::read_to_string(&path).unwrap_or_default();
    until("the program", || read().ends_with('\n'));
    let pid: u32 = read().trim().parse().unwrap();
    assert!(runs(pid));
    drop(child);
    assert!(!runs(pid));
}

#[test]
fn a_gigabyte_on_both_streams_takes_no_memory_of_the_child() {
    // In a process of its own, so that its memory and its streams are its own.
    if std::env::var_os("FIEC_TEST_PRINTS").is_some() {
        let made = state_dir(
            "head -c 1000000000 /dev/zero | tr '\\0' 'e' >&2; head -c 1000000000 /dev/zero; exit 85",
            json!({}),
        );
        let child = Child::start();
        child.run(&made.package, &json!({}), None);
        assert!(matches!(child.next(), Next::Boundary(..)));
        return;
    }
    let started = Instant::now();
    let mut process = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "faults::a_gigabyte_on_both_streams_takes_no_memory_of_the_child",
            "--exact",
            "--nocapture",
        ])
        .env("FIEC_TEST_PRINTS", "1")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let count = |mut from: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 20];
            let mut total = 0u64;
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                total += n as u64;
            }
            total
        })
    };
    let out = count(Box::new(process.stdout.take().unwrap()));
    let err = count(Box::new(process.stderr.take().unwrap()));
    // The largest that it ever was, read for as long as it lives.
    let mut peak = 0u64;
    let status = loop {
        let text = std::fs::read_to_string(format!("/proc/{}/status", process.id()));
        for line in text.unwrap_or_default().lines() {
            if let Some(kib) = line.strip_prefix("VmHWM:") {
                peak = peak.max(kib.trim().trim_end_matches(" kB").parse().unwrap());
            }
        }
        if let Some(status) = process.try_wait().unwrap() {
            break status;
        }
        assert!(started.elapsed() < Duration::from_secs(300));
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success());
    assert!(out.join().unwrap() >= 1_000_000_000);
    assert!(err.join().unwrap() >= 1_000_000_000);
    assert!(peak > 0 && peak < 100 * 1024, "{peak} KiB at its largest");
}

#[test]
fn an_entry_that_cannot_be_run_is_named() {
    let mut made = state_dir("exit 0", json!({}));
    made.package.manifest.entry = vec!["./missing.sh".to_owned()];
    fails(&made, true, &["./missing.sh", "no executable file"]);
    let mut made = state_dir("exit 0", json!({}));
    made.package.manifest.entry = vec!["no-such-command-here".to_owned()];
    fails(&made, false, &["no-such-command-here", "PATH has it"]);
    let path = made.folder.path().join("run.sh");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    made.package.manifest.entry = vec!["./run.sh".to_owned()];
    fails(&made, true, &["./run.sh", "ermission"]);
}

#[test]
fn a_result_that_is_no_json_or_too_large_is_refused() {
    fails(
        &state_dir("echo 'done!' > $FIEC_RESULT", json!({})),
        true,
        &["not JSON"],
    );
    fails(
        &state_dir(
            "head -c 1000000 /dev/zero | tr '\\0' 1 > $FIEC_RESULT",
            json!({}),
        ),
        true,
        &["262144 bytes", "make it an output"],
    );
}

#[test]
fn a_result_with_values_beyond_json_is_refused_for_good_and_the_place_named() {
    let big = "1180591620717411303425";
    fails(
        &state_dir(
            &format!("echo '{{\"v\": [{big}]}}' > $FIEC_RESULT"),
            json!({}),
        ),
        true,
        &["result.v[0]", "64 bits at most", big],
    );
    fails(
        &state_dir("echo '{\"v\": NaN}' > $FIEC_RESULT", json!({})),
        true,
        &["not JSON"],
    );
    for (value, words) in [
        ("2**70 + 1", ["result.v", big]),
        ("float('nan')", ["not JSON", "NaN"]),
        ("'a\\udc80'", ["not JSON", "surrogate"]),
    ] {
        let script = format!("hear(); say(**{{'is': 'completed', 'result': {{'v': {value}}}}})");
        fails(&json_lines(&script, json!({})), true, &words);
    }
}

#[test]
fn bytes_that_are_no_state_of_a_folder_are_refused_at_once() {
    let made = state_dir("exit 85", json!({}));
    let child = Child::start();
    child.run(&made.package, &json!({}), Some((3, b"something else")));
    let outcome = child.all();
    let (permanent, reason) = outcome.failure();
    assert!(permanent && reason.contains("FIECDIR1"), "{reason}");
    // And the child is good for the next run.
    child.run(&made.package, &json!({}), None);
    assert!(matches!(child.hear().0, Report::Began { .. }));
    assert!(matches!(child.next(), Next::Boundary(..)));
}

#[test]
fn a_folder_that_was_replaced_by_a_link_is_not_followed() {
    for (name, folder, status) in [
        ("state", "$FIEC_STATE_DIR", 85),
        ("outputs", "$FIEC_OUTPUTS", 85),
        ("outbox", "$FIEC_OUTBOX", 85),
        ("result", "$(dirname $FIEC_RESULT)", 0),
    ] {
        // A folder of the host, with what a run could read, emit, move away or remove.
        let host = tempfile::tempdir().unwrap();
        for file in ["id_ed25519", "result.json"] {
            std::fs::write(host.path().join(file), "4711").unwrap();
        }
        let script = format!(
            "[ \"$FIEC_BOUNDARY\" = 0 ] || exit 65; f=\"{folder}\"; mv \"$f\" \"$f.old\"; ln -s {} \"$f\"; exit {status}",
            host.path().display()
        );
        let made = state_dir(&script, json!({ "outputs": ["*"] }));
        let outcome = Child::outcome(&made.package, &json!({}), None);
        let seen = format!("{outcome:?}");
        assert!(
            !seen.contains("4711") && !seen.contains("id_ed25519"),
            "{name}: {seen}"
        );
        let (permanent, reason) = outcome.failure();
        let rule = format!("the folder {name} of the run is a symbolic link");
        assert!(permanent && reason.contains(&rule), "{name}: {reason}");
        for file in ["id_ed25519", "result.json"] {
            assert!(host.path().join(file).exists(), "{name}: {file} is gone");
        }
    }
}
