//! `fiec ls`: the executions in the history, with filters.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use fiec_schemas::{NodeId, PhaseKind, Tenant};

use crate::context::{Global, parse_tenant};
use crate::exit::Outcome;
use crate::sql::{self, literal};

/// List executions, the latest first: live ones, or those that match the filters
///
/// The list comes from PostgreSQL, a moment behind the ledgers; `fiec status ID` reads the ledger.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Include ended executions
    #[arg(long, short)]
    pub all: bool,
    /// Only executions in this phase, ended ones included; repeatable
    #[arg(long, value_parser = parse_phase())]
    pub phase: Vec<PhaseKind>,
    /// Only executions of this batch: its UUID, or the client's name for it
    #[arg(long)]
    pub batch: Option<String>,
    /// Only executions with their last binding to this node
    #[arg(long, value_parser = crate::cli::parse_node)]
    pub node: Option<NodeId>,
    /// Only executions of this program: NAME@VERSION, or NAME for every version
    #[arg(long)]
    pub program: Option<String>,
    /// Only executions of this tenant [default: all tenants]
    #[arg(long, short, env = "FIEC_TENANT", value_parser = parse_tenant)]
    pub tenant: Option<Tenant>,
    /// List at most N
    #[arg(long, short = 'n', value_name = "N", default_value_t = 100)]
    pub limit: u32,
}

/// Any phase by its name.
fn parse_phase() -> impl TypedValueParser<Value = PhaseKind> {
    let names = PhaseKind::ALL.iter().map(|phase| phase.as_str());
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

impl LsArgs {
    /// The filters as SQL conditions, each value quoted.
    fn conditions(&self) -> String {
        let mut all = Vec::new();
        if !self.phase.is_empty() {
            let phases: Vec<_> = self
                .phase
                .iter()
                .map(|phase| literal(phase.as_str()))
                .collect();
            all.push(format!("x.phase IN ({})", phases.join(", ")));
        } else if !self.all {
            all.push("x.finished_at IS NULL".to_owned());
        }
        all.extend(self.batch.as_ref().map(|batch| {
            let batch = literal(batch);
            format!("(x.batch_id::text = {batch} OR x.spec ->> 'batch' = {batch})")
        }));
        let node = self.node.as_ref().map(|node| literal(node.as_str()));
        all.extend(node.map(|node| format!("x.node = {node}")));
        all.extend(self.program.as_ref().map(|program| {
            let column = match program.contains('@') {
                true => "x.program",
                false => "split_part(x.program, '@', 1)",
            };
            format!("{column} = {}", literal(program))
        }));
        let tenant = self.tenant.as_ref().map(|tenant| literal(tenant.as_str()));
        all.extend(tenant.map(|tenant| format!("x.tenant = {tenant}")));
        match all.is_empty() {
            true => "true".to_owned(),
            false => all.join(" AND "),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// If PostgreSQL cannot be reached.
pub async fn run(args: LsArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    // A script gets every column, a person those that fit on a page.
    let columns = match global.json {
        true => "e.*, x.capsules",
        false => {
            "coalesce(e.client_id, e.execution::text) AS id, e.tenant, e.program, e.phase, e.node, \
             coalesce(x.capsules, e.boundary) AS boundary, e.boundaries_in_all AS of, \
             e.submitted_at::timestamp(0) AS submitted, date_trunc('seconds', e.age) AS age, \
             date_trunc('seconds', e.uncommitted) AS uncommitted, \
             e.rebindings AS moves, left(e.failure, 60) AS failure"
        }
    };
    let query = format!(
        "SELECT {columns} FROM executions AS x JOIN execution_summary AS e ON e.execution = x.id \
         WHERE {} ORDER BY x.submitted_at DESC LIMIT {}",
        args.conditions(),
        args.limit
    );
    let rows = sql::query(&pool, query).await?;
    if rows.rows.is_empty() && !global.json {
        let hint = match args.all || !args.phase.is_empty() {
            true => "",
            false => " (--all lists ended ones as well)",
        };
        eprintln!("no execution is so{hint}");
    } else {
        rows.print(global.json);
    }
    let of = format!("executions AS x WHERE {}", args.conditions());
    if let Some(words) = sql::left_out(&pool, &rows, args.limit, &of).await? {
        eprintln!("{words}; `-n` lists more");
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: LsArgs,
    }

    fn conditions(words: &[&str]) -> String {
        let words = ["ls"].iter().chain(words);
        Command::try_parse_from(words).unwrap().args.conditions()
    }

    #[test]
    fn filters_are_conditions_and_their_values_cannot_leave_their_quotes() {
        assert_eq!(
            conditions(&["-t", "lab"]),
            "x.finished_at IS NULL AND x.tenant = 'lab'"
        );
        assert_eq!(conditions(&["--phase", "failed"]), "x.phase IN ('failed')");
        assert_eq!(
            conditions(&["-a", "--program", "cg@1"]),
            "x.program = 'cg@1'"
        );
        let name = conditions(&["-a", "--program", "cg"]);
        assert_eq!(name, "split_part(x.program, '@', 1) = 'cg'");
        let hostile = conditions(&["-a", "--batch", "x' OR true --"]);
        assert!(hostile.contains("= 'x'' OR true --')"), "{hostile}");
    }
}
