//! What can be wrong with a `.npy` file, in words that name the rule.

/// The rule that a file breaks. Rows and columns count from 0, as in NumPy. It never quotes the
/// file: a reader of the message may have no right to read that.
#[derive(Debug, thiserror::Error)]
pub enum NpyRule {
    /// The file could not be read.
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
    /// A folder, a device, a pipe.
    #[error("is not a regular file")]
    NotAFile,
    /// Other first bytes.
    #[error("is no .npy file: it does not begin with \\x93NUMPY")]
    Magic,
    /// A version that does not exist.
    #[error("has another .npy version; 1.0, 2.0 and 3.0 are read")]
    Version,
    /// The file ends inside its header.
    #[error("is truncated: the header ends after {found} of {expected} bytes")]
    TruncatedHeader {
        /// Bytes that are there.
        found: usize,
        /// Bytes that the header has.
        expected: usize,
    },
    /// The header is no dictionary of the form that the format prescribes.
    #[error("header, at byte {at}: expected {expected}")]
    Header {
        /// Bytes into the header's text.
        at: usize,
        /// What the format wants there.
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
        /// What is wrong with it.
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
        /// What it must be.
        rule: &'static str,
    },
    /// Less or more bytes than the shape needs.
    #[error("{found} bytes of data where {rows} x {cols} doubles need {expected}")]
    Length {
        /// Bytes behind the header.
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
