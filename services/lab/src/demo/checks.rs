//! Checks each claim of the demo against the ledger and PostgreSQL.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use fiec::sql::{self, Rows};
use fiec_kit::local::LocalOutcome;
use fiec_recorder::missing::{self, LedgerEnd};
use fiec_schemas::{Event, ExecutionId, LedgerMessage, NodeId, Phase};
use serde_json::{Value, json};
use sqlx::PgPool;

use super::{print_verdicts, verdict};
use crate::cluster::Cluster;

const REBINDINGS: &str = "SELECT epoch, from_node, to_node, cause, why, boundary, state_bytes, \
                          gap_ms\n  FROM rebinding_history";
const PLACEMENTS: &str = "SELECT epoch, node, cause, computing_since::time(3), \
                          computed_until::time(3), end_reason\n  FROM placement_timeline";

/// The observations to check.
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
    /// Checks and prints every claim. Returns true if all hold.
    pub async fn check(&self) -> anyhow::Result<bool> {
        let result = self.result();
        let rebindings = self.history().await?;
        let timeline = self.query(PLACEMENTS).await?;
        if !self.json {
            println!("\n{}\n{}", self.sql(REBINDINGS), rebindings.table());
            println!("{}\n{}\n", self.sql(PLACEMENTS), timeline.table());
        }
        let pool = self.pool()?;
        let ledger = LedgerEnd::of(
            &self.cluster.broker,
            &self.last.state.tenant,
            self.execution,
        )
        .await?;
        let missing = missing::read(pool, self.execution, &ledger).await?;
        let page = fiec_recorder::report::render(pool, self.execution, &missing).await?;
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
        let committed = self.boundaries().await?;
        let claims = [
            (
                matches!(self.last.state.phase, Phase::Completed),
                "the execution completed".to_owned(),
                self.last.state.phase.as_str().to_owned(),
            ),
            (
                pressure && from_source,
                format!(
                    "it was rebound from {} because of memory pressure",
                    self.source
                ),
                rebindings.get(0, "why").unwrap_or("no row").to_owned(),
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
                committed.len() as u64 == self.last.state.totals.commits
                    && committed.is_sorted_by(|a, b| a < b),
                "progress never went back, and every commit is recorded".to_owned(),
                format!("{} boundaries committed", committed.len()),
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

    /// A query in the form for psql.
    fn sql(&self, select: &str) -> String {
        format!(
            "{select}\n WHERE execution = '{}' ORDER BY epoch;",
            self.execution
        )
    }

    fn pool(&self) -> anyhow::Result<&PgPool> {
        let pool = self.cluster.pool.as_ref();
        pool.context("the demo's cluster has history")
    }

    async fn query(&self, select: &str) -> anyhow::Result<Rows> {
        sql::query(self.pool()?, self.sql(select)).await
    }

    /// Waits until the recorder has written the end of the execution. Returns its rebindings.
    async fn history(&self) -> anyhow::Result<Rows> {
        while !self.is_end_recorded().await? {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.query(REBINDINGS).await
    }

    async fn is_end_recorded(&self) -> anyhow::Result<bool> {
        let select = format!(
            "SELECT phase::text AS phase FROM executions WHERE id = '{}'",
            self.execution
        );
        let rows = sql::query(self.pool()?, select).await?;
        Ok(rows.get(0, "phase") == Some(self.last.state.phase.as_str()))
    }

    /// The committed boundaries, in ledger order.
    async fn boundaries(&self) -> anyhow::Result<Vec<u64>> {
        let select = format!(
            "SELECT index::text AS index FROM boundaries WHERE execution = '{}' ORDER BY ordinal",
            self.execution
        );
        let rows = sql::query(self.pool()?, select).await?;
        Ok((0..rows.rows.len())
            .filter_map(|row| rows.get(row, "index")?.parse().ok())
            .collect())
    }
}

fn text(value: &Value, field: &str) -> Option<String> {
    Some(value.get(field)?.as_str()?.to_owned())
}
