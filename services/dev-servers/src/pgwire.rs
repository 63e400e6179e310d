//! The few messages of PostgreSQL's protocol needed to know that a server is
//! ready and to create a database, so that no client program is required.
//! Trust authentication only.

use std::collections::HashMap;
use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What the server said instead of "ready".
#[derive(Debug)]
pub(crate) enum Refusal {
    Io(io::Error),
    /// SQLSTATE and message.
    Sql {
        code: String,
        message: String,
    },
}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(e) => e.fmt(f),
            Self::Sql { code, message } => write!(f, "{message} ({code})"),
        }
    }
}

/// Longer messages than this are not expected from what is asked here.
const MAX_MESSAGE: usize = 1 << 20;

pub(crate) struct Session {
    stream: TcpStream,
}

impl Session {
    pub(crate) async fn open(port: u16, user: &str, database: &str) -> Result<Self, Refusal> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let mut session = Self { stream };
        let mut body = 196_608_u32.to_be_bytes().to_vec();
        for text in ["user", user, "database", database] {
            body.extend_from_slice(text.as_bytes());
            body.push(0);
        }
        body.push(0);
        session.send(None, &body).await?;
        session.until_ready().await?;
        Ok(session)
    }

    /// Runs one statement; gives the first column of the first row, as text.
    pub(crate) async fn query(&mut self, sql: &str) -> Result<Option<String>, Refusal> {
        let mut body = sql.as_bytes().to_vec();
        body.push(0);
        self.send(Some(b'Q'), &body).await?;
        self.until_ready().await
    }

    async fn send(&mut self, kind: Option<u8>, body: &[u8]) -> io::Result<()> {
        let length = u32::try_from(body.len() + 4).map_err(io::Error::other)?;
        let mut message: Vec<u8> = kind.into_iter().collect();
        message.extend_from_slice(&length.to_be_bytes());
        message.extend_from_slice(body);
        self.stream.write_all(&message).await
    }

    async fn until_ready(&mut self) -> Result<Option<String>, Refusal> {
        let (mut first, mut refusal) = (None, None);
        loop {
            let (kind, body) = match self.message().await {
                Ok(m) => m,
                // A fatal error is followed by the end of the connection.
                Err(e) => return Err(refusal.unwrap_or(Refusal::Io(e))),
            };
            match kind {
                b'Z' => return refusal.map_or(Ok(first), Err),
                b'E' => refusal = Some(error_of(&body)),
                b'D' if first.is_none() => first = first_column(&body),
                b'R' if body.get(..4) != Some(&[0; 4]) => {
                    return Err(io::Error::other("it wants a password").into());
                }
                _ => {}
            }
        }
    }

    async fn message(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let kind = self.stream.read_u8().await?;
        let length = self.stream.read_u32().await? as usize;
        if !(4..=MAX_MESSAGE).contains(&length) {
            return Err(io::Error::other("this is not PostgreSQL's protocol"));
        }
        let mut body = vec![0; length - 4];
        self.stream.read_exact(&mut body).await?;
        Ok((kind, body))
    }
}

fn error_of(body: &[u8]) -> Refusal {
    let fields: HashMap<u8, String> = body
        .split(|b| *b == 0)
        .filter_map(|f| Some((*f.first()?, String::from_utf8_lossy(&f[1..]).into_owned())))
        .collect();
    let field = |k| fields.get(&k).cloned().unwrap_or_default();
    Refusal::Sql {
        code: field(b'C'),
        message: field(b'M'),
    }
}

fn first_column(body: &[u8]) -> Option<String> {
    let length = u32::from_be_bytes(body.get(2..6)?.try_into().ok()?) as usize;
    let value = body.get(6..6 + length)?;
    Some(String::from_utf8_lossy(value).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_read_with_its_code() {
        let e = error_of(b"SFATAL\0C3D000\0Mdatabase \"x\" does not exist\0\0");
        assert!(matches!(&e, Refusal::Sql { code, .. } if code == "3D000"));
        assert!(e.to_string().contains("does not exist"));
    }

    #[test]
    fn a_null_or_short_row_has_no_first_column() {
        assert_eq!(first_column(&[0, 1, 0, 0, 0, 1, b'7']), Some("7".into()));
        assert_eq!(first_column(&[0, 1, 0xff, 0xff, 0xff, 0xff]), None);
        assert_eq!(first_column(&[]), None);
    }
}
