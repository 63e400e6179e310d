//! Dense matrices: products and factorizations whose bits depend only on their input and on the
//! declared block size.

pub mod check;
pub mod gemm;
pub mod lu;
pub mod mat;
mod portable;
pub mod qr;
pub mod triangular;
mod vector;

pub use gemm::{Into, gemm};
pub use mat::{Mat, MatMut, MatRef};
