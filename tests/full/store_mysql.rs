//! The store's contract on a MySQL or MariaDB server, and what only a server can do.

use futures::future::join_all;
use taskd::{model::StoredStatus::Completed, store::mysql::MysqlStore};

use crate::support::{
    mariadb::MysqlDatabase,
    store_contract::{Database, completed, count, counts, insert_new, rows},
};

store_contract!(MysqlDatabase);

#[tokio::test]
async fn a_call_survives_the_loss_of_all_connections() {
    let database = MysqlDatabase::create().await;
    let store = database.open().await;
    let batch = rows("q", 10);
    insert_new(&*store, &batch[..5]).await;
    database.kill_connections().await;
    insert_new(&*store, &batch).await;
    store.settle(batch.iter().map(|row| completed(row, "w")).collect()).await.unwrap();
    assert_eq!(counts(&*store).await, [count("q", Completed, 10)]);
    database.remove().await;
}

#[tokio::test]
async fn migrations_are_applied_once() {
    let database = MysqlDatabase::create().await;
    let url = database.url();
    // All at once, as when many processes start.
    let stores = join_all((0..4).map(|_| MysqlStore::connect(&url))).await;
    let migrated: Vec<usize> = stores.into_iter().map(|store| store.unwrap().migrated()).collect();
    assert!(migrated.contains(&1), "{migrated:?}");
    assert_eq!(MysqlStore::connect(&url).await.unwrap().migrated(), 0);
    database.remove().await;
}
