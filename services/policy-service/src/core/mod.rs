//! The one task that owns the policy. It feeds the policy with events and performs its actions.

mod admission;
mod appends;
mod first_appends;
mod lines;
mod news;
mod perform;
mod specs;
mod submission_lines;
mod ticks;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use appends::Appends;
use fiec_broker::ledger::InFlight;
use fiec_broker::{Tip, Unacknowledged};
use fiec_policy::{Action, ControlOutcome, Input, LedgerView, Millis, Now, Policy, Ticket};
use fiec_schemas::messages::CapsuleBinding;
use fiec_schemas::trust::SignedProof;
use fiec_schemas::{Bound, Event, ExecutionId, LedgerMessage, NodeId, Phase};
use first_appends::EntrustedBindings;
pub use first_appends::taken;
use lines::Lines;
use specs::Specs;
use tokio::sync::mpsc::{Receiver, Sender};
use tokio_util::sync::CancellationToken;

use crate::Options;
use crate::effects::{Effects, panicked};
use crate::events::{AppendEnd, News, Outcome};
use crate::intake::{Intake, Line};
use crate::metrics::Metrics;
use crate::outbox::Outbox;
use crate::pulling::Pulled;
use crate::refusal::Refusal;
use crate::sources::SourceHealth;
use crate::waiting::Waiting;

/// Events taken from a channel at once.
const BATCH: usize = 256;
/// Origin of the monotonic clock, in ms: one day, so that times before the start can be expressed.
const ORIGIN_MS: u64 = 86_400_000;

/// The core and its channels.
pub struct Core {
    options: Options,
    effects: Effects,
    metrics: Metrics,
    policy: Policy,
    /// Actions of the policy that are not performed yet. Empty between rounds.
    actions: Vec<Action>,
    /// Start of the monotonic clock.
    start: Instant,
    /// When the next tick is due.
    next_tick: Instant,
    lines: Lines,
    appends: Appends,
    /// First appends in flight, in the order of sending.
    firsts: Sender<(Box<Line>, InFlight)>,
    /// Publishes that are not acknowledged.
    acks: Sender<Unacknowledged>,
    outbox: Outbox,
    /// First bindings that were left to their nodes.
    entrusted: EntrustedBindings,
    /// The connection stood at the last tick. Only then does the silence of a node count.
    connected: bool,
    /// Last time this replica announced itself to the others.
    spoke: Option<Instant>,
    /// When duties were last counted.
    counted: Option<Instant>,
    /// All ledgers are loaded.
    loaded: Arc<AtomicBool>,
    /// Whether the ledgers are read.
    feed: SourceHealth,
    /// The broker lost messages, which ended the previous life of the service.
    after_loss: bool,
    /// Signed proofs of the nodes.
    proofs: BTreeMap<NodeId, SignedProof>,
    /// Large submissions to fetch.
    specs: Specs,
}

impl Core {
    pub fn new(
        options: Options,
        effects: Effects,
        metrics: Metrics,
        firsts: Sender<(Box<Line>, InFlight)>,
        acks: Sender<Unacknowledged>,
        waiting: Waiting,
        (loaded, feed, after_loss): (Arc<AtomicBool>, SourceHealth, bool),
    ) -> Self {
        Self {
            policy: Policy::new(options.policy.clone(), options.id),
            outbox: Outbox::new(options.capsule_batch.max(1), acks.clone()),
            entrusted: EntrustedBindings::default(),
            lines: Lines::new(
                Intake::new(options.deliveries, waiting),
                options.in_flight,
                options.hold,
            ),
            appends: Appends::new(options.in_flight),
            options,
            effects,
            metrics,
            actions: Vec::new(),
            start: Instant::now(),
            next_tick: Instant::now(),
            firsts,
            acks,
            connected: true,
            spoke: None,
            counted: None,
            loaded,
            feed,
            after_loss,
            proofs: BTreeMap::new(),
            specs: Specs::default(),
        }
    }

    fn now(&self) -> Now {
        let elapsed = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX / 2);
        Now {
            mono: Millis(ORIGIN_MS + elapsed),
            wall: self.effects.broker.now(),
        }
    }

    /// Runs until `stop`.
    pub async fn run(
        mut self,
        mut news: Receiver<News>,
        mut outcomes: Receiver<Outcome>,
        mut submissions: Receiver<Pulled>,
        stop: CancellationToken,
    ) {
        let (mut some_news, mut some_outcomes) = (Vec::new(), Vec::new());
        loop {
            let (ready, next_tick) = (self.has_lines(), self.next_tick);
            let may_pull = self.is_loaded() && !self.lines.is_crowded();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = outcomes.recv_many(&mut some_outcomes, BATCH) => {
                    for outcome in some_outcomes.drain(..) {
                        self.outcome(outcome).await;
                        self.tick_if_late().await;
                    }
                }
                n = news.recv_many(&mut some_news, BATCH) => {
                    if n == 0 {
                        break;
                    }
                    news::drop_outdated_vectors(&mut some_news);
                    for item in some_news.drain(..) {
                        self.news(item).await;
                        self.tick_if_late().await;
                    }
                }
                () = tokio::time::sleep_until(next_tick.into()) => self.tick(false).await,
                Some(pulled) = submissions.recv(), if may_pull => {
                    self.lines.push(pulled);
                    // All waiting messages are taken at once. Their number is bounded, and the
                    // broker gets progress reports while they are open.
                    while let Ok(pulled) = submissions.try_recv() {
                        self.lines.push(pulled);
                    }
                }
                () = tokio::task::yield_now(), if ready => {}
                () = self.lines.waits().ends() => self.lines.give_up_hold(self.policy.completions()),
            }
            self.round().await;
            self.entrusted.flush(&self.effects.broker).await;
            if outcomes.is_empty() {
                self.outbox
                    .flush(&self.effects.broker, &self.policy, &self.metrics)
                    .await;
            }
        }
        // Nobody takes the results of effects any more.
        drop(outcomes);
        self.append_open_bindings().await;
        self.say_presence(true).await;
        self.effects.running.end().await;
        let _ = self.effects.broker.client.flush().await;
    }

    fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::Relaxed)
    }

    /// Takes lines in, lets the policy bind, and performs its actions.
    async fn round(&mut self) {
        self.take_lines_in().await;
        if self.appends.has_room() {
            let now = self.now();
            self.policy.act(now, &mut self.actions);
        }
        self.perform().await;
    }

    fn step(&mut self, input: Input) {
        let now = self.now();
        self.policy.step(now, input, &mut self.actions);
    }

    fn follow_ledger(&mut self, view: &LedgerView<'_>, reread: bool) {
        let now = self.now();
        self.policy.follow(now, view, reread, &mut self.actions);
    }

    /// Takes an append of this service that is stored: informs the policy and sends the capsule.
    async fn stored(&mut self, tip: Box<Tip>, first: bool) {
        let (execution, epoch) = (tip.state.execution, tip.state.epoch);
        self.step(Input::Appended {
            execution,
            seq: tip.seq,
            epoch,
            phase: tip.state.phase.clone(),
        });
        match &tip.state.phase {
            Phase::Bound(Bound { binding, .. }) => {
                if first {
                    self.metrics.bound("initial");
                    tracing::debug!(%execution, epoch, node = %binding.node, "submitted and bound");
                } else {
                    tracing::info!(%execution, epoch, node = %binding.node, "bound");
                }
                // The capsules of a gang are sent together.
                let withheld = self.policy.withholds(execution);
                // The feed may have been faster and shown that the execution has ended.
                let stands = self.policy.knows(execution) && !withheld;
                let Some(digest) = tip.digest.filter(|_| stands) else {
                    return;
                };
                let binding = CapsuleBinding {
                    seq: tip.seq,
                    digest,
                    state: tip.state,
                };
                self.send(binding).await;
            }
            Phase::Completed => {
                // No worker holds it, so no worker deletes its state.
                let forget = self.effects.clone().forget_state(tip.state);
                self.effects.running.run(None, forget);
            }
            Phase::Failed | Phase::Cancelled | Phase::Returned => {
                // A retry, or its holder, still reads its σ.
                let settle = self.effects.clone().settle_outbox(tip.state);
                self.effects.running.run(None, settle);
            }
            Phase::Pending { .. } => self.appends.keep(tip),
            _ => {}
        }
    }

    async fn send(&mut self, binding: CapsuleBinding) {
        if self.outbox.push(binding) {
            self.outbox
                .flush(&self.effects.broker, &self.policy, &self.metrics)
                .await;
        }
    }

    async fn outcome(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::First(line, settled) => self.settle_first_append(line, settled).await,
            Outcome::Existing(line, found) => self.compare_with_ledger(line, found).await,
            Outcome::Large(line, stored) => self.settle_large(line, stored).await,
            Outcome::Program(line, found) => self.settle_program(line, found).await,
            Outcome::Name(line, found) => self.settle_name(line, found).await,
            Outcome::Vetted(cursor, verdict) => self.settle_vetting(cursor, verdict).await,
            Outcome::Append(execution, ticket, end) => {
                self.settle_append(execution, ticket, end).await;
            }
            Outcome::Capsule(binding) => self.send(*binding).await,
            Outcome::Spec(execution, found) => self.fetched(execution, found),
            Outcome::Ordered(execution, epoch, outcome, ticket) => {
                if let Some((answer, promise)) = self.appends.answer(ticket) {
                    let _ = answer.send(match &outcome {
                        ControlOutcome::Taken => Ok(promise),
                        ControlOutcome::Refused(reason) => {
                            Err(Refusal::OrderRefused(reason.clone()))
                        }
                        ControlOutcome::Moving(reason) => {
                            Err(Refusal::OrderTooEarly(reason.clone()))
                        }
                        ControlOutcome::NotHeld => {
                            Ok("its node does not hold it; it is bound anew within seconds"
                                .to_owned())
                        }
                        ControlOutcome::NoAnswer => Err(Refusal::OrderUnanswered),
                    });
                }
                self.step(Input::Ordered {
                    execution,
                    epoch,
                    answer: outcome,
                });
            }
            Outcome::Split(execution, epoch, outcome) => self.step(Input::SplitAnswered {
                execution,
                epoch,
                answer: outcome,
            }),
            Outcome::Found(entry) => self.reread(&entry.message, entry.seq),
            Outcome::Recalled(execution, up_to, named) => {
                self.step(Input::Recalled {
                    execution,
                    up_to: up_to.into(),
                    named,
                });
            }
            Outcome::Reserved(tenant, table) => self.step(Input::Reserved {
                tenant: tenant.clone(),
                table: table.map(|(seq, table)| (seq, Arc::new(table))),
                answer: true,
            }),
            Outcome::Ended(execution, seen) => self.step(Input::Ended { execution, seen }),
            Outcome::Members(tenant, found) => self.step(Input::Members { tenant, found }),
            Outcome::Verdict(verdict) => self.step(Input::Verdict {
                verdict: Box::new(*verdict),
            }),
            Outcome::Forgotten(node, instance) => self.forgotten(&node, instance),
            Outcome::Probed(node, outcome) => self.step(Input::Probe {
                node: node.clone(),
                answered: outcome,
            }),
            Outcome::Held(node, instance, held) => self.step(Input::Holdings {
                node: node.clone(),
                instance,
                held,
            }),
            Outcome::Recorded(message, recorded) => self.lines.recorded(message, recorded).await,
            Outcome::Changed(tip, events) => {
                // The feed may have been faster, and shown that the execution has ended.
                if self.policy.knows(tip.state.execution) {
                    self.changed(*tip, events, false);
                }
            }
            Outcome::LineLost(message) => {
                let reason = "a check of one of its lines panicked".to_owned();
                self.lines.done(message, Err(reason)).await;
            }
            Outcome::Ask(ask) => self.ask(ask),
        }
    }

    fn reread(&mut self, message: &LedgerMessage, seq: u64) {
        self.follow(message, seq, true);
    }

    /// Takes a message that the feed also shows. `reread`: it is the answer to an append of the
    /// policy.
    fn follow(&mut self, message: &LedgerMessage, seq: u64, reread: bool) {
        let Ok(header) = serde_json::to_string(message) else {
            return;
        };
        if let Ok(view) = LedgerView::read(&header, seq) {
            self.appends.forget(view.state.execution);
            self.follow_ledger(&view, reread);
        }
    }

    fn changed(&mut self, tip: Tip, events: Vec<Event>, reread: bool) {
        let message = LedgerMessage {
            v: 1,
            events,
            state: tip.state,
            sig: None,
        };
        self.follow(&message, tip.seq, reread);
    }

    /// Takes the result of an append to a ledger that exists.
    async fn settle_append(
        &mut self,
        execution: ExecutionId,
        ticket: Option<Ticket>,
        end: AppendEnd,
    ) {
        let answer = self.appends.end(ticket);
        let said = match end {
            AppendEnd::Stored(tip) => {
                self.stored(tip, false).await;
                Ok(())
            }
            AppendEnd::Changed(tip, events) => {
                self.changed(*tip, events, true);
                Ok(())
            }
            AppendEnd::Overtaken(entry) => {
                self.metrics.conflicts.inc();
                self.reread(&entry.message, entry.seq);
                let name = execution.to_string();
                Err(Refusal::Overtaken { name })
            }
            AppendEnd::Vanished => {
                self.step(Input::Vanished { execution });
                let name = execution.to_string();
                Err(Refusal::LedgerGone { name })
            }
            AppendEnd::Failed(reason) => {
                self.metrics.append_failures.inc();
                tracing::warn!(%execution, reason, "an append failed; it is read again");
                let known = self.policy.sequence(execution);
                if let Some((tenant, known)) = self.policy.tenant(execution).zip(known) {
                    self.appends.begin_read(execution);
                    let reread = self.effects.clone().reread(tenant, execution, known);
                    self.effects.running.run(panicked(execution, None), reread);
                }
                Err(Refusal::Broker(reason))
            }
        };
        if let Some((answer, promise)) = answer {
            let _ = answer.send(said.map(|()| promise));
        }
    }
}
