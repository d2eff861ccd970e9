//! `taskd explain`, `GET /v1/tasks:explain` and `Discovery.ExplainTask` through the running binary:
//! each place of a task, and each reason why a worker does not get it.

use std::process::Command;

use serde_json::{Value, json};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient};
use tonic::Code;

use crate::{
    column,
    support::{daemon::Daemon, until},
};

pub(crate) const CONFIG: &str = "\
    partitions = 1\n\
    [queues.default]\n\
    backoff = [\"1h\"]\n\
    [queues.full]\n\
    high_water_tasks = 2\n";

pub(crate) async fn explain(daemon: &Daemon, id: &str, worker: &str) -> Value {
    let (status, answer) = daemon
        .get(&format!("/v1/tasks:explain?id={id}&worker={worker}"))
        .await;
    assert_eq!(status, 200, "{answer}");
    answer
}

/// Waits until the task is there. The answer for `worker`.
pub(crate) async fn until_at(daemon: &Daemon, id: &str, place: &str, worker: &str) -> Value {
    let mut answer = Value::Null;
    until(place, async || {
        answer = explain(daemon, id, worker).await;
        answer["place"] == place
    })
    .await;
    answer
}

/// The worker's reason; it agrees with `may_get`.
pub(crate) fn reason(answer: &Value) -> &str {
    let worker = &answer["worker"];
    assert_eq!(worker["may_get"], worker["reason"] == "MAY_GET", "{answer}");
    assert!(!worker["says"].as_str().unwrap().is_empty(), "{answer}");
    worker["reason"].as_str().unwrap()
}

pub(crate) async fn insert(daemon: &Daemon, task: Value) -> String {
    daemon.insert(&[task]).await.remove(0)
}

async fn reject(daemon: &Daemon, worker: &str, task: &Value, retry: bool) {
    let item = json!({"id": task["id"], "lease_token": task["lease_token"], "reason": "no luck", "retry": retry});
    let (status, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": worker, "rejections": [item]}),
        )
        .await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (200, &json!("OK")),
        "{answer}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_followed_from_its_insert_to_its_end() {
    let daemon = column::start(CONFIG, &[]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a"})).await;
    let waiting = until_at(&daemon, &id, "WAITING", "w").await;
    assert_eq!(
        (reason(&waiting), &waiting["says"]),
        ("MAY_GET", &json!("it waits in its queue for a worker"))
    );
    assert_eq!(waiting["since"], waiting["task"]["created_at"]);
    assert!(
        waiting["worker"]["says"]
            .as_str()
            .unwrap()
            .ends_with("it is the next of its priority"),
        "{waiting}"
    );

    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let of_w = explain(&daemon, &id, "w").await;
    assert_eq!(
        (&of_w["place"], reason(&of_w)),
        (&json!("LEASED"), "HOLDS_IT")
    );
    assert_eq!(of_w["says"], "worker w holds it");
    let lease = &of_w["leases"][0];
    assert_eq!(
        (&lease["worker"], &lease["lease_expires_at"]),
        (&json!("w"), &leased["lease_expires_at"])
    );
    assert_eq!(
        (&of_w["next_at"], &of_w["worker"]["until"]),
        (&lease["lease_expires_at"], &lease["lease_expires_at"])
    );
    let of_v = explain(&daemon, &id, "v").await;
    assert_eq!(
        (reason(&of_v), &of_v["worker"]["until"]),
        ("LEASED_BY_OTHERS", &lease["lease_expires_at"])
    );

    reject(&daemon, "w", &leased, true).await;
    let delayed = explain(&daemon, &id, "v").await;
    assert_eq!(
        (&delayed["place"], reason(&delayed)),
        (&json!("DELAYED"), "IN_BACKOFF")
    );
    assert_eq!(
        (
            &delayed["failures"][0]["worker"],
            &delayed["failures"][0]["reason"]
        ),
        (&json!("w"), &json!("no luck"))
    );
    assert_eq!(delayed["since"], delayed["failures"][0]["at"]);
    assert!(
        delayed["next_at"].as_str() > delayed["now"].as_str(),
        "{delayed}"
    );
    assert_eq!(delayed["next_at"], delayed["worker"]["until"]);

    let done = insert(&daemon, json!({"queue": "q", "key": "b"})).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    let finished = until_at(&daemon, &done, "FINISHED", "w").await;
    assert_eq!(
        (reason(&finished), &finished["task"]["status"]),
        ("COMPLETED_IT", &json!("COMPLETED"))
    );
    assert_eq!(
        (&finished["completed_by"], &finished["since"]),
        (&json!(["w"]), &finished["task"]["updated_at"])
    );
    assert_eq!(reason(&explain(&daemon, &done, "v").await), "FINISHED");

    let dead = insert(
        &daemon,
        json!({"queue": "q", "key": "c", "max_attempts": 1}),
    )
    .await;
    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    reject(&daemon, "w", &leased, true).await;
    let finished = until_at(&daemon, &dead, "FINISHED", "w").await;
    assert_eq!(
        (reason(&finished), &finished["task"]["status"]),
        ("FINISHED", &json!("DEAD"))
    );
    assert_eq!(finished["notes"], json!(["reason: no luck"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_for_several_workers_is_explained_for_each() {
    let daemon = column::start(CONFIG, &[]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a", "replicas": 4})).await;
    let mut leased = Vec::new();
    for worker in ["done", "failed", "holds"] {
        leased.push(daemon.lease_all(worker, "q", 1).await.remove(0));
    }
    daemon.complete("done", &leased[..1]).await;
    reject(&daemon, "failed", &leased[1], false).await;
    for (worker, expected) in [
        ("done", "COMPLETED_IT"),
        ("failed", "REFUSED_IT"),
        ("holds", "HOLDS_IT"),
        ("new", "MAY_GET"),
    ] {
        assert_eq!(
            reason(&explain(&daemon, &id, worker).await),
            expected,
            "{worker}"
        );
        let given = daemon.lease(worker, "q", 1, "0s").await;
        assert_eq!(
            !given.is_empty(),
            expected == "MAY_GET",
            "a claim of {worker} agrees"
        );
    }
    let answer = explain(&daemon, &id, "late").await;
    assert_eq!(
        (&answer["place"], &answer["says"]),
        (&json!("LEASED"), &json!("2 workers hold it"))
    );
    assert_eq!(
        (reason(&answer), &answer["completed_by"]),
        ("LEASED_BY_OTHERS", &json!(["done"]))
    );
    assert_eq!(
        answer["notes"],
        json!(["1 of its 4 replicas wait for their next attempt"])
    );

    let id = insert(&daemon, json!({"queue": "two", "key": "a", "replicas": 2})).await;
    let leased = daemon.lease_all("done", "two", 1).await;
    daemon.complete("done", &leased).await;
    assert_eq!(
        until_at(&daemon, &id, "WAITING", "new").await["next"],
        "a worker with another name than done that asks for tasks of queue two gets it; it is the next of its priority"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_before_its_time_is_in_sql_or_in_its_queue() {
    let daemon = column::start(CONFIG, &[]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "far", "delay": "2h"})).await;
    let scheduled = explain(&daemon, &id, "w").await;
    assert_eq!(
        (&scheduled["place"], reason(&scheduled)),
        (&json!("SCHEDULED"), "NOT_IN_QUEUE")
    );
    assert!(
        scheduled["next_at"].as_str() < scheduled["task"]["not_before"].as_str(),
        "{scheduled}"
    );

    let id = insert(&daemon, json!({"queue": "q", "key": "near", "delay": "5m"})).await;
    let delayed = until_at(&daemon, &id, "DELAYED", "w").await;
    assert_eq!(
        (reason(&delayed), &delayed["next_at"]),
        ("NOT_DUE", &delayed["task"]["not_before"])
    );
    assert_eq!(delayed["worker"]["until"], delayed["next_at"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_a_full_queue_is_parked_and_the_bound_is_named() {
    let daemon = column::start(CONFIG, &[]).await;
    let tasks: Vec<Value> = (0..5)
        .map(|n| json!({"queue": "full", "key": n.to_string()}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    let parked = until_at(&daemon, &ids[4], "PARKED", "w").await;
    assert_eq!(reason(&parked), "NOT_IN_QUEUE");
    let note = parked["notes"][0].as_str().unwrap();
    assert!(
        note.starts_with(
            "shard full:0 holds 2 tasks ahead of its foremost worker (high_water_tasks 2)"
        ),
        "{note}"
    );
    let first = until_at(&daemon, &ids[1], "WAITING", "w").await;
    assert!(
        first["next"]
            .as_str()
            .unwrap()
            .ends_with("; one task of its priority may go before it"),
        "{first}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_no_fanout_reads_is_on_the_bus() {
    let daemon = column::start(CONFIG, &["--pipelines", "discovery,tasks"]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a"})).await;
    let on_bus = until_at(&daemon, &id, "BUS", "w").await;
    assert_eq!(reason(&on_bus), "NOT_IN_QUEUE");
    assert_eq!(
        on_bus["notes"],
        json!(["about 1 records of pipeline are not processed yet"])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_question_is_told_what_is_wrong() {
    let daemon = column::start(CONFIG, &[]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "a b"})).await;
    let unknown = "0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44";
    for (query, status, detail) in [
        (
            "",
            400,
            "name one task: by its id, or by its queue and its key",
        ),
        (
            "?queue=q",
            400,
            "name one task: by its id, or by its queue and its key",
        ),
        (
            &format!("?id={id}&queue=q&key=a"),
            400,
            "name one task: by its id, or by its queue and its key",
        ),
        ("?id=42", 400, "\"42\" is not a task id"),
        ("?queue=a%20b&key=x", 400, "queue \"a b\" contains ' '"),
        ("?idd=1", 400, "unknown parameter \"idd\""),
        (
            &format!("?id={id}&worker=%07"),
            400,
            "worker \"\\u{7}\" contains a control character",
        ),
        (&format!("?id={unknown}"), 404, "there is no task 0197a5c0-"),
        (
            "?queue=q&key=b",
            404,
            "queue q has, and had, no task with the key \"b\"",
        ),
    ] {
        let (answered, problem) = daemon.get(&format!("/v1/tasks:explain{query}")).await;
        assert_eq!(answered, status, "{query}: {problem}");
        assert!(
            problem["detail"].as_str().unwrap().starts_with(detail),
            "{query}: {problem}"
        );
    }
    let (status, by_key) = daemon.get("/v1/tasks:explain?queue=q&key=a+b").await;
    assert_eq!((status, &by_key["task"]["id"]), (200, &json!(id)));
    assert_eq!(by_key.get("worker"), None);

    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let request = pb::ExplainTaskRequest {
        queue: "q".into(),
        key: "a b".into(),
        worker: "w".into(),
        ..Default::default()
    };
    until_at(&daemon, &id, "WAITING", "w").await;
    let answer = client.explain_task(request).await.unwrap().into_inner();
    assert_eq!(
        (answer.place(), answer.task.as_ref().unwrap().id.as_str()),
        (pb::TaskPlace::Waiting, id.as_str())
    );
    let worker = answer.worker.unwrap();
    assert_eq!(
        (worker.reason(), worker.may_get),
        (pb::WorkerReason::MayGet, true)
    );
    let missing = pb::ExplainTaskRequest {
        id: unknown.into(),
        ..Default::default()
    };
    assert_eq!(
        client.explain_task(missing).await.unwrap_err().code(),
        Code::NotFound
    );
}

/// Exit code, stdout, stderr of `taskd explain`.
async fn command(args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.env_remove("TASKD_URL").arg("explain").args(args);
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_answers_in_sentences_or_as_json_and_errors_are_one_line() {
    let daemon = column::start(CONFIG, &[]).await;
    let id = insert(&daemon, json!({"queue": "q", "key": "https://a/?b=c&d"})).await;
    daemon.lease_all("w", "q", 1).await;
    let server = daemon.http();
    let (code, stdout, stderr) = command(&[&id, "--worker", "v", "--server", &server]).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(
        lines[0],
        format!("Task {id} (queue q, key https://a/?b=c&d) is ASSIGNED: worker w holds it.")
    );
    assert!(lines[1].starts_with("Since: "), "{stdout}");
    assert!(
        lines[2]
            .starts_with("Next: a worker completes or rejects it; otherwise it has failed when its lease expires: "),
        "{stdout}"
    );
    assert!(lines[3].starts_with("Lease: worker w until "), "{stdout}");
    assert!(
        lines[4].starts_with(
            "Worker v does not get it: worker w holds it, and no replica is left, until "
        ),
        "{stdout}"
    );
    assert_eq!(lines.len(), 5, "{stdout}");

    let address = server.trim_start_matches("http://");
    let (code, stdout, _) =
        command(&["q", "https://a/?b=c&d", "--json", "--server", address]).await;
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (code, &answer["task"]["id"], &answer["place"]),
        (0, &json!(id), &json!("LEASED"))
    );

    let dead = "http://127.0.0.1:1";
    for (args, code, said) in [
        (
            &["q", "unknown", "--server", &server][..],
            1,
            "taskd: queue q has, and had, no task with the key \"unknown\"",
        ),
        (
            &["42", "--server", &server],
            2,
            "taskd: \"42\" is not the id of a task",
        ),
        (
            &[&id, "--server", dead],
            2,
            "taskd: cannot reach taskd at http://127.0.0.1:1: ",
        ),
        (&[&id, "--server", &daemon.grpc()], 2, "taskd: "),
        (
            &[&id, "--server", "ftp://a"],
            2,
            "taskd: invalid value 'ftp://a' for '--server <URL>': ",
        ),
        (
            &[],
            2,
            "taskd: the following required arguments were not provided: <QUEUE KEY|ID>",
        ),
        (
            &[&id, "--wrker", "w"],
            2,
            "taskd: unexpected argument '--wrker' found",
        ),
    ] {
        let (answered, stdout, stderr) = command(args).await;
        assert_eq!(
            (answered, stdout.as_str(), stderr.lines().count()),
            (code, "", 1),
            "{args:?}: {stderr}"
        );
        assert!(stderr.starts_with(said), "{args:?}: {stderr}");
    }
}
