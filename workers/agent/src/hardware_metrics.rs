//! H(t) in `/metrics`: under our names, and under those of node_exporter and DCGM, with their
//! units. A missing reading has no line.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use fiec_probes::device::{DeviceFacts, DeviceHandle};
use fiec_schemas::Reading;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// The last vector; cheap to clone.
#[derive(Debug, Default, Clone)]
pub struct Hardware(Arc<Mutex<Last>>);

#[derive(Debug, Default)]
struct Last {
    readings: Vec<Reading>,
    devices: DeviceHandle,
}

impl Hardware {
    /// Sets the readings that were published last.
    pub fn set(&self, readings: Vec<Reading>) {
        self.lock().readings = readings;
    }

    /// Sets the handle for reading devices.
    pub fn set_devices(&self, devices: DeviceHandle) {
        self.lock().devices = devices;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Last> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One value with its labels.
type Line = (Vec<(&'static str, String)>, f64);

impl Collector for Hardware {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (readings, devices) = {
            let last = self.lock();
            (last.readings.clone(), last.devices.clone())
        };
        let mut gauge = |name: &str, help: &str, lines: Vec<Line>| {
            family(&mut encoder, name, help, MetricType::Gauge, lines)
        };
        let labels = |reading: &Reading| {
            let place = reading.device.clone().unwrap_or_else(|| "node".to_owned());
            vec![("signal", reading.signal.to_string()), ("place", place)]
        };
        let values = readings.iter().filter_map(|r| Some((labels(r), r.value?)));
        let help = "Component of the hardware vector, 0 idle to 1 exhausted";
        gauge("fiec_worker_signal", help, values.collect())?;
        let raws = readings.iter().filter_map(|r| {
            let mut labels = labels(r);
            labels.push(("unit", r.unit.clone()));
            Some((labels, r.raw?))
        });
        let help = "The raw reading behind a component of the hardware vector";
        gauge("fiec_worker_signal_raw", help, raws.collect())?;
        let missing = readings.iter().filter(|r| r.value.is_none());
        let missing = missing.map(|r| (labels(r), 1.0)).collect();
        gauge(
            "fiec_worker_signal_missing",
            "A component that could not be measured",
            missing,
        )?;
        node_exporter(&mut encoder)?;
        dcgm(&mut encoder, &devices.latest())
    }
}

fn family(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    kind: MetricType,
    lines: Vec<Line>,
) -> Result<(), fmt::Error> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
    let write = |value, to: MetricEncoder<'_>| match kind {
        MetricType::Counter => ConstCounter::new(value).encode(to),
        _ => ConstGauge::new(value).encode(to),
    };
    if let [(labels, value)] = &lines[..]
        && labels.is_empty()
    {
        return write(*value, metric);
    }
    for (labels, value) in lines {
        write(value, metric.encode_family(&labels)?)?;
    }
    Ok(())
}

/// The host in node_exporter's form, read on request.
fn node_exporter(encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let meminfo = read("/proc/meminfo");
    let alone = |value: f64| vec![(Vec::new(), value)];
    for field in [
        "MemTotal",
        "MemFree",
        "MemAvailable",
        "SwapTotal",
        "SwapFree",
    ] {
        if let Some(bytes) = meminfo_bytes(&meminfo, field) {
            let name = format!("node_memory_{field}_bytes");
            let help = format!("Memory information field {field}_bytes");
            family(encoder, &name, &help, MetricType::Gauge, alone(bytes))?;
        }
    }
    if let Some(load) = read("/proc/loadavg")
        .split(' ')
        .next()
        .and_then(|w| w.parse().ok())
    {
        family(
            encoder,
            "node_load1",
            "1m load average",
            MetricType::Gauge,
            alone(load),
        )?;
    }
    for (resource, kinds) in [
        ("memory", &[("some", "waiting"), ("full", "stalled")][..]),
        ("cpu", &[("some", "waiting")][..]),
        ("io", &[("some", "waiting"), ("full", "stalled")][..]),
    ] {
        let text = read(&format!("/proc/pressure/{resource}"));
        for (line, word) in kinds {
            if let Some(seconds) = stall_seconds(&text, line) {
                // The encoder adds `_total`.
                let name = format!("node_pressure_{resource}_{word}_seconds");
                let help = format!("Time in seconds that processes {word} for {resource}");
                family(encoder, &name, &help, MetricType::Counter, alone(seconds))?;
            }
        }
    }
    Ok(())
}

fn meminfo_bytes(text: &str, field: &str) -> Option<f64> {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024.0)
}

fn stall_seconds(text: &str, kind: &str) -> Option<f64> {
    let line = text.lines().find(|l| l.starts_with(kind))?;
    let micros = line.split(' ').find_map(|w| w.strip_prefix("total="))?;
    Some(micros.parse::<f64>().ok()? / 1e6)
}

/// Devices in the form of DCGM's exporter.
fn dcgm(encoder: &mut DescriptorEncoder<'_>, devices: &[DeviceFacts]) -> Result<(), fmt::Error> {
    const MIB: f64 = 1_048_576.0;
    type Pick = fn(&DeviceFacts) -> Option<f64>;
    let families: [(&str, &str, Pick); 7] = [
        (
            "DCGM_FI_DEV_FB_USED",
            "Framebuffer memory used (in MiB).",
            |d| Some(d.memory.as_ref().ok()?.used as f64 / MIB),
        ),
        (
            "DCGM_FI_DEV_FB_RESERVED",
            "Framebuffer memory reserved (in MiB).",
            |d| Some(d.memory.as_ref().ok()?.reserved as f64 / MIB),
        ),
        (
            "DCGM_FI_DEV_FB_FREE",
            "Framebuffer memory free (in MiB).",
            |d| {
                let m = d.memory.as_ref().ok()?;
                Some(m.total.saturating_sub(m.used + m.reserved) as f64 / MIB)
            },
        ),
        ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", |d| {
            Some(f64::from(d.power.as_ref().ok()?.0) / 1e3)
        }),
        ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", |d| {
            Some(f64::from(d.thermal.as_ref().ok()?.0))
        }),
        ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", |d| {
            Some(f64::from(d.utilization.as_ref().ok()?.0))
        }),
        (
            "DCGM_FI_DEV_MEM_COPY_UTIL",
            "Memory utilization (in %).",
            |d| Some(f64::from(d.utilization.as_ref().ok()?.1)),
        ),
    ];
    for (name, help, pick) in families {
        let lines = devices
            .iter()
            .enumerate()
            .filter_map(|(index, device)| {
                let labels = vec![("gpu", index.to_string()), ("UUID", device.uuid.clone())];
                Some((labels, pick(device)?))
            })
            .collect();
        family(encoder, name, help, MetricType::Gauge, lines)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::{Signal, Timestamp};
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    #[test]
    fn users_find_the_names_they_know_and_what_is_missing_has_no_value() {
        let hardware = Hardware::default();
        let reading = |signal, value: Option<f64>| Reading {
            signal,
            device: None,
            value,
            raw: value,
            limit: None,
            unit: "bytes".into(),
            source: "test".into(),
            at: Timestamp::from_micros(1),
            missing: value.is_none().then(|| "test".into()),
            envelope: None,
        };
        hardware.set(vec![
            reading(Signal::Memory, Some(0.25)),
            reading(Signal::Power, None),
        ]);
        let mut registry = Registry::default();
        registry.register_collector(Box::new(hardware));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "fiec_worker_signal{signal=\"memory\",place=\"node\"} 0.25",
            "fiec_worker_signal_missing{signal=\"power\",place=\"node\"} 1",
            "# TYPE node_memory_MemAvailable_bytes gauge",
            "# TYPE node_load1 gauge",
        ] {
            assert!(text.contains(line), "no {line:?} in {text}");
        }
        assert!(
            !text.contains("fiec_worker_signal{signal=\"power\""),
            "{text}"
        );
        if std::path::Path::new("/proc/pressure/memory").exists() {
            assert!(
                text.contains("node_pressure_memory_waiting_seconds_total "),
                "{text}"
            );
        }
    }

    #[test]
    fn a_device_is_shown_in_the_units_of_dcgm() {
        use fiec_probes::device::DeviceMemory;
        let why = || "test".to_owned();
        let facts = DeviceFacts {
            uuid: "GPU-1".into(),
            memory: Ok(DeviceMemory {
                used: 3 << 20,
                reserved: 1 << 20,
                total: 10 << 20,
            }),
            power: Ok((350_500, 700_000)),
            power_capped: false,
            thermal: Err(why()),
            thermally_slowed: false,
            utilization: Ok((80, 20)),
            pcie: Err(why()),
            nvlink: None,
            fault: Ok(None),
            energy_mj: Err(why()),
        };
        #[derive(Debug)]
        struct One(DeviceFacts);
        impl Collector for One {
            fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
                dcgm(&mut encoder, std::slice::from_ref(&self.0))
            }
        }
        let mut registry = Registry::default();
        registry.register_collector(Box::new(One(facts)));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "DCGM_FI_DEV_FB_USED{gpu=\"0\",UUID=\"GPU-1\"} 3.0",
            "DCGM_FI_DEV_FB_FREE{gpu=\"0\",UUID=\"GPU-1\"} 6.0",
            "DCGM_FI_DEV_POWER_USAGE{gpu=\"0\",UUID=\"GPU-1\"} 350.5",
            "DCGM_FI_DEV_GPU_UTIL{gpu=\"0\",UUID=\"GPU-1\"} 80.0",
        ] {
            assert!(text.contains(line), "no {line:?} in {text}");
        }
        assert!(!text.contains("GPU_TEMP"), "{text}");
    }
}
