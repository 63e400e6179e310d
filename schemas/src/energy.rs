//! Joules of executions, as counters of the hardware gave them.
//!
//! What is charged: the increase of a counter between two readings goes to the executions that
//! computed under it meanwhile, in equal parts by the time for which each did; what it uses at rest
//! beside them is in it. `host` is processors and memory (RAPL package and DRAM domains), `device`
//! the device that the execution is bound to. While nothing computes, nobody is charged. Several
//! workers on one host each take the host's counters for their own.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Energy of one interval between two commits. At least one part is there; a part that was not
/// measured from end to end is absent, which is not zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Energy {
    /// Share of the host's energy, in microjoules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_uj: Option<u64>,
    /// Share of the device's energy, in microjoules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_uj: Option<u64>,
}

impl Energy {
    /// None where nothing was measured.
    pub fn of(host_uj: Option<u64>, device_uj: Option<u64>) -> Option<Self> {
        (host_uj.is_some() || device_uj.is_some()).then_some(Self { host_uj, device_uj })
    }
}

/// Energy over an execution's life, as far as it was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EnergyTotals {
    /// Of hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Measured>,
    /// Of devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Measured>,
}

/// A sum, and how much of the execution it covers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// Microjoules.
    pub uj: u64,
    /// Intervals that they are of. All of a completed execution are one more than its commits.
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
    /// Adds an interval; one without a measurement changes nothing.
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
