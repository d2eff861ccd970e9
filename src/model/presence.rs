//! Who works: the workers that taskd hears, and its own processes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Rfc3339, rfc_3339};

/// What a process tells the others of itself. Redis keeps it for a while, as JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Presence {
    pub process: String,
    pub host: String,
    pub pid: u32,
    pub http: String,
    pub grpc: String,
    pub pipelines: Vec<String>,
    pub version: String,
    pub since_unix_ms: i64,
    pub heard_unix_ms: i64,
    /// The workers that it heard last, the last one first.
    pub workers: Vec<HeardWorker>,
    /// How many more it has heard.
    pub more: u64,
    pub leads: bool,
    pub stalled: Vec<String>,
    pub differences: u64,
}

/// A worker, as one process heard it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HeardWorker {
    pub worker: String,
    pub address: String,
    pub since_unix_ms: i64,
    pub heard_unix_ms: i64,
    pub queues: Vec<WorkerCounts>,
}

/// What a worker did in one queue.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerCounts {
    pub queue: String,
    pub done: u64,
    pub failed: u64,
}

/// A worker, as all processes heard it.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
#[schemars(rename = "Worker")]
pub struct SeenWorker {
    pub worker: String,
    /// The process that heard it last.
    pub process: String,
    /// The address of that call.
    pub address: String,
    /// The queues that it asked or reported, at most 16.
    pub queues: Vec<String>,
    /// When a process that lives heard it first.
    #[serde(rename = "since", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub since_unix_ms: i64,
    #[serde(rename = "last_heard", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub heard_unix_ms: i64,
    /// Its leases now.
    pub in_hand: u64,
    /// Completions since then.
    pub done: u64,
    /// Rejections since then.
    pub failed: u64,
}

/// The workers that taskd has heard of lately.
#[derive(Clone, Debug, Default, JsonSchema, Serialize)]
#[schemars(rename = "Workers")]
pub struct SeenWorkers {
    pub workers: Vec<SeenWorker>,
    /// How many more there are: a process reports those that it heard last.
    pub more: u64,
    /// Leases that were not read: if there are any, workers may have more in hand.
    pub unread_leases: u64,
}

/// A process of taskd.
#[derive(Clone, Debug, JsonSchema, Serialize)]
#[schemars(rename = "Process")]
pub struct SeenProcess {
    pub process: String,
    pub host: String,
    pub pid: u32,
    /// The addresses on which it listens.
    pub http: String,
    pub grpc: String,
    pub pipelines: Vec<String>,
    pub version: String,
    #[serde(rename = "since", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub since_unix_ms: i64,
    #[serde(rename = "last_heard", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub heard_unix_ms: i64,
    /// The workers that it has heard lately.
    pub workers: u64,
    /// It does the work of the watchdog that one process does.
    pub leads: bool,
    /// Its loops that do not come round.
    pub stalled: Vec<String>,
    /// If it leads: the differences that the last check of the watchdog found.
    pub differences: u64,
}
