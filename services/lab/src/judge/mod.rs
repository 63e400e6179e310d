//! Judges a cluster: whether the history that it has left keeps every rule ([`checker`]), whether
//! every promise of the living system holds ([`oracles`]), and whether somebody is overdue
//! ([`overdue`]). Integration tests end with it, and `fiec-lab chaos` runs it after its faults.

pub mod checker;
pub mod journal;
pub mod oracles;
pub mod overdue;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::process::Process;

/// The answer of an HTTP server, head and body.
///
/// # Errors
/// When it does not answer.
pub async fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut socket = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// The address at which a service says in its log that it can be asked for its health.
pub fn address_of(service: &Process) -> Option<String> {
    let log = std::fs::read_to_string(&service.log).ok()?;
    let mut lines = log
        .lines()
        .rev()
        .filter(|line| line.contains("serving /metrics"));
    // A service that was started again goes on in the same log.
    let port = lines.next()?.split("127.0.0.1:").nth(1)?;
    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
    Some(format!("127.0.0.1:{port}"))
}
