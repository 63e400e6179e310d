//! `fiec ls`: the executions in the history, with filters.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use fiec_schemas::{NodeId, PhaseKind, Tenant};

use crate::context::{Global, parse_tenant};
use crate::exit::Outcome;
use crate::sql::{self, literal};
use crate::table::{Column, Layout, WideArg};

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
    #[command(flatten)]
    pub wide: WideArg,
}

/// The columns for people, as `selected` names them.
const COLUMNS: [Column; 11] = [
    Column::left("id", 0),
    Column::left("program", 0),
    Column::left("phase", 0),
    Column::left("node", 1),
    Column::right("boundary", 2),
    Column::right("age", 3),
    Column::left("submitted", 4),
    Column::left("failure", 5),
    Column::right("uncommitted", 6),
    Column::right("moves", 7),
    Column::left("tenant", 8),
];

/// The columns that are read for people. A UUID only if there is no client's id, or in full.
fn selected(layout: Layout) -> String {
    let (execution, failure) = match layout {
        Layout::Full => ("e.execution, ", "e.failure"),
        Layout::Within(_) => (
            "",
            // Its first whole words.
            "CASE WHEN length(e.failure) > 60 \
             THEN regexp_replace(left(e.failure, 60), '\\s+\\S*$', '') || ' …' \
             ELSE e.failure END",
        ),
    };
    format!(
        "coalesce(e.client_id, e.execution::text) AS id, {execution}e.program, e.phase, e.node, \
         coalesce(x.capsules, e.boundary) || coalesce('/' || e.boundaries_in_all, '') AS boundary, \
         date_trunc('seconds', e.age) AS age, e.submitted_at::timestamp(0) AS submitted, \
         {failure} AS failure, date_trunc('seconds', e.uncommitted) AS uncommitted, \
         e.moves, e.tenant"
    )
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
    let layout = args.wide.layout();
    let columns = match global.json {
        true => "e.*, x.capsules".to_owned(),
        false => selected(layout),
    };
    let query = format!(
        "SELECT {columns} FROM executions AS x JOIN execution_summary AS e ON e.execution = x.id \
         WHERE {} ORDER BY x.submitted_at DESC, x.batch_line DESC, length(x.client_id) DESC, \
         x.client_id DESC, x.id DESC LIMIT {}",
        args.conditions(),
        args.limit
    );
    let rows = sql::query(&pool, query).await?;
    if rows.rows.is_empty() && !global.json {
        match args.all || !args.phase.is_empty() {
            true => eprintln!("the history has no such execution"),
            false => eprintln!(
                "the history has no such live execution (a new one takes a moment); --all also \
                 lists ended ones"
            ),
        }
    } else {
        rows.print(&COLUMNS, layout, global.json);
    }
    let of = format!("executions AS x WHERE {}", args.conditions());
    if let Some(words) = sql::left_out(&pool, &rows, args.limit, &of).await? {
        eprintln!("{words}");
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::Rows;
    use crate::table::tests::is_readable;
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

    fn list() -> Rows {
        let columns =
            "id program phase node boundary age submitted failure uncommitted moves tenant";
        let rows = [
            "dam-1|cg@1|started|worker-1|17/475|00:00:12|2026-11-28 12:03:41||00:00:01|0|lab",
            "poisson-large|spectral@1|completed|worker-2|475/475|1 day 02:03:04|2026-11-27 09:59:02|||2|lab",
            "seed-3|synthetic@1|failed|worker-1|3/40|00:10:00|2026-11-28 11:53:00|killed by the kernel, out of memory||1|lab",
            "0192d7a4-1111-7222-8333-123456789abc|cg@1|pending|||00:00:03|2026-11-28 12:03:50|||0|lab",
        ];
        let cell = |cell: &str| (!cell.is_empty()).then(|| cell.to_owned());
        Rows {
            columns: columns.split(' ').map(str::to_owned).collect(),
            rows: rows.map(|row| row.split('|').map(cell).collect()).into(),
        }
    }

    #[test]
    fn an_execution_is_one_line_of_a_terminal() {
        let now = "2026-11-28T12:03:53Z".parse().unwrap();
        let mut list = list();
        let unnamed = list.rows.pop().unwrap();
        let text = |list: &Rows, layout| list.to_table(&COLUMNS, layout, now).render(layout);
        let expected = "\
id             program      phase      node      boundary             age  moves
dam-1          cg@1         started    worker-1    17/475        00:00:12      0
poisson-large  spectral@1   completed  worker-2   475/475  1 day 02:03:04      2
seed-3         synthetic@1  failed     worker-1      3/40        00:10:00      1
left out: submitted, failure, uncommitted, tenant (--wide shows all)";
        assert_eq!(text(&list, Layout::Within(80)), expected);
        // One without a client's id has its UUID, which needs room.
        list.rows.push(unnamed);
        for width in [80, 100, 140] {
            let text = text(&list, Layout::Within(width));
            is_readable(
                &text,
                width,
                list.rows
                    .iter()
                    .flat_map(|row| &row[..4])
                    .flatten()
                    .map(|cell| &**cell),
            );
            assert!(text.lines().count() <= 6, "{text}");
        }
        assert_eq!(text(&list, Layout::Full).lines().count(), 5);
    }
}
