//! Requests on `fiec.control.<node>`.

use std::sync::Arc;

use async_nats::{Message, Subject, Subscriber};
use fiec_schemas::messages::{ControlRequest, Refusal};
use fiec_schemas::{Epoch, ExecutionId};
use futures_util::StreamExt;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;

use crate::job::{Control, LEAVING};
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
            shared.send_reply(reply, &answer).await;
        }
        ControlRequest::Holdings { after } => {
            let mut answer = shared.reply(None);
            answer.holdings = Some(shared.holdings(after));
            shared.send_reply(reply, &answer).await;
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
            let taken = pass(shared, execution, Some(epoch), control);
            answer(shared, reply, taken).await;
        }
        ControlRequest::GiveUp {
            execution,
            epoch,
            cause,
        } => {
            let control = Control::GiveUp { cause };
            let taken = pass(shared, execution, Some(epoch), control);
            answer(shared, reply, taken).await;
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
            if let Err(refused) = pass(shared, execution, Some(epoch), control) {
                answer(shared, reply, Err(refused)).await;
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
            if let Err(refused) = pass(shared, execution, None, control) {
                answer(shared, reply, Err(refused)).await;
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
            if let Err(refused) = pass(shared, execution, Some(epoch), control) {
                answer(shared, reply, Err(refused)).await;
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
            if let Err(refused) = pass(shared, execution, Some(epoch), control) {
                answer(shared, reply, Err(refused)).await;
            }
        }
        ControlRequest::Split { execution, epoch } => {
            let control = Control::Split {
                reply: reply.clone(),
            };
            if let Err(refused) = pass(shared, execution, Some(epoch), control) {
                answer(shared, reply, Err(refused)).await;
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
            if let Err(refused) = pass(shared, execution, None, control) {
                answer(shared, reply, Err(refused)).await;
            }
        }
        ControlRequest::Cancel { execution, who } => {
            let control = Control::Cancel {
                who,
                reply: reply.clone(),
            };
            if let Err(refused) = pass(shared, execution, None, control) {
                answer(shared, reply, Err(refused)).await;
            }
        }
    }
}

/// Why an order cannot be passed on to its execution.
enum NotTaken {
    /// The execution is not here.
    NotHeld,
    /// It is here under this epoch, not that of the order.
    Epoch { here: Epoch, ordered: Epoch },
    /// It waits for a slot.
    NotStarted,
    /// Its last message is under way.
    Leaving,
    /// It has too many orders waiting.
    Busy,
}

impl NotTaken {
    fn in_words(&self) -> String {
        match self {
            Self::NotHeld => "the execution is not here".to_owned(),
            Self::Epoch { here, ordered } => {
                format!("the execution is here under epoch {here}, not {ordered}")
            }
            Self::NotStarted => "the execution is not started".to_owned(),
            Self::Leaving => LEAVING.to_owned(),
            Self::Busy => "the execution has too many orders waiting".to_owned(),
        }
    }
}

async fn answer(shared: &Shared, to: Option<Subject>, taken: Result<(), NotTaken>) {
    let refused = taken.err();
    let mut reply = shared.reply(refused.as_ref().map(NotTaken::in_words));
    reply.refusal = match refused {
        Some(NotTaken::NotHeld) => Some(Refusal::NotHeld),
        Some(NotTaken::Epoch { .. } | NotTaken::NotStarted | NotTaken::Leaving) => {
            Some(Refusal::Moving)
        }
        Some(NotTaken::Busy) | None => None,
    };
    shared.send_reply(to, &reply).await;
}

fn pass(
    shared: &Shared,
    execution: ExecutionId,
    epoch: Option<Epoch>,
    control: Control,
) -> Result<(), NotTaken> {
    let live = shared.live();
    let known = live.get(&execution).ok_or(NotTaken::NotHeld)?;
    if let Some(ordered) = epoch.filter(|epoch| *epoch != known.epoch) {
        let here = known.epoch;
        return Err(NotTaken::Epoch { here, ordered });
    }
    if !known.begun {
        return Err(NotTaken::NotStarted);
    }
    let sent = known.control.try_send(Box::new(control));
    sent.map_err(|error| match error {
        TrySendError::Full(_) => NotTaken::Busy,
        TrySendError::Closed(_) => NotTaken::Leaving,
    })
}
