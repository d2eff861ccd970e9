//! Names of the Redis keys: one place, in the order in which the scripts want them (`lua/lib/shard.lua`, `lua/README.md`).

use std::sync::Arc;

use crate::model::ShardId;

/// The lanes in the order of their keys: each priority's retry lane before it.
pub const LANES: [&str; 6] = ["hr", "h", "mr", "m", "lr", "l"];

/// How many of a shard's keys every script gets; those that touch lanes get all.
pub(super) const WITHOUT_LANES: usize = 10;

/// The keys of one shard. They share a hash tag, and so a cluster slot.
#[derive(Clone, Debug)]
pub struct ShardKeys {
    of_scripts: Arc<[String]>,
    waiting: Arc<str>,
}

impl ShardKeys {
    pub fn new(prefix: &str, shard: &ShardId) -> Self {
        let base = format!("{prefix}:{{{shard}}}");
        let single = ["g", "R", "B", "L", "D", "M", "S", "F", "O", "U"].map(|name| format!("{base}:{name}"));
        let lanes = LANES.iter().flat_map(|lane| ["T", "C", "P"].map(|name| format!("{base}:{lane}:{name}")));
        Self { of_scripts: single.into_iter().chain(lanes).collect(), waiting: format!("{base}:W").into() }
    }

    /// In the order of the scripts.
    pub fn all(&self) -> &[String] {
        &self.of_scripts
    }

    pub fn generation(&self) -> &str {
        &self.of_scripts[0]
    }

    /// Written by calls that wait for replicas, and read by nobody.
    pub(super) fn waiting(&self) -> &str {
        &self.waiting
    }

    pub fn outbox(&self) -> &str {
        &self.of_scripts[6]
    }
}

/// The key without which a shard is not there.
pub(super) fn generation(prefix: &str, shard: &ShardId) -> String {
    format!("{prefix}:{{{shard}}}:g")
}

/// Where scripts say that a queue has something to hand out again; the message is the queue's name.
pub fn wake_channel(prefix: &str) -> String {
    format!("{prefix}:wake")
}
