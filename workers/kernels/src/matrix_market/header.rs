//! The first line of a Matrix Market file.

use super::MatrixRule;
use super::text::tokens;

/// The first word.
pub const BANNER: &[u8] = b"%%MatrixMarket";

/// How values are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Row, column and value of each entry that is not zero.
    Coordinate,
    /// All values, by columns.
    Array,
}

/// What the first line says.
#[derive(Debug)]
pub struct Header {
    pub format: Format,
    /// Values are integers.
    pub integer: bool,
    /// Only the lower triangle is there.
    pub symmetric: bool,
}

impl Header {
    /// Reads the line.
    pub fn parse(line: &[u8]) -> Result<Self, MatrixRule> {
        let words: Vec<String> = tokens(line)
            .take(6)
            .map(|t| String::from_utf8_lossy(t).to_ascii_lowercase())
            .collect();
        let [banner, object, format, field, symmetry] = words.as_slice() else {
            return Err(MatrixRule::Header);
        };
        if !banner.as_bytes().eq_ignore_ascii_case(BANNER) {
            return Err(MatrixRule::Header);
        }
        // Only the words of the format itself are repeated.
        let unsupported = |what, supported| MatrixRule::Unsupported { what, supported };
        match object.as_str() {
            "matrix" => {}
            "vector" => return Err(unsupported("object vector", "matrix")),
            _ => return Err(unsupported("object", "matrix")),
        }
        let format = match format.as_str() {
            "coordinate" => Format::Coordinate,
            "array" => Format::Array,
            _ => return Err(unsupported("format", "coordinate or array")),
        };
        let integer = match field.as_str() {
            "real" => false,
            "integer" => true,
            "complex" => return Err(unsupported("field complex", "real or integer")),
            "pattern" => return Err(unsupported("field pattern", "real or integer")),
            _ => return Err(unsupported("field", "real or integer")),
        };
        let supported = "symmetric or general";
        let symmetric = match symmetry.as_str() {
            "general" => false,
            "symmetric" => true,
            "skew-symmetric" => return Err(unsupported("symmetry skew-symmetric", supported)),
            "hermitian" => return Err(unsupported("symmetry hermitian", supported)),
            _ => return Err(unsupported("symmetry", supported)),
        };
        Ok(Self {
            format,
            integer,
            symmetric,
        })
    }
}
