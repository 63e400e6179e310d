//! The runner's work for foreign programs and for data that programs fetch. It gives back a binding
//! that it cannot serve, enforces the manifest's limits, and answers fetches.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::Tip;
use fiec_kit::frames::{Order, Report};
use fiec_schemas::package::OnSilence;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Digest, Fault, Submission};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use crate::attempts::device_budget;
use crate::cache::NotCached;
use crate::data::NoData;
use crate::devices::GIVEN_UP_WITHIN;
use crate::endings::Loss;
use crate::packages::{Package, Program};
use crate::proc_stat::Stat;
use crate::runner::{Runner, Silence};
use crate::shared::{Shared, Slot};

/// After a fetch of a program that took this long, the execution may be bound elsewhere.
const MOVED_ON_AFTER: Duration = Duration::from_secs(2);
/// A frozen adaptor has used no processor time for this long after its limit. A frozen child has
/// been stopped (SIGSTOP) for this long.
const FROZEN_AFTER: Duration = Duration::from_secs(8);
/// Concurrent fetches of one program. A kit sends one at a time.
const FETCHES: usize = 16;

type Answer = (Digest, Result<Bytes, NoData>);

/// Fetches of a program that are not answered yet.
#[derive(Default)]
pub(crate) struct Fetches(Option<FuturesUnordered<Pin<Box<dyn Future<Output = Answer> + Send>>>>);

impl Fetches {
    /// Returns the next answer. Waits forever if there are no fetches.
    pub(crate) async fn next(&mut self) -> Answer {
        if let Some(under_way) = &mut self.0
            && let Some(answer) = under_way.next().await
        {
            return answer;
        }
        std::future::pending().await
    }

    /// Whether a fetch is not answered yet.
    pub(crate) fn any(&self) -> bool {
        self.0.as_ref().is_some_and(|all| !all.is_empty())
    }
}

/// Waits for the program of a binding, and at the same time for the halt of the agent.
pub(crate) async fn find(shared: &Shared, program: &str) -> Option<Result<Program, NotCached>> {
    tokio::select! {
        biased;
        () = shared.halt.cancelled() => None,
        found = shared.packages.find(program) => Some(found),
    }
}

/// Returns the program of a binding, with a reason if the binding must be given back. Returns none
/// if there is nothing to do: the agent halts, or the execution was bound elsewhere during the
/// fetch.
pub(crate) async fn program_of(
    shared: &Shared,
    spec: &Submission,
    tip: &Tip,
) -> Option<(Program, Option<NotCached>)> {
    let asked = Instant::now();
    let found = find(shared, &spec.program).await?;
    if asked.elapsed() > MOVED_ON_AFTER && Box::pin(has_moved_on(shared, tip)).await {
        tracing::info!("bound elsewhere while its program was fetched");
        return None;
    }
    Some(match found {
        // Orders to leave went only to executions that had started.
        Ok(Program::Package(_)) if shared.is_draining() => {
            let reason = "the node is draining".to_owned();
            (Program::BuiltIn, Some(NotCached(reason)))
        }
        Ok(program) => (program, None),
        Err(reason) => (Program::BuiltIn, Some(reason)),
    })
}

/// Takes the device that a binding names, or returns why the binding must be given back.
pub(crate) async fn take_device(
    shared: &Shared,
    spec: &Submission,
    tip: &Tip,
    slot: &mut Slot,
) -> Option<NotCached> {
    // The device of the slot's last execution does not belong to this one.
    slot.device = None;
    let place = tip.state.phase.binding()?.substrate.as_str();
    if place == HOST {
        return None;
    }
    let lease = shared
        .devices
        .lease(place, device_budget(&tip.state, spec), GIVEN_UP_WITHIN);
    let taken = tokio::select! {
        biased;
        () = shared.halt.cancelled() => return Some(NotCached("the node is stopping".to_owned())),
        taken = Box::pin(lease) => taken,
    };
    match taken {
        Ok(lease) => {
            slot.device = lease;
            None
        }
        Err(reason) => Some(NotCached(reason)),
    }
}

/// Whether a binding that waited long is superseded. If that cannot be read, the first append finds
/// out.
async fn has_moved_on(shared: &Shared, tip: &Tip) -> bool {
    let state = &tip.state;
    let last = shared.ledger.last(&state.tenant, state.execution).await;
    matches!(last, Ok(Some(entry)) if entry.message.state.epoch > state.epoch)
}

impl Runner {
    fn patience(&self) -> Option<Duration> {
        let limits = &self.program.package()?.manifest().limits;
        limits.boundary_ms.map(Duration::from_millis)
    }

    /// Whether the program has an adaptor in a child of ours. An adaptor enforces each capsule's
    /// time limit by itself.
    fn has_adaptor(&self) -> bool {
        let package = self.program.package();
        package.is_some_and(|package| package.command().is_none())
    }

    /// Starts the time in which the program must reach its next boundary. Without a limit, starts
    /// the check that the child is not stopped.
    pub(crate) fn expect_boundary(&mut self) {
        self.ticks = None;
        match self.patience() {
            Some(patience) => self.silence = Some((Silence::Boundary, Instant::now() + patience)),
            None => self.expect_to_run(),
        }
    }

    /// Stops the clock of `boundary_ms` while the child may wait for this worker. When the last
    /// debt is settled the child has its full time again: it may have spent all of it on waiting.
    pub(crate) fn keep_clock(&mut self) {
        let owes = self.flight.is_some() || !self.staged.is_empty() || self.fetches.any();
        let owed = std::mem::replace(&mut self.owes, owes);
        if owed && !owes && matches!(self.silence, Some((Silence::Boundary, _))) {
            self.expect_boundary();
        }
    }

    /// When the check of a silent child is due, unless its clock stands still.
    pub(crate) fn silence_due(&self) -> Option<Instant> {
        match self.silence? {
            (Silence::Boundary, _) if self.owes => None,
            (_, at) => Some(at),
        }
    }

    /// Starts the checks of a run. The preparation of an adaptor before the first capsule has no
    /// limit.
    pub(crate) fn expect_first_boundary(&mut self) {
        self.expect_boundary();
        if self.has_adaptor() {
            self.expect_to_run();
        }
    }

    /// Starts the check that the child is not stopped. It has no other limit.
    fn expect_to_run(&mut self) {
        self.silence = Some((Silence::Stopped, Instant::now() + FROZEN_AFTER));
    }

    /// Checks a foreign program's report. Returns true if it exceeds the manifest: the execution
    /// has then failed.
    pub(crate) async fn is_beyond(&mut self, report: &mut Report) -> bool {
        let Some(package) = self.program.package().cloned() else {
            return false;
        };
        package.distrust(report);
        match report {
            Report::Began { .. } | Report::Boundary(_) | Report::Progress { .. } => {
                self.expect_boundary();
            }
            Report::Fetch { .. } | Report::Reserve(_) | Report::Surroundings | Report::Ask(_) => {
                // Until the next call of `keep_clock`, if the answer needs no longer.
                self.owes = true;
            }
            _ => {}
        }
        if report.ends_run() {
            self.silence = None;
        }
        let Some(reason) = package.breaks(report) else {
            return false;
        };
        self.fail_now(Fault::Limit, reason).await;
        true
    }

    /// Ends the child and appends a permanent failure of the execution.
    pub(crate) async fn fail_now(&mut self, fault: Fault, reason: String) {
        self.silence = None;
        let stderr = self.end_child().await;
        self.wait = None;
        self.failed(fault, reason, stderr).await;
    }

    /// Handles a boundary that was not reached in time.
    pub(crate) async fn silent(&mut self) {
        let silence = self.silence.take().map(|(silence, _)| silence);
        let (Some(package), Some(patience), Some(Silence::Boundary)) =
            (self.program.package().cloned(), self.patience(), silence)
        else {
            return Box::pin(self.watch_stopped()).await;
        };
        if self.child.is_none() {
            return;
        }
        if package.manifest().limits.on_silence == OnSilence::Wait {
            if self.ticks.is_none() {
                tracing::warn!(
                    ?patience,
                    "the program has not reached a boundary for long; still waiting"
                );
            }
            return Box::pin(self.watch_stopped()).await;
        }
        if self.has_adaptor() {
            return self.watch_adaptor(&package).await;
        }
        let mut reason = format!(
            "limit boundary_ms: {} reached no boundary within {} ms",
            package.told.program,
            patience.as_millis()
        );
        let stat = self.child.as_ref().and_then(|c| Stat::of(c.pid()));
        if let Some(stat) = stat.filter(Stat::is_held) {
            match self.ticks.replace(stat.ticks) {
                None => {
                    self.silence = Some((Silence::Boundary, Instant::now() + FROZEN_AFTER));
                    return;
                }
                Some(before) if before == stat.ticks => {
                    let seconds = FROZEN_AFTER.as_secs();
                    reason.push_str(&format!(", and was frozen for {seconds} s after that"));
                    return self.go_elsewhere(Fault::Frozen, reason);
                }
                Some(_) => {}
            }
        }
        self.fail_now(Fault::Limit, reason).await;
    }

    /// An adaptor ends its program at the limit by itself. It may have much work then, such as
    /// packing σ. An adaptor without processor time for [`FROZEN_AFTER`] is frozen, and is ended.
    async fn watch_adaptor(&mut self, package: &Package) {
        let stat = self.child.as_ref().and_then(|c| Stat::of(c.pid()));
        let ticks = stat.map(|stat| stat.ticks);
        let before = std::mem::replace(&mut self.ticks, ticks);
        let limits = &package.manifest().limits;
        let works = before.is_none() || before != ticks;
        if works {
            self.silence = Some((Silence::Boundary, Instant::now() + FROZEN_AFTER));
            return;
        }
        let reason = format!(
            "limit boundary_ms: {} reached no boundary within {} ms, and its child was frozen for \
             {} s after that",
            package.told.program,
            limits.boundary_ms.unwrap_or_default(),
            FROZEN_AFTER.as_secs()
        );
        self.go_elsewhere(Fault::Frozen, reason);
    }

    /// A program without a limit may compute for any time, and so may one whose manifest says to
    /// wait. A stopped child computes nothing: it is ended. Its program is not charged for that.
    async fn watch_stopped(&mut self) {
        let Some(child) = &self.child else { return };
        let stat = Stat::of(child.pid());
        let ticks = stat.as_ref().map(|stat| stat.ticks);
        let before = std::mem::replace(&mut self.ticks, ticks);
        if before.is_none() || before != ticks || !stat.is_some_and(|stat| stat.is_stopped()) {
            self.expect_to_run();
            return;
        }
        self.silence = None;
        child.kill();
        let reason = format!("its child was stopped for {} s", FROZEN_AFTER.as_secs());
        self.lost(Loss::Frozen(reason)).await;
    }

    /// Starts a fetch for the program. Only a definite answer is sent to the program: while the
    /// broker does not answer, the fetch waits and orders are still obeyed.
    pub(crate) async fn fetch(&mut self, digest: Digest, bytes: u64) {
        let fetches = self.fetches.0.get_or_insert_default();
        if fetches.len() >= FETCHES {
            let reason = format!("more than {FETCHES} open fetches");
            return self
                .answer_fetch((digest, Err(NoData::Never(reason))))
                .await;
        }
        let data = self.shared.data.clone();
        let sure = self.sure.clone();
        fetches.push(Box::pin(async move {
            let mut found = data.get_when_answered(digest, bytes).await;
            if let (Err(_), Some(sure)) = (&found, sure) {
                // The data may be an output of the commit that brought the execution here. That
                // output is stored before the binding.
                sure.cancelled().await;
                found = data.get_when_answered(digest, bytes).await;
            }
            (digest, found)
        }));
    }

    /// Sends the data to the child, or the reason why there is none.
    pub(crate) async fn answer_fetch(&mut self, (digest, found): Answer) {
        let (order, body) = match found {
            Ok(body) => (
                Order::Data {
                    digest,
                    error: None,
                    permanent: false,
                },
                body,
            ),
            Err(none) => (
                Order::Data {
                    digest,
                    permanent: none.is_permanent(),
                    error: Some(none.reason().to_owned()),
                },
                Bytes::new(),
            ),
        };
        if let Some(child) = &mut self.child
            && let Err(error) = child.order(&order, &body).await
        {
            // The next read will report how the child ended.
            tracing::debug!(%error, "the child takes no data");
        }
    }

    /// Drops the fetches of a child that is gone.
    pub(crate) fn forget_fetches(&mut self) {
        self.fetches = Fetches::default();
    }
}
