//! What every integration test needs: a private cluster of real processes, the real `fiec` binary,
//! and conditions to wait for. Nothing here sleeps for a guess.

#![allow(
    dead_code,
    unused_imports,
    reason = "each test file uses its own part of this module"
)]

pub mod journal;
pub mod proc;
pub mod python;
pub mod slow_link;

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fiec::sql::{self, Rows};
use fiec::ui::Steps;
use fiec_lab::cluster::{Cluster, ClusterOptions};
use fiec_lab::process::Process;
use fiec_schemas::duty::Actor;
use fiec_schemas::{ClientId, ExecutionId, NodeId, Signal, Tenant, subjects};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub use fiec_lab::judge::checker::{self, Exempt};
pub use fiec_lab::judge::{address_of, oracles, overdue};
pub use journal::{Journal, Line, audit, digest_of, gives_way};
use oracles::Scene;
use oracles::answers::{Answers, Said};
use oracles::objects::Collection;

/// The binary under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_fiec-lab");
/// How long anything may take before a test gives up; nothing waits this long when all is well.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Most age of a commit by time, by the longest interval that a worker has without an option.
const RECOVERY: Duration =
    oracles::recovery::bound(Duration::from_secs(60), Duration::from_secs(10));

/// Grace of the collection of objects without an option.
const COLLECTED_AFTER: Duration = Duration::from_secs(30 * 86_400);

/// Waits until the condition answers; panics with `what` when it does not in time.
pub async fn until<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match timeout_at(deadline, condition()).await {
            Ok(Some(found)) => return found,
            Ok(None) if Instant::now() < deadline => sleep(Duration::from_millis(20)).await,
            _ => panic!("waited {PATIENCE:?} in vain until {what}"),
        }
    }
}

/// How a command ended and what it said.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Panics, with all that was said, unless the exit code is this one.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(
            self.code, code,
            "stdout:\n{}\nstderr:\n{}",
            self.stdout, self.stderr
        );
        self
    }

    /// The lines of stdout as JSON.
    #[track_caller]
    pub fn json_lines(&self) -> Vec<Value> {
        self.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
    }
}

/// Runs a command to its end, under a deadline.
pub async fn run(mut command: tokio::process::Command) -> Ran {
    let output = timeout(PATIENCE, command.kill_on_drop(true).output())
        .await
        .unwrap_or_else(|_| panic!("{command:?} did not end within {PATIENCE:?}"))
        .unwrap();
    Ran {
        // A signal leaves no code.
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// What an HTTP server answers, head and body.
pub async fn get(address: &str, path: &str) -> String {
    fiec_lab::judge::get(address, path).await.unwrap()
}

/// Workers with one slot each and one policy service, without history.
pub fn workers(count: u32) -> ClusterOptions {
    ClusterOptions {
        workers: count,
        worker_args: slots(1),
        history: false,
        ..ClusterOptions::default()
    }
}

/// Workers of so many slots, against whose nodes round trips and stalls of a busy machine do not
/// count.
pub fn slots(count: u32) -> Vec<String> {
    let mut all = args(&["--slots", &count.to_string()]);
    for calm in ["latency=1:0.99:100", "memory_stall=1:0.99:100"] {
        all.extend(args(&["--threshold", calm]));
    }
    all
}

/// The same with PostgreSQL and a recorder.
pub fn workers_with_history(count: u32) -> ClusterOptions {
    ClusterOptions {
        history: true,
        ..workers(count)
    }
}

/// Owned arguments.
pub fn args(list: &[&str]) -> Vec<String> {
    list.iter().map(|arg| (*arg).to_owned()).collect()
}

/// A private cluster with a journal of its ledgers. When a test fails, the ends of all logs are
/// printed; the processes end with it in any case. A test ends with [`Lab::end`] or [`Lab::stop`];
/// one that does not fails.
pub struct Lab {
    cluster: Option<Cluster>,
    killed: Vec<Actor>,
    /// What the test does to the history on purpose.
    exempt: Vec<Exempt>,
    /// How long an overdue party has to act at the end of the test.
    pub patience: Duration,
    is_concluded: bool,
    pub journal: Journal,
    /// What clients were told.
    pub answers: Answers,
    pub tenant: Tenant,
    folder: tempfile::TempDir,
}

impl Lab {
    pub async fn start(options: ClusterOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let options = ClusterOptions {
            binary: Some(BINARY.into()),
            input_dirs: vec![folder.path().to_owned(), root],
            patience: PATIENCE,
            ..options
        };
        let cluster = Cluster::start(options, &Steps::new(true)).await.unwrap();
        let journal = Journal::open(&cluster.broker);
        Self {
            cluster: Some(cluster),
            killed: Vec::new(),
            exempt: Vec::new(),
            patience: overdue::PATIENCE,
            is_concluded: false,
            journal,
            answers: Answers::default(),
            tenant: Tenant::new("lab").unwrap(),
            folder,
        }
    }

    /// The test has killed these on purpose: at its end they may be overdue.
    pub fn killed_on_purpose(&mut self, actors: &[Actor]) {
        self.killed.extend_from_slice(actors);
    }

    /// The test damages the history so: rules that cannot hold then are left out at its end.
    pub fn exempt(&mut self, damage: Exempt) {
        self.exempt.push(damage);
    }

    /// Concludes the test, and kills everything.
    pub async fn end(mut self) {
        self.conclude().await;
    }

    /// Concludes the test, and stops everything in order, so that nothing of the workers stays
    /// behind.
    pub async fn stop(mut self) {
        self.conclude().await;
        self.cluster.take().unwrap().stop().await;
    }

    /// Asserts that nobody is overdue, that every promise holds, and that the history keeps its
    /// rules. A test that then stops a server calls it itself.
    pub async fn conclude(&mut self) {
        if std::mem::replace(&mut self.is_concluded, true) {
            return;
        }
        let found = overdue::nobody_is_overdue(&self.broker, &self.killed, self.patience).await;
        if let Err(who) = found {
            panic!("at the end of the test: {who}");
        }
        let policies = self.policies.iter_mut();
        let policies = policies.filter_map(|p| p.ended().is_none().then_some(()));
        let policies = policies.count();
        let mut found = oracles::settle(Scene {
            broker: &self.broker,
            journal: &self.journal,
            policies,
            answers: &self.answers,
            patience: self.patience,
            recovery: RECOVERY,
            copies: self.servers.nats_urls().len(),
            superseded: Duration::from_secs(150),
            collection: self.pool.as_ref().map(|pool| Collection {
                pool,
                grace: COLLECTED_AFTER,
            }),
        })
        .await;
        found.retain(|broken| !self.exempt.iter().any(|e| e.explains(broken.rule)));
        if !found.is_empty() {
            let healths = oracles::health::observe(&self.addresses()).await;
            let late = overdue::overdue(&self.broker, &self.killed).await;
            let is_late = late.is_ok_and(|late| !late.is_empty());
            found.extend(oracles::health::judge(&found, &healths, is_late));
        }
        let pool = self.pool.as_ref();
        let history = checker::check(&self.broker, pool, &self.journal, &self.exempt).await;
        let history = history.unwrap_or_else(|why| panic!("the history cannot be checked: {why}"));
        found.extend(history);
        let words: Vec<String> = found.iter().take(20).map(ToString::to_string).collect();
        assert!(
            found.is_empty(),
            "{} promises are broken:\n{}",
            found.len(),
            words.join("\n")
        );
    }

    /// Names and addresses of the services that say in their logs where they can be asked for their
    /// health.
    fn addresses(&self) -> Vec<(String, String)> {
        let services = self.workers.iter().chain(&self.policies);
        let services = services.chain(&self.recorder);
        let found = services.filter_map(|s| Some((s.name.clone(), address_of(s)?)));
        found.collect()
    }

    /// A `fiec` command that finds this cluster.
    pub fn command(&self, args: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(BINARY);
        command
            .args(args)
            .envs(self.environment(args.first().copied().unwrap_or_default()))
            .env("FIEC_TENANT", self.tenant.as_str())
            .env_remove("FIEC_LOG")
            .env_remove("FIEC_LOG_JSON")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// Starts a worker beside those of the cluster, by these words in place of the ordinary program. Its
    /// log is the file of its name.
    pub fn own_worker(&self, words: &[&str], node: &str) -> tokio::process::Child {
        let worker = self.command(&["worker", "--node", node, "--allow-program", "*", "--cold"]);
        let worker = worker.as_std();
        let environment = worker.get_envs();
        tokio::process::Command::new(words[0])
            .args(&words[1..])
            .args(worker.get_args())
            .arg("--run-dir")
            .arg(self.path(&format!("run-{node}")))
            .envs(environment.filter_map(|(name, value)| Some((name, value?))))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(self.path(&format!("{node}.log"))).unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap()
    }

    /// Runs a `fiec` command to its end. An answer that promises something is noted.
    pub async fn fiec(&self, args: &[&str]) -> Ran {
        let ran = run(self.command(args)).await;
        if ran.code == 0 {
            self.note_answer(args, &ran);
        }
        ran
    }

    fn note_answer(&self, args: &[&str], ran: &Ran) {
        let Some((verb, rest)) = args.split_first() else {
            return;
        };
        let said = match *verb {
            "pause" => Said::Paused,
            "resume" => Said::Resumed,
            "cancel" => Said::Cancelled,
            "retry" => Said::Retried,
            "submit" => {
                // It prints the ids of the accepted lines.
                let words = ran.stdout.split_whitespace();
                for id in words.filter_map(|word| word.parse().ok()) {
                    self.answers.note(id, Said::Accepted);
                }
                return;
            }
            _ => return,
        };
        // An answer about several executions at once counts them.
        if ran.stdout.starts_with(&format!("{verb}: ")) {
            return;
        }
        // With options a command may mean executions of another tenant.
        if rest.iter().any(|arg| arg.starts_with('-')) {
            return;
        }
        for name in rest {
            let id = name.parse().unwrap_or_else(|_| self.id(name));
            self.answers.note(id, said);
        }
    }

    /// Writes a file of the test's own.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, contents).unwrap();
        path
    }

    /// A path in the test's own folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The execution that a client's id names.
    pub fn id(&self, client: &str) -> ExecutionId {
        ExecutionId::from_client(&self.tenant, &ClientId::new(client).unwrap())
    }

    /// Publishes one submission to the stream under a client's id.
    pub async fn publish(&self, client: &str, program: &str, params: &Value) -> ExecutionId {
        self.publish_json(&json!({"id": client, "program": program, "params": params}))
            .await
    }

    /// Publishes one submission, which must name a client's id.
    pub async fn publish_json(&self, submission: &Value) -> ExecutionId {
        self.publish_text(&submission.to_string()).await;
        self.id(submission["id"].as_str().unwrap())
    }

    /// Publishes a message to the stream as it is.
    pub async fn publish_text(&self, text: &str) {
        let subject = subjects::submit(&self.tenant);
        let stored = self
            .broker
            .js
            .publish(subject, text.to_owned().into())
            .await
            .unwrap();
        stored.await.unwrap();
    }

    /// Rows of PostgreSQL.
    pub async fn sql(&self, query: impl Into<String>) -> Rows {
        sql::query(self.pool.as_ref().unwrap(), query.into())
            .await
            .unwrap()
    }

    /// Changes PostgreSQL, as nothing but a test does.
    pub async fn execute(&self, statement: &str) {
        let statement = sqlx::AssertSqlSafe(statement.to_owned());
        let done = sqlx::query(statement).execute(self.pool.as_ref().unwrap());
        done.await.unwrap();
    }

    /// The number that a query of one value gives.
    pub async fn count(&self, query: impl Into<String>) -> i64 {
        let rows = self.sql(query).await;
        let value = rows.rows[0][0].as_deref().unwrap();
        value.parse().unwrap()
    }

    /// Waits until PostgreSQL has everything of these executions, each of which has ended.
    pub async fn recorded(&self, executions: usize) {
        let query = format!(
            "SELECT count(*) FROM executions WHERE tenant = '{}' AND finished_at IS NOT NULL",
            self.tenant
        );
        until(
            &format!("{executions} finished executions are in PostgreSQL"),
            async || {
                let rows = sql::query(self.pool.as_ref()?, query.clone()).await.ok()?;
                (rows.rows[0][0].as_deref() == Some(executions.to_string().as_str())).then_some(())
            },
        )
        .await;
    }

    /// The worker process of a node.
    pub fn worker(&mut self, node: &NodeId) -> &mut Process {
        let number = number_of(node);
        &mut self.workers[number - 1]
    }

    /// Starts the process that fills a node's memory limit up to 88 %.
    pub async fn press(&self, node: &NodeId) -> Process {
        let log = self.data_dir().join("logs").join("pressure.log");
        self.press_with(node, &["--share", "0.88", "--hold", "120"], log)
            .await
    }

    /// Starts `fiec-lab pressure` against a node's memory limit, with these options.
    pub async fn press_with(&self, node: &NodeId, options: &[&str], log: PathBuf) -> Process {
        let status = self.status_of(node).await.unwrap();
        let used = status
            .vector
            .as_ref()
            .and_then(|v| v.host(Signal::Memory))
            .and_then(|r| r.raw)
            .unwrap_or(0.0);
        let run_dir = self.data_dir().join("run").join(node.as_str());
        let list = [
            "pressure",
            "--limit-source",
            &status.descriptor.memory_limit_source,
            "--limit-bytes",
            &status.descriptor.memory_limit_bytes.to_string(),
            "--run-dir",
            &run_dir.display().to_string(),
            "--used-bytes",
            &format!("{used:.0}"),
        ];
        let list = args(&[&list, options].concat());
        Process::start("pressure", Path::new(BINARY), &list, &[], log).unwrap()
    }
}

/// The number of `n3` is 3.
pub fn number_of(node: &NodeId) -> usize {
    node.as_str().trim_start_matches('n').parse().unwrap()
}

/// The digest of the same computation without servers, nodes or boundaries in between.
pub async fn undisturbed(program: &str, params: &Value) -> String {
    let (program, params) = (program.to_owned(), params.clone());
    let run = move || fiec_kit::run_local(&program, &params).unwrap();
    let outcome = tokio::task::spawn_blocking(run).await.unwrap();
    outcome.result["digest"].as_str().unwrap().to_owned()
}

/// The digest of a synthetic computation; it depends on neither its work nor its crashes.
pub async fn undisturbed_synthetic(params: &Value) -> String {
    let bare = json!({"capsules": params["capsules"], "state_bytes": params["state_bytes"]});
    undisturbed("synthetic@1", &bare).await
}

impl Deref for Lab {
    type Target = Cluster;
    fn deref(&self) -> &Cluster {
        self.cluster.as_ref().unwrap()
    }
}

impl DerefMut for Lab {
    fn deref_mut(&mut self) -> &mut Cluster {
        self.cluster.as_mut().unwrap()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(
                self.is_concluded,
                "a test ends with `lab.end().await` or `lab.stop().await`, which check its history"
            );
            return;
        }
        let Some(cluster) = &self.cluster else { return };
        let services = cluster.policies.iter().chain(&cluster.recorder);
        for process in cluster.workers.iter().chain(services) {
            eprintln!("--- {}\n{}", process.name, process.tail(25));
        }
        eprintln!("--- ledger\n{}", self.journal.in_words(40));
    }
}
