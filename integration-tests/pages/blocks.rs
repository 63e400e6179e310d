//! The blocks of a page, each with the comment above it that says what a test does with it.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where a block of commands runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// With the programs on the `PATH`, in a folder with the project's files.
    Local,
    /// The same, and a cluster runs: that of `fiec up`.
    Cluster,
    /// The same, and NATS and PostgreSQL run, with nothing set up.
    Servers,
}

/// How a block of commands runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub place: Place,
    /// One command that stays until the end of the page's stage.
    pub is_background: bool,
    /// A command that succeeds once the background command is ready.
    pub until: Option<String>,
    /// Exit codes that are right.
    pub exits: Vec<i32>,
    /// A program without which the block is skipped.
    pub needs: Option<String>,
}

/// What a test does with a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Marker {
    Run(Run),
    /// Nothing; a test of this name, or a step of CI, covers it.
    NotHere {
        covered_by: String,
    },
    /// Writes it to this file.
    File(PathBuf),
}

/// A block between two fences.
#[derive(Debug, Clone)]
pub struct Block {
    /// Relative to the project.
    pub page: PathBuf,
    /// Line of the first fence, from 1.
    pub line: usize,
    pub language: String,
    pub marker: Option<Marker>,
    pub text: String,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.page.display(), self.line)
    }
}

/// Reads `<!-- run: … -->` or `<!-- file: … -->`. None for any other line.
///
/// # Errors
/// The part of the comment that is not understood.
fn marker(line: &str) -> Result<Option<Marker>, String> {
    let comment = line
        .strip_prefix("<!-- ")
        .and_then(|l| l.strip_suffix(" -->"));
    let Some((kind, rest)) = comment.and_then(|comment| comment.split_once(": ")) else {
        return Ok(None);
    };
    match kind {
        "file" => Ok(Some(Marker::File(rest.into()))),
        "run" => match rest.strip_prefix("not here, because ") {
            Some(reason) => reason
                .split_once("; covered by ")
                .map(|(_, name)| {
                    Some(Marker::NotHere {
                        covered_by: name.to_owned(),
                    })
                })
                .ok_or_else(|| format!("{reason:?} names no test: `; covered by NAME`")),
            None => run(rest).map(|run| Some(Marker::Run(run))),
        },
        _ => Ok(None),
    }
}

fn run(text: &str) -> Result<Run, String> {
    // The command of `until` may have commas, so it comes last.
    let (options, until) = match text.split_once(", until: ") {
        Some((options, until)) => (options, Some(until.to_owned())),
        None => (text, None),
    };
    let mut options = options.split(", ");
    let place = match options.next() {
        Some("local") => Place::Local,
        Some("cluster") => Place::Cluster,
        Some("servers") => Place::Servers,
        other => return Err(format!("{other:?} is neither local, cluster nor servers")),
    };
    let mut run = Run {
        place,
        is_background: false,
        until,
        exits: vec![0],
        needs: None,
    };
    for option in options {
        match option.split_once(": ") {
            None if option == "background" => run.is_background = true,
            Some(("exits", codes)) => {
                let codes = codes.split(' ').map(str::parse);
                run.exits = codes
                    .collect::<Result<_, _>>()
                    .map_err(|_| option.to_owned())?;
            }
            Some(("needs", program)) => run.needs = Some(program.to_owned()),
            _ => {
                return Err(format!(
                    "{option:?} is none of background, exits, needs, until"
                ));
            }
        }
    }
    if run.until.is_some() != run.is_background {
        return Err("background and until go together".to_owned());
    }
    Ok(run)
}

/// The blocks of a page.
///
/// # Errors
/// A comment that is not understood, with its place.
pub fn blocks(page: &Path, text: &str) -> Result<Vec<Block>, String> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut before = "";
    let mut is_open = false;
    for (number, line) in text.lines().enumerate() {
        if let Some(language) = line.strip_prefix("```") {
            if !is_open {
                let marker =
                    marker(before).map_err(|why| format!("{}:{number}: {why}", page.display()))?;
                blocks.push(Block {
                    page: page.to_owned(),
                    line: number + 1,
                    language: language.to_owned(),
                    marker,
                    text: String::new(),
                });
            }
            is_open = !is_open;
        } else if is_open && let Some(block) = blocks.last_mut() {
            block.text += line;
            block.text += "\n";
        }
        before = line;
    }
    Ok(blocks)
}

#[test]
fn a_comment_says_where_a_block_runs() {
    let page = Path::new("a.md");
    let text = "<!-- run: local, background, exits: 0 5, until: a, b -->\n```sh\nx\ny\n```\n\
                <!-- run: not here, because it is long; covered by some_test -->\n```sh\nz\n```\n\
                <!-- file: a/b.py -->\n```python\nc\n```\n```sh\nd\n```\n";
    let found = blocks(page, text).unwrap();
    let run = Run {
        place: Place::Local,
        is_background: true,
        until: Some("a, b".to_owned()),
        exits: vec![0, 5],
        needs: None,
    };
    assert_eq!(found[0].marker, Some(Marker::Run(run)));
    assert_eq!((found[0].line, found[0].text.as_str()), (2, "x\ny\n"));
    let covered_by = "some_test".to_owned();
    assert_eq!(found[1].marker, Some(Marker::NotHere { covered_by }));
    assert_eq!(found[2].marker, Some(Marker::File("a/b.py".into())));
    assert_eq!(found[3].marker, None);
    for wrong in [
        "nowhere",
        "local, loudly",
        "local, background",
        "not here, because",
    ] {
        let text = format!("<!-- run: {wrong} -->\n```sh\nx\n```\n");
        assert!(blocks(page, &text).is_err(), "{wrong}");
    }
}
