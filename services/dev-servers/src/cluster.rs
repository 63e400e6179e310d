//! Three or more connected `nats-server` processes on loopback, for tests of replicated streams.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::task::JoinSet;

use crate::child::tail;
use crate::error::{At, Error, Result};
use crate::locate::NatsBinary;
use crate::nats::{NatsOptions, NatsServer, Sync};
use crate::routes::{Address, NOWHERE, Routes};
use crate::secret::{self, USER};

/// Time limit until the servers have found each other.
const WITHIN: Duration = Duration::from_secs(60);

/// The place of a server in its cluster.
#[derive(Debug, Clone)]
pub struct Member {
    /// Where it says on which port it listens for the others.
    pub address: Address,
    /// Ports of the proxies that lead to all.
    pub routes: Vec<u16>,
    /// What the servers ask each other for.
    pub password: String,
}

impl Member {
    /// Its part of the configuration.
    pub(crate) fn config(&self) -> String {
        let password = &self.password;
        let route = |port: &u16| format!("\"nats-route://{USER}:{password}@127.0.0.1:{port}\"");
        let routes: Vec<String> = self.routes.iter().map(route).collect();
        let routes = routes.join(", ");
        format!(
            "cluster {{ name: \"fiec-dev\", listen: \"127.0.0.1:-1\", \
             advertise: \"{NOWHERE}\", \
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
    /// How the servers reach each other.
    pub routes: Routes,
}

impl NatsCluster {
    /// Starts `count` servers under `dir`, and waits until JetStream reaches all of them.
    ///
    /// # Errors
    /// If one cannot be started or is not ready in time.
    pub async fn start(binary: &NatsBinary, dir: &Path, count: usize, sync: Sync) -> Result<Self> {
        secret::create_folder(dir, 0o700)?;
        let routes = Routes::start(count).at("cannot start proxies for", dir)?;
        let password = secret::random();
        let mut starting = JoinSet::new();
        for index in 0..count {
            let name = format!("s{}", index + 1);
            let data = dir.join(&name);
            secret::create_folder(&data, 0o700)?;
            // A client that moves to another server uses the same password there.
            secret::write(&data.join("password"), &password)?;
            let mut options = NatsOptions::new(binary.clone(), data);
            options.server_name = name;
            options.sync = sync;
            options.cluster = Some(Member {
                address: routes.address(index),
                routes: routes.from(index),
                password: password.clone(),
            });
            // All at once: none is ready before most of them have met.
            starting.spawn(async move { (index, NatsServer::start(options).await) });
        }
        let mut servers = Vec::new();
        // The first that fails ends the others, which would wait for it.
        while let Some(started) = starting.join_next().await {
            let started = started.map_err(std::io::Error::other);
            let (index, server) = started.at("cannot start a server in", dir)?;
            servers.push((index, server?));
        }
        servers.sort_unstable_by_key(|(index, _)| *index);
        let servers: Vec<NatsServer> = servers.into_iter().map(|(_, server)| server).collect();
        meet(&servers).await?;
        Ok(Self { servers, routes })
    }

    /// The URLs of all servers, separated by commas.
    pub fn urls(&self) -> String {
        let urls: Vec<String> = self.servers.iter().map(NatsServer::client_url).collect();
        urls.join(",")
    }
}

/// Waits until one server leads JetStream and hears all others. Before, it refuses a stream with a
/// copy on each.
async fn meet(servers: &[NatsServer]) -> Result<()> {
    let deadline = Instant::now() + WITHIN;
    while Instant::now() < deadline {
        for server in servers {
            // Only the leader knows of all others whether they follow.
            let page = server.page("/jsz").await.unwrap_or_default();
            let others = page["meta_cluster"]["replicas"].as_array();
            let others = others.map_or(&[][..], Vec::as_slice);
            let follows = |other: &Value| other["current"] == true && other["offline"] != true;
            if others.len() + 1 == servers.len() && others.iter().all(follows) {
                return Ok(());
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let log = servers.first().map(NatsServer::log).unwrap_or_default();
    Err(Error::NotStarted {
        server: "the cluster of nats-servers",
        reason: format!("its servers did not find each other within {WITHIN:?}"),
        tail: tail(&log),
        log,
    })
}
