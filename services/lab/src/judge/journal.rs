//! Every ledger message of a cluster as the broker stored it, and the invariants that each ledger
//! keeps whatever happened to the processes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fiec::commands::watch::in_words;
use fiec_broker::feed::{self, Start};
use fiec_broker::{Broker, BrokerError};
use fiec_schemas::{
    Digest, Event, ExecutionId, ExecutionState, LedgerMessage, NodeId, Phase, Sequence, Started,
};
use futures_util::StreamExt as _;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::checker::message::{Message, Stored};

/// A message with its place.
#[derive(Debug, Clone)]
pub struct Line {
    pub seq: Sequence,
    pub digest: Digest,
    pub message: LedgerMessage,
    /// As the checker of histories reads it.
    stored: Stored,
}

impl Line {
    pub fn state(&self) -> &ExecutionState {
        &self.message.state
    }

    pub fn phase(&self) -> &'static str {
        self.message.state.phase.as_str()
    }

    /// The node that it says computes.
    pub fn started_on(&self) -> Option<NodeId> {
        match &self.message.state.phase {
            Phase::Started(Started { binding, .. }) => Some(binding.node.clone()),
            _ => None,
        }
    }
}

/// Longest wait until the journal has read what the stream has.
const PATIENCE: Duration = Duration::from_secs(60);

/// Follows all ledgers from their beginning.
pub struct Journal {
    lines: Arc<Mutex<Vec<Line>>>,
    /// The sequence up to which it has read the stream.
    last: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Journal {
    pub fn open(broker: &Broker) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let last = Arc::new(AtomicU64::new(0));
        let following = follow(broker.clone(), Arc::clone(&lines), Arc::clone(&last));
        let task = tokio::spawn(following);
        Self { lines, last, task }
    }

    /// Everything so far, for the checker of histories, once it has read up to `last`.
    ///
    /// # Errors
    /// When it has not come there within [`PATIENCE`].
    pub async fn messages(&self, last: Sequence) -> Result<Vec<Message>, String> {
        let deadline = Instant::now() + PATIENCE;
        while self.last.load(Ordering::Relaxed) < last {
            if Instant::now() >= deadline {
                return Err(format!("the journal has not read message {last}"));
            }
            sleep(Duration::from_millis(20)).await;
        }
        let read = |line: &Line| Message::read(&line.stored);
        self.lines().iter().map(read).collect()
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Line>> {
        locked(&self.lines)
    }

    /// The first message of one ledger for which `found` answers.
    pub fn first<T>(&self, id: ExecutionId, found: impl Fn(&Line) -> Option<T>) -> Option<T> {
        let lines = self.lines();
        let mut own = lines
            .iter()
            .filter(|line| line.message.state.execution == id);
        own.find_map(found)
    }

    /// Everything so far.
    pub fn all(&self) -> Vec<Line> {
        self.lines().clone()
    }

    /// One ledger so far.
    pub fn of(&self, id: ExecutionId) -> Vec<Line> {
        let lines = self.lines();
        let own = |line: &&Line| line.message.state.execution == id;
        lines.iter().filter(own).cloned().collect()
    }

    /// All ledgers so far.
    pub fn by_execution(&self) -> BTreeMap<ExecutionId, Vec<Line>> {
        let mut out: BTreeMap<ExecutionId, Vec<Line>> = BTreeMap::new();
        for line in self.all() {
            let id = line.message.state.execution;
            out.entry(id).or_default().push(line);
        }
        out
    }

    /// How many executions have ended so.
    pub fn ended_count(&self, phase: &str) -> usize {
        let lines = self.lines();
        lines
            .iter()
            .filter(|line| line.message.state.phase.is_terminal() && line.phase() == phase)
            .count()
    }

    /// The last messages in words.
    pub fn in_words(&self, most: usize) -> String {
        let lines = self.all();
        let mut out = String::new();
        for line in &lines[lines.len().saturating_sub(most)..] {
            for words in in_words(&line.message) {
                let state = line.state();
                out += &format!("{} {} {words}\n", state.at, state.execution);
            }
        }
        out
    }
}

/// The list is whole even if a holder of the lock panicked.
fn locked(lines: &Mutex<Vec<Line>>) -> MutexGuard<'_, Vec<Line>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn follow(broker: Broker, lines: Arc<Mutex<Vec<Line>>>, last: Arc<AtomicU64>) {
    let mut known = HashSet::new();
    let mut connections = broker.connections();
    loop {
        // A broker that was started again may have lost messages and given their sequences out
        // again, so all of it is read once more.
        last.store(0, Ordering::Relaxed);
        connections.mark_unchanged();
        let mut reconnected = connections.clone();
        let reconnected = async move { reconnected.changed().await.is_ok() };
        if let Ok(feed) = feed::ledger(&broker, Start::At(1)).await {
            let mut feed = feed.take_until(Box::pin(reconnected));
            while let Some(item) = feed.next().await {
                let item = match item {
                    Ok(item) => item,
                    // What tests put there is no ledger.
                    Err(BrokerError::Foreign { seq, .. }) => {
                        last.store(seq, Ordering::Relaxed);
                        continue;
                    }
                    Err(_) => break,
                };
                let (seq, digest) = (item.seq, item.digest());
                if let Ok(message) = item.message()
                    && known.insert(digest)
                {
                    locked(&lines).push(Line {
                        seq,
                        digest,
                        message,
                        stored: Stored::from(item),
                    });
                }
                last.store(seq, Ordering::Relaxed);
            }
        }
        sleep(Duration::from_millis(100)).await;
    }
}

/// Compares each state with the product's own fold of the one before: also the fields that the
/// checker of histories does not read.
pub fn compare_with_fold(lines: &[Line]) -> Vec<String> {
    let known: HashMap<Digest, &Line> = lines.iter().map(|line| (line.digest, line)).collect();
    let healed = |event: &Event| matches!(event, Event::Healed { .. });
    let mut wrong = Vec::new();
    for line in lines
        .iter()
        .filter(|l| !l.message.events.iter().any(healed))
    {
        let compared = match line.state().prev {
            None => compare_first(line),
            Some(prev) => match known.get(&prev) {
                Some(before) => compare_next(before, line),
                None => Ok(()),
            },
        };
        if let Err(why) = compared {
            let (seq, id) = (line.seq, line.state().execution);
            wrong.push(format!("{id} message {seq}: {why}"));
        }
    }
    wrong
}

/// A ledger's first message is the fold of nothing. If a worker wrote it, it says which policy
/// service made the binding.
fn compare_first(line: &Line) -> Result<(), String> {
    let (state, events) = (line.state(), &line.message.events);
    let made = events.iter().find_map(|event| match event {
        Event::Bound { decision, .. } => Some(decision.as_ref()?.entrusted.as_ref()),
        _ => None,
    });
    if let Some(entrusted) = made {
        let by = entrusted.map(|e| &e.by).unwrap_or(&state.author);
        if !by.starts_with("policy/") || entrusted.is_some() != state.author.starts_with("worker/")
        {
            return Err(format!("bound by {by}, written by {}", state.author));
        }
    }
    // A part is born with a share of its holder's range; a large submission lies elsewhere.
    let own = state.spread.as_ref().is_none_or(|s| s.part_of.is_none());
    let Some(spec) = state.spec.clone().filter(|_| own) else {
        return Ok(());
    };
    let (tenant, id) = (state.tenant.clone(), state.execution);
    let unborn = ExecutionState::unborn(tenant, id, spec, state.batch, state.submitted_at);
    let folded = unborn.after(events, &state.author, state.at, None);
    let folded = folded.map_err(|error| format!("{error}: {events:?}"))?;
    same(folded, line)
}

fn compare_next(before: &Line, line: &Line) -> Result<(), String> {
    let (from, to) = (before.state(), line.state());
    let folded = from.after(&line.message.events, &to.author, to.at, Some(before.digest));
    let mut folded = folded.map_err(|error| format!("{error}: {:?}", line.message.events))?;
    let is_carried = folded.boundary_index() == from.boundary_index()
        && to
            .boundary
            .as_ref()
            .is_some_and(|place| place.ordinal == to.ordinal);
    if is_carried {
        folded.carry_state_again();
    }
    same(folded, line)
}

fn same(mut folded: ExecutionState, line: &Line) -> Result<(), String> {
    folded.resolve(line.seq);
    if folded == *line.state() {
        return Ok(());
    }
    Err(format!("says {:?}; the fold is {folded:?}", line.state()))
}
