//! The binary starts and stops: what it refuses, what it waits for and what callers hear meanwhile,
//! and signals.

use std::{fs, process::Command};

use nix::sys::signal::Signal;
use serde_json::json;
use sqlx::{Connection as _, Executor as _, SqliteConnection};
use taskd::wire::pb::{ListTasksRequest, discovery_client::DiscoveryClient};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    support::{PATIENCE, daemon::Daemon, redis_private::PrivateRedis, until},
    traces::metric,
};

/// Exit code and stderr of a start with all pipelines.
fn start(args: &[&str]) -> (i32, String) {
    let dir = tempfile::tempdir().unwrap();
    let own = [
        "--pipelines",
        "all",
        "--http-listen",
        "127.0.0.1:0",
        "--grpc-listen",
        "127.0.0.1:0",
    ];
    let mut command = Command::new("timeout");
    command
        .args(["100", env!("CARGO_BIN_EXE_taskd")])
        .args(own)
        .args(args)
        .current_dir(dir.path());
    let output = command.output().unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn two_redises_do_not_get_one_file_in_either_order() {
    let refused = |said: &str| {
        assert!(
            said.contains("and both would hand out its tasks; stop that one"),
            "{said}"
        )
    };
    let mut embedded = Daemon::start("", &[]).await;
    let file = format!("sqlite://{}", embedded.data().join("taskd.db").display());
    let (code, said) = tokio::task::block_in_place(|| start(&["--database-url", &file]));
    assert_eq!(code, 1, "{said}");
    refused(&said);
    assert!(embedded.stop().await.success());

    let mut named = Daemon::start("", &["--database-url", &file]).await;
    embedded.start_again();
    assert_eq!(embedded.ended().await.code(), Some(1));
    refused(&embedded.log());
    // With the same Redis any number of processes have the file.
    let redis = format!("unix://{}", named.data().join("redis.sock").display());
    let mut second = Daemon::start("", &["--redis-url", &redis, "--database-url", &file]).await;
    assert!(second.stop().await.success());
    assert!(named.stop().await.success());
    embedded.start_again();
    embedded.ready().await;
    let redis = format!("unix://{}", embedded.data().join("redis.sock").display());
    let mut third = Daemon::start("", &["--redis-url", &redis, "--database-url", &file]).await;
    assert!(third.stop().await.success());
}

#[tokio::test]
async fn batches_that_fail_for_the_same_reason_are_one_line_and_all_are_counted() {
    let daemon = Daemon::start("", &[]).await;
    let file = format!("sqlite://{}", daemon.data().join("taskd.db").display());
    let mut database = SqliteConnection::connect(&file).await.unwrap();
    let refuse =
        "CREATE TRIGGER refuse BEFORE INSERT ON tasks BEGIN SELECT RAISE(ABORT, 'no more'); END";
    database.execute(refuse).await.unwrap();
    for key in 0..20 {
        assert_eq!(
            daemon
                .post("/v1/tasks", &json!({"queue": "q", "key": key.to_string()}))
                .await
                .0,
            503
        );
    }
    assert_eq!(
        daemon.log().matches("could not store 1 tasks").count(),
        1,
        "{}",
        daemon.log()
    );
    assert_eq!(
        metric(
            &daemon,
            "taskd_discovery_dropped_tasks_total{reason=\"unavailable\"} "
        )
        .await,
        20.0
    );
}

#[tokio::test]
async fn signals_that_come_together_are_one_and_a_hangup_is_never_the_second() {
    let mut daemon = Daemon::start("", &[]).await;
    // Nothing can be drained before Redis goes on.
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    for signal in [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGHUP] {
        daemon.signal(signal);
    }
    until("it drains", async || {
        daemon.log().contains("a second signal ends at once")
    })
    .await;
    daemon.signal(Signal::SIGHUP);
    assert!(daemon.signal_redis(Signal::SIGCONT));
    assert_eq!(daemon.ended().await.code(), Some(0), "{}", daemon.log());
}

#[tokio::test]
async fn while_a_start_waits_callers_over_grpc_hear_for_what() {
    let redis = PrivateRedis::start(&["replicaof 127.0.0.1 1"]);
    let mut daemon = Daemon::begin("", &["--redis-url", &redis.url()]);
    let advice = "waiting for Redis: cannot use redis://127.0.0.1:";
    until("it waits", async || daemon.log().contains(advice)).await;
    assert!(
        daemon
            .log()
            .contains("redis is a replica, which takes no writes; name the master in redis_url")
    );

    // The dashboard says so, too, and loads itself again.
    let page = crate::support::http_client()
        .get(format!("{}/ui/queues/q", daemon.http()))
        .send()
        .await
        .unwrap();
    assert_eq!(
        (page.status().as_u16(), &page.headers()["refresh"]),
        (503, &"2".parse().unwrap())
    );
    let page = page.text().await.unwrap();
    assert!(
        page.contains("taskd starts, and waits for Redis."),
        "{page}"
    );

    let connect = async || {
        Channel::from_shared(daemon.grpc())
            .unwrap()
            .timeout(PATIENCE)
            .connect()
            .await
            .unwrap()
    };
    let (channel, watched) = (connect().await, HealthClient::new(connect().await));
    let (mut client, mut health) = (
        DiscoveryClient::new(channel.clone()),
        HealthClient::new(channel),
    );
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(
            watched
                .clone()
                .watch(HealthCheckRequest::default())
                .await
                .unwrap(),
        );
    }
    let status = watched
        .clone()
        .watch(HealthCheckRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        status.message(),
        "10 calls without a token are open on this connection; try again later"
    );
    let status = client
        .list_tasks(ListTasksRequest::default())
        .await
        .unwrap_err();
    let said = "taskd is not ready: it waits for Redis; try again later";
    assert_eq!((status.code(), status.message()), (Code::Unavailable, said));
    let mut is_healthy = async || {
        let answer = health.check(HealthCheckRequest::default()).await;
        answer.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving)
    };
    assert!(!is_healthy().await);
    assert_eq!(redis.run(&["replicaof", "no", "one"]), "OK");
    until("it is healthy", is_healthy).await;
    client
        .list_tasks(ListTasksRequest::default())
        .await
        .unwrap();
    assert!(daemon.stop().await.success());
}

#[test]
fn urls_and_files_with_which_nothing_can_start_are_mistakes_of_the_settings() {
    for (args, want) in [
        (
            &["--redis-url", "redis://h:1/x"][..],
            "taskd: --redis-url: redis_url = \"redis://h:1/x\" is not usable: ",
        ),
        (
            &["--redis-url", "unix://relative/x"],
            "redis_url = \"unix://relative/x\" is not usable: ",
        ),
        (
            &["--redis-url", "rediss://u:secret@h/#insecure"],
            "taskd checks certificates: leave out #insecure",
        ),
        (
            &["--redis-url", "rediss://h", "--redis-ca-file", "/no/such"],
            "--redis-ca-file: redis_ca_file = \"/no/such\"",
        ),
        (
            &["--database-url", "mysql://u:secret@h:port/d"],
            "--database-url: database_url = \"mysql://u:***@h:port/d\"",
        ),
        (
            &["--database-url", "mysql://h/d?ssl-mode=bogus"],
            "database_url = \"mysql://h/d?ssl-mode=bogus\" is not",
        ),
        (
            &["--database-url", "mysql://h/d?ssl-ca=/no/such"],
            "cannot read /no/such, the ssl-ca of the database's URL",
        ),
    ] {
        let check = Command::new(env!("CARGO_BIN_EXE_taskd"))
            .arg("check-config")
            .args(args)
            .output()
            .unwrap();
        let checked = (
            check.status.code().unwrap(),
            String::from_utf8(check.stderr).unwrap(),
        );
        assert_eq!(
            (checked.0, checked.1.lines().count()),
            (2, 1),
            "{args:?}: {}",
            checked.1
        );
        assert!(
            checked.1.contains(want) && !checked.1.contains("secret"),
            "{} should say {want}",
            checked.1
        );
        assert_eq!(start(args), checked);
    }
}

#[test]
fn a_redis_without_the_database_of_the_url_ends_the_start() {
    let redis = PrivateRedis::start(&[]);
    let (code, said) = start(&["--redis-url", &format!("{}/99", redis.url())]);
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("redis has no database 99: ") && said.contains("DB index is out of range"),
        "{said}"
    );
}

#[tokio::test]
async fn the_log_of_a_redis_that_cannot_start_is_quoted_in_lines_from_this_start_on() {
    let mut daemon = Daemon::start("", &[]).await;
    assert!(daemon.stop().await.success());
    let earlier = daemon.log();
    let log = daemon.data().join("redis.log");
    let said_before = fs::read_to_string(&log)
        .unwrap()
        .lines()
        .last()
        .unwrap()
        .to_owned();
    fs::write(
        daemon
            .data()
            .join("redis/appendonlydir/appendonly.aof.manifest"),
        "nonsense",
    )
    .unwrap();
    daemon.start_again();
    assert_eq!(daemon.ended().await.code(), Some(1));
    let said = daemon.log().split_off(earlier.len());
    let quoted = said
        .split_once(&format!("the end of {}:\n  ", log.display()))
        .expect("lines")
        .1;
    assert!(quoted.contains("\n  ") && !quoted.contains("\\n"), "{said}");
    assert!(!quoted.contains(&said_before), "{said}");
}
