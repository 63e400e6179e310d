//! What `fiec` does when it knows no server, or when the policy service does nothing for a request.

use std::process::Stdio;
use std::time::Duration;

use crate::stage::{BINARY, Lab, run, workers};
use fiec_schemas::messages::{ApiReply, ExecutionVerb, RefusalCode};
use fiec_schemas::subjects;
use futures_util::StreamExt as _;

#[tokio::test]
async fn without_a_known_server_the_exit_code_is_4_and_the_message_names_fiec_up() {
    // No `fiec up` has written its file here.
    let folder = tempfile::tempdir().unwrap();
    for words in [&["ls"][..], &["status", "x"]] {
        let mut command = tokio::process::Command::new(BINARY);
        command
            .args(words)
            .env("XDG_RUNTIME_DIR", folder.path())
            .env_remove("FIEC_NATS_URL")
            .env_remove("FIEC_DATABASE_URL")
            .stdin(Stdio::null());
        let ran = run(command).await.expect(4);
        assert!(ran.stderr.contains("`fiec up`"), "{words:?}: {ran:?}");
    }
}

fn refused(refusal: RefusalCode) -> ApiReply {
    ApiReply {
        error: Some(format!("{refusal}")),
        refusal: Some(refusal),
        ..ApiReply::default()
    }
}

/// Answers requests to pause one execution, one after the other, in the place of a policy service.
async fn answer(lab: &Lab, replies: Vec<ApiReply>) -> tokio::task::JoinHandle<usize> {
    let client = lab.broker.client.clone();
    let subject = subjects::api_execution(ExecutionVerb::Pause, lab.tenant.clone());
    let mut requests = client.subscribe(subject).await.unwrap();
    client.flush().await.unwrap();
    tokio::spawn(async move {
        let mut answered = 0;
        for reply in replies {
            let Some(reply_to) = requests.next().await.and_then(|request| request.reply) else {
                break;
            };
            let body = serde_json::to_vec(&reply).unwrap();
            client.publish(reply_to, body.into()).await.unwrap();
            client.flush().await.unwrap();
            answered += 1;
        }
        answered
    })
}

#[tokio::test]
async fn a_request_is_made_again_only_where_the_service_did_nothing_and_soon_will() {
    let mut lab = Lab::start(workers(1)).await;
    lab.policies[0].kill();
    lab.policies.clear();
    // The last two may have been done, and cannot be done.
    for last in [RefusalCode::Unanswered, RefusalCode::Ended] {
        let momentary = [RefusalCode::Ending, RefusalCode::Loading, RefusalCode::Busy];
        let replies = momentary.into_iter().chain([last]).map(refused).collect();
        let service = answer(&lab, replies).await;
        let said = lab.fiec(&["pause", "note"]).await.expect(1).stderr;
        assert!(said.contains(last.as_str()), "{said}");
        assert_eq!(service.await.unwrap(), 4);
    }
    // None is there, and then one.
    let (client, subject) = (
        lab.broker.client.clone(),
        subjects::api_execution(ExecutionVerb::Pause, lab.tenant.clone()),
    );
    let late = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut requests = client.subscribe(subject).await.unwrap();
        let request = requests.next().await.unwrap();
        let body = serde_json::to_vec(&refused(RefusalCode::Ended)).unwrap();
        let reply_to = request.reply.unwrap();
        client.publish(reply_to, body.into()).await.unwrap();
        client.flush().await.unwrap();
    });
    let said = lab.fiec(&["pause", "note"]).await.expect(1).stderr;
    assert!(said.contains("ended"), "{said}");
    late.await.unwrap();
    let said = lab.fiec(&["pause", "note"]).await.expect(4).stderr;
    assert!(said.contains("no policy service answers"), "{said}");
    lab.end().await;
}
