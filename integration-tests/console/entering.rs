//! Who may look: a ticket is good once, and a browser without the cookie sees nothing.

use crate::browser::{Browser, Console};
use crate::stage::{Lab, workers_with_history};

#[tokio::test]
async fn a_browser_without_the_cookie_sees_nothing() {
    let lab = Lab::start(workers_with_history(1)).await;
    let console = Console::start(&lab).await;
    let (Some(first), Some(second)) = (Browser::start().await, Browser::start().await) else {
        return lab.end().await;
    };
    first.open(&console.entrance).await;
    first
        .until(
            "the overview is there",
            "return document.title.startsWith('Overview')",
        )
        .await;
    // The ticket has been used, also for this browser's other tabs.
    for path in [
        "/enter?ticket=x",
        "/",
        "/nodes",
        "/executions",
        "/batches",
        "/events",
        "/assets/live.js",
    ] {
        second.open(&format!("{}{path}", console.origin())).await;
        let text = second.text().await;
        assert!(
            text.contains("This browser has not entered"),
            "{path}: {text}"
        );
    }
    second.open(&console.entrance).await;
    assert!(
        second.text().await.contains("has not entered"),
        "a ticket is good once"
    );
    first.open(&format!("{}/nodes", console.origin())).await;
    first
        .until(
            "the node is there",
            "return document.querySelectorAll('.node').length === 1",
        )
        .await;
    // Its stream of news is open.
    console.end().await;
    let lost = "return document.getElementById('line').classList.contains('lost')";
    first
        .until("the page says that it has lost the console", lost)
        .await;
    first.end().await;
    second.end().await;
    lab.end().await;
}
