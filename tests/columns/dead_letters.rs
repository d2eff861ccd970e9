//! Dead letters of a running taskd: listed, shown, sent again, purged, over HTTP and by
//! `taskd dead`.

use std::{collections::BTreeSet, process::Command};

use serde_json::{Value, json};

use crate::{
    column,
    support::{daemon::Daemon, until},
};

/// Tasks die at their first rejection.
pub(crate) const ONE_ATTEMPT: &str = "[queues.default]\nmax_attempts = 1";

/// The same; a dead task may be purged after two seconds.
const SHORT_GRACE: &str =
    "grace = \"1s\"\nrepublish_after = \"100ms\"\n[queues.default]\nmax_attempts = 1";

/// Rejects all that a worker gets for good.
pub(crate) async fn reject_all(
    daemon: &Daemon,
    worker: &str,
    queue: &str,
    count: usize,
    reason: &str,
) {
    let leased = daemon.lease_all(worker, queue, count).await;
    let rejection = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "reason": reason, "retry": false});
    let rejections: Vec<_> = leased.iter().map(rejection).collect();
    let (status, answer) = daemon
        .post(
            "/v1/tasks:reject",
            &json!({"worker": worker, "rejections": rejections}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
}

/// The letters of a list, as soon as there are as many.
pub(crate) async fn letters(daemon: &Daemon, query: &str, count: usize) -> Vec<Value> {
    let mut letters = Vec::new();
    until("the letters are there", async || {
        let (status, answer) = daemon.get(&format!("/v1/dead-letters?{query}")).await;
        assert_eq!(status, 200, "{answer}");
        letters.clone_from(answer["letters"].as_array().unwrap());
        letters.len() == count
    })
    .await;
    letters
}

pub(crate) async fn change(daemon: &Daemon, what: &str, body: Value) -> Value {
    let (status, answer) = daemon
        .post(&format!("/v1/dead-letters:{what}"), &body)
        .await;
    assert_eq!(status, 200, "{answer}");
    answer
}

pub(crate) async fn status_of(daemon: &Daemon, id: &str) -> String {
    let (_, task) = daemon.get(&format!("/v1/tasks/{id}")).await;
    task["status"].as_str().unwrap_or_default().to_owned()
}

/// Exit code, stdout, stderr of `taskd dead`.
fn dead(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http())
        .arg("dead")
        .args(args);
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Twelve failures of one kind are one reason, by HTTP and by the command.
#[tokio::test]
async fn letters_are_counted_by_their_reasons() {
    let daemon = column::start(ONE_ATTEMPT, &[]).await;
    let tasks: Vec<_> = (0..5)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    for reason in [
        "took longer than 5 s",
        "took longer than 12 s",
        "gone",
        "took longer than 7 s",
    ] {
        reject_all(&daemon, "w", "q", 1, reason).await;
    }
    letters(&daemon, "queue=q", 4).await;
    let (status, found) = daemon.get("/v1/dead-letters:reasons?queue=q").await;
    assert_eq!(status, 200, "{found}");
    let reasons = found["reasons"].as_array().unwrap();
    assert_eq!(reasons.len(), 2, "{found}");
    assert_eq!(
        (&reasons[0]["reason"], &reasons[0]["count"]),
        (&json!("took longer than # s"), &json!(3))
    );
    assert_eq!(reasons[0]["prefix"], "took longer than ");
    assert_eq!(
        (&found["looked_at"], &found["at_least"]),
        (&json!(4), &json!(false))
    );
    let found = daemon
        .get("/v1/dead-letters:reasons?queue=q&reason=gone")
        .await
        .1;
    assert_eq!(found["reasons"][0]["count"], 1, "{found}");
    assert_eq!(
        daemon.get("/v1/dead-letters:reasons?reason=gone").await.0,
        400
    );
    let (code, stdout, stderr) = dead(&daemon, &["reasons", "q", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let said: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(said["reasons"][0]["count"], 3, "{said}");
}

#[tokio::test]
async fn a_dead_task_is_shown_and_sent_again_and_done_by_the_worker_that_failed() {
    let mut daemon = column::start(ONE_ATTEMPT, &[]).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let task = json!({"queue": "q", "key": "k", "payload": {"url": "x"}, "headers": {"h": "v"}, "traceparent": trace});
    let id = daemon
        .insert(&[task, json!({"queue": "r", "key": "other"})])
        .await
        .remove(0);
    reject_all(&daemon, "w", "q", 1, "timeout after 3 s").await;
    reject_all(&daemon, "w", "r", 1, "other").await;

    let listed = letters(&daemon, "queue=q", 1).await.remove(0);
    assert_eq!(
        (&listed["id"], &listed["kind"], &listed["key"]),
        (&json!(id), &json!("task"), &json!("k"))
    );
    assert_eq!(
        (&listed["reason"], listed.get("payload")),
        (&json!("timeout after 3 s"), None)
    );
    let (_, shown) = daemon.get(&format!("/v1/dead-letters/{id}")).await;
    assert_eq!(
        (&shown["payload"], &shown["headers"]),
        (&json!({"url": "x"}), &json!({"h": "v"}))
    );
    assert_eq!(
        (&shown["attempts"], &shown["traceparent"]),
        (&json!(1), &json!(trace))
    );
    let history = shown["history"].as_array().unwrap();
    assert_eq!(
        (&history[0]["worker"], &history[0]["error"]),
        (&json!("w"), &json!("timeout after 3 s"))
    );
    assert_eq!(history.len(), 1);
    letters(&daemon, "", 2).await;
    letters(&daemon, "queue=q&reason=timeout", 1).await;
    letters(&daemon, "queue=q&reason=other", 0).await;

    let filter = json!({"queue": "q", "reason": "timeout"});
    let counted = change(&daemon, "retry", json!({"filter": filter, "dry_run": true})).await;
    assert_eq!(
        (&counted["matched"], &counted["changed"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(status_of(&daemon, &id).await, "DEAD");
    let retried = change(&daemon, "retry", json!({"filter": filter, "yes": true})).await;
    assert_eq!(retried, json!({"matched": 1, "changed": 1, "failed": []}));
    letters(&daemon, "", 1).await;

    let leased = daemon.lease_all("w", "q", 1).await;
    assert_eq!(
        (&leased[0]["id"], &leased[0]["attempt"]),
        (&json!(id), &json!(1))
    );
    assert_eq!(daemon.complete("w", &leased).await, ["OK"]);
    until("it is completed", async || {
        status_of(&daemon, &id).await == "COMPLETED"
    })
    .await;
    let (status, answer) = daemon.get(&format!("/v1/dead-letters/{id}")).await;
    assert_eq!(status, 404, "{answer}");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_task_may_die_and_be_sent_again_many_times() {
    let mut daemon = column::start(SHORT_GRACE, &[]).await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    for life in 0..4 {
        let reason = format!("life {life}");
        reject_all(&daemon, "w", "q", 1, &reason).await;
        let letter = letters(&daemon, "", 1).await.remove(0);
        assert_eq!(
            (&letter["id"], &letter["reason"]),
            (&json!(id), &json!(reason))
        );
        let retried = change(&daemon, "retry", json!({"ids": [id]})).await;
        assert_eq!(retried["changed"], 1, "{retried}");
        // It is not dead any more, so there is no letter to send again.
        let again = change(&daemon, "retry", json!({"ids": [id]})).await;
        assert_eq!(
            (&again["matched"], &again["changed"]),
            (&json!(0), &json!(0))
        );
        assert!(
            again["failed"][0]["error"]
                .as_str()
                .unwrap()
                .starts_with("there is no letter"),
            "{again}"
        );
    }
    assert_eq!(daemon.drain("w", "q").await, ["k"]);
    assert_eq!(daemon.queue("q").await["dead"], 0);
    until("Redis has nothing of its five ends", async || {
        let (_, dump) = daemon.get("/v1/dump?queue=q").await;
        let shards = dump["shards"].as_array().unwrap();
        shards.iter().all(|shard| {
            shard["holds"]["finals_count"] == 0 && shard["holds"]["records_count"] == 0
        })
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn what_was_never_stored_is_kept_and_inserted_when_it_is_sent_again() {
    let config = "max_payload_bytes = 10\n[queues.strict]\nkeep_refused = true\n[queues.small]\nmax_unfinished = 1";
    let mut daemon = column::start(config, &[]).await;
    let long = "longer than ten bytes";
    // A version of W3C's that is longer than the first one.
    let traceparent = format!(
        "cc-{}-{}-01-{}",
        "1".repeat(32),
        "2".repeat(16),
        "x".repeat(50)
    );
    let refused = |queue: &str| json!({"queue": queue, "key": "refused", "payload": long, "traceparent": &traceparent});
    let (_, answer) = daemon
        .post("/v1/tasks", &json!([refused("strict"), refused("other")]))
        .await;
    assert_eq!(
        crate::support::daemon::statuses(&answer),
        ["REJECTED", "REJECTED"]
    );
    // A crawl finds two tasks for a queue that takes one.
    daemon
        .insert(&[json!({"queue": "q", "key": "parent"})])
        .await;
    let parent = daemon.lease_all("w", "q", 1).await.remove(0);
    let found = ["a", "b"].map(|key| json!({"queue": "small", "key": key, "payload": 1}));
    let done =
        json!({"id": parent["id"], "lease_token": parent["lease_token"], "discovered": found});
    daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [done]}),
        )
        .await;

    let listed = letters(&daemon, "", 2).await;
    let of = |kind: &str| {
        listed
            .iter()
            .find(|letter| letter["kind"] == kind)
            .expect(kind)
            .clone()
    };
    let (refused, discovered) = (of("refused"), of("discovered"));
    assert_eq!(
        (&refused["queue"], &refused["key"]),
        (&json!("strict"), &json!("refused"))
    );
    assert!(
        refused["reason"].as_str().unwrap().contains("at most 10"),
        "{refused}"
    );
    assert_eq!(
        (&discovered["queue"], &discovered["parent_id"]),
        (&json!("small"), &parent["id"])
    );
    let (_, shown) = daemon
        .get(&format!(
            "/v1/dead-letters/{}",
            refused["id"].as_str().unwrap()
        ))
        .await;
    assert_eq!(shown["payload"], long);

    // A task that is still wrong keeps its letter, and gets no second one.
    let retried = change(&daemon, "retry", json!({"ids": [refused["id"]]})).await;
    assert_eq!(
        (&retried["matched"], &retried["changed"]),
        (&json!(1), &json!(0))
    );
    assert!(
        retried["failed"][0]["error"]
            .as_str()
            .unwrap()
            .contains("at most 10"),
        "{retried}"
    );
    letters(&daemon, "", 2).await;
    // A call that finds no room leaves the letter.
    assert_eq!(daemon.work("w", "small", 1).await.len(), 1);
    let all = json!({"filter": {}, "yes": true});
    until("there is room", async || {
        change(&daemon, "retry", all.clone()).await["changed"] == 1
    })
    .await;
    letters(&daemon, "", 1).await;
    assert_eq!(daemon.work("w", "small", 1).await.len(), 1);
    assert!(daemon.stop().await.success());
}

/// A letter that lacks parts of its task would make another task of them.
#[tokio::test]
async fn a_letter_without_the_whole_task_is_not_sent_again() {
    let config = "[queues.default]\nkeep_refused = true";
    let mut daemon = column::start(config, &[]).await;
    let long_queue = json!({"queue": "s".repeat(70), "key": "k"});
    let long_keys =
        ["1", "2"].map(|end| json!({"queue": "v", "key": format!("{}{end}", "p".repeat(5000))}));
    let [one, two] = &long_keys;
    let (_, answer) = daemon
        .post("/v1/tasks", &json!([long_queue, one, two]))
        .await;
    assert_eq!(crate::support::daemon::statuses(&answer), ["REJECTED"; 3]);
    let large =
        |key: &str, field: &str| json!({"queue": "v", "key": key, field: "x".repeat(9 << 20)});
    for (key, field) in [("a", "payload"), ("b", "payload"), ("i", "idempotency_key")] {
        let (_, answer) = daemon.post("/v1/tasks", &json!([large(key, field)])).await;
        assert_eq!(crate::support::daemon::statuses(&answer), ["REJECTED"]);
    }
    // The two long keys are one when they are cut.
    let listed = letters(&daemon, "", 5).await;
    let keys: BTreeSet<&str> = listed
        .iter()
        .filter_map(|letter| letter["key"].as_str())
        .collect();
    assert!(keys.is_superset(&["a", "b", "i", "k"].into()), "{keys:?}");
    let retried = change(&daemon, "retry", json!({"filter": {}, "yes": true})).await;
    assert_eq!(
        (&retried["matched"], &retried["changed"]),
        (&json!(5), &json!(0))
    );
    let failed = retried["failed"].as_array().unwrap();
    assert_eq!(failed.len(), 5, "{retried}");
    for failed in failed {
        assert_eq!(
            failed["error"],
            "the letter lacks parts of the task: insert the task anew"
        );
    }
    letters(&daemon, "", 5).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_wrong_request_is_one_line_and_changes_nothing() {
    let mut daemon = column::start(ONE_ATTEMPT, &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    reject_all(&daemon, "w", "q", 1, "no").await;
    letters(&daemon, "", 1).await;
    for (body, why) in [
        (
            json!({"filter": {"queue": "q"}}),
            "send dry_run = true to count them, or yes = true to go on",
        ),
        (json!({}), "name letters by ids or by a filter"),
        (json!({"ids": ["x"]}), "ids[0]: \"x\" is not a letter's id"),
        (
            json!({"filter": {"reason": "n"}, "yes": true}),
            "a filter by reason needs a queue",
        ),
        (
            json!({"filter": {"queue": "a b"}, "yes": true}),
            "contains ' '",
        ),
        (
            json!({"filter": {"kind": "dead"}, "yes": true}),
            "unknown kind \"dead\"",
        ),
        (
            json!({"filter": {}, "yes": true, "limit": 1001}),
            "limit is 1001; must be 1 to 1000",
        ),
        (
            json!({"filter": {}, "yes": true, "cursor": "x"}),
            "the cursor is not one",
        ),
        (
            json!({"filter": {"queu": "q"}, "yes": true}),
            "unknown field `queu`",
        ),
    ] {
        for what in ["retry", "purge"] {
            let (status, problem) = daemon
                .post(&format!("/v1/dead-letters:{what}"), &body)
                .await;
            assert_eq!(status, 400, "{body}: {problem}");
            assert!(
                problem["detail"].as_str().unwrap().contains(why),
                "{problem} should say {why:?}"
            );
        }
    }
    for path in [
        "?limit=0x",
        "?kind=x",
        "?since=yesterday",
        "?reason=n",
        "/x",
    ] {
        assert_eq!(
            daemon.get(&format!("/v1/dead-letters{path}")).await.0,
            400,
            "{path}"
        );
    }
    letters(&daemon, "", 1).await;
    let (code, said, why) = dead(&daemon, &["purge", "--kind", "task", "--yes"]);
    assert_eq!((code, said.trim()), (1, "0 of 1 letters purged"), "{why}");
    assert!(why.contains("the task died less than "), "{why}");
    letters(&daemon, "", 1).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn pages_are_followed_by_their_cursors() {
    let mut daemon = column::start(SHORT_GRACE, &[]).await;
    let tasks: Vec<Value> = (0..7)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
        .collect();
    daemon.insert(&tasks).await;
    reject_all(&daemon, "w", "q", 7, "no").await;
    letters(&daemon, "", 7).await;
    let (mut cursor, mut keys) = (String::new(), Vec::new());
    loop {
        let (_, page) = daemon
            .get(&format!("/v1/dead-letters?limit=3&cursor={cursor}"))
            .await;
        let letters = page["letters"].as_array().unwrap();
        keys.extend(
            letters
                .iter()
                .map(|letter| letter["key"].as_str().unwrap().to_owned()),
        );
        let Some(next) = page["cursor"].as_str() else {
            break;
        };
        cursor = next.to_owned();
    }
    assert_eq!(
        crate::support::daemon::once(keys),
        crate::support::daemon::keys(0, 7)
    );
    // A bulk call changes as many as it looks at, and says where it ended.
    let (_, first) = daemon.get("/v1/dead-letters?limit=1").await;
    let newest = json!({"ids": [first["letters"][0]["id"]]});
    let mut calls = Vec::new();
    until("the newest may be purged", async || {
        let answer = change(&daemon, "purge", newest.clone()).await;
        let failed = answer["failed"].as_array().unwrap();
        assert!(failed.iter().all(|one| {
            one["error"]
                .as_str()
                .unwrap()
                .starts_with("the task died less than 2s 200ms ago")
        }));
        answer["changed"] == 1
    })
    .await;
    let mut body = json!({"filter": {"queue": "q"}, "yes": true, "limit": 3});
    loop {
        let answer = change(&daemon, "purge", body.clone()).await;
        calls.push(answer["changed"].as_u64().unwrap());
        let Some(next) = answer.get("cursor") else {
            break;
        };
        body["cursor"] = next.clone();
    }
    assert_eq!(calls, [3, 3, 0]);
    let (_, answer) = daemon.post("/v1/tasks", &json!(tasks)).await;
    assert!(
        crate::support::daemon::statuses(&answer)
            .iter()
            .all(|status| status == "DUPLICATE"),
        "{answer}"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_lists_shows_retries_and_purges() {
    let mut daemon = column::start(SHORT_GRACE, &[]).await;
    let ids = daemon
        .insert(&["a", "b", "c"].map(|key| json!({"queue": "q", "key": key, "payload": {"n": 1}})))
        .await;
    reject_all(&daemon, "w", "q", 3, "broken link").await;
    letters(&daemon, "", 3).await;

    let (code, table, _) = dead(&daemon, &["list", "--queue", "q"]);
    assert_eq!((code, table.lines().count()), (0, 4), "{table}");
    assert!(
        table.contains("KEY OR PLACE") && table.contains("broken link") && table.contains(&ids[0]),
        "{table}"
    );
    let (_, lines, why) = dead(
        &daemon,
        &["list", "--json", "--limit", "2", "--since", "1h"],
    );
    assert_eq!(why, "2 shown, and there may be more; --limit N shows N\n");
    assert_eq!(
        dead(&daemon, &["list", "--json", "--limit", "3"]).2,
        "",
        "these are all"
    );
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (lines.len(), &lines[0]["reason"]),
        (2, &json!("broken link"))
    );
    let (_, none, _) = dead(&daemon, &["list", "--json", "--until", "1h"]);
    assert_eq!(none, "");
    let (code, shown, _) = dead(&daemon, &["show", &ids[0], "--json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (code, &shown["payload"]["n"], &shown["history"][0]["worker"]),
        (0, &json!(1), &json!("w"))
    );

    let (code, said, why) = dead(&daemon, &["retry", "--queue", "q"]);
    assert_eq!((code, said.as_str()), (2, ""));
    assert_eq!(
        why.trim(),
        "taskd: this may change many letters: say --dry-run to count them, or --yes to go on"
    );
    let (code, said, _) = dead(
        &daemon,
        &["retry", "--queue", "q", "--reason", "broken", "--dry-run"],
    );
    assert_eq!((code, said.trim()), (0, "3 letters would be sent again"));
    let (code, said, hint) = dead(
        &daemon,
        &["retry", "--queue", "q", "--reason", "link", "--yes"],
    );
    assert_eq!((code, said.trim()), (0, "0 of 0 letters sent again"));
    assert!(hint.contains("no reason begins with \"link\""), "{hint}");
    let (code, said, _) = dead(&daemon, &["retry", &ids[0]]);
    assert_eq!((code, said.trim()), (0, "1 of 1 letters sent again"));
    let (code, said, why) = dead(&daemon, &["retry", &ids[0]]);
    assert_eq!(
        (code, said.trim()),
        (1, "0 of 1 letters sent again"),
        "{why}"
    );
    let (code, said, gone) = dead(&daemon, &["show", "0190a5c2-0000-7000-8000-000000000000"]);
    assert_eq!(
        (code, said.as_str(), gone.lines().count()),
        (1, "", 1),
        "{gone}"
    );
    assert!(
        why.contains(&format!("{}: there is no letter", ids[0])),
        "{why}"
    );
    let (code, said, _) = dead(&daemon, &["retry", "--queue", "q", "--yes", "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(
        (code, said),
        (
            0,
            json!({"matched": 2, "changed": 2, "failed": 0, "dry_run": false})
        )
    );
    let mut done = daemon.drain("w", "q").await;
    done.sort();
    assert_eq!(done, ["a", "b", "c"]);

    daemon.insert(&[json!({"queue": "q", "key": "d"})]).await;
    reject_all(&daemon, "w", "q", 1, "no").await;
    letters(&daemon, "", 1).await;
    until("it may be purged", async || {
        let (code, said, why) = dead(&daemon, &["purge", "--kind", "task", "--yes"]);
        assert!(
            code == 0 || why.contains("the task died less than 2s 200ms ago"),
            "{why}"
        );
        said.trim() == "1 of 1 letters purged"
    })
    .await;
    let acts = daemon.get("/v1/acts").await.1;
    let purges = acts["acts"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|act| act["what"] == "purge dead letter")
        .count();
    assert_eq!(purges, 1, "a refusal changed nothing: {acts}");
    for args in [
        &["show", "x"][..],
        &["list", "--reason", "x"],
        &["retry", "q", "x", "--kind", "task"],
    ] {
        let (code, said, why) = dead(&daemon, args);
        assert_eq!(
            (code, said.as_str(), why.lines().count()),
            (2, "", 1),
            "{args:?}: {why}"
        );
    }
    assert!(daemon.stop().await.success());
}
