//! Checks and their findings: converts messages to and from `model`.

use super::pb;
use crate::model::{Find, Fsck, FsckPage, ShardId};

impl From<pb::FsckRequest> for Fsck {
    fn from(request: pb::FsckRequest) -> Self {
        let pb::FsckRequest {
            queue,
            repair,
            cursor,
        } = request;
        Self {
            queue,
            repair,
            cursor,
        }
    }
}

impl From<FsckPage> for pb::FsckResponse {
    fn from(page: FsckPage) -> Self {
        let FsckPage {
            finds,
            more,
            unchecked,
            unchecked_shards,
            shards,
            tasks,
            cursor,
        } = page;
        let finds = finds.into_iter().map(Into::into).collect();
        let unchecked_shard = |(shard, says): (ShardId, String)| {
            let queue = shard.queue.as_str().to_owned();
            pb::UncheckedShard {
                queue,
                shard: shard.number,
                says,
            }
        };
        let unchecked_shards = unchecked_shards.into_iter().map(unchecked_shard).collect();
        Self {
            finds,
            more,
            unchecked,
            unchecked_shards,
            shards,
            tasks,
            cursor: cursor.unwrap_or_default(),
        }
    }
}

impl From<Find> for pb::FsckFind {
    fn from(find: Find) -> Self {
        let Find {
            kind,
            queue,
            shard,
            task,
            says,
            mended,
            ..
        } = find;
        Self {
            kind: kind.as_str().to_owned(),
            queue,
            shard,
            task_id: task.map(|id| id.to_string()).unwrap_or_default(),
            says,
            repair: kind.mend().to_owned(),
            mended,
        }
    }
}
