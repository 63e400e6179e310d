//! Lines between the intake and their ledgers: how many are under way, and whether the next one
//! waits for a slot.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fiec_schemas::{Sequence, Tenant};

use crate::bounds::{Gauge, Share};
use crate::intake::{Check, Intake, Line, Next};
use crate::pulling::Pulled;

/// After a delayed line found a slot, the next line is delayed up to this many times longer. A line
/// that is placed before its first append costs one message less.
const HOLD_THAT_PAYS: u32 = 4;

/// Whether the next line waits for a slot if all nodes are full. A line that gets a slot before its
/// first append costs one ledger message; otherwise it costs three. The lines after it wait too.
/// After [`Options::hold`](crate::Options) the line is appended without a slot.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Hold {
    /// It may wait.
    #[default]
    Possible,
    /// It waits until then.
    Until(Instant),
    /// The last line got no slot. The next one may wait after a further completion.
    InVain { completions: u64 },
}

impl Hold {
    /// Returns when the line has waited long enough.
    pub async fn ends(self) {
        match self {
            Self::Until(moment) => tokio::time::sleep_until(moment.into()).await,
            Self::Possible | Self::InVain { .. } => std::future::pending().await,
        }
    }
}

/// Lines between the intake and their ledgers.
pub(super) struct Lines {
    intake: Intake,
    /// Executions of messages that were checked as a whole and that the policy does not count yet,
    /// by tenant.
    promised: HashMap<Tenant, Gauge>,
    /// Lines that have left the intake and have no ledger yet.
    under_way: usize,
    /// The most of these.
    limit: usize,
    hold: Hold,
    /// Longest wait for a slot.
    hold_for: Duration,
    /// The last delayed line got a slot.
    hold_pays: bool,
}

impl Lines {
    /// No line has come yet. At most `limit` are under way, and one waits for a slot for `hold_for`.
    pub fn new(intake: Intake, limit: usize, hold_for: Duration) -> Self {
        Self {
            intake,
            promised: HashMap::new(),
            under_way: 0,
            limit,
            hold: Hold::default(),
            hold_for,
            hold_pays: false,
        }
    }

    /// Takes a message in.
    pub fn push(&mut self, pulled: Pulled) {
        self.intake.push(pulled);
    }

    /// True if no further message may be pulled now.
    pub fn is_crowded(&self) -> bool {
        self.intake.is_crowded()
    }

    /// True if a line could be taken in now.
    pub fn has_room(&self) -> bool {
        self.under_way < self.limit && !self.intake.is_full()
    }

    /// True if a line is there that does not wait for a slot.
    pub fn has_next(&self) -> bool {
        !self.intake.is_empty() && self.has_room() && !matches!(self.hold, Hold::Until(_))
    }

    /// The next of the intake. A line is under way from now on, until it is taken back or done.
    pub fn next(&mut self) -> Option<Next> {
        let next = self.intake.next();
        self.under_way += usize::from(matches!(next, Some(Next::Line(_))));
        next
    }

    /// Takes a line back after a check. The next check follows in its turn.
    pub fn resume(&mut self, mut line: Box<Line>, next: Check) {
        self.under_way -= 1;
        line.check = next;
        self.intake.resume(line);
    }

    /// A line of this message is done: it has its ledger, or the message is tried again for this
    /// reason.
    pub async fn done(&mut self, message: Sequence, end: Result<(), String>) {
        self.under_way -= 1;
        self.intake.done(message, end).await;
    }

    /// A line is refused. Its message is settled once that is [recorded](Self::recorded).
    pub fn refused(&mut self) {
        self.under_way -= 1;
    }

    /// The refusal of a line was recorded, or why not.
    pub async fn recorded(&mut self, message: Sequence, recorded: Result<(), String>) {
        self.intake.done(message, recorded).await;
    }

    /// All lines of a message are read.
    pub async fn settle(&mut self, message: Sequence) {
        self.intake.settle(message).await;
    }

    /// The intake, for a message that is checked as a whole.
    pub fn intake(&mut self) -> &mut Intake {
        &mut self.intake
    }

    /// Executions that were promised a place in a tenant's limit and do not count yet.
    pub fn promised(&self, tenant: &Tenant) -> usize {
        self.promised.get(tenant).map_or(0, Gauge::used)
    }

    /// Promises further ones.
    pub fn promise(&mut self, tenant: &Tenant, count: usize) -> Share {
        self.promised.retain(|_, gauge| gauge.used() > 0);
        self.promised.entry(tenant.clone()).or_default().take(count)
    }

    /// True if the next line may wait for a slot. `completions`: as the policy counts them.
    pub fn may_hold(&self, completions: u64) -> bool {
        match self.hold {
            Hold::Possible | Hold::Until(_) => true,
            Hold::InVain { completions: then } => then != completions,
        }
    }

    /// A line waits for a slot.
    pub fn hold(&mut self, line: Box<Line>) {
        self.under_way -= 1;
        if !matches!(self.hold, Hold::Until(_)) {
            let times = if self.hold_pays { HOLD_THAT_PAYS } else { 1 };
            self.hold = Hold::Until(Instant::now() + self.hold_for * times);
        }
        self.intake.put_back(line);
    }

    /// The line that waited got its slot.
    pub fn end_hold(&mut self) {
        if matches!(self.hold, Hold::Until(_)) {
            self.hold = Hold::Possible;
            self.hold_pays = true;
        }
    }

    /// The line that waited got no slot in time, and is appended without one.
    pub fn give_up_hold(&mut self, completions: u64) {
        self.hold_pays = false;
        self.hold = Hold::InVain { completions };
    }

    /// Whether, and until when, the next line waits.
    pub fn waits(&self) -> Hold {
        self.hold
    }

    /// Number of lines under way.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Number of open messages.
    pub fn open(&self) -> usize {
        self.intake.open()
    }

    /// Reports progress on the open messages to the broker.
    pub async fn keep_alive(&mut self) {
        self.intake.keep_alive().await;
    }
}
