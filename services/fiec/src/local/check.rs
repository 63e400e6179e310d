//! Tests four invariants of a capsule program by running it.
//!
//! - Determinism: two undisturbed runs go side by side, one on all processors and one on a single
//!   processor, and are compared at each boundary. A third one commits nothing before its end. It
//!   must have the same result, and all outputs of the others.
//! - Boundary completeness: at each boundary a third process, with fresh folders, starts from σ of
//!   the boundary before. It must reach the same σ, outputs or end. By induction, a resumption
//!   anywhere then reaches the undisturbed end.
//! - Forward independence: every second of these processes is killed in the capsule that follows.
//!   The outputs that existed before must not change.
//! - Isolation: the folders of all processes are searched for other files. If a tracer is
//!   available, one undisturbed run is traced.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use fiec_schemas::BoundaryIndex;
use serde::Serialize;
use serde_json::Value;

use super::Subject;
use super::explain;
use super::processors;
use super::session::{Event, Made, Session};
use super::traces::{self, Touched};
use super::trees::Tree;

/// Most findings that are kept for an invariant.
const FINDINGS: usize = 8;
/// Folders of the system and of interpreters.
const SYSTEM: [&str; 10] = [
    "/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys", "/dev",
];

/// An invariant that is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Invariant {
    /// Two undisturbed runs are equal at every boundary, and a run without commits has the same end
    /// and the same outputs.
    Determinism,
    /// σ suffices to continue.
    BoundaryCompleteness,
    /// The program touches only declared inputs and outputs.
    Isolation,
    /// Outputs that existed at a boundary do not change afterwards.
    ForwardIndependence,
}

impl Invariant {
    /// All invariants, in the order of the report.
    pub const ALL: [Self; 4] = [
        Self::Determinism,
        Self::BoundaryCompleteness,
        Self::Isolation,
        Self::ForwardIndependence,
    ];

    /// Name for people.
    pub fn words(self) -> &'static str {
        match self {
            Self::Determinism => "determinism",
            Self::BoundaryCompleteness => "boundary completeness",
            Self::Isolation => "isolation",
            Self::ForwardIndependence => "forward independence",
        }
    }
}

/// A violation of an invariant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The boundary, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boundary: Option<BoundaryIndex>,
    /// The difference: file, key or bytes.
    pub what: String,
}

/// Result of a check.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The program.
    pub program: String,
    /// Number of boundaries.
    pub boundaries: BoundaryIndex,
    /// Number of boundaries at which it was resumed.
    pub resumed: u64,
    /// Number of processes that were started.
    pub processes: u64,
    /// Violated invariants with their findings.
    pub broken: BTreeMap<Invariant, Vec<Finding>>,
    /// Invariants that this run could not test completely, and why. Such an invariant may be
    /// violated even if no finding shows it.
    pub not_tested: BTreeMap<Invariant, String>,
    /// What the check covered, and what it did not.
    pub covered: Vec<String>,
    /// Further notes that are not violations.
    pub notes: Vec<String>,
}

impl Report {
    /// Result for one invariant in words: a line, and one line for each finding.
    pub fn in_words(&self, invariant: Invariant) -> Vec<String> {
        let name = invariant.words();
        let Some(findings) = self.broken.get(&invariant) else {
            return vec![match self.not_tested.get(&invariant) {
                Some(why) => format!("not tested  {name}: {why}"),
                None => format!("holds   {name}"),
            }];
        };
        let findings = findings.iter().map(|finding| match finding.boundary {
            Some(index) => format!("        boundary {index}: {}", finding.what),
            None => format!("        {}", finding.what),
        });
        std::iter::once(format!("BROKEN  {name}"))
            .chain(findings)
            .collect()
    }

    /// True if no violation was found.
    pub fn holds(&self) -> bool {
        self.broken.is_empty()
    }

    fn add(&mut self, which: Invariant, boundary: Option<BoundaryIndex>, what: String) {
        let found = self.broken.entry(which).or_default();
        let finding = Finding { boundary, what };
        if found.len() < FINDINGS && !found.contains(&finding) {
            found.push(finding);
        }
    }
}

/// A boundary or the end, without parts that may differ between runs.
#[derive(Debug, Clone, PartialEq)]
enum Point {
    Boundary {
        index: BoundaryIndex,
        state: Vec<u8>,
        outputs: Vec<Made>,
    },
    End {
        capsules: BoundaryIndex,
        result: Value,
        outputs: Vec<Made>,
    },
    Failed(String),
}

impl Point {
    /// An end with all outputs of its run.
    fn with_outputs(mut self, made: &Ledger) -> Self {
        if let Self::End { outputs, .. } = &mut self {
            *outputs = made.values().map(|(_, made)| made.clone()).collect();
        }
        self
    }

    fn index(&self) -> Option<BoundaryIndex> {
        match self {
            Self::Boundary { index, .. } => Some(*index),
            Self::End { capsules, .. } => Some(*capsules),
            Self::Failed(_) => None,
        }
    }

    fn outputs(&self) -> &[Made] {
        match self {
            Self::Boundary { outputs, .. } | Self::End { outputs, .. } => outputs,
            Self::Failed(_) => &[],
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Boundary { index, .. } => format!("boundary {index}"),
            Self::End { capsules, .. } => format!("its end after {capsules} capsules"),
            Self::Failed(reason) => format!("a failure: {reason}"),
        }
    }

    /// The difference to another point. `None` if they are equal.
    fn difference(&self, other: &Self) -> Option<String> {
        match (self, other) {
            (
                Self::Boundary {
                    index, state: a, ..
                },
                Self::Boundary {
                    index: theirs,
                    state: b,
                    ..
                },
            ) if index == theirs => {
                if a != b {
                    return Some(format!("σ differs: {}", explain::states(a, b)));
                }
            }
            (
                Self::End {
                    capsules,
                    result: a,
                    ..
                },
                Self::End {
                    capsules: theirs,
                    result: b,
                    ..
                },
            ) if capsules == theirs => {
                if a != b {
                    return Some(format!("the result differs: {}", explain::values(a, b)));
                }
            }
            _ => {
                return Some(format!(
                    "one run ends with {}, the other with {}",
                    self.name(),
                    other.name()
                ));
            }
        }
        for output in self.outputs() {
            match other.outputs().iter().find(|o| o.name == output.name) {
                None => return Some(format!("output {:?} is missing", output.name)),
                Some(theirs) if theirs != output => {
                    return Some(format!(
                        "output {:?} differs: {} and {}",
                        output.name, output.digest, theirs.digest
                    ));
                }
                _ => {}
            }
        }
        let more = other
            .outputs()
            .iter()
            .find(|o| !self.outputs().iter().any(|ours| ours.name == o.name));
        more.map(|output| format!("output {:?} is made by one only", output.name))
    }
}

/// Waits for the next boundary or end. `may_yield` is true if the process has an order to yield.
fn point(session: &mut Session<'_>, may_yield: bool) -> anyhow::Result<Point> {
    loop {
        return Ok(match session.hear()? {
            Event::Progress { .. } => continue,
            Event::Boundary {
                index,
                yielded: true,
                ..
            } if !may_yield => {
                Point::Failed(format!("it yielded at boundary {index} without an order"))
            }
            Event::Boundary {
                index,
                state,
                outputs,
                ..
            } => Point::Boundary {
                index,
                state,
                outputs,
            },
            Event::Completed {
                result,
                capsules,
                outputs,
            } => Point::End {
                capsules,
                result,
                outputs,
            },
            Event::Failed { reason } => Point::Failed(reason),
        });
    }
}

/// Folders that must not change during the check.
struct Kept {
    folders: Vec<(&'static str, PathBuf, Tree)>,
}

impl Kept {
    fn new(subject: &Subject) -> Self {
        let mut folders = vec![("data folder", subject.data_dir.clone())];
        if let Some(package) = &subject.package {
            folders.push(("package's folder", package.folder.clone()));
        }
        let folders = folders.into_iter().map(|(name, path)| {
            let tree = Tree::of(&path);
            (name, path, tree)
        });
        Self {
            folders: folders.collect(),
        }
    }

    fn look(&self, report: &mut Report) {
        for (name, path, before) in &self.folders {
            for change in before.changes(&Tree::of(path)) {
                report.add(
                    Invariant::Isolation,
                    None,
                    format!("in the {name}, {change}"),
                );
            }
            if before.cut {
                report
                    .notes
                    .push(format!("the {name} has more files than were checked"));
            }
        }
    }
}

/// Reports the files that a process left in its own folders.
fn look_at_leftovers(session: &Session<'_>, ended: bool, report: &mut Report) {
    let empty = Tree::default();
    for (name, words) in [
        ("home", "HOME"),
        ("cwd", "the working folder"),
        ("tmp", "TMPDIR"),
    ] {
        // A killed process could not clean up.
        if name == "tmp" && !ended {
            continue;
        }
        for change in empty.changes(&Tree::of(&session.sandbox.folder(name))) {
            report.add(Invariant::Isolation, None, format!("in {words}, {change}"));
        }
    }
}

fn look_at_traces(subject: &Subject, session: &Session<'_>, file: &Path, report: &mut Report) {
    let touched = match Touched::read(file) {
        Ok(touched) => touched,
        Err(error) => {
            report
                .notes
                .push(format!("the trace cannot be read: {error}"));
            return;
        }
    };
    let own = session.sandbox.folder("tmp");
    for path in &touched.written {
        let free = path.starts_with(&own) || path.starts_with("/dev") || path.starts_with("/proc");
        // A pipe, a socket, or a file without a name has no path.
        if path.is_absolute() && !free {
            let what = format!("it writes {}", path.display());
            report.add(Invariant::Isolation, None, what);
        }
    }
    let network = subject
        .package
        .as_ref()
        .is_some_and(|package| package.manifest.network);
    for address in &touched.connected {
        if !network {
            let what = format!(
                "the program connects to {address}, but its manifest does not request the network"
            );
            report.add(Invariant::Isolation, None, what);
        }
    }
    let mut known: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).collect();
    known.push(subject.data_dir.clone());
    known.push(session.sandbox.folder("tmp"));
    known.extend(subject.package.iter().map(|package| package.folder.clone()));
    known.extend(std::env::current_exe().ok());
    let strange: Vec<String> = touched
        .read
        .iter()
        .filter(|path| path.is_absolute() && !known.iter().any(|k| path.starts_with(k)))
        .filter(|path| path.is_file())
        .map(|path| path.display().to_string())
        .collect();
    if let Some(first) = strange.first() {
        report.notes.push(format!(
            "the program or its interpreter reads {} files outside its package, the data folder and \
             the system's folders, e.g. {first}; nodes may not have them",
            strange.len()
        ));
    }
}

/// Outputs by name, with the boundary that made each.
type Ledger = BTreeMap<String, (BoundaryIndex, Made)>;

fn enter(ledger: &mut Ledger, point: &Point, report: &mut Report) {
    let index = point.index().unwrap_or_default();
    for output in point.outputs() {
        let entry = (index, output.clone());
        if let Some((before, made)) = ledger.insert(output.name.clone(), entry)
            && made.digest != output.digest
        {
            let what = format!(
                "output {:?}, made at boundary {before}, is made again with other bytes",
                output.name
            );
            report.add(Invariant::ForwardIndependence, Some(index), what);
        }
    }
}

struct Check<'a> {
    subject: &'a Subject,
    report: Report,
    ledger: Ledger,
}

impl Check<'_> {
    /// Resumes from σ of the boundary before, in fresh folders, up to the next point.
    fn resume(
        &mut self,
        from: (BoundaryIndex, &[u8]),
        expected: &Point,
        cut_off: bool,
    ) -> anyhow::Result<()> {
        let mut session = Session::start(self.subject)?;
        self.report.processes += 1;
        self.report.resumed += 1;
        // The process commits the next boundary, or yields there if the order arrives in time.
        let yield_at = (!cut_off).then_some(from.0 + 1);
        session.run(Some(from), Some(1), yield_at)?;
        let found = point(&mut session, !cut_off)?;
        if let Some(what) = expected.difference(&found) {
            let what = format!("resumed from boundary {}: {what}", from.0);
            let boundary = expected.index();
            self.report
                .add(Invariant::BoundaryCompleteness, boundary, what);
        }
        // Kill the process in the middle of the next capsule.
        match cut_off {
            true => session.kill(),
            false => session.end(),
        }
        look_at_leftovers(&session, !cut_off, &mut self.report);
        Ok(())
    }

    /// Runs the program without a commit before its end, and compares the end and all outputs.
    fn run_without_commits(&mut self, end: &Point) -> anyhow::Result<()> {
        let mut session = Session::start(self.subject)?;
        self.report.processes += 1;
        session.run(None, None, None)?;
        let mut made = Ledger::new();
        let found = loop {
            let found = point(&mut session, false)?;
            // A program may request a commit by itself.
            enter(&mut made, &found, &mut self.report);
            match found {
                Point::Boundary { index, .. } => session.committed(index),
                end => break end.with_outputs(&made),
            }
        };
        session.end();
        look_at_leftovers(&session, true, &mut self.report);
        let expected = end.clone().with_outputs(&self.ledger);
        if let Some(what) = expected.difference(&found) {
            let lost = |made: &Made| !found.outputs().iter().any(|o| o.name == made.name);
            let advice = match &found {
                Point::End { .. } if expected.outputs().iter().any(lost) => {
                    ". Name an output that is finished at a boundary without a commit at the next \
                     commit"
                }
                _ => "",
            };
            let what = format!("without commits before the end: {what}{advice}");
            self.report.add(Invariant::Determinism, None, what);
        }
        Ok(())
    }
}

/// Whether another undisturbed run comes to the same point. Returns false at the first boundary that
/// is not its.
fn is_repeated(subject: &Subject, expected: &Point) -> anyhow::Result<bool> {
    let mut session = Session::start(subject)?;
    session.run(None, Some(1), None)?;
    loop {
        let found = point(&mut session, false)?;
        match (&found, found.index() == expected.index()) {
            (Point::Boundary { index, .. }, false) => session.committed(*index),
            _ => {
                session.kill();
                return Ok(expected.difference(&found).is_none());
            }
        }
    }
}

/// Tests a program. Resumes it at `most` boundaries at most, densely at first and then more rarely.
/// `None` resumes it at every boundary. `progress` receives the current step.
///
/// # Errors
/// If the undisturbed run fails, with the program's words, or a process cannot be started.
pub fn check(
    subject: &Subject,
    most: Option<u64>,
    progress: &mut dyn FnMut(&str),
) -> anyhow::Result<Report> {
    let mut check = Check {
        subject,
        report: Report {
            program: subject.program.clone(),
            ..Report::default()
        },
        ledger: Ledger::new(),
    };
    let kept = Kept::new(subject);
    let trace = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let traced = traces::works();
    let cpus = processors::own().context("cannot find out the processors of this process")?;
    let one = subject.on_one_of(&cpus);
    let mut a = Session::start(subject)?;
    let mut b = match &traced {
        Ok(()) => Session::start_under(&one, &traces::command(trace.path()))?,
        Err(_) => Session::start(&one)?,
    };
    check.report.processes = 2;
    a.run(None, Some(1), None)?;
    b.run(None, Some(1), None)?;
    let mut before: Option<(BoundaryIndex, Vec<u8>)> = None;
    let mut equal = true;
    let end = loop {
        let ours = point(&mut a, false)?;
        if let Point::Failed(reason) = &ours {
            anyhow::bail!("{} fails undisturbed: {reason}", subject.program);
        }
        if equal {
            let theirs = point(&mut b, false)?;
            if let Some(what) = ours.difference(&theirs) {
                check.report.processes += 1;
                let what = match cpus.len() > 1 && is_repeated(subject, &ours)? {
                    true => format!(
                        "on one processor other than on {}: {what}. Its bits depend on the \
                         processors that it may use (workers/CONTRACT.md: threads)",
                        cpus.len()
                    ),
                    false => format!("two undisturbed runs: {what}"),
                };
                check.report.add(Invariant::Determinism, ours.index(), what);
                // After a difference, nothing that follows can be compared.
                equal = false;
                b.kill();
            }
        }
        enter(&mut check.ledger, &ours, &mut check.report);
        let index = ours.index().unwrap_or_default();
        // If two undisturbed runs differ, a resumption that differs proves nothing.
        if let Some((from, state)) = &before
            && equal
            && most.is_none_or(|most| is_chosen(*from, most, check.report.resumed))
        {
            progress(&format!("resumed at boundary {from}"));
            check.resume((*from, state), &ours, !from.is_multiple_of(2))?;
        }
        match ours {
            Point::Boundary { state, .. } => {
                progress(&format!("boundary {index}"));
                a.committed(index);
                if equal {
                    b.committed(index);
                }
                before = Some((index, state));
            }
            end => {
                check.report.boundaries = index.saturating_sub(1);
                break end;
            }
        }
    };
    a.end();
    look_at_leftovers(&a, true, &mut check.report);
    if equal {
        b.end();
        look_at_leftovers(&b, true, &mut check.report);
        if check.report.boundaries > 0 {
            progress("a run without commits");
            check.run_without_commits(&end)?;
        }
    }
    kept.look(&mut check.report);
    if traced.is_ok() {
        look_at_traces(subject, &b, trace.path(), &mut check.report);
    }
    let mut report = check.report;
    report.not_tested = untested(&report, check.ledger.len(), &traced);
    cover(&mut report, &traced, cpus.len());
    if !equal {
        report.notes.push(
            "where two undisturbed runs differ, boundary completeness was not tested any more"
                .to_owned(),
        );
    }
    Ok(report)
}

/// Invariants that this run could not test. `outputs` is the number of outputs that it made.
fn untested(
    report: &Report,
    outputs: usize,
    traced: &Result<(), String>,
) -> BTreeMap<Invariant, String> {
    let mut untested = BTreeMap::new();
    if report.resumed == 0 {
        let why = match report.boundaries {
            0 => "this run has no boundary; choose parameters that give more capsules",
            _ => "two undisturbed runs differ before the first resumption",
        };
        untested.insert(Invariant::BoundaryCompleteness, why.to_owned());
        if outputs == 0 {
            let why = "no run was killed behind a boundary, and no output was made";
            untested.insert(Invariant::ForwardIndependence, why.to_owned());
        }
    }
    if let Err(reason) = traced {
        let why =
            format!("only the program's own folders were checked, not other files ({reason})");
        untested.insert(Invariant::Isolation, why);
    }
    untested
}

/// True if the run is resumed at this boundary. The boundaries are dense at first and then thin
/// out: each doubling of the index has `most / 8` of them.
fn is_chosen(index: BoundaryIndex, most: u64, so_far: u64) -> bool {
    let step = (index / (most / 8).max(1)).max(1).next_power_of_two();
    so_far < most && index.is_multiple_of(step)
}

fn cover(report: &mut Report, traced: &Result<(), String>, cpus: usize) {
    let (boundaries, resumed) = (report.boundaries, report.resumed);
    let on = match cpus {
        1 => "both on this machine's only processor".to_owned(),
        more => format!("one on {more} processors and one on a single one"),
    };
    report.covered.push(format!(
        "determinism: two undisturbed runs, {on}, at {boundaries} boundaries and at the end; the end \
         and the outputs of a run without commits"
    ));
    report.covered.push(format!(
        "boundary completeness: resumed at {resumed} of {boundaries} boundaries, each to the next, \
         in fresh processes and folders"
    ));
    report.covered.push(match traced {
        Ok(()) => "isolation: file trees of package, data folder, HOME, working folder and TMPDIR \
                   before and after; every file and address that one undisturbed run touched, by \
                   strace"
            .to_owned(),
        Err(reason) => format!(
            "isolation: file trees of package, data folder, HOME, working folder and TMPDIR before \
             and after; writes elsewhere and reads are NOT covered ({reason})"
        ),
    });
    report.covered.push(format!(
        "forward independence: every output against those of its name made later; {} runs killed \
         in the capsule after a boundary",
        resumed.div_ceil(2)
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_could_not_test_is_not_said_to_hold() {
        let mut report = Report::default();
        report.not_tested = untested(&report, 0, &Err("strace is missing".to_owned()));
        let words = |report: &Report| Invariant::ALL.map(|i| report.in_words(i).join(" "));
        let [determinism, completeness, isolation, forward] = words(&report);
        assert_eq!(determinism, "holds   determinism");
        assert!(completeness.starts_with("not tested  boundary completeness: this run has no"));
        assert!(isolation.contains("strace is missing"), "{isolation}");
        assert!(forward.starts_with("not tested"), "{forward}");
        (report.boundaries, report.resumed) = (3, 3);
        report.not_tested = untested(&report, 0, &Ok(()));
        assert!(words(&report).iter().all(|line| line.starts_with("holds")));
        report.add(Invariant::Isolation, None, "it writes /x".to_owned());
        assert!(report.in_words(Invariant::Isolation)[0].starts_with("BROKEN"));
    }

    #[test]
    fn boundaries_are_chosen_densely_first_and_never_more_than_asked_for() {
        let chosen = |boundaries: u64, most: u64| {
            let mut so_far = 0;
            (1..=boundaries)
                .filter(|index| {
                    let yes = is_chosen(*index, most, so_far);
                    so_far += u64::from(yes);
                    yes
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(chosen(5, 64), [1, 2, 3, 4, 5]);
        let many = chosen(100_000, 64);
        assert!(many.len() <= 64 && many.len() > 40, "{}", many.len());
        assert!(*many.last().unwrap() > 1_000, "{many:?}");
    }
}
