//! What the agent's tasks share: who it is, what lives here, what waits, who has a slot.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_nats::Subject;
use bytes::Bytes;
use fiec_broker::{Broker, Ledger, Tip, store};
use fiec_schemas::event::ExecutionState;
use fiec_schemas::hardware::{RunningProgress, Substrate};
use fiec_schemas::messages::{ControlReply, Destination};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::{
    Cause, Decision, Digest, Epoch, ExecutionId, InstanceId, NodeDescriptor, NodeId, Sequence,
};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;
use crate::data::Data;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::packages::Packages;
use crate::pool::Pool;

/// Orders that one execution may have waiting.
pub const ORDERS: usize = 16;

/// Superseded σ that are remembered.
const SUPERSEDED_LIMIT: usize = 1_024;

/// An order for one execution.
#[derive(Debug)]
pub enum Control {
    /// Give it up at the next boundary.
    Yield {
        /// Why.
        cause: Cause,
        /// Where to.
        to: Option<(Destination, Option<Decision>)>,
    },
    /// The same, and leave it paused.
    Pause {
        /// Who asked.
        who: String,
        /// Where to answer once that is in the ledger.
        reply: Option<Subject>,
    },
    /// Another grant holds from the next boundary on.
    Reconfigure {
        /// What.
        grant: Grant,
    },
    /// End it.
    Cancel {
        /// Who asked.
        who: String,
        /// Where to answer once that is in the ledger.
        reply: Option<Subject>,
    },
}

/// Acknowledges a capsule message when the last of its bindings is done with.
#[derive(Debug)]
pub struct CapsuleAck {
    /// Where the acknowledgement goes.
    pub reply: Subject,
    /// Who sends it.
    pub acks: mpsc::Sender<Subject>,
}

impl Drop for CapsuleAck {
    fn drop(&mut self) {
        // The broker delivers no more unacknowledged messages than the channel holds; were it full
        // all the same, the capsule would come again and be dropped by its epoch.
        let _ = self.acks.try_send(self.reply.clone());
    }
}

/// How an execution came here.
#[derive(Debug)]
pub enum Start {
    /// Its binding is in the ledger.
    Bound(Box<Tip>),
    /// Its binding is being appended; nothing may be appended before the confirmation.
    Speculative {
        /// The state that the binding's message gives, its own sequence being 0.
        state: Box<ExecutionState>,
        /// σ.
        sigma: Bytes,
        /// The binding's sequence, or nothing when it was not made.
        confirmed: oneshot::Receiver<Sequence>,
        /// Digest of the binding's message.
        digest: Digest,
    },
}

/// An execution to take up.
#[derive(Debug)]
pub struct Job {
    /// How it came.
    pub start: Start,
    /// Held until `started` is in the ledger.
    pub ack: Option<Arc<CapsuleAck>>,
    /// Its orders.
    pub control: mpsc::Receiver<Box<Control>>,
    /// What is told of it.
    pub progress: Arc<Mutex<RunningProgress>>,
}

/// An execution that lives here.
#[derive(Debug)]
pub struct Live {
    /// Under which binding.
    pub epoch: Epoch,
    /// Digest of the message that made the binding.
    pub bound: Digest,
    /// Its orders.
    pub control: mpsc::Sender<Box<Control>>,
    /// What is told of it.
    pub progress: Arc<Mutex<RunningProgress>>,
    /// True once a child computes it.
    pub begun: bool,
    /// Confirms a speculation.
    pub confirm: Option<oneshot::Sender<Sequence>>,
}

/// What this node has for its programs.
pub struct Node {
    /// Packages and data on its disk.
    pub cache: Arc<Cache>,
    cpus: u32,
    slots: u32,
    memory_bytes: u64,
    substrates: Vec<Substrate>,
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
        }
    }

    /// What one execution may use on a substrate: the node's processors and memory shared among
    /// its slots, unless `threads` says otherwise, and the device that the substrate is.
    fn grant(&self, substrate: Option<&str>, threads: Option<u32>) -> Grant {
        let place = self.substrates.iter().find(|s| Some(&*s.id) == substrate);
        let device = place.filter(|s| s.kind != "cpu").map(|s| DeviceGrant {
            uuid: s.id.clone(),
            memory_bytes: s.memory_bytes,
        });
        Grant {
            substrate: substrate.map(str::to_owned),
            threads: Some(threads.unwrap_or(self.cpus / self.slots).max(1)),
            cpus: Vec::new(),
            memory_bytes: (self.memory_bytes > 0)
                .then_some(self.memory_bytes / u64::from(self.slots)),
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
    resources: Node,
    /// Figures.
    pub metrics: Metrics,
    /// No work is taken any more.
    pub draining: AtomicBool,
    /// Everything ends at once: another instance has the name, or the second signal came.
    pub halt: CancellationToken,
    /// Routine commits are at least so many milliseconds apart.
    pub stretch: watch::Receiver<u32>,
    /// Something is to be told soon.
    pub news: Notify,
    /// Whatever is bound to this node and known here, waiting or computing.
    live: Mutex<HashMap<ExecutionId, Live>>,
    /// Bindings that wait for a slot, in the order of their coming.
    queue: Mutex<VecDeque<Job>>,
    /// Slots that are taken.
    running: AtomicU32,
    /// Large σ that no ledger needs any more, with the moment since when, oldest first.
    superseded: Mutex<VecDeque<(Instant, ExecutionId, Digest)>>,
    /// The last sequence of the ledger stream that was seen here.
    newest: AtomicU64,
    /// An execution has left.
    pub left: Notify,
}

/// A place among those that compute; free again when dropped.
pub struct Slot(Arc<Shared>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
        dispatch(&self.0);
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
        stretch: watch::Receiver<u32>,
        resources: Node,
    ) -> Self {
        let cache = Arc::clone(&resources.cache);
        let allowed = options.allow_programs.clone();
        Self {
            packages: Packages::new(&broker, Arc::clone(&cache), allowed),
            data: Data::new(&broker, Arc::clone(&cache)),
            cache,
            resources,
            ledger: Ledger::new(&broker),
            author: format!("worker/{}/{instance}", options.node),
            options,
            broker,
            instance,
            pool,
            metrics,
            draining: AtomicBool::new(false),
            halt: CancellationToken::new(),
            stretch,
            news: Notify::new(),
            live: Mutex::default(),
            queue: Mutex::default(),
            running: AtomicU32::new(0),
            superseded: Mutex::default(),
            newest: AtomicU64::new(0),
            left: Notify::new(),
        }
    }

    /// Notes a large σ that the ledger has gone beyond, to be dropped after
    /// [`Options::superseded_after`].
    pub fn supersede(&self, before: &ExecutionState, now: &ExecutionState) {
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

    /// Drops the large σ whose time has come, or all that were superseded: for a worker that
    /// leaves, since nobody else knows of them.
    pub async fn drop_superseded(&self, all: bool) {
        let after = self.options.superseded_after;
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

    /// The node's name.
    pub fn node(&self) -> &NodeId {
        &self.options.node
    }

    /// What one execution may use on a substrate of this node.
    pub fn grant(&self, substrate: Option<&str>) -> Grant {
        self.resources.grant(substrate, self.options.threads)
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

    /// Removes an execution under the binding that this message made.
    pub fn forget(&self, execution: ExecutionId, bound: Digest) {
        let mut live = self.live();
        if live.get(&execution).is_some_and(|l| l.bound == bound) {
            live.remove(&execution);
        }
        drop(live);
        self.left.notify_waiters();
    }

    /// An answer of this node.
    pub fn reply(&self, error: Option<String>) -> ControlReply {
        ControlReply {
            node: self.node().clone(),
            instance: self.instance,
            error,
            running: Vec::new(),
        }
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

    /// Sends an answer, if somebody waits for one.
    pub async fn answer(&self, to: Option<Subject>, error: Option<String>) {
        if let Some(to) = to
            && let Ok(body) = serde_json::to_vec(&self.reply(error))
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
    tokio::spawn(crate::runner::run(
        shared.clone(),
        job,
        Slot(shared.clone()),
        None,
    ));
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
        tokio::spawn(crate::runner::run(
            shared.clone(),
            job,
            Slot(shared.clone()),
            None,
        ));
    }
}
