//! `taskd books`, `GET /v1/books` and `Operator.GetBooks` through the running binary: where the
//! tasks are, what was turned away, and a difference that is named.

use std::process::Command;

use serde_json::{Value, json};
use taskd::wire::pb::{self, operator_client::OperatorClient};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

pub(crate) const CONFIG: &str = "\
    partitions = 2\n\
    reconcile_every = \"1h\"\n\
    [queues.default]\n\
    lease = \"10m\"\n\
    backoff = [\"1h\"]\n\
    [queues.full]\n\
    high_water_tasks = 2\n";

/// The books of the queue.
async fn books(daemon: &Daemon, queue: &str) -> Value {
    let (status, mut answer) = daemon.get(&format!("/v1/books?queue={queue}")).await;
    assert_eq!(status, 200, "{answer}");
    let books = answer["queues"][0].take();
    adds_up(&books);
    books
}

/// The sums hold whatever moves.
fn adds_up(books: &Value) {
    let sum = |of: &Value, names: &[&str]| {
        names
            .iter()
            .map(|name| of[*name].as_i64().unwrap())
            .sum::<i64>()
    };
    let (held, redis) = (&books["held"], &books["held"]["redis"]);
    assert_eq!(
        sum(redis, &["live"]),
        sum(redis, &["waiting", "assigned", "delayed"]),
        "{books}"
    );
    let in_sql = sum(
        &held["sql"],
        &["fresh", "parked", "crowded", "scheduled", "missing"],
    );
    assert_eq!(
        sum(held, &["total"]),
        in_sql + sum(held, &["between"]) + sum(redis, &["live"]),
        "{books}"
    );
    let out = sum(&books["out"], &["completed", "dead", "cancelled"]);
    assert_eq!(
        sum(&books["in"], &["stored"]),
        out + sum(held, &["total"]),
        "{books}"
    );
}

pub(crate) async fn until_books(
    daemon: &Daemon,
    queue: &str,
    is_there: impl Fn(&Value) -> bool,
) -> Value {
    let mut found = Value::Null;
    until("the books are so", async || {
        found = books(daemon, queue).await;
        is_there(&found)
    })
    .await;
    found
}

async fn reject(daemon: &Daemon, task: &Value, retry: bool) {
    let item = json!({"id": task["id"], "lease_token": task["lease_token"], "reason": "no luck", "retry": retry});
    let (status, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": "w", "rejections": [item]}),
        )
        .await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
}

pub(crate) fn taskd(daemon: &Daemon, args: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .arg("books")
        .args(args)
        .args(["--server", &daemon.http()])
        .output()
        .unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code().unwrap(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_task_is_where_the_books_say() {
    let daemon = column::start(CONFIG, &[]).await;
    let mut tasks: Vec<Value> = (0..10)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    tasks.push(json!({"queue": "q", "key": "far", "delay": "2h"}));
    tasks.push(json!({"queue": "q", "key": "near", "delay": "5m"}));
    daemon.insert(&tasks).await;
    let (status, _) = daemon
        .post("/v1/tasks", &json!([tasks[0], tasks[1], {"queue": "q", "key": "x", "replicas": 0}, {"queue": "a b"}]))
        .await;
    assert_eq!(status, 200);
    let leased = daemon.lease_all("w", "q", 6).await;
    let found = json!([{"queue": "q", "key": "0"}, {"queue": "q", "key": "found"}]);
    let done = json!([{"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "discovered": found}]);
    let (status, _) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": done}),
        )
        .await;
    assert_eq!(status, 200);
    assert_eq!(daemon.complete("w", &leased[1..3]).await, ["OK", "OK"]);
    reject(&daemon, &leased[3], true).await;
    reject(&daemon, &leased[4], false).await;

    let settled = |books: &Value| books["state"] == "BALANCED" && books["in"]["duplicates"] == 3;
    let books_of_q = until_books(&daemon, "q", |books| {
        settled(books) && books["out"]["completed"] == 3
    })
    .await;
    let at_rest = until_books(&daemon, "q", |books| {
        settled(books) && books["held"]["redis"]["live"] == 8
    })
    .await;
    assert_eq!(
        at_rest["in"],
        json!({"stored": 13, "duplicates": 3, "rejected": 1}),
        "{books_of_q}"
    );
    assert_eq!(
        at_rest["out"],
        json!({"completed": 3, "dead": 1, "cancelled": 0})
    );
    assert_eq!(
        at_rest["held"]["sql"],
        json!({"fresh": 0, "parked": 0, "crowded": 0, "scheduled": 1, "missing": 0, "behind": 0})
    );
    let redis = &at_rest["held"]["redis"];
    assert_eq!(
        (&redis["waiting"], &redis["assigned"], &redis["delayed"]),
        (&json!(5), &json!(1), &json!(2))
    );
    assert_eq!(
        (&redis["leases"], &redis["reports"]),
        (&json!(1), &json!(0))
    );
    assert!(redis["lanes"]["m"].as_u64().unwrap() >= 5, "{redis}");

    // A queue without room keeps its tasks in SQL.
    let tasks: Vec<Value> = (0..9)
        .map(|n| json!({"queue": "full", "key": n.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    let full = until_books(&daemon, "full", |books| {
        books["state"] == "BALANCED"
            && books["held"]["sql"]["fresh"] == 0
            && books["held"]["between"] == 0
    })
    .await;
    let (parked, live) = (
        &full["held"]["sql"]["parked"],
        &full["held"]["redis"]["live"],
    );
    assert_eq!(
        parked.as_u64().unwrap() + live.as_u64().unwrap(),
        9,
        "{full}"
    );
    assert!(parked.as_u64().unwrap() > 0, "{full}");

    // All queues at once, over gRPC, and by the command.
    let (_, all) = daemon.get("/v1/books").await;
    let names: Vec<&str> = all["queues"]
        .as_array()
        .unwrap()
        .iter()
        .map(|of| of["queue"].as_str().unwrap())
        .collect();
    assert_eq!(
        (names, &all["rejected_elsewhere"]),
        (vec!["full", "q"], &json!(1))
    );
    let mut operator = OperatorClient::connect(daemon.grpc()).await.unwrap();
    let answer = operator
        .get_books(pb::GetBooksRequest { queue: "q".into() })
        .await
        .unwrap()
        .into_inner();
    let of = &answer.queues[0];
    assert_eq!(
        (
            of.stored,
            of.duplicates,
            of.rejected,
            of.completed,
            of.dead,
            of.held
        ),
        (13, 3, 1, 3, 1, 9)
    );
    assert_eq!(
        (
            of.scheduled,
            of.waiting,
            of.assigned,
            of.delayed,
            of.between
        ),
        (1, 5, 1, 2, 0)
    );
    assert_eq!(of.state(), pb::BooksState::Balanced);
    let (code, table) = taskd(&daemon, &["q"]);
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(
        (code, row.join(" ")),
        (
            0,
            "q 13 3 1 3 1 0 0 0 0 0 1 0 0 5 1 2 0 BALANCED".to_owned()
        ),
        "{table}"
    );
    let (code, text) = taskd(&daemon, &["--json"]);
    assert_eq!(
        (
            code,
            serde_json::from_str::<Value>(&text).unwrap()["queues"]
                .as_array()
                .unwrap()
                .len()
        ),
        (0, 2)
    );
    assert_eq!(taskd(&daemon, &["a b"]).0, 2);
    let (status, problem) = daemon.get("/v1/books?que=q").await;
    assert_eq!(
        (status, &problem["detail"]),
        (400, &json!("unknown parameter \"que\"; expected queue"))
    );
    assert_eq!(
        books(&daemon, "never-there").await["in"],
        json!({"stored": 0, "duplicates": 0, "rejected": 0})
    );
}
