//! Makes foreign text safe for a terminal.
//!
//! Logs, notes, names and reasons come from programs and from other people. A terminal obeys
//! control characters in them. It may rename its window, hide lines, or send text that a shell then
//! reads. Therefore all output of this command passes [`safe`], on a terminal and in a pipe: the
//! content of a pipe is often shown later. `--json` keeps the exact text, with JSON's own escapes.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;

/// Replaces control characters, and characters that change the direction of writing, by escapes
/// such as `\u001b`. Keeps line feeds and tabs.
pub fn safe(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut all = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) {
            // All of them are in the first plane, so JSON stays JSON.
            let _ = write!(all, "\\u{:04x}", u32::from(c));
        } else {
            all.push(c);
        }
    }
    Cow::Owned(all)
}

fn is_unsafe(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        // Marks, embeddings, overrides and isolates of bidirectional text; line separators.
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            true
        }
        // C0, delete and C1.
        c => c.is_control(),
    }
}

/// Shows foreign bytes on a terminal, through [`safe`]. Bytes that are no UTF-8 become `\xff`.
///
/// # Errors
/// If they cannot be read, or the terminal is gone.
pub fn show(from: &mut impl io::Read, to: &mut impl io::Write) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    // Bytes of a character whose rest was not read yet.
    let mut kept = 0;
    loop {
        let read = from.read(&mut buffer[kept..])?;
        let filled = kept + read;
        let chunks = buffer[..filled].utf8_chunks();
        let last = chunks.last().map_or(&[][..], |chunk| chunk.invalid());
        let is_cut = std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
        kept = if is_cut && read > 0 { last.len() } else { 0 };
        let end = filled - kept;
        for chunk in buffer[..end].utf8_chunks() {
            to.write_all(safe(chunk.valid()).as_bytes())?;
            for byte in chunk.invalid() {
                write!(to, "\\x{byte:02x}")?;
            }
        }
        buffer.copy_within(end..filled, 0);
        if read == 0 {
            return to.flush();
        }
    }
}

/// Where logs go, through [`safe`]. The subscriber itself escapes the message of an event, but no
/// other field. So logs have no colours: here ESC of the subscriber looks like that of foreign text.
#[derive(Debug, Clone, Copy)]
pub struct LogWriter<W>(pub W);

impl<W: io::Write> io::Write for LogWriter<W> {
    /// Takes a whole line of the log, as the subscriber writes it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.0.write_all(safe(&text).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// Reads `step` bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl io::Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let end = buffer.len().min(self.1);
            self.0.read(&mut buffer[..end])
        }
    }

    #[test]
    fn foreign_bytes_are_shown_wherever_they_are_cut() {
        let bytes = b"\xce\xc3\xa9\xff \xf0\x9f\x94\xac\x1b[2J\n\xf0\x9f";
        for step in 1..=bytes.len() {
            let mut shown = Vec::new();
            show(&mut Slow(bytes, step), &mut shown).unwrap();
            let shown = String::from_utf8(shown).unwrap();
            assert_eq!(shown, "\\xceé\\xff 🔬\\u001b[2J\n\\xf0\\x9f", "{step}");
        }
    }

    #[derive(Clone, Default)]
    struct Terminal(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Terminal {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn foreign_text_in_a_log_is_no_command_to_the_terminal() {
        let terminal = Terminal::default();
        let shown = terminal.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || LogWriter(terminal.clone()))
            .with_ansi(false)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(subject = %"a\rb\u{202e}c\u{1b}[2Jd", "x\re");
        });
        let shown = String::from_utf8(shown.0.lock().unwrap().clone()).unwrap();
        assert!(shown.contains("a\\u000db\\u202ec\\u001b[2Jd"), "{shown:?}");
        assert!(shown.contains("x\\u000de"), "{shown:?}");
        assert!(!shown.trim_end().contains(is_unsafe), "{shown:?}");
    }

    #[test]
    fn what_a_terminal_obeys_is_shown_and_nothing_else_changes() {
        for plain in ["", "σ = 1.5 µs → n2\n\tß 日本 👩\u{200d}🔬", "שלום"] {
            assert!(matches!(safe(plain), Cow::Borrowed(same) if same == plain));
        }
        for (text, expected) in [
            ("\x1b]0;x\x07", "\\u001b]0;x\\u0007"),
            ("a\rb\x08\x7f\0", "a\\u000db\\u0008\\u007f\\u0000"),
            ("\u{9b}2J\u{85}", "\\u009b2J\\u0085"),
            ("a\u{202e}b\u{2066}c\u{2028}", "a\\u202eb\\u2066c\\u2028"),
        ] {
            assert_eq!(safe(text), expected);
        }
        let json = serde_json::json!({ "note": "\u{9b}\u{202e}\x7f" });
        let printed = safe(&json.to_string()).into_owned();
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&printed).unwrap(),
            json
        );
    }
}
