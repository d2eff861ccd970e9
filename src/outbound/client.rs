//! The HTTP client: keep-alive, TLS, no proxies.

use std::{error::Error as _, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::{Request, Response, body::Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as Pool, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};

use super::reach::{Reach, Refused};
use crate::model::in_short;

/// How taskd names itself.
pub const USER_AGENT: &str = concat!("taskd/", env!("CARGO_PKG_VERSION"));

/// How long an idle connection is kept for the next request.
const IDLE: Duration = Duration::from_secs(30);
/// How long to wait for a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Why a request got no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The host has no address that may be reached. Nothing was sent.
    #[error("{0}")]
    Refused(String),
    /// There is no connection. Nothing was sent.
    #[error("{0}")]
    NotConnected(String),
    /// The server may have the request.
    #[error("{0}")]
    Failed(String),
    #[error("the answer is too large")]
    TooLarge,
}

/// Connections to servers.
pub struct Client {
    pool: Pool<HttpsConnector<HttpConnector<Reach>>, Full<Bytes>>,
    reach: Reach,
}

impl Client {
    /// A client without TLS reads no certificates of authorities.
    pub fn new(reach: Reach, idle_of_host: usize, with_tls: bool) -> Self {
        let mut roots = RootCertStore::empty();
        if with_tls {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        let tls = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut http = HttpConnector::new_with_resolver(reach.clone());
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECT_WITHIN));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(idle_of_host)
            .build(connector);
        Self { pool, reach }
    }

    /// Sends a request, and returns the answer before its body. The caller sets a deadline.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Failure> {
        // Addresses in the place of a name are not resolved.
        let host = request.uri().host().unwrap_or_default();
        self.reach
            .check_literal(host)
            .map_err(|refused| Failure::Refused(refused.to_string()))?;
        self.pool.request(request).await.map_err(|error| {
            let mut cause = error.source();
            while let Some(one) = cause {
                if let Some(refused) = one.downcast_ref::<Refused>() {
                    return Failure::Refused(refused.to_string());
                }
                cause = one.source();
            }
            match error.is_connect() {
                true => Failure::NotConnected(in_short(&error)),
                false => Failure::Failed(in_short(&error)),
            }
        })
    }
}

/// Reads the body of an answer, of at most so many bytes.
pub async fn body(response: Response<Incoming>, most: usize) -> Result<Bytes, Failure> {
    match Limited::new(response.into_body(), most).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Failure::TooLarge),
        Err(error) => Err(Failure::Failed(in_short(&*error))),
    }
}
