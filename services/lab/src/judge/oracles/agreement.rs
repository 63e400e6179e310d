//! Each policy service believes what the ledgers say: phase, sequence and holder.

use std::collections::BTreeMap;
use std::time::Duration;

use fiec_broker::Broker;
use fiec_schemas::ExecutionId;
use fiec_schemas::messages::{Believed, ViewReply, ViewRequest};
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::ledgers::{Last, last_of_each};
use crate::judge::checker::{Rule, Violation};

/// How long policy services have to say that they are there.
const HERE: Duration = Duration::from_secs(2);
/// How long one has for a page.
const PAGE: Duration = Duration::from_secs(10);

/// What one policy service believes of all live executions.
pub type View = BTreeMap<ExecutionId, Believed>;

/// Reads the views between two readings of the ledgers, and compares.
pub async fn observe(
    broker: &Broker,
    policies: usize,
    before: &BTreeMap<ExecutionId, Last>,
) -> Result<Vec<Violation>, String> {
    let mut found = Vec::new();
    let services = services(broker, policies).await?;
    if services.len() < policies {
        let what = format!("{} of {policies} policy services answer", services.len());
        found.push(Violation::new(Rule::Agreement, "", what));
    }
    let mut views = Vec::new();
    for service in services {
        match view(broker, &service).await {
            Ok(view) => views.push(view),
            Err(why) => found.push(Violation::new(Rule::Agreement, "", why)),
        }
    }
    let after = last_of_each(broker).await?;
    found.extend(judge(before, &views, &after));
    Ok(found)
}

/// Compares views with the ledgers as they were before and after the views were read.
pub fn judge(
    before: &BTreeMap<ExecutionId, Last>,
    views: &[View],
    after: &BTreeMap<ExecutionId, Last>,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for (number, view) in (1..).zip(views) {
        let mut say = |id: &ExecutionId, what: String| {
            let what = format!("policy service {number} believes that it {what}");
            found.push(Violation::new(Rule::Agreement, &id.to_string(), what));
        };
        for (id, last) in before.iter().filter(|(_, last)| is_live(last)) {
            if !view.contains_key(id) && after.get(id).is_some_and(|now| now.seq == last.seq) {
                say(id, format!("does not live; it is {}", phase(last)));
            }
        }
        for (id, believed) in view {
            // A first append that is in flight has no ledger yet.
            let Some(last) = after.get(id) else {
                if believed.seq > 0 {
                    say(id, format!("is {}; it has no ledger", believed.phase));
                }
                continue;
            };
            let earlier = before.get(id).map_or(0, |last| last.seq);
            if believed.seq < earlier || believed.seq > last.seq {
                // No sequence here: the observations of a lasting difference must be equal.
                say(id, format!("is {}; it is {}", believed.phase, phase(last)));
            } else if earlier == last.seq {
                let node = last.state.phase.binding().map(|binding| &binding.node);
                let same = believed.phase == last.state.phase.kind()
                    && believed.node.as_ref() == node
                    && believed.epoch == last.state.epoch;
                if !same {
                    say(id, format!("is {}; it is {}", believed.phase, phase(last)));
                }
            }
        }
    }
    found
}

fn is_live(last: &Last) -> bool {
    !last.state.phase.is_terminal()
}

fn phase(last: &Last) -> String {
    let node = last.state.phase.binding().map(|binding| &binding.node);
    let node = node.map_or(String::new(), |node| format!(" on {node}"));
    format!("{}{node}", last.state.phase.kind())
}

/// The subjects on which the running policy services tell their views. Waits until this many have
/// answered.
async fn services(broker: &Broker, wanted: usize) -> Result<Vec<String>, String> {
    let client = &broker.client;
    let inbox = client.new_inbox();
    let words = |error: &dyn std::fmt::Display| format!("cannot ask who is there: {error}");
    let mut answers = client
        .subscribe(inbox.clone())
        .await
        .map_err(|e| words(&e))?;
    let asked = client.publish_with_reply("$SRV.INFO.fiec", inbox, "".into());
    asked.await.map_err(|e| words(&e))?;
    let deadline = Instant::now() + HERE;
    let mut found = Vec::new();
    while found.len() < wanted {
        let Ok(Some(answer)) = timeout_at(deadline, answers.next()).await else {
            break;
        };
        let info: Value = serde_json::from_slice(&answer.payload).unwrap_or_default();
        let endpoints = info["endpoints"].as_array().into_iter().flatten();
        let subject = endpoints
            .filter(|endpoint| endpoint["name"] == "view")
            .find_map(|endpoint| endpoint["subject"].as_str());
        found.extend(subject.map(str::to_owned));
    }
    Ok(found)
}

/// All pages of a view.
async fn view(broker: &Broker, subject: &str) -> Result<View, String> {
    let mut view = View::new();
    let mut request = ViewRequest::default();
    loop {
        let body = serde_json::to_vec(&request).map_err(|e| e.to_string())?;
        let asked = broker.client.request(subject.to_owned(), body.into());
        let answer = tokio::time::timeout(PAGE, asked).await;
        let answer = answer.map_err(|_| "a policy service does not tell its view".to_owned())?;
        let answer = answer.map_err(|e| format!("a policy service does not tell its view: {e}"))?;
        let page: ViewReply = serde_json::from_slice(&answer.payload).map_err(|e| e.to_string())?;
        if let Some(error) = page.error {
            return Err(format!("a policy service does not tell its view: {error}"));
        }
        request.after = page.executions.last().map(|last| last.execution);
        view.extend(page.executions.into_iter().map(|e| (e.execution, e)));
        if !page.more {
            return Ok(view);
        }
    }
}
