#![allow(clippy::unwrap_used, clippy::expect_used)]
//! The solve gives the same bits however it is cut, threaded or compiled.

use std::path::Path;

use fiec_kernels::cg::{CgError, CgProblem, CgState, CgWork, StateError, accuracy, init, step};
use fiec_kernels::engine::Engine;
use fiec_kernels::rhs::{load_case, right_hand_side};
use fiec_kernels::simd::Simd;
use fiec_kernels::sparse::Csr;
use fiec_kernels::{digest_hex, matrix_market, poisson};
use proptest::prelude::*;

fn dam() -> Csr {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/bcsstk16.mtx");
    matrix_market::read_symmetric_positive_definite_candidate(path).unwrap()
}

fn run(problem: &CgProblem, state: &mut CgState, engine: Engine, iterations: u64) {
    let mut work = CgWork::with_engine(problem, engine);
    for _ in 0..iterations {
        step(problem, state, &mut work).unwrap();
    }
}

#[test]
fn the_dam_after_fifty_iterations_has_its_golden_digest() {
    let a = dam();
    let problem = CgProblem::new(a.clone(), right_hand_side(&a, 1, 1)).unwrap();
    let engines = [
        Engine::default(),
        Engine::with_simd(Simd::portable()),
        Engine::new(2).unwrap(),
        Engine::new(4).unwrap(),
    ];
    for engine in engines {
        let shown = format!("{engine:?}");
        let mut state = init(&problem);
        run(&problem, &mut state, engine, 50);
        assert_eq!(
            [
                digest_hex(&state.x),
                digest_hex(&state.r),
                digest_hex(&state.p)
            ],
            [
                "25c9f8eb9e5d1796c0e39265efe4403ef859269331f8ae4d85e928ca588cd19b",
                "3f9fb0c1167ab4c9127e78eac9774524332650eb8d23752cb728537b06e1afcd",
                "893ff237f507adaf5c83a897c80f16de4fb13b50627f8fe63b83f72a278c9c16"
            ],
            "{shown}"
        );
    }
}

/// The dot product as `reduce` documents it, written plainly.
fn plain_dot(a: &[f64], b: &[f64]) -> f64 {
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

/// Nothing fused, no library kernel: the golden digests are not merely what the code gave once.
#[test]
fn the_solve_is_that_of_its_definition() {
    let a = dam();
    let b = right_hand_side(&a, 1, 1);
    let n = b.len();
    let problem = CgProblem::new(a.clone(), b.clone()).unwrap();
    let mut state = init(&problem);
    run(&problem, &mut state, Engine::default(), 50);

    let d: Vec<f64> = (0..n).map(|i| 1.0 / a.get(i, i).unwrap()).collect();
    let (mut x, mut r) = (vec![0.0f64; n], b);
    let mut z: Vec<f64> = (0..n).map(|i| r[i] * d[i]).collect();
    let mut p = z.clone();
    let mut rz = plain_dot(&r, &z);
    for _ in 0..50 {
        let q: Vec<f64> = (0..n)
            .map(|i| {
                let (columns, values) = a.row(i);
                columns
                    .iter()
                    .zip(values)
                    .fold(0.0f64, |s, (&c, &v)| v.mul_add(p[c as usize], s))
            })
            .collect();
        let alpha = rz / plain_dot(&p, &q);
        for i in 0..n {
            x[i] = alpha.mul_add(p[i], x[i]);
            r[i] = (-alpha).mul_add(q[i], r[i]);
            z[i] = r[i] * d[i];
        }
        let next = plain_dot(&r, &z);
        let beta = next / rz;
        rz = next;
        for i in 0..n {
            p[i] = beta.mul_add(p[i], z[i]);
        }
    }
    let rr = plain_dot(&r, &r);
    assert_eq!(
        CgState {
            x,
            r,
            p,
            rz,
            rr,
            iteration: 50
        }
        .to_bytes(),
        state.to_bytes()
    );
}

#[test]
fn the_dam_is_solved_to_1e_10() {
    let a = dam();
    let problem = CgProblem::new(a.clone(), right_hand_side(&a, 0, 0)).unwrap();
    let (mut state, mut work) = (init(&problem), CgWork::new(&problem));
    while state.relative_residual(&problem) > 1e-10 {
        step(&problem, &mut state, &mut work).unwrap();
    }
    assert_eq!(state.iteration, 232);
    let good = accuracy(&problem, &state.x, &mut work).unwrap();
    assert!(
        good.true_residual < 1.1e-10 && good.backward_error < 1e-10,
        "{good:?}"
    );
    assert_eq!(state.to_bytes().len(), 48 + 3 * 8 * 4884);
}

#[test]
fn an_exhausted_residual_stays_as_it_is() {
    let problem = CgProblem::new(poisson::poisson_2d(5, 5).unwrap(), load_case(1, 1, 25)).unwrap();
    let mut state = init(&problem);
    run(&problem, &mut state, Engine::default(), 10_000);
    assert!(state.is_exhausted(&problem));
    let mut later = state.clone();
    run(&problem, &mut later, Engine::default(), 5);
    assert_eq!(
        later,
        CgState {
            iteration: 10_005,
            ..state
        }
    );

    let zero = CgProblem::new(poisson::poisson_2d(5, 5).unwrap(), vec![0.0; 25]).unwrap();
    let mut state = init(&zero);
    run(&zero, &mut state, Engine::default(), 3);
    assert_eq!((state.iteration, state.relative_residual(&zero)), (3, 0.0));
}

#[test]
fn impossible_problems_are_refused_and_an_indefinite_one_breaks_down() {
    let matrix = |t: &[(u32, u32, f64)]| Csr::from_triplets(2, 2, t).unwrap();
    let one = || vec![1.0, -1.0];
    let spd = [(0, 0, 2.0), (1, 1, 2.0)];
    let new = |t: &[(u32, u32, f64)], b| CgProblem::new(matrix(t), b).map(drop);
    assert_eq!(
        new(&spd[..1], one()),
        Err(CgError::Diagonal { row: 1, value: 0.0 })
    );
    assert_eq!(
        new(&[(0, 1, 1.0)], one()),
        Err(CgError::NotSymmetric { row: 0, col: 1 })
    );
    assert!(matches!(
        new(&spd, vec![1.0]),
        Err(CgError::Length {
            found: 1,
            expected: 2,
            ..
        })
    ));
    assert!(matches!(
        new(&spd, vec![f64::NAN, 0.0]),
        Err(CgError::RightHandSide { index: 0, .. })
    ));
    assert_eq!(new(&spd, vec![1e200, 0.0]), Err(CgError::Overflow));

    let indefinite = matrix(&[(0, 0, 1.0), (0, 1, 3.0), (1, 0, 3.0), (1, 1, 1.0)]);
    let problem = CgProblem::new(indefinite, one()).unwrap();
    let (mut state, mut work) = (init(&problem), CgWork::new(&problem));
    let before = state.clone();
    let broken = step(&problem, &mut state, &mut work).unwrap_err();
    assert!(
        broken.to_string().starts_with("not positive definite"),
        "{broken}"
    );
    assert_eq!(state, before);
}

#[test]
fn bytes_that_are_no_state_are_refused() {
    let state = CgState {
        x: vec![1.0],
        r: vec![2.0],
        p: vec![3.0],
        rz: 1.0,
        rr: 4.0,
        iteration: 7,
    };
    let bytes = state.to_bytes();
    assert_eq!(CgState::from_bytes(&bytes), Ok(state));
    let change = |at: usize, to: u8| {
        let mut b = bytes.clone();
        b[at] = to;
        CgState::from_bytes(&b).unwrap_err()
    };
    assert_eq!(
        CgState::from_bytes(&bytes[..40]),
        Err(StateError::Short { bytes: 40 })
    );
    assert!(matches!(
        CgState::from_bytes(&bytes[..71]),
        Err(StateError::Length {
            n: 1,
            expected: 72,
            bytes: 71
        })
    ));
    assert!(matches!(change(0, 0), StateError::Magic { .. }));
    assert!(matches!(change(8, 9), StateError::Version { found: 9 }));
    assert!(matches!(change(12, 1), StateError::Reserved { found: 1 }));
    assert!(matches!(change(23, 0xff), StateError::Length { .. }));
    assert!(matches!(
        change(39, 0xff),
        StateError::Scalar { what: "r·z", .. }
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Cut anywhere, carried over as bytes, continued with other threads.
    #[test]
    fn a_solve_cut_at_any_iteration_goes_on_with_the_same_bits(
        nx in 1u32..60, ny in 1u32..60, seed: u64, cut in 0u64..40, threads in 1usize..4,
    ) {
        let n = (nx * ny) as usize;
        let problem = CgProblem::new(poisson::poisson_2d(nx, ny).unwrap(), load_case(1, seed, n)).unwrap();
        let mut whole = init(&problem);
        run(&problem, &mut whole, Engine::default(), 40);
        let mut first = init(&problem);
        run(&problem, &mut first, Engine::new(threads).unwrap(), cut);
        let mut second = CgState::from_bytes(&first.to_bytes()).unwrap();
        drop(first);
        run(&problem, &mut second, Engine::with_simd(Simd::portable()), 40 - cut);
        prop_assert_eq!(whole.to_bytes(), second.to_bytes());
    }

    /// Irregular symmetric matrices: the product is that of its definition, bit for bit.
    #[test]
    fn an_irregular_product_is_that_of_its_definition(
        cells in prop::collection::btree_map((0u32..50, 0u32..50), -1e3f64..1e3, 0..300), seed: u64,
    ) {
        let triplets: Vec<_> = cells.iter().map(|(&(i, j), &v)| (i, j, v)).collect();
        let a = Csr::from_triplets(50, 50, &triplets).unwrap();
        let x = load_case(2, seed, 50);
        let mut expected = vec![0.0f64; 50];
        for &(i, j, v) in &triplets {
            expected[i as usize] = v.mul_add(x[j as usize], expected[i as usize]);
        }
        let mut y = vec![0.0; 50];
        for simd in [Simd::detect(), Simd::portable()] {
            a.spmv_with(&mut Engine::with_simd(simd), &x, &mut y);
            let bits = |v: &[f64]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&y), bits(&expected));
        }
    }
}
