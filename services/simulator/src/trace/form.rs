//! The form of inputs, actions and settings in a trace.

use fiec_policy::{Config, Input, LedgerView};
use fiec_schemas::Sequence;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// The name of an enum's variant and its fields; `Null` if it has none.
///
/// # Errors
/// If JSON cannot hold a value.
pub fn named(variant: &impl Serialize) -> Result<(String, Value), serde_json::Error> {
    match serde_json::to_value(variant)? {
        // A variant with fields is an object of one field, which has the variant's name.
        Value::Object(variant) => Ok(variant.into_iter().next().unwrap_or_default()),
        Value::String(kind) => Ok((kind, Value::Null)),
        other => Ok((other.to_string(), Value::Null)),
    }
}

/// Reads an input from its kind and its fields.
///
/// # Errors
/// If there is no such kind, or the fields have another form.
pub fn input(kind: &str, body: Option<&str>) -> Result<Input, serde_json::Error> {
    let name = Value::String(kind.to_owned());
    let whole = match body {
        None => name,
        Some(body) => {
            let fields = (kind.to_owned(), serde_json::from_str(body)?);
            Value::Object(Map::from_iter([fields]))
        }
    };
    serde_json::from_value(whole)
}

/// A ledger message, as far as the policy reads it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message<'a> {
    /// Its sequence in the stream.
    pub seq: Sequence,
    /// What [`LedgerView::read`] reads.
    #[serde(borrow)]
    pub message: &'a RawValue,
}

/// The JSON of a [`Message`].
///
/// # Errors
/// If JSON cannot hold a value.
pub fn message(view: &LedgerView<'_>) -> Result<Value, serde_json::Error> {
    let mut message = serde_json::to_value(view)?;
    drop_absent(&mut message);
    Ok(serde_json::json!({"message": message, "seq": view.seq}))
}

/// Removes the fields of a view that its message does not have. The submission stays as it is.
fn drop_absent(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(drop_absent),
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            let others = fields.iter_mut().filter(|(name, _)| *name != "spec");
            others.for_each(|(_, field)| drop_absent(field));
        }
        _ => {}
    }
}

/// The settings that differ from their defaults. [`Config`] reads them, with today's defaults for
/// the rest.
///
/// # Errors
/// If JSON cannot hold a value.
pub fn changed(config: &Config) -> Result<Value, serde_json::Error> {
    let mut changed = serde_json::to_value(config)?;
    let defaults = serde_json::to_value(Config::default())?;
    if let Value::Object(fields) = &mut changed {
        fields.retain(|name, value| defaults.get(name) != Some(value));
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_policy::{Discipline, ExplanationSettings, VerificationSettings};
    use serde_json::json;

    #[test]
    fn only_what_differs_from_the_defaults_is_written_and_read_back() {
        assert_eq!(changed(&Config::default()).unwrap(), json!({}));
        let config_of_a_test = Config {
            explanation: ExplanationSettings { report_ms: 0 },
            discipline: Discipline::Fifo,
            verification: VerificationSettings {
                share: 0.5,
                ..VerificationSettings::default()
            },
            ..Config::default()
        };
        let written = changed(&config_of_a_test).unwrap();
        let expected = json!({"discipline": "fifo", "tell_ms": 0, "verify_share": 0.5});
        assert_eq!(written, expected);
        let read: Config = serde_json::from_value(written).unwrap();
        assert_eq!(read, config_of_a_test);
        let unknown = serde_json::from_value::<Config>(json!({"colour": 1}));
        assert!(unknown.unwrap_err().to_string().contains("colour"));
    }
}
