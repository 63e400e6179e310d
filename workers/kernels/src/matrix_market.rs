//! A strict reader of Matrix Market coordinate files (NIST, "The Matrix Market exchange formats").
//!
//! It reads `matrix coordinate real|integer general|symmetric`. Every refusal names the file, the
//! 1-based line if there is one, and the rule. Declared sizes are not trusted for allocation:
//! entries are kept as they are read, and rows only after all declared entries were read.
//!
//! Entries must not repeat, and a symmetric file holds only its lower triangle, as the format
//! requires. Blank lines are allowed after the header, comments between header and size line.

mod error;

use std::path::Path;

use crate::sparse::Csr;

pub use error::{MatrixError, MatrixRule};

/// Reads a matrix.
///
/// # Errors
/// See [`MatrixRule`].
pub fn read(path: impl AsRef<Path>) -> Result<Csr, MatrixError> {
    let path = path.as_ref();
    let fail = |(line, rule)| MatrixError {
        path: path.to_owned(),
        line,
        rule,
    };
    let bytes = read_bytes(path).map_err(fail)?;
    let file = parse(&bytes).map_err(fail)?;
    build(&file).map_err(fail)
}

/// Reads a matrix from the bytes of a file. `name` is its name in errors.
///
/// # Errors
/// See [`MatrixRule`].
pub fn parse_bytes(name: impl AsRef<Path>, bytes: &[u8]) -> Result<Csr, MatrixError> {
    let fail = |(line, rule)| MatrixError {
        path: name.as_ref().to_owned(),
        line,
        rule,
    };
    build(&parse(bytes).map_err(fail)?).map_err(fail)
}

/// As [`read_symmetric_positive_definite_candidate`], from the bytes of a file. `name` is its name
/// in errors.
///
/// # Errors
/// See [`MatrixRule`].
pub fn parse_candidate_bytes(name: impl AsRef<Path>, bytes: &[u8]) -> Result<Csr, MatrixError> {
    candidate(bytes).map_err(|(line, rule)| MatrixError {
        path: name.as_ref().to_owned(),
        line,
        rule,
    })
}

/// Reads a matrix for conjugate gradients with Jacobi's preconditioner: square, symmetric, positive
/// diagonal. Only the solve can decide whether it is positive definite.
///
/// # Errors
/// See [`MatrixRule`].
pub fn read_symmetric_positive_definite_candidate(
    path: impl AsRef<Path>,
) -> Result<Csr, MatrixError> {
    let path = path.as_ref();
    let fail = |(line, rule)| MatrixError {
        path: path.to_owned(),
        line,
        rule,
    };
    let bytes = read_bytes(path).map_err(fail)?;
    candidate(&bytes).map_err(fail)
}

/// The broken rule, with its line.
type Broken = (Option<u64>, MatrixRule);

struct Entry {
    row: u32,
    col: u32,
    line: u32,
    value: f64,
}

struct File {
    symmetric: bool,
    rows: u64,
    cols: u64,
    size_line: u64,
    entries: Vec<Entry>,
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, Broken> {
    let io = |e| (None, MatrixRule::Io(e));
    // A device or a pipe might never end.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err((None, MatrixRule::NotAFile));
    }
    std::fs::read(path).map_err(io)
}

fn candidate(bytes: &[u8]) -> Result<Csr, Broken> {
    let file = parse(bytes)?;
    if file.rows != file.cols {
        return Err((
            Some(file.size_line),
            MatrixRule::NotSquare {
                rows: file.rows,
                cols: file.cols,
            },
        ));
    }
    if file.rows == 0 {
        return Err((Some(file.size_line), MatrixRule::NoRows));
    }
    let a = build(&file)?;
    let find = |row: usize, col: usize| {
        file.entries
            .iter()
            .find(|e| (e.row as usize, e.col as usize) == (row, col))
    };
    if !file.symmetric
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

/// The lines of a text with their numbers, counted from 1.
struct Lines<'a> {
    rest: &'a [u8],
    number: u64,
}

impl<'a> Lines<'a> {
    /// The next line without its end, and whether it had one.
    fn next(&mut self) -> Option<(&'a [u8], bool)> {
        if self.rest.is_empty() {
            return None;
        }
        self.number += 1;
        match self.rest.iter().position(|&b| b == b'\n') {
            Some(at) => {
                let line = &self.rest[..at];
                self.rest = &self.rest[at + 1..];
                Some((line, true))
            }
            None => Some((std::mem::take(&mut self.rest), false)),
        }
    }
}

fn tokens(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace)
        .filter(|t| !t.is_empty())
}

fn check_text(bytes: &[u8]) -> Result<(), Broken> {
    let offset = match std::str::from_utf8(bytes) {
        Err(e) => e.valid_up_to(),
        Ok(_) => match bytes
            .iter()
            .position(|&b| b < b' ' && !b.is_ascii_whitespace())
        {
            Some(control) => control,
            None => return Ok(()),
        },
    };
    let line = 1 + bytes[..offset].iter().filter(|&&b| b == b'\n').count() as u64;
    Err((Some(line), MatrixRule::NotText { offset }))
}

/// Reads the header line: whether values are integers, and whether the file is symmetric.
fn parse_header(line: &[u8]) -> Result<(bool, bool), MatrixRule> {
    let words: Vec<String> = tokens(line)
        .take(6)
        .map(|t| String::from_utf8_lossy(t).to_ascii_lowercase())
        .collect();
    let [banner, object, format, field, symmetry] = words.as_slice() else {
        return Err(MatrixRule::Header);
    };
    if banner != "%%matrixmarket" {
        return Err(MatrixRule::Header);
    }
    let unsupported = |what, supported| Err(MatrixRule::Unsupported { what, supported });
    if object != "matrix" {
        return unsupported("object", "matrix");
    }
    if format != "coordinate" {
        return unsupported("format", "coordinate");
    }
    let integer = match field.as_str() {
        "real" => false,
        "integer" => true,
        _ => return unsupported("field", "real or integer"),
    };
    match symmetry.as_str() {
        "general" => Ok((integer, false)),
        "symmetric" => Ok((integer, true)),
        _ => unsupported("symmetry", "symmetric or general"),
    }
}

fn parse_size(line: &[u8]) -> Result<[u64; 3], MatrixRule> {
    let mut sizes = [0; 3];
    let mut words = tokens(line);
    for size in &mut sizes {
        *size = words
            .next()
            .filter(|t| t.iter().all(u8::is_ascii_digit))
            .and_then(|t| std::str::from_utf8(t).ok()?.parse().ok())
            .ok_or(MatrixRule::SizeLine)?;
    }
    if words.next().is_some() {
        return Err(MatrixRule::SizeLine);
    }
    Ok(sizes)
}

fn parse(bytes: &[u8]) -> Result<File, Broken> {
    check_text(bytes)?;
    let mut lines = Lines {
        rest: bytes,
        number: 0,
    };
    let Some((header, _)) = lines.next() else {
        return Err((None, MatrixRule::Empty));
    };
    let (integer, symmetric) = parse_header(header).map_err(|rule| (Some(1), rule))?;
    let [rows, cols, declared] = loop {
        let Some((line, _)) = lines.next() else {
            return Err((Some(lines.number), MatrixRule::NoSizeLine));
        };
        let line = line.trim_ascii();
        if !line.is_empty() && line[0] != b'%' {
            break parse_size(line).map_err(|rule| (Some(lines.number), rule))?;
        }
    };
    let size_line = lines.number;
    check_sizes(symmetric, [rows, cols, declared], bytes.len() as u64)
        .map_err(|rule| (Some(size_line), rule))?;

    // The shortest entry, "1 1 1\n", has 6 bytes.
    let possible = lines.rest.len() as u64 / 6 + 1;
    let mut entries: Vec<Entry> = Vec::with_capacity(declared.min(possible) as usize);
    while let Some((line, ended)) = lines.next() {
        let number = Some(lines.number);
        let found = entries.len() as u64;
        match parse_entry(line, integer, rows, cols) {
            Ok(None) => continue,
            Ok(Some(_)) if found == declared => {
                return Err((number, MatrixRule::TooMany { declared }));
            }
            Ok(Some((row, col, _))) if symmetric && col > row => {
                return Err((
                    number,
                    MatrixRule::UpperTriangle {
                        row: u64::from(row) + 1,
                        col: u64::from(col) + 1,
                    },
                ));
            }
            Ok(Some((row, col, value))) => {
                let line = u32::try_from(lines.number).unwrap_or(u32::MAX);
                entries.push(Entry {
                    row,
                    col,
                    line,
                    value,
                });
            }
            Err(MatrixRule::Entry) if !ended && found < declared && tokens(line).count() < 3 => {
                return Err((number, MatrixRule::TruncatedEntry { found, declared }));
            }
            Err(rule) => return Err((number, rule)),
        }
    }
    let found = entries.len() as u64;
    if found < declared {
        return Err((
            Some(lines.number),
            MatrixRule::Truncated { found, declared },
        ));
    }
    Ok(File {
        symmetric,
        rows,
        cols,
        size_line,
        entries,
    })
}

/// Checks that the sizes are possible before they are used.
fn check_sizes(
    symmetric: bool,
    [rows, cols, declared]: [u64; 3],
    bytes: u64,
) -> Result<(), MatrixRule> {
    let indices = u64::from(u32::MAX - 1);
    for (what, value) in [("row count", rows), ("column count", cols)] {
        if value > indices {
            return Err(MatrixRule::TooLarge {
                what,
                limit: indices,
                why: "the most supported",
            });
        }
        // Memory is needed for each row, entries or not.
        if value > bytes {
            return Err(MatrixRule::TooLarge {
                what,
                limit: bytes,
                why: "the file's bytes",
            });
        }
    }
    if symmetric && rows != cols {
        return Err(MatrixRule::NotSquare { rows, cols });
    }
    // Both factors lie below 2³², so the products fit.
    let places = if symmetric {
        rows * (rows + 1) / 2
    } else {
        rows * cols
    };
    if declared > places {
        return Err(MatrixRule::TooLarge {
            what: "entry count",
            limit: places,
            why: "the places of the matrix",
        });
    }
    let stored = if symmetric {
        declared.saturating_mul(2)
    } else {
        declared
    };
    if stored > indices {
        return Err(MatrixRule::TooLarge {
            what: "entry count",
            limit: indices,
            why: "the most supported",
        });
    }
    Ok(())
}

/// Parses an entry, 0-based. `None` for a blank line.
fn parse_entry(
    line: &[u8],
    integer: bool,
    rows: u64,
    cols: u64,
) -> Result<Option<(u32, u32, f64)>, MatrixRule> {
    let malformed = || MatrixRule::Entry;
    let mut words = tokens(line);
    let Some(row) = words.next() else {
        return Ok(None);
    };
    let (Some(col), Some(value), None) = (words.next(), words.next(), words.next()) else {
        return Err(malformed());
    };
    let row = parse_index("row", row, rows).ok_or_else(malformed)??;
    let col = parse_index("column", col, cols).ok_or_else(malformed)??;
    Ok(Some((row, col, parse_value(value, integer)?)))
}

/// Parses an index. `None` if the token is not an integer.
fn parse_index(what: &'static str, token: &[u8], limit: u64) -> Option<Result<u32, MatrixRule>> {
    let mut index = 0u64;
    let quick = token.len() <= 18 && token.iter().all(u8::is_ascii_digit);
    if quick {
        for &b in token {
            index = index * 10 + u64::from(b - b'0');
        }
        if (1..=limit).contains(&index) {
            return Some(Ok((index - 1) as u32));
        }
    }
    let index: i128 = std::str::from_utf8(token).ok()?.parse().ok()?;
    if index >= 1 && index <= i128::from(limit) {
        return Some(Ok((index - 1) as u32));
    }
    Some(Err(MatrixRule::OutOfRange { what, limit }))
}

fn parse_value(token: &[u8], integer: bool) -> Result<f64, MatrixRule> {
    let text = std::str::from_utf8(token).map_err(|_| MatrixRule::NotANumber)?;
    let value: f64 = text.parse().map_err(|_| MatrixRule::NotANumber)?;
    if !value.is_finite() {
        return Err(MatrixRule::NotFinite);
    }
    if integer {
        let exact: i128 = text.parse().map_err(|_| MatrixRule::NotAnInteger)?;
        if exact.unsigned_abs() > 1 << 53 {
            return Err(MatrixRule::Inexact);
        }
    }
    Ok(value)
}

/// Sorts entries into rows. Mirrors those of a symmetric file.
fn build(file: &File) -> Result<Csr, Broken> {
    let (rows, cols) = (file.rows as usize, file.cols as usize);
    let mirrored = |e: &Entry| file.symmetric && e.row != e.col;
    let mut row_ptr = vec![0u32; rows + 1];
    for e in &file.entries {
        row_ptr[e.row as usize + 1] += 1;
        if mirrored(e) {
            row_ptr[e.col as usize + 1] += 1;
        }
    }
    for i in 0..rows {
        row_ptr[i + 1] += row_ptr[i];
    }
    let mut next = row_ptr.clone();
    let mut cells = vec![(0u32, 0u32, 0.0f64); row_ptr[rows] as usize];
    let mut place = |row: u32, col: u32, e: &Entry| {
        let slot = &mut next[row as usize];
        cells[*slot as usize] = (col, e.line, e.value);
        *slot += 1;
    };
    for e in &file.entries {
        place(e.row, e.col, e);
        if mirrored(e) {
            place(e.col, e.row, e);
        }
    }
    for i in 0..rows {
        let row = &mut cells[row_ptr[i] as usize..row_ptr[i + 1] as usize];
        if !row.is_sorted_by_key(|c| c.0) {
            row.sort_unstable_by_key(|c| (c.0, c.1));
        }
        if let Some(w) = row.windows(2).find(|w| w[0].0 == w[1].0) {
            let (first_line, line) = (w[0].1.min(w[1].1), w[0].1.max(w[1].1));
            let (i, j) = (i as u64 + 1, u64::from(w[0].0) + 1);
            let (row, col) = if file.symmetric && j > i {
                (j, i)
            } else {
                (i, j)
            };
            return Err((
                Some(line.into()),
                MatrixRule::Duplicate {
                    row,
                    col,
                    first_line: first_line.into(),
                },
            ));
        }
    }
    let (mut col_idx, mut values) = (
        Vec::with_capacity(cells.len()),
        Vec::with_capacity(cells.len()),
    );
    for (col, _, value) in cells {
        col_idx.push(col);
        values.push(value);
    }
    Csr::from_parts(rows, cols, row_ptr, col_idx, values).map_err(|e| (None, MatrixRule::Matrix(e)))
}
