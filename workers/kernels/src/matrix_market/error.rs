//! Errors in a Matrix Market file. Each message names the rule.

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

/// The rule that a file breaks. Rows and columns count from 1, as in the file. The message never
/// quotes the file: its reader may not be allowed to read that.
#[derive(Debug, thiserror::Error)]
pub enum MatrixRule {
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error("is empty; expected a Matrix Market header")]
    Empty,
    #[error("is not text: the byte at offset {offset} is not valid here")]
    NotText { offset: usize },
    #[error(
        "expected the header \"%%MatrixMarket matrix coordinate|array real|integer \
         symmetric|general\""
    )]
    Header,
    #[error("the {what} is not supported; use {supported}")]
    Unsupported {
        what: &'static str,
        supported: &'static str,
    },
    #[error("expected the size line \"rows columns entries\"")]
    SizeLine,
    #[error("expected the size line \"rows columns\"")]
    ArraySizeLine,
    #[error("truncated: the file ends before its size line")]
    NoSizeLine,
    #[error("the {what} is more than {limit}, {why}")]
    TooLarge {
        what: &'static str,
        limit: u64,
        why: &'static str,
    },
    #[error("the matrix is {rows} x {cols}; it must be square")]
    NotSquare { rows: u64, cols: u64 },
    #[error("the matrix has no rows")]
    NoRows,
    #[error("the matrix has no columns")]
    NoColumns,
    #[error("truncated: {found} of {declared} declared entries are there")]
    Truncated { found: u64, declared: u64 },
    #[error("truncated inside an entry: {found} of {declared} declared entries are there")]
    TruncatedEntry { found: u64, declared: u64 },
    #[error("more entries than the {declared} declared")]
    TooMany { declared: u64 },
    #[error("expected \"row column value\"")]
    Entry,
    #[error("expected one value")]
    Value,
    #[error("the {what} index is outside 1 to {limit}")]
    OutOfRange { what: &'static str, limit: u64 },
    #[error("the value is not a number")]
    NotANumber,
    #[error("the value is not finite")]
    NotFinite,
    #[error("the value is not an integer, as the header declares")]
    NotAnInteger,
    #[error("the integer has no exact double")]
    Inexact,
    #[error(
        "entry ({row}, {col}) is above the diagonal; a symmetric file holds the lower triangle"
    )]
    UpperTriangle { row: u64, col: u64 },
    #[error("entry ({row}, {col}) was given before, in line {first_line}")]
    Duplicate { row: u64, col: u64, first_line: u64 },
    #[error("not symmetric: ({row}, {col}) is not what ({col}, {row}) is{}", in_line(.mirrored_line))]
    NotSymmetric {
        row: u64,
        col: u64,
        mirrored_line: Option<u64>,
    },
    #[error(
        "row {row} has no diagonal entry; a positive definite matrix has a positive one in every row"
    )]
    NoDiagonal { row: u64 },
    #[error("the diagonal of row {row} is not positive, as a positive definite matrix's must be")]
    Diagonal { row: u64 },
    #[error("{0}")]
    Matrix(CsrError),
}

fn in_line(line: &Option<u64>) -> String {
    match line {
        Some(line) => format!(" (line {line})"),
        None => " (absent)".to_owned(),
    }
}
