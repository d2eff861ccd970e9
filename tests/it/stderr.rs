//! A stderr that takes no line: its reader is gone, or its disk is full.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    process::{Command, Output, Stdio},
};

use nix::{fcntl::OFlag, sys::stat::Mode, unistd::mkfifo};
use serde_json::json;

use crate::support::{daemon::Daemon, until};

#[tokio::test]
async fn a_taskd_whose_stderr_nobody_reads_works_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stderr");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    // Without waiting for the writer.
    let reader = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(&path)
        .unwrap();
    let mut daemon = Daemon::start_with_stderr(path.to_str().unwrap()).await;
    drop(reader);
    daemon.insert(&[json!({"queue": "q", "key": "1"})]).await;
    let pid = || fs::read_to_string(daemon.data().join("redis.pid")).unwrap_or_default();
    let first = pid();
    assert!(daemon.kill9_redis());
    until("Redis is started again", async || {
        !pid().is_empty() && pid() != first
    })
    .await;
    daemon.works_again("q").await;
    assert!(daemon.stop().await.success());
}

/// As behind Ctrl-S at a terminal.
#[tokio::test]
async fn a_taskd_whose_stderr_takes_no_more_works_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stderr");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    let mut pipe = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(&path)
        .unwrap();
    for size in [4096, 1] {
        while pipe.write(&vec![b'x'; size]).is_ok() {}
    }
    let mut daemon = Daemon::start_with_stderr(path.to_str().unwrap()).await;
    daemon.works_again("q").await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_taskd_starts_beside_a_full_log() {
    let mut daemon = Daemon::start_with_stderr("/dev/full").await;
    assert!(daemon.stop().await.success());
}

/// The exit code and the stdout of a command whose stderr has no reader, and of one whose stderr is
/// full.
fn unheard(args: &[&str]) -> [(i32, String); 2] {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    [writer.into(), full.into()].map(|stderr: Stdio| {
        let own =
            std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        let command = command
            .env_clear()
            .envs(own)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let Output { status, stdout, .. } = command
            .stderr(stderr)
            .spawn()
            .unwrap()
            .wait_with_output()
            .unwrap();
        (status.code().unwrap(), String::from_utf8(stdout).unwrap())
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_cannot_say_a_line_has_its_own_exit_code() {
    let daemon = Daemon::start("", &[]).await;
    let (grpc, http) = (daemon.grpc(), daemon.http());
    let lines = daemon.data().join("lines");
    let line = |n: usize| {
        if n.is_multiple_of(3) {
            "{\"key\": 1}\n".to_owned()
        } else {
            format!("{{\"key\": \"{n}\"}}\n")
        }
    };
    fs::write(&lines, (1..=9).map(line).collect::<String>()).unwrap();
    let insert = [
        "insert",
        "--queue",
        "q",
        "--json",
        "--server",
        &grpc,
        lines.to_str().unwrap(),
    ];
    tokio::task::block_in_place(|| {
        for (code, summary) in unheard(&insert) {
            assert!(
                code == 1 && summary.contains("\"lines\":9") && summary.contains("\"rejected\":3"),
                "{code} {summary}"
            );
        }
        let cases: [(&[&str], i32); 8] = [
            (&[], 2),
            (&["tasks", "--bad"], 2),
            (&["stats", "--server", "127.0.0.1:1"], 2),
            (&["fsck", "--server", &grpc], 0),
            (&["task", "q", "none", "--server", &http], 1),
            (&["explain", "q", "none", "--server", &http], 1),
            (&["cancel", "q", "none", "--server", &grpc], 1),
            (&["tasks", "retry", "q", "none", "--server", &grpc], 1),
        ];
        for (args, expected) in cases {
            assert_eq!(
                unheard(args).map(|(code, _)| code),
                [expected; 2],
                "{args:?}"
            );
        }
    });
}
