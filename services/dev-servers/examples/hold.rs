//! Starts both servers, prints their process ids and addresses as one JSON
//! line, and holds them until it is killed. The test `orphans` kills it;
//! people may use it to look at the servers alone.

use fiec_dev_servers::{DevServers, NoProgress, Options};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options {
        data_dir: std::env::args_os().nth(1).map(Into::into),
        ..Options::default()
    };
    let servers = DevServers::start(options, &NoProgress).await?;
    let line = serde_json::json!({
        "nats_pid": servers.nats.pid(),
        "nats_url": servers.nats_url(),
        "postgres_pid": servers.postgres.as_ref().map(|p| p.pid()),
        "postgres_url": servers.postgres_url(),
    });
    println!("{line}");
    std::future::pending::<()>().await;
    Ok(())
}
