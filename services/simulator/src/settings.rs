//! The policy's settings in a scenario, and their changes by `--set`.

use fiec_policy::Config;
use fiec_schemas::{FieldError, Signal, Tenant};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scenario::{QuotaChange, Scenario};

/// The field of a configuration, by its name or by a path.
macro_rules! field {
    ($config:ident, $name:ident) => {
        $config.$name
    };
    ($config:ident, $name:ident, $group:ident.$field:ident) => {
        $config.$group.$field
    };
}

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident $(in $group:ident.$field:ident)?: $type:ty),* $(,)?) => {
        /// Settings of the policy that differ from its defaults.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub struct Settings {
            $($(#[$doc])*
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub $name: Option<$type>,)*
        }

        impl Settings {
            /// The policy's configuration with these settings.
            pub fn config(&self) -> Config {
                let mut config = Config::default();
                // A run has no history to report to.
                config.explanation.report_ms = 0;
                $(if let Some(value) = self.$name {
                    field!(config, $name $(, $group.$field)?) = value;
                })*
                config
            }

            fn set(&mut self, name: &str, text: &str) -> Option<Result<(), FieldError>> {
                match name {
                    $(stringify!($name) => Some(text.parse().map(|n| self.$name = Some(n)).map_err(|_| {
                        FieldError::new(name, format!("must be {}, but is {text:?}", wanted(stringify!($type))))
                    })),)*
                    _ => None,
                }
            }

            /// The names of all settings.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];
        }
    };
}

/// The valid values of a setting's type, in words.
fn wanted(of: &str) -> &'static str {
    match of {
        "bool" => "true or false",
        _ => "a whole number of at least 0",
    }
}

settings! {
    /// Silence after which a node is probed.
    liveness_ms: u64,
    /// Gap between ticks after which a policy service distrusts its clock.
    stall_ms: u64,
    /// Time after which the capsule of a binding that has not started is sent again.
    take_ms: u64,
    /// The same while its node reports a backlog.
    take_busy_ms: u64,
    /// Longest wait behind long work while another node has a free slot.
    balance_ms: u64,
    /// Time that other replicas wait for the preferred one.
    grace_ms: u64,
    /// The same for orders.
    order_grace_ms: u64,
    /// Time until a refused order is repeated.
    order_retry_ms: u64,
    /// Time until an accepted order is repeated.
    order_repeat_ms: u64,
    /// Silence after which a replica counts as absent.
    replica_ms: u64,
    /// Time for which a node that refused an execution is avoided for it.
    avoid_ms: u64,
    /// Time for which a node that could not start a program is set aside for it. It doubles with
    /// each failure in a row.
    start_retry_ms: u64,
    /// The longest such time.
    start_retry_longest_ms: u64,
    /// Workers that may end while they compute an execution without a commit, before it is held.
    deadly_workers: u32,
    /// A node's queue holds at most the executions that start within this time.
    horizon_ms: u64,
    /// A node's queue holds at most its completions within this time.
    queue_ms: u64,
    /// Queued executions that each recent completion allows.
    ahead_per_completion: u32,
    /// Most queued executions on a node.
    ahead_limit: u32,
    /// Shortest time between two rebindings for pressure.
    residency_floor_ms: u64,
    /// Time after which the reservation of an execution without a place is given back.
    reserve_ms in quotas.reserve_ms: u64,
    /// Time within which all members of a gang must be bound and started. Otherwise the gang starts
    /// again.
    gang_ms in gangs.start_ms: u64,
    /// Time without places after which free places are reserved for a gang.
    gang_keep_ms in gangs.keep_ms: u64,
    /// Time for which a tenant may exceed a lowered quota before executions are preempted.
    quota_grace_ms in quotas.grace_ms: u64,
    /// Time for which a place must be free before a range is split, and for which an awaited part
    /// may lack a place.
    spread_dwell_ms in spreading.dwell_ms: u64,
    /// Least remaining time of a range that is split.
    spread_least_ms in spreading.least_ms: u64,
    /// The same as a multiple of the cost of a move.
    spread_moves in spreading.moves: u64,
    /// Most appends of one call.
    burst: usize,
    /// True if a higher priority, a tenant below its share, or a deadline preempts.
    preempt: bool,
    /// True if the end of a time slice preempts.
    slicing in sharing.slicing: bool,
    /// A time slice.
    slice_ms: u64,
    /// Shortest stay in a place before a preemption.
    preempt_residency_ms: u64,
    /// The same as a multiple of the cost of a move.
    preempt_residency_moves: u64,
    /// Interval between two reviews of preemption.
    preempt_review_ms in sharing.review_ms: u64,
    /// Wait after which an execution's priority counts one higher.
    ageing_ms: u64,
    /// Half-life of a tenant's usage.
    half_life_ms: u64,
}

impl Settings {
    /// True if all settings have their defaults.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes a scenario by one `NAME=VALUE`. The name is a setting of the policy, or `high`, `low` or
/// `dwell_ms` of all thresholds of nodes and submissions. `high.memory` changes one signal only.
/// `quota.lab.running` changes a tenant's quota.
///
/// # Errors
/// The name, and the error in it or in its value.
pub fn set(scenario: &mut Scenario, change: &str) -> Result<(), FieldError> {
    let (name, text) = change.split_once('=').ok_or_else(|| {
        FieldError::new(
            change,
            "must be NAME=VALUE, e.g. dwell_ms=5000 or high.memory=0.8",
        )
    })?;
    if let Some(result) = scenario.policy.set(name, text) {
        return result;
    }
    if let Some(of) = name.strip_prefix("quota.") {
        return set_quota(scenario, name, of, text);
    }
    let (field, signal) = match name.split_once('.') {
        Some((field, signal)) => (field, Some(signal_of(name, signal)?)),
        None => (name, None),
    };
    let bad = |what: &str| FieldError::new(name, format!("must be {what}, but is {text:?}"));
    let share = || text.parse::<f64>().map_err(|_| bad("a number in [0, 1]"));
    let mut thresholds: Vec<_> = Vec::new();
    for group in &mut scenario.nodes {
        let all = group
            .thresholds
            .get_or_insert_with(fiec_schemas::hardware::default_thresholds);
        thresholds.extend(all.iter_mut());
    }
    for workload in &mut scenario.workloads {
        thresholds.extend(workload.submission.viability.iter_mut());
    }
    for (of, threshold) in thresholds {
        if signal.is_some_and(|signal| signal != *of) {
            continue;
        }
        match field {
            "high" => threshold.high = share()?,
            "low" => threshold.low = share()?,
            "dwell_ms" => {
                threshold.dwell_ms = text
                    .parse()
                    .map_err(|_| bad("a whole number of milliseconds"))?;
            }
            _ => {
                let known = Settings::NAMES.join(", ");
                return Err(FieldError::new(
                    name,
                    format!(
                        "is no setting; there are high, low, dwell_ms (also as high.memory), \
                         quota.TENANT.running, .memory_bytes and .weight, {known}"
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Sets a quota for the whole run: `TENANT.running`, and `none` for no limit.
fn set_quota(scenario: &mut Scenario, name: &str, of: &str, text: &str) -> Result<(), FieldError> {
    let bad = |rule: String| FieldError::new(name, rule);
    let (tenant, field) = of
        .split_once('.')
        .ok_or_else(|| bad("must be quota.TENANT.running, .memory_bytes or .weight".to_owned()))?;
    let tenant = Tenant::new(tenant).map_err(|error| bad(error.to_string()))?;
    if !scenario
        .workloads
        .iter()
        .any(|w| w.tenant.as_ref() == Some(&tenant))
    {
        return Err(bad(format!("no workload is of the tenant {tenant}")));
    }
    let number = match text {
        "none" => None,
        text => Some(
            text.parse::<u64>()
                .map_err(|_| bad(format!("must be a whole number or `none`, but is {text:?}")))?,
        ),
    };
    let small = |number: Option<u64>| number.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let own = |q: &&mut QuotaChange| q.tenant == tenant;
    if !scenario.quotas.iter_mut().any(|q| own(&q) && q.at_ms == 0) {
        let none = QuotaChange {
            tenant: tenant.clone(),
            at_ms: 0,
            running: None,
            memory_bytes: None,
            weight: None,
        };
        scenario.quotas.insert(0, none);
    }
    for quota in scenario.quotas.iter_mut().filter(own) {
        match field {
            "running" => quota.running = small(number),
            "memory_bytes" => quota.memory_bytes = number,
            "weight" => quota.weight = small(number),
            _ => {
                let rule = format!("{field} is no limit; there are running, memory_bytes, weight");
                return Err(bad(rule));
            }
        }
    }
    Ok(())
}

fn signal_of(name: &str, signal: &str) -> Result<Signal, FieldError> {
    Signal::ALL
        .into_iter()
        .find(|s| s.as_str() == signal)
        .ok_or_else(|| {
            let all: Vec<_> = Signal::ALL.iter().map(|s| s.as_str()).collect();
            FieldError::new(
                name,
                format!(
                    "{signal:?} is no signal; the signals are {}",
                    all.join(", ")
                ),
            )
        })
}
