//! `bench waiting`: 100,000 executions of a batch that wait for a node, beside as many of another
//! batch. How long a policy service takes to come back over them, `fiec why` about one of them, and
//! a request about the whole batch. The floor of the restart is reading the last message of each
//! ledger.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec::client;
use fiec::commands::batch;
use fiec_broker::feed::{self, Start};
use fiec_broker::{Broker, Draft, Ledger, Tip};
use fiec_schemas::messages::{BatchVerb, ExecutionVerb};
use fiec_schemas::{
    BatchId, BatchPlace, Event, ExecutionId, ExecutionState, Submission, Timestamp,
};
use futures_util::StreamExt as _;

use super::{Lab, figures, tenant};
use crate::cluster::{Cluster, ClusterOptions};

/// The batch that is asked about, and the one beside it.
const BATCHES: [&str; 2] = ["study", "others"];
/// Executions that `why` is asked about.
const WHYS: usize = 20;
/// The policy service is back within this, or the bench fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the bench: `restart_s` (reach ≤ 5), `why_ms` and `why_max_ms` (≤ 500), `status_s`,
/// `pause_s`, `resume_s` and `cancel_s` (≤ 10).
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let options = ClusterOptions {
        workers: 0,
        policies: 1,
        history: false,
        ..Default::default()
    };
    let mut cluster = Cluster::start(options, lab.steps).await?;
    cluster.policies.clear();
    let count = lab.samples(100_000);
    lab.steps_message(&format!(
        "waiting: writing the ledgers of {count} executions that wait, and of as many others"
    ));
    let mut asked = Vec::new();
    for name in BATCHES {
        asked = fill(&cluster.broker, name, count).await?;
    }
    let case = format!("{count} beside {count}");
    let began = Instant::now();
    let mut feed = feed::ledger(&cluster.broker, Start::LastOfEach).await?;
    for _ in 0..BATCHES.len() * count {
        feed.next().await.context("the ledger feed ended")??;
    }
    drop(feed);
    let floor = began.elapsed().as_secs_f64();
    lab.steps_message("waiting: starting a policy service");
    let began = Instant::now();
    cluster.start_policy()?;
    while !client::nodes(&cluster.broker)
        .await
        .is_ok_and(|reply| reply.error.is_none())
    {
        if began.elapsed() > PATIENCE {
            bail!("the policy service did not answer within {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let restart = began.elapsed().as_secs_f64();
    lab.figures
        .add("waiting", &case, "restart_s", "s", restart, Some(floor));
    let mut whys = Vec::new();
    for id in asked.iter().step_by((count / WHYS).max(1)) {
        let began = Instant::now();
        let id = id.to_string();
        let reply =
            client::execution(&cluster.broker, ExecutionVerb::Why, &tenant()?, &id, None).await?;
        if let Some(error) = reply.error {
            bail!("why: {error}");
        }
        whys.push(began.elapsed().as_secs_f64() * 1e3);
    }
    let slowest = whys.iter().copied().fold(0.0, f64::max);
    let why = figures::median(&mut whys);
    lab.figures.add("waiting", &case, "why_ms", "ms", why, None);
    lab.figures
        .add("waiting", &case, "why_max_ms", "ms", slowest, None);
    for verb in [
        BatchVerb::Status,
        BatchVerb::Pause,
        BatchVerb::Resume,
        BatchVerb::Cancel,
    ] {
        lab.steps_message(&format!("waiting: fiec batch {verb}"));
        let began = Instant::now();
        let name = (&tenant()?, BATCHES[0]);
        let (reply, complete) = batch::drive(&cluster.broker, verb, name, |_| {}).await?;
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

/// Writes the ledgers of `count` waiting executions of a batch; returns their ids.
async fn fill(broker: &Broker, name: &str, count: usize) -> anyhow::Result<Vec<ExecutionId>> {
    let ledger = Ledger::new(broker);
    let line = format!(r#"{{"program":"synthetic@1","batch":"{name}"}}"#);
    let submission = Arc::new(Submission::parse(line.as_bytes())?);
    let tenant = tenant()?;
    let place = BatchPlace {
        id: BatchId::from_client(&tenant, &name.parse()?),
        line: 1,
    };
    let mut in_flight = VecDeque::new();
    let mut ids = Vec::with_capacity(count);
    for _ in 0..count {
        let now = Timestamp::now();
        let id = ExecutionId(uuid::Uuid::now_v7());
        ids.push(id);
        let spec = submission.clone();
        let state = ExecutionState::unborn(tenant.clone(), id, spec, Some(place), now);
        let tip = Tip {
            seq: 0,
            digest: None,
            state,
            seen_in: 0,
        };
        let draft = Draft::new(&tip, vec![Event::Submitted], "bench", now)?;
        in_flight.push_back(ledger.send(draft, bytes::Bytes::new()).await?);
        if in_flight.len() >= 512
            && let Some(first) = in_flight.pop_front()
        {
            ledger.settle(first).await?;
        }
    }
    for one in in_flight {
        ledger.settle(one).await?;
    }
    Ok(ids)
}
