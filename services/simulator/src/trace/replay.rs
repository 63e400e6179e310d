//! Open-loop replay: the inputs of a recorded trace, given to today's policy.

use std::io::BufRead;

use fiec_policy::{Action, Config, LedgerView, NewExecution};
use fiec_schemas::{ExecutionId, InstanceId, Submission, Tenant, Timestamp};
use serde::Deserialize;

use super::text::{Direction, Read};
use super::{Digested, Recorder, TraceError, Traced, form};
use crate::decide::Decide;

/// Gives each input of `trace` to policies of `make`, and records it in `recorder` with the actions
/// of today. The actions in `trace` are not read.
///
/// # Errors
/// The first line that cannot be read, or a failure to write.
pub fn replay<D: Decide>(
    trace: impl BufRead,
    recorder: &Recorder,
    make: &mut dyn FnMut(&Config, InstanceId) -> D,
) -> Result<Digested, TraceError> {
    let mut replay = Replay {
        recorder,
        make,
        policies: Vec::new(),
        out: Vec::new(),
    };
    for (number, line) in (1u64..).zip(trace.lines()) {
        replay
            .take(&line?)
            .map_err(|problem| TraceError::Unreadable {
                line: number,
                problem,
            })?;
    }
    recorder.finish()
}

struct Replay<'a, D> {
    recorder: &'a Recorder,
    make: &'a mut dyn FnMut(&Config, InstanceId) -> D,
    policies: Vec<Traced<D>>,
    out: Vec<Action>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct New {
    config: Config,
    id: InstanceId,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Offered {
    execution: ExecutionId,
    tenant: Tenant,
    spec: Submission,
    submitted_at: Timestamp,
    #[serde(default)]
    may_hold: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Withholds {
    execution: ExecutionId,
}

impl<D: Decide> Replay<'_, D> {
    fn take(&mut self, line: &str) -> Result<(), String> {
        let line = Read::parse(line)?;
        if line.direction == Direction::Out {
            return Ok(());
        }
        if line.kind == "new" {
            return self.add_policy(&line);
        }
        let known = self.policies.get_mut(line.policy);
        let policy = known.ok_or_else(|| format!("policy p{} is not known yet", line.policy))?;
        self.out.clear();
        match (line.kind, line.now) {
            ("withholds", _) => {
                let asked: Withholds = parse(line.body)?;
                policy.withholds(asked.execution);
            }
            ("submission", Some(now)) => {
                let offered: Offered = parse(line.body)?;
                let new = NewExecution {
                    execution: offered.execution,
                    tenant: &offered.tenant,
                    spec: &offered.spec,
                    submitted_at: offered.submitted_at,
                };
                let _ = policy.submit(now, new, offered.may_hold, &mut self.out);
            }
            ("act", Some(now)) => policy.act(now, &mut self.out),
            (kind @ ("ledger" | "reread"), Some(now)) => {
                let told: form::Message<'_> = parse(line.body)?;
                let view = LedgerView::read(told.message.get(), told.seq)
                    .map_err(|error| format!("{kind}: {error}"))?;
                policy.follow(now, &view, kind == "reread", &mut self.out);
            }
            (kind, Some(now)) => {
                let input = form::input(kind, line.body);
                let input = input.map_err(|error| format!("{kind}: {error}"))?;
                policy.step(now, input, &mut self.out);
            }
            (kind, None) => return Err(format!("{kind} needs both clocks")),
        }
        Ok(())
    }

    fn add_policy(&mut self, line: &Read<'_>) -> Result<(), String> {
        let next = self.policies.len();
        if line.policy != next {
            return Err(format!(
                "policy p{} begins where p{next} is next",
                line.policy
            ));
        }
        let new: New = parse(line.body)?;
        let policy = self.recorder.policy(&new.config, new.id, &mut *self.make);
        self.policies.push(policy);
        Ok(())
    }
}

fn parse<'a, T: Deserialize<'a>>(body: Option<&'a str>) -> Result<T, String> {
    serde_json::from_str(body.unwrap_or_default()).map_err(|error| error.to_string())
}
