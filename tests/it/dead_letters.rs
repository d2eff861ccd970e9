//! Dead letters of records that a test puts on taskd's own bus.

use prost::Message;
use redis::AsyncCommands;
use serde_json::json;
use taskd::wire::pb;

use crate::{
    columns::dead_letters::{ONE_ATTEMPT, change, letters, reject_all, status_of},
    support::{daemon::Daemon, until},
};

#[tokio::test]
async fn a_death_that_is_reported_again_does_not_end_a_task_that_was_sent_again() {
    let mut daemon = Daemon::start(ONE_ATTEMPT, &[]).await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    reject_all(&daemon, "w", "q", 1, "no").await;
    letters(&daemon, "", 1).await;
    assert_eq!(
        change(&daemon, "retry", json!({"ids": [id]})).await["changed"],
        1
    );

    // The report of its first death comes again, as after a crash; and behind it a record that
    // nobody can read.
    let death = pb::Died {
        reason: "late".into(),
        attempts: 1,
        history: vec![],
        epoch: 0,
    };
    let report = pb::Report {
        task_id: id
            .parse::<taskd::model::TaskId>()
            .unwrap()
            .as_bytes()
            .to_vec()
            .into(),
        what: Some(pb::report::What::Died(death)),
        at_unix_ms: 1,
    };
    let late = pb::ReportBatch {
        queue: "q".into(),
        shard: 0,
        reports: vec![report],
        ..Default::default()
    }
    .encode_to_vec();
    let mut redis = daemon.redis().await;
    for value in [late, b"\xffno record".to_vec()] {
        let _: String = redis
            .xadd("taskd:{bus}:task-results:0", "*", &[("v", value)])
            .await
            .unwrap();
    }
    letters(&daemon, "kind=record", 1).await;
    assert_ne!(status_of(&daemon, &id).await, "DEAD");

    assert_eq!(daemon.work("w", "q", 1).await, ["k"]);
    until("it is completed", async || {
        status_of(&daemon, &id).await == "COMPLETED"
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_record_is_shown_with_its_place_and_cannot_be_sent_again() {
    let mut daemon = Daemon::start("", &[]).await;
    let mut redis = daemon.redis().await;
    let offset: String = redis
        .xadd(
            "taskd:{bus}:pipeline:0",
            "*",
            &[("v", b"\xffno record".to_vec())],
        )
        .await
        .unwrap();
    let letter = letters(&daemon, "kind=record", 1).await.remove(0);
    assert_eq!(
        (&letter["topic"], &letter["partition"]),
        (&json!("pipeline"), &json!(0))
    );
    assert_eq!(letter["offset"], offset);
    let id = letter["id"].as_str().unwrap();
    let (_, shown) = daemon.get(&format!("/v1/dead-letters/{id}")).await;
    assert_eq!(shown["value_base64"], "/25vIHJlY29yZA==");
    let retried = change(&daemon, "retry", json!({"ids": [id]})).await;
    assert_eq!(
        retried["failed"][0]["error"],
        "a record cannot be sent again; purge it if it is of no use"
    );
    let purged = change(&daemon, "purge", json!({"ids": [id]})).await;
    assert_eq!(purged["changed"], 1);
    letters(&daemon, "", 0).await;
    assert!(daemon.stop().await.success());
}
