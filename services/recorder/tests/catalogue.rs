//! The declarations of rows against the catalogue of a migrated database, both ways.
use std::collections::{BTreeMap, BTreeSet};

use crate::support::database;
use fiec_recorder::lab_support::{Column, Declared, declarations};
use sqlx::Row as _;

/// Tables that are written by statements of their own, without rows from Rust.
const BY_STATEMENTS: [&str; 9] = [
    "_sqlx_migrations",
    "applied_views",
    "boundary_state",
    "collection",
    "live_outputs",
    "lost_rows",
    "record_gaps",
    "recorder_checkpoint",
    "series_thinning",
];

/// A column of the catalogue: name, type, nullability, in the table's order.
type Found = (String, u32, bool);

/// Tables and partitioned tables with their columns, without partitions.
async fn catalogue(pool: &sqlx::PgPool) -> BTreeMap<String, Vec<Found>> {
    let rows = sqlx::query(
        "SELECT c.relname, a.attname, a.atttypid, NOT a.attnotnull AS is_nullable \
         FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid \
         WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') \
         AND NOT c.relispartition AND a.attnum > 0 AND NOT a.attisdropped \
         ORDER BY c.relname, a.attnum",
    );
    let mut tables: BTreeMap<String, Vec<Found>> = BTreeMap::new();
    for row in rows.fetch_all(pool).await.unwrap() {
        let oid: sqlx::postgres::types::Oid = row.get("atttypid");
        let column = (row.get("attname"), oid.0, row.get("is_nullable"));
        tables.entry(row.get("relname")).or_default().push(column);
    }
    tables
}

fn name(column: &Column) -> &'static str {
    column.name
}

/// Each column of a declaration is in the table, with its type and in the table's order.
fn compare(declared: &Declared, table: &[Found], is_whole: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut places = Vec::new();
    for column in declared.columns.iter().chain(declared.later) {
        let place = table.iter().position(|(name, _, _)| name == column.name);
        let Some((place, (_, oid, is_nullable))) = place.map(|place| (place, &table[place])) else {
            wrong.push(format!("{}.{} is not there", declared.table, column.name));
            continue;
        };
        places.push(place);
        // Of a table that several declarations share, each may leave columns out.
        let fits = match is_whole {
            true => column.is_nullable == *is_nullable,
            false => *is_nullable || !column.is_nullable,
        };
        if column.oid != *oid || !fits {
            wrong.push(format!(
                "{}.{}: {column:?} is type {oid}, nullable {is_nullable}, in the catalogue",
                declared.table, column.name
            ));
        }
    }
    if !places[..declared.columns.len().min(places.len())].is_sorted() {
        let names: Vec<_> = declared.columns.iter().map(name).collect();
        wrong.push(format!("{}: another order than {names:?}", declared.table));
    }
    wrong
}

#[tokio::test]
async fn declarations_and_catalogue_have_the_same_columns() {
    let db = database().await;
    let catalogue = catalogue(&db.pool).await;
    let mut declared: BTreeMap<&str, Vec<Declared>> = BTreeMap::new();
    for one in declarations() {
        declared.entry(one.table).or_default().push(one);
    }
    let mut wrong = Vec::new();
    for (table, parts) in &declared {
        let columns = catalogue.get(*table).map_or(&[][..], Vec::as_slice);
        for part in parts {
            wrong.extend(compare(part, columns, parts.len() == 1));
        }
    }
    for (table, columns) in &catalogue {
        let parts = declared.get(table.as_str());
        let parts = parts.into_iter().flatten();
        let known: BTreeSet<&str> = parts
            .flat_map(|part| part.columns.iter().chain(part.later).map(name))
            .collect();
        if known.is_empty() && !BY_STATEMENTS.contains(&table.as_str()) {
            wrong.push(format!("{table} is declared nowhere"));
        } else if !known.is_empty() {
            let missing = columns
                .iter()
                .filter(|(name, _, _)| !known.contains(name.as_str()));
            wrong.extend(missing.map(|(name, _, _)| format!("{table}.{name} is not declared")));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
