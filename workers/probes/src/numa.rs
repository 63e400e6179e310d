//! M of each memory node, if there is more than one: sockets, and CXL or other memory without
//! processors.

use std::fs;
use std::path::Path;

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

use crate::Probe;
use crate::kernel_file::{KernelFile, Once, field, invalid};
use crate::reading::Make;

struct Node {
    place: String,
    file: KernelFile,
    /// ` (no processors)`, or empty.
    kind: &'static str,
    /// `Node <n> `, the start of every line.
    prefix: String,
    once: Once,
}

/// (total − free − file pages) / total of each memory node, as parts `numa:<n>`. A machine
/// with one memory node has no such parts: that is M of the host.
pub struct NumaProbe {
    nodes: Vec<Node>,
}

impl NumaProbe {
    /// A probe of `<sysfs>/devices/system/node`.
    pub fn at(sysfs: &Path) -> Self {
        let dir = sysfs.join("devices/system/node");
        let mut numbers: Vec<u32> = fs::read_dir(dir.as_path())
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|e| e.file_name().to_str()?.strip_prefix("node")?.parse().ok())
            .collect();
        numbers.sort_unstable();
        let mut nodes: Vec<Node> = numbers
            .into_iter()
            .filter_map(|n| {
                let home = dir.join(format!("node{n}"));
                let mut file = KernelFile::new(home.join("meminfo"));
                let prefix = format!("Node {n} ");
                // A node with processors only has no memory to exhaust.
                let total = field(file.read().ok()?, &format!("{prefix}MemTotal:"))?;
                (total > 0).then_some(())?;
                let cpus = fs::read_to_string(home.join("cpulist")).unwrap_or_default();
                let kind = if cpus.trim().is_empty() {
                    " (no processors: CXL or other far memory)"
                } else {
                    ""
                };
                Some(Node {
                    place: format!("numa:{n}"),
                    file,
                    kind,
                    prefix,
                    once: Once::default(),
                })
            })
            .collect();
        if nodes.len() < 2 {
            nodes.clear();
        }
        Self { nodes }
    }
}

impl Probe for NumaProbe {
    fn name(&self) -> &'static str {
        "numa"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        for node in &mut self.nodes {
            let source = format!("{}{}", node.file.path().display(), node.kind);
            let make = Make {
                signal: Signal::Memory,
                device: Some(&node.place),
                unit: "bytes",
                source: &source,
                at: now,
            };
            let prefix = &node.prefix;
            let level = node.file.read().and_then(|text| {
                let bytes = |key: &str| {
                    let kib = field(text, &format!("{prefix}{key}:"));
                    kib.map(|kib| kib as f64 * 1024.0)
                        .ok_or_else(|| invalid(format!("no {key}")))
                };
                let total = bytes("MemTotal")?;
                let cache = bytes("Inactive(file)")? + bytes("Active(file)")?;
                let free = bytes("MemFree")? + cache;
                Ok(((total - free).max(0.0), total))
            });
            out.push(match level {
                Ok((used, total)) => make.value(used / total, used, Some(total)),
                Err(e) => {
                    node.once.warn("numa", &format!("{source}: {e}"));
                    make.missing(e.to_string())
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(dir: &Path, n: u32, total: u64, free: u64, cpus: &str) {
        let home = dir.join(format!("devices/system/node/node{n}"));
        fs::create_dir_all(&home).unwrap();
        fs::write(home.join("cpulist"), format!("{cpus}\n")).unwrap();
        let text = format!(
            "Node {n} MemTotal:       {total} kB\nNode {n} MemFree:        {free} kB\n\
             Node {n} Active(file):   9 kB\nNode {n} Inactive(file): 100 kB\n"
        );
        fs::write(home.join("meminfo"), text).unwrap();
    }

    fn read(dir: &Path) -> Vec<Reading> {
        let mut out = Vec::new();
        NumaProbe::at(dir).read(Timestamp::from_micros(1), &mut out);
        crate::conformance::check_all(&out).unwrap();
        out
    }

    #[test]
    fn each_memory_node_is_a_part_and_far_memory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        node(dir.path(), 0, 1000, 400, "0-3");
        assert!(read(dir.path()).is_empty(), "one node is the host itself");
        node(dir.path(), 2, 2000, 1900, "");
        node(dir.path(), 3, 0, 0, "4-7");
        let out = read(dir.path());
        let [a, b] = &out[..] else { panic!("{out:?}") };
        assert_eq!(
            (a.device.as_deref(), a.value),
            (Some("numa:0"), Some(0.491))
        );
        assert_eq!((b.device.as_deref(), b.value), (Some("numa:2"), Some(0.0)));
        assert!(a.is_part() && b.source.contains("CXL") && !a.source.contains("CXL"));
        assert_eq!(a.limit, Some(1000.0 * 1024.0));
    }
}
