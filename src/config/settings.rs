//! The settings of a process, each with its default.

use std::{
    collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration,
};

use super::{
    calls::Calls,
    enrich::{Enrich, EnrichUrl, SecretHeader},
    properties::Properties,
    schema::NamedSchema,
    traces::Traces,
    urls::{BusUrl, DatabaseUrl, RedisUrl},
};
use crate::model::{
    AtATime, KeyLimits, LimitBy, LimitFrom, MaybePace, PayloadSchema, Priority, PutSubscription,
    QueueName, SubscriptionName, TaskRules, TopicName, TopicSettings,
};

/// Defines a struct whose fields have defaults.
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

/// A pipeline, under its name in `--pipelines`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pipeline {
    Discovery,
    Fanout,
    Watchdog,
    Tasks,
    Workflow,
}

impl Pipeline {
    pub const ALL: [Self; 5] = [
        Self::Discovery,
        Self::Fanout,
        Self::Watchdog,
        Self::Tasks,
        Self::Workflow,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Discovery => "discovery",
            Self::Fanout => "fanout",
            Self::Watchdog => "watchdog",
            Self::Tasks => "tasks",
            Self::Workflow => "workflow",
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

/// The format of log lines.
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

/// Whether this process serves the dashboard.
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
#[serde(rename_all = "kebab-case")]
pub enum Dashboard {
    #[default]
    On,
    /// Nobody changes anything there.
    ReadOnly,
    Off,
}

/// The data structure of a queue's filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dedup {
    /// About 100 bytes per key, for any kind of key.
    #[default]
    Hash,
    /// One bit per key, for keys that are numbers.
    Bitmap,
}

/// Who may call taskd.
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
    /// Everybody who can reach the ports.
    #[default]
    None,
    /// Callers with a token, according to its roles.
    Tokens,
}

settings! {
    /// All settings that a process needs to start.
    #[derive(Clone, PartialEq)]
    pub struct Settings {
        /// Empty if the user named none. taskd does not run then.
        pub pipelines: Vec<Pipeline> = Vec::new(),
        pub data_dir: PathBuf = "./taskd-data".into(),
        /// `None` for an embedded redis-server in the data folder.
        pub redis_url: Option<RedisUrl> = None,
        pub redis: RedisAccess = RedisAccess::default(),
        /// `None` for SQLite in the data folder.
        pub database_url: Option<DatabaseUrl> = None,
        /// The maximum number of connections to a database server.
        pub database_pool: u32 = 16,
        /// `None` for Redis Streams in the same Redis.
        pub bus_url: Option<BusUrl> = None,
        /// The user's librdkafka properties for Kafka clients.
        pub kafka: Properties = Properties::default(),
        pub http_listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 7600)),
        pub grpc_listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 7601)),
        /// The host names under which HTTP clients may reach this taskd, in addition to IP
        /// addresses and localhost. `.example.org` includes all names below it, and `*` allows any.
        pub allowed_hosts: Vec<String> = Vec::new(),
        pub tls: TlsFiles = TlsFiles::default(),
        pub auth: Auth = Auth::None,
        /// Whether the ports may be open to the network without tokens.
        pub open_without_tokens: bool = false,
        pub dashboard: Dashboard = Dashboard::On,
        /// Whether the dashboard shows payloads, headers and results.
        pub dashboard_payloads: bool = true,
        /// The prefix of every Redis key.
        pub redis_prefix: String = "taskd".into(),
        /// The prefix of every topic.
        pub topic_prefix: String = String::new(),
        /// The number of partitions of `pipeline` and `task-results`, and so of shards of each
        /// queue.
        pub partitions: u32 = 1,
        /// How long records that were read, and reports, stay on the bus.
        pub topic_retention: Duration = Duration::from_secs(7 * 24 * 3600),
        /// How many of these records stay in each partition, even if they are younger than
        /// `topic_retention`.
        pub topic_retention_records: u64 = 10_000_000,
        /// How long a stop may take.
        ///
        /// Orchestrators usually kill a process after 30 s.
        pub grace_period: Duration = Duration::from_secs(25),
        /// Whether this process records failed attempts in the histories of tasks.
        pub history: bool = true,
        /// If a loop makes no progress for this long, the process is not ready.
        pub stall_after: Duration = Duration::from_secs(30),
        pub log_format: LogFormat = LogFormat::Auto,
        /// A filter in the syntax of tracing's `EnvFilter`: `info`, `warn,taskd=debug`.
        pub log: String = "info".into(),
        pub traces: Traces = Traces::default(),
        pub limits: Limits = Limits::default(),
        pub discovery: Discovery = Discovery::default(),
        pub fanout: Fanout = Fanout::default(),
        pub calls: Calls = Calls::default(),
        pub watchdog: Watchdog = Watchdog::default(),
        pub workflows: Workflows = Workflows::default(),
        pub queues: Queues = Queues::default(),
        /// `[topics.NAME]`: topics that a start makes.
        pub topics: BTreeMap<TopicName, TopicSettings> = BTreeMap::new(),
        /// `[subscriptions.NAME]`: subscriptions that a start makes.
        pub subscriptions: BTreeMap<SubscriptionName, PutSubscription> = BTreeMap::new(),
    }
}

settings! {
    /// PEM files for TLS on both ports. Without a certificate there is no TLS.
    #[derive(Clone, Debug, PartialEq)]
    pub struct TlsFiles {
        /// The certificate and its intermediate certificates.
        pub cert_file: Option<PathBuf> = None,
        pub key_file: Option<PathBuf> = None,
        /// The authority of client certificates, or `None` if clients need no certificate.
        pub client_ca_file: Option<PathBuf> = None,
    }
}

settings! {
    /// How to access Redis, and what a completion waits for there.
    #[derive(Clone, Debug, PartialEq)]
    pub struct RedisAccess {
        /// A PEM file, or `None` for the certificate authorities of the system.
        pub ca_file: Option<PathBuf> = None,
        /// PEM files. Either both are set or neither.
        pub cert_file: Option<PathBuf> = None,
        pub key_file: Option<PathBuf> = None,
        /// How many replicas must have a completion before taskd confirms it.
        pub wait_replicas: u32 = 0,
        /// Whether the completion must also be in the append-only files of the master and those
        /// replicas.
        pub wait_aof: bool = false,
        pub wait_timeout: Duration = Duration::from_secs(1),
        /// How many bytes a server may use. 0 means its `maxmemory`, or half of the machine's
        /// memory for the embedded one.
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
        /// The maximum size of a gRPC message, an HTTP body that is not NDJSON, or a line of
        /// NDJSON.
        pub max_request_bytes: usize = 32 << 20,
        /// The maximum total size of all HTTP bodies and gRPC messages being processed, including
        /// their decoded forms.
        pub request_budget: usize = 256 << 20,
        /// The maximum number of connections of each listener. Lower if there are not enough file
        /// descriptors.
        pub max_connections: usize = 10_000,
        /// The maximum number of items in one complete, reject, extend or get call.
        pub max_items: usize = 1000,
        pub max_wait: Duration = Duration::from_secs(60),
        /// The maximum number of worker sessions in this process, and of shared sessions in each
        /// slot.
        pub max_sessions: usize = 10_000,
        /// The maximum number of tasks that a session may hold and demand, together.
        pub max_session_tasks: u32 = 1000,
        /// The maximum number of tasks that all sessions of a worker, in all processes, may hold
        /// and demand together.
        pub max_worker_tasks: usize = 10_000,
    }
}

settings! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct Discovery {
        /// The number of tasks at which a batch is stored. Four times as many while callers pile
        /// up.
        pub batch_max: usize = 1000,
        /// How long the first task of a batch waits for others. 0 means until the previous batch is
        /// stored.
        pub batch_delay: Duration = Duration::ZERO,
        /// The maximum number of tasks waiting to be stored. When it is reached, taskd tells
        /// callers to retry later.
        pub buffer: usize = 20_000,
        /// The maximum number of queues that have unfinished tasks or an open shard.
        pub max_queues: usize = 1000,
    }
}

settings! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct Fanout {
        /// The maximum number of records that the fanout reads and enqueues at once.
        pub batch_max: usize = 1000,
    }
}

settings! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct Watchdog {
        /// The maximum time between two checks for expired leases and due delays.
        pub interval: Duration = Duration::from_millis(250),
        /// The age at which the watchdog publishes a stored task that is not on the bus.
        pub republish_after: Duration = Duration::from_secs(5),
        /// How long a final record stays in Redis after SQL has it. For bus records older than
        /// this, the fanout asks SQL.
        pub grace: Duration = Duration::from_secs(60),
        /// A task that becomes due later than this from now stays in SQL.
        pub horizon: Duration = Duration::from_secs(600),
        /// How often the watchdog compares a page of unfinished tasks with Redis.
        pub reconcile_every: Duration = Duration::from_secs(1),
        /// Whether the watchdog repairs what its checks find.
        pub repair: bool = false,
        /// How long SQL keeps a finished task. After that only its key stays. 0 means forever.
        pub retention: Duration = Duration::from_secs(30 * 24 * 3600),
        /// How long SQL keeps a dead letter that does not refer to a stored task. 0 means forever.
        pub letter_retention: Duration = Duration::from_secs(30 * 24 * 3600),
        /// How long SQL keeps the failed attempts of a task. 0 means as long as the task.
        pub history_retention: Duration = Duration::from_secs(7 * 24 * 3600),
        /// How long a shard must be empty before the watchdog closes it. 0 means that it is never
        /// closed.
        pub forget_queues_after: Duration = Duration::from_secs(24 * 3600),
        /// The maximum number of expired leases, due delays or repairs in one step.
        pub batch_max: usize = 1000,
    }
}

impl Watchdog {
    /// The shortest time for which SQL keeps a finished task: as long as the bus may deliver it
    /// again, twice, because clocks differ.
    pub fn shortest_retention(&self) -> Duration {
        2 * (self.grace + self.republish_after)
    }
}

settings! {
    /// The limits of executions of workflows. One that goes beyond faults.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Workflows {
        /// The maximum number of tasks of a workflow between two waits.
        pub max_steps: u32 = 10_000,
        /// The maximum size of all values that an execution keeps, as JSON.
        pub max_state: usize = 4 << 20,
        /// How deep tasks may be in each other.
        pub max_depth: usize = 64,
        /// The maximum number of open executions. When it is reached, taskd tells callers to retry
        /// later.
        pub max_open: u64 = 1_000_000,
        /// The maximum number of calls and rounds of loops in an evaluation of an expression.
        pub expr_fuel: u64 = 20_000,
        /// The maximum size of all values of an evaluation.
        pub expr_memory: usize = 64 << 20,
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
        /// The waits before the second, third, … attempt. The last one is used for all later
        /// attempts. Each varies randomly by up to a fifth.
        pub backoff: Vec<Duration> = [1, 5, 15, 30, 60].map(Duration::from_secs).to_vec(),
        /// How long a repeated insert with the same idempotency key gets the original answer.
        pub idempotency_window: Duration = Duration::from_secs(24 * 3600),
        /// How long SQL keeps a completed task of this queue. 0 means as long as the `retention` of
        /// all queues, which it does not exceed. Only for queues with a name.
        pub retention: Duration = Duration::ZERO,
        /// The number of tasks in Redis, per shard and ahead of the foremost worker, above which
        /// new tasks stay in SQL.
        pub high_water_tasks: u64 = 1_000_000,
        /// The same limit in bytes.
        pub high_water_bytes: u64 = 256 << 20,
        /// The number of unfinished tasks in SQL above which taskd tells inserts to retry later.
        pub max_unfinished: u64 = 10_000_000,
        /// The maximum number of keys in the filter. The oldest are evicted first; SQL decides
        /// about evicted keys.
        pub filter_keys: u64 = 1_000_000,
        /// The data structure of the filter.
        pub dedup: Dedup = Dedup::Hash,
        /// Whether a task that an insert does not accept becomes a dead letter.
        pub keep_refused: bool = false,
        /// Whether events of the queue's tasks go to topic `events` and to the queue's channel.
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
        /// The schema that every payload must match.
        pub payload_schema: NamedSchema = NamedSchema::default(),
        /// The endpoint that enriches new tasks before they are stored.
        pub enrich_url: EnrichUrl = EnrichUrl::default(),
        /// A header with a secret for the endpoint.
        pub enrich_header: SecretHeader = SecretHeader::default(),
        /// The time limit of a call to the endpoint.
        pub enrich_timeout: Duration = Duration::from_secs(1),
        /// The maximum number of tasks in a call. The next field limits their bytes.
        pub enrich_batch_tasks: usize = 100,
        pub enrich_batch_bytes: usize = 1 << 20,
        /// The maximum size of an answer, in bytes.
        pub enrich_answer_bytes: usize = 4 << 20,
        /// The maximum number of concurrent calls.
        pub enrich_concurrency: usize = 4,
        /// The number of failures in a row after which taskd pauses its calls.
        pub enrich_failures: u32 = 5,
        /// How long that pause lasts.
        pub enrich_pause: Duration = Duration::from_secs(10),
    }
}

impl QueueSettings {
    /// The queue's endpoint, or `None` if it has none.
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

    /// The limits of each limit key; `None`: tasks of the queue get no limit keys.
    pub fn key_limits(&self) -> Option<KeyLimits> {
        (self.limit_by != LimitBy::Nothing).then_some(KeyLimits {
            at_a_time: self.limit_at_a_time.0,
            pace: self.limit_pace.0,
            burst: self.limit_burst,
            jitter: self.limit_jitter,
            from: self.limit_from,
        })
    }

    /// The number of live tasks at which a shard is full, no matter what they wait for: a worker, a
    /// due time, or a backoff.
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

    /// The settings of a queue whose name may be invalid.
    fn of_name(&self, queue: &str) -> &QueueSettings {
        self.named.get(queue).unwrap_or(&self.default)
    }
}

impl Settings {
    /// Whether taskd keeps tasks of `queue` that an insert does not accept as dead letters.
    pub fn keeps_refused(&self, queue: &str) -> bool {
        self.queues.of_name(queue).keep_refused
    }

    /// The schema that payloads of `queue` must match.
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
            is_step: false,
        }
    }
}
