//! Three or more connected `nats-server` processes on loopback, for tests of replicated streams.

use std::net::TcpListener;
use std::path::Path;

use crate::error::{At, Result};
use crate::locate::NatsBinary;
use crate::nats::{NatsOptions, NatsServer, Sync};
use crate::secret::{self, USER};

/// The place of a server in its cluster.
#[derive(Debug, Clone)]
pub struct Member {
    /// Port on which it listens for the others.
    pub port: u16,
    /// Ports of all.
    pub routes: Vec<u16>,
    /// What the servers ask each other for.
    pub password: String,
}

impl Member {
    /// Its part of the configuration.
    pub(crate) fn config(&self) -> String {
        let Self { port, password, .. } = self;
        let route = |port: &u16| format!("\"nats-route://{USER}:{password}@127.0.0.1:{port}\"");
        let routes: Vec<String> = self.routes.iter().map(route).collect();
        let routes = routes.join(", ");
        format!(
            "cluster {{ name: \"fiec-dev\", listen: \"127.0.0.1:{port}\", \
             authorization {{ user: \"{USER}\", password: \"{password}\" }}, \
             routes: [{routes}] }}\n"
        )
    }
}

/// Servers with one account, and one JetStream over all of them. Dropping it kills them.
#[derive(Debug)]
pub struct NatsCluster {
    /// The servers. Each can be killed and restarted on its own.
    pub servers: Vec<NatsServer>,
}

impl NatsCluster {
    /// Starts `count` servers under `dir`, and waits until JetStream answers on each.
    ///
    /// # Errors
    /// If one cannot be started or is not ready in time.
    pub async fn start(binary: &NatsBinary, dir: &Path, count: usize, sync: Sync) -> Result<Self> {
        secret::create_folder(dir, 0o700)?;
        // The routes name every port before the servers choose any.
        let listeners: std::io::Result<Vec<TcpListener>> = (0..count)
            .map(|_| TcpListener::bind(("127.0.0.1", 0)))
            .collect();
        let ports = listeners.and_then(|listeners| {
            let ports = listeners.iter().map(|l| Ok(l.local_addr()?.port()));
            ports.collect::<std::io::Result<Vec<u16>>>()
        });
        let ports = ports.at("cannot reserve ports for", dir)?;
        let password = secret::random();
        let mut starting = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let name = format!("s{}", index + 1);
            let data = dir.join(&name);
            secret::create_folder(&data, 0o700)?;
            // A client that moves to another server uses the same password there.
            secret::write(&data.join("password"), &password)?;
            let mut options = NatsOptions::new(binary.clone(), data);
            options.server_name = name;
            options.sync = sync;
            options.cluster = Some(Member {
                port: *port,
                routes: ports.clone(),
                password: password.clone(),
            });
            // All at once: none is ready before most of them have met.
            starting.push(tokio::spawn(NatsServer::start(options)));
        }
        let mut servers = Vec::new();
        for server in starting {
            let started = server.await.map_err(std::io::Error::other);
            servers.push(started.at("cannot start a server in", dir)??);
        }
        Ok(Self { servers })
    }

    /// The URLs of all servers, separated by commas.
    pub fn urls(&self) -> String {
        let urls: Vec<String> = self.servers.iter().map(NatsServer::client_url).collect();
        urls.join(",")
    }
}
