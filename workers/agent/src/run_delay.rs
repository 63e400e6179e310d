//! The time that this process has waited for a processor, as the kernel counts it. That part of a
//! round trip is no property of the network.

use std::time::Duration;

/// The waiting time that is normal for a wake-up.
const USUAL: Duration = Duration::from_millis(1);

/// Returns the sum over all threads of the time in which they were ready and did not run, since
/// their start. Returns none if the kernel does not count it (`CONFIG_SCHED_INFO`).
pub fn waited() -> Option<Duration> {
    let threads = std::fs::read_dir("/proc/self/task").ok()?;
    let mut sum = None;
    for thread in threads.flatten() {
        // A thread that ends meanwhile is skipped.
        let text = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        if let Some(waited) = parse(&text) {
            sum = Some(sum.unwrap_or_default() + waited);
        }
    }
    sum
}

/// Parses the second of three numbers: nanoseconds run, nanoseconds waited, time slices.
fn parse(text: &str) -> Option<Duration> {
    let nanos = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(nanos))
}

/// Returns the network's part of a round trip: without the time that this process waited for a
/// processor meanwhile, beyond the normal one.
pub fn without_waiting(
    took: Duration,
    before: Option<Duration>,
    after: Option<Duration>,
) -> Duration {
    let waited = match (before, after) {
        // Ended threads do not count any more.
        (Some(before), Some(after)) => after.saturating_sub(before),
        _ => Duration::ZERO,
    };
    took.saturating_sub(waited.saturating_sub(USUAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_of_a_process_that_did_not_run_is_as_short_as_the_way() {
        let ms = |n| Some(Duration::from_millis(n));
        let took = Duration::from_millis(80);
        let of = |before, after| without_waiting(took, before, after).as_millis();
        assert_eq!(of(ms(500), ms(571)), 10);
        // A round trip without waiting counts in full.
        assert_eq!(of(ms(500), ms(500)), 80);
        assert_eq!(of(ms(500), ms(501)), 80);
        // Several threads wait at once; a thread has ended; the kernel does not count.
        assert_eq!(of(ms(500), ms(900)), 0);
        assert_eq!(of(ms(500), ms(400)), 80);
        assert_eq!(of(None, ms(400)), 80);
    }

    #[test]
    fn the_kernel_counts_what_a_thread_waits_while_others_have_its_processor() {
        assert_eq!(parse("12 345 6\n"), Some(Duration::from_nanos(345)));
        assert_eq!(parse(""), None);
        let Some(before) = waited() else {
            eprintln!("SKIPPED: this kernel has no /proc/self/task/*/schedstat");
            return;
        };
        let all = crate::affinity::own().unwrap();
        let mut one = rustix::thread::CpuSet::new();
        one.set(all[0] as usize);
        let both = std::sync::Arc::new(std::sync::Barrier::new(2));
        let busy = || {
            let both = both.clone();
            std::thread::spawn(move || {
                rustix::thread::sched_setaffinity(None, &one).unwrap();
                both.wait();
                let begun = std::time::Instant::now();
                while begun.elapsed() < Duration::from_millis(600) {
                    std::hint::spin_loop();
                }
                // The sum of this thread, which ends with it.
                parse(&std::fs::read_to_string("/proc/thread-self/schedstat").unwrap()).unwrap()
            })
        };
        let waited: Vec<_> = [busy(), busy()].map(|t| t.join().unwrap()).into();
        // Both threads competed for one processor for as long.
        let sum: Duration = waited.iter().sum();
        assert!(
            sum >= Duration::from_millis(60),
            "{waited:?} after {before:?}"
        );
    }
}
