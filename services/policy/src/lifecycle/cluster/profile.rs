//! The part of a submission that placement reads, shared between executions with the same
//! requirements.

use std::collections::BTreeSet;

use fiec_schemas::scheduling::{Adjustment, Deadline, Reallocation, WhenUnviable};
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
    /// Requirements of a node.
    #[serde(default)]
    pub requires: Requirements,
    /// Preferences beyond the requirements.
    #[serde(default)]
    pub prefers: Preferences,
    /// Thresholds that override the node's.
    #[serde(default)]
    pub viability: Thresholds,
    /// The contract under which it may move.
    #[serde(default)]
    pub contract: Contract,
    /// The part to verify. None: the service's share.
    #[serde(default)]
    pub verify: Option<Verify>,
    /// Its priority; the higher one goes first.
    #[serde(default)]
    pub priority: i16,
    /// Its deadline.
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// Undisturbed run time in seconds, if the client states it.
    #[serde(default)]
    pub expected_s: Option<u32>,
    /// The choice when no place is viable.
    #[serde(default)]
    pub when_unviable: WhenUnviable,
    /// Allowed moves for a better use of the devices.
    #[serde(default)]
    pub reallocation: Reallocation,
    /// True if the program runs in a container. [`Profiles`] knows it, not the submission.
    #[serde(skip)]
    pub container: bool,
}

impl Profile {
    fn is_of(&self, spec: &Submission, container: bool) -> bool {
        self.program == spec.program
            && self.container == container
            && self.contract == spec.contract
            && self.verify == spec.verify
            && self.viability == spec.viability
            && self.requires == spec.requires
            && self.prefers == spec.prefers
            && self.priority == spec.priority
            && self.deadline == spec.deadline
            && self.expected_s == spec.expected_s
            && self.when_unviable == spec.when_unviable
            && self.reallocation == spec.reallocation
    }

    /// Applies an operator's changes to the execution.
    pub fn adjust(&mut self, change: &Adjustment) {
        change.apply_to(
            &mut self.priority,
            &mut self.deadline,
            &mut self.viability,
            &mut self.requires,
        );
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
            priority: spec.priority,
            deadline: spec.deadline,
            expected_s: spec.expected_s,
            when_unviable: spec.when_unviable,
            reallocation: spec.reallocation,
            container: false,
        }
    }
}

#[derive(Debug)]
struct Slot {
    profile: Profile,
    users: u32,
    serial: u64,
}

/// All profiles in use. Executions share few of them, so the last match is tried first.
#[derive(Debug, Default)]
pub struct Profiles {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    last: u32,
    /// Number of profiles ever created.
    made: u64,
    /// Programs that run in containers.
    contained: BTreeSet<String>,
}

impl Profiles {
    /// The profile, if known.
    pub fn get(&self, ix: ProfileIx) -> Option<&Profile> {
        self.slots.get(ix.0 as usize)?.as_ref().map(|s| &s.profile)
    }

    /// Distinguishes a profile from all others that have had its index.
    pub fn serial(&self, ix: ProfileIx) -> Option<u64> {
        self.slots.get(ix.0 as usize)?.as_ref().map(|s| s.serial)
    }

    /// Adds a user of a submission's profile. Returns true if the profile is new.
    pub fn acquire_spec(&mut self, spec: &Submission) -> (ProfileIx, bool) {
        let container = self.contained.contains(&spec.program);
        self.acquire(
            |p| p.is_of(spec, container),
            || Profile {
                container,
                ..spec.into()
            },
        )
    }

    /// Adds a user of a profile. Returns true if the profile is new.
    pub fn acquire_profile(&mut self, mut profile: Profile) -> (ProfileIx, bool) {
        profile.container = self.contained.contains(&profile.program);
        let same = profile.clone();
        self.acquire(move |p| *p == same, move || profile)
    }

    /// Notes that a program runs in a container. Existing profiles stay as they are: a worker that
    /// cannot run such an execution refuses it.
    pub fn runs_in_container(&mut self, program: &str) {
        if !self.contained.contains(program) {
            self.contained.insert(program.to_owned());
        }
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
        self.made += 1;
        let slot = Some(Slot {
            profile: make(),
            users: 1,
            serial: self.made,
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

    /// Removes a user. Returns true if it was the last one and the index is free again. Profiles
    /// without their own thresholds and requirements are kept: they are few and return often.
    pub fn release(&mut self, ix: ProfileIx) -> bool {
        let Some(Some(slot)) = self.slots.get_mut(ix.0 as usize) else {
            return false;
        };
        slot.users = slot.users.saturating_sub(1);
        let profile = &slot.profile;
        let plain = profile.viability.is_empty()
            && profile.requires.is_empty()
            && profile.prefers.is_empty()
            && profile.priority == 0
            && profile.deadline.is_none()
            && profile.expected_s.is_none();
        if slot.users > 0 || plain {
            return false;
        }
        self.slots[ix.0 as usize] = None;
        self.free.push(ix.0);
        true
    }

    /// Profiles in use with their own thresholds.
    pub fn with_thresholds(&self) -> impl Iterator<Item = (ProfileIx, &Profile)> {
        (0u32..).zip(&self.slots).filter_map(|(ix, slot)| {
            slot.as_ref()
                .filter(|s| !s.profile.viability.is_empty())
                .map(|s| (ProfileIx(ix), &s.profile))
        })
    }
}
