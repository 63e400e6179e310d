//! The notice that this machine will be revoked: a file that its owner writes, or a signal.
//!
//! The notice goes into the node's flags, like an operator's (`fiec node revoke`). The policy
//! service then moves all executions away before that moment. The notice applies to this life of
//! the agent: the next agent under the node's name may run on another machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fiec_broker::flags;
use fiec_schemas::{NodeFlags, Timestamp};
use serde::Deserialize;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::shared::Shared;

/// Interval of the checks for the file.
const LOOK: Duration = Duration::from_millis(250);
/// Pause before a notice that could not be written is retried.
const AGAIN: Duration = Duration::from_millis(500);
/// Most bytes of a notice. A longer file counts as unreadable.
const NOTICE_LIMIT: u64 = 16 << 10;

/// How an agent learns that its machine will be revoked.
#[derive(Debug, Clone)]
pub struct RevocationOptions {
    /// A file whose existence is the notice. It is empty, a number of seconds, a time (RFC 3339),
    /// or JSON with one of them as `time` or `seconds`. None by default.
    pub file: Option<PathBuf>,
    /// Seconds until the machine is revoked if the notice states no time; 120 by default.
    pub seconds: u32,
    /// Notified by a signal that is the notice.
    pub signal: Arc<Notify>,
}

impl Default for RevocationOptions {
    fn default() -> Self {
        Self {
            file: None,
            seconds: 120,
            signal: Arc::new(Notify::new()),
        }
    }
}

#[derive(Deserialize)]
struct JsonNotice {
    time: Option<Timestamp>,
    seconds: Option<u32>,
}

/// Returns the time of revocation from a notice that was first seen at `seen`.
///
/// # Errors
/// The rule that the notice breaks.
pub fn read_notice(text: &str, seen: Timestamp, seconds: u32) -> Result<Timestamp, String> {
    let after =
        |s: u32| Timestamp::from_micros(seen.micros().saturating_add(i64::from(s) * 1_000_000));
    let text = text.trim();
    if text.is_empty() {
        return Ok(after(seconds));
    }
    if let Ok(seconds) = text.parse::<u32>() {
        return Ok(after(seconds));
    }
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(at);
    }
    match serde_json::from_str::<JsonNotice>(text) {
        Ok(JsonNotice { time: Some(at), .. }) => Ok(at),
        Ok(notice) => Ok(after(notice.seconds.unwrap_or(seconds))),
        Err(error) => Err(format!(
            "the file must be empty, a number of seconds, a time (RFC 3339) or JSON with `time` or \
             `seconds`: {error}"
        )),
    }
}

/// Returns the notice in the file, if it exists: its text, or why it cannot be read.
async fn look(path: &Path) -> Option<Result<String, String>> {
    match tokio::fs::metadata(path).await {
        Ok(about) if about.len() > NOTICE_LIMIT => {
            Some(Err(format!("the file has more than {NOTICE_LIMIT} bytes")))
        }
        Ok(_) => Some(
            tokio::fs::read_to_string(path)
                .await
                .map_err(|error| error.to_string()),
        ),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => Some(Err(error.to_string())),
    }
}

/// Waits for a notice and writes it into the node's flags. If the file disappears, the notice is
/// withdrawn.
pub(crate) async fn follow(shared: Arc<Shared>, stop: CancellationToken) {
    let options = shared.options.revocation.clone();
    let mut tick = tokio::time::interval(LOOK);
    // The file's last text, and the time of revocation that it states.
    let mut noticed: Option<(Result<String, String>, Timestamp)> = None;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = options.signal.notified() => {
                let seconds = i64::from(options.seconds) * 1_000_000;
                let at = Timestamp::from_micros(shared.broker.now().micros() + seconds);
                tell(&shared, Some(at), "signal", &stop).await;
                continue;
            }
            _ = tick.tick(), if options.file.is_some() => {}
        }
        let Some(path) = &options.file else { continue };
        let found = look(path).await;
        if found.as_ref() == noticed.as_ref().map(|(text, _)| text) {
            continue;
        }
        let Some(found) = found else {
            noticed = None;
            tell(&shared, None, "file", &stop).await;
            continue;
        };
        let now = shared.broker.now();
        let default =
            || Timestamp::from_micros(now.micros() + i64::from(options.seconds) * 1_000_000);
        let read = found.clone();
        let at = match read.and_then(|text| read_notice(&text, now, options.seconds)) {
            Ok(at) => at,
            Err(error) => {
                // The file announces a revocation: too early is better than never.
                let path = path.display();
                tracing::error!(%path, error, seconds = options.seconds,
                    "the revocation notice cannot be read; using the default");
                default()
            }
        };
        noticed = Some((found, at));
        tell(&shared, Some(at), "file", &stop).await;
    }
}

/// Writes the time of revocation into the node's flags, or withdraws it.
async fn tell(shared: &Shared, at: Option<Timestamp>, how: &str, stop: &CancellationToken) {
    let (node, life) = (shared.node(), shared.instance);
    let who = format!("{node} ({how})");
    match at {
        Some(at) => tracing::warn!(%node, %at, how, "this machine will be gone"),
        None => tracing::warn!(%node, how, "the revocation of this machine was withdrawn"),
    }
    loop {
        let change = |before: NodeFlags| {
            let ours = before.revoked == Some(life) && before.revoked_at.is_some();
            if at.is_none() && !ours {
                return None;
            }
            Some(NodeFlags {
                revoked_at: at,
                revoked: at.map(|_| life),
                who: who.clone(),
                at: shared.broker.now(),
                ..before
            })
        };
        match flags::change_flags(&shared.broker, node, change).await {
            Ok(_) => return,
            Err(error) => {
                tracing::error!(%node, %error, "cannot announce the revocation; trying again");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(AGAIN) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_empty_or_says_when_in_one_of_the_usual_forms() {
        let seen = Timestamp::from_micros(1_000_000_000_000_000);
        let after = |s: i64| Ok(Timestamp::from_micros(seen.micros() + s * 1_000_000));
        let read = |text| read_notice(text, seen, 120);
        assert_eq!(read(" \n"), after(120));
        assert_eq!(read("30\n"), after(30));
        assert_eq!(read(r#"{"seconds":7}"#), after(7));
        assert_eq!(read(r#"{"action":"terminate"}"#), after(120));
        let at: Timestamp = "2026-09-18T08:22:00Z".parse().unwrap();
        assert_eq!(read("2026-09-18T08:22:00Z"), Ok(at));
        let spot = r#"{"action":"terminate","time":"2026-09-18T08:22:00Z"}"#;
        assert_eq!(read(spot), Ok(at));
        assert!(read("soon").unwrap_err().contains("seconds"));
    }
}
