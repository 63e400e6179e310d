//! Probes against this machine: `/proc/meminfo` read another way, a real cgroup, real processes.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use fiec_probes::{MemoryLimit, MemoryProbe, NodeCgroup, Sampler, SamplerConfig, Wake};
use fiec_schemas::Threshold;
use fiec_schemas::ids::Timestamp;

const MIB: u64 = 1 << 20;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_micros(1_700_000_000_000_000 + ms * 1000)
}

/// This test binary again, playing a part.
struct Part {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Part {
    fn play(part: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "parts", "--nocapture", "--test-threads=1"])
            .env("FIEC_TEST_PART", part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            stdin,
            stdout,
        }
    }

    fn say(&mut self, what: &str) {
        writeln!(self.stdin, "{what}").unwrap();
    }

    /// The rest of the next line that holds `word` (the harness prints others around it).
    fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.stdout.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the part ended without saying {word:?}");
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test by itself: what the processes do that the tests start.
#[test]
fn parts() {
    let Ok(part) = std::env::var("FIEC_TEST_PART") else {
        return;
    };
    let mut lines = std::io::stdin().lines();
    let mut next = || lines.next().and_then(Result::ok).unwrap_or_default();
    match part.as_str() {
        "hog" => {
            let mib: usize = next().parse().unwrap();
            let held = vec![1u8; mib << 20];
            println!(
                "\nholding {}",
                held.iter()
                    .step_by(4096)
                    .map(|b| u64::from(*b))
                    .sum::<u64>()
            );
            next();
        }
        "writer" => loop {
            let line = next();
            let mut words = line.split_whitespace();
            let (Some(path), Some(mib)) = (words.next(), words.next()) else {
                return;
            };
            let mut file = std::fs::File::create(path).unwrap();
            for _ in 0..mib.parse::<usize>().unwrap() {
                file.write_all(&vec![1; 1 << 20]).unwrap();
            }
            if words.next() == Some("synced") {
                file.sync_all().unwrap();
            }
            println!("\nwritten");
        },
        "member" => {
            let own = || std::fs::read_to_string("/proc/self/cgroup").unwrap();
            let before = own();
            let group = NodeCgroup::create(&"member".parse().unwrap(), 64 * MIB).unwrap();
            let path = group.path().to_owned();
            group.enter().unwrap();
            let inside = own();
            assert_ne!(before, inside);
            drop(group);
            assert_eq!(before, own());
            assert!(!path.exists());
            println!("\nleft well");
        }
        "leaver" => {
            let group = NodeCgroup::create(&"leaver".parse().unwrap(), 64 * MIB).unwrap();
            println!("\nleaves behind {}", group.path().display());
            next();
            std::mem::forget(group);
        }
        other => panic!("unknown part {other}"),
    }
}

/// A cgroup of our own, or in words why this machine does not permit it.
fn permitted(node: &str, limit: u64) -> Option<NodeCgroup> {
    match NodeCgroup::create(&node.parse().unwrap(), limit) {
        Ok(group) => Some(group),
        Err(e) => {
            // Past the harness's capture, so that a skip is seen.
            let mut terminal = std::io::stderr().lock();
            let _ = writeln!(
                terminal,
                "SKIPPED: no cgroup of our own on this machine: {e}"
            );
            None
        }
    }
}

#[test]
fn memory_of_the_host_agrees_with_meminfo() {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = |name: &str| -> f64 {
        let line = text
            .lines()
            .find(|l| l.split(':').next() == Some(name))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let expected = 1.0 - kib("MemAvailable") / kib("MemTotal");
    let reading = MemoryProbe::new(&MemoryLimit::Host, None).measure(at(0));
    assert!(
        (reading.value.unwrap() - expected).abs() < 0.03,
        "{reading:?} against {expected}"
    );
    assert_eq!(reading.limit, Some(kib("MemTotal") * 1024.0));
}

#[test]
fn memory_that_a_child_allocates_in_the_nodes_cgroup_shows() {
    let Some(group) = permitted("probe-test", 256 * MIB) else {
        return;
    };
    let mut probe = MemoryProbe::new(&group.limit(), None);
    let empty = probe.measure(at(0));
    let mut hog = Part::play("hog");
    group.join(hog.child.id()).unwrap();
    hog.say("160");
    hog.hear("holding");
    let full = probe.measure(at(50));
    let host = MemoryProbe::new(&MemoryLimit::Host, None).measure(at(50));
    println!("empty {empty:?}\nfull {full:?}");
    assert_eq!(group.limit().bytes().unwrap(), 256 * MIB);
    if host.value < Some(0.6) {
        assert!(
            full.source.starts_with(group.path().to_str().unwrap()),
            "{full:?}"
        );
        let value = full.value.unwrap();
        assert!((value - 160.0 / 256.0).abs() < 0.03, "{full:?}");
        assert_eq!(full.limit, Some(256.0 * MIB as f64));
    } else {
        assert!(
            full.value >= host.value.map(|h| h - 0.05),
            "{full:?} below {host:?}"
        );
    }
    // Somebody is in it: it cannot be removed, and that is said.
    let path = group.path().to_owned();
    assert!(
        group
            .remove()
            .unwrap_err()
            .to_string()
            .contains("may not remove")
    );
    drop(hog);
    std::fs::remove_dir(&path).unwrap();
}

#[test]
fn a_full_page_cache_is_no_pressure_and_a_tmpfs_is() {
    let Some(group) = permitted("probe-test-cache", 256 * MIB) else {
        return;
    };
    let (disk, memory) = (
        tempfile::tempdir().unwrap(),
        tempfile::tempdir_in("/dev/shm"),
    );
    let mut probe = MemoryProbe::new(&group.limit(), None);
    let mut writer = Part::play("writer");
    group.join(writer.child.id()).unwrap();
    let mut write = |path: std::path::PathBuf, mib: u64, how: &str| {
        writer.say(&format!("{} {mib} {how}", path.display()));
        writer.hear("written");
    };
    let usage = || {
        let files = ["memory.usage_in_bytes", "memory.current"].map(|f| group.path().join(f));
        let mut texts = files.iter().filter_map(|f| std::fs::read_to_string(f).ok());
        texts.next().unwrap().trim().parse::<u64>().unwrap()
    };
    write(disk.path().join("cached"), 180, "synced");
    let host = MemoryProbe::new(&MemoryLimit::Host, None).measure(at(0));
    let cached = probe.measure(at(50)).value.unwrap();
    assert!(usage() > 150 * MIB, "the cache was charged elsewhere");
    assert!(
        cached < host.value.unwrap().max(0.1) + 0.1,
        "{cached} of {host:?}"
    );
    let Ok(memory) = memory else {
        let mut terminal = std::io::stderr().lock();
        let _ = writeln!(terminal, "SKIPPED: no tmpfs at /dev/shm on this machine");
        return;
    };
    write(memory.path().join("kept"), 120, "");
    let kept = probe.measure(at(2_000)).value.unwrap();
    assert!(kept > 110.0 / 256.0, "{kept}");
}

#[test]
fn a_threshold_that_is_crossed_wakes_both_ways_and_the_group_need_not_be_looked_at_often() {
    let Some(group) = permitted("probe-test-trigger", 256 * MIB) else {
        return;
    };
    let threshold = Threshold {
        high: 0.5,
        low: 0.3,
        dwell_ms: 0,
    };
    let (told, wakes) = std::sync::mpsc::sync_channel(64);
    let mut sampler = Sampler::new(SamplerConfig {
        memory: group.limit(),
        devices: false,
        wake: Wake::new(move || {
            let _ = told.try_send(());
        }),
        ..SamplerConfig::default()
    });
    sampler.sample(at(0));
    sampler.arm(&[threshold], None);
    if !matches!(group.limit(), MemoryLimit::CgroupV1(_)) {
        let mut terminal = std::io::stderr().lock();
        let _ = writeln!(
            terminal,
            "SKIPPED: only cgroup v1 tells of usage; here memory is polled every {:?}",
            sampler.next_look(&[threshold])
        );
        return;
    }
    let mut hog = Part::play("hog");
    group.join(hog.child.id()).unwrap();
    let value = |sampler: &mut Sampler, ms| sampler.fast(at(ms)).unwrap().value.unwrap();
    assert!(wakes.try_recv().is_err() && value(&mut sampler, 1) < 0.3);
    let soon = std::time::Duration::from_secs(10);
    hog.say("160");
    // 60 MiB on the way up wake for `low`, 130 MiB for `high`.
    for _ in 0..2 {
        wakes.recv_timeout(soon).unwrap();
    }
    hog.hear("holding");
    assert!(value(&mut sampler, 2) >= 0.5);
    // 160 of 256 MiB is near enough to a threshold to look often, were it not for the trigger.
    let host_alone = sampler.next_look(&[threshold]);
    assert!(
        host_alone >= std::time::Duration::from_millis(100),
        "{host_alone:?}"
    );
    drop(hog);
    wakes.recv_timeout(soon).unwrap();
}

#[test]
fn a_process_enters_its_group_and_leaves_it_as_it_was() {
    if permitted("probe-test-enter", 64 * MIB).is_none() {
        return;
    }
    let mut member = Part::play("member");
    member.hear("left well");
    assert!(member.child.wait().unwrap().success());
}

#[test]
fn a_group_that_a_dead_agent_left_behind_is_swept() {
    if permitted("probe-test-sweep", 64 * MIB).is_none() {
        return;
    }
    let mut leaver = Part::play("leaver");
    let left = leaver.hear("leaves behind");
    drop(permitted("probe-test-sweep", 64 * MIB));
    assert!(
        Path::new(&left).exists(),
        "the group of a living agent was swept"
    );
    leaver.say("end");
    assert!(leaver.child.wait().unwrap().success());
    drop(permitted("probe-test-sweep", 64 * MIB));
    assert!(!Path::new(&left).exists());
}

#[test]
fn a_budget_counts_children_and_registered_trees() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("tree")).unwrap();
    let mut agent = Part::play("hog");
    let mut hog = Part::play("hog");
    let limit = MemoryLimit::Declared {
        bytes: 400 * MIB,
        root_pid: agent.child.id(),
    };
    let mut probe = MemoryProbe::new(&limit, Some(dir.path()));
    agent.say("100");
    agent.hear("holding");
    let value = |probe: &mut MemoryProbe, ms| probe.measure(at(ms)).value.unwrap();
    let alone = value(&mut probe, 0);
    assert!((alone - 0.25).abs() < 0.03, "{alone}");
    hog.say("200");
    hog.hear("holding");
    std::fs::write(dir.path().join("tree/hog.pid"), hog.child.id().to_string()).unwrap();
    let both = value(&mut probe, 100);
    assert!((both - 0.75).abs() < 0.03, "{both}");
    hog.say("");
    let mut rest = String::new();
    hog.stdout.read_to_string(&mut rest).unwrap();
    hog.child.wait().unwrap();
    let after = value(&mut probe, 150);
    assert!((after - alone).abs() < 0.01, "{after}");
    drop(agent);
    let gone = probe.measure(at(200));
    assert!(gone.value.is_none() && gone.missing.unwrap().contains("has ended"));
}
