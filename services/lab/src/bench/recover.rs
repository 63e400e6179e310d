//! `bench recover`: a fresh policy service takes over 100,000 live executions. The floor is
//! reading the last message of each, headers only, and nothing else.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec::client;
use fiec_broker::feed::{self, Start};
use fiec_broker::{Broker, Draft, Ledger, Tip};
use fiec_schemas::{
    Cause, Event, ExecutionId, ExecutionState, InstanceId, NodeId, Submission, Timestamp,
};
use futures_util::StreamExt as _;

use super::{Lab, cpu, tenant};
use crate::cluster::{Cluster, ClusterOptions};

/// Runs the bench: `takeover_s` (reach ≤ 2) and `resident_mb` (reach ≤ 200).
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
    // The first one only showed that everything stands; what is measured starts afresh.
    cluster.policies.clear();
    let count = lab.samples(100_000);
    lab.steps_message(&format!(
        "recover: writing the ledgers of {count} live executions"
    ));
    fill(&cluster.broker, count).await?;
    let mut takeovers = Vec::new();
    let mut floors = Vec::new();
    let mut resident = Vec::new();
    for round in 1..=3 {
        lab.steps_message(&format!("recover: round {round} of 3"));
        floors.push(floor(&cluster.broker, count).await?);
        let began = Instant::now();
        cluster.start_policy()?;
        // Before it has taken over, a policy service answers that it has not.
        while !client::nodes(&cluster.broker)
            .await
            .is_ok_and(|reply| reply.error.is_none())
        {
            if began.elapsed() > Duration::from_secs(60) {
                bail!("the policy service did not answer within a minute");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        takeovers.push(began.elapsed().as_secs_f64());
        let mut policy = cluster.policies.pop().context("it was just started")?;
        resident.push(cpu::tree(policy.pid()).resident as f64 / 1e6);
        policy.kill();
    }
    let case = format!("{count} executions");
    let takeover = super::figures::median(&mut takeovers);
    let floor = super::figures::median(&mut floors);
    lab.figures
        .add("recover", &case, "takeover_s", "s", takeover, Some(floor));
    let mb = super::figures::median(&mut resident);
    lab.figures
        .add("recover", &case, "resident_mb", "MB", mb, None);
    cluster.stop().await;
    Ok(())
}

/// Writes so many ledgers of one message each: submitted, bound, started.
async fn fill(broker: &Broker, count: usize) -> anyhow::Result<()> {
    let ledger = Ledger::new(broker);
    let submission = Arc::new(Submission::parse(
        br#"{"program":"synthetic@1","params":{"capsules":1000000,"work_us":1000}}"#,
    )?);
    let instance = InstanceId::random();
    let mut in_flight = VecDeque::new();
    for number in 0..count {
        let now = Timestamp::now();
        let state = ExecutionState::unborn(
            tenant()?,
            ExecutionId(uuid::Uuid::now_v7()),
            submission.clone(),
            None,
            now,
        );
        let events = vec![
            Event::Submitted,
            Event::Bound {
                epoch: 1,
                node: NodeId::new(format!("ghost-{}", number % 100))?,
                instance,
                substrate: "host".to_owned(),
                cause: Cause::Initial,
                decision: None,
            },
            Event::Started {
                epoch: 1,
                computing_since: now,
            },
        ];
        let tip = Tip {
            seq: 0,
            digest: None,
            state,
            seen_in: 0,
        };
        let draft = Draft::new(&tip, events, "bench", now)?;
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
    Ok(())
}

/// Seconds for reading the last message of each execution.
async fn floor(broker: &Broker, count: usize) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut feed = feed::ledger(broker, Start::LastOfEach).await?;
    for _ in 0..count {
        feed.next().await.context("the ledger feed ended")??;
    }
    Ok(began.elapsed().as_secs_f64())
}
