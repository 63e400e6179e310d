//! Cuts a file into requests, so that no line waits for a line of a later request.
//!
//! A file that fits into one request is one. A larger one is put into an order in which each line
//! comes after those that it waits for (Kahn, "Topological sorting of large networks", 1962), with
//! the smallest line number first, and is cut anywhere.

use std::collections::BTreeSet;

use fiec_schemas::array::Elements;
use fiec_schemas::dependency::graph::{Graph, Vertex};
use fiec_schemas::submission::{EXECUTIONS_LIMIT, EXPANSION_LIMIT, LINE_LIMIT, LINES_LIMIT};
use fiec_schemas::{BatchId, ClientId, ExecutionId, FieldError, LineError, Submission, Tenant};

/// Most bytes in one request. The broker's own limit is 1 MiB, and a reply may be longer than its
/// request.
const REQUEST_BYTES: usize = 640 * 1024;
/// Most lines in one request if nothing keeps them together.
const REQUEST_LINES: usize = 2_000;

/// A line with its number in the file.
pub type Numbered = (u32, Vec<u8>);

/// The lines of a file, and what became of those that were sent.
pub struct Requests {
    lines: Vec<Numbered>,
    /// What the lines of the file need of each other, by their places in it.
    graph: Graph,
    /// The requests that were not sent yet, last one first.
    left: Vec<Vec<usize>>,
    /// Lines that were refused, or wait for such a line.
    refused: BTreeSet<usize>,
}

impl Requests {
    /// Cuts the lines into requests. `atomic`: they must be taken as a whole.
    ///
    /// # Errors
    /// In words, if what must be taken as a whole does not fit into one request.
    pub fn new(tenant: &Tenant, lines: Vec<Numbered>, atomic: bool) -> Result<Self, String> {
        let graph = graph_of(tenant, &lines);
        let all: Vec<usize> = (0..lines.len()).collect();
        let keep_together = atomic || all.iter().any(|at| graph.needs(*at).next().is_some());
        let bytes: usize = lines.iter().map(|(_, line)| line.len() + 1).sum();
        let fits = lines.len() <= LINES_LIMIT && bytes <= REQUEST_BYTES;
        if atomic && !fits {
            return Err(format!(
                "the file has {} lines and {bytes} bytes; an all-or-nothing submission may have at \
                 most {LINES_LIMIT} lines and {REQUEST_BYTES} bytes: use arrays, or omit \
                 --all-or-nothing",
                lines.len()
            ));
        }
        let mut left = match (keep_together, fits) {
            (true, true) => cut(&lines, &all, LINES_LIMIT),
            (true, false) => cut(&lines, &in_order(&graph), LINES_LIMIT),
            (false, _) => cut(&lines, &all, REQUEST_LINES),
        };
        left.reverse();
        Ok(Self {
            lines,
            graph,
            left,
            refused: BTreeSet::new(),
        })
    }

    /// The next request: its text, the numbers of its lines in the file, and the lines that are
    /// not sent, because they wait for one that was refused.
    pub fn next(&mut self) -> Option<(Vec<u8>, Vec<u32>, Vec<LineError>)> {
        let places = self.left.pop()?;
        let (mut text, mut numbers, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        for at in places {
            let Some((number, line)) = self.lines.get(at) else {
                continue;
            };
            if let Some(error) = self.in_vain(at) {
                self.refused.insert(at);
                errors.push(error);
                continue;
            }
            text.extend_from_slice(line);
            text.push(b'\n');
            numbers.push(*number);
        }
        Some((text, numbers, errors))
    }

    /// The client's ids of the elements of an array, in their order.
    pub fn names(&self, number: u32) -> impl Iterator<Item = Option<ClientId>> {
        let place = self.lines.binary_search_by_key(&number, |(n, _)| *n);
        let line = place.ok().and_then(|place| self.lines.get(place));
        let spec = line.and_then(|(_, line)| Submission::parse(line).ok());
        let elements = spec.into_iter().flat_map(Submission::elements).flatten();
        // An array without an id has none.
        elements.map(|element| element.id)
    }

    /// Notes that this line of the file was refused.
    pub fn refuse(&mut self, number: u32) {
        let place = self.lines.binary_search_by_key(&number, |(n, _)| *n);
        self.refused.extend(place.ok());
    }

    /// Why a line need not be sent.
    fn in_vain(&self, at: usize) -> Option<LineError> {
        let (number, line) = self.lines.get(at)?;
        let error = |error: FieldError| LineError::of(*number, error);
        if line.len() > LINE_LIMIT {
            let reason = format!(
                "the line has {} bytes; at most {LINE_LIMIT} are allowed: put bulk data into a file \
                 that the program reads",
                line.len()
            );
            return Some(error(FieldError::new("", reason)));
        }
        let members = |at| match self.graph.is_group(at) {
            true => self.graph.needs(at).collect(),
            false => vec![at],
        };
        let mut needs = self.graph.needs(at).flat_map(members);
        let awaited = needs.find(|needed| self.refused.contains(needed))?;
        let (awaited, _) = self.lines.get(awaited)?;
        let reason = format!("depends on line {awaited}, which is refused");
        Some(error(FieldError::because(*awaited, "after", reason)))
    }
}

fn graph_of(tenant: &Tenant, lines: &[Numbered]) -> Graph {
    let mut vertices = Vec::new();
    if lines.iter().any(|(_, line)| names(line, b"\"after\"")) {
        for (place, (_, line)) in lines.iter().enumerate() {
            // A line that does not parse needs nothing. The service says what is wrong with it.
            let elements = Submission::parse(line).into_iter();
            let elements = elements.flat_map(|spec| spec.elements().flatten());
            vertices.extend(elements.map(|spec| {
                Vertex {
                    place,
                    execution: spec
                        .id
                        .as_ref()
                        .map(|id| ExecutionId::from_client(tenant, id)),
                    id: spec.id,
                    batch: spec.batch.map(|name| BatchId::from_client(tenant, &name)),
                    after: spec.after.iter().filter_map(|d| d.target(tenant)).collect(),
                }
            }));
        }
    }
    Graph::of(lines.len(), &vertices)
}

/// The places of all lines, each after those that it waits for. Lines of a circle, and those
/// behind it, come last.
fn in_order(graph: &Graph) -> Vec<usize> {
    let (mut sorted, left) = graph.sorted();
    sorted.extend(left);
    sorted.retain(|at| !graph.is_group(*at));
    sorted
}

/// True if the line has this text, quotes included: only then can it have the field.
fn names(line: &[u8], field: &[u8]) -> bool {
    line.windows(field.len()).any(|part| part == field)
}

/// Cuts the lines at these places into requests, in this order.
fn cut(lines: &[Numbered], places: &[usize], most: usize) -> Vec<Vec<usize>> {
    let mut requests = Vec::new();
    let (mut request, mut room) = (Vec::new(), Size::default());
    for at in places {
        let Some((_, line)) = lines.get(*at) else {
            continue;
        };
        let own = Size::of(line);
        if !request.is_empty() && (request.len() == most || !room.has_room(&own)) {
            requests.push(std::mem::take(&mut request));
            room = Size::default();
        }
        room.add(&own);
        request.push(*at);
    }
    requests.push(request);
    requests.retain(|request| !request.is_empty());
    requests
}

/// What a line, or the lines of a request, come to.
#[derive(Default)]
struct Size {
    bytes: usize,
    executions: usize,
    written_out: usize,
}

impl Size {
    fn of(line: &[u8]) -> Self {
        let spec = names(line, b"\"array\"")
            .then(|| Submission::parse(line).ok())
            .flatten();
        let array = spec.map(Submission::elements).filter(Elements::is_array);
        let executions = array.as_ref().map_or(1, Elements::total);
        Self {
            bytes: line.len() + 1,
            executions,
            written_out: array.map_or(0, |array| executions.saturating_mul(array.bytes_each())),
        }
    }

    fn has_room(&self, other: &Self) -> bool {
        self.bytes + other.bytes <= REQUEST_BYTES
            && self.executions + other.executions <= EXECUTIONS_LIMIT
            && self.written_out + other.written_out <= EXPANSION_LIMIT
    }

    fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.executions += other.executions;
        self.written_out += other.written_out;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str, after: &[String], padding: usize) -> Vec<u8> {
        let after: Vec<_> = after
            .iter()
            .map(|id| serde_json::json!({"id": id}))
            .collect();
        let params = serde_json::json!({"x": "x".repeat(padding)});
        let line = serde_json::json!(
            {"id": id, "program": "mine@1", "params": params, "after": after});
        line.to_string().into_bytes()
    }

    fn tenant() -> Tenant {
        Tenant::new("lab").unwrap()
    }

    fn numbered(lines: Vec<Vec<u8>>) -> Vec<Numbered> {
        (1..).zip(lines).collect()
    }

    fn sent(requests: &mut Requests) -> Vec<Vec<u32>> {
        let mut all = Vec::new();
        while let Some((text, numbers, _)) = requests.next() {
            assert!(text.len() <= REQUEST_BYTES);
            all.push(numbers);
        }
        all
    }

    /// A chain whose lines are in the worst order: the last one first.
    fn backwards(count: usize, padding: usize) -> Vec<Numbered> {
        let name = |n: usize| format!("a{n}");
        let lines = (0..count).rev().map(|n| {
            let before: Vec<_> = n.checked_sub(1).map(name).into_iter().collect();
            line(&name(n), &before, padding)
        });
        numbered(lines.collect())
    }

    #[test]
    fn a_file_that_fits_is_one_request_in_its_own_order() {
        let mut requests = Requests::new(&tenant(), backwards(5, 10), false).unwrap();
        assert_eq!(sent(&mut requests), [[1, 2, 3, 4, 5]]);
    }

    #[test]
    fn no_line_of_a_large_file_waits_for_one_of_a_later_request() {
        let mut requests = Requests::new(&tenant(), backwards(100, 20_000), false).unwrap();
        let sent = sent(&mut requests);
        assert!(sent.len() > 2, "{sent:?}");
        let flat: Vec<u32> = sent.into_iter().flatten().collect();
        assert_eq!(flat, (1..=100).rev().collect::<Vec<_>>());
    }

    #[test]
    fn elements_of_arrays_are_waited_for_by_their_names() {
        let array = |id: &str, after: &str| {
            let x = "x".repeat(400_000);
            format!(
                r#"{{"id":"{id}","program":"mine@1","params":{{"x":"{x}"}},
                    "array":{{"count":3}},"after":[{after}]}}"#
            )
            .into_bytes()
        };
        let lines = numbered(vec![
            array("second", r#"{"id":"first-{index}"}"#),
            array("first", ""),
            line("last", &["second-2".to_owned()], 400_000),
        ]);
        let mut requests = Requests::new(&tenant(), lines, false).unwrap();
        assert_eq!(sent(&mut requests), [[2], [1], [3]]);
    }

    #[test]
    fn what_waits_for_a_group_comes_after_all_of_it_and_is_not_sent_if_one_is_refused() {
        let lines = numbered(vec![
            line("all", &["seed-*".to_owned()], 300_000),
            line("seed-1", &[], 300_000),
            line("seed-2", &[], 300_000),
        ]);
        let mut requests = Requests::new(&tenant(), lines.clone(), false).unwrap();
        assert_eq!(sent(&mut requests), [vec![2, 3], vec![1]]);
        let mut requests = Requests::new(&tenant(), lines, false).unwrap();
        requests.next().unwrap();
        requests.refuse(3);
        let (_, numbers, errors) = requests.next().unwrap();
        assert!(numbers.is_empty());
        assert_eq!(
            errors[0].to_string(),
            "line 1, field after: depends on line 3, which is refused"
        );
    }

    #[test]
    fn what_waits_for_a_refused_line_is_refused_with_it_and_not_sent() {
        let mut requests = Requests::new(&tenant(), backwards(4, 300_000), false).unwrap();
        assert_eq!(requests.next().unwrap().1, [4, 3]);
        requests.refuse(3);
        let (text, numbers, errors) = requests.next().unwrap();
        assert!(text.is_empty() && numbers.is_empty());
        let said: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "line 2, field after: depends on line 3, which is refused",
                "line 1, field after: depends on line 2, which is refused"
            ]
        );
        assert!(requests.next().is_none());
    }

    #[test]
    fn a_circle_comes_last_and_a_line_that_is_too_long_is_not_sent() {
        let lines = numbered(vec![
            line("a", &["b".to_owned()], 300_000),
            line("b", &["a".to_owned()], 300_000),
            line("c", &[], 300_000),
            line("d", &[], LINE_LIMIT),
        ]);
        let mut requests = Requests::new(&tenant(), lines, false).unwrap();
        assert_eq!(requests.next().unwrap().1, [3]);
        let (_, numbers, errors) = requests.next().unwrap();
        assert!(numbers.is_empty());
        assert_eq!(errors[0].line, 4);
        assert_eq!(requests.next().unwrap().1, [1, 2]);
    }

    #[test]
    fn what_must_be_taken_as_a_whole_fits_or_is_refused_with_its_size() {
        let error = Requests::new(&tenant(), backwards(4, 300_000), true)
            .err()
            .unwrap();
        assert!(error.starts_with("the file has 4 lines and 12"), "{error}");
    }
}
