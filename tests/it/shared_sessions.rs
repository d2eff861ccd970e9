//! Sessions without streams, by the running binary. tests/full/sessions.rs has several processes.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use taskd::wire::pb;
use tonic::Code;

use crate::support::{
    daemon::Daemon,
    session::{Worker, opening},
    until,
};

/// Long leases, so that nothing comes back because its lease ran out; no backoff.
const CONFIG: &str = "[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]";

/// A session, as its client knows it.
pub(crate) struct Session {
    worker: &'static str,
    id: String,
}

impl Session {
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) async fn open(daemon: &Daemon, worker: &'static str, more: Value) -> (Self, Value) {
        let mut open = json!({"worker": worker, "queues": ["q"], "tells_started": true});
        open.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, opened) = daemon.post("/v1/sessions:open", &open).await;
        assert_eq!(status, 200, "{opened}");
        (Self { worker, id: opened["session"].as_str().unwrap().to_owned() }, opened)
    }

    async fn try_call(&self, daemon: &Daemon, method: &str, more: Value) -> (u16, Value) {
        let mut body = json!({"worker": self.worker, "session": self.id});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        daemon.post(&format!("/v1/sessions:{method}"), &body).await
    }

    pub(crate) async fn call(&self, daemon: &Daemon, method: &str, more: Value) -> Value {
        let (status, answer) = self.try_call(daemon, method, more).await;
        assert_eq!(status, 200, "{method}: {answer}");
        answer
    }

    async fn want(&self, daemon: &Daemon, want: u32, count: usize) -> Vec<Value> {
        let answer = self.call(daemon, "want", json!({"want": want, "wait": "30s"})).await;
        let tasks: Vec<Value> = serde_json::from_value(answer["tasks"].clone()).unwrap();
        assert_eq!(tasks.len(), count, "{answer}");
        tasks
    }

    async fn pending(&self, daemon: &Daemon) -> (u64, u64) {
        let answer = self.call(daemon, "pending", json!({})).await;
        (answer["demand"].as_u64().unwrap(), answer["in_hand"].as_u64().unwrap())
    }
}

pub(crate) fn leases(tasks: &[Value]) -> Vec<Value> {
    tasks.iter().map(|task| json!({"id": task["id"], "lease_token": task["lease_token"]})).collect()
}

fn ids(tasks: &[Value]) -> Vec<&Value> {
    tasks.iter().map(|task| &task["id"]).collect()
}

async fn insert(daemon: &Daemon, from: usize, to: usize) {
    daemon.insert(&(from..to).map(|n| json!({"queue": "q", "key": format!("key-{n}")})).collect::<Vec<_>>()).await;
    let count = to - from;
    until("they wait", async || daemon.queue("q").await["queued"].as_u64() >= Some(count as u64)).await;
}

/// The keys of sessions that Redis has.
pub(crate) async fn keys(daemon: &Daemon) -> Vec<String> {
    redis::cmd("KEYS").arg("taskd:{sessions:*").query_async(&mut daemon.redis().await).await.unwrap()
}

#[tokio::test]
async fn a_session_gets_what_it_wants_reports_it_and_leaves_nothing() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 10).await;
    let (session, opened) = Session::open(&daemon, "w", json!({"want": 3})).await;
    assert_eq!(
        (&opened["granted"], &opened["resumed"], &opened["max_tasks"]),
        (&json!(3), &json!(false), &json!(1000))
    );
    assert_eq!((&opened["heartbeat"], &opened["timeout"]), (&json!("5s"), &json!("15s")));
    assert_eq!(session.pending(&daemon).await, (3, 0));
    let first = session.want(&daemon, 0, 3).await;
    assert_eq!(session.pending(&daemon).await, (0, 3));
    assert_eq!(session.want(&daemon, 0, 0).await, Vec::<Value>::new(), "it wants no more, and does not wait");
    let report = json!({
        "completions": leases(&first[..2]),
        "rejections": [{"id": first[2]["id"], "lease_token": first[2]["lease_token"], "retry": false}],
    });
    let answer = session.call(&daemon, "report", report.clone()).await;
    assert_eq!((&answer["counted"], &answer["in_hand"]), (&json!(3), &json!(0)));
    assert_eq!(answer["completions"][1]["status"], "OK");
    let again = session.call(&daemon, "report", report).await;
    assert_eq!((&again["counted"], &again["completions"][0]["status"]), (&json!(0), &json!("OK")), "a repeat");
    // A surrender ends a wait; what is wanted later counts.
    assert_eq!(session.call(&daemon, "want", json!({"want": 2})).await["tasks"].as_array().unwrap().len(), 2);
    assert_eq!(session.call(&daemon, "want", json!({"want": 6})).await["tasks"].as_array().unwrap().len(), 5);
    let answer = session.call(&daemon, "surrender", json!({})).await;
    assert_eq!((&answer["surrendered"], &answer["in_hand"]), (&json!(1), &json!(7)));
    assert_eq!(session.pending(&daemon).await, (0, 7));
    let closed = session.call(&daemon, "close", json!({})).await;
    assert_eq!(closed, json!({"offered": 7, "failed": 0}));
    assert_eq!(session.try_call(&daemon, "close", json!({})).await.0, 404);
    assert_eq!(keys(&daemon).await, Vec::<String>::new());
    let tasks = daemon.lease_all("v", "q", 7).await;
    assert!(tasks.iter().all(|task| task["attempt"] == 1), "{tasks:?}");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_waiting_call_gets_tasks_as_they_come_and_a_surrender_ends_it() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let (session, _) = Session::open(&daemon, "w", json!({"timeout": "2s"})).await;
    let mut redis = daemon.redis().await;
    let due = keys(&daemon).await.into_iter().find(|key| key.ends_with(":due")).unwrap();
    let (tasks, ()) = tokio::join!(session.want(&daemon, 1, 1), async {
        // A call that waits is no silence: it moves the end of the session far beyond the first time-out.
        let mut first = f64::MAX;
        until("the session outlives its time-out", async || {
            let (_, at): (String, f64) =
                redis::cmd("ZRANGE").arg(&due).arg(0).arg(0).arg("WITHSCORES").query_async(&mut redis).await.unwrap();
            first = first.min(at);
            at >= first + 3000.0
        })
        .await;
        daemon.insert(&[json!({"queue": "q", "key": "a"})]).await;
    });
    session.call(&daemon, "report", json!({"completions": leases(&tasks)})).await;
    let (none, surrendered) = tokio::join!(session.want(&daemon, 5, 0), async {
        until("it waits", async || session.pending(&daemon).await == (5, 0)).await;
        session.call(&daemon, "surrender", json!({})).await
    });
    assert_eq!((none.len(), &surrendered["surrendered"]), (0, &json!(5)));
    session.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_silent_session_ends_and_what_was_started_has_failed() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let (session, _) = Session::open(&daemon, "w", json!({"timeout": "2s", "want": 2})).await;
    let tasks = session.want(&daemon, 0, 2).await;
    session.call(&daemon, "report", json!({"started": ids(&tasks[..1])})).await;
    let mut back: Vec<_> = daemon.lease_all("v", "q", 2).await;
    back.sort_by_key(|task| task["attempt"].as_u64());
    assert_eq!(ids(&back), [&tasks[1]["id"], &tasks[0]["id"]]);
    assert_eq!((&back[0]["attempt"], &back[1]["attempt"]), (&json!(1), &json!(2)));
    until("nothing is left", async || keys(&daemon).await.is_empty()).await;
    let (status, answer) = session.try_call(&daemon, "want", json!({"want": 1})).await;
    assert_eq!((status, answer["detail"].as_str().unwrap().contains("open another one")), (404, true), "{answer}");
    let answer = daemon.post("/v1/tasks:complete", &json!({"worker": "w", "completions": leases(&tasks)})).await.1;
    assert_eq!(answer["results"][0]["status"], "LEASE_LOST");
    assert!(daemon.stop().await.success());
}

/// While Redis does not answer, no call of a worker is a sign of life.
#[tokio::test]
async fn a_session_outlives_a_redis_that_is_away_for_longer_than_its_time_out() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1).await;
    let (session, _) = Session::open(&daemon, "w", json!({"timeout": "2s", "want": 1})).await;
    session.want(&daemon, 0, 1).await;
    let due = async || -> Vec<(String, u64)> {
        let mut read = redis::cmd("ZRANGE");
        read.arg("taskd:{sessions:6}:due").arg(0).arg(-1).arg("WITHSCORES");
        read.query_async(&mut daemon.redis().await).await.unwrap()
    };
    let before = due().await[0].1;
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_millis();
    until("it is due for three seconds", async || now() > u128::from(before) + 3000).await;
    assert!(daemon.signal_redis(Signal::SIGCONT));
    until("the process has looked", async || due().await.first().is_none_or(|(_, at)| *at > before)).await;
    assert_eq!(session.pending(&daemon).await, (0, 1));
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_session_outlives_its_process_and_names_what_did_not_arrive() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 4).await;
    let (session, _) = Session::open(&daemon, "w", json!({"want": 3, "timeout": "1m"})).await;
    let tasks = session.want(&daemon, 0, 3).await;
    daemon.kill9_and_restart();
    daemon.ready().await;
    assert_eq!(session.pending(&daemon).await, (0, 3));
    let more = json!({"session": session.id, "holding": ids(&tasks[..1]), "want": 1});
    let (same, opened) = Session::open(&daemon, "w", more).await;
    assert_eq!((&same.id, &opened["resumed"], &opened["granted"]), (&session.id, &json!(true), &json!(1)));
    assert_eq!(session.pending(&daemon).await, (1, 1));
    let answer = session.call(&daemon, "report", json!({"completions": leases(&tasks)})).await;
    let statuses: Vec<_> = (0..3).map(|place| answer["completions"][place]["status"].as_str().unwrap()).collect();
    assert_eq!((statuses, &answer["counted"]), (vec!["OK", "LEASE_LOST", "LEASE_LOST"], &json!(1)));
    // The two that went back cost nothing.
    let rest = daemon.lease_all("v", "q", 3).await;
    assert!(rest.iter().all(|task| task["attempt"] == 1), "{rest:?}");
    // Redis loses the session: the worker opens another one.
    let all = keys(&daemon).await;
    let _: () = redis::cmd("DEL").arg(all).query_async(&mut daemon.redis().await).await.unwrap();
    assert_eq!(session.try_call(&daemon, "pending", json!({})).await.0, 404);
    let (new, opened) = Session::open(&daemon, "w", json!({"session": session.id})).await;
    assert_eq!((opened["resumed"].clone(), new.id != session.id), (json!(false), true));
    new.call(&daemon, "close", json!({})).await;
    assert_eq!(keys(&daemon).await, Vec::<String>::new());
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_takeover_ends_sessions_of_both_kinds() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let (shared, _) = Session::open(&daemon, "w", json!({"want": 1})).await;
    let first = shared.want(&daemon, 0, 1).await;
    let open = pb::OpenSession { takeover: true, ..opening("w", 1) };
    let mut stream = Worker::open(daemon.grpc_port(), open).await.unwrap();
    assert_eq!(shared.try_call(&daemon, "pending", json!({})).await.0, 404);
    stream.tasks(1).await;
    let (new, _) = Session::open(&daemon, "w", json!({"takeover": true, "want": 2})).await;
    assert_eq!(stream.end().await.unwrap_err().code(), Code::Aborted);
    let (newest, _) = Session::open(&daemon, "w", json!({"takeover": true, "want": 2})).await;
    assert_eq!(new.try_call(&daemon, "want", json!({})).await.0, 404);
    let mut tasks = Vec::new();
    until("it has both", async || {
        let answer = newest.call(&daemon, "want", json!({"wait": "1s"})).await;
        tasks.extend(serde_json::from_value::<Vec<Value>>(answer["tasks"].clone()).unwrap());
        tasks.len() == 2
    })
    .await;
    assert!(tasks.iter().all(|task| task["attempt"] == 1) && ids(&tasks).contains(&&first[0]["id"]), "{tasks:?}");
    newest.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_wrong_call_says_what_is_wrong_and_changes_nothing() {
    let mut daemon = Daemon::start(&format!("max_session_tasks = 4\nmax_worker_tasks = 6\n{CONFIG}"), &[]).await;
    for (body, said) in [
        (json!({"worker": "w", "queues": []}), "queues is empty"),
        (json!({"worker": "", "queues": ["q"]}), "worker is missing"),
        (json!({"worker": "w", "queues": ["q"], "timeout": "1s"}), "from 2s to 10m"),
        (json!({"worker": "w", "queues": ["q"], "session": "x"}), "not the name of a session"),
        (json!({"worker": "w", "queues": ["q"], "keep_leases": true}), "unknown field `keep_leases`"),
    ] {
        let (status, answer) = daemon.post("/v1/sessions:open", &body).await;
        assert!(status == 400 && answer["detail"].as_str().unwrap().contains(said), "{body}: {answer}");
    }
    assert_eq!(keys(&daemon).await, Vec::<String>::new());
    let (one, opened) = Session::open(&daemon, "w", json!({"want": 100})).await;
    let (two, second) = Session::open(&daemon, "w", json!({"want": 100})).await;
    assert_eq!((&opened["granted"], &second["granted"]), (&json!(4), &json!(2)), "four a session, six a worker");
    let other = Session { worker: "v", id: one.id.clone() };
    assert_eq!(other.try_call(&daemon, "pending", json!({})).await.0, 404, "another worker's");
    let (status, answer) = other.try_call(&daemon, "report", json!({"completions": [1]})).await;
    assert_eq!(status, 404, "{answer}");
    one.call(&daemon, "close", json!({})).await;
    assert_eq!(two.call(&daemon, "want", json!({"want": 9})).await["granted"], 2);
    two.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

/// The task's lease counts as delivered, so it fails; otherwise the task would go round for ever.
#[tokio::test]
async fn a_task_that_cannot_be_read_dies() {
    let config = "partitions = 1\n[queues.q]\nlease = \"1s\"\nmax_attempts = 1";
    let mut daemon = Daemon::start(config, &[]).await;
    let id = daemon.insert(&[json!({"queue": "q", "key": "k", "payload": "x".repeat(100)})]).await[0].clone();
    until("it waits", async || daemon.queue("q").await["queued"] == 1).await;
    let (mut redis, bodies) = (daemon.redis().await, "taskd:{q:0}:bodies");
    let all: Vec<(Vec<u8>, Vec<u8>)> = redis::cmd("HGETALL").arg(bodies).query_async(&mut redis).await.unwrap();
    let (field, body) = &all[0];
    let mut cut = redis::cmd("HSET");
    cut.arg(bodies).arg(field).arg(&body[..body.len() - 9]).exec_async(&mut redis).await.unwrap();
    let (session, _) = Session::open(&daemon, "w", json!({"want": 1})).await;
    until("it is dead", async || {
        session.call(&daemon, "want", json!({})).await;
        daemon.get(&format!("/v1/tasks/{id}")).await.1["status"] == "DEAD"
    })
    .await;
    assert_eq!(session.pending(&daemon).await, (1, 0));
    session.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}
