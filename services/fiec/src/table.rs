//! Tables for people: a head, one line a row, two blanks between columns.
//!
//! A table never cuts a word or a number. In a terminal, a cell that is too long is wrapped at
//! blanks, and columns that do not fit are left out, from the least important one. In a pipe, and
//! with `--wide`, a table has all columns and does not wrap, so that `grep` and `awk` find whole
//! values.

use std::borrow::Cow;

use clap::Args;
use unicode_width::UnicodeWidthStr;

use crate::terminal::safe;

/// Blanks between columns.
const GAP: usize = 2;
/// A column with longer cells is left out if it would get fewer characters than this.
const LEAST_TEXT: usize = 36;
/// Units that stay on the line of their number.
const UNITS: [&str; 11] = [
    "%", "ms", "s", "µs", "B", "KiB", "MiB", "GiB", "TiB", "W", "°C",
];

/// The option of commands that print tables.
#[derive(Debug, Clone, Copy, Args)]
pub struct WideArg {
    /// Show everything, with full times and ids, one line a row, as in a pipe
    #[arg(long)]
    pub wide: bool,
}

impl WideArg {
    /// The layout of this command's output.
    pub fn layout(self) -> Layout {
        match self.wide {
            true => Layout::Full,
            false => Layout::of_stdout(),
        }
    }
}

/// How much of a table is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Everything, without wrapping.
    Full,
    /// Wrapped lines. The number is the most characters of a line.
    Within(usize),
}

impl Layout {
    /// The width of the terminal. [`Layout::Full`] if stdout is not a terminal.
    pub fn of_stdout() -> Self {
        let size = console::Term::stdout().size_checked();
        size.map_or(Self::Full, |(_rows, columns)| Self::Within(columns.into()))
    }

    /// True if everything is printed.
    pub fn is_full(self) -> bool {
        self == Self::Full
    }

    /// Wraps a text at blanks. Each line after the first begins with `indent` blanks.
    pub fn wrap(self, text: &str, indent: usize) -> String {
        let Self::Within(width) = self else {
            return text.to_owned();
        };
        let lines = wrapped(&safe(text), width, width.saturating_sub(indent));
        lines.join(&format!("\n{}", " ".repeat(indent)))
    }
}

/// The side of a column at which its cells stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub head: Cow<'static, str>,
    /// 0: it is never left out. Of the others, the greatest is left out first.
    pub priority: u8,
    /// The side of its cells.
    pub align: Align,
}

impl Column {
    /// A column of words.
    pub const fn left(head: &'static str, priority: u8) -> Self {
        Self {
            head: Cow::Borrowed(head),
            priority,
            align: Align::Left,
        }
    }

    /// A column of numbers.
    pub const fn right(head: &'static str, priority: u8) -> Self {
        Self {
            head: Cow::Borrowed(head),
            priority,
            align: Align::Right,
        }
    }
}

/// A table. Each row has a cell for each column.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table of these columns and rows.
    pub fn new(columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: rows.into_iter().collect(),
        }
    }

    /// Prints it as text without a last line feed.
    pub fn render(&self, layout: Layout) -> String {
        let lines = self.cells();
        let full: Vec<usize> = (0..self.columns.len())
            .map(|column| widest(lines.iter().map(|cells| &*cells[column])))
            .collect();
        let (kept, widths) = match layout {
            Layout::Full => ((0..full.len()).collect(), full),
            Layout::Within(width) => self.fit(width, &lines, &full),
        };
        let mut text = Vec::new();
        for cells in &lines {
            let parts: Vec<_> = kept
                .iter()
                .map(|&column| wrapped(&cells[column], widths[column], widths[column]))
                .collect();
            for nth in 0..parts.iter().map(Vec::len).max().unwrap_or(0) {
                let mut line = String::new();
                for (part, &column) in parts.iter().zip(&kept) {
                    let cell = part.get(nth).map_or("", |cell| cell);
                    let blanks = " ".repeat(widths[column].saturating_sub(cell.width()));
                    match self.columns[column].align {
                        Align::Left => line.extend([cell, &blanks]),
                        Align::Right => line.extend([&blanks, cell]),
                    }
                    line.push_str(&" ".repeat(GAP));
                }
                text.push(line.trim_end().to_owned());
            }
        }
        let left_out: Vec<_> = (0..self.columns.len())
            .filter(|column| !kept.contains(column))
            .map(|column| &*self.columns[column].head)
            .collect();
        if !left_out.is_empty() {
            let words = format!("left out: {} (--wide shows all)", left_out.join(", "));
            text.push(layout.wrap(&words, GAP));
        }
        text.join("\n")
    }

    /// The head, and the cells of each row, as a terminal shows them.
    fn cells(&self) -> Vec<Vec<String>> {
        let shown = |cell: &str| safe(cell).replace(['\n', '\t'], " ");
        let head = self.columns.iter().map(|column| shown(&column.head));
        let mut lines = vec![head.collect::<Vec<_>>()];
        lines.extend(self.rows.iter().map(|row| {
            let mut cells: Vec<_> = row.iter().map(|cell| shown(cell)).collect();
            cells.resize(self.columns.len(), String::new());
            cells
        }));
        lines
    }

    /// The columns that fit, and the width of each column.
    fn fit(&self, width: usize, lines: &[Vec<String>], full: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let least: Vec<usize> = (0..full.len())
            .map(|column| widest(lines.iter().flat_map(|cells| words(&cells[column]))))
            .collect();
        let wanted = |column: usize| least[column].max(full[column].min(LEAST_TEXT)) + GAP;
        let mut by_priority: Vec<usize> = (0..full.len()).collect();
        by_priority.sort_by_key(|&column| self.columns[column].priority);
        let mut kept = Vec::new();
        let mut used = 0;
        for column in by_priority {
            if self.columns[column].priority == 0 || used + wanted(column) <= width + GAP {
                used += wanted(column);
                kept.push(column);
            }
        }
        kept.sort_unstable();
        // The narrowest columns grow first, so that only long texts are wrapped.
        let mut widths = least;
        let taken: usize = kept.iter().map(|&column| widths[column] + GAP).sum();
        for _ in taken..width + GAP {
            let growing = kept.iter().filter(|&&column| widths[column] < full[column]);
            match growing.min_by_key(|&&column| widths[column]) {
                Some(&column) => widths[column] += 1,
                None => break,
            }
        }
        (kept, widths)
    }
}

fn widest<'a>(texts: impl Iterator<Item = &'a str>) -> usize {
    texts.map(UnicodeWidthStr::width).max().unwrap_or(0)
}

/// The words of a text. A number and its unit are one word.
fn words(text: &str) -> Vec<&str> {
    let mut words: Vec<(usize, usize)> = Vec::new();
    let mut start = 0;
    for part in text.split(' ') {
        let end = start + part.len();
        let is_unit = UNITS.contains(&part.trim_end_matches([',', ';', ')', '.']));
        match words.last_mut() {
            Some((_, last)) if is_unit && text[..*last].ends_with(|c: char| c.is_ascii_digit()) => {
                *last = end;
            }
            _ if part.is_empty() => {}
            _ => words.push((start, end)),
        }
        start = end + 1;
    }
    words
        .into_iter()
        .map(|(start, end)| &text[start..end])
        .collect()
}

/// The lines of a text: the first of at most `first` characters, the others of at most `rest`. A
/// word that is longer has a line of its own.
fn wrapped(text: &str, first: usize, rest: usize) -> Vec<String> {
    if text.width() <= first {
        return vec![text.to_owned()];
    }
    let mut lines: Vec<String> = Vec::new();
    for word in words(text) {
        let width = if lines.len() > 1 { rest } else { first };
        match lines.last_mut() {
            Some(line) if line.width() + 1 + word.width() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];

/// Shortens a time in UTC (`2026-11-27T12:03:41.5Z`, or as PostgreSQL writes it): `12:03:41` on the
/// day of `now`, `Nov 27 12:03` on other days of the year, `2025-11-27` before. Keeps other texts.
pub fn short_time<'a>(text: &'a str, now: &str) -> Cow<'a, str> {
    let shape = |c: char| if c.is_ascii_digit() { '0' } else { c };
    let Some((date, time)) = text.get(..10).zip(text.get(11..19)) else {
        return text.into();
    };
    let begin: String = text.chars().take(19).map(shape).collect();
    if begin.replace('T', " ") != "0000-00-00 00:00:00" || text[19..].contains(' ') {
        return text.into();
    }
    let month = date[5..7].parse::<usize>().ok();
    match month.and_then(|month| MONTHS.get(month.checked_sub(1)?)) {
        _ if now.starts_with(date) => time.into(),
        Some(month) if now.starts_with(&date[..4]) => {
            format!("{month} {} {}", &date[8..], &time[..5]).into()
        }
        _ => date.into(),
    }
}

/// Writes the fractions in a number or in JSON as serde_json does: `1.0147807052232935e-11`, where
/// PostgreSQL writes `0.000000000010147807052232935`. Keeps other texts.
pub fn numbers(text: &str) -> Cow<'_, str> {
    let is_json = text.starts_with(['{', '[']) || text.parse::<f64>().is_ok_and(f64::is_finite);
    if !is_json || !text.contains('.') {
        return text.into();
    }
    let mut written = String::with_capacity(text.len());
    // Strings in JSON stand between quotes. A backslash escapes the next character.
    for (n, part) in quoted(text).into_iter().enumerate() {
        if n % 2 == 1 {
            written.push_str(part);
            continue;
        }
        for token in
            part.split_inclusive(|c: char| !matches!(c, '0'..='9' | '.' | '-' | '+' | 'e' | 'E'))
        {
            let number = token.trim_end_matches([',', ' ', ']', '}', ':', '\n']);
            match serde_json::from_str::<f64>(number) {
                Ok(value) if number.contains('.') => {
                    written.push_str(&serde_json::json!(value).to_string());
                    written.push_str(&token[number.len()..]);
                }
                _ => written.push_str(token),
            }
        }
    }
    written.into()
}

/// The parts of JSON: outside of strings, a string with its quotes, and so on.
fn quoted(text: &str) -> Vec<&str> {
    let (mut parts, mut start) = (Vec::new(), 0);
    let (mut is_inside, mut is_escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_inside => is_escaped = true,
            '"' => {
                let end = if is_inside { at + 1 } else { at };
                parts.push(&text[start..end]);
                (start, is_inside) = (end, !is_inside);
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// The first `width` characters of a text. `…` stands for the others.
pub fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let begin: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{begin}…")
}

#[cfg(test)]
pub mod tests;
