//! Ranges of tiles in Python that are spread: over frames, over JSON lines, and over nodes.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::python_program::{Program, boundary, package, run_local};
use crate::stage::python::root;
use crate::stage::{Lab, args, workers};
use fiec_kit::frames::{BoundaryReport, Order, Reason, Report, Shares};
use fiec_schemas::{CommitPolicy, Event};
use serde_json::json;

fn ranges() -> PathBuf {
    root().join("workers/python/tests/programs/ranges.py")
}

/// The end of a range that is shared: its last boundary, behind which nothing but the word follows.
fn end_of_range(program: &Program) -> (BoundaryReport, Vec<u8>) {
    let all = program.finish();
    let [.., last, (Report::Completed { capsules, .. }, _)] = &all[..] else {
        panic!("{all:?}");
    };
    let (report, state) = boundary(last);
    assert_eq!((report.reason, report.index), (Reason::End, *capsules));
    (report, state.to_vec())
}

#[test]
fn a_range_in_python_is_split_and_taken_back_bit_by_bit_whatever_it_speaks() {
    let script = ranges();
    let (auto, folder) = (CommitPolicy::Auto, tempfile::tempdir().unwrap());
    let lines = Program::over_lines(folder.path(), &script);
    for program in [Program::start_script(&script), lines] {
        let tiles = |from, to| json!({"tiles": {"from": from, "to": to}, "sleep": 0.2});
        let result = || match program.finish().pop() {
            Some((Report::Completed { result, .. }, _)) => result,
            other => panic!("{other:?}"),
        };
        program.run(&tiles(0, 12), auto, None);
        let whole = result();

        let alone = Some(Shares::default());
        program.run_sharing(&tiles(0, 12), auto, None, alone, None);
        while !matches!(program.next().0, Report::Began { .. }) {}
        program.order(&Order::Split, &[]);
        let (index, given) = loop {
            if let Report::Boundary(report) = program.next().0
                && let Some(given) = report.split
            {
                break (report.index, given);
            }
        };
        program.order(&Order::Committed { index }, &[]);
        assert_eq!(given.to, 12);
        let (holder, own) = end_of_range(&program);
        let from = Some((holder.index, &own[..]));

        let part = Some(Shares {
            part: true,
            parts: 0,
        });
        program.run_sharing(&tiles(given.from, given.to), auto, None, part, None);
        let (_, theirs) = end_of_range(&program);
        // With all that the part has done, and where it has done nothing.
        for merge in [(given, Some(&theirs[..])), (given, None)] {
            program.run_sharing(&tiles(0, 12), auto, from, alone, Some(merge));
            let merged = loop {
                if let Report::Boundary(report) = program.next().0 {
                    break report;
                }
            };
            assert!(merged.merged && merged.index == holder.index + 1);
            let index = merged.index;
            program.order(&Order::Committed { index }, &[]);
            assert_eq!(result(), whole);
        }
    }
}

#[tokio::test]
async fn a_range_in_python_spreads_over_nodes_and_ends_with_the_bits_of_one_run() {
    spreads_over_three_nodes("frames").await;
}

#[tokio::test]
async fn a_range_of_a_program_of_lines_spreads_over_nodes_and_ends_with_the_same_bits() {
    spreads_over_three_nodes("json_lines").await;
}

async fn spreads_over_three_nodes(protocol: &str) {
    let folder = tempfile::tempdir().unwrap();
    let entry = ["python3", "-B", "ranges.py"];
    package(
        folder.path(),
        &ranges(),
        &entry,
        protocol,
        &["tile-*", "all"],
    );
    let mut params = json!({"total": 80, "tiles": {"from": 0, "to": 80}});
    let whole = run_local(folder.path(), &params, &[]);
    params["sleep"] = json!(0.25);

    let mut options = workers(3);
    let allow = args(&["--allow-program", "ranges@*"]);
    options.worker_args.extend(allow);
    let lab = Lab::start(options).await;
    let path = folder.path().display().to_string();
    lab.fiec(&["program", "push", "ranges@1", &path])
        .await
        .expect(0);
    let body = json!({"id": "r", "program": "ranges@1", "params": params, "spread": {"up_to": 3}});
    let file = lab.file("r.json", body.to_string()).display().to_string();
    lab.fiec(&["submit", &file]).await.expect(0);
    let id = lab.id("r");
    let last = lab.journal.ended(id, "completed").await;
    let result = last.message.events.iter().find_map(|event| match event {
        Event::Completed { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result.unwrap(), whole);

    let all = lab.journal.all();
    let events = || all.iter().flat_map(|line| &line.message.events);
    let splits = events()
        .filter(|e| matches!(e, Event::Split { .. }))
        .count();
    let merges = events()
        .filter(|e| matches!(e, Event::Merged { .. }))
        .count();
    assert!(
        splits >= 2 && splits == merges,
        "{splits} splits, {merges} merges"
    );
    let nodes: BTreeSet<_> = all.iter().filter_map(|line| line.started_on()).collect();
    assert_eq!(nodes.len(), 3, "{nodes:?}");
    let crashes: u64 = all.iter().map(|line| line.state().totals.crashes).sum();
    assert_eq!(crashes, 0);
    // What the whole has made behind its loop, and a tile that a part has made.
    for (name, bytes) in [("all", 80 * 8), ("tile-079", 8)] {
        let fetched = lab.path(name);
        let path = fetched.display().to_string();
        lab.fiec(&["output", "r", name, "-o", &path])
            .await
            .expect(0);
        assert_eq!(std::fs::read(fetched).unwrap().len(), bytes, "{name}");
    }
    lab.end().await;
}
