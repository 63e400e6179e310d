//! Device memory and parts of it, as the host names them.

/// Memory of a device. It belongs to whoever holds this, who gives it back to the device.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer {
    id: u64,
    elements: usize,
}

impl Buffer {
    /// As a device names it: `id` is the device's own.
    #[must_use]
    pub fn new(id: u64, elements: usize) -> Self {
        Self { id, elements }
    }

    /// The device's own name for it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// How many f64 it holds.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Its beginning as a matrix by columns.
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
    /// Whose part it is.
    #[must_use]
    pub fn buffer(&self) -> u64 {
        self.buffer
    }

    /// Where its first element lies in the buffer.
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

    /// Whether it is the transpose of what is stored.
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

    /// Rows `from..from+rows` of columns `col..col+cols`, of one that is not transposed.
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

    /// Rows before `at`, and from there.
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
