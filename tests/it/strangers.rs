//! Connections without a valid call, by the running binary: they keep out nobody who has a token.

use std::time::Duration;

use serde_json::Value;
use taskd::wire::pb::{GetTaskRequest, discovery_client::DiscoveryClient};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::{Code, Request, Status, transport::Channel};

use crate::{
    columns::access::{TOKENS, token},
    support::{PATIENCE, daemon::Daemon, session::channel, until},
};

/// A call over gRPC with a token: `NotFound` says that it was accepted.
async fn ask(channel: Channel, token: &str) -> Status {
    let mut request = Request::new(GetTaskRequest {
        id: "0190a5c2-0000-7000-8000-000000000000".into(),
    });
    request
        .metadata_mut()
        .insert("authorization", format!("Bearer {token}").parse().unwrap());
    DiscoveryClient::new(channel)
        .get_task(request)
        .await
        .unwrap_err()
}

/// The same over HTTP, on a connection of its own.
async fn get(daemon: &Daemon, token: &str) -> (u16, Value) {
    let request = crate::support::http_client()
        .get(format!("{}/v1/queues", daemon.http()))
        .bearer_auth(token);
    let answer = request.send().await.unwrap();
    (
        answer.status().as_u16(),
        serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or_default(),
    )
}

async fn connect(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).await.unwrap()
}

/// Sends a request on a connection, and reads the head of its answer.
async fn request(stream: &mut TcpStream, text: &str) -> Option<String> {
    stream.write_all(text.as_bytes()).await.ok()?;
    let mut answer = vec![0; 16 << 10];
    let read = tokio::time::timeout(PATIENCE, stream.read(&mut answer))
        .await
        .expect("an answer, or an end")
        .ok()?;
    (read > 0).then(|| String::from_utf8_lossy(&answer[..read]).into_owned())
}

const PROBE: &str = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n";

fn with_token(token: &str) -> String {
    format!("GET /v1/queues HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n")
}

/// Until the other side has closed it.
async fn has_closed(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    drop(
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest))
            .await
            .expect("the connection is closed"),
    );
}

#[tokio::test]
async fn strangers_make_way_for_clients_with_a_token() {
    let config = format!("{TOKENS}max_connections = 16\n");
    let mut daemon = Daemon::start(&config, &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    // These answer pings, and nothing more.
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(channel(daemon.grpc_port()).await);
    }
    // These ask what needs no token.
    let mut probes = Vec::new();
    for _ in 0..40 {
        let mut probe = connect(daemon.http_port()).await;
        assert!(
            request(&mut probe, PROBE)
                .await
                .unwrap()
                .starts_with("HTTP/1.1 200")
        );
        probes.push(probe);
    }
    let known = channel(daemon.grpc_port()).await;
    for _ in 0..5 {
        assert_eq!(get(&daemon, &admin).await.0, 200);
        assert_eq!(
            ask(channel(daemon.grpc_port()).await, &admin).await.code(),
            Code::NotFound
        );
        assert_eq!(
            ask(known.clone(), &admin).await.code(),
            Code::NotFound,
            "it stays"
        );
        silent.push(channel(daemon.grpc_port()).await);
        probes.push(connect(daemon.http_port()).await);
    }
    // Of those who have no valid token, none is better than a silent one.
    for number in 0..40 {
        assert_eq!(
            ask(channel(daemon.grpc_port()).await, "taskd_wrong")
                .await
                .code(),
            Code::Unauthenticated,
            "{number}"
        );
        let mut stranger = connect(daemon.http_port()).await;
        let answer = request(&mut stranger, &with_token("taskd_wrong"))
            .await
            .unwrap();
        assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
        probes.push(stranger);
    }
    assert_eq!(get(&daemon, &admin).await.0, 200);
    assert_eq!(
        ask(channel(daemon.grpc_port()).await, &admin).await.code(),
        Code::NotFound
    );
    assert!(
        daemon
            .log()
            .contains("16 connections over gRPC: the oldest without an accepted call makes way")
    );
    drop((silent, probes));
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn without_tokens_a_connection_without_a_call_makes_way() {
    let mut daemon = Daemon::start("max_connections = 16\n", &[]).await;
    let mut silent = Vec::new();
    for port in [daemon.http_port(), daemon.grpc_port()] {
        for _ in 0..40 {
            silent.push(connect(port).await);
        }
    }
    assert_eq!(get(&daemon, "any").await.0, 200);
    assert_eq!(
        ask(channel(daemon.grpc_port()).await, "any").await.code(),
        Code::NotFound
    );
    drop(silent);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_stranger_stays_for_a_while_only_whatever_it_does() {
    let mut daemon = Daemon::start(TOKENS, &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let known = channel(daemon.grpc_port()).await;
    assert_eq!(ask(known.clone(), &admin).await.code(), Code::NotFound);
    let asks = async {
        let mut stranger = connect(daemon.http_port()).await;
        while let Some(answer) = request(&mut stranger, PROBE).await {
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let is_silent = async { has_closed(&mut connect(daemon.http_port()).await).await };
    let speaks_http2 = async {
        let mut stranger = connect(daemon.grpc_port()).await;
        stranger
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            .await
            .unwrap();
        // It answers the pings of taskd: a client that does not is gone after twenty seconds
        // anyway.
        let mut frame = [0; 9];
        while stranger.read_exact(&mut frame).await.is_ok() {
            let length = u32::from_be_bytes([0, frame[0], frame[1], frame[2]]) as usize;
            let mut body = vec![0; length];
            if stranger.read_exact(&mut body).await.is_err() {
                break;
            }
            if frame[3] == 6 && frame[4] & 1 == 0 {
                frame[4] |= 1;
                drop(stranger.write_all(&[&frame[..], &body].concat()).await);
            }
        }
    };
    let all = async { tokio::join!(asks, is_silent, speaks_http2) };
    tokio::time::timeout(PATIENCE, all)
        .await
        .expect("all strangers are told to go");
    // A client that has had a call stays.
    assert_eq!(ask(known, &admin).await.code(), Code::NotFound);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_restricted_token_leaves_half_of_the_connections() {
    let config = format!("{TOKENS}max_connections = 16\n");
    let mut daemon = Daemon::start(&config, &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let acme = token(&daemon, "acme", &["--roles", "read", "--queues", "acme*"]).await;
    // The connections of the commands above have ended by then, or make way.
    let mut held = Vec::new();
    until("the token has its share over HTTP", async || {
        let mut stream = connect(daemon.http_port()).await;
        let answer = request(&mut stream, &with_token(&acme)).await.unwrap();
        if answer.starts_with("HTTP/1.1 200") {
            held.push(stream);
            return false;
        }
        assert!(
            answer.starts_with("HTTP/1.1 429") && answer.contains("half of all (max_connections)"),
            "{answer}"
        );
        has_closed(&mut stream).await;
        true
    })
    .await;
    // The client that made the token may hold one of the eight for a while.
    assert!(held.len() >= 7, "{}", held.len());
    let mut channels = Vec::new();
    for _ in 0..8 {
        let channel = channel(daemon.grpc_port()).await;
        assert_eq!(ask(channel.clone(), &acme).await.code(), Code::NotFound);
        channels.push(channel);
    }
    let status = ask(channel(daemon.grpc_port()).await, &acme).await;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(
        status
            .message()
            .starts_with("8 connections have called with this token"),
        "{status:?}"
    );
    // Others, and the token itself on a connection that it has.
    let mut others = Vec::new();
    for _ in 0..8 {
        let channel = channel(daemon.grpc_port()).await;
        assert_eq!(ask(channel.clone(), &admin).await.code(), Code::NotFound);
        others.push(channel);
        let mut stream = connect(daemon.http_port()).await;
        let answer = request(&mut stream, &with_token(&admin)).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        held.push(stream);
    }
    assert_eq!(ask(channels[0].clone(), &acme).await.code(), Code::NotFound);
    // A connection belongs to the last token that called on it.
    assert_eq!(
        ask(channels[0].clone(), &admin).await.code(),
        Code::NotFound
    );
    assert_eq!(ask(others[0].clone(), &acme).await.code(), Code::NotFound);
    assert_eq!(
        ask(others[1].clone(), &acme).await.code(),
        Code::ResourceExhausted
    );
    // When a token is revoked, its connections are strangers' again.
    let (code, _, stderr) = crate::columns::access::taskd(&daemon, &["token", "revoke", "acme"]);
    assert_eq!(code, 0, "{stderr}");
    until("a connection of the revoked token makes way", async || {
        let answer = async {
            let channel = crate::support::session::try_channel(daemon.grpc_port()).await?;
            Err::<(), _>(ask(channel, &admin).await)
        };
        answer.await.unwrap_err().code() == Code::NotFound
    })
    .await;
    drop((held, channels, others));
    assert!(daemon.stop().await.success());
}
