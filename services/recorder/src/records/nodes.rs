//! The table `nodes`: one row a node, of which the node's events, its descriptor, its envelopes and
//! its hardware vectors each set some columns.

use std::collections::BTreeMap;

use fiec_schemas::envelope::NodeEnvelopes;
use fiec_schemas::messages::NodeEventKind;
use fiec_schemas::{HardwareVector, InstanceId, NodeDescriptor, NodeId, Thresholds, Timestamp};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::tables::NodeEventRow;
use crate::table::Merge::{Key, Take};
use crate::table::{argument, table, write_all, write_one};

table! {
    /// The columns of `nodes` that a descriptor sets.
    struct DescriptionRow in "nodes" {
        /// Which node.
        node: NodeId = Key,
        /// Which life of its agent.
        instance: InstanceId = Take,
        /// Its host's name.
        host: String = Take,
        /// Version of its worker.
        version: String = Take,
        /// When the agent started.
        joined_at: Timestamp = Take,
        /// Nothing is known of the new agent's viability yet.
        viability: Option<String> = Take,
        /// Its shard of capsules.
        shard: i32 = Take,
        /// Executions that it runs at once.
        slots: u32 = Take,
        /// Logical processors.
        cpus: u32 = Take,
        /// Instruction set.
        isa: String = Take,
        /// Memory limit in bytes.
        memory_limit_bytes: u64 = Take,
        /// Programs that it runs.
        programs: Vec<String> = Take,
        /// The operator's labels.
        labels: Json<BTreeMap<String, String>> = Take,
        /// Thresholds in force.
        thresholds: Json<Thresholds> = Take,
        /// All of the descriptor.
        descriptor: Json<NodeDescriptor> = Take,
    }
    later {
        status: &'static str,
        status_detail: Option<String>,
        status_at: Option<Timestamp>,
        cordoned: bool,
    }
}

table! {
    /// The columns of `nodes` that a hardware vector sets.
    struct LoadRow in "nodes"
        where "nodes.last_seen_at IS NULL OR nodes.last_seen_at < excluded.last_seen_at"
    {
        /// Which node.
        node: NodeId = Key,
        /// Which life of its agent.
        instance: InstanceId,
        /// When the vector was made.
        last_seen_at: Timestamp = Take,
        /// True if the node is to be left.
        draining: bool = Take,
        /// Executions that it runs at once.
        slots: u32 = Take,
        /// Executions that it runs.
        running: u32 = Take,
        /// Executions that wait there.
        queued: u32 = Take,
        /// The node's clock less the broker's, in µs.
        clock_ahead_us: Option<i64> = Take,
        /// Bound of that measurement's error.
        clock_within_us: Option<u64> = Take,
    }
}

table! {
    /// The column of `nodes` that an operator's envelopes set.
    struct OfferRow in "nodes" {
        /// Which node.
        node: NodeId = Key,
        /// All envelopes in force.
        envelopes: Json<NodeEnvelopes> = Take,
    }
}

/// Brings the status and the flags of a node up to date with one of its events.
pub(super) async fn update_status(tx: &mut PgConnection, event: &NodeEventRow) -> sqlx::Result<()> {
    use NodeEventKind::{
        Cordoned, Draining, Joined, Left, Lost, Returned, Revoked, Uncordoned, Viability,
    };
    let status = match event.what {
        Joined | Returned => Some("up"),
        Left => Some("left"),
        Lost => Some("lost"),
        _ => None,
    };
    let cordoned = match event.what {
        Cordoned | Revoked => Some(true),
        Uncordoned => Some(false),
        _ => None,
    };
    let draining = match event.what {
        Draining | Revoked => Some(true),
        Joined | Uncordoned => Some(false),
        _ => None,
    };
    let viability = (event.what == Viability).then_some(event.detail.as_str());
    sqlx::query(
        "INSERT INTO nodes AS n (node, status, status_detail, status_at, cordoned, draining, \
         viability) VALUES ($1, coalesce($2, 'unknown'), $3, $4, coalesce($5, false), \
         coalesce($6, false), $7) ON CONFLICT (node) DO UPDATE SET \
         status = coalesce($2, n.status), \
         status_detail = CASE WHEN $2 IS NULL THEN n.status_detail ELSE $3 END, \
         status_at = CASE WHEN $2 IS NULL THEN n.status_at ELSE $4 END, \
         cordoned = coalesce($5, n.cordoned), draining = coalesce($6, n.draining), \
         viability = coalesce($7, n.viability)",
    )
    .bind(argument(&event.node))
    .bind(argument(&status))
    .bind(argument(&event.detail))
    .bind(argument(&event.at))
    .bind(argument(&cordoned))
    .bind(argument(&draining))
    .bind(argument(&viability))
    .execute(tx)
    .await?;
    Ok(())
}

/// Takes over what an agent says of its node when it joins.
pub(super) async fn describe(tx: &mut PgConnection, d: &NodeDescriptor) -> sqlx::Result<()> {
    let row = DescriptionRow {
        node: d.node.clone(),
        instance: d.instance,
        host: d.host.clone(),
        version: d.version.clone(),
        joined_at: d.started_at,
        viability: None,
        shard: i32::from(d.shard),
        slots: d.slots,
        cpus: d.cpus,
        isa: d.isa.clone(),
        memory_limit_bytes: d.memory_limit_bytes,
        programs: d.programs.clone(),
        labels: Json(d.labels.clone()),
        thresholds: Json(d.thresholds.clone()),
        descriptor: Json(d.clone()),
    };
    write_one(tx, &row).await
}

/// Sets what a node may offer from now on.
pub(super) async fn set_envelopes(
    tx: &mut PgConnection,
    node: &NodeId,
    envelopes: &NodeEnvelopes,
) -> sqlx::Result<()> {
    let row = OfferRow {
        node: node.clone(),
        envelopes: Json(envelopes.clone()),
    };
    write_one(tx, &row).await
}

/// Sets the load of nodes from the last vector of each.
pub(crate) async fn set_loads<'a>(
    connection: &mut PgConnection,
    vectors: impl Iterator<Item = &'a HardwareVector>,
) -> sqlx::Result<()> {
    // Always in the same order, so that two recorders cannot wait for each other.
    let last: BTreeMap<&NodeId, &HardwareVector> = vectors.map(|v| (&v.node, v)).collect();
    let rows: Vec<LoadRow> = last
        .into_values()
        .map(|v| LoadRow {
            node: v.node.clone(),
            instance: v.instance,
            last_seen_at: v.at,
            draining: v.draining,
            slots: v.slots,
            running: v.running_count,
            queued: v.queued_count,
            clock_ahead_us: v.clock.map(|clock| clock.ahead_us),
            clock_within_us: v.clock.map(|clock| clock.within_us),
        })
        .collect();
    write_all(connection, &rows).await
}
