//! The file of public keys that an operator pins. It has one line `NODE = KEY` for each node. `#`
//! begins a comment.

use std::collections::BTreeMap;
use std::path::Path;

use fiec_broker::trust::check_key;
use fiec_schemas::NodeId;

/// Reads the file.
///
/// # Errors
/// If the file cannot be read, or a line is not a node with its key. The message names the line,
/// the reason and what to do.
pub fn read(path: &Path) -> anyhow::Result<BTreeMap<NodeId, String>> {
    let file = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        anyhow::anyhow!("{file}: {error}; `fiec nodes --keys` prints such a file")
    })?;
    let mut keys = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let (node, key) = parse(line).map_err(|why| {
            anyhow::anyhow!(
                "{file}, line {number}: {why}; write `NODE = KEY`, as `fiec nodes --keys` does"
            )
        })?;
        if keys.insert(node.clone(), key).is_some() {
            anyhow::bail!("{file}, line {number}: {node} has a key already; keep one of the lines");
        }
    }
    Ok(keys)
}

fn parse(line: &str) -> Result<(NodeId, String), String> {
    let (node, key) = line.split_once('=').ok_or("there is no `=`")?;
    let node: NodeId = node
        .trim()
        .parse()
        .map_err(|error| format!("the name of the node: {error}"))?;
    let key = key.trim().trim_matches('"');
    check_key(key)?;
    Ok((node, key.to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use fiec_broker::trust::NodeKey;

    fn of(text: &str) -> Result<BTreeMap<NodeId, String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        std::fs::write(&file, text).unwrap();
        read(&file).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_of_keys_is_read_and_what_is_wrong_in_it_is_named() {
        let key = NodeKey::random().public();
        let keys = of(&format!("# ours\nn1 = {key} # rack 7\n\n n2=\"{key}\"\n")).unwrap();
        let names: Vec<_> = keys.iter().map(|(n, k)| (n.as_str(), k == &key)).collect();
        assert_eq!(names, [("n1", true), ("n2", true)]);
        for (text, said) in [
            (format!("n1 {key}"), "line 1: there is no `=`"),
            (
                "\nn1 = nonsense".to_owned(),
                "line 2: \"nonsense\" is no public key",
            ),
            (
                format!("n1={key}\nn1={key}"),
                "line 2: n1 has a key already",
            ),
            (format!("a b = {key}"), "line 1: the name of the node"),
        ] {
            let error = of(&text).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        let absent = read(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(
            absent.contains("/nonexistent") && absent.contains("--keys"),
            "{absent}"
        );
    }
}
