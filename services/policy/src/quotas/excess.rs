//! Chooses the executions to preempt when a tenant exceeds its quota: lowest priority first, then
//! least regret. It never chooses an execution for which the quota has room.

use fiec_schemas::quota::Quota;

/// The part of a tenant's limits that one execution uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Has {
    /// Devices that it holds.
    pub devices: u32,
    /// Bytes of host memory.
    pub memory_bytes: u64,
    /// True if it may be preempted now.
    pub may_go: bool,
    /// Its priority.
    pub priority: i32,
    /// Regret of a preemption, in ms.
    pub regret_ms: f64,
}

/// Used or excess amounts: executions, devices, bytes.
type Amounts = [u64; 3];

fn amounts(has: &Has) -> Amounts {
    [1, u64::from(has.devices), has.memory_bytes]
}

/// The amounts beyond the limits.
fn beyond(used: Amounts, quota: &Quota) -> Amounts {
    let limits = [
        quota.running.map(u64::from),
        quota.devices.map(u64::from),
        quota.memory_bytes,
    ];
    let mut over = [0; 3];
    for ((over, used), limit) in over.iter_mut().zip(used).zip(limits) {
        *over = limit.map_or(0, |limit| used.saturating_sub(limit));
    }
    over
}

fn sum<'a>(all: impl Iterator<Item = &'a Has>) -> Amounts {
    all.fold([0; 3], |mut sum, has| {
        for (sum, has) in sum.iter_mut().zip(amounts(has)) {
            *sum = sum.saturating_add(has);
        }
        sum
    })
}

/// True if the executions exceed the quota.
pub fn exceeds<'a>(all: impl Iterator<Item = &'a Has>, quota: &Quota) -> bool {
    beyond(sum(all), quota) != [0; 3]
}

/// Returns the indices of the executions to preempt. The rest keeps to the quota as far as
/// preemptible executions allow. Each chosen one is needed.
pub fn choose(all: &[Has], quota: &Quota) -> Vec<usize> {
    let mut order: Vec<usize> = (0..all.len()).filter(|n| all[*n].may_go).collect();
    order.sort_by(|a, b| {
        let (one, other) = (&all[*a], &all[*b]);
        let by_regret = one.regret_ms.total_cmp(&other.regret_ms);
        one.priority
            .cmp(&other.priority)
            .then(by_regret)
            .then(a.cmp(b))
    });
    let mut used = sum(all.iter());
    let mut chosen = Vec::new();
    for n in order {
        let over = beyond(used, quota);
        let own = amounts(&all[n]);
        if !over.iter().zip(own).any(|(over, own)| *over > 0 && own > 0) {
            continue;
        }
        for (used, own) in used.iter_mut().zip(own) {
            *used -= own;
        }
        chosen.push(n);
    }
    // A later, larger choice may have made an earlier one unnecessary. The last ones are worth
    // most, so they are checked first.
    let rest = beyond(used, quota);
    let mut at = chosen.len();
    while at > 0 {
        at -= 1;
        let own = amounts(&all[chosen[at]]);
        let mut with = used;
        for (with, own) in with.iter_mut().zip(own) {
            *with += own;
        }
        if beyond(with, quota) == rest {
            used = with;
            chosen.remove(at);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Timestamp;
    use proptest::prelude::*;

    fn has() -> impl Strategy<Value = Has> {
        let amounts = (0u32..3, prop_oneof![Just(0u64), 1u64..50]);
        let worth = (-2i32..3, 0.0f64..100.0, prop::bool::weighted(0.9));
        (amounts, worth).prop_map(
            |((devices, memory_bytes), (priority, regret_ms, may_go))| Has {
                devices,
                memory_bytes,
                may_go,
                priority,
                regret_ms,
            },
        )
    }

    fn quota(running: Option<u32>, devices: Option<u32>, memory_bytes: Option<u64>) -> Quota {
        Quota {
            v: 1,
            running,
            devices,
            memory_bytes,
            waiting: None,
            weight: None,
            who: "ann".into(),
            at: Timestamp::default(),
        }
    }

    fn rest(all: &[Has], gone: &[usize]) -> Vec<Has> {
        let stays = |(n, has): (usize, &Has)| (!gone.contains(&n)).then_some(*has);
        all.iter().enumerate().filter_map(stays).collect()
    }

    proptest! {
        /// The rest keeps to the quota as far as possible, and every preemption is needed.
        #[test]
        fn no_more_give_way_than_the_quota_asks_for(
            all in prop::collection::vec(has(), 0..24),
            running in prop::option::of(0u32..12),
            devices in prop::option::of(0u32..8),
            memory in prop::option::of(0u64..300),
        ) {
            let quota = quota(running, devices, memory);
            let gone = choose(&all, &quota);
            let stay = rest(&all, &gone);
            let over = beyond(sum(stay.iter()), &quota);
            let could: Vec<usize> = (0..all.len()).filter(|n| all[*n].may_go).collect();
            let least = beyond(sum(rest(&all, &could).iter()), &quota);
            prop_assert_eq!(over, least);
            for n in &gone {
                prop_assert!(all[*n].may_go);
                let others: Vec<usize> = gone.iter().copied().filter(|o| o != n).collect();
                let with = beyond(sum(rest(&all, &others).iter()), &quota);
                prop_assert_ne!(with, over, "{} has gone in vain", n);
            }
        }

        /// With a limit on the number only, exactly the excess goes, and no execution goes that is
        /// worth more than one that stays.
        #[test]
        fn of_a_number_the_least_worth_go(
            all in prop::collection::vec(has(), 0..24), running in 0u32..24
        ) {
            let gone = choose(&all, &quota(Some(running), None, None));
            let may_go = all.iter().filter(|has| has.may_go).count();
            let many = all.len().saturating_sub(running as usize).min(may_go);
            prop_assert_eq!(gone.len(), many);
            let worth = |has: &Has| (has.priority, has.regret_ms);
            let most = gone.iter().map(|n| worth(&all[*n])).fold((i32::MIN, 0.0), |a, b| {
                if b > a { b } else { a }
            });
            for has in rest(&all, &gone).iter().filter(|has| has.may_go) {
                prop_assert!(gone.is_empty() || worth(has) >= most, "{:?} stays", has);
            }
        }
    }
}
