//! Requests on `fiec.control.<node>`.

use std::sync::Arc;

use async_nats::{Message, Subject, Subscriber};
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Epoch, ExecutionId};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::job::Control;
use crate::prepare::{self, Coming};
use crate::shared::Shared;
use crate::verify;

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
            substrate,
            ..
        } => {
            if shared.is_draining() {
                return shared
                    .answer(reply, Some("the node is draining".to_owned()))
                    .await;
            }
            shared.answer(reply, None).await;
            let coming = Coming {
                execution,
                tenant,
                program,
                substrate,
            };
            tokio::spawn(prepare::prepare(shared.clone(), coming));
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
        ControlRequest::GiveUp {
            execution,
            epoch,
            cause,
        } => {
            let control = Control::GiveUp { cause };
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
        ControlRequest::Park {
            execution,
            epoch,
            cause,
            keep,
        } => {
            let control = Control::Park {
                cause,
                keep,
                reply: reply.clone(),
            };
            if let Err(error) = pass(shared, execution, Some(epoch), control) {
                shared.answer(reply, Some(error)).await;
            }
        }
        ControlRequest::Unpark {
            execution,
            epoch,
            reason,
        } => {
            let control = Control::Unpark {
                reason,
                reply: reply.clone(),
            };
            if let Err(error) = pass(shared, execution, Some(epoch), control) {
                shared.answer(reply, Some(error)).await;
            }
        }
        ControlRequest::Split { execution, epoch } => {
            let control = Control::Split {
                reply: reply.clone(),
            };
            if let Err(error) = pass(shared, execution, Some(epoch), control) {
                shared.answer(reply, Some(error)).await;
            }
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
