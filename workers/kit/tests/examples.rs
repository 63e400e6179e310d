//! The batches in `examples` are accepted as they stand, and those of the dense programs do what
//! they are there to show.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};

use fiec_kit::local::run_cut;
use fiec_kit::program::Inputs;
use fiec_schemas::Submission;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn batch(name: &str) -> Vec<Submission> {
    let text = std::fs::read_to_string(root().join("examples").join(name)).unwrap();
    let lines = text.lines().enumerate();
    let lines = lines.map(|(number, line)| match Submission::parse(line.as_bytes()) {
        Ok(submission) => submission,
        Err(error) => panic!("{name}:{}: {error}", number + 1),
    });
    lines.collect()
}

#[test]
fn every_batch_is_accepted_and_names_each_execution_once() {
    let names = [
        "batch.jsonl",
        "gemm.jsonl",
        "long.jsonl",
        "lu.jsonl",
        "spread.jsonl",
    ];
    for name in names {
        let mut ids: Vec<_> = batch(name).iter().map(|s| s.id.clone().unwrap()).collect();
        assert!(!ids.is_empty(), "{name}");
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count, "{name}");
    }
}

#[test]
fn the_batch_of_products_makes_each_tile_once() {
    let inputs = &mut Inputs::in_folder(root());
    let mut names = Vec::new();
    for submission in batch("gemm.jsonl") {
        let params = &submission.params;
        let outcome = run_cut(&submission.program, params, inputs, |_| true).unwrap();
        names.extend(outcome.outputs.into_iter().map(|o| o.name));
    }
    let tiles = (0..4).flat_map(|i| (0..4).map(move |j| format!("c-{i}-{j}")));
    assert_eq!(names, tiles.collect::<Vec<_>>());
}

#[test]
fn the_batch_of_factorizations_completes_within_its_bounds() {
    let inputs = &mut Inputs::in_folder(root());
    for submission in batch("lu.jsonl") {
        let params = &submission.params;
        let outcome = run_cut(&submission.program, params, inputs, |_| false).unwrap();
        let figure = |name: &str| outcome.result[name].as_f64().unwrap();
        assert!(
            figure("residual") < figure("bound"),
            "{:?}: {}",
            submission.id,
            outcome.result
        );
    }
}
