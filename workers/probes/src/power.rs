//! P of the host: power of its processor packages relative to their enforced limits (powercap,
//! RAPL).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::kernel_file::{KernelFile, Once, invalid};
use crate::reading::Make;

/// Shortest time of a mean, in microseconds. Counters move in steps of a millisecond, and a reading
/// must not be of an instant.
const SPAN_US: i64 = 400_000;
/// A mean over a longer time is not present any more, in microseconds.
const OLD_US: i64 = 10_000_000;

/// One processor package.
struct Package {
    name: String,
    counter: KernelFile,
    limit: KernelFile,
    /// The counter wraps to zero after this many microjoules.
    range: u64,
    /// The last reading of the counter, with its time.
    before: Option<(Timestamp, u64)>,
    /// Mean power over the last span in milliwatts.
    mean: Option<(Timestamp, f64)>,
}

impl Package {
    /// Returns the mean power up to `now` in milliwatts. None before the second reading.
    fn power(&mut self, now: Timestamp) -> io::Result<Option<f64>> {
        let Some((at, was)) = self.before else {
            self.before = Some((now, self.counter.number()?));
            return Ok(None);
        };
        let span = now.micros() - at.micros();
        if (0..SPAN_US).contains(&span) {
            return Ok(self.mean.map(|(_, mean)| mean));
        }
        let is = self.counter.number()?;
        self.before = Some((now, is));
        if !(0..=OLD_US).contains(&span) {
            self.mean = None;
            return Ok(None);
        }
        let joules = match is.checked_sub(was) {
            Some(passed) => passed,
            // It has wrapped to zero.
            None => (self.range.saturating_sub(was)).saturating_add(is),
        };
        // Microjoules per microsecond are watts.
        let mean = joules as f64 / span as f64 * 1e3;
        self.mean = Some((now, mean));
        Ok(Some(mean))
    }
}

/// The largest draw / long-term limit of all packages, as a mean since the last reading.
pub struct HostPowerProbe {
    dir: PathBuf,
    packages: Vec<Package>,
    once: Once,
}

impl HostPowerProbe {
    /// A probe of `<sysfs>/class/powercap`.
    pub fn at(sysfs: &Path) -> Self {
        let dir = sysfs.join("class/powercap");
        Self {
            packages: packages(&dir),
            dir,
            once: Once::default(),
        }
    }
}

/// Finds domains that are whole packages: `intel-rapl:N` (AMD has the same names). Their parts
/// `intel-rapl:N:M`, and second interfaces through memory-mapped registers, are skipped.
fn packages(dir: &Path) -> Vec<Package> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    found.sort();
    found
        .into_iter()
        .filter_map(|path| {
            let domain = path.file_name()?.to_str()?;
            domain.strip_prefix("intel-rapl:")?.parse::<u32>().ok()?;
            let name = fs::read_to_string(path.join("name")).ok()?;
            let name = name.trim().to_owned();
            name.starts_with("package").then_some(())?;
            let range = fs::read_to_string(path.join("max_energy_range_uj")).ok();
            Some(Package {
                name,
                counter: KernelFile::new(path.join("energy_uj")),
                limit: KernelFile::new(path.join(long_term(&path))),
                range: range.and_then(|r| r.trim().parse().ok()).unwrap_or(0),
                before: None,
                mean: None,
            })
        })
        .collect()
}

/// Returns the file of the long-term constraint, by its name, or else the first.
fn long_term(path: &Path) -> String {
    (0..8)
        .find(|n| {
            fs::read_to_string(path.join(format!("constraint_{n}_name")))
                .is_ok_and(|name| name.trim() == "long_term")
        })
        .map_or("constraint_0_power_limit_uw".to_owned(), |n| {
            format!("constraint_{n}_power_limit_uw")
        })
}

impl Probe for HostPowerProbe {
    fn name(&self) -> &'static str {
        "power"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let source = self.dir.display().to_string();
        let make = |source| Make {
            signal: Signal::Power,
            device: None,
            unit: "mW",
            source,
            at: now,
        };
        if self.packages.is_empty() {
            out.push(make(&source).missing("no processor package has an energy counter here"));
            return;
        }
        let mut worst: Option<(f64, f64, f64, String)> = None;
        let mut why = None;
        for package in &mut self.packages {
            let read = package.power(now).and_then(|mean| {
                let limit = package.limit.number()? as f64 / 1e3;
                if limit > 0.0 {
                    Ok((mean, limit))
                } else {
                    Err(invalid("the power limit is 0".into()))
                }
            });
            match read {
                Ok((Some(mean), limit)) => {
                    let value = mean / limit;
                    if worst.as_ref().is_none_or(|w| value > w.0) {
                        let source = package.counter.path().display().to_string();
                        worst = Some((value, mean, limit, source));
                    }
                }
                Ok((None, _)) => {
                    why.get_or_insert_with(|| "power is a mean over two readings".to_owned());
                }
                Err(e) => {
                    let what = format!("{} ({}): {e}", package.name, source);
                    self.once.warn("power", &what);
                    // If one package cannot be read the maximum is unknown.
                    out.push(make(&source).missing(what));
                    return;
                }
            }
        }
        out.push(match (worst, why) {
            (_, Some(why)) => make(&source).missing(why),
            (Some((value, mean, limit, source)), None) => {
                make(&source).value(value, mean, Some(limit))
            }
            (None, None) => make(&source).missing("no package was read"),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn set(&self, domain: &str, file: &str, text: &str) {
            let dir = self.0.path().join("class/powercap").join(domain);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(file), format!("{text}\n")).unwrap();
        }

        fn package(&self, n: u32, uj: u64, limit_uw: u64) {
            let domain = format!("intel-rapl:{n}");
            self.set(&domain, "name", &format!("package-{n}"));
            self.set(&domain, "energy_uj", &uj.to_string());
            self.set(&domain, "max_energy_range_uj", "100000000");
            self.set(&domain, "constraint_0_name", "short_term");
            self.set(&domain, "constraint_0_power_limit_uw", "1");
            self.set(&domain, "constraint_1_name", "long_term");
            self.set(
                &domain,
                "constraint_1_power_limit_uw",
                &limit_uw.to_string(),
            );
        }
    }

    fn read(probe: &mut HostPowerProbe, ms: i64) -> Reading {
        let mut out = Vec::new();
        probe.read(Timestamp::from_micros(ms * 1000), &mut out);
        assert_eq!(out.len(), 1);
        crate::conformance::check_all(&out).unwrap();
        out.remove(0)
    }

    #[test]
    fn power_is_the_mean_of_the_hottest_package_against_its_long_term_limit() {
        let fake = Fake::new();
        fake.package(0, 0, 100_000_000);
        fake.package(1, 0, 100_000_000);
        fake.set("intel-rapl:0:0", "name", "core");
        let mut probe = HostPowerProbe::at(fake.0.path());
        assert!(read(&mut probe, 0).missing.unwrap().contains("mean"));
        // 20 J and 40 J in one second.
        fake.package(0, 20_000_000, 100_000_000);
        fake.package(1, 40_000_000, 100_000_000);
        let r = read(&mut probe, 1000);
        assert_eq!(
            (r.value, r.raw, r.limit),
            (Some(0.4), Some(40_000.0), Some(100_000.0))
        );
        assert!(r.source.contains("intel-rapl:1"), "{}", r.source);
        // Within the span the mean does not change.
        fake.package(1, 99_000_000, 100_000_000);
        assert_eq!(read(&mut probe, 1100).value, Some(0.4));
    }

    #[test]
    fn a_counter_that_starts_again_goes_on_and_one_that_goes_is_missing() {
        let fake = Fake::new();
        fake.package(0, 99_000_000, 50_000_000);
        let mut probe = HostPowerProbe::at(fake.0.path());
        read(&mut probe, 0);
        fake.package(0, 9_000_000, 50_000_000);
        assert_eq!(read(&mut probe, 1000).raw, Some(10_000.0));
        fs::remove_dir_all(fake.0.path().join("class")).unwrap();
        // An open file of sysfs keeps failing. A test's file is opened again.
        let mut probe = HostPowerProbe::at(fake.0.path());
        let gone = read(&mut probe, 2000);
        assert!(gone.value.is_none() && gone.missing.is_some());
    }
}
