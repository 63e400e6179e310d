//! Whatever runs, waits and arrives: the number of preemptions is bounded, and everything ends.

#![allow(clippy::unwrap_used, reason = "a test may end so")]

mod world;

use fiec_policy::Config;
use fiec_policy::Discipline;
use fiec_schemas::{NodeDescriptor, Tenant};
use proptest::prelude::*;
use world::World;
use world::lab::{Lab, node};

#[derive(Debug, Clone)]
struct Job {
    at_s: u64,
    length_s: u64,
    every_ms: u64,
    priority: i16,
    tenant: u8,
    deadline_s: Option<u32>,
    told: bool,
}

fn jobs() -> impl Strategy<Value = Vec<Job>> {
    let every = prop_oneof![Just(100u64), Just(2_000), Just(11_000)];
    let deadline = prop_oneof![3 => Just(None), 1 => (60u32..900).prop_map(Some)];
    let job = (
        (0u64..400, 1u64..400, every),
        (-2i16..3, 0u8..3, deadline, any::<bool>()),
    );
    let job = job.prop_map(
        |((at_s, length_s, every_ms), (priority, tenant, deadline_s, told))| Job {
            at_s,
            length_s,
            every_ms,
            priority,
            tenant,
            deadline_s,
            told,
        },
    );
    prop::collection::vec(job, 2..14)
}

/// Plays all jobs to their end, for as many seconds at least as all of them take one after another.
fn play_all(config: Config, jobs: &[Job], parks: u32) -> Lab {
    let place = NodeDescriptor { parks, ..node(2) };
    let mut lab = Lab::new(World::with(config, vec![place]));
    let mut coming: Vec<(u64, &Job)> = (1u64..).zip(jobs).collect();
    coming.sort_by_key(|(n, job)| (job.at_s, *n));
    let all: u64 = jobs
        .iter()
        .map(|j| j.length_s + j.every_ms / 1_000 + 1)
        .sum();
    let length = |n: u64| jobs[usize::try_from(n).unwrap() - 1].length_s * 1_000;
    for second in 0..400 + 2 * all {
        while let Some((n, job)) = coming.first().filter(|(_, job)| job.at_s <= second) {
            // Some have so little memory that they are parked with it.
            let bytes = 1_000_000 << (10 * (n % 2));
            let mut fields = format!(
                r#""priority":{},"requires":{{"memory_bytes":{}}}"#,
                job.priority,
                bytes.min(400_000_000)
            );
            if let Some(s) = job.deadline_s {
                fields += &format!(r#","deadline":{{"within_s":{s}}}"#);
            }
            if job.told {
                fields += &format!(r#","expected_s":{}"#, job.length_s);
            }
            let tenant = Tenant::new(["ann", "bob", "cat"][usize::from(job.tenant)]).unwrap();
            lab.w.tenants.insert(World::id(*n), tenant);
            lab.submit(*n, job.every_ms, &fields);
            coming.remove(0);
        }
        lab.play(1_000, length);
        if coming.is_empty() && lab.running().is_empty() && lab.w.policy.waiting() == 0 {
            break;
        }
    }
    lab
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Thrashing is impossible: in a time T an execution is preempted at most T / residency + 1
    /// times, and everything ends.
    #[test]
    fn preemptions_are_bounded_and_everything_ends(
        jobs in jobs(),
        discipline in prop_oneof![
            Just(Discipline::Priority), Just(Discipline::LeastAttained), Just(Discipline::Shared)
        ],
        residency in prop_oneof![Just(1_000u64), Just(5_000), Just(20_000)],
        parks in prop_oneof![Just(0u32), Just(1), Just(4)],
    ) {
        let config = Config {
            discipline,
            preempt_residency_ms: residency,
            slice_ms: 5_000,
            ageing_ms: 60_000,
            ..Config::default()
        };
        world::trace::untraced();
        let lab = play_all(config, &jobs, parks);
        for n in (1u64..).take(jobs.len()) {
            prop_assert_eq!(lab.phase(n), "completed", "{}", n);
            let at: Vec<u64> = lab.gave_way.iter().filter(|g| g.0 == n).map(|g| g.1).collect();
            let since = lab.w.ledgers[&World::id(n)].history[0].0;
            for (count, moment) in (1u64..).zip(&at) {
                let most = (moment - since) / residency + 1;
                prop_assert!(count <= most, "{n} gave way {count} times in {} ms", moment - since);
            }
            for pair in at.windows(2) {
                prop_assert!(pair[1] - pair[0] >= residency, "{n} at {at:?}");
            }
        }
    }
}
