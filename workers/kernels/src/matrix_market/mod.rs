//! A strict reader of Matrix Market files (NIST, "The Matrix Market exchange formats").
//!
//! It reads `matrix coordinate real|integer general|symmetric`, and for dense matrices also
//! `matrix array real|integer general|symmetric`. Every refusal names the file, the 1-based line if
//! there is one, and the rule. Declared sizes are not trusted for allocation: entries are kept as they
//! are read, and rows only after all declared entries were read.
//!
//! Entries must not repeat, and a symmetric file holds only its lower triangle, as the format
//! requires. Published files differ from it in small things, which are allowed: blank lines and
//! comments anywhere after the header, blanks around each line, and a byte order mark.

mod array;
mod coordinate;
mod error;
mod header;
mod text;

use std::path::Path;

use crate::sparse::Csr;
use coordinate::{Entries, build};
use header::{Format, Header};
use text::Lines;

pub use error::{MatrixError, MatrixRule};

/// Most rows of a sparse matrix whose file has fewer bytes: each row takes some bytes of memory,
/// entries or not.
const ROWS_LIMIT: u64 = 1 << 24;

/// True for a text that begins as a Matrix Market file does.
pub fn is_matrix_market(bytes: &[u8]) -> bool {
    let start = text::without_mark(bytes).trim_ascii_start();
    let banner = start.get(..header::BANNER.len());
    banner.is_some_and(|banner| banner.eq_ignore_ascii_case(header::BANNER))
}

/// Reads a sparse matrix.
///
/// # Errors
/// See [`MatrixRule`].
pub fn read(path: impl AsRef<Path>) -> Result<Csr, MatrixError> {
    named(path.as_ref(), || sparse(&read_bytes(path.as_ref())?))
}

/// A dense matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    /// Number of rows, at least one.
    pub rows: usize,
    /// Number of columns, at least one.
    pub cols: usize,
    /// The values by columns.
    pub values: Vec<f64>,
}

/// Reads a dense matrix of at most `limit` elements from the bytes of a file. `name` is its name in
/// errors.
///
/// # Errors
/// See [`MatrixRule`].
pub fn parse_dense(name: impl AsRef<Path>, bytes: &[u8], limit: u64) -> Result<Dense, MatrixError> {
    named(name.as_ref(), || dense(bytes, limit))
}

/// As [`read_symmetric_positive_definite_candidate`], from the bytes of a file. `name` is its name
/// in errors.
///
/// # Errors
/// See [`MatrixRule`].
pub fn parse_candidate_bytes(name: impl AsRef<Path>, bytes: &[u8]) -> Result<Csr, MatrixError> {
    named(name.as_ref(), || candidate(bytes))
}

/// Reads a matrix for conjugate gradients with Jacobi's preconditioner: square, symmetric, positive
/// diagonal. Only the solve can decide whether it is positive definite.
///
/// # Errors
/// See [`MatrixRule`].
pub fn read_symmetric_positive_definite_candidate(
    path: impl AsRef<Path>,
) -> Result<Csr, MatrixError> {
    named(path.as_ref(), || candidate(&read_bytes(path.as_ref())?))
}

/// The broken rule, with its line.
type Broken = (Option<u64>, MatrixRule);

fn named<T>(name: &Path, read: impl FnOnce() -> Result<T, Broken>) -> Result<T, MatrixError> {
    read().map_err(|(line, rule)| MatrixError {
        path: name.to_owned(),
        line,
        rule,
    })
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, Broken> {
    let io = |e| (None, MatrixRule::Io(e));
    // A device or a pipe might never end.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err((None, MatrixRule::NotAFile));
    }
    std::fs::read(path).map_err(io)
}

fn sparse(bytes: &[u8]) -> Result<Csr, Broken> {
    build(&entries(bytes)?)
}

/// The entries of a sparse matrix.
fn entries(bytes: &[u8]) -> Result<Entries, Broken> {
    let (header, mut lines) = begin(bytes)?;
    if header.format == Format::Array {
        let rule = MatrixRule::Unsupported {
            what: "format array",
            supported: "coordinate",
        };
        return Err((Some(1), rule));
    }
    let size = coordinate::size(&mut lines, &header)?;
    for (what, value) in [("row count", size.rows), ("column count", size.cols)] {
        let most = ROWS_LIMIT.max(bytes.len() as u64);
        if value > most {
            let rule = MatrixRule::TooLarge {
                what,
                limit: most,
                why: "the most of a file of this size",
            };
            return Err((Some(size.line), rule));
        }
    }
    coordinate::entries(lines, header, size)
}

fn dense(bytes: &[u8], limit: u64) -> Result<Dense, Broken> {
    let (header, mut lines) = begin(bytes)?;
    let check = |rows: u64, cols: u64, line: u64| {
        let rule = match (rows, cols) {
            (0, _) => MatrixRule::NoRows,
            (_, 0) => MatrixRule::NoColumns,
            _ if rows.saturating_mul(cols) > limit => MatrixRule::TooLarge {
                what: "number of elements",
                limit,
                why: "the most of a dense matrix",
            },
            _ => return Ok(()),
        };
        Err((Some(line), rule))
    };
    if header.format == Format::Array {
        let size = array::size(&mut lines, &header)?;
        check(size.rows, size.cols, size.line)?;
        return array::values(lines, &header, &size);
    }
    let size = coordinate::size(&mut lines, &header)?;
    check(size.rows, size.cols, size.line)?;
    let sparse = build(&coordinate::entries(lines, header, size)?)?;
    let (rows, cols) = (sparse.rows(), sparse.cols());
    let mut values = vec![0.0; rows * cols];
    for row in 0..rows {
        let (columns, found) = sparse.row(row);
        for (col, value) in columns.iter().zip(found) {
            values[*col as usize * rows + row] = *value;
        }
    }
    Ok(Dense { rows, cols, values })
}

/// Reads the header.
fn begin(bytes: &[u8]) -> Result<(Header, Lines<'_>), Broken> {
    text::check(bytes)?;
    let mut lines = Lines::of(text::without_mark(bytes));
    let Some((line, _)) = lines.next() else {
        return Err((None, MatrixRule::Empty));
    };
    let header = Header::parse(line).map_err(|rule| (Some(1), rule))?;
    Ok((header, lines))
}

fn candidate(bytes: &[u8]) -> Result<Csr, Broken> {
    let file = entries(bytes)?;
    if file.size.rows != file.size.cols {
        return Err((
            Some(file.size.line),
            MatrixRule::NotSquare {
                rows: file.size.rows,
                cols: file.size.cols,
            },
        ));
    }
    if file.size.rows == 0 {
        return Err((Some(file.size.line), MatrixRule::NoRows));
    }
    let a = build(&file)?;
    let find = |row: usize, col: usize| {
        file.entries
            .iter()
            .find(|e| (e.row as usize, e.col as usize) == (row, col))
    };
    if !file.header.symmetric
        && let Some((i, j)) = a.first_asymmetry()
    {
        // The later of the two lines breaks the rule.
        let (mut at, mut other) = (find(j, i), find(i, j));
        if at.is_none_or(|a| other.is_some_and(|o| o.line > a.line)) {
            std::mem::swap(&mut at, &mut other);
        }
        if let Some(e) = at {
            let mirrored_line = other.map(|o| u64::from(o.line));
            let (row, col) = (u64::from(e.row) + 1, u64::from(e.col) + 1);
            return Err((
                Some(e.line.into()),
                MatrixRule::NotSymmetric {
                    row,
                    col,
                    mirrored_line,
                },
            ));
        }
    }
    for i in 0..a.rows() {
        let row = i as u64 + 1;
        match a.get(i, i) {
            None => return Err((None, MatrixRule::NoDiagonal { row })),
            Some(value) if value <= 0.0 => {
                let line = find(i, i).map(|e| e.line.into());
                return Err((line, MatrixRule::Diagonal { row }));
            }
            Some(_) => {}
        }
    }
    Ok(a)
}
