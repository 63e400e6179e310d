//! Shared parts of the dense programs: matrices, threads, kept blocks, and σ as little-endian
//! fields.

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_kernels::dense::Mat;
use fiec_kernels::engine::Engine;
use fiec_kernels::matrix_market::Dense;
use fiec_kernels::rhs::load_case;
use fiec_kernels::{matrix_market, npy};
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{DenseSource, ELEMENTS_LIMIT};

use crate::program::{Capsule, Inputs, ProgramError};

/// Bytes of kept blocks if the grant states no memory.
const KEPT_BYTES: u64 = 4 << 30;

/// A matrix, or the rule that makes its columns.
pub(super) enum Source {
    Held(Arc<Mat>),
    Made { rows: usize, cols: usize, seed: u64 },
}

impl Source {
    /// Opens the matrix that parameter `field` names.
    pub fn open(
        field: &str,
        source: &DenseSource,
        inputs: &mut Inputs,
    ) -> Result<Self, ProgramError> {
        match source {
            DenseSource::File(name) => {
                let field = format!("{field}.file");
                let held =
                    inputs.get_file("dense", (&field, name), |bytes| from_bytes(name, bytes));
                Ok(Self::Held(held?))
            }
            DenseSource::Object(digest) => {
                let held = inputs.get_object("dense", *digest, |bytes| {
                    from_bytes(&format!("object {digest}"), &bytes)
                });
                Ok(Self::Held(held?))
            }
            DenseSource::Random(random) => {
                let (rows, cols) = random.shape().ok_or_else(|| {
                    ProgramError::Permanent(format!(
                        "params.{field}.random: must have n, or rows and cols"
                    ))
                })?;
                Ok(Self::Made {
                    rows: usize::try_from(rows).map_err(ProgramError::permanent)?,
                    cols: usize::try_from(cols).map_err(ProgramError::permanent)?,
                    seed: random.seed,
                })
            }
        }
    }

    /// Returns the whole matrix in memory, kept with the inputs.
    pub fn whole(self, inputs: &mut Inputs) -> Result<Arc<Mat>, ProgramError> {
        match self {
            Self::Held(a) => Ok(a),
            Self::Made { rows, cols, seed } => {
                let key = format!("dense random {rows} x {cols}, seed {seed}");
                inputs.get(&key, None, || Ok(self.columns(0, cols)))
            }
        }
    }

    pub fn rows(&self) -> usize {
        match self {
            Self::Held(a) => a.rows(),
            Self::Made { rows, .. } => *rows,
        }
    }

    pub fn cols(&self) -> usize {
        match self {
            Self::Held(a) => a.cols(),
            Self::Made { cols, .. } => *cols,
        }
    }

    /// A copy of columns `from..from+count`.
    pub fn columns(&self, from: usize, count: usize) -> Mat {
        match self {
            Self::Held(a) => {
                let rows = a.rows();
                let data = &a.data()[from * rows..(from + count) * rows];
                Mat::from_columns(rows, count, data.to_vec())
            }
            Self::Made { rows, seed, .. } => {
                let mut data = Vec::with_capacity(rows * count);
                for j in from..from + count {
                    data.extend_from_slice(&load_case(j as u64, *seed, *rows));
                }
                Mat::from_columns(*rows, count, data)
            }
        }
    }
}

fn named(name: &str, rule: impl std::fmt::Display) -> ProgramError {
    ProgramError::Permanent(format!("{name}: {rule}"))
}

/// Parses a `.npy` file, recognised by its first bytes, or a Matrix Market file.
fn from_bytes(name: &str, bytes: &[u8]) -> Result<Mat, ProgramError> {
    if npy::is_npy(bytes) {
        return npy::parse(bytes).map_err(|rule| named(name, rule));
    }
    if !matrix_market::is_matrix_market(bytes) {
        return Err(named(
            name,
            "is neither a .npy file (it would begin with \\x93NUMPY) nor a Matrix Market file \
             (with %%MatrixMarket matrix coordinate|array real|integer general|symmetric)",
        ));
    }
    let dense = matrix_market::parse_dense(name, bytes, ELEMENTS_LIMIT);
    let Dense { rows, cols, values } = dense.map_err(ProgramError::permanent)?;
    Ok(Mat::from_columns(rows, cols, values))
}

/// Threads, limited by the parameters and the grant.
pub(super) struct Threads {
    wanted: u32,
    pub engine: Engine,
}

impl Threads {
    pub fn new(wanted: u32) -> Result<Self, ProgramError> {
        let engine = Engine::new(wanted as usize).map_err(ProgramError::transient)?;
        Ok(Self { wanted, engine })
    }

    pub fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        let threads = self.wanted.min(grant.threads.unwrap_or(u32::MAX)).max(1) as usize;
        if threads != self.engine.threads() {
            self.engine = Engine::new(threads).map_err(ProgramError::transient)?;
        }
        Ok(())
    }
}

/// Finished blocks that this process holds, preferring the first ones. Every capsule uses all of
/// them in ascending order, so least-recently-used eviction would keep none.
pub(super) struct Kept<T> {
    limit: u64,
    bytes: u64,
    blocks: BTreeMap<usize, (Digest, u64, T)>,
}

impl<T> Kept<T> {
    pub fn new() -> Self {
        Self {
            limit: KEPT_BYTES,
            bytes: 0,
            blocks: BTreeMap::new(),
        }
    }

    /// Limits the blocks to a quarter of the granted memory. The matrix itself, the block in work
    /// and pending outputs need the rest.
    pub fn configure(&mut self, grant: &Grant) {
        self.limit = grant.memory_bytes.map_or(KEPT_BYTES, |bytes| bytes / 4);
        while self.bytes > self.limit {
            let Some((_, (_, bytes, _))) = self.blocks.pop_last() else {
                break;
            };
            self.bytes -= bytes;
        }
    }

    /// Takes block `index` out, if it has this digest and `good` accepts it.
    pub fn take(&mut self, index: usize, digest: Digest, good: impl Fn(&T) -> bool) -> Option<T> {
        let (found, bytes, block) = self.blocks.remove(&index)?;
        self.bytes -= bytes;
        (found == digest && good(&block)).then_some(block)
    }

    /// Keeps a block of this many bytes if there is room for it.
    pub fn put(&mut self, index: usize, digest: Digest, bytes: u64, block: T) {
        if let Some((_, bytes, _)) = self.blocks.remove(&index) {
            self.bytes -= bytes;
        }
        if self.bytes + bytes <= self.limit {
            self.bytes += bytes;
            self.blocks.insert(index, (digest, bytes, block));
        }
    }
}

/// Fetches a finished block column by its digest, and parses it as a matrix.
pub(super) fn fetch_block(
    cx: &mut Capsule,
    name: &str,
    digest: Digest,
    rows: usize,
    cols: usize,
) -> Result<Mat, ProgramError> {
    let bytes = cx.fetch(digest, npy::matrix_bytes(rows, cols) as u64)?;
    let block = npy::parse(&bytes).map_err(|rule| named(&format!("{name} ({digest})"), rule))?;
    if (block.rows(), block.cols()) != (rows, cols) {
        return Err(ProgramError::Permanent(format!(
            "{name} ({digest}) is {} x {}, but must be {rows} x {cols}",
            block.rows(),
            block.cols()
        )));
    }
    Ok(block)
}

/// Writes fields of σ in sequence.
pub(super) struct Fields<'a>(pub &'a mut Vec<u8>);

impl Fields<'_> {
    pub fn words(&mut self, words: &[u64]) {
        self.0.extend(words.iter().flat_map(|w| w.to_le_bytes()));
    }

    pub fn numbers(&mut self, numbers: &[f64]) {
        self.0.extend(numbers.iter().flat_map(|v| v.to_le_bytes()));
    }

    pub fn digests(&mut self, digests: &[Digest]) {
        digests.iter().for_each(|d| self.0.extend_from_slice(&d.0));
    }
}

/// Reads fields of σ in sequence.
pub(super) struct Read<'a> {
    rest: &'a [u8],
    program: &'static str,
}

impl<'a> Read<'a> {
    pub fn new(
        bytes: &'a [u8],
        magic: &[u8; 8],
        program: &'static str,
    ) -> Result<Self, ProgramError> {
        let rest = bytes;
        let mut read = Self { rest, program };
        if read.bytes(8)? == magic {
            Ok(read)
        } else {
            Err(read.wrong())
        }
    }

    pub fn wrong(&self) -> ProgramError {
        ProgramError::Permanent(format!("not a state of {}", self.program))
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], ProgramError> {
        let Some((taken, rest)) = self.rest.split_at_checked(count) else {
            return Err(self.wrong());
        };
        self.rest = rest;
        Ok(taken)
    }

    fn chunks<const N: usize>(&mut self, count: usize) -> Result<&'a [[u8; N]], ProgramError> {
        // Check before allocating: the bytes must be there.
        let bytes = count.checked_mul(N).ok_or_else(|| self.wrong())?;
        Ok(self.bytes(bytes)?.as_chunks().0)
    }

    pub fn words<const N: usize>(&mut self) -> Result<[u64; N], ProgramError> {
        let found = self.chunks::<8>(N)?;
        Ok(std::array::from_fn(|i| u64::from_le_bytes(found[i])))
    }

    /// Reads a word that counts elements in memory.
    pub fn count(&mut self) -> Result<usize, ProgramError> {
        let [word] = self.words()?;
        usize::try_from(word).map_err(|_| self.wrong())
    }

    pub fn numbers(&mut self, count: usize) -> Result<Vec<f64>, ProgramError> {
        let found = self.chunks(count)?.iter();
        Ok(found.map(|b| f64::from_le_bytes(*b)).collect())
    }

    pub fn shorts(&mut self, count: usize) -> Result<Vec<u32>, ProgramError> {
        let found = self.chunks(count)?.iter();
        Ok(found.map(|b| u32::from_le_bytes(*b)).collect())
    }

    pub fn digests(&mut self, count: usize) -> Result<Vec<Digest>, ProgramError> {
        let found = self.chunks(count)?.iter();
        Ok(found.map(|b| Digest(*b)).collect())
    }

    pub fn end(self) -> Result<(), ProgramError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.wrong())
        }
    }
}

/// Digest of the digests, in order.
pub(super) fn chained(digests: &[Digest]) -> Digest {
    let bytes: Vec<u8> = digests.iter().flat_map(|d| d.0).collect();
    Digest::of(&bytes)
}
