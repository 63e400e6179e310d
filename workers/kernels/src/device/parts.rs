//! Device memory and its parts, in the host's view.

/// Memory of a device. Its owner must return it to the device.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer {
    id: u64,
    elements: usize,
}

impl Buffer {
    /// Memory that a device names by `id`.
    #[must_use]
    pub fn new(id: u64, elements: usize) -> Self {
        Self { id, elements }
    }

    /// The device's id of it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Number of f64.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// A matrix by columns at its beginning.
    ///
    /// # Panics
    /// If it is too small for that.
    #[must_use]
    pub fn matrix(&self, rows: usize, cols: usize) -> Part {
        let fits = rows.checked_mul(cols).is_some_and(|e| e <= self.elements);
        assert!(fits, "a device matrix of {rows} x {cols}");
        Part {
            buffer: self.id,
            at: 0,
            rows,
            cols,
            stride: rows,
            transposed: false,
        }
    }
}

/// A part of a matrix on a device. It does not keep the memory alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    buffer: u64,
    at: usize,
    rows: usize,
    cols: usize,
    stride: usize,
    transposed: bool,
}

impl Part {
    /// The buffer that contains it.
    #[must_use]
    pub fn buffer(&self) -> u64 {
        self.buffer
    }

    /// The index of its first element in the buffer.
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        if self.transposed {
            self.cols
        } else {
            self.rows
        }
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        if self.transposed {
            self.rows
        } else {
            self.cols
        }
    }

    /// Elements from one stored column to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Whether it is the transpose of the stored matrix.
    #[must_use]
    pub fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// The transpose.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }

    /// Rows `from..from+rows` of columns `col..col+cols`. It must not be transposed.
    ///
    /// # Panics
    /// If they do not all exist, or it is transposed.
    #[must_use]
    pub fn part(&self, from: usize, rows: usize, col: usize, cols: usize) -> Self {
        assert!(
            !self.transposed && from + rows <= self.rows && col + cols <= self.cols,
            "part of a device matrix"
        );
        Self {
            at: self.at + from + col * self.stride,
            rows,
            cols,
            ..*self
        }
    }

    /// Splits it into the rows before `at` and the rest.
    ///
    /// # Panics
    /// If there are less than `at`, or it is transposed.
    #[must_use]
    pub fn split_rows(&self, at: usize) -> (Self, Self) {
        (
            self.part(0, at, 0, self.cols),
            self.part(at, self.rows - at, 0, self.cols),
        )
    }
}
