//! `fiec rejections`: refused submissions, from PostgreSQL.

use clap::Args;
use fiec_schemas::{ClientId, Tenant};
use serde_json::Value;
use sqlx::PgPool;

use crate::context::Global;
use crate::exit::Outcome;
use crate::sql::{self, Rows, literal};

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
}

/// Runs the command.
///
/// # Errors
/// If PostgreSQL cannot be reached.
pub async fn run(args: RejectionsArgs, global: &Global) -> anyhow::Result<Outcome> {
    let pool = global.database().await?;
    let of = args.tenant.as_deref();
    let of = of.map_or_else(String::new, |tenant| {
        format!("WHERE tenant = {} ", literal(tenant))
    });
    // A script gets every column, a person those that fit on a page.
    let columns = match global.json {
        true => "*",
        false => {
            "at::timestamp(0) AS at, tenant, submission_seq AS submission, line, \
             nullif(field, '') AS field, reason, nullif(left(excerpt, 60), '') AS begins"
        }
    };
    let query = format!(
        "SELECT {columns} FROM rejections AS r {of}ORDER BY r.at DESC, r.seq DESC LIMIT {}",
        args.limit
    );
    let rows = sql::query(&pool, query).await?;
    if rows.rows.is_empty() && !global.json {
        eprintln!("no submission was refused");
    } else {
        rows.print(global.json);
    }
    let of = format!("rejections {of}");
    if let Some(words) = sql::left_out(&pool, &rows, args.limit, &of).await? {
        eprintln!("{words}; `-n` lists more");
    }
    Ok(Outcome::Done)
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
}
