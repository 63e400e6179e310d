//! C ← A·B, C ← C + A·B and C ← C − A·B, in one order of operations everywhere.
//!
//! The order, `chain512`: the inner dimension is divided into blocks of [`DEPTH`]. In a block `acc
//! = 0`, then `acc = fma(aᵢₚ, bₚⱼ, acc)` with p ascending. Then `c = c + acc` or `c = c − acc`, or
//! `c = acc` in the first block if C is replaced. Each element of C has its own chain, so neither
//! threads nor tiles nor the width of the vector unit change a bit.
//!
//! On x86-64 with FMA the kernels of the crate `private-gemm-x86` are used. It is pinned to a
//! version whose order was tested to be this one with factors of 1 and −1. With other factors it
//! rounds differently, and none are offered here. On other CPUs `portable` computes the same
//! chains. The tests compare all of them with a loop that follows the definition.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::mat::{MatMut, MatRef};
use super::portable;
use crate::engine::Engine;
use crate::simd::Simd;

/// Length of a chain.
pub const DEPTH: usize = 512;

/// Multiply-adds below which waking a thread costs more than it gains.
pub(super) const PARALLEL: usize = 1 << 20;

/// Parts per thread, so that one delayed thread does not delay the others.
const PARTS: usize = 3;

/// The use of C's old elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Into {
    /// They are overwritten.
    Replace,
    /// The product is added to them.
    Add,
    /// The product is subtracted from them.
    Subtract,
}

/// C ← A·B, C + A·B or C − A·B. A is m × k, B is k × n, C is m × n.
///
/// # Panics
/// If the shapes do not fit.
pub fn gemm(engine: &mut Engine, a: MatRef<'_>, b: MatRef<'_>, into: Into, c: MatMut<'_>) {
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    assert_eq!((a.rows(), b.rows(), b.cols()), (m, k, n), "shapes of gemm");
    let simd = engine.simd();
    let threads = engine.threads();
    if threads == 1 || m.saturating_mul(n).saturating_mul(k) < PARALLEL {
        return one(simd, a, b, into, c);
    }
    let parts = cut(a, b, c, threads * PARTS);
    let parts: Vec<Mutex<Option<Part<'_>>>> =
        parts.into_iter().map(|p| Mutex::new(Some(p))).collect();
    let next = AtomicUsize::new(0);
    engine.run(vec![(); threads], |()| {
        while let Some(slot) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let part = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((a, b, c)) = part {
                one(simd, a, b, into, c);
            }
        }
    });
}

type Part<'a> = (MatRef<'a>, MatRef<'a>, MatMut<'a>);

/// Divides C into at most `count` parts of similar size, with the rows of A and the columns of B
/// that they need. The cut minimises repeated reads of A and B.
fn cut<'a>(a: MatRef<'a>, b: MatRef<'a>, c: MatMut<'a>, count: usize) -> Vec<Part<'a>> {
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    let read = |down: usize| {
        let across = count / down;
        (down * across < count, across * m + down * n)
    };
    let down = (1..=count).min_by_key(|d| read(*d)).unwrap_or(1);
    let across = count / down;
    let mut parts = Vec::with_capacity(count);
    let (mut right, mut col) = (c, 0);
    for j in 1..=across {
        // Multiples of a kernel's width, so that no thread has only remainders.
        let to = if j == across {
            n
        } else {
            (n * j / across).next_multiple_of(8).min(n)
        };
        let (mut below, rest) = right.split_cols(to - col);
        let mut row = 0;
        for i in 1..=down {
            let end = if i == down {
                m
            } else {
                (m * i / down).next_multiple_of(48).min(m)
            };
            let (part, rest) = below.split_rows(end - row);
            parts.push((
                a.part(row, end - row, 0, k),
                b.part(0, k, col, to - col),
                part,
            ));
            (below, row) = (rest, end);
        }
        (right, col) = (rest, to);
    }
    parts
}

/// The same on the calling thread.
pub(crate) fn one(simd: Simd, a: MatRef<'_>, b: MatRef<'_>, into: Into, mut c: MatMut<'_>) {
    if c.rows() == 0 || c.cols() == 0 {
        return;
    }
    if a.cols() == 0 {
        if into == Into::Replace {
            c.clear();
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if simd.is_wide() {
        return x86(simd, a, b, into, c);
    }
    portable::gemm(simd, a, b, into, c);
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // the kernels take pointers
fn x86(simd: Simd, a: MatRef<'_>, b: MatRef<'_>, into: Into, mut c: MatMut<'_>) {
    use private_gemm_x86 as kernels;
    let instructions = match simd.level() {
        crate::simd::Level::Avx512 => kernels::InstrSet::Avx512,
        _ => kernels::InstrSet::Avx256,
    };
    let alpha = if into == Into::Subtract { -1.0 } else { 1.0f64 };
    let (a_row, a_col) = a.strides();
    let (b_row, b_col) = b.strides();
    // SAFETY: `gemm` compared the shapes. A and B are readable and C is writable with these strides
    // while the views live. C is exclusive, so it overlaps neither. Strides belong to a live
    // allocation of f64s, so they fit `isize`. The CPU has the instructions: a wide `Simd` is made
    // only after detection. Null pointers mean no index lists and no diagonal. One thread computes.
    unsafe {
        kernels::gemm(
            kernels::DType::F64,
            kernels::IType::U64,
            instructions,
            c.rows(),
            c.cols(),
            a.cols(),
            c.as_mut_ptr().cast(),
            1,
            c.stride() as isize,
            std::ptr::null(),
            std::ptr::null(),
            kernels::DstKind::Full,
            match into {
                Into::Replace => kernels::Accum::Replace,
                Into::Add | Into::Subtract => kernels::Accum::Add,
            },
            a.as_ptr().cast(),
            a_row as isize,
            a_col as isize,
            false,
            std::ptr::null(),
            0,
            b.as_ptr().cast(),
            b_row as isize,
            b_col as isize,
            false,
            (&raw const alpha).cast(),
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::mat::Mat;
    use super::*;
    use crate::digest_hex;
    use crate::rhs::load_case;
    use crate::simd::Level;

    fn random(rows: usize, cols: usize, seed: u64) -> Mat {
        Mat::from_columns(rows, cols, load_case(1, seed, rows * cols))
    }

    /// The definition only.
    fn by_definition(a: MatRef<'_>, b: MatRef<'_>, into: Into, c: &Mat) -> Mat {
        Mat::from_fn(c.rows(), c.cols(), |i, j| {
            let mut value = c.view().at(i, j);
            let k = a.cols();
            for (block, from) in (0..k).step_by(DEPTH).enumerate() {
                let mut acc = 0.0f64;
                for p in from..k.min(from + DEPTH) {
                    acc = a.at(i, p).mul_add(b.at(p, j), acc);
                }
                value = match into {
                    Into::Replace if block == 0 => acc,
                    Into::Replace | Into::Add => value + acc,
                    Into::Subtract => value - acc,
                };
            }
            if k == 0 && into == Into::Replace {
                value = 0.0;
            }
            value
        })
    }

    fn bits(m: &Mat) -> Vec<u64> {
        m.data().iter().map(|v| v.to_bits()).collect()
    }

    fn engines() -> Vec<Engine> {
        let mut all: Vec<Engine> = [1, 2, 3, 4, 6]
            .map(|threads| Engine::new(threads).unwrap())
            .into();
        all.extend(
            [Level::Portable, Level::Avx2, Level::Avx512]
                .map(|level| Engine::with_simd(Simd::at_most(level))),
        );
        all
    }

    #[test]
    fn every_kernel_and_every_number_of_threads_gives_the_bits_of_the_definition() {
        let sizes = [1, 2, 7, 8, 25, 49, 65];
        let depths = [0, 1, 2, 17, 511, 512, 513, 1100];
        let mut engines = engines();
        let mut case = 0u64;
        for (i, m) in sizes.into_iter().enumerate() {
            for (j, n) in sizes.into_iter().enumerate() {
                let k = depths[(3 * i + 5 * j) % depths.len()];
                case += 1;
                let (a, b) = (random(m, k, case), random(k, n, case + 1000));
                let (at, bt) = (a.view().t().to_mat(), b.view().t().to_mat());
                let c = random(m, n, case + 2000);
                let into = [Into::Replace, Into::Add, Into::Subtract][case as usize % 3];
                let expected = bits(&by_definition(a.view(), b.view(), into, &c));
                for engine in &mut engines {
                    for (a, b) in [
                        (a.view(), b.view()),
                        (at.view().t(), b.view()),
                        (a.view(), bt.view().t()),
                    ] {
                        let mut found = c.clone();
                        gemm(engine, a, b, into, found.view_mut());
                        assert!(bits(&found) == expected, "{m} {n} {k} {into:?} {engine:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_part_of_a_larger_matrix_is_computed_and_nothing_beside_it_touched() {
        for engine in &mut engines() {
            let (a, b, c) = (random(90, 70, 1), random(70, 80, 2), random(100, 90, 3));
            let mut found = c.clone();
            let (_, rest) = found.view_mut().split_rows(5);
            let (_, rest) = rest.split_cols(7);
            let (rest, _) = rest.split_rows(90);
            let (part, _) = rest.split_cols(80);
            gemm(engine, a.view(), b.view(), Into::Add, part);
            let inner = c.view().part(5, 90, 7, 80).to_mat();
            let sum = by_definition(a.view(), b.view(), Into::Add, &inner);
            let expected = Mat::from_fn(100, 90, |i, j| {
                if (5..95).contains(&i) && (7..87).contains(&j) {
                    sum.view().at(i - 5, j - 7)
                } else {
                    c.view().at(i, j)
                }
            });
            assert_eq!(bits(&found), bits(&expected), "{engine:?}");
        }
    }

    #[test]
    fn a_larger_product_has_its_golden_digest_with_every_engine() {
        let (a, b) = (random(130, 1100, 1), random(1100, 70, 2));
        for engine in &mut engines() {
            let mut c = Mat::zeros(130, 70);
            gemm(engine, a.view(), b.view(), Into::Replace, c.view_mut());
            assert_eq!(digest_hex(c.data()), GOLDEN, "{engine:?}");
        }
    }

    const GOLDEN: &str = "bb2f87abfdfdf505e586b26330bcd34cf0672d4975a95116450098cf28f5ea9f";
}
