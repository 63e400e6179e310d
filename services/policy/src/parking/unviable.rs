//! Decides whether an execution goes on, waits or is suspended when neither its place nor any other
//! is viable.
//!
//! All costs are in ms of its time, over the expected length w of the pressure:
//!
//! ```text
//! go on:    lost · w + risk · (since its last commit + one resume)
//! wait:     w + cost of keeping its place                  (crate::parking::pause)
//! suspend:  w + one resume                                 (TakeUp::resume_ms)
//! ```
//!
//! * **w** is the time that the pressure has lasted, and twice the dwell at least. Pressure is
//!   expected to last as long again as it has lasted (the mean residual life of a heavy-tailed
//!   time).
//! * **lost** is the share of its time that the pressure takes. For contention and memory stall it
//!   is the reading, which measures just that. For power and temperature, whose hardware throttles
//!   itself, it is half of the excess over the threshold. For others it is 0.
//! * **risk** is 1 if memory is exhausted (98 % and more), because then a process is killed, and 0
//!   otherwise.
//!
//! So going on is cheapest unless memory runs out: a slow program still computes. With exhausted
//! memory, a wait with a live process would not free memory. On a host only a suspension helps. On
//! a device the execution waits in host memory, unless the copies take longer than a restart from
//! σ. A submission that says `wait` or `suspend` wants to leave its place in any case.

use fiec_schemas::scheduling::{Keep, WhenUnviable};
use fiec_schemas::{Evidence, Signal};

use crate::parking::pause::{self, Kept, Pause};

/// From this reading of memory on, a process is about to be killed.
pub const EXHAUSTED: f64 = 0.98;

/// The pressure on a place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pressure {
    /// Its signal.
    pub signal: Signal,
    /// True for a device, false for the host.
    pub on_device: bool,
    /// Its reading.
    pub value: f64,
    /// The threshold's upper limit.
    pub high: f64,
    /// Time since it began, in ms.
    pub lasted_ms: u64,
    /// The dwell of its threshold, in milliseconds.
    pub dwell_ms: u64,
}

impl Pressure {
    /// Reads it from an event. `lasted_ms` is by the clock of the caller.
    pub fn of(evidence: &Evidence, lasted_ms: u64) -> Self {
        Self {
            signal: evidence.signal,
            on_device: evidence.device.is_some(),
            value: evidence.value,
            high: evidence.threshold.high,
            lasted_ms,
            dwell_ms: u64::from(evidence.threshold.dwell_ms),
        }
    }

    /// Its expected remaining length, in ms.
    pub fn expected_ms(&self) -> u64 {
        self.lasted_ms.max(self.dwell_ms.saturating_mul(2))
    }

    /// The share of its time that an execution loses to it.
    pub fn lost(&self) -> f64 {
        match self.signal {
            Signal::Contention | Signal::MemoryStall => self.value.clamp(0.0, 1.0),
            Signal::Power | Signal::Thermal => {
                let beyond = (self.value - self.high) / (1.0 - self.high).max(0.01);
                0.5 * beyond.clamp(0.0, 1.0)
            }
            Signal::Memory if self.value >= EXHAUSTED => 1.0,
            _ => 0.0,
        }
    }

    fn risk(&self) -> f64 {
        match self.signal {
            Signal::Memory if self.value >= EXHAUSTED => 1.0,
            _ => 0.0,
        }
    }
}

/// What happens to the execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It stays until there is a place to move to.
    GoOn,
    /// It is parked: it commits a boundary and waits in its place.
    Wait(Keep),
    /// It commits a boundary and frees its place.
    Suspend,
}

/// The answer with its reason.
#[derive(Debug, Clone, PartialEq)]
pub struct Weighed {
    /// The answer.
    pub answer: Answer,
    /// The reason.
    pub reason: String,
}

/// Compares the options. `pressure`: none if its program asks for more than its place has, so that
/// going on gains nothing. `pause`: its memory and what the node can keep; none if its node or its
/// program cannot park. `at_risk_ms`: time since its last commit.
#[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
pub fn weigh(
    wanted: WhenUnviable,
    pressure: Option<&Pressure>,
    pause: Option<&Pause>,
    at_risk_ms: u64,
) -> Weighed {
    let said = |answer, word: &str| Weighed {
        answer,
        reason: format!("its submission says {word}"),
    };
    let expected_ms =
        pressure.map_or_else(|| pause.map_or(0, |p| p.expected_ms), Pressure::expected_ms);
    let kept: Option<Kept> = pause.map(|pause| {
        let mut pause = Pause {
            expected_ms,
            ..*pause
        };
        // The memory that presses is not kept.
        match pressure {
            Some(p) if p.signal == Signal::Memory && p.on_device => pause.device = None,
            Some(p) if p.signal == Signal::Memory => pause.host = None,
            _ => {}
        }
        pause::choose(&pause)
    });
    match wanted {
        WhenUnviable::Migrate => return said(Answer::GoOn, "migrate"),
        WhenUnviable::Suspend => return said(Answer::Suspend, "suspend"),
        WhenUnviable::Wait => {
            // Choose the cheaper option that is possible, whatever it costs.
            let keep = kept.and_then(|kept| match (kept.device_ms, kept.host_ms) {
                (Some(device), Some(host)) if host < device => Some(Keep::Host),
                (Some(_), _) => Some(Keep::Device),
                (None, host) => host.map(|_| Keep::Host),
            });
            return match keep {
                Some(keep) => said(Answer::Wait(keep), "wait"),
                None => said(
                    Answer::Suspend,
                    "wait, and nothing of it can be kept where it is",
                ),
            };
        }
        WhenUnviable::Cheapest => {}
    }
    let w = expected_ms as f64;
    let resume_ms = kept.as_ref().map_or(0.0, |k| k.free_ms);
    let go_on = match pressure {
        Some(p) => p.lost() * w + p.risk() * (at_risk_ms as f64 + resume_ms),
        None => f64::INFINITY,
    };
    let stop = match &kept {
        Some(kept) => [Some(kept.free_ms), kept.device_ms, kept.host_ms]
            .into_iter()
            .flatten()
            .fold(f64::INFINITY, f64::min),
        None => resume_ms,
    };
    let costs = format!(
        "for the {:.0} s that it is expected to last, going on loses {}, stopping {:.1} s",
        w / 1_000.0,
        if go_on.is_finite() {
            format!("{:.1} s", go_on / 1_000.0)
        } else {
            "all of it".to_owned()
        },
        (w + stop) / 1_000.0
    );
    if go_on <= w + stop {
        return Weighed {
            answer: Answer::GoOn,
            reason: costs,
        };
    }
    let (answer, words) = match &kept {
        Some(kept) => (
            kept.keep.map_or(Answer::Suspend, Answer::Wait),
            kept.in_words(),
        ),
        None => (
            Answer::Suspend,
            "nothing can be kept where it is".to_owned(),
        ),
    };
    Weighed {
        answer,
        reason: format!("{costs}: {words}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parking::pause::Room;

    const GIB: u64 = 1 << 30;

    fn pressure(signal: Signal, value: f64) -> Pressure {
        Pressure {
            signal,
            on_device: false,
            value,
            high: 0.9,
            lasted_ms: 3_000,
            dwell_ms: 2_000,
        }
    }

    fn room(total: u64) -> Option<Room> {
        Some(Room {
            total_bytes: total,
            free_bytes: total,
        })
    }

    /// An execution on a device of 80 GiB with a σ of 1 GiB.
    fn on_device() -> Pause {
        Pause {
            expected_ms: 0,
            device_bytes: 40 * GIB,
            host_bytes: GIB,
            resume_ms: 4_000.0,
            copy_bytes_s: Some(20 * GIB),
            device: room(80 * GIB),
            host: room(256 * GIB),
        }
    }

    #[test]
    fn a_program_that_is_slowed_down_goes_on_and_one_that_would_be_killed_does_not() {
        let cheapest =
            |p: Pressure| weigh(WhenUnviable::Cheapest, Some(&p), Some(&on_device()), 500);
        for p in [
            pressure(Signal::Contention, 0.99),
            pressure(Signal::Memory, 0.95),
            pressure(Signal::Power, 1.0),
        ] {
            assert_eq!(cheapest(p).answer, Answer::GoOn, "{p:?}");
        }
        let killed = cheapest(pressure(Signal::Memory, 0.99));
        assert_eq!(killed.answer, Answer::Suspend, "{}", killed.reason);
        assert!(
            killed.reason.contains("going on loses 8"),
            "{}",
            killed.reason
        );
    }

    #[test]
    fn what_presses_on_a_device_waits_in_the_hosts_memory() {
        let mut p = pressure(Signal::Memory, 0.99);
        p.on_device = true;
        let weigh = |pause: &Pause| weigh(WhenUnviable::Cheapest, Some(&p), Some(pause), 9_000);
        // 0.8 s to copy 8 GiB twice, against 4 s to restart.
        let mut pause = on_device();
        pause.device_bytes = 8 * GIB;
        let found = weigh(&pause);
        assert_eq!(found.answer, Answer::Wait(Keep::Host), "{}", found.reason);
        // 4 s to copy 40 GiB twice, plus the host memory.
        let found = weigh(&on_device());
        assert_eq!(found.answer, Answer::Suspend, "{}", found.reason);
    }

    #[test]
    fn what_the_submission_says_is_done_as_far_as_it_can_be() {
        let busy = pressure(Signal::Contention, 0.95);
        let say = |wanted, pause: Option<&Pause>| weigh(wanted, Some(&busy), pause, 0).answer;
        let device = on_device();
        assert_eq!(say(WhenUnviable::Migrate, Some(&device)), Answer::GoOn);
        assert_eq!(say(WhenUnviable::Suspend, Some(&device)), Answer::Suspend);
        assert_eq!(
            say(WhenUnviable::Wait, Some(&device)),
            Answer::Wait(Keep::Device)
        );
        assert_eq!(say(WhenUnviable::Wait, None), Answer::Suspend);
        let full = pressure(Signal::Memory, 0.99);
        let waits = weigh(WhenUnviable::Wait, Some(&full), Some(&device), 0);
        assert_eq!(waits.answer, Answer::Suspend, "memory is what presses");
    }

    #[test]
    fn one_that_asked_for_more_never_goes_on_without_it() {
        let found = weigh(WhenUnviable::Cheapest, None, Some(&on_device()), 0);
        assert_ne!(found.answer, Answer::GoOn);
        let found = weigh(WhenUnviable::Cheapest, None, None, 0);
        assert_eq!(found.answer, Answer::Suspend);
    }

    #[test]
    fn the_lost_share_is_that_of_the_stall_and_grows_with_heat_beyond_the_limit() {
        let lost = |signal, value| (pressure(signal, value).lost() * 1_000.0).round();
        assert_eq!(lost(Signal::Contention, 0.3), 300.0);
        assert_eq!(lost(Signal::Thermal, 0.9), 0.0);
        assert_eq!(lost(Signal::Thermal, 0.95), 250.0);
        assert_eq!(lost(Signal::Power, 1.0), 500.0);
        assert_eq!(lost(Signal::Memory, 0.97), 0.0);
        assert_eq!(lost(Signal::Memory, EXHAUSTED), 1_000.0);
    }
}
