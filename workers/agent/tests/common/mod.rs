//! A real nats-server, agents on it, and executions bound to them by hand.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_agent::{Agent, AgentError, Options};
use fiec_broker::ledger::Entry;
use fiec_broker::topology::{self, Profile};
use fiec_broker::{Broker, ConnectOptions, Draft, Ledger, Tip};
use fiec_dev_servers::{DevServers, NoProgress, Options as ServerOptions};
use fiec_kit::run_local;
use fiec_schemas::messages::{
    CapsuleBinding, CapsuleMessage, ControlReply, ControlRequest, Destination,
};
use fiec_schemas::{
    Cause, Event, ExecutionId, ExecutionState, InstanceId, LedgerMessage, NodeDescriptor, NodeId,
    Submission, Tenant, Timestamp, subjects,
};
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct World {
    pub servers: DevServers,
    pub broker: Broker,
    pub ledger: Ledger,
    pub folder: TempDir,
    pub tenant: Tenant,
}

pub struct Running {
    pub node: NodeId,
    pub instance: InstanceId,
    pub stop: CancellationToken,
    pub task: JoinHandle<Result<(), AgentError>>,
    _guard: Guard,
}

/// Ends an agent when its test drops it, however the test ends: at once and without its children.
struct Guard(CancellationToken, CancellationToken);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.cancel();
        self.1.cancel();
    }
}

impl Running {
    pub fn destination(&self) -> Destination {
        Destination {
            node: self.node.clone(),
            instance: self.instance,
            substrate: "host".to_owned(),
        }
    }

    pub async fn leave(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }
}

impl World {
    pub async fn start() -> Self {
        let options = ServerOptions {
            want_postgres: false,
            ..ServerOptions::default()
        };
        let servers = DevServers::start(options, &NoProgress).await.unwrap();
        let broker = Broker::connect(ConnectOptions::new(servers.nats_url(), "test"))
            .await
            .unwrap();
        topology::apply(&broker, &Profile::default()).await.unwrap();
        let ledger = Ledger::new(&broker);
        Self {
            servers,
            broker,
            ledger,
            folder: tempfile::tempdir().unwrap(),
            tenant: Tenant::new("lab").unwrap(),
        }
    }

    pub fn options(&self, name: &str) -> Options {
        let mut options = Options::new(NodeId::new(name).unwrap());
        options.child_command = vec![env!("CARGO_BIN_EXE_fiec-agent-child").to_owned()];
        options.run_dir = self.folder.path().join(name);
        options.cgroup = false;
        options.devices = false;
        options.backoff = Duration::from_millis(20);
        options
    }

    pub async fn agent_with(&self, options: Options) -> Running {
        self.agent_at(options, self.servers.nats_url()).await
    }

    /// An agent that has the broker at this URL.
    pub async fn agent_at(&self, options: Options, url: String) -> Running {
        let node = options.node.clone();
        let before = self.descriptor(&node).await.map(|d| d.instance);
        let connect = ConnectOptions::new(url, format!("worker {node}"));
        let stop = CancellationToken::new();
        let token = stop.clone();
        let guard = Guard(stop.clone(), options.leave_now.clone());
        let (ended, end) = tokio::sync::oneshot::channel();
        // A run time of its own, as in a process of its own; and a thread that no run time waits
        // for, so that a test that fails ends.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let left = runtime.block_on(async {
                let broker = Broker::connect(connect).await.unwrap();
                Agent::run(options, broker, token).await
            });
            let _ = ended.send(left);
        });
        let task = tokio::spawn(async move { end.await.expect("the agent's thread panicked") });
        let instance = poll("the agent to claim its name", async || {
            let found = self.descriptor(&node).await?.instance;
            (Some(found) != before && self.control(&node, &ControlRequest::Ping).await.is_some())
                .then_some(found)
        })
        .await;
        Running {
            node,
            instance,
            stop,
            task,
            _guard: guard,
        }
    }

    pub async fn agent(&self, name: &str) -> Running {
        self.agent_with(self.options(name)).await
    }

    pub async fn descriptor(&self, node: &NodeId) -> Option<NodeDescriptor> {
        let store = self
            .broker
            .js
            .get_key_value(subjects::NODES_BUCKET)
            .await
            .unwrap();
        let value = store.get(subjects::node_key(node)).await.unwrap()?;
        serde_json::from_slice(&value).ok()
    }

    pub async fn control(&self, node: &NodeId, request: &ControlRequest) -> Option<ControlReply> {
        let body = serde_json::to_vec(request).unwrap();
        let reply = self
            .broker
            .client
            .request(subjects::control(node), body.into())
            .await
            .ok()?;
        serde_json::from_slice(&reply.payload).ok()
    }

    /// Appends `submitted+bound`.
    pub async fn bind(&self, submission: &str, to: &Destination) -> Tip {
        let submission = Arc::new(Submission::parse(submission.as_bytes()).unwrap());
        let id = ExecutionId(uuid::Uuid::now_v7());
        let now = Timestamp::now();
        let state = ExecutionState::unborn(self.tenant.clone(), id, submission, None, now);
        let tip = Tip {
            seq: 0,
            digest: None,
            state: state.into(),
            seen_in: 0,
        };
        self.append(&tip, vec![Event::Submitted, bound(1, to, Cause::Initial)])
            .await
    }

    pub async fn append(&self, tip: &Tip, events: Vec<Event>) -> Tip {
        let draft = Draft::new(tip, events, "policy/test", Timestamp::now()).unwrap();
        let sent = self.ledger.send(draft, Bytes::new()).await.unwrap();
        self.ledger.settle(sent).await.unwrap()
    }

    pub async fn dispatch(&self, tips: &[Tip], node: &NodeId) {
        let bindings = tips
            .iter()
            .map(|t| CapsuleBinding {
                seq: t.seq,
                digest: t.digest.unwrap(),
                state: t.state.clone(),
            })
            .collect();
        let body = serde_json::to_vec(&CapsuleMessage {
            v: 1,
            bindings,
            server: Some(self.broker.server()),
        })
        .unwrap();
        let subject = subjects::capsule(0, node);
        self.broker
            .js
            .publish(subject, body.into())
            .await
            .unwrap()
            .await
            .unwrap();
    }

    /// An agent that keeps superseded states for this long.
    pub async fn agent_that_keeps(&self, name: &str, superseded_after: Duration) -> Running {
        let mut options = self.options(name);
        options.superseded_after = superseded_after;
        self.agent_with(options).await
    }

    /// Pauses an execution on its agent.
    pub async fn pause(&self, id: ExecutionId, agent: &Running) {
        let request = ControlRequest::Pause {
            execution: id,
            who: "ann".to_owned(),
        };
        let reply = self.control(&agent.node, &request).await.unwrap();
        assert_eq!(reply.error, None);
        self.wait_phase(id, "paused").await;
    }

    /// A line's execution, once it computes on this agent.
    pub async fn started(&self, line: &Value, agent: &Running) -> ExecutionId {
        let id = self.submit(&line.to_string(), agent).await;
        self.wait_phase(id, "started").await;
        id
    }

    pub async fn submit(&self, submission: &str, to: &Running) -> ExecutionId {
        let tip = self.bind(submission, &to.destination()).await;
        let id = tip.state.execution;
        self.dispatch(&[tip], &to.node).await;
        id
    }

    pub async fn last(&self, id: ExecutionId) -> Entry {
        self.ledger.last(&self.tenant, id).await.unwrap().unwrap()
    }

    pub async fn wait(
        &self,
        id: ExecutionId,
        what: &str,
        is: impl Fn(&LedgerMessage) -> bool,
    ) -> LedgerMessage {
        let end = tokio::time::Instant::now() + PATIENCE;
        loop {
            let last = self.ledger.last(&self.tenant, id).await.unwrap();
            let last = last.map(|last| last.message);
            if let Some(found) = last.as_ref().filter(|m| is(m)) {
                return found.clone();
            }
            assert!(
                tokio::time::Instant::now() < end,
                "waited in vain for: {what}; the last message is {last:?}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn wait_phase(&self, id: ExecutionId, phase: &str) -> LedgerMessage {
        self.wait(id, phase, |m| m.state.phase.as_str() == phase)
            .await
    }

    /// Every message that the ledger still holds of this execution.
    pub async fn messages(&self, id: ExecutionId) -> Vec<LedgerMessage> {
        let last = self.last(id).await.seq;
        let mut messages = Vec::new();
        for seq in 1..=last {
            if let Ok(entry) = self.ledger.by_sequence(seq).await
                && entry.message.state.execution == id
            {
                messages.push(entry.message);
            }
        }
        messages
    }

    /// Their events.
    pub async fn events(&self, id: ExecutionId) -> Vec<Event> {
        let messages = self.messages(id).await;
        messages.into_iter().flat_map(|m| m.events).collect()
    }

    /// True while the broker has the consumer by which this node pulls capsules.
    pub async fn has_consumer(&self, node: &NodeId) -> bool {
        let stream = self.broker.js.get_stream(subjects::capsule_stream(0));
        let stream = stream.await.unwrap();
        let info = stream.consumer_info(subjects::capsule_consumer(node)).await;
        info.is_ok()
    }

    /// Capsule messages that are not acknowledged.
    pub async fn capsules_left(&self) -> u64 {
        let name = subjects::capsule_stream(0);
        let mut stream = self.broker.js.get_stream(name).await.unwrap();
        stream.info().await.unwrap().state.messages
    }
}

pub fn bound(epoch: u64, to: &Destination, cause: Cause) -> Event {
    Event::Bound {
        epoch,
        node: to.node.clone(),
        instance: to.instance,
        substrate: to.substrate.clone(),
        cause,
        decision: None,
    }
}

pub async fn poll<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(
            tokio::time::Instant::now() < end,
            "waited in vain for: {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The result of `synthetic@1` where nobody disturbs it; its bits do not depend on how long a
/// capsule takes, and none takes any time here.
pub fn undisturbed(params: &serde_json::Value) -> serde_json::Value {
    let mut params = params.clone();
    params.as_object_mut().unwrap().remove("rest_us");
    run_local("synthetic@1", &params).unwrap().result
}

pub fn result(message: &LedgerMessage) -> serde_json::Value {
    let completed = message.events.iter().find_map(|e| match e {
        Event::Completed { result, .. } => Some(result.clone()),
        _ => None,
    });
    completed.unwrap_or_else(|| panic!("not completed: {message:?}"))
}

/// The processes of an agent's programs.
pub fn children(options: &Options) -> Vec<i32> {
    let folder = std::fs::read_dir(&options.run_dir).unwrap();
    folder
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.strip_prefix("child-")?.parse().ok())
        .collect()
}

pub fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}
