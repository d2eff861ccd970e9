//! The store's contract on a MySQL or MariaDB server, and what only a server can do.

use futures::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use taskd::{
    model::StoredStatus::{Completed, Unfinished},
    store::{Error, Tasks, mysql::MysqlStore},
};

use crate::{
    silent_servers::way_to,
    support::{
        mariadb::MysqlDatabase,
        proxy::Mode,
        store_contract::{Database, completed, count, counts, insert_new, migrations, rows},
        until,
    },
};

store_contract!(MysqlDatabase);

#[tokio::test]
async fn a_call_survives_the_loss_of_all_connections() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let batch = rows("q", 10);
    insert_new(&*store, &batch[..5]).await;
    assert!(database.kill_connections().await > 0);
    insert_new(&*store, &batch).await;
    store
        .settle(
            &batch
                .iter()
                .map(|row| completed(row, "w"))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    assert_eq!(counts(&*store).await, [count("q", Completed, 10)]);
    database.remove().await;
}

/// As after a failover: the connections of the pool stay with the old primary, which is read-only
/// now.
#[tokio::test]
async fn a_call_finds_the_new_primary_by_a_new_connection() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let batch = rows("q", 10);
    join_all(batch[..4].chunks(1).map(|row| insert_new(&*store, row))).await;
    let mut failover = MySqlConnection::connect(&database.url()).await.unwrap();
    let old = "CREATE TABLE old_primary AS SELECT id FROM information_schema.processlist WHERE db = DATABASE()";
    let refuses = "CREATE TRIGGER refuses BEFORE INSERT ON tasks FOR EACH ROW \
                   IF CONNECTION_ID() IN (SELECT id FROM old_primary) THEN \
                   SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'read-only'; END IF";
    for sql in [old, refuses] {
        sqlx::raw_sql(sql).execute(&mut failover).await.unwrap();
    }
    insert_new(&*store, &batch).await;
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 10)]);
    database.remove().await;
}

#[tokio::test]
async fn the_loser_of_a_deadlock_tries_again() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let batch = rows("q", 20);
    insert_new(&*store, &batch).await;
    let [first, last] = [&batch[0], &batch[19]].map(|row| row.task.id.as_bytes().to_vec());

    // A rival with more to lose takes the last row, so that the report of both waits with the first
    // one locked.
    let mut rival = MySqlConnection::connect(&database.url()).await.unwrap();
    let mut rival = rival.begin().await.unwrap();
    let others = "UPDATE tasks SET attempts = attempts + 1 WHERE id > ? AND id <= ?";
    sqlx::query(others)
        .bind(&first)
        .bind(&last)
        .execute(&mut *rival)
        .await
        .unwrap();
    let reports = vec![completed(&batch[0], "w"), completed(&batch[19], "w")];
    let settling = tokio::spawn(async move { (store.settle(&reports).await, store) });
    database.wait_for_lock_wait().await;
    // Now each waits for the other, and the server ends the smaller transaction.
    sqlx::query("UPDATE tasks SET attempts = 0 WHERE id = ?")
        .bind(&first)
        .execute(&mut *rival)
        .await
        .unwrap();
    rival.commit().await.unwrap();

    let (settled, store) = settling.await.unwrap();
    assert!(
        settled
            .unwrap()
            .answers
            .iter()
            .all(|settled| settled.status == Some(Completed))
    );
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 18), count("q", Completed, 2)]
    );
    database.remove().await;
}

/// The server is slow, and many wait for the only connection.
#[tokio::test]
async fn callers_that_get_no_connection_look_for_the_reason_together() {
    let database = MysqlDatabase::create().await;
    let (proxy, url) = way_to(&database).await;
    let store = MysqlStore::connect(url.as_str(), 1).await.unwrap();
    let mut rival = MySqlConnection::connect(&database.url()).await.unwrap();
    sqlx::raw_sql("LOCK TABLES queue_counts WRITE")
        .execute(&mut rival)
        .await
        .unwrap();
    let before = proxy.connections();
    let mut calls: FuturesUnordered<_> = (0..20).map(|_| store.counts(None)).collect();
    for _ in 0..19 {
        let answer = calls.next().await.unwrap();
        assert!(
            matches!(answer, Err(Error::Busy { connections: 1, .. })),
            "{answer:?}"
        );
    }
    rival.close().await.unwrap();
    calls.next().await.unwrap().unwrap();
    // One each second, and the pool's own if it had to be made anew.
    let opened = proxy.connections() - before;
    assert!(opened < 10, "{opened}");
    database.remove().await;
}

#[tokio::test]
async fn migrations_are_applied_once() {
    let database = MysqlDatabase::create().await;
    let url = database.url();
    // All at once, as when many processes start.
    let stores = join_all((0..4).map(|_| MysqlStore::connect(&url, 4))).await;
    let migrated: Vec<usize> = stores
        .into_iter()
        .map(|store| store.unwrap().migrated())
        .collect();
    assert!(migrated.contains(&migrations("mysql")), "{migrated:?}");
    assert_eq!(MysqlStore::connect(&url, 4).await.unwrap().migrated(), 0);
    database.remove().await;
}

/// How many wait for a table that somebody else has locked.
const WAITING: &str = "SELECT COUNT(*) FROM information_schema.processlist \
                       WHERE db = DATABASE() AND state LIKE 'Waiting for table metadata lock%'";

/// As when its host dies: nothing comes from it any more, not even the end of a connection.
#[tokio::test]
async fn a_process_that_falls_silent_while_it_migrates_does_not_keep_the_next_one_from_it() {
    let database = MysqlDatabase::create().await;
    database.open().await.close().await;
    let (proxy, url) = way_to(&database).await;
    let mut rival = MySqlConnection::connect(&database.url()).await.unwrap();
    sqlx::raw_sql("LOCK TABLES _sqlx_migrations WRITE")
        .execute(&mut rival)
        .await
        .unwrap();
    let migrating =
        tokio::spawn(async move { MysqlStore::connect(url.as_str(), 1).await.map(drop) });
    let holder =
        "SELECT CAST(COALESCE(IS_USED_LOCK(CONCAT('taskd.', MD5(DATABASE()))), 0) AS SIGNED)";
    until("it looks for migrations", async || {
        database.number(WAITING).await > 0
    })
    .await;
    assert!(database.number(holder).await > 0);
    let silence = format!(
        "SELECT CAST(COALESCE(MAX(time), 0) AS SIGNED) FROM information_schema.processlist WHERE id = ({holder})"
    );
    let mut longest = 0;
    until(
        "it says something on the connection with the lock",
        async || {
            let silence = database.number(&silence).await;
            longest = longest.max(silence);
            silence < longest
        },
    )
    .await;
    assert!(database.number(holder).await > 0);
    proxy.set(Mode::Stall);
    rival.close().await.unwrap();
    database.open().await.close().await;
    // It has not waited for the server, which ends the connection after ten seconds.
    let error = migrating.await.unwrap().unwrap_err();
    assert!(
        error.is_transient() && error.to_string().contains("timed out"),
        "{error:?}"
    );
    database.remove().await;
}

#[tokio::test]
async fn a_server_that_goes_away_while_a_start_migrates_is_waited_for() {
    let database = MysqlDatabase::create().await;
    database.open().await.close().await;
    // In no database, so that it outlives the others.
    let mut url = url::Url::parse(&database.url()).unwrap();
    let table = format!("{}._sqlx_migrations", &url.path()[1..]);
    url.set_path("");
    let mut rival = MySqlConnection::connect(url.as_str()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("LOCK TABLES {table} WRITE")))
        .execute(&mut rival)
        .await
        .unwrap();
    let url = database.url();
    let migrating = tokio::spawn(async move { MysqlStore::connect(&url, 1).await.map(drop) });
    until("it looks for migrations", async || {
        database.number(WAITING).await > 0
    })
    .await;
    assert!(database.kill_connections().await > 0);
    let error = migrating.await.unwrap().unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    rival.close().await.unwrap();
    database.remove().await;
}
