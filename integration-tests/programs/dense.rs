//! Factorizations through FIEC: moved between nodes, with their finished block columns fetched by
//! digest, and on matrices that were pushed.

use crate::stage::{Lab, Line, audit, workers};
use fiec_kit::local::run_local;
use fiec_schemas::programs::{LU, QR};
use fiec_schemas::{Digest, Event};
use serde_json::{Value, json};

fn result(line: &Line) -> Value {
    let found = line.message.events.iter().find_map(|event| match event {
        Event::Completed { result, .. } => Some(result.clone()),
        _ => None,
    });
    found.expect("a result")
}

#[tokio::test]
async fn a_factorization_that_is_moved_has_the_factors_of_one_that_is_not() {
    let params = json!({"matrix": {"random": {"n": 5760, "seed": 11}}, "block": 48});
    let whole = run_local(LU, &params).unwrap();
    let lab = Lab::start(workers(2)).await;
    let body = json!({"id": "f", "program": LU, "params": params, "commit": {"every": 4}});
    let file = lab.file("f.json", body.to_string()).display().to_string();
    lab.fiec(&["submit", &file]).await.expect(0);
    let id = lab.id("f");
    let node = lab.journal.computing(id, 1).await;
    lab.fiec(&["yield", "f"]).await.expect(0);
    let other = lab
        .journal
        .find(id, "it computes on the other node", |line| {
            line.started_on().filter(|n| *n != node)
        });
    other.await;
    let last = lab.journal.ended(id, "completed").await;
    audit(&lab.journal.of(id));
    assert_eq!(result(&last), whole.result);
    assert_eq!(last.state().totals.crashes, 0);
    for name in ["lu-0", "lu-119", "pivots"] {
        let path = lab.path(name);
        let path = path.display().to_string();
        lab.fiec(&["output", "f", name, "-o", &path])
            .await
            .expect(0);
        let expected = whole.outputs.iter().find(|o| o.name == name).unwrap();
        assert!(std::fs::read(&path).unwrap() == expected.bytes, "{name}");
    }
    lab.end().await;
}

#[tokio::test]
async fn a_matrix_that_was_pushed_is_factored_as_the_file_would_be() {
    let lab = Lab::start(workers(1)).await;
    let values = fiec_kernels::rhs::load_case(1, 5, 90 * 40);
    let a = fiec_kernels::dense::Mat::from_columns(90, 40, values);
    let bytes = fiec_kernels::npy::matrix(a.view());
    let path = lab.path("a.npy");
    std::fs::write(&path, &bytes).unwrap();
    let whole = run_local(QR, &json!({"matrix": {"file": path}, "block": 16})).unwrap();
    let path = path.display().to_string();
    lab.fiec(&["data", "push", &path]).await.expect(0);
    let params = json!({"matrix": {"object": Digest::of(&bytes)}, "block": 16});
    let body = json!({"id": "q", "program": QR, "params": params});
    let file = lab.file("q.json", body.to_string()).display().to_string();
    lab.fiec(&["submit", &file]).await.expect(0);
    let last = lab.journal.ended(lab.id("q"), "completed").await;
    assert_eq!(result(&last), whole.result);
    lab.end().await;
}
