//! Grants of this node's memory, and programs that ask for more.
//!
//! A node grants each execution its share (memory ÷ slots). If others have more than their share it
//! grants the rest, and at least a quarter of the share. A program may ask for more at a boundary:
//! it gets memory that is not granted to others. If that does not suffice, the ledger records the
//! new need. The policy then moves, delays or suspends the execution.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fiec_kit::Reserve;
use fiec_kit::Reserved;
use fiec_kit::frames::Order;
use fiec_schemas::event::ExecutionState;
use fiec_schemas::package::Grant;
use fiec_schemas::requirements::Requirements;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{Event, ExecutionId};

use crate::attempts::asked_memory;
use crate::cache::NotCached;
use crate::message::Message;
use crate::runner::Runner;
use crate::shared::Shared;

/// The author of the request in the ledger.
const PROGRAM: &str = "program";

/// Granted bytes of the host's memory, by execution.
#[derive(Debug, Default)]
pub struct Grants(Mutex<HashMap<ExecutionId, u64>>);

impl Grants {
    fn lock(&self) -> MutexGuard<'_, HashMap<ExecutionId, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an execution's grant.
    pub fn note(&self, execution: ExecutionId, grant: &Grant) {
        if let Some(bytes) = grant.memory_bytes {
            self.lock().insert(execution, bytes);
        }
    }

    /// Forgets an execution that has left.
    pub fn forget(&self, execution: ExecutionId) {
        self.lock().remove(&execution);
    }

    /// Bytes that are granted to other executions.
    pub fn of_others(&self, execution: ExecutionId) -> u64 {
        let all = self.lock();
        let others = all.iter().filter(|(id, _)| **id != execution);
        others.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Grows an execution's grant to `bytes`, if `offered` memory suffices. Returns the free bytes
    /// if not.
    fn grow(&self, execution: ExecutionId, bytes: u64, offered: u64) -> Result<(), u64> {
        let mut all = self.lock();
        let others = all.iter().filter(|(id, _)| **id != execution);
        let taken = others.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        let free = offered.saturating_sub(taken);
        if bytes > free {
            return Err(free);
        }
        all.insert(execution, bytes);
        Ok(())
    }
}

/// Grants an execution the memory that its program asked for on another node. Returns the reason if
/// this node lacks it.
pub(crate) fn lacks(shared: &Shared, state: &ExecutionState) -> Option<NotCached> {
    let asked = asked_memory(state)?;
    // Claimed at once: of two executions that start together both would find it free.
    let offered = shared.offered_memory();
    let claimed = shared.grants.grow(state.execution, asked, offered);
    let free = claimed.err()?;
    Some(NotCached(format!(
        "its program has asked for {asked} bytes of memory, and {free} are not granted to others \
         here"
    )))
}

impl Runner {
    /// Answers a program that asks for more than its grant.
    pub(crate) async fn reserve(&mut self, wish: Reserve) {
        let answer = match self.grow(wish) {
            Ok(grant) => self.give_more(grant).await,
            Err(reason) => self.wants_more(wish, reason).await,
        };
        self.order(Order::Reserved(answer)).await;
    }

    /// Returns the grown grant, or the reason why this node lacks the memory.
    fn grow(&mut self, wish: Reserve) -> Result<Grant, String> {
        let mut grant = self.granted();
        let asked = wish.memory_bytes.filter(|b| Some(*b) > grant.memory_bytes);
        // The device's memory first: it is given back if the host's memory is lacking.
        let mut had = None;
        if let Some(bytes) = wish.device_memory_bytes {
            let Some(device) = &mut grant.device else {
                return Err(format!(
                    "the program requested {bytes} bytes of a device but runs on the host"
                ));
            };
            if device.memory_bytes.is_some_and(|has| has < bytes) {
                let lease = self.slot.as_mut().and_then(|slot| slot.device.as_mut());
                let Some(lease) = lease else {
                    return Err("the execution has no device on this node".to_owned());
                };
                had = lease.budget();
                lease.grow(bytes)?;
                device.memory_bytes = Some(bytes);
            }
        }
        if let (Some(bytes), Some(_)) = (asked, grant.memory_bytes) {
            let offered = self.shared.offered_memory();
            let execution = self.tip.state.execution;
            let grown = self.shared.grants.grow(execution, bytes, offered);
            if let Err(free) = grown {
                let lease = self.slot.as_mut().and_then(|slot| slot.device.as_mut());
                if let (Some(lease), Some(had)) = (lease, had) {
                    lease.grow(had)?;
                }
                return Err(format!(
                    "the program requested {bytes} bytes of memory; the node offers {offered} and \
                     has {free} left"
                ));
            }
            grant.memory_bytes = Some(bytes);
        }
        Ok(grant)
    }

    /// Grants the memory that its program asked for when the node lacked it. Returns the event of
    /// the grant, or the reason why the node still lacks it.
    pub(crate) fn grant_asked(&mut self) -> Result<Option<Event>, String> {
        let Some(asked) = &self.asked else {
            return Ok(None);
        };
        let grant = self.grow(Reserve {
            memory_bytes: asked.memory_bytes,
            device_memory_bytes: asked.device_memory_bytes,
        })?;
        self.asked = None;
        if grant == self.granted() {
            return Ok(None);
        }
        self.grant = Some(grant.clone());
        let who = PROGRAM.to_owned();
        Ok(Some(Event::Reconfigured { who, grant }))
    }

    async fn give_more(&mut self, grant: Grant) -> Reserved {
        if grant != self.granted() {
            let who = PROGRAM.to_owned();
            self.grant = Some(grant.clone());
            self.stage(Message::of(vec![Event::Reconfigured {
                who,
                grant: grant.clone(),
            }]))
            .await;
            let order = Order::Reconfigure {
                grant: grant.clone(),
            };
            self.order(order).await;
        }
        Reserved::Granted { grant }
    }

    /// The node lacks the memory: the ledger records the need, and the policy acts on it.
    async fn wants_more(&mut self, wish: Reserve, reason: String) -> Reserved {
        let pinned = self.spec.requires.nodes.as_slice();
        let whole = self.shared.offered_memory();
        if pinned == [self.shared.node().clone()]
            && wish.memory_bytes.is_some_and(|bytes| bytes > whole)
        {
            let reason = format!("{reason}; it may run on this node alone");
            return Reserved::Refused { reason };
        }
        if wish.device_memory_bytes.is_some() && self.spec.requires.device.is_none() {
            let reason = format!("{reason}; its submission requires no device");
            return Reserved::Refused { reason };
        }
        let wish = no_less(&self.spec.requires, wish);
        let asked = self.asked.get_or_insert_default();
        let change = Adjustment {
            memory_bytes: wish.memory_bytes.filter(|b| Some(*b) > asked.memory_bytes),
            device_memory_bytes: wish
                .device_memory_bytes
                .filter(|b| Some(*b) > asked.device_memory_bytes),
            ..Adjustment::default()
        };
        if !change.is_empty() {
            asked.merge(&change);
            tracing::info!(reason, "the program requested more than this node has");
            let who = PROGRAM.to_owned();
            self.stage(Message::of(vec![Event::Adjusted { who, change }]))
                .await;
        }
        Reserved::Moves { reason }
    }
}

/// The wish, at least as large as what the submission requires, which it replaces.
fn no_less(requires: &Requirements, wish: Reserve) -> Reserve {
    let device = requires.device.as_ref();
    let on_device = device.and_then(|device| device.memory_bytes.max(device.share_bytes));
    Reserve {
        memory_bytes: wish
            .memory_bytes
            .map(|b| b.max(requires.memory_bytes.unwrap_or(0))),
        device_memory_bytes: wish
            .device_memory_bytes
            .map(|b| b.max(on_device.unwrap_or(0))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_does_not_lower_what_the_submission_requires() {
        let text = r#"{"memory_bytes":9,"device":{"share_bytes":5}}"#;
        let requires: Requirements = serde_json::from_str(text).unwrap();
        let small = no_less(
            &requires,
            Reserve {
                memory_bytes: Some(7),
                device_memory_bytes: Some(2),
            },
        );
        assert_eq!(
            (small.memory_bytes, small.device_memory_bytes),
            (Some(9), Some(5))
        );
        let large = no_less(
            &requires,
            Reserve {
                memory_bytes: Some(10),
                device_memory_bytes: None,
            },
        );
        assert_eq!(
            (large.memory_bytes, large.device_memory_bytes),
            (Some(10), None)
        );
    }

    #[test]
    fn nobody_is_granted_what_others_have() {
        let grants = Grants::default();
        let [a, b] = [1, 2].map(|n| ExecutionId(uuid::Uuid::from_u128(n)));
        let share = |bytes| Grant {
            memory_bytes: Some(bytes),
            ..Grant::default()
        };
        grants.note(a, &share(50));
        grants.note(b, &share(30));
        assert_eq!(grants.grow(a, 71, 100), Err(70));
        assert_eq!(grants.grow(a, 70, 100), Ok(()));
        assert_eq!(grants.grow(b, 31, 100), Err(30));
        assert_eq!(grants.of_others(b), 70);
        grants.forget(a);
        assert_eq!(grants.grow(b, 100, 100), Ok(()));
    }
}
