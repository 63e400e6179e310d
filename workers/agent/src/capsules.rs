//! Bindings that arrive on the node's durable consumer.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_nats::Subject;
use async_nats::jetstream::consumer::pull::MessagesErrorKind;
use fiec_broker::{AppendError, BrokerError, Draft, Tip, capsules};
use fiec_schemas::Event;
use fiec_schemas::messages::{CapsuleBinding, CapsuleMessage};
use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::job::{CapsuleAck, Job, Live, Start, Stored};
use crate::shared::{Shared, enqueue};

/// The consumer's limit of messages without an acknowledgement.
const UNACKNOWLEDGED: usize = 20_000;
/// A third of the consumer's acknowledgement wait.
const IN_PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// How often the server says that it still has the request. After twice this time without a word the
/// consumer is opened again.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Pulls until `stop`.
pub async fn pull(shared: Arc<Shared>, stop: CancellationToken) {
    let (acks, inbox) = mpsc::channel(UNACKNOWLEDGED);
    tokio::spawn(acknowledge(shared.clone(), inbox));
    // Kept across reconnections: an unacknowledged capsule must not come again.
    let mut held = Vec::new();
    while !stop.is_cancelled() {
        if let Err(error) = pull_once(&shared, &acks, &mut held, &stop).await {
            tracing::warn!(%error, node = %shared.node(), "cannot pull capsules; trying again");
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
        }
    }
}

async fn acknowledge(shared: Arc<Shared>, mut inbox: mpsc::Receiver<Subject>) {
    while let Some(reply) = inbox.recv().await {
        // The bindings of a halted agent are not settled, so they must not be acknowledged.
        if !shared.halt.is_cancelled()
            && let Err(error) = shared.broker.client.publish(reply, "".into()).await
        {
            tracing::warn!(%error, "cannot acknowledge a capsule; it will come again");
        }
    }
}

async fn pull_once(
    shared: &Arc<Shared>,
    acks: &mpsc::Sender<Subject>,
    held: &mut Vec<Weak<CapsuleAck>>,
    stop: &CancellationToken,
) -> Result<(), BrokerError> {
    let consumer =
        capsules::node_consumer(&shared.broker, shared.options.shard, shared.node()).await?;
    let mut messages = consumer
        .stream()
        .max_messages_per_batch(1_000)
        .expires(Duration::from_secs(30))
        .heartbeat(HEARTBEAT)
        .messages()
        .await
        .map_err(BrokerError::operation("pull capsules"))?;
    let mut tick = tokio::time::interval(IN_PROGRESS_EVERY);
    let mut connections = shared.broker.connections();
    connections.mark_unchanged();
    loop {
        let message = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            // A restarted broker may have lost the consumer: open it again at once.
            Ok(()) = connections.changed() => return Ok(()),
            message = messages.next() => message,
            _ = tick.tick() => {
                held.retain(|ack| ack.strong_count() > 0);
                for ack in held.iter().filter_map(Weak::upgrade) {
                    let sent = shared.broker.client.publish(ack.reply.clone(), "+WPI".into()).await;
                    if let Err(error) = sent {
                        tracing::warn!(%error, "cannot say that a capsule is in progress");
                    }
                }
                continue;
            }
        };
        let message = match message {
            Some(Ok(message)) => message,
            Some(Err(error)) if error.kind() == MessagesErrorKind::MissingHeartbeat => {
                // A server that removes a consumer may pass over a request that has just arrived. The
                // stream would ask again only when its request is too old.
                tracing::debug!(%error, "capsule stream");
                return Ok(());
            }
            Some(Err(error)) => return Err(BrokerError::operation("pull capsules")(error)),
            None => return Ok(()),
        };
        let Some(reply) = message.reply.clone() else {
            continue;
        };
        let ack = Arc::new(CapsuleAck {
            reply,
            acks: acks.clone(),
        });
        match serde_json::from_slice::<CapsuleMessage>(&message.payload) {
            Ok(capsule) if capsule.v == 1 => {
                let seen_in = shared.seen_in(capsule.server.as_deref());
                for binding in capsule.bindings {
                    take(shared, binding, seen_in, &ack);
                }
            }
            Ok(capsule) => tracing::error!(
                version = capsule.v,
                "capsule of an unknown version was dropped"
            ),
            Err(error) => tracing::error!(%error, "malformed capsule was dropped"),
        }
        if Arc::strong_count(&ack) > 1 {
            held.push(Arc::downgrade(&ack));
        }
    }
}

/// Queues a binding. Drops it if it is not for this instance, or is known already.
fn take(shared: &Arc<Shared>, binding: CapsuleBinding, seen_in: u64, ack: &Arc<CapsuleAck>) {
    let CapsuleBinding {
        seq,
        digest,
        mut state,
    } = binding;
    Arc::make_mut(&mut state).resolve(seq);
    let mine = shared.is_bound_here(&state);
    let (execution, epoch) = (state.execution, state.epoch);
    if !mine {
        tracing::debug!(%execution, epoch, "dropped a binding to another instance");
        return;
    }
    let mut live = shared.live();
    if let Some(known) = live.get_mut(&execution) {
        if known.epoch == epoch && known.bound == digest {
            // Its handover came first. The capsule confirms it, too.
            known.seq = seq;
            if let Some(confirm) = known.confirm.take() {
                let _ = confirm.send(Stored { seq, seen_in });
            }
            return;
        }
        // An unconfirmed speculation on another message is replaced, and so is one that its sender
        // has abandoned: the durable binding is right.
        let speculation =
            known.epoch == epoch && (known.confirm.take().is_some() || known.seq == 0);
        // The execution was changed before it was started. A message after the earlier one would
        // lose its race.
        let changed = known.epoch == epoch && known.seq > 0 && known.seq < seq;
        if known.epoch >= epoch && !speculation && !changed {
            return;
        }
        // An older binding of this execution is still ending here. Its further appends lose their
        // races. The new binding replaces its entry.
    }
    let (entry, control) = Live::new(&state, (seq, digest), None);
    let progress = entry.progress.clone();
    live.insert(execution, entry);
    drop(live);
    let refusal = if shared.is_draining() {
        Some("the node is draining")
    } else if shared.queued() >= shared.options.queue {
        Some("the node's queue is full")
    } else {
        None
    };
    let tip = Tip {
        seq,
        digest: Some(digest),
        state,
        seen_in,
    };
    let job = Job {
        start: Start::Bound(Box::new(tip)),
        ack: Some(ack.clone()),
        control,
        progress,
    };
    match refusal {
        Some(reason) => drop(tokio::spawn(refuse(shared.clone(), job, reason))),
        None => enqueue(shared, job),
    }
}

/// Gives a binding back.
pub async fn refuse(shared: Arc<Shared>, job: Job, reason: &'static str) {
    let tip = match job.start {
        Start::Bound(tip) => tip,
        Start::Entrusted(mut tip, mut binding) => match binding.confirmed() {
            Some(stored) => {
                stored.complete(&mut tip);
                tip
            }
            None => {
                // If the policy service appends it, it comes as a capsule and is refused then.
                tip.digest
                    .iter()
                    .for_each(|d| shared.forget(tip.state.execution, *d));
                return;
            }
        },
        Start::Speculative { state, digest, .. } => {
            // Likewise, by its source.
            return shared.forget(state.execution, digest);
        }
    };
    let (execution, epoch) = (tip.state.execution, tip.state.epoch);
    let offer = shared.slots().saturating_sub(shared.running());
    let events = vec![Event::Refused {
        reason: reason.to_owned(),
        offer: if shared.is_draining() { 0 } else { offer },
        fault: None,
    }];
    let done = async {
        let draft = Draft::new(&tip, events, &shared.author, shared.broker.now())?;
        let sent = shared.ledger.send(draft, bytes::Bytes::new()).await?;
        shared.ledger.settle(sent).await
    };
    match done.await {
        Ok(_) => {
            shared.metrics.refused.inc();
            tracing::info!(%execution, epoch, node = %shared.node(), reason, "refused");
        }
        Err(AppendError::Conflict) => {}
        Err(error) => {
            tracing::warn!(%execution, epoch, %error, "cannot refuse the binding; the execution is bound again when it is not started in time")
        }
    }
    if let Some(bound) = tip.digest {
        shared.forget(execution, bound);
    }
    drop(job.ack);
}
