//! Makes foreign text safe for a terminal.
//!
//! Logs, notes, names and reasons come from programs and from other people. A terminal obeys
//! control characters in them. It may rename its window, hide lines, or send text that a shell then
//! reads. Therefore all output of this command passes [`safe`], on a terminal and in a pipe: the
//! content of a pipe is often shown later. `--json` keeps the exact text, with JSON's own escapes.

use std::borrow::Cow;
use std::fmt::Write as _;

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

#[cfg(test)]
mod tests {
    use super::*;

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
