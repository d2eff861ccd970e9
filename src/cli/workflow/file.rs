//! The file of a workflow, and the way to a taskd that deploys it.

use std::{fs, path::Path};

use anyhow::{Context as _, bail};
use axum::body::Bytes;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    cli::{
        ask::{self, printable},
        http::HttpPort,
        print::say,
    },
    workflow::definition::{MAX_DEFINITION_BYTES, Mistake},
};

pub(super) fn say_mistakes(file: &Path, mistakes: Vec<Mistake>) {
    for mistake in mistakes {
        say(printable(&format!("{}:{mistake}", file.display())));
    }
}

pub(super) fn read_text(file: &Path) -> anyhow::Result<String> {
    let shown = file.display();
    let bytes = fs::metadata(file).with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() > MAX_DEFINITION_BYTES as u64 {
        bail!("{shown} is larger than a definition may be: {MAX_DEFINITION_BYTES} bytes");
    }
    fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))
}

#[derive(Deserialize)]
struct Wrong {
    mistakes: Vec<WrongPlace>,
}

#[derive(Deserialize)]
struct WrongPlace {
    line: usize,
    column: usize,
    message: String,
}

/// Deploys the text of a file. `None`: it has mistakes, which stderr names.
pub(super) async fn deploy_text(
    server: &HttpPort,
    file: &Path,
    text: String,
    dry_run: bool,
) -> anyhow::Result<Option<(StatusCode, Value)>> {
    let path = match dry_run {
        true => "/v1/workflows?dry_run=true",
        false => "/v1/workflows",
    };
    let body = Some(("application/yaml", Bytes::from(text)));
    let (status, body) = server.send(Method::PUT, path, body).await?;
    if status == StatusCode::UNPROCESSABLE_ENTITY {
        let wrong: Wrong = ask::read(server, &body)?;
        for WrongPlace {
            line,
            column,
            message,
        } in wrong.mistakes
        {
            let shown = file.display();
            say(printable(&format!("{shown}:{line}:{column}: {message}")));
        }
        return Ok(None);
    }
    if !status.is_success() {
        return Err(ask::refusal(server, status, &body));
    }
    Ok(Some((status, ask::read(server, &body)?)))
}

/// NAMESPACE/NAME/VERSION of a workflow in an answer.
pub(super) fn name_of(workflow: &Value) -> String {
    let [namespace, name, version] =
        ["namespace", "name", "version"].map(|field| workflow[field].as_str().unwrap_or_default());
    format!("{namespace}/{name}/{version}")
}
