//! The coordinate format: row, column and value of each entry.

use super::header::Header;
use super::text::{Lines, is_blank, parse_value, sizes, tokens};
use super::{Broken, MatrixRule};
use crate::sparse::Csr;

/// The size line.
#[derive(Debug)]
pub struct Size {
    pub rows: u64,
    pub cols: u64,
    declared: u64,
    /// Its number.
    pub line: u64,
}

#[derive(Debug)]
pub struct Entry {
    pub row: u32,
    pub col: u32,
    pub line: u32,
    pub value: f64,
}

/// A file's entries.
#[derive(Debug)]
pub struct Entries {
    pub header: Header,
    pub size: Size,
    pub entries: Vec<Entry>,
}

/// Reads the size line.
pub fn size(lines: &mut Lines<'_>, header: &Header) -> Result<Size, Broken> {
    let found = sizes(lines, MatrixRule::SizeLine)?;
    check_sizes(header.symmetric, found).map_err(|rule| (Some(lines.number), rule))?;
    let [rows, cols, declared] = found;
    Ok(Size {
        rows,
        cols,
        declared,
        line: lines.number,
    })
}

/// Reads the entries.
pub fn entries(mut lines: Lines<'_>, header: Header, size: Size) -> Result<Entries, Broken> {
    let Size {
        rows,
        cols,
        declared,
        ..
    } = size;
    let (integer, symmetric) = (header.integer, header.symmetric);
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
    Ok(Entries {
        header,
        size,
        entries,
    })
}

/// Checks that the sizes are possible before they are used.
fn check_sizes(symmetric: bool, [rows, cols, declared]: [u64; 3]) -> Result<(), MatrixRule> {
    let indices = u64::from(u32::MAX - 1);
    for (what, value) in [("row count", rows), ("column count", cols)] {
        if value > indices {
            return Err(MatrixRule::TooLarge {
                what,
                limit: indices,
                why: "the most supported",
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

/// Parses an entry, 0-based. `None` for a blank line or a comment.
fn parse_entry(
    line: &[u8],
    integer: bool,
    rows: u64,
    cols: u64,
) -> Result<Option<(u32, u32, f64)>, MatrixRule> {
    let malformed = || MatrixRule::Entry;
    if is_blank(line) {
        return Ok(None);
    }
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

/// Sorts entries into rows. Mirrors those of a symmetric file.
pub fn build(file: &Entries) -> Result<Csr, Broken> {
    let (rows, cols) = (file.size.rows as usize, file.size.cols as usize);
    let mirrored = |e: &Entry| file.header.symmetric && e.row != e.col;
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
            let (row, col) = if file.header.symmetric && j > i {
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
