//! `bench recover`: a new policy service takes over many executions. The floor reads the last message
//! of each ledger, headers only.
//!
//! The case `recover` has 100,000 live executions. The case `waiting` has 100,000 executions of a
//! batch that wait for a node, beside as many of another batch. There the bench also measures `fiec
//! why` about a waiting execution, and requests about the whole batch.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec::client;
use fiec::commands::{batch, group};
use fiec_broker::feed::{self, Start};
use fiec_broker::{Broker, Draft, Ledger, Tip};
use fiec_schemas::messages::{BatchVerb, ExecutionVerb};
use fiec_schemas::{
    BatchId, BatchPlace, Cause, Event, ExecutionId, ExecutionState, InstanceId, NodeId, Submission,
    Timestamp,
};
use futures_util::StreamExt as _;

use super::figures::median;
use super::{Lab, cpu, request, tenant};
use crate::cluster::{Cluster, ClusterOptions};

/// Takeovers of live executions.
const ROUNDS: usize = 3;
/// The batch that is asked about, and the one beside it.
const BATCHES: [&str; 2] = ["study", "others"];
/// Executions that `why` is asked about.
const WHYS: usize = 20;
/// The longest takeover.
const PATIENCE: Duration = Duration::from_secs(120);
/// Appends that may be unacknowledged.
const IN_FLIGHT: usize = 512;

/// Runs the bench: `takeover_s` (reach ≤ 2) and `resident_mb` (≤ 200) of live executions; `restart_s`
/// (≤ 5), `why_ms` and `why_max_ms` (≤ 500), `status_s`, `pause_s`, `resume_s` and `cancel_s` (≤ 10)
/// of waiting ones.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    live(lab).await?;
    waiting(lab).await
}

async fn live(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let mut cluster = without_policy(lab).await?;
    let count = lab.samples(100_000);
    lab.steps_message(&format!(
        "recover: writing the ledgers of {count} live executions"
    ));
    fill_live(&cluster.broker, count).await?;
    let (mut takeovers, mut floors, mut resident) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        lab.steps_message(&format!("recover: round {round} of {ROUNDS}"));
        floors.push(read_last(&cluster.broker, count).await?);
        takeovers.push(take_over(&mut cluster).await?);
        let mut policy = cluster.policies.pop().context("it was just started")?;
        resident.push(cpu::tree(policy.pid()).resident as f64 / 1e6);
        policy.kill();
    }
    let case = format!("{count} executions");
    let (takeover, floor) = (median(&mut takeovers), median(&mut floors));
    lab.figures
        .add("recover", &case, "takeover_s", "s", takeover, Some(floor));
    let mb = median(&mut resident);
    lab.figures
        .add("recover", &case, "resident_mb", "MB", mb, None);
    cluster.stop().await;
    Ok(())
}

async fn waiting(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let mut cluster = without_policy(lab).await?;
    let count = lab.samples(100_000);
    lab.steps_message(&format!(
        "waiting: writing the ledgers of {count} executions that wait, and of as many others"
    ));
    let mut asked = Vec::new();
    for name in BATCHES {
        asked = fill_batch(&cluster.broker, name, count).await?;
    }
    let floor = read_last(&cluster.broker, BATCHES.len() * count).await?;
    lab.steps_message("waiting: starting a policy service");
    let restart = take_over(&mut cluster).await?;
    let case = format!("{count} beside {count}");
    lab.figures
        .add("waiting", &case, "restart_s", "s", restart, Some(floor));
    let mut whys = Vec::new();
    for id in asked.iter().step_by((count / WHYS).max(1)) {
        let began = Instant::now();
        request(&cluster.broker, ExecutionVerb::Why, *id).await?;
        whys.push(began.elapsed().as_secs_f64() * 1e3);
    }
    let slowest = whys.iter().copied().fold(0.0, f64::max);
    let why = median(&mut whys);
    for (metric, ms) in [("why_ms", why), ("why_max_ms", slowest)] {
        lab.figures.add("waiting", &case, metric, "ms", ms, None);
    }
    for verb in [
        BatchVerb::Status,
        BatchVerb::Pause,
        BatchVerb::Resume,
        BatchVerb::Cancel,
    ] {
        lab.steps_message(&format!("waiting: fiec batch {verb}"));
        let began = Instant::now();
        let about = batch::About {
            verb,
            tenant: &tenant()?,
            of: &group::of_batch(BATCHES[0]),
            failed: false,
        };
        let (reply, complete) = batch::drive(&cluster.broker, about, |_| {}).await?;
        let seconds = began.elapsed().as_secs_f64();
        let reached = reply.phases.values().sum::<u32>() as usize;
        if !complete || reply.error.is_some() || reached != count {
            bail!("batch {verb} reached {reached} of {count}: {reply:?}");
        }
        lab.figures
            .add("waiting", &case, &format!("{verb}_s"), "s", seconds, None);
    }
    cluster.stop().await;
    Ok(())
}

/// Starts servers. The policy service that made the streams is stopped again: the bench measures a
/// new one.
async fn without_policy(lab: &Lab<'_>) -> anyhow::Result<Cluster> {
    let options = ClusterOptions {
        workers: 0,
        policies: 1,
        history: false,
        ..Default::default()
    };
    let mut cluster = Cluster::start(options, lab.steps).await?;
    cluster.policies.clear();
    Ok(cluster)
}

/// Starts a policy service. Returns the seconds until it has taken over; before that it answers with
/// an error.
async fn take_over(cluster: &mut Cluster) -> anyhow::Result<f64> {
    let began = Instant::now();
    cluster.start_policy()?;
    while !client::me(&cluster.broker)
        .nodes()
        .await
        .is_ok_and(|reply| reply.error.is_none())
    {
        if began.elapsed() > PATIENCE {
            bail!("the policy service did not answer within {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Seconds to read the last message of each of `count` ledgers.
async fn read_last(broker: &Broker, count: usize) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut feed = feed::ledger(broker, Start::LastOfEach).await?;
    for _ in 0..count {
        feed.next().await.context("the ledger feed ended")??;
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Writes the ledgers of `count` executions that compute on nodes which never answer.
async fn fill_live(broker: &Broker, count: usize) -> anyhow::Result<()> {
    let line = r#"{"program":"synthetic@1","params":{"capsules":1000000,"work_us":1000}}"#;
    let instance = InstanceId::random();
    let ghosts: Vec<NodeId> = (0..100)
        .map(|number| NodeId::new(format!("ghost-{number}")))
        .collect::<Result<_, _>>()?;
    let mut ghosts = ghosts.iter().cycle();
    fill(broker, line, None, count, |now| {
        let node = ghosts.next().context("there are no nodes")?.clone();
        let bound = Event::Bound {
            epoch: 1,
            node,
            instance,
            substrate: "host".to_owned(),
            cause: Cause::Initial,
            decision: None,
        };
        let started = Event::Started {
            epoch: 1,
            computing_since: now,
        };
        Ok(vec![Event::Submitted, bound, started])
    })
    .await?;
    Ok(())
}

/// Writes the ledgers of `count` waiting executions of a batch. Returns their ids.
async fn fill_batch(broker: &Broker, name: &str, count: usize) -> anyhow::Result<Vec<ExecutionId>> {
    let line = format!(r#"{{"program":"synthetic@1","batch":"{name}"}}"#);
    let place = BatchPlace {
        id: BatchId::from_client(&tenant()?, &name.parse()?),
        line: 1,
    };
    let submitted = |_| Ok(vec![Event::Submitted]);
    fill(broker, &line, Some(place), count, submitted).await
}

/// Writes `count` ledgers of one message each. Returns the ids of their executions.
async fn fill(
    broker: &Broker,
    line: &str,
    place: Option<BatchPlace>,
    count: usize,
    mut events: impl FnMut(Timestamp) -> anyhow::Result<Vec<Event>>,
) -> anyhow::Result<Vec<ExecutionId>> {
    let ledger = Ledger::new(broker);
    let submission = Arc::new(Submission::parse(line.as_bytes())?);
    let tenant = tenant()?;
    let mut in_flight = VecDeque::new();
    let mut ids = Vec::with_capacity(count);
    for _ in 0..count {
        let now = Timestamp::now();
        let id = ExecutionId(uuid::Uuid::now_v7());
        ids.push(id);
        let spec = submission.clone();
        let tip = Tip {
            seq: 0,
            digest: None,
            state: ExecutionState::unborn(tenant.clone(), id, spec, place, now).into(),
            seen_in: 0,
        };
        let draft = Draft::new(&tip, events(now)?, "bench", now)?;
        in_flight.push_back(ledger.send(draft, bytes::Bytes::new()).await?);
        if in_flight.len() >= IN_FLIGHT
            && let Some(first) = in_flight.pop_front()
        {
            ledger.settle(first).await?;
        }
    }
    for draft in in_flight {
        ledger.settle(draft).await?;
    }
    Ok(ids)
}
