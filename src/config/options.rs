//! The settings by their names: `--some-thing` = `TASKD_SOME_THING` = `some_thing = …` in the file.
//!
//! To add a setting: a field here, a line in `apply`, a line in `of`, and a paragraph in `taskd.toml`.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{
    Discovery, Fanout, Limits, LogFormat, Properties, QueueSettings, RedisAccess, Settings, Watchdog,
    units::{Address, ByteSize, Hosts, Pipelines, Time},
};
use crate::model::Priority;

/// The settings that one source sets; `None` for the others.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// The pipelines of this process: `all`, or a comma list of discovery, fanout, watchdog, tasks
    #[arg(long, env = "TASKD_PIPELINES", hide_env = true, value_name = "all|LIST")]
    pub pipelines: Option<Pipelines>,

    /// A TOML file with the same settings (long names, _ for -) and the settings of queues
    #[arg(long, env = "TASKD_CONFIG", hide_env = true, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// The folder for the files of the embedded redis-server and SQLite [default: ./taskd-data]
    #[arg(long, env = "TASKD_DATA_DIR", hide_env = true, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// redis://, rediss://, redis+cluster://, rediss+cluster:// or unix://; empty: an embedded redis-server in the data
    /// folder
    #[arg(long, env = "TASKD_REDIS_URL", hide_env = true, value_name = "URL", help_heading = "Backends")]
    pub redis_url: Option<String>,

    /// Certificate authority of a rediss:// server [default: empty, the authorities of the system]
    #[arg(long, env = "TASKD_REDIS_CA_FILE", hide_env = true, value_name = "PEM", help_heading = "Backends")]
    pub redis_ca_file: Option<PathBuf>,

    /// taskd's certificate, if a rediss:// server requests one [default: empty]
    #[arg(long, env = "TASKD_REDIS_CERT_FILE", hide_env = true, value_name = "PEM", help_heading = "Backends")]
    pub redis_cert_file: Option<PathBuf>,

    /// The key of that certificate [default: empty]
    #[arg(long, env = "TASKD_REDIS_KEY_FILE", hide_env = true, value_name = "PEM", help_heading = "Backends")]
    pub redis_key_file: Option<PathBuf>,

    /// Redis replicas that must have a completion before taskd answers it (WAIT) [default: 0]
    #[arg(long, env = "TASKD_REDIS_WAIT_REPLICAS", hide_env = true, value_name = "N", help_heading = "Backends")]
    pub redis_wait_replicas: Option<u32>,

    /// true: the append-only files of the master and of those replicas must have it, too (WAITAOF) [default: false]
    #[arg(long, env = "TASKD_REDIS_WAIT_AOF", hide_env = true, value_name = "BOOL", help_heading = "Backends")]
    pub redis_wait_aof: Option<bool>,

    /// The longest such wait of a completion; then taskd tells the worker to try again [default: 1s]
    #[arg(long, env = "TASKD_REDIS_WAIT_TIMEOUT", hide_env = true, value_name = "TIME", help_heading = "Backends")]
    pub redis_wait_timeout: Option<Time>,

    /// Memory that a Redis server may use; at 80 % taskd refuses inserts [default: 0, its maxmemory; embedded: half
    /// of the machine's]
    #[arg(long, env = "TASKD_REDIS_MAX_MEMORY", hide_env = true, value_name = "SIZE", help_heading = "Backends")]
    pub redis_max_memory: Option<ByteSize>,

    /// mysql://, mariadb:// or sqlite://; empty: SQLite in the data folder
    #[arg(long, env = "TASKD_DATABASE_URL", hide_env = true, value_name = "URL", help_heading = "Backends")]
    pub database_url: Option<String>,

    /// Most connections to a MySQL or MariaDB server [default: 16]
    #[arg(long, env = "TASKD_DATABASE_POOL", hide_env = true, value_name = "N", help_heading = "Backends")]
    pub database_pool: Option<u32>,

    /// kafka://host:9092,…; empty: Redis Streams in that Redis
    #[arg(long, env = "TASKD_BUS_URL", hide_env = true, value_name = "URL", help_heading = "Backends")]
    pub bus_url: Option<String>,

    /// Prefix of every Redis key [default: taskd]
    #[arg(long, env = "TASKD_REDIS_PREFIX", hide_env = true, value_name = "TEXT", help_heading = "Backends")]
    pub redis_prefix: Option<String>,

    /// Prefix of every topic [default: empty]
    #[arg(long, env = "TASKD_TOPIC_PREFIX", hide_env = true, value_name = "TEXT", help_heading = "Backends")]
    pub topic_prefix: Option<String>,

    /// Partitions of the bus, and shards of each queue, when taskd creates the topics [default: 1]
    #[arg(long, env = "TASKD_PARTITIONS", hide_env = true, value_name = "N", help_heading = "Backends")]
    pub partitions: Option<u32>,

    /// How long read bus records and reports stay [default: 7days]
    #[arg(long, env = "TASKD_TOPIC_RETENTION", hide_env = true, value_name = "TIME", help_heading = "Backends")]
    pub topic_retention: Option<Time>,

    /// How many of them stay in each partition, the last ones [default: 10000000]
    #[arg(long, env = "TASKD_TOPIC_RETENTION_RECORDS", hide_env = true, value_name = "N", help_heading = "Backends")]
    pub topic_retention_records: Option<u64>,

    /// Address of the HTTP port [default: 127.0.0.1:7600]
    #[arg(long, env = "TASKD_HTTP_LISTEN", hide_env = true, value_name = "IP:PORT", help_heading = "Listeners")]
    pub http_listen: Option<Address>,

    /// Address of the gRPC port [default: 127.0.0.1:7601]
    #[arg(long, env = "TASKD_GRPC_LISTEN", hide_env = true, value_name = "IP:PORT", help_heading = "Listeners")]
    pub grpc_listen: Option<Address>,

    /// Host names of this taskd for HTTP, besides IP addresses and localhost; .NAME for all below it, * for any
    /// [default: empty]
    #[arg(long, env = "TASKD_ALLOWED_HOSTS", hide_env = true, value_name = "LIST", help_heading = "Listeners")]
    pub allowed_hosts: Option<Hosts>,

    /// Most connections of each listener; fewer if file descriptors are short [default: 10000]
    #[arg(long, env = "TASKD_MAX_CONNECTIONS", hide_env = true, value_name = "N", help_heading = "Listeners")]
    pub max_connections: Option<usize>,

    /// How long a stop may take; work still in hand comes again later [default: 25s]
    #[arg(long, env = "TASKD_GRACE_PERIOD", hide_env = true, value_name = "TIME", help_heading = "Process")]
    pub grace_period: Option<Time>,

    /// A loop without progress for this long makes /readyz answer 503 [default: 30s]
    #[arg(long, env = "TASKD_STALL_AFTER", hide_env = true, value_name = "TIME", help_heading = "Process")]
    pub stall_after: Option<Time>,

    /// auto: pretty on a terminal, JSON otherwise [default: auto]
    #[arg(
        long,
        env = "TASKD_LOG_FORMAT",
        hide_env = true,
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true,
        help_heading = "Process"
    )]
    pub log_format: Option<LogFormat>,

    /// Log level, or a filter such as warn,taskd=debug [default: info]
    #[arg(long, env = "TASKD_LOG", hide_env = true, value_name = "FILTER", help_heading = "Process")]
    pub log: Option<String>,

    /// Largest payload of one task [default: 1MiB]
    #[arg(long, env = "TASKD_MAX_PAYLOAD_BYTES", hide_env = true, value_name = "SIZE", help_heading = "Limits")]
    pub max_payload_bytes: Option<ByteSize>,

    /// Largest headers of one task, names and values together [default: 16KiB]
    #[arg(long, env = "TASKD_MAX_HEADERS_BYTES", hide_env = true, value_name = "SIZE", help_heading = "Limits")]
    pub max_headers_bytes: Option<ByteSize>,

    /// Largest result of one completion [default: 1MiB]
    #[arg(long, env = "TASKD_MAX_RESULT_BYTES", hide_env = true, value_name = "SIZE", help_heading = "Limits")]
    pub max_result_bytes: Option<ByteSize>,

    /// Most distinct workers that one task may ask for [default: 100]
    #[arg(long, env = "TASKD_MAX_REPLICAS", hide_env = true, value_name = "N", help_heading = "Limits")]
    pub max_replicas: Option<u32>,

    /// Longest lease [default: 12h]
    #[arg(long, env = "TASKD_MAX_LEASE", hide_env = true, value_name = "TIME", help_heading = "Limits")]
    pub max_lease: Option<Time>,

    /// Largest gRPC message, HTTP body that is not NDJSON, or line of NDJSON [default: 32MiB]
    #[arg(long, env = "TASKD_MAX_REQUEST_BYTES", hide_env = true, value_name = "SIZE", help_heading = "Limits")]
    pub max_request_bytes: Option<ByteSize>,

    /// Memory of all requests in hand together; beyond it taskd tells callers to try later [default: 256MiB]
    #[arg(long, env = "TASKD_REQUEST_BUDGET", hide_env = true, value_name = "SIZE", help_heading = "Limits")]
    pub request_budget: Option<ByteSize>,

    /// Most tasks in one get, complete, reject or extend call [default: 1000]
    #[arg(long, env = "TASKD_MAX_ITEMS", hide_env = true, value_name = "N", help_heading = "Limits")]
    pub max_items: Option<usize>,

    /// Longest wait of a get call for a task [default: 1m]
    #[arg(long, env = "TASKD_MAX_WAIT", hide_env = true, value_name = "TIME", help_heading = "Limits")]
    pub max_wait: Option<Time>,

    /// Most tasks in one transaction, 1 to 1000 [default: 1000]
    #[arg(long, env = "TASKD_DISCOVERY_BATCH_MAX", hide_env = true, value_name = "N", help_heading = "Discovery")]
    pub discovery_batch_max: Option<usize>,

    /// How long the first task of a batch waits for others [default: 0s: as long as the batch before it takes]
    #[arg(long, env = "TASKD_DISCOVERY_BATCH_DELAY", hide_env = true, value_name = "TIME", help_heading = "Discovery")]
    pub discovery_batch_delay: Option<Time>,

    /// Most tasks that wait to be stored; beyond it taskd tells callers to try later [default: 20000]
    #[arg(long, env = "TASKD_DISCOVERY_BUFFER", hide_env = true, value_name = "N", help_heading = "Discovery")]
    pub discovery_buffer: Option<usize>,

    /// Most queues at a time; taskd rejects a task of another one [default: 1000]
    #[arg(long, env = "TASKD_MAX_QUEUES", hide_env = true, value_name = "N", help_heading = "Discovery")]
    pub max_queues: Option<usize>,

    /// Most records that fanout reads and enqueues at once, 1 to 1000 [default: 1000]
    #[arg(long, env = "TASKD_FANOUT_BATCH_MAX", hide_env = true, value_name = "N", help_heading = "Fanout")]
    pub fanout_batch_max: Option<usize>,

    /// Longest time between two looks at leases and delays [default: 250ms]
    #[arg(long, env = "TASKD_WATCHDOG_INTERVAL", hide_env = true, value_name = "TIME", help_heading = "Watchdog")]
    pub watchdog_interval: Option<Time>,

    /// Most leases, delays or repairs in one step, 1 to 1000 [default: 1000]
    #[arg(long, env = "TASKD_WATCHDOG_BATCH_MAX", hide_env = true, value_name = "N", help_heading = "Watchdog")]
    pub watchdog_batch_max: Option<usize>,

    /// Age after which the watchdog publishes a stored task that is not on the bus [default: 5s]
    #[arg(long, env = "TASKD_REPUBLISH_AFTER", hide_env = true, value_name = "TIME", help_heading = "Watchdog")]
    pub republish_after: Option<Time>,

    /// How long a final record stays in Redis after SQL has it [default: 1m]
    #[arg(long, env = "TASKD_GRACE", hide_env = true, value_name = "TIME", help_heading = "Watchdog")]
    pub grace: Option<Time>,

    /// A task that is due later than this from now stays in SQL [default: 10m]
    #[arg(long, env = "TASKD_HORIZON", hide_env = true, value_name = "TIME", help_heading = "Watchdog")]
    pub horizon: Option<Time>,

    /// How often the watchdog compares a page of unfinished tasks with Redis [default: 1s]
    #[arg(long, env = "TASKD_RECONCILE_EVERY", hide_env = true, value_name = "TIME", help_heading = "Watchdog")]
    pub reconcile_every: Option<Time>,

    /// How long a finished task can be looked up; its key stays a duplicate [default: 30days; 0s: for ever]
    #[arg(long, env = "TASKD_RETENTION", hide_env = true, value_name = "TIME", help_heading = "Watchdog")]
    pub retention: Option<Time>,

    /// taskd closes a queue that was empty for this long: its keys and metrics go [default: 1day; 0s: never]
    #[arg(long, env = "TASKD_FORGET_QUEUES_AFTER", hide_env = true, value_name = "TIME", help_heading = "Watchdog")]
    pub forget_queues_after: Option<Time>,

    /// `[kafka]` in the file; `TASKD_KAFKA_…` in the environment.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Properties::is_empty")]
    pub kafka: Properties,

    /// `[queues.NAME]`, in the file only.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub queues: BTreeMap<String, QueueOptions>,
}

/// `[queues.NAME]`. A setting that is absent comes from `[queues.default]`, or else from taskd's defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section [queues.NAME]")]
pub struct QueueOptions {
    pub replicas: Option<u32>,
    pub priority: Option<PriorityName>,
    pub lease: Option<Time>,
    pub max_attempts: Option<u32>,
    pub backoff: Option<Vec<Time>>,
    pub high_water_tasks: Option<u64>,
    pub high_water_bytes: Option<ByteSize>,
    pub max_unfinished: Option<u64>,
    pub filter_keys: Option<u64>,
}

/// A [`Priority`] by its name.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PriorityName {
    High,
    Medium,
    Low,
}

impl From<PriorityName> for Priority {
    fn from(name: PriorityName) -> Self {
        match name {
            PriorityName::High => Self::High,
            PriorityName::Medium => Self::Medium,
            PriorityName::Low => Self::Low,
        }
    }
}

impl From<Priority> for PriorityName {
    fn from(priority: Priority) -> Self {
        match priority {
            Priority::High => Self::High,
            Priority::Medium => Self::Medium,
            Priority::Low => Self::Low,
        }
    }
}

impl Options {
    /// Overrides `settings` with these options, except for the queues.
    pub(super) fn apply(self, settings: &mut Settings) {
        let Settings { redis, limits, discovery, fanout, watchdog, .. } = settings;
        set(&mut settings.pipelines, self.pipelines.map(|list| list.0));
        set(&mut settings.data_dir, self.data_dir);
        set(&mut settings.redis_url, self.redis_url.map(not_empty));
        set(&mut redis.ca_file, self.redis_ca_file.map(not_empty_path));
        set(&mut redis.cert_file, self.redis_cert_file.map(not_empty_path));
        set(&mut redis.key_file, self.redis_key_file.map(not_empty_path));
        set(&mut redis.wait_replicas, self.redis_wait_replicas);
        set(&mut redis.wait_aof, self.redis_wait_aof);
        set_time(&mut redis.wait_timeout, self.redis_wait_timeout);
        set(&mut redis.max_memory, self.redis_max_memory.map(|bytes| bytes.0));
        set(&mut settings.database_url, self.database_url.map(not_empty));
        set(&mut settings.database_pool, self.database_pool);
        set(&mut settings.bus_url, self.bus_url.map(not_empty));
        set(&mut settings.redis_prefix, self.redis_prefix);
        set(&mut settings.topic_prefix, self.topic_prefix);
        set(&mut settings.partitions, self.partitions);
        settings.kafka.extend(self.kafka);
        set_time(&mut settings.topic_retention, self.topic_retention);
        set(&mut settings.topic_retention_records, self.topic_retention_records);
        set(&mut settings.http_listen, self.http_listen.map(|address| address.0));
        set(&mut settings.grpc_listen, self.grpc_listen.map(|address| address.0));
        set(&mut settings.allowed_hosts, self.allowed_hosts.map(|hosts| hosts.0));
        set_time(&mut settings.grace_period, self.grace_period);
        set_time(&mut settings.stall_after, self.stall_after);
        set(&mut settings.log_format, self.log_format);
        set(&mut settings.log, self.log);
        set_size(&mut limits.max_payload_bytes, self.max_payload_bytes);
        set_size(&mut limits.max_headers_bytes, self.max_headers_bytes);
        set_size(&mut limits.max_result_bytes, self.max_result_bytes);
        set(&mut limits.max_replicas, self.max_replicas);
        set_time(&mut limits.max_lease, self.max_lease);
        set_size(&mut limits.max_request_bytes, self.max_request_bytes);
        set_size(&mut limits.request_budget, self.request_budget);
        set(&mut limits.max_connections, self.max_connections);
        set(&mut limits.max_items, self.max_items);
        set_time(&mut limits.max_wait, self.max_wait);
        set(&mut discovery.batch_max, self.discovery_batch_max);
        set_time(&mut discovery.batch_delay, self.discovery_batch_delay);
        set(&mut discovery.buffer, self.discovery_buffer);
        set(&mut discovery.max_queues, self.max_queues);
        set(&mut fanout.batch_max, self.fanout_batch_max);
        set_time(&mut watchdog.interval, self.watchdog_interval);
        set(&mut watchdog.batch_max, self.watchdog_batch_max);
        set_time(&mut watchdog.republish_after, self.republish_after);
        set_time(&mut watchdog.grace, self.grace);
        set_time(&mut watchdog.horizon, self.horizon);
        set_time(&mut watchdog.reconcile_every, self.reconcile_every);
        set_time(&mut watchdog.retention, self.retention);
        set_time(&mut watchdog.forget_queues_after, self.forget_queues_after);
    }

    /// The options that result in `settings`, all of them set.
    pub(super) fn of(settings: &Settings) -> Self {
        // Taken apart without `..`, so that a new setting cannot be forgotten here.
        let Settings { redis, limits, discovery, fanout, watchdog, queues, .. } = settings;
        let RedisAccess { ca_file, cert_file, key_file, wait_replicas, wait_aof, wait_timeout, max_memory } = redis;
        let Limits {
            max_payload_bytes,
            max_headers_bytes,
            max_result_bytes,
            max_replicas,
            max_lease,
            max_request_bytes,
            request_budget,
            max_connections,
            max_items,
            max_wait,
        } = limits;
        let Discovery { batch_max, batch_delay, buffer, max_queues } = discovery;
        let Fanout { batch_max: fanout_batch_max } = fanout;
        let Watchdog {
            interval,
            republish_after,
            grace,
            horizon,
            reconcile_every,
            retention,
            forget_queues_after,
            batch_max: watchdog_batch_max,
        } = watchdog;
        let default = ("default".to_owned(), QueueOptions::of(&queues.default));
        let named = queues.named.iter().map(|(name, queue)| (name.to_string(), QueueOptions::of(queue)));
        Self {
            pipelines: (!settings.pipelines.is_empty()).then(|| Pipelines(settings.pipelines.clone())),
            config: None,
            data_dir: Some(settings.data_dir.clone()),
            redis_url: Some(settings.redis_url.clone().unwrap_or_default()),
            redis_ca_file: Some(ca_file.clone().unwrap_or_default()),
            redis_cert_file: Some(cert_file.clone().unwrap_or_default()),
            redis_key_file: Some(key_file.clone().unwrap_or_default()),
            redis_wait_replicas: Some(*wait_replicas),
            redis_wait_aof: Some(*wait_aof),
            redis_wait_timeout: Some(Time(*wait_timeout)),
            redis_max_memory: Some(ByteSize(*max_memory)),
            database_url: Some(settings.database_url.clone().unwrap_or_default()),
            database_pool: Some(settings.database_pool),
            bus_url: Some(settings.bus_url.clone().unwrap_or_default()),
            redis_prefix: Some(settings.redis_prefix.clone()),
            topic_prefix: Some(settings.topic_prefix.clone()),
            partitions: Some(settings.partitions),
            topic_retention: Some(Time(settings.topic_retention)),
            topic_retention_records: Some(settings.topic_retention_records),
            http_listen: Some(Address(settings.http_listen)),
            grpc_listen: Some(Address(settings.grpc_listen)),
            allowed_hosts: Some(Hosts(settings.allowed_hosts.clone())),
            max_connections: Some(*max_connections),
            grace_period: Some(Time(settings.grace_period)),
            stall_after: Some(Time(settings.stall_after)),
            log_format: Some(settings.log_format),
            log: Some(settings.log.clone()),
            max_payload_bytes: Some(size(*max_payload_bytes)),
            max_headers_bytes: Some(size(*max_headers_bytes)),
            max_result_bytes: Some(size(*max_result_bytes)),
            max_replicas: Some(*max_replicas),
            max_lease: Some(Time(*max_lease)),
            max_request_bytes: Some(size(*max_request_bytes)),
            request_budget: Some(size(*request_budget)),
            max_items: Some(*max_items),
            max_wait: Some(Time(*max_wait)),
            discovery_batch_max: Some(*batch_max),
            discovery_batch_delay: Some(Time(*batch_delay)),
            discovery_buffer: Some(*buffer),
            max_queues: Some(*max_queues),
            fanout_batch_max: Some(*fanout_batch_max),
            watchdog_interval: Some(Time(*interval)),
            watchdog_batch_max: Some(*watchdog_batch_max),
            republish_after: Some(Time(*republish_after)),
            grace: Some(Time(*grace)),
            horizon: Some(Time(*horizon)),
            reconcile_every: Some(Time(*reconcile_every)),
            retention: Some(Time(*retention)),
            forget_queues_after: Some(Time(*forget_queues_after)),
            kafka: settings.kafka.clone(),
            queues: std::iter::once(default).chain(named).collect(),
        }
    }
}

impl QueueOptions {
    /// Overrides `queue` with these options.
    pub(super) fn apply(self, queue: &mut QueueSettings) {
        set(&mut queue.replicas, self.replicas);
        set(&mut queue.priority, self.priority.map(Priority::from));
        set_time(&mut queue.lease, self.lease);
        set(&mut queue.max_attempts, self.max_attempts);
        set(&mut queue.backoff, self.backoff.map(|waits| waits.into_iter().map(|wait| wait.0).collect()));
        set(&mut queue.high_water_tasks, self.high_water_tasks);
        set(&mut queue.high_water_bytes, self.high_water_bytes.map(|bytes| bytes.0));
        set(&mut queue.max_unfinished, self.max_unfinished);
        set(&mut queue.filter_keys, self.filter_keys);
    }

    fn of(queue: &QueueSettings) -> Self {
        Self {
            replicas: Some(queue.replicas),
            priority: Some(queue.priority.into()),
            lease: Some(Time(queue.lease)),
            max_attempts: Some(queue.max_attempts),
            backoff: Some(queue.backoff.iter().copied().map(Time).collect()),
            high_water_tasks: Some(queue.high_water_tasks),
            high_water_bytes: Some(ByteSize(queue.high_water_bytes)),
            max_unfinished: Some(queue.max_unfinished),
            filter_keys: Some(queue.filter_keys),
        }
    }
}

fn set<T>(target: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *target = value;
    }
}

fn set_time(target: &mut std::time::Duration, value: Option<Time>) {
    set(target, value.map(|time| time.0));
}

fn set_size(target: &mut usize, value: Option<ByteSize>) {
    set(target, value.map(|bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX)));
}

fn size(bytes: usize) -> ByteSize {
    ByteSize(bytes as u64)
}

fn not_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn not_empty_path(path: PathBuf) -> Option<PathBuf> {
    Some(path).filter(|path| !path.as_os_str().is_empty())
}
