//! Rust types as PostgreSQL's, in the binary form that COPY and arrays share: a value is its length
//! (i32, -1 for null) and its bytes, all big-endian.
//! <https://www.postgresql.org/docs/current/sql-copy.html#id-1.9.3.55.9.4>.

use std::borrow::Cow;

use fiec_schemas::messages::{NodeEventKind, VerificationOutcome};
use fiec_schemas::{
    BatchId, CauseKind, ClientId, Contract, Digest, EventKind, ExecutionId, FaultKind, InstanceId,
    NodeId, Owner, PhaseKind, RequestKind, Signal, Tenant, Timestamp,
};
use serde::Serialize;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgTypeInfo};
use sqlx::types::Json;
use sqlx::{Encode, Postgres, Type};

/// A type that a column may have.
pub(crate) trait Value {
    /// The object identifier of PostgreSQL's type. It is the same in all versions.
    const OID: u32;
    /// That of its arrays; 0: there are none.
    const ARRAY_OID: u32;
    /// True if it may be null.
    const IS_NULLABLE: bool = false;

    /// Appends length and bytes.
    fn put(&self, to: &mut Vec<u8>);
}

/// Implements [`Value`] for types that have a binary form of their own.
macro_rules! values {
    ($oid:literal, $array:literal: $( $type:ty => |$value:ident| $bytes:expr; )*) => {
        $( impl Value for $type {
            const OID: u32 = $oid;
            const ARRAY_OID: u32 = $array;

            fn put(&self, to: &mut Vec<u8>) {
                let $value = self;
                put_bytes(to, $bytes.as_ref());
            }
        } )*
    };
}

// boolean
values! { 16, 1000: bool => |v| [u8::from(*v)]; }
// bytea
values! { 17, 1001: Digest => |v| v.0; }
// bigint
values! { 20, 1016:
    i64 => |v| v.to_be_bytes();
    u64 => |v| clamp_to_i64(*v).to_be_bytes();
}
// integer
values! { 23, 1007:
    i32 => |v| v.to_be_bytes();
    u32 => |v| clamp_to_i32(*v).to_be_bytes();
}
// text
values! { 25, 1009:
    &str => |v| without_nul(v).as_bytes();
    String => |v| without_nul(v).as_bytes();
    Tenant => |v| v.as_str();
    NodeId => |v| v.as_str();
    ClientId => |v| v.as_str();
    Contract => |v| v.as_str();
    Signal => |v| v.as_str();
    EventKind => |v| v.as_str();
    PhaseKind => |v| v.as_str();
    RequestKind => |v| v.as_str();
    CauseKind => |v| v.as_str();
    FaultKind => |v| v.as_str();
    Owner => |v| v.as_str();
    NodeEventKind => |v| v.as_str();
    VerificationOutcome => |v| v.as_str();
}
// real
values! { 700, 1021: f32 => |v| v.to_be_bytes(); }
// double precision
values! { 701, 1022: f64 => |v| v.to_be_bytes(); }
// timestamptz
values! { 1184, 1185: Timestamp => |v| pg_micros(*v).to_be_bytes(); }
// uuid
values! { 2950, 2951:
    ExecutionId => |v| v.0;
    BatchId => |v| v.0;
    InstanceId => |v| v.0;
}

impl<T: Value> Value for Option<T> {
    const OID: u32 = T::OID;
    const ARRAY_OID: u32 = T::ARRAY_OID;
    const IS_NULLABLE: bool = true;

    fn put(&self, to: &mut Vec<u8>) {
        match self {
            Some(value) => value.put(to),
            None => to.extend_from_slice(&(-1i32).to_be_bytes()),
        }
    }
}

// jsonb
impl<T: Serialize> Value for Json<T> {
    const OID: u32 = 3802;
    const ARRAY_OID: u32 = 3807;

    /// A version byte, then text that the server parses.
    fn put(&self, to: &mut Vec<u8>) {
        put_with_length(to, |to| {
            to.push(1);
            let start = to.len();
            if serde_json::to_writer(&mut *to, &self.0).is_err() {
                // Writing to memory fails for no type that a row has.
                to.truncate(start);
                to.extend_from_slice(b"null");
            }
            let text = String::from_utf8_lossy(to.get(start..).unwrap_or_default());
            if let Cow::Owned(text) = json_without_nul(&text) {
                to.truncate(start);
                to.extend_from_slice(text.as_bytes());
            }
        });
    }
}

/// An array in one row. UNNEST takes such arrays apart, so [`super::write_all`] cannot send them.
impl<T: Value> Value for Vec<T> {
    const OID: u32 = T::ARRAY_OID;
    const ARRAY_OID: u32 = 0;

    fn put(&self, to: &mut Vec<u8>) {
        put_with_length(to, |to| put_array(to, self.iter()));
    }
}

/// An argument of a statement.
#[derive(Debug)]
pub(crate) struct Argument {
    oid: u32,
    /// None: null.
    bytes: Option<Vec<u8>>,
}

/// A value as an argument of a statement.
pub(crate) fn argument<T: Value>(value: &T) -> Argument {
    let mut bytes = Vec::new();
    value.put(&mut bytes);
    let value = bytes.split_off(bytes.len().min(4));
    let is_null = bytes == (-1i32).to_be_bytes();
    Argument {
        oid: T::OID,
        bytes: (!is_null).then_some(value),
    }
}

/// One column of several rows as an argument of a statement: an array.
pub(crate) fn array<R, T: Value>(rows: &[&R], column: impl Fn(&R) -> &T) -> Argument {
    let mut bytes = Vec::new();
    put_array(&mut bytes, rows.iter().map(|row| column(row)));
    Argument {
        oid: T::ARRAY_OID,
        bytes: Some(bytes),
    }
}

impl Type<Postgres> for Argument {
    fn type_info() -> PgTypeInfo {
        // Each argument says its own type: see `produces`.
        PgTypeInfo::with_oid(Oid(0))
    }
}

impl Encode<'_, Postgres> for Argument {
    fn encode_by_ref(&self, to: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        Ok(match &self.bytes {
            Some(bytes) => {
                to.extend_from_slice(bytes);
                IsNull::No
            }
            None => IsNull::Yes,
        })
    }

    fn produces(&self) -> Option<PgTypeInfo> {
        Some(PgTypeInfo::with_oid(Oid(self.oid)))
    }
}

fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    // A value of 2 GiB cannot arrive: headers have at most 48 KiB, and results 256 KiB.
    let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    to.extend_from_slice(&length.to_be_bytes());
    to.extend_from_slice(bytes);
}

/// Appends bytes of a length that is known only behind them.
fn put_with_length(to: &mut Vec<u8>, put: impl FnOnce(&mut Vec<u8>)) {
    let at = to.len();
    to.extend_from_slice(&[0; 4]);
    put(to);
    let length = i32::try_from(to.len() - at - 4).unwrap_or(i32::MAX);
    if let Some(place) = to.get_mut(at..at + 4) {
        place.copy_from_slice(&length.to_be_bytes());
    }
}

/// An array of one dimension: the number of dimensions, whether there may be nulls, the elements'
/// type, their number, the first index, and the elements.
fn put_array<'a, T: Value + 'a>(to: &mut Vec<u8>, values: impl ExactSizeIterator<Item = &'a T>) {
    let count = i32::try_from(values.len()).unwrap_or(i32::MAX);
    to.extend_from_slice(&1i32.to_be_bytes());
    to.extend_from_slice(&i32::from(T::IS_NULLABLE).to_be_bytes());
    to.extend_from_slice(&T::OID.to_be_bytes());
    to.extend_from_slice(&count.to_be_bytes());
    to.extend_from_slice(&1i32.to_be_bytes());
    values.for_each(|value| value.put(to));
}

/// PostgreSQL counts microseconds from 2000-01-01.
pub(crate) const EPOCH_MICROS: i64 = 946_684_800_000_000;

/// `timestamptz`: microseconds since 2000. Without a limit, one message with a time before 4714 BC
/// would make PostgreSQL refuse its whole batch.
pub(crate) fn pg_micros(value: Timestamp) -> i64 {
    // MIN_TIMESTAMP and END_TIMESTAMP of PostgreSQL's datatype/timestamp.h.
    const MIN: i64 = -211_813_488_000_000_000;
    const END: i64 = 9_223_371_331_200_000_000;
    let micros = value.micros().saturating_sub(EPOCH_MICROS);
    micros.clamp(MIN, END - 1)
}

/// `bigint` from a count; a larger one becomes the greatest `bigint`.
pub(crate) fn clamp_to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// `integer` from a count; a larger one becomes the greatest `integer`.
pub(crate) fn clamp_to_i32(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// Text as PostgreSQL can store it: it has no NUL in text.
pub(crate) fn without_nul(text: &str) -> Cow<'_, str> {
    match text.contains('\0') {
        true => text.replace('\0', "\u{fffd}").into(),
        false => text.into(),
    }
}

/// JSON text as `jsonb` can store it: it refuses the escape of NUL.
pub(crate) fn json_without_nul(text: &str) -> Cow<'_, str> {
    const ESCAPE: &str = "\\u0000";
    if !text.contains(ESCAPE) {
        return text.into();
    }
    // After an odd number of backslashes before it, the first backslash of ESCAPE is itself escaped.
    let mut out = String::with_capacity(text.len());
    let mut parts = text.split(ESCAPE);
    out.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let backslashes = out.bytes().rev().take_while(|b| *b == b'\\').count();
        let is_escape = backslashes % 2 == 0;
        out.push_str(if is_escape { "\\ufffd" } else { ESCAPE });
        out.push_str(part);
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(value: impl Value) -> Vec<u8> {
        let mut bytes = Vec::new();
        value.put(&mut bytes);
        bytes
    }

    #[test]
    fn times_count_from_the_year_2000() {
        let time: Timestamp = "2000-01-01T00:00:00.000007Z".parse().unwrap();
        assert_eq!(
            put(time),
            [[0, 0, 0, 8].as_slice(), &7i64.to_be_bytes()].concat()
        );
    }

    #[test]
    fn json_carries_its_version() {
        let empty = Json(serde_json::json!({}));
        assert_eq!(put(empty), [0, 0, 0, 3, 1, b'{', b'}']);
        let nul = Json("a\0");
        assert_eq!(put(nul)[5..], *br#""a\ufffd""#);
    }

    #[test]
    fn an_array_is_its_head_and_its_elements() {
        let bytes = put(vec!["ab".to_owned()]);
        let head = [
            0, 0, 0, 26, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 25, 0, 0, 0, 1, 0, 0, 0, 1,
        ];
        assert_eq!(bytes, [head.as_slice(), &[0, 0, 0, 2, b'a', b'b']].concat());
    }

    #[test]
    fn null_is_an_argument_without_bytes() {
        assert_eq!(argument(&None::<u64>).bytes, None);
        assert_eq!(argument(&Some(2u32)).bytes, Some(vec![0, 0, 0, 2]));
        assert_eq!(argument(&String::new()).bytes, Some(Vec::new()));
    }

    #[test]
    fn nul_is_replaced_where_the_server_would_refuse_it() {
        assert_eq!(without_nul("a\0b"), "a\u{fffd}b");
        assert_eq!(json_without_nul(r#""a\u0000b""#), r#""a\ufffdb""#);
        assert_eq!(json_without_nul(r#""a\\u0000b""#), r#""a\\u0000b""#);
        assert_eq!(json_without_nul(r#""\\\u0000""#), r#""\\\ufffd""#);
        assert_eq!(json_without_nul(r#""\u0000\u0000""#), r#""\ufffd\ufffd""#);
    }
}
