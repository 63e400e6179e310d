//! `bench policy`: placements a second on one core, the time of one decision, and the memory of a
//! node and an execution. It starts no server and no other process.

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
    // Memory is measured first, before freed memory can be reused.
    memory(lab)?;
    let mut before: Option<(u32, f64)> = None;
    for nodes in NODES {
        let case = format!("{nodes} nodes");
        lab.steps_message(&format!("policy: {case}"));
        let mut bench = Bench::new(nodes, &Asks::default())?;
        // It fills half of the slots, so that the last placement searches as long as the first.
        let count = lab.samples(2 * nodes.min(5_000) as usize);
        let mut took = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            bench.place()?;
            took.push(began.elapsed().as_secs_f64() * 1e6);
        }
        let mean = took.iter().sum::<f64>() / took.len() as f64;
        lab.figures
            .add("policy", &case, "placements_per_s", "1/s", 1e6 / mean, None);
        let p99 = quantile(&mut took, 0.99);
        lab.figures
            .add("policy", &case, "decision_p99_us", "us", p99, None);
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

/// Measures the growth of resident memory for each node and each execution. Their number is so large that
/// whole pages and the allocator's reserve do not matter.
fn memory(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    const MANY: u32 = 20_000;
    const EXECUTIONS: u32 = 200_000;
    lab.steps_message("policy: memory");
    let resident = || cpu::tree(std::process::id()).resident as f64;
    let empty = resident();
    let nodes = Bench::new(MANY, &Asks::default())?;
    let each = (resident() - empty) / f64::from(MANY);
    let case = format!("{MANY} nodes");
    lab.figures
        .add("policy", &case, "node_bytes", "B", each, None);
    // Both stay alive, so that the second cannot reuse memory of the first.
    let mut few = Bench::new(10, &Asks::default())?;
    let begin = resident();
    for _ in 0..EXECUTIONS {
        few.submit();
    }
    let each = (resident() - begin) / f64::from(EXECUTIONS);
    let case = format!("{EXECUTIONS} executions");
    lab.figures
        .add("policy", &case, "execution_bytes", "B", each, None);
    drop(nodes);
    Ok(())
}
