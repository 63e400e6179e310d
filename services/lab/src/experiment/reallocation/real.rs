//! The mix with real servers, workers and jobs, scaled down in time.
//!
//! ```text
//! devices/EMULATED-n1-large/memory     80
//!                           lock       kept while looking at the files beside it
//!                           of-4711    what process 4711 holds, locked while it lives
//! log/<execution>                      the journal of a job, a line for each capsule
//! notice-1                             the notice of n1's end, if it gets one
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fiec::client;
use fiec::ui::Steps;
use fiec_schemas::messages::StandingKind;
use fiec_schemas::{ClientId, ExecutionId, Tenant, Timestamp, subjects};
use fiec_simulator::reallocation::{DEVICES, Job, Measured, Mix, Mode, jobs};
use serde_json::{Value, json};
use tokio::process::Command;

use super::compared::count;
use crate::bench::figures::quantile;
use crate::cluster::{Cluster, ClusterOptions};
use crate::experiment::container::done;
use crate::experiment::emulated::{self, Emulated};
use crate::experiment::watch::{Ended, Watch};

mod journal;
mod memory;

/// Length of a capsule of a job that has its share of the device's units.
pub(super) const CAPSULE: Duration = Duration::from_millis(100);
/// Time between two commits.
pub(super) const COMMIT: Duration = Duration::from_millis(500);
/// Time from the notice to the end of a node.
pub(super) const NOTICE: Duration = Duration::from_secs(3);
/// Time from the end of a node to its return.
pub(super) const AWAY: Duration = Duration::from_secs(3);
/// Length of the longest job, in ms of the mix's time.
const LONGEST_MS: u64 = 20 * 60_000;
/// Interval between two checks of the devices.
const LOOK: Duration = Duration::from_millis(100);
/// Longest time of one run.
const PATIENCE: Duration = Duration::from_secs(400);
const PROGRAM: &str = "mix-job@1";
const JOB: &str = include_str!("job.py");
const GIB: u64 = 1 << 30;

/// The result of a run.
pub(super) struct Played {
    pub measured: Measured,
    /// Number of jobs that ended, and of those with the bits of an undisturbed run.
    pub ended: usize,
    pub same: usize,
}

/// A submitted job.
struct Submitted {
    job: Job,
    seed: u64,
    capsules: u64,
    execution: ExecutionId,
    at: Timestamp,
}

struct Lab {
    cluster: Cluster,
    folder: tempfile::TempDir,
    mode: Mode,
    /// Seconds of the mix per second of real time.
    speed: f64,
}

/// Plays a mix on its own cluster.
///
/// # Errors
/// If a part could not be started, or an expected event did not come in time.
pub(super) async fn play(
    mix: &Mix,
    mode: Mode,
    speed: f64,
    steps: &Steps,
) -> anyhow::Result<Played> {
    let mut lab = Lab::start(mix, mode, speed, steps).await?;
    let watch = Watch::open(&lab.cluster.broker).await?;
    steps.step(&format!("{} jobs, {}", mix.jobs, mode.as_str()));
    let played = lab.run(mix, &watch).await;
    lab.cluster.stop().await;
    played
}

fn device_id(node: &str, device: &str) -> String {
    format!("{}{node}-{device}", emulated::PREFIX)
}

impl Lab {
    async fn start(mix: &Mix, mode: Mode, speed: f64, steps: &Steps) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        std::fs::create_dir(folder.path().join("log"))?;
        let text = |args: &[&str]| args.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>();
        let mut worker_args = text(&[
            "--slots=12",
            "--memory-limit=4GiB",
            "--heartbeat-ms=200",
            // Delays after crashes are scaled down like the jobs.
            "--backoff-ms=5",
        ]);
        worker_args.push(format!("--allow-program={PROGRAM}"));
        for calm in [
            "memory",
            "memory_stall",
            "latency",
            "power",
            "thermal",
            "fabric",
        ] {
            worker_args.push(format!("--threshold={calm}=1:0.99:60000"));
        }
        let options = ClusterOptions {
            workers: 0,
            worker_args,
            policy_args: text(&["--liveness-ms=1000", "--verify-share=0"]),
            history: false,
            ..ClusterOptions::default()
        };
        let cluster = Cluster::start(options, steps).await?;
        let mut lab = Self {
            cluster,
            folder,
            mode,
            speed,
        };
        for n in 1..=mix.nodes {
            lab.start_worker(n)?;
        }
        lab.cluster.ready().await?;
        lab.devices_ready().await?;
        let job = lab.folder.path().join("job.py");
        std::fs::write(&job, JOB)?;
        let mut push = Command::new(std::env::current_exe()?);
        push.args(["program", "push", PROGRAM]).arg(&job);
        push.args(["--protocol", "json_lines", "--entry", "python3 -u job.py"]);
        push.envs(lab.cluster.environment("program"));
        done("pushing the job", push).await?;
        Ok(lab)
    }

    fn devices(&self) -> PathBuf {
        self.folder.path().join("devices")
    }

    fn notice(&self, n: usize) -> PathBuf {
        self.folder.path().join(format!("notice-{n}"))
    }

    fn start_worker(&mut self, n: usize) -> anyhow::Result<()> {
        let node = Cluster::node(n).to_string();
        let file = self.folder.path().join(format!("{node}.json"));
        let all = DEVICES.map(|(name, gib)| Emulated {
            id: device_id(&node, name),
            name: format!("Emulated {gib} GiB device"),
            memory_bytes: gib * GIB,
            used_bytes: 0,
        });
        emulated::write_all(&file, &all)?;
        for (device, (_, gib)) in all.iter().zip(DEVICES) {
            let folder = self.devices().join(&device.id);
            std::fs::create_dir_all(&folder)?;
            std::fs::write(folder.join("memory"), gib.to_string())?;
        }
        let mut more = vec!["--device-file".to_owned(), file.display().to_string()];
        if self.mode == Mode::Reconfigured {
            more.push("--revocation-file".to_owned());
            more.push(self.notice(n).display().to_string());
        }
        self.cluster.start_worker(&more)?;
        Ok(())
    }

    /// Waits until the canaries of all devices have passed.
    async fn devices_ready(&self) -> anyhow::Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            let reply = client::me(&self.cluster.broker).nodes().await?;
            let mut contracts = reply.nodes.iter().flat_map(|n| &n.contracts);
            if reply.nodes.len() == self.cluster.workers.len()
                && contracts.all(|c| c.standing == StandingKind::Proved)
            {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("the devices were not proved within {PATIENCE:?}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn real(&self, mix_ms: u64) -> Duration {
        Duration::from_millis(mix_ms).div_f64(self.speed)
    }

    async fn submit(&self, number: usize, job: Job) -> anyhow::Result<Submitted> {
        let tenant = Tenant::new("experiment")?;
        let id = format!("{}-{number}", self.mode.as_str());
        let capsules =
            |mix_ms: u64| (self.real(mix_ms).as_secs_f64() / CAPSULE.as_secs_f64()).round() as u64;
        let share = match self.mode {
            Mode::Reserved => job.peak,
            Mode::OverCommit | Mode::Reconfigured => job.base,
        };
        let all = capsules(job.work_ms.min(LONGEST_MS)).max(2);
        // In proportion, if the job was shortened.
        let grows_at = all * job.grows_at_ms / job.work_ms.max(1);
        let spec = json!({
            "id": id, "program": PROGRAM, "retries": 1_000, "verify": "none",
            "commit": {"every_ms": COMMIT.as_millis() as u64},
            "params": {
                "mode": self.mode, "devices": self.devices(), "log": self.folder.path().join("log"),
                "capsules": all, "grows_at": grows_at, "capsule_s": CAPSULE.as_secs_f64(),
                "base": job.base, "peak": job.peak, "units": job.units, "seed": number,
            },
            "requires": {"device": {"kind": "Emulated*", "share_bytes": share * GIB}},
        });
        let at = Timestamp::now();
        let js = &self.cluster.broker.js;
        let sent = js.publish(subjects::submit(&tenant), spec.to_string().into());
        sent.await?.await.context("a job was not stored")?;
        Ok(Submitted {
            job,
            seed: number as u64,
            capsules: all,
            execution: ExecutionId::from_client(&tenant, &ClientId::new(id)?),
            at,
        })
    }

    async fn run(&mut self, mix: &Mix, watch: &Watch) -> anyhow::Result<Played> {
        let mut waiting: Vec<(usize, Job)> = jobs(mix).into_iter().enumerate().collect();
        waiting.reverse();
        let mut submitted: Vec<Submitted> = Vec::new();
        let began = Instant::now();
        let mut revocations = Revocations::new(self.real(mix.revoke_every_s * 1_000), mix.nodes);
        let (mut looked, mut partly) = (Instant::now(), Duration::ZERO);
        let mut looks = tokio::time::interval(LOOK);
        while !waiting.is_empty() || watch.count() < submitted.len() {
            looks.tick().await;
            if let Some(why) = watch.failed() {
                bail!("a job failed: {why}");
            }
            if began.elapsed() > PATIENCE {
                break;
            }
            while let Some((number, job)) = waiting.pop() {
                if self.real(job.submit_ms) > began.elapsed() {
                    waiting.push((number, job));
                    break;
                }
                submitted.push(self.submit(number, job).await?);
            }
            self.revoke(&mut revocations, began.elapsed())?;
            let part = memory::partly_used(&self.devices())?;
            partly += looked.elapsed() * part;
            looked = Instant::now();
        }
        let ended = watch.ended();
        let mut measured = self.measure(mix, &submitted, &ended, partly)?;
        (measured.moved, measured.parked, measured.suspended) = watch.counts();
        measured.unfinished = (waiting.len() + submitted.len() - ended.len()) as u64;
        let is_same = |s: &&Submitted| {
            let said = ended.get(&s.execution).map(|e| &e.result);
            said == Some(&undisturbed(s))
        };
        Ok(Played {
            measured,
            ended: ended.len(),
            same: submitted.iter().filter(is_same).count(),
        })
    }

    /// Performs the due steps of revocations.
    fn revoke(&mut self, revocations: &mut Revocations, now: Duration) -> anyhow::Result<()> {
        let warns = self.mode == Mode::Reconfigured;
        while let Some((n, step)) = revocations.due(now) {
            match step {
                Due::Notice if warns => {
                    std::fs::write(self.notice(n), NOTICE.as_secs().to_string())?;
                }
                Due::Notice => {}
                Due::End => {
                    if let Some(worker) = self.cluster.workers.get_mut(n - 1) {
                        worker.kill();
                    }
                }
                Due::Back => {
                    // Without a notice there is no file.
                    let _ = std::fs::remove_file(self.notice(n));
                    self.cluster.restart_worker(n)?;
                }
            }
        }
        Ok(())
    }

    fn measure(
        &self,
        mix: &Mix,
        submitted: &[Submitted],
        ended: &BTreeMap<ExecutionId, Ended>,
        partly: Duration,
    ) -> anyhow::Result<Measured> {
        let seconds = |from: Timestamp, to: Timestamp| (to.micros() - from.micros()) as f64 / 1e6;
        let capsule = CAPSULE.as_secs_f64();
        let mut measured = Measured::default();
        let (mut times, mut useful) = (Vec::new(), 0.0);
        let first = submitted.iter().map(|s| s.at).min();
        let last = ended.values().map(|e| e.at).max();
        for s in submitted {
            if let Some(end) = ended.get(&s.execution) {
                times.push(seconds(s.at, end.at));
                useful += s.capsules as f64 * capsule * s.job.units;
            }
            let log = self.folder.path().join("log").join(s.execution.to_string());
            let lost = journal::lost(&log)?;
            measured.killed += lost.killed;
            measured.lost_s += lost.capsules as f64 * capsule;
            measured.lost_to_revocation_s += lost.with_nodes as f64 * capsule;
        }
        let span = match (first, last) {
            (Some(first), Some(last)) => seconds(first, last).max(capsule),
            _ => bail!("no job ended within {PATIENCE:?}"),
        };
        let devices = count(mix.nodes * DEVICES.len());
        measured.makespan_s = span;
        measured.mean_s = times.iter().sum::<f64>() / count(times.len().max(1));
        measured.p95_s = quantile(&mut times, 0.95);
        measured.device_hours = devices * span / 3_600.0;
        measured.utilization = useful / (devices * span);
        measured.partly_used = partly.as_secs_f64() / (devices * span);
        Ok(measured)
    }
}

/// The result of an undisturbed job.
fn undisturbed(s: &Submitted) -> Value {
    let next = |number: u64, _| {
        number
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407)
    };
    let number = (0..s.capsules).fold(s.seed, next);
    json!({"digest": format!("{number:016x}"), "capsules": s.capsules})
}

/// A step of a revocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Notice,
    End,
    Back,
}

/// Revokes one node after the other.
struct Revocations {
    every: Duration,
    nodes: usize,
    /// The round, and the next step in it.
    next: (u32, Due),
}

impl Revocations {
    fn new(every: Duration, nodes: usize) -> Self {
        Self {
            every,
            nodes,
            next: (1, Due::Notice),
        }
    }

    /// The next due step, and its node, from 1.
    fn due(&mut self, now: Duration) -> Option<(usize, Due)> {
        let (round, step) = self.next;
        let at = self.every * round
            + match step {
                Due::Notice => Duration::ZERO,
                Due::End => NOTICE,
                Due::Back => NOTICE + AWAY,
            };
        if now < at || self.every.is_zero() {
            return None;
        }
        self.next = match step {
            Due::Notice => (round, Due::End),
            Due::End => (round, Due::Back),
            Due::Back => (round + 1, Due::Notice),
        };
        Some((round as usize % self.nodes.max(1) + 1, step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_go_and_come_back_one_after_the_other() {
        let mut revocations = Revocations::new(Duration::from_secs(15), 2);
        let mut seen = Vec::new();
        for second in 0..40 {
            while let Some((n, due)) = revocations.due(Duration::from_secs(second)) {
                seen.push((second, n, due));
            }
        }
        let expected = [
            (15, 2, Due::Notice),
            (18, 2, Due::End),
            (21, 2, Due::Back),
            (30, 1, Due::Notice),
            (33, 1, Due::End),
            (36, 1, Due::Back),
        ];
        assert_eq!(seen, expected);
        assert_eq!(
            Revocations::new(Duration::ZERO, 2).due(Duration::from_secs(9)),
            None
        );
    }
}
