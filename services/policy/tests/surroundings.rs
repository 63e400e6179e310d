//! The offers of other places that the policy sends to programs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod world;

use world::World;

fn offered(w: &World) -> Vec<(String, u32)> {
    let offers = w.policy.offers(w.at()).nodes;
    let pairs = offers.iter().map(|o| (o.node.to_string(), o.free_slots));
    pairs.collect()
}

#[test]
fn only_nodes_that_would_take_work_are_offered_with_the_slots_that_nobody_holds() {
    let mut w = World::new(3);
    let all = offered(&w);
    assert_eq!(all.len(), 3, "{all:?}");
    let slots = all[0].1;
    assert!(slots >= 2, "{all:?}");
    w.submit_line(1, r#""requires":{"nodes":["n1"]}"#);
    w.start(1);
    // The busier node comes last.
    let names = |list: &[(String, u32)]| list.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    let now = offered(&w);
    assert_eq!(names(&now), ["n0", "n2", "n1"]);
    assert_eq!(now[2].1, slots - 1);
    // A cordoned node is not offered.
    w.cordon(0, true);
    assert_eq!(names(&offered(&w)), ["n2", "n1"]);
    // A node under pressure is not offered.
    w.pressure(2, 0.97, 20_000);
    assert_eq!(names(&offered(&w)), ["n1"]);
    w.drain(1);
    assert!(offered(&w).is_empty(), "{:?}", offered(&w));
}
