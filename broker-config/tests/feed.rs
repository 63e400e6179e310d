//! What a stream says of its messages, on a private nats-server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may end so")]

use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, feed};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_schemas::subjects;

#[tokio::test]
async fn nothing_waits_where_the_last_message_was_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let binary = locate_nats(&NoProgress).await.unwrap();
    let options = NatsOptions::new(binary, folder.path().join("nats"));
    let server = NatsServer::start(options).await.unwrap();
    let options = ConnectOptions::new(server.client_url(), "test");
    let broker = Broker::connect(options).await.unwrap();
    topology::apply(&broker, &Profile::default()).await.unwrap();
    let name = subjects::RECORD_STREAM;
    assert!(!feed::has_from(&broker, name, 1).await.unwrap());
    for _ in 0..4 {
        let subject = subjects::rejection("lab");
        let sent = broker.js.publish(subject, "{}".into()).await.unwrap();
        sent.await.unwrap();
    }
    let stream = broker.js.get_stream(name).await.unwrap();
    stream.delete_message(2).await.unwrap();
    stream.delete_message(4).await.unwrap();
    assert_eq!(feed::bounds_of(&broker, name).await.unwrap(), (1, 4));
    for (from, there) in [(1, true), (2, true), (3, true), (4, false), (5, false)] {
        let found = feed::has_from(&broker, name, from).await.unwrap();
        assert_eq!(found, there, "{from}");
    }
}
