//! Compressed sparse rows, and their product with a vector.
//!
//! Row `i` of the product is one chain `acc = fma(aᵢⱼ, xⱼ, acc)` from +0 with `j` ascending.
//! Rows are independent, so several are computed side by side without changing a bit.
//!
//! The rows of stencil matrices repeat: row `i+1` is row `i` moved one column to the right. The
//! constructor notes such runs. The product then reads only the first row of a run, which removes
//! most memory traffic for the matrix. The bits are those of the plain product.

use std::ops::Range;

use crate::engine::{Engine, split_mut};
use crate::simd::{Simd, dispatched};

/// The reason why arrays or triplets are no matrix. Rows and columns count from 0.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CsrError {
    #[error("{what} {value} is more than the {limit} supported")]
    TooLarge {
        what: &'static str,
        value: u128,
        limit: u64,
    },
    #[error("row pointers must be rows + 1 ascending offsets from 0 to the number of entries")]
    RowPointers,
    #[error("{columns} column indices for {values} values")]
    Lengths { columns: usize, values: usize },
    #[error("entry ({row}, {col}) lies outside the {rows} x {cols} matrix")]
    OutOfRange {
        row: u64,
        col: u64,
        rows: usize,
        cols: usize,
    },
    #[error("entry ({row}, {col}) is given twice")]
    Duplicate { row: usize, col: usize },
    #[error("columns of row {row} are not in ascending order")]
    Unsorted { row: usize },
    #[error("entry ({row}, {col}) is {value}, not a finite number")]
    NotFinite { row: usize, col: usize, value: f64 },
    #[error("no memory for a matrix of {rows} rows and {entries} entries")]
    NoMemory { rows: usize, entries: usize },
}

/// A sparse matrix by rows.
///
/// [`Csr::from_parts`], the only constructor, establishes these invariants:
///
/// * `row_ptr` has `rows + 1` ascending offsets from 0 to `col_idx.len() == values.len()`;
/// * columns ascend strictly within a row and are below `cols`;
/// * values are finite;
/// * `segments` partition the rows.
#[derive(Debug, Clone)]
pub struct Csr {
    rows: usize,
    cols: usize,
    row_ptr: Vec<u32>,
    col_idx: Vec<u32>,
    values: Vec<f64>,
    segments: Vec<Segment>,
}

/// Rows `start..end`. If `repeats`, each is the row before, moved one column to the right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    start: u32,
    end: u32,
    repeats: bool,
}

impl Csr {
    /// Makes a matrix from arrays in its own format.
    ///
    /// # Errors
    /// See [`CsrError`]; every invariant is checked.
    pub fn from_parts(
        rows: usize,
        cols: usize,
        row_ptr: Vec<u32>,
        col_idx: Vec<u32>,
        values: Vec<f64>,
    ) -> Result<Self, CsrError> {
        check_dimensions(rows, cols, values.len())?;
        if col_idx.len() != values.len() {
            return Err(CsrError::Lengths {
                columns: col_idx.len(),
                values: values.len(),
            });
        }
        let ordered = row_ptr.windows(2).all(|w| w[0] <= w[1]);
        let ends = (
            row_ptr.first().copied(),
            row_ptr.last().map(|&e| e as usize),
        );
        if row_ptr.len() != rows + 1 || !ordered || ends != (Some(0), Some(values.len())) {
            return Err(CsrError::RowPointers);
        }
        let mut csr = Self {
            rows,
            cols,
            row_ptr,
            col_idx,
            values,
            segments: Vec::new(),
        };
        for row in 0..rows {
            let (columns, values) = csr.row(row);
            if let Some(&col) = columns.iter().find(|&&c| c as usize >= cols) {
                return Err(CsrError::OutOfRange {
                    row: row as u64,
                    col: col.into(),
                    rows,
                    cols,
                });
            }
            if let Some(w) = columns.windows(2).find(|w| w[0] >= w[1]) {
                return Err(if w[0] == w[1] {
                    CsrError::Duplicate {
                        row,
                        col: w[0] as usize,
                    }
                } else {
                    CsrError::Unsorted { row }
                });
            }
            if let Some(k) = values.iter().position(|v| !v.is_finite()) {
                return Err(CsrError::NotFinite {
                    row,
                    col: columns[k] as usize,
                    value: values[k],
                });
            }
        }
        csr.segments = csr.find_segments();
        Ok(csr)
    }

    /// Builds a matrix from `(row, column, value)` in any order; duplicates are refused.
    ///
    /// # Errors
    /// See [`CsrError`].
    pub fn from_triplets(
        rows: usize,
        cols: usize,
        triplets: &[(u32, u32, f64)],
    ) -> Result<Self, CsrError> {
        check_dimensions(rows, cols, triplets.len())?;
        let no_memory = |_| CsrError::NoMemory {
            rows,
            entries: triplets.len(),
        };
        let mut row_ptr: Vec<u32> = Vec::new();
        row_ptr.try_reserve_exact(rows + 1).map_err(no_memory)?;
        row_ptr.resize(rows + 1, 0);
        for &(row, col, _) in triplets {
            if row as usize >= rows || col as usize >= cols {
                return Err(CsrError::OutOfRange {
                    row: row.into(),
                    col: col.into(),
                    rows,
                    cols,
                });
            }
            row_ptr[row as usize + 1] += 1;
        }
        for i in 0..rows {
            row_ptr[i + 1] += row_ptr[i];
        }
        let mut next = row_ptr.clone();
        let mut entries = vec![(0u32, 0.0f64); triplets.len()];
        for &(row, col, value) in triplets {
            let slot = &mut next[row as usize];
            entries[*slot as usize] = (col, value);
            *slot += 1;
        }
        for i in 0..rows {
            let row = &mut entries[row_ptr[i] as usize..row_ptr[i + 1] as usize];
            if !row.is_sorted_by_key(|e| e.0) {
                row.sort_unstable_by_key(|e| e.0);
            }
        }
        let (col_idx, values) = entries.into_iter().unzip();
        Self::from_parts(rows, cols, row_ptr, col_idx, values)
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

    /// Row pointers (`rows + 1`), columns and values, as stored.
    #[must_use]
    pub fn raw(&self) -> (&[u32], &[u32], &[f64]) {
        (&self.row_ptr, &self.col_idx, &self.values)
    }

    /// Number of stored entries.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.values.len()
    }

    /// Columns and values of a row.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    #[inline(always)]
    pub fn row(&self, row: usize) -> (&[u32], &[f64]) {
        let range = self.row_ptr[row] as usize..self.row_ptr[row + 1] as usize;
        (&self.col_idx[range.clone()], &self.values[range])
    }

    /// The stored value at a position.
    #[must_use]
    pub fn get(&self, row: usize, col: usize) -> Option<f64> {
        if row >= self.rows {
            return None;
        }
        let (columns, values) = self.row(row);
        let k = columns.binary_search_by_key(&col, |&c| c as usize).ok()?;
        Some(values[k])
    }

    /// Rows computed from the first row of a run, without reading their own entries.
    #[must_use]
    pub fn repeated_rows(&self) -> usize {
        self.segments
            .iter()
            .filter(|s| s.repeats)
            .map(|s| (s.end - s.start) as usize)
            .sum()
    }

    /// ‖A‖∞, the largest sum of magnitudes of a row.
    #[must_use]
    pub fn norm_inf(&self) -> f64 {
        (0..self.rows)
            .map(|i| self.row(i).1.iter().map(|v| v.abs()).sum())
            .fold(0.0, f64::max)
    }

    /// Returns the first position `(i, j)`, `i < j`, whose value differs from that at `(j, i)`. A
    /// missing value counts as different. `None` if the matrix is symmetric. Only for square
    /// matrices.
    #[must_use]
    pub fn first_asymmetry(&self) -> Option<(usize, usize)> {
        if self.is_symmetric() {
            return None;
        }
        let mut first = None;
        for i in 0..self.rows {
            let (columns, values) = self.row(i);
            for (&j, v) in columns.iter().zip(values) {
                let j = j as usize;
                if self.get(j, i) != Some(*v) {
                    let pair = (i.min(j), i.max(j));
                    first = Some(first.map_or(pair, |f: (usize, usize)| f.min(pair)));
                }
            }
        }
        first
    }

    /// One walk down the rows: in every row the entries right of the diagonal meet those left of it
    /// in ascending order. So one cursor per row suffices.
    fn is_symmetric(&self) -> bool {
        let mut cursor = self.row_ptr[..self.rows].to_vec();
        for i in 0..self.rows {
            let (columns, values) = self.row(i);
            let left = columns.partition_point(|&c| (c as usize) < i);
            if (cursor[i] - self.row_ptr[i]) as usize != left {
                return false;
            }
            for (&j, &v) in columns.iter().zip(values).skip(left) {
                let j = j as usize;
                if j == i {
                    continue;
                }
                if j >= self.rows || cursor[j] == self.row_ptr[j + 1] {
                    return false;
                }
                let at = cursor[j] as usize;
                if self.col_idx[at] as usize != i || self.values[at] != v {
                    return false;
                }
                cursor[j] += 1;
            }
        }
        true
    }

    /// `y = A·x` on one thread.
    ///
    /// # Panics
    /// If `x` or `y` has the wrong length.
    pub fn spmv(&self, x: &[f64], y: &mut [f64]) {
        self.check_lengths(x, y);
        spmv_rows(Simd::detect(), self, 0, x, y);
    }

    /// `y = A·x` with the engine's threads; the same bits as [`Csr::spmv`].
    ///
    /// # Panics
    /// If `x` or `y` has the wrong length.
    pub fn spmv_with(&self, engine: &mut Engine, x: &[f64], y: &mut [f64]) {
        self.check_lengths(x, y);
        let simd = engine.simd();
        let ranges = engine.ranges(self.rows);
        let ys = split_mut(y, ranges.iter().map(Range::len));
        let parts = ranges.iter().map(|r| r.start).zip(ys).collect();
        engine.run(parts, |(start, y)| spmv_rows(simd, self, start, x, y));
    }

    fn check_lengths(&self, x: &[f64], y: &[f64]) {
        assert_eq!(x.len(), self.cols, "x must have one element a column");
        assert_eq!(y.len(), self.rows, "y must have one element a row");
    }

    fn find_segments(&self) -> Vec<Segment> {
        /// Shorter runs do not justify leaving the plain loop.
        const SHORTEST: usize = 32;
        let plain = |start: usize, end: usize| Segment {
            start: start as u32,
            end: end as u32,
            repeats: false,
        };
        let mut segments: Vec<Segment> = Vec::new();
        let mut repeated = 0;
        let mut start = 0;
        while start < self.rows {
            let mut end = start + 1;
            while end < self.rows && self.repeats_row_before(end) {
                end += 1;
            }
            if end - start >= SHORTEST {
                repeated += end - start;
                segments.push(Segment {
                    repeats: true,
                    ..plain(start, end)
                });
            } else {
                match segments.last_mut() {
                    Some(last) if !last.repeats => last.end = end as u32,
                    _ => segments.push(plain(start, end)),
                }
            }
            start = end;
        }
        if repeated * 2 < self.rows {
            vec![plain(0, self.rows)]
        } else {
            segments
        }
    }

    fn repeats_row_before(&self, row: usize) -> bool {
        let ((ca, va), (cb, vb)) = (self.row(row - 1), self.row(row));
        ca.len() == cb.len()
            && ca.iter().zip(cb).all(|(a, b)| a + 1 == *b)
            && va.iter().zip(vb).all(|(a, b)| a.to_bits() == b.to_bits())
    }

    /// The same matrix without runs, for comparing both ways of the product.
    #[doc(hidden)]
    #[must_use]
    pub fn without_runs(mut self) -> Self {
        self.segments = vec![Segment {
            start: 0,
            end: self.rows as u32,
            repeats: false,
        }];
        self
    }
}

fn check_dimensions(rows: usize, cols: usize, entries: usize) -> Result<(), CsrError> {
    // One below the maximum, so that rows + 1 and a + 1 of a column never overflow u32.
    let limit = u32::MAX - 1;
    for (what, value) in [
        ("row count", rows),
        ("column count", cols),
        ("entry count", entries),
    ] {
        if value > limit as usize {
            return Err(CsrError::TooLarge {
                what,
                value: value as u128,
                limit: limit.into(),
            });
        }
    }
    Ok(())
}

dispatched! {
    /// Rows `start..start + y.len()` of the product.
    fn spmv_rows(a: &Csr, start: usize, x: &[f64], y: &mut [f64]) = product_rows
}

/// Rows `start..start + y.len()` of `A·x`, into `y`. `x` has `a.cols` elements.
#[inline(always)]
pub(crate) fn product_rows(a: &Csr, start: usize, x: &[f64], y: &mut [f64]) {
    assert_eq!(x.len(), a.cols);
    let end = start + y.len();
    let mut at = a.segments.partition_point(|s| s.end as usize <= start);
    let mut row = start;
    while row < end {
        let segment = a.segments[at];
        let stop = end.min(segment.end as usize);
        let out = &mut y[row - start..stop - start];
        if segment.repeats {
            repeated_rows(a, segment.start as usize, row, x, out);
        } else {
            plain_rows(a, row, x, out);
        }
        row = stop;
        at += 1;
    }
}

/// Computes rows of a run that began at `first`, `WIDTH` rows side by side.
#[inline(always)]
fn repeated_rows(a: &Csr, first: usize, start: usize, x: &[f64], y: &mut [f64]) {
    const WIDTH: usize = 16;
    let (columns, values) = a.row(first);
    let mut shift = start - first;
    let (blocks, tail) = y.as_chunks_mut::<WIDTH>();
    for block in blocks {
        let mut acc = [0.0; WIDTH];
        for (&c, &v) in columns.iter().zip(values) {
            let at = c as usize + shift;
            // In bounds: row first + shift + l holds column at + l, which lies below cols.
            if let Some((x, _)) = x[at..].split_first_chunk::<WIDTH>() {
                for l in 0..WIDTH {
                    acc[l] = v.mul_add(x[l], acc[l]);
                }
            }
        }
        *block = acc;
        shift += WIDTH;
    }
    for out in tail {
        let mut acc = 0.0f64;
        for (&c, &v) in columns.iter().zip(values) {
            acc = v.mul_add(x[c as usize + shift], acc);
        }
        *out = acc;
        shift += 1;
    }
}

/// Computes rows as they are stored, two chains side by side to hide the latency of the fused
/// multiply-add. With more chains the compiler packs them into vectors, which costs more than it
/// gains.
#[inline(always)]
#[allow(unsafe_code)] // unchecked reads, argued below; they are worth a factor of two
fn plain_rows(a: &Csr, start: usize, x: &[f64], y: &mut [f64]) {
    assert!(start + y.len() <= a.rows && x.len() == a.cols);
    let term = |k: usize, acc: f64| {
        debug_assert!(k < a.values.len() && (a.col_idx[k] as usize) < x.len());
        // SAFETY: k lies below row_ptr[rows] = col_idx.len() = values.len(), as row pointers
        // ascend; from_parts admitted only columns below `cols` = x.len(). Fields are private
        // and never changed after from_parts.
        unsafe {
            let c = *a.col_idx.get_unchecked(k) as usize;
            a.values.get_unchecked(k).mul_add(*x.get_unchecked(c), acc)
        }
    };
    let row_ptr = &a.row_ptr[start..=start + y.len()];
    let (pairs, tail) = y.as_chunks_mut::<2>();
    let mut begin = row_ptr[0] as usize;
    for (out, ends) in pairs.iter_mut().zip(row_ptr[1..].as_chunks::<2>().0) {
        let (middle, end) = (ends[0] as usize, ends[1] as usize);
        let (first, second) = (middle - begin, end - middle);
        let common = first.min(second);
        let (mut s, mut t) = (0.0f64, 0.0f64);
        for k in 0..common {
            s = term(begin + k, s);
            t = term(middle + k, t);
        }
        for k in common..first {
            s = term(begin + k, s);
        }
        for k in common..second {
            t = term(middle + k, t);
        }
        *out = [s, t];
        begin = end;
    }
    if let [out] = tail {
        *out = (begin..row_ptr[row_ptr.len() - 1] as usize).fold(0.0, |acc, k| term(k, acc));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poisson;
    use crate::rhs::load_case;

    fn by_definition(a: &Csr, x: &[f64]) -> Vec<u64> {
        (0..a.rows())
            .map(|i| {
                let (columns, values) = a.row(i);
                let chain = columns
                    .iter()
                    .zip(values)
                    .fold(0.0f64, |s, (&c, &v)| v.mul_add(x[c as usize], s));
                chain.to_bits()
            })
            .collect()
    }

    fn bits(y: &[f64]) -> Vec<u64> {
        y.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn product_of_a_stencil_is_that_of_its_definition_however_computed() {
        let a = poisson::poisson_2d(67, 41).unwrap();
        assert!(a.repeated_rows() > a.rows() / 2);
        let x = load_case(1, 5, a.cols());
        let expected = by_definition(&a, &x);
        let plain = a.clone().without_runs();
        let mut y = vec![0.0; a.rows()];
        for matrix in [&a, &plain] {
            matrix.spmv(&x, &mut y);
            assert_eq!(bits(&y), expected);
            for threads in [2, 4] {
                matrix.spmv_with(&mut Engine::new(threads).unwrap(), &x, &mut y);
                assert_eq!(bits(&y), expected);
            }
            matrix.spmv_with(&mut Engine::with_simd(Simd::portable()), &x, &mut y);
            assert_eq!(bits(&y), expected);
        }
    }

    #[test]
    fn wrong_parts_are_refused() {
        let parts = |p: &[u32], c: &[u32], v: &[f64]| {
            Csr::from_parts(2, 2, p.to_vec(), c.to_vec(), v.to_vec()).map(drop)
        };
        assert_eq!(parts(&[0, 1, 2], &[0, 1], &[1.0, 1.0]), Ok(()));
        assert_eq!(
            parts(&[0, 2, 1], &[0, 1], &[1.0, 1.0]),
            Err(CsrError::RowPointers)
        );
        assert_eq!(parts(&[0, 1], &[0], &[1.0]), Err(CsrError::RowPointers));
        assert!(matches!(
            parts(&[0, 1, 2], &[0, 2], &[1.0, 1.0]),
            Err(CsrError::OutOfRange { row: 1, col: 2, .. })
        ));
        assert_eq!(
            parts(&[0, 2, 2], &[1, 1], &[1.0, 1.0]),
            Err(CsrError::Duplicate { row: 0, col: 1 })
        );
        assert_eq!(
            parts(&[0, 2, 2], &[1, 0], &[1.0, 1.0]),
            Err(CsrError::Unsorted { row: 0 })
        );
        assert!(matches!(
            parts(&[0, 1, 2], &[0, 1], &[1.0, f64::NAN]),
            Err(CsrError::NotFinite { row: 1, .. })
        ));
        let too_many = Csr::from_triplets(u32::MAX as usize, 1, &[]);
        assert!(matches!(
            too_many,
            Err(CsrError::TooLarge {
                what: "row count",
                ..
            })
        ));
    }

    #[test]
    fn the_first_asymmetric_pair_is_named() {
        let of = |t: &[(u32, u32, f64)]| Csr::from_triplets(3, 3, t).unwrap().first_asymmetry();
        assert_eq!(of(&[(0, 0, 1.0), (0, 2, 5.0), (2, 0, 5.0)]), None);
        assert_eq!(of(&[(0, 1, 5.0), (1, 0, 6.0)]), Some((0, 1)));
        assert_eq!(of(&[(2, 1, 5.0)]), Some((1, 2)));
        assert_eq!(of(&[(1, 2, 5.0)]), Some((1, 2)));
        assert_eq!(of(&[(2, 0, 1.0), (1, 2, 5.0), (2, 1, 5.0)]), Some((0, 2)));
    }
}
