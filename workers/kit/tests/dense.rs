//! The dense programs: cut anywhere and resumed they end in the same bits, whatever the threads;
//! their outputs are the factors; what is wrong is refused by field, file and rule.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use fiec_kernels::dense::{Into, Mat, gemm};
use fiec_kernels::engine::Engine;
use fiec_kernels::npy;
use fiec_kernels::rhs::load_case;
use fiec_kit::local::{LocalOutcome, run_cut, run_local};
use fiec_kit::program::{Capsule, Fetch, Inputs, ProgramError, Step};
use fiec_kit::programs;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{CG, GEMM, LU, QR};
use serde_json::{Value, json};

fn cases() -> [(&'static str, Value); 4] {
    let random = |rows: u64, cols: u64, seed: u64| json!({ "random": { "rows": rows, "cols": cols, "seed": seed } });
    [
        (
            GEMM,
            json!({ "a": random(70, 90, 1), "b": random(90, 50, 2), "tile": 32 }),
        ),
        (LU, json!({ "matrix": random(90, 90, 3), "block": 20 })),
        (QR, json!({ "matrix": random(90, 70, 4), "block": 20 })),
        (QR, json!({ "matrix": random(33, 1, 5) })),
    ]
}

fn output(outcome: &LocalOutcome, name: &str) -> Vec<u8> {
    let found = outcome.outputs.iter().find(|o| o.name == name);
    found
        .unwrap_or_else(|| panic!("no output {name}"))
        .bytes
        .clone()
}

fn times(a: &Mat, b: &Mat) -> Mat {
    let mut c = Mat::zeros(a.rows(), b.cols());
    gemm(
        &mut Engine::default(),
        a.view(),
        b.view(),
        Into::Replace,
        c.view_mut(),
    );
    c
}

fn random(rows: usize, cols: usize, seed: u64) -> Mat {
    let columns = (0..cols).flat_map(|j| load_case(j as u64, seed, rows));
    Mat::from_columns(rows, cols, columns.collect())
}

fn close(a: &Mat, b: &Mat) {
    let off = a.data().iter().zip(b.data()).map(|(a, b)| (a - b).abs());
    let off = off.fold(0.0, f64::max);
    assert!(off < 1e-12, "{off:e}");
}

/// Everything that was made, in order.
struct Made(Vec<Vec<u8>>);

impl Fetch for Made {
    fn fetch(&mut self, digest: Digest, bytes: u64) -> Result<Vec<u8>, ProgramError> {
        let found = self.0.iter().find(|made| Digest::of(made) == digest);
        let found = found.ok_or_else(|| ProgramError::Permanent(format!("no object {digest}")))?;
        assert!(bytes == 0 || bytes == found.len() as u64);
        Ok(found.clone())
    }
}

#[test]
fn cut_at_every_boundary_they_end_in_the_same_bits() {
    for (program, params) in cases() {
        let whole = run_local(program, &params).unwrap();
        assert!(whole.digest.is_some() && whole.capsules > 0);
        for every in [1, 2, 3] {
            let inputs = &mut Inputs::default();
            let cut = run_cut(program, &params, inputs, |i| i % every == 0).unwrap();
            assert_eq!((&cut.result, cut.capsules), (&whole.result, whole.capsules));
            assert_eq!(cut.outputs, whole.outputs, "{program} {every}");
        }
    }
}

#[test]
fn results_have_their_golden_digests_whatever_the_threads() {
    let golden = [
        "873ae0ecdf2cc86b903cb0b41542cd8dcfcda6f3aff1baa63d3691e2e71963e9",
        "4fcfc6aaa74135abb7dad0f65027f376985c83a332c6c4cbb05383d391a78284",
        "49c8a91357fc6b1137f58bb47e6fb4306e8c44f11d32c04cee3bf012f176a70d",
        "ace68aecae477a17e2d6d51ddd8a511e149d08856fd619a025f606bf9a85f3b1",
    ];
    for ((program, params), golden) in cases().into_iter().zip(golden) {
        for threads in [1, 2, 4] {
            let mut params = params.clone();
            params["threads"] = threads.into();
            let found = run_local(program, &params).unwrap().digest.unwrap();
            assert_eq!(found.to_string(), golden, "{program} {threads}");
        }
    }
}

#[test]
fn a_program_that_is_told_nothing_and_holds_nothing_fetches_what_it_needs() {
    for (program, params) in cases() {
        let whole = run_local(program, &params).unwrap();
        let inputs = &mut Inputs::default();
        let (mut state, mut outputs) = (None::<Vec<u8>>, Vec::new());
        // Without room to keep a block, each capsule fetches all of them; with it, none twice.
        let grant = Grant {
            threads: Some(2),
            memory_bytes: Some(4),
            ..Grant::default()
        };
        for index in 0.. {
            let mut instance = programs::start(program, None, &params, inputs).unwrap();
            instance.configure(&grant).unwrap();
            instance.resume(state.as_deref()).unwrap();
            let mut cx = Capsule::with_fetch(index, Box::new(Made(outputs.clone())));
            let step = instance.capsule(&mut cx).unwrap();
            outputs.extend(cx.outputs().iter().map(|o| o.bytes.clone()));
            if let Step::Complete { result } = step {
                assert_eq!(result, whole.result, "{program}");
                break;
            }
            let mut bytes = Vec::new();
            instance.encode(&mut bytes, &mut cx).unwrap();
            state = Some(bytes);
        }
        let all: Vec<_> = whole.outputs.iter().map(|o| o.bytes.clone()).collect();
        assert_eq!(outputs, all, "{program}");
    }
}

#[test]
fn a_warm_program_serves_a_second_execution_from_its_beginning() {
    for (program, params) in cases() {
        let whole = run_local(program, &params).unwrap();
        let instance =
            &mut programs::start(program, None, &params, &mut Inputs::default()).unwrap();
        for _ in 0..2 {
            instance.resume(None).unwrap();
            let mut cx = Capsule::default();
            let result = loop {
                if let Step::Complete { result } = instance.capsule(&mut cx).unwrap() {
                    break result;
                }
            };
            assert_eq!(result, whole.result, "{program}");
        }
    }
}

#[test]
fn a_grant_that_changes_at_every_boundary_changes_no_bit() {
    let cg = json!({ "matrix": { "poisson2d": { "n": 40 } }, "threads": 4, "load_cases": 2 });
    for (program, mut params) in cases().into_iter().chain([(CG, cg)]) {
        let whole = run_local(program, &params).unwrap();
        params["threads"] = 4.into();
        let instance =
            &mut programs::start(program, None, &params, &mut Inputs::default()).unwrap();
        instance.resume(None).unwrap();
        let mut cx = Capsule::default();
        let result = (0u32..)
            .find_map(|boundary| {
                let grant = Grant {
                    threads: Some(boundary % 5),
                    memory_bytes: Some(u64::from(boundary % 3) << 17),
                    ..Grant::default()
                };
                instance.configure(&grant).unwrap();
                match instance.capsule(&mut cx).unwrap() {
                    Step::Complete { result } => Some(result),
                    Step::Boundary => None,
                }
            })
            .unwrap();
        assert_eq!(result, whole.result, "{program}");
    }
}

#[test]
fn any_shape_cut_anywhere_ends_in_the_same_bits() {
    for seed in 0u64..40 {
        let draws = load_case(7, seed, 8);
        let below = |i: usize, limit: u64| 1 + ((draws[i] + 1.0) / 2.0 * limit as f64) as u64;
        let (m, n, k, block) = (below(0, 60), below(1, 60), below(2, 60), below(3, 30));
        let random =
            |rows, cols, of| json!({ "random": { "rows": rows, "cols": cols, "seed": seed + of } });
        for (program, params) in [
            (
                GEMM,
                json!({ "a": random(m, k, 0), "b": random(k, n, 1), "tile": block }),
            ),
            (
                LU,
                json!({ "matrix": random(m, m, 2), "block": block, "threads": below(4, 3) }),
            ),
            (
                QR,
                json!({ "matrix": random(m.max(n), m.min(n), 3), "block": block }),
            ),
        ] {
            let whole = run_local(program, &params);
            let whole = whole.unwrap_or_else(|error| panic!("seed {seed}, {params}: {error}"));
            let cut = run_cut(program, &params, &mut Inputs::default(), |i| {
                draws[(i % 8) as usize] > 0.0
            });
            let cut = cut.unwrap();
            assert_eq!(
                (cut.result, cut.outputs),
                (whole.result, whole.outputs),
                "seed {seed}: {program} {params}"
            );
        }
    }
}

#[test]
fn the_outputs_of_a_product_are_its_tiles() {
    let outcome = run_local(GEMM, &cases()[0].1).unwrap();
    let c = times(&random(70, 90, 1), &random(90, 50, 2));
    assert_eq!(outcome.outputs.len(), 6);
    for (i, height) in [(0, 32), (1, 32), (2, 6)] {
        for (j, width) in [(0, 32), (1, 18)] {
            let tile = npy::parse(&output(&outcome, &format!("c-{i}-{j}"))).unwrap();
            let expected = c.view().part(32 * i, height, 32 * j, width).to_mat();
            assert_eq!(tile, expected, "{i} {j}");
        }
    }
    let (residual, bound) = (&outcome.result["residual"], &outcome.result["bound"]);
    assert!(residual.as_f64().unwrap() < bound.as_f64().unwrap());
}

#[test]
fn ranges_of_tiles_together_are_the_whole_product() {
    let mut params = cases()[0].1.clone();
    let whole = run_local(GEMM, &params).unwrap();
    let mut together = Vec::new();
    for (from, to) in [(0, 1), (1, 5), (5, 6)] {
        params["tiles"] = json!({ "from": from, "to": to });
        let part = run_local(GEMM, &params).unwrap();
        assert_eq!(part.capsules, to - from);
        together.extend(part.outputs);
    }
    assert_eq!(together, whole.outputs);
    params["tiles"] = json!({ "from": 0, "to": 7 });
    let error = run_local(GEMM, &params).unwrap_err().to_string();
    assert!(
        error.contains("params.tiles.to") && error.contains('6'),
        "{error}"
    );
}

#[test]
fn lower_times_upper_is_the_exchanged_matrix_as_the_documentation_puts_them_together() {
    let outcome = run_local(LU, &cases()[1].1).unwrap();
    let columns = (0..5).flat_map(|k| {
        npy::parse(&output(&outcome, &format!("lu-{k}")))
            .unwrap()
            .into_data()
    });
    let mut f = Mat::from_columns(90, 90, columns.collect());
    let pivots = output(&outcome, "pivots");
    let (words, _) = pivots[pivots.len() - 8 * 90..].as_chunks::<8>();
    let mut a = random(90, 90, 3);
    for (i, word) in words.iter().enumerate() {
        let pivot = usize::try_from(u64::from_le_bytes(*word)).unwrap();
        let (mut done, _) = f.view_mut().split_cols(i / 20 * 20);
        done.swap_rows(i, pivot);
        a.view_mut().swap_rows(i, pivot);
    }
    let l = Mat::from_fn(90, 90, |i, j| match i.cmp(&j) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0,
        std::cmp::Ordering::Greater => f.view().at(i, j),
    });
    let u = Mat::from_fn(90, 90, |i, j| if i <= j { f.view().at(i, j) } else { 0.0 });
    close(&times(&l, &u), &a);
    let (residual, bound) = (&outcome.result["residual"], &outcome.result["bound"]);
    assert!(residual.as_f64().unwrap() < 1e-14 && bound.as_f64().unwrap() < 1e-9);
}

#[test]
fn reflectors_applied_to_the_triangle_give_the_matrix() {
    let outcome = run_local(QR, &cases()[2].1).unwrap();
    let mut x = Mat::zeros(90, 70);
    let files: Vec<Mat> = (0..4)
        .map(|k| npy::parse(&output(&outcome, &format!("qr-{k}"))).unwrap())
        .collect();
    for (k, file) in files.iter().enumerate() {
        for j in 0..file.cols() {
            let column = 20 * k + j;
            x.view_mut().col_mut(column)[..=column].copy_from_slice(&file.col(j)[..=column]);
        }
    }
    for (k, file) in files.iter().enumerate().rev() {
        let (from, width) = (20 * k, file.cols());
        let v = Mat::from_fn(90 - from, width, |i, j| match i.cmp(&j) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => file.view().at(from + i, j),
        });
        let t = file.view().part(90, width, 0, width).to_mat();
        let below = x.view().part(from, 90 - from, 0, 70).to_mat();
        let turned = times(&v, &times(&t, &times(&v.view().t().to_mat(), &below)));
        for j in 0..70 {
            for i in 0..90 - from {
                x.view_mut().col_mut(j)[from + i] -= turned.view().at(i, j);
            }
        }
    }
    close(&x, &random(90, 70, 4));
    for figure in ["residual", "orthogonality"] {
        let found = outcome.result[figure].as_f64().unwrap();
        assert!(
            found < outcome.result["bound"].as_f64().unwrap(),
            "{figure}"
        );
    }
}

/// A store that damages one number of what it gives.
struct Damaging(Made);

impl Fetch for Damaging {
    fn fetch(&mut self, digest: Digest, bytes: u64) -> Result<Vec<u8>, ProgramError> {
        let mut found = self.0.fetch(digest, bytes)?;
        let block = npy::parse(&found).unwrap();
        let mut data = block.data().to_vec();
        data[50] += 1e-6;
        found.truncate(found.len() - 8 * data.len());
        found.extend(data.iter().flat_map(|v| v.to_le_bytes()));
        Ok(found)
    }
}

#[test]
fn a_damaged_block_ends_in_a_permanent_failure_that_names_what_was_found_and_the_bound() {
    for (program, params) in &cases()[1..3] {
        let inputs = &mut Inputs::default();
        let mut first = programs::start(program, None, params, inputs).unwrap();
        first.resume(None).unwrap();
        let mut cx = Capsule::default();
        assert_eq!(first.capsule(&mut cx), Ok(Step::Boundary));
        let mut state = Vec::new();
        first.encode(&mut state, &mut cx).unwrap();
        let outputs = cx.outputs().iter().map(|o| o.bytes.clone()).collect();
        let mut second = programs::start(program, None, params, inputs).unwrap();
        second.resume(Some(&state)).unwrap();
        let mut cx = Capsule::with_fetch(1, Box::new(Damaging(Made(outputs))));
        let error = second.capsule(&mut cx).unwrap_err();
        assert!(error.is_permanent(), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("block column 1") && text.contains("over its bound of"),
            "{text}"
        );
    }
}

#[test]
fn files_and_objects_are_read_as_npy_or_matrix_market() {
    let folder = tempfile::tempdir().unwrap();
    let a = random(20, 20, 9);
    let (npy_file, mtx_file) = (folder.path().join("a.npy"), folder.path().join("a.mtx"));
    std::fs::write(&npy_file, npy::matrix(a.view())).unwrap();
    let mut text = "%%MatrixMarket matrix coordinate real general\n20 20 400\n".to_owned();
    for j in 0..20 {
        for i in 0..20 {
            text += &format!("{} {} {:e}\n", i + 1, j + 1, a.view().at(i, j));
        }
    }
    std::fs::write(&mtx_file, text).unwrap();
    let array_file = folder.path().join("array.mtx");
    let mut text = "%%MatrixMarket matrix array real general\n20 20\n".to_owned();
    for value in a.data() {
        text += &format!("{value:e}\n");
    }
    std::fs::write(&array_file, text).unwrap();
    let expected = run_local(
        LU,
        &json!({ "matrix": { "random": { "n": 20, "seed": 9 } } }),
    );
    let expected = expected.unwrap().result;
    for path in [&npy_file, &mtx_file, &array_file] {
        let found = run_local(LU, &json!({ "matrix": { "file": path } })).unwrap();
        assert_eq!(found.result, expected);
        let bytes = std::fs::read(path).unwrap();
        let params = json!({ "matrix": { "object": Digest::of(&bytes) } });
        let mut inputs = Inputs::default().with_fetch(Box::new(Made(vec![bytes])));
        let found = run_cut(LU, &params, &mut inputs, |_| true).unwrap();
        assert_eq!(found.result, expected);
    }
    let symmetric = b"%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 4\n2 2 5\n";
    let mut inputs = Inputs::default().with_fetch(Box::new(Made(vec![symmetric.to_vec()])));
    let params = json!({ "matrix": { "object": Digest::of(symmetric) } });
    let found = run_cut(CG, &params, &mut inputs, |_| true).unwrap();
    assert_eq!(found.result["n"], 2);
}

#[test]
fn bad_input_names_parameter_file_and_rule() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        json!({ "file": path })
    };
    let square = json!({ "random": { "n": 4 } });
    let wide = npy::matrix(random(3, 4, 1).view());
    let mtx = |body: &str| format!("%%MatrixMarket matrix coordinate real general\n{body}");
    let big = mtx(&format!("%{}\n99999 99999 1\n1 1 1\n", " ".repeat(100_000)));
    let singular = mtx("3 3 2\n1 1 1\n3 3 1\n");
    for (program, params, words) in [
        (
            LU,
            json!({ "matrix": file("w.npy", &wide) }),
            &["params.matrix", "3 x 4"][..],
        ),
        (
            QR,
            json!({ "matrix": file("w.npy", &wide) }),
            &["params.matrix", "3 x 4"],
        ),
        (
            GEMM,
            json!({ "a": file("w.npy", &wide), "b": file("w.npy", &wide) }),
            &["params.b", "columns (4)", "has 3"],
        ),
        (
            GEMM,
            json!({ "a": square, "b": file("cut.npy", &wide[..wide.len() - 1]) }),
            &["cut.npy", "95 bytes of data"],
        ),
        (
            LU,
            json!({ "matrix": file("x.txt", b"hello") }),
            &["x.txt", "neither", "%%MatrixMarket matrix coordinate|array"],
        ),
        (
            LU,
            json!({ "matrix": file("bad.mtx", mtx("2 2 1\n3 1 1\n").as_bytes()) }),
            &["bad.mtx:3", "outside"],
        ),
        (
            LU,
            json!({ "matrix": file("big.mtx", big.as_bytes()) }),
            &["big.mtx:3", "the number of elements is more than"],
        ),
        (
            LU,
            json!({ "matrix": { "file": "/nowhere.npy" } }),
            &["/nowhere.npy", "cannot be read"],
        ),
        (
            LU,
            json!({ "matrix": { "file": folder.path() } }),
            &["not a regular file"],
        ),
        (
            LU,
            json!({ "matrix": file("s.mtx", singular.as_bytes()) }),
            &["singular", "column 2 has"],
        ),
        (
            LU,
            json!({ "matrix": { "object": Digest::of(b"x") } }),
            &["no object store"],
        ),
    ] {
        let error = run_local(program, &params).unwrap_err();
        let text = error.to_string();
        assert!(
            error.is_permanent() && words.iter().all(|w| text.contains(w)),
            "{program} {params}: {text}"
        );
    }
}

#[test]
fn bytes_that_are_no_state_are_refused() {
    for (program, params) in cases() {
        let inputs = &mut Inputs::default();
        let mut instance = programs::start(program, None, &params, inputs).unwrap();
        instance.resume(None).unwrap();
        let mut cx = Capsule::default();
        instance.capsule(&mut cx).unwrap();
        let mut good = Vec::new();
        instance.encode(&mut good, &mut cx).unwrap();
        assert_eq!(instance.resume(Some(&good)), Ok(()));
        let longer = [&good[..], &[0]].concat();
        let mut huge = good.clone();
        huge[8..56].fill(0xff);
        for bad in [&[][..], b"FIEC", &good[..good.len() - 1], &longer, &huge] {
            let error = instance.resume(Some(bad)).unwrap_err();
            assert!(error.is_permanent() && error.to_string().contains("not a state"));
        }
    }
}
