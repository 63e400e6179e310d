//! What the demo claims, each claim checked against the ledger and against PostgreSQL.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use fiec_kit::local::LocalOutcome;
use fiec_schemas::{Event, ExecutionId, LedgerMessage, NodeId, Phase};
use serde_json::{Value, json};

use super::{print_verdicts, verdict};
use crate::cluster::Cluster;
use crate::sql::{self, Rows};

/// What happened, ready to be checked.
pub(super) struct Scene<'a> {
    pub cluster: &'a Cluster,
    pub execution: ExecutionId,
    pub source: &'a NodeId,
    pub last: &'a LedgerMessage,
    pub reference: &'a LocalOutcome,
    pub report: &'a Path,
    pub json: bool,
}

impl Scene<'_> {
    /// Checks and prints every claim. True when all hold.
    pub async fn check(&self) -> anyhow::Result<bool> {
        let result = self.result();
        let rebindings = self.history().await?;
        let timeline = self.query("placement_timeline").await?;
        if !self.json {
            println!("\nSELECT * FROM rebinding_history WHERE execution = '{}';", self.execution);
            println!("{}", rebindings.table());
            println!("SELECT * FROM placement_timeline WHERE execution = '{}';", self.execution);
            println!("{}\n", timeline.table());
        }
        let pool = self.cluster.pool.as_ref().context("the demo's cluster has history")?;
        let page = fiec_recorder::report::render(pool, self.execution).await?;
        if let Some(folder) = self.report.parent() {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
        }
        std::fs::write(self.report, page)
            .with_context(|| format!("cannot write {}", self.report.display()))?;

        let digest = text(&result, "digest");
        let undisturbed = text(&self.reference.result, "digest");
        let residual = result.get("relative_residual").and_then(Value::as_f64);
        let tolerance = 1e-10;
        let pressure = rebindings.get(0, "cause") == Some("pressure");
        let from_source = rebindings.get(0, "from_node") == Some(self.source.as_str());
        let committed: Vec<u64> = self.indices(&timeline);
        let claims = [
            (
                matches!(self.last.state.phase, Phase::Completed),
                "the execution completed".to_owned(),
                self.last.state.phase.as_str().to_owned(),
            ),
            (
                pressure && from_source,
                format!("it was rebound from {} because of memory pressure", self.source),
                rebindings.get(0, "cause_in_words").unwrap_or("no row").to_owned(),
            ),
            (
                residual.is_some_and(|r| r <= tolerance),
                format!("worst residual over all load cases is at most {tolerance:e}"),
                residual.map_or("none".to_owned(), |r| format!("{r:.3e}")),
            ),
            (
                digest.is_some() && digest == undisturbed,
                "the digest of all solutions is that of the undisturbed run".to_owned(),
                digest.clone().unwrap_or_default(),
            ),
            (
                timeline.rows.len() >= 2,
                "its history is readable as SQL rows".to_owned(),
                format!(
                    "{} placements, {} rebinding{}",
                    timeline.rows.len(),
                    rebindings.rows.len(),
                    if rebindings.rows.len() == 1 { "" } else { "s" }
                ),
            ),
            (
                committed.windows(2).all(|w| w[0] <= w[1]),
                "progress never went back".to_owned(),
                format!("{} commits", self.last.state.totals.commits),
            ),
        ];
        let held = claims.iter().all(|(ok, _, _)| *ok);
        if self.json {
            println!(
                "{}",
                json!({"execution": self.execution, "ok": held, "digest": digest,
                       "undisturbed_digest": undisturbed, "relative_residual": residual,
                       "rebindings": rebindings.rows.len(), "report": self.report,
                       "claims": claims.iter().map(|(ok, claim, found)|
                           json!({"ok": ok, "claim": claim, "found": found}))
                           .collect::<Vec<_>>()})
            );
        } else {
            print_verdicts(claims.iter().map(|(ok, c, f)| verdict(*ok, c, f)).collect());
            println!("report: {}", self.report.display());
        }
        Ok(held)
    }

    fn result(&self) -> Value {
        self.last
            .events
            .iter()
            .find_map(|event| match event {
                Event::Completed { result, .. } => Some(result.clone()),
                _ => None,
            })
            .unwrap_or(Value::Null)
    }

    async fn query(&self, view: &str) -> anyhow::Result<Rows> {
        let pool = self.cluster.pool.as_ref().context("the demo's cluster has history")?;
        let id = self.execution;
        sql::query(
            pool,
            format!("SELECT * FROM {view} WHERE execution = '{id}' ORDER BY epoch"),
        )
        .await
    }

    /// The rebindings, once the recorder has told PostgreSQL that the execution ended.
    async fn history(&self) -> anyhow::Result<Rows> {
        loop {
            let summary = self.ended().await?;
            if summary {
                return self.query("rebinding_history").await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn ended(&self) -> anyhow::Result<bool> {
        let pool = self.cluster.pool.as_ref().context("the demo's cluster has history")?;
        let rows = sql::query(
            pool,
            format!("SELECT phase::text AS phase FROM executions WHERE id = '{}'", self.execution),
        )
        .await?;
        Ok(rows.get(0, "phase") == Some(self.last.state.phase.as_str()))
    }

    fn indices(&self, timeline: &Rows) -> Vec<u64> {
        (0..timeline.rows.len())
            .filter_map(|row| timeline.get(row, "last_boundary")?.parse().ok())
            .collect()
    }
}

fn text(value: &Value, field: &str) -> Option<String> {
    Some(value.get(field)?.as_str()?.to_owned())
}
