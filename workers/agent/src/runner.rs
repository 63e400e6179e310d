//! One execution on this node, from its binding to its end here. The loop takes one input at a
//! time: an acknowledgement, a report, an order, a deadline.
//!
//! At most one append is in flight. Later messages are staged. If possible, the next one's draft is
//! built early, so that it leaves when the acknowledgement comes. `started` travels with the first
//! message. Once the child is done its slot is free, while the last append is still in flight.

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, BrokerClock, Tip, store};
use fiec_kit::frames::{BoundaryReport, FrameError, Order, Reason, Report};
use fiec_kit::launch::Values;
use fiec_probes::energy::Share;
use fiec_schemas::chain::Held;
use fiec_schemas::hardware::RunningProgress;
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::series::{NAMES_LIMIT, Series, SeriesError, SeriesName};
use fiec_schemas::subjects::INLINE_STATE_LIMIT;
use fiec_schemas::{BoundaryIndex, Digest, Event, Fault, Phase, StatePlace, Submission, Timestamp};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::ahead;
use crate::attempts;
use crate::child_process::Child;
use crate::computed::Computed;
use crate::data::NoData;
use crate::emitted::{Done, Next, NotSettled, Settling};
use crate::endings::{Loss, failure};
use crate::entrusted_bindings::EntrustedBinding;
use crate::handover;
use crate::healing::Older;
use crate::job::{CapsuleAck, RunnerOrder};
use crate::large::Known;
use crate::logs::Printed;
use crate::message::{self, After, Message, Said, check_outputs, split_outputs};
use crate::outside::Fetches;
use crate::packages::Program;
use crate::park::Parked;
use crate::pending_order::PendingOrder;
use crate::replies::NotTaken;
use crate::shared::{self, Shared, Slot};
use crate::spread::Sharing;
use crate::take_up;
use crate::unrecorded::{LedgerStream, Unrecorded};

/// A run that lasts this much longer counts as long: runs that its child was given ahead are
/// withdrawn.
pub(crate) const LONG_AFTER: Duration = Duration::from_millis(20);

/// With this many staged messages the runner reads no more reports: a program that sends without
/// pause waits for the broker.
const STAGED: usize = 64;

pub(crate) type Flight = Pin<Box<dyn Future<Output = Result<Tip, AppendError>> + Send>>;

enum Input {
    /// The append in flight is stored, or never will be.
    Settled(Result<Tip, AppendError>),
    /// A report from the child, or none if the child has closed its socket.
    Report(Result<Option<(Report, Bytes)>, FrameError>),
    /// An order, or none if nobody can send one any more.
    Order(Option<RunnerOrder>),
    /// [`Runner::wait`]'s moment.
    Deadline,
    /// It has computed as long as it may, or nearly.
    Limit,
    /// The least interval of routine commits may have changed, or messages will soon drop out of the
    /// ledger stream.
    Stream,
    /// Everything ends at once.
    Halt,
    Fetched((Digest, Result<Bytes, NoData>)),
    Silence,
    /// Emitted messages are stored, or owed ones are published, or they cannot be.
    Outbox(Result<Done, NotSettled>),
}

/// Whether a child has said anything in its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// No. It may have died while it was idle, and is replaced once.
    NotYet,
    /// No, and it replaces one that said nothing.
    NotAgain,
    /// Yes.
    Yes,
}

/// Reason for the runner's timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// No message came to carry `started`: append it alone.
    Started,
    /// A run with further ones behind it lasts too long.
    Long,
    /// A cancelled program reached no boundary within its grace.
    Kill,
    /// The pause before the next attempt is over.
    Retry,
}

/// The check of a silent child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    /// The child has reached no boundary within its manifest's `boundary_ms`. This clock stands
    /// still while the child may wait for this worker.
    Boundary,
    /// The child's process is stopped. The only check without a limit, or of a built-in program.
    Stopped,
}

/// The loop of one execution.
pub(crate) struct Runner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) spec: Arc<Submission>,
    /// The capsule message's acknowledgement. It is sent by dropping it, once `started` is stored.
    pub(crate) ack: Option<Arc<CapsuleAck>>,
    pub(crate) control: mpsc::Receiver<RunnerOrder>,
    /// How far the ledger stream is recorded, and which of its messages will soon drop out. Each
    /// runner has its own receiver, so that it sees each change once.
    pub(crate) stream: watch::Receiver<LedgerStream>,
    /// The execution's messages that the recorder has not recorded yet.
    pub(crate) unrecorded: Unrecorded,
    /// The least interval of commits by time that was last sent to the child, in ms.
    pub(crate) interval_ms: u32,
    pub(crate) progress: Arc<Mutex<RunningProgress>>,
    /// The last message of the ledger that is known to be stored.
    pub(crate) tip: Tip,
    /// The messages up to the tip, as far as they are known here.
    pub(crate) chain: Held,
    /// The messages before the binding.
    pub(crate) older: Older,
    /// The broker has begun a new life: before the next append, check that it still has the tip.
    pub(crate) recheck: bool,
    /// Its first binding, if nobody has appended it as far as this node knows. The tip is then the
    /// state that it makes.
    pub(crate) entrusted: Option<EntrustedBinding>,
    /// The binding under which it runs here.
    pub(crate) epoch: u64,
    /// Its slot. It is given back when the child is done, even if the last append is still in
    /// flight.
    pub(crate) slot: Option<Slot>,
    /// The child that computes. None between two attempts and after the last capsule.
    pub(crate) child: Option<Child>,
    /// Whether something was received from this child in this run.
    pub(crate) heard: Heard,
    /// The one append in flight.
    pub(crate) flight: Option<Flight>,
    /// Actions that follow its acknowledgement.
    pub(crate) after: Vec<After>,
    /// The tip that the append in flight will make, if the next draft can be built on it before the
    /// acknowledgement.
    pub(crate) ahead: Option<Tip>,
    /// Messages that wait for the append in flight, in order.
    pub(crate) staged: VecDeque<Message>,
    /// Crashes of its program since its last commit, as the append in flight or else the tip has
    /// them.
    pub(crate) crashes: u32,
    /// A message with `started` has been staged.
    pub(crate) started: bool,
    /// Start of its first capsule here.
    pub(crate) since: Option<Timestamp>,
    /// σ of the last commit, for another attempt without a fetch. None if it is too large for a
    /// message.
    pub(crate) last: Option<Bytes>,
    /// The order that the next boundary carries out.
    pub(crate) pending: Option<PendingOrder>,
    /// The author of a cancel, while the child has not yet ended.
    pub(crate) cancelling: Option<String>,
    pub(crate) wait: Option<(Wait, Instant)>,
    /// Nothing more will be staged. The loop ends when everything is settled.
    pub(crate) ended: bool,
    /// The storing of emitted messages, or the publishing of those that the holder before owed.
    /// Nothing is appended until its end.
    pub(crate) settling: Option<Settling>,
    /// Its failure was staged because another message was impossible.
    pub(crate) gave_up: bool,
    pub(crate) program: Program,
    pub(crate) fetches: Fetches,
    /// Its grant here, if it was changed.
    pub(crate) grant: Option<Grant>,
    /// The grant of its present run.
    pub(crate) given: Option<Grant>,
    /// Set while it is parked or about to park.
    pub(crate) parked: Option<Parked>,
    /// How its range of tiles is shared, if it may be.
    pub(crate) spread: Option<Box<Sharing>>,
    /// The need that its program stated beyond this node's grant.
    pub(crate) asked: Option<Adjustment>,
    /// Its program supports `park`.
    pub(crate) parks: bool,
    /// Cancelled when the binding is known to be stored, if the execution started before that.
    pub(crate) sure: Option<CancellationToken>,
    /// The chunks of its last commit, if σ is large.
    pub(crate) known: Arc<Known>,
    /// The next check of a silent child, and when it is due.
    pub(crate) silence: Option<(Silence, Instant)>,
    /// The child may wait for this worker: for an acknowledgement, for data, or for an answer.
    pub(crate) owes: bool,
    /// Processor time of its child at the last check.
    pub(crate) ticks: Option<u64>,
    /// Its share of the node's energy, if it is measured.
    pub(crate) energy: Option<Share>,
    /// The last boundary that the present run has reported.
    pub(crate) reported: BoundaryIndex,
    /// Names of the numbers that its program has reported here.
    pub(crate) names: BTreeSet<SeriesName>,
    /// Consecutive fetches that found the state of its last commit missing.
    pub(crate) missed: u32,
    /// What its program has printed under this binding.
    pub(crate) printed: Printed,
    /// The variables that its submission sets.
    pub(crate) values: Values,
    /// How long it computes, if its submission limits that.
    pub(crate) computed: Option<Computed>,
}

impl Runner {
    pub(crate) async fn drive(&mut self) {
        self.run_to_its_end().await;
        self.control.close();
        while let Ok(order) = self.control.try_recv() {
            if let RunnerOrder::Request(request) = order {
                let leaving = Err(NotTaken::Leaving);
                self.shared.answer(request.reply, leaving).await;
            }
        }
    }

    async fn run_to_its_end(&mut self) {
        loop {
            let is_parked = self.is_parked();
            if let Some(share) = &mut self.energy {
                share.run(self.child.is_some() && !is_parked);
            }
            self.flush().await;
            if self.ended && self.flight.is_none() && self.staged.is_empty() {
                return;
            }
            self.keep_clock();
            match self.input().await {
                Input::Settled(result) => self.settled(result).await,
                Input::Report(Ok(Some((report, body)))) => self.report(report, body).await,
                // Rare branches are boxed: this future is created for each execution.
                Input::Report(Ok(None)) => Box::pin(self.lost(Loss::Ended)).await,
                Input::Report(Err(FrameError::NoRoom(over))) => {
                    let reason = format!("{}: {over}", self.spec.program);
                    Box::pin(self.fail_now(Fault::Limit, reason)).await;
                }
                // The same value would come again.
                Input::Report(Err(FrameError::Value(error))) => {
                    let reason = format!("{}: {error}", self.spec.program);
                    Box::pin(self.fail_now(Fault::WrongAnswer, reason)).await;
                }
                Input::Report(Err(error)) => {
                    Box::pin(self.lost(Loss::Unreadable(error.to_string()))).await;
                }
                Input::Order(Some(order)) => Box::pin(self.obey(order)).await,
                Input::Order(None) => self.control.close(),
                Input::Deadline => Box::pin(self.deadline()).await,
                Input::Limit => Box::pin(self.near_limit()).await,
                Input::Stream => {
                    self.pace().await;
                    self.keep_aged();
                }
                Input::Halt => {
                    self.child = None;
                    return;
                }
                Input::Fetched(answer) => self.answer_fetch(answer).await,
                Input::Silence => self.silent().await,
                Input::Outbox(settled) => Box::pin(self.outbox_settled(settled)).await,
            }
        }
    }

    async fn input(&mut self) -> Input {
        let silence = self.silence_due();
        let computes = self.child.is_some() && !self.ended;
        let computed = self.computed.as_ref().filter(|_| computes);
        let limit = computed.and_then(Computed::due);
        let Self {
            shared,
            control,
            stream,
            child,
            flight,
            staged,
            settling,
            wait,
            ended,
            fetches,
            ..
        } = self;
        let closed = control.is_closed() && control.is_empty();
        let at = wait.map(|(_, at)| at);
        tokio::select! {
            biased;
            () = shared.halt.cancelled() => Input::Halt,
            result = async { match flight { Some(f) => f.await, None => std::future::pending().await } } => Input::Settled(result),
            settled = async { match settling { Some(s) => (&mut s.work).await, None => std::future::pending().await } } => Input::Outbox(settled),
            answer = fetches.next(), if fetches.any() => Input::Fetched(answer),
            report = async { match child { Some(c) => c.link.next().await, None => std::future::pending().await } }, if staged.len() < STAGED => Input::Report(report),
            order = control.recv(), if !closed && !*ended => Input::Order(order),
            () = async { match at { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => Input::Deadline,
            () = async { match limit { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } }, if limit.is_some() => Input::Limit,
            () = async { match silence { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } }, if silence.is_some() => Input::Silence,
            Ok(()) = stream.changed() => Input::Stream,
        }
    }

    pub(crate) async fn order(&mut self, order: Order) {
        if matches!(order, Order::Yield(_) | Order::Cancel | Order::Split)
            && let Some(child) = &mut self.child
        {
            // That run may have ended by now, and the child may compute one that it was given
            // ahead. The order does not concern that one; another child computes it.
            ahead::withdraw(child);
        }
        if let Some(child) = &mut self.child
            && let Err(error) = child.order(&order, &[]).await
        {
            // The next read will report how the child ended.
            tracing::debug!(%error, "the child takes no orders");
        }
    }

    /// Updates and returns the least interval of commits by time, in ms.
    pub(crate) fn paced(&mut self) -> u32 {
        let recorded = self.stream.borrow().recorded;
        self.interval_ms = self.unrecorded.interval_ms(recorded);
        self.interval_ms
    }

    /// Sends the least interval of commits by time to the child, if it has changed.
    pub(crate) async fn pace(&mut self) {
        let before = self.interval_ms;
        let interval_ms = self.paced();
        if interval_ms != before {
            self.order(Order::Stretch { interval_ms }).await;
        }
    }

    async fn settled(&mut self, result: Result<Tip, AppendError>) {
        self.flight = None;
        self.ahead = None;
        let after = std::mem::take(&mut self.after);
        match result {
            Ok(tip) => {
                let taken_over = self.sure.take();
                if let Some(sure) = &taken_over {
                    sure.cancel();
                }
                self.shared.supersede(&self.tip.state, &tip.state);
                self.shared.reached(tip.seq);
                self.stored(&tip, &after);
                self.unrecorded.appended(tip.seq);
                let before = std::mem::replace(&mut self.tip, tip);
                let before = before.state.boundary.clone();
                if taken_over.is_some() && self.tip.state.outbox.is_some() {
                    self.settle_outbox(Next::Append);
                }
                self.flush().await;
                if self.flight.is_some() {
                    // Yield, so that the connection's task writes the append to its socket first.
                    tokio::task::yield_now().await;
                }
                self.prepare_next().await;
                let fetched = |place: &StatePlace| place.bytes > INLINE_STATE_LIMIT as u64;
                if before.as_ref().is_some_and(fetched) {
                    // The binding has lasted until its state was here.
                    self.shared.fetches.release(self.tip.state.execution);
                }
                if let Some(before) = before.filter(store::is_large) {
                    Box::pin(self.gone_beyond(before)).await;
                }
                if matches!(self.tip.state.phase, Phase::Started(_)) || self.ended {
                    self.ack = None;
                }
                self.pace().await;
                for after in after {
                    self.follow(after).await;
                }
            }
            Err(error) => Box::pin(self.overtaken(error, after)).await,
        }
    }

    /// An append did not happen and never will. Answers those who waited for it, and ends the
    /// child.
    async fn overtaken(&mut self, error: AppendError, after: Vec<After>) {
        if matches!(error, AppendError::Conflict) {
            self.shared.metrics.fenced.inc();
            tracing::warn!("another worker holds this execution; dropping it");
        } else {
            tracing::error!(%error, "append failed permanently; dropping the execution");
        }
        self.drop_staged(after, &NotTaken::Overtaken).await;
        self.child = None;
        self.slot = None;
        self.ended = true;
    }

    async fn follow(&mut self, after: After) {
        match after {
            After::Commit {
                index,
                bytes,
                state,
            } => {
                self.computes_uncommitted(true);
                self.shared.metrics.commits.inc();
                self.shared.metrics.commit_bytes.inc_by(bytes);
                self.last = state;
                // While enough messages are staged, the child need not hear of each commit: the
                // next order covers all before it.
                if self.staged.len() <= 1 {
                    self.order(Order::Committed { index }).await;
                }
            }
            After::Answer(to) => self.shared.answer(to, Ok(())).await,
            After::Confirm(to) => {
                self.shared.metrics.handovers_out.inc();
                handover::confirm(&self.shared, &to, self.epoch + 1, &self.tip).await;
            }
            After::Begin(state) if !self.ended => Box::pin(self.launch(Some(state))).await,
            After::Begin(_) | After::Keep(_) => {}
        }
    }

    /// Notes that all work so far is committed, and whether the program goes on.
    pub(crate) fn computes_uncommitted(&self, goes_on: bool) {
        if let Some(live) = self.shared.live().get_mut(&self.tip.state.execution) {
            live.uncommitted = (goes_on && !self.is_parked()).then(Instant::now);
        }
    }

    async fn report(&mut self, mut report: Report, body: Bytes) {
        if !matches!(
            report,
            Report::Ready | Report::Prepared { .. } | Report::Fetch { .. }
        ) {
            self.heard = Heard::Yes;
        }
        if self.is_beyond(&mut report).await {
            return;
        }
        message::digest(&mut report, &body).await;
        restamp(&mut report, self.shared.broker.clock());
        let ends = report.ends_run();
        let yields = ends && matches!(report, Report::Boundary(_));
        if ends && let Some(child) = &self.child {
            child.logs.rest().await;
            self.printed = child.logs.printed();
        }
        if ends && self.is_parked() {
            return Box::pin(self.ended_parked(&report)).await;
        }
        let context = ends.then(|| self.context_after(&report)).flatten();
        if let Some(child) = &mut self.child {
            child.quick = match &report {
                Report::Completed {
                    computing_since,
                    computed_until,
                    ..
                } => ahead::was_short(*computing_since, *computed_until),
                _ => false,
            };
            child.context = context;
            if matches!(report, Report::Boundary(_) | Report::Progress { .. }) && !ends {
                ahead::withdraw(child);
            }
        }
        match report {
            Report::Fetch { digest, bytes } => self.fetch(digest, bytes).await,
            Report::Ready | Report::Prepared { .. } => {}
            Report::Reserve(wish) => Box::pin(self.reserve(wish)).await,
            Report::Surroundings => Box::pin(self.look_around()).await,
            Report::Ask(change) => Box::pin(self.ask(&change)).await,
            Report::Aside => self.set_aside(),
            Report::Whole => self.stays_whole(),
            Report::Began { at, parks, limits } => {
                self.parks |= parks;
                if let Some(computed) = &mut self.computed {
                    computed.note(limits);
                }
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
                emits,
                numbers,
            } => {
                if !self.started {
                    self.since = Some(computing_since);
                }
                let Some((outputs, mut pieces)) = split_outputs(&outputs, &body) else {
                    return Box::pin(self.lost(Loss::Unusable)).await;
                };
                let said = check_outputs(&outputs).and_then(|()| Said::of(result));
                let (result, object) = match said {
                    Ok(said) => {
                        pieces.extend(said.piece);
                        (said.result, said.object)
                    }
                    Err(reason) => {
                        return Box::pin(self.fail_now(Fault::WrongAnswer, reason)).await;
                    }
                };
                let noted = match self.noted(capsules, numbers) {
                    Ok(noted) => noted,
                    Err(wrong) => {
                        let reason = wrong.to_string();
                        return Box::pin(self.fail_now(Fault::WrongAnswer, reason)).await;
                    }
                };
                let energy = self.energy.as_mut().and_then(Share::interval);
                // A guarded result counts only once others have found the same.
                let event = if self.tip.state.guarded {
                    Event::Computed {
                        result,
                        object,
                        computed_until,
                        capsules,
                        outputs,
                        energy,
                    }
                } else {
                    Event::Completed {
                        result,
                        object,
                        computed_until,
                        capsules,
                        outputs,
                        energy,
                    }
                };
                if !emits.is_empty() {
                    // Published before the execution ends: nobody publishes for an ended execution.
                    let mut message = Message::default();
                    if !Box::pin(self.emit(&mut message, emits)).await {
                        return;
                    }
                    if !message.unstored.is_empty() {
                        self.stage(message).await;
                    }
                }
                let message = Message {
                    outputs: pieces,
                    ..Message::of(noted.into_iter().chain([event]).collect())
                };
                let message = match self.at_its_end(message, computed_until) {
                    Ok(message) => message,
                    Err(reason) => {
                        return Box::pin(self.fail_now(Fault::WrongAnswer, reason)).await;
                    }
                };
                let is_end = |event: &Event| {
                    matches!(event, Event::Completed { .. } | Event::Computed { .. })
                };
                if message.events.iter().any(is_end) {
                    self.shared.metrics.completed.inc();
                    tracing::debug!(capsules, "completed");
                }
                self.stage(message).await;
                self.ended = true;
            }
            Report::Failed {
                permanent,
                reason,
                fault,
            } => {
                let fault = fault.map_or(Fault::Reported, |fault| *fault);
                let child = self.child.as_ref();
                let stderr = child.map(|c| c.logs.tail()).unwrap_or_default();
                match permanent {
                    true => Box::pin(self.failed(fault, reason, stderr)).await,
                    false => self.faulted(fault, reason, stderr),
                }
            }
            Report::Cancelled => {
                let Some(who) = self.cancelling.clone() else {
                    if self.pending.is_some() {
                        // It was parked when the order came.
                        self.append_pending();
                        if let Some(child) = self.child.take() {
                            self.pass_on(child);
                        }
                        return;
                    }
                    // Nobody asked for a cancel.
                    return Box::pin(self.lost(Loss::Unusable)).await;
                };
                self.stage(Message::of(vec![Event::Cancelled { who }]))
                    .await;
                self.ended = true;
            }
        }
        if ends && let Some(child) = self.child.take() {
            if yields {
                child.logs.leave();
            }
            self.pass_on(child);
        }
        if self.ended {
            // Another execution may compute while this one's last message is in flight.
            self.slot = None;
            self.wait = None;
        }
    }

    /// The child is done. It goes, with its slot, to the execution whose run it already has, or
    /// back to the pool.
    fn pass_on(&mut self, mut child: Child) {
        if child.spent {
            return;
        }
        match (child.ahead.next(), self.slot.take()) {
            (Some(job), Some(slot)) => {
                take_up::spawn(self.shared.clone(), job, slot, Some(child));
            }
            (None, slot) => {
                self.slot = slot;
                self.shared.pool.give(child);
            }
            // Without a slot no execution may compute.
            (Some(job), None) => {
                shared::give_back(&self.shared, [job].into());
            }
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

    /// Checks the numbers that came with a boundary, and makes their event.
    fn noted(
        &mut self,
        index: BoundaryIndex,
        numbers: Series,
    ) -> Result<Option<Event>, SeriesError> {
        numbers.check(self.reported, index)?;
        self.reported = index;
        for name in numbers.0.keys() {
            if !self.names.contains(name) {
                if self.names.len() >= NAMES_LIMIT {
                    return Err(SeriesError::Names {
                        name: name.to_string(),
                    });
                }
                self.names.insert(name.clone());
            }
        }
        Ok((!numbers.is_empty()).then_some(Event::Noted { numbers }))
    }

    async fn boundary(&mut self, mut report: BoundaryReport, body: &Bytes) {
        assert_ne!(
            self.shared.options.panics_at,
            Some(report.index),
            "a test wants a panic here"
        );
        self.reached(report.index, report.of, report.note.clone());
        let (reason, computed_until) = (report.reason, report.computed_at);
        let emits = std::mem::take(&mut report.emits);
        if let Some(computed) = &mut self.computed {
            computed.add(report.compute_us, Instant::now());
        }
        let (split, merged) = (report.split, report.merged);
        let (index, numbers) = (report.index, std::mem::take(&mut report.numbers));
        let Some(mut message) = Message::boundary(report, body) else {
            return Box::pin(self.lost(Loss::Unusable)).await;
        };
        if let Some(Event::Boundary(event)) = message.events.first()
            && let Err(reason) = check_outputs(&event.outputs)
        {
            return Box::pin(self.fail_now(Fault::WrongAnswer, reason)).await;
        }
        if let Err(reason) = self.share(&mut message, split, merged) {
            return Box::pin(self.fail_now(Fault::WrongAnswer, reason)).await;
        }
        if !emits.is_empty() && !Box::pin(self.emit(&mut message, emits)).await {
            return;
        }
        match self.noted(index, numbers) {
            Ok(noted) => message.events.extend(noted),
            Err(wrong) => {
                let reason = wrong.to_string();
                return Box::pin(self.fail_now(Fault::WrongAnswer, reason)).await;
            }
        }
        if let (Some(share), Some(Event::Boundary(event))) =
            (&mut self.energy, message.events.first_mut())
        {
            event.energy = share.interval();
        }
        if reason == Reason::End {
            return self.keep_end(message);
        }
        if reason == Reason::Park {
            self.stands(&mut message, computed_until);
        }
        if reason == Reason::Yield {
            let pending = self.pending.take().unwrap_or(PendingOrder::Yield {
                cause: fiec_schemas::Cause::Balance,
                to: None,
                decision: None,
            });
            let (events, to) = pending.events(self.epoch, computed_until);
            message.events.extend(events);
            message.after.extend(to.clone().map(After::Confirm));
            message.handover = to;
            message.priority = Some(self.shared.uploads.urgent());
            self.known.hurry.set();
            self.ended = true;
            tracing::info!("yielded at boundary");
        }
        self.stage(message).await;
    }

    pub(crate) async fn failed(&mut self, fault: Fault, reason: String, stderr: String) {
        let end = match self.cancelling.take() {
            // That was promised, and a hold would not be an end.
            Some(who) => Event::Cancelled { who },
            None => {
                self.shared.metrics.failed.inc();
                tracing::warn!(reason, "failed");
                failure(&self.spec, fault, attempts::cut(reason), stderr)
            }
        };
        self.stage(Message::of(vec![end])).await;
        self.ended = true;
        self.slot = None;
    }
}

/// A child stamps by this machine's clock. A ledger has the broker's time.
fn restamp(report: &mut Report, clock: &BrokerClock) {
    match report {
        Report::Began { at, .. } => *at = clock.stamp(*at),
        Report::Boundary(report) => report.computed_at = clock.stamp(report.computed_at),
        Report::Completed {
            computing_since,
            computed_until,
            ..
        } => {
            let took = computed_until.micros() - computing_since.micros();
            *computed_until = clock.stamp(*computed_until);
            *computing_since = Timestamp::from_micros(computed_until.micros() - took);
        }
        Report::Ready
        | Report::Prepared { .. }
        | Report::Progress { .. }
        | Report::Fetch { .. }
        | Report::Reserve(_)
        | Report::Surroundings
        | Report::Ask(_)
        | Report::Aside
        | Report::Whole
        | Report::Failed { .. }
        | Report::Cancelled => {}
    }
}
