//! State that the agent's tasks share: the node's identity and resources, live executions, the
//! queue, slots.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fiec_broker::trust::NodeKey;
use fiec_broker::{Broker, BrokerClock, Ledger, chunks, store};
use fiec_probes::MemoryLimit;
use fiec_probes::energy::{EnergyMeter, Share};
use fiec_probes::envelope::Envelopes;
use fiec_probes::latency::LatencyRecorder;
use fiec_probes::oom::OomKills;
use fiec_schemas::event::ExecutionState;
use fiec_schemas::hardware::{RunningProgress, Substrate};
use fiec_schemas::limits::CPUS_LIMIT;
use fiec_schemas::messages::{ControlReply, HOLDINGS_PAGE, Holding, HoldingsPage};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::{
    Bound, Digest, ExecutionId, InstanceId, NodeDescriptor, NodeId, Phase, Sequence, Signal,
    Threshold, author,
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::affinity;
use crate::cache::Cache;
use crate::data::Data;
use crate::devices::{Devices, Lease};
use crate::ended::Ends;
use crate::fetches::Fetches;
use crate::job::{Job, Live};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::packages::Packages;
use crate::park::Parks;
use crate::pool::Pool;
use crate::replies::{NotTaken, Reply};
use crate::reserve::Grants;
use crate::round_trips::RoundTrips;
use crate::superseded::{self, SupersededChunks};
use crate::surroundings::Outlook;
use crate::unrecorded::LedgerStream;
use crate::uploads::Uploads;

/// Thresholds of M that are in force at once.
const MEMORY_THRESHOLDS: usize = 17;

/// Superseded σ that are remembered.
const SUPERSEDED_LIMIT: usize = 1_024;

/// The resources of this node.
pub struct Node {
    /// Packages and data on its disk.
    pub cache: Arc<Cache>,
    cpus: u32,
    slots: u32,
    memory_bytes: u64,
    substrates: Vec<Substrate>,
    /// The clock that envelopes follow.
    clock: BrokerClock,
    /// Energy counters, if the node has any.
    energy: Option<Arc<EnergyMeter>>,
    /// The envelopes that limit the offered resources.
    envelopes: Envelopes,
    /// Kills by the kernel for want of memory.
    kills: OomKills,
}

impl Node {
    /// The resources that the descriptor states.
    pub fn of(descriptor: &NodeDescriptor, cache: Arc<Cache>) -> Self {
        Self {
            cache,
            cpus: descriptor.cpus,
            slots: descriptor.slots.max(1),
            memory_bytes: descriptor.memory_limit_bytes,
            substrates: descriptor.substrates.clone(),
            energy: None,
            envelopes: Envelopes::default(),
            clock: BrokerClock::default(),
            kills: OomKills::new(MemoryLimit::Host),
        }
    }

    /// Sets the energy counters, the envelopes, the clock that they follow, and where to look for
    /// kills.
    #[must_use]
    pub fn with(
        self,
        energy: Option<Arc<EnergyMeter>>,
        envelopes: Envelopes,
        clock: &BrokerClock,
        kills: OomKills,
    ) -> Self {
        Self {
            energy,
            kills,
            envelopes,
            clock: clock.clone(),
            ..self
        }
    }

    /// Returns the part of these bytes of memory that the envelope in force allows to grant now.
    fn offered(&self, device: Option<&str>, bytes: u64) -> u64 {
        let now = self.clock.now();
        let cap = self
            .envelopes
            .cap(Signal::Memory, device, bytes as f64, now);
        cap.map_or(bytes, |cap| cap as u64)
    }

    /// Returns the reason why the node cannot grant that, if it cannot.
    fn refuses(&self, grant: &Grant) -> Option<String> {
        let cpus = self.cpus.max(1);
        if let Some(threads) = grant.threads.filter(|n| *n == 0 || *n > cpus) {
            return Some(format!(
                "threads: {threads} cannot be granted, the node has {cpus} processors"
            ));
        }
        let named = grant.cpus.len();
        if named > CPUS_LIMIT {
            return Some(format!(
                "cpus: {named} processors are named; at most {CPUS_LIMIT} are allowed"
            ));
        }
        if !grant.cpus.is_empty()
            && let Ok(own) = affinity::own()
            && let Some(cpu) = grant.cpus.iter().find(|cpu| !own.contains(*cpu))
        {
            return Some(format!(
                "cpus: there is no processor {cpu} for this worker, which has {own:?}"
            ));
        }
        let most = self.offered(None, self.memory_bytes);
        if let Some(bytes) = grant
            .memory_bytes
            .filter(|n| *n == 0 || (self.memory_bytes > 0 && *n > most))
        {
            return Some(format!(
                "memory_bytes: {bytes} cannot be granted, the node's limit is {most}"
            ));
        }
        let known = |uuid: &str| self.substrates.iter().any(|s| s.id == uuid);
        let device = grant.device.as_ref().filter(|device| !known(&device.uuid));
        device.map(|device| format!("device: the node has no {}", device.uuid))
    }

    /// Returns the grant of one execution on a substrate. The slots share the node's processors and
    /// memory equally, unless `threads` is set. On a device the grant names it.
    fn grant(&self, substrate: Option<&str>, threads: Option<u32>) -> Grant {
        let place = self.substrates.iter().find(|s| Some(&*s.id) == substrate);
        let device = place.filter(|s| s.is_device()).map(|s| DeviceGrant {
            uuid: s.id.clone(),
            memory_bytes: s.memory_bytes.map(|all| self.offered(Some(&s.id), all)),
        });
        Grant {
            substrate: substrate.map(str::to_owned),
            threads: Some(threads.unwrap_or(self.cpus / self.slots).max(1)),
            cpus: Vec::new(),
            memory_bytes: (self.memory_bytes > 0)
                .then(|| self.offered(None, self.memory_bytes) / u64::from(self.slots)),
            device,
        }
    }
}

/// State that the agent's tasks share.
pub struct Shared {
    /// Configuration.
    pub options: Options,
    /// The broker connection.
    pub broker: Broker,
    /// The ledgers.
    pub ledger: Ledger,
    /// This life of the node.
    pub instance: InstanceId,
    /// Author of this worker's messages.
    pub author: String,
    /// Idle children.
    pub pool: Arc<Pool>,
    /// Programs that are not built in.
    pub packages: Packages,
    /// Data by digest.
    pub data: Data,
    /// The disk cache of both.
    pub cache: Arc<Cache>,
    /// The leases of devices.
    pub devices: Arc<Devices>,
    resources: Node,
    /// The agent's metrics.
    pub metrics: Metrics,
    /// The worker takes no more work.
    pub draining: AtomicBool,
    /// Everything ends at once: another instance has the name, or a second signal came.
    pub halt: CancellationToken,
    /// What all runners are told of the ledger stream.
    pub stream: watch::Sender<LedgerStream>,
    /// Wakes the telemetry task: a report is due soon.
    pub news: Notify,
    /// Round trips of real messages.
    pub round_trips: RoundTrips,
    /// Executions that are bound to this node and known here, waiting or computing.
    live: Mutex<HashMap<ExecutionId, Live>>,
    /// Bindings that wait for a slot, in the order of arrival.
    queue: Mutex<VecDeque<Job>>,
    /// Occupied slots.
    running: AtomicU32,
    /// Executions that ended here recently.
    pub ends: Ends,
    /// Large σ that no ledger needs any more, with the time since when, oldest first.
    superseded: Mutex<VecDeque<(Instant, ExecutionId, Digest)>>,
    /// Chunks that no ledger needs any more.
    pub superseded_chunks: SupersededChunks,
    /// Large states that are being fetched, and their chunks.
    pub fetches: Fetches,
    /// The order in which uploads are sent.
    pub uploads: Uploads,
    /// The last sequence of the ledger stream that was seen here.
    newest: AtomicU64,
    /// An execution has left this node.
    pub left: Notify,
    /// Wakes the canary task: a new proof is wanted.
    pub prove: Notify,
    /// Executions that are parked here.
    pub parks: Arc<Parks>,
    /// Grants of the node's memory.
    pub grants: Grants,
    /// The surroundings that programs may ask for.
    pub outlook: Outlook,
    /// Signs the statements of this node.
    pub key: Arc<NodeKey>,
    /// This node is computing a verification.
    pub verifying: AtomicBool,
}

/// A slot; free again when dropped.
pub struct Slot {
    home: Arc<Shared>,
    /// The device that the slot's execution computes on, if any.
    pub device: Option<Lease>,
}

impl Slot {
    /// A slot that is counted already.
    fn counted(home: &Arc<Shared>) -> Self {
        Self {
            home: home.clone(),
            device: None,
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.home.running.fetch_sub(1, Ordering::AcqRel);
        dispatch(&self.home);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The state at start: nothing lives here yet.
    pub fn new(
        options: Options,
        broker: Broker,
        instance: InstanceId,
        pool: Arc<Pool>,
        metrics: Metrics,
        resources: Node,
    ) -> Self {
        // A placeholder that nobody reads: [`Self::with_round_trips`] replaces it.
        let round_trips = RoundTrips::new(broker.client.new_inbox(), LatencyRecorder::default());
        let cache = Arc::clone(&resources.cache);
        let memory = Some(resources.memory_bytes).filter(|bytes| *bytes > 0);
        let allowed = options.allow_programs.clone();
        let parked = options.parked.unwrap_or(options.slots);
        Self {
            packages: Packages::new(
                &broker,
                Arc::clone(&cache),
                allowed,
                options.containers.clone(),
            ),
            data: Data::new(&broker, Arc::clone(&cache)),
            cache,
            devices: Devices::of(&resources.substrates),
            resources,
            ledger: Ledger::new(&broker),
            author: author::of_worker(&options.node, instance),
            options,
            broker,
            instance,
            pool,
            metrics,
            draining: AtomicBool::new(false),
            halt: CancellationToken::new(),
            stream: watch::Sender::default(),
            news: Notify::new(),
            round_trips,
            live: Mutex::default(),
            queue: Mutex::default(),
            running: AtomicU32::new(0),
            ends: Ends::default(),
            superseded: Mutex::default(),
            superseded_chunks: SupersededChunks::default(),
            fetches: Fetches::new(memory),
            uploads: Uploads::default(),
            newest: AtomicU64::new(0),
            left: Notify::new(),
            prove: Notify::new(),
            parks: Arc::new(Parks::new(parked)),
            grants: Grants::default(),
            outlook: Outlook::default(),
            // A placeholder that belongs to nobody: [`Self::with_key`] replaces it.
            key: Arc::new(NodeKey::random()),
            verifying: AtomicBool::new(false),
        }
    }

    /// Reports round trips to these recorders.
    #[must_use]
    pub fn with_round_trips(mut self, round_trips: RoundTrips) -> Self {
        self.round_trips = round_trips;
        self
    }

    /// Signs this node's statements with the key that its claim names.
    #[must_use]
    pub fn with_key(mut self, key: Arc<NodeKey>) -> Self {
        self.key = key;
        self
    }

    /// Notes a large σ that the ledger has superseded. It is deleted after
    /// [`Options::superseded_after`].
    pub fn supersede(&self, before: &ExecutionState, now: &ExecutionState) {
        if now.guarded {
            // A verifier kept it: the execution can go back to it until a later σ is verified.
            return;
        }
        let large = |state: &ExecutionState| {
            let place = state.boundary.as_ref()?;
            place.seq.is_none().then_some(place.digest)
        };
        let needed = large(now).filter(|_| now.phase.kind().needs_state());
        let old = large(before).filter(|old| needed != Some(*old));
        if old.is_none() && needed.is_none() {
            return;
        }
        let mut superseded = lock(&self.superseded);
        // A program that came back to an earlier σ needs that one again.
        superseded.retain(|(_, id, digest)| *id != now.execution || Some(*digest) != needed);
        if let Some(old) = old {
            // Over the limit the oldest stays in the broker until the recorder collects it.
            if superseded.len() >= SUPERSEDED_LIMIT {
                superseded.pop_front();
            }
            superseded.push_back((Instant::now(), now.execution, old));
        }
    }

    /// Deletes the superseded chunks and large σ that are due. With `all` it deletes all of them:
    /// for a worker that leaves, since no other process knows of them.
    pub async fn drop_superseded(&self, all: bool) {
        let after = match all {
            true => Duration::ZERO,
            false => self.options.superseded_after,
        };
        let chunks_after = match all {
            true => Duration::ZERO,
            false => self.chunks_are_due_after().await,
        };
        // A request that waits for the connection could reach a new life of the broker.
        while self.is_connected()
            && let Some(sequences) = self
                .superseded_chunks
                .take_due(&self.broker.server(), chunks_after)
        {
            if let Err(error) = chunks::drop_chunks(&self.broker, &sequences).await {
                tracing::debug!(%error, "old chunks were not dropped");
            }
        }
        loop {
            let due = {
                let mut superseded = lock(&self.superseded);
                match superseded.front() {
                    Some((at, ..)) if at.elapsed() >= after => superseded.pop_front(),
                    _ => None,
                }
            };
            let Some((_, execution, digest)) = due else {
                return;
            };
            if let Err(error) = store::drop_state(&self.broker, execution, digest).await {
                tracing::debug!(%execution, %error, "an old state was not dropped");
            }
        }
    }

    /// How long superseded chunks stay, as crowded as their stream is.
    async fn chunks_are_due_after(&self) -> Duration {
        let after = self.options.superseded_after;
        let soon = after / superseded::CROWDED_PART;
        // Before that the broker need not be asked.
        if !self.superseded_chunks.any_due(soon) {
            return after;
        }
        match chunks::are_crowded(&self.broker).await {
            Ok(true) => soon,
            Ok(false) => after,
            Err(error) => {
                tracing::debug!(%error, "superseded chunks stay");
                after
            }
        }
    }

    /// Notes chunks of this life of the broker that the ledger has superseded.
    pub fn supersede_chunks(&self, sequences: Vec<Sequence>) {
        self.superseded_chunks.note(self.broker.server(), sequences);
    }

    fn is_connected(&self) -> bool {
        self.broker.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Notes that the ledger stream has reached this sequence.
    pub fn reached(&self, seq: Sequence) {
        self.newest.fetch_max(seq, Ordering::Relaxed);
    }

    /// The last sequence of the ledger stream that was seen here, or 0.
    pub fn newest(&self) -> Sequence {
        self.newest.load(Ordering::Relaxed)
    }

    /// Returns the number of the connection to this life of the broker's server, in which its
    /// sequences are valid. Returns 0 if this node is connected to another server.
    pub fn seen_in(&self, server: Option<&str>) -> u64 {
        let same = server.is_some_and(|server| server == self.broker.server());
        if same { self.broker.connection() } else { 0 }
    }

    /// The node's name.
    pub fn node(&self) -> &NodeId {
        &self.options.node
    }

    /// True if this life of the node is to start the execution.
    pub(crate) fn is_bound_here(&self, state: &ExecutionState) -> bool {
        match &state.phase {
            Phase::Bound(Bound { binding, .. }) => {
                binding.instance == self.instance && binding.node == *self.node()
            }
            _ => false,
        }
    }

    /// One execution's share of the energy that a substrate uses, if it is measured.
    pub fn energy_share(&self, substrate: Option<&str>) -> Option<Share> {
        let meter = self.resources.energy.as_ref()?;
        let places = &self.resources.substrates;
        let device = places
            .iter()
            .find(|s| s.is_device() && Some(&*s.id) == substrate);
        Some(Share::new(meter, device.map(|d| &*d.id)))
    }

    /// Reads the counters that were not read for a while.
    pub fn tick_energy(&self) {
        if let Some(meter) = &self.resources.energy {
            meter.tick();
        }
    }

    /// Kills by the kernel for want of memory.
    pub fn kills(&self) -> &OomKills {
        &self.resources.kills
    }

    /// The grant of one execution on a substrate of this node.
    pub fn grant(&self, substrate: Option<&str>) -> Grant {
        self.resources.grant(substrate, self.options.threads)
    }

    /// Logical processors of this node.
    pub fn cpus(&self) -> u32 {
        self.resources.cpus.max(1)
    }

    /// Bytes of memory that the node may grant in all.
    pub fn offered_memory(&self) -> u64 {
        match self.resources.memory_bytes {
            // Not limited.
            0 => u64::MAX,
            bytes => self.resources.offered(None, bytes),
        }
    }

    /// Returns the reason why this node cannot grant that, if it cannot.
    pub fn refuses(&self, grant: &Grant) -> Option<String> {
        self.resources.refuses(grant)
    }

    /// The live executions of this node.
    pub fn live(&self) -> MutexGuard<'_, HashMap<ExecutionId, Live>> {
        lock(&self.live)
    }

    /// Says that the kernel has ended processes which programs had started themselves: the programs may
    /// not say it.
    pub fn tell_silent_kills(&self) {
        self.kills().pass();
        let count = self.kills().take_silent();
        if count > 0 {
            self.metrics.memory_kills.inc_by(count);
            tracing::warn!(
                count,
                "the kernel killed processes because memory ran out, but no program of this worker"
            );
        }
    }

    /// Number of executions that can compute at once: the node's slots, without those that processes
    /// take which do not end.
    pub fn slots(&self) -> u32 {
        let lost = self.pool.lost_slots();
        self.options.slots.saturating_sub(lost)
    }

    /// Number of executions that compute.
    pub fn running(&self) -> u32 {
        self.running.load(Ordering::Acquire)
    }

    /// Number of bindings that wait for a slot.
    pub fn queued(&self) -> usize {
        lock(&self.queue).len()
    }

    /// Takes jobs from the front of the queue while `fits` accepts them: at most `most`, and at
    /// most one slot's share of the queue.
    pub fn take_alike(&self, most: usize, mut fits: impl FnMut(&Job) -> bool) -> VecDeque<Job> {
        let mut queue = lock(&self.queue);
        let share = queue.len() / (self.slots().max(1) as usize);
        let mut taken = VecDeque::new();
        while taken.len() < most.min(share) && queue.front().is_some_and(&mut fits) {
            taken.extend(queue.pop_front());
        }
        taken
    }

    /// Empties the queue, for a drain.
    pub fn take_queue(&self) -> VecDeque<Job> {
        std::mem::take(&mut *lock(&self.queue))
    }

    /// Whether the worker takes no more work.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Removes an execution with its grants, if it lives here under the binding that this message
    /// made. It keeps both if the execution lives here under another binding by now.
    pub fn forget(&self, execution: ExecutionId, bound: Digest) {
        let mut live = self.live();
        if live.get(&execution).is_none_or(|l| l.bound == bound) {
            live.remove(&execution);
            self.grants.forget(execution);
            self.outlook.forget(execution);
        }
        drop(live);
        self.left.notify_waiters();
    }

    /// Builds an answer of this node.
    pub fn reply(&self, taken: Result<(), NotTaken>) -> ControlReply {
        let not_taken = taken.err();
        ControlReply {
            node: self.node().clone(),
            instance: self.instance,
            error: not_taken.as_ref().map(NotTaken::to_string),
            refusal: not_taken.as_ref().and_then(NotTaken::refusal),
            running: Vec::new(),
            holdings: None,
        }
    }

    /// Returns a page of the executions that this node holds, after `after`.
    pub fn holdings(&self, after: Option<ExecutionId>) -> HoldingsPage {
        let mut held: Vec<Holding> = self
            .live()
            .iter()
            .filter(|(id, _)| after.is_none_or(|after| **id > after))
            .map(|(id, live)| Holding {
                execution: *id,
                epoch: live.epoch,
            })
            .collect();
        held.sort_unstable_by_key(|holding| holding.execution);
        let more = held.len() > HOLDINGS_PAGE;
        held.truncate(HOLDINGS_PAGE);
        HoldingsPage { held, more }
    }

    /// The thresholds of M in force here: the node's own, and at most 16 different ones of
    /// executions.
    pub fn memory_thresholds(&self) -> Vec<Threshold> {
        let own = self.options.thresholds.get(&Signal::Memory);
        let mut all: Vec<Threshold> = own.into_iter().copied().collect();
        for brought in self.live().values().filter_map(|l| l.memory) {
            if all.len() < MEMORY_THRESHOLDS && !all.contains(&brought) {
                all.push(brought);
            }
        }
        all
    }

    /// The progress of at most 64 executions that run here.
    pub fn progress(&self) -> Vec<RunningProgress> {
        self.live()
            .values()
            .filter(|l| l.begun)
            .take(64)
            .map(|l| lock(&l.progress).clone())
            .collect()
    }

    /// Age of the oldest work here that no commit holds.
    pub fn oldest_uncommitted(&self) -> Duration {
        let live = self.live();
        let since = live.values().filter_map(|live| live.uncommitted);
        since.min().map(|at| at.elapsed()).unwrap_or_default()
    }

    /// Answers a control request, if its sender waits for an answer.
    pub async fn answer(&self, to: Reply, taken: Result<(), NotTaken>) {
        self.send_reply(to, &self.reply(taken)).await;
    }

    /// Sends this answer, if the sender of the request waits for one.
    pub async fn send_reply(&self, to: Reply, reply: &ControlReply) {
        if let Some(to) = to.0
            && let Ok(body) = serde_json::to_vec(reply)
            && let Err(error) = self.broker.client.publish(to, body.into()).await
        {
            tracing::warn!(%error, "cannot answer a control request");
        }
    }
}

/// Appends a job to the queue.
pub fn enqueue(shared: &Arc<Shared>, job: Job) {
    lock(&shared.queue).push_back(job);
    dispatch(shared);
}

/// Starts a job at once, before all queued ones: σ is here already and a child was prepared.
pub fn start_now(shared: &Arc<Shared>, job: Job) {
    shared.running.fetch_add(1, Ordering::AcqRel);
    crate::take_up::spawn(shared.clone(), job, Slot::counted(shared), None);
}

/// Takes a free slot, if no job waits for one.
pub fn spare_slot(shared: &Arc<Shared>) -> Option<Slot> {
    let queue = lock(&shared.queue);
    if !queue.is_empty() || shared.running() >= shared.slots() {
        return None;
    }
    shared.running.fetch_add(1, Ordering::AcqRel);
    drop(queue);
    Some(Slot::counted(shared))
}

/// Puts jobs at the front of the queue, in their order.
pub fn give_back(shared: &Arc<Shared>, jobs: VecDeque<Job>) {
    let mut queue = lock(&shared.queue);
    for job in jobs.into_iter().rev() {
        queue.push_front(job);
    }
    drop(queue);
    dispatch(shared);
}

/// Starts jobs of the queue while slots are free.
pub fn dispatch(shared: &Arc<Shared>) {
    loop {
        let mut queue = lock(&shared.queue);
        if shared.running() >= shared.slots() {
            return;
        }
        let Some(job) = queue.pop_front() else { return };
        shared.running.fetch_add(1, Ordering::AcqRel);
        drop(queue);
        crate::take_up::spawn(shared.clone(), job, Slot::counted(shared), None);
    }
}
