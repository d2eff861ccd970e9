//! Checks settings, alone and against each other. If two of them conflict, the message shows both
//! values.

mod spans;

use std::{fmt::Display, ops::RangeInclusive, path::PathBuf, time::Duration};

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use super::{
    error::Error,
    origins::Origins,
    properties::Rules,
    settings::{Auth, Settings, TlsFiles, Workflows},
    units::{ByteSize, Time},
    urls::RedisUrl,
};
use crate::model::{MAX_RECORD_BYTES, MAX_REPLICAS, nearest};

/// The scripts unpack a batch onto Lua's stack, which holds about 8,000 values.
const BATCH: RangeInclusive<usize> = 1..=1000;
pub(super) const SHORTEST_LEASE: Duration = Duration::from_millis(100);
/// A lease duration is sent as milliseconds in 32 bits.
const LONGEST_LEASE: Duration = Duration::from_secs(30 * 24 * 3600);
pub const MOST_PARTITIONS: u32 = 1024;
/// The headers are stored as JSON text, where one byte can take up six, in a column of at most 16
/// MiB.
const MOST_HEADERS: usize = 1 << 20;
pub(super) const DAY: Duration = Duration::from_secs(24 * 3600);
/// Lua, and the tools that read its output, represent numbers up to this one exactly.
pub(super) const MOST: u64 = 1_000_000_000_000_000;

/// The minimum memory limit of Redis, which needs a part of it for itself.
const LEAST_MEMORY: u64 = 16 << 20;
/// A part of the budget is reserved for requests of up to this size.
const LEAST_REQUEST: usize = 64 << 10;
const MOST_BUDGET: usize = 1 << 40;
/// An event of an execution may hold all of its values, in a column of at most 16 MiB.
const MOST_STATE: usize = 8 << 20;
const LEAST_STATE: usize = 64 << 10;
const MOST_EXPRESSION: usize = 1 << 30;
const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];
const LOG_FILTERS: &str = "error, warn, info, debug or info,taskd=debug";

/// Returns the first error in the settings.
pub(super) fn check(settings: &Settings, origins: &Origins, rules: Rules) -> Result<(), Error> {
    let checker = Checker { origins };
    checker.process(settings)?;
    checker.backends(settings)?;
    checker.kafka(settings, rules)?;
    checker.limits(settings)?;
    checker.traces(&settings.traces)?;
    checker.pipelines(settings)?;
    checker.topics(settings)?;
    checker.queue("default", &settings.queues.default, settings)?;
    settings
        .queues
        .named
        .iter()
        .try_for_each(|(name, queue)| checker.queue(name.as_str(), queue, settings))
}

pub(super) struct Checker<'a> {
    pub(super) origins: &'a Origins,
}

impl Checker<'_> {
    fn topics(&self, settings: &Settings) -> Result<(), Error> {
        for (name, topic) in &settings.topics {
            let Some((setting, why)) = topic.mistake() else {
                continue;
            };
            let key = format!("topics.{name}.{setting}");
            let given = match setting {
                "retention_age" => Time(topic.retention_age).to_string(),
                "retention_records" => topic.retention_records.to_string(),
                "retention_bytes" => ByteSize(topic.retention_bytes).to_string(),
                _ => topic.partitions.to_string(),
            };
            return self.fail(&key, given, &why);
        }
        Ok(())
    }

    fn process(&self, settings: &Settings) -> Result<(), Error> {
        if settings.data_dir.as_os_str().is_empty() {
            return self.fail("data_dir", "\"\"", "names no folder");
        }
        self.range("partitions", settings.partitions, 1..=MOST_PARTITIONS)?;
        // Minimum: after Redis was set back, a reader seeks to older records, which must still
        // exist.
        self.time(
            "topic_retention",
            settings.topic_retention,
            Duration::from_secs(60)..=3650 * DAY,
        )?;
        self.range(
            "topic_retention_records",
            settings.topic_retention_records,
            1000..=MOST,
        )?;
        self.time(
            "grace_period",
            settings.grace_period,
            Duration::from_millis(1)..=DAY,
        )?;
        // Minimum: a waiting loop beats only once a second.
        self.time(
            "stall_after",
            settings.stall_after,
            Duration::from_secs(3)..=DAY,
        )?;
        if settings.http_listen == settings.grpc_listen && settings.http_listen.port() != 0 {
            let both = self.shown("http_listen", settings.http_listen);
            return self.fail(
                "grpc_listen",
                settings.grpc_listen,
                &format!("is taken by {both}; choose another port"),
            );
        }
        for (key, listen) in [
            ("http_listen", settings.http_listen),
            ("grpc_listen", settings.grpc_listen),
        ] {
            let admits_anybody =
                settings.auth == Auth::None && settings.tls.client_ca_file.is_none();
            if admits_anybody && !settings.open_without_tokens && !listen.ip().is_loopback() {
                let why = "is open to the network, and auth = none lets anybody in; set auth = tokens, or \
                           open_without_tokens = true";
                return self.fail(key, listen, why);
            }
        }
        let TlsFiles {
            cert_file,
            key_file,
            client_ca_file,
        } = &settings.tls;
        self.pair(("tls_cert_file", cert_file), ("tls_key_file", key_file))?;
        self.pair(("tls_key_file", key_file), ("tls_cert_file", cert_file))?;
        self.pair(
            ("tls_client_ca_file", client_ca_file),
            ("tls_cert_file", cert_file),
        )?;
        self.log(&settings.log)
    }

    fn log(&self, filter: &str) -> Result<(), Error> {
        let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
        // `EnvFilter` would take such a word for the name of a module, and log everything of that
        // module and nothing else.
        let is_word = |part: &&str| !part.contains('=') && !is_level(part);
        // The fields of a span may contain commas, too.
        let words = (!filter.contains('[')).then(|| filter.split(',').map(str::trim));
        if let Some(word) = words.into_iter().flatten().find(is_word) {
            let written = word.to_lowercase();
            let near = LEVELS
                .into_iter()
                .find(|level| written.starts_with(level))
                .or_else(|| nearest(&written, LEVELS));
            let hint = near.map_or_else(
                || format!("write {word}=debug, or {LOG_FILTERS}"),
                |level| format!("did you mean {level}?"),
            );
            return self.fail(
                "log",
                quoted(filter),
                &format!("has {word:?}, which is no level; {hint}"),
            );
        }
        match EnvFilter::try_new(filter) {
            Ok(_) => Ok(()),
            Err(error) => self.fail(
                "log",
                quoted(filter),
                &format!("is not a log filter ({error}); write {LOG_FILTERS}"),
            ),
        }
    }

    fn backends(&self, settings: &Settings) -> Result<(), Error> {
        self.redis(settings)?;
        self.range("database_pool", settings.database_pool, 1..=1000)?;
        // Redis hashes the part of a key inside its first braces, which must be the braces that
        // taskd writes.
        if settings.redis_prefix.contains(['{', '}']) {
            return self.fail(
                "redis_prefix",
                quoted(&settings.redis_prefix),
                "must not contain { or }",
            );
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if !settings.topic_prefix.chars().all(legal) || settings.topic_prefix.len() > 200 {
            return self.fail(
                "topic_prefix",
                quoted(&settings.topic_prefix),
                "must be at most 200 of A-Z a-z 0-9 . _ -",
            );
        }
        Ok(())
    }

    /// Checks the Redis settings, most of which require a URL.
    fn redis(&self, settings: &Settings) -> Result<(), Error> {
        let redis = &settings.redis;
        let url = settings.redis_url.as_ref();
        let files = [
            ("redis_ca_file", &redis.ca_file),
            ("redis_cert_file", &redis.cert_file),
            ("redis_key_file", &redis.key_file),
        ];
        for (key, file) in files {
            if let Some(file) = file.as_ref().filter(|_| !url.is_some_and(RedisUrl::is_tls)) {
                let why = "needs a redis_url of rediss:// or rediss+cluster://";
                return self.fail(key, quoted(&file.display().to_string()), why);
            }
        }
        self.pair(
            ("redis_cert_file", &redis.cert_file),
            ("redis_key_file", &redis.key_file),
        )?;
        self.pair(
            ("redis_key_file", &redis.key_file),
            ("redis_cert_file", &redis.cert_file),
        )?;
        if redis.max_memory != 0 && !(LEAST_MEMORY..=MOST).contains(&redis.max_memory) {
            let why = format!("must be 0, or {} to {MOST} bytes", ByteSize(LEAST_MEMORY));
            return self.fail("redis_max_memory", ByteSize(redis.max_memory), &why);
        }
        self.range("redis_wait_replicas", redis.wait_replicas, 0..=100)?;
        // Must be shorter than the time limit of a call.
        self.time(
            "redis_wait_timeout",
            redis.wait_timeout,
            Duration::from_millis(10)..=Duration::from_secs(5),
        )?;
        let why = "needs a redis_url: the embedded Redis has no replicas, and syncs its file before it answers";
        if url.is_none() && redis.wait_replicas > 0 {
            return self.fail("redis_wait_replicas", redis.wait_replicas, why);
        }
        if url.is_none() && redis.wait_aof {
            return self.fail("redis_wait_aof", redis.wait_aof, why);
        }
        Ok(())
    }

    fn kafka(&self, settings: &Settings, rules: Rules) -> Result<(), Error> {
        let shown = |name: &str| {
            (
                format!("kafka.{name}"),
                quoted(settings.kafka.shown(name, rules)),
            )
        };
        if let Some((name, why)) = (rules.mistake)(&settings.kafka) {
            let (key, value) = shown(name);
            return self.fail(&key, value, &why);
        }
        match settings.kafka.names().next() {
            Some(name) if settings.bus_url.is_none() => {
                let (key, value) = shown(name);
                self.fail(&key, value, "is for a Kafka; name one with bus_url")
            }
            _ => Ok(()),
        }
    }

    fn limits(&self, settings: &Settings) -> Result<(), Error> {
        let limits = &settings.limits;
        self.range("max_replicas", limits.max_replicas, 1..=MAX_REPLICAS)?;
        self.range("max_items", limits.max_items, BATCH)?;
        self.time(
            "max_lease",
            limits.max_lease,
            SHORTEST_LEASE..=LONGEST_LEASE,
        )?;
        self.time(
            "max_wait",
            limits.max_wait,
            Duration::ZERO..=Duration::from_secs(3600),
        )?;
        self.range("max_sessions", limits.max_sessions, 1..=1_000_000)?;
        self.range("max_session_tasks", limits.max_session_tasks, 1..=100_000)?;
        self.range("max_worker_tasks", limits.max_worker_tasks, 1..=10_000_000)?;
        // Probes and people who debug need connections too.
        self.range("max_connections", limits.max_connections, 16..=1_000_000)?;
        let request = ByteSize(limits.max_request_bytes as u64);
        if limits.max_request_bytes < LEAST_REQUEST {
            let why = format!("must be at least {}", ByteSize(LEAST_REQUEST as u64));
            return self.fail("max_request_bytes", request, &why);
        }
        if limits.request_budget > MOST_BUDGET {
            let why = format!("must be at most {}", ByteSize(MOST_BUDGET as u64));
            return self.fail(
                "request_budget",
                ByteSize(limits.request_budget as u64),
                &why,
            );
        }
        // A part of the budget is reserved for small requests, and the decoded form of a request
        // counts, too.
        if limits.request_budget / 2 < limits.max_request_bytes {
            let why = format!(
                "must be at least twice {}",
                self.shown("max_request_bytes", request)
            );
            return self.fail(
                "request_budget",
                ByteSize(limits.request_budget as u64),
                &why,
            );
        }
        let parts = [
            (
                "max_payload_bytes",
                limits.max_payload_bytes,
                MAX_RECORD_BYTES,
            ),
            ("max_headers_bytes", limits.max_headers_bytes, MOST_HEADERS),
            (
                "max_result_bytes",
                limits.max_result_bytes,
                MAX_RECORD_BYTES,
            ),
        ];
        for (key, bytes, most) in parts {
            if bytes > limits.max_request_bytes {
                let why = format!(
                    "must not exceed {}",
                    self.shown("max_request_bytes", request)
                );
                return self.fail(key, ByteSize(bytes as u64), &why);
            }
            if bytes > most {
                let why = format!(
                    "must not exceed {}: the bus and SQL hold no more",
                    ByteSize(most as u64)
                );
                return self.fail(key, ByteSize(bytes as u64), &why);
            }
        }
        Ok(())
    }

    fn pipelines(&self, settings: &Settings) -> Result<(), Error> {
        let Settings {
            discovery,
            fanout,
            watchdog,
            ..
        } = settings;
        self.range("discovery_batch_max", discovery.batch_max, BATCH)?;
        self.range("fanout_batch_max", fanout.batch_max, BATCH)?;
        self.range("watchdog_batch_max", watchdog.batch_max, BATCH)?;
        self.time(
            "discovery_batch_delay",
            discovery.batch_delay,
            Duration::ZERO..=Duration::from_secs(10),
        )?;
        if discovery.buffer < discovery.batch_max {
            let why = format!(
                "must hold a batch: {}",
                self.shown("discovery_batch_max", discovery.batch_max)
            );
            return self.fail("discovery_buffer", discovery.buffer, &why);
        }
        self.range("max_queues", discovery.max_queues, 1..=1_000_000)?;
        self.range("discovery_buffer", discovery.buffer, 1..=10_000_000)?;
        self.workflows(&settings.workflows)?;
        let forget = watchdog.forget_queues_after;
        if !forget.is_zero() && !(Duration::from_secs(1)..=3650 * DAY).contains(&forget) {
            return self.fail(
                "forget_queues_after",
                Time(forget),
                "must be 0s (never) or 1s to 3650days",
            );
        }
        let ages = [
            ("retention", watchdog.retention),
            ("letter_retention", watchdog.letter_retention),
            ("history_retention", watchdog.history_retention),
        ];
        ages.into_iter()
            .try_for_each(|(key, age)| self.time(key, age, Duration::ZERO..=36_500 * DAY))?;
        self.time(
            "watchdog_interval",
            watchdog.interval,
            Duration::from_millis(10)..=Duration::from_secs(60),
        )?;
        self.time(
            "republish_after",
            watchdog.republish_after,
            Duration::from_millis(100)..=DAY,
        )?;
        self.time("grace", watchdog.grace, Duration::from_secs(1)..=DAY)?;
        self.time(
            "horizon",
            watchdog.horizon,
            Duration::from_secs(1)..=30 * DAY,
        )?;
        self.time(
            "reconcile_every",
            watchdog.reconcile_every,
            Duration::from_millis(10)..=DAY,
        )?;
        // As long as the bus may deliver a task again, SQL must still have its row. The fanout asks
        // SQL about records older than `grace`, which is also how long Redis keeps the final
        // record. The factor 2 allows for clocks that differ.
        let least = watchdog.shortest_retention();
        if !watchdog.retention.is_zero() && watchdog.retention < least {
            let [grace, republish_after] = [
                ("grace", watchdog.grace),
                ("republish_after", watchdog.republish_after),
            ]
            .map(|(key, time)| self.shown(key, Time(time)));
            let why = format!(
                "must be 0s (for ever) or at least {}: twice {grace} and {republish_after}, until when the bus may \
                 repeat a task",
                Time(least)
            );
            return self.fail("retention", Time(watchdog.retention), &why);
        }
        Ok(())
    }

    fn workflows(&self, workflows: &Workflows) -> Result<(), Error> {
        self.range("max_open_executions", workflows.max_open, 1..=100_000_000)?;
        self.range("workflow_max_steps", workflows.max_steps, 10..=1_000_000)?;
        self.range("workflow_max_depth", workflows.max_depth, 2..=64)?;
        self.range("expr_fuel", workflows.expr_fuel, 100..=10_000_000)?;
        for (key, bytes, most) in [
            ("workflow_max_state", workflows.max_state, MOST_STATE),
            ("expr_memory", workflows.expr_memory, MOST_EXPRESSION),
        ] {
            if !(LEAST_STATE..=most).contains(&bytes) {
                let [least, most] = [LEAST_STATE, most].map(|bytes| ByteSize(bytes as u64));
                let why = format!("must be {least} to {most}");
                return self.fail(key, ByteSize(bytes as u64), &why);
            }
        }
        Ok(())
    }

    /// Checks that the second file is set if the first one is.
    fn pair(
        &self,
        one: (&str, &Option<PathBuf>),
        other: (&str, &Option<PathBuf>),
    ) -> Result<(), Error> {
        match (one.1, other.1) {
            (Some(file), None) => self.fail(
                one.0,
                quoted(&file.display().to_string()),
                &format!("needs {}", other.0),
            ),
            _ => Ok(()),
        }
    }

    pub(super) fn range<T: PartialOrd + Display>(
        &self,
        key: &str,
        value: T,
        range: RangeInclusive<T>,
    ) -> Result<(), Error> {
        if range.contains(&value) {
            return Ok(());
        }
        self.fail(
            key,
            value,
            &format!("must be {} to {}", range.start(), range.end()),
        )
    }

    pub(super) fn time(
        &self,
        key: &str,
        value: Duration,
        range: RangeInclusive<Duration>,
    ) -> Result<(), Error> {
        if range.contains(&value) {
            return Ok(());
        }
        let why = format!("must be {} to {}", Time(*range.start()), Time(*range.end()));
        self.fail(key, Time(value), &why)
    }

    pub(super) fn fail<T>(&self, key: &str, value: impl Display, why: &str) -> Result<T, Error> {
        Err(self.origins.fault(key, value, why))
    }

    pub(super) fn shown(&self, key: &str, value: impl Display) -> String {
        self.origins.shown(key, value)
    }
}

fn quoted(text: &str) -> String {
    format!("{text:?}")
}

#[cfg(test)]
mod tests;
