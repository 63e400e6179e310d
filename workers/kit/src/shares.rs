//! What a run is told of its range of tiles, where that is shared with others.

use fiec_schemas::programs::TileRange;
use serde::{Deserialize, Serialize};

/// How a run's range is shared. One that is a part, that has parts out when nothing is left to it,
/// or whose merge leaves nothing to do, ends with a boundary for the reason `end` and, behind that,
/// `completed` without outputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shares {
    /// It is a part itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub part: bool,
    /// Parts that were split off before and are still out, without the one that is merged now.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parts: u32,
}

/// A part that is taken back: a capsule of its own, whose boundary is committed and says `merged`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// Its first tile.
    pub from: u64,
    /// The one behind its last.
    pub to: u64,
    /// Bytes of its σ, which stand behind the run's own; none where it has reached no boundary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl Merge {
    /// Its tiles.
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
