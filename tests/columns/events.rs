//! Watching tasks and queues, and inserts that wait, in a running taskd.

use std::{process::Stdio, time::Duration};

use futures::{StreamExt as _, stream::BoxStream};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::ChildStdout,
};
use tonic::Code;

use super::access;
use crate::{
    column,
    support::{daemon::Daemon, until},
};

/// No lease ends while a slow machine starts taskd anew.
const LONG_LEASES: &str = "[queues.default]\nlease = \"10m\"";

/// A stream of Server-Sent Events.
pub(crate) struct Events {
    chunks: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    text: String,
    pub(crate) last_id: String,
}

impl Events {
    /// Watches; the answer must be 200.
    pub(crate) async fn open(
        daemon: &Daemon,
        path: &str,
        last_id: &str,
        token: Option<&str>,
    ) -> Self {
        let answer = Self::ask(daemon, path, last_id, token).await;
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()["content-type"]),
            (200, &"text/event-stream".parse().unwrap())
        );
        Self {
            chunks: answer.bytes_stream().boxed(),
            text: String::new(),
            last_id: last_id.to_owned(),
        }
    }

    pub(crate) async fn ask(
        daemon: &Daemon,
        path: &str,
        last_id: &str,
        token: Option<&str>,
    ) -> reqwest::Response {
        let mut request = crate::support::http_client().get(format!("{}{path}", daemon.http()));
        if !last_id.is_empty() {
            request = request.header("last-event-id", last_id);
        }
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        request.send().await.unwrap()
    }

    pub(crate) async fn of_task(daemon: &Daemon, id: &str) -> Self {
        Self::open(daemon, &format!("/v1/tasks/{id}/events"), "", None).await
    }

    /// The name and the data of the next event; `None` at the end, or when the connection breaks.
    pub(crate) async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            while let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    event
                        .lines()
                        .find_map(|line| line.strip_prefix(name))
                        .map(|value| value.trim().to_owned())
                };
                let (id, name, data) = (field("id:"), field("event:"), field("data:"));
                self.text = rest.to_owned();
                if let Some(id) = id {
                    self.last_id = id;
                }
                // Others are comments, and the wait before the next connection.
                if let (Some(name), Some(data)) = (name, data) {
                    return Some((name, serde_json::from_str(&data).unwrap()));
                }
            }
            let chunk = tokio::time::timeout(Duration::from_secs(60), self.chunks.next())
                .await
                .unwrap();
            self.text += std::str::from_utf8(&chunk?.ok()?).unwrap();
        }
    }

    /// The next status.
    pub(crate) async fn status(&mut self) -> String {
        let (name, data) = self.next().await.expect("an event");
        assert_eq!(name, "status", "{data}");
        data["status"].as_str().unwrap().to_owned()
    }

    /// Reads until this status, without those before it.
    pub(crate) async fn until(&mut self, status: &str) {
        while self.status().await != status {}
    }

    /// All statuses to the end.
    pub(crate) async fn rest(&mut self) -> Vec<String> {
        let mut statuses = Vec::new();
        while let Some((name, data)) = self.next().await {
            assert_eq!(name, "status", "{data}");
            statuses.push(data["status"].as_str().unwrap().to_owned());
        }
        statuses
    }
}

/// The order in which a task that nobody fails goes.
fn is_in_order(statuses: &[String]) -> bool {
    let place = |status: &String| {
        ["PENDING", "DELAYED", "QUEUED", "ASSIGNED", "COMPLETED"]
            .iter()
            .position(|known| known == status)
    };
    statuses
        .windows(2)
        .all(|pair| place(&pair[0]) < place(&pair[1]))
}

/// No worker has it, perhaps because it is on its way into the queue.
fn is_waiting(status: &Value) -> bool {
    status == "PENDING" || status == "QUEUED"
}

async fn one(daemon: &Daemon, task: Value) -> String {
    daemon.insert(&[task]).await.remove(0)
}

async fn reject(daemon: &Daemon, worker: &str, task: &Value, retry: bool) {
    let rejection = json!({"id": task["id"], "lease_token": task["lease_token"], "retry": retry, "reason": "no"});
    let (status, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": worker, "rejections": [rejection]}),
        )
        .await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
}

#[tokio::test]
async fn a_watcher_sees_the_status_of_now_and_each_change_to_the_end() {
    let daemon = column::start(LONG_LEASES, &[]).await;
    let id = one(&daemon, json!({"queue": "q", "key": "k"})).await;
    let path = format!("/v1/tasks/{id}/events");
    let mut events = Events::of_task(&daemon, &id).await;
    let mut second = Events::of_task(&daemon, &id).await;
    let first = events.status().await;
    assert!(["PENDING", "QUEUED"].contains(&&first[..]), "{first}");
    let mut seen = vec![first];
    let leased = daemon.lease_all("w", "q", 1).await;
    while seen.last().unwrap() != "ASSIGNED" {
        seen.push(events.status().await);
    }
    let held = events.last_id.clone();
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    seen.extend(events.rest().await);
    assert!(
        is_in_order(&seen) && seen.ends_with(&["ASSIGNED".into(), "COMPLETED".into()]),
        "{seen:?}"
    );
    // SQL has the end that is told, and the result with it.
    let (_, results) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
    assert_eq!(results["results"][0]["worker"], "w");
    let all = second.rest().await;
    assert!(
        is_in_order(&all) && all.last().unwrap() == "COMPLETED",
        "{all:?}"
    );

    // After a cut: what comes behind the last event.
    assert_eq!(
        Events::open(&daemon, &path, &held, None).await.rest().await,
        ["COMPLETED"]
    );
    assert_eq!(
        Events::ask(&daemon, &path, &events.last_id, None)
            .await
            .status()
            .as_u16(),
        204
    );
    assert_eq!(
        Events::open(&daemon, &path, "", None).await.rest().await,
        ["COMPLETED"],
        "a task that is final"
    );
    let query = format!("{path}?last_event_id={}", events.last_id);
    assert_eq!(
        Events::ask(&daemon, &query, "", None)
            .await
            .status()
            .as_u16(),
        204
    );
    for (path, last_id, status) in [
        (&path[..], "yesterday", 400),
        ("/v1/tasks/x/events", "", 400),
        (
            "/v1/tasks/0190a5c2-0000-7000-8000-000000000000/events",
            "",
            404,
        ),
        ("/v1/events", "", 400),
        ("/v1/events?queue=a%20b", "", 400),
        ("/v1/events?queue=q&since=1", "", 400),
    ] {
        assert_eq!(
            Events::ask(&daemon, path, last_id, None)
                .await
                .status()
                .as_u16(),
            status,
            "{path} {last_id}"
        );
    }
}

#[tokio::test]
async fn failures_deaths_and_cancels_are_told() {
    let config = "[queues.q]\nbackoff = [\"10m\"]\nmax_attempts = 2\nlease = \"10m\"";
    let daemon = column::start(config, &[]).await;
    let id = one(&daemon, json!({"queue": "q", "key": "fails"})).await;
    let mut events = Events::of_task(&daemon, &id).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    events.until("ASSIGNED").await;
    reject(&daemon, "w", &leased[0], true).await;
    assert_eq!(events.status().await, "DELAYED");
    let (_, cancelled) = daemon.post("/v1/tasks:cancel", &json!({"ids": [id]})).await;
    assert_eq!(cancelled["results"][0]["status"], "OK", "{cancelled}");
    assert_eq!(events.rest().await, ["CANCELLED"]);

    let id = one(&daemon, json!({"queue": "q", "key": "dies"})).await;
    let mut events = Events::of_task(&daemon, &id).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    reject(&daemon, "w", &leased[0], false).await;
    let rest = events.rest().await;
    assert_eq!(rest.last().unwrap(), "DEAD", "{rest:?}");

    let id = one(
        &daemon,
        json!({"queue": "q", "key": "later", "delay": "1h"}),
    )
    .await;
    let mut events = Events::of_task(&daemon, &id).await;
    assert_eq!(events.status().await, "DELAYED");
    let (_, cancelled) = daemon.post("/v1/tasks:cancel", &json!({"ids": [id]})).await;
    assert_eq!(cancelled["results"][0]["status"], "OK", "{cancelled}");
    assert_eq!(events.rest().await, ["CANCELLED"]);
}

/// All watched tasks are read once a second. Some of so many die between Redis and SQL then.
#[tokio::test]
async fn a_task_that_nobody_had_is_never_assigned_on_its_way_to_its_end() {
    let daemon = column::start(LONG_LEASES, &[]).await;
    let within = |n: u64| format!("{}ms", 6000 + 50 * n);
    let task = |n: u64| json!({"queue": "q", "key": n.to_string(), "finish_within": within(n)});
    let ids = daemon.insert(&(0..40).map(task).collect::<Vec<_>>()).await;
    let mut watches = Vec::new();
    for id in &ids {
        watches.push(Events::of_task(&daemon, id).await);
    }
    let mut watched = 0;
    for events in &mut watches {
        // A slow machine may begin a watch behind the deadline.
        let first = events.status().await;
        watched += u32::from(first != "DEAD");
        let rest = events.rest().await;
        assert_eq!(rest.last().unwrap_or(&first), "DEAD");
        assert!(!rest.contains(&"ASSIGNED".to_owned()), "{first}, {rest:?}");
    }
    assert!(watched > 0, "all tasks died before their watches began");
}

#[tokio::test]
async fn a_task_of_three_ends_with_its_third_worker() {
    let daemon = column::start(LONG_LEASES, &[]).await;
    let id = one(&daemon, json!({"queue": "q", "key": "k", "replicas": 3})).await;
    let mut events = Events::of_task(&daemon, &id).await;
    for worker in ["a", "b"] {
        let leased = daemon.lease_all(worker, "q", 1).await;
        events.until("ASSIGNED").await;
        assert_eq!(daemon.complete(worker, &leased).await, ["OK"]);
        // A replica is left, and nobody has it.
        assert_eq!(events.status().await, "QUEUED");
    }
    let leased = daemon.lease_all("c", "q", 1).await;
    assert_eq!(events.status().await, "ASSIGNED");
    assert_eq!(daemon.complete("c", &leased).await, ["OK"]);
    assert_eq!(events.rest().await, ["COMPLETED"]);
}

#[tokio::test]
async fn a_watch_goes_on_behind_the_death_of_taskd_and_of_redis() {
    let mut daemon = column::start(LONG_LEASES, &[]).await;
    let id = one(&daemon, json!({"queue": "q", "key": "k"})).await;
    let path = format!("/v1/tasks/{id}/events");
    let mut events = Events::of_task(&daemon, &id).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    events.until("ASSIGNED").await;
    daemon.kill9();
    assert!(events.next().await.is_none());
    daemon.start_again();
    daemon.ready().await;
    let mut events = Events::open(&daemon, &path, &events.last_id, None).await;
    // taskd's own Redis starts anew. The watch stays open meanwhile, and what its channel lost is
    // read; or taskd starts over, and says so.
    daemon.kill9_redis();
    until("the completion is taken", async || {
        let completion = json!({"id": id, "lease_token": leased[0]["lease_token"], "result": 1});
        let body = json!({"worker": "w", "completions": [completion]});
        let answer = daemon.try_post("/v1/tasks:complete", &body).await;
        answer
            .is_some_and(|(status, answer)| status == 200 && answer["results"][0]["status"] == "OK")
    })
    .await;
    let mut watches = 1;
    loop {
        match events.next().await {
            Some((_, data)) if data["status"] == "COMPLETED" => break,
            Some(_) => {}
            None => {
                watches += 1;
                assert!(watches < 5, "each watch ends before the task does");
                let last_id = events.last_id;
                until("taskd takes watchers", async || {
                    Events::ask(&daemon, &path, &last_id, None)
                        .await
                        .status()
                        .as_u16()
                        == 200
                })
                .await;
                events = Events::open(&daemon, &path, &last_id, None).await;
            }
        }
    }
}

#[tokio::test]
async fn a_stop_and_a_revoked_token_end_watches_with_a_word() {
    let mut daemon = column::start(access::TOKENS, &[]).await;
    let all = access::token(&daemon, "all", &["--roles", "admin"]).await;
    let scoped = access::token(&daemon, "scoped", &["--roles", "read", "--queues", "other"]).await;
    let insert_only = access::token(&daemon, "inserts", &["--roles", "insert"]).await;
    let doomed = access::token(&daemon, "doomed", &["--roles", "read"]).await;
    let (_, answer) = access::post(
        &daemon,
        "/v1/tasks",
        &all,
        json!([{"queue": "q", "key": "k"}]),
    )
    .await;
    let id = answer["results"][0]["id"].as_str().unwrap();
    let path = format!("/v1/tasks/{id}/events");
    assert_eq!(
        Events::ask(&daemon, &path, "", Some(&scoped))
            .await
            .status()
            .as_u16(),
        404
    );
    assert_eq!(
        Events::ask(&daemon, "/v1/events?queue=q", "", Some(&scoped))
            .await
            .status()
            .as_u16(),
        403
    );
    let task = json!({"queue": "q", "key": "waits"});
    let (status, problem) = access::post(&daemon, "/v1/tasks?wait=1s", &insert_only, task).await;
    assert!(
        status == 403 && problem["detail"].as_str().unwrap().contains("read"),
        "{problem}"
    );

    let mut of_doomed = Events::open(&daemon, &path, "", Some(&doomed)).await;
    let mut of_queue = Events::open(&daemon, "/v1/events?queue=q", "", Some(&all)).await;
    let mut of_busy = Events::open(&daemon, "/v1/events?queue=busy", "", Some(&doomed)).await;
    let mut of_all = Events::open(&daemon, &path, "", Some(&all)).await;
    let end = async |events: &mut Events| loop {
        let (name, data) = events.next().await.expect("an event end");
        if name == "end" {
            assert!(events.next().await.is_none());
            return data["reason"].as_str().unwrap().to_owned();
        }
    };
    let revoked = async {
        of_doomed.status().await;
        of_busy.next().await.expect("news");
        let args = ["token", "revoke", "doomed"]
            .map(str::to_owned)
            .into_iter()
            .chain(daemon.database());
        let revoked = tokio::process::Command::new(env!("CARGO_BIN_EXE_taskd"))
            .args(args)
            .output()
            .await
            .unwrap();
        assert!(revoked.status.success(), "{revoked:?}");
        assert_eq!(end(&mut of_doomed).await, "UNAUTHENTICATED");
        assert_eq!(end(&mut of_busy).await, "UNAUTHENTICATED");
    };
    // There is always news of this queue.
    let knock = async |name: &str| {
        for number in 0..1_000 {
            let task = json!([{"queue": "busy", "key": format!("{name}-{number}")}]);
            access::post(&daemon, "/v1/tasks", &all, task).await;
        }
    };
    tokio::select! {
        () = revoked => {}
        _ = async { tokio::join!(knock("a"), knock("b"), knock("c")) } => panic!("a watch goes on"),
    }
    daemon.signal(Signal::SIGTERM);
    assert_eq!(
        (end(&mut of_all).await, end(&mut of_queue).await),
        ("STOPPING".to_owned(), "STOPPING".to_owned())
    );
    assert!(daemon.ended().await.success());
}

#[tokio::test]
async fn a_queue_is_watched_and_a_watcher_that_comes_again_misses_nothing() {
    let daemon = column::start("", &[]).await;
    let path = "/v1/events?queue=q";
    let mut events = Events::open(&daemon, path, "", None).await;
    let mut other = Events::open(&daemon, "/v1/events?queue=other", "", None).await;
    // The queue is heard when the answer begins: no gap comes first, and nothing is missing.
    let first = one(&daemon, json!({"queue": "q", "key": "first"})).await;
    let (name, data) = events.next().await.unwrap();
    assert_eq!(
        (&name[..], &data["id"]),
        ("status", &json!(first)),
        "{data}"
    );
    let leased = daemon.lease_all("w", "q", 1).await;
    daemon.complete("w", &leased).await;

    let ids = daemon
        .insert(&[
            json!({"queue": "q", "key": "a"}),
            json!({"queue": "q", "key": "b"}),
        ])
        .await;
    let mut seen: [Vec<String>; 2] = Default::default();
    let mut cut = None;
    let leased = daemon.lease_all("w", "q", 2).await;
    daemon.complete("w", &leased).await;
    while seen
        .iter()
        .any(|seen| seen.last().is_none_or(|status| status != "COMPLETED"))
    {
        let (name, data) = events.next().await.unwrap();
        assert_eq!(
            (&name[..], &data["queue"]),
            ("status", &json!("q")),
            "{data}"
        );
        if let Some(place) = ids.iter().position(|id| data["id"] == **id) {
            seen[place].push(data["status"].as_str().unwrap().to_owned());
            cut.get_or_insert((events.last_id.clone(), data["id"].clone()));
        }
    }
    assert!(seen.iter().all(|seen| is_in_order(seen)), "{seen:?}");
    let (last_id, _) = cut.unwrap();
    let count = seen.iter().map(Vec::len).sum::<usize>() - 1;
    let mut again = Events::open(&daemon, path, &last_id, None).await;
    let mut repeated = Vec::new();
    while repeated.len() < count {
        let (name, data) = again.next().await.unwrap();
        assert_eq!(name, "status", "{data}");
        if ids.iter().any(|id| data["id"] == **id) {
            repeated.push(data);
        }
    }
    assert!(repeated.iter().any(|data| data["status"] == "COMPLETED"));
    // An event that this process never told.
    let unknown = format!("1-DEAD-{}", ids[0]);
    assert_eq!(
        Events::open(&daemon, path, &unknown, None)
            .await
            .next()
            .await
            .unwrap()
            .0,
        "gap"
    );
    one(&daemon, json!({"queue": "other", "key": "k"})).await;
    let (name, data) = other.next().await.unwrap();
    assert_eq!(
        (&name[..], &data["queue"]),
        ("status", &json!("other")),
        "{data}"
    );
}

#[tokio::test]
async fn an_insert_waits_for_results_and_answers_what_it_has_when_the_time_is_over() {
    let daemon = column::start("", &[]).await;
    let tasks = json!([{"queue": "q", "key": "a"}, {"queue": "r", "key": "b"}, {"queue": "q", "key": "a"}, {"queue": "?"}]);
    let work = async {
        for queue in ["q", "r"] {
            let leased = daemon.lease_all("w", queue, 1).await;
            assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
        }
    };
    let ((status, answer), ()) = tokio::join!(daemon.post("/v1/tasks?wait=50s", &tasks), work);
    assert_eq!(status, 200, "{answer}");
    let results = answer["results"].as_array().unwrap();
    let statuses: Vec<_> = results
        .iter()
        .map(|one| one["status"].as_str().unwrap())
        .collect();
    assert_eq!(statuses, ["CREATED", "CREATED", "DUPLICATE", "REJECTED"]);
    for one in &results[..2] {
        assert_eq!(
            (&one["task_status"], &one["results"][0]["result"]),
            (&json!("COMPLETED"), &json!("w")),
            "{one}"
        );
    }
    // The first answer of a task has its results.
    assert!(
        results[2]["task_status"] == "COMPLETED" && results[2]["results"].is_null(),
        "{answer}"
    );
    assert!(
        results[3]["task_status"].is_null() && results[3]["results"].is_null(),
        "{answer}"
    );

    // A duplicate of a task that is done is answered at once, and a task that nobody does when the
    // time is over.
    let tasks = json!([{"queue": "q", "key": "a"}, {"queue": "q", "key": "slow"}]);
    let (_, answer) = daemon.post("/v1/tasks?wait=500ms", &tasks).await;
    let of = |place: usize| answer["results"][place]["task_status"].clone();
    assert!(of(0) == "COMPLETED" && is_waiting(&of(1)), "{answer}");
    let (status, single) = daemon
        .post("/v1/tasks?wait=0s", &json!({"queue": "q", "key": "slow"}))
        .await;
    assert!(
        status == 200 && is_waiting(&single["results"][0]["task_status"]),
        "{single}"
    );
    for (path, body, want) in [
        (
            "/v1/tasks?wait=soon",
            json!({"queue": "q", "key": "x"}),
            400,
        ),
        (
            "/v1/tasks?weight=1s",
            json!({"queue": "q", "key": "x"}),
            400,
        ),
        ("/v1/tasks?wait=1s", json!({"queue": "?"}), 422),
    ] {
        assert_eq!(daemon.post(path, &body).await.0, want, "{path}");
    }
    let lines = daemon
        .post_text(
            "/v1/tasks?wait=1s",
            "application/x-ndjson",
            "{\"queue\":\"q\",\"key\":\"x\"}",
        )
        .await;
    assert_eq!(lines.0, 400, "{lines:?}");
}

/// They share what their process reads: no caller asks SQL by itself.
#[tokio::test(flavor = "multi_thread")]
async fn many_inserts_wait_at_once() {
    const CALLERS: usize = 200;
    let daemon = column::start("", &[]).await;
    let waits = (0..CALLERS).map(|n| {
        let daemon = &daemon;
        async move {
            daemon
                .post(
                    "/v1/tasks?wait=50s",
                    &json!({"queue": "q", "key": n.to_string()}),
                )
                .await
        }
    });
    let (answers, _) = tokio::join!(
        futures::future::join_all(waits),
        daemon.work("w", "q", CALLERS)
    );
    for (status, answer) in answers {
        assert_eq!(
            (status, &answer["results"][0]["task_status"]),
            (200, &json!("COMPLETED")),
            "{answer}"
        );
    }
    until("no watcher is left", async || {
        let (_, metrics) = daemon.get("/metrics").await;
        metrics
            .as_str()
            .unwrap()
            .lines()
            .any(|line| line == "taskd_events_watchers 0")
    })
    .await;
}

#[tokio::test]
async fn grpc_watches_and_waits_too() {
    let daemon = column::start(LONG_LEASES, &[]).await;
    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let task = pb::NewTask {
        queue: "q".into(),
        key: "k".into(),
        ..Default::default()
    };
    let wait = Some(prost_types::Duration {
        seconds: 1,
        nanos: 0,
    });
    let inserted = client
        .insert_tasks(pb::InsertTasksRequest {
            tasks: vec![task],
            wait,
            ..Default::default()
        })
        .await
        .unwrap();
    let result = inserted.into_inner().results.remove(0);
    assert!(
        is_waiting(&json!(
            result
                .task_status()
                .as_str_name()
                .trim_start_matches("TASK_STATUS_")
        )),
        "{result:?}"
    );

    let request = pb::WatchTaskRequest {
        id: result.id.clone(),
        last_event_id: String::new(),
    };
    let mut events = client.watch_task(request).await.unwrap().into_inner();
    let leased = daemon.lease_all("w", "q", 1).await;
    let assigned = loop {
        let event = events.message().await.unwrap().unwrap();
        if event.status() == pb::TaskStatus::Assigned {
            break event;
        }
    };
    assert_eq!(&assigned.queue[..], "q");
    daemon.complete("w", &leased).await;
    assert_eq!(
        events.message().await.unwrap().unwrap().status(),
        pb::TaskStatus::Completed
    );
    assert!(events.message().await.unwrap().is_none());

    let request = pb::WatchTaskRequest {
        id: result.id,
        last_event_id: assigned.event_id,
    };
    let mut events = client.watch_task(request).await.unwrap().into_inner();
    assert_eq!(
        events.message().await.unwrap().unwrap().status(),
        pb::TaskStatus::Completed
    );
    let unknown = pb::WatchTaskRequest {
        id: "0190a5c2-0000-7000-8000-000000000000".into(),
        ..Default::default()
    };
    assert_eq!(
        client.watch_task(unknown).await.unwrap_err().code(),
        Code::NotFound
    );
    let wrong = pb::WatchQueueRequest {
        queue: "a b".into(),
        ..Default::default()
    };
    assert_eq!(
        client.watch_queue(wrong).await.unwrap_err().code(),
        Code::InvalidArgument
    );
}

fn taskd(daemon: &Daemon, args: &[&str]) -> tokio::process::Command {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http())
        .args(args)
        .kill_on_drop(true);
    command
}

/// The next line that a command prints, as JSON; `None` behind the last one.
async fn next_line(stdout: &mut Lines<BufReader<ChildStdout>>) -> Option<Value> {
    let line = tokio::time::timeout(Duration::from_secs(60), stdout.next_line())
        .await
        .expect("a line, or the end");
    line.unwrap()
        .map(|line| serde_json::from_str(&line).unwrap())
}

#[tokio::test]
async fn the_commands_watch_and_wait() {
    let mut daemon = column::start(LONG_LEASES, &[]).await;
    let id = one(&daemon, json!({"queue": "q", "key": "k"})).await;
    let mut watch = taskd(&daemon, &["watch", "q", "k"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut lines = vec![next_line(&mut stdout).await.expect("the status of now")];
    let leased = daemon.lease_all("w", "q", 1).await;
    // The command goes on with the taskd that starts again.
    daemon.kill9_and_restart();
    daemon.ready().await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    while let Some(line) = next_line(&mut stdout).await {
        lines.push(line);
    }
    assert_eq!(watch.wait().await.unwrap().code(), Some(0), "{lines:?}");
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["id"], &last["status"], &last["queue"]),
        (&json!(id), &json!("COMPLETED"), &json!("q"))
    );

    let unknown = "0190a5c2-0000-7000-8000-000000000000";
    for (args, code, says) in [
        (&["watch", unknown][..], 1, "there is no task"),
        (&["watch", "q", "not there"], 1, "has, and had, no task"),
        (&["watch", "--queue", "a b"], 2, "contains ' '"),
        (&["watch"], 2, "required"),
    ] {
        let output = taskd(&daemon, args).output().await.unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(code) && stderr.contains(says),
            "{args:?}: {:?} {stderr}",
            output.status
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "a\nb\n").unwrap();
    let path = file.path().to_str().unwrap();
    let insert = taskd(&daemon, &["insert", "--queue", "r", "--wait", "50s", path])
        .stdout(Stdio::piped())
        .spawn();
    daemon.work("w", "r", 2).await;
    let output = insert.unwrap().wait_with_output().await.unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (output.status.code(), lines.len()),
        (Some(0), 2),
        "{lines:?}"
    );
    for line in &lines {
        assert_eq!(
            (&line["status"], &line["results"][0]["result"]),
            (&json!("COMPLETED"), &json!("w")),
            "{line}"
        );
    }
    std::fs::write(file.path(), "nobody does it\n").unwrap();
    let output = taskd(&daemon, &["insert", "--queue", "r", "--wait", "1s", path])
        .output()
        .await
        .unwrap();
    let line: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        output.status.code() == Some(1) && is_waiting(&line["status"]),
        "{line}"
    );
}

#[tokio::test]
async fn an_answer_over_grpc_has_as_many_results_as_a_client_takes() {
    let daemon = column::start(LONG_LEASES, &[]).await;
    let keys: Vec<String> = (0..4).map(|n| n.to_string()).collect();
    daemon
        .insert(
            &keys
                .iter()
                .map(|key| json!({"queue": "q", "key": key}))
                .collect::<Vec<_>>(),
        )
        .await;
    let result = "x".repeat(1_000_000);
    let completion = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "result": result});
    let leased = daemon.lease_all("w", "q", 4).await;
    let report =
        json!({"worker": "w", "completions": leased.iter().map(completion).collect::<Vec<_>>()});
    assert_eq!(daemon.post("/v1/tasks:complete", &report).await.0, 200);

    let task = |key: &String| pb::NewTask {
        queue: "q".into(),
        key: key.clone().into(),
        ..Default::default()
    };
    let tasks: Vec<_> = keys.iter().map(task).collect();
    let wait = Some(prost_types::Duration {
        seconds: 60,
        nanos: 0,
    });
    let client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let results = async |max_bytes| {
        let request = pb::InsertTasksRequest {
            tasks: tasks.clone(),
            wait,
            max_bytes,
            ..Default::default()
        };
        let mut client = client.clone().max_decoding_message_size(if max_bytes == 0 {
            4 << 20
        } else {
            64 << 20
        });
        let answer = client.insert_tasks(request).await.unwrap().into_inner();
        assert!(
            answer
                .results
                .iter()
                .all(|one| one.task_status() == pb::TaskStatus::Completed)
        );
        answer
            .results
            .iter()
            .map(|one| one.results.len())
            .collect::<Vec<_>>()
    };
    assert_eq!(results(0).await, [1, 1, 1, 0], "as many as fit into 4 MiB");
    assert_eq!(results(1 << 20).await, [1, 0, 0, 0]);
    assert_eq!(results(u64::MAX).await, [1, 1, 1, 1]);
}
