//! The journals of jobs: repeated computation.

use std::path::Path;

use anyhow::Context as _;

/// The losses of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Lost {
    /// Number of capsules that were computed again.
    pub capsules: u64,
    /// Number of those that were lost with a killed node: their process ended without an entry.
    pub with_nodes: u64,
    /// Number of kills for lack of memory.
    pub killed: u64,
}

/// Reads the losses from a journal file. A job that never started has none.
///
/// # Errors
/// If the file cannot be read, or a line has another form.
pub(super) fn lost(file: &Path) -> anyhow::Result<Lost> {
    let text = match std::fs::read_to_string(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Lost::default()),
        text => text.with_context(|| format!("cannot read {}", file.display()))?,
    };
    read(&text).with_context(|| format!("{} is no journal", file.display()))
}

/// Lines `began
/// capsule
/// oom
/// left PROCESS DONE DEVICE`. Two processes of a job may overlap for a moment if a given-up node
/// still computes, so entries are matched by process.
fn read(text: &str) -> anyhow::Result<Lost> {
    let mut found = Lost::default();
    // Process, its completed capsules, and the reason of its end if it stated one.
    let mut last: Option<(u64, u64, Ending)> = None;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let what = words.next().context("an empty line")?;
        let mut number = || -> anyhow::Result<u64> {
            let word = words.next().context("a line that ends early")?;
            word.parse()
                .with_context(|| format!("{word:?} in {line:?}"))
        };
        let (process, done) = (number()?, number()?);
        match (what, &mut last) {
            ("began", before) => {
                if let Some((_, reached, ending)) = before {
                    let again = reached.saturating_sub(done);
                    found.capsules += again;
                    if *ending == Ending::Silent {
                        found.with_nodes += again;
                    }
                }
                *before = Some((process, done, Ending::Silent));
            }
            ("capsule", Some(now)) if now.0 == process => now.1 = done,
            ("left", Some(now)) if now.0 == process => now.2 = Ending::Left,
            ("oom", now) => {
                found.killed += 1;
                if let Some(now) = now.as_mut().filter(|now| now.0 == process) {
                    now.2 = Ending::Killed;
                }
            }
            _ => {}
        }
    }
    Ok(found)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Silent,
    Left,
    Killed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_computed_again_is_counted_by_why_its_process_ended() {
        let text = "began 1 0 a\ncapsule 1 1 a\ncapsule 1 2 a\ncapsule 1 3 a\noom 1 3 a\n\
                    began 2 1 a\ncapsule 2 2 a\nbegan 3 0 b\ncapsule 3 1 b\nleft 3 1 b\n\
                    began 4 1 b\nleft 4 1 b\n";
        let expected = Lost {
            capsules: 4,
            with_nodes: 2,
            killed: 1,
        };
        assert_eq!(read(text).unwrap(), expected);
        assert!(read("began x 0 a\n").is_err());
        assert_eq!(read("").unwrap(), Lost::default());
    }
}
