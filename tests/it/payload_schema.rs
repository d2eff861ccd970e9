//! JSON Schemas of queues, in a running taskd: inserts, workers' discoveries, letters, and schemas
//! that are wrong.

use std::{collections::BTreeSet, fs, process::Command};

use futures::future::{join, join_all};
use serde_json::{Value, json};
use taskd::wire::pb;

use crate::{
    ingress_limits::{MIB, peak_of},
    support::{daemon::Daemon, until},
};

/// What taskd says of a payload whose object has the name `url` twice.
const TWICE: &str = "the payload's name \"url\" is there twice in one object; with a payload_schema each name is there \
                     once";

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
    answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (text(&one["status"]), text(&one["error"])))
        .collect()
}

async fn letters(daemon: &Daemon, kind: &str, count: usize) -> Vec<Value> {
    let mut letters = Vec::new();
    until("the letters are there", async || {
        let (_, answer) = daemon
            .get(&format!("/v1/dead-letters?queue=pages&kind={kind}"))
            .await;
        letters.clone_from(answer["letters"].as_array().unwrap());
        letters.len() == count
    })
    .await;
    letters
}

/// Puts a completion on the bus, with what it discovered: a process that does not know the schema
/// took it.
async fn report(daemon: &Daemon, leased: &Value, discovered: &[(&str, &str, String)]) {
    let task = |(queue, key, payload): &(&str, &str, String)| pb::NewTask {
        queue: (*queue).into(),
        key: (*key).to_owned().into(),
        payload: payload.clone().into(),
        payload_encoding: pb::Encoding::Json.into(),
        ..Default::default()
    };
    let discovered = discovered.iter().map(task).collect();
    let completed = pb::Completed {
        worker: "w2".into(),
        discovered,
        ..Default::default()
    };
    let id: taskd::model::TaskId = leased["id"].as_str().unwrap().parse().unwrap();
    let report = pb::Report {
        task_id: id.as_bytes().to_vec().into(),
        what: Some(pb::report::What::Completed(completed)),
        at_unix_ms: 1,
    };
    let batch = pb::ReportBatch {
        queue: "q".into(),
        reports: vec![report],
        ..Default::default()
    };
    let value = prost::Message::encode_to_vec(&batch);
    let _: String = redis::AsyncCommands::xadd(
        &mut daemon.redis().await,
        "taskd:{bus}:task-results:0",
        "*",
        &[("v", value)],
    )
    .await
    .unwrap();
}

/// A schema as one writes it for a tree of expressions, with a union of three types of nodes.
fn tree(union: &str) -> String {
    let node = |name: &str| {
        json!({
            "type": "object",
            "properties": {"type": {"const": name}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["type"],
        })
    };
    let nodes = ["and", "or", "not"].map(node);
    json!({"$ref": "#/$defs/node", "$defs": {"node": {union: nodes}}}).to_string()
}

/// A schema whose levels have two forms each: a payload of some depth would take for ever.
fn endless() -> String {
    let level = |level: usize| {
        let next = json!({"$ref": format!("#/$defs/{}", level + 1)});
        let forms = json!([{"not": {"not": next}}, {"allOf": [next]}]);
        (
            level.to_string(),
            json!({"properties": {"child": {"anyOf": forms}}}),
        )
    };
    let mut defs: serde_json::Map<String, Value> = (0..40).map(level).collect();
    defs.insert("40".into(), json!({"type": "string"}));
    json!({"$ref": "#/$defs/0", "$defs": defs}).to_string()
}

fn recursive() -> String {
    format!(
        "[queues.any]\npayload_schema = '{}'\n[queues.one]\npayload_schema = '{}'\n\
         [queues.endless]\npayload_schema = '{}'\n{CONFIG}",
        tree("anyOf"),
        tree("oneOf"),
        endless(),
    )
}

/// Nodes in each other: all are of the type `inner`, and the last one is of the type `leaf`.
fn nodes(depth: usize, inner: &str, leaf: &str) -> Value {
    (1..depth).fold(
        json!({"type": leaf}),
        |node, _| json!({"type": inner, "children": [node]}),
    )
}

fn children(depth: usize) -> Value {
    (1..depth).fold(json!({}), |node, _| json!({"child": node}))
}

#[tokio::test]
async fn a_recursive_payload_is_answered_in_one_line_and_holds_nobody_up() {
    let mut daemon = Daemon::start(&recursive(), &[]).await;
    let mut tasks = Vec::new();
    for queue in ["any", "one"] {
        for depth in [1, 8, 9, 10, 11, 12, 13, 18, 30, 59] {
            for (inner, leaf) in [("bad", "bad"), ("or", "bad"), ("or", "not")] {
                tasks.push(json!({"queue": queue, "payload": nodes(depth, inner, leaf)}));
            }
        }
    }
    tasks.push(json!({"queue": "any", "payload": nodes(100, "bad", "bad")}));
    tasks.push(json!({"queue": "endless", "payload": children(60)}));
    let fits = |task: &Value| task["payload"].to_string().contains("\"not\"");
    let (calling, fits) = (&daemon, &fits);
    let calls = tasks.iter().map(|task| async move {
        let (status, answer) = calling.post("/v1/tasks", task).await;
        let error = answer["results"][0]["error"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        assert_eq!(
            status,
            if fits(task) { 200 } else { 422 },
            "{answer}: {task}"
        );
        error
    });
    let probes = async {
        for _ in 0..20 {
            assert_eq!(daemon.get("/healthz").await.0, 200);
        }
    };
    let ((errors, ()), memory) = peak_of(&daemon, join(join_all(calls), probes)).await;
    for (task, error) in tasks.iter().zip(errors) {
        let want = match task["queue"].as_str().unwrap() {
            "endless" => "holding the payload against the queue's payload_schema takes more than ",
            _ if fits(task) => "",
            _ if task["payload"].to_string().len() > 2000 => {
                "payload has arrays and objects more than 120 deep"
            }
            _ => "the payload does not fit the queue's payload_schema: {",
        };
        assert!(
            error.starts_with(want),
            "{error:?} should say {want:?}: {task}"
        );
        assert!(error.lines().count() <= 1 && error.len() < 1200, "{error}");
    }
    assert!(memory < 150 * MIB, "{} MiB", memory / MIB);
    assert!(daemon.stop().await.success());
}

/// Whatever a report has discovered, it is settled: what does not fit becomes a letter, and all
/// else is stored.
#[tokio::test]
async fn a_discovery_whose_check_would_not_end_costs_only_itself() {
    let mut daemon = Daemon::start(
        &recursive(),
        &["--pipelines", "discovery,fanout,watchdog,tasks,workflow"],
    )
    .await;
    daemon
        .insert(&[
            json!({"queue": "q", "key": "a"}),
            json!({"queue": "q", "key": "b"}),
        ])
        .await;
    let leased = daemon.lease_all("w", "q", 2).await;
    let wrong = [
        json!({"queue": "any", "key": "bad", "payload": nodes(50, "or", "bad")}),
        json!({"queue": "endless", "key": "bad", "payload": children(60)}),
    ];
    for task in &wrong {
        let done = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "discovered": [task]});
        let (_, answer) = daemon
            .post(
                "/v1/tasks:complete",
                &json!({"worker": "w", "completions": [done]}),
            )
            .await;
        // The second one is a repeat: its tasks are not looked at again.
        assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
        let error = answer["results"][0]["error"].as_str().unwrap();
        assert!(
            error.starts_with("1 discovered task is not stored: discovered key \"bad\": "),
            "{answer}"
        );
    }

    let late = [
        ("any", "deep", nodes(59, "bad", "bad").to_string()),
        ("any", "mistake", nodes(59, "or", "bad").to_string()),
        ("any", "fits", nodes(59, "or", "and").to_string()),
        ("endless", "endless", children(60).to_string()),
        ("pages", "twice", "{\"url\":\"x\",\"url\":\"y\"}".to_owned()),
        ("pages", "fits", "{\"url\":\"x\"}".to_owned()),
    ];
    report(&daemon, &leased[1], &late).await;
    let lettered = async |daemon: &Daemon| {
        let (_, answer) = daemon.get("/v1/dead-letters?kind=discovered").await;
        let letters = answer["letters"].as_array().unwrap();
        letters
            .iter()
            .map(|letter| letter["key"].as_str().unwrap().to_owned())
            .collect::<BTreeSet<_>>()
    };
    let all = ["bad", "deep", "endless", "mistake", "twice"].map(str::to_owned);
    until("the letters are there", async || {
        lettered(&daemon).await == BTreeSet::from(all.clone())
    })
    .await;
    let fits =
        async |daemon: &Daemon| daemon.unfinished("pages").await + daemon.unfinished("any").await;
    until("the others are stored", async || fits(&daemon).await == 2).await;
    // Nothing of it comes again.
    daemon.kill9_and_restart();
    daemon.ready().await;
    daemon.insert(&[json!({"queue": "q", "key": "c"})]).await;
    daemon.work("w", "q", 1).await;
    assert_eq!(
        (lettered(&daemon).await, fits(&daemon).await),
        (BTreeSet::from(all), 2)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn names_that_come_twice_are_refused_where_there_is_a_schema() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let insert = async |queue: &str, rest: &str| {
        let body = format!("[{{\"queue\":\"{queue}\",{rest}}}]");
        let (_, answer) = daemon
            .post_text("/v1/tasks", "application/json", body)
            .await;
        (
            answer["results"][0]["status"].clone(),
            answer["results"][0]["error"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
        )
    };
    let twice = "\"payload\":{\"url\":\"file:///etc/passwd\",\"url\":\"https://x\"}";
    let (status, error) = insert("pages", twice).await;
    assert_eq!((&status, &error[..]), (&json!("REJECTED"), TWICE));
    let (status, error) = insert("q", twice).await;
    assert_eq!(
        (&status, &error[..]),
        (&json!("CREATED"), ""),
        "without a schema a payload is the sender's"
    );
    let (status, error) = insert("q", "\"headers\":{\"a\":\"1\",\"a\":\"2\"}").await;
    assert_eq!(
        (&status, &error[..]),
        (&json!("REJECTED"), "headers: duplicate field `a`")
    );
    let (status, error) = insert("q", "\"backoff\":[\"linear\",\"1s\",\"10s\",0.1,\"1h\"]").await;
    assert_eq!(status, json!("REJECTED"));
    assert!(
        error.starts_with("backoff: ") && error.contains("expected a backoff"),
        "{error}"
    );

    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let (id, token) = (&leased["id"], &leased["lease_token"]);
    let done = format!(
        "{{\"worker\":\"w\",\"completions\":[{{\"id\":{id},\"lease_token\":{token},\
         \"discovered\":[{{\"queue\":\"pages\",{twice}}}]}}]}}"
    );
    let (_, answer) = daemon
        .post_text("/v1/tasks:complete", "application/json", done)
        .await;
    assert_eq!(
        answer["results"][0]["error"],
        format!("1 discovered task is not stored: discovered key \"\": {TWICE}"),
        "{answer}"
    );
    assert!(daemon.stop().await.success());
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
    assert_eq!(
        statuses,
        [
            created, rejected, rejected, rejected, created, created, rejected, rejected
        ],
        "{answers:?}"
    );
    assert_eq!(
        answers[1].1,
        "payload at /url does not fit the queue's payload_schema: 7 is not of type \"string\"",
    );
    assert!(
        answers[3]
            .1
            .ends_with("the payload is not JSON: its payload_encoding is BYTES"),
        "{answers:?}"
    );
    assert!(answers[6].1.len() < 700, "{answers:?}");
    letters(&daemon, "refused", 5).await;
    until("the others are stored", async || {
        daemon.unfinished("pages").await == 2
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn json_that_is_too_deep_is_refused_in_every_queue_and_as_a_result() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let task = |queue: &str, payload: &str| {
        format!("{{\"queue\":\"{queue}\",\"key\":\"k\",\"payload\":{payload}}}")
    };
    let insert = async |tasks: &[String]| {
        let body = format!("[{}]", tasks.join(","));
        let (_, answer) = daemon
            .post_text("/v1/tasks", "application/json", body)
            .await;
        answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["error"].as_str().map(str::to_owned))
            .collect()
    };
    let too_deep =
        |what: &str| format!("{what} has arrays and objects more than 120 deep in each other");
    let tasks = [
        task("q", &deep(20_000)),
        task("pages", &deep(20_000)),
        task("pages", &deep(121)),
        task("q", &deep(120)),
    ];
    let errors: Vec<Option<String>> = insert(&tasks).await;
    let payload = Some(too_deep("payload"));
    assert_eq!(errors, [payload.clone(), payload.clone(), payload, None]);
    let half: Vec<Option<String>> = insert(&[task("q", "{\"a\":\"\\ud800\"}")]).await;
    assert!(
        half[0]
            .as_ref()
            .unwrap()
            .ends_with("an escape is half of a character"),
        "{half:?}"
    );

    let leased = daemon.lease_all("w", "q", 1).await.remove(0);
    let complete = async |rest: &str| {
        let (id, token) = (&leased["id"], &leased["lease_token"]);
        let done = format!(
            "{{\"worker\":\"w\",\"completions\":[{{\"id\":{id},\"lease_token\":{token},{rest}}}]}}"
        );
        let (_, answer) = daemon
            .post_text("/v1/tasks:complete", "application/json", done)
            .await;
        answer["results"][0]["error"].as_str().map(str::to_owned)
    };
    assert_eq!(
        complete(&format!("\"result\":{}", deep(121))).await,
        Some(too_deep("result"))
    );
    let discovered = complete(&format!("\"discovered\":[{}]", task("pages", &deep(1000)))).await;
    let discovered = discovered.unwrap();
    assert!(
        discovered.starts_with("1 discovered task is not stored: "),
        "{discovered}"
    );
    assert!(discovered.ends_with(&too_deep("payload")), "{discovered}");
    assert_eq!(complete(&format!("\"result\":{}", deep(120))).await, None);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_discovery_that_does_not_fit_becomes_a_letter_whenever_its_schema_came() {
    let mut daemon = Daemon::start(
        CONFIG,
        &["--pipelines", "discovery,fanout,watchdog,tasks,workflow"],
    )
    .await;
    daemon
        .insert(&[
            json!({"queue": "q", "key": "a"}),
            json!({"queue": "q", "key": "b"}),
        ])
        .await;
    let leased = daemon.lease_all("w", "q", 2).await;
    let discovered = json!([page("1", &json!({"url": "x"})), page("2", &json!({}))]);
    let done = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "discovered": discovered});
    let completions = json!({"worker": "w", "completions": [done]});
    let (_, answer) = daemon.post("/v1/tasks:complete", &completions).await;
    let error = "1 discovered task is not stored: discovered key \"2\": the payload does not fit the queue's \
                 payload_schema: \"url\" is a required property";
    assert_eq!(
        (
            &answer["results"][0]["status"],
            &answer["results"][0]["error"]
        ),
        (&json!("OK"), &json!(error))
    );
    let letter = letters(&daemon, "discovered", 1).await.remove(0);
    assert_eq!(
        (&letter["key"], &letter["parent_id"]),
        (&json!("2"), &leased[0]["id"])
    );

    let late = [
        ("pages", "late", "{\"url\": [\"a secret\"]}".to_owned()),
        ("pages", "fits", "{\"url\": \"x\"}".to_owned()),
    ];
    report(&daemon, &leased[1], &late).await;
    let both = letters(&daemon, "discovered", 2).await;
    let letter = both.iter().find(|letter| letter["key"] == "late").unwrap();
    assert_eq!(letter["parent_id"], leased[1]["id"]);
    assert!(
        letter["reason"].as_str().unwrap().contains("a secret"),
        "{letter}"
    );
    until("the other one is stored", async || {
        daemon.unfinished("pages").await == 2
    })
    .await;
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
    fs::write(
        path("page.json"),
        "{\"properties\": {\"url\": {\"type\": \"strin\"}}}",
    )
    .unwrap();
    let cases = [
        (path("page.json"), "page.json: at /properties/url/type: "),
        (path("none.json"), "cannot read the schema "),
        (
            "{\"$ref\": \"http://127.0.0.1:1/x\"}".into(),
            "http://127.0.0.1:1/x",
        ),
    ];
    for (schema, want) in cases {
        let file = path("taskd.toml");
        fs::write(
            &file,
            format!("partitions = 2\n[queues.pages]\npayload_schema = '{schema}'\n"),
        )
        .unwrap();
        for args in [
            &["check-config", "--config", &file][..],
            &["--pipelines", "all", "--config", &file],
        ] {
            let own = std::env::vars_os()
                .filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
            let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
            let output = command.env_clear().envs(own).args(args).output().unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(
                (output.status.code(), stderr.lines().count()),
                (Some(2), 1),
                "{stderr}"
            );
            assert!(
                stderr.contains(&format!("{file}:3: queues.pages.payload_schema: ")),
                "{stderr}"
            );
            assert!(stderr.contains(want), "{stderr:?} should say {want:?}");
        }
    }
}
