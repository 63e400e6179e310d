//! Reads that decide something. Any copy of a stream answers a direct get, and one that lags behind
//! its leader answers with an old message, or with none. So the last message of a subject is asked
//! of the leader, and so is a message that a copy does not have. The contents of a sequence do not
//! change while the broker loses nothing: any copy that has it may answer.
//!
//! A leader that was cut off from the other servers answers for some more seconds. What it says is
//! old, but nothing can be appended there. So an author that is refused asks again, and nobody
//! removes anything because a message is not there.

use std::time::Duration;

use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::stream::{DirectGetErrorKind, RawMessageErrorKind, Stream};

use crate::BrokerError;

/// Time after which a leader that was cut off from the other servers answers no more, with room. It
/// looks every 10 s whether it has heard a majority within the last 10 s: it may lead for 20 s.
pub const CUT_OFF: Duration = Duration::from_secs(25);

/// How often a message that is known to exist is looked for, and the pause between two looks: a new
/// leader may not have read all of its stream yet.
pub(crate) const LOOKS: u32 = 20;
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// Returns the last message on a subject, as the stream's leader has it.
///
/// # Errors
/// When no leader answers.
pub async fn last<I>(
    stream: &Stream<I>,
    subject: &str,
) -> Result<Option<StreamMessage>, BrokerError> {
    match stream.get_last_raw_message_by_subject(subject).await {
        Ok(message) => Ok(Some(message)),
        Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => Ok(None),
        Err(error) => Err(BrokerError::operation(format!(
            "read the last of {subject}"
        ))(error)),
    }
}

/// Returns the last message on a subject as some copy has it, which may lag behind: for a caller that
/// appends behind it, and is refused if it is old. It costs the broker less than [`last`].
///
/// # Errors
/// When no copy answers.
pub async fn glimpse<I>(
    stream: &Stream<I>,
    subject: &str,
) -> Result<Option<StreamMessage>, BrokerError> {
    match stream.direct_get_last_for_subject(subject).await {
        Ok(message) => Ok(Some(message)),
        Err(error) if error.kind() == DirectGetErrorKind::NotFound => Ok(None),
        Err(error) => Err(BrokerError::operation(format!(
            "read the last of {subject}"
        ))(error)),
    }
}

/// Returns the message of a sequence, as the stream's leader has it.
///
/// # Errors
/// When no leader answers. `what` names the message.
pub async fn message<I>(
    stream: &Stream<I>,
    seq: u64,
    what: &str,
) -> Result<Option<StreamMessage>, BrokerError> {
    match stream.get_raw_message(seq).await {
        Ok(message) => Ok(Some(message)),
        Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => Ok(None),
        Err(error) => Err(BrokerError::operation(format!("read {what}"))(error)),
    }
}

/// Returns the message of a sequence from any copy that has it. None only if the leader has none.
///
/// # Errors
/// As [`message`].
pub async fn contents<I>(
    stream: &Stream<I>,
    seq: u64,
    what: &str,
) -> Result<Option<StreamMessage>, BrokerError> {
    match stream.direct_get(seq).await {
        Ok(message) => Ok(Some(message)),
        Err(error) if error.kind() == DirectGetErrorKind::NotFound => {
            message(stream, seq, what).await
        }
        Err(error) => Err(BrokerError::operation(format!("read {what}"))(error)),
    }
}
