//! What would help an execution is a button that opens the page of that action.

use serde_json::json;

use crate::browser::{Browser, Console};
use crate::stage::{Lab, workers_with_history};

#[tokio::test]
async fn what_would_help_can_be_asked_for_where_it_is_said() {
    let lab = Lab::start(workers_with_history(1)).await;
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    browser.open(&console.entrance).await;
    lab.fiec(&["cordon", "n1"]).await.expect(0);
    let line = json!({"id": "stuck", "program": "synthetic@1", "commit": {"every": 5},
        "params": {"capsules": 100_000, "rest_us": 20_000}});
    let id = lab.publish_json(&line).await;
    let page = format!("{}/executions/stuck", console.origin());
    let found = "SELECT count(*) FROM executions WHERE phase = 'pending'";
    crate::stage::until("it waits", async || {
        (lab.count(found).await == 1).then_some(())
    })
    .await;
    // The page may replace a button at any moment, so a script in the page finds and clicks it at once.
    let press = async |words: &str| {
        let find = format!(
            "const it = [...document.querySelectorAll('.helps a')].find((a) => a.textContent === '{words}'); \
             it?.click(); return !!it"
        );
        browser.until(&format!("{words} is offered"), &find).await;
        let asks = "return location.pathname === '/act' && !!document.querySelector('button.do')";
        browser.until("the page asks", asks).await;
        let text = browser.text().await;
        browser
            .script("document.querySelector('button.do').click()")
            .await;
        let said = "return !!document.querySelector('.answers li:not(.trouble)')";
        browser.until("it is done", said).await;
        browser.open(&page).await;
        text
    };
    browser.open(&page).await;
    browser.picture("helps").await;
    let text = press("uncordon n1").await;
    assert!(text.contains("fiec uncordon n1"), "{text}");
    lab.journal.computing(id, 1).await;
    let none = "return document.querySelectorAll('.helps').length === 0 \
                && document.querySelector('#head .badge').textContent === 'started'";
    browser
        .until("nothing is offered for one that computes", none)
        .await;
    lab.fiec(&["pause", "stuck"]).await.expect(0);
    let text = press("resume").await;
    assert!(text.contains("fiec resume --tenant lab -- stuck"), "{text}");
    lab.journal.computing(id, 2).await;
    lab.fiec(&["cancel", "stuck"]).await.expect(0);
    lab.journal.ended(id, "cancelled").await;
    let text = press("retry").await;
    assert!(text.contains("fiec retry --tenant lab -- stuck"), "{text}");
    lab.journal.computing(id, 3).await;

    lab.fiec(&["cancel", "stuck"]).await.expect(0);
    browser.end().await;
    console.end().await;
    lab.end().await;
}
