//! JSON Schemas of queues, in a running taskd: inserts, workers' discoveries, letters, and schemas that are wrong.

use std::{fs, process::Command};

use serde_json::{Value, json};

use crate::support::{daemon::Daemon, until};

const CONFIG: &str = r#"
[queues.pages]
payload_schema = '{"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}'
keep_refused = true
"#;

fn page(key: &str, payload: &Value) -> Value {
    json!({"queue": "pages", "key": key, "payload": payload})
}

/// Status and error of each answer.
async fn inserted(daemon: &Daemon, tasks: &Value) -> Vec<(String, String)> {
    let (status, answer) = daemon.post("/v1/tasks", tasks).await;
    assert_eq!(status, 200, "{answer}");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    answer["results"].as_array().unwrap().iter().map(|one| (text(&one["status"]), text(&one["error"]))).collect()
}

async fn letters(daemon: &Daemon, kind: &str, count: usize) -> Vec<Value> {
    let mut letters = Vec::new();
    until("the letters are there", async || {
        let (_, answer) = daemon.get(&format!("/v1/dead-letters?queue=pages&kind={kind}")).await;
        letters.clone_from(answer["letters"].as_array().unwrap());
        letters.len() == count
    })
    .await;
    letters
}

#[tokio::test]
async fn a_payload_that_does_not_fit_is_rejected_and_kept() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let large = json!({"url": "x".repeat(100_000)});
    let wrong_and_large = json!({"url": vec![0; 50_000]});
    let tasks = json!([
        page("1", &json!({"url": "x"})),
        page("2", &json!({"url": 7})),
        page("3", &json!("text")),
        {"queue": "pages", "key": "4", "payload_base64": "e30="},
        {"queue": "other", "key": "5", "payload": "text"},
        page("6", &large),
        page("7", &wrong_and_large),
        {"queue": "pages", "key": "8"},
    ]);
    let answers = inserted(&daemon, &tasks).await;
    let statuses: Vec<&str> = answers.iter().map(|(status, _)| status.as_str()).collect();
    let (created, rejected) = ("CREATED", "REJECTED");
    assert_eq!(statuses, [created, rejected, rejected, rejected, created, created, rejected, rejected], "{answers:?}");
    assert_eq!(answers[1].1, "payload at /url does not fit the queue's payload_schema: 7 is not of type \"string\"",);
    assert!(answers[3].1.ends_with("the payload is not JSON: its payload_encoding is BYTES"), "{answers:?}");
    assert!(answers[6].1.len() < 700, "{answers:?}");
    letters(&daemon, "refused", 5).await;
    until("the others are stored", async || daemon.unfinished("pages").await == 2).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn json_that_is_too_deep_is_refused_in_every_queue_and_as_a_result() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let task = |queue: &str, payload: &str| format!("{{\"queue\":\"{queue}\",\"key\":\"k\",\"payload\":{payload}}}");
    let insert = async |tasks: &[String]| {
        let body = format!("[{}]", tasks.join(","));
        let (_, answer) = daemon.post_text("/v1/tasks", "application/json", body).await;
        answer["results"].as_array().unwrap().iter().map(|one| one["error"].as_str().map(str::to_owned)).collect()
    };
    let too_deep = |what: &str| format!("{what} has arrays and objects more than 120 deep in each other");
    let tasks =
        [task("q", &deep(20_000)), task("pages", &deep(20_000)), task("pages", &deep(121)), task("q", &deep(120))];
    let errors: Vec<Option<String>> = insert(&tasks).await;
    let payload = Some(too_deep("payload"));
    assert_eq!(errors, [payload.clone(), payload.clone(), payload, None]);
    let half: Vec<Option<String>> = insert(&[task("q", "{\"a\":\"\\ud800\"}")]).await;
    assert!(half[0].as_ref().unwrap().ends_with("an escape is half of a character"), "{half:?}");

    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let complete = async |rest: &str| {
        let (id, token) = (&leased["id"], &leased["lease_token"]);
        let done = format!("{{\"worker\":\"w\",\"completions\":[{{\"id\":{id},\"lease_token\":{token},{rest}}}]}}");
        let (_, answer) = daemon.post_text("/v1/tasks:complete", "application/json", done).await;
        answer["results"][0]["error"].as_str().map(str::to_owned)
    };
    assert_eq!(complete(&format!("\"result\":{}", deep(121))).await, Some(too_deep("result")));
    let discovered = complete(&format!("\"discovered\":[{}]", task("pages", &deep(1000)))).await;
    let note = format!("1 discovered task is not stored: discovered[0]: {}", too_deep("payload"));
    assert_eq!(discovered, Some(note));
    assert_eq!(complete(&format!("\"result\":{}", deep(120))).await, None);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_is_told_of_a_discovery_that_does_not_fit_and_a_late_one_becomes_a_letter() {
    let mut daemon = Daemon::start(CONFIG, &["--pipelines", "discovery,fanout,watchdog,tasks"]).await;
    daemon.insert(&[json!({"queue": "q", "key": "a"}), json!({"queue": "q", "key": "b"})]).await;
    let leased = daemon.lease_all("w", "q", 2).await;
    let discovered = json!([page("1", &json!({"url": "x"})), page("2", &json!({}))]);
    let done = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "discovered": discovered});
    let completions = json!({"worker": "w", "completions": [done]});
    let (_, answer) = daemon.post("/v1/tasks:complete", &completions).await;
    let error = "discovered[1]: the payload does not fit the queue's payload_schema: \"url\" is a required property";
    assert_eq!((&answer["results"][0]["status"], &answer["results"][0]["error"]), (&json!("INVALID"), &json!(error)));

    // A process that does not know the schema took the completion.
    let report = |key: &str, payload: &str| taskd::wire::pb::NewTask {
        queue: "pages".into(),
        key: key.to_owned().into(),
        payload: payload.to_owned().into(),
        payload_encoding: taskd::wire::pb::Encoding::Json.into(),
        ..Default::default()
    };
    let completed = taskd::wire::pb::Completed {
        worker: "w2".into(),
        discovered: vec![report("late", "{\"url\": [\"a secret\"]}"), report("fits", "{\"url\": \"x\"}")],
        ..Default::default()
    };
    let id: taskd::model::TaskId = leased[1]["id"].as_str().unwrap().parse().unwrap();
    let report = taskd::wire::pb::Report {
        task_id: id.as_bytes().to_vec().into(),
        what: Some(taskd::wire::pb::report::What::Completed(completed)),
        at_unix_ms: 1,
    };
    let batch = taskd::wire::pb::ReportBatch { queue: "q".into(), reports: vec![report], ..Default::default() };
    let value = prost::Message::encode_to_vec(&batch);
    let _: String =
        redis::AsyncCommands::xadd(&mut daemon.redis().await, "taskd:{bus}:task-results:0", "*", &[("v", value)])
            .await
            .unwrap();
    let letter = letters(&daemon, "discovered", 1).await.remove(0);
    assert_eq!((&letter["key"], &letter["parent_id"]), (&json!("late"), &leased[1]["id"]));
    assert!(letter["reason"].as_str().unwrap().contains("a secret"), "{letter}");
    until("the other one is stored", async || daemon.unfinished("pages").await == 1).await;
    // The log names the rule, and no part of the payload.
    let log = daemon.log();
    assert!(
        log.contains("goes to dead-letters: the payload does not fit the queue's payload_schema at /properties/url")
    );
    assert!(!log.contains("a secret"), "{log}");
    assert!(daemon.stop().await.success());
}

#[test]
fn a_schema_that_does_not_compile_ends_the_start_with_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("page.json"), "{\"properties\": {\"url\": {\"type\": \"strin\"}}}").unwrap();
    let cases = [
        (path("page.json"), "page.json: at /properties/url/type: "),
        (path("none.json"), "cannot read the schema "),
        ("{\"$ref\": \"http://127.0.0.1:1/x\"}".into(), "http://127.0.0.1:1/x"),
    ];
    for (schema, want) in cases {
        let file = path("taskd.toml");
        fs::write(&file, format!("partitions = 2\n[queues.pages]\npayload_schema = '{schema}'\n")).unwrap();
        for args in [&["check-config", "--config", &file][..], &["--pipelines", "all", "--config", &file]] {
            let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
            let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
            let output = command.env_clear().envs(own).args(args).output().unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
            assert!(stderr.contains(&format!("{file}:3: queues.pages.payload_schema: ")), "{stderr}");
            assert!(stderr.contains(want), "{stderr:?} should say {want:?}");
        }
    }
}
