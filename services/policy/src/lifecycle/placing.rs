//! Questions to placement about the cluster as it is now.

use super::Lifecycle;
use crate::lifecycle::cluster::NodeIx;
use crate::lifecycle::cluster::places::DeviceIx;
use crate::lifecycle::cluster::profile::ProfileIx;
use crate::lifecycle::placement::{self, Ask, Choice, Operators, Review};
use crate::time::Now;

impl Lifecycle {
    /// The best place that answers a question, if one does.
    pub(crate) fn choose(&mut self, ask: &Ask) -> Option<Choice> {
        let (rankings, cluster) = (&mut self.rankings, &self.cluster);
        placement::choose(rankings, cluster, &self.config, self.now, ask)
    }

    /// The same for an execution that an operator moves.
    pub(crate) fn choose_for_operator(&mut self, ask: &Ask) -> Option<Choice> {
        let (rankings, cluster) = (&mut self.rankings, &self.cluster);
        placement::choose_for_operator(rankings, cluster, &self.config, self.now, ask)
    }

    /// True if only its capacity keeps a node from taking the profile.
    pub(crate) fn is_only_full(&mut self, profile: ProfileIx) -> bool {
        let (rankings, cluster) = (&mut self.rankings, &self.cluster);
        placement::would_take_with_room(rankings, cluster, &self.config, self.now, profile)
    }

    /// All places for this profile on an empty cluster, best first.
    pub(crate) fn but_for_room(&mut self, profile: ProfileIx) -> Vec<(NodeIx, Option<DeviceIx>)> {
        let (rankings, cluster) = (&mut self.rankings, &self.cluster);
        placement::but_for_room(rankings, cluster, &self.config, self.now, profile)
    }

    /// For each of these nodes, whether the profile could run there if others left.
    pub(crate) fn could_be(
        &mut self,
        profile: ProfileIx,
        nodes: impl Iterator<Item = NodeIx>,
    ) -> Vec<bool> {
        let (rankings, cluster) = (&mut self.rankings, &self.cluster);
        placement::could_be(rankings, cluster, &self.config, self.now, profile, nodes)
    }

    /// True if a place of this node answers a question.
    pub(crate) fn would_do(&self, ask: &Ask, node: NodeIx) -> bool {
        placement::would_do(&self.cluster, &self.config, self.now, ask, node)
    }

    /// The verdicts on all places, for people.
    pub(crate) fn review(&self, now: Now, ask: &Ask, operators: Option<Operators<'_>>) -> Review {
        placement::review(&self.cluster, &self.config, now, ask, operators)
    }

    /// How much of what a profile prefers a place has.
    pub(crate) fn preference(
        &self,
        profile: ProfileIx,
        place: (NodeIx, Option<DeviceIx>),
    ) -> Option<f64> {
        placement::preference(&self.cluster, &self.config, self.now, profile, place)
    }
}
