//! What the service costs: `cargo run --release -p fiec-policy-service --example measure`.
//! A private nats-server, the service on a thread of its own, a worker played by this program.
//! Throughput (executions/s, CPU of the policy's thread for each), latency (publish to capsule),
//! recovery of 100,000 live executions in a process of its own (time, peak resident size).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fiec_broker::trust::NodeKey;
use fiec_broker::{Broker, ConnectOptions, Draft, Ledger, Tip, capsules, topology};
use fiec_dev_servers::{NatsOptions, NatsServer, NoProgress, locate_nats};
use fiec_policy_service::{Options, PolicyService};
use fiec_schemas::hardware::{Substrate, default_thresholds};
use fiec_schemas::messages::CapsuleMessage;
use fiec_schemas::trust::{NodeIdentity, Proof, SUITE};
use fiec_schemas::{
    Cause, Event, ExecutionId, ExecutionState, HardwareVector, InstanceId, NodeDescriptor, NodeId,
    Reading, Signal, Submission, Tenant, Timestamp, subjects,
};
use futures_util::StreamExt;
use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

const EXECUTIONS: usize = 20_000;
const LIVE: u64 = 100_000;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    match args.get(1).map(String::as_str) {
        Some("recover") => runtime.block_on(recover(&args[2])),
        _ => runtime.block_on(measure()),
    }
}

async fn measure() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let binary = locate_nats(&NoProgress).await?;
    let server = NatsServer::start(NatsOptions::new(binary, dir.path().join("nats"))).await?;
    let broker = connect(&server.client_url()).await?;
    topology::apply(&broker, &topology::Profile::default()).await?;
    let url = server.client_url();
    let (stop, policy) = policy_thread(url.clone());
    let worker_url = url.clone();
    let worker = std::thread::spawn(move || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(worker(&worker_url))
    });
    tokio::time::sleep(Duration::from_millis(800)).await;
    latency(&broker).await?;
    for lines in [1, 50] {
        throughput(&broker, lines).await?;
    }
    stop.cancel();
    let cpu = policy
        .join()
        .map_err(|_| anyhow::anyhow!("the policy thread panicked"))??;
    let each = cpu.as_secs_f64() * 1e6 / (2 * EXECUTIONS) as f64;
    println!(
        "policy thread: {:.2} s CPU in all, {each:.1} us an execution",
        cpu.as_secs_f64()
    );
    drop(worker);
    seed(&broker).await?;
    let status = tokio::process::Command::new(std::env::current_exe()?)
        .args(["recover", &url])
        .status()
        .await?;
    anyhow::ensure!(status.success(), "recover failed");
    Ok(())
}

async fn connect(url: &str) -> Result<Broker> {
    Ok(Broker::connect(ConnectOptions::new(url, "measure")).await?)
}

fn policy_thread(url: String) -> (CancellationToken, std::thread::JoinHandle<Result<Duration>>) {
    let stop = CancellationToken::new();
    let token = stop.clone();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let broker = connect(&url).await?;
            PolicyService::new(Options::default(), broker)
                .run(token)
                .await?;
            Ok::<_, anyhow::Error>(())
        })?;
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        Ok(Duration::new(
            cpu.tv_sec.unsigned_abs(),
            u32::try_from(cpu.tv_nsec)?,
        ))
    });
    (stop, thread)
}

/// Takes capsules up and completes them at once, like a node with no-op programs.
async fn worker(url: &str) -> Result<()> {
    let broker = connect(url).await?;
    let (node, instance) = (NodeId::new("n1")?, InstanceId::random());
    join(&broker, &node, instance).await?;
    let speaker = broker.clone();
    let name = node.clone();
    tokio::spawn(async move {
        for count in 1.. {
            let _ = speaker
                .client
                .publish(
                    subjects::telemetry(&name),
                    vector(&name, instance, count).into(),
                )
                .await;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    });
    let ledger = Ledger::new(&broker);
    let consumer = capsules::node_consumer(&broker, 0, &node).await?;
    let mut messages = consumer
        .stream()
        .max_messages_per_batch(1_000)
        .messages()
        .await?;
    let author = format!("worker/{node}/{instance}");
    let (sent, mut acks) = tokio::sync::mpsc::channel(1_000);
    let settle = ledger.clone();
    tokio::spawn(async move {
        while let Some(in_flight) = acks.recv().await {
            let _ = settle.settle(in_flight).await;
        }
    });
    while let Some(message) = messages.next().await {
        let message = message.map_err(|error| anyhow::anyhow!("{error}"))?;
        let capsule: CapsuleMessage = serde_json::from_slice(&message.payload)?;
        for binding in capsule.bindings {
            let mut state = binding.state;
            state.resolve(binding.seq);
            let (epoch, at) = (state.epoch, Timestamp::now());
            let tip = Tip {
                seq: binding.seq,
                digest: Some(binding.digest),
                state,
                seen_in: 0,
            };
            let events = vec![
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
            let draft = Draft::new(&tip, events, &author, at)?;
            sent.send(ledger.send(draft, bytes::Bytes::new()).await?)
                .await?;
        }
        message
            .ack()
            .await
            .map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    Ok(())
}

async fn join(broker: &Broker, node: &NodeId, instance: InstanceId) -> Result<()> {
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
        slots: 4,
        cpus: 2,
        isa: "x86_64+avx2+fma".into(),
        memory_limit_bytes: 1 << 30,
        memory_limit_source: "declared".into(),
        substrates: vec![Substrate {
            id: "host".into(),
            kind: "cpu".into(),
            name: "host".into(),
            memory_bytes: None,
            device: None,
        }],
        profile: Default::default(),
        programs: vec!["synthetic@1".into()],
        labels: BTreeMap::new(),
        thresholds: default_thresholds(),
        http: None,
        parks: 0,
        identity: Some(NodeIdentity {
            key: key.public(),
            environment: fiec_schemas::Digest::of(b"played"),
        }),
    };
    let bucket = broker.js.get_key_value(subjects::NODES_BUCKET).await?;
    bucket
        .put(
            subjects::node_key(node),
            serde_json::to_vec(&descriptor)?.into(),
        )
        .await?;
    let expires = Timestamp::from_micros(4_000_000_000_000_000);
    let proof = Proof::passing(&descriptor, SUITE, Timestamp::now(), expires);
    let proof = serde_json::to_vec(&key.sign(&proof)?)?;
    bucket.put(subjects::proof_key(node), proof.into()).await?;
    Ok(())
}

fn vector(node: &NodeId, instance: InstanceId, count: u64) -> Vec<u8> {
    let at = Timestamp::now();
    let reading = Reading {
        signal: Signal::Memory,
        device: None,
        value: Some(0.2),
        raw: None,
        limit: None,
        unit: "ratio".into(),
        source: "measure".into(),
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
        slots: 4,
        running_count: 0,
        queued_count: 0,
        running: vec![],
    };
    serde_json::to_vec(&vector).unwrap_or_default()
}

/// From the publish of a submission to its completion in the ledger, one at a time.
async fn latency(broker: &Broker) -> Result<()> {
    let mut feed = broker.client.subscribe("fiec.ledger.>").await?;
    broker.client.flush().await?;
    let mut times = Vec::new();
    for _ in 0..300 {
        let began = Instant::now();
        broker
            .client
            .publish("fiec.submit.lab", r#"{"program":"synthetic@1"}"#.into())
            .await?;
        let bound = feed.next().await.context("no message")?;
        let bound_at = began.elapsed();
        drop(bound);
        feed.next().await.context("no message")?;
        times.push((began.elapsed(), bound_at));
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    times.sort_unstable();
    let (all, bound): (Vec<_>, Vec<_>) = times.into_iter().unzip();
    println!(
        "latency: publish to started+completed published p50 {:?} p99 {:?}; to bound p50 {:?}",
        all[150], all[296], bound[150]
    );
    Ok(())
}

async fn throughput(broker: &Broker, lines: usize) -> Result<()> {
    let stream = broker.js.get_stream(subjects::LEDGER_STREAM).await?;
    let before = stream.cached_info().state.messages;
    let body: String = vec![r#"{"program":"synthetic@1"}"#; lines].join("\n");
    let began = Instant::now();
    let mut acks = Vec::new();
    for _ in 0..EXECUTIONS / lines {
        acks.push(
            broker
                .js
                .publish("fiec.submit.lab", body.clone().into())
                .await?,
        );
        if acks.len() >= 500 {
            for ack in acks.drain(..) {
                ack.await?;
            }
        }
    }
    for ack in acks {
        ack.await?;
    }
    let submitted = began.elapsed();
    loop {
        let mut stream = broker.js.get_stream(subjects::LEDGER_STREAM).await?;
        let state = &stream.info().await?.state;
        let messages = state.messages - before;
        if messages >= 2 * EXECUTIONS as u64
            && broker
                .js
                .get_stream(subjects::capsule_stream(0))
                .await?
                .cached_info()
                .state
                .messages
                == 0
        {
            let extra = messages - 2 * EXECUTIONS as u64;
            let rate = EXECUTIONS as f64 / began.elapsed().as_secs_f64();
            println!(
                "throughput, {lines} lines a message: {rate:.0} executions/s ({extra} extra appends; submitted in {submitted:?})"
            );
            return Ok(());
        }
        anyhow::ensure!(
            began.elapsed() < Duration::from_secs(60),
            "stuck at {messages} messages"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Live executions, started on a node that was never heard of.
async fn seed(broker: &Broker) -> Result<()> {
    let ledger = Ledger::new(broker);
    let tenant = Tenant::new("lab")?;
    let spec = std::sync::Arc::new(Submission::parse(
        br#"{"program":"synthetic@1","params":{"capsules":1000,"work_us":100000}}"#,
    )?);
    let (sent, mut acks) = tokio::sync::mpsc::channel(1_000);
    let settle = ledger.clone();
    let settled = tokio::spawn(async move {
        while let Some(in_flight) = acks.recv().await {
            if let Err(error) = settle.settle(in_flight).await {
                println!("seeding: {error}");
            }
        }
    });
    for n in 0..LIVE {
        let at = Timestamp::now();
        let id = ExecutionId::from_submission(&tenant, at, n, 1);
        let state = ExecutionState::unborn(tenant.clone(), id, spec.clone(), None, at);
        let bound = Event::Bound {
            epoch: 1,
            node: NodeId::new(format!("n{}", n % 100))?,
            instance: InstanceId::random(),
            substrate: "host".into(),
            cause: Cause::Initial,
            decision: None,
        };
        let tip = Tip {
            seq: 0,
            digest: None,
            state,
            seen_in: 0,
        };
        let draft = Draft::new(
            &tip,
            vec![
                Event::Submitted,
                bound,
                Event::Started {
                    epoch: 1,
                    computing_since: at,
                },
            ],
            "policy/seed",
            at,
        )?;
        sent.send(ledger.send(draft, bytes::Bytes::new()).await?)
            .await?;
    }
    drop(sent);
    settled.await?;
    Ok(())
}

async fn recover(url: &str) -> Result<()> {
    let broker = connect(url).await?;
    let began = Instant::now();
    let (stop, service) = policy_thread(url.to_owned());
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let asked = broker.client.request("fiec.api.nodes", "{}".into()).await;
        if asked.is_ok_and(|m| !String::from_utf8_lossy(&m.payload).contains("taking over")) {
            break;
        }
    }
    let took = began.elapsed();
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = |key: &str| {
        status
            .lines()
            .find(|l| l.starts_with(key))
            .unwrap_or_default()
            .to_owned()
    };
    println!(
        "recover {LIVE}: {took:?}, {}, {}",
        line("VmHWM"),
        line("VmRSS")
    );
    stop.cancel();
    service
        .join()
        .map_err(|_| anyhow::anyhow!("the policy thread panicked"))??;
    Ok(())
}
