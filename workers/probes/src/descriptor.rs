//! The machine facts of a node's descriptor.

use std::collections::BTreeMap;

use fiec_schemas::hardware::{NodeDescriptor, NodeProfile, Substrate};
use fiec_schemas::substrate::SubstrateKind;
use sysinfo::{CpuRefreshKind, RefreshKind, System};

use crate::devices::{cuda_devices, cuda_version};
use crate::memory::MemoryLimit;
use crate::profile::{self, ProfileOptions};
use crate::simulated;

/// The machine's part of a descriptor. The agent adds the rest.
#[derive(Debug, Clone, PartialEq)]
pub struct MachineFacts {
    /// The host's name.
    pub host: String,
    /// Logical processors that this process may use, by affinity and CPU quota.
    pub cpus: u32,
    /// See [`isa`].
    pub isa: String,
    /// The memory limit of M, in bytes.
    pub memory_limit_bytes: u64,
    /// The source of that limit.
    pub memory_limit_source: String,
    /// The host, then its devices.
    pub substrates: Vec<Substrate>,
    /// Further facts and measurements.
    pub profile: NodeProfile,
}

impl MachineFacts {
    /// Examines this machine. It may load the CUDA driver, which can take a second. It measures
    /// speeds that were not measured before, within [`profile::MEMORY_WITHIN`] and
    /// [`profile::COPIES_WITHIN`]. `devices` is a file of simulated devices that replaces CUDA's.
    ///
    /// # Errors
    /// The host's memory, or the file of devices, cannot be read.
    pub fn gather(
        limit: &MemoryLimit,
        options: &ProfileOptions,
        devices: Option<&std::path::Path>,
    ) -> std::io::Result<Self> {
        let memory_limit_bytes = limit.bytes()?;
        let host = Substrate {
            id: "host".into(),
            kind: SubstrateKind::Cpu,
            name: cpu_name(),
            memory_bytes: Some(memory_limit_bytes),
            device: None,
        };
        let devices = match devices {
            Some(file) => simulated::substrates(file)?,
            None => cuda_devices(),
        };
        let mut substrates: Vec<_> = std::iter::once(host).chain(devices).collect();
        let profile = profile::gather(options, memory_limit_bytes, libraries(), &mut substrates);
        Ok(Self {
            host: System::host_name().unwrap_or_else(|_| "unknown".into()),
            cpus: cpus(),
            isa: isa(),
            memory_limit_bytes,
            memory_limit_source: limit.source(),
            substrates,
            profile,
        })
    }

    /// Writes the facts into a descriptor, and leaves its other fields unchanged.
    pub fn describe(self, descriptor: &mut NodeDescriptor) {
        descriptor.host = self.host;
        descriptor.cpus = self.cpus;
        descriptor.isa = self.isa;
        descriptor.memory_limit_bytes = self.memory_limit_bytes;
        descriptor.memory_limit_source = self.memory_limit_source;
        descriptor.substrates = self.substrates;
        descriptor.profile = self.profile;
    }
}

/// Gathers the facts and writes them into a descriptor.
///
/// # Errors
/// The host's memory, or the file of devices, cannot be read.
pub fn describe(
    descriptor: &mut NodeDescriptor,
    limit: &MemoryLimit,
    options: &ProfileOptions,
    devices: Option<&std::path::Path>,
) -> std::io::Result<()> {
    MachineFacts::gather(limit, options, devices)?.describe(descriptor);
    Ok(())
}

/// Versions of the libraries that devices depend on.
fn libraries() -> BTreeMap<String, String> {
    let driver = std::fs::read_to_string("/sys/module/nvidia/version").ok();
    [
        ("nvidia_driver", driver.map(|text| text.trim().to_owned())),
        ("cuda_driver", cuda_version()),
    ]
    .into_iter()
    .filter_map(|(name, version)| Some((name.to_owned(), version?)))
    .collect()
}

/// Logical processors that this process may use.
pub fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// The instruction set and the extensions that numeric contracts depend on, in a fixed order:
/// `x86_64+avx2+fma+avx512f`.
pub fn isa() -> String {
    let mut text = std::env::consts::ARCH.to_owned();
    for (name, present) in extensions() {
        if present {
            text.push('+');
            text.push_str(name);
        }
    }
    text
}

#[cfg(target_arch = "x86_64")]
fn extensions() -> [(&'static str, bool); 3] {
    [
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
    ]
}

#[cfg(target_arch = "aarch64")]
fn extensions() -> [(&'static str, bool); 2] {
    [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn extensions() -> [(&'static str, bool); 0] {
    []
}

fn cpu_name() -> String {
    let only_cpus = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
    let brand = System::new_with_specifics(only_cpus)
        .ok()
        .and_then(|system| Some(system.cpus().first()?.brand().trim().to_owned()));
    brand
        .filter(|b| !b.is_empty())
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_describes_itself() {
        let facts =
            MachineFacts::gather(&MemoryLimit::Host, &ProfileOptions::default(), None).unwrap();
        println!("{facts:?}");
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(facts.host, name.trim());
        assert_eq!(facts.substrates[0].id, "host");
        assert!(facts.isa.starts_with(std::env::consts::ARCH));
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        for flag in ["avx2", "fma", "avx512f"] {
            let has = cpuinfo
                .lines()
                .any(|l| l.starts_with("flags") && l.split(' ').any(|w| w == flag));
            assert_eq!(facts.isa.split('+').any(|w| w == flag), has, "{flag}");
        }
    }

    #[test]
    fn processors_outside_the_affinity_mask_do_not_count() {
        let all = cpus();
        let first = rustix::thread::sched_getaffinity(None).unwrap();
        let one = (0..1024).find(|i| first.is_set(*i)).unwrap();
        let mut mask = rustix::thread::CpuSet::new();
        mask.set(one);
        // The mask applies to this thread only.
        let counted = std::thread::spawn(move || {
            rustix::thread::sched_setaffinity(None, &mask).unwrap();
            cpus()
        });
        assert_eq!(counted.join().unwrap(), 1);
        assert_eq!(cpus(), all);
    }
}
