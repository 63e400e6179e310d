//! Garbage on every subject that FIEC listens to, while an execution computes: random bytes, JSON
//! that was right before somebody spoiled it, headers that mean nothing, capsules of executions that
//! do not exist. What can be refused is refused and recorded, everything stays up, and the bits are
//! right.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::dice::{Dice, is_small, submissions};
use crate::stage::{
    Exempt, Lab, PATIENCE, args, audit, digest_of, slots, undisturbed_synthetic, until,
    workers_with_history,
};
use fiec_lab::cluster::{Cluster, ClusterOptions};
use fiec_schemas::messages::{
    CapsuleBinding, CapsuleMessage, ControlReply, ControlRequest, HANDOVER_HEADER, Handover,
};
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::{Adjustment, Keep};
use fiec_schemas::{
    Cause, Digest, ExecutionId, HardwareVector, InstanceId, NodeId, Submission, subjects,
    submission,
};
use serde_json::{Value, json};

/// Sends spoiled submissions; gives the place of each line that nobody can read as one.
async fn submit(lab: &Lab, dice: &mut Dice, count: usize) -> BTreeSet<(u64, u32)> {
    let (models, mut bad) = (submissions(), BTreeSet::new());
    for _ in 0..count {
        let mut lines = Vec::new();
        for _ in 0..=dice.below(3) {
            let line = dice.garbage(&models);
            let small = submission::lines(&line).all(|(_, line)| is_small(line, &models));
            lines.extend(small.then_some(line));
        }
        let body = lines.join(&b'\n');
        let nobody = dice.below(12) == 0;
        let subject = match nobody {
            true => "fiec.submit.no!name".to_owned(),
            false => subjects::submit(&lab.tenant),
        };
        let (js, headers) = (&lab.broker.js, dice.headers());
        let sent = js.publish_with_headers(subject, headers, body.clone().into());
        let seq = sent.await.unwrap().await.unwrap().sequence;
        for (number, line) in submission::lines(&body) {
            if nobody || Submission::parse(line).is_err() {
                bad.insert((seq, number));
            }
        }
    }
    bad
}

/// Asks a node for what makes no sense; each request is answered, and what cannot be read is
/// refused. How many could not be read.
async fn order(
    lab: &Lab,
    dice: &mut Dice,
    node: &NodeId,
    good: ExecutionId,
    count: usize,
) -> usize {
    let (ghost, who) = (ghost(dice), "nobody".to_owned());
    let (execution, epoch, cause) = (good, 99, Cause::Balance);
    let requests = [
        ControlRequest::Ping,
        ControlRequest::Yield {
            execution,
            epoch,
            cause: cause.clone(),
            to: None,
            decision: None,
        },
        ControlRequest::GiveUp {
            execution,
            epoch,
            cause: cause.clone(),
        },
        ControlRequest::Park {
            execution,
            epoch,
            cause,
            keep: Keep::Host,
        },
        ControlRequest::Split { execution, epoch },
        ControlRequest::Reconfigure {
            execution,
            epoch,
            grant: Grant {
                threads: Some(7),
                ..Grant::default()
            },
            who: who.clone(),
        },
        ControlRequest::Pause {
            execution: ghost,
            who: who.clone(),
        },
        ControlRequest::Adjust {
            execution: ghost,
            who: who.clone(),
            change: Adjustment::default(),
        },
        ControlRequest::Cancel {
            execution: ghost,
            who,
        },
    ];
    let models: Vec<Value> = requests.iter().map(|r| json!(r)).collect();
    let mut refused = 0;
    for n in 0..count {
        // As they are, and spoiled.
        let payload = match models.get(n) {
            Some(model) => model.to_string().into_bytes(),
            None => dice.garbage(&models),
        };
        let unread = serde_json::from_slice::<ControlRequest>(&payload).err();
        let asked = lab
            .broker
            .client
            .request(subjects::control(node), payload.into());
        let answer = tokio::time::timeout(PATIENCE, asked).await.unwrap();
        let reply: ControlReply = serde_json::from_slice(&answer.unwrap().payload).unwrap();
        if unread.is_some() {
            let error = reply.error.unwrap();
            assert!(error.contains("request cannot be read"), "{error}");
            refused += 1;
        } else if (1..models.len()).contains(&n) {
            assert!(reply.error.is_some(), "{} was taken", models[n]);
        }
    }
    refused
}

fn ghost(dice: &mut Dice) -> ExecutionId {
    let bits = (u128::from(dice.next()) << 64) | u128::from(dice.next());
    ExecutionId(uuid::Uuid::from_u128(bits))
}

/// Spoiled vectors of a node, and vectors of a life that it never had.
async fn vectors(lab: &Lab, dice: &mut Dice, node: &NodeId, count: usize) {
    let status = lab.status_of(node).await.unwrap();
    let stranger = HardwareVector {
        instance: InstanceId(ghost(dice).0),
        ..status.vector.unwrap()
    };
    let models = [json!(stranger)];
    for n in 0..count {
        let payload = dice.garbage(&models);
        let to = match n % 5 {
            0 => NodeId::new(format!("ghost-{n}")).unwrap(),
            _ => node.clone(),
        };
        let client = &lab.broker.client;
        let sent = client.publish(subjects::telemetry(&to), payload.into());
        sent.await.unwrap();
    }
}

/// Spoiled capsules for a node, the capsule of what computes there once more, and one of an
/// execution that nobody has submitted, whose id it gives.
async fn capsules(
    lab: &Lab,
    dice: &mut Dice,
    node: &NodeId,
    good: ExecutionId,
    count: usize,
) -> ExecutionId {
    let ledger = lab.journal.of(good);
    let bound = ledger.iter().find(|line| line.phase() == "bound").unwrap();
    let binding = CapsuleBinding {
        seq: bound.seq,
        digest: bound.digest,
        state: bound.state().clone().into(),
    };
    let message = |v: u8, binding: &CapsuleBinding| {
        let bindings = vec![binding.clone()];
        json!(CapsuleMessage {
            v,
            bindings,
            server: None
        })
    };
    let mut forged = binding.clone();
    Arc::make_mut(&mut forged.state).execution = ghost(dice);
    // What is spoiled is another one's: that its bits are what they were before is not checked.
    let mut another = ledger.last().unwrap().state().clone();
    another.execution = ghost(dice);
    let another = CapsuleBinding {
        state: another.into(),
        ..binding.clone()
    };
    let models = [message(1, &another), message(2, &another)];
    let exact = [
        message(1, &binding),
        message(1, &forged),
        message(2, &binding),
    ];
    for n in 0..count {
        let payload = match exact.get(n) {
            Some(exact) => exact.to_string().into_bytes(),
            None => dice.garbage(&models),
        };
        let headers = dice.headers();
        let js = &lab.broker.js;
        let sent = js.publish_with_headers(subjects::capsule(0, node), headers, payload.into());
        sent.await.unwrap().await.unwrap();
    }
    forged.state.execution
}

/// σ of nothing on its way to a node.
async fn handovers(lab: &Lab, dice: &mut Dice, node: &NodeId, count: usize) {
    let (execution, epoch) = (ghost(dice), 3);
    let part = |parts, bytes| Handover::Part {
        execution,
        epoch,
        part: 0,
        parts,
        digest: Digest::of(b"nothing"),
        bytes,
        ledger: Some("{\"v\":1}".to_owned()),
        delta: None,
    };
    let models = [
        part(1, 7),
        part(u32::MAX, u64::MAX),
        Handover::Entrusted { bindings: 2 },
        Handover::Confirmed {
            execution,
            epoch,
            seq: 1,
            bound: None,
            server: None,
        },
        Handover::Abandoned { execution, epoch },
    ];
    let models = models.map(|model| json!(model));
    for n in 0..count {
        let text = match models.get(n) {
            Some(model) => model.to_string(),
            None => String::from_utf8_lossy(&dice.garbage(&models)).into_owned(),
        };
        let mut headers = dice.headers();
        if dice.below(8) > 0 {
            // A header has no lines.
            headers.insert(HANDOVER_HEADER, text.replace(['\r', '\n'], " "));
        }
        let (client, body) = (&lab.broker.client, dice.noise());
        let sent = client.publish_with_headers(subjects::handover(node), headers, body.into());
        sent.await.unwrap();
    }
}

/// Noise on whatever else is listened to; requests are answered with what is wrong.
async fn noise(lab: &Lab, dice: &mut Dice) {
    let client = &lab.broker.client;
    let node = NodeId::new("n1").unwrap();
    for subject in [
        subjects::VERDICT.to_owned(),
        subjects::POLICY_PRESENCE.to_owned(),
        subjects::RECORDER_CHECKPOINT.to_owned(),
        subjects::node_record(&node),
        subjects::rejection("lab"),
        subjects::ledger(&lab.tenant, ghost(dice)),
        "fiec.ledger.lab.nobody".to_owned(),
        "fiec.quota.nobody".to_owned(),
    ] {
        for _ in 0..5 {
            let (headers, noise) = (dice.headers(), dice.noise());
            let sent = client.publish_with_headers(subject.clone(), headers, noise.into());
            sent.await.unwrap();
        }
    }
    let verbs = "submit status cancel pause resume yield reconfigure adjust why quota";
    let verbs = verbs.split(' ').map(|verb| format!("{verb}.lab"));
    let nodes = "cordon uncordon drain undrain revoke release envelope";
    let nodes = nodes.split(' ').map(|verb| format!("node.{verb}"));
    let batch = ["batch.status.lab".to_owned(), "batch.burn.lab".to_owned()];
    for request in verbs.chain(nodes).chain(batch) {
        // No text begins so.
        let noise = [&[0xff][..], &dice.noise()].concat();
        let asked = client.request(format!("fiec.api.{request}"), noise.into());
        let answer = tokio::time::timeout(PATIENCE, asked).await.unwrap();
        let payload = answer.unwrap().payload;
        let reply: Value = serde_json::from_slice(&payload).unwrap();
        let refused = reply["error"].is_string() || reply["errors"][0]["reason"].is_string();
        assert!(refused, "{request}: {reply}");
    }
}

/// Everything runs, says that it is well, and every node is there.
async fn all_are_well(lab: &mut Lab) {
    lab.none_ended().unwrap();
    let services = lab.policies.iter().chain(&lab.recorder);
    let addresses = services.map(|service| crate::stage::address_of(service).unwrap());
    let mut addresses: Vec<String> = addresses.collect();
    for number in 1..=lab.workers.len() {
        let status = lab.status_of(&Cluster::node(number)).await.unwrap();
        let http = status.descriptor.http.unwrap();
        let address = http.trim_start_matches("http://").split('/').next();
        addresses.push(address.unwrap().to_owned());
    }
    for address in addresses {
        lab.fiec(&["health", "--http", &address]).await.expect(0);
    }
    lab.ready().await.unwrap();
}

#[tokio::test]
async fn garbage_on_every_subject_stops_nothing_and_what_is_refused_is_recorded() {
    let mut dice = Dice::new();
    let mut lab = Lab::start(ClusterOptions {
        worker_args: slots(2),
        policy_args: args(&[
            "--no-preemption",
            "--no-slicing",
            "--verify-share",
            "0",
            // Each binding has a message of its own, and a capsule message.
            "--entrust-ms",
            "0",
        ]),
        ..workers_with_history(2)
    })
    .await;
    lab.exempt(Exempt::Garbage);
    let params = json!({"capsules": 700, "rest_us": 5_000, "state_bytes": 2_048});
    let good = json!({"id": "good", "program": "synthetic@1", "params": params,
        "commit": {"every": 20}});
    let id = lab.publish_json(&good).await;
    let node = lab.journal.computing(id, 1).await;

    // For as long as it computes.
    let (mut bad, mut refused, mut forged) = (BTreeSet::new(), 0, Vec::new());
    let began = Instant::now();
    let lives = || {
        let ledger = lab.journal.of(id);
        !ledger.last().unwrap().state().phase.is_terminal()
    };
    while lives() || forged.len() < 3 {
        assert!(began.elapsed() < PATIENCE, "{id} does not get on");
        bad.append(&mut submit(&lab, &mut dice, 20).await);
        refused += order(&lab, &mut dice, &node, id, 30).await;
        vectors(&lab, &mut dice, &node, 30).await;
        forged.push(capsules(&lab, &mut dice, &node, id, 20).await);
        handovers(&lab, &mut dice, &node, 15).await;
        noise(&lab, &mut dice).await;
        lab.broker.client.flush().await.unwrap();
    }
    let rounds = forged.len();
    assert!(bad.len() > 10 * rounds, "{} bad lines", bad.len());
    assert!(refused > 5 * rounds, "{refused} requests refused");
    let end = lab.journal.ended(id, "completed").await;
    assert_eq!(
        digest_of(&end),
        undisturbed_synthetic(&good["params"]).await
    );

    // Each line that is none is in PostgreSQL, with its place; nothing stays in the queue.
    let rejected = "SELECT submission_seq, line FROM rejections WHERE submission_seq IS NOT NULL";
    until("every bad line is recorded", async || {
        for row in lab.sql(rejected).await.rows {
            let number = |at: usize| row[at].as_deref().unwrap().parse::<u64>().unwrap();
            bad.remove(&(number(0), u32::try_from(number(1)).unwrap()));
        }
        bad.is_empty().then_some(())
    })
    .await;
    let nobody = "SELECT count(*) FROM rejections WHERE tenant = 'no!name' \
                  AND reason LIKE '%is no tenant%'";
    assert!(lab.count(nobody).await > 0);
    until("every submission has found its place", async || {
        let queue = lab.broker.js.get_stream(subjects::SUBMIT_STREAM).await;
        let left = queue.ok()?.cached_info().state.messages;
        (left == 0).then_some(())
    })
    .await;
    for id in forged {
        assert!(lab.journal.of(id).is_empty(), "nobody has submitted {id}");
    }
    for ledger in lab.journal.by_execution().values() {
        audit(ledger);
    }

    // All are well, and do what they are there for.
    all_are_well(&mut lab).await;
    let small = json!({"capsules": 3});
    let last = lab.publish("last", "synthetic@1", &small).await;
    lab.journal.ended(last, "completed").await;
    let done = "SELECT count(*) FROM executions WHERE client_id IN ('good', 'last') \
                AND phase = 'completed'";
    until("both are in PostgreSQL", async || {
        (lab.count(done).await == 2).then_some(())
    })
    .await;
    lab.stop().await;
}
