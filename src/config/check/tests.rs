use super::*;
use crate::{config::settings::QueueSettings, model::QueueName};

const RULES: Rules = Rules {
    mistake: |properties| {
        properties
            .names()
            .find(|name| *name == "taken")
            .map(|name| (name, TAKEN.to_owned()))
    },
    is_secret: |name| name.contains("password"),
};
const TAKEN: &str = "cannot be set: it is taken";

fn error(change: impl FnOnce(&mut Settings)) -> String {
    let mut settings = Settings::default();
    change(&mut settings);
    check(&settings, &Origins::default(), RULES)
        .unwrap_err()
        .to_string()
}

#[test]
fn the_defaults_are_right_and_retention_may_be_for_ever() {
    let mut settings = Settings::default();
    check(&settings, &Origins::default(), RULES).unwrap();
    settings.watchdog.retention = Duration::ZERO;
    settings.log = "WARN, off,3,taskd=debug,[span{id=1}]=trace".into();
    check(&settings, &Origins::default(), RULES).unwrap();
}

fn own_retention(settings: &mut Settings, retention: Duration) {
    let own = QueueSettings {
        retention,
        ..QueueSettings::default()
    };
    let name = QueueName::new("own").unwrap();
    settings.queues.named.insert(name, own);
}

type Change = fn(&mut Settings);

/// A wrong setting, and a part of its error.
const WRONG: &[(Change, &str)] = &[
    (
        |s| s.partitions = 0,
        "partitions = 0 (the default) must be 1 to 1024",
    ),
    (
        |s| s.partitions = 1025,
        "partitions = 1025 (the default) must be 1 to 1024",
    ),
    (
        |s| s.grace_period = Duration::ZERO,
        "grace_period = 0s (the default) must be 1ms to 1day",
    ),
    (
        |s| s.stall_after = Duration::from_secs(1),
        "stall_after = 1s (the default) must be 3s to ",
    ),
    (
        |s| s.grpc_listen = s.http_listen,
        "is taken by http_listen = 127.0.0.1:7600",
    ),
    (
        |s| s.grpc_listen = ([0, 0, 0, 0], 7601).into(),
        "grpc_listen = 0.0.0.0:7601 (the default) is open to the network, and auth = none lets",
    ),
    (
        |s| s.tls.cert_file = Some("c.pem".into()),
        "tls_cert_file = \"c.pem\" (the default) needs tls_key_file",
    ),
    (
        |s| s.tls.client_ca_file = Some("a".into()),
        "tls_client_ca_file = \"a\" (the default) needs tls_cert_file",
    ),
    (
        |s| s.log = "taskd=loud".into(),
        "log = \"taskd=loud\" (the default) is not a log filter",
    ),
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
    (
        |s| s.redis.wait_replicas = 1,
        "redis_wait_replicas = 1 (the default) needs a redis_url: the embedded Redis",
    ),
    (
        |s| s.redis.wait_aof = true,
        "redis_wait_aof = true (the default) needs a redis_url",
    ),
    (
        |s| s.redis.wait_timeout = DAY,
        "redis_wait_timeout = 1day (the default) must be 10ms to 5s",
    ),
    (
        |s| s.database_pool = 0,
        "database_pool = 0 (the default) must be 1 to 1000",
    ),
    (
        |s| s.watchdog.retention = Duration::from_secs(60),
        "retention = 1m (the default) must be 0s (for ever) or at least 2m 10s: twice grace = 1m (the \
         default) and \
         republish_after = 5s (the default), until",
    ),
    (
        |s| s.kafka.set("taken".into(), "1".into()),
        "kafka.taken = \"1\" (the default) cannot be set: it is taken",
    ),
    (
        |s| s.kafka.set("sasl.password".into(), "p".into()),
        "kafka.sasl.password = \"***\" (the default) is for a Kafka; name one with bus_url",
    ),
    (
        |s| s.queues.default.retention = Duration::from_secs(3600),
        "queues.default.retention = 1h (the default) is for a queue with a name",
    ),
    (
        |s| own_retention(s, Duration::from_secs(60)),
        "queues.own.retention = 1m (the default) must be 0s (as long as retention), or 2m 10s, twice \
         grace and republish_after, to retention = 30days",
    ),
    (
        |s| own_retention(s, Duration::from_secs(31 * 24 * 3600)),
        "queues.own.retention = 31days (the default) must be 0s",
    ),
    (
        |s| s.topic_retention = Duration::ZERO,
        "topic_retention = 0s (the default) must be 1m to 3650days",
    ),
    (
        |s| s.topic_retention_records = 0,
        "topic_retention_records = 0 (the default) must be 1000 to 10",
    ),
    (
        |s| s.topic_retention_records = u64::MAX,
        "must be 1000 to 1000000000000000",
    ),
    (
        |s| s.redis.max_memory = 1 << 60,
        "redis_max_memory = 1073741824GiB (the default) must be 0, or 16MiB to 10",
    ),
    (
        |s| s.redis.max_memory = 1,
        "redis_max_memory = 1 (the default) must be 0, or 16MiB to 10",
    ),
    (
        |s| s.data_dir = "".into(),
        "data_dir = \"\" (the default) names no folder",
    ),
    (
        |s| s.limits.max_request_bytes = 0,
        "max_request_bytes = 0 (the default) must be at least 64KiB",
    ),
    (
        |s| s.limits.request_budget = usize::MAX,
        "(the default) must be at most 1024GiB",
    ),
    (
        |s| s.log = "warning".into(),
        "log = \"warning\" (the default) has \"warning\", which is no level; did you mean warn?",
    ),
    (
        |s| s.log = "info,DEBG".into(),
        "has \"DEBG\", which is no level; did you mean debug?",
    ),
    (
        |s| s.log = "warning:x".into(),
        "has \"warning:x\", which is no level; did you mean warn?",
    ),
    (
        |s| s.log = "taskd".into(),
        "has \"taskd\", which is no level; write taskd=debug, or error, warn, info",
    ),
    (
        |s| s.discovery.buffer = usize::MAX,
        "(the default) must be 1 to 10000000",
    ),
    (
        |s| s.queues.default.high_water_tasks = u64::MAX,
        "(the default) must be 1 to 1000000000000000",
    ),
    (
        |s| s.watchdog.letter_retention = Duration::MAX,
        "must be 0s to 36500days",
    ),
    (
        |s| s.watchdog.forget_queues_after = Duration::MAX,
        "must be 0s (never) or 1s to 3650days",
    ),
    (
        |s| s.redis_prefix = "{a}".into(),
        "redis_prefix = \"{a}\" (the default) must not contain",
    ),
    (|s| s.topic_prefix = "a/".into(), "topic_prefix = \"a/\""),
    (
        |s| s.discovery.batch_max = 1001,
        "discovery_batch_max = 1001 (the default) must be 1 to 1000",
    ),
    (
        |s| s.fanout.batch_max = 0,
        "fanout_batch_max = 0 (the default) must be 1 to 1000",
    ),
    (
        |s| s.watchdog.batch_max = 9999,
        "watchdog_batch_max = 9999 (the default) must be 1 to 1000",
    ),
    (
        |s| s.discovery.buffer = 999,
        "discovery_buffer = 999 (the default) must hold a batch: discovery_batch_max = 1000",
    ),
    (
        |s| s.watchdog.interval = Duration::ZERO,
        "watchdog_interval = 0s (the default) must be 10ms to 1m",
    ),
    (
        |s| s.limits.max_items = 0,
        "max_items = 0 (the default) must be 1 to 1000",
    ),
    (
        |s| s.limits.max_connections = 15,
        "max_connections = 15 (the default) must be 16 to 1000000",
    ),
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
    (
        |s| s.limits.max_headers_bytes = 2 << 20,
        "max_headers_bytes = 2MiB (the default) must not exceed 1MiB",
    ),
    (
        |s| s.limits.max_result_bytes = 16 << 20,
        "max_result_bytes = 16MiB (the default) must not exceed 8MiB",
    ),
    (|s| s.limits.max_replicas = 0, "max_replicas = 0"),
    (
        |s| s.queues.default.replicas = 101,
        "queues.default.replicas = 101 (the default) must be 1 to max_replicas = 100",
    ),
    (
        |s| s.queues.default.lease = DAY,
        "queues.default.lease = 1day (the default) must be 100ms to max_lease = 12h",
    ),
    (
        |s| s.queues.default.lease = Duration::from_millis(99),
        "queues.default.lease = 99ms",
    ),
    (
        |s| s.queues.default.max_attempts = 0,
        "queues.default.max_attempts = 0 (the default) must be 1 to 1000",
    ),
    (
        |s| s.queues.default.backoff.clear(),
        "queues.default.backoff = [] (the default) must hold at least one",
    ),
    (
        |s| {
            let queue = QueueSettings {
                high_water_tasks: 0,
                ..Default::default()
            };
            s.queues
                .named
                .insert(QueueName::new("crawl").unwrap(), queue);
        },
        "queues.crawl.high_water_tasks = 0",
    ),
    (
        |s| s.queues.default.enrich_timeout = DAY,
        "queues.default.enrich_timeout = 1day (the default) must be 10ms to 5s",
    ),
    (
        |s| s.queues.default.enrich_concurrency = 0,
        "enrich_concurrency = 0 (the default) must be 1 to 64",
    ),
];

#[test]
fn what_is_wrong_is_shown_with_what_would_be_right() {
    for (change, want) in WRONG {
        let error = error(change);
        assert!(error.contains(want), "{error:?} should say {want:?}");
    }
}
