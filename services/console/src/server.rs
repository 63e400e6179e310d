//! HTTP: who may enter, which page answers, and the stream of news.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, SET_COOKIE,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use crate::hub::{Hub, News};
use crate::session::{Key, Sessions};
use crate::{ConsoleError, Options, assets, pages};

/// Requests that are answered at once; streams of news do not count.
const AT_ONCE: usize = 32;
/// Streams of news. A browser has one, whatever the number of its tabs.
const STREAMS: usize = 32;
/// Time limit of a page.
const ANSWERED: Duration = Duration::from_secs(15);
/// Time for answers in flight when the console ends.
const LEAVES: Duration = Duration::from_secs(2);
/// A sign of life on a stream. Without one a browser says that it has lost the console.
const ALIVE: Duration = Duration::from_secs(4);
/// Nothing is loaded from elsewhere, no script stands in a page, and no page stands in another.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                      img-src 'self' data:; connect-src 'self'; form-action 'self'; \
                      base-uri 'none'; frame-ancestors 'none'";

/// What handlers share.
#[derive(Debug)]
pub struct Shared {
    /// What is known.
    pub hub: Arc<Hub>,
    sessions: Sessions,
    places: Semaphore,
    streams: Arc<Semaphore>,
    stop: CancellationToken,
}

/// A console that runs.
#[derive(Debug)]
pub struct Running {
    shared: Arc<Shared>,
    addr: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// An address with a ticket that is good once.
    pub fn entrance(&self) -> String {
        entrance(&self.addr, &self.shared.sessions.ticket())
    }

    /// With this key another process of the same user gets a ticket.
    pub fn key(&self) -> Key {
        self.shared.sessions.key().clone()
    }

    /// Waits until it ends.
    pub async fn ended(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the console has panicked");
        }
    }
}

fn entrance(addr: &SocketAddr, ticket: &str) -> String {
    format!("http://{addr}/enter?ticket={ticket}")
}

/// Listens and answers until `stop`.
///
/// # Errors
/// If it cannot listen, or the database's URL is none.
pub async fn start(options: Options, stop: CancellationToken) -> Result<Running, ConsoleError> {
    let addr = options.addr;
    let failed = |error| ConsoleError::Listen { addr, error };
    let listener = TcpListener::bind(addr).await.map_err(failed)?;
    let addr = listener.local_addr().map_err(failed)?;
    let hub = Arc::new(Hub::new(options)?);
    let shared = Arc::new(Shared {
        hub: Arc::clone(&hub),
        sessions: Sessions::new(addr),
        places: Semaphore::new(AT_ONCE),
        streams: Arc::new(Semaphore::new(STREAMS)),
        stop: stop.clone(),
    });
    let app = router(Arc::clone(&shared));
    let task = tokio::spawn(async move {
        let until = stop.clone().cancelled_owned();
        let served = axum::serve(listener, app).with_graceful_shutdown(until);
        // Whoever does not take its answer is not waited for.
        let at_last = async {
            stop.cancelled().await;
            tokio::time::sleep(LEAVES).await;
        };
        tokio::select! {
            (served, ()) = async { tokio::join!(served, hub.run(stop.clone())) } => {
                if let Err(error) = served {
                    tracing::error!(%error, "the console has ended");
                }
            }
            () = at_last => {}
        }
    });
    Ok(Running { shared, addr, task })
}

fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(pages::overview::page))
        .route("/nodes", get(pages::nodes::page))
        .route("/executions", get(pages::executions::page))
        .route("/executions/{id}", get(pages::execution::page))
        .route("/batches", get(pages::batches::page))
        .route("/batches/{id}", get(pages::batch::page))
        .route("/batches/{id}/matrix", get(pages::batch::matrix))
        .route("/log/{tenant}/{id}", post(pages::log::after))
        .route("/sql", get(pages::sql::page))
        .route("/act", get(pages::act::ask).post(pages::act::done))
        .route("/events", get(events))
        .route("/assets/{*file}", get(assets::file))
        .fallback(elsewhere)
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), limits))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), cookie))
        .route("/enter", get(enter))
        .route("/tickets", post(tickets))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), named))
        .with_state(shared)
}

/// There is no such page, but perhaps one without the slash at the end.
async fn elsewhere(uri: Uri) -> Response {
    let path = uri.path().trim_end_matches('/');
    // A path that begins with two slashes, or with a backslash, would name another host.
    let is_here = path.as_bytes().get(1).is_some_and(u8::is_ascii_lowercase);
    if path.len() < uri.path().len() && is_here {
        let query = uri.query().map(|query| format!("?{query}"));
        let to = format!("{path}{}", query.unwrap_or_default());
        return Redirect::permanent(&to).into_response();
    }
    (StatusCode::NOT_FOUND, "there is no such page").into_response()
}

/// Only requests that name this console, and headers for all answers.
async fn named(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let mut response = match shared.sessions.is_named(request.headers()) {
        true => next.run(request).await,
        false => (
            StatusCode::MISDIRECTED_REQUEST,
            "this is not the console's name",
        )
            .into_response(),
    };
    let same_origin = HeaderName::from_static("cross-origin-resource-policy");
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "same-origin"),
        (same_origin, "same-origin"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
        .headers_mut()
        .entry(CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

/// Only browsers that have entered.
async fn cookie(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    if Sessions::comes_from_elsewhere(request.headers()) {
        let words = "another page has asked for this one: open the console's address yourself";
        return (StatusCode::FORBIDDEN, words).into_response();
    }
    if !shared.sessions.knows(request.headers()) {
        return (
            StatusCode::UNAUTHORIZED,
            Html(include_str!("../templates/stranger.html")),
        )
            .into_response();
    }
    next.run(request).await
}

/// Only so many requests at once, each only so long.
async fn limits(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    shared.hub.touch();
    let answered = async {
        let _place = shared.places.acquire().await;
        next.run(request).await
    };
    match tokio::time::timeout(ANSWERED, answered).await {
        Ok(response) => response,
        Err(_) => {
            let words = format!("the page was not made within {} s", ANSWERED.as_secs());
            (StatusCode::GATEWAY_TIMEOUT, words).into_response()
        }
    }
}

#[derive(Deserialize)]
struct Ticket {
    ticket: String,
}

/// Exchanges a ticket for a cookie. The answer is a page that leads to the front: with a redirect of an
/// address that was pressed elsewhere, a browser would not send the new cookie.
async fn enter(
    State(shared): State<Arc<Shared>>,
    Query(given): Query<Ticket>,
    headers: HeaderMap,
) -> Response {
    let leads_on = || Html(include_str!("../templates/enter.html")).into_response();
    // Somebody opens the printed address again.
    if shared.sessions.knows(&headers) {
        return leads_on();
    }
    let Some(cookie) = shared.sessions.enter(&given.ticket) else {
        let stranger = Html(include_str!("../templates/stranger.html"));
        return (StatusCode::UNAUTHORIZED, stranger).into_response();
    };
    let mut response = leads_on();
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
    response
}

/// Another address with a ticket, for a process that has the key.
async fn tickets(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let given = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    let given = given.and_then(|text| text.strip_prefix("Bearer "));
    match given == Some(shared.sessions.key().expose()) {
        true => shared.sessions.ticket().into_response(),
        false => StatusCode::UNAUTHORIZED.into_response(),
    }
}

/// The topics that change, one event each.
async fn events(State(shared): State<Arc<Shared>>) -> Response {
    let Ok(place) = Arc::clone(&shared.streams).try_acquire_owned() else {
        let words = "too many browsers look at this console";
        return (StatusCode::SERVICE_UNAVAILABLE, words).into_response();
    };
    let news = shared.hub.listen();
    // What has changed since the page was made is not known.
    let state = (Some(News::All), news, shared, place);
    let stream = futures_util::stream::unfold(state, |(first, mut news, shared, place)| async {
        if let Some(first) = first {
            let event: Result<Event, Infallible> = Ok(Event::default().data(topics(&first)));
            return Some((event, (None, news, shared, place)));
        }
        let heard = tokio::time::timeout(ALIVE, news.recv());
        let told = match shared.stop.run_until_cancelled(heard).await? {
            Ok(Ok(told)) => topics(&told),
            // Too slow: it reads everything again.
            Ok(Err(RecvError::Lagged(_))) => topics(&News::All),
            Ok(Err(RecvError::Closed)) => return None,
            Err(_) => "alive".to_owned(),
        };
        shared.hub.touch();
        let event: Result<Event, Infallible> = Ok(Event::default().data(told));
        Some((event, (None, news, shared, place)))
    });
    Sse::new(stream)
        .keep_alive(KeepAlive::default())
        .into_response()
}

fn topics(news: &News) -> String {
    match news {
        News::Overview => "overview".to_owned(),
        News::Nodes => "nodes".to_owned(),
        News::All => "all".to_owned(),
        News::Executions(ids) => {
            let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
            format!("executions {}", ids.join(" "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::header::LOCATION;

    #[tokio::test]
    async fn an_address_with_a_slash_too_many_leads_to_the_page_and_never_to_another_host() {
        let leads = async |address: &str| {
            let response = elsewhere(address.parse().unwrap()).await;
            let to = response.headers().get(LOCATION).cloned();
            to.map(|to| to.to_str().unwrap().to_owned())
        };
        assert_eq!(leads("/batches/").await.as_deref(), Some("/batches"));
        let with_query = leads("/executions//?phase=failed").await;
        assert_eq!(with_query.as_deref(), Some("/executions?phase=failed"));
        for address in ["/nothing", "/", "//", "//host/", "/\\host/", "///host/"] {
            assert_eq!(leads(address).await, None, "{address}");
        }
    }
}
