//! RFC 9457 problem details: the answer to a request that fails as a whole.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use schemars::JsonSchema;
use serde::Serialize;

use super::super::{MESSAGE, json::Unread, tally::Excess};
use crate::api::{self, Kind, shorten};

/// An answer other than 2xx.
#[derive(Debug)]
pub(in crate::ingress) struct Problem {
    status: StatusCode,
    detail: String,
    /// Line and column in the body.
    place: Option<(usize, usize)>,
    retry_after: bool,
    close: bool,
}

/// RFC 9457 problem details.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "Problem")]
pub(super) struct Details<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// The position of the mistake in the body.
    line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<usize>,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
            place: None,
            retry_after: false,
            close: false,
        }
    }

    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(super) fn detail(&self) -> &str {
        &self.detail
    }

    /// Closes the connection after the answer.
    pub(super) fn and_close(self) -> Self {
        Self {
            close: true,
            ..self
        }
    }

    /// Makes a problem with the header `Retry-After`.
    pub(super) fn later(status: StatusCode, error: impl ToString) -> Self {
        Self {
            retry_after: true,
            ..Self::new(status, error.to_string())
        }
    }

    /// Makes the problem of an operation that failed.
    pub(super) fn of_kind(kind: Kind, why: String) -> Self {
        match kind {
            Kind::Invalid => Self::bad_request(why),
            Kind::Final => Self::new(StatusCode::CONFLICT, why),
            Kind::NotFound => Self::new(StatusCode::NOT_FOUND, why),
            Kind::Unauthenticated => Self::new(StatusCode::UNAUTHORIZED, why),
            Kind::Forbidden => Self::new(StatusCode::FORBIDDEN, why),
            Kind::Busy => Self::later(StatusCode::TOO_MANY_REQUESTS, why),
            Kind::Unavailable => Self::later(StatusCode::SERVICE_UNAVAILABLE, why),
            Kind::NotRunHere => Self::new(StatusCode::SERVICE_UNAVAILABLE, why),
        }
    }
}

impl From<api::Error> for Problem {
    fn from(error: api::Error) -> Self {
        Self::of_kind(error.kind(), error.to_string())
    }
}

impl From<Unread> for Problem {
    fn from(unread: Unread) -> Self {
        match unread {
            Unread::Malformed {
                detail,
                line,
                column,
            } => Self {
                place: Some((line, column)),
                ..Self::bad_request(detail)
            },
            Unread::Invalid(why) => Self::bad_request(why),
            Unread::Excess(excess) => excess.into(),
        }
    }
}

impl From<Excess> for Problem {
    fn from(excess: Excess) -> Self {
        match excess {
            Excess::NoRoom(_) => Self::later(StatusCode::TOO_MANY_REQUESTS, excess),
            Excess::Tasks(_) | Excess::Memory(_) => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, excess.to_string())
            }
            Excess::Items(_) | Excess::Discovered | Excess::Queues(_) | Excess::Filter(..) => {
                Self::bad_request(excess.to_string())
            }
        }
    }
}

/// Why a request was refused, for the log. An extension of the answer.
#[derive(Clone)]
pub(super) struct Refusal(pub(super) String);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = Details {
            r#type: "about:blank",
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: &shorten(&self.detail, MESSAGE),
            line: self.place.map(|(line, _)| line),
            column: self.place.map(|(_, column)| column),
        };
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(Refusal(self.detail));
        response
    }
}
