//! The tables of records, and the rows that each record leads to.

use fiec_schemas::messages::{NodeEventKind, Record};
use fiec_schemas::quota::Quota;
use fiec_schemas::{
    Candidate, Contract, ExecutionId, InstanceId, NodeId, Sequence, Tenant, Timestamp,
};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::{nodes, proofs};
use crate::table::Merge::{Key, Take};
use crate::table::{table, write_one};

table! {
    /// A row of `rejections`.
    struct RejectionRow in "rejections" {
        /// Sequence in `FIEC_RECORD`.
        seq: Sequence,
        /// Whose submission.
        tenant: String,
        /// Its sequence in `FIEC_SUBMIT`.
        submission_seq: Option<Sequence>,
        /// The line.
        line: u32,
        /// The field.
        field: String,
        /// The rule that it broke.
        reason: String,
        /// The beginning of the line.
        excerpt: String,
        /// When it was refused.
        at: Timestamp,
        /// The line because of which it was.
        because: Option<u32>,
    }
}

table! {
    /// A row of `node_events`.
    struct NodeEventRow in "node_events" {
        /// Sequence in `FIEC_RECORD`.
        seq: Sequence,
        /// Which node.
        node: NodeId,
        /// Which life of its agent.
        instance: Option<InstanceId>,
        /// What happened.
        what: NodeEventKind,
        /// In words.
        detail: String,
        /// When.
        at: Timestamp,
        /// Who asked for it.
        who: Option<String>,
        /// The contract that was lost.
        contract: Option<Contract>,
        /// The device that lost it.
        substrate: Option<String>,
    }
}

table! {
    /// A row of `quota_changes`.
    struct QuotaRow in "quota_changes" {
        /// Sequence in `FIEC_RECORD`.
        seq: Sequence,
        /// Whose quota.
        tenant: Tenant,
        /// When it was set.
        at: Timestamp,
        /// Who set it.
        who: String,
        /// Most executions at once.
        running: Option<u64>,
        /// Most of them on devices.
        devices: Option<u64>,
        /// Most bytes of hosts' memory.
        memory_bytes: Option<u64>,
        /// Share relative to others.
        weight: Option<u32>,
        /// Most executions that wait.
        waiting: Option<u64>,
    }
}

table! {
    /// A row of `waiting_verdicts`: why an execution waits.
    struct WaitingRow in "waiting_verdicts" where "waiting_verdicts.at < excluded.at" {
        /// Which execution.
        execution: ExecutionId = Key,
        /// When the policy service judged.
        at: Timestamp = Take,
        /// In one sentence.
        summary: String = Take,
        /// The candidates that are named.
        candidates: Json<Vec<Candidate>> = Take,
        /// How many more there were.
        omitted: u32 = Take,
        /// What would help, each a sentence.
        would_help: Json<Vec<String>> = Take,
    }
}

/// Writes one record.
pub(super) async fn apply(
    tx: &mut PgConnection,
    seq: Sequence,
    record: &Record,
) -> sqlx::Result<()> {
    match record {
        Record::Rejection {
            tenant,
            seq: submission_seq,
            error,
            excerpt,
            at,
        } => {
            let row = RejectionRow {
                seq,
                tenant: tenant.clone(),
                submission_seq: *submission_seq,
                line: error.line,
                field: error.field.clone(),
                reason: error.reason.clone(),
                excerpt: excerpt.clone(),
                at: *at,
                because: error.because,
            };
            write_one(tx, &row).await
        }
        Record::Node {
            node,
            instance,
            what,
            contract,
            substrate,
            detail,
            who,
            at,
            descriptor,
        } => {
            let event = NodeEventRow {
                seq,
                node: node.clone(),
                instance: *instance,
                what: *what,
                detail: detail.clone(),
                at: *at,
                who: who.clone(),
                contract: *contract,
                substrate: substrate.clone(),
            };
            write_one(&mut *tx, &event).await?;
            nodes::update_status(&mut *tx, &event).await?;
            match descriptor {
                Some(descriptor) => nodes::describe(tx, descriptor).await,
                None => Ok(()),
            }
        }
        Record::Proof { proof, refused, at } => {
            proofs::write(tx, seq, proof, refused.as_deref(), *at).await
        }
        Record::Verification {
            execution,
            from,
            to,
            node,
            by,
            outcome,
            detail,
            at,
        } => {
            let row = proofs::VerificationRow {
                seq,
                execution: *execution,
                from_boundary: *from,
                to_boundary: *to,
                node: node.clone(),
                by_nodes: by.clone(),
                outcome: *outcome,
                detail: detail.clone(),
                at: *at,
            };
            write_one(tx, &row).await
        }
        Record::Waiting {
            execution,
            summary,
            candidates,
            omitted,
            would_help,
            at,
        } => {
            let row = WaitingRow {
                execution: *execution,
                at: *at,
                summary: summary.clone(),
                candidates: Json(candidates.clone()),
                omitted: *omitted,
                would_help: Json(would_help.clone()),
            };
            write_one(tx, &row).await
        }
        Record::Envelopes { node, envelopes } => {
            let who = Some(envelopes.who.clone());
            let event = NodeEventRow {
                seq,
                node: node.clone(),
                instance: None,
                what: NodeEventKind::Envelopes,
                detail: envelopes.in_words(),
                at: envelopes.at,
                who: who.filter(|who| !who.is_empty()),
                contract: None,
                substrate: None,
            };
            write_one(&mut *tx, &event).await?;
            nodes::set_envelopes(tx, node, envelopes).await
        }
        Record::Quota { tenant, quota } => write_one(tx, &quota_row(seq, tenant, quota)).await,
    }
}

fn quota_row(seq: Sequence, tenant: &Tenant, quota: &Quota) -> QuotaRow {
    QuotaRow {
        seq,
        tenant: tenant.clone(),
        at: quota.at,
        who: quota.who.clone(),
        running: quota.running.map(u64::from),
        devices: quota.devices.map(u64::from),
        memory_bytes: quota.memory_bytes,
        weight: quota.weight,
        waiting: quota.waiting.map(u64::from),
    }
}
