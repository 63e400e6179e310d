//! Questions to the core, which is one task. Each question has a deadline. So a busy or stuck core
//! does not hold up the API, which answers a bounded number of requests at once.

use std::time::Duration;

use tokio::sync::mpsc::{Permit, Sender};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::Answered;
use crate::events::{Ask, Outcome};
use crate::refusal::Refusal;

/// Reserves a place in the core's channel, so that its owner can send without waiting.
///
/// # Errors
/// If the channel stays full for this time, or the core is ending.
pub(super) async fn room(
    core: &Sender<Outcome>,
    within: Duration,
) -> Answered<Permit<'_, Outcome>> {
    room_until(core, Instant::now() + within, within).await
}

/// Asks the core and waits for its answer.
///
/// # Errors
/// If the core does not answer within this time, or is ending.
pub(super) async fn ask<T>(
    core: &Sender<Outcome>,
    within: Duration,
    make: impl FnOnce(oneshot::Sender<T>) -> Ask,
) -> Answered<T> {
    let deadline = Instant::now() + within;
    let room = room_until(core, deadline, within).await?;
    let (reply, answer) = oneshot::channel();
    let ask = make(reply);
    let orders = ask.is_order();
    room.send(Outcome::Ask(ask));
    match timeout_at(deadline, answer).await {
        Ok(Err(_)) if orders => Err(Refusal::EndedUnanswered),
        Ok(answer) => answer.map_err(|_| Refusal::Ending),
        Err(_) => Err(Refusal::Unanswered { within }),
    }
}

async fn room_until(
    core: &Sender<Outcome>,
    deadline: Instant,
    within: Duration,
) -> Answered<Permit<'_, Outcome>> {
    match timeout_at(deadline, core.reserve()).await {
        Ok(room) => room.map_err(|_| Refusal::Ending),
        Err(_) => Err(Refusal::NoRoom { within }),
    }
}

#[cfg(test)]
mod tests {
    use fiec_schemas::messages::RefusalCode;
    use tokio::sync::mpsc;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn a_core_that_never_answers_is_not_waited_for_and_may_have_done_what_was_asked() {
        let (core, mut asked) = mpsc::channel(1);
        let refusal = ask(&core, SOON, Ask::Nodes).await.unwrap_err();
        assert!(matches!(refusal, Refusal::Unanswered { within: SOON }));
        let error = refusal.to_string();
        assert!(error.contains("did not answer within 50 ms"), "{error}");
        assert!(error.contains("check `fiec status` before"), "{error}");
        let Some(Outcome::Ask(Ask::Nodes(reply))) = asked.recv().await else {
            panic!("the core was not asked");
        };
        assert!(reply.is_closed(), "nobody waits for its answer any more");
    }

    #[tokio::test]
    async fn a_core_without_room_is_not_waited_for_and_was_asked_nothing() {
        let (core, mut asked) = mpsc::channel(1);
        let full = core.reserve().await.unwrap();
        for refusal in [
            ask(&core, SOON, Ask::Lost).await.unwrap_err(),
            room(&core, SOON).await.map(drop).unwrap_err(),
        ] {
            assert_eq!(refusal.code(), RefusalCode::Busy);
            let error = refusal.to_string();
            assert!(error.contains("queue was full"), "{error}");
            assert!(error.contains("nothing was changed"), "{error}");
        }
        drop(full);
        assert!(asked.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_core_that_ends_says_so_at_once_and_one_that_answers_is_heard() {
        let (core, mut asked) = mpsc::channel(1);
        let long = Duration::from_secs(60);
        let answers = async {
            if let Some(Outcome::Ask(Ask::Lost(reply))) = asked.recv().await {
                reply.send(Default::default()).unwrap();
            }
            for _ in 0..2 {
                drop(asked.recv().await.unwrap());
            }
            drop(asked);
        };
        let asks = async {
            let heard = ask(&core, long, Ask::Lost).await;
            assert!(heard.is_ok_and(|lost| lost.is_empty()));
            let order = |reply| Ask::Yield {
                execution: "00000000-0000-0000-0000-000000000001".parse().unwrap(),
                to: None,
                who: "ann".to_owned(),
                reply,
            };
            let refusal = ask(&core, long, order).await.unwrap_err();
            assert!(matches!(refusal, Refusal::EndedUnanswered));
            assert!(!refusal.code().is_momentary(), "it may have been done");
            for _ in 0..2 {
                let refusal = ask(&core, long, Ask::Lost).await.unwrap_err();
                assert!(matches!(refusal, Refusal::Ending));
                assert!(refusal.code().is_momentary());
            }
        };
        tokio::join!(answers, asks);
    }
}
