//! Requests to taskd's HTTP port, and helpers to show text on a terminal.

use std::io::{self, IsTerminal as _};

use anyhow::{Context, anyhow};
use axum::body::Bytes;
use hyper::{Method, StatusCode};
use serde::{Deserialize, de::DeserializeOwned};

use super::{
    http::{HttpPort, TypedBody},
    print::say,
    trust::with_hint,
};
/// Makes text safe to show: keys and reasons come from users, and a terminal would obey the control
/// characters in them.
pub(super) use crate::model::printable;

/// Returns the body of the answer to `path`. Any status but success is an error.
pub(super) async fn get(server: &HttpPort, path: &str) -> anyhow::Result<Bytes> {
    let (status, body) = server.get(path).await?;
    if status.is_success() {
        Ok(body)
    } else {
        Err(refusal(server, status, &body))
    }
}

/// Decodes the body of an answer.
pub(super) fn read<T: DeserializeOwned>(server: &HttpPort, body: &[u8]) -> anyhow::Result<T> {
    serde_json::from_slice(body).with_context(|| server.describe_other())
}

/// Returns the body of the answer to `path`, raw and decoded. If taskd answers 404, prints its
/// message on stderr and returns `None`.
pub(super) async fn ask<T: DeserializeOwned>(
    server: &HttpPort,
    path: &str,
) -> anyhow::Result<Option<(Bytes, T)>> {
    match ask_with(server, Method::GET, path, None).await? {
        Some(body) => {
            let answer = read(server, &body)?;
            Ok(Some((body, answer)))
        }
        None => Ok(None),
    }
}

/// Sends a request, and answers the body. `None`: there is no such thing, which stderr says.
pub(super) async fn ask_with(
    server: &HttpPort,
    method: Method,
    path: &str,
    body: Option<TypedBody>,
) -> anyhow::Result<Option<Bytes>> {
    let (status, body) = server.send(method, path, body).await?;
    if status.is_success() {
        return Ok(Some(body));
    }
    if status != StatusCode::NOT_FOUND {
        return Err(refusal(server, status, &body));
    }
    let problem: Problem = read(server, &body)?;
    say(format_args!("taskd: {}", printable(&problem.detail)));
    Ok(None)
}

/// Returns the error for an answer without success, with taskd's message.
pub(super) fn refusal(server: &HttpPort, status: StatusCode, body: &[u8]) -> anyhow::Error {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => anyhow!(with_hint(
            &printable(&problem.detail),
            status == StatusCode::UNAUTHORIZED
        )),
        Err(error) => anyhow::Error::from(error).context(server.describe_other()),
    }
}

/// Shortens a text to `width` characters, the last of which is then an ellipsis.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

/// Escapes a text for the cell of a table. On a terminal it is also shortened.
pub(super) fn cell(text: &str) -> String {
    const SHOWN: usize = 60;
    match io::stdout().is_terminal() {
        true => printable(&cut(text, SHOWN)),
        false => printable(text),
    }
}

#[derive(Deserialize)]
struct Problem {
    detail: String,
}
