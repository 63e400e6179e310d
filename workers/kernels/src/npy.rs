//! A strict reader and a writer of `.npy` files (NumPy Enhancement Proposal 1) of doubles.
//!
//! It reads versions 1.0 to 3.0, `'<f8'`, two dimensions, C or Fortran order, finite elements, and
//! exactly the bytes that the shape needs. Declared sizes are not trusted for allocation.

mod error;

use std::path::Path;

use crate::dense::{Mat, MatRef};

pub use error::NpyRule;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Whether bytes start like a `.npy` file.
#[must_use]
pub fn is_npy(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Reads a matrix from a file.
///
/// # Errors
/// See [`NpyRule`]; the caller names the file.
pub fn read(path: impl AsRef<Path>) -> Result<Mat, NpyRule> {
    let path = path.as_ref();
    if !std::fs::metadata(path).map_err(NpyRule::Io)?.is_file() {
        return Err(NpyRule::NotAFile);
    }
    parse(&std::fs::read(path).map_err(NpyRule::Io)?)
}

/// Parses the bytes of a file.
///
/// # Errors
/// See [`NpyRule`].
pub fn parse(bytes: &[u8]) -> Result<Mat, NpyRule> {
    let (header, data) = split(bytes)?;
    let Header {
        fortran,
        shape: [rows, cols],
    } = Header::parse(header)?;
    let shape = |rule| NpyRule::Shape { rows, cols, rule };
    if rows == 0 || cols == 0 {
        return Err(shape("a matrix has at least one row and one column"));
    }
    let expected = rows.checked_mul(cols).and_then(|e| e.checked_mul(8));
    let expected = expected.ok_or_else(|| shape("that is more than any file holds"))?;
    if data.len() as u64 != expected {
        return Err(NpyRule::Length {
            found: data.len(),
            expected,
            rows,
            cols,
        });
    }
    // The data has that size, so both numbers fit.
    let (rows, cols) = (rows as usize, cols as usize);
    let (words, _) = data.as_chunks::<8>();
    let matrix = if fortran {
        let values = words.iter().map(|word| f64::from_le_bytes(*word));
        Mat::from_columns(rows, cols, values.collect())
    } else {
        Mat::from_fn(rows, cols, |i, j| f64::from_le_bytes(words[i * cols + j]))
    };
    match matrix.data().iter().position(|v| !v.is_finite()) {
        Some(at) => Err(NpyRule::NotFinite {
            row: at % rows,
            col: at / rows,
        }),
        None => Ok(matrix),
    }
}

/// Splits a file into its header's text and its data.
fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), NpyRule> {
    if !is_npy(bytes) {
        return Err(NpyRule::Magic);
    }
    let truncated = |expected| NpyRule::TruncatedHeader {
        found: bytes.len(),
        expected,
    };
    let [major, minor] = *bytes.get(6..8).ok_or_else(|| truncated(10))? else {
        return Err(truncated(10));
    };
    let (length, begin) = match (major, minor) {
        (1, 0) => match bytes.get(8..10) {
            Some(&[a, b]) => (usize::from(u16::from_le_bytes([a, b])), 10),
            _ => return Err(truncated(10)),
        },
        (2 | 3, 0) => match bytes.get(8..12) {
            Some(&[a, b, c, d]) => (u32::from_le_bytes([a, b, c, d]) as usize, 12),
            _ => return Err(truncated(12)),
        },
        _ => return Err(NpyRule::Version),
    };
    if bytes.len() - begin < length {
        return Err(truncated(begin + length));
    }
    Ok(bytes[begin..].split_at(length))
}

struct Header {
    fortran: bool,
    shape: [u64; 2],
}

/// Reads `{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }`, keys in any order.
struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl Header {
    fn parse(text: &[u8]) -> Result<Self, NpyRule> {
        let mut reader = Reader { text, at: 0 };
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        reader.expect(b'{', "'{'")?;
        while !reader.take(b'}') {
            let key = reader.string("a key in quotes, or '}'")?;
            reader.expect(b':', "':'")?;
            let (key, is_new) = match key.as_str() {
                "descr" => {
                    let is_new = descr.replace(reader.string("a type in quotes")?).is_none();
                    ("descr", is_new)
                }
                "fortran_order" => (
                    "fortran_order",
                    fortran.replace(reader.boolean()?).is_none(),
                ),
                "shape" => ("shape", shape.replace(reader.tuple()?).is_none()),
                _ => return Err(NpyRule::UnknownKey),
            };
            if !is_new {
                return Err(NpyRule::Key {
                    key,
                    problem: "is given twice",
                });
            }
            if !reader.take(b',') {
                reader.expect(b'}', "',' or '}'")?;
                break;
            }
        }
        if reader.peek().is_some() {
            return Err(reader.unexpected("nothing but spaces behind the '}'"));
        }
        let missing = |key| NpyRule::Key {
            key,
            problem: "is missing",
        };
        let descr = descr.ok_or_else(|| missing("descr"))?;
        let fortran = fortran.ok_or_else(|| missing("fortran_order"))?;
        let shape = shape.ok_or_else(|| missing("shape"))?;
        if descr != "<f8" {
            return Err(NpyRule::Descr);
        }
        match <[u64; 2]>::try_from(shape) {
            Ok(shape) => Ok(Self { fortran, shape }),
            Err(shape) => Err(NpyRule::Dimensions { found: shape.len() }),
        }
    }
}

impl Reader<'_> {
    /// Returns the next byte that is no space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn unexpected(&self, expected: &'static str) -> NpyRule {
        NpyRule::Header {
            at: self.at,
            expected,
        }
    }

    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), NpyRule> {
        if self.take(byte) {
            Ok(())
        } else {
            Err(self.unexpected(expected))
        }
    }

    fn string(&mut self, expected: &'static str) -> Result<String, NpyRule> {
        let quote = match self.peek() {
            Some(quote @ (b'\'' | b'"')) => quote,
            _ => return Err(self.unexpected(expected)),
        };
        let text = &self.text[self.at + 1..];
        let Some(end) = text.iter().position(|b| *b == quote) else {
            return Err(self.unexpected("a text with its closing quote"));
        };
        self.at += end + 2;
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    fn boolean(&mut self) -> Result<bool, NpyRule> {
        self.peek();
        for (word, value) in [(&b"True"[..], true), (b"False", false)] {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.unexpected("True or False"))
    }

    fn tuple(&mut self) -> Result<Vec<u64>, NpyRule> {
        self.expect(b'(', "'('")?;
        let mut numbers = Vec::new();
        while !self.take(b')') {
            self.peek();
            let digits = self.text[self.at..]
                .iter()
                .take_while(|b| b.is_ascii_digit())
                .count();
            let number = std::str::from_utf8(&self.text[self.at..self.at + digits]);
            let Some(number) = number.ok().and_then(|n| n.parse().ok()) else {
                return Err(self.unexpected("a whole number below 2^64, or ')'"));
            };
            numbers.push(number);
            self.at += digits;
            if !self.take(b',') {
                self.expect(b')', "',' or ')'")?;
                break;
            }
        }
        Ok(numbers)
    }
}

/// Builds the start of a file: magic, version 1.0, and a header that is padded so that the data
/// starts at a multiple of 64.
fn preamble(descr: &str, fortran: bool, shape: &str, data: usize) -> Vec<u8> {
    let order = if fortran { "True" } else { "False" };
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    while !(10 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let mut out = Vec::with_capacity(10 + header.len() + data);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[1, 0]);
    out.extend_from_slice(&(header.len() as u16).to_le_bytes());
    out.extend_from_slice(header.as_bytes());
    out
}

/// Encodes a matrix as a file, in Fortran order.
#[must_use]
pub fn matrix(a: MatRef<'_>) -> Vec<u8> {
    let shape = format!("({}, {})", a.rows(), a.cols());
    let mut out = preamble("<f8", true, &shape, 8 * a.rows() * a.cols());
    for j in 0..a.cols() {
        let at = out.len();
        out.resize(at + 8 * a.rows(), 0);
        crate::state::copy_to_le(a.col(j), &mut out[at..]);
    }
    out
}

/// Length of [`matrix`]'s result.
#[must_use]
pub fn matrix_bytes(rows: usize, cols: usize) -> usize {
    preamble("<f8", true, &format!("({rows}, {cols})"), 0).len() + 8 * rows * cols
}

/// Encodes a vector as a file.
#[must_use]
pub fn vector(x: &[f64]) -> Vec<u8> {
    let mut out = preamble("<f8", false, &format!("({},)", x.len()), 8 * x.len());
    out.extend(x.iter().flat_map(|v| v.to_le_bytes()));
    out
}

/// Encodes a vector of integers as a file of `'<i8'`.
#[must_use]
pub fn integers(x: &[usize]) -> Vec<u8> {
    let mut out = preamble("<i8", false, &format!("({},)", x.len()), 8 * x.len());
    out.extend(x.iter().flat_map(|v| (*v as u64).to_le_bytes()));
    out
}
