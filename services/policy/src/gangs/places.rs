//! Room for the members of a gang: the free resources of nodes, whether all members fit at once,
//! and which places are reserved.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::places::{Claim, DeviceIx, Taken};
use crate::lifecycle::placement::kept::{KeptPlaces, Place};

/// Members of a gang with the same requirements.
#[derive(Debug, Clone)]
pub struct Group {
    /// Number of members.
    pub count: u32,
    /// Bytes of device memory for each member on a shared device. None: a whole device.
    pub budget: Option<NonZeroU64>,
    /// Their possible places, best first.
    pub places: Vec<Place>,
}

/// A device that members may use.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    /// Bytes of its memory on offer.
    pub bytes: u64,
    /// The used part of it.
    pub taken: Taken,
}

/// A node's resources for members of a gang.
#[derive(Debug, Clone, Default)]
pub struct Room {
    /// Free slots.
    pub slots: u32,
    /// The devices that members could use.
    pub devices: BTreeMap<DeviceIx, Space>,
}

impl Room {
    /// Number of members with this budget that fit at a place.
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

    /// Returns the slot and the device of an execution that has ended.
    pub fn give_back(&mut self, claim: Claim) {
        self.slots = self.slots.saturating_add(1);
        if let Claim::Device { device, budget } = claim
            && let Some(space) = self.devices.get_mut(&device)
        {
            space.taken.remove(budget);
        }
    }
}

/// The resources of nodes.
pub type Rooms = BTreeMap<NodeIx, Room>;

/// True if all members fit at once. The group with the fewest places chooses first. A true answer
/// is certain. A false answer may be wrong if groups compete for the same places.
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

/// The places where these groups could run. `rooms`: the nodes' resources on an empty cluster.
pub fn reserve(rooms: &Rooms, groups: &[Group]) -> KeptPlaces {
    let mut kept = KeptPlaces::default();
    for group in groups {
        let mut most: BTreeMap<NodeIx, u32> = BTreeMap::new();
        for (node, at) in &group.places {
            let fits = rooms.get(node).map_or(0, |r| r.fits(*at, group.budget));
            let most = most.entry(*node).or_default();
            *most = most.saturating_add(fits);
            if let Some(device) = at {
                kept.keep_device(*node, *device);
            }
        }
        for (node, most) in most {
            kept.keep_slots(node, most.min(group.count));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::LazyLock;

    static A: LazyLock<NodeIx> = LazyLock::new(|| NodeIx::made_up(0));
    static B: LazyLock<NodeIx> = LazyLock::new(|| NodeIx::made_up(1));
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
        let rooms: Rooms = [(*A, room(2, &[G])), (*B, room(2, &[]))].into();
        let hosts = [(*A, None), (*B, None)];
        let device = [(*A, Some(G))];
        // Three members on hosts would leave no slot beside the device if they chose first.
        let groups = |n| [group(n, None, &hosts), group(1, None, &device)];
        assert!(has_places(rooms.clone(), &groups(3)));
        assert!(!has_places(rooms.clone(), &groups(4)));
        assert!(!has_places(rooms, &[group(2, None, &device)]));
    }

    #[test]
    fn who_shares_a_device_and_who_wants_it_alone_do_not_both_have_it() {
        let rooms: Rooms = [(*A, room(8, &[G]))].into();
        let device = [(*A, Some(G))];
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
        let groups = [group(1, None, &[(*A, Some(G))])];
        let fits = |room: &Room| has_places([(*A, room.clone())].into(), &groups);
        let mut slot = taken.clone();
        slot.give_back(Claim::Host);
        assert!(!fits(&slot), "the slot alone will not do");
        taken.give_back(claim);
        assert!(fits(&taken));
    }

    #[test]
    fn slots_that_the_members_cannot_use_are_not_kept() {
        let rooms: Rooms = [(*A, room(8, &[G, H])), (*B, room(2, &[]))].into();
        let devices = [(*A, Some(G)), (*A, Some(H))];
        let kept = reserve(&rooms, &[group(2, None, &devices)]);
        assert!(kept.keeps((*A, Some(G)), 8) && kept.keeps((*A, Some(H)), 8));
        assert!(kept.keeps((*A, Some(DeviceIx(2))), 2) && !kept.keeps((*A, Some(DeviceIx(2))), 3));
        assert!(kept.keeps((*A, None), 2) && !kept.keeps((*A, None), 3));
        assert!(!kept.keeps((*B, None), 0), "none of them could be there");
        // For host groups, a node smaller than the gang is reserved as a whole.
        let hosts = [(*A, None), (*B, None)];
        let more = reserve(&rooms, &[group(2, None, &devices), group(3, None, &hosts)]);
        assert!(
            more.keeps((*B, None), 2) && more.keeps((*A, None), 5) && !more.keeps((*A, None), 6)
        );
        assert!(kept.is_within(&more) && !more.is_within(&kept));
        assert!(kept.is_within(&kept) && KeptPlaces::default().is_within(&kept));
    }
}
