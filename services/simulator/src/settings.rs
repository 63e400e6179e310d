//! The policy's settings as a scenario names them, and as `--set` changes them.

use fiec_policy::Config;
use fiec_schemas::{FieldError, Signal, Tenant};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scenario::{QuotaChange, Scenario};

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident: $type:ty),* $(,)?) => {
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
                // There is no history that it could be told to.
                config.tell_ms = 0;
                $(if let Some(value) = self.$name { config.$name = value; })*
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

/// What a setting of a type must be, in words.
fn wanted(of: &str) -> &'static str {
    match of {
        "bool" => "true or false",
        _ => "a whole number of at least 0",
    }
}

settings! {
    /// Silence after which a node is probed.
    liveness_ms: u64,
    /// A gap between ticks after which a policy service distrusts its clock.
    stall_ms: u64,
    /// How long a binding may wait to be taken up.
    take_ms: u64,
    /// The same while its node has a backlog.
    take_busy_ms: u64,
    /// How long an execution may wait behind long work while another node has a free slot.
    balance_ms: u64,
    /// How long other replicas wait for the preferred one.
    grace_ms: u64,
    /// The same for orders.
    order_grace_ms: u64,
    /// An order that was refused is tried again after this.
    order_retry_ms: u64,
    /// An order that was taken is repeated after this.
    order_repeat_ms: u64,
    /// A replica not heard for so long is absent.
    replica_ms: u64,
    /// How long a node that refused an execution is left alone for it.
    avoid_ms: u64,
    /// What a node may be given ahead is what it begins within this time.
    horizon_ms: u64,
    /// Nor more than it completes within this time.
    queue_ms: u64,
    /// What a node may be given ahead for each recent completion.
    ahead_per_completion: u32,
    /// The most that a node may be given ahead.
    ahead_limit: u32,
    /// The least time between two rebindings for pressure.
    residency_floor_ms: u64,
    /// A reservation whose execution has found no room for so long is given back.
    reserve_ms: u64,
    /// A gang that is not bound, or not started, in full within this time begins anew.
    gang_ms: u64,
    /// A gang that has found no room for so long has what becomes free kept for it.
    gang_keep_ms: u64,
    /// What runs beyond a quota that was lowered goes on for so long before it gives way.
    quota_grace_ms: u64,
    /// How long there must have been a place for one more before a range is spread further, and how
    /// long a part that is waited for may have none.
    spread_dwell_ms: u64,
    /// No range is split that is done in less.
    spread_least_ms: u64,
    /// The same as a multiple of what a move costs it.
    spread_moves: u64,
    /// Appends that one call may ask for.
    burst: usize,
    /// Whether what runs gives way to a higher priority, a tenant below its share, a deadline.
    preempt: bool,
    /// Whether what runs gives way when its slice of time is over.
    slicing: bool,
    /// A slice of time.
    slice_ms: u64,
    /// How long, at least, something computes at a place before it gives way.
    preempt_residency_ms: u64,
    /// The same as a multiple of what a move costs it.
    preempt_residency_moves: u64,
    /// How often it is looked at who should give way.
    preempt_review_ms: u64,
    /// What has waited so long counts as if its priority were one higher.
    ageing_ms: u64,
    /// After so long what a tenant has used counts half.
    half_life_ms: u64,
}

impl Settings {
    /// True where all is as by default.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes a scenario's policy by one `NAME=VALUE`: a setting of the policy, or `high`, `low`,
/// `dwell_ms` of all thresholds, or of one signal's (`high.memory`), of nodes and of submissions, or
/// what a tenant may use at once (`quota.lab.running`).
///
/// # Errors
/// The name, and what is wrong with it or with its value.
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

/// What a tenant may use at once, at all times: `TENANT.running`, and `none` for no limit.
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
