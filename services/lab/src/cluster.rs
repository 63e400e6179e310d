//! A whole FIEC on this machine: private servers, a policy service, a recorder and workers, each a
//! process of this executable. `fiec up`, `fiec demo`, `fiec bench` and the tests use it.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec::client;
use fiec::ui::Steps;
use fiec_broker::{Broker, ConnectOptions, topology};
use fiec_dev_servers::{DevServers, Login, Progress, Sync};
use fiec_schemas::NodeId;
use fiec_schemas::messages::{NodeStatus, StandingKind, Viability};
use fiec_schemas::substrate::HOST;
use sqlx::PgPool;

use crate::process::Process;

/// Options of a cluster.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Folder for data and logs; a temporary folder by default.
    pub data_dir: Option<PathBuf>,
    /// Number of worker processes `n1`, `n2`, ….
    pub workers: u32,
    /// Arguments for every worker, e.g. `--slots 2`.
    pub worker_args: Vec<String>,
    /// Input folders of the workers; the current folder by default.
    pub input_dirs: Vec<PathBuf>,
    /// Number of policy services.
    pub policies: u32,
    /// Arguments for every policy service, e.g. `--slice-ms 1000`.
    pub policy_args: Vec<String>,
    /// True for PostgreSQL and a recorder.
    pub history: bool,
    /// Arguments for the recorder.
    pub recorder_args: Vec<String>,
    /// Executable of the services and workers; this program's own by default.
    pub binary: Option<PathBuf>,
    /// Time within which a part must be ready.
    pub patience: Duration,
    /// Number of nats-servers. Several form a cluster, and each process gets the URL of one.
    pub brokers: usize,
    /// Port of NATS; a free one by default.
    pub nats_port: Option<u16>,
    /// Port of PostgreSQL; a free one by default.
    pub postgres_port: Option<u16>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            data_dir: None,
            workers: 3,
            worker_args: Vec::new(),
            input_dirs: std::env::current_dir().into_iter().collect(),
            policies: 1,
            policy_args: Vec::new(),
            history: true,
            recorder_args: Vec::new(),
            binary: None,
            patience: Duration::from_secs(30),
            brokers: 1,
            nats_port: None,
            postgres_port: None,
        }
    }
}

/// True once a node's canaries have a result.
fn is_judged(node: &NodeStatus) -> bool {
    let pending = |standing| matches!(standing, StandingKind::Unproved | StandingKind::Outdated);
    let mut host = node.contracts.iter().filter(|c| c.substrate == HOST);
    host.all(|c| !pending(c.standing))
}

/// Shows the steps of finding and starting the servers.
struct ServerSteps<'a>(&'a Steps);

impl Progress for ServerSteps<'_> {
    fn step(&self, message: &str) {
        self.0.step(message);
    }
    fn done(&self, message: &str) {
        self.0.done(message);
    }
}

/// The logins of the history, each with no more rights than it needs.
#[derive(Clone)]
pub struct Logins {
    /// URL of the owner of the tables: `fiec setup`.
    pub owner: String,
    /// The recorder, and `fiec repair`, which reads states.
    pub recorder: Login,
    /// All others.
    pub reader: Login,
}

impl std::fmt::Debug for Logins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Logins")
    }
}

/// A running cluster. Dropping it ends all its processes.
#[derive(Debug)]
pub struct Cluster {
    /// Connection for the caller.
    pub broker: Broker,
    /// The owner's database pool for the caller, if there is history.
    pub pool: Option<PgPool>,
    /// Logins of the database, if there is history.
    pub logins: Option<Logins>,
    /// Workers by number; `n1` is the first.
    pub workers: Vec<Process>,
    /// Policy services.
    pub policies: Vec<Process>,
    /// The recorder.
    pub recorder: Option<Process>,
    /// The servers.
    pub servers: DevServers,
    options: ClusterOptions,
    binary: PathBuf,
    /// Arguments of each worker beyond the common ones.
    own_args: Vec<Vec<String>>,
    /// Environment of the worker that is being started.
    more_environment: Vec<(String, String)>,
}

impl Cluster {
    /// Starts all parts and waits until every worker can get executions.
    ///
    /// # Errors
    /// If a part cannot be started or is not ready in time. The message ends with its log.
    pub async fn start(options: ClusterOptions, steps: &Steps) -> anyhow::Result<Self> {
        let binary = match &options.binary {
            Some(binary) => binary.clone(),
            None => std::env::current_exe().context("cannot find this program's own file")?,
        };
        let servers = DevServers::start(
            fiec_dev_servers::Options {
                data_dir: options.data_dir.clone(),
                want_postgres: options.history,
                nats_port: options.nats_port,
                brokers: options.brokers,
                // As the profile for clusters says: broker-config/server/cluster.conf.
                sync: match options.brokers {
                    1 => Sync::Default,
                    _ => Sync::Always,
                },
                postgres_port: options.postgres_port,
                ..fiec_dev_servers::Options::default()
            },
            &ServerSteps(steps),
        )
        .await?;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(servers.data_dir().join("logs"))?;
        steps.step("creating streams, buckets and tables");
        let broker =
            Broker::connect(ConnectOptions::new(servers.nats_url(), "fiec cluster")).await?;
        let profile = topology::Profile {
            replicas: (options.brokers > 1).then_some(options.brokers),
            ..topology::Profile::default()
        };
        topology::apply(&broker, &profile).await?;
        let (pool, logins) = match &servers.postgres {
            Some(postgres) => {
                let owner = postgres.url();
                let pool = fiec_recorder::connect(&owner).await?;
                fiec_recorder::migrate(&pool).await?;
                let logins = Logins {
                    owner,
                    recorder: postgres.admit("fiec_recorder").await?,
                    reader: postgres.admit("fiec_reader").await?,
                };
                (Some(pool), Some(logins))
            }
            None => (None, None),
        };
        let mut cluster = Self {
            broker,
            pool,
            logins,
            workers: Vec::new(),
            policies: Vec::new(),
            recorder: None,
            servers,
            options,
            binary,
            own_args: Vec::new(),
            more_environment: Vec::new(),
        };
        steps.step("starting the policy service, the recorder and the workers");
        if cluster.options.history {
            cluster.start_recorder()?;
        }
        for _ in 0..cluster.options.policies {
            cluster.start_policy()?;
        }
        for _ in 0..cluster.options.workers {
            cluster.start_worker(&[])?;
        }
        cluster.ready().await?;
        steps.done(&format!(
            "{} workers, {} policy service{}{}",
            cluster.workers.len(),
            cluster.policies.len(),
            if cluster.policies.len() == 1 { "" } else { "s" },
            if cluster.recorder.is_some() {
                ", a recorder"
            } else {
                ""
            }
        ));
        Ok(cluster)
    }

    /// Folder of data, logs and run-time files.
    pub fn data_dir(&self) -> &Path {
        self.servers.data_dir()
    }

    /// The name of the worker with this number, from 1.
    pub fn node(number: usize) -> NodeId {
        NodeId::from_host_name(&format!("n{number}"))
    }

    /// Environment that connects a `fiec` command to this cluster: by the rights that it needs.
    pub fn environment(&self, command: &str) -> Vec<(String, String)> {
        let mut environment = vec![("FIEC_NATS_URL".to_owned(), self.servers.nats_url())];
        if let Some(logins) = &self.logins {
            let url = match command {
                "setup" => Some(logins.owner.clone()),
                "recorder" | "repair" => Some(logins.recorder.url()),
                // These need no database.
                "policy" | "worker" => None,
                _ => Some(logins.reader.url()),
            };
            environment.extend(url.map(|url| ("FIEC_DATABASE_URL".to_owned(), url)));
        }
        environment
    }

    fn spawn(&self, name: &str, args: &[String]) -> anyhow::Result<Process> {
        let log = self.data_dir().join("logs").join(format!("{name}.log"));
        let mut environment = self.environment(args.first().map_or("", String::as_str));
        // The first two policy services and workers are connected to different servers.
        let number = name.trim_start_matches(|c: char| !c.is_ascii_digit());
        let number = number.parse::<usize>().unwrap_or(1);
        let urls = self.servers.nats_urls();
        if let Some(url) = urls.get(number.wrapping_sub(1) % urls.len().max(1)) {
            environment.push(("FIEC_NATS_URL".to_owned(), url.clone()));
        }
        environment.extend_from_slice(&self.more_environment);
        Process::start(name, &self.binary, args, &environment, log)
    }

    /// Starts one more policy service.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_policy(&mut self) -> anyhow::Result<()> {
        let is_free = |name: &String| self.policies.iter().all(|policy| policy.name != *name);
        let mut names = (1..).map(|n| format!("policy-{n}"));
        let name = names.find(is_free).unwrap_or_default();
        let mut args = vec!["policy".to_owned()];
        args.extend_from_slice(&self.options.policy_args);
        let process = self.spawn(&name, &args)?;
        self.policies.push(process);
        Ok(())
    }

    /// Starts a policy service in the place of one that has ended.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn restart_policy(&mut self, at: usize) -> anyhow::Result<()> {
        let mut args = vec!["policy".to_owned()];
        args.extend_from_slice(&self.options.policy_args);
        let process = self.spawn(&format!("policy-{}", at + 1), &args)?;
        match self.policies.get_mut(at) {
            Some(slot) => *slot = process,
            None => bail!("there is no policy service {}", at + 1),
        }
        Ok(())
    }

    /// Starts the recorder, or starts it again after it has ended.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_recorder(&mut self) -> anyhow::Result<()> {
        let mut args = vec!["recorder".to_owned()];
        args.extend_from_slice(&self.options.recorder_args);
        self.recorder = Some(self.spawn("recorder", &args)?);
        Ok(())
    }

    /// Starts one more worker, with arguments beyond the common ones.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_worker(&mut self, more: &[String]) -> anyhow::Result<NodeId> {
        let number = self.workers.len() + 1;
        let process = self.spawn_worker(number, more)?;
        self.workers.push(process);
        self.own_args.push(more.to_vec());
        Ok(Self::node(number))
    }

    /// Starts one more worker with additional environment variables.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_worker_in(&mut self, environment: &[(String, String)]) -> anyhow::Result<NodeId> {
        let before = self.more_environment.len();
        self.more_environment.extend_from_slice(environment);
        let started = self.start_worker(&[]);
        self.more_environment.truncate(before);
        started
    }

    /// Restarts a worker after its end, with the same arguments.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn restart_worker(&mut self, number: usize) -> anyhow::Result<()> {
        let own = self.own_args.get(number.wrapping_sub(1));
        let process = self.spawn_worker(number, own.map_or(&[], Vec::as_slice))?;
        match self.workers.get_mut(number.wrapping_sub(1)) {
            Some(slot) => *slot = process,
            None => bail!("there is no worker n{number}"),
        }
        Ok(())
    }

    fn spawn_worker(&self, number: usize, more: &[String]) -> anyhow::Result<Process> {
        let node = Self::node(number).to_string();
        let mut args = vec!["worker".to_owned(), "--node".to_owned(), node.clone()];
        args.push("--run-dir".to_owned());
        args.push(self.data_dir().join("run").display().to_string());
        for folder in &self.options.input_dirs {
            args.push("--input-dir".to_owned());
            args.push(folder.display().to_string());
        }
        args.extend(self.options.worker_args.iter().cloned());
        args.extend(more.iter().cloned());
        self.spawn(&node, &args)
    }

    /// Waits until a policy service knows every worker as viable, and its canaries have a result.
    ///
    /// # Errors
    /// At the deadline, or if a process ends. The message has the end of its log.
    pub async fn ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.options.patience;
        let mut last = String::from("no policy service answered");
        while Instant::now() < deadline {
            self.none_ended()?;
            match client::me(&self.broker).nodes().await {
                Ok(reply) => {
                    let viable = reply
                        .nodes
                        .iter()
                        .filter(|n| n.viability == Viability::Viable && is_judged(n))
                        .count();
                    if viable >= self.workers.len() {
                        return Ok(());
                    }
                    last = format!("{viable} of {} workers are viable", self.workers.len());
                }
                Err(error) => last = error.to_string(),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!(
            "the cluster was not ready after {:?}: {last}; its logs are in {}",
            self.options.patience,
            self.data_dir().join("logs").display()
        )
    }

    /// A policy service's status of a node.
    ///
    /// # Errors
    /// If no policy service answers or the node is unknown.
    pub async fn status_of(&self, node: &NodeId) -> anyhow::Result<NodeStatus> {
        let reply = client::me(&self.broker).nodes().await?;
        reply
            .nodes
            .into_iter()
            .find(|n| n.descriptor.node == *node)
            .with_context(|| format!("node {node} is not known"))
    }

    /// Fails if a process has ended that should run.
    ///
    /// # Errors
    /// Names the process, with the end of its log.
    pub fn none_ended(&mut self) -> anyhow::Result<()> {
        let all = self
            .workers
            .iter_mut()
            .chain(&mut self.policies)
            .chain(&mut self.recorder);
        for process in all {
            if let Some(status) = process.ended() {
                bail!(
                    "{} ended with {status}:\n{}",
                    process.name,
                    process.tail(20)
                );
            }
        }
        Ok(())
    }

    /// Restarts ended processes: a service at once, a worker after `pause`, so that its executions
    /// visibly continue on other nodes. Returns one message per process.
    ///
    /// # Errors
    /// If a server has ended, or a process cannot be started.
    pub fn revive(
        &mut self,
        down: &mut BTreeMap<usize, Instant>,
        pause: Duration,
    ) -> anyhow::Result<Vec<String>> {
        if !self.servers.nats.is_running() {
            bail!(
                "nats-server has ended: see {}",
                self.servers.nats.log().display()
            );
        }
        if let Some(postgres) = &self.servers.postgres
            && !postgres.is_running()
        {
            bail!("PostgreSQL has ended: see {}", postgres.log().display());
        }
        let mut said = Vec::new();
        if let Some(status) = self.recorder.as_mut().and_then(Process::ended) {
            said.push(format!("the recorder ended ({status}); started again"));
            self.start_recorder()?;
        }
        let before = self.policies.len();
        self.policies.retain_mut(|policy| policy.ended().is_none());
        while self.policies.len() < before {
            said.push("a policy service ended; started again".to_owned());
            self.start_policy()?;
        }
        for number in 1..=self.workers.len() {
            let ended = self.workers.get_mut(number - 1).and_then(Process::ended);
            let Some(status) = ended else { continue };
            let node = Self::node(number);
            match down.get(&number) {
                None => {
                    said.push(format!(
                        "{node} ended ({status}); its executions continue on other nodes, and \
                         {node} starts again in {pause:?}"
                    ));
                    down.insert(number, Instant::now());
                }
                Some(since) if since.elapsed() >= pause => {
                    down.remove(&number);
                    self.restart_worker(number)?;
                    said.push(format!("{node} started again"));
                }
                Some(_) => {}
            }
        }
        Ok(said)
    }

    /// Stops everything in order: workers drain, then the services, then the servers.
    pub async fn stop(mut self) {
        let deadline = Duration::from_secs(5);
        // All are signalled first, so that the waits overlap.
        for process in self
            .workers
            .iter()
            .chain(&self.policies)
            .chain(&self.recorder)
        {
            let _ = process.signal(rustix::process::Signal::TERM);
        }
        for process in self
            .workers
            .iter_mut()
            .chain(&mut self.policies)
            .chain(&mut self.recorder)
        {
            if !process.stop(deadline).await {
                tracing::warn!(
                    process = process.name,
                    "did not stop in time and was killed"
                );
            }
        }
        // A drained connection reports no error when its server ends.
        let _ = self.broker.client.drain().await;
        if let Some(pool) = &self.pool {
            // A pool without its server has nothing to close.
            let _ = tokio::time::timeout(Duration::from_secs(2), pool.close()).await;
        }
        self.servers.stop(deadline).await;
    }
}
