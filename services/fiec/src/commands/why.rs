//! `fiec why`: the explanation of an execution's place.

use clap::Args;
use fiec_schemas::messages::{ExecutionVerb, InForce, RefusalCode, Why};
use fiec_schemas::{Candidate, NodeId, PhaseKind};

use super::operate::ExecutionArgs;
use crate::client;
use crate::context::Global;
use crate::exit::Outcome;
use crate::table::{Column, Layout, Table, WideArg};

/// Candidates that are listed in a terminal.
const LISTED: usize = 10;

/// Options of `fiec why`.
#[derive(Debug, Args)]
pub struct WhyArgs {
    #[command(flatten)]
    pub execution: ExecutionArgs,
    #[command(flatten)]
    pub wide: WideArg,
}

/// The thresholds in force.
const THRESHOLDS: [Column; 8] = [
    Column::left("signal", 0),
    Column::left("place", 3),
    Column::right("value", 0),
    Column::left("state", 0),
    Column::right("high", 0),
    Column::right("low", 1),
    Column::right("dwell", 2),
    Column::left("set by", 1),
];

/// The verdict on each place.
const CANDIDATES: [Column; 3] = [
    Column::left("node", 0),
    Column::left("verdict", 0),
    Column::left("reasons", 0),
];

/// Runs the command.
///
/// # Errors
/// If no policy service answers.
pub async fn run(args: &WhyArgs, global: &Global) -> anyhow::Result<Outcome> {
    let verb = ExecutionVerb::Why;
    let broker = global.broker(verb.as_str()).await?;
    let ExecutionArgs { id, tenant } = &args.execution;
    let reply = client::me(&broker)
        .execution(verb, &tenant.tenant, id, None)
        .await?;
    if global.json {
        println!("{}", serde_json::to_value(&reply)?);
    }
    if let Some(error) = &reply.error {
        if !global.json {
            eprintln!("{error}");
            if reply.refusal == Some(RefusalCode::UnknownExecution) {
                eprintln!("An element of an array is named {id}-0");
            }
        }
        return Ok(Outcome::Failed);
    }
    if !global.json {
        if !reply.message.is_empty() {
            println!("{}", reply.message);
        }
        if let Some(why) = &reply.why {
            println!("{}", render(why, args.wide.layout()));
        }
    }
    Ok(Outcome::Done)
}

/// The explanation as text.
fn render(why: &Why, layout: Layout) -> String {
    let say = |text: &str| layout.wrap(text, 2);
    let mut lines = vec![say(&why.summary)];
    if let Some(next) = &why.next {
        lines.push(say(&format!("next: {}", next.in_words())));
    }
    // The summary of a pending execution already says what it waits for.
    if why.phase != PhaseKind::Pending {
        let waits = why.waits_for.iter();
        lines.extend(waits.map(|waits| say(&format!("waits for: {waits}"))));
    }
    lines.extend(thresholds(&why.thresholds, layout));
    lines.extend(candidates(&why.candidates, layout));
    if let Some(decision) = &why.decision {
        if layout.is_full() || why.candidates.is_empty() {
            lines.push("when it was bound there:".to_owned());
            lines.extend(candidates(&decision.candidates, layout));
        } else {
            lines.push(say(
                "when it was bound there: --wide shows the verdicts of that time",
            ));
        }
    }
    let would = why.would_move.iter();
    lines.extend(would.map(|would| say(&format!("would move it: {would}"))));
    if let Some(nodes) = &why.would_go_to {
        let nodes: Vec<_> = nodes.iter().map(NodeId::as_str).collect();
        lines.push(match nodes.is_empty() {
            true => say("it would stay: no other place can take it now"),
            false => say(&format!(
                "it would move to the best of these nodes: {}",
                nodes.join(", ")
            )),
        });
    }
    let help = why.would_help.iter();
    lines.extend(help.map(|help| say(&format!("would help: {help}"))));
    lines.join("\n")
}

/// The thresholds in force. In a terminal, signals without a reading share one line.
fn thresholds(all: &[InForce], layout: Layout) -> Vec<String> {
    let shown = |t: &&InForce| layout.is_full() || t.value.is_some();
    let rows: Vec<_> = all.iter().filter(shown).map(threshold).collect();
    let mut lines = Vec::new();
    if !rows.is_empty() {
        lines.push(Table::new(&THRESHOLDS, rows).render(layout));
    }
    let missing: Vec<_> = all
        .iter()
        .filter(|t| !shown(t))
        .map(|t| match &t.device {
            Some(device) => format!("{} of {device}", t.signal),
            None => t.signal.to_string(),
        })
        .collect();
    if !missing.is_empty() {
        let words = format!(
            "not measured: {} (`fiec nodes --signals` says why)",
            missing.join(", ")
        );
        lines.push(layout.wrap(&words, 2));
    }
    lines
}

fn threshold(t: &InForce) -> Vec<String> {
    let percent = |value: f64| format!("{:.1} %", value * 100.0);
    vec![
        t.signal.to_string(),
        t.device.clone().unwrap_or_else(|| "node".to_owned()),
        t.value.map_or("not measured".to_owned(), percent),
        t.state.to_string(),
        percent(t.threshold.high),
        percent(t.threshold.low),
        format!("{} ms", t.threshold.dwell_ms),
        if t.own { "its own" } else { "the node's" }.to_owned(),
    ]
}

/// The verdict on each place. In a terminal, the first few.
fn candidates(all: &[Candidate], layout: Layout) -> Vec<String> {
    if all.is_empty() {
        return Vec::new();
    }
    let listed = match layout {
        Layout::Full => all.len(),
        Layout::Within(_) => all.len().min(LISTED),
    };
    let rows = all.iter().take(listed).map(verdict);
    let mut lines = vec![Table::new(&CANDIDATES, rows).render(layout)];
    if listed < all.len() {
        lines.push(format!(
            "and {} more (--wide shows all)",
            all.len() - listed
        ));
    }
    lines
}

fn verdict(c: &Candidate) -> Vec<String> {
    vec![
        match &c.substrate {
            Some(substrate) => format!("{} ({substrate})", c.node),
            None => c.node.to_string(),
        },
        match c.score {
            Some(score) => format!("acceptable, score {score:.3}"),
            None => "rejected".to_owned(),
        },
        c.rejected.join("; "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::is_readable;
    use serde_json::json;

    fn computing() -> Why {
        let threshold = |signal: &str, value: Option<f64>| {
            json!({"signal": signal, "threshold": {"high": 0.9, "low": 0.75, "dwell_ms": 10_000},
                "value": value, "state": if value.is_some() { "viable" } else { "unknown" }})
        };
        let would = |signal: &str| {
            format!("{signal} on worker-1 at or above 90.0 % for 10000 ms; it is viable at 10.6 %")
        };
        let no_room = "1 of its 1 slots are taken, and memory is unviable: 93.1 % (high 90.0 %, low \
            75.0 %, dwell 10000 ms, pressing for 12000 ms)";
        let candidates = json!([
            {"node": "worker-1", "rejected": ["it is there now"]},
            {"node": "worker-2", "score": 0.8125},
            {"node": "worker-3", "rejected": [no_room]},
        ]);
        let why = json!({
            "summary": "computing on worker-1 under epoch 3; it was moved there because memory of \
                worker-3 was above its threshold for longer than the dwell",
            "candidates": candidates, "phase": "started", "decision": {"candidates": candidates},
            "thresholds": [threshold("memory", Some(0.106)), threshold("memory_stall", Some(0.0)),
                threshold("latency", Some(0.012)), threshold("contention", Some(0.97)),
                threshold("power", None), threshold("thermal", None), threshold("fabric", None)],
            "would_move": [would("memory"), would("memory_stall"), would("latency"),
                would("contention"), "worker-1 silent for 3000 ms and not answering",
                "an operator: `fiec move 0192d7a4-1111-7222-8333-123456789abc --to NODE`, `fiec \
                 drain worker-1`"],
            "would_go_to": ["worker-2"],
            "next": {"who": "worker", "node": "worker-1", "what": "compute"},
        });
        serde_json::from_value(why).unwrap()
    }

    #[test]
    fn the_ordinary_case_fits_on_a_screen() {
        let why = computing();
        for width in [80, 100, 140] {
            let text = render(&why, Layout::Within(width));
            let reasons = why.candidates.iter().flat_map(|c| &c.rejected);
            let cells = why.would_move.iter().chain(reasons).map(|cell| &**cell);
            is_readable(&text, width, cells);
            assert!(text.lines().count() <= 40, "{text}");
            assert!(
                text.contains("not measured: power, thermal, fabric (`fiec"),
                "{text}"
            );
            assert!(text.contains("acceptable, score 0.812"), "{text}");
        }
    }

    #[test]
    fn in_full_all_signals_and_the_decision_are_there() {
        let text = render(&computing(), Layout::Full);
        assert_eq!(text.matches("not measured").count(), 3, "{text}");
        assert_eq!(text.matches("pressing for 12000 ms").count(), 2, "{text}");
    }

    #[test]
    fn of_many_candidates_the_first_are_listed() {
        let mut why = computing();
        let first = why.candidates[0].clone();
        why.candidates = vec![first; 25];
        let text = render(&why, Layout::Within(80));
        assert!(text.contains("and 15 more (--wide shows all)"), "{text}");
    }
}
