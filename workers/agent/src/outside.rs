//! What a runner does for programs that are not built in, and for the data that programs ask for:
//! gives a binding back that it cannot serve, holds a program to its manifest, answers fetches.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::Tip;
use fiec_kit::frames::{Order, Report};
use fiec_schemas::package::OnSilence;
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Digest, Event, Submission};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use crate::attempts::{cut, device_budget};
use crate::cache::NotCached;
use crate::data::NoData;
use crate::devices::GIVEN_UP_WITHIN;
use crate::leftovers;
use crate::packages::{Package, Program};
use crate::runner::{Runner, Silence};
use crate::shared::{Shared, Slot};

/// A program that took so long to be fetched may have been bound elsewhere meanwhile.
const MOVED_ON_AFTER: Duration = Duration::from_secs(2);
/// An adaptor that has used no processor time for so long after its limit is frozen; so is a child
/// that has been stopped (SIGSTOP) for so long.
const FROZEN_AFTER: Duration = Duration::from_secs(8);
/// Fetches of one program at once; a kit asks for one at a time.
const FETCHES: usize = 16;

type Answer = (Digest, Result<Bytes, NoData>);

/// What a program has asked for and not got yet.
#[derive(Default)]
pub(crate) struct Fetches(Option<FuturesUnordered<Pin<Box<dyn Future<Output = Answer> + Send>>>>);

impl Fetches {
    /// The next answer; waits for ever where nothing was asked.
    pub(crate) async fn next(&mut self) -> Answer {
        if let Some(under_way) = &mut self.0
            && let Some(answer) = under_way.next().await
        {
            return answer;
        }
        std::future::pending().await
    }

    /// True while something was asked and not answered.
    pub(crate) fn any(&self) -> bool {
        self.0.as_ref().is_some_and(|all| !all.is_empty())
    }
}

/// Waits for the program of a binding, and at the same time for the end of everything.
pub(crate) async fn find(shared: &Shared, program: &str) -> Option<Result<Program, NotCached>> {
    tokio::select! {
        biased;
        () = shared.halt.cancelled() => None,
        found = shared.packages.find(program) => Some(found),
    }
}

/// The program of a binding, or the reason why it must be given back; none where nothing is to be
/// done: everything ends, or it was bound elsewhere while its program was fetched.
pub(crate) async fn program_of(
    shared: &Shared,
    spec: &Submission,
    tip: &Tip,
) -> Option<(Program, Option<NotCached>)> {
    let asked = Instant::now();
    let found = find(shared, &spec.program).await?;
    if asked.elapsed() > MOVED_ON_AFTER && has_moved_on(shared, tip).await {
        tracing::info!("bound elsewhere while its program was fetched");
        return None;
    }
    Some(match found {
        // Orders to leave went to what had begun.
        Ok(Program::Package(_)) if shared.is_draining() => {
            let reason = "the node is draining".to_owned();
            (Program::BuiltIn, Some(NotCached(reason)))
        }
        Ok(program) => (program, None),
        Err(reason) => (Program::BuiltIn, Some(reason)),
    })
}

/// Takes the device that a binding names, or says why it must be given back.
pub(crate) async fn take_device(
    shared: &Shared,
    spec: &Submission,
    tip: &Tip,
    slot: &mut Slot,
) -> Option<NotCached> {
    // What an earlier holder of the slot computed on is not this one's.
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

/// Whether a binding that waited long is no more in force. When that cannot be found out the
/// first append will tell.
async fn has_moved_on(shared: &Shared, tip: &Tip) -> bool {
    let state = &tip.state;
    let last = shared.ledger.last(&state.tenant, state.execution).await;
    matches!(last, Ok(Some(entry)) if entry.message.state.epoch > state.epoch)
}

impl Runner {
    /// Gives the binding back: this node cannot run the program, another one may.
    pub(crate) fn refuse(&mut self, reason: &NotCached) {
        let shared = &self.shared;
        let offer = shared.options.slots.saturating_sub(shared.running());
        tracing::warn!(%reason, "refused");
        shared.metrics.refused.inc();
        let reason = cut(reason.to_string());
        self.finish(vec![Event::Refused { reason, offer }]);
    }

    fn patience(&self) -> Option<Duration> {
        let limits = &self.program.package()?.manifest().limits;
        limits.boundary_ms.map(Duration::from_millis)
    }

    /// Whether the program has an adaptor in a child of ours, which looks at the clock by itself,
    /// each capsule by itself.
    fn has_adaptor(&self) -> bool {
        let package = self.program.package();
        package.is_some_and(|package| package.command().is_none())
    }

    /// From now on the program is to reach its next boundary in time.
    pub(crate) fn expect_boundary(&mut self) {
        self.ticks = None;
        let patience = self.patience().unwrap_or(FROZEN_AFTER);
        self.silence = Some((Silence::Boundary, Instant::now() + patience));
    }

    /// A run begins. What an adaptor prepares before the first capsule has no limit.
    pub(crate) fn expect_first_boundary(&mut self) {
        self.expect_boundary();
        if self.has_adaptor() {
            self.expect_to_run();
        }
    }

    /// From now on its child may do what it likes, but is not to be stopped.
    fn expect_to_run(&mut self) {
        self.silence = Some((Silence::Stopped, Instant::now() + FROZEN_AFTER));
    }

    /// Looks at a report of a program that is not built in. True where it goes beyond the
    /// manifest: the execution has failed then.
    pub(crate) async fn is_beyond(&mut self, report: &mut Report) -> bool {
        let Some(package) = self.program.package().cloned() else {
            return false;
        };
        package.distrust(report);
        match report {
            Report::Began { .. } | Report::Boundary(_) | Report::Progress { .. } => {
                self.expect_boundary();
            }
            _ => {}
        }
        if report.ends_run() {
            self.silence = None;
        }
        let Some(reason) = package.breaks(report) else {
            return false;
        };
        self.fail_now(reason).await;
        true
    }

    /// Ends the child and appends that the execution has failed for good.
    pub(crate) async fn fail_now(&mut self, reason: String) {
        self.silence = None;
        let child = self.child.take();
        let stderr = child.map(|c| c.logs.tail()).unwrap_or_default();
        self.wait = None;
        self.failed(reason, stderr).await;
    }

    /// No boundary was reached in time.
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
        // What waits for the broker, or for data, is not the program's fault.
        let waits = self.flight.is_some() || !self.staged.is_empty() || self.fetches.any();
        if package.manifest().limits.on_silence == OnSilence::Wait {
            if self.ticks.is_none() {
                tracing::warn!(?patience, "no boundary was reached for long; waiting on");
            }
            return Box::pin(self.watch_stopped()).await;
        }
        if self.has_adaptor() {
            return self.watch_adaptor(&package, waits).await;
        }
        if !waits {
            let reason = format!(
                "limit boundary_ms: {} reached no boundary within {} ms",
                package.told.program,
                patience.as_millis()
            );
            return self.fail_now(reason).await;
        }
        self.expect_boundary();
    }

    /// An adaptor ends its program at the limit by itself, and may have much to do then, such as to
    /// pack σ. One that uses no processor time for [`FROZEN_AFTER`] is frozen, and ended.
    async fn watch_adaptor(&mut self, package: &Package, waits: bool) {
        let ticks = self.child.as_ref().and_then(|c| leftovers::ticks(c.pid()));
        let before = std::mem::replace(&mut self.ticks, ticks);
        let limits = &package.manifest().limits;
        let works = before.is_none() || before != ticks;
        if waits || works {
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
        self.fail_now(reason).await;
    }

    /// A program that has no limit, or is waited for, may compute for as long as it likes, but a child
    /// that is stopped computes nothing: it is ended, which counts as a crash.
    async fn watch_stopped(&mut self) {
        let Some(child) = &self.child else { return };
        let ticks = leftovers::ticks(child.pid());
        let before = std::mem::replace(&mut self.ticks, ticks);
        if before.is_none() || before != ticks || !leftovers::is_stopped(child.pid()) {
            self.expect_to_run();
            return;
        }
        self.silence = None;
        child.kill();
        let reason = format!("its child was stopped for {} s", FROZEN_AFTER.as_secs());
        self.lost(Some(reason)).await;
    }

    /// The program asks for data.
    pub(crate) async fn fetch(&mut self, digest: Digest, bytes: u64) {
        let fetches = self.fetches.0.get_or_insert_default();
        if fetches.len() >= FETCHES {
            let reason = format!("more than {FETCHES} fetches at once");
            let answer = Err(NoData {
                reason,
                permanent: true,
            });
            return self.answer_fetch((digest, answer)).await;
        }
        let data = self.shared.data.clone();
        let sure = self.sure.clone();
        fetches.push(Box::pin(async move {
            let mut found = data.get(digest, bytes).await;
            if let (Err(_), Some(sure)) = (&found, sure) {
                // It may be an output of the very commit that brought the execution here, which is
                // stored before the binding.
                sure.cancelled().await;
                found = data.get(digest, bytes).await;
            }
            (digest, found)
        }));
    }

    /// Data, or the reason why there is none.
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
            Err(NoData { reason, permanent }) => (
                Order::Data {
                    digest,
                    error: Some(reason),
                    permanent,
                },
                Bytes::new(),
            ),
        };
        if let Some(child) = &mut self.child
            && let Err(error) = child.order(&order, &body).await
        {
            // Reading will tell how it ended.
            tracing::debug!(%error, "the child takes no data");
        }
    }

    /// The child is gone, and with it what it asked for.
    pub(crate) fn forget_fetches(&mut self) {
        self.fetches = Fetches::default();
    }
}
