//! The leases of this node's devices. The policy service counts, too, but its view may be old, and
//! two services may choose at the same moment. The node decides.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fiec_schemas::hardware::Substrate;
use fiec_schemas::substrate::HOST;
use tokio::sync::Notify;

/// The holder of a device may be at its last boundary: a new lease waits this long before it is
/// refused.
pub const GIVEN_UP_WITHIN: Duration = Duration::from_secs(2);

/// The devices of a node.
#[derive(Debug, Default)]
pub struct Devices {
    all: Mutex<Vec<Device>>,
    freed: Notify,
}

#[derive(Debug)]
struct Device {
    id: String,
    memory_bytes: Option<u64>,
    /// An execution has the whole device.
    taken: bool,
    /// Budgets of the executions that share it.
    budgets: Vec<u64>,
    /// One of its signals is beyond the node's threshold.
    presses: bool,
}

/// A device, or a part of one, until it is dropped.
#[derive(Debug)]
pub struct Lease {
    devices: Arc<Devices>,
    at: usize,
    budget: Option<u64>,
}

impl Lease {
    /// Whether the lease excludes all others.
    pub fn is_whole(&self) -> bool {
        self.budget.is_none()
    }

    /// Bytes of the device's memory in this part. None if it is the whole device.
    pub fn budget(&self) -> Option<u64> {
        self.budget
    }

    /// Grows this part of a device to `bytes`, if other parts leave that much.
    ///
    /// # Errors
    /// The reason, for people.
    pub fn grow(&mut self, bytes: u64) -> Result<(), String> {
        let mut all = self.devices.lock();
        let Some(device) = all.get_mut(self.at) else {
            return Err("its device is gone".to_owned());
        };
        let memory = device.memory_bytes.unwrap_or(u64::MAX);
        let id = &device.id;
        let Some(own) = self.budget else {
            // It has the whole device, and so all of its memory.
            return match bytes > memory {
                true => Err(format!(
                    "device {id} has {memory} bytes, and it asks for {bytes}"
                )),
                false => Ok(()),
            };
        };
        let used: u64 = device.budgets.iter().sum();
        let free = memory.saturating_sub(used.saturating_sub(own));
        if bytes > free {
            return Err(format!(
                "it asks for {bytes} bytes of device {id}, and {free} are not granted to others"
            ));
        }
        if let Some(budget) = device.budgets.iter_mut().find(|b| **b == own) {
            *budget = bytes;
        }
        self.budget = Some(bytes);
        drop(all);
        // It may have become smaller, which frees memory.
        self.devices.freed.notify_waiters();
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut all = self.devices.lock();
        if let Some(device) = all.get_mut(self.at) {
            match self.budget {
                None => device.taken = false,
                Some(budget) => {
                    if let Some(own) = device.budgets.iter().position(|b| *b == budget) {
                        device.budgets.swap_remove(own);
                    }
                }
            }
        }
        drop(all);
        self.devices.freed.notify_waiters();
    }
}

impl Devices {
    /// The devices among the substrates that the node offers.
    pub fn of(substrates: &[Substrate]) -> Arc<Self> {
        let devices = substrates.iter().filter(|s| s.is_device());
        let all = devices.map(|s| Device {
            id: s.id.clone(),
            memory_bytes: s.memory_bytes,
            taken: false,
            budgets: Vec::new(),
            presses: false,
        });
        Arc::new(Self {
            all: Mutex::new(all.collect()),
            freed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Device>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ids of the devices.
    pub fn ids(&self) -> Vec<String> {
        self.lock().iter().map(|d| d.id.clone()).collect()
    }

    /// Notes whether a device presses.
    pub fn press(&self, id: &str, presses: bool) {
        if let Some(device) = self.lock().iter_mut().find(|d| d.id == id) {
            device.presses = presses;
        }
    }

    /// Whether a device has memory for a context without a user: no execution has the whole of it,
    /// and it does not press.
    pub fn spares(&self, id: &str) -> bool {
        let all = self.lock();
        let device = all.iter().find(|d| d.id == id);
        device.is_some_and(|d| !d.taken && !d.presses)
    }

    /// Leases a device for one execution. Waits at most `within` for a holder that is about to
    /// release it. Returns none for the host, which slots count. `budget` is the bytes of device
    /// memory if the execution may share it.
    ///
    /// # Errors
    /// The reason, for people.
    pub async fn lease(
        self: &Arc<Self>,
        substrate: &str,
        budget: Option<u64>,
        within: Duration,
    ) -> Result<Option<Lease>, String> {
        if substrate == HOST {
            return Ok(None);
        }
        let deadline = tokio::time::Instant::now() + within;
        loop {
            // Enabled before the check, so that no release in between is missed.
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            let busy = match self.try_lease(substrate, budget)? {
                Ok(lease) => return Ok(Some(lease)),
                Err(busy) => busy,
            };
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                return Err(busy);
            }
        }
    }

    /// The outer error is permanent, the inner one may pass.
    fn try_lease(
        self: &Arc<Self>,
        substrate: &str,
        budget: Option<u64>,
    ) -> Result<Result<Lease, String>, String> {
        let mut all = self.lock();
        let Some(at) = all.iter().position(|d| d.id == substrate) else {
            return Err(format!("this node has no device {substrate}"));
        };
        let device = &mut all[at];
        let used: u64 = device.budgets.iter().sum();
        let memory = device.memory_bytes.unwrap_or(u64::MAX);
        if let Some(needs) = budget.filter(|needs| *needs > memory) {
            return Err(format!(
                "device {substrate} has {memory} bytes, the budget of {needs} does not fit"
            ));
        }
        let busy = if device.taken {
            Some(format!(
                "device {substrate} is taken by another execution here"
            ))
        } else {
            match budget {
                None if !device.budgets.is_empty() => Some(format!(
                    "device {substrate} is shared by {} executions here",
                    device.budgets.len()
                )),
                Some(needs) if needs > memory - used.min(memory) => Some(format!(
                    "device {substrate} has {} bytes left, the budget of {needs} does not fit",
                    memory - used.min(memory)
                )),
                _ => None,
            }
        };
        if let Some(busy) = busy {
            return Ok(Err(busy));
        }
        match budget {
            None => device.taken = true,
            Some(bytes) => device.budgets.push(bytes),
        }
        Ok(Ok(Lease {
            devices: Arc::clone(self),
            at,
            budget,
        }))
    }
}

#[cfg(test)]
mod tests {
    use fiec_schemas::substrate::SubstrateKind;

    use super::*;

    fn devices() -> Arc<Devices> {
        let place = |id: &str, kind| Substrate {
            id: id.into(),
            kind,
            name: id.into(),
            memory_bytes: Some(100),
            device: None,
        };
        Devices::of(&[
            place(HOST, SubstrateKind::Cpu),
            place("g0", SubstrateKind::Gpu),
        ])
    }

    const SOON: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn a_device_is_one_executions_until_that_gives_it_up() {
        let devices = devices();
        assert!(devices.lease(HOST, None, SOON).await.unwrap().is_none());
        let held = devices.lease("g0", None, SOON).await.unwrap();
        for budget in [None, Some(1)] {
            let refused = devices.lease("g0", budget, SOON).await.unwrap_err();
            assert!(refused.contains("taken by another"), "{refused}");
        }
        // A waiting lease gets the device when it is released.
        let waiter = devices.lease("g0", None, Duration::from_secs(60));
        let (got, ()) = tokio::join!(waiter, async {
            tokio::task::yield_now().await;
            drop(held);
        });
        assert!(got.unwrap().is_some());
    }

    #[tokio::test]
    async fn several_share_a_device_within_its_memory() {
        let devices = devices();
        let one = devices.lease("g0", Some(60), SOON).await.unwrap();
        let _two = devices.lease("g0", Some(40), SOON).await.unwrap();
        let full = devices.lease("g0", Some(1), SOON).await.unwrap_err();
        assert!(full.contains("0 bytes left"), "{full}");
        let alone = devices.lease("g0", None, SOON).await.unwrap_err();
        assert!(alone.contains("shared by 2"), "{alone}");
        drop(one);
        assert!(devices.lease("g0", Some(60), SOON).await.unwrap().is_some());
    }

    #[tokio::test]
    async fn a_part_grows_by_what_nobody_has_and_what_it_gives_back_is_free() {
        let devices = devices();
        let mut one = devices.lease("g0", Some(30), SOON).await.unwrap().unwrap();
        let two = devices.lease("g0", Some(40), SOON).await.unwrap();
        let refused = one.grow(61).unwrap_err();
        assert!(refused.contains("60 are not granted"), "{refused}");
        one.grow(60).unwrap();
        assert_eq!(one.budget(), Some(60));
        // A waiting lease gets the memory that the part gives back.
        let waiter = devices.lease("g0", Some(30), Duration::from_secs(60));
        let (got, ()) = tokio::join!(waiter, async {
            tokio::task::yield_now().await;
            one.grow(30).unwrap();
        });
        drop((got.unwrap(), two));
        drop(one);
        let mut whole = devices.lease("g0", None, SOON).await.unwrap().unwrap();
        assert_eq!(whole.budget(), None);
        whole.grow(100).unwrap();
        assert!(whole.grow(101).is_err());
    }

    #[tokio::test]
    async fn a_device_that_is_taken_or_presses_spares_nothing() {
        let devices = devices();
        assert_eq!(devices.ids(), ["g0"]);
        assert!(devices.spares("g0") && !devices.spares(HOST));
        devices.press("g0", true);
        assert!(!devices.spares("g0"));
        devices.press("g0", false);
        let held = devices.lease("g0", Some(60), SOON).await.unwrap();
        assert!(devices.spares("g0"), "it is shared");
        drop(held);
        let held = devices.lease("g0", None, SOON).await.unwrap();
        assert!(held.as_ref().unwrap().is_whole() && !devices.spares("g0"));
        drop(held);
        assert!(devices.spares("g0"));
    }

    #[tokio::test]
    async fn what_can_never_fit_is_refused_at_once() {
        let devices = devices();
        let long = Duration::from_secs(3_600);
        let absent = devices.lease("g7", None, long).await.unwrap_err();
        assert!(absent.contains("no device g7"), "{absent}");
        let large = devices.lease("g0", Some(101), long).await.unwrap_err();
        assert!(large.contains("has 100 bytes"), "{large}");
    }
}
