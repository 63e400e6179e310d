//! The health of services and workers: who is red, since when, and why.

use std::str::FromStr;
use std::time::Duration;

use fiec_broker::sight;
use fiec_schemas::Timestamp;
use futures_util::{StreamExt as _, stream};
use serde::Serialize;

use crate::words;

/// Time limit of an answer.
const WITHIN: Duration = Duration::from_secs(3);
/// Most services that are asked at the same time.
const AT_ONCE: usize = 64;
/// Most characters of a reason.
const REASON: usize = 500;

/// A service or worker that is asked for its health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Its name on pages.
    pub name: String,
    /// Its `--http` address, as `HOST:PORT`.
    pub address: String,
}

impl FromStr for Service {
    type Err = String;

    /// Reads `HOST:PORT` or `NAME=HOST:PORT`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, address) = text.split_once('=').unwrap_or((text, text));
        let (host, port) = address.rsplit_once(':').unwrap_or_default();
        if name.is_empty() || host.is_empty() || port.parse::<u16>().is_err() {
            return Err(format!("{text:?} is neither HOST:PORT nor NAME=HOST:PORT"));
        }
        Ok(Self {
            name: name.to_owned(),
            address: address.to_owned(),
        })
    }
}

/// What services have said of themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Health {
    /// How many were asked.
    pub asked: usize,
    /// Those that are not well.
    pub red: Vec<Red>,
}

/// A service that is not well, or that does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Red {
    /// Its name.
    pub name: String,
    /// Its `--http` address.
    pub address: String,
    /// When that was first seen here.
    pub since: Timestamp,
    /// Its reason, or why it could not be asked.
    pub why: String,
}

impl Red {
    /// For how long it is known to be red.
    pub fn lasts(&self) -> String {
        words::ago(&Some(self.since))
    }
}

impl Health {
    /// Asks all services. `before`: what they have said last.
    pub async fn of(services: &[Service], before: &Self) -> Self {
        let now = Timestamp::now();
        let known = |service: &Service| {
            let mut all = before.red.iter();
            all.find(|red| red.name == service.name && red.address == service.address)
        };
        let ask = async |service: &Service| {
            let why = sight::ask(&service.address, WITHIN).await.err()?;
            Some(Red {
                name: service.name.clone(),
                address: service.address.clone(),
                since: known(service).map_or(now, |red| red.since),
                why: why.to_string().chars().take(REASON).collect(),
            })
        };
        // Answers in the order of the services.
        let answers: Vec<Option<Red>> = stream::iter(services.iter().map(ask))
            .buffered(AT_ONCE)
            .collect()
            .await;
        Self {
            asked: services.len(),
            red: answers.into_iter().flatten().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    #[test]
    fn a_service_is_an_address_with_or_without_a_name() {
        let read = |text: &str| text.parse::<Service>().map(|s| (s.name, s.address));
        let pair = |name: &str, address: &str| Ok((name.to_owned(), address.to_owned()));
        assert_eq!(read("h:1"), pair("h:1", "h:1"));
        assert_eq!(read("policy=[::1]:90"), pair("policy", "[::1]:90"));
        for wrong in ["", "h", "h:", ":1", "=h:1", "a=h", "h:70000", "http://h/"] {
            assert!(read(wrong).unwrap_err().contains("HOST:PORT"), "{wrong}");
        }
    }

    #[tokio::test]
    async fn who_stays_red_is_red_since_it_was_first_seen_so() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let nobody = gone.local_addr().unwrap().to_string();
        drop(gone);
        let answers = [
            "503 Service Unavailable",
            "503 Service Unavailable",
            "200 OK",
        ];
        let server = tokio::spawn(async move {
            for status in answers {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                let _ = socket.read(&mut request).await.unwrap();
                let answer = format!("HTTP/1.1 {status}\r\n\r\nstreams are full\n");
                socket.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let services = [("policy", address), ("n1", nobody)].map(|(name, address)| Service {
            name: name.to_owned(),
            address,
        });
        let first = Health::of(&services, &Health::default()).await;
        let names = |health: &Health| -> Vec<String> {
            health.red.iter().map(|red| red.name.clone()).collect()
        };
        assert_eq!(
            (first.asked, names(&first)),
            (2, vec!["policy".to_owned(), "n1".to_owned()])
        );
        assert_eq!(first.red[0].why, "streams are full");
        assert!(first.red[1].why.contains("does not answer"), "{first:?}");
        let second = Health::of(&services, &first).await;
        assert_eq!(second, first, "nothing is new");
        let third = Health::of(&services, &second).await;
        assert_eq!(names(&third), ["n1"]);
        server.await.unwrap();
    }
}
