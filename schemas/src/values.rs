//! Values of parameters and results: JSON that FIEC keeps as it is.
//!
//! The parser makes a float of an integer that 64 bits do not hold, and so another number. It
//! refuses more than 128 levels, and messages put some around a value. So both are refused where a
//! value enters.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::submission::FieldError;

/// Decimal digits that always fit into 64 bits.
const SAFE_DIGITS: usize = 18;
/// Most levels of lists and objects around a value.
const DEPTH_LIMIT: usize = 100;

/// Checks that 64 bits hold each integer of a JSON text (-2^63 to 2^64 - 1), and that it is not
/// nested too deeply. `root` is the path of the text itself; it is empty for a message, whose fields
/// are the values. A text that is not JSON passes: its own parser refuses it.
///
/// # Errors
/// The path of the first value that breaks a rule.
pub fn check(text: &[u8], root: &str) -> Result<(), FieldError> {
    // Most texts need no second parser.
    if !is_suspect(text) {
        return Ok(());
    }
    let most = DEPTH_LIMIT + usize::from(root.is_empty());
    match serde_json::from_slice::<&RawValue>(text) {
        Ok(value) => walk(value, root, most),
        Err(_) => Ok(()),
    }
}

/// Whether a text may have a long integer or many levels.
fn is_suspect(text: &[u8]) -> bool {
    let (mut digits, mut opened) = (0, 0);
    text.iter().any(|byte| {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        opened += usize::from(matches!(byte, b'[' | b'{'));
        digits > SAFE_DIGITS || opened > DEPTH_LIMIT
    })
}

fn walk(value: &RawValue, path: &str, levels: usize) -> Result<(), FieldError> {
    let text = value.get();
    let inner = || {
        levels.checked_sub(1).ok_or_else(|| {
            let short: String = path.chars().take(40).collect();
            let rule = format!("lists and objects are nested more than {DEPTH_LIMIT} deep");
            FieldError::new(format!("{short}…"), rule)
        })
    };
    match text.as_bytes().first() {
        Some(b'{') => {
            let fields: BTreeMap<String, &RawValue> = read(text, path)?;
            fields.into_iter().try_for_each(|(name, value)| {
                let dot = if path.is_empty() { "" } else { "." };
                walk(value, &format!("{path}{dot}{name}"), inner()?)
            })
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = read(text, path)?;
            let mut items = items.into_iter().enumerate();
            items.try_for_each(|(n, value)| walk(value, &format!("{path}[{n}]"), inner()?))
        }
        Some(b'-' | b'0'..=b'9') if !text.contains(['.', 'e', 'E']) => {
            if text.parse::<i64>().is_ok() || text.parse::<u64>().is_ok() {
                return Ok(());
            }
            let shown: String = text.chars().take(80).collect();
            let rule = "an integer has 64 bits at most";
            let advice = "make it a text, or a float";
            Err(FieldError::new(
                path,
                format!("{rule}, but this is {shown}; {advice}"),
            ))
        }
        _ => Ok(()),
    }
}

fn read<'a, T: serde::Deserialize<'a>>(text: &'a str, path: &str) -> Result<T, FieldError> {
    serde_json::from_str(text).map_err(|error| FieldError::new(path, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_64_bits_pass_and_longer_ones_are_named() {
        for good in [
            r#"{"a":[18446744073709551615,-9223372036854775808]}"#,
            r#"{"a":"1180591620717411303425","b":0.12345678901234567890123}"#,
            r#"{"a":1180591620717411303425.0,"b":12345678901234567890123e5}"#,
            "no JSON 1180591620717411303425",
        ] {
            assert_eq!(check(good.as_bytes(), "params"), Ok(()), "{good}");
        }
        for (bad, path, digits) in [
            (
                r#"{"a":{"b":[0,18446744073709551616]}}"#,
                "params.a.b[1]",
                "18446744073709551616",
            ),
            (
                "[-9223372036854775809]",
                "params[0]",
                "-9223372036854775809",
            ),
            ("1180591620717411303425", "params", "1180591620717411303425"),
        ] {
            let error = check(bad.as_bytes(), "params").unwrap_err();
            assert_eq!(error.field, path);
            assert!(error.reason.contains("64 bits at most"), "{error}");
            assert!(error.reason.contains(digits), "{error}");
        }
    }

    #[test]
    fn a_hundred_levels_pass_whatever_texts_contain() {
        let nested = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
        let wide = format!("[{}]", vec!["[[]]"; 200].join(","));
        for good in [&nested(100), &wide, &format!("{:?}", "[".repeat(500))] {
            assert_eq!(check(good.as_bytes(), "result"), Ok(()), "{good}");
        }
        let error = check(nested(101).as_bytes(), "result").unwrap_err();
        assert!(error.field.starts_with("result[0][0]"), "{error}");
        assert!(error.reason.contains("more than 100 deep"), "{error}");
        let message = |levels| format!("{{\"result\":{}}}", nested(levels));
        assert_eq!(check(message(100).as_bytes(), ""), Ok(()));
        assert!(check(message(101).as_bytes(), "").is_err());
    }
}
