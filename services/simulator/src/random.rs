//! Small random scenarios, with everything that can happen to a cluster in a few minutes.

use std::collections::BTreeMap;

use fiec_schemas::dependency::AfterOutcome;
use fiec_schemas::scheduling::WhenUnviable;
use fiec_schemas::{BatchName, CommitPolicy, Signal, Tenant, Threshold};

use crate::draw::{Draw, Purpose};
use crate::scenario::{
    After, Arrivals, Drawn, Fault, Load, Network, NodeGroup, PolicyFault, Quantity, QuotaChange,
    Scenario, Telemetry, Workload, default_submission,
};
use crate::settings::Settings;

/// The scenario of a seed.
pub fn scenario(seed: u64) -> Scenario {
    let mut draw = Draw::new(seed, Purpose::Scenario);
    let d = &mut draw;
    let policies = 1 + d.below(2) as u32;
    let groups = 1 + d.below(3);
    let noisy = d.chance(0.5);
    let mut faults: Vec<Fault> = Vec::new();
    for what in [Drawn::Loss, Drawn::Silence, Drawn::Stall, Drawn::Drain] {
        if d.chance(0.5) {
            faults.push(Fault::Random {
                what,
                every_ms: 10_000 + d.below(60_000),
                for_ms: 1_000 + d.below(20_000),
                notice_ms: None,
            });
        }
    }
    for p in 0..policies {
        let mut fault = || PolicyFault {
            policy: p,
            at_ms: 10_000 + d.below(80_000),
            for_ms: 500 + d.below(8_000),
        };
        let (stall, loss) = (fault(), fault());
        if d.chance(0.3) {
            faults.push(Fault::PolicyStall(stall));
        }
        if d.chance(0.2) {
            faults.push(Fault::PolicyLoss(loss));
        }
    }
    let mut scenario = Scenario {
        about: String::new(),
        seed,
        duration_ms: 120_000,
        drain_ms: 600_000,
        policies,
        policy: Settings::default(),
        tick_ms: 50,
        hold_ms: 0,
        telemetry: Telemetry {
            sample_ms: 200 + d.below(400),
            heartbeat_ms: 1_000,
        },
        network: Network {
            delay_us: 100 + d.below(20_000),
            loss: if noisy { 0.1 * d.unit() } else { 0.0 },
            duplicate: if noisy { 0.1 * d.unit() } else { 0.0 },
        },
        nodes: (0..groups).map(|n| group(n, d)).collect(),
        workloads: (0..1 + d.below(3)).map(|n| workload(n, d)).collect(),
        quotas: Vec::new(),
        faults,
    };
    demand(&mut scenario, &mut Draw::new(seed, Purpose::Demands));
    spread(&mut scenario, &mut Draw::new(seed, Purpose::Spread));
    scenario
}

/// Draws spread ranges, with tiles short enough to be worth it.
fn spread(s: &mut Scenario, d: &mut Draw) {
    for w in &mut s.workloads {
        let (spreads, up_to) = (d.chance(0.25), 2 + d.below(7) as u32);
        let (work, capsule) = (1_000.0 + 30_000.0 * d.unit(), 1.0 + 300.0 * d.unit());
        if spreads && w.gang_size().is_none() {
            w.spread = Some(up_to);
            w.submission.program = "sweep@1".to_owned();
            w.work_ms = Quantity::Exponential { mean: work };
            w.capsule_ms = Quantity::Fixed(capsule);
        }
    }
}

/// Draws dependencies, gangs, batches, tenants, parks and revocations.
fn demand(s: &mut Scenario, d: &mut Draw) {
    let names: Vec<String> = s.workloads.iter().map(|w| w.name.clone()).collect();
    let lab = Tenant::new("lab").ok();
    for (n, w) in (0u64..).zip(&mut s.workloads) {
        if d.chance(0.3) {
            let other = usize::try_from(d.below(n + 1)).unwrap_or(0);
            w.after.push(After {
                workload: names[other].clone(),
                all: d.chance(0.3),
                on: match d.chance(0.3) {
                    true => AfterOutcome::Any,
                    false => AfterOutcome::Ok,
                },
            });
        }
        w.gang = d.chance(0.25).then(|| 2 + d.below(3) as u32);
        if d.chance(0.25) {
            w.submission.batch = BatchName::new(format!("b{n}")).ok();
            w.submission.at_once = Some(1 + d.below(8) as u32);
        }
        w.tenant = lab.clone().filter(|_| d.chance(0.3));
        w.fails = if d.chance(0.3) { 0.3 * d.unit() } else { 0.0 };
        if d.chance(0.3) {
            w.submission.priority = d.below(21) as i16 - 10;
        }
        w.submission.when_unviable = match d.below(6) {
            0 => WhenUnviable::Migrate,
            1 => WhenUnviable::Wait,
            2 => WhenUnviable::Suspend,
            _ => WhenUnviable::Cheapest,
        };
    }
    for group in &mut s.nodes {
        group.parks = d.below(3) as u32;
    }
    for tenant in Tenant::new("sim").ok().into_iter().chain(lab) {
        if !d.chance(0.4) {
            continue;
        }
        let mut at_ms = d.below(2) * d.below(60_000);
        for _ in 0..1 + d.below(2) {
            s.quotas.push(QuotaChange {
                tenant: tenant.clone(),
                at_ms,
                running: d.chance(0.8).then(|| 1 + d.below(8) as u32),
                memory_bytes: None,
                weight: d.chance(0.3).then(|| 1 + d.below(5) as u32),
            });
            at_ms += 1_000 + d.below(60_000);
        }
    }
    for (what, chance) in [(Drawn::Revoke, 0.4), (Drawn::Drain, 0.2)] {
        if d.chance(chance) {
            s.faults.push(Fault::Random {
                what,
                every_ms: 20_000 + d.below(60_000),
                for_ms: 5_000 + d.below(20_000),
                notice_ms: Some(2_000 + d.below(40_000)),
            });
        }
    }
}

fn load(d: &mut Draw) -> Load {
    match d.below(5) {
        0 => Load::Constant(0.1 + 0.5 * d.unit()),
        1 => Load::Sine {
            mean: 0.4 + 0.3 * d.unit(),
            amplitude: 0.4 * d.unit(),
            period_ms: 5_000 + d.below(60_000),
            phase_ms: None,
        },
        2 => Load::Walk {
            mean: 0.4 + 0.3 * d.unit(),
            deviation: 0.3 * d.unit(),
            memory_ms: 1_000 + d.below(30_000),
        },
        3 => Load::Bursts {
            calm: 0.5 * d.unit(),
            burst: 0.97,
            every_ms: 5_000 + d.below(60_000),
            for_ms: 1_000 + d.below(30_000),
        },
        _ => Load::Steps(vec![
            (0, 0.2),
            (5_000 + d.below(30_000), 0.95),
            (40_000 + d.below(40_000), 0.3 * d.unit()),
        ]),
    }
}

fn threshold(d: &mut Draw) -> Threshold {
    let high = 0.6 + 0.35 * d.unit();
    Threshold {
        high,
        low: high * (0.5 + 0.4 * d.unit()),
        dwell_ms: 100 + d.below(10_000) as u32,
    }
}

fn group(n: u64, d: &mut Draw) -> NodeGroup {
    let own = BTreeMap::from([(Signal::Memory, threshold(d))]);
    NodeGroup {
        start_ms: 0,
        parks: 0,
        name: format!("g{n}"),
        count: 2 + d.below(4) as u32,
        slots: 1 + d.below(4) as u32,
        memory_bytes: 1 << 30,
        cpus: 4,
        speed: Quantity::Uniform {
            low: 0.5,
            high: 2.0,
        },
        labels: BTreeMap::from([("rack".to_owned(), n.to_string())]),
        thresholds: d.chance(0.7).then_some(own),
        load: BTreeMap::from([(Signal::Memory, load(d))]),
    }
}

fn workload(n: u64, d: &mut Draw) -> Workload {
    let mut submission = default_submission();
    submission.commit = match d.below(3) {
        0 => CommitPolicy::Auto,
        1 => std::num::NonZeroU64::new(1 + d.below(20))
            .map_or(CommitPolicy::Auto, CommitPolicy::Every),
        _ => std::num::NonZeroU32::new(50 + d.below(5_000) as u32)
            .map_or(CommitPolicy::Auto, CommitPolicy::EveryMs),
    };
    if d.chance(0.3) {
        submission.viability = BTreeMap::from([(Signal::Memory, threshold(d))]);
    }
    if d.chance(0.3) {
        submission.requires.labels = BTreeMap::from([("rack".to_owned(), "0".to_owned())]);
    }
    let arrivals = match d.below(3) {
        0 => Arrivals::AtOnce {
            count: 1 + d.below(30),
            at_ms: d.below(20_000),
        },
        1 => Arrivals::Poisson {
            per_s: 0.1 + 4.0 * d.unit(),
            from_ms: 0,
            count: Some(1 + d.below(200)),
        },
        _ => Arrivals::Batches {
            size: 1 + d.below(10),
            every_ms: 1_000 + d.below(20_000),
            count: Some(60),
        },
    };
    let work_ms = match d.below(3) {
        0 => Quantity::Exponential {
            mean: 50.0 + 2_000.0 * d.unit(),
        },
        1 => Quantity::Lognormal {
            median: 1_000.0,
            sigma: 1.0,
        },
        _ => Quantity::Pareto {
            low: 500.0,
            high: 60_000.0,
            alpha: 1.1,
        },
    };
    Workload {
        name: format!("w{n}"),
        arrivals,
        work_ms,
        capsule_ms: Quantity::Uniform {
            low: 1.0,
            high: 500.0,
        },
        state_bytes: Quantity::Fixed(1_000.0),
        tenant: None,
        after: Vec::new(),
        gang: None,
        spread: None,
        fails: 0.0,
        memory_bytes: Quantity::Fixed(if d.chance(0.4) { 2e8 * d.unit() } else { 0.0 }),
        submission,
    }
}
