//! The settings of a process, each with its default.

use std::{
    collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration,
};

use super::{
    enrich::{Enrich, EnrichUrl, SecretHeader},
    properties::Properties,
    schema::NamedSchema,
    traces::Traces,
    urls::{BusUrl, DatabaseUrl, RedisUrl},
};
use crate::model::{
    AtATime, KeyLimits, LimitBy, LimitFrom, MaybePace, PayloadSchema, Priority, QueueName,
    TaskRules,
};

/// A struct whose fields have defaults.
macro_rules! settings {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: $type:ty = $default:expr,)* }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

/// A pipeline, as `--pipelines` names it.
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
        Self::ALL
            .into_iter()
            .find(|pipeline| pipeline.as_str() == name)
            .ok_or_else(|| {
                let known = Self::ALL.map(Self::as_str).join(", ");
                match name {
                    "all" => format!("\"all\" stands alone; write all, or a list of {known}"),
                    _ => format!("unknown pipeline {name:?}; expected all, {known}"),
                }
            })
    }
}

/// How log lines look.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    clap::ValueEnum,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Pretty on a terminal, JSON otherwise.
    #[default]
    Auto,
    Pretty,
    Json,
}

/// The form of a queue's filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dedup {
    /// About 100 bytes for a key of any kind.
    #[default]
    Hash,
    /// A bit for a key that is a number.
    Bitmap,
}

/// The rule for callers.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    clap::ValueEnum,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Auth {
    /// Everybody who reaches the ports.
    #[default]
    None,
    /// The owners of tokens, according to their roles.
    Tokens,
}

settings! {
    /// Everything a process needs to know before it starts.
    #[derive(Clone, PartialEq)]
    pub struct Settings {
        /// Empty: the user named none, and taskd does not run.
        pub pipelines: Vec<Pipeline> = Vec::new(),
        pub data_dir: PathBuf = "./taskd-data".into(),
        /// `None`: an embedded redis-server in the data folder.
        pub redis_url: Option<RedisUrl> = None,
        pub redis: RedisAccess = RedisAccess::default(),
        /// `None`: SQLite in the data folder.
        pub database_url: Option<DatabaseUrl> = None,
        /// The most connections to a database server.
        pub database_pool: u32 = 16,
        /// `None`: Redis Streams in that Redis.
        pub bus_url: Option<BusUrl> = None,
        /// The user's properties of Kafka clients.
        pub kafka: Properties = Properties::default(),
        pub http_listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 7600)),
        pub grpc_listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 7601)),
        /// The host names of this taskd for HTTP, besides IP addresses and localhost.
        /// `.example.org` includes all below it, `*` any.
        pub allowed_hosts: Vec<String> = Vec::new(),
        pub tls: TlsFiles = TlsFiles::default(),
        pub auth: Auth = Auth::None,
        /// True: the ports may be open to the network without tokens.
        pub open_without_tokens: bool = false,
        /// The prefix of every Redis key.
        pub redis_prefix: String = "taskd".into(),
        /// The prefix of every topic.
        pub topic_prefix: String = String::new(),
        /// Partitions of `pipeline` and `task-results`, and so shards of each queue.
        pub partitions: u32 = 1,
        /// How long read records and reports stay on the bus, …
        pub topic_retention: Duration = Duration::from_secs(7 * 24 * 3600),
        /// … if they are among this many last ones of their partition.
        pub topic_retention_records: u64 = 10_000_000,
        /// How long a stop may take.
        ///
        /// Orchestrators usually kill after 30 s.
        pub grace_period: Duration = Duration::from_secs(25),
        /// False: this process writes no failed attempts into histories of tasks.
        pub history: bool = true,
        /// A loop without progress for this long makes the process not ready.
        pub stall_after: Duration = Duration::from_secs(30),
        pub log_format: LogFormat = LogFormat::Auto,
        /// A filter as tracing's `EnvFilter` reads it: `info`, `warn,taskd=debug`.
        pub log: String = "info".into(),
        pub traces: Traces = Traces::default(),
        pub limits: Limits = Limits::default(),
        pub discovery: Discovery = Discovery::default(),
        pub fanout: Fanout = Fanout::default(),
        pub watchdog: Watchdog = Watchdog::default(),
        pub queues: Queues = Queues::default(),
    }
}

settings! {
    /// TLS on both ports, in PEM. `None`: no TLS.
    #[derive(Clone, Debug, PartialEq)]
    pub struct TlsFiles {
        /// The certificate, and those between it and its authority.
        pub cert_file: Option<PathBuf> = None,
        pub key_file: Option<PathBuf> = None,
        /// The authority of clients' certificates; `None`: clients need none.
        pub client_ca_file: Option<PathBuf> = None,
    }
}

settings! {
    /// Access to Redis, and what a completion waits for there.
    #[derive(Clone, Debug, PartialEq)]
    pub struct RedisAccess {
        /// PEM; `None`: the certificate authorities of the system.
        pub ca_file: Option<PathBuf> = None,
        /// PEM; both or none.
        pub cert_file: Option<PathBuf> = None,
        pub key_file: Option<PathBuf> = None,
        /// The replicas that must have a completion before its answer.
        pub wait_replicas: u32 = 0,
        /// True: the append-only files of the master and of those replicas must have it, too.
        pub wait_aof: bool = false,
        pub wait_timeout: Duration = Duration::from_secs(1),
        /// The bytes that a server may use; 0: its `maxmemory`, for the embedded one half of the
        /// machine's memory.
        pub max_memory: u64 = 0,
    }
}

settings! {
    /// The limits of requests.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Limits {
        pub max_payload_bytes: usize = 1 << 20,
        pub max_headers_bytes: usize = 16 << 10,
        pub max_result_bytes: usize = 1 << 20,
        pub max_replicas: u32 = 100,
        pub max_lease: Duration = Duration::from_secs(12 * 3600),
        /// The limit of one gRPC message, HTTP body that is not NDJSON, or line of NDJSON.
        pub max_request_bytes: usize = 32 << 20,
        /// The limit of all HTTP bodies and gRPC messages in hand, with their decoded forms.
        pub request_budget: usize = 256 << 20,
        /// The most connections of each listener, if there are enough descriptors.
        pub max_connections: usize = 10_000,
        /// The most items of one complete, reject, extend or get call.
        pub max_items: usize = 1000,
        pub max_wait: Duration = Duration::from_secs(60),
        /// The most sessions of workers in this process, and the most shared sessions in each slot.
        pub max_sessions: usize = 10_000,
        /// The most tasks that a session may have in hand and on demand.
        pub max_session_tasks: u32 = 1000,
        /// The most tasks that all sessions of a worker may have in hand and on demand, in all
        /// processes.
        pub max_worker_tasks: usize = 10_000,
    }
}

settings! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct Discovery {
        /// The number of tasks at which a batch is stored (four times as many while callers pile
        /// up) …
        pub batch_max: usize = 1000,
        /// … or the time since its first task. 0: as soon as the batch before it is stored.
        pub batch_delay: Duration = Duration::ZERO,
        /// The most tasks that wait to be stored. Beyond it taskd tells callers to try later.
        pub buffer: usize = 20_000,
        /// The most queues: names with unfinished tasks or an open shard.
        pub max_queues: usize = 1000,
    }
}

settings! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct Fanout {
        /// The most records that the fanout reads and enqueues at once.
        pub batch_max: usize = 1000,
    }
}

settings! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct Watchdog {
        /// The longest time between two looks at leases and delays.
        pub interval: Duration = Duration::from_millis(250),
        /// The age at which the watchdog publishes a stored task that is not on the bus.
        pub republish_after: Duration = Duration::from_secs(5),
        /// How long a final record stays in Redis after SQL has it. The fanout looks older bus
        /// records up in SQL.
        pub grace: Duration = Duration::from_secs(60),
        /// A task that is due later than this stays in SQL.
        pub horizon: Duration = Duration::from_secs(600),
        /// How often the watchdog compares a page of unfinished tasks with Redis.
        pub reconcile_every: Duration = Duration::from_secs(1),
        /// Whether the watchdog mends what its checks find.
        pub repair: bool = false,
        /// How long SQL keeps a finished task; then only its key stays. 0: for ever.
        pub retention: Duration = Duration::from_secs(30 * 24 * 3600),
        /// How long SQL keeps a dead letter that is not about a stored task. 0: for ever.
        pub letter_retention: Duration = Duration::from_secs(30 * 24 * 3600),
        /// How long SQL keeps the failed attempts of a task. 0: as long as the task.
        pub history_retention: Duration = Duration::from_secs(7 * 24 * 3600),
        /// How long a shard must be empty before the watchdog closes it. 0: for ever.
        pub forget_queues_after: Duration = Duration::from_secs(24 * 3600),
        /// The most expired leases, due delays or repairs in one step.
        pub batch_max: usize = 1000,
    }
}

settings! {
    /// The settings of one queue.
    #[derive(Clone, Debug, PartialEq)]
    pub struct QueueSettings {
        pub replicas: u32 = 1,
        pub priority: Priority = Priority::Medium,
        pub lease: Duration = Duration::from_secs(30),
        pub max_attempts: u32 = 5,
        /// The waits before the second, third, … attempt; the last one repeats. Each has a jitter
        /// of up to a fifth.
        pub backoff: Vec<Duration> = [1, 5, 15, 30, 60].map(Duration::from_secs).to_vec(),
        /// How long an insert that is sent again with its idempotency key is answered as the first
        /// time.
        pub idempotency_window: Duration = Duration::from_secs(24 * 3600),
        /// The tasks in Redis, per shard, ahead of the foremost worker, beyond which new ones stay
        /// in SQL …
        pub high_water_tasks: u64 = 1_000_000,
        /// … or their bytes.
        pub high_water_bytes: u64 = 256 << 20,
        /// The unfinished tasks in SQL beyond which taskd tells inserts to try later.
        pub max_unfinished: u64 = 10_000_000,
        /// The keys in the filter. The oldest go first, and SQL decides then.
        pub filter_keys: u64 = 1_000_000,
        /// The form of the filter.
        pub dedup: Dedup = Dedup::Hash,
        /// True: a task that an insert does not accept becomes a dead letter.
        pub keep_refused: bool = false,
        /// True: events of its tasks go to topic `events` and to its channel.
        pub events: bool = false,
        /// What the limit keys of tasks are; the limits below hold for each of them.
        pub limit_by: LimitBy = LimitBy::Nothing,
        /// The tasks of a limit key that may be leased at a time.
        pub limit_at_a_time: AtATime = AtATime(0),
        /// So many starts of a limit key within a time, …
        pub limit_pace: MaybePace = MaybePace(None),
        /// … of which this many may come at once, …
        pub limit_burst: u32 = 1,
        /// … the share by which the time between two may be longer, …
        pub limit_jitter: f64 = 0.0,
        /// … and from when it counts.
        pub limit_from: LimitFrom = LimitFrom::Start,
        /// The schema that every payload must fit.
        pub payload_schema: NamedSchema = NamedSchema::default(),
        /// The endpoint that sees new tasks before they are stored, …
        pub enrich_url: EnrichUrl = EnrichUrl::default(),
        /// … a header with a secret for it, …
        pub enrich_header: SecretHeader = SecretHeader::default(),
        /// … the time for a call, …
        pub enrich_timeout: Duration = Duration::from_secs(1),
        /// … the tasks of a call and their bytes, …
        pub enrich_batch_tasks: usize = 100,
        pub enrich_batch_bytes: usize = 1 << 20,
        /// … the bytes of an answer, …
        pub enrich_answer_bytes: usize = 4 << 20,
        /// … the calls at a time, …
        pub enrich_concurrency: usize = 4,
        /// … the failures in a row after which taskd asks no more, …
        pub enrich_failures: u32 = 5,
        /// … and for how long.
        pub enrich_pause: Duration = Duration::from_secs(10),
    }
}

impl QueueSettings {
    /// `None`: the queue has no endpoint.
    pub fn enrich(&self) -> Option<Enrich> {
        Some(Enrich {
            url: self.enrich_url.0.clone()?,
            header: self.enrich_header.header.clone(),
            timeout: self.enrich_timeout,
            batch_tasks: self.enrich_batch_tasks,
            batch_bytes: self.enrich_batch_bytes,
            answer_bytes: self.enrich_answer_bytes,
            concurrency: self.enrich_concurrency,
            failures: self.enrich_failures,
            pause: self.enrich_pause,
        })
    }

    /// The limits of each limit key.
    pub fn key_limits(&self) -> KeyLimits {
        KeyLimits {
            at_a_time: self.limit_at_a_time.0,
            pace: self.limit_pace.0,
            burst: self.limit_burst,
            jitter: self.limit_jitter,
            from: self.limit_from,
        }
    }

    /// The live tasks at which a shard is full, whatever they wait for: a worker, a due time, a
    /// backoff.
    pub fn live_tasks_max(&self) -> u64 {
        self.high_water_tasks.saturating_mul(10)
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

    /// Whether any queue has limit keys.
    pub fn any_limited(&self) -> bool {
        let mut all = self.named.values().chain([&self.default]);
        all.any(|queue| queue.limit_by != LimitBy::Nothing)
    }

    /// The settings of a queue by a text that may be no queue name.
    fn of_name(&self, queue: &str) -> &QueueSettings {
        self.named.get(queue).unwrap_or(&self.default)
    }
}

impl Settings {
    /// True if taskd keeps tasks of `queue` that an insert does not accept as dead letters.
    pub fn keeps_refused(&self, queue: &str) -> bool {
        self.queues.of_name(queue).keep_refused
    }

    /// The schema that payloads of `queue` must fit.
    pub fn payload_schema(&self, queue: &str) -> Option<&PayloadSchema> {
        self.queues.of_name(queue).payload_schema.schema.as_ref()
    }

    /// The limits of a task of `queue`, and the queue's defaults.
    pub fn task_rules(&self, queue: &str) -> TaskRules {
        let limits = &self.limits;
        let queue = self.queues.of_name(queue);
        TaskRules {
            max_payload_bytes: limits.max_payload_bytes,
            max_headers_bytes: limits.max_headers_bytes,
            max_replicas: limits.max_replicas,
            max_lease: limits.max_lease,
            replicas: queue.replicas,
            priority: queue.priority,
            lease: queue.lease,
            max_attempts: queue.max_attempts,
            idempotency_window: queue.idempotency_window,
            limit_by: queue.limit_by.clone(),
            is_accepted: false,
        }
    }
}
