//! Every page as JSON, and every page while PostgreSQL is silent.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::browser::{Browser, Console};
use crate::stage::{Lab, address_of, until, workers_with_history};

/// Longest time of a page, with that of the browser around it.
const ANSWERED: Duration = Duration::from_secs(17);

async fn prepared(lab: &Lab) -> String {
    let mut ids = Vec::new();
    for name in ["a", "b"] {
        let line = json!({"id": name, "batch": "pair", "program": "cg@1", "commit": {"every": 5},
            "params": {"matrix": {"poisson3d": {"n": 8}}, "iterations_per_capsule": 1}});
        ids.push(lab.publish_json(&line).await);
    }
    for id in ids {
        lab.journal.ended(id, "completed").await;
    }
    lab.recorded(2).await;
    let batch = lab
        .sql("SELECT batch::text AS b FROM batch_summary WHERE name = 'pair'")
        .await;
    batch.get(0, "b").unwrap().to_owned()
}

#[tokio::test]
async fn each_page_as_json_has_what_the_page_shows() {
    let lab = Lab::start(workers_with_history(1)).await;
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    let batch = prepared(&lab).await;
    let array = json!({"id": "turn", "array": {"count": 11}, "program": "synthetic@1", "params": {"capsules": 1}});
    lab.publish_json(&array).await;
    lab.recorded(13).await;
    browser.open(&console.entrance).await;
    let ordered = format!("{}/executions?q=turn-&format=json", console.origin());
    let names = format!(
        "const done = arguments[arguments.length - 1]; fetch('{ordered}').then((r) => r.json()) \
         .then((page) => done(page.rows.map((row) => row.client_id).join(' ')));"
    );
    let newest_first = (0..11).rev().map(|n| format!("turn-{n}"));
    let newest_first = newest_first.collect::<Vec<_>>().join(" ");
    assert_eq!(browser.later(&names).await, newest_first.as_str());
    for (path, has) in [
        ("/".to_owned(), "/overview/phases/completed"),
        ("/nodes".to_owned(), "/nodes/0/signals/0/signal"),
        (
            "/executions?phase=completed".to_owned(),
            "/rows/1/execution",
        ),
        ("/executions/a".to_owned(), "/curves/0/data"),
        ("/batches".to_owned(), "/batches/0/ids_like"),
        (format!("/batches/{batch}?name=residual"), "/members/1"),
        ("/sql?q=SELECT%2042%20AS%20n".to_owned(), "/answer/rows/0/0"),
        ("/act?what=cordon&on=n1".to_owned(), "/affected"),
    ] {
        browser.open(&format!("{}{path}", console.origin())).await;
        // What a person reads as names, counts and numbers of the page.
        let shown = "const parts = document.querySelectorAll('main h1, main a[href^=\"/executions/\"], \
                     main a[href^=\"/batches/\"], main .card h2, main .answer td'); \
                     return [...parts].map((p) => [...p.childNodes].filter((n) => n.nodeType === 3) \
                     .map((n) => n.textContent.trim()).join('')).filter((t) => t)";
        let shown = browser.script(shown).await;
        let ask = "const done = arguments[arguments.length - 1]; const url = new URL(location.href); \
                   url.searchParams.set('format', 'json'); \
                   fetch(url).then((r) => r.text().then((t) => done([r.headers.get('content-type'), t])));";
        let answer = browser.later(ask).await;
        assert_eq!(answer[0], "application/json", "{path}");
        let text = answer[1].as_str().unwrap();
        let page: Value =
            serde_json::from_str(text).unwrap_or_else(|e| panic!("{path}: {e}: {text}"));
        assert!(page.pointer(has).is_some(), "{path} has no {has}: {text}");
        assert!(
            page["frame"]["troubles"].as_array().unwrap().is_empty(),
            "{text}"
        );
        let shown = shown.as_array().unwrap();
        assert!(!shown.is_empty(), "{path}");
        for words in shown {
            let words = words.as_str().unwrap();
            let is_said = ["its batch", "Back", "no"].contains(&words);
            assert!(
                is_said || text.contains(words),
                "{path}: {words} is not in {text}"
            );
        }
    }
    browser.end().await;
    console.end().await;
    lab.end().await;
}

/// PostgreSQL and all processes that it has started.
fn processes(postmaster: u32) -> Vec<Pid> {
    let mut all = vec![postmaster];
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(1));
        if parent == Some(postmaster.to_string().as_str()) {
            all.push(pid);
        }
    }
    all.into_iter()
        .filter_map(|pid| Pid::from_raw(pid.cast_signed()))
        .collect()
}

/// An execution that its worker should have started a minute ago.
const OVERDUE: &str = "INSERT INTO executions (id, tenant, client_id, program, contract, submission, submitted_at, \
        phase, node, epoch, bound_at, due_at, boundary_index, commits, state_bytes, rebindings, \
        pressure_rebindings, crashes, compute_us, author, ordinal, seq, recorded_at) \
    VALUES (gen_random_uuid(), 'lab', 'late', 'walk@1', 'bitwise', '\\x00', now() - interval '4 minutes', \
        'bound', 'n1', 1, now() - interval '3 minutes', now() - interval '1 minute', 0, 0, 0, 0, 0, 0, 0, \
        'policy/x', 1, 1, now())";

#[tokio::test]
async fn while_postgresql_is_silent_each_page_answers_in_time_and_says_since_when() {
    let lab = Lab::start(workers_with_history(1)).await;
    let health = lab.policies.iter().chain(&lab.recorder).chain(&lab.workers);
    let health = health.map(|one| format!("{}={}", one.name, address_of(one).unwrap()));
    let health = health.collect::<Vec<_>>().join(",");
    let console = Console::start_with(&lab, &["--health", &health]).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    let batch = prepared(&lab).await;
    browser.open(&console.entrance).await;
    let two = "return document.querySelector('.tile.completed b')?.textContent === '2'";
    browser.until("both are counted", two).await;
    lab.execute(OVERDUE).await;
    let attention = "const text = document.querySelector('#attention').textContent; \
                     return text.includes('worker n1 is overdue by') && text.includes('it must start it') \
                     && text.includes('3 of 3 services and workers say that they are well')";
    browser
        .until("what needs a person is told", attention)
        .await;
    let stopped = processes(lab.servers.postgres.as_ref().unwrap().pid());
    assert!(stopped.len() > 1, "{stopped:?}");
    for pid in &stopped {
        // One that has ended meanwhile needs no signal.
        let _ = kill_process(*pid, Signal::STOP);
    }
    let fetched = async |path: &str| {
        let ask = format!(
            "const done = arguments[arguments.length - 1]; const from = performance.now(); \
             fetch('{path}').then((r) => r.text().then((t) => done([r.status, t, performance.now() - from])));"
        );
        let answer = browser.later(&ask).await;
        let took = Duration::from_secs_f64(answer[2].as_f64().unwrap() / 1e3);
        assert!(took < ANSWERED, "{path}: {took:?}");
        (
            answer[0].as_u64().unwrap(),
            answer[1].as_str().unwrap().to_owned(),
        )
    };
    let old = "return !!document.querySelector('.trouble')?.textContent.startsWith('History: as of ') \
               && document.querySelector('.tile.completed b').textContent === '2'";
    browser.until("the overview says how old it is", old).await;
    let red = "return document.querySelector('#attention .red')?.textContent.includes('recorder has not been well')";
    browser
        .until("the recorder's own reason is told", red)
        .await;
    for path in [
        "/executions",
        "/executions/a",
        "/batches",
        &format!("/batches/{batch}"),
        "/act?what=cancel&phase=pending",
    ] {
        let (_, text) = fetched(path).await;
        assert!(text.contains("it last answered at 20"), "{path}: {text}");
    }
    let (status, text) = fetched("/nodes").await;
    assert!(status == 200 && text.contains("node-n1"), "{text}");
    for pid in &stopped {
        let _ = kill_process(*pid, Signal::CONT);
    }
    until("pages are well again", async || {
        let (status, text) = fetched("/executions/a").await;
        (status == 200 && !text.contains("it last answered")).then_some(())
    })
    .await;
    let none = "return !document.querySelector('#attention .red')";
    browser.until("the recorder is well again", none).await;
    // No ledger has it.
    lab.execute("DELETE FROM executions WHERE client_id = 'late'")
        .await;
    browser.end().await;
    console.end().await;
    lab.end().await;
}
