//! Proves which numeric contracts this node keeps. Canaries run in a child, as real programs do, on
//! each substrate. The node signs and publishes their results.
//!
//! The node renews its proof on joining, on a change of the environment, before the last proof
//! expires, and on request of a policy service. A node without a proof publishes its host's results
//! first: devices take longer to open.

use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fiec_broker::BrokerError;
use fiec_broker::trust::NodeKey;
use fiec_kit::frames::{Order, Report, Run};
use fiec_kit::programs::canary::{Judgement, judge, no_device};
use fiec_schemas::programs::CANARY;
use fiec_schemas::substrate::HOST;
use fiec_schemas::trust::{NodeIdentity, Proof, Proved, Unproved};
use fiec_schemas::{
    CommitPolicy, Contract, Digest, ExecutionId, NodeDescriptor, Tenant, Timestamp, subjects,
};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::child_process::{Child, Setting};
use crate::claim::Claim;
use crate::shared::Shared;

/// Time limit of a suite. A suite takes milliseconds.
const WITHIN: Duration = Duration::from_secs(60);
/// Interval of the checks of the environment.
const LOOK: Duration = Duration::from_secs(30);
/// Pause before a failed proof or publish is retried.
const AGAIN: Duration = Duration::from_secs(1);
/// Pause before an unavailable device is retried.
const DEVICE_AGAIN: Duration = Duration::from_secs(300);
/// Device memory for the canaries. An execution on the device keeps the rest.
const DEVICE_MEMORY: u64 = 64 << 20;
/// The state of a device whose turn has not come, in a proof.
const NEXT: &str = "they run there next";

/// Digest of everything that numerics can depend on: the children's binary, the instruction set,
/// devices, drivers and libraries.
pub fn environment(descriptor: &NodeDescriptor, child: &str) -> Digest {
    // Another build has another size or time. Reading the whole binary would cost more than all
    // canaries.
    let binary = std::fs::metadata(Path::new(child)).map_or_else(
        |error| error.to_string(),
        |meta| format!("{} {}.{:09}", meta.len(), meta.mtime(), meta.mtime_nsec()),
    );
    let devices: Vec<_> = descriptor
        .substrates
        .iter()
        .map(|s| {
            let device = s.device.as_ref();
            let capability = device.and_then(|d| d.compute_capability);
            (&s.id, &s.kind, &s.name, capability)
        })
        .collect();
    // The kernel's present driver version: it can change under a running agent.
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let profile = &descriptor.profile;
    let text = json!([
        descriptor.version,
        binary,
        descriptor.isa,
        devices,
        profile.libraries,
        driver
    ]);
    Digest::of(text.to_string().as_bytes())
}

/// Returns the node's key, and the identity for its claim.
///
/// # Errors
/// When the key's file cannot be used.
pub fn identify(
    run_dir: &Path,
    descriptor: &NodeDescriptor,
    child: &str,
) -> std::io::Result<(NodeKey, NodeIdentity)> {
    // Several nodes may share a run folder, as they share a machine.
    let key = NodeKey::in_file(&run_dir.join(format!("{}.key", descriptor.node)))?;
    let identity = NodeIdentity {
        key: key.public(),
        environment: environment(descriptor, child),
    };
    Ok((key, identity))
}

/// Keeps the node's proof in force until `stop`.
pub async fn keep(
    shared: Arc<Shared>,
    key: Arc<NodeKey>,
    claim: Arc<Claim>,
    mut descriptor: NodeDescriptor,
    stop: CancellationToken,
) {
    let mut in_force = None;
    let work = async {
        loop {
            let renewed = renew(&shared, &key, &claim, &mut descriptor, &mut in_force).await;
            let lifetime = shared.options.proof_lifetime / 2;
            let wait = match renewed {
                Ok(true) => lifetime,
                Ok(false) => lifetime.min(DEVICE_AGAIN),
                Err(error) => {
                    tracing::warn!(%error, "cannot prove this node's contracts; trying again");
                    AGAIN
                }
            };
            wait_for_a_reason(&shared, &descriptor, Instant::now() + wait).await;
        }
    };
    stop.run_until_cancelled(work).await;
}

/// Waits for a reason to renew the proof: a request, a changed environment, or `until`.
async fn wait_for_a_reason(shared: &Shared, descriptor: &NodeDescriptor, until: Instant) {
    loop {
        let now = Instant::now();
        if now >= until {
            return;
        }
        tokio::select! {
            () = shared.prove.notified() => return,
            () = tokio::time::sleep_until(until.min(now + LOOK)) => {}
        }
        let known = descriptor.identity.as_ref().map(|i| i.environment);
        if known != Some(environment(descriptor, child_of(shared))) {
            tracing::info!("the environment has changed; the canaries run anew");
            return;
        }
    }
}

fn child_of(shared: &Shared) -> &str {
    shared
        .options
        .child_command
        .first()
        .map_or("", String::as_str)
}

/// Runs the canaries and publishes their results. Returns false if some could not run.
async fn renew(
    shared: &Arc<Shared>,
    key: &NodeKey,
    claim: &Claim,
    descriptor: &mut NodeDescriptor,
    in_force: &mut Option<Digest>,
) -> Result<bool, BrokerError> {
    claim.restore(descriptor).await?;
    let environment = environment(descriptor, child_of(shared));
    if let Some(identity) = &mut descriptor.identity
        && identity.environment != environment
    {
        identity.environment = environment;
        claim.renew(descriptor).await?;
    }
    let began = Instant::now();
    let mut proof = Proof {
        v: 1,
        node: shared.node().clone(),
        instance: shared.instance,
        suite: fiec_kit::programs::canary::SUITE,
        environment,
        at: shared.broker.now(),
        expires_at: shared.broker.now(),
        results: Vec::new(),
        unproved: Vec::new(),
    };
    for (index, substrate) in descriptor.substrates.iter().enumerate() {
        if index > 0 && *in_force != Some(environment) {
            let mut first = proof.clone();
            let rest = descriptor.substrates[index..].iter();
            first
                .unproved
                .extend(rest.map(|s| unproved(&s.id, NEXT.to_owned())));
            publish(shared, key, first).await?;
            *in_force = Some(environment);
        }
        run_on(shared, &substrate.id, &mut proof).await?;
    }
    let complete = proof.unproved.is_empty();
    publish(shared, key, proof).await?;
    *in_force = Some(environment);
    let ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(ms, "the canaries' results are published");
    Ok(complete)
}

fn unproved(substrate: &str, reason: String) -> Unproved {
    Unproved {
        substrate: substrate.to_owned(),
        reason,
    }
}

/// Signs a proof with the present time and publishes it.
async fn publish(shared: &Shared, key: &NodeKey, mut proof: Proof) -> Result<(), BrokerError> {
    let lifetime = i64::try_from(shared.options.proof_lifetime.as_micros()).unwrap_or(i64::MAX);
    proof.at = shared.broker.now();
    proof.expires_at = Timestamp::from_micros(proof.at.micros().saturating_add(lifetime));
    let malformed = |reason: String| BrokerError::Malformed {
        what: "own proof".to_owned(),
        reason,
    };
    let signed = key
        .sign(&proof)
        .map_err(|error| malformed(error.to_string()))?;
    let store = shared
        .broker
        .js
        .get_key_value(subjects::NODES_BUCKET)
        .await
        .map_err(BrokerError::operation("open the bucket of nodes"))?;
    let value = serde_json::to_vec(&signed).map_err(|error| malformed(error.to_string()))?;
    store
        .put(subjects::proof_key(shared.node()), value.into())
        .await
        .map_err(BrokerError::operation("publish the node's proof"))?;
    Ok(())
}

/// Runs the suite on a substrate and adds its results.
async fn run_on(
    shared: &Arc<Shared>,
    substrate: &str,
    proof: &mut Proof,
) -> Result<(), BrokerError> {
    let run = tokio::time::timeout(WITHIN, compute(shared, substrate)).await;
    let judged = match run {
        Ok(Ok(result)) => match no_device(&result) {
            Some(reason) => Err(reason.to_owned()),
            None => judge(&result),
        },
        Ok(Err(Ended::Program(reason))) => Err(format!("the canaries failed: {reason}")),
        Ok(Err(Ended::Machine(reason))) => {
            return Err(BrokerError::Malformed {
                what: "the canaries".to_owned(),
                reason,
            });
        }
        Err(_) => Err(format!("the canaries did not end within {WITHIN:?}")),
    };
    // A device that is unavailable, faults or hangs shows no bits, wrong or right.
    if let (Err(reason), true) = (&judged, substrate != HOST) {
        tracing::warn!(substrate, reason, "a device cannot be proved");
        proof.unproved.push(unproved(substrate, reason.clone()));
        return Ok(());
    }
    if let Ok(judgement) = &judged {
        proof.suite = judgement.suite;
    }
    let results = proved(substrate, &judged);
    for result in results.iter().filter(|r| !r.passed) {
        tracing::error!(
            contract = result.contract.as_str(),
            substrate = result.substrate,
            detail = result.detail,
            "this node does not keep a contract"
        );
    }
    proof.results.extend(results);
    Ok(())
}

fn proved(substrate: &str, judged: &Result<Judgement, String>) -> [Proved; 2] {
    let one = |contract, broken: fn(&Judgement) -> &Option<String>| {
        let detail = match judged {
            Ok(judgement) => broken(judgement).clone(),
            Err(reason) => Some(reason.clone()),
        };
        let judgement = judged.as_ref().ok();
        Proved {
            substrate: substrate.to_owned(),
            contract,
            passed: detail.is_none(),
            detail: detail.unwrap_or_default(),
            cases: judgement.map_or(0, |j| j.cases),
            ran_on: judgement.map_or_else(String::new, |j| j.ran_on.clone()),
            digest: judgement.map_or(Digest::of(b""), |j| j.digest),
        }
    };
    [
        one(Contract::Bitwise, |j| &j.not_bitwise),
        one(Contract::Bounded, |j| &j.not_bounded),
    ]
}

/// The reason why there is no result.
enum Ended {
    /// The canaries themselves.
    Program(String),
    /// No child could be started, which says nothing about numerics.
    Machine(String),
}

async fn compute(shared: &Arc<Shared>, substrate: &str) -> Result<Value, Ended> {
    let machine = |error: &dyn std::fmt::Display| Ended::Machine(format!("no child: {error}"));
    let tenant = Tenant::new("fiec").map_err(|error| machine(&error))?;
    let key = (CANARY.to_owned(), tenant);
    let execution = ExecutionId(uuid::Uuid::now_v7());
    let mut grant = shared.grant(Some(substrate));
    if let Some(device) = &mut grant.device {
        let all = device.memory_bytes.unwrap_or(DEVICE_MEMORY);
        device.memory_bytes = Some(all.min(DEVICE_MEMORY));
    }
    let order = Order::Run(Box::new(Run {
        execution,
        epoch: 0,
        program: CANARY.to_owned(),
        params: json!({}),
        commit: CommitPolicy::Every(NonZeroU64::MAX),
        boundary: None,
        lease_ms: u32::MAX,
        interval_ms: 0,
        package: None,
        grant,
        spread: None,
        merge: None,
        crashes: 0,
    }));
    let taken = shared
        .pool
        .take(&key, execution, None, &Setting::default())
        .await;
    let mut child = taken.map_err(|error| machine(&error))?;
    if child.order(&order, &[]).await.is_err() {
        // The child died while it was idle.
        let fresh = shared.pool.fresh(&key, None, &Setting::default()).await;
        child = fresh.map_err(|error| machine(&error))?;
        child.order(&order, &[]).await.map_err(|e| machine(&e))?;
    }
    let ended = follow(&mut child).await;
    // A child that had a device may keep its context: end it.
    if ended.is_ok() && substrate == HOST {
        // It holds no tenant's data, so it is as good as new for the first execution.
        child.key = None;
        shared.pool.give(child);
    }
    ended
}

async fn follow(child: &mut Child) -> Result<Value, Ended> {
    loop {
        match child.link.next().await {
            Ok(Some((Report::Completed { result, .. }, _))) => return Ok(result),
            Ok(Some((Report::Failed { reason, .. }, _))) => return Err(Ended::Program(reason)),
            Ok(Some(_)) => {}
            Ok(None) => return Err(Ended::Program("the child ended without a word".to_owned())),
            Err(error) => return Err(Ended::Program(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judgement() -> Judgement {
        Judgement {
            suite: 1,
            ran_on: "cpu".to_owned(),
            cases: 13,
            digest: Digest::of(b"x"),
            not_bitwise: Some("canary dot has another digest".to_owned()),
            not_bounded: None,
        }
    }

    #[test]
    fn each_contract_has_its_own_result() {
        let [bitwise, bounded] = proved("host", &Ok(judgement()));
        assert_eq!(
            (bitwise.contract, bitwise.passed),
            (Contract::Bitwise, false)
        );
        assert!(bitwise.detail.contains("dot"));
        assert_eq!(
            (bounded.contract, bounded.passed),
            (Contract::Bounded, true)
        );
        assert_eq!((bounded.detail.as_str(), bounded.cases), ("", 13));
    }

    #[test]
    fn canaries_that_do_not_end_prove_nothing() {
        let results = proved("host", &Err("the canaries failed: x".to_owned()));
        assert!(
            results
                .iter()
                .all(|r| !r.passed && r.detail.contains("failed"))
        );
    }
}
