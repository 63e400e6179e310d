//! `fiec data`: files in the object store, by digest.

use std::fs::File;
use std::io::Seek as _;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use fiec_broker::store;
use fiec_schemas::Digest;
use serde_json::json;

use crate::context::Global;
use crate::exit::Outcome;
use crate::transfer;

/// Store files for programs to read, and fetch them, by digest
#[derive(Debug, Args)]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    /// Store a file and print its digest; a parameter {"object": "DIGEST"} refers to it
    Push {
        /// File to store
        file: PathBuf,
    },
    /// Fetch an object and check it
    Get {
        /// Digest of the object
        #[arg(value_parser = parse_digest)]
        digest: Digest,
        /// File to write
        #[arg(long, short)]
        output: PathBuf,
    },
}

fn parse_digest(text: &str) -> Result<Digest, String> {
    text.parse()
        .map_err(|error: fiec_schemas::IdError| error.to_string())
}

/// Runs the command.
///
/// # Errors
/// If the servers cannot be reached, or a file cannot be written.
pub async fn run(args: DataArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.command {
        DataCommand::Push { file } => {
            let read = |error: std::io::Error| {
                eprintln!("cannot read {}: {error}", file.display());
                Outcome::BadInput
            };
            let opened = File::open(&file).and_then(|mut found| {
                let (digest, bytes) = store::digest_of(&found)?;
                found.rewind()?;
                Ok((found, digest, bytes))
            });
            let (found, digest, bytes) = match opened.map_err(read) {
                Ok(opened) => opened,
                Err(outcome) => return Ok(outcome),
            };
            let broker = global.broker("data").await?;
            let label = file.display().to_string();
            transfer::upload(&broker, found, digest, bytes, &label, global.json).await?;
            if global.json {
                println!("{}", json!({"digest": digest, "bytes": bytes}));
            } else {
                println!("{digest}");
            }
            Ok(Outcome::Done)
        }
        DataCommand::Get { digest, output } => {
            let broker = global.broker("data").await?;
            let label = output.display().to_string();
            let bytes = transfer::download(&broker, digest, &output, &label, global.json)
                .await
                .with_context(|| format!("cannot get {}", digest.short()))?;
            if global.json {
                println!(
                    "{}",
                    json!({"digest": digest, "bytes": bytes, "file": output})
                );
            }
            Ok(Outcome::Done)
        }
    }
}
