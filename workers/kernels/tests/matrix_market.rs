#![allow(clippy::unwrap_used, clippy::expect_used)]
//! Every refusal names file, line and rule; what is read is what was written.

use std::path::Path;

use fiec_kernels::matrix_market::{
    is_matrix_market, parse_candidate_bytes, parse_dense, read,
    read_symmetric_positive_definite_candidate as candidate,
};
use proptest::prelude::*;

const SYM: &str = "%%MatrixMarket matrix coordinate real symmetric\n";
const GEN: &str = "%%MatrixMarket matrix coordinate real general\n";

fn refusal(content: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.mtx");
    std::fs::write(&path, content).unwrap();
    let message = candidate(&path).map(drop).unwrap_err().to_string();
    let prefix = path.display().to_string();
    assert!(
        message.starts_with(&prefix),
        "{message} does not name {prefix}"
    );
    message[prefix.len()..].to_owned()
}

#[test]
fn no_refusal_quotes_the_file() {
    const SECRET: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
    for text in [
        SECRET.to_owned(),
        format!("%%MatrixMarket {SECRET} a b c\n"),
        format!("%%MatrixMarket matrix coordinate {SECRET} general\n"),
        format!("{GEN}{SECRET}\n"),
        format!("{GEN}2 2 1\n{SECRET}\n"),
        format!("{GEN}2 2 1\n1 1 {SECRET}\n"),
        format!("{GEN}2 2 1\n1 4711 1\n"),
        format!("{GEN}2 2 4\n1 1 1\n2 2 1\n1 2 4711\n2 1 1\n"),
    ] {
        let message = refusal(text.as_bytes());
        assert!(
            !message.contains("SUACS") && !message.contains("4711"),
            "{message}"
        );
    }
}

#[test]
fn each_broken_rule_is_named_with_its_line() {
    let cases: Vec<(String, &str)> = vec![
        (String::new(), ": is empty"),
        ("hello\n".into(), ":1: expected the header"),
        (
            SYM.into(),
            ":1: truncated: the file ends before its size line",
        ),
        (format!("{SYM}2 2\n"), ":2: expected the size line"),
        (format!("{SYM}2 -2 2\n"), ":2: expected the size line"),
        (
            format!("{SYM}2 2 3\n1 1 1\n2 1 1\n"),
            ":4: truncated: 2 of 3 declared entries are there",
        ),
        (
            format!("{SYM}2 2 3\n1 1 1\n2 1"),
            ":4: truncated inside an entry: 1 of 3",
        ),
        (
            format!("{SYM}2 2 1\n1 1 1\n2 2 1\n"),
            ":4: more entries than the 1 declared",
        ),
        (
            format!("{SYM}2 3 1\n1 1 1\n"),
            ":2: the matrix is 2 x 3; it must be square",
        ),
        (
            format!("{GEN}% c\n2 3 1\n1 1 1\n"),
            ":3: the matrix is 2 x 3; it must be square",
        ),
        (
            format!("{SYM}2 2 1\n0 1 1\n"),
            ":3: the row index is outside 1 to 2",
        ),
        (
            format!("{SYM}2 2 1\n2 3 1\n"),
            ":3: the column index is outside 1 to 2",
        ),
        (
            format!("{SYM}2 2 1\n-1 1 1\n"),
            ":3: the row index is outside 1 to 2",
        ),
        (
            format!("{SYM}2 2 1\n1 1 nan\n"),
            ":3: the value is not finite",
        ),
        (
            format!("{SYM}2 2 1\n1 1 -inf\n"),
            ":3: the value is not finite",
        ),
        (
            format!("{SYM}2 2 1\n1 1 1e999\n"),
            ":3: the value is not finite",
        ),
        (
            format!("{SYM}2 2 1\n1 1 1D3\n"),
            ":3: the value is not a number",
        ),
        (
            format!("{SYM}2 2 1\n1 1 1 1\n"),
            ":3: expected \"row column value\"",
        ),
        (
            format!("{SYM}2 2 1\n1 2 1\n"),
            ":3: entry (1, 2) is above the diagonal",
        ),
        (
            format!("{SYM}2 2 3\n1 1 1\n2 2 1\n1 1 4\n"),
            ":5: entry (1, 1) was given before, in line 3",
        ),
        (
            format!("{SYM}2 2 2\n1 1 1\n2 2 0\n"),
            ":4: the diagonal of row 2 is not positive",
        ),
        (
            format!("{SYM}2 2 2\n1 1 1\n2 1 1\n"),
            ": row 2 has no diagonal entry",
        ),
        (
            format!("{GEN}2 2 4\n1 1 2\n1 2 1\n2 1 3\n2 2 2\n"),
            ":5: not symmetric: (2, 1) is not what (1, 2) is (line 4)",
        ),
        (
            format!("{GEN}2 2 3\n1 1 2\n1 2 1\n2 2 2\n"),
            ":4: not symmetric: (1, 2) is not what (2, 1) is (absent)",
        ),
        (
            format!("{SYM}4000000000 4000000000 1\n1 1 1\n"),
            ":2: the row count is more than 16777216",
        ),
        (
            format!("{SYM}5000000000 5000000000 1\n1 1 1\n"),
            ":2: the row count is more than 4294967294",
        ),
        (
            format!("{SYM}9 9 99999999999999999\n1 1 1\n"),
            ":2: the entry count is more than 45",
        ),
        (
            format!("{SYM}50 50 1000\n1 1 1\n"),
            ":3: truncated: 1 of 1000",
        ),
        (
            SYM.replace("real", "complex"),
            ":1: the field complex is not supported; use real or integer",
        ),
        (
            SYM.replace("real", "pattern"),
            ":1: the field pattern is not supported",
        ),
        (
            SYM.replace("coordinate", "array"),
            ":1: the format array is not supported; use coordinate",
        ),
        (
            SYM.replace("coordinate", "elemental"),
            ":1: the format is not supported",
        ),
        (
            SYM.replace("symmetric", "skew-symmetric"),
            ":1: the symmetry skew-symmetric is not supported",
        ),
        (
            SYM.replace("symmetric", "hermitian"),
            ":1: the symmetry hermitian is not supported",
        ),
        (
            SYM.replace("real", "integer") + "1 1 1\n1 1 1.5\n",
            ":3: the value is not an integer",
        ),
    ];
    for (content, expected) in cases {
        let message = refusal(content.as_bytes());
        assert!(
            message.starts_with(expected),
            "{content:?}\n gave {message:?}\n not  {expected:?}"
        );
    }
    assert!(refusal(b"\x7fELF\x02\x01\x00\xff").starts_with(":1: is not text: the byte at"));
    assert!(
        refusal(&[SYM.as_bytes(), b"2 2 1\n1 1 \xff\n"].concat())
            .starts_with(":3: is not text: the byte at")
    );
    assert!(
        candidate("/nonexistent/m.mtx")
            .unwrap_err()
            .to_string()
            .contains("cannot be read")
    );
    assert!(
        candidate("/dev/zero")
            .unwrap_err()
            .to_string()
            .contains("not a regular file")
    );
}

#[test]
fn files_are_read_as_they_are_published() {
    let plain = format!("{SYM}3 3 4\n1 1 2\n2 1 -1\n2 2 2\n3 3 2\n");
    let expected = parse_candidate_bytes("m", plain.as_bytes()).unwrap();
    for text in [
        format!("{SYM}% by rows\n3 3 4\n% one\n1 1 2\n\n2 1 -1\n  %two\n2 2 2\n3 3 2\n% end\n\n"),
        format!("\u{feff}{plain}"),
        format!("  \t{plain}"),
        plain.replace('\n', "\r\n"),
        plain.replace("%%MatrixMarket matrix", "%%matrixmarket MATRIX"),
        plain.lines().map(|line| format!("  {line}\t\n")).collect(),
    ] {
        assert!(is_matrix_market(text.as_bytes()), "{text}");
        let found = parse_candidate_bytes("m", text.as_bytes()).unwrap();
        for row in 0..3 {
            assert_eq!(found.row(row), expected.row(row), "{text}");
        }
    }
    assert!(!is_matrix_market(b"%%Matrix") && !is_matrix_market(b"\x93NUMPY"));
}

#[test]
fn dense_matrices_are_read_from_arrays_and_from_few_entries() {
    let dense = |text: &str| parse_dense("m", text.as_bytes(), 4_000_000);
    let array =
        "%%MatrixMarket matrix array real general\n% by columns\n2 3\n1\n2\n3\n\n4e0\n5\n6\n";
    let found = dense(array).unwrap();
    assert_eq!((found.rows, found.cols), (2, 3));
    assert_eq!(found.values, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let symmetric = "%%MatrixMarket matrix array integer symmetric\n3 3\n1\n2\n3\n4\n5\n6\n";
    let found = dense(symmetric).unwrap();
    assert_eq!(found.values, [1.0, 2.0, 3.0, 2.0, 4.0, 5.0, 3.0, 5.0, 6.0]);
    // Far more rows than bytes: as LFAT5_hypersparse has them.
    let few = format!("{GEN}2000 2000 2\n1 1 7\n2000 2 8\n");
    let found = dense(&few).unwrap();
    let filled: Vec<_> = found.values.iter().filter(|v| **v != 0.0).collect();
    assert_eq!((filled, found.values[3_999]), (vec![&7.0, &8.0], 8.0));
    let found = parse_candidate_bytes("m", few.replace("2000 2 8", "2 2 8").as_bytes());
    assert!(
        found
            .unwrap_err()
            .to_string()
            .contains("row 3 has no diagonal")
    );
    let edited = |from: &str, to: &str| array.replacen(from, to, 1);
    for (text, words) in [
        (edited("\n6\n", "\n"), "m:9: truncated: 5 of 6"),
        (edited("\n6\n", "\n6\n7\n"), "m:11: more entries than the 6"),
        (
            edited("2 3", "2"),
            "m:3: expected the size line \"rows columns\"",
        ),
        (edited("2 3", "2 3 6"), "m:3: expected the size line"),
        (edited("2 3", "0 3"), "m:3: the matrix has no rows"),
        (edited("2 3", "3 0"), "m:3: the matrix has no columns"),
        (
            edited("2 3", "3000 2000"),
            "m:3: the number of elements is more than 4000000",
        ),
        (
            edited("2 3", "18446744073709551615 2"),
            "m:3: the number of elements",
        ),
        (edited("4e0", "4 4"), "m:8: expected one value"),
        (edited("4e0", "nan"), "m:8: the value is not finite"),
        (
            symmetric.replace("3 3", "3 2"),
            "m:2: the matrix is 3 x 2; it must be square",
        ),
        (
            symmetric.replace("integer", "pattern"),
            "m:1: the field pattern is not",
        ),
        (
            few.replace("2000 2000", "2001 2000"),
            "m:2: the number of elements",
        ),
        (
            array.replace("%%Matrix", "%%matrics "),
            "m:1: expected the header",
        ),
    ] {
        let said = dense(&text).unwrap_err().to_string();
        assert!(said.starts_with(words), "{text}\n{said}");
    }
}

#[test]
fn the_dam_is_read_whole() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/bcsstk16.mtx");
    let a = candidate(&path).unwrap();
    assert_eq!(
        (a.rows(), a.entries(), a.first_asymmetry()),
        (4884, 290_378, None)
    );
    let bytes = std::fs::read(&path).unwrap();
    // As examples/data/README.md states it.
    assert_eq!(
        blake3::hash(&bytes).to_hex().as_str(),
        "acd0ce455b967fa4b7ae5dd2c02726cefd3edc1ee14c31f83a43b726cd316378"
    );
    let cut = bytes.len() / 2;
    assert!(refusal(&bytes[..cut]).contains("of 147631 declared entries are there"));
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        cells in prop::collection::btree_map((0u32..20, 0u32..30), -1e300f64..1e300, 0..100),
    ) {
        let mut text = format!("{GEN}% a comment\n\n20 30 {}\n", cells.len());
        for ((i, j), v) in &cells {
            text += &format!("{} {}  {v:e}\r\n", i + 1, j + 1);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let a = read(file.path()).unwrap();
        prop_assert_eq!(a.entries(), cells.len());
        for ((i, j), v) in cells {
            prop_assert_eq!(a.get(i as usize, j as usize).map(f64::to_bits), Some(v.to_bits()));
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(tail in prop::collection::vec(any::<u8>(), 0..200), text in "[0-9 .\n-]{0,80}") {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [SYM.as_bytes(), text.as_bytes(), &tail].concat()).unwrap();
        let _ = candidate(file.path());
        let dense = "%%MatrixMarket matrix array real symmetric\n";
        let _ = parse_dense("m", &[dense.as_bytes(), text.as_bytes(), &tail].concat(), 10_000);
    }
}
