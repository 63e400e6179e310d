//! Keeps the ledgers of executions that compute here for longer than the stream keeps messages.
//! Their holder is their only author, so it appends their state again before that.

use std::sync::Arc;

use fiec_broker::aging::LedgerAge;
use fiec_schemas::Phase;
use tokio_util::sync::CancellationToken;

use crate::message::Message;
use crate::runner::Runner;
use crate::shared::Shared;

/// Reports to all runners up to which sequence messages will soon drop out of the stream.
pub(crate) async fn follow(shared: Arc<Shared>, stop: CancellationToken) {
    let mut age = LedgerAge::new(&shared.broker);
    while let Some(up_to) = stop.run_until_cancelled(age.aged()).await {
        shared.stream.send_modify(|stream| stream.aged = up_to);
    }
}

impl Runner {
    /// Appends the state again if a message that will soon drop out holds it or σ. While an append is
    /// under way the next report decides: there are twenty before a message drops out.
    pub(crate) fn keep_aged(&mut self) {
        let up_to = self.stream.borrow().aged;
        let is_idle = self.flight.is_none() && self.staged.is_empty() && !self.ended;
        if !is_idle || !matches!(self.tip.state.phase, Phase::Started(_)) {
            return;
        }
        let place = self.tip.state.boundary.as_ref();
        let carried = place.and_then(|place| place.seq);
        let ages = |seq| seq > 0 && seq <= up_to;
        if ages(self.tip.seq) || carried.is_some_and(ages) {
            self.staged.push_back(Message::default());
        }
    }
}
