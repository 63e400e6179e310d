//! One private nats-server with JetStream on loopback.
//!
//! Its ports are chosen here, and the server writes those that it has to a file. If another one took
//! a port between choosing and binding, others are chosen. A restart asks for the same ports again. A
//! server locks its data folder.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::child::{Child, Plan, tail};
use crate::cluster::Member;
use crate::error::{At, Error, Result};
use crate::locate::NatsBinary;
use crate::lock::FileLock;
use crate::ports;
use crate::secret::{self, USER};

/// When JetStream forces its files to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sync {
    /// The server's default interval of two minutes, for development.
    #[default]
    Default,
    Every(Duration),
    /// Before each acknowledgement, for a durable single server.
    Always,
}

/// Options of a `nats-server`.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// The program.
    pub binary: NatsBinary,
    /// Holds the store, the configuration and the log; created if missing.
    pub data_dir: PathBuf,
    /// `None`: a free one.
    pub port: Option<u16>,
    /// Port of its HTTP monitoring; a free one otherwise.
    pub monitoring_port: Option<u16>,
    /// Its name in its own messages.
    pub server_name: String,
    /// When writes reach the disk.
    pub sync: Sync,
    /// Bytes, headers included.
    pub max_payload: u64,
    /// Added to the configuration as it is.
    pub extra_config: String,
    /// Its place in a cluster.
    pub cluster: Option<Member>,
    /// Time limit until the server answers, recovery of its store included.
    pub ready_within: Duration,
}

impl NatsOptions {
    /// Free ports, the development profile.
    pub fn new(binary: NatsBinary, data_dir: impl Into<PathBuf>) -> Self {
        Self {
            binary,
            data_dir: data_dir.into(),
            port: None,
            monitoring_port: None,
            server_name: "fiec-dev".into(),
            sync: Sync::Default,
            max_payload: 1 << 20,
            extra_config: String::new(),
            cluster: None,
            ready_within: Duration::from_secs(60),
        }
    }
}

/// Answers once the store is recovered and, in a cluster, every stream is up to date.
const HEALTHY: &str = "/healthz";
/// Answers once JetStream has started.
const ENABLED: &str = "/healthz?js-enabled-only=true";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    client: u16,
    monitoring: u16,
    /// For the other servers of its cluster.
    cluster: Option<u16>,
}

/// A running server. Dropping it kills the server.
#[derive(Debug)]
pub struct NatsServer {
    child: Child,
    ports: Ports,
    password: String,
    options: NatsOptions,
    _lock: FileLock,
}

impl NatsServer {
    /// Starts the server and waits until it answers.
    ///
    /// # Errors
    /// If it cannot be started or is not ready in time. The message has the end of its log.
    pub async fn start(mut options: NatsOptions) -> Result<Self> {
        let dir = &options.data_dir;
        secret::create_folder(dir, 0o700)?;
        // An earlier version may have made the folder readable for everybody.
        secret::set_mode(dir, 0o700)?;
        // The configuration needs an absolute path, because the working folder may change.
        options.data_dir = dir.canonicalize().at("cannot resolve", dir)?;
        let lock = FileLock::own(
            &options.data_dir.join("fiec.lock"),
            &options.data_dir,
            Duration::from_secs(2),
        )
        .await?;
        let password = secret::keep(&options.data_dir.join("password"))?;
        let ports = (options.port, options.monitoring_port);
        let (child, ports) = launch(&options, &password, ports, HEALTHY).await?;
        Ok(Self {
            child,
            ports,
            password,
            options,
            _lock: lock,
        })
    }

    /// `nats://fiec:PASSWORD@127.0.0.1:PORT`.
    pub fn client_url(&self) -> String {
        format!("nats://{USER}:{}@{}", self.password, self.address())
    }

    /// `127.0.0.1:PORT`, for messages.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.ports.client)
    }

    /// `http://127.0.0.1:PORT`.
    pub fn monitor_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports.monitoring)
    }

    /// A page of its monitoring, for example `/jsz`. None if it does not answer.
    pub async fn page(&self, path: &str) -> Option<serde_json::Value> {
        let answer = fetch(self.ports.monitoring, path).await?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    /// Port for clients. A restart keeps it.
    pub fn port(&self) -> u16 {
        self.ports.client
    }

    /// Process id. A restart changes it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Folder of its store, configuration and log.
    pub fn data_dir(&self) -> &Path {
        &self.options.data_dir
    }

    /// Path of its log.
    pub fn log(&self) -> PathBuf {
        log_of(&self.options.data_dir)
    }

    /// True if the process is alive.
    pub fn is_running(&self) -> bool {
        self.child.status().is_none()
    }

    /// Sends `SIGKILL` and waits until the server is gone.
    pub async fn kill(&mut self) {
        self.child.end(Signal::KILL, Duration::from_secs(5)).await;
    }

    /// Stops the server if it runs, and starts it with the same ports and data. A member of a cluster
    /// is not waited for until it has caught up with the others, which may be away.
    pub async fn restart(&mut self) -> Result<()> {
        self.stop(Duration::from_secs(10)).await;
        let ports = (Some(self.ports.client), Some(self.ports.monitoring));
        let ready = match self.options.cluster {
            Some(_) => ENABLED,
            None => HEALTHY,
        };
        let (child, ports) = launch(&self.options, &self.password, ports, ready).await?;
        self.child = child;
        self.ports = ports;
        Ok(())
    }

    /// Stops the server gracefully until `deadline`, then kills it. Returns true if it was
    /// graceful.
    pub async fn stop(&mut self, deadline: Duration) -> bool {
        self.child.end(Signal::INT, deadline).await
    }
}

fn log_of(data_dir: &Path) -> PathBuf {
    data_dir.join("nats-server.log")
}

/// Starts the server. Retries while a requested port is taken, as it may be briefly after a kill, and
/// with other free ports after a lost race.
async fn launch(
    options: &NatsOptions,
    password: &str,
    ports: (Option<u16>, Option<u16>),
    ready: &str,
) -> Result<(Child, Ports)> {
    let deadline = Instant::now() + options.ready_within;
    let mut attempts = 5;
    loop {
        let chosen = match ports {
            (Some(_), Some(_)) => ports,
            (port, monitoring) => {
                let free = || ports::free().at("cannot listen on", Path::new("127.0.0.1"));
                let port = port.map_or_else(free, Ok)?;
                (Some(port), Some(monitoring.map_or_else(free, Ok)?))
            }
        };
        match launch_once(options, password, chosen, (ready, deadline)).await {
            Err(Error::NotStarted { tail, .. })
                if attempts > 0 && tail.contains("address already in use") =>
            {
                attempts -= 1;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            other => return other,
        }
    }
}

async fn launch_once(
    options: &NatsOptions,
    password: &str,
    ports: (Option<u16>, Option<u16>),
    (ready, deadline): (&str, Instant),
) -> Result<(Child, Ports)> {
    let dir = &options.data_dir;
    let ports_dir = dir.join("ports");
    // A killed server does not remove its file.
    let _ = std::fs::remove_dir_all(&ports_dir);
    std::fs::create_dir(&ports_dir).at("cannot create", &ports_dir)?;
    let config = dir.join("nats-server.conf");
    secret::write(&config, &config_text(options, password, ports))?;
    let log = log_of(dir);
    let _ = std::fs::rename(&log, log.with_extension("log.old"));
    let mut command = Command::new(&options.binary.path);
    command.arg("--config").arg(&config).current_dir(dir);
    if std::env::var_os("GOMAXPROCS").is_none() {
        // The server shares the machine with workers, services and PostgreSQL. A Go process that
        // may use every core searches all of them for work when idle. On two cores under a flood of
        // messages, that took a quarter of its time.
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        command.env("GOMAXPROCS", (cores / 2).max(1).to_string());
    }
    let child = Child::spawn(Plan {
        command,
        log: log.clone(),
        account: None,
        on_parent_death: Signal::KILL,
        on_drop: Signal::KILL,
    })
    .await?;
    let file = ports_dir.join(format!("nats-server_{}.ports", child.id()));
    let failed = |reason: String| Error::NotStarted {
        server: "nats-server",
        reason,
        log: log.clone(),
        tail: tail(&log),
    };
    loop {
        if let Some(status) = child.status() {
            return Err(failed(format!("it ended with {status}")));
        }
        if let Some(ports) = std::fs::read(&file).ok().and_then(|t| read_ports(&t)) {
            if let (Some(member), Some(port)) = (&options.cluster, ports.cluster) {
                member.address.is(port);
            }
            if answers(ports.monitoring, ready).await {
                return Ok((child, ports));
            }
        }
        if Instant::now() > deadline {
            let limit = options.ready_within.as_secs();
            return Err(failed(format!("it was not ready within {limit} s")));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The server's configuration, with the ports for clients and monitoring.
fn config_text(
    options: &NatsOptions,
    password: &str,
    (port, monitoring): (Option<u16>, Option<u16>),
) -> String {
    let number = |p: Option<u16>| p.map_or("-1".into(), |p| p.to_string());
    let path = |p: &Path| serde_json::Value::from(p.to_string_lossy()).to_string();
    let mut text = String::from("# Written by fiec at every start.\n");
    let mut line = |args: std::fmt::Arguments<'_>| {
        let _ = text.write_fmt(args);
        text.push('\n');
    };
    let name = serde_json::Value::from(options.server_name.as_str());
    line(format_args!("server_name: {name}"));
    line(format_args!("listen: \"127.0.0.1:{}\"", number(port)));
    line(format_args!("http: \"127.0.0.1:{}\"", number(monitoring)));
    line(format_args!(
        "authorization {{ user: \"{USER}\", password: \"{password}\" }}"
    ));
    line(format_args!("max_payload: {}", options.max_payload));
    line(format_args!(
        "ports_file_dir: {}",
        path(&options.data_dir.join("ports"))
    ));
    line(format_args!("jetstream {{"));
    line(format_args!("  store_dir: {}", path(&options.data_dir)));
    match options.sync {
        Sync::Default => {}
        Sync::Every(every) => line(format_args!("  sync_interval: \"{}ms\"", every.as_millis())),
        Sync::Always => line(format_args!("  sync_interval: always")),
    }
    line(format_args!("}}"));
    if let Some(member) = &options.cluster {
        line(format_args!("{}", member.config()));
    }
    line(format_args!("{}", options.extra_config));
    text
}

#[derive(Deserialize)]
struct PortsFile {
    nats: Vec<String>,
    monitoring: Vec<String>,
    #[serde(default)]
    cluster: Vec<String>,
}

fn read_ports(text: &[u8]) -> Option<Ports> {
    let file: PortsFile = serde_json::from_slice(text).ok()?;
    let port = |urls: &[String]| urls.first()?.rsplit(':').next()?.parse().ok();
    Some(Ports {
        client: port(&file.nats)?,
        monitoring: port(&file.monitoring)?,
        cluster: port(&file.cluster),
    })
}

/// Whether a path of the monitoring answers that all is well.
async fn answers(port: u16, path: &str) -> bool {
    let answer = fetch(port, path).await;
    answer.is_some_and(|text| text.lines().next().is_some_and(|l| l.contains(" 200 ")))
}

/// What the monitoring answers, head and body. To HTTP/1.0 it comes whole, not in chunks.
async fn fetch(port: u16, path: &str) -> Option<String> {
    let ask = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let ask = format!("GET {path} HTTP/1.0\r\n\r\n");
        stream.write_all(ask.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    tokio::time::timeout(Duration::from_secs(2), ask)
        .await
        .ok()?
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locate::{Origin, Version};

    #[test]
    fn the_configuration_stays_on_loopback_and_quotes_paths() {
        let binary = NatsBinary {
            path: "nats-server".into(),
            version: Version(2, 15),
            origin: Origin::System,
        };
        let mut options = NatsOptions::new(binary, "/tmp/a \"b\"");
        options.sync = Sync::Always;
        let text = config_text(&options, "0a1b", (None, Some(8222)));
        assert!(
            text.contains("listen: \"127.0.0.1:-1\"\nhttp: \"127.0.0.1:8222\""),
            "{text}"
        );
        assert!(text.contains(r#"store_dir: "/tmp/a \"b\"""#), "{text}");
        assert!(text.contains("sync_interval: always"), "{text}");
        assert!(text.contains(r#"user: "fiec", password: "0a1b""#), "{text}");
    }

    #[test]
    fn ports_are_read_only_when_both_are_there() {
        let both = br#"{"nats":["nats://127.0.0.1:4711"],"monitoring":["http://127.0.0.1:4712"]}"#;
        assert_eq!(
            read_ports(both),
            Some(Ports {
                client: 4711,
                monitoring: 4712,
                cluster: None,
            })
        );
        let member = br#"{"nats":["nats://127.0.0.1:4711"],"monitoring":["http://127.0.0.1:4712"],
            "cluster":["nats://127.0.0.1:4713"]}"#;
        assert_eq!(read_ports(member).unwrap().cluster, Some(4713));
        assert_eq!(read_ports(br#"{"nats":["nats://127.0.0.1:4711"]}"#), None);
        assert_eq!(read_ports(b""), None);
    }
}
