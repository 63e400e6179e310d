//! The rows that a batch of ledger messages becomes.

mod batch;
mod execution;
mod history;
mod placement;

use fiec_schemas::Timestamp;

pub use self::batch::{Rewind, Rows, StepBack};
pub(crate) use self::execution::EventColumns;
pub use self::execution::ExecutionRow;
pub use self::history::{BatchRow, BoundaryRow, ChangeRow, EventRow, MissingRow};
pub use self::placement::{DecisionRow, PlacementRow, RebindingRow};

/// Microseconds of a day.
const DAY_MICROS: i64 = 86_400_000_000;

/// The day of a time, since 1970, in UTC.
pub(crate) fn day_of(at: Timestamp) -> i32 {
    i32::try_from(at.micros().div_euclid(DAY_MICROS)).unwrap_or(0)
}
