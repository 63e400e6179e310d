//! Settings of the service.

use std::net::SocketAddr;
use std::time::Duration;

use fiec_policy::Config;
use fiec_schemas::InstanceId;

/// Default of [`Options::waiting`].
pub const WAITING: u32 = 200_000;

/// Settings with their defaults.
#[derive(Debug, Clone)]
pub struct Options {
    /// This replica's id, new for each life; ledger messages name it as `policy/<id>`.
    pub id: InstanceId,
    /// The policy's own settings.
    pub policy: Config,
    /// Interval of the policy's ticks.
    pub tick: Duration,
    /// Most first appends in flight, and most later ones. At most half of the connection's
    /// unacknowledged publishes.
    pub in_flight: usize,
    /// Most bindings in one capsule message.
    pub capsule_batch: usize,
    /// How long a node may take to answer a request.
    pub control_timeout: Duration,
    /// How long a node may take to answer a probe.
    pub probe_timeout: Duration,
    /// Longest delay of a submission while nodes are full. Four times as long after a delayed
    /// submission found a slot.
    pub hold: Duration,
    /// Time for a node to append an entrusted binding. 0: bindings are never entrusted.
    pub entrust: Duration,
    /// Most waiting executions of a tenant whose quota does not say it.
    pub waiting: u32,
    /// Most deliveries of a submission message. Each after the first means that a service ended, or
    /// was cut off, while it held the message. A message with more is refused.
    pub deliveries: i64,
    /// Delay before a submission message is tried again that could not be taken in. It doubles with
    /// each try, at most eight times.
    pub retry: Duration,
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
            waiting: WAITING,
            deliveries: 16,
            retry: Duration::from_secs(1),
            http: None,
        }
    }
}
