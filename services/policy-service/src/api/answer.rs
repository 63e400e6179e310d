//! Answers of the API. The body is JSON for every client. The headers of a refusal follow the micro
//! service protocol, so that `nats micro stats` counts it.

use async_nats::HeaderMap;
use async_nats::service::{
    NATS_SERVICE_ERROR, NATS_SERVICE_ERROR_CODE, Request, error::Error as ServiceError,
};
use bytes::Bytes;
use fiec_schemas::messages::{
    ApiReply, BatchReply, QuotaReply, RefusalCode, SubmitReply, ViewReply,
};
use fiec_schemas::surroundings::OffersReply;
use serde::Serialize;

use super::Answered;
use crate::refusal::Refusal;

/// The request was refused, in part or as a whole.
const REFUSED: usize = 400;
/// Most characters of a refusal in a header. The body has the whole text.
const HEADER_CHARS: usize = 500;

/// An answer that can be a refusal.
pub(super) trait Reply: Serialize {
    /// The answer if the request was refused as a whole.
    fn refused(error: String, code: RefusalCode) -> Self;

    /// Why the request was refused, as a whole or in part.
    fn refusal(&self) -> Option<String>;
}

macro_rules! reply {
    ($($reply:ty: $refused_in_part:expr),* $(,)?) => {$(
        impl Reply for $reply {
            fn refused(error: String, code: RefusalCode) -> Self {
                Self {
                    error: Some(error),
                    refusal: Some(code),
                    ..Self::default()
                }
            }

            fn refusal(&self) -> Option<String> {
                let in_part: fn(&Self) -> Option<String> = $refused_in_part;
                self.error.clone().or_else(|| in_part(self))
            }
        }
    )*};
}

reply! {
    ApiReply: |_| None,
    OffersReply: |_| None,
    ViewReply: |_| None,
    QuotaReply: |_| None,
    BatchReply: |reply| Some(format!("{} failed: {}", reply.failed, reply.reasons.first()?)),
    SubmitReply: |reply| {
        let lines = reply.accepted.len() + reply.errors.len();
        let (first, count) = (reply.errors.first()?, reply.errors.len());
        Some(format!("{count} of {lines} lines refused; {first}"))
    },
}

/// Makes the answer to a refused request. Only here does a refusal become text.
pub(super) fn refused<T: Reply>(refusal: &Refusal) -> T {
    T::refused(refusal.to_string(), refusal.code())
}

/// The payload of an answer, and why the request was refused.
pub(super) struct Answer {
    body: Result<Bytes, ServiceError>,
    refusal: Option<String>,
}

impl Answer {
    pub(super) fn of<T: Reply>(answered: Answered<T>) -> Self {
        let reply = answered.unwrap_or_else(|refusal| refused(&refusal));
        let body = serde_json::to_vec(&reply).map(Into::into);
        Self {
            body: body.map_err(|error| ServiceError {
                status: in_a_header(&error.to_string()),
                code: 500,
            }),
            refusal: reply.refusal(),
        }
    }

    /// Sends it to the requester.
    pub(super) async fn send(
        self,
        client: &async_nats::Client,
        mut request: Request,
    ) -> Result<(), async_nats::PublishError> {
        let (body, refusal) = match (self.body, self.refusal) {
            (Ok(body), Some(refusal)) => (body, refusal),
            (body, _) => return request.respond(body).await,
        };
        let Some(reply) = request.message.reply.take() else {
            return Ok(());
        };
        let status = in_a_header(&refusal);
        let mut headers = HeaderMap::new();
        headers.insert(NATS_SERVICE_ERROR, status.as_str());
        headers.insert(NATS_SERVICE_ERROR_CODE, REFUSED.to_string().as_str());
        client
            .publish_with_headers(reply.clone(), headers, body)
            .await?;
        // The client library counts an error only if it sends one, and it sends it without a body.
        // That second message goes to a subject that has no subscriber.
        request.message.reply = Some(format!("{reply}.counted").into());
        let code = REFUSED;
        request.respond(Err(ServiceError { status, code })).await
    }
}

/// The text in one line, without characters that a header cannot hold.
fn in_a_header(text: &str) -> String {
    let one_line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    one_line.take(HEADER_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::{FieldError, LineError};

    #[test]
    fn a_refusal_fits_a_header_whatever_it_quotes() {
        assert_eq!(in_a_header("a\r\nb\0c"), "a  b c");
        assert_eq!(
            in_a_header(&"ä".repeat(2_000)).chars().count(),
            HEADER_CHARS
        );
    }

    #[test]
    fn refused_lines_are_counted_and_the_first_is_told() {
        assert_eq!(SubmitReply::default().refusal(), None);
        let reply = SubmitReply {
            errors: vec![LineError::of(2, FieldError::new("colour", "unknown field"))],
            ..SubmitReply::default()
        };
        let words = "1 of 1 lines refused; line 2, field colour: unknown field";
        assert_eq!(reply.refusal().as_deref(), Some(words));
    }
}
