use super::*;

/// Checks a text at a width: no line is longer, and each word of `cells` is whole.
#[track_caller]
pub fn is_readable<'a>(text: &str, width: usize, cells: impl IntoIterator<Item = &'a str>) {
    for line in text.lines() {
        assert!(line.width() <= width, "{width}: {line:?}\n{text}");
    }
    let shown: Vec<_> = text.split_whitespace().collect();
    for word in cells.into_iter().flat_map(str::split_whitespace) {
        assert!(
            shown.contains(&word),
            "{width}: {word:?} is not whole in\n{text}"
        );
    }
}

const UUID: &str = "0192d7a4-1111-7222-8333-123456789abc";
const WORDS: &str =
    "memory pressed for longer than its dwell, 10.6 % of 32 GiB, and another had room";

fn table() -> Table {
    let columns = [
        Column::left("execution", 0),
        Column::right("n", 0),
        Column::left("node", 2),
        Column::left("why", 1),
        Column::left("would help", 3),
    ];
    let row = [UUID, "7", "n1", WORDS, WORDS].map(str::to_owned).to_vec();
    let short = ["x", "12", "worker-2", "", ""].map(str::to_owned).to_vec();
    Table::new(&columns, [row, short])
}

#[test]
fn columns_that_do_not_fit_are_left_out_from_the_least_important_one() {
    let text = table().render(Layout::Within(80));
    let expected = "\
execution                              n  why
0192d7a4-1111-7222-8333-123456789abc   7  memory pressed for longer than its
                                          dwell, 10.6 % of 32 GiB, and another
                                          had room
x                                     12
left out: node, would help (--wide shows all)";
    assert_eq!(text, expected);
    for width in [80, 100, 140, 185] {
        let text = table().render(Layout::Within(width));
        is_readable(&text, width, [UUID, WORDS]);
        assert_eq!(text.contains("left out"), width < 140, "{text}");
    }
}

#[test]
fn a_word_that_is_longer_than_the_terminal_is_not_cut() {
    let text = table().render(Layout::Within(30));
    assert!(text.contains(UUID), "{text}");
}

#[test]
fn in_a_pipe_a_row_is_one_line() {
    let text = table().render(Layout::Full);
    assert_eq!(text.lines().count(), 3, "{text}");
    assert_eq!(text.matches(WORDS).count(), 2, "{text}");
}

#[test]
fn a_number_stays_with_its_unit_and_indents_stay() {
    assert_eq!(
        words("at 10.6 % (high 90.0 %, 1 s)  end"),
        ["at", "10.6 %", "(high", "90.0 %,", "1 s)", "end"]
    );
    assert_eq!(wrapped("  a b", 9, 9), ["  a b"]);
    assert_eq!(
        Layout::Within(9).wrap("help: aaa bb c", 6),
        "help: aaa\n      bb\n      c"
    );
}

#[test]
fn control_characters_and_line_feeds_do_not_break_a_row() {
    let columns = [Column::left("a", 0), Column::left("b", 0)];
    let row = ["x\ny\u{1b}[2J", "z"].map(str::to_owned).to_vec();
    let text = Table::new(&columns, [row]).render(Layout::Full);
    assert_eq!(text, "a             b\nx y\\u001b[2J  z");
}

#[test]
fn times_are_short_on_a_terminal() {
    let now = "2026-11-28T09:00:00.000000Z";
    for (time, expected) in [
        ("2026-11-28T08:03:41.000500Z", "08:03:41"),
        ("2026-11-28 08:03:41", "08:03:41"),
        ("2026-11-27 12:03:41.123+00", "Nov 27 12:03"),
        ("2025-11-28 12:03:41", "2025-11-28"),
        (
            "2026-11-28 08:03:41 or later",
            "2026-11-28 08:03:41 or later",
        ),
        ("1 day 02:03:04", "1 day 02:03:04"),
        ("", ""),
        ("äöüäöüäöüäöüäöü", "äöüäöüäöüäöüäöü"),
    ] {
        assert_eq!(short_time(time, now), expected);
    }
}

#[test]
fn numbers_are_written_as_json_writes_them() {
    for (text, expected) in [
        ("0.000000000010147807052232935", "1.0147807052232935e-11"),
        (
            r#"{"a": 0.000000000010147807052232935, "n": 123456789012345678901, "s": "0.000000000010", "v": [1.50, -2.0]}"#,
            r#"{"a": 1.0147807052232935e-11, "n": 123456789012345678901, "s": "0.000000000010", "v": [1.5, -2.0]}"#,
        ),
        (
            r#"{"q": "a\"b 0.10", "x":0.10}"#,
            r#"{"q": "a\"b 0.10", "x":0.1}"#,
        ),
        ("17", "17"),
        ("version 1.10", "version 1.10"),
        ("cg@1", "cg@1"),
    ] {
        assert_eq!(numbers(text), expected);
    }
}

#[test]
fn a_text_is_shortened_visibly() {
    assert_eq!(shortened("äbcdef", 4), "äbc…");
    assert_eq!(shortened("äbcd", 4), "äbcd");
}
