//! The columns of the hot tables, once: for COPY, and for the upsert that is made from them.

/// What an upsert does with a column of a row that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Keeps what is there, if it is not null.
    Keep,
    /// Takes what comes, if it is not null.
    Fill,
    /// Takes what comes.
    Take,
    /// An expression over the table's name and `excluded`.
    By(&'static str),
}
use Merge::{By, Fill, Keep, Take};

/// A table's columns in the order in which they are sent: name, type, merge.
pub(crate) type Columns = [(&'static str, &'static str, Merge)];

/// `executions`
pub(crate) const EXECUTIONS: &Columns = &[
    ("id", "uuid", Keep),
    ("tenant", "text", Keep),
    ("client_id", "text", Keep),
    ("batch_id", "uuid", Keep),
    ("batch_line", "integer", Keep),
    ("program", "text", Keep),
    ("contract", "text", Keep),
    ("submission", "bytea", Keep),
    ("spec", "jsonb", Keep),
    ("submitted_at", "timestamptz", Keep),
    ("phase", "text", Take),
    ("node", "text", Fill),
    ("substrate", "text", Fill),
    ("epoch", "bigint", Take),
    ("bound_at", "timestamptz", Fill),
    ("first_started_at", "timestamptz", Keep),
    ("yielded_at", "timestamptz", Fill),
    ("computed_until", "timestamptz", Fill),
    ("boundary_index", "bigint", Take),
    ("boundary_of", "bigint", Fill),
    ("progress_note", "text", Fill),
    ("state_digest", "bytea", Take),
    ("last_state_bytes", "bigint", Take),
    ("state_seq", "bigint", Take),
    ("state_ordinal", "bigint", Take),
    ("commits", "bigint", Take),
    ("state_bytes", "bigint", Take),
    ("rebindings", "bigint", Take),
    ("pressure_rebindings", "bigint", Take),
    ("crashes", "bigint", Take),
    ("compute_us", "bigint", Take),
    ("finished_at", "timestamptz", Take),
    ("capsules", "bigint", Fill),
    ("result", "jsonb", Fill),
    ("outputs", "jsonb", Fill),
    ("failure", "text", Fill),
    ("stderr_tail", "text", Fill),
    ("requested", "text", Take),
    ("paused_by", "text", Take),
    ("ordinal", "bigint", Take),
    ("seq", "bigint", Take),
    ("author", "text", Take),
    ("recorded_at", "timestamptz", Take),
    ("host_uj", "bigint", Take),
    ("host_intervals", "bigint", Take),
    ("device_uj", "bigint", Take),
    ("device_intervals", "bigint", Take),
    ("digest", "bytea", Take),
];

/// A column of `placements` as the sum of both, null where both are. A sum beyond `bigint` becomes
/// its greatest value: PostgreSQL would refuse the whole batch.
macro_rules! added {
    ($column:literal) => {
        concat!(
            "CASE WHEN excluded.",
            $column,
            " IS NULL THEN placements.",
            $column,
            " ELSE least(9223372036854775807, coalesce(placements.",
            $column,
            ", 0)::numeric + excluded.",
            $column,
            ")::bigint END"
        )
    };
}

/// `placements`
pub(crate) const PLACEMENTS: &Columns = &[
    ("execution", "uuid", Keep),
    ("epoch", "bigint", Keep),
    ("node", "text", Keep),
    ("instance", "uuid", Keep),
    ("substrate", "text", Keep),
    ("cause", "text", Keep),
    ("bound_at", "timestamptz", Keep),
    ("started_at", "timestamptz", Keep),
    ("computing_since", "timestamptz", Keep),
    // What was computed before its first capsule belongs to the placement before.
    (
        "computed_until",
        "timestamptz",
        By(
            "coalesce(placements.computed_until, CASE WHEN excluded.computed_until >= \
            coalesce(excluded.computing_since, placements.computing_since) \
            THEN excluded.computed_until END)",
        ),
    ),
    ("ended_at", "timestamptz", Keep),
    ("end_reason", "text", Keep),
    ("gap_us", "bigint", Keep),
    // What a batch brings is added; a batch is written once.
    ("host_uj", "bigint", By(added!("host_uj"))),
    ("device_uj", "bigint", By(added!("device_uj"))),
];

/// `decisions`
pub(crate) const DECISIONS: &Columns = &[
    ("execution", "uuid", Keep),
    ("epoch", "bigint", Keep),
    ("ordinal", "bigint", Keep),
    ("at", "timestamptz", Keep),
    ("cause", "text", Keep),
    ("chosen", "text", Keep),
    ("candidates", "jsonb", Keep),
    ("omitted", "integer", Keep),
];

/// `boundaries`
pub(crate) const BOUNDARIES: &Columns = &[
    ("execution", "uuid", Keep),
    ("index", "bigint", Keep),
    ("epoch", "bigint", Keep),
    ("node", "text", Keep),
    ("digest", "bytea", Keep),
    ("bytes", "bigint", Keep),
    ("computed_at", "timestamptz", Keep),
    ("committed_at", "timestamptz", Keep),
    ("compute_us", "bigint", Keep),
    ("seq", "bigint", Keep),
    ("ordinal", "bigint", Keep),
    ("note", "text", Keep),
    ("outputs", "jsonb", Keep),
    ("host_uj", "bigint", Keep),
    ("device_uj", "bigint", Keep),
];

/// `execution_events`
pub(crate) const EVENTS: &Columns = &[
    ("execution", "uuid", Keep),
    ("ordinal", "bigint", Keep),
    ("at", "timestamptz", Keep),
    ("kind", "text", Keep),
    ("epoch", "bigint", Keep),
    ("node", "text", Keep),
    ("who", "text", Keep),
    ("detail", "text", Keep),
];

/// The names, as a COPY or an INSERT lists them.
pub(crate) fn names(columns: &Columns) -> String {
    columns
        .iter()
        .map(|(name, _, _)| *name)
        .collect::<Vec<_>>()
        .join(", ")
}

/// `INSERT … SELECT FROM UNNEST … ON CONFLICT (key) DO UPDATE …`, one array a column; JSON comes
/// as text. `guard` is the condition under which a row that is there is changed.
pub(crate) fn upsert(table: &str, key: &[&str], columns: &Columns, guard: &str) -> String {
    let list = names(columns);
    let values: Vec<String> = columns
        .iter()
        .map(|(name, ty, _)| {
            if *ty == "jsonb" {
                format!("{name}::jsonb")
            } else {
                (*name).into()
            }
        })
        .collect();
    let arrays: Vec<String> = columns
        .iter()
        .enumerate()
        .map(|(i, (_, ty, _))| {
            format!("${}::{}[]", i + 1, if *ty == "jsonb" { "text" } else { ty })
        })
        .collect();
    let sets: Vec<String> = columns
        .iter()
        .filter(|(name, _, _)| !key.contains(name))
        .map(|(name, _, merge)| match merge {
            Keep => format!("{name} = coalesce({table}.{name}, excluded.{name})"),
            Fill => format!("{name} = coalesce(excluded.{name}, {table}.{name})"),
            Take => format!("{name} = excluded.{name}"),
            By(expression) => format!("{name} = {expression}"),
        })
        .collect();
    format!(
        "INSERT INTO {table} ({list}) SELECT {} FROM UNNEST({}) AS u({list}) \
         ON CONFLICT ({}) DO UPDATE SET {}{guard}",
        values.join(", "),
        arrays.join(", "),
        key.join(", "),
        sets.join(", "),
    )
}
