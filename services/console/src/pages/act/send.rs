//! The requests of an agreed action, and their answers.

use std::time::Instant;

use fiec_broker::api::Operator;
use fiec_schemas::Tenant;
use fiec_schemas::dependency::Dependency;
use fiec_schemas::messages::{ApiReply, BatchReply, BatchVerb, ExecutionRequest};
use futures_util::StreamExt as _;

use super::what::What;
use super::wish::{Target, Wish};
use crate::pages::Listed;
use crate::server::Shared;

/// Requests at once.
const AT_ONCE: usize = 8;

/// Asks for one execution.
async fn one(
    shared: &Shared,
    operator: &Operator,
    wish: &Wish,
    execution: &Listed,
) -> (String, bool) {
    let name = execution.name().to_owned();
    let asked = async {
        let verb = wish.what.of_execution().ok_or("that is for nodes")?;
        let tenant: Tenant = execution
            .tenant
            .parse()
            .map_err(|error| format!("{error}"))?;
        let to = match wish.to.as_str() {
            "" => None,
            node => Some(node.parse().map_err(|error| format!("{error}"))?),
        };
        let request = ExecutionRequest {
            id: execution.execution.clone(),
            who: shared.hub.options.who.clone(),
            to: to.filter(|_| wish.what == What::Move),
            change: wish.change()?,
            ..ExecutionRequest::default()
        };
        let asked = operator.ask(verb, &tenant, &request).await;
        let reply: ApiReply = asked.map_err(|error| error.to_string())?;
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
    shared: &Shared,
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
            match tokio::time::timeout_at(until.into(), one(shared, operator, wish, execution))
                .await
            {
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

/// Sends the requests of an action.
pub(super) async fn all(
    shared: &Shared,
    wish: &Wish,
    target: &Target,
    until: Instant,
) -> Vec<(String, bool)> {
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
                .map(|one| in_time(shared, &operator, wish, one, until))
                .collect();
            let all = futures_util::stream::iter(asked);
            all.buffered(AT_ONCE).collect().await
        }
    }
}
