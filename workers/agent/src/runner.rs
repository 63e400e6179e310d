//! One execution on this node, from its binding to its end here. The loop takes one input at a
//! time: an acknowledgement, a report, an order, a deadline.
//!
//! At most one append is in flight; what follows waits, with its draft built where possible, so
//! that it leaves when the acknowledgement comes. `started` travels with whatever is appended
//! first. Once the child is done its slot is free, while the last append is still awaited.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, Tip};
use fiec_kit::frames::{BoundaryReport, FrameError, Order, Reason, Report};
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::{BoundaryIndex, Event, Phase, Submission, Timestamp};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::Instrument;

use crate::attempts;
use crate::child_process::Child;
use crate::handover;
use crate::message::{After, Intent, Message, split_outputs};
use crate::shared::{CapsuleAck, Control, Job, Shared, Slot, Start};

/// `started` waits so long for company.
pub(crate) const STARTED_ALONE_AFTER: Duration = Duration::from_millis(3);
/// An unconfirmed speculation is given up after this.
const CONFIRM_WITHIN: Duration = Duration::from_secs(10);

pub(crate) type Flight = Pin<Box<dyn Future<Output = Result<Tip, AppendError>> + Send>>;

#[expect(
    clippy::large_enum_variant,
    reason = "made and taken apart once, never stored"
)]
enum Input {
    Settled(Result<Tip, AppendError>),
    Report(Result<Option<(Report, Bytes)>, FrameError>),
    Control(Option<Control>),
    Deadline,
    Stretch,
    Halt,
}

/// What ends a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Started,
    Kill,
    Retry,
}

/// One execution's loop.
pub(crate) struct Runner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) spec: Arc<Submission>,
    pub(crate) ack: Option<Arc<CapsuleAck>>,
    pub(crate) control: mpsc::Receiver<Control>,
    pub(crate) progress: Arc<Mutex<RunningProgress>>,
    pub(crate) tip: Tip,
    pub(crate) epoch: u64,
    pub(crate) slot: Option<Slot>,
    pub(crate) child: Option<Child>,
    /// Nothing was heard from this child in this run.
    pub(crate) unheard: bool,
    pub(crate) flight: Option<Flight>,
    pub(crate) after: Vec<After>,
    pub(crate) ahead: Option<Tip>,
    pub(crate) staged: VecDeque<Message>,
    pub(crate) started: bool,
    pub(crate) since: Option<Timestamp>,
    pub(crate) last: Option<Bytes>,
    pub(crate) intent: Option<Intent>,
    pub(crate) cancelling: Option<String>,
    pub(crate) wait: Option<(Wait, Instant)>,
    pub(crate) ended: bool,
}

/// Takes an execution up.
pub async fn run(shared: Arc<Shared>, job: Job, slot: Slot) {
    let Job {
        start,
        ack,
        control,
        progress,
    } = job;
    let (tip, sigma, flight, bound) = match start {
        Start::Bound(tip) => {
            let bound = tip.digest;
            (*tip, None, None, bound)
        }
        Start::Speculative {
            state,
            sigma,
            confirmed,
            digest,
        } => {
            let tip = Tip {
                seq: 0,
                digest: Some(digest),
                state: *state,
            };
            let mut sure = tip.clone();
            let flight: Flight = Box::pin(async move {
                match tokio::time::timeout(CONFIRM_WITHIN, confirmed).await {
                    Ok(Ok(seq)) => {
                        sure.seq = seq;
                        sure.state.resolve(seq);
                        Ok(sure)
                    }
                    _ => Err(AppendError::Conflict),
                }
            });
            (tip, Some(sigma), Some(flight), Some(digest))
        }
    };
    let (execution, epoch) = (tip.state.execution, tip.state.epoch);
    let span = tracing::info_span!("execution", %execution, epoch, node = %shared.node());
    let body = async {
        let spec = match attempts::fetch_spec(&shared, &tip).await {
            Ok(spec) => spec,
            Err(error) => {
                tracing::warn!(%error, "cannot read the submission; it will be bound anew");
                return;
            }
        };
        let mut runner = Runner {
            shared: shared.clone(),
            spec,
            ack,
            control,
            progress,
            tip,
            epoch,
            slot: Some(slot),
            child: None,
            unheard: true,
            flight,
            after: Vec::new(),
            ahead: None,
            staged: VecDeque::new(),
            started: false,
            since: None,
            last: None,
            intent: None,
            cancelling: None,
            wait: None,
            ended: false,
        };
        match &runner.tip.state.requested {
            // Asked of a worker that died before it could.
            Some(requested) if requested.what == "cancel" => {
                let who = requested.who.clone();
                runner.finish(vec![Event::Cancelled { who }]);
            }
            _ => runner.launch(sigma).await,
        }
        runner.drive().await;
    };
    body.instrument(span).await;
    if let Some(bound) = bound {
        shared.forget(execution, bound);
    }
}

impl Runner {
    async fn drive(&mut self) {
        loop {
            self.flush().await;
            if self.ended && self.flight.is_none() && self.staged.is_empty() {
                return;
            }
            match self.input().await {
                Input::Settled(result) => self.settled(result).await,
                Input::Report(Ok(Some((report, body)))) => self.report(report, body).await,
                Input::Report(Ok(None)) => self.lost(None).await,
                Input::Report(Err(error)) => self.lost(Some(error)).await,
                Input::Control(Some(control)) => self.control(control).await,
                Input::Control(None) => self.control.close(),
                Input::Deadline => self.deadline().await,
                Input::Stretch => {
                    let interval_ms = *self.shared.stretch.borrow();
                    self.order(Order::Stretch { interval_ms }).await;
                }
                Input::Halt => {
                    self.child = None;
                    return;
                }
            }
        }
    }

    async fn input(&mut self) -> Input {
        let Self {
            shared,
            control,
            child,
            flight,
            wait,
            ended,
            ..
        } = self;
        let mut stretch = shared.stretch.clone();
        let closed = control.is_closed() && control.is_empty();
        let at = wait.map(|(_, at)| at);
        tokio::select! {
            biased;
            () = shared.halt.cancelled() => Input::Halt,
            result = async { match flight { Some(f) => f.await, None => std::future::pending().await } } => Input::Settled(result),
            report = async { match child { Some(c) => c.link.next().await, None => std::future::pending().await } } => Input::Report(report),
            control = control.recv(), if !closed && !*ended => Input::Control(control),
            () = async { match at { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => Input::Deadline,
            Ok(()) = stretch.changed() => Input::Stretch,
        }
    }

    async fn order(&mut self, order: Order) {
        if let Some(child) = &mut self.child
            && let Err(error) = child.order(&order, &[]).await
        {
            // Reading will tell how it ended.
            tracing::debug!(%error, "the child takes no orders");
        }
    }

    async fn settled(&mut self, result: Result<Tip, AppendError>) {
        self.flight = None;
        self.ahead = None;
        let after = std::mem::take(&mut self.after);
        match result {
            Ok(tip) => {
                self.shared.supersede(&self.tip.state, &tip.state);
                self.tip = tip;
                self.flush().await;
                if self.flight.is_some() {
                    // The connection's task writes the append to its socket before we go on.
                    tokio::task::yield_now().await;
                }
                self.prepare_next().await;
                if matches!(self.tip.state.phase, Phase::Started(_)) || self.ended {
                    self.ack = None;
                }
                for after in after {
                    self.follow(after).await;
                }
            }
            Err(error) => {
                if matches!(error, AppendError::Conflict) {
                    self.shared.metrics.fenced.inc();
                    tracing::warn!("somebody else holds this execution now; dropped");
                } else {
                    tracing::error!(%error, "append failed for good; dropped");
                }
                let waiting = std::mem::take(&mut self.staged);
                for after in after
                    .into_iter()
                    .chain(waiting.into_iter().flat_map(|m| m.after))
                {
                    match after {
                        After::Answer(to) => {
                            let reason = "somebody else holds this execution now".to_owned();
                            self.shared.answer(Some(to), Some(reason)).await;
                        }
                        After::Confirm(to) => {
                            handover::abandon(
                                &self.shared,
                                &to,
                                self.tip.state.execution,
                                self.epoch + 1,
                            )
                            .await;
                        }
                        After::Commit { .. } => {}
                    }
                }
                self.child = None;
                self.slot = None;
                self.ended = true;
            }
        }
    }

    async fn follow(&mut self, after: After) {
        match after {
            After::Commit {
                index,
                bytes,
                state,
            } => {
                self.shared.metrics.commits.inc();
                self.shared.metrics.commit_bytes.inc_by(bytes);
                self.last = state;
                // While enough is ready to be appended, the child need not hear of each commit:
                // the next word covers all before it.
                if self.staged.len() <= 1 {
                    self.order(Order::Committed { index }).await;
                }
            }
            After::Answer(to) => self.shared.answer(Some(to), None).await,
            After::Confirm(to) => {
                self.shared.metrics.handovers_out.inc();
                let execution = self.tip.state.execution;
                handover::confirm(&self.shared, &to, execution, self.epoch + 1, self.tip.seq).await;
            }
        }
    }

    async fn report(&mut self, report: Report, body: Bytes) {
        if !matches!(report, Report::Ready | Report::Prepared { .. }) {
            self.unheard = false;
        }
        let ends = report.ends_run();
        match report {
            Report::Ready | Report::Prepared { .. } => {}
            Report::Began { at } => {
                if !self.started {
                    self.since = Some(at);
                }
            }
            Report::Progress { index, of, note } => self.reached(index, of, note),
            Report::Boundary(report) => self.boundary(*report, &body).await,
            Report::Completed {
                result,
                capsules,
                computing_since,
                computed_until,
                outputs,
            } => {
                if !self.started {
                    self.since = Some(computing_since);
                }
                let Some(pieces) = split_outputs(&outputs, &body) else {
                    return self.lost(None).await;
                };
                let event = Event::Completed {
                    result,
                    computed_until,
                    capsules,
                    outputs,
                };
                self.shared.metrics.completed.inc();
                tracing::debug!(capsules, "completed");
                self.stage(Message {
                    outputs: pieces,
                    ..Message::of(vec![event])
                })
                .await;
                self.ended = true;
            }
            Report::Failed {
                permanent: true,
                reason,
            } => {
                let stderr = self
                    .child
                    .as_ref()
                    .map(|c| c.logs.tail())
                    .unwrap_or_default();
                self.failed(reason, stderr).await;
            }
            Report::Failed {
                permanent: false,
                reason,
            } => {
                let stderr = self
                    .child
                    .as_ref()
                    .map(|c| c.logs.tail())
                    .unwrap_or_default();
                self.crashed(reason, stderr);
            }
            Report::Cancelled => {
                let who = self.cancelling.clone().unwrap_or_default();
                self.stage(Message::of(vec![Event::Cancelled { who }]))
                    .await;
                self.ended = true;
            }
        }
        if ends && let Some(mut child) = self.child.take() {
            child.idle_since = std::time::Instant::now();
            self.shared.pool.give(child);
        }
        if self.ended {
            // Another execution may compute while this one's last message is under way.
            self.slot = None;
            self.wait = None;
        }
    }

    fn reached(&mut self, index: BoundaryIndex, of: Option<BoundaryIndex>, note: Option<String>) {
        if let Some(child) = &self.child {
            child.logs.reached(index);
        }
        let mut progress = self
            .progress
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        progress.boundary = index;
        progress.of = of;
        progress.note = note;
    }

    async fn boundary(&mut self, report: BoundaryReport, body: &Bytes) {
        self.reached(report.index, report.of, report.note.clone());
        let (reason, computed_until) = (report.reason, report.computed_at);
        let Some(mut message) = Message::boundary(report, body) else {
            return self.lost(None).await;
        };
        if reason == Reason::Yield {
            let intent = self.intent.take().unwrap_or(Intent::Yield {
                cause: fiec_schemas::Cause::Balance,
                to: None,
            });
            let (events, to) = intent.events(self.epoch, computed_until);
            message.events.extend(events);
            message.after.extend(to.clone().map(After::Confirm));
            message.handover = to;
            self.ended = true;
            tracing::info!("yielded at boundary");
        }
        self.stage(message).await;
    }

    async fn failed(&mut self, reason: String, stderr: String) {
        self.shared.metrics.failed.inc();
        tracing::warn!(reason, "failed");
        self.stage(Message::of(vec![Event::Failed {
            reason: attempts::cut(reason),
            stderr,
        }]))
        .await;
        self.ended = true;
        self.slot = None;
    }

    async fn control(&mut self, control: Control) {
        match control {
            Control::Yield { cause, to } => {
                self.intent = Some(Intent::Yield { cause, to });
                self.stop().await;
            }
            Control::Pause { who, reply } => {
                self.request("pause", who.clone(), reply).await;
                self.intent = Some(Intent::Pause { who });
                self.stop().await;
            }
            Control::Cancel { who, reply } => {
                self.request("cancel", who.clone(), reply).await;
                if self.child.is_none() {
                    // Between two attempts.
                    self.finish(vec![Event::Cancelled { who }]);
                    self.wait = None;
                    return;
                }
                self.cancelling = Some(who);
                self.order(Order::Cancel).await;
                self.wait = Some((
                    Wait::Kill,
                    Instant::now() + self.shared.options.cancel_grace,
                ));
            }
        }
    }

    /// Records what was asked before it is done, and answers then.
    async fn request(&mut self, what: &str, who: String, reply: Option<async_nats::Subject>) {
        let event = Event::Requested {
            who,
            what: what.to_owned(),
        };
        let after = reply.map(After::Answer).into_iter().collect();
        self.stage(Message {
            after,
            ..Message::of(vec![event])
        })
        .await;
    }

    async fn stop(&mut self) {
        if self.child.is_some() {
            self.order(Order::Yield).await;
        } else if let Some(intent) = self.intent.take() {
            // Between two attempts it stands at its last commit already; σ goes by the store.
            let (events, _) = intent.events(self.epoch, Timestamp::now());
            self.finish(events);
            self.wait = None;
        }
    }

    async fn deadline(&mut self) {
        match self.wait.take() {
            Some((Wait::Started, _)) => self.stage(Message::default()).await,
            Some((Wait::Kill, _)) => {
                tracing::warn!("no boundary within the grace; killed");
                self.child = None;
                if let Some(who) = self.cancelling.take() {
                    self.stage(Message::of(vec![Event::Cancelled { who }]))
                        .await;
                }
                self.ended = true;
                self.slot = None;
            }
            Some((Wait::Retry, _)) if self.flight.is_some() || !self.staged.is_empty() => {
                // From the last commit: what was sent before the crash must be settled first.
                self.wait = Some((Wait::Retry, Instant::now() + Duration::from_millis(5)));
            }
            Some((Wait::Retry, _)) => self.launch(None).await,
            None => {}
        }
    }
}
