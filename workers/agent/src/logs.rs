//! Programs' output: a bounded stream of lines on `fiec.log.*`, and the tail of stderr.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fiec_broker::Broker;
use fiec_schemas::limits::STDERR_TAIL_LIMIT;
use fiec_schemas::messages::{LogLine, LogStream};
use fiec_schemas::{BoundaryIndex, Epoch, ExecutionId, NodeId, Tenant, subjects};
use tokio::io::{AsyncRead, AsyncReadExt};

const LINE_LIMIT: usize = 8 * 1024;
/// Limits of one child per second. Lines beyond them are counted, not sent.
const LINES_A_SECOND: u32 = 500;
const BYTES_A_SECOND: usize = 512 * 1024;

#[derive(Debug, Clone)]
struct Source {
    tenant: Tenant,
    execution: ExecutionId,
    epoch: Epoch,
}

#[derive(Debug)]
struct State {
    /// The execution that it serves now. Earlier output belongs to none and is dropped.
    source: Option<Source>,
    /// The last boundary, for the lines after it.
    boundary: BoundaryIndex,
    /// The tail of stderr, for a crash report.
    tail: Vec<u8>,
    /// Start of the second in which `lines` and `bytes` are counted.
    window: Instant,
    lines: u32,
    bytes: usize,
    /// Lines beyond the limit since the last notice about them.
    dropped: u64,
    printed: bool,
}

/// One child's output.
#[derive(Debug, Clone)]
pub struct Logs {
    broker: Broker,
    node: NodeId,
    state: Arc<Mutex<State>>,
}

impl Logs {
    /// The output of a child of this node.
    pub fn new(broker: &Broker, node: &NodeId) -> Self {
        let state = State {
            source: None,
            boundary: 0,
            tail: Vec::new(),
            window: Instant::now(),
            lines: 0,
            bytes: 0,
            dropped: 0,
            printed: false,
        };
        Self {
            broker: broker.clone(),
            node: node.clone(),
            state: Arc::new(Mutex::new(state)),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attributes further output to this execution.
    pub fn serve(&self, tenant: &Tenant, execution: ExecutionId, epoch: Epoch, at: BoundaryIndex) {
        let mut state = self.lock();
        state.source = Some(Source {
            tenant: tenant.clone(),
            execution,
            epoch,
        });
        state.boundary = at;
        state.tail.clear();
    }

    /// Attributes further output to this boundary.
    pub fn reached(&self, boundary: BoundaryIndex) {
        self.lock().boundary = boundary;
    }

    /// Whether the child has ever printed.
    pub fn has_printed(&self) -> bool {
        self.lock().printed
    }

    /// The tail of stderr.
    pub fn tail(&self) -> String {
        let state = self.lock();
        let mut text = String::from_utf8_lossy(&state.tail).into_owned();
        while text.len() > STDERR_TAIL_LIMIT {
            text.remove(0);
        }
        text
    }

    /// Reads a pipe to its end.
    pub async fn follow(self, mut pipe: impl AsyncRead + Unpin, stream: LogStream) {
        let (mut buffer, mut chunk) = (Vec::new(), vec![0; 16 * 1024]);
        loop {
            let found = match pipe.read(&mut chunk).await {
                Ok(0) | Err(_) => break,
                Ok(found) => found,
            };
            self.lock().printed = true;
            if stream == LogStream::Stderr {
                let mut state = self.lock();
                state.tail.extend_from_slice(&chunk[..found]);
                let excess = state.tail.len().saturating_sub(STDERR_TAIL_LIMIT);
                state.tail.drain(..excess);
            }
            buffer.extend_from_slice(&chunk[..found]);
            let mut start = 0;
            while let Some(end) = buffer[start..].iter().position(|b| *b == b'\n') {
                self.line(&buffer[start..start + end], stream).await;
                start += end + 1;
            }
            buffer.drain(..start);
            if buffer.len() >= LINE_LIMIT {
                self.line(&buffer, stream).await;
                buffer.clear();
            }
        }
        if !buffer.is_empty() {
            self.line(&buffer, stream).await;
        }
    }

    async fn line(&self, line: &[u8], stream: LogStream) {
        let (source, boundary, dropped) = {
            let mut state = self.lock();
            if state.window.elapsed().as_millis() >= 1_000 {
                (state.window, state.lines, state.bytes) = (Instant::now(), 0, 0);
            }
            let Some(source) = state.source.clone() else {
                return;
            };
            if state.lines >= LINES_A_SECOND || state.bytes >= BYTES_A_SECOND {
                state.dropped += 1;
                return;
            }
            state.lines += 1;
            state.bytes += line.len();
            (source, state.boundary, std::mem::take(&mut state.dropped))
        };
        if dropped > 0 {
            let text = format!(
                "({dropped} lines dropped: over {LINES_A_SECOND} lines or {BYTES_A_SECOND} bytes a second)"
            );
            self.publish(&source, boundary, LogStream::Stderr, text)
                .await;
        }
        let cut = &line[..line.len().min(LINE_LIMIT)];
        self.publish(
            &source,
            boundary,
            stream,
            String::from_utf8_lossy(cut).into_owned(),
        )
        .await;
    }

    async fn publish(
        &self,
        source: &Source,
        boundary: BoundaryIndex,
        stream: LogStream,
        line: String,
    ) {
        let message = LogLine {
            at: self.broker.now(),
            node: self.node.clone(),
            epoch: source.epoch,
            stream,
            boundary,
            line,
        };
        let subject = subjects::log(&source.tenant, source.execution);
        let sent = match serde_json::to_vec(&message) {
            Ok(body) => self
                .broker
                .client
                .publish(subject, body.into())
                .await
                .is_ok(),
            Err(_) => false,
        };
        if !sent {
            self.lock().dropped += 1;
        }
    }
}
