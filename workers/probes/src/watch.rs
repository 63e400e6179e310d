//! Sets triggers for the thresholds in force, and polls the places that triggers do not cover.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::cgroup::Version;
use crate::stall::SOME_LIMIT_PERCENT;
use crate::trigger::cgroup::{MemoryEvents, UsageThreshold};
use crate::trigger::psi::StallTrigger;
use crate::trigger::{EventSource, Trigger};

/// A callback for events that make a vector due at once.
#[derive(Clone, Default)]
pub struct Wake(Option<Arc<dyn Fn() + Send + Sync>>);

impl Wake {
    /// Calls this from threads of the probes. It must not block.
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(call)))
    }

    /// Calls the callback, if there is one.
    pub fn call(&self) {
        if let Some(call) = &self.0 {
            call();
        }
    }
}

impl std::fmt::Debug for Wake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Wake" } else { "no Wake" })
    }
}

/// The present state of a limited cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLevel {
    /// Its kind.
    pub version: Version,
    /// Its directory.
    pub dir: PathBuf,
    /// Its limit in bytes.
    pub limit: u64,
    /// File pages in it, which the kernel can drop. They do not count as used.
    pub cache: u64,
}

/// Returns the gross usage at which used memory reaches this share of the limit.
fn gross_at(group: &GroupLevel, share: f64) -> u64 {
    (group.limit as f64 * share) as u64 + group.cache
}

/// Gross usage close to the limit does not mean pressure: the kernel reclaims file pages first.
const MOST: f64 = 0.98;
/// A threshold is set again if it is wrong by more than this share of the limit.
const SLACK: f64 = 0.01;

struct Armed {
    dir: PathBuf,
    limit: u64,
    share: f64,
    bytes: u64,
}

/// The triggers of a node's memory.
pub(crate) struct PressureWatch {
    source: Option<EventSource>,
    armed: Vec<Armed>,
    events: BTreeSet<PathBuf>,
    stall: Option<f64>,
    covered: BTreeSet<PathBuf>,
    /// Groups without usage thresholds, each logged once.
    polled: BTreeSet<PathBuf>,
}

impl PressureWatch {
    pub(crate) fn start(wake: Wake) -> Self {
        let source = match EventSource::start(move || wake.call()) {
            Ok(source) => Some(source),
            Err(error) => {
                tracing::warn!(%error, "no pressure events: memory is polled");
                None
            }
        };
        Self {
            source,
            armed: Vec::new(),
            events: BTreeSet::new(),
            stall: None,
            covered: BTreeSet::new(),
            polled: BTreeSet::new(),
        }
    }

    /// Sets triggers at these shares of each group's limit, and at this value of M stall. Does
    /// nothing if the present triggers still fit.
    pub(crate) fn arm(&mut self, groups: &[GroupLevel], shares: &[f64], stall: Option<f64>) {
        let Some(source) = &self.source else { return };
        let mut wanted = Vec::new();
        let mut covered = BTreeSet::new();
        let mut events = BTreeSet::new();
        for group in groups {
            if group.version == Version::V2 {
                events.insert(group.dir.clone());
                continue;
            }
            covered.insert(group.dir.clone());
            for share in shares {
                let bytes = gross_at(group, *share);
                if bytes as f64 > group.limit as f64 * MOST {
                    covered.remove(&group.dir);
                    continue;
                }
                wanted.push(Armed {
                    dir: group.dir.clone(),
                    limit: group.limit,
                    share: *share,
                    bytes,
                });
            }
        }
        let fits = |old: &Armed, new: &Armed| {
            old.dir == new.dir
                && old.share == new.share
                && old.limit == new.limit
                && (old.bytes.abs_diff(new.bytes) as f64) <= new.limit as f64 * SLACK
        };
        let same = self.armed.len() == wanted.len()
            && self.armed.iter().zip(&wanted).all(|(o, n)| fits(o, n));
        if same && self.events == events && self.stall == stall {
            self.covered = covered;
            return;
        }
        let mut triggers: Vec<Box<dyn Trigger>> = Vec::new();
        for one in &wanted {
            match UsageThreshold::new(&one.dir, one.bytes) {
                Ok(trigger) => triggers.push(Box::new(trigger)),
                Err(e) => {
                    covered.remove(&one.dir);
                    // Common in a container, where the group is read-only: memory is polled
                    // instead.
                    if self.polled.insert(one.dir.clone()) {
                        tracing::info!(dir = %one.dir.display(), "no usage threshold can be set ({e}); polling memory every {SOONEST:?} to {LATEST:?} instead");
                    }
                }
            }
        }
        for dir in &events {
            match MemoryEvents::new(dir) {
                Ok(trigger) => triggers.push(Box::new(trigger)),
                Err(e) => tracing::debug!(dir = %dir.display(), "no memory events: {e}"),
            }
        }
        if let Some(value) = stall {
            let share = value * SOME_LIMIT_PERCENT / 100.0;
            let of_groups = events.iter().map(|dir| dir.join("memory.pressure"));
            let host = std::iter::once(PathBuf::from("/proc/pressure/memory"));
            for path in host.chain(of_groups) {
                match StallTrigger::some(&path, share) {
                    Ok(trigger) => triggers.push(Box::new(trigger)),
                    Err(e) => tracing::debug!(path = %path.display(), "no stall trigger: {e}"),
                }
            }
        }
        tracing::debug!(
            triggers = ?triggers.iter().map(|t| t.describe()).collect::<Vec<_>>(),
            "pressure events are set"
        );
        source.set(triggers);
        self.armed = wanted;
        self.events = events;
        self.stall = stall;
        self.covered = covered;
    }

    /// Whether every crossing in this group causes a wake.
    pub(crate) fn covers(&self, dir: &Path) -> bool {
        self.covered.contains(dir)
    }
}

/// Fastest growth of memory, in bytes per second: a few processors that fault pages in.
const FILL: f64 = (8u64 << 30) as f64;
/// The shortest and the longest time between two polls of memory.
const SOONEST: Duration = Duration::from_millis(20);
/// See [`SOONEST`].
const LATEST: Duration = Duration::from_millis(250);

/// Returns the time until memory without a trigger is polled again. It is the time to fill (or
/// free) the distance to the nearest threshold, within bounds.
pub(crate) fn next_look(used: u64, limit: u64, shares: &[f64]) -> Duration {
    let nearest = shares
        .iter()
        .map(|share| (used as f64 - limit as f64 * share).abs())
        .fold(f64::INFINITY, f64::min);
    let seconds = (nearest / FILL).clamp(SOONEST.as_secs_f64(), LATEST.as_secs_f64());
    Duration::from_secs_f64(seconds)
}

/// The time between two polls if triggers cover all places, or no threshold is set.
pub(crate) fn at_rest() -> Duration {
    LATEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_look_comes_before_what_lies_between_can_be_filled() {
        const GIB: u64 = 1 << 30;
        assert_eq!(next_look(GIB, 64 * GIB, &[0.9]), LATEST);
        assert_eq!(next_look(GIB, 64 * GIB, &[]), LATEST);
        assert_eq!(
            next_look(89 * GIB, 100 * GIB, &[0.9, 0.7]),
            Duration::from_millis(125)
        );
        assert_eq!(next_look(90 << 20, 100 << 20, &[0.95]), SOONEST);
    }

    #[test]
    fn a_group_that_takes_no_threshold_is_looked_at_instead_and_told_of_once() {
        let dir = tempfile::tempdir().unwrap();
        // As in a container: usage is readable, and events cannot be requested.
        std::fs::write(dir.path().join("memory.usage_in_bytes"), "100\n").unwrap();
        let group = GroupLevel {
            version: Version::V1,
            dir: dir.path().to_owned(),
            limit: 1000,
            cache: 0,
        };
        let mut watch = PressureWatch::start(Wake::default());
        for share in [0.5, 0.6] {
            watch.arm(std::slice::from_ref(&group), &[share], None);
            assert!(!watch.covers(dir.path()));
            assert_eq!(watch.polled, BTreeSet::from([dir.path().to_owned()]));
        }
        std::fs::write(dir.path().join("cgroup.event_control"), "").unwrap();
        watch.arm(std::slice::from_ref(&group), &[0.7], None);
        assert!(watch.covers(dir.path()), "where it can be set, it is");
    }

    #[test]
    fn file_pages_that_can_be_given_up_move_the_threshold() {
        let group = GroupLevel {
            version: Version::V1,
            dir: "/x".into(),
            limit: 1000,
            cache: 50,
        };
        assert_eq!(gross_at(&group, 0.9), 950);
    }
}
