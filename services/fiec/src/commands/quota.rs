//! `fiec quota set|list`: the quotas of tenants.

use clap::{Args, Subcommand};
use fiec_schemas::Tenant;
use fiec_schemas::messages::{QuotaChange, QuotaReply, TenantQuota};

use super::serve::parse_bytes;
use crate::client;
use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

/// Set the quotas of tenants, and show quotas and reservations
#[derive(Debug, Args)]
pub struct QuotaArgs {
    #[command(subcommand)]
    command: QuotaCommand,
}

#[derive(Debug, Subcommand)]
enum QuotaCommand {
    /// Set a tenant's limits and weight; limits that you do not name keep their values
    Set(SetArgs),
    /// Show all tenants with limits or a weight, and their reservations
    List,
}

#[derive(Debug, Args)]
struct SetArgs {
    /// The tenant
    #[arg(value_parser = parse_tenant)]
    tenant: Tenant,
    /// Most executions that are bound or running at the same time
    #[arg(long)]
    running: Option<u32>,
    /// Most bound or running executions that hold a device or a share of one
    #[arg(long)]
    devices: Option<u32>,
    /// Most host memory of all bound or running executions, e.g. 64GiB; an execution that asks for
    /// none counts with its node's share of a slot
    #[arg(long, value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Most executions that wait for a node; a submission line beyond it is refused; 0: the tenant
    /// can submit nothing
    #[arg(long)]
    waiting: Option<u32>,
    /// Share relative to other tenants, from 1 to 1000
    #[arg(long)]
    weight: Option<u32>,
    /// Remove all limits and the weight first
    #[arg(long)]
    clear: bool,
}

fn parse_tenant(text: &str) -> Result<Tenant, String> {
    text.parse()
        .map_err(|error: fiec_schemas::IdError| error.to_string())
}

/// Runs the command.
///
/// # Errors
/// If no policy service answers.
pub async fn run(args: QuotaArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("quota").await?;
    let reply = match args.command {
        QuotaCommand::List => client::me(&broker).quotas().await?,
        QuotaCommand::Set(set) => {
            let change = QuotaChange {
                clear: set.clear,
                running: set.running,
                devices: set.devices,
                memory_bytes: set.memory,
                waiting: set.waiting,
                weight: set.weight,
            };
            if change == QuotaChange::default() {
                eprintln!(
                    "no change named: use --running, --devices, --memory, --waiting, --weight or \
                     --clear"
                );
                return Ok(Outcome::BadInput);
            }
            client::me(&broker).quota(&set.tenant, change).await?
        }
    };
    if let Some(error) = &reply.error {
        if global.json {
            println!("{}", serde_json::to_string(&reply)?);
        } else {
            eprintln!("{error}");
        }
        return Ok(Outcome::BadInput);
    }
    print(&reply, global.json)?;
    if let Some(warning) = reply.warning.filter(|_| !global.json) {
        eprintln!("{warning}");
    }
    Ok(Outcome::Done)
}

fn print(reply: &QuotaReply, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string(reply)?);
        return Ok(());
    }
    if reply.tenants.is_empty() {
        println!("no tenant has limits");
        return Ok(());
    }
    let head = [
        "tenant", "running", "devices", "memory", "waiting", "weight", "set by", "at",
    ];
    println!("{}", ui::table(head, reply.tenants.iter().map(row)));
    Ok(())
}

fn row(tenant: &TenantQuota) -> Vec<String> {
    let quota = tenant.quota.as_ref();
    let of = |used: String, limit: Option<String>| match limit {
        Some(limit) => format!("{used} of {limit}"),
        None => used,
    };
    let number = |used: u32, limit: Option<u32>| of(used.to_string(), limit.map(|n| n.to_string()));
    let memory = quota.and_then(|q| q.memory_bytes).map(ui::bytes);
    vec![
        tenant.tenant.to_string(),
        number(tenant.running, quota.and_then(|q| q.running)),
        number(tenant.devices, quota.and_then(|q| q.devices)),
        of(ui::bytes(tenant.memory_bytes), memory),
        of(
            tenant.waiting.map_or_else(String::new, |n| n.to_string()),
            quota.and_then(|q| q.waiting).map(|n| n.to_string()),
        ),
        quota.map_or(1, |q| q.weight()).to_string(),
        quota.map_or_else(String::new, |q| q.who.clone()),
        quota.map_or_else(String::new, |q| q.at.to_string()),
    ]
}
