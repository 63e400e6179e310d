//! The workers of the simulated cluster: they start, complete, refuse and obey.

use fiec_schemas::messages::ControlRequest;
use fiec_schemas::{Cause, Event, ExecutionId, Fault, Phase, Started};

use super::World;

impl World {
    pub fn start(&mut self, n: u64) {
        let (author, epoch, at) = (
            self.author(n),
            self.ledgers[&Self::id(n)].state.epoch,
            self.wall(),
        );
        self.append(
            Self::id(n),
            vec![Event::Started {
                epoch,
                computing_since: at,
            }],
            &author,
            true,
        );
    }

    pub fn complete(&mut self, n: u64) {
        let (author, at) = (self.author(n), self.wall());
        let done = Event::Completed {
            result: serde_json::Value::Null,
            object: None,
            computed_until: at,
            capsules: 1,
            outputs: vec![],
            energy: None,
        };
        self.append(Self::id(n), vec![done], &author, true);
        self.act();
    }

    pub fn complete_if_bound(&mut self, n: u64) {
        if matches!(self.phase(n), Phase::Bound(_)) {
            self.start(n);
            self.complete(n);
        }
    }

    pub fn refuse(&mut self, n: u64) {
        self.refuse_for(n, None);
    }

    pub fn refuse_for(&mut self, n: u64, fault: Option<Fault>) {
        let author = self.author(n);
        self.append(
            Self::id(n),
            vec![Event::Refused {
                reason: "full".into(),
                offer: 0,
                fault: fault.map(Box::new),
            }],
            &author,
            true,
        );
    }

    /// The worker gives back what it has started, because of a fault that is not the program's.
    pub fn give_back(&mut self, n: u64, fault: Fault) {
        let (author, at) = (self.author(n), self.wall());
        let cause = Cause::NotTaken {
            reason: "no".into(),
            fault: Some(Box::new(fault)),
        };
        let yielded = Event::Yielded {
            cause,
            computed_until: at,
        };
        self.append(Self::id(n), vec![yielded], &author, true);
    }

    /// The worker obeys an order.
    pub fn obey(&mut self, id: ExecutionId, request: &ControlRequest) {
        let ControlRequest::Yield {
            epoch,
            cause,
            to: Some(to),
            decision,
            ..
        } = request
        else {
            return;
        };
        let Some(l) = self.ledgers.get(&id) else {
            return;
        };
        let Phase::Started(Started { binding: b, .. }) = &l.state.phase else {
            return;
        };
        if l.state.epoch != *epoch {
            return;
        }
        let author = format!("worker/{}/{}", b.node, b.instance);
        let (epoch, at) = (epoch + 1, self.wall());
        self.append(
            id,
            vec![
                Event::Yielded {
                    cause: cause.clone(),
                    computed_until: at,
                },
                Event::Bound {
                    epoch,
                    node: to.node.clone(),
                    instance: to.instance,
                    substrate: to.substrate.clone(),
                    cause: cause.clone(),
                    decision: decision.clone(),
                },
            ],
            &author,
            true,
        );
    }
}
