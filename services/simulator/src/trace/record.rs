//! Recording: a recorder around a policy.

use std::cell::RefCell;
use std::fmt;
use std::io::Write;
use std::ops::Deref;
use std::rc::Rc;

use fiec_policy::{Action, Config, Input, LedgerView, NewExecution, Now, Policy, Submitted};
use fiec_schemas::{ExecutionId, ExecutionState, InstanceId};
use serde::Serialize;
use serde_json::{Value, json};

use super::text::{Direction, Line, strip_sentences};
use super::{TraceError, form};
use crate::decide::Decide;

/// Length of a trace and the digest of its lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digested {
    /// Steps.
    pub steps: u64,
    /// BLAKE3 in hexadecimal digits, the first 32 of them.
    pub digest: String,
}

/// Records the inputs and actions of all policies of one run. Clones share the trace.
#[derive(Clone, Default)]
pub struct Recorder(Option<Rc<RefCell<Tape>>>);

#[derive(Default)]
struct Tape {
    steps: u64,
    policies: usize,
    hasher: blake3::Hasher,
    /// The lines that are not hashed yet.
    text: String,
    writer: Option<Box<dyn Write>>,
    error: Option<TraceError>,
}

impl Recorder {
    /// A recorder that records nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// Keeps only the digest.
    pub fn digest() -> Self {
        Self(Some(Rc::default()))
    }

    /// Writes the lines as well.
    pub fn to(writer: impl Write + 'static) -> Self {
        Self(Some(Rc::new(RefCell::new(Tape {
            writer: Some(Box::new(writer)),
            ..Tape::default()
        }))))
    }

    /// A recorded policy.
    pub fn policy<D: Decide>(
        &self,
        config: &Config,
        id: InstanceId,
        make: impl FnOnce(&Config, InstanceId) -> D,
    ) -> Traced<D> {
        let number = self.with(|tape| {
            let number = tape.policies;
            tape.policies += 1;
            let body = form::changed(config).map(|config| json!({"config": config, "id": id}));
            tape.begin(number, "new", None, body);
            number
        });
        Traced {
            policy: make(config, id),
            number: number.unwrap_or_default(),
            recorder: self.clone(),
        }
    }

    /// Steps and digest so far. No steps if it is off.
    ///
    /// # Errors
    /// The first failure to write.
    pub fn finish(&self) -> Result<Digested, TraceError> {
        self.with(Tape::finish).unwrap_or_else(|| {
            Ok(Digested {
                steps: 0,
                digest: String::new(),
            })
        })
    }

    fn with<T>(&self, record: impl FnOnce(&mut Tape) -> T) -> Option<T> {
        self.0.as_ref().map(|tape| record(&mut tape.borrow_mut()))
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recorder")
    }
}

/// Bytes of text that are hashed and written at once.
const PIECE: usize = 64 << 10;

impl Tape {
    fn begin(
        &mut self,
        policy: usize,
        kind: &str,
        now: Option<Now>,
        body: Result<Value, serde_json::Error>,
    ) {
        self.steps += 1;
        match body {
            Ok(body) => self.line(policy, Direction::In, kind, now, body),
            Err(error) => self.fail(error),
        }
    }

    fn end(&mut self, policy: usize, actions: &[Action]) {
        for action in actions {
            match form::named(action) {
                Ok((kind, body)) => self.line(policy, Direction::Out, &kind, None, body),
                Err(error) => self.fail(error),
            }
        }
    }

    /// A line of the last step; `Null` has no text.
    fn line(
        &mut self,
        policy: usize,
        direction: Direction,
        kind: &str,
        now: Option<Now>,
        mut body: Value,
    ) {
        strip_sentences(&mut body);
        let line = Line {
            step: self.steps.saturating_sub(1),
            policy,
            direction,
            kind,
            now,
            body: Some(&body).filter(|body| !body.is_null()),
        };
        line.write(&mut self.text);
        if self.text.len() > PIECE {
            self.flush();
        }
    }

    fn finish(&mut self) -> Result<Digested, TraceError> {
        self.flush();
        if let Some(writer) = &mut self.writer {
            let flushed = writer.flush();
            self.error = self.error.take().or(flushed.err().map(TraceError::Io));
        }
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let mut digest = self.hasher.finalize().to_hex().to_string();
        digest.truncate(32);
        Ok(Digested {
            steps: self.steps,
            digest,
        })
    }

    fn flush(&mut self) {
        self.hasher.update(self.text.as_bytes());
        if let Some(writer) = &mut self.writer
            && let Err(error) = writer.write_all(self.text.as_bytes())
        {
            self.error.get_or_insert(TraceError::Io(error));
            self.writer = None;
        }
        self.text.clear();
    }

    fn fail(&mut self, error: serde_json::Error) {
        let step = self.steps.saturating_sub(1);
        self.error
            .get_or_insert(TraceError::Unwritable { step, error });
    }
}

/// A recorded policy. It answers questions like the policy within.
#[derive(Debug)]
pub struct Traced<D> {
    policy: D,
    number: usize,
    recorder: Recorder,
}

impl<D> Deref for Traced<D> {
    type Target = D;
    fn deref(&self) -> &D {
        &self.policy
    }
}

impl<D> Traced<D> {
    /// The policy within, for questions that need `&mut` and change nothing. They are not recorded.
    pub fn unrecorded(&mut self) -> &mut D {
        &mut self.policy
    }
}

/// A submission in a trace.
#[derive(Serialize)]
struct Offered<'a> {
    #[serde(flatten)]
    new: NewExecution<'a>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    may_hold: bool,
}

impl<D: Decide> Traced<D> {
    /// Records the actions behind the first `before`.
    fn end(&self, out: &[Action], before: usize) {
        let actions = out.get(before..).unwrap_or_default();
        self.recorder.with(|tape| tape.end(self.number, actions));
    }

    /// True while the capsule of a binding must wait for others.
    pub fn withholds(&self, id: ExecutionId) -> bool {
        let answer = self.policy.withholds(id);
        self.recorder.with(|tape| {
            let asked = json!({"execution": id});
            tape.begin(self.number, "withholds", None, Ok(asked));
            let said = json!({"withheld": answer});
            tape.line(self.number, Direction::Out, "answer", None, said);
        });
        answer
    }
}

impl<D: Decide> Decide for Traced<D> {
    fn submit(
        &mut self,
        now: Now,
        new: NewExecution<'_>,
        may_hold: bool,
        out: &mut Vec<Action>,
    ) -> Submitted {
        self.recorder.with(|tape| {
            let body = serde_json::to_value(Offered { new, may_hold });
            tape.begin(self.number, "submission", Some(now), body);
        });
        let before = out.len();
        let answer = self.policy.submit(now, new, may_hold, out);
        self.end(out, before);
        self.recorder.with(|tape| match &answer {
            Submitted::Append(events) => tape.end(self.number, &[new.append(events.clone())]),
            Submitted::Hold => tape.line(self.number, Direction::Out, "hold", None, Value::Null),
        });
        answer
    }
    fn follow(&mut self, now: Now, view: &LedgerView<'_>, reread: bool, out: &mut Vec<Action>) {
        self.recorder.with(|tape| {
            let kind = if reread { "reread" } else { "ledger" };
            tape.begin(self.number, kind, Some(now), form::message(view));
        });
        let before = out.len();
        self.policy.follow(now, view, reread, out);
        self.end(out, before);
    }
    fn step(&mut self, now: Now, input: Input, out: &mut Vec<Action>) {
        self.recorder.with(|tape| match form::named(&input) {
            Ok((kind, body)) => tape.begin(self.number, &kind, Some(now), Ok(body)),
            Err(error) => tape.begin(self.number, "", Some(now), Err(error)),
        });
        let before = out.len();
        self.policy.step(now, input, out);
        self.end(out, before);
    }
    fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        self.recorder
            .with(|tape| tape.begin(self.number, "act", Some(now), Ok(Value::Null)));
        let before = out.len();
        self.policy.act(now, out);
        self.end(out, before);
    }
    fn policy(&self) -> &Policy {
        self.policy.policy()
    }
    fn policy_mut(&mut self) -> &mut Policy {
        self.policy.policy_mut()
    }
    fn withholds(&self, id: ExecutionId) -> bool {
        Traced::withholds(self, id)
    }
    fn store(&self, state: &mut ExecutionState) {
        self.policy.store(state);
    }
    fn overfills(&self) -> bool {
        self.policy.overfills()
    }
    fn keeps_what_it_gives(&self) -> bool {
        self.policy.keeps_what_it_gives()
    }
}
