//! Reports that bring the worker its next tasks, by the running binary.

use serde_json::{Value, json};
use taskd::wire::pb::{self, ItemStatus, tasks_client::TasksClient};
use tonic::Code;

use crate::{
    columns::access::token,
    support::{
        daemon::Daemon,
        session::{channel, completion},
        until,
    },
};

/// Long leases, so that nothing comes back because its lease ran out.
const CONFIG: &str = "[queues.q]\nlease = \"10m\"";

async fn daemon_with(tasks: usize) -> Daemon {
    let daemon = Daemon::start(CONFIG, &[]).await;
    daemon
        .insert(
            &(0..tasks)
                .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
                .collect::<Vec<_>>(),
        )
        .await;
    until("all wait", async || {
        daemon.queue("q").await["waiting"] == tasks
    })
    .await;
    daemon
}

fn next(max_tasks: u32) -> pb::GetTasksRequest {
    pb::GetTasksRequest {
        queues: vec!["q".into()],
        max_tasks,
        ..Default::default()
    }
}

fn report(tasks: &[pb::LeasedTask], next: pb::GetTasksRequest) -> pb::CompleteTasksRequest {
    let completions = tasks.iter().map(completion).collect();
    pb::CompleteTasksRequest {
        worker: "w".into(),
        completions,
        next: Some(next),
    }
}

#[tokio::test]
async fn a_worker_needs_one_call_for_each_task() {
    let mut daemon = daemon_with(5).await;
    let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
    let (mut tasks, mut done) = (Vec::new(), 0);
    for expected in [1, 1, 3, 0] {
        let most = if done == 2 { 100 } else { 1 };
        let answer = client
            .complete_tasks(report(&tasks, next(most)))
            .await
            .unwrap()
            .into_inner();
        assert!(
            answer
                .results
                .iter()
                .all(|result| result.status() == ItemStatus::Ok),
            "{answer:?}"
        );
        assert_eq!(
            (answer.results.len(), answer.tasks.len()),
            (tasks.len(), expected)
        );
        done += tasks.len() + usize::from(tasks.is_empty());
        tasks = answer.tasks;
        assert!(
            tasks
                .iter()
                .all(|task| task.attempt == 1 && !task.lease_token.is_empty())
        );
    }
    until("SQL has all reports", async || {
        daemon.queue("q").await["completed"] == 5
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn the_same_over_http() {
    let mut daemon = daemon_with(3).await;
    let complete = async |tasks: &Value, next: Value| {
        let item = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"]});
        let completions: Vec<_> = tasks.as_array().unwrap().iter().map(item).collect();
        let body = json!({"worker": "w", "completions": completions, "next": next});
        daemon.post("/v1/tasks:complete", &body).await
    };
    let (status, first) = complete(&json!([]), json!({"queues": ["q"], "max_tasks": 2})).await;
    assert_eq!(
        (status, first["tasks"].as_array().unwrap().len()),
        (200, 2),
        "{first}"
    );
    let (_, second) = complete(&first["tasks"], json!({"queues": ["q"], "worker": "w"})).await;
    assert_eq!(
        (
            &second["results"][1]["status"],
            &second["tasks"][0]["attempt"]
        ),
        (&json!("OK"), &json!(1))
    );
    let (_, third) = complete(&second["tasks"], json!({"queues": ["q"]})).await;
    assert_eq!(
        (&third["results"][0]["status"], &third["tasks"]),
        (&json!("OK"), &json!([]))
    );
    // A repeat is OK, and without `next` there is no word of tasks.
    let (_, again) = complete(&second["tasks"], Value::Null).await;
    assert_eq!(
        (&again["results"][0]["status"], again.get("tasks")),
        (&json!("OK"), None)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_wrong_wish_reports_nothing() {
    let mut daemon = daemon_with(2).await;
    let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
    let first = client
        .complete_tasks(report(&[], next(1)))
        .await
        .unwrap()
        .into_inner()
        .tasks;
    let second = prost_types::Duration {
        seconds: 1,
        nanos: 0,
    };
    for (wrong, said) in [
        (
            pb::GetTasksRequest {
                wait: Some(second),
                ..next(1)
            },
            "next has a wait: a report does not wait for tasks",
        ),
        (
            pb::GetTasksRequest {
                worker: "v".into(),
                ..next(1)
            },
            "next.worker is not the worker of the call",
        ),
        (
            pb::GetTasksRequest {
                queues: vec![],
                ..next(1)
            },
            "queues is empty: name at least one",
        ),
        (next(1001), "max_tasks is 1001; at most 1000"),
    ] {
        let refused = client
            .complete_tasks(report(&first, wrong))
            .await
            .unwrap_err();
        assert_eq!(
            (refused.code(), refused.message()),
            (Code::InvalidArgument, said)
        );
    }
    let many = pb::GetTasksRequest {
        queues: vec!["q".into(); 101],
        ..next(1)
    };
    let refused = client
        .complete_tasks(report(&first, many))
        .await
        .unwrap_err();
    assert_eq!(refused.message(), "more than 100 queues");
    let wrong = json!({"worker": "w", "completions": [], "next": {"queues": ["q"], "max": 3}});
    let (status, problem) = daemon.post("/v1/tasks:complete", &wrong).await;
    assert_eq!(status, 400, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("unknown field `max`"),
        "{problem}"
    );
    let queue = daemon.queue("q").await;
    assert_eq!(
        (&queue["assigned"], &queue["waiting"]),
        (&json!(1), &json!(1)),
        "{queue}"
    );
    assert!(daemon.stop().await.success());
}

/// A report of nothing good still brings tasks: the worker goes on.
#[tokio::test]
async fn a_report_that_comes_too_late_brings_tasks_all_the_same() {
    let mut daemon = daemon_with(2).await;
    let mut client = TasksClient::new(channel(daemon.grpc_port()).await);
    let first = client
        .complete_tasks(report(&[], next(1)))
        .await
        .unwrap()
        .into_inner()
        .tasks;
    let cancel = json!({"ids": [first[0].id]});
    assert_eq!(daemon.post("/v1/tasks:cancel", &cancel).await.0, 200);
    let answer = client
        .complete_tasks(report(&first, next(1)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (answer.results[0].status(), answer.tasks.len()),
        (ItemStatus::Cancelled, 1)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_token_gets_nothing_of_another_queue_by_a_report() {
    let mut daemon = Daemon::start(&format!("auth = \"tokens\"\n{CONFIG}"), &[]).await;
    let of_q = token(&daemon, "worker", &["--roles", "work", "--queues", "q"]).await;
    let complete = async |queue: &str| {
        let body = json!({"worker": "w", "completions": [], "next": {"queues": [queue]}});
        let post =
            crate::support::http_client().post(format!("{}/v1/tasks:complete", daemon.http()));
        post.bearer_auth(&of_q)
            .json(&body)
            .send()
            .await
            .unwrap()
            .status()
            .as_u16()
    };
    assert_eq!((complete("q").await, complete("other").await), (200, 403));
    assert!(daemon.stop().await.success());
}
