//! Rows by PostgreSQL's binary COPY: a header, tuples, and a trailer. A tuple is its number of fields
//! (i16) and the fields.

use sqlx::PgConnection;

use super::{Table, names};

/// Most bytes that are reserved from the length of the first row.
const RESERVED: usize = 8 << 20;

const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";

/// Rows of one table, ready to be sent.
#[derive(Debug)]
pub(crate) struct Copy {
    statement: String,
    rows: usize,
    bytes: Vec<u8>,
}

impl Copy {
    /// Encodes rows; none if there are no rows.
    pub fn of<'a, R: Table + 'a>(rows: impl IntoIterator<Item = &'a R>) -> Option<Self> {
        let fields = i16::try_from(R::COLUMNS.len()).unwrap_or(i16::MAX);
        let mut bytes = SIGNATURE.to_vec();
        let mut count = 0;
        let mut rows = rows.into_iter();
        while let Some(row) = rows.next() {
            bytes.extend_from_slice(&fields.to_be_bytes());
            row.put(&mut bytes);
            count += 1;
            if count == 1 {
                // The others are about as long. Growing would touch twice the memory.
                let left = rows.size_hint().1.unwrap_or(0);
                bytes.reserve(bytes.len().saturating_mul(left).min(RESERVED));
            }
        }
        bytes.extend_from_slice(&(-1i16).to_be_bytes());
        let (table, names) = (R::NAME, names::<R>());
        (count > 0).then(|| Self {
            statement: format!("COPY {table} ({names}) FROM STDIN WITH (FORMAT binary)"),
            rows: count,
            bytes,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Sends them, in a transaction of the caller's.
    pub async fn send(&self, to: &mut PgConnection) -> sqlx::Result<()> {
        let mut copy = to.copy_in_raw(&self.statement).await?;
        copy.send(self.bytes.as_slice()).await?;
        copy.finish().await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::table;

    table! {
        struct Row in "some" {
            a: i64,
            b: Option<i64>,
            c: String,
        }
    }

    #[test]
    fn a_stream_is_header_tuples_and_trailer() {
        let row = Row {
            a: 1,
            b: None,
            c: "ab".to_owned(),
        };
        let copy = Copy::of([&row]).unwrap();
        let mut expected = b"PGCOPY\n\xff\r\n\0".to_vec();
        expected.extend([0; 8]);
        expected.extend([0, 3]);
        expected.extend([0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1]);
        expected.extend([0xff; 4]);
        expected.extend([0, 0, 0, 2, b'a', b'b']);
        expected.extend([0xff; 2]);
        assert_eq!(copy.bytes, expected);
        assert_eq!(
            copy.statement,
            "COPY some (a, b, c) FROM STDIN WITH (FORMAT binary)"
        );
    }

    #[test]
    fn no_row_means_nothing_to_send() {
        assert!(Copy::of([] as [&Row; 0]).is_none());
    }
}
