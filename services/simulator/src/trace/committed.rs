//! Committed digests: a text file with one line per trace, ordered by name.

use std::collections::BTreeMap;
use std::path::Path;

use super::Digested;

/// The traces of a file by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Committed(pub BTreeMap<String, Digested>);

impl Committed {
    /// Reads a file. A missing file is an empty one.
    ///
    /// # Errors
    /// If the file cannot be read, or a line has another form.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
        };
        Self::parse(&text).map_err(|problem| format!("{}: {problem}", path.display()))
    }

    /// Reads the text of such a file.
    ///
    /// # Errors
    /// The line that has another form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, steps, digest] = words.as_slice() else {
                return Err(format!("{line:?} must be a name, steps and a digest"));
            };
            let steps = steps
                .parse()
                .map_err(|_| format!("{line:?}: the steps must be a number"))?;
            let digest = (*digest).to_owned();
            all.insert((*name).to_owned(), Digested { steps, digest });
        }
        Ok(Self(all))
    }

    /// The text of the file.
    pub fn to_text(&self) -> String {
        let lines = self.0.iter();
        let lines = lines.map(|(name, of)| format!("{name} {} {}\n", of.steps, of.digest));
        lines.collect()
    }

    /// Compares a trace with the committed one.
    ///
    /// # Errors
    /// What differs, for a person.
    pub fn compare(&self, name: &str, found: &Digested) -> Result<(), String> {
        match self.0.get(name) {
            Some(committed) if committed == found => Ok(()),
            Some(committed) if committed.steps == found.steps => Err(format!(
                "the trace {name} differs from the committed one in its {} steps",
                found.steps
            )),
            Some(committed) => Err(format!(
                "the trace {name} differs from the committed one: it has {} steps, that {}",
                found.steps, committed.steps
            )),
            None => Err(format!("the trace {name} is not committed")),
        }
    }
}

/// True if committed files are to be rewritten.
pub fn is_update() -> bool {
    std::env::var_os("FIEC_UPDATE").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_reads_as_it_is_written_and_a_difference_names_its_trace() {
        let text = "a 3 00ff\nb 4 11ee\n";
        let committed = Committed::parse(text).unwrap();
        assert_eq!(committed.to_text(), text);
        let of = |steps, digest: &str| Digested {
            steps,
            digest: digest.to_owned(),
        };
        assert_eq!(committed.compare("a", &of(3, "00ff")), Ok(()));
        for (name, found, words) in [
            (
                "a",
                of(3, "00fe"),
                "trace a differs from the committed one in its 3 steps",
            ),
            (
                "b",
                of(5, "11ee"),
                "trace b differs from the committed one: it has 5 steps, that 4",
            ),
            ("c", of(1, "00"), "trace c is not committed"),
        ] {
            let said = committed.compare(name, &found).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
        assert!(Committed::parse("a 3\n").unwrap_err().contains("must be"));
    }
}
