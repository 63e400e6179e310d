//! The encoding of a CG solve's state.
//!
//! Header of 48 bytes, little endian: magic `FIECCGS1`, version `u32` = 1, reserved `u32` = 0, n
//! `u64`, iteration `u64`, rz `f64`, rr `f64`. Then x, r, p, each n `f64`. Nothing follows.

use crate::cg::CgState;

const MAGIC: [u8; 8] = *b"FIECCGS1";
const VERSION: u32 = 1;
/// Bytes before the vectors.
pub const HEADER_BYTES: usize = 48;

/// The reason why bytes are no CG state.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StateError {
    #[error("a CG state of {bytes} bytes is shorter than its {HEADER_BYTES}-byte header")]
    Short { bytes: usize },
    #[error("not a CG state: it begins with {found:02x?}, not with \"FIECCGS1\"")]
    Magic { found: [u8; 8] },
    #[error("this CG state has version {found}; write it again with version {VERSION}")]
    Version { found: u32 },
    #[error("a CG state's reserved field is {found}; it must be 0")]
    Reserved { found: u32 },
    #[error("a CG state of {n} unknowns has {expected} bytes, but {bytes} were given")]
    Length {
        n: u64,
        expected: u128,
        bytes: usize,
    },
    #[error("a CG state's {what} is {value}; it must be finite and not negative")]
    Scalar { what: &'static str, value: f64 },
}

/// Copies `v` into `out` (8 bytes per element) as little endian. It compiles to a block copy.
#[inline]
pub(crate) fn copy_to_le(v: &[f64], out: &mut [u8]) {
    for (out, v) in out.as_chunks_mut::<8>().0.iter_mut().zip(v) {
        *out = v.to_le_bytes();
    }
}

fn copy_from_le(bytes: &[u8]) -> Vec<f64> {
    bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|b| f64::from_le_bytes(*b))
        .collect()
}

impl CgState {
    /// Length of [`CgState::to_bytes`].
    #[must_use]
    pub fn byte_len(&self) -> usize {
        HEADER_BYTES + 24 * self.x.len()
    }

    /// Encodes the state.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write_bytes(&mut out);
        out
    }

    /// As [`CgState::to_bytes`], into a buffer that may be reused.
    ///
    /// # Panics
    /// If x, r and p differ in length.
    pub fn write_bytes(&self, out: &mut Vec<u8>) {
        let n = self.x.len();
        assert!(
            self.r.len() == n && self.p.len() == n,
            "x, r and p must have equal lengths"
        );
        out.resize(self.byte_len(), 0);
        let (header, vectors) = out.split_at_mut(HEADER_BYTES);
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].fill(0);
        header[16..24].copy_from_slice(&(n as u64).to_le_bytes());
        header[24..32].copy_from_slice(&self.iteration.to_le_bytes());
        header[32..40].copy_from_slice(&self.rz.to_le_bytes());
        header[40..48].copy_from_slice(&self.rr.to_le_bytes());
        if n > 0 {
            for (v, out) in [&self.x, &self.r, &self.p]
                .into_iter()
                .zip(vectors.chunks_exact_mut(8 * n))
            {
                copy_to_le(v, out);
            }
        }
    }

    /// Decodes a state. Vectors are not checked; the scalars must be possible.
    ///
    /// # Errors
    /// See [`StateError`]. Nothing is allocated before the length has been checked.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StateError> {
        let Some((header, vectors)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(StateError::Short { bytes: bytes.len() });
        };
        let field = |at: usize| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&header[at..at + 8]);
            word
        };
        let found = field(0);
        if found != MAGIC {
            return Err(StateError::Magic { found });
        }
        let word = u64::from_le_bytes(field(8));
        let (version, reserved) = (word as u32, (word >> 32) as u32);
        if version != VERSION {
            return Err(StateError::Version { found: version });
        }
        if reserved != 0 {
            return Err(StateError::Reserved { found: reserved });
        }
        let n = u64::from_le_bytes(field(16));
        let expected = HEADER_BYTES as u128 + 24 * u128::from(n);
        if expected != bytes.len() as u128 {
            return Err(StateError::Length {
                n,
                expected,
                bytes: bytes.len(),
            });
        }
        let scalar = |what: &'static str, at: usize| {
            let value = f64::from_le_bytes(field(at));
            let possible = value.is_finite() && value >= 0.0;
            if possible {
                Ok(value)
            } else {
                Err(StateError::Scalar { what, value })
            }
        };
        let (rz, rr) = (scalar("r·z", 32)?, scalar("r·r", 40)?);
        let third = vectors.len() / 3;
        Ok(Self {
            x: copy_from_le(&vectors[..third]),
            r: copy_from_le(&vectors[third..2 * third]),
            p: copy_from_le(&vectors[2 * third..]),
            rz,
            rr,
            iteration: u64::from_le_bytes(field(24)),
        })
    }
}
