//! Links with delay and loss between this host and hosts that are network namespaces.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fiec_lab::process::Process;
use serde::Deserialize;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::stage::BINARY;

/// What a link's process says of itself.
#[derive(Debug, Deserialize)]
struct Ends {
    pid: u32,
    outside: IpAddr,
    inside: IpAddr,
}

/// A namespace behind a link. It ends with the process that carries the packets, and that with
/// this value or this process.
#[derive(Debug)]
pub struct Link {
    ends: Ends,
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Link {
    /// A link without delay and loss; why there is none where namespaces or TUN devices cannot be
    /// made.
    pub fn new(seed: u64) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Tests that run beside this one get other addresses.
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let number = std::process::id().wrapping_mul(16).wrapping_add(count);
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/moves/link.py");
        let mut child = Command::new("python3")
            .arg(script)
            .args([number.to_string(), seed.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("python3: {error}"))?;
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut answers = BufReader::new(answers);
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        match serde_json::from_str(&line) {
            Ok(ends) => Ok(Self {
                ends,
                child,
                orders,
                answers,
            }),
            Err(_) => {
                let output = child.wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                let last = said.lines().last().unwrap_or("it said nothing");
                Err(format!("no link can be made here: {last}"))
            }
        }
    }

    /// From now on every packet takes so long each way, and this share of them is lost.
    pub fn set(&mut self, delay: Duration, loss: f64) {
        let order = json!({"delay_ms": delay.as_millis() as u64, "loss": loss});
        writeln!(self.orders, "{order}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer.trim(), "ok");
    }

    /// The address of the namespace's end.
    pub fn inside(&self) -> IpAddr {
        self.ends.inside
    }

    /// Starts `fiec` on the far side, with these words and environment.
    pub fn start(&self, name: &str, words: &[String], nats: String, log: PathBuf) -> Process {
        // Unlike `ip netns exec` it leaves /sys, and with it control groups, as they are.
        let mut all = vec![format!("--net=/proc/{}/ns/net", self.ends.pid)];
        all.push(BINARY.to_owned());
        all.extend_from_slice(words);
        let environment = [("FIEC_NATS_URL".to_owned(), nats)];
        Process::start(name, Path::new("nsenter"), &all, &environment, log).unwrap()
    }

    /// Passes connections of the far side on to a port that listens on loopback only.
    pub fn door(&self, port: u16) -> Door {
        Door::open(self.ends.outside, port)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Both fail only when it is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes TCP connections on, in a thread of its own, so that a busy test adds no delay.
#[derive(Debug)]
pub struct Door {
    /// Where it listens.
    pub address: SocketAddr,
    _stop: DropGuard,
}

impl Door {
    fn open(outside: IpAddr, port: u16) -> Self {
        let stop = CancellationToken::new();
        let listener = std::net::TcpListener::bind((outside, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let stopped = stop.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                tokio::select! {
                    () = stopped.cancelled() => {}
                    () = pass_on(listener, port) => {}
                }
            });
        });
        Self {
            address,
            _stop: stop.drop_guard(),
        }
    }
}

async fn pass_on(listener: TcpListener, port: u16) {
    let mut connections = JoinSet::new();
    while let Ok((mut outer, _)) = listener.accept().await {
        outer.set_nodelay(true).unwrap();
        connections.spawn(async move {
            if let Ok(mut inner) = TcpStream::connect(("127.0.0.1", port)).await {
                inner.set_nodelay(true).unwrap();
                // Either side may go at any time.
                let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
            }
        });
    }
}
