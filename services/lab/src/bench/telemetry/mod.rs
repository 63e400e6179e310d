//! `bench telemetry`: the time from memory pressure to the first capsule on another node, by stage;
//! the cost of telemetry for a node; the cost of many nodes' vectors for the policy service.

mod cost;
mod intake;
mod reaction;

use super::Lab;

/// Runs the bench: `pressure_to_vector_p50_ms/p99_ms` (reach ≤ 50) and the stages after it,
/// `agent_cpu_percent` (reach < 0.5 at 1 Hz) and `bytes_per_s`, `policy_cpu_percent` and
/// `lag_p99_ms` at 10,000 nodes.
///
/// # Errors
/// When something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    reaction::run(lab).await?;
    cost::run(lab).await?;
    intake::run(lab).await
}
