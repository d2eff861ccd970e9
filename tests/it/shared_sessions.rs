//! Sessions without streams, by the running binary. tests/full/sessions.rs has several processes.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use taskd::wire::pb;
use tonic::Code;

use crate::{
    columns::access::{post, token},
    support::{
        daemon::Daemon,
        session::{Worker, opening, seconds},
        until,
    },
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
        open.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let (status, opened) = daemon.post("/v1/sessions:open", &open).await;
        assert_eq!(status, 200, "{opened}");
        (
            Self {
                worker,
                id: opened["session"].as_str().unwrap().to_owned(),
            },
            opened,
        )
    }

    async fn try_call(&self, daemon: &Daemon, method: &str, more: Value) -> (u16, Value) {
        let mut body = json!({"worker": self.worker, "session": self.id});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        daemon.post(&format!("/v1/sessions:{method}"), &body).await
    }

    pub(crate) async fn call(&self, daemon: &Daemon, method: &str, more: Value) -> Value {
        let (status, answer) = self.try_call(daemon, method, more).await;
        assert_eq!(status, 200, "{method}: {answer}");
        answer
    }

    async fn want(&self, daemon: &Daemon, want: u32, count: usize) -> Vec<Value> {
        let answer = self
            .call(daemon, "want", json!({"want": want, "wait": "30s"}))
            .await;
        let tasks: Vec<Value> = serde_json::from_value(answer["tasks"].clone()).unwrap();
        assert_eq!(tasks.len(), count, "{answer}");
        tasks
    }

    async fn pending(&self, daemon: &Daemon) -> (u64, u64) {
        let answer = self.call(daemon, "pending", json!({})).await;
        (
            answer["demand"].as_u64().unwrap(),
            answer["in_hand"].as_u64().unwrap(),
        )
    }
}

pub(crate) fn leases(tasks: &[Value]) -> Vec<Value> {
    tasks
        .iter()
        .map(|task| json!({"id": task["id"], "lease_token": task["lease_token"]}))
        .collect()
}

fn ids(tasks: &[Value]) -> Vec<&Value> {
    tasks.iter().map(|task| &task["id"]).collect()
}

async fn insert(daemon: &Daemon, from: usize, to: usize) {
    daemon
        .insert(
            &(from..to)
                .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
                .collect::<Vec<_>>(),
        )
        .await;
    let count = to - from;
    until("they wait", async || {
        daemon.queue("q").await["waiting"].as_u64() >= Some(count as u64)
    })
    .await;
}

/// The keys of sessions that Redis has.
pub(crate) async fn keys(daemon: &Daemon) -> Vec<String> {
    redis::cmd("KEYS")
        .arg("taskd:{sessions:*")
        .query_async(&mut daemon.redis().await)
        .await
        .unwrap()
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
    assert_eq!(
        (&opened["heartbeat"], &opened["timeout"]),
        (&json!("5s"), &json!("15s"))
    );
    assert_eq!(session.pending(&daemon).await, (3, 0));
    let first = session.want(&daemon, 0, 3).await;
    assert_eq!(session.pending(&daemon).await, (0, 3));
    assert_eq!(
        session.want(&daemon, 0, 0).await,
        Vec::<Value>::new(),
        "it wants no more, and does not wait"
    );
    let report = json!({
        "completions": leases(&first[..2]),
        "rejections": [{"id": first[2]["id"], "lease_token": first[2]["lease_token"], "retry": false}],
    });
    let answer = session.call(&daemon, "report", report.clone()).await;
    assert_eq!(
        (&answer["counted"], &answer["in_hand"]),
        (&json!(3), &json!(0))
    );
    assert_eq!(answer["completions"][1]["status"], "OK");
    let again = session.call(&daemon, "report", report).await;
    assert_eq!(
        (&again["counted"], &again["completions"][0]["status"]),
        (&json!(0), &json!("OK")),
        "a repeat"
    );
    // A surrender ends a wait; what is wanted later counts.
    assert_eq!(
        session.call(&daemon, "want", json!({"want": 2})).await["tasks"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_eq!(
        session.call(&daemon, "want", json!({"want": 6})).await["tasks"]
            .as_array()
            .unwrap()
            .len(),
        5
    );
    let answer = session.call(&daemon, "surrender", json!({})).await;
    assert_eq!(
        (&answer["surrendered"], &answer["in_hand"]),
        (&json!(1), &json!(7))
    );
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
    let due = keys(&daemon)
        .await
        .into_iter()
        .find(|key| key.ends_with(":due"))
        .unwrap();
    let (tasks, ()) = tokio::join!(session.want(&daemon, 1, 1), async {
        // A call that waits is no silence: it moves the end of the session far beyond the first
        // time-out.
        let mut first = f64::MAX;
        until("the session outlives its time-out", async || {
            let (_, at): (String, f64) = redis::cmd("ZRANGE")
                .arg(&due)
                .arg(0)
                .arg(0)
                .arg("WITHSCORES")
                .query_async(&mut redis)
                .await
                .unwrap();
            first = first.min(at);
            at >= first + 3000.0
        })
        .await;
        daemon.insert(&[json!({"queue": "q", "key": "a"})]).await;
    });
    session
        .call(&daemon, "report", json!({"completions": leases(&tasks)}))
        .await;
    let (none, surrendered) = tokio::join!(session.want(&daemon, 5, 0), async {
        until("it waits", async || {
            session.pending(&daemon).await == (5, 0)
        })
        .await;
        session.call(&daemon, "surrender", json!({})).await
    });
    assert_eq!((none.len(), &surrendered["surrendered"]), (0, &json!(5)));
    session.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

/// Its time-out would let it wait for longer than the test does.
#[tokio::test]
async fn a_surrender_ends_a_call_that_waits_though_the_time_out_is_long() {
    let mut daemon = Daemon::start(&format!("max_wait = \"10m\"\n{CONFIG}"), &[]).await;
    let (session, _) = Session::open(&daemon, "w", json!({"timeout": "10m"})).await;
    let (none, surrendered) = tokio::join!(
        session.call(&daemon, "want", json!({"want": 5, "wait": "10m"})),
        async {
            until("it waits", async || {
                session.pending(&daemon).await == (5, 0)
            })
            .await;
            session.call(&daemon, "surrender", json!({})).await
        }
    );
    assert_eq!(
        (&none["tasks"], &surrendered["surrendered"]),
        (&json!([]), &json!(5))
    );
    session.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

/// Nobody could note its tasks.
#[tokio::test]
async fn a_call_whose_session_cannot_be_reached_leaves_tasks_to_others() {
    let mut daemon = Daemon::start(&format!("max_wait = \"10m\"\n{CONFIG}"), &[]).await;
    let (session, _) = Session::open(&daemon, "w", json!({"timeout": "10m"})).await;
    let entry = "taskd:{sessions:6}:of:w";
    let mut redis = daemon.redis().await;
    let (answer, ()) = tokio::join!(
        session.call(&daemon, "want", json!({"want": 1, "wait": "10m"})),
        async {
            until("it waits", async || {
                session.pending(&daemon).await == (1, 0)
            })
            .await;
            let mut damage = redis::pipe();
            damage.atomic().rename(entry, "kept").set(entry, "no hash");
            let () = damage.query_async(&mut redis).await.unwrap();
            // After the first refusal it waits no more.
            until("two signs of life are refused", async || {
                let stats: String = redis::cmd("INFO")
                    .arg("errorstats")
                    .query_async(&mut redis)
                    .await
                    .unwrap();
                let count = stats
                    .lines()
                    .find_map(|line| line.strip_prefix("errorstat_WRONGTYPE:count="));
                count.is_some_and(|count| count.parse::<u32>().unwrap() >= 2)
            })
            .await;
            // The call would be the first to get it.
            insert(&daemon, 0, 1).await;
            let task = daemon.lease_all("v", "q", 1).await;
            let () = redis::pipe()
                .atomic()
                .rename("kept", entry)
                .query_async(&mut redis)
                .await
                .unwrap();
            assert_eq!(daemon.complete("v", &task).await, ["OK"]);
            daemon.insert(&[json!({"queue": "q", "key": "a"})]).await;
        }
    );
    let tasks: Vec<Value> = serde_json::from_value(answer["tasks"].clone()).unwrap();
    assert_eq!(tasks.len(), 1, "it waits on: {answer}");
    let answer = session
        .call(&daemon, "report", json!({"completions": leases(&tasks)}))
        .await;
    assert_eq!(answer["counted"], 1);
    session.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_silent_session_ends_and_what_was_started_has_failed() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let (session, _) = Session::open(&daemon, "w", json!({"timeout": "2s", "want": 2})).await;
    let tasks = session.want(&daemon, 0, 2).await;
    session
        .call(&daemon, "report", json!({"started": ids(&tasks[..1])}))
        .await;
    let mut back: Vec<_> = daemon.lease_all("v", "q", 2).await;
    back.sort_by_key(|task| task["attempt"].as_u64());
    assert_eq!(ids(&back), [&tasks[1]["id"], &tasks[0]["id"]]);
    assert_eq!(
        (&back[0]["attempt"], &back[1]["attempt"]),
        (&json!(1), &json!(2))
    );
    until("nothing is left", async || keys(&daemon).await.is_empty()).await;
    let (status, answer) = session.try_call(&daemon, "want", json!({"want": 1})).await;
    assert_eq!(
        (
            status,
            answer["detail"]
                .as_str()
                .unwrap()
                .contains("open another one")
        ),
        (404, true),
        "{answer}"
    );
    let answer = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": leases(&tasks)}),
        )
        .await
        .1;
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
        read.arg("taskd:{sessions:6}:due")
            .arg(0)
            .arg(-1)
            .arg("WITHSCORES");
        read.query_async(&mut daemon.redis().await).await.unwrap()
    };
    let before = due().await[0].1;
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_millis();
    until("it is due for three seconds", async || {
        now() > u128::from(before) + 3000
    })
    .await;
    assert!(daemon.signal_redis(Signal::SIGCONT));
    until("the process has looked", async || {
        due().await.first().is_none_or(|(_, at)| *at > before)
    })
    .await;
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
    assert_eq!(
        (&same.id, &opened["resumed"], &opened["granted"]),
        (&session.id, &json!(true), &json!(1))
    );
    assert_eq!(session.pending(&daemon).await, (1, 1));
    let answer = session
        .call(&daemon, "report", json!({"completions": leases(&tasks)}))
        .await;
    let statuses: Vec<_> = (0..3)
        .map(|place| answer["completions"][place]["status"].as_str().unwrap())
        .collect();
    assert_eq!(
        (statuses, &answer["counted"]),
        (vec!["OK", "LEASE_LOST", "LEASE_LOST"], &json!(1))
    );
    // The two that went back cost nothing.
    let rest = daemon.lease_all("v", "q", 3).await;
    assert!(rest.iter().all(|task| task["attempt"] == 1), "{rest:?}");
    // Redis loses the session: the worker opens another one.
    let all = keys(&daemon).await;
    let _: () = redis::cmd("DEL")
        .arg(all)
        .query_async(&mut daemon.redis().await)
        .await
        .unwrap();
    assert_eq!(session.try_call(&daemon, "pending", json!({})).await.0, 404);
    let (new, opened) = Session::open(&daemon, "w", json!({"session": session.id})).await;
    assert_eq!(
        (opened["resumed"].clone(), new.id != session.id),
        (json!(false), true)
    );
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
    let open = pb::OpenSession {
        takeover: true,
        ..opening("w", 1)
    };
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
    assert!(
        tasks.iter().all(|task| task["attempt"] == 1) && ids(&tasks).contains(&&first[0]["id"]),
        "{tasks:?}"
    );
    newest.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_wrong_call_says_what_is_wrong_and_changes_nothing() {
    let mut daemon = Daemon::start(
        &format!("max_session_tasks = 4\nmax_worker_tasks = 6\n{CONFIG}"),
        &[],
    )
    .await;
    for (body, said) in [
        (json!({"worker": "w", "queues": []}), "queues is empty"),
        (json!({"worker": "", "queues": ["q"]}), "worker is missing"),
        (
            json!({"worker": "w", "queues": ["q"], "timeout": "1s"}),
            "from 2s to 10m",
        ),
        (
            json!({"worker": "w", "queues": ["q"], "session": "x"}),
            "not the name of a session",
        ),
        (
            json!({"worker": "w", "queues": ["q"], "keep_leases": true}),
            "unknown field `keep_leases`",
        ),
    ] {
        let (status, answer) = daemon.post("/v1/sessions:open", &body).await;
        assert!(
            status == 400 && answer["detail"].as_str().unwrap().contains(said),
            "{body}: {answer}"
        );
    }
    assert_eq!(keys(&daemon).await, Vec::<String>::new());
    let (one, opened) = Session::open(&daemon, "w", json!({"want": 100})).await;
    let (two, second) = Session::open(&daemon, "w", json!({"want": 100})).await;
    assert_eq!(
        (&opened["granted"], &second["granted"]),
        (&json!(4), &json!(2)),
        "four a session, six a worker"
    );
    let other = Session {
        worker: "v",
        id: one.id.clone(),
    };
    assert_eq!(
        other.try_call(&daemon, "pending", json!({})).await.0,
        404,
        "another worker's"
    );
    let (status, answer) = other
        .try_call(&daemon, "report", json!({"completions": [1]}))
        .await;
    assert_eq!(status, 404, "{answer}");
    one.call(&daemon, "close", json!({})).await;
    assert_eq!(
        two.call(&daemon, "want", json!({"want": 9})).await["granted"],
        2
    );
    two.call(&daemon, "close", json!({})).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn what_came_by_an_extension_and_has_not_started_costs_nothing() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let (old, _) = Session::open(&daemon, "w", json!({"want": 2})).await;
    let tasks = old.want(&daemon, 0, 2).await;
    let (new, _) = Session::open(&daemon, "w", json!({})).await;
    let extension =
        |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "by": "5m"});
    let extensions: Vec<_> = tasks.iter().map(extension).collect();
    let answer = new
        .call(
            &daemon,
            "report",
            json!({"extensions": extensions, "started": ids(&tasks[..1])}),
        )
        .await;
    assert_eq!(
        (&answer["extensions"][1]["status"], &answer["in_hand"]),
        (&json!("OK"), &json!(2))
    );
    assert_eq!(
        new.call(&daemon, "close", json!({})).await,
        json!({"offered": 1, "failed": 1})
    );
    assert_eq!(
        old.call(&daemon, "close", json!({})).await,
        json!({"offered": 0, "failed": 0})
    );
    assert!(daemon.stop().await.success());
}

/// Redis looks at all of them in one step.
#[tokio::test]
async fn a_call_names_a_bounded_number_of_tasks() {
    let mut daemon = Daemon::start("max_session_tasks = 2600", &[]).await;
    let ids = |count: usize| vec!["018f0000-0000-7000-8000-000000000000"; count];
    let (session, opened) = Session::open(&daemon, "w", json!({})).await;
    let report = async |count| {
        session
            .try_call(&daemon, "report", json!({"started": ids(count)}))
            .await
    };
    assert_eq!(report(5200).await.0, 200, "twice max_session_tasks");
    let (status, answer) = report(5201).await;
    assert_eq!(
        (status, &answer["detail"]),
        (400, &json!("5201 ids in started; at most 5200"))
    );
    let open =
        json!({"worker": "w", "queues": ["q"], "session": opened["session"], "holding": ids(5201)});
    let (status, answer) = daemon.post("/v1/sessions:open", &open).await;
    assert_eq!(
        (status, &answer["detail"]),
        (400, &json!("5201 ids in holding; at most 5200"))
    );
    let holding = ids(5201).into_iter().map(str::to_owned).collect();
    let refused = Worker::open(
        daemon.grpc_port(),
        pb::OpenSession {
            holding,
            ..opening("w", 0)
        },
    )
    .await
    .err()
    .unwrap();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::InvalidArgument, "5201 ids in holding; at most 5200")
    );
    let mut stream = Worker::open(daemon.grpc_port(), opening("w", 0))
        .await
        .unwrap();
    let started = ids(5201).into_iter().map(str::to_owned).collect();
    let refused = stream
        .ask(pb::WorkerFrame {
            started,
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::InvalidArgument, "5201 ids in started; at most 5200")
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_with_its_own_token_leaves_room_for_others() {
    let mut daemon = Daemon::start("auth = \"tokens\"\nmax_sessions = 50", &[]).await;
    let own = token(&daemon, "own", &["--roles", "work", "--worker", "w"]).await;
    let all = token(&daemon, "all", &["--roles", "work"]).await;
    let stream = async |worker: &str, token: &str| {
        let open = pb::OpenSession {
            timeout: seconds(600),
            ..opening(worker, 0)
        };
        Worker::open_with(daemon.grpc_port(), open, Some(token)).await
    };
    let shared = async |worker: &str, token: &str| {
        post(
            &daemon,
            "/v1/sessions:open",
            token,
            json!({"worker": worker, "queues": ["q"], "timeout": "10m"}),
        )
        .await
    };
    let mut streams = Vec::new();
    for _ in 0..10 {
        streams.push(stream("w", &own).await.unwrap());
        assert_eq!(shared("w", &own).await.0, 200);
    }
    let refused = stream("w", &own)
        .await
        .err()
        .expect("a tenth of 50, but at least ten");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(
        refused.message().contains("worker w has 10 sessions here"),
        "{refused}"
    );
    let (status, answer) = shared("w", &own).await;
    let said = answer["detail"].as_str().unwrap();
    assert!(
        status == 429 && said.contains("worker w has 10 sessions without streams"),
        "{answer}"
    );
    // A token for many workers may name one as often as it likes.
    streams.push(stream("w", &all).await.unwrap());
    assert_eq!(
        (shared("w", &all).await.0, shared("v", &all).await.0),
        (200, 200)
    );
    drop(streams);
    assert!(daemon.stop().await.success());
}

/// The task's lease counts as delivered, so it fails; otherwise the task would go round for ever.
#[tokio::test]
async fn a_task_that_cannot_be_read_dies() {
    let config = "partitions = 1\n[queues.q]\nlease = \"1s\"\nmax_attempts = 1";
    let mut daemon = Daemon::start(config, &[]).await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k", "payload": "x".repeat(100)})])
        .await[0]
        .clone();
    until("it waits", async || daemon.queue("q").await["waiting"] == 1).await;
    let (mut redis, bodies) = (daemon.redis().await, "taskd:{q:0}:bodies");
    let all: Vec<(Vec<u8>, Vec<u8>)> = redis::cmd("HGETALL")
        .arg(bodies)
        .query_async(&mut redis)
        .await
        .unwrap();
    let (field, body) = &all[0];
    let mut cut = redis::cmd("HSET");
    cut.arg(bodies)
        .arg(field)
        .arg(&body[..body.len() - 9])
        .exec_async(&mut redis)
        .await
        .unwrap();
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
