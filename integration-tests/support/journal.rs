//! Every ledger message of a cluster as the broker stored it, and the invariants that each ledger
//! keeps whatever happened to the processes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fiec::commands::watch::in_words;
use fiec_broker::feed::{self, Start};
use fiec_broker::{Broker, BrokerError};
use fiec_schemas::scheduling::Rule;
use fiec_schemas::{
    Cause, Digest, Event, ExecutionId, ExecutionState, LedgerMessage, NodeId, Phase, Sequence,
};
use futures_util::StreamExt as _;
use tokio::task::JoinHandle;

use super::until;

/// A message with its place.
#[derive(Debug, Clone)]
pub struct Line {
    pub seq: Sequence,
    pub digest: Digest,
    pub message: LedgerMessage,
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
            Phase::Started(binding) => Some(binding.node.clone()),
            _ => None,
        }
    }
}

/// By which rule, to whom and why in words an execution gives its place up with this message.
pub fn gives_way(line: &Line) -> Option<(Rule, Option<ExecutionId>, String)> {
    line.message.events.iter().find_map(|event| match event {
        Event::Yielded {
            cause: Cause::Preempted { rule, by, reason },
            ..
        } => Some((*rule, *by, reason.clone())),
        _ => None,
    })
}

/// Follows all ledgers from their beginning.
pub struct Journal {
    lines: Arc<Mutex<Vec<Line>>>,
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
        let task = tokio::spawn(follow(broker.clone(), Arc::clone(&lines)));
        Self { lines, task }
    }

    /// Everything so far.
    pub fn all(&self) -> Vec<Line> {
        self.lines.lock().unwrap().clone()
    }

    /// One ledger so far.
    pub fn of(&self, id: ExecutionId) -> Vec<Line> {
        let lines = self.lines.lock().unwrap();
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
        let lines = self.lines.lock().unwrap();
        lines
            .iter()
            .filter(|line| line.message.state.phase.is_terminal() && line.phase() == phase)
            .count()
    }

    /// Waits for a message of one ledger for which `found` answers.
    pub async fn find<T>(
        &self,
        id: ExecutionId,
        what: &str,
        found: impl Fn(&Line) -> Option<T>,
    ) -> T {
        until(what, async || {
            let lines = self.lines.lock().unwrap();
            lines
                .iter()
                .filter(|line| line.message.state.execution == id)
                .find_map(&found)
        })
        .await
    }

    /// Waits until an execution computes and has committed so often; gives its node.
    pub async fn computing(&self, id: ExecutionId, commits: u64) -> NodeId {
        let what = format!("{id} computes with {commits} commits");
        self.find(id, &what, |line| {
            line.started_on()
                .filter(|_| line.message.state.totals.commits >= commits)
        })
        .await
    }

    /// Waits until an execution has ended so; gives its last message.
    pub async fn ended(&self, id: ExecutionId, phase: &str) -> Line {
        let last = self
            .find(id, &format!("{id} has ended ({phase})"), |line| {
                line.message.state.phase.is_terminal().then(|| line.clone())
            })
            .await;
        assert_eq!(last.phase(), phase, "{:?}", last.message.events);
        last
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

async fn follow(broker: Broker, lines: Arc<Mutex<Vec<Line>>>) {
    let mut last = 0;
    loop {
        if let Ok(mut feed) = feed::ledger(&broker, Start::At(last + 1)).await {
            while let Some(item) = feed.next().await {
                let item = match item {
                    Ok(item) => item,
                    // What tests put there is no ledger.
                    Err(BrokerError::Foreign { .. }) => continue,
                    Err(_) => break,
                };
                if item.seq > last {
                    last = item.seq;
                    let Ok(message) = item.message() else {
                        continue;
                    };
                    let digest = item.digest();
                    let seq = item.seq;
                    lines.lock().unwrap().push(Line {
                        seq,
                        digest,
                        message,
                    });
                }
            }
        }
        // Only after a lost connection.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The digest with which an execution completed.
#[track_caller]
pub fn digest_of(line: &Line) -> String {
    let result = line.message.events.iter().find_map(|event| match event {
        Event::Completed { result, .. } => result["digest"].as_str(),
        _ => None,
    });
    result.expect("a completed execution's digest").to_owned()
}

/// Checks what holds for every ledger: no gap, a chain of digests, each state the fold of the one
/// before, a first binding by a policy service whoever appended it, epochs that grow by one and are started once, by their holder, progress that only
/// grows unless the ledger says that it stepped back, nothing after the end.
#[track_caller]
pub fn audit(ledger: &[Line]) {
    assert!(!ledger.is_empty(), "there is no ledger");
    let mut before: Option<&Line> = None;
    let mut started = BTreeSet::new();
    for line in ledger {
        match before {
            None => begins(line),
            Some(before) => follows(before, line),
        }
        let held = before.is_some_and(|b| matches!(b.state().phase, Phase::Started(_)));
        let mut holder = before.and_then(|b| b.state().phase.binding().map(author_of));
        let mut epoch = before.map_or(0, |b| b.state().epoch);
        let author = &line.state().author;
        for event in &line.message.events {
            match event {
                Event::Bound {
                    epoch: new,
                    node,
                    instance,
                    ..
                } => {
                    assert_eq!(*new, epoch + 1, "epochs grow by one");
                    epoch = *new;
                    holder = Some(format!("worker/{node}/{instance}"));
                }
                Event::Started { epoch: of, .. } => {
                    assert_eq!(*of, epoch, "only the last binding is started");
                    assert!(started.insert(*of), "epoch {of} was started twice");
                    assert_eq!(Some(author), holder.as_ref(), "started by its holder");
                }
                Event::Boundary(_) if held => {
                    let binding = before.and_then(|b| b.state().phase.binding());
                    let by = binding.map(author_of);
                    assert_eq!(Some(author), by.as_ref(), "only the holder commits");
                }
                _ => {}
            }
        }
        before = Some(line);
    }
}

fn author_of(binding: &fiec_schemas::Binding) -> String {
    format!("worker/{}/{}", binding.node, binding.instance)
}

/// A ledger's first message: also the fold of nothing; and who bound it where its node says so.
#[track_caller]
fn begins(line: &Line) {
    let state = line.state();
    assert_eq!((state.ordinal, state.prev), (1, None));
    let made = line.message.events.iter().find_map(|event| match event {
        Event::Bound { decision, .. } => Some(decision.as_ref()?.entrusted.as_ref()),
        _ => None,
    });
    if let Some(entrusted) = made {
        let by = entrusted.map(|e| &e.by).unwrap_or(&state.author);
        assert!(by.starts_with("policy/"), "bound by {by}");
        let by_node = state.author.starts_with("worker/");
        assert_eq!(entrusted.is_some(), by_node, "{:?}", line.message.events);
    }
    // A part is born with a share of its holder's range; a large submission lies elsewhere.
    let own = state.spread.as_ref().is_none_or(|s| s.part_of.is_none());
    if let Some(spec) = state.spec.clone().filter(|_| own) {
        let unborn = ExecutionState::unborn(
            state.tenant.clone(),
            state.execution,
            spec,
            state.batch,
            state.submitted_at,
        );
        let events = &line.message.events;
        let mut folded = unborn
            .after(events, &state.author, state.at, None)
            .unwrap_or_else(|e| panic!("{e}: {events:?} at the beginning"));
        folded.resolve(line.seq);
        assert_eq!(&folded, state, "a first state is the fold of its events");
    }
}

#[track_caller]
fn follows(before: &Line, line: &Line) {
    assert!(line.seq > before.seq);
    let (from, to) = (before.state(), line.state());
    let mut folded = from
        .after(&line.message.events, &to.author, to.at, Some(before.digest))
        .unwrap_or_else(|e| panic!("{e}: {:?} after {from:?}", line.message.events));
    let carried = folded.boundary_index() == from.boundary_index()
        && to
            .boundary
            .as_ref()
            .is_some_and(|b| b.ordinal == to.ordinal);
    if carried {
        folded.carry_state_again();
    }
    folded.resolve(line.seq);
    assert_eq!(&folded, to, "a state is the fold of the one before");
    let back = |event: &Event| matches!(event, Event::SteppedBack { .. });
    assert!(
        to.boundary_index() >= from.boundary_index() || line.message.events.iter().any(back),
        "progress went back"
    );
}
