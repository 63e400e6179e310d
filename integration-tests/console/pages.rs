//! What the pages show, and that they follow what happens.

use serde_json::json;

use crate::browser::{Browser, Console};
use crate::stage::{Lab, workers_with_history};

/// Text that would be a script if it were markup.
const EVIL: &str =
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>";

#[tokio::test]
async fn a_live_move_appears_without_a_reload_and_foreign_text_stays_text() {
    let lab = Lab::start(workers_with_history(3)).await;
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    let line = json!({"id": "live", "program": "synthetic@1", "commit": {"every": 5},
        "labels": {"evil": EVIL}, "params": {"capsules": 100_000, "rest_us": 20_000, "print": true}});
    let id = lab.publish_json(&line).await;
    let from = lab.journal.computing(id, 2).await;
    browser.open(&console.entrance).await;
    browser
        .until(
            "it computes",
            "return document.querySelector('.tile.started b')?.textContent === '1'",
        )
        .await;
    browser.picture("overview").await;
    browser.script("window.here = true").await;
    browser
        .open(&format!("{}/executions/live", console.origin()))
        .await;
    let lanes = "return [...document.querySelectorAll('.lane-name')].length === 2";
    browser
        .until("one lane, and that of the boundaries", lanes)
        .await;
    browser.script("window.here = true").await;
    let to = ["n1", "n2"]
        .into_iter()
        .find(|node| *node != from.as_str())
        .unwrap();
    lab.fiec(&["move", "live", "--to", to]).await.expect(0);
    let moved = format!(
        "return document.querySelector('#moves .move summary b')?.textContent === '{to}' && window.here"
    );
    browser
        .until("the move is there without a reload", &moved)
        .await;
    browser
        .script("document.querySelector('#moves .move').open = true")
        .await;
    let grows = "const b = document.querySelector('#head b').textContent; window.b ??= b; return b !== window.b";
    browser.until("boundaries grow", grows).await;
    let open =
        "return document.querySelector('#moves .move').open && document.title.startsWith('live')";
    browser.until("what was opened stays open", open).await;
    browser.picture("execution").await;
    browser
        .script("document.querySelector('#log details').open = true")
        .await;
    let both = format!(
        "const text = document.querySelector('#log pre').textContent; window.printed ??= text.length; \
         return text.includes(' {from} e1 stdout: boundary ') && text.includes(' {to} e2 stdout: ') \
         && text.length > window.printed + 200 && !text.includes('missing')"
    );
    browser
        .until("the log follows, from both nodes", &both)
        .await;
    let text = "document.querySelector('#submission details').open = true; \
                return document.querySelector('#submission pre').textContent.includes('<script>')";
    browser.until("labels are text", text).await;
    let text = browser.text().await;
    assert!(
        text.contains("requested by") || text.contains("asked"),
        "{text}"
    );

    browser
        .open(&format!("{}/executions/nobody", console.origin()))
        .await;
    let nobody = "return document.querySelectorAll('nav a').length === 5 \
                  && document.querySelector('main').textContent.includes('no execution nobody')";
    browser
        .until("what is not there is said on a page", nobody)
        .await;

    browser.open(&format!("{}/nodes", console.origin())).await;
    let nodes = "return document.querySelectorAll('.node').length === 3 && document.querySelectorAll('.runs a').length === 1";
    browser
        .until("three nodes, one of which computes", nodes)
        .await;
    let hatched = "return document.querySelectorAll('.hatch').length > 0";
    browser
        .until("what is not measured is hatched", hatched)
        .await;
    let none = "return document.querySelectorAll('.device, .card h3').length === 0";
    browser
        .until("a node without devices has no such part", none)
        .await;
    browser.picture("nodes").await;
    for (width, scheme) in [(420, "light"), (820, "dark"), (1280, "dark")] {
        browser.size(width, 900).await;
        browser.scheme(scheme).await;
        browser.picture(&format!("nodes-{width}-{scheme}")).await;
        let fits = "return document.documentElement.scrollWidth <= innerWidth";
        browser
            .until(&format!("the page fits {width} pixels"), fits)
            .await;
    }
    lab.fiec(&["cancel", "live"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    browser.end().await;
    console.end().await;
    lab.end().await;
}

#[tokio::test]
async fn curves_of_an_execution_and_of_a_batchs_members_are_drawn() {
    let lab = Lab::start(workers_with_history(2)).await;
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    let mut ids = Vec::new();
    for (n, tolerance) in [1e-4, 1e-7, 1e-10].into_iter().enumerate() {
        let line = json!({"id": format!("t-{n}"), "batch": "tolerances", "program": "cg@1",
            "commit": {"every": 5}, "params": {"matrix": {"poisson3d": {"n": 12}}, "tolerance": tolerance,
            "iterations_per_capsule": 1}});
        ids.push(lab.publish_json(&line).await);
    }
    for id in ids {
        lab.journal.ended(id, "completed").await;
    }
    lab.recorded(3).await;
    browser.open(&console.entrance).await;
    browser
        .open(&format!("{}/executions/t-2", console.origin()))
        .await;
    browser
        .until(
            "its residual is drawn",
            "return !!document.querySelector('#curve-residual .uplot canvas')",
        )
        .await;
    browser.picture("curves").await;
    let batch = lab
        .sql("SELECT batch::text AS b FROM batch_summary WHERE name = 'tolerances'")
        .await;
    let batch = batch.get(0, "b").unwrap().to_owned();
    browser
        .open(&format!(
            "{}/batches/{batch}?name=residual&by=tolerance",
            console.origin()
        ))
        .await;
    let drawn = "return !!document.querySelector('#members .uplot canvas') \
                 && document.querySelector('#members .scale').textContent === 'tolerance 1e-100.0001' \
                 && document.querySelector('#members figcaption').textContent === 'residual of 3 members (logarithmic)'";
    browser
        .until(
            "the members' residuals are drawn, coloured by their tolerance",
            drawn,
        )
        .await;
    browser.picture("members").await;
    browser.end().await;
    console.end().await;
    lab.end().await;
}
