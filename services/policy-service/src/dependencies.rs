//! Dependencies between the lines of one message. Finds cycles, and refuses lines that depend on a
//! refused line. A cycle is always within one message: a line depends on the same message or on
//! executions that existed before.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fiec_schemas::{ExecutionId, FieldError, Tenant};

use crate::reading::Outline;

/// Most members of a cycle that an error names.
const NAMED: usize = 10;

/// A submission of a message. An array has one node for each element.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its line.
    pub line: u32,
    /// Its id, if its client gave one. Other lines can only depend on a client's id.
    pub id: Option<ExecutionId>,
    /// Its name for people: the client's id, or the line.
    pub name: String,
    /// Its dependencies, each with the text that names it.
    pub after: Vec<(ExecutionId, String)>,
}

impl Node {
    /// Makes the node of a submission.
    pub fn of(line: u32, tenant: &Tenant, element: &Outline) -> Self {
        let id = element.id.as_ref();
        Self {
            line,
            id: id.map(|id| ExecutionId::from_client(tenant, id)),
            name: id.map_or_else(|| format!("line {line}"), ToString::to_string),
            after: element
                .after
                .iter()
                .filter_map(|d| Some((d.execution(tenant)?, d.id.clone())))
                .collect(),
        }
    }
}

/// The submissions of a message.
pub struct Lines<'a> {
    nodes: &'a [Node],
    by_id: BTreeMap<ExecutionId, usize>,
}

impl<'a> Lines<'a> {
    /// Indexes these submissions by id.
    pub fn new(nodes: &'a [Node]) -> Self {
        let with_ids = nodes.iter().enumerate();
        let by_id = with_ids.filter_map(|(at, node)| Some((node.id?, at)));
        Self {
            nodes,
            by_id: by_id.collect(),
        }
    }

    /// Dependencies that are not in the message.
    pub fn outside(&self) -> BTreeSet<ExecutionId> {
        let all = self.nodes.iter().flat_map(|node| &node.after);
        let outside = all.filter(|(id, _)| !self.by_id.contains_key(id));
        outside.map(|(id, _)| *id).collect()
    }

    fn inside(&self, at: usize) -> impl Iterator<Item = usize> + '_ {
        let after = self.nodes[at].after.iter();
        after.filter_map(|(id, _)| self.by_id.get(id).copied())
    }

    /// Lines that form cycles, each with an error that names the cycle.
    pub fn cycles(&self) -> BTreeMap<u32, FieldError> {
        let mut found = BTreeMap::new();
        let mut left = self.in_or_behind_cycles();
        while let Some(start) = left.first().copied() {
            let mut path: Vec<usize> = vec![start];
            loop {
                let last = path[path.len() - 1];
                let next = self.inside(last).find(|at| left.contains(at));
                let Some(next) = next else {
                    // It depends on a cycle that was found already.
                    break;
                };
                if let Some(begin) = path.iter().position(|at| *at == next) {
                    let error = self.circle(&path[begin..]);
                    for at in &path[begin..] {
                        found.insert(self.nodes[*at].line, error.clone());
                    }
                    break;
                }
                path.push(next);
            }
            path.iter().for_each(|at| {
                left.remove(at);
            });
        }
        found
    }

    /// Nodes that remain after every node without a remaining dependency is removed.
    fn in_or_behind_cycles(&self) -> BTreeSet<usize> {
        let mut waiters: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        let mut waits: Vec<usize> = vec![0; self.nodes.len()];
        for (at, waits) in waits.iter_mut().enumerate() {
            for other in self.inside(at) {
                waiters[other].push(at);
                *waits += 1;
            }
        }
        let mut free: VecDeque<usize> = (0..waits.len()).filter(|at| waits[*at] == 0).collect();
        let mut left: BTreeSet<usize> = (0..self.nodes.len()).collect();
        while let Some(at) = free.pop_front() {
            left.remove(&at);
            for waiter in &waiters[at] {
                waits[*waiter] -= 1;
                if waits[*waiter] == 0 {
                    free.push_back(*waiter);
                }
            }
        }
        left
    }

    fn circle(&self, path: &[usize]) -> FieldError {
        let name = |at: &usize| format!("{} (line {})", self.nodes[*at].name, self.nodes[*at].line);
        let mut names: Vec<String> = path.iter().take(NAMED).map(name).collect();
        if path.len() > NAMED {
            names.push(format!("… {} more", path.len() - NAMED));
        }
        names.extend(path.first().map(name));
        let reason = format!(
            "these wait for each other in a circle: {}",
            names.join(" → ")
        );
        FieldError::new("after", reason)
    }

    /// Adds the lines that depend on refused lines, directly or indirectly.
    pub fn spread(&self, bad: &mut BTreeMap<u32, FieldError>) {
        let mut waiters: BTreeMap<u32, Vec<(u32, FieldError)>> = BTreeMap::new();
        for node in self.nodes {
            for (n, (id, name)) in node.after.iter().enumerate() {
                if let Some(at) = self.by_id.get(id) {
                    let line = self.nodes[*at].line;
                    let error = FieldError::new(
                        format!("after[{n}].id"),
                        format!("{name} is refused (line {line})"),
                    );
                    waiters.entry(line).or_default().push((node.line, error));
                }
            }
        }
        let mut refused: VecDeque<u32> = bad.keys().copied().collect();
        while let Some(line) = refused.pop_front() {
            for (waiter, error) in waiters.remove(&line).unwrap_or_default() {
                if let Entry::Vacant(vacant) = bad.entry(waiter) {
                    vacant.insert(error);
                    refused.push_back(waiter);
                }
            }
        }
    }

    /// Lines that depend on one of the `missing` executions.
    pub fn unknown(
        &self,
        tenant: &Tenant,
        missing: &BTreeSet<ExecutionId>,
    ) -> BTreeMap<u32, FieldError> {
        let mut found = BTreeMap::new();
        for node in self.nodes {
            for (n, (id, name)) in node.after.iter().enumerate() {
                if missing.contains(id) {
                    let reason = format!(
                        "tenant {tenant} has no execution {name}: submit it before, or in the \
                         same message; one that ended more than 30 days ago is not known any more"
                    );
                    let error = FieldError::new(format!("after[{n}].id"), reason);
                    found.entry(node.line).or_insert(error);
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::ClientId;

    fn tenant() -> Tenant {
        Tenant::new("lab").unwrap()
    }

    fn id(name: &str) -> ExecutionId {
        ExecutionId::from_client(&tenant(), &ClientId::new(name).unwrap())
    }

    /// `a: b c` is a line `a` that waits for `b` and `c`.
    fn nodes(text: &str) -> Vec<Node> {
        let of = |(n, line): (usize, &str)| {
            let (name, after) = line.split_once(':').unwrap();
            Node {
                line: u32::try_from(n).unwrap() + 1,
                id: Some(id(name)),
                name: name.to_owned(),
                after: after
                    .split_whitespace()
                    .map(|a| (id(a), a.to_owned()))
                    .collect(),
            }
        };
        text.split(';').map(str::trim).enumerate().map(of).collect()
    }

    #[test]
    fn an_order_without_a_circle_has_none_whatever_the_order_of_the_lines() {
        let nodes = nodes("d: b c; b: a; c: a x; a:");
        let lines = Lines::new(&nodes);
        assert!(lines.cycles().is_empty());
        assert_eq!(lines.outside().into_iter().collect::<Vec<_>>(), [id("x")]);
    }

    #[test]
    fn a_circle_is_named_by_ids_and_lines_and_what_waits_for_it_is_refused_with_it() {
        let nodes = nodes("a: c; b: a; c: b; d: a; e: d; f:");
        let lines = Lines::new(&nodes);
        let mut bad = lines.cycles();
        assert_eq!(bad.keys().copied().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(
            bad[&1].reason,
            "these wait for each other in a circle: \
             a (line 1) → c (line 3) → b (line 2) → a (line 1)"
        );
        lines.spread(&mut bad);
        assert_eq!(bad.keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!(bad[&5].reason, "d is refused (line 4)");
        assert_eq!(bad[&5].field, "after[0].id");
    }

    #[test]
    fn two_circles_are_both_found() {
        let nodes = nodes("a: b; b: a; c: d a; d: c; e: e");
        let found = Lines::new(&nodes).cycles();
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert!(found[&5].reason.ends_with("e (line 5) → e (line 5)"));
    }

    #[test]
    fn ten_thousand_lines_in_a_row_are_no_matter() {
        let text: Vec<String> = (0..10_000).map(|n| format!("a{n}: a{}", n + 1)).collect();
        let nodes = nodes(&text.join(";"));
        let lines = Lines::new(&nodes);
        assert!(lines.cycles().is_empty());
        let mut bad = lines.unknown(&tenant(), &lines.outside());
        assert_eq!(bad.keys().copied().collect::<Vec<_>>(), [10_000]);
        lines.spread(&mut bad);
        assert_eq!(bad.len(), 10_000);
    }
}
