//! A map for lookups that each message makes many times. Its hasher is fast and gives the same
//! hashes on every machine. Iteration is unordered, so sort what you iterate over.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

/// The multiplier of Fx, the hasher of Firefox and of the Rust compiler.
const FACTOR: u64 = 0x517c_c1b7_2722_0a95;

/// Multiplies and rotates, eight bytes at a time.
#[derive(Debug, Default, Clone, Copy)]
pub struct Quick(u64);

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }
    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(FACTOR);
    }
    fn finish(&self) -> u64 {
        // The high bits are the well-mixed ones, but a table uses the low ones as well.
        self.0.rotate_left(26)
    }
}

/// Keys and values, unordered.
#[derive(Clone)]
pub struct QuickMap<K, V>(HashMap<K, V, BuildHasherDefault<Quick>>);

impl<K, V> Default for QuickMap<K, V> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<K, V> std::ops::Deref for QuickMap<K, V> {
    type Target = HashMap<K, V, BuildHasherDefault<Quick>>;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
impl<K, V> std::ops::DerefMut for QuickMap<K, V> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl<K: Ord, V> QuickMap<K, V> {
    /// All entries, ordered by key.
    pub fn in_order(&self) -> Vec<(&K, &V)> {
        let mut all: Vec<_> = self.0.iter().collect();
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }
}

impl<K: Ord + fmt::Debug, V: fmt::Debug> fmt::Debug for QuickMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.in_order()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_comes_out_in_order_whenever_it_was_put_in() {
        let (mut one, mut other) = (QuickMap::default(), QuickMap::default());
        for n in 0..1_000u32 {
            one.insert(n.to_string(), n);
            other.insert((999 - n).to_string(), 999 - n);
        }
        assert_eq!(format!("{one:?}"), format!("{other:?}"));
        assert_eq!(one.in_order().len(), 1_000);
        assert_eq!(one.get("77"), Some(&77));
    }
}
