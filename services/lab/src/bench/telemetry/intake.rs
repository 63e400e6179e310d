//! The cost of many nodes' vectors for the policy service: processor time, and lag. The lag is the time
//! from a crossing to the record that the node has become viable or unviable.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fiec_broker::Broker;
use fiec_schemas::messages::{NodeEventKind, Record};
use fiec_schemas::{
    HardwareVector, InstanceId, NodeDescriptor, NodeId, Signal, Threshold, Timestamp, subjects,
};
use futures_util::StreamExt as _;

use super::super::figures::quantile;
use super::super::{Lab, cluster};
use super::cost::seconds;
use crate::cluster::Cluster;

const NODES: usize = 10_000;
/// Bursts of vectors a second.
const BURSTS: usize = 100;

/// `policy_cpu_percent`, `lag_p50_ms/p99_ms` and the rate that was reached.
pub(super) async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let mut cluster = cluster(lab, 1, &[], false).await?;
    let nodes = lab.samples(NODES);
    lab.steps_message(&format!("telemetry: {nodes} nodes join"));
    let status = cluster.status_of(&Cluster::node(1)).await?;
    let mut vector = status.vector.context("a worker without a vector")?;
    let mut simulated = Vec::with_capacity(nodes);
    for number in 0..nodes {
        simulated.push((NodeId::new(format!("s{number}"))?, InstanceId::random()));
    }
    join(&cluster.broker, status.descriptor, &simulated).await?;
    let policy = cluster.policies.first().context("a policy service")?.pid();
    let records = cluster
        .broker
        .client
        .subscribe("fiec.record.node.s0")
        .await?;
    let (crossings, heard) = tokio::sync::mpsc::channel(64);
    let lags = Arc::new(Mutex::new(Vec::new()));
    let listener = tokio::spawn(listen(records, heard, lags.clone()));
    let mut crossed = 0;
    let template = Template::of(&mut vector)?;
    // In the first seconds all nodes are new.
    let warm = if lab.quick { 1 } else { 4 };
    let span = if lab.quick { 3 } else { 12 };
    let mut before = (0.0, Instant::now());
    let mut sent = 0u64;
    let began = Instant::now();
    for burst in 0..(warm + span) * BURSTS {
        let (second, part) = (burst / BURSTS, burst % BURSTS);
        // A slow machine ends in time too, and reports the rate that it reached.
        if began.elapsed() > Duration::from_secs((warm + span) as u64) {
            break;
        }
        if burst == warm * BURSTS {
            before = (seconds(policy), Instant::now());
            sent = 0;
        }
        if part == 0 {
            lab.steps_message(&format!("telemetry: intake: {second} of {} s", warm + span));
        }
        let now = Timestamp::now();
        let (first, last) = (part * nodes / BURSTS, (part + 1) * nodes / BURSTS);
        for (number, (node, instance)) in simulated[first..last].iter().enumerate() {
            // The first node crosses its threshold up and down once a second.
            let crosses = number == 0 && part == 0;
            let memory = if crosses && second % 2 == 0 {
                0.95
            } else {
                0.3
            };
            let body = template.fill(node, instance, second + 1, now, memory);
            let subject = subjects::telemetry(node);
            if crosses && second >= warm {
                crossed += 1;
                crossings.send(Timestamp::now()).await?;
            }
            cluster.broker.client.publish(subject, body.into()).await?;
            sent += 1;
        }
        let due = Duration::from_millis(((burst + 1) * 1_000 / BURSTS) as u64);
        tokio::time::sleep(due.saturating_sub(began.elapsed())).await;
        tokio::task::yield_now().await;
    }
    let passed = before.1.elapsed().as_secs_f64();
    let percent = (seconds(policy) - before.0) / passed * 100.0;
    drop(crossings);
    let stop = listener.abort_handle();
    // The bench does not wait for a service that is far behind: missing records are a figure too.
    if let Ok(ended) = tokio::time::timeout(Duration::from_secs(10), listener).await {
        ended??;
    }
    stop.abort();
    let mut lags = std::mem::take(&mut *lags.lock().unwrap_or_else(PoisonError::into_inner));
    cluster.none_ended()?;
    let case = format!("{nodes} nodes, 1 Hz");
    for (metric, unit, value) in [
        ("vectors_per_s", "1/s", sent as f64 / passed),
        ("policy_cpu_percent", "%", percent),
        (
            "crossings_unseen",
            "",
            f64::from(crossed) - lags.len() as f64,
        ),
        ("lag_p50_ms", "ms", quantile(&mut lags, 0.5)),
        ("lag_p99_ms", "ms", quantile(&mut lags, 0.99)),
    ] {
        lab.figures
            .add("telemetry", &case, metric, unit, value, None);
    }
    cluster.stop().await;
    Ok(())
}

/// A published vector as a template for other nodes. To encode 10,000 vectors a second would measure
/// this program.
struct Template(Vec<Piece>);

enum Piece {
    Text(String),
    Node,
    Instance,
    Count,
    At,
    Memory,
}

impl Template {
    /// Cuts the text at the fields that differ between vectors.
    fn of(vector: &mut HardwareVector) -> anyhow::Result<Self> {
        const AT: i64 = 4_102_444_800_123_456;
        const MEMORY: f64 = 0.123_456_789;
        const COUNT: u64 = 987_654_321;
        vector.node = NodeId::new("template-node")?;
        vector.instance = InstanceId::random();
        vector.count = COUNT;
        vector.at = Timestamp::from_micros(AT);
        for reading in &mut vector.readings {
            reading.at = vector.at;
            if reading.signal == Signal::Memory && reading.device.is_none() {
                reading.value = Some(MEMORY);
            }
        }
        let marks: [(String, fn() -> Piece); 5] = [
            (vector.node.to_string(), || Piece::Node),
            (vector.instance.to_string(), || Piece::Instance),
            (COUNT.to_string(), || Piece::Count),
            (vector.at.to_string(), || Piece::At),
            (MEMORY.to_string(), || Piece::Memory),
        ];
        let text = serde_json::to_string(vector)?;
        let mut rest = text.as_str();
        let mut pieces = Vec::new();
        let next = |rest: &str| {
            let places = marks.iter().enumerate();
            places
                .filter_map(|(i, (mark, _))| Some((rest.find(mark.as_str())?, i)))
                .min()
        };
        while let Some((at, i)) = next(rest) {
            let (mark, piece) = &marks[i];
            pieces.push(Piece::Text(rest[..at].to_owned()));
            pieces.push(piece());
            rest = &rest[at + mark.len()..];
        }
        pieces.push(Piece::Text(rest.to_owned()));
        Ok(Self(pieces))
    }

    fn fill(
        &self,
        node: &NodeId,
        instance: &InstanceId,
        count: usize,
        at: Timestamp,
        memory: f64,
    ) -> String {
        use std::fmt::Write as _;
        let mut text = String::with_capacity(2_048);
        let at = at.to_string();
        for piece in &self.0 {
            // Writing to a string never fails.
            let _ = match piece {
                Piece::Text(part) => text.write_str(part),
                Piece::Node => text.write_str(node.as_str()),
                Piece::Instance => write!(text, "{instance}"),
                Piece::Count => write!(text, "{count}"),
                Piece::At => text.write_str(&at),
                Piece::Memory => write!(text, "{memory}"),
            };
        }
        text
    }
}

/// Writes the nodes' descriptors to the bucket that the policy service follows.
async fn join(
    broker: &Broker,
    mut descriptor: NodeDescriptor,
    nodes: &[(NodeId, InstanceId)],
) -> anyhow::Result<()> {
    descriptor.http = None;
    let at_once = Threshold {
        high: 0.9,
        low: 0.75,
        dwell_ms: 0,
    };
    descriptor.thresholds.insert(Signal::Memory, at_once);
    let mut open = VecDeque::new();
    for (node, instance) in nodes {
        (descriptor.node, descriptor.instance) = (node.clone(), *instance);
        let subject = format!(
            "$KV.{}.{}",
            subjects::NODES_BUCKET,
            subjects::node_key(node)
        );
        let body = serde_json::to_vec(&descriptor)?;
        open.push_back(broker.js.publish(subject, body.into()).await?);
        if open.len() >= 256
            && let Some(first) = open.pop_front()
        {
            first.await.context("a descriptor was not stored")?;
        }
    }
    for one in open {
        one.await.context("a descriptor was not stored")?;
    }
    Ok(())
}

/// Adds the milliseconds from each crossing to its record.
async fn listen(
    mut records: async_nats::Subscriber,
    mut crossings: tokio::sync::mpsc::Receiver<Timestamp>,
    lags: Arc<Mutex<Vec<f64>>>,
) -> anyhow::Result<()> {
    while let Some(crossed) = crossings.recv().await {
        loop {
            let message = records.next().await.context("the connection ended")?;
            let arrived = Timestamp::now();
            let Ok(Record::Node { what, .. }) = serde_json::from_slice(&message.payload) else {
                continue;
            };
            // Records of the seconds that do not count come before.
            if what == NodeEventKind::Viability && arrived >= crossed {
                let ms = (arrived.micros() - crossed.micros()) as f64 / 1e3;
                lags.lock().unwrap_or_else(PoisonError::into_inner).push(ms);
                break;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Reading;

    #[test]
    fn a_template_that_is_filled_in_is_the_vector_itself() {
        let at = Timestamp::from_micros(1_700_000_000_000_001);
        let reading = Reading {
            signal: Signal::Memory,
            device: None,
            value: Some(0.5),
            raw: Some(1.0),
            limit: Some(2.0),
            unit: "bytes".into(),
            source: "test".into(),
            at,
            missing: None,
            envelope: None,
        };
        let mut vector = HardwareVector {
            v: 1,
            node: "n1".parse().unwrap(),
            instance: InstanceId::random(),
            count: 3,
            at,
            clock: None,
            readings: vec![reading],
            draining: false,
            slots: 1,
            running_count: 0,
            queued_count: 0,
            running: Vec::new(),
            arriving: Vec::new(),
            stuck: Vec::new(),
        };
        let mut wanted = vector.clone();
        let template = Template::of(&mut vector).unwrap();
        let text = template.fill(&wanted.node, &wanted.instance, 3, at, 0.95);
        wanted.readings[0].value = Some(0.95);
        let filled: HardwareVector = serde_json::from_str(&text).unwrap();
        assert_eq!(filled, wanted);
    }
}
