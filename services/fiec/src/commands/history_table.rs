//! What `fiec history` shows of PostgreSQL, and how.

use fiec_schemas::{ExecutionId, Timestamp};
use unicode_width::UnicodeWidthStr as _;

use crate::sql::Rows;
use crate::table::{Column, Layout, numbers, short_time};

/// Width of the names of facts, with a blank.
const NAMES: usize = 23;
/// Facts that may look like numbers but are none.
const NAMES_AND_WORDS: [&str; 4] = ["client_id", "progress", "failure", "stderr_tail"];
/// Lines of a fact in a terminal.
const FACT_LINES: usize = 8;

/// The columns of the list of executions.
pub const LIST: [Column; 10] = [
    Column::left("id", 0),
    Column::left("program", 0),
    Column::left("phase", 0),
    Column::left("node", 1),
    Column::right("boundary", 2),
    Column::right("age", 3),
    Column::left("submitted_at", 4),
    Column::left("failure", 5),
    Column::right("moves", 6),
    Column::right("crashes", 7),
];

/// The columns of the list that are read for people. A UUID only if there is no client's id, or in
/// full.
pub fn selected(layout: Layout) -> String {
    let execution = match layout {
        Layout::Full => "e.execution, ",
        Layout::Within(_) => "",
    };
    format!(
        "coalesce(e.client_id, e.execution::text) AS id, {execution}e.program, e.phase, e.node, \
         coalesce(x.capsules, boundary) || coalesce('/' || boundaries_in_all, '') AS boundary, \
         date_trunc('milliseconds', age) AS age, e.submitted_at::timestamp(0), \
         left(e.failure, 80) AS failure, e.moves, e.crashes"
    )
}

/// A table of one execution.
#[derive(Debug)]
pub struct Section {
    /// Its title.
    pub title: &'static str,
    /// The view.
    pub view: &'static str,
    /// The columns that are read for people.
    pub selected: &'static str,
    /// How they are shown.
    pub columns: &'static [Column],
    /// Which rows and in which order; `$` is the execution's id, quoted.
    rows: &'static str,
}

impl Section {
    /// The condition and the order in SQL.
    pub fn condition(&self, execution: ExecutionId) -> String {
        self.rows.replace('$', &format!("'{execution}'"))
    }
}

/// The tables of one execution.
pub const SECTIONS: [Section; 6] = [
    Section {
        title: "Placements",
        view: "placement_timeline",
        selected: "epoch, node, cause, bound_at::timestamp(3), computing_since::time(3), \
                   computed_until::time(3), end_reason, gap_ms",
        columns: &[
            Column::right("epoch", 0),
            Column::left("node", 0),
            Column::left("cause", 0),
            Column::left("bound_at", 1),
            Column::left("computing_since", 3),
            Column::left("computed_until", 4),
            Column::left("end_reason", 1),
            Column::right("gap_ms", 2),
        ],
        rows: "execution = $ ORDER BY epoch",
    },
    Section {
        title: "Rebindings",
        view: "rebinding_history",
        selected: "epoch, from_node, to_node, cause, why, boundary, state_bytes, gap_ms",
        columns: &[
            Column::right("epoch", 0),
            Column::left("from_node", 1),
            Column::left("to_node", 0),
            Column::left("cause", 2),
            Column::left("why", 0),
            Column::right("boundary", 4),
            Column::right("state_bytes", 5),
            Column::right("gap_ms", 3),
        ],
        rows: "execution = $ ORDER BY epoch",
    },
    Section {
        title: "Parts",
        view: "spread_parts",
        selected: "part, from_tile, to_tile, phase, node, tiles_done AS done, \
                   split_at::time(3), finished_at::time(3), merged_at::time(3)",
        columns: &[
            Column::left("part", 0),
            Column::right("from_tile", 1),
            Column::right("to_tile", 1),
            Column::left("phase", 0),
            Column::left("node", 2),
            Column::right("done", 3),
            Column::left("split_at", 6),
            Column::left("finished_at", 5),
            Column::left("merged_at", 4),
        ],
        rows: "$ IN (whole, holder, part) ORDER BY from_tile, to_tile DESC",
    },
    Section {
        title: "Faults",
        view: "execution_faults",
        selected: "at::timestamp(3), owner, fault, node, event, detail",
        columns: &[
            Column::left("at", 1),
            Column::left("owner", 2),
            Column::left("fault", 0),
            Column::left("node", 0),
            Column::left("event", 3),
            Column::left("detail", 0),
        ],
        rows: "execution = $ ORDER BY at",
    },
    Section {
        title: "Numbers",
        view: "execution_numbers",
        selected: "name, last, lowest, highest, boundary, reports",
        columns: &[
            Column::left("name", 0),
            Column::right("last", 0),
            Column::right("lowest", 1),
            Column::right("highest", 1),
            Column::right("boundary", 2),
            Column::right("reports", 3),
        ],
        rows: "execution = $ ORDER BY name",
    },
    Section {
        title: "Requests of people",
        view: "execution_events",
        selected: "at::timestamp(3), kind, who, node, detail",
        columns: &[
            Column::left("at", 0),
            Column::left("kind", 0),
            Column::left("who", 1),
            Column::left("node", 2),
            Column::left("detail", 0),
        ],
        rows: "execution = $ AND who IS NOT NULL ORDER BY ordinal",
    },
];

/// The summary, one line per value. For a completed execution, the number of capsules replaces the
/// last committed boundary, which says less. In a terminal, long values are wrapped, and values that
/// would be cut are left out.
pub fn facts(summary: &Rows, layout: Layout, now: Timestamp) -> String {
    let ended = summary.get(0, "capsules").is_some();
    let (mut lines, mut left_out) = (Vec::new(), Vec::new());
    for (column, value) in summary.columns.iter().zip(summary.rows.iter().flatten()) {
        let Some(value) = value else { continue };
        if ended && ["boundary", "boundaries_in_all"].contains(&&**column) {
            continue;
        }
        let value = match NAMES_AND_WORDS.contains(&&**column) {
            true => value.into(),
            false => numbers(value),
        };
        let Layout::Within(width) = layout else {
            lines.push(format!("{column:<22} {value}"));
            continue;
        };
        let value = short_time(&value, &now.to_string()).into_owned();
        let room = width.saturating_sub(NAMES);
        let shown = value.trim_end().lines();
        let shown: Vec<_> = shown
            .map(|line| Layout::Within(room).wrap(line, 0))
            .collect();
        let mut shown: Vec<_> = shown.iter().flat_map(|lines| lines.lines()).collect();
        if shown.iter().any(|line| line.width() > room) {
            left_out.push(&**column);
            continue;
        }
        if shown.len() > FACT_LINES {
            shown.truncate(FACT_LINES);
            shown.push("… (--wide shows all)");
        }
        for (n, line) in shown.iter().enumerate() {
            let name = if n == 0 { column } else { "" };
            lines.push(format!("{name:<22} {line}").trim_end().to_owned());
        }
    }
    if !left_out.is_empty() {
        let words = format!("left out: {} (--wide shows all)", left_out.join(", "));
        lines.push(layout.wrap(&words, 2));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::is_readable;

    const NOW: &str = "2026-11-28T13:00:00Z";

    fn rows(columns: &[&str], values: &[&[Option<&str>]]) -> Rows {
        let cells =
            |row: &&[Option<&str>]| row.iter().map(|cell| cell.map(str::to_owned)).collect();
        Rows {
            columns: columns.iter().map(|column| (*column).to_owned()).collect(),
            rows: values.iter().map(cells).collect(),
        }
    }

    fn summary(capsules: Option<&str>) -> String {
        let columns = ["phase", "boundary", "boundaries_in_all", "capsules"];
        let summary = rows(&columns, &[&[Some("x"), Some("0"), Some("475"), capsules]]);
        facts(&summary, Layout::Full, NOW.parse().unwrap())
    }

    #[test]
    fn a_completed_execution_shows_its_capsules_and_no_earlier_boundary() {
        let text = summary(Some("475"));
        assert!(text.contains("capsules               475"), "{text}");
        assert!(!text.contains("boundary"), "{text}");
    }

    #[test]
    fn a_live_execution_shows_its_last_committed_boundary() {
        let text = summary(None);
        assert!(text.contains("boundary               0"), "{text}");
        assert!(!text.contains("capsules"), "{text}");
    }

    #[test]
    fn facts_are_wrapped_with_times_and_numbers_that_a_person_reads() {
        let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        let failure =
            "the node's worker ended while it computed it; it goes on from its last commit";
        let result =
            r#"{"residual": 0.000000000010147807052232935, "iterations": 475, "norm": 1.50}"#;
        let columns = ["submitted_at", "state_digest", "failure", "result"];
        let values = ["2026-11-28 12:03:41.123456+00", digest, failure, result].map(Some);
        let summary = rows(&columns, &[&values]);
        for width in [80, 100, 140] {
            let text = facts(&summary, Layout::Within(width), NOW.parse().unwrap());
            let result = r#"{"residual": 1.0147807052232935e-11, "iterations": 475, "norm": 1.5}"#;
            is_readable(&text, width, ["12:03:41", failure, result]);
            assert_eq!(text.contains(digest), width > 80, "{text}");
            assert_eq!(
                text.contains("left out: state_digest"),
                width == 80,
                "{text}"
            );
        }
        let full = facts(&summary, Layout::Full, NOW.parse().unwrap());
        assert!(full.lines().count() == 4 && full.contains(digest), "{full}");
    }

    #[test]
    fn placements_and_rebindings_fit_a_terminal() {
        let why = "memory on worker-1 was at 93.1 %, at or above 90.0 % for 10000 ms";
        let rebinding = [
            "2", "worker-1", "worker-2", "pressure", why, "17", "1048576", "12.345",
        ];
        let placement = [
            "1",
            "worker-1",
            "initial",
            "2026-11-28 12:03:41.123",
            "12:03:41.223",
            "12:05:00.001",
            "yielded",
            "12.345",
        ];
        for (section, cells) in SECTIONS.iter().zip([placement, rebinding]) {
            let heads: Vec<_> = section.columns.iter().map(|column| &*column.head).collect();
            let rows = rows(&heads, &[&cells.map(Some)]);
            for width in [80, 100, 140] {
                let layout = Layout::Within(width);
                let now = NOW.parse().unwrap();
                let text = rows.to_table(section.columns, layout, now).render(layout);
                let important = section.columns.iter().zip(cells);
                let important = important.filter(|(column, _)| column.priority == 0);
                is_readable(&text, width, important.map(|(_, cell)| cell));
            }
        }
    }
}
