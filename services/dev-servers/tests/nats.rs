//! A real nats-server, fetched, killed and restarted.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use fiec_dev_servers::{
    Error, NatsOptions, NatsServer, NoProgress, Origin, Sources, locate_nats_in,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

async fn options(dir: &Path) -> NatsOptions {
    let binary = locate_nats_in(&Sources::fetched_only(), &NoProgress)
        .await
        .unwrap();
    assert!(matches!(binary.origin, Origin::Cache | Origin::Fetched));
    NatsOptions::new(binary, dir)
}

/// The login that a server's URL contains.
fn login(server: &NatsServer) -> String {
    let url = server.client_url();
    let (user, password) = url
        .strip_prefix("nats://")
        .and_then(|rest| rest.split_once('@')?.0.split_once(':'))
        .unwrap();
    format!(r#"{{"verbose":false,"user":"{user}","pass":"{password}"}}"#)
}

/// Sends one request over the plain protocol. Returns the answer's payload.
async fn request(server: &NatsServer, subject: &str, body: &str) -> String {
    let (port, login) = (server.port(), login(server));
    let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    assert!(line.starts_with("INFO "), "{line}");
    let text = format!(
        "CONNECT {login}\r\nSUB answer 1\r\nPUB {subject} answer {}\r\n{body}\r\n",
        body.len()
    );
    stream.write_all(text.as_bytes()).await.unwrap();
    loop {
        line.clear();
        assert_ne!(stream.read_line(&mut line).await.unwrap(), 0, "closed");
        if let Some(rest) = line.strip_prefix("MSG ") {
            let length = rest.split_whitespace().next_back().unwrap();
            let mut payload = vec![0; length.parse().unwrap()];
            stream.read_exact(&mut payload).await.unwrap();
            return String::from_utf8(payload).unwrap();
        }
    }
}

#[tokio::test]
async fn a_killed_server_comes_back_on_its_port_with_its_store() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = NatsServer::start(options(dir.path()).await).await.unwrap();
    let (port, pid) = (server.port(), server.pid());
    let stream = r#"{"name":"S","subjects":["s.>"],"storage":"file"}"#;
    let made = request(&server, "$JS.API.STREAM.CREATE.S", stream).await;
    assert!(!made.contains("error"), "{made}");
    let stored = request(&server, "s.a", "hello").await;
    assert!(stored.contains("\"seq\":1"), "{stored}");

    server.kill().await;
    assert!(!server.is_running());
    assert!(TcpStream::connect(("127.0.0.1", port)).await.is_err());
    server.restart().await.unwrap();
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    let info = request(&server, "$JS.API.STREAM.INFO.S", "").await;
    assert!(info.contains("\"messages\":1"), "{info}");

    assert!(server.stop(Duration::from_secs(10)).await, "not graceful");
}

#[tokio::test]
async fn a_data_folder_serves_one_server_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let server = NatsServer::start(options(dir.path()).await).await.unwrap();
    let second = NatsServer::start(options(dir.path()).await).await;
    assert!(matches!(second, Err(Error::InUse { .. })), "{second:?}");
    drop(server);
    NatsServer::start(options(dir.path()).await).await.unwrap();
}

#[tokio::test]
async fn a_configuration_that_the_server_refuses_shows_its_words() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path()).await;
    options.extra_config = "no_such_option: 1".into();
    let e = NatsServer::start(options).await.unwrap_err().to_string();
    assert!(e.contains("no_such_option"), "{e}");
}

#[tokio::test]
async fn an_override_that_does_not_exist_is_an_error_and_not_passed_over() {
    let sources = Sources {
        nats_server: Some("/no/such/nats-server".into()),
        ..Sources::fetched_only()
    };
    let e = locate_nats_in(&sources, &NoProgress).await.unwrap_err();
    assert!(e.to_string().contains("FIEC_NATS_SERVER=/no/such"), "{e}");
}

#[tokio::test]
async fn other_users_of_the_machine_cannot_use_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = NatsServer::start(options(dir.path()).await).await.unwrap();
    for login in [
        r#"{"verbose":true}"#,
        r#"{"verbose":true,"user":"fiec","pass":"fiec"}"#,
    ] {
        let stream = TcpStream::connect(("127.0.0.1", server.port()))
            .await
            .unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let text = format!("CONNECT {login}\r\n");
        stream.write_all(text.as_bytes()).await.unwrap();
        line.clear();
        stream.read_line(&mut line).await.unwrap();
        assert_eq!(line.trim(), "-ERR 'Authorization Violation'", "{login}");
    }
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(dir.path()), 0o700);
    for name in ["nats-server.conf", "password", "nats-server.log"] {
        assert_eq!(mode(&dir.path().join(name)), 0o600, "{name}");
    }
    // The next server in this folder has the same password, so URLs in other shells stay valid.
    let before = login(&server);
    drop(server);
    let again = NatsServer::start(options(dir.path()).await).await.unwrap();
    assert_eq!(login(&again), before);
}
