//! Whose fault it was: a failure costs an attempt only where it is the program's own, and all that
//! tell of it say whose it was.

use std::os::unix::fs::{PermissionsExt as _, symlink};

use fiec_lab::cluster::Cluster;
use fiec_schemas::messages::{ApiReply, Why};
use serde_json::json;

use crate::stage::{Lab, args, slots, workers_with_history};

/// Counts to three, one a capsule.
const COUNTS: &str = r#"
count=0
if [ -f "$FIEC_STATE_DIR/count" ]; then read -r count < "$FIEC_STATE_DIR/count"; fi
count=$((count + 1))
echo "$count" > "$FIEC_STATE_DIR/count"
if [ "$count" -lt 3 ]; then exit 85; fi
"#;

#[tokio::test]
async fn a_node_without_the_interpreter_fails_none_of_twenty() {
    const COUNT: usize = 20;
    let mut options = workers_with_history(1);
    options.worker_args = slots(2);
    options
        .worker_args
        .extend(args(&["--allow-program", "counts@*"]));
    let mut lab = Lab::start(options).await;
    // The first node has no such interpreter.
    let folder = lab.path("bin");
    std::fs::create_dir_all(&folder).unwrap();
    symlink("/bin/sh", folder.join("sh-of-this-test")).unwrap();
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", folder.display());
    let lacks = Cluster::node(1);
    lab.start_worker_in(&[("PATH".to_owned(), path)]).unwrap();

    let folder = lab.path("counts");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = json!({"entry": ["sh-of-this-test", "counts.sh"], "protocol": "state_dir"});
    std::fs::write(folder.join("fiec.json"), manifest.to_string()).unwrap();
    let script = folder.join("counts.sh");
    std::fs::write(&script, COUNTS).unwrap();
    std::fs::set_permissions(script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = folder.display().to_string();
    lab.fiec(&["program", "push", "counts@1", &folder])
        .await
        .expect(0);
    let line = json!({"id": "c", "program": "counts@1", "array": {"count": COUNT}, "retries": 0});
    lab.publish_text(&line.to_string()).await;
    for n in 0..COUNT {
        let last = lab
            .journal
            .ended(lab.id(&format!("c-{n}")), "completed")
            .await;
        assert_eq!(last.message.state.totals.crashes, 0);
    }
    lab.recorded(COUNT).await;
    // Somebody was bound to the first node, and it said what it lacks.
    let charged = format!(
        "SELECT count(*) FROM execution_faults WHERE owner = 'node' AND fault = 'cannot_start' \
         AND node = '{lacks}' AND detail LIKE '%cannot start sh-of-this-test%PATH is%'"
    );
    assert!(lab.count(charged).await > 0);
    let others = "SELECT count(*) FROM execution_faults WHERE owner <> 'node' OR node IS NULL";
    assert_eq!(lab.count(others).await, 0);
    lab.stop().await;
}

#[tokio::test]
async fn a_failure_is_told_with_whose_fault_it_was() {
    let lab = Lab::start(workers_with_history(1)).await;
    let submission = json!({"id": "crashes", "program": "synthetic@1", "retries": 1,
        "params": {"capsules": 5, "crash_at": 3}});
    let id = lab.publish_json(&submission).await;
    lab.journal.ended(id, "failed").await;
    let after = json!({"id": "needs", "program": "synthetic@1", "after": [{"id": "crashes"}]});
    let needs = lab.publish_json(&after).await;
    lab.journal.ended(needs, "failed").await;

    let why = async |id: &str| -> Why {
        let ran = lab.fiec(&["why", id, "--json"]).await.expect(0);
        let reply: ApiReply = serde_json::from_str(&ran.stdout).unwrap();
        reply.why.unwrap()
    };
    let said = why("crashes").await.summary;
    assert!(
        said.contains("crashed 2 times") && said.contains("charged to its program"),
        "{said}"
    );
    let said = why("needs").await;
    assert!(
        said.summary.contains("that follows from its submission"),
        "{said:?}"
    );
    assert!(
        said.would_help[0].contains(&format!("fiec why {id}")),
        "{said:?}"
    );
    let status = lab.fiec(&["status", "crashes"]).await.expect(0).stdout;
    assert!(
        status.contains("2 crashes of the program (2 since the last commit), 0 faults of nodes"),
        "{status}"
    );
    lab.recorded(2).await;
    let rows = lab
        .sql(
            "SELECT client_id, event, owner, fault FROM execution_faults \
             ORDER BY client_id, at, event",
        )
        .await;
    let words = |row: &Vec<Option<String>>| {
        let words: Vec<_> = row
            .iter()
            .map(|word| word.as_deref().unwrap_or("-"))
            .collect();
        words.join(" ")
    };
    let found: Vec<String> = rows.rows.iter().map(words).collect();
    assert_eq!(
        found,
        [
            "crashes crashed program exited",
            "crashes crashed program exited",
            "needs failed submission dependency",
        ]
    );
    lab.stop().await;
}
