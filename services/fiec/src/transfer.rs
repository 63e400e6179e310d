//! Transfers to and from the object store of data, with a progress bar for large ones.

use std::io::{IsTerminal, Seek as _};
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::Context as _;
use fiec_broker::{Broker, BrokerError, store};
use fiec_schemas::Digest;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::io::{AsyncRead, AsyncWriteExt as _, ReadBuf};

use crate::terminal::{self, safe};

/// Transfers of at least this many bytes show a bar.
const BAR_FROM: u64 = 16 << 20;

/// A bar on stderr for a large transfer, if stderr is a terminal.
fn bar(bytes: u64, label: &str, quiet: bool) -> ProgressBar {
    if quiet || bytes < BAR_FROM || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    labelled(bytes, label)
}

/// A bar with a label, which may come from a program.
fn labelled(bytes: u64, label: &str) -> ProgressBar {
    let style = "{msg} {wide_bar:.cyan/dim} {bytes}/{total_bytes} {bytes_per_sec:.dim}";
    let style =
        ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(bytes)
        .with_style(style)
        .with_message(safe(label).into_owned())
}

struct Shown<R> {
    inner: R,
    bar: ProgressBar,
}

impl<R: AsyncRead + Unpin> AsyncRead for Shown<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buffer);
        self.bar.inc((buffer.filled().len() - before) as u64);
        polled
    }
}

/// Stores a file under its digest.
///
/// # Errors
/// If the broker refuses it, or the file cannot be read.
pub async fn upload(
    broker: &Broker,
    file: std::fs::File,
    digest: Digest,
    bytes: u64,
    label: &str,
    quiet: bool,
) -> Result<(), BrokerError> {
    let mut reader = Shown {
        inner: tokio::fs::File::from_std(file),
        bar: bar(bytes, label, quiet),
    };
    // The store never replaces an object. A second push must repair a damaged one.
    store::drop_damaged(broker, digest).await?;
    let stored = store::put_data_from(broker, digest, &mut reader).await;
    reader.bar.finish_and_clear();
    stored
}

/// Writes an object to standard output, after it was fetched and checked. A terminal gets escapes
/// in place of what it would obey; a pipe gets the exact bytes.
///
/// # Errors
/// If it is missing or damaged, the temporary folder has no space, or standard output is closed.
pub async fn print(broker: &Broker, digest: Digest) -> anyhow::Result<()> {
    let mut whole = tempfile::tempfile().context("cannot make a temporary file")?;
    let mut writer = tokio::fs::File::from_std(whole.try_clone()?);
    store::get_data_to(broker, digest, u64::MAX, &mut writer, |_| {}).await?;
    writer.flush().await?;
    whole.rewind()?;
    let mut stdout = std::io::stdout().lock();
    let written = match stdout.is_terminal() {
        true => terminal::show(&mut whole, &mut stdout),
        false => std::io::copy(&mut whole, &mut stdout).map(|_| ()),
    };
    written.context("cannot write to standard output")
}

/// Fetches an object into a file. The file appears complete and checked, or not at all. Returns its
/// size in bytes.
///
/// # Errors
/// If it is missing or damaged, or the file cannot be written.
pub async fn download(
    broker: &Broker,
    digest: Digest,
    into: &Path,
    label: &str,
    quiet: bool,
) -> anyhow::Result<u64> {
    let folder = match into.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let cannot = || format!("cannot write {}", into.display());
    if into.is_dir() {
        anyhow::bail!("{}: it is a folder; name a file", cannot());
    }
    let Some(size) = store::data_size(broker, digest).await? else {
        anyhow::bail!("the object store has no object {digest}");
    };
    let temporary = tempfile::Builder::new()
        .prefix(".fiec-")
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .tempfile_in(folder)
        .with_context(cannot)?;
    let file = temporary.reopen().with_context(cannot)?;
    let mut writer = tokio::fs::File::from_std(file);
    let bar = bar(size, label, quiet);
    let fetched = store::get_data_to(broker, digest, u64::MAX, &mut writer, |copied| {
        bar.set_position(copied);
    })
    .await;
    bar.finish_and_clear();
    let bytes = fetched?;
    writer.sync_all().await.with_context(cannot)?;
    temporary.persist(into).with_context(cannot)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_output_is_no_command_to_the_terminal() {
        let bar = labelled(BAR_FROM, "x\u{1b}]0;owned\u{7}\r");
        assert_eq!(bar.message(), "x\\u001b]0;owned\\u0007\\u000d");
    }
}
