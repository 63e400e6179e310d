//! How long a σ of 24 MB takes to be cut: whole, and after an earlier one of which a hundredth
//! changed; and what digesting and copying it take. `cargo run --release --example recut_speed`.

use std::time::Instant;

use fiec_broker::chunks::cut;
use fiec_broker::recut::{Earlier, cut_after};
use fiec_schemas::Digest;

fn best(mut work: impl FnMut()) -> f64 {
    let one = |_| {
        let began = Instant::now();
        work();
        began.elapsed().as_secs_f64() * 1e3
    };
    (0..9).map(one).fold(f64::INFINITY, f64::min)
}

fn main() {
    let mut z = 0x9E37_79B9_7F4A_7C15_u64;
    let number = |_| {
        z ^= z << 13;
        z ^= z >> 7;
        z ^= z << 17;
        ((z >> 11) as f64).to_le_bytes()
    };
    let before: Vec<u8> = (0..3_000_000).flat_map(number).collect();
    let pieces = cut(&before);
    let earlier = Earlier {
        state: &before,
        pieces: &pieces,
    };
    let mut spread = before.clone();
    for place in 0..60 {
        let at = place * 400_000;
        spread[at..at + 4_000].iter_mut().for_each(|b| *b ^= 0x5a);
    }
    let mut inserted = before.clone();
    inserted.splice(7_000_001..7_000_001, vec![9; 240_000]);
    println!("cut whole: {:.1} ms", best(|| drop(cut(&spread))));
    for (words, state) in [("in 60 places", &spread), ("inserted", &inserted)] {
        let took = best(|| drop(cut_after(state, earlier)));
        println!("cut after, 1 % {words}: {took:.1} ms");
    }
    println!("digest of all: {:.1} ms", best(|| _ = Digest::of(&spread)));
    println!("copy: {:.1} ms", best(|| drop(spread.clone())));
}
