//! The effects of time on tasks: tests move the clock instead of waiting.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;
use taskd::{
    bus::{Bus, Reading, Topic},
    model::{
        InsertStatus, NewTask, QueueName, ShardId, StoredStatus, TaskId, WorkerName, validate,
    },
    pipelines::publishing,
    queue::{Claim, Code, Completion, Leased},
    store::Turn,
    wire::{
        self,
        pb::{self, report::What},
    },
};

use crate::{
    discovery_insert::{Fixture, tasks},
    support::{
        daemon::Daemon,
        faketime,
        process::Process,
        redis::{Fsync, RedisServer},
        until,
    },
};

const HOUR: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);

/// Starts a watchdog that goes by the clock of the fixture.
fn watchdog(fixture: &Fixture) -> Process {
    let clock = fixture.clock.clone();
    let process = Process::with_clock(&fixture.redis, &fixture.store, fixture.bus.clone(), clock);
    process.watchdog(&fixture.state.settings, &fixture.supervisor);
    process
}

#[tokio::test]
async fn finished_tasks_leave_sql_after_a_month_and_keys_of_completed_ones_stay_seen() {
    let fixture = Fixture::start().await;
    watchdog(&fixture);
    let stored = fixture
        .discovery
        .insert(tasks(&["q", "q", "q"]))
        .await
        .unwrap();
    let ids: Vec<TaskId> = stored.iter().map(|one| one.id.unwrap()).collect();
    let done = What::Completed(pb::Completed {
        worker: "w".into(),
        ..Default::default()
    });
    let died = What::Died(pb::Died {
        reason: "no luck".into(),
        attempts: 1,
        history: vec![],
        epoch: 0,
    });
    fixture.report(vec![(ids[0], done), (ids[1], died)]).await;
    until("both are settled", async || {
        fixture.status(ids[0]).await == StoredStatus::Completed
            && fixture.status(ids[1]).await == StoredStatus::Dead
    })
    .await;

    let retention = fixture.state.settings.watchdog.retention;
    fixture.clock.advance(retention - HOUR);
    let is_there = async |id| fixture.store.task(id).await.unwrap().is_some();
    assert!(is_there(ids[0]).await && is_there(ids[1]).await);
    fixture.clock.advance(HOUR);
    until("both are removed", async || {
        !is_there(ids[0]).await && !is_there(ids[1]).await
    })
    .await;
    assert!(is_there(ids[2]).await, "a task that is not finished stays");
    let again = fixture.discovery.insert(tasks(&["q", "q"])).await.unwrap();
    assert_eq!(
        (again[0].status, &again[0].id),
        (InsertStatus::Duplicate, &stored[0].id)
    );
    assert_eq!(
        again[1].status,
        InsertStatus::Created,
        "nothing else could send the dead task again"
    );
    fixture.stop().await;
}

#[tokio::test]
async fn rows_go_to_the_bus_when_their_time_has_come() {
    let fixture = Fixture::start().await;
    let (settings, process) = (&fixture.state.settings, watchdog(&fixture));
    // Stored by a process that was killed before it published them.
    let row = |key: &str, delay: Duration| {
        let delay = (!delay.is_zero()).then_some(delay);
        let task = NewTask {
            queue: "q".into(),
            key: key.to_owned().into(),
            delay,
            ..Default::default()
        };
        let now = fixture.clock.now_unix_ms();
        let row = validate::task_row(task, TaskId::at(now, 0), &settings.task_rules("q"), 1, now)
            .unwrap();
        publishing::new_row(row, &process.gates, settings)
    };
    let (horizon, day) = (settings.watchdog.horizon, 24 * HOUR);
    let rows = [
        row("fresh", Duration::ZERO),
        row("in an hour", HOUR),
        row("in a day", day),
    ];
    fixture.store.insert(&rows).await.unwrap();
    let published = async || fixture.bus.backlog(Topic::Pipeline).await.unwrap();
    assert_eq!(published().await, 0);

    // Each page has all rows that are due, so a row that is missing in it was not due.
    fixture.clock.advance(settings.watchdog.republish_after);
    until("the fresh row is published", async || published().await > 0).await;
    assert_eq!(published().await, 1);
    fixture
        .clock
        .advance(HOUR - horizon - settings.watchdog.republish_after);
    until("the row of an hour is published", async || {
        published().await > 1
    })
    .await;
    assert_eq!(published().await, 2);
    fixture.clock.advance(day - HOUR);
    until("the row of a day is published", async || {
        published().await > 2
    })
    .await;
    // The process that was killed may have published the first one.
    assert_eq!(flags(&fixture, 3).await, [true, false, false]);
    fixture.stop().await;
}

/// Reads so many records of `pipeline`; answers for each whether discovery or the watchdog flagged
/// it `again`.
async fn flags(fixture: &Fixture, count: usize) -> Vec<bool> {
    let (mut reader, mut flags) = (
        fixture
            .bus
            .subscribe(Topic::Pipeline, Reading::Shared)
            .await
            .unwrap(),
        Vec::new(),
    );
    while flags.len() < count {
        let read = reader.next(10).await.unwrap();
        flags.extend(
            read.iter()
                .map(|message| wire::read_pipeline_record(&message.value).unwrap().again),
        );
    }
    flags
}

#[tokio::test]
async fn rows_that_the_watchdog_may_have_published_go_out_as_again() {
    let fixture = Fixture::start().await;
    let settings = &fixture.state.settings;
    let process = Process::with_clock(
        &fixture.redis,
        &fixture.store,
        fixture.bus.clone(),
        fixture.clock.clone(),
    );
    let (publisher, now) = (process.publisher(settings), fixture.clock.now_unix_ms());
    let row = |delay| {
        let task = NewTask {
            queue: "q".into(),
            key: "k".to_owned().into(),
            delay,
            ..Default::default()
        };
        validate::task_row(task, TaskId::new(), &settings.task_rules("q"), 1, now).unwrap()
    };
    let late = settings.watchdog.republish_after + Duration::from_millis(1);
    // The time at which each goes out, since the insert.
    let (day, of_a_day) = (24 * HOUR, 24 * HOUR - settings.watchdog.horizon);
    let mut at = Duration::ZERO;
    for (delay, time) in [
        (None, at),
        (None, late),
        (Some(day), of_a_day),
        (Some(day), of_a_day + late),
    ] {
        fixture.clock.advance(time - at);
        at = time;
        publisher
            .publish(&[(&row(delay), Turn::FIRST)], false)
            .await
            .unwrap();
    }
    assert_eq!(flags(&fixture, 4).await, [false, true, false, true]);
    fixture.stop().await;
}

/// Leases what the queue offers to one worker, which gets it.
async fn lease(process: &Process, shard: &ShardId) -> Vec<Leased> {
    let known = process.queue.shards_of(&shard.queue).remove(0);
    let (worker, max_bytes) = (WorkerName::new("w").unwrap(), 1 << 20);
    let claim = Claim {
        worker,
        max_tasks: 10,
        max_bytes,
        is_first: true,
        lease: None,
        priority: None,
    };
    let leased = process
        .queue
        .worker
        .claim(&known, claim)
        .await
        .unwrap()
        .deliver();
    assert!(process.queue.worker.report_deliveries().await);
    leased
}

#[tokio::test]
async fn a_task_lives_until_its_deadline() {
    let fixture = Fixture::start_with(|settings| settings.queues.default.lease = 10 * HOUR).await;
    let (settings, process) = (&fixture.state.settings, watchdog(&fixture));
    process.fanout(settings, &fixture.supervisor);
    // Far from each other, so that the time which the test takes makes no difference.
    let within = |minutes: u32| {
        let finish_within = Some(minutes * MINUTE);
        NewTask {
            queue: "q".into(),
            key: minutes.to_string().into(),
            finish_within,
            ..Default::default()
        }
    };
    let stored = fixture
        .discovery
        .insert(vec![within(60), within(75), within(90)])
        .await
        .unwrap();
    let ids: Vec<TaskId> = stored.iter().map(|one| one.id.unwrap()).collect();
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    until("the tasks wait", async || {
        process.queue.stats(&shard).await.unwrap_or_default().open == 3
    })
    .await;
    let leased = lease(&process, &shard).await;
    assert_eq!(leased.len(), 3);
    let live = async || process.queue.stats(&shard).await.unwrap().live;
    // One page of the watchdog has all that are due: when the first task is dead, it has decided
    // about the others.
    fixture.clock.advance(74 * MINUTE);
    until("the first one is dead", async || live().await < 3).await;
    let complete = async |id: TaskId| {
        let token = leased
            .iter()
            .find(|task| task.id == id)
            .unwrap()
            .token
            .clone();
        let completion = Completion {
            id,
            token,
            worker: WorkerName::new("w").unwrap(),
            report: "report".into(),
            limit: Default::default(),
        };
        process.queue.worker.complete(completion).await.unwrap()
    };
    assert_eq!(complete(ids[0]).await, Code::LeaseLost);
    assert_eq!(
        complete(ids[1]).await,
        Code::Ok,
        "a minute before its deadline"
    );
    fixture.clock.advance(17 * MINUTE);
    until("the last one is dead", async || live().await == 0).await;
    assert_eq!(complete(ids[2]).await, Code::LeaseLost);
    fixture.stop().await;
}

#[tokio::test]
async fn leases_backoff_and_grace_end_by_the_clock() {
    // An hour each: the time that the test takes ends none of them.
    let fixture = Fixture::start_with(|settings| {
        (
            settings.queues.default.lease,
            settings.queues.default.backoff,
        ) = (HOUR, vec![HOUR]);
        settings.watchdog.grace = HOUR;
    })
    .await;
    let (settings, process) = (&fixture.state.settings, watchdog(&fixture));
    process.fanout(settings, &fixture.supervisor);
    let id: TaskId = fixture.discovery.insert(tasks(&["q"])).await.unwrap()[0]
        .id
        .unwrap();
    let (shard, queue) = (
        ShardId {
            queue: QueueName::new("q").unwrap(),
            number: 0,
        },
        &process.queue,
    );
    let stats = async || queue.stats(&shard).await.unwrap_or_default();
    until("the task waits", async || stats().await.open == 1).await;

    // Its first worker dies.
    assert_eq!(lease(&process, &shard).await.len(), 1);
    fixture.clock.advance(HOUR - MINUTE);
    assert_eq!(
        queue
            .upkeep
            .expire(&shard, 10, &[HOUR])
            .await
            .unwrap()
            .expired,
        0
    );
    assert_eq!(stats().await.leases, 1);
    fixture.clock.advance(MINUTE);
    until("the lease has run out", async || stats().await.leases == 0).await;

    // The backoff is jittered by up to a fifth.
    fixture.clock.advance(HOUR * 4 / 5 - MINUTE);
    assert!(lease(&process, &shard).await.is_empty());
    assert_eq!(
        queue
            .upkeep
            .promote(&shard, 10, settings.watchdog.horizon)
            .await
            .unwrap()
            .promoted,
        0
    );
    assert_eq!(stats().await.delayed, 1);
    fixture.clock.advance(HOUR * 2 / 5 + MINUTE);
    until("the backoff is over", async || stats().await.delayed == 0).await;

    let leased = lease(&process, &shard).await.remove(0);
    assert_eq!(leased.token.attempt, 2);
    let completion = Completion {
        id,
        token: leased.token,
        worker: WorkerName::new("w").unwrap(),
        report: "report".into(),
        limit: Default::default(),
    };
    assert_eq!(queue.worker.complete(completion).await.unwrap(), Code::Ok);
    let done = What::Completed(pb::Completed {
        worker: "w".into(),
        ..Default::default()
    });
    fixture.report(vec![(id, done)]).await;
    until("it is settled", async || {
        fixture.status(id).await == StoredStatus::Completed
    })
    .await;
    fixture.clock.advance(HOUR - MINUTE);
    assert_eq!(queue.upkeep.finals(&shard, HOUR, 10).await.unwrap().ids, []);
    assert_eq!(stats().await.finals, 1);
    fixture.clock.advance(MINUTE);
    until("its record is forgotten", async || {
        stats().await.finals == 0
    })
    .await;
    fixture.stop().await;
}

/// The clock of the machine of a process is an hour ahead, or an hour behind. Redis's is right.
#[tokio::test]
async fn a_process_whose_clock_is_wrong_judges_discovered_deadlines_by_the_shared_one() {
    let library = faketime().expect("libfaketime: scripts/install-deps test");
    for wrong_by in ["+1h", "-1h"] {
        let redis = RedisServer::start(Fsync::EverySecond);
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let env = vec![
            pair("LD_PRELOAD", library.to_str().unwrap()),
            pair("FAKETIME", wrong_by),
            pair("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ];
        let mut daemon = Daemon::begin_in("", &["--redis-url", &redis.url()], env);
        daemon.ready().await;
        daemon
            .insert(&[json!({"queue": "q", "key": "parent", "replicas": 2})])
            .await;
        let now = i64::try_from(
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_secs(),
        )
        .unwrap();
        let at = |seconds: i64| taskd::model::to_rfc_3339((now + seconds) * 1000);
        let complete = async |worker: &str, deadline: String| {
            let leased = daemon.lease_all(worker, "q", 1).await;
            let discovered = json!([{"queue": "found", "key": worker, "deadline": deadline}]);
            let item = json!({"id": leased[0]["id"], "lease_token": leased[0]["lease_token"], "discovered": discovered});
            let (_, answer) = daemon
                .post(
                    "/v1/tasks:complete",
                    &json!({"worker": worker, "completions": [item]}),
                )
                .await;
            answer["results"][0].clone()
        };
        let answer = complete("in-time", at(1800)).await;
        assert_eq!(answer["status"], "OK", "{wrong_by}: {answer}");
        let answer = complete("late", at(-1800)).await;
        assert_eq!(answer["status"], "OK", "{wrong_by}: {answer}");
        assert_eq!(daemon.lease_all("w", "found", 1).await[0]["key"], "in-time");
        until(
            "a letter tells of the task that came too late",
            async || {
                let (_, letters) = daemon.get("/v1/dead-letters?queue=found").await;
                let keys: Vec<_> = letters["letters"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|letter| &letter["key"])
                    .collect();
                keys == ["late"]
            },
        )
        .await;

        // Bulk changes and acts have the shared time, too: their ids are sorted by it.
        let filter = json!({"filter": {"queue": "q"}, "yes": true});
        assert_eq!(daemon.post("/v1/tasks:cancel", &filter).await.0, 200);
        let (_, bulk_changes) = daemon.get("/v1/bulk").await;
        let (_, acts) = daemon.get("/v1/acts").await;
        let acts = acts["acts"].as_array().unwrap();
        assert!(!acts.is_empty());
        for id in acts
            .iter()
            .map(|act| &act["id"])
            .chain([&bulk_changes["bulk"][0]["id"]])
        {
            let id: TaskId = id.as_str().unwrap().parse().unwrap();
            let off = id.created_unix_ms() / 1000 - now;
            assert!(off.abs() < 1800, "{wrong_by}: {id} is {off} s off");
        }
        assert!(daemon.stop().await.success());
    }
}
