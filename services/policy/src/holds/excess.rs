//! Which of a tenant's executions give way where it has more than its quota allows, as one that was
//! lowered: the lowest priority first, then the least regret, and nobody whose place the quota
//! would have allowed.

use fiec_schemas::quota::Quota;

/// What one execution has of a tenant's limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Has {
    /// Devices that it holds.
    pub devices: u32,
    /// Bytes of a host's memory.
    pub memory_bytes: u64,
    /// It may be told to give way now.
    pub may_go: bool,
    /// Its priority.
    pub priority: i32,
    /// What it would lose, in milliseconds.
    pub regret_ms: f64,
}

/// What is used, or beyond: executions, devices, bytes.
type Amounts = [u64; 3];

fn amounts(has: &Has) -> Amounts {
    [1, u64::from(has.devices), has.memory_bytes]
}

/// What is used beyond the limits.
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

/// True where these have more than the quota allows.
pub fn exceeds<'a>(all: impl Iterator<Item = &'a Has>, quota: &Quota) -> bool {
    beyond(sum(all), quota) != [0; 3]
}

/// Which of them give way, by their places in the list, so that the rest keeps to the quota as far
/// as those that may go allow. None of the chosen could stay.
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
    // One that was chosen early may stay where a larger one was chosen after it; the last ones are
    // worth most.
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
        /// The quota holds afterwards as far as it can, and nobody has gone in vain.
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

        /// Where only their number is limited, exactly as many go as are too many, and nobody that
        /// is worth more than one that stays.
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
