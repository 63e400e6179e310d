//! Parameters of the dense programs: products and factorizations.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{default_threads, parse};
use crate::ids::Digest;
use crate::submission::FieldError;

/// Most rows or columns of a dense matrix.
pub const SIDE_LIMIT: u64 = 1 << 20;
/// Most elements of a dense matrix: 64 GiB of doubles.
pub const ELEMENTS_LIMIT: u64 = 1 << 33;

/// Source of a dense matrix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DenseSource {
    /// A `.npy` file of little-endian doubles, or a Matrix Market file, absolute or relative to the
    /// worker's data folder. It must be readable on every node.
    File(String),
    /// Such a file that was pushed (`fiec data push`), by its digest.
    Object(Digest),
    /// Generated from a seed, with elements in [−1, 1).
    Random(RandomDense),
}

/// A matrix that can be generated again from a few integers: column j is load case j of `seed` (see
/// `fiec_kernels::rhs`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RandomDense {
    /// Rows and columns of a square matrix. Otherwise give `rows` and `cols`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u64>,
    /// Rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cols: Option<u64>,
    /// Seed of the elements.
    #[serde(default)]
    pub seed: u64,
}

impl RandomDense {
    /// Rows and columns. `None` if the fields contradict each other.
    pub fn shape(&self) -> Option<(u64, u64)> {
        match (self.n, self.rows, self.cols) {
            (Some(n), None, None) => Some((n, n)),
            (None, Some(rows), Some(cols)) => Some((rows, cols)),
            _ => None,
        }
    }
}

/// The order of operations, which determines the bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// FIEC's order: the same bits on every processor and device.
    #[default]
    Chain512,
    /// The order of the device vendor's library (cuBLAS, cuSOLVER). Results are within error bounds
    /// only, so not under the bitwise contract. Without a device it is computed as `chain512`.
    Vendor,
}

impl Arithmetic {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A range of tiles: from `from` up to, but without, `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TileRange {
    /// The first tile.
    pub from: u64,
    /// The tile after the last one.
    pub to: u64,
}

impl TileRange {
    /// Number of tiles.
    pub fn count(self) -> u64 {
        self.to.saturating_sub(self.from)
    }

    /// The tiles that a holder with this range left gives away in a split: the last half. `None` if
    /// fewer than two tiles are left.
    pub fn last_half(self) -> Option<Self> {
        let gives = self.count() / 2;
        (gives > 0).then_some(Self {
            from: self.to - gives,
            to: self.to,
        })
    }
}

/// Parameters of `gemm@1`: C = A·B in tiles. A capsule is one tile. Its output is `c-<i>-<j>`, a
/// `.npy` file of the tile in tile row i and tile column j. Tiles are numbered row by row and are
/// independent, so a batch may divide them into ranges.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GemmParams {
    /// A, with m rows and k columns.
    pub a: DenseSource,
    /// B, with k rows and n columns.
    pub b: DenseSource,
    /// Rows and columns of a tile (fewer at the border), 1 to 16384. It changes the outputs, but no
    /// bit of C.
    #[serde(default = "default_tile")]
    pub tile: u32,
    /// The tiles to compute. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiles: Option<TileRange>,
    /// Most threads. They change the speed, never the bits.
    #[serde(default = "default_threads")]
    pub threads: u32,
    /// The order of operations.
    #[serde(default, skip_serializing_if = "Arithmetic::is_default")]
    pub arithmetic: Arithmetic,
}

/// Parameters of `lu@1`: P·A = L·U with partial pivoting, left-looking. A capsule is one block
/// column, and its output is `lu-<k>`. The last one also makes `pivots`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LuParams {
    /// A, square.
    pub matrix: DenseSource,
    /// Columns of a block column, 1 to 4096. The bits depend on it.
    #[serde(default = "default_lu_block")]
    #[schemars(range(min = 1, max = 4096))]
    pub block: u32,
    /// Most threads. They change the speed, never the bits.
    #[serde(default = "default_threads")]
    pub threads: u32,
    /// The order of operations.
    #[serde(default, skip_serializing_if = "Arithmetic::is_default")]
    pub arithmetic: Arithmetic,
}

/// Parameters of `qr@1`: A = Q·R by Householder reflectors in compact WY form, left-looking. A
/// capsule is one block column, and its output is `qr-<k>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QrParams {
    /// A, with at least as many rows as columns.
    pub matrix: DenseSource,
    /// Columns of a block column, 1 to 4096. The bits depend on it.
    #[serde(default = "default_qr_block")]
    #[schemars(range(min = 1, max = 4096))]
    pub block: u32,
    /// Most threads. They change the speed, never the bits.
    #[serde(default = "default_threads")]
    pub threads: u32,
    /// The order of operations.
    #[serde(default, skip_serializing_if = "Arithmetic::is_default")]
    pub arithmetic: Arithmetic,
}

fn default_tile() -> u32 {
    512
}
fn default_lu_block() -> u32 {
    256
}
fn default_qr_block() -> u32 {
    128
}

/// True if checked parameters of a dense program ask for the vendor's bits, which the bitwise
/// contract cannot promise.
pub(super) fn is_vendor(params: &Value) -> bool {
    params.get("arithmetic").and_then(Value::as_str) == Some("vendor")
}

fn within(field: &str, value: u32, limit: u32) -> Result<(), FieldError> {
    if (1..=limit).contains(&value) {
        return Ok(());
    }
    Err(FieldError::new(
        format!("params.{field}"),
        format!("must be 1 to {limit}, but is {value}"),
    ))
}

/// Checks a source. Returns its shape if the parameters contain it.
fn check_source(field: &str, source: &DenseSource) -> Result<Option<(u64, u64)>, FieldError> {
    let fail =
        |part: &str, rule: String| Err(FieldError::new(format!("params.{field}.{part}"), rule));
    match source {
        DenseSource::File(path) if path.is_empty() => fail("file", "must name a file".to_owned()),
        DenseSource::File(_) | DenseSource::Object(_) => Ok(None),
        DenseSource::Random(random) => match random.shape() {
            None => fail("random", "must have n, or rows and cols".to_owned()),
            Some((rows, cols)) if rows == 0 || cols == 0 => {
                fail("random", "must have at least one row and column".to_owned())
            }
            Some((rows, cols))
                if rows > SIDE_LIMIT || cols > SIDE_LIMIT || rows * cols > ELEMENTS_LIMIT =>
            {
                fail(
                    "random",
                    format!(
                        "must be at most {SIDE_LIMIT} a side and {ELEMENTS_LIMIT} elements, but \
                         is {rows} x {cols}"
                    ),
                )
            }
            shape => Ok(shape),
        },
    }
}

impl GemmParams {
    /// Parses and checks the parameters.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn from_value(params: &Value) -> Result<Self, FieldError> {
        let p: Self = parse(params)?;
        let a = check_source("a", &p.a)?;
        let b = check_source("b", &p.b)?;
        if let (Some((_, k)), Some((rows, _))) = (a, b)
            && k != rows
        {
            return Err(FieldError::new(
                "params.b",
                format!("must have as many rows as a has columns ({k}), but has {rows}"),
            ));
        }
        within("tile", p.tile, 16_384)?;
        within("threads", p.threads, 1024)?;
        match p.tiles {
            Some(TileRange { from, to }) if from >= to => Err(FieldError::new(
                "params.tiles",
                format!("must have from below to, but is {from} to {to}"),
            )),
            _ => Ok(p),
        }
    }
}

impl LuParams {
    /// Parses and checks the parameters.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn from_value(params: &Value) -> Result<Self, FieldError> {
        let p: Self = parse(params)?;
        if let Some((rows, cols)) = check_source("matrix", &p.matrix)?
            && rows != cols
        {
            return Err(FieldError::new(
                "params.matrix",
                format!("must be square, but is {rows} x {cols}"),
            ));
        }
        within("block", p.block, 4096)?;
        within("threads", p.threads, 1024)?;
        Ok(p)
    }
}

impl QrParams {
    /// Parses and checks the parameters.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn from_value(params: &Value) -> Result<Self, FieldError> {
        let p: Self = parse(params)?;
        if let Some((rows, cols)) = check_source("matrix", &p.matrix)?
            && rows < cols
        {
            return Err(FieldError::new(
                "params.matrix",
                format!("must have at least as many rows as columns, but is {rows} x {cols}"),
            ));
        }
        within("block", p.block, 4096)?;
        within("threads", p.threads, 1024)?;
        Ok(p)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GEMM, LU, QR, check, check_contract};
    use crate::submission::Contract;
    use serde_json::json;

    #[test]
    fn vendor_arithmetic_is_refused_under_the_bitwise_contract_by_its_field() {
        let params = json!({"matrix": {"random": {"n": 8}}, "arithmetic": "vendor"});
        assert_eq!(check(LU, &params), Ok(()));
        let refused = check_contract(LU, &params, Contract::Bitwise).unwrap_err();
        assert_eq!(refused.field, "params.arithmetic");
        assert!(refused.to_string().contains("bounded"), "{refused}");
        assert_eq!(check_contract(LU, &params, Contract::Bounded), Ok(()));
        let plain = json!({"matrix": {"random": {"n": 8}}, "arithmetic": "chain512"});
        assert_eq!(check_contract(LU, &plain, Contract::Bitwise), Ok(()));
        let unknown = json!({"matrix": {"random": {"n": 8}}, "arithmetic": "fast"});
        let error = check(LU, &unknown).unwrap_err();
        assert_eq!(error.field, "params.arithmetic");
    }

    #[test]
    fn every_bad_parameter_names_its_field_and_rule() {
        let square = json!({"random": {"n": 8, "seed": 1}});
        let with = |field: &str, value: serde_json::Value| {
            let mut params = json!({"a": square, "b": square});
            params[field] = value;
            params
        };
        for (program, params, field, rule) in [
            (GEMM, json!([1]), "params", "object"),
            (GEMM, json!({"a": square}), "params", "missing field `b`"),
            (
                GEMM,
                with("a", json!({"file": ""})),
                "params.a.file",
                "name a file",
            ),
            (
                GEMM,
                with("a", json!({"object": "12"})),
                "params.a",
                "digest",
            ),
            (
                GEMM,
                with("a", json!({"random": {"seed": 1}})),
                "params.a.random",
                "n, or rows",
            ),
            (
                GEMM,
                with("a", json!({"random": {"n": 3, "rows": 3, "cols": 3}})),
                "params.a.random",
                "n, or rows",
            ),
            (
                GEMM,
                with("a", json!({"random": {"n": 0}})),
                "params.a.random",
                "at least one",
            ),
            (
                GEMM,
                with("a", json!({"random": {"n": u64::MAX}})),
                "params.a.random",
                "at most",
            ),
            (
                GEMM,
                with("b", json!({"random": {"rows": 9, "cols": 8}})),
                "params.b",
                "columns (8)",
            ),
            (GEMM, with("tile", json!(0)), "params.tile", "1 to 16384"),
            (
                GEMM,
                with("threads", json!(0)),
                "params.threads",
                "1 to 1024",
            ),
            (
                GEMM,
                with("tiles", json!({"from": 3, "to": 3})),
                "params.tiles",
                "below",
            ),
            (GEMM, with("tiles", json!([1, 2])), "params.tiles", "list"),
            (GEMM, with("colour", json!(1)), "params", "colour"),
            (
                LU,
                json!({"matrix": square, "block": 5000}),
                "params.block",
                "4096",
            ),
            (
                LU,
                json!({"matrix": {"random": {"rows": 3, "cols": 2}}}),
                "params.matrix",
                "square",
            ),
            (
                QR,
                json!({"matrix": {"random": {"rows": 2, "cols": 3}}}),
                "params.matrix",
                "as many rows",
            ),
            (
                QR,
                json!({"matrix": square, "block": 0}),
                "params.block",
                "4096",
            ),
        ] {
            let error = check(program, &params).unwrap_err();
            assert!(
                error.field.starts_with(field) && error.to_string().contains(rule),
                "{program} {params}: {error}"
            );
        }
        for (program, params) in [
            (GEMM, with("tiles", json!({"from": 0, "to": 4}))),
            (LU, json!({"matrix": {"file": "a.npy"}, "threads": 4})),
            (QR, json!({"matrix": {"random": {"rows": 9, "cols": 3}}})),
        ] {
            assert_eq!(check(program, &params), Ok(()));
        }
    }
}
