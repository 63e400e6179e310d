//! The routes between the servers of a cluster. Each leads through a proxy, so that a server can be
//! cut off from the others while its own clients still reach it.
//!
//! A cut closes nothing: it holds what is sent, and it holds new connections before their first
//! byte. So does a network that drops every packet, because TCP sends them again afterwards. A server
//! that is cut off notices nothing but silence, and what was sent to it arrives late.
//!
//! Invariants:
//!
//! - Each server knows only the proxies that lead from it to the others. It tells the others an
//!   address that nobody listens on ([`NOWHERE`]): with its real one, routes would pass the proxies.
//! - The proxies run in a thread of their own, so that a caller that blocks its own thread delays no
//!   heartbeat. They end with [`Routes`].

use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The address at which a server says that the others find it. They try it once, and are refused.
pub(crate) const NOWHERE: &str = "127.0.0.1:1";

/// Bytes that a proxy passes on at once.
const PIECE: usize = 64 * 1024;

/// Whether a server and the others reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Joined,
    Cut,
}

/// The proxies of a cluster: one for each pair of servers and each direction. Dropping it ends them.
#[derive(Debug)]
pub struct Routes {
    /// For each server. The proxies end when it is dropped.
    reach: watch::Sender<Vec<Reach>>,
    /// Ports of the proxies from each server to each server.
    ports: Vec<Vec<u16>>,
}

impl Routes {
    /// Starts the proxies between servers that listen for each other on these ports.
    pub(crate) fn start(servers: &[u16]) -> std::io::Result<Self> {
        let (reach, seen) = watch::channel(vec![Reach::Joined; servers.len()]);
        let mut proxies = Vec::new();
        let mut ports = Vec::new();
        for from in 0..servers.len() {
            let mut own = Vec::new();
            for (to, port) in servers.iter().enumerate() {
                let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
                listener.set_nonblocking(true)?;
                own.push(listener.local_addr()?.port());
                let ends = [from, to];
                let reach = seen.clone();
                proxies.push((listener, Way { ends, reach }, *port));
            }
            ports.push(own);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        std::thread::Builder::new()
            .name("server-routes".into())
            .spawn(move || runtime.block_on(serve(proxies, seen)))?;
        Ok(Self { reach, ports })
    }

    /// Ports of the proxies that lead from this server to each, itself included.
    pub(crate) fn from(&self, server: usize) -> Vec<u16> {
        self.ports.get(server).cloned().unwrap_or_default()
    }

    /// Cuts a server, by its place from 0, off from the others.
    pub fn cut(&self, server: usize) {
        self.set(server, Reach::Cut);
    }

    /// Joins a server to the others again. What was sent meanwhile arrives now.
    pub fn join(&self, server: usize) {
        self.set(server, Reach::Joined);
    }

    fn set(&self, server: usize, to: Reach) {
        self.reach.send_modify(|all| {
            if let Some(reach) = all.get_mut(server) {
                *reach = to;
            }
        });
    }
}

/// The way between two servers.
#[derive(Debug, Clone)]
struct Way {
    ends: [usize; 2],
    reach: watch::Receiver<Vec<Reach>>,
}

impl Way {
    /// Waits until neither end is cut off.
    async fn is_open(&mut self) {
        let ends = self.ends;
        let open = |all: &Vec<Reach>| ends.iter().all(|end| all.get(*end) == Some(&Reach::Joined));
        // Fails at the end of all proxies.
        let _ = self.reach.wait_for(open).await;
    }
}

/// Runs the proxies until the sender of `reach` is gone.
async fn serve(
    proxies: Vec<(std::net::TcpListener, Way, u16)>,
    mut reach: watch::Receiver<Vec<Reach>>,
) {
    for (listener, way, server) in proxies {
        match TcpListener::from_std(listener) {
            Ok(listener) => drop(tokio::spawn(accept(listener, way, server))),
            Err(error) => tracing::warn!(%error, "a proxy between servers cannot listen"),
        }
    }
    while reach.changed().await.is_ok() {}
}

async fn accept(listener: TcpListener, way: Way, server: u16) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => drop(tokio::spawn(connect(client, way.clone(), server))),
            Err(error) => {
                tracing::warn!(%error, "a proxy between servers cannot accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

/// Passes one connection on to a server. It ends as soon as either side does.
async fn connect(client: TcpStream, mut way: Way, server: u16) {
    way.is_open().await;
    let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).await else {
        return;
    };
    // A delay of some ms is all that is lost without.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = pass(from_client, to_server, way.clone()) => {}
        () = pass(from_server, to_client, way.clone()) => {}
    }
}

/// Passes bytes, and at last the end of the connection, on while the way is open.
async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut way: Way) {
    let mut piece = vec![0; PIECE];
    loop {
        let read = from.read(&mut piece).await;
        way.is_open().await;
        let Ok(read @ 1..) = read else { return };
        if to.write_all(&piece[..read]).await.is_err() {
            return;
        }
    }
}
