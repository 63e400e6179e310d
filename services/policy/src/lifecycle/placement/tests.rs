//! A choice by the ranking equals a scan of all places, whatever happened before.

use fiec_schemas::hardware::Substrate;
use fiec_schemas::trust::{Proof, Quarantine, Quarantined, SignedProof};
use fiec_schemas::{
    Contract, Digest, ExecutionId, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId,
    Submission, Tenant,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use uuid::Uuid;

use super::*;
use crate::{Input, Millis, Policy};
use crate::{Judged, NewExecution};

const START_MS: u64 = 86_400_000;
const START_US: i64 = 1_700_000_000_000_000;
const NODES: u32 = 24;

/// An event in a cluster.
#[derive(Debug, Clone)]
enum Step {
    Join(u32, u8),
    Leave(u32),
    Prove(u32, u64),
    Distrust(u32),
    Tell(u32, f64, f64),
    Flag(u32, bool, bool),
    Silent(u32),
    Submit(usize),
    End(usize),
    Complete(u32, u32),
    Pass(u64),
}

/// The restrictions of an execution beside its profile.
#[derive(Debug, Clone)]
struct Wish {
    who: usize,
    left: Vec<u32>,
    avoid: Vec<u32>,
    leaving: Option<(u32, Option<u16>)>,
    only: Option<u32>,
    free_slot: bool,
    counts: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let node = 0..NODES;
    let level = prop_oneof![Just(0.3), Just(0.31), Just(0.8), Just(0.97)];
    prop_oneof![
        4 => (node.clone(), any::<u8>()).prop_map(|(n, kind)| Step::Join(n, kind)),
        1 => node.clone().prop_map(Step::Leave),
        3 => (node.clone(), 1u64..20_000).prop_map(|(n, ms)| Step::Prove(n, ms)),
        1 => node.clone().prop_map(Step::Distrust),
        8 => (node.clone(), level.clone(), level).prop_map(|(n, a, b)| Step::Tell(n, a, b)),
        2 => (node.clone(), any::<bool>(), any::<bool>()).prop_map(|(n, a, b)| Step::Flag(n, a, b)),
        1 => node.clone().prop_map(Step::Silent),
        10 => (0..SPECS.len()).prop_map(Step::Submit),
        3 => any::<usize>().prop_map(Step::End),
        3 => (node, 1u32..200).prop_map(|(n, times)| Step::Complete(n, times)),
        3 => (0u64..3_000).prop_map(Step::Pass),
    ]
}

fn wish() -> impl Strategy<Value = Wish> {
    let some = |most| prop::collection::vec(0..NODES, 0..most);
    let leaving = prop::option::weighted(0.3, (0..NODES, prop::option::of(0u16..2)));
    let only = prop::option::weighted(0.1, 0..NODES);
    (
        any::<usize>(),
        some(4),
        some(4),
        leaving,
        only,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(
            |(who, left, avoid, leaving, only, free_slot, counts)| Wish {
                who,
                left,
                avoid,
                leaving,
                only,
                free_slot,
                counts,
            },
        )
}

const SPECS: [&str; 7] = [
    r#"{"program": "p@1"}"#,
    r#"{"program": "p@1", "requires": {"labels": {"rack": "1"}}}"#,
    r#"{"program": "p@1", "requires": {"device": {"memory_bytes": 100}}}"#,
    r#"{"program": "p@1", "prefers": {"cores": 8, "device": {"memory_bytes": 150}}}"#,
    r#"{"program": "p@1", "viability": {"memory": {"high": 0.5, "low": 0.4, "dwell_ms": 900}}}"#,
    r#"{"program": "p@1", "requires": {"device": {"share_bytes": 60, "viable_by": "device"}}}"#,
    r#"{"program": "q@1", "contract": "statistical", "requires": {"free_memory_bytes": 400}}"#,
];

/// A policy with some nodes, and a clock.
struct Cast {
    policy: Policy,
    ms: u64,
    count: u64,
    submitted: u128,
    live: Vec<ExecutionId>,
}

impl Cast {
    fn new() -> Self {
        let own = InstanceId(Uuid::from_u128(1));
        let mut cast = Self {
            policy: Policy::new(Config::default(), own),
            ms: START_MS,
            count: 0,
            submitted: 0,
            live: Vec::new(),
        };
        cast.tell(Input::Loaded);
        cast
    }

    fn now(&self) -> Now {
        let passed = i64::try_from(self.ms - START_MS).unwrap();
        Now {
            mono: Millis(self.ms),
            wall: Timestamp::from_micros(START_US + passed * 1_000),
        }
    }

    fn tell(&mut self, input: Input) {
        self.policy.step(self.now(), input, &mut Vec::new());
    }

    fn take(&mut self, step: &Step) {
        let name = |n: u32| NodeId::new(format!("n{:02}", (n * 7) % NODES)).unwrap();
        match *step {
            Step::Join(n, kind) => {
                let d = descriptor(&name(n), n, kind);
                self.tell(Input::Descriptor {
                    descriptor: Box::new(d),
                });
                self.take(&Step::Prove(n, 60_000));
                self.take(&Step::Tell(n, 0.3, 0.3));
            }
            Step::Leave(n) => self.tell(Input::Gone { node: name(n) }),
            Step::Prove(n, ms) => {
                let Some(d) = self.descriptor(n) else { return };
                let wall = self.now().wall;
                let until =
                    Timestamp::from_micros(wall.micros() + i64::try_from(ms).unwrap() * 1_000);
                let signed = SignedProof {
                    v: 1,
                    statement: String::new(),
                    key: String::new(),
                    sig: String::new(),
                };
                self.tell(Input::Proof {
                    node: d.node.clone(),
                    signed: Box::new(signed),
                    judged: Judged::Counts(Proof::passing(&d, 1, wall, until)),
                });
            }
            Step::Distrust(n) => {
                let entry = Quarantined {
                    contract: Contract::Bitwise,
                    substrate: None,
                    reason: "test".into(),
                    who: "ann".into(),
                    at: self.now().wall,
                };
                let lost = Quarantine {
                    entries: vec![entry],
                    released: None,
                };
                self.tell(Input::Quarantine {
                    node: name(n),
                    quarantine: lost,
                });
            }
            Step::Tell(n, host, device) => {
                let Some(d) = self.descriptor(n) else { return };
                self.count += 1;
                let vector = vector(&d, self.count, host, device);
                self.tell(Input::Vector {
                    vector: Box::new(vector),
                    age_ms: 0,
                });
            }
            Step::Flag(n, cordoned, draining) => {
                let flags = NodeFlags {
                    cordoned,
                    draining,
                    ..NodeFlags::default()
                };
                self.tell(Input::Flags {
                    node: name(n),
                    flags,
                });
            }
            Step::Silent(n) => self.tell(Input::Probe {
                node: name(n),
                answered: None,
            }),
            Step::Submit(which) => {
                let spec = Submission::parse(SPECS[which].as_bytes()).unwrap();
                self.submitted += 1;
                let execution = ExecutionId(Uuid::from_u128(self.submitted));
                self.live.push(execution);
                let now = self.now();
                let new = NewExecution {
                    execution,
                    tenant: &Tenant::new("t").unwrap(),
                    spec: &spec,
                    submitted_at: now.wall,
                };
                let _ = self.policy.submit(now, new, false, &mut Vec::new());
            }
            Step::End(which) if !self.live.is_empty() => {
                let execution = self.live.swap_remove(which % self.live.len());
                self.tell(Input::Vanished { execution });
            }
            Step::End(_) => {}
            Step::Complete(n, times) => {
                let now = self.now().mono;
                let cluster = &mut self.policy.life.cluster;
                if let Some(ix) = cluster.find(&name(n)) {
                    let speed = &mut cluster.node_mut(ix).speed;
                    (0..times).for_each(|_| speed.completed(now, 2_000));
                }
            }
            Step::Pass(ms) => {
                self.ms += ms;
                self.tell(Input::Tick);
            }
        }
    }

    fn descriptor(&self, n: u32) -> Option<NodeDescriptor> {
        let name = NodeId::new(format!("n{:02}", (n * 7) % NODES)).unwrap();
        let ix = self.policy.life.cluster.find(&name)?;
        self.policy
            .life
            .cluster
            .node(ix)
            .descriptor
            .as_deref()
            .cloned()
    }

    /// Compares the ranking's choice with a scan of all places.
    fn check(&mut self, wish: &Wish) -> Result<Option<bool>, TestCaseError> {
        if self.live.is_empty() {
            return Ok(None);
        }
        let now = self.now();
        let (cluster, config) = (&self.policy.life.cluster, &Config::default());
        let Some(e) = cluster.execution(self.live[wish.who % self.live.len()]) else {
            return Ok(None);
        };
        let nodes = cluster.keys();
        let node = |n: u32| nodes.get(usize::try_from(n).ok()?).copied();
        let some = |all: &[u32]| -> Vec<NodeIx> { all.iter().filter_map(|n| node(*n)).collect() };
        let left: Vec<_> = some(&wish.left).iter().map(|ix| (*ix, now.wall)).collect();
        let avoid: Vec<_> = some(&wish.avoid)
            .iter()
            .map(|ix| Avoided {
                node: *ix,
                until: now.mono.plus(1),
                refusals: 0,
            })
            .collect();
        let leaving = wish.leaving.and_then(|(n, at)| match at {
            Some(0) => Some(Leaving::Place(node(n)?, None)),
            Some(at) => Some(Leaving::Place(node(n)?, Some(DeviceIx(at - 1)))),
            None => Some(Leaving::Node(node(n)?)),
        });
        let mut ask = Ask {
            avoid,
            only: wish.only.and_then(node),
            free_slot: wish.free_slot,
            left,
            ..Ask::new(e.profile)
        }
        .leaves(leaving);
        if wish.counts
            && let Some(ix) = e.stage.node()
        {
            ask.counted = Some((ix, e.claim));
        }
        let rankings = &mut self.policy.life.rankings;
        let found = choose(rankings, cluster, config, now, &ask);
        let wanted = look_at_all(cluster, config, now, &ask);
        let facts = |c: &Option<Choice>| c.as_ref().map(|c| (c.node, c.device, c.decision.clone()));
        prop_assert_eq!(facts(&found), facts(&wanted), "{:?}", ask);
        if let Some(only) = ask.only {
            let would = would_do(cluster, config, now, &ask, only);
            prop_assert_eq!(would, found.is_some(), "{:?}", ask);
            let nodes = std::iter::once(only);
            let could = could_be(rankings, cluster, config, now, e.profile, nodes);
            prop_assert!(could[0] || !would, "{:?}", ask);
        }
        let plain = Ask::new(e.profile);
        if choose(rankings, cluster, config, now, &plain).is_none() {
            let search = Search::new(cluster, config, now, &plain).unwrap();
            let full = search.views().any(|place| Rank::of(&place) == Rank::Full);
            let found = would_take_with_room(rankings, cluster, config, now, e.profile);
            prop_assert_eq!(found, full);
        }
        Ok(Some(wanted.is_some()))
    }
}

/// The choice by definition: a scan of all places.
fn look_at_all(cluster: &Cluster, config: &Config, now: Now, ask: &Ask) -> Option<Choice> {
    let plain = Ask::new(ask.profile);
    let anybody = Search::new(cluster, config, now, &plain)?;
    let search = Search { ask, ..anybody };
    let joined = |place: &View<'_, '_>| place.node.descriptor.is_some();
    let mut best: Option<(f64, View<'_, '_>)> = None;
    for place in search.views() {
        let score = score::score(&place);
        if best.as_ref().is_none_or(|(top, _)| score > *top) && reasons(&place).next().is_none() {
            best = Some((score, place));
        }
    }
    let (_, best) = best?;
    let mut order: Vec<Key> = anybody
        .views()
        .filter(joined)
        .map(|place| Key::of(&place))
        .collect();
    order.sort();
    let all = order.len();
    let others = order
        .iter()
        .filter(|key| (key.ix, key.at) != (best.ix, best.at));
    let others = others.map(|key| search.candidate(&search.view(key.ix, key.at)));
    let mut candidates = vec![search.candidate(&best)];
    candidates.extend(others.take(CANDIDATES_LIMIT - 1));
    let omitted = u32::try_from(all - candidates.len()).unwrap();
    Some(Choice {
        node: best.ix,
        device: best.at,
        decision: Decision {
            candidates,
            omitted,
            entrusted: None,
        },
    })
}

/// One instance of a node. `kind` determines its resources and offers.
fn descriptor(node: &NodeId, n: u32, kind: u8) -> NodeDescriptor {
    let host: Substrate =
        serde_json::from_value(json!({"id": "host", "kind": "cpu", "name": "cpu"})).unwrap();
    let gpu = |d: u8| -> Substrate {
        let memory = 80 + 40 * u64::from(kind % 4);
        serde_json::from_value(json!({
            "id": format!("GPU-{n}-{d}"), "kind": "gpu", "name": "test", "memory_bytes": memory,
        }))
        .unwrap()
    };
    let devices = (0..kind % 3).map(gpu);
    let substrates: Vec<Substrate> = std::iter::once(host).chain(devices).collect();
    let programs: Value = if kind % 8 == 7 {
        json!(["q@*"])
    } else {
        json!(["*"])
    };
    serde_json::from_value(json!({
        "v": 1, "node": node, "instance": Uuid::from_u128(1_000 + u128::from(n)), "host": "h",
        "pid": 1, "version": "0", "started_at": "2026-01-01T00:00:00.000000Z", "shard": 0,
        "slots": 1 + kind % 3, "cpus": 4 + kind % 8, "isa": "x", "memory_limit_bytes": 1_000,
        "memory_limit_source": "declared", "substrates": substrates, "programs": programs,
        "labels": {"rack": (kind % 4).to_string()},
        "thresholds": {"memory": {"high": 0.9, "low": 0.7, "dwell_ms": 1_000}},
        "identity": {"key": "U", "environment": Digest::of(b"played")},
    }))
    .unwrap()
}

fn vector(d: &NodeDescriptor, count: u64, host: f64, device: f64) -> HardwareVector {
    let devices = d.substrates.iter().filter(|s| s.is_device());
    let of = |at: Option<&str>, value: f64| {
        json!({"signal": "memory", "device": at, "value": value, "raw": value * 1_000.0,
            "limit": 1_000.0, "unit": "bytes", "source": "test",
            "at": "2026-01-01T00:00:00.000000Z"})
    };
    let readings: Vec<Value> = std::iter::once(of(None, host))
        .chain(devices.map(|s| of(Some(&s.id), device)))
        .collect();
    serde_json::from_value(json!({
        "v": 1, "node": d.node, "instance": d.instance, "count": count,
        "at": "2026-01-01T00:00:00.000000Z", "slots": d.slots, "running_count": 0,
        "queued_count": 0, "readings": readings,
    }))
    .unwrap()
}

proptest! {
    #[test]
    fn a_choice_by_the_ranking_is_that_of_a_look_at_every_place(
        joins in prop::collection::vec(any::<u8>(), 1..NODES as usize),
        steps in prop::collection::vec((step(), wish(), any::<bool>()), 1..120),
    ) {
        let mut cast = Cast::new();
        for (n, kind) in (0..).zip(joins) {
            cast.take(&Step::Join(n, kind));
        }
        for (step, wish, asks) in steps {
            cast.take(&step);
            if asks {
                cast.check(&wish)?;
            }
        }
    }
}

/// The property above is meaningful only if enough happens in it.
#[test]
fn what_is_played_finds_places_and_finds_none() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let (mut found, mut none) = (0, 0);
    for _ in 0..20 {
        let steps = prop::collection::vec((step(), wish()), 100);
        let steps = steps.new_tree(&mut runner).unwrap().current();
        let mut cast = Cast::new();
        for (step, wish) in steps {
            cast.take(&step);
            match cast.check(&wish).unwrap() {
                Some(true) => found += 1,
                Some(false) => none += 1,
                None => {}
            }
        }
    }
    assert!(found > 200 && none > 200, "{found} found, {none} not");
}
