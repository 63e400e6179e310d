//! `bench policy`: how fast the policy places on one core, how long one decision takes, and what a
//! node and an execution cost in memory. No server and no process beside this one.

use std::time::Instant;

use fiec_simulator::placements::{Asks, Bench};

use super::figures::quantile;
use super::{Lab, cpu};

/// Nodes of four slots each.
const NODES: [u32; 3] = [100, 1_000, 10_000];

/// Runs the bench: `placements_per_s` (aim ≥ 20,000 at 1,000 nodes), `decision_p99_us`, `node_bytes`,
/// `execution_bytes`, and `growth`: how much more one placement costs at ten times the nodes, beside
/// what n log n over n placements would allow.
///
/// # Errors
/// When an execution that has room is not placed.
pub fn run(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let mut before: Option<(u32, f64)> = None;
    for nodes in NODES {
        let case = format!("{nodes} nodes");
        lab.steps_message(&format!("policy: {case}"));
        let empty = cpu::tree(std::process::id()).resident;
        let mut bench = Bench::new(nodes, &Asks::default())?;
        let with_nodes = cpu::tree(std::process::id()).resident;
        // Half of the slots, so that the last placement looks for room as the first does.
        let count = lab.samples(2 * nodes.min(5_000) as usize);
        let mut took = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            bench.place()?;
            took.push(began.elapsed().as_secs_f64() * 1e6);
        }
        let with_all = cpu::tree(std::process::id()).resident;
        let mean = took.iter().sum::<f64>() / took.len() as f64;
        lab.figures
            .add("policy", &case, "placements_per_s", "1/s", 1e6 / mean, None);
        let p99 = quantile(&mut took, 0.99);
        lab.figures
            .add("policy", &case, "decision_p99_us", "us", p99, None);
        // Resident sizes are no finer than pages of the allocator: only large numbers say something.
        if nodes >= 10_000 {
            let each = (with_nodes.saturating_sub(empty)) as f64 / f64::from(nodes);
            lab.figures
                .add("policy", &case, "node_bytes", "B", each, None);
            let each = (with_all.saturating_sub(with_nodes)) as f64 / count as f64;
            lab.figures
                .add("policy", &case, "execution_bytes", "B", each, None);
        }
        if let Some((fewer, less)) = before {
            let n = |n: u32| f64::from(n);
            // One placement of n nodes may cost log n if n of them cost n log n.
            let allowed = n(nodes).ln() / n(fewer).ln();
            let case = format!("{fewer} to {nodes} nodes");
            lab.figures
                .add("policy", &case, "growth", "x", mean / less, Some(allowed));
        }
        before = Some((nodes, mean));
    }
    Ok(())
}
