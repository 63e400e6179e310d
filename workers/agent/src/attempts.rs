//! The attempts of one execution: launch a child, notice its loss, retry.

use std::sync::Arc;

use bytes::Bytes;
use fiec_broker::{BrokerError, Tip, store};
use fiec_kit::frames::{self, Order, Run};
use fiec_kit::room::Room;
use fiec_kit::start::{NotStarted, is_by_env};
use fiec_schemas::event::ExecutionState;
use fiec_schemas::limits::{self, REASON_LIMIT};
use fiec_schemas::package::Grant;
use fiec_schemas::subjects::INLINE_STATE_LIMIT;
use fiec_schemas::{Event, Fault, Owner, Submission};
use tokio::time::Instant;

use crate::ahead;
use crate::child_process::{Child, Setting};
use crate::endings::{Exit, Loss, failure, killed};
use crate::large;
use crate::message::{After, Message, backoff};
use crate::missing;
use crate::packages::Package;
use crate::pending_order::PendingOrder;
use crate::runner::{Heard, Runner, Wait};
use crate::shared::Shared;
use crate::spread::{self, Returning, Sharing};

/// Returns the submission, from the message or by its digest, with all later changes applied.
pub async fn fetch_spec(shared: &Shared, tip: &Tip) -> Result<Arc<Submission>, BrokerError> {
    let mut spec = submitted(shared, tip).await?;
    if let Some(change) = &tip.state.adjusted {
        change.apply(Arc::make_mut(&mut spec));
    }
    Ok(spec)
}

/// Returns the submission in its original form.
async fn submitted(shared: &Shared, tip: &Tip) -> Result<Arc<Submission>, BrokerError> {
    if let Some(spec) = &tip.state.spec {
        return Ok(spec.clone());
    }
    let bytes = Box::pin(store::get_data(&shared.broker, tip.state.submission, 0)).await?;
    serde_json::from_slice(&bytes)
        .map(Arc::new)
        .map_err(|error| BrokerError::Malformed {
            what: format!("submission {}", tip.state.submission.short()),
            reason: error.to_string(),
        })
}

/// Bytes of a shared device's memory that an execution needs: from its submission, or from the last
/// adjustment, as the policy counts it ([`fiec_schemas::scheduling::Adjustment::apply_to`]).
pub(crate) fn device_budget(state: &ExecutionState, spec: &Submission) -> Option<u64> {
    let share = spec.requires.device.as_ref()?.share_bytes?;
    let asked = state.adjusted.as_ref().and_then(|a| a.device_memory_bytes);
    Some(asked.unwrap_or(share))
}

/// Bytes of memory that its program has requested.
pub(crate) fn asked_memory(state: &ExecutionState) -> Option<u64> {
    state.adjusted.as_ref()?.memory_bytes
}

/// Returns the grant of an execution at the start of its run.
fn first_grant(shared: &Shared, state: &ExecutionState, spec: &Submission) -> Grant {
    let binding = state.phase.binding();
    let mut grant = shared.grant(binding.map(|b| b.substrate.as_str()));
    if let Some(share) = &mut grant.memory_bytes {
        // If other executions have more than their share, the rest of the memory, and at least a
        // quarter of the share.
        let taken = shared.grants.of_others(state.execution);
        let left = shared.offered_memory().saturating_sub(taken);
        *share = (*share).min(left.max(*share / 4));
        // A request that was made on another node is met here only if that much memory is left.
        let asked = asked_memory(state).filter(|asked| *asked <= left);
        *share = asked.map_or(*share, |asked| asked.max(*share));
    }
    if let (Some(device), Some(budget)) = (&mut grant.device, device_budget(state, spec)) {
        // Never more than the envelope offers of the device now.
        let offered = device.memory_bytes.unwrap_or(budget);
        device.memory_bytes = Some(budget.min(offered));
    }
    grant
}

/// Builds the order that starts a run in a child.
pub(crate) fn order_to_run(
    shared: &Shared,
    state: &ExecutionState,
    spec: &Submission,
    package: Option<frames::Package>,
) -> Run {
    Run {
        execution: state.execution,
        epoch: state.epoch,
        program: spec.program.clone(),
        params: spec.params.clone(),
        commit: spec.commit,
        boundary: state.boundary.as_ref().map(|p| p.index),
        lease_ms: u32::try_from(shared.options.lease.as_millis()).unwrap_or(u32::MAX),
        interval_ms: shared.stream.borrow().recorded.interval_ms(),
        crashes: match &package {
            None => state.totals.crashes,
            Some(_) => 0,
        },
        package,
        grant: first_grant(shared, state, spec),
        spread: state.spread.as_deref().map(spread::shares),
        merge: None,
    }
}

impl Runner {
    /// Starts the program in a child.
    pub(crate) async fn launch(&mut self, sigma: Option<Bytes>) {
        self.start(sigma, true).await;
    }

    /// As [`Runner::launch`]. With `spare` a child that dies before it has the program is replaced
    /// once.
    async fn start(&mut self, sigma: Option<Bytes>, spare: bool) {
        let place = self.tip.state.boundary.clone();
        let fetched = match (&place, sigma.or_else(|| self.last.clone())) {
            (_, Some(sigma)) => Ok(sigma),
            (None, None) => Ok(Bytes::new()),
            (Some(place), None) if store::is_large(place) => {
                let bound = (self.tip.state.execution, self.epoch);
                Box::pin(large::fetch(&self.shared, bound, place)).await
            }
            (Some(place), None) if place.seq.is_none() => {
                let bound = (self.tip.state.execution, self.epoch);
                Box::pin(missing::beside_the_ledger(&self.shared, bound, place)).await
            }
            (Some(place), None) => {
                let state = self.shared.ledger.state(self.tip.state.execution, place);
                Box::pin(state).await
            }
        };
        let fetched = match (fetched, &place) {
            (Err(error), Some(place)) => Box::pin(self.or_kept(place, error)).await,
            (fetched, _) => fetched,
        };
        // Reports of an earlier attempt that were not stored are dropped.
        self.spread = Sharing::of(&self.tip.state);
        let returning = match self.spread.as_ref().and_then(|s| s.waits_for()) {
            Some(part) => {
                let tenant = &self.tip.state.tenant;
                let returning = spread::returning(&self.shared, tenant, &part);
                Box::pin(returning).await.map(Some)
            }
            None => Ok(None),
        };
        let (state, returning) = match fetched.and_then(|state| Ok((state, returning?))) {
            Ok((_, Some(Returning::NotYet))) => return Box::pin(self.waits_on()).await,
            Ok((_, Some(Returning::Never(fault, reason)))) => {
                return Box::pin(self.fail_now(fault, reason)).await;
            }
            Ok((state, Some(Returning::Part(merge, part)))) => (state, Some((merge, part))),
            Ok((state, None)) => (state, None),
            Err(error) => return Box::pin(self.cannot_fetch(error)).await,
        };
        self.missed = 0;
        let before = &self.tip.state;
        if !self.started && (before.lost_unstarted || !before.deaths.is_empty()) {
            // Workers ended under it. Its ledger says that it has started before it may end this
            // one too.
            let message = Message {
                after: vec![After::Begin(state)],
                ..Message::default()
            };
            return Box::pin(self.stage(message)).await;
        }
        let key = (self.spec.program.clone(), self.tip.state.tenant.clone());
        let execution = self.tip.state.execution;
        let package = self.program.package().cloned();
        let pool = self.shared.pool.clone();
        let setting = Setting {
            device: self.device(),
            values: self.values.clone(),
        };
        let taken = pool.take(&key, execution, package.as_ref(), &setting);
        let taken = Box::pin(taken).await;
        self.take_memory_back();
        let mut child = match taken {
            Ok(child) => child,
            Err(error) => return Box::pin(self.not_started(error)).await,
        };
        let told = package.as_ref().map(|p| p.told(&setting.values));
        let mut run = order_to_run(&self.shared, &self.tip.state, &self.spec, told);
        run.interval_ms = self.paced();
        if let Some(grant) = &self.grant {
            run.grant = grant.clone();
        }
        let mut body = state.clone();
        if let Some(sharing) = &mut self.spread {
            run.spread = Some(sharing.begin(returning.is_some()));
        }
        if let Some((merge, part)) = returning {
            run.merge = Some(merge);
            body = [&state[..], &part[..]].concat().into();
        }
        self.reported = run.boundary.unwrap_or(0);
        self.shared.grants.note(execution, &run.grant);
        self.given = Some(run.grant.clone());
        child.confine(&run.grant.cpus);
        let cpus = run.grant.cpus.clone();
        let run = Order::Run(Box::new(run));
        child.logs.serve(
            &self.tip.state.tenant,
            execution,
            self.epoch,
            self.tip.state.boundary_index(),
            self.printed,
        );
        self.heard = Heard::NotYet;
        self.forget_fetches();
        self.expect_first_boundary();
        if child.order(&run, &body).await.is_err() {
            if !spare {
                return Box::pin(self.died(child)).await;
            }
            // It died while idle. A fresh child has served nobody.
            child = match Box::pin(pool.fresh(&key, package.as_ref(), &setting)).await {
                Ok(child) => child,
                Err(error) => return Box::pin(self.not_started(error)).await,
            };
            child.logs.serve(
                &self.tip.state.tenant,
                execution,
                self.epoch,
                self.tip.state.boundary_index(),
                self.printed,
            );
            self.heard = Heard::NotAgain;
            child.confine(&cpus);
            if child.order(&run, &body).await.is_err() {
                return Box::pin(self.died(child)).await;
            }
        }
        if state.len() <= INLINE_STATE_LIMIT && place.is_some() {
            self.last = Some(state);
        }
        self.child = Some(child);
        self.begun().await;
    }

    /// Adopts a child that already has this execution's run.
    pub(crate) async fn adopt(&mut self, mut child: Child) {
        // The run was given ahead, without a request for certain processors.
        child.confine(&[]);
        let state = &self.tip.state;
        let execution = state.execution;
        let logs = &child.logs;
        logs.serve(&state.tenant, execution, self.epoch, 0, self.printed);
        let grant = first_grant(&self.shared, state, &self.spec);
        // Runs are given ahead to built-in programs only.
        child.link.make(Room::of(None, &grant));
        self.shared.grants.note(state.execution, &grant);
        self.given = Some(grant);
        self.heard = Heard::NotYet;
        self.expect_first_boundary();
        self.child = Some(child);
        self.begun().await;
        // Sends the interval unless it is 0, which the run assumes already.
        self.pace().await;
    }

    /// Its child has the run.
    async fn begun(&mut self) {
        self.shared.kills().pass();
        if let Some(child) = &mut self.child
            && let Some(key) = child.key.take()
        {
            ahead::give(&self.shared, child, &key).await;
            child.key = Some(key);
        }
        if !self.started {
            self.since.get_or_insert_with(|| self.shared.broker.now());
            let alone = Instant::now() + self.shared.options.started_alone_after;
            self.wait = Some((Wait::Started, alone));
        }
        if let Some(live) = self.shared.live().get_mut(&self.tip.state.execution) {
            live.begun = true;
        }
        if let Some(computed) = &mut self.computed {
            computed.begin(&self.tip.state, Instant::now());
        }
        self.computes_uncommitted(true);
    }

    /// Handles a child that died before it had the program.
    async fn died(&mut self, child: Child) {
        let logs = child.logs.clone();
        let package = child.package.clone();
        let exit = child.autopsy().await;
        self.printed = logs.printed();
        let said = logs.tail();
        let (fault, words) = self.ending(Loss::Ended, &exit, package.as_deref(), &said);
        self.faulted(fault, words, said);
    }

    /// Handles a program that ended without a report, or sent one that cannot be used.
    pub(crate) async fn lost(&mut self, loss: Loss) {
        let Some(child) = self.child.take() else {
            return;
        };
        if self.heard == Heard::NotYet && self.cancelling.is_none() {
            // Died idle in the pool, or at its very start: one retry before it counts as a crash.
            let logs = child.logs.clone();
            child.autopsy().await;
            self.printed = logs.printed();
            self.forget_park();
            let last = self.last.clone();
            self.start(last, false).await;
            // Its successor was not heard yet either, and gets no second retry.
            self.heard = Heard::NotAgain;
            if self.pending.is_some() && !self.ended {
                // Nor has it received the pending order.
                self.obey_pending().await;
            }
            return;
        }
        if self.is_parked() {
            return self.died_parked(child).await;
        }
        let logs = child.logs.clone();
        let package = child.package.clone();
        let exit = child.autopsy().await;
        self.printed = logs.printed();
        let said = logs.tail();
        let (fault, words) = self.ending(loss, &exit, package.as_deref(), &said);
        if let Some(who) = self.cancelling.take() {
            self.stage(Message::of(vec![Event::Cancelled { who }]))
                .await;
            self.ended = true;
            self.slot = None;
            return;
        }
        self.faulted(fault, words, said);
    }

    /// Ends the child at once. Returns the tail of its stderr, when all of its output is published.
    pub(crate) async fn end_child(&mut self) -> String {
        let Some(child) = self.child.take() else {
            return String::new();
        };
        let logs = child.logs.clone();
        child.kill();
        child.autopsy().await;
        self.printed = logs.printed();
        logs.tail()
    }

    /// The fault of a child that was lost so, and its words. `said`: the end of its stderr.
    fn ending(
        &self,
        loss: Loss,
        exit: &Exit,
        package: Option<&Package>,
        said: &str,
    ) -> (Fault, String) {
        if let (Loss::Ended, Some(error)) = (&loss, exit.start_error())
            && self.heard != Heard::Yes
            && let Some(command) = package.and_then(Package::command)
            && command.first().is_some_and(|first| is_by_env(first))
        {
            let command = command.join(" ");
            let mut words = format!("{command} ended with {exit} before it said anything");
            if let Some(last) = said.lines().last() {
                words = format!("{words}; on stderr: {last}");
            }
            return (Fault::CannotStart { command, error }, words);
        }
        loss.of(exit)
    }

    /// Handles a program that this node cannot start.
    async fn not_started(&mut self, error: NotStarted) {
        let words = error.to_string();
        match error.fault.kind().owner() {
            Owner::Program => self.fail_now(error.fault, words).await,
            Owner::Node | Owner::Infrastructure | Owner::Submission => {
                self.go_elsewhere(error.fault, words);
            }
        }
    }

    /// Drops an order to park. The next attempt does not receive it; its sender has to repeat it.
    pub(crate) fn forget_park(&mut self) {
        if matches!(self.pending, Some(PendingOrder::Park { .. })) {
            self.pending = None;
            self.parked = None;
        }
    }

    /// Handles a fault: the program's own counts as a crash, any other gives the binding back.
    pub(crate) fn faulted(&mut self, fault: Fault, words: String, stderr: String) {
        let (fault, words) = killed(fault, words, self.shared.kills());
        match fault.kind().owner() {
            Owner::Program => self.crashed(fault, words, stderr),
            Owner::Node | Owner::Infrastructure | Owner::Submission => {
                self.go_elsewhere(fault, words);
            }
        }
    }

    fn crashed(&mut self, fault: Fault, exit: String, stderr: String) {
        self.shared.metrics.crashes.inc();
        if let Some(who) = self.cancelling.take() {
            // No attempt follows that a cancel could end.
            self.finish(vec![Event::Cancelled { who }]);
            self.wait = None;
            return;
        }
        self.forget_park();
        let waiting = self.staged.iter().flat_map(|m| &m.events);
        let before = waiting.fold(self.crashes, |crashes, e| e.crashes_after(crashes));
        let attempt = before.saturating_add(1);
        let wait = backoff(self.shared.options.backoff, attempt);
        let mut events = Vec::new();
        if !self.started {
            self.started = true;
            let computing_since = self.since.unwrap_or_else(|| self.shared.broker.now());
            events.push(Event::Started {
                epoch: self.epoch,
                computing_since,
            });
        }
        let exit = cut(exit);
        tracing::warn!(attempt, exit, "the program crashed");
        let gives_up = attempt > self.spec.retries;
        events.push(Event::Crashed {
            attempt,
            exit: exit.clone(),
            stderr: if gives_up {
                String::new()
            } else {
                stderr.clone()
            },
            backoff_ms: if gives_up { 0 } else { wait.as_millis() as u64 },
            fault: Some(Box::new(fault.clone())),
        });
        if gives_up {
            self.shared.metrics.failed.inc();
            let last = stderr.lines().map(str::trim).rfind(|line| !line.is_empty());
            let said = match last.filter(|last| !exit.contains(last)) {
                Some(last) => format!("; it said: {last}"),
                None => String::new(),
            };
            let reason = cut(format!(
                "the program crashed {attempt} times since its last commit ({exit}); retries: {}{said}",
                self.spec.retries
            ));
            events.push(failure(&self.spec, fault, reason, stderr));
            self.finish(events);
            self.wait = None;
        } else if let Some(pending) = self.pending.take() {
            // A yield or a pause is pending. The last commit satisfies it, and no attempt follows
            // here.
            let (more, _) = pending.events(self.epoch, self.shared.broker.now());
            events.extend(more);
            self.finish(events);
            self.wait = None;
        } else {
            self.staged.push_back(Message::of(events));
            self.wait = Some((Wait::Retry, Instant::now() + wait));
        }
    }
}

/// Cuts a reason to the length that an event may hold.
pub(crate) fn cut(mut text: String) -> String {
    limits::cut(&mut text, REASON_LIMIT);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::scheduling::Adjustment;
    use fiec_schemas::{ExecutionId, Tenant, Timestamp};

    #[test]
    fn an_adjustment_replaces_the_budget_of_a_shared_device_up_and_down() {
        let line = br#"{"program":"mine@1","requires":{"device":{"share_bytes":10}}}"#;
        let mut spec = Submission::parse(line).unwrap();
        let mut state = ExecutionState::unborn(
            Tenant::new("t").unwrap(),
            ExecutionId(uuid::Uuid::nil()),
            Arc::new(spec.clone()),
            None,
            Timestamp::from_micros(1),
        );
        assert_eq!(device_budget(&state, &spec), Some(10));
        for bytes in [20, 6] {
            let change = Adjustment {
                device_memory_bytes: Some(bytes),
                ..Adjustment::default()
            };
            state.adjusted = Some(Box::new(change.clone()));
            assert_eq!(device_budget(&state, &spec), Some(bytes));
            // The policy counts the same.
            change.apply(&mut spec);
            let device = spec.requires.device.as_ref().unwrap();
            assert_eq!(device.share_bytes, Some(bytes));
        }
    }
}
