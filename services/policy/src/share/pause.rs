//! What a pause keeps: the device, the host's memory, or nothing but the committed σ.
//!
//! σ is committed in any case, so what differs is what keeping costs others and what going on
//! costs the execution. All costs are milliseconds of one whole place:
//!
//! ```text
//! device:  share of the device's memory · t
//! host:    2 · bytes on the device / copy bandwidth  +  share of the host's memory · t
//! nothing: σ / link bandwidth  +  take-up
//! ```
//!
//! t is the length that the pause is expected to have, take-up what it took to begin on a node by
//! the last measurements (process, inputs). To keep a share s of a memory for t costs s · t, as that
//! much of a place is nobody else's meanwhile. So a short pause keeps the device, a long one frees
//! it, and the break-even lies at t = (σ / link + take-up) / s: what is small to move is kept for
//! seconds, what is large for minutes. What a node cannot keep, or has no room for, is left out;
//! to free everything is always possible.

use fiec_schemas::scheduling::Keep;

/// A bandwidth that is assumed where none was measured, in bytes a second: a gigabit link.
pub const ASSUMED_LINK_BYTES_S: u64 = 125_000_000;
/// The same between host and device: a slow PCI Express link.
pub const ASSUMED_COPY_BYTES_S: u64 = 4_000_000_000;

/// A memory that could keep something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Its bytes in all.
    pub total_bytes: u64,
    /// Bytes of it that are free for this while it is paused, what it holds there now included.
    pub free_bytes: u64,
}

/// A pause that is being thought of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pause {
    /// How long it is expected to last, in milliseconds.
    pub expected_ms: u64,
    /// Bytes of the last σ.
    pub state_bytes: u64,
    /// Bytes that it has on the device; 0 where it computes on the host.
    pub device_bytes: u64,
    /// Bytes of the host's memory that its process has.
    pub host_bytes: u64,
    /// Measured bandwidth of the link over which σ comes back, in bytes a second.
    pub link_bytes_s: Option<u64>,
    /// Measured bandwidth between host and device, the slower direction, in bytes a second.
    pub copy_bytes_s: Option<u64>,
    /// What it takes to begin on a node again, σ apart, in milliseconds.
    pub take_up_ms: u64,
    /// The device's memory, where the node can keep something there.
    pub device: Option<Room>,
    /// The host's memory, where the node can keep a process there.
    pub host: Option<Room>,
}

/// What a pause keeps and what each answer would cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept {
    /// What is kept; none: σ is committed and everything freed.
    pub keep: Option<Keep>,
    /// Cost of keeping the device, in milliseconds; none where that is not possible.
    pub device_ms: Option<f64>,
    /// Cost of keeping the process in the host's memory.
    pub host_ms: Option<f64>,
    /// Cost of freeing everything.
    pub free_ms: f64,
}

impl Kept {
    /// In words, with what the other answers would have cost.
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

/// Milliseconds as people read them.
pub(crate) fn seconds(ms: f64) -> String {
    if ms < 1_000.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1_000.0)
    }
}

/// How long bytes take at a bandwidth, in milliseconds.
#[expect(clippy::cast_precision_loss, reason = "bytes below 2^52")]
pub fn transfer_ms(bytes: u64, bytes_s: u64) -> f64 {
    bytes as f64 * 1_000.0 / bytes_s.max(1) as f64
}

/// The answer that costs least; of equal ones the one that keeps more.
#[expect(clippy::cast_precision_loss, reason = "times and bytes below 2^52")]
pub fn choose(pause: &Pause) -> Kept {
    let t = pause.expected_ms as f64;
    let link = pause.link_bytes_s.unwrap_or(ASSUMED_LINK_BYTES_S);
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
    let free_ms = transfer_ms(pause.state_bytes, link) + pause.take_up_ms as f64;
    let mut kept = Kept {
        keep: None,
        device_ms: on_device,
        host_ms: in_host,
        free_ms,
    };
    let mut least = free_ms;
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

    /// A training job with 20 GiB on a device of 80 GiB, and a σ of 2 GiB.
    fn training(expected_ms: u64) -> Pause {
        Pause {
            expected_ms,
            state_bytes: 2 * GIB,
            device_bytes: 20 * GIB,
            host_bytes: 2 * GIB,
            link_bytes_s: Some(GIB),
            copy_bytes_s: Some(20 * GIB),
            take_up_ms: 8_000,
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
        // 10 s are lost to go on from σ, 2 s to copy, and the host's share is small.
        assert_eq!(choose(&training(60_000)).keep, Some(Keep::Host));
        assert_eq!(choose(&training(3_600_000)).keep, None);
    }

    #[test]
    fn a_slow_link_keeps_more_and_a_fast_one_less() {
        let at = |link| {
            choose(&Pause {
                link_bytes_s: Some(link),
                ..training(300_000)
            })
        };
        assert_eq!(at(GIB / 20).keep, Some(Keep::Host), "40 s to come back");
        assert_eq!(at(100 * GIB).keep, None);
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
