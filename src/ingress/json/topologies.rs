//! Topologies.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use super::{Unread, object};

/// A topology to apply.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with a text")]
#[schemars(rename = "ApplyTopology")]
pub(in crate::ingress) struct Apply {
    /// The file, in TOML: at most 256 KiB.
    text: String,
}

pub(in crate::ingress) fn text(body: &Bytes) -> Result<String, Unread> {
    let apply: Apply = object(body)?;
    Ok(apply.text)
}
