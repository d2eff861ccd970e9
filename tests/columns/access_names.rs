//! Tokens of some queues, and of a worker: what they may name.

use reqwest::Method;
use serde_json::{Value, json};

use super::access::{TOKENS, call, post, token};
use crate::{column, support::daemon::Daemon};

#[tokio::test]
async fn a_token_makes_calls_of_sessions_of_its_queues_only() {
    let daemon = column::start(TOKENS, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let acme = token(&daemon, "acme", &["--roles", "work", "--queues", "acme"]).await;
    post(
        &daemon,
        "/v1/tasks",
        &all,
        json!({"queue": "other", "key": "1"}),
    )
    .await;
    let open = json!({"worker": "bob", "queues": ["other"], "want": 1});
    let (_, opened) = post(&daemon, "/v1/sessions:open", &all, open).await;
    let session = |more: Value| {
        let mut call = json!({"worker": "bob", "session": opened["session"]});
        call.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        call
    };
    let (_, wanted) = post(
        &daemon,
        "/v1/sessions:want",
        &all,
        session(json!({"wait": "30s"})),
    )
    .await;
    let task = &wanted["tasks"][0];
    assert_eq!(task["key"], "1", "{wanted}");
    let more_in_hand = |answer: &Value| (answer["demand"].clone(), answer["in_hand"].clone());
    let mut refused = 0;
    for (method, more) in [
        ("open", json!({"queues": ["acme"]})),
        ("want", json!({"want": 7})),
        ("surrender", json!({})),
        ("pending", json!({})),
        ("report", json!({"started": [task["id"]]})),
        ("close", json!({})),
    ] {
        let (status, answer) = post(
            &daemon,
            &format!("/v1/sessions:{method}"),
            &acme,
            session(more),
        )
        .await;
        assert_eq!(status, 403, "{method}: {answer}");
        assert!(
            !answer.to_string().contains("other"),
            "{method} names a queue of another: {answer}"
        );
        refused += 1;
        assert_eq!(denied(&daemon, &all, "queue").await, refused, "{method}");
        let (_, pending) = post(&daemon, "/v1/sessions:pending", &all, session(json!({}))).await;
        assert_eq!(
            more_in_hand(&pending),
            (json!(0), json!(1)),
            "{method} changed something"
        );
    }
    let completion = json!({"id": task["id"], "lease_token": task["lease_token"]});
    let report = session(json!({"completions": [completion]}));
    let (_, answer) = post(&daemon, "/v1/sessions:report", &all, report).await;
    assert_eq!(
        (&answer["completions"][0]["status"], &answer["counted"]),
        (&json!("OK"), &json!(1))
    );

    // Its own sessions are its own; one that is over is opened anew.
    let (_, own) = post(
        &daemon,
        "/v1/sessions:open",
        &acme,
        json!({"worker": "bob", "queues": ["acme"]}),
    )
    .await;
    let own = json!({"worker": "bob", "session": own["session"]});
    assert_eq!(
        post(&daemon, "/v1/sessions:pending", &acme, own.clone())
            .await
            .0,
        200
    );
    assert_eq!(
        post(&daemon, "/v1/sessions:close", &acme, own.clone())
            .await
            .0,
        200
    );
    assert_eq!(
        post(&daemon, "/v1/sessions:close", &acme, own.clone())
            .await
            .0,
        404
    );
    let again = json!({"worker": "bob", "queues": ["acme"], "session": own["session"]});
    let (status, answer) = post(&daemon, "/v1/sessions:open", &acme, again).await;
    assert_eq!((status, &answer["resumed"]), (200, &json!(false)));
}

/// The calls that taskd has refused for this reason.
async fn denied(daemon: &Daemon, token: &str, reason: &str) -> u32 {
    let metrics = crate::support::http_client()
        .get(format!("{}/metrics", daemon.http()))
        .bearer_auth(token);
    let metrics = metrics.send().await.unwrap().text().await.unwrap();
    let name = format!("taskd_denied_calls_total{{reason=\"{reason}\"}} ");
    let count = metrics.lines().find_map(|line| line.strip_prefix(&name));
    count.map_or(0, |count| count.parse().unwrap())
}

#[tokio::test]
async fn a_workers_token_names_that_worker_only_in_filters_too() {
    let daemon = column::start(TOKENS, &[]).await;
    let own = token(&daemon, "w1", &["--roles", "admin", "--worker", "w1"]).await;
    for (worker, want) in [("w1", 200), ("w2", 403)] {
        let path = format!("/v1/tasks?worker={worker}");
        let (status, answer) = call(&daemon, Method::GET, &path, Some(&own), Value::Null).await;
        assert_eq!(status, want, "{answer}");
        let filter = json!({"queue": "q", "worker": worker});
        for (method, more) in [
            ("retry", json!({})),
            ("cancel", json!({})),
            ("change", json!({"priority": "HIGH"})),
            ("requeue", json!({})),
        ] {
            for way in ["dry_run", "yes"] {
                let mut body = json!({"filter": filter, way: true});
                body.as_object_mut()
                    .unwrap()
                    .extend(more.as_object().unwrap().clone());
                let (status, answer) =
                    post(&daemon, &format!("/v1/tasks:{method}"), &own, body).await;
                assert_eq!(status, want, "{method} {way}: {answer}");
            }
        }
        for side in ["to", "away_from"] {
            let body = json!({"filter": {"queue": "q"}, side: worker, "dry_run": true});
            let (status, answer) = post(&daemon, "/v1/tasks:requeue", &own, body).await;
            assert_eq!(status, want, "{side}: {answer}");
        }
    }
    assert_eq!(denied(&daemon, &own, "worker").await, 11);
    // A filter without a worker is about all of them.
    assert_eq!(
        call(&daemon, Method::GET, "/v1/tasks", Some(&own), Value::Null)
            .await
            .0,
        200
    );
}
