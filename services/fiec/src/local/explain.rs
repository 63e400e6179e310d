//! Describes the first difference between two states or results.

use fiec_kit::foreign::pack;
use serde_json::Value;

/// Most characters of a value that are shown.
const SHOWN: usize = 60;

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

fn first(path: &str, a: &Value, b: &Value) -> Option<String> {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            let keys: std::collections::BTreeSet<_> = x.keys().chain(y.keys()).collect();
            keys.into_iter().find_map(|key| {
                let path = format!("{path}.{key}");
                match (x.get(key), y.get(key)) {
                    (Some(a), Some(b)) => first(&path, a, b),
                    (Some(_), None) => Some(format!("{path} is only in the first")),
                    _ => Some(format!("{path} is only in the second")),
                }
            })
        }
        (Value::Array(x), Value::Array(y)) if x.len() == y.len() => {
            (0..x.len()).find_map(|at| first(&format!("{path}[{at}]"), &x[at], &y[at]))
        }
        _ if a == b => None,
        _ => Some(format!("{path} is {} and {}", short(a), short(b))),
    }
}

/// The first key in which two values differ.
pub fn values(a: &Value, b: &Value) -> String {
    first("", a, b)
        .map(|text| text.trim_start_matches('.').to_owned())
        .unwrap_or_else(|| "equal".to_owned())
}

fn hex(bytes: &[u8], at: usize) -> String {
    let end = bytes.len().min(at + 8);
    let shown: Vec<String> = bytes[at.min(end)..end]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    match shown.is_empty() {
        true => "nothing".to_owned(),
        false => shown.join(" "),
    }
}

fn plain(a: &[u8], b: &[u8]) -> String {
    let json = (serde_json::from_slice(a), serde_json::from_slice(b));
    if let (Ok(a @ (Value::Object(_) | Value::Array(_))), Ok(b)) = json
        && a != b
    {
        return format!("as JSON, {}", values(&a, &b));
    }
    let at = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let many = a.iter().zip(b).filter(|(x, y)| x != y).count();
    let lengths = match a.len() == b.len() {
        true => format!("{many} of {} bytes", a.len()),
        false => format!("lengths {} and {}", a.len(), b.len()),
    };
    format!(
        "{lengths}, first at byte {at}: {} and {}",
        hex(a, at),
        hex(b, at)
    )
}

/// The difference between two states: a file, a key or the bytes.
pub fn states(a: &[u8], b: &[u8]) -> String {
    if let (Ok(x), Ok(y)) = (pack::list(a), pack::list(b)) {
        for (name, contents) in &x {
            match y.iter().find(|(other, _)| other == name) {
                None => return format!("state file {:?} is only in the first", name.display()),
                Some((_, other)) if other != contents => {
                    return format!(
                        "state file {:?}: {}",
                        name.display(),
                        plain(contents, other)
                    );
                }
                _ => {}
            }
        }
        let more = y.iter().find(|(name, _)| !x.iter().any(|(n, _)| n == name));
        if let Some((name, _)) = more {
            return format!("state file {:?} is only in the second", name.display());
        }
    }
    plain(a, b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_difference_is_named_by_key_file_or_byte() {
        let (a, b) = (json!({"x": [1, {"y": 2}]}), json!({"x": [1, {"y": 3}]}));
        assert_eq!(values(&a, &b), "x[1].y is 2 and 3");
        assert_eq!(
            states(a.to_string().as_bytes(), b.to_string().as_bytes()),
            "as JSON, x[1].y is 2 and 3"
        );
        assert_eq!(
            states(b"\x01\x02\x03", b"\x01\xff\x03"),
            "1 of 3 bytes, first at byte 1: 02 03 and ff 03"
        );
        assert_eq!(
            states(b"\x01\x02", b"\x01"),
            "lengths 2 and 1, first at byte 1: 02 and nothing"
        );
        let packed = |text: &str| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("same"), "1").unwrap();
            std::fs::write(folder.path().join("sum"), text).unwrap();
            let folder = &fiec_kit::beneath::Folder::open(folder.path()).unwrap();
            let (files, _) = pack::look(folder).unwrap();
            let mut out = Vec::new();
            pack::pack(folder, &files, &mut out).unwrap();
            out
        };
        let text = states(&packed("12"), &packed("13"));
        assert!(
            text.starts_with("state file \"sum\": 1 of 2 bytes"),
            "{text}"
        );
    }
}
