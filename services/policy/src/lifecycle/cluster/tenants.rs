//! Recent usage of each tenant against its weight.
//!
//! A tenant's usage u decays with a half-life H. It grows by one slot-millisecond per millisecond
//! for each execution on a node: du/dt = held − u · ln 2 / H, solved exactly between two changes.
//! Its share is
//!
//! ```text
//! (u · ln 2 / H  +  held) / weight
//! ```
//!
//! the decaying mean of held slots plus the slots held now. Of two waiting tenants, the one with
//! the smaller share goes first.
//!
//! Usage from before this policy service started is known only for live executions: the computing
//! time in the ledger counts as if it had been uninterrupted until the last message. Usage of
//! executions that ended earlier is lost.

use std::collections::BTreeMap;

use fiec_schemas::Tenant;

use crate::time::Millis;

/// Index of a tenant; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantIx(pub u32);

#[derive(Debug, Clone)]
struct Account {
    name: Tenant,
    weight: f64,
    held: u32,
    waiting: u32,
    usage: f64,
    at: Millis,
}

impl Account {
    /// Usage at a moment, in slot-milliseconds.
    #[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
    fn usage(&self, now: Millis, half_life_ms: u64) -> f64 {
        let rate = std::f64::consts::LN_2 / half_life_ms.max(1) as f64;
        let kept = (-rate * now.since(self.at) as f64).exp();
        self.usage * kept + f64::from(self.held) / rate * (1.0 - kept)
    }
}

/// All tenants seen so far.
#[derive(Debug)]
pub struct Tenants {
    by_name: BTreeMap<Tenant, TenantIx>,
    accounts: Vec<Account>,
    half_life_ms: u64,
    now: Millis,
}

impl Default for Tenants {
    fn default() -> Self {
        Self {
            by_name: BTreeMap::new(),
            accounts: Vec::new(),
            half_life_ms: 3_600_000,
            now: Millis(0),
        }
    }
}

impl Tenants {
    /// Advances the clock; later changes apply at this moment.
    pub fn pass(&mut self, now: Millis) {
        self.now = self.now.max(now);
    }

    /// Sets the half-life of usage.
    pub fn set_half_life(&mut self, half_life_ms: u64) {
        self.half_life_ms = half_life_ms.max(1);
    }

    /// The tenant's index, created if missing.
    pub fn intern(&mut self, name: &Tenant) -> TenantIx {
        if let Some(ix) = self.by_name.get(name) {
            return *ix;
        }
        let ix = TenantIx(u32::try_from(self.accounts.len()).unwrap_or(u32::MAX));
        self.by_name.insert(name.clone(), ix);
        self.accounts.push(Account {
            name: name.clone(),
            weight: 1.0,
            held: 0,
            waiting: 0,
            usage: 0.0,
            at: self.now,
        });
        ix
    }

    /// The tenant's index, if known.
    pub fn find(&self, name: &Tenant) -> Option<TenantIx> {
        self.by_name.get(name).copied()
    }

    /// The name of a tenant. Indices come from this table only.
    pub fn name(&self, ix: TenantIx) -> &Tenant {
        &self.accounts[ix.0 as usize].name
    }

    /// Sets a tenant's weight. Anything but a positive number counts as 1.
    pub fn set_weight(&mut self, name: &Tenant, weight: f64) {
        let ix = self.intern(name);
        let usable = weight.is_finite() && weight > 0.0;
        self.accounts[ix.0 as usize].weight = if usable { weight } else { 1.0 };
    }

    /// A tenant's weight.
    pub fn weight(&self, ix: TenantIx) -> f64 {
        self.accounts[ix.0 as usize].weight
    }

    /// Number of a tenant's executions on nodes.
    pub fn held(&self, ix: TenantIx) -> u32 {
        self.accounts[ix.0 as usize].held
    }

    /// Number of a tenant's live executions without a node.
    pub fn waiting(&self, name: &Tenant) -> u32 {
        self.find(name)
            .map_or(0, |ix| self.accounts[ix.0 as usize].waiting)
    }

    /// Adds or removes one live execution of a tenant without a node.
    pub fn wait(&mut self, name: &Tenant, more: bool) {
        let ix = self.intern(name);
        let waiting = &mut self.accounts[ix.0 as usize].waiting;
        *waiting = if more {
            waiting.saturating_add(1)
        } else {
            waiting.saturating_sub(1)
        };
    }

    /// Adds or removes one execution of a tenant on a node.
    pub fn hold(&mut self, name: &Tenant, more: bool) {
        let ix = self.intern(name);
        let (now, half_life) = (self.now, self.half_life_ms);
        let account = &mut self.accounts[ix.0 as usize];
        account.usage = account.usage(now, half_life);
        account.at = now;
        account.held = if more {
            account.held.saturating_add(1)
        } else {
            account.held.saturating_sub(1)
        };
    }

    /// Credits computing time from before this policy service started: `ms` without interruption
    /// until `until`.
    #[expect(clippy::cast_precision_loss, reason = "times below 2^52")]
    pub fn credit(&mut self, name: &Tenant, ms: u64, until: Millis) {
        let ix = self.intern(name);
        let (now, half_life) = (self.now, self.half_life_ms);
        let rate = std::f64::consts::LN_2 / half_life as f64;
        let had = (1.0 - (-rate * ms as f64).exp()) / rate;
        let left = had * (-rate * now.since(until) as f64).exp();
        let account = &mut self.accounts[ix.0 as usize];
        account.usage = account.usage(now, half_life) + left;
        account.at = now;
    }

    /// Decaying mean of the held slots.
    #[expect(clippy::cast_precision_loss, reason = "a half-life below 2^52")]
    pub fn lately(&self, ix: TenantIx) -> f64 {
        let rate = std::f64::consts::LN_2 / self.half_life_ms as f64;
        self.accounts[ix.0 as usize].usage(self.now, self.half_life_ms) * rate
    }

    /// Current and recent slots against the weight; the smaller goes first.
    pub fn share(&self, ix: TenantIx) -> f64 {
        (self.lately(ix) + f64::from(self.held(ix))) / self.weight(ix)
    }

    /// The tenant's fair number of slots: all held slots, divided by weight among the tenants that
    /// hold or wait.
    pub fn fair(&self, ix: TenantIx, waits: impl Fn(TenantIx) -> bool) -> f64 {
        let (mut weights, mut held) = (0.0, 0.0);
        for (n, account) in (0u32..).zip(&self.accounts) {
            if account.held > 0 || n == ix.0 || waits(TenantIx(n)) {
                weights += account.weight;
                held += f64::from(account.held);
            }
        }
        held * self.weight(ix) / weights
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Tenant {
        Tenant::new(name).unwrap()
    }

    #[test]
    fn usage_is_forgotten_by_half_in_a_half_life_and_settles_at_what_is_held() {
        let mut tenants = Tenants::default();
        tenants.set_half_life(1_000);
        let a = tenants.intern(&tenant("a"));
        (0..4).for_each(|_| tenants.hold(&tenant("a"), true));
        tenants.pass(Millis(60_000));
        assert!((tenants.lately(a) - 4.0).abs() < 1e-9, "it settles at 4");
        (0..4).for_each(|_| tenants.hold(&tenant("a"), false));
        tenants.pass(Millis(61_000));
        assert!((tenants.lately(a) - 2.0).abs() < 1e-9);
        tenants.pass(Millis(63_000));
        assert!((tenants.share(a) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn how_often_it_is_looked_at_changes_nothing() {
        let run = |steps: u64| {
            let mut tenants = Tenants::default();
            tenants.set_half_life(10_000);
            let a = tenants.intern(&tenant("a"));
            tenants.hold(&tenant("a"), true);
            for n in 1..=steps {
                tenants.pass(Millis(n * 20_000 / steps));
                tenants.hold(&tenant("a"), true);
                tenants.hold(&tenant("a"), false);
            }
            tenants.lately(a)
        };
        assert!((run(1) - run(500)).abs() < 1e-9);
    }

    #[test]
    fn what_was_had_before_counts_as_if_it_had_been_seen() {
        let mut seen = Tenants::default();
        let a = seen.intern(&tenant("a"));
        seen.pass(Millis(1_000_000));
        seen.hold(&tenant("a"), true);
        seen.pass(Millis(8_000_000));
        seen.hold(&tenant("a"), false);
        seen.pass(Millis(9_000_000));
        let mut told = Tenants::default();
        told.pass(Millis(9_000_000));
        told.credit(&tenant("a"), 7_000_000, Millis(8_000_000));
        let b = told.intern(&tenant("a"));
        assert!((seen.lately(a) - told.lately(b)).abs() < 1e-9);
        // However long it was, it counts no more than one slot held forever.
        told.credit(&tenant("b"), u64::MAX / 2, Millis(9_000_000));
        let b = told.intern(&tenant("b"));
        assert!((told.lately(b) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn slots_are_divided_by_weight_between_those_who_want_them() {
        let mut tenants = Tenants::default();
        let (a, b) = (tenants.intern(&tenant("a")), tenants.intern(&tenant("b")));
        tenants.intern(&tenant("absent"));
        tenants.set_weight(&tenant("a"), 3.0);
        tenants.set_weight(&tenant("b"), f64::NAN);
        (0..8).for_each(|_| tenants.hold(&tenant("b"), true));
        assert!((tenants.fair(a, |ix| ix == a) - 6.0).abs() < 1e-9);
        assert!((tenants.fair(b, |ix| ix == a) - 2.0).abs() < 1e-9);
        assert!((tenants.fair(b, |_| false) - 8.0).abs() < 1e-9, "alone");
    }
}
