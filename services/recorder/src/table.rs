//! Tables that the recorder writes. [`table!`] declares the struct of a row, and with it the names,
//! types and order of the columns, how a row is encoded, and how a row that is there is changed.
//!
//! A new column is one line in its declaration and one line in a migration. A test compares all
//! declarations with the catalogue of a migrated database.
//!
//! sqlx derives how a struct is read, but not how it is inserted, and has no binary COPY of rows.

mod copy;
mod value;

use sqlx::{AssertSqlSafe, PgConnection};

pub(crate) use self::copy::Copy;
pub(crate) use self::value::{Argument, EPOCH_MICROS, Value, argument, array, pg_micros};

/// What an upsert does with a column of a row that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Part of the key by which the row is found.
    Key,
    /// Keeps the value that is there, if it is not null.
    Keep,
    /// Takes the new value, if it is not null.
    Fill,
    /// Takes the new value.
    Take,
    /// An expression over the table's name and `excluded`.
    By(&'static str),
}

/// A column as a declaration has it.
#[cfg_attr(
    not(feature = "lab-support"),
    expect(dead_code, reason = "a test compares it with the catalogue")
)]
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// The object identifier of its type.
    pub oid: u32,
    /// True if it may be null.
    pub is_nullable: bool,
    pub(crate) merge: Merge,
}

/// A row of a table.
pub(crate) trait Table {
    /// The table's name.
    const NAME: &'static str;
    /// Its columns, in the order in which they are sent.
    const COLUMNS: &'static [Column];
    /// Columns that only other statements set.
    #[cfg_attr(
        not(feature = "lab-support"),
        expect(dead_code, reason = "a test compares it with the catalogue")
    )]
    const LATER: &'static [Column];
    /// Condition under which an upsert changes a row that is there; empty: always.
    const GUARD: &'static str;

    /// Appends all values, each with its length, as COPY sends them.
    fn put(&self, to: &mut Vec<u8>);

    /// The values as arguments of a statement, one a column.
    fn arguments(&self) -> Vec<Argument>;

    /// The values of several rows as arguments of a statement, one array a column.
    fn arrays(rows: &[&Self]) -> Vec<Argument>;
}

/// Declares a table: `struct ROW in "TABLE" { column: Type = Merge, … }`. A column without a merge
/// has [`Merge::Keep`]; where none is a key, a row that is there is left as it is. `where`: the
/// guard of an upsert. `beside`: fields that are no columns. `later`: columns that only other
/// statements set.
macro_rules! table {
    (
        $(#[$meta:meta])*
        struct $Row:ident in $name:literal $(where $guard:literal)? {
            $( $(#[$column_meta:meta])* $column:ident: $type:ty $(= $merge:expr)?, )*
        }
        $( beside { $( $(#[$beside_meta:meta])* $beside:ident: $beside_type:ty, )* } )?
        $( later { $( $later:ident: $later_type:ty, )* } )?
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone)]
        pub struct $Row {
            $( $(#[$column_meta])* pub $column: $type, )*
            $( $( $(#[$beside_meta])* pub $beside: $beside_type, )* )?
        }

        impl $crate::table::Table for $Row {
            const NAME: &'static str = $name;
            const COLUMNS: &'static [$crate::table::Column] = &[
                $( $crate::table::column!($column: $type $(= $merge)?), )*
            ];
            const LATER: &'static [$crate::table::Column] = &[
                $( $( $crate::table::column!($later: $later_type), )* )?
            ];
            const GUARD: &'static str = concat!($( $guard )?);

            fn put(&self, to: &mut Vec<u8>) {
                $( $crate::table::Value::put(&self.$column, to); )*
            }

            fn arguments(&self) -> Vec<$crate::table::Argument> {
                vec![ $( $crate::table::argument(&self.$column) ),* ]
            }

            fn arrays(rows: &[&Self]) -> Vec<$crate::table::Argument> {
                vec![ $( $crate::table::array(rows, |row| &row.$column) ),* ]
            }
        }
    };
}
pub(crate) use table;

macro_rules! column {
    ($name:ident: $type:ty) => {
        $crate::table::column!($name: $type = $crate::table::Merge::Keep)
    };
    ($name:ident: $type:ty = $merge:expr) => {
        $crate::table::Column {
            name: stringify!($name),
            oid: <$type as $crate::table::Value>::OID,
            is_nullable: <$type as $crate::table::Value>::IS_NULLABLE,
            merge: $merge,
        }
    };
}
pub(crate) use column;

/// Inserts or merges one row.
pub(crate) async fn write_one<R: Table>(to: &mut PgConnection, row: &R) -> sqlx::Result<()> {
    let source = format!("VALUES ({})", parameters::<R>());
    execute(to, insert::<R>(&source), row.arguments()).await
}

/// Inserts or merges rows by one statement. A key must not come twice, except where a row that is
/// there is left as it is.
pub(crate) async fn write_all<'a, R: Table + 'a>(
    to: &mut PgConnection,
    rows: impl IntoIterator<Item = &'a R>,
) -> sqlx::Result<()> {
    let rows: Vec<&R> = rows.into_iter().collect();
    if rows.is_empty() {
        return Ok(());
    }
    let source = format!("SELECT * FROM UNNEST({})", parameters::<R>());
    execute(to, insert::<R>(&source), R::arrays(&rows)).await
}

async fn execute(
    to: &mut PgConnection,
    statement: String,
    arguments: Vec<Argument>,
) -> sqlx::Result<()> {
    let mut query = sqlx::query(AssertSqlSafe(statement));
    for argument in arguments {
        query = query.bind(argument);
    }
    query.execute(to).await?;
    Ok(())
}

/// The columns' names, as a COPY or an INSERT lists them.
fn names<R: Table>() -> String {
    let names: Vec<&str> = R::COLUMNS.iter().map(|column| column.name).collect();
    names.join(", ")
}

fn parameters<R: Table>() -> String {
    let numbers: Vec<String> = (1..=R::COLUMNS.len()).map(|n| format!("${n}")).collect();
    numbers.join(", ")
}

fn insert<R: Table>(source: &str) -> String {
    let table = R::NAME;
    let mut statement = format!("INSERT INTO {table} ({}) {source}", names::<R>());
    let (mut keys, mut sets) = (Vec::new(), Vec::new());
    for Column { name, merge, .. } in R::COLUMNS {
        match merge {
            Merge::Key => keys.push(*name),
            Merge::Keep => sets.push(format!(
                "{name} = coalesce({table}.{name}, excluded.{name})"
            )),
            Merge::Fill => sets.push(format!(
                "{name} = coalesce(excluded.{name}, {table}.{name})"
            )),
            Merge::Take => sets.push(format!("{name} = excluded.{name}")),
            Merge::By(expression) => sets.push(format!("{name} = {expression}")),
        }
    }
    if keys.is_empty() {
        return statement + " ON CONFLICT DO NOTHING";
    }
    let (keys, sets) = (keys.join(", "), sets.join(", "));
    statement += &format!(" ON CONFLICT ({keys}) DO UPDATE SET {sets}");
    if !R::GUARD.is_empty() {
        statement += &format!(" WHERE {}", R::GUARD);
    }
    statement
}

#[cfg(test)]
mod tests {
    use super::*;

    table! {
        struct Sum in "sums" where "sums.at < excluded.at" {
            id: u64 = Merge::Key,
            name: Option<String>,
            at: i64 = Merge::Take,
            total: i64 = Merge::By("sums.total + excluded.total"),
        }
        later { seen: Option<bool>, }
    }

    table! {
        struct Fact in "facts" {
            id: u64,
        }
    }

    #[test]
    fn a_declaration_gives_the_statements() {
        assert_eq!(
            insert::<Sum>("VALUES ($1)"),
            "INSERT INTO sums (id, name, at, total) VALUES ($1) ON CONFLICT (id) DO UPDATE SET \
             name = coalesce(sums.name, excluded.name), at = excluded.at, \
             total = sums.total + excluded.total WHERE sums.at < excluded.at"
        );
        assert_eq!(
            insert::<Fact>("VALUES ($1)"),
            "INSERT INTO facts (id) VALUES ($1) ON CONFLICT DO NOTHING"
        );
        let name = Sum::COLUMNS[1];
        assert_eq!((name.name, name.oid, name.is_nullable), ("name", 25, true));
        assert_eq!(Sum::LATER[0].oid, 16);
    }
}
