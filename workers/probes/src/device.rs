//! M, P, T, C, F and E of each device: from raw facts to readings.
//!
//! A [`DeviceSource`] delivers facts (NVML, or a test's source). [`readings`] is the pure part. A
//! separate thread polls the facts, since a driver may take milliseconds to answer, or hang.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;
use serde::{Deserialize, Serialize};

use crate::Probe;
use crate::nvml::NvmlSource;
use crate::reading::Make;
use crate::watch::Wake;

/// Interval of the polls of devices.
pub const POLL: Duration = Duration::from_millis(500);
/// Facts older than this do not count as present.
pub const STALE: Duration = Duration::from_secs(5);
/// Usual temperature of an idle device: T starts here.
pub const IDLE_CELSIUS: f64 = 30.0;

/// A fact, or the reason why it is missing.
pub type Fact<T> = Result<T, String>;

/// The facts of a device at one moment, not normalized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// UUID of the GPU (`GPU-…`) or of the MIG slice (`MIG-…`).
    pub uuid: String,
    /// Memory.
    pub memory: Fact<DeviceMemory>,
    /// (draw, enforced limit) in mW.
    pub power: Fact<(u32, u32)>,
    /// Whether the power brake or a software power cap limits the clocks.
    pub power_capped: bool,
    /// Energy since the driver was loaded, in mJ.
    pub energy_mj: Fact<u64>,
    /// (now, slowdown) in °C.
    pub thermal: Fact<(u32, u32)>,
    /// Whether a software or hardware thermal slowdown limits the clocks.
    pub thermally_slowed: bool,
    /// (units, memory) in percent of time.
    pub utilization: Fact<(u32, u32)>,
    /// PCIe.
    pub pcie: Fact<Pcie>,
    /// (active, expected) NVLink links. None if links were never active.
    pub nvlink: Option<(u32, u32)>,
    /// A fault that needs a person, described: fatal Xid, failed row remap, lost. `Ok(None)` means
    /// no fault.
    pub fault: Fact<Option<String>>,
}

/// Memory of a device in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Allocated by programs.
    pub used: u64,
    /// Held by the driver and firmware.
    pub reserved: u64,
    /// All of the device's memory.
    pub total: u64,
}

/// A PCIe link. An idle device lowers its generation to save power, which is no degradation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pcie {
    /// (present, best) generation.
    pub generation: (u32, u32),
    /// (present, best) number of lanes.
    pub width: (u32, u32),
    /// Whether the device is idle.
    pub idle: bool,
}

impl DeviceFacts {
    /// The facts of a MIG slice of this device. The driver reports memory for a slice, and all
    /// other facts for the whole device only. One slice's share of those cannot be known, so they
    /// are missing. A fault of the device is a fault of its slices.
    pub fn slice(&self, uuid: String, memory: Fact<DeviceMemory>) -> Self {
        let whole =
            |what: &str| format!("the driver reports {what} only for the whole {}", self.uuid);
        let fault = match &self.fault {
            Ok(fault) => Ok(fault.as_ref().map(|f| format!("{f} of {}", self.uuid))),
            Err(why) => Err(why.clone()),
        };
        Self {
            uuid,
            memory,
            power: Err(whole("power")),
            power_capped: false,
            energy_mj: Err(whole("energy")),
            thermal: Err(whole("temperatures")),
            thermally_slowed: false,
            utilization: Err(whole("utilization")),
            pcie: Err(whole("the link")),
            nvlink: None,
            fault,
        }
    }
}

/// A source of facts.
pub trait DeviceSource: Send {
    /// Returns the present facts of every device. Called from one thread only.
    fn poll(&mut self) -> Vec<DeviceFacts>;

    /// Waits until the next poll is due, or until an event. Returns true if a device has failed,
    /// which is reported at once.
    fn wait(&mut self, at_most: Duration) -> bool {
        std::thread::sleep(at_most);
        false
    }
}

/// Converts the facts of one device to readings.
pub fn readings(facts: &DeviceFacts, at: Timestamp, out: &mut Vec<Reading>) {
    let make = |signal, unit, source| Make {
        signal,
        device: Some(&facts.uuid),
        unit,
        source,
        at,
    };

    let memory = make(Signal::Memory, "bytes", "nvmlDeviceGetMemoryInfo");
    out.push(match &facts.memory {
        Ok(m) => {
            let (used, total) = ((m.used + m.reserved) as f64, m.total as f64);
            memory.value(used / total, used, Some(total))
        }
        Err(why) => memory.missing(why),
    });

    let power = make(Signal::Power, "mW", "nvmlDeviceGetPowerUsage");
    out.push(match &facts.power {
        Ok((draw, limit)) => {
            let (draw, limit) = (f64::from(*draw), f64::from(*limit));
            let value = if facts.power_capped {
                1.0
            } else {
                draw / limit
            };
            power.value(value, draw, Some(limit))
        }
        Err(why) => power.missing(why),
    });

    let thermal = make(Signal::Thermal, "celsius", "nvmlDeviceGetTemperature");
    out.push(match &facts.thermal {
        Ok((now, slowdown)) => {
            let (now, slowdown) = (f64::from(*now), f64::from(*slowdown));
            let value = if facts.thermally_slowed {
                1.0
            } else {
                (now - IDLE_CELSIUS) / (slowdown - IDLE_CELSIUS)
            };
            thermal.value(value, now, Some(slowdown))
        }
        Err(why) => thermal.missing(why),
    });

    let contention = make(
        Signal::Contention,
        "percent",
        "nvmlDeviceGetUtilizationRates",
    );
    out.push(match &facts.utilization {
        Ok((units, memory)) => {
            let percent = (f64::from(*units) + f64::from(*memory)) / 2.0;
            contention.value(percent / 100.0, percent, Some(100.0))
        }
        Err(why) => contention.missing(why),
    });

    let links = facts.nvlink.filter(|(_, expected)| *expected > 0);
    let lost_links = links.map(|(active, expected)| 1.0 - f64::from(active) / f64::from(expected));
    let lost_pcie = facts.pcie.as_ref().map(|p| {
        let share = |(now, best): (u32, u32)| f64::from(now) / f64::from(best);
        1.0 - share(p.width) * if p.idle { 1.0 } else { share(p.generation) }
    });
    let fabric = |source| make(Signal::Fabric, "ratio", source);
    out.push(match (lost_links, lost_pcie) {
        (Some(l), Ok(p)) if l > p => fabric("nvmlDeviceGetNvLinkState").value(l, l, Some(1.0)),
        (_, Ok(p)) => fabric("nvmlDeviceGetCurrPcieLinkWidth").value(p, p, Some(1.0)),
        (Some(l), Err(_)) => fabric("nvmlDeviceGetNvLinkState").value(l, l, Some(1.0)),
        (None, Err(why)) => fabric("nvmlDeviceGetCurrPcieLinkWidth").missing(why),
    });

    out.push(match &facts.fault {
        Ok(None) => make(Signal::Errors, "event", "nvml").value(0.0, 0.0, Some(1.0)),
        Ok(Some(what)) => {
            make(Signal::Errors, "event", &format!("nvml: {what}")).value(1.0, 1.0, Some(1.0))
        }
        Err(why) => make(Signal::Errors, "event", "nvml").missing(why),
    });
}

#[derive(Default)]
struct Shared {
    latest: Mutex<Option<(Instant, Vec<DeviceFacts>)>>,
    stop: AtomicBool,
}

/// Returns the last facts of the polling thread.
pub struct DeviceProbe {
    shared: Option<Arc<Shared>>,
}

/// The last facts of a [`DeviceProbe`]. Cheap to clone. Empty once the probe is gone.
#[derive(Clone, Default)]
pub struct DeviceHandle(std::sync::Weak<Shared>);

impl DeviceHandle {
    /// Returns the facts if they are not stale.
    pub fn latest(&self) -> Vec<DeviceFacts> {
        let Some(shared) = self.0.upgrade() else {
            return Vec::new();
        };
        let latest = shared.latest.lock().unwrap_or_else(PoisonError::into_inner);
        match latest.as_ref() {
            Some((polled, facts)) if polled.elapsed() <= STALE => facts.clone(),
            _ => Vec::new(),
        }
    }
}

impl std::fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceHandle({} devices)", self.latest().len())
    }
}

impl DeviceProbe {
    /// A probe of NVIDIA's driver. Without a driver it has no readings, and logs that once.
    pub fn nvml(wake: Wake) -> Self {
        match NvmlSource::start() {
            Ok(source) => Self::of(source, wake),
            Err(why) => {
                tracing::info!("no NVIDIA devices are measured: {why}");
                Self { shared: None }
            }
        }
    }

    /// A handle for the raw facts.
    pub fn handle(&self) -> DeviceHandle {
        DeviceHandle(self.shared.as_ref().map(Arc::downgrade).unwrap_or_default())
    }

    /// A probe of any source. It polls once before it returns, so that the first reading has
    /// values. It calls `wake` when a device has failed.
    pub fn of(mut source: impl DeviceSource + 'static, wake: Wake) -> Self {
        let shared = Arc::new(Shared::default());
        store(&shared, source.poll());
        let theirs = Arc::clone(&shared);
        let polling = std::thread::Builder::new()
            .name("fiec-devices".into())
            .spawn(move || {
                while !theirs.stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    let failed = source.wait(POLL);
                    // After an early wake-up devices are still polled no more often than declared.
                    // A failed device is an exception: it is reported at once.
                    if !failed {
                        std::thread::sleep(POLL.saturating_sub(began.elapsed()));
                    }
                    store(&theirs, source.poll());
                    if failed {
                        wake.call();
                    }
                }
            });
        if let Err(e) = polling {
            tracing::warn!(
                probe = "device",
                "no thread to poll devices, they go stale: {e}"
            );
        }
        Self {
            shared: Some(shared),
        }
    }
}

fn store(shared: &Shared, facts: Vec<DeviceFacts>) {
    *shared.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), facts));
}

impl Drop for DeviceProbe {
    fn drop(&mut self) {
        // Not joined: a hung driver must not block the drop of the probe.
        if let Some(shared) = &self.shared {
            shared.stop.store(true, Ordering::Relaxed);
        }
    }
}

impl Probe for DeviceProbe {
    fn name(&self) -> &'static str {
        "device"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let Some(shared) = &self.shared else { return };
        let latest = shared.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((polled, facts)) = latest.as_ref() else {
            return;
        };
        let age = polled.elapsed();
        // Readings carry the time of the poll.
        let age_us = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
        let at = Timestamp::from_micros(now.micros().saturating_sub(age_us));
        let first = out.len();
        for device in facts {
            readings(device, at, out);
        }
        if age > STALE {
            for reading in &mut out[first..] {
                reading.value = None;
                reading.raw = None;
                reading.missing = Some(format!(
                    "the driver has not answered for {} s",
                    age.as_secs()
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests;
