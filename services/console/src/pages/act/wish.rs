//! A request as its address or its form has it: whom it is about, and the command line that does the
//! same.

use std::collections::BTreeSet;

use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{NodeId, Tenant};
use serde::{Deserialize, Serialize};

use super::what::What;
use crate::database::Query;
use crate::pages::executions::{self, Choice};
use crate::pages::{Frame, Listed, quoted};
use crate::server::Shared;

/// Executions that one action by choice reaches.
pub(super) const MOST: i64 = 1_000;

/// A wish, as its address or its form has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Wish {
    pub(super) what: What,
    /// One execution, by its UUID.
    #[serde(default)]
    pub(super) execution: String,
    /// All of a batch, by its UUID.
    #[serde(default)]
    pub(super) whole_batch: String,
    /// A node.
    #[serde(default)]
    pub(super) on: String,
    /// For a move: where to; empty: the best other node.
    #[serde(default)]
    pub(super) to: String,
    /// For an adjustment.
    #[serde(default)]
    pub(super) priority: String,
    /// For a retry: MiB of host memory that it needs; empty: as before.
    #[serde(default)]
    pub(super) memory: String,
    /// How many the person has agreed to.
    #[serde(default)]
    pub(super) agreed: String,
    #[serde(flatten)]
    pub(super) choice: Choice,
}

/// On whom.
pub(super) enum Target {
    Node(NodeId),
    Batch {
        tenant: Tenant,
        name: String,
        members: i64,
    },
    Executions {
        chosen: Vec<Listed>,
        all: i64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct OfBatch {
    tenant: String,
    name: Option<String>,
    executions: i64,
}

const BATCH: &str = "SELECT tenant, name, executions FROM batch_summary WHERE batch = $1::uuid";
const ONE: &str = "SELECT execution, client_id, tenant, program, phase, node, boundary, boundaries_in_all, \
    progress, submitted_at, finished_at, moves, failure FROM execution_summary WHERE execution = $1::uuid";

impl Wish {
    /// The settings that change.
    ///
    /// # Errors
    /// The field that cannot be read, for a person.
    pub(super) fn change(&self) -> Result<Option<Adjustment>, String> {
        let change = match self.what {
            What::Adjust => {
                let priority = self.priority.trim().parse();
                let words = "a priority is a whole number from -100 to 100";
                Adjustment {
                    priority: Some(priority.map_err(|_| words)?),
                    ..Adjustment::default()
                }
            }
            What::Unpin => Adjustment {
                nodes: Some(Vec::new()),
                exclude: Some(Vec::new()),
                ..Adjustment::default()
            },
            What::Retry if !self.memory.trim().is_empty() => {
                let mib: Option<u64> = self.memory.trim().parse().ok();
                let bytes = mib.and_then(|mib| mib.checked_mul(1 << 20));
                Adjustment {
                    memory_bytes: Some(bytes.ok_or("memory is a whole number of MiB")?),
                    ..Adjustment::default()
                }
            }
            _ => return Ok(None),
        };
        Ok(Some(change))
    }

    /// The commands that do the same.
    pub(super) fn command(&self, target: &Target) -> String {
        let name = self.what.name();
        match target {
            Target::Node(node) => format!("fiec {name} {node}"),
            Target::Batch {
                tenant,
                name: batch,
                ..
            } => match self.what {
                What::Retry => format!("fiec retry --batch={} --tenant {tenant}", quoted(batch)),
                _ => format!("fiec batch {name} --tenant {tenant} -- {}", quoted(batch)),
            },
            Target::Executions { chosen, .. } => {
                let tenants: BTreeSet<&str> =
                    chosen.iter().map(|one| one.tenant.as_str()).collect();
                let of = |tenant: &str| {
                    let own = chosen.iter().filter(|one| one.tenant == tenant);
                    let ids: Vec<String> = own.map(|one| quoted(one.name())).collect();
                    let each = |id: &String, rest: String| {
                        format!("fiec {name} --tenant {tenant}{rest} -- {id}")
                    };
                    let lines: Vec<String> = match self.what {
                        What::Move if self.to.is_empty() => ids
                            .iter()
                            .map(|id| format!("fiec yield --tenant {tenant} -- {id}"))
                            .collect(),
                        What::Move => ids
                            .iter()
                            .map(|id| each(id, format!(" --to {}", quoted(&self.to))))
                            .collect(),
                        What::Adjust => {
                            let to = match self.priority.as_str() {
                                "" => "PRIORITY".to_owned(),
                                given => quoted(given),
                            };
                            ids.iter()
                                .map(|id| each(id, format!(" --priority {to}")))
                                .collect()
                        }
                        What::Retry if !self.memory.is_empty() => {
                            let memory = quoted(&format!("{}MiB", self.memory.trim()));
                            ids.iter()
                                .map(|id| each(id, format!(" --memory {memory}")))
                                .collect()
                        }
                        What::Pause | What::Resume | What::Unpin => {
                            ids.iter().map(|id| each(id, String::new())).collect()
                        }
                        _ => vec![format!(
                            "fiec {name} --tenant {tenant} -- {}",
                            ids.join(" ")
                        )],
                    };
                    let few: Vec<String> = lines.iter().take(10).cloned().collect();
                    let more = lines.len().saturating_sub(few.len());
                    let rest = if more > 0 {
                        format!("\n# and {more} more")
                    } else {
                        String::new()
                    };
                    format!("{}{rest}", few.join("\n"))
                };
                tenants.into_iter().map(of).collect::<Vec<_>>().join("\n")
            }
        }
    }

    /// The page that it came from.
    pub(super) fn back(&self) -> String {
        let encoded = executions::encoded;
        if !self.on.is_empty() {
            return format!("/nodes#node-{}", encoded(&self.on));
        }
        if !self.whole_batch.is_empty() {
            return format!("/batches/{}", encoded(&self.whole_batch));
        }
        if !self.execution.is_empty() {
            return format!("/executions/{}", encoded(&self.execution));
        }
        self.choice.address()
    }
}

/// That there is no such thing, or that it cannot be known now.
fn none(what: &str, frame: &Frame) -> String {
    match frame.troubles.first() {
        Some(trouble) => trouble.clone(),
        None => format!("the history has no such {what}"),
    }
}

/// Finds whom a wish is about.
pub(super) async fn target(
    shared: &Shared,
    wish: &Wish,
    frame: &mut Frame,
) -> Result<Target, String> {
    let hub = &shared.hub;
    if wish.what.of_node().is_some() {
        let node = wish.on.parse().map_err(|error| format!("{error}"))?;
        return Ok(Target::Node(node));
    }
    if !wish.whole_batch.is_empty() {
        if wish.what.of_batch().is_none() {
            return Err(format!("{} is for single executions", wish.what.name()));
        }
        let query = Query::of(BATCH).with(wish.whole_batch.as_str());
        let found: Vec<OfBatch> = frame.rows(hub, "The batch", &query).await;
        let found = found
            .into_iter()
            .next()
            .ok_or("the history has no such batch")?;
        return Ok(Target::Batch {
            tenant: found.tenant.parse().map_err(|error| format!("{error}"))?,
            name: found.name.unwrap_or_else(|| wish.whole_batch.clone()),
            members: found.executions,
        });
    }
    if !wish.execution.is_empty() {
        let query = Query::of(ONE).with(wish.execution.as_str());
        let chosen: Vec<Listed> = frame.rows(hub, "The execution", &query).await;
        if chosen.is_empty() {
            return Err(none("execution", frame));
        }
        return Ok(Target::Executions { chosen, all: 1 });
    }
    let choice = wish.what.of_chosen(&wish.choice);
    let (chosen, all) = executions::chosen(hub, &choice, MOST, frame).await;
    match chosen.is_empty() {
        true if frame.troubles.is_empty() => Err(format!(
            "nothing that is chosen is in a phase to {}",
            wish.what.name()
        )),
        true => Err(frame.troubles.join("\n")),
        false => Ok(Target::Executions { chosen, all }),
    }
}

#[cfg(test)]
mod tests {
    use axum::extract::Query as Given;

    use super::*;

    fn wish(query: &str) -> Wish {
        let given: Given<Wish> =
            Given::try_from_uri(&format!("/act?{query}").parse().unwrap()).unwrap();
        given.0
    }

    fn listed(name: &str, tenant: &str) -> Listed {
        Listed {
            execution: "u".to_owned(),
            client_id: Some(name.to_owned()),
            tenant: tenant.to_owned(),
            program: None,
            phase: "started".to_owned(),
            node: None,
            boundary: 0,
            boundaries_in_all: None,
            progress: None,
            submitted_at: fiec_schemas::Timestamp::from_micros(0),
            finished_at: None,
            moves: 0,
            failure: None,
            params: None,
        }
    }

    #[test]
    fn the_command_line_does_the_same() {
        let both = |query: &str| {
            let target = Target::Executions {
                chosen: vec![listed("a", "t"), listed("b", "u")],
                all: 2,
            };
            wish(query).command(&target)
        };
        assert_eq!(
            both("what=cancel"),
            "fiec cancel --tenant t -- a\nfiec cancel --tenant u -- b"
        );
        assert_eq!(
            both("what=move&to=n1"),
            "fiec move --tenant t --to n1 -- a\nfiec move --tenant u --to n1 -- b"
        );
        assert_eq!(
            both("what=move"),
            "fiec yield --tenant t -- a\nfiec yield --tenant u -- b"
        );
        assert_eq!(
            both("what=retry&memory=2048"),
            "fiec retry --tenant t --memory 2048MiB -- a\nfiec retry --tenant u --memory 2048MiB -- b"
        );
        let memory = wish("what=retry&memory=2048").change().unwrap().unwrap();
        assert_eq!(memory.memory_bytes, Some(2 << 30));
        assert!(wish("what=retry&memory=much").change().is_err());
        assert_eq!(wish("what=retry").change(), Ok(None));
        let node = Target::Node("n1".parse().unwrap());
        assert_eq!(wish("what=drain&on=n1").command(&node), "fiec drain n1");
        let batch = Target::Batch {
            tenant: "t".parse().unwrap(),
            name: "it's".to_owned(),
            members: 3,
        };
        assert_eq!(
            wish("what=retry").command(&batch),
            "fiec retry --batch='it'\\''s' --tenant t"
        );
    }
}
