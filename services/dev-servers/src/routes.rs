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
//! - A server chooses the port on which it listens for the others, and then says it ([`Address`]). A port
//!   that somebody chose for it could be lost before it listens. Until then connections to it are held.
//! - The proxies run in a thread of their own, so that a caller that blocks its own thread delays no
//!   heartbeat. They end with [`Routes`] and the last [`Address`].

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

/// What the proxies know of a server.
#[derive(Debug, Clone, Copy)]
struct Known {
    reach: Reach,
    /// Where it listens for the others. None until it has said so.
    port: Option<u16>,
}

/// The proxies of a cluster: one for each pair of servers and each direction.
#[derive(Debug)]
pub struct Routes {
    /// For each server. The proxies end when its last sender is dropped.
    servers: watch::Sender<Vec<Known>>,
    /// Ports of the proxies from each server to each server.
    ports: Vec<Vec<u16>>,
}

/// Where a server of the cluster says on which port it listens for the others.
#[derive(Debug, Clone)]
pub struct Address {
    server: usize,
    servers: watch::Sender<Vec<Known>>,
}

impl Address {
    /// The server listens on this port from now on.
    pub(crate) fn is(&self, port: u16) {
        self.servers.send_if_modified(|all| {
            let known = all.get_mut(self.server);
            known.is_some_and(|known| known.port.replace(port) != Some(port))
        });
    }
}

impl Routes {
    /// Starts the proxies between `count` servers.
    pub(crate) fn start(count: usize) -> std::io::Result<Self> {
        let unknown = Known {
            reach: Reach::Joined,
            port: None,
        };
        let (servers, seen) = watch::channel(vec![unknown; count]);
        let mut proxies = Vec::new();
        let mut ports = Vec::new();
        for from in 0..count {
            let mut own = Vec::new();
            for to in 0..count {
                let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
                listener.set_nonblocking(true)?;
                own.push(listener.local_addr()?.port());
                let servers = seen.clone();
                proxies.push((listener, Way { from, to, servers }));
            }
            ports.push(own);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        std::thread::Builder::new()
            .name("server-routes".into())
            .spawn(move || runtime.block_on(serve(proxies, seen)))?;
        Ok(Self { servers, ports })
    }

    /// Ports of the proxies that lead from this server to each, itself included.
    pub(crate) fn from(&self, server: usize) -> Vec<u16> {
        self.ports.get(server).cloned().unwrap_or_default()
    }

    /// Where this server says its port.
    pub(crate) fn address(&self, server: usize) -> Address {
        Address {
            server,
            servers: self.servers.clone(),
        }
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
        self.servers.send_modify(|all| {
            if let Some(known) = all.get_mut(server) {
                known.reach = to;
            }
        });
    }
}

/// The way from one server to another.
#[derive(Debug, Clone)]
struct Way {
    from: usize,
    to: usize,
    servers: watch::Receiver<Vec<Known>>,
}

impl Way {
    /// Waits until neither end is cut off. Returns the port of the far one, which may not be known yet.
    async fn is_open(&mut self) -> Option<u16> {
        let ends = [self.from, self.to];
        let is_joined = |known: &Known| known.reach == Reach::Joined;
        let open = |all: &Vec<Known>| ends.iter().all(|end| all.get(*end).is_some_and(is_joined));
        // Fails at the end of all proxies.
        let all = self.servers.wait_for(open).await.ok()?;
        all.get(self.to)?.port
    }

    /// Waits until neither end is cut off and the far one listens. None at the end of all proxies.
    async fn port(&mut self) -> Option<u16> {
        loop {
            if let Some(port) = self.is_open().await {
                return Some(port);
            }
            self.servers.changed().await.ok()?;
        }
    }
}

/// Runs the proxies until the last sender of `servers` is gone.
async fn serve(
    proxies: Vec<(std::net::TcpListener, Way)>,
    mut servers: watch::Receiver<Vec<Known>>,
) {
    for (listener, way) in proxies {
        match TcpListener::from_std(listener) {
            Ok(listener) => drop(tokio::spawn(accept(listener, way))),
            Err(error) => tracing::warn!(%error, "a proxy between servers cannot listen"),
        }
    }
    while servers.changed().await.is_ok() {}
}

async fn accept(listener: TcpListener, way: Way) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => drop(tokio::spawn(connect(client, way.clone()))),
            Err(error) => {
                tracing::warn!(%error, "a proxy between servers cannot accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

/// Passes one connection on to a server. It ends as soon as either side does.
async fn connect(client: TcpStream, mut way: Way) {
    let Some(port) = way.port().await else {
        return;
    };
    let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await else {
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
