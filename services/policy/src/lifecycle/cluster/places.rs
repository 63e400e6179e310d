//! The devices of a node, and their use by executions. The host is not a device: its capacity is
//! the node's slots.

use std::num::NonZeroU64;

use fiec_schemas::hardware::{Signal, Substrate};
use fiec_schemas::submission::ViableBy;
use fiec_schemas::substrate::HOST;

use crate::lifecycle::cluster::profile::Profile;

/// Index of a device of one node; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceIx(pub u16);

/// Use of a node by an execution, beside a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Claim {
    /// No device.
    #[default]
    Host,
    /// A device or a part of it.
    Device {
        /// The device.
        device: DeviceIx,
        /// Bytes of its memory if it is shared. None: the whole device.
        budget: Option<NonZeroU64>,
    },
}

impl Claim {
    /// The claim of a profile at a place. An unknown profile claims the whole device.
    pub fn of(profile: Option<&Profile>, device: Option<DeviceIx>) -> Self {
        let budget = || NonZeroU64::new(profile?.requires.device.as_ref()?.share_bytes?);
        match device {
            None => Claim::Host,
            Some(device) => Claim::Device {
                device,
                budget: budget(),
            },
        }
    }

    /// Its device, if any.
    pub fn device(self) -> Option<DeviceIx> {
        match self {
            Claim::Host => None,
            Claim::Device { device, .. } => Some(device),
        }
    }
}

/// The places of a node on which an execution may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// On the host's processors.
    Host,
    /// On a device.
    Device,
    /// On a free device, or else on the host.
    Either,
}

impl Wants {
    /// Reads it from a profile.
    pub fn of(profile: &Profile) -> Self {
        match (&profile.requires.device, &profile.prefers.device) {
            (Some(_), _) => Wants::Device,
            (None, Some(_)) => Wants::Either,
            (None, None) => Wants::Host,
        }
    }
}

/// The place whose readings count for an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Judged<'a> {
    /// The device, if any.
    pub device: Option<&'a str>,
    /// The whole GPU of a slice: its power and temperature count.
    pub whole: Option<&'a str>,
    /// True if the host's readings count.
    pub host: bool,
}

impl Judged<'_> {
    /// The host alone.
    pub const HOST: Judged<'static> = Judged {
        device: None,
        whole: None,
        host: true,
    };
}

impl<'a> Judged<'a> {
    /// A device, and its host unless the profile excludes the host.
    pub fn of(profile: Option<&Profile>, device: Option<&'a Device>) -> Self {
        let by = |p: &Profile| p.requires.device.as_ref().map(|d| d.viable_by);
        let alone = device.is_some() && profile.and_then(by) == Some(ViableBy::Device);
        Self {
            device: device.map(|d| &*d.id),
            whole: device.and_then(Device::whole),
            host: !alone,
        }
    }

    /// True if this signal of this device counts. `device`: none for the host.
    pub fn counts(self, signal: Signal, device: Option<&str>) -> bool {
        let Some(device) = device else {
            return self.host;
        };
        let shared = matches!(signal, Signal::Power | Signal::Thermal);
        self.device == Some(device) || (shared && self.whole == Some(device))
    }
}

/// The used part of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    exclusive: u32,
    sharing: u32,
    bytes: u64,
}

impl Taken {
    /// Adds `times` exclusive users, or as many users of `budget` bytes.
    pub fn add(&mut self, budget: Option<NonZeroU64>, times: u32) {
        match budget {
            None => self.exclusive += times,
            Some(bytes) => {
                self.sharing += times;
                let bytes = bytes.get().saturating_mul(u64::from(times));
                self.bytes = self.bytes.saturating_add(bytes);
            }
        }
    }

    /// Removes one user.
    pub fn remove(&mut self, budget: Option<NonZeroU64>) {
        match budget {
            None => self.exclusive = self.exclusive.saturating_sub(1),
            Some(bytes) => {
                self.sharing = self.sharing.saturating_sub(1);
                self.bytes = self.bytes.saturating_sub(bytes.get());
            }
        }
    }

    /// Number of further users with this budget, given the offered bytes.
    pub fn has_room_for(self, budget: Option<NonZeroU64>, offered: u64) -> u32 {
        match budget {
            _ if self.exclusive > 0 => 0,
            None => u32::from(self.sharing == 0),
            Some(bytes) => {
                let count = offered.saturating_sub(self.bytes) / bytes.get();
                u32::try_from(count).unwrap_or(u32::MAX)
            }
        }
    }
}

/// A device and its users.
#[derive(Debug)]
pub struct Device {
    /// UUID of the GPU or MIG slice.
    pub id: Box<str>,
    /// Its facts. None if the node no longer has it, or has not joined.
    pub facts: Option<Substrate>,
    /// The part that executions use and orders reserve.
    pub taken: Taken,
}

/// Reason why a device has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoRoom {
    /// It has an exclusive user.
    Taken,
    /// It is shared, and the execution needs it alone.
    Shared {
        /// Number of users.
        by: u32,
    },
    /// The free memory is smaller than the budget.
    Memory {
        /// Free bytes.
        free: u64,
        /// Needed bytes.
        needs: u64,
    },
}

impl Device {
    /// UUID of the whole GPU if this is a slice.
    pub fn whole(&self) -> Option<&str> {
        self.facts.as_ref()?.device.as_ref()?.whole.as_deref()
    }

    fn without(&self, own: Option<Claim>, ix: DeviceIx) -> Taken {
        let mut taken = self.taken;
        if let Some(Claim::Device { device, budget }) = own
            && device == ix
        {
            taken.remove(budget);
        }
        taken
    }

    /// Why a claim does not fit. `own`: a claim that is counted already and is ignored. `offered`:
    /// the offered part of the device's bytes.
    pub fn refuses(
        &self,
        ix: DeviceIx,
        budget: Option<NonZeroU64>,
        own: Option<Claim>,
        offered: impl Fn(u64) -> u64,
    ) -> Option<NoRoom> {
        let Taken {
            exclusive,
            sharing,
            bytes,
        } = self.without(own, ix);
        if exclusive > 0 {
            return Some(NoRoom::Taken);
        }
        let Some(needs) = budget.map(NonZeroU64::get) else {
            return (sharing > 0).then_some(NoRoom::Shared { by: sharing });
        };
        let free = offered(self.memory_bytes()).saturating_sub(bytes);
        (needs > free).then_some(NoRoom::Memory { free, needs })
    }

    /// True if the device has no user.
    pub fn is_free(&self) -> bool {
        self.taken.exclusive == 0 && self.taken.sharing == 0
    }

    /// The share of its memory without a budget.
    pub fn free_share(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a share of bytes")]
        match self.memory_bytes() {
            _ if self.taken.exclusive > 0 => 0.0,
            0 => 1.0,
            all => all.saturating_sub(self.taken.bytes) as f64 / all as f64,
        }
    }

    /// Bytes of its memory; 0 if unknown.
    pub fn memory_bytes(&self) -> u64 {
        self.facts
            .as_ref()
            .and_then(|f| f.memory_bytes)
            .unwrap_or(0)
    }
}

/// All devices ever seen on a node.
#[derive(Debug, Default)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// The device with this id, created if missing. None for the host.
    pub fn intern(&mut self, id: &str) -> Option<DeviceIx> {
        if id == HOST {
            return None;
        }
        let found = self.0.iter().position(|d| *d.id == *id);
        let ix = found.unwrap_or_else(|| {
            self.0.push(Device {
                id: id.into(),
                facts: None,
                taken: Taken::default(),
            });
            self.0.len() - 1
        });
        // Beyond 65,535 devices the last one stands for the rest.
        Some(DeviceIx(u16::try_from(ix).unwrap_or(u16::MAX)))
    }

    /// Applies the node's current list of devices.
    pub fn describe(&mut self, substrates: &[Substrate]) {
        for device in &mut self.0 {
            device.facts = None;
        }
        for substrate in substrates.iter().filter(|s| s.is_device()) {
            if let Some(ix) = self.intern(&substrate.id)
                && let Some(device) = self.0.get_mut(usize::from(ix.0))
            {
                device.facts = Some(substrate.clone());
            }
        }
    }

    /// All devices, in the order of their first appearance.
    pub fn iter(&self) -> impl Iterator<Item = &Device> {
        self.0.iter()
    }

    /// A device.
    pub fn get(&self, ix: DeviceIx) -> Option<&Device> {
        self.0.get(usize::from(ix.0))
    }

    /// The id of a claim's device, or of the host.
    pub fn id_of(&self, device: Option<DeviceIx>) -> &str {
        device.and_then(|ix| self.get(ix)).map_or(HOST, |d| &d.id)
    }

    /// True if the node has no device now.
    pub fn is_empty(&self) -> bool {
        !self.0.iter().any(|d| d.facts.is_some())
    }

    /// The places where an execution may run. If it needs a device and the node has none, the host
    /// is returned, so that a filter can say so.
    pub fn places(&self, wants: Wants) -> impl Iterator<Item = Option<DeviceIx>> + use<> {
        let host = wants != Wants::Device || self.is_empty();
        let devices = if wants == Wants::Host {
            0
        } else {
            self.0.len()
        };
        let devices = u16::try_from(devices).unwrap_or(u16::MAX);
        host.then_some(None)
            .into_iter()
            .chain((0..devices).map(|ix| Some(DeviceIx(ix))))
    }

    /// Adds a claim.
    pub fn add(&mut self, claim: Claim) {
        if let Claim::Device { device, budget } = claim
            && let Some(device) = self.0.get_mut(usize::from(device.0))
        {
            device.taken.add(budget, 1);
        }
    }

    /// Removes a claim.
    pub fn remove(&mut self, claim: Claim) {
        if let Claim::Device { device, budget } = claim
            && let Some(device) = self.0.get_mut(usize::from(device.0))
        {
            device.taken.remove(budget);
        }
    }
}

#[cfg(test)]
mod tests {
    use fiec_schemas::substrate::SubstrateKind;

    use super::*;

    fn devices() -> (Devices, DeviceIx) {
        let mut devices = Devices::default();
        devices.describe(&[
            Substrate {
                id: HOST.into(),
                kind: SubstrateKind::Cpu,
                name: "cpu".into(),
                memory_bytes: Some(1),
                device: None,
            },
            Substrate {
                id: "GPU-1".into(),
                kind: SubstrateKind::Gpu,
                name: "test".into(),
                memory_bytes: Some(100),
                device: None,
            },
        ]);
        let ix = devices.intern("GPU-1").unwrap();
        (devices, ix)
    }

    fn claim(device: DeviceIx, budget: Option<u64>) -> Claim {
        Claim::Device {
            device,
            budget: budget.and_then(NonZeroU64::new),
        }
    }

    #[test]
    fn a_device_is_one_executions_or_that_of_several_within_its_memory() {
        let (mut all, ix) = devices();
        let asks = |all: &Devices, budget: Option<u64>| {
            all.get(ix)
                .unwrap()
                .refuses(ix, budget.and_then(NonZeroU64::new), None, |has| has)
        };
        assert_eq!(asks(&all, None), None);
        all.add(claim(ix, Some(60)));
        assert_eq!(asks(&all, None), Some(NoRoom::Shared { by: 1 }));
        assert_eq!(asks(&all, Some(40)), None);
        let full = NoRoom::Memory {
            free: 40,
            needs: 41,
        };
        assert_eq!(asks(&all, Some(41)), Some(full));
        all.remove(claim(ix, Some(60)));
        all.add(claim(ix, None));
        assert_eq!(asks(&all, Some(1)), Some(NoRoom::Taken));
        let own = Some(claim(ix, None));
        assert_eq!(all.get(ix).unwrap().refuses(ix, None, own, |has| has), None);
        all.remove(claim(ix, None));
        assert_eq!(asks(&all, Some(100)), None);
    }

    #[test]
    fn a_device_that_its_node_no_more_names_keeps_its_index_and_has_no_facts() {
        let (mut all, ix) = devices();
        all.describe(&[]);
        assert!(all.is_empty() && all.get(ix).unwrap().facts.is_none());
        assert_eq!(all.intern("GPU-1"), Some(ix));
        assert_eq!(all.intern(HOST), None);
        let places: Vec<_> = all.places(Wants::Device).collect();
        assert_eq!(places, [None, Some(ix)]);
    }
}
