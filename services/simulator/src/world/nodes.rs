//! Nodes sample their loads, send vectors and answer probes.

use super::*;
use crate::node::instance;
use fiec_schemas::{HardwareVector, Reading, Signal};

/// A vector with one reading, in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Word {
    node: u32,
    life: u32,
    count: u32,
    value: f32,
    running: u16,
    queued: u16,
    sent: u64,
}

/// A vector with several readings, in flight.
#[derive(Debug, Clone)]
pub(super) struct Told {
    word: Word,
    values: Vec<f32>,
}

impl<D: Decide> World<'_, D> {
    /// A node samples its loads, and sends a vector if they have changed.
    pub(super) fn sample(&mut self, node: usize, life: u32) -> Result<(), Wrong> {
        let (now, number) = (self.now, node as u32);
        let n = &mut self.nodes[node];
        if n.life != life || !n.up {
            return Ok(());
        }
        if n.stalled_until > now {
            let until = n.stalled_until;
            self.queue.plan(until, What::Sample(number, life));
            return Ok(());
        }
        let next = now + self.scenario.telemetry.sample_ms * 1_000;
        self.queue.plan(next, What::Sample(number, life));
        let heartbeat = self.scenario.telemetry.heartbeat_ms * 1_000;
        let used = n.used_share();
        let mut news = n.count == 0 || now >= n.told_at + heartbeat;
        let mut worst = 0.0f64;
        let mut values = Vec::new();
        let single = n.loads.len() == 1;
        let mut one = 0.0f32;
        if let Some(steady) = n.steady {
            worst = (steady + used).min(1.0);
            news |= (worst - f64::from(n.told_one)).abs() > Signal::Memory.step();
            one = worst as f32;
        } else {
            let told_one = std::slice::from_ref(&n.told_one);
            let told = if single { told_one } else { &n.told };
            for ((signal, load), told) in n.loads.iter_mut().zip(told) {
                let mut value = load.value(now, &mut n.draw);
                if *signal == Signal::Memory {
                    value = (value + used).min(1.0);
                }
                worst = worst.max(value);
                news |= (value - f64::from(*told)).abs() > signal.step();
                one = value as f32;
                if !single {
                    values.push(one);
                }
            }
        }
        n.calm = worst < self.calm_below;
        n.note_room(now);
        if !news {
            return Ok(());
        }
        n.count += 1;
        n.told_at = now;
        if single {
            n.told_one = one;
        } else {
            n.told.copy_from_slice(&values);
        }
        if now < n.silent_until {
            return Ok(());
        }
        let small = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
        let word = Word {
            node: number,
            life,
            count: u32::try_from(n.count).unwrap_or(u32::MAX),
            value: one,
            running: small(n.runs.len()),
            queued: small(n.queue.len()),
            sent: now,
        };
        for p in 0..self.replicas.len() {
            if self.replicas[p].policy.is_none() || self.is_lost() {
                continue;
            }
            let twice = self.is_doubled();
            for _ in 0..=u8::from(twice) {
                let at = self.arrival();
                let what = match single {
                    true => What::Word(p as u8, word),
                    false => What::Vector(
                        p as u8,
                        Box::new(Told {
                            word,
                            values: values.clone(),
                        }),
                    ),
                };
                self.queue.plan(at, what);
            }
        }
        Ok(())
    }

    pub(super) fn word(&mut self, p: u8, word: Word) -> Result<(), Wrong> {
        let until = self.replicas[p as usize].stalled_until;
        if until > self.now {
            self.queue.plan(until, What::Word(p, word));
            return Ok(());
        }
        self.hear_vector(p, word, &[word.value])
    }

    pub(super) fn vector(&mut self, p: u8, told: Told) -> Result<(), Wrong> {
        let until = self.replicas[p as usize].stalled_until;
        if until > self.now {
            self.queue.plan(until, What::Vector(p, Box::new(told)));
            return Ok(());
        }
        self.hear_vector(p, told.word, &told.values)
    }

    fn hear_vector(&mut self, p: u8, word: Word, values: &[f32]) -> Result<(), Wrong> {
        if self.replicas[p as usize].policy.is_none() {
            return Ok(());
        }
        let at = self.stamp(word.sent);
        let ix = word.node as usize;
        let (_, heard) = self.replicas[p as usize].heard[ix];
        if self.nodes[ix].life == word.life {
            self.hear(p, word.node);
            let n = &mut self.nodes[ix];
            // A policy service with so long a silence may have doubted the node.
            if self.now - heard > self.config.liveness_ms * 500 {
                n.room_since = n.room_since.max(self.now);
                n.empty_since = n.empty_since.max(self.now);
            }
        }
        let n = &self.nodes[ix];
        #[expect(clippy::cast_precision_loss, reason = "bytes as a reading")]
        let limit = n.limit as f64;
        let reading = |signal: Signal, value: f32| {
            let value = f64::from(value);
            let bytes = signal == Signal::Memory;
            Reading {
                signal,
                device: None,
                value: Some(value),
                raw: Some(if bytes { value * limit } else { value }),
                limit: Some(if bytes { limit } else { 1.0 }),
                // These fields are for people; a run makes tens of millions of readings that nobody
                // reads.
                unit: String::new(),
                source: String::new(),
                at,
                missing: None,
                envelope: None,
            }
        };
        let readings = match n.steady {
            Some(_) => vec![reading(Signal::Memory, word.value)],
            None => {
                let all = n.loads.iter().zip(values);
                all.map(|((signal, _), value)| reading(*signal, *value))
                    .collect()
            }
        };
        let vector = HardwareVector {
            v: 1,
            node: n.name.clone(),
            instance: instance(word.node, word.life),
            count: u64::from(word.count),
            at,
            clock: None,
            readings,
            draining: false,
            slots: n.slots,
            running_count: u32::from(word.running),
            queued_count: u32::from(word.queued),
            running: Vec::new(),
            arriving: Vec::new(),
            stuck: Vec::new(),
        };
        self.tally.vectors += 1;
        let age_ms = (self.now - word.sent) / 1_000;
        self.input(
            p as usize,
            Input::Vector {
                vector: Box::new(vector),
                age_ms,
            },
        )
    }

    /// A probe reaches a node.
    pub(super) fn probe(&mut self, p: u8, node: u32, sent: u64) {
        let timeout = sent + 1_000_000;
        let n = &self.nodes[node as usize];
        let answers = n.stalled_until.max(self.now);
        let reachable = n.is_reachable(self.now) && answers < timeout;
        let instance = n.descriptor.instance;
        if reachable && !self.is_lost() {
            let at = self.arrival().max(answers);
            self.queue.plan(at, What::Probed(p, node, Some(instance)));
        } else {
            self.queue.plan(timeout, What::Probed(p, node, None));
        }
    }
}
