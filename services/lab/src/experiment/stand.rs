//! The nodes of an experiment, each with its own processors, and the load on one of them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use fiec::client;
use fiec::ui::Steps;
use fiec_cuda::Found;
use fiec_schemas::envelope::{Amount, EVERY_DEVICE, Envelope, Shape, Sinusoid};
use fiec_schemas::messages::EnvelopeChange;
use fiec_schemas::{ClientId, ExecutionId, NodeId, Signal, Tenant, Threshold, Timestamp, subjects};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use super::devices::Devices;
use super::trace::Observer;
use super::{container, emulated};
use crate::cluster::{Cluster, ClusterOptions};
use crate::demo;
use crate::process::Process;

/// Share of its limit to which a load fills a node's memory.
const SHARE: f64 = 0.88;
/// Threads of a load per processor of the node, beside the node's own.
const BURNERS: u32 = 3;
/// Use of a device's memory at rest and under pressure, as shares.
const DEVICE_REST: f64 = 0.10;
const DEVICE_PRESSED: f64 = 0.92;
/// Memory limit of a node: on the host, and for emulated devices, whose matrices are held twice.
const HOST_LIMIT: &str = "512MiB";
const EMULATED_LIMIT: &str = "4GiB";
/// Seconds for which other users hold a device's memory at rest.
const REST_S: &str = "86400";
/// Seconds after which an abandoned load ends.
const HOLD_S: &str = "300";
/// Longest time for nodes to become calm.
const PATIENCE: Duration = Duration::from_secs(30);

/// The place of the pressure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The memory limit of a node.
    Host,
    /// The memory of its device, real or emulated.
    Device,
}

/// The swing of a device's signal below its limit.
pub(super) struct Swing {
    pub signal: Signal,
    pub amplitude: Amount,
    pub period_s: f64,
    /// 90 starts at the limit.
    pub phase_deg: f64,
}

/// Options of a stand.
pub(super) struct Wants {
    pub nodes: usize,
    pub place: Place,
    pub threshold: Threshold,
    /// The devices of the nodes, if they compute on devices.
    pub devices: Option<Devices>,
    /// Share of each device's memory that other users hold at rest.
    pub device_rest: f64,
    /// True if power has the same thresholds as memory.
    pub power: bool,
}

impl Wants {
    pub fn new(nodes: usize, devices: Option<Devices>, dwell_ms: u32) -> Self {
        Self {
            nodes,
            place: match devices {
                Some(_) => Place::Device,
                None => Place::Host,
            },
            threshold: Threshold {
                high: 0.80,
                low: 0.60,
                dwell_ms,
            },
            devices,
            device_rest: DEVICE_REST,
            power: false,
        }
    }
}

/// The running nodes.
pub(super) struct Stand {
    pub cluster: Cluster,
    pub observer: Observer,
    pub place: Place,
    pub threshold: Threshold,
    /// Processors of each node.
    pub processors: Vec<Vec<usize>>,
    /// False if there are fewer processors than nodes.
    pub apart: bool,
    /// The devices of the nodes, if they compute on devices.
    pub devices: Option<Devices>,
    device_rest: f64,
    /// The device files of emulated devices, by node.
    readings: Vec<PathBuf>,
    /// The processes that hold real devices' memory at rest.
    rest: Vec<Process>,
    folder: tempfile::TempDir,
}

/// The processors that this process may use.
fn processors() -> anyhow::Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("cannot ask for this process's processors")?;
    Ok((0..CpuSet::MAX_CPU).filter(|n| set.is_set(*n)).collect())
}

/// Confines this thread, and the processes that it starts, until it is dropped.
struct Confined(CpuSet);

impl Confined {
    fn to(processors: &[usize]) -> anyhow::Result<Self> {
        let before = sched_getaffinity(None)?;
        let mut set = CpuSet::new();
        for n in processors {
            set.set(*n);
        }
        sched_setaffinity(None, &set)
            .with_context(|| format!("cannot keep to processors {processors:?}"))?;
        Ok(Self(before))
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        // The earlier set of processors is still allowed.
        let _ = sched_setaffinity(None, &self.0);
    }
}

impl Stand {
    pub async fn start(wants: Wants, steps: &Steps) -> anyhow::Result<Self> {
        let all = processors()?;
        let apart = all.len() >= wants.nodes;
        let of = |n: usize| -> Vec<usize> {
            let mine = |(i, _): &(usize, &usize)| {
                i % wants.nodes == n || (!apart && n % all.len().max(1) == *i)
            };
            all.iter()
                .enumerate()
                .filter(mine)
                .map(|(_, p)| *p)
                .collect()
        };
        let processors: Vec<Vec<usize>> = (0..wants.nodes).map(of).collect();
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let Threshold {
            high,
            low,
            dwell_ms,
        } = wants.threshold;
        let limit = match &wants.devices {
            None => Some(HOST_LIMIT),
            Some(Devices::Emulated { .. }) => Some(EMULATED_LIMIT),
            // The worker's default: its matrices are sized by the device.
            Some(Devices::Real(_)) => None,
        };
        let mut worker_args = vec![
            "--slots=1".to_owned(),
            format!("--threshold=memory={high}:{low}:{dwell_ms}"),
            "--heartbeat-ms=100".to_owned(),
            format!("--allow-program={}", container::PROGRAM),
        ];
        worker_args.extend(limit.map(|limit| format!("--memory-limit={limit}")));
        if wants.power {
            worker_args.push(format!("--threshold=power={high}:{low}:{dwell_ms}"));
        }
        // The other signals do not matter here. But a node is used again only after every signal
        // was calm for its dwell.
        for calm in ["memory_stall", "latency", "power", "thermal", "fabric"] {
            if calm != "power" || !wants.power {
                worker_args.push(format!("--threshold={calm}=1:0.99:{dwell_ms}"));
            }
        }
        let options = ClusterOptions {
            workers: 0,
            worker_args,
            // One workload solves a matrix from the sources.
            input_dirs: demo::matrix()
                .iter()
                .filter_map(|m| m.parent())
                .map(Into::into)
                .collect(),
            history: false,
            ..ClusterOptions::default()
        };
        let cluster = Cluster::start(options, steps).await?;
        let own = (0..wants.nodes).filter_map(|n| {
            let device = wants.devices.as_ref()?.of(n)?;
            Some((Cluster::node(n + 1), device.uuid.clone()))
        });
        let observer = Observer::open(&cluster.broker, own.collect()).await?;
        let mut stand = Self {
            cluster,
            observer,
            place: wants.place,
            threshold: wants.threshold,
            processors,
            apart,
            devices: wants.devices,
            device_rest: wants.device_rest,
            readings: Vec::new(),
            rest: Vec::new(),
            folder,
        };
        for n in 0..wants.nodes {
            stand.start_worker(n)?;
        }
        stand.cluster.ready().await?;
        Ok(stand)
    }

    fn start_worker(&mut self, n: usize) -> anyhow::Result<()> {
        let node = Cluster::node(n + 1);
        let own = self.of(&node)?.to_owned();
        match self.devices.as_ref().map(|d| d.of(n).cloned()) {
            None => {
                let _confined = Confined::to(&own)?;
                self.cluster.start_worker(&[])?;
            }
            Some(None) => {
                let file = self.folder.path().join(format!("{node}.json"));
                emulated::write(&file, node.as_str(), self.emulated_rest())?;
                let more = ["--device-file".to_owned(), file.display().to_string()];
                self.readings.push(file);
                let _confined = Confined::to(&own)?;
                self.cluster.start_worker(&more)?;
            }
            Some(Some(device)) => {
                // Each worker sees only its own device.
                let only = ("CUDA_VISIBLE_DEVICES".to_owned(), device.uuid.clone());
                if self.device_rest > DEVICE_REST {
                    let rest = self.taking(&node, &device, self.device_rest, true, REST_S)?;
                    self.rest.push(rest);
                }
                let _confined = Confined::to(&own)?;
                self.cluster.start_worker_in(&[only])?;
            }
        }
        Ok(())
    }

    /// Bytes of an emulated device that other users hold at rest.
    fn emulated_rest(&self) -> u64 {
        (emulated::MEMORY_BYTES as f64 * self.device_rest) as u64
    }

    /// Takes a real device's memory up to a share, and its units unless `idle`.
    fn taking(
        &self,
        node: &NodeId,
        device: &Found,
        share: f64,
        idle: bool,
        hold_s: &str,
    ) -> anyhow::Result<Process> {
        let share = share.to_string();
        let mut args = vec!["burn", "--device", &device.uuid, "--device-share", &share];
        args.extend(["--hold", hold_s]);
        if idle {
            args.push("--idle");
        }
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        self.loading(node, "device", &args, self.of(node)?)
    }

    fn number(&self, node: &NodeId) -> anyhow::Result<usize> {
        let mut all = 0..self.processors.len();
        let found = all.find(|n| Cluster::node(n + 1) == *node);
        found.with_context(|| format!("{node} is no node of this experiment"))
    }

    /// Fills the memory of a node, or of its device, and then takes most of its processors, until
    /// the load is dropped.
    pub async fn press(&self, node: &NodeId) -> anyhow::Result<Load> {
        let mut load = self.fill(node).await?;
        let own = self.of(node)?;
        let threads = BURNERS * u32::try_from(own.len()).unwrap_or(1);
        let args = ["burn", "--threads", &threads.to_string(), "--hold", HOLD_S].map(str::to_owned);
        load.processes.push(self.loading(node, "burn", &args, own)?);
        Ok(load)
    }

    /// Another node than this one.
    pub fn other_than(&self, node: &NodeId) -> anyhow::Result<NodeId> {
        let mut all = (0..self.processors.len()).map(|n| Cluster::node(n + 1));
        let other = all.find(|n| n != node);
        other.context("an experiment with a load needs two nodes")
    }

    fn of(&self, node: &NodeId) -> anyhow::Result<&[usize]> {
        let own = self.processors.get(self.number(node)?);
        own.map(Vec::as_slice).context("a node without processors")
    }

    /// Fills the memory of a node, or of its device, until the load is dropped.
    pub async fn fill(&self, node: &NodeId) -> anyhow::Result<Load> {
        let n = self.number(node)?;
        let own = self.of(node)?;
        let mut load = Load::default();
        match self.place {
            Place::Host => {
                let args = self.filling(node).await?;
                let filling = self.loading(node, "memory", &args, own)?;
                load.processes.push(filling);
                // Beside computing threads, filling the memory would take seconds.
                self.filled(node).await?;
            }
            Place::Device => match self.devices.as_ref().and_then(|d| d.of(n)) {
                Some(device) => {
                    let taking = self.taking(node, device, DEVICE_PRESSED, false, HOLD_S)?;
                    load.processes.push(taking);
                    self.filled(node).await?;
                }
                None => {
                    let file = self.readings.get(n).context("a node without a device")?;
                    let pressed = emulated::MEMORY_BYTES as f64 * DEVICE_PRESSED;
                    emulated::write(file, node.as_str(), pressed as u64)?;
                    load.device = Some((file.clone(), node.clone(), self.emulated_rest()));
                }
            },
        }
        Ok(load)
    }

    /// Waits until the node reports its memory, or its device's, as pressed.
    async fn filled(&self, node: &NodeId) -> anyhow::Result<()> {
        let until = Instant::now() + PATIENCE;
        while self
            .observer
            .newest(node, self.place == Place::Device)
            .is_none_or(|v| v < self.threshold.high)
        {
            ensure!(
                Instant::now() < until,
                "the memory of {node} was not filled within {PATIENCE:?}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    fn loading(
        &self,
        node: &NodeId,
        what: &str,
        args: &[String],
        own: &[usize],
    ) -> anyhow::Result<Process> {
        let log = self
            .cluster
            .data_dir()
            .join(format!("logs/load-{what}-{node}.log"));
        let _confined = Confined::to(own)?;
        Process::start(what, &std::env::current_exe()?, args, &[], log)
    }

    async fn filling(&self, node: &NodeId) -> anyhow::Result<Vec<String>> {
        let status = self.cluster.status_of(node).await?;
        let reading = status.vector.as_ref().and_then(|v| v.host(Signal::Memory));
        let used = reading.and_then(|r| r.raw).unwrap_or(0.0);
        let run_dir = self.cluster.data_dir().join("run").join(node.as_str());
        let args = [
            ("--limit-source", status.descriptor.memory_limit_source),
            (
                "--limit-bytes",
                status.descriptor.memory_limit_bytes.to_string(),
            ),
            ("--run-dir", run_dir.display().to_string()),
            ("--used-bytes", format!("{used:.0}")),
            ("--share", SHARE.to_string()),
            ("--hold", HOLD_S.to_owned()),
        ];
        let pairs = args
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value]);
        Ok(std::iter::once("pressure".to_owned())
            .chain(pairs)
            .collect())
    }

    /// Waits until no node's memory has pressed for the dwell.
    pub async fn calm(&self) -> anyhow::Result<()> {
        let dwell = Duration::from_millis(u64::from(self.threshold.dwell_ms));
        let until = Instant::now() + PATIENCE;
        let mut since = Instant::now();
        while since.elapsed() < dwell + Duration::from_millis(150) {
            ensure!(
                Instant::now() < until,
                "the nodes' memory did not calm down within {PATIENCE:?}"
            );
            let is_calm = |n: usize| {
                let value = self
                    .observer
                    .newest(&Cluster::node(n + 1), self.place == Place::Device);
                value.is_some_and(|v| v < self.threshold.low)
            };
            if !(0..self.processors.len()).all(is_calm) {
                since = Instant::now();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Submits under a given id.
    pub async fn submit(&self, id: &str, mut submission: Value) -> anyhow::Result<ExecutionId> {
        let tenant = Tenant::new("experiment")?;
        if let Some(object) = submission.as_object_mut() {
            object.insert("id".to_owned(), id.into());
        }
        let body = submission.to_string().into();
        let sent = self
            .cluster
            .broker
            .js
            .publish(subjects::submit(&tenant), body)
            .await?;
        sent.await.context("the submission was not stored")?;
        Ok(ExecutionId::from_client(&tenant, &ClientId::new(id)?))
    }

    /// Starts the swings of the devices' offers, with one set per node.
    pub async fn swing(&self, of: &[Vec<Swing>], speed: f64, at: Timestamp) -> anyhow::Result<()> {
        for (n, swings) in of.iter().enumerate() {
            let envelopes = swings.iter().map(|swing| Envelope {
                signal: swing.signal,
                device: Some(EVERY_DEVICE.to_owned()),
                shape: Shape::Sinusoid(Sinusoid {
                    amplitude: swing.amplitude,
                    period_s: swing.period_s,
                    phase_deg: swing.phase_deg,
                    mean: None,
                }),
                since: Some(at),
                speed,
            });
            let envelopes = serde_json::to_value(envelopes.collect::<Vec<_>>())?;
            self.envelope(n, EnvelopeChange::Replace { envelopes })
                .await?;
        }
        Ok(())
    }

    /// Removes all envelopes.
    pub async fn steady(&self) -> anyhow::Result<()> {
        for n in 0..self.processors.len() {
            let (signal, device) = (None, None);
            self.envelope(n, EnvelopeChange::Clear { signal, device })
                .await?;
        }
        Ok(())
    }

    async fn envelope(&self, n: usize, change: EnvelopeChange) -> anyhow::Result<()> {
        let node = Cluster::node(n + 1);
        let reply = client::me(&self.cluster.broker)
            .envelope(node.clone(), Some(change))
            .await?;
        match reply.error {
            Some(error) => bail!("the envelope of {node} was refused: {error}"),
            None => Ok(()),
        }
    }
}

/// A load, which ends when it is dropped.
#[derive(Debug, Default)]
pub(super) struct Load {
    processes: Vec<Process>,
    device: Option<(PathBuf, NodeId, u64)>,
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some((file, node, rest)) = &self.device
            && let Err(error) = emulated::write(file, node.as_str(), *rest)
        {
            tracing::warn!(%error, "a device stays under pressure");
        }
    }
}
