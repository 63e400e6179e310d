//! Actions: what will be done, to whom, and with which command line; then the answer. A page asks
//! before anything is done, and works without a script. Policy services record who asked.

mod send;
mod what;
mod wish;

use std::sync::Arc;
use std::time::{Duration, Instant};

use askama::Template;
use axum::Form as Posted;
use axum::extract::{Query as Given, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use self::what::What;
use self::wish::{MOST, Target, Wish, target};
use super::executions::{self, Choice};
use super::{Form, Frame, Listed, answer};
use crate::server::Shared;
use crate::words;

/// Executions that a page names, of those that an action concerns.
const NAMED: usize = 30;
/// Time for which a page goes on with an action on many.
const PATIENCE: Duration = Duration::from_secs(12);

#[derive(Debug, Template, Serialize)]
#[template(path = "act.html")]
struct Page {
    frame: Frame,
    what: What,
    wish: Wish,
    /// Who is affected, in one line.
    affected: String,
    named: Vec<Listed>,
    more: usize,
    /// Nodes that a move may name.
    nodes: Vec<String>,
    /// Where the reader came from.
    back: String,
    /// Answers, once it is done: words, and whether it was refused.
    answers: Option<Vec<(String, bool)>>,
}

impl Page {
    fn is_move(&self) -> bool {
        self.what == What::Move
    }

    fn is_adjust(&self) -> bool {
        self.what == What::Adjust
    }

    /// A retry of one execution may give it more memory.
    fn may_change_memory(&self) -> bool {
        self.what == What::Retry && !self.wish.execution.is_empty()
    }
}

async fn made(shared: &Shared, mut wish: Wish, done: bool) -> Result<Page, String> {
    let until = Instant::now() + PATIENCE;
    let back = wish.back();
    let title = format!("{} …", wish.what.name());
    let mut frame = Frame::new(title, "", "");
    let target = target(shared, &wish, &mut frame).await?;
    let affected = match &target {
        Target::Node(node) => format!("node {node}"),
        Target::Batch { name, members, .. } => {
            format!("all {} members of batch {name}", words::count(members))
        }
        Target::Executions { chosen, .. } if chosen.len() == 1 => chosen
            .first()
            .map(|one| one.name().to_owned())
            .unwrap_or_default(),
        Target::Executions { chosen, all } if *all > MOST => {
            format!(
                "the first {} of {} executions",
                chosen.len(),
                words::count(all)
            )
        }
        Target::Executions { chosen, .. } => format!("{} executions", chosen.len()),
    };
    frame.title = format!("{} {affected}", wish.what.name());
    frame.command = wish.command(&target);
    let many = match &target {
        Target::Executions { chosen, .. } if wish.execution.is_empty() => Some(chosen),
        _ => None,
    };
    if let Some(chosen) = many {
        // An execution that is submitted later was not on the page that the person agreed to.
        if wish.choice.before.is_empty() {
            let newest = chosen.iter().map(|one| one.submitted_at).max();
            wish.choice.before = newest.map(|at| at.to_string()).unwrap_or_default();
        }
        let agreed = wish.agreed.parse::<usize>().ok();
        wish.agreed = chosen.len().to_string();
        if done && agreed.is_none_or(|agreed| chosen.len() > agreed) {
            frame.troubles.push(format!(
                "meanwhile there are {} where there were {}: look again before you agree",
                chosen.len(),
                agreed.unwrap_or(0)
            ));
        }
    }
    let answers = match done && frame.troubles.is_empty() {
        true => Some(send::all(shared, &wish, &target, until).await),
        false => None,
    };
    let (named, more) = match target {
        Target::Executions { mut chosen, .. } => {
            let more = chosen.len().saturating_sub(NAMED);
            chosen.truncate(NAMED);
            (chosen, more)
        }
        // They move away.
        Target::Node(node) if wish.what == What::Drain && !done => {
            let there = Choice {
                phase: "bound,started".to_owned(),
                node: node.to_string(),
                ..Choice::default()
            };
            let most = i64::try_from(NAMED).unwrap_or(i64::MAX);
            let (chosen, all) = executions::chosen(&shared.hub, &there, most, &mut frame).await;
            let all = usize::try_from(all).unwrap_or(0);
            let more = all.saturating_sub(chosen.len());
            (chosen, more)
        }
        Target::Node(_) | Target::Batch { .. } => (Vec::new(), 0),
    };
    // One execution cannot move to where it is.
    let here = match &named[..] {
        [one] if more == 0 && ["bound", "started"].contains(&&*one.phase) => one.node.as_ref(),
        _ => None,
    };
    let nodes = shared.hub.nodes.now().value;
    let nodes = nodes
        .iter()
        .flat_map(|nodes| &nodes.0)
        .map(|node| node.name.clone())
        .filter(|node| Some(node) != here);
    Ok(Page {
        nodes: nodes.collect(),
        back,
        what: wish.what,
        frame,
        wish,
        affected,
        named,
        more,
        answers,
    })
}

/// `/act`: what would be done.
pub async fn ask(
    State(shared): State<Arc<Shared>>,
    Given(wish): Given<Wish>,
    Given(form): Given<Form>,
) -> Response {
    match made(&shared, wish, false).await {
        Ok(page) => answer(&page, &form),
        Err(why) => (StatusCode::NOT_FOUND, why).into_response(),
    }
}

/// `/act`, posted: it is done.
pub async fn done(State(shared): State<Arc<Shared>>, Posted(wish): Posted<Wish>) -> Response {
    match made(&shared, wish, true).await {
        Ok(page) => answer(&page, &Form::default()),
        Err(why) => (StatusCode::NOT_FOUND, why).into_response(),
    }
}
