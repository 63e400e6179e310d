//! Poisson's equation on a box: the five-point and seven-point stencils, Dirichlet boundary.

use serde::{Deserialize, Serialize};

use crate::sparse::{Csr, CsrError};

/// Grid points in each direction, all at least one; in JSON `{"poisson_2d":{"nx":…,"ny":…}}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Grid {
    #[serde(rename = "poisson_2d")]
    Two { nx: u32, ny: u32 },
    #[serde(rename = "poisson_3d")]
    Three { nx: u32, ny: u32, nz: u32 },
}

/// Why there is no such grid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PoissonError {
    #[error("grid size {name} is 0; every direction needs at least one point")]
    Empty { name: &'static str },
    #[error("a grid of {unknowns} unknowns is too large: {limit} are supported")]
    TooLarge { unknowns: u128, limit: u64 },
    #[error(transparent)]
    Matrix(#[from] CsrError),
}

/// Diagonal 4, −1 for each neighbour; unknown `(i, j)` is row `j·nx + i`.
///
/// # Errors
/// A direction without points, or too many unknowns.
pub fn poisson_2d(nx: u32, ny: u32) -> Result<Csr, PoissonError> {
    stencil(&[("nx", nx), ("ny", ny)], 4.0)
}

/// Diagonal 6, −1 for each neighbour; unknown `(i, j, k)` is row `(k·ny + j)·nx + i`.
///
/// # Errors
/// A direction without points, or too many unknowns.
pub fn poisson_3d(nx: u32, ny: u32, nz: u32) -> Result<Csr, PoissonError> {
    stencil(&[("nx", nx), ("ny", ny), ("nz", nz)], 6.0)
}

/// The matrix of a grid.
///
/// # Errors
/// As [`poisson_2d`] and [`poisson_3d`].
pub fn poisson(grid: Grid) -> Result<Csr, PoissonError> {
    match grid {
        Grid::Two { nx, ny } => poisson_2d(nx, ny),
        Grid::Three { nx, ny, nz } => poisson_3d(nx, ny, nz),
    }
}

fn stencil(sizes: &[(&'static str, u32)], diagonal: f64) -> Result<Csr, PoissonError> {
    if let Some(&(name, _)) = sizes.iter().find(|s| s.1 == 0) {
        return Err(PoissonError::Empty { name });
    }
    let unknowns: u128 = sizes.iter().map(|s| u128::from(s.1)).product();
    let per_row = 2 * sizes.len() as u128 + 1;
    // Entries are counted in u32, see `Csr`.
    let limit = u64::from(u32::MAX - 1) / per_row as u64;
    if unknowns > u128::from(limit) {
        return Err(PoissonError::TooLarge { unknowns, limit });
    }
    let rows = unknowns as usize;
    let size = |d: usize| sizes.get(d).map_or(1, |s| s.1 as usize);
    let (nx, ny, nz) = (size(0), size(1), size(2));
    // Every direction loses two entries at its ends for each line through the grid.
    let entries = rows
        + [nx, ny, nz]
            .iter()
            .map(|&m| 2 * (rows - rows / m))
            .sum::<usize>();
    let (mut row_ptr, mut col_idx, mut values) = (Vec::new(), Vec::new(), Vec::new());
    row_ptr
        .try_reserve_exact(rows + 1)
        .and_then(|()| col_idx.try_reserve_exact(entries))
        .and_then(|()| values.try_reserve_exact(entries))
        .map_err(|_| CsrError::NoMemory { rows, entries })?;
    row_ptr.push(0u32);
    let mut push = |col: usize, value: f64| {
        col_idx.push(col as u32);
        values.push(value);
        values.len() as u32
    };
    for row in 0..rows {
        let (i, j, k) = (row % nx, row / nx % ny, row / (nx * ny));
        if k > 0 {
            push(row - nx * ny, -1.0);
        }
        if j > 0 {
            push(row - nx, -1.0);
        }
        if i > 0 {
            push(row - 1, -1.0);
        }
        let mut end = push(row, diagonal);
        if i + 1 < nx {
            end = push(row + 1, -1.0);
        }
        if j + 1 < ny {
            end = push(row + nx, -1.0);
        }
        if k + 1 < nz {
            end = push(row + nx * ny, -1.0);
        }
        row_ptr.push(end);
    }
    Ok(Csr::from_parts(rows, rows, row_ptr, col_idx, values)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stencils_are_symmetric_and_have_the_right_size() {
        let a = poisson_2d(4, 3).unwrap();
        assert_eq!((a.rows(), a.entries()), (12, 12 + 2 * (3 * 3 + 4 * 2)));
        assert_eq!(
            (a.get(5, 5), a.get(5, 1), a.get(5, 9), a.get(3, 4)),
            (Some(4.0), Some(-1.0), Some(-1.0), None)
        );
        let b = poisson_3d(3, 4, 5).unwrap();
        assert_eq!(
            (b.rows(), b.get(0, 12), b.get(0, 0)),
            (60, Some(-1.0), Some(6.0))
        );
        for m in [
            a,
            b,
            poisson_2d(1, 1).unwrap(),
            poisson_3d(1, 1, 9).unwrap(),
        ] {
            assert_eq!(m.first_asymmetry(), None);
        }
    }

    #[test]
    fn impossible_grids_are_refused_before_anything_is_allocated() {
        assert_eq!(
            poisson_2d(0, 3).unwrap_err(),
            PoissonError::Empty { name: "nx" }
        );
        assert_eq!(
            poisson_3d(1, 3, 0).unwrap_err(),
            PoissonError::Empty { name: "nz" }
        );
        assert!(matches!(
            poisson_2d(u32::MAX, u32::MAX),
            Err(PoissonError::TooLarge { .. })
        ));
        assert!(matches!(
            poisson_3d(u32::MAX, u32::MAX, u32::MAX),
            Err(PoissonError::TooLarge { .. })
        ));
        assert!(matches!(
            poisson_2d(30_000, 30_000),
            Err(PoissonError::TooLarge {
                limit: 858_993_458,
                ..
            })
        ));
    }
}
