//! Preparation for an execution that will come: its program, a child with parsed inputs, the
//! context of its device, its state and its data. This module also ends contexts without a user.
//!
//! A context takes a tenth of a second or more to make, and some hundred megabytes of device
//! memory. So a device has at most [`Options::warm_contexts`](crate::Options) and one more, beside
//! executions that compute. It has none while an execution has the whole device, or while it
//! presses. Each is ended after [`Options::context_idle`](crate::Options) without a user.

use std::sync::Arc;

use fiec_broker::store;
use fiec_kit::frames::{Order, Report};
use fiec_kit::launch::Values;
use fiec_schemas::programs::{CG, GEMM, LU, QR};
use fiec_schemas::substrate::HOST;
use fiec_schemas::{ExecutionId, Reading, Tenant, Thresholds};

use crate::child_process::Setting;
use crate::packages::Package;
use crate::runner::Runner;
use crate::shared::Shared;
use crate::variables;
use crate::{large, outside};

/// An execution that will be bound here.
#[derive(Debug, Clone)]
pub(crate) struct Coming {
    /// The execution.
    pub execution: ExecutionId,
    /// Its tenant.
    pub tenant: Tenant,
    /// Its program.
    pub program: String,
    /// Its substrate on this node. None means the host.
    pub substrate: Option<String>,
}

/// Whether a program opens the device that it is granted.
fn computes_on_devices(program: &str, package: Option<&Arc<Package>>) -> bool {
    match package {
        // In our own child it cannot: a process that the child starts has its own contexts.
        Some(package) => package.command().is_some(),
        None => [CG, GEMM, LU, QR].contains(&program),
    }
}

/// Prepares the program, a child with parsed inputs and the device's context, and the objects that
/// the parameters name. The parameters come from the ledger.
pub(crate) async fn prepare(shared: Arc<Shared>, coming: Coming) {
    let Coming {
        execution,
        tenant,
        program,
        substrate,
    } = coming;
    let found = match outside::find(&shared, &program).await {
        Some(Ok(found)) => found,
        Some(Err(reason)) => {
            return tracing::warn!(%execution, %reason, "cannot prepare the program");
        }
        None => return,
    };
    let package = found.package();
    let state = match shared.ledger.last(&tenant, execution).await {
        Ok(entry) => entry.map(|entry| entry.message.state),
        Err(error) => {
            tracing::warn!(%execution, %error, "cannot read the parameters ahead of time");
            None
        }
    };
    let large = state.as_ref().and_then(|state| state.boundary.clone());
    let large = large.filter(store::is_large);
    let spec = state.and_then(|state| state.spec.clone());
    let spec = spec.filter(|spec| spec.program == program);
    if shared.options.warm {
        let device = substrate.filter(|place| place != HOST);
        let device = device.filter(|_| computes_on_devices(&program, package));
        let key = (program.clone(), tenant);
        let values = match &spec {
            Some(spec) => match variables::read(&shared, spec).await {
                Ok(values) => values,
                Err(reason) => {
                    return tracing::warn!(%execution, %reason, "cannot prepare a child");
                }
            },
            None => Values::default(),
        };
        let setting = Setting {
            device: device.clone(),
            values,
        };
        let taken = shared.pool.take(&key, execution, package, &setting);
        let mut child = match taken.await {
            Ok(child) => child,
            Err(error) => return tracing::warn!(%execution, %error, "cannot prepare a child"),
        };
        child.prepared_for = Some(execution);
        let device = device.filter(|device| {
            let spared = shared.devices.spares(device) && shared.pool.makes_room(device);
            if !spared {
                tracing::debug!(%execution, device, "no context is made ahead: it spares no memory");
            }
            spared
        });
        let order = match &spec {
            Some(spec) => Some(Order::Prepare {
                program,
                params: spec.params.clone(),
                package: package.map(|p| p.told(&setting.values)),
                device: device.clone(),
            }),
            None => device
                .clone()
                .filter(|_| package.is_none())
                .map(|device| Order::Heat { device }),
        };
        if let Some(order) = order {
            let held = child.context.take();
            child.context = device.or(held);
            if let Err(error) = child.order(&order, &[]).await {
                return tracing::warn!(%execution, %error, "the prepared child is gone");
            }
        }
        // Given to the pool at once: orders wait in its socket in their order.
        shared.pool.give(child);
    }
    if let Some(place) = large {
        large::prepare(&shared, execution, &place).await;
    }
    if let Some(spec) = spec {
        shared.data.fetch_ahead(&spec.params).await;
    }
}

impl Runner {
    /// The device that its binding names, if any.
    pub(crate) fn device(&self) -> Option<String> {
        let place = &self.tip.state.phase.binding()?.substrate;
        (place != HOST).then(|| place.clone())
    }

    /// A lease of a whole device includes all of its memory: end idle contexts on it.
    pub(crate) fn take_memory_back(&self) {
        let lease = self.slot.as_ref().and_then(|slot| slot.device.as_ref());
        if let (Some(device), true) = (self.device(), lease.is_some_and(|l| l.is_whole())) {
            self.shared.pool.cool(&device);
        }
    }

    /// The device whose context its child still holds after a run that ended with this report. A
    /// built-in program that has completed keeps it, and releases it when it yields. A package's
    /// own process may hold it in any case.
    pub(crate) fn context_after(&self, report: &Report) -> Option<String> {
        let completed = matches!(report, Report::Completed { .. });
        let package = self.program.package();
        let holds = match package {
            Some(package) => package.command().is_some(),
            None => completed && computes_on_devices(&self.spec.program, None),
        };
        self.device().filter(|_| holds)
    }
}

impl Shared {
    /// Ends idle children that are due, and starts new ones with contexts.
    pub(crate) async fn sweep_pool(&self) {
        let options = &self.options;
        let standing = options.warm_contexts;
        self.pool
            .sweep(options.child_idle, options.context_idle, standing);
        if !options.warm || standing == 0 || self.is_draining() {
            return;
        }
        for device in self.devices.ids() {
            if self.devices.spares(&device) {
                self.pool.heat(&device, standing).await;
                // It may have been leased, or press, since the check.
                if !self.devices.spares(&device) {
                    self.pool.cool(&device);
                }
            }
        }
    }

    /// Notes which devices press, and ends idle contexts on them.
    pub(crate) fn note_pressure(&self, readings: &[Reading], thresholds: &Thresholds) {
        for device in self.devices.ids() {
            let of_it = readings
                .iter()
                .filter(|r| r.device.as_ref() == Some(&device));
            let beyond = |r: &Reading| {
                let threshold = thresholds.get(&r.signal);
                threshold.is_some_and(|t| r.value.is_some_and(|value| value >= t.high))
            };
            let presses = of_it.into_iter().any(beyond);
            self.devices.press(&device, presses);
            if presses {
                self.pool.cool(&device);
            }
        }
    }
}
