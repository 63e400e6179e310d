//! PostgreSQL's binary COPY format, as much of it as the recorder's tables need.
//!
//! A stream is a header, tuples, and a trailer. A tuple is its number of fields (i16) and the
//! fields; a field is its length (i32, -1 for null) and its bytes, all big-endian:
//! <https://www.postgresql.org/docs/current/sql-copy.html#id-1.9.3.55.9.4>.

use fiec_schemas::{Digest, Timestamp};
use uuid::Uuid;

const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
/// PostgreSQL counts microseconds from 2000-01-01.
pub(crate) const EPOCH_MICROS: i64 = 946_684_800_000_000;

/// Tuples of one table, ready to be sent.
#[derive(Debug, Clone, Default)]
pub struct CopyBuffer {
    bytes: Vec<u8>,
    rows: usize,
}

impl CopyBuffer {
    /// Begins a tuple of so many fields; exactly that many must follow.
    pub fn row(&mut self, fields: i16) -> &mut Self {
        if self.bytes.is_empty() {
            self.bytes.extend_from_slice(SIGNATURE);
        }
        self.rows += 1;
        self.bytes.extend_from_slice(&fields.to_be_bytes());
        self
    }

    /// Tuples so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The whole stream; empty where there is no tuple.
    pub fn finish(mut self) -> Vec<u8> {
        if self.rows > 0 {
            self.bytes.extend_from_slice(&(-1i16).to_be_bytes());
        }
        self.bytes
    }

    fn field(&mut self, bytes: &[u8]) -> &mut Self {
        // A value of 2 GiB cannot arrive: headers have at most 48 KiB, and results 256 KiB.
        let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        self.bytes.extend_from_slice(&length.to_be_bytes());
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Null, of any type.
    pub fn null(&mut self) -> &mut Self {
        self.bytes.extend_from_slice(&(-1i32).to_be_bytes());
        self
    }

    /// `uuid`.
    pub fn uuid(&mut self, value: Uuid) -> &mut Self {
        self.field(value.as_bytes())
    }

    /// `text`. PostgreSQL has no NUL in text; one becomes U+FFFD.
    pub fn text(&mut self, value: &str) -> &mut Self {
        if value.contains('\0') {
            return self.field(without_nul(value).as_bytes());
        }
        self.field(value.as_bytes())
    }

    /// `bytea` of a digest.
    pub fn digest(&mut self, value: Digest) -> &mut Self {
        self.field(&value.0)
    }

    /// `bigint`; what does not fit becomes the greatest that does.
    pub fn count(&mut self, value: u64) -> &mut Self {
        self.i64(saturate(value))
    }

    /// `bigint`.
    pub fn i64(&mut self, value: i64) -> &mut Self {
        self.field(&value.to_be_bytes())
    }

    /// `integer`.
    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.field(&value.to_be_bytes())
    }

    /// `timestamptz`.
    pub fn time(&mut self, value: Timestamp) -> &mut Self {
        self.i64(pg_micros(value))
    }

    /// `jsonb`: a version byte, then text that the server parses.
    pub fn jsonb(&mut self, text: &str) -> &mut Self {
        let text = json_without_nul(text);
        let length = i32::try_from(text.len() + 1).unwrap_or(i32::MAX);
        self.bytes.extend_from_slice(&length.to_be_bytes());
        self.bytes.push(1);
        self.bytes.extend_from_slice(text.as_bytes());
        self
    }

    /// A value or null.
    pub fn opt<T>(&mut self, value: Option<T>, put: fn(&mut Self, T) -> &mut Self) -> &mut Self {
        match value {
            Some(value) => put(self, value),
            None => self.null(),
        }
    }
}

/// `timestamptz`: microseconds since 2000. Without a limit, one message with a time before 4714 BC
/// would make PostgreSQL refuse its whole batch.
pub(crate) fn pg_micros(value: Timestamp) -> i64 {
    // MIN_TIMESTAMP and END_TIMESTAMP of PostgreSQL's datatype/timestamp.h.
    const MIN: i64 = -211_813_488_000_000_000;
    const END: i64 = 9_223_371_331_200_000_000;
    let micros = value.micros().saturating_sub(EPOCH_MICROS);
    micros.clamp(MIN, END - 1)
}

/// `bigint` from a count.
pub(crate) fn saturate(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Text as PostgreSQL can store it.
pub(crate) fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// JSON text as `jsonb` can store it: it refuses the escape of NUL.
pub(crate) fn json_without_nul(text: &str) -> std::borrow::Cow<'_, str> {
    const ESCAPE: &str = "\\u0000";
    if !text.contains(ESCAPE) {
        return text.into();
    }
    // An even number of backslashes before the `u` is an escaped backslash and no escape of NUL.
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(ESCAPE) {
        let before = rest[..at].bytes().rev().take_while(|b| *b == b'\\').count();
        out.push_str(&rest[..at]);
        out.push_str(if before % 2 == 0 { "\\ufffd" } else { ESCAPE });
        rest = &rest[at + ESCAPE.len()..];
    }
    out.push_str(rest);
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_header_tuples_and_trailer() {
        let mut copy = CopyBuffer::default();
        copy.row(3).i64(1).null().text("ab");
        let bytes = copy.finish();
        let mut expected = b"PGCOPY\n\xff\r\n\0".to_vec();
        expected.extend([0; 8]);
        expected.extend([0, 3]);
        expected.extend([0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1]);
        expected.extend([0xff; 4]);
        expected.extend([0, 0, 0, 2, b'a', b'b']);
        expected.extend([0xff; 2]);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn no_tuple_means_nothing_to_send() {
        assert!(CopyBuffer::default().finish().is_empty());
    }

    #[test]
    fn times_count_from_the_year_2000() {
        let mut copy = CopyBuffer::default();
        copy.row(1)
            .time("2000-01-01T00:00:00.000007Z".parse().unwrap());
        assert_eq!(
            copy.finish()[SIGNATURE.len() + 6..][..8],
            7i64.to_be_bytes()
        );
    }

    #[test]
    fn json_carries_its_version() {
        let mut copy = CopyBuffer::default();
        copy.row(1).jsonb("{}");
        assert_eq!(
            copy.finish()[SIGNATURE.len() + 2..][..7],
            [0, 0, 0, 3, 1, b'{', b'}']
        );
    }

    #[test]
    fn nul_is_replaced_where_the_server_would_refuse_it() {
        assert_eq!(without_nul("a\0b"), "a\u{fffd}b");
        assert_eq!(json_without_nul(r#""a\u0000b""#), r#""a\ufffdb""#);
        assert_eq!(json_without_nul(r#""a\\u0000b""#), r#""a\\u0000b""#);
        assert_eq!(json_without_nul(r#""\\\u0000""#), r#""\\\ufffd""#);
    }
}
