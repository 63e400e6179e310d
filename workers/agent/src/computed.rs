//! The limit on the time that an execution computes (`limit.computed_s`). Near it the program is
//! told, at the limit its next boundary is its last one, and it is ended if it reaches none.
//!
//! Traded off: work that no commit has saved counts only while it is done. If it is lost, it is
//! computed again and counts once.

use std::time::Duration;

use fiec_kit::frames::Order;
use fiec_schemas::scheduling::Limit;
use fiec_schemas::{ExecutionState, Fault, Submission};
use tokio::time::Instant;

use crate::endings::failure;
use crate::pending_order::PendingOrder;
use crate::runner::{Runner, Wait};

/// The program is told after this many hundredths of its limit.
const NOTICE_PERCENT: u32 = 90;

/// The next step on the way to the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Notify the program.
    Notice,
    /// Make its next boundary the last one.
    End,
    /// No step is left.
    Over,
}

/// How long an execution has computed, and may.
#[derive(Debug)]
pub(crate) struct Computed {
    limit: Duration,
    /// Time up to its last report.
    done: Duration,
    /// Since when it computes beyond that. None while it does not compute.
    since: Option<Instant>,
    next: Step,
    /// Its program knows the order `limit`.
    hears: bool,
}

impl Computed {
    /// None if the execution has no limit. `hears`: its program knows the order `limit` for certain.
    pub fn of(spec: &Submission, hears: bool) -> Option<Self> {
        let Limit { computed_s } = spec.limit?;
        Some(Self {
            limit: Duration::from_secs(computed_s.get().into()),
            done: Duration::ZERO,
            since: None,
            next: Step::Notice,
            hears,
        })
    }

    /// The program has said whether it knows the order `limit`.
    pub fn note(&mut self, hears: bool) {
        self.hears |= hears;
    }

    /// It computes from this state on.
    pub fn begin(&mut self, state: &ExecutionState, now: Instant) {
        self.done = Duration::from_micros(state.limited_us());
        self.since = Some(now);
        if self.next == Step::Over {
            self.next = Step::End;
        }
    }

    /// It goes on where it stood.
    pub fn go_on(&mut self, now: Instant) {
        self.since = Some(now);
    }

    /// It computes no more, or stands.
    pub fn stop(&mut self) {
        self.since = None;
    }

    /// It has reported a boundary after computing for this long.
    pub fn add(&mut self, compute_us: u64, now: Instant) {
        self.done += Duration::from_micros(compute_us);
        self.since = self.since.map(|_| now);
    }

    /// When the next step is due. None while it does not compute.
    pub fn due(&self) -> Option<Instant> {
        let at = match self.next {
            Step::Notice => self.limit * NOTICE_PERCENT / 100,
            Step::End => self.limit,
            Step::Over => return None,
        };
        Some(self.since? + at.saturating_sub(self.done))
    }

    fn left(&self, now: Instant) -> Duration {
        let present = self
            .since
            .map_or(Duration::ZERO, |since| now.duration_since(since));
        self.limit.saturating_sub(self.done + present)
    }
}

impl Runner {
    /// Takes the step that is due.
    pub(crate) async fn near_limit(&mut self) {
        let Some(computed) = &mut self.computed else {
            return;
        };
        match computed.next {
            Step::Notice => {
                computed.next = Step::End;
                let left = computed.left(Instant::now()).as_millis();
                if computed.hears {
                    let left_ms = u64::try_from(left).unwrap_or(u64::MAX);
                    self.order(Order::Limit { left_ms }).await;
                }
            }
            Step::End => {
                computed.next = Step::Over;
                let seconds = computed.limit.as_secs();
                if self.ended || self.cancelling.is_some() {
                    return;
                }
                let reason = format!("it has computed for {seconds} s, its limit.computed_s");
                tracing::info!(seconds, "the execution has computed as long as it may");
                self.pending = Some(PendingOrder::End {
                    event: Box::new(failure(
                        &self.spec,
                        Fault::ComputedLimit,
                        reason,
                        String::new(),
                    )),
                });
                self.obey_pending().await;
                if !self.ended {
                    let grace = self.shared.options.cancel_grace;
                    self.wait = Some((Wait::Kill, Instant::now() + grace));
                }
            }
            Step::Over => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn computed(seconds: u32) -> Computed {
        let line = format!(r#"{{"program":"synthetic@1","limit":{{"computed_s":{seconds}}}}}"#);
        Computed::of(&Submission::parse(line.as_bytes()).unwrap(), true).unwrap()
    }

    #[test]
    fn only_the_time_of_computing_counts() {
        let mut computed = computed(10);
        let start = Instant::now();
        let second = |n: u32| start + Duration::from_secs(n.into());
        assert_eq!(computed.due(), None, "it has not begun");
        computed.go_on(start);
        assert_eq!(computed.due(), Some(second(9)));
        computed.add(3_000_000, second(4));
        assert_eq!(
            computed.due(),
            Some(second(10)),
            "it waited for one of the four seconds"
        );
        computed.stop();
        assert_eq!(computed.due(), None, "it is parked");
        computed.go_on(second(100));
        assert_eq!(computed.due(), Some(second(106)));
        computed.next = Step::End;
        assert_eq!(computed.due(), Some(second(107)));
        assert_eq!(computed.left(second(105)), Duration::from_secs(2));
        computed.add(20_000_000, second(120));
        assert_eq!(computed.due(), Some(second(120)), "at once");
    }
}
