//! The policy's view of live executions, as data. A comparison with the ledgers shows
//! whether the policy has missed a message.

use fiec_schemas::ExecutionId;
use fiec_schemas::messages::Believed;

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Execution;

/// At most `most` live executions with ids greater than `after`, ordered by id, and whether more
/// follow. It reads all live executions, so keep it off the hot path.
pub(crate) fn beliefs(
    life: &Lifecycle,
    after: Option<ExecutionId>,
    most: usize,
) -> (Vec<Believed>, bool) {
    let all = life.cluster().executions();
    let wanted = |id: &ExecutionId| after.is_none_or(|after| *id > after);
    let mut page: Vec<(ExecutionId, &Execution)> = all
        .filter(|(id, _)| wanted(id))
        .map(|(id, e)| (*id, e))
        .collect();
    let more = page.len() > most;
    if more {
        page.select_nth_unstable_by_key(most, |(id, _)| *id);
        page.truncate(most);
    }
    page.sort_unstable_by_key(|(id, _)| *id);
    let believed = page.into_iter().map(|(id, e)| believed(life, id, e));
    (believed.collect(), more)
}

fn believed(life: &Lifecycle, id: ExecutionId, e: &Execution) -> Believed {
    let node = e.stage.node().map(|ix| life.cluster().node(ix).id.clone());
    Believed {
        execution: id,
        phase: e.stage.phase(),
        seq: e.seq,
        epoch: e.epoch,
        node,
        appending: e.is_appending(),
    }
}
