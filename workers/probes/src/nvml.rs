//! Facts from NVIDIA's management library, loaded at run time. A missing driver is an error, never
//! a panic. Calls that sample for milliseconds, such as `pcie_throughput`, are not used.

use std::collections::BTreeMap;
use std::time::Duration;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{TemperatureSensor, TemperatureThreshold};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_REMAPPED_FAILURE;
use nvml_wrapper::{Device, EventSet, Nvml};

use crate::device::{DeviceFacts, DeviceMemory, DeviceSource, Fact, Pcie};

/// Xids after which a device needs a reset or a person. They stand for uncorrectable memory,
/// internal micro-controller halt, row remapping failure, NVLink, fallen off the bus, uncontained
/// ECC, GSP time-outs, and unrecovered ECC. Xids that a program causes (13, 31, 43, 45) are not
/// among them.
const FATAL_XIDS: [u64; 10] = [48, 62, 64, 74, 79, 95, 119, 120, 140, 143];

/// `NVML_NVLINK_MAX_LINKS`: most links of a device.
const NVLINK_MOST: u32 = 18;

/// `NVML_DEVICE_MIG_ENABLE`: the device is partitioned.
const MIG_ENABLED: u32 = 1;

/// State of a device that is kept between polls.
#[derive(Default)]
struct Memory {
    /// Most active NVLink links so far: a card without bridges is not degraded.
    links: u32,
    /// UUIDs of its MIG slices at the last poll.
    slices: Vec<String>,
    /// A fault persists until the agent restarts, because the device stays unusable.
    fault: Option<String>,
}

pub(crate) struct NvmlSource {
    /// Lives as long as the process, so that the event set can stay registered between polls.
    nvml: &'static Nvml,
    events: Option<EventSet<'static>>,
    uuids: Vec<String>,
    memory: BTreeMap<String, Memory>,
}

impl NvmlSource {
    pub(crate) fn start() -> Result<Self, String> {
        let nvml: &'static Nvml = Box::leak(Box::new(Nvml::init().map_err(|e| e.to_string())?));
        let count = nvml.device_count().map_err(|e| e.to_string())?;
        let mut uuids = Vec::new();
        for index in 0..count {
            match nvml.device_by_index(index).and_then(|d| d.uuid()) {
                Ok(uuid) => uuids.push(uuid),
                Err(e) => tracing::warn!(probe = "device", index, "device is not measured: {e}"),
            }
        }
        if uuids.is_empty() {
            return Err("the driver shows no device".into());
        }
        let events = register(nvml, &uuids);
        Ok(Self {
            nvml,
            events,
            uuids,
            memory: BTreeMap::new(),
        })
    }
}

impl DeviceSource for NvmlSource {
    fn poll(&mut self) -> Vec<DeviceFacts> {
        let Self {
            nvml,
            uuids,
            memory,
            ..
        } = self;
        let mut all = Vec::with_capacity(uuids.len());
        for uuid in uuids.iter() {
            let remembered = memory.entry(uuid.clone()).or_default();
            match nvml.device_by_uuid(uuid.as_str()) {
                Ok(device) => {
                    let whole = facts(uuid, &device, remembered);
                    let slices = slices(&device, &whole, &mut remembered.slices);
                    all.push(whole);
                    all.extend(slices);
                }
                Err(e) => {
                    let lost = unreachable_device(uuid, &e, remembered);
                    let why = || Err(e.to_string());
                    let gone = remembered.slices.iter();
                    all.extend(gone.map(|slice| lost.slice(slice.clone(), why())));
                    all.push(lost);
                }
            }
        }
        all
    }

    /// Waits for the driver's fault events, if it has them.
    fn wait(&mut self, at_most: Duration) -> bool {
        let Some(set) = &self.events else {
            std::thread::sleep(at_most);
            return false;
        };
        match set.wait(u32::try_from(at_most.as_millis()).unwrap_or(500)) {
            Ok(event) => {
                let ecc = event.event_type.contains(EventTypes::DOUBLE_BIT_ECC_ERROR);
                let fault = match event.event_data {
                    Some(XidError::Value(xid)) if FATAL_XIDS.contains(&xid) => format!("Xid {xid}"),
                    _ if ecc => "uncorrectable ECC error".to_owned(),
                    _ => return false,
                };
                let Ok(uuid) = event.device.uuid() else {
                    return false;
                };
                tracing::warn!(probe = "device", device = %uuid, fault, "a device has failed");
                let known = &mut self.memory.entry(uuid).or_default().fault;
                // A device that is known to have failed may report further faults.
                known.replace(fault).is_none()
            }
            Err(NvmlError::Timeout) => false,
            Err(_) => {
                std::thread::sleep(at_most);
                false
            }
        }
    }
}

/// Registers for fatal faults of every device. None if the driver or a device has no events.
fn register(nvml: &'static Nvml, uuids: &[String]) -> Option<EventSet<'static>> {
    let mut set = nvml.create_event_set().ok()?;
    for uuid in uuids {
        let device = nvml.device_by_uuid(uuid.as_str()).ok()?;
        // A device without ECC does not support its events.
        let supported = device.supported_event_types().ok()?;
        let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
        set = device.register_events(wanted & supported, set).ok()?;
    }
    Some(set)
}

fn why<T>(result: Result<T, NvmlError>) -> Fact<T> {
    result.map_err(|e| e.to_string())
}

fn unreachable_device(uuid: &str, e: &NvmlError, remembered: &mut Memory) -> DeviceFacts {
    let why = e.to_string();
    if matches!(e, NvmlError::GpuLost | NvmlError::NotFound) {
        remembered
            .fault
            .get_or_insert_with(|| format!("lost: {why}"));
    }
    DeviceFacts {
        uuid: uuid.to_owned(),
        memory: Err(why.clone()),
        power: Err(why.clone()),
        power_capped: false,
        energy_mj: Err(why.clone()),
        thermal: Err(why.clone()),
        thermally_slowed: false,
        utilization: Err(why.clone()),
        pcie: Err(why.clone()),
        nvlink: None,
        fault: match &remembered.fault {
            Some(fault) => Ok(Some(fault.clone())),
            None => Err(why),
        },
    }
}

fn facts(uuid: &str, device: &Device<'_>, remembered: &mut Memory) -> DeviceFacts {
    let memory = match device.memory_info() {
        Err(e @ NvmlError::GpuLost) => return unreachable_device(uuid, &e, remembered),
        other => why(other.map(|m| DeviceMemory {
            used: m.used,
            reserved: m.reserved,
            total: m.total,
        })),
    };
    let reasons = device
        .current_throttle_reasons()
        .unwrap_or(ThrottleReasons::empty());
    let utilization = why(device.utilization_rates().map(|u| (u.gpu, u.memory)));
    let idle = reasons.contains(ThrottleReasons::GPU_IDLE)
        || utilization.as_ref().is_ok_and(|(units, _)| *units == 0);
    if remembered.fault.is_none() && row_remap_failed(device) {
        remembered.fault = Some("row remapping failed".into());
    }
    DeviceFacts {
        uuid: uuid.to_owned(),
        memory,
        power: why(device
            .power_usage()
            .and_then(|d| Ok((d, device.enforced_power_limit()?)))),
        power_capped: reasons
            .intersects(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN | ThrottleReasons::SW_POWER_CAP),
        energy_mj: why(device.total_energy_consumption()),
        thermal: why(device
            .temperature(TemperatureSensor::Gpu)
            .and_then(|now| Ok((now, slowdown(device)?)))),
        thermally_slowed: reasons.intersects(
            ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::SW_THERMAL_SLOWDOWN,
        ),
        utilization,
        pcie: why(pcie(device, idle)),
        nvlink: nvlink(device, remembered),
        fault: Ok(remembered.fault.clone()),
    }
}

/// Returns the MIG slices of a partitioned device, each under its own UUID. Slices may appear and
/// disappear while the agent runs, so they are listed at each poll.
fn slices(device: &Device<'_>, whole: &DeviceFacts, seen: &mut Vec<String>) -> Vec<DeviceFacts> {
    let partitioned = device
        .mig_mode()
        .is_ok_and(|mode| mode.current == MIG_ENABLED);
    // The highest possible index. Those in between may be unused.
    let most = match partitioned {
        true => device.mig_device_count().unwrap_or(0),
        false => 0,
    };
    seen.clear();
    let mut found = Vec::new();
    for index in 0..most {
        let Ok(slice) = device.mig_device_by_index(index) else {
            continue;
        };
        let Ok(uuid) = slice.uuid() else { continue };
        let memory = why(slice.memory_info().map(|m| DeviceMemory {
            used: m.used,
            reserved: m.reserved,
            total: m.total,
        }));
        seen.push(uuid.clone());
        found.push(whole.slice(uuid, memory));
    }
    found
}

fn slowdown(device: &Device<'_>) -> Result<u32, NvmlError> {
    device
        .temperature_threshold(TemperatureThreshold::Slowdown)
        .or_else(|_| device.temperature_threshold(TemperatureThreshold::GpuMax))
}

fn pcie(device: &Device<'_>, idle: bool) -> Result<Pcie, NvmlError> {
    Ok(Pcie {
        generation: (device.current_pcie_link_gen()?, device.max_pcie_link_gen()?),
        width: (
            device.current_pcie_link_width()?,
            device.max_pcie_link_width()?,
        ),
        idle,
    })
}

fn nvlink(device: &Device<'_>, remembered: &mut Memory) -> Option<(u32, u32)> {
    let mut active = 0;
    for link in 0..NVLINK_MOST {
        match device.link_wrapper_for(link).is_active() {
            Ok(up) => active += u32::from(up),
            Err(_) => break,
        }
    }
    remembered.links = remembered.links.max(active);
    (remembered.links > 0).then_some((active, remembered.links))
}

fn row_remap_failed(device: &Device<'_>) -> bool {
    let values = device.field_values_for(&[FieldId(NVML_FI_DEV_REMAPPED_FAILURE)]);
    let first = values
        .ok()
        .and_then(|v| v.into_iter().next())
        .and_then(Result::ok);
    first
        .and_then(|sample| sample.value.ok())
        .is_some_and(|value| {
            use nvml_wrapper::enums::device::SampleValue as V;
            match value {
                V::U32(n) => n > 0,
                V::U64(n) => n > 0,
                V::I64(n) => n > 0,
                V::F64(n) => n > 0.0,
            }
        })
}
