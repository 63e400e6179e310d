//! `fiec health`: asks a worker or service of this machine whether it is healthy. It is the probe
//! of containers that have no shell and no other client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use fiec_broker::sight;

use crate::exit::Outcome;

/// Ask a worker or service of this machine whether it is healthy; the exit code is 0 or 1
#[derive(Debug, Args)]
pub struct HealthArgs {
    /// The service's --http address; for an address of all interfaces, loopback is used
    #[arg(long, env = "FIEC_HTTP")]
    pub http: SocketAddr,
    /// Time limit of the answer in seconds
    #[arg(long, default_value_t = 3.0)]
    pub within: f64,
}

/// Requests `/healthz` once.
///
/// # Errors
/// If there is no answer in time, or the answer is not healthy. The message has the answer.
pub async fn run(args: HealthArgs) -> anyhow::Result<Outcome> {
    let within = Duration::from_secs_f64(args.within.clamp(0.001, 3_600.0));
    let address = reachable(args.http);
    sight::ask(&address.to_string(), within)
        .await
        .with_context(|| format!("http://{address}/healthz"))?;
    println!("ok");
    Ok(Outcome::Done)
}

/// The address by which this machine reaches a listener.
fn reachable(listening: SocketAddr) -> SocketAddr {
    let here = match listening.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(here, listening.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    fn args(port: u16) -> HealthArgs {
        let http = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        HealthArgs { http, within: 5.0 }
    }

    /// Asks a server that gives this answer.
    async fn said(answer: &'static str) -> Result<Outcome, String> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let read = socket.read(&mut request).await.unwrap();
            assert!(request[..read].starts_with(b"GET /healthz HTTP/1.1\r\n"));
            socket.write_all(answer.as_bytes()).await.unwrap();
        };
        let (outcome, ()) = tokio::join!(run(args(port)), server);
        outcome.map_err(|error| format!("{error:#}"))
    }

    #[tokio::test]
    async fn a_service_that_is_well_is_healthy_and_one_that_is_not_says_why() {
        let well = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n";
        assert_eq!(said(well).await, Ok(Outcome::Done));
        let ill = "HTTP/1.1 503 Service Unavailable\r\n\r\nNATS: disconnected\n";
        let why = said(ill).await.unwrap_err();
        assert!(why.ends_with("/healthz: NATS: disconnected"), "{why}");
        let why = said("HTTP/1.1 404 Not Found\r\n\r\n").await.unwrap_err();
        assert!(why.contains("404"), "{why}");
        assert!(said("").await.is_err());
    }

    #[tokio::test]
    async fn nobody_there_is_not_healthy() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let why = run(args(port)).await.unwrap_err().to_string();
        assert!(why.contains(&format!("127.0.0.1:{port}")), "{why}");
    }
}
