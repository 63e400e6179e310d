//! The steps that are possible in a state.

use super::message::{FIRST_POLICY, Id, Kind, Message, Messages, NOBODY, Phase, WORK};
use super::rules::{Faults, Rules};
use super::state::{Call, Capsule, Entry, Flight, POLICIES, State, WORKERS, Worker};

/// More messages than a ledger of the model can hold.
const ALL: u8 = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A policy service reads, and appends a binding to this node (or `submitted`).
    Decide(usize, u8),
    /// A policy service hands a binding that its node does not have to that node again.
    Hand(usize),
    TakeCapsule(usize),
    /// A worker appends a boundary, or the end.
    Append(usize),
    /// A worker reads the ledger, and goes on, heals or drops what it holds.
    Read(usize),
    /// An append reaches the broker. Clients are the workers, then the policy services.
    Deliver(usize),
    /// The same; its author, a policy service, hands the binding to its node.
    DeliverAndHand(usize),
    DeliverDelayed,
    Acknowledge(usize),
    LoseAcknowledgement(usize),
    /// The append is lost, or overtaken by its author's patience: then a copy is delayed.
    LoseAppend(usize),
    Delay(usize),
    Crash(usize),
    /// The broker restarts without the last messages.
    Restart(u8),
    /// A message on another subject.
    Foreign,
}

pub struct Model {
    pub messages: Messages,
    pub rules: Rules,
    pub faults: Faults,
    /// The actions of one state.
    pub next: Vec<(Action, State)>,
    pub violation: Option<(Action, String)>,
    /// True when a limit of the model kept an action out.
    pub is_cut: bool,
}

impl Model {
    pub fn new(rules: Rules, faults: Faults) -> Self {
        Self {
            messages: Messages::new(),
            rules,
            faults,
            next: Vec::new(),
            violation: None,
            is_cut: false,
        }
    }

    /// One execution that was submitted.
    pub fn start(&mut self) -> State {
        let id = self.messages.id(Message::submitted(NOBODY, 0));
        let mut state = State::default();
        state.server.next = 2;
        state.server.len = 1;
        state.server.entries[0] = Entry { seq: 1, id };
        state
    }

    pub(super) fn push(&mut self, action: Action, state: State) {
        self.next.push((action, state));
    }

    pub(super) fn blame(&mut self, action: Action, reason: impl Into<String>) {
        self.violation.get_or_insert((action, reason.into()));
    }

    /// Fills `next` with the successors of a state.
    pub fn expand(&mut self, s: &State) {
        self.next.clear();
        self.is_cut = false;
        for w in 0..WORKERS {
            self.worker(s, w);
        }
        for p in 0..POLICIES {
            self.policy(s, p);
        }
        for client in 0..WORKERS + POLICIES {
            self.network(s, client);
        }
        if let Some(flight) = s.limbo {
            let mut n = *s;
            n.limbo = None;
            if let Some(n) = self.store(&n, Action::DeliverDelayed, flight) {
                self.push(Action::DeliverDelayed, n.0);
            }
        }
        if let (0, Some(most)) = (s.server.life, self.faults.rollback) {
            for lost in 0..=most.min(s.server.len) {
                let n = self.restart(s, lost);
                self.push(Action::Restart(lost), n);
            }
        }
        if s.server.life == 1 && s.foreign < self.faults.foreign {
            let mut n = *s;
            n.foreign += 1;
            n.server.next += 1;
            self.push(Action::Foreign, n);
        }
    }

    pub(super) fn progress(&self, id: Id) -> u8 {
        let message = self.messages.get(id);
        match message.phase {
            Phase::Completed => WORK + 1,
            _ => message.boundary,
        }
    }

    /// True when a living worker, other than `author`, holds a chain that it has not yet compared
    /// with what the restarted broker has.
    pub(super) fn is_unsettled(s: &State, author: u8) -> bool {
        let unsettled = |w: &Worker| !w.dead && w.tip != 0 && w.seen == 0;
        let mut others = (0..).zip(&s.workers).filter(|(w, _)| *w != author);
        s.server.life == 1 && others.any(|(_, w)| unsettled(w))
    }

    fn restart(&self, s: &State, lost: u8) -> State {
        let mut n = *s;
        n.server.life = 1;
        n.server.len -= lost;
        for entry in &mut n.server.entries[n.server.len as usize..] {
            *entry = Entry::default();
        }
        n.server.next = n.server.last_seq() + 1;
        let (chain, len) = n.server.chain(&self.messages, Rules::ALL.validity);
        let kept = if len == 0 {
            0
        } else {
            self.progress(chain[len - 1])
        };
        let held = |w: &Worker| w.tip != 0 && self.progress(w.tip) >= s.acknowledged;
        n.excused |= kept < s.acknowledged && !s.workers.iter().any(held);
        n
    }

    fn worker(&mut self, s: &State, w: usize) {
        let own = &s.workers[w];
        if own.dead {
            return;
        }
        if s.crashes < self.faults.crashes {
            let mut n = *s;
            n.crashes += 1;
            n.excused |= own.tip != 0 && s.server.life == 1 && own.seen == 0;
            let call = match own.call {
                Call::Sent(flight) => Call::Sent(flight),
                _ => Call::Idle,
            };
            n.workers[w] = Worker {
                dead: true,
                call,
                ..Worker::default()
            };
            self.push(Action::Crash(w), n);
        }
        if let (Call::Idle, 0, Some(capsule)) = (own.call, own.tip, own.inbox) {
            let mut n = *s;
            let own = &mut n.workers[w];
            own.inbox = None;
            own.tip = capsule.id;
            own.seq = capsule.seq;
            if self.rules.capsule_names_life {
                own.seen = capsule.life;
            } else {
                own.life = s.server.life;
                own.seen = own.life;
            }
            own.depth = if self.rules.know_ancestors { ALL } else { 1 };
            self.push(Action::TakeCapsule(w), n);
        }
        if own.tip == 0 {
            return;
        }
        let tip = *self.messages.get(own.tip);
        if own.call == Call::Idle && own.seen == own.life && tip.phase != Phase::Completed {
            let flight = Flight {
                id: self.messages.id(tip.progress(own.tip)),
                expected: own.seq,
                life: own.seen,
            };
            let mut n = *s;
            n.workers[w].call = Call::Sent(flight);
            self.push(Action::Append(w), n);
        }
        let must_read = match own.call {
            Call::Unknown(_) => true,
            Call::Idle => own.seen != s.server.life || own.seen != own.life || own.inbox.is_some(),
            _ => false,
        };
        if must_read {
            self.read(s, w);
        }
    }

    /// The worker adds a message to its chain that is stored.
    pub(super) fn believe(&self, n: &mut State, w: usize, id: Id) {
        let own = &mut n.workers[w];
        let mut known = own.depth;
        let (prev, mut at) = (self.messages.get(id).prev, own.tip);
        while at != prev && known > 0 && self.messages.get(id).kind == Kind::Healed {
            at = self.messages.get(at).prev;
            known -= 1;
        }
        own.depth = (known + 1).min(ALL);
        if self.rules.know_ancestors {
            own.depth = ALL;
        }
        own.tip = id;
        n.acknowledged = n.acknowledged.max(self.progress(id));
    }

    pub(super) fn drop_chain(&self, n: &mut State, w: usize) {
        let own = &mut n.workers[w];
        // Where capsules name a life, what the worker knew before does not matter: fewer states.
        let life = match self.rules.capsule_names_life {
            true => 0,
            false => own.life,
        };
        *own = Worker {
            life,
            inbox: own.inbox,
            ..Worker::default()
        };
    }

    fn read(&mut self, s: &State, w: usize) {
        let action = Action::Read(w);
        let mut n = *s;
        let last = s.server.last(&self.messages, &self.rules);
        n.workers[w].life = s.server.life;
        if let Call::Unknown(flight) = s.workers[w].call {
            let stored = if self.rules.own_must_be_valid {
                s.server
                    .is_valid(&self.messages, self.rules.validity, flight.id)
            } else {
                s.server.entries().iter().any(|e| e.id == flight.id)
            };
            if stored {
                let truth = Rules::ALL.validity;
                if !s.server.is_valid(&self.messages, truth, flight.id) {
                    self.blame(action, self.uncounted(w, flight.id));
                }
                self.believe(&mut n, w, flight.id);
            }
        }
        n.workers[w].call = Call::Idle;
        let own = n.workers[w];
        let (is_tip, is_behind) = if self.rules.compare_digests {
            let behind = match last.id {
                0 => !self.messages.is_ancestor(0, own.tip, own.depth) && own.depth == ALL,
                id => self.messages.is_ancestor(id, own.tip, own.depth),
            };
            (last.id == own.tip, behind)
        } else {
            (last.seq == own.seq, last.seq < own.seq)
        };
        let ended = self.messages.get(own.tip).phase == Phase::Completed;
        if is_tip {
            let own = &mut n.workers[w];
            own.seq = last.seq;
            own.seen = s.server.life;
            own.inbox = None;
            if ended && (s.server.life == 1 || !self.rules.keep_ended) {
                self.drop_chain(&mut n, w);
            }
        } else if is_behind {
            let tip = *self.messages.get(own.tip);
            n.workers[w].call = Call::Sent(Flight {
                id: self.messages.id(tip.healed(own.tip, last.id)),
                expected: last.seq,
                life: s.server.life,
            });
        } else {
            let (chain, len) = s.server.chain(&self.messages, Rules::ALL.validity);
            let kept = if len == 0 { 0 } else { chain[len - 1] };
            let is_only_behind = kept == 0 || self.messages.is_ancestor(kept, own.tip, u8::MAX);
            if is_only_behind && self.progress(own.tip) > 0 {
                let tip = self.messages.show(own.tip);
                self.blame(
                    action,
                    format!("worker {w} drops {tip}, and nobody overtook it"),
                );
            }
            self.drop_chain(&mut n, w);
        }
        self.push(action, n);
    }

    fn policy(&mut self, s: &State, p: usize) {
        if s.policies[p] != Call::Idle {
            return;
        }
        let last = s.server.last(&self.messages, &self.rules);
        let state = match last.id {
            0 => None,
            id => Some(*self.messages.get(id)),
        };
        if let Some(bound) = state.filter(|m| m.phase == Phase::Bound) {
            let own = &s.workers[bound.holder as usize];
            if !own.dead && own.tip == 0 && own.inbox.is_none() && own.call == Call::Idle {
                let mut n = *s;
                n.workers[bound.holder as usize].inbox = Some(Capsule {
                    id: last.id,
                    seq: last.seq,
                    life: s.server.life,
                });
                self.push(Action::Hand(p), n);
            }
        }
        if self.rules.grace && Self::is_unsettled(s, NOBODY) {
            return;
        }
        // The names of nodes and services do not matter for the first decision: fewer states.
        let is_symmetric = s.server.len <= 1
            && s.limbo.is_none()
            && s.workers[0] == s.workers[1]
            && s.policies == [Call::Idle; POLICIES];
        if is_symmetric && p > 0 {
            return;
        }
        let author = FIRST_POLICY + p as u8;
        let send = |model: &mut Self, node: u8, message: Message, suspects: bool| {
            let mut n = *s;
            n.suspicions += u8::from(suspects);
            n.policies[p] = Call::Sent(Flight {
                id: model.messages.id(message),
                expected: last.seq,
                life: s.server.life,
            });
            model.push(Action::Decide(p, node), n);
        };
        let Some(state) = state else {
            let message = Message::submitted(author, s.server.life);
            send(self, NOBODY, message, false);
            return;
        };
        let mut suspects = false;
        match state.phase {
            Phase::Pending => {}
            Phase::Completed => return,
            Phase::Bound | Phase::Started => {
                let own = &s.workers[state.holder as usize];
                let computes = own.tip != 0 && self.messages.get(own.tip).phase != Phase::Completed;
                if !own.dead && (computes || own.inbox.is_some() || state.phase == Phase::Bound) {
                    if s.suspicions >= self.faults.suspicions {
                        return;
                    }
                    suspects = true;
                }
            }
        }
        for node in 0..WORKERS as u8 {
            let is_out = s.workers[node as usize].dead || (suspects && node == state.holder);
            if is_out || (is_symmetric && node > 0) {
                continue;
            }
            let message = state.bound(last.id, node, author, s.server.life);
            send(self, node, message, suspects);
        }
    }

    fn uncounted(&self, w: usize, id: Id) -> String {
        let shown = self.messages.show(id);
        format!("worker {w} believes {shown}, which the ledger does not count")
    }

    /// A property that the state itself breaks.
    pub fn broken_property(&self, s: &State) -> Option<String> {
        let is_valid = |id| s.server.is_valid(&self.messages, Rules::ALL.validity, id);
        for (w, own) in s.workers.iter().enumerate() {
            if own.tip != 0 && own.seen == s.server.life && !is_valid(own.tip) {
                return Some(self.uncounted(w, own.tip));
            }
            let stale = |c: &Capsule| c.life == s.server.life && !is_valid(c.id);
            if let Some(capsule) = own.inbox.filter(stale) {
                let shown = self.messages.show(capsule.id);
                return Some(format!(
                    "worker {w} is handed {shown}, which the ledger does not count"
                ));
            }
        }
        None
    }

    pub fn is_done(&self, s: &State) -> bool {
        let (chain, len) = s.server.chain(&self.messages, Rules::ALL.validity);
        len > 0 && self.messages.get(chain[len - 1]).phase == Phase::Completed
    }
}
