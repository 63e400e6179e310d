//! Free ports for servers.
//!
//! The kernel gives each connection a port of its own out of a range. A server that is down for a
//! while may find its port taken by such a connection when it starts again. So servers get ports
//! below that range.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;

use uuid::Uuid;

/// The kernel's range, as `32768\t60999`.
const CONNECTIONS: &str = "/proc/sys/net/ipv4/ip_local_port_range";
/// The first port of that range where it cannot be read.
const FIRST_OF_CONNECTIONS: u16 = 32_768;
/// The first port for servers: those before it belong to well-known services.
const FIRST: u16 = 10_000;
/// Ports that are tried.
const TRIES: usize = 200;

/// A port of loopback that nobody listens on now, below those that the kernel gives to connections if
/// there are any.
///
/// # Errors
/// If there is no free port.
pub(crate) fn free() -> io::Result<u16> {
    let range = of_servers();
    for _ in 0..TRIES {
        let count = u128::from(range.end.saturating_sub(range.start)).max(1);
        let offset = u16::try_from(Uuid::new_v4().as_u128() % count).unwrap_or(0);
        let port = range.start.saturating_add(offset);
        if range.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    let any = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(any.local_addr()?.port())
}

fn of_servers() -> Range<u16> {
    let text = std::fs::read_to_string(CONNECTIONS).unwrap_or_default();
    let first = text.split_whitespace().next().and_then(|n| n.parse().ok());
    FIRST..first.unwrap_or(FIRST_OF_CONNECTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_gets_a_port_that_the_kernel_gives_to_no_connection() {
        let servers = of_servers();
        for _ in 0..20 {
            let connection = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let connection = connection.local_addr().unwrap().port();
            let port = free().unwrap();
            assert!(servers.is_empty() || servers.contains(&port), "{port}");
            assert!(!servers.contains(&connection), "{connection}");
        }
    }
}
