//! No object goes that history may refer to which the tables do not have.
use fiec_recorder::missing;
use fiec_schemas::{Digest, Event, subjects};
use sqlx::AssertSqlSafe;

use crate::collect::{World, Written, world};

/// An execution that has made an output and ended.
async fn ended(world: &World, text: &str) -> (Written, Digest) {
    let mut ended = world.submit(r#"{"program":"synthetic@1"}"#).await;
    let output = world.put(text).await;
    world.commit(&mut ended, output).await;
    let cancelled = vec![Event::Cancelled { who: "ann".into() }];
    world.append(&mut ended, cancelled).await;
    (ended, output)
}

/// As after 30 days: the ledgers have aged out of the stream.
async fn forget_ledgers(world: &World) {
    let stream = world.broker.js.get_stream(subjects::LEDGER_STREAM).await;
    stream.unwrap().purge().await.unwrap();
}

async fn execute(world: &World, sql: &str) {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
    done.execute(&world.pool).await.unwrap();
}

/// Collects until an object has gone that nothing refers to, and that is as old as `held`, or
/// younger; asserts that `held` is there, and goes once an operator has released it.
async fn stays_until_it_is_released(world: &World, held: Digest) {
    let (stop, recorder) = world.recorder(false);
    let unused = world.put("what nothing refers to").await;
    while world.has(unused).await {
        world.swept().await;
    }
    assert!(
        world.has(held).await,
        "an output went that missing history may refer to"
    );
    world.swept().await;
    let (objects, bytes) = missing::held_objects(&world.pool).await.unwrap();
    assert_eq!(objects, 1);
    assert!(bytes > 0);
    execute(world, "UPDATE collection SET released_before = now()").await;
    while world.has(held).await {
        world.swept().await;
    }
    world.swept().await;
    let held = missing::held_objects(&world.pool).await.unwrap();
    assert_eq!(held, (0, 0));
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_output_of_an_execution_that_an_emptied_database_does_not_know_stays() {
    let world = world().await;
    let (_ended, output) = ended(&world, "an output from before").await;
    let (stop, recorder) = world.recorder(true);
    world.swept().await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
    forget_ledgers(&world).await;
    execute(&world, "DROP SCHEMA public CASCADE; CREATE SCHEMA public").await;
    fiec_recorder::migrate(&world.pool).await.unwrap();
    let _next = world.submit(r#"{"program":"synthetic@1"}"#).await;
    stays_until_it_is_released(&world, output).await;
}

#[tokio::test]
async fn an_output_of_a_ledger_that_aged_out_before_it_was_recorded_stays() {
    let world = world().await;
    let (_known, _) = ended(&world, "a recorded output").await;
    let (stop, recorder) = world.recorder(true);
    world.swept().await;
    stop.cancel();
    recorder.await.unwrap().unwrap();
    // The recorder is away, or PostgreSQL goes back to a backup.
    let (_unseen, output) = ended(&world, "an output that was never recorded").await;
    forget_ledgers(&world).await;
    let _next = world.submit(r#"{"program":"synthetic@1"}"#).await;
    stays_until_it_is_released(&world, output).await;
}

#[tokio::test]
async fn an_output_that_only_an_unread_message_names_stays() {
    let world = world().await;
    let output = world.put("an output of a newer version").await;
    let row = "INSERT INTO unread_messages VALUES \
               (9, '', 'lab', gen_random_uuid(), now(), $1, 'of a newer version')";
    let row = sqlx::query(row).bind(format!(r#"{{"outputs":["{output}"]}}"#));
    row.execute(&world.pool).await.unwrap();
    let (stop, recorder) = world.recorder(false);
    let unused = world.put("what nothing refers to").await;
    while world.has(unused).await {
        world.swept().await;
    }
    assert!(
        world.has(output).await,
        "an output of an unread message went"
    );
    execute(&world, "DELETE FROM unread_messages").await;
    while world.has(output).await {
        world.swept().await;
    }
    stop.cancel();
    recorder.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_output_that_a_missing_message_of_a_ledger_may_name_stays() {
    let world = world().await;
    execute(&world, "UPDATE collection SET history_since = '-infinity'").await;
    let (_gapped, output) = ended(&world, "an output of a missing boundary").await;
    let stream = world.broker.js.get_stream(subjects::LEDGER_STREAM).await;
    // Message 2 of three: the boundary.
    assert!(stream.unwrap().delete_message(2).await.unwrap());
    stays_until_it_is_released(&world, output).await;
}
