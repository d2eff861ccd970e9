//! Tokens, roles, scopes and workers, on every route and method of the running binary.

use std::process::Command;

use reqwest::Method;
use serde_json::{Value, json};
use taskd::{ingress::operations, model::Role};
use tokio::io::AsyncWriteExt as _;
use tonic::{Code, Request, client::Grpc, transport::Channel};
use tonic_prost::ProstCodec;

use crate::{
    column,
    support::{daemon::Daemon, until},
};

pub(crate) const TOKENS: &str = "auth = \"tokens\"\n";

/// Exit code, stdout and stderr of a command on the daemon's database.
pub(crate) fn taskd(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .env_clear()
        .envs(own)
        .args(args)
        .args(daemon.database())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// A new token that the daemon knows.
pub(crate) async fn token(daemon: &Daemon, name: &str, args: &[&str]) -> String {
    let (code, stdout, stderr) = taskd(daemon, &[&["token", "create", name], args].concat());
    assert_eq!(code, 0, "{stderr}");
    let token = stdout.trim_end().to_owned();
    until("taskd knows the token", async || {
        let (status, answer) =
            call(daemon, Method::GET, "/v1/queues", Some(&token), Value::Null).await;
        status != 401 || answer["detail"].as_str().unwrap().contains("expired")
    })
    .await;
    token
}

pub(crate) async fn call(
    daemon: &Daemon,
    method: Method,
    path: &str,
    token: Option<&str>,
    body: Value,
) -> (u16, Value) {
    let mut request =
        crate::support::http_client().request(method, format!("{}{path}", daemon.http()));
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    if !body.is_null() {
        request = request.json(&body);
    }
    let answer = request.send().await.unwrap();
    (
        answer.status().as_u16(),
        serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or_default(),
    )
}

pub(crate) async fn post(daemon: &Daemon, path: &str, token: &str, body: Value) -> (u16, Value) {
    call(daemon, Method::POST, path, Some(token), body).await
}

/// The code of an empty call.
async fn grpc_code(channel: &Channel, method: &str, token: Option<&str>) -> Code {
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let mut request = Request::new(());
    if let Some(token) = token {
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    let path = format!("/{method}").parse().unwrap();
    let codec = ProstCodec::<(), ()>::default();
    client
        .unary(request, path, codec)
        .await
        .map_or_else(|status| status.code(), |_| Code::Ok)
}

/// A path that fits a route.
fn example(route: &str) -> String {
    route
        .replace("{id}", "0190a5c2-0000-7000-8000-000000000000")
        .replace("{queue}", "q")
        .replace("{limit_key}", "k")
}

#[tokio::test]
async fn every_route_and_method_asks_for_a_token_with_its_role() {
    let daemon = column::start(TOKENS, &[]).await;
    let all: Vec<&str> = Role::ALL.map(Role::as_str).to_vec();
    let mut with = Vec::new();
    for role in Role::ALL {
        // Every role but this one and that of an admin, who may do everything.
        let others: Vec<_> = all
            .iter()
            .copied()
            .filter(|name| ![role.as_str(), "admin"].contains(name))
            .collect();
        let low = token(
            &daemon,
            &format!("without-{role}"),
            &["--roles", &others.join(",")],
        )
        .await;
        let own = token(
            &daemon,
            &format!("only-{role}"),
            &["--roles", role.as_str()],
        )
        .await;
        with.push((role, low, own));
    }
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let revoked = token(&daemon, "revoked", &["--roles", "admin"]).await;
    let expired = token(
        &daemon,
        "expired",
        &["--roles", "admin", "--expires", "1ms"],
    )
    .await;
    let (code, _, stderr) = taskd(&daemon, &["token", "revoke", "revoked"]);
    assert_eq!(code, 0, "{stderr}");
    until("the token is revoked", async || {
        call(
            &daemon,
            Method::GET,
            "/v1/queues",
            Some(&revoked),
            Value::Null,
        )
        .await
        .0 == 401
    })
    .await;
    let tokens = |role| {
        with.iter()
            .find(|(of, ..)| *of == role)
            .map(|(_, low, own)| (low, own))
            .unwrap()
    };

    let scoped = token(&daemon, "scoped", &["--roles", "admin", "--queues", "some"]).await;
    for operation in operations() {
        let (Some(role), Some(route)) = (operation.role, operation.http) else {
            continue;
        };
        let (method, path) = (route.method, route.path);
        let ask = async |token: Option<&str>| {
            call(&daemon, method.clone(), &example(path), token, Value::Null).await
        };
        for wrong in [None, Some("taskd_wrong"), Some(&*revoked), Some(&*expired)] {
            let (status, problem) = ask(wrong).await;
            assert_eq!(status, 401, "{method} {path} {wrong:?}: {problem}");
        }
        let (low, own) = tokens(role);
        let (status, problem) = ask(Some(low)).await;
        assert_eq!(status, 403, "{method} {path} without {role}: {problem}");
        for right in [own, &admin] {
            let (status, problem) = ask(Some(right)).await;
            assert!(
                ![401, 403, 405].contains(&status),
                "{method} {path} with {role}: {status} {problem}"
            );
        }
        if operation.needs_all_queues {
            let (status, problem) = ask(Some(&scoped)).await;
            assert_eq!(status, 403, "{method} {path} of some queues: {problem}");
        }
    }

    let channel = Channel::from_shared(daemon.grpc())
        .unwrap()
        .timeout(crate::support::PATIENCE)
        .connect()
        .await
        .unwrap();
    for operation in operations() {
        let (Some(role), Some(method)) = (operation.role, operation.grpc) else {
            continue;
        };
        for wrong in [None, Some("taskd_wrong"), Some(&*revoked), Some(&*expired)] {
            assert_eq!(
                grpc_code(&channel, method, wrong).await,
                Code::Unauthenticated,
                "{method} {wrong:?}"
            );
        }
        let (low, own) = tokens(role);
        assert_eq!(
            grpc_code(&channel, method, Some(low)).await,
            Code::PermissionDenied,
            "{method} without {role}"
        );
        for right in [own, &admin] {
            let code = grpc_code(&channel, method, Some(right)).await;
            assert!(
                ![
                    Code::Unauthenticated,
                    Code::PermissionDenied,
                    Code::Unimplemented
                ]
                .contains(&code),
                "{method}"
            );
        }
    }

    // Probes have no token.
    for probe in ["/healthz", "/readyz"] {
        assert_eq!(
            call(&daemon, Method::GET, probe, None, Value::Null).await.0,
            200,
            "{probe}"
        );
    }
}

#[tokio::test]
async fn a_token_reaches_its_queues_only() {
    let daemon = column::start(TOKENS, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let acme = token(
        &daemon,
        "acme",
        &["--roles", "insert,work,read", "--queues", "acme,acme.*"],
    )
    .await;
    let tasks = json!([{"queue": "acme.a", "key": "1"}, {"queue": "other", "key": "1"}]);
    let (status, answer) = post(&daemon, "/v1/tasks", &acme, tasks.clone()).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["results"][0]["status"], "CREATED");
    let rejected = json!({"status": "REJECTED", "error": "the token \"acme\" does not reach the queue \"other\""});
    assert_eq!(answer["results"][1], rejected);
    let (_, answer) = post(&daemon, "/v1/tasks", &all, tasks).await;
    let (own, others) = (
        answer["results"][0]["id"].clone(),
        answer["results"][1]["id"].clone(),
    );

    // Reading: another queue's task is not there.
    for (id, want) in [(&own, 200), (&others, 404)] {
        for part in ["", "/results"] {
            let path = format!("/v1/tasks/{}{part}", id.as_str().unwrap());
            assert_eq!(
                call(&daemon, Method::GET, &path, Some(&acme), Value::Null)
                    .await
                    .0,
                want,
                "{path}"
            );
        }
    }
    for (query, want) in [
        (format!("id={}", own.as_str().unwrap()), 200),
        (format!("id={}", others.as_str().unwrap()), 404),
        ("queue=acme.a&key=1".to_owned(), 200),
        ("queue=other&key=1".to_owned(), 403),
    ] {
        let path = format!("/v1/tasks:explain?{query}");
        assert_eq!(
            call(&daemon, Method::GET, &path, Some(&acme), Value::Null)
                .await
                .0,
            want,
            "{path}"
        );
    }
    let queues = async |token: &str| {
        let (_, answer) = call(&daemon, Method::GET, "/v1/queues", Some(token), Value::Null).await;
        let queues = answer["queues"]
            .as_array()
            .unwrap()
            .iter()
            .map(|queue| queue["queue"].clone());
        queues.collect::<Vec<_>>()
    };
    assert_eq!(queues(&all).await, ["acme.a", "other"]);
    assert_eq!(queues(&acme).await, ["acme.a"]);
    assert_eq!(
        call(&daemon, Method::GET, "/metrics", Some(&acme), Value::Null)
            .await
            .0,
        403
    );

    // Working.
    let get = |queue: &str| json!({"worker": "w", "queues": [queue], "wait": "30s"});
    let (status, problem) = post(&daemon, "/v1/tasks:get", &acme, get("other")).await;
    assert_eq!(
        (status, problem["detail"].as_str().unwrap()),
        (403, "the token \"acme\" does not reach the queue \"other\"")
    );
    let lease = async |token: &str, queue: &str| {
        let (status, mut answer) = post(&daemon, "/v1/tasks:get", token, get(queue)).await;
        assert_eq!(status, 200, "{answer}");
        answer["tasks"][0].take()
    };
    let (mine, theirs) = (lease(&acme, "acme.a").await, lease(&all, "other").await);
    let report = |task: &Value, more: Value| {
        let mut item = json!({"id": task["id"], "lease_token": task["lease_token"]});
        item.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        item
    };
    for (method, list, more) in [
        ("complete", "completions", json!({})),
        ("reject", "rejections", json!({})),
        ("extend", "extensions", json!({"by": "30s"})),
    ] {
        let body = json!({"worker": "w", list: [report(&theirs, more)]});
        let (status, answer) = post(&daemon, &format!("/v1/tasks:{method}"), &acme, body).await;
        assert_eq!(
            (status, &answer["results"][0]["status"]),
            (200, &json!("INVALID")),
            "{method}: {answer}"
        );
    }
    let found = json!({"discovered": [{"queue": "other", "key": "found"}, {"queue": "acme", "key": "found"}]});
    let body = json!({"worker": "w", "completions": [report(&mine, found)]});
    let (_, answer) = post(&daemon, "/v1/tasks:complete", &acme, body).await;
    let error = answer["results"][0]["error"].as_str().unwrap();
    assert_eq!(answer["results"][0]["status"], "OK");
    assert!(
        error.contains("a discovered task: the token \"acme\" does not reach"),
        "{answer}"
    );
    assert_eq!(lease(&acme, "acme").await["key"], "found");
}

#[tokio::test]
async fn a_workers_token_is_that_worker() {
    let daemon = column::start(TOKENS, &[]).await;
    let own = token(
        &daemon,
        "w1",
        &["--roles", "insert,work,read", "--worker", "w1"],
    )
    .await;
    let twice = json!([{"queue": "q", "key": "1", "replicas": 2}]);
    assert_eq!(post(&daemon, "/v1/tasks", &own, twice).await.0, 200);
    let (status, problem) = post(
        &daemon,
        "/v1/tasks:get",
        &own,
        json!({"worker": "w2", "queues": ["q"]}),
    )
    .await;
    let why = "the token \"w1\" is for the worker \"w1\": use its name instead of \"w2\"";
    assert_eq!((status, problem["detail"].as_str().unwrap()), (403, why));
    let (_, answer) = post(
        &daemon,
        "/v1/tasks:get",
        &own,
        json!({"queues": ["q"], "wait": "30s"}),
    )
    .await;
    let task = &answer["tasks"][0];
    let item = json!({"id": task["id"], "lease_token": task["lease_token"]});
    let body = |worker: &str| json!({"worker": worker, "completions": [item]});
    assert_eq!(
        post(&daemon, "/v1/tasks:complete", &own, body("w2"))
            .await
            .0,
        403
    );
    let (_, answer) = post(&daemon, "/v1/tasks:complete", &own, body("")).await;
    assert_eq!(
        answer["results"][0]["status"], "OK",
        "the token says who it is"
    );
    for (name, list) in [
        ("complete", "completions"),
        ("reject", "rejections"),
        ("extend", "extensions"),
    ] {
        for (worker, want) in [("", 200), ("w1", 200), ("w2", 403)] {
            let path = format!("/v1/tasks:{name}");
            let (status, answer) =
                post(&daemon, &path, &own, json!({"worker": worker, list: []})).await;
            assert_eq!(status, want, "{name} of {worker:?}: {answer}");
        }
    }
    let path = format!("/v1/tasks/{}/results", task["id"].as_str().unwrap());
    until("the result is the worker's", async || {
        let (_, answer) = call(&daemon, Method::GET, &path, Some(&own), Value::Null).await;
        answer["results"][0]["worker"] == "w1"
    })
    .await;
}

#[tokio::test]
async fn a_token_that_is_revoked_gets_nothing_more_in_a_call_that_waits() {
    let daemon = column::start(TOKENS, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let own = token(&daemon, "own", &["--roles", "work,insert"]).await;
    let waiting = post(
        &daemon,
        "/v1/tasks:get",
        &own,
        json!({"worker": "w", "queues": ["q"], "wait": "60s"}),
    );
    let (lines, to_insert) = tokio::io::duplex(1 << 10);
    let body = reqwest::Body::wrap_stream(tokio_util::io::ReaderStream::new(lines));
    let request = crate::support::http_client()
        .post(format!("{}/v1/tasks", daemon.http()))
        .bearer_auth(&own);
    let inserting = request
        .header("content-type", "application/x-ndjson")
        .body(body)
        .send();
    let others = async {
        let mut to_insert = to_insert;
        to_insert
            .write_all(b"{\"queue\": \"other\", \"key\": \"before\"}\n")
            .await
            .unwrap();
        until("the first line is stored", async || {
            daemon_has(&daemon, &all, "other").await
        })
        .await;
        assert_eq!(taskd(&daemon, &["token", "revoke", "own"]).0, 0);
        until("the token is revoked", async || {
            post(&daemon, "/v1/tasks:get", &own, json!({})).await.0 == 401
        })
        .await;
        post(
            &daemon,
            "/v1/tasks",
            &all,
            json!({"queue": "q", "key": "1"}),
        )
        .await;
        drop(
            to_insert
                .write_all(b"{\"queue\": \"other\", \"key\": \"after\"}\n")
                .await,
        );
    };
    let (get, inserted, ()) = tokio::join!(waiting, inserting, others);
    assert_eq!(get.0, 401, "{get:?}");
    let answers = inserted.unwrap().text().await.unwrap();
    let answers: Vec<Value> = answers
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (&answers[0]["status"], &answers[1]["status"]),
        (&json!("CREATED"), &json!("TRY_LATER")),
        "{answers:?}"
    );
    // The task that the call had in hand goes to another worker.
    let (_, answer) = post(
        &daemon,
        "/v1/tasks:get",
        &all,
        json!({"worker": "w2", "queues": ["q"], "wait": "60s"}),
    )
    .await;
    assert_eq!(answer["tasks"][0]["key"], "1");
}

/// True if the queue has a task.
async fn daemon_has(daemon: &Daemon, token: &str, queue: &str) -> bool {
    let (_, answer) = call(daemon, Method::GET, "/v1/queues", Some(token), Value::Null).await;
    answer["queues"]
        .as_array()
        .is_some_and(|queues| queues.iter().any(|view| view["queue"] == queue))
}

#[tokio::test]
async fn a_token_may_have_a_limit_of_calls() {
    let daemon = column::start(TOKENS, &[]).await;
    let slow = token(
        &daemon,
        "slow",
        &["--roles", "read", "--calls-per-second", "1"],
    )
    .await;
    let calls =
        (0..100).map(|_| call(&daemon, Method::GET, "/v1/queues", Some(&slow), Value::Null));
    let refused = futures::future::join_all(calls)
        .await
        .into_iter()
        .find(|(status, _)| *status == 429);
    let why = "the token \"slow\" may make 1 calls a second; try again in a moment";
    assert_eq!(
        refused.expect("a hundred calls at once are too many").1["detail"],
        why
    );
}

/// A token that may not do something may not ask for it without limit either.
#[tokio::test]
async fn the_limit_of_a_token_counts_calls_that_it_may_not_make() {
    let daemon = column::start(TOKENS, &[]).await;
    let slow = token(
        &daemon,
        "slow",
        &["--roles", "read", "--calls-per-second", "1"],
    )
    .await;
    let calls = (0..100).map(|_| {
        post(
            &daemon,
            "/v1/tasks",
            &slow,
            json!({"queue": "q", "key": "k"}),
        )
    });
    let answers: Vec<u16> = futures::future::join_all(calls)
        .await
        .into_iter()
        .map(|(status, _)| status)
        .collect();
    assert!(
        answers.iter().all(|status| [403, 429].contains(status)),
        "{answers:?}"
    );
    assert!(
        answers.contains(&429),
        "a hundred calls at once are too many"
    );
}

/// A token with the role `work` may name any worker, but it must have been shown a lease to report
/// it.
#[tokio::test]
async fn the_token_of_another_workers_lease_cannot_be_guessed() {
    let daemon = column::start(TOKENS, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let scoped = token(&daemon, "scoped", &["--roles", "work", "--queues", "q"]).await;
    let task = |n: usize| json!({"queue": "q", "key": n.to_string()});
    let tasks: Vec<Value> = (0..4).map(task).collect();
    assert_eq!(post(&daemon, "/v1/tasks", &all, json!(tasks)).await.0, 200);
    let lease = async |token: &str, worker: &str| {
        let body = json!({"worker": worker, "queues": ["q"], "max_tasks": 1, "wait": "60s"});
        let (status, mut answer) = post(&daemon, "/v1/tasks:get", token, body).await;
        assert_eq!(status, 200, "{answer}");
        answer["tasks"][0].take()
    };
    let victims = lease(&all, "victim").await;
    let own = lease(&scoped, "own").await;
    let parts = |task: &Value| -> Vec<String> {
        task["lease_token"]
            .as_str()
            .unwrap()
            .split(':')
            .map(ToOwned::to_owned)
            .collect()
    };
    let (victims_parts, own_parts) = (parts(&victims), parts(&own));
    let grants = [&victims_parts, &own_parts].map(|parts| parts[3].parse::<u64>().unwrap());
    assert!(
        grants.iter().all(|grant| *grant > 100_000_000_000_000),
        "{grants:?}"
    );
    assert!(grants[0].abs_diff(grants[1]) > 1000, "{grants:?}");
    // A few guesses: small numbers, and those beside its own, in the shard of the victim.
    let near = (0..20).flat_map(|n| [n, grants[1] + n, grants[1] - n]);
    for guess in near {
        let token = [
            &victims_parts[..3],
            &[guess.to_string(), "1".to_owned(), "0".to_owned()],
        ]
        .concat()
        .join(":");
        let item = json!({"id": victims["id"], "lease_token": token, "result": "forged"});
        let body = json!({"worker": "victim", "completions": [item]});
        let (_, answer) = post(&daemon, "/v1/tasks:complete", &scoped, body).await;
        assert_eq!(
            answer["results"][0]["status"], "LEASE_LOST",
            "{token}: {answer}"
        );
    }
    for (token, worker, task) in [(&all, "victim", &victims), (&scoped, "own", &own)] {
        let item = json!({"id": task["id"], "lease_token": task["lease_token"]});
        for _ in 0..2 {
            let body = json!({"worker": worker, "completions": [item]});
            let (_, answer) = post(&daemon, "/v1/tasks:complete", token, body).await;
            assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
        }
    }
    // SQL keeps such a number, too, and recognises the repeat.
    until("SQL has the result", async || {
        let path = format!("/v1/tasks/{}/results", victims["id"].as_str().unwrap());
        let (_, answer) = call(&daemon, Method::GET, &path, Some(&all), Value::Null).await;
        answer["results"]
            .as_array()
            .is_some_and(|results| !results.is_empty())
    })
    .await;
    let item = json!({"id": victims["id"], "lease_token": victims["lease_token"]});
    let (_, answer) = post(
        &daemon,
        "/v1/tasks:complete",
        &all,
        json!({"worker": "victim", "completions": [item]}),
    )
    .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
}

#[tokio::test]
async fn refused_calls_leave_a_few_lines_in_the_log() {
    let daemon = column::start(TOKENS, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let reader = token(&daemon, "reader", &["--roles", "read"]).await;
    let acme = token(
        &daemon,
        "acme",
        &["--roles", "insert,work,read", "--queues", "acme"],
    )
    .await;
    let slow = token(
        &daemon,
        "slow",
        &["--roles", "read", "--calls-per-second", "1"],
    )
    .await;
    let lines = |has: &[&str]| {
        let log = daemon.log();
        let lines = log
            .lines()
            .filter(|line| line.contains("refused ") && has.iter().all(|part| line.contains(part)));
        lines.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    // The helper that makes tokens has called without a valid one, in a bounded number.
    let (status, _) = post(
        &daemon,
        "/v1/tasks",
        &reader,
        json!({"queue": "q", "key": "k"}),
    )
    .await;
    assert_eq!(status, 403);
    let said = lines(&[
        "POST /v1/tasks",
        "from 127.0.0.1:",
        "the token \\\"reader\\\" has the roles read",
    ]);
    assert_eq!(said.len(), 1, "{}", daemon.log());
    let (status, _) = call(
        &daemon,
        Method::GET,
        "/v1/books?queue=other",
        Some(&acme),
        Value::Null,
    )
    .await;
    assert_eq!(status, 403);
    let said = lines(&[
        "GET /v1/books",
        "with the token \\\"acme\\\"",
        "does not reach the queue",
    ]);
    assert_eq!(said.len(), 1, "{}", daemon.log());
    let channel = Channel::from_shared(daemon.grpc())
        .unwrap()
        .timeout(crate::support::PATIENCE)
        .connect()
        .await
        .unwrap();
    assert_eq!(
        grpc_code(&channel, "taskd.v1.Tasks/GetTasks", Some(&reader)).await,
        Code::PermissionDenied
    );
    assert_eq!(
        lines(&["taskd.v1.Tasks/GetTasks", "\\\"reader\\\""]).len(),
        1,
        "{}",
        daemon.log()
    );
    let calls =
        (0..100).map(|_| call(&daemon, Method::GET, "/v1/queues", Some(&slow), Value::Null));
    futures::future::join_all(calls).await;
    let said = lines(&[
        "GET /v1/queues",
        "the token \\\"slow\\\" may make 1 calls a second",
    ]);
    assert!((1..100).contains(&said.len()), "{said:?}");

    // A stranger who tries many tokens leaves a bounded number of lines, and taskd says how many it
    // left out.
    let before = lines(&[]).len();
    for _ in 0..300 {
        let (status, _) = call(
            &daemon,
            Method::GET,
            "/v1/queues",
            Some("taskd_guess"),
            Value::Null,
        )
        .await;
        assert_eq!(status, 401);
    }
    let more = lines(&[]).len() - before;
    assert!(more < 150, "{more} lines about 300 calls");
    assert!(
        !daemon.log().contains("taskd_guess") && !daemon.log().contains(&all),
        "no secret is in the log"
    );
}

#[tokio::test]
async fn tokens_are_made_listed_and_revoked_by_command() {
    let daemon = column::start(TOKENS, &[]).await;
    let secret = token(
        &daemon,
        "ci",
        &[
            "--roles",
            "insert",
            "--queues",
            "a,b*",
            "--expires",
            "90days",
        ],
    )
    .await;
    let one_line = |args: &[&str], code: i32, want: &str| {
        let (got, stdout, stderr) = taskd(&daemon, args);
        assert_eq!(
            (got, stdout.as_str(), stderr.lines().count()),
            (code, "", 1),
            "{args:?}: {stderr}"
        );
        assert!(stderr.contains(want), "{stderr:?} should say {want:?}");
    };
    one_line(
        &["token", "create", "ci", "--roles", "read"],
        2,
        "there is a token \"ci\" already; revoke it first",
    );
    one_line(
        &["token", "create", "x", "--roles", "root"],
        2,
        "unknown role \"root\"; expected insert, work, read",
    );
    one_line(
        &["token", "create", "x y", "--roles", "read"],
        2,
        "\"x y\" is not a name",
    );
    one_line(
        &["token", "create", "x", "--roles", "read", "--queues", "a b"],
        2,
        "contains ' '",
    );
    one_line(&["token", "create", "x"], 2, "--roles");
    one_line(
        &["token", "create", "x", "--roles", "read", "--queues", ""],
        2,
        "names no queue",
    );
    one_line(
        &[
            "token",
            "create",
            "x",
            "--roles",
            "read",
            "--expires",
            "8000years",
        ],
        2,
        "at most 100 years",
    );
    one_line(
        &["token", "create", "x", "--roles", "read", "--expires", "0s"],
        2,
        "it must be at least 1ms",
    );
    one_line(
        &["token", "revoke", "nobody"],
        1,
        "there is no token \"nobody\"; taskd token list shows all",
    );

    let (code, stdout, _) = taskd(&daemon, &["token", "list", "--json"]);
    let shown: Value = serde_json::from_str(stdout.trim()).unwrap();
    let fields = ["name", "roles", "queues", "has_expired"].map(|field| &shown[field]);
    assert_eq!(
        (code, fields),
        (
            0,
            [
                &json!("ci"),
                &json!("insert"),
                &json!("a,b*"),
                &json!(false)
            ]
        )
    );
    let (_, stdout, _) = taskd(&daemon, &["token", "list"]);
    assert!(stdout.contains("ci") && stdout.contains("a,b*"), "{stdout}");
    let mut files = 0;
    for file in std::fs::read_dir(daemon.data())
        .into_iter()
        .flatten()
        .map(|file| file.unwrap().path())
    {
        // Not folders and sockets.
        let Ok(bytes) = std::fs::read(&file) else {
            continue;
        };
        let is_there = bytes
            .windows(secret.len())
            .any(|window| window == secret.as_bytes());
        assert!(!is_there, "{} has the token itself", file.display());
        files += 1;
    }
    assert!(
        files > 0 || daemon.arg("--database-url").is_some(),
        "no file was read"
    );

    // The command that inserts takes the token from the environment, and says what is missing.
    let insert = |token: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        command
            .args([
                "insert",
                "--queue",
                "a",
                "--server",
                &daemon.grpc(),
                "crates/taskd-proto/src/pb/sources.sha256",
            ])
            .env("TASKD_TOKEN", token);
        let output = command
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    assert_eq!(insert(&secret), (0, String::new()));
    let (code, stderr) = insert("");
    assert_eq!(code, 2);
    assert!(
        stderr.contains("takes calls with a token") && stderr.contains("--token or TASKD_TOKEN"),
        "{stderr}"
    );

    assert_eq!(taskd(&daemon, &["token", "revoke", "ci"]).0, 0);
    let (_, stdout, _) = taskd(&daemon, &["token", "list"]);
    assert!(!stdout.contains("ci"), "{stdout}");
    let admin = token(&daemon, "ops", &["--roles", "admin"]).await;
    let (_, answer) = call(
        &daemon,
        Method::GET,
        "/v1/acts?limit=2",
        Some(&admin),
        Value::Null,
    )
    .await;
    let acts: Vec<_> = answer["acts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|act| (&act["what"], &act["on"]))
        .collect();
    let (made, revoked) = (
        (json!("create token"), json!("ops (admin)")),
        (json!("revoke token"), json!("ci")),
    );
    assert_eq!(acts, [(&made.0, &made.1), (&revoked.0, &revoked.1)]);
    let before = answer["acts"][1]["id"].as_str().unwrap();
    let path = format!("/v1/acts?before={before}");
    let (_, answer) = call(&daemon, Method::GET, &path, Some(&admin), Value::Null).await;
    assert_eq!(
        (
            answer["acts"].as_array().unwrap().len(),
            &answer["acts"][0]["on"]
        ),
        (1, &json!("ci (insert)"))
    );
    for wrong in ["before=x", "limit=x", "bfore=1"] {
        let path = format!("/v1/acts?{wrong}");
        assert_eq!(
            call(&daemon, Method::GET, &path, Some(&admin), Value::Null)
                .await
                .0,
            400,
            "{wrong}"
        );
    }
    let (_, stdout, stderr) = taskd(&daemon, &["acts", "--last", "1"]);
    assert_eq!(stderr, "1 shown, and there may be more; --last N shows N\n");
    assert!(
        stdout.contains("create token") && stdout.contains("ops") && !stdout.contains("revoke"),
        "{stdout}"
    );
    for (auth, lines) in [("none", 1), ("tokens", 0)] {
        let (code, stdout, stderr) = taskd(
            &daemon,
            &["token", "create", auth, "--roles", "read", "--auth", auth],
        );
        assert_eq!(
            (code, stdout.lines().count(), stderr.lines().count()),
            (0, 1, lines),
            "{stderr}"
        );
        assert!(
            stderr.is_empty() || stderr.contains("asks for tokens only with auth = tokens"),
            "{stderr}"
        );
    }
}

#[test]
fn ports_open_to_the_network_need_tokens_or_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let check = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        command
            .args(["check-config", "--data-dir"])
            .arg(dir.path())
            .args(["--http-listen", "0.0.0.0:7600"]);
        let output = command.args(args).output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, stderr) = check(&[]);
    assert_eq!((code, stderr.lines().count()), (2, 1));
    assert!(
        stderr.contains("http_listen = 0.0.0.0:7600")
            && stderr.contains("open_without_tokens = true"),
        "{stderr}"
    );
    assert_eq!(check(&["--auth", "tokens"]).0, 0);
    assert_eq!(check(&["--open-without-tokens", "true"]).0, 0);
}

#[tokio::test]
async fn a_token_lists_and_changes_letters_of_its_queues_only() {
    let daemon = column::start(TOKENS, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let acme = token(&daemon, "acme", &["--roles", "admin", "--queues", "acme"]).await;
    let mut ids = Vec::new();
    for queue in ["acme", "other"] {
        let (_, answer) = post(
            &daemon,
            "/v1/tasks",
            &all,
            json!({"queue": queue, "key": "1"}),
        )
        .await;
        ids.push(answer["results"][0]["id"].as_str().unwrap().to_owned());
        let get = json!({"worker": "w", "queues": [queue], "wait": "30s"});
        let (_, answer) = post(&daemon, "/v1/tasks:get", &all, get).await;
        let token = &answer["tasks"][0]["lease_token"];
        let rejection = json!({"id": ids.last(), "lease_token": token, "retry": false});
        post(
            &daemon,
            "/v1/tasks:reject",
            &all,
            json!({"worker": "w", "rejections": [rejection]}),
        )
        .await;
    }
    let get = async |token: &str, path: &str| {
        call(
            &daemon,
            Method::GET,
            &format!("/v1/dead-letters{path}"),
            Some(token),
            Value::Null,
        )
        .await
    };
    until("both are dead", async || {
        get(&all, "").await.1["letters"]
            .as_array()
            .is_some_and(|all| all.len() == 2)
    })
    .await;
    for (path, want) in [
        (String::new(), 403),
        ("?queue=other".to_owned(), 403),
        ("?queue=acme".to_owned(), 200),
        (format!("/{}", ids[0]), 200),
        (format!("/{}", ids[1]), 404),
    ] {
        let (status, answer) = get(&acme, &path).await;
        assert_eq!(status, want, "{path}: {answer}");
    }
    for (chosen, want) in [
        (json!({"ids": [ids[1]]}), 403),
        (json!({"filter": {}, "yes": true}), 403),
        (json!({"filter": {"queue": "other"}, "yes": true}), 403),
        (json!({"filter": {"queue": "acme"}, "yes": true}), 200),
    ] {
        let (status, answer) = post(&daemon, "/v1/dead-letters:retry", &acme, chosen.clone()).await;
        assert_eq!(status, want, "{chosen}: {answer}");
    }
    let (_, left) = get(&all, "").await;
    assert_eq!(
        (
            left["letters"].as_array().unwrap().len(),
            &left["letters"][0]["id"]
        ),
        (1, &json!(ids[1]))
    );
    let (_, acts) = call(
        &daemon,
        Method::GET,
        "/v1/acts?limit=1",
        Some(&all),
        Value::Null,
    )
    .await;
    assert_eq!(
        (&acts["acts"][0]["who"], &acts["acts"][0]["what"]),
        (&json!("acme"), &json!("retry dead letter"))
    );
    assert!(
        acts["acts"][0]["on"].as_str().unwrap().starts_with(&ids[0]),
        "{acts}"
    );
}

#[tokio::test]
async fn a_new_token_works_with_the_next_call() {
    let daemon = column::start(TOKENS, &[]).await;
    for number in 0..20 {
        let (code, stdout, stderr) = taskd(
            &daemon,
            &["token", "create", &format!("t{number}"), "--roles", "read"],
        );
        assert_eq!(code, 0, "{stderr}");
        let token = stdout.trim_end();
        let status = if number % 2 == 0 {
            call(&daemon, Method::GET, "/v1/queues", Some(token), Value::Null)
                .await
                .0
        } else {
            let channel = Channel::from_shared(daemon.grpc())
                .unwrap()
                .connect()
                .await
                .unwrap();
            let code = grpc_code(&channel, "taskd.v1.Discovery/ListTasks", Some(token)).await;
            if code == Code::Ok {
                200
            } else {
                panic!("{number}: {code:?}")
            }
        };
        assert_eq!(status, 200, "{number}");
    }
}

#[tokio::test]
async fn strangers_with_made_up_tokens_keep_no_new_token_out() {
    let daemon = column::start(TOKENS, &[]).await;
    let stranger = async || {
        let (status, answer) = call(
            &daemon,
            Method::GET,
            "/v1/queues",
            Some("taskd_made_up"),
            Value::Null,
        )
        .await;
        assert_eq!(status, 401, "{answer}");
    };
    // More than may wait at a time.
    let crowd = async || drop(futures::future::join_all((0..200).map(|_| stranger())).await);
    let honest = async || {
        let (code, stdout, stderr) =
            taskd(&daemon, &["token", "create", "honest", "--roles", "read"]);
        assert_eq!(code, 0, "{stderr}");
        until("taskd knows the token", async || {
            call(
                &daemon,
                Method::GET,
                "/v1/queues",
                Some(stdout.trim_end()),
                Value::Null,
            )
            .await
            .0 == 200
        })
        .await;
    };
    tokio::join!(crowd(), honest());
}
