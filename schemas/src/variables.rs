//! Variables of a program's environment, as a submission names them.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::package::is_built_in;
use crate::submission::FieldError;

/// Most variables of a submission.
pub const VARIABLES_LIMIT: usize = 64;
/// Most bytes of their names and values together, without the content of files.
pub const VARIABLES_BYTES_LIMIT: usize = 32 * 1024;
/// Most bytes of the content of a file: container engines read no longer lines.
pub const VARIABLE_FILE_LIMIT: u64 = 32 * 1024;
/// Names the devices that CUDA shows to a process. FIEC sets it.
pub const CUDA_DEVICES_ENV: &str = "CUDA_VISIBLE_DEVICES";

/// The variables of a submission, by their names.
pub type Variables = BTreeMap<String, Variable>;

/// The value of a variable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be a text, or {\"file\": NAME} for the content of a file in the node's --secret-dir"
)]
pub enum Variable {
    /// This text, which is stored in the ledger.
    Text(String),
    /// The content of a file on the node, which is stored nowhere.
    File(VariableFile),
}

/// A file on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VariableFile {
    /// Its name in the folder that the node's operator allows (`fiec worker --secret-dir`). One line
    /// feed at its end does not belong to the value.
    pub file: String,
}

/// Whether a text can be the name of a variable: letters, digits and `_`, no digit first.
pub fn is_variable(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && name.chars().all(is_part)
}

/// Whether FIEC sets this variable itself.
pub fn is_fiecs(name: &str) -> bool {
    name.starts_with("FIEC_") || name == CUDA_DEVICES_ENV
}

/// Whether a text can be the value of a variable: one line, as an environment of any engine holds it.
pub fn is_value(text: &str) -> bool {
    !text.contains(['\0', '\n', '\r'])
}

fn is_file_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=128).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_part)
}

/// Checks the variables that a submission of this program has.
///
/// # Errors
/// The field and the rule that it breaks.
pub fn check(all: &Variables, program: &str) -> Result<(), FieldError> {
    let broken = |field: String, rule: &str| Err(FieldError::new(field, rule));
    if all.is_empty() {
        return Ok(());
    }
    if is_built_in(program) {
        return broken("env".to_owned(), "built-in programs read no variables");
    }
    if all.len() > VARIABLES_LIMIT {
        let rule = format!("at most {VARIABLES_LIMIT} are allowed");
        return broken("env".to_owned(), &rule);
    }
    let mut bytes = 0;
    for (name, value) in all {
        let field = || format!("env.{name}");
        if !is_variable(name) {
            let rule = "must be the name of a variable: letters, digits and `_`, no digit first";
            return broken(field(), rule);
        }
        if is_fiecs(name) {
            return broken(field(), "is set by FIEC");
        }
        bytes += name.len();
        match value {
            Variable::Text(text) if !is_value(text) => {
                return broken(field(), "must be one line, without NUL");
            }
            Variable::Text(text) => bytes += text.len(),
            Variable::File(VariableFile { file }) if !is_file_name(file) => {
                let rule = "must be the name of a file, not a path: 1 to 128 letters, digits, `.`, \
                            `_` and `-`, no `.` first";
                return broken(format!("env.{name}.file"), rule);
            }
            Variable::File(_) => {}
        }
    }
    if bytes > VARIABLES_BYTES_LIMIT {
        let rule = format!("names and values have {bytes} bytes; at most {VARIABLES_BYTES_LIMIT}");
        return broken("env".to_owned(), &rule);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Submission;
    use serde_json::json;

    fn refused(env: serde_json::Value) -> String {
        let line = json!({"program": "own@1", "env": env}).to_string();
        Submission::parse(line.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn variables_are_read_and_each_rule_names_its_field() {
        let line = r#"{"program":"own@1","env":{"A_1":"x y","TOKEN":{"file":"hub.token"}}}"#;
        let submission = Submission::parse(line.as_bytes()).unwrap();
        let file = VariableFile {
            file: "hub.token".to_owned(),
        };
        assert_eq!(submission.env["A_1"], Variable::Text("x y".to_owned()));
        assert_eq!(submission.env["TOKEN"], Variable::File(file));
        assert_eq!(submission.to_json(), line.as_bytes());

        for (env, words) in [
            (json!({"1A": "x"}), "env.1A: must be the name of a variable"),
            (json!({"FIEC_X": "x"}), "env.FIEC_X: is set by FIEC"),
            (json!({CUDA_DEVICES_ENV: "0"}), "is set by FIEC"),
            (json!({"A": "x\ny"}), "env.A: must be one line"),
            (
                json!({"A": {"file": "../key"}}),
                "env.A.file: must be the name of a file",
            ),
            (
                json!({"A": {"file": ".key"}}),
                "env.A.file: must be the name of a file",
            ),
            (
                json!({"A": {"file": "x", "more": 1}}),
                "env.A: must be a text, or",
            ),
            (json!({"A": 1}), "env.A: must be a text, or"),
            (
                json!({"A": "x".repeat(VARIABLES_BYTES_LIMIT)}),
                "env: names and values have",
            ),
        ] {
            let said = refused(env);
            assert!(said.contains(words), "{said}");
        }
        let many = (0..=VARIABLES_LIMIT).map(|i| (format!("A{i}"), json!("x")));
        assert!(refused(many.collect()).contains("env: at most 64 are allowed"));
        let built_in = br#"{"program":"synthetic@1","env":{"A":"x"}}"#;
        let said = Submission::parse(built_in).unwrap_err().to_string();
        assert!(said.contains("env: built-in programs"), "{said}");
    }
}
