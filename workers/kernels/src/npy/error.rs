//! Errors in a `.npy` file. Each message names the rule.

/// The rule that a file breaks. Rows and columns count from 0, as in NumPy. The message never
/// quotes the file: its reader may not be allowed to read that.
#[derive(Debug, thiserror::Error)]
pub enum NpyRule {
    /// The file could not be read.
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
    /// A folder, a device or a pipe.
    #[error("is not a regular file")]
    NotAFile,
    /// The first bytes differ.
    #[error("is no .npy file: it does not begin with \\x93NUMPY")]
    Magic,
    /// A version that does not exist.
    #[error("has another .npy version; 1.0, 2.0 and 3.0 are read")]
    Version,
    /// The file ends inside its header.
    #[error("is truncated: the header ends after {found} of {expected} bytes")]
    TruncatedHeader {
        /// Bytes of the header that the file has.
        found: usize,
        /// Bytes of the whole header.
        expected: usize,
    },
    /// The header is no dictionary of the form that the format prescribes.
    #[error("header, at byte {at}: expected {expected}")]
    Header {
        /// Bytes into the header's text.
        at: usize,
        /// The expected element.
        expected: &'static str,
    },
    /// A key that the format does not have.
    #[error("header: a key is none of descr, fortran_order, shape")]
    UnknownKey,
    /// A key that is missing, or given twice.
    #[error("header: key {key:?} {problem}")]
    Key {
        /// The key.
        key: &'static str,
        /// The problem.
        problem: &'static str,
    },
    /// Another element type.
    #[error(
        "descr is not '<f8'; little-endian doubles are read: write it again with \
         numpy.save(file, numpy.asarray(a, dtype='<f8'))"
    )]
    Descr,
    /// Not two dimensions.
    #[error("shape has {found} dimension(s); a matrix has 2")]
    Dimensions {
        /// Dimensions.
        found: usize,
    },
    /// Too large, or empty.
    #[error("shape is {rows} x {cols}; {rule}")]
    Shape {
        /// Rows.
        rows: u64,
        /// Columns.
        cols: u64,
        /// The rule.
        rule: &'static str,
    },
    /// Less or more bytes than the shape needs.
    #[error("{found} bytes of data where {rows} x {cols} doubles need {expected}")]
    Length {
        /// Bytes after the header.
        found: usize,
        /// Bytes that the shape needs.
        expected: u64,
        /// Rows.
        rows: u64,
        /// Columns.
        cols: u64,
    },
    /// NaN or infinity.
    #[error("element ({row}, {col}) is not a finite number")]
    NotFinite {
        /// Row.
        row: usize,
        /// Column.
        col: usize,
    },
}
