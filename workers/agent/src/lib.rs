//! The worker agent: claims a node, pulls capsules, runs programs in child processes, commits
//! boundaries, hands executions over, drains.
//!
//! ```text
//! capsules ──▶ shared (queue, slots) ──▶ runner ◀──▶ child process
//! handover ──▶                             │ appends, one in flight
//! control  ──▶ runner                      ▼
//!                                        ledger
//! ```
//!
//! A program that is not built in comes as a package. [`packages`] fetches it into the node's
//! [`cache`], where [`data`] keeps the programs' inputs and outputs by digest.
//!
//! One [`runner`] is the only writer of its execution's ledger while the execution is started here.
//! It runs best on a current-thread run time. The agent makes no decision of the policy service:
//! where an execution runs, and whether a node is viable.

pub mod affinity;
mod aging;
mod ahead;
mod appends;
mod attempts;
pub mod cache;
pub mod canary;
pub mod capsules;
pub mod child_process;
pub mod claim;
mod computed;
pub mod containers;
pub mod control;
pub mod data;
pub mod devices;
mod emitted;
mod ended;
pub mod endings;
mod entrusted_bindings;
pub mod envelopes;
pub mod fetches;
mod giving_back;
pub mod handover;
pub mod hardware_metrics;
mod healing;
pub mod job;
mod large;
pub mod leftovers;
pub mod link;
pub mod logs;
pub mod message;
pub mod metrics;
mod missing;
pub mod options;
mod orders;
mod outside;
mod package_store;
pub mod packages;
mod panics;
mod park;
mod pending_order;
pub mod pool;
mod prepare;
mod proc_stat;
mod reaper;
pub mod replies;
mod reserve;
pub mod revocation;
pub mod round_trips;
mod run_delay;
pub mod run_dir;
pub mod runner;
pub mod shared;
mod spread;
mod superseded;
mod surroundings;
mod take_up;
mod telemetry;
pub mod unpack;
mod unpacked;
pub mod unrecorded;
mod uploads;
mod variables;
pub mod verify;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fiec_broker::{Broker, BrokerError, sight};
use fiec_probes::energy::EnergyMeter;
use fiec_probes::latency::LatencyRecorder;
use fiec_probes::oom::OomKills;
use fiec_probes::profile::ProfileOptions;
use fiec_probes::{MemoryLimit, NodeCgroup, Sampler, SamplerConfig, Wake};
use fiec_schemas::messages::RecorderCheckpoint;
use fiec_schemas::{Cause, InstanceId, NodeDescriptor, Timestamp, subjects};
use futures_util::FutureExt as _;
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use prometheus_client::registry::Registry;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use claim::ClaimError;
pub use options::Options;
pub use revocation::RevocationOptions;

use crate::cache::Cache;
use crate::child_process::Spawner;
use crate::logs::Logs;
use crate::metrics::Metrics;
use crate::pool::Pool;
use crate::round_trips::RoundTrips;
use crate::shared::{Node, Shared};
use crate::unrecorded::Recorded;

/// Interval of the sweep of idle children and old states.
const SWEEP: Duration = Duration::from_secs(5);
/// Time for a leaving worker to drop old states and to remove its consumer.
const DROP_WITHIN: Duration = Duration::from_secs(5);

/// The reason why an agent could not start or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The name could not be claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// A broker operation failed.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// A system operation failed.
    #[error("{what}: {source}")]
    Machine {
        /// The operation.
        what: &'static str,
        /// The error.
        source: std::io::Error,
    },
    /// Another instance took the name; everything here was stopped.
    #[error("another worker has taken the name {0}; this worker has stopped")]
    Fenced(fiec_schemas::NodeId),
}

fn machine(what: &'static str) -> impl FnOnce(std::io::Error) -> AgentError {
    move |source| AgentError::Machine { what, source }
}

/// Returns the memory limit in force, and the cgroup that enforces it if one could be made.
fn limit_memory(options: &Options) -> (MemoryLimit, Option<NodeCgroup>) {
    let Some(bytes) = options.memory_limit else {
        return (MemoryLimit::detect(), None);
    };
    let declared = MemoryLimit::Declared {
        bytes,
        root_pid: std::process::id(),
    };
    if !options.cgroup {
        return (declared, None);
    }
    let made =
        NodeCgroup::create(&options.node, bytes).and_then(|group| group.enter().map(|()| group));
    match made {
        Ok(group) => (group.limit(), Some(group)),
        Err(error) => {
            tracing::info!(%error, bytes, "no cgroup; the limit is a declared budget");
            (declared, None)
        }
    }
}

/// The agent.
#[derive(Debug, Clone, Copy)]
pub struct Agent;

impl Agent {
    /// Runs until `stop`. Then all executions yield at their next boundary, and the worker leaves.
    ///
    /// # Errors
    /// When it cannot start, or another instance takes its name.
    pub fn run(
        options: Options,
        broker: Broker,
        stop: CancellationToken,
    ) -> LocalBoxFuture<'static, Result<(), AgentError>> {
        // Boxed, so that the agent is compiled here and not again in each program that runs it.
        Self::run_until(options, broker, stop).boxed_local()
    }

    async fn run_until(
        options: Options,
        broker: Broker,
        stop: CancellationToken,
    ) -> Result<(), AgentError> {
        run_dir::secure(&options.run_dir).map_err(machine("cannot use the run folder"))?;
        leftovers::sweep(&options.run_dir).map_err(machine("cannot use the run folder"))?;
        let (limit, _cgroup) = limit_memory(&options);
        let instance = InstanceId::random();
        let metrics = Metrics::default();
        let done = CancellationToken::new();
        let _done = done.clone().drop_guard();
        let http = match options.http {
            Some(addr) => {
                let mut registry = Registry::default();
                metrics.register_all(&mut registry);
                let client = broker.client.clone();
                let health = move || match client.connection_state() {
                    async_nats::connection::State::Connected => Ok(()),
                    state => Err(format!("NATS: {state}")),
                };
                let bound = sight::serve(addr, Arc::new(registry), health, done.clone())
                    .await
                    .map_err(machine("cannot serve /metrics"))?;
                tracing::info!(%bound, "serving /metrics and /healthz");
                Some(format!("http://{bound}"))
            }
            None => None,
        };
        // Without the server's time this machine's own stays in force.
        if let Err(error) = broker.measure_clock().await {
            tracing::warn!(%error, "the broker's clock is not measured yet");
        }
        tokio::spawn(
            done.clone()
                .run_until_cancelled_owned(broker.clone().keep_clock()),
        );
        let mut descriptor = describe(&options, &limit, instance, http)?;
        descriptor.started_at = broker.now();
        let child = options.child_command.first().map_or("", String::as_str);
        let (key, identity) = canary::identify(&options.run_dir, &descriptor, child)
            .map_err(machine("cannot use the node's key"))?;
        descriptor.identity = Some(identity);
        let key = Arc::new(key);
        let spawner = Spawner::new(&options).map_err(machine("cannot start a thread"))?;
        let contexts = options.warm_contexts + 1;
        let kept = if options.warm {
            let devices = descriptor.substrates.iter().filter(|s| s.is_device());
            options.slots as usize + 2 + options.warm_contexts * devices.count()
        } else {
            0
        };
        let pool = {
            let (broker, node) = (broker.clone(), options.node.clone());
            let logs = move || Logs::new(&broker, &node);
            Arc::new(Pool::new((kept, contexts), spawner, logs))
        };
        if options.warm {
            pool.warm().await;
        }
        let woken = Arc::new(Notify::new());
        let kills = OomKills::new(limit.clone());
        let config = SamplerConfig {
            memory: limit,
            run_dir: Some(options.run_dir.clone()),
            devices: options.devices,
            device_file: options.device_file.clone(),
            sysfs: options.sysfs.clone(),
            wake: {
                let woken = woken.clone();
                Wake::new(move || woken.notify_one())
            },
            ..SamplerConfig::default()
        };
        let sampler = Sampler::new(config);
        let envelopes = sampler.envelopes();
        if let Err(error) = envelopes::load(&broker, &options.node, &envelopes).await {
            tracing::warn!(%error, "starting without envelopes until they can be read");
        }
        let (devices, sysfs) = (sampler.devices(), options.sysfs.clone());
        let energy = EnergyMeter::start(&sysfs, !devices.latest().is_empty(), devices);
        metrics.hardware.set_devices(sampler.devices());
        let round_trips = RoundTrips::new(broker.client.new_inbox(), sampler.latency());
        let cache_dir = options.cache_dir.clone();
        let cache_dir = cache_dir.unwrap_or_else(|| options.run_dir.join("cache"));
        let cache = Cache::open(&cache_dir, options.cache_limit, done.child_token())
            .map_err(machine("cannot use the cache folder"))?;
        let shared = Shared::new(
            options,
            broker.clone(),
            instance,
            pool,
            metrics,
            Node::of(&descriptor, cache).with(energy, envelopes.clone(), broker.clock(), kills),
        );
        let shared = Arc::new(shared.with_round_trips(round_trips).with_key(key.clone()));
        let claim = Arc::new(claim::claim(&broker, &descriptor).await?);
        let node = shared.node().clone();
        // Subscribed before the descriptor is published: its readers may send requests to this
        // node.
        let subscribe = async |subject: String| {
            broker
                .client
                .subscribe(subject)
                .await
                .map_err(BrokerError::operation("subscribe"))
        };
        let requests = subscribe(subjects::control(&node)).await?;
        let handovers = subscribe(subjects::handover(&node)).await?;
        let checkpoints = subscribe(subjects::RECORDER_CHECKPOINT.to_owned()).await?;
        tokio::spawn(control::serve(shared.clone(), requests, done.clone()));
        tokio::spawn(handover::receive(shared.clone(), handovers, done.clone()));
        tokio::spawn(follow_recorder(shared.clone(), checkpoints, done.clone()));
        tokio::spawn(sweep(shared.clone(), done.clone()));
        tokio::spawn(healing::follow(shared.clone(), done.clone()));
        tokio::spawn(aging::follow(shared.clone(), done.clone()));
        tokio::spawn(revocation::follow(shared.clone(), done.clone()));
        tokio::spawn(envelopes::follow(shared.clone(), envelopes, done.clone()));
        tokio::spawn(measure_round_trips(
            shared.clone(),
            sampler.latency(),
            done.clone(),
        ));
        let telemetry = tokio::spawn(telemetry::publish(
            shared.clone(),
            sampler,
            woken,
            done.clone(),
        ));
        tokio::spawn(canary::keep(
            shared.clone(),
            key,
            Arc::clone(&claim),
            descriptor,
            done.clone(),
        ));
        let pulling = stop.child_token();
        let puller = tokio::spawn(capsules::pull(shared.clone(), pulling.clone()));
        tracing::info!(%node, %instance, slots = shared.options.slots, "worker is ready");
        let fenced = tokio::select! {
            () = stop.cancelled() => false,
            () = shared.options.leave_now.cancelled() => false,
            () = claim.taken_over(done.clone()) => true,
        };
        shared.draining.store(true, Ordering::Release);
        pulling.cancel();
        if fenced {
            tracing::error!(%node, "another worker has taken this node's name; stopping");
            shared.halt.cancel();
            shared.pool.clear();
            drained(&shared, Duration::from_secs(1)).await;
            shared.cache.close();
            return Err(AgentError::Fenced(node));
        }
        let _ = puller.await;
        drain(&shared).await;
        // While this instance still holds the name, so that the consumer cannot belong to another
        // one.
        remove_consumer(&shared).await;
        done.cancel();
        // A state that is not dropped in time stays until the recorder collects it.
        let _ = tokio::time::timeout(DROP_WITHIN, shared.drop_superseded(true)).await;
        let _ = telemetry.await;
        claim.release(&broker, "stopped").await;
        shared.halt.cancel();
        shared.pool.clear();
        shared.cache.close();
        let _ = tokio::time::timeout(Duration::from_secs(1), broker.client.flush()).await;
        tracing::info!(%node, "worker has left");
        Ok(())
    }
}

/// Nothing is lost if this fails: the server removes a consumer that nobody pulls from.
async fn remove_consumer(shared: &Shared) {
    let (node, shard) = (shared.node(), shared.options.shard);
    let removing = fiec_broker::capsules::remove_consumer(&shared.broker, shard, node);
    match tokio::time::timeout(DROP_WITHIN, removing).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the node's consumer stays for now"),
        Err(_) => tracing::warn!(%node, "the node's consumer stays for now: no answer in time"),
    }
}

fn describe(
    options: &Options,
    limit: &MemoryLimit,
    instance: InstanceId,
    http: Option<String>,
) -> Result<NodeDescriptor, AgentError> {
    let mut descriptor = NodeDescriptor {
        v: 1,
        node: options.node.clone(),
        instance,
        host: String::new(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_at: Timestamp::default(),
        shard: options.shard,
        slots: options.slots,
        parks: options.parked.unwrap_or(options.slots),
        cpus: 0,
        isa: String::new(),
        memory_limit_bytes: 0,
        memory_limit_source: String::new(),
        substrates: Vec::new(),
        profile: Default::default(),
        programs: packages::offered(&options.allow_programs),
        labels: options.labels.clone(),
        thresholds: options.thresholds.clone(),
        http,
        identity: None,
    };
    let profile = ProfileOptions {
        sysfs: options.sysfs.clone(),
        cache: options.profile_cache.clone(),
        anew: false,
    };
    let devices = options.device_file.as_deref();
    fiec_probes::descriptor::describe(&mut descriptor, limit, &profile, devices)
        .map_err(machine("cannot describe this machine"))?;
    Ok(descriptor)
}

/// Without round trips L is missing and states the reason. Nothing else depends on them.
async fn measure_round_trips(
    shared: Arc<Shared>,
    recorder: LatencyRecorder,
    stop: CancellationToken,
) {
    if let Err(error) = round_trips::measure(shared, recorder, stop).await {
        tracing::warn!(%error, "round trips are not measured");
    }
}

/// Stretches routine commits while the recorder is far behind.
async fn follow_recorder(
    shared: Arc<Shared>,
    mut checkpoints: async_nats::Subscriber,
    stop: CancellationToken,
) {
    let mut heard: Option<(Instant, RecorderCheckpoint)> = None;
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            message = checkpoints.next() => match message {
                Some(message) => match serde_json::from_slice(&message.payload) {
                    Ok(word) => heard = Some((Instant::now(), word)),
                    Err(error) => tracing::debug!(%error, "a recorder's word cannot be read"),
                },
                None => return,
            },
            _ = tick.tick() => {}
        }
        let Some((at, word)) = &heard else { continue };
        let longest = shared.options.longest_commit_interval;
        let said = Recorded::of(word, at.elapsed(), shared.newest(), longest);
        let before = shared.stream.borrow().recorded;
        let stream = &shared.stream;
        stream.send_if_modified(|now| std::mem::replace(&mut now.recorded, said) != said);
        let interval_ms = said.interval_ms();
        if before.interval_ms() != interval_ms {
            tracing::info!(
                seq = word.seq,
                interval_ms,
                "the recorder's lag sets how far routine commits are apart"
            );
        }
    }
}

/// Ends children that were idle for too long, and drops superseded states.
async fn sweep(shared: Arc<Shared>, stop: CancellationToken) {
    let pause = shared.options.superseded_after.min(SWEEP);
    let mut tick = tokio::time::interval(pause.max(Duration::from_millis(10)));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        shared.sweep_pool().await;
        shared.tick_energy();
        shared.tell_silent_kills();
        // A slot is back once a process that did not end has ended.
        shared::dispatch(&shared);
        shared.fetches.sweep();
        tokio::select! {
            () = stop.cancelled() => return,
            () = shared.drop_superseded(false) => {}
        }
    }
}

/// Waits until no execution lives here.
async fn drained(shared: &Shared, within: Duration) -> bool {
    let empty = async {
        loop {
            let left = shared.left.notified();
            if shared.live().is_empty() {
                return;
            }
            let _ = tokio::time::timeout(Duration::from_millis(100), left).await;
        }
    };
    tokio::time::timeout(within, empty).await.is_ok()
}

/// An execution that is just starting reads the order once it has begun.
fn order_all_to_yield(shared: &Shared) {
    let live = shared.live();
    tracing::info!(here = live.len(), node = %shared.node(), "draining");
    for (execution, live) in live.iter() {
        let who = "sigterm".to_owned();
        live.order_yield(*execution, Cause::Drain { who });
    }
}

/// Orders all executions to yield, and waits until they have left.
async fn drain(shared: &Arc<Shared>) {
    shared.news.notify_one();
    for job in shared.take_queue() {
        tokio::spawn(capsules::refuse(
            shared.clone(),
            job,
            "the node is draining",
        ));
    }
    order_all_to_yield(shared);
    tokio::select! {
        all = drained(shared, shared.options.drain_deadline) => {
            if !all {
                tracing::warn!(left = shared.live().len(), "drain deadline passed; the rest resumes elsewhere from its last commit");
            }
        }
        () = shared.options.leave_now.cancelled() => tracing::warn!("leaving at once"),
    }
}
