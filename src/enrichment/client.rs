//! The HTTP client: keep-alive, TLS, no redirects, no proxies.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as Pool, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};

use crate::{config::Enrich, model::in_short};

/// How long an idle connection is kept for the next request.
const IDLE: Duration = Duration::from_secs(30);

/// Why a call got no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// The endpoint does not work.
    Failed(String),
    /// The endpoint works, and something is wrong about the tasks of this call: the endpoint
    /// refuses them, or its answer about them is too large. The sender of a task can cause this.
    OfTheseTasks(String),
}

/// True if an answer with this status is about the tasks of the call rather than about the
/// endpoint.
fn refuses_these_tasks(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNPROCESSABLE_ENTITY
    )
}

/// Connections to one endpoint.
pub(super) struct Client {
    pool: Pool<HttpsConnector<HttpConnector>, Full<Bytes>>,
    settings: Enrich,
}

impl Client {
    pub(super) fn new(settings: &Enrich) -> Self {
        let mut roots = RootCertStore::empty();
        if settings.url.scheme() == "https" {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        let tls = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .build();
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(settings.concurrency)
            .build(connector);
        Self {
            pool,
            settings: settings.clone(),
        }
    }

    /// Returns the body of the answer. The caller sets a deadline.
    pub(super) async fn post(&self, body: Vec<u8>, traceparent: &str) -> Result<Bytes, NoAnswer> {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(self.settings.url.as_str())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .header(
                header::USER_AGENT,
                concat!("taskd/", env!("CARGO_PKG_VERSION")),
            )
            .header("traceparent", traceparent);
        if let Some((name, value)) = &self.settings.header {
            request = request.header(name, value);
        }
        let request = request
            .body(Full::from(body))
            .map_err(|error| NoAnswer::Failed(error.to_string()))?;
        let response = self
            .pool
            .request(request)
            .await
            .map_err(|error| NoAnswer::Failed(in_short(&error)))?;
        let status = response.status();
        if refuses_these_tasks(status) {
            return Err(NoAnswer::OfTheseTasks(format!("it answered {status}")));
        }
        if !status.is_success() {
            return Err(NoAnswer::Failed(format!("it answered {status}")));
        }
        let most = self.settings.answer_bytes;
        match Limited::new(response.into_body(), most).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(NoAnswer::OfTheseTasks(format!(
                "the answer has more than {most} bytes (enrich_answer_bytes)"
            ))),
            Err(error) => Err(NoAnswer::Failed(in_short(&*error))),
        }
    }
}
