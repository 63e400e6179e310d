//! The variables that a submission sets, with their values on this node.

use std::collections::BTreeMap;

use fiec_schemas::Secret;
use serde::{Deserialize, Serialize};

/// Values by the names of variables. `Debug` shows the names alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Values(BTreeMap<String, Secret>);

impl Values {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of a variable.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(Secret::expose)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.expose()))
    }
}

impl FromIterator<(String, Secret)> for Values {
    fn from_iter<I: IntoIterator<Item = (String, Secret)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}
