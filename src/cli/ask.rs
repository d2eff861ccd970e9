//! A question to taskd's HTTP port, about something that may not be there.

use anyhow::{Context, bail};
use axum::body::Bytes;
use hyper::StatusCode;
use serde::{Deserialize, de::DeserializeOwned};

use super::{http::HttpPort, trust::with_hint};

/// Asks, and answers the body and what is in it. `None`: there is no such thing, which stderr says.
pub(super) async fn ask<T: DeserializeOwned>(server: &HttpPort, path: &str) -> anyhow::Result<Option<(Bytes, T)>> {
    let (status, body) = server.get(path).await?;
    let unreadable = || server.is_another();
    if status.is_success() {
        let answer = serde_json::from_slice(&body).with_context(unreadable)?;
        return Ok(Some((body, answer)));
    }
    let problem: Problem = serde_json::from_slice(&body).with_context(unreadable)?;
    if status != StatusCode::NOT_FOUND {
        let detail = printable(&problem.detail);
        bail!("{}", with_hint(&detail, status == StatusCode::UNAUTHORIZED));
    }
    eprintln!("taskd: {}", printable(&problem.detail));
    Ok(None)
}

/// Escapes what a terminal would obey: keys and reasons come from users.
pub(super) fn printable(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

#[derive(Deserialize)]
struct Problem {
    detail: String,
}
