//! A Redis that loses everything under a running taskd, which starts over by itself.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{daemon::Daemon, kafka, until};

/// A get whose answer is lost at the end of a round keeps its tasks for a lease.
const CONFIG: &str =
    "reconcile_every = \"100ms\"\nrepublish_after = \"200ms\"\n[queues.q]\nlease = \"15s\"\n";

/// Every second one is for two workers.
fn tasks(from: usize, to: usize) -> Vec<Value> {
    (from..to)
        .map(|n| json!({"queue": "q", "key": format!("key-{n}"), "replicas": replicas(n)}))
        .collect()
}

fn replicas(n: usize) -> usize {
    1 + n % 2
}

/// The workers that have a result of each task in SQL.
async fn credited(daemon: &Daemon, ids: &[String]) -> BTreeMap<String, Vec<String>> {
    let mut credited = BTreeMap::new();
    for id in ids {
        // It may be starting over at this moment.
        until("the results are answered", async || {
            let Some((200, answer)) = daemon.try_get(&format!("/v1/tasks/{id}/results")).await
            else {
                return false;
            };
            let results = answer["results"].as_array().unwrap();
            let workers = results
                .iter()
                .map(|one| one["worker"].as_str().unwrap().to_owned())
                .collect();
            credited.insert(id.clone(), workers);
            true
        })
        .await;
    }
    credited
}

/// Inserts, again and again while taskd starts over; the ids.
async fn insert_patiently(daemon: &Daemon, tasks: &[Value]) -> Vec<String> {
    let mut ids = Vec::new();
    until("the tasks are stored", async || {
        let Some((200, answer)) = daemon.try_post("/v1/tasks", &json!(tasks)).await else {
            return false;
        };
        ids = answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["id"].as_str().unwrap().to_owned())
            .collect();
        true
    })
    .await;
    ids
}

/// One get and the completion of what came; what is refused meanwhile comes again. The ids of what
/// was handed out.
async fn work(daemon: &Daemon, worker: &str) -> Vec<String> {
    let get = json!({"worker": worker, "queues": ["q"], "max_tasks": 50, "wait": "100ms"});
    let Some((200, answer)) = daemon.try_post("/v1/tasks:get", &get).await else {
        return Vec::new();
    };
    let leased = answer["tasks"].as_array().unwrap();
    let completion = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "result": worker});
    let completions: Vec<_> = leased.iter().map(completion).collect();
    let complete = json!({"worker": worker, "completions": completions});
    until("the completions are answered", async || {
        let Some((200, answer)) = daemon.try_post("/v1/tasks:complete", &complete).await else {
            return false;
        };
        answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .all(|one| one["status"] != "TRY_LATER")
    })
    .await;
    leased
        .iter()
        .map(|task| task["id"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn taskd_starts_over_and_all_work_is_done() {
    starts_over(Daemon::start(CONFIG, &[]).await).await;
}

#[tokio::test]
async fn with_kafka_as_well_whose_records_are_still_there() {
    let (bus, prefix) = (
        format!("kafka://{}", kafka::shared().await),
        format!("flushall-{}-", Uuid::new_v4().simple()),
    );
    starts_over(Daemon::start(CONFIG, &["--bus-url", &bus, "--topic-prefix", &prefix]).await).await;
}

async fn starts_over(mut daemon: Daemon) {
    let pid = daemon.pid();
    let mut ids = daemon.insert(&tasks(0, 300)).await;
    for (worker, count) in [("ann", 60), ("bob", 40)] {
        let leased = daemon.lease_all(worker, "q", count).await;
        assert!(
            daemon
                .complete(worker, &leased)
                .await
                .iter()
                .all(|status| status == "OK")
        );
    }
    let mut before = BTreeMap::new();
    until("SQL has the results", async || {
        before = credited(&daemon, &ids).await;
        before.values().map(Vec::len).sum::<usize>() == 100
    })
    .await;
    let held = daemon.lease_all("ann", "q", 20).await;

    let mut redis = daemon.redis().await;
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut redis)
        .await
        .unwrap();
    ids.extend(insert_patiently(&daemon, &tasks(300, 400)).await);
    let mut handed_out: BTreeSet<(String, String)> = BTreeSet::new();
    until("the queue is worked off", async || {
        for worker in ["ann", "bob", "eve"] {
            handed_out.extend(
                work(&daemon, worker)
                    .await
                    .into_iter()
                    .map(|id| (id, worker.to_owned())),
            );
        }
        daemon.unfinished("q").await == 0
    })
    .await;

    for (id, workers) in &before {
        let again = workers
            .iter()
            .find(|worker| handed_out.contains(&(id.clone(), (*worker).clone())));
        assert_eq!(again, None, "{id} was handed out again to who had done it");
    }
    let after = credited(&daemon, &ids).await;
    for (n, id) in ids.iter().enumerate() {
        let workers: BTreeSet<_> = after[id].iter().collect();
        assert_eq!(
            (after[id].len(), workers.len()),
            (replicas(n), replicas(n)),
            "{id}: {:?}",
            after[id]
        );
        assert!(
            before
                .get(id)
                .is_none_or(|credited| credited.iter().all(|worker| workers.contains(worker)))
        );
    }
    // The leases of before are of an earlier generation, and all of their tasks are done.
    let late = daemon.complete("ann", &held).await;
    assert!(
        late.iter().all(|status| status == "ALREADY_COMPLETED"),
        "{late:?}"
    );
    assert_eq!(daemon.get("/readyz").await.0, 200);
    assert_eq!(daemon.log().matches("starting over").count(), 1);
    assert_eq!(daemon.pid(), pid);
    assert!(daemon.stop().await.success());
}

/// Completions that Redis lost before they were in SQL are made again. No worker is credited twice,
/// none beyond NUM.
#[tokio::test]
async fn every_loss_in_the_middle_of_the_work_is_survived() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let mut redis = daemon.redis().await;
    let mut ids = daemon.insert(&tasks(0, 300)).await;
    let (mut rounds, mut losses) = (0, 0);
    until("the queue is worked off", async || {
        let flush = async {
            // In the middle of calls, and each time of other ones.
            if rounds % 4 == 1 && losses < 4 {
                redis::cmd("FLUSHALL")
                    .query_async::<()>(&mut redis)
                    .await
                    .unwrap();
                losses += 1;
            }
        };
        let more = async {
            if rounds < 10 {
                ids.extend(
                    insert_patiently(&daemon, &tasks(300 + rounds * 20, 320 + rounds * 20)).await,
                );
            }
        };
        tokio::join!(
            work(&daemon, "ann"),
            work(&daemon, "bob"),
            flush,
            work(&daemon, "eve"),
            more
        );
        rounds += 1;
        rounds >= 20 && daemon.unfinished("q").await == 0
    })
    .await;
    assert_eq!(losses, 4);
    for (n, id) in ids.iter().enumerate() {
        let (_, answer) = daemon.get(&format!("/v1/tasks/{id}/results")).await;
        let results = answer["results"].as_array().unwrap();
        let credited: Vec<_> = results
            .iter()
            .filter(|one| one["surplus"] == false)
            .map(|one| one["worker"].as_str().unwrap())
            .collect();
        let workers: BTreeSet<_> = credited.iter().collect();
        assert_eq!(
            (credited.len(), workers.len()),
            (replicas(n), replicas(n)),
            "{id}: {answer}"
        );
    }
    assert!(daemon.stop().await.success());
}

/// SIGKILL in the middle of a rebuild: of the process that found the loss, and of the one that goes
/// on with it.
#[tokio::test]
async fn a_rebuild_that_is_killed_again_and_again_brings_every_task_back_once() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let mut ids = BTreeSet::new();
    for from in (0..20_000).step_by(1000) {
        ids.extend(daemon.insert(&tasks(from, from + 1000)).await);
    }
    until("all wait", async || {
        daemon.queue("q").await["waiting"] == 20_000
    })
    .await;
    let (mut met, mut goes_on, mut ended) = ([0, 0], false, 0);
    for kills in 1.. {
        let begun = daemon.log().matches(BEGUN).count();
        let mut redis = daemon.redis().await;
        if goes_on {
            // The lease of the killed process would last a few seconds more.
            redis::cmd("DEL")
                .arg("taskd:lease:watchdog")
                .query_async::<()>(&mut redis)
                .await
                .unwrap();
            until("the walk goes on", async || republished(&daemon).await > 0).await;
        } else {
            redis::cmd("FLUSHALL")
                .query_async::<()>(&mut redis)
                .await
                .unwrap();
            until("the rebuild has begun", async || {
                daemon.log().matches(BEGUN).count() > begun
            })
            .await;
        }
        daemon.kill9();
        let before = std::mem::replace(&mut ended, daemon.log().matches(ENDED).count());
        let is_met = ended == before;
        met[usize::from(goes_on)] += usize::from(is_met);
        goes_on = is_met && !goes_on;
        daemon.start_again();
        daemon.ready().await;
        if met.iter().all(|met| *met >= 2) {
            break;
        }
        assert!(kills < 20, "only {met:?} kills met a rebuild");
    }
    // Each for one or two workers, so that both get all of them in turn.
    let mut handed_out = BTreeMap::<String, BTreeSet<&str>>::new();
    until("the queue is worked off", async || {
        for worker in ["ann", "bob"] {
            let leased = daemon.lease(worker, "q", 1000, "100ms").await;
            for task in &leased {
                let id = task["id"].as_str().unwrap().to_owned();
                assert!(
                    handed_out.entry(id).or_default().insert(worker),
                    "{worker} got {task} twice"
                );
            }
            assert!(
                daemon
                    .complete(worker, &leased)
                    .await
                    .iter()
                    .all(|status| status == "OK")
            );
        }
        daemon.unfinished("q").await == 0
    })
    .await;
    let numbers: usize = handed_out.values().map(BTreeSet::len).sum();
    assert_eq!((handed_out.len(), numbers), (20_000, 30_000));
    assert!(handed_out.keys().all(|id| ids.contains(id)));
    assert!(daemon.stop().await.success());
}

/// The lines of a log about a rebuild.
const BEGUN: &str = "are open again";
const ENDED: &str = "are rebuilt:";

/// The tasks that the process has published again.
async fn republished(daemon: &Daemon) -> u64 {
    let (_, metrics) = daemon.get("/metrics").await;
    let series = "taskd_watchdog_handled_tasks_total{what=\"republished\"} ";
    let mut lines = metrics.as_str().unwrap().lines();
    lines
        .find_map(|line| line.strip_prefix(series))
        .map_or(0, |count| count.parse().unwrap())
}

#[tokio::test]
async fn the_name_of_the_store_is_written_again() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    daemon.insert(&tasks(0, 10)).await;
    let mut redis = daemon.redis().await;
    let mut store_id = async |command: &str| -> redis::Value {
        redis::cmd(command)
            .arg("taskd:store-id")
            .query_async(&mut redis)
            .await
            .unwrap()
    };
    let before = store_id("GET").await;
    store_id("DEL").await;
    until("it is there again", async || {
        store_id("GET").await == before
    })
    .await;
    daemon.ready().await;
    let mut done = daemon.work("ann", "q", 10).await;
    done.extend(daemon.drain("bob", "q").await);
    assert_eq!(done.len(), 15, "{done:?}");
    assert!(daemon.stop().await.success());
}
