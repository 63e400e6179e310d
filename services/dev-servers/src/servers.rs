//! Both servers in one folder. A temporary folder is removed at the end.
//!
//! ```text
//! DATA/nats/            store, configuration, log of nats-server
//! DATA/nats/password    its password
//! DATA/nats/s1/         the same of the first of several
//! DATA/postgres/        the cluster
//! DATA/postgres.password
//! DATA/postgres.log     its log
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use crate::account::Account;
use crate::cluster::NatsCluster;
use crate::error::{At, Result};
use crate::locate::{Sources, locate_nats_in, locate_postgres_in};
use crate::nats::{NatsOptions, NatsServer, Sync};
use crate::postgres::{Postgres, PostgresOptions};
use crate::progress::Progress;
use crate::routes::Routes;
use crate::secret;

/// Options of the servers.
#[derive(Debug, Clone)]
pub struct Options {
    /// `None`: a temporary folder.
    pub data_dir: Option<PathBuf>,
    /// Start PostgreSQL as well.
    pub want_postgres: bool,
    /// Sources of the programs.
    pub sources: Sources,
    /// Port of nats-server; a free one otherwise.
    pub nats_port: Option<u16>,
    /// Port of PostgreSQL; a free one otherwise.
    pub postgres_port: Option<u16>,
    /// When nats-server's writes reach the disk.
    pub sync: Sync,
    /// See [`NatsOptions::extra_config`]. Only for a single server.
    pub nats_config: String,
    /// Number of nats-servers. Several form a cluster on free ports.
    pub brokers: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            data_dir: None,
            want_postgres: true,
            sources: Sources::from_env(),
            nats_port: None,
            postgres_port: None,
            sync: Sync::Default,
            nats_config: String::new(),
            brokers: 1,
        }
    }
}

/// Running servers. The fields are dropped in this order: first the servers, then their folder.
#[derive(Debug)]
pub struct DevServers {
    /// The broker, or the first server of its cluster.
    pub nats: NatsServer,
    /// The other servers of the cluster.
    pub peers: Vec<NatsServer>,
    /// How the servers of the cluster reach each other.
    pub routes: Option<Routes>,
    /// The database, if it was requested.
    pub postgres: Option<Postgres>,
    data: Data,
}

#[derive(Debug)]
enum Data {
    Temporary(TempDir),
    Given(PathBuf),
}

impl Data {
    fn path(&self) -> &Path {
        match self {
            Self::Temporary(dir) => dir.path(),
            Self::Given(dir) => dir,
        }
    }
}

impl DevServers {
    /// Finds, fetches and starts both servers concurrently.
    ///
    /// # Errors
    /// If a server cannot be found or started.
    pub async fn start(options: Options, progress: &dyn Progress) -> Result<Self> {
        let durable = options.data_dir.is_some();
        let data = match options.data_dir {
            Some(dir) => {
                secret::create_folder(&dir, folder_mode(Account::for_servers().as_ref()))?;
                Data::Given(dir)
            }
            None => Data::Temporary(temporary()?),
        };
        let nats = async {
            let binary = locate_nats_in(&options.sources, progress).await?;
            progress.step(&format!(
                "starting nats-server {} ({})",
                binary.version, binary.origin
            ));
            let dir = data.path().join("nats");
            if options.brokers > 1 {
                let cluster = NatsCluster::start(&binary, &dir, options.brokers, options.sync);
                let NatsCluster { servers, routes } = cluster.await?;
                let mut servers = servers.into_iter();
                if let Some(first) = servers.next() {
                    progress.done(&format!("{} nats-servers", options.brokers));
                    return Ok((first, servers.collect(), Some(routes)));
                }
            }
            let mut nats = NatsOptions::new(binary, dir);
            nats.port = options.nats_port;
            nats.sync = options.sync;
            nats.extra_config = options.nats_config;
            let server = NatsServer::start(nats).await?;
            progress.done(&format!("nats-server at {}", server.address()));
            Ok((server, Vec::new(), None))
        };
        let postgres = async {
            if !options.want_postgres {
                return Ok(None);
            }
            let install = locate_postgres_in(&options.sources, progress).await?;
            progress.step(&format!(
                "starting PostgreSQL {} ({})",
                install.version, install.origin
            ));
            let mut postgres = PostgresOptions::new(install, data.path().join("postgres"));
            postgres.port = options.postgres_port;
            postgres.durable = durable;
            let server = Postgres::start(postgres).await?;
            progress.done(&format!("PostgreSQL at {}", server.address()));
            Ok(Some(server))
        };
        let ((nats, peers, routes), postgres) = tokio::try_join!(nats, postgres)?;
        Ok(Self {
            nats,
            peers,
            routes,
            postgres,
            data,
        })
    }

    /// Data folder of both servers.
    pub fn data_dir(&self) -> &Path {
        self.data.path()
    }

    /// URL of the broker, with its password. Several servers are separated by commas.
    pub fn nats_url(&self) -> String {
        self.nats_urls().join(",")
    }

    /// URLs of all servers of the broker.
    pub fn nats_urls(&self) -> Vec<String> {
        self.brokers().map(NatsServer::client_url).collect()
    }

    /// All servers of the broker.
    pub fn brokers(&self) -> impl Iterator<Item = &NatsServer> {
        std::iter::once(&self.nats).chain(&self.peers)
    }

    /// A server of the broker by its place, from 0.
    pub fn broker_mut(&mut self, at: usize) -> Option<&mut NatsServer> {
        std::iter::once(&mut self.nats)
            .chain(&mut self.peers)
            .nth(at)
    }

    /// URL of the database, with its password.
    pub fn postgres_url(&self) -> Option<String> {
        self.postgres.as_ref().map(Postgres::url)
    }

    /// Stops both servers, each gracefully until `deadline`, and removes a temporary folder.
    pub async fn stop(mut self, deadline: Duration) {
        let postgres = async {
            match &mut self.postgres {
                Some(postgres) => postgres.stop(deadline).await,
                None => true,
            }
        };
        let peers = async {
            let mut all = true;
            for peer in &mut self.peers {
                all &= peer.stop(deadline).await;
            }
            all
        };
        let (nats, peers, postgres) = tokio::join!(self.nats.stop(deadline), peers, postgres);
        if !(nats && peers && postgres) {
            tracing::warn!("a server did not stop in time and was killed");
        }
    }
}

/// Makes a temporary folder that the user of the servers can reach.
fn temporary() -> Result<TempDir> {
    let account = Account::for_servers();
    let usual = std::env::temp_dir();
    let base = [usual.as_path(), Path::new("/var/tmp"), Path::new("/tmp")]
        .into_iter()
        .find(|base| {
            account
                .as_ref()
                .is_none_or(|a| a.blocked_at(base).is_none())
        })
        .unwrap_or(&usual);
    let dir = tempfile::Builder::new()
        .prefix("fiec-dev-")
        .tempdir_in(base)
        .at("cannot create a temporary folder in", base)?;
    secret::set_mode(dir.path(), folder_mode(account.as_ref()))?;
    Ok(dir)
}

/// Only this user may enter. If PostgreSQL runs as another user, others may enter but not list.
fn folder_mode(account: Option<&Account>) -> u32 {
    if account.is_some() { 0o711 } else { 0o700 }
}
