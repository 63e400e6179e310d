//! The checker of histories finds what is wrong: a history that keeps every rule, and one forgery
//! for each rule.

use std::collections::{BTreeMap, BTreeSet};

use fiec_lab::judge::checker::chain::{Chain, chains};
use fiec_lab::judge::checker::message::{Message, Stored};
use fiec_lab::judge::checker::tables::{self, Snapshot, Tables};
use fiec_lab::judge::checker::{Rule, Violation, rules, stored};
use fiec_schemas::Timestamp;
use serde_json::{Value, json};

const ID: &str = "01920000-0000-7000-8000-000000000001";
const N1: &str = "01920000-0000-7000-8000-0000000000a1";
const N2: &str = "01920000-0000-7000-8000-0000000000a2";
const POLICY: &str = "policy/01920000-0000-7000-8000-0000000000b1";
/// Its second of the day, and a message a second.
const MORNING: i64 = 1_790_000_000_000_000;

fn worker(node: &str) -> String {
    let instance = if node == "n1" { N1 } else { N2 };
    format!("worker/{node}/{instance}")
}

fn at(second: u64) -> Timestamp {
    Timestamp::from_micros(MORNING).plus_ms(1_000 * second)
}

/// A σ that is known by its boundary.
fn sigma(index: u64) -> String {
    format!("{index:064x}")
}

fn bound(epoch: u64, node: &str, cause: &str) -> Value {
    let instance = if node == "n1" { N1 } else { N2 };
    json!({"type": "bound", "epoch": epoch, "node": node, "instance": instance,
        "substrate": "host", "cause": {"kind": cause}, "decision": {"candidates": []}})
}

fn boundary(index: u64) -> Value {
    json!({"type": "boundary", "index": index, "digest": sigma(index), "bytes": 10,
        "compute_us": 5, "computed_at": at(1)})
}

fn completed() -> Value {
    json!({"type": "completed", "capsules": 30, "computed_until": at(1), "outputs":
        [{"name": "out", "digest": sigma(99), "bytes": 7}]})
}

/// A ledger that is forged message by message, each with the state that `change` makes of the one
/// before.
#[derive(Clone)]
struct Forger {
    stored: Vec<Stored>,
    state: Value,
}

impl Forger {
    fn new() -> Self {
        let state = json!({"execution": ID, "tenant": "lab", "ordinal": 0, "submitted_at": at(0),
            "epoch": 0, "phase": {"is": "pending"}, "totals": {}});
        Self {
            stored: Vec::new(),
            state,
        }
    }

    /// Appends a message; the fields of `change` replace those of the state.
    fn say(&mut self, author: &str, events: &[Value], change: &Value) {
        let number = self.stored.len() as u64 + 1;
        self.state["ordinal"] = json!(self.state["ordinal"].as_u64().unwrap() + 1);
        self.state["author"] = json!(author);
        self.state["at"] = json!(at(number));
        if let Some(last) = self.stored.last() {
            let digest = fiec_schemas::Digest::of(last.header.as_bytes());
            self.state["prev"] = json!(digest);
        }
        for (field, value) in change.as_object().unwrap() {
            self.state[field] = value.clone();
        }
        let header = json!({"v": 1, "events": events, "state": self.state});
        self.stored.push(Stored {
            seq: 10 * number,
            stored_at: at(number),
            tenant: "lab".to_owned(),
            execution: ID.to_owned(),
            header: header.to_string(),
        });
    }

    fn messages(&self) -> Vec<Message> {
        let read = |stored| Message::read(stored).unwrap();
        self.stored.iter().map(read).collect()
    }

    fn judged(&self) -> Vec<Rule> {
        judged(self.messages())
    }
}

fn judged(stored: Vec<Message>) -> Vec<Rule> {
    let (chains, mut found) = chains(stored, Vec::new());
    found.extend(chains.iter().flat_map(rules::judge));
    let rules = found.into_iter().map(|violation| violation.rule);
    rules.collect()
}

fn phase(is: &str, node: &str) -> Value {
    let instance = if node == "n1" { N1 } else { N2 };
    json!({"is": is, "node": node, "instance": instance})
}

fn place(index: u64) -> Value {
    json!({"index": index, "digest": sigma(index), "bytes": 10, "ordinal": 1})
}

/// Submitted and bound to n1, started there, with boundary 10.
fn computing() -> Forger {
    let mut forger = Forger::new();
    let events = [json!({"type": "submitted"}), bound(1, "n1", "initial")];
    let change = json!({"epoch": 1, "phase": phase("bound", "n1")});
    forger.say(POLICY, &events, &change);
    let events = [json!({"type": "started", "epoch": 1}), boundary(10)];
    let change = json!({"phase": phase("started", "n1"), "boundary": place(10),
        "totals": {"commits": 1, "state_bytes": 10, "compute_us": 5}});
    forger.say(&worker("n1"), &events, &change);
    forger
}

/// The same, moved to n2 with boundary 20, and completed there.
fn whole() -> Forger {
    let mut forger = computing();
    let gives = json!({"type": "yielded", "cause": {"kind": "operator"}});
    let events = [boundary(20), gives, bound(2, "n2", "operator")];
    let totals = json!({"commits": 2, "state_bytes": 20, "compute_us": 10, "rebindings": 1});
    let change = json!({"epoch": 2, "phase": phase("bound", "n2"), "boundary": place(20),
        "totals": totals});
    forger.say(&worker("n1"), &events, &change);
    let events = [json!({"type": "started", "epoch": 2}), completed()];
    forger.say(
        &worker("n2"),
        &events,
        &json!({"phase": {"is": "completed"}}),
    );
    forger
}

fn chain_of(forger: &Forger) -> Chain {
    let (mut chains, found) = chains(forger.messages(), Vec::new());
    assert_eq!(found, []);
    chains.swap_remove(0)
}

#[test]
fn a_history_that_keeps_the_rules_passes() {
    assert_eq!(whole().judged(), []);
}

#[test]
fn what_is_on_a_ledgers_subject_is_a_message_of_that_ledger() {
    let mut stored = computing().stored.swap_remove(0);
    assert!(Message::read(&stored).is_ok());
    stored.execution = N1.to_owned();
    assert!(
        Message::read(&stored)
            .unwrap_err()
            .contains("another subject")
    );
    stored.header = "{\"v\":1".to_owned();
    assert!(Message::read(&stored).is_err());
}

#[test]
fn a_message_follows_the_one_before_it() {
    let mut forger = whole();
    forger.stored.remove(1);
    assert_eq!(forger.judged()[0], Rule::Chain);
    let mut forger = whole();
    forger.stored.swap(2, 3);
    assert_eq!(forger.judged()[0], Rule::Chain);
    // The same message once more.
    let mut forger = whole();
    forger.stored.push(forger.stored[3].clone());
    assert_eq!(forger.judged(), [Rule::Chain]);
    // An ordinal is left out.
    let mut forger = computing();
    let change = json!({"ordinal": 4, "boundary": place(20),
        "totals": {"commits": 2, "state_bytes": 20, "compute_us": 10}});
    forger.say(&worker("n1"), &[boundary(20)], &change);
    assert_eq!(forger.judged(), [Rule::Chain]);
}

#[test]
fn what_has_dropped_out_of_the_stream_is_known_from_the_journal() {
    let all = whole().messages();
    let (chains, found) = chains(all[3..].to_vec(), all.clone());
    assert_eq!(found, []);
    assert_eq!(chains[0].messages.len(), 4);
}

#[test]
fn what_the_broker_has_stored_does_not_go() {
    let rule = |found: Vec<Violation>| found.iter().map(|v| v.rule).collect::<Vec<_>>();
    let all = whole().messages();
    let (_, found) = chains(all[..3].to_vec(), all.clone());
    assert_eq!(rule(found), [Rule::Durable]);
    let (_, found) = chains(Vec::new(), all);
    assert_eq!(rule(found), [Rule::Durable]);
    // Its holder has said again what was lost.
    let mut forger = computing();
    let healed = json!({"type": "healed", "kept": 2, "lost": 3});
    let change = json!({"ordinal": 6, "boundary": place(25)});
    forger.say(&worker("n1"), &[healed], &change);
    assert_eq!(forger.judged(), [Rule::Durable]);
}

#[test]
fn a_message_that_is_deleted_between_others_is_missed() {
    let mut all = whole().messages();
    let mut left = all.clone();
    left.remove(1);
    let (_, found) = chains(left.clone(), all.clone());
    let rules: Vec<Rule> = found.iter().map(|violation| violation.rule).collect();
    assert_eq!(rules, [Rule::Durable], "{found:?}");
    assert!(found[0].what.contains("deleted"), "{found:?}");
    // A stream that moves on while it is read drops its oldest messages.
    for messages in [&mut all, &mut left] {
        messages.last_mut().unwrap().state.ordinal = 66;
    }
    let (_, found) = chains(left, all);
    assert_eq!(found, []);
}

#[test]
fn a_confirmed_pause_is_carried_out_at_the_next_boundary() {
    let mut forger = computing();
    let requested = json!({"type": "requested", "what": "pause", "who": "me"});
    forger.say(&worker("n1"), &[requested], &json!({}));
    let computed = |index: u64, second| {
        let mut event = boundary(index);
        event["computed_at"] = json!(at(second));
        event
    };
    let change = |index: u64, commits: u64| {
        json!({"boundary": place(index), "totals": {"commits": commits,
            "state_bytes": 10 * commits, "compute_us": 5 * commits}})
    };
    forger.say(&worker("n1"), &[computed(20, 10)], &change(20, 2));
    assert_eq!(forger.judged(), []);
    forger.say(&worker("n1"), &[computed(30, 20)], &change(30, 3));
    assert!(forger.judged().contains(&Rule::Answers));
}

#[test]
fn nothing_follows_the_end() {
    let mut forger = whole();
    let who = json!({"type": "cancelled", "who": "ann"});
    forger.say(POLICY, &[who], &json!({"phase": {"is": "cancelled"}}));
    assert_eq!(forger.judged(), [Rule::End]);
}

#[test]
fn epochs_grow_by_one_and_are_started_once() {
    let mut forger = computing();
    let change = json!({"epoch": 3, "phase": phase("bound", "n2"), "totals":
        {"commits": 1, "state_bytes": 10, "compute_us": 5, "rebindings": 1, "node_faults": 1}});
    forger.say(POLICY, &[bound(3, "n2", "lost")], &change);
    assert_eq!(forger.judged(), [Rule::Epochs]);
    // The binding before the last one.
    let mut forger = computing();
    let change = json!({"epoch": 2, "phase": phase("bound", "n2"), "totals":
        {"commits": 1, "state_bytes": 10, "compute_us": 5, "rebindings": 1, "node_faults": 1}});
    forger.say(POLICY, &[bound(2, "n2", "lost")], &change);
    let started = json!({"type": "started", "epoch": 1});
    forger.say(
        &worker("n2"),
        &[started],
        &json!({"phase": phase("started", "n2")}),
    );
    assert_eq!(forger.judged(), [Rule::Epochs]);
}

#[test]
fn only_the_holder_of_the_binding_appends_its_progress() {
    let more = json!({"boundary": place(20),
        "totals": {"commits": 2, "state_bytes": 20, "compute_us": 10}});
    let mut forger = computing();
    forger.say(&worker("n2"), &[boundary(20)], &more);
    assert_eq!(forger.judged(), [Rule::Holder]);
    let mut forger = computing();
    forger.say(POLICY, &[boundary(20)], &more);
    assert_eq!(forger.judged(), [Rule::Holder]);
    // A binding by a worker to which nothing was left.
    let mut forger = Forger::new();
    let events = [json!({"type": "submitted"}), bound(1, "n1", "initial")];
    let change = json!({"epoch": 1, "phase": phase("bound", "n1")});
    forger.say(&worker("n1"), &events, &change);
    assert_eq!(forger.judged(), [Rule::Holder]);
}

#[test]
fn the_phase_allows_each_event() {
    let mut forger = computing();
    let change = json!({"epoch": 2, "phase": phase("bound", "n2"), "totals":
        {"commits": 1, "state_bytes": 10, "compute_us": 5, "rebindings": 1}});
    forger.say(POLICY, &[bound(2, "n2", "balance")], &change);
    assert_eq!(forger.judged(), [Rule::Phases]);
    // A boundary under a binding that was not started.
    let mut forger = Forger::new();
    let events = [json!({"type": "submitted"}), bound(1, "n1", "initial")];
    let change = json!({"epoch": 1, "phase": phase("bound", "n1")});
    forger.say(POLICY, &events, &change);
    let change = json!({"boundary": place(10),
        "totals": {"commits": 1, "state_bytes": 10, "compute_us": 5}});
    forger.say(&worker("n1"), &[boundary(10)], &change);
    assert_eq!(forger.judged(), [Rule::Phases]);
}

#[test]
fn progress_goes_back_only_where_the_ledger_says_so() {
    let mut forger = computing();
    let change = json!({"boundary": place(10),
        "totals": {"commits": 2, "state_bytes": 20, "compute_us": 10}});
    forger.say(&worker("n1"), &[boundary(10)], &change);
    assert_eq!(forger.judged(), [Rule::Progress]);
    let back = |to: u64| {
        let mut forger = computing();
        let event = json!({"type": "stepped_back", "to": place(to), "cause": {"kind": "corrupt"}});
        let change = json!({"phase": {"is": "pending"}, "boundary": place(to), "totals":
            {"commits": 1, "state_bytes": 10, "compute_us": 5, "steps_back": 1}});
        forger.say(POLICY, &[event], &change);
        forger.judged()
    };
    assert_eq!(back(5), []);
    assert_eq!(back(15), [Rule::Progress]);
}

#[test]
fn a_state_is_what_its_events_come_to() {
    let right = json!({"boundary": place(20),
        "totals": {"commits": 2, "state_bytes": 20, "compute_us": 10}});
    let wrong = [
        ("boundary", place(21)),
        ("epoch", json!(2)),
        ("phase", phase("started", "n2")),
        (
            "totals",
            json!({"commits": 3, "state_bytes": 20, "compute_us": 10}),
        ),
        (
            "totals",
            json!({"commits": 2, "state_bytes": 20, "compute_us": 10, "node_faults": 1}),
        ),
    ];
    for (field, value) in wrong {
        let mut forger = computing();
        let mut change = right.clone();
        change[field] = value;
        forger.say(&worker("n1"), &[boundary(20)], &change);
        assert_eq!(forger.judged(), [Rule::State], "{field}");
    }
}

#[test]
fn times_stand_in_order() {
    let forge = |change: &dyn Fn(&mut Forger)| {
        let mut forger = computing();
        change(&mut forger);
        forger.judged()
    };
    // The last message, so that no digest changes.
    let stored = |forger: &mut Forger| forger.stored[1].stored_at = at(0);
    assert_eq!(forge(&stored), [Rule::Times, Rule::Times]);
    let written = |forger: &mut Forger| {
        let mut header: Value = serde_json::from_str(&forger.stored[1].header).unwrap();
        header["state"]["at"] = json!(at(0));
        forger.stored[1].header = header.to_string();
    };
    assert_eq!(forge(&written), [Rule::Times]);
    let snapshot = Snapshot {
        reversed: vec!["x | finished before it started".to_owned()],
        ..Snapshot::default()
    };
    assert_eq!(tables::judge(&snapshot)[0].rule, Rule::Times);
}

#[test]
fn outputs_and_large_results_are_looked_for() {
    let mut forger = whole();
    let no_copies = BTreeSet::new();
    let named = stored::objects(&[chain_of(&forger)], &no_copies);
    let expected = BTreeMap::from([(sigma(99), (7, ID.to_owned()))]);
    assert_eq!(named, expected);
    forger.stored.pop();
    assert!(stored::objects(&[chain_of(&forger)], &no_copies).is_empty());
}

/// The violations of tables in which something was changed.
fn compared(change: impl FnOnce(&mut Tables)) -> Vec<Violation> {
    let chains = [chain_of(&whole())];
    let expected = tables::expected(&chains);
    let mut found = expected.clone();
    change(&mut found);
    tables::compare(&expected, &found, &BTreeSet::new())
}

#[test]
fn a_row_that_is_missing_changed_or_too_much_is_found_in_every_table() {
    assert_eq!(compared(|_| {}), []);
    let filled = [
        "executions",
        "placements",
        "rebindings",
        "boundaries",
        "decisions",
    ];
    for table in filled {
        let found = compared(|tables| drop(tables.get_mut(table).unwrap().pop_first()));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].rule, Rule::Table(table));
        assert_eq!(found[0].execution, ID);
    }
    let found = compared(|tables| {
        let boundaries = tables.get_mut("boundaries").unwrap();
        let row = boundaries.pop_first().unwrap();
        boundaries.insert(row.replace(" | 10 | ", " | 11 | "));
    });
    assert_eq!(found.len(), 2, "one row lacks, another is there: {found:?}");
    for table in [
        "execution_events",
        "execution_changes",
        "spread_splits",
        "batches",
    ] {
        let row = format!("{ID} | 3 | paused | 1");
        let found = compared(|tables| tables.get_mut(table).unwrap().extend([row]));
        assert_eq!(found[0].rule, Rule::Table(table));
    }
}

#[test]
fn tables_say_how_placements_ended_and_which_boundaries_count() {
    let mut forger = computing();
    let event = json!({"type": "stepped_back", "cause": {"kind": "corrupt"}});
    let change = json!({"phase": {"is": "pending"}, "boundary": null, "totals":
        {"commits": 1, "state_bytes": 10, "compute_us": 5, "steps_back": 1}});
    forger.say(POLICY, &[event], &change);
    assert_eq!(forger.judged(), []);
    let tables = tables::expected(&[chain_of(&forger)]);
    let (n, s) = (N1, sigma(10));
    let expected = [
        (
            "placements",
            format!("{ID} | 1 | n1 | {n} | host | initial | t | corrupt"),
        ),
        (
            "boundaries",
            format!("{ID} | 10 | 1 | n1 | {s} | 10 | 5 | 20 | 2 | t | -"),
        ),
        ("execution_events", format!("{ID} | 3 | stepped_back | 1")),
    ];
    for (table, row) in expected {
        assert_eq!(tables[table], BTreeSet::from([row]));
    }
}

#[test]
fn records_are_in_their_tables_up_to_the_checkpoint() {
    let kinds = [
        (1, "rejection"),
        (2, "node"),
        (3, "waiting"),
        (4, "quota"),
        (9, "rejection"),
    ];
    let records = kinds.map(|(seq, kind)| (seq, kind.to_owned()));
    let records = BTreeMap::from(records);
    let tables = [("rejections", 1), ("node_events", 2), ("quota_changes", 4)];
    let mut snapshot = Snapshot {
        record: 5,
        records: tables
            .map(|(table, seq)| (table, BTreeSet::from([seq])))
            .into(),
        ..Snapshot::default()
    };
    assert_eq!(tables::compare_records(&records, &snapshot), []);
    snapshot.records.remove("node_events");
    let found = tables::compare_records(&records, &snapshot);
    assert_eq!((found.len(), found[0].rule), (1, Rule::Records));
    snapshot
        .records
        .insert("node_events", BTreeSet::from([2, 7]));
    let found = tables::compare_records(&records, &snapshot);
    assert_eq!((found.len(), found[0].rule), (1, Rule::Durable));
}

#[test]
fn what_the_recorder_states_as_missing_is_found() {
    let snapshot = Snapshot {
        missing: vec!["ledger_gaps: 3".to_owned()],
        ..Snapshot::default()
    };
    assert_eq!(tables::judge(&snapshot)[0].rule, Rule::Gaps);
}
