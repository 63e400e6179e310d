//! The rules for a scenario. Each error names its field.

use std::collections::BTreeSet;

use fiec_schemas::dependency::AfterOutcome;
use fiec_schemas::quota::WEIGHT_LIMIT;
use fiec_schemas::scheduling::GANG_LIMIT;
use fiec_schemas::spread::UP_TO;
use fiec_schemas::strict::Strict;
use fiec_schemas::trust::Verify;
use fiec_schemas::{FieldError, NodeId};
use serde_json::Value;

use crate::scenario::{
    Arrivals, Fault, Load, NodeGroup, PolicyFault, Quantity, Scenario, Workload, node_names,
    spread_over,
};

/// Most nodes; the policy's own indices end far beyond.
const NODES_LIMIT: usize = 100_000;

/// Locates the first error of a text that is no scenario.
pub(crate) fn locate(text: &[u8], plain: &serde_json::Error) -> FieldError {
    if plain.is_syntax() || plain.is_eof() {
        return FieldError::new("", format!("not valid JSON: {plain}"));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    match serde_path_to_error::deserialize::<_, Scenario>(&mut deserializer) {
        Ok(_) => FieldError::new("", plain.to_string()),
        Err(error) => at_path(&error),
    }
}

/// Reads the text a second time, strictly. It has parsed once.
pub(crate) fn objects_are_objects(text: &[u8]) -> Result<(), FieldError> {
    let value: Value = serde_json::from_slice(text)
        .map_err(|error| FieldError::new("", format!("not valid JSON: {error}")))?;
    let strict: Result<Scenario, _> = serde_path_to_error::deserialize(Strict(&value));
    strict.map(drop).map_err(|error| at_path(&error))
}

fn at_path(error: &serde_path_to_error::Error<serde_json::Error>) -> FieldError {
    let path = error.path().to_string();
    let field = if path == "." { String::new() } else { path };
    FieldError::new(field, error.inner().to_string())
}

pub(crate) fn check(s: &Scenario) -> Result<(), FieldError> {
    within("duration_ms", s.duration_ms, 1, 366 * 86_400_000)?;
    within("drain_ms", s.drain_ms, 0, 366 * 86_400_000)?;
    within("policies", u64::from(s.policies), 1, 16)?;
    within("tick_ms", s.tick_ms, 1, 10_000)?;
    within("telemetry.sample_ms", s.telemetry.sample_ms, 1, 60_000)?;
    within(
        "telemetry.heartbeat_ms",
        s.telemetry.heartbeat_ms,
        s.telemetry.sample_ms,
        60_000,
    )?;
    let liveness = s.policy.config().liveness_ms;
    if s.telemetry.heartbeat_ms * 2 > liveness {
        let rule = format!(
            "must be at most half of the policy's liveness_ms ({liveness}), or nodes look lost"
        );
        return Err(FieldError::new("telemetry.heartbeat_ms", rule));
    }
    within("network.delay_us", s.network.delay_us, 0, 1_000_000)?;
    for (field, share) in [
        ("network.loss", s.network.loss),
        ("network.duplicate", s.network.duplicate),
    ] {
        if !(0.0..=0.5).contains(&share) {
            return Err(FieldError::new(
                field,
                format!("must be in [0, 0.5], but is {share}"),
            ));
        }
    }
    if s.nodes.is_empty() {
        return Err(FieldError::new("nodes", "must name at least one group"));
    }
    if s.node_count() > NODES_LIMIT {
        return Err(FieldError::new(
            "nodes",
            format!("at most {NODES_LIMIT} nodes are allowed"),
        ));
    }
    let mut names = BTreeSet::new();
    for (n, group) in s.nodes.iter().enumerate() {
        node_group(&format!("nodes[{n}]"), group, &mut names)?;
    }
    if s.workloads.is_empty() {
        return Err(FieldError::new("workloads", "must name at least one"));
    }
    let mut before = BTreeSet::new();
    for (n, w) in s.workloads.iter().enumerate() {
        before.insert(w.name.as_str());
        workload(&format!("workloads[{n}]"), w)?;
        demands(&format!("workloads[{n}]"), w, &before)?;
    }
    for (n, quota) in s.quotas.iter().enumerate() {
        if quota
            .weight
            .is_some_and(|w| !(1..=WEIGHT_LIMIT).contains(&w))
        {
            let rule = format!("must be from 1 to {WEIGHT_LIMIT}");
            return Err(FieldError::new(format!("quotas[{n}].weight"), rule));
        }
    }
    for (n, f) in s.faults.iter().enumerate() {
        fault(&format!("faults[{n}]"), f, s, &names)?;
    }
    Ok(())
}

fn within(field: &str, value: u64, least: u64, most: u64) -> Result<(), FieldError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(FieldError::new(
        field,
        format!("must be from {least} to {most}, but is {value}"),
    ))
}

fn node_group(
    field: &str,
    group: &NodeGroup,
    names: &mut BTreeSet<String>,
) -> Result<(), FieldError> {
    within(
        &format!("{field}.count"),
        u64::from(group.count),
        1,
        NODES_LIMIT as u64,
    )?;
    within(&format!("{field}.slots"), u64::from(group.slots), 1, 10_000)?;
    within(
        &format!("{field}.memory_bytes"),
        group.memory_bytes,
        1,
        1 << 60,
    )?;
    for name in node_names(group) {
        NodeId::new(&name)
            .map_err(|error| FieldError::new(format!("{field}.name"), error.to_string()))?;
        if !names.insert(name.clone()) {
            return Err(FieldError::new(
                format!("{field}.name"),
                format!("{name} is there twice"),
            ));
        }
    }
    quantity(&format!("{field}.speed"), &group.speed, 1e-6)?;
    for (signal, threshold) in group.thresholds.iter().flatten() {
        threshold.check().map_err(|(part, rule)| {
            FieldError::new(format!("{field}.thresholds.{signal}.{part}"), rule)
        })?;
    }
    for (signal, l) in &group.load {
        load(&format!("{field}.load.{signal}"), l)?;
    }
    Ok(())
}

fn quantity(field: &str, q: &Quantity, least: f64) -> Result<(), FieldError> {
    let parts: Vec<(&str, f64, f64)> = match *q {
        Quantity::Fixed(n) => vec![("fixed", n, least)],
        Quantity::Uniform { low, high } => {
            vec![("uniform.low", low, least), ("uniform.high", high, low)]
        }
        Quantity::Exponential { mean } => vec![("exponential.mean", mean, least.max(1e-9))],
        Quantity::Lognormal { median, sigma } => vec![
            ("lognormal.median", median, least.max(1e-9)),
            ("lognormal.sigma", sigma, 0.0),
        ],
        Quantity::Pareto { low, high, alpha } => vec![
            ("pareto.low", low, least.max(1e-9)),
            ("pareto.high", high, low),
            ("pareto.alpha", alpha, 1e-3),
        ],
    };
    for (part, value, least) in parts {
        if !(value.is_finite() && value >= least && value <= 1e15) {
            let rule = format!("must be a number from {least} to 1e15, but is {value}");
            return Err(FieldError::new(format!("{field}.{part}"), rule));
        }
    }
    Ok(())
}

fn load(field: &str, load: &Load) -> Result<(), FieldError> {
    let share = |part: &str, value: f64| {
        if (0.0..=1.0).contains(&value) {
            Ok(())
        } else {
            Err(FieldError::new(
                format!("{field}.{part}"),
                format!("must be in [0, 1], but is {value}"),
            ))
        }
    };
    match load {
        Load::Constant(value) => share("constant", *value),
        Load::Steps(steps) => {
            let mut last = 0;
            for (n, (at, value)) in steps.iter().enumerate() {
                share(&format!("steps[{n}]"), *value)?;
                if *at < last {
                    let rule = format!("must be in order of time, but {at} follows {last}");
                    return Err(FieldError::new(format!("{field}.steps[{n}]"), rule));
                }
                last = *at;
            }
            Ok(())
        }
        Load::Sine {
            mean,
            amplitude,
            period_ms,
            ..
        } => {
            share("sine.mean", *mean)?;
            share("sine.amplitude", *amplitude)?;
            within(&format!("{field}.sine.period_ms"), *period_ms, 1, u64::MAX)
        }
        Load::Walk {
            mean,
            deviation,
            memory_ms,
        } => {
            share("walk.mean", *mean)?;
            share("walk.deviation", *deviation)?;
            within(&format!("{field}.walk.memory_ms"), *memory_ms, 1, u64::MAX)
        }
        Load::Bursts {
            calm,
            burst,
            every_ms,
            for_ms,
        } => {
            share("bursts.calm", *calm)?;
            share("bursts.burst", *burst)?;
            within(&format!("{field}.bursts.every_ms"), *every_ms, 1, u64::MAX)?;
            within(&format!("{field}.bursts.for_ms"), *for_ms, 1, u64::MAX)
        }
    }
}

fn workload(field: &str, w: &Workload) -> Result<(), FieldError> {
    match &w.arrivals {
        Arrivals::AtOnce { count, .. } => within(
            &format!("{field}.arrivals.at_once.count"),
            *count,
            1,
            10_000_000,
        )?,
        Arrivals::Poisson { per_s, .. } => {
            if !(per_s.is_finite() && *per_s > 0.0 && *per_s <= 1e6) {
                let rule = format!("must be above 0 and at most 1e6, but is {per_s}");
                return Err(FieldError::new(
                    format!("{field}.arrivals.poisson.per_s"),
                    rule,
                ));
            }
        }
        Arrivals::Batches { size, every_ms, .. } => {
            within(
                &format!("{field}.arrivals.batches.size"),
                *size,
                1,
                1_000_000,
            )?;
            within(
                &format!("{field}.arrivals.batches.every_ms"),
                *every_ms,
                1,
                u64::MAX,
            )?;
        }
        Arrivals::Listed(moments) => {
            if !moments.is_sorted() {
                return Err(FieldError::new(
                    format!("{field}.arrivals.listed"),
                    "must be in order of time",
                ));
            }
        }
    }
    quantity(&format!("{field}.work_ms"), &w.work_ms, 0.001)?;
    quantity(&format!("{field}.capsule_ms"), &w.capsule_ms, 0.001)?;
    quantity(&format!("{field}.state_bytes"), &w.state_bytes, 0.0)?;
    quantity(&format!("{field}.memory_bytes"), &w.memory_bytes, 0.0)?;
    w.submission.check().map_err(|error| {
        let below = format!("{field}.submission.{}", error.field);
        FieldError::new(below, error.reason)
    })
}

/// Checks the dependencies and gangs of a workload.
fn demands(field: &str, w: &Workload, before: &BTreeSet<&str>) -> Result<(), FieldError> {
    for (n, after) in w.after.iter().enumerate() {
        // A dependency must come before the workloads that name it.
        if !before.contains(after.workload.as_str()) {
            let rule = format!("there is no workload {} before this one", after.workload);
            return Err(FieldError::new(
                format!("{field}.after[{n}].workload"),
                rule,
            ));
        }
        if let AfterOutcome::AtLeast(_) = after.on {
            let rule = "must be ok or any: a share is for groups, which a scenario does not have";
            return Err(FieldError::new(format!("{field}.after[{n}].on"), rule));
        }
    }
    let own = &w.submission;
    if let Some(size) = w.gang {
        within(&format!("{field}.gang"), size.into(), 2, GANG_LIMIT.into())?;
        if own.gang.is_some() {
            let field = format!("{field}.submission.gang");
            let rule = "cannot be given together with the workload's own `gang`";
            return Err(FieldError::new(field, rule));
        }
    }
    if let Some(up_to) = w.spread {
        let (least, most) = (*UP_TO.start(), *UP_TO.end());
        let spread = format!("{field}.spread");
        within(&spread, up_to.into(), least.into(), most.into())?;
        if w.gang_size().is_some() {
            let rule = "cannot be given together with a gang";
            return Err(FieldError::new(spread, rule));
        }
        spread_over(own, up_to, 1).check().map_err(|error| {
            let rule = format!("submission.{}: {}", error.field, error.reason);
            FieldError::new(spread, rule)
        })?;
    }
    if !(0.0..=1.0).contains(&w.fails) {
        let rule = format!("must be in [0, 1], but is {}", w.fails);
        return Err(FieldError::new(format!("{field}.fails"), rule));
    }
    for (part, named, instead) in [
        ("id", own.id.is_some(), "ids are given by the simulator"),
        (
            "after",
            !own.after.is_empty(),
            "say it in the workload's `after`",
        ),
        ("array", own.array.is_some(), "say how many in `arrivals`"),
        (
            "limit",
            own.limit.is_some(),
            "say how much it computes in the workload",
        ),
        (
            "not_before",
            own.not_before.is_some(),
            "say when in `arrivals`",
        ),
        (
            "spread",
            own.spread.is_some(),
            "say over how many in the workload's `spread`",
        ),
        (
            "verify",
            own.verify == Some(Verify::All),
            "nothing is computed once more here",
        ),
    ] {
        if named {
            let field = format!("{field}.submission.{part}");
            return Err(FieldError::new(field, format!("is not played: {instead}")));
        }
    }
    Ok(())
}

fn fault(
    field: &str,
    fault: &Fault,
    s: &Scenario,
    names: &BTreeSet<String>,
) -> Result<(), FieldError> {
    let node = |kind: &str, node: &NodeId| {
        if names.contains(node.as_str()) {
            return Ok(());
        }
        Err(FieldError::new(
            format!("{field}.{kind}.node"),
            format!("there is no node {node}"),
        ))
    };
    let policy = |kind: &str, f: &PolicyFault| {
        within(
            &format!("{field}.{kind}.policy"),
            u64::from(f.policy),
            0,
            u64::from(s.policies) - 1,
        )
    };
    let is_played = |field: String, program: &str| {
        let mut workloads = s.workloads.iter();
        if workloads.any(|w| w.submission.program == program) {
            return Ok(());
        }
        let rule = format!("there is no workload of the program {program}");
        Err(FieldError::new(field, rule))
    };
    match fault {
        Fault::CannotStart(f) => {
            node("cannot_start", &f.node)?;
            let field = format!("{field}.cannot_start.program");
            let program = f.program.as_deref();
            program.map_or(Ok(()), |program| is_played(field, program))
        }
        Fault::Kills(f) => {
            let boundary = format!("{field}.kills.boundary");
            within(&boundary, f.boundary, 1, u64::MAX)?;
            is_played(format!("{field}.kills.program"), &f.program)
        }
        Fault::Loss(f) => node("loss", &f.node),
        Fault::Silence(f) => node("silence", &f.node),
        Fault::Stall(f) => node("stall", &f.node),
        Fault::Drain(f) => node("drain", &f.node),
        Fault::Revoke(f) => node("revoke", &f.node),
        Fault::Cordon(f) => node("cordon", &f.node),
        Fault::PolicyStall(f) => policy("policy_stall", f),
        Fault::PolicyLoss(f) => policy("policy_loss", f),
        Fault::Random {
            every_ms, for_ms, ..
        } => {
            within(&format!("{field}.random.every_ms"), *every_ms, 1, u64::MAX)?;
            within(&format!("{field}.random.for_ms"), *for_ms, 1, u64::MAX)
        }
    }
}
