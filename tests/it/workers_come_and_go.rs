//! Workers that stay away, come back, share a name, and vanish: by streams and by polls, through
//! the running binary. tests/README.md has the mistakes of earlier systems that these tests would
//! see.

use std::time::Duration;

use serde_json::{Value, json};
use taskd::wire::pb::{self, ItemStatus};
use tonic::Code;
use uuid::Uuid;

use crate::support::{
    daemon::{Daemon, keys, once},
    session::{Worker, completion, long_opening as opening, seconds},
    until,
};

/// Long leases, so that nothing comes back because its lease ran out; no backoff.
const CONFIG: &str = "[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]";

async fn insert(daemon: &Daemon, from: usize, to: usize, replicas: u32) -> Vec<String> {
    let task = |n: usize| json!({"queue": "q", "key": format!("key-{n}"), "replicas": replicas});
    daemon
        .insert(&(from..to).map(task).collect::<Vec<_>>())
        .await
}

fn keys_of(tasks: &[pb::LeasedTask]) -> Vec<String> {
    tasks
        .iter()
        .map(|task| String::from_utf8(task.key.to_vec()).unwrap())
        .collect()
}

/// Asks for nothing: all that was sent before the answer is here.
async fn look(worker: &mut Worker) -> usize {
    worker.ask(pb::WorkerFrame::default()).await.unwrap();
    worker.tasks.len()
}

async fn want(worker: &mut Worker, want: u32) -> u32 {
    worker
        .ask(pb::WorkerFrame {
            want,
            ..Default::default()
        })
        .await
        .unwrap()
        .granted
}

/// No worker is there; then idle sessions and polls that get nothing are. Each task waits, untried.
#[tokio::test]
async fn tasks_wait_untried_until_somebody_wants_them() {
    let mut daemon = Daemon::start(&format!("watchdog_interval = \"10ms\"\n{CONFIG}"), &[]).await;
    let ids = insert(&daemon, 0, 20, 1).await;
    until("they wait", async || {
        daemon.queue("q").await["waiting"] == 20
    })
    .await;
    let mut idle = Worker::open(daemon.grpc_port(), opening("idle", 0))
        .await
        .unwrap();
    // Many looks of the watchdog, which expires, promotes and sweeps.
    for _ in 0..20 {
        assert!(
            daemon
                .lease("elsewhere", "another", 10, "20ms")
                .await
                .is_empty()
        );
        assert_eq!(look(&mut idle).await, 0);
    }
    assert_eq!(want(&mut idle, 10).await, 10);
    let pushed = idle.tasks(10).await;
    let pulled = daemon.lease_all("puller", "q", 10).await;
    assert!(
        pushed.iter().all(|task| task.attempt == 1)
            && pulled.iter().all(|task| task["attempt"] == 1)
    );
    let pulled = pulled
        .iter()
        .map(|task| task["id"].as_str().unwrap().to_owned());
    let mut got: Vec<_> = pushed
        .iter()
        .map(|task| task.id.clone())
        .chain(pulled)
        .collect();
    let mut ids = ids;
    got.sort();
    ids.sort();
    assert_eq!(got, ids, "each once");
    idle.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_gets_one_replica_however_many_sessions_it_has() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1, 3).await;
    let port = daemon.grpc_port();
    let mut one = Worker::open(port, opening("w", 5)).await.unwrap();
    let first = one.tasks(1).await;
    let mut two = Worker::open(port, opening("w", 5)).await.unwrap();
    assert!(daemon.lease("w", "q", 5, "200ms").await.is_empty());
    assert_eq!((look(&mut one).await, look(&mut two).await), (0, 0));
    // Two of three workers are there: the third replica waits for another one.
    let mut other = Worker::open(port, opening("v", 5)).await.unwrap();
    let second = other.tasks(1).await;
    assert_eq!(one.complete(&first, 0).await, [ItemStatus::Ok]);
    assert_eq!(other.complete(&second, 0).await, [ItemStatus::Ok]);
    assert!(
        daemon.lease("w", "q", 5, "200ms").await.is_empty(),
        "a worker is credited once"
    );
    assert_eq!(
        (
            look(&mut one).await,
            look(&mut two).await,
            look(&mut other).await
        ),
        (0, 0, 0)
    );
    assert_eq!(daemon.queue("q").await["waiting"], 1);
    let third = daemon.lease_all("u", "q", 1).await;
    assert_eq!(daemon.complete("u", &third).await, ["OK"]);
    until("it is completed", async || {
        daemon.queue("q").await["completed"] == 1
    })
    .await;
    for worker in [one, two, other] {
        worker.close().await;
    }
    assert!(daemon.stop().await.success());
}

/// A session that nobody knows: to go on with it opens another one, whose end changes nothing for
/// the worker's others.
#[tokio::test]
async fn the_end_of_an_unknown_session_changes_nothing() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2, 1).await;
    let port = daemon.grpc_port();
    let mut living = Worker::open(port, opening("w", 2)).await.unwrap();
    let tasks = living.tasks(2).await;
    let session = living.opened.session.clone();
    let ended = Worker::open(port, opening("w", 0)).await.unwrap();
    let its_session = ended.opened.session.clone();
    ended.close().await;
    for unknown in [
        Uuid::now_v7().to_string(),
        Uuid::new_v4().to_string(),
        its_session,
        "no session".into(),
    ] {
        let holding = tasks.iter().map(|task| task.id.clone()).collect();
        let open = pb::OpenSession {
            session: unknown.clone(),
            holding,
            ..opening("w", 0)
        };
        let stranger = Worker::open(port, open).await.unwrap();
        assert!(!stranger.opened.resumed && stranger.opened.session != unknown);
        assert_ne!(stranger.opened.session, session);
        stranger.close().await;
    }
    assert_eq!(daemon.queue("q").await["assigned"], 2);
    assert_eq!(want(&mut living, 3).await, 3);
    assert_eq!(living.complete(&tasks, 0).await, [ItemStatus::Ok; 2]);
    living.close().await;
    assert!(daemon.stop().await.success());
}

/// Others have done everything since it was here, and its place in the lanes is long gone.
#[tokio::test]
async fn a_worker_that_was_idle_for_long_comes_back() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let port = daemon.grpc_port();
    insert(&daemon, 0, 4, 2).await;
    let mut paused = Worker::open(port, opening("w", 2)).await.unwrap();
    let tasks = paused.tasks(2).await;
    assert_eq!(paused.complete(&tasks, 0).await, [ItemStatus::Ok; 2]);
    let polled = daemon.lease_all("p", "q", 4).await;
    assert_eq!(daemon.complete("p", &polled).await, ["OK"; 4]);
    for round in 0..3 {
        insert(&daemon, 10 + 50 * round, 60 + 50 * round, 1).await;
        assert_eq!(
            daemon.drain("busy", "q").await.len(),
            if round == 0 { 52 } else { 50 }
        );
    }
    insert(&daemon, 200, 204, 1).await;
    assert_eq!(want(&mut paused, 2).await, 2);
    let pushed = paused.tasks(2).await;
    let polled = daemon.lease_all("p", "q", 2).await;
    let polled_keys = polled
        .iter()
        .map(|task| task["key"].as_str().unwrap().to_owned());
    assert_eq!(
        once(keys_of(&pushed).into_iter().chain(polled_keys).collect()),
        keys(200, 204)
    );
    assert_eq!(paused.complete(&pushed, 0).await, [ItemStatus::Ok; 2]);
    assert_eq!(daemon.complete("p", &polled).await, ["OK"; 2]);
    paused.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_session_that_closes_gives_back_exactly_its_share_of_the_workers_demand() {
    let mut daemon = Daemon::start(&format!("max_worker_tasks = 6\n{CONFIG}"), &[]).await;
    insert(&daemon, 0, 1, 1).await;
    let port = daemon.grpc_port();
    let mut one = Worker::open(port, opening("w", 4)).await.unwrap();
    one.tasks(1).await;
    let mut two = Worker::open(port, opening("w", 9)).await.unwrap();
    assert_eq!((one.opened.granted, two.opened.granted), (4, 2));
    assert_eq!(
        (want(&mut one, 1).await, want(&mut two, 1).await),
        (0, 0),
        "one task in hand counts as well"
    );
    // It has one in hand and three on demand.
    one.close().await;
    let task = two.tasks(1).await;
    assert_eq!(two.demand, 1);
    assert_eq!(want(&mut two, 9).await, 4);
    assert_eq!((two.demand, want(&mut two, 9).await), (5, 0));
    assert_eq!(two.complete(&task, 9).await, [ItemStatus::Ok]);
    assert_eq!(two.demand, 6);
    let answer = two
        .ask(pb::WorkerFrame {
            surrender: true,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!((answer.surrendered, two.demand), (6, 0));
    two.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_session_is_served_from_all_partitions() {
    let mut daemon = Daemon::start(&format!("partitions = 5\n{CONFIG}"), &[]).await;
    insert(&daemon, 0, 60, 1).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 60))
        .await
        .unwrap();
    let tasks = worker.tasks(60).await;
    let token = |task: &pb::LeasedTask| task.lease_token.clone();
    assert_eq!(once(keys_of(&tasks)), keys(0, 60));
    let tokens: std::collections::BTreeSet<_> = tasks.iter().map(token).collect();
    assert!(tokens.len() >= 5, "at the least a grant of each partition");
    assert_eq!(worker.complete(&tasks, 0).await, [ItemStatus::Ok; 60]);
    worker.close().await;
    assert!(daemon.stop().await.success());
}

/// Their worker never comes back: one task expires by its poll, one ends with its session.
#[tokio::test]
async fn what_a_worker_began_and_left_goes_to_another() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"3s\"\nbackoff = [\"0s\"]", &[]).await;
    insert(&daemon, 0, 1, 1).await;
    let polled = daemon.lease_all("gone", "q", 1).await;
    insert(&daemon, 1, 2, 1).await;
    let open = pb::OpenSession {
        timeout: seconds(4),
        lease_duration: seconds(600),
        ..opening("gone too", 1)
    };
    let mut gone = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let (mut pushed, mut left) = (gone.tasks(1).await, 2);
    if pushed[0].id == polled[0]["id"] {
        // It has expired already, and came here. The other one waits.
        assert_eq!(gone.complete(&pushed, 1).await, [ItemStatus::Ok]);
        (pushed, left) = (gone.tasks(1).await, 1);
    }
    gone.start(&pushed).await;
    drop(gone);
    let open = pb::OpenSession {
        lease_duration: seconds(600),
        ..opening("other", 5)
    };
    let mut other = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let tasks = other.tasks(left).await;
    assert!(tasks.iter().all(|task| task.attempt == 2), "{tasks:?}");
    assert_eq!(other.complete(&tasks, 0).await, vec![ItemStatus::Ok; left]);
    until("all is done", async || daemon.unfinished("q").await == 0).await;
    assert_eq!(daemon.queue("q").await["completed"], 2);
    other.close().await;
    assert!(daemon.stop().await.success());
}

/// Exactly one of the two stays, and it gets the tasks.
#[tokio::test]
async fn of_two_takeovers_at_the_same_time_one_stays() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let port = daemon.grpc_port();
    for round in 0..20 {
        insert(&daemon, round, round + 1, 1).await;
        let opening = || pb::OpenSession {
            takeover: true,
            ..opening("w", 1)
        };
        let (one, two) = tokio::join!(Worker::open(port, opening()), Worker::open(port, opening()));
        let mut worker = match (one, two) {
            (Ok(mut one), Ok(mut two)) => {
                let (ended, stays) = tokio::select! {
                    ended = over(&mut one) => (ended, two),
                    ended = over(&mut two) => (ended, one),
                };
                assert_eq!(ended.code(), Code::Aborted, "{ended}");
                stays
            }
            (Ok(stays), Err(ended)) | (Err(ended), Ok(stays)) => {
                assert_eq!(ended.code(), Code::Aborted, "{ended}");
                stays
            }
            (Err(one), Err(two)) => panic!("none stays in round {round}: {one}, {two}"),
        };
        let task = worker.tasks(1).await;
        assert_eq!(worker.complete(&task, 0).await, [ItemStatus::Ok]);
        worker.close().await;
    }
    assert!(daemon.stop().await.success());
}

/// Reads until the stream has failed, and keeps its tasks.
async fn over(worker: &mut Worker) -> tonic::Status {
    loop {
        match worker.read().await {
            Ok(frame) => assert!(frame.is_some(), "it is not closed"),
            Err(status) => return status,
        }
    }
}

#[tokio::test]
async fn a_lease_that_a_requeue_or_a_change_ended_is_told_to_its_session() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let port = daemon.grpc_port();
    let ids = insert(&daemon, 0, 4, 1).await;
    let several = insert(&daemon, 4, 5, 2).await;
    let mut worker = Worker::open(port, opening("w", 5)).await.unwrap();
    let tasks = worker.tasks(5).await;
    let told = async |worker: &mut Worker, id: &str| {
        while worker.ended.is_empty() {
            worker.read().await.unwrap().expect("the stream goes on");
        }
        let told = std::mem::take(&mut worker.ended);
        let told: Vec<_> = told
            .iter()
            .map(|one| (one.id.as_str(), one.status()))
            .collect();
        assert_eq!(told, [(id, ItemStatus::LeaseLost)]);
    };
    let call = async |path: &str, body: Value| {
        let (status, answer) = daemon.post(path, &body).await;
        assert_eq!(
            (status, &answer["results"][0]["status"]),
            (200, &json!("OK")),
            "{answer}"
        );
    };
    call("/v1/tasks:requeue", json!({"ids": [ids[0]]})).await;
    told(&mut worker, &ids[0]).await;
    call(
        "/v1/tasks:requeue",
        json!({"ids": [ids[1]], "away_from": "w"}),
    )
    .await;
    told(&mut worker, &ids[1]).await;
    call("/v1/tasks:requeue", json!({"ids": [ids[2]], "to": "v"})).await;
    told(&mut worker, &ids[2]).await;
    // It is taken away from somebody else: this lease goes on.
    call(
        "/v1/tasks:requeue",
        json!({"ids": [ids[3]], "away_from": "v"}),
    )
    .await;
    // Of two holders, the one that came last.
    let mut other = Worker::open(port, opening("x", 5)).await.unwrap();
    while !other.tasks.iter().any(|task| task.id == several[0]) {
        other.read().await.unwrap().expect("the stream goes on");
    }
    call(
        "/v1/tasks:change",
        json!({"ids": [several[0]], "replicas": 1}),
    )
    .await;
    told(&mut other, &several[0]).await;
    let kept: Vec<_> = tasks
        .iter()
        .filter(|task| [&ids[3], &several[0]].contains(&&task.id))
        .cloned()
        .collect();
    assert_eq!(worker.complete(&kept, 0).await, [ItemStatus::Ok; 2]);
    assert!(worker.ended.is_empty(), "{:?}", worker.ended);
    worker.close().await;
    other.close().await;
    assert!(daemon.stop().await.success());
}

/// The first frame of a stream gives its room back, too, and not only when the stream ends.
#[tokio::test]
async fn the_room_of_a_large_first_frame_is_free_again() {
    let limits =
        "max_request_bytes = \"8MiB\"\nrequest_budget = \"16MiB\"\nmax_session_tasks = 20000";
    let mut daemon = Daemon::start(&format!("{limits}\n{CONFIG}"), &[]).await;
    let mut open = Vec::new();
    for number in 0..12 {
        let holding = vec![Uuid::nil().to_string(); 40_000];
        let asked = pb::OpenSession {
            holding,
            ..opening(&format!("w{number}"), 1)
        };
        open.push(
            Worker::open(daemon.grpc_port(), asked)
                .await
                .unwrap_or_else(|status| panic!("{number}: {status}")),
        );
    }
    for worker in open {
        worker.close().await;
    }
    assert!(daemon.stop().await.success());
}

/// It sends frame after frame: the end of its process counts nevertheless.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_does_not_stop_talking_does_not_hold_up_a_stop() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1, 1).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 1))
        .await
        .unwrap();
    let task = worker.tasks(1).await.remove(0);
    let to = worker.to.clone();
    let talking = tokio::spawn(async move {
        let extension = pb::Extension {
            id: task.id.clone(),
            lease_token: task.lease_token.clone(),
            by: seconds(600),
        };
        let mut number = 0;
        loop {
            number += 1;
            let frame = pb::WorkerFrame {
                number,
                extensions: vec![extension.clone()],
                ..Default::default()
            };
            if to.send(frame).await.is_err() {
                return number;
            }
        }
    });
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(worker.end().await.unwrap_err().code(), Code::Unavailable);
    assert!(daemon.ended().await.success());
    assert!(talking.await.unwrap() > 1);
}

/// It wants a task, reports, and does not read. A task that comes goes to the next worker that
/// waits, also while the first one is there; and its reports keep no connection to the database.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_does_not_read_keeps_no_wake_and_no_database_from_others() {
    let mut daemon = Daemon::start(&format!("database_pool = 2\n{CONFIG}"), &[]).await;
    let port = daemon.grpc_port();
    insert(&daemon, 0, 1, 1).await;
    let mut slow = Worker::open(port, opening("slow", 2)).await.unwrap();
    let mut unknown = completion(&slow.tasks(1).await[0]);
    unknown.id = Uuid::now_v7().to_string();
    let mut other = Worker::open(port, opening("other", 1)).await.unwrap();
    look(&mut other).await;
    // Its answers, for which SQL is asked, fill all that lies between, until taskd does not read
    // its frames either. A slow machine takes its time for a frame.
    let completions = vec![unknown; 1000];
    for number in 1.. {
        let frame = pb::WorkerFrame {
            number,
            completions: completions.clone(),
            ..Default::default()
        };
        if tokio::time::timeout(Duration::from_secs(5), slow.to.send(frame))
            .await
            .is_err()
        {
            break;
        }
    }
    assert_eq!(daemon.queue("q").await["assigned"], 1);
    insert(&daemon, 1, 2, 1).await;
    let task = other.tasks(1).await;
    assert_eq!(other.complete(&task, 0).await, [ItemStatus::Ok]);
    until("SQL has the report", async || {
        daemon.queue("q").await["completed"] == 1
    })
    .await;
    // The slow one is there still.
    for _ in 0..20 {
        slow.read().await.unwrap().expect("the stream goes on");
    }
    drop(slow);
    other.close().await;
    assert!(daemon.stop().await.success());
}

/// `taskd work` by a stream and by polls, and a worker of HTTP calls, while taskd is killed with -9.
#[tokio::test(flavor = "multi_thread")]
async fn workers_side_by_side_outlive_kills_of_taskd_and_are_listed() {
    const TASKS: usize = 150;
    let config = "[queues.q]\nlease = \"3s\"\nbackoff = [\"100ms\"]\nmax_attempts = 100";
    let mut daemon = Daemon::start(config, &[]).await;
    let ids = insert(&daemon, 0, TASKS, 1).await;
    let work = |name: &str, how: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_taskd"));
        command
            .args(["work", "--queue", "q", "--name", name, "--concurrency", "2"])
            .args(how)
            .args(["--", "sleep", "0.05"])
            .env("TASKD_URL", daemon.http())
            .stdout(std::process::Stdio::null())
            .kill_on_drop(true);
        command.spawn().unwrap()
    };
    let mut children = [work("by-stream", &[]), work("by-polls", &["--poll"])];
    let url = format!("{}/v1/tasks:", daemon.http());
    let over_http = tokio::spawn(async move {
        let client = crate::support::http_client();
        let call = async |method: &str, body: &Value| {
            let answer = client.post(format!("{url}{method}")).json(body).send();
            answer.await.ok()?.json::<Value>().await.ok()
        };
        loop {
            let get = json!({"worker": "over-http", "queues": ["q"], "max_tasks": 1, "wait": "1s"});
            let Some(leased) = call("get", &get).await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            for task in leased["tasks"].as_array().into_iter().flatten() {
                let done = json!({"id": task["id"], "lease_token": task["lease_token"]});
                let body = json!({"worker": "over-http", "completions": [done]});
                call("complete", &body).await;
            }
        }
    });
    for part in 1..=3 {
        until("a part is done", async || {
            daemon.queue("q").await["completed"].as_u64() >= Some((part * TASKS / 4) as u64)
        })
        .await;
        daemon.kill9_and_restart();
        daemon.ready().await;
    }
    let (status, queue) = daemon.get("/v1/queues/q?wait=drained&timeout=5m").await;
    assert_eq!(
        (
            status,
            &queue["drained"],
            &queue["completed"],
            &queue["dead"]
        ),
        (200, &json!(true), &json!(TASKS), &json!(0)),
        "{queue}"
    );
    for id in ids {
        let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
        assert_eq!(answer["results"].as_array().map(Vec::len), Some(1), "{id}");
    }
    // The last taskd has heard each of them, whoever did the last tasks.
    let names = json!(["by-polls", "by-stream", "over-http"]);
    until("each is listed", async || {
        let (_, answer) = daemon.get("/v1/workers").await;
        let workers = answer["workers"].as_array().unwrap();
        let mut listed: Vec<&Value> = workers.iter().map(|one| &one["worker"]).collect();
        listed.sort_by_key(|name| name.to_string());
        json!(listed) == names
    })
    .await;
    let listed = crate::columns::workers::lines(&daemon, &["workers", "q"]);
    assert_eq!(listed.len(), 4, "{listed:?}");
    over_http.abort();
    for child in &mut children {
        child.kill().await.unwrap();
    }
    assert!(daemon.stop().await.success());
}
