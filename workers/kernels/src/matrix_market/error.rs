//! What can be wrong with a Matrix Market file, in words that name the rule.

use std::path::PathBuf;

use crate::sparse::CsrError;

/// A refused file.
#[derive(Debug, thiserror::Error)]
#[error("{}{}: {rule}", path.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
pub struct MatrixError {
    pub path: PathBuf,
    /// 1-based; `None` if the rule concerns the whole file.
    pub line: Option<u64>,
    pub rule: MatrixRule,
}

/// The rule that a file breaks. Rows and columns count from 1 here, as in the file.
#[derive(Debug, thiserror::Error)]
pub enum MatrixRule {
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error("is empty; expected a Matrix Market header")]
    Empty,
    #[error("is not text: byte 0x{byte:02x} at offset {offset} is not valid here")]
    NotText { offset: usize, byte: u8 },
    #[error(
        "expected the header \"%%MatrixMarket matrix coordinate real|integer symmetric|general\", found {found:?}"
    )]
    Header { found: String },
    #[error("{what} {found:?} is not supported; use {supported}")]
    Unsupported {
        what: &'static str,
        found: String,
        supported: &'static str,
    },
    #[error("expected the size line \"rows columns entries\", found {found:?}")]
    SizeLine { found: String },
    #[error("truncated: the file ends before its size line")]
    NoSizeLine,
    #[error("{what} {value} is more than {limit}, {why}")]
    TooLarge {
        what: &'static str,
        value: u64,
        limit: u64,
        why: &'static str,
    },
    #[error("the matrix is {rows} x {cols}; it must be square")]
    NotSquare { rows: u64, cols: u64 },
    #[error("the matrix has no rows")]
    NoRows,
    #[error("truncated: {found} of {declared} declared entries are there")]
    Truncated { found: u64, declared: u64 },
    #[error("truncated inside an entry: {found} of {declared} declared entries are there")]
    TruncatedEntry { found: u64, declared: u64 },
    #[error("more entries than the {declared} declared")]
    TooMany { declared: u64 },
    #[error("expected \"row column value\", found {found:?}")]
    Entry { found: String },
    #[error("{what} index {index} is outside 1 to {limit}")]
    OutOfRange {
        what: &'static str,
        index: i128,
        limit: u64,
    },
    #[error("value {found:?} is not a number")]
    NotANumber { found: String },
    #[error("value {found:?} is not finite")]
    NotFinite { found: String },
    #[error("value {found:?} is not an integer, as the header declares")]
    NotAnInteger { found: String },
    #[error("integer {found} has no exact double")]
    Inexact { found: String },
    #[error(
        "entry ({row}, {col}) is above the diagonal; a symmetric file holds the lower triangle"
    )]
    UpperTriangle { row: u64, col: u64 },
    #[error("entry ({row}, {col}) was given before, in line {first_line}")]
    Duplicate { row: u64, col: u64, first_line: u64 },
    #[error("not symmetric: ({row}, {col}) is {value}, but ({col}, {row}) is {}", other_value(.mirrored))]
    NotSymmetric {
        row: u64,
        col: u64,
        value: f64,
        mirrored: Option<(f64, u64)>,
    },
    #[error(
        "row {row} has no diagonal entry; a positive definite matrix has a positive one in every row"
    )]
    NoDiagonal { row: u64 },
    #[error(
        "the diagonal of row {row} is {value}; it must be positive for a positive definite matrix"
    )]
    Diagonal { row: u64, value: f64 },
    #[error("{0}")]
    Matrix(CsrError),
}

fn other_value(mirrored: &Option<(f64, u64)>) -> String {
    match mirrored {
        Some((value, line)) => format!("{value} (line {line})"),
        None => "absent".to_owned(),
    }
}
