//! Joules of executions, from the counters of processors, memory and devices.
//!
//! An [`EnergyMeter`] follows the host's counters (RAPL by powercap) and those of devices with
//! executions. A [`Share`] is one execution's part. [`fiec_schemas::energy`] states the rule of the
//! charges, and `account` computes them.
//!
//! The host's counters are read when an execution starts, ends or commits, but not again within
//! [`FRESH`]. The devices' counters come from the polling thread. So an interval shorter than its
//! pause may contain none or all of one reading. Both are also read every few seconds: a counter
//! that wraps twice between two readings hides a whole range.

mod account;
mod rapl;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fiec_schemas::energy::Energy;

use self::account::{Account, Mark};
use self::rapl::HostCounters;
use crate::device::{DeviceHandle, Fact};
use crate::kernel_file::Once;

/// The host's counters change about once in a millisecond. A reading is reused for this long.
pub const FRESH: Duration = Duration::from_millis(5);

/// The source of devices' counters.
pub trait DeviceCounters: Send {
    /// Returns the last polled microjoules of a device since an arbitrary start, or why there are
    /// none. `None` if the device is not known.
    fn energy_uj(&self, uuid: &str) -> Option<Fact<u64>>;
}

impl DeviceCounters for DeviceHandle {
    fn energy_uj(&self, uuid: &str) -> Option<Fact<u64>> {
        let facts = self.latest();
        let device = facts.into_iter().find(|d| d.uuid == uuid)?;
        Some(device.energy_mj.map(|mj| mj.saturating_mul(1_000)))
    }
}

/// A device's counter.
#[derive(Default)]
struct Device {
    account: Account,
    before: Option<u64>,
    once: Once,
}

struct Meters {
    host: Option<(HostCounters, Account, Once)>,
    devices: BTreeMap<String, Device>,
    counters: Box<dyn DeviceCounters>,
}

/// Follows the counters. See the module.
pub struct EnergyMeter {
    began: Instant,
    meters: Mutex<Meters>,
}

impl EnergyMeter {
    /// Starts a meter of the counters below `sysfs`, and of devices. Returns none, with a log line,
    /// if the host has no readable counter and there are no devices.
    pub fn start(
        sysfs: &Path,
        devices: bool,
        counters: impl DeviceCounters + 'static,
    ) -> Option<Arc<Self>> {
        let host = match HostCounters::find(sysfs) {
            Ok(counters) => Some((counters, Account::default(), Once::default())),
            Err(why) => {
                tracing::info!("the host's energy is not measured: {why}");
                None
            }
        };
        if host.is_none() && !devices {
            return None;
        }
        let meter = Self {
            began: Instant::now(),
            meters: Mutex::new(Meters {
                host,
                devices: BTreeMap::new(),
                counters: Box::new(counters),
            }),
        };
        meter.tick();
        Some(Arc::new(meter))
    }

    fn now(&self) -> i64 {
        i64::try_from(self.began.elapsed().as_micros()).unwrap_or(i64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Meters> {
        self.meters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the counters that were not read for a while. Call it every few seconds.
    pub fn tick(&self) {
        let now = self.now();
        let mut meters = self.lock();
        meters.read_host(now);
        let names: Vec<String> = meters.devices.keys().cloned().collect();
        for uuid in names {
            meters.read_device(&uuid, now);
        }
    }
}

impl Meters {
    fn read_host(&mut self, now: i64) {
        let Some((counters, account, once)) = &mut self.host else {
            return;
        };
        let fresh = i64::try_from(FRESH.as_micros()).unwrap_or(i64::MAX);
        if account.last_read().is_some_and(|at| now - at < fresh) {
            return;
        }
        match counters.rise() {
            Ok(rise) => account.advance(now, rise),
            Err(error) => {
                once.warn("energy", &error.to_string());
                account.lose(now);
            }
        }
    }

    fn read_device(&mut self, uuid: &str, now: i64) {
        let Some(device) = self.devices.get_mut(uuid) else {
            return;
        };
        match self.counters.energy_uj(uuid) {
            Some(Ok(uj)) => match device.before.replace(uj) {
                // No new poll: the next one includes the energy used meanwhile.
                Some(before) if before == uj => {}
                Some(before) => device.account.advance(now, uj.checked_sub(before)),
                None => device.account.advance(now, None),
            },
            Some(Err(why)) => {
                device.once.warn("energy", &format!("{uuid}: {why}"));
                device.before = None;
                device.account.lose(now);
            }
            None => {
                device.before = None;
                device.account.lose(now);
            }
        }
    }
}

/// One execution's part of one counter.
#[derive(Default)]
struct Part {
    /// Start of the running stretch.
    mark: Option<Mark>,
    /// Microjoules of this interval before that.
    uj: f64,
    /// A part of this interval was not measured.
    broken: bool,
}

impl Part {
    fn settle(&mut self, account: &Account) {
        if let Some(mark) = self.mark.take() {
            match account.since(mark) {
                Some(uj) => self.uj += uj,
                None => self.broken = true,
            }
        }
    }

    fn interval(&mut self) -> Option<u64> {
        let whole = self.uj.max(0.0).floor();
        if std::mem::take(&mut self.broken) {
            self.uj = 0.0;
            return None;
        }
        // The fraction of a microjoule goes to the next interval.
        self.uj -= whole;
        Some(whole as u64)
    }
}

/// One execution's share of the counters. Stops when dropped.
pub struct Share {
    meter: Arc<EnergyMeter>,
    device: Option<String>,
    running: bool,
    host: Part,
    on_device: Part,
}

impl Share {
    /// The share of an execution that does not run yet, on this device if one is named.
    pub fn new(meter: &Arc<EnergyMeter>, device: Option<&str>) -> Self {
        if let Some(uuid) = device {
            meter.lock().devices.entry(uuid.to_owned()).or_default();
        }
        Self {
            meter: Arc::clone(meter),
            device: device.map(str::to_owned),
            running: false,
            host: Part::default(),
            on_device: Part::default(),
        }
    }

    /// Notes whether the execution computes from now on.
    pub fn run(&mut self, running: bool) {
        if running == self.running {
            return;
        }
        self.running = running;
        let now = self.meter.now();
        let mut meters = self.meter.lock();
        meters.read_host(now);
        if let Some((_, account, _)) = &mut meters.host {
            switch(account, &mut self.host, running, now);
        }
        if let Some(uuid) = &self.device {
            meters.read_device(uuid, now);
            if let Some(device) = meters.devices.get_mut(uuid) {
                switch(&mut device.account, &mut self.on_device, running, now);
            }
        }
    }

    /// Returns the energy since the last call, and starts a new interval.
    pub fn interval(&mut self) -> Option<Energy> {
        let now = self.meter.now();
        let mut meters = self.meter.lock();
        meters.read_host(now);
        let running = self.running;
        let host = meters.host.as_ref().and_then(|(_, account, _)| {
            self.host.settle(account);
            self.host.mark = running.then(|| account.mark());
            self.host.interval()
        });
        let device = self.device.as_ref().and_then(|uuid| {
            meters.read_device(uuid, now);
            let account = &meters.devices.get(uuid)?.account;
            self.on_device.settle(account);
            self.on_device.mark = running.then(|| account.mark());
            self.on_device.interval()
        });
        Energy::of(host, device)
    }
}

fn switch(account: &mut Account, part: &mut Part, running: bool, now: i64) {
    if running {
        account.join(now);
        part.mark = Some(account.mark());
    } else {
        part.settle(account);
        account.leave(now);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.run(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Fake(Arc<Mutex<BTreeMap<String, Fact<u64>>>>);
    impl DeviceCounters for Fake {
        fn energy_uj(&self, uuid: &str) -> Option<Fact<u64>> {
            self.0.lock().unwrap().get(uuid).cloned()
        }
    }
    impl Fake {
        fn put(&self, uuid: &str, fact: Fact<u64>) {
            self.0.lock().unwrap().insert(uuid.to_owned(), fact);
        }
    }

    struct Machine {
        dir: tempfile::TempDir,
        devices: Fake,
        meter: Arc<EnergyMeter>,
    }

    impl Machine {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let zone = dir.path().join("class/powercap/intel-rapl:0");
            std::fs::create_dir_all(&zone).unwrap();
            std::fs::write(zone.join("name"), "package-0\n").unwrap();
            std::fs::write(zone.join("max_energy_range_uj"), "1000000\n").unwrap();
            std::fs::write(zone.join("energy_uj"), "0\n").unwrap();
            let devices = Fake::default();
            let meter = EnergyMeter::start(dir.path(), true, devices.clone()).unwrap();
            Self {
                dir,
                devices,
                meter,
            }
        }

        /// Sets the counter once the last reading is not reused any more.
        fn host(&self, uj: u64) {
            let until = Instant::now() + FRESH * 2;
            while Instant::now() < until {
                std::thread::yield_now();
            }
            let file = self
                .dir
                .path()
                .join("class/powercap/intel-rapl:0/energy_uj");
            std::fs::write(file, format!("{uj}\n")).unwrap();
        }
    }

    #[test]
    fn an_interval_has_what_the_counters_rose_while_it_ran_even_over_their_end() {
        let machine = Machine::new();
        machine.devices.put("GPU-1", Ok(10_000));
        let mut share = Share::new(&machine.meter, Some("GPU-1"));
        machine.host(500);
        share.run(true);
        machine.host(900_000);
        machine.devices.put("GPU-1", Ok(12_500));
        assert_eq!(share.interval(), Energy::of(Some(899_500), Some(2_500)));
        machine.host(100_000);
        assert_eq!(share.interval(), Energy::of(Some(200_000), Some(0)));
        share.run(false);
        machine.host(100_500);
        assert_eq!(share.interval(), Energy::of(Some(0), Some(0)), "at rest");
    }

    #[test]
    fn two_executions_share_the_host_and_each_has_its_own_device() {
        let machine = Machine::new();
        machine.devices.put("GPU-1", Ok(0));
        machine.devices.put("GPU-2", Err("not supported".into()));
        let mut a = Share::new(&machine.meter, Some("GPU-1"));
        let mut b = Share::new(&machine.meter, Some("GPU-2"));
        machine.host(0);
        a.run(true);
        b.run(true);
        machine.host(1_000);
        machine.devices.put("GPU-1", Ok(70));
        let (a, b) = (a.interval().unwrap(), b.interval().unwrap());
        // Both started within one reading of the counter, not in the same microsecond.
        assert!(a.host_uj.unwrap() >= 490 && a.host_uj.unwrap() + b.host_uj.unwrap() <= 1_010);
        assert_eq!((a.device_uj, b.device_uj), (Some(70), None));
    }

    #[test]
    fn a_counter_that_disappears_half_way_makes_that_interval_unknown_and_no_other() {
        let machine = Machine::new();
        machine.devices.put("GPU-1", Ok(0));
        let mut share = Share::new(&machine.meter, Some("GPU-1"));
        share.run(true);
        machine.devices.put("GPU-1", Ok(5));
        assert_eq!(share.interval().unwrap().device_uj, Some(5));
        machine.devices.put("GPU-1", Err("lost".into()));
        machine.meter.tick();
        machine.devices.put("GPU-1", Ok(50));
        assert_eq!(share.interval().unwrap().device_uj, None);
        machine.devices.put("GPU-1", Ok(58));
        assert_eq!(share.interval().unwrap().device_uj, Some(8));
        let file = machine
            .dir
            .path()
            .join("class/powercap/intel-rapl:0/energy_uj");
        machine.host(10);
        std::fs::write(&file, "gone").unwrap();
        assert_eq!(share.interval().unwrap().host_uj, None);
        machine.host(20);
        assert_eq!(share.interval().unwrap().host_uj, None);
        machine.host(25);
        assert_eq!(share.interval().unwrap().host_uj, Some(5));
    }

    #[test]
    fn where_nothing_can_be_measured_there_is_no_meter() {
        let nothing = tempfile::tempdir().unwrap();
        assert!(EnergyMeter::start(nothing.path(), false, Fake::default()).is_none());
        let meter = EnergyMeter::start(nothing.path(), true, Fake::default()).unwrap();
        let mut share = Share::new(&meter, None);
        share.run(true);
        assert_eq!(share.interval(), None);
    }
}
