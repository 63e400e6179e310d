//! Ticks: time passes for the policy, and the service shows that it works.

use std::time::{Duration, Instant};

use fiec_policy::Input;
use fiec_schemas::messages::PolicyPresence;
use fiec_schemas::subjects;

use super::Core;

/// Interval of the counts of duties, which read every live execution.
const COUNT_EVERY: Duration = Duration::from_secs(5);
/// While inputs wait, an entrusted binding is overdue only after this many further times
/// `--entrust-ms`.
const BEHIND: u32 = 4;

impl Core {
    /// Ticks if the tick is late by its interval, because more inputs arrive than the service handles.
    /// Without ticks no silent node is found, and no other service hears that this one works.
    pub(super) async fn tick_if_late(&mut self) {
        if Instant::now() >= self.next_tick + self.options.tick {
            self.tick(true).await;
        }
    }

    /// `behind`: inputs wait.
    pub(super) async fn tick(&mut self, behind: bool) {
        self.next_tick = Instant::now() + self.options.tick;
        let state = self.effects.broker.client.connection_state();
        let connected = state == async_nats::connection::State::Connected;
        if connected != self.connected {
            self.connected = connected;
            self.step(Input::Connected { connected });
        }
        self.step(Input::Tick);
        // The feed's waiting messages show bindings that are not overdue. They were handled before,
        // or get more time.
        let more_time = if behind { BEHIND } else { 0 };
        self.append_overdue_bindings(self.options.entrust * more_time)
            .await;
        self.fetch_specs();
        self.appends.drop_unawaited();
        if self
            .spoke
            .is_none_or(|at| at.elapsed().as_millis() >= 1_000)
        {
            self.spoke = Some(Instant::now());
            // The others would leave work to a service that does not see the ledgers.
            if self.is_loaded() && self.feed.check().is_ok() {
                self.say_presence(false).await;
            }
            if connected {
                self.lines.keep_alive().await;
            }
            self.show();
            self.count_duties();
        }
    }

    fn show(&self) {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.metrics.live_executions.set(number(self.policy.live()));
        self.metrics
            .waiting_executions
            .set(number(self.policy.waiting()));
        self.metrics
            .appends_in_flight
            .set(number(self.lines.under_way() + self.appends.open()));
        self.metrics.open_submissions.set(number(self.lines.open()));
        self.metrics.replicas.set(number(self.policy.replicas()));
        self.metrics.nodes.set(self.policy.known_nodes().into());
        self.metrics.strangers.set(number(self.policy.strangers()));
    }

    /// Counts who must act next, which reads every live execution, and shows the clocks of the
    /// nodes.
    fn count_duties(&mut self) {
        if self.counted.is_some_and(|at| at.elapsed() < COUNT_EVERY) {
            return;
        }
        self.counted = Some(Instant::now());
        self.metrics.show_duties(&self.policy.duties(self.now()));
        self.metrics.show_clocks(self.policy.node_clocks());
    }

    pub(super) async fn say_presence(&self, leaving: bool) {
        let presence = PolicyPresence {
            id: self.options.id,
            at: self.effects.broker.now(),
            leaving,
        };
        if !self.connected {
            return;
        }
        if let Ok(payload) = serde_json::to_vec(&presence) {
            let client = &self.effects.broker.client;
            if let Err(error) = client
                .publish(subjects::POLICY_PRESENCE, payload.into())
                .await
            {
                tracing::warn!(%error, "cannot announce this replica to the others");
            }
        }
    }
}
