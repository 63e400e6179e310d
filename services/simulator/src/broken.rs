//! The promises that must hold at every step of every run, and their violations.

use std::fmt;

use fiec_schemas::{Cause, Event, ExecutionState, Fault, Phase, Started, author};
use serde::Serialize;

/// A promise of FIEC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Never two live bindings. Only the holder writes while an execution runs, and no execution is
    /// bound away from a node that can be heard.
    OneBinding,
    /// No author requests an event that the fold forbids.
    PossibleEvents,
    /// Epochs and ordinals grow by one.
    Epochs,
    /// A committed boundary is never lost, except by an explicit step back.
    Progress,
    /// Rebindings for pressure: at most ⌈T/τ⌉ + 1 in a time T with dwell τ. Preemptions: at most T
    /// / residency + 1.
    BoundedRebindings,
    /// No node runs more executions than it has slots or memory for.
    Capacity,
    /// A destination meets the requirements.
    Requirements,
    /// No execution is bound before its dependencies have ended as required. None fails because of
    /// a dependency that may still complete.
    Order,
    /// A gang's members start together or not at all.
    Gangs,
    /// No tenant and no batch exceeds its limits. Each execution has its own reservation, and
    /// reservations end with their executions.
    Quotas,
    /// A spread execution and its parts cover each tile of the range once. No finished tile is
    /// computed again. Each part is made once, is taken back or given back, and ends with the
    /// whole.
    Ranges,
    /// A node with a deadline is empty by then. Executions are given up only if they had no
    /// boundary at which to leave.
    AwayInTime,
    /// No execution waits long while a viable node has room, and none is forgotten.
    NoStarvation,
}

impl Rule {
    /// All rules.
    pub const ALL: [Rule; 13] = [
        Rule::OneBinding,
        Rule::PossibleEvents,
        Rule::Epochs,
        Rule::Progress,
        Rule::BoundedRebindings,
        Rule::Capacity,
        Rule::Requirements,
        Rule::Order,
        Rule::Gangs,
        Rule::Quotas,
        Rule::Ranges,
        Rule::AwayInTime,
        Rule::NoStarvation,
    ];

    /// In words.
    pub fn in_words(self) -> &'static str {
        match self {
            Rule::OneBinding => "never two live bindings",
            Rule::PossibleEvents => "no event that the ledger's rules forbid",
            Rule::Epochs => "epochs and ordinals grow by one",
            Rule::Progress => "a committed boundary is never lost",
            Rule::BoundedRebindings => "at most ceil(T/dwell) + 1 rebindings for pressure",
            Rule::Capacity => "no node runs more than it can",
            Rule::Requirements => "a destination has what is required",
            Rule::Order => "nothing is bound before what it waits for has ended",
            Rule::Gangs => "the members of a gang start together or not at all",
            Rule::Quotas => "no more places at once than a tenant and a batch may have",
            Rule::Ranges => "a range and its parts have each tile once",
            Rule::AwayInTime => "a node is left, at boundaries, before it is gone",
            Rule::NoStarvation => "nothing waits while a viable node has room",
        }
    }
}

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The scenario's seed.
    pub seed: u64,
    /// The virtual time, in microseconds.
    pub at_us: u64,
    /// The execution, by number and workload.
    pub execution: String,
    /// The observation.
    pub detail: String,
    /// The preceding events of the execution, the last one at the end.
    pub events: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "a time for people")]
        let seconds = self.at_us as f64 / 1e6;
        writeln!(
            f,
            "broken at {seconds:.6} s (seed {}): {}: {}",
            self.seed,
            self.rule.in_words(),
            self.detail
        )?;
        writeln!(f, "{}:", self.execution)?;
        for event in &self.events {
            writeln!(f, "  {event}")?;
        }
        Ok(())
    }
}

/// A broken promise without the execution and the time, which the world adds.
pub type Broken = (Rule, String);

/// Checks one message of a ledger: the state before it (none for the first), its events, and the
/// state after it.
///
/// # Errors
/// The broken rule, and the observation.
pub fn message(
    before: Option<&ExecutionState>,
    events: &[Event],
    after: &ExecutionState,
) -> Result<(), Broken> {
    let (epoch, ordinal) = before.map_or((0, 0), |b| (b.epoch, b.ordinal));
    let bound = events.iter().filter(|e| matches!(e, Event::Bound { .. }));
    let wanted = epoch + bound.count() as u64;
    if after.epoch != wanted || after.ordinal != ordinal + 1 {
        let found = format!(
            "epoch {} and ordinal {} after {epoch} and {ordinal}",
            after.epoch, after.ordinal
        );
        return Err((Rule::Epochs, found));
    }
    let declared = events
        .iter()
        .any(|e| matches!(e, Event::SteppedBack { .. }));
    let reached = before.map_or(0, ExecutionState::boundary_index);
    if after.boundary_index() < reached && !declared {
        let names: Vec<_> = events.iter().map(|e| e.kind().as_str()).collect();
        return Err((
            Rule::Progress,
            format!(
                "boundary {} after {reached} by {}",
                after.boundary_index(),
                names.join("+")
            ),
        ));
    }
    let Some(before) = before else { return Ok(()) };
    if author::worker(&after.author).is_some() {
        let (writer, held) = (&after.author, before.phase.binding());
        let holder = held.map(|b| author::of_worker(&b.node, b.instance));
        if holder.as_ref() != Some(writer) {
            let holder = holder.unwrap_or_else(|| before.phase.as_str().to_owned());
            return Err((
                Rule::OneBinding,
                format!("{writer} writes while it is held by {holder}"),
            ));
        }
    } else if let Phase::Started(Started { binding: held, .. }) = &before.phase {
        // An unwanted part may be cancelled while it is lost.
        let ends = |e: &Event| matches!(e, Event::Cancelled { .. }) && after.part_of().is_some();
        if !events.iter().all(|e| is_loss(e) || ends(e)) {
            let names: Vec<_> = events.iter().map(|e| e.kind().as_str()).collect();
            return Err((
                Rule::OneBinding,
                format!(
                    "{} writes {} while {} runs it",
                    after.author,
                    names.join("+"),
                    held.node
                ),
            ));
        }
    }
    Ok(())
}

/// True for an event by which a policy service takes an execution from a worker that is lost.
pub fn is_loss(event: &Event) -> bool {
    match event {
        Event::Bound { cause, .. } => matches!(cause, Cause::Lost { .. }),
        Event::Held { fault, .. } | Event::Failed { fault, .. } => {
            fault.as_deref() == Some(&Fault::WorkerDied)
        }
        _ => false,
    }
}

/// Most rebindings for pressure in a time in microseconds, for a dwell in ms.
pub fn most_rebindings(passed_us: u64, dwell_ms: u64) -> u64 {
    passed_us.div_ceil(dwell_ms.max(1) * 1_000) + 1
}
