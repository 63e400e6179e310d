//! The leader of the ledgers is cut off from the two other servers, and its own clients still reach
//! it: a worker, a policy service, and those of this test. For some seconds two servers believe that
//! they lead. Nothing that anybody was told may be lost.

use std::time::Duration;

use fiec_broker::{Broker, ConnectOptions, leader};
use fiec_dev_servers::Routes;
use fiec_lab::cluster::{Cluster, ClusterOptions};
use fiec_lab::judge::oracles::answers::Said;
use fiec_schemas::{ExecutionId, Tenant, subjects};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::all_end;
use crate::stage::{
    Lab, Line, PATIENCE, run, slots, undisturbed_synthetic, until, workers_with_history,
};

/// Servers, and workers and policy services: one of each is connected to each server.
const SERVERS: usize = 3;
/// Executions that compute when the leader is cut off: two on each worker.
const LONG: usize = 2 * SERVERS;

/// Which server leads a stream, by the word of this one.
async fn leader_by(lab: &Lab, server: usize, stream: &str) -> Option<usize> {
    let server = lab.servers.brokers().nth(server).unwrap();
    let page = until("a server says who leads", async || {
        server.page("/jsz?accounts=true&streams=true").await
    })
    .await;
    let accounts = page["account_details"].as_array()?.iter();
    let streams = accounts.filter_map(|account| account["stream_detail"].as_array());
    let mut streams = streams.flatten();
    let stream = streams.find(|found| found["name"] == stream)?;
    let name = stream["cluster"]["leader"].as_str()?;
    name.strip_prefix('s')?
        .parse::<usize>()
        .ok()?
        .checked_sub(1)
}

/// Makes a server lead a stream.
async fn make_leader(lab: &Lab, server: usize, stream: &str) {
    let subject = format!("$JS.API.STREAM.LEADER.STEPDOWN.{stream}");
    let ask = json!({"placement": {"preferred": format!("s{}", server + 1)}}).to_string();
    until("the server leads", async || {
        if leader_by(lab, server, stream).await == Some(server) {
            return Some(());
        }
        let client = &lab.broker.client;
        let _ = client.request(subject.clone(), ask.clone().into()).await;
        sleep(Duration::from_millis(500)).await;
        None
    })
    .await;
}

/// A connection to this server. It stays there as long as the server lives.
async fn client_of(lab: &Lab, server: usize) -> Broker {
    let url = lab.servers.nats_urls().swap_remove(server);
    let options = ConnectOptions::new(url, "test");
    Broker::connect(options).await.unwrap()
}

fn routes(lab: &Lab) -> &Routes {
    lab.servers.routes.as_ref().unwrap()
}

/// An array of executions that commit at each fifth boundary: so seldom that a ledger keeps all its
/// messages until a recorder that is cut off reads them. Its id lets it be submitted again.
fn array(id: &str, count: usize, params: &Value) -> Value {
    json!({"id": id, "program": "synthetic@1", "array": {"count": count}, "params": params,
        "commit": {"every": 5}})
}

/// Submits a line until its stream has acknowledged it.
async fn submit(broker: Broker, tenant: Tenant, line: Value) {
    loop {
        let subject = subjects::submit(&tenant);
        let sent = broker.js.publish(subject, line.to_string().into()).await;
        if let Ok(sent) = sent
            && sent.await.is_ok()
        {
            return;
        }
        sleep(Duration::from_millis(100)).await;
    }
}

/// A cluster under load.
struct Scene {
    lab: Lab,
    /// The server that is cut off. It leads the submissions, and then the ledgers.
    alone: usize,
    /// Parameters of the arrays, with how many executions have them.
    load: Vec<(Value, usize)>,
}

impl Scene {
    async fn begin() -> Self {
        let lab = Lab::start(ClusterOptions {
            brokers: SERVERS,
            policies: 3,
            worker_args: slots(3),
            ..workers_with_history(3)
        })
        .await;
        let leader = until("the ledgers have a leader", async || {
            leader_by(&lab, 0, subjects::LEDGER_STREAM).await
        })
        .await;
        let alone = (leader + 1) % SERVERS;
        make_leader(&lab, alone, subjects::SUBMIT_STREAM).await;
        let mut scene = Self {
            lab,
            alone,
            load: Vec::new(),
        };
        let long = json!({"capsules": 150, "rest_us": 100_000, "state_bytes": 1_024,
            "emit_every": 5});
        let broker = scene.lab.broker.clone();
        scene.submit(&broker, "long", LONG, long).await;
        scene.more(&broker, "before").await;
        for server in 0..SERVERS {
            scene.one_on(server).await;
        }
        scene
    }

    async fn submit(&mut self, broker: &Broker, id: &str, count: usize, params: Value) {
        let line = array(id, count, &params);
        let submitted = submit(broker.clone(), self.lab.tenant.clone(), line);
        timeout(PATIENCE, submitted).await.unwrap();
        self.load.push((params, count));
    }

    /// Submits short executions.
    async fn more(&mut self, broker: &Broker, id: &str) {
        let short = json!({"capsules": 4, "rest_us": 50_000, "state_bytes": 64});
        self.submit(broker, id, 30, short).await;
    }

    /// Waits until one of the long executions computes on the worker of this server.
    async fn one_on(&self, server: usize) -> (String, ExecutionId) {
        let node = Cluster::node(server + 1);
        let names = (0..LONG).map(|at| format!("long-{at}"));
        let all: Vec<_> = names.map(|name| (self.lab.id(&name), name)).collect();
        until("a long execution computes on each worker", async || {
            let is_here = |id| {
                let ledger = self.lab.journal.of(id);
                let last = ledger.last();
                last.is_some_and(|last| last.started_on().as_ref() == Some(&node))
            };
            let (id, name) = all.iter().find(|(id, _)| is_here(*id))?;
            Some((name.clone(), *id))
        })
        .await
    }

    /// Cuts a new leader of the ledgers off: it takes the longest to notice. Returns when the others
    /// have elected another. Gives the time of the cut.
    async fn cut(&self) -> Instant {
        make_leader(&self.lab, self.alone, subjects::LEDGER_STREAM).await;
        routes(&self.lab).cut(self.alone);
        let cut = Instant::now();
        until("the others have another leader", async || {
            let found = leader_by(&self.lab, self.other(), subjects::LEDGER_STREAM).await;
            found.filter(|found| *found != self.alone)
        })
        .await;
        cut
    }

    fn join(&self) {
        routes(&self.lab).join(self.alone);
    }

    /// A server that is not cut off.
    fn other(&self) -> usize {
        (self.alone + 1) % SERVERS
    }

    /// Every execution completes with the bits of an undisturbed run, and every promise holds.
    async fn end(self) {
        let Self { mut lab, load, .. } = self;
        all_end(&lab, load.iter().map(|(_, count)| count).sum()).await;
        for (params, _) in &load {
            let same = load.iter().filter(|(other, _)| other == params);
            let count: usize = same.map(|(_, count)| count).sum();
            let digest = undisturbed_synthetic(params).await;
            let query =
                format!("SELECT count(*) FROM executions WHERE result->>'digest' = '{digest}'");
            let found = usize::try_from(lab.count(query).await).unwrap();
            assert_eq!(found, count, "executions with {params} have {digest}");
        }
        assert_eq!(lab.count("SELECT count(*) FROM lost_rows").await, 0);
        lab.none_ended().unwrap();
        lab.end().await;
    }
}

#[tokio::test]
async fn a_leader_that_is_cut_off_while_another_is_elected_takes_no_commit_back() {
    let mut scene = Scene::begin().await;
    let others = client_of(&scene.lab, scene.other()).await;
    scene.cut().await;
    // The old leader believes for at least ten seconds that it still leads.
    scene.more(&others, "meanwhile").await;
    scene.join();
    scene.end().await;
}

#[tokio::test]
async fn a_leader_that_is_cut_off_until_it_gives_up_confirms_nothing_that_is_lost() {
    let mut scene = Scene::begin().await;
    let others = client_of(&scene.lab, scene.other()).await;
    let (name, id) = scene.one_on(scene.alone).await;
    // Its own clients ask it while it is alone.
    let alone = client_of(&scene.lab, scene.alone).await;
    let late = json!({"capsules": 4, "rest_us": 1_000, "state_bytes": 128});
    let line = array("late", 5, &late);
    let url = scene.lab.servers.nats_urls().swap_remove(scene.alone);

    let cut = scene.cut().await;
    let asked = tokio::spawn(submit(alone, scene.lab.tenant.clone(), line));
    let mut pause = scene.lab.command(&["pause", &name]);
    pause.env("FIEC_NATS_URL", url);
    let (pause, ()) = tokio::join!(run(pause), scene.more(&others, "meanwhile"));
    until("the server that is cut off leads no more", async || {
        let leader = leader_by(&scene.lab, scene.alone, subjects::LEDGER_STREAM).await;
        (leader != Some(scene.alone)).then_some(())
    })
    .await;
    let led = cut.elapsed();
    assert!(led < leader::CUT_OFF, "it led for {led:?} more");
    assert!(!asked.is_finished(), "a server alone has stored a line");
    scene.join();

    timeout(PATIENCE, asked).await.unwrap().unwrap();
    scene.load.push((late, 5));
    if pause.code == 0 {
        scene.lab.answers.note(id, Said::Paused);
        let paused = |line: &Line| (line.phase() == "paused").then_some(());
        let journal = &scene.lab.journal;
        journal.find(id, "a confirmed pause holds", paused).await;
    }
    // A request without an answer may be carried out later.
    until("it completes", async || {
        match scene.lab.journal.of(id).last()?.phase() {
            "completed" => return Some(()),
            "paused" => drop(scene.lab.fiec(&["resume", &name]).await),
            _ => {}
        }
        None
    })
    .await;
    scene.end().await;
}
