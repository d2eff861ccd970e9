//! Names of the Redis keys of the queue (`lua/README.md`).

use std::sync::Arc;

use crate::{
    model::{QueueName, ShardId},
    redis_pool::{Call, Script, ShardKey},
};

/// The lanes in the order of their keys: each priority's retry lane before its lane.
pub const LANES: [&str; 6] = ["hr", "h", "mr", "m", "lr", "l"];

const SINGLE: [(ShardKey, &str); 14] = [
    (ShardKey::GENERATION, GENERATION),
    (ShardKey::RECORDS, "records"),
    (ShardKey::BODIES, "bodies"),
    (ShardKey::LEASES, "leases"),
    (ShardKey::DELAYED, "delayed"),
    (ShardKey::COUNTERS, "counters"),
    (ShardKey::OUTBOX, "outbox"),
    (ShardKey::FINALS, "finals"),
    (ShardKey::OFFSET, "offset"),
    (ShardKey::UNDELIVERED, "undelivered"),
    (ShardKey::LIMITS, "limits"),
    (ShardKey::LINES, "lines"),
    (ShardKey::STARTS, "starts"),
    (ShardKey::CROWDED, "crowded"),
];
const GENERATION: &str = "generation";

/// The keys of one shard. They share a hash tag, and so a cluster slot.
#[derive(Clone, Debug)]
pub struct ShardKeys(Arc<Names>);

#[derive(Debug)]
struct Names {
    single: [String; 14],
    /// T, C and P of each lane.
    lanes: Vec<String>,
    waited: String,
}

impl ShardKeys {
    pub fn new(prefix: &str, shard: &ShardId) -> Self {
        let base = format!("{prefix}:{{{shard}}}");
        let single = SINGLE.map(|(_, name)| format!("{base}:{name}"));
        let lanes = LANES
            .iter()
            .flat_map(|lane| ["T", "C", "P"].map(|name| format!("{base}:{lane}:{name}")));
        Self(Arc::new(Names {
            single,
            lanes: lanes.collect(),
            waited: format!("{base}:waited"),
        }))
    }

    pub fn key(&self, key: ShardKey) -> &str {
        let place = SINGLE.iter().position(|(known, _)| *known == key);
        &self.0.single[place.expect("every key has a name")]
    }

    pub fn lanes(&self) -> &[String] {
        &self.0.lanes
    }

    /// Written by calls that wait for replicas, and read by no one.
    pub(super) fn waited(&self) -> &str {
        &self.0.waited
    }

    /// A call of a shard's script, with the keys that it gets.
    pub fn call(&self, script: &'static Script, now_unix_ms: Option<i64>) -> Call {
        let mut keys = Vec::with_capacity(SINGLE.len() + self.0.lanes.len());
        if let Some(row) = script.of_shard() {
            keys.extend(row.keys.iter().map(|key| self.key(*key)));
            let lanes = if row.lanes { &self.0.lanes[..] } else { &[] };
            keys.extend(lanes.iter().map(String::as_str));
        }
        script.call(&keys).now(now_unix_ms)
    }
}

/// The name of the key without which a shard does not exist.
pub(super) fn generation(prefix: &str, shard: &ShardId) -> String {
    format!("{prefix}:{{{shard}}}:{GENERATION}")
}

/// The channel on which scripts publish the name of a queue that has something to claim. Messages
/// that begin with a mark (`!`, `?`, `~`, `%`) are for sessions; `lua/README.md` lists the marks.
pub fn wake_channel(prefix: &str) -> String {
    format!("{prefix}:wake")
}

/// The queues that are watched, ordered by the ends of their leases.
pub fn watched(prefix: &str) -> String {
    format!("{prefix}:watched")
}

/// The channel on which processes announce what became of the tasks of a queue that somebody
/// watches.
pub fn events_channel(prefix: &str, queue: &QueueName) -> String {
    format!("{}{queue}", events_channel_prefix(prefix))
}

pub(super) fn events_channel_prefix(prefix: &str) -> String {
    format!("{prefix}:events:")
}
