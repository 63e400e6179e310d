//! Ranges that are split, given back early and merged, in any order: the result is that of an
//! undisturbed run, bit by bit; and the frames that say so.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use fiec_kit::frames::{
    self, BoundaryReport, FrameError, Merge, Order, Reason, Report, Run, Shares,
};
use fiec_kit::program::{Capsule, Fetch, Inputs, ProgramError, Step};
use fiec_kit::programs::{self, Instance};
use fiec_kit::{child, run_local};
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{GEMM, SYNTHETIC, TileRange};
use fiec_schemas::{CommitPolicy, Digest, ExecutionId};
use serde_json::{Value, json};

/// A product of so many by so many tiles.
fn product(rows: u64, cols: u64) -> Value {
    let side = |n: u64| 32 * n - 7;
    json!({
        "a": {"random": {"rows": side(rows), "cols": 600, "seed": 1}},
        "b": {"random": {"rows": 600, "cols": side(cols), "seed": 2}},
        "tile": 32,
    })
}

struct Nothing;

impl Fetch for Nothing {
    fn fetch(&mut self, digest: Digest, _: u64) -> Result<Vec<u8>, ProgramError> {
        Err(ProgramError::Permanent(format!(
            "{digest} is not asked for"
        )))
    }
}

/// Numbers by chance, the same for a seed (Vigna's SplitMix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
}

/// A tree of runs of one product.
struct Tree {
    params: Value,
    inputs: Inputs,
    chance: Chance,
    outputs: BTreeMap<String, Vec<u8>>,
    splits: u32,
    early: u32,
}

impl Tree {
    fn instance(&mut self, range: Option<TileRange>, state: Option<&[u8]>) -> Box<dyn Instance> {
        let mut params = self.params.clone();
        if let Some(range) = range {
            params["tiles"] = json!({ "from": range.from, "to": range.to });
        }
        let mut instance = programs::start(GEMM, None, &params, &mut self.inputs).unwrap();
        instance.resume(state).unwrap();
        instance
    }

    /// Computes a range to its end, or as far as its node has it: σ, and the result of the whole.
    fn compute(&mut self, range: Option<TileRange>) -> (Option<Vec<u8>>, Value) {
        let mut instance = self.instance(range, None);
        let mut parts: Vec<TileRange> = Vec::new();
        let mut index = 0;
        let mut sigma = None;
        let mut returned = None;
        loop {
            let free = parts.is_empty() && returned.is_none();
            if range.is_some() && free && self.chance.one_in(12) {
                self.early += 1;
                return (sigma, Value::Null);
            }
            let mut cx = Capsule::with_fetch(index, Box::new(Nothing));
            let step = match returned.take() {
                None => instance.capsule(&mut cx).unwrap(),
                Some((range, part)) => {
                    let part: Option<Vec<u8>> = part;
                    instance.merge(range, part.as_deref(), &mut cx).unwrap()
                }
            };
            index += 1;
            for output in cx.outputs() {
                let before = self
                    .outputs
                    .insert(output.name.clone(), output.bytes.clone());
                assert_eq!(before, None, "{} was made twice", output.name);
            }
            let mut split = None;
            if step == Step::Boundary && self.chance.one_in(3) {
                split = instance.split(&cx).unwrap();
            }
            if let Some(range) = split {
                assert_eq!(parts.last().map_or(range.to, |last| last.from), range.to);
                self.splits += 1;
                parts.push(range);
            }
            let mut state = Vec::new();
            instance.encode(&mut state, &mut cx).unwrap();
            if self.chance.one_in(3) {
                instance = self.instance(range, Some(&state));
            }
            if let Step::Complete { result } = step {
                let Some(last) = parts.pop() else {
                    return (Some(state), result);
                };
                let (part, _) = self.compute(Some(last));
                instance = self.instance(range, Some(&state));
                returned = Some((last, part));
            }
            sigma = Some(state);
        }
    }
}

#[test]
fn any_splits_and_merges_give_the_digest_of_the_undisturbed_product() {
    let (mut splits, mut early) = (0, 0);
    for seed in 0..40 {
        let params = product(1 + seed % 4, 3 + seed % 5);
        let whole = run_local(GEMM, &params).unwrap();
        let mut tree = Tree {
            params,
            inputs: Inputs::default(),
            chance: Chance(seed),
            outputs: BTreeMap::new(),
            splits: 0,
            early: 0,
        };
        let (_, result) = tree.compute(None);
        assert_eq!(result, whole.result, "seed {seed}");
        assert_eq!(tree.outputs.len(), whole.outputs.len(), "seed {seed}");
        for output in whole.outputs {
            assert_eq!(tree.outputs[&output.name], output.bytes, "seed {seed}");
        }
        splits += tree.splits;
        early += tree.early;
    }
    assert!(splits > 40 && early > 10, "{splits} splits, {early} early");
}

#[test]
fn a_part_of_another_range_or_product_is_refused() {
    let mut tree = Tree {
        params: product(2, 3),
        inputs: Inputs::default(),
        chance: Chance(0),
        outputs: BTreeMap::new(),
        splits: 0,
        early: 0,
    };
    let range = |from, to| TileRange { from, to };
    let mut cx = Capsule::with_fetch(0, Box::new(Nothing));
    let mut holder = tree.instance(None, None);
    assert_eq!(holder.capsule(&mut cx), Ok(Step::Boundary));
    let error = holder.merge(range(4, 6), None, &mut cx).unwrap_err();
    assert!(
        error.is_permanent()
            && error
                .to_string()
                .contains("1 to 6 of this range are not done"),
        "{error}"
    );
    assert_eq!(holder.split(&cx), Ok(Some(range(4, 6))));
    for _ in 0..2 {
        assert_eq!(holder.capsule(&mut cx), Ok(Step::Boundary));
    }
    assert!(matches!(holder.capsule(&mut cx), Ok(Step::Complete { .. })));
    let mut other = tree.instance(Some(range(3, 6)), None);
    assert_eq!(other.capsule(&mut cx), Ok(Step::Boundary));
    let mut state = Vec::new();
    other.encode(&mut state, &mut cx).unwrap();
    for (range, part, word) in [
        (range(5, 6), None, "begin with 4"),
        (range(4, 7), None, "cannot be merged"),
        (range(4, 6), Some(&state[..]), "another range"),
        (range(4, 6), Some(&state[..9]), "gemm@1"),
    ] {
        let error = holder.merge(range, part, &mut cx).unwrap_err();
        let said = error.to_string();
        assert!(error.is_permanent() && said.contains(word), "{said}");
    }
    // A part that did nothing leaves all of it.
    assert_eq!(holder.merge(range(4, 6), None, &mut cx), Ok(Step::Boundary));
}

struct Child {
    socket: UnixStream,
    thread: Option<JoinHandle<Result<(), FrameError>>>,
}

impl Child {
    fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || child::serve(theirs, Inputs::default()));
        let child = Self {
            socket: ours,
            thread: Some(thread),
        };
        assert_eq!(child.hear().0, Report::Ready);
        child
    }

    fn hear(&self) -> (Report, Vec<u8>) {
        let heard = frames::read(&self.socket).unwrap();
        heard.expect("the child is there")
    }

    fn order(&self, order: &Order) {
        frames::write(&self.socket, order, &[]).unwrap();
    }

    fn run(
        &self,
        (program, params): (&str, &Value),
        shares: Option<Shares>,
        from: Option<(u64, &[u8])>,
        merge: Option<(Merge, &[u8])>,
    ) {
        let run = Run {
            execution: ExecutionId(uuid::Uuid::now_v7()),
            epoch: 1,
            program: program.to_owned(),
            params: params.clone(),
            commit: CommitPolicy::Every(NonZeroU64::MIN),
            boundary: from.map(|(index, _)| index),
            lease_ms: 60_000,
            interval_ms: 0,
            package: None,
            grant: Grant::default(),
            spread: shares,
            merge: merge.map(|(merge, _)| merge),
            crashes: 0,
        };
        let own = from.map_or(&[][..], |(_, state)| state);
        let part = merge.map_or(&[][..], |(_, state)| state);
        frames::write(&self.socket, &Order::Run(Box::new(run)), &[own, part]).unwrap();
    }

    /// The next boundary with its σ, or what it says in place of one.
    #[allow(clippy::result_large_err, reason = "the end of a run is no error here")]
    fn next(&self) -> Result<(BoundaryReport, Vec<u8>), Report> {
        loop {
            match self.hear() {
                (Report::Boundary(report), mut body) => {
                    body.truncate(usize::try_from(report.bytes).unwrap());
                    return Ok((*report, body));
                }
                (Report::Began { .. } | Report::Progress { .. }, _) => {}
                (other, _) => return Err(other),
            }
        }
    }

    fn boundary(&self) -> (BoundaryReport, Vec<u8>) {
        let (report, state) = self.next().unwrap();
        self.order(&Order::Committed {
            index: report.index,
        });
        (report, state)
    }

    /// The last boundary, and the result behind it.
    fn end(&self) -> (BoundaryReport, Vec<u8>, Value) {
        loop {
            let (report, state) = self.boundary();
            if report.reason == Reason::End {
                let Err(Report::Completed {
                    result,
                    capsules,
                    outputs,
                    ..
                }) = self.next()
                else {
                    panic!("no completion behind the end")
                };
                assert_eq!((capsules, outputs.len()), (report.index, 0));
                return (report, state, result);
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        let _ = self.thread.take().unwrap().join().unwrap();
    }
}

const WINDOW: u64 = fiec_kit::commit::WINDOW as u64;

#[test]
fn a_child_splits_at_its_next_boundary_ends_with_its_state_and_takes_a_part_back() {
    let params = product(4, 5);
    let whole = run_local(GEMM, &params).unwrap();
    let child = Child::start();
    child.run((GEMM, &params), Some(Shares::default()), None, None);
    // It waits for an acknowledgement here, and finds the order before its next capsule ends.
    let waits: Vec<_> = (0..WINDOW).map(|_| child.next().unwrap()).collect();
    assert!(waits.iter().all(|(report, _)| report.split.is_none()));
    child.order(&Order::Split);
    child.order(&Order::Committed { index: WINDOW });
    let (report, split) = loop {
        let (report, _) = child.boundary();
        if let Some(range) = report.split {
            break (report, range);
        }
    };
    assert_eq!(split.to, 20);
    assert_eq!(report.of, Some(split.from), "what is left to it is less");
    let (end, state, _) = child.end();
    assert_eq!((end.index, end.merged), (split.from, false));

    let mut part = params.clone();
    part["tiles"] = json!({ "from": split.from, "to": split.to });
    let shares = Shares {
        part: true,
        parts: 0,
    };
    child.run((GEMM, &part), Some(shares), None, None);
    let (of_part, part_state, _) = child.end();
    assert_eq!(of_part.index, split.to - split.from);

    let merge = Merge {
        from: split.from,
        to: split.to,
        bytes: Some(part_state.len() as u64),
    };
    let from = Some((end.index, &state[..]));
    let shares = Some(Shares::default());
    child.run((GEMM, &params), shares, from, Some((merge, &part_state)));
    let (merged, _, result) = child.end();
    assert_eq!((merged.index, merged.merged), (end.index + 1, true));
    assert_eq!(result, whole.result);

    // Without σ the part has done nothing: its tiles are done here.
    let merge = Merge {
        bytes: None,
        ..merge
    };
    child.run((GEMM, &params), shares, from, Some((merge, &[])));
    let (merged, _) = child.boundary();
    assert!(merged.merged && merged.reason == Reason::Commit);
    let result = loop {
        match child.next() {
            Ok((report, _)) => child.order(&Order::Committed {
                index: report.index,
            }),
            Err(Report::Completed { result, .. }) => break result,
            Err(other) => panic!("{other:?}"),
        }
    };
    assert_eq!(result, whole.result);
}

#[test]
fn a_child_with_one_tile_left_stays_whole_and_one_that_is_not_shared_ignores_the_order() {
    let mut params = product(4, 5);
    params["tiles"] = json!({ "from": 0, "to": WINDOW + 2 });
    let child = Child::start();
    for shares in [Some(Shares::default()), None] {
        child.run((GEMM, &params), shares, None, None);
        (0..WINDOW).for_each(|_| drop(child.next().unwrap()));
        child.order(&Order::Split);
        child.order(&Order::Committed { index: WINDOW });
        let mut said = Vec::new();
        loop {
            match child.next() {
                Ok((report, _)) => assert_eq!(report.split, None),
                Err(report) => {
                    let ends = report.ends_run();
                    said.push(report);
                    if ends {
                        break;
                    }
                }
            }
        }
        let whole = said.iter().filter(|r| **r == Report::Whole).count();
        assert_eq!(whole, usize::from(shares.is_some()), "{said:?}");
    }
}

#[test]
fn a_commit_is_due_before_more_outputs_wait_than_its_message_can_name() {
    let params = product(6, 10);
    let child = Child::start();
    let run = Run {
        execution: ExecutionId(uuid::Uuid::now_v7()),
        epoch: 1,
        program: GEMM.to_owned(),
        params,
        commit: CommitPolicy::Every(NonZeroU64::MAX),
        boundary: None,
        lease_ms: 60_000,
        interval_ms: 0,
        package: None,
        grant: Grant::default(),
        spread: None,
        merge: None,
        crashes: 0,
    };
    child.order(&Order::Run(Box::new(run)));
    let mut named = Vec::new();
    let last = loop {
        match child.next() {
            Ok((report, _)) => {
                child.order(&Order::Committed {
                    index: report.index,
                });
                named.push(report.outputs.len());
            }
            Err(Report::Completed { outputs, .. }) => break outputs.len(),
            Err(other) => panic!("{other:?}"),
        }
    };
    assert_eq!(named.iter().sum::<usize>() + last, 60);
    assert!(
        named.len() > 2 && named.iter().all(|n| *n <= 20),
        "{named:?}"
    );
}

#[test]
fn a_program_that_does_not_spread_fails_for_good_when_it_is_given_a_part() {
    let child = Child::start();
    let params = json!({ "capsules": 3 });
    let merge = Merge {
        from: 3,
        to: 5,
        bytes: None,
    };
    let shares = Some(Shares::default());
    child.run((SYNTHETIC, &params), shares, None, Some((merge, &[])));
    let Err(Report::Failed {
        permanent, reason, ..
    }) = child.next()
    else {
        panic!("it took the part")
    };
    assert!(permanent && reason.contains("does not spread"), "{reason}");
}
