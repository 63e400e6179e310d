//! The envelopes in force at this node. The agent sets them, and every reading is limited by them
//! before it is used.

use std::sync::{Arc, PoisonError, RwLock};

use fiec_schemas::envelope::{NodeEnvelopes, Shape};
use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

/// The offered resources of this node. Cheap to clone and to read.
#[derive(Debug, Clone, Default)]
pub struct Envelopes(Arc<RwLock<Arc<NodeEnvelopes>>>);

impl Envelopes {
    /// Sets the envelopes in force.
    pub fn set(&self, envelopes: NodeEnvelopes) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(envelopes);
    }

    /// Returns the envelopes in force.
    pub fn get(&self) -> Arc<NodeEnvelopes> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Limits readings by the envelopes.
    pub fn hold(&self, readings: &mut [Reading], at: Timestamp) {
        let envelopes = self.get();
        if !envelopes.envelopes.is_empty() {
            readings.iter_mut().for_each(|r| envelopes.hold(r, at));
        }
    }

    /// Returns the present cap on a signal, or none without an envelope.
    pub fn cap(
        &self,
        signal: Signal,
        device: Option<&str>,
        limit: f64,
        at: Timestamp,
    ) -> Option<f64> {
        self.get().of(signal, device)?.cap(Some(limit), at)
    }

    /// Whether the offered memory changes with time: then a value changes while usage does not.
    pub fn moves_memory(&self) -> bool {
        let envelopes = self.get();
        let own = envelopes.of(Signal::Memory, None);
        own.is_some_and(|e| !matches!(e.shape, Shape::Constant(_)))
    }
}
