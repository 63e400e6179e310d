//! Who may look. A ticket is good for one entrance, for ten minutes; a browser that enters with one gets a cookie. Both
//! live in memory: they end with the console.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use axum::http::header::{COOKIE, HOST, ORIGIN};
use uuid::Uuid;

/// Most tickets that wait for a browser, and most browsers. Beyond that, the oldest go.
const MOST: usize = 256;
/// Lifetime of a ticket that nobody uses.
const TICKET: Duration = Duration::from_secs(600);

/// A secret of 244 random bits as text.
fn secret() -> String {
    format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple())
}

/// With this key another process of the same user gets a ticket.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The text.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

#[derive(Debug, Default)]
struct Secrets {
    /// Each with the time when it was made.
    known: HashMap<String, Instant>,
    order: VecDeque<String>,
}

impl Secrets {
    fn add(&mut self) -> String {
        let new = secret();
        self.known.insert(new.clone(), Instant::now());
        self.order.push_back(new.clone());
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        new
    }

    /// Removes a secret and returns when it was made.
    fn take(&mut self, one: &str) -> Option<Instant> {
        let made = self.known.remove(one)?;
        self.order.retain(|kept| kept != one);
        Some(made)
    }
}

/// The tickets and the browsers.
#[derive(Debug)]
pub struct Sessions {
    key: Key,
    /// The address as a browser writes it.
    name_of_addr: String,
    port: u16,
    tickets: Mutex<Secrets>,
    cookies: Mutex<Secrets>,
}

fn lock(of: &Mutex<Secrets>) -> MutexGuard<'_, Secrets> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sessions {
    /// None yet. `addr`: where the console listens. A cookie of another console on the same machine has
    /// another name.
    pub fn new(addr: SocketAddr) -> Self {
        let name_of_addr = match addr {
            SocketAddr::V4(addr) => addr.ip().to_string(),
            SocketAddr::V6(addr) => format!("[{}]", addr.ip()),
        };
        Self {
            key: Key(secret()),
            name_of_addr,
            port: addr.port(),
            tickets: Mutex::default(),
            cookies: Mutex::default(),
        }
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// A new ticket.
    pub fn ticket(&self) -> String {
        lock(&self.tickets).add()
    }

    /// Exchanges a ticket for the value of a `Set-Cookie` header.
    pub fn enter(&self, ticket: &str) -> Option<String> {
        self.enter_at(ticket, Instant::now())
    }

    fn enter_at(&self, ticket: &str, now: Instant) -> Option<String> {
        let made = lock(&self.tickets).take(ticket)?;
        (now.saturating_duration_since(made) < TICKET).then(|| {
            let cookie = lock(&self.cookies).add();
            format!(
                "{}={cookie}; Path=/; HttpOnly; SameSite=Strict",
                self.name()
            )
        })
    }

    fn name(&self) -> String {
        format!("fiec_console_{}", self.port)
    }

    /// Whether a request has a browser's cookie.
    pub fn knows(&self, headers: &HeaderMap) -> bool {
        let name = self.name();
        let texts = headers
            .get_all(COOKIE)
            .iter()
            .filter_map(|h| h.to_str().ok());
        let mut pairs = texts.flat_map(|text| text.split(';'));
        pairs.any(|pair| match pair.trim().split_once('=') {
            Some((of, value)) => of == name && lock(&self.cookies).known.contains_key(value),
            None => false,
        })
    }

    /// Whether a request names this console: a page elsewhere cannot make a browser ask under a name
    /// of its own (DNS rebinding), and cannot make it write.
    pub fn is_named(&self, headers: &HeaderMap) -> bool {
        let own = |host: &str| {
            let (name, port) = match host.rsplit_once(':') {
                Some((name, port)) if !name.is_empty() => (name, port.parse().ok()),
                _ => (host, Some(80)),
            };
            let is_here = self.name_of_addr == name || name == "localhost";
            is_here && port == Some(self.port)
        };
        let text = |header| {
            headers
                .get(header)
                .map(|value| value.to_str().unwrap_or_default())
        };
        let is_own_origin = |origin: &str| origin.strip_prefix("http://").is_some_and(own);
        text(HOST).is_some_and(own) && text(ORIGIN).is_none_or(is_own_origin)
    }

    /// Whether a page of another server has made a browser ask. Cookies belong to a host, so a server on
    /// another port could ask in its visitor's name.
    pub fn comes_from_elsewhere(headers: &HeaderMap) -> bool {
        let site = headers.get("sec-fetch-site");
        matches!(
            site.and_then(|site| site.to_str().ok()),
            Some("same-site" | "cross-site")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(axum::http::HeaderName, &str)]) -> HeaderMap {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap()));
        pairs.collect()
    }

    #[test]
    fn a_ticket_is_good_once_and_only_its_cookie_enters() {
        let sessions = Sessions::new(SocketAddr::from(([127, 0, 0, 1], 7000)));
        let ticket = sessions.ticket();
        let cookie = sessions.enter(&ticket).unwrap();
        assert!(
            cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict"),
            "{cookie}"
        );
        assert_eq!(sessions.enter(&ticket), None);
        assert_eq!(sessions.enter(""), None);
        let value = cookie.split(';').next().unwrap();
        assert!(sessions.knows(&headers(&[(COOKIE, &format!("a=b; {value}"))])));
        for wrong in [
            "",
            "fiec_console_7000=",
            "fiec_console_7000=x",
            &value.replace("7000", "7001"),
        ] {
            assert!(!sessions.knows(&headers(&[(COOKIE, wrong)])), "{wrong}");
        }
        assert!(!sessions.knows(&HeaderMap::new()));
    }

    #[test]
    fn a_ticket_that_nobody_uses_ends_after_ten_minutes() {
        let sessions = Sessions::new(SocketAddr::from(([127, 0, 0, 1], 7000)));
        let made = Instant::now();
        let (soon, late) = (sessions.ticket(), sessions.ticket());
        assert!(
            sessions
                .enter_at(&soon, made + TICKET - Duration::from_secs(1))
                .is_some()
        );
        let after = Instant::now() + TICKET;
        assert_eq!(sessions.enter_at(&late, after), None);
        assert_eq!(sessions.enter_at(&late, made), None, "it has ended");
    }

    #[test]
    fn tickets_and_cookies_are_bounded() {
        let sessions = Sessions::new(SocketAddr::from(([127, 0, 0, 1], 7000)));
        let first = sessions.ticket();
        for _ in 0..MOST {
            sessions.ticket();
        }
        assert_eq!(sessions.enter(&first), None, "the oldest went");
        assert_eq!(lock(&sessions.tickets).known.len(), MOST);
    }

    #[test]
    fn requests_of_other_pages_are_not_ours() {
        let sessions = Sessions::new(SocketAddr::from(([127, 0, 0, 1], 7000)));
        let is = |pairs: &[_]| sessions.is_named(&headers(pairs));
        assert!(is(&[(HOST, "127.0.0.1:7000")]));
        assert!(is(&[
            (HOST, "localhost:7000"),
            (ORIGIN, "http://localhost:7000")
        ]));
        for host in ["evil.example:7000", "127.0.0.1:7001", "127.0.0.1", ""] {
            assert!(!is(&[(HOST, host)]), "{host}");
        }
        for origin in [
            "http://evil.example",
            "null",
            "https://127.0.0.1:7000",
            "http://127.0.0.1:80",
        ] {
            assert!(
                !is(&[(HOST, "127.0.0.1:7000"), (ORIGIN, origin)]),
                "{origin}"
            );
        }
    }
}
