//! Numbers that programs report: one curve for each name, without a seam, thinner with age.

use std::sync::Arc;

use crate::support::{bound, boundary, database, number, words};
use fiec_broker::feed::FeedItem;
use fiec_recorder::lab_support::{LedgerWriter, project, thin_old};
use fiec_recorder::missing::{self, LedgerEnd};
use fiec_schemas::series::{Point, Series, SeriesName};
use fiec_schemas::{Cause, Event, ExecutionId, StatePlace, Submission, Tenant, Timestamp};

const CURVE: &str = "SELECT string_agg(concat_ws(' ', boundary, value, node), ', ' ORDER BY boundary) \
                     FROM execution_series WHERE name = 'loss'";

struct Story {
    writer: LedgerWriter,
    id: ExecutionId,
    items: Vec<FeedItem>,
    /// When the next message is stored.
    at: Timestamp,
    /// Time between two messages, in ms.
    pace: i64,
}

impl Story {
    fn new() -> Self {
        let tenant = Tenant::new("lab").unwrap();
        let submission = Submission::parse(br#"{"id":"job","program":"synthetic@1"}"#).unwrap();
        let id = ExecutionId(uuid::Uuid::now_v7());
        let now = Timestamp::now();
        Self {
            writer: LedgerWriter::new(tenant, id, Arc::new(submission), now),
            id,
            items: Vec::new(),
            at: Timestamp::from_micros(now.micros() - 3_600_000_000),
            pace: 400,
        }
    }

    fn say(&mut self, events: Vec<Event>) {
        let seq = self.items.len() as u64 + 1;
        let item = self.writer.append(events, "worker/a/x", self.at, seq);
        self.at = Timestamp::from_micros(self.at.micros() + self.pace * 1_000);
        self.items.push(item.unwrap());
    }

    fn starts(&mut self, epoch: u64, node: &str, cause: Cause) {
        self.say(vec![bound(epoch, node, cause)]);
        self.say(vec![Event::Started {
            epoch,
            computing_since: Timestamp::now(),
        }]);
    }
}

fn noted(points: &[(u64, f64)]) -> Event {
    let points = points.iter().map(|(b, value)| Point::one(*b, *value));
    let name = SeriesName::new("loss").unwrap();
    Event::Noted {
        numbers: Series([(name, points.collect())].into()),
    }
}

/// Three boundaries on a, a step back behind the first, and two on b.
fn stepped_back() -> Vec<FeedItem> {
    let mut story = Story::new();
    story.say(vec![Event::Submitted]);
    story.starts(1, "a", Cause::Initial);
    story.say(vec![boundary(1, b"1"), noted(&[(1, 0.9)])]);
    let first = story.writer.state().boundary.clone();
    story.say(vec![boundary(3, b"3"), noted(&[(2, 0.8), (3, 77.0)])]);
    let corrupt = Cause::Corrupt {
        node: Some("a".parse().unwrap()),
        reason: "other bits".to_owned(),
    };
    story.say(vec![Event::SteppedBack {
        to: Some(StatePlace {
            seq: Some(0),
            ..first.unwrap()
        }),
        cause: corrupt.clone(),
    }]);
    story.starts(2, "b", corrupt);
    story.say(vec![boundary(2, b"2"), noted(&[(2, 0.8)])]);
    story.say(vec![boundary(4, b"4"), noted(&[(3, 0.7), (4, f64::NAN)])]);
    story.items
}

#[tokio::test]
async fn a_step_back_leaves_one_curve_however_the_messages_are_batched() {
    for at_once in [true, false] {
        let db = database().await;
        let items = stepped_back();
        if at_once {
            project(&db.pool, items).await.unwrap();
        } else {
            for item in items {
                project(&db.pool, vec![item]).await.unwrap();
            }
        }
        let curve = words(&db.pool, CURVE).await;
        assert_eq!(curve, "1 0.9 a, 2 0.8 b, 3 0.7 b, 4 NaN b", "{at_once}");
        let who = "SELECT DISTINCT client_id || ' ' || tenant FROM execution_series";
        assert_eq!(words(&db.pool, who).await, "job lab");
    }
}

#[tokio::test]
async fn messages_that_the_broker_lost_leave_no_second_curve() {
    let db = database().await;
    let mut story = Story::new();
    story.say(vec![Event::Submitted]);
    story.starts(1, "a", Cause::Initial);
    story.say(vec![boundary(1, b"1"), noted(&[(1, 0.9)])]);
    let kept = story.writer.clone();
    story.say(vec![boundary(3, b"3"), noted(&[(2, 0.8), (3, 0.7)])]);
    let mut items = story.items.clone();
    // The broker has lost the last message, and the program was started again behind the first
    // boundary: other points come together.
    let mut again = kept;
    for (events, seq) in [
        (vec![boundary(2, b"2"), noted(&[(2, 0.8)])], 5),
        (vec![boundary(4, b"4"), noted(&[(3, 0.7), (4, 0.6)])], 6),
    ] {
        let at = Timestamp::from_micros(Timestamp::now().micros() + 1_000_000);
        items.push(again.append(events, "worker/a/x", at, seq + 1).unwrap());
    }
    let (before, after) = items.split_at(5);
    project(&db.pool, before.to_vec()).await.unwrap();
    assert_eq!(words(&db.pool, CURVE).await, "1 0.9 a, 2 0.8 a, 3 0.7 a");
    project(&db.pool, after.to_vec()).await.unwrap();
    assert_eq!(
        words(&db.pool, CURVE).await,
        "1 0.9 a, 2 0.8 a, 3 0.7 a, 4 0.6 a"
    );
}

#[tokio::test]
async fn a_long_curve_is_thinned_by_age_and_keeps_its_mean_and_its_extremes() {
    let db = database().await;
    let mut story = Story::new();
    story.say(vec![Event::Submitted]);
    story.starts(1, "a", Cause::Initial);
    let most: u64 = 12_000;
    for last in (40..=most).step_by(40) {
        let points: Vec<(u64, f64)> = (last - 39..=last).map(|b| (b, (b % 5) as f64)).collect();
        story.say(vec![boundary(last, &last.to_le_bytes()), noted(&points)]);
    }
    let count = "SELECT count(*) FROM execution_series";
    project(&db.pool, story.items.clone()).await.unwrap();
    let left = number(&db.pool, count).await;
    assert!((1_000..=3_100).contains(&left), "{left}");
    let sum = "SELECT sum(value * reports)::bigint * 1000000 + sum(reports)::bigint FROM execution_series";
    let expected: i64 = (1..=12_000).map(|b| b % 5).sum::<i64>() * 1_000_000 + 12_000;
    assert_eq!(number(&db.pool, sum).await, expected);
    let extremes = "SELECT min(lowest)::bigint * 10 + max(highest)::bigint FROM execution_series";
    assert_eq!(number(&db.pool, extremes).await, 4);
    let newest = "SELECT max(reports) FROM execution_series WHERE boundary > 11500";
    assert_eq!(number(&db.pool, newest).await, 1);

    // Long after its end. The table is from before it.
    let begun = "UPDATE series_thinning SET until = now() - interval '100 days'";
    sqlx::query(begun).execute(&db.pool).await.unwrap();
    let ended = "UPDATE executions SET finished_at = now() - interval '40 days'";
    sqlx::query(ended).execute(&db.pool).await.unwrap();
    let days = |n: i64| Timestamp::from_micros(Timestamp::now().micros() - n * 86_400_000_000);
    thin_old(&db.pool, days(90)).await.unwrap();
    assert_eq!(number(&db.pool, count).await, left, "not so long ago");
    thin_old(&db.pool, days(30)).await.unwrap();
    let few = number(&db.pool, count).await;
    assert!((50..=100).contains(&few), "{few}");
    assert_eq!(number(&db.pool, sum).await, expected);

    let lacks = missing::read(&db.pool, story.id, &LedgerEnd::Absent)
        .await
        .unwrap();
    let page = fiec_recorder::report::render(&db.pool, story.id, &lacks)
        .await
        .unwrap();
    assert!(page.contains("<h2>loss</h2>"), "the report has the curve");
}

#[tokio::test]
async fn commits_in_quick_succession_cost_few_rows_and_lose_no_report() {
    let db = database().await;
    let mut story = Story::new();
    story.say(vec![Event::Submitted]);
    story.starts(1, "a", Cause::Initial);
    story.pace = 1;
    for last in 1..=5_000_u64 {
        let commit = boundary(last, &last.to_le_bytes());
        story.say(vec![commit, noted(&[(last, last as f64)])]);
    }
    project(&db.pool, story.items.clone()).await.unwrap();
    // Five seconds of 240 points each, and the windows at both ends of a batch.
    let rows = number(&db.pool, "SELECT count(*) FROM execution_series").await;
    assert!((600..=1_400).contains(&rows), "{rows}");
    let all = "SELECT sum(reports)::bigint FROM execution_series";
    assert_eq!(number(&db.pool, all).await, 5_000);
    let mean = "SELECT (sum(value * reports) / sum(reports) * 10)::bigint FROM execution_series";
    assert_eq!(number(&db.pool, mean).await, 25_005);
}

#[tokio::test]
async fn the_largest_numbers_do_not_stop_the_recorder() {
    let db = database().await;
    let mut story = Story::new();
    story.say(vec![Event::Submitted]);
    story.starts(1, "a", Cause::Initial);
    let values = [
        f64::MAX,
        f64::MIN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        5e-324,
    ];
    for last in (40..=4_000).step_by(40) {
        let at = |b: u64| values[usize::try_from(b).unwrap() % values.len()];
        let points: Vec<(u64, f64)> = (last - 39..=last).map(|b| (b, at(b))).collect();
        story.say(vec![boundary(last, &last.to_le_bytes()), noted(&points)]);
    }
    project(&db.pool, story.items.clone()).await.unwrap();
    let lacks = missing::read(&db.pool, story.id, &LedgerEnd::Absent)
        .await
        .unwrap();
    let page = fiec_recorder::report::render(&db.pool, story.id, &lacks)
        .await
        .unwrap();
    assert!(
        page.contains("points are NaN, infinite or too large to draw"),
        "{page}"
    );
}
