//! The ledger of one execution: the valid messages of its subject, as `schemas/PROTOCOL.md` says.
//! The stream keeps the last 64 of them; the test's journal has seen the others.

use std::collections::{BTreeMap, HashMap, HashSet};

use fiec_schemas::subjects;

use super::message::{Message, by_execution};
use super::{Rule, Violation};

impl Message {
    /// Whether the stream must still have it, beside the newest message of its ledger.
    fn is_kept(&self, newest: u64) -> bool {
        newest.saturating_sub(self.state.ordinal) < subjects::LEDGER_DEPTH
    }
}

/// A ledger as far as it is known.
#[derive(Debug, Clone)]
pub struct Chain {
    pub execution: String,
    pub messages: Vec<Message>,
}

impl Chain {
    /// True where the first message is known, so that counts from the beginning can be compared.
    pub fn is_whole(&self) -> bool {
        self.messages
            .first()
            .is_some_and(|first| first.state.prev.is_none())
    }

    /// True where the broker has lost messages that were said again or begun anew.
    pub fn is_healed(&self) -> bool {
        self.messages.iter().any(|message| message.has("healed"))
    }
}

/// Puts the ledgers together: `stored` is what the stream holds, `seen` what the journal has seen.
///
/// A message counts if its `prev` is the digest of the last one that counts. One that follows a
/// message which has dropped out of the stream is joined to it by what the journal has seen.
pub fn chains(stored: Vec<Message>, seen: Vec<Message>) -> (Vec<Chain>, Vec<Violation>) {
    let mut found = Vec::new();
    let mut all = Vec::new();
    let mut seen = by_execution(seen);
    let stored = by_execution(stored);
    for id in seen.keys().filter(|id| !stored.contains_key(*id)) {
        let what = "the stream has lost the whole ledger, which the journal has seen";
        found.push(Violation::new(Rule::Durable, id, what));
    }
    for (execution, stored) in stored {
        let seen = seen.remove(&execution).unwrap_or_default();
        let (chain, wrong) = join(&execution, stored, &seen);
        found.extend(wrong);
        all.push(chain);
    }
    (all, found)
}

fn join(execution: &str, stored: Vec<Message>, seen: &[Message]) -> (Chain, Vec<Violation>) {
    let mut wrong = Vec::new();
    let in_stream: HashSet<&str> = stored.iter().map(|m| m.digest.as_str()).collect();
    let others: HashMap<&str, &Message> = seen
        .iter()
        .filter(|message| !in_stream.contains(message.digest.as_str()))
        .map(|message| (message.digest.as_str(), message))
        .collect();
    let newest = stored.last().map_or(0, |message| message.state.ordinal);
    let mut messages: Vec<Message> = Vec::new();
    for message in &stored {
        let last = messages.last().map(|last| last.digest.as_str());
        match behind(message, last, &others) {
            Some(between) => {
                let deleted = between
                    .iter()
                    .filter(|m| last.is_some() && m.is_kept(newest));
                wrong.extend(deleted.map(|deleted| {
                    let what = format!(
                        "message {} (ordinal {}) was deleted from the stream",
                        deleted.seq, deleted.state.ordinal
                    );
                    Violation::new(Rule::Durable, execution, what)
                }));
                messages.extend(between.into_iter().cloned());
                messages.push(message.clone());
            }
            None => wrong.push(Violation::new(
                Rule::Chain,
                execution,
                format!(
                    "message {} (ordinal {}) does not follow the one before it",
                    message.seq, message.state.ordinal
                ),
            )),
        }
    }
    let known: HashSet<&str> = messages.iter().map(|m| m.digest.as_str()).collect();
    let lost: BTreeMap<u64, u64> = seen
        .iter()
        .filter(|message| !known.contains(message.digest.as_str()))
        .map(|message| (message.seq, message.state.ordinal))
        .collect();
    for (seq, ordinal) in lost {
        let what =
            format!("message {seq} (ordinal {ordinal}) was stored, and is not there any more");
        wrong.push(Violation::new(Rule::Durable, execution, what));
    }
    let execution = execution.to_owned();
    (
        Chain {
            execution,
            messages,
        },
        wrong,
    )
}

/// The messages between `last` and `message` that have dropped out of the stream, oldest first; none
/// where `message` does not follow `last`. Where nothing comes before, a ledger begins as early as
/// it is known.
fn behind<'a>(
    message: &Message,
    last: Option<&str>,
    others: &HashMap<&str, &'a Message>,
) -> Option<Vec<&'a Message>> {
    let mut between = Vec::new();
    let mut prev = message.state.prev.clone();
    while prev.as_deref() != last {
        let before = prev.as_deref().and_then(|digest| others.get(digest));
        match before {
            Some(before) if between.len() <= others.len() => {
                between.push(*before);
                prev.clone_from(&before.state.prev);
            }
            _ if last.is_none() => break,
            _ => return None,
        }
    }
    between.reverse();
    Some(between)
}
