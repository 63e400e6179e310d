//! `bench disciplines`: heavy-tailed jobs of one device each on a small cluster under first come
//! first served, priority, least attained service with preemption at boundaries, and ours: mean and
//! 95th percentile of the time from submission to the end. In the simulator, on the trace of
//! [`fiec_simulator::disciplines`]; with `--real` instead, seconds for hours, with real servers, a
//! real worker and real programs. The floor is the mean length of the jobs: what a lab without end would
//! take.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use fiec_policy::share::order::Discipline;
use fiec_schemas::Timestamp;
use fiec_simulator::disciplines::Trace;
use fiec_simulator::draw::{Draw, Purpose};
use fiec_simulator::scenario::Quantity;
use serde_json::json;

use super::figures::quantile;
use super::{Lab, follow, submit};
use crate::cluster::{Cluster, ClusterOptions};

/// Slots of the real worker.
const SLOTS: usize = 2;
/// One capsule of a real job.
const CAPSULE: Duration = Duration::from_millis(20);
/// Work that comes to the real worker, against what it could do.
const LOAD: f64 = 1.3;

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

/// The seeds of one discipline, all jobs of all seeds counting alike.
fn simulated(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let seeds = u64::try_from(lab.samples(10))?;
    // What a move costs decides much: nothing at all, and what it takes to begin a training job.
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

/// The same kind of trace in seconds: bounded Pareto with exponent 0.5, Poisson, half of what is
/// short with a priority.
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
    let jobs = jobs(lab.samples(30).max(10));
    let work: f64 = jobs.iter().map(|j| j.length.as_secs_f64()).sum();
    let floor = Some(work / jobs.len() as f64);
    for discipline in Discipline::ALL {
        lab.steps_message(&format!(
            "disciplines: {discipline}, {} real jobs",
            jobs.len()
        ));
        let options = ClusterOptions {
            workers: 1,
            worker_args: vec!["--slots".to_owned(), SLOTS.to_string()],
            // A slice of 30 s where jobs take hours is half a second here.
            policy_args: ["--discipline", discipline.as_str(), "--slice-ms", "500"]
                .into_iter()
                .chain(["--residency-ms", "200", "--verify-share", "0"])
                .map(str::to_owned)
                .collect(),
            history: false,
            ..ClusterOptions::default()
        };
        let cluster = Cluster::start(options, lab.steps).await?;
        let found = play(&cluster, &jobs, discipline).await;
        cluster.stop().await;
        let (mut took, moved) = found.with_context(|| format!("under {discipline}"))?;
        let case = format!("{discipline}, real");
        let mean = took.iter().sum::<f64>() / took.len() as f64;
        let p95 = quantile(&mut took, 0.95);
        let add = &mut *lab.figures;
        add.add("disciplines", &case, "mean_completion_s", "s", mean, floor);
        add.add("disciplines", &case, "p95_completion_s", "s", p95, None);
        let often = moved as f64 / jobs.len() as f64;
        add.add("disciplines", &case, "preemptions", "1/job", often, None);
    }
    Ok(())
}

/// Submits every job when its time has come; seconds from submission to end, and how often one was
/// bound anew.
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
