//! Executions that ended here recently. A restarted broker may have lost an end that it had
//! acknowledged. This worker then appends it again, and nothing is computed twice.
//!
//! Some ends are not kept: those older or larger than the limits below, and those of a worker that
//! has left. Their executions are computed again from the last boundary in the ledger, with the
//! same bits.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Tip, store};
use fiec_schemas::{Digest, ExecutionId, Sequence};
use futures_util::StreamExt as _;
use futures_util::stream;

use crate::appends;
use crate::healing::{self, Ground};
use crate::shared::Shared;

/// How long an end is kept. The server's development profile syncs its files every two minutes.
const KEPT: Duration = Duration::from_secs(150);
/// Most ends kept.
const MOST: usize = 512;
/// Most bytes of one end, and of all together: messages, σ and outputs.
const BYTES: usize = 1 << 20;
const ALL_BYTES: usize = 8 << 20;
/// Ends that are checked concurrently.
const AT_ONCE: usize = 16;

/// The last message of an execution, and everything needed to append it again. It is kept as it was
/// sent: what it was made of takes several times the memory.
#[derive(Debug)]
pub struct End {
    execution: ExecutionId,
    /// The message before it, and the data to append that again. None if it is the ledger's first.
    ground: Option<Box<Ground>>,
    /// Sequence of that message.
    after: Sequence,
    header: Box<str>,
    digest: Digest,
    body: Bytes,
    outputs: Vec<(Digest, Bytes)>,
    bytes: usize,
}

impl End {
    /// The end that appends `draft` with `body` to `ground`, once the outputs are stored. None if
    /// it is too large, or if the execution does not end with it: then its next holder heals the
    /// loss.
    pub(crate) fn new(
        ground: &Ground,
        draft: &Draft,
        body: &Bytes,
        outputs: &[(Digest, Bytes)],
    ) -> Option<Self> {
        let all = outputs.iter().map(|(_, bytes)| bytes.len());
        let bytes = draft.header.len() + body.len() + ground.bytes() + all.sum::<usize>();
        if bytes > BYTES || !draft.state.phase.is_terminal() {
            return None;
        }
        // Copies: each slice may be part of a much larger frame.
        let copy = |bytes: &Bytes| Bytes::copy_from_slice(bytes);
        let outputs = outputs.iter().map(|(digest, bytes)| (*digest, copy(bytes)));
        Some(Self {
            execution: draft.state.execution,
            ground: (draft.expected != 0).then(|| Box::new(ground.at_rest())),
            after: draft.expected,
            header: draft.header.as_str().into(),
            digest: draft.digest,
            body: copy(body),
            outputs: outputs.collect(),
            bytes,
        })
    }

    /// Appends it again, unless the ledger still has it.
    async fn again(&self, shared: &Shared) -> Result<(), AppendError> {
        let draft = Draft::read(&self.header, self.after)?;
        let last = healing::last(shared, &draft.state).await?;
        if last.as_ref().map(|last| last.digest) == Some(self.digest) {
            return Ok(());
        }
        if self.ground.is_none() && last.is_some() {
            return Err(AppendError::Conflict);
        }
        let store = async {
            for (digest, bytes) in &self.outputs {
                appends::until_done(|| store::put_data(&shared.broker, *digest, bytes)).await;
            }
            Ok(self.body.clone())
        };
        match &self.ground {
            None => {
                appends::append(shared, draft, store.await?).await?;
                shared.metrics.healed.inc();
            }
            Some(ground) => drop(ground.append_again(shared, &draft, store).await?),
        }
        Ok(())
    }
}

/// The ends of the last [`KEPT`], oldest first.
#[derive(Debug, Default)]
pub struct Ends(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    ends: VecDeque<(Instant, Arc<End>)>,
    bytes: usize,
}

impl Ends {
    /// Keeps the end that was stored as `tip`. A message that was stored with another digest than
    /// planned is not kept.
    pub(crate) fn keep(&self, end: &Arc<End>, tip: &Tip) {
        if tip.digest == Some(end.digest) {
            let now = Instant::now();
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.bytes += end.bytes;
            kept.ends.push_back((now, Arc::clone(end)));
            kept.forget(now);
        }
    }

    fn lately(&self) -> Vec<Arc<End>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.forget(Instant::now());
        kept.ends.iter().map(|(_, end)| Arc::clone(end)).collect()
    }
}

impl Kept {
    fn forget(&mut self, now: Instant) {
        while let Some((at, end)) = self.ends.front() {
            let is_old = now.saturating_duration_since(*at) > KEPT;
            if !is_old && self.ends.len() <= MOST && self.bytes <= ALL_BYTES {
                return;
            }
            self.bytes -= end.bytes;
            self.ends.pop_front();
        }
    }
}

/// Appends again the recent ends that the broker has lost.
pub(crate) async fn say_again(shared: &Shared) {
    let mut ends = shared.ends.lately();
    // The runner of an execution that lives here again appends it itself.
    ends.retain(|end| !shared.live().contains_key(&end.execution));
    let all = stream::iter(ends).for_each_concurrent(AT_ONCE, |end| async move {
        let execution = end.execution;
        match end.again(shared).await {
            // The common case: the ledger has the end, or has gone on.
            Ok(()) | Err(AppendError::Conflict) => {}
            Err(error) => tracing::warn!(%execution, %error, "a lost end was not appended again"),
        }
    });
    if tokio::time::timeout(KEPT, all).await.is_err() {
        tracing::warn!("the broker did not answer in time for the lost ends");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::{Event, ExecutionState, Submission, Tenant, Timestamp};

    fn end(body: usize) -> Option<End> {
        let who = "test".to_owned();
        let events = vec![Event::Submitted, Event::Cancelled { who }];
        made(events, &vec![0; body].into())
    }

    fn made(events: Vec<Event>, body: &Bytes) -> Option<End> {
        let spec = Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap();
        let tenant = Tenant::new("lab").unwrap();
        let id = ExecutionId::from_client(&tenant, &"a".parse().unwrap());
        let (spec, now) = (Arc::new(spec), Timestamp::now());
        let tip = Tip {
            seq: 0,
            digest: None,
            state: ExecutionState::unborn(tenant, id, Arc::clone(&spec), None, now).into(),
            seen_in: 0,
        };
        let draft = Draft::new(&tip, events, "test", now).unwrap();
        End::new(&Ground::of(tip, spec), &draft, body, &[])
    }

    fn keep(ends: &Ends, end: End) {
        let tip = Draft::read(&end.header, 0).unwrap().into_tip(1, 1);
        assert_eq!(tip.digest, Some(end.digest));
        ends.keep(&Arc::new(end), &tip);
    }

    #[test]
    fn ends_are_bounded_in_number_bytes_and_age() {
        let ends = Ends::default();
        (0..2 * MOST).for_each(|_| keep(&ends, end(0).unwrap()));
        assert_eq!(ends.lately().len(), MOST);
        assert!(end(BYTES).is_none());
        (0..20).for_each(|_| keep(&ends, end(BYTES - 4_096).unwrap()));
        assert_eq!(ends.lately().len(), ALL_BYTES / BYTES);
        let mut kept = ends.0.lock().unwrap();
        kept.forget(Instant::now() + 2 * KEPT);
        assert_eq!((kept.ends.len(), kept.bytes), (0, 0));
    }

    #[test]
    fn a_message_is_kept_as_a_copy_and_only_if_the_execution_has_ended() {
        let frame = Bytes::from(vec![0; 1 << 20]);
        let who = "test".to_owned();
        let events = vec![Event::Submitted, Event::Cancelled { who }];
        let end = made(events, &frame.slice(..10)).unwrap();
        assert!(frame.is_unique(), "the whole frame is kept");
        assert_eq!(end.body.len(), 10);
        assert!(made(vec![Event::Submitted], &frame.slice(..10)).is_none());
    }

    #[test]
    fn an_end_that_was_stored_as_another_message_is_not_kept() {
        let (ends, end) = (Ends::default(), end(0).unwrap());
        let mut tip = Draft::read(&end.header, 0).unwrap().into_tip(1, 1);
        tip.digest = Some(Digest::of(b"another"));
        ends.keep(&Arc::new(end), &tip);
        assert!(ends.lately().is_empty());
    }
}
