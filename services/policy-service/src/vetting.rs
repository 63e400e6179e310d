//! Checks messages whose lines must be checked together before one of them is placed. These are
//! messages with dependencies or arrays, and atomic messages.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use async_nats::jetstream::stream::RawMessageErrorKind;
use bytes::Bytes;
use fiec_broker::Entry;
use fiec_schemas::dependency::Target;
use fiec_schemas::messages::RecordedRequest;
use fiec_schemas::{
    Digest, ExecutionId, FieldError, Glance, PhaseKind, Sequence, Tenant, Timestamp, subjects,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::allowance::Allowance;
use crate::core::taken;
use crate::dependencies::{Lines, Node};
use crate::effects::Effects;
use crate::intake::{name, stamp};
use crate::reading::{Lines as Read, Outline, Verdict, Vetted};
use crate::refusal::Refusal;

/// An execution that exists already under the id of a line.
#[derive(Debug, Clone, Copy)]
pub struct There {
    /// Its submission.
    pub submission: Digest,
    /// Its phase, if it has a ledger.
    pub phase: Option<PhaseKind>,
}

impl There {
    /// The one whose ledger has this header.
    fn read(header: &str) -> Result<Option<Self>, Refusal> {
        let glance = Glance::read(header);
        let glance = glance.map_err(|error| Refusal::broker("read a ledger message", &error))?;
        Ok(glance.submission().map(|submission| Self {
            submission,
            phase: Some(glance.phase()),
        }))
    }

    /// One without a ledger.
    pub fn long_ago(submission: Digest) -> Self {
        let phase = None;
        Self { submission, phase }
    }
}

/// Ledgers looked up at the same time.
const LOOK_UPS: usize = 64;
/// More ledgers are looked up together, in any copy of the stream. One that lags behind may not have
/// a ledger: then its line is refused when its first message is appended, not here.
const MANY: usize = 1_000;
/// A dependency that is submitted at this moment may be stored this much later.
const PATIENCE: Duration = Duration::from_secs(2);
/// A message that gets no memory within this time is delivered again.
const ROOM_WITHIN: Duration = Duration::from_secs(30);
/// Time limit for reading the queued submissions of a tenant.
const LOOKING: Duration = Duration::from_secs(2);

/// Result of checking a message as a whole.
#[derive(Debug, Default)]
pub struct Vetting {
    /// The refused lines.
    pub refused: Verdict,
    /// Executions that the other lines add to those that wait.
    pub admitted: usize,
}

/// Refuses every line if one is refused.
pub fn all_or_nothing(all: impl IntoIterator<Item = u32>, bad: &mut Verdict) {
    let Some((&first, error)) = bad.first_key_value() else {
        return;
    };
    let words = format!("the whole message is refused because of line {first}: {error}");
    for line in all {
        let refused = || FieldError::because(first, "", words.clone());
        bad.entry(line).or_insert_with(refused);
    }
}

impl Effects {
    /// Checks a message of the stream as a whole.
    pub async fn vet(
        &self,
        mut allowance: Allowance,
        (stamp, seq): (Timestamp, Sequence),
        body: Bytes,
        atomic: bool,
        again: bool,
    ) -> Result<Vetting, Refusal> {
        let Read { good, bad, .. } = &mut self.reader.read(body, ROOM_WITHIN).await?;
        if again {
            let begun = self.begun(&allowance.tenant, (stamp, seq), good);
            allowance.begun = begun.await?;
        }
        // Lines of this atomic message were taken in before, so the others follow.
        if atomic && !allowance.begun.is_empty() {
            return Ok(Vetting::default());
        }
        let mut admitted = self.vet_lines(&allowance, good, bad, atomic).await?;
        if atomic && !bad.is_empty() {
            all_or_nothing(good.iter().map(|vetted| vetted.line), bad);
            admitted = 0;
        }
        Ok(Vetting {
            refused: std::mem::take(bad),
            admitted,
        })
    }

    /// Adds the lines that must be refused. Their programs are not registered, they form a cycle,
    /// too many executions wait, or they depend on an unknown execution or on a refused line. With
    /// `ids`, also lines whose id belongs to another submission. Returns the executions that the
    /// other lines add.
    pub async fn vet_lines(
        &self,
        allowance: &Allowance,
        good: &[Vetted],
        bad: &mut Verdict,
        ids: bool,
    ) -> Result<usize, Refusal> {
        let tenant = &allowance.tenant;
        self.vet_programs(good, bad).await?;
        if ids {
            self.vet_ids(tenant, good, bad).await?;
        }
        let nodes_of = |v| {
            let Vetted {
                line,
                batch,
                elements,
                ..
            }: &Vetted = v;
            let node = |element| Node::of(*line, batch.as_ref(), element);
            elements.iter().map(node)
        };
        let nodes: Vec<Node<'_>> = good.iter().flat_map(nodes_of).collect();
        if nodes.iter().all(|node| node.after.is_empty()) {
            return self.vet_waiting(allowance, good, bad).await;
        }
        let lines = Lines::new(&nodes, tenant);
        for (line, error) in lines.cycles() {
            bad.entry(line).or_insert(error);
        }
        let missing = self.missing(tenant, lines.outside()).await?;
        for (line, error) in lines.unknown(&missing) {
            bad.entry(line).or_insert(error);
        }
        let admitted = self.vet_waiting(allowance, good, bad).await?;
        lines.spread(bad);
        Ok(admitted)
    }

    /// Refuses the lines with which too many executions would wait. Executions that exist already
    /// add nothing; they are only looked up if that matters.
    async fn vet_waiting(
        &self,
        allowance: &Allowance,
        good: &[Vetted],
        bad: &mut Verdict,
    ) -> Result<usize, Refusal> {
        let good = good.iter().filter(|v| !bad.contains_key(&v.line));
        let good: Vec<_> = good.collect();
        let all: usize = good.iter().map(|v| v.elements.len()).sum();
        if all <= allowance.left() {
            return Ok(all);
        }
        let tenant = &allowance.tenant;
        let id = |element: &Outline| Some(ExecutionId::from_client(tenant, element.id.as_ref()?));
        let ids = good.iter().flat_map(|v| v.elements.iter().filter_map(id));
        let there = self.submissions_of(tenant, ids).await?;
        let is_new = |element: &&Outline| id(element).is_none_or(|id| !there.contains_key(&id));
        let lines = good
            .iter()
            .map(|v| (v.line, v.elements.iter().filter(is_new).count()));
        Ok(allowance.refuse(&lines.collect::<Vec<_>>(), bad))
    }

    async fn vet_programs(&self, good: &[Vetted], bad: &mut Verdict) -> Result<(), Refusal> {
        let programs = good.iter().map(|vetted| &vetted.program);
        let doubtful: BTreeSet<_> = programs.filter(|p| !self.programs.has(p)).collect();
        let mut wrong = BTreeMap::new();
        for program in doubtful {
            let found = self.programs.look_up(program).await;
            wrong.extend(found?.map(|error| (program, error)));
        }
        for vetted in good {
            if let Some(error) = wrong.get(&vetted.program) {
                bad.entry(vetted.line).or_insert_with(|| error.clone());
            }
        }
        Ok(())
    }

    async fn vet_ids(
        &self,
        tenant: &Tenant,
        good: &[Vetted],
        bad: &mut Verdict,
    ) -> Result<(), Refusal> {
        let named: Vec<_> = good
            .iter()
            .flat_map(|v| v.elements.iter().map(move |e| (v.line, e)))
            .filter_map(|(line, element)| {
                let id = ExecutionId::from_client(tenant, element.id.as_ref()?);
                Some((line, id, element.digest))
            })
            .collect();
        let ids = named.iter().map(|(_, id, _)| *id);
        let there = self.submissions_of(tenant, ids).await?;
        let mut digests = HashMap::new();
        for (line, id, digest) in named {
            let known = there.get(&id).map(|there| there.submission);
            let known = *digests.entry(id).or_insert(known.unwrap_or(digest));
            if known != digest {
                let error = FieldError::new("id", taken(id, &known.short()));
                bad.entry(line).or_insert(error);
            }
        }
        Ok(())
    }

    /// The lines of which an execution was taken in from this very message.
    async fn begun(
        &self,
        tenant: &Tenant,
        (stamp, seq): (Timestamp, Sequence),
        good: &[Vetted],
    ) -> Result<BTreeSet<u32>, Refusal> {
        let named = named(tenant, (stamp, seq), good);
        let named: HashMap<_, _> = named.collect();
        let there = self.last_of(tenant, named.keys().copied()).await?;
        let begun = there.into_iter().filter_map(|(id, entry)| {
            let state = entry.message.state;
            let (line, digest) = named.get(&id)?;
            (state.submitted_at == stamp && *digest == state.submission).then_some(*line)
        });
        Ok(begun.collect())
    }

    /// The submissions of those executions that exist, or have ended long ago.
    pub async fn submissions_of(
        &self,
        tenant: &Tenant,
        ids: impl IntoIterator<Item = ExecutionId>,
    ) -> Result<HashMap<ExecutionId, There>, Refusal> {
        let ids: Vec<_> = ids.into_iter().collect();
        let mut there = HashMap::new();
        if ids.len() > MANY {
            for (id, header) in self.ledger.last_of_many(tenant, &ids).await? {
                there.extend(There::read(&header)?.map(|found| (id, found)));
            }
        } else {
            let last = self.last_of(tenant, ids.iter().copied()).await?;
            let found = |entry: &Entry| There {
                submission: entry.message.state.submission,
                phase: Some(entry.message.state.phase.kind()),
            };
            there.extend(last.iter().map(|(id, entry)| (*id, found(entry))));
        }
        if self.history.may_know_more() {
            let others: Vec<_> = ids
                .into_iter()
                .filter(|id| !there.contains_key(id))
                .collect();
            let ended = |id| async move { Some((id, self.history.ended(id).await?)) };
            let mut ended = stream::iter(others)
                .map(ended)
                .buffer_unordered(RecordedRequest::MOST);
            while let Some(found) = ended.next().await {
                there.extend(found.map(|(id, submission)| (id, There::long_ago(submission))));
            }
        }
        Ok(there)
    }

    /// The last message of each of these ledgers that exists.
    pub async fn last_of(
        &self,
        tenant: &Tenant,
        ids: impl IntoIterator<Item = ExecutionId>,
    ) -> Result<Vec<(ExecutionId, Entry)>, Refusal> {
        let ids: Vec<_> = ids.into_iter().collect();
        stream::iter(ids)
            .map(|id| async move {
                let last = self.ledger.last(tenant, id).await;
                let last = last?;
                Ok::<_, Refusal>(last.map(|entry| (id, entry)))
            })
            .buffer_unordered(LOOK_UPS)
            .try_filter_map(|found| async move { Ok(found) })
            .try_collect()
            .await
    }

    /// Returns what does not exist: executions that do not appear within [`PATIENCE`], and groups
    /// without a member. A queued submission counts as existing, even if the policy services are far
    /// behind.
    async fn missing(
        &self,
        tenant: &Tenant,
        mut wanted: BTreeSet<Target>,
    ) -> Result<BTreeSet<Target>, Refusal> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let mut wait = Duration::from_millis(20);
        self.drop_existing(tenant, &mut wanted).await?;
        if !wanted.is_empty() {
            self.drop_queued(tenant, &mut wanted).await?;
            // A submission leaves the queue after its ledger has begun, so ledgers are read last.
            self.drop_groups(tenant, &mut wanted).await?;
        }
        let is_one = |target: &Target| matches!(target, Target::One(_));
        loop {
            self.drop_existing(tenant, &mut wanted).await?;
            if !wanted.iter().any(is_one) {
                return Ok(wanted);
            }
            if tokio::time::Instant::now() + wait > deadline {
                break;
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_millis(200));
        }
        self.drop_queued(tenant, &mut wanted).await?;
        self.drop_existing(tenant, &mut wanted).await?;
        Ok(wanted)
    }

    async fn drop_existing(
        &self,
        tenant: &Tenant,
        wanted: &mut BTreeSet<Target>,
    ) -> Result<(), Refusal> {
        let ids = wanted.iter().filter_map(|target| match target {
            Target::One(id) => Some(*id),
            Target::All(_) => None,
        });
        for (id, _) in self.last_of(tenant, ids).await? {
            wanted.remove(&Target::One(id));
        }
        Ok(())
    }

    async fn drop_groups(
        &self,
        tenant: &Tenant,
        wanted: &mut BTreeSet<Target>,
    ) -> Result<(), Refusal> {
        let groups = wanted.iter().filter_map(|target| match target {
            Target::One(_) => None,
            Target::All(group) => Some(group.clone()),
        });
        let mut groups: BTreeSet<_> = groups.collect();
        if groups.is_empty() {
            return Ok(());
        }
        self.drop_with_members(tenant, &mut groups).await?;
        wanted.retain(|target| match target {
            Target::One(_) => true,
            Target::All(group) => groups.contains(group),
        });
        Ok(())
    }

    /// Removes what queued messages of `FIEC_SUBMIT` will become, and groups of which they have members.
    ///
    /// # Errors
    /// If the queue is too long to be read in time. Then nothing is known about what is left.
    pub async fn drop_queued(
        &self,
        tenant: &Tenant,
        wanted: &mut BTreeSet<Target>,
    ) -> Result<(), Refusal> {
        let mut seen = 0_u64;
        let looking = async {
            // Limits the number of readers of the queue, however many requests come.
            let _permit = self.looking.acquire().await;
            self.look_at_queued(tenant, wanted, &mut seen).await
        };
        match tokio::time::timeout(LOOKING, looking).await {
            Ok(found) => found,
            Err(_) => Err(Refusal::TooManyQueued {
                tenant: tenant.clone(),
                seen,
            }),
        }
    }

    async fn look_at_queued(
        &self,
        tenant: &Tenant,
        wanted: &mut BTreeSet<Target>,
        seen: &mut u64,
    ) -> Result<(), Refusal> {
        let failed = |error: &dyn std::fmt::Display| {
            Refusal::broker("read the submissions that wait to be taken in", error)
        };
        let js = &self.broker.js;
        let stream = js.get_stream_no_info(subjects::SUBMIT_STREAM).await;
        let stream = stream.map_err(|error| failed(&error))?;
        let (subject, mut from) = (subjects::submit(tenant), 1);
        while !wanted.is_empty() {
            let message = match stream
                .get_first_raw_message_by_subject(&subject, from)
                .await
            {
                Ok(message) => message,
                Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => break,
                Err(error) => return Err(failed(&error)),
            };
            let seq = message.sequence;
            let stamp = stamp(Some(&message.headers), message.time.unix_timestamp_nanos());
            let (good, _) = self.reader.read_alone(message.payload).await?;
            for (id, _) in named(tenant, (stamp, seq), &good) {
                wanted.remove(&Target::One(id));
            }
            wanted.retain(|target| match target {
                Target::One(_) => true,
                Target::All(group) => !good.iter().any(|vetted| vetted.is_of(tenant, group)),
            });
            (from, *seen) = (seq + 1, *seen + 1);
        }
        Ok(())
    }
}

/// Ids of the executions that the lines become, with line and digest.
fn named<'a>(
    tenant: &'a Tenant,
    (stamp, seq): (Timestamp, Sequence),
    good: &'a [Vetted],
) -> impl Iterator<Item = (ExecutionId, (u32, Digest))> + 'a {
    good.iter().flat_map(move |vetted| {
        (0..).zip(&vetted.elements).map(move |(index, element)| {
            let place = (seq, vetted.line, vetted.array.then_some(index));
            let client = (element.id.as_ref(), vetted.batch.as_ref());
            let (id, _) = name(tenant, stamp, place, None, client);
            (id, (vetted.line, element.digest))
        })
    })
}
