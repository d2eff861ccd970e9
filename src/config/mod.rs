//! The settings of a process, complete: every default filled in, every value checked.
//!
//! [`load`] says where they come from, `check` what they must fulfil, `show` how they are printed.

mod check;
mod load;
mod options;
mod properties;
mod show;
mod units;
mod wording;

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

pub use check::{MOST_PARTITIONS, without_password};
pub use load::{Error, Loaded, Origin, Origins, load};
pub use options::Options;
pub use properties::Properties;
pub use show::to_toml;
pub use units::Time;
pub use wording::in_field;

use crate::model::{Priority, QueueName, TaskRules};

/// What `--pipelines` may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pipeline {
    Discovery,
    Fanout,
    Watchdog,
    Tasks,
}

impl Pipeline {
    pub const ALL: [Self; 4] = [Self::Discovery, Self::Fanout, Self::Watchdog, Self::Tasks];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Discovery => "discovery",
            Self::Fanout => "fanout",
            Self::Watchdog => "watchdog",
            Self::Tasks => "tasks",
        }
    }
}

impl fmt::Display for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Pipeline {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|pipeline| pipeline.as_str() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::as_str).join(", ");
            format!("unknown pipeline {name:?}; expected all, {known}")
        })
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Pretty on a terminal, JSON otherwise.
    #[default]
    Auto,
    Pretty,
    Json,
}

/// Everything a process needs to know before it starts.
#[derive(Clone, PartialEq)]
pub struct Settings {
    /// Empty: nobody has said which; `taskd` does not run then.
    pub pipelines: Vec<Pipeline>,
    pub data_dir: PathBuf,
    /// `None`: a redis-server of our own in the data folder.
    pub redis_url: Option<String>,
    pub redis: RedisAccess,
    /// `None`: SQLite in the data folder. `mysql://…` or `sqlite://…`
    pub database_url: Option<String>,
    /// Connections to a database server, at most.
    pub database_pool: u32,
    /// `None`: Redis Streams in that Redis. `kafka://host:port,…`
    pub bus_url: Option<String>,
    /// What librdkafka is told beside what we tell it.
    pub kafka: Properties,
    pub http_listen: SocketAddr,
    pub grpc_listen: SocketAddr,
    /// Names under which HTTP is served, beside IP addresses and localhost; `.example.org` with all below it, `*` any.
    pub allowed_hosts: Vec<String>,
    /// Stands before every Redis key.
    pub redis_prefix: String,
    /// Stands before every topic.
    pub topic_prefix: String,
    /// Partitions of `pipeline` and `task-results`, and so shards of each queue.
    pub partitions: u32,
    /// Records of the bus that nobody needs any more stay so long …
    pub topic_retention: Duration,
    /// … as far as they are among the last so many of their partition.
    pub topic_retention_records: u64,
    /// How long a stop may take.
    pub grace_period: Duration,
    /// A pipeline that has made no progress for so long is not ready.
    pub stall_after: Duration,
    pub log_format: LogFormat,
    /// A filter as tracing's `EnvFilter` reads it: `info`, `warn,taskd=debug`.
    pub log: String,
    pub limits: Limits,
    pub discovery: Discovery,
    pub fanout: Fanout,
    pub watchdog: Watchdog,
    pub queues: Queues,
}

/// As `taskd check-config` prints them: passwords are hidden.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_toml(self, &Origins::default()))
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            pipelines: Vec::new(),
            data_dir: "./taskd-data".into(),
            redis_url: None,
            redis: RedisAccess::default(),
            database_url: None,
            database_pool: 16,
            bus_url: None,
            kafka: Properties::default(),
            http_listen: SocketAddr::from(([127, 0, 0, 1], 7600)),
            grpc_listen: SocketAddr::from(([127, 0, 0, 1], 7601)),
            allowed_hosts: Vec::new(),
            redis_prefix: "taskd".into(),
            topic_prefix: String::new(),
            partitions: 1,
            topic_retention: Duration::from_secs(7 * 24 * 3600),
            topic_retention_records: 10_000_000,
            // Orchestrators usually kill after 30 s.
            grace_period: Duration::from_secs(25),
            stall_after: Duration::from_secs(30),
            log_format: LogFormat::Auto,
            log: "info".into(),
            limits: Limits::default(),
            discovery: Discovery::default(),
            fanout: Fanout::default(),
            watchdog: Watchdog::default(),
            queues: Queues::default(),
        }
    }
}

/// How taskd comes into Redis, and what a completion waits for there.
#[derive(Clone, Debug, PartialEq)]
pub struct RedisAccess {
    /// PEM; `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM, both or none.
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// Replicas that have a completion before it is answered.
    pub wait_replicas: u32,
    /// The append-only files of the master and of those replicas have it, too.
    pub wait_aof: bool,
    pub wait_timeout: Duration,
    /// Bytes that a server may use; 0: its `maxmemory`, and for the embedded one a half of the machine's memory.
    pub max_memory: u64,
}

impl Default for RedisAccess {
    fn default() -> Self {
        Self {
            ca_file: None,
            cert_file: None,
            key_file: None,
            wait_replicas: 0,
            wait_aof: false,
            wait_timeout: Duration::from_secs(1),
            max_memory: 0,
        }
    }
}

/// What a request may hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    pub max_payload_bytes: usize,
    pub max_headers_bytes: usize,
    pub max_result_bytes: usize,
    pub max_replicas: u32,
    pub max_lease: Duration,
    /// Of one HTTP body that is not NDJSON, and of one gRPC message.
    pub max_request_bytes: usize,
    /// Of all HTTP bodies and gRPC messages in hand, with what they are decoded to.
    pub request_budget: usize,
    /// Connections of each listener, as far as there are descriptors.
    pub max_connections: usize,
    /// Items of one complete, reject, extend or get call.
    pub max_items: usize,
    pub max_wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_payload_bytes: 1 << 20,
            max_headers_bytes: 16 << 10,
            max_result_bytes: 1 << 20,
            max_replicas: 100,
            max_lease: Duration::from_secs(12 * 3600),
            max_request_bytes: 32 << 20,
            request_budget: 256 << 20,
            max_connections: 10_000,
            max_items: 1000,
            max_wait: Duration::from_secs(60),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Discovery {
    /// A batch is stored when it has so many tasks …
    pub batch_max: usize,
    /// … or so long after its first task came. 0: as soon as the batch before it is stored.
    pub batch_delay: Duration,
    /// Tasks that may wait to be stored; beyond that callers are told to try later.
    pub buffer: usize,
    /// Queues that there may be: names with unfinished tasks or an open shard.
    pub max_queues: usize,
}

impl Default for Discovery {
    fn default() -> Self {
        Self { batch_max: 1000, batch_delay: Duration::ZERO, buffer: 20_000, max_queues: 1000 }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Fanout {
    /// Records read and enqueued at once.
    pub batch_max: usize,
}

impl Default for Fanout {
    fn default() -> Self {
        Self { batch_max: 1000 }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Watchdog {
    /// How often leases and delays are looked at, at least.
    pub interval: Duration,
    /// A row that was stored so long ago and not published is published again.
    pub republish_after: Duration,
    /// How long a final record stays in Redis after SQL has it; bus records older than this are looked up in SQL.
    pub grace: Duration,
    /// What is due later than this stays in SQL.
    pub horizon: Duration,
    /// How often a page of unfinished tasks is compared with Redis.
    pub reconcile_every: Duration,
    /// How long a finished task can be looked up; then only its key is kept. 0: for ever.
    pub retention: Duration,
    /// How long a shard of a queue must have been empty until it is closed. 0: for ever.
    pub forget_queues_after: Duration,
    /// Expired leases, due delays or repairs handled in one step.
    pub batch_max: usize,
}

impl Default for Watchdog {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(250),
            republish_after: Duration::from_secs(5),
            grace: Duration::from_secs(60),
            horizon: Duration::from_secs(600),
            reconcile_every: Duration::from_secs(1),
            retention: Duration::from_secs(30 * 24 * 3600),
            forget_queues_after: Duration::from_secs(24 * 3600),
            batch_max: 1000,
        }
    }
}

/// The settings of one queue.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueSettings {
    pub replicas: u32,
    pub priority: Priority,
    pub lease: Duration,
    pub max_attempts: u32,
    /// Waits before the second, third, … try; the last one repeats. Each is jittered by up to a fifth.
    pub backoff: Vec<Duration>,
    /// Tasks in Redis, per shard, ahead of the foremost worker, beyond which new ones stay in SQL …
    pub high_water_tasks: u64,
    /// … or their bytes.
    pub high_water_bytes: u64,
    /// Unfinished tasks in SQL beyond which inserts are told to try later.
    pub max_unfinished: u64,
    /// Keys kept in the filter; the oldest knowledge goes first, and SQL decides then.
    pub filter_keys: u64,
}

impl QueueSettings {
    /// Live tasks in a shard at which it is full, whatever they wait for: their turn, their time, a backoff, slow workers.
    pub fn live_tasks_max(&self) -> u64 {
        self.high_water_tasks.saturating_mul(10)
    }
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self {
            replicas: 1,
            priority: Priority::Medium,
            lease: Duration::from_secs(30),
            max_attempts: 5,
            backoff: [1, 5, 15, 30, 60].map(Duration::from_secs).to_vec(),
            high_water_tasks: 100_000,
            high_water_bytes: 256 << 20,
            max_unfinished: 10_000_000,
            filter_keys: 1_000_000,
        }
    }
}

/// `[queues.NAME]`, and `[queues.default]` for all others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Queues {
    pub default: QueueSettings,
    pub named: BTreeMap<QueueName, QueueSettings>,
}

impl Queues {
    pub fn get(&self, queue: &QueueName) -> &QueueSettings {
        self.named.get(queue).unwrap_or(&self.default)
    }
}

impl Settings {
    /// The limits of a task of `queue`, and the queue's defaults.
    pub fn task_rules(&self, queue: &str) -> TaskRules {
        let (limits, queue) = (&self.limits, self.queues.named.get(queue).unwrap_or(&self.queues.default));
        TaskRules {
            max_payload_bytes: limits.max_payload_bytes,
            max_headers_bytes: limits.max_headers_bytes,
            max_replicas: limits.max_replicas,
            max_lease: limits.max_lease,
            replicas: queue.replicas,
            priority: queue.priority,
            lease: queue.lease,
            max_attempts: queue.max_attempts,
        }
    }
}
