//! Servers that are away or change their settings under a running taskd: the log, `/readyz` and a
//! metric name them, and calls that do not need them go on. tests/full/outages.rs has the database
//! and Kafka.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{daemon::Daemon, redis_private::PrivateRedis, until};

/// The value of a series in `/metrics`.
async fn metric(daemon: &Daemon, series: &str) -> Option<f64> {
    let text = daemon.get("/metrics").await.1;
    let line = text
        .as_str()?
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line?.trim().parse().ok()
}

/// Waits until `/readyz` names the server with 200, and checks that the log and the metrics do,
/// too.
async fn is_named_as_away(daemon: &Daemon, server: &str, in_log: &str) {
    until("readyz names the server", async || {
        let (status, answer) = daemon.get("/readyz").await;
        let away = answer["away"]
            .as_array()
            .is_some_and(|away| away.iter().any(|one| one["server"] == server));
        // A loop that stalls meanwhile makes it 503.
        away && (status == 503 || answer["status"] == "degraded")
    })
    .await;
    assert!(daemon.log().contains(in_log), "{}", daemon.log());
    assert_eq!(
        metric(daemon, &format!("taskd_server_up{{server=\"{server}\"}}")).await,
        Some(0.0)
    );
}

/// Waits until all servers answer, and checks that the log says that this one does.
async fn is_back(daemon: &Daemon, server: &str, in_log: &str) {
    until("readyz is content", async || {
        daemon.get("/readyz").await == (200, json!({"status": "ready"}))
    })
    .await;
    assert!(daemon.log().contains(in_log), "{}", daemon.log());
    assert_eq!(
        metric(daemon, &format!("taskd_server_up{{server=\"{server}\"}}")).await,
        Some(1.0)
    );
    let outages = format!("taskd_server_outages_total{{server=\"{server}\"}}");
    assert!(metric(daemon, &outages).await >= Some(1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_does_not_answer_is_named_and_sql_goes_on() {
    let redis = PrivateRedis::start(&["maxmemory 1gb", "maxmemory-policy noeviction"]);
    let daemon = Daemon::start("", &["--redis-url", &redis.url()]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "first"})])
        .await;
    assert_eq!(daemon.drain("w", "q").await, ["first"]);
    assert_eq!(
        metric(&daemon, "taskd_server_up{server=\"redis\"}").await,
        Some(1.0)
    );
    assert_eq!(
        metric(&daemon, "taskd_server_up{server=\"database\"}").await,
        Some(1.0)
    );

    redis.signal(Signal::SIGSTOP);
    is_named_as_away(&daemon, "redis", "Redis is away: no answer for 3 s").await;
    // SQL alone answers these.
    let (status, listed) = daemon.get("/v1/tasks?queue=q&status=COMPLETED").await;
    assert_eq!(
        (status, &listed["tasks"][0]["key"]),
        (200, &json!("first")),
        "{listed}"
    );
    let id = listed["tasks"][0]["id"].as_str().unwrap();
    assert_eq!(daemon.get(&format!("/v1/tasks/{id}/results")).await.0, 200);
    daemon
        .insert(&[json!({"queue": "q", "key": "second"})])
        .await;

    redis.signal(Signal::SIGCONT);
    is_back(&daemon, "redis", "Redis answers again, after ").await;
    assert_eq!(daemon.drain("w", "q").await, ["second"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_redis_that_break_promises_are_named_while_they_last() {
    let redis = PrivateRedis::start(&["maxmemory 1gb"]);
    let daemon = Daemon::start("", &["--redis-url", &redis.url()]).await;
    let server = format!("127.0.0.1:{}", redis.port());
    let config = |name: &'static str, value: &'static str| vec!["config", "set", name, value];
    let cases = [
        (
            "maxmemory-policy",
            config("maxmemory-policy", "allkeys-random"),
            config("maxmemory-policy", "noeviction"),
            "evicts keys (maxmemory-policy allkeys-random), so it loses tasks; set maxmemory-policy noeviction",
        ),
        (
            "appendonly",
            config("appendonly", "no"),
            config("appendonly", "yes"),
            "has no append-only file any more, so it loses its data when it ends; set appendonly yes",
        ),
        (
            "replicaof",
            vec!["replicaof", "127.0.0.1", "1"],
            vec!["replicaof", "no", "one"],
            "is a replica now, which takes no writes; make it a master again, or name the master in redis_url",
        ),
    ];
    for (setting, change, back, why) in cases {
        let series =
            format!("taskd_redis_unsafe_settings{{server=\"{server}\",setting=\"{setting}\"}}");
        assert_eq!(redis.run(&change), "OK");
        let why = format!("redis {server} {why}");
        until("readyz names the setting", async || {
            let (_, answer) = daemon.get("/readyz").await;
            let named = json!({"server": server, "setting": setting, "why": why});
            answer["status"] == "degraded" && answer["unsafe_settings"] == json!([named])
        })
        .await;
        assert!(daemon.log().contains(&why), "{}", daemon.log());
        assert_eq!(metric(&daemon, &series).await, Some(1.0), "{setting}");
        assert_eq!(redis.run(&back), "OK");
        until("readyz is content", async || {
            let (_, answer) = daemon.get("/readyz").await;
            answer["unsafe_settings"] == Value::Null
        })
        .await;
        assert_eq!(metric(&daemon, &series).await, Some(0.0), "{setting}");
        let again = format!("{setting} of redis {server} is as taskd needs it again");
        assert!(daemon.log().contains(&again), "{}", daemon.log());
    }
    daemon.works_again("q").await;
}
