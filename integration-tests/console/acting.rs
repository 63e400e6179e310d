//! Actions are asked for, shown with their command line, done, and recorded with who asked.

use serde_json::json;

use crate::browser::{Browser, Console};
use crate::stage::{Lab, until, workers_with_history};

#[tokio::test]
async fn an_action_shows_who_is_affected_asks_is_done_and_recorded() {
    let lab = Lab::start(workers_with_history(2)).await;
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    let mut ids = Vec::new();
    for name in ["a", "b", "c"] {
        let line = json!({"id": name, "program": "synthetic@1", "commit": {"every": 5},
            "batch": "three", "params": {"capsules": 100_000, "rest_us": 20_000}});
        ids.push(lab.publish_json(&line).await);
    }
    lab.journal.computing(ids[0], 1).await;
    until("all three are in the history", async || {
        (lab.count("SELECT count(*) FROM executions").await == 3).then_some(())
    })
    .await;
    browser.open(&console.entrance).await;
    // The page may replace a button at any moment, so a script in the page finds and clicks it at once.
    let press = async |what: &str, find: &str| {
        let before = browser.script("return location.href").await;
        let pressed = format!("const it = {find}; it?.click(); return !!it");
        browser
            .until(&format!("{what} can be pressed"), &pressed)
            .await;
        let there =
            format!("return location.href !== {before} && document.readyState === 'complete'");
        browser.until(&format!("{what} leads on"), &there).await;
    };
    let follow = async |words: &str| {
        let link =
            "[...document.querySelectorAll('main a')].find((a) => a.textContent === 'WORDS')";
        press(words, &link.replace("WORDS", words)).await;
    };
    let agree = async || press("the button", "document.querySelector('button.do')").await;

    // One, and to a named node.
    browser
        .open(&format!("{}/executions/a", console.origin()))
        .await;
    browser
        .until(
            "it computes",
            "return document.querySelector('#head .badge').textContent === 'started'",
        )
        .await;
    follow("pause").await;
    let text = browser.text().await;
    assert!(
        text.contains("fiec pause --tenant lab -- a") && text.contains("commits its next boundary"),
        "{text}"
    );
    browser.picture("asked").await;
    agree().await;
    browser
        .until(
            "it is answered",
            "return !!document.querySelector('.answers li')",
        )
        .await;
    follow("Back").await;
    browser
        .until(
            "it is paused",
            "return document.querySelector('#head .badge').textContent === 'paused'",
        )
        .await;

    // All that is chosen, by the list's own address.
    browser
        .open(&format!("{}/executions?phase=paused", console.origin()))
        .await;
    follow("resume").await;
    let text = browser.text().await;
    assert!(
        text.contains("resume a") && text.contains("fiec resume --tenant lab -- a"),
        "{text}"
    );
    follow("no").await;
    let at = "return location.pathname + location.search === '/executions?phase=paused'";
    browser
        .until("a no leads back to what was chosen", at)
        .await;
    follow("resume").await;
    agree().await;
    browser
        .until(
            "it is answered",
            "return !!document.querySelector('.answers li:not(.trouble)')",
        )
        .await;

    // A node, and back.
    browser.open(&format!("{}/nodes", console.origin())).await;
    browser
        .until(
            "the nodes are there",
            "return document.querySelectorAll('.node').length === 2",
        )
        .await;
    until("one computes on n1, in the history, too", async || {
        let there = "SELECT count(*) FROM executions WHERE node = 'n1' AND phase = 'started'";
        (lab.count(there).await > 0).then_some(())
    })
    .await;
    follow("drain").await;
    let text = browser.text().await;
    assert!(
        text.contains("fiec drain n1") && text.contains("Affected"),
        "{text}"
    );
    follow("no").await;
    follow("cordon").await;
    let text = browser.text().await;
    assert!(text.contains("fiec cordon n1"), "{text}");
    agree().await;
    browser
        .until(
            "it is answered",
            "return !!document.querySelector('.answers li:not(.trouble)')",
        )
        .await;
    follow("Back").await;
    let flag =
        "return document.querySelector('#node-n1 .flag')?.textContent.startsWith('cordoned by ')";
    browser.until("who has cordoned it is told", flag).await;
    follow("uncordon").await;
    agree().await;

    // A whole batch.
    let batch = lab
        .sql("SELECT batch::text AS b FROM batch_summary WHERE name = 'three'")
        .await;
    let batch = batch.get(0, "b").unwrap().to_owned();
    browser
        .open(&format!("{}/batches/{batch}", console.origin()))
        .await;
    follow("cancel").await;
    let text = browser.text().await;
    assert!(
        text.contains("all 3 members of batch three")
            && text.contains("fiec batch cancel --tenant lab -- three"),
        "{text}"
    );
    agree().await;
    browser
        .until(
            "it is answered",
            "return !!document.querySelector('.answers li:not(.trouble)')",
        )
        .await;
    for id in ids {
        lab.journal.ended(id, "cancelled").await;
    }
    lab.recorded(3).await;

    let asked = "SELECT string_agg(DISTINCT what, ' ' ORDER BY what) AS w, count(DISTINCT who) AS n FROM operator_actions";
    until("each is recorded with who asked", async || {
        let rows = lab.sql(asked).await;
        let what = rows.get(0, "w").unwrap_or_default();
        let all = ["cancel", "cordoned", "pause", "resume", "uncordoned"];
        let known = rows.get(0, "n") == Some("1");
        (known && all.iter().all(|one| what.contains(one))).then_some(())
    })
    .await;

    // A question in SQL, and one that would write.
    let q = "SELECT count(*) AS n, '<b>x</b>' AS t FROM executions";
    browser
        .open(&format!(
            "{}/sql?q={}",
            console.origin(),
            q.replace(' ', "%20")
        ))
        .await;
    let cells = "return [...document.querySelectorAll('.answer td')].map((c) => c.textContent).join() === '3,<b>x</b>'";
    browser.until("the answer is there, as text", cells).await;
    for (wrong, words) in [
        ("DELETE FROM executions", "SELECT or WITH"),
        ("SELECT * FROM boundary_state", "permission denied"),
        ("SELECT pg_sleep(60)", "statement timeout"),
        (
            "WITH x AS (DELETE FROM executions RETURNING 1) SELECT * FROM x",
            "PostgreSQL refuses it",
        ),
    ] {
        browser
            .open(&format!(
                "{}/sql?q={}",
                console.origin(),
                wrong.replace(' ', "%20")
            ))
            .await;
        let text = browser.text().await;
        assert!(text.contains(words), "{wrong}: {text}");
    }
    assert_eq!(lab.count("SELECT count(*) FROM executions").await, 3);
    browser.end().await;
    console.end().await;
    lab.end().await;
}
