//! Enrichment through the running binary, with an endpoint that answers, is slow, answers nonsense,
//! or is not there.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Notify, task::JoinHandle};

use crate::{
    column,
    support::{
        PATIENCE,
        daemon::{Daemon, statuses},
        until,
    },
};

#[derive(Clone, Copy, Debug)]
enum Mood {
    Answers,
    Sleeps,
    Says(u16, &'static str),
    TooMuch,
    Redirects,
    /// The first answer waits for ever.
    Holds,
}

struct Inner {
    mood: Mutex<Mood>,
    requests: Mutex<Vec<(HeaderMap, Value)>>,
    asked: Notify,
}

/// A small HTTP server. Its verdict depends on the beginning of the key.
struct Endpoint {
    inner: Arc<Inner>,
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl Endpoint {
    async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    async fn start_at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (mood, requests, asked) = (Mutex::new(Mood::Answers), Mutex::default(), Notify::new());
        let inner = Arc::new(Inner {
            mood,
            requests,
            asked,
        });
        let router = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&inner));
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self {
            inner,
            address,
            server,
        }
    }

    fn be(&self, mood: Mood) {
        *self.inner.mood.lock().unwrap() = mood;
    }

    fn config(&self, more: &str) -> String {
        format!(
            "[queues.e]\nenrich_url = \"http://{}/enrich?token=hidden\"\n{more}\n",
            self.address
        )
    }

    fn requests(&self) -> Vec<(HeaderMap, Value)> {
        self.inner.requests.lock().unwrap().clone()
    }

    /// The keys that it was asked about.
    fn keys(&self) -> Vec<String> {
        let requests = self.requests();
        let tasks = requests
            .iter()
            .flat_map(|(_, body)| body["tasks"].as_array().unwrap());
        tasks
            .map(|task| task["key"].as_str().unwrap().to_owned())
            .collect()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(State(inner): State<Arc<Inner>>, headers: HeaderMap, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap();
    let is_first = {
        let mut requests = inner.requests.lock().unwrap();
        requests.push((headers, body.clone()));
        requests.len() == 1
    };
    inner.asked.notify_one();
    let mood = *inner.mood.lock().unwrap();
    let keys = body["tasks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|task| task["key"].as_str().unwrap());
    if keys.into_iter().any(|key| key.starts_with("refused-")) {
        return StatusCode::UNPROCESSABLE_ENTITY.into_response();
    }
    match mood {
        Mood::Sleeps => tokio::time::sleep(Duration::from_secs(60)).await,
        Mood::Holds if is_first => std::future::pending().await,
        Mood::Says(status, text) => {
            return (StatusCode::from_u16(status).unwrap(), text).into_response();
        }
        Mood::TooMuch => return " ".repeat(10_000).into_response(),
        Mood::Redirects => {
            return (StatusCode::FOUND, [(header::LOCATION, "/elsewhere")]).into_response();
        }
        Mood::Answers | Mood::Holds => {}
    }
    let tasks: Vec<Value> = body["tasks"]
        .as_array()
        .unwrap()
        .iter()
        .map(verdict)
        .collect();
    json!({ "tasks": tasks }).to_string().into_response()
}

fn verdict(task: &Value) -> Value {
    match task["key"].as_str().unwrap().split('-').next().unwrap() {
        "urgent" => json!({"priority": "high", "headers": {"category": "news"}}),
        "reshape" => json!({"payload": {"n": task["payload"]["n"].as_i64().unwrap() + 1}}),
        "bad" => json!({"reject": "not\nthis one"}),
        "long" => json!({"payload": "x".repeat(2000)}),
        _ => json!({"headers": {"category": "other"}}),
    }
}

fn task(key: &str) -> Value {
    json!({"queue": "e", "key": key, "payload": {"n": 1}, "headers": {"h": "v"}})
}

/// The tasks of the queue by key, when there are so many.
async fn leased(daemon: &Daemon, count: usize) -> BTreeMap<String, Value> {
    let tasks = daemon.lease_all("w", "e", count).await;
    tasks
        .into_iter()
        .map(|task| (task["key"].as_str().unwrap().to_owned(), task))
        .collect()
}

async fn letters(daemon: &Daemon, kind: &str, count: usize) -> Vec<Value> {
    let mut letters = Vec::new();
    until("the letters are there", async || {
        let (_, answer) = daemon
            .get(&format!("/v1/dead-letters?queue=e&kind={kind}"))
            .await;
        letters.clone_from(answer["letters"].as_array().unwrap());
        letters.len() == count
    })
    .await;
    letters
}

/// The value of a metric; 0 without one.
async fn metric(daemon: &Daemon, name: &str) -> f64 {
    let (_, text) = daemon.get("/metrics").await;
    let text = text.as_str().unwrap().to_owned();
    let line = text.lines().find(|line| line.starts_with(name));
    line.map_or(0.0, |line| {
        line.rsplit(' ').next().unwrap().parse().unwrap()
    })
}

async fn outcome(daemon: &Daemon, outcome: &str) -> f64 {
    metric(
        daemon,
        &format!("taskd_enrichment_tasks_total{{queue=\"e\",outcome=\"{outcome}\"}}"),
    )
    .await
}

fn is_skipped(task: &Value) -> bool {
    task["headers"]["taskd-enrichment"] == "skipped"
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_changes_and_rejects_new_tasks_and_duplicates_cost_no_call() {
    let endpoint = Endpoint::start().await;
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "Authorization: Bearer open-sesame\n").unwrap();
    let header = format!(
        "enrich_timeout = \"5s\"\nkeep_refused = true\nenrich_header = \"file:{}\"",
        secret.path().display()
    );
    let mut daemon = column::start(&endpoint.config(&header), &[]).await;
    let tasks = json!([task("plain"), task("urgent"), task("reshape"), task("bad"), task("plain"), {"queue": "o", "key": "x"}]);
    let (_, answer) = daemon.post("/v1/tasks", &tasks).await;
    let results = answer["results"].as_array().unwrap();
    let said: Vec<_> = results
        .iter()
        .map(|one| one["status"].as_str().unwrap())
        .collect();
    assert_eq!(
        said,
        [
            "CREATED",
            "CREATED",
            "CREATED",
            "REJECTED",
            "DUPLICATE",
            "CREATED"
        ],
        "{answer}"
    );
    assert_eq!(
        results[3]["error"],
        "the queue's enrichment rejected the task: not this one"
    );
    letters(&daemon, "refused", 1).await;

    let (headers, body) = endpoint.requests().remove(0);
    assert_eq!(
        (&body["queue"], body["tasks"].as_array().unwrap().len()),
        (&json!("e"), 4),
        "{body}"
    );
    assert_eq!(headers["authorization"], "Bearer open-sesame");
    let first = &body["tasks"][0];
    assert_eq!(
        headers["traceparent"],
        first["traceparent"].as_str().unwrap()
    );
    assert_eq!(
        (&first["id"], &first["payload"], &first["headers"]),
        (&results[0]["id"], &json!({"n": 1}), &json!({"h": "v"}))
    );

    // Neither the first tasks nor their repeats are asked about again.
    let (_, again) = daemon
        .post("/v1/tasks", &json!([task("plain"), task("urgent")]))
        .await;
    assert!(
        again["results"]
            .as_array()
            .unwrap()
            .iter()
            .all(|one| one["status"] == "DUPLICATE"),
        "{again}"
    );
    assert_eq!(endpoint.keys(), ["plain", "urgent", "reshape", "bad"]);

    let leased = leased(&daemon, 3).await;
    assert_eq!(
        (
            &leased["urgent"]["priority"],
            &leased["urgent"]["headers"]["category"]
        ),
        (&json!("high"), &json!("news"))
    );
    assert_eq!(
        leased["plain"]["headers"],
        json!({"h": "v", "category": "other"})
    );
    assert_eq!(leased["reshape"]["payload"], json!({"n": 2}));

    // The same for discovered tasks.
    let discovered = json!([task("child"), task("bad-child"), task("plain")]);
    let plain = &leased["plain"];
    let done =
        json!({"id": plain["id"], "lease_token": plain["lease_token"], "discovered": discovered});
    let (_, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": [done]}),
        )
        .await;
    assert_eq!(answer["results"][0]["status"], "OK", "{answer}");
    let letter = letters(&daemon, "discovered", 1).await.remove(0);
    assert_eq!(
        (&letter["key"], &letter["parent_id"]),
        (&json!("bad-child"), &plain["id"])
    );
    let child = daemon.lease_all("w2", "e", 1).await.remove(0);
    assert_eq!(
        (&child["key"], &child["headers"]["category"]),
        (&json!("child"), &json!("other"))
    );
    assert_eq!(endpoint.keys()[4..], ["child", "bad-child"]);
    assert_eq!(
        (
            outcome(&daemon, "enriched").await,
            outcome(&daemon, "rejected").await
        ),
        (4.0, 2.0)
    );
    assert!(!daemon.log().contains("open-sesame"));

    // A rejected key that stands twice in a call.
    let (_, answer) = daemon
        .post("/v1/tasks", &json!([task("bad"), task("bad")]))
        .await;
    assert_eq!(statuses(&answer), ["REJECTED", "REJECTED"], "{answer}");
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_go_on_without_when_the_answer_is_late_or_wrong() {
    let endpoint = Endpoint::start().await;
    let config = "enrich_timeout = \"5s\"\nenrich_failures = 1000\nenrich_answer_bytes = \"1KiB\"";
    let mut daemon = column::start(&endpoint.config(config), &[]).await;
    let moods = [
        (Mood::Sleeps, "timed_out"),
        (Mood::Says(500, "{}"), "failed"),
        (Mood::Redirects, "failed"),
        (Mood::TooMuch, "wrong"),
        (Mood::Says(200, "garbage"), "wrong"),
        (Mood::Says(200, "{\"tasks\": [{}, {}]}"), "wrong"),
        (
            Mood::Says(200, "{\"tasks\": [{\"priority\": \"urgent\"}]}"),
            "wrong",
        ),
        (
            Mood::Says(200, "{\"tasks\": [{\"headers\": {\"a\\nb\": \"c\"}}]}"),
            "wrong",
        ),
    ];
    let mut counts = BTreeMap::new();
    for (place, (mood, why)) in moods.into_iter().enumerate() {
        endpoint.be(mood);
        daemon.insert(&[task(&place.to_string())]).await;
        *counts.entry(why).or_insert(0.0) += 1.0;
        assert_eq!(outcome(&daemon, why).await, counts[why], "{mood:?}");
    }
    assert_eq!(
        endpoint.requests().len(),
        moods.len(),
        "no redirect is followed"
    );
    let leased = leased(&daemon, moods.len()).await;
    assert!(
        leased
            .values()
            .all(|task| is_skipped(task) && task["headers"]["h"] == "v"),
        "{leased:?}"
    );
    let log = daemon.log();
    for why in [
        "the answer has 2 tasks; 1 were asked about",
        "unknown priority",
        "contains a control character",
    ] {
        assert_eq!(
            log.lines().filter(|line| line.contains(why)).count(),
            1,
            "{why}"
        );
    }
    assert!(!log.contains("token=hidden"));
    assert_eq!(metric(&daemon, "taskd_enrichment_open_breakers").await, 0.0);
    assert!(daemon.stop().await.success());
}

/// The senders of these tasks make the answers about them wrong, in each way that there is.
#[tokio::test(flavor = "multi_thread")]
async fn a_senders_tasks_change_no_verdict_and_no_breaker_of_others() {
    let endpoint = Endpoint::start().await;
    let more = "enrich_timeout = \"5s\"\nenrich_failures = 2\nenrich_pause = \"10m\"\nenrich_answer_bytes = \"1KiB\"";
    // Both queues share an endpoint, and its breaker.
    let config = endpoint.config(more);
    let config = format!("{config}{}", config.replace("queues.e", "queues.f"));
    let mut daemon = column::start(&config, &[]).await;
    // No byte is left for a header of the endpoint, nor for that of taskd.
    let full = |key: &str| {
        let mut task = task(key);
        task["headers"] = json!({"h": "v".repeat(16_383)});
        task
    };
    let long = |key: &str| task(key);
    let mut wrong = 0.0;
    for n in 0..4 {
        let spoilers = [
            full(&format!("full-{n}")),
            long(&format!("long-{n}")),
            task(&format!("refused-{n}")),
        ];
        for (kind, spoiler) in spoilers.into_iter().enumerate() {
            let good = task(&format!("good-{n}-{kind}"));
            let bad = task(&format!("bad-{n}-{kind}"));
            let also_bad = full(&format!("bad-full-{n}-{kind}"));
            let (_, answer) = daemon
                .post("/v1/tasks", &json!([bad, spoiler, good, also_bad]))
                .await;
            assert_eq!(
                statuses(&answer),
                ["REJECTED", "CREATED", "CREATED", "REJECTED"],
                "{answer}"
            );
            wrong += 1.0;
            assert_eq!(
                outcome(&daemon, "wrong").await,
                wrong,
                "only one task has no verdict"
            );
        }
    }
    assert_eq!(metric(&daemon, "taskd_enrichment_open_breakers").await, 0.0);
    let (_, answer) = daemon
        .post("/v1/tasks", &json!([{"queue": "f", "key": "bad"}]))
        .await;
    assert_eq!(
        statuses(&answer),
        ["REJECTED"],
        "the other queue keeps its filter: {answer}"
    );

    let leased = leased(&daemon, 24).await;
    for (key, task) in leased {
        let is_good = key.starts_with("good-");
        assert_eq!(
            (is_skipped(&task), task["headers"]["category"] == "other"),
            (!is_good, is_good),
            "{key}"
        );
    }
    assert!(daemon.stop().await.success());
}

/// An insert in ten parts has as much time for its calls as a small one.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_insert_waits_no_longer_for_a_slow_endpoint_than_a_small_one() {
    let endpoint = Endpoint::start().await;
    endpoint.be(Mood::Sleeps);
    let of_queue = endpoint.config("enrich_timeout = \"5s\"\nenrich_failures = 1000");
    let config = format!("stall_after = \"3s\"\ndiscovery_batch_max = 2\n{of_queue}");
    let mut daemon = column::start(&config, &[]).await;
    let tasks: Vec<Value> = (0..20).map(|n| task(&n.to_string())).collect();
    daemon.insert(&tasks).await;
    assert_eq!(
        endpoint.requests().len(),
        1,
        "the first call took all the time"
    );
    assert_eq!(
        (
            outcome(&daemon, "timed_out").await,
            outcome(&daemon, "busy").await
        ),
        (2.0, 18.0)
    );
    assert!(daemon.stop().await.success());
}

/// The endpoint answers rightly, and the deadlines of the tasks pass before.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_passes_meanwhile_makes_no_answer_wrong() {
    let endpoint = Endpoint::start().await;
    let mut daemon = column::start(&endpoint.config("enrich_failures = 3"), &[]).await;
    for n in 0..5 {
        let mut late = task(&format!("late-{n}"));
        late["finish_within"] = json!("1ms");
        daemon.insert(&[late]).await;
    }
    assert_eq!(outcome(&daemon, "wrong").await, 0.0);
    assert_eq!(
        (endpoint.keys().len(), outcome(&daemon, "enriched").await),
        (5, 5.0)
    );
    assert_eq!(metric(&daemon, "taskd_enrichment_open_breakers").await, 0.0);
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_breaker_opens_when_the_endpoint_is_gone_and_closes_when_it_is_back() {
    let endpoint = Endpoint::start().await;
    let config = "enrich_timeout = \"5s\"\nenrich_failures = 3\nenrich_pause = \"300ms\"";
    let mut daemon = column::start(&endpoint.config(config), &[]).await;
    daemon.insert(&[task("first")]).await;
    let address = endpoint.address;
    drop(endpoint);
    let mut count = 1;
    until("the breaker is open", async || {
        daemon.insert(&[task(&count.to_string())]).await;
        count += 1;
        outcome(&daemon, "open").await >= 1.0
    })
    .await;
    assert!(outcome(&daemon, "failed").await >= 3.0);
    assert_eq!(metric(&daemon, "taskd_enrichment_open_breakers").await, 1.0);
    // A connection that was open may have answered once more behind the end of the endpoint.
    let before = outcome(&daemon, "enriched").await;
    let endpoint = Endpoint::start_at(address).await;
    until("a task is enriched again", async || {
        daemon.insert(&[task(&count.to_string())]).await;
        count += 1;
        outcome(&daemon, "enriched").await > before
    })
    .await;
    assert_eq!(metric(&daemon, "taskd_enrichment_open_breakers").await, 0.0);
    let leased = leased(&daemon, count).await;
    let (skipped, enriched): (Vec<_>, Vec<_>) = leased.values().partition(|task| is_skipped(task));
    assert!(
        enriched
            .iter()
            .all(|task| task["headers"]["category"] == "other")
    );
    assert!(skipped.len() >= 4 && enriched.len() >= 2);
    let log = daemon.log();
    for line in [
        "): for now new tasks go on without the enrichment of",
        "works again",
    ] {
        assert_eq!(
            log.lines().filter(|said| said.contains(line)).count(),
            1,
            "{line}"
        );
    }
    drop(endpoint);
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_that_a_kill_cut_off_is_asked_about_again() {
    let endpoint = Endpoint::start().await;
    endpoint.be(Mood::Holds);
    let mut daemon = column::start(&endpoint.config("enrich_timeout = \"5s\""), &[]).await;
    let (url, body) = (format!("{}/v1/tasks", daemon.http()), json!([task("k")]));
    let first = tokio::spawn({
        let body = body.clone();
        async move {
            crate::support::http_client()
                .post(url)
                .json(&body)
                .send()
                .await
                .is_ok()
        }
    });
    tokio::time::timeout(PATIENCE, endpoint.inner.asked.notified())
        .await
        .expect("the endpoint is asked");
    daemon.kill9_and_restart();
    daemon.ready().await;
    assert!(!first.await.unwrap(), "nothing was promised");
    daemon.insert(&[task("k")]).await;
    assert_eq!(endpoint.keys(), ["k", "k"]);
    assert_eq!(
        leased(&daemon, 1).await["k"]["headers"]["category"],
        "other"
    );
    assert!(daemon.stop().await.success());
}
