//! The registry of programs that are not built in. The key-value bucket `FIEC_PROGRAMS` has one
//! record per version, created once and never changed. The artifact is stored before its record, so
//! that an interrupted push registers nothing.

use async_nats::jetstream::kv::{CreateErrorKind, Store};
use fiec_schemas::package::{ProgramName, ProgramRecord};
use fiec_schemas::subjects;

use crate::{Broker, BrokerError, buckets, leader};

/// Header of the client library that marks the deletion of a key.
const OPERATION: &str = "KV-Operation";

/// The outcome of a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registered {
    /// The version is new.
    New,
    /// The version exists with the same artifact. Its record.
    Same(Box<ProgramRecord>),
    /// The version exists with another artifact. Nothing was changed. Its record.
    Taken(Box<ProgramRecord>),
}

/// Opens the bucket of programs.
///
/// # Errors
/// When it does not exist: `fiec setup` creates it.
pub async fn bucket(broker: &Broker) -> Result<Store, BrokerError> {
    broker
        .js
        .get_key_value(subjects::PROGRAMS_BUCKET)
        .await
        .map_err(BrokerError::operation(format!(
            "open the bucket of programs {} (`fiec setup` makes it)",
            subjects::PROGRAMS_BUCKET
        )))
}

fn read(key: &str, value: &[u8]) -> Result<ProgramRecord, BrokerError> {
    serde_json::from_slice(value).map_err(|error| BrokerError::Malformed {
        what: format!("record {key} in {}", subjects::PROGRAMS_BUCKET),
        reason: error.to_string(),
    })
}

/// The record of a program, if it is registered.
///
/// # Errors
/// When the broker does not answer, or the record cannot be read.
pub async fn find(
    broker: &Broker,
    program: &ProgramName,
) -> Result<Option<ProgramRecord>, BrokerError> {
    find_in(&bucket(broker).await?, program).await
}

/// The same in an opened bucket.
///
/// # Errors
/// When the broker does not answer, or the record cannot be read.
pub async fn find_in(
    bucket: &Store,
    program: &ProgramName,
) -> Result<Option<ProgramRecord>, BrokerError> {
    let key = program.key();
    let value = bucket.get(&key).await;
    let value = value.map_err(BrokerError::operation(format!(
        "read the record of {program}"
    )))?;
    if let Some(value) = value {
        return read(&key, &value).map(Some);
    }
    // A copy of the bucket that lags behind may have answered.
    let last = leader::last(&bucket.stream, &format!("{}{key}", bucket.prefix)).await?;
    let put = last.filter(|last| last.headers.get(OPERATION).is_none());
    put.map(|last| read(&key, &last.payload)).transpose()
}

/// Every registered program, in order of name and version.
///
/// # Errors
/// When the broker does not answer, or a record cannot be read.
pub async fn list(broker: &Broker) -> Result<Vec<ProgramRecord>, BrokerError> {
    let entries = buckets::entries(&bucket(broker).await?).await?;
    let records: Result<Vec<_>, _> = entries
        .iter()
        .map(|(key, value)| read(key, value))
        .collect();
    let mut records = records?;
    records.sort_by(|a, b| a.program.cmp(&b.program));
    Ok(records)
}

/// Registers a version whose artifact is stored already. Of two concurrent registrations one wins,
/// and the other learns which.
///
/// # Errors
/// When the broker does not answer, or an existing record cannot be read.
pub async fn register(
    broker: &Broker,
    program: &ProgramName,
    record: &ProgramRecord,
) -> Result<Registered, BrokerError> {
    let bucket = bucket(broker).await?;
    let value = serde_json::to_vec(record).map_err(|error| BrokerError::Malformed {
        what: format!("record of {program}"),
        reason: error.to_string(),
    })?;
    let operation = || format!("register {program}");
    match bucket.create(program.key(), value.into()).await {
        Ok(_) => Ok(Registered::New),
        Err(error) if error.kind() == CreateErrorKind::AlreadyExists => {
            let there = find_in(&bucket, program).await?;
            match there.map(Box::new) {
                Some(there) if there.artifact == record.artifact => Ok(Registered::Same(there)),
                Some(there) => Ok(Registered::Taken(there)),
                None => Err(BrokerError::operation(operation())(error)),
            }
        }
        Err(error) => Err(BrokerError::operation(operation())(error)),
    }
}
