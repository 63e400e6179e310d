//! Workers of the simulated cluster that obey orders: yield, park, unpark.

use super::*;

impl World {
    /// Obeys and returns the orders to holders since the last call, without preparations.
    pub fn obey_all(&mut self) -> Vec<(ExecutionId, ControlRequest)> {
        let mut obeyed = Vec::new();
        for (_, request) in self.take_controls() {
            let (id, epoch) = match &request {
                ControlRequest::Yield {
                    execution, epoch, ..
                }
                | ControlRequest::Park {
                    execution, epoch, ..
                }
                | ControlRequest::Unpark {
                    execution, epoch, ..
                } => (*execution, *epoch),
                _ => continue,
            };
            obeyed.push((id, request.clone()));
            let Some(l) = self.ledgers.get(&id) else {
                continue;
            };
            let (Phase::Started(started), true) = (&l.state.phase, l.state.epoch == epoch) else {
                continue;
            };
            let b = &started.binding;
            let author = format!("worker/{}/{}", b.node, b.instance);
            let (index, at) = (l.state.boundary_index() + 1, self.wall());
            let boundary = Event::Boundary(BoundaryEvent {
                index,
                digest: Digest::of(&index.to_le_bytes()),
                bytes: 8,
                computed_at: at,
                compute_us: 1_000,
                of: None,
                note: None,
                outputs: vec![],
                energy: None,
            });
            let parked = l.state.parked().is_some();
            let mut events = Vec::new();
            if !parked {
                events.push(boundary);
            }
            match &request {
                ControlRequest::Park { cause, keep, .. } => events.push(Event::Parked {
                    cause: cause.clone(),
                    keep: *keep,
                    computed_until: at,
                }),
                ControlRequest::Unpark { reason, .. } => {
                    events = vec![Event::Unparked {
                        reason: reason.clone(),
                        computing_since: at,
                    }];
                }
                ControlRequest::Yield { cause, to, .. } => {
                    events.push(Event::Yielded {
                        cause: cause.clone(),
                        computed_until: at,
                    });
                    if let Some(to) = to {
                        events.push(Event::Bound {
                            epoch: epoch + 1,
                            node: to.node.clone(),
                            instance: to.instance,
                            substrate: to.substrate.clone(),
                            cause: cause.clone(),
                            decision: None,
                        });
                    }
                }
                _ => {}
            }
            self.append(id, events, &author, true);
            self.carry_out();
        }
        obeyed
    }

    /// Sets the share of time in which a device's units are busy.
    pub fn set_contention(&mut self, node: usize, device: &str, value: f64) {
        let key = (node, device.to_owned(), Signal::Contention);
        self.signals.insert(key, value);
    }

    /// True if an execution is parked.
    pub fn is_parked(&self, n: u64) -> bool {
        self.ledgers[&Self::id(n)].state.parked().is_some()
    }

    /// Its program asks for more than its grant.
    pub fn ask(&mut self, n: u64, change: fiec_schemas::scheduling::Adjustment) {
        let author = self.author(n);
        let who = "program".to_owned();
        let asked = Event::Adjusted { who, change };
        self.append(Self::id(n), vec![asked], &author, true);
        self.carry_out();
    }
}

/// A node that parks as many executions as it has slots.
pub fn parks(mut d: NodeDescriptor) -> NodeDescriptor {
    d.parks = d.slots;
    d
}
