//! Requests on `fiec.control.<node>`.

use std::sync::Arc;

use async_nats::{Message, Subject, Subscriber};
use fiec_broker::store;
use fiec_kit::frames::Order;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Epoch, ExecutionId};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::job::Control;
use crate::shared::Shared;
use crate::verify;
use crate::{large, outside};

/// Answers until `stop`.
pub async fn serve(shared: Arc<Shared>, mut requests: Subscriber, stop: CancellationToken) {
    loop {
        let request = tokio::select! {
            () = stop.cancelled() => return,
            request = requests.next() => request,
        };
        let Some(Message { payload, reply, .. }) = request else {
            return;
        };
        match serde_json::from_slice::<ControlRequest>(&payload) {
            Ok(request) => handle(&shared, request, reply).await,
            Err(error) => {
                shared
                    .answer(reply, Some(format!("request cannot be read: {error}")))
                    .await
            }
        }
    }
}

async fn handle(shared: &Arc<Shared>, request: ControlRequest, reply: Option<Subject>) {
    match request {
        ControlRequest::Ping => {
            let mut answer = shared.reply(None);
            answer.running = shared.progress();
            if let (Some(to), Ok(body)) = (reply, serde_json::to_vec(&answer)) {
                let _ = shared.broker.client.publish(to, body.into()).await;
            }
        }
        ControlRequest::Prepare {
            execution,
            tenant,
            program,
            ..
        } => {
            if shared.is_draining() {
                return shared
                    .answer(reply, Some("the node is draining".to_owned()))
                    .await;
            }
            shared.answer(reply, None).await;
            tokio::spawn(prepare(shared.clone(), execution, tenant, program));
        }
        ControlRequest::Yield {
            execution,
            epoch,
            cause,
            to,
            decision,
        } => {
            let control = Control::Yield {
                cause,
                to: to.map(|to| (to, decision)),
            };
            let error = pass(shared, execution, Some(epoch), control).err();
            shared.answer(reply, error).await;
        }
        ControlRequest::Reconfigure {
            execution,
            epoch,
            grant,
            who,
        } => {
            let control = Control::Reconfigure {
                grant,
                who,
                reply: reply.clone(),
            };
            if let Err(error) = pass(shared, execution, Some(epoch), control) {
                shared.answer(reply, Some(error)).await;
            }
        }
        // Answered once it is in the ledger.
        ControlRequest::Adjust {
            execution,
            who,
            change,
        } => {
            let control = Control::Adjust {
                who,
                change: Box::new(change),
                reply: reply.clone(),
            };
            if let Err(error) = pass(shared, execution, None, control) {
                shared.answer(reply, Some(error)).await;
            }
        }
        ControlRequest::Park { .. } | ControlRequest::Unpark { .. } => {
            let error = "this worker does not park";
            shared.answer(reply, Some(error.to_owned())).await;
        }
        ControlRequest::Prove => {
            shared.prove.notify_one();
            shared.answer(reply, None).await;
        }
        ControlRequest::Verify {
            question,
            execution,
            tenant,
            segment,
        } => {
            let question = verify::Question {
                question,
                execution,
                tenant,
                segment,
            };
            let error = verify::take(shared, question).err();
            shared.answer(reply, error).await;
        }
        // Answered once it is in the ledger.
        ControlRequest::Pause { execution, who } => {
            let control = Control::Pause {
                who,
                reply: reply.clone(),
            };
            if let Err(error) = pass(shared, execution, None, control) {
                shared.answer(reply, Some(error)).await;
            }
        }
        ControlRequest::Cancel { execution, who } => {
            let control = Control::Cancel {
                who,
                reply: reply.clone(),
            };
            if let Err(error) = pass(shared, execution, None, control) {
                shared.answer(reply, Some(error)).await;
            }
        }
    }
}

fn pass(
    shared: &Shared,
    execution: ExecutionId,
    epoch: Option<Epoch>,
    control: Control,
) -> Result<(), String> {
    let live = shared.live();
    let known = live.get(&execution).ok_or("the execution is not here")?;
    if let Some(epoch) = epoch.filter(|epoch| *epoch != known.epoch) {
        return Err(format!(
            "the execution is here under epoch {}, not {epoch}",
            known.epoch
        ));
    }
    if !known.begun {
        return Err("the execution is not started".to_owned());
    }
    known
        .control
        .try_send(Box::new(control))
        .map_err(|_| "the execution is leaving, or has too many orders waiting".to_owned())
}

/// Has the program here, a child ready with its inputs parsed, and on this node's disk the objects
/// that the parameters name. What the parameters are, the ledger says.
async fn prepare(
    shared: Arc<Shared>,
    execution: ExecutionId,
    tenant: fiec_schemas::Tenant,
    program: String,
) {
    let found = match outside::find(&shared, &program).await {
        Some(Ok(found)) => found,
        Some(Err(reason)) => {
            return tracing::warn!(%execution, %reason, "cannot prepare the program");
        }
        None => return,
    };
    let package = found.package();
    let state = match shared.ledger.last(&tenant, execution).await {
        Ok(entry) => entry.map(|entry| entry.message.state),
        Err(error) => {
            tracing::warn!(%execution, %error, "cannot read the parameters ahead of time");
            None
        }
    };
    let large = state.as_ref().and_then(|state| state.boundary.clone());
    let large = large.filter(store::is_large);
    let spec = state.and_then(|state| state.spec);
    let spec = spec.filter(|spec| spec.program == program);
    if shared.options.warm {
        let key = (program.clone(), tenant);
        let mut child = match shared.pool.take(&key, execution, package).await {
            Ok(child) => child,
            Err(error) => return tracing::warn!(%execution, %error, "cannot prepare a child"),
        };
        child.prepared_for = Some(execution);
        if let Some(spec) = &spec {
            let order = Order::Prepare {
                program,
                params: spec.params.clone(),
                package: package.map(|p| p.told.clone()),
            };
            if let Err(error) = child.order(&order, &[]).await {
                return tracing::warn!(%execution, %error, "the prepared child is gone");
            }
        }
        // Given at once: orders wait in its socket in their order.
        shared.pool.give(child);
    }
    if let Some(place) = large {
        large::prepare(&shared, execution, &place).await;
    }
    if let Some(spec) = spec {
        shared.data.fetch_ahead(&spec.params).await;
    }
}
