//! Requests to check and to dump, and the dump.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Unread, object, query};
use crate::model::{self, QueueName};

/// What to check.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "FsckRequest")]
pub(in crate::ingress) struct Request {
    queue: String,
    repair: bool,
    cursor: String,
}

pub(in crate::ingress) fn request(body: &Bytes) -> Result<model::Fsck, Unread> {
    let Request {
        queue,
        repair,
        cursor,
    } = object(body)?;
    Ok(model::Fsck {
        queue,
        repair,
        cursor,
    })
}

/// Reads which shards to dump: `queue=…`, and optionally `shard=…` and `limit=…`.
pub(in crate::ingress) fn dump(text: &str) -> Result<(String, Option<u32>, Option<usize>), Unread> {
    let mut queue = String::new();
    let mut shard = None;
    let mut limit = None;
    for (name, value) in query::parameters(text).map_err(Unread::Invalid)? {
        let not_a_number = || Unread::Invalid(query::not_a_number(&name, &value));
        match &*name {
            "shard" => shard = Some(value.parse().map_err(|_| not_a_number())?),
            "limit" => limit = Some(value.parse().map_err(|_| not_a_number())?),
            "queue" => queue = value,
            // The route has refused all other parameters.
            _ => {}
        }
    }
    Ok((queue, shard, limit))
}

/// The state of a queue in Redis.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Dump<'a> {
    #[schemars(with = "QueueName")]
    queue: &'a str,
    shards: Vec<DumpedShard>,
}

#[derive(JsonSchema, Serialize)]
struct DumpedShard {
    shard: u32,
    /// null if Redis has lost the shard, or if it is being opened.
    holds: Option<Value>,
}

impl<'a> Dump<'a> {
    pub(in crate::ingress) fn new(queue: &'a str, shards: Vec<(u32, Option<Value>)>) -> Self {
        Self {
            queue,
            shards: shards
                .into_iter()
                .map(|(shard, holds)| DumpedShard { shard, holds })
                .collect(),
        }
    }
}
