//! Energy counters of the host's processors and memory (powercap, RAPL).

use std::fs;
use std::io;
use std::path::Path;

use crate::kernel_file::{KernelFile, invalid};

/// A counter of microjoules that wraps to zero after its range.
struct Zone {
    counter: KernelFile,
    range: Option<u64>,
    before: Option<u64>,
}

impl Zone {
    /// Returns the increase since the last call. None at the first.
    fn rise(&mut self) -> io::Result<Option<u64>> {
        let now = self.counter.number()?;
        let Some(before) = self.before.replace(now) else {
            return Ok(None);
        };
        match (now.checked_sub(before), self.range) {
            (Some(rise), _) => Ok(Some(rise)),
            (None, Some(range)) if before <= range => Ok(Some((range - before) + now)),
            (None, _) => Err(invalid(format!(
                "the counter fell from {before} to {now} and says no range"
            ))),
        }
    }
}

/// Counters that add up to the host's energy: processor packages with their memory, or the whole
/// platform if no package has a counter.
pub(super) struct HostCounters(Vec<Zone>);

impl HostCounters {
    /// Finds the counters of `<sysfs>/class/powercap`. Parts of a package (`core`, `uncore`), and
    /// second interfaces to the same package, are not counted twice.
    ///
    /// # Errors
    /// The reason, for people, if there is none or one cannot be read.
    pub(super) fn find(sysfs: &Path) -> Result<Self, String> {
        let dir = sysfs.join("class/powercap");
        let entries = fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let mut zones = Vec::new();
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let is_rapl = name.to_str().is_some_and(|n| n.starts_with("intel-rapl:"));
            if let (true, Ok(kind)) = (is_rapl, fs::read_to_string(path.join("name"))) {
                zones.push((kind.trim().to_owned(), path));
            }
        }
        let package = |kind: &str| kind.starts_with("package") || kind == "dram";
        let whole = zones.iter().any(|(kind, _)| kind.starts_with("package"));
        zones.retain(|(kind, _)| if whole { package(kind) } else { kind == "psys" });
        if zones.is_empty() {
            return Err(format!(
                "no processor package has a counter in {}",
                dir.display()
            ));
        }
        let mut counters = Self(Vec::new());
        for (_, path) in zones {
            let range = fs::read_to_string(path.join("max_energy_range_uj")).ok();
            let mut zone = Zone {
                counter: KernelFile::new(path.join("energy_uj")),
                range: range.and_then(|r| r.trim().parse().ok()),
                before: None,
            };
            // Many kernels allow only root to read it.
            zone.rise()
                .map_err(|e| format!("{}: {e}", zone.counter.path().display()))?;
            counters.0.push(zone);
        }
        Ok(counters)
    }

    /// Returns the microjoules since the last call. None after an error, which starts a new count.
    ///
    /// # Errors
    /// One of them cannot be read: the sum of the others would be too small.
    pub(super) fn rise(&mut self) -> io::Result<Option<u64>> {
        let mut sum = Some(0u64);
        let mut failed = None;
        for zone in &mut self.0 {
            match zone.rise() {
                Ok(rise) => sum = sum.zip(rise).map(|(sum, rise)| sum.saturating_add(rise)),
                Err(e) => {
                    let what = format!("{}: {e}", zone.counter.path().display());
                    failed = Some(io::Error::new(e.kind(), what));
                }
            }
        }
        match failed {
            Some(error) => {
                self.0.iter_mut().for_each(|zone| zone.before = None);
                Err(error)
            }
            None => Ok(sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(zones: &[(&str, &str, u64)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (zone, name, uj) in zones {
            let at = dir.path().join("class/powercap").join(zone);
            fs::create_dir_all(&at).unwrap();
            fs::write(at.join("name"), format!("{name}\n")).unwrap();
            fs::write(at.join("max_energy_range_uj"), "1000\n").unwrap();
            fs::write(at.join("energy_uj"), format!("{uj}\n")).unwrap();
        }
        dir
    }

    fn put(dir: &tempfile::TempDir, zone: &str, uj: u64) {
        let at = dir.path().join("class/powercap").join(zone);
        fs::write(at.join("energy_uj"), format!("{uj}\n")).unwrap();
    }

    #[test]
    fn packages_and_their_memory_are_counted_and_nothing_twice() {
        let dir = tree(&[
            ("intel-rapl:0", "package-0", 100),
            ("intel-rapl:0:0", "core", 7),
            ("intel-rapl:0:1", "dram", 200),
            ("intel-rapl:1", "psys", 9),
            ("intel-rapl-mmio:0", "package-0", 9),
        ]);
        let mut counters = HostCounters::find(dir.path()).unwrap();
        for zone in [
            "intel-rapl:0",
            "intel-rapl:0:0",
            "intel-rapl:0:1",
            "intel-rapl:1",
        ] {
            put(&dir, zone, 500);
        }
        assert_eq!(counters.rise().unwrap(), Some(400 + 300));
    }

    #[test]
    fn a_counter_that_starts_again_from_zero_has_passed_the_rest_of_its_range() {
        let dir = tree(&[("intel-rapl:0", "package-0", 990)]);
        let mut counters = HostCounters::find(dir.path()).unwrap();
        put(&dir, "intel-rapl:0", 15);
        assert_eq!(counters.rise().unwrap(), Some(25));
        put(&dir, "intel-rapl:0", 15);
        assert_eq!(counters.rise().unwrap(), Some(0));
    }

    #[test]
    fn one_that_disappears_makes_the_sum_unknown_until_it_is_back() {
        let dir = tree(&[
            ("intel-rapl:0", "package-0", 100),
            ("intel-rapl:1", "package-1", 100),
        ]);
        let mut counters = HostCounters::find(dir.path()).unwrap();
        let file = dir.path().join("class/powercap/intel-rapl:1/energy_uj");
        fs::remove_file(&file).unwrap();
        // An open file of sysfs fails once its device is gone. An ordinary file does not.
        counters.0[1].counter = KernelFile::new(&file);
        put(&dir, "intel-rapl:0", 900);
        let error = counters.rise().unwrap_err().to_string();
        assert!(error.contains("intel-rapl:"), "{error}");
        fs::write(&file, "300").unwrap();
        assert_eq!(counters.rise().unwrap(), None);
        put(&dir, "intel-rapl:0", 950);
        assert_eq!(counters.rise().unwrap(), Some(50));
    }

    #[test]
    fn a_machine_without_counters_says_why() {
        let nothing = tempfile::tempdir().unwrap();
        let why = |dir: &Path| HostCounters::find(dir).err().unwrap();
        assert!(why(nothing.path()).contains("class/powercap"));
        let parts = tree(&[("intel-rapl:0:0", "core", 1)]);
        assert!(why(parts.path()).contains("no processor package"));
        let garbled = tree(&[("intel-rapl:0", "package-0", 1)]);
        fs::write(
            garbled.path().join("class/powercap/intel-rapl:0/energy_uj"),
            "x",
        )
        .unwrap();
        assert!(why(garbled.path()).contains("energy_uj"));
    }
}
