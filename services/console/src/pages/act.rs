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
use fiec_schemas::messages::{ApiReply, BatchRequest, BatchVerb, ExecutionVerb, NodeVerb};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{NodeId, Tenant};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};

use super::executions::{self, Choice};
use super::{Form, Frame, Listed, answer};
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

/// A word of a command line.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/@%+=".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
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
                What::Retry => format!("fiec retry --batch {} --tenant {tenant}", quoted(batch)),
                _ => format!("fiec batch {name} {} --tenant {tenant}", quoted(batch)),
            },
            Target::Executions { chosen, .. } => {
                let tenants: std::collections::BTreeSet<&str> =
                    chosen.iter().map(|one| one.tenant.as_str()).collect();
                let of = |tenant: &str| {
                    let own = chosen.iter().filter(|one| one.tenant == tenant);
                    let ids: Vec<String> = own.map(|one| quoted(one.name())).collect();
                    let each = |id: &String, rest: String| {
                        format!("fiec {name} {id}{rest} --tenant {tenant}")
                    };
                    let lines: Vec<String> = match self.what {
                        What::Move if self.to.is_empty() => ids
                            .iter()
                            .map(|id| format!("fiec yield {id} --tenant {tenant}"))
                            .collect(),
                        What::Move => ids
                            .iter()
                            .map(|id| each(id, format!(" --to {}", quoted(&self.to))))
                            .collect(),
                        What::Adjust => {
                            let to = quoted(&self.priority);
                            ids.iter()
                                .map(|id| each(id, format!(" --priority {to}")))
                                .collect()
                        }
                        What::Pause | What::Resume => {
                            ids.iter().map(|id| each(id, String::new())).collect()
                        }
                        _ => vec![format!("fiec {name} {} --tenant {tenant}", ids.join(" "))],
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
            return Err("the history has no such execution".to_owned());
        }
        return Ok(Target::Executions { chosen, all: 1 });
    }
    let (chosen, all) = executions::chosen(hub, &wish.choice, MOST, frame).await;
    match chosen.is_empty() {
        true => Err("nothing is chosen".to_owned()),
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
                    priority.map_err(|_| "a priority is a whole number from -1000 to 1000")?,
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
        false => one(operator, wish, execution).await,
    }
}

/// Asks for all of a batch, answer after answer.
async fn batch(
    operator: &Operator,
    verb: BatchVerb,
    tenant: &Tenant,
    id: &str,
) -> Vec<(String, bool)> {
    let until = Instant::now() + PATIENCE;
    let mut request = BatchRequest {
        batch: Some(id.to_owned()),
        array: None,
        ids: None,
        who: String::new(),
        within_ms: Some(2_000),
        untaken: None,
        cursor: None,
        failed: false,
    };
    let (mut done, mut underway) = (0, 0);
    loop {
        let reply = match operator.batch(verb, tenant, &request).await {
            Ok(reply) => reply,
            Err(error) => return vec![(error.to_string(), true)],
        };
        done += reply.done;
        underway += reply.underway;
        if let Some(error) = reply.error {
            return vec![(error, true)];
        }
        let is_complete = reply.left == 0 && reply.unread == 0 && reply.untaken.is_none();
        if is_complete || Instant::now() > until {
            let mut said = vec![(
                format!(
                    "{done} done, {underway} at their next boundaries, {} were so already",
                    reply.unconcerned
                ),
                false,
            )];
            if !is_complete {
                said.push((format!("{} are left: do it again", reply.left), true));
            }
            said.extend(reply.reasons.into_iter().map(|why| (why, true)));
            return said;
        }
        request.cursor = reply.cursor;
        request.untaken = reply.untaken.map(|untaken| untaken.upto);
    }
}

async fn act(shared: &Shared, wish: &Wish, target: &Target) -> Vec<(String, bool)> {
    let Some(operator) = shared.hub.operator() else {
        return vec![("NATS does not answer: nothing was done".to_owned(), true)];
    };
    match target {
        Target::Node(node) => {
            let Some(verb) = wish.what.of_node() else {
                return vec![("that is for executions".to_owned(), true)];
            };
            let reply = operator.node(verb, node.clone(), None).await;
            vec![match reply {
                Ok(ApiReply {
                    error: Some(error), ..
                }) => (error, true),
                Ok(reply) => (reply.message, false),
                Err(error) => (error.to_string(), true),
            }]
        }
        Target::Batch { tenant, .. } => match wish.what.of_batch() {
            Some(verb) => batch(&operator, verb, tenant, &wish.whole_batch).await,
            None => vec![("that is for single executions".to_owned(), true)],
        },
        Target::Executions { chosen, .. } => {
            let until = Instant::now() + PATIENCE;
            let asked: Vec<_> = chosen
                .iter()
                .map(|one| in_time(&operator, wish, one, until))
                .collect();
            let all = futures_util::stream::iter(asked);
            all.buffered(AT_ONCE).collect().await
        }
    }
}

async fn made(shared: &Shared, wish: Wish, done: bool) -> Result<Page, String> {
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
    let answers = match done {
        true => Some(act(shared, &wish, &target).await),
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
        back: wish.back(),
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
            "fiec cancel a --tenant t\nfiec cancel b --tenant u"
        );
        assert_eq!(
            both("what=move&to=n1"),
            "fiec move a --to n1 --tenant t\nfiec move b --to n1 --tenant u"
        );
        assert_eq!(
            both("what=move"),
            "fiec yield a --tenant t\nfiec yield b --tenant u"
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
            "fiec retry --batch 'it'\\''s' --tenant t"
        );
    }
}
