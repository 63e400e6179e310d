//! What may be set about the service.

use std::net::SocketAddr;
use std::time::Duration;

use fiec_policy::Config;
use fiec_schemas::InstanceId;

/// Settings with their defaults.
#[derive(Debug, Clone)]
pub struct Options {
    /// This replica's id, new for each life; ledger messages name it as `policy/<id>`.
    pub id: InstanceId,
    /// The policy's own settings.
    pub policy: Config,
    /// How often time passes for the policy.
    pub tick: Duration,
    /// First appends under way at once, and as many later ones; at most half of the connection's
    /// unacknowledged publishes.
    pub in_flight: usize,
    /// Bindings in one capsule message at most.
    pub capsule_batch: usize,
    /// How long a node may take to answer a request.
    pub control_timeout: Duration,
    /// How long a node may take to answer a probe.
    pub probe_timeout: Duration,
    /// How long a submission is held back while nodes are full and learn how fast they are; four
    /// times as long after one that found its place so.
    pub hold: Duration,
    /// How long a node may take to append a first binding that was left to it; 0: none is.
    pub entrust: Duration,
    /// Where `/metrics` and `/healthz` are served, if anywhere.
    pub http: Option<SocketAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            id: InstanceId::random(),
            policy: Config::default(),
            tick: Duration::from_millis(50),
            in_flight: 1_000,
            capsule_batch: 50,
            control_timeout: Duration::from_secs(2),
            probe_timeout: Duration::from_secs(1),
            hold: Duration::from_millis(25),
            entrust: Duration::from_millis(200),
            http: None,
        }
    }
}
