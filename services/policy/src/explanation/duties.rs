//! Counts for each actor the live executions on which it must act next, and how many of these are
//! overdue.

use std::collections::BTreeMap;

use fiec_schemas::ExecutionId;
use fiec_schemas::duty::{Actor, Standing};

use super::Reasons;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::{Execution, Stage};
use crate::time::Now;

/// Number of executions on which an actor must act next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Duties {
    /// All of them.
    pub all: u64,
    /// Those past their deadline for the next step.
    pub overdue: u64,
}

/// The duties of each actor. It reads every live execution, so keep it off the hot path.
pub(crate) fn duties(life: &Lifecycle, of: &impl Reasons, now: Now) -> BTreeMap<Actor, Duties> {
    let mut found = BTreeMap::from(Actor::ALL.map(|actor| (actor, Duties::default())));
    for (id, e) in life.cluster().executions() {
        let duty = standing_of(life, of, now, *id, e).duty(now.wall);
        let duties = found.entry(duty.who).or_default();
        duties.all += 1;
        duties.overdue += u64::from(duty.is_overdue(now.wall));
    }
    found
}

/// The state of a live execution, as far as its next duty depends on it.
pub(crate) fn standing(
    life: &Lifecycle,
    of: &impl Reasons,
    now: Now,
    id: ExecutionId,
) -> Option<Standing> {
    let e = life.cluster().execution(id)?;
    Some(standing_of(life, of, now, id, e))
}

fn standing_of(
    _life: &Lifecycle,
    of: &impl Reasons,
    now: Now,
    id: ExecutionId,
    e: &Execution,
) -> Standing {
    match e.stage {
        Stage::Pending => Standing::Pending {
            awaits_parts: of.is_done_but_for_parts(id),
        },
        // Seen by the ledger alone, a long fetch is overdue. Here it counts while it moves on.
        Stage::Bound(..) => Standing::Bound {
            at: now.stamp_of(e.owed_since(e.arrived)),
        },
        Stage::Started(..) => Standing::Started {
            is_parked: e.parked().is_some(),
            request: e
                .extra
                .as_ref()
                .and_then(|extra| extra.request.as_ref())
                .map(|open| open.duty),
        },
        Stage::Paused => Standing::Paused,
        Stage::Held => Standing::Held,
        Stage::Verifying => Standing::Verifying,
    }
}
