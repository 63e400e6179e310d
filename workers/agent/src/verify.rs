//! Verification: computes a part of another node's execution again. The part starts at a boundary
//! whose σ is in the ledger, and ends at a later one or at the end. It uses a slot that no job
//! waits for, and is preempted by the first job that comes. Nothing of it is appended. The finding
//! is published.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{BrokerError, Tip, store};
use fiec_kit::Reserved;
use fiec_kit::frames::{Order, Reason, Report, Run, Yield};
use fiec_schemas::surroundings::{Asked, Surroundings};
use fiec_schemas::trust::{Finding, Segment, Verdict, digest_of_result};
use fiec_schemas::{CommitPolicy, Digest, ExecutionId, Output, Tenant, subjects};
use tokio::time::Instant;

use crate::attempts::{cut, fetch_spec};
use crate::child_process::{Child, Setting};
use crate::message::split_outputs;
use crate::outside;
use crate::replies::NotTaken;
use crate::shared::{Shared, spare_slot};
use crate::variables;

/// Time without a report after which a program is ended.
const SILENCE: Duration = Duration::from_secs(600);
/// Interval of the checks for waiting jobs.
const LOOK: Duration = Duration::from_millis(10);
/// Interval of the notices that the computation goes on.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Outputs that a verdict can name.
const OUTPUTS_LIMIT: usize = 4_000;
/// The reason in a preempted verdict.
const GAVE_WAY: &str = "the verification was preempted by an execution";

/// A part to compute.
#[derive(Debug)]
pub struct Question {
    /// Its number.
    pub question: u64,
    /// The execution.
    pub execution: ExecutionId,
    /// Its tenant.
    pub tenant: Tenant,
    /// The part.
    pub segment: Segment,
}

/// The reason why there is no finding.
#[derive(Debug)]
struct NotCompared {
    reason: String,
    /// The first σ is not stored any more, on any node.
    gone: bool,
}

impl From<String> for NotCompared {
    fn from(reason: String) -> Self {
        Self {
            reason,
            gone: false,
        }
    }
}

impl From<&str> for NotCompared {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

impl NotCompared {
    /// The σ of a boundary is missing. Chunks that newer commits superseded are dropped after some
    /// minutes, so this says nothing about a node's correctness.
    fn without_state(index: u64, error: &BrokerError) -> Self {
        let gone = !matches!(
            error,
            BrokerError::Operation { .. } | BrokerError::Connect { .. }
        );
        let cannot = match gone {
            true => "cannot be compared",
            false => "cannot be compared now",
        };
        Self {
            reason: format!("{cannot}: σ of boundary {index}: {error}"),
            gone,
        }
    }
}

/// Starts a verification, or says why not now.
///
/// # Errors
/// The reason, for people.
pub fn take(shared: &Arc<Shared>, question: Question) -> Result<(), NotTaken> {
    if shared.is_draining() {
        return Err(NotTaken::Draining);
    }
    if shared.verifying.swap(true, Ordering::AcqRel) {
        return Err(NotTaken::Verifying);
    }
    let Some(slot) = spare_slot(shared) else {
        shared.verifying.store(false, Ordering::Release);
        return Err(NotTaken::NoSpareSlot);
    };
    let shared = shared.clone();
    tokio::spawn(async move {
        let found = tokio::select! {
            biased;
            () = shared.halt.cancelled() => Err("the node is stopping".into()),
            () = real_work(&shared) => Err(GAVE_WAY.into()),
            found = compute(&shared, &question) => found,
        };
        drop(slot);
        shared.verifying.store(false, Ordering::Release);
        if let Err(NotCompared { reason, .. }) = &found {
            tracing::info!(execution = %question.execution, reason, "a part was not compared");
        }
        say(&shared, &question, Some(found)).await;
    });
    Ok(())
}

/// Returns when a job waits for a slot, or the node drains.
async fn real_work(shared: &Shared) {
    let mut tick = tokio::time::interval(LOOK);
    loop {
        tick.tick().await;
        if shared.queued() > 0 || shared.is_draining() {
            return;
        }
    }
}

/// Publishes a finding, or a notice that the computation goes on.
async fn say(shared: &Shared, question: &Question, found: Option<Result<Finding, NotCompared>>) {
    let (finding, error, gone) = match found {
        Some(Ok(finding)) => (Some(finding), None, false),
        Some(Err(why)) => (None, Some(cut(why.reason)), why.gone),
        None => (None, None, false),
    };
    let verdict = Verdict {
        v: 1,
        question: question.question,
        node: shared.node().clone(),
        instance: shared.instance,
        execution: question.execution,
        finding,
        error,
        gone,
    };
    let signed = shared.key.sign_verdict(&verdict);
    let body = match signed.and_then(|signed| Ok(serde_json::to_vec(&signed)?)) {
        Ok(body) => body,
        Err(error) => {
            tracing::warn!(%error, "cannot sign a verdict; the question will be asked again");
            return;
        }
    };
    let client = &shared.broker.client;
    if let Err(error) = client.publish(subjects::VERDICT, body.into()).await {
        tracing::warn!(%error, "cannot publish a verdict; the question will be asked again");
    }
}

async fn compute(shared: &Arc<Shared>, question: &Question) -> Result<Finding, NotCompared> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let (execution, segment) = (question.execution, &question.segment);
    let last = shared.ledger.last(&question.tenant, execution).await;
    let last = last
        .map_err(|error| words(&error))?
        .ok_or("its ledger is gone")?;
    let tip: Tip = last.into();
    let spec = fetch_spec(shared, &tip).await.map_err(|e| words(&e))?;
    let state = match &segment.from {
        Some(place) => {
            let state = shared.ledger.state(execution, place).await;
            state.map_err(|error| NotCompared::without_state(place.index, &error))?
        }
        None => Bytes::new(),
    };
    let program = match outside::find(shared, &spec.program).await {
        Some(Ok(program)) => program,
        Some(Err(reason)) => return Err(reason.to_string().into()),
        None => return Err("the node is stopping".into()),
    };
    let package = program.package().cloned();
    let key = (spec.program.clone(), question.tenant.clone());
    let values = variables::read(shared, &spec).await;
    let setting = Setting {
        device: None,
        values: values.map_err(|reason| reason.to_string())?,
    };
    let run = Order::Run(Box::new(Run {
        execution,
        epoch: tip.state.epoch,
        program: spec.program.clone(),
        params: spec.params.clone(),
        commit: CommitPolicy::Every(length_of(segment)),
        boundary: segment.from.as_ref().map(|p| p.index),
        lease_ms: u32::MAX,
        interval_ms: 0,
        package: package.as_ref().map(|p| p.told(&setting.values)),
        grant: shared.grant(None),
        spread: None,
        merge: None,
        crashes: match &package {
            None => tip.state.totals.crashes,
            Some(_) => 0,
        },
    }));
    // Its report of the last boundary is enough. A yield there keeps a program from going on.
    let yield_there = segment.to.map(|at| {
        Order::Yield(Yield {
            cause: Some("this part is compared up to here".to_owned()),
            deadline_ms: None,
            at: Some(at),
        })
    });
    let mut child = give(
        shared,
        &key,
        execution,
        (package.as_ref(), &setting),
        (yield_there, run),
        &state,
    )
    .await?;
    drop(state);
    let (finding, is_over) = follow(shared, question, &mut child).await?;
    if is_over {
        shared.pool.give(child);
    }
    Ok(finding)
}

/// Boundaries of a part.
fn length_of(segment: &Segment) -> NonZeroU64 {
    let from = segment.from.as_ref().map_or(0, |place| place.index);
    let length = segment.to.and_then(|to| to.checked_sub(from));
    length.and_then(NonZeroU64::new).unwrap_or(NonZeroU64::MAX)
}

async fn give(
    shared: &Shared,
    key: &crate::child_process::Key,
    execution: ExecutionId,
    (package, setting): (Option<&Arc<crate::packages::Package>>, &Setting),
    (yield_there, run): (Option<Order>, Order),
    state: &[u8],
) -> Result<Child, String> {
    for fresh in [false, true] {
        let taken = if fresh {
            shared.pool.fresh(key, package, setting).await
        } else {
            shared.pool.take(key, execution, package, setting).await
        };
        let mut child = taken.map_err(|error| format!("cannot start a child: {error}"))?;
        // Between runs a program knows no orders; the agent's own child keeps one for the next run.
        let is_own = package.is_none_or(|package| package.command().is_none());
        let (before, after) = match is_own {
            true => (yield_there.as_ref(), None),
            false => (None, yield_there.as_ref()),
        };
        let orders = before.into_iter().map(|order| (order, &[][..]));
        let orders = orders.chain([(&run, state)]);
        let orders = orders.chain(after.map(|order| (order, &[][..])));
        let mut given = Ok(());
        for (order, body) in orders {
            given = given.and(child.order(order, body).await);
        }
        if given.is_ok() {
            return Ok(child);
        }
        // It died while it was idle. A fresh child has served nobody.
    }
    Err("no child takes it".to_owned())
}

/// The finding, and whether the child's run is over.
async fn follow(
    shared: &Arc<Shared>,
    question: &Question,
    child: &mut Child,
) -> Result<(Finding, bool), String> {
    let (mut heard, mut said) = (Instant::now(), Instant::now());
    loop {
        if said.elapsed() >= SIGN_OF_LIFE {
            said = Instant::now();
            say(shared, question, None).await;
        }
        let report = match tokio::time::timeout(SIGN_OF_LIFE, child.link.next()).await {
            Ok(report) => report.map_err(|error| error.to_string())?,
            Err(_) if heard.elapsed() < SILENCE => continue,
            Err(_) => return Err(format!("the program sent no report for {SILENCE:?}")),
        };
        heard = Instant::now();
        let (report, body) = report.ok_or("the program ended without a report")?;
        match report {
            Report::Fetch { digest, bytes } => answer(shared, child, digest, bytes).await?,
            Report::Boundary(report)
                if report.reason == Reason::Yield || question.segment.to == Some(report.index) =>
            {
                let size = usize::try_from(report.bytes).unwrap_or(usize::MAX);
                if size > body.len() {
                    return Err("a boundary with less σ than it says".to_owned());
                }
                let (state, rest) = (body.slice(..size), body.slice(size..));
                let (outputs, _) =
                    split_outputs(&report.outputs, &rest).ok_or("outputs without their bytes")?;
                if question.segment.to != Some(report.index) {
                    return Err(format!("the program yielded at boundary {}", report.index));
                }
                let digest = Digest::of(&state);
                if question.segment.keep == Some(digest) {
                    store::keep_state(&shared.broker, question.execution, digest, &state)
                        .await
                        .map_err(|error| error.to_string())?;
                }
                let is_over = report.reason == Reason::Yield;
                return Ok((found(report.index, digest, &outputs)?, is_over));
            }
            Report::Completed {
                result,
                capsules,
                outputs,
                ..
            } => {
                let (outputs, _) =
                    split_outputs(&outputs, &body).ok_or("outputs without their bytes")?;
                if let Some(to) = question.segment.to {
                    return Err(format!(
                        "the program completed without a report of boundary {to}"
                    ));
                }
                let finding = found(capsules, digest_of_result(&result), &outputs)?;
                return Ok((finding, true));
            }
            // The part gets no more than its present grant: grants change no bits.
            Report::Reserve(_) => {
                let reason = "a verification gets no more than its present grant".to_owned();
                let answer = Order::Reserved(Reserved::Refused { reason });
                let told = child.order(&answer, &[]).await;
                told.map_err(|error| error.to_string())?;
            }
            Report::Surroundings => {
                let answer = Box::new(Surroundings {
                    node: Some(shared.node().clone()),
                    unknown: Some("a part that is computed once more needs none".to_owned()),
                    ..Surroundings::default()
                });
                let told = child.order(&Order::Surroundings(answer), &[]).await;
                told.map_err(|error| error.to_string())?;
            }
            Report::Ask(_) => {
                let reason = "a part that is computed once more keeps its grant".to_owned();
                let answer = Order::Asked(Asked::Refused { reason });
                let told = child.order(&answer, &[]).await;
                told.map_err(|error| error.to_string())?;
            }
            Report::Failed { reason, .. } => return Err(format!("the program failed: {reason}")),
            Report::Cancelled => return Err("the program was cancelled".to_owned()),
            Report::Ready
            | Report::Prepared { .. }
            | Report::Began { .. }
            | Report::Progress { .. }
            | Report::Boundary(_) => {}
            #[allow(unreachable_patterns, reason = "reports that later versions add")]
            _ => {}
        }
    }
}

fn found(index: u64, digest: Digest, outputs: &[Output]) -> Result<Finding, String> {
    let mut finding = Finding {
        index,
        digest,
        outputs: std::collections::BTreeMap::new(),
    };
    finding.made(outputs);
    if finding.outputs.len() > OUTPUTS_LIMIT {
        return Err(format!(
            "{} outputs in one part, and {OUTPUTS_LIMIT} is the most that can be compared",
            finding.outputs.len()
        ));
    }
    Ok(finding)
}

async fn answer(
    shared: &Shared,
    child: &mut Child,
    digest: Digest,
    bytes: u64,
) -> Result<(), String> {
    let (order, body) = match shared.data.get(digest, bytes).await {
        Ok(body) => (
            Order::Data {
                digest,
                error: None,
                permanent: false,
            },
            body,
        ),
        Err(error) => (
            Order::Data {
                digest,
                permanent: error.is_permanent(),
                error: Some(error.reason().to_owned()),
            },
            Bytes::new(),
        ),
    };
    let sent = child.order(&order, &body).await;
    sent.map_err(|error| error.to_string())
}
