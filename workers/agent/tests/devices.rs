//! Devices on a node, with a real broker and real children; the devices are simulated.

use crate::common::{Running, World, poll, result};
use fiec_broker::{registry, store};
use fiec_schemas::messages::{ControlRequest, Destination};
use fiec_schemas::package::{Manifest, ProgramRecord};
use fiec_schemas::{Digest, Event, ExecutionId, HardwareVector, Timestamp, subjects};
use futures_util::StreamExt;
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

impl World {
    async fn with_devices(&self, name: &str) -> Running {
        let file = self.folder.path().join("devices.json");
        let device = |id: &str, gib: u64| {
            json!({"id": id, "kind": "gpu", "name": "Simulated", "memory_bytes": gib * GIB,
                "device": {"compute_capability": "9.0", "multiprocessors": 8},
                "used_bytes": gib * GIB / 4})
        };
        let devices = json!([device("GPU-0", 8), device("GPU-1", 4)]);
        std::fs::write(&file, devices.to_string()).unwrap();
        let mut options = self.options(name);
        options.slots = 4;
        options.device_file = Some(file);
        options.profile_cache = Some(self.folder.path().join("machines"));
        options.allow_programs = vec!["grant@1".to_owned()];
        self.agent_with(options).await
    }

    /// A program whose result is what it was granted.
    async fn register_grant(&self) {
        let manifest = br#"{"entry":["./run.sh"],"protocol":"state_dir"}"#;
        let script = "#!/bin/sh\nprintf '%s' \"$FIEC_GRANT\" > \"$FIEC_RESULT\"\n";
        let mut tar = tar::Builder::new(Vec::new());
        for (name, text) in [("fiec.json", &manifest[..]), ("run.sh", script.as_bytes())] {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o755);
            header.set_size(text.len() as u64);
            tar.append_data(&mut header, name, text).unwrap();
        }
        let artifact = tar.into_inner().unwrap();
        let digest = Digest::of(&artifact);
        store::put_data(&self.broker, digest, &artifact)
            .await
            .unwrap();
        let record = ProgramRecord {
            program: "grant@1".to_owned(),
            manifest: Manifest::parse(manifest).unwrap(),
            artifact: digest,
            bytes: artifact.len() as u64,
            pushed_at: Timestamp::now(),
            pushed_by: "test".to_owned(),
        };
        registry::register(&self.broker, &"grant@1".parse().unwrap(), &record)
            .await
            .unwrap();
    }

    async fn submit_to(&self, line: Value, agent: &Running, substrate: &str) -> ExecutionId {
        let to = Destination {
            substrate: substrate.to_owned(),
            ..agent.destination()
        };
        let tip = self.bind(&line.to_string(), &to).await;
        let id = tip.state.execution;
        self.dispatch(&[tip], &agent.node).await;
        id
    }

    async fn refusal(&self, id: ExecutionId) -> String {
        let message = self.wait_phase(id, "pending").await;
        let refused = message.events.iter().find_map(|e| match e {
            Event::Refused { reason, .. } => Some(reason.clone()),
            _ => None,
        });
        refused.unwrap_or_else(|| panic!("not refused: {message:?}"))
    }
}

fn sharing(bytes: u64) -> Value {
    json!({"program": "grant@1", "requires": {"device": {"share_bytes": bytes}}})
}

fn long() -> Value {
    json!({"program": "synthetic@1", "params": {"capsules": 1_000_000, "rest_us": 1_000},
        "requires": {"device": {}}})
}

#[tokio::test]
async fn a_program_is_granted_the_device_of_its_binding_with_its_budget() {
    let world = World::start().await;
    world.register_grant().await;
    let agent = world.with_devices("n1").await;
    let alone = json!({"program": "grant@1", "requires": {"device": {}}});
    for (line, substrate, device) in [
        (
            alone,
            "GPU-1",
            json!({"uuid": "GPU-1", "memory_bytes": 4 * GIB}),
        ),
        (
            sharing(GIB),
            "GPU-0",
            json!({"uuid": "GPU-0", "memory_bytes": GIB}),
        ),
        (json!({"program": "grant@1"}), "host", Value::Null),
    ] {
        let id = world.submit_to(line, &agent, substrate).await;
        let grant = result(&world.wait_phase(id, "completed").await);
        assert_eq!(grant["device"], device, "{grant}");
        assert_eq!(grant["substrate"], substrate);
    }
    agent.leave().await;
}

#[tokio::test]
async fn a_device_that_is_taken_absent_or_too_small_is_refused_and_one_given_up_is_taken_again() {
    let world = World::start().await;
    world.register_grant().await;
    let agent = world.with_devices("n1").await;
    let holder = world.submit_to(long(), &agent, "GPU-0").await;
    world.wait_phase(holder, "started").await;
    for (line, substrate, words) in [
        (long(), "GPU-0", "GPU-0 is taken"),
        (sharing(GIB), "GPU-0", "GPU-0 is taken"),
        (long(), "GPU-9", "no device GPU-9"),
        (sharing(5 * GIB), "GPU-1", "does not fit"),
    ] {
        let id = world.submit_to(line, &agent, substrate).await;
        let reason = world.refusal(id).await;
        assert!(reason.contains(words), "{reason}");
    }
    let cancel = ControlRequest::Cancel {
        execution: holder,
        who: "test".into(),
    };
    // One that comes while the holder is being ended waits for it.
    let next = world.submit_to(sharing(GIB), &agent, "GPU-0").await;
    assert_eq!(
        world.control(&agent.node, &cancel).await.unwrap().error,
        None
    );
    world.wait_phase(next, "completed").await;
    agent.leave().await;
}

#[tokio::test]
async fn a_node_describes_its_devices_and_their_readings_are_their_own() {
    let world = World::start().await;
    let vectors = subjects::telemetry(&"n1".parse().unwrap());
    let mut vectors = world.broker.client.subscribe(vectors).await.unwrap();
    let agent = world.with_devices("n1").await;
    let descriptor = world.descriptor(&agent.node).await.unwrap();
    let ids: Vec<_> = descriptor.substrates.iter().map(|s| &*s.id).collect();
    assert_eq!(ids, ["host", "GPU-0", "GPU-1"]);
    let device = descriptor.substrates[1].device.as_ref().unwrap();
    assert_eq!(device.compute_capability, "9.0".parse().ok());
    assert!(device.missing.is_some(), "copies to it cannot be measured");
    let profile = &descriptor.profile;
    assert!(!profile.contracts.is_empty() && !profile.confinement.is_empty());
    assert!(profile.measured.is_some());
    poll("a vector with both devices", async || {
        let message = vectors.next().await?;
        let vector: HardwareVector = serde_json::from_slice(&message.payload).unwrap();
        let memory = |id: &str| {
            let of = |r: &&fiec_schemas::Reading| {
                r.device.as_deref() == Some(id) && r.signal == fiec_schemas::Signal::Memory
            };
            vector.readings.iter().find(of)?.value
        };
        (memory("GPU-0") == Some(0.25) && memory("GPU-1") == Some(0.25)).then_some(())
    })
    .await;
    agent.leave().await;
}

#[tokio::test]
async fn grants_and_readings_keep_to_the_envelopes_that_were_set_before_the_node_started() {
    let world = World::start().await;
    world.register_grant().await;
    let set = json!({"v": 1, "who": "ada", "at": Timestamp::now(), "envelopes": [
        {"signal": "memory", "shape": {"constant": {"cap": "64MiB"}}},
        {"signal": "memory", "device": "GPU-0", "shape": {"constant": {"cap": "1GiB"}}},
        {"signal": "memory", "device": "*", "shape": {"constant": {"cap": "50%"}}}]});
    let bucket = world
        .broker
        .js
        .get_key_value(subjects::NODES_BUCKET)
        .await
        .unwrap();
    let key = subjects::envelopes_key(&"n1".parse().unwrap());
    bucket.put(&key, set.to_string().into()).await.unwrap();
    let vectors = subjects::telemetry(&"n1".parse().unwrap());
    let mut vectors = world.broker.client.subscribe(vectors).await.unwrap();
    let agent = world.with_devices("n1").await;
    let first = vectors.next().await.unwrap();
    let vector: HardwareVector = serde_json::from_slice(&first.payload).unwrap();
    let memory = |id: &str| {
        let of = |r: &&fiec_schemas::Reading| {
            r.device.as_deref() == Some(id) && r.signal == fiec_schemas::Signal::Memory
        };
        vector.readings.iter().find(of).unwrap().value
    };
    // A quarter of each is in use: two of eight GiB where one is offered, half of the other's half.
    assert_eq!((memory("GPU-0"), memory("GPU-1")), (Some(1.0), Some(0.5)));

    let alone = json!({"program": "grant@1", "requires": {"device": {}}});
    for (line, substrate, device) in [
        (alone.clone(), "GPU-0", Some(GIB)),
        (alone, "GPU-1", Some(2 * GIB)),
        (sharing(3 * GIB), "GPU-1", Some(2 * GIB)),
        (json!({"program": "grant@1"}), "host", None),
    ] {
        let id = world.submit_to(line, &agent, substrate).await;
        let grant = result(&world.wait_phase(id, "completed").await);
        assert_eq!(grant["device"]["memory_bytes"].as_u64(), device, "{grant}");
        // Of 64 MiB for four slots.
        assert_eq!(grant["memory_bytes"], 16 << 20, "{grant}");
    }
    agent.leave().await;
}

#[tokio::test]
async fn joules_of_a_device_are_its_executions_and_absent_where_it_has_no_counter() {
    let world = World::start().await;
    let file = world.folder.path().join("counted.json");
    let counter = |mj: u64| {
        let devices = json!([
            {"id": "GPU-0", "kind": "gpu", "name": "S", "memory_bytes": GIB, "energy_mj": mj},
            {"id": "GPU-1", "kind": "gpu", "name": "S", "memory_bytes": GIB}]);
        // Whole at once: the node reads it when it likes.
        let new = file.with_extension("new");
        std::fs::write(&new, devices.to_string()).unwrap();
        std::fs::rename(&new, &file).unwrap();
    };
    counter(7_000);
    let mut options = world.options("n1");
    options.slots = 2;
    options.device_file = Some(file.clone());
    options.profile_cache = Some(world.folder.path().join("machines"));
    options.sysfs = world.folder.path().join("no-sysfs");
    let agent = world.agent_with(options).await;
    let mut line = long();
    line["commit"] = json!({"every_ms": 50});
    let counted = world.submit_to(line.clone(), &agent, "GPU-0").await;
    let dark = world.submit_to(line, &agent, "GPU-1").await;
    let totals = async |id| world.last(id).await.message.state.totals;
    poll("both have committed", async || {
        let commits = [totals(counted).await.commits, totals(dark).await.commits];
        (commits.iter().all(|n| *n > 1)).then_some(())
    })
    .await;
    counter(9_500);
    let energy = poll("the counter's rise is charged", async || {
        let energy = totals(counted).await.energy?;
        energy.device.filter(|d| d.uj > 0).map(|_| energy)
    })
    .await;
    assert_eq!(energy.device.unwrap().uj, 2_500_000);
    assert_eq!(energy.host, None, "the host has no counter");
    assert_eq!(totals(dark).await.energy, None);
    agent.leave().await;
}
