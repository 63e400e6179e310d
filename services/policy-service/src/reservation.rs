//! Quotas and reservations in the broker. The bucket `FIEC_QUOTA` has the quotas of tenants. The
//! subject `fiec.quota.<tenant>` has their reservations, replaced by compare-and-set.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use fiec_broker::{Broker, BrokerError, Delivered, Entry, Reader, buckets, leader};
use fiec_policy::Change;
use fiec_policy::{Fate, Seen};
use fiec_schemas::dependency::Target;
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::{ExecutionId, Sequence, Tenant, subjects};
use futures_util::StreamExt as _;
use tokio::sync::mpsc::Sender;

use crate::effects::Effects;
use crate::events::{News, Outcome};
use crate::refusal::Refusal;

/// Time limit of a change. After it, the result is unknown.
const WITHIN: Duration = Duration::from_secs(4);

/// A tenant's reservations and the sequence of their message, 0 if there is none.
///
/// # Errors
/// If the broker does not answer, or the message cannot be read.
pub async fn reserved(
    broker: &Broker,
    tenant: &Tenant,
) -> Result<(Sequence, Reservations), BrokerError> {
    let stream = broker
        .js
        .get_stream_no_info(subjects::QUOTA_STREAM)
        .await
        .map_err(BrokerError::operation("open the stream of reservations"))?;
    let subject = subjects::quota(tenant);
    match leader::last(&stream, &subject).await? {
        Some(message) => Ok((message.sequence, read(&subject, &message.payload)?)),
        None => Ok((0, Reservations::default())),
    }
}

fn read(subject: &str, payload: &[u8]) -> Result<Reservations, BrokerError> {
    serde_json::from_slice(payload).map_err(|error| BrokerError::Malformed {
        what: format!("the reservations on {subject}"),
        reason: error.to_string(),
    })
}

impl Effects {
    /// Changes a tenant's reservations and reports the result.
    pub async fn reserve(self, tenant: Tenant, quota: Option<Quota>, change: Box<Change>) {
        let changed = self.change_reserved(&tenant, quota.as_ref(), &change);
        let table = match tokio::time::timeout(WITHIN, changed).await {
            Ok(Ok(table)) => Some(table),
            Ok(Err(error)) => {
                tracing::warn!(%tenant, %error, "the tenant's reservations could not be changed");
                // An immediate retry would only load a broker that is in trouble.
                tokio::time::sleep(Duration::from_millis(500)).await;
                None
            }
            Err(_) => {
                tracing::warn!(%tenant, "the tenant's reservations could not be changed in time");
                None
            }
        };
        self.tell(Outcome::Reserved(tenant, table)).await;
    }

    async fn change_reserved(
        &self,
        tenant: &Tenant,
        quota: Option<&Quota>,
        change: &Change,
    ) -> Result<(Sequence, Reservations), BrokerError> {
        let subject = subjects::quota(tenant);
        let failed = |error| BrokerError::operation(format!("replace {subject}"))(error);
        loop {
            let (seq, before) = reserved(&self.broker, tenant).await?;
            let after = change.apply(&before, quota);
            if after.entries == before.entries && !change.fence {
                return Ok((seq, before));
            }
            let payload = serde_json::to_vec(&after).map_err(|error| BrokerError::Malformed {
                what: subject.clone(),
                reason: error.to_string(),
            })?;
            let publish = PublishMessage::build()
                .payload(payload.into())
                .expected_last_subject_sequence(seq);
            let js = &self.broker.js;
            let ack = js.send_publish(subject.clone(), publish).await;
            match ack.map_err(failed)?.await {
                Ok(ack) => return Ok((ack.sequence, after)),
                // Another writer was first. Apply the change to its result.
                Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Checks whether an execution has ended.
    pub async fn look_at_end(self, tenant: Tenant, execution: ExecutionId) {
        match self.seen(&tenant, execution).await {
            Ok(seen) => self.tell(Outcome::Ended(execution, seen)).await,
            // The policy asks again later.
            Err(error) => {
                tracing::warn!(%execution, %error, "cannot check whether the execution has ended");
            }
        }
    }

    async fn seen(&self, tenant: &Tenant, execution: ExecutionId) -> Result<Seen, Refusal> {
        let fate = |entry: Entry| match Fate::of(entry.message.state.phase.kind()) {
            Some(fate) => Seen::Ended(fate),
            None => Seen::Lives,
        };
        if let Some(entry) = self.ledger.last(tenant, execution).await? {
            return Ok(fate(entry));
        }
        // It may still be queued, behind an execution that depends on it.
        let mut wanted = BTreeSet::from([Target::One(execution)]);
        self.drop_queued(tenant, &mut wanted).await?;
        if wanted.is_empty() {
            return Ok(Seen::Lives);
        }
        let last = self.ledger.last(tenant, execution).await?;
        Ok(last.map_or(Seen::Vanished, fate))
    }
}

/// Follows the reservations of all tenants: first the last message of each, then every change.
///
/// # Errors
/// If the broker refuses the consumer, or the stream ends.
pub async fn follow(broker: &Broker, news: &Sender<News>) -> Result<(), BrokerError> {
    let config = pull::Config {
        deliver_policy: DeliverPolicy::LastPerSubject,
        filter_subject: "fiec.quota.*".to_owned(),
        ..Default::default()
    };
    let what = "follow reservations";
    let mut messages = Reader::open(broker, subjects::QUOTA_STREAM, config, 200, what).await?;
    while let Some(delivered) = messages.next().await {
        let Delivered { message, seq, .. } = delivered?;
        let Some(tenant) = subjects::parse_quota(&message.subject) else {
            continue;
        };
        match read(&message.subject, &message.payload) {
            Ok(table) => {
                let _ = news.send(News::Reserved(tenant, seq, table)).await;
            }
            Err(error) => tracing::warn!(%error, "a message was passed over"),
        }
    }
    Ok(())
}

/// The quotas in the bucket, read when the service starts.
///
/// # Errors
/// If the broker does not deliver them.
pub async fn quotas(broker: &Broker) -> Result<Vec<News>, BrokerError> {
    let entries = buckets::entries(&bucket(broker).await?).await?;
    let quota = |(key, value): &(String, Bytes)| {
        let (tenant, quota) = (key.parse().ok()?, parse(key, value)?);
        Some(News::Quota(tenant, Some(quota)))
    };
    Ok(entries.iter().filter_map(quota).collect())
}

async fn bucket(broker: &Broker) -> Result<async_nats::jetstream::kv::Store, BrokerError> {
    broker
        .js
        .get_key_value(subjects::QUOTA_BUCKET)
        .await
        .map_err(BrokerError::operation("open the bucket of quotas"))
}

fn parse(key: &str, value: &[u8]) -> Option<Quota> {
    serde_json::from_slice(value)
        .map_err(|error| tracing::warn!(key, %error, "a quota was passed over"))
        .ok()
}

/// Follows changes of quotas.
///
/// # Errors
/// If the broker refuses the watch, or the watch ends.
pub async fn watch_quotas(broker: &Broker, news: &Sender<News>) -> Result<(), BrokerError> {
    use async_nats::jetstream::kv::Operation;
    let bucket = bucket(broker).await?;
    let mut entries = bucket
        .watch_with_history(">")
        .await
        .map_err(BrokerError::operation("watch quotas"))?;
    while let Some(entry) = entries.next().await {
        let entry = entry.map_err(BrokerError::operation("watch quotas"))?;
        let Ok(tenant) = entry.key.parse::<Tenant>() else {
            continue;
        };
        let quota = match entry.operation {
            Operation::Put => parse(&entry.key, &entry.value),
            Operation::Delete | Operation::Purge => None,
        };
        let _ = news.send(News::Quota(tenant, quota)).await;
    }
    Ok(())
}
