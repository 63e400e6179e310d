//! Records why executions wait, so that SQL shows it too: after a first moment, and again when the
//! reasons change. An explanation reads every node. So only the front of the queue is reported, a
//! few executions at a time, and less often on larger clusters.

use std::collections::BTreeMap;

use fiec_schemas::limits::CANDIDATES_LIMIT;
use fiec_schemas::messages::{Record, Why};
use fiec_schemas::{Digest, ExecutionId};

use super::Reasons;
use super::why::why;
use crate::Action;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::queue::waiting::Cursor;
use crate::time::Millis;

/// Most waiting executions that are reported on.
const FRONT: usize = 64;
/// Most candidate nodes that one round reads, and most executions that it reports on.
const LOOKS: u32 = 2_000;
const AT_ONCE: u32 = 16;
/// Shortest wait that is reported, in ms.
const MOMENT_MS: u64 = 1_000;
/// Shortest time between two explanations of one execution, in ms.
const AGAIN_MS: u64 = 5_000;

/// The last report on each waiting execution.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    said: BTreeMap<ExecutionId, (Millis, Digest)>,
    looked: Millis,
}

impl Reports {
    /// Runs one round of reports if it is due.
    pub(crate) fn report(&mut self, life: &mut Lifecycle, of: &impl Reasons) {
        let now = life.now;
        let nodes = life.cluster().node_count().max(1);
        let pause = life.config.explanation.report_ms.max(u64::from(nodes) / 5);
        if life.config.explanation.report_ms == 0 || now.mono.since(self.looked) < pause {
            return;
        }
        self.looked = now.mono;
        let waits = |id: &ExecutionId| {
            let e = life.cluster().execution(*id);
            e.is_some_and(|e| e.stage == Stage::Pending)
        };
        let mut said = std::mem::take(&mut self.said);
        said.retain(|id, _| waits(id));
        let mut due: Vec<_> = front(life)
            .into_iter()
            .filter_map(|id| {
                let e = life.cluster().execution(id)?;
                let at = said.get(&id).map(|(at, _)| *at);
                let early = at.is_some_and(|at| now.mono.since(at) < AGAIN_MS);
                let young = now.mono.since(e.since) < MOMENT_MS;
                (!early && !young && !e.is_appending() && life.is_mine(id)).then_some((at, id))
            })
            .collect();
        due.sort_unstable();
        for (_, id) in due
            .into_iter()
            .take((LOOKS / nodes).clamp(1, AT_ONCE) as usize)
        {
            let Some(why) = why(life, of, now, id) else {
                continue;
            };
            let digest = sense(&why);
            let before = said.insert(id, (now.mono, digest));
            if before.is_some_and(|(_, before)| before == digest) {
                continue;
            }
            let all = why.candidates.len();
            let mut candidates = why.candidates;
            candidates.truncate(CANDIDATES_LIMIT);
            let mut would_help = why.would_help;
            would_help.truncate(CANDIDATES_LIMIT);
            life.push(Action::record(Record::Waiting {
                execution: id,
                summary: why.summary,
                omitted: u32::try_from(all - candidates.len()).unwrap_or(u32::MAX),
                candidates,
                would_help,
                at: now.wall,
            }));
        }
        self.said = said;
    }
}

/// The front of the queue, and of the executions that are held back.
fn front(life: &Lifecycle) -> Vec<ExecutionId> {
    let mut front = Vec::new();
    for lane in life.waiting().lanes() {
        let mut cursor = Cursor::default();
        while front.len() < FRONT
            && let Some((id, _)) = life.waiting().next(lane, &mut cursor, |_| false)
        {
            front.push(id);
        }
    }
    let pending = |id: &&ExecutionId| {
        let e = life.cluster().execution(**id);
        e.is_some_and(|e| e.stage == Stage::Pending) && !life.waiting().contains(**id)
    };
    front.extend(
        life.all_bonds()
            .map(|(id, _)| id)
            .filter(pending)
            .take(FRONT),
    );
    front
}

/// Digest of an explanation without its numbers, which change all the time.
fn sense(why: &Why) -> Digest {
    let words = why.candidates.iter().flat_map(|c| {
        let node = std::iter::once(c.node.as_str());
        node.chain(c.rejected.iter().map(String::as_str))
    });
    let words = words
        .chain(why.would_help.iter().map(String::as_str))
        .chain(why.waits_for.iter().map(String::as_str))
        .chain([why.summary.as_str()]);
    let mut text = String::new();
    for word in words {
        text.extend(word.chars().filter(|c| !c.is_ascii_digit()));
        text.push('\n');
    }
    Digest::of(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::PhaseKind;

    fn why(summary: &str) -> Why {
        Why {
            summary: summary.to_owned(),
            candidates: Vec::new(),
            would_help: Vec::new(),
            remedies: Vec::new(),
            phase: PhaseKind::Pending,
            place: None,
            cause: None,
            decision: None,
            thresholds: Vec::new(),
            would_move: Vec::new(),
            would_go_to: None,
            waits_for: Vec::new(),
            next: None,
        }
    }

    #[test]
    fn numbers_that_grow_are_no_news_and_another_reason_is() {
        let one = sense(&why("pending for 1.2 s: no node can take it now"));
        let later = sense(&why("pending for 98.0 s: no node can take it now"));
        let other = sense(&why("pending for 98.0 s: it waits for its gang g"));
        assert_eq!(one, later);
        assert_ne!(one, other);
    }
}
