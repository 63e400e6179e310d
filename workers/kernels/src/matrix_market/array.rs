//! The array format: all values, by columns. A symmetric file has each column from the diagonal on.

use super::header::Header;
use super::text::{Lines, next_full, parse_value, sizes, tokens};
use super::{Broken, Dense, MatrixRule};

/// The size line.
#[derive(Debug)]
pub struct Size {
    pub rows: u64,
    pub cols: u64,
    /// Its number.
    pub line: u64,
}

/// Reads the size line.
pub fn size(lines: &mut Lines<'_>, header: &Header) -> Result<Size, Broken> {
    let [rows, cols] = sizes(lines, MatrixRule::ArraySizeLine)?;
    let line = lines.number;
    if header.symmetric && rows != cols {
        return Err((Some(line), MatrixRule::NotSquare { rows, cols }));
    }
    Ok(Size { rows, cols, line })
}

/// Reads the values. The size is one that a dense matrix may have.
pub fn values(mut lines: Lines<'_>, header: &Header, size: &Size) -> Result<Dense, Broken> {
    let too_large = || {
        let rule = MatrixRule::TooLarge {
            what: "number of elements",
            limit: usize::MAX as u64,
            why: "the most of this machine",
        };
        (Some(size.line), rule)
    };
    let rows = usize::try_from(size.rows).map_err(|_| too_large())?;
    let cols = usize::try_from(size.cols).map_err(|_| too_large())?;
    let all = rows.checked_mul(cols).ok_or_else(too_large)?;
    let declared = match header.symmetric {
        true => (all - rows) / 2 + rows,
        false => all,
    };
    // The shortest value, "1\n", has 2 bytes.
    let mut found = Vec::with_capacity(declared.min(lines.rest.len() / 2 + 1));
    while let Some((line, _)) = next_full(&mut lines) {
        let broken = |rule| (Some(lines.number), rule);
        let mut words = tokens(line);
        let (Some(word), None) = (words.next(), words.next()) else {
            return Err(broken(MatrixRule::Value));
        };
        if found.len() == declared {
            let declared = declared as u64;
            return Err(broken(MatrixRule::TooMany { declared }));
        }
        found.push(parse_value(word, header.integer).map_err(broken)?);
    }
    if found.len() < declared {
        let (found, declared) = (found.len() as u64, declared as u64);
        let rule = MatrixRule::Truncated { found, declared };
        return Err((Some(lines.number), rule));
    }
    let values = match header.symmetric {
        true => mirrored(rows, &found),
        false => found,
    };
    Ok(Dense { rows, cols, values })
}

/// The whole matrix of a lower triangle.
fn mirrored(n: usize, lower: &[f64]) -> Vec<f64> {
    let mut values = vec![0.0; n * n];
    let places = (0..n).flat_map(|col| (col..n).map(move |row| (row, col)));
    for ((row, col), value) in places.zip(lower) {
        values[col * n + row] = *value;
        values[row * n + col] = *value;
    }
    values
}
