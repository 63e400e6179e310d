//! Output for people: spinners for steps that take longer than a second, tables, times.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::table::{Column, Layout, Table};
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

/// A table for people, as wide as the terminal, with all columns.
pub fn table<H, R>(head: H, rows: R) -> String
where
    H: IntoIterator,
    H::Item: Into<String>,
    R: IntoIterator,
    R::Item: IntoIterator<Item = String>,
{
    let columns = head.into_iter().map(|head| Column {
        head: head.into().into(),
        ..Column::left("", 0)
    });
    let columns: Vec<_> = columns.collect();
    let rows = rows.into_iter().map(|row| row.into_iter().collect());
    Table::new(&columns, rows).render(Layout::of_stdout())
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

    #[test]
    fn sizes_and_durations_read_as_people_say_them() {
        assert_eq!(bytes(17), "17 B");
        assert_eq!(bytes(117_248), "114.5 KiB");
        assert_eq!(micros(420), "420 µs");
        assert_eq!(micros(1_500), "1.50 ms");
        assert_eq!(micros(-2_500_000), "-2.50 s");
    }
}
