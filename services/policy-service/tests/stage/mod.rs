//! A private broker, a service in a task, and nodes played by the test.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fiec_broker::trust::NodeKey;
use fiec_broker::{Broker, ConnectOptions, Draft, Entry, Ledger, capsules, topology};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_policy_service::{Options, PolicyService, ServiceError};
use fiec_schemas::hardware::{Substrate, default_thresholds};
use fiec_schemas::messages::{CapsuleMessage, HANDOVER_HEADER, Handover};
use fiec_schemas::substrate::SubstrateKind;
use fiec_schemas::trust::{NodeIdentity, Proof, SUITE};
use fiec_schemas::{
    Bound, ClientId, Digest, Event, ExecutionId, HardwareVector, InstanceId, NodeDescriptor,
    NodeId, Phase, Reading, Signal, Tenant, Timestamp, subjects,
};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

pub struct Stage {
    pub broker: Broker,
    pub server: NatsServer,
    _nodes: DropGuard,
    nodes: CancellationToken,
    _dir: tempfile::TempDir,
}

pub struct Running {
    stop: DropGuard,
    ended: oneshot::Receiver<Result<(), ServiceError>>,
    /// Ends all tasks at once.
    die: CancellationToken,
}

impl Running {
    /// Ends the service without a message, as a kill would.
    pub async fn die(self) {
        self.die.cancel();
        // The thread has ended, with its runtime and its connection.
        assert!(self.ended.await.is_err());
    }

    pub async fn stop(self) {
        drop(self.stop);
        self.ended.await.unwrap().unwrap();
    }
}

pub fn tenant() -> Tenant {
    Tenant::new("lab").unwrap()
}

/// Waits for a condition, at most a minute.
pub async fn until<F: Future<Output = bool>>(mut condition: impl FnMut() -> F) {
    let began = Instant::now();
    while !condition().await {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "it did not come true in time"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

impl Stage {
    pub async fn with_nodes(names: &[&str]) -> Self {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_test_writer()
            .try_init();
        let dir = tempfile::tempdir().unwrap();
        let binary = locate_nats(&NoProgress).await.unwrap();
        let server = NatsServer::start(NatsOptions::new(binary, dir.path().join("nats")))
            .await
            .unwrap();
        let broker = Broker::connect(ConnectOptions::new(server.client_url(), "test"))
            .await
            .unwrap();
        topology::apply(&broker, &topology::Profile::default())
            .await
            .unwrap();
        let nodes = CancellationToken::new();
        let stage = Self {
            broker,
            server,
            _nodes: nodes.clone().drop_guard(),
            nodes,
            _dir: dir,
        };
        for name in names {
            stage.add_node(name, &["synthetic@1"], 4).await;
        }
        stage
    }

    /// Adds a node that reports five times a second that it is healthy.
    pub async fn add_node(&self, name: &str, programs: &[&str], slots: u32) {
        let (node, instance) = self.claim(name, programs, slots).await;
        let speaks = speak(self.broker.clone(), node.clone(), instance, slots);
        let answers = answer(self.broker.clone(), node, instance);
        let stop = self.nodes.clone();
        tokio::spawn(async move {
            stop.run_until_cancelled(async { tokio::join!(speaks, answers) })
                .await
        });
    }

    /// Adds a node that reports that it is healthy until the guard is dropped, and answers no
    /// request.
    pub async fn add_mute_node(&self, name: &str) -> (InstanceId, DropGuard) {
        let (node, instance) = self.claim(name, &["synthetic@1"], 4).await;
        let (stop, speaks) = (
            CancellationToken::new(),
            speak(self.broker.clone(), node, instance, 4),
        );
        let token = stop.clone();
        tokio::spawn(async move { token.run_until_cancelled(speaks).await });
        (instance, stop.drop_guard())
    }

    /// The control requests to a node, as they arrive.
    pub async fn hears_control(&self, node: &str) -> Arc<Mutex<Vec<String>>> {
        let subject = subjects::control(&NodeId::new(node).unwrap());
        let mut requests = self.broker.client.subscribe(subject).await.unwrap();
        self.broker.client.flush().await.unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let all = heard.clone();
        tokio::spawn(async move {
            while let Some(request) = requests.next().await {
                let text = String::from_utf8_lossy(&request.payload).into_owned();
                all.lock().unwrap().push(text);
            }
        });
        heard
    }

    /// Publishes a node's descriptor, and its proof that it computes correctly.
    async fn claim(&self, name: &str, programs: &[&str], slots: u32) -> (NodeId, InstanceId) {
        let node = NodeId::new(name).unwrap();
        let instance = InstanceId::random();
        let key = NodeKey::random();
        let descriptor = NodeDescriptor {
            v: 1,
            node: node.clone(),
            instance,
            host: "h".into(),
            pid: 1,
            version: "0".into(),
            started_at: Timestamp::now(),
            shard: 0,
            slots,
            cpus: 2,
            isa: "x86_64+avx2+fma".into(),
            memory_limit_bytes: 1 << 30,
            memory_limit_source: "declared".into(),
            substrates: vec![Substrate {
                id: "host".into(),
                kind: SubstrateKind::Cpu,
                name: "host".into(),
                memory_bytes: None,
                device: None,
            }],
            profile: Default::default(),
            programs: programs.iter().map(ToString::to_string).collect(),
            labels: BTreeMap::new(),
            thresholds: default_thresholds(),
            http: None,
            parks: 0,
            identity: Some(NodeIdentity {
                key: key.public(),
                environment: Digest::of(b"played"),
            }),
        };
        let bucket = self
            .broker
            .js
            .get_key_value(subjects::NODES_BUCKET)
            .await
            .unwrap();
        bucket
            .put(
                subjects::node_key(&node),
                serde_json::to_vec(&descriptor).unwrap().into(),
            )
            .await
            .unwrap();
        let expires = Timestamp::from_micros(4_000_000_000_000_000);
        let proof = Proof::passing(&descriptor, SUITE, Timestamp::now(), expires);
        let proof = serde_json::to_vec(&key.sign(&proof).unwrap()).unwrap();
        bucket
            .put(subjects::proof_key(&node), proof.into())
            .await
            .unwrap();
        (node, instance)
    }

    /// Starts a service on its own thread and runtime, as in production.
    pub async fn service(&self) -> Running {
        self.service_with(Options::default()).await
    }

    /// Starts a service with these options.
    pub async fn service_with(&self, policy: Options) -> Running {
        let url = self.server.client_url();
        let stop = CancellationToken::new();
        let token = stop.clone();
        let (tell, ended) = oneshot::channel();
        let die = CancellationToken::new();
        let dies = die.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let result = runtime.block_on(dies.run_until_cancelled(async {
                let options = ConnectOptions::new(url, "policy");
                let broker = Broker::connect(options).await.unwrap();
                PolicyService::new(policy, broker).run(token).await
            }));
            drop(runtime);
            if let Some(result) = result {
                let _ = tell.send(result);
            }
        });
        let running = Running {
            stop: stop.drop_guard(),
            ended,
            die,
        };
        until(|| async { self.answers().await }).await;
        running
    }

    async fn answers(&self) -> bool {
        let asked = self
            .broker
            .client
            .request("fiec.api.nodes", "{}".into())
            .await;
        asked.is_ok_and(|m| !String::from_utf8_lossy(&m.payload).contains("\"error\":"))
    }

    pub async fn publish(&self, body: &str) {
        self.broker
            .js
            .publish("fiec.submit.lab", body.to_owned().into())
            .await
            .unwrap()
            .await
            .unwrap();
    }

    pub async fn try_publish(&self, body: &str) -> bool {
        match self
            .broker
            .js
            .publish("fiec.submit.lab", body.to_owned().into())
            .await
        {
            Ok(ack) => ack.await.is_ok(),
            Err(_) => false,
        }
    }

    pub async fn submissions_left(&self) -> u64 {
        let stream = self
            .broker
            .js
            .get_stream(subjects::SUBMIT_STREAM)
            .await
            .unwrap();
        stream.cached_info().state.messages
    }

    pub async fn last(&self, client: &str) -> Entry {
        self.last_of(ExecutionId::from_client(
            &tenant(),
            &ClientId::new(client).unwrap(),
        ))
        .await
    }

    /// The causes of an execution's bindings.
    pub async fn causes(&self, client: &str) -> Vec<&'static str> {
        let (ledger, last) = (Ledger::new(&self.broker), self.last(client).await.seq);
        let mut causes = Vec::new();
        for seq in 1..=last {
            let Ok(entry) = ledger.by_sequence(seq).await else {
                continue;
            };
            causes.extend(entry.message.events.iter().filter_map(|e| match e {
                Event::Bound { cause, .. } => Some(cause.as_str()),
                _ => None,
            }));
        }
        causes
    }

    pub async fn last_of(&self, id: ExecutionId) -> Entry {
        let ledger = Ledger::new(&self.broker);
        until(|| async { ledger.last(&tenant(), id).await.is_ok_and(|e| e.is_some()) }).await;
        ledger.last(&tenant(), id).await.unwrap().unwrap()
    }

    pub async fn capsule(&self, node: &str) -> CapsuleMessage {
        let consumer = capsules::node_consumer(&self.broker, 0, &NodeId::new(node).unwrap())
            .await
            .unwrap();
        let mut messages = consumer.messages().await.unwrap();
        let message = tokio::time::timeout(Duration::from_secs(60), messages.next())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        message.ack().await.unwrap();
        serde_json::from_slice(&message.payload).unwrap()
    }

    /// The handover messages to a node, as they arrive.
    pub async fn hears(&self, node: &str) -> Arc<Mutex<Vec<(Handover, Bytes)>>> {
        let subject = subjects::handover(&NodeId::new(node).unwrap());
        let mut messages = self.broker.client.subscribe(subject).await.unwrap();
        self.broker.client.flush().await.unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let all = heard.clone();
        tokio::spawn(async move {
            while let Some(message) = messages.next().await {
                let headers = message.headers.unwrap();
                let word = headers.get(HANDOVER_HEADER).unwrap().as_str();
                let word = serde_json::from_str(word).unwrap();
                all.lock().unwrap().push((word, message.payload));
            }
        });
        heard
    }

    pub async fn record(&self, subject: &str) -> serde_json::Value {
        let stream = self
            .broker
            .js
            .get_stream(subjects::RECORD_STREAM)
            .await
            .unwrap();
        until(|| async {
            stream
                .get_last_raw_message_by_subject(subject)
                .await
                .is_ok()
        })
        .await;
        let message = stream
            .get_last_raw_message_by_subject(subject)
            .await
            .unwrap();
        serde_json::from_slice(&message.payload).unwrap()
    }

    pub async fn ask<T: DeserializeOwned>(&self, subject: &str, request: &serde_json::Value) -> T {
        self.ask_raw(subject, &request.to_string()).await
    }

    pub async fn ask_raw<T: DeserializeOwned>(&self, subject: &str, body: &str) -> T {
        let message = self
            .broker
            .client
            .request(subject.to_owned(), body.to_owned().into())
            .await
            .unwrap();
        serde_json::from_slice(&message.payload)
            .unwrap_or_else(|e| panic!("{e}: {:?}", message.payload))
    }

    /// Plays the worker: started and completed in one message.
    pub async fn finish(&self, client: &str, node: &str) {
        let entry = self.last(client).await;
        let Phase::Bound(Bound { binding, .. }) = &entry.message.state.phase else {
            panic!("{:?}", entry.message.state.phase)
        };
        let author = format!("worker/{node}/{}", binding.instance);
        let (epoch, at) = (entry.message.state.epoch, Timestamp::now());
        let done = vec![
            Event::Started {
                epoch,
                computing_since: at,
            },
            Event::Completed {
                result: serde_json::Value::Null,
                object: None,
                computed_until: at,
                capsules: 1,
                outputs: vec![],
                energy: None,
            },
        ];
        let draft = Draft::new(&entry.into(), done, &author, at).unwrap();
        Ledger::new(&self.broker)
            .append(draft, Bytes::new())
            .await
            .unwrap();
    }

    pub async fn restart_broker(&mut self) {
        self.server.kill().await;
        self.server.restart().await.unwrap();
    }
}

async fn speak(broker: Broker, node: NodeId, instance: InstanceId, slots: u32) {
    for count in 1.. {
        let at = Timestamp::now();
        let reading = Reading {
            signal: Signal::Memory,
            device: None,
            value: Some(0.2),
            raw: None,
            limit: None,
            unit: "ratio".into(),
            source: "test".into(),
            at,
            missing: None,
            envelope: None,
        };
        let vector = HardwareVector {
            v: 1,
            node: node.clone(),
            instance,
            count,
            at,
            clock: None,
            readings: vec![reading],
            draining: false,
            slots,
            running_count: 0,
            queued_count: 0,
            running: vec![],
            arriving: vec![],
            stuck: Vec::new(),
        };
        let payload = serde_json::to_vec(&vector).unwrap();
        let _ = broker
            .client
            .publish(subjects::telemetry(&node), payload.into())
            .await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn answer(broker: Broker, node: NodeId, instance: InstanceId) {
    let mut requests = broker
        .client
        .subscribe(subjects::control(&node))
        .await
        .unwrap();
    while let Some(request) = requests.next().await {
        let reply = serde_json::json!({"node": node, "instance": instance});
        if let Some(to) = request.reply {
            let _ = broker.client.publish(to, reply.to_string().into()).await;
        }
    }
}
