//! `/docs/`: Swagger UI for the document, served from the binary. The page loads nothing from
//! elsewhere, calls nothing but the taskd that it comes from, and keeps a token only as long as it
//! is open.

use axum::{
    Router,
    http::{HeaderValue, header},
    response::{IntoResponse, Redirect, Response},
    routing::get,
};

/// Only scripts from files of this taskd run. Swagger UI sets inline styles.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

const PAGE: &str = include_str!("ui.html");
const START: &str = include_str!("ui.js");

/// Compressed: see build.rs.
const SCRIPT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/swagger-ui-bundle.js.gz"));
const STYLE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/swagger-ui.css.gz"));

pub(in crate::ingress::http) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/docs", get(|| async { Redirect::permanent("docs/") }))
        .route(
            "/docs/",
            get(|| async { file("text/html; charset=utf-8", PAGE.as_bytes(), false) }),
        )
        .route(
            "/docs/start.js",
            get(|| async { file("text/javascript", START.as_bytes(), false) }),
        )
        .route(
            "/docs/swagger-ui.js",
            get(|| async { file("text/javascript", SCRIPT, true) }),
        )
        .route(
            "/docs/swagger-ui.css",
            get(|| async { file("text/css", STYLE, true) }),
        )
}

fn file(content_type: &'static str, content: &'static [u8], is_gzip: bool) -> Response {
    let mut answer = ([(header::CONTENT_TYPE, content_type)], content).into_response();
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(
        header::REFERRER_POLICY,
        HeaderValue::from_static("no-referrer"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if is_gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    answer
}
