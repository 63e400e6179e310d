//! `fiec reconfigure`: a running execution is given more or less by the command; who asked is
//! recorded and shown, the program adapts, and the bits stay those of the undisturbed run.

use std::time::Duration;

use crate::stage;
use crate::stage::python::{copy, root};
use crate::stage::{
    Lab, args, audit, digest_of, proc, undisturbed, until, workers, workers_with_history,
};
use fiec_schemas::messages::{ApiReply, ExecutionRequest};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::{Event, ExecutionId};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// What was recorded of it: who asked, and what it has since.
fn recorded(lab: &Lab, id: ExecutionId) -> Vec<(String, Grant)> {
    let ledger = lab.journal.of(id);
    let events = ledger.iter().flat_map(|line| &line.message.events);
    events
        .filter_map(|event| match event {
            Event::Reconfigured { who, grant } => Some((who.clone(), grant.clone())),
            _ => None,
        })
        .collect()
}

/// Threads of the worker's programs that compute beside their first one.
fn helpers(worker: u32) -> usize {
    let tasks = |pid: u32| std::fs::read_dir(format!("/proc/{pid}/task"));
    let children = proc::descendants(worker);
    let tasks = children.into_iter().filter_map(|pid| tasks(pid).ok());
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("kernel-"))
        .count()
}

/// The API's answer to a request that the command would not make.
async fn ask(lab: &Lab, id: &str, grant: Option<Grant>) -> ApiReply {
    request(lab, "reconfigure", id, grant).await
}

async fn request(lab: &Lab, verb: &str, id: &str, grant: Option<Grant>) -> ApiReply {
    let request = ExecutionRequest {
        id: id.to_owned(),
        who: "ann@lab".to_owned(),
        grant,
        ..ExecutionRequest::default()
    };
    let subject = format!("fiec.api.{verb}.{}", lab.tenant);
    let body = serde_json::to_vec(&request).unwrap();
    let answer = lab.broker.client.request(subject, body.into()).await;
    serde_json::from_slice(&answer.unwrap().payload).unwrap()
}

#[tokio::test]
async fn a_running_solve_is_given_other_threads_and_memory_and_ends_with_the_same_bits() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let params = json!({"matrix": {"poisson2d": {"n": 48}}, "load_cases": 400,
        "iterations_per_capsule": 20, "threads": 2});
    let line = json!({"id": "solve", "program": "cg@1", "params": params,
        "commit": {"every_ms": 100}});
    let id = lab.publish_json(&line).await;
    let node = lab.journal.computing(id, 1).await;
    let worker = lab.worker(&node).pid();
    let cpus = lab.status_of(&node).await.unwrap().descriptor.cpus;
    if cpus > 1 {
        until("it computes with two threads", async || {
            (helpers(worker) > 0).then_some(())
        })
        .await;
    }
    let change = ["reconfigure", "solve", "--threads", "1", "--memory", "64M"];
    let said = lab.fiec(&change).await.expect(0);
    assert!(said.stdout.contains("next boundary"), "{said:?}");
    until("it computes with one thread", async || {
        (helpers(worker) == 0).then_some(())
    })
    .await;

    // Nothing that is refused is recorded.
    let refused: [(&[&str], i32, &[&str]); 8] = [
        (&["--threads", "0"], 2, &["--threads", "0"]),
        (&["--memory", "much"], 2, &["--memory", "much"]),
        (&["--cpus", "3-1"], 2, &["--cpus", "3-1"]),
        (&[], 1, &["--threads", "--memory", "--cpus"]),
        (
            &["--threads", "4000000"],
            1,
            &["threads: 4000000", "processors"],
        ),
        (&["--memory", "999999G"], 1, &["memory_bytes: ", "limit"]),
        (&["--cpus", "4000"], 1, &["cpus: ", "4000"]),
        (&["--threads", "1"], 1, &["already"]),
    ];
    for (words, code, parts) in refused {
        let all = [&["reconfigure", "solve"][..], words].concat();
        let said = lab.fiec(&all).await.expect(code);
        for part in parts {
            assert!(said.stderr.contains(part), "{words:?}: {part}: {said:?}");
        }
    }
    let device = Grant {
        device: Some(DeviceGrant {
            uuid: "GPU-1".to_owned(),
            memory_bytes: None,
        }),
        ..Grant::default()
    };
    for (grant, field) in [
        (None, "grant: names no change"),
        (Some(device), "grant.device: cannot change"),
    ] {
        let error = ask(&lab, "solve", grant).await.error.unwrap();
        assert!(error.contains(field), "{error}");
    }

    let last = lab.journal.ended(id, "completed").await;
    assert_eq!(digest_of(&last), undisturbed("cg@1", &params).await);
    assert_eq!(last.state().epoch, 1, "it was not moved for that");
    audit(&lab.journal.of(id));
    let given = recorded(&lab, id);
    let [(who, grant)] = &given[..] else {
        panic!("{given:?}")
    };
    assert!(who.contains('@'), "{who}");
    assert_eq!(
        (grant.threads, grant.memory_bytes),
        (Some(1), Some(64 * MIB))
    );
    assert!(grant.substrate.is_some(), "what was not named stays");

    lab.recorded(1).await;
    let history = lab.fiec(&["history", "solve"]).await.expect(0).stdout;
    let shown = history.lines().find(|line| line.contains("reconfigured"));
    let shown = shown.unwrap_or_else(|| panic!("{history}"));
    assert!(
        shown.contains(&**who) && shown.contains("\"threads\":1"),
        "{history}"
    );
    let json = lab.fiec(&["history", "solve", "--json"]).await.expect(0);
    let is_it = |line: &&Value| line["kind"] == "reconfigured";
    assert_eq!(
        json.json_lines().iter().find(is_it).unwrap()["who"],
        who.as_str()
    );
    let ended = lab.fiec(&change).await.expect(1);
    assert!(ended.stderr.contains("is completed"), "{ended:?}");
    lab.end().await;
}

#[tokio::test]
async fn an_execution_that_does_not_run_is_given_nothing_and_the_answer_says_why() {
    let lab = Lab::start(stage::workers(1)).await;
    let line = json!({"id": "waits", "program": "synthetic@1", "requires": {"nodes": ["n9"]}});
    let id = lab.publish_json(&line).await;
    let pending = |line: &stage::Line| (line.phase() == "pending").then_some(());
    lab.journal.find(id, "it waits", pending).await;
    for (name, why) in [
        ("waits", "is pending; only a running execution"),
        ("nobody", "has no execution nobody"),
    ] {
        let said = lab.fiec(&["reconfigure", name, "--threads", "1"]).await;
        let said = said.expect(1);
        assert!(said.stderr.contains(why), "{said:?}");
    }
    assert!(recorded(&lab, id).is_empty());
    lab.end().await;
}

#[tokio::test]
async fn a_program_in_python_is_called_back_with_what_it_has_now() {
    let folder = tempfile::tempdir().unwrap();
    copy(
        &root().join("workers/python/fiec"),
        &folder.path().join("fiec"),
    );
    let program = root().join("workers/python/tests/programs/sums.py");
    std::fs::copy(program, folder.path().join("sums.py")).unwrap();
    let manifest = json!({"entry": ["python3", "-B", "sums.py"], "protocol": "frames"});
    std::fs::write(folder.path().join("fiec.json"), manifest.to_string()).unwrap();
    let mut options = stage::workers(1);
    options
        .worker_args
        .extend(args(&["--allow-program", "sums@*"]));
    let lab = Lab::start(options).await;
    let path = folder.path().display().to_string();
    lab.fiec(&["program", "push", "sums@1", &path])
        .await
        .expect(0);
    let line = json!({"id": "s", "program": "sums@1", "commit": {"every_ms": 50},
        "params": {"steps": 300, "sleep": 0.01}});
    let id = lab.publish_json(&line).await;
    let node = lab.journal.computing(id, 1).await;
    let cpus = lab.status_of(&node).await.unwrap().descriptor.cpus;
    let change = ["reconfigure", "s", "--threads", "1", "--memory", "64M"];
    lab.fiec(&change).await.expect(0);
    lab.journal
        .find(id, "it is recorded", |line| {
            let of = |e: &Event| matches!(e, Event::Reconfigured { .. });
            line.message.events.iter().any(of).then_some(())
        })
        .await;
    let given = recorded(&lab, id);
    assert_eq!(given.len(), 1, "answered once it is in the ledger");
    let last = lab.journal.ended(id, "completed").await;
    let result = last.message.events.iter().find_map(|event| match event {
        Event::Completed { result, .. } => Some(result.clone()),
        _ => None,
    });
    let result = result.unwrap();
    let calls = result["grants"].as_array().unwrap();
    assert_eq!(calls.last(), Some(&json!(1)), "{result}; of {cpus}");
    assert_eq!(
        (&result["threads"], last.state().totals.crashes),
        (&json!(1), 0)
    );
    lab.end().await;
}

#[tokio::test]
async fn a_grant_that_is_asked_for_during_a_move_is_given_where_the_execution_goes_on() {
    let lab = Lab::start(workers(2)).await;
    let params = json!({"capsules": 1_000_000, "rest_us": 2_000, "state_bytes": 4_000_000});
    let line = json!({"id": "moves", "program": "synthetic@1", "params": params,
        "commit": {"every_ms": 50}});
    let id = lab.publish_json(&line).await;
    for round in 1..=10_u64 {
        lab.journal.computing(id, round).await;
        let reply = request(&lab, "yield", "moves", None).await;
        assert_eq!(reply.error, None, "round {round}");
        // Before, while and after the execution moves.
        tokio::time::sleep(Duration::from_millis(8 * (round - 1))).await;
        let grant = Grant {
            memory_bytes: Some((64 + round) * MIB),
            ..Grant::default()
        };
        let reply = ask(&lab, "moves", Some(grant)).await;
        assert_eq!(reply.error, None, "round {round}");
        until("the grant is recorded", async || {
            let given = recorded(&lab, id);
            let last = given.last()?.1.memory_bytes;
            (last == Some((64 + round) * MIB)).then_some(())
        })
        .await;
    }
    lab.fiec(&["cancel", "moves"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    audit(&lab.journal.of(id));
    lab.stop().await;
}
