//! Since when devices are idle.

use std::collections::{BTreeMap, BTreeSet};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::places::{DeviceIx, Wants};
use crate::time::Millis;

/// Idle devices, with the time since when without a break.
#[derive(Debug, Default)]
pub(super) struct Idle(BTreeMap<(NodeIx, DeviceIx), Millis>);

impl Idle {
    /// Notes the idle devices. Returns true if there are devices at all.
    pub fn note(&mut self, life: &Lifecycle) -> bool {
        let mut any = false;
        let mut idle = BTreeSet::new();
        for (ix, node) in life.cluster().nodes() {
            for device in node.devices.places(Wants::Device).flatten() {
                let Some(found) = node.devices.get(device) else {
                    continue;
                };
                any |= found.facts.is_some();
                if found.facts.is_some() && found.is_free() {
                    idle.insert((ix, device));
                }
            }
        }
        self.are(idle, life.now.mono);
        any
    }

    /// Exactly these are idle now.
    fn are(&mut self, idle: BTreeSet<(NodeIx, DeviceIx)>, now: Millis) {
        self.0.retain(|at, _| idle.contains(at));
        for at in idle {
            self.0.entry(at).or_insert(now);
        }
    }

    /// Time for which a device has been idle, in ms. None if it is not.
    pub fn ms(&self, now: Millis, at: (NodeIx, DeviceIx)) -> Option<u64> {
        Some(now.since(*self.0.get(&at)?))
    }

    /// True if a device has been idle for so long.
    pub fn any_for(&self, now: Millis, ms: u64) -> bool {
        self.0.values().any(|since| now.since(*since) >= ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_was_busy_for_a_moment_is_idle_anew() {
        let device = |n| (NodeIx::default(), DeviceIx(n));
        let mut idle = Idle::default();
        idle.are([device(0), device(1)].into(), Millis(1_000));
        idle.are([device(1)].into(), Millis(2_000));
        idle.are([device(0), device(1)].into(), Millis(3_000));
        let ms = |n| idle.ms(Millis(5_000), device(n));
        assert_eq!((ms(0), ms(1), ms(2)), (Some(2_000), Some(4_000), None));
        assert!(idle.any_for(Millis(5_000), 4_000));
        assert!(!idle.any_for(Millis(5_000), 4_001));
    }
}
