//! Whether a parked execution can go on in its place.

use std::sync::Arc;

use fiec_schemas::ExecutionId;

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Presence;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::placement::kept::KeptPlaces;

impl Lifecycle {
    /// True if the execution can go on where it is parked. `gone`: as if this claim were free.
    pub(crate) fn fits_back(&self, id: ExecutionId, gone: Option<Claim>) -> bool {
        let now = self.now;
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        let Some(ix) = e.stage.node() else {
            return false;
        };
        let node = self.cluster.node(ix);
        if node.presence != Presence::Up || !node.is_fresh(now.mono, &self.config) {
            return false;
        }
        let judged = node.judged(self.cluster.profiles.get(e.profile), e.device());
        let watch = node.watch(e.profile);
        let presses = watch.and_then(|w| w.obstacle(judged)).is_some();
        let held = node.held().saturating_sub(u32::from(gone.is_some()));
        let device = match e.claim {
            Claim::Device { device, budget } if e.takes() != e.claim => {
                let place = node.devices.get(device);
                place.is_some_and(|d| {
                    d.facts.is_some() && d.refuses(device, budget, gone, |has| has).is_none()
                })
            }
            _ => true,
        };
        !presses && held < node.slots() && device
    }

    /// Like [`Lifecycle::fits_back`], and also respects the places that are reserved for a gang.
    pub(crate) fn goes_on_here(
        &self,
        id: ExecutionId,
        gone: Option<Claim>,
        kept: &Option<Arc<KeptPlaces>>,
    ) -> bool {
        let Some(e) = self.cluster.execution(id) else {
            return false;
        };
        let Some(ix) = e.stage.node() else {
            return false;
        };
        let node = self.cluster.node(ix);
        let free = (node.slots() + u32::from(gone.is_some())).saturating_sub(node.held());
        // The execution's own reserved device needs no place.
        let wants = e.device().filter(|_| e.takes() != e.claim);
        let keeps = kept.as_ref().is_some_and(|k| k.keeps((ix, wants), free));
        !keeps && self.fits_back(id, gone)
    }
}
