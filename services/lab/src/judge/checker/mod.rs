//! A checker of histories: at the end of every integration test it reads what the test has left in
//! the ledger stream, in the object store and in PostgreSQL, and judges it by its own rules.
//!
//! | file | |
//! |---|---|
//! | `message.rs` | a ledger message as plain JSON |
//! | `chain.rs` | the valid messages of a ledger, in order |
//! | `rules.rs` | what holds for each ledger |
//! | `stored.rs` | reads the broker; outputs |
//! | `tables.rs` | the rows that PostgreSQL must hold |
//!
//! A test that damages something on purpose declares it ([`Exempt`]).

pub mod chain;
pub mod message;
pub mod rules;
pub mod stored;
pub mod tables;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use fiec_broker::{Broker, Ledger, feed, store};
use fiec_schemas::{ExecutionId, Tenant};
use sqlx::PgPool;
use tokio::time::{Instant, sleep};

use self::chain::Chain;
use super::journal::{self, Journal};

/// How far two authors' measurements of the broker's clock may lie apart on a busy machine, in ms.
pub const CLOCKS_MS: i64 = 500;
/// How long the recorder has to come to the streams' ends.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a check that cannot read something is made again. In a cluster an election may go on.
const ELECTION: Duration = Duration::from_secs(20);

/// A rule of the checker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Each message on a ledger's subject is a ledger message of that execution.
    Readable,
    /// Each message has the digest of the one before it; ordinals grow by one, sequences grow.
    Chain,
    /// What the broker has stored is there, as far as the streams keep it.
    Durable,
    /// Nothing follows the end.
    End,
    /// Epochs grow by one with each binding; each is started at most once.
    Epochs,
    /// Only the worker of the binding in force appends what a holder appends.
    Holder,
    /// Each event is one that the phase allows.
    Phases,
    /// Boundaries grow; only a step back goes to an earlier one.
    Progress,
    /// A message's state is what its events come to.
    State,
    /// A message's state is the product's own fold of the state before it, in every field.
    Fold,
    /// Times stand in order.
    Times,
    /// Each output and each large result is in the store, with its size and digest.
    Outputs,
    /// The last σ of each live execution can be read, with its digest.
    Sigma,
    /// The recorder has come to the ends of the streams.
    Recorded,
    /// The table has the rows that the ledgers come to, and no others.
    Table(&'static str),
    /// Tables of records have the records.
    Records,
    /// Nothing is stated as missing or made anew.
    Gaps,
    /// A confirmed request is done, and an accepted line has a ledger.
    Answers,
    /// Each policy service believes what the ledgers say.
    Agreement,
    /// A pending execution that a free viable node could take is bound.
    Liveness,
    /// The age of the last commit of a computing execution is bounded.
    RecoveryPoint,
    /// Nothing is left behind.
    Leaks,
    /// Of each execution the stream holds a prefix of the emitted messages, each once.
    Outbox,
    /// Streams and consumers are as they were set up.
    Configuration,
    /// While something is broken, some health is red or somebody is overdue.
    Health,
    /// Everything can be observed.
    Observed,
}

/// What a test does to its cluster on purpose, so that some rules cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exempt {
    /// The test puts messages on the subjects of ledgers that are none.
    Garbage,
    /// The test takes acknowledged messages away from the broker. Messages are said again, and the
    /// recorder marks what it had and what it never saw.
    LostMessages,
    /// The recorder is away for longer than the stream keeps an execution's messages. It states
    /// the gaps.
    StatedGaps,
    /// The recorder collects objects while the test runs. A large result whose copy is in PostgreSQL
    /// may be gone.
    ShortGrace,
}

impl Exempt {
    /// True where the damage explains the violation.
    pub fn explains(self, rule: Rule) -> bool {
        match self {
            Exempt::Garbage => rule == Rule::Readable,
            Exempt::StatedGaps => rule == Rule::Gaps,
            Exempt::ShortGrace => false,
            Exempt::LostMessages => {
                // The row of a batch stays although all its lines were lost.
                let batches = Rule::Table("batches");
                matches!(rule, Rule::Durable | Rule::Gaps | Rule::Outbox) || rule == batches
            }
        }
    }
}

/// A rule that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub rule: Rule,
    /// The execution, where it is one.
    pub execution: String,
    pub what: String,
}

impl Violation {
    pub fn new(rule: Rule, execution: &str, what: impl Into<String>) -> Self {
        Self {
            rule,
            execution: execution.to_owned(),
            what: what.into(),
        }
    }

    /// Something could not be read.
    pub fn unobserved(why: impl Into<String>) -> Self {
        Self::new(Rule::Observed, "", why)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {} {}", self.rule, self.execution, self.what)
    }
}

/// Checks what a cluster has left. Gives every violation that the exemptions do not explain.
///
/// # Errors
/// When the broker or PostgreSQL does not answer for longer than an election lasts.
pub async fn check(
    broker: &Broker,
    pool: Option<&PgPool>,
    journal: &Journal,
    exempt: &[Exempt],
) -> Result<Vec<Violation>, String> {
    let deadline = Instant::now() + ELECTION;
    loop {
        let checked = check_once(broker, pool, journal, exempt).await;
        if checked.is_ok() || Instant::now() >= deadline {
            return checked;
        }
        sleep(Duration::from_secs(1)).await;
    }
}

async fn check_once(
    broker: &Broker,
    pool: Option<&PgPool>,
    journal: &Journal,
    exempt: &[Exempt],
) -> Result<Vec<Violation>, String> {
    let mut found = Vec::new();
    // The tables first: the ledgers hold at least what these were made of.
    let snapshot = match pool {
        Some(pool) => Some(tables::read(broker, pool, PATIENCE).await),
        None => None,
    };
    // The journal before the stream: what arrives meanwhile is stored, and not lost.
    let (_, last) = feed::bounds(broker).await.map_err(|e| e.to_string())?;
    let seen = journal.messages(last).await?;
    let (messages, wrong) = stored::ledgers(broker).await?;
    found.extend(wrong);
    let (chains, wrong) = chain::chains(messages, seen);
    found.extend(wrong);
    for chain in &chains {
        found.extend(rules::judge(chain));
    }
    let differs = journal::compare_with_fold(&journal.all());
    found.extend(
        differs
            .into_iter()
            .map(|what| Violation::new(Rule::Fold, "", what)),
    );
    let copied = match &snapshot {
        Some(Ok(snapshot)) if exempt.contains(&Exempt::ShortGrace) => snapshot.with_results.clone(),
        _ => BTreeSet::new(),
    };
    found.extend(stored::check_objects(broker, &chains, &copied).await);
    found.extend(check_sigma(broker, &chains).await);
    match snapshot {
        Some(Ok(snapshot)) => {
            let chains = until(&chains, snapshot.ledger);
            let partial: BTreeSet<String> = chains
                .iter()
                .filter(|chain| !chain.is_whole() || chain.is_healed())
                .map(|chain| chain.execution.clone())
                .collect();
            let expected = tables::expected(&chains);
            let mut differ = tables::compare(&expected, &snapshot.tables, &partial);
            if exempt.contains(&Exempt::StatedGaps) {
                // The row of the execution itself is right all the same.
                differ.retain(|violation| {
                    violation.rule == Rule::Table("executions")
                        || !snapshot.with_gaps.contains(&violation.execution)
                });
            }
            if exempt.contains(&Exempt::LostMessages) {
                // A lost end is in SQL, and a line that was sent again makes another run.
                differ.retain(|violation| !snapshot.ended_before.contains(&violation.execution));
            }
            found.extend(differ);
            let records = stored::records(broker).await?;
            found.extend(tables::compare_records(&records, &snapshot));
            found.extend(tables::judge(&snapshot));
        }
        Some(Err(why)) => found.push(Violation::new(Rule::Recorded, "", why)),
        None => {}
    }
    found.retain(|violation| !exempt.iter().any(|e| e.explains(violation.rule)));
    Ok(found)
}

/// The ledgers as they were at a checkpoint.
fn until(chains: &[Chain], seq: u64) -> Vec<Chain> {
    let cut = |chain: &Chain| {
        let mut chain = chain.clone();
        chain.messages.retain(|message| message.seq <= seq);
        chain
    };
    let cut = chains.iter().map(cut);
    cut.filter(|chain| !chain.messages.is_empty()).collect()
}

/// The σ from which each live execution would go on.
async fn check_sigma(broker: &Broker, chains: &[Chain]) -> Vec<Violation> {
    let mut found = Vec::new();
    let last = |chain: &&Chain| {
        chain
            .messages
            .last()
            .is_some_and(|m| !m.state.phase.is_terminal())
    };
    for chain in chains.iter().filter(last) {
        let mut why = String::new();
        // A later commit may replace the σ while it is read.
        for _ in 0..5 {
            match sigma(broker, chain).await {
                Ok(()) => {
                    why.clear();
                    break;
                }
                Err(error) => why = error,
            }
        }
        if !why.is_empty() {
            found.push(Violation::new(Rule::Sigma, &chain.execution, why));
        }
    }
    found
}

async fn sigma(broker: &Broker, chain: &Chain) -> Result<(), String> {
    let Some(first) = chain.messages.first() else {
        return Ok(());
    };
    let words = |error: fiec_broker::BrokerError| error.to_string();
    let tenant: Tenant = first.state.tenant.parse().map_err(|_| "no tenant")?;
    let id: ExecutionId = chain.execution.parse().map_err(|_| "no execution")?;
    let last = Ledger::new(broker).last(&tenant, id).await.map_err(words)?;
    let place = last.and_then(|last| last.message.state.boundary.clone());
    if let Some(place) = place {
        store::get_state(broker, id, &place).await.map_err(words)?;
    }
    Ok(())
}
