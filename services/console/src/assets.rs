//! Files that browsers load. They are part of this binary; no other host is asked for anything.

use axum::extract::Path;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

macro_rules! files {
    ($($name:literal: $kind:literal),+ $(,)?) => {
        const FILES: &[(&str, &str, &str)] = &[
            $(($name, $kind, include_str!(concat!("../assets/", $name)))),+
        ];
    };
}

files! {
    "axes.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "log.js": "text/javascript; charset=utf-8",
    "curves.js": "text/javascript; charset=utf-8",
    "matrix.js": "text/javascript; charset=utf-8",
    "members.js": "text/javascript; charset=utf-8",
    "vendor/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "vendor/uPlot.min.css": "text/css; charset=utf-8",
}

/// Answers with a file.
pub async fn file(Path(name): Path<String>) -> Response {
    let Some((_, kind, text)) = FILES.iter().find(|(file, _, _)| *file == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let mut response = text.into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    // A new version of this binary has other files under the same names.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
