//! The factorizations are what they say, to the bit the same with every engine, and their checks
//! see what is wrong.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use fiec_kernels::dense::check::{LuCheck, ProductCheck, QrCheck};
use fiec_kernels::dense::{Into, Mat, gemm, lu, qr};
use fiec_kernels::digest_hex;
use fiec_kernels::engine::Engine;
use fiec_kernels::rhs::load_case;
use fiec_kernels::simd::{Level, Simd};

fn random(rows: usize, cols: usize, seed: u64) -> Mat {
    Mat::from_columns(rows, cols, load_case(1, seed, rows * cols))
}

fn engines() -> Vec<Engine> {
    let mut all: Vec<Engine> = [1, 2, 3, 4].map(|t| Engine::new(t).unwrap()).into();
    all.extend([Level::Portable, Level::Avx2].map(|l| Engine::with_simd(Simd::at_most(l))));
    all
}

fn times(a: &Mat, b: &Mat) -> Mat {
    let mut c = Mat::zeros(a.rows(), b.cols());
    let engine = &mut Engine::default();
    gemm(engine, a.view(), b.view(), Into::Replace, c.view_mut());
    c
}

fn norm(a: &Mat) -> f64 {
    a.data().iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn difference(a: &Mat, b: &Mat) -> f64 {
    norm(&Mat::from_fn(a.rows(), a.cols(), |i, j| {
        a.view().at(i, j) - b.view().at(i, j)
    }))
}

fn lower(f: &Mat) -> Mat {
    Mat::from_fn(f.rows(), f.cols(), |i, j| match i.cmp(&j) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0,
        std::cmp::Ordering::Greater => f.view().at(i, j),
    })
}

fn upper(f: &Mat) -> Mat {
    Mat::from_fn(f.cols(), f.cols(), |i, j| {
        if i <= j { f.view().at(i, j) } else { 0.0 }
    })
}

/// A(rows in their final order).
fn exchanged(a: &Mat, pivots: &[usize]) -> Mat {
    let mut p = a.clone();
    lu::exchange(p.view_mut(), pivots);
    p
}

#[test]
fn lower_times_upper_is_the_exchanged_matrix_for_every_shape_and_block() {
    for (rows, cols) in [(1, 1), (2, 2), (9, 9), (40, 40), (100, 33), (130, 130)] {
        for block in [1, 3, 8, 16, 50, 256] {
            let a = random(rows, cols, 7);
            let mut f = a.clone();
            let pivots = lu::factor(&mut Engine::default(), f.view_mut(), block).unwrap();
            let (l, u) = (lower(&f), upper(&f));
            assert!(l.data().iter().all(|v| v.abs() <= 1.0 + 1e-15));
            let off = difference(&times(&l, &u), &exchanged(&a, &pivots)) / norm(&a);
            assert!(off < 1e-14, "{rows} x {cols}, block {block}: {off:e}");
        }
    }
}

#[test]
fn orthogonal_times_triangular_is_the_matrix_for_every_shape_and_block() {
    for (rows, cols) in [(1, 1), (2, 1), (9, 9), (40, 40), (100, 33), (130, 130)] {
        for block in [1, 3, 8, 16, 50, 256] {
            let a = random(rows, cols, 8);
            let mut f = a.clone();
            let engine = &mut Engine::default();
            let blocks = qr::factor(engine, f.view_mut(), block).unwrap();
            // Q of full size, by applying the reflectors to the identity from the last one on.
            let mut q = Mat::from_fn(rows, rows, |i, j| f64::from(u8::from(i == j)));
            for (k, r) in blocks.iter().enumerate().rev() {
                let (_, part) = q.view_mut().split_rows(k * block);
                qr::apply(engine, r.v.view(), r.t.view().t(), part);
            }
            let r = Mat::from_fn(
                rows,
                cols,
                |i, j| {
                    if i <= j { f.view().at(i, j) } else { 0.0 }
                },
            );
            let off = difference(&times(&q, &r), &a) / norm(&a);
            assert!(off < 1e-14, "{rows} x {cols}, block {block}: {off:e}");
            let identity = Mat::from_fn(rows, rows, |i, j| f64::from(u8::from(i == j)));
            let off = difference(&times(&q.view().t().to_mat(), &q), &identity);
            assert!(off < 1e-13, "{rows} x {cols}, block {block}: {off:e}");
        }
    }
}

#[test]
fn factors_have_their_golden_digests_with_every_engine() {
    let a = random(300, 300, 3);
    for engine in &mut engines() {
        for (block, golden) in [(64, LU_64), (256, LU_256)] {
            let mut f = a.clone();
            lu::factor(engine, f.view_mut(), block).unwrap();
            assert_eq!(digest_hex(f.data()), golden, "LU {block} {engine:?}");
        }
        for (block, golden) in [(64, QR_64), (128, QR_128)] {
            let mut f = a.clone();
            qr::factor(engine, f.view_mut(), block).unwrap();
            assert_eq!(digest_hex(f.data()), golden, "QR {block} {engine:?}");
        }
    }
}

const LU_64: &str = "c7bf0684015234002ede68ade29f6f5b30d55095d651965b6fbff5fa933c60c8";
const LU_256: &str = "6b7fefa05daace5c775569a46b45d850678c4e6366448336b1f868e2095530a1";
const QR_64: &str = "b9567c8d8b3a4c4312b755b2a7f96fdf51647c1594e336f80f5b15ce7d0656f3";
const QR_128: &str = "cd75ca75ab30b5fff1e0c4831e7499e2886d31b3c058ad7e635c4260d2c9de78";

#[test]
fn a_singular_matrix_names_its_column() {
    let mut a = random(60, 60, 5);
    a.view_mut().col_mut(37).fill(0.0);
    for block in [8, 16, 64] {
        let error = lu::factor(&mut Engine::default(), a.clone().view_mut(), block).unwrap_err();
        assert_eq!(error, lu::LuError::Singular { column: 37 }, "{block}");
        assert!(
            error.to_string().contains("column 38 has"),
            "it counts from 1"
        );
    }
}

#[test]
fn columns_of_any_size_and_of_zeros_are_reflected_without_overflow() {
    for scale in [0.0, 1e-310, 1e-200, 1.0, 1e200, 1e307] {
        let a = Mat::from_columns(
            9,
            4,
            load_case(1, 9, 36).iter().map(|v| v * scale).collect(),
        );
        let mut f = a.clone();
        qr::factor(&mut Engine::default(), f.view_mut(), 4).unwrap();
        assert!(f.data().iter().all(|v| v.is_finite()), "{scale:e}");
        let column: f64 = a
            .col(0)
            .iter()
            .map(|v| (v / scale.max(1e-320)).powi(2))
            .sum();
        let expected = column.sqrt() * scale;
        let off = (f.col(0)[0].abs() - expected).abs();
        assert!(off <= 1e-6 * expected, "{scale:e}: {off:e} of {expected:e}");
    }
}

#[test]
fn a_product_passes_its_check_and_a_wrong_element_does_not() {
    let (a, b) = (random(70, 600, 1), random(600, 50, 2));
    let mut c = times(&a, &b);
    let simd = Simd::detect();
    let check = ProductCheck::new(simd, a.view());
    let worst = check.check(simd, b.view(), c.view()).unwrap();
    assert!(worst > 0.0 && worst < check.bound() / 10.0, "{worst:e}");
    let plain = ProductCheck::new(Simd::portable(), a.view());
    let other = plain.check(Simd::portable(), b.view(), c.view()).unwrap();
    assert_eq!(other.to_bits(), worst.to_bits());
    c.view_mut().col_mut(17)[3] += 1e-9;
    let error = check.check(simd, b.view(), c.view()).unwrap_err();
    assert_eq!(error.column, 17);
    assert!(error.to_string().contains("bound"), "{error}");
    c.view_mut().col_mut(2)[3] = f64::NAN;
    assert_eq!(check.check(simd, b.view(), c.view()).unwrap_err().column, 2);
}

/// What a program does: block column by block column, with the check beside it.
fn lu_checked(a: &Mat, block: usize, break_at: Option<usize>) -> Result<(f64, f64), usize> {
    let n = a.cols();
    let engine = &mut Engine::default();
    let mut f = a.clone();
    let mut check = LuCheck::new();
    let mut row_of: Vec<usize> = (0..n).collect();
    for from in (0..n).step_by(block) {
        let width = block.min(n - from);
        // The prefix of a left-looking factorization is that of the whole one.
        let mut prefix = a.view().part(0, n, 0, from + width).to_mat();
        let pivots = lu::factor(engine, prefix.view_mut(), block).unwrap();
        for (i, pivot) in pivots.iter().enumerate().skip(from) {
            row_of.swap(i, *pivot);
        }
        let mut column = prefix.view().part(0, n, from, width).to_mat();
        if let Some(at) = break_at.filter(|at| (from..from + width).contains(at)) {
            column.view_mut().col_mut(at - from)[n / 2] += 1e-7;
        }
        check
            .add(
                engine.simd(),
                a.view().part(0, n, from, width),
                column.view(),
                &row_of,
            )
            .map_err(|e| e.column)?;
        f = prefix;
    }
    assert_eq!(f.cols(), n);
    Ok(check.residual())
}

#[test]
fn factors_pass_their_check_and_wrong_ones_do_not() {
    let a = random(120, 120, 4);
    let (residual, bound) = lu_checked(&a, 32, None).unwrap();
    assert!(residual > 1e-17 && residual < 1e-14, "{residual:e}");
    assert!(bound > residual && bound < 1e-9, "{bound:e}");
    for at in [0, 33, 119] {
        let found = lu_checked(&a, 32, Some(at));
        assert!(found.is_err_and(|column| column >= at), "{at}");
    }
}

#[test]
fn reflectors_pass_their_check_and_wrong_ones_do_not() {
    let a = random(150, 90, 6);
    for broken in [None, Some("r"), Some("v"), Some("t")] {
        let engine = &mut Engine::default();
        let mut f = a.clone();
        let mut blocks = qr::factor(engine, f.view_mut(), 32).unwrap();
        match broken {
            Some("r") => f.view_mut().col_mut(40)[3] += 1e-9,
            Some("v") => blocks[1].v.view_mut().col_mut(4)[50] += 1e-9,
            Some(_) => blocks[1].t.view_mut().col_mut(4)[4] *= 1.0 + 1e-9,
            None => {}
        }
        let mut check = QrCheck::new(150);
        let outcome = blocks.iter().enumerate().try_for_each(|(k, reflectors)| {
            let (from, width) = (32 * k, 32.min(90 - 32 * k));
            let part = |m: &Mat| m.view().part(0, 150, from, width).to_mat();
            check.add(engine, part(&a).view(), part(&f).view(), reflectors)
        });
        assert_eq!(outcome.is_err(), broken.is_some(), "{broken:?} {outcome:?}");
        if broken.is_none() {
            let residual = check.residual();
            assert!(residual > 1e-17 && residual < 1e-14, "{residual:e}");
            assert!(check.orthogonality < check.bound() / 3.0);
        }
    }
}
