//! What programs see of their worker, whatever their protocol.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use async_nats::jetstream::consumer::{AckPolicy, pull};
use fiec_schemas::subjects;
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use super::python_program::package;
use crate::stage::python::success;
use crate::stage::{Lab, workers};

/// Tells what it sees of its worker.
const SEEN: &str = "import json, os, resource

def text(path):
    try:
        with open(path, 'rb') as file:
            return file.read().decode('utf-8', 'replace')
    except OSError as error:
        return type(error).__name__

def parents():
    pid = os.getppid()
    while pid > 1:
        yield pid
        fields = text(f'/proc/{pid}/stat').rpartition(')')[2].split()
        pid = int(fields[1]) if fields else 0

def files():
    folder = '/proc/self/fd'
    for name in os.listdir(folder):
        try:
            yield os.readlink(os.path.join(folder, name))
        except OSError:
            pass

def seen():
    status = dict(line.split(':\\t', 1) for line in text('/proc/self/status').splitlines()
                  if ':\\t' in line)
    return {
        'names': sorted(line.partition('=')[0]
                        for line in text('/proc/self/environ').split('\\0') if line),
        'hub': os.environ.get('HUB'),
        'devices': os.environ.get('CUDA_VISIBLE_DEVICES'),
        'environments': [text('/proc/self/environ')]
            + [text(f'/proc/{pid}/environ') for pid in parents()],
        'files': list(files()),
        'no_new_privs': int(status['NoNewPrivs']),
        'blocked_signals': int(status['SigBlk'], 16),
        'core': resource.getrlimit(resource.RLIMIT_CORE),
        'nofile': resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        'expendable': int(text('/proc/self/oom_score_adj')),
        'parent_expendable': int(text(f'/proc/{os.getppid()}/oom_score_adj')),
    }
";

const BY_THE_KIT: &str = "
import fiec

def main(run):
    for _ in run.steps(until=1):
        pass
    return seen()

fiec.main(main)
";

const BY_FILES: &str = "
with open(os.environ['FIEC_RESULT'], 'w') as file:
    json.dump(seen(), file)
";

/// The secret of the worker's environment.
const SECRET: &str = "s3cr3t";

#[tokio::test]
async fn a_program_sees_no_secret_and_no_file_of_its_worker_and_gains_no_privilege() {
    let mut lab = Lab::start(workers(1)).await;
    // The parent of the worker leaves this file open.
    let open = std::fs::File::create(lab.path("left-open")).unwrap();
    rustix::io::fcntl_setfd(&open, rustix::io::FdFlags::empty()).unwrap();
    let path = path();
    let environment = [
        ("PATH", path.as_str()),
        ("NATS_URL", SECRET),
        ("PGPASSWORD", SECRET),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("HUB", "hub"),
        ("FIEC_PASS_ENV", "HUB"),
        ("FIEC_ALLOW_PROGRAM", "see-*@1"),
    ];
    let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let node = lab.start_worker_in(&environment).unwrap();
    let pid = lab.worker(&node).pid();
    let inherited = std::fs::read_link(format!("/proc/{pid}/fd/{}", open.as_raw_fd())).unwrap();
    assert!(inherited.ends_with("left-open"), "{inherited:?}");
    drop(open);

    for (protocol, rest, own) in [
        (
            "frames",
            BY_THE_KIT,
            &["FIEC_INPUT_DIRS", "FIEC_SOCKET_FD"][..],
        ),
        ("json_lines", BY_THE_KIT, &["FIEC_SOCKET"]),
        ("state_dir", BY_FILES, &["FIEC_STATE_DIR"]),
    ] {
        let text = format!("{SEEN}{rest}");
        let seen = result_of(&lab, protocol, &text, &json!({})).await;
        let text = seen.to_string();
        assert!(!text.contains(SECRET), "{protocol}: {text}");
        assert!(!text.contains("left-open"), "{protocol}: {text}");
        // The worker is among its parents, and cannot be read.
        let environments = seen["environments"].as_array().unwrap();
        assert!(
            environments.contains(&json!("PermissionError")),
            "{protocol}: {text}"
        );
        check_names(&seen["names"], protocol, own);
        assert_eq!(seen["hub"], "hub", "{protocol}");
        assert_eq!(seen["devices"], "", "{protocol}");
        assert_eq!(seen["no_new_privs"], 1, "{protocol}");
        // Forks inherit the mask, and nobody could end them by SIGTERM.
        assert_eq!(seen["blocked_signals"], 0, "{protocol}");
        assert_eq!(seen["core"], json!([0, 0]), "{protocol}");
        assert!(
            seen["nofile"].as_u64().unwrap() <= 65_536,
            "{protocol}: {text}"
        );
        // When memory is short, the kernel ends the program before its parent, which ends the rest.
        let expendable = |whose: &str| seen[whose].as_i64().unwrap();
        let inherited = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
        let inherited: i64 = inherited.trim().parse().unwrap();
        assert_eq!(expendable("expendable"), inherited.max(500), "{text}");
        assert_eq!(
            expendable("parent_expendable"),
            inherited.max(250),
            "{text}"
        );
    }
    lab.end().await;
}

/// What a program finds of the variables of its submission. It shows nobody the secret itself.
const FOUND: &str = "import hashlib, json, os

def text(path):
    try:
        with open(path, 'rb') as file:
            return file.read()
    except OSError:
        return b''

def seen():
    token = os.environ['TOKEN'].encode()
    commands = [text(f'/proc/{pid}/cmdline') for pid in os.listdir('/proc') if pid.isdigit()]
    return {
        'plain': os.environ['PLAIN'],
        'token': hashlib.sha256(token).hexdigest(),
        'shown': any(token in command for command in commands),
        'threads': [os.environ[name] for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS',
                                                  'MKL_NUM_THREADS')],
    }
";

#[tokio::test]
async fn a_secret_of_a_node_reaches_the_program_that_names_it_and_no_message() {
    let mut lab = Lab::start(workers(1)).await;
    let secrets = lab.path("secrets");
    std::fs::create_dir_all(&secrets).unwrap();
    std::fs::write(secrets.join("hub.token"), format!("{SECRET}\n")).unwrap();
    let allow = ("FIEC_ALLOW_PROGRAM".to_owned(), "see-*@1".to_owned());
    let path = ("PATH".to_owned(), path());
    // It allows the program, but has no such file.
    let without = lab.start_worker_in(&[allow.clone(), path.clone()]).unwrap();
    let folder = secrets.display().to_string();
    let secrets = ("FIEC_SECRET_DIR".to_owned(), folder);
    let node = lab.start_worker_in(&[allow, path, secrets]).unwrap();

    let env = json!({"TOKEN": {"file": "hub.token"}, "PLAIN": "a \"b\" 'c'",
        "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"});
    let line = json!({"env": env, "requires": {"nodes": [without, node]}});
    for (protocol, rest) in [
        ("frames", BY_THE_KIT),
        ("json_lines", BY_THE_KIT),
        ("state_dir", BY_FILES),
    ] {
        let found = result_of(&lab, protocol, &format!("{FOUND}{rest}"), &line).await;
        let expected = json!({
            "plain": "a \"b\" 'c'",
            "token": sha256_of(SECRET),
            "shown": false,
            "threads": ["3", "3", "2"],
        });
        assert_eq!(found, expected, "{protocol}");
    }
    for stream in [subjects::LEDGER_STREAM, subjects::LOG_STREAM] {
        for message in messages(&lab, stream).await {
            assert!(!message.contains(SECRET), "{stream}: {message}");
        }
    }
    for process in &lab.workers {
        assert!(!process.tail(usize::MAX).contains(SECRET));
    }
    lab.end().await;
}

fn sha256_of(text: &str) -> String {
    let mut command = std::process::Command::new("python3");
    command.args([
        "-c",
        "import hashlib, sys; print(hashlib.sha256(sys.argv[1].encode()).hexdigest())",
        text,
    ]);
    success(command.output().unwrap()).0.trim().to_owned()
}

/// The messages of a stream.
async fn messages(lab: &Lab, stream: &str) -> Vec<String> {
    let config = pull::Config {
        ack_policy: AckPolicy::None,
        ..Default::default()
    };
    let consumer = lab.broker.js.create_consumer_on_stream(config, stream);
    let consumer = consumer.await.unwrap();
    let there = usize::try_from(consumer.cached_info().num_pending).unwrap();
    assert!(stream != subjects::LEDGER_STREAM || there > 0);
    let messages = consumer.fetch().max_messages(there).messages().await;
    let messages = messages.unwrap().map(|message| {
        let message = message.unwrap();
        String::from_utf8_lossy(&message.payload).into_owned()
    });
    messages.collect().await
}

/// Submits a program with the rest of its line, and returns its result.
async fn result_of(lab: &Lab, protocol: &str, text: &str, rest: &Value) -> Value {
    let folder = lab.path(protocol);
    std::fs::create_dir_all(&folder).unwrap();
    let script = lab.file(&format!("{protocol}.py"), text);
    let name = Path::new(&script).file_name().unwrap().to_str().unwrap();
    package(&folder, &script, &["python3", "-B", name], protocol, &[]);
    let program = format!("see-{}@1", protocol.replace('_', "-"));
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", &program, &folder])
        .await
        .expect(0);
    let mut line = json!({"id": protocol, "program": program});
    let fields = line.as_object_mut().unwrap();
    fields.extend(rest.as_object().unwrap().clone());
    let id = lab.publish_json(&line).await;
    lab.journal.ended(id, "completed").await;
    let ran = lab.fiec(&["result", &id.to_string()]).await.expect(0);
    serde_json::from_str(&ran.stdout).unwrap()
}

/// A path whose `python3` is the interpreter itself: another may be a script that adds variables.
fn path() -> String {
    let mut asked = std::process::Command::new("python3");
    asked.args([
        "-c",
        "import os, sys; print(os.path.dirname(sys.executable))",
    ]);
    let (folder, _) = success(asked.output().unwrap());
    format!("{}:{}", folder.trim(), std::env::var("PATH").unwrap())
}

/// Each variable is one that the page of programs names.
fn check_names(names: &Value, protocol: &str, own: &[&str]) {
    let names: BTreeSet<&str> = names
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    let page = crate::stage::python::root().join("workers/CONTRACT.md");
    let page = std::fs::read_to_string(page).unwrap();
    for name in &names {
        assert!(
            name.starts_with("LC_")
                || *name == "HUB"
                || page.contains(&format!("`{name}`"))
                || page.contains(&format!("`${name}`")),
            "{protocol}: {name} is not on the page"
        );
    }
    for name in own {
        assert!(
            names.contains(name),
            "{protocol}: {name} is not in {names:?}"
        );
    }
}
