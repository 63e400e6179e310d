//! Two interleaved solves: one by a worker, one as a bare loop in a thread of this process. They take
//! turns of a fraction of a second, and the time of a solve is the sum of its turns. During the
//! other's turn a signal stops the worker's children, and the thread waits at a boundary. All other
//! parts of FIEC go on.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec_broker::Ledger;
use fiec_kit::local::{LocalOutcome, run_cut};
use fiec_kit::program::{Inputs, ProgramError};
use fiec_schemas::{Event, ExecutionId, Timestamp};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::super::{cpu, follow, submit, tenant};
use crate::cluster::Cluster;

/// Length of a turn. The bare loop's turn ends at its next boundary after that.
const TURN: Duration = Duration::from_millis(50);
/// Poll interval for the begin of the worker's solve.
const POLL: Duration = Duration::from_millis(4);
/// Longest time of a pair.
const PATIENCE: Duration = Duration::from_secs(120);

/// The times of a pair of solves.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    /// Time of computing through FIEC, from the first capsule's begin to the last one's end.
    pub ours: Duration,
    /// The same of the bare loop.
    pub bare: Duration,
    /// Iterations of each.
    pub iterations: f64,
}

/// Runs one pair on the cluster's only worker.
///
/// # Errors
/// When a solve fails or does not end in time.
pub async fn pair(cluster: &Cluster, id: &str, params: Value) -> anyhow::Result<Pair> {
    let broker = &cluster.broker;
    let worker = cluster.workers.first().context("there is no worker")?.pid();
    let (gate, mut bare) = Bare::start(params.clone())?;
    bare.parked().await?;
    let submission = json!({"program": "cg@1", "params": params});
    let execution = submit(broker, id, submission).await?;
    let since = follow::arrived(broker, execution, 1, POLL, PATIENCE)
        .await?
        .since;
    let ledger = Ledger::new(broker);
    let (mut stops, mut until) = (Vec::new(), None);
    let deadline = Instant::now() + PATIENCE;
    while until.is_none() || bare.outcome.is_none() {
        if bare.outcome.is_none() {
            let stopped = Stopped::all(cpu::descendants(worker));
            let from = Timestamp::now();
            gate.send(TURN).context("the bare loop has ended")?;
            bare.parked().await?;
            let to = Timestamp::now();
            drop(stopped);
            stops.push((from, to));
        }
        if until.is_none() {
            tokio::time::sleep(TURN).await;
            until = completed(&ledger, execution).await?;
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "a pair of solves did not end within {PATIENCE:?}"
        );
    }
    let (outcome, until) = (
        bare.outcome.context("the bare loop has not ended")?,
        until.context("the worker's solve has not ended")?,
    );
    let waited: i64 = stops
        .iter()
        .map(|(from, to)| {
            let (from, to) = (
                from.micros().max(since.micros()),
                to.micros().min(until.micros()),
            );
            (to - from).max(0)
        })
        .sum();
    let ours = until.micros() - since.micros() - waited;
    let iterations = outcome
        .result
        .get("iterations")
        .and_then(Value::as_f64)
        .context("the result names no iterations")?;
    Ok(Pair {
        ours: Duration::from_micros(u64::try_from(ours).context("it computed no time at all")?),
        bare: outcome.computed.saturating_sub(bare.waited),
        iterations,
    })
}

/// The end of its last capsule, once it has completed.
async fn completed(ledger: &Ledger, execution: ExecutionId) -> anyhow::Result<Option<Timestamp>> {
    let Some(last) = ledger.last(&tenant()?, execution).await? else {
        return Ok(None);
    };
    for event in &last.message.events {
        match event {
            Event::Completed { computed_until, .. } => return Ok(Some(*computed_until)),
            Event::Failed { reason, stderr, .. } => bail!("it failed: {reason}\n{stderr}"),
            _ => {}
        }
    }
    Ok(None)
}

/// Processes that are stopped until this is dropped.
struct Stopped(Vec<Pid>);

impl Stopped {
    fn all(pids: Vec<u32>) -> Self {
        let pids = pids
            .into_iter()
            .filter_map(|pid| Pid::from_raw(pid.try_into().ok()?));
        let stopped = Self(pids.collect());
        stopped.signal(Signal::STOP);
        stopped
    }

    fn signal(&self, signal: Signal) {
        for pid in &self.0 {
            // A process that has ended does not compute.
            let _ = kill_process(*pid, signal);
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
    }
}

/// A message of the bare loop's thread.
enum Said {
    /// It waits at a boundary.
    Parked,
    /// It has ended. The time is that of all its waits.
    Ended(Box<Result<LocalOutcome, ProgramError>>, Duration),
}

/// The bare loop.
struct Bare {
    said: tokio::sync::mpsc::Receiver<Said>,
    /// Time of its waits for turns.
    waited: Duration,
    outcome: Option<LocalOutcome>,
}

impl Bare {
    /// Starts it. It waits at its first boundary for its first turn.
    fn start(params: Value) -> anyhow::Result<(SyncSender<Duration>, Self)> {
        let (gate, turns) = sync_channel(1);
        let (say, said) = tokio::sync::mpsc::channel(2);
        std::thread::Builder::new()
            .name("bare-loop".to_owned())
            .spawn(move || {
                let mut turn = Turn {
                    turns,
                    say: say.clone(),
                    until: Instant::now(),
                    waited: Duration::ZERO,
                };
                let program = fiec_schemas::programs::CG;
                let outcome = run_cut(program, &params, &mut Inputs::anywhere(), |_| {
                    turn.boundary();
                    false
                });
                // The receiver is dropped if the pair was given up.
                let _ = say.blocking_send(Said::Ended(Box::new(outcome), turn.waited));
            })?;
        let bare = Self {
            said,
            waited: Duration::ZERO,
            outcome: None,
        };
        Ok((gate, bare))
    }

    /// Waits until it is at a boundary or has ended.
    async fn parked(&mut self) -> anyhow::Result<()> {
        let said = tokio::time::timeout(PATIENCE, self.said.recv())
            .await
            .context("the bare loop reaches no boundary")?;
        match said.context("the thread of the bare loop ended without a word")? {
            Said::Parked => {}
            Said::Ended(outcome, waited) => {
                self.waited = waited;
                let outcome = outcome.map_err(|e| anyhow::anyhow!("the bare loop failed: {e}"))?;
                self.outcome = Some(outcome);
            }
        }
        Ok(())
    }
}

/// The thread's side of its turns.
struct Turn {
    turns: Receiver<Duration>,
    say: tokio::sync::mpsc::Sender<Said>,
    until: Instant,
    waited: Duration,
}

impl Turn {
    fn boundary(&mut self) {
        let now = Instant::now();
        if now < self.until {
            return;
        }
        if self.say.blocking_send(Said::Parked).is_err() {
            return;
        }
        if let Ok(turn) = self.turns.recv() {
            self.waited += now.elapsed();
            self.until = Instant::now() + turn;
        }
    }
}
