//! The HTTP client: keep-alive, TLS, no redirects, no proxies.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::{Method, Request, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as Pool, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};

use crate::{config::Enrich, model::in_short};

/// How long a connection waits for its next request.
const IDLE: Duration = Duration::from_secs(30);

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
        let tls = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(settings.concurrency)
            .build(connector);
        Self { pool, settings: settings.clone() }
    }

    /// The body of the answer. The error is the reason why there is none. The caller sets a deadline.
    pub(super) async fn post(&self, body: Vec<u8>, traceparent: &str) -> Result<Bytes, String> {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(self.settings.url.as_str())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, concat!("taskd/", env!("CARGO_PKG_VERSION")))
            .header("traceparent", traceparent);
        if let Some((name, value)) = &self.settings.header {
            request = request.header(name, value);
        }
        let request = request.body(Full::from(body)).map_err(|error| error.to_string())?;
        let response = self.pool.request(request).await.map_err(|error| in_short(&error))?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("it answered {status}"));
        }
        match Limited::new(response.into_body(), self.settings.answer_bytes).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => {
                Err(format!("the answer has more than {} bytes (enrich_answer_bytes)", self.settings.answer_bytes))
            }
            Err(error) => Err(in_short(&*error)),
        }
    }
}
