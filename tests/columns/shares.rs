//! What a token may hold of that which all callers share, and how all of it ends with the token.

use futures::{
    FutureExt as _,
    future::{BoxFuture, join_all},
};
use reqwest::Method;
use serde_json::{Value, json};
use taskd::wire::pb::{
    self, discovery_client::DiscoveryClient, tasks_client::TasksClient, trees_client::TreesClient,
};
use tokio::io::AsyncWriteExt as _;
use tonic::{Code, Request, Status};

use super::access::{TOKENS, call, post, taskd, token};
use crate::{
    column,
    support::{
        PATIENCE,
        daemon::Daemon,
        http_client,
        session::{Worker, channel, long_opening},
        until,
    },
};

/// A wait that no test sees the end of.
const LONG: i64 = 3600;

fn with<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

fn long() -> Option<prost_types::Duration> {
    Some(prost_types::Duration {
        seconds: LONG,
        nanos: 0,
    })
}

fn poll() -> pb::GetTasksRequest {
    pb::GetTasksRequest {
        worker: "w".into(),
        queues: vec!["a.none".into()],
        wait: long(),
        ..Default::default()
    }
}

/// The calls that wait now.
async fn waiting(daemon: &Daemon, admin: &str) -> usize {
    let request = http_client()
        .get(format!("{}/metrics", daemon.http()))
        .bearer_auth(admin);
    let text = request.send().await.unwrap().text().await.unwrap();
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix("taskd_waiting_calls "));
    value.map_or(0, |value| value.parse().unwrap())
}

async fn session(daemon: &Daemon, token: &str) -> String {
    let open = json!({"worker": "w", "queues": ["a.none"], "timeout": "10m"});
    let (status, answer) = post(daemon, "/v1/sessions:open", token, open).await;
    assert_eq!(status, 200, "{answer}");
    answer["session"].as_str().unwrap().to_owned()
}

fn code(answer: Result<(), Status>) -> String {
    answer.map_or_else(
        |status| format!("{:?}", status.code()),
        |()| "Ok".to_owned(),
    )
}

/// How a stream of events ends.
async fn last(events: &mut tonic::Streaming<pb::TaskEvent>) -> String {
    loop {
        match events.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return "Ok".to_owned(),
            Err(status) => return code(Err(status)),
        }
    }
}

/// The events of an answer to the end, or the status of its refusal.
async fn events(daemon: &Daemon, token: &str, path: String) -> String {
    let request = http_client()
        .get(format!("{}{path}", daemon.http()))
        .bearer_auth(token);
    let answer = request.send().await.unwrap();
    match answer.status().as_u16() {
        200 => answer.text().await.unwrap(),
        other => other.to_string(),
    }
}

/// The calls that wait: each with its name, and how it ends. The token needs all roles, and a queue
/// `a.q`.
fn calls<'a>(
    daemon: &'a Daemon,
    token: &'a str,
    sessions: &'a [String; 2],
    task: &'a str,
) -> Vec<(&'static str, BoxFuture<'a, String>)> {
    let http =
        async move |path: &str, body: Value| post(daemon, path, token, body).await.0.to_string();
    let wait = format!("{LONG}s");
    let get = json!({"worker": "w", "queues": ["a.none"], "wait": wait});
    let want = json!({"worker": "w", "session": sessions[0], "want": 1, "wait": wait});
    let insert = json!({"queue": "a.q", "key": "http"});
    let lines = async move {
        let (lines, mut to_insert) = tokio::io::duplex(1 << 10);
        let body = reqwest::Body::wrap_stream(tokio_util::io::ReaderStream::new(lines));
        let request = http_client()
            .post(format!("{}/v1/tasks", daemon.http()))
            .bearer_auth(token);
        let request = request
            .header("content-type", "application/x-ndjson")
            .body(body);
        to_insert
            .write_all(b"{\"queue\": \"a.q\", \"key\": \"line\"}\n")
            .await
            .unwrap();
        let answer = request.send().await.unwrap();
        match answer.status().as_u16() {
            200 => answer.text().await.unwrap(),
            other => other.to_string(),
        }
    };
    let tasks = async move || TasksClient::new(channel(daemon.grpc_port()).await);
    let discovery = async move || DiscoveryClient::new(channel(daemon.grpc_port()).await);
    let grpc_get =
        async move { code(tasks().await.get_tasks(with(token, poll())).await.map(drop)) };
    let grpc_want = async move {
        let session = sessions[1].clone();
        let want = pb::WantTasksRequest {
            worker: "w".into(),
            session,
            want: 1,
            wait: long(),
        };
        code(tasks().await.want_tasks(with(token, want)).await.map(drop))
    };
    let grpc_insert = async move {
        let task = pb::NewTask {
            queue: "a.q".into(),
            key: "grpc".into(),
            ..Default::default()
        };
        let insert = pb::InsertTasksRequest {
            tasks: vec![task],
            wait: long(),
            ..Default::default()
        };
        code(
            discovery()
                .await
                .insert_tasks(with(token, insert))
                .await
                .map(drop),
        )
    };
    let watch_task = async move {
        let watch = pb::WatchTaskRequest {
            id: task.into(),
            ..Default::default()
        };
        let mut events = match discovery().await.watch_task(with(token, watch)).await {
            Ok(events) => events.into_inner(),
            Err(status) => return code(Err(status)),
        };
        last(&mut events).await
    };
    let trees = async move || TreesClient::new(channel(daemon.grpc_port()).await);
    let wait_for_tree = async move {
        let wait = pb::GetTreeRequest {
            id: task.into(),
            wait: long(),
        };
        code(trees().await.get_tree(with(token, wait)).await.map(drop))
    };
    let watch_tree = async move {
        let watch = pb::WatchTreeRequest { id: task.into() };
        let mut states = match trees().await.watch_tree(with(token, watch)).await {
            Ok(states) => states.into_inner(),
            Err(status) => return code(Err(status)),
        };
        loop {
            match states.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return "Ok".to_owned(),
                Err(status) => return code(Err(status)),
            }
        }
    };
    let http_tree = async move {
        let request = http_client()
            .get(format!("{}/v1/trees/{task}?wait={LONG}s", daemon.http()))
            .bearer_auth(token);
        request.send().await.unwrap().status().as_u16().to_string()
    };
    let watch_queue = async move {
        let watch = pb::WatchQueueRequest {
            queue: "a.q".into(),
            ..Default::default()
        };
        let mut events = match discovery().await.watch_queue(with(token, watch)).await {
            Ok(events) => events.into_inner(),
            Err(status) => return code(Err(status)),
        };
        last(&mut events).await
    };
    vec![
        (
            "HTTP get",
            async move { http("/v1/tasks:get", get).await }.boxed(),
        ),
        (
            "HTTP want",
            async move { http("/v1/sessions:want", want).await }.boxed(),
        ),
        (
            "HTTP insert",
            async move { http(&format!("/v1/tasks?wait={LONG}s"), insert).await }.boxed(),
        ),
        ("HTTP lines", lines.boxed()),
        (
            "HTTP events of a task",
            events(daemon, token, format!("/v1/tasks/{task}/events")).boxed(),
        ),
        (
            "HTTP events of a queue",
            events(daemon, token, "/v1/events?queue=a.q".to_owned()).boxed(),
        ),
        ("HTTP wait for a tree", http_tree.boxed()),
        (
            "HTTP events of a tree",
            events(daemon, token, format!("/v1/trees/{task}/events")).boxed(),
        ),
        ("gRPC get", grpc_get.boxed()),
        ("gRPC want", grpc_want.boxed()),
        ("gRPC insert", grpc_insert.boxed()),
        ("gRPC events of a task", watch_task.boxed()),
        ("gRPC events of a queue", watch_queue.boxed()),
        ("gRPC wait for a tree", wait_for_tree.boxed()),
        ("gRPC events of a tree", watch_tree.boxed()),
    ]
}

const CONFIG: &str = "auth = \"tokens\"\nmax_wait = \"1h\"\n";
const ALL_ROLES: &str = "insert,work,read";

/// A task that nobody does, the root of a tree.
async fn task(daemon: &Daemon, admin: &str) -> String {
    let (_, answer) = post(
        daemon,
        "/v1/tasks",
        admin,
        json!({"queue": "a.q", "key": "watched", "tree": "new"}),
    )
    .await;
    answer["results"][0]["id"].as_str().unwrap().to_owned()
}

/// The calls end long before their time, and say why where a call can fail after it did something.
#[tokio::test]
async fn what_waits_ends_when_its_token_is_revoked_or_expires() {
    let mut daemon = column::start(CONFIG, &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let task = task(&daemon, &admin).await;
    let own = token(&daemon, "own", &["--roles", ALL_ROLES, "--queues", "a.*"]).await;
    let sessions = [session(&daemon, &own).await, session(&daemon, &own).await];
    let mut worker = Worker::open_with(
        daemon.grpc_port(),
        in_queue(long_opening("v", 1)),
        Some(&own),
    )
    .await
    .unwrap();
    let (names, calls): (Vec<_>, Vec<_>) =
        calls(&daemon, &own, &sessions, &task).into_iter().unzip();
    let count = calls.len();
    let revoke = async {
        until("all calls wait", async || {
            waiting(&daemon, &admin).await == count
        })
        .await;
        assert_eq!(taskd(&daemon, &["token", "revoke", "own"]).0, 0);
    };
    let ends = async { tokio::join!(join_all(calls), revoke).0 };
    let ends = tokio::time::timeout(PATIENCE, ends)
        .await
        .expect("every call ends with its token");
    for (name, end) in names.iter().zip(ends) {
        let wanted = match *name {
            // The task is stored, so its insert is answered.
            "HTTP insert" => "200",
            "gRPC insert" => "Ok",
            "HTTP lines" => "TRY_LATER",
            of_events if of_events.starts_with("HTTP events of") => "UNAUTHENTICATED",
            of_grpc if of_grpc.starts_with("gRPC") => "Unauthenticated",
            _ => "401",
        };
        assert!(end.contains(wanted), "{name}: {end}");
    }
    // Frames of before the end may come first.
    let ended = async { while let Ok(Some(_)) = worker.read().await {} };
    tokio::time::timeout(PATIENCE, ended)
        .await
        .expect("the stream ends");
    until("nobody waits", async || waiting(&daemon, &admin).await == 0).await;
    // The same at the time at which a token expires. It may come before the calls do.
    let expires = token(
        &daemon,
        "expires",
        &["--roles", ALL_ROLES, "--queues", "a.*", "--expires", "3s"],
    )
    .await;
    let get = json!({"worker": "w", "queues": ["a.none"], "wait": format!("{LONG}s")});
    let over_grpc = async {
        let channel = channel(daemon.grpc_port()).await;
        code(
            TasksClient::new(channel)
                .get_tasks(with(&expires, poll()))
                .await
                .map(drop),
        )
    };
    let both = async { tokio::join!(post(&daemon, "/v1/tasks:get", &expires, get), over_grpc) };
    let ((status, _), code) = tokio::time::timeout(PATIENCE, both)
        .await
        .expect("both end");
    assert_eq!((status, code.as_str()), (401, "Unauthenticated"));
    assert!(daemon.stop().await.success());
}

fn in_queue(open: pb::OpenSession) -> pb::OpenSession {
    pb::OpenSession {
        queues: vec!["a.none".into()],
        ..open
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restricted_token_leaves_half_of_the_waits() {
    const HALF: usize = 10_000;
    let mut daemon = column::start(CONFIG, &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let own = token(&daemon, "own", &["--roles", ALL_ROLES, "--queues", "a.*"]).await;
    let task = task(&daemon, &admin).await;
    let sessions = [session(&daemon, &own).await, session(&daemon, &own).await];
    let mut polls = tokio::task::JoinSet::new();
    for _ in 0..10 {
        // Their own time-out would be that of the channels of other tests.
        let channel = tonic::transport::Channel::from_shared(daemon.grpc())
            .unwrap()
            .connect()
            .await
            .unwrap();
        for _ in 0..HALF / 10 {
            let (mut client, own) = (TasksClient::new(channel.clone()), own.clone());
            polls.spawn(async move { drop(client.get_tasks(with(&own, poll())).await) });
        }
    }
    until("all of them wait", async || {
        waiting(&daemon, &admin).await == HALF
    })
    .await;
    for (name, end) in calls(&daemon, &own, &sessions, &task) {
        let end = tokio::time::timeout(PATIENCE, end)
            .await
            .expect("an answer at once");
        let wanted = if name.starts_with("gRPC") {
            "ResourceExhausted"
        } else {
            "429"
        };
        assert_eq!(end, wanted, "{name}");
    }
    let get = json!({"worker": "w", "queues": ["a.none"], "wait": "1ms"});
    let (_, problem) = post(&daemon, "/v1/tasks:get", &own, get.clone()).await;
    let why = "calls wait already, 10000 for this token, which is half of all in this process; try again later";
    assert_eq!(problem["detail"], why);
    // A call that does not wait is served, and so are others.
    let now = json!({"worker": "w", "queues": ["a.none"]});
    assert_eq!(post(&daemon, "/v1/tasks:get", &own, now).await.0, 200);
    assert_eq!(post(&daemon, "/v1/tasks:get", &admin, get).await.0, 200);
    polls.shutdown().await;
    until("nobody waits", async || waiting(&daemon, &admin).await == 0).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn watches_of_made_up_queues_are_few() {
    let mut daemon = column::start(CONFIG, &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let own = token(&daemon, "own", &["--roles", "read", "--queues", "a.*"]).await;
    task(&daemon, &admin).await;
    let channel = channel(daemon.grpc_port()).await;
    let watch = async |token: &str, queue: String| {
        let watch = pb::WatchQueueRequest {
            queue,
            ..Default::default()
        };
        DiscoveryClient::new(channel.clone())
            .watch_queue(with(token, watch))
            .await
    };
    let begun = join_all((0..500).map(|n| watch(&own, format!("a.{n}")))).await;
    assert!(begun.iter().all(Result::is_ok));
    let status = watch(&own, "a.beyond".into()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(
        status
            .message()
            .starts_with("watches are of queues without tasks already, 500 for this token"),
        "{status}"
    );
    watch(&own, "a.q".into()).await.expect("a queue with tasks");
    watch(&admin, "a.beyond".into())
        .await
        .expect("others watch what they like");
    drop(begun);
    until("there is room again", async || {
        watch(&own, "a.beyond".into()).await.is_ok()
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_restricted_token_leaves_half_of_the_queues() {
    let mut daemon = column::start(&format!("{TOKENS}max_queues = 20\n"), &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let own = token(
        &daemon,
        "own",
        &["--roles", "insert,work,read", "--queues", "a*"],
    )
    .await;
    let tasks: Vec<Value> = (0..15)
        .map(|n| json!({"queue": format!("a.{n}"), "key": "k"}))
        .collect();
    let (_, answer) = post(&daemon, "/v1/tasks", &own, Value::from(tasks)).await;
    let statuses: Vec<_> = answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["status"].clone())
        .collect();
    assert_eq!(
        statuses
            .iter()
            .filter(|status| **status == "CREATED")
            .count(),
        10,
        "{answer}"
    );
    let why = "queue a.14 is new, and the scope of a token has 10 queues already, half of max_queues; use one of those";
    assert_eq!(answer["results"][14]["error"], why);
    // Nor by a worker's report.
    let get = json!({"worker": "w", "queues": ["a.0"], "wait": "60s"});
    let (_, answer) = post(&daemon, "/v1/tasks:get", &own, get).await;
    let leased = &answer["tasks"][0];
    let discovered: Vec<Value> = (0..15)
        .map(|n| json!({"queue": format!("ad.{n}"), "key": "k"}))
        .collect();
    let item =
        json!({"id": leased["id"], "lease_token": leased["lease_token"], "discovered": discovered});
    let (_, answer) = post(
        &daemon,
        "/v1/tasks:complete",
        &own,
        json!({"worker": "w", "completions": [item]}),
    )
    .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    until("the discovered tasks are letters", async || {
        let (_, answer) = call(
            &daemon,
            Method::GET,
            "/v1/dead-letters?limit=100",
            Some(&admin),
            Value::Null,
        )
        .await;
        answer["letters"]
            .as_array()
            .is_some_and(|letters| letters.len() == 15)
    })
    .await;
    // Others have the rest, and one without a scope all of it.
    let tasks: Vec<Value> = (0..9)
        .map(|n| json!({"queue": format!("b.{n}"), "key": "k"}))
        .collect();
    let (_, answer) = post(&daemon, "/v1/tasks", &admin, Value::from(tasks)).await;
    assert!(
        answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .all(|one| one["status"] == "CREATED"),
        "{answer}"
    );
    assert_eq!(
        post(
            &daemon,
            "/v1/tasks",
            &own,
            json!({"queue": "a.0", "key": "more"})
        )
        .await
        .0,
        200,
        "its own go on"
    );
    assert!(daemon.stop().await.success());
}

async fn bulk_change(daemon: &Daemon, admin: &str, id: &str) -> Value {
    call(
        daemon,
        Method::GET,
        &format!("/v1/bulk/{id}"),
        Some(admin),
        Value::Null,
    )
    .await
    .1
}

#[tokio::test]
async fn bulk_changes_leave_half_to_others_and_stop_with_their_token() {
    const TASKS: usize = 12_000;
    let mut daemon = column::start(TOKENS, &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let own = token(&daemon, "own", &["--roles", "admin", "--queues", "a.*"]).await;
    let lines: String = (0..TASKS)
        .map(|n| format!("{{\"queue\": \"a.q\", \"key\": \"{n}\"}}\n"))
        .collect();
    let request = http_client()
        .post(format!("{}/v1/tasks", daemon.http()))
        .bearer_auth(&admin);
    let answer = request
        .header("content-type", "application/x-ndjson")
        .body(lines)
        .send()
        .await
        .unwrap();
    assert_eq!(
        answer.text().await.unwrap().matches("CREATED").count(),
        TASKS
    );
    // They look at all tasks, and find none.
    let nothing = json!({"filter": {"queue": "a.q", "key_prefix": "none"}, "yes": true});
    let mut ids = Vec::new();
    let refused = loop {
        let (status, answer) = post(&daemon, "/v1/tasks:cancel", &own, nothing.clone()).await;
        if status != 200 {
            break (status, answer["detail"].as_str().unwrap().to_owned());
        }
        ids.push(answer["bulk"]["id"].as_str().unwrap().to_owned());
        assert!(
            ids.len() < 1000,
            "the bulk changes end faster than they begin"
        );
    };
    assert_eq!(
        refused,
        (
            429,
            "50 bulk changes of this token run, which is half of all that may; wait for one, or stop one"
                .into()
        )
    );
    assert!(ids.len() >= 50);
    assert_eq!(
        post(&daemon, "/v1/tasks:cancel", &admin, nothing).await.0,
        200,
        "others start bulk changes"
    );
    until("there is room for a bulk change", async || {
        let all = json!({"filter": {"queue": "a.q"}, "yes": true});
        let (status, answer) = post(&daemon, "/v1/tasks:cancel", &own, all).await;
        if status == 200 {
            ids.push(answer["bulk"]["id"].as_str().unwrap().to_owned());
        }
        status == 200
    })
    .await;
    let last = ids.last().unwrap();
    let (code, stdout, stderr) = taskd(&daemon, &["token", "revoke", "own"]);
    assert_eq!((code, stdout.as_str()), (0, ""), "{stderr}");
    assert!(
        stderr.contains(&format!(
            "the bulk change {last} (cancel tasks of a.q) stops: \"own\" had started it"
        )),
        "{stderr}"
    );
    until("the bulk change has stopped", async || {
        bulk_change(&daemon, &admin, last).await["state"] != "RUNNING"
    })
    .await;
    let stopped = bulk_change(&daemon, &admin, last).await;
    assert_eq!(
        (&stopped["state"], &stopped["last_error"]),
        (&json!("STOPPED"), &json!("its token was revoked"))
    );
    assert!(
        stopped["changed"].as_u64().unwrap() < TASKS as u64,
        "{stopped}"
    );
    let (_, acts) = call(
        &daemon,
        Method::GET,
        "/v1/acts?limit=200",
        Some(&admin),
        Value::Null,
    )
    .await;
    let acts = acts["acts"].as_array().unwrap();
    let on = json!(format!("{last}: its token was revoked"));
    assert!(
        acts.iter().any(|act| act["who"] == "taskd"
            && act["what"] == "stop bulk change"
            && act["on"] == on),
        "{acts:?}"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_restricted_token_leaves_half_of_the_sessions() {
    let mut daemon = column::start(&format!("{TOKENS}max_sessions = 10\n"), &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let own = token(&daemon, "own", &["--roles", "work", "--queues", "a.*"]).await;
    let channel = channel(daemon.grpc_port()).await;
    let open = async |token: &str, worker: &str| {
        Worker::open_on(
            channel.clone(),
            in_queue(long_opening(worker, 0)),
            Some(token),
        )
        .await
    };
    let mut workers = Vec::new();
    for number in 0..5 {
        workers.push(open(&own, &format!("w{number}")).await.unwrap());
    }
    let status = open(&own, "w5")
        .await
        .err()
        .expect("the token has half of the sessions");
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(
        status.message(),
        "5 sessions of this token are open here, half of max_sessions; close some"
    );
    for number in 0..5 {
        workers.push(open(&admin, &format!("v{number}")).await.unwrap());
    }
    // A session that its worker goes on with takes no other share.
    let session = workers[0].opened.session.clone();
    let again = pb::OpenSession {
        session,
        ..in_queue(long_opening("w0", 0))
    };
    workers[0] = Worker::open_on(channel.clone(), again, Some(&own))
        .await
        .unwrap();
    assert!(workers[0].opened.resumed);
    workers.swap_remove(1).close().await;
    until(
        "a session that was closed makes room",
        async || match open(&own, "w5").await {
            Ok(worker) => {
                workers.push(worker);
                true
            }
            Err(_) => false,
        },
    )
    .await;
    drop(workers);
    assert!(daemon.stop().await.success());
}
