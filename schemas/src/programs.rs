//! The built-in programs and their parameters, so that a submission is checked field by field
//! before anything is created.

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
/// A program that does declared work with a declared state; for tests and benches.
pub const SYNTHETIC: &str = "synthetic@1";
/// What σ of `synthetic@1` begins with, in bytes.
pub const SYNTHETIC_HEADER: u64 = 24;
/// A matrix product in tiles.
pub const GEMM: &str = "gemm@1";
/// LU factorization by block columns.
pub const LU: &str = "lu@1";
/// QR factorization by block columns.
pub const QR: &str = "qr@1";
/// The canaries: whether this machine keeps the numeric contracts.
pub const CANARY: &str = "canary@1";
/// Every built-in program.
pub const BUILT_IN: [&str; 6] = [CANARY, CG, GEMM, LU, QR, SYNTHETIC];

/// Parameters of `cg@1`: solves A·x = b by Jacobi-preconditioned conjugate gradients, once for
/// each load case. One capsule is `iterations_per_capsule` iterations; σ holds x, r, p and the
/// scalars. Reductions have a fixed order, so that digests do not depend on threads or node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CgParams {
    /// The matrix.
    pub matrix: MatrixSource,
    /// Stop when ‖r‖/‖b‖ is at most this; in (0, 1).
    #[serde(default = "default_tolerance")]
    pub tolerance: f64,
    /// Fail when one load case needs more iterations than this.
    #[serde(default = "default_max_iterations")]
    pub max_iterations: u64,
    /// Iterations in one capsule.
    #[serde(default = "default_iterations_per_capsule")]
    pub iterations_per_capsule: u64,
    /// Right-hand sides, solved one after the other. Case 0 is A·1, the others are drawn from
    /// `seed`.
    #[serde(default = "default_load_cases")]
    pub load_cases: u64,
    /// Seed of the right-hand sides.
    #[serde(default)]
    pub seed: u64,
    /// Threads for the kernels; changes the speed, never the bits.
    #[serde(default = "default_threads")]
    pub threads: u32,
}

/// Where a matrix comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum MatrixSource {
    /// A Matrix Market file (`coordinate real symmetric` or `general`), absolute or relative to
    /// the worker's data folder; it must be readable on every node.
    File(String),
    /// Such a file that was pushed (`fiec data push`), by its digest.
    Object(Digest),
    /// The five-point Laplacian on an n × n grid.
    #[serde(rename = "poisson2d")]
    Poisson2d {
        /// Grid points a side.
        n: u32,
    },
    /// The seven-point Laplacian on an n × n × n grid.
    #[serde(rename = "poisson3d")]
    Poisson3d {
        /// Grid points a side.
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

/// Parameters of `synthetic@1`: `capsules` capsules, each of `work_us` of computation, with a σ
/// of `state_bytes` that changes at every boundary and folds into the result's digest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticParams {
    /// Capsules in all; 0 completes at once.
    #[serde(default = "one")]
    pub capsules: u64,
    /// Bytes of σ.
    #[serde(default)]
    pub state_bytes: u64,
    /// Keeps them in pages of so many bytes outside of σ, which then has their digests; a multiple
    /// of 64 from 1,024 on. 0: σ is whole.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub page_bytes: u64,
    /// What changes in σ with each capsule, in place of 64 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<SyntheticChange>,
    /// Microseconds of computation in one capsule.
    #[serde(default)]
    pub work_us: u64,
    /// Exits with status 1 when the capsule of this index begins, after writing to stderr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash_at: Option<u64>,
    /// Crashes there once for each node: a file of this name in the worker's run folder lets a later
    /// attempt pass. 1 to 64 letters, digits, `_` or `-`. Without it, every attempt crashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash_marker: Option<String>,
    /// Prints a line at each boundary.
    #[serde(default)]
    pub print: bool,
    /// Asks for memory beyond its grant; the answer is its note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve: Option<SyntheticReserve>,
    /// Looks around and asks for another grant; what it was told is its note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask: Option<SyntheticAsk>,
    /// Emits a message `tick` with its index after every so many capsules; 0: never.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub emit_every: u64,
}

/// What `synthetic@1` asks for beyond its grant. It uses nothing of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticReserve {
    /// Before the capsule of this index, and again when it goes on behind it elsewhere.
    pub at: u64,
    /// Bytes of the host's memory in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes of its device's memory in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory_bytes: Option<u64>,
}

/// What `synthetic@1` asks of its node. It does not use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticAsk {
    /// Before each capsule whose index is a multiple of this, above 0.
    pub every: u64,
    /// Threads.
    pub threads: u32,
}

/// A part of σ that changes with each capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SyntheticChange {
    /// Bytes in all, at least 8 for each place.
    pub bytes: u64,
    /// Places over which they are spread, told by σ itself.
    #[serde(default = "one_place")]
    pub places: u32,
    /// Inserted there, and as many dropped at the end; else in place.
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

/// Parameters of `canary@1`: none. One capsule is one case of the suite; the result says of each
/// what digest its bits have and how large its error is against its bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CanaryParams {}

impl CanaryParams {
    /// Reads and checks the parameters.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn from_value(params: &Value) -> Result<Self, FieldError> {
        parse(params)
    }
}

fn parse<T: DeserializeOwned>(params: &Value) -> Result<T, FieldError> {
    // A derived reader takes a list for an object whose fields are in order.
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
    /// Reads and checks the parameters.
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
    /// Reads and checks the parameters.
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
        let is_plain = |name: &String| {
            (1..=64).contains(&name.len())
                && name
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
        };
        if let Some(name) = p.crash_marker.as_ref().filter(|name| !is_plain(name)) {
            return Err(FieldError::new(
                "params.crash_marker",
                format!("must have 1 to 64 letters, digits, '_' or '-', but is {name:?}"),
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

/// Checks whether parameters, which [`check`] let pass, go with a contract.
///
/// # Errors
/// The field and the rule.
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

/// Checks a program's name, and the parameters of a built-in. Whether any other program is
/// registered is for those to say who can look (see [`crate::package::unregistered`]).
///
/// # Errors
/// The field and the rule: a name that cannot be one, or a parameter that is refused.
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
