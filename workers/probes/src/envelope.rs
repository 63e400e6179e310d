//! The envelopes in force at this node: set by whoever hears of them, applied to every reading
//! before anybody sees it.

use std::sync::{Arc, PoisonError, RwLock};

use fiec_schemas::envelope::{NodeEnvelopes, Shape};
use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

/// What this node may offer; cheap to clone and to ask.
#[derive(Debug, Clone, Default)]
pub struct Envelopes(Arc<RwLock<Arc<NodeEnvelopes>>>);

impl Envelopes {
    /// These are in force from now on.
    pub fn set(&self, envelopes: NodeEnvelopes) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(envelopes);
    }

    /// What is in force.
    pub fn get(&self) -> Arc<NodeEnvelopes> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Holds readings against them.
    pub fn hold(&self, readings: &mut [Reading], at: Timestamp) {
        let envelopes = self.get();
        if !envelopes.envelopes.is_empty() {
            readings.iter_mut().for_each(|r| envelopes.hold(r, at));
        }
    }

    /// The cap on a signal now; none where there is no envelope on it.
    pub fn cap(
        &self,
        signal: Signal,
        device: Option<&str>,
        limit: f64,
        at: Timestamp,
    ) -> Option<f64> {
        self.get().of(signal, device)?.cap(Some(limit), at)
    }

    /// Whether what is offered of the host's memory changes with time, so that a value moves while
    /// usage does not.
    pub fn moves_memory(&self) -> bool {
        let envelopes = self.get();
        let own = envelopes.of(Signal::Memory, None);
        own.is_some_and(|e| !matches!(e.shape, Shape::Constant(_)))
    }
}
