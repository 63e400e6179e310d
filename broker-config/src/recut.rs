//! Cuts a σ by reusing the cuts of the σ before. If a chunk of the earlier σ recurs with the same
//! bytes, the chunker would cut it the same way. So its limits and its digest are reused. Comparing
//! bytes is many times faster than cutting and digesting them.

use std::collections::HashMap;

use fiec_schemas::Digest;

use crate::chunks::{Piece, cutter};

/// An earlier σ, with the pieces that [`crate::chunks::cut`] made of it.
#[derive(Debug, Clone, Copy)]
pub struct Earlier<'a> {
    /// Its bytes.
    pub state: &'a [u8],
    /// Its pieces, in order.
    pub pieces: &'a [Piece],
}

/// Returns the same pieces as [`crate::chunks::cut`], and faster the more `state` and `earlier`
/// share.
pub fn cut_after(state: &[u8], earlier: Earlier<'_>) -> Vec<Piece> {
    let (cut, longest) = cutter(state);
    let old = earlier.state;
    if cutter(old).1 != longest {
        // The sizes differ so much that the chunk lengths differ.
        return crate::chunks::cut(state);
    }
    let mut pieces = Vec::with_capacity(earlier.pieces.len());
    let mut by_digest: Option<HashMap<Digest, usize>> = None;
    // The next piece of the earlier σ, and the offset between both at the last match.
    let (mut next, mut shift) = (0, 0);
    let mut at = 0;
    while at < state.len() {
        let (rest, mut same) = (&state[at..], None);
        if let Some(piece) = earlier.pieces.get(next)
            && piece.range.start as isize + shift == at as isize
        {
            let old = &old[piece.range.start..];
            // The byte after a chunk also influences where the chunk ends.
            let decisive = (piece.range.len() + 1).min(old.len());
            let ends_alike =
                rest.len() == old.len() || (rest.len() >= longest && old.len() >= longest);
            let alike = ends_alike && rest.get(..decisive) == Some(&old[..decisive]);
            same = alike.then(|| piece.clone());
        }
        let length = match &same {
            Some(piece) => piece.range.len(),
            None => cut.cut(at, rest.len()).1 - at,
        };
        let range = at..at + length;
        at = range.end;
        match same {
            Some(piece) => {
                next += 1;
                pieces.push(Piece { range, ..piece });
            }
            None => {
                let digest = Digest::of(&state[range.clone()]);
                pieces.push(Piece { digest, range });
                let known = by_digest.get_or_insert_with(|| {
                    let all = earlier.pieces.iter().enumerate();
                    all.map(|(index, piece)| (piece.digest, index)).collect()
                });
                // Moved bytes: the bytes after them have moved as well.
                if let Some(index) = known.get(&digest) {
                    next = index + 1;
                    if let Some(piece) = earlier.pieces.get(next) {
                        shift = at as isize - piece.range.start as isize;
                    }
                }
                let is_behind = |piece: &Piece| (piece.range.start as isize + shift) < at as isize;
                while earlier.pieces.get(next).is_some_and(is_behind) {
                    next += 1;
                }
            }
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunks::cut;

    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn below(&mut self, limit: usize) -> usize {
            (self.next() % limit.max(1) as u64) as usize
        }

        fn bytes(&mut self, count: usize) -> Vec<u8> {
            (0..count).map(|_| self.next() as u8).collect()
        }
    }

    #[test]
    fn what_is_cut_after_an_earlier_state_is_what_is_cut_without_it() {
        const SEED: u64 = 0x5eed_0003;
        println!("seed {SEED:#x}");
        let mut random = Random(SEED);
        for round in 0..60 {
            let length = random.below(400_000);
            let mut state = random.bytes(length);
            if round % 5 == 0 {
                // A run of one byte value is cut only at the longest chunk.
                let from = random.below(length);
                state[from..].fill(7);
            }
            for step in 0..6 {
                let (before, pieces) = (state.clone(), cut(&state));
                let at = random.below(state.len());
                let most = [1, 100, 20_000][random.below(3)];
                let count = random.below(1 + most);
                let new = random.bytes(count);
                match random.below(4) {
                    0 => drop(state.splice(at..at, new)),
                    1 => drop(state.drain(at..(at + count).min(state.len()))),
                    2 => {
                        let end = (at + count).min(state.len());
                        state[at..end].copy_from_slice(&new[..end - at]);
                    }
                    // The front moves to the end.
                    _ => state.rotate_left(at),
                }
                let earlier = Earlier {
                    state: &before,
                    pieces: &pieces,
                };
                let found = cut_after(&state, earlier);
                assert_eq!(found, cut(&state), "round {round}, step {step}");
            }
        }
    }

    #[test]
    fn a_state_of_another_order_of_size_is_cut_without_the_earlier_one() {
        let mut random = Random(3);
        let small = random.bytes(50_000);
        let large: Vec<u8> = small.iter().copied().cycle().take(33 << 20).collect();
        let earlier = Earlier {
            state: &small,
            pieces: &cut(&small),
        };
        assert_eq!(cut_after(&large, earlier), cut(&large));
        assert_eq!(cut_after(&[], earlier), cut(&[]));
    }
}
