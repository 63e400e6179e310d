//! The trailing updates of LU and QR on a device, in the order of [`crate::dense::lu`] and
//! [`crate::dense::qr`]. The panels stay on the host.

use super::{Arithmetic, Device, DeviceError, Part};
use crate::dense::triangular::LEAF;
use crate::dense::{Into, Mat};

/// As [`crate::dense::lu::update`].
///
/// # Errors
/// The device's.
///
/// # Panics
/// If the shapes do not fit.
pub fn update(
    device: &mut dyn Device,
    arithmetic: Arithmetic,
    finished: Part,
    x: Part,
) -> Result<(), DeviceError> {
    let width = finished.cols();
    let (top, below) = x.split_rows(width);
    let (diagonal, l) = finished.split_rows(width);
    device.solve_unit_lower(arithmetic, diagonal, top)?;
    device.gemm(arithmetic, l, top, Into::Subtract, below)
}

/// As [`crate::dense::qr::apply`]. `scratch` has room for `2·v.cols()·x.cols()` elements.
///
/// # Errors
/// The device's.
///
/// # Panics
/// If the shapes do not fit.
pub fn apply(
    device: &mut dyn Device,
    arithmetic: Arithmetic,
    (v, t): (Part, Part),
    x: Part,
    scratch: &super::Buffer,
) -> Result<(), DeviceError> {
    let width = v.cols();
    let both = scratch.matrix(width, 2 * x.cols());
    let (w, tw) = (
        both.part(0, width, 0, x.cols()),
        both.part(0, width, x.cols(), x.cols()),
    );
    device.gemm(arithmetic, v.t(), x, Into::Replace, w)?;
    device.gemm(arithmetic, t.t(), w, Into::Replace, tw)?;
    device.gemm(arithmetic, v, tw, Into::Subtract, x)
}

/// The two steps of a triangular solve.
pub trait Triangular {
    /// X ← L⁻¹·X for at most [`LEAF`] rows.
    ///
    /// # Errors
    /// The device's.
    fn leaf(&mut self, l: Part, x: Part) -> Result<(), DeviceError>;

    /// `below` ← `below` − L·`top`.
    ///
    /// # Errors
    /// The device's.
    fn product(&mut self, l: Part, top: Part, below: Part) -> Result<(), DeviceError>;
}

/// The solve of [`crate::dense::triangular`], by products and leaves.
///
/// # Errors
/// The errors of the two steps.
pub fn halve<D: Triangular>(device: &mut D, l: Part, x: Part) -> Result<(), DeviceError> {
    let n = l.rows();
    if n <= LEAF {
        return device.leaf(l, x);
    }
    let half = (n / 2).next_multiple_of(LEAF);
    let (top, below) = x.split_rows(half);
    halve(device, l.part(0, half, 0, half), top)?;
    device.product(l.part(half, n - half, 0, half), top, below)?;
    halve(device, l.part(half, n - half, half, n - half), below)
}

/// T of the compact WY form from τ and `VᵀV`, as LAPACK's larft: column j is
/// `−τⱼ·T·(Vᵀv)ⱼ`, with τⱼ on the diagonal.
///
/// # Panics
/// If `cross` is not square, or has not one column for each τ.
#[must_use]
pub fn triangle(tau: &[f64], cross: &Mat) -> Mat {
    let width = tau.len();
    assert_eq!((cross.rows(), cross.cols()), (width, width), "shape of VᵀV");
    let mut t = Mat::zeros(width, width);
    for (j, tau) in tau.iter().enumerate() {
        let column: Vec<f64> = (0..j)
            .map(|i| {
                let view = t.view();
                let sum = (i..j).fold(0.0f64, |sum, p| {
                    view.at(i, p).mul_add(cross.view().at(p, j), sum)
                });
                -tau * sum
            })
            .collect();
        let mut view = t.view_mut();
        view.col_mut(j)[..j].copy_from_slice(&column);
        view.col_mut(j)[j] = *tau;
    }
    t
}
