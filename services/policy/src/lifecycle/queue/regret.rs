//! The cost of a preemption.
//!
//! ```text
//! regret = since its last commit                  work that a failure of its node would lose
//!        + to its next boundary                   wait of the preempting execution
//!        + move · (1 + times moved already)       σ out and in, process and inputs; a park
//!                                                 after a preemption counts as a move
//! ```
//!
//! in ms. A move costs the mean of the execution's own moves by its ledger. Without own moves it
//! costs the mean start of all executions, plus σ over the link. The factor prevents that one
//! execution is moved again and again while others stay.
//!
//! **Residency**: an execution is not preempted before it has computed in its place for
//!
//! ```text
//! max(preempt_residency_ms, preempt_residency_moves · move)
//! ```
//!
//! so that in any time T it is preempted at most T / residency + 1 times. Moves take no more than
//! about 1 / preempt_residency_moves of its time, however expensive a move is.

use crate::config::Config;
use crate::lifecycle::cluster::Execution;
use crate::lifecycle::ledger::rhythm::{Rhythm, TakeUp};
use crate::time::Millis;
use crate::time::seconds;

/// The cost of preempting an execution, in ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Regret {
    /// Time since its last commit.
    pub at_risk_ms: f64,
    /// Time to its next boundary.
    pub boundary_ms: f64,
    /// Cost of one move.
    pub move_ms: f64,
    /// Number of its moves, and of parks after a preemption.
    pub moved: u64,
}

/// Cost of one move of an execution, in ms.
pub fn move_ms(e: &Execution, rhythm: Option<&Rhythm>, take_up: &TakeUp) -> f64 {
    rhythm
        .and_then(|r| r.move_ms)
        .unwrap_or_else(|| take_up.move_ms(e.state_bytes))
}

/// Shortest stay in a place before a preemption, in ms.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times below 2^52, not negative"
)]
pub fn residency_ms(config: &Config, move_ms: f64) -> u64 {
    let by_cost = config.preempt_residency_moves as f64 * move_ms;
    config.preempt_residency_ms.max(by_cost as u64)
}

impl Regret {
    /// The regret of a running execution.
    #[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
    pub fn of(e: &Execution, rhythm: Option<&Rhythm>, take_up: &TakeUp, now: Millis) -> Self {
        let committed = rhythm.and_then(|r| r.last).map_or(e.since, |(_, at)| at);
        let at_risk_ms = now.since(committed.max(e.since)) as f64;
        Self {
            at_risk_ms,
            // Without a known boundary, assume as much ahead as has passed.
            boundary_ms: rhythm
                .and_then(|r| r.to_boundary_ms(now))
                .unwrap_or(at_risk_ms),
            move_ms: move_ms(e, rhythm, take_up),
            moved: e.epoch.saturating_sub(1) + rhythm.map_or(0, |r| r.parks),
        }
    }

    /// The sum, in ms.
    #[expect(clippy::cast_precision_loss, reason = "a count of moves")]
    pub fn total_ms(&self) -> f64 {
        self.at_risk_ms + self.boundary_ms + self.move_ms * (1.0 + self.moved as f64)
    }

    /// In words.
    pub fn in_words(&self) -> String {
        let times = match self.moved {
            0 => "never moved or set aside".to_owned(),
            1 => "moved or set aside once".to_owned(),
            n => format!("moved or set aside {n} times"),
        };
        format!(
            "{} ({} since its last commit, {} to its next boundary, {} to move, {times})",
            seconds(self.total_ms()),
            seconds(self.at_risk_ms),
            seconds(self.boundary_ms),
            seconds(self.move_ms),
        )
    }
}
