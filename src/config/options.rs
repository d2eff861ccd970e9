//! The names of the settings: `--some-thing` = `TASKD_SOME_THING` = `some_thing = …` in the file.
//!
//! To add a setting, add a field in `settings.rs`, a row here, a paragraph in `taskd.toml`, and its
//! valid range in `check.rs`.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{
    calls::{CallHosts, CallOverrides, CallSecrets},
    enrich::{EnrichUrl, SecretHeader},
    properties::Properties,
    schema::NamedSchema,
    settings::{Auth, Dashboard, Dedup, LogFormat, QueueSettings, Settings},
    traces::{OtlpHeaders, OtlpProtocol, TraceDiscovered},
    units::{Address, ByteSize, Hosts, Pipelines, PriorityName, Time},
    urls::without_query,
    written::{env_name, heading, set, text},
};
use crate::model::{
    AtATime, LimitBy, LimitFrom, MaybePace, OnDead, PutSubscription, SequenceBy, TopicSettings,
};

/// The options by their headings in `--help`. Each row has the name, the type of the written form,
/// the placeholder of the value, and the field in [`Settings`].
macro_rules! options {
    ($($heading:literal {
        $($(#[$meta:meta])* $name:ident: $form:ty, $value:literal $(=> $($place:ident).+)?;)*
    })*) => {
        /// The settings that one source sets; `None` for the others.
        #[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Options {
            $($(
                $(#[$meta])*
                #[arg(
                    long,
                    env = env_name!($name),
                    hide_env = true,
                    value_name = $value,
                    help_heading = heading($heading)
                )]
                pub $name: Option<$form>,
            )*)*

            /// `[kafka]` in the file; `TASKD_KAFKA_…` in the environment.
            #[arg(skip)]
            #[serde(default, skip_serializing_if = "Properties::is_empty")]
            pub kafka: Properties,

            /// `[queues.NAME]`, in the file only.
            #[arg(skip)]
            #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
            pub queues: BTreeMap<String, QueueOptions>,

            /// `[topics.NAME]`, in the file only.
            #[arg(skip)]
            #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
            pub topics: BTreeMap<String, TopicOptions>,

            /// `[subscriptions.NAME]`, in the file only.
            #[arg(skip)]
            #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
            pub subscriptions: BTreeMap<String, SubscriptionOptions>,
        }

        impl Options {
            /// These options, and those of `below` where these have none. Without the sections in the file only.
            pub(super) fn over(self, below: Self) -> Self {
                let mut kafka = below.kafka;
                kafka.extend(self.kafka);
                Self { $($($name: self.$name.or(below.$name),)*)* kafka, ..Self::default() }
            }

            /// Overrides `settings` with these options, except for URLs and the sections in the file only.
            pub(super) fn apply(self, settings: &mut Settings) {
                $($($(set(&mut settings.$($place).+, self.$name);)?)*)*
                settings.kafka.extend(self.kafka);
            }

            /// The options that produce `settings`, with all of them set. Passwords in URLs are
            /// hidden.
            pub(super) fn of(settings: &Settings) -> Self {
                let mut options = Self::default();
                $($($(options.$name = text(&settings.$($place).+);)?)*)*
                let url = |url: Option<String>| Some(url.unwrap_or_default());
                options.redis_url = url(settings.redis_url.as_ref().map(ToString::to_string));
                options.database_url = url(settings.database_url.as_ref().map(ToString::to_string));
                options.bus_url = url(settings.bus_url.as_ref().map(ToString::to_string));
                options.otlp_endpoint = Some(without_query(&settings.traces.endpoint));
                options.kafka = settings.kafka.clone();
                let queues = &settings.queues;
                let default = ("default".to_owned(), QueueOptions::of(&queues.default));
                let named = queues.named.iter().map(|(name, queue)| (name.to_string(), QueueOptions::of(queue)));
                options.queues = std::iter::once(default).chain(named).collect();
                let topics = settings.topics.iter();
                options.topics = topics.map(|(name, topic)| (name.to_string(), TopicOptions::of(topic))).collect();
                let subscriptions = settings.subscriptions.iter();
                options.subscriptions = subscriptions
                    .map(|(name, put)| (name.to_string(), SubscriptionOptions::of(put)))
                    .collect();
                options
            }
        }
    };
}

options! {
    "" {
        /// The pipelines of this process: `all`, or a comma list of discovery, fanout, watchdog,
        /// tasks, workflow
        pipelines: Pipelines, "all|LIST" => pipelines;
        /// A TOML file with the same settings (long names, _ for -) and the settings of queues
        #[serde(skip)]
        config: PathBuf, "FILE";
        /// The folder for the files of the embedded redis-server and SQLite [default: ./taskd-data]
        data_dir: PathBuf, "DIR" => data_dir;
    }
    "Backends" {
        /// redis://, rediss://, redis+cluster://, rediss+cluster:// or unix://; empty: an embedded
        /// redis-server in the data folder
        redis_url: String, "URL";
        /// Certificate authority of a rediss:// server [default: empty, the authorities of the
        /// system]
        redis_ca_file: PathBuf, "PEM" => redis.ca_file;
        /// taskd's certificate, if a rediss:// server requests one [default: empty]
        redis_cert_file: PathBuf, "PEM" => redis.cert_file;
        /// The key of that certificate [default: empty]
        redis_key_file: PathBuf, "PEM" => redis.key_file;
        /// Redis replicas that must have a completion before taskd answers it (WAIT) [default: 0]
        redis_wait_replicas: u32, "N" => redis.wait_replicas;
        /// true: the append-only files of the master and of those replicas must have it, too
        /// (WAITAOF) [default: false]
        redis_wait_aof: bool, "BOOL" => redis.wait_aof;
        /// The longest such wait of a completion; then taskd tells the worker to try again
        /// [default: 1s]
        redis_wait_timeout: Time, "TIME" => redis.wait_timeout;
        /// Memory that a Redis server may use; at 80 % taskd refuses inserts [default: 0, its
        /// maxmemory; embedded: half of the machine's]
        redis_max_memory: ByteSize, "SIZE" => redis.max_memory;
        /// mysql://, mariadb:// or sqlite://; empty: SQLite in the data folder
        database_url: String, "URL";
        /// Most connections to a MySQL or MariaDB server [default: 16]
        database_pool: u32, "N" => database_pool;
        /// kafka://host:9092,…; empty: Redis Streams in that Redis
        bus_url: String, "URL";
        /// Prefix of every Redis key [default: taskd]
        redis_prefix: String, "TEXT" => redis_prefix;
        /// Prefix of every topic [default: empty]
        topic_prefix: String, "TEXT" => topic_prefix;
        /// Partitions of the bus, and shards of each queue, when taskd creates the topics [default:
        /// 1]
        partitions: u32, "N" => partitions;
        /// How long read bus records and reports stay [default: 7days]
        topic_retention: Time, "TIME" => topic_retention;
        /// How many of them stay in each partition, the last ones [default: 10000000]
        topic_retention_records: u64, "N" => topic_retention_records;
    }
    "Listeners" {
        /// Address of the HTTP port [default: 127.0.0.1:7600]
        http_listen: Address, "IP:PORT" => http_listen;
        /// Address of the gRPC port [default: 127.0.0.1:7601]
        grpc_listen: Address, "IP:PORT" => grpc_listen;
        /// Host names of this taskd for HTTP, besides IP addresses and localhost; .NAME for all
        /// below it, * for any [default: empty]
        allowed_hosts: Hosts, "LIST" => allowed_hosts;
        /// Certificate of both ports, with those between it and its authority; read again when it
        /// changes [default: empty, no TLS]
        tls_cert_file: PathBuf, "PEM" => tls.cert_file;
        /// The key of that certificate [default: empty]
        tls_key_file: PathBuf, "PEM" => tls.key_file;
        /// Authority of clients' certificates [default: empty, clients need none]
        tls_client_ca_file: PathBuf, "PEM" => tls.client_ca_file;
        /// tokens: a call needs a token (taskd token create); none: anybody who reaches the ports
        /// may do everything [default: none]
        #[arg(value_enum, hide_possible_values = true)]
        auth: Auth, "HOW" => auth;
        /// true: with auth = none, the ports may have other addresses than loopback [default:
        /// false]
        open_without_tokens: bool, "BOOL" => open_without_tokens;
        /// Pages for people below /ui/ of the HTTP port: on, read-only or off [default: on]
        #[arg(value_enum, hide_possible_values = true)]
        dashboard: Dashboard, "HOW" => dashboard;
        /// false: these pages show no payloads, headers and results [default: true]
        dashboard_payloads: bool, "BOOL" => dashboard_payloads;
        /// Most connections of each listener; fewer if file descriptors are short [default: 10000]
        max_connections: usize, "N" => limits.max_connections;
    }
    "Process" {
        /// How long a stop may take; work still in hand comes again later [default: 25s]
        grace_period: Time, "TIME" => grace_period;
        /// A loop without progress for this long makes /readyz answer 503 [default: 30s]
        stall_after: Time, "TIME" => stall_after;
        /// auto: pretty on a terminal, JSON otherwise [default: auto]
        #[arg(value_enum, hide_possible_values = true)]
        log_format: LogFormat, "FORMAT" => log_format;
        /// Log level, or a filter such as warn,taskd=debug [default: info]
        log: String, "FILTER" => log;
    }
    "Traces" {
        /// OTLP endpoint of a collector of spans, http://HOST:4317 or https:// [default: empty, no
        /// spans]
        otlp_endpoint: String, "URL" => traces.endpoint;
        /// grpc, or http/protobuf (port 4318) [default: grpc]
        #[arg(value_enum, hide_possible_values = true)]
        otlp_protocol: OtlpProtocol, "NAME" => traces.protocol;
        /// Headers of each call of the collector: name=value,… [default: empty]
        otlp_headers: OtlpHeaders, "LIST" => traces.headers;
        /// The longest call of the collector [default: 10s]
        otlp_timeout: Time, "TIME" => traces.timeout;
        /// Part of the tasks without a caller's context that is traced, 0 to 1 [default: 0.0]
        trace_sample: f64, "PART" => traces.sample;
        /// Trace of tasks that a traced task discovered: child, its own; link, a new one with a
        /// link to it, if trace_sample picks it [default: child]
        #[arg(value_enum, hide_possible_values = true)]
        trace_discovered: TraceDiscovered, "HOW" => traces.discovered;
    }
    "Limits" {
        /// Largest payload of one task [default: 1MiB]
        max_payload_bytes: ByteSize, "SIZE" => limits.max_payload_bytes;
        /// Largest headers of one task, names and values together [default: 16KiB]
        max_headers_bytes: ByteSize, "SIZE" => limits.max_headers_bytes;
        /// Largest result of one completion [default: 1MiB]
        max_result_bytes: ByteSize, "SIZE" => limits.max_result_bytes;
        /// Most distinct workers that one task may ask for [default: 100]
        max_replicas: u32, "N" => limits.max_replicas;
        /// Longest lease [default: 12h]
        max_lease: Time, "TIME" => limits.max_lease;
        /// Largest gRPC message, HTTP body that is not NDJSON, or line of NDJSON [default: 32MiB]
        max_request_bytes: ByteSize, "SIZE" => limits.max_request_bytes;
        /// Memory of all requests in hand together; beyond it taskd tells callers to try later
        /// [default: 256MiB]
        request_budget: ByteSize, "SIZE" => limits.request_budget;
        /// Most tasks in one get, complete, reject or extend call [default: 1000]
        max_items: usize, "N" => limits.max_items;
        /// Longest wait of a get call for a task [default: 1m]
        max_wait: Time, "TIME" => limits.max_wait;
        /// Most sessions in one process; without streams, in each of 8 parts [default: 10000]
        max_sessions: usize, "N" => limits.max_sessions;
        /// Most tasks that one session may have in hand and on demand [default: 1000]
        max_session_tasks: u32, "N" => limits.max_session_tasks;
        /// Most tasks that all sessions of a worker may have in hand and on demand [default: 10000]
        max_worker_tasks: usize, "N" => limits.max_worker_tasks;
    }
    "Discovery" {
        /// Tasks at which a batch is stored, 1 to 1000; four times as many while callers pile up
        /// [default: 1000]
        discovery_batch_max: usize, "N" => discovery.batch_max;
        /// How long the first task of a batch waits for others [default: 0s: as long as the batch
        /// before it takes]
        discovery_batch_delay: Time, "TIME" => discovery.batch_delay;
        /// Most tasks that wait to be stored; beyond it taskd tells callers to try later [default:
        /// 20000]
        discovery_buffer: usize, "N" => discovery.buffer;
        /// Most queues at a time; taskd rejects a task of another one [default: 1000]
        max_queues: usize, "N" => discovery.max_queues;
    }
    "Fanout" {
        /// Most records that fanout reads and enqueues at once, 1 to 1000 [default: 1000]
        fanout_batch_max: usize, "N" => fanout.batch_max;
    }
    "Calls of workflows" {
        /// Hosts that calls may reach at private addresses: names, .NAME for all below it, IP
        /// addresses; * for any [default: empty]
        workflow_call_allow: CallHosts, "LIST" => calls.allow;
        /// Servers that stand in for others: https://HOST -> http://HOST:PORT,… [default: empty]
        workflow_call_override: CallOverrides, "LIST" => calls.overrides;
        /// Secrets by name: NAME=env:VARIABLE,NAME=file:PATH [default: empty]
        workflow_secrets: CallSecrets, "LIST" => calls.secrets;
    }
    "Watchdog" {
        /// Longest time between two looks at leases and delays [default: 250ms]
        watchdog_interval: Time, "TIME" => watchdog.interval;
        /// Most leases, delays or repairs in one step, 1 to 1000 [default: 1000]
        watchdog_batch_max: usize, "N" => watchdog.batch_max;
        /// Age after which the watchdog publishes a stored task that is not on the bus [default:
        /// 5s]
        republish_after: Time, "TIME" => watchdog.republish_after;
        /// How long a final record stays in Redis after SQL has it [default: 1m]
        grace: Time, "TIME" => watchdog.grace;
        /// A task that is due later than this from now stays in SQL [default: 10m]
        horizon: Time, "TIME" => watchdog.horizon;
        /// How often the watchdog compares a page of unfinished tasks with Redis [default: 1s]
        reconcile_every: Time, "TIME" => watchdog.reconcile_every;
        /// Mend what the watchdog's checks find, as taskd fsck --repair does [default: false: only
        /// report]
        repair: bool, "BOOL" => watchdog.repair;
        /// How long a finished task can be looked up; its key stays a duplicate [default: 30days;
        /// 0s: for ever]
        retention: Time, "TIME" => watchdog.retention;
        /// How long a dead letter stays that is not about a stored task [default: 30days; 0s: for
        /// ever]
        letter_retention: Time, "TIME" => watchdog.letter_retention;
        /// How long the failed attempts of a task can be looked up [default: 7days; 0s: as long as
        /// the task]
        history_retention: Time, "TIME" => watchdog.history_retention;
        /// false: this process writes no failed attempts into histories of tasks [default: true]
        history: bool, "BOOL" => history;
        /// taskd closes a queue that was empty for this long: its keys and metrics go [default:
        /// 1day; 0s: never]
        forget_queues_after: Time, "TIME" => watchdog.forget_queues_after;
    }
    "Workflows" {
        /// Most open executions; then taskd tells callers to start theirs later [default: 1000000]
        max_open_executions: u64, "N" => workflows.max_open;
        /// Most tasks that an execution may do without a wait; one with more faults [default:
        /// 10000]
        workflow_max_steps: u32, "N" => workflows.max_steps;
        /// Most bytes of the values that an execution keeps; one with more faults [default: 4MiB]
        workflow_max_state: ByteSize, "SIZE" => workflows.max_state;
        /// How deep the tasks of a workflow may be in each other [default: 64]
        workflow_max_depth: usize, "N" => workflows.max_depth;
        /// Most calls and rounds of loops of an expression; one with more is an error [default:
        /// 20000]
        expr_fuel: u64, "N" => workflows.expr_fuel;
        /// Memory that an expression may use; one with more is an error [default: 64MiB]
        expr_memory: ByteSize, "SIZE" => workflows.expr_memory;
    }
}

/// The options of a queue, named like its settings.
macro_rules! queue_options {
    ($($name:ident: $form:ty,)*) => {
        /// `[queues.NAME]`. An absent setting is taken from `[queues.default]`, or else from
        /// taskd's defaults.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, expecting = "a section [queues.NAME]")]
        pub struct QueueOptions {
            $(pub $name: Option<$form>,)*
        }

        impl QueueOptions {
            /// Overrides `queue` with these options.
            pub(super) fn apply(self, queue: &mut QueueSettings) {
                $(set(&mut queue.$name, self.$name);)*
            }

            fn of(queue: &QueueSettings) -> Self {
                Self { $($name: text(&queue.$name),)* }
            }
        }
    };
}

/// `[topics.NAME]`. An absent setting is taskd's default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section [topics.NAME]")]
pub struct TopicOptions {
    pub partitions: Option<u32>,
    pub retention_age: Option<Time>,
    pub retention_records: Option<u64>,
    pub retention_bytes: Option<ByteSize>,
    pub attached: Option<bool>,
}

impl TopicOptions {
    /// Overrides `topic` with these options.
    pub(super) fn apply(self, topic: &mut TopicSettings) {
        set(&mut topic.partitions, self.partitions);
        set(&mut topic.retention_age, self.retention_age);
        set(&mut topic.retention_records, self.retention_records);
        set(&mut topic.retention_bytes, self.retention_bytes);
        set(&mut topic.is_attached, self.attached);
    }

    fn of(topic: &TopicSettings) -> Self {
        Self {
            partitions: text(&topic.partitions),
            retention_age: text(&topic.retention_age),
            retention_records: text(&topic.retention_records),
            retention_bytes: text(&topic.retention_bytes),
            attached: text(&topic.is_attached),
        }
    }
}

/// `[subscriptions.NAME]`. What is absent stays as it is, or is taskd's default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "a section [subscriptions.NAME]"
)]
pub struct SubscriptionOptions {
    pub topic: Option<String>,
    pub queue: Option<String>,
    pub start: Option<String>,
    #[serde(rename = "match")]
    pub matching: Option<serde_json::Value>,
    pub sequence: Option<SequenceBy>,
    pub on_dead: Option<OnDead>,
}

impl SubscriptionOptions {
    pub(super) fn read(self) -> PutSubscription {
        PutSubscription {
            topic: self.topic,
            queue: self.queue,
            start: self.start,
            matching: self.matching,
            sequence: self.sequence,
            on_dead: self.on_dead,
        }
    }

    fn of(put: &PutSubscription) -> Self {
        let put = put.clone();
        Self {
            topic: put.topic,
            queue: put.queue,
            start: put.start,
            matching: put.matching,
            sequence: put.sequence,
            on_dead: put.on_dead,
        }
    }
}

queue_options! {
    replicas: u32,
    priority: PriorityName,
    lease: Time,
    max_attempts: u32,
    backoff: Vec<Time>,
    idempotency_window: Time,
    retention: Time,
    high_water_tasks: u64,
    high_water_bytes: ByteSize,
    max_unfinished: u64,
    filter_keys: u64,
    dedup: Dedup,
    keep_refused: bool,
    events: bool,
    limit_by: LimitBy,
    limit_at_a_time: AtATime,
    limit_pace: MaybePace,
    limit_burst: u32,
    limit_jitter: f64,
    limit_from: LimitFrom,
    payload_schema: NamedSchema,
    enrich_url: EnrichUrl,
    enrich_header: SecretHeader,
    enrich_timeout: Time,
    enrich_batch_tasks: usize,
    enrich_batch_bytes: ByteSize,
    enrich_answer_bytes: ByteSize,
    enrich_concurrency: usize,
    enrich_failures: u32,
    enrich_pause: Time,
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn the_help_names_the_defaults() {
        let defaults = toml::Table::try_from(Options::of(&Settings::default())).unwrap();
        for arg in Options::augment_args(Command::new("taskd")).get_arguments() {
            let key = arg.get_id().as_str();
            let help = arg.get_help().unwrap().to_string();
            // These two have no default, and the help describes an empty URL in words.
            if ["pipelines", "config"].contains(&key) || key.ends_with("_url") {
                continue;
            }
            let default = match &defaults[key] {
                toml::Value::String(text) if text.is_empty() => "empty".to_owned(),
                toml::Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let said = help
                .split_once("[default: ")
                .map(|(_, said)| said)
                .unwrap_or_default();
            let rest = said.strip_prefix(&default).unwrap_or("?");
            assert!(
                rest.starts_with([']', ',', ';', ':']),
                "{key}: {help:?} should name {default:?}"
            );
        }
    }
}
