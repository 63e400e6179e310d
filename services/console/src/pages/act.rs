//! Actions: what will be done, to whom, and with which command line; then the answer. A page asks
//! before anything is done, and works without a script. Policy services record who asked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use askama::Template;
use axum::Form as Posted;
use axum::extract::{Query as Given, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use fiec_broker::api::Operator;
use fiec_schemas::dependency::Dependency;
use fiec_schemas::messages::{ApiReply, BatchReply, BatchVerb, ExecutionVerb, NodeVerb};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{NodeId, Tenant};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};

use super::executions::{self, Choice};
use super::{Form, Frame, Listed, answer, quoted};
use crate::database::Query;
use crate::server::Shared;
use crate::words;

/// Executions that one action by choice reaches.
const MOST: i64 = 1_000;
/// Of which so many are named.
const NAMED: usize = 30;
/// Requests at once.
const AT_ONCE: usize = 8;
/// Time for which a page goes on with an action on many.
const PATIENCE: Duration = Duration::from_secs(12);

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// End it.
    Cancel,
    /// Pause it at its next boundary.
    Pause,
    /// Go on with it.
    Resume,
    /// Start it again from its last commit.
    Retry,
    /// Move it at its next boundary.
    Move,
    /// Change its priority.
    Adjust,
    /// Place nothing new on a node.
    Cordon,
    /// Place work on it again.
    Uncordon,
    /// Move everything away from it.
    Drain,
    /// End a drain.
    Undrain,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Retry => "retry",
            Self::Move => "move",
            Self::Adjust => "adjust",
            Self::Cordon => "cordon",
            Self::Uncordon => "uncordon",
            Self::Drain => "drain",
            Self::Undrain => "undrain",
        }
    }

    /// What it means, for a person who is asked.
    fn meaning(self) -> &'static str {
        match self {
            Self::Cancel => {
                "It ends at once, without another commit. A retry starts it again from its last one."
            }
            Self::Pause => {
                "It commits its next boundary, gives its place back and waits until it is resumed."
            }
            Self::Resume => "It goes on as soon as there is a place.",
            Self::Retry => {
                "It starts again from its last commit, under its id and with one history."
            }
            Self::Move => "It commits its next boundary and goes on elsewhere, with the same bits.",
            Self::Adjust => "Its new priority holds at once, also for what waits.",
            Self::Cordon => "Nothing new is placed there. What computes there goes on.",
            Self::Uncordon => "Work is placed there again.",
            Self::Drain => {
                "Nothing new is placed there. What computes there moves away at its next boundary."
            }
            Self::Undrain => "Work is placed there again, and nothing more moves away.",
        }
    }

    fn of_execution(self) -> Option<ExecutionVerb> {
        match self {
            Self::Cancel => Some(ExecutionVerb::Cancel),
            Self::Pause => Some(ExecutionVerb::Pause),
            Self::Resume => Some(ExecutionVerb::Resume),
            Self::Retry => Some(ExecutionVerb::Retry),
            Self::Move => Some(ExecutionVerb::Yield),
            Self::Adjust => Some(ExecutionVerb::Adjust),
            Self::Cordon | Self::Uncordon | Self::Drain | Self::Undrain => None,
        }
    }

    fn of_batch(self) -> Option<BatchVerb> {
        match self {
            Self::Cancel => Some(BatchVerb::Cancel),
            Self::Pause => Some(BatchVerb::Pause),
            Self::Resume => Some(BatchVerb::Resume),
            Self::Retry => Some(BatchVerb::Retry),
            _ => None,
        }
    }

    /// Phases of executions that it concerns.
    fn phases(self) -> &'static [&'static str] {
        match self {
            Self::Cancel | Self::Adjust => {
                &["pending", "bound", "started", "paused", "held", "verifying"]
            }
            Self::Pause | Self::Move => &["pending", "bound", "started"],
            Self::Resume => &["paused"],
            Self::Retry => &["failed", "held", "cancelled"],
            Self::Cordon | Self::Uncordon | Self::Drain | Self::Undrain => &[],
        }
    }

    /// What of a choice it concerns.
    fn of_chosen(self, choice: &Choice) -> Choice {
        let named: Vec<&str> = choice.phase.split(',').filter(|p| !p.is_empty()).collect();
        let own = self.phases().iter().copied();
        let both: Vec<&str> = own
            .filter(|p| named.is_empty() || named.contains(p))
            .collect();
        Choice {
            // No phase has this name.
            phase: if both.is_empty() {
                "none".to_owned()
            } else {
                both.join(",")
            },
            skip: 0,
            ..choice.clone()
        }
    }

    fn of_node(self) -> Option<NodeVerb> {
        match self {
            Self::Cordon => Some(NodeVerb::Cordon),
            Self::Uncordon => Some(NodeVerb::Uncordon),
            Self::Drain => Some(NodeVerb::Drain),
            Self::Undrain => Some(NodeVerb::Undrain),
            _ => None,
        }
    }
}

/// A wish, as its address or its form has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Wish {
    what: What,
    /// One execution, by its UUID.
    #[serde(default)]
    execution: String,
    /// All of a batch, by its UUID.
    #[serde(default)]
    whole_batch: String,
    /// A node.
    #[serde(default)]
    on: String,
    /// For a move: where to; empty: the best other node.
    #[serde(default)]
    to: String,
    /// For an adjustment.
    #[serde(default)]
    priority: String,
    /// How many the person has agreed to.
    #[serde(default)]
    agreed: String,
    #[serde(flatten)]
    choice: Choice,
}

/// On whom.
enum Target {
    Node(NodeId),
    Batch {
        tenant: Tenant,
        name: String,
        members: i64,
    },
    Executions {
        chosen: Vec<Listed>,
        all: i64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct OfBatch {
    tenant: String,
    name: Option<String>,
    executions: i64,
}

const BATCH: &str = "SELECT tenant, name, executions FROM batch_summary WHERE batch = $1::uuid";
const ONE: &str = "SELECT execution, client_id, tenant, program, phase, node, boundary, boundaries_in_all, \
    progress, submitted_at, finished_at, rebindings, failure FROM execution_summary WHERE execution = $1::uuid";

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
}

impl Wish {
    /// The commands that do the same.
    fn command(&self, target: &Target) -> String {
        let name = self.what.name();
        match target {
            Target::Node(node) => format!("fiec {name} {node}"),
            Target::Batch {
                tenant,
                name: batch,
                ..
            } => match self.what {
                What::Retry => format!("fiec retry --batch={} --tenant {tenant}", quoted(batch)),
                _ => format!("fiec batch {name} --tenant {tenant} -- {}", quoted(batch)),
            },
            Target::Executions { chosen, .. } => {
                let tenants: std::collections::BTreeSet<&str> =
                    chosen.iter().map(|one| one.tenant.as_str()).collect();
                let of = |tenant: &str| {
                    let own = chosen.iter().filter(|one| one.tenant == tenant);
                    let ids: Vec<String> = own.map(|one| quoted(one.name())).collect();
                    let each = |id: &String, rest: String| {
                        format!("fiec {name} --tenant {tenant}{rest} -- {id}")
                    };
                    let lines: Vec<String> = match self.what {
                        What::Move if self.to.is_empty() => ids
                            .iter()
                            .map(|id| format!("fiec yield --tenant {tenant} -- {id}"))
                            .collect(),
                        What::Move => ids
                            .iter()
                            .map(|id| each(id, format!(" --to {}", quoted(&self.to))))
                            .collect(),
                        What::Adjust => {
                            let to = match self.priority.as_str() {
                                "" => "PRIORITY".to_owned(),
                                given => quoted(given),
                            };
                            ids.iter()
                                .map(|id| each(id, format!(" --priority {to}")))
                                .collect()
                        }
                        What::Pause | What::Resume => {
                            ids.iter().map(|id| each(id, String::new())).collect()
                        }
                        _ => vec![format!(
                            "fiec {name} --tenant {tenant} -- {}",
                            ids.join(" ")
                        )],
                    };
                    let few: Vec<String> = lines.iter().take(10).cloned().collect();
                    let more = lines.len().saturating_sub(few.len());
                    let rest = if more > 0 {
                        format!("\n# and {more} more")
                    } else {
                        String::new()
                    };
                    format!("{}{rest}", few.join("\n"))
                };
                tenants.into_iter().map(of).collect::<Vec<_>>().join("\n")
            }
        }
    }

    fn back(&self) -> String {
        let encoded = executions::encoded;
        if !self.on.is_empty() {
            return format!("/nodes#node-{}", encoded(&self.on));
        }
        if !self.whole_batch.is_empty() {
            return format!("/batches/{}", encoded(&self.whole_batch));
        }
        if !self.execution.is_empty() {
            return format!("/executions/{}", encoded(&self.execution));
        }
        self.choice.address()
    }
}

/// That there is no such thing, or that it cannot be known now.
fn none(what: &str, frame: &Frame) -> String {
    match frame.troubles.first() {
        Some(trouble) => trouble.clone(),
        None => format!("the history has no such {what}"),
    }
}

/// Finds whom a wish is about.
async fn target(shared: &Shared, wish: &Wish, frame: &mut Frame) -> Result<Target, String> {
    let hub = &shared.hub;
    if wish.what.of_node().is_some() {
        let node = wish.on.parse().map_err(|error| format!("{error}"))?;
        return Ok(Target::Node(node));
    }
    if !wish.whole_batch.is_empty() {
        if wish.what.of_batch().is_none() {
            return Err(format!("{} is for single executions", wish.what.name()));
        }
        let query = Query::of(BATCH).with(wish.whole_batch.as_str());
        let found: Vec<OfBatch> = frame.rows(hub, "The batch", &query).await;
        let found = found
            .into_iter()
            .next()
            .ok_or("the history has no such batch")?;
        return Ok(Target::Batch {
            tenant: found.tenant.parse().map_err(|error| format!("{error}"))?,
            name: found.name.unwrap_or_else(|| wish.whole_batch.clone()),
            members: found.executions,
        });
    }
    if !wish.execution.is_empty() {
        let query = Query::of(ONE).with(wish.execution.as_str());
        let chosen: Vec<Listed> = frame.rows(hub, "The execution", &query).await;
        if chosen.is_empty() {
            return Err(none("execution", frame));
        }
        return Ok(Target::Executions { chosen, all: 1 });
    }
    let choice = wish.what.of_chosen(&wish.choice);
    let (chosen, all) = executions::chosen(hub, &choice, MOST, frame).await;
    match chosen.is_empty() {
        true if frame.troubles.is_empty() => Err(format!(
            "nothing that is chosen is in a phase to {}",
            wish.what.name()
        )),
        true => Err(frame.troubles.join("\n")),
        false => Ok(Target::Executions { chosen, all }),
    }
}

/// Asks for one execution.
async fn one(operator: &Operator, wish: &Wish, execution: &Listed) -> (String, bool) {
    let name = execution.name().to_owned();
    let asked = async {
        let verb = wish.what.of_execution().ok_or("that is for nodes")?;
        let tenant: Tenant = execution
            .tenant
            .parse()
            .map_err(|error| format!("{error}"))?;
        let id = execution.execution.as_str();
        let reply: ApiReply = if verb == ExecutionVerb::Adjust {
            let priority = wish.priority.trim().parse();
            let change = Adjustment {
                priority: Some(
                    priority.map_err(|_| "a priority is a whole number from -100 to 100")?,
                ),
                ..Adjustment::default()
            };
            operator
                .adjust(&tenant, id, change)
                .await
                .map_err(|error| error.to_string())?
        } else {
            let to = match wish.to.as_str() {
                "" => None,
                node => Some(node.parse().map_err(|error| format!("{error}"))?),
            };
            let to = to.filter(|_| verb == ExecutionVerb::Yield);
            let asked = operator.execution(verb, &tenant, id, to).await;
            asked.map_err(|error| error.to_string())?
        };
        match reply.error {
            Some(error) => Err(error),
            None => Ok(reply.message),
        }
    };
    match asked.await {
        Ok(words) => (format!("{name}: {words}"), false),
        Err::<_, String>(words) => (format!("{name}: {words}"), true),
    }
}

/// Asks for one execution of many, unless it takes too long already.
async fn in_time(
    operator: &Operator,
    wish: &Wish,
    execution: &Listed,
    until: Instant,
) -> (String, bool) {
    match Instant::now() > until {
        true => (
            format!("{}: not asked for, do it again", execution.name()),
            true,
        ),
        false => {
            match tokio::time::timeout_at(until.into(), one(operator, wish, execution)).await {
                Ok(answered) => answered,
                Err(_) => (format!("{}: asked, no answer yet", execution.name()), true),
            }
        }
    }
}

/// Asks for all of a batch, answer after answer.
async fn batch(
    operator: &Operator,
    verb: BatchVerb,
    tenant: &Tenant,
    id: &str,
    until: Instant,
) -> Vec<(String, bool)> {
    let of = Dependency {
        batch: Some(id.to_owned()),
        ..Dependency::default()
    };
    let goes_on = |_: &BatchReply| Instant::now() < until;
    let (reply, is_complete) = match operator
        .all_of_batch(verb, tenant, &of, false, goes_on)
        .await
    {
        Ok(answered) => answered,
        Err(error) => return vec![(error.to_string(), true)],
    };
    let mut said = vec![(
        format!(
            "{} done, {} at their next boundaries, {} were so already",
            reply.done, reply.underway, reply.unconcerned
        ),
        false,
    )];
    said.extend(reply.error.map(|error| (error, true)));
    if reply.failed > 0 {
        said.push((format!("{} could not be asked", reply.failed), true));
    }
    if !is_complete {
        said.push((format!("{} are left: do it again", reply.left), true));
    }
    said.extend(reply.reasons.into_iter().map(|why| (why, true)));
    said
}

async fn act(shared: &Shared, wish: &Wish, target: &Target, until: Instant) -> Vec<(String, bool)> {
    let Some(operator) = shared.hub.operator() else {
        return vec![("NATS does not answer: nothing was done".to_owned(), true)];
    };
    match target {
        Target::Node(node) => {
            let Some(verb) = wish.what.of_node() else {
                return vec![("that is for executions".to_owned(), true)];
            };
            let reply = operator.node(verb, node.clone(), None);
            let Ok(reply) = tokio::time::timeout_at(until.into(), reply).await else {
                return vec![(format!("{node}: asked, no answer yet"), true)];
            };
            vec![match reply {
                Ok(ApiReply {
                    error: Some(error), ..
                }) => (error, true),
                Ok(reply) => (reply.message, false),
                Err(error) => (error.to_string(), true),
            }]
        }
        Target::Batch { tenant, .. } => match wish.what.of_batch() {
            Some(verb) => batch(&operator, verb, tenant, &wish.whole_batch, until).await,
            None => vec![("that is for single executions".to_owned(), true)],
        },
        Target::Executions { chosen, .. } => {
            let asked: Vec<_> = chosen
                .iter()
                .map(|one| in_time(&operator, wish, one, until))
                .collect();
            let all = futures_util::stream::iter(asked);
            all.buffered(AT_ONCE).collect().await
        }
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
        // Whoever comes later was not seen by the person who agrees.
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
        true => Some(act(shared, &wish, &target, until).await),
        false => None,
    };
    let (named, more) = match target {
        Target::Executions { mut chosen, .. } => {
            let more = chosen.len().saturating_sub(NAMED);
            chosen.truncate(NAMED);
            (chosen, more)
        }
        _ => (Vec::new(), 0),
    };
    let nodes = shared.hub.nodes.now().value;
    let nodes = nodes
        .iter()
        .flat_map(|nodes| &nodes.0)
        .map(|node| node.name.clone());
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

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(query: &str) -> Wish {
        let given: Given<Wish> =
            Given::try_from_uri(&format!("/act?{query}").parse().unwrap()).unwrap();
        given.0
    }

    fn listed(name: &str, tenant: &str) -> Listed {
        Listed {
            execution: "u".to_owned(),
            client_id: Some(name.to_owned()),
            tenant: tenant.to_owned(),
            program: None,
            phase: "started".to_owned(),
            node: None,
            boundary: 0,
            boundaries_in_all: None,
            progress: None,
            submitted_at: fiec_schemas::Timestamp::from_micros(0),
            finished_at: None,
            rebindings: 0,
            failure: None,
        }
    }

    #[test]
    fn the_command_line_does_the_same() {
        let both = |query: &str| {
            let target = Target::Executions {
                chosen: vec![listed("a", "t"), listed("b", "u")],
                all: 2,
            };
            wish(query).command(&target)
        };
        assert_eq!(
            both("what=cancel"),
            "fiec cancel --tenant t -- a\nfiec cancel --tenant u -- b"
        );
        assert_eq!(
            both("what=move&to=n1"),
            "fiec move --tenant t --to n1 -- a\nfiec move --tenant u --to n1 -- b"
        );
        assert_eq!(
            both("what=move"),
            "fiec yield --tenant t -- a\nfiec yield --tenant u -- b"
        );
        let node = Target::Node("n1".parse().unwrap());
        assert_eq!(wish("what=drain&on=n1").command(&node), "fiec drain n1");
        let batch = Target::Batch {
            tenant: "t".parse().unwrap(),
            name: "it's".to_owned(),
            members: 3,
        };
        assert_eq!(
            wish("what=retry").command(&batch),
            "fiec retry --batch='it'\\''s' --tenant t"
        );
    }
}
