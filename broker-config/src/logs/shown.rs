//! Pieces of output for a reader: joined to lines, with what is missing between them.

use std::collections::HashMap;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use fiec_schemas::messages::{LogLine, LogStream};
use fiec_schemas::{Epoch, NodeId};
use serde::{Deserialize, Serialize};

/// A stream of one binding.
type Source = (NodeId, Epoch, LogStream);

/// Progress of the reader in one stream.
#[derive(Debug, Default)]
struct Seen {
    /// Bytes that the program has written so far.
    bytes: u64,
    /// The last message, which a worker publishes again if it is not sure that it is stored.
    last: Vec<u8>,
}

/// State of the screen.
#[derive(Debug, Default)]
pub struct Shown {
    seen: HashMap<Source, Seen>,
    /// The line on the screen that is not finished, and whether it ends with a carriage return.
    open: Option<(Source, bool)>,
}

/// A piece for a reader.
#[derive(Debug)]
pub struct Text {
    line: LogLine,
    /// Notices about bytes that are missing before it.
    pub notices: Vec<String>,
    /// What the program has written, with the line feed.
    pub bytes: Vec<u8>,
}

/// The text for people: an overwritten line is shown as it was last, a byte that is no text as
/// `\x80`.
fn readable(bytes: &[u8]) -> String {
    let last = bytes.rsplit(|byte| *byte == b'\r').next().unwrap_or(bytes);
    let mut text = String::with_capacity(last.len());
    for chunk in last.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// Where a reader stands in one stream, to go on there later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The node.
    pub node: NodeId,
    /// The binding.
    pub epoch: Epoch,
    /// The stream.
    pub stream: LogStream,
    /// Bytes that the program has written so far.
    pub bytes: u64,
}

impl Shown {
    /// Goes on where another reader has stopped.
    pub fn at(places: Vec<Place>) -> Self {
        let seen = places.into_iter().map(|place| {
            let seen = Seen {
                bytes: place.bytes,
                last: Vec::new(),
            };
            ((place.node, place.epoch, place.stream), seen)
        });
        Self {
            seen: seen.collect(),
            open: None,
        }
    }

    /// Where it stands.
    pub fn places(&self) -> Vec<Place> {
        let seen = self.seen.iter();
        let place = seen.map(|((node, epoch, stream), seen)| Place {
            node: node.clone(),
            epoch: *epoch,
            stream: *stream,
            bytes: seen.bytes,
        });
        place.collect()
    }

    /// Takes a message. Returns none for one that was published twice.
    pub fn take(&mut self, payload: &[u8]) -> Option<serde_json::Result<Text>> {
        let line: LogLine = match serde_json::from_slice(payload) {
            Ok(line) => line,
            Err(error) => return Some(Err(error)),
        };
        let source = (line.node.clone(), line.epoch, line.stream);
        let seen = self.seen.entry(source).or_default();
        if line.offset.is_some() && seen.last == payload {
            return None;
        }
        seen.last = payload.to_vec();
        let mut bytes = Vec::new();
        let mut notices = Vec::new();
        if line.dropped.is_none() {
            // A text in which something is no base64 stays as it is.
            let coded = line.bytes.as_ref();
            match coded.and_then(|coded| BASE64_STANDARD.decode(coded).ok()) {
                Some(decoded) => bytes.extend(decoded),
                None => bytes.extend(line.line.as_bytes()),
            }
            bytes.extend((!line.part).then_some(b'\n'));
        }
        if let Some(offset) = line.offset {
            // Fewer: the worker has begun anew, for example after its own crash.
            let missing = offset.saturating_sub(seen.bytes);
            if missing > 0 {
                notices.push(format!("({missing} bytes are missing)"));
            }
            let dropped = line.dropped.map_or(0, |dropped| dropped.bytes);
            seen.bytes = offset + dropped + bytes.len() as u64;
        }
        if line.dropped.is_some() {
            notices.push(line.line.clone());
        }
        Some(Ok(Text {
            line,
            notices,
            bytes,
        }))
    }

    /// The piece as people read it.
    pub fn human(&mut self, text: &Text) -> String {
        let line = &text.line;
        let source = (line.node.clone(), line.epoch, line.stream);
        let start = format!(
            "{} {} e{} {}: ",
            line.at, line.node, line.epoch, line.stream
        );
        let mut said = String::new();
        for notice in &text.notices {
            said.push_str(self.finish());
            let _ = writeln!(said, "{start}{notice}");
        }
        if line.dropped.is_some() {
            return said;
        }
        let (bytes, ends) = match text.bytes.strip_suffix(b"\n") {
            Some(bytes) if !line.part => (bytes, true),
            _ => (&text.bytes[..], false),
        };
        let end = bytes
            .iter()
            .rposition(|byte| *byte != b'\r')
            .map_or(0, |at| at + 1);
        let (bytes, returned) = (&bytes[..end], end < bytes.len());
        let goes_on = match &self.open {
            Some((open, _)) if *open != source => false,
            // It overwrites what is there.
            Some((_, returned)) => bytes.is_empty() || !(*returned || bytes.contains(&b'\r')),
            None => false,
        };
        if !goes_on {
            said.push_str(self.finish());
            said.push_str(&start);
        }
        said.push_str(&readable(bytes));
        self.open = Some((source, returned));
        if ends {
            said.push_str(self.finish());
        }
        said
    }

    /// Ends the line on the screen that is not finished.
    pub fn finish(&mut self) -> &'static str {
        match self.open.take() {
            Some(_) => "\n",
            None => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message(offset: u64, line: &str, more: serde_json::Value) -> Vec<u8> {
        let mut message = json!({"at": "2026-01-01T00:00:00.000000Z", "node": "n1", "epoch": 1,
            "stream": "stdout", "boundary": 0, "line": line, "offset": offset});
        let fields = message.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        message.to_string().into_bytes()
    }

    fn human(messages: &[Vec<u8>]) -> String {
        let mut shown = Shown::default();
        let mut said = String::new();
        for message in messages {
            if let Some(text) = shown.take(message) {
                said.push_str(&shown.human(&text.unwrap()));
            }
        }
        said.push_str(shown.finish());
        said.replace("2026-01-01T00:00:00.000000Z n1 e1 ", "")
    }

    #[test]
    fn parts_are_joined_and_the_other_stream_comes_between_lines() {
        let part = json!({"part": true});
        let other = json!({"stream": "stderr"});
        let said = human(&[
            message(0, "name? ", part.clone()),
            message(6, "ann", part),
            message(9, "", json!({})),
            message(10, "a", json!({"part": true})),
            message(0, "warning", other),
            message(11, "b", json!({})),
        ]);
        let expected = "stdout: name? ann\nstdout: a\nstderr: warning\nstdout: b\n";
        assert_eq!(said, expected);
    }

    #[test]
    fn an_overwritten_line_is_shown_as_it_was_last() {
        let part = || json!({"part": true});
        let said = human(&[
            message(0, "crlf\r", json!({})),
            message(6, "\r1 %\r2 %", part()),
            message(14, "\r9 %", part()),
            message(18, "", json!({})),
            message(19, "10 %\r", part()),
            message(24, "20 %\r", part()),
            message(29, "", json!({})),
        ]);
        let expected = "stdout: crlf\nstdout: 2 %\nstdout: 9 %\nstdout: 10 %\nstdout: 20 %\n";
        assert_eq!(said, expected);
    }

    #[test]
    fn what_is_missing_is_counted() {
        let dropped = json!({"dropped": {"lines": 7, "bytes": 100}});
        let twice = message(208, "y", json!({}));
        let said = human(&[
            message(5, "x", json!({})),
            message(7, "(7 lines, 100 bytes dropped)", dropped),
            message(107, "z", json!({"part": true})),
            twice.clone(),
            twice,
            message(0, "once more", json!({"epoch": 2})),
        ]);
        let expected = "stdout: (5 bytes are missing)\nstdout: x\n\
             stdout: (7 lines, 100 bytes dropped)\nstdout: z\n\
             stdout: (100 bytes are missing)\nstdout: y\n";
        assert!(said.starts_with(expected), "{said}");
        assert!(said.ends_with("e2 stdout: once more\n"), "{said}");
    }

    #[test]
    fn lines_of_earlier_workers_are_shown_as_they_are() {
        let mut old: serde_json::Value =
            serde_json::from_slice(&message(0, "x", json!({}))).unwrap();
        old.as_object_mut().unwrap().remove("offset");
        let old = old.to_string().into_bytes();
        assert_eq!(human(&[old]), "stdout: x\n");
    }
}
