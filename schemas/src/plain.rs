//! Translates the messages of a JSON parser into words of JSON, without types of this source or a
//! second line number.

use crate::scheduling::PRIORITY_LIMIT;

/// Least similarity of two names, from 0 to 1, for one to be a slip of the other.
const SIMILAR: f64 = 0.8;
/// The forms of a deadline. A bare date is meant as the first one.
const DEADLINE: &str = r#"write {"at": "2026-12-31T18:00:00Z"} or {"within_s": 7200}"#;

/// The reason of a syntax error. One line of a file was parsed, so only the column is named.
pub(crate) fn syntax(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    match (error.line(), error.column()) {
        (0, _) => format!("not valid JSON: {what}"),
        (1, column) => format!("not valid JSON: {what} at character {column}"),
        (line, column) => {
            format!("not valid JSON: {what} at character {column} of its line {line}")
        }
    }
}

/// The reason why a value was refused, without types of this source. The path of the field says the
/// place.
pub(crate) fn refusal(reason: &str) -> String {
    let reason = match reason.rfind(" at line ") {
        Some(place) => &reason[..place],
        None => reason,
    };
    if let Some(words) = misspelt(reason) {
        return words;
    }
    if reason.starts_with("invalid length ") && reason.contains(", expected struct ") {
        return "must be an object, but is a list".to_owned();
    }
    let mismatch = ["invalid type: ", "invalid value: "];
    let mismatch = mismatch.iter().find_map(|kind| reason.strip_prefix(kind));
    match mismatch.and_then(|rest| rest.rsplit_once(", expected ")) {
        Some((is, must_be)) => format!("must be {}, but is {}", expected(must_be), found(is)),
        None => reason.to_owned(),
    }
}

/// The name that was probably meant by an unknown field.
fn misspelt(reason: &str) -> Option<String> {
    let rest = reason.strip_prefix("unknown field `")?;
    let (field, names) = rest.split_once("`, expected ")?;
    let names = names.split('`').skip(1).step_by(2);
    let rated = names.map(|name| (strsim::jaro_winkler(field, name), name));
    let (likeness, name) = rated.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (likeness >= SIMILAR).then(|| format!("unknown field `{field}`; did you mean `{name}`?"))
}

/// The reason, with the right form if people often miss it.
pub(crate) fn refusal_of(field: &str, reason: &str) -> String {
    let words = refusal(reason);
    match field {
        "deadline" | "deadline.at" => format!("{words}; {DEADLINE}"),
        _ => words,
    }
}

fn expected(text: &str) -> String {
    let whole = |least: &str, most: &str| format!("a whole number from {least} to {most}");
    match text {
        "a map" => "an object".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "string or map" => "a name, or an object with one name".to_owned(),
        "u8" => whole("0", "255"),
        "u16" => whole("0", "65535"),
        "u32" => whole("0", "4294967295"),
        "u64" | "usize" => "a whole number, 0 or more".to_owned(),
        // Only priorities have this type.
        "i16" => format!("a whole number from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}"),
        "i32" | "i64" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        text if text.starts_with("a nonzero ") => "a whole number above 0".to_owned(),
        text => {
            let first = text.split(' ').next().unwrap_or_default();
            match first {
                "struct" | "internally" => "an object".to_owned(),
                "enum" => "one of its names".to_owned(),
                _ => text.to_owned(),
            }
        }
    }
}

fn found(text: &str) -> String {
    let quoted = |kind: &str| {
        text.strip_prefix(kind)?
            .strip_prefix('`')?
            .strip_suffix('`')
    };
    match text {
        "map" => "an object".to_owned(),
        "sequence" => "a list".to_owned(),
        "unit value" => "null".to_owned(),
        _ => {
            let number = quoted("integer ").or_else(|| quoted("floating point "));
            match (number, quoted("boolean ")) {
                (Some(number), _) => format!("the number {number}"),
                (None, Some(truth)) => truth.to_owned(),
                (None, None) => text.replacen("string ", "the text ", 1),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Submission;

    fn refused(line: &str) -> String {
        Submission::parse(line.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_refused_line_is_told_in_the_words_of_json() {
        for (line, words) in [
            ("5", "must be an object, but is the number 5"),
            (
                r#"{"program":"synthetic@1","retries":"three"}"#,
                r#"retries: must be a whole number from 0 to 4294967295, but is the text "three""#,
            ),
            (
                r#"{"program":"synthetic@1","retries":-1}"#,
                "retries: must be a whole number from 0 to 4294967295, but is the number -1",
            ),
            (
                r#"{"program":"synthetic@1","retry":1}"#,
                "retry: unknown field `retry`; did you mean `retries`?",
            ),
            (
                r#"{"program":"synthetic@1","id":123}"#,
                "id: must be a text, but is the number 123",
            ),
            (
                r#"{"program":"synthetic@1","priority":9007199254740993}"#,
                "priority: must be a whole number from -100 to 100, but is the number \
                 9007199254740993",
            ),
            (
                r#"{"program":"synthetic@1","labels":true}"#,
                "labels: must be an object, but is true",
            ),
            (
                r#"{"program":"synthetic@1","after":"a"}"#,
                r#"after: must be a list, but is the text "a""#,
            ),
            (
                r#"{"program":"#,
                "not valid JSON: EOF while parsing a value at character 11",
            ),
        ] {
            assert_eq!(refused(line), words, "{line}");
        }
    }

    #[test]
    fn a_date_as_deadline_is_told_the_right_form() {
        for value in [r#""2026-12-01""#, r#"{"at":"2026-12-01"}"#] {
            let reason = refused(&format!(
                r#"{{"program":"synthetic@1","deadline":{value}}}"#
            ));
            let form = r#"write {"at": "2026-12-31T18:00:00Z"} or {"within_s": 7200}"#;
            assert!(reason.starts_with("deadline"), "{reason}");
            assert!(reason.ends_with(form), "{reason}");
            assert!(!reason.contains("struct"), "{reason}");
        }
    }
}
