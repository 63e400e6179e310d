//! Chooses what a park keeps: the device, host memory, or only the committed σ.
//!
//! σ is committed in any case. The difference is the cost for others while something is kept, and
//! the cost of the restart. All costs are in milliseconds of one whole slot:
//!
//! ```text
//! device:  share of the device's memory · t
//! host:    2 · bytes on the device / copy bandwidth  +  share of the host's memory · t
//! nothing: one resume                                (TakeUp::resume_ms)
//! ```
//!
//! t is the expected length of the pause. To keep a share s of a memory for t costs s · t, because
//! no other execution uses that much of a place meanwhile. So a short pause keeps the device and a
//! long one frees it. The break-even lies at t = resume / s: an execution that is cheap to resume is
//! kept for seconds, an expensive one for minutes. An answer is left out if the node cannot keep the
//! execution that way, or has no room for it. To free everything is always possible.

use fiec_schemas::scheduling::Keep;

use crate::lifecycle::ledger::rhythm::transfer_ms;
use crate::time::seconds;

/// Assumed bandwidth between host and device if none was measured, in bytes per second: a slow PCI
/// Express link.
pub const ASSUMED_COPY_BYTES_S: u64 = 4_000_000_000;

/// A memory that could keep an execution's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Its size in bytes.
    pub total_bytes: u64,
    /// Bytes available to this execution during the pause, including those it uses now.
    pub free_bytes: u64,
}

/// A pause that is being considered.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pause {
    /// Its expected length, in ms.
    pub expected_ms: u64,
    /// Bytes that it uses on the device; 0 for a host execution.
    pub device_bytes: u64,
    /// Bytes of host memory of its process.
    pub host_bytes: u64,
    /// Cost of a resume from the last σ, in milliseconds.
    pub resume_ms: f64,
    /// Measured bandwidth between host and device, the slower direction, in bytes per second.
    pub copy_bytes_s: Option<u64>,
    /// The device's memory, if the node can keep data there.
    pub device: Option<Room>,
    /// The host's memory, if the node can keep a process there.
    pub host: Option<Room>,
}

/// The choice, with the cost of each option.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept {
    /// The memory that is kept. None: σ is committed and everything is freed.
    pub keep: Option<Keep>,
    /// Cost of keeping the device, in ms. None if impossible.
    pub device_ms: Option<f64>,
    /// Cost of keeping the process in host memory, in ms. None if impossible.
    pub host_ms: Option<f64>,
    /// Cost of freeing everything, in ms.
    pub free_ms: f64,
}

impl Kept {
    /// In words, with the costs of the other options.
    pub fn in_words(&self) -> String {
        let what = match self.keep {
            Some(Keep::Device) => "it keeps its place",
            Some(Keep::Host) => "it waits in the host's memory",
            None => "it is committed and frees its place",
        };
        let cost = |ms: Option<f64>| ms.map_or_else(|| "not possible".to_owned(), seconds);
        format!(
            "{what} (to keep the device: {}, the host's memory: {}, nothing: {})",
            cost(self.device_ms),
            cost(self.host_ms),
            seconds(self.free_ms)
        )
    }
}

/// Returns the cheapest option; among equals the one that keeps more.
#[expect(clippy::cast_precision_loss, reason = "times and bytes below 2^52")]
pub fn choose(pause: &Pause) -> Kept {
    let t = pause.expected_ms as f64;
    let copy = pause.copy_bytes_s.unwrap_or(ASSUMED_COPY_BYTES_S);
    let rent = |room: Room, bytes: u64| {
        let share = bytes as f64 / room.total_bytes.max(1) as f64;
        (room.free_bytes >= bytes).then_some(share * t)
    };
    let in_host = pause.host.and_then(|room| {
        let bytes = pause.host_bytes.saturating_add(pause.device_bytes);
        Some(rent(room, bytes)? + 2.0 * transfer_ms(pause.device_bytes, copy))
    });
    let on_device = (pause.device_bytes > 0).then_some(()).and_then(|()| {
        let process = rent(pause.host?, pause.host_bytes)?;
        Some(rent(pause.device?, pause.device_bytes)? + process)
    });
    let mut kept = Kept {
        keep: None,
        device_ms: on_device,
        host_ms: in_host,
        free_ms: pause.resume_ms,
    };
    let mut least = kept.free_ms;
    for (keep, cost) in [(Keep::Host, in_host), (Keep::Device, on_device)] {
        if let Some(cost) = cost.filter(|cost| *cost <= least) {
            (kept.keep, least) = (Some(keep), cost);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A training job with 20 GiB on a device of 80 GiB. It resumes a σ of 2 GiB in 10 s.
    fn training(expected_ms: u64) -> Pause {
        Pause {
            expected_ms,
            device_bytes: 20 * GIB,
            host_bytes: 2 * GIB,
            resume_ms: 10_000.0,
            copy_bytes_s: Some(20 * GIB),
            device: Some(Room {
                total_bytes: 80 * GIB,
                free_bytes: 80 * GIB,
            }),
            host: Some(Room {
                total_bytes: 512 * GIB,
                free_bytes: 256 * GIB,
            }),
        }
    }

    #[test]
    fn a_short_pause_keeps_the_device_a_longer_one_the_host_and_a_long_one_nothing() {
        assert_eq!(choose(&training(2_000)).keep, Some(Keep::Device));
        // A restart from σ costs 10 s, the copies 2 s, and the share of the host is small.
        assert_eq!(choose(&training(60_000)).keep, Some(Keep::Host));
        assert_eq!(choose(&training(3_600_000)).keep, None);
    }

    #[test]
    fn a_slow_resume_keeps_more_and_a_fast_one_less() {
        let at = |resume_ms| {
            choose(&Pause {
                resume_ms,
                ..training(300_000)
            })
        };
        assert_eq!(at(48_000.0).keep, Some(Keep::Host), "σ needs 40 s");
        assert_eq!(at(8_020.0).keep, None);
    }

    #[test]
    fn what_has_no_room_or_is_not_offered_is_left_out() {
        let mut pause = training(2_000);
        pause.device = None;
        assert_eq!(choose(&pause).keep, Some(Keep::Host));
        pause.host = Some(Room {
            total_bytes: 512 * GIB,
            free_bytes: GIB,
        });
        let kept = choose(&pause);
        assert_eq!(
            (kept.keep, kept.host_ms, kept.device_ms),
            (None, None, None)
        );
        assert!(
            kept.in_words().contains("not possible"),
            "{}",
            kept.in_words()
        );
    }

    #[test]
    fn an_execution_on_the_host_keeps_its_process_for_seconds() {
        let mut pause = training(10_000);
        (pause.device_bytes, pause.device) = (0, None);
        let kept = choose(&pause);
        assert_eq!((kept.keep, kept.device_ms), (Some(Keep::Host), None));
        pause.expected_ms = 24 * 3_600_000;
        assert_eq!(choose(&pause).keep, None);
    }
}
