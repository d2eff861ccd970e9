//! The two transports to a collector: OTLP over gRPC and over HTTP.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Method, Request, StatusCode, Uri, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse, trace_service_client::TraceServiceClient,
};
use prost::Message as _;
use rustls::{ClientConfig, RootCertStore};
use tonic::{
    metadata::MetadataMap,
    transport::{Channel, ClientTlsConfig, Endpoint},
};

use crate::{
    config::{OtlpProtocol, Traces},
    model::in_short,
    telemetry::error::Error,
};

/// The most bytes of an answer that are read.
const ANSWER_BYTES: usize = 64 << 10;
/// How long an idle connection is kept for the next batch.
const IDLE: Duration = Duration::from_secs(60);
/// The path of spans, if the endpoint has none.
const PATH: &str = "/v1/traces";

/// A client of a collector.
pub(super) enum Transport {
    Grpc(Box<Grpc>),
    Http(Box<Http>),
}

pub(super) struct Grpc {
    client: TraceServiceClient<Channel>,
    headers: MetadataMap,
}

pub(super) struct Http {
    pool: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    uri: Uri,
    headers: MetadataMap,
}

/// A batch that the collector did not accept.
pub(super) struct Refused {
    pub(super) why: String,
    /// True if the collector would refuse the batch again.
    pub(super) is_final: bool,
}

impl Transport {
    pub(super) fn new(settings: &Traces) -> Result<Self, Error> {
        let mut headers = MetadataMap::new();
        for (name, value) in settings.headers.pairs() {
            headers.insert(name, value);
        }
        if settings.protocol == OtlpProtocol::Http {
            return Ok(Self::Http(Box::new(Http::new(
                &settings.endpoint,
                headers,
            )?)));
        }
        let endpoint =
            Endpoint::from_shared(settings.endpoint.clone())?.connect_timeout(settings.timeout);
        let endpoint = match endpoint.uri().scheme_str() {
            Some("https") => endpoint.tls_config(ClientTlsConfig::new().with_native_roots())?,
            _ => endpoint,
        };
        let client = TraceServiceClient::new(endpoint.connect_lazy());
        Ok(Self::Grpc(Box::new(Grpc { client, headers })))
    }

    /// Sends a batch. Returns how many of its spans the collector refused. The caller must set a
    /// deadline as well, because HTTP ignores `timeout`.
    pub(super) async fn send(
        &mut self,
        batch: ExportTraceServiceRequest,
        timeout: Duration,
    ) -> Result<i64, Refused> {
        let answer = match self {
            Self::Grpc(grpc) => {
                let mut request = tonic::Request::new(batch);
                *request.metadata_mut() = grpc.headers.clone();
                request.set_timeout(timeout);
                grpc.client
                    .export(request)
                    .await
                    .map(tonic::Response::into_inner)
                    .map_err(|status| {
                        let why = status.message().to_owned();
                        Refused {
                            why,
                            is_final: is_final(status.code()),
                        }
                    })?
            }
            Self::Http(http) => http.send(batch).await?,
        };
        Ok(answer
            .partial_success
            .map_or(0, |partial| partial.rejected_spans))
    }
}

impl Http {
    fn new(endpoint: &str, headers: MetadataMap) -> Result<Self, Error> {
        let wrong = |error: String| Error::OtlpUrl(error);
        let mut url = url::Url::parse(endpoint).map_err(|error| wrong(error.to_string()))?;
        if url.path() == "/" {
            url.set_path(PATH);
        }
        let mut roots = RootCertStore::empty();
        if url.scheme() == "https" {
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
        let pool = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        let uri = url
            .as_str()
            .parse()
            .map_err(|error: hyper::http::uri::InvalidUri| wrong(error.to_string()))?;
        Ok(Self { pool, uri, headers })
    }

    async fn send(
        &self,
        batch: ExportTraceServiceRequest,
    ) -> Result<ExportTraceServiceResponse, Refused> {
        let later = |why: String| Refused {
            why,
            is_final: false,
        };
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(self.uri.clone())
            .header(header::CONTENT_TYPE, "application/x-protobuf")
            .header(
                header::USER_AGENT,
                concat!("taskd/", env!("CARGO_PKG_VERSION")),
            );
        if let Some(all) = request.headers_mut() {
            all.extend(self.headers.clone().into_headers());
        }
        let request = request.body(Full::from(batch.encode_to_vec()));
        let request = request.map_err(|error| Refused {
            why: error.to_string(),
            is_final: true,
        })?;
        let response = self
            .pool
            .request(request)
            .await
            .map_err(|error| later(in_short(&error)))?;
        let status = response.status();
        if !status.is_success() {
            let is_final = !is_passing(status);
            return Err(Refused {
                why: format!("the collector answered {status}"),
                is_final,
            });
        }
        let body = Limited::new(response.into_body(), ANSWER_BYTES)
            .collect()
            .await;
        // The spans have arrived: an answer that cannot be read counts as one without refused
        // spans.
        Ok(body
            .ok()
            .and_then(|body| ExportTraceServiceResponse::decode(body.to_bytes()).ok())
            .unwrap_or_default())
    }
}

/// True if the same batch would fail again.
fn is_final(code: tonic::Code) -> bool {
    use tonic::Code::{InvalidArgument, PermissionDenied, Unauthenticated, Unimplemented};
    matches!(
        code,
        InvalidArgument | PermissionDenied | Unauthenticated | Unimplemented
    )
}

/// True for the statuses after which OTLP lets a client retry.
fn is_passing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}
