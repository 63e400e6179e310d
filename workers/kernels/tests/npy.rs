//! `.npy` files: what is written is read, and every damage is named.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use fiec_kernels::dense::Mat;
use fiec_kernels::npy;
use proptest::prelude::*;

fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend_from_slice(&(header.len() as u16).to_le_bytes());
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

fn doubles(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

proptest! {
    #[test]
    fn what_is_written_is_read_to_the_bit(rows in 1usize..9, cols in 1usize..9, seed: u64) {
        let values = fiec_kernels::rhs::load_case(1, seed, rows * cols);
        let a = Mat::from_columns(rows, cols, values);
        let bytes = npy::matrix(a.view());
        prop_assert_eq!((bytes.len() - 8 * rows * cols) % 64, 0);
        prop_assert_eq!(bytes.len(), npy::matrix_bytes(rows, cols));
        prop_assert_eq!(npy::parse(&bytes).unwrap(), a);
    }

    #[test]
    fn no_bytes_at_all_make_it_panic(mut bytes: Vec<u8>, magic: bool) {
        if magic {
            bytes.splice(0..0, *b"\x93NUMPY\x01\x00\x40\x00");
        }
        let _ = npy::parse(&bytes);
    }
}

#[test]
fn c_and_fortran_order_mean_the_same_matrix() {
    let c = file(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }   \n",
        &doubles(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    );
    let f = file(
        "{'shape':(2,3),'fortran_order':True,\"descr\":\"<f8\"}",
        &doubles(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]),
    );
    let expected = Mat::from_columns(2, 3, vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    assert_eq!(npy::parse(&c).unwrap(), expected);
    assert_eq!(npy::parse(&f).unwrap(), expected);
    let mut second = b"\x93NUMPY\x02\x00".to_vec();
    second.extend_from_slice(&((c.len() - 10 - 48) as u32).to_le_bytes());
    second.extend_from_slice(&c[10..]);
    assert_eq!(npy::parse(&second).unwrap(), expected);
}

#[test]
fn every_malformed_file_is_an_error_that_names_the_rule() {
    let good = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2), }";
    let data = doubles(&[1.0, 2.0]);
    assert!(npy::parse(&file(good, &data)).is_ok());
    let with = |header: &str| file(header, &data);
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"PK\x03\x04".to_vec(), "does not begin with"),
        (b"\x93NUMPY".to_vec(), "truncated"),
        (b"\x93NUMPY\x01\x00\x10".to_vec(), "truncated"),
        (
            b"\x93NUMPY\x09\x00\x10\x00".to_vec(),
            "another .npy version",
        ),
        (
            b"\x93NUMPY\x01\x00\xff\x00{".to_vec(),
            "ends after 11 of 265",
        ),
        (with("'descr'"), "expected '{'"),
        (with("{descr: '<f8'}"), "a key in quotes"),
        (with("{'descr' '<f8'}"), "expected ':'"),
        (with("{'descr': '<f8"), "closing quote"),
        (with("{'descr': <f8}"), "a type in quotes"),
        (with(&good.replace("<f8", ">f8")), "descr is not '<f8'"),
        (with(&good.replace("<f8", "<f4")), "descr is not '<f8'"),
        (with(&good.replace("False", "0")), "True or False"),
        (with(&good.replace("(1, 2)", "2")), "expected '('"),
        (with(&good.replace("(1, 2)", "(2,)")), "1 dimension"),
        (with(&good.replace("(1, 2)", "(1, 2, 1)")), "3 dimension"),
        (with(&good.replace("(1, 2)", "(-1, 2)")), "whole number"),
        (with(&good.replace("(1, 2)", "(0, 2)")), "at least one row"),
        (
            with(&good.replace("(1, 2)", "(1, 3)")),
            "16 bytes of data where 1 x 3 doubles need 24",
        ),
        (
            with(&good.replace("(1, 2)", "(4294967296, 4294967296)")),
            "more than any file",
        ),
        (
            with(&good.replace("'descr'", "'colour'")),
            "a key is none of",
        ),
        (with("{'descr': '<f8', 'descr': '<f8'}"), "given twice"),
        (
            with("{'descr': '<f8', 'shape': (1, 2)}"),
            "\"fortran_order\" is missing",
        ),
        (with(&format!("{good} x")), "nothing but spaces"),
        (file(good, &data[..15]), "15 bytes of data"),
        (file(good, &[&data[..], &[0]].concat()), "17 bytes of data"),
        (
            file(good, &doubles(&[1.0, f64::NAN])),
            "element (0, 1) is not a finite number",
        ),
    ];
    for (bytes, words) in cases {
        let error = npy::parse(&bytes).unwrap_err().to_string();
        assert!(error.contains(words), "{error:?} does not say {words:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = npy::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("regular file"), "{error}");
    let error = npy::read(folder.path().join("no.npy"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("cannot be read"), "{error}");
}

#[test]
fn vectors_have_the_header_that_numpy_writes() {
    let bytes = npy::vector(&[1.0, 2.0]);
    let text = String::from_utf8_lossy(&bytes[10..bytes.len() - 16]);
    assert!(text.starts_with("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }"));
    let bytes = npy::integers(&[3, 0]);
    assert!(String::from_utf8_lossy(&bytes).contains("'<i8'"));
    assert_eq!(bytes[bytes.len() - 16..][..8], 3u64.to_le_bytes());
}
