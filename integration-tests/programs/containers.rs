//! FIEC in containers of its own images: what the images are, services that do their work in them,
//! and a worker whose execution leaves it because something else in its container takes the memory.

use std::io::Write as _;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use super::container::{Container, Images, LAB, left, root};
use crate::stage;
use crate::stage::{
    Lab, audit, digest_of, proc, undisturbed, until, workers, workers_with_history,
};
use fiec_schemas::messages::Viability;
use fiec_schemas::substrate::Confinement;
use fiec_schemas::{Cause, Event, NodeId, Signal};
use serde_json::{Value, json};

/// Most bytes of an image.
const SMALL: u64 = 120_000_000;
const LIMIT_MIB: u64 = 256;
const HIGH: f64 = 0.80;
const LOW: f64 = 0.60;

/// The images, or a word on stderr that this test was skipped, and why.
async fn images() -> Option<Arc<Images>> {
    match tokio::task::spawn_blocking(Images::get).await.unwrap() {
        Ok(images) => Some(images),
        Err(reason) => {
            // Past the capture of a test's output: nobody shall take a skip for a pass.
            let text = format!("SKIPPED: a test of FIEC's images: {reason}\n");
            std::io::stderr().write_all(text.as_bytes()).unwrap();
            None
        }
    }
}

/// A loopback address that is free now.
fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Flags of `run` for an environment that points at the cluster of a test.
fn environment(lab: &Lab, command: &str, http: &str) -> Vec<String> {
    let own = [("FIEC_HTTP".to_owned(), http.to_owned())];
    let all = lab.environment(command).into_iter().chain(own);
    all.flat_map(|(name, value)| ["--env".to_owned(), format!("{name}={value}")])
        .collect()
}

fn worker(lab: &Lab, images: &Arc<Images>, node: &str) -> Container {
    let mut flags = environment(lab, "worker", &free_address());
    let limit = format!("{LIMIT_MIB}m");
    let inputs = root().join("examples/data");
    let inputs = format!(
        "type=bind,src={},dst=/fiec/inputs,readonly",
        inputs.display()
    );
    flags.extend(
        [
            ["--memory", &limit],
            ["--memory-swap", &limit],
            ["--mount", &inputs],
            ["--tmpfs", "/fiec/run:rw,mode=1777"],
            ["--tmpfs", "/fiec/cache:rw,exec,mode=1777"],
        ]
        .concat()
        .into_iter()
        .map(str::to_owned),
    );
    let threshold = format!("memory={HIGH}:{LOW}:700");
    let mut words = vec!["--node", node, "--threshold", &threshold];
    // A busy machine delays and stalls all containers; this is about the memory of one.
    for never in ["latency=1.0:0.5:600000", "memory_stall=1.0:0.5:600000"] {
        words.extend(["--threshold", never]);
    }
    let log = lab.data_dir().join("logs").join(format!("{node}.log"));
    Container::run(images, &images.worker, &flags, &words, log)
}

async fn viable(lab: &Lab, node: &NodeId) {
    until(&format!("{node} is viable"), async || {
        let status = lab.status_of(node).await.ok()?;
        (status.viability == Viability::Viable).then_some(())
    })
    .await;
}

/// A field of what the kernel says of a process.
fn field(pid: u32, file: &str, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let found = text.lines().find_map(|line| line.strip_prefix(name));
    found
        .unwrap_or_else(|| panic!("{name}: {text}"))
        .trim()
        .to_owned()
}

#[tokio::test]
async fn a_worker_in_its_image_is_small_walled_in_and_asked_for_its_health() {
    let Some(images) = images().await else { return };
    for image in [&images.worker, &images.services] {
        let size: u64 = images.inspect(image, "{{.Size}}").parse().unwrap();
        assert!(size < SMALL, "{image} has {size} bytes");
        let user = images.inspect(image, "{{.Config.User}}");
        let (uid, gid) = user.split_once(':').unwrap();
        let number = |text: &str| text.parse::<u32>().unwrap();
        assert!(number(uid) > 0 && number(gid) > 0, "{image} runs as {user}");
    }

    let lab = Lab::start(workers(0)).await;
    let container = worker(&lab, &images, "box");
    let node: NodeId = "box".parse().unwrap();
    viable(&lab, &node).await;
    let pid = container.pid().unwrap();
    assert!(
        !field(pid, "status", "Uid:")
            .split('\t')
            .any(|uid| uid == "0")
    );
    assert_eq!(field(pid, "status", "CapEff:"), "0000000000000000");
    assert_eq!(field(pid, "status", "NoNewPrivs:"), "1");
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let on_root = mounts
        .lines()
        .find(|line| line.split(' ').nth(4) == Some("/"));
    let options = on_root.unwrap().split(' ').nth(5).unwrap();
    assert!(options.split(',').any(|option| option == "ro"), "{options}");
    assert!(
        container.exec(&["/bin/sh", "-c", ":"]).is_err(),
        "it has a shell"
    );

    until("the container is healthy", async || {
        container.is_healthy().then_some(())
    })
    .await;
    assert_eq!(container.exec(&["/usr/bin/fiec", "health"]).unwrap(), "ok");
    let nobody = ["/usr/bin/fiec", "health", "--http", &free_address()];
    assert!(container.exec(&nobody).is_err());

    // What it says of itself.
    let descriptor = lab.status_of(&node).await.unwrap().descriptor;
    assert_eq!(descriptor.memory_limit_bytes, LIMIT_MIB << 20);
    let source = &descriptor.memory_limit_source;
    assert!(source.starts_with("cgroup v"), "{source}");
    let confinement = &descriptor.profile.confinement;
    assert_eq!(confinement, &[Confinement::Container]);

    // SIGTERM to the engine's command ends it in order, and nothing is left.
    let mut container = container;
    assert!(container.process.stop(Duration::from_secs(30)).await);
    let log = container.process.tail(40);
    assert!(log.contains("worker has left"), "{log}");
    let name = container.name.clone();
    drop(container);
    assert!(!left(&images.engine).contains(&name));
    lab.end().await;
}

#[tokio::test]
async fn the_services_do_their_work_in_their_image() {
    let Some(images) = images().await else { return };
    let mut lab = Lab::start(workers_with_history(1)).await;
    // Only those in containers are left to do it.
    lab.policies.clear();
    lab.recorder = None;
    let services: Vec<Container> = ["policy", "recorder"]
        .iter()
        .map(|service| {
            let flags = environment(&lab, service, &free_address());
            let log = lab
                .data_dir()
                .join("logs")
                .join(format!("{service}-box.log"));
            Container::run(&images, &images.services, &flags, &[service], log)
        })
        .collect();
    for service in &services {
        let what = format!("{} is healthy", service.name);
        until(&what, async || service.is_healthy().then_some(())).await;
    }
    let params = json!({"capsules": 20, "state_bytes": 100});
    let id = lab.publish("boxed", "synthetic@1", &params).await;
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed("synthetic@1", &params).await);
    lab.recorded(1).await;
    lab.end().await;
}

/// Some ten seconds of work on a machine that nobody else uses: a container's process takes two to
/// start, and the dwell comes after it.
fn load() -> Value {
    json!({"matrix": {"file": "bcsstk16.mtx"}, "tolerance": 1e-10,
        "iterations_per_capsule": 10, "load_cases": 160})
}

#[tokio::test]
async fn a_hog_beside_a_worker_moves_its_execution_to_another_container() {
    let Some(images) = images().await else { return };
    let reference = tokio::spawn(async {
        let mut params = load();
        params["matrix"]["file"] = json!(root().join("examples/data/bcsstk16.mtx"));
        undisturbed("cg@1", &params).await
    });
    let lab = Lab::start(workers(0)).await;
    let nodes: [NodeId; 2] = ["box-a", "box-b"].map(|name| name.parse().unwrap());
    let containers = [
        worker(&lab, &images, "box-a"),
        worker(&lab, &images, "box-b"),
    ];
    for node in &nodes {
        viable(&lab, node).await;
    }
    let id = lab
        .publish_json(&json!({"id": "dam", "program": "cg@1", "params": load(),
            "commit": {"every_ms": 200}, "requires": {"nodes": nodes}}))
        .await;
    let source = lab.journal.computing(id, 2).await;
    let place = nodes.iter().position(|node| *node == source).unwrap();
    let (pid, other) = (containers[place].pid().unwrap(), &nodes[1 - place]);

    // A process of nobody's making in the worker's container: it allocates for real.
    let mut hog = hog_in(&lab, &images, &containers[place]);
    let (to, evidence) = lab
        .journal
        .find(id, "it is bound elsewhere because of pressure", |line| {
            line.message.events.iter().find_map(|event| match event {
                Event::Bound {
                    node,
                    cause: Cause::Pressure { evidence },
                    ..
                } => Some((node.clone(), (**evidence).clone())),
                _ => None,
            })
        })
        .await;
    assert_eq!(&to, other);
    assert_eq!((&evidence.node, evidence.signal), (&source, Signal::Memory));
    assert!((HIGH..=0.97).contains(&evidence.value), "{evidence:?}");
    let read = |r: &&fiec_schemas::Reading| r.signal == Signal::Memory && r.device.is_none();
    let memory = evidence.vector.iter().find(read).unwrap();
    assert_eq!(memory.limit, Some((LIMIT_MIB << 20) as f64), "{memory:?}");
    assert!(memory.source.contains("cgroup"), "{memory:?}");

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), reference.await.unwrap());
    assert_eq!(last.state().totals.pressure, 1);
    audit(&lab.journal.of(id));
    // The worker that was left lives: nothing was ended for want of memory.
    assert!(proc::is_alive(pid));
    hog.kill();
    let names = containers.each_ref().map(|c| c.name.clone());
    drop(containers);
    let left = left(&images.engine);
    assert!(!names.iter().any(|name| left.contains(name)), "{left:?}");
    lab.end().await;
}

/// `fiec-lab pressure` inside a container, up to 88 % of its limit; it ends with the container.
fn hog_in(lab: &Lab, images: &Images, container: &Container) -> fiec_lab::process::Process {
    let words = ["exec", &container.name, LAB, "pressure"];
    let more = ["--share", "0.88", "--hold", "120"];
    let all: Vec<String> = [&words[..], &more]
        .concat()
        .iter()
        .map(|w| (*w).to_owned())
        .collect();
    let log = lab.data_dir().join("logs").join("hog.log");
    fiec_lab::process::Process::start("hog", &images.engine.program, &all, &[], log).unwrap()
}

#[tokio::test]
async fn a_test_that_fails_leaves_no_container() {
    let Some(images) = images().await else { return };
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let (sender, receiver) = std::sync::mpsc::channel();
    let held = Arc::clone(&images);
    let failed = tokio::task::spawn_blocking(move || {
        let flags = ["--memory", "128m", "--entrypoint", LAB].map(str::to_owned);
        let words = ["pressure", "--share", "0.2", "--hold", "600"];
        let container = Container::run(&held, &held.services, &flags, &words, log);
        let until = std::time::Instant::now() + stage::PATIENCE;
        while container.pid().is_none() {
            assert!(
                std::time::Instant::now() < until,
                "{}",
                container.process.tail(9)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let name = container.name.clone();
        sender.send((name, container.pid().unwrap())).unwrap();
        panic!("as a test that fails");
    });
    let failed = failed.await;
    let (name, pid) = receiver.try_recv().expect("the container ran");
    assert!(failed.unwrap_err().is_panic());
    assert!(!left(&images.engine).contains(&name));
    assert!(!proc::is_alive(pid));
}
