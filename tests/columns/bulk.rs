//! Tasks that are sent again by ids and by filters, and bulk changes, over HTTP and gRPC and by
//! `taskd tasks` and `taskd bulk`.

use std::{collections::BTreeSet, process::Command};

use reqwest::Method;
use serde_json::{Value, json};
use taskd::wire::pb::{self, operator_client::OperatorClient};

use super::{
    access::{TOKENS, call, post, token},
    dead_letters::{ONE_ATTEMPT, reject_all, status_of},
};
use crate::{
    column,
    support::{
        daemon::{Daemon, keys, once},
        until,
    },
};

async fn retry(daemon: &Daemon, body: Value) -> Value {
    let (status, answer) = daemon.post("/v1/tasks:retry", &body).await;
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

/// The bulk change, as soon as it does not run any more.
pub(crate) async fn ended(daemon: &Daemon, id: &str) -> Value {
    let mut bulk = Value::Null;
    until("the bulk change has ended", async || {
        let Some((200, answer)) = daemon.try_get(&format!("/v1/bulk/{id}")).await else {
            return false;
        };
        bulk = answer;
        bulk["state"] != "RUNNING"
    })
    .await;
    bulk
}

/// Inserts tasks `key-<n>`, which die.
pub(crate) async fn dead_tasks(
    daemon: &Daemon,
    queue: &str,
    from: usize,
    to: usize,
) -> Vec<String> {
    let mut ids = Vec::new();
    for from in (from..to).step_by(1000) {
        let upto = to.min(from + 1000);
        let tasks: Vec<_> = (from..upto)
            .map(|n| json!({"queue": queue, "key": format!("key-{n}")}))
            .collect();
        ids.extend(daemon.insert(&tasks).await);
        reject_all(daemon, "w", queue, upto - from, "no luck").await;
    }
    until("they are dead", async || {
        daemon.queue(queue).await["dead"] == (to - from) as u64
    })
    .await;
    ids
}

/// The targets of the acts whose words begin so.
pub(crate) async fn targets(daemon: &Daemon, what: &str) -> Vec<String> {
    let (mut targets, mut before) = (Vec::new(), String::new());
    loop {
        let query = if before.is_empty() {
            String::new()
        } else {
            format!("&before={before}")
        };
        let (_, answer) = daemon.get(&format!("/v1/acts?limit=1000{query}")).await;
        let acts = answer["acts"].as_array().unwrap();
        let Some(last) = acts.last() else {
            return targets;
        };
        before = last["id"].as_str().unwrap().to_owned();
        let of = acts
            .iter()
            .filter(|act| act["what"].as_str().unwrap().starts_with(what));
        targets.extend(of.map(|act| act["on"].as_str().unwrap().to_owned()));
    }
}

/// Exit code, stdout, stderr of a command.
fn taskd(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http())
        .args(args)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Expects the answer to a dry run that looked at all tasks of its filter.
fn assert_counted(answer: &Value, matched: u64, looked_at: u64) {
    let mut answer = answer.clone();
    let as_of = answer.as_object_mut().unwrap().remove("as_of");
    assert!(as_of.is_some_and(|as_of| as_of.is_string()), "{answer}");
    assert_eq!(
        answer,
        json!({"matched": matched, "looked_at": looked_at, "at_least": false})
    );
}

/// What dies, or is inserted, between a count and the change is left alone, even if SQL learns of a
/// death only after the count.
#[tokio::test]
async fn a_bulk_change_as_of_a_count_changes_what_was_counted() {
    let daemon = column::start(ONE_ATTEMPT, &[]).await;
    let tasks: Vec<_> = (0..540)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
        .collect();
    daemon.insert(&tasks).await;
    let dead = async |count: u64| daemon.queue("q").await["dead"] == count;
    reject_all(&daemon, "w", "q", 20, "took longer than 5 s").await;
    until("they are dead", async || dead(20).await).await;
    let other = json!({"filter": {"queue": "q", "reason": "took less"}, "dry_run": true});
    assert_eq!(retry(&daemon, other).await["matched"], 0);
    let filter = json!({"queue": "q", "reason": "took longer"});
    let counted = retry(&daemon, json!({"filter": filter, "dry_run": true})).await;
    assert_eq!(counted["matched"], 20, "{counted}");

    // The queue has ended them when this is answered, and SQL has not.
    reject_all(&daemon, "w", "q", 500, "took longer than 6 s").await;
    let filter_of_more = json!({"queue": "q", "reason": "took longer than 6"});
    let more = retry(&daemon, json!({"filter": filter_of_more, "dry_run": true})).await;
    until("all but 20 are dead", async || dead(520).await).await;
    let filter_of_more =
        json!({"queue": "q", "reason": "took longer than 6", "as_of": more["as_of"]});
    let more_again = retry(&daemon, json!({"filter": filter_of_more, "dry_run": true})).await;
    assert_eq!(more_again["matched"], more["matched"]);
    let filter = json!({"queue": "q", "reason": "took longer", "as_of": counted["as_of"]});
    let again = retry(&daemon, json!({"filter": filter, "dry_run": true})).await;
    assert_eq!(again["matched"], 20, "{again}");
    assert_eq!(again["as_of"], counted["as_of"]);
    let started = retry(&daemon, json!({"filter": filter, "yes": true})).await;
    let bulk = ended(&daemon, started["bulk"]["id"].as_str().unwrap()).await;
    assert_eq!(
        (&bulk["matched"], &bulk["changed"]),
        (&json!(20), &json!(20)),
        "{bulk}"
    );
    assert_eq!(bulk["filter"]["as_of"], counted["as_of"]);
    assert!(dead(500).await, "those that died after the count stay");
    let started = retry(&daemon, json!({"filter": filter_of_more, "yes": true})).await;
    let bulk = ended(&daemon, started["bulk"]["id"].as_str().unwrap()).await;
    assert_eq!(bulk["changed"], more["matched"], "{bulk}");
}

#[tokio::test]
async fn tasks_are_sent_again_by_their_ids_each_with_its_answer() {
    let mut daemon = column::start(ONE_ATTEMPT, &[]).await;
    let dead = dead_tasks(&daemon, "q", 0, 2).await;
    daemon.insert(&[json!({"queue": "r", "key": "done"})]).await;
    assert_eq!(daemon.work("w", "r", 1).await, ["done"]);
    until("it is completed", async || {
        daemon.queue("r").await["completed"] == 1
    })
    .await;
    let (_, done) = daemon.get("/v1/tasks?queue=r").await;
    let done = done["tasks"][0]["id"].as_str().unwrap();
    let waits = daemon
        .insert(&[json!({"queue": "r", "key": "waits"})])
        .await
        .remove(0);
    let unknown = "0190a5c2-0000-7000-8000-000000000000";

    let counted = retry(
        &daemon,
        json!({"ids": [dead[0], dead[1], done], "dry_run": true}),
    )
    .await;
    assert_counted(&counted, 2, 3);
    assert_eq!(status_of(&daemon, &dead[0]).await, "DEAD");
    let ids = json!({"ids": [dead[0], done, waits, unknown, "x", dead[0]]});
    let answer = retry(&daemon, ids).await;
    let statuses = crate::support::daemon::statuses(&answer);
    assert_eq!(
        statuses,
        [
            "OK",
            "ALREADY_COMPLETED",
            "INVALID",
            "UNKNOWN_TASK",
            "INVALID",
            "OK"
        ],
        "{answer}"
    );
    assert!(
        answer["results"][2]["error"]
            .as_str()
            .unwrap()
            .contains("unfinished"),
        "{answer}"
    );
    assert_eq!(targets(&daemon, "retry task").await, [dead[0].as_str()]);
    assert_eq!(
        daemon.drain("w", "q").await,
        ["key-0"],
        "by the worker that had failed it"
    );
    assert_eq!(status_of(&daemon, &dead[1]).await, "DEAD");

    let (code, said, why) = taskd(&daemon, &["tasks", "retry", &dead[1], unknown]);
    assert_eq!((code, said.trim()), (1, "1 of 2 tasks sent again"), "{why}");
    assert!(
        why.contains(&format!("{unknown}: there is no such task")),
        "{why}"
    );
    assert_eq!(daemon.drain("w", "q").await, ["key-1"]);
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_change_sends_all_tasks_of_a_filter_again() {
    let mut daemon = column::start(ONE_ATTEMPT, &[]).await;
    let ids = dead_tasks(&daemon, "q", 0, 600).await;
    dead_tasks(&daemon, "other", 0, 3).await;
    let counted = retry(&daemon, json!({"filter": {"queue": "q"}, "dry_run": true})).await;
    assert_counted(&counted, 600, 600);

    let answer = retry(
        &daemon,
        json!({"filter": {"queue": "q", "status": "DEAD"}, "yes": true}),
    )
    .await;
    let started = &answer["bulk"];
    assert_eq!(
        (&started["what"], &started["filter"]["status"]),
        (&json!("retry"), &json!("DEAD"))
    );
    let id = started["id"].as_str().unwrap();
    let bulk = ended(&daemon, id).await;
    let counts = ["state", "matched", "changed", "failed", "looked_at"].map(|name| &bulk[name]);
    assert_eq!(
        counts,
        [
            &json!("DONE"),
            &json!(600),
            &json!(600),
            &json!(0),
            &json!(600)
        ],
        "{bulk}"
    );
    assert!(
        bulk["filter"]["until"].is_string(),
        "it ends at its creation: {bulk}"
    );

    // One act for the bulk change, and one for each task.
    assert_eq!(
        targets(&daemon, "start bulk change").await,
        [format!("{id} of q")]
    );
    let changed: BTreeSet<String> = once(targets(&daemon, "retry task").await);
    assert_eq!(changed, ids.into_iter().collect());
    assert_eq!(once(daemon.drain("w", "q").await), keys(0, 600));
    assert_eq!(daemon.queue("other").await["dead"], 3);

    // Bulk changes are listed over HTTP and gRPC.
    let (_, listed) = daemon.get("/v1/bulk").await;
    assert_eq!(listed["bulk"], json!([bulk]));
    let (_, none) = daemon.get(&format!("/v1/bulk?before={id}&limit=5")).await;
    assert_eq!(none["bulk"], json!([]));
    let mut grpc = OperatorClient::connect(daemon.grpc()).await.unwrap();
    let read = grpc
        .get_bulk_change(pb::GetBulkChangeRequest { id: id.to_owned() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (read.state(), read.changed, &read.who[..]),
        (pb::BulkState::Done, 600, "anybody")
    );
    let stopped = grpc
        .stop_bulk_change(pb::StopBulkChangeRequest { id: id.to_owned() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(stopped.state(), pb::BulkState::Done, "it has ended before");

    // The command starts a bulk change and watches it.
    let (code, _, why) = taskd(&daemon, &["tasks", "retry"]);
    assert!(
        code == 2 && why.starts_with("taskd: name tasks by QUEUE KEY or by ids, or a queue"),
        "{why}"
    );
    let (code, said, why) = taskd(&daemon, &["tasks", "retry", "--queue", "other"]);
    assert_eq!((code, said.as_str()), (2, ""));
    assert_eq!(
        why.trim(),
        "taskd: this may change many tasks: say --dry-run to count them, or --yes to go on"
    );
    let (code, said, _) = taskd(
        &daemon,
        &["tasks", "retry", "--queue", "other", "--dry-run"],
    );
    assert_eq!((code, said.trim()), (0, "3 tasks would be sent again"));
    let (code, said, why) = taskd(&daemon, &["tasks", "retry", "--queue", "other", "--yes"]);
    assert_eq!(code, 0, "{why}");
    assert!(
        said.contains("is DONE: 3 of 3 tasks changed") && why.contains("taskd bulk stop"),
        "{said} {why}"
    );
    let (code, table, _) = taskd(&daemon, &["bulk", "list"]);
    assert_eq!((code, table.lines().count()), (0, 3), "{table}");
    assert_eq!(
        taskd(&daemon, &["bulk", "list", "--limit", "2"]).2,
        "",
        "these are all"
    );
    let (_, lines, why) = taskd(&daemon, &["bulk", "list", "--json", "--limit", "1"]);
    assert_eq!(why, "1 shown, and there may be more; --limit N shows N\n");
    let line: Value = serde_json::from_str(&lines).unwrap();
    assert_eq!(
        (&line["filter"]["queue"], &line["changed"]),
        (&json!("other"), &json!(3))
    );
    let (_, shown, _) = taskd(&daemon, &["bulk", "show", id, "--json"]);
    assert_eq!(
        serde_json::from_str::<Value>(&shown).unwrap(),
        bulk,
        "as the API shows it"
    );
    let unknown = "0190a5c2-0000-7000-8000-000000000000";
    for (verb, id, expected) in [("show", "x", 2), ("show", unknown, 1), ("stop", unknown, 1)] {
        let (code, said, why) = taskd(&daemon, &["bulk", verb, id]);
        assert_eq!(
            (code, said.as_str(), why.lines().count()),
            (expected, "", 1),
            "{verb} {id}: {why}"
        );
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_change_cancels_all_unfinished_tasks_of_a_filter() {
    let mut daemon = column::start(ONE_ATTEMPT, &[]).await;
    let insert = async |keys: std::ops::Range<usize>| {
        let tasks: Vec<_> = keys
            .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
            .collect();
        daemon.insert(&tasks).await
    };
    let done = insert(0..1).await.remove(0);
    assert_eq!(daemon.work("w", "q", 1).await, ["key-0"]);
    // The task itself has the status of its record in Redis, which is there before.
    until("SQL has the completion", async || {
        daemon.queue("q").await["completed"] == 1
    })
    .await;
    let ids = insert(1..301).await;
    let leased = daemon.lease_all("w", "q", 1).await;
    let cancel = async |body: Value| daemon.post("/v1/tasks:cancel", &body).await;
    let (_, counted) = cancel(json!({"filter": {"queue": "q"}, "dry_run": true})).await;
    assert_counted(&counted, 300, 300);
    let (status, problem) =
        cancel(json!({"filter": {"queue": "q", "status": "queued"}, "yes": true})).await;
    assert_eq!(status, 400, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("write UNFINISHED"),
        "{problem}"
    );

    let (_, started) = cancel(json!({"filter": {"queue": "q"}, "yes": true})).await;
    let bulk = ended(&daemon, started["bulk"]["id"].as_str().unwrap()).await;
    assert_eq!(
        (&bulk["what"], &bulk["changed"], &bulk["failed"]),
        (&json!("cancel"), &json!(300), &json!(0)),
        "{bulk}"
    );
    assert_eq!(daemon.complete("w", &leased).await, ["CANCELLED"]);
    assert!(daemon.lease("w2", "q", 1, "100ms").await.is_empty());
    assert_eq!(
        (
            &daemon.queue("q").await["cancelled"],
            status_of(&daemon, &done).await
        ),
        (&json!(300), "COMPLETED".into())
    );
    assert_eq!(
        once(targets(&daemon, "cancel task").await),
        ids.iter().cloned().collect()
    );

    // They are sent again by their ids, and by a filter with the command.
    let answer = retry(&daemon, json!({"ids": [ids[0]]})).await;
    assert_eq!(crate::support::daemon::statuses(&answer), ["OK"]);
    let (code, said, why) = taskd(
        &daemon,
        &[
            "tasks",
            "retry",
            "--queue",
            "q",
            "--status",
            "cancelled",
            "--yes",
        ],
    );
    assert!(
        code == 0 && said.contains("299 of 299 tasks changed"),
        "{said} {why}"
    );
    let (code, said, _) = taskd(
        &daemon,
        &[
            "tasks",
            "cancel",
            "--queue",
            "q",
            "--key-prefix",
            "key-2",
            "--dry-run",
        ],
    );
    assert_eq!((code, said.trim()), (0, "111 tasks would be cancelled"));
    let (code, said, why) = taskd(
        &daemon,
        &[
            "tasks",
            "cancel",
            "--queue",
            "q",
            "--key-prefix",
            "key-2",
            "--yes",
        ],
    );
    assert!(
        code == 0 && said.contains("111 of 111 tasks changed"),
        "{said} {why}"
    );
    assert_eq!(once(daemon.drain("w3", "q").await).len(), 189);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_bulk_change_without_a_watchdog_waits_and_can_be_stopped() {
    let mut daemon = column::start(ONE_ATTEMPT, &["--pipelines", "discovery,fanout,tasks"]).await;
    let ids = dead_tasks(&daemon, "q", 0, 3).await;
    let start = json!({"filter": {"queue": "q"}, "yes": true});
    let stopped = retry(&daemon, start.clone()).await["bulk"]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let (status, bulk) = daemon
        .post(&format!("/v1/bulk/{stopped}:stop"), &json!({}))
        .await;
    assert_eq!((status, &bulk["state"]), (200, &json!("STOPPED")), "{bulk}");
    assert_eq!(
        targets(&daemon, "stop bulk change").await,
        [stopped.as_str()]
    );
    let (code, said, why) = taskd(&daemon, &["bulk", "show", &stopped, "--watch"]);
    assert!(
        code == 1 && said.contains("\"state\":\"STOPPED\""),
        "{code} {said} {why}"
    );
    let (status, problem) = daemon
        .post(&format!("/v1/bulk/{stopped}"), &json!({}))
        .await;
    assert_eq!(status, 400, "{problem}");

    // One that was not stopped changes what was there when it was asked for, and nothing else.
    let waits = retry(&daemon, start).await["bulk"]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let later = dead_tasks_more(&daemon, 3, 5).await;
    assert!(daemon.stop().await.success());
    let mut daemon = Daemon::start_in_the_folder_of(daemon, &["--pipelines", "all"]).await;
    assert_eq!(ended(&daemon, &waits).await["changed"], 3);
    assert_eq!(ended(&daemon, &stopped).await["changed"], 0);
    assert_eq!(once(daemon.work("w", "q", 3).await), keys(0, 3));
    for id in ids {
        until("it is completed", async || {
            status_of(&daemon, &id).await == "COMPLETED"
        })
        .await;
    }
    for id in later {
        assert_eq!(status_of(&daemon, &id).await, "DEAD");
    }
    assert!(daemon.stop().await.success());
}

/// More dead tasks of a queue that has some.
async fn dead_tasks_more(daemon: &Daemon, from: usize, to: usize) -> Vec<String> {
    let tasks: Vec<_> = (from..to)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
        .collect();
    let ids = daemon.insert(&tasks).await;
    reject_all(daemon, "w", "q", to - from, "no luck").await;
    until("they are dead", async || {
        daemon.queue("q").await["dead"] == to as u64
    })
    .await;
    ids
}

#[tokio::test]
async fn a_wrong_change_is_one_line_and_changes_nothing() {
    let mut daemon = column::start(ONE_ATTEMPT, &[]).await;
    dead_tasks(&daemon, "q", 0, 1).await;
    for (body, why) in [
        (
            json!({"filter": {"queue": "q"}}),
            "send dry_run = true to count them, or yes = true to go on",
        ),
        (json!({}), "name tasks by ids or by a filter"),
        (
            json!({"ids": ["x"], "filter": {"queue": "q"}}),
            "ids and a filter are both given",
        ),
        (
            json!({"filter": {}, "yes": true}),
            "the filter of retry needs a queue",
        ),
        (
            json!({"filter": {"key_prefix": "k"}, "yes": true}),
            "a filter by key_prefix needs a queue",
        ),
        (
            json!({"filter": {"queue": "q", "status": "completed"}, "yes": true}),
            "retry is for tasks that are DEAD",
        ),
        (
            json!({"filter": {"queue": "q", "status": "gone"}, "yes": true}),
            "unknown status \"gone\"",
        ),
        (
            json!({"filter": {"queu": "q"}, "yes": true}),
            "unknown field `queu`",
        ),
        (
            json!({"filter": {"queue": "q", "since": "monday"}, "yes": true}),
            "\"monday\" is not a time",
        ),
    ] {
        let (status, problem) = daemon.post("/v1/tasks:retry", &body).await;
        assert_eq!(status, 400, "{body}: {problem}");
        assert!(
            problem["detail"].as_str().unwrap().contains(why),
            "{problem} should say {why:?}"
        );
    }
    let many: Vec<_> = (0..1001).map(|_| "x").collect();
    assert_eq!(
        daemon
            .post("/v1/tasks:retry", &json!({"ids": many}))
            .await
            .0,
        400
    );
    for path in ["/v1/bulk/x", "/v1/bulk?before=x", "/v1/bulk?limit=x"] {
        assert_eq!(daemon.get(path).await.0, 400, "{path}");
    }
    assert_eq!(
        daemon
            .get("/v1/bulk/0190a5c2-0000-7000-8000-000000000000")
            .await
            .0,
        404
    );
    assert_eq!(daemon.get("/v1/bulk").await.1["bulk"], json!([]));
    assert_eq!(daemon.queue("q").await["dead"], 1);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_token_lists_and_changes_tasks_of_its_queues_only() {
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
        call(&daemon, Method::GET, path, Some(token), Value::Null).await
    };
    let is_dead = async |queue: &str| {
        let (_, answer) = get(&all, &format!("/v1/tasks?queue={queue}&status=dead")).await;
        answer["tasks"]
            .as_array()
            .is_some_and(|tasks| tasks.len() == 1)
    };
    until("both are dead", async || {
        is_dead("acme").await && is_dead("other").await
    })
    .await;
    for (path, want) in [
        ("/v1/tasks", 403),
        ("/v1/tasks?worker=w", 403),
        ("/v1/tasks?queue=other", 403),
        ("/v1/tasks?queue=acme", 200),
    ] {
        let (status, answer) = get(&acme, path).await;
        assert_eq!(status, want, "{path}: {answer}");
    }

    // Tasks of other queues that a worker has done show in no count and no place.
    for (queue, count) in [("acme", 2), ("other", 5)] {
        let tasks: Vec<_> = (0..count)
            .map(|n| json!({"queue": queue, "key": format!("done-{n}")}))
            .collect();
        post(&daemon, "/v1/tasks", &all, json!(tasks)).await;
        let mut done = 0;
        until("the worker has done them", async || {
            let get = json!({"worker": "busy", "queues": [queue], "max_tasks": 9, "wait": "1s"});
            let (_, answer) = post(&daemon, "/v1/tasks:get", &all, get).await;
            let item = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"]});
            let items: Vec<_> = answer["tasks"]
                .as_array()
                .unwrap()
                .iter()
                .map(item)
                .collect();
            done += items.len();
            post(
                &daemon,
                "/v1/tasks:complete",
                &all,
                json!({"worker": "busy", "completions": items}),
            )
            .await;
            done == count
        })
        .await;
        let completed = format!("/v1/tasks?queue={queue}&status=completed");
        until("SQL has it", async || {
            get(&all, &completed).await.1["tasks"]
                .as_array()
                .is_some_and(|tasks| tasks.len() == count)
        })
        .await;
    }
    let by_worker = "/v1/tasks?queue=acme&worker=busy";
    let own = get(&acme, by_worker).await.1;
    // Its queue has three tasks, of which one is dead.
    assert_eq!(
        (own["tasks"].as_array().unwrap().len(), &own["looked_at"]),
        (2, &json!(3)),
        "{own}"
    );
    assert_eq!(get(&all, by_worker).await.1["looked_at"], 7);

    // Another queue's task is not there.
    let (_, answer) = post(&daemon, "/v1/tasks:retry", &acme, json!({"ids": [ids[1]]})).await;
    assert_eq!(answer["results"][0]["status"], "UNKNOWN_TASK", "{answer}");
    let bulk = |queue: &str| json!({"filter": {"queue": queue}, "yes": true});
    assert_eq!(
        post(&daemon, "/v1/tasks:retry", &acme, bulk("other"))
            .await
            .0,
        403
    );
    let (_, others) = post(
        &daemon,
        "/v1/tasks:retry",
        &all,
        json!({"filter": {"queue": "other"}, "yes": true}),
    )
    .await;
    let others = others["bulk"]["id"].as_str().unwrap();
    let (_, own) = post(&daemon, "/v1/tasks:retry", &acme, bulk("acme")).await;
    let own = own["bulk"]["id"].as_str().unwrap();
    assert_eq!(get(&acme, &format!("/v1/bulk/{others}")).await.0, 404);
    assert_eq!(
        post(
            &daemon,
            &format!("/v1/bulk/{others}:stop"),
            &acme,
            json!({})
        )
        .await
        .0,
        404
    );
    let (_, listed) = get(&acme, "/v1/bulk").await;
    assert_eq!(
        listed["bulk"]
            .as_array()
            .unwrap()
            .iter()
            .map(|bulk| &bulk["id"])
            .collect::<Vec<_>>(),
        [own]
    );
    until("the bulk change has changed its task", async || {
        get(&acme, &format!("/v1/bulk/{own}")).await.1["changed"] == 1 && !is_dead("acme").await
    })
    .await;
    let (_, bulk) = get(&all, &format!("/v1/bulk/{own}")).await;
    assert_eq!(bulk["who"], "acme");
}

/// Starts a bulk change, and answers its id.
async fn start(daemon: &Daemon, what: &str, body: Value) -> String {
    let (status, answer) = daemon.post(&format!("/v1/tasks:{what}"), &body).await;
    assert_eq!(status, 200, "{body}: {answer}");
    answer["bulk"]["id"].as_str().unwrap().to_owned()
}

pub(crate) async fn insert_keys(
    daemon: &Daemon,
    queue: &str,
    keys: std::ops::Range<usize>,
) -> Vec<String> {
    let tasks: Vec<_> = keys
        .map(|n| json!({"queue": queue, "key": format!("key-{n}")}))
        .collect();
    let mut ids = Vec::new();
    for tasks in tasks.chunks(1000) {
        ids.extend(daemon.insert(tasks).await);
    }
    until("they are in the queue", async || {
        let (_, books) = daemon.get(&format!("/v1/books?queue={queue}")).await;
        let held = &books["queues"][0]["held"];
        held["redis"]["live"].as_u64() >= Some(ids.len() as u64)
    })
    .await;
    ids
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_change_gives_all_tasks_of_a_filter_other_values() {
    let mut daemon = column::start("max_replicas = 4", &[]).await;
    let ids = insert_keys(&daemon, "q", 0..300).await;
    let leased = daemon.lease_all("a", "q", 20).await;
    assert!(
        daemon
            .complete("a", &leased)
            .await
            .iter()
            .all(|status| status == "OK")
    );
    until("SQL has the completions", async || {
        daemon.queue("q").await["completed"] == 20
    })
    .await;
    let values = json!({"priority": "high", "replicas": 2});
    let with = |more: Value| {
        let mut body = values.clone();
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let (_, counted) = daemon
        .post(
            "/v1/tasks:change",
            &with(json!({"filter": {"queue": "q"}, "dry_run": true})),
        )
        .await;
    assert_counted(&counted, 280, 280);
    for (body, why) in [
        (
            with(json!({"filter": {"queue": "q"}})),
            "send dry_run = true to count them, or yes = true to go on",
        ),
        (
            with(json!({"filter": {"key_prefix": "k"}, "yes": true})),
            "a filter by key_prefix needs a queue",
        ),
        (
            with(json!({"filter": {"queue": "q", "status": "dead"}, "yes": true})),
            "change is for tasks that are PENDING",
        ),
        (
            with(json!({"filter": {"queue": "q", "status": "queued"}, "yes": true})),
            "write UNFINISHED",
        ),
        (
            json!({"filter": {"queue": "q"}, "yes": true}),
            "name a priority or replicas",
        ),
        (
            json!({"filter": {"queue": "q", "status": "completed"}, "priority": "low", "yes": true}),
            "change is for tasks",
        ),
        (
            json!({"filter": {"queue": "q"}, "replicas": 5, "yes": true}),
            "max_replicas",
        ),
    ] {
        let (status, problem) = daemon.post("/v1/tasks:change", &body).await;
        assert!(
            status == 400 && problem["detail"].as_str().unwrap().contains(why),
            "{body}: {problem}"
        );
    }
    assert_eq!(daemon.get("/v1/bulk").await.1["bulk"], json!([]));

    let bulk = ended(
        &daemon,
        &start(
            &daemon,
            "change",
            with(json!({"filter": {"queue": "q"}, "yes": true})),
        )
        .await,
    )
    .await;
    let counts = ["what", "state", "matched", "changed", "failed"].map(|name| &bulk[name]);
    let what = json!("change priority=high replicas=2");
    assert_eq!(
        counts,
        [&what, &json!("DONE"), &json!(280), &json!(280), &json!(0)],
        "{bulk}"
    );
    assert_eq!(
        once(targets(&daemon, "change task (bulk change").await).len(),
        280
    );
    assert_eq!(
        targets(&daemon, "start bulk change: change tasks: priority high")
            .await
            .len(),
        1
    );
    // A second one finds the values there. The command reopens what is completed.
    let bulk = ended(
        &daemon,
        &start(
            &daemon,
            "change",
            with(json!({"filter": {"queue": "q"}, "yes": true})),
        )
        .await,
    )
    .await;
    assert_eq!(
        (&bulk["matched"], &bulk["changed"], &bulk["failed"]),
        (&json!(280), &json!(0), &json!(0)),
        "{bulk}"
    );
    let completed = [
        "tasks",
        "change",
        "--queue",
        "q",
        "--status",
        "completed",
        "--replicas",
        "2",
    ];
    let (code, said, _) = taskd(&daemon, &[&completed[..], &["--dry-run"]].concat());
    assert_eq!((code, said.trim()), (0, "20 tasks would be changed"));
    let (code, said, why) = taskd(&daemon, &[&completed[..], &["--yes"]].concat());
    assert!(
        code == 0 && said.contains("20 of 20 tasks changed"),
        "{said} {why}"
    );
    let (code, said, why) = taskd(
        &daemon,
        &["tasks", "change", "--priority", "high", &ids[299]],
    );
    assert_eq!((code, said.trim()), (0, "1 of 1 tasks changed"), "{why}");
    for worker in ["b", "c"] {
        let leased = daemon
            .lease_all(worker, "q", if worker == "b" { 300 } else { 280 })
            .await;
        assert!(
            leased.iter().all(|task| task["replicas"] == 2),
            "{leased:?}"
        );
        daemon.complete(worker, &leased).await;
    }
    until("all are completed by two", async || {
        daemon.queue("q").await["completed"] == 300
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_change_takes_all_tasks_of_a_filter_from_a_worker() {
    let mut daemon = column::start("", &[]).await;
    insert_keys(&daemon, "q", 0..300).await;
    let hangs = daemon.lease_all("hangs", "q", 200).await;
    let away = ["tasks", "requeue", "--queue", "q", "--away-from", "hangs"];
    let (code, said, why) = taskd(&daemon, &[&away[..], &["--dry-run"]].concat());
    assert_eq!(
        (code, said.trim()),
        (0, "300 tasks would be requeued"),
        "{why}"
    );
    let (code, said, why) = taskd(&daemon, &away);
    assert!(
        code == 2 && said.is_empty() && why.contains("--dry-run"),
        "{why}"
    );
    let (code, said, why) = taskd(&daemon, &[&away[..], &["--yes"]].concat());
    assert!(
        code == 0 && said.contains("300 of 300 tasks changed"),
        "{said} {why}"
    );
    assert_eq!(
        once(targets(&daemon, "requeue task (bulk change").await).len(),
        300
    );
    assert!(
        daemon
            .complete("hangs", &hangs[..5])
            .await
            .iter()
            .all(|status| status == "LEASE_LOST")
    );
    assert!(daemon.lease("hangs", "q", 10, "0s").await.is_empty());
    let done = daemon.work("other", "q", 100).await.len();
    until("SQL has the completions", async || {
        daemon.queue("q").await["completed"] == done
    })
    .await;

    // For one worker, then for all: over gRPC.
    let mut grpc = OperatorClient::connect(daemon.grpc()).await.unwrap();
    let filter = pb::TaskFilter {
        queue: "q".into(),
        ..Default::default()
    };
    let ask = pb::RequeueTasksRequest {
        filter: Some(filter),
        yes: true,
        ..Default::default()
    };
    let to = pb::RequeueTasksRequest {
        to: "hangs".into(),
        ..ask.clone()
    };
    let bulk = grpc
        .requeue_tasks(to)
        .await
        .unwrap()
        .into_inner()
        .bulk
        .unwrap();
    assert_eq!(bulk.what, "requeue to=hangs");
    assert_eq!(ended(&daemon, &bulk.id).await["failed"], 0);
    assert!(daemon.lease("other", "q", 10, "0s").await.is_empty());
    daemon.lease_all("hangs", "q", 1).await;
    let bulk = grpc
        .requeue_tasks(ask)
        .await
        .unwrap()
        .into_inner()
        .bulk
        .unwrap();
    ended(&daemon, &bulk.id).await;
    assert_eq!(daemon.drain("other", "q").await.len(), 300 - done);
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_changes_that_change_and_requeue_go_on_after_a_kill() {
    let mut daemon = column::start("", &[]).await;
    let ids = insert_keys(&daemon, "q", 0..1500).await;
    daemon.lease_all("hangs", "q", 700).await;
    let filter = json!({"queue": "q"});
    let change = start(
        &daemon,
        "change",
        json!({"filter": filter, "yes": true, "replicas": 2}),
    )
    .await;
    let requeue = start(
        &daemon,
        "requeue",
        json!({"filter": filter, "yes": true, "away_from": "hangs"}),
    )
    .await;
    for bulk in [&change, &requeue] {
        // Wherever it stands: the test does not depend on it.
        until("it has begun", async || {
            let (_, shown) = daemon.get(&format!("/v1/bulk/{bulk}")).await;
            shown["matched"].as_u64() > Some(0)
        })
        .await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    for bulk in [&change, &requeue] {
        let shown = ended(&daemon, bulk).await;
        assert_eq!(
            (&shown["state"], &shown["failed"], &shown["matched"]),
            (&json!("DONE"), &json!(0), &json!(1500)),
            "{shown}"
        );
    }
    let all: BTreeSet<String> = ids.into_iter().collect();
    // Each has its act. A page that was done twice has those of a requeue twice.
    assert_eq!(
        once(targets(&daemon, "change task (bulk change").await),
        all
    );
    assert_eq!(
        targets(&daemon, "requeue task (bulk change")
            .await
            .into_iter()
            .collect::<BTreeSet<_>>(),
        all
    );
    assert!(daemon.lease("hangs", "q", 10, "0s").await.is_empty());
    for worker in ["a", "b"] {
        let (mut got, mut ids) = (0, BTreeSet::new());
        until("it has done all", async || {
            let leased = daemon.lease(worker, "q", 1000, "1s").await;
            assert!(leased.iter().all(|task| task["replicas"] == 2));
            ids.extend(
                leased
                    .iter()
                    .map(|task| task["id"].as_str().unwrap().to_owned()),
            );
            got += daemon
                .complete(worker, &leased)
                .await
                .iter()
                .filter(|status| *status == "OK")
                .count();
            got == 1500
        })
        .await;
        assert_eq!(ids, all, "{worker}");
    }
    until("all are completed", async || {
        daemon.queue("q").await["completed"] == 1500
    })
    .await;
    assert!(daemon.stop().await.success());
}
