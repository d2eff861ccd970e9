//! The file of a topology, and the way to a taskd that applies it.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, bail};
use axum::body::Bytes;
use hyper::Method;
use serde_json::{Value, json};
use url::form_urlencoded;

use crate::{
    cli::{
        ask::{ask_with, printable},
        http::HttpPort,
        print::say,
    },
    model::{MAX_TOPOLOGY_BYTES, Topology as Plan, TopologyName},
};

pub(super) fn path(topology: &str) -> String {
    let encoded: String = form_urlencoded::byte_serialize(topology.as_bytes()).collect();
    format!("/v1/topologies/{}", encoded.replace('+', "%20"))
}

/// Reads a file. `None` if it has mistakes, which stderr names.
pub(super) fn read(file: &PathBuf) -> anyhow::Result<Option<(String, Plan)>> {
    let shown = file.display();
    let bytes = fs::metadata(file).with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() > MAX_TOPOLOGY_BYTES as u64 {
        bail!("{shown} is larger than a topology may be: {MAX_TOPOLOGY_BYTES} bytes");
    }
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    match Plan::read(&text) {
        Ok(plan) => Ok(Some((text, plan))),
        Err(mistakes) => {
            for mistake in mistakes {
                say(printable(&format!("{shown}:{mistake}")));
            }
            Ok(None)
        }
    }
}

/// Applies the text of a file. `None` if taskd knows no topologies, which stderr says.
pub(super) async fn apply_to(
    server: &HttpPort,
    name: &TopologyName,
    text: &str,
) -> anyhow::Result<Option<Value>> {
    let body = serde_json::to_vec(&json!({"text": text}))?;
    let body = Some(("application/json", Bytes::from(body)));
    let answer = ask_with(server, Method::PUT, &path(name.as_str()), body).await?;
    Ok(answer
        .map(|answer| serde_json::from_slice(&answer))
        .transpose()?)
}
