//! X ← L⁻¹·X for a lower triangular L with ones on its diagonal.
//!
//! The order: L is halved (the first half a multiple of [`LEAF`]) until at most [`LEAF`] rows are
//! left. Then `X₁ ← L₁₁⁻¹X₁`, `X₂ ← X₂ − L₂₁X₁` by [`mod@super::gemm`], and `X₂ ← L₂₂⁻¹X₂`. In a leaf,
//! by ascending j, `xᵢ ← fma(−lᵢⱼ, xⱼ, xᵢ)` for all i > j.

use super::gemm::{self, Into};
use super::mat::{MatMut, MatRef};
use crate::engine::Engine;
use crate::simd::{Simd, dispatched};

/// Rows that are solved without a product.
pub const LEAF: usize = 16;

/// Columns of X in one pass of a leaf.
const ABREAST: usize = 4;

type Leaf = [[f64; LEAF]; LEAF];

/// X ← L⁻¹·X. Elements on and above the diagonal of `l` are not read.
///
/// # Panics
/// If `l` is not square or has not as many rows as X.
pub fn solve_unit_lower(engine: &mut Engine, l: MatRef<'_>, x: MatMut<'_>) {
    assert_eq!(
        (l.rows(), l.cols()),
        (x.rows(), x.rows()),
        "shapes of a triangular solve"
    );
    let (simd, threads) = (engine.simd(), engine.threads());
    if threads == 1 || l.rows() * l.rows() / 2 * x.cols() < gemm::PARALLEL {
        return one(simd, l, x);
    }
    // The columns of X are independent.
    let columns = x.cols();
    let mut parts = Vec::with_capacity(threads);
    let (mut rest, mut from) = (x, 0);
    for t in 1..=threads {
        let to = (columns * t / threads).next_multiple_of(8).min(columns);
        let (part, right) = rest.split_cols(to - from);
        parts.push(part);
        (rest, from) = (right, to);
    }
    engine.run(parts, |part| one(simd, l, part));
}

pub(crate) fn one(simd: Simd, l: MatRef<'_>, x: MatMut<'_>) {
    let n = l.rows();
    if n > LEAF {
        let half = (n / 2).next_multiple_of(LEAF);
        let (mut top, mut below) = x.split_rows(half);
        one(simd, l.part(0, half, 0, half), top.reborrow());
        let l21 = l.part(half, n - half, 0, half);
        gemm::one(simd, l21, top.view(), Into::Subtract, below.reborrow());
        return one(simd, l.part(half, n - half, half, n - half), below);
    }
    let mut negated = [[0.0; LEAF]; LEAF];
    for (j, column) in negated.iter_mut().enumerate().take(n) {
        for (i, value) in column.iter_mut().enumerate().take(n).skip(j + 1) {
            *value = -l.at(i, j);
        }
    }
    leaf(simd, &negated, x);
}

#[inline(always)]
fn leaf_body(negated: &Leaf, mut x: MatMut<'_>) {
    let (rows, cols) = (x.rows(), x.cols());
    let mut from = 0;
    while from + ABREAST <= cols {
        let mut held = [[0.0; LEAF]; ABREAST];
        let mut columns = x.cols_mut::<ABREAST>(from);
        for (held, column) in held.iter_mut().zip(&columns) {
            held[..rows].copy_from_slice(column);
        }
        substitute(negated, &mut held);
        for (held, column) in held.iter().zip(&mut columns) {
            column.copy_from_slice(&held[..rows]);
        }
        from += ABREAST;
    }
    while from < cols {
        let mut held = [[0.0; LEAF]; 1];
        let column = x.col_mut(from);
        held[0][..rows].copy_from_slice(column);
        substitute(negated, &mut held);
        column.copy_from_slice(&held[0][..rows]);
        from += 1;
    }
}

/// Rows beyond L are zero in `negated` and in `x`.
#[inline(always)]
fn substitute<const K: usize>(negated: &Leaf, x: &mut [[f64; LEAF]; K]) {
    for j in 0..LEAF {
        for x in x.iter_mut() {
            let xj = x[j];
            for i in 0..LEAF {
                x[i] = negated[j][i].mul_add(xj, x[i]);
            }
        }
    }
}

dispatched! { fn leaf(negated: &Leaf, x: MatMut<'_>) = leaf_body }

#[cfg(test)]
mod tests {
    use super::super::mat::Mat;
    use super::*;
    use crate::rhs::load_case;

    #[test]
    fn the_solution_multiplied_gives_the_right_hand_side_with_every_engine() {
        for (n, columns) in [(1, 1), (5, 3), (16, 8), (17, 9), (70, 33), (128, 64)] {
            let l = Mat::from_columns(n, n, load_case(1, 3, n * n));
            let b = Mat::from_columns(n, columns, load_case(2, 3, n * columns));
            let mut expected: Option<Mat> = None;
            let mut engines: Vec<Engine> = [1, 2, 3].map(|t| Engine::new(t).unwrap()).into();
            engines.push(Engine::with_simd(Simd::portable()));
            for engine in &mut engines {
                let mut x = b.clone();
                solve_unit_lower(engine, l.view(), x.view_mut());
                for j in 0..columns {
                    for i in 0..n {
                        let terms = (0..i).map(|p| l.view().at(i, p) * x.view().at(p, j));
                        let (sum, size) = terms.fold((x.view().at(i, j), 0.0f64), |(s, m), t| {
                            (s + t, m.max(t.abs()))
                        });
                        let off = (sum - b.view().at(i, j)).abs();
                        assert!(off <= 1e-13 * (1.0 + size) * n as f64, "{n} {i} {j} {off}");
                    }
                }
                match &expected {
                    Some(expected) => assert_eq!(&x, expected, "{n} {engine:?}"),
                    None => expected = Some(x),
                }
            }
        }
    }
}
