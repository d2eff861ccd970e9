//! The ways into Redis: TLS, users and their rights, and what a start says to what cannot work.

use std::process::Command;

use serde_json::json;
use taskd::{
    config::RedisAccess,
    redis_pool::{Error, Redis},
};

use crate::support::{
    daemon::Daemon,
    redis_cluster::{own_prefix, shared},
    redis_private::{Certificates, PrivateRedis},
    until,
};

/// The rights that docs/backends.md gives to the user of taskd.
const RULES: &str = "~taskd:* resetchannels &taskd:wake &taskd:events:* -@all +@read +@write +@connection \
                     +@transaction +@pubsub -@dangerous +eval +evalsha +time +info +wait +cluster|info \
                     +cluster|slots +cluster|keyslot";

fn tls(certificates: &Certificates, more: &[&str]) -> PrivateRedis {
    let options = certificates.options();
    let options: Vec<_> = options
        .iter()
        .map(String::as_str)
        .chain(more.iter().copied())
        .collect();
    PrivateRedis::start(&options)
}

fn access(ca_file: Option<std::path::PathBuf>) -> RedisAccess {
    // As `main` does.
    drop(rustls::crypto::ring::default_provider().install_default());
    RedisAccess {
        ca_file,
        ..Default::default()
    }
}

/// Inserts, works off and finds everything done.
async fn works(args: &[&str]) {
    let mut daemon = Daemon::start("partitions = 2", args).await;
    let tasks: Vec<_> = (0..50)
        .map(|i| json!({"queue": "q", "key": i.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    // A second worker waits for a wake.
    assert_eq!(daemon.drain("w", "q").await.len(), 50);
    let task = [json!({"queue": "later", "key": "k"})];
    let (leased, _) = tokio::join!(daemon.lease("w", "later", 1, "1m"), daemon.insert(&task));
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn taskd_runs_over_tls() {
    let certificates = Certificates::new();
    let server = tls(&certificates, &["tls-auth-clients no"]);
    let url = format!("rediss://127.0.0.1:{}", server.port());
    works(&[
        "--redis-url",
        &url,
        "--redis-ca-file",
        certificates.file("ca.pem").to_str().unwrap(),
    ])
    .await;
}

#[tokio::test]
async fn a_server_that_asks_for_a_certificate_gets_one() {
    let certificates = Certificates::new();
    let server = tls(&certificates, &["tls-auth-clients yes"]);
    let url = format!("rediss://127.0.0.1:{}", server.port());
    let without = access(Some(certificates.file("ca.pem")));
    let with = RedisAccess {
        cert_file: Some(certificates.file("server.pem")),
        key_file: Some(certificates.file("server.key")),
        ..without.clone()
    };
    Redis::connect_as(&url, "t", &with)
        .await
        .unwrap()
        .check()
        .await
        .unwrap();
    assert!(Redis::connect_as(&url, "t", &without).await.is_err());
}

#[tokio::test]
async fn a_server_that_nobody_vouches_for_is_refused() {
    let certificates = Certificates::new();
    let server = tls(&certificates, &["tls-auth-clients no"]);
    let url = format!("rediss://127.0.0.1:{}", server.port());
    let other = Certificates::new();
    for ca in [None, Some(other.file("ca.pem"))] {
        let error = Redis::connect_as(&url, "t", &access(ca))
            .await
            .err()
            .unwrap();
        assert!(matches!(error, Error::Untrusted(_)), "{error}");
        assert!(!error.is_transient());
    }
    let error = Redis::connect_as(&url, "t", &access(Some(other.file("ca.pem"))))
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("no trust between redis and taskd: "),
        "{error}"
    );
    assert!(
        error.ends_with("; check redis_ca_file and the host in the redis url"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1);
}

#[test]
fn a_wrong_ca_ends_the_start_with_one_line() {
    let (certificates, other) = (Certificates::new(), Certificates::new());
    let server = tls(&certificates, &["tls-auth-clients no"]);
    let url = format!("rediss://taskd:secret@127.0.0.1:{}", server.port());
    let line = refused(
        1,
        &[
            "--redis-url",
            &url,
            "--redis-ca-file",
            other.file("ca.pem").to_str().unwrap(),
        ],
    );
    assert!(line.contains("no trust between redis and taskd"), "{line}");
    let line = refused(
        2,
        &["--redis-url", &url, "--redis-ca-file", "/nowhere/ca.pem"],
    );
    assert!(
        line.contains("redis_ca_file = \"/nowhere/ca.pem\" cannot be read"),
        "{line}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_needs_no_more_than_the_rights_of_the_readme() {
    let readme = include_str!("../../docs/backends.md");
    let server = PrivateRedis::start(&[]);
    assert!(
        readme.contains(RULES),
        "docs/backends.md should say: {RULES}"
    );
    let rules: Vec<_> = ["ACL", "SETUSER", "taskd", "on", ">secret"]
        .into_iter()
        .chain(RULES.split(' '))
        .collect();
    assert_eq!(server.run(&rules), "OK");
    let url = format!("redis://taskd:secret@127.0.0.1:{}", server.port());
    works(&["--redis-url", &url]).await;
    let denied = server.run(&["ACL", "LOG"]);
    assert_eq!(denied, "", "nothing was denied");
}

#[test]
fn wrong_credentials_end_the_start_with_one_line() {
    let server = PrivateRedis::start(&["requirepass right"]);
    server.run(&[
        "-a", "right", "ACL", "SETUSER", "weak", "on", ">weak", "+ping", "+info",
    ]);
    let at = format!("127.0.0.1:{}", server.port());
    for url in [
        format!("redis://:wrong@{at}"),
        format!("redis://nobody:wrong@{at}"),
        format!("redis://{at}"),
    ] {
        let line = refused(1, &["--redis-url", &url]);
        assert!(line.contains("redis refuses taskd: "), "{line}");
        assert!(!line.contains("wrong@"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_scheme_says_whether_it_is_a_cluster() {
    let node = shared()
        .await
        .split(',')
        .next()
        .unwrap()
        .replace("redis+cluster", "redis");
    let line = tokio::task::block_in_place(|| refused(1, &["--redis-url", &node]));
    assert!(
        line.contains("redis is a node of a cluster; write redis+cluster://"),
        "{line}"
    );
    let server = PrivateRedis::start(&[]);
    let url = server.url().replace("redis", "redis+cluster");
    let line = tokio::task::block_in_place(|| refused(1, &["--redis-url", &url]));
    assert!(
        line.contains("redis is not a cluster; write redis://"),
        "{line}"
    );
    // Some of the nodes are enough, also when the first of them is down.
    let url = shared()
        .await
        .replace("redis+cluster://", "redis+cluster://127.0.0.1:1,");
    Redis::connect(&url, &own_prefix())
        .await
        .unwrap()
        .check()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_not_ready_is_waited_for() {
    let node = PrivateRedis::start(&["cluster-enabled yes", "cluster-node-timeout 2000"]);
    let url = node.url().replace("redis", "redis+cluster");
    let mut daemon = Daemon::begin("", &["--redis-url", &url]);
    until("it says what it waits for", async || {
        daemon
            .log()
            .contains("the cluster is not ready: cluster_state:fail")
    })
    .await;
    assert_eq!(node.run(&["cluster", "addslotsrange", "0", "16383"]), "OK");
    daemon.ready().await;
    assert_eq!(
        daemon.log().matches("waiting for Redis").count(),
        1,
        "{}",
        daemon.log()
    );
    assert!(daemon.stop().await.success());
}

/// The error text of a taskd that does not start; it must end by itself, with this code.
fn refused(code: i32, args: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("timeout");
    command
        .args([
            "60",
            env!("CARGO_BIN_EXE_taskd"),
            "--pipelines",
            "all",
            "--log",
            "error",
            "--data-dir",
        ])
        .arg(dir.path());
    let output = command
        .args([
            "--http-listen",
            "127.0.0.1:0",
            "--grpc-listen",
            "127.0.0.1:0",
        ])
        .args(args)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert_eq!(said.trim().lines().count(), 1, "{said}");
    assert!(!said.contains("secret"), "{said}");
    said
}
