//! Finds the members of groups for which executions wait: those of a batch, of an array, or with a
//! common beginning of their ids. The ledgers of a tenant are read for that, because members that
//! have ended are known to nobody else.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::Duration;

use async_nats::jetstream::stream::RawMessageErrorKind;
use fiec_broker::last_messages::{LastMessages, Next};
use fiec_policy::{Fate, FoundMembers, Seen, SoughtGroup};
use fiec_schemas::dependency::Group;
use fiec_schemas::{ExecutionState, Glance, LedgerMessage, Sequence, Tenant, Timestamp, subjects};
use tokio::time::Instant;

use crate::effects::Effects;
use crate::events::Outcome;
use crate::intake::stamp;
use crate::refusal::Refusal;

/// Time limit for reading the ledgers of a tenant.
const READ: Duration = Duration::from_secs(60);
/// Time limit for submissions that are queued to become ledgers, and the interval of the checks.
const QUEUED: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);
/// Most queued messages that one check looks at.
const LOOKED_AT: usize = 64;

impl Effects {
    /// Finds the members of groups, as their ledgers show them.
    pub async fn find_members(self, tenant: Tenant, sought: Vec<SoughtGroup>) {
        let found = self.members(&tenant, &sought).await;
        let found = found.unwrap_or_else(|error| {
            tracing::warn!(%tenant, %error, "the members of groups cannot be read");
            Vec::new()
        });
        self.tell(Outcome::Members(tenant, found)).await;
    }

    async fn members(
        &self,
        tenant: &Tenant,
        sought: &[SoughtGroup],
    ) -> Result<Vec<FoundMembers>, Refusal> {
        let last = sought.iter().map(|sought| sought.up_to).max();
        let deadline = Instant::now() + QUEUED;
        while let Some(last) = last
            && self.has_queued(tenant, last).await?
        {
            if Instant::now() >= deadline {
                let why = "submissions before it are still queued";
                return Err(Refusal::broker("read the members of a group", why));
            }
            tokio::time::sleep(LOOK).await;
        }
        let mut found = vec![BTreeMap::new(); sought.len()];
        let groups: Vec<_> = sought.iter().map(|sought| &sought.group).collect();
        self.each_member(tenant, &groups, |nth, state, seq| {
            let is_before = |sought: &SoughtGroup| state.submitted_at <= sought.up_to;
            let seen = Fate::of(state.phase.kind()).map_or(Seen::Lives, Seen::Ended);
            if sought.get(nth).is_some_and(is_before)
                && let Some(members) = found.get_mut(nth)
            {
                // A copy that lags behind may have been read first.
                let known = members.entry(state.execution).or_insert((seq, seen));
                if known.0 <= seq {
                    *known = (seq, seen);
                }
            }
            ControlFlow::Continue(())
        })
        .await?;
        let found = sought.iter().cloned().zip(found);
        Ok(found
            .map(|(sought, members)| FoundMembers {
                sought,
                members: members.into_iter().map(|(id, (_, s))| (id, s)).collect(),
            })
            .collect())
    }

    /// Removes the groups of which a ledger shows a member.
    pub async fn drop_with_members(
        &self,
        tenant: &Tenant,
        groups: &mut BTreeSet<Group>,
    ) -> Result<(), Refusal> {
        let all = groups.clone();
        let all: Vec<_> = all.iter().collect();
        self.each_member(tenant, &all, |nth, _, _| {
            all.get(nth).map(|group| groups.remove(*group));
            match groups.is_empty() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })
        .await
    }

    /// Gives each message of a ledger whose execution belongs to a group, with the group's place in
    /// the list, until `take` breaks off. A ledger's message may be followed by a later one.
    async fn each_member(
        &self,
        tenant: &Tenant,
        groups: &[&Group],
        mut take: impl FnMut(usize, &ExecutionState, Sequence) -> ControlFlow<()>,
    ) -> Result<(), Refusal> {
        // Limits the number of readers, however many groups are asked for.
        let _permit = self.scanning.acquire().await;
        let deadline = Instant::now() + READ;
        let Some(mut unread) = LastMessages::of(&self.broker, tenant).await? else {
            return Ok(());
        };
        loop {
            let (seq, header) = match unread.next(deadline).await? {
                Next::Message { seq, header } => (seq, header),
                Next::Over => return Ok(()),
                Next::NotYet => {
                    let late = format!("the ledgers of {tenant} were not read within {READ:?}");
                    return Err(Refusal::broker("read the members of a group", late));
                }
            };
            let Ok(glance) = Glance::read(&header) else {
                tracing::warn!(seq, "a ledger message was passed over");
                continue;
            };
            let (id, batch) = (glance.client_id(), glance.batch().map(|place| place.id));
            let is_of = |group: &&Group| group.has(id, batch);
            if !groups.iter().any(is_of) {
                continue;
            }
            let message = match LedgerMessage::decode(&header, seq) {
                Ok(message) => message,
                Err(error) => {
                    tracing::warn!(seq, %error, "a ledger message was passed over");
                    continue;
                }
            };
            for (nth, _) in groups.iter().enumerate().filter(|(_, group)| is_of(group)) {
                if take(nth, &message.state, seq).is_break() {
                    return Ok(());
                }
            }
        }
    }

    /// True if a submission up to this moment has not become ledgers yet.
    async fn has_queued(&self, tenant: &Tenant, up_to: Timestamp) -> Result<bool, Refusal> {
        let failed = |error: &dyn std::fmt::Display| {
            Refusal::broker("read the submissions that wait to be taken in", error)
        };
        let js = &self.broker.js;
        let stream = js.get_stream_no_info(subjects::SUBMIT_STREAM).await;
        let stream = stream.map_err(|error| failed(&error))?;
        let (subject, mut from) = (subjects::submit(tenant), 1);
        for _ in 0..LOOKED_AT {
            let message = stream.get_first_raw_message_by_subject(&subject, from);
            let message = match message.await {
                Ok(message) => message,
                Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => {
                    return Ok(false);
                }
                Err(error) => return Err(failed(&error)),
            };
            let stored_ns = message.time.unix_timestamp_nanos();
            if stamp(Some(&message.headers), stored_ns) <= up_to {
                return Ok(true);
            }
            from = message.sequence + 1;
        }
        // Stamps hardly differ from the order of storing.
        Ok(false)
    }
}
