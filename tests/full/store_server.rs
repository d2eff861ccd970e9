//! The store when its server is slow, cuts connections, restarts or asks for TLS; and whether it
//! finds its rows by indexes.

use std::{
    collections::HashSet,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures::future::join_all;
use sqlx::{Connection, MySqlConnection};
use taskd::{
    model::{
        Act, AttemptState, DeadLetter, FailedAttempt, LeaseNumber, LetterCursor, LetterFilter,
        LetterKind, LetterPages, Offset, OnDead, QueueName, Sequence, ShardId,
        StoredStatus::{Completed, Unfinished},
        TaskFilter, TaskId, TaskStatus,
    },
    store::{
        Access, Error,
        Inserted::{Duplicate, New},
        NewRow, Operators, Outbox, Published, Rebuilt, Retried, Settlement, Store, Stretch,
        TaskSearch, Tasks, Turn, Unpublished, Walked,
        mysql::MysqlStore,
    },
};
use tempfile::TempDir;

use crate::support::{
    commit_proxy::CommitProxy,
    mariadb::{MariadbServer, MysqlDatabase},
    proxy::{Proxy, Upstream},
    store_contract::{
        self, AGE, Database, completed, count, counts, died, discovering, insert_new, row, rows,
    },
    until,
};

/// Calls as taskd's pipelines do: again after a call that met one silence after another and failed
/// for now.
async fn lasting<T, Fut: Future<Output = Result<T, Error>>>(mut call: impl FnMut() -> Fut) -> T {
    for _ in 0..4 {
        match call().await {
            Err(error) if error.is_transient() => {}
            done => return done.unwrap(),
        }
    }
    panic!("the store did not come back")
}

/// Inserts and settles batch after batch, each of which must be answered as if nothing happened.
/// Counts its calls in `done`.
async fn work(store: Arc<dyn Store>, worker: usize, batches: usize, done: Arc<AtomicUsize>) {
    for batch in 0..batches {
        let batch: Vec<NewRow> = (0..20)
            .map(|i| row("q", format!("{worker} {batch} {i}")))
            .collect();
        let inserted = lasting(|| store.insert(&batch)).await;
        assert_eq!(inserted.answers, [New; 20]);
        done.fetch_add(1, Ordering::SeqCst);
        let report = |row: &NewRow| {
            discovering(
                row,
                "w",
                vec![self::row("found", &row.task.key), self::row("one", "k")],
            )
        };
        let reports: Vec<_> = batch.iter().map(report).collect();
        let settled = lasting(|| store.settle(&reports)).await;
        assert!(
            settled
                .answers
                .iter()
                .all(|settled| settled.status == Some(Completed))
        );
        done.fetch_add(1, Ordering::SeqCst);
    }
}

async fn assert_worked(database: &MysqlDatabase, store: &dyn Store, tasks: u64) {
    let expected = [
        count("found", Unfinished, tasks),
        count("one", Unfinished, 1),
        count("q", Completed, tasks),
    ];
    assert_eq!(counts(store).await, expected);
    for (table, rows) in [("tasks", 2 * tasks + 1), ("results", tasks), ("outbox", 0)] {
        assert_eq!(
            database
                .number(&format!("SELECT COUNT(*) FROM {table}"))
                .await as u64,
            rows,
            "{table}"
        );
    }
    let waiting = store.due(i64::MAX, 100_000, &HashSet::new()).await.unwrap();
    assert_eq!(waiting.len() as u64, tasks + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_cut_in_the_middle_of_work_lose_and_repeat_nothing() {
    let database = MysqlDatabase::create().await;
    let (store, done) = (database.open().await, Arc::new(AtomicUsize::new(0)));
    let workers: Vec<_> = (0..4)
        .map(|n| tokio::spawn(work(Arc::clone(&store), n, 10, Arc::clone(&done))))
        .collect();
    // Each time that something has got through: else nothing ever would.
    let (mut killed, mut seen) = (0, 0);
    while !workers.iter().all(tokio::task::JoinHandle::is_finished) {
        let now = done.load(Ordering::SeqCst);
        if now > seen {
            seen = now;
            killed += database.kill_connections().await;
        }
        tokio::task::yield_now().await;
    }
    join_all(workers)
        .await
        .into_iter()
        .for_each(|worker| worker.unwrap());
    assert!(killed > 20, "{killed}");
    assert_worked(&database, &*store, 800).await;
    database.remove().await;
}

#[tokio::test]
async fn a_call_whose_commit_was_not_answered_is_repeated_without_harm() {
    let database = MysqlDatabase::create().await;
    let proxy = CommitProxy::start(&database.url()).await;
    let store = MysqlStore::connect(proxy.url(), 4).await.unwrap();
    let batch = rows("q", 5);
    let ids: Vec<TaskId> = batch.iter().map(|row| row.task.id).collect();
    let cut = || {
        assert!(proxy.has_cut());
        proxy.cut_next_commit();
    };

    proxy.cut_next_commit();
    insert_new(&store, &batch).await;
    assert!(proxy.has_cut());
    assert_eq!(database.number("SELECT COUNT(*) FROM batches").await, 1);
    assert_eq!(
        store
            .due(i64::MAX, 10, &HashSet::new())
            .await
            .unwrap()
            .len(),
        5
    );
    assert_eq!(counts(&store).await, [count("q", Unfinished, 5)]);
    // The same with somebody else's key among them.
    cut();
    let mixed = [row("q", "new"), row("q", &batch[0].task.key)];
    let taken = Duplicate {
        id: ids[0],
        status: Unfinished,
    };
    assert_eq!(store.insert(&mixed).await.unwrap().answers, [New, taken]);

    cut();
    let published = |tasks: &[TaskId]| {
        let tasks = tasks.iter().map(|id| (*id, Turn::FIRST)).collect();
        [Published {
            partition: 0,
            offset: taskd::model::Offset { major: 1, minor: 0 },
            tasks,
        }]
    };
    store.mark_published("g", &published(&ids)).await.unwrap();
    assert_eq!(store.published_among("g", &ids).await.unwrap().len(), 5);

    cut();
    store
        .unpublish(&ids[4..], Unpublished::Parked)
        .await
        .unwrap();
    assert_eq!(
        database
            .number("SELECT COUNT(*) FROM outbox WHERE state = 1")
            .await,
        1
    );

    cut();
    let child = row("q", "child");
    let settled = store
        .settle(&[discovering(&batch[0], "w", vec![child.clone()])])
        .await
        .unwrap()
        .answers;
    assert!(settled[0].repeated && settled[0].status == Some(Completed));
    assert_eq!(store.results(ids[0]).await.unwrap().len(), 1);
    assert!(
        store
            .task(child.task.id)
            .await
            .unwrap()
            .unwrap()
            .unpublished,
        "the watchdog will publish it"
    );
    let expected = [count("q", Unfinished, 6), count("q", Completed, 1)];
    assert_eq!(counts(&store).await, expected);

    // The second attempt finds no dead task, and the acts of the first one. Another call is no
    // repeat of it.
    store.settle(&[died(&batch[1])]).await.unwrap();
    cut();
    let retried = [Retried {
        id: ids[1],
        status: Unfinished,
    }];
    assert_eq!(
        store
            .retry_with_acts(&ids[..3], 1, "ops", "retry")
            .await
            .unwrap(),
        retried
    );
    assert_eq!(
        store
            .retry_with_acts(&ids[..3], 1, "ops", "retry")
            .await
            .unwrap(),
        []
    );
    assert_eq!(
        (
            store.acts(None, 10).await.unwrap().len(),
            counts(&store).await
        ),
        (1, expected.to_vec())
    );

    let letter = record_letter(1);
    store
        .keep_letters(std::slice::from_ref(&letter))
        .await
        .unwrap();
    cut();
    assert_eq!(store.purge(&[letter.id()]).await.unwrap(), 1);
    assert_eq!(store.purge(&[letter.id()]).await.unwrap(), 0);

    cut();
    let shard = ShardId {
        queue: batch[0].task.queue.clone(),
        number: 0,
    };
    store
        .open_shards(std::slice::from_ref(&shard))
        .await
        .unwrap();
    cut();
    assert_eq!(
        store.begin_rebuild(&[(shard.clone(), 1)]).await.unwrap(),
        [2]
    );
    cut();
    let rebuilt = Rebuilt {
        shard,
        generation: 2,
        offset: None,
    };
    store.end_rebuild("g", &[rebuilt]).await.unwrap();
    assert!(store.rebuilding().await.unwrap().shards.is_empty());

    cut();
    assert_eq!(
        store.remove_finished(AGE, 10).await.unwrap(),
        0,
        "it is gone already"
    );
    assert!(proxy.has_cut());
    assert_eq!(store.task(ids[0]).await.unwrap(), None);
    let removed = Duplicate {
        id: ids[0],
        status: Completed,
    };
    assert_eq!(
        store
            .insert(&[row("q", &batch[0].task.key)])
            .await
            .unwrap()
            .answers,
        [removed]
    );
    assert_eq!(counts(&store).await, expected);
    // What waits in a sequence is not published, although the second attempt finds it stored.
    proxy.cut_next_commit();
    let sequence = |key: &str| {
        let mut row = row("in-order", key);
        row.task.sequence = Some(Sequence {
            name: "s".to_owned(),
            on_dead: OnDead::Next,
        });
        row
    };
    let in_order = [sequence("first"), sequence("second")];
    let stored = store.insert(&in_order).await.unwrap();
    assert!(proxy.has_cut());
    assert_eq!(stored.answers, [New, New]);
    assert_eq!(stored.turn_of(&in_order[0]), Some(stored.batch));
    assert_eq!(stored.turn_of(&in_order[1]), None);
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_fall_silent_are_made_anew() {
    let database = MysqlDatabase::create().await;
    let (proxy, mut url) = (
        Proxy::start().await,
        url::Url::parse(&database.url()).unwrap(),
    );
    proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", url.port().unwrap())));
    url.set_port(Some(proxy.port())).unwrap();
    // Four workers, and connections that wait in the pool.
    let store: Arc<dyn Store> = Arc::new(MysqlStore::connect(url.as_str(), 6).await.unwrap());
    let done = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> = (0..4)
        .map(|n| tokio::spawn(work(Arc::clone(&store), n, 40, Arc::clone(&done))))
        .collect();
    // More of them fall silent than the pool has.
    for part in [20, 60, 100] {
        until("some work is done", async || {
            done.load(Ordering::SeqCst) > part
        })
        .await;
        proxy.silence();
    }
    join_all(workers)
        .await
        .into_iter()
        .for_each(|worker| worker.unwrap());
    assert_worked(&database, &*store, 4 * 40 * 20).await;
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_is_not_noticed_and_a_long_absence_is_told() {
    let server = MariadbServer::start(&[]);
    let database = MysqlDatabase::on(server.url()).await;
    let (store, done) = (database.open().await, Arc::new(AtomicUsize::new(0)));
    let workers: Vec<_> = (0..3)
        .map(|n| tokio::spawn(work(Arc::clone(&store), n, 40, Arc::clone(&done))))
        .collect();
    for part in [20, 100] {
        until("some work is done", async || {
            done.load(Ordering::SeqCst) > part
        })
        .await;
        server.kill9();
        server.start_again();
    }
    join_all(workers)
        .await
        .into_iter()
        .for_each(|worker| worker.unwrap());
    assert_worked(&database, &*store, 3 * 40 * 20).await;

    server.kill9();
    let error = store.insert(&rows("late", 1)).await.unwrap_err();
    assert!(
        matches!(error, Error::GaveUp { .. }) && error.is_transient(),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(
        text.starts_with("gave up after ") && text.contains("Connection refused"),
        "{text}"
    );
    server.start_again();
    insert_new(&*store, &rows("late", 1)).await;
}

/// A transaction that holds the row.
async fn hold(database: &MysqlDatabase, row: &NewRow) -> MySqlConnection {
    let mut rival = MySqlConnection::connect(&database.url()).await.unwrap();
    sqlx::raw_sql("START TRANSACTION")
        .execute(&mut rival)
        .await
        .unwrap();
    let touch = "UPDATE tasks SET attempts = attempts + 1 WHERE id = ?";
    sqlx::query(touch)
        .bind(row.task.id.as_bytes().to_vec())
        .execute(&mut rival)
        .await
        .unwrap();
    rival
}

#[tokio::test]
async fn a_lock_that_is_held_for_long_is_waited_for_again() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let batch = rows("q", 1);
    insert_new(&*store, &batch).await;
    let mut rival = hold(&database, &batch[0]).await;
    let report = vec![completed(&batch[0], "w")];
    let settling = tokio::spawn(async move { (store.settle(&report).await, store) });
    let first = database.wait_for_lock_wait_but("").await;
    // The server has ended the first try, and the second one waits.
    database.wait_for_lock_wait_but(&first).await;
    sqlx::raw_sql("COMMIT").execute(&mut rival).await.unwrap();
    let (settled, store) = settling.await.unwrap();
    assert_eq!(settled.unwrap().answers[0].status, Some(Completed));
    assert_eq!(counts(&*store).await, [count("q", Completed, 1)]);
    database.remove().await;
}

/// A count sees the whole of a transaction that began before it, or nothing of it.
#[tokio::test]
async fn a_count_waits_for_transactions_that_began_before_it() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let batch = rows("q", 1);
    insert_new(&*store, &batch).await;
    let mut rival = hold(&database, &batch[0]).await;
    let settling = tokio::spawn({
        let store = Arc::clone(&store);
        let report = vec![died(&batch[0])];
        async move { store.settle(&report).await }
    });
    let settlement = database.wait_for_lock_wait_but("").await;
    let counted = async |store: Arc<dyn Store>, as_of: i64| {
        let filter = TaskFilter {
            queue: Some(batch[0].task.queue.clone()),
            statuses: TaskStatus::list("dead").unwrap(),
            as_of_unix_ms: Some(as_of),
            ..Default::default()
        };
        let search = TaskSearch {
            filter,
            limit: 10,
            look_at: 10,
            after: None,
            stays_in_queue: false,
        };
        store.search(&search).await.unwrap().tasks.len()
    };
    // Ids are of the present.
    let now = TaskId::new().created_unix_ms() + 1_000;
    let beginning = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.begin_era(now).await }
    });
    database.wait_for_lock_wait_but(&settlement).await;
    sqlx::raw_sql("COMMIT").execute(&mut rival).await.unwrap();
    let as_of = beginning.await.unwrap().unwrap();
    let first = counted(Arc::clone(&store), as_of).await;
    settling.await.unwrap().unwrap();
    assert_eq!((first, counted(store, as_of).await), (1, 1));
    database.remove().await;
}

#[tokio::test]
async fn marks_of_several_offsets_lock_tasks_in_the_order_of_ids() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let mut batch = rows("q", 2);
    batch.sort_unstable_by_key(|row| row.task.id);
    insert_new(&*store, &batch).await;
    let mut rival = hold(&database, &batch[0]).await;
    let published = [1, 0].map(|n| {
        let (offset, id) = (
            Offset {
                major: 1,
                minor: n as u64,
            },
            batch[n].task.id,
        );
        Published {
            partition: 0,
            offset,
            tasks: vec![(id, Turn::FIRST)],
        }
    });
    let marking = tokio::spawn(async move { (store.mark_published("g", &published).await, store) });
    database.wait_for_lock_wait().await;
    // Otherwise each would wait for the other.
    let last = sqlx::query("SELECT id FROM tasks WHERE id = ? FOR UPDATE NOWAIT")
        .bind(batch[1].task.id.as_bytes().to_vec());
    last.execute(&mut rival)
        .await
        .expect("nobody holds the last task");
    sqlx::raw_sql("COMMIT").execute(&mut rival).await.unwrap();
    let (marked, store) = marking.await.unwrap();
    marked.unwrap();
    let ids: Vec<TaskId> = batch.iter().map(|row| row.task.id).collect();
    assert_eq!(store.published_among("g", &ids).await.unwrap().len(), 2);
    database.remove().await;
}

#[tokio::test]
async fn an_insert_that_waits_for_a_removal_finds_the_key_moved() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let batch = rows("q", 2);
    insert_new(&*store, &batch).await;
    store.settle(&[completed(&batch[0], "w")]).await.unwrap();
    // A removal that has done all but its commit.
    let mut removal = MySqlConnection::connect(&database.url()).await.unwrap();
    let steps = "START TRANSACTION; \
                 INSERT INTO seen SELECT key_hash, id, status FROM tasks WHERE status = 1; \
                 DELETE FROM tasks WHERE status = 1";
    sqlx::raw_sql(steps).execute(&mut removal).await.unwrap();
    let again = [row("q", &batch[0].task.key), row("q", "new")];
    let inserting =
        tokio::spawn(async move { (store.insert(&again).await.unwrap().answers, store) });
    database.wait_for_lock_wait().await;
    sqlx::raw_sql("COMMIT").execute(&mut removal).await.unwrap();

    let (answers, store) = inserting.await.unwrap();
    assert_eq!(
        answers,
        [
            Duplicate {
                id: batch[0].task.id,
                status: Completed
            },
            New
        ]
    );
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 2), count("q", Completed, 1)]
    );
    database.remove().await;
}

#[tokio::test]
async fn a_pool_whose_connections_are_all_in_use_says_so() {
    let database = MysqlDatabase::create().await;
    let store = Arc::new(MysqlStore::connect(&database.url(), 2).await.unwrap());
    let batch = rows("q", 2);
    insert_new(&*store, &batch).await;
    let mut rivals = [
        hold(&database, &batch[0]).await,
        hold(&database, &batch[1]).await,
    ];
    let settling: Vec<_> = (0..2)
        .map(|i| {
            let (store, report) = (Arc::clone(&store), vec![completed(&batch[i], "w")]);
            tokio::spawn(async move { store.settle(&report).await })
        })
        .collect();
    let first = database.wait_for_lock_wait_but("").await;
    database.wait_for_lock_wait_but(&first).await;

    let error = store.insert(&rows("other", 1)).await.unwrap_err();
    assert!(
        matches!(error, Error::Busy { connections: 2, .. }) && error.is_transient(),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "all 2 connections to the database have been in use for 8 s; raise database_pool, or ask for less at once"
    );
    for rival in &mut rivals {
        sqlx::raw_sql("COMMIT").execute(rival).await.unwrap();
    }
    for settling in settling {
        settling.await.unwrap().unwrap();
    }
    insert_new(&*store, &rows("other", 1)).await;
    database.remove().await;
}

/// A certificate authority, and a certificate for 127.0.0.1 by it.
fn certificates() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let openssl = |args: &str| {
        let output = Command::new("openssl")
            .args(args.split(' '))
            .current_dir(&dir)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "openssl {args}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    for ca in ["ca", "other-ca"] {
        openssl(&format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem"
        ));
    }
    openssl("req -newkey rsa:2048 -nodes -subj /CN=db -keyout db.key -out db.csr");
    std::fs::write(dir.path().join("ext"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    openssl(
        "x509 -req -in db.csr -days 2 -CA ca.pem -CAkey ca.key -CAcreateserial -extfile ext -out db.pem",
    );
    dir
}

/// `taskd migrate` on a database it cannot use: what it says.
fn refused(url: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(["migrate", "--database-url", url])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

#[tokio::test]
async fn a_server_that_asks_for_tls_gets_it_and_a_wrong_authority_is_refused() {
    let files = certificates();
    let path = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    let options = [
        format!("--ssl-ca={}", path("ca.pem")),
        format!("--ssl-cert={}", path("db.pem")),
        format!("--ssl-key={}", path("db.key")),
    ];
    let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
    options.push("--require-secure-transport=ON");
    let server = MariadbServer::start(&options);
    let with = |parameters: &str| format!("{}?{parameters}", server.url());
    let ca = path("ca.pem");

    for parameters in [
        format!("ssl-mode=VERIFY_CA&ssl-ca={ca}"),
        format!("ssl-mode=VERIFY_IDENTITY&ssl-ca={ca}"),
    ] {
        let database = MysqlDatabase::on(&with(&parameters)).await;
        store_contract::a_task_comes_back_as_it_was_stored(&database).await;
        database.remove().await;
        let database = MysqlDatabase::on(&with(&parameters)).await;
        store_contract::of_concurrent_settlements_one_credits_each_worker(&database).await;
        database.remove().await;
    }
    // Without a check of who it is: as it is when nothing is said.
    for parameters in ["", "ssl-mode=PREFERRED", "ssl-mode=REQUIRED"] {
        let store = MysqlStore::connect(&with(parameters), 1).await.unwrap();
        store.store_id().await.unwrap();
        store.close().await;
    }

    let wrong = refused(&with(&format!(
        "ssl-mode=VERIFY_CA&ssl-ca={}",
        path("other-ca.pem")
    )));
    assert!(
        wrong.contains("no TLS connection to the database") && wrong.contains("UnknownIssuer"),
        "{wrong}"
    );
    assert!(
        wrong.contains("ssl-ca") && !wrong.contains("taskd:taskd"),
        "{wrong}"
    );
    let elsewhere =
        with(&format!("ssl-mode=VERIFY_IDENTITY&ssl-ca={ca}")).replace("127.0.0.1", "localhost");
    assert!(refused(&elsewhere).contains("no TLS connection to the database"));
    let missing = refused(&with("ssl-mode=VERIFY_CA&ssl-ca=/no/such.pem"));
    assert!(
        missing.contains("cannot read /no/such.pem, the ssl-ca of the database's URL"),
        "{missing}"
    );
    let unknown = refused(&with("ssl-mode=MAYBE"));
    assert!(unknown.contains("MAYBE"), "{unknown}");
    let plain = refused(&with("ssl-mode=DISABLED"));
    assert!(
        plain.contains("Access denied") || plain.contains("require_secure_transport"),
        "{plain}"
    );
}

#[tokio::test]
async fn no_query_scans_a_table() {
    let server = MariadbServer::start(&[
        "--slow-query-log=1",
        "--long-query-time=0",
        "--log-slow-verbosity=query_plan,explain",
        "--slow-query-log-file=slow.log",
    ]);
    let database = MysqlDatabase::on(server.url()).await;
    let store = database.open().await;
    // Enough of each kind that a scan would never be the cheaper way.
    let batch: Vec<NewRow> = (0..4000)
        .map(|i| row(&format!("q{}", i % 3), format!("{i}")))
        .collect();
    insert_new(&*store, &batch).await;
    let ids: Vec<TaskId> = batch.iter().map(|row| row.task.id).collect();
    let tasks = ids[..2000].iter().map(|id| (*id, Turn::FIRST)).collect();
    let offset = taskd::model::Offset { major: 1, minor: 0 };
    store
        .mark_published(
            "g",
            &[Published {
                partition: 0,
                offset,
                tasks,
            }],
        )
        .await
        .unwrap();
    store
        .unpublish(&ids[2000..3000], Unpublished::Parked)
        .await
        .unwrap();
    store
        .settle(
            &batch[..1000]
                .iter()
                .map(|row| completed(row, "w"))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    assert_eq!(store.remove_finished(AGE, 300).await.unwrap(), 300);
    // Names that were there once.
    let names: Vec<ShardId> = (0..3000)
        .map(|n| ShardId {
            queue: queue_name(n),
            number: n % 4,
        })
        .collect();
    store.open_shards(&names).await.unwrap();
    database
        .execute("INSERT INTO queue_counts (queue, status, count) SELECT CONCAT('old', shard, queue), 1, 7 FROM shards")
        .await;
    store
        .keep_letters(&(0..3000).map(record_letter).collect::<Vec<_>>())
        .await
        .unwrap();
    store
        .keep_failures(
            &(0..3000)
                .map(|n| failure(&batch[n / 2 + 1000], n))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    store
        .keep_acts(
            &(0..3000)
                .map(|n| Act::new("ann", "retry", &n.to_string()))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    sqlx::raw_sql("ANALYZE TABLE tasks, outbox, batches, results, seen, shards, queue_counts, letters, history, acts")
        .execute(&mut MySqlConnection::connect(&database.url()).await.unwrap())
        .await
        .unwrap();

    // Above, lists were as long as the tables.
    let before = server.file("data/slow.log").len();
    use_everything(&*store, &batch).await;

    let log = server.file("data/slow.log");
    let (mut explained, mut wrong) = (0, Vec::new());
    for entry in log[before..].split("# User@Host") {
        let explains = entry
            .lines()
            .filter_map(|line| line.strip_prefix("# explain: "));
        for columns in explains.map(|line| line.split('\t').collect::<Vec<_>>()) {
            let [_, select, table, kind, _, key, .., extra] = columns[..] else {
                continue;
            };
            const TABLES: [&str; 10] = [
                "tasks",
                "outbox",
                "batches",
                "results",
                "seen",
                "shards",
                "queue_counts",
                "letters",
                "history",
                "acts",
            ];
            if select == "INSERT" || !TABLES.contains(&table) {
                continue;
            }
            explained += 1;
            let is_sorted = ["outbox", "batches", "letters", "history"].contains(&table)
                || key == "tasks_finished"
                || key == "tasks_on_bus";
            if ["ALL", "index"].contains(&kind) || (is_sorted && extra.contains("filesort")) {
                wrong.push(entry);
            }
        }
    }
    assert!(explained > 30, "{explained}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn queue_name(n: u32) -> QueueName {
    QueueName::new(&format!("name{n}")).unwrap()
}

/// A letter about a record, of one of three queues by its name.
fn record_letter(n: u32) -> DeadLetter {
    let (topic, queue) = ("pipeline".to_owned(), format!("q{}", n % 3));
    DeadLetter {
        topic,
        queue,
        offset: n.to_string(),
        at_unix_ms: n.into(),
        ..Default::default()
    }
}

/// Every query about letters, where `dead` is a dead task.
async fn use_letters(store: &dyn Store, dead: TaskId) {
    let after = Some(LetterCursor {
        at_unix_ms: 2000,
        id: record_letter(2000).id(),
    });
    let (queue, kind) = (QueueName::new("q0").unwrap(), LetterKind::Record);
    for (queue, kind) in [
        (None, None),
        (Some(queue.clone()), None),
        (None, Some(kind)),
        (Some(queue), Some(kind)),
    ] {
        for after in [None, after] {
            let filter = LetterFilter {
                queue: queue.clone(),
                kind,
                ..Default::default()
            };
            let page = store
                .letters(&LetterPages {
                    filter,
                    limit: 5,
                    after,
                })
                .await
                .unwrap();
            assert_eq!(page.letters.len(), 5);
        }
    }
    let records = [record_letter(1).id(), record_letter(2).id()];
    assert_eq!(store.letter_kinds(&records).await.unwrap().len(), 2);
    assert!(
        store.letter(dead).await.unwrap().is_some()
            && store.letter(records[0]).await.unwrap().is_some()
    );
    assert_eq!(
        store
            .retry_with_acts(&[dead], 1, "ops", "retry")
            .await
            .unwrap()
            .len(),
        1
    );
    assert_eq!(store.purge(&records).await.unwrap(), 2);
    assert_eq!(store.remove_old_letters(AGE, 5).await.unwrap(), 5);
}

fn failure(row: &NewRow, n: usize) -> FailedAttempt {
    FailedAttempt {
        id: row.task.id,
        worker: "w".into(),
        state: AttemptState::Rejected,
        leased_unix_ms: 0,
        at_unix_ms: n as i64,
        attempt: 1,
        lease: LeaseNumber {
            generation: 1,
            grant: n as u64,
        },
        reason: "no luck".into(),
    }
}

/// Every query about histories.
async fn use_history(store: &dyn Store, row: &NewRow) {
    store
        .keep_failures(&(5000..5110).map(|n| failure(row, n)).collect::<Vec<_>>())
        .await
        .unwrap();
    assert_eq!(
        store.attempts(row.task.id, 10).await.unwrap().failed.len(),
        100
    );
    assert_eq!(store.remove_old_failures(AGE, 5).await.unwrap(), 5);
    store
        .keep_acts(&[Act::new("ann", "retry", "7")])
        .await
        .unwrap();
    assert_eq!(store.acts_on("7", 10).await.unwrap().len(), 2);
}

/// Every query that there is, with few arguments.
async fn use_everything(store: &dyn Store, batch: &[NewRow]) {
    let ids: Vec<TaskId> = batch.iter().map(|row| row.task.id).collect();
    let [on_bus, parked, due] = [&batch[1500], &batch[2500], &batch[3500]];
    let queue = &parked.task.queue;
    store
        .insert(&[row("q0", "0"), row("q0", "900"), row("q0", "brand new")])
        .await
        .unwrap();
    store
        .settle(&[
            discovering(on_bus, "w", vec![row("q1", "1")]),
            completed(&batch[3600], "w"),
        ])
        .await
        .unwrap();
    let died = Settlement::Died {
        id: ids[1600],
        reason: "no luck".into(),
        attempts: 1,
        history: vec![],
        epoch: None,
        at_unix_ms: 1,
    };
    store.settle(&[died]).await.unwrap();
    use_letters(store, ids[1600]).await;
    use_history(store, &batch[1400]).await;
    let without = [due.task.id].into_iter().collect();
    assert!(!store.due(i64::MAX, 10, &without).await.unwrap().is_empty());
    assert!(!store.parked(queue, 10, &without).await.unwrap().is_empty());
    assert_eq!(store.parked_queues().await.unwrap().len(), 3);
    store.states(&[ids[0], ids[900], ids[1500]]).await.unwrap();
    store
        .unfinished_among(&[ids[0], ids[900], ids[1500]])
        .await
        .unwrap();
    let walked = Walked {
        queue: batch[1000].task.queue.clone(),
        id: ids[1000],
    };
    let behind = Stretch {
        after: Some(&walked),
        ..Stretch::ALL
    };
    assert!(!store.on_bus(behind, 10).await.unwrap().tasks.is_empty());
    assert!(
        !store
            .published_among("g", &[ids[900], ids[1001]])
            .await
            .unwrap()
            .is_empty()
    );
    store.stranded(None).await.unwrap();
    let shard = ShardId {
        queue: queue.clone(),
        number: batch[1700].task.partition,
    };
    let lost = ShardId {
        number: 7,
        ..shard.clone()
    };
    store
        .open_shards(std::slice::from_ref(&lost))
        .await
        .unwrap();
    store.begin_rebuild(&[(lost.clone(), 1)]).await.unwrap();
    let mut rebuilding = store.rebuilding().await.unwrap();
    rebuilding.shards.insert(shard.clone(), 1);
    assert!(
        !store
            .rebuild_page(&rebuilding, Some(&walked), 100)
            .await
            .unwrap()
            .tasks
            .is_empty()
    );
    store
        .end_rebuild(
            "g",
            &[Rebuilt {
                shard: lost.clone(),
                generation: 2,
                offset: None,
            }],
        )
        .await
        .unwrap();
    assert!(store.close_shard(&lost, 2).await.unwrap());
    store
        .unpublish(&ids[1800..1802], Unpublished::Missing)
        .await
        .unwrap();
    let offset = taskd::model::Offset { major: 0, minor: 0 };
    let tasks = vec![
        (due.task.id, Turn::FIRST),
        (ids[1900], Turn::FIRST),
        (ids[1800], Turn::FIRST),
    ];
    store
        .mark_published(
            "g",
            &[Published {
                partition: 0,
                offset,
                tasks,
            }],
        )
        .await
        .unwrap();
    assert!(store.task(ids[900]).await.unwrap().is_some());
    for unfinished in [&ids[1700], &ids[2500], &ids[3700]] {
        assert!(store.place("g", *unfinished).await.unwrap().is_some());
    }
    assert_eq!(store.results(ids[900]).await.unwrap().len(), 1);
    assert_eq!(store.remove_finished(AGE, 5).await.unwrap(), 5);
    assert_eq!(store.rows(&ids[1500..1503]).await.unwrap().len(), 3);
    let keys: Vec<_> = batch[1500..1503]
        .iter()
        .chain(&batch[..1])
        .map(|row| row.task.key_hash)
        .collect();
    assert_eq!(store.key_owners(&keys).await.unwrap().len(), 4);
    assert!(store.bring_forward(0, 1, None, 10).await.unwrap().rows > 0);
    assert_eq!(store.oldest_waiting(i64::MAX).await.unwrap().len(), 3);
    assert_eq!(store.unfinished().await.unwrap().len(), 3);
    assert!(
        !store
            .counts(Some(std::slice::from_ref(queue)))
            .await
            .unwrap()
            .is_empty()
    );
    store
        .open_shards(&[
            shard.clone(),
            ShardId {
                number: 3,
                ..shard.clone()
            },
        ])
        .await
        .unwrap();
    assert!(store.close_shard(&shard, 1).await.unwrap());
    assert_eq!(store.shards(Some(1)).await.unwrap().len(), 3);
}
