//! `/metrics` and `/healthz` of a process: OpenMetrics text, and 200 or 503 with the reason.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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
    let app = Router::new()
        .route("/metrics", get(move || async move { metrics(&registry) }))
        .route("/healthz", get(move || async move { healthz(health()) }));
    tokio::spawn(async move {
        // Without waiting for idle connections: the process is ending.
        tokio::select! {
            served = async { axum::serve(listener, app).await } => {
                if let Err(error) = served {
                    tracing::error!(%error, "/metrics and /healthz are no longer served");
                }
            }
            () = stop.cancelled() => {}
        }
    });
    Ok(bound)
}

fn metrics(registry: &Registry) -> Response {
    let mut text = String::new();
    match encode(&mut text, registry) {
        Ok(()) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn healthz(health: Result<(), String>) -> Response {
    match health {
        Ok(()) => "ok\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn fetch(addr: SocketAddr, path: &str) -> String {
        let mut socket = tokio::net::TcpStream::connect(addr).await.unwrap();
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
}
