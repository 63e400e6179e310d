//! `/metrics` and `/healthz` of a process: OpenMetrics text, and 200 or 503 with the reason. Served
//! here, and asked for.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";
/// Most connections at the same time. Further ones wait in the kernel.
const CONNECTIONS: usize = 64;
/// Time limit of a connection: for its request and the answer.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// Pause after a connection could not be accepted: the process has no file descriptor left.
const PAUSE: Duration = Duration::from_secs(1);
/// Most bytes of an answer that are read.
const MOST: u64 = 64 * 1024;

/// Why a process is not known to be healthy.
#[derive(Debug, thiserror::Error)]
pub enum Unwell {
    /// It gives its own reason.
    #[error("{reason}")]
    Red {
        /// The reason.
        reason: String,
    },
    /// It has answered something else.
    #[error("its answer is {line:?}")]
    Unclear {
        /// The first line of it.
        line: String,
    },
    /// It has not answered in time.
    #[error("it did not answer within {0:?}")]
    Late(Duration),
    /// It cannot be reached.
    #[error("it does not answer: {0}")]
    Away(#[from] io::Error),
}

/// Asks the process that serves `address`, as `HOST:PORT`, whether it is healthy.
///
/// # Errors
/// Why that is not known.
pub async fn ask(address: &str, within: Duration) -> Result<(), Unwell> {
    let answer = tokio::time::timeout(within, fetch_health(address)).await;
    let answer = answer.map_err(|_| Unwell::Late(within))??;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let line = head.lines().next().unwrap_or_default();
    match line.split(' ').nth(1) {
        Some("200") => Ok(()),
        Some("503") => Err(Unwell::Red {
            reason: body.trim().to_owned(),
        }),
        _ => Err(Unwell::Unclear {
            line: line.chars().take(200).collect(),
        }),
    }
}

async fn fetch_health(address: &str) -> io::Result<String> {
    let mut socket = TcpStream::connect(address).await?;
    let request = format!("GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    socket.take(MOST).read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Serves both on `addr` (port 0: any free one) in a separate task until `stop`. Returns the bound
/// address. `health` returns the problem in words.
///
/// # Errors
/// When the address cannot be bound.
pub async fn serve(
    addr: SocketAddr,
    registry: Arc<Registry>,
    health: impl Fn() -> Result<(), String> + Send + Sync + Clone + 'static,
    stop: CancellationToken,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(addr).await?;
    let bound = listener.local_addr()?;
    let answer = move |request: Request<Incoming>| {
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        ready(Ok(match request.uri().path() {
            "/metrics" if is_read => metrics(&registry),
            "/healthz" if is_read => healthz(health()),
            "/metrics" | "/healthz" => text(StatusCode::METHOD_NOT_ALLOWED, String::new()),
            _ => text(StatusCode::NOT_FOUND, String::new()),
        }))
    };
    tokio::spawn(stop.run_until_cancelled_owned(accept(listener, answer)));
    Ok(bound)
}

/// Answers one request a connection. Closes a connection that is not over in time, so that idle
/// ones do not use up the file descriptors of the process.
async fn accept<A>(listener: TcpListener, answer: A)
where
    A: Fn(Request<Incoming>) -> Ready<Result<Response<String>, Infallible>>,
    A: Clone + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    // The semaphore is never closed.
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for /metrics or /healthz");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let connection = http1::Builder::new()
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service_fn(answer.clone()));
        tokio::spawn(async move {
            match tokio::time::timeout(ANSWERED_WITHIN, connection).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a request failed"),
                Err(_) => tracing::debug!("a connection was closed: it took too long"),
            }
            drop(place);
        });
    }
}

fn metrics(registry: &Registry) -> Response<String> {
    let mut body = String::new();
    match encode(&mut body, registry) {
        Ok(()) => respond(StatusCode::OK, OPEN_METRICS, body),
        Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, String::new()),
    }
}

fn healthz(health: Result<(), String>) -> Response<String> {
    match health {
        Ok(()) => text(StatusCode::OK, "ok\n".to_owned()),
        Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

fn text(status: StatusCode, body: String) -> Response<String> {
    respond(status, PLAIN, body)
}

fn respond(status: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;
    use std::time::Instant;

    async fn fetch(addr: SocketAddr, path: &str) -> String {
        let mut socket = TcpStream::connect(addr).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn metrics_and_health_are_served_on_a_free_port() {
        let mut registry = Registry::default();
        let counter = Counter::<u64>::default();
        registry.register("things", "Things", counter.clone());
        counter.inc();
        let stop = CancellationToken::new();
        let addr = SocketAddr::from(([127, 0, 0, 1], 0));
        let sick = || Err("the database is away".to_owned());
        let bound = serve(addr, Arc::new(registry), sick, stop.clone())
            .await
            .unwrap();
        assert!(fetch(bound, "/metrics").await.contains("things_total 1"));
        let health = fetch(bound, "/healthz").await;
        assert!(health.starts_with("HTTP/1.1 503") && health.contains("the database is away"));
        assert!(fetch(bound, "/nothing").await.starts_with("HTTP/1.1 404"));
        stop.cancel();
    }

    #[tokio::test]
    async fn idle_connections_do_not_exhaust_a_service() {
        let addr = SocketAddr::from(([127, 0, 0, 1], 0));
        let (registry, stop) = (Arc::new(Registry::default()), CancellationToken::new());
        let bound = serve(addr, registry, || Ok(()), stop.clone());
        let bound = bound.await.unwrap();
        let began = Instant::now();
        let mut idle = Vec::new();
        for _ in 0..CONNECTIONS + 16 {
            idle.push(TcpStream::connect(bound).await.unwrap());
        }
        // It waits for a place, and then it is answered at once.
        let patience = Duration::from_secs(60);
        let health = tokio::time::timeout(patience, fetch(bound, "/healthz")).await;
        assert!(health.unwrap().starts_with("HTTP/1.1 200"));
        assert!(began.elapsed() >= ANSWERED_WITHIN, "{:?}", began.elapsed());
        // An idle connection is closed without an answer.
        for socket in &mut idle[..CONNECTIONS] {
            let mut answer = Vec::new();
            let closed = tokio::time::timeout(patience, socket.read_to_end(&mut answer)).await;
            closed.unwrap().unwrap();
            assert_eq!(answer, b"");
        }
        stop.cancel();
    }

    #[tokio::test]
    async fn a_connection_ends_with_its_answer() {
        let addr = SocketAddr::from(([127, 0, 0, 1], 0));
        let (registry, stop) = (Arc::new(Registry::default()), CancellationToken::new());
        let bound = serve(addr, registry, || Ok(()), stop.clone());
        let mut socket = TcpStream::connect(bound.await.unwrap()).await.unwrap();
        let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
        socket.write_all(request).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(ANSWERED_WITHIN / 2, socket.read_to_string(&mut answer));
        read.await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        stop.cancel();
    }
}
