//! The start of an execution on this node: from its binding to a runner with a child.

use std::collections::{BTreeSet, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use fiec_broker::Tip;
use fiec_schemas::chain;
use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::attempts;
use crate::child_process::Child;
use crate::computed::Computed;
use crate::emitted::Next;
use crate::handover;
use crate::healing::Older;
use crate::job::{Job, Start};
use crate::logs::Printed;
use crate::outside::{self, Fetches};
use crate::packages::Program;
use crate::panics::Held;
use crate::reserve;
use crate::runner::{Heard, Runner};
use crate::shared::{Shared, Slot};
use crate::spread::Sharing;
use crate::unrecorded::Unrecorded;
use crate::variables;
use fiec_kit::launch::Values;

/// Starts an execution in its own task, with the given child if that already has its run. A panic
/// there counts as a crash of the execution, and frees its slot.
pub fn spawn(shared: Arc<Shared>, job: Job, slot: Slot, given: Option<Child>) {
    let held = Held::of(&job);
    let run = run(shared.clone(), job, slot, given).instrument(held.span(&shared));
    // Boxed at once: each further step would copy all of it. Its parts that most executions do not
    // need are boxed too, so that it stays small.
    let run = AssertUnwindSafe(Box::pin(run));
    tokio::spawn(async move {
        match run.catch_unwind().await {
            Ok(()) => held.forget(&shared),
            Err(panic) => Box::pin(held.record_panic(&shared, panic)).await,
        }
    });
}

async fn run(shared: Arc<Shared>, job: Job, mut slot: Slot, given: Option<Child>) {
    let Job {
        start,
        ack,
        control,
        progress,
    } = job;
    let (tip, sigma, flight, entrusted) = match start {
        Start::Bound(tip) => (*tip, None, None, None),
        Start::Speculative {
            state,
            sigma,
            confirmed,
            digest,
        } => {
            let tip = Tip {
                seq: 0,
                digest: Some(digest),
                state,
                seen_in: 0,
            };
            let flight = handover::confirmation(shared.clone(), tip.clone(), confirmed);
            (tip, Some(sigma), Some(flight), None)
        }
        Start::Entrusted(tip, binding) => (*tip, None, None, Some(*binding)),
    };
    let epoch = tip.state.epoch;
    let spec = match attempts::fetch_spec(&shared, &tip).await {
        Ok(spec) => spec,
        Err(error) => {
            tracing::warn!(%error, "cannot read the submission; it will be bound anew");
            return;
        }
    };
    let Some((program, mut refusal)) = outside::program_of(&shared, &spec, &tip).await else {
        return;
    };
    if refusal.is_none() {
        refusal = outside::take_device(&shared, &spec, &tip, &mut slot).await;
    }
    let mut refusal = refusal.or_else(|| reserve::lacks(&shared, &tip.state));
    let mut values = Values::default();
    if refusal.is_none() {
        match variables::read(&shared, &spec).await {
            Ok(read) => values = read,
            Err(reason) => refusal = Some(reason),
        }
    }
    let place = tip.state.phase.binding().map(|b| &*b.substrate);
    let energy = shared.energy_share(place);
    let spread = Sharing::of(&tip.state);
    let Some(chain) = tip.link().map(chain::Held::new) else {
        return;
    };
    let has_our_child =
        !matches!(&program, Program::Package(package) if package.command().is_some());
    let computed = Computed::of(&spec, has_our_child);
    let boundary = tip.state.boundary_index();
    let mut runner = Runner {
        shared: shared.clone(),
        spec,
        ack,
        control,
        stream: shared.stream.subscribe(),
        unrecorded: Unrecorded::new(&tip),
        interval_ms: 0,
        progress,
        older: Older::read(&shared, &tip),
        crashes: tip.state.crashes_since_commit,
        tip,
        chain,
        recheck: false,
        entrusted,
        epoch,
        slot: Some(slot),
        child: None,
        heard: Heard::NotYet,
        flight,
        after: Vec::new(),
        ahead: None,
        staged: VecDeque::new(),
        started: false,
        since: None,
        last: None,
        pending: None,
        cancelling: None,
        wait: None,
        ended: false,
        settling: None,
        gave_up: false,
        parks: has_our_child,
        program,
        fetches: Fetches::default(),
        grant: None,
        given: None,
        parked: None,
        spread,
        asked: None,
        sure: sigma.is_some().then(CancellationToken::new),
        known: Arc::default(),
        silence: None,
        computed,
        owes: false,
        ticks: None,
        energy,
        reported: boundary,
        names: BTreeSet::new(),
        missed: 0,
        printed: Printed::default(),
        values,
    };
    let stays = refusal.is_none() || runner.tip.state.requested().is_some();
    let owes = runner.sure.is_none() && runner.tip.state.outbox.is_some();
    match (refusal, given) {
        (_, None) if owes && stays => runner.settle_outbox(Next::Launch),
        _ if runner.finish_requested() => {}
        (_, Some(child)) => runner.adopt(child).await,
        (Some(reason), None) => runner.refuse(None, reason.to_string()),
        (None, None) => {
            let sigma = match sigma {
                Some(sigma) => runner.received(sigma).await,
                None => None,
            };
            Box::pin(runner.launch(sigma)).await;
        }
    }
    runner.drive().await;
}
