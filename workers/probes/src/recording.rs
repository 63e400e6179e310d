//! Recordings of probes' inputs, so that probes can be tested for machines that are not here.
//!
//! A recording is a folder (`fiec node record` makes one):
//!
//! ```text
//! about.json            {"v": 1, "kernel": …, "memory": …, "steps_ms": [0, 500, …]}
//! 0000/proc/meminfo …   the files of the kernel that probes read, as they were at the first step
//! 0001/…                those that had changed at the second, and so on
//! devices.jsonl         the facts of every device, one line a step; absent without devices
//! ```
//!
//! [`Recording::lay_out`] writes a step into a folder that represents `/`, and
//! [`Recording::sampler`] reads from there. The files of one step are recorded one after the other,
//! so their times may differ by milliseconds.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::device::{DeviceFacts, DeviceHandle, DeviceSource};
use crate::latency::LatencyConfig;
use crate::memory::MemoryLimit;
use crate::sampler::SamplerConfig;
use crate::watch::Wake;

const ABOUT: &str = "about.json";
const DEVICES: &str = "devices.jsonl";
/// Most steps of one recording.
pub const MOST_STEPS: usize = 10_000;

/// An error in a recording, or while making one.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A file does not have the form above.
    #[error("{}: {rule}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// The rule that it breaks.
        rule: String,
    },
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> RecordingError {
    move |source| RecordingError::Io {
        path: path.to_owned(),
        source,
    }
}

/// The head of a recording.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    v: u8,
    /// Its origin: a kernel's release, or the author of a composed recording.
    kernel: String,
    /// The cgroup of M, as a path below `/`. None means the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cgroup: Option<Cgroup>,
    /// Time of each step, in milliseconds after the first.
    steps_ms: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cgroup {
    /// 1 or 2.
    version: u8,
    dir: PathBuf,
}

/// Records the inputs of this machine's probes into a new folder: `steps` times, at an interval of
/// `every`. Returns the number of files written.
///
/// # Errors
/// The folder is not empty, or a file cannot be written. An unreadable input counts as absent.
pub fn record(
    to: &Path,
    memory: &MemoryLimit,
    devices: &DeviceHandle,
    steps: usize,
    every: Duration,
) -> Result<usize, RecordingError> {
    fs::create_dir_all(to).map_err(io_error(to))?;
    if fs::read_dir(to).map_err(io_error(to))?.next().is_some() {
        return Err(RecordingError::Form {
            path: to.to_owned(),
            rule: "the folder is not empty; name an empty or a new folder".into(),
        });
    }
    let cgroup = match memory {
        MemoryLimit::CgroupV1(dir) => Some((1, dir)),
        MemoryLimit::CgroupV2(dir) => Some((2, dir)),
        MemoryLimit::Declared { .. } | MemoryLimit::Host => None,
    };
    let cgroup = cgroup.map(|(version, dir)| Cgroup {
        version,
        dir: below_root(dir).to_owned(),
    });
    let mut about = About {
        v: 1,
        kernel: rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
        cgroup,
        steps_ms: Vec::new(),
    };
    let mut before: BTreeMap<PathBuf, String> = BTreeMap::new();
    let mut lines = Vec::new();
    let mut written = 0;
    let began = Instant::now();
    for step in 0..steps.clamp(1, MOST_STEPS) {
        let due = every * u32::try_from(step).unwrap_or(u32::MAX);
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        about
            .steps_ms
            .push(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
        for path in sources(memory) {
            let text = if path.ends_with("cgroup.procs") {
                // Its existence marks a cgroup. The ids of its processes are not recorded.
                String::new()
            } else {
                match fs::read_to_string(&path) {
                    Ok(text) => text,
                    Err(_) => continue,
                }
            };
            if before.get(&path) == Some(&text) {
                continue;
            }
            let target = to.join(format!("{step:04}")).join(below_root(&path));
            let folder = target.parent().unwrap_or(to);
            fs::create_dir_all(folder).map_err(io_error(folder))?;
            fs::write(&target, &text).map_err(io_error(&target))?;
            before.insert(path, text);
            written += 1;
        }
        let facts = devices.latest();
        if !facts.is_empty() {
            serde_json::to_writer(&mut lines, &facts)
                .map_err(|e| io_error(&to.join(DEVICES))(e.into()))?;
            lines.push(b'\n');
        }
    }
    if !lines.is_empty() {
        let path = to.join(DEVICES);
        fs::write(&path, lines).map_err(io_error(&path))?;
        written += 1;
    }
    let path = to.join(ABOUT);
    let mut text = serde_json::to_string_pretty(&about).map_err(|e| io_error(&path)(e.into()))?;
    text.push('\n');
    let mut file = fs::File::create(&path).map_err(io_error(&path))?;
    file.write_all(text.as_bytes()).map_err(io_error(&path))?;
    Ok(written + 1)
}

fn below_root(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Lists the files that probes read on this machine.
fn sources(memory: &MemoryLimit) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = [
        "/proc/meminfo",
        "/proc/loadavg",
        "/proc/pressure/memory",
        "/proc/pressure/cpu",
    ]
    .map(PathBuf::from)
    .into();
    if let MemoryLimit::CgroupV1(dir) | MemoryLimit::CgroupV2(dir) = memory {
        let levels = dir
            .ancestors()
            .take_while(|d| d.join("cgroup.procs").exists());
        for level in levels {
            for file in [
                "cgroup.procs",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "memory.max",
                "memory.current",
                "memory.stat",
                "memory.events",
                "memory.pressure",
            ] {
                found.push(level.join(file));
            }
        }
    }
    let among = |dir: &str, entry: &str, files: &[&str]| {
        let begins = |path: &Path, with: &[&str]| {
            let name = path.file_name().and_then(|n| n.to_str());
            name.is_some_and(|n| with.iter().any(|w| n.starts_with(w)))
        };
        let list = |dir: &Path| -> Vec<PathBuf> {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|e| e.path()).collect()
        };
        let folders = list(Path::new(dir)).into_iter();
        folders
            .filter(|folder| begins(folder, &[entry]))
            .flat_map(|folder| list(&folder))
            .filter(|file| begins(file, files) && file.is_file())
            .collect::<Vec<_>>()
    };
    found.extend(among(
        "/sys/class/powercap",
        "intel-rapl:",
        &["name", "energy_uj", "max_energy_range_uj", "constraint_"],
    ));
    found.extend(among(
        "/sys/class/thermal",
        "thermal_zone",
        &["type", "temp", "trip_point_"],
    ));
    found.extend(among("/sys/class/hwmon", "hwmon", &["name", "temp"]));
    found.extend(among(
        "/sys/devices/system/node",
        "node",
        &["meminfo", "cpulist"],
    ));
    found
}

/// A recording to replay.
#[derive(Debug, Clone)]
pub struct Recording {
    dir: PathBuf,
    about: About,
    devices: Vec<Vec<DeviceFacts>>,
}

impl Recording {
    /// Opens a recording.
    ///
    /// # Errors
    /// The file that is unreadable or malformed, and the rule.
    pub fn open(dir: &Path) -> Result<Self, RecordingError> {
        let path = dir.join(ABOUT);
        let text = fs::read_to_string(&path).map_err(io_error(&path))?;
        let fail = |path: &Path, rule: String| RecordingError::Form {
            path: path.to_owned(),
            rule,
        };
        let about: About = serde_json::from_str(&text).map_err(|e| fail(&path, e.to_string()))?;
        if about.v != 1 {
            let rule = format!("v is {}, but this program reads version 1", about.v);
            return Err(fail(&path, rule));
        }
        let forward = about.steps_ms.windows(2).all(|w| w[0] <= w[1]);
        if about.steps_ms.is_empty() || about.steps_ms.len() > MOST_STEPS || !forward {
            let rule = format!("steps_ms must be 1 to {MOST_STEPS} moments in order");
            return Err(fail(&path, rule));
        }
        let path = dir.join(DEVICES);
        let mut devices = Vec::new();
        if path.exists() {
            let text = fs::read_to_string(&path).map_err(io_error(&path))?;
            for (index, line) in text.lines().enumerate() {
                let facts = serde_json::from_str(line)
                    .map_err(|e| fail(&path, format!("line {}: {e}", index + 1)))?;
                devices.push(facts);
            }
        }
        Ok(Self {
            dir: dir.to_owned(),
            about,
            devices,
        })
    }

    /// Time of each step, in milliseconds after the first.
    pub fn steps_ms(&self) -> &[u64] {
        &self.about.steps_ms
    }

    /// Writes the changes of a step into the folder that represents `/`. Steps must be written in
    /// order.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn lay_out(&self, step: usize, root: &Path) -> Result<(), RecordingError> {
        let from = self.dir.join(format!("{step:04}"));
        if from.is_dir() {
            copy_over(&from, root)?;
        }
        Ok(())
    }

    /// Probes of the machine in this folder.
    pub fn sampler(&self, root: &Path) -> SamplerConfig {
        let memory = match &self.about.cgroup {
            None => MemoryLimit::Host,
            Some(cgroup) if cgroup.version == 1 => MemoryLimit::CgroupV1(root.join(&cgroup.dir)),
            Some(cgroup) => MemoryLimit::CgroupV2(root.join(&cgroup.dir)),
        };
        SamplerConfig {
            memory,
            run_dir: None,
            latency: LatencyConfig::default(),
            connections: false,
            device_file: None,
            devices: false,
            procfs: root.join("proc"),
            sysfs: root.join("sys"),
            wake: Wake::default(),
        }
    }

    /// Its devices. Each poll advances one step. None without devices.
    pub fn devices(&self) -> Option<RecordedDevices> {
        (!self.devices.is_empty()).then(|| RecordedDevices {
            facts: self.devices.clone(),
            next: 0,
        })
    }
}

/// Replays the devices of a recording. The last step persists.
pub struct RecordedDevices {
    facts: Vec<Vec<DeviceFacts>>,
    next: usize,
}

impl DeviceSource for RecordedDevices {
    fn poll(&mut self) -> Vec<DeviceFacts> {
        let at = self.next.min(self.facts.len().saturating_sub(1));
        self.next += 1;
        self.facts.get(at).cloned().unwrap_or_default()
    }
}

/// Writes into existing files instead of replacing them: probes keep them open.
fn copy_over(from: &Path, to: &Path) -> Result<(), RecordingError> {
    fs::create_dir_all(to).map_err(io_error(to))?;
    for entry in fs::read_dir(from).map_err(io_error(from))? {
        let path = entry.map_err(io_error(from))?.path();
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_over(&path, &target)?;
        } else {
            let text = fs::read(&path).map_err(io_error(&path))?;
            fs::write(&target, text).map_err(io_error(&target))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sampler, conformance};
    use fiec_schemas::hardware::Signal;
    use fiec_schemas::ids::Timestamp;

    #[test]
    fn this_machine_recorded_and_played_reads_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let (tape, root) = (dir.path().join("tape"), dir.path().join("root"));
        let limit = MemoryLimit::detect();
        let none = DeviceHandle::default();
        let files = record(&tape, &limit, &none, 2, Duration::from_millis(1)).unwrap();
        assert!(files >= 3, "{files}");
        let recording = Recording::open(&tape).unwrap();
        recording.lay_out(0, &root).unwrap();
        let mut sampler = Sampler::new(recording.sampler(&root));
        let sample = sampler.sample(Timestamp::from_micros(0));
        conformance::check_all(&sample).unwrap();
        let memory = sample.iter().find(|r| r.signal == Signal::Memory).unwrap();
        let text = fs::read_to_string(tape.join("0000/proc/meminfo")).unwrap();
        let total = crate::kernel_file::meminfo(&text, "MemTotal:").unwrap();
        assert!(memory.limit.unwrap() <= total as f64);
        assert!(memory.source.contains(root.to_str().unwrap()), "{memory:?}");
        recording.lay_out(1, &root).unwrap();
        conformance::check_all(&sampler.sample(Timestamp::from_micros(1_000))).unwrap();
        let again = record(&tape, &limit, &none, 1, Duration::ZERO).unwrap_err();
        assert!(again.to_string().contains("not empty"), "{again}");
    }

    #[test]
    fn a_bad_recording_names_the_file_and_the_rule() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Recording::open(dir.path()).unwrap_err().to_string();
        assert!(open().contains(ABOUT));
        let about = |text: &str| fs::write(dir.path().join(ABOUT), text).unwrap();
        about(r#"{"v": 2, "kernel": "x", "steps_ms": [0]}"#);
        assert!(open().contains("version 1"));
        about(r#"{"v": 1, "kernel": "x", "steps_ms": [5, 4]}"#);
        assert!(open().contains("in order"));
        about(r#"{"v": 1, "kernel": "x", "steps_ms": [0]}"#);
        fs::write(dir.path().join(DEVICES), "[]\n{").unwrap();
        assert!(open().contains("line 2"));
    }
}
