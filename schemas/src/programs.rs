//! The built-in programs and their parameters. A submission is checked field by field before
//! anything is created.

mod dense;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::Digest;
use crate::package::ProgramName;
use crate::strict::Strict;
use crate::submission::{Contract, FieldError};

pub use dense::{
    Arithmetic, DenseSource, ELEMENTS_LIMIT, GemmParams, LuParams, QrParams, RandomDense, TileRange,
};

/// Conjugate gradients.
pub const CG: &str = "cg@1";
/// A program with declared work and a declared state, for tests and benches.
pub const SYNTHETIC: &str = "synthetic@1";
/// Length of the header of σ of `synthetic@1`, in bytes.
pub const SYNTHETIC_HEADER: u64 = 24;
/// A matrix product in tiles.
pub const GEMM: &str = "gemm@1";
/// LU factorization by block columns.
pub const LU: &str = "lu@1";
/// QR factorization by block columns.
pub const QR: &str = "qr@1";
/// The canaries, which check that this machine keeps the numeric contracts.
pub const CANARY: &str = "canary@1";
/// Every built-in program.
pub const BUILT_IN: [&str; 6] = [CANARY, CG, GEMM, LU, QR, SYNTHETIC];

/// Parameters of `cg@1`, which solves A·x = b by Jacobi-preconditioned conjugate gradients, once
/// for each load case. One capsule is `iterations_per_capsule` iterations. σ holds x, r, p and the
/// scalars. Sums have a fixed order, so digests do not depend on threads or node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CgParams {
    /// The matrix.
    pub matrix: MatrixSource,
    /// Stop if ‖r‖/‖b‖ is at most this; in (0, 1).
    #[serde(default = "default_tolerance")]
    pub tolerance: f64,
    /// Fail if one load case needs more iterations than this.
    #[serde(default = "default_max_iterations")]
    pub max_iterations: u64,
    /// Iterations in one capsule.
    #[serde(default = "default_iterations_per_capsule")]
    pub iterations_per_capsule: u64,
    /// Number of right-hand sides, solved one after the other. Case 0 is A·1. The others are drawn
    /// from `seed`.
    #[serde(default = "default_load_cases")]
    pub load_cases: u64,
    /// Seed of the right-hand sides.
    #[serde(default)]
    pub seed: u64,
    /// Threads of the kernels. They change the speed, never the bits.
    #[serde(default = "default_threads")]
    pub threads: u32,
}

/// Source of a matrix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum MatrixSource {
    /// A Matrix Market file (`coordinate real symmetric` or `general`), absolute or relative to the
    /// worker's data folder. It must be readable on every node.
    File(String),
    /// Such a file that was pushed (`fiec data push`), by its digest.
    Object(Digest),
    /// The five-point Laplacian on an n × n grid.
    #[serde(rename = "poisson2d")]
    Poisson2d {
        /// Grid points per side.
        n: u32,
    },
    /// The seven-point Laplacian on an n × n × n grid.
    #[serde(rename = "poisson3d")]
    Poisson3d {
        /// Grid points per side.
        n: u32,
    },
}

fn default_tolerance() -> f64 {
    1e-10
}
fn default_max_iterations() -> u64 {
    100_000
}
fn default_iterations_per_capsule() -> u64 {
    10
}
fn default_load_cases() -> u64 {
    1
}
fn default_threads() -> u32 {
    1
}

/// Parameters of `synthetic@1`. Each of `capsules` capsules computes for `work_us`. σ has
/// `state_bytes`, changes at every boundary, and is part of the result's digest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticParams {
    /// Number of capsules. 0 completes at once.
    #[serde(default = "one")]
    pub capsules: u64,
    /// Bytes of σ.
    #[serde(default)]
    pub state_bytes: u64,
    /// Keeps them in pages of this many bytes outside σ, which then has their digests. A multiple
    /// of 64, at least 1,024. 0: σ is whole.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub page_bytes: u64,
    /// The bytes of σ that change with each capsule. Default: 64 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<SyntheticChange>,
    /// Computing time of one capsule in µs.
    #[serde(default)]
    pub work_us: u64,
    /// Further time of one capsule in µs, in which it waits without computing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rest_us: u64,
    /// Exits with status 1 when the capsule with this index begins, after writing to stderr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash_at: Option<u64>,
    /// Crashes there only while the execution has crashed fewer times than this, on all nodes
    /// together. Default: every attempt crashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash_attempts: Option<u64>,
    /// Prints a line at each boundary.
    #[serde(default)]
    pub print: bool,
    /// Reserves memory beyond its grant. Its note has the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve: Option<SyntheticReserve>,
    /// Reads its surroundings and asks for another grant. Its note has the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask: Option<SyntheticAsk>,
    /// Emits a message `tick` with its index after each group of this many capsules. 0: never.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub emit_every: u64,
}

/// A reservation of `synthetic@1` beyond its grant. The program does not use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticReserve {
    /// Reserves before the capsule with this index, and again when it continues after it on another
    /// node.
    pub at: u64,
    /// Bytes of host memory in total.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes of device memory in total.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_bytes: Option<u64>,
}

/// A request of `synthetic@1` to its node. The program does not use the grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticAsk {
    /// Asks before each capsule whose index is a multiple of this, which must be above 0.
    pub every: u64,
    /// Threads.
    pub threads: u32,
}

/// The bytes of σ that change with each capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticChange {
    /// Bytes in total, at least 8 for each place.
    pub bytes: u64,
    /// Number of places over which they are spread, derived from σ.
    #[serde(default = "one_place")]
    pub places: u32,
    /// True: bytes are inserted there, and as many dropped at the end. False: bytes change in
    /// place.
    #[serde(default)]
    pub insert: bool,
}

fn one_place() -> u32 {
    1
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn one() -> u64 {
    1
}

/// Parameters of `canary@1`: none. One capsule is one case of the suite. The result has, for each
/// case, the digest of its bits, and its error with its bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CanaryParams {}

impl CanaryParams {
    /// Parses and checks the parameters.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn from_value(params: &Value) -> Result<Self, FieldError> {
        parse(params)
    }
}

fn parse<T: DeserializeOwned>(params: &Value) -> Result<T, FieldError> {
    // A derived parser accepts a list for an object if its values are in the order of the fields.
    if !params.is_object() {
        return Err(FieldError::new("params", "must be an object"));
    }
    serde_path_to_error::deserialize(Strict(params)).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." {
            "params".to_owned()
        } else {
            format!("params.{path}")
        };
        FieldError::new(field, crate::plain::refusal(&error.inner().to_string()))
    })
}

impl CgParams {
    /// Parses and checks the parameters.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn from_value(params: &Value) -> Result<Self, FieldError> {
        let p: Self = parse(params)?;
        let fail =
            |field: &str, rule: String| Err(FieldError::new(format!("params.{field}"), rule));
        if !(p.tolerance > 0.0 && p.tolerance < 1.0) {
            return fail(
                "tolerance",
                format!("must be above 0 and below 1, but is {}", p.tolerance),
            );
        }
        for (field, value) in [
            ("max_iterations", p.max_iterations),
            ("iterations_per_capsule", p.iterations_per_capsule),
            ("load_cases", p.load_cases),
            ("threads", u64::from(p.threads)),
        ] {
            if value == 0 {
                return fail(field, "must be at least 1".to_owned());
            }
        }
        if p.threads > 1024 {
            return fail(
                "threads",
                format!("must be at most 1024, but is {}", p.threads),
            );
        }
        match &p.matrix {
            MatrixSource::File(path) if path.is_empty() => {
                fail("matrix.file", "must name a file".to_owned())
            }
            MatrixSource::Poisson2d { n } if !(2..=20_000).contains(n) => fail(
                "matrix.poisson2d.n",
                format!("must be 2 to 20000, but is {n}"),
            ),
            MatrixSource::Poisson3d { n } if !(2..=700).contains(n) => fail(
                "matrix.poisson3d.n",
                format!("must be 2 to 700, but is {n}"),
            ),
            _ => Ok(p),
        }
    }
}

impl SyntheticParams {
    /// Parses and checks the parameters.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn from_value(params: &Value) -> Result<Self, FieldError> {
        let p: Self = parse(params)?;
        if p.state_bytes > 1 << 32 {
            return Err(FieldError::new(
                "params.state_bytes",
                format!("must be at most 4 GiB, but is {}", p.state_bytes),
            ));
        }
        if p.page_bytes != 0 && (p.page_bytes < 1024 || !p.page_bytes.is_multiple_of(64)) {
            return Err(FieldError::new(
                "params.page_bytes",
                format!(
                    "must be 0, or a multiple of 64 from 1024 on, but is {}",
                    p.page_bytes
                ),
            ));
        }
        if let Some(change) = &p.change {
            let fail = |field: &str, rule: String| {
                Err(FieldError::new(format!("params.change{field}"), rule))
            };
            if p.page_bytes != 0 {
                return fail("", "must not be given with page_bytes".to_owned());
            }
            if !(1..=65_536).contains(&change.places) {
                return fail(
                    ".places",
                    format!("must be 1 to 65536, but is {}", change.places),
                );
            }
            let most = p.state_bytes.saturating_sub(SYNTHETIC_HEADER);
            if change.bytes < 8 * u64::from(change.places) || change.bytes > most {
                return fail(
                    ".bytes",
                    format!(
                        "must be at least 8 for each of {} places and at most {most}, \
                         state_bytes less {SYNTHETIC_HEADER}, but is {}",
                        change.places, change.bytes
                    ),
                );
            }
        }
        Ok(p)
    }
}

/// Checks that parameters, which [`check`] accepted, allow a contract.
///
/// # Errors
/// The field and the rule that it breaks.
pub fn check_contract(program: &str, params: &Value, contract: Contract) -> Result<(), FieldError> {
    if contract == Contract::Bitwise
        && matches!(program, GEMM | LU | QR)
        && dense::is_vendor(params)
    {
        return Err(FieldError::new(
            "params.arithmetic",
            "\"vendor\" is not bitwise: its bits depend on library, device and driver; submit with \
             \"contract\": \"bounded\", or leave it at \"chain512\"",
        ));
    }
    Ok(())
}

/// Checks a program's name, and the parameters of a built-in program. The caller looks up whether
/// another program is registered (see [`crate::package::unregistered`]).
///
/// # Errors
/// The field and the rule that it breaks.
pub fn check(program: &str, params: &Value) -> Result<(), FieldError> {
    match program {
        CANARY => CanaryParams::from_value(params).map(|_| ()),
        CG => CgParams::from_value(params).map(|_| ()),
        GEMM => GemmParams::from_value(params).map(|_| ()),
        LU => LuParams::from_value(params).map(|_| ()),
        QR => QrParams::from_value(params).map(|_| ()),
        SYNTHETIC => SyntheticParams::from_value(params).map(|_| ()),
        _ => program.parse::<ProgramName>().map(|_| ()),
    }
}
