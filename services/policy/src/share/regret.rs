//! What it would cost if an execution gave way.
//!
//! ```text
//! regret = since its last commit                  what would be computed again if its node failed
//!        + to its next boundary                   what the other one waits for
//!        + move · (1 + times moved already)       σ out and in, process and inputs; to have given
//!                                                 way and be parked counts as a move
//! ```
//!
//! in milliseconds. A move costs what its last ones cost by its ledger, or where it was never moved
//! the mean of all beginnings and its σ over the link. The factor lets nobody be moved again and
//! again while others stay.
//!
//! **Residency**: nobody gives way before it has computed at its place for
//!
//! ```text
//! max(preempt_residency_ms, preempt_residency_moves · move)
//! ```
//!
//! so that in any time T an execution gives way at most T / residency + 1 times, and moving takes
//! no more than about 1 / preempt_residency_moves of its time, however dear a move is.

use super::pause::seconds;
use super::rhythm::{Rhythm, TakeUp};
use crate::cluster::Execution;
use crate::config::Config;
use crate::time::Millis;

/// What it would cost if an execution gave way, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Regret {
    /// Since its last commit.
    pub at_risk_ms: f64,
    /// To its next boundary.
    pub boundary_ms: f64,
    /// One move.
    pub move_ms: f64,
    /// Times that it was moved, or gave way and was parked, already.
    pub moved: u64,
}

/// What one move of an execution costs, in milliseconds.
pub fn move_ms(e: &Execution, rhythm: Option<&Rhythm>, take_up: &TakeUp) -> f64 {
    rhythm
        .and_then(|r| r.move_ms)
        .unwrap_or_else(|| take_up.move_ms(e.state_bytes))
}

/// How long it stays where it is before it gives way to anybody, in milliseconds.
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
    /// Of an execution that computes.
    #[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
    pub fn of(e: &Execution, rhythm: Option<&Rhythm>, take_up: &TakeUp, now: Millis) -> Self {
        let committed = rhythm.and_then(|r| r.last).map_or(e.since, |(_, at)| at);
        let at_risk_ms = now.since(committed.max(e.since)) as f64;
        Self {
            at_risk_ms,
            // One that has shown no boundary yet may be as far from it as it has come.
            boundary_ms: rhythm
                .and_then(|r| r.to_boundary_ms(now))
                .unwrap_or(at_risk_ms),
            move_ms: move_ms(e, rhythm, take_up),
            moved: e.epoch.saturating_sub(1) + rhythm.map_or(0, |r| r.parks),
        }
    }

    /// All of it, in milliseconds.
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
