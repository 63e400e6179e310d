//! The id of the server process behind a new connection, with a server that has another id for each
//! connection.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use std::time::Duration;

use fiec_broker::{Broker, ConnectOptions};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

const PATIENCE: Duration = Duration::from_secs(60);
/// The client tells the old id for about a microsecond: some of the looks fall into it.
const CONNECTIONS: u64 = 60;

/// Speaks as much of the protocol as a connection without subscriptions needs.
async fn serve(stream: TcpStream, life: u64) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let info = format!(
        "INFO {{\"server_id\":\"life-{life}\",\"version\":\"2.11.0\",\"proto\":1,\
         \"headers\":true,\"max_payload\":1048576}}\r\n"
    );
    write.write_all(info.as_bytes()).await?;
    let mut lines = BufReader::new(read).lines();
    while let Some(line) = lines.next_line().await? {
        if line.starts_with("PING") {
            write.write_all(b"PONG\r\n").await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_server_in_use_is_that_of_a_connection_that_was_counted_just_now() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("nats://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        for life in 1.. {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream, life));
        }
    });
    let broker = Broker::connect(ConnectOptions::new(url, "test"));
    let broker = broker.await.unwrap();
    assert_eq!(broker.server_in_use().await.unwrap(), "life-1");
    for life in 2..=CONNECTIONS {
        broker.client.force_reconnect().await.unwrap();
        let asked = tokio::time::Instant::now();
        // Without a pause: the next look is at once behind the count.
        while broker.connection() < life {
            assert!(asked.elapsed() < PATIENCE, "no connection {life}");
            std::hint::spin_loop();
        }
        let server = broker.server_in_use().await.unwrap();
        assert_eq!(server, format!("life-{life}"));
    }
}
