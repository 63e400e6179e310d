//! σ too large for a ledger message: its chunks are stored once, moved once, kept while the last
//! commit needs them, and dropped when it does not.

use std::time::Duration;

use crate::common::{Running, World, bound, poll, result, undisturbed};
use fiec_broker::chunk_list;
use fiec_broker::chunks::Manifest;
use fiec_broker::store;
use fiec_schemas::messages::{ControlRequest, Destination};
use fiec_schemas::trust::{Segment, SignedVerdict, Verdict};
use fiec_schemas::{Cause, Event, ExecutionId, StatePlace, subjects};
use futures_util::StreamExt as _;
use serde_json::json;

const LARGE: u64 = 1_000_000;

fn steps(capsules: u64) -> serde_json::Value {
    json!({ "capsules": capsules, "rest_us": 2_000, "state_bytes": LARGE })
}

fn line(capsules: u64, every: u64) -> String {
    json!({ "program": "synthetic@1", "params": steps(capsules), "commit": { "every": every } })
        .to_string()
}

/// Chunks that are stored of an execution.
async fn stored(world: &World, id: ExecutionId) -> usize {
    let js = &world.broker.js;
    let stream = js.get_stream(subjects::CHUNK_STREAM).await.unwrap();
    let mut all = stream
        .info_with_subjects(subjects::chunk(&world.tenant, id))
        .await
        .unwrap();
    let mut count = 0;
    while let Some(subject) = all.next().await {
        count += subject.unwrap().1;
    }
    count
}

/// Chunks that a commit needs.
async fn needed(world: &World, place: &StatePlace) -> usize {
    let manifest = store::manifest(&world.broker, place).await.unwrap();
    let mut sequences = manifest.beyond(None);
    sequences.dedup();
    sequences.len()
}

async fn move_to(world: &World, id: ExecutionId, from: &Running, to: Destination) {
    let state = world.last(id).await.message.state;
    let request = ControlRequest::Prepare {
        execution: id,
        tenant: world.tenant.clone(),
        program: "synthetic@1".to_owned(),
        state_bytes: 0,
        substrate: None,
    };
    world.control(&to.node, &request).await.unwrap();
    let request = ControlRequest::Yield {
        execution: id,
        epoch: state.epoch,
        cause: Cause::Operator {
            who: "ann".to_owned(),
        },
        to: Some(to),
        decision: None,
    };
    let reply = world.control(&from.node, &request).await.unwrap();
    assert_eq!(reply.error, None);
    let next = state.epoch + 1;
    let here = |m: &fiec_schemas::LedgerMessage| {
        m.state.epoch == next && m.state.phase.as_str() == "started"
    };
    world.wait(id, "the move", here).await;
}

#[tokio::test]
async fn superseded_chunks_are_dropped_and_the_last_ones_are_kept_while_it_lives() {
    let world = World::start().await;
    let soon = Duration::from_millis(100);
    let (a, b) = (
        world.agent_that_keeps("a", soon).await,
        world.agent_that_keeps("b", soon).await,
    );
    let id = world.submit(&line(1_500, 5), &a).await;
    // Paused, it lives on, and needs its last state.
    world
        .wait(id, "some commits", |m| m.state.totals.commits >= 8)
        .await;
    world.pause(id, &a).await;
    let paused = world.last(id).await;
    let place = paused.message.state.boundary.clone().unwrap();
    assert_eq!(place.bytes, LARGE);
    assert!(store::is_large(&place), "{place:?}");
    let last = needed(&world, &place).await;
    assert!(last > 50, "{last} chunks");
    poll("only the last chunks to be left", async || {
        (stored(&world, id).await == last).then_some(())
    })
    .await;
    // Another one lives and dies here meanwhile: all of its chunks are dropped, long after the
    // last ones of the paused one could have been.
    let other = world.submit(&line(30, 5), &a).await;
    let done = world.wait_phase(other, "completed").await;
    assert_eq!(done.state.totals.commits, 5);
    poll("the other one's chunks to be dropped", async || {
        (stored(&world, other).await == 0).then_some(())
    })
    .await;
    assert_eq!(stored(&world, id).await, last);
    let state = world.ledger.state(id, &place).await.unwrap();
    assert_eq!(state.len() as u64, LARGE);

    // It goes on elsewhere from what was kept, and in the end nothing is left.
    let who = "ann".to_owned();
    let events = vec![
        Event::Resumed { who },
        bound(2, &b.destination(), Cause::Initial),
    ];
    let tip = world.append(&paused.into(), events).await;
    world.dispatch(&[tip], &b.node).await;
    let ended = world.wait_phase(id, "completed").await;
    assert_eq!(result(&ended), undisturbed(&steps(1_500)));
    assert!(ended.state.totals.commits > 10, "{:?}", ended.state.totals);
    poll("nothing to be left", async || {
        (stored(&world, id).await == 0).then_some(())
    })
    .await;
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn a_worker_that_leaves_drops_what_was_superseded_and_keeps_what_is_needed() {
    let world = World::start().await;
    // Nothing falls due before it leaves.
    let late = Duration::from_secs(3_600);
    let a = world.agent_that_keeps("a", late).await;
    let ended = world.submit(&line(20, 5), &a).await;
    world.wait_phase(ended, "completed").await;
    assert!(stored(&world, ended).await > 50);
    let id = world.submit(&line(100_000, 5), &a).await;
    world
        .wait(id, "some commits", |m| m.state.totals.commits >= 3)
        .await;
    a.leave().await;
    let last = world.last(id).await.message;
    let yielded = |e: &Event| matches!(e, Event::Yielded { .. });
    assert!(last.events.iter().any(yielded), "{:?}", last.events);
    assert_eq!(stored(&world, ended).await, 0);
    let place = last.state.boundary.clone().unwrap();
    assert_eq!(stored(&world, id).await, needed(&world, &place).await);
    world.ledger.state(id, &place).await.unwrap();
}

/// The last sequence of the stream of chunks.
async fn last_chunk(world: &World) -> u64 {
    let bounds = fiec_broker::feed::bounds_of(&world.broker, subjects::CHUNK_STREAM);
    bounds.await.unwrap().1
}

/// Waits until of the chunks after `new_life` only those of the last commit are left. Superseded
/// chunks of an earlier life of the broker stay for the recorder's collector.
async fn only_the_last_are_left(world: &World, id: ExecutionId, last: &StatePlace, new_life: u64) {
    let manifest = store::manifest(&world.broker, last).await.unwrap();
    let mut needed = manifest.beyond(None);
    needed.sort_unstable();
    needed.dedup();
    let subject = subjects::chunk(&world.tenant, id);
    poll("only the last chunks to be left", async || {
        let stored = chunk_list::stored(&world.broker, &subject).await.ok()?;
        let stored: Vec<u64> = stored.iter().map(|chunk| chunk.seq).collect();
        let is_there = |seq: &u64| stored.contains(seq);
        let is_known = |seq: &u64| *seq <= new_life || needed.contains(seq);
        (needed.iter().all(is_there) && stored.iter().all(is_known)).then_some(())
    })
    .await;
}

/// The commits that stored the whole state again, by number.
async fn whole_again(world: &World, id: ExecutionId) -> Vec<u64> {
    let mut whole = Vec::new();
    for seq in 1..=world.last(id).await.seq {
        let Ok(entry) = world.ledger.by_sequence(seq).await else {
            continue;
        };
        let committed = |e: &Event| matches!(e, Event::Boundary(_));
        if entry.message.events.iter().any(committed)
            && Manifest::decode(&entry.body).unwrap().stored > LARGE / 2
        {
            whole.push(entry.message.state.totals.commits);
        }
    }
    whole.retain(|commit| *commit > 1);
    whole
}

#[tokio::test]
async fn chunks_that_a_broker_has_lost_are_stored_again_and_no_others() {
    let mut world = World::start().await;
    let soon = Duration::from_millis(100);
    let a = world.agent_that_keeps("a", soon).await;
    let id = world.submit(&line(1_000_000, 50), &a).await;
    let some = |m: &fiec_schemas::LedgerMessage| m.state.totals.commits >= 3;
    let last = world.wait(id, "some commits", some).await;
    let place = last.state.boundary.clone().unwrap();
    let manifest = store::manifest(&world.broker, &place).await.unwrap();
    let lost = &manifest.beyond(None)[..9];
    fiec_broker::chunks::drop_chunks(&world.broker, lost)
        .await
        .unwrap();
    world.servers.nats.kill().await;
    world.servers.nats.restart().await.unwrap();
    let new_life = last_chunk(&world).await;
    let wanted = last.state.totals.commits + 6;
    world
        .wait(id, "more commits", |m| m.state.totals.commits >= wanted)
        .await;
    world.pause(id, &a).await;
    assert_eq!(whole_again(&world, id).await, [0; 0]);
    let place = world.last(id).await.message.state.boundary.clone().unwrap();
    let state = world.ledger.state(id, &place).await.unwrap();
    assert_eq!(state.len() as u64, LARGE);
    only_the_last_are_left(&world, id, &place, new_life).await;
    a.leave().await;
}

#[tokio::test]
async fn a_broker_that_was_started_again_without_a_loss_gets_no_chunk_twice() {
    let mut world = World::start().await;
    let soon = Duration::from_millis(100);
    let a = world.agent_that_keeps("a", soon).await;
    let id = world.submit(&line(1_000_000, 50), &a).await;
    let (mut wanted, mut new_life) = (3, 0);
    for _ in 0..3 {
        let some = |m: &fiec_schemas::LedgerMessage| m.state.totals.commits >= wanted;
        let last = world.wait(id, "some commits", some).await;
        world.servers.nats.kill().await;
        world.servers.nats.restart().await.unwrap();
        new_life = last_chunk(&world).await;
        wanted = last.state.totals.commits + 6;
    }
    world
        .wait(id, "more commits", |m| m.state.totals.commits >= wanted)
        .await;
    world.pause(id, &a).await;
    assert_eq!(whole_again(&world, id).await, [0; 0]);
    let place = world.last(id).await.message.state.boundary.clone().unwrap();
    only_the_last_are_left(&world, id, &place, new_life).await;
    a.leave().await;
}

/// One per cent of 8 MB between two commits, since a capsule changes 64 bytes.
const MANY: u64 = 8_000_000;
const EVERY: u64 = MANY / 100 / 64;

#[tokio::test]
async fn a_commit_of_a_state_in_which_one_per_cent_changed_stores_at_most_five() {
    let world = World::start().await;
    let a = world.agent_that_keeps("a", Duration::from_secs(15)).await;
    let params = json!({ "capsules": EVERY * 12 + 1, "state_bytes": MANY });
    let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every": EVERY } });
    let id = world.submit(&line.to_string(), &a).await;
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(done.state.totals.commits, 12);
    let mut commits = 0;
    for seq in 1..=world.last(id).await.seq {
        let entry = world.ledger.by_sequence(seq).await.unwrap();
        let committed = |e: &Event| matches!(e, Event::Boundary(_));
        if !entry.message.events.iter().any(committed) {
            continue;
        }
        let manifest = Manifest::decode(&entry.body).unwrap();
        assert_eq!(manifest.bytes(), MANY);
        let moved = manifest.stored + entry.body.len() as u64;
        if commits == 0 {
            assert!(moved > MANY, "the first commit stores all of it");
        } else {
            assert!(moved * 20 <= MANY, "commit {commits} moved {moved} bytes");
        }
        commits += 1;
    }
    assert_eq!(commits, 12);
    a.leave().await;
}

#[tokio::test]
async fn a_handover_and_the_way_back_move_only_what_changed() {
    let world = World::start().await;
    let late = Duration::from_secs(15);
    let (a, b) = (
        world.agent_that_keeps("a", late).await,
        world.agent_that_keeps("b", late).await,
    );
    let mut sent = world
        .broker
        .client
        .subscribe("fiec.handover.*")
        .await
        .unwrap();
    let params = json!({ "capsules": 3_000, "rest_us": 2_000, "state_bytes": MANY });
    let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every": 400 } });
    let id = world.submit(&line.to_string(), &a).await;
    world
        .wait(id, "a commit", |m| m.state.boundary.is_some())
        .await;
    move_to(&world, id, &a, b.destination()).await;
    move_to(&world, id, &b, a.destination()).await;
    move_to(&world, id, &a, b.destination()).await;
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(done.state.totals.rebindings, 3);
    assert_eq!(result(&done), undisturbed(&params));
    let mut bytes = 0;
    let mut parts = 0;
    while let Ok(Some(message)) =
        tokio::time::timeout(Duration::from_millis(100), sent.next()).await
    {
        parts += 1;
        bytes += message.payload.len() as u64;
    }
    assert!(
        parts >= 6,
        "{parts} messages: three deltas, three confirmations"
    );
    assert!(bytes * 20 <= 3 * MANY, "{bytes} bytes for three moves");
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn what_a_fenced_worker_still_drops_is_never_what_its_successor_needs() {
    let world = World::start().await;
    let soon = Duration::from_millis(20);
    let (a, b) = (
        world.agent_that_keeps("a", soon).await,
        world.agent_that_keeps("b", soon).await,
    );
    let id = world.submit(&line(1_200, 2), &a).await;
    world
        .wait(id, "some commits", |m| m.state.totals.commits >= 5)
        .await;
    // Declared lost while it computes and commits: whoever appends first wins.
    let tip = loop {
        let last = world.last(id).await;
        let events = vec![bound(2, &b.destination(), Cause::Lost { silent_ms: 5_000 })];
        let draft = fiec_broker::Draft::new(
            &last.into(),
            events,
            "policy/test",
            fiec_schemas::Timestamp::now(),
        )
        .unwrap();
        if let Ok(tip) = world.ledger.append(draft, bytes::Bytes::new()).await {
            break tip;
        }
    };
    // As long as it takes the fenced one to drop all that it meant to.
    let place = tip.state.boundary.clone().unwrap();
    let mut least = usize::MAX;
    poll("the fenced one to have dropped its last", async || {
        let now = stored(&world, id).await;
        let settled = now == least;
        least = least.min(now);
        tokio::time::sleep(soon * 10).await;
        settled.then_some(())
    })
    .await;
    world.ledger.state(id, &place).await.unwrap();
    world.dispatch(&[tip], &b.node).await;
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(result(&done), undisturbed(&steps(1_200)));
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn pages_are_fetched_where_the_execution_has_moved_and_only_those_it_touches() {
    let world = World::start().await;
    let a = world.agent_that_keeps("a", Duration::from_secs(15)).await;
    let b = world.agent_that_keeps("b", Duration::from_secs(15)).await;
    // 32 pages of 64 KiB outside of σ; 1,000 capsules touch the first of them.
    let params = json!({
        "capsules": 1_000, "rest_us": 4_000, "state_bytes": 2 << 20, "page_bytes": 65_536,
    });
    let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every": 100 } });
    let id = world.submit(&line.to_string(), &a).await;
    world
        .wait(id, "a commit", |m| m.state.boundary.is_some())
        .await;
    let mut sent = world
        .broker
        .client
        .subscribe("fiec.handover.*")
        .await
        .unwrap();
    move_to(&world, id, &a, b.destination()).await;
    let first = tokio::time::timeout(crate::common::PATIENCE, sent.next())
        .await
        .unwrap()
        .unwrap();
    assert!(first.payload.len() < 16_384, "{}", first.payload.len());
    let done = world.wait_phase(id, "completed").await;
    assert_eq!(done.state.totals.crashes, 0);
    assert_eq!(result(&done), undisturbed(&params));
    let cached = world.folder.path().join("b").join("cache").join("data");
    let pages = std::fs::read_dir(cached).map_or(0, Iterator::count);
    assert!(pages <= 12, "{pages} pages came to b or were made there");
    a.leave().await;
    b.leave().await;
}

/// Bytes that one upload may have under way when something more urgent comes, and what the broker
/// may have been sent before that.
const UNDER_WAY: u64 = 6 << 20;

#[tokio::test]
async fn the_state_of_a_rebinding_goes_before_that_of_a_routine_commit() {
    let world = World::start().await;
    let mut options = world.options("a");
    options.slots = 2;
    let a = world.agent_with(options).await;
    let b = world.agent("b").await;
    let large = |bytes: u64, every: u64| {
        let params = json!({ "capsules": 1_000_000, "rest_us": 20_000, "state_bytes": bytes });
        json!({ "program": "synthetic@1", "params": params, "commit": { "every": every } })
            .to_string()
    };
    let moves = world.submit(&large(8_000_000, 1_000_000), &a).await;
    world.wait_phase(moves, "started").await;
    let mut seen = world.broker.client.subscribe("fiec.>").await.unwrap();
    // Its first commit stores all of it, as its first boundary is reached.
    let routine = world.submit(&large(64_000_000, 1), &a).await;
    let its = subjects::chunk(&world.tenant, routine);
    let mut ledger = subjects::ledger(&world.tenant, moves);
    let (mut before, mut during, mut after) = (0, 0, 0);
    let (mut ordered, mut handed, mut done) = (false, false, false);
    let end = tokio::time::Instant::now() + crate::common::PATIENCE;
    while after == 0 {
        let message = tokio::time::timeout_at(end, seen.next())
            .await
            .expect("the routine commit goes on after the move")
            .unwrap();
        let subject = message.subject.as_str();
        if subject == its {
            let bytes = message.payload.len() as u64;
            match (handed, done) {
                (false, _) => before += bytes,
                (true, false) => during += bytes,
                (true, true) => after += bytes,
            }
            if !ordered {
                ordered = true;
                let request = ControlRequest::Yield {
                    execution: moves,
                    epoch: 1,
                    cause: Cause::Operator {
                        who: "ann".to_owned(),
                    },
                    to: Some(b.destination()),
                    decision: None,
                };
                let body = serde_json::to_vec(&request).unwrap();
                let to = subjects::control(&a.node);
                world.broker.client.publish(to, body.into()).await.unwrap();
            }
        } else if subject == subjects::handover(&b.node) {
            handed = true;
        } else if handed && subject == ledger {
            done = true;
            ledger.clear();
        }
    }
    assert!(before > 0, "the routine commit was under way");
    assert!(during <= UNDER_WAY, "{during} bytes went in between");
    a.leave().await;
    b.leave().await;
}

#[tokio::test]
async fn a_boundary_whose_chunks_are_dropped_cannot_be_compared_and_one_that_was_kept_can() {
    let world = World::start().await;
    let soon = Duration::from_millis(50);
    let (a, b) = (
        world.agent_that_keeps("a", soon).await,
        world.agent_that_keeps("b", soon).await,
    );
    let mut verdicts = world
        .broker
        .client
        .subscribe(subjects::VERDICT)
        .await
        .unwrap();
    // Each capsule changes all of it: no chunk outlives its commit.
    let mut params = steps(2_000);
    params["change"] = json!({ "bytes": LARGE - 24 });
    let line = json!({ "program": "synthetic@1", "params": params, "commit": { "every": 5 } });
    let id = world.submit(&line.to_string(), &a).await;
    world
        .wait(id, "some commits", |m| m.state.totals.commits >= 8)
        .await;
    world.pause(id, &a).await;
    let mut places = Vec::new();
    for seq in 1..=world.last(id).await.seq {
        let entry = world.ledger.by_sequence(seq).await;
        let place = entry
            .ok()
            .and_then(|entry| entry.message.state.boundary.clone());
        places.extend(place.filter(|place| place.seq == Some(seq)));
    }
    let (early, later) = (places[1].clone(), places[4].clone());
    assert!(store::is_large(&early), "{early:?}");
    poll("the early boundary's chunks to be dropped", async || {
        let state = world.ledger.state(id, &early).await;
        state.is_err().then_some(())
    })
    .await;
    let mut asked = 0;
    let mut ask = async |from: Option<StatePlace>, keep| {
        asked += 1;
        let request = ControlRequest::Verify {
            question: asked,
            execution: id,
            tenant: world.tenant.clone(),
            segment: Segment {
                from,
                to: Some(later.index),
                keep,
            },
        };
        poll("b has a slot to spare", async || {
            let reply = world.control(&b.node, &request).await?;
            reply.error.is_none().then_some(())
        })
        .await;
        loop {
            let message = tokio::time::timeout(crate::common::PATIENCE, verdicts.next());
            let message = message.await.unwrap().unwrap();
            let signed: SignedVerdict = serde_json::from_slice(&message.payload).unwrap();
            let verdict: Verdict = serde_json::from_str(&signed.statement).unwrap();
            if verdict.finding.is_some() || verdict.error.is_some() {
                return verdict;
            }
        }
    };
    let verdict = ask(Some(early.clone()), None).await;
    assert!(verdict.gone && verdict.finding.is_none(), "{verdict:?}");
    let error = verdict.error.unwrap();
    let words = format!("cannot be compared: σ of boundary {}", early.index);
    assert!(error.starts_with(&words), "{error}");

    // From the beginning it can, and what is kept there can be begun with again.
    let verdict = ask(None, Some(later.digest)).await;
    assert_eq!(verdict.finding.unwrap().digest, later.digest);
    let kept = StatePlace {
        seq: None,
        ..later.clone()
    };
    let state = world.ledger.state(id, &kept).await.unwrap();
    assert_eq!(state.len() as u64, LARGE);
    store::drop_state(&world.broker, id, later.digest)
        .await
        .unwrap();
    let verdict = ask(Some(kept), None).await;
    assert!(verdict.gone, "{verdict:?}");
    a.leave().await;
    b.leave().await;
}
