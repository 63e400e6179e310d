//! Dense matrices: products and factorizations whose bits are a function of their input and of
//! the declared block size alone.

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
