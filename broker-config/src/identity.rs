//! Checks whether a stream is still the one that was read. A broker that lost the end of a stream
//! reuses its sequences. A stream that was created again starts with the first sequence.

use std::collections::VecDeque;

use fiec_schemas::{Sequence, subjects};

use crate::{Broker, BrokerError, leader};

/// Messages that are remembered, because some may have dropped out by the stream's limits.
const REMEMBERED: usize = 16;

/// How a stream has lost messages that were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Break {
    /// It was created again.
    #[error("the stream {stream} was made anew")]
    Renewed {
        /// Its name.
        stream: &'static str,
    },
    /// It has lost messages at its end.
    #[error("the stream {stream} does not have message {seen} any more, which was read from it")]
    WentBack {
        /// Its name.
        stream: &'static str,
        /// Sequence of the last message that was read.
        seen: Sequence,
    },
}

/// Remembers the last messages that were read from the ledger stream.
#[derive(Debug, Clone, Default)]
pub struct Identity {
    /// Creation time of the stream, in nanoseconds since 1970.
    created: Option<i128>,
    /// The last messages that were read, with their headers, oldest first.
    last: VecDeque<(Sequence, String)>,
}

impl Identity {
    /// Notes a message that was read. It keeps the header itself: a digest of each would cost more.
    pub fn note(&mut self, seq: Sequence, header: &str) {
        let full = self.last.len() == REMEMBERED;
        let oldest = if full { self.last.pop_front() } else { None };
        let mut text = oldest.map_or_else(String::new, |(_, text)| text);
        text.clear();
        text.push_str(header);
        self.last.push_back((seq, text));
    }

    /// Compares the ledger stream with the messages read from it. The first call notes the creation
    /// time.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn check(&mut self, broker: &Broker) -> Result<Option<Break>, BrokerError> {
        let stream = subjects::LEDGER_STREAM;
        let what = || format!("look at the stream {stream}");
        let found = broker.js.get_stream(stream).await;
        let found = found.map_err(BrokerError::operation(what()))?;
        let info = found.cached_info();
        let created = info.created.unix_timestamp_nanos();
        if *self.created.get_or_insert(created) != created {
            return Ok(Some(Break::Renewed { stream }));
        }
        let Some(seen) = self.last.back().map(|(seq, _)| *seq) else {
            return Ok(None);
        };
        let went_back = Ok(Some(Break::WentBack { stream, seen }));
        if info.state.last_sequence < seen {
            return went_back;
        }
        for (seq, text) in self.last.iter().rev() {
            // None: it has dropped out by the stream's limits. An earlier one may exist.
            if let Some(message) = leader::contents(&found, *seq, &what()).await? {
                let header = message.headers.get(subjects::EVENT_HEADER);
                let same = header.is_some_and(|header| header.as_str() == text);
                return if same { Ok(None) } else { went_back };
            }
        }
        Ok(None)
    }
}
