//! What the console knows, and what it tells browsers. Two tasks ask for the nodes and the overview,
//! once for all browsers and only while there are some; one follows the feed of all ledgers. A browser
//! is told which topics have changed, and fetches the parts of its page again that show them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fiec_broker::api::Operator;
use fiec_broker::{Broker, feed};
use fiec_schemas::ExecutionId;
use futures_util::StreamExt as _;
use tokio::sync::{Notify, broadcast};
use tokio_util::sync::CancellationToken;

use crate::database::Database;
use crate::health::Health;
use crate::known::Kept;
use crate::pages::nodes::{Crossings, Nodes};
use crate::pages::overview::{self, Overview};
use crate::{ConsoleError, Options};

/// Shortest time between two looks while somebody looks at the console.
const LOOK: Duration = Duration::from_secs(1);
/// After each query the pause is at least its duration times this.
const REST: u32 = 4;
/// So long after the last request nobody looks any more.
const INTEREST: Duration = Duration::from_secs(30);
/// Time for which changes of executions are collected before browsers are told.
const COLLECT: Duration = Duration::from_millis(250);
/// After these times changes are told again: PostgreSQL has them later than the ledger.
const RECORDED: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];
/// Most executions that are told one by one. Beyond that browsers are told that many have changed.
const NAMED: usize = 200;
/// Messages that a slow browser may be behind. Beyond that it is told that all has changed.
const BEHIND: usize = 64;
/// Pause before the broker is tried again.
const AGAIN: Duration = Duration::from_secs(2);
/// Pause between two looks at the health of services.
const HEALTH: Duration = Duration::from_secs(5);
/// Time limit of a policy service that is asked for the nodes.
const NODES: Duration = Duration::from_secs(5);
/// Longest wait of a page for the first answer.
pub const FIRST: Duration = Duration::from_millis(1_500);

/// A change that browsers are told of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// The counts and what needs a person.
    Overview,
    /// The nodes.
    Nodes,
    /// These executions.
    Executions(Arc<BTreeSet<ExecutionId>>),
    /// Any.
    All,
}

/// Shared by all pages.
#[derive(Debug)]
pub struct Hub {
    /// The history.
    pub database: Database,
    /// Who asks, and for which tenant.
    pub options: Options,
    /// The counts, and what needs a person.
    pub overview: Kept<Overview>,
    /// The nodes.
    pub nodes: Kept<Nodes>,
    /// The health of services.
    pub health: Kept<Health>,
    broker: Mutex<Option<Broker>>,
    news: broadcast::Sender<News>,
    began: Instant,
    /// Milliseconds after `began` of the last request.
    looked: AtomicU64,
    wake: Notify,
}

impl Hub {
    /// Knows nothing yet.
    ///
    /// # Errors
    /// When the database's URL is none.
    pub fn new(options: Options) -> Result<Self, ConsoleError> {
        Ok(Self {
            database: Database::new(&options.database).map_err(ConsoleError::Database)?,
            options,
            overview: Kept::default(),
            nodes: Kept::default(),
            health: Kept::default(),
            broker: Mutex::default(),
            news: broadcast::Sender::new(BEHIND),
            began: Instant::now(),
            looked: AtomicU64::new(0),
            wake: Notify::new(),
        })
    }

    fn ms(&self) -> u64 {
        // 0: nobody has looked yet.
        u64::try_from(self.began.elapsed().as_millis())
            .unwrap_or(u64::MAX)
            .max(1)
    }

    /// Somebody looks.
    pub fn touch(&self) {
        let before = self.looked.swap(self.ms(), Ordering::Relaxed);
        if !self.is_recent(before) {
            // The kept values are as old as the last visit.
            self.overview.forget_age();
            self.nodes.forget_age();
            self.health.forget_age();
        }
        self.wake.notify_waiters();
    }

    fn is_recent(&self, looked: u64) -> bool {
        let interest = u64::try_from(INTEREST.as_millis()).unwrap_or(u64::MAX);
        looked > 0 && self.ms().saturating_sub(looked) <= interest
    }

    /// Waits while nobody looks.
    async fn visitor(&self) {
        loop {
            // Before the look: a visit in between is not missed.
            let woken = self.wake.notified();
            if self.is_recent(self.looked.load(Ordering::Relaxed)) {
                return;
            }
            woken.await;
        }
    }

    /// What changes from now on.
    pub fn listen(&self) -> broadcast::Receiver<News> {
        self.news.subscribe()
    }

    /// The broker; none until it has answered once.
    pub fn broker(&self) -> Option<Broker> {
        let broker = self.broker.lock();
        broker.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Who asks policy services; none until the broker has answered once.
    pub fn operator(&self) -> Option<Operator> {
        let broker = self.broker()?;
        Some(Operator::new(broker, &*self.options.who))
    }

    fn tell(&self, news: News) {
        // Nobody listens: nobody needs to know.
        let _ = self.news.send(news);
    }

    /// Runs until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let all = async {
            tokio::join!(
                self.look_at_nodes(),
                self.look_at_history(),
                self.look_at_health(),
                self.follow()
            );
        };
        stop.run_until_cancelled(all).await;
    }

    async fn look_at_nodes(&self) {
        let mut crossings = Crossings::default();
        loop {
            self.visitor().await;
            let began = Instant::now();
            let nodes = self.ask_nodes().await;
            if self
                .nodes
                .keep(nodes.map(|statuses| Nodes::of(statuses, &mut crossings)))
            {
                self.tell(News::Nodes);
            }
            rest(began).await;
        }
    }

    async fn look_at_history(&self) {
        loop {
            self.visitor().await;
            let began = Instant::now();
            if self.overview.keep(overview::read(&self.database).await) {
                self.tell(News::Overview);
            }
            rest(began).await;
        }
    }

    async fn look_at_health(&self) {
        loop {
            self.visitor().await;
            let services = self.options.services.borrow().clone();
            // After a time without visitors a red state may be another one than before.
            let known = self.health.now();
            let before = known.value.filter(|_| !known.is_old).unwrap_or_default();
            let health = Health::of(&services, &before).await;
            if self.health.keep(Ok(health)) {
                self.tell(News::Overview);
            }
            tokio::time::sleep(HEALTH).await;
        }
    }

    async fn ask_nodes(&self) -> Result<Vec<fiec_schemas::messages::NodeStatus>, String> {
        let operator = self.operator().ok_or("NATS does not answer")?;
        let asked = tokio::time::timeout(NODES, operator.nodes()).await;
        let words = format!(
            "no policy service has answered within {} s",
            NODES.as_secs()
        );
        let reply = asked.map_err(|_| words)?;
        Ok(reply.map_err(|error| error.to_string())?.nodes)
    }

    /// Connects to the broker, and follows the ledgers.
    async fn follow(&self) {
        let broker = loop {
            match Broker::connect(self.options.broker.clone()).await {
                Ok(broker) => break broker,
                Err(error) => {
                    tracing::warn!(%error, "NATS does not answer; trying again");
                    self.nodes
                        .keep(Err(format!("NATS does not answer: {error}")));
                    tokio::time::sleep(AGAIN).await;
                }
            }
        };
        *self.broker.lock().unwrap_or_else(PoisonError::into_inner) = Some(broker.clone());
        loop {
            match feed::live(&broker).await {
                Ok(feed) => self.tell_of(feed).await,
                Err(error) => {
                    tracing::warn!(%error, "the ledgers cannot be followed; trying again");
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Tells which executions have new messages, some time for all of them together, and again when
    /// PostgreSQL should have them.
    async fn tell_of(
        &self,
        mut feed: impl futures_util::Stream<Item = Result<feed::FeedItem, fiec_broker::BrokerError>>
        + Unpin,
    ) {
        let mut changed = BTreeSet::new();
        // Changes that are told a second time, once PostgreSQL has them.
        let mut later: [Changes; 2] = RECORDED.map(Changes::new);
        loop {
            let due = later.iter().filter_map(Changes::due).min();
            let wait = due.unwrap_or_else(|| tokio::time::Instant::now() + INTEREST);
            match tokio::time::timeout_at(wait, feed.next()).await {
                Ok(None) => return,
                Ok(Some(item)) => {
                    changed.extend(item.ok().map(|item| item.execution));
                    let until = tokio::time::Instant::now() + COLLECT;
                    while let Ok(Some(item)) = tokio::time::timeout_at(until, feed.next()).await {
                        if changed.len() <= NAMED {
                            changed.extend(item.ok().map(|item| item.execution));
                        }
                    }
                    let all = std::mem::take(&mut changed);
                    later.iter_mut().for_each(|later| later.add(&all));
                    self.tell(News::of(all));
                }
                Err(_) => {}
            }
            for later in &mut later {
                if let Some(all) = later.take() {
                    self.tell(News::of(all));
                }
            }
        }
    }
}

/// A pause that keeps the load of looking small.
async fn rest(began: Instant) {
    tokio::time::sleep(LOOK.max(began.elapsed() * REST)).await;
}

impl News {
    fn of(changed: BTreeSet<ExecutionId>) -> Self {
        match changed.len() {
            0..=NAMED => Self::Executions(Arc::new(changed)),
            _ => Self::All,
        }
    }
}

/// Changes that are told again after a time.
struct Changes {
    after: Duration,
    /// The last of them.
    at: Option<tokio::time::Instant>,
    all: BTreeSet<ExecutionId>,
}

impl Changes {
    fn new(after: Duration) -> Self {
        Self {
            after,
            at: None,
            all: BTreeSet::new(),
        }
    }

    fn add(&mut self, changed: &BTreeSet<ExecutionId>) {
        // Later changes do not put off what waits.
        self.at.get_or_insert_with(tokio::time::Instant::now);
        if self.all.len() <= NAMED {
            self.all.extend(changed);
        }
    }

    fn due(&self) -> Option<tokio::time::Instant> {
        Some(self.at? + self.after)
    }

    fn take(&mut self) -> Option<BTreeSet<ExecutionId>> {
        self.due()
            .filter(|due| *due <= tokio::time::Instant::now())?;
        self.at = None;
        Some(std::mem::take(&mut self.all))
    }
}
