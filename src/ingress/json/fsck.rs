//! Requests to check and to dump, and the finds.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Unread, object, query};
use crate::model::{self, FindKind, QueueName, ShardId, TaskId};

/// The part that is to be checked.
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

/// Reads which shards to dump: `queue=…`, and `shard=…`, `limit=…`.
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
            // The route has refused others.
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
    /// null: Redis lost the shard, or it is being opened.
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

/// The differences that a part of the check found.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "FsckPage")]
pub(in crate::ingress) struct Page<'a> {
    finds: Vec<Find<'a>>,
    /// Finds beyond those, which an answer has no room for.
    more: u64,
    /// Suspected tasks that this part could not look at again.
    unchecked: u64,
    /// Shards that Redis cannot serve. Some of their tasks, or all, are not checked.
    unchecked_shards: Vec<UncheckedShard<'a>>,
    shards: u64,
    tasks: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<&'a str>,
}

#[derive(JsonSchema, Serialize)]
struct UncheckedShard<'a> {
    #[schemars(with = "QueueName")]
    queue: &'a str,
    shard: u32,
    /// The reason.
    says: &'a str,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "FsckFind")]
struct Find<'a> {
    #[schemars(with = "String")]
    kind: FindKind,
    #[schemars(with = "QueueName")]
    queue: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<TaskId>")]
    task: Option<String>,
    says: &'a str,
    repair: &'static str,
    mended: bool,
}

impl<'a> From<&'a model::FsckPage> for Page<'a> {
    fn from(page: &'a model::FsckPage) -> Self {
        let model::FsckPage {
            finds,
            more,
            unchecked,
            unchecked_shards,
            shards,
            tasks,
            cursor,
        } = page;
        let unchecked_shard = |(shard, says): (&'a ShardId, &'a String)| UncheckedShard {
            queue: shard.queue.as_str(),
            shard: shard.number,
            says,
        };
        Self {
            finds: finds.iter().map(Into::into).collect(),
            more: *more,
            unchecked: *unchecked,
            unchecked_shards: unchecked_shards.iter().map(unchecked_shard).collect(),
            shards: *shards,
            tasks: *tasks,
            cursor: cursor.as_deref(),
        }
    }
}

impl<'a> From<&'a model::Find> for Find<'a> {
    fn from(find: &'a model::Find) -> Self {
        let model::Find {
            kind,
            queue,
            shard,
            task,
            says,
            mended,
        } = find;
        let task = task.map(|id| id.to_string());
        Self {
            kind: *kind,
            queue,
            shard: *shard,
            task,
            says,
            repair: kind.mend(),
            mended: *mended,
        }
    }
}
