//! Names of subjects, streams, buckets and headers. They are spelled only here.

use std::fmt::Display;

use crate::ids::{ExecutionId, InstanceId, NodeId, Tenant};
use crate::messages::{ExecutionVerb, NodeVerb};

/// Header of a ledger message that holds its [`crate::LedgerMessage`] as JSON.
pub const EVENT_HEADER: &str = "Fiec-Event";
/// Largest σ in bytes that a ledger message's body contains. For a larger one the body is the list
/// of its chunks, which are in [`CHUNK_STREAM`].
pub const INLINE_STATE_LIMIT: usize = 768 * 1024;
/// Header of a chunk of a σ that holds the digest of its bytes.
pub const CHUNK_HEADER: &str = "Fiec-Chunk";
/// Messages kept for each execution in the ledger stream.
pub const LEDGER_DEPTH: u64 = 64;

/// Stream of submissions (work queue).
pub const SUBMIT_STREAM: &str = "FIEC_SUBMIT";
/// Stream of ledgers, one subject for each execution.
pub const LEDGER_STREAM: &str = "FIEC_LEDGER";
/// Stream of facts that belong to no ledger: rejections, node changes. Read by the recorder.
pub const RECORD_STREAM: &str = "FIEC_RECORD";
/// Memory stream with the last hardware vector of each node.
pub const TELEMETRY_STREAM: &str = "FIEC_TELEMETRY";
/// Stream of the services' probes, which show whether the broker stores.
pub const PROBE_STREAM: &str = "FIEC_PROBE";
/// Stream of the output of programs.
pub const LOG_STREAM: &str = "FIEC_LOG";
/// KV bucket of node descriptors and cordon flags.
pub const NODES_BUCKET: &str = "FIEC_NODES";
/// Stream of the reservations of tenants, one message for each tenant.
pub const QUOTA_STREAM: &str = "FIEC_RESERVED";
/// KV bucket of quotas, by tenant.
pub const QUOTA_BUCKET: &str = "FIEC_QUOTA";
/// KV bucket of registered programs, by [`crate::package::ProgramName::key`].
pub const PROGRAMS_BUCKET: &str = "FIEC_PROGRAMS";
/// Stream of the chunks of large σ, one subject for each execution.
pub const CHUNK_STREAM: &str = "FIEC_CHUNK";
/// Stream of the messages that programs emit.
pub const OUTBOX_STREAM: &str = "FIEC_OUTBOX";
/// Object store of σ that is kept whole beside its ledger, because it is verified or restored, by
/// digest; and of how far executions are verified.
pub const STATE_BUCKET: &str = "FIEC_STATE";
/// Object store of inputs and outputs, by digest.
pub const DATA_BUCKET: &str = "FIEC_DATA";
/// Durable consumer of the policy services on [`SUBMIT_STREAM`].
pub const SUBMIT_CONSUMER: &str = "policy";

/// The stream of the capsule messages of one shard of nodes.
pub fn capsule_stream(shard: u16) -> String {
    format!("FIEC_CAPSULE_{shard}")
}

/// The capsule messages of one shard.
pub fn capsule_shard(shard: u16) -> String {
    format!("fiec.capsule.{shard}.*")
}

/// The capsule messages of a node.
pub fn capsule(shard: u16, node: &NodeId) -> String {
    format!("fiec.capsule.{shard}.{node}")
}

/// The durable consumer of a node on its capsule stream.
pub fn capsule_consumer(node: &NodeId) -> String {
    format!("node-{node}")
}

/// The submissions of a tenant.
pub fn submit(tenant: &Tenant) -> String {
    format!("fiec.submit.{tenant}")
}

/// The reservations of a tenant.
pub fn quota(tenant: &Tenant) -> String {
    format!("fiec.quota.{tenant}")
}

/// The tenant in a subject of reservations.
pub fn parse_quota(subject: &str) -> Option<Tenant> {
    subject.strip_prefix("fiec.quota.")?.parse().ok()
}

/// An execution's ledger.
pub fn ledger(tenant: &Tenant, execution: ExecutionId) -> String {
    format!("fiec.ledger.{tenant}.{execution}")
}

/// The ledgers of all executions of a tenant.
pub fn ledgers(tenant: &Tenant) -> String {
    format!("fiec.ledger.{tenant}.*")
}

/// The tenant and the execution in a subject of a ledger.
pub fn parse_ledger(subject: &str) -> Option<(Tenant, ExecutionId)> {
    let (tenant, execution) = subject.strip_prefix("fiec.ledger.")?.split_once('.')?;
    Some((tenant.parse().ok()?, execution.parse().ok()?))
}

/// The tenant in a subject of submissions.
pub fn parse_submit(subject: &str) -> Option<Tenant> {
    subject.strip_prefix("fiec.submit.")?.parse().ok()
}

/// The chunks of an execution's large σ.
pub fn chunk(tenant: &Tenant, execution: ExecutionId) -> String {
    format!("fiec.chunk.{tenant}.{execution}")
}

/// The messages that an execution emits under a name. `*` for all names.
pub fn outbox(tenant: &Tenant, execution: ExecutionId, name: &str) -> String {
    format!("fiec.outbox.{tenant}.{execution}.{name}")
}

/// Handover messages to a prepared node, which carry σ.
pub fn handover(node: &NodeId) -> String {
    format!("fiec.handover.{node}")
}

/// A node's hardware vectors.
pub fn telemetry(node: &NodeId) -> String {
    format!("fiec.telemetry.{node}")
}

/// The node in a subject of telemetry.
pub fn parse_telemetry(subject: &str) -> Option<NodeId> {
    subject.strip_prefix("fiec.telemetry.")?.parse().ok()
}

/// Control requests to a node.
pub fn control(node: &NodeId) -> String {
    format!("fiec.control.{node}")
}

/// The output of an execution's program.
pub fn log(tenant: &Tenant, execution: ExecutionId) -> String {
    format!("fiec.log.{tenant}.{execution}")
}

/// A refused submission line of this tenant.
pub fn rejection(tenant: &str) -> String {
    format!("fiec.record.rejection.{tenant}")
}

/// Facts about a node: joining, leaving, flags.
pub fn node_record(node: &NodeId) -> String {
    format!("fiec.record.node.{node}")
}

/// Changes of a tenant's quota.
pub fn quota_record(tenant: &Tenant) -> String {
    format!("fiec.record.quota.{tenant}")
}

/// Why an execution waits.
pub fn waiting_record(execution: ExecutionId) -> String {
    format!("fiec.record.waiting.{execution}")
}

/// Verdicts of nodes that computed parts of executions again.
pub const VERDICT: &str = "fiec.verdict";

/// Presence of policy services, so that they share work without a leader.
pub const POLICY_PRESENCE: &str = "fiec.policy.presence";

/// A request about one execution: a [`crate::messages::ExecutionRequest`]. `*` for all tenants.
pub fn api_execution(verb: ExecutionVerb, tenant: impl Display) -> String {
    format!("fiec.api.{verb}.{tenant}")
}

/// A request about a batch: a [`crate::messages::BatchRequest`]. `*` for all verbs or tenants.
pub fn api_batch(verb: impl Display, tenant: impl Display) -> String {
    format!("fiec.api.batch.{verb}.{tenant}")
}

/// A request about a node: a [`crate::messages::NodeRequest`].
pub fn api_node(verb: NodeVerb) -> String {
    format!("fiec.api.node.{verb}")
}

/// Lines to submit, answered one by one. `*` for all tenants.
pub fn api_submit(tenant: impl Display) -> String {
    format!("fiec.api.submit.{tenant}")
}

/// A request about a tenant's quota: a [`crate::messages::QuotaRequest`]. `*` for all tenants.
pub fn api_quota(tenant: impl Display) -> String {
    format!("fiec.api.quota.{tenant}")
}

/// All quotas that are set.
pub const API_QUOTAS: &str = "fiec.api.quotas";

/// All nodes.
pub const API_NODES: &str = "fiec.api.nodes";

/// A request about a node's envelopes: a [`crate::messages::EnvelopeRequest`].
pub const API_ENVELOPE: &str = "fiec.api.node.envelope";

/// The resources that nodes can offer. The answer is a [`crate::surroundings::OffersReply`].
pub const OFFERS: &str = "fiec.api.offers";

/// What one policy service believes of live executions: a [`crate::messages::ViewRequest`].
pub fn api_view(service: InstanceId) -> String {
    format!("fiec.api.view.{service}")
}

/// The probe of a kind of service, stored in [`PROBE_STREAM`].
pub fn probe(who: &str) -> String {
    format!("fiec.probe.{who}")
}

/// The recorder's checkpoint, published at least once a second, so that writers notice its lag.
pub const RECORDER_CHECKPOINT: &str = "fiec.recorder.checkpoint";

/// A request to a recorder to put its copy of a state into [`STATE_BUCKET`]: a
/// [`crate::messages::RestoreRequest`]. The answer is a [`crate::messages::RestoreReply`].
pub const RECORDER_RESTORE: &str = "fiec.recorder.restore";

/// A question to a recorder about executions in PostgreSQL: a
/// [`crate::messages::RecordedRequest`]. The answer is a [`crate::messages::RecordedReply`].
pub const RECORDER_RECORDED: &str = "fiec.recorder.recorded";

/// KV key of a node's descriptor in [`NODES_BUCKET`].
pub fn node_key(node: &NodeId) -> String {
    format!("node.{node}")
}

/// KV key of a node's envelopes in [`NODES_BUCKET`].
pub fn envelopes_key(node: &NodeId) -> String {
    format!("envelopes.{node}")
}

/// KV key of a node's proof, in [`NODES_BUCKET`].
pub fn proof_key(node: &NodeId) -> String {
    format!("proof.{node}")
}

/// KV key of the contracts that a node has lost, in [`NODES_BUCKET`].
pub fn quarantine_key(node: &NodeId) -> String {
    format!("quarantine.{node}")
}

/// KV key of a node's flags (cordoned, draining) in [`NODES_BUCKET`].
pub fn flags_key(node: &NodeId) -> String {
    format!("flags.{node}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_subject_survives_its_text() {
        let tenant = Tenant::new("lab").unwrap();
        let execution = ExecutionId(uuid::Uuid::now_v7());
        let subject = ledger(&tenant, execution);
        assert_eq!(parse_ledger(&subject), Some((tenant, execution)));
        assert_eq!(parse_ledger("fiec.ledger.x"), None);
    }
}
