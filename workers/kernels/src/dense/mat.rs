//! Dense matrices of f64 by columns, and views of parts of them.
//!
//! A view may be cut by rows as well as by columns. Slices cannot express that: the rows of a part
//! lie interleaved with those of another. So views hold a pointer. Every constructor keeps the
//! parts of a mutable view disjoint.

use std::marker::PhantomData;

/// A matrix that owns its elements: element (i, j) is `data[i + j·rows]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Mat {
    rows: usize,
    cols: usize,
    data: Vec<f64>,
}

impl Mat {
    /// All zero.
    ///
    /// # Panics
    /// If `rows·cols` overflows.
    #[must_use]
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self::from_columns(rows, cols, vec![0.0; elements(rows, cols)])
    }

    /// The elements by columns.
    ///
    /// # Panics
    /// If `data` has not `rows·cols` elements.
    #[must_use]
    pub fn from_columns(rows: usize, cols: usize, data: Vec<f64>) -> Self {
        assert_eq!(data.len(), elements(rows, cols), "elements of a matrix");
        Self { rows, cols, data }
    }

    /// Element (i, j) is `f(i, j)`.
    pub fn from_fn(rows: usize, cols: usize, mut f: impl FnMut(usize, usize) -> f64) -> Self {
        let mut data = Vec::with_capacity(elements(rows, cols));
        for j in 0..cols {
            data.extend((0..rows).map(|i| f(i, j)));
        }
        Self::from_columns(rows, cols, data)
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All elements, by columns.
    #[must_use]
    pub fn data(&self) -> &[f64] {
        &self.data
    }

    /// Converts it into its elements, by columns.
    #[must_use]
    pub fn into_data(self) -> Vec<f64> {
        self.data
    }

    /// Column `j`.
    #[must_use]
    pub fn col(&self, j: usize) -> &[f64] {
        &self.data[j * self.rows..][..self.rows]
    }

    /// A view of the whole matrix.
    #[must_use]
    pub fn view(&self) -> MatRef<'_> {
        MatRef {
            ptr: self.data.as_ptr(),
            rows: self.rows,
            cols: self.cols,
            row_stride: 1,
            col_stride: self.rows,
            life: PhantomData,
        }
    }

    /// A mutable view of the whole matrix.
    pub fn view_mut(&mut self) -> MatMut<'_> {
        MatMut {
            ptr: self.data.as_mut_ptr(),
            rows: self.rows,
            cols: self.cols,
            stride: self.rows,
            life: PhantomData,
        }
    }
}

fn elements(rows: usize, cols: usize) -> usize {
    let product = rows.checked_mul(cols);
    assert!(product.is_some(), "a matrix of {rows} x {cols}");
    product.unwrap_or(0)
}

/// A read-only view of a part of a matrix, possibly transposed.
#[derive(Debug, Clone, Copy)]
pub struct MatRef<'a> {
    ptr: *const f64,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    life: PhantomData<&'a [f64]>,
}

// SAFETY: a `MatRef` is a shared borrow of f64s, a `MatMut` an exclusive one of its elements.
#[allow(unsafe_code)]
unsafe impl Send for MatRef<'_> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for MatRef<'_> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Send for MatMut<'_> {}

impl<'a> MatRef<'a> {
    /// Elements by columns, as a matrix of `rows` rows.
    ///
    /// # Panics
    /// If `data` has not `rows·cols` elements.
    #[must_use]
    pub fn from_columns(rows: usize, cols: usize, data: &'a [f64]) -> Self {
        assert_eq!(data.len(), elements(rows, cols), "elements of a matrix");
        Self {
            ptr: data.as_ptr(),
            rows,
            cols,
            row_stride: 1,
            col_stride: rows,
            life: PhantomData,
        }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next, and from one column to the next.
    #[must_use]
    pub fn strides(&self) -> (usize, usize) {
        (self.row_stride, self.col_stride)
    }

    /// The address of element (0, 0).
    #[must_use]
    pub fn as_ptr(&self) -> *const f64 {
        self.ptr
    }

    /// The transpose.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Element (i, j).
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn at(&self, i: usize, j: usize) -> f64 {
        assert!(i < self.rows && j < self.cols, "element of a matrix");
        // SAFETY: (i, j) lies inside, and every element of a view is readable.
        unsafe { *self.ptr.add(i * self.row_stride + j * self.col_stride) }
    }

    /// Rows `from..from+rows` of columns `col..col+cols`.
    ///
    /// # Panics
    /// If they do not all exist.
    #[must_use]
    pub fn part(&self, from: usize, rows: usize, col: usize, cols: usize) -> Self {
        assert!(
            from + rows <= self.rows && col + cols <= self.cols,
            "part of a matrix"
        );
        Self {
            // Stays in the same allocation or at its end. It is never read if the part is empty.
            ptr: self
                .ptr
                .wrapping_add(from * self.row_stride + col * self.col_stride),
            rows,
            cols,
            ..*self
        }
    }

    /// Column `j` of a view that is not transposed.
    ///
    /// # Panics
    /// If there is none, or the view is transposed.
    #[must_use]
    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn col(&self, j: usize) -> &'a [f64] {
        assert!(self.row_stride == 1 && j < self.cols, "column of a matrix");
        // SAFETY: the `rows` elements from there are the column, borrowed for 'a.
        unsafe { std::slice::from_raw_parts(self.ptr.add(j * self.col_stride), self.rows) }
    }

    /// Copies it into a matrix.
    #[must_use]
    pub fn to_mat(&self) -> Mat {
        if self.row_stride != 1 {
            return Mat::from_fn(self.rows, self.cols, |i, j| self.at(i, j));
        }
        let mut data = Vec::with_capacity(self.rows * self.cols);
        (0..self.cols).for_each(|j| data.extend_from_slice(self.col(j)));
        Mat::from_columns(self.rows, self.cols, data)
    }
}

/// A mutable view of a part of a matrix. The rows of a column are contiguous.
#[derive(Debug)]
pub struct MatMut<'a> {
    ptr: *mut f64,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a mut [f64]>,
}

impl<'a> MatMut<'a> {
    /// Elements by columns, as a matrix of `rows` rows.
    ///
    /// # Panics
    /// If `data` has not `rows·cols` elements.
    #[must_use]
    pub fn from_columns(rows: usize, cols: usize, data: &'a mut [f64]) -> Self {
        assert_eq!(data.len(), elements(rows, cols), "elements of a matrix");
        Self {
            ptr: data.as_mut_ptr(),
            rows,
            cols,
            stride: rows,
            life: PhantomData,
        }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one column to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The address of element (0, 0).
    pub fn as_mut_ptr(&mut self) -> *mut f64 {
        self.ptr
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> MatMut<'_> {
        MatMut {
            life: PhantomData,
            ..*self
        }
    }

    /// A read-only view of it.
    #[must_use]
    pub fn view(&self) -> MatRef<'_> {
        MatRef {
            ptr: self.ptr,
            rows: self.rows,
            cols: self.cols,
            row_stride: 1,
            col_stride: self.stride,
            life: PhantomData,
        }
    }

    /// A read-only view for the whole lifetime of the borrow.
    #[must_use]
    pub fn into_view(self) -> MatRef<'a> {
        MatRef {
            ptr: self.ptr,
            rows: self.rows,
            cols: self.cols,
            row_stride: 1,
            col_stride: self.stride,
            life: PhantomData,
        }
    }

    /// Splits it into the rows before `at` and the rest.
    ///
    /// # Panics
    /// If there are less than `at`.
    #[must_use]
    pub fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows, "rows of a matrix");
        let below = Self {
            ptr: self.ptr.wrapping_add(at),
            rows: self.rows - at,
            ..self
        };
        (Self { rows: at, ..self }, below)
    }

    /// Splits it into the columns before `at` and the rest.
    ///
    /// # Panics
    /// If there are less than `at`.
    #[must_use]
    pub fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols, "columns of a matrix");
        let right = Self {
            ptr: self.ptr.wrapping_add(at * self.stride),
            cols: self.cols - at,
            ..self
        };
        (Self { cols: at, ..self }, right)
    }

    /// Column `j`.
    ///
    /// # Panics
    /// If there is none.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn col_mut(&mut self, j: usize) -> &mut [f64] {
        assert!(j < self.cols, "column of a matrix");
        // SAFETY: the `rows` elements from there are the column. While `self` is borrowed, no other
        // view has them: splits are disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(j * self.stride), self.rows) }
    }

    /// Several columns at once.
    ///
    /// # Panics
    /// If there are less than `K`.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn cols_mut<const K: usize>(&mut self, from: usize) -> [&mut [f64]; K] {
        assert!(from + K <= self.cols, "columns of a matrix");
        assert!(K < 2 || self.rows <= self.stride, "columns of a matrix");
        std::array::from_fn(|j| {
            // SAFETY: as in `col_mut`; different columns share no element, as the stride is at
            // least the number of rows.
            unsafe {
                std::slice::from_raw_parts_mut(self.ptr.add((from + j) * self.stride), self.rows)
            }
        })
    }

    /// Copies a matrix of the same shape.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn copy_from(&mut self, other: MatRef<'_>) {
        assert_eq!(
            (self.rows, self.cols),
            (other.rows, other.cols),
            "copy of a matrix"
        );
        for j in 0..self.cols {
            if other.row_stride == 1 {
                self.col_mut(j).copy_from_slice(other.col(j));
            } else {
                for (i, v) in self.col_mut(j).iter_mut().enumerate() {
                    *v = other.at(i, j);
                }
            }
        }
    }

    /// Sets all elements to zero.
    pub fn clear(&mut self) {
        for j in 0..self.cols {
            self.col_mut(j).fill(0.0);
        }
    }

    /// Swaps two rows.
    ///
    /// # Panics
    /// If one does not exist.
    pub fn swap_rows(&mut self, a: usize, b: usize) {
        if a != b {
            for j in 0..self.cols {
                self.col_mut(j).swap(a, b);
            }
        }
    }
}
