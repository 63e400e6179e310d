//! The shared range of tiles, as a run receives it.

use fiec_schemas::programs::TileRange;
use serde::{Deserialize, Serialize};

/// How a run's range is shared. Three runs end with a boundary for the reason `end`, then
/// `completed` without outputs. They are a part, a run with nothing left but its parts' work, and a
/// run whose merge leaves nothing to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shares {
    /// The execution is a part itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub part: bool,
    /// Parts that were split off earlier and are still out, without the one to merge now.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parts: u32,
}

/// A part to merge: a capsule of its own, whose boundary is committed and says `merged`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// Its first tile.
    pub from: u64,
    /// The tile after its last one.
    pub to: u64,
    /// Bytes of its σ, which follows the run's own. None if the part reached no boundary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl Merge {
    /// Its range of tiles.
    pub fn range(&self) -> TileRange {
        TileRange {
            from: self.from,
            to: self.to,
        }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
