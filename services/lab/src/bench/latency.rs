//! `bench latency`: publish of a submission to the start of its first capsule, on an idle system
//! with warm children. The floor is one acknowledged publish on the same connection. A submission
//! without an id is left to its node; one with a client's id may have a ledger already, which is
//! found out first.

use std::time::{Duration, Instant};

use fiec_broker::Broker;
use fiec_schemas::Timestamp;
use serde_json::{Value, json};

use super::figures::{Figures, quantile};
use super::follow;
use super::{Lab, cluster, submit, submit_unnamed};

/// Submissions at the beginning whose starts do not count: they warm children and caches.
const UNMEASURED: usize = 20;
/// How often it is looked whether an execution has ended.
const LOOK: Duration = Duration::from_millis(7);
/// What each start is measured with.
const SYNTHETIC: &str = fiec_schemas::programs::SYNTHETIC;

/// Runs the bench: `start_p50_ms` and `start_p99_ms`, reach ≤ 1 and ≤ 5.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let cluster = cluster(lab, 2, &[], true).await?;
    let count = lab.samples(500);
    for (case, named) in [("idle", false), ("idle, with a client's id", true)] {
        let of = Of {
            case: "latency",
            program: SYNTHETIC,
            params: json!({"capsules": 1}),
            unmeasured: UNMEASURED,
            named,
        };
        let starts = starts(lab, &cluster.broker, &of, count).await?;
        starts.add_to(lab.figures, "latency", case);
    }
    cluster.stop().await;
    Ok(())
}

/// What is started.
pub(super) struct Of {
    /// Names it in progress and in ids.
    pub case: &'static str,
    /// The program.
    pub program: &'static str,
    /// Its parameters; it shall end with its first capsule, which shall do nothing.
    pub params: Value,
    /// Submissions at the beginning that do not count.
    pub unmeasured: usize,
    /// Each has a client's id.
    pub named: bool,
}

/// Milliseconds from publish to the begin of the first capsule, with the floor of each.
pub(super) struct Starts {
    starts: Vec<f64>,
    floors: Vec<f64>,
}

impl Starts {
    /// Adds `start_p50_ms` and `start_p99_ms`.
    pub fn add_to(mut self, figures: &mut Figures, bench: &str, case: &str) {
        for (metric, share) in [("start_p50_ms", 0.5), ("start_p99_ms", 0.99)] {
            let floor = quantile(&mut self.floors, share);
            let value = quantile(&mut self.starts, share);
            figures.add(bench, case, metric, "ms", value, Some(floor));
        }
    }
}

/// Starts so many executions, each when the one before has ended and nothing else is going on.
pub(super) async fn starts(
    lab: &Lab<'_>,
    broker: &Broker,
    of: &Of,
    count: usize,
) -> anyhow::Result<Starts> {
    let case = of.case;
    let mut starts = Vec::with_capacity(count);
    let mut floors = Vec::with_capacity(count);
    for number in 0..count + of.unmeasured {
        if number % 25 == 0 {
            lab.steps_message(&format!("{case}: {number} of {count}"));
        }
        tokio::time::sleep(Duration::from_millis(11)).await;
        let floor = floor(broker).await?;
        tokio::time::sleep(Duration::from_millis(11)).await;
        let submission = json!({"program": of.program, "params": of.params});
        let published = Timestamp::now();
        let execution = if of.named {
            let id = format!("{}-{number}", case.replace(' ', "-"));
            submit(broker, &id, submission).await?
        } else {
            submit_unnamed(broker, &submission).await?
        };
        // Nobody of ours wakes up while it starts; that would not be an idle system.
        let end = follow::ended(broker, execution, LOOK, Duration::from_secs(10)).await?;
        if number >= of.unmeasured {
            // Its only capsule does nothing, and when it has ended is always by the program's own
            // clock; when it began is the agent's word where a child is slow to say so.
            starts.push((end.until.micros() - published.micros()) as f64 / 1e3);
            floors.push(floor);
        }
    }
    Ok(Starts { starts, floors })
}

/// Milliseconds of one acknowledged publish to a stream.
async fn floor(broker: &Broker) -> anyhow::Result<f64> {
    let began = Instant::now();
    broker
        .js
        .publish("fiec.record.bench.floor", "{}".into())
        .await?
        .await?;
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
