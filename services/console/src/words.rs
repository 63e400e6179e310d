//! Numbers and times as people read them.

use fiec_schemas::Timestamp;

/// A time as a page shows it: the browser says it in the reader's own zone (`live.js`).
pub fn ago(at: &Option<Timestamp>) -> String {
    at.map_or("never".to_owned(), |at| {
        span_ms(Timestamp::now().millis() - at.millis())
    })
}

/// A duration in its two largest units: `3 d 4 h`, `2 min 5 s`, `340 ms`.
pub fn span_ms(ms: i64) -> String {
    let ms = ms.max(0);
    let (s, min, h, d) = (ms / 1_000, ms / 60_000, ms / 3_600_000, ms / 86_400_000);
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..10_000 => format!("{:.1} s", ms as f64 / 1e3),
        10_000..60_000 => format!("{s} s"),
        60_000..3_600_000 => format!("{min} min {} s", s % 60),
        3_600_000..86_400_000 => format!("{h} h {} min", min % 60),
        _ => format!("{d} d {} h", h % 24),
    }
}

/// The same of seconds.
pub fn span(seconds: &f64) -> String {
    let ms = (seconds * 1e3).clamp(0.0, 1e15);
    match ms > 0.0 && ms < 10.0 {
        true => format!("{ms:.1} ms"),
        false => span_ms(ms as i64),
    }
}

/// A count with thin spaces between thousands.
pub fn count(n: &i64) -> String {
    let digits = n.unsigned_abs().to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    if *n < 0 { format!("−{out}") } else { out }
}

/// Bytes in binary units.
pub fn bytes(n: &i64) -> String {
    let mut value = *n as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value.abs() < 1024.0 {
            return match unit {
                "B" => format!("{value} B"),
                _ => format!("{value:.1} {unit}"),
            };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// The pieces of a sentence in which code stands between backticks, and whether each is code.
pub fn pieces(text: &str) -> Vec<(bool, &str)> {
    let pieces: Vec<(bool, &str)> = (0..)
        .zip(text.split('`'))
        .map(|(n, piece)| (n % 2 == 1, piece))
        .collect();
    // A backtick without its other one is no more than that.
    match pieces.len() % 2 {
        0 => vec![(false, text)],
        _ => pieces,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_short() {
        assert_eq!(span_ms(340), "340 ms");
        assert_eq!(span_ms(4_250), "4.2 s");
        assert_eq!(span_ms(125_000), "2 min 5 s");
        assert_eq!(span_ms(90_000_000), "1 d 1 h");
        assert_eq!(span(&-3.0), "0 ms");
        assert_eq!(span(&0.000_68), "0.7 ms");
        assert_eq!(span(&0.034), "34 ms");
        assert_eq!(count(&1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(count(&-12), "−12");
        assert_eq!(bytes(&1_536), "1.5 KiB");
        assert_eq!(bytes(&12), "12 B");
        let pieces = pieces("ask `fiec why`");
        assert_eq!(pieces, [(false, "ask "), (true, "fiec why"), (false, "")]);
        assert_eq!(super::pieces("it`s"), [(false, "it`s")]);
    }
}
