//! The quotas and reservations of tenants at the broker: one table per tenant, replaced by
//! compare-and-set. The world counts bound and reserved executions itself, and checks them against
//! the quotas.

use super::*;
use crate::broken::Rule;
use fiec_policy::Change;
use fiec_schemas::IdError;
use fiec_schemas::quota::{Quota, Reservations};

/// Time after which every policy service knows a changed quota and older messages have arrived, in
/// microseconds.
const KNOWN_US: u64 = 10_000_000;
/// Time after which a policy service gives up waiting for an answer, as in production, in
/// microseconds.
const GIVEN_UP_US: u64 = 4_500_000;
/// Time within which a change without an answer is stored, or never, in microseconds.
const LATE_US: u64 = 8_000_000;

/// A tenant.
#[derive(Debug)]
pub(super) struct Book {
    pub name: Tenant,
    /// Its quotas, with their start times in microseconds. None: unlimited.
    quotas: Vec<(u64, Option<Quota>)>,
    /// Its table, and the table's sequence.
    seq: u64,
    table: Arc<Reservations>,
    /// Number of bound or reserved executions, and the memory that they request.
    count: u64,
    bytes: u64,
    /// The allowed maximum; it may exceed the quota after the quota was lowered.
    most: u64,
    most_bytes: u64,
    /// Needs of its largest gang or largest execution.
    need: u64,
    need_bytes: u64,
    /// Time since which there has been room for that; `u64::MAX` if there is none.
    pub room_since: u64,
}

/// A change of reservations, in flight to the broker.
#[derive(Debug)]
pub(super) struct Wish {
    tenant: u32,
    quota: Option<Quota>,
    change: Box<Change>,
    way: Way,
}

/// Fate of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It is made, and the policy service learns of it.
    Answered,
    /// It is made, and the policy service does not learn of it.
    Unanswered,
    /// It is made later, unless another change was faster.
    Late,
    /// It never arrives.
    Lost,
}

/// A table to replace the one with this sequence.
#[derive(Debug)]
pub(super) struct Table {
    after: u64,
    table: Reservations,
}

/// A table in flight to a policy service. None: the result is unknown.
#[derive(Debug, Clone)]
pub(super) struct Told {
    tenant: u32,
    table: Option<(u64, Arc<Reservations>)>,
    answer: bool,
}

/// The tenants of a scenario, and the tenant of each workload.
pub(super) fn books(scenario: &Scenario) -> Result<(Vec<Book>, Vec<u32>), IdError> {
    let default = Tenant::new("sim")?;
    let mut books: Vec<Book> = Vec::new();
    let mut find = |name: &Tenant| {
        let at = books.iter().position(|b| b.name == *name);
        at.unwrap_or_else(|| {
            books.push(Book {
                name: name.clone(),
                quotas: vec![(0, None)],
                seq: 0,
                table: Arc::default(),
                count: 0,
                bytes: 0,
                most: u64::MAX,
                most_bytes: u64::MAX,
                need: 1,
                need_bytes: 0,
                room_since: 0,
            });
            books.len() - 1
        })
    };
    let shares = scenario.nodes.iter();
    let shares = shares.map(|g| g.memory_bytes / u64::from(g.slots.max(1)));
    let share = shares.max().unwrap_or(0);
    let mut of = Vec::new();
    let mut needs = Vec::new();
    for w in &scenario.workloads {
        let number = find(w.tenant.as_ref().unwrap_or(&default));
        of.push(u32::try_from(number).unwrap_or(u32::MAX));
        let size = u64::from(w.gang_size().unwrap_or(1));
        // Without a requirement, an execution counts for a slot's share of memory.
        let bytes = match asked(&w.submission) {
            0 => share,
            bytes => bytes,
        };
        needs.push((number, size, size.saturating_mul(bytes)));
    }
    let mut changes: Vec<_> = scenario.quotas.iter().collect();
    changes.sort_by_key(|q| q.at_ms);
    let changes: Vec<_> = changes.into_iter().map(|q| (find(&q.tenant), q)).collect();
    for (number, size, bytes) in needs {
        let book = &mut books[number];
        book.need = book.need.max(size);
        book.need_bytes = book.need_bytes.max(bytes);
    }
    for (number, q) in changes {
        let none = q.running.is_none() && q.memory_bytes.is_none() && q.weight.is_none();
        let quota = (!none).then(|| Quota {
            v: 1,
            running: q.running,
            devices: None,
            memory_bytes: q.memory_bytes,
            waiting: None,
            weight: q.weight,
            who: "sim".to_owned(),
            at: Timestamp::from_micros(EPOCH_US),
        });
        let quotas = &mut books[number].quotas;
        if q.at_ms == 0 {
            quotas.clear();
        }
        quotas.push((q.at_ms * 1_000, quota));
    }
    Ok((books, of))
}

/// The least memory that a submission counts for.
fn asked(spec: &Submission) -> u64 {
    let requires = &spec.requires;
    let bytes = requires.memory_bytes.max(requires.free_memory_bytes);
    bytes.unwrap_or(0)
}

impl Book {
    /// The quota in force.
    fn quota(&self, now: u64) -> Option<&Quota> {
        let past = self.quotas.iter().rev().find(|(at, _)| *at <= now);
        past.and_then(|(_, quota)| quota.as_ref())
    }

    /// The loosest limits that a policy service may still apply.
    fn loosest(&self, now: u64, disturbed_until: u64) -> (Option<u64>, Option<u64>) {
        let (mut running, mut bytes) = (Some(0), Some(0));
        for (n, (at, quota)) in self.quotas.iter().enumerate() {
            let over = self.quotas.get(n + 1).map_or(u64::MAX, |(at, _)| *at);
            let known = over.max(disturbed_until).saturating_add(KNOWN_US);
            if *at > now || (over <= now && known <= now) {
                continue;
            }
            let quota = quota.as_ref();
            let more = |most: Option<u64>, limit: Option<u64>| Some(most?.max(limit?));
            running = more(running, quota.and_then(|q| q.running).map(u64::from));
            bytes = more(bytes, quota.and_then(|q| q.memory_bytes));
        }
        (running, bytes)
    }

    /// Updates the time since which there has been room.
    pub fn note_room(&mut self, now: u64) {
        let quota = self.quota(now);
        let fits = |limit: Option<u64>, taken: u64| limit.is_none_or(|limit| taken <= limit);
        let room = fits(
            quota.and_then(|q| q.running).map(u64::from),
            self.count + self.need,
        ) && fits(
            quota.and_then(|q| q.memory_bytes),
            self.bytes.saturating_add(self.need_bytes),
        );
        self.room_since = if room {
            self.room_since.min(now)
        } else {
            u64::MAX
        };
    }
}

impl<D: Decide> World<'_, D> {
    /// The tenant of an execution.
    pub(super) fn tenant(&self, e: u32) -> Tenant {
        self.books[self.exec(e).tenant as usize].name.clone()
    }

    /// A tenant's quota changes.
    pub(super) fn limit(&mut self, number: u32) {
        let tenant = &self.scenario.quotas[number as usize].tenant;
        let Some(at) = self.books.iter().position(|b| b.name == *tenant) else {
            return;
        };
        self.books[at].note_room(self.now);
        let tenant = u32::try_from(at).unwrap_or(u32::MAX);
        for p in 0..self.replicas.len() {
            let at = self.arrival();
            self.queue.plan(at, What::Quota(p as u8, tenant));
        }
    }

    pub(super) fn quota(&mut self, p: u8, tenant: u32) -> Result<(), Wrong> {
        if self.waits(p, What::Quota(p, tenant)).is_none() {
            return Ok(());
        }
        self.tell_quota(p as usize, tenant as usize);
        self.perform(p as usize)
    }

    pub(super) fn tell_quota(&mut self, p: usize, tenant: usize) {
        let book = &self.books[tenant];
        let (tenant, quota) = (book.name.clone(), book.quota(self.now).cloned());
        if quota.is_some() || book.quotas.len() > 1 {
            self.tell(p, Input::Quota { tenant, quota });
        }
    }

    pub(super) fn tell_table(&mut self, p: usize, tenant: usize) {
        let book = &self.books[tenant];
        if book.seq > 0 {
            let input = Input::Reserved {
                tenant: book.name.clone(),
                table: Some((book.seq, Arc::clone(&book.table))),
                answer: false,
            };
            self.tell(p, input);
        }
    }

    /// A policy service requests a change of reservations.
    pub(super) fn wish(
        &mut self,
        p: usize,
        tenant: &Tenant,
        quota: Option<Quota>,
        change: Box<Change>,
    ) {
        let Some(number) = self.books.iter().position(|b| b.name == *tenant) else {
            return;
        };
        let way = match self.is_lost() {
            false => Way::Answered,
            true => match self.network.below(3) {
                0 => Way::Unanswered,
                1 => Way::Late,
                _ => Way::Lost,
            },
        };
        let at = self.arrival();
        let wish = Box::new(Wish {
            tenant: u32::try_from(number).unwrap_or(u32::MAX),
            quota,
            change,
            way,
        });
        let life = self.replicas[p].life;
        self.queue.plan(at, What::Reserve(p as u8, life, wish));
    }

    /// A change reaches the broker. The policy service reads and replaces the table until it wins
    /// the race. That is equivalent to a single step.
    pub(super) fn reserve(&mut self, p: u8, life: u32, wish: Wish) -> Result<(), Wrong> {
        self.tally.reservations += 1;
        let book = &self.books[wish.tenant as usize];
        let after = wish.change.apply(&book.table, wish.quota.as_ref());
        let news = after.entries != book.table.entries || wish.change.fence;
        let seq = book.seq;
        match wish.way {
            Way::Answered | Way::Unanswered if news => self.replace(wish.tenant, after)?,
            Way::Late => {
                let late = self.now + self.network.below(LATE_US);
                let table = Box::new(Table {
                    after: seq,
                    table: after,
                });
                self.queue.plan(late, What::Late(wish.tenant, table));
            }
            _ => {}
        }
        let book = &self.books[wish.tenant as usize];
        let answered = wish.way == Way::Answered;
        let told = Box::new(Told {
            tenant: wish.tenant,
            table: answered.then(|| (book.seq, Arc::clone(&book.table))),
            answer: true,
        });
        let at = match answered {
            true => self.arrival(),
            false => self.now + GIVEN_UP_US,
        };
        self.queue.plan(at, What::Reserved(p, life, told));
        Ok(())
    }

    /// A late change arrives. It counts if the table has not been replaced since.
    pub(super) fn stored_late(&mut self, tenant: u32, late: Table) -> Result<(), Wrong> {
        if self.books[tenant as usize].seq != late.after {
            return Ok(());
        }
        self.replace(tenant, late.table)
    }

    fn replace(&mut self, tenant: u32, table: Reservations) -> Result<(), Wrong> {
        self.last_table += 1;
        let book = &mut self.books[tenant as usize];
        let before = std::mem::replace(&mut book.table, Arc::new(table));
        let table = Arc::clone(&book.table);
        book.seq = self.last_table;
        let has = |table: &Reservations, id| {
            let entries = &table.entries;
            entries.binary_search_by_key(&id, |r| r.execution).is_ok()
        };
        for gone in before.entries.iter().filter(|r| !has(&table, r.execution)) {
            let e = self.number_of(gone.execution);
            if self.exec(e).tied && self.must_reserve(e) {
                let said = "its reservation is given back while it has a place".to_owned();
                return Err((Some(e), (Rule::Quotas, said)));
            }
            self.count_anew(e, self.exec(e).tied, false)?;
        }
        for new in table.entries.iter().filter(|r| !has(&before, r.execution)) {
            let e = self.number_of(new.execution);
            self.count_anew(e, self.exec(e).tied, true)?;
        }
        let seq = self.last_table;
        for p in 0..self.replicas.len() {
            let (at, life) = (self.arrival(), self.replicas[p].life);
            let told = Box::new(Told {
                tenant,
                table: Some((seq, Arc::clone(&table))),
                answer: false,
            });
            self.queue.plan(at, What::Reserved(p as u8, life, told));
        }
        Ok(())
    }

    /// A table, or an unknown result, reaches a policy service.
    pub(super) fn reserved(&mut self, p: u8, life: u32, told: Box<Told>) -> Result<(), Wrong> {
        if !self.is_alive(p, life) {
            return Ok(());
        }
        let Some(What::Reserved(_, _, told)) = self.waits(p, What::Reserved(p, life, told)) else {
            return Ok(());
        };
        let input = Input::Reserved {
            tenant: self.books[told.tenant as usize].name.clone(),
            table: told.table,
            answer: told.answer,
        };
        self.input(p as usize, input)
    }

    /// True for an execution that needs a reservation, by everything that all replicas know.
    fn must_reserve(&self, e: u32) -> bool {
        let exec = self.exec(e);
        // If only some members of a batch state a limit, no reservation is needed while none of
        // those lives.
        let limited = |batch: u32| self.holds.batches[batch as usize].at_once.is_some();
        if exec.gang().is_some() || exec.batch().is_some_and(limited) {
            return true;
        }
        let book = &self.books[exec.tenant as usize];
        let (running, bytes) = book.loosest(self.now, self.disturbed_until);
        running.is_some() || bytes.is_some()
    }

    /// Checks that a newly bound execution has a reservation.
    pub(super) fn is_reserved(&self, e: u32) -> Result<(), Broken> {
        if self.exec(e).reserved || !self.must_reserve(e) {
            return Ok(());
        }
        let name = &self.books[self.exec(e).tenant as usize].name;
        let said = format!("it is bound, and {name} has not reserved that");
        Err((Rule::Quotas, said))
    }

    /// Updates the counts for an execution.
    pub(super) fn count_anew(&mut self, e: u32, tied: bool, reserved: bool) -> Result<(), Wrong> {
        let (now, disturbed) = (self.now, self.disturbed_until);
        let exec = &mut self.execs[e as usize];
        let (before, after) = (exec.tied || exec.reserved, tied || reserved);
        (exec.tied, exec.reserved) = (tied, reserved);
        let limited = self.books[exec.tenant as usize].quotas.len() > 1
            || self.books[exec.tenant as usize].quotas[0].1.is_some();
        if before == after || (!limited && exec.held.is_none()) {
            return Ok(());
        }
        let (tenant, batch, bytes) = (exec.tenant, exec.batch(), asked(&exec.spec));
        let wrong = |said: String| Err((Some(e), (Rule::Quotas, said)));
        if let Some(batch) = batch {
            let batch = &mut self.holds.batches[batch as usize];
            batch.count = if after {
                batch.count + 1
            } else {
                batch.count - 1
            };
            let room = batch.count + batch.need <= batch.least;
            batch.room_since = if room {
                batch.room_since.min(now)
            } else {
                u64::MAX
            };
            if let Some(most) = batch.at_once.filter(|most| batch.count > *most) {
                let count = batch.count;
                return wrong(format!(
                    "{count} of its batch have a place, {most} may at once"
                ));
            }
        }
        let book = &mut self.books[tenant as usize];
        if !after {
            book.count -= 1;
            book.bytes = book.bytes.saturating_sub(bytes);
            book.note_room(now);
            return Ok(());
        }
        let (running, most_bytes) = book.loosest(now, disturbed);
        let least = |most: u64, taken: u64, limit: Option<u64>| match limit {
            Some(limit) => most.min(taken).max(limit),
            None => u64::MAX,
        };
        book.most = least(book.most, book.count, running);
        book.most_bytes = least(book.most_bytes, book.bytes, most_bytes);
        book.count += 1;
        book.bytes = book.bytes.saturating_add(bytes);
        book.note_room(now);
        if book.count > book.most {
            let (count, most) = (book.count, book.most);
            return wrong(format!(
                "{count} of {} have a place, {most} may at once",
                book.name
            ));
        }
        // A limit on memory does not hold up an execution that requests none.
        if book.bytes > book.most_bytes && bytes > 0 {
            let (taken, most) = (book.bytes, book.most_bytes);
            return wrong(format!(
                "{taken} bytes of {} are taken, of {most}",
                book.name
            ));
        }
        Ok(())
    }

    /// Time since which neither its tenant's quota nor its batch has held an execution up.
    pub(super) fn let_since(&self, e: u32) -> u64 {
        let exec = self.exec(e);
        let batch = exec.batch().map(|b| &self.holds.batches[b as usize]);
        let book = &self.books[exec.tenant as usize];
        book.room_since.max(batch.map_or(0, |b| b.room_since))
    }

    /// Updates the room of quotas over time, and checks that ended executions have no reservation.
    pub(super) fn watch_quotas(&mut self, patience: u64) -> Result<(), Wrong> {
        let now = self.now;
        for book in &mut self.books {
            book.note_room(now);
        }
        for book in &self.books {
            for entry in &book.table.entries {
                let e = self.number_of(entry.execution);
                let done = self.exec(e).done;
                let since = done.max(self.disturbed_until);
                if done > 0 && now >= since.saturating_add(patience) {
                    let said = format!(
                        "it ended {} s ago, and {} still has it reserved",
                        (now - since) / 1_000_000,
                        book.name
                    );
                    return Err((Some(e), (Rule::Quotas, said)));
                }
            }
        }
        Ok(())
    }
}
