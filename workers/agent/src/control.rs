//! Requests on `fiec.control.<node>`.

use std::sync::Arc;

use async_nats::{Message, Subscriber};
use fiec_schemas::messages::ControlRequest;
use futures_util::StreamExt;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;

use crate::job::{Request, RunnerOrder};
use crate::prepare::{self, Coming};
use crate::replies::{NotTaken, Reply};
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
        let reply = Reply(reply);
        match serde_json::from_slice::<ControlRequest>(&payload) {
            Ok(request) => handle(&shared, request, reply).await,
            Err(error) => {
                let unreadable = NotTaken::Unreadable(error.to_string());
                shared.answer(reply, Err(unreadable)).await;
            }
        }
    }
}

/// Answers the node's own requests, and passes others to the runner of their execution.
async fn handle(shared: &Arc<Shared>, request: ControlRequest, reply: Reply) {
    match request {
        ControlRequest::Ping => {
            let mut answer = shared.reply(Ok(()));
            answer.running = shared.progress();
            shared.send_reply(reply, &answer).await;
        }
        ControlRequest::Holdings { after } => {
            let mut answer = shared.reply(Ok(()));
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
                return shared.answer(reply, Err(NotTaken::Draining)).await;
            }
            shared.answer(reply, Ok(())).await;
            let coming = Coming {
                execution,
                tenant,
                program,
                substrate,
            };
            tokio::spawn(prepare::prepare(shared.clone(), coming));
        }
        ControlRequest::Prove => {
            shared.prove.notify_one();
            shared.answer(reply, Ok(())).await;
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
            let taken = verify::take(shared, question);
            shared.answer(reply, taken).await;
        }
        request => pass_on(shared, request, reply).await,
    }
}

/// Passes a request to the runner of its execution, which answers it. An order to yield or to give
/// up is answered once it is queued, so that a busy runner does not delay the policy service.
async fn pass_on(shared: &Shared, request: ControlRequest, reply: Reply) {
    let is_taken_at_once = matches!(
        request,
        ControlRequest::Yield { .. } | ControlRequest::GiveUp { .. }
    );
    let runners = match is_taken_at_once {
        true => Reply::default(),
        false => reply.clone(),
    };
    let taken = queue(shared, request, runners);
    if is_taken_at_once || taken.is_err() {
        shared.answer(reply, taken).await;
    }
}

/// Puts a request into the queue of its execution's runner.
fn queue(shared: &Shared, request: ControlRequest, reply: Reply) -> Result<(), NotTaken> {
    let (execution, epoch) = request.runner().ok_or(NotTaken::NotHeld)?;
    let live = shared.live();
    let known = live.get(&execution).ok_or(NotTaken::NotHeld)?;
    if let Some(ordered) = epoch.filter(|epoch| *epoch != known.epoch) {
        let here = known.epoch;
        return Err(NotTaken::Epoch { here, ordered });
    }
    if !known.begun {
        return Err(NotTaken::NotStarted);
    }
    let order = RunnerOrder::Request(Box::new(Request { request, reply }));
    known.control.try_send(order).map_err(|error| match error {
        TrySendError::Full(_) => NotTaken::Busy,
        TrySendError::Closed(_) => NotTaken::Leaving,
    })
}
