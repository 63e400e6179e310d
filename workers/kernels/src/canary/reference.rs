//! The cases again, by plain scalar loops without any kernel of this crate. They follow only the
//! orders of operations that the kernels' documentation promises. So the golden digests do not
//! merely repeat an earlier output of the code.

#![allow(
    clippy::needless_range_loop,
    reason = "definitions are written with indices"
)]

use super::{CASES, STEPS, inputs};
use crate::dense::{Into, Mat};

type Rows = Vec<Vec<f64>>;

fn rows(m: &Mat) -> Rows {
    let view = m.view();
    (0..m.rows())
        .map(|i| (0..m.cols()).map(|j| view.at(i, j)).collect())
        .collect()
}

/// By columns, as a [`Mat`] lies in memory.
fn by_columns(m: &Rows) -> Vec<f64> {
    let cols = m.first().map_or(0, Vec::len);
    (0..cols)
        .flat_map(|j| m.iter().map(move |row| row[j]))
        .collect()
}

/// A part of a matrix.
fn part(m: &Rows, from: usize, count: usize, col: usize, cols: usize) -> Rows {
    m[from..from + count]
        .iter()
        .map(|row| row[col..col + cols].to_vec())
        .collect()
}

fn put(m: &mut Rows, from: usize, col: usize, x: &Rows) {
    for (row, values) in m[from..].iter_mut().zip(x) {
        row[col..col + values.len()].copy_from_slice(values);
    }
}

fn transposed(m: &Rows) -> Rows {
    (0..m[0].len())
        .map(|j| m.iter().map(|row| row[j]).collect())
        .collect()
}

/// `chain512`, see `dense::gemm`.
fn gemm(a: &Rows, b: &Rows, into: Into, c: &mut Rows) {
    let k = b.len();
    for (i, row) in c.iter_mut().enumerate() {
        for (j, value) in row.iter_mut().enumerate() {
            let mut first = true;
            for from in (0..k).step_by(512) {
                let mut acc = 0.0f64;
                for p in from..k.min(from + 512) {
                    acc = a[i][p].mul_add(b[p][j], acc);
                }
                *value = match into {
                    Into::Replace if first => acc,
                    Into::Replace | Into::Add => *value + acc,
                    Into::Subtract => *value - acc,
                };
                first = false;
            }
        }
    }
}

fn product(input: inputs::Product, into: Into) -> Vec<f64> {
    let mut c = rows(&input.c);
    gemm(&rows(&input.a), &rows(&input.b), into, &mut c);
    by_columns(&c)
}

/// See `dense::triangular`.
fn solve(l: &Rows, x: &mut Rows) {
    let (n, cols) = (l.len(), x[0].len());
    if n > 16 {
        let half = (n / 2).next_multiple_of(16);
        let mut top = part(x, 0, half, 0, cols);
        let mut below = part(x, half, n - half, 0, cols);
        solve(&part(l, 0, half, 0, half), &mut top);
        gemm(
            &part(l, half, n - half, 0, half),
            &top,
            Into::Subtract,
            &mut below,
        );
        solve(&part(l, half, n - half, half, n - half), &mut below);
        put(x, 0, 0, &top);
        put(x, half, 0, &below);
        return;
    }
    for j in 0..n {
        for i in j + 1..n {
            for col in 0..cols {
                x[i][col] = (-l[i][j]).mul_add(x[j][col], x[i][col]);
            }
        }
    }
}

/// See `dense::lu`.
fn lu_panel(a: &mut Rows) -> Vec<usize> {
    let (m, n) = (a.len(), a[0].len());
    let mut pivots = Vec::new();
    if n <= 8 {
        for j in 0..n {
            let size = (j..m).fold(0.0f64, |s, i| s.max(a[i][j].abs()));
            let pivot = (j..m).find(|i| a[*i][j].abs() == size).unwrap();
            pivots.push(pivot);
            a.swap(j, pivot);
            let reciprocal = 1.0 / a[j][j];
            for i in j + 1..m {
                a[i][j] *= reciprocal;
                for p in j + 1..n {
                    a[i][p] = (-a[j][p]).mul_add(a[i][j], a[i][p]);
                }
            }
        }
        return pivots;
    }
    let half = (n / 2).next_multiple_of(8);
    let mut left = part(a, 0, m, 0, half);
    let mut right = part(a, 0, m, half, n - half);
    pivots = lu_panel(&mut left);
    for (i, pivot) in pivots.iter().enumerate() {
        right.swap(i, *pivot);
    }
    let mut top = part(&right, 0, half, 0, n - half);
    let mut below = part(&right, half, m - half, 0, n - half);
    solve(&part(&left, 0, half, 0, half), &mut top);
    gemm(
        &part(&left, half, m - half, 0, half),
        &top,
        Into::Subtract,
        &mut below,
    );
    let second = lu_panel(&mut below);
    for (i, pivot) in second.iter().enumerate() {
        left.swap(half + i, half + pivot);
    }
    pivots.extend(second.iter().map(|p| p + half));
    put(a, 0, 0, &left);
    put(a, 0, half, &top);
    put(a, half, half, &below);
    pivots
}

/// 32 lanes, added by halving: see `dense::vector`.
fn lanes32(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0f64; 32];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        lanes[i % 32] = a.mul_add(*b, lanes[i % 32]);
    }
    for half in [16, 8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// See `dense::qr`; returns V and T.
fn qr_panel(a: &mut Rows) -> (Rows, Rows) {
    let (m, n) = (a.len(), a[0].len());
    let mut v = vec![vec![0.0f64; n]; m];
    let mut t = vec![vec![0.0f64; n]; n];
    if n <= 8 {
        let column = |x: &Rows, from: usize, j: usize| -> Vec<f64> {
            x[from..].iter().map(|row| row[j]).collect()
        };
        for j in 0..n {
            let x = column(a, j, j);
            let norm = x[0].mul_add(x[0], lanes32(&x[1..], &x[1..])).sqrt();
            let beta = -norm.copysign(x[0]);
            let tau = (beta - x[0]) / beta;
            let reciprocal = 1.0 / (x[0] - beta);
            let mut own: Vec<f64> = x.iter().map(|v| v * reciprocal).collect();
            own[0] = 1.0;
            a[j][j] = beta;
            for (i, value) in own.iter().enumerate() {
                v[j + i][j] = *value;
                if i > 0 {
                    a[j + i][j] = *value;
                }
            }
            for p in j + 1..n {
                let share = tau * lanes32(&own, &column(a, j, p));
                for (i, value) in own.iter().enumerate() {
                    a[j + i][p] = (-share).mul_add(*value, a[j + i][p]);
                }
            }
            for i in 0..j {
                let mut sum = 0.0f64;
                for p in i..j {
                    sum = t[i][p].mul_add(lanes32(&column(&v, j, p), &own), sum);
                }
                t[i][j] = -tau * sum;
            }
            t[j][j] = tau;
        }
        return (v, t);
    }
    let half = (n / 2).next_multiple_of(8);
    let rest = n - half;
    let mut left = part(a, 0, m, 0, half);
    let mut right = part(a, 0, m, half, rest);
    let (v1, t11) = qr_panel(&mut left);
    let mut w = vec![vec![0.0; rest]; half];
    gemm(&transposed(&v1), &right, Into::Replace, &mut w);
    let mut tw = w.clone();
    gemm(&transposed(&t11), &w, Into::Replace, &mut tw);
    gemm(&v1, &tw, Into::Subtract, &mut right);
    let mut below = part(&right, half, m - half, 0, rest);
    let (v2, t22) = qr_panel(&mut below);
    let v1_below = part(&v1, half, m - half, 0, half);
    let mut cross = vec![vec![0.0; rest]; half];
    gemm(&transposed(&v1_below), &v2, Into::Replace, &mut cross);
    let mut times = cross.clone();
    gemm(&cross, &t22, Into::Replace, &mut times);
    let mut t12 = vec![vec![0.0; rest]; half];
    gemm(&t11, &times, Into::Subtract, &mut t12);
    put(&mut right, half, 0, &below);
    put(a, 0, 0, &left);
    put(a, 0, half, &right);
    put(&mut v, 0, 0, &v1);
    put(&mut v, half, half, &v2);
    put(&mut t, 0, 0, &t11);
    put(&mut t, 0, half, &t12);
    put(&mut t, half, half, &t22);
    (v, t)
}

/// See `reduce`.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let leaf = |(a, b): (&[f64], &[f64])| {
        let mut l = [0.0f64; 8];
        for i in 0..a.len() {
            l[i % 8] = a[i].mul_add(b[i], l[i % 8]);
        }
        ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
    };
    let mut level: Vec<f64> = a.chunks(1024).zip(b.chunks(1024)).map(leaf).collect();
    while level.len() > 1 {
        level = level
            .chunks(2)
            .map(|c| c.iter().copied().reduce(|a, b| a + b).unwrap())
            .collect();
    }
    level[0]
}

fn sparse(a: &crate::sparse::Csr, x: &[f64]) -> Vec<f64> {
    (0..a.rows())
        .map(|i| {
            let (columns, values) = a.row(i);
            let pairs = columns.iter().zip(values);
            pairs.fold(0.0f64, |s, (&c, &v)| v.mul_add(x[c as usize], s))
        })
        .collect()
}

fn cg() -> Vec<f64> {
    let (a, b) = inputs::system().unwrap();
    let n = b.len();
    let d: Vec<f64> = (0..n).map(|i| 1.0 / a.get(i, i).unwrap()).collect();
    let (mut x, mut r) = (vec![0.0f64; n], b);
    let mut z: Vec<f64> = (0..n).map(|i| r[i] * d[i]).collect();
    let mut p = z.clone();
    let mut rz = dot(&r, &z);
    for _ in 0..STEPS {
        let q = sparse(&a, &p);
        let alpha = rz / dot(&p, &q);
        for i in 0..n {
            x[i] = alpha.mul_add(p[i], x[i]);
            r[i] = (-alpha).mul_add(q[i], r[i]);
            z[i] = r[i] * d[i];
        }
        let next = dot(&r, &z);
        let beta = next / rz;
        rz = next;
        for i in 0..n {
            p[i] = beta.mul_add(p[i], z[i]);
        }
    }
    let rr = dot(&r, &r);
    x.extend(r);
    x.extend([rz, rr]);
    x
}

fn compute(name: &str) -> Vec<f64> {
    match name {
        "gemm-511" => product(inputs::factors(511), Into::Subtract),
        "gemm-512" => product(inputs::factors(512), Into::Subtract),
        "gemm-513" => product(inputs::factors(513), Into::Subtract),
        "gemm-1025" => product(inputs::factors(1025), Into::Subtract),
        "gemm-cancellation" => product(inputs::cancelling(), Into::Replace),
        "gemm-denormals" => product(inputs::denormal(), Into::Add),
        "gemm-zeros" => product(inputs::zeros(), Into::Subtract),
        "lu-panel-ties" => {
            let mut a = rows(&inputs::ties());
            let pivots = lu_panel(&mut a);
            let mut values = by_columns(&a);
            values.extend(pivots.iter().map(|p| *p as f64));
            values
        }
        "qr-panel" => {
            let mut a = rows(&inputs::tall());
            let (_, t) = qr_panel(&mut a);
            let mut values = by_columns(&a);
            values.extend(by_columns(&t));
            values
        }
        "triangular-solve" => {
            let (l, b) = inputs::triangle();
            let mut x = rows(&b);
            solve(&rows(&l), &mut x);
            by_columns(&x)
        }
        "dot" => inputs::DOTS
            .map(|n| {
                let (a, b) = inputs::vectors(n);
                dot(&a, &b)
            })
            .to_vec(),
        "spmv" => {
            let a = inputs::irregular().unwrap();
            let x = inputs::vectors(a.cols()).0;
            sparse(&a, &x)
        }
        "cg-20" => cg(),
        other => panic!("no reference for {other}"),
    }
}

#[test]
fn the_golden_digests_are_those_of_the_definitions() {
    let mut wrong = Vec::new();
    for case in &CASES {
        let digest = crate::digest_hex(&compute(case.name));
        if digest != case.golden {
            wrong.push(format!("{}: {digest}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
