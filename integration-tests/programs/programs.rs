//! Programs that were pushed: from the push to an output that is fetched, moved in between; and
//! every way in which one is refused, with its reason.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::stage;
use crate::stage::{Lab, Line, args, audit, until, workers};
use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::package::{ProgramName, ProgramRecord};
use fiec_schemas::{Digest, Event, ExecutionId, subjects};
use serde_json::{Value, json};

/// Adds up squares, one a capsule: any executable can be a program.
const SQUARES: &str = r#"#!/bin/sh
set -eu
steps=$(sed -n 's/.*"steps": *\([0-9]*\).*/\1/p' "$FIEC_PARAMS")
count=0; sum=0
if [ -f "$FIEC_STATE_DIR/sum" ]; then read -r count sum < "$FIEC_STATE_DIR/sum"; fi
count=$((count + 1)); sum=$((sum + count * count))
sleep 0.02
echo "$count $sum" > "$FIEC_STATE_DIR/sum"
if [ "$count" -lt "$steps" ]; then exit 85; fi
i=0
while [ "$i" -lt 2000 ]; do i=$((i + 1)); echo "$i $((i * sum))"; done > "$FIEC_OUTPUTS/table"
printf '{"sum": %s}' "$sum" > "$FIEC_RESULT"
"#;

/// Makes an output at each boundary.
const PARTS: &str = r#"#!/bin/sh
set -eu
count=0
if [ -f "$FIEC_STATE_DIR/count" ]; then read -r count < "$FIEC_STATE_DIR/count"; fi
count=$((count + 1))
echo "$count" > "$FIEC_STATE_DIR/count"
echo "part $count" > "$FIEC_OUTPUTS/part-$count"
if [ "$count" -lt 80 ]; then exit 85; fi
"#;

/// Speaks frames with nothing but a standard library.
const FRAMES: &str = r#"
import datetime, json, os, select, socket, struct, sys, time

agent = socket.socket(fileno=int(os.environ["FIEC_SOCKET_FD"]))

def take(n):
    data = b""
    while len(data) < n:
        more = agent.recv(n - len(data))
        if not more:
            sys.exit(0)
        data += more
    return data

def hear():
    head, body = struct.unpack("<IQ", take(12))
    return json.loads(take(head)), take(body)

def say(head, body=b""):
    text = json.dumps(head).encode()
    agent.sendall(struct.pack("<IQ", len(text), len(body)) + text + body)

def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")

def run(order, state):
    params, began, count = order["params"], now(), int(state or b"0")
    say({"is": "began", "at": began})
    if params.get("silent"):
        time.sleep(600)
    while count < params["steps"]:
        time.sleep(0.01)
        count += 1
        stop = False
        while select.select([agent], [], [], 0)[0]:
            stop |= hear()[0]["is"] in ("yield", "cancel")
        state = str(count).encode() + b" " * params.get("padding", 0)
        if stop or count % 10 == 0:
            say({"is": "boundary", "index": count, "bytes": len(state), "computed_at": now(),
                 "compute_us": 10000, "reason": "yield" if stop else "commit",
                 # A digest that is wrong is not believed.
                 "digest": "00" * 32}, state)
        if stop:
            return
    result = {"count": count, "pid": os.getpid(), "folder": os.getcwd(),
              "threads": order["grant"]["threads"],
              "knows": sorted(k for k in os.environ if "NATS" in k or "DATABASE" in k)}
    if "object" in params:
        say({"is": "fetch", "digest": params["object"]["object"]})
        head, body = hear()
        while head["is"] != "data":
            head, body = hear()
        result["object"] = head.get("error") or len(body)
    name = params.get("output", "answer")
    body = json.dumps(count).encode()
    say({"is": "completed", "result": result, "capsules": count, "computing_since": began,
         "computed_until": now(), "outputs": [{"name": name, "bytes": len(body)}]}, body)

say({"is": "ready"})
while True:
    order, body = hear()
    if order["is"] == "prepare":
        say({"is": "prepared"})
    elif order["is"] == "run":
        run(order, body)
"#;

fn allowing(count: u32, pattern: &str) -> ClusterOptions {
    let mut options = workers(count);
    options
        .worker_args
        .extend(args(&["--allow-program", pattern]));
    options
}

/// A package's folder: a manifest and files, the scripts among them executable.
fn package(lab: &Lab, name: &str, manifest: &Value, files: &[(&str, &str)]) -> PathBuf {
    let folder = lab.path(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    for (file, text) in files {
        let path = folder.join(file);
        std::fs::write(&path, text).unwrap();
        if text.starts_with("#!") {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        }
    }
    folder
}

fn squares(lab: &Lab, name: &str) -> PathBuf {
    let manifest = json!({"entry": ["./squares.sh"], "protocol": "state_dir",
        "outputs": ["table"]});
    package(lab, name, &manifest, &[("squares.sh", SQUARES)])
}

fn frames(lab: &Lab, limits: &Value) -> PathBuf {
    let manifest = json!({"entry": ["python3", "-u", "main.py"], "protocol": "frames",
        "outputs": ["answer"], "limits": limits});
    package(lab, "frames", &manifest, &[("main.py", FRAMES)])
}

async fn push(lab: &Lab, program: &str, folder: &Path) -> Value {
    let folder = folder.display().to_string();
    let pushed = lab
        .fiec(&["program", "push", program, &folder, "--json"])
        .await
        .expect(0);
    pushed.json_lines().remove(0)
}

async fn submit(lab: &Lab, body: &Value) -> ExecutionId {
    let client = body["id"].as_str().unwrap();
    let file = lab.file(&format!("{client}.json"), body.to_string());
    let file = file.display().to_string();
    lab.fiec(&["submit", &file]).await.expect(0);
    lab.id(client)
}

fn result_of(line: &Line) -> Value {
    let events = &line.message.events;
    let result = events.iter().find_map(|event| match event {
        Event::Completed { result, .. } => Some(result.clone()),
        _ => None,
    });
    result.expect("a completed execution's result")
}

fn failure_of(line: &Line) -> String {
    let events = &line.message.events;
    let reason = events.iter().find_map(|event| match event {
        Event::Failed { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    reason.expect("a failed execution's reason")
}

#[tokio::test]
async fn a_pushed_shell_program_is_moved_in_the_middle_and_its_output_is_fetched() {
    let lab = Lab::start(allowing(2, "squares@*")).await;
    let folder = squares(&lab, "squares");
    let pushed = push(&lab, "squares@1", &folder).await;
    assert_eq!(pushed["existing"], false);
    assert_eq!(push(&lab, "squares@1", &folder).await["existing"], true);
    let listed = lab.fiec(&["program", "list"]).await.expect(0);
    for word in ["squares@1", "state_dir", "cg@1", "built in"] {
        assert!(listed.stdout.contains(word), "{word}: {listed:?}");
    }
    let shown = lab
        .fiec(&["program", "show", "squares@1", "--json"])
        .await
        .expect(0);
    let shown: ProgramRecord = serde_json::from_str(&shown.stdout).unwrap();
    assert_eq!(json!(shown.artifact), pushed["artifact"]);
    assert_eq!(shown.manifest.entry, ["./squares.sh"]);

    let body = json!({"id": "sum", "program": "squares@1", "params": {"steps": 300},
        "commit": {"every": 5}});
    let id = submit(&lab, &body).await;
    let first = lab.journal.computing(id, 2).await;
    lab.fiec(&["yield", "sum"]).await.expect(0);
    let what = "it computes on the other node";
    let second = lab
        .journal
        .find(id, what, |line| line.started_on().filter(|n| *n != first))
        .await;
    assert_ne!(second, first);
    let last = lab.journal.ended(id, "completed").await;
    let sum: u64 = (1..=300).map(|n| n * n).sum();
    assert_eq!(result_of(&last)["sum"], sum);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let at = |line: &Line| line.state().boundary_index();
    let moved = ledger.iter().find(|l| l.state().epoch == 2).map(at);
    assert!((1..300).contains(&moved.unwrap()), "{moved:?}");
    assert_eq!(last.state().totals.crashes, 0);

    let outputs = lab.fiec(&["output", "sum", "--json"]).await.expect(0);
    let [table] = &outputs.json_lines()[..] else {
        panic!("{outputs:?}")
    };
    let expected: String = (1..=2000).map(|i| format!("{i} {}\n", i * sum)).collect();
    assert_eq!(table["name"], "table");
    assert_eq!(table["bytes"], expected.len());
    assert_eq!(table["digest"], Digest::of(expected.as_bytes()).to_string());
    let file = lab.path("fetched");
    let path = file.display().to_string();
    let wrote = lab
        .fiec(&["output", "sum", "table", "-o", &path])
        .await
        .expect(0);
    assert!(
        wrote.stdout.starts_with(&format!("wrote {path} (")),
        "{wrote:?}"
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    let printed = lab.fiec(&["output", "sum", "table", "-o", "-"]).await;
    assert_eq!(
        printed.expect(0).stdout,
        std::fs::read_to_string(&path).unwrap()
    );
    let unknown = lab.fiec(&["output", "sum", "tables"]).await.expect(1);
    assert!(unknown.stderr.contains("table"), "{unknown:?}");
    lab.fiec(&["output", "nobody"]).await.expect(1);
    lab.end().await;
}

#[tokio::test]
async fn data_that_was_pushed_comes_back_whole_or_not_at_all() {
    let lab = Lab::start(workers(1)).await;
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let file = lab.file("input.bin", &content).display().to_string();
    let pushed = lab.fiec(&["data", "push", &file]).await.expect(0);
    let digest = Digest::of(&content).to_string();
    assert_eq!(pushed.stdout.trim(), digest);
    let back = lab.path("back.bin");
    let path = back.display().to_string();
    lab.fiec(&["data", "get", &digest, "-o", &path])
        .await
        .expect(0);
    assert_eq!(std::fs::read(&back).unwrap(), content);

    tamper(&lab, &digest, b"something else").await;
    let refused = lab
        .fiec(&["data", "get", &digest, "-o", &path])
        .await
        .expect(1);
    assert!(refused.stderr.contains("damaged"), "{refused:?}");
    assert_eq!(std::fs::read(&back).unwrap(), content, "it was left alone");
    let none = Digest::of(b"nobody has this").to_string();
    let unknown = lab
        .fiec(&["data", "get", &none, "-o", &path])
        .await
        .expect(1);
    assert!(unknown.stderr.contains("no object"), "{unknown:?}");
    lab.fiec(&["data", "get", "zz", "-o", &path])
        .await
        .expect(2);
    lab.fiec(&["data", "push", "/nowhere/x"]).await.expect(2);
    lab.end().await;
}

#[tokio::test]
async fn outputs_that_have_left_the_stream_are_listed_from_the_history_or_said_to_be_missing() {
    let mut options = allowing(1, "*");
    options.history = true;
    let lab = Lab::start(options).await;
    let manifest = json!({"entry": ["./parts.sh"], "protocol": "state_dir",
        "outputs": ["part-*"]});
    let folder = package(&lab, "parts", &manifest, &[("parts.sh", PARTS)]);
    push(&lab, "parts@1", &folder).await;
    let body = json!({"id": "p", "program": "parts@1", "commit": {"every": 1}});
    let id = submit(&lab, &body).await;
    lab.journal.ended(id, "completed").await;
    lab.recorded(1).await;
    let listed = lab.fiec(&["output", "p", "--json"]).await.expect(0);
    assert_eq!(listed.json_lines().len(), 80, "{listed:?}");
    assert_eq!(listed.stderr, "");
    let file = lab.path("first");
    let path = file.display().to_string();
    lab.fiec(&["output", "p", "part-1", "-o", &path])
        .await
        .expect(0);
    assert_eq!(std::fs::read(&file).unwrap(), b"part 1\n");

    let mut alone = lab.command(&["output", "p", "--json"]);
    alone.env_remove("FIEC_DATABASE_URL");
    alone.env("XDG_RUNTIME_DIR", lab.path("no-cluster-of-this-machine"));
    let alone = stage::run(alone).await.expect(0);
    assert!(alone.stderr.contains("may be incomplete"), "{alone:?}");
    assert!(alone.json_lines().len() < 80, "{alone:?}");
    lab.end().await;
}

/// Puts other bytes under a digest's name.
async fn tamper(lab: &Lab, digest: &str, bytes: &[u8]) {
    let store = lab.broker.js.get_object_store(subjects::DATA_BUCKET).await;
    let mut bytes = bytes;
    store.unwrap().put(digest, &mut bytes).await.unwrap();
}

#[tokio::test]
async fn a_program_that_no_node_allows_waits_and_why_says_so() {
    let lab = Lab::start(workers(1)).await;
    push(&lab, "squares@1", &squares(&lab, "squares")).await;
    let body = json!({"id": "w", "program": "squares@1", "params": {"steps": 2}});
    let id = submit(&lab, &body).await;
    let why = lab.fiec(&["why", "w"]).await.expect(0);
    for word in [
        "does not offer squares@1",
        "synthetic@1",
        "--allow-program squares@1",
    ] {
        assert!(why.stdout.contains(word), "{word}: {}", why.stdout);
    }
    assert_eq!(lab.journal.of(id).last().unwrap().phase(), "pending");
    lab.end().await;
}

#[tokio::test]
async fn a_program_is_refused_until_it_is_registered_and_taken_at_once_from_then_on() {
    let lab = Lab::start(allowing(1, "*")).await;
    let mut rejections = lab
        .broker
        .client
        .subscribe(subjects::rejection(lab.tenant.as_str()))
        .await
        .unwrap();
    lab.broker.client.flush().await.unwrap();
    let body = json!({"id": "early", "program": "squares@1", "params": {"steps": 2}});
    let file = lab.file("early.json", body.to_string());
    let path = file.display().to_string();
    let refused = lab.fiec(&["submit", &path]).await.expect(2);
    for word in ["field program", "fiec program push squares@1", "cg@1"] {
        assert!(refused.stderr.contains(word), "{word}: {refused:?}");
    }
    // The same by the stream, where nobody waits for an answer.
    lab.publish_text(&body.to_string()).await;
    for _ in 0..2 {
        let heard = futures_util::StreamExt::next(&mut rejections);
        let heard = tokio::time::timeout(stage::PATIENCE, heard).await;
        let record: Value = serde_json::from_slice(&heard.unwrap().unwrap().payload).unwrap();
        assert_eq!(record["error"]["field"], "program", "{record}");
    }
    assert!(lab.journal.of(lab.id("early")).is_empty());
    let unknown = lab.fiec(&["program", "show", "squares@1"]).await.expect(1);
    assert!(unknown.stderr.contains("program push"), "{unknown:?}");

    // Registered behind the services' backs and submitted in the next moment, by both ways.
    for (round, client) in ["a", "b", "c", "d"].into_iter().enumerate() {
        let program = format!("squares@1.{round}");
        push(&lab, &program, &squares(&lab, "squares")).await;
        let body = json!({"id": client, "program": program, "params": {"steps": 2}});
        let id = if round % 2 == 0 {
            submit(&lab, &body).await
        } else {
            lab.publish_json(&body).await
        };
        let last = lab.journal.ended(id, "completed").await;
        assert_eq!(result_of(&last)["sum"], 5);
    }
    lab.end().await;
}

#[tokio::test]
async fn a_version_never_changes_and_what_cannot_be_a_package_is_told() {
    let lab = Lab::start(workers(0)).await;
    let folder = squares(&lab, "squares");
    let first = push(&lab, "squares@1", &folder).await;
    let path = folder.display().to_string();
    // What `fiec run --local` leaves behind is not pushed.
    std::fs::create_dir(folder.join(".fiec")).unwrap();
    std::fs::write(folder.join(".fiec/x"), "x").unwrap();
    let again = lab
        .fiec(&["program", "push", "squares@1", &path])
        .await
        .expect(0);
    for word in ["is there already", "  fiec.json  ", "  squares.sh  "] {
        assert!(again.stdout.contains(word), "{word}: {again:?}");
    }
    assert!(!again.stdout.contains(".fiec"), "{again:?}");
    std::fs::write(folder.join("more.txt"), "more").unwrap();
    let taken = lab
        .fiec(&["program", "push", "squares@1", &path])
        .await
        .expect(2);
    for word in ["squares@1", "never changes", "another"] {
        assert!(taken.stderr.contains(word), "{word}: {taken:?}");
    }
    let name: ProgramName = "squares@1".parse().unwrap();
    let there = fiec_broker::registry::find(&lab.broker, &name).await;
    let there = there.unwrap().unwrap();
    assert_eq!(json!(there.artifact), first["artifact"]);
    push(&lab, "squares@2", &folder).await;

    // Two pushes of different files at the same moment: one wins, the other is told.
    let (one, other) = (squares(&lab, "one"), squares(&lab, "other"));
    std::fs::write(other.join("more.txt"), "more").unwrap();
    let (one, other) = (one.display().to_string(), other.display().to_string());
    let (one, other) = (
        ["program", "push", "race@1", &one],
        ["program", "push", "race@1", &other],
    );
    let (a, b) = tokio::join!(lab.fiec(&one), lab.fiec(&other));
    let mut codes = [a.code, b.code];
    codes.sort_unstable();
    assert_eq!(codes, [0, 2], "{a:?} {b:?}");

    for (program, path, words) in [
        ("cg@7", &*path, "built-in"),
        ("squares", &*path, "name@version"),
        ("x@1", "/bin/sh", "--protocol"),
        ("x@1", "/nowhere", "/nowhere: No such file"),
    ] {
        let refused = lab
            .fiec(&["program", "push", program, path])
            .await
            .expect(2);
        assert!(refused.stderr.contains(words), "{words}: {refused:?}");
    }
    let bad = package(
        &lab,
        "bad",
        &json!({"entry": ["./x.sh"], "protocol": "frames", "limits": {"state_bytes": 0}}),
        &[],
    );
    let bad = bad.display().to_string();
    let refused = lab.fiec(&["program", "push", "x@1", &bad]).await.expect(2);
    assert!(refused.stderr.contains("field limits"), "{refused:?}");
    lab.end().await;
}

#[tokio::test]
async fn a_damaged_artifact_is_refused_by_every_worker_with_the_reason_until_it_is_whole_again() {
    let lab = Lab::start(allowing(2, "*")).await;
    let folder = squares(&lab, "squares");
    let pushed = push(&lab, "squares@1", &folder).await;
    tamper(&lab, pushed["artifact"].as_str().unwrap(), b"no tar at all").await;
    let body = json!({"id": "d", "program": "squares@1", "params": {"steps": 3}});
    let id = submit(&lab, &body).await;
    let refused = |line: &Line| {
        let events = &line.message.events;
        events.iter().find_map(|event| match event {
            Event::Refused { reason, .. } => Some((reason.clone(), line.state().author.clone())),
            _ => None,
        })
    };
    let (reason, first) = lab.journal.find(id, "a worker refuses it", refused).await;
    assert!(reason.contains("damaged"), "{reason}");
    let other = |line: &Line| refused(line).filter(|(_, author)| *author != first);
    lab.journal.find(id, "the other one too", other).await;
    until("why tells the reason", async || {
        let why = lab.fiec(&["why", "d"]).await.expect(0);
        (why.stdout.contains("damaged") && why.stdout.contains("refused")).then_some(())
    })
    .await;
    // The same files once more: the version is whole again, and the execution goes on by itself.
    assert_eq!(push(&lab, "squares@1", &folder).await["existing"], true);
    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(result_of(&last)["sum"], 14);
    assert_eq!(last.state().totals.crashes, 0);
    let ledger = lab.journal.of(id);
    audit(&ledger);
    let epochs = last.state().epoch;
    assert!(
        epochs < 20,
        "{epochs} bindings: they were offered it without a pause"
    );
    lab.end().await;
}

#[tokio::test]
async fn a_program_that_speaks_frames_runs_in_its_own_folder_and_is_moved() {
    let mut options = allowing(2, "frames@*");
    options.worker_args.extend(args(&["--threads", "3"]));
    let mut lab = Lab::start(options).await;
    push(&lab, "frames@1", &frames(&lab, &json!({}))).await;
    let content = vec![7u8; 100_000];
    let input = lab.file("input.bin", &content).display().to_string();
    lab.fiec(&["data", "push", &input]).await.expect(0);
    let body = json!({"id": "f", "program": "frames@1", "commit": {"every": 10},
        "params": {"steps": 600, "object": {"object": Digest::of(&content)}}});
    let id = submit(&lab, &body).await;
    let first = lab.journal.computing(id, 2).await;
    lab.fiec(&["yield", "f"]).await.expect(0);
    let what = "it computes on the other node";
    lab.journal
        .find(id, what, |line| line.started_on().filter(|n| *n != first))
        .await;
    let last = lab.journal.ended(id, "completed").await;
    let result = result_of(&last);
    assert_eq!(result["count"], 600);
    assert_eq!(result["object"], content.len());
    assert_eq!(result["threads"], 3, "the grant");
    assert_eq!(
        result["knows"],
        json!([]),
        "where the servers are is not told"
    );
    let digest = lab.fiec(&["program", "show", "frames@1", "--json"]).await;
    let digest = digest.json_lines()[0]["artifact"].clone();
    let folder = result["folder"].as_str().unwrap();
    assert!(folder.ends_with(digest.as_str().unwrap()), "{folder}");
    audit(&lab.journal.of(id));
    let state = last.state().boundary.clone().unwrap();
    assert_eq!(
        state.digest,
        Digest::of(b"600"),
        "computed here, not believed"
    );
    let file = lab.path("answer");
    let path = file.display().to_string();
    lab.fiec(&["output", "f", "answer", "-o", &path])
        .await
        .expect(0);
    assert_eq!(std::fs::read(&file).unwrap(), b"600");

    // The process serves the next execution of this program too.
    let again = json!({"id": "g", "program": "frames@1", "params": {"steps": 1},
        "requires": {"nodes": [last.message.state.author.split('/').nth(1).unwrap()]}});
    let next = submit(&lab, &again).await;
    let next = lab.journal.ended(next, "completed").await;
    assert_eq!(result_of(&next)["pid"], result["pid"]);
    lab.none_ended().unwrap();
    lab.end().await;
}

#[tokio::test]
async fn a_program_that_goes_beyond_its_manifest_fails_with_the_name_of_the_limit() {
    let lab = Lab::start(allowing(1, "*")).await;
    let limits = json!({"state_bytes": 1000, "boundary_ms": 6000});
    push(&lab, "frames@1", &frames(&lab, &limits)).await;
    for (client, params, limit) in [
        ("big", json!({"steps": 20, "padding": 2000}), "state_bytes"),
        ("secret", json!({"steps": 1, "output": "secret"}), "outputs"),
        ("silent", json!({"steps": 1, "silent": true}), "boundary_ms"),
    ] {
        let body = json!({"id": client, "program": "frames@1", "params": params});
        let id = submit(&lab, &body).await;
        let last = lab.journal.ended(id, "failed").await;
        let reason = failure_of(&last);
        assert!(reason.contains(&format!("limit {limit}")), "{reason}");
        assert_eq!(last.state().totals.crashes, 0);
    }
    let body = json!({"id": "well", "program": "frames@1", "params": {"steps": 30}});
    let id = submit(&lab, &body).await;
    lab.journal.ended(id, "completed").await;
    lab.end().await;
}
