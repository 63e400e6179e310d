//! States that take long to arrive at the node that an execution is bound to.

use fiec_lab::cluster::ClusterOptions;
use fiec_schemas::{Cause, Event, ExecutionId, Phase};
use serde_json::{Value, json};

use crate::stage::slow_link::SlowLink;
use crate::stage::{Lab, args, audit, digest_of, undisturbed_synthetic, until, workers};

const STATE_BYTES: u64 = 40_000_000;
/// The state then takes 20 s: a node with a spare slot that reports nothing has 10 s to start.
const BYTES_PER_SECOND: u32 = 2_000_000;

fn params() -> Value {
    json!({"capsules": 20, "rest_us": 300_000, "state_bytes": STATE_BYTES})
}

/// An execution whose worker was killed. The only other workers have the broker behind slow links.
struct Stage {
    lab: Lab,
    id: ExecutionId,
    links: Vec<SlowLink>,
}

impl Stage {
    async fn with_links(count: usize) -> Self {
        let mut worker_args = args(&["--slots", "2"]);
        // The queue on the link is no reason to leave.
        for signal in ["latency", "memory_stall", "fabric"] {
            worker_args.extend(args(&["--threshold", &format!("{signal}=1:0.5:600000")]));
        }
        let mut lab = Lab::start(ClusterOptions {
            worker_args,
            ..workers(1)
        })
        .await;
        let submission = json!({"id": "large", "program": "synthetic@1", "params": params(),
            "commit": {"every": 10}});
        let id = lab.publish_json(&submission).await;
        let holder = lab.journal.computing(id, 1).await;
        let mut links = Vec::new();
        for _ in 0..count {
            let (link, url) = SlowLink::instead_of(&lab.servers.nats_url(), BYTES_PER_SECOND);
            links.push(link);
            let url = ("FIEC_NATS_URL".to_owned(), url);
            lab.start_worker_in(&[url]).unwrap();
        }
        lab.worker(&holder).kill();
        Self { lab, id, links }
    }

    /// It completes with equal bits, and was bound once after the loss.
    async fn ends_where_it_was_bound(&self) {
        let last = self.lab.journal.ended(self.id, "completed").await;
        assert_eq!(digest_of(&last), undisturbed_synthetic(&params()).await);
        let ledger = self.lab.journal.of(self.id);
        audit(&ledger);
        let events = || ledger.iter().flat_map(|line| &line.message.events);
        let not_taken = events().filter_map(|event| match event {
            Event::Bound { cause, .. } => {
                Some(cause).filter(|c| matches!(c, Cause::NotTaken { .. }))
            }
            _ => None,
        });
        let not_taken: Vec<_> = not_taken.collect();
        let what = "its state was arriving, and it was bound elsewhere";
        assert_eq!(not_taken, Vec::<&Cause>::new(), "{what}");
        assert_eq!(last.state().epoch, 2, "one binding follows the loss");
    }
}

#[tokio::test]
async fn a_large_state_that_arrives_slowly_is_awaited_where_it_is_bound() {
    let stage = Stage::with_links(2).await;
    let words = until("the fetch of the state is told", async || {
        let status = stage.lab.fiec(&["status", "large"]).await.stdout;
        let words = status.split("fetching its state: ").nth(1)?;
        Some(words.lines().next()?.to_owned())
    })
    .await;
    assert!(words.ends_with("of 38.1 MiB"), "{words}");
    stage.ends_where_it_was_bound().await;
    let ledger = stage.lab.journal.of(stage.id);
    let under_the_last = ledger.iter().filter(|line| line.state().epoch == 2);
    let phase_at = |is_it: fn(&Phase) -> bool| {
        let found = under_the_last.clone().find(|l| is_it(&l.state().phase));
        found.unwrap().state().at.micros()
    };
    let bound = phase_at(|phase| matches!(phase, Phase::Bound(_)));
    let started = phase_at(|phase| matches!(phase, Phase::Started(_)));
    let took_s = (started - bound) / 1_000_000;
    assert!(took_s >= 15, "the link was slow: {took_s} s");
    stage.lab.end().await;
}

#[tokio::test]
async fn a_fetch_whose_connection_is_cut_goes_on_and_fetches_nothing_twice() {
    let stage = Stage::with_links(1).await;
    let link = &stage.links[0];
    until("most of the state has crossed the link", async || {
        (link.passed() > STATE_BYTES * 3 / 4).then_some(())
    })
    .await;
    link.cut();
    stage.ends_where_it_was_bound().await;
    let passed = link.passed();
    assert!(passed > STATE_BYTES, "{passed} bytes crossed the link");
    assert!(
        passed < STATE_BYTES * 3 / 2,
        "{passed} bytes crossed the link for a state of {STATE_BYTES}"
    );
    stage.lab.end().await;
}
