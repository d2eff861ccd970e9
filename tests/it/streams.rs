//! Sessions on streams, by the running binary.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use taskd::wire::pb::{self, ItemStatus, tasks_client::TasksClient};
use tokio::time::timeout;
use tonic::Code;

use crate::support::{
    daemon::Daemon,
    session::{Worker, channel, completion, opening, seconds},
    until,
};
use crate::traces::metric;

/// Long leases, so that nothing comes back because its lease ran out; no backoff.
const CONFIG: &str = "[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]";

async fn insert(daemon: &Daemon, from: usize, to: usize) -> Vec<String> {
    daemon
        .insert(
            &(from..to)
                .map(|n| json!({"queue": "q", "key": format!("key-{n}")}))
                .collect::<Vec<_>>(),
        )
        .await
}

async fn waiting(daemon: &Daemon, count: usize) {
    until("they wait", async || {
        daemon.queue("q").await["waiting"] == count
    })
    .await;
}

async fn unary(daemon: &Daemon, worker: &str, tasks: &[pb::LeasedTask]) -> Vec<String> {
    let tasks: Vec<_> = tasks
        .iter()
        .map(|task| json!({"id": task.id, "lease_token": task.lease_token}))
        .collect();
    daemon.complete(worker, &tasks).await
}

#[tokio::test]
async fn a_session_gets_what_it_asks_for_and_never_more() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 10).await;
    waiting(&daemon, 10).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 3))
        .await
        .unwrap();
    assert_eq!(
        (
            worker.opened.granted,
            worker.opened.resumed,
            worker.opened.max_tasks
        ),
        (3, false, 1000)
    );
    let first = worker.tasks(3).await;
    assert_eq!(worker.demand, 0);
    assert!(
        first
            .iter()
            .all(|task| task.attempt == 1 && task.queue == "q")
    );
    // All that was sent before this answer is here.
    let answer = worker.ask(pb::WorkerFrame::default()).await.unwrap();
    assert_eq!(
        (answer.granted, worker.tasks.len(), worker.demand),
        (0, 0, 0)
    );
    assert_eq!(daemon.queue("q").await["assigned"], 3);
    assert_eq!(worker.complete(&first, 5).await, [ItemStatus::Ok; 3]);
    let second = worker.tasks(5).await;
    assert_eq!(worker.complete(&second[..2], 0).await, [ItemStatus::Ok; 2]);
    // A repeat is OK, also by another way; and so is the first report of a pushed task.
    assert_eq!(worker.complete(&second[..1], 0).await, [ItemStatus::Ok]);
    assert_eq!(unary(&daemon, "w", &second[1..]).await, vec!["OK"; 4]);
    let pulled = daemon.lease_all("puller", "q", 2).await;
    assert_eq!(daemon.complete("puller", &pulled).await, vec!["OK"; 2]);
    worker.close().await;
    until("SQL has all reports", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    assert!(daemon.stop().await.success());
}

/// With one master of a cluster away, workers of the others go on.
#[tokio::test]
async fn a_session_opens_while_redis_does_not_answer_and_gets_its_tasks_later() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1).await;
    let mut broken = Worker::open(daemon.grpc_port(), opening("v", 1))
        .await
        .unwrap();
    let missing = broken.tasks(1).await.remove(0);
    let session = broken.opened.session.clone();
    drop(broken);
    insert(&daemon, 1, 3).await;
    waiting(&daemon, 2).await;
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    // Clients do not wait longer.
    let within = Duration::from_secs(10);
    // The task of this one did not arrive. It goes back when Redis answers.
    let open = pb::OpenSession {
        session,
        ..opening("v", 0)
    };
    let resumed = timeout(within, Worker::open(daemon.grpc_port(), open)).await;
    let resumed = resumed.expect("it goes on in time").unwrap();
    assert!(resumed.opened.resumed);
    let opened = timeout(within, Worker::open(daemon.grpc_port(), opening("w", 2))).await;
    let mut worker = opened.expect("it opens in time").unwrap();
    assert_eq!(worker.opened.granted, 0);
    assert!(daemon.signal_redis(Signal::SIGCONT));
    worker
        .ask(pb::WorkerFrame {
            want: 3,
            ..Default::default()
        })
        .await
        .unwrap();
    let tasks = worker.tasks(3).await;
    assert!(
        tasks
            .iter()
            .any(|task| task.id == missing.id && task.attempt == 1),
        "{tasks:?}"
    );
    resumed.close().await;
    worker.close().await;
    assert!(daemon.stop().await.success());
}

/// As with one master of a cluster away, which has the worker's allotments and none of its queues.
#[tokio::test]
async fn a_session_gets_tasks_though_nobody_can_ask_for_an_allotment() {
    let mut daemon = Daemon::start(&format!("max_worker_tasks = 3\n{CONFIG}"), &[]).await;
    insert(&daemon, 0, 5).await;
    let entry = "taskd:{sessions:5}:of:w1";
    let mut redis = daemon.redis().await;
    let () = redis::cmd("SET")
        .arg(entry)
        .arg("no hash")
        .query_async(&mut redis)
        .await
        .unwrap();
    let mut worker = Worker::open(daemon.grpc_port(), opening("w1", 0))
        .await
        .unwrap();
    let answer = worker
        .ask(pb::WorkerFrame {
            want: 5,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(answer.granted, 3, "the cap");
    let tasks = worker.tasks(3).await;
    let () = redis::cmd("DEL")
        .arg(entry)
        .query_async(&mut redis)
        .await
        .unwrap();
    until("Redis knows the allotment", async || {
        let allotted: Vec<usize> = redis::cmd("HVALS")
            .arg(entry)
            .query_async(&mut redis)
            .await
            .unwrap();
        allotted == [3]
    })
    .await;
    assert_eq!(worker.complete(&tasks, 0).await, [ItemStatus::Ok; 3]);
    worker.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_session_waits_for_tasks_and_its_demand_is_bounded() {
    let mut daemon = Daemon::start(
        &format!("max_session_tasks = 4\nmax_worker_tasks = 6\n{CONFIG}"),
        &[],
    )
    .await;
    let mut one = Worker::open(daemon.grpc_port(), opening("w", 100))
        .await
        .unwrap();
    let mut two = Worker::open(daemon.grpc_port(), opening("w", 100))
        .await
        .unwrap();
    assert_eq!(
        (one.opened.granted, two.opened.granted),
        (4, 2),
        "four a session, six a worker"
    );
    insert(&daemon, 0, 4).await;
    while one.tasks.len() + two.tasks.len() < 4 {
        tokio::select! {
            frame = one.from.message() => one.tasks.extend(frame.unwrap().unwrap().tasks),
            frame = two.from.message() => two.tasks.extend(frame.unwrap().unwrap().tasks),
        }
    }
    let tasks = one.tasks(one.tasks.len()).await;
    let answer = one
        .ask(pb::WorkerFrame {
            want: 9,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(answer.granted, 0, "tasks in hand count, too");
    let completions: Vec<_> = tasks.iter().map(completion).collect();
    let answer = one
        .ask(pb::WorkerFrame {
            completions,
            want: 9,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(
        answer.granted as usize,
        tasks.len(),
        "the tasks of the same frame have made room"
    );
    one.close().await;
    two.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_surrender_takes_the_demand_back_and_no_task_comes_behind_it() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 10))
        .await
        .unwrap();
    insert(&daemon, 0, 1).await;
    assert_eq!(worker.tasks(1).await.len(), 1);
    let answer = worker
        .ask(pb::WorkerFrame {
            surrender: true,
            want: 2,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(
        (answer.surrendered, answer.granted, worker.demand),
        (9, 2, 2),
        "the demand is set to two"
    );
    let answer = worker
        .ask(pb::WorkerFrame {
            surrender: true,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(
        (answer.surrendered, answer.granted, worker.demand),
        (2, 0, 0)
    );
    insert(&daemon, 1, 4).await;
    assert_eq!(daemon.lease_all("other", "q", 3).await.len(), 3);
    worker.ask(pb::WorkerFrame::default()).await.unwrap();
    assert!(worker.tasks.is_empty());
    worker.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_closed_session_gives_back_what_it_has_and_what_was_started_is_a_failure() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 3).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 3))
        .await
        .unwrap();
    let tasks = worker.tasks(3).await;
    worker.start(&tasks[..1]).await;
    assert_eq!(worker.complete(&tasks[1..2], 0).await, [ItemStatus::Ok]);
    worker.close().await;
    let mut other = Worker::open(daemon.grpc_port(), opening("v", 3))
        .await
        .unwrap();
    let mut attempts: Vec<_> = other
        .tasks(2)
        .await
        .into_iter()
        .map(|task| (task.id, task.attempt))
        .collect();
    let mut want = [(tasks[0].id.clone(), 2), (tasks[2].id.clone(), 1)];
    attempts.sort();
    want.sort();
    assert_eq!(attempts, want);
    assert_eq!(unary(&daemon, "w", &tasks[2..]).await, ["LEASE_LOST"]);
    other.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_task_that_dies_with_its_session_counts_as_dead() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "k", "max_attempts": 1})])
        .await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 1))
        .await
        .unwrap();
    let tasks = worker.tasks(1).await;
    worker.start(&tasks).await;
    worker.close().await;
    let ended =
        |outcome: &str| format!("taskd_sessions_ended_leases_total{{outcome=\"{outcome}\"}} ");
    until("it is counted", async || {
        metric(&daemon, &ended("dead")).await == 1.0
    })
    .await;
    assert_eq!(metric(&daemon, &ended("failed")).await, 0.0);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn an_idle_session_lives_by_its_heartbeats_and_a_silent_one_ends() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1).await;
    let open = pb::OpenSession {
        timeout: seconds(5),
        ..opening("silent", 1)
    };
    let mut silent = Worker::open(daemon.grpc_port(), open).await.unwrap();
    assert_eq!(silent.tasks(1).await[0].attempt, 1);
    let open = pb::OpenSession {
        timeout: seconds(6),
        ..opening("idle", 0)
    };
    let mut idle = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let heartbeat = idle.opened.heartbeat.unwrap();
    assert_eq!((heartbeat.seconds, heartbeat.nanos), (2, 0));
    let beats = idle.to.clone();
    let beating = tokio::spawn(async move {
        while beats.send(pb::WorkerFrame::default()).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    });
    let status = silent.end().await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    // The idle one was opened later. It hears taskd's heartbeats for longer than its time-out.
    for _ in 0..4 {
        assert!(idle.read().await.unwrap().is_some());
    }
    idle.ask(pb::WorkerFrame {
        want: 1,
        ..Default::default()
    })
    .await
    .unwrap();
    assert_eq!(idle.tasks(1).await[0].attempt, 1, "it was not started");
    beating.abort();
    idle.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_goes_on_with_its_session_and_what_did_not_arrive_goes_back() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 2))
        .await
        .unwrap();
    let tasks = worker.tasks(2).await;
    let session = worker.opened.session.clone();
    drop(worker);
    let (session, holding) = (session, vec![tasks[0].id.clone()]);
    let open = pb::OpenSession {
        session: session.clone(),
        holding,
        ..opening("w", 0)
    };
    let mut again = Worker::open(daemon.grpc_port(), open).await.unwrap();
    assert_eq!(
        (again.opened.resumed, &again.opened.session),
        (true, &session)
    );
    let other = daemon.lease_all("other", "q", 1).await;
    assert_eq!(
        (&other[0]["id"], &other[0]["attempt"]),
        (&json!(tasks[1].id), &json!(1))
    );
    assert_eq!(again.complete(&tasks[..1], 0).await, [ItemStatus::Ok]);
    // Another stream of the same session takes it from this one.
    let open = pb::OpenSession {
        session: session.clone(),
        ..opening("w", 0)
    };
    let third = Worker::open(daemon.grpc_port(), open).await.unwrap();
    assert!(third.opened.resumed);
    assert_eq!(again.end().await.unwrap_err().code(), Code::Aborted);
    // Nobody goes on with a session of another worker.
    let open = pb::OpenSession {
        session: session.clone(),
        ..opening("thief", 0)
    };
    let thief = Worker::open(daemon.grpc_port(), open).await.unwrap();
    assert!(!thief.opened.resumed && thief.opened.session != session);
    thief.close().await;
    third.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_session_whose_worker_stays_away_ends() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1).await;
    let open = pb::OpenSession {
        timeout: seconds(5),
        ..opening("w", 1)
    };
    let mut worker = Worker::open(daemon.grpc_port(), open).await.unwrap();
    worker.tasks(1).await;
    drop(worker);
    assert_eq!(daemon.lease_all("other", "q", 1).await[0]["attempt"], 1);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_takeover_voids_the_leases_of_the_workers_other_sessions() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let mut old = Worker::open(daemon.grpc_port(), opening("w", 2))
        .await
        .unwrap();
    let tasks = old.tasks(2).await;
    let mut other = Worker::open(daemon.grpc_port(), opening("v", 0))
        .await
        .unwrap();
    let open = pb::OpenSession {
        takeover: true,
        ..opening("w", 5)
    };
    let mut new = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let again = new.tasks(2).await;
    assert!(again.iter().all(|task| task.attempt == 1));
    assert_eq!(unary(&daemon, "w", &tasks).await, ["LEASE_LOST"; 2]);
    assert_eq!(new.complete(&again, 0).await, [ItemStatus::Ok; 2]);
    assert_eq!(old.end().await.unwrap_err().code(), Code::Aborted);
    other.ask(pb::WorkerFrame::default()).await.unwrap();
    other.close().await;
    new.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_takeover_does_not_wait_for_a_redis_that_does_not_answer() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1).await;
    let mut old = Worker::open(daemon.grpc_port(), opening("w", 1))
        .await
        .unwrap();
    let tasks = old.tasks(1).await;
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    let open = pb::OpenSession {
        takeover: true,
        ..opening("w", 1)
    };
    // Clients do not wait longer.
    let opened = timeout(
        Duration::from_secs(10),
        Worker::open(daemon.grpc_port(), open),
    )
    .await;
    let mut new = opened.expect("it opens in time").unwrap();
    assert_eq!(old.end().await.unwrap_err().code(), Code::Aborted);
    assert!(daemon.signal_redis(Signal::SIGCONT));
    new.ask(pb::WorkerFrame {
        want: 1,
        ..Default::default()
    })
    .await
    .unwrap();
    let again = new.tasks(1).await;
    assert_eq!((&again[0].id, again[0].attempt), (&tasks[0].id, 1));
    assert_eq!(new.complete(&again, 0).await, [ItemStatus::Ok]);
    new.close().await;
    assert!(daemon.stop().await.success());
}

/// As with one master of a cluster gone, which has the worker's sessions and none of its queues.
#[tokio::test]
async fn a_takeover_that_fails_does_not_refuse_its_stream() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 1).await;
    let mut old = Worker::open(daemon.grpc_port(), opening("w1", 1))
        .await
        .unwrap();
    let tasks = old.tasks(1).await;
    let entry = "taskd:{sessions:5}:of:w1";
    let mut redis = daemon.redis().await;
    let () = redis::cmd("SET")
        .arg(entry)
        .arg("no hash")
        .query_async(&mut redis)
        .await
        .unwrap();
    let open = pb::OpenSession {
        takeover: true,
        ..opening("w1", 0)
    };
    let mut new = Worker::open(daemon.grpc_port(), open).await.unwrap();
    assert_eq!(old.end().await.unwrap_err().code(), Code::Aborted);
    let () = redis::cmd("DEL")
        .arg(entry)
        .query_async(&mut redis)
        .await
        .unwrap();
    new.ask(pb::WorkerFrame {
        want: 1,
        ..Default::default()
    })
    .await
    .unwrap();
    let again = new.tasks(1).await;
    assert_eq!((&again[0].id, again[0].attempt), (&tasks[0].id, 1));
    assert_eq!(new.complete(&again, 0).await, [ItemStatus::Ok]);
    new.close().await;
    assert!(daemon.stop().await.success());
}

/// The old session ends while its worker holds the leases by another one: they stay.
#[tokio::test]
async fn a_worker_that_moves_to_another_session_keeps_its_leases() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let mut old = Worker::open(daemon.grpc_port(), opening("w", 2))
        .await
        .unwrap();
    let tasks = old.tasks(2).await;
    let mut new = Worker::open(daemon.grpc_port(), opening("w", 0))
        .await
        .unwrap();
    let extension = |task: &pb::LeasedTask| {
        let (id, lease_token) = (task.id.clone(), task.lease_token.clone());
        pb::Extension {
            id,
            lease_token,
            by: seconds(300),
        }
    };
    let extensions = tasks[..1].iter().map(extension).collect();
    let answer = new
        .ask(pb::WorkerFrame {
            extensions,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(answer.extensions[0].status(), ItemStatus::Ok);
    old.send(pb::WorkerFrame {
        close: true,
        ..Default::default()
    })
    .await;
    old.end().await.unwrap();
    let other = daemon.lease_all("other", "q", 1).await;
    assert_eq!(
        other[0]["id"],
        json!(tasks[1].id),
        "only the other one came back"
    );
    assert_eq!(new.complete(&tasks[..1], 0).await, [ItemStatus::Ok]);
    new.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_goes_on_after_its_process_was_killed() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 2))
        .await
        .unwrap();
    let (tasks, session) = (worker.tasks(2).await, worker.opened.session.clone());
    daemon.kill9_and_restart();
    assert!(worker.end().await.is_err());
    daemon.ready().await;
    let holding = tasks.iter().map(|task| task.id.clone()).collect();
    let open = pb::OpenSession {
        session,
        holding,
        ..opening("w", 0)
    };
    let mut again = Worker::open(daemon.grpc_port(), open).await.unwrap();
    assert!(!again.opened.resumed);
    let extensions = tasks.iter().map(|task| {
        let (id, lease_token) = (task.id.clone(), task.lease_token.clone());
        pb::Extension {
            id,
            lease_token,
            by: seconds(60),
        }
    });
    let frame = pb::WorkerFrame {
        extensions: extensions.collect(),
        ..Default::default()
    };
    let answer = again.ask(frame).await.unwrap();
    assert!(
        answer
            .extensions
            .iter()
            .all(|result| result.status() == ItemStatus::Ok)
    );
    assert_eq!(again.complete(&tasks[..1], 0).await, [ItemStatus::Ok]);
    again.close().await;
    // The other one was the new session's, and went back with it.
    assert_eq!(
        daemon.lease_all("other", "q", 1).await[0]["id"],
        json!(tasks[1].id)
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_stop_tells_the_workers_and_leaves_their_leases() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    insert(&daemon, 0, 2).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 5))
        .await
        .unwrap();
    let tasks = worker.tasks(2).await;
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    let closing = loop {
        if let Some(closing) = worker.read().await.unwrap().expect("not at once").closing {
            break closing;
        }
    };
    assert!(closing.reason.contains("stops"), "{closing:?}");
    // There is time for a last report.
    assert_eq!(worker.complete(&tasks[..1], 1).await, [ItemStatus::Ok]);
    assert_eq!(worker.end().await.unwrap_err().code(), Code::Unavailable);
    assert!(daemon.ended().await.success());
    daemon.start_again();
    daemon.ready().await;
    assert_eq!(unary(&daemon, "w", &tasks[1..]).await, ["OK"]);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_cancelled_task_is_told_to_the_session_that_holds_it() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let ids = insert(&daemon, 0, 1).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 1))
        .await
        .unwrap();
    let tasks = worker.tasks(1).await;
    let (status, _) = daemon.post("/v1/tasks:cancel", &json!({"ids": ids})).await;
    assert_eq!(status, 200);
    while worker.ended.is_empty() {
        worker.read().await.unwrap().expect("the stream goes on");
    }
    assert_eq!(
        (&worker.ended[0].id, worker.ended[0].status()),
        (&ids[0], ItemStatus::Cancelled)
    );
    assert_eq!(worker.complete(&tasks, 0).await, [ItemStatus::Cancelled]);
    worker.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_passed_deadline_is_told_to_the_session_that_holds_the_task() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 1))
        .await
        .unwrap();
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": "k", "finish_within": "10s"})])
        .await;
    let tasks = worker.tasks(1).await;
    while worker.ended.is_empty() {
        worker.read().await.unwrap().expect("the stream goes on");
    }
    assert_eq!(
        (&worker.ended[0].id, worker.ended[0].status()),
        (&ids[0], ItemStatus::LeaseLost)
    );
    assert_eq!(worker.complete(&tasks, 1).await, [ItemStatus::LeaseLost]);
    worker.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn leases_are_kept_while_the_worker_lives() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"6s\"", &[]).await;
    let ids = insert(&daemon, 0, 1).await;
    let open = pb::OpenSession {
        keep_leases: true,
        ..opening("w", 1)
    };
    let mut worker = Worker::open(daemon.grpc_port(), open).await.unwrap();
    let tasks = worker.tasks(1).await;
    let until_then = tasks[0].lease_expires_at.unwrap().seconds;
    until("the lease was extended twice", async || {
        let (_, task): (_, Value) = daemon
            .get(&format!("/v1/tasks:explain?id={}", ids[0]))
            .await;
        let expires = task["leases"][0]["lease_expires_at"]
            .as_str()
            .expect("it is held")
            .to_owned();
        humantime::parse_rfc3339(&expires)
            .unwrap()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_secs() as i64
            >= until_then + 6
    })
    .await;
    assert_eq!(worker.complete(&tasks, 0).await, [ItemStatus::Ok]);
    worker.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn the_shortest_leases_are_kept_as_well() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"600ms\"", &[]).await;
    // A machine that stands still for 300 ms loses leases, but not each time.
    let mut answers = Vec::new();
    for attempt in 0..5 {
        insert(&daemon, 5 * attempt, 5 * attempt + 5).await;
        let open = pb::OpenSession {
            keep_leases: true,
            timeout: seconds(9),
            ..opening("w", 5)
        };
        let mut worker = Worker::open(daemon.grpc_port(), open).await.unwrap();
        let tasks = worker.tasks(5).await;
        // It comes three seconds later, after five leases.
        worker.read().await.unwrap().expect("a heartbeat");
        answers = worker.complete(&tasks, 0).await;
        worker.close().await;
        if answers == [ItemStatus::Ok; 5] {
            break;
        }
    }
    assert_eq!(answers, [ItemStatus::Ok; 5]);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn leases_are_not_kept_for_a_session_that_did_not_ask() {
    let mut daemon = Daemon::start("[queues.q]\nlease = \"3s\"\nbackoff = [\"0s\"]", &[]).await;
    insert(&daemon, 0, 1).await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 1))
        .await
        .unwrap();
    let tasks = worker.tasks(1).await;
    // It lives, and reports nothing.
    let leased = {
        let mut other = Box::pin(daemon.lease("other", "q", 1, "60s"));
        loop {
            match timeout(Duration::from_millis(500), &mut other).await {
                Ok(leased) => break leased,
                Err(_) => drop(worker.ask(pb::WorkerFrame::default()).await.unwrap()),
            }
        }
    };
    assert_eq!(
        (&leased[0]["id"], &leased[0]["attempt"]),
        (&json!(tasks[0].id), &json!(2))
    );
    assert_eq!(worker.complete(&tasks, 0).await, [ItemStatus::LeaseLost]);
    worker.close().await;
    assert!(daemon.stop().await.success());
}

/// A worker that adds up what was granted and takes off its tasks never has less than nothing.
#[tokio::test]
async fn tasks_come_behind_the_answer_that_grants_them() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let ids = insert(&daemon, 0, 1).await;
    let strange = daemon.lease("other", "q", 1, "30s").await.remove(0);
    assert_eq!(strange["id"], json!(ids[0]));
    let token = strange["lease_token"].as_str().unwrap().to_owned();
    for round in 0..40 {
        insert(&daemon, 10 * round + 1, 10 * round + 3).await;
        waiting(&daemon, 2).await;
        let mut worker = Worker::open(daemon.grpc_port(), opening("w", 0))
            .await
            .unwrap();
        // SQL is asked about another worker's tokens, so the first answer takes longer than the
        // second.
        let wrong = pb::Completion {
            id: ids[0].clone(),
            lease_token: token.clone(),
            ..Default::default()
        };
        let completions = vec![wrong; 1000];
        worker
            .send(pb::WorkerFrame {
                number: 1,
                completions,
                want: 1,
                ..Default::default()
            })
            .await;
        tokio::time::sleep(Duration::from_millis(2 + round as u64 % 20)).await;
        worker
            .send(pb::WorkerFrame {
                number: 2,
                want: 1,
                ..Default::default()
            })
            .await;
        let (mut granted, mut got, mut answers) = (0, 0, 0);
        while got < 2 || answers < 2 {
            let frame = worker.read().await.unwrap().expect("a frame");
            if let Some(answer) = &frame.answer {
                granted += answer.granted as usize;
                answers += 1;
            }
            got += frame.tasks.len();
            assert!(
                got <= granted,
                "{got} tasks, and {granted} granted in round {round}"
            );
        }
        let tasks = std::mem::take(&mut worker.tasks);
        assert_eq!(worker.complete_from(2, &tasks).await, [ItemStatus::Ok; 2]);
        worker.close().await;
    }
    assert!(daemon.stop().await.success());
}

/// Clients know a lease by its task: an answer about the earlier lease would end the new one for
/// them.
#[tokio::test]
async fn a_task_comes_again_behind_the_answer_to_its_rejection() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "k", "max_attempts": 100})])
        .await;
    let mut worker = Worker::open(daemon.grpc_port(), opening("w", 2))
        .await
        .unwrap();
    let no_delay = Some(prost_types::Duration {
        seconds: 0,
        nanos: 0,
    });
    for number in 1..=9_u64 {
        let task = worker.tasks(1).await.remove(0);
        let rejection = pb::Rejection {
            id: task.id.clone(),
            lease_token: task.lease_token.clone(),
            delay: no_delay,
            ..Default::default()
        };
        // taskd answers the frame when it has dealt with these, too, and offers the task before.
        let extension = pb::Extension {
            id: task.id,
            lease_token: task.lease_token,
            by: seconds(60),
        };
        let (rejections, extensions) = (vec![rejection], vec![extension; 1000 - 1]);
        worker
            .send(pb::WorkerFrame {
                number,
                rejections,
                extensions,
                want: 1,
                ..Default::default()
            })
            .await;
        loop {
            let frame = worker.read().await.unwrap().expect("a frame");
            assert!(
                frame.tasks.is_empty() || frame.answer.is_some(),
                "it comes before the answer {number}"
            );
            if let Some(answer) = frame.answer {
                assert_eq!(answer.rejections[0].status(), ItemStatus::Ok);
                break;
            }
        }
    }
    worker.close().await;
    assert!(daemon.stop().await.success());
}

/// The allotments in a part of Redis.
async fn allotted(daemon: &Daemon) -> Vec<String> {
    redis::cmd("KEYS")
        .arg("taskd:{sessions:5}:of:*")
        .query_async(&mut daemon.redis().await)
        .await
        .unwrap()
}

#[tokio::test]
async fn what_a_process_was_allotted_does_not_outlive_it() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let worker = Worker::open(daemon.grpc_port(), opening("w1", 1))
        .await
        .unwrap();
    until("it has an allotment", async || {
        allotted(&daemon).await == ["taskd:{sessions:5}:of:w1"]
    })
    .await;
    // At once: Redis must not find the process dead.
    daemon.kill9_and_restart();
    assert!(worker.end().await.is_err());
    daemon.ready().await;
    // Of the same part of Redis.
    let other = Worker::open(daemon.grpc_port(), opening("z", 1))
        .await
        .unwrap();
    until("only the other one has an allotment", async || {
        allotted(&daemon).await == ["taskd:{sessions:5}:of:z"]
    })
    .await;
    other.close().await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_that_does_not_read_costs_bounded_memory_and_holds_up_nobody() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let payload = "x".repeat(900 << 10);
    let task = |n: usize| json!({"queue": "q", "key": format!("key-{n}"), "payload": payload});
    for from in [0, 15] {
        daemon
            .insert(&(from..from + 15).map(task).collect::<Vec<_>>())
            .await;
    }
    waiting(&daemon, 30).await;
    let slow = Worker::open(daemon.grpc_port(), opening("slow", 100))
        .await
        .unwrap();
    until("it has some", async || {
        daemon.queue("q").await["assigned"].as_u64() > Some(0)
    })
    .await;
    // Others go on: they get what the slow one cannot take.
    let tasks = daemon.lease_all("other", "q", 15).await;
    assert_eq!(daemon.complete("other", &tasks).await, vec!["OK"; 15]);
    assert!(
        daemon.queue("q").await["assigned"].as_u64() <= Some(12),
        "{}",
        daemon.queue("q").await
    );
    drop(slow);
    // Whatever did not arrive was never tried.
    let rest = daemon.lease_all("other", "q", 15).await;
    assert_eq!(daemon.complete("other", &rest).await, vec!["OK"; 15]);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn wrong_frames_end_the_stream_with_a_reason() {
    let mut daemon =
        Daemon::start(&format!("max_sessions = 1\nmax_items = 2\n{CONFIG}"), &[]).await;
    let port = daemon.grpc_port();
    let refused =
        async |open: pb::OpenSession| Worker::open(port, open).await.err().expect("refused");
    let cases = [
        (
            pb::OpenSession {
                queues: Vec::new(),
                ..opening("w", 1)
            },
            "queues is empty",
        ),
        (opening("", 1), "worker"),
        (
            pb::OpenSession {
                timeout: seconds(1),
                ..opening("w", 1)
            },
            "timeout is 1s; from 2s to 10m",
        ),
        (
            pb::OpenSession {
                timeout: seconds(-1),
                ..opening("w", 1)
            },
            "timeout is negative",
        ),
    ];
    for (open, why) in cases {
        let status = refused(open).await;
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(why), "{status}");
    }
    insert(&daemon, 0, 1).await;
    let mut worker = Worker::open(port, opening("w", 1)).await.unwrap();
    let tasks = worker.tasks(1).await;
    let status = refused(opening("v", 1)).await;
    assert_eq!(
        (status.code(), status.message().contains("max_sessions")),
        (Code::ResourceExhausted, true),
        "{status}"
    );
    let twice = pb::WorkerFrame {
        open: Some(opening("w", 1)),
        ..Default::default()
    };
    assert_eq!(
        worker.ask(twice).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    // With a task in hand the session stays.
    let (session, holding) = (worker.opened.session.clone(), vec![tasks[0].id.clone()]);
    let open = pb::OpenSession {
        session,
        holding,
        ..opening("w", 0)
    };
    let mut worker = Worker::open(port, open).await.unwrap();
    assert!(worker.opened.resumed);
    let completions = vec![pb::Completion::default(); 3];
    let status = worker
        .ask(pb::WorkerFrame {
            completions,
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let client = &mut TasksClient::new(channel(port).await);
    let frames = tokio_stream::iter([pb::WorkerFrame {
        want: 1,
        ..Default::default()
    }]);
    let status = client
        .stream_tasks(frames)
        .await
        .unwrap()
        .into_inner()
        .message()
        .await
        .unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "the first frame must have open")
    );
    assert!(daemon.stop().await.success());
}
