//! What placement needs to know of a submission, shared between executions that ask the same.

use fiec_schemas::trust::Verify;
use fiec_schemas::{Contract, Preferences, Requirements, Submission, Thresholds};
use serde::Deserialize;

/// Index of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProfileIx(pub u32);

impl ProfileIx {
    /// The submission is not known yet.
    pub const UNKNOWN: Self = Self(u32::MAX);
}

/// The part of a submission that placement reads.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Profile {
    /// `name@version`.
    pub program: String,
    /// What a node must have.
    #[serde(default)]
    pub requires: Requirements,
    /// Up to what more is of use.
    #[serde(default)]
    pub prefers: Preferences,
    /// Thresholds in place of the node's.
    #[serde(default)]
    pub viability: Thresholds,
    /// Under what it may move.
    #[serde(default)]
    pub contract: Contract,
    /// Which part is computed once more; the service's share where nothing is said.
    #[serde(default)]
    pub verify: Option<Verify>,
}

impl Profile {
    fn is_of(&self, spec: &Submission) -> bool {
        self.program == spec.program
            && self.contract == spec.contract
            && self.verify == spec.verify
            && self.viability == spec.viability
            && self.requires == spec.requires
            && self.prefers == spec.prefers
    }
}

impl From<&Submission> for Profile {
    fn from(spec: &Submission) -> Self {
        Self {
            program: spec.program.clone(),
            requires: spec.requires.clone(),
            prefers: spec.prefers.clone(),
            viability: spec.viability.clone(),
            contract: spec.contract,
            verify: spec.verify,
        }
    }
}

#[derive(Debug)]
struct Slot {
    profile: Profile,
    users: u32,
}

/// All profiles in use. Executions mostly share few; the last found is tried first.
#[derive(Debug, Default)]
pub struct Profiles {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    last: u32,
}

impl Profiles {
    /// The profile, where known.
    pub fn get(&self, ix: ProfileIx) -> Option<&Profile> {
        self.slots.get(ix.0 as usize)?.as_ref().map(|s| &s.profile)
    }

    /// Counts one more user of a submission's profile; true where it is new.
    pub fn acquire_spec(&mut self, spec: &Submission) -> (ProfileIx, bool) {
        self.acquire(|p| p.is_of(spec), || spec.into())
    }

    /// Counts one more user of a profile; true where it is new.
    pub fn acquire_profile(&mut self, profile: Profile) -> (ProfileIx, bool) {
        let same = profile.clone();
        self.acquire(move |p| *p == same, move || profile)
    }

    fn acquire(
        &mut self,
        is_it: impl Fn(&Profile) -> bool,
        make: impl FnOnce() -> Profile,
    ) -> (ProfileIx, bool) {
        let matches = |slot: &Option<Slot>| slot.as_ref().is_some_and(|s| is_it(&s.profile));
        let found = if self.slots.get(self.last as usize).is_some_and(matches) {
            Some(self.last as usize)
        } else {
            self.slots.iter().position(matches)
        };
        if let Some(ix) = found {
            if let Some(slot) = &mut self.slots[ix] {
                slot.users += 1;
            }
            self.last = u32::try_from(ix).unwrap_or(0);
            return (ProfileIx(self.last), false);
        }
        let slot = Some(Slot {
            profile: make(),
            users: 1,
        });
        let ix = if let Some(ix) = self.free.pop() {
            self.slots[ix as usize] = slot;
            ix
        } else {
            self.slots.push(slot);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX - 1)
        };
        self.last = ix;
        (ProfileIx(ix), true)
    }

    /// One user less; true where it was the last and the index is free again. Profiles without
    /// thresholds and requirements of their own are kept: they are few and come back.
    pub fn release(&mut self, ix: ProfileIx) -> bool {
        let Some(Some(slot)) = self.slots.get_mut(ix.0 as usize) else {
            return false;
        };
        slot.users = slot.users.saturating_sub(1);
        let profile = &slot.profile;
        let plain = profile.viability.is_empty()
            && profile.requires.is_empty()
            && profile.prefers.is_empty();
        if slot.users > 0 || plain {
            return false;
        }
        self.slots[ix.0 as usize] = None;
        self.free.push(ix.0);
        true
    }

    /// Profiles in use that have thresholds of their own.
    pub fn with_thresholds(&self) -> impl Iterator<Item = (ProfileIx, &Profile)> {
        (0u32..).zip(&self.slots).filter_map(|(ix, slot)| {
            slot.as_ref()
                .filter(|s| !s.profile.viability.is_empty())
                .map(|s| (ProfileIx(ix), &s.profile))
        })
    }
}
