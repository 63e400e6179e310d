//! Energy of executions, from the counters of the hardware.
//!
//! The increase of a counter between two readings is divided among the executions that computed
//! meanwhile, in proportion to their time. It includes the idle power of the hardware. `host` is
//! processors and memory (RAPL package and DRAM domains). `device` is the device to which the
//! execution is bound. While no execution computes, nobody is charged. If several workers run on
//! one host, each counts the whole host.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Energy of one interval between two commits. At least one part is present. A part that was not
/// measured for the whole interval is absent, which is not zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Energy {
    /// Share of the host's energy, in µJ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_uj: Option<u64>,
    /// Share of the device's energy, in µJ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_uj: Option<u64>,
}

impl Energy {
    /// `None` if nothing was measured.
    pub fn of(host_uj: Option<u64>, device_uj: Option<u64>) -> Option<Self> {
        (host_uj.is_some() || device_uj.is_some()).then_some(Self { host_uj, device_uj })
    }
}

/// Energy over an execution's life, for the measured intervals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EnergyTotals {
    /// Energy of hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Measured>,
    /// Energy of devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Measured>,
}

/// A sum, and the number of intervals that it covers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// Energy in µJ.
    pub uj: u64,
    /// Number of measured intervals. A completed execution has one interval more than commits.
    pub intervals: u64,
}

impl Measured {
    fn add(total: &mut Option<Self>, uj: Option<u64>) {
        if let Some(uj) = uj {
            let total = total.get_or_insert_default();
            total.uj = total.uj.saturating_add(uj);
            total.intervals += 1;
        }
    }
}

impl EnergyTotals {
    /// Adds an interval. An interval without a measurement changes nothing.
    pub fn add(total: &mut Option<Self>, interval: Option<Energy>) {
        if let Some(interval) = interval {
            let total = total.get_or_insert_default();
            Measured::add(&mut total.host, interval.host_uj);
            Measured::add(&mut total.device, interval.device_uj);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Totals;

    #[test]
    fn what_was_not_measured_takes_no_byte_and_a_measured_zero_does() {
        let mut totals = Totals::default();
        EnergyTotals::add(&mut totals.energy, None);
        assert_eq!(serde_json::to_string(&totals).unwrap(), "{}");
        EnergyTotals::add(&mut totals.energy, Energy::of(Some(0), None));
        EnergyTotals::add(&mut totals.energy, Energy::of(Some(7), Some(9)));
        assert_eq!(
            serde_json::to_string(&totals).unwrap(),
            r#"{"energy":{"host":{"uj":7,"intervals":2},"device":{"uj":9,"intervals":1}}}"#
        );
        assert_eq!(Energy::of(None, None), None);
    }
}
