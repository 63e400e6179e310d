//! The kernels of `kernels.cu`, run by the emulated driver, against those of the CPU: bit for bit.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::Arc;

use fiec_cuda::CudaDevices;
use fiec_kernels::cg::{self, CgProblem, CgWork};
use fiec_kernels::dense::{Into, Mat, gemm, lu, qr, triangular};
use fiec_kernels::device::dense::{apply, update};
use fiec_kernels::device::{Arithmetic, CgLimits, CgStop};
use fiec_kernels::engine::Engine;
use fiec_kernels::sparse::Csr;
use fiec_kernels::{matrix_market, poisson, rhs};
use support::{Kind, bits, difference, download, emulator, open, random, upload};

const BUDGET: u64 = 256 << 20;

#[test]
fn a_product_has_the_bits_of_the_cpu_for_every_shape_and_kind_of_number() {
    let Some(emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let mut engine = Engine::default();
    let mut cases = 0;
    for (m, n, k) in [
        (1, 1, 1),
        (2, 3, 5),
        (17, 9, 8),
        (127, 63, 511),
        (128, 64, 512),
        (129, 65, 513),
        (130, 70, 1100),
        (300, 140, 40),
        (5, 3, 2049),
        (64, 200, 1024),
    ] {
        for kind in [Kind::Plain, Kind::Tiny, Kind::Cancelling] {
            for into in [Into::Replace, Into::Add, Into::Subtract] {
                for transposed in [false, true] {
                    cases += 1;
                    if (kind != Kind::Plain) && cases % 2 == 0 {
                        continue;
                    }
                    let seed = cases;
                    let a = random(m, k, seed, kind);
                    let b = random(k, n, seed + 1000, kind);
                    let mut expected = random(m, n, seed + 2000, kind);
                    let stored = if transposed {
                        a.view().t().to_mat()
                    } else {
                        a.clone()
                    };
                    let left = upload(device.as_mut(), stored.view());
                    let right = upload(device.as_mut(), b.view());
                    let to = upload(device.as_mut(), expected.view());
                    let view = left.matrix(stored.rows(), stored.cols());
                    let view = if transposed { view.t() } else { view };
                    device
                        .gemm(
                            Arithmetic::Chain512,
                            view,
                            right.matrix(k, n),
                            into,
                            to.matrix(m, n),
                        )
                        .unwrap();
                    gemm(&mut engine, a.view(), b.view(), into, expected.view_mut());
                    let found = download(device.as_mut(), &to, m, n);
                    assert_eq!(
                        difference(&found, &expected),
                        None,
                        "{m} x {n} x {k}, {kind:?}, {into:?}, transposed {transposed}, seed {seed}"
                    );
                    for buffer in [left, right, to] {
                        device.release(buffer);
                    }
                }
            }
        }
    }
    assert_eq!(device.usage().held, 0);
    drop(device);
    emulator.assert_empty(0);
}

#[test]
fn a_product_of_parts_leaves_what_is_around_them() {
    let Some(_emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let (a, b) = (
        random(150, 600, 1, Kind::Plain),
        random(600, 90, 2, Kind::Plain),
    );
    let mut expected = random(160, 100, 3, Kind::Plain);
    let (left, right) = (
        upload(device.as_mut(), a.view()),
        upload(device.as_mut(), b.view()),
    );
    let to = upload(device.as_mut(), expected.view());
    device
        .gemm(
            Arithmetic::Chain512,
            left.matrix(150, 600).part(7, 131, 3, 555),
            right.matrix(600, 90).part(20, 555, 5, 67),
            Into::Subtract,
            to.matrix(160, 100).part(11, 131, 13, 67),
        )
        .unwrap();
    let (_, rest) = expected.view_mut().split_rows(11);
    let (part, _) = rest.split_rows(131);
    let (_, part) = part.split_cols(13);
    let (part, _) = part.split_cols(67);
    gemm(
        &mut Engine::default(),
        a.view().part(7, 131, 3, 555),
        b.view().part(20, 555, 5, 67),
        Into::Subtract,
        part,
    );
    let found = download(device.as_mut(), &to, 160, 100);
    assert_eq!(difference(&found, &expected), None);
}

#[test]
fn nothing_times_nothing_is_zero_where_it_replaces_and_nothing_elsewhere() {
    let Some(_emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let c = random(5, 4, 1, Kind::Plain);
    let empty = device.allocate(1).unwrap();
    for (into, expected) in [(Into::Replace, Mat::zeros(5, 4)), (Into::Add, c.clone())] {
        let to = upload(device.as_mut(), c.view());
        let (a, b) = (empty.matrix(5, 0), empty.matrix(0, 4));
        let c = to.matrix(5, 4);
        device.gemm(Arithmetic::Chain512, a, b, into, c).unwrap();
        assert_eq!(download(device.as_mut(), &to, 5, 4), expected);
    }
}

#[test]
fn a_triangular_solve_has_the_bits_of_the_cpu_zeros_with_their_signs_included() {
    let Some(_emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    for (n, cols) in [(1, 1), (5, 3), (16, 130), (17, 9), (70, 33), (130, 20)] {
        for kind in [Kind::Plain, Kind::Tiny] {
            let mut l = random(n, n, 7, kind);
            // Zeros and minus zeros: fma(−0, x, −0) is not what it seems.
            if kind == Kind::Tiny {
                let mut view = l.view_mut();
                (0..n).for_each(|j| view.col_mut(j)[n / 2..].fill(0.0));
            }
            let mut expected = random(n, cols, 8, kind);
            let (left, x) = (
                upload(device.as_mut(), l.view()),
                upload(device.as_mut(), expected.view()),
            );
            device
                .solve_unit_lower(Arithmetic::Chain512, left.matrix(n, n), x.matrix(n, cols))
                .unwrap();
            triangular::solve_unit_lower(&mut Engine::default(), l.view(), expected.view_mut());
            let found = download(device.as_mut(), &x, n, cols);
            assert_eq!(difference(&found, &expected), None, "{n} {cols} {kind:?}");
        }
    }
}

/// The hybrid: panels on the host, all else on the device.
#[test]
fn lu_with_its_updates_on_the_device_has_the_bits_of_the_cpu() {
    let Some(_emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let mut engine = Engine::default();
    for (n, block) in [(90, 24), (200, 64), (75, 100)] {
        let a = random(n, n, 11, Kind::Plain);
        let mut expected = a.clone();
        let expected_pivots = lu::factor(&mut engine, expected.view_mut(), block).unwrap();
        let mut found = a.clone();
        let mut pivots: Vec<usize> = Vec::new();
        for from in (0..n).step_by(block) {
            let width = block.min(n - from);
            let part = found.view().part(0, n, from, width).to_mat();
            let x = upload(device.as_mut(), part.view());
            let part = x.matrix(n, width);
            device.exchange(part, &pivots).unwrap();
            for at in (0..from).step_by(block) {
                let finished = found.view().part(at, n - at, at, block).to_mat();
                let l = upload(device.as_mut(), finished.view());
                let (_, rows) = part.split_rows(at);
                let l_part = l.matrix(n - at, block);
                update(device.as_mut(), Arithmetic::Chain512, l_part, rows).unwrap();
                device.release(l);
            }
            let mut column = download(device.as_mut(), &x, n, width);
            device.release(x);
            let mut own = vec![0; width];
            let (_, panel) = column.view_mut().split_rows(from);
            lu::panel(&mut engine, panel, &mut own).unwrap();
            let (mut left, right) = found.view_mut().split_cols(from);
            let (_, below) = left.reborrow().split_rows(from);
            lu::exchange(below, &own);
            let (mut to, _) = right.split_cols(width);
            to.copy_from(column.view());
            pivots.extend(own.iter().map(|p| p + from));
        }
        assert_eq!(pivots, expected_pivots, "{n}");
        assert_eq!(difference(&found, &expected), None, "{n} {block}");
    }
    assert_eq!(device.usage().held, 0);
}

#[test]
fn qr_with_its_updates_on_the_device_has_the_bits_of_the_cpu() {
    let Some(_emulator) = emulator() else { return };
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let mut engine = Engine::default();
    for (rows, cols, block) in [(90, 70, 24), (700, 60, 32)] {
        let a = random(rows, cols, 12, Kind::Plain);
        let mut expected = a.clone();
        let all = qr::factor(&mut engine, expected.view_mut(), block).unwrap();
        let mut found = a.clone();
        for (i, from) in (0..cols).step_by(block).enumerate() {
            let width = block.min(cols - from);
            let part = found.view().part(0, rows, from, width).to_mat();
            let x = upload(device.as_mut(), part.view());
            for (j, made) in all.iter().enumerate().take(i) {
                let v = upload(device.as_mut(), made.v.view());
                let t = upload(device.as_mut(), made.t.view());
                let scratch = device.allocate(2 * block * width).unwrap();
                let (_, part) = x.matrix(rows, width).split_rows(j * block);
                let both = (
                    v.matrix(made.v.rows(), block),
                    t.matrix(block, made.t.cols()),
                );
                apply(device.as_mut(), Arithmetic::Chain512, both, part, &scratch).unwrap();
                for buffer in [v, t, scratch] {
                    device.release(buffer);
                }
            }
            let mut column = download(device.as_mut(), &x, rows, width);
            device.release(x);
            let (_, own) = column.view_mut().split_rows(from);
            let made = qr::panel(&mut engine, own).unwrap();
            assert_eq!(bits(&made.v), bits(&all[i].v), "V of {i}");
            let (_, right) = found.view_mut().split_cols(from);
            let (mut to, _) = right.split_cols(width);
            to.copy_from(column.view());
        }
        assert_eq!(difference(&found, &expected), None, "{rows} x {cols}");
    }
}

fn solve_both_ways(a: Arc<Csr>, tolerance: f64, most: u64, stops: &[u64]) {
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    let b = rhs::right_hand_side(&a, 1, 5);
    let problem = CgProblem::new(a, b).unwrap();
    let mut work = CgWork::new(&problem);
    let mut expected = cg::init(&problem);
    let mut found = cg::init(&problem);
    device.cg_begin(&problem, &found).unwrap();
    let mut ended = false;
    for steps in stops.iter().cycle() {
        let limits = CgLimits {
            steps: *steps,
            tolerance,
            most,
        };
        let (scalars, stop) = device.cg_advance(limits).unwrap();
        for _ in 0..*steps {
            if expected.relative_residual(&problem) <= tolerance || expected.iteration >= most {
                break;
            }
            cg::step(&problem, &mut expected, &mut work).unwrap();
        }
        assert_eq!(scalars.iteration, expected.iteration);
        assert_eq!(scalars.rr.to_bits(), expected.rr.to_bits());
        device.cg_read(&mut found).unwrap();
        assert_eq!(found, expected, "after {} iterations", expected.iteration);
        if stop != CgStop::Steps {
            let converged = expected.relative_residual(&problem) <= tolerance;
            let right = if converged {
                CgStop::Converged
            } else {
                CgStop::Most
            };
            assert_eq!(stop, right);
            ended = true;
            break;
        }
        assert!(expected.iteration <= most);
    }
    assert!(ended);
    assert!(device.usage().held > 0);
    device.cg_end();
    assert_eq!(device.usage().held, 0);
}

#[test]
fn conjugate_gradients_have_the_bits_of_the_cpu_at_every_stop() {
    let Some(emulator) = emulator() else { return };
    // A constant diagonal, one leaf and a bit; then a real matrix of five leaves.
    let grid = Arc::new(poisson::poisson_2d(37, 29).unwrap());
    solve_both_ways(grid, 1e-10, 1000, &[1, 2, 7, 30]);
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/data/bcsstk16.mtx"
    );
    let real =
        matrix_market::read_symmetric_positive_definite_candidate(std::path::Path::new(path))
            .unwrap();
    solve_both_ways(Arc::new(real), 1e-3, 1000, &[10, 64]);
    // More iterations than there may be, and a residual that is exhausted before it is enough.
    let small = Arc::new(poisson::poisson_2d(6, 5).unwrap());
    solve_both_ways(Arc::clone(&small), 1e-12, 4, &[3]);
    solve_both_ways(small, 1e-300, 400, &[50, 129]);
    emulator.assert_empty(0);
}

#[test]
fn a_matrix_that_is_not_positive_definite_is_refused_as_on_the_cpu() {
    let Some(_emulator) = emulator() else { return };
    let triplets = [(0, 0, 1.0), (0, 1, 3.0), (1, 0, 3.0), (1, 1, 1.0)];
    let a = Csr::from_triplets(2, 2, &triplets).unwrap();
    let problem = CgProblem::new(a, vec![1.0, -2.0]).unwrap();
    let mut state = cg::init(&problem);
    let devices = CudaDevices::default();
    let mut device = open(&devices, BUDGET);
    device.cg_begin(&problem, &state).unwrap();
    let limits = CgLimits {
        steps: 10,
        tolerance: 1e-10,
        most: 100,
    };
    let (_, stop) = device.cg_advance(limits).unwrap();
    let mut work = CgWork::new(&problem);
    let expected = (0..10).find_map(|_| cg::step(&problem, &mut state, &mut work).err());
    assert_eq!(stop, CgStop::Broken(expected.unwrap()));
}
