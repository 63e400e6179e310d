//! A shared range of tiles: parts are split off at a boundary, and merged again in turn.
//!
//! ```text
//! split ─▶ child: split ─▶ boundary + split in one message (or `whole`: there is nothing to give)
//! nothing left, parts are out ─▶ child: boundary `end`, completed ─▶ boundary + yielded{parts}
//! bound again ─▶ the last part's σ from its ledger ─▶ child: run with merge ─▶ boundary + merged
//! a part's end ─▶ boundary + completed in one message: its holder finds σ there
//! ```

use bytes::Bytes;
use fiec_broker::BrokerError;
use fiec_kit::frames::{Merge, Order, Shares};
use fiec_schemas::event::ExecutionState;
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::{PARTS_LIMIT, Part, Spreading, part_id};
use fiec_schemas::subjects::INLINE_STATE_LIMIT;
use fiec_schemas::{Cause, Event, Fault, Phase, Tenant, Timestamp};

use crate::message::Message;
use crate::pending_order::PendingOrder;
use crate::replies::{NotTaken, Reply};
use crate::runner::Runner;
use crate::shared::Shared;

/// How an execution's range is shared.
#[derive(Debug)]
pub(crate) struct Sharing {
    /// The sharing once all staged messages are stored.
    now: Spreading,
    /// The child was ordered to split and has not answered.
    splitting: bool,
    /// The part that the child was given to merge.
    merging: Option<Part>,
    /// The last boundary of the range. It leaves together with the message that follows it.
    end: Option<Box<Message>>,
}

/// The start of a run that waited for its parts.
pub(crate) enum Returning {
    /// The last part has ended: merge it.
    Part(Merge, Bytes),
    /// The part has not ended: the run goes back to wait.
    NotYet,
    /// The part never will end in a usable way: because of this fault, for this reason.
    Never(Fault, String),
}

/// The range as a child receives it.
pub(crate) fn shares(now: &Spreading) -> Shares {
    let out = now.parts.len() - usize::from(now.waits && !now.parts.is_empty());
    Shares {
        part: now.part_of.is_some(),
        parts: u32::try_from(out).unwrap_or(u32::MAX),
    }
}

impl Sharing {
    /// The sharing that an execution's state says.
    pub(crate) fn of(state: &ExecutionState) -> Option<Box<Self>> {
        let now = state.spread.as_deref()?.clone();
        Some(Box::new(Self {
            now,
            splitting: false,
            merging: None,
            end: None,
        }))
    }

    /// The part to merge before anything else, if the execution waited for one.
    pub(crate) fn waits_for(&self) -> Option<Part> {
        self.now.last().copied().filter(|_| self.now.waits)
    }

    /// Notes that a child starts from the last commit.
    pub(crate) fn begin(&mut self, merge: bool) -> Shares {
        self.merging = self.now.last().copied().filter(|_| merge);
        shares(&self.now)
    }
}

impl Runner {
    /// Orders a split at the next boundary, or answers why it is impossible.
    pub(crate) async fn split(&mut self, reply: Reply) {
        let taken = self.may_split();
        if taken.is_ok()
            && let Some(sharing) = &mut self.spread
        {
            sharing.splitting = true;
            self.order(Order::Split).await;
        }
        let shared = self.shared.clone();
        shared.answer(reply, taken).await;
    }

    fn may_split(&self) -> Result<(), NotTaken> {
        let sharing = self.spread.as_ref();
        let sharing = sharing.ok_or(NotTaken::NotShared)?;
        if self.ended || self.pending.is_some() || self.cancelling.is_some() {
            return Err(NotTaken::Leaving);
        }
        if self.parked.is_some() {
            return Err(NotTaken::Parked);
        }
        if self.child.is_none() {
            return Err(NotTaken::BetweenAttempts);
        }
        let place = self.tip.state.boundary.as_ref();
        if place.is_some_and(|place| place.bytes > INLINE_STATE_LIMIT as u64) {
            return Err(NotTaken::LargeState);
        }
        if sharing.splitting {
            return Err(NotTaken::Splitting);
        }
        if sharing.now.parts.len() >= PARTS_LIMIT {
            return Err(NotTaken::ManyParts);
        }
        Ok(())
    }

    /// The child had nothing to give away.
    pub(crate) fn stays_whole(&mut self) {
        tracing::info!("the range was not split: the program has no tiles to give away");
        if let Some(sharing) = &mut self.spread {
            sharing.splitting = false;
        }
    }

    /// Adds the range that was given away or merged at a boundary to its message.
    ///
    /// # Errors
    /// The reason why the program cannot continue.
    pub(crate) fn share(
        &mut self,
        message: &mut Message,
        split: Option<TileRange>,
        merged: bool,
    ) -> Result<(), String> {
        let execution = self.tip.state.execution;
        let Some(sharing) = &mut self.spread else {
            return Ok(());
        };
        if let Some(part) = sharing.merging.take() {
            if !merged {
                return Err(no_merge(&part));
            }
            sharing.now.parts.retain(|p| p.id != part.id);
            sharing.now.waits = false;
            sharing.now.end = Some(part.to);
            tracing::info!(part = %part.id, "took a part back");
            message.events.push(Event::Merged { part: part.id });
        }
        if let Some(range) = split {
            sharing.splitting = false;
            let TileRange { from, to } = range;
            if from >= to || sharing.now.end.is_some_and(|end| end != to) {
                return Err(format!(
                    "the program gave tiles {from} to {to} away, which are not the end of its range"
                ));
            }
            let nth = sharing.now.splits;
            let id = part_id(execution, nth, range);
            sharing.now.splits += 1;
            sharing.now.end = Some(from);
            sharing.now.parts.push(Part { id, from, to });
            tracing::info!(part = %id, from, to, "split a part off");
            message.events.push(Event::Split {
                part: id,
                nth,
                from,
                to,
            });
        }
        Ok(())
    }

    /// Keeps the last boundary of the range for the message that follows it.
    pub(crate) fn keep_end(&mut self, message: Message) {
        if let Some(sharing) = &mut self.spread {
            sharing.end = Some(Box::new(message));
        }
    }

    /// Builds the message for a completed program. If parts are out, the execution waits for them,
    /// or obeys an order that came meanwhile. A part leaves its σ.
    ///
    /// # Errors
    /// The reason why that is impossible.
    pub(crate) fn at_its_end(
        &mut self,
        message: Message,
        computed_until: Timestamp,
    ) -> Result<Message, String> {
        let Some(sharing) = &self.spread else {
            return Ok(message);
        };
        if let Some(part) = &sharing.merging {
            return Err(no_merge(part));
        }
        let (parts, part_of) = (sharing.now.parts.len(), sharing.now.part_of);
        let Some(mut end) = self.spread.as_mut().and_then(|s| s.end.take()) else {
            if parts == 0 && part_of.is_none() {
                return Ok(message);
            }
            return Err(
                "the program completed without its last σ, from which other executions would \
                 continue: it cannot share its range; submit it without `spread`"
                    .to_owned(),
            );
        };
        if parts > 0 {
            tracing::info!(parts, "the range is done; waiting for its parts");
            end.events.extend(self.until_its_parts(computed_until));
        } else {
            end.events.extend(message.events);
            end.outputs.extend(message.outputs);
        }
        Ok(*end)
    }

    /// Builds the events with which an execution waits for its parts. A cancel that was due at the
    /// next boundary ends it instead. A pause stays in force while it waits.
    fn until_its_parts(&mut self, computed_until: Timestamp) -> Vec<Event> {
        if let Some(who) = self.cancelling.take() {
            return vec![Event::Cancelled { who }];
        }
        let mut events = vec![Event::Yielded {
            cause: Cause::Parts,
            computed_until,
        }];
        if let Some(PendingOrder::Pause { who }) = self.pending.take() {
            events.push(Event::Paused { who });
        }
        events
    }

    /// Goes back to wait for its parts.
    pub(crate) async fn waits_on(&mut self) {
        let events = self.until_its_parts(self.shared.broker.now());
        self.stage(Message::of(events)).await;
        self.ended = true;
        self.slot = None;
        self.wait = None;
    }
}

/// Decides how a run starts that waited for this part.
///
/// # Errors
/// When the broker does not answer.
pub(crate) async fn returning(
    shared: &Shared,
    tenant: &Tenant,
    part: &Part,
) -> Result<Returning, BrokerError> {
    let Some(entry) = shared.ledger.last(tenant, part.id).await? else {
        return Ok(Returning::NotYet);
    };
    let state = entry.message.state;
    let Part { id, from, to } = part;
    let never = |fault, why: String| {
        Returning::Never(
            fault,
            format!("its part {id} with tiles {from} to {to} {why}"),
        )
    };
    Ok(match (&state.phase, &state.boundary) {
        (Phase::Completed, None) => never(Fault::DataLost, "completed without its σ".to_owned()),
        (Phase::Completed | Phase::Returned, Some(place)) => {
            if place.bytes > INLINE_STATE_LIMIT as u64 {
                tracing::warn!(
                    part = %id, from, to, bytes = place.bytes, most = INLINE_STATE_LIMIT,
                    "a part ended with a σ too large to be taken back; its tiles are computed here"
                );
                return Ok(Returning::Part(merge(part, None), Bytes::new()));
            }
            let sigma = shared.ledger.state(part.id, place).await?;
            Returning::Part(merge(part, Some(place.bytes)), sigma)
        }
        (Phase::Returned, None) => Returning::Part(merge(part, None), Bytes::new()),
        (phase @ (Phase::Failed | Phase::Cancelled), _) => {
            let why = format!("was not done: it is {}", phase.as_str());
            never(Fault::Part { id: *id }, why)
        }
        _ => Returning::NotYet,
    })
}

fn merge(part: &Part, bytes: Option<u64>) -> Merge {
    Merge {
        from: part.from,
        to: part.to,
        bytes,
    }
}

fn no_merge(part: &Part) -> String {
    format!(
        "the program did not take back part {} with tiles {} to {}: it cannot share its range; \
         submit it without `spread`",
        part.id, part.from, part.to
    )
}
