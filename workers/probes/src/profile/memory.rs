//! The memory nodes of a machine: the firmware's values, and the speed that one thread reaches on
//! each.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use fiec_schemas::hardware::{MemoryNode, MemoryTier};

use super::{SAMPLE_MOST, SAMPLE_SHARE};

/// Smaller arrays stay in caches and do not measure memory.
const SAMPLE_LEAST: u64 = 1 << 20;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Dependent reads between two readings of the clock.
const STEPS: usize = 20_000;

fn word(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    word(path)?.parse().ok()
}

/// Returns the memory nodes in order of their numbers, without measurements. Empty if the kernel
/// does not list them.
pub(super) fn nodes(sysfs: &Path) -> Vec<MemoryNode> {
    let folder = sysfs.join("devices/system/node");
    let mut ids: Vec<u32> = fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    ids.sort_unstable();
    ids.into_iter()
        .filter_map(|id| node(&folder.join(format!("node{id}")), id))
        .collect()
}

fn node(home: &Path, id: u32) -> Option<MemoryNode> {
    let cpus = word(&home.join("cpulist")).unwrap_or_default();
    let memory_bytes = total(&fs::read_to_string(home.join("meminfo")).ok()?);
    // A node with processors only has nothing to measure.
    if memory_bytes == Some(0) {
        return None;
    }
    let firmware = home.join("access0/initiators");
    Some(MemoryNode {
        id,
        tier: if cpus.is_empty() {
            MemoryTier::Far
        } else {
            MemoryTier::Local
        },
        cpus,
        memory_bytes,
        // In MB/s and ns.
        firmware_read_bytes_s: number(&firmware.join("read_bandwidth"))
            .filter(|n| *n > 0)
            .map(|n| n.saturating_mul(1_000_000)),
        firmware_read_ns: number(&firmware.join("read_latency")).filter(|n| *n > 0),
        copy_bytes_s: None,
        latency_ns: None,
        sample_bytes: None,
        missing: None,
    })
}

/// `Node 0 MemTotal:  24731780 kB`
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|l| l.contains("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().rev().nth(1)?.parse().ok()?;
    Some(kib.saturating_mul(1_024))
}

/// Bytes of the first processor's last-level cache.
pub(super) fn last_cache(sysfs: &Path) -> Option<u64> {
    let folder = sysfs.join("devices/system/cpu/cpu0/cache");
    (0..8)
        .filter_map(|n| {
            let home = folder.join(format!("index{n}"));
            let size = word(&home.join("size"))?;
            let bytes = size.strip_suffix('K')?.parse::<u64>().ok()? * 1_024;
            Some((number(&home.join("level"))?, bytes))
        })
        .max()
        .map(|(_, bytes)| bytes)
}

/// Measures each node until `deadline`. A missing measurement has a reason. Each node has its own
/// thread, which allocates there and, if the node has processors, runs there.
pub(super) fn measure(nodes: &mut [MemoryNode], limit_bytes: u64, deadline: Instant) {
    let bytes = (limit_bytes / SAMPLE_SHARE).min(SAMPLE_MOST);
    let only = nodes.len() == 1;
    for node in nodes {
        let left = deadline.saturating_duration_since(Instant::now());
        let outcome = if bytes < SAMPLE_LEAST {
            Err(format!(
                "a {SAMPLE_SHARE}th of the node's memory limit, {bytes} bytes, says nothing about memory"
            ))
        } else if left.is_zero() {
            Err("the time that measuring may take was over before".to_owned())
        } else {
            let place = (!only).then(|| (node.id, node.cpus.clone()));
            let thread = std::thread::Builder::new().name("fiec-profile".into());
            thread
                .spawn(move || sample(place, bytes, left))
                .map_err(|e| e.to_string())
                .and_then(|t| t.join().unwrap_or_else(|_| Err("it panicked".to_owned())))
        };
        match outcome {
            Ok(found) => {
                node.copy_bytes_s = Some(found.copy_bytes_s);
                node.latency_ns = Some(found.latency_ns);
                node.sample_bytes = Some(found.bytes);
            }
            Err(why) => node.missing = Some(why),
        }
    }
}

struct Sample {
    copy_bytes_s: u64,
    latency_ns: f64,
    bytes: u64,
}

fn sample(place: Option<(u32, String)>, bytes: u64, within: Duration) -> Result<Sample, String> {
    if let Some((id, cpus)) = place {
        run_on(&cpus)?;
        allocate_on(id)?;
    }
    let began = Instant::now();
    // A power of two of lines, for the permutation below.
    let lines = (usize::try_from(bytes).unwrap_or(usize::MAX) / LINE + 1).next_power_of_two() / 2;
    let per_line = LINE / size_of::<u32>();
    let mut array = vec![0u32; lines * per_line];
    // Each line names the next one, in an order that no prefetcher can predict. It is a full-period
    // linear congruence (Hull and Dobell: odd increment, multiplier 1 more than a multiple of 4).
    let mask = lines - 1;
    let mut at = 0_usize;
    for line in 0..lines {
        if line % 4_096 == 0 && began.elapsed() > within / 2 {
            return Err(format!(
                "laying out {bytes} bytes took longer than {} ms: the machine is busy",
                (within / 2).as_millis()
            ));
        }
        let next = at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) & mask;
        array[at * per_line] = u32::try_from(next).unwrap_or(0);
        at = next;
    }
    let latency_ns = latency(&array, per_line, began + within * 3 / 5);
    let copy_bytes_s = copy(&mut array, began + within * 4 / 5);
    Ok(Sample {
        copy_bytes_s,
        latency_ns,
        bytes: (lines * LINE) as u64,
    })
}

/// Returns the fastest of several series of reads, each of which depends on the one before.
fn latency(array: &[u32], per_line: usize, deadline: Instant) -> f64 {
    let mut at = 0_usize;
    let mut best = f64::INFINITY;
    for round in 0..8 {
        let began = Instant::now();
        for _ in 0..STEPS {
            at = array[at * per_line] as usize;
        }
        at = black_box(at);
        best = best.min(began.elapsed().as_secs_f64() * 1e9 / STEPS as f64);
        if round > 0 && Instant::now() >= deadline {
            break;
        }
    }
    best
}

/// Returns the fastest of several copies from one half of the array to the other.
fn copy(array: &mut [u32], deadline: Instant) -> u64 {
    let half = array.len() / 2;
    let bytes = (half * size_of::<u32>()) as f64;
    let (to, from) = array.split_at_mut(half);
    let mut best = 0.0_f64;
    for round in 0..8 {
        let began = Instant::now();
        to.copy_from_slice(&from[..half]);
        black_box(&mut *to);
        best = best.max(bytes / began.elapsed().as_secs_f64().max(1e-9));
        if round > 0 && Instant::now() >= deadline {
            break;
        }
    }
    best as u64
}

/// Binds this thread to a list of processors such as `0-7,16-23`. An empty list means any.
fn run_on(cpus: &str) -> Result<(), String> {
    let mut set = rustix::thread::CpuSet::new();
    for range in cpus.split(',').filter(|r| !r.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<usize>().map_err(|_| format!("{cpus:?}"));
        for cpu in number(first)?..=number(last)? {
            if cpu < rustix::thread::CpuSet::MAX_CPU {
                set.set(cpu);
            }
        }
    }
    if set.count() == 0 {
        return Ok(());
    }
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|e| format!("this process may not run on its processors {cpus}: {e}"))
}

/// Makes this thread's memory come from one node.
fn allocate_on(id: u32) -> Result<(), String> {
    const BIND: libc::c_int = 2;
    let mut mask = [0 as libc::c_ulong; 16];
    let bits = libc::c_ulong::BITS;
    let word = mask
        .get_mut((id / bits) as usize)
        .ok_or_else(|| format!("memory node {id} is beyond what is supported"))?;
    *word |= 1 << (id % bits);
    let bits = mask.len() as libc::c_ulong * libc::c_ulong::from(bits);
    // SAFETY: the mask has as many bits as is said; the call changes where this thread's later
    // allocations come from, and nothing else.
    #[allow(unsafe_code)]
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, BIND, mask.as_ptr(), bits) };
    if result == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(format!(
        "memory cannot be taken from this node alone: {error}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(root: &Path) {
        let node = |n: u32, cpus: &str, kib: u64| {
            let home = root.join(format!("devices/system/node/node{n}"));
            fs::create_dir_all(home.join("access0/initiators")).unwrap();
            fs::write(home.join("cpulist"), format!("{cpus}\n")).unwrap();
            let text = format!("Node {n} MemTotal:       {kib} kB\nNode {n} MemFree: 1 kB\n");
            fs::write(home.join("meminfo"), text).unwrap();
            home.join("access0/initiators")
        };
        node(0, "0-3", 1_000);
        let far = node(2, "", 4_000);
        fs::write(far.join("read_bandwidth"), "30000\n").unwrap();
        fs::write(far.join("read_latency"), "250\n").unwrap();
        node(1, "4-7", 0);
    }

    #[test]
    fn memory_without_processors_is_far_and_keeps_what_firmware_says() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path());
        let found = nodes(root.path());
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].id, found[0].tier), (0, MemoryTier::Local));
        assert_eq!((found[1].id, found[1].tier), (2, MemoryTier::Far));
        assert_eq!(found[1].memory_bytes, Some(4_096_000));
        assert_eq!(found[1].firmware_read_bytes_s, Some(30_000_000_000));
        assert_eq!(found[1].firmware_read_ns, Some(250));
        assert_eq!(found[0].firmware_read_ns, None);
        assert!(nodes(Path::new("/nonexistent")).is_empty());
    }

    #[test]
    fn what_cannot_be_measured_says_why() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path());
        let mut found = nodes(root.path());
        measure(
            &mut found,
            32 << 20,
            Instant::now() + Duration::from_secs(9),
        );
        assert!(found[0].missing.as_ref().unwrap().contains("says nothing"));
        let mut found = nodes(root.path());
        measure(&mut found, 1 << 30, Instant::now());
        assert!(found[0].missing.as_ref().unwrap().contains("was over"));
        // This machine has no such node.
        let mut absent = vec![found[0].clone(), found[1].clone()];
        absent[1].id = 1_000;
        measure(
            &mut absent,
            1 << 30,
            Instant::now() + Duration::from_secs(9),
        );
        assert!(absent[1].missing.as_ref().unwrap().contains("node"));
        assert_eq!(absent[1].copy_bytes_s, None);
    }

    #[test]
    fn memory_of_the_first_node_can_be_asked_for_and_measured() {
        let found = sample(
            Some((0, String::new())),
            8 << 20,
            Duration::from_millis(100),
        );
        match found {
            Ok(found) => {
                assert_eq!(found.bytes, 8 << 20);
                assert!(found.latency_ns > 0.0 && found.latency_ns < 100_000.0);
                assert!(found.copy_bytes_s > 10_000_000);
            }
            // A container may forbid it, or others may use the processors. The result then says so.
            Err(why) => assert!(
                why.contains("this node alone") || why.contains("is busy"),
                "{why}"
            ),
        }
    }

    #[test]
    fn the_order_of_reads_visits_every_line_once() {
        for bits in [4, 10, 16] {
            let lines = 1_usize << bits;
            let mut seen = vec![false; lines];
            let mut at = 0_usize;
            for _ in 0..lines {
                assert!(!std::mem::replace(&mut seen[at], true));
                at = at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) & (lines - 1);
            }
            assert_eq!(at, 0);
        }
    }
}
