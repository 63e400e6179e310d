//! T of the host: its hottest sensor, relative to the idle temperature and the throttling
//! temperature.

use std::fs;
use std::path::{Path, PathBuf};

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::device::IDLE_CELSIUS;
use crate::kernel_file::{KernelFile, Once};
use crate::reading::Make;

/// Trip points outside are placeholders of firmware, in °C.
const CREDIBLE: std::ops::Range<f64> = 40.0..150.0;

struct Sensor {
    /// In thousandths of a degree.
    file: KernelFile,
    trip: f64,
    /// Logs once that it cannot be read. The others continue.
    once: Once,
}

/// The largest (T − 30 °C) / (trip − 30 °C) of all sensors. Sensors are thermal zones with a
/// passive, hot or critical trip point (the first of these), and hardware monitors with a critical
/// or maximal temperature. Sensors without one are skipped.
pub struct HostThermalProbe {
    dir: PathBuf,
    sensors: Vec<Sensor>,
}

impl HostThermalProbe {
    /// A probe of `<sysfs>/class/thermal` and `<sysfs>/class/hwmon`.
    pub fn at(sysfs: &Path) -> Self {
        let mut sensors = zones(&sysfs.join("class/thermal"));
        sensors.extend(monitors(&sysfs.join("class/hwmon")));
        Self {
            dir: sysfs.join("class/thermal"),
            sensors,
        }
    }
}

fn sorted(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let named = |path: &PathBuf| {
        path.file_name()
            .and_then(|n| n.to_str())
            .is_some_and(|n| n.starts_with(prefix))
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(named).collect();
    found.sort();
    found
}

fn celsius(path: &Path) -> Option<f64> {
    let text = fs::read_to_string(path).ok()?;
    let degrees = text.trim().parse::<f64>().ok()? / 1e3;
    CREDIBLE.contains(&degrees).then_some(degrees)
}

fn zones(dir: &Path) -> Vec<Sensor> {
    sorted(dir, "thermal_zone")
        .into_iter()
        .filter_map(|zone| {
            let trips: Vec<(String, f64)> = (0..32)
                .filter_map(|n| {
                    let kind =
                        fs::read_to_string(zone.join(format!("trip_point_{n}_type"))).ok()?;
                    let at = celsius(&zone.join(format!("trip_point_{n}_temp")))?;
                    Some((kind.trim().to_owned(), at))
                })
                .collect();
            let trip = ["passive", "hot", "critical"]
                .into_iter()
                .find_map(|kind| {
                    let of_kind = trips.iter().filter(|(k, _)| k == kind).map(|(_, t)| *t);
                    of_kind.reduce(f64::min)
                })?;
            Some(Sensor {
                file: KernelFile::new(zone.join("temp")),
                trip,
                once: Once::default(),
            })
        })
        .collect()
}

fn monitors(dir: &Path) -> Vec<Sensor> {
    let inputs = sorted(dir, "hwmon")
        .into_iter()
        .flat_map(|monitor| sorted(&monitor, "temp"));
    inputs
        .filter_map(|input| {
            let stem = input.file_name()?.to_str()?.strip_suffix("_input")?;
            let beside = |suffix| celsius(&input.with_file_name(format!("{stem}_{suffix}")));
            let trip = [beside("crit"), beside("max")]
                .into_iter()
                .flatten()
                .reduce(f64::min)?;
            Some(Sensor {
                file: KernelFile::new(&input),
                trip,
                once: Once::default(),
            })
        })
        .collect()
}

impl Probe for HostThermalProbe {
    fn name(&self) -> &'static str {
        "thermal"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let make = |source| Make {
            signal: Signal::Thermal,
            device: None,
            unit: "celsius",
            source,
            at: now,
        };
        let mut hottest: Option<(f64, f64, f64, String)> = None;
        let mut why = "no sensor with a critical temperature here".to_owned();
        for sensor in &mut self.sensors {
            let source = sensor.file.path().display().to_string();
            let degrees = sensor.file.read_up_to(64).and_then(|text| {
                let parsed = text.trim().parse::<f64>();
                parsed.map_err(|_| crate::kernel_file::invalid(format!("not a number: {text:?}")))
            });
            match degrees {
                Ok(thousandths) => {
                    let now = thousandths / 1e3;
                    let value = (now - IDLE_CELSIUS) / (sensor.trip - IDLE_CELSIUS);
                    if hottest.as_ref().is_none_or(|h| value > h.0) {
                        hottest = Some((value, now, sensor.trip, source));
                    }
                }
                // A sensor of a sleeping part gives no reading. The others count.
                Err(e) => {
                    why = format!("{source}: {e}");
                    sensor.once.warn("thermal", &why);
                }
            }
        }
        out.push(match hottest {
            Some((value, now, trip, source)) => make(&source).value(value, now, Some(trip)),
            None => make(&self.dir.display().to_string()).missing(why),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, file: &str, text: &str) {
        let path = dir.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn read(probe: &mut HostThermalProbe) -> Reading {
        let mut out = Vec::new();
        probe.read(Timestamp::from_micros(1), &mut out);
        crate::conformance::check_all(&out).unwrap();
        out.remove(0)
    }

    #[test]
    fn the_sensor_nearest_to_its_trip_counts_and_placeholders_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |file: &str, text: &str| write(dir.path(), file, text);
        at("class/thermal/thermal_zone0/temp", "60000");
        at("class/thermal/thermal_zone0/trip_point_0_type", "critical");
        at("class/thermal/thermal_zone0/trip_point_0_temp", "110000");
        at("class/thermal/thermal_zone0/trip_point_1_type", "passive");
        at("class/thermal/thermal_zone0/trip_point_1_temp", "90000");
        at("class/thermal/thermal_zone1/temp", "99000");
        at("class/thermal/thermal_zone1/trip_point_0_type", "critical");
        at("class/thermal/thermal_zone1/trip_point_0_temp", "-274000");
        at("class/hwmon/hwmon0/temp1_input", "40000");
        at("class/hwmon/hwmon0/temp1_crit", "100000");
        let mut probe = HostThermalProbe::at(dir.path());
        let r = read(&mut probe);
        assert_eq!(
            (r.value, r.raw, r.limit),
            (Some(0.5), Some(60.0), Some(90.0))
        );
        at("class/hwmon/hwmon0/temp1_input", "93000");
        let r = read(&mut probe);
        assert!((r.value.unwrap() - 0.9).abs() < 1e-12 && r.source.contains("hwmon0"));
        fs::remove_file(dir.path().join("class/thermal/thermal_zone0/temp")).unwrap();
        assert!(
            read(&mut HostThermalProbe::at(dir.path()))
                .source
                .contains("hwmon0")
        );
    }

    #[test]
    fn a_machine_without_sensors_says_so() {
        let r = read(&mut HostThermalProbe::at(Path::new("/nonexistent")));
        assert!(r.value.is_none() && r.missing.unwrap().contains("no sensor"));
    }
}
