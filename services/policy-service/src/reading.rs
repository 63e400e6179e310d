//! Reads the lines of a message that must be checked as a whole, within bounded memory. A short
//! text may stand for a thousand times its size. Therefore one message is read at a time, one
//! element after the other, and only the fields that other lines refer to are kept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_schemas::array::Elements;
use fiec_schemas::dependency::{Dependency, GROUPS_LIMIT, Group};
use fiec_schemas::submission::{AFTER_TOTAL_LIMIT, EXECUTIONS_LIMIT, EXPANSION_LIMIT, lines};
use fiec_schemas::{BatchId, BatchName, ClientId, Digest, FieldError, Submission, Tenant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::refusal::Refusal;

/// KiB that all messages under check may take together.
const ROOM_KIB: u32 = 64 * 1024;
/// KiB reserved for the elements of a message's arrays, beside its lines. They hold as many names
/// as [`EXECUTIONS_LIMIT`] and [`AFTER_TOTAL_LIMIT`] allow.
const ARRAYS_KIB: usize = 32 * 1024;
/// Most bytes that are kept for each byte of a line's text.
const KEPT: usize = 10;
/// A text of more bytes is read on a blocking thread, so that the service's tasks do not wait.
const SHORT: usize = 16 * 1024;

/// The lines that are refused, each with its reason.
pub type Verdict = BTreeMap<u32, FieldError>;

/// A line of a message, without the fields that only its program reads.
#[derive(Debug)]
pub struct Vetted {
    /// Its number.
    pub line: u32,
    /// Its program.
    pub program: String,
    /// Its batch, by name.
    pub batch: Option<BatchName>,
    /// The line is an array.
    pub array: bool,
    /// The elements of the array, or the single submission.
    pub elements: Vec<Outline>,
}

impl Vetted {
    /// True if one of its submissions belongs to a group.
    pub fn is_of(&self, tenant: &Tenant, group: &Group) -> bool {
        let batch = self.batch.as_ref();
        let batch = batch.map(|name| BatchId::from_client(tenant, name));
        let mut ids = self.elements.iter().map(|element| element.id.as_ref());
        ids.any(|id| group.has(id.map(ClientId::as_str), batch))
    }
}

/// Fields of a submission that other lines may refer to.
#[derive(Debug)]
pub struct Outline {
    /// Its client's id.
    pub id: Option<ClientId>,
    /// Executions that it waits for.
    pub after: Vec<Dependency>,
    /// Its digest.
    pub digest: Digest,
}

/// Sums over the lines of a message so far.
#[derive(Debug, Default)]
struct Total {
    executions: usize,
    bytes: usize,
    after: usize,
    groups: BTreeSet<String>,
}

impl Total {
    /// Adds what an element waits for. Fails if a limit of the message is exceeded.
    fn add_groups(&mut self, after: &[Dependency]) -> Result<(), FieldError> {
        let groups = after.iter().filter(|dependency| dependency.is_group());
        self.groups.extend(groups.map(ToString::to_string));
        if self.groups.len() <= GROUPS_LIMIT {
            return Ok(());
        }
        let rule = format!(
            "the lines of a message wait for at most {GROUPS_LIMIT} groups in all; send this line \
             in another one"
        );
        Err(FieldError::new("after", rule))
    }

    /// Adds a line. Fails if a limit of the message is exceeded.
    fn add(&mut self, line: &Elements) -> Result<(), FieldError> {
        let count = line.total();
        self.executions += count;
        let after = count.saturating_mul(line.waits_for());
        self.after = self.after.saturating_add(after);
        if !line.is_array() {
            return Ok(());
        }
        let element = line.bytes_each();
        let bytes = count.saturating_mul(element);
        self.bytes = self.bytes.saturating_add(bytes);
        let rule = if self.executions > EXECUTIONS_LIMIT {
            format!(
                "a message becomes at most {EXECUTIONS_LIMIT} executions; send this line in another one"
            )
        } else if self.bytes > EXPANSION_LIMIT {
            format!(
                "the arrays of a message expand to at most {} MiB, but {count} elements of {} \
                 bytes are {} MiB: store shared data with `fiec data push` and name it in params, \
                 or send fewer elements in each message",
                EXPANSION_LIMIT >> 20,
                element,
                bytes >> 20
            )
        } else if self.after > AFTER_TOTAL_LIMIT {
            format!(
                "the elements of a message depend on at most {AFTER_TOTAL_LIMIT} executions in \
                 all; let them depend on one execution that depends on the others"
            )
        } else {
            return Ok(());
        };
        Err(FieldError::new("array.count", rule))
    }
}

/// Reads the lines of a message, and refuses those that break a rule.
fn read(body: &[u8]) -> (Vec<Vetted>, Verdict) {
    let (mut good, mut bad) = (Vec::new(), Verdict::new());
    let mut total = Total::default();
    for (line, text) in lines(body) {
        match read_line(line, text, &mut total) {
            Ok(vetted) => good.push(vetted),
            Err(error) => drop(bad.insert(line, error)),
        }
    }
    (good, bad)
}

fn read_line(line: u32, text: &[u8], total: &mut Total) -> Result<Vetted, FieldError> {
    let spec = Submission::parse(text)?;
    let (program, batch) = (spec.program.clone(), spec.batch.clone());
    let elements = spec.elements();
    total.add(&elements)?;
    let array = elements.is_array();
    let outline = |element: Result<Submission, FieldError>| {
        let element = element?;
        total.add_groups(&element.after)?;
        Ok(Outline {
            digest: element.digest(),
            id: element.id,
            after: element.after,
        })
    };
    let elements = elements.map(outline);
    Ok(Vetted {
        line,
        program,
        batch,
        array,
        elements: elements.collect::<Result<_, _>>()?,
    })
}

/// True if the text may hold an array. A field's name may be written with `\u` escapes.
fn may_hold_array(body: &[u8]) -> bool {
    let contains = |what: &[u8]| body.windows(what.len()).any(|w| w == what);
    contains(b"array") || contains(br"\u")
}

/// The lines of a message, with their share of the memory.
#[derive(Debug)]
pub struct Lines {
    /// Lines that may be taken in.
    pub good: Vec<Vetted>,
    /// Refused lines.
    pub bad: Verdict,
    _room: Option<OwnedSemaphorePermit>,
}

/// Reads messages within bounded memory. Cheap to clone.
#[derive(Clone)]
pub struct Reader {
    /// Held while one text is read. The reader that holds it waits for nothing else.
    lane: Arc<Semaphore>,
    room: Arc<Semaphore>,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            lane: Arc::new(Semaphore::new(1)),
            room: Arc::new(Semaphore::new(ROOM_KIB as usize)),
        }
    }
}

impl Reader {
    /// Reads the lines of a message.
    ///
    /// # Errors
    /// If no memory is free for them within this time.
    pub async fn read(&self, body: Bytes, within: Duration) -> Result<Lines, Refusal> {
        let deadline = Instant::now() + within;
        let arrays = if may_hold_array(&body) { ARRAYS_KIB } else { 0 };
        let kib = (body.len() * KEPT).div_ceil(1024) + arrays;
        let kib = u32::try_from(kib).unwrap_or(ROOM_KIB).min(ROOM_KIB);
        let room = timeout_at(deadline, Arc::clone(&self.room).acquire_many_owned(kib)).await;
        let room = room.map_err(|_| Refusal::TooMuchToRead { within })?.ok();
        let (good, bad) = timeout_at(deadline, self.read_alone(body))
            .await
            .map_err(|_| Refusal::TooMuchToRead { within })??;
        Ok(Lines {
            good,
            bad,
            _room: room,
        })
    }

    /// Reads the lines of a message without reserved memory. The caller drops them at once.
    ///
    /// # Errors
    /// While the service ends.
    pub async fn read_alone(&self, body: Bytes) -> Result<(Vec<Vetted>, Verdict), Refusal> {
        if body.len() <= SHORT && !may_hold_array(&body) {
            return Ok(read(&body));
        }
        let lane = Arc::clone(&self.lane).acquire_owned().await;
        let lane = lane.map_err(|_| Refusal::Ending)?;
        tokio::task::spawn_blocking(move || {
            let _lane = lane;
            read(&body)
        })
        .await
        .map_err(|_| Refusal::Ending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> FieldError {
        let (good, mut bad) = read(line.as_bytes());
        assert!(good.is_empty(), "it was not refused");
        bad.remove(&1).unwrap()
    }

    #[test]
    fn an_array_that_comes_to_more_than_a_message_may_is_refused_with_its_size() {
        let blob = "x".repeat(20 << 10);
        let line = |count: u32| {
            format!(
                r#"{{"program":"mine@1","params":{{"x":"{blob}"}},"array":{{"count":{count}}}}}"#
            )
        };
        let error = refused(&line(10_000));
        assert_eq!(error.field, "array.count");
        assert!(error.reason.contains("195 MiB"), "{}", error.reason);
        // Each of the three lines takes half of the limit.
        let three = [line(1_600), line(1_600), line(1_600)].join("\n");
        let (good, bad) = read(three.as_bytes());
        assert_eq!((good.len(), bad.len()), (2, 1));
    }

    #[test]
    fn ten_thousand_elements_of_two_kibibytes_are_taken() {
        let blob = "x".repeat(2 << 10);
        let line = format!(
            r#"{{"program":"mine@1","params":{{"x":"{blob}","n":"{{index}}"}},"array":{{"count":10000}}}}"#
        );
        let (good, bad) = read(line.as_bytes());
        assert_eq!((good.len(), bad.len()), (1, 0), "{bad:?}");
        assert_eq!(good[0].elements.len(), 10_000);
        assert_ne!(good[0].elements[0].digest, good[0].elements[9_999].digest);
    }

    #[test]
    fn what_an_array_waits_for_is_counted_for_each_of_its_elements() {
        let after = vec![r#"{"id":"a"}"#; 100].join(",");
        let line = format!(r#"{{"program":"mine@1","after":[{after}],"array":{{"count":1001}}}}"#);
        assert!(refused(&line).reason.contains("depend on at most"));
    }

    #[tokio::test]
    async fn whoever_finds_no_room_is_told_so_and_the_next_one_is_read() {
        let reader = Reader::default();
        let body = Bytes::from_static(br#"{"program":"mine@1","array":{"count":2}}"#);
        let soon = Duration::from_millis(50);
        let mut held = Vec::new();
        let error = loop {
            match reader.read(body.clone(), soon).await {
                Ok(lines) => held.push(lines),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Refusal::TooMuchToRead { .. }), "{error}");
        assert!(!held.is_empty());
        held.pop();
        assert_eq!(reader.read(body, soon).await.unwrap().good.len(), 1);
    }
}
