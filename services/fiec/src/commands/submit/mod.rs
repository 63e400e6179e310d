//! `fiec submit FILE [--wait]`: submits a file of JSON lines and reports on every line.

mod requests;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use fiec_broker::Broker;
use fiec_schemas::submission::{lines, without_mark};
use fiec_schemas::{ClientId, ExecutionId, LineError, PhaseKind};
use serde_json::{Value, json};

use super::wait::{Waiting, outcome_of};
use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use requests::{Numbered, Requests};

/// Submit a file of JSON lines, one submission a line ("-" is standard input)
#[derive(Debug, Args)]
pub struct SubmitArgs {
    /// JSON or JSONL file
    #[arg(required_unless_present = "program", conflicts_with = "program")]
    pub file: Option<PathBuf>,
    /// Submit one run of this program, NAME@VERSION, without a file
    #[arg(long)]
    pub program: Option<String>,
    /// Parameters of the program, as JSON
    #[arg(
        long,
        short,
        value_name = "JSON",
        requires = "program",
        conflicts_with = "file"
    )]
    pub params: Option<String>,
    #[command(flatten)]
    pub tenant: TenantArg,
    /// Wait until every execution has ended; the exit code is the worst outcome
    #[arg(long, short)]
    pub wait: bool,
    /// Accept all lines or none: one bad line refuses the whole file
    #[arg(long)]
    pub all_or_nothing: bool,
}

impl SubmitArgs {
    /// Name of the input, for messages.
    fn source(&self) -> String {
        match &self.file {
            Some(file) => file.display().to_string(),
            None => "the command line".to_owned(),
        }
    }

    fn text(&self) -> anyhow::Result<Vec<u8>> {
        match (&self.file, &self.program) {
            (Some(file), _) => read(file),
            (None, Some(program)) => {
                let params = self.params.as_deref().unwrap_or("{}");
                fiec_schemas::values::check(params.as_bytes(), "params")?;
                let params: Value = serde_json::from_str(params)
                    .context("--params is not JSON (a file: `fiec submit FILE`)")?;
                Ok(json!({"program": program, "params": params})
                    .to_string()
                    .into_bytes())
            }
            (None, None) => anyhow::bail!("give a file, or --program NAME@VERSION"),
        }
    }
}

/// Most elements of an array that are all printed.
const LISTED: usize = 20;
/// Most lines that are named because they were refused with another one.
const LISTED_LINES: usize = 10;

/// An accepted line, or an element of its array.
struct Taken {
    line: u32,
    id: ExecutionId,
    client_id: Option<ClientId>,
    existing: bool,
    /// Its phase, if it existed before and that is known.
    phase: Option<PhaseKind>,
}

impl Taken {
    /// The client's name of the execution, or its line.
    fn name(&self) -> String {
        match &self.client_id {
            Some(id) => id.to_string(),
            None => format!("line {}", self.line),
        }
    }

    /// The UUID first, for scripts that read the first word. Then the client's id.
    fn in_words(&self) -> String {
        let mut words = self.id.to_string();
        if let Some(client) = &self.client_id {
            words.push_str(&format!("  {client}"));
        }
        if self.existing {
            let line = self.line;
            words.push_str(&match self.phase.filter(|phase| phase.can_be_retried()) {
                Some(phase) => format!(
                    "  (line {line}: was there before and is {phase}: `fiec retry {}` starts it again)",
                    self.client_id.as_ref().map_or_else(|| self.id.to_string(), ToString::to_string)
                ),
                None => match self.phase {
                    Some(phase) if outcome_of(phase).is_some() => format!(
                        "  (line {line}: was there before and is {phase}; another id runs it again)"
                    ),
                    Some(phase) => format!("  (line {line}: was there before and is {phase})"),
                    None => format!("  (line {line}: the same submission was there before)"),
                },
            });
        }
        words
    }
}

/// Runs the command.
///
/// # Errors
/// If the file cannot be read, or no policy service answers.
pub async fn run(args: SubmitArgs, global: &Global) -> anyhow::Result<Outcome> {
    let source = args.source();
    let text = match args.text() {
        Ok(text) => text,
        Err(error) => {
            eprintln!("{error:#}");
            return Ok(Outcome::BadInput);
        }
    };
    let broker = global.broker("submit").await?;
    let (taken, errors) = match submit_all(&broker, &args, &text).await? {
        Ok(answer) => answer,
        Err(reason) => {
            eprintln!("{}: {reason}", source);
            return Ok(Outcome::BadInput);
        }
    };
    print(&taken, global.json);
    if global.json {
        for error in &errors {
            println!("{}", json!({"line": error.line, "error": error}));
        }
    }
    for words in in_words(&errors) {
        eprintln!("{source}: {words}");
    }
    let mut outcome = if errors.is_empty() {
        Outcome::Done
    } else {
        Outcome::BadInput
    };
    if taken.is_empty() && errors.is_empty() {
        eprintln!("{}: there is no submission in it", source);
        return Ok(Outcome::BadInput);
    }
    if args.wait && !taken.is_empty() {
        let mut waiting = Waiting::new(&broker, &args.tenant.tenant, global);
        for taken in taken {
            waiting.add(taken.id, taken.name());
        }
        outcome = outcome.worse(waiting.until_all_have_ended().await?);
    }
    Ok(outcome)
}

/// The refused lines for people: first those with a fault of their own, then the numbers of those
/// that are refused only because of another.
fn in_words(errors: &[LineError]) -> Vec<String> {
    let mut words = Vec::new();
    let mut others: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for error in errors {
        match error.because {
            Some(line) => others.entry(line).or_default().push(error.line.to_string()),
            None => words.push(error.to_string()),
        }
    }
    for (line, mut refused) in others {
        let hidden = refused.len().saturating_sub(LISTED_LINES);
        refused.truncate(LISTED_LINES);
        let more = match hidden {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        let refused = refused.join(", ");
        words.push(format!(
            "because of line {line}, also refused: {refused}{more}"
        ));
    }
    words
}

/// Prints what was taken. A person sees a large array as its first and its last element.
fn print(taken: &[Taken], json: bool) {
    for line in taken.chunk_by(|a, b| a.line == b.line) {
        if json {
            for taken in line {
                println!(
                    "{}",
                    json!({"line": taken.line, "id": taken.id, "client_id": taken.client_id,
                           "existing": taken.existing})
                );
            }
            continue;
        }
        match line {
            [first, .., last] if line.len() > LISTED => {
                let count = line.len() - 2;
                println!("{}\n… {count} more\n{}", first.in_words(), last.in_words());
            }
            _ => line
                .iter()
                .for_each(|taken| println!("{}", taken.in_words())),
        }
    }
}

fn read(file: &Path) -> anyhow::Result<Vec<u8>> {
    if file.as_os_str() == "-" {
        let mut text = Vec::new();
        std::io::stdin()
            .read_to_end(&mut text)
            .context("cannot read standard input")?;
        return Ok(text);
    }
    std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

/// Splits the text into lines. A file with one object over several lines is one submission.
fn as_lines(text: &[u8]) -> Vec<Numbered> {
    let text = without_mark(text);
    let single: Result<serde_json::Map<String, serde_json::Value>, _> =
        serde_json::from_slice(text);
    if let Ok(object) = single
        && lines(text).count() > 1
    {
        return vec![(1, serde_json::to_vec(&object).unwrap_or_default())];
    }
    lines(text)
        .map(|(number, line)| (number, line.to_vec()))
        .collect()
}

/// Accepted lines and refused lines, or why the whole file cannot be submitted.
type Submitted = Result<(Vec<Taken>, Vec<LineError>), String>;

async fn submit_all(broker: &Broker, args: &SubmitArgs, text: &[u8]) -> anyhow::Result<Submitted> {
    let (tenant, atomic) = (&args.tenant.tenant, args.all_or_nothing);
    let mut requests = match Requests::new(tenant, as_lines(text), atomic) {
        Ok(requests) => requests,
        Err(reason) => return Ok(Err(reason)),
    };
    let (mut taken, mut errors) = (Vec::new(), Vec::new());
    while let Some((text, numbers, in_vain)) = requests.next() {
        errors.extend(in_vain);
        if numbers.is_empty() {
            continue;
        }
        let reply = client::me(broker)
            .submit(tenant, Bytes::from(text), atomic)
            .await?;
        if let Some(error) = reply.error {
            anyhow::bail!("the submission was refused: {error}");
        }
        if let Some(note) = &reply.note {
            eprintln!("note: {note}");
        }
        let place = |line: u32| {
            let index = usize::try_from(line).unwrap_or(0).wrapping_sub(1);
            numbers.get(index).copied().unwrap_or(line)
        };
        for accepted in reply.accepted {
            let line = place(accepted.line);
            let named: Vec<(ExecutionId, Option<ClientId>)> =
                match (accepted.count, accepted.elements) {
                    (None, ids) if ids.is_empty() => vec![(accepted.id, accepted.client_id)],
                    (Some(_), ids) if ids.is_empty() => {
                        let names = requests.names(line).flatten();
                        let id = |name: &ClientId| ExecutionId::from_client(tenant, name);
                        names.map(|name| (id(&name), Some(name))).collect()
                    }
                    (_, ids) => {
                        let names = requests.names(line).chain(std::iter::repeat(None));
                        ids.into_iter().zip(names).collect()
                    }
                };
            taken.extend(named.into_iter().map(|(id, client_id)| Taken {
                line,
                id,
                client_id,
                existing: accepted.existing,
                phase: accepted.phase,
            }));
        }
        for error in reply.errors {
            let line = place(error.line);
            requests.refuse(line);
            errors.push(LineError { line, ..error });
        }
    }
    taken.sort_by_key(|taken| taken.line);
    errors.sort_by_key(|e| e.line);
    Ok(Ok((taken, errors)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_taken_is_told_with_the_id_of_its_client() {
        let client = ClientId::new("dam-1").unwrap();
        let mut taken = Taken {
            line: 3,
            id: ExecutionId::from_client(&"lab".parse().unwrap(), &client),
            client_id: Some(client),
            existing: false,
            phase: None,
        };
        let uuid = taken.id.to_string();
        assert_eq!(taken.in_words(), format!("{uuid}  dam-1"));
        taken.existing = true;
        assert!(taken.in_words().contains("dam-1  (line 3: the same"));
        taken.phase = Some(PhaseKind::Failed);
        assert!(
            taken
                .in_words()
                .ends_with("is failed: `fiec retry dam-1` starts it again)")
        );
        (taken.client_id, taken.existing) = (None, false);
        assert_eq!(taken.in_words(), uuid);
    }

    #[test]
    fn lines_without_a_fault_of_their_own_are_numbers_behind_the_faults() {
        let error = |line, because| LineError {
            line,
            field: "after".to_owned(),
            reason: "is wrong".to_owned(),
            because,
        };
        let mut errors: Vec<_> = (1..=12).map(|line| error(line, Some(13))).collect();
        errors.extend([error(13, None), error(20, Some(14))]);
        let words = [
            "line 13, field after: is wrong",
            "because of line 13, also refused: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more",
            "because of line 14, also refused: 20",
        ];
        assert_eq!(in_words(&errors), words);
    }

    #[test]
    fn one_object_over_several_lines_is_one_submission() {
        for mark in ["", "\u{feff}"] {
            let text = format!("{mark}{{\n  \"program\": \"synthetic@1\"\n}}\n");
            let found = as_lines(text.as_bytes());
            assert_eq!(found, [(1, br#"{"program":"synthetic@1"}"#.to_vec())]);
        }
    }

    #[test]
    fn a_program_and_its_parameters_need_no_file() {
        #[derive(Debug, clap::Parser)]
        struct Command {
            #[command(flatten)]
            args: SubmitArgs,
        }
        let read = |words: &[&str]| {
            let words = ["submit"].iter().chain(words);
            <Command as clap::Parser>::try_parse_from(words).map(|command| command.args)
        };
        let args = read(&["--program", "cg@1", "-p", r#"{"n": 3}"#]).unwrap();
        let line: Value = serde_json::from_slice(&args.text().unwrap()).unwrap();
        assert_eq!(line, json!({"program": "cg@1", "params": {"n": 3}}));
        let broken = read(&["--program", "cg@1", "-p", "{n"]).unwrap();
        assert!(broken.text().is_err());
        for wrong in [
            &[][..],
            &["a.json", "--program", "cg@1"],
            &["a.json", "-p", "{}"],
        ] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn lines_keep_their_numbers() {
        let found = as_lines(b"{\"a\":1}\n\n{\"b\":2}\n");
        assert_eq!(found.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [1, 3]);
    }
}
