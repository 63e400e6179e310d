//! The inputs of the canaries, made from integers by exact operations only.

use super::matrix;
use crate::dense::Mat;
use crate::poisson::{self, PoissonError};
use crate::rhs::load_case;
use crate::sparse::{Csr, CsrError};

/// C, and the factors A and B of the product that is added or subtracted.
pub(super) struct Product {
    pub(super) a: Mat,
    pub(super) b: Mat,
    pub(super) c: Mat,
}

/// Rows of A and columns of B: no multiple of any tile.
const SHAPE: (usize, usize) = (13, 9);

fn random(rows: usize, cols: usize, case: u64) -> Mat {
    Mat::from_columns(rows, cols, load_case(case, 0xCA, rows * cols))
}

/// A power of two. `e` is within the exponents of normal numbers.
fn power(e: i32) -> f64 {
    f64::from_bits(u64::from((1023 + e).unsigned_abs()) << 52)
}

pub(super) fn factors(depth: usize) -> Product {
    let (m, n) = SHAPE;
    Product {
        a: random(m, depth, 1),
        b: random(depth, n, 2),
        c: random(m, n, 3),
    }
}

/// Neighbours in a sum almost cancel, over forty binary orders of magnitude.
pub(super) fn cancelling() -> Product {
    let (m, n) = SHAPE;
    let depth = 600;
    let a = random(m, depth / 2, 4);
    let b = random(depth / 2, n, 5);
    Product {
        a: matrix(m, depth, |i, p| {
            let value = a.view().at(i, p / 2) * power((p as i32 / 2) % 40);
            if p % 2 == 0 { value } else { -value }
        }),
        b: matrix(depth, n, |p, j| {
            let value = b.view().at(p / 2, j);
            if p % 2 == 0 {
                value
            } else {
                value * (1.0 + power(-45))
            }
        }),
        c: Mat::zeros(m, n),
    }
}

/// Products and sums below 2⁻¹⁰²².
pub(super) fn denormal() -> Product {
    let (m, n) = SHAPE;
    let (a, b, c) = (random(m, 33, 6), random(33, n, 7), random(m, n, 8));
    Product {
        a: matrix(m, 33, |i, p| a.view().at(i, p) * power(-520)),
        b: matrix(33, n, |p, j| b.view().at(p, j) * power(-512)),
        c: matrix(m, n, |i, j| c.view().at(i, j) * power(-1000) * power(-40)),
    }
}

/// Zeros of both signs, from zeros and from products that underflow.
pub(super) fn zeros() -> Product {
    let (m, n) = SHAPE;
    Product {
        a: matrix(m, 3, |i, p| match (i + p) % 4 {
            0 => 0.0,
            1 => -0.0,
            2 => -power(-600),
            _ => power(-600),
        }),
        b: matrix(3, n, |p, j| match (2 * p + j) % 3 {
            0 => 1.0,
            1 => power(-600),
            _ => -0.0,
        }),
        c: matrix(m, n, |i, j| if (i + j) % 2 == 0 { -0.0 } else { 0.0 }),
    }
}

/// A panel of small integers: in each column many rows are the largest.
pub(super) fn ties() -> Mat {
    let mut state = 0x0123_4567_89AB_CDEFu64;
    matrix(61, 21, |_, _| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        f64::from((state >> 33) as u32 % 5) - 2.0
    })
}

pub(super) fn tall() -> Mat {
    random(67, 21, 9)
}

/// A unit lower triangle and the right sides. Elements on and above its diagonal must not be read.
pub(super) fn triangle() -> (Mat, Mat) {
    let l = random(53, 53, 10);
    // So small that the solution has the size of the right sides.
    let l = matrix(53, 53, |i, j| {
        if i > j {
            l.view().at(i, j) * 0.125
        } else {
            7.0
        }
    });
    (l, random(53, 6, 11))
}

/// Lengths of the sums: within a lane, a leaf, across leaves, an odd number of leaves.
pub(super) const DOTS: [usize; 6] = [1, 31, 1023, 1024, 1025, 5 * 1024 + 17];

pub(super) fn vectors(n: usize) -> (Vec<f64>, Vec<f64>) {
    (load_case(12, 0xCA, n), load_case(13, 0xCA, n))
}

/// Rows of 0 to 14 entries, without a pattern.
pub(super) fn irregular() -> Result<Csr, CsrError> {
    let (rows, cols) = (257u32, 241u32);
    let mut state = 99u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let mut triplets = Vec::new();
    for row in 0..rows {
        let mut col = next() % 40;
        for _ in 0..next() % 15 {
            if col >= cols {
                break;
            }
            triplets.push((row, col, f64::from(next() % 2001) / 1024.0 - 0.9765625));
            col += 1 + next() % 23;
        }
    }
    Csr::from_triplets(rows as usize, cols as usize, &triplets)
}

/// A symmetric positive definite system of 29 × 37 grid points.
pub(super) fn system() -> Result<(Csr, Vec<f64>), PoissonError> {
    let a = poisson::poisson_2d(29, 37)?;
    let b = load_case(14, 0xCA, a.rows());
    Ok((a, b))
}
