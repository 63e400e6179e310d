//! Room for the members of a gang: what nodes have, whether all members find places there at once, and
//! what of that is kept for them.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use crate::cluster::NodeIx;
use crate::places::{Claim, DeviceIx, Taken};

/// A place of a node; the host as no device.
pub type Place = (NodeIx, Option<DeviceIx>);

/// Members of a gang that ask the same.
#[derive(Debug, Clone)]
pub struct Group {
    /// How many.
    pub count: u32,
    /// Bytes that each takes of a device's memory, where others may be there too; none: all of it.
    pub budget: Option<NonZeroU64>,
    /// Where they may be, the best first.
    pub places: Vec<Place>,
}

/// A device, as members may have it.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    /// Bytes of its memory that are offered.
    pub bytes: u64,
    /// What is taken of it.
    pub taken: Taken,
}

/// What a node has for the members of a gang.
#[derive(Debug, Clone, Default)]
pub struct Room {
    /// Slots that are free.
    pub slots: u32,
    /// The devices on which they could be.
    pub devices: BTreeMap<DeviceIx, Space>,
}

impl Room {
    /// How many that take so much of a device have room at a place.
    fn fits(&self, at: Option<DeviceIx>, budget: Option<NonZeroU64>) -> u32 {
        let Some(device) = at else {
            return self.slots;
        };
        let space = self.devices.get(&device);
        let fits = space.map_or(0, |s| s.taken.has_room_for(budget, s.bytes));
        fits.min(self.slots)
    }

    fn take(&mut self, at: Option<DeviceIx>, budget: Option<NonZeroU64>, count: u32) {
        self.slots = self.slots.saturating_sub(count);
        if let Some(space) = at.and_then(|device| self.devices.get_mut(&device)) {
            space.taken.add(budget, count);
        }
    }

    /// Something that had a slot and this has ended.
    pub fn give_back(&mut self, claim: Claim) {
        self.slots = self.slots.saturating_add(1);
        if let Claim::Device { device, budget } = claim
            && let Some(space) = self.devices.get_mut(&device)
        {
            space.taken.remove(budget);
        }
    }
}

/// What nodes have.
pub type Rooms = BTreeMap<NodeIx, Room>;

/// Whether all members find places at once. Those with the fewest places choose first. True is
/// certain; where sorts compete for the same places it may be false although there is a way.
pub fn has_places(mut rooms: Rooms, groups: &[Group]) -> bool {
    let mut order: Vec<_> = groups.iter().collect();
    order.sort_by_key(|group| group.places.len());
    for group in order {
        let mut left = group.count;
        for (node, at) in &group.places {
            let Some(room) = rooms.get_mut(node) else {
                continue;
            };
            let taken = room.fits(*at, group.budget).min(left);
            room.take(*at, group.budget, taken);
            left -= taken;
            if left == 0 {
                break;
            }
        }
        if left > 0 {
            return false;
        }
    }
    true
}

/// What is kept of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Keeps {
    /// The most members that could be there at once.
    slots: u32,
    /// Devices on which they could be.
    devices: BTreeSet<DeviceIx>,
}

/// What is kept for a gang: of each node on which members could be the devices that they could have,
/// and as many slots as they could take. Slots beyond those are of no use to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptPlaces(BTreeMap<NodeIx, Keeps>);

impl KeptPlaces {
    /// Where these members could be. `rooms`: what the nodes have, were nothing else there.
    pub fn of(rooms: &Rooms, groups: &[Group]) -> Self {
        let mut kept = Self::default();
        for group in groups {
            let mut most: BTreeMap<NodeIx, u32> = BTreeMap::new();
            for (node, at) in &group.places {
                let fits = rooms.get(node).map_or(0, |r| r.fits(*at, group.budget));
                let most = most.entry(*node).or_default();
                *most = most.saturating_add(fits);
                let keeps = kept.0.entry(*node).or_default();
                keeps.devices.extend(*at);
            }
            for (node, most) in most {
                let keeps = kept.0.entry(node).or_default();
                let most = most.min(group.count);
                keeps.slots = keeps.slots.saturating_add(most);
            }
        }
        kept
    }

    /// True for a place that something else must leave to them. `free`: slots of its node that are
    /// free before it takes one.
    pub fn keeps(&self, (node, at): Place, free: u32) -> bool {
        self.0.get(&node).is_some_and(|keeps| {
            let wanted = at.is_some_and(|device| keeps.devices.contains(&device));
            wanted || free <= keeps.slots
        })
    }

    /// True where the other one keeps all that this one does.
    pub fn is_within(&self, other: &Self) -> bool {
        self.0.iter().all(|(node, keeps)| {
            let kept = other.0.get(node);
            kept.is_some_and(|kept| {
                keeps.slots <= kept.slots && keeps.devices.is_subset(&kept.devices)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeIx = NodeIx(0);
    const B: NodeIx = NodeIx(1);
    const G: DeviceIx = DeviceIx(0);
    const H: DeviceIx = DeviceIx(1);

    fn room(slots: u32, devices: &[DeviceIx]) -> Room {
        let space = Space {
            bytes: 80,
            taken: Taken::default(),
        };
        Room {
            slots,
            devices: devices.iter().map(|d| (*d, space)).collect(),
        }
    }

    fn group(count: u32, budget: Option<u64>, places: &[Place]) -> Group {
        Group {
            count,
            budget: budget.and_then(NonZeroU64::new),
            places: places.to_vec(),
        }
    }

    #[test]
    fn those_with_few_places_choose_first() {
        let rooms: Rooms = [(A, room(2, &[G])), (B, room(2, &[]))].into();
        let hosts = [(A, None), (B, None)];
        let device = [(A, Some(G))];
        // Three on hosts would leave no slot beside the device, were they to choose first.
        let groups = |n| [group(n, None, &hosts), group(1, None, &device)];
        assert!(has_places(rooms.clone(), &groups(3)));
        assert!(!has_places(rooms.clone(), &groups(4)));
        assert!(!has_places(rooms, &[group(2, None, &device)]));
    }

    #[test]
    fn who_shares_a_device_and_who_wants_it_alone_do_not_both_have_it() {
        let rooms: Rooms = [(A, room(8, &[G]))].into();
        let device = [(A, Some(G))];
        let fits = |groups: &[Group]| has_places(rooms.clone(), groups);
        assert!(fits(&[group(2, Some(40), &device)]));
        assert!(!fits(&[group(3, Some(40), &device)]));
        let both = [group(1, Some(10), &device), group(1, None, &device)];
        assert!(!fits(&both));
        let two = [group(1, Some(50), &device), group(1, Some(30), &device)];
        assert!(fits(&two));
    }

    #[test]
    fn what_ends_gives_its_slot_and_its_device_back() {
        let mut taken = room(0, &[G]);
        taken.take(Some(G), None, 1);
        let claim = Claim::Device {
            device: G,
            budget: None,
        };
        let groups = [group(1, None, &[(A, Some(G))])];
        let fits = |room: &Room| has_places([(A, room.clone())].into(), &groups);
        let mut slot = taken.clone();
        slot.give_back(Claim::Host);
        assert!(!fits(&slot), "the slot alone will not do");
        taken.give_back(claim);
        assert!(fits(&taken));
    }

    #[test]
    fn slots_that_the_members_cannot_use_are_not_kept() {
        let rooms: Rooms = [(A, room(8, &[G, H])), (B, room(2, &[]))].into();
        let devices = [(A, Some(G)), (A, Some(H))];
        let kept = KeptPlaces::of(&rooms, &[group(2, None, &devices)]);
        assert!(kept.keeps((A, Some(G)), 8) && kept.keeps((A, Some(H)), 8));
        assert!(kept.keeps((A, Some(DeviceIx(2))), 2) && !kept.keeps((A, Some(DeviceIx(2))), 3));
        assert!(kept.keeps((A, None), 2) && !kept.keeps((A, None), 3));
        assert!(!kept.keeps((B, None), 0), "none of them could be there");
        // On hosts a node that is smaller than the gang is kept as a whole.
        let hosts = [(A, None), (B, None)];
        let more = KeptPlaces::of(&rooms, &[group(2, None, &devices), group(3, None, &hosts)]);
        assert!(more.keeps((B, None), 2) && more.keeps((A, None), 5) && !more.keeps((A, None), 6));
        assert!(kept.is_within(&more) && !more.is_within(&kept));
        assert!(kept.is_within(&kept) && KeptPlaces::default().is_within(&kept));
    }
}
