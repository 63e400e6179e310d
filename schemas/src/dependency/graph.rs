//! Graph of the dependencies between the submissions of a message, or of a file.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Group, Target};
use crate::ids::{BatchId, ClientId, ExecutionId};

/// A submission, seen by others.
#[derive(Debug)]
pub struct Vertex {
    /// Its place. The elements of an array may share one.
    pub place: usize,
    /// The execution that it is or becomes, if that is known.
    pub execution: Option<ExecutionId>,
    /// Its client's id.
    pub id: Option<ClientId>,
    /// Its batch.
    pub batch: Option<BatchId>,
    /// Its dependencies.
    pub after: Vec<Target>,
}

/// Places of submissions, and behind them places of the groups that have members among them. A
/// submission needs the groups that it waits for, and a group its members, so that many that wait
/// for many are few edges.
#[derive(Debug)]
pub struct Graph {
    submissions: usize,
    by_id: HashMap<ExecutionId, usize>,
    by_group: BTreeMap<Group, usize>,
    needs: Vec<BTreeSet<usize>>,
}

impl Graph {
    /// The graph of submissions with this many places.
    pub fn of(submissions: usize, vertices: &[Vertex]) -> Self {
        let mut by_id = HashMap::new();
        let (mut ids, mut batches) = (Vec::new(), BTreeMap::<_, BTreeSet<usize>>::new());
        for vertex in vertices {
            if let Some(execution) = vertex.execution {
                by_id.entry(execution).or_insert(vertex.place);
            }
            ids.extend(vertex.id.as_ref().map(|id| (id.as_str(), vertex.place)));
            if let Some(batch) = vertex.batch {
                batches.entry(batch).or_default().insert(vertex.place);
            }
        }
        ids.sort_unstable();
        let mut graph = Self {
            submissions,
            by_id,
            by_group: BTreeMap::new(),
            needs: vec![BTreeSet::new(); submissions],
        };
        let all = vertices.iter().flat_map(|vertex| &vertex.after);
        let groups = all.filter_map(|target| match target {
            Target::All(group) => Some(group),
            Target::One(_) => None,
        });
        for group in groups {
            if graph.by_group.contains_key(group) {
                continue;
            }
            let members = match group {
                Group::Batch(batch) => batches.get(batch).cloned().unwrap_or_default(),
                Group::Array(array) => beginning(&ids, array.as_str(), group),
                Group::Prefix(prefix) => beginning(&ids, prefix.as_str(), group),
            };
            if !members.is_empty() {
                graph.by_group.insert(group.clone(), graph.needs.len());
                graph.needs.push(members);
            }
        }
        for vertex in vertices {
            let needed: Vec<_> = vertex.after.iter().filter_map(|t| graph.place(t)).collect();
            if let Some(needs) = graph.needs.get_mut(vertex.place) {
                needs.extend(needed);
            }
        }
        graph
    }

    /// The place of what is waited for; none if it is not among these submissions.
    pub fn place(&self, target: &Target) -> Option<usize> {
        match target {
            Target::One(id) => self.by_id.get(id).copied(),
            Target::All(group) => self.by_group.get(group).copied(),
        }
    }

    /// The places that a place needs.
    pub fn needs(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        self.needs.get(place).into_iter().flatten().copied()
    }

    /// True for a place of a group.
    pub fn is_group(&self, place: usize) -> bool {
        place >= self.submissions
    }

    /// The group of a place.
    pub fn group(&self, place: usize) -> Option<&Group> {
        let mut all = self.by_group.iter();
        all.find_map(|(group, at)| (*at == place).then_some(group))
    }

    /// For each place, those that need it.
    pub fn waiters(&self) -> Vec<Vec<usize>> {
        let mut waiters = vec![Vec::new(); self.needs.len()];
        for (at, needs) in self.needs.iter().enumerate() {
            for needed in needs {
                waiters[*needed].push(at);
            }
        }
        waiters
    }

    /// All places, each after those that it needs and with the smallest first (Kahn, "Topological
    /// sorting of large networks", 1962); and the places in circles or behind them.
    pub fn sorted(&self) -> (Vec<usize>, BTreeSet<usize>) {
        let waiters = self.waiters();
        let mut missing: Vec<usize> = self.needs.iter().map(BTreeSet::len).collect();
        let mut left: BTreeSet<usize> = (0..missing.len()).collect();
        let mut free: BTreeSet<usize> = (0..missing.len()).filter(|at| missing[*at] == 0).collect();
        let mut sorted = Vec::with_capacity(missing.len());
        while let Some(at) = free.pop_first() {
            sorted.push(at);
            left.remove(&at);
            for waiter in &waiters[at] {
                missing[*waiter] -= 1;
                if missing[*waiter] == 0 {
                    free.insert(*waiter);
                }
            }
        }
        (sorted, left)
    }
}

/// The places of a group's members among sorted ids, which begin with this text.
fn beginning(ids: &[(&str, usize)], text: &str, group: &Group) -> BTreeSet<usize> {
    let from = ids.partition_point(|(id, _)| *id < text);
    let ids = ids.iter().skip(from);
    ids.take_while(|(id, _)| id.starts_with(text))
        .filter(|(id, _)| group.has(Some(id), None))
        .map(|(_, place)| *place)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::{AfterOutcome, Dependency};
    use super::*;
    use crate::ids::Tenant;

    /// `a.b: c seed-*` is a submission `a` of batch `b` that waits for `c` and a group.
    fn graph(text: &str) -> Graph {
        let tenant = Tenant::new("lab").unwrap();
        let lines: Vec<_> = text.split(';').map(str::trim).collect();
        let read = |line: &&str| {
            let (name, after) = line.split_once(':').unwrap();
            let (id, batch) = name.split_once('.').unwrap_or((name, ""));
            let after = after.split_whitespace().map(|name| {
                let dependency = match name.strip_prefix("batch=") {
                    Some(batch) => Dependency {
                        batch: Some(batch.to_owned()),
                        ..Dependency::default()
                    },
                    None => Dependency::new(name, AfterOutcome::Ok),
                };
                dependency.target(&tenant).unwrap()
            });
            let id = ClientId::new(id).unwrap();
            (id, BatchId::named(&tenant, batch), after.collect())
        };
        let all: Vec<(ClientId, _, Vec<Target>)> = lines.iter().map(read).collect();
        let vertices: Vec<_> = (0..)
            .zip(&all)
            .map(|(place, (id, batch, after))| Vertex {
                place,
                execution: Some(ExecutionId::from_client(&tenant, id)),
                id: Some(id.clone()),
                batch: *batch,
                after: after.clone(),
            })
            .collect();
        Graph::of(vertices.len(), &vertices)
    }

    #[test]
    fn each_place_comes_after_those_that_it_needs_and_groups_after_their_members() {
        let graph = graph("d: b c; b: s-*; c: batch=x; s-1.x:; s-2.x: s-1; e: gone none-*");
        let (sorted, left) = graph.sorted();
        assert!(left.is_empty());
        let at = |place| sorted.iter().position(|p| *p == place).unwrap();
        for (waits, needed) in [(0, 1), (0, 2), (1, 3), (1, 4), (2, 4), (4, 3)] {
            assert!(at(waits) > at(needed), "{sorted:?}");
        }
        assert_eq!(sorted.len(), 8, "two groups have members");
        assert!(graph.needs(5).next().is_none());
    }

    #[test]
    fn a_circle_through_a_group_is_left_over_with_what_is_behind_it() {
        let graph = graph("s-1: b; b: s-*; c: b; d:");
        let (sorted, left) = graph.sorted();
        assert_eq!(sorted, [3]);
        assert_eq!(left.into_iter().collect::<Vec<_>>(), [0, 1, 2, 4]);
        assert!(graph.is_group(4) && graph.group(4).is_some());
    }
}
