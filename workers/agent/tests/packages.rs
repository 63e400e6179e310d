//! Packages and data on a node, with a real broker: what is fetched, what is checked, what is
//! refused and why.

use std::path::Path;
use std::sync::Arc;

use crate::common::{Running, World, poll, result};
use bytes::Bytes;
use fiec_agent::cache::Cache;
use fiec_agent::containers::Containers;
use fiec_agent::data::Data;
use fiec_agent::packages::{Packages, Program};
use fiec_broker::{registry, store};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::package::{Grant, Manifest, ProgramRecord};
use fiec_schemas::{
    Cause, Digest, Event, ExecutionId, Fault, LedgerMessage, StartError, Timestamp, subjects,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

const LIMIT: u64 = 1 << 20;

fn cache(folder: &Path) -> Arc<Cache> {
    Cache::open(folder, LIMIT, CancellationToken::new()).unwrap()
}

fn manifest() -> Manifest {
    let text = br#"{"entry":["./run.sh"],"protocol":"state_dir"}"#;
    Manifest::parse(text).unwrap()
}

/// A tar of these files; one without a text is a link.
pub fn tar(files: &[(&str, Option<&str>)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        let text = text.unwrap_or_else(|| {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_link_name("/etc/passwd").unwrap();
            ""
        });
        header.set_size(text.len() as u64);
        tar.append_data(&mut header, name, text.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap()
}

/// A package of this Python program, with the kit. It speaks frames.
pub fn of_python(program: &str, limits: serde_json::Value) -> (Manifest, Vec<u8>) {
    let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/fiec");
    let manifest = json!({ "entry": ["python3", "-B", "main.py"], "protocol": "frames",
        "limits": limits });
    let mut files = vec![
        ("fiec.json".to_owned(), manifest.to_string()),
        ("main.py".to_owned(), program.to_owned()),
    ];
    for file in std::fs::read_dir(kit).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|end| end == "py") {
            let name = path.file_name().unwrap().to_str().unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            files.push((format!("fiec/{name}"), text));
        }
    }
    let files: Vec<_> = files.iter().map(|(n, t)| (&**n, Some(&**t))).collect();
    let manifest = Manifest::parse(manifest.to_string().as_bytes()).unwrap();
    (manifest, tar(&files))
}

/// What a Python program needs to speak frames by itself.
const RAW_FRAMES: &str = include_str!("raw_frames.py");

impl World {
    /// Registers `x@1`, a Python program that speaks frames by `raw_frames.py`.
    pub async fn with_raw_frames(&self, script: &str, limits: &serde_json::Value) {
        let manifest = json!({ "entry": ["python3", "-B", "main.py"], "protocol": "frames",
            "outputs": ["*"], "limits": limits });
        let manifest = manifest.to_string();
        let files = [
            ("fiec.json", Some(&*manifest)),
            ("main.py", Some(script)),
            ("raw_frames.py", Some(RAW_FRAMES)),
        ];
        let artifact = tar(&files);
        let manifest = Manifest::parse(manifest.as_bytes()).unwrap();
        self.register_as("x@1", manifest, &artifact).await;
    }

    /// Registers an artifact as it is, whatever is in it.
    async fn register(&self, program: &str, artifact: &[u8]) -> Digest {
        self.register_as(program, manifest(), artifact).await
    }

    pub async fn register_as(&self, program: &str, manifest: Manifest, artifact: &[u8]) -> Digest {
        let digest = Digest::of(artifact);
        store::put_data(&self.broker, digest, artifact)
            .await
            .unwrap();
        let record = ProgramRecord {
            program: program.to_owned(),
            manifest,
            artifact: digest,
            bytes: artifact.len() as u64,
            pushed_at: Timestamp::now(),
            pushed_by: "test".to_owned(),
        };
        let name = program.parse().unwrap();
        registry::register(&self.broker, &name, &record)
            .await
            .unwrap();
        digest
    }

    async fn lose(&self, digest: Digest) {
        let bucket = self.broker.js.get_object_store(subjects::DATA_BUCKET).await;
        bucket.unwrap().delete(digest.to_string()).await.unwrap();
    }
}

fn good() -> Vec<u8> {
    let text = serde_json::to_string(&manifest()).unwrap();
    tar(&[("fiec.json", Some(&text)), ("run.sh", Some("#!/bin/sh\n"))])
}

#[tokio::test]
async fn data_comes_from_the_disk_once_it_is_there_and_a_damaged_copy_is_fetched_again() {
    let world = World::start().await;
    let folder = world.folder.path().join("cache");
    let cache = cache(&folder);
    let data = Data::new(&world.broker, cache.clone());
    let content = vec![5u8; 300_000];
    let digest = Digest::of(&content);
    let unknown = data.get(digest, 0).await.unwrap_err();
    assert!(
        unknown.is_permanent() && unknown.reason().contains("data push"),
        "{unknown:?}"
    );

    store::put_data(&world.broker, digest, &content)
        .await
        .unwrap();
    let other = data.get(digest, 7).await.unwrap_err();
    assert!(
        other.is_permanent() && other.reason().contains("300000"),
        "{other:?}"
    );
    assert_eq!(data.get(digest, 300_000).await.unwrap(), content);
    let copy = folder.join("data").join(digest.to_string());
    std::fs::write(&copy, b"rotten").unwrap();
    assert_eq!(data.get(digest, 0).await.unwrap(), content);
    assert_eq!(std::fs::read(&copy).unwrap(), content);
    world.lose(digest).await;
    assert_eq!(data.get(digest, 0).await.unwrap(), content);

    // What was made here needs no store either.
    let made = Bytes::from_static(b"an output");
    data.keep(Digest::of(&made), &made).await;
    assert_eq!(data.get(Digest::of(&made), 9).await.unwrap(), made);

    // More than the cache may hold comes all the same, past it.
    let large = vec![6u8; LIMIT as usize + 1];
    let digest = Digest::of(&large);
    store::put_data(&world.broker, digest, &large)
        .await
        .unwrap();
    assert_eq!(data.get(digest, 0).await.unwrap(), large);
    assert!(cache.bytes() <= LIMIT);
}

#[tokio::test]
async fn a_package_is_fetched_once_and_a_bad_one_is_refused_and_leaves_nothing() {
    let world = World::start().await;
    let folder = world.folder.path().join("cache");
    let cache = cache(&folder);
    let packages = Packages::new(
        &world.broker,
        cache.clone(),
        vec!["x*@1".to_owned()],
        Containers::default(),
    );
    assert!(matches!(
        packages.find("cg@1").await.unwrap(),
        Program::BuiltIn
    ));
    let reason = async |program: &str| packages.find(program).await.unwrap_err().to_string();
    assert!(reason("y@1").await.contains("not allowed"));
    assert!(reason("x@1").await.contains("fiec program push x@1"));

    let text = serde_json::to_string(&manifest()).unwrap();
    let link = tar(&[("fiec.json", Some(&text)), ("run.sh", None)]);
    world.register("xlink@1", &link).await;
    assert!(reason("xlink@1").await.contains("not a regular file"));
    let other = text.replace("state_dir", "json_lines");
    let changed = tar(&[("fiec.json", Some(&other)), ("run.sh", Some("#!/bin/sh\n"))]);
    world.register("xchanged@1", &changed).await;
    assert!(
        reason("xchanged@1")
            .await
            .contains("not the registered one")
    );
    let long = format!("{text}{}", " ".repeat(300 * 1024));
    world
        .register("xlong@1", &tar(&[("fiec.json", Some(&long))]))
        .await;
    assert!(reason("xlong@1").await.contains("262144 bytes"));
    world.register("xnoise@1", b"no tar at all").await;
    assert!(reason("xnoise@1").await.contains("cannot be used"));
    let gone = world
        .register("xgone@1", &tar(&[("a", Some("gone"))]))
        .await;
    world.lose(gone).await;
    assert!(reason("xgone@1").await.contains("is not there"));
    assert_eq!(cache.bytes(), 0);
    let mut left = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let inside = std::fs::read_dir(entry.unwrap().path()).unwrap();
        left.extend(inside.map(|entry| entry.unwrap().path()));
    }
    assert!(left.is_empty(), "{left:?}");

    let digest = world.register("x@1", &good()).await;
    let (a, b) = tokio::join!(packages.find("x@1"), packages.find("x@1"));
    for found in [a.unwrap(), b.unwrap()] {
        let package = found.package().unwrap();
        let expected = folder.join("programs").join(digest.to_string());
        assert_eq!(package.told.folder, expected);
        assert_eq!(package.manifest(), &manifest());
    }
    // From now on neither the registry nor the store is asked.
    world.lose(digest).await;
    packages.find("x@1").await.unwrap();
}

#[tokio::test]
async fn a_destination_that_is_told_to_prepare_fetches_the_package_and_the_objects_ahead() {
    let world = World::start().await;
    let from = world.agent("from").await;
    let mut options = world.options("to");
    options.allow_programs = vec!["*".to_owned()];
    let cache = options.run_dir.join("cache");
    let to = world.agent_with(options).await;
    let digest = world.register("x@1", &good()).await;
    let object = Digest::of(b"input");
    store::put_data(&world.broker, object, b"input")
        .await
        .unwrap();
    let line = json!({"program": "x@1", "params": {"matrix": {"object": object}}});
    let tip = world.bind(&line.to_string(), &from.destination()).await;
    let request = ControlRequest::Prepare {
        execution: tip.state.execution,
        tenant: world.tenant.clone(),
        program: "x@1".to_owned(),
        state_bytes: 0,
        substrate: None,
    };
    let reply = world.control(&to.node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    for path in [
        cache.join("programs").join(digest.to_string()),
        cache.join("data").join(object.to_string()),
    ] {
        let what = format!("{} is there", path.display());
        poll(&what, async || path.exists().then_some(())).await;
    }

    // The node that does not allow it gives it back.
    world.dispatch(std::slice::from_ref(&tip), &from.node).await;
    let id: ExecutionId = tip.state.execution;
    let last = world.wait_phase(id, "pending").await;
    let reason = serde_json::to_string(&last.events).unwrap();
    assert!(
        reason.contains("refused") && reason.contains("not allowed"),
        "{reason}"
    );
    from.leave().await;
    to.leave().await;
    assert!(
        cache.join("programs").exists(),
        "it is kept for the next life"
    );
}

/// A world with a node that runs every package.
pub async fn of_any_program() -> (World, Running) {
    let world = World::start().await;
    let mut options = world.options("n1");
    options.allow_programs = vec!["*".to_owned()];
    let agent = world.agent_with(options).await;
    (world, agent)
}

/// A package that speaks frames, with this entry and this text of its file `run.sh`, if it has one.
async fn submitted(
    world: &World,
    agent: &Running,
    entry: &str,
    script: Option<&str>,
) -> ExecutionId {
    let text = json!({"entry": [entry], "protocol": "frames"}).to_string();
    let script = script.map(|text| ("run.sh", Some(text)));
    let files: Vec<_> = [("fiec.json", Some(&*text))]
        .into_iter()
        .chain(script)
        .collect();
    let manifest = Manifest::parse(text.as_bytes()).unwrap();
    let program = format!("{}@1", Digest::of(tar(&files).as_slice()).short());
    let program = format!("x{program}");
    world.register_as(&program, manifest, &tar(&files)).await;
    let line = json!({"program": program, "retries": 0});
    world.submit(&line.to_string(), agent).await
}

#[tokio::test]
async fn a_program_that_a_node_cannot_start_is_given_back_and_no_attempt_is_spent() {
    let (world, agent) = of_any_program().await;
    for (entry, script, command) in [
        ("no-such-interpreter", None, "no-such-interpreter"),
        ("./run.sh", Some("#!/no/such/interpreter\n"), "run.sh"),
        (
            "./run.sh",
            Some("#!/usr/bin/env no-such-interpreter\n"),
            "run.sh",
        ),
    ] {
        let id = submitted(&world, &agent, entry, script).await;
        let last = world.wait_phase(id, "pending").await;
        let totals = last.state.totals;
        assert_eq!((totals.crashes, totals.node_faults), (0, 1), "{last:?}");
        let fault = last.events.iter().find_map(|event| match event {
            Event::Refused { fault, .. } => fault.clone(),
            Event::Yielded {
                cause: Cause::NotTaken { fault, .. },
                ..
            } => fault.clone(),
            _ => None,
        });
        let Some(Fault::CannotStart {
            command: named,
            error,
        }) = fault.as_deref()
        else {
            panic!("{last:?}")
        };
        assert!(named.contains(command), "{named}");
        assert_eq!(*error, StartError::NotFound);
    }
    agent.leave().await;
}

#[tokio::test]
async fn a_package_without_the_file_of_its_entry_fails_at_once() {
    let (world, agent) = of_any_program().await;
    let id = submitted(&world, &agent, "./run.sh", None).await;
    let last = world.wait_phase(id, "failed").await;
    assert_eq!(last.state.totals.crashes, 0);
    let Some(Event::Failed { reason, fault, .. }) = last.events.last() else {
        panic!("{last:?}")
    };
    assert!(reason.contains("run.sh"), "{reason}");
    assert_eq!(fault.as_deref(), Some(&Fault::BrokenPackage));
    agent.leave().await;
}

#[tokio::test]
async fn a_program_of_frames_that_ends_before_it_is_ready_has_crashed_and_its_budget_ends_it() {
    let (world, agent) = of_any_program().await;
    let starts = world.folder.path().join("starts");
    let script = format!(
        "#!/bin/sh\necho start >> {}\necho no module fiec >&2\nexit 1\n",
        starts.display()
    );
    let text = r#"{"entry":["./run.sh"],"protocol":"frames"}"#;
    let artifact = tar(&[("fiec.json", Some(text)), ("run.sh", Some(&script))]);
    let manifest = Manifest::parse(text.as_bytes()).unwrap();
    world.register_as("x@1", manifest, &artifact).await;
    let line = json!({"program": "x@1", "retries": 1});
    let id = world.submit(&line.to_string(), &agent).await;
    let last = world.wait_phase(id, "failed").await;
    assert_eq!(last.state.totals.crashes, 2);
    let Some(Event::Failed { reason, stderr, .. }) = last.events.last() else {
        panic!("{last:?}")
    };
    assert!(
        reason.contains("crashed 2 times") && reason.contains("exit status 1"),
        "{reason}"
    );
    assert!(stderr.contains("no module fiec"), "{stderr}");
    assert!(reason.ends_with("; it said: no module fiec"), "{reason}");
    // A process may die of what it did before, so the first of an attempt is spared.
    let starts = std::fs::read_to_string(&starts).unwrap().lines().count();
    assert!((2..=4).contains(&starts), "{starts} starts");
    agent.leave().await;
}

/// Counts to 24, and crashes once after each second boundary. After boundary 4 it crashes each time
/// if it is to stay there.
fn stumbling(marks: &Path, stays: bool) -> String {
    let once = format!("mkdir {}/$n 2>/dev/null", marks.display());
    let again = if stays { "[ $n -eq 4 ] || " } else { "" };
    format!(
        "#!/bin/sh
n=$(cat \"$FIEC_STATE_DIR/n\" 2>/dev/null || echo 0)
if [ $n -gt 0 ] && [ $((n % 2)) -eq 0 ] && {{ {again}{once}; }}; then exit 1; fi
n=$((n + 1))
echo $n > \"$FIEC_STATE_DIR/n\"
[ $n -lt 24 ] && exit 85
echo \"{{\\\"n\\\": $n}}\" > \"$FIEC_RESULT\"
"
    )
}

#[tokio::test]
async fn crashes_with_a_commit_between_them_do_not_add_up() {
    let (world, agent) = of_any_program().await;
    let text = r#"{"entry":["./run.sh"],"protocol":"state_dir"}"#;
    let manifest = Manifest::parse(text.as_bytes()).unwrap();
    let mut ids = Vec::new();
    for (program, stays) in [("goes@1", false), ("stays@1", true)] {
        let marks = world.folder.path().join(program);
        std::fs::create_dir(&marks).unwrap();
        let script = stumbling(&marks, stays);
        let artifact = tar(&[("fiec.json", Some(text)), ("run.sh", Some(&script))]);
        world
            .register_as(program, manifest.clone(), &artifact)
            .await;
        let line = json!({"program": program, "retries": 3, "commit": {"every": 1}});
        ids.push(world.submit(&line.to_string(), &agent).await);
    }
    let ended = |m: &LedgerMessage| m.state.phase.is_terminal();
    let last = world.wait(ids[0], "its end", ended).await;
    let totals = last.state.totals;
    assert_eq!(
        (last.state.phase.as_str(), totals.crashes),
        ("completed", 11)
    );

    let last = world.wait_phase(ids[1], "failed").await;
    assert_eq!(
        (last.state.boundary_index(), last.state.totals.crashes),
        (4, 5)
    );
    let Some(Event::Failed { reason, .. }) = last.events.last() else {
        panic!("{last:?}")
    };
    assert!(reason.contains("crashed 4 times"), "{reason}");
    agent.leave().await;
}

/// Runs until it is confined to one processor, and says to which.
const CONFINED: &str = "#!/bin/sh
list=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
echo \"$list\" > \"$FIEC_STATE_DIR/list\"
case $list in *[,-]*) sleep 0.05; exit 85;; esac
echo \"{\\\"list\\\": \\\"$list\\\"}\" > \"$FIEC_RESULT\"
";

#[tokio::test]
async fn a_program_is_confined_to_the_processors_of_its_grant_and_the_next_is_not() {
    let own = fiec_agent::affinity::own().unwrap();
    let (Some(last), true) = (own.last(), own.len() > 1) else {
        panic!("this needs two processors, and there are {own:?}");
    };
    let (world, agent) = of_any_program().await;
    let text = r#"{"entry":["./run.sh"],"protocol":"state_dir"}"#;
    let artifact = tar(&[("fiec.json", Some(text)), ("run.sh", Some(CONFINED))]);
    let manifest = Manifest::parse(text.as_bytes()).unwrap();
    world.register_as("x@1", manifest, &artifact).await;
    let line = json!({"program": "x@1", "commit": {"every": 1}}).to_string();
    for _ in 0..2 {
        // The second time the same child serves it, and begins with all processors again.
        let id = world.submit(&line, &agent).await;
        let committed = world
            .wait(id, "three commits", |m| m.state.boundary_index() >= 3)
            .await;
        let request = ControlRequest::Reconfigure {
            execution: id,
            epoch: committed.state.epoch,
            grant: Grant {
                cpus: vec![*last],
                ..Grant::default()
            },
            who: "ann".to_owned(),
        };
        let reply = world.control(&agent.node, &request).await.unwrap();
        assert_eq!(reply.error, None);
        let done = world.wait_phase(id, "completed").await;
        assert_eq!(result(&done)["list"], last.to_string());
    }
    agent.leave().await;
}

fn packages(world: &World, folder: &Path) -> Packages {
    let allowed = vec!["x*@1".to_owned()];
    Packages::new(&world.broker, cache(folder), allowed, Containers::default())
}

/// Changes a file of an unpacked package, which is read-only.
fn change(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(file, "#!/bin/sh\nexit 1\n").unwrap();
}

/// Says how many lines its own file has, and adds one.
const GROWS: &str = "#!/bin/sh
echo \"{\\\"lines\\\": $(wc -l < \"$0\")}\" > \"$FIEC_RESULT\"
chmod u+w \"$0\"
echo '# again' >> \"$0\"
";

#[tokio::test]
async fn a_changed_package_is_fetched_again() {
    let (world, mut agent) = of_any_program().await;
    let text = r#"{"entry":["./run.sh"],"protocol":"state_dir"}"#;
    let artifact = tar(&[("fiec.json", Some(text)), ("run.sh", Some(GROWS))]);
    let digest = world.register("x@1", &artifact).await;
    for life in 0..2 {
        for _ in 0..2 {
            let id = world.submit(r#"{"program":"x@1"}"#, &agent).await;
            let done = world.wait_phase(id, "completed").await;
            assert_eq!(result(&done)["lines"], 4);
        }
        if life == 0 {
            agent.leave().await;
            let mut options = world.options("n1");
            options.allow_programs = vec!["*".to_owned()];
            agent = world.agent_with(options).await;
        }
    }
    agent.leave().await;

    // A program that runs keeps its folder, and the file of its neighbour comes back there.
    let packages = packages(&world, &world.folder.path().join("cache"));
    let running = packages.find("x@1").await.unwrap();
    let script = running.package().unwrap().told.folder.join("run.sh");
    for _ in 0..2 {
        change(&script);
        let (a, b) = tokio::join!(packages.find("x@1"), packages.find("x@1"));
        for found in [a.unwrap(), b.unwrap()] {
            assert_eq!(found.package().unwrap().told.folder.join("run.sh"), script);
        }
        assert_eq!(std::fs::read_to_string(&script).unwrap(), GROWS);
    }
    // Without the artifact it is not run.
    world.lose(digest).await;
    packages.find("x@1").await.unwrap();
    change(&script);
    let refused = packages.find("x@1").await.unwrap_err().to_string();
    assert!(refused.contains("cannot be fetched"), "{refused}");
}

#[tokio::test]
async fn another_artifact_under_a_known_version_is_refused() {
    let world = World::start().await;
    let folder = world.folder.path().join("cache");
    let first = world.register("x@1", &good()).await;
    packages(&world, &folder).find("x@1").await.unwrap();

    // Any client of the broker may write over a record.
    let bucket = registry::bucket(&world.broker).await.unwrap();
    let overwrite = async |record: &ProgramRecord| {
        let record = serde_json::to_vec(record).unwrap();
        bucket.put("x.1", record.into()).await.unwrap();
    };
    let name = "x@1".parse().unwrap();
    let found = registry::find(&world.broker, &name).await.unwrap().unwrap();
    let text = serde_json::to_string(&manifest()).unwrap();
    let other = tar(&[
        ("fiec.json", Some(&text)),
        ("run.sh", Some("#!/bin/sh\nexit\n")),
    ]);
    let second = world.register("x-other@1", &other).await;
    overwrite(&ProgramRecord {
        artifact: second,
        bytes: other.len() as u64,
        ..found.clone()
    })
    .await;
    // The worker starts again, and its cache has lost the artifact.
    std::fs::remove_dir_all(folder.join("programs")).unwrap();
    let next = packages(&world, &folder);
    let refused = next.find("x@1").await.unwrap_err().to_string();
    let file = folder.join("versions/x@1").display().to_string();
    for part in [
        first.to_string(),
        second.to_string(),
        "under a new version".to_owned(),
        format!("remove {file}"),
    ] {
        assert!(refused.contains(&part), "{refused}");
    }
    next.find("x-other@1").await.unwrap();

    // The same artifact with another manifest is no better.
    let manifest = Manifest::parse(br#"{"entry":["sh"],"protocol":"state_dir"}"#).unwrap();
    overwrite(&found).await;
    packages(&world, &folder).find("x@1").await.unwrap();
    overwrite(&ProgramRecord { manifest, ..found }).await;
    let next = packages(&world, &folder);
    let refused = next.find("x@1").await.unwrap_err().to_string();
    assert!(refused.contains("not the registered one"), "{refused}");
}
