//! The devices of a node: each GPU with its slices, its readings, and the executions that hold it.

use fiec_schemas::substrate::{Substrate, SubstrateKind};
use serde::{Deserialize, Serialize};

use super::nodes::Gauge;
use crate::database::Query;
use crate::words;

const HOLDERS: &str = "SELECT id AS execution, client_id, node, substrate, phase, boundary_index AS boundary, \
    boundary_of AS of FROM executions WHERE finished_at IS NULL AND phase IN ('bound', 'started') \
    AND substrate <> 'host' ORDER BY bound_at LIMIT 2000";

/// A device, or a slice of one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Device {
    /// Its UUID.
    pub id: String,
    /// `gpu` or `mig`.
    pub kind: &'static str,
    /// Its name for people.
    pub name: String,
    /// Memory, compute capability and multiprocessors, in words.
    pub machine: String,
    /// UUID of the whole GPU, if this is a slice.
    pub whole: Option<String>,
    /// True if it follows the GPU that it is a slice of.
    pub is_below: bool,
    /// Its signals.
    pub signals: Vec<Gauge>,
}

/// An execution that holds a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Holder {
    /// Which.
    pub execution: String,
    /// Its client's name for it.
    pub client_id: Option<String>,
    /// The node.
    pub node: Option<String>,
    /// The device.
    pub substrate: String,
    /// `bound` or `started`.
    pub phase: String,
    /// The last committed boundary.
    pub boundary: i64,
    /// Boundaries in all.
    pub of: Option<i64>,
}

/// The query for all holders.
pub fn holders() -> Query {
    Query::of(HOLDERS)
}

/// The devices among a node's substrates, each GPU before its slices. Takes their gauges out of
/// `gauges`.
pub fn of(substrates: &[Substrate], gauges: &mut Vec<Gauge>) -> Vec<Device> {
    let devices: Vec<&Substrate> = substrates.iter().filter(|s| s.is_device()).collect();
    let whole = |s: &Substrate| s.device.as_ref().and_then(|device| device.whole.clone());
    let is_listed = |id: &str| devices.iter().any(|s| s.id == id);
    let tops = devices
        .iter()
        .filter(|s| whole(s).is_none_or(|of| !is_listed(&of)));
    let mut all = Vec::new();
    for top in tops {
        all.push(device(top, false, gauges));
        let slices = devices
            .iter()
            .filter(|s| whole(s).as_deref() == Some(top.id.as_str()));
        for slice in slices {
            all.push(device(slice, true, gauges));
        }
    }
    all
}

fn device(substrate: &Substrate, is_below: bool, gauges: &mut Vec<Gauge>) -> Device {
    let is_own = |gauge: &Gauge| gauge.device.as_deref() == Some(substrate.id.as_str());
    let (own, others) = std::mem::take(gauges).into_iter().partition(is_own);
    *gauges = others;
    let profile = substrate.device.as_ref();
    let memory = substrate.memory_bytes.and_then(|n| i64::try_from(n).ok());
    let facts = [
        memory.map(|n| words::bytes(&n)),
        profile
            .and_then(|p| p.compute_capability)
            .map(|c| format!("compute capability {c}")),
        profile
            .and_then(|p| p.multiprocessors)
            .map(|n| format!("{n} multiprocessors")),
    ];
    Device {
        id: substrate.id.clone(),
        kind: match substrate.kind {
            SubstrateKind::Mig => "slice",
            _ => "GPU",
        },
        name: substrate.name.clone(),
        machine: facts.into_iter().flatten().collect::<Vec<_>>().join(", "),
        whole: profile.and_then(|p| p.whole.clone()),
        is_below,
        signals: own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn substrate(id: &str, kind: &str, whole: Option<&str>) -> Substrate {
        let device = serde_json::json!({"id": id, "kind": kind, "name": "N", "memory_bytes": 8u64 << 30,
            "device": {"whole": whole, "compute_capability": "9.0"}});
        serde_json::from_value(device).unwrap()
    }

    #[test]
    fn slices_follow_their_device_and_the_host_is_none() {
        let host: Substrate =
            serde_json::from_value(serde_json::json!({"id": "host", "kind": "cpu", "name": "cpu"}))
                .unwrap();
        let all = [
            substrate("MIG-1", "mig", Some("GPU-2")),
            host,
            substrate("GPU-1", "gpu", None),
            substrate("GPU-2", "gpu", None),
            substrate("MIG-9", "mig", Some("GPU-9")),
        ];
        let found = of(&all, &mut Vec::new());
        let order: Vec<_> = found.iter().map(|d| (d.id.as_str(), d.is_below)).collect();
        assert_eq!(
            order,
            [
                ("GPU-1", false),
                ("GPU-2", false),
                ("MIG-1", true),
                ("MIG-9", false)
            ]
        );
        assert_eq!(found[0].machine, "8.0 GiB, compute capability 9.0");
        assert_eq!((found[0].kind, found[2].kind), ("GPU", "slice"));
    }
}
