//! The agent's end of a child's socket. Reads are cancel-safe: a later call continues.

use std::io::{Error, ErrorKind};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use fiec_kit::frames::{self, FrameError, Order, PREFIX_BYTES, Report};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const READ_AHEAD: usize = 64 * 1024;
/// A child that accepts nothing for this long is stopped, or does not read its orders.
const TAKES_WITHIN: Duration = Duration::from_secs(60);
const GROWTH: usize = 64 << 20;

/// A connection with a child.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    buffer: BytesMut,
    /// A head whose body has not arrived in full.
    awaiting: Option<(Report, usize)>,
}

impl Link {
    /// A connection on this socket.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: BytesMut::with_capacity(READ_AHEAD),
            awaiting: None,
        }
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
    /// When bytes are no frame.
    pub async fn next(&mut self) -> Result<Option<(Report, Bytes)>, FrameError> {
        loop {
            if let Some(found) = self.take()? {
                return Ok(Some(found));
            }
            let missing = self
                .awaiting
                .as_ref()
                .map_or(0, |(_, body)| body - self.buffer.len());
            self.buffer.reserve(missing.clamp(READ_AHEAD, GROWTH));
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
}
