//! What the agent's tasks share: who it is, what lives here, what waits, who has a slot.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fiec_broker::trust::NodeKey;
use fiec_broker::{Broker, BrokerClock, Ledger, chunks, store};
use fiec_probes::energy::{EnergyMeter, Share};
use fiec_probes::envelope::Envelopes;
use fiec_probes::latency::LatencyRecorder;
use fiec_schemas::event::ExecutionState;
use fiec_schemas::hardware::{RunningProgress, Substrate};
use fiec_schemas::limits::CPUS_LIMIT;
use fiec_schemas::messages::{ControlReply, HOLDINGS_PAGE, Holding, HoldingsPage};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::{
    Digest, ExecutionId, InstanceId, NodeDescriptor, NodeId, Sequence, Signal, Threshold, author,
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::affinity;
use crate::cache::Cache;
use crate::data::Data;
use crate::devices::{Devices, Lease};
use crate::ended::Ends;
use crate::fetched::Warm;
use crate::job::{Job, Live};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::packages::Packages;
use crate::park::Parks;
use crate::pool::Pool;
use crate::replies::{NotTaken, Reply};
use crate::reserve::Grants;
use crate::round_trips::RoundTrips;
use crate::surroundings::Outlook;
use crate::unrecorded::Recorded;
use crate::uploads::Uploads;

/// Thresholds of M that are watched at once.
const MEMORY_THRESHOLDS: usize = 17;

/// Superseded σ that are remembered.
const SUPERSEDED_LIMIT: usize = 1_024;

/// What this node has for its programs.
pub struct Node {
    /// Packages and data on its disk.
    pub cache: Arc<Cache>,
    cpus: u32,
    slots: u32,
    memory_bytes: u64,
    substrates: Vec<Substrate>,
    /// By which envelopes are in force.
    clock: BrokerClock,
    /// Counters of energy, where there are any.
    energy: Option<Arc<EnergyMeter>>,
    /// What of this may be offered.
    envelopes: Envelopes,
}

impl Node {
    /// As its descriptor says.
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
        }
    }

    /// With counters of energy, if there are any, the envelopes in force and the clock they follow.
    #[must_use]
    pub fn with(
        self,
        energy: Option<Arc<EnergyMeter>>,
        envelopes: Envelopes,
        clock: &BrokerClock,
    ) -> Self {
        Self {
            energy,
            envelopes,
            clock: clock.clone(),
            ..self
        }
    }

    /// Of so many bytes of memory, those that the envelope in force lets be granted now.
    fn offered(&self, device: Option<&str>, bytes: u64) -> u64 {
        let now = self.clock.now();
        let cap = self
            .envelopes
            .cap(Signal::Memory, device, bytes as f64, now);
        cap.map_or(bytes, |cap| cap as u64)
    }

    /// Why it cannot grant that, if it cannot.
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

    /// What one execution may use on a substrate: the node's processors and memory shared among
    /// its slots, unless `threads` says otherwise, and the device that the substrate is.
    fn grant(&self, substrate: Option<&str>, threads: Option<u32>) -> Grant {
        let place = self.substrates.iter().find(|s| Some(&*s.id) == substrate);
        let device = place.filter(|s| s.kind != "cpu").map(|s| DeviceGrant {
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

/// What the tasks share.
pub struct Shared {
    /// Configuration.
    pub options: Options,
    /// The connection.
    pub broker: Broker,
    /// The ledgers.
    pub ledger: Ledger,
    /// This life of the node.
    pub instance: InstanceId,
    /// Author of what is appended here.
    pub author: String,
    /// Idle children.
    pub pool: Arc<Pool>,
    /// Programs that are not built in.
    pub packages: Packages,
    /// Data by digest.
    pub data: Data,
    /// Where both lie.
    pub cache: Arc<Cache>,
    /// Who has which device.
    pub devices: Arc<Devices>,
    resources: Node,
    /// Figures.
    pub metrics: Metrics,
    /// No work is taken any more.
    pub draining: AtomicBool,
    /// Everything ends at once: another instance has the name, or the second signal came.
    pub halt: CancellationToken,
    /// Routine commits are at least so many milliseconds apart.
    pub stretch: watch::Receiver<Recorded>,
    /// Something is to be told soon.
    pub news: Notify,
    /// Round trips of real messages.
    pub round_trips: RoundTrips,
    /// Whatever is bound to this node and known here, waiting or computing.
    live: Mutex<HashMap<ExecutionId, Live>>,
    /// Bindings that wait for a slot, in the order of their coming.
    queue: Mutex<VecDeque<Job>>,
    /// Slots that are taken.
    running: AtomicU32,
    /// What ended here lately.
    pub ends: Ends,
    /// Large σ that no ledger needs any more, with the moment since when, oldest first.
    superseded: Mutex<VecDeque<(Instant, ExecutionId, Digest)>>,
    /// Chunks that no ledger needs any more, oldest first.
    superseded_chunks: Mutex<VecDeque<(Instant, Vec<Sequence>)>>,
    /// States held ready for handovers that were announced.
    pub warm: Warm,
    /// Whose turn it is to send.
    pub uploads: Uploads,
    /// The last sequence of the ledger stream that was seen here.
    newest: AtomicU64,
    /// An execution has left.
    pub left: Notify,
    /// The canaries are to run anew.
    pub prove: Notify,
    /// Who is parked here.
    pub parks: Arc<Parks>,
    /// What is granted of the node's memory.
    pub grants: Grants,
    /// What programs are told of where they run.
    pub outlook: Outlook,
    /// Signs what this node states.
    pub key: Arc<NodeKey>,
    /// A part of an execution is being computed once more.
    pub verifying: AtomicBool,
}

/// A place among those that compute; free again when dropped.
pub struct Slot {
    home: Arc<Shared>,
    /// The device that whoever has the slot computes on, if one.
    pub device: Option<Lease>,
}

impl Slot {
    /// One that was counted already.
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
    /// Nothing lives here yet.
    pub fn new(
        options: Options,
        broker: Broker,
        instance: InstanceId,
        pool: Arc<Pool>,
        metrics: Metrics,
        stretch: watch::Receiver<Recorded>,
        resources: Node,
    ) -> Self {
        // Nobody reads these, unless they are replaced.
        let round_trips = RoundTrips::new(broker.client.new_inbox(), LatencyRecorder::default());
        let cache = Arc::clone(&resources.cache);
        let allowed = options.allow_programs.clone();
        let parked = options.parked.unwrap_or(options.slots);
        Self {
            packages: Packages::new(&broker, Arc::clone(&cache), allowed),
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
            stretch,
            news: Notify::new(),
            round_trips,
            live: Mutex::default(),
            queue: Mutex::default(),
            running: AtomicU32::new(0),
            ends: Ends::default(),
            superseded: Mutex::default(),
            superseded_chunks: Mutex::default(),
            warm: Warm::default(),
            uploads: Uploads::default(),
            newest: AtomicU64::new(0),
            left: Notify::new(),
            prove: Notify::new(),
            parks: Arc::new(Parks::new(parked)),
            grants: Grants::default(),
            outlook: Outlook::default(),
            // Nobody's, unless it is replaced.
            key: Arc::new(NodeKey::random()),
            verifying: AtomicBool::new(false),
        }
    }

    /// Round trips are reported where these say.
    #[must_use]
    pub fn with_round_trips(mut self, round_trips: RoundTrips) -> Self {
        self.round_trips = round_trips;
        self
    }

    /// What this node states is signed with the key that its claim names.
    #[must_use]
    pub fn with_key(mut self, key: Arc<NodeKey>) -> Self {
        self.key = key;
        self
    }

    /// Notes a large σ that the ledger has gone beyond, to be dropped after
    /// [`Options::superseded_after`].
    pub fn supersede(&self, before: &ExecutionState, now: &ExecutionState) {
        if now.guarded {
            // It was kept by a verifier: to be gone back to until a later one is verified.
            return;
        }
        let large = |state: &ExecutionState| {
            let place = state.boundary.as_ref()?;
            place.seq.is_none().then_some(place.digest)
        };
        let needed = large(now).filter(|_| !now.phase.is_terminal());
        let old = large(before).filter(|old| needed != Some(*old));
        if old.is_none() && needed.is_none() {
            return;
        }
        let mut superseded = lock(&self.superseded);
        // A program that came back to an earlier σ needs that one again.
        superseded.retain(|(_, id, digest)| *id != now.execution || Some(*digest) != needed);
        if let Some(old) = old {
            // Beyond the bound the oldest stays where it is, until the bucket's own age limit.
            if superseded.len() >= SUPERSEDED_LIMIT {
                superseded.pop_front();
            }
            superseded.push_back((Instant::now(), now.execution, old));
        }
    }

    /// Notes chunks that the ledger has gone beyond.
    pub fn supersede_chunks(&self, sequences: Vec<Sequence>) {
        if sequences.is_empty() {
            return;
        }
        let mut superseded = lock(&self.superseded_chunks);
        if superseded.len() >= SUPERSEDED_LIMIT {
            superseded.pop_front();
        }
        superseded.push_back((Instant::now(), sequences));
    }

    /// Drops the chunks and large σ whose time has come, or all that were superseded: for a worker
    /// that leaves, since nobody else knows of them.
    pub async fn drop_superseded(&self, all: bool) {
        let after = self.options.superseded_after;
        loop {
            let due = {
                let mut superseded = lock(&self.superseded_chunks);
                match superseded.front() {
                    Some((at, _)) if all || at.elapsed() >= after => superseded.pop_front(),
                    _ => None,
                }
            };
            let Some((_, sequences)) = due else { break };
            if let Err(error) = chunks::drop_chunks(&self.broker, &sequences).await {
                tracing::debug!(%error, "old chunks were not dropped");
            }
        }
        loop {
            let due = {
                let mut superseded = lock(&self.superseded);
                match superseded.front() {
                    Some((at, ..)) if all || at.elapsed() >= after => superseded.pop_front(),
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

    /// The ledger stream has come to this sequence.
    pub fn reached(&self, seq: Sequence) {
        self.newest.fetch_max(seq, Ordering::Relaxed);
    }

    /// The last sequence of the ledger stream that was seen here; 0 where none was.
    pub fn newest(&self) -> Sequence {
        self.newest.load(Ordering::Relaxed)
    }

    /// The connection in which sequences hold that this life of the broker's server gave; 0 where
    /// this node is connected to another one.
    pub fn seen_in(&self, server: Option<&str>) -> u64 {
        let same = server.is_some_and(|server| server == self.broker.server());
        if same { self.broker.connection() } else { 0 }
    }

    /// The node's name.
    pub fn node(&self) -> &NodeId {
        &self.options.node
    }

    /// One execution's part of the energy that is used on a substrate, where that is measured.
    pub fn energy_share(&self, substrate: Option<&str>) -> Option<Share> {
        let meter = self.resources.energy.as_ref()?;
        let places = &self.resources.substrates;
        let device = places
            .iter()
            .find(|s| s.kind != "cpu" && Some(&*s.id) == substrate);
        Some(Share::new(meter, device.map(|d| &*d.id)))
    }

    /// Reads counters that were not read for a while.
    pub fn tick_energy(&self) {
        if let Some(meter) = &self.resources.energy {
            meter.tick();
        }
    }

    /// What one execution may use on a substrate of this node.
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

    /// Why this node cannot grant that, if it cannot.
    pub fn refuses(&self, grant: &Grant) -> Option<String> {
        self.resources.refuses(grant)
    }

    /// What lives here, by execution.
    pub fn live(&self) -> MutexGuard<'_, HashMap<ExecutionId, Live>> {
        lock(&self.live)
    }

    /// Executions that compute.
    pub fn running(&self) -> u32 {
        self.running.load(Ordering::Acquire)
    }

    /// Bindings that wait for a slot.
    pub fn queued(&self) -> usize {
        lock(&self.queue).len()
    }

    /// Takes at most so many from the front of the queue, as long as `fits` says so, and no more
    /// than this slot's share of what waits.
    pub fn take_alike(&self, most: usize, mut fits: impl FnMut(&Job) -> bool) -> VecDeque<Job> {
        let mut queue = lock(&self.queue);
        let share = queue.len() / (self.options.slots.max(1) as usize);
        let mut taken = VecDeque::new();
        while taken.len() < most.min(share) && queue.front().is_some_and(&mut fits) {
            taken.extend(queue.pop_front());
        }
        taken
    }

    /// Takes what waits; for a drain.
    pub fn take_queue(&self) -> VecDeque<Job> {
        std::mem::take(&mut *lock(&self.queue))
    }

    /// No work is taken any more.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Removes an execution under the binding that this message made, with what it was granted;
    /// both stay where it lives here under another binding by now.
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

    /// An answer of this node.
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

    /// A page of the executions that this node holds, behind `after`.
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

    /// The thresholds of M that are in force here: the node's, and those that executions have
    /// brought, 16 different ones at most.
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

    /// What runs here, 64 at most.
    pub fn progress(&self) -> Vec<RunningProgress> {
        self.live()
            .values()
            .filter(|l| l.begun)
            .take(64)
            .map(|l| lock(&l.progress).clone())
            .collect()
    }

    /// Answers a control request, if somebody waits for that.
    pub async fn answer(&self, to: Reply, taken: Result<(), NotTaken>) {
        self.send_reply(to, &self.reply(taken)).await;
    }

    /// Sends this answer, if somebody waits for one.
    pub async fn send_reply(&self, to: Reply, reply: &ControlReply) {
        if let Some(to) = to.0
            && let Ok(body) = serde_json::to_vec(reply)
            && let Err(error) = self.broker.client.publish(to, body.into()).await
        {
            tracing::warn!(%error, "cannot answer a control request");
        }
    }
}

/// Puts a job behind those that wait.
pub fn enqueue(shared: &Arc<Shared>, job: Job) {
    lock(&shared.queue).push_back(job);
    dispatch(shared);
}

/// Starts a job at once, whatever waits: σ is here already and a child was prepared.
pub fn start_now(shared: &Arc<Shared>, job: Job) {
    shared.running.fetch_add(1, Ordering::AcqRel);
    crate::take_up::spawn(shared.clone(), job, Slot::counted(shared), None);
}

/// A slot that nothing waits for.
pub fn spare_slot(shared: &Arc<Shared>) -> Option<Slot> {
    let queue = lock(&shared.queue);
    if !queue.is_empty() || shared.running() >= shared.options.slots {
        return None;
    }
    shared.running.fetch_add(1, Ordering::AcqRel);
    drop(queue);
    Some(Slot::counted(shared))
}

/// Puts jobs before those that wait, in their order.
pub fn give_back(shared: &Arc<Shared>, jobs: VecDeque<Job>) {
    let mut queue = lock(&shared.queue);
    for job in jobs.into_iter().rev() {
        queue.push_front(job);
    }
    drop(queue);
    dispatch(shared);
}

fn dispatch(shared: &Arc<Shared>) {
    loop {
        let mut queue = lock(&shared.queue);
        if shared.running() >= shared.options.slots {
            return;
        }
        let Some(job) = queue.pop_front() else { return };
        shared.running.fetch_add(1, Ordering::AcqRel);
        drop(queue);
        crate::take_up::spawn(shared.clone(), job, Slot::counted(shared), None);
    }
}
