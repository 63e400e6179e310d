//! What must hold at every step of every run, and how it is said when it does not.

use std::fmt;

use fiec_schemas::{Cause, Event, ExecutionState, Phase, author};
use serde::Serialize;

/// A promise of FIEC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Never two live bindings: only the holder writes while it runs, and nobody is bound away from
    /// a node that can be heard.
    OneBinding,
    /// No writer asks for what the fold forbids.
    PossibleEvents,
    /// Epochs and ordinals grow by one.
    Epochs,
    /// A committed boundary is never lost, except by a declared step back.
    Progress,
    /// Rebindings for pressure: at most ⌈T/τ⌉ + 1 in time T with dwell τ. Giving way to others: at most
    /// T / residency + 1.
    BoundedRebindings,
    /// No node runs more than it has slots, or memory, for.
    Capacity,
    /// A destination has what is required of it.
    Requirements,
    /// Nothing is bound before what it waits for has ended as it must, and nothing is failed because
    /// of others while they may yet complete.
    Order,
    /// A gang's members start together or not at all.
    Gangs,
    /// No tenant, and no batch, has more places than it may have at once, each has reserved its own,
    /// and nothing stays reserved that has ended.
    Quotas,
    /// An execution that is spread and its parts have each tile of its range once, none that was done
    /// is done again, and each part is made, taken back or given back, and ends with the whole.
    Ranges,
    /// What runs on a node that is to be empty by a time is away by then, and is given up only
    /// where it had no boundary to leave at.
    AwayInTime,
    /// Nothing waits for long while a viable node has room, and nothing is forgotten.
    NoStarvation,
}

impl Rule {
    /// All of them.
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

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Which.
    pub rule: Rule,
    /// The scenario's seed.
    pub seed: u64,
    /// When, in microseconds of virtual time.
    pub at_us: u64,
    /// Of which execution, by number and workload.
    pub execution: String,
    /// What was seen.
    pub detail: String,
    /// What happened to the execution before, the last at the end.
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

/// A broken promise before the world says of whom and when.
pub type Broken = (Rule, String);

/// Looks at one message of a ledger: the state before (none for the first), what happened, the
/// state after.
///
/// # Errors
/// The rule that does not hold, and what was seen.
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
    } else if let Phase::Started(held) = &before.phase {
        let lost = |e: &Event| {
            matches!(
                e,
                Event::Bound {
                    cause: Cause::Lost { .. },
                    ..
                }
            )
        };
        // A part that nobody wants any more is cancelled wherever it is lost.
        let ends = |e: &Event| matches!(e, Event::Cancelled { .. }) && after.part_of().is_some();
        if !events.iter().all(|e| lost(e) || ends(e)) {
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

/// The most rebindings for pressure in so many microseconds with this dwell in milliseconds.
pub fn most_rebindings(passed_us: u64, dwell_ms: u64) -> u64 {
    passed_us.div_ceil(dwell_ms.max(1) * 1_000) + 1
}
