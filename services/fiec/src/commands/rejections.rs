//! `fiec rejections`: refused submissions, from PostgreSQL.

use clap::Args;
use fiec_schemas::{ClientId, Tenant, Timestamp};
use serde_json::Value;
use sqlx::PgPool;

use crate::context::Global;
use crate::exit::Outcome;
use crate::sql::{self, Rows, literal};
use crate::table::{Column, Layout, WideArg, shortened};

/// Most rows that are searched for a client's id.
const LOOKED_AT: u32 = 200;

/// List refused submissions, the latest first, including those sent with `nats pub`
#[derive(Debug, Args)]
pub struct RejectionsArgs {
    /// Only those of this tenant, as the subject names it [default: all tenants]
    #[arg(long, short, env = "FIEC_TENANT")]
    pub tenant: Option<String>,
    /// List at most N
    #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
    pub limit: u32,
    #[command(flatten)]
    pub wide: WideArg,
}

/// Columns in full.
const FULL: &str = "at::timestamp(0) AS at, tenant, submission_seq AS submission, line, \
    nullif(field, '') AS field, reason, nullif(excerpt, '') AS begins";
/// Columns in a terminal: the reason begins with the field.
const SHORT: &str = "at::timestamp(0) AS at, tenant, submission_seq AS submission, line, \
    coalesce(nullif(field, '') || ': ', '') || reason AS reason, nullif(excerpt, '') AS begins";
/// How the columns are shown.
const COLUMNS: [Column; 6] = [
    Column::left("at", 0),
    Column::left("tenant", 3),
    Column::right("submission", 2),
    Column::right("line", 0),
    Column::left("reason", 0),
    Column::left("begins", 1),
];

/// Runs the command.
///
/// # Errors
/// If PostgreSQL cannot be reached.
pub async fn run(args: RejectionsArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    let of_tenant = match &args.tenant {
        Some(tenant) => format!("tenant = {}", literal(tenant)),
        None => "true".to_owned(),
    };
    let layout = args.wide.layout();
    let (columns, of) = match layout {
        _ if global.json => ("*", of_tenant.clone()),
        Layout::Full => (FULL, of_tenant.clone()),
        Layout::Within(_) => (SHORT, format!("{of_tenant} AND because IS NULL")),
    };
    let query = format!(
        "SELECT {columns} FROM rejections AS r WHERE {of} ORDER BY r.at DESC, r.seq DESC LIMIT {}",
        args.limit
    );
    let rows = sql::query(&pool, query).await?;
    if global.json {
        print!("{}", rows.json_lines());
    } else if rows.rows.is_empty() {
        eprintln!("no submission was refused");
    } else {
        println!("{}", rendered(&rows, layout, Timestamp::now()));
    }
    if !global.json && !layout.is_full() {
        let count = format!(
            "SELECT count(*) AS number FROM rejections WHERE {of_tenant} AND because IS NOT NULL"
        );
        let counted = sql::query(&pool, count).await?;
        if let Some(words) = followers_in_words(counted.get(0, "number")) {
            println!("{}", layout.wrap(&words, 2));
        }
    }
    let of = format!("rejections WHERE {of}");
    if let Some(words) = sql::left_out(&pool, &rows, args.limit, &of).await? {
        eprintln!("{words}");
    }
    Ok(Outcome::Done)
}

/// The table for people.
fn rendered(rows: &Rows, layout: Layout, now: Timestamp) -> String {
    let mut rows = rows.clone();
    let most = if layout.is_full() { 60 } else { 20 };
    // The last column is the beginning of the line.
    for begin in rows.rows.iter_mut().filter_map(|row| row.last_mut()) {
        *begin = begin.as_deref().map(|begin| shortened(begin, most));
    }
    rows.to_table(&COLUMNS, layout, now).render(layout)
}

/// A line on the lines that were refused because of another line of their message.
fn followers_in_words(number: Option<&str>) -> Option<String> {
    let number = number.filter(|number| *number != "0")?;
    Some(format!(
        "and {number} lines that were refused only because of another line of their message \
         (--wide lists them)"
    ))
}

/// The refused lines of a tenant with this client's id, the latest first.
///
/// # Errors
/// If PostgreSQL refuses the query.
pub async fn of_client(
    pool: &PgPool,
    tenant: &Tenant,
    client: &ClientId,
) -> anyhow::Result<Vec<String>> {
    let query = format!(
        "SELECT at::timestamp(0) AS at, submission_seq AS submission, line, field, reason, excerpt \
         FROM rejections AS r WHERE tenant = {} AND strpos(excerpt, {}) > 0 \
         ORDER BY r.at DESC, r.seq DESC LIMIT {LOOKED_AT}",
        literal(tenant.as_str()),
        literal(&format!("\"{client}\"")),
    );
    let rows = sql::query(pool, query).await?;
    Ok((0..rows.rows.len())
        .filter(|row| names(rows.get(*row, "excerpt").unwrap_or_default(), client))
        .map(|row| in_words(&rows, row))
        .collect())
}

fn in_words(rows: &Rows, row: usize) -> String {
    let get = |column| rows.get(row, column).unwrap_or_default();
    let field = match get("field") {
        "" => String::new(),
        field => format!("{field}: "),
    };
    let message = match get("submission") {
        "" => String::new(),
        seq => format!(" of submission {seq}"),
    };
    format!(
        "refused at {}: line {}{message}: {field}{}",
        get("at"),
        get("line"),
        get("reason")
    )
}

/// True if a line, or its first 512 bytes, has this client's id. If the line is not valid JSON, its
/// text is searched.
fn names(excerpt: &str, client: &ClientId) -> bool {
    if let Ok(line) = serde_json::from_str::<Value>(excerpt) {
        return line.get("id").and_then(Value::as_str) == Some(client.as_str());
    }
    let after_id = excerpt.split("\"id\"").skip(1);
    let mut ids = after_id.filter_map(|rest| {
        let value = rest.trim_start().strip_prefix(':')?.trim_start();
        value.strip_prefix('"')?.split('"').next()
    });
    ids.any(|id| id == client.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::is_readable;

    #[test]
    fn a_refused_line_is_found_by_its_own_id_and_by_no_other() {
        let dam = ClientId::new("dam-1").unwrap();
        for (excerpt, is_named) in [
            (r#"{"id":"dam-1","program":7}"#, true),
            (r#"{"id": "dam-1", "program": "cg@1", "par"#, true),
            (r#"{"id" : "dam-1" broken"#, true),
            (r#"{"id":"dam-10","program":7}"#, false),
            (r#"{"id":"b","after":[{"id":"dam-1"}]}"#, false),
            (r#"{"program":"dam-1"}"#, false),
            ("", false),
        ] {
            assert_eq!(names(excerpt, &dam), is_named, "{excerpt}");
        }
    }

    #[test]
    fn a_refused_line_shows_its_reason_and_its_beginning() {
        let columns = "at tenant submission line reason begins";
        let reason = "params.matrix.file: \"a.mtx\" is not under the worker's --input-dir";
        let line = r#"{"id":"bad","program":"cg@1","params":{"matrix":{"file":"a.mtx"}}}"#;
        let row = ["2026-11-28 12:03:41", "lab", "17", "3", reason, line];
        let rows = Rows {
            columns: columns.split(' ').map(str::to_owned).collect(),
            rows: vec![row.map(|cell| Some(cell.to_owned())).into()],
        };
        let now = "2026-11-28T13:00:00Z".parse().unwrap();
        for width in [80, 100, 140] {
            let text = rendered(&rows, Layout::Within(width), now);
            is_readable(&text, width, ["12:03:41", "3", reason]);
            assert!(text.contains(r#"{"id":"bad","progra…"#), "{text}");
            assert!(text.lines().count() <= 4, "{text}");
        }
        let full = rendered(&rows, Layout::Full, now);
        assert!(full.lines().count() == 2 && full.contains(reason), "{full}");
    }

    #[test]
    fn lines_that_were_refused_because_of_others_are_counted() {
        assert_eq!(followers_in_words(Some("0")), None);
        let words = followers_in_words(Some("419")).unwrap();
        assert!(words.contains("419 lines"), "{words}");
    }
}
