//! The countries of iso-codes: a fork of each country into its subdivisions, and a join, compared with
//! `jq`.

use std::{collections::BTreeMap, process::Command};

use serde_json::{Value, json};

use crate::support::{daemon::Daemon, until};

const FOLDER: &str = "/usr/share/iso-codes/json";

const FILE: &str = r#"
name = "iso"

[stage.country]

[stage.subdivision]
from = "country"
lease = "2s"
max_attempts = 100

[stage.sorted]
join = "country"
from = "subdivision"
"#;

/// What `jq` makes of a file.
fn jq(program: &str, file: &str) -> Value {
    let output = Command::new("jq")
        .args(["-c", program, &format!("{FOLDER}/{file}")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn subdivisions_are_joined_by_country_whatever_is_killed() {
    let countries = jq("[.\"3166-1\"[].alpha_2]", "iso_3166-1.json");
    let by_country = jq(
        "[.\"3166-2\"[]] | group_by(.code[0:2]) | map({(.[0].code[0:2]): map(.name)}) | add",
        "iso_3166-2.json",
    );
    let sorted = jq(
        "[.\"3166-2\"[]] | group_by(.code[0:2]) | map({(.[0].code[0:2]): (map(.name) | sort)}) | add",
        "iso_3166-2.json",
    );
    let mut daemon = Daemon::start("", &[]).await;
    let put = format!("{}/v1/topologies/iso", daemon.http());
    let client = crate::support::http_client();
    let file = json!({ "text": FILE });
    let applied = client.put(put).json(&file).send().await.unwrap();
    assert!(applied.status().is_success(), "{applied:?}");
    let countries = countries.as_array().unwrap();
    let tasks = countries
        .iter()
        .map(|code| json!({"queue": "iso.country", "key": code}));
    daemon.insert(&tasks.collect::<Vec<_>>()).await;

    let mut joined: BTreeMap<String, Value> = BTreeMap::new();
    let mut rounds = 0;
    until("all trees are done", async || {
        rounds += 1;
        for task in daemon.try_lease("iso.country", 10).await {
            let names = &by_country[task["key"].as_str().unwrap()];
            let names = names.as_array().map_or(&[][..], Vec::as_slice);
            let outputs: Vec<Value> = names
                .iter()
                .map(|name| json!({ "payload": name }))
                .collect();
            daemon
                .try_report(&task, json!({ "discovered": outputs }))
                .await;
        }
        let subdivisions = daemon.try_lease("iso.subdivision", 100).await;
        let all: Vec<&Value> = subdivisions.iter().collect();
        daemon
            .try_reports(&all, |task| json!({"result": task["payload"]}))
            .await;
        for task in daemon.try_lease("iso.sorted", 10).await {
            let payload = &task["payload"];
            let parts = payload["parts"].as_array().unwrap();
            let mut names: Vec<&str> = parts
                .iter()
                .map(|part| part["payload"].as_str().unwrap())
                .collect();
            names.sort_unstable();
            let country = payload["fork"]["key"].as_str().unwrap().to_owned();
            let names = json!(names);
            let answer = daemon.try_report(&task, json!({ "result": names })).await;
            if answer.is_some_and(|answer| answer["status"] == "OK") {
                assert_eq!(joined.insert(country, names), None, "{task} comes twice");
            }
        }
        if rounds % 15 == 7 {
            daemon.kill9_and_restart();
            daemon.ready().await;
        }
        let done = daemon.try_get("/v1/trees?state=OPEN&limit=1").await;
        matches!(done, Some((200, open)) if open["trees"] == json!([]))
    })
    .await;
    assert_eq!(json!(joined), sorted);
    assert!(daemon.stop().await.success());
}
