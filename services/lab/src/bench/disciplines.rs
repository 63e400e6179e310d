//! `bench disciplines`: heavy-tailed jobs of one device each on a small cluster. The disciplines are
//! first come first served, priority, least attained service with preemption at boundaries, and ours.
//! The figures are mean and 95th percentile of the time from submission to the end. The floor is the
//! mean length of the jobs: their time on a cluster without limits.
//!
//! The jobs run in the simulator, on the trace of [`fiec_simulator::disciplines`]. With `--real`, jobs
//! of seconds run with real servers, a real worker and real programs, and in the simulator as well.
//! `pairs_in_order` says how far the simulator can be trusted: of the pairs of disciplines that it
//! tells apart, the share that has the same order in reality.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use fiec_policy::Discipline;
use fiec_schemas::{Submission, Timestamp};
use fiec_simulator::disciplines::{self, Trace};
use fiec_simulator::draw::{Draw, Purpose};
use fiec_simulator::scenario::{
    Arrivals, Network, NodeGroup, Quantity, Scenario, Telemetry, Workload,
};
use fiec_simulator::settings::Settings;
use serde_json::json;

use super::figures::quantile;
use super::{Lab, follow, submit};
use crate::cluster::{Cluster, ClusterOptions};

/// Slots of the real worker.
const SLOTS: usize = 2;
/// Time of one capsule of a real job.
const CAPSULE: Duration = Duration::from_millis(20);
/// Work submitted to the real worker, as a share of its capacity.
const LOAD: f64 = 1.0;
/// Its jobs.
const JOBS: usize = 80;
/// Jobs take seconds here instead of hours, so a slice of 30 s is half a second, and all other times
/// are scaled alike.
const SLICE_MS: u64 = 500;
const RESIDENCY_MS: u64 = 200;
const AGEING_MS: u64 = 60_000;
/// Time of a real job's start in a warm child.
const START_MS: u64 = 5;
/// Simulated means that differ by a smaller share count as equal.
const APART: f64 = 0.1;

/// Runs the bench: `mean_completion_s`, `p95_completion_s` and `preemptions` by discipline and case.
///
/// # Errors
/// Where a promise is broken, or something could not be started or measured.
pub async fn run(lab: &mut Lab<'_>, real: bool) -> anyhow::Result<()> {
    if real {
        real_ones(lab).await
    } else {
        simulated(lab)
    }
}

/// The seeds of one discipline. All jobs of all seeds count alike.
fn simulated(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let seeds = u64::try_from(lab.samples(10))?;
    // The cost of a move matters much. The cases are none, and the start of a training job.
    for start_ms in [0, 10_000] {
        for discipline in Discipline::ALL {
            let (mut mean, mut p95, mut preemptions, mut work) = (0.0, 0.0, 0.0, 0.0);
            for seed in 1..=seeds {
                lab.steps_message(&format!(
                    "disciplines: {discipline}, seed {seed} of {seeds}"
                ));
                let trace = Trace {
                    seed,
                    start_ms,
                    ..Trace::default()
                };
                let found = trace.play(discipline);
                let found = found.map_err(|e| anyhow::anyhow!("{discipline}, seed {seed}: {e}"))?;
                mean += found.lasted.mean_ms / 1e3;
                p95 += found.lasted.p95_ms / 1e3;
                preemptions += found.preemptions as f64 / found.submitted as f64;
                work += found.work_ms / found.submitted as f64 / 1e3;
            }
            let case = format!("{discipline}, simulated, {} s to begin", start_ms / 1_000);
            let each = |sum: f64| sum / seeds as f64;
            let add = &mut *lab.figures;
            let floor = Some(each(work));
            add.add(
                "disciplines",
                &case,
                "mean_completion_s",
                "s",
                each(mean),
                floor,
            );
            add.add(
                "disciplines",
                &case,
                "p95_completion_s",
                "s",
                each(p95),
                None,
            );
            let often = each(preemptions);
            add.add("disciplines", &case, "preemptions", "1/job", often, None);
        }
    }
    Ok(())
}

/// A job of the real trace.
struct Job {
    at: Duration,
    length: Duration,
    priority: i16,
}

/// The same kind of trace in seconds: bounded Pareto with exponent 0.5, Poisson arrivals. Half of the
/// short jobs have a priority.
fn jobs(count: usize) -> Vec<Job> {
    let mut draw = Draw::new(11, Purpose::Workload(0));
    let lengths = Quantity::Pareto {
        low: 0.3,
        high: 20.0,
        alpha: 0.5,
    };
    let mean = (0.3_f64 * 20.0).sqrt();
    let gap = mean / (SLOTS as f64 * LOAD);
    let mut at = 0.0;
    let jobs = (0..count).map(|_| {
        at += draw.exponential(gap);
        let length = draw.quantity(&lengths);
        Job {
            at: Duration::from_secs_f64(at),
            length: Duration::from_secs_f64(length),
            priority: if length < 2.0 && draw.chance(0.5) {
                10
            } else {
                0
            },
        }
    });
    jobs.collect()
}

async fn real_ones(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let jobs = jobs(lab.samples(JOBS).max(10));
    let scenario = scenario(&jobs);
    let work: f64 = jobs.iter().map(|j| j.length.as_secs_f64()).sum();
    let floor = Some(work / jobs.len() as f64);
    let mut means = Vec::new();
    for discipline in Discipline::ALL {
        lab.steps_message(&format!(
            "disciplines: {discipline}, {} real jobs",
            jobs.len()
        ));
        let number = |name: &str, value: u64| [name.to_owned(), value.to_string()];
        let mut policy_args = vec!["--discipline".to_owned(), discipline.to_string()];
        policy_args.extend(["--verify-share".to_owned(), "0".to_owned()]);
        policy_args.extend(number("--slice-ms", SLICE_MS));
        policy_args.extend(number("--residency-ms", RESIDENCY_MS));
        policy_args.extend(number("--ageing-ms", AGEING_MS));
        let options = ClusterOptions {
            workers: 1,
            worker_args: vec!["--slots".to_owned(), SLOTS.to_string()],
            policy_args,
            history: false,
            ..ClusterOptions::default()
        };
        let cluster = Cluster::start(options, lab.steps).await?;
        let found = play(&cluster, &jobs, discipline).await;
        cluster.stop().await;
        let (mut took, moved) = found.with_context(|| format!("under {discipline}"))?;
        let mean = took.iter().sum::<f64>() / took.len() as f64;
        let p95 = quantile(&mut took, 0.95);
        let played = disciplines::play(&scenario, discipline);
        let played = played.map_err(|e| anyhow::anyhow!("{discipline}, simulated: {e}"))?;
        let simulated = played.lasted.mean_ms / 1e3;
        means.push((mean, simulated));
        for (case, mean, p95, often) in [
            (format!("{discipline}, real"), mean, p95, moved),
            (
                format!("{discipline}, the same jobs simulated"),
                simulated,
                played.lasted.p95_ms / 1e3,
                played.preemptions,
            ),
        ] {
            let add = &mut *lab.figures;
            add.add("disciplines", &case, "mean_completion_s", "s", mean, floor);
            add.add("disciplines", &case, "p95_completion_s", "s", p95, None);
            let often = often as f64 / jobs.len() as f64;
            add.add("disciplines", &case, "preemptions", "1/job", often, None);
        }
    }
    if let Some(share) = in_order(&means) {
        let case = "real against the same jobs simulated";
        let figures = &mut *lab.figures;
        figures.add("disciplines", case, "pairs_in_order", "1", share, None);
    }
    Ok(())
}

/// Of the pairs whose simulated means (the second of each) differ, the share with the same order in
/// reality; none if no pair differs.
fn in_order(means: &[(f64, f64)]) -> Option<f64> {
    let pairs = means
        .iter()
        .enumerate()
        .flat_map(|(n, a)| means.iter().skip(n + 1).map(move |b| (a, b)));
    let apart = pairs.filter(|(a, b)| (a.1 - b.1).abs() > APART * a.1.min(b.1));
    let (mut agree, mut all) = (0, 0);
    for (a, b) in apart {
        all += 1;
        agree += u32::from((a.0 < b.0) == (a.1 < b.1));
    }
    (all > 0).then(|| f64::from(agree) / f64::from(all))
}

/// The same jobs, worker and settings for the simulator.
fn scenario(jobs: &[Job]) -> Scenario {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let workload = |(number, job): (usize, &Job)| {
        let mut submission = Submission::of(fiec_schemas::programs::SYNTHETIC);
        submission.priority = job.priority;
        Workload {
            name: format!("job-{number}"),
            arrivals: Arrivals::Listed(vec![ms(job.at)]),
            work_ms: Quantity::Fixed(job.length.as_secs_f64() * 1e3),
            capsule_ms: Quantity::Fixed(CAPSULE.as_secs_f64() * 1e3),
            state_bytes: Quantity::Fixed(0.0),
            memory_bytes: Quantity::Fixed(0.0),
            tenant: None,
            after: Vec::new(),
            gang: None,
            spread: None,
            fails: 0.0,
            submission,
        }
    };
    let last = jobs.last().map_or(0, |job| ms(job.at));
    Scenario {
        about: "The jobs of the real bench".to_owned(),
        seed: 1,
        duration_ms: last + 1,
        drain_ms: 3_600_000,
        policies: 1,
        policy: Settings {
            slice_ms: Some(SLICE_MS),
            preempt_residency_ms: Some(RESIDENCY_MS),
            ageing_ms: Some(AGEING_MS),
            ..Settings::default()
        },
        tick_ms: 50,
        hold_ms: 0,
        telemetry: Telemetry::default(),
        network: Network::default(),
        nodes: vec![NodeGroup {
            name: "node".to_owned(),
            count: 1,
            slots: SLOTS as u32,
            parks: 0,
            memory_bytes: 8 << 30,
            cpus: SLOTS as u32,
            start_ms: START_MS,
            speed: Quantity::Fixed(1.0),
            labels: Default::default(),
            thresholds: None,
            load: Default::default(),
        }],
        workloads: jobs.iter().enumerate().map(workload).collect(),
        faults: Vec::new(),
        quotas: Vec::new(),
    }
}

/// Submits every job at its time. Returns seconds from submission to end, and the rebindings of a
/// job.
async fn play(
    cluster: &Cluster,
    jobs: &[Job],
    discipline: Discipline,
) -> anyhow::Result<(Vec<f64>, u64)> {
    let began = Instant::now();
    let mut submitted = Vec::with_capacity(jobs.len());
    for (number, job) in jobs.iter().enumerate() {
        tokio::time::sleep(job.at.saturating_sub(began.elapsed())).await;
        let capsules = (job.length.as_secs_f64() / CAPSULE.as_secs_f64()).ceil();
        let spec = json!({
            "program": fiec_schemas::programs::SYNTHETIC,
            "params": {"capsules": capsules as u64, "work_us": CAPSULE.as_micros() as u64},
            "priority": job.priority,
        });
        let at = Timestamp::now();
        let id = format!("{}-{number}", discipline.as_str());
        submitted.push((at, submit(&cluster.broker, &id, spec).await?));
    }
    let (mut took, mut moved) = (Vec::with_capacity(jobs.len()), 0);
    for (at, execution) in submitted {
        let (look, patience) = (Duration::from_millis(50), Duration::from_secs(180));
        let end = follow::ended(&cluster.broker, execution, look, patience).await?;
        took.push((end.until.micros() - at.micros()) as f64 / 1e6);
        moved += end.rebindings;
    }
    Ok((took, moved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_what_the_simulator_tells_apart_is_compared() {
        // The first two are not apart.
        assert_eq!(in_order(&[(9.0, 10.0), (8.0, 10.1), (5.0, 5.0)]), Some(1.0));
        assert_eq!(in_order(&[(9.0, 10.0), (8.0, 10.1), (8.5, 5.0)]), Some(0.5));
        assert_eq!(in_order(&[(1.0, 10.0), (2.0, 10.1)]), None);
    }

    #[test]
    fn the_real_jobs_are_played_by_the_simulator_to_their_end() {
        let jobs = jobs(20);
        let scenario = scenario(&jobs);
        for discipline in Discipline::ALL {
            let found = disciplines::play(&scenario, discipline).unwrap();
            assert_eq!(found.completed, 20, "{discipline}");
            let work: f64 = jobs.iter().map(|j| j.length.as_secs_f64() * 1e3).sum();
            assert!((found.work_ms - work).abs() < 25.0 * 20.0, "{discipline}");
        }
    }
}
