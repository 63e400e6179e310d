//! Reproducible numerical kernels: Matrix Market, sparse matrices, conjugate gradients, dense
//! products and factorizations.
//!
//! Every result here depends only on its inputs. It does not depend on the number of threads, the
//! width of the vector unit, or where a computation was cut and resumed. Four rules ensure that:
//!
//! * products and sums are fused (`f64::mul_add`), with one rounding each, on every machine;
//! * a row of a sparse product is one chain in ascending column order;
//! * reductions have fixed leaves of [`reduce::LEAF`] elements, fixed lanes in a leaf and a fixed
//!   tree above them; threads only decide where a leaf is computed;
//! * an element of a dense product is one chain in ascending order of the inner dimension, in
//!   blocks of [`dense::gemm::DEPTH`].
//!
//! A factorization's block size belongs to its definition.
//!
//! The crate does not depend on programs, capsules or messages. NaN payloads are not specified.
//! Non-finite input is refused at the entry points.

pub mod canary;
pub mod cg;
pub mod dense;
pub mod device;
pub mod engine;
pub mod matrix_market;
pub mod npy;
mod passes;
pub mod poisson;
mod pool;
pub mod reduce;
pub mod rhs;
pub mod simd;
pub mod sparse;
mod state;

/// BLAKE3-256 of the vector's elements as little-endian bytes, in order.
#[must_use]
pub fn digest(x: &[f64]) -> [u8; 32] {
    const BLOCK: usize = 4096;
    let mut hasher = blake3::Hasher::new();
    let mut bytes = vec![0u8; BLOCK * 8];
    for block in x.chunks(BLOCK) {
        let out = &mut bytes[..block.len() * 8];
        state::copy_to_le(block, out);
        hasher.update(out);
    }
    *hasher.finalize().as_bytes()
}

/// Lower-case hexadecimal of [`digest`].
#[must_use]
pub fn digest_hex(x: &[f64]) -> String {
    blake3::Hash::from_bytes(digest(x)).to_hex().to_string()
}
