//! A node's knowledge of its machine beyond H(t), with a short measurement of its memory and of the
//! copies to its devices.
//!
//! The measurement is bounded in time ([`MEMORY_WITHIN`], [`COPIES_WITHIN`]) and in memory (a 64th
//! of the node's limit, 64 MiB at most). Its result is kept on disk under a digest of its
//! conditions, so that a restart does not repeat it.

mod copies;
mod memory;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fiec_schemas::Contract;
use fiec_schemas::hardware::{Measured, MemoryNode, NodeProfile, Substrate};
use fiec_schemas::ids::{Digest, Timestamp};
use serde::{Deserialize, Serialize};
use sysinfo::System;

use crate::confinement::confinement;
use crate::descriptor::isa;

/// Time limit of measuring memory.
pub const MEMORY_WITHIN: Duration = Duration::from_millis(250);
/// Time limit of measuring the copies of all devices.
pub const COPIES_WITHIN: Duration = Duration::from_millis(700);
/// Largest array that is measured.
pub const SAMPLE_MOST: u64 = 64 << 20;
/// The array's part of the node's memory limit.
pub const SAMPLE_SHARE: u64 = 64;
/// Changes when the meaning of a measurement changes.
const VERSION: u32 = 1;

/// The source of a profile.
#[derive(Debug, Clone)]
pub struct ProfileOptions {
    /// Path of sysfs: `/sys`.
    pub sysfs: PathBuf,
    /// Folder of earlier measurements. None means to measure each time.
    pub cache: Option<PathBuf>,
    /// Whether to measure even if there is a measurement.
    pub anew: bool,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self {
            sysfs: PathBuf::from("/sys"),
            cache: default_cache(),
            anew: false,
        }
    }
}

/// The folder of this user's earlier measurements: `fiec/machines` in the user's cache.
pub fn default_cache() -> Option<PathBuf> {
    let folder = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|folder| folder.is_absolute())
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(folder.join("fiec").join("machines"))
}

/// Measurements of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Kept {
    memory: Vec<MemoryNode>,
    devices: BTreeMap<String, Copies>,
    measured: Measured,
}

/// Copies between the host's page-locked memory and a device, in bytes per second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Copies {
    to_device_bytes_s: Option<u64>,
    from_device_bytes_s: Option<u64>,
    missing: Option<String>,
}

/// Returns the numeric contracts that kernels can keep on an instruction set. The bitwise contract
/// needs fused multiply and add.
pub fn contracts(isa: &str) -> Vec<Contract> {
    let fused = isa.starts_with("aarch64") || isa.split('+').any(|part| part == "fma");
    let bitwise = fused.then_some(Contract::Bitwise);
    bitwise
        .into_iter()
        .chain([Contract::Bounded, Contract::Statistical])
        .collect()
}

/// Gathers the profile of this machine, and writes the measured copies into `substrates`.
/// `limit_bytes` is the node's memory limit.
pub fn gather(
    options: &ProfileOptions,
    limit_bytes: u64,
    libraries: BTreeMap<String, String>,
    substrates: &mut [Substrate],
) -> NodeProfile {
    let nodes = memory::nodes(&options.sysfs);
    let last_cache_bytes = memory::last_cache(&options.sysfs);
    let machine = fingerprint(&nodes, &libraries, substrates);
    let file = options
        .cache
        .as_ref()
        .map(|folder| file_of(folder, machine));
    let known = file.as_ref().filter(|_| !options.anew);
    let known = known.and_then(|file| read(file, machine));
    let kept = known.unwrap_or_else(|| {
        let kept = measure(nodes, limit_bytes, machine, substrates);
        // A machine that was too busy for the measurement is measured at the next start.
        let told = kept.memory.iter().any(|node| node.copy_bytes_s.is_some());
        if let Some(file) = file.as_ref().filter(|_| told)
            && let Err(error) = write(file, &kept)
        {
            tracing::info!(%error, file = %file.display(), "the machine's profile is not kept");
        }
        kept
    });
    for substrate in substrates.iter_mut() {
        if let (Some(device), Some(copies)) =
            (&mut substrate.device, kept.devices.get(&substrate.id))
        {
            device.to_device_bytes_s = copies.to_device_bytes_s;
            device.from_device_bytes_s = copies.from_device_bytes_s;
            device.missing.clone_from(&copies.missing);
        }
    }
    NodeProfile {
        cores: System::physical_core_count()
            .ok()
            .and_then(|n| u32::try_from(n).ok()),
        kernel: kernel(),
        last_cache_bytes,
        contracts: contracts(&isa()),
        confinement: confinement(),
        libraries,
        memory: kept.memory,
        measured: Some(kept.measured),
    }
}

/// `Linux 6.1.0`.
fn kernel() -> String {
    let name = rustix::system::uname();
    let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
    format!("{} {}", text(name.sysname()), text(name.release()))
}

fn measure(
    mut nodes: Vec<MemoryNode>,
    limit_bytes: u64,
    machine: Digest,
    substrates: &[Substrate],
) -> Kept {
    let began = Instant::now();
    memory::measure(&mut nodes, limit_bytes, began + MEMORY_WITHIN);
    let ids: Vec<String> = substrates
        .iter()
        .filter(|s| s.is_device())
        .map(|s| s.id.clone())
        .collect();
    let devices = copies::measure(&ids, COPIES_WITHIN);
    Kept {
        memory: nodes,
        devices,
        measured: Measured {
            at: Timestamp::now(),
            took_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
            machine,
        },
    }
}

/// Digest of the conditions of a measurement.
fn fingerprint(
    nodes: &[MemoryNode],
    libraries: &BTreeMap<String, String>,
    substrates: &[Substrate],
) -> Digest {
    // The host's memory size is a limit and does not influence speed.
    let places: Vec<_> = substrates
        .iter()
        .map(|s| (&s.id, &s.name, s.memory_bytes.filter(|_| s.is_device())))
        .collect();
    let all = (VERSION, isa(), nodes, libraries, places);
    // Numbers and strings only: the encoding cannot fail.
    Digest::of(&serde_json::to_vec(&all).unwrap_or_default())
}

fn file_of(folder: &Path, machine: Digest) -> PathBuf {
    folder.join(format!("{machine}.json"))
}

/// Reads an earlier measurement of this machine. An unreadable one is repeated.
fn read(file: &Path, machine: Digest) -> Option<Kept> {
    let kept: Kept = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    (kept.measured.machine == machine).then_some(kept)
}

fn write(file: &Path, kept: &Kept) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    // Several workers of one machine may write concurrently. Each file is complete.
    let name = format!(".{}-{}", std::process::id(), kept.measured.at.micros());
    let temporary = folder.join(name);
    let written = std::fs::File::create(&temporary)
        .and_then(|mut out| out.write_all(&serde_json::to_vec_pretty(kept)?))
        .and_then(|()| std::fs::rename(&temporary, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(cache: &Path) -> ProfileOptions {
        ProfileOptions {
            cache: Some(cache.to_owned()),
            ..ProfileOptions::default()
        }
    }

    #[test]
    fn a_machine_is_measured_within_its_bounds_once_and_then_read_from_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let first = gather(&options(folder.path()), 2 << 30, BTreeMap::new(), &mut []);
        let took = began.elapsed();
        println!("{first:#?} in {took:?}");
        let measured = first.measured.clone().unwrap();
        // Far above the bound: this machine may be busy with other tests.
        assert!(took < Duration::from_secs(20), "{took:?}");
        for node in &first.memory {
            let told = node.copy_bytes_s.is_some() && node.latency_ns.is_some();
            assert!(told != node.missing.is_some(), "{node:?}");
            assert!(
                node.sample_bytes
                    .is_none_or(|n| n <= (2 << 30) / SAMPLE_SHARE)
            );
        }
        assert!(!first.confinement.is_empty());
        let Some(bandwidth) = first.bandwidth_bytes_s() else {
            println!("this machine was too busy to be measured; nothing is kept then");
            assert_eq!(
                std::fs::read_dir(folder.path()).map_or(0, Iterator::count),
                0
            );
            return;
        };
        assert!(bandwidth > 10_000_000, "{bandwidth}");
        let again = gather(&options(folder.path()), 2 << 30, BTreeMap::new(), &mut []);
        assert_eq!(again, first, "a restart reads what was measured");
        let anew = ProfileOptions {
            anew: true,
            ..options(folder.path())
        };
        let anew = gather(&anew, 2 << 30, BTreeMap::new(), &mut []);
        assert!(anew.measured.unwrap().at > measured.at, "asked anew");
    }

    #[test]
    fn another_driver_or_device_is_another_machine_and_a_damaged_file_is_measured_anew() {
        let folder = tempfile::tempdir().unwrap();
        let driver = |version: &str| BTreeMap::from([("cuda_driver".into(), version.into())]);
        let first = gather(&options(folder.path()), 1 << 30, driver("12.0"), &mut []);
        let second = gather(&options(folder.path()), 1 << 30, driver("13.0"), &mut []);
        let machine = |p: &NodeProfile| p.measured.as_ref().unwrap().machine;
        assert_ne!(machine(&first), machine(&second));
        if std::fs::read_dir(folder.path()).map_or(0, Iterator::count) < 2 {
            println!("this machine was too busy to be measured; nothing is kept then");
            return;
        }
        std::fs::write(file_of(folder.path(), machine(&first)), "{half").unwrap();
        let third = gather(&options(folder.path()), 1 << 30, driver("12.0"), &mut []);
        assert_eq!(machine(&third), machine(&first));
        assert!(third.measured.unwrap().at > first.measured.unwrap().at);
    }

    #[test]
    fn only_an_instruction_set_that_fuses_offers_the_bitwise_contract() {
        assert!(contracts("x86_64+avx2+fma").contains(&Contract::Bitwise));
        assert!(contracts("aarch64+neon").contains(&Contract::Bitwise));
        assert!(!contracts("x86_64+avx2").contains(&Contract::Bitwise));
        assert!(contracts("x86_64").contains(&Contract::Bounded));
    }
}
