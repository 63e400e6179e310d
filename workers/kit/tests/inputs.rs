//! Parameters come from submitters: they reach no file outside the folders of inputs, and no error
//! says what a file holds.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use fiec_kit::program::{Inputs, ProgramError};
use fiec_kit::programs;
use fiec_schemas::programs::{CG, GEMM, LU, QR, SYNTHETIC};
use serde_json::{Value, json};

const SECRET: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
const MATRIX: &str = "%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 4\n2 2 5\n";

/// A folder of inputs with a matrix, and secrets beside it.
struct Place {
    all: tempfile::TempDir,
    inputs: PathBuf,
}

impl Place {
    fn new() -> Self {
        let all = tempfile::tempdir().unwrap();
        let inputs = all.path().join("inputs");
        std::fs::create_dir_all(inputs.join("sub")).unwrap();
        std::fs::write(inputs.join("sub/a.mtx"), MATRIX).unwrap();
        std::fs::write(inputs.join("key"), SECRET).unwrap();
        std::fs::write(all.path().join("key"), SECRET).unwrap();
        symlink("../key", inputs.join("link")).unwrap();
        symlink(all.path(), inputs.join("up")).unwrap();
        Self { all, inputs }
    }
}

fn params(program: &str, file: &Value) -> Value {
    match program {
        GEMM => json!({ "a": { "file": file }, "b": { "random": { "n": 2 } } }),
        _ => json!({ "matrix": { "file": file } }),
    }
}

fn start(program: &str, params: &Value, mut inputs: Inputs) -> Result<(), ProgramError> {
    programs::start(program, None, params, &mut inputs).map(drop)
}

#[test]
fn a_submitter_reads_no_file_outside_the_folders_of_inputs() {
    let place = Place::new();
    let outside = place.all.path().join("key").display().to_string();
    let climbing = place.inputs.join("../key").display().to_string();
    for program in [CG, LU, QR, GEMM] {
        for file in [
            outside.as_str(),
            &climbing,
            "../key",
            "sub/../../key",
            "link",
            "up/key",
        ] {
            let params = params(program, &json!(file));
            let error = start(program, &params, Inputs::in_folder(&place.inputs)).unwrap_err();
            let text = error.to_string();
            assert!(error.is_permanent(), "{program}: {text}");
            let rule = "is not under the worker's --input-dir";
            assert!(
                text.contains(rule) && text.contains(file),
                "{program}: {text}"
            );
            let none = start(program, &params, Inputs::default()).unwrap_err();
            let text = none.to_string();
            assert!(text.contains("has no --input-dir"), "{program}: {text}");
        }
        let absolute = place.inputs.join("sub/a.mtx").display().to_string();
        for file in ["sub/a.mtx", &absolute] {
            let folders = vec![place.all.path().join("inputs/sub"), place.inputs.clone()];
            start(
                program,
                &params(program, &json!(file)),
                Inputs::beneath(folders),
            )
            .unwrap();
        }
    }
}

#[test]
fn no_error_says_what_a_file_holds() {
    let place = Place::new();
    for program in [CG, LU, QR, GEMM] {
        let params = params(program, &json!("key"));
        let error = start(program, &params, Inputs::in_folder(&place.inputs)).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("key") && !text.contains("SUACS"),
            "{program}: {text}"
        );
    }
}

#[test]
fn no_parameter_of_synthetic_names_a_file_to_make() {
    let params = json!({ "capsules": 1, "crash_at": 0, "crash_marker": "made" });
    let error = start(SYNTHETIC, &params, Inputs::default()).unwrap_err();
    let text = error.to_string();
    assert!(
        error.is_permanent() && text.contains("unknown field `crash_marker`"),
        "{text}"
    );
}
