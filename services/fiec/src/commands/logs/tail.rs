//! Keeps the last lines of a text back until all of it that is stored has been read.

use std::io::{self, Write};

/// Writes to its target, or keeps the last lines for it.
pub struct Tail<W> {
    target: W,
    /// Number of lines that are kept. None once they are written: later ones are written at once.
    lines: Option<usize>,
    kept: Vec<u8>,
    /// If more bytes are kept, the lines that are not wanted are dropped.
    room: usize,
}

impl<W: Write> Tail<W> {
    /// With `None` nothing is kept back.
    pub fn new(target: W, lines: Option<usize>) -> Self {
        Self {
            target,
            lines,
            kept: Vec::new(),
            room: ROOM,
        }
    }

    /// Writes the kept lines. From now on all is written at once.
    ///
    /// # Errors
    /// If the target cannot be written.
    pub fn release(&mut self) -> io::Result<()> {
        self.trim();
        self.lines = None;
        self.target.write_all(&std::mem::take(&mut self.kept))?;
        self.target.flush()
    }

    /// Drops all but the last lines. The last one may have no end yet.
    fn trim(&mut self) {
        let Some(lines) = self.lines else { return };
        let text = self.kept.strip_suffix(b"\n").unwrap_or(&self.kept);
        let mut ends = text
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, byte)| **byte == b'\n');
        let start = match lines.checked_sub(1) {
            None => Some(self.kept.len()),
            Some(before) => ends.nth(before).map(|(at, _)| at + 1),
        };
        if let Some(start) = start {
            self.kept.drain(..start);
        }
    }
}

impl<W: Write> Write for Tail<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.lines.is_none() {
            return self.target.write(bytes);
        }
        self.kept.extend_from_slice(bytes);
        if self.kept.len() > self.room {
            self.trim();
            // Twice of what is wanted, so that each byte is moved a few times at most.
            self.room = ROOM.max(2 * self.kept.len());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.target.flush()
    }
}

/// Least number of bytes that are kept before lines are dropped.
const ROOM: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(lines: usize, parts: &[&str]) -> String {
        let mut target = Vec::new();
        let mut tail = Tail::new(&mut target, Some(lines));
        for part in parts {
            tail.write_all(part.as_bytes()).unwrap();
        }
        tail.release().unwrap();
        tail.write_all(b"later").unwrap();
        String::from_utf8(target).unwrap()
    }

    #[test]
    fn the_last_lines_are_kept_with_one_that_has_no_end() {
        assert_eq!(tail(2, &["a\nb", "b\nc\n"]), "bb\nc\nlater");
        assert_eq!(tail(2, &["a\nb\nc"]), "b\nclater");
        assert_eq!(tail(9, &["a\nb\n"]), "a\nb\nlater");
        assert_eq!(tail(0, &["a\nb\n"]), "later");
        assert_eq!(tail(1, &["a\n\n"]), "\nlater");
        let many = "x\n".repeat(ROOM);
        assert_eq!(tail(1, &[&many, "y\n"]), "y\nlater");
    }
}
