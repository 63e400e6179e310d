//! Output for people: spinners for steps that take longer than a second, tables, times.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::Duration;

use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};
use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::safe;

/// A spinner that shows the current step. On a pipe it prints one line for each step.
#[derive(Debug)]
pub struct Steps {
    bar: Mutex<Option<ProgressBar>>,
    quiet: bool,
}

impl Steps {
    /// Shows steps on stderr. `quiet` shows nothing.
    pub fn new(quiet: bool) -> Self {
        Self {
            bar: Mutex::new(None),
            quiet,
        }
    }

    /// Shows that a step begins which may take longer than a second.
    pub fn step(&self, message: &str) {
        if self.quiet {
            return;
        }
        if !std::io::stderr().is_terminal() {
            eprintln!("… {message}");
            return;
        }
        if let Ok(mut slot) = self.bar.lock() {
            let bar = slot.get_or_insert_with(|| {
                let bar = ProgressBar::new_spinner();
                bar.set_style(
                    ProgressStyle::with_template("{spinner:.cyan} {msg} {elapsed:.dim}")
                        .unwrap_or_else(|_| ProgressStyle::default_spinner()),
                );
                bar.enable_steady_tick(Duration::from_millis(100));
                bar
            });
            bar.set_message(safe(message).into_owned());
        }
    }

    /// Ends the spinner and leaves a line.
    pub fn done(&self, message: &str) {
        if self.quiet {
            return;
        }
        if let Ok(mut slot) = self.bar.lock()
            && let Some(bar) = slot.take()
        {
            bar.finish_and_clear();
        }
        eprintln!("✓ {message}");
    }
}

/// Characters of a UUID in its usual form.
const UUID_WIDTH: u16 = 36;

/// A table for people, as wide as the terminal. On a pipe each row is one line, so that `grep` and
/// `awk` find whole values.
pub fn table<H, R, C>(head: H, rows: R) -> Table
where
    H: IntoIterator,
    H::Item: Into<String>,
    R: IntoIterator<Item = C>,
    C: IntoIterator<Item = String>,
{
    let size = console::Term::stdout().size_checked();
    let width = size.map(|(_rows, columns)| columns);
    table_within(width, head, rows)
}

/// A table with lines of at most `width` characters. `None` does not wrap.
fn table_within<H, R, C>(width: Option<u16>, head: H, rows: R) -> Table
where
    H: IntoIterator,
    H::Item: Into<String>,
    R: IntoIterator<Item = C>,
    C: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_header(head.into_iter().map(Into::into).collect::<Vec<String>>());
    let mut uuids = BTreeSet::new();
    for row in rows {
        let row: Vec<String> = row.into_iter().collect();
        let here = row.iter().enumerate();
        uuids.extend(here.filter_map(|(column, cell)| is_uuid(cell).then_some(column)));
        table.add_row(row);
    }
    let Some(width) = width else {
        table.set_content_arrangement(ContentArrangement::Disabled);
        return table;
    };
    table
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width);
    for column in uuids {
        if let Some(column) = table.column_mut(column) {
            // A UUID on two lines cannot be copied.
            let content = UUID_WIDTH.saturating_add(column.padding_width());
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(content)));
        }
    }
    table
}

fn is_uuid(cell: &str) -> bool {
    cell.len() == usize::from(UUID_WIDTH) && uuid::Uuid::parse_str(cell).is_ok()
}

/// A number of bytes with a unit, for people.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" {
        format!("{n} B")
    } else {
        format!("{value:.1} {unit}")
    }
}

/// A duration in µs with a unit, for people.
pub fn micros(us: i64) -> String {
    match us.unsigned_abs() {
        0..=999 => format!("{us} µs"),
        1_000..=999_999 => format!("{:.2} ms", us as f64 / 1e3),
        _ => format!("{:.2} s", us as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "0192d7a4-1111-7222-8333-123456789abc";

    fn lines(width: Option<u16>) -> Vec<String> {
        let words = "memory pressed for longer than its dwell and another node had room for it";
        let row = [UUID, "n1", words, words].map(str::to_owned);
        let table = table_within(width, ["execution", "node", "why", "would help"], [row]);
        table.to_string().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_table_keeps_to_the_width_of_the_terminal_and_splits_no_uuid() {
        for width in [80, 100, 185] {
            let lines = lines(Some(width));
            let widest = lines.iter().map(|line| line.chars().count()).max();
            assert!(widest <= Some(usize::from(width)), "{width}: {lines:#?}");
            assert!(
                lines.iter().any(|l| l.contains(UUID)),
                "{width}: {lines:#?}"
            );
        }
    }

    #[test]
    fn on_a_pipe_a_row_is_one_line() {
        let lines = lines(None);
        let row = lines.iter().find(|line| line.contains(UUID)).unwrap();
        assert!(row.contains("room for it"), "{lines:#?}");
        assert_eq!(lines.len(), 5, "{lines:#?}");
    }

    #[test]
    fn sizes_and_durations_read_as_people_say_them() {
        assert_eq!(bytes(17), "17 B");
        assert_eq!(bytes(117_248), "114.5 KiB");
        assert_eq!(micros(420), "420 µs");
        assert_eq!(micros(1_500), "1.50 ms");
        assert_eq!(micros(-2_500_000), "-2.50 s");
    }
}
