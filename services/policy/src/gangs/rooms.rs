//! Finds places for a gang, and estimates when they are free ([`super::places`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Gangs;
use super::places::{Group, Room, Rooms, Space, has_places, reserve};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::places::{Claim, DeviceIx, Taken};
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::placement;
use crate::lifecycle::queue::leading::Leading;
use crate::time::Millis;

/// Most nodes for which the start of a gang is estimated.
const RECKONED: usize = 1_024;

impl Gangs {
    /// Fills in the places where the gang could run. None if the empty cluster has no room for all
    /// of it.
    pub(super) fn with_places(&self, life: &mut Lifecycle, mut gang: Leading) -> Option<Leading> {
        let mut counts: BTreeMap<ProfileIx, u32> = BTreeMap::new();
        for id in &gang.members {
            let e = life.cluster().execution(*id)?;
            *counts.entry(e.profile).or_default() += 1;
        }
        let mut groups = Vec::with_capacity(counts.len());
        for (profile, count) in counts {
            let places = life.but_for_room(profile);
            let wants = life
                .cluster()
                .profiles
                .get(profile)?
                .requires
                .device
                .as_ref();
            groups.push(Group {
                count,
                budget: wants.and_then(|d| std::num::NonZeroU64::new(d.share_bytes?)),
                places,
            });
        }
        let rooms = self.rooms(life, &groups, |_, _| Taken::default());
        if !has_places(rooms.clone(), &groups) {
            return None;
        }
        gang.places = Arc::new(reserve(&rooms, &groups));
        gang.ends = self.room_at(life, &rooms, &groups);
        Some(gang)
    }

    /// Candidate nodes without any execution on them. `taken` says how much of each device counts
    /// as used.
    fn rooms(
        &self,
        life: &Lifecycle,
        groups: &[Group],
        taken: impl Fn(NodeIx, DeviceIx) -> Taken,
    ) -> Rooms {
        let mut rooms = Rooms::new();
        for (ix, at) in groups.iter().flat_map(|group| &group.places) {
            let node = life.cluster().node(*ix);
            let room = rooms.entry(*ix).or_insert_with(|| Room {
                slots: node.slots(),
                ..Room::default()
            });
            let Some(at) = at else { continue };
            if let Some(device) = node.devices.get(*at) {
                room.devices.entry(*at).or_insert_with(|| Space {
                    bytes: placement::offered_memory(node, Some(&device.id), device.memory_bytes()),
                    taken: taken(*ix, *at),
                });
            }
        }
        rooms
    }

    /// Estimates when all members will find slots and devices, from the run times that clients
    /// state. None if those do not suffice. `all`: the candidate nodes, empty.
    fn room_at(&self, life: &Lifecycle, all: &Rooms, groups: &[Group]) -> Option<Millis> {
        let now = life.now;
        if all.len() > RECKONED {
            return None;
        }
        let mut free = self.rooms(life, groups, |ix, at| {
            let device = life.cluster().node(ix).devices.get(at);
            device.map_or_else(Taken::default, |d| d.taken)
        });
        let mut ends: Vec<(u64, NodeIx, Claim)> = Vec::new();
        for (ix, room) in &mut free {
            let node = life.cluster().node(*ix);
            room.slots = room.slots.saturating_sub(node.held());
            ends.extend(node.assigned.iter().filter_map(|id| {
                let e = life.cluster().execution(*id)?;
                let profile = life.cluster().profiles.get(e.profile)?;
                let expected = u64::from(profile.expected_s?) * 1_000;
                let left = expected.checked_sub(e.attained_ms(now.mono))?;
                let ends = e.parked().is_none() && left > 0;
                ends.then_some((left, *ix, e.takes()))
            }));
        }
        ends.sort_unstable_by_key(|(left, ..)| *left);
        let has_room = |ended: usize| {
            let mut rooms = free.clone();
            for (_, ix, claim) in &ends[..ended] {
                if let Some(room) = rooms.get_mut(ix) {
                    room.give_back(*claim);
                }
            }
            has_places(rooms, groups)
        };
        if has_room(0) {
            return Some(now.mono);
        }
        if ends.is_empty() || !has_room(ends.len()) {
            return None;
        }
        // Room only grows as executions end, so a binary search finds the first sufficient count.
        let (mut few, mut enough) = (0, ends.len());
        while few + 1 < enough {
            let half = few.midpoint(enough);
            match has_room(half) {
                true => enough = half,
                false => few = half,
            }
        }
        ends.get(enough - 1).map(|(left, ..)| now.mono.plus(*left))
    }
}
