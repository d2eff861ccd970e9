//! A proxy that serves taskd below a path.

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, Method, StatusCode, Uri, header},
    response::{IntoResponse as _, Response},
};
use tokio::{net::TcpListener, task::JoinHandle};

/// A running proxy. Dropping it stops it.
pub(crate) struct PathProxy {
    port: u16,
    serving: JoinHandle<()>,
}

#[derive(Clone)]
struct Target {
    prefix: String,
    url: String,
    client: reqwest::Client,
}

impl PathProxy {
    /// Forwards what is below `prefix` to `url`.
    pub(crate) async fn start(prefix: &str, url: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none());
        let target = Target {
            prefix: prefix.to_owned(),
            url: url.to_owned(),
            client: client.build().unwrap(),
        };
        let router = Router::new().fallback(forward).with_state(target);
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { port, serving }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for PathProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn forward(
    State(target): State<Target>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path_and_query().unwrap().as_str();
    // The browser asks for its icon at the root.
    let Some(path) = path.strip_prefix(&target.prefix) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let request = target
        .client
        .request(method, format!("{}{path}", target.url))
        .headers(headers)
        .body(body);
    let answer = request.send().await.unwrap();
    let status = answer.status();
    let mut headers = answer.headers().clone();
    headers.remove(header::TRANSFER_ENCODING);
    headers.remove(header::CONNECTION);
    (status, headers, Body::from_stream(answer.bytes_stream())).into_response()
}
