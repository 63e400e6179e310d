//! The agent's end of a child's socket. Reads are cancel-safe: a later call continues.

use std::io::{Error, ErrorKind};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use fiec_kit::frames::{self, FrameError, Order, PREFIX_BYTES, Report};
use fiec_kit::room::Room;
use fiec_schemas::package::Grant;
use fiec_schemas::values;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const READ_AHEAD: usize = 64 * 1024;
/// A child that accepts nothing for this long is stopped, or does not read its orders.
const TAKES_WITHIN: Duration = Duration::from_secs(60);

/// A connection with a child.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    buffer: BytesMut,
    /// A head whose body has not arrived in full.
    awaiting: Option<(Report, usize)>,
    /// The room of the present run.
    room: Room,
}

impl Link {
    /// A connection on this socket.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: BytesMut::with_capacity(READ_AHEAD),
            awaiting: None,
            room: Room::NONE,
        }
    }

    /// Makes room for the reports of a run.
    pub fn make(&mut self, room: Room) {
        self.room = room;
    }

    /// The run is over: a large σ that was read keeps no memory.
    pub fn idle(&mut self) {
        self.buffer = BytesMut::from(&self.buffer[..]);
    }

    /// Another grant holds for the present run.
    pub fn widen(&mut self, grant: &Grant) {
        self.room = self.room.widened_to(grant);
    }

    fn take(&mut self) -> Result<Option<(Report, Bytes)>, FrameError> {
        if self.awaiting.is_none() {
            let Some((prefix, rest)) = self.buffer.split_first_chunk::<PREFIX_BYTES>() else {
                return Ok(None);
            };
            let (head, body) = frames::lengths(prefix)?;
            let Some(text) = rest.get(..head) else {
                return Ok(None);
            };
            let report = frames::parse(text)?;
            if matches!(report, Report::Completed { .. }) {
                values::check(text, "")?;
            }
            self.room.admits(&report, body)?;
            let body = usize::try_from(body).map_err(std::io::Error::other)?;
            drop(self.buffer.split_to(PREFIX_BYTES + head));
            self.awaiting = Some((report, body));
        }
        match &self.awaiting {
            Some((_, body)) if self.buffer.len() >= *body => {}
            _ => return Ok(None),
        }
        Ok(self
            .awaiting
            .take()
            .map(|(report, body)| (report, self.buffer.split_to(body).freeze())))
    }

    /// Returns the next report with its body, or none once the child is gone.
    ///
    /// # Errors
    /// When bytes are no frame, or announce a report that has no room. No byte of its body is read
    /// then.
    pub async fn next(&mut self) -> Result<Option<(Report, Bytes)>, FrameError> {
        loop {
            if let Some(found) = self.take()? {
                return Ok(Some(found));
            }
            // A body gets its memory once.
            let missing = match &self.awaiting {
                Some((_, body)) => body - self.buffer.len(),
                None => READ_AHEAD,
            };
            self.buffer.reserve(missing);
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends frames that were made with [`frames::head`] and have no body.
    ///
    /// # Errors
    /// When the child is gone.
    pub async fn send_frames(&mut self, frames: &[u8]) -> Result<(), FrameError> {
        self.write(&mut &frames[..]).await
    }

    /// Sends an order.
    ///
    /// # Errors
    /// When the child is gone or the order is too large.
    pub async fn send(&mut self, order: &Order, body: &[u8]) -> Result<(), FrameError> {
        let head = frames::head(order, body.len() as u64)?;
        // Both in one system call: the child wakes at the first byte. With few cores it would take
        // ours before we send the rest.
        self.write(&mut Buf::chain(head.as_slice(), body)).await
    }

    async fn write(&mut self, rest: &mut impl Buf) -> Result<(), FrameError> {
        while rest.has_remaining() {
            match tokio::time::timeout(TAKES_WITHIN, self.stream.write_buf(rest)).await {
                Ok(Ok(0)) => return Err(Error::from(ErrorKind::WriteZero).into()),
                Ok(written) => _ = written?,
                Err(_) => return Err(Error::from(ErrorKind::TimedOut).into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_child_that_takes_nothing_is_given_up() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut link = Link::new(ours);
        let sent = link.send(&Order::Cancel, &vec![0; 16 << 20]).await;
        assert!(matches!(sent, Err(FrameError::Io(error)) if error.kind() == ErrorKind::TimedOut));
    }

    #[tokio::test]
    async fn a_body_gets_its_memory_once_and_none_without_room() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut link = Link::new(ours);
        let report = |bytes: u64| Report::Completed {
            result: serde_json::Value::Null,
            capsules: 1,
            computing_since: fiec_schemas::Timestamp::now(),
            computed_until: fiec_schemas::Timestamp::now(),
            outputs: vec![frames::Made {
                name: "o".to_owned(),
                digest: None,
                bytes,
            }],
            emits: Vec::new(),
            numbers: fiec_schemas::series::Series::default(),
        };
        let grant = Grant {
            memory_bytes: Some(64 << 20),
            ..Grant::default()
        };
        link.make(Room::of(None, &grant));
        let whole = 48u64 << 20;
        let writer = tokio::spawn(async move {
            let head = frames::head(&report(whole), whole).unwrap();
            theirs.write_all(&head).await.unwrap();
            theirs.write_all(&vec![7; whole as usize]).await.unwrap();
            let over = 65u64 << 20;
            let head = frames::head(&report(over), over).unwrap();
            theirs.write_all(&head).await.unwrap();
            theirs
        });
        let (_, body) = link.next().await.unwrap().unwrap();
        assert_eq!(body, vec![7; whole as usize]);
        // An idle child keeps nothing of it.
        assert!(!body.is_unique());
        link.idle();
        assert!(body.is_unique());
        let over = link.next().await;
        assert!(matches!(over, Err(FrameError::NoRoom(_))), "{over:?}");
        assert!(link.buffer.capacity() <= 2 * READ_AHEAD);
        drop((link, writer.await.unwrap()));
        let body = body.try_into_mut().unwrap();
        let most = whole as usize + 2 * READ_AHEAD;
        assert!(body.capacity() <= most, "{} bytes", body.capacity());
    }
}
