//! faer's GEMM, LU and QR, the floor of `bench kernels`. Only the feature `faer` compiles them, because
//! that takes minutes and nothing else needs faer.

#[cfg(feature = "faer")]
pub use with::Library;
#[cfg(not(feature = "faer"))]
pub use without::Library;

#[cfg(feature = "faer")]
mod with {
    use faer::{Accum, Par};
    use fiec_kernels::dense::Mat;

    use crate::bench::kernels::{Kernel, seconds};

    /// faer with the matrices that it works on.
    pub struct Library {
        kernel: Kernel,
        par: Par,
        a: faer::Mat<f64>,
        b: faer::Mat<f64>,
        c: faer::Mat<f64>,
    }

    impl Library {
        /// Whether it was compiled in.
        ///
        /// # Errors
        /// Never here.
        pub fn available() -> Result<(), &'static str> {
            Ok(())
        }

        /// For this kernel, on copies of these square matrices.
        pub fn new(kernel: Kernel, threads: usize, a: &Mat, b: &Mat) -> Self {
            let copy = |m: &Mat| faer::Mat::from_fn(m.rows(), m.cols(), |i, j| m.col(j)[i]);
            let par = match threads {
                1 => Par::Seq,
                _ => Par::rayon(threads),
            };
            faer::set_global_parallelism(par);
            Self {
                kernel,
                par,
                a: copy(a),
                b: copy(b),
                c: faer::Mat::zeros(a.rows(), b.cols()),
            }
        }

        /// Seconds that it takes once.
        pub fn turn(&mut self) -> Option<f64> {
            Some(seconds(|| match self.kernel {
                Kernel::Gemm => faer::linalg::matmul::matmul(
                    self.c.as_mut(),
                    Accum::Replace,
                    self.a.as_ref(),
                    self.b.as_ref(),
                    1.0,
                    self.par,
                ),
                Kernel::Lu => drop(std::hint::black_box(self.a.partial_piv_lu())),
                Kernel::Qr => drop(std::hint::black_box(self.a.qr())),
            }))
        }

        /// faer's GEMM is in the order of ours on processors with fused multiply-add: there the
        /// bits are equal.
        ///
        /// # Errors
        /// Where they are not.
        pub fn compare(&self, ours: &Mat) -> anyhow::Result<()> {
            #[cfg(target_arch = "x86_64")]
            let fused = std::is_x86_feature_detected!("fma");
            #[cfg(not(target_arch = "x86_64"))]
            let fused = false;
            let (Kernel::Gemm, true) = (self.kernel, fused) else {
                return Ok(());
            };
            for (j, column) in (0..self.c.ncols()).map(|j| (j, ours.col(j))) {
                for (i, value) in column.iter().enumerate() {
                    anyhow::ensure!(
                        value.to_bits() == self.c[(i, j)].to_bits(),
                        "GEMM differs from faer's at ({i}, {j}): {value:e} and {:e}",
                        self.c[(i, j)]
                    );
                }
            }
            Ok(())
        }
    }
}

#[cfg(not(feature = "faer"))]
mod without {
    use fiec_kernels::dense::Mat;

    use crate::bench::kernels::Kernel;

    /// Nothing: faer was not compiled in.
    pub struct Library;

    impl Library {
        /// Whether it was compiled in.
        ///
        /// # Errors
        /// Always here: how to have it.
        pub fn available() -> Result<(), &'static str> {
            Err("this fiec was built without it; \
                 build with `cargo build --release --features faer`")
        }

        /// Nothing to prepare.
        pub fn new(_: Kernel, _: usize, _: &Mat, _: &Mat) -> Self {
            Self
        }

        /// Nothing to measure.
        pub fn turn(&mut self) -> Option<f64> {
            None
        }

        /// Nothing to compare.
        ///
        /// # Errors
        /// Never.
        pub fn compare(&self, _: &Mat) -> anyhow::Result<()> {
            Ok(())
        }
    }
}
