//! A pending execution that a free viable node could take, and that no limit in real use holds
//! back, is bound. That nobody is overdue, [`crate::judge::overdue`] asks.
//!
//! The policy service says which nodes could take an execution. The use of a limit is counted here,
//! from the ledgers: a reservation without an owner must not hold anybody back.

use std::collections::BTreeMap;

use fiec_broker::Broker;
use fiec_schemas::messages::{ApiReply, ExecutionVerb, Why};
use fiec_schemas::quota::Quota;
use fiec_schemas::{ExecutionId, Phase, Tenant};

use super::ledgers::Last;
use crate::judge::checker::{Rule, Violation};

/// Most pending executions that are asked about in one observation.
const ASKED: usize = 32;

/// Answers of the policy service about pending executions, and the quotas.
#[derive(Debug, Clone, Default)]
pub struct Waiting {
    /// The policy service's explanation of each.
    pub why: BTreeMap<ExecutionId, Why>,
    /// The quotas that are set.
    pub quotas: BTreeMap<Tenant, Quota>,
}

/// Asks why pending executions wait.
pub async fn observe(
    broker: &Broker,
    ledgers: &BTreeMap<ExecutionId, Last>,
) -> Result<Vec<Violation>, String> {
    let pending: Vec<(ExecutionId, Tenant)> = ledgers
        .iter()
        .filter(|(_, last)| is_pending(last))
        .map(|(id, last)| (*id, last.state.tenant.clone()))
        .take(ASKED)
        .collect();
    if pending.is_empty() {
        return Ok(Vec::new());
    }
    let words = |e: fiec_broker::api::ApiError| e.to_string();
    let mut waiting = Waiting::default();
    let quotas = fiec::client::me(broker).quotas().await.map_err(words)?;
    for named in quotas.tenants {
        let quota = named.quota.map(|quota| (named.tenant, quota));
        waiting.quotas.extend(quota);
    }
    for (id, tenant) in pending {
        let verb = ExecutionVerb::Why;
        let asked = fiec::client::me(broker)
            .execution(verb, &tenant, &id.to_string(), None)
            .await;
        // It may have ended meanwhile.
        let reply: ApiReply = asked.map_err(words)?;
        if let Some(why) = reply.why {
            waiting.why.insert(id, why);
        }
    }
    Ok(judge(ledgers, &waiting))
}

/// Finds pending executions that nothing holds back.
pub fn judge(ledgers: &BTreeMap<ExecutionId, Last>, waiting: &Waiting) -> Vec<Violation> {
    let mut found = Vec::new();
    for (id, why) in &waiting.why {
        let Some(last) = ledgers.get(id).filter(|last| is_pending(last)) else {
            continue;
        };
        let free = why.candidates.iter().find(|c| c.rejected.is_empty());
        let Some(free) = free else { continue };
        if is_held_back(last, why, ledgers, &waiting.quotas) {
            continue;
        }
        let what = format!("is pending, and {} could take it", free.node);
        found.push(Violation::new(Rule::Liveness, &id.to_string(), what));
    }
    found
}

/// Pending, and not for its own parts.
fn is_pending(last: &Last) -> bool {
    let awaits = |last: &Last| last.state.spread.as_ref().is_some_and(|s| s.waits);
    matches!(last.state.phase, Phase::Pending { .. }) && !awaits(last)
}

fn is_held_back(
    last: &Last,
    why: &Why,
    ledgers: &BTreeMap<ExecutionId, Last>,
    quotas: &BTreeMap<Tenant, Quota>,
) -> bool {
    let Some(spec) = &last.state.spec else {
        // Its submission lies elsewhere.
        return !why.waits_for.is_empty();
    };
    if !spec.after.is_empty() || spec.gang.is_some() {
        return !why.waits_for.is_empty();
    }
    let placed = |other: &&Last| other.state.phase.binding().is_some();
    let in_tenant = |other: &&Last| other.state.tenant == last.state.tenant;
    if let Some(most) = spec.at_once {
        let batch = last.state.batch.as_ref().map(|b| b.id);
        let same = |other: &&Last| other.state.batch.as_ref().map(|b| b.id) == batch;
        let used = ledgers.values().filter(placed).filter(same).count();
        if used >= most as usize {
            return true;
        }
    }
    let Some(quota) = quotas.get(&last.state.tenant) else {
        return false;
    };
    if quota.devices.is_some() || quota.memory_bytes.is_some() {
        // What each execution takes of them is the policy service's to say.
        return !why.waits_for.is_empty();
    }
    let used = ledgers.values().filter(placed).filter(in_tenant).count();
    quota.running.is_some_and(|most| used >= most as usize)
}
