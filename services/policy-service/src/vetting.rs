//! Messages whose lines must be looked at together before one of them is placed: those whose lines
//! wait for each other or for others, and those that are taken as a whole or not at all.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::Entry;
use fiec_schemas::submission::{LINES_LIMIT, lines};
use fiec_schemas::{ExecutionId, FieldError, Sequence, Submission, Tenant, Timestamp, package};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::core::taken;
use crate::dependencies::{Lines, Node};
use crate::effects::Effects;
use crate::intake::name;

/// Ledgers looked up at once.
const LOOK_UPS: usize = 64;
/// What was submitted a moment ago, perhaps through another service, may have its ledger so much
/// later.
const PATIENCE: Duration = Duration::from_secs(2);

/// The lines that are refused, each with its reason.
pub type Verdict = BTreeMap<u32, FieldError>;

/// A line of a message.
pub struct Vetted {
    /// Its number.
    pub line: u32,
    /// What it stands for.
    pub specs: Vec<Submission>,
    /// It stands for the elements of an array.
    pub array: bool,
}

/// Reads the lines of a message; what cannot be read is refused.
pub fn read(body: &[u8]) -> (Vec<Vetted>, Verdict) {
    let (mut good, mut bad) = (Vec::new(), Verdict::new());
    let mut made = 0;
    for (line, text) in lines(body) {
        let mut array = false;
        let read = Submission::parse(text).and_then(|spec| {
            array = spec.array.is_some();
            made += spec.count();
            check_count(&spec, made)?;
            spec.expand()
        });
        match read {
            Ok(specs) => good.push(Vetted { line, specs, array }),
            Err(error) => drop(bad.insert(line, error)),
        }
    }
    (good, bad)
}

/// Whether a line's array may be taken in, after which a message would have become so many.
///
/// # Errors
/// The rule that it breaks.
pub fn check_count(spec: &Submission, made: usize) -> Result<(), FieldError> {
    if spec.array.is_some() && made > LINES_LIMIT {
        let rule = format!(
            "a message becomes at most {LINES_LIMIT} executions; send this line in another one"
        );
        return Err(FieldError::new("array.count", rule));
    }
    Ok(())
}

/// Refuses the others with the refused ones.
pub fn all_or_nothing(all: impl IntoIterator<Item = u32>, bad: &mut Verdict) {
    let Some((line, first)) = bad.first_key_value() else {
        return;
    };
    let words = format!("nothing of the message is taken, because of line {line}: {first}");
    for line in all {
        let refused = || FieldError::new("", words.clone());
        bad.entry(line).or_insert_with(refused);
    }
}

impl Effects {
    /// Looks at a message of the stream as a whole.
    pub async fn vet(
        &self,
        tenant: &Tenant,
        (stamp, seq): (Timestamp, Sequence),
        body: Bytes,
        atomic: bool,
        again: bool,
    ) -> Result<Verdict, String> {
        let (good, mut bad) = read(&body);
        // What it is a part of was taken before: the rest follows.
        if again && atomic && self.is_begun(tenant, (stamp, seq), &good).await? {
            return Ok(Verdict::new());
        }
        self.vet_lines(tenant, &good, &mut bad, atomic).await?;
        if atomic {
            all_or_nothing(good.iter().map(|vetted| vetted.line), &mut bad);
        }
        Ok(bad)
    }

    /// Adds the lines that cannot be taken: their programs are not registered, they wait for each
    /// other in a circle, for what does not exist, or for a refused line; and, where `ids`, their
    /// ids are those of other submissions.
    pub async fn vet_lines(
        &self,
        tenant: &Tenant,
        good: &[Vetted],
        bad: &mut Verdict,
        ids: bool,
    ) -> Result<(), String> {
        self.vet_programs(good, bad).await?;
        if ids {
            self.vet_ids(tenant, good, bad).await?;
        }
        let nodes: Vec<Node> = good
            .iter()
            .flat_map(|v| v.specs.iter().map(|spec| Node::of(v.line, tenant, spec)))
            .collect();
        if nodes.iter().all(|node| node.after.is_empty()) {
            return Ok(());
        }
        let lines = Lines::new(&nodes);
        for (line, error) in lines.cycles() {
            bad.entry(line).or_insert(error);
        }
        let missing = self.missing(tenant, lines.outside()).await?;
        for (line, error) in lines.unknown(tenant, &missing) {
            bad.entry(line).or_insert(error);
        }
        lines.spread(bad);
        Ok(())
    }

    async fn vet_programs(&self, good: &[Vetted], bad: &mut Verdict) -> Result<(), String> {
        let programs = good.iter().flat_map(|v| &v.specs).map(|spec| &spec.program);
        let doubtful: BTreeSet<_> = programs.filter(|p| !self.programs.has(p)).collect();
        let mut missing = BTreeSet::new();
        for program in doubtful {
            let found = self.programs.look_up(program).await;
            if !found.map_err(|error| error.to_string())? {
                missing.insert(program);
            }
        }
        for vetted in good {
            let missing = vetted.specs.iter().find(|s| missing.contains(&s.program));
            if let Some(spec) = missing {
                let error = package::unregistered(&spec.program);
                bad.entry(vetted.line).or_insert(error);
            }
        }
        Ok(())
    }

    async fn vet_ids(
        &self,
        tenant: &Tenant,
        good: &[Vetted],
        bad: &mut Verdict,
    ) -> Result<(), String> {
        let named: Vec<_> = good
            .iter()
            .flat_map(|v| v.specs.iter().map(move |spec| (v.line, spec)))
            .filter_map(|(line, spec)| {
                let id = ExecutionId::from_client(tenant, spec.id.as_ref()?);
                Some((line, id, spec.digest()))
            })
            .collect();
        let there = self
            .last_of(tenant, named.iter().map(|(_, id, _)| *id))
            .await?;
        let mut digests: HashMap<_, _> = there
            .into_iter()
            .map(|(id, entry)| (id, entry.message.state.submission))
            .collect();
        for (line, id, digest) in named {
            let known = *digests.entry(id).or_insert(digest);
            if known != digest {
                let error = FieldError::new("id", taken(id, &known.short()));
                bad.entry(line).or_insert(error);
            }
        }
        Ok(())
    }

    /// True where one of them was taken in from this very message.
    async fn is_begun(
        &self,
        tenant: &Tenant,
        (stamp, seq): (Timestamp, Sequence),
        good: &[Vetted],
    ) -> Result<bool, String> {
        let mut named = HashMap::new();
        for vetted in good {
            for (index, spec) in (0..).zip(&vetted.specs) {
                let index = vetted.array.then_some(index);
                let place = (seq, vetted.line, index);
                let (id, _) = name(tenant, stamp, place, None, spec);
                named.insert(id, spec.digest());
            }
        }
        let there = self.last_of(tenant, named.keys().copied()).await?;
        Ok(there.into_iter().any(|(id, entry)| {
            let state = entry.message.state;
            state.submitted_at == stamp && named.get(&id) == Some(&state.submission)
        }))
    }

    /// The last messages of those of these ledgers that there are.
    pub async fn last_of(
        &self,
        tenant: &Tenant,
        ids: impl IntoIterator<Item = ExecutionId>,
    ) -> Result<Vec<(ExecutionId, Entry)>, String> {
        let ids: Vec<_> = ids.into_iter().collect();
        stream::iter(ids)
            .map(|id| async move {
                let last = self.ledger.last(tenant, id).await;
                let last = last.map_err(|error| error.to_string())?;
                Ok::<_, String>(last.map(|entry| (id, entry)))
            })
            .buffer_unordered(LOOK_UPS)
            .try_filter_map(|found| async move { Ok(found) })
            .try_collect()
            .await
    }

    /// Of these, the ones that do not exist, and do not come into being within a moment.
    async fn missing(
        &self,
        tenant: &Tenant,
        mut ids: BTreeSet<ExecutionId>,
    ) -> Result<BTreeSet<ExecutionId>, String> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let mut wait = Duration::from_millis(20);
        loop {
            for (id, _) in self.last_of(tenant, ids.iter().copied()).await? {
                ids.remove(&id);
            }
            if ids.is_empty() || tokio::time::Instant::now() + wait > deadline {
                return Ok(ids);
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_millis(200));
        }
    }
}
