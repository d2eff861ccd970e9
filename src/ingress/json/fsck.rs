//! Requests to check and to dump, and the finds.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{Unread, object};
use crate::{
    api::{ECHO, shorten},
    model::{self, FindKind},
};

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "an object")]
struct Request {
    queue: String,
    repair: bool,
    cursor: String,
}

pub(in crate::ingress) fn request(body: &Bytes) -> Result<model::Fsck, Unread> {
    let Request { queue, repair, cursor } = object(body)?;
    Ok(model::Fsck { queue, repair, cursor })
}

/// Reads which shards to dump: `queue=…`, and `shard=…`, `limit=…`.
pub(in crate::ingress) fn dump(query: &str) -> Result<(String, Option<u32>, Option<usize>), Unread> {
    let (mut queue, mut shard, mut limit) = (String::new(), None, None);
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        let not_a_number = || Unread::Invalid(format!("{name} {:?} is not a whole number", shorten(&value, ECHO)));
        match &*name {
            "queue" => queue = value.into_owned(),
            "shard" => shard = Some(value.parse().map_err(|_| not_a_number())?),
            "limit" => limit = Some(value.parse().map_err(|_| not_a_number())?),
            other => {
                let other = shorten(other, ECHO);
                return Err(Unread::Invalid(format!("unknown parameter {other:?}; expected queue, shard, limit")));
            }
        }
    }
    Ok((queue, shard, limit))
}

#[derive(Serialize)]
pub(in crate::ingress) struct Page<'a> {
    finds: Vec<Find<'a>>,
    shards: u64,
    tasks: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<&'a str>,
}

#[derive(Serialize)]
struct Find<'a> {
    kind: FindKind,
    queue: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<String>,
    says: &'a str,
    repair: &'static str,
    mended: bool,
}

impl<'a> From<&'a model::FsckPage> for Page<'a> {
    fn from(page: &'a model::FsckPage) -> Self {
        let model::FsckPage { finds, shards, tasks, cursor } = page;
        let finds = finds.iter().map(Into::into).collect();
        Self { finds, shards: *shards, tasks: *tasks, cursor: cursor.as_deref() }
    }
}

impl<'a> From<&'a model::Find> for Find<'a> {
    fn from(find: &'a model::Find) -> Self {
        let model::Find { kind, queue, shard, task, says, mended } = find;
        let task = task.map(|id| id.to_string());
        Self { kind: *kind, queue, shard: *shard, task, says, repair: kind.mend(), mended: *mended }
    }
}
