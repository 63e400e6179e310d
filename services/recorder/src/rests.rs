//! Executions that rest behind a message that the broker has lost. The next message of a ledger shows
//! what was lost of it; of one that rests none may come for days. Their rows are set back to what the
//! ledger still has. Nothing else is withdrawn: who holds a binding says again what was lost.

use fiec_broker::{Broker, BrokerError, Entry, Ledger};
use fiec_schemas::{ExecutionId, Sequence, Tenant};
use futures_util::{StreamExt, TryStreamExt, stream};
use sqlx::{PgConnection, PgPool, Row};

use crate::fold::{Message, stand};
use crate::lost::Mark;
use crate::metrics::Part;
use crate::table::argument;
use crate::tasks::{Shared, again};
use crate::write::{self, Prepared};
use crate::{lost, read};

/// Executions that one transaction sets back at most.
const PAGE: i64 = 200;
/// Ledgers that are read at once.
const AT_ONCE: usize = 16;

/// Sets back the rows of all executions that rest, if their recorded last message is behind `from`,
/// the last one that the ledger stream still has. False if the recorder is being stopped, or another
/// one has moved the checkpoint.
///
/// After an error the executions before it are set back. The next call sets back the others.
///
/// # Errors
/// When the broker does not answer.
pub(crate) async fn set_back(
    broker: &Broker,
    shared: &Shared,
    mark: &Mark,
    from: Sequence,
) -> Result<bool, BrokerError> {
    let ledger = &Ledger::new(broker);
    let mut after = ExecutionId(uuid::Uuid::nil());
    loop {
        let page = again(shared, Part::Ledger, || behind(&shared.pool, from, after));
        let Some(page) = page.await else {
            return Ok(false);
        };
        let Some((last, _)) = page.last() else {
            return Ok(true);
        };
        after = *last;
        let lasts = stream::iter(page)
            .map(|(id, tenant)| async move { readable(ledger.last(&tenant, id).await) })
            .buffer_unordered(AT_ONCE)
            .try_collect::<Vec<_>>();
        let rest = |message: &Message| {
            let phase = &message.message.state.phase;
            // What was lost behind an end is a retry.
            message.seq <= from && phase.binding().is_none() && phase.kind().needs_state()
        };
        let messages = lasts.await?.into_iter().flatten().map(|entry| Message {
            seq: entry.seq,
            stored_at: entry.stored_at,
            digest: Some(entry.digest),
            message: entry.message,
        });
        let messages: Vec<Message> = messages.filter(rest).collect();
        if messages.is_empty() {
            continue;
        }
        tracing::warn!(
            executions = messages.len(),
            "the broker has lost the last messages of executions that rest; their rows are set back"
        );
        let at = broker.now();
        let write = again(shared, Part::Ledger, || async {
            let mut tx = shared.pool.begin().await?;
            if !lost::hold(&mut tx, mark).await? {
                return Ok(None);
            }
            let batch = Prepared::new(stand(messages.clone(), at));
            write::write_rows(&mut tx, &batch).await?;
            name_nodes(&mut tx, &messages).await?;
            tx.commit().await?;
            Ok(Some(batch))
        });
        let Some(Some(batch)) = write.await else {
            return Ok(false);
        };
        shared
            .mirror
            .changed(&batch.rows.states, &batch.rows.finished);
    }
}

/// The last message of a ledger. One that this version cannot read leaves the rows as they are.
fn readable(last: Result<Option<Entry>, BrokerError>) -> Result<Option<Entry>, BrokerError> {
    match last {
        Err(error @ (BrokerError::Malformed { .. } | BrokerError::Foreign { .. })) => {
            tracing::warn!(%error, "the state of an execution is not known");
            Ok(None)
        }
        last => last,
    }
}

/// Executions whose recorded last message is behind `from`, by their ids, those up to `after` left out.
async fn behind(
    pool: &PgPool,
    from: Sequence,
    after: ExecutionId,
) -> sqlx::Result<Vec<(ExecutionId, Tenant)>> {
    let rows = sqlx::query(
        "SELECT id, tenant FROM executions WHERE seq > $1 AND id > $2 ORDER BY id LIMIT $3",
    );
    let rows = rows.bind(argument(&from)).bind(argument(&after)).bind(PAGE);
    let rows = rows.fetch_all(pool).await?;
    let read = |row| {
        let tenant: String = Row::try_get(row, "tenant")?;
        let tenant = Tenant::new(tenant).map_err(|error| sqlx::Error::Decode(error.into()))?;
        Ok((read::execution(row, "id")?, tenant))
    };
    rows.iter().map(read).collect()
}

/// The node of an execution that rests is that of its last binding.
async fn name_nodes(tx: &mut PgConnection, messages: &[Message]) -> sqlx::Result<()> {
    let ids = messages
        .iter()
        .map(|message| message.message.state.execution);
    sqlx::query(
        "UPDATE executions SET node = (SELECT p.node FROM placements p \
         WHERE p.execution = executions.id AND p.epoch = executions.epoch) WHERE id = ANY($1)",
    )
    .bind(argument(&ids.collect::<Vec<_>>()))
    .execute(tx)
    .await?;
    Ok(())
}
