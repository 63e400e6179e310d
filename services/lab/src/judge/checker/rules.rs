//! What holds for each ledger. The rules are told by a fold of this checker's own, which is
//! deliberately another one than the product's (`schemas/src/fold.rs`).

use std::collections::BTreeSet;

use fiec_schemas::Timestamp;
use serde_json::Value;

use super::chain::Chain;
use super::message::{Message, Totals, number, text};
use super::{CLOCKS_MS, Rule, Violation};

/// Events that only the worker which holds the started execution appends.
const OF_THE_HOLDER: [&str; 13] = [
    "boundary",
    "noted",
    "emitted",
    "yielded",
    "split",
    "merged",
    "requested",
    "reconfigured",
    "parked",
    "unparked",
    "crashed",
    "computed",
    "started",
];

/// Faults that are charged to a node.
const OF_NODES: [&str; 8] = [
    "cannot_start",
    "disk_full",
    "device_lost",
    "machine_out_of_memory",
    "frozen",
    "worker_panicked",
    "worker_died",
    "corrupt",
];

/// Those that end a worker.
const DEATHS: [&str; 3] = ["worker_died", "worker_panicked", "machine_out_of_memory"];

/// Faults that are charged to what the nodes share.
const OF_THE_INFRASTRUCTURE: [&str; 2] = ["data_lost", "broker"];

/// What the events of a ledger come to so far.
#[derive(Debug, Default)]
struct Fold {
    phase: String,
    epoch: u64,
    /// Author of the worker that the last binding names.
    holder: String,
    boundary: Option<(u64, String)>,
    crashes_since_commit: u64,
    totals: Totals,
    /// Epochs that were started.
    started: BTreeSet<u64>,
}

/// Time between a request and the order that reaches the program, in ms.
const ORDER_MS: i64 = 2_000;

/// A pause that a worker has confirmed: it is carried out at the next boundary, on whichever node.
#[derive(Debug, Default)]
struct Pause {
    /// When it was requested, while it is open.
    since: Option<Timestamp>,
    /// Boundaries that were computed after it.
    boundaries: u32,
}

impl Pause {
    fn follow(&mut self, message: &Message, say: &mut impl FnMut(Rule, String)) {
        for event in &message.events {
            match text(event, "type") {
                "requested" if text(event, "what") == "pause" => {
                    self.since.get_or_insert(message.state.at);
                }
                "boundary" => {
                    let at: Option<Timestamp> = text(event, "computed_at").parse().ok();
                    let late = |(since, at): (Timestamp, Timestamp)| {
                        at.millis() > since.millis() + ORDER_MS
                    };
                    if self.since.zip(at).is_some_and(late) {
                        self.boundaries += 1;
                    }
                    if self.boundaries == 2 {
                        let what = "a second boundary after a pause was confirmed";
                        say(Rule::Answers, what.to_owned());
                    }
                }
                "paused" | "held" | "completed" | "failed" | "cancelled" | "returned" => {
                    *self = Self::default();
                }
                _ => {}
            }
        }
    }
}

/// Judges a ledger by all rules that need nothing beside it.
pub fn judge(chain: &Chain) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut fold = Fold::default();
    let mut before: Option<&Message> = None;
    let mut pause = Pause::default();
    for message in &chain.messages {
        let mut say = |rule, what: String| {
            let at = format!(
                "message {} (ordinal {})",
                message.seq, message.state.ordinal
            );
            let what = format!("{at}: {what}");
            found.push(Violation::new(rule, &chain.execution, what));
        };
        order(before, message, &mut say);
        pause.follow(message, &mut say);
        // After a loss, and if the beginning is unknown, the fold continues from the message's own state.
        if message.has("healed") {
            say(
                Rule::Durable,
                "says again what the broker had lost".to_owned(),
            );
        }
        if message.has("healed") || (before.is_none() && !chain.is_whole()) {
            fold = Fold::of(message, fold.started);
        } else {
            for event in &message.events {
                fold.apply(event, message, &mut say);
            }
        }
        fold.compare(message, &mut say);
        before = Some(message);
    }
    found
}

/// Sequences, ordinals and times grow; nothing follows the end.
fn order(before: Option<&Message>, message: &Message, say: &mut impl FnMut(Rule, String)) {
    let state = &message.state;
    let after_ms = |later: fiec_schemas::Timestamp, earlier: fiec_schemas::Timestamp| {
        later.millis() + CLOCKS_MS >= earlier.millis()
    };
    if !after_ms(message.stored_at, state.at) {
        let what = format!("written at {}, stored at {}", state.at, message.stored_at);
        say(Rule::Times, what);
    }
    if !after_ms(state.at, state.submitted_at) {
        let what = format!(
            "written at {}, submitted at {}",
            state.at, state.submitted_at
        );
        say(Rule::Times, what);
    }
    let Some(before) = before else {
        let first = state.prev.is_none() && !message.has("healed");
        if first && state.ordinal != 1 {
            say(
                Rule::Chain,
                "the first message's ordinal is not 1".to_owned(),
            );
        }
        if first && !message.has("submitted") {
            say(Rule::Chain, "the first message is no submission".to_owned());
        }
        return;
    };
    if message.seq <= before.seq {
        say(Rule::Chain, format!("comes after message {}", before.seq));
    }
    let gap = message.has("healed") && state.ordinal > before.state.ordinal;
    if state.ordinal != before.state.ordinal + 1 && !gap {
        say(
            Rule::Chain,
            format!("follows ordinal {}", before.state.ordinal),
        );
    }
    if message.stored_at < before.stored_at {
        let what = format!("stored at {}, before its predecessor", message.stored_at);
        say(Rule::Times, what);
    }
    if !after_ms(state.at, before.state.at) {
        let what = format!(
            "written at {}, its predecessor at {}",
            state.at, before.state.at
        );
        say(Rule::Times, what);
    }
    let is_over = match before.state.phase.is.as_str() {
        "failed" | "cancelled" => !message.has("retried"),
        _ => before.state.phase.is_terminal(),
    };
    if is_over {
        let what = format!("follows the end ({})", before.state.phase.is);
        say(Rule::End, what);
    }
}

impl Fold {
    /// What a message's own state says.
    fn of(message: &Message, mut started: BTreeSet<u64>) -> Self {
        let state = &message.state;
        if state.phase.is == "started" {
            started.insert(state.epoch);
        }
        Self {
            phase: state.phase.is.clone(),
            epoch: state.epoch,
            holder: match (&state.phase.node, &state.phase.instance) {
                (Some(node), Some(instance)) => format!("worker/{node}/{instance}"),
                _ => String::new(),
            },
            boundary: state.boundary.as_ref().map(|p| (p.index, p.digest.clone())),
            crashes_since_commit: state.crashes_since_commit,
            totals: state.totals.clone(),
            started,
        }
    }

    /// Takes an event in.
    fn apply(&mut self, event: &Value, message: &Message, say: &mut impl FnMut(Rule, String)) {
        let kind = text(event, "type");
        let author = &message.state.author;
        let needs = match kind {
            "submitted" => "",
            "bound" | "adjusted" | "paused" | "failed" | "cancelled" | "stepped_back" => "",
            "held" if matches!(self.phase.as_str(), "pending" | "bound") => "",
            "retried" if matches!(self.phase.as_str(), "failed" | "cancelled") => "",
            "retried" => "held",
            "started" | "refused" => "bound",
            "resumed" => "paused",
            "verified" => "verifying",
            "returned" => "pending",
            "completed" if self.phase == "verifying" => "verifying",
            _ => "started",
        };
        if !needs.is_empty() && self.phase != needs {
            let what = format!("{kind} while it is {}", self.phase);
            say(Rule::Phases, what);
        }
        // A policy service may take from its binding what no node holds, or what a lost node held.
        let cause = text(&event["cause"], "kind");
        let taken = kind == "yielded" && matches!(cause, "orphaned" | "lost");
        if OF_THE_HOLDER.contains(&kind) && !taken && *author != self.holder {
            let what = format!("{kind} by {author}; {} holds it", self.holder);
            say(Rule::Holder, what);
        }
        self.charge(event, kind, cause);
        match kind {
            "submitted" => {
                if message.state.ordinal != 1 {
                    say(Rule::Phases, "submitted again".to_owned());
                }
                self.phase = "pending".to_owned();
            }
            "bound" => self.bind(event, author, say),
            "started" => {
                let epoch = number(event, "epoch");
                if epoch != self.epoch || !self.started.insert(epoch) {
                    let what = format!("starts epoch {epoch}; the last binding is {}", self.epoch);
                    say(Rule::Epochs, what);
                }
                self.phase = kind.to_owned();
            }
            "boundary" => {
                let index = number(event, "index");
                let last = self.boundary.as_ref().map(|(last, _)| *last);
                if last.is_some_and(|last| index <= last) {
                    let what = format!("boundary {index} after boundary {}", last.unwrap_or(0));
                    say(Rule::Progress, what);
                }
                self.boundary = Some((index, text(event, "digest").to_owned()));
                self.crashes_since_commit = 0;
                self.totals.commits += 1;
                self.totals.state_bytes += number(event, "bytes");
                self.totals.compute_us += number(event, "compute_us");
            }
            "crashed" => {
                self.crashes_since_commit += 1;
                self.totals.crashes += 1;
            }
            "yielded" | "refused" | "resumed" => self.phase = "pending".to_owned(),
            "retried" => {
                self.crashes_since_commit = 0;
                self.phase = "pending".to_owned();
            }
            "stepped_back" => {
                let to = number(&event["to"], "index");
                let last = self.boundary.take().map_or(0, |(last, _)| last);
                if to > last {
                    say(Rule::Progress, format!("steps back from {last} to {to}"));
                }
                let to = &event["to"];
                if !to.is_null() {
                    self.boundary = Some((number(to, "index"), text(to, "digest").to_owned()));
                }
                self.totals.steps_back += 1;
                if !matches!(self.phase.as_str(), "paused" | "held") {
                    self.phase = "pending".to_owned();
                }
            }
            "computed" => self.phase = "verifying".to_owned(),
            "paused" if self.phase == "started" => {
                say(Rule::Phases, "paused while it is started".to_owned());
            }
            "paused" | "held" | "completed" | "failed" | "cancelled" | "returned" => {
                self.phase = kind.to_owned();
            }
            _ => {}
        }
    }

    /// Counts whose fault it was.
    fn charge(&mut self, event: &Value, kind: &str, cause: &str) {
        let told = match kind {
            "refused" | "crashed" | "failed" | "held" => &event["fault"],
            "yielded" if cause == "not_taken" => &event["cause"]["fault"],
            _ => &Value::Null,
        };
        let died = cause == "lost" && matches!(kind, "bound" | "yielded");
        let is_started = self.phase == "started";
        let is_end = matches!(kind, "failed" | "held");
        let was_told = is_end && !is_started && DEATHS.contains(&text(told, "is"));
        let of_node = OF_NODES.contains(&text(told, "is")) && !was_told || died && is_started;
        let shared = OF_THE_INFRASTRUCTURE.contains(&text(told, "is"));
        self.totals.node_faults += u64::from(of_node);
        self.totals.infrastructure_faults += u64::from(shared);
    }

    fn bind(&mut self, event: &Value, author: &str, say: &mut impl FnMut(Rule, String)) {
        let (epoch, cause) = (number(event, "epoch"), text(&event["cause"], "kind"));
        if epoch != self.epoch + 1 {
            let what = format!("binding {epoch} after binding {}", self.epoch);
            say(Rule::Epochs, what);
        }
        let replaces = matches!(cause, "lost" | "orphaned");
        match self.phase.as_str() {
            "pending" | "bound" => {}
            "started" if replaces => {}
            phase => say(Rule::Phases, format!("bound ({cause}) while it is {phase}")),
        }
        // A worker binds only what was left to it, or what it gives away.
        let decision = &event["decision"];
        let left = decision["entrusted"].is_object() && epoch == 1;
        let gives = author == self.holder;
        if author.starts_with("worker/") && !left && !gives && !decision.is_null() {
            let what = format!("binding {epoch} by {author}, to whom nothing was left");
            say(Rule::Holder, what);
        }
        self.totals.rebindings += u64::from(self.epoch > 0);
        self.totals.pressure += u64::from(cause == "pressure");
        self.epoch = epoch;
        self.phase = "bound".to_owned();
        let (node, instance) = (text(event, "node"), text(event, "instance"));
        self.holder = format!("worker/{node}/{instance}");
    }

    /// The message's state says what the events came to.
    fn compare(&self, message: &Message, say: &mut impl FnMut(Rule, String)) {
        let state = &message.state;
        let boundary = state.boundary.as_ref();
        let said = (
            &state.phase.is,
            state.epoch,
            boundary.map(|place| (place.index, place.digest.clone())),
            state.crashes_since_commit,
            &state.totals,
        );
        let own = (
            &self.phase,
            self.epoch,
            self.boundary.clone(),
            self.crashes_since_commit,
            &self.totals,
        );
        if said != own {
            say(
                Rule::State,
                format!("says {said:?}; its events come to {own:?}"),
            );
        }
        if let (Some(node), Some(instance)) = (&state.phase.node, &state.phase.instance)
            && self.holder != format!("worker/{node}/{instance}")
        {
            let what = format!("names {node}/{instance}; {} is bound", self.holder);
            say(Rule::State, what);
        }
    }
}
