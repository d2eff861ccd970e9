//! Calls of an endpoint.

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, Request, StatusCode, header};

use crate::{
    config::Enrich,
    outbound::{self, Failure, Reach},
};

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
    http: outbound::Client,
    settings: Enrich,
}

impl Client {
    pub(super) fn new(settings: &Enrich) -> Self {
        let with_tls = settings.url.scheme() == "https";
        Self {
            http: outbound::Client::new(Reach::Anything, settings.concurrency, with_tls),
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
            .header(header::USER_AGENT, outbound::USER_AGENT)
            .header("traceparent", traceparent);
        if let Some((name, value)) = &self.settings.header {
            request = request.header(name, value);
        }
        let request = request
            .body(Full::from(body))
            .map_err(|error| NoAnswer::Failed(error.to_string()))?;
        let failed = |failure: Failure| NoAnswer::Failed(failure.to_string());
        let response = self.http.send(request).await.map_err(failed)?;
        let status = response.status();
        if refuses_these_tasks(status) {
            return Err(NoAnswer::OfTheseTasks(format!("it answered {status}")));
        }
        if !status.is_success() {
            return Err(NoAnswer::Failed(format!("it answered {status}")));
        }
        let most = self.settings.answer_bytes;
        match outbound::body(response, most).await {
            Ok(body) => Ok(body),
            Err(Failure::TooLarge) => Err(NoAnswer::OfTheseTasks(format!(
                "the answer has more than {most} bytes (enrich_answer_bytes)"
            ))),
            Err(failure) => Err(failed(failure)),
        }
    }
}
