//! `fiec up`: what ends is started again, what ran there goes on, and its end is the end of all.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::process::{ExitStatus, Stdio};

use crate::stage::{
    BINARY, Journal, PATIENCE, args, audit, checker, digest_of, overdue, proc,
    undisturbed_synthetic, until,
};
use fiec::client;
use fiec::context::UpFile;
use fiec_broker::{Broker, ConnectOptions};
use fiec_schemas::messages::Viability;
use fiec_schemas::{ClientId, ExecutionId, InstanceId, NodeId, Tenant};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout};
use tokio::time::timeout;

fn mode(path: &std::path::Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// A running `fiec up` with a folder of its own, in which it also says where it is.
struct Up {
    child: Child,
    pid: u32,
    /// Open, so that it can go on printing.
    _stdout: Lines<BufReader<ChildStdout>>,
    broker: Broker,
    pool: PgPool,
    folder: tempfile::TempDir,
}

impl Up {
    async fn start(more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        let log = std::fs::File::create(folder.path().join("up.log")).unwrap();
        let mut child = tokio::process::Command::new(BINARY)
            .args(["up", "--json", "--data-dir", data.to_str().unwrap()])
            .args(args(more))
            .env("XDG_RUNTIME_DIR", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = timeout(PATIENCE, stdout.next_line()).await.unwrap();
        let first = first.unwrap().unwrap_or_else(|| {
            let log = std::fs::read_to_string(folder.path().join("up.log"));
            panic!("it ended before it was ready: {log:?}")
        });
        let said: Value = serde_json::from_str(&first).unwrap();
        let url = said["nats"].as_str().unwrap().to_owned();
        let file = folder.path().join("fiec").join("up.json");
        assert_eq!(mode(&file), 0o600, "it holds passwords");
        // Without the password, as another user of the machine would come: `--allow-program '*'`
        // would run their programs as this user.
        let (_, address) = url.split_once('@').expect("a password in the URL");
        let stranger = ConnectOptions::new(format!("nats://{address}"), "stranger");
        let refused = Broker::connect(stranger).await.unwrap_err().to_string();
        assert!(refused.contains("authorization violation"), "{refused}");
        for name in ["nats", "logs"] {
            assert_eq!(mode(&data.join(name)), 0o700, "{name}");
        }
        // `fiec up` prints the reader's URL. The owner's URL is in the file only.
        let database = said["database"].as_str().unwrap();
        assert!(database.starts_with("postgres://fiec_reader:"), "{said}");
        let up: UpFile = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        Self {
            pid: child.id().unwrap(),
            pool: PgPool::connect(up.owner.expose()).await.unwrap(),
            child,
            _stdout: stdout,
            broker: Broker::connect(ConnectOptions::new(url, "test"))
                .await
                .unwrap(),
            folder,
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("up.log")).unwrap()
    }

    /// Process and instance of a viable worker.
    async fn worker(&self, node: &NodeId) -> Option<(u32, InstanceId)> {
        let reply = client::me(&self.broker).nodes().await.ok()?;
        let found = reply
            .nodes
            .into_iter()
            .find(|n| n.descriptor.node == *node)?;
        let descriptor = found.descriptor;
        (found.viability == Viability::Viable).then_some((descriptor.pid, descriptor.instance))
    }
}

/// Sends SIGTERM to a `fiec up` and waits for its end.
async fn terminate(up: &mut Child) -> ExitStatus {
    let pid = Pid::from_raw(up.id().unwrap().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    timeout(PATIENCE, up.wait()).await.unwrap().unwrap()
}

#[tokio::test]
async fn a_killed_worker_is_started_again_while_its_execution_goes_on_and_sigterm_ends_everything()
{
    let mut up = Up::start(&["--workers", "2", "--revive-seconds", "1"]).await;
    let journal = Journal::open(&up.broker);
    let tenant = Tenant::new("lab").unwrap();
    let params = json!({"capsules": 2_000, "rest_us": 5_000, "state_bytes": 4_096});
    let submission = json!({"id": "moved", "program": "synthetic@1", "params": params,
        "commit": {"every": 10}});
    let lines = submission.to_string().into();
    let reply = client::me(&up.broker)
        .submit(&tenant, lines, false)
        .await
        .unwrap();
    assert!(reply.errors.is_empty(), "{reply:?}");
    let id = ExecutionId::from_client(&tenant, &ClientId::new("moved").unwrap());
    let node = journal.computing(id, 3).await;

    let (killed, before) = up.worker(&node).await.unwrap();
    assert!(proc::descendants(up.pid).contains(&killed));
    proc::kill(killed);
    let what = "it computes on the other node";
    let epoch = journal
        .find(id, what, |line| {
            line.started_on().filter(|now| *now != node)?;
            Some(line.state().epoch)
        })
        .await;
    assert_eq!(epoch, 2);
    let again = until("the killed worker is viable again", async || {
        let (pid, instance) = up.worker(&node).await?;
        (instance != before).then_some(pid)
    })
    .await;
    assert_ne!(again, killed);
    assert!(proc::descendants(up.pid).contains(&again));
    assert!(proc::is_alive(again) && !proc::is_alive(killed));
    let log = up.log();
    let told = |words: &str| {
        log.lines()
            .any(|l| l.contains(node.as_str()) && l.contains(words))
    };
    assert!(told("ended (signal: 9") && told("started again"), "{log}");

    let last = journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);
    audit(&journal.of(id));
    // What came back is as good as what was there.
    let pinned = json!({"id": "after", "program": "synthetic@1", "requires": {"nodes": [node]}});
    let lines = pinned.to_string().into();
    client::me(&up.broker)
        .submit(&tenant, lines, false)
        .await
        .unwrap();
    let id = ExecutionId::from_client(&tenant, &ClientId::new("after").unwrap());
    journal.ended(id, "completed").await;

    overdue::nobody_is_overdue(&up.broker, &[], overdue::PATIENCE)
        .await
        .unwrap();
    let found = checker::check(&up.broker, Some(&up.pool), &journal, &[]).await;
    assert_eq!(found, Ok(Vec::new()));
    drop(journal);
    up.pool.close().await;
    let all = proc::descendants(up.pid);
    // Two workers, a policy service, a recorder, the broker, the database.
    assert!(all.len() >= 6, "{all:?}");
    let status = terminate(&mut up.child).await;
    assert_eq!(status.code(), Some(0), "{}", up.log());
    let left: Vec<_> = all.into_iter().filter(|pid| proc::is_alive(*pid)).collect();
    assert!(left.is_empty(), "still alive: {left:?}");
    // Neither is anything that was started after the count, or that has changed its parent.
    let named = proc::naming(up.folder.path().to_str().unwrap());
    assert!(named.is_empty(), "still alive: {named:?}");
    let told = std::fs::read_dir(up.folder.path().join("fiec")).unwrap();
    assert_eq!(told.count(), 0, "it leaves no password behind");
}

#[tokio::test]
async fn a_second_cluster_takes_nothing_over() {
    let up = Up::start(&["--workers", "1"]).await;
    let inside = |name: &str| up.folder.path().join(name);
    let named = || {
        let file = std::fs::read(inside("fiec").join("up.json")).unwrap();
        serde_json::from_slice::<UpFile>(&file).unwrap().pid
    };
    let mut second = tokio::process::Command::new(BINARY)
        .args(["up", "--workers", "1", "--data-dir"])
        .arg(inside("second"))
        .env("XDG_RUNTIME_DIR", up.folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(inside("second.log")).unwrap())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let log = || std::fs::read_to_string(inside("second.log")).unwrap();
    let mut stdout = BufReader::new(second.stdout.take().unwrap()).lines();
    let mut said = String::new();
    while !said.contains("Ctrl-C") {
        let line = timeout(PATIENCE, stdout.next_line()).await.unwrap();
        said += &line
            .unwrap()
            .unwrap_or_else(|| panic!("it ended early: {}", log()));
        said.push('\n');
    }
    let words = format!(
        "Another cluster of yours runs here (process {}), and",
        up.pid
    );
    assert!(said.contains(&words), "{said}");
    assert_eq!(named(), up.pid, "while the second one runs");
    let status = terminate(&mut second).await;
    assert_eq!(status.code(), Some(0), "{}", log());
    assert_eq!(named(), up.pid, "after the second one's end");
}

/// The password of a URL.
fn password(url: &str) -> String {
    let (login, _) = url.split_once('@').unwrap();
    login.rsplit_once(':').unwrap().1.to_owned()
}

/// The values that a service of libpq's file has.
fn service(file: &std::path::Path, name: &str) -> PgConnectOptions {
    let text = std::fs::read_to_string(file).unwrap();
    let lines = text.lines().skip_while(|line| *line != format!("[{name}]"));
    let values = lines.skip(1).map_while(|line| line.split_once('='));
    let values: BTreeMap<_, _> = values.collect();
    PgConnectOptions::new_without_pgpass()
        .host(values["host"])
        .port(values["port"].parse().unwrap())
        .database(values["dbname"])
        .username(values["user"])
        .password(values["password"])
}

/// What every user of the machine can read of all its processes.
fn command_lines() -> Vec<String> {
    let all = std::fs::read_dir("/proc").unwrap();
    let all = all.filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok());
    all.map(|bytes| String::from_utf8_lossy(&bytes).replace('\0', " "))
        .collect()
}

/// Neither on those of its own processes nor on those of the commands that it prints.
#[tokio::test]
async fn no_password_stands_on_a_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let inside = |name: &str| folder.path().join(name);
    // In the place of the usual tools: they stay until they are ended.
    std::fs::create_dir(inside("bin")).unwrap();
    for tool in ["psql", "nats"] {
        let tool = inside("bin").join(tool);
        std::fs::write(&tool, "#!/bin/sh\necho runs\nread -r end\n").unwrap();
        std::fs::set_permissions(&tool, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let mut up = tokio::process::Command::new(BINARY)
        .args(["up", "--workers", "1", "--data-dir"])
        .arg(inside("data"))
        .env("XDG_RUNTIME_DIR", folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(inside("up.log")).unwrap())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(up.stdout.take().unwrap()).lines();
    let mut said = Vec::new();
    while !said.iter().any(|line: &String| line.contains("Ctrl-C")) {
        let line = timeout(PATIENCE, stdout.next_line()).await.unwrap();
        let log = std::fs::read_to_string(inside("up.log")).unwrap();
        said.push(
            line.unwrap()
                .unwrap_or_else(|| panic!("it ended early: {log}")),
        );
    }

    // The commands that it prints, in a shell that has read the variables that it prints.
    let printed = |start: &str| {
        let all = said.iter().filter_map(|line| line.strip_prefix("  "));
        let all = all.filter(|line| line.starts_with(start));
        all.map(str::to_owned).collect::<Vec<_>>()
    };
    std::fs::write(inside("variables"), printed("export ").join("\n")).unwrap();
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", inside("bin").display());
    let mut tools = Vec::new();
    for command in [printed("psql "), printed("nats ")].concat() {
        let (command, _) = command.split_once(" < ").unwrap_or((&command, ""));
        let mut tool = tokio::process::Command::new("/bin/sh")
            .args(["-ec", &format!(". ./variables; exec {command}")])
            .current_dir(folder.path())
            .env("PATH", &path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut runs = BufReader::new(tool.stdout.take().unwrap()).lines();
        let runs = timeout(PATIENCE, runs.next_line()).await.unwrap();
        assert_eq!(runs.unwrap().as_deref(), Some("runs"), "{command}");
        tools.push(tool);
    }
    assert_eq!(tools.len(), 3, "{said:#?}");

    let told = std::fs::read_to_string(inside("fiec").join("up.json")).unwrap();
    let told: BTreeMap<String, Value> = serde_json::from_str(&told).unwrap();
    let urls = told.values().filter_map(Value::as_str);
    let passwords: Vec<String> = urls.filter(|url| url.contains('@')).map(password).collect();
    assert!(passwords.len() >= 2, "{passwords:?}");
    let lines = command_lines();
    assert!(lines.iter().any(|line| line.contains("/bin/psql ")));
    for password in &passwords {
        let shown = lines.iter().find(|line| line.contains(password));
        assert_eq!(shown, None, "every user of the machine can read it");
    }

    let services = inside("fiec").join("pg_service.conf");
    assert_eq!(mode(&services), 0o600);
    for (name, role) in [("fiec", "fiec_reader"), ("fiec_recorder", "fiec_recorder")] {
        let pool = PgPool::connect_with(service(&services, name))
            .await
            .unwrap();
        let who: String = sqlx::query_scalar("SELECT current_user::text")
            .fetch_one(&pool)
            .await
            .unwrap();
        assert_eq!(who, role);
    }
}
