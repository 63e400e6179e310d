//! `fiec-lab doctor`: the product's checks, and those of the servers for development.

use fiec::commands::doctor::{self, Check, Status};
use fiec::context::Global;
use fiec::exit::Outcome;

/// Checks the machine and the servers.
///
/// # Errors
/// Never for what it finds; see [`doctor::run`].
pub async fn run(global: &Global) -> anyhow::Result<Outcome> {
    let servers = fiec_dev_servers::checks().await;
    let servers = servers.into_iter().map(|check| Check {
        name: check.name,
        status: match check.status {
            fiec_dev_servers::Status::Ok => Status::Ok,
            fiec_dev_servers::Status::Warning => Status::Warning,
            fiec_dev_servers::Status::Missing => Status::Missing,
        },
        detail: check.detail,
        remedy: check.remedy,
    });
    doctor::run(global, servers.collect()).await
}
