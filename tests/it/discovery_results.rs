//! The results side of discovery: what reports become, and what goes to `dead-letters` instead.

use std::{collections::BTreeMap, sync::Arc};

use prost::Message as _;
use taskd::{
    bus::{Bus, Record, Topic},
    model::{InsertStatus, KeyHash, QueueName, StoredStatus, TaskId},
    runtime::Supervisor,
    store::TurnedAway,
    wire::pb::{self, report::What},
};

use crate::{
    discovery_insert::{Fixture, Picky, tasks},
    support::{process::Process, store_contract::Database, until},
};

fn discovered(queue: &str, key: &str) -> pb::NewTask {
    let headers = [("h".to_owned(), "v".to_owned())].into();
    pb::NewTask {
        queue: queue.into(),
        key: key.to_owned().into(),
        payload: "p".into(),
        headers,
        ..Default::default()
    }
}

fn completed(worker: &str, discovered: Vec<pb::NewTask>) -> What {
    What::Completed(pb::Completed {
        worker: worker.into(),
        discovered,
        ..Default::default()
    })
}

#[tokio::test]
async fn discovered_tasks_that_find_no_room_go_to_dead_letters_and_the_crawl_goes_on() {
    let fixture = Fixture::start_with(|settings| settings.discovery.max_queues = 3).await;
    fixture.fill().await;
    let stored = fixture.discovery.insert(tasks(&["q", "q"])).await.unwrap();
    let parents: Vec<TaskId> = stored.iter().map(|one| one.id.unwrap()).collect();
    let invalid = pb::NewTask {
        replicas: Some(0),
        ..discovered("q", "invalid")
    };
    let known = pb::NewTask {
        replicas: Some(0),
        ..discovered("q", "0")
    };
    let found = vec![
        discovered("full", "a"),
        discovered("full", "0"),
        discovered("q", "child"),
        discovered("third", "child"),
        discovered("fourth", "child"),
        invalid.clone(),
        known,
    ];
    let again = vec![
        discovered("full", "a"),
        discovered("full", "b"),
        discovered("q", "another"),
    ];
    fixture
        .report(vec![
            (parents[0], completed("w", found)),
            (parents[1], completed("w", again)),
        ])
        .await;
    for parent in &parents {
        until("their reports are settled", async || {
            fixture.status(*parent).await == StoredStatus::Completed
        })
        .await;
    }
    let unfinished =
        [("full", 1), ("q", 2), ("third", 1)].map(|(queue, count)| (queue.to_owned(), count));
    assert_eq!(fixture.unfinished().await, unfinished.into());

    let mut letters = fixture.letters().await;
    letters.sort_by_key(|letter| {
        (
            letter.queue.clone(),
            letter.task.as_ref().unwrap().key.clone(),
        )
    });
    let letter = |queue: &str, key: &str, reason: &str, parent: TaskId| {
        (
            queue.to_owned(),
            key.to_owned(),
            reason.to_owned(),
            parent.as_bytes().to_vec(),
        )
    };
    let full = "queue full has 1 unfinished tasks, its max_unfinished";
    let expected = [
        letter(
            "fourth",
            "child",
            "queue fourth is new, and there are 3 queues already (max_queues); use one of those",
            parents[0],
        ),
        letter("full", "a", full, parents[0]),
        letter("full", "b", full, parents[1]),
        letter(
            "q",
            "invalid",
            "replicas is 0; must be 1 to 100",
            parents[0],
        ),
    ];
    let told = |letter: &pb::DeadLetter| {
        let key = String::from_utf8(letter.task.as_ref().unwrap().key.to_vec()).unwrap();
        (
            letter.queue.clone(),
            key,
            letter.reason.clone(),
            letter.parent_id.to_vec(),
        )
    };
    assert_eq!(letters.iter().map(told).collect::<Vec<_>>(), expected);
    for letter in &letters {
        let task = letter.task.as_ref().unwrap();
        assert_eq!(
            (&task.payload[..], &task.headers["h"][..]),
            (&b"p"[..], "v")
        );
    }
    // A queue of its own has room again: what the letter carries is inserted as it was meant.
    let again = pb::NewTask {
        queue: "q".into(),
        key: "sent again".into(),
        ..letters[1].task.clone().unwrap()
    };
    assert_eq!(
        fixture
            .discovery
            .insert(vec![again.try_into().unwrap()])
            .await
            .unwrap()[0]
            .status,
        InsertStatus::Created
    );
    fixture.stop().await;
}

#[tokio::test]
async fn a_discovered_task_of_a_later_version_becomes_a_letter_and_hurts_nobody() {
    let fixture = Fixture::start().await;
    let parent: TaskId = fixture.discovery.insert(tasks(&["q"])).await.unwrap()[0]
        .id
        .unwrap();
    let negative = Some(prost_types::Duration {
        seconds: -1,
        nanos: 0,
    });
    let unreadable = [
        (
            pb::NewTask {
                payload_encoding: 9,
                ..discovered("q", "a")
            },
            "payload_encoding 9 is unknown; expected BYTES, TEXT or JSON",
        ),
        (
            pb::NewTask {
                priority: 9,
                ..discovered("q", "b")
            },
            "priority 9 is unknown; expected high, medium or low",
        ),
        (
            pb::NewTask {
                delay: negative,
                ..discovered("q", "c")
            },
            "delay is negative or out of range",
        ),
        (
            pb::NewTask {
                lease_duration: negative,
                ..discovered("q", "d")
            },
            "lease_duration is negative or out of range",
        ),
    ];
    let known = pb::NewTask {
        priority: 9,
        ..discovered("q", "0")
    };
    let mut found: Vec<_> = unreadable.iter().map(|(task, _)| task.clone()).collect();
    found.insert(1, discovered("q", "sibling"));
    found.push(known);
    fixture.report(vec![(parent, completed("w", found))]).await;
    until("the completion is settled", async || {
        fixture.status(parent).await == StoredStatus::Completed
    })
    .await;

    // The place in the report decides the id, also behind a task that is not stored.
    assert_eq!(
        fixture.status(TaskId::derived(parent, "w", 1, 1)).await,
        StoredStatus::Unfinished
    );
    assert_eq!(fixture.unfinished().await, [("q".to_owned(), 1)].into());
    let mut letters = fixture.letters().await;
    letters.sort_by_key(|letter| letter.task.as_ref().unwrap().key.clone());
    let told = letters
        .iter()
        .map(|letter| (letter.task.clone().unwrap(), &letter.reason[..]));
    assert_eq!(told.collect::<Vec<_>>(), unreadable);
    assert!(
        letters
            .iter()
            .all(|letter| (&letter.queue[..], &letter.parent_id[..])
                == ("q", &parent.as_bytes()[..]))
    );
    fixture.stop().await;
}

#[tokio::test]
async fn a_full_disk_holds_reports_up_and_drops_nothing() {
    let fixture = Fixture::start_on(|_| {}, Some(100)).await;
    let stored = fixture.discovery.insert(tasks(&["q"])).await.unwrap();
    let parent: TaskId = stored[0].id.unwrap();
    fixture.fill().await;
    let large = |n: usize| pb::NewTask {
        payload: vec![1; 10_000].into(),
        ..discovered("q", &n.to_string())
    };
    let mut found: Vec<_> = (10..110).map(large).collect();
    found.push(discovered("full", "beyond"));
    fixture.report(vec![(parent, completed("w", found))]).await;
    until("the letter is sent", async || {
        fixture.letters().await.len() == 1
    })
    .await;
    let failed = async || {
        let pending: redis::Value = redis::cmd("XPENDING")
            .arg("t:{bus}:task-results:0")
            .arg("taskd")
            .query_async(&mut fixture.redis.conn())
            .await
            .unwrap();
        matches!(pending, redis::Value::Array(parts) if parts[0] == redis::Value::Int(1))
    };
    until("the report is held", failed).await;
    assert_eq!(fixture.status(parent).await, StoredStatus::Unfinished);
    assert_eq!(fixture.unfinished().await["q"], 1);

    // With more room all of it is stored, by whoever reads the report next.
    let Fixture {
        state,
        redis,
        bus,
        database,
        supervisor,
        server: _server,
        ..
    } = fixture;
    supervisor.stop();
    supervisor.wait().await;
    let (store, supervisor) = (database.open().await, Supervisor::new());
    let process = Process::new(&redis, &store, bus.clone());
    process.sync_queues(&supervisor).await;
    process.discovery(&state.settings, &supervisor);
    until("it is settled", async || {
        store.task(parent).await.unwrap().unwrap().status == StoredStatus::Completed
    })
    .await;
    let unfinished: BTreeMap<_, _> = store.unfinished().await.unwrap().into_iter().collect();
    assert_eq!(unfinished[&QueueName::new("q").unwrap()], 100);
    supervisor.stop();
    supervisor.wait().await;
}

/// Kafka takes half a minute for a partition whose only broker is away, and all reports wait behind
/// these.
#[tokio::test]
async fn reports_do_not_wait_for_a_bus_that_takes_no_discovered_task() {
    let silent = |bus| Picky::silent(bus, Topic::Pipeline) as Arc<dyn Bus>;
    let fixture = Fixture::start_by(|_| {}, None, silent).await;
    let stored = fixture.discovery.insert(tasks(&["q", "q"])).await.unwrap();
    for (n, parent) in stored.iter().map(|one| one.id.unwrap()).enumerate() {
        let child = discovered("q", &format!("child of {n}"));
        fixture
            .report(vec![(parent, completed("w", vec![child]))])
            .await;
        // The second one comes behind the first one's publish.
        until("the report is settled", async || {
            fixture.status(parent).await == StoredStatus::Completed
        })
        .await;
    }
    assert_eq!(fixture.unfinished().await, [("q".to_owned(), 2)].into());
}

#[tokio::test]
async fn discovered_tasks_that_the_filter_knows_get_no_row() {
    let fixture = Fixture::start().await;
    let stored = fixture.discovery.insert(tasks(&["q", "q"])).await.unwrap();
    let [first, second] = [0, 1].map(|place| stored[place].id.unwrap());
    // SQL does not have these keys: their tasks would be new.
    let (queue, mut known) = (QueueName::new("q").unwrap(), redis::cmd("HSET"));
    known.arg("t:{q}:seen").arg("era").arg(0);
    for n in 0..5 {
        let hash = KeyHash::new(&queue, format!("known {n}").as_bytes());
        known.arg(&hash.0[..16]).arg(TaskId::new().as_bytes());
    }
    known
        .query_async::<()>(&mut fixture.redis.conn())
        .await
        .unwrap();
    let pair = |n| {
        [
            discovered("q", &format!("known {n}")),
            discovered("q", &format!("new {n}")),
        ]
    };
    let found: Vec<_> = (0..5).flat_map(pair).collect();

    fixture
        .report(vec![(first, completed("w", found.clone()))])
        .await;
    until("the first is settled", async || {
        fixture.status(first).await == StoredStatus::Completed
    })
    .await;
    for place in 0..10 {
        let task = fixture
            .store
            .task(TaskId::derived(first, "w", place, 1))
            .await
            .unwrap();
        assert_eq!(task.is_some(), place % 2 == 1, "{place}");
    }
    // A report that comes again counts nothing. Of the other one all keys are known by now.
    fixture
        .report(vec![
            (first, completed("w", found.clone())),
            (second, completed("w", found)),
        ])
        .await;
    until("the second is settled", async || {
        fixture.status(second).await == StoredStatus::Completed
    })
    .await;
    let duplicates = [((Some(queue.clone()), TurnedAway::Duplicate), 5 + 10)].into();
    let counted = async || {
        fixture
            .store
            .turned_away(std::slice::from_ref(&queue))
            .await
            .unwrap()
            == duplicates
    };
    until("duplicates are counted", counted).await;
    assert_eq!(fixture.unfinished().await, [("q".to_owned(), 5)].into());
    fixture.stop().await;
}

#[tokio::test]
async fn without_the_filter_sql_decides_about_discovered_tasks() {
    let fixture = Fixture::start().await;
    let parent = fixture.discovery.insert(tasks(&["q"])).await.unwrap()[0]
        .id
        .unwrap();
    // Each call to the filter fails.
    let broken = redis::cmd("SET")
        .arg("t:{q}:seen")
        .arg("x")
        .query_async::<()>(&mut fixture.redis.conn())
        .await;
    broken.unwrap();
    // The first has the key of its parent.
    let found = (0..10).map(|n| discovered("q", &n.to_string())).collect();
    fixture.report(vec![(parent, completed("w", found))]).await;
    until("it is settled", async || {
        fixture.status(parent).await == StoredStatus::Completed
    })
    .await;
    assert_eq!(fixture.unfinished().await, [("q".to_owned(), 9)].into());
    fixture.stop().await;
}

#[tokio::test]
async fn a_dead_letter_carries_what_sends_the_task_again() {
    let fixture = Fixture::start().await;
    let task = pb::NewTask {
        payload_encoding: pb::Encoding::Text.into(),
        replicas: Some(3),
        priority: pb::Priority::Low.into(),
        lease_duration: Some(prost_types::Duration {
            seconds: 7,
            nanos: 0,
        }),
        max_attempts: Some(2),
        traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into(),
        ..discovered("q", "dies")
    };
    let stored = fixture
        .discovery
        .insert(
            [task.clone(), discovered("q", "lives")]
                .map(|task| task.try_into().unwrap())
                .into(),
        )
        .await
        .unwrap();
    let ids: Vec<TaskId> = stored.iter().map(|one| one.id.unwrap()).collect();
    let failure = pb::Failure {
        at_unix_ms: 5,
        worker: "w".into(),
        reason: "once".into(),
    };
    let died = |reason: &str| {
        What::Died(pb::Died {
            reason: reason.into(),
            attempts: 6,
            history: vec![failure.clone()],
            epoch: 0,
        })
    };
    // One that others have completed is not dead, whatever Redis says.
    fixture.report(vec![(ids[1], completed("w", vec![]))]).await;
    until("it is completed", async || {
        fixture.status(ids[1]).await == StoredStatus::Completed
    })
    .await;
    fixture
        .report(vec![(ids[1], died("late")), (ids[0], died("no luck"))])
        .await;
    until("a letter is sent", async || {
        !fixture.letters().await.is_empty()
    })
    .await;

    let letter = fixture.letters().await.remove(0);
    assert_eq!(letter.task, Some(task));
    assert_eq!(
        (&letter.reason[..], letter.attempts, letter.at_unix_ms),
        ("no luck", 6, 1)
    );
    assert_eq!(
        (&letter.task_id[..], &letter.queue[..]),
        (&ids[0].as_bytes()[..], "q")
    );
    assert_eq!(letter.history, std::slice::from_ref(&failure));
    assert_eq!(fixture.status(ids[0]).await, StoredStatus::Dead);
    // Read again, as after a crash between the commit and the letter.
    fixture.report(vec![(ids[0], died("no luck"))]).await;
    until("it is sent again", async || {
        fixture.letters().await.len() == 2
    })
    .await;
    assert_eq!(fixture.letters().await[1], letter);
    fixture.stop().await;
}

#[tokio::test]
async fn a_report_that_sql_refuses_is_buried_alone() {
    let fixture = Fixture::start().await;
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON results WHEN CAST(NEW.worker AS TEXT) = 'bad' \
                  BEGIN SELECT RAISE(ABORT, 'no such worker'); END";
    fixture.database.execute(refuse).await;
    let stored = fixture.discovery.insert(tasks(&["q"; 4])).await.unwrap();
    let ids: Vec<TaskId> = stored.iter().map(|one| one.id.unwrap()).collect();
    let report = |(id, worker): (&TaskId, &str)| {
        let what = Some(pb::report::What::Completed(pb::Completed {
            worker: worker.into(),
            ..Default::default()
        }));
        pb::Report {
            task_id: id.as_bytes().to_vec().into(),
            what,
            at_unix_ms: 1,
        }
    };
    let reports: Vec<_> = ids
        .iter()
        .zip(["ann", "bad", "", "bob"])
        .map(report)
        .collect();
    let batch = |reports: &[pb::Report]| {
        pb::ReportBatch {
            queue: "q".into(),
            shard: 0,
            reports: reports.to_vec(),
            ..Default::default()
        }
        .encode_to_vec()
    };
    let record = Record {
        partition: 0,
        value: batch(&reports).into(),
    };
    fixture
        .bus
        .publish(Topic::TaskResults, &[record])
        .await
        .unwrap();

    let is_done =
        async |id| fixture.store.task(id).await.unwrap().unwrap().status == StoredStatus::Completed;
    until("the reports around them are settled", async || {
        is_done(ids[0]).await && is_done(ids[3]).await
    })
    .await;
    let letters = fixture
        .letters()
        .await
        .into_iter()
        .map(|letter| (letter.value.to_vec(), letter.reason));
    let letters: BTreeMap<_, _> = letters.collect();
    assert_eq!(letters.len(), 2, "{letters:?}");
    assert!(
        letters[&batch(&reports[1..2])].contains("no such worker"),
        "{letters:?}"
    );
    assert!(
        letters[&batch(&reports[2..3])].contains("worker is missing"),
        "{letters:?}"
    );
    fixture.stop().await;
}
