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
        "labels": {"evil": EVIL}, "params": {"capsules": 100_000, "rest_us": 20_000}});
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
    let text = browser.text().await;
    assert!(
        text.contains("requested by") || text.contains("asked"),
        "{text}"
    );

    browser.open(&format!("{}/nodes", console.origin())).await;
    let nodes = "return document.querySelectorAll('.node').length === 3 && document.querySelectorAll('.runs a').length === 1";
    browser
        .until("three nodes, one of which computes", nodes)
        .await;
    let hatched = "return document.querySelectorAll('.hatch').length > 0";
    browser
        .until("what is not measured is hatched", hatched)
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
