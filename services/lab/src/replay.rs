//! `fiec replay`: plays recorded history under the original policy and under another.

mod read;

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use fiec::context::Global;
use fiec::exit::Outcome;
use fiec::ui;
use fiec_schemas::{Secret, Timestamp};
use fiec_simulator::history::{MODELLED, RECORDED};
use fiec_simulator::{Scenario, Summary};

use crate::simulate;
use read::Found;

/// Play recorded vectors and submissions again, under the policy as it was and under another
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// PostgreSQL with the history [default: --database, or that of the `fiec up` running here]
    #[arg(long, value_name = "URL", hide_env_values = true)]
    pub from_sql: Option<Secret>,
    /// Start: a time (RFC 3339) or a span before now, e.g. `24h`, `90m`
    #[arg(long, default_value = "24h", value_parser = moment)]
    pub since: Timestamp,
    /// End, in the same form
    #[arg(long, default_value = "0s", value_parser = moment)]
    pub until: Timestamp,
    /// The other policy, e.g. `dwell_ms=30000`, `high.memory=0.8`, `quota.lab.running=20`; may be repeated
    #[arg(long, value_name = "NAME=VALUE", required_unless_present = "save")]
    pub set: Vec<String>,
    /// Write the recorded scenario to this file, for `fiec simulate`
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

fn moment(text: &str) -> Result<Timestamp, String> {
    if let Ok(at) = text.parse() {
        return Ok(at);
    }
    let bad =
        || format!("{text:?} is neither a time (2026-05-01T12:00:00Z) nor a span (24h, 90m, 30s)");
    let unit = text.chars().last().ok_or_else(bad)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(bad()),
    };
    let number: i64 = text[..text.len() - 1].parse().map_err(|_| bad())?;
    let ago = number.checked_mul(seconds * 1_000_000).ok_or_else(bad)?;
    Ok(Timestamp::from_micros(
        Timestamp::now().micros().saturating_sub(ago),
    ))
}

/// Plays the recorded span twice, and compares.
///
/// # Errors
/// If PostgreSQL cannot be reached, or has no data of that time.
pub async fn run(args: ReplayArgs, global: &Global) -> anyhow::Result<Outcome> {
    let mut global = global.clone();
    global.database = args.from_sql.clone().or(global.database);
    if args.until.micros() <= args.since.micros() {
        bail!("--until must be later than --since");
    }
    let pool = global.database().await?;
    let (history, found) = read::read(&pool, args.since, args.until).await?;
    let scenario = history.scenario();
    scenario
        .check()
        .map_err(|error| anyhow::anyhow!("what was recorded is no scenario: {error}"))?;
    if let Some(path) = &args.save {
        std::fs::write(path, scenario.to_json())
            .with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("{}", path.display());
        if args.set.is_empty() {
            return Ok(Outcome::Done);
        }
    }
    let mut other = scenario.clone();
    for change in &args.set {
        if let Err(error) = fiec_simulator::settings::set(&mut other, change) {
            eprintln!("fiec: --set {error}");
            return Ok(Outcome::BadInput);
        }
    }
    if let Err(error) = other.check() {
        eprintln!("fiec: with --set {}: {error}", args.set.join(" --set "));
        return Ok(Outcome::BadInput);
    }
    let before = played(&scenario, &global)?;
    let after = played(&other, &global)?;
    tell(&args, &found, &before, &after, global.json);
    Ok(Outcome::Done)
}

fn played(scenario: &Scenario, global: &Global) -> anyhow::Result<Summary> {
    let outcome = simulate::with_bar(scenario, global.json).map_err(|e| anyhow::anyhow!("{e}"))?;
    if let Some(violation) = outcome.violation {
        bail!("the replay broke a promise of the policy:\n{violation}");
    }
    Ok(outcome.summary)
}

fn tell(args: &ReplayArgs, found: &Found, before: &Summary, after: &Summary, json: bool) {
    let all = |s: &Summary| s.rebindings.values().sum::<u64>();
    let difference = serde_json::json!({
        "rebindings": all(after).cast_signed() - all(before).cast_signed(),
        "lost_ms": after.lost_ms - before.lost_ms,
        "makespan_ms": after.makespan_ms - before.makespan_ms,
        "utilization": after.utilization - before.utilization,
        "waited_mean_ms": after.waited.mean_ms - before.waited.mean_ms,
        "moved_bytes": after.moved_bytes.cast_signed() - before.moved_bytes.cast_signed(),
    });
    let moves: i64 = found.rebindings.values().sum();
    // The model's error against the real run. Its predictions for another policy are no better.
    let error = serde_json::json!({
        "rebindings": all(before).cast_signed() - moves,
        "makespan_ms": before.makespan_ms - found.makespan_ms,
        "utilization": before.utilization - found.utilization,
        "waited_mean_ms": before.waited.mean_ms - found.waited_mean_ms,
    });
    if json {
        let line = serde_json::json!({
            "since": args.since, "until": args.until, "set": args.set, "model_error": error,
            "found": found, "as_it_was": before, "changed": after, "difference": difference,
            "recorded": RECORDED, "modelled": MODELLED,
        });
        println!("{line}");
        return;
    }
    println!(
        "Recorded from {} to {}: {} nodes, {} vectors, {} executions ({} completed, {} never begun and left out)",
        args.since,
        args.until,
        found.nodes,
        found.vectors,
        found.executions,
        found.completed,
        found.never_begun
    );
    if let Some(words) = found.in_words() {
        println!("Of these {words}.");
    }
    let ms = |ms: f64| ui::micros((ms * 1e3) as i64);
    println!(
        "It really took {}, at a utilization of {:.1} %, with {moves} rebindings, {} of σ moved, and \
         {} of waiting in the mean.\n",
        ms(found.makespan_ms),
        found.utilization * 100.0,
        ui::bytes(u64::try_from(found.moved_bytes).unwrap_or(0)),
        ms(found.waited_mean_ms)
    );
    let changed = args.set.join(" ");
    println!(
        "{}",
        simulate::table(&[("as it was", before), (&changed, after)])
    );
    println!("\nUnder the policy as it was the model is off what really happened by:");
    println!(
        "  makespan     {:+.3} s",
        (before.makespan_ms - found.makespan_ms) / 1e3
    );
    println!(
        "  waiting      {:+.3} s in the mean",
        (before.waited.mean_ms - found.waited_mean_ms) / 1e3
    );
    println!("  rebindings   {:+}", error["rebindings"]);
    println!("\nWith {changed}, in the model:");
    println!("  rebindings   {:+}", difference["rebindings"]);
    println!(
        "  work lost    {:+.3} s",
        (after.lost_ms - before.lost_ms) / 1e3
    );
    println!(
        "  makespan     {:+.3} s",
        (after.makespan_ms - before.makespan_ms) / 1e3
    );
    let points = (after.utilization - before.utilization) * 100.0;
    println!("  utilization  {points:+.2} points");
    println!("\nRecorded, and taken as it is:");
    RECORDED.iter().for_each(|line| println!("  {line}"));
    println!("Modelled:");
    MODELLED.iter().for_each(|line| println!("  {line}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_a_time_or_a_span_ago() {
        let now = Timestamp::now().micros();
        let hour = moment("1h").unwrap().micros();
        assert!((now - hour - 3_600_000_000).abs() < 5_000_000);
        assert_eq!(
            moment("2026-05-01T12:00:00Z").unwrap().to_string(),
            "2026-05-01T12:00:00.000000Z"
        );
        for bad in ["", "h", "yesterday", "1w", "é"] {
            assert!(moment(bad).is_err(), "{bad}");
        }
    }
}
