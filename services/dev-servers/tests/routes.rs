//! A server of a cluster is cut off from the others, and joined to them again.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fiec_dev_servers::{NatsCluster, NatsServer, NoProgress, Sync, locate_nats};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(60);

async fn cluster(dir: &tempfile::TempDir) -> NatsCluster {
    let binary = locate_nats(&NoProgress).await.unwrap();
    let cluster = NatsCluster::start(&binary, dir.path(), 3, Sync::Default);
    cluster.await.unwrap()
}

/// A client that speaks the plain protocol.
struct Client(BufReader<TcpStream>);

impl Client {
    async fn of(server: &NatsServer) -> Self {
        let url = server.client_url();
        let login = url.strip_prefix("nats://").unwrap();
        let (login, address) = login.split_once('@').unwrap();
        let (user, password) = login.split_once(':').unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let mut client = Self(BufReader::new(stream));
        let text = format!(r#"CONNECT {{"verbose":false,"user":"{user}","pass":"{password}"}}"#);
        client.say(&text).await;
        client
    }

    /// Sends commands. Returns when the server has read them.
    async fn say(&mut self, commands: &str) {
        let text = format!("{commands}\r\nPING\r\n");
        self.0.write_all(text.as_bytes()).await.unwrap();
        while self.line().await != "PONG" {}
    }

    async fn publish(&mut self, letter: char) {
        self.say(&format!("PUB news 1\r\n{letter}")).await;
    }

    /// The payload of the next message.
    async fn message(&mut self) -> String {
        while !self.line().await.starts_with("MSG ") {}
        self.line().await
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        let read = tokio::time::timeout(PATIENCE, self.0.read_line(&mut line));
        assert_ne!(read.await.unwrap().unwrap(), 0, "closed");
        line.trim_end().to_owned()
    }
}

#[tokio::test]
async fn a_server_that_is_cut_off_serves_its_clients_and_hears_the_others_late() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = cluster(&dir).await;
    let mut reader = Client::of(&cluster.servers[0]).await;
    let mut near = Client::of(&cluster.servers[0]).await;
    let mut far = Client::of(&cluster.servers[1]).await;
    reader.say("SUB news 1").await;
    // The other server hears of the subscription a moment later.
    let mut heard = String::new();
    while heard != "A" {
        far.publish('A').await;
        let message = tokio::time::timeout(Duration::from_millis(100), reader.message());
        heard = message.await.unwrap_or_default();
    }

    cluster.routes.cut(0);
    far.publish('B').await;
    // Time enough for the message, if the way were open.
    tokio::time::sleep(Duration::from_millis(500)).await;
    near.publish('C').await;
    let mut next = heard;
    while next == "A" {
        next = reader.message().await;
    }
    assert_eq!(next, "C");
    cluster.routes.join(0);
    assert_eq!(reader.message().await, "B");
    far.publish('D').await;
    assert_eq!(reader.message().await, "D");
}

/// Ports at the far ends of a server's routes, once they lead to both others.
async fn far_ends(server: &NatsServer) -> BTreeSet<u64> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let page = server.page("/routez").await.unwrap_or_default();
        let routes = page["routes"].as_array().cloned().unwrap_or_default();
        let names: BTreeSet<_> = routes.iter().map(|r| r["remote_name"].as_str()).collect();
        // Three for each other server, and one for the account of the servers.
        if names.len() == 2 && routes.len() == 8 {
            return routes.iter().filter_map(|r| r["port"].as_u64()).collect();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the servers have not found each other");
}

#[tokio::test]
async fn no_route_passes_the_proxies_also_after_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = cluster(&dir).await;
    for restarted in 0..3 {
        // It listens on another port then, and the others find it there.
        cluster.servers[restarted].restart().await.unwrap();
        let mut ports = BTreeSet::new();
        for server in &cluster.servers {
            let page = server.page("/varz").await.unwrap();
            ports.insert(page["cluster"]["cluster_port"].as_u64().unwrap());
        }
        assert_eq!(ports.len(), 3);
        for server in &cluster.servers {
            let ends = far_ends(server).await;
            assert!(ends.is_disjoint(&ports), "{ends:?} has one of {ports:?}");
        }
    }
}
