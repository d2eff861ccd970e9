//! A crawl over streams, whose workers are killed at random, and their process as well.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use serde_json::{Value, json};
use taskd::wire::pb::{self, ItemStatus};

use super::access::{TOKENS, post, taskd, token};
use crate::{
    column,
    support::{
        session::{Worker, long_opening, opening, seconds, try_channel},
        until,
    },
};

const CONFIG: &str = "[queues.q]\nlease = \"6s\"\nmax_attempts = 1000\nbackoff = [\"0s\"]\n";
const WORKERS: u64 = 8;
const DEPTH: usize = 5;

/// A number that nobody can foresee, and that a failed run can repeat.
fn roll(seed: &AtomicU64, below: u64) -> u64 {
    let state = seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33) % below
}

/// The pages behind a page: three of its own, and the first one, which every page links to.
fn links(key: &str) -> Vec<String> {
    let own = (key.matches('/').count() < DEPTH).then(|| (0..3).map(|n| format!("{key}/{n}")));
    own.into_iter()
        .flatten()
        .chain(["root".to_owned()])
        .collect()
}

fn site() -> BTreeSet<String> {
    let (mut all, mut new) = (BTreeSet::new(), vec!["root".to_owned()]);
    while let Some(key) = new.pop() {
        if all.insert(key.clone()) {
            new.extend(links(&key));
        }
    }
    all
}

fn discovering(task: &pb::LeasedTask) -> pb::Completion {
    let key = String::from_utf8(task.key.to_vec()).unwrap();
    let found = |key: String| pb::NewTask {
        queue: "q".into(),
        key: key.into(),
        ..Default::default()
    };
    let (id, lease_token) = (task.id.clone(), task.lease_token.clone());
    pb::Completion {
        id,
        lease_token,
        discovered: links(&key).into_iter().map(found).collect(),
        ..Default::default()
    }
}

/// Works on stream after stream. Now and then it is killed, and another one comes under its name;
/// or its stream breaks.
async fn crawl(port: u16, name: String, seed: Arc<AtomicU64>) {
    let (mut session, mut in_hand) = (String::new(), Vec::<pb::LeasedTask>::new());
    loop {
        let takeover = session.is_empty() && roll(&seed, 2) == 0;
        let holding = in_hand.iter().map(|task| task.id.clone()).collect();
        let want = u32::try_from(1 + roll(&seed, 6)).unwrap();
        let (timeout, keep_leases) = (seconds(2), true);
        let asked = pb::OpenSession {
            takeover,
            timeout,
            keep_leases,
            holding,
            session: std::mem::take(&mut session),
            ..opening(&name, want)
        };
        let opening = async { Worker::open_on(try_channel(port).await?, asked, None).await };
        let Ok(mut worker) = opening.await else {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            continue;
        };
        // Of a session that its process does not know any more, it reports what it has all the
        // same: a task whose lease has ended meanwhile is another's.
        if !worker.opened.resumed && roll(&seed, 2) == 0 {
            in_hand.clear();
        }
        for _ in 0..1 + roll(&seed, 30) {
            if in_hand.is_empty() {
                let Ok(Some(_)) = worker.read().await else {
                    break;
                };
                in_hand.append(&mut worker.tasks);
                // A heartbeat, at the least.
                if worker.to.send(pb::WorkerFrame::default()).await.is_err() {
                    break;
                }
                continue;
            }
            let most = in_hand
                .len()
                .min(1 + usize::try_from(roll(&seed, 4)).unwrap());
            let tasks: Vec<_> = in_hand.drain(..most).collect();
            let started = tasks.iter().map(|task| task.id.clone()).collect();
            let (completions, want) = (
                tasks.iter().map(discovering).collect(),
                u32::try_from(most).unwrap(),
            );
            let frame = pb::WorkerFrame {
                started,
                completions,
                want,
                ..Default::default()
            };
            let Ok(answer) = worker.ask(frame).await else {
                break;
            };
            in_hand.append(&mut worker.tasks);
            for result in answer.completions {
                let is_known = [
                    ItemStatus::Ok,
                    ItemStatus::LeaseLost,
                    ItemStatus::AlreadyCompleted,
                ];
                assert!(is_known.contains(&result.status()), "{result:?}");
            }
        }
        match roll(&seed, 3) {
            // Killed: nobody knows what it had.
            0 => in_hand.clear(),
            // Its stream broke.
            1 => session = worker.opened.session.clone(),
            _ => {
                in_hand.clear();
                drop(
                    worker
                        .to
                        .send(pb::WorkerFrame {
                            close: true,
                            ..Default::default()
                        })
                        .await,
                );
                drop(worker.end().await);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crawl_on_streams_completes_each_page_once_while_workers_and_their_process_are_killed() {
    let mut daemon = column::start(CONFIG, &[]).await;
    let seed = std::env::var("TASKD_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0);
    println!("TASKD_SEED={seed}");
    let seed = Arc::new(AtomicU64::new(seed));
    daemon.insert(&[json!({"queue": "q", "key": "root"})]).await;
    let mut workers = tokio::task::JoinSet::new();
    for number in 0..WORKERS {
        workers.spawn(crawl(
            daemon.grpc_port(),
            format!("worker-{number}"),
            Arc::clone(&seed),
        ));
    }
    let pages = site();
    for part in 1..=3 {
        let wanted = pages.len() * part / 3;
        until("a third more of the pages is completed", async || {
            assert!(workers.try_join_next().is_none(), "no worker fails");
            daemon.queue("q").await["completed"].as_u64() >= Some(wanted as u64)
        })
        .await;
        if part < 3 {
            // SIGKILL: the sessions are gone, and their leases stay.
            daemon.kill9_and_restart();
            daemon.ready().await;
        }
    }
    until("SQL has all reports", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    let (status, answer): (_, Value) = daemon.get("/v1/tasks?queue=q&limit=1000").await;
    assert_eq!(status, 200, "{answer}");
    let tasks = answer["tasks"].as_array().unwrap();
    assert!(
        tasks.iter().all(|task| task["status"] == "COMPLETED"),
        "{answer}"
    );
    assert!(
        tasks.iter().all(|task| task["completed"] == 1),
        "no page counts twice"
    );
    let keys: BTreeSet<_> = tasks
        .iter()
        .map(|task| task["key"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(keys, pages);
    workers.abort_all();
    while workers.join_next().await.is_some() {}
    until("no lease is left", async || {
        daemon.queue("q").await["leases"].as_u64().unwrap_or(0) == 0
    })
    .await;
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_token_binds_its_sessions_and_its_end_is_theirs() {
    let mut daemon = column::start(&format!("{TOKENS}[queues.q]\nlease = \"10m\""), &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let own = token(
        &daemon,
        "own",
        &["--roles", "work", "--queues", "q", "--worker", "w"],
    )
    .await;
    let task = json!([{"queue": "q", "key": "k"}]);
    assert_eq!(post(&daemon, "/v1/tasks", &admin, task).await.0, 200);
    let port = daemon.grpc_port();
    let elsewhere = pb::OpenSession {
        queues: vec!["other".into()],
        ..opening("w", 1)
    };
    for wrong in [opening("another", 1), elsewhere] {
        let status = Worker::open_with(port, wrong, Some(&own))
            .await
            .err()
            .expect("refused");
        assert_eq!(status.code(), tonic::Code::PermissionDenied, "{status}");
    }
    // The token names the worker.
    let mut worker = Worker::open_with(port, opening("", 1), Some(&own))
        .await
        .unwrap();
    worker.tasks(1).await;
    // Nobody goes on with a session of queues that its token does not reach.
    let others = token(&daemon, "others", &["--roles", "work", "--queues", "other"]).await;
    let queues = vec!["other".into()];
    let steal = pb::OpenSession {
        session: worker.opened.session.clone(),
        queues,
        ..opening("w", 1)
    };
    let status = Worker::open_with(port, steal, Some(&others))
        .await
        .err()
        .expect("refused");
    assert_eq!(status.code(), tonic::Code::PermissionDenied, "{status}");
    let (code, _, stderr) = taskd(&daemon, &["token", "revoke", "own"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        worker.end().await.unwrap_err().code(),
        tonic::Code::Unauthenticated
    );
    let get = json!({"worker": "v", "queues": ["q"], "wait": "60s"});
    let (_, answer) = post(&daemon, "/v1/tasks:get", &admin, get).await;
    assert_eq!(answer["tasks"][0]["attempt"], 1, "{answer}");
    assert!(daemon.stop().await.success());
}

/// The claims of streams whose token was revoked a moment ago: a stream looks at its token now and
/// then only.
#[tokio::test]
async fn a_claim_that_waited_while_its_token_was_revoked_gives_its_tasks_back() {
    const STREAMS: usize = 6;
    let mut daemon = column::start(&format!("{TOKENS}[queues.q]\nlease = \"10m\""), &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let own = token(&daemon, "own", &["--roles", "work"]).await;
    let mut workers = Vec::new();
    for number in 0..STREAMS {
        let open = long_opening(&format!("w{number}"), 1);
        workers.push(
            Worker::open_with(daemon.grpc_port(), open, Some(&own))
                .await
                .unwrap(),
        );
    }
    assert_eq!(taskd(&daemon, &["token", "revoke", "own"]).0, 0);
    until("the token is revoked", async || {
        post(&daemon, "/v1/tasks:get", &own, json!({})).await.0 == 401
    })
    .await;
    let tasks: Vec<Value> = (0..STREAMS)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    assert_eq!(
        post(&daemon, "/v1/tasks", &admin, Value::from(tasks))
            .await
            .0,
        200
    );
    for mut worker in workers {
        let status = loop {
            match worker.read().await {
                Ok(frame) => assert!(frame.expect("it ends with an error").tasks.is_empty()),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
    }
    let mut keys = BTreeSet::new();
    while keys.len() < STREAMS {
        let get = json!({"worker": "v", "queues": ["q"], "max_tasks": STREAMS, "wait": "60s"});
        let (_, answer) = post(&daemon, "/v1/tasks:get", &admin, get).await;
        for task in answer["tasks"].as_array().unwrap() {
            assert_eq!(task["attempt"], 1, "{task}");
            assert!(
                keys.insert(task["key"].as_str().unwrap().to_owned()),
                "{task}"
            );
        }
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_lease_that_nobody_asked_to_keep_ends_at_its_time() {
    let mut daemon = column::start("[queues.q]\nlease = \"2s\"\nbackoff = [\"0s\"]", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "k"})]).await;
    let mut worker = Worker::open(daemon.grpc_port(), long_opening("w", 1))
        .await
        .unwrap();
    let tasks = worker.tasks(1).await;
    worker.start(&tasks).await;
    // The worker lives, says so, and reports nothing.
    let beats = async {
        let mut beats = tokio::time::interval(std::time::Duration::from_millis(100));
        loop {
            beats.tick().await;
            worker.send(pb::WorkerFrame::default()).await;
        }
    };
    let leased = tokio::select! {
        leased = daemon.lease("v", "q", 1, "60s") => leased,
        () = beats => unreachable!("they go on"),
    };
    assert_eq!(leased[0]["key"], "k", "{leased:?}");
    assert_eq!(worker.complete(&tasks, 0).await, [ItemStatus::LeaseLost]);
    assert!(daemon.stop().await.success());
}
