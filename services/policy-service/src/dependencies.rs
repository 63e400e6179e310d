//! Dependencies between the lines of one message. Finds cycles, and refuses lines that depend on a
//! refused line. A cycle is always within one message: a line depends on the same message or on
//! executions that existed before.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use fiec_schemas::dependency::graph::{Graph, Vertex};
use fiec_schemas::dependency::{Dependency, Target};
use fiec_schemas::{BatchId, BatchName, ClientId, ExecutionId, FieldError, Tenant};

use crate::reading::Outline;

/// Most members of a cycle that an error names.
const NAMED: usize = 10;

/// A submission of a message. An array has one node for each element.
#[derive(Debug)]
pub struct Node<'a> {
    /// Its line.
    pub line: u32,
    /// Its id, if its client gave one. Other lines can only depend on a client's id or a batch.
    pub id: Option<&'a ClientId>,
    /// Its batch, if its client named one.
    pub batch: Option<&'a BatchName>,
    /// Its dependencies.
    pub after: &'a [Dependency],
}

impl<'a> Node<'a> {
    /// Makes the node of a submission.
    pub fn of(line: u32, batch: Option<&'a BatchName>, element: &'a Outline) -> Self {
        Self {
            line,
            id: element.id.as_ref(),
            batch,
            after: &element.after,
        }
    }

    /// Its name for people: the client's id, or the line.
    fn name(&self) -> String {
        let line = self.line;
        match self.id {
            Some(id) => format!("{id} (line {line})"),
            None => format!("line {line}"),
        }
    }
}

/// The submissions of a message, in the order of their lines.
pub struct Lines<'a> {
    nodes: &'a [Node<'a>],
    tenant: &'a Tenant,
    graph: Graph,
}

impl<'a> Lines<'a> {
    /// Finds what these submissions are for one another.
    pub fn new(nodes: &'a [Node<'a>], tenant: &'a Tenant) -> Self {
        let vertex = |(place, node): (usize, &'a Node<'a>)| Vertex {
            place,
            execution: node.id.map(|id| ExecutionId::from_client(tenant, id)),
            id: node.id.cloned(),
            batch: node.batch.map(|name| BatchId::from_client(tenant, name)),
            after: node.after.iter().filter_map(|d| d.target(tenant)).collect(),
        };
        let vertices: Vec<_> = (0..).zip(nodes).map(vertex).collect();
        Self {
            nodes,
            tenant,
            graph: Graph::of(nodes.len(), &vertices),
        }
    }

    /// Dependencies that are not in the message.
    pub fn outside(&self) -> BTreeSet<Target> {
        let all = self.nodes.iter().flat_map(|node| node.after);
        let targets = all.filter_map(|dependency| dependency.target(self.tenant));
        targets
            .filter(|target| self.graph.place(target).is_none())
            .collect()
    }

    /// Lines that form cycles, each with an error that names the cycle.
    pub fn cycles(&self) -> BTreeMap<u32, FieldError> {
        let mut found = BTreeMap::new();
        let (_, mut left) = self.graph.sorted();
        while let Some(start) = left.first().copied() {
            let mut path: Vec<usize> = vec![start];
            loop {
                let last = path[path.len() - 1];
                let next = self.graph.needs(last).find(|at| left.contains(at));
                let Some(next) = next else {
                    // It depends on a cycle that was found already.
                    break;
                };
                if let Some(begin) = path.iter().position(|at| *at == next) {
                    let error = self.circle(&path[begin..]);
                    let nodes = path[begin..].iter().filter_map(|at| self.nodes.get(*at));
                    for node in nodes {
                        found.insert(node.line, error.clone());
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

    fn circle(&self, path: &[usize]) -> FieldError {
        let name = |at: &usize| match self.nodes.get(*at) {
            Some(node) => node.name(),
            None => self.name_of_group(*at),
        };
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

    /// A group, as a line names it.
    fn name_of_group(&self, place: usize) -> String {
        let mut all = self.nodes.iter().flat_map(|node| node.after);
        let named = all.find(|dependency| self.place(dependency) == Some(place));
        named.map(ToString::to_string).unwrap_or_default()
    }

    fn place(&self, dependency: &Dependency) -> Option<usize> {
        self.graph.place(&dependency.target(self.tenant)?)
    }

    /// Adds the lines that depend on refused lines, directly or indirectly. A group of which one
    /// line is refused would lack that one.
    pub fn spread(&self, bad: &mut BTreeMap<u32, FieldError>) {
        let waiters = self.graph.waiters();
        // Each with the refused line.
        let places = |line: u32| self.places_of(line).map(move |place| (place, line));
        let mut refused: VecDeque<(usize, u32)> = bad.keys().copied().flat_map(places).collect();
        let mut seen: BTreeSet<usize> = refused.iter().map(|(place, _)| *place).collect();
        while let Some((place, line)) = refused.pop_front() {
            for waiter in waiters.get(place).into_iter().flatten() {
                if !seen.insert(*waiter) {
                    continue;
                }
                let Some(node) = self.nodes.get(*waiter) else {
                    refused.push_back((*waiter, line));
                    continue;
                };
                if let Entry::Vacant(vacant) = bad.entry(node.line) {
                    vacant.insert(self.waits_in_vain(node, place, line));
                    // All elements of an array are refused with one.
                    let elements = self.places_of(node.line);
                    seen.extend(elements.clone());
                    refused.extend(elements.map(|place| (place, node.line)));
                }
            }
        }
    }

    /// The places of a line; several for an array.
    fn places_of(&self, line: u32) -> Range<usize> {
        let from = self.nodes.partition_point(|node| node.line < line);
        from..self.nodes.partition_point(|node| node.line <= line)
    }

    fn waits_in_vain(&self, node: &Node<'_>, place: usize, line: u32) -> FieldError {
        let mut after = node.after.iter().enumerate();
        let named = after.find(|(_, dependency)| self.place(dependency) == Some(place));
        let Some((n, dependency)) = named else {
            return FieldError::because(line, "after", format!("line {line} is refused"));
        };
        let reason = match dependency.is_group() {
            true => format!("line {line}, which belongs to {dependency}, is refused"),
            false => format!("{dependency} is refused (line {line})"),
        };
        let field = format!("after[{n}].{}", dependency.field());
        FieldError::because(line, field, reason)
    }

    /// Lines that depend on something of `missing`.
    pub fn unknown(&self, missing: &BTreeSet<Target>) -> BTreeMap<u32, FieldError> {
        let (mut found, tenant) = (BTreeMap::new(), self.tenant);
        for node in self.nodes {
            for (n, dependency) in node.after.iter().enumerate() {
                if dependency
                    .target(tenant)
                    .is_none_or(|t| !missing.contains(&t))
                {
                    continue;
                }
                let what = match dependency.is_group() {
                    true => format!("no execution of {dependency}"),
                    false => format!("no execution {dependency}"),
                };
                let reason = format!(
                    "tenant {tenant} has {what}: submit it before, or in the same message; one \
                     that ended more than 30 days ago is not known any more"
                );
                let error = FieldError::new(format!("after[{n}].{}", dependency.field()), reason);
                found.entry(node.line).or_insert(error);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::dependency::AfterOutcome;

    /// The lines of a message: ids, batches, and what they wait for.
    struct Message(Tenant, Vec<(ClientId, Option<BatchName>, Vec<Dependency>)>);

    impl Message {
        /// `a.b: c d` is a line `a` of batch `b` that waits for `c` and `d`.
        fn of(text: &str) -> Self {
            let line = |line: &str| {
                let (name, after) = line.split_once(':').unwrap();
                let (id, batch) = name.split_once('.').unwrap_or((name, ""));
                let after = after.split_whitespace();
                let after = after.map(|a| Dependency::new(a, AfterOutcome::Ok));
                (
                    ClientId::new(id).unwrap(),
                    BatchName::new(batch).ok(),
                    after.collect(),
                )
            };
            let lines = text.split(';').map(str::trim).map(line).collect();
            Self(Tenant::new("lab").unwrap(), lines)
        }

        fn of_batch(mut self, place: usize, batch: &str) -> Self {
            self.1[place].2.push(Dependency {
                batch: Some(batch.to_owned()),
                ..Dependency::default()
            });
            self
        }

        fn nodes(&self) -> Vec<Node<'_>> {
            let mut nodes = Vec::new();
            for (line, (id, batch, after)) in (1..).zip(&self.1) {
                nodes.push(Node {
                    line,
                    id: Some(id),
                    batch: batch.as_ref(),
                    after,
                });
            }
            nodes
        }
    }

    fn refused(bad: &BTreeMap<u32, FieldError>) -> Vec<u32> {
        bad.keys().copied().collect()
    }

    #[test]
    fn an_order_without_a_circle_has_none_whatever_the_order_of_the_lines() {
        let message = Message::of("d: b c; b: a; c: a x; a:");
        let nodes = message.nodes();
        let lines = Lines::new(&nodes, &message.0);
        assert!(lines.cycles().is_empty());
        let x = Dependency::new("x", AfterOutcome::Ok);
        let outside: Vec<_> = lines.outside().into_iter().collect();
        assert_eq!(outside, [x.target(&message.0).unwrap()]);
    }

    #[test]
    fn a_circle_is_named_by_ids_and_lines_and_what_waits_for_it_is_refused_with_it() {
        let message = Message::of("a: c; b: a; c: b; d: a; e: d; f:");
        let nodes = message.nodes();
        let lines = Lines::new(&nodes, &message.0);
        let mut bad = lines.cycles();
        assert_eq!(refused(&bad), [1, 2, 3]);
        assert_eq!(
            bad[&1].reason,
            "these wait for each other in a circle: \
             a (line 1) → c (line 3) → b (line 2) → a (line 1)"
        );
        lines.spread(&mut bad);
        assert_eq!(refused(&bad), [1, 2, 3, 4, 5]);
        assert_eq!(bad[&5].reason, "d is refused (line 4)");
        assert_eq!(bad[&5].field, "after[0].id");
    }

    #[test]
    fn two_circles_are_both_found() {
        let message = Message::of("a: b; b: a; c: d a; d: c; e: e");
        let nodes = message.nodes();
        let found = Lines::new(&nodes, &message.0).cycles();
        assert_eq!(refused(&found), [1, 2, 3, 4, 5]);
        assert!(found[&5].reason.ends_with("e (line 5) → e (line 5)"));
    }

    #[test]
    fn a_circle_through_a_batch_names_it_and_who_waits_for_a_refused_member_is_refused() {
        let message = Message::of("a.x: c; b.x:; c:; d:").of_batch(2, "x");
        let nodes = message.nodes();
        let lines = Lines::new(&nodes, &message.0);
        let mut bad = lines.cycles();
        assert_eq!(
            bad[&1].reason,
            "these wait for each other in a circle: a (line 1) → c (line 3) → batch x → a (line 1)"
        );
        lines.spread(&mut bad);
        assert_eq!(refused(&bad), [1, 3]);
        let message = Message::of("a.x:; b.x:; c:; d: c; s-1:; s-2:; e: s-*").of_batch(2, "x");
        let nodes = message.nodes();
        let lines = Lines::new(&nodes, &message.0);
        assert!(lines.cycles().is_empty() && lines.outside().is_empty());
        let other = FieldError::new("program", "is unknown");
        let mut bad = BTreeMap::from([(2, other.clone()), (6, other)]);
        lines.spread(&mut bad);
        assert_eq!(refused(&bad), [2, 3, 4, 6, 7]);
        assert_eq!(
            bad[&3].to_string(),
            "after[0].batch: line 2, which belongs to batch x, is refused"
        );
        assert_eq!(bad[&7].field, "after[0].id");
    }

    #[test]
    fn groups_without_members_anywhere_are_unknown() {
        let message = Message::of("a: s-*").of_batch(0, "x");
        let nodes = message.nodes();
        let lines = Lines::new(&nodes, &message.0);
        let missing = lines.outside();
        assert_eq!(missing.len(), 2);
        let reason = &lines.unknown(&missing)[&1].reason;
        assert!(
            reason.starts_with("tenant lab has no execution of s-*: submit"),
            "{reason}"
        );
    }

    #[test]
    fn ten_thousand_lines_in_a_row_are_no_matter() {
        let text: Vec<String> = (0..10_000).map(|n| format!("a{n}: a{}", n + 1)).collect();
        let message = Message::of(&text.join(";"));
        let nodes = message.nodes();
        let lines = Lines::new(&nodes, &message.0);
        assert!(lines.cycles().is_empty());
        let mut bad = lines.unknown(&lines.outside());
        assert_eq!(refused(&bad), [10_000]);
        lines.spread(&mut bad);
        assert_eq!(bad.len(), 10_000);
    }
}
