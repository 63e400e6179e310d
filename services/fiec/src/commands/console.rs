//! `fiec console`: what runs, waits, fails and moves, in a browser.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use fiec_broker::ConnectOptions;
pub use fiec_console::Service;
use fiec_console::{Options, Running};
use fiec_schemas::{Secret, Tenant};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::context::{Global, TenantArg, run_folder, who, write_private};
use crate::exit::Outcome;

/// Time limit of another process for a ticket.
const ANSWER: Duration = Duration::from_secs(3);
/// Most bytes of its answer.
const MOST: u64 = 16 * 1024;
/// Length of a ticket.
const TICKET: usize = 64;

/// Show what runs, waits, fails and moves in a browser
///
/// Prints an address that is good once, within ten minutes. If a console of yours for this tenant runs
/// on this machine, as that of `fiec up`, the address is of that one.
#[derive(Debug, Args)]
pub struct ConsoleArgs {
    /// Loopback address to listen on [default: a free port of 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// --http addresses of services and workers that are asked for their health
    #[arg(long, value_name = "[NAME=]HOST:PORT,…", env = "FIEC_HEALTH", value_parser = services)]
    pub health: Option<Services>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// Services and workers, with commas in between.
#[derive(Debug, Clone, Default)]
pub struct Services(Vec<Service>);

fn services(text: &str) -> Result<Services, String> {
    let all = text.split(',').filter(|one| !one.is_empty());
    all.map(str::parse).collect::<Result<_, _>>().map(Services)
}

/// The file by which a console of this user is found.
#[derive(Debug, Serialize, Deserialize)]
struct ConsoleFile {
    pid: u32,
    /// When the process started, as the kernel counts. Another process with this id has another time.
    started: u64,
    addr: SocketAddr,
    tenant: Tenant,
    key: Secret,
}

/// When a process started, in the kernel's ticks since the boot. None if there is no such process.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the process, in brackets, may contain blanks and brackets.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

impl ConsoleFile {
    fn path() -> Option<PathBuf> {
        Some(run_folder()?.join("console.json"))
    }

    /// That of a console that still runs.
    fn read() -> Option<Self> {
        let text = std::fs::read(Self::path()?).ok()?;
        let file: Self = serde_json::from_slice(&text).ok()?;
        file.runs().then_some(file)
    }

    /// Whether the process of this file still runs.
    fn runs(&self) -> bool {
        started(self.pid) == Some(self.started)
    }

    /// Asks for a ticket, and returns the address with it.
    async fn entrance(&self) -> anyhow::Result<String> {
        let ask = async {
            let mut socket = TcpStream::connect(self.addr).await?;
            let request = format!(
                "POST /tickets HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\n\
                 Content-Length: 0\r\nConnection: close\r\n\r\n",
                self.addr,
                self.key.expose()
            );
            socket.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            socket.take(MOST).read_to_string(&mut answer).await?;
            anyhow::Ok(answer)
        };
        let answer = tokio::time::timeout(ANSWER, ask).await??;
        match answer.split_once("\r\n\r\n") {
            // Another server at this address may also answer 200.
            Some((head, ticket)) if head.starts_with("HTTP/1.1 200 ") && is_ticket(ticket) => {
                Ok(format!("http://{}/enter?ticket={ticket}", self.addr))
            }
            _ => bail!("the console at {} gives no ticket", self.addr),
        }
    }
}

fn is_ticket(text: &str) -> bool {
    text.len() == TICKET && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// A console of this process, which other commands of this user find.
#[derive(Debug)]
pub struct Console {
    running: Running,
    /// The file is removed with it, if it is its own.
    is_found: bool,
}

impl Console {
    /// Starts one, until `stop`.
    ///
    /// # Errors
    /// If it cannot listen.
    pub async fn start(
        addr: SocketAddr,
        broker: ConnectOptions,
        database: Secret,
        tenant: Tenant,
        services: watch::Receiver<Vec<Service>>,
        stop: CancellationToken,
    ) -> anyhow::Result<Self> {
        let options = Options {
            addr,
            broker,
            database,
            services,
            who: who(),
            tenant: tenant.clone(),
        };
        let running = fiec_console::start(options, stop).await?;
        let mut is_found = false;
        if ConsoleFile::read().is_none()
            && let Some(path) = ConsoleFile::path()
        {
            let pid = std::process::id();
            let file = ConsoleFile {
                pid,
                started: started(pid).unwrap_or_default(),
                tenant,
                addr: running.addr(),
                key: running.key().expose().into(),
            };
            // Without the file it is found by nobody else.
            match write_private(&path, &serde_json::to_vec(&file)?) {
                Ok(()) => is_found = true,
                Err(error) => tracing::warn!(%error, "`fiec console` will not find this console"),
            }
        }
        Ok(Self { running, is_found })
    }

    /// An address that is good once.
    pub fn entrance(&self) -> String {
        self.running.entrance()
    }

    /// Waits until it ends, and removes its file.
    pub async fn ended(self) {
        self.running.ended().await;
        if self.is_found
            && let Some(path) = ConsoleFile::path()
        {
            // If it stays, it names a process that is gone, and is ignored.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Starts a console, or asks the one that runs for another address.
///
/// # Errors
/// If the servers are not known, or it cannot listen.
pub async fn run(args: ConsoleArgs, global: &Global) -> anyhow::Result<Outcome> {
    let health = args.health.unwrap_or_default().0;
    let is_own = args.listen.is_some()
        || !health.is_empty()
        || global.nats.is_some()
        || global.database.is_some();
    let tenant = args.tenant.tenant;
    if !is_own && let Some(running) = ConsoleFile::read() {
        if running.tenant != tenant {
            eprintln!(
                "The console at {} is for tenant {}. This command starts another one, for tenant {tenant}.",
                running.addr, running.tenant
            );
        } else if let Ok(entrance) = running.entrance().await {
            say(&entrance, global.json);
            return Ok(Outcome::Done);
        }
    }
    let addr = args.listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0)));
    if !addr.ip().is_loopback() {
        bail!(
            "--listen {addr}: the console acts as you, so it listens on loopback only; reach it from \
             another machine by `ssh -L`"
        );
    }
    let mut broker = ConnectOptions::new(global.nats_url()?, "fiec console");
    broker.credentials.clone_from(&global.creds);
    let stop = CancellationToken::new();
    let (_, services) = watch::channel(health);
    let database = global.database_url()?;
    let started = Console::start(addr, broker, database, tenant, services, stop.clone());
    let console = started.await?;
    // Before anybody is told that it is there, and may end it.
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be heard")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be heard")?;
    say(&console.entrance(), global.json);
    if !global.json {
        eprintln!("The address is good once. Ctrl-C ends the console.");
    }
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    stop.cancel();
    console.ended().await;
    Ok(Outcome::Done)
}

fn say(entrance: &str, json: bool) {
    match json {
        true => println!("{}", json!({"console": entrance})),
        false => println!("{entrance}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(started: u64, addr: SocketAddr) -> ConsoleFile {
        ConsoleFile {
            pid: std::process::id(),
            started,
            addr,
            tenant: "lab".parse().unwrap(),
            key: "k".into(),
        }
    }

    #[test]
    fn a_process_that_got_the_id_of_a_console_is_none() {
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        let own = started(std::process::id()).unwrap();
        assert!(file(own, addr).runs());
        assert!(!file(own - 1, addr).runs());
        assert_eq!(started(u32::MAX), None);
    }

    #[tokio::test]
    async fn an_answer_of_another_server_is_no_ticket() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let ticket = "0123456789abcdef".repeat(4);
        let bodies = ["hello".to_owned(), ticket.clone()];
        let server = async {
            for body in bodies {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                let _ = socket.read(&mut request).await.unwrap();
                let answer = format!("HTTP/1.1 200 OK\r\n\r\n{body}");
                socket.write_all(answer.as_bytes()).await.unwrap();
            }
        };
        let file = file(0, addr);
        let ask = async {
            assert!(file.entrance().await.is_err());
            assert!(file.entrance().await.unwrap().ends_with(&ticket));
        };
        tokio::join!(server, ask);
    }
}
