//! What the console knows, and what it tells browsers. One task asks for the nodes and the overview,
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
use crate::known::Kept;
use crate::pages::nodes::{Crossings, Nodes};
use crate::pages::overview::{self, Overview};
use crate::{ConsoleError, Options};

/// Time between two looks while somebody looks at the console.
const LOOK: Duration = Duration::from_secs(1);
/// So long after the last request nobody looks any more.
const INTEREST: Duration = Duration::from_secs(30);
/// Time for which changes of executions are collected before browsers are told.
const COLLECT: Duration = Duration::from_millis(250);
/// Most executions that are told one by one. Beyond that browsers are told that many have changed.
const NAMED: usize = 200;
/// Messages that a slow browser may be behind. Beyond that it is told that all has changed.
const BEHIND: usize = 64;
/// Pause before the broker is tried again.
const AGAIN: Duration = Duration::from_secs(2);
/// Longest wait of a page for the first answer.
pub const FIRST: Duration = Duration::from_millis(1_500);

/// What has changed, as browsers hear it.
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
    operator: Mutex<Option<Operator>>,
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
            operator: Mutex::default(),
            news: broadcast::Sender::new(BEHIND),
            began: Instant::now(),
            looked: AtomicU64::new(0),
            wake: Notify::new(),
        })
    }

    /// Somebody looks.
    pub fn touch(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        // 0: nobody has looked yet.
        let before = self.looked.swap(now.max(1), Ordering::Relaxed);
        if before == 0 || Duration::from_millis(now.saturating_sub(before)) > INTEREST {
            self.wake.notify_one();
        }
    }

    fn is_watched(&self) -> bool {
        let looked = self.looked.load(Ordering::Relaxed);
        looked > 0
            && self
                .began
                .elapsed()
                .saturating_sub(Duration::from_millis(looked))
                <= INTEREST
    }

    /// What changes from now on.
    pub fn listen(&self) -> broadcast::Receiver<News> {
        self.news.subscribe()
    }

    /// Who asks policy services; none while the broker is away.
    pub fn operator(&self) -> Option<Operator> {
        let operator = self.operator.lock();
        operator.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn tell(&self, news: News) {
        // Nobody listens: nobody needs to know.
        let _ = self.news.send(news);
    }

    /// Runs until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let both = async {
            tokio::join!(self.look(), self.follow());
        };
        stop.run_until_cancelled(both).await;
    }

    /// Asks for the nodes and the overview, while somebody looks.
    async fn look(&self) {
        let mut crossings = Crossings::default();
        loop {
            if !self.is_watched() {
                self.wake.notified().await;
            }
            let (nodes, overview) = tokio::join!(self.ask_nodes(), overview::read(&self.database));
            let nodes = nodes.map(|statuses| Nodes::of(statuses, &mut crossings));
            if self.nodes.keep(nodes) {
                self.tell(News::Nodes);
            }
            if self.overview.keep(overview) {
                self.tell(News::Overview);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn ask_nodes(&self) -> Result<Vec<fiec_schemas::messages::NodeStatus>, String> {
        let operator = self.operator().ok_or("NATS does not answer")?;
        let asked = tokio::time::timeout(Duration::from_secs(3), operator.nodes()).await;
        let reply = asked.map_err(|_| "no policy service has answered within 3 s".to_owned())?;
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
        let operator = Operator::new(broker.clone(), &*self.options.who);
        *self.operator.lock().unwrap_or_else(PoisonError::into_inner) = Some(operator);
        loop {
            match feed::live(&broker).await {
                Ok(mut feed) => {
                    let mut changed = BTreeSet::new();
                    while let Some(item) = feed.next().await {
                        changed.extend(item.ok().map(|item| item.execution));
                        let until = tokio::time::Instant::now() + COLLECT;
                        while let Ok(Some(item)) = tokio::time::timeout_at(until, feed.next()).await
                        {
                            if changed.len() <= NAMED {
                                changed.extend(item.ok().map(|item| item.execution));
                            }
                        }
                        let all = std::mem::take(&mut changed);
                        self.tell(match all.len() {
                            0..=NAMED => News::Executions(Arc::new(all)),
                            _ => News::All,
                        });
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the ledgers cannot be followed; trying again")
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}
