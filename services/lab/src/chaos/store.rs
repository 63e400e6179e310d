//! The broker's store on its disk, damaged as a power loss damages it. The broker must not run.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use fiec_dev_servers::NatsServer;

/// The blocks of a stream, in order.
fn blocks(server: &NatsServer, stream: &str) -> anyhow::Result<Vec<PathBuf>> {
    let folder = server.data_dir().join("jetstream/$G/streams");
    let folder = folder.join(stream).join("msgs");
    let number = |path: &PathBuf| path.file_stem()?.to_str()?.parse::<u64>().ok();
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut blocks: Vec<PathBuf> = paths.collect::<std::io::Result<_>>()?;
    blocks.retain(|path| path.extension().is_some_and(|e| e == "blk"));
    blocks.sort_by_key(number);
    Ok(blocks)
}

/// A stream's last block, and its length in bytes.
fn last_block(server: &NatsServer, stream: &str) -> anyhow::Result<(PathBuf, u64)> {
    let last = blocks(server, stream)?.pop();
    let last = last.with_context(|| format!("{stream} has no block"))?;
    let length = fs::metadata(&last)?.len();
    Ok((last, length))
}

/// Bytes of a stream's last block.
///
/// # Errors
/// If it cannot be found.
pub fn length(server: &NatsServer, stream: &str) -> anyhow::Result<u64> {
    Ok(last_block(server, stream)?.1)
}

/// Cuts `bytes` off the end of a stream, with the index that would say what was there.
///
/// # Errors
/// If its last block is shorter, or cannot be written.
pub fn cut_tail(server: &NatsServer, stream: &str, bytes: u64) -> anyhow::Result<()> {
    let (last, length) = last_block(server, stream)?;
    ensure!(length > bytes, "{} has {length} bytes only", last.display());
    let file = fs::OpenOptions::new().write(true).open(&last)?;
    file.set_len(length - bytes)?;
    drop_index(&last)
}

/// A copy of a stream's messages.
///
/// # Errors
/// If they cannot be read.
pub fn saved(server: &NatsServer, stream: &str) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
    let paths = blocks(server, stream)?.into_iter();
    let copies = paths.map(|path| Ok((path.clone(), fs::read(path)?)));
    copies.collect()
}

/// Puts the messages of a stream back to such a copy. What its consumers have got stays.
///
/// # Errors
/// If they cannot be written.
pub fn put_back(
    server: &NatsServer,
    stream: &str,
    copy: &[(PathBuf, Vec<u8>)],
) -> anyhow::Result<()> {
    for path in blocks(server, stream)? {
        fs::remove_file(path)?;
    }
    for (path, bytes) in copy {
        fs::write(path, bytes)?;
        drop_index(path)?;
    }
    Ok(())
}

fn drop_index(block: &std::path::Path) -> anyhow::Result<()> {
    let index = block.with_file_name("index.db");
    if index.exists() {
        fs::remove_file(index)?;
    }
    Ok(())
}
