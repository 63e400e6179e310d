//! A link to the broker on which bytes arrive slowly.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Bytes that are passed on at once.
const PIECE: usize = 16 * 1024;

/// Passes TCP connections on to a server, and what that answers at a limited rate, in a thread of
/// its own. The other direction is not limited. It ends with this value.
#[derive(Debug)]
pub struct SlowLink {
    address: SocketAddr,
    passed: Arc<Passed>,
    _stop: DropGuard,
}

#[derive(Debug, Default)]
struct Passed {
    /// Bytes that the server's answers took across the link.
    bytes: AtomicU64,
    cut: Notify,
}

impl SlowLink {
    /// A link to this server, with this many bytes a second for each connection.
    pub fn to(server: SocketAddr, bytes_per_second: u32) -> Self {
        let stop = CancellationToken::new();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let stopped = stop.clone();
        let passed = Arc::new(Passed::default());
        let counted = Arc::clone(&passed);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                tokio::select! {
                    () = stopped.cancelled() => {}
                    () = pass_on(listener, server, bytes_per_second, counted) => {}
                }
            });
        });
        Self {
            address,
            passed,
            _stop: stop.drop_guard(),
        }
    }

    /// Bytes that the server has sent across this link.
    pub fn passed(&self) -> u64 {
        self.passed.bytes.load(Ordering::Relaxed)
    }

    /// Closes all connections. New ones are accepted.
    pub fn cut(&self) {
        self.passed.cut.notify_waiters();
    }

    /// The URL of a NATS server, with this link in place of its address.
    pub fn instead_of(url: &str, bytes_per_second: u32) -> (Self, String) {
        let (login, server) = url.rsplit_once(['@', '/']).unwrap();
        let link = Self::to(server.parse().unwrap(), bytes_per_second);
        let between = &url[login.len()..=login.len()];
        let url = format!("{login}{between}{}", link.address);
        (link, url)
    }
}

async fn pass_on(
    listener: TcpListener,
    server: SocketAddr,
    bytes_per_second: u32,
    passed: Arc<Passed>,
) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let passed = Arc::clone(&passed);
        connections.spawn(async move {
            let Ok(server) = TcpStream::connect(server).await else {
                return;
            };
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            let (mut from_client, to_client) = client.into_split();
            let (from_server, mut to_server) = server.into_split();
            // The connection ends as soon as either side goes.
            tokio::select! {
                _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
                () = trickle(from_server, to_client, bytes_per_second, &passed.bytes) => {}
                () = passed.cut.notified() => {}
            }
        });
    }
}

async fn trickle(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    bytes_per_second: u32,
    passed: &AtomicU64,
) {
    let mut piece = vec![0; PIECE];
    while let Ok(read @ 1..) = from.read(&mut piece).await {
        tokio::time::sleep(Duration::from_secs(1) * read as u32 / bytes_per_second).await;
        if to.write_all(&piece[..read]).await.is_err() {
            return;
        }
        passed.fetch_add(read as u64, Ordering::Relaxed);
    }
}
