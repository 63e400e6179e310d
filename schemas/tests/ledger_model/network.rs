//! Appends between the clients and the broker.

use super::message::{Kind, Phase};
use super::rules::Rules;
use super::state::{Call, Capsule, DEPTH, Entry, Flight, State, WORKERS, Worker};
use super::step::{Action, Model};

impl Model {
    fn call(s: &mut State, client: usize) -> &mut Call {
        match client.checked_sub(WORKERS) {
            None => &mut s.workers[client].call,
            Some(p) => &mut s.policies[p],
        }
    }

    /// The client gives up waiting for its append.
    fn give_up(mut s: State, client: usize, flight: Flight) -> State {
        // A policy service reads and decides anew, whatever became of its append.
        let reads = client < WORKERS && !s.workers[client].dead;
        *Self::call(&mut s, client) = match reads {
            true => Call::Unknown(flight),
            false => Call::Idle,
        };
        s
    }

    /// The possible fates of this client's append.
    pub(super) fn network(&mut self, s: &State, client: usize) {
        let spare = self.faults.lost_acks - s.lost_acks;
        // Across lives the connection breaks anyhow.
        let cost = |life: u8| u8::from(life == s.server.life);
        match *Self::call(&mut s.clone(), client) {
            Call::Idle | Call::Unknown(_) => {}
            Call::Sent(flight) => {
                if let Some((n, seq)) = self.store(s, Action::Deliver(client), flight) {
                    self.answer(n, client, flight, seq);
                }
                if cost(flight.life) <= spare {
                    let mut n = Self::give_up(*s, client, flight);
                    n.lost_acks += cost(flight.life);
                    self.push(Action::LoseAppend(client), n);
                }
                if spare == 1 && s.limbo.is_none() {
                    let mut n = Self::give_up(*s, client, flight);
                    n.lost_acks += 1;
                    n.limbo = Some(flight);
                    self.push(Action::Delay(client), n);
                }
            }
            Call::Acked { flight, seq, life } => {
                self.acknowledge(s, client, flight, seq, life);
                if cost(life) <= spare {
                    let mut n = Self::give_up(*s, client, flight);
                    n.lost_acks += cost(life);
                    self.push(Action::LoseAcknowledgement(client), n);
                }
            }
        }
    }

    /// After the broker stored (or refused) an append of this client.
    fn answer(&mut self, n: State, client: usize, flight: Flight, seq: Option<u8>) {
        let life = n.server.life;
        let mut silent = Self::give_up(n, client, flight);
        if let (Some(seq), Call::Unknown(_)) = (seq, *Self::call(&mut silent, client)) {
            *Self::call(&mut silent, client) = Call::Acked { flight, seq, life };
        }
        self.push(Action::Deliver(client), silent);
        // A policy service hands a binding over at once, or (lost) after its next read.
        let bound = self.messages.get(flight.id);
        let is_believed = flight.life == life || !self.rules.believe_within_life;
        if let (true, Some(seq), Kind::Bound) = (is_believed, seq, bound.kind) {
            let node = &mut silent.workers[bound.holder as usize];
            if client >= WORKERS && !node.dead {
                let id = flight.id;
                node.inbox = Some(Capsule { id, seq, life });
                self.push(Action::DeliverAndHand(client), silent);
            }
        }
    }

    fn acknowledge(&mut self, s: &State, w: usize, flight: Flight, seq: u8, life: u8) {
        let mut n = *s;
        let own = &mut n.workers[w];
        own.life = own.life.max(life);
        own.call = Call::Idle;
        let is_same = flight.life == life && own.life == life;
        if is_same || !self.rules.believe_within_life {
            own.seq = seq;
            own.seen = own.life;
            self.believe(&mut n, w, flight.id);
            let ended = self.messages.get(flight.id).phase == Phase::Completed;
            if ended && !self.rules.keep_ended {
                self.drop_chain(&mut n, w);
            }
        } else {
            own.call = Call::Unknown(flight);
        }
        self.push(Action::Acknowledge(w), n);
    }

    /// The broker takes an append, or refuses it; no state where the model's ledger is full.
    pub(super) fn store(
        &mut self,
        s: &State,
        action: Action,
        flight: Flight,
    ) -> Option<(State, Option<u8>)> {
        let mut n = *s;
        if s.server.last_seq() != flight.expected {
            return Some((n, None));
        }
        let len = s.server.len as usize;
        if len == DEPTH {
            self.is_cut = true;
            return None;
        }
        let (chain, valid) = s.server.chain(&self.messages, Rules::ALL.validity);
        let before = if valid == 0 { 0 } else { chain[valid - 1] };
        let seq = s.server.next;
        let id = flight.id;
        n.server.entries[len] = Entry { seq, id };
        n.server.len += 1;
        n.server.next += 1;
        let message = *self.messages.get(id);
        if message.prev == before {
            if let Some(rule) = self.messages.broken_rule(before, id) {
                let shown = self.messages.show(id);
                self.blame(action, format!("{rule}: {shown}"));
            }
            n.excused |= Self::is_unsettled(s, message.author);
            let counts = matches!(message.kind, Kind::Boundary | Kind::Completed);
            // A delayed copy may be stored once more.
            let held = |w: &Worker| w.tip == id || self.messages.is_ancestor(id, w.tip, u8::MAX);
            let is_new = !s.workers.iter().any(held);
            if counts && is_new && !n.excused && self.progress(id) <= s.acknowledged {
                let shown = self.messages.show(id);
                self.blame(action, format!("computed again: {shown}"));
            }
        }
        Some((n, Some(seq)))
    }
}
