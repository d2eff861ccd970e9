//! Checks of settings, alone and against each other. If two disagree, the message shows both values.

mod spans;

use std::{fmt::Display, ops::RangeInclusive, path::PathBuf, time::Duration};

use tracing_subscriber::EnvFilter;

use super::{
    error::Error,
    origins::Origins,
    properties::Rules,
    settings::{Auth, Settings, TlsFiles},
    units::{ByteSize, Time},
    urls::RedisUrl,
};
use crate::model::{MAX_RECORD_BYTES, MAX_REPLICAS};

/// Scripts unpack a batch onto Lua's stack, which has room for about 8,000 values.
const BATCH: RangeInclusive<usize> = 1..=1000;
pub(super) const SHORTEST_LEASE: Duration = Duration::from_millis(100);
/// Leases travel as milliseconds in 32 bits.
const LONGEST_LEASE: Duration = Duration::from_secs(30 * 24 * 3600);
pub const MOST_PARTITIONS: u32 = 1024;
/// Stored as JSON text, in which a byte may take six bytes, in a column of at most 16 MiB.
const MOST_HEADERS: usize = 1 << 20;
pub(super) const DAY: Duration = Duration::from_secs(24 * 3600);
/// Numbers that Lua and the tools behind it have exactly.
pub(super) const MOST: u64 = 1_000_000_000_000_000;

/// Finds the first mistake.
pub(super) fn check(settings: &Settings, origins: &Origins, rules: Rules) -> Result<(), Error> {
    let checker = Checker { origins };
    checker.process(settings)?;
    checker.backends(settings)?;
    checker.kafka(settings, rules)?;
    checker.limits(settings)?;
    checker.traces(&settings.traces)?;
    checker.pipelines(settings)?;
    checker.queue("default", &settings.queues.default, settings)?;
    settings.queues.named.iter().try_for_each(|(name, queue)| checker.queue(name.as_str(), queue, settings))
}

pub(super) struct Checker<'a> {
    pub(super) origins: &'a Origins,
}

impl Checker<'_> {
    fn process(&self, settings: &Settings) -> Result<(), Error> {
        self.range("partitions", settings.partitions, 1..=MOST_PARTITIONS)?;
        // A reader of a Redis that was set back seeks to older records.
        self.time("topic_retention", settings.topic_retention, Duration::from_secs(60)..=3650 * DAY)?;
        self.range("topic_retention_records", settings.topic_retention_records, 1000..=MOST)?;
        self.time("grace_period", settings.grace_period, Duration::from_millis(1)..=DAY)?;
        // A waiting loop beats once a second.
        self.time("stall_after", settings.stall_after, Duration::from_secs(3)..=DAY)?;
        if settings.http_listen == settings.grpc_listen && settings.http_listen.port() != 0 {
            let both = self.shown("http_listen", settings.http_listen);
            return self.fail("grpc_listen", settings.grpc_listen, &format!("is taken by {both}; choose another port"));
        }
        for (key, listen) in [("http_listen", settings.http_listen), ("grpc_listen", settings.grpc_listen)] {
            let admits_anybody = settings.auth == Auth::None && settings.tls.client_ca_file.is_none();
            if admits_anybody && !settings.open_without_tokens && !listen.ip().is_loopback() {
                let why = "is open to the network, and auth = none lets anybody in; set auth = tokens, or \
                           open_without_tokens = true";
                return self.fail(key, listen, why);
            }
        }
        let TlsFiles { cert_file, key_file, client_ca_file } = &settings.tls;
        self.pair(("tls_cert_file", cert_file), ("tls_key_file", key_file))?;
        self.pair(("tls_key_file", key_file), ("tls_cert_file", cert_file))?;
        self.pair(("tls_client_ca_file", client_ca_file), ("tls_cert_file", cert_file))?;
        if let Err(error) = EnvFilter::try_new(&settings.log) {
            let why = format!("is not a log filter ({error}); write error, warn, info, debug or info,taskd=debug");
            return self.fail("log", quoted(&settings.log), &why);
        }
        Ok(())
    }

    fn backends(&self, settings: &Settings) -> Result<(), Error> {
        self.redis(settings)?;
        self.range("database_pool", settings.database_pool, 1..=1000)?;
        // Braces decide which part of a key Redis hashes: taskd's own must be the first.
        if settings.redis_prefix.contains(['{', '}']) {
            return self.fail("redis_prefix", quoted(&settings.redis_prefix), "must not contain { or }");
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

    /// Settings of Redis, most of which need a URL.
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
        self.pair(("redis_cert_file", &redis.cert_file), ("redis_key_file", &redis.key_file))?;
        self.pair(("redis_key_file", &redis.key_file), ("redis_cert_file", &redis.cert_file))?;
        if redis.max_memory > MOST {
            return self.fail("redis_max_memory", ByteSize(redis.max_memory), &format!("must be at most {MOST} bytes"));
        }
        self.range("redis_wait_replicas", redis.wait_replicas, 0..=100)?;
        // Below the time limit of a call.
        self.time("redis_wait_timeout", redis.wait_timeout, Duration::from_millis(10)..=Duration::from_secs(5))?;
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
        let shown = |name: &str| (format!("kafka.{name}"), quoted(settings.kafka.shown(name, rules)));
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
        self.time("max_lease", limits.max_lease, SHORTEST_LEASE..=LONGEST_LEASE)?;
        self.time("max_wait", limits.max_wait, Duration::ZERO..=Duration::from_secs(3600))?;
        self.range("max_sessions", limits.max_sessions, 1..=1_000_000)?;
        self.range("max_session_tasks", limits.max_session_tasks, 1..=100_000)?;
        self.range("max_worker_tasks", limits.max_worker_tasks, 1..=10_000_000)?;
        // Probes and people who debug need connections too.
        self.range("max_connections", limits.max_connections, 16..=1_000_000)?;
        let request = ByteSize(limits.max_request_bytes as u64);
        // Small requests have a part of their own, and the decoded form of a request counts as well.
        if limits.request_budget / 2 < limits.max_request_bytes {
            let why = format!("must be at least twice {}", self.shown("max_request_bytes", request));
            return self.fail("request_budget", ByteSize(limits.request_budget as u64), &why);
        }
        let parts = [
            ("max_payload_bytes", limits.max_payload_bytes, MAX_RECORD_BYTES),
            ("max_headers_bytes", limits.max_headers_bytes, MOST_HEADERS),
            ("max_result_bytes", limits.max_result_bytes, MAX_RECORD_BYTES),
        ];
        for (key, bytes, most) in parts {
            if bytes > limits.max_request_bytes {
                let why = format!("must not exceed {}", self.shown("max_request_bytes", request));
                return self.fail(key, ByteSize(bytes as u64), &why);
            }
            if bytes > most {
                let why = format!("must not exceed {}: the bus and SQL hold no more", ByteSize(most as u64));
                return self.fail(key, ByteSize(bytes as u64), &why);
            }
        }
        Ok(())
    }

    fn pipelines(&self, settings: &Settings) -> Result<(), Error> {
        let Settings { discovery, fanout, watchdog, .. } = settings;
        self.range("discovery_batch_max", discovery.batch_max, BATCH)?;
        self.range("fanout_batch_max", fanout.batch_max, BATCH)?;
        self.range("watchdog_batch_max", watchdog.batch_max, BATCH)?;
        self.time("discovery_batch_delay", discovery.batch_delay, Duration::ZERO..=Duration::from_secs(10))?;
        if discovery.buffer < discovery.batch_max {
            let why = format!("must hold a batch: {}", self.shown("discovery_batch_max", discovery.batch_max));
            return self.fail("discovery_buffer", discovery.buffer, &why);
        }
        self.range("max_queues", discovery.max_queues, 1..=1_000_000)?;
        self.range("discovery_buffer", discovery.buffer, 1..=10_000_000)?;
        let forget = watchdog.forget_queues_after;
        if !forget.is_zero() && !(Duration::from_secs(1)..=3650 * DAY).contains(&forget) {
            return self.fail("forget_queues_after", Time(forget), "must be 0s (never) or 1s to 3650days");
        }
        let ages = [
            ("retention", watchdog.retention),
            ("letter_retention", watchdog.letter_retention),
            ("history_retention", watchdog.history_retention),
        ];
        ages.into_iter().try_for_each(|(key, age)| self.time(key, age, Duration::ZERO..=36_500 * DAY))?;
        self.time("watchdog_interval", watchdog.interval, Duration::from_millis(10)..=Duration::from_secs(60))?;
        self.time("republish_after", watchdog.republish_after, Duration::from_millis(100)..=DAY)?;
        self.time("grace", watchdog.grace, Duration::from_secs(1)..=DAY)?;
        self.time("horizon", watchdog.horizon, Duration::from_secs(1)..=30 * DAY)?;
        self.time("reconcile_every", watchdog.reconcile_every, Duration::from_millis(10)..=DAY)?;
        // A reader of a record of a removed task must ask SQL first. The fanout asks about records older than `grace`,
        // and the final record stays in Redis as long. Twice, because clocks differ.
        let least = 2 * (watchdog.grace + watchdog.republish_after);
        if !watchdog.retention.is_zero() && watchdog.retention < least {
            let [grace, republish_after] = [("grace", watchdog.grace), ("republish_after", watchdog.republish_after)]
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

    /// A file that is of no use without the other.
    fn pair(&self, one: (&str, &Option<PathBuf>), other: (&str, &Option<PathBuf>)) -> Result<(), Error> {
        match (one.1, other.1) {
            (Some(file), None) => self.fail(one.0, quoted(&file.display().to_string()), &format!("needs {}", other.0)),
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
        self.fail(key, value, &format!("must be {} to {}", range.start(), range.end()))
    }

    pub(super) fn time(&self, key: &str, value: Duration, range: RangeInclusive<Duration>) -> Result<(), Error> {
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
mod tests {
    use super::*;
    use crate::{config::settings::QueueSettings, model::QueueName};

    const RULES: Rules = Rules {
        mistake: |properties| properties.names().find(|name| *name == "taken").map(|name| (name, TAKEN.to_owned())),
        is_secret: |name| name.contains("password"),
    };
    const TAKEN: &str = "cannot be set: it is taken";

    fn error(change: impl FnOnce(&mut Settings)) -> String {
        let mut settings = Settings::default();
        change(&mut settings);
        check(&settings, &Origins::default(), RULES).unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_right_and_retention_may_be_for_ever() {
        let mut settings = Settings::default();
        check(&settings, &Origins::default(), RULES).unwrap();
        settings.watchdog.retention = Duration::ZERO;
        check(&settings, &Origins::default(), RULES).unwrap();
    }

    type Change = fn(&mut Settings);

    /// A wrong setting, and a part of its error.
    const WRONG: &[(Change, &str)] = &[
        (|s| s.partitions = 0, "partitions = 0 (the default) must be 1 to 1024"),
        (|s| s.partitions = 1025, "partitions = 1025 (the default) must be 1 to 1024"),
        (|s| s.grace_period = Duration::ZERO, "grace_period = 0s (the default) must be 1ms to 1day"),
        (|s| s.stall_after = Duration::from_secs(1), "stall_after = 1s (the default) must be 3s to "),
        (|s| s.grpc_listen = s.http_listen, "is taken by http_listen = 127.0.0.1:7600"),
        (
            |s| s.grpc_listen = ([0, 0, 0, 0], 7601).into(),
            "grpc_listen = 0.0.0.0:7601 (the default) is open to the network, and auth = none lets",
        ),
        (|s| s.tls.cert_file = Some("c.pem".into()), "tls_cert_file = \"c.pem\" (the default) needs tls_key_file"),
        (|s| s.tls.client_ca_file = Some("a".into()), "tls_client_ca_file = \"a\" (the default) needs tls_cert_file"),
        (|s| s.log = "taskd=loud".into(), "log = \"taskd=loud\" (the default) is not a log filter"),
        (
            |s| s.redis.ca_file = Some("ca.pem".into()),
            "redis_ca_file = \"ca.pem\" (the default) needs a redis_url of rediss:// or rediss+cluster://",
        ),
        (
            |s| {
                s.redis_url = Some("rediss://h".parse().unwrap());
                s.redis.cert_file = Some("me.pem".into());
            },
            "redis_cert_file = \"me.pem\" (the default) needs redis_key_file",
        ),
        (|s| s.redis.wait_replicas = 1, "redis_wait_replicas = 1 (the default) needs a redis_url: the embedded Redis"),
        (|s| s.redis.wait_aof = true, "redis_wait_aof = true (the default) needs a redis_url"),
        (|s| s.redis.wait_timeout = DAY, "redis_wait_timeout = 1day (the default) must be 10ms to 5s"),
        (|s| s.database_pool = 0, "database_pool = 0 (the default) must be 1 to 1000"),
        (
            |s| s.watchdog.retention = Duration::from_secs(60),
            "retention = 1m (the default) must be 0s (for ever) or at least 2m 10s: twice grace = 1m (the \
             default) and \
             republish_after = 5s (the default), until",
        ),
        (|s| s.kafka.set("taken".into(), "1".into()), "kafka.taken = \"1\" (the default) cannot be set: it is taken"),
        (
            |s| s.kafka.set("sasl.password".into(), "p".into()),
            "kafka.sasl.password = \"***\" (the default) is for a Kafka; name one with bus_url",
        ),
        (|s| s.topic_retention = Duration::ZERO, "topic_retention = 0s (the default) must be 1m to 3650days"),
        (|s| s.topic_retention_records = 0, "topic_retention_records = 0 (the default) must be 1000 to 10"),
        (|s| s.topic_retention_records = u64::MAX, "must be 1000 to 1000000000000000"),
        (|s| s.redis.max_memory = 1 << 60, "redis_max_memory = 1073741824GiB (the default) must be at most 10"),
        (|s| s.discovery.buffer = usize::MAX, "(the default) must be 1 to 10000000"),
        (|s| s.queues.default.high_water_tasks = u64::MAX, "(the default) must be 1 to 1000000000000000"),
        (|s| s.watchdog.letter_retention = Duration::MAX, "must be 0s to 36500days"),
        (|s| s.watchdog.forget_queues_after = Duration::MAX, "must be 0s (never) or 1s to 3650days"),
        (|s| s.redis_prefix = "{a}".into(), "redis_prefix = \"{a}\" (the default) must not contain"),
        (|s| s.topic_prefix = "a/".into(), "topic_prefix = \"a/\""),
        (|s| s.discovery.batch_max = 1001, "discovery_batch_max = 1001 (the default) must be 1 to 1000"),
        (|s| s.fanout.batch_max = 0, "fanout_batch_max = 0 (the default) must be 1 to 1000"),
        (|s| s.watchdog.batch_max = 9999, "watchdog_batch_max = 9999 (the default) must be 1 to 1000"),
        (
            |s| s.discovery.buffer = 999,
            "discovery_buffer = 999 (the default) must hold a batch: discovery_batch_max = 1000",
        ),
        (|s| s.watchdog.interval = Duration::ZERO, "watchdog_interval = 0s (the default) must be 10ms to 1m"),
        (|s| s.limits.max_items = 0, "max_items = 0 (the default) must be 1 to 1000"),
        (|s| s.limits.max_connections = 15, "max_connections = 15 (the default) must be 16 to 1000000"),
        (
            |s| s.limits.request_budget = 63 << 20,
            "request_budget = 63MiB (the default) must be at least twice max_request_bytes = 32MiB",
        ),
        (
            |s| s.limits.max_payload_bytes = 64 << 20,
            "max_payload_bytes = 64MiB (the default) must not exceed max_request_bytes = 32MiB",
        ),
        (
            |s| s.limits.max_payload_bytes = 9 << 20,
            "max_payload_bytes = 9MiB (the default) must not exceed 8MiB: the bus and SQL hold no more",
        ),
        (|s| s.limits.max_headers_bytes = 2 << 20, "max_headers_bytes = 2MiB (the default) must not exceed 1MiB"),
        (|s| s.limits.max_result_bytes = 16 << 20, "max_result_bytes = 16MiB (the default) must not exceed 8MiB"),
        (|s| s.limits.max_replicas = 0, "max_replicas = 0"),
        (
            |s| s.queues.default.replicas = 101,
            "queues.default.replicas = 101 (the default) must be 1 to max_replicas = 100",
        ),
        (
            |s| s.queues.default.lease = DAY,
            "queues.default.lease = 1day (the default) must be 100ms to max_lease = 12h",
        ),
        (|s| s.queues.default.lease = Duration::from_millis(99), "queues.default.lease = 99ms"),
        (|s| s.queues.default.max_attempts = 0, "queues.default.max_attempts = 0 (the default) must be 1 to 1000"),
        (|s| s.queues.default.backoff.clear(), "queues.default.backoff = [] (the default) must hold at least one"),
        (
            |s| {
                let queue = QueueSettings { high_water_tasks: 0, ..Default::default() };
                s.queues.named.insert(QueueName::new("crawl").unwrap(), queue);
            },
            "queues.crawl.high_water_tasks = 0",
        ),
        (
            |s| s.queues.default.enrich_timeout = DAY,
            "queues.default.enrich_timeout = 1day (the default) must be 10ms to 5s",
        ),
        (|s| s.queues.default.enrich_concurrency = 0, "enrich_concurrency = 0 (the default) must be 1 to 64"),
    ];

    #[test]
    fn what_is_wrong_is_shown_with_what_would_be_right() {
        for (change, want) in WRONG {
            let error = error(change);
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
