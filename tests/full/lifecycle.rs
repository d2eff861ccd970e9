//! How the binary starts, waits for others, and stops.

use std::{process::Command, time::Duration};

use nix::sys::signal::Signal;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UnixStream},
    time::timeout,
};

use crate::support::{
    PATIENCE,
    daemon::Daemon,
    kafka,
    mariadb::MysqlDatabase,
    port::Port,
    redis::{Fsync, RedisServer},
    store_contract::Database,
    until,
};

/// Runs taskd until it ends by itself; its exit code and what it said.
fn refused(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(["--pipelines", "all"])
        .args(args)
        .output()
        .unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[tokio::test]
async fn a_stop_ends_waits_finishes_what_is_in_hand_and_leaves_nothing_running() {
    // A stop that is faster than the call refuses it, which is seldom.
    for _ in 0..3 {
        let answer = answer_at_a_stop().await;
        if answer.ends_with(r#"{"tasks":[]}"#) {
            return;
        }
        assert!(answer.contains(" 503 "), "{answer}");
    }
    panic!("taskd has never begun with the call before it stopped");
}

/// The answers to a connection with a call that waits when taskd stops.
async fn answer_at_a_stop() -> String {
    let mut daemon = Daemon::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    assert_eq!(daemon.lease("w", "q", 1, "10s").await.len(), 1);
    // Behind the answer to the first call of a connection, taskd begins with the second.
    let mut calls = TcpStream::connect(("127.0.0.1", daemon.http_port()))
        .await
        .unwrap();
    let wait = r#"{"worker":"w","queues":["q"],"wait":"1m"}"#;
    let (host, json) = ("host: localhost\r\n", "content-type: application/json\r\n");
    let first = format!("GET /healthz HTTP/1.1\r\n{host}\r\n");
    let second = format!(
        "POST /v1/tasks:get HTTP/1.1\r\n{host}{json}content-length: {}\r\n\r\n{wait}",
        wait.len()
    );
    calls.write_all((first + &second).as_bytes()).await.unwrap();
    let mut answers = Vec::new();
    while !answers.ends_with(b"ok\n") {
        let read = timeout(PATIENCE, calls.read_buf(&mut answers))
            .await
            .expect("an answer");
        assert_ne!(read.unwrap(), 0, "{answers:?}");
    }
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    timeout(PATIENCE, calls.read_to_end(&mut answers))
        .await
        .expect("the end of the connection")
        .unwrap();
    assert!(!daemon.kill9_redis(), "redis-server was left running");
    String::from_utf8(answers).unwrap()
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let mut daemon = Daemon::start("", &[]).await;
    // Nothing can be drained any more.
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    daemon.signal(Signal::SIGINT);
    until("it drains", async || {
        daemon.log().contains("a second signal ends at once")
    })
    .await;
    // One that comes at once would be the same signal.
    until("it has ended", async || {
        daemon.signal(Signal::SIGTERM);
        daemon.end().is_some()
    })
    .await;
    assert_eq!(daemon.ended().await.code(), Some(130));
    // It was told to end, and does as soon as it can.
    until("redis-server has ended", async || {
        !daemon.signal_redis(Signal::SIGCONT)
    })
    .await;
}

#[tokio::test]
async fn a_stop_that_cannot_drain_ends_with_an_error_after_the_grace_period() {
    let mut daemon = Daemon::start("grace_period = \"1s\"", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().await.code(), Some(1));
    let log = daemon.log();
    let running = log
        .split_once("within the grace period (1s); ")
        .and_then(|(_, rest)| rest.split_once("still running: "));
    assert!(
        running.is_some_and(|(_, names)| names.starts_with(|c: char| c.is_alphabetic())),
        "{log}"
    );
}

#[tokio::test]
async fn readyz_names_the_pipelines_that_make_no_progress() {
    let mut daemon = Daemon::start("stall_after = \"3s\"", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    until("there is something to watch", async || {
        daemon.queue("q").await["waiting"] == 1
    })
    .await;
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    let mut stalled = String::new();
    until("it is not ready", async || {
        let (status, answer) = daemon.get("/readyz").await;
        stalled = answer["stalled"].to_string();
        status == 503 && stalled.contains("watchdog/leases")
    })
    .await;
    assert_eq!(daemon.get("/healthz").await.0, 200);
    assert!(daemon.signal_redis(Signal::SIGCONT));
    daemon.ready().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_second_taskd_on_a_data_folder_is_refused() {
    let daemon = Daemon::start("", &[]).await;
    let data = daemon.data();
    let listen = [
        "--http-listen",
        "127.0.0.1:0",
        "--grpc-listen",
        "127.0.0.1:0",
    ];
    let (code, said) = refused(&[&["--data-dir", data.to_str().unwrap()], &listen[..]].concat());
    let expected = format!(
        "taskd: data folder {} is in use by another taskd (pid {}); \
         stop it, or choose another folder with --data-dir\n",
        data.display(),
        daemon.pid()
    );
    assert_eq!((code, said), (1, expected));
    assert_eq!(daemon.get("/readyz").await.0, 200);
}

#[tokio::test]
async fn a_port_or_a_folder_that_cannot_be_had_is_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().to_string();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let (code, said) = refused(&[
        "--http-listen",
        &port,
        "--grpc-listen",
        "127.0.0.1:0",
        "--data-dir",
        data.to_str().unwrap(),
    ]);
    let expected = format!(
        "taskd: cannot listen on {port} (http): address in use; choose another with --http-listen\n"
    );
    assert_eq!((code, said), (1, expected));
    assert!(!data.exists(), "a mistake leaves nothing behind");

    let (code, said) = refused(&[
        "--http-listen",
        "127.0.0.1:0",
        "--grpc-listen",
        "127.0.0.1:0",
        "--data-dir",
        "/proc/taskd",
    ]);
    assert_eq!(code, 1);
    assert!(
        said.starts_with("taskd: cannot use data folder /proc/taskd: "),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[tokio::test]
async fn a_redis_that_evicts_or_belongs_to_others_is_refused() {
    let server = RedisServer::start(Fsync::Always);
    let mut redis = crate::support::redis::patient(server.url()).await;
    let mut daemon = Daemon::start("", &["--redis-url", &server.url()]).await;
    assert!(daemon.stop().await.success());

    let dir = tempfile::tempdir().unwrap();
    let own = [
        "--http-listen",
        "127.0.0.1:0",
        "--grpc-listen",
        "127.0.0.1:0",
        "--redis-url",
        &server.url(),
    ];
    let args = [&own[..], &["--data-dir", dir.path().to_str().unwrap()]].concat();
    let (code, said) = refused(&args);
    assert_eq!(code, 1);
    assert!(
        said.contains("taskd: this Redis holds the tasks of another database"),
        "{said}"
    );

    let set = redis::cmd("CONFIG")
        .arg("SET")
        .arg("maxmemory-policy")
        .arg("allkeys-lru")
        .clone();
    set.query_async::<()>(&mut redis).await.unwrap();
    let (code, said) = refused(&args);
    assert_eq!(code, 1);
    assert!(
        said.ends_with("set maxmemory-policy noeviction\n"),
        "{said}"
    );
}

/// An address at which nobody listens until it is opened; from then on it leads to a server.
struct Door {
    port: Port,
}

impl Door {
    fn closed() -> Self {
        Self {
            port: Port::reserve(12_000..20_000),
        }
    }

    async fn open(&self, server: Server) {
        let listener = TcpListener::bind(("127.0.0.1", self.port.number))
            .await
            .unwrap();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let server = server.clone();
                tokio::spawn(async move {
                    let ended = match server {
                        Server::Tcp(addr) => {
                            let mut far = TcpStream::connect(addr).await?;
                            tokio::io::copy_bidirectional(&mut near, &mut far).await
                        }
                        Server::Unix(path) => {
                            let mut far = UnixStream::connect(path).await?;
                            tokio::io::copy_bidirectional(&mut near, &mut far).await
                        }
                    };
                    ended.map(drop)
                });
            }
        });
    }
}

#[derive(Clone)]
enum Server {
    Tcp(String),
    Unix(String),
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_are_not_up_yet_are_waited_for() {
    let redis = RedisServer::start(Fsync::Always);
    let database = MysqlDatabase::create().await;
    let doors = [Door::closed(), Door::closed(), Door::closed()];
    let mut database_url = url::Url::parse(&database.url()).unwrap();
    let mysql = format!("127.0.0.1:{}", database_url.port().unwrap());
    database_url.set_port(Some(doors[1].port.number)).unwrap();
    let prefix = format!("late-{}-", uuid::Uuid::new_v4());
    let mut daemon = Daemon::begin(
        "",
        &[
            "--redis-url",
            &format!("redis://127.0.0.1:{}", doors[0].port.number),
            "--database-url",
            database_url.as_str(),
            "--bus-url",
            &format!("kafka://127.0.0.1:{}", doors[2].port.number),
            "--topic-prefix",
            &prefix,
        ],
    );
    let servers = [
        (
            "Redis",
            Server::Unix(redis.url().trim_start_matches("unix://").to_owned()),
        ),
        ("the database", Server::Tcp(mysql)),
        ("the bus", Server::Tcp(kafka::shared().await.to_owned())),
    ];
    for (door, (name, server)) in doors.iter().zip(servers) {
        until("it says what it waits for", async || {
            daemon.log().contains(&format!("waiting for {name}: "))
        })
        .await;
        assert_eq!(daemon.get("/healthz").await.0, 200);
        assert_eq!(
            daemon.get("/readyz").await,
            (503, json!({"status": "waiting", "for": name}))
        );
        assert_eq!(
            daemon
                .post("/v1/tasks", &json!({"queue": "q", "key": "k"}))
                .await
                .0,
            503
        );
        door.open(server).await;
        until("it goes on", async || {
            daemon.log().contains(&format!("{name} is there: going on"))
        })
        .await;
    }
    daemon.ready().await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    assert_eq!(
        tokio::time::timeout(Duration::from_secs(60), daemon.drain("w", "q"))
            .await
            .unwrap(),
        ["k"]
    );
    assert!(daemon.stop().await.success());
    database.remove().await;
}
