//! The lines and words of a Matrix Market file.

use super::{Broken, MatrixRule};

/// A byte order mark: some editors put it before a text.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// The text without a byte order mark.
pub fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(MARK).unwrap_or(bytes)
}

/// The lines of a text with their numbers, counted from 1.
pub struct Lines<'a> {
    /// The rest of the text.
    pub rest: &'a [u8],
    /// Number of the last line.
    pub number: u64,
}

impl<'a> Lines<'a> {
    pub fn of(text: &'a [u8]) -> Self {
        Self {
            rest: text,
            number: 0,
        }
    }

    /// The next line without its end, and whether it had one.
    pub fn next(&mut self) -> Option<(&'a [u8], bool)> {
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

/// The words of a line.
pub fn tokens(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace)
        .filter(|t| !t.is_empty())
}

/// Checks that it is text.
pub fn check(bytes: &[u8]) -> Result<(), Broken> {
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

/// True for a line that says nothing.
pub fn is_blank(line: &[u8]) -> bool {
    let line = line.trim_ascii_start();
    line.is_empty() || line[0] == b'%'
}

/// The next line that says something.
pub fn next_full<'a>(lines: &mut Lines<'a>) -> Option<(&'a [u8], bool)> {
    loop {
        let found = lines.next()?;
        if !is_blank(found.0) {
            return Some(found);
        }
    }
}

/// The numbers of a size line.
pub fn sizes<const N: usize>(lines: &mut Lines<'_>, rule: MatrixRule) -> Result<[u64; N], Broken> {
    let Some((line, _)) = next_full(lines) else {
        return Err((Some(lines.number), MatrixRule::NoSizeLine));
    };
    let mut words = tokens(line);
    let mut sizes = [0; N];
    for size in &mut sizes {
        let word = words.next().filter(|t| t.iter().all(u8::is_ascii_digit));
        let value = word.and_then(|t| std::str::from_utf8(t).ok()?.parse().ok());
        match value {
            Some(value) => *size = value,
            None => return Err((Some(lines.number), rule)),
        }
    }
    match words.next() {
        Some(_) => Err((Some(lines.number), rule)),
        None => Ok(sizes),
    }
}

/// A value of an entry.
pub fn parse_value(token: &[u8], integer: bool) -> Result<f64, MatrixRule> {
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
