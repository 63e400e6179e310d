//! The answers that people see who ask with the `nats` command, or publish without an answer.
use crate::stage::{Stage, until};
use fiec_schemas::messages::SubmitReply;
use serde_json::{Value, json};

#[tokio::test]
async fn a_refused_request_is_an_error_of_the_micro_service_and_keeps_its_body() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let ask = async |subject: &str, body: String| {
        let client = &stage.broker.client;
        client
            .request(subject.to_owned(), body.into())
            .await
            .unwrap()
    };
    let lines = "{\"program\":\"synthetic@1\"}\n{\"program\":\"synthetic@1\",\"colour\":1}";
    let answer = ask("fiec.api.submit.lab", lines.to_owned()).await;
    let reply: SubmitReply = serde_json::from_slice(&answer.payload).unwrap();
    assert_eq!((reply.accepted.len(), reply.errors.len()), (1, 1));
    let headers = answer.headers.expect("headers that say what was refused");
    let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
    let said = header("Nats-Service-Error").unwrap();
    assert!(
        said.starts_with("1 of 2 lines refused; line 2, field colour"),
        "{said}"
    );
    assert_eq!(header("Nats-Service-Error-Code").as_deref(), Some("400"));

    let good = ask("fiec.api.nodes", String::new()).await;
    assert!(good.headers.is_none(), "{:?}", good.headers);

    let stats = ask("$SRV.STATS.fiec", String::new()).await;
    let stats: Value = serde_json::from_slice(&stats.payload).unwrap();
    let of = |all: &Value, name: &str| {
        let endpoints = all["endpoints"].as_array().unwrap().clone();
        endpoints.into_iter().find(|e| e["name"] == name).unwrap()
    };
    let submit = of(&stats, "submit");
    let counts = (&submit["num_requests"], &submit["num_errors"]);
    assert_eq!(counts, (&json!(1), &json!(1)), "{submit}");

    let info = ask("$SRV.INFO.fiec", String::new()).await;
    let info: Value = serde_json::from_slice(&info.payload).unwrap();
    let metadata = of(&info, "submit")["metadata"].clone();
    assert_eq!(metadata["request"], json!("lines of submission.json"));
    assert_eq!(metadata["reply"], json!("submit-reply.json"));
    service.stop().await;
}

#[tokio::test]
async fn a_message_without_a_line_is_recorded_as_a_rejection() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    stage.publish(" \n\n").await;
    let record = stage.record("fiec.record.rejection.lab").await;
    assert!(
        record.to_string().contains("the message is empty"),
        "{record}"
    );
    until(|| async { stage.submissions_left().await == 0 }).await;
    let reply: SubmitReply = stage.ask_raw("fiec.api.submit.lab", "").await;
    let error = reply.error.unwrap();
    assert!(error.contains("the request is empty"), "{error}");
    service.stop().await;
}

#[tokio::test]
async fn a_tenant_that_is_new_beside_quotas_is_told_so_once() {
    let stage = Stage::with_nodes(&["n1"]).await;
    let service = stage.service().await;
    let line = r#"{"program":"synthetic@1"}"#;
    let submit = async |tenant: &str| {
        let subject = format!("fiec.api.submit.{tenant}");
        let reply: SubmitReply = stage.ask_raw(&subject, line).await;
        assert_eq!((reply.accepted.len(), &reply.error), (1, &None));
        reply.note
    };
    assert_eq!(submit("other").await, None, "no quota exists");
    let change = json!({"who": "ann", "change": {"running": 4}});
    let reply: Value = stage.ask("fiec.api.quota.lab", &change).await;
    assert!(reply.get("error").is_none(), "{reply}");
    let note = submit("lba").await.unwrap();
    assert!(
        note.contains("tenant lba is new") && note.contains("lab"),
        "{note}"
    );
    for tenant in ["lba", "lab", "other"] {
        assert_eq!(submit(tenant).await, None, "{tenant}");
    }
    service.stop().await;
}
