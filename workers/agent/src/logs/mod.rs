//! Programs' output: a bounded stream of pieces on `fiec.log.*`, and the tail of stderr.
//!
//! One thread of the process reads the pipes of all children, so that a program that prints much
//! takes no time of the runners.

mod pieces;
mod state;
mod thread;

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use fiec_broker::{Broker, leader};
use fiec_schemas::limits::STDERR_TAIL_LIMIT;
use fiec_schemas::messages::{LogLine, LogStream};
use fiec_schemas::{BoundaryIndex, Epoch, ExecutionId, NodeId, Tenant, subjects};
use tokio::net::unix::pipe;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use pieces::{BYTES_A_SECOND, Content, PIECES_A_SECOND, Piece, Pieces};
use state::{Found, Owner, Source, State};

/// Bytes that are read at a time: what a pipe holds.
const CHUNK: usize = 64 * 1024;
/// The connection takes pieces within this time, or they are dropped.
const TAKEN_WITHIN: Duration = Duration::from_millis(100);
/// At the end of a run its last piece is awaited in the stream, at most for so long.
const STORED_WITHIN: Duration = Duration::from_millis(500);
/// If it is not there by then, it is published again for so long.
const STORED_AT_LAST: Duration = Duration::from_secs(600);
const AGAIN: Duration = Duration::from_secs(1);
/// A program that has yielded is given this time to end; what it prints belongs to its run.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Bytes of stdout and of stderr that a program has written under one binding. An attempt continues
/// the count of the one before.
pub type Printed = [u64; 2];

/// The last published piece, until it is known to be stored.
#[derive(Debug)]
struct Sent {
    subject: String,
    body: Bytes,
}

#[derive(Debug)]
struct Inner {
    broker: Broker,
    node: NodeId,
    state: Mutex<State>,
    /// Held while pieces are cut and published, so that they leave in their order.
    turn: tokio::sync::Mutex<Option<Sent>>,
    /// Wakes the readers when the child serves another execution.
    served: Notify,
}

/// One child's output.
#[derive(Debug, Clone)]
pub struct Logs(Arc<Inner>);

impl Logs {
    /// The output of a child of this node.
    pub fn new(broker: &Broker, node: &NodeId) -> Self {
        let state = State {
            owner: Owner::First,
            boundary: 0,
            tail: Vec::new(),
            pieces: Pieces::new(Instant::now()),
            pipes: Vec::new(),
            printed: false,
        };
        Self(Arc::new(Inner {
            broker: broker.clone(),
            node: node.clone(),
            state: Mutex::new(state),
            turn: tokio::sync::Mutex::default(),
            served: Notify::new(),
        }))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attributes further output to this execution. `printed`: what it has printed under this
    /// binding before.
    pub fn serve(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        epoch: Epoch,
        at: BoundaryIndex,
        printed: Printed,
    ) {
        let mut state = self.lock();
        match state.owner {
            Owner::First | Owner::Execution(_) => {}
            Owner::Nobody => {
                // The child has printed this while it was idle.
                state.read_all(&mut [0; 4 * 1024]);
                state.pieces.clear();
            }
            Owner::Leaving { .. } => {
                let (source, pieces) = (state.source(), state.rest());
                state.pieces.clear();
                self.publish_late(source, pieces);
            }
        }
        if !matches!(state.owner, Owner::First) {
            state.tail.clear();
        }
        state.pieces.begin(printed);
        state.owner = Owner::Execution(Source {
            tenant: tenant.clone(),
            execution,
            epoch,
        });
        state.boundary = at;
        // Output that the child printed at its start is due now.
        self.0.served.notify_waiters();
    }

    /// The child is idle: further output belongs to no execution, except of a run that has
    /// yielded a moment ago.
    pub fn idle(&self) {
        let mut state = self.lock();
        if !matches!(state.owner, Owner::Leaving { .. }) {
            state.owner = Owner::Nobody;
        }
    }

    /// The run has yielded: what the program prints on its way out still belongs to it.
    pub fn leave(&self) {
        let mut state = self.lock();
        if let Owner::Execution(source) = &state.owner {
            state.owner = Owner::Leaving {
                source: source.clone(),
                until: Instant::now() + LAST_WORDS,
            };
        }
    }

    /// Attributes further output to this boundary.
    pub fn reached(&self, boundary: BoundaryIndex) {
        self.lock().boundary = boundary;
    }

    /// Whether the child has ever printed.
    pub fn has_printed(&self) -> bool {
        self.lock().printed
    }

    /// What the execution has printed under its binding.
    pub fn printed(&self) -> Printed {
        self.lock().pieces.offsets()
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

    /// Reads a pipe to its end, on the thread of logs.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn follow(&self, pipe: OwnedFd, stream: LogStream) -> std::io::Result<JoinHandle<()>> {
        // Both are one open file: what one does not find, the other does not find either.
        self.lock()
            .pipes
            .push((Arc::new(pipe.try_clone()?), stream));
        let logs = self.clone();
        let work = async move {
            if let Err(error) = logs.read(pipe, stream).await {
                tracing::error!(%error, "the output of a program cannot be read");
            }
        };
        Ok(thread::handle()?.spawn(work))
    }

    async fn read(self, pipe: OwnedFd, stream: LogStream) -> std::io::Result<()> {
        let pipe = pipe::Receiver::from_owned_fd(pipe)?;
        let mut chunk = vec![0; CHUNK];
        loop {
            // Before the look: a notice that comes in between counts.
            let served = self.0.served.notified();
            let due = self.lock().due();
            let wake = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                ready = pipe.readable() => {
                    ready?;
                    let mut turn = self.0.turn.lock().await;
                    let ((found, pieces), source) = {
                        let mut state = self.lock();
                        let read = |chunk: &mut [u8]| pipe.try_read(chunk);
                        (state.read(stream, &mut chunk, read), state.source())
                    };
                    self.publish(&mut turn, source, pieces).await;
                    if let Found::End = found {
                        return Ok(());
                    }
                }
                () = served => {}
                () = wake => {
                    let mut turn = self.0.turn.lock().await;
                    let (pieces, source) = {
                        let mut state = self.lock();
                        (state.tick(Instant::now()), state.source())
                    };
                    self.publish(&mut turn, source, pieces).await;
                }
            }
            // A program that prints without a pause leaves the others their turn.
            tokio::task::yield_now().await;
        }
    }

    /// Publishes all that the program has written so far, and waits until it is stored. To be
    /// called at the end of a run, before its last message is appended: a follower stops there.
    pub async fn rest(&self) {
        let is_done = match self.0.turn.try_lock() {
            Ok(turn) => turn.is_none() && self.lock().is_empty(),
            Err(_) => false,
        };
        if !is_done {
            // Boxed: most programs print nothing, and each runner's future would have room for it.
            Box::pin(self.publish_rest()).await;
        }
    }

    async fn publish_rest(&self) {
        let mut turn = self.0.turn.lock().await;
        let (pieces, source) = {
            let mut state = self.lock();
            (state.rest(), state.source())
        };
        self.publish(&mut turn, source.clone(), pieces).await;
        let untold = {
            let mut state = self.lock();
            let now = Instant::now();
            let mut untold = state.finish(LogStream::Stdout, now);
            untold.extend(state.finish(LogStream::Stderr, now));
            untold
        };
        let mut owed = Vec::new();
        if let Some(sent) = turn.take()
            && !self.is_stored(&sent, STORED_WITHIN).await
        {
            owed.push(sent);
        }
        if let Some((source, boundary)) = source {
            let sent = |piece: &Piece| self.message(&source, boundary, piece);
            owed.extend(untold.iter().filter_map(sent));
        }
        if !owed.is_empty()
            && let Ok(thread) = thread::handle()
        {
            tracing::warn!("the end of a program's output is not stored yet");
            let logs = self.clone();
            thread.spawn(async move { logs.insist(owed).await });
        }
    }

    /// Publishes, on the thread of logs, what the program printed on its way out of a run.
    fn publish_late(&self, source: Option<(Source, BoundaryIndex)>, pieces: Vec<Piece>) {
        if pieces.is_empty() {
            return;
        }
        let logs = self.clone();
        let work = async move {
            let mut turn = logs.0.turn.lock().await;
            logs.publish(&mut turn, source, pieces).await;
        };
        match thread::handle() {
            Ok(thread) => drop(thread.spawn(work)),
            Err(error) => tracing::error!(%error, "the last output of a run is lost"),
        }
    }

    /// Publishes messages until they are stored.
    async fn insist(&self, owed: Vec<Sent>) {
        let end = Instant::now() + STORED_AT_LAST;
        for sent in owed {
            while Instant::now() < end {
                let publish = self.send(&sent);
                if let Ok(true) = tokio::time::timeout(AGAIN, publish).await
                    && self.is_stored(&sent, AGAIN).await
                {
                    break;
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
    }

    async fn send(&self, sent: &Sent) -> bool {
        let client = &self.0.broker.client;
        let publish = client.publish(sent.subject.clone(), sent.body.clone());
        publish.await.is_ok()
    }

    /// Whether the stream has this message, as the last of its subject. The stream acknowledges
    /// nothing, so it is asked.
    async fn is_stored(&self, sent: &Sent, within: Duration) -> bool {
        let look = async {
            let stream = self.0.broker.js.get_stream_no_info(subjects::LOG_STREAM);
            let Ok(stream) = stream.await else {
                return false;
            };
            let mut pause = Duration::from_millis(1);
            loop {
                let last = leader::last(&stream, &sent.subject).await;
                if last.is_ok_and(|last| last.is_some_and(|last| last.payload == sent.body)) {
                    return true;
                }
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
        };
        tokio::time::timeout(within, look).await.unwrap_or(false)
    }

    /// Publishes pieces. What the connection does not take counts as dropped.
    async fn publish(
        &self,
        turn: &mut Option<Sent>,
        source: Option<(Source, BoundaryIndex)>,
        pieces: Vec<Piece>,
    ) {
        let Some((source, boundary)) = source else {
            return;
        };
        let end = tokio::time::Instant::now() + TAKEN_WITHIN;
        for (at, piece) in pieces.iter().enumerate() {
            let sent = self.message(&source, boundary, piece);
            if let Some(sent) = sent
                && let Ok(true) = tokio::time::timeout_at(end, self.send(&sent)).await
            {
                *turn = Some(sent);
                continue;
            }
            return self.lock().pieces.lost(&pieces[at..]);
        }
    }

    fn message(&self, source: &Source, boundary: BoundaryIndex, piece: &Piece) -> Option<Sent> {
        let mut coded = None;
        let (line, part, dropped) = match &piece.content {
            Content::Text { bytes, part } => {
                let line = String::from_utf8_lossy(bytes);
                if let Cow::Owned(_) = &line {
                    coded = Some(BASE64_STANDARD.encode(bytes));
                }
                (line.into_owned(), *part, None)
            }
            Content::Dropped(dropped) => {
                let (lines, bytes) = (dropped.lines, dropped.bytes);
                let line = format!(
                    "({lines} lines, {bytes} bytes dropped: over {PIECES_A_SECOND} lines or \
                     {BYTES_A_SECOND} bytes a second, or the broker did not take them)"
                );
                (line, false, Some(*dropped))
            }
        };
        let message = LogLine {
            at: self.0.broker.now(),
            node: self.0.node.clone(),
            epoch: source.epoch,
            stream: piece.stream,
            boundary,
            line,
            bytes: coded,
            part,
            offset: Some(piece.offset),
            dropped,
        };
        Some(Sent {
            subject: source.subject(),
            body: serde_json::to_vec(&message).ok()?.into(),
        })
    }
}
