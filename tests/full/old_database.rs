//! A database that an old taskd wrote goes on, also when each start before was killed between two
//! migrations.

use std::{collections::BTreeSet, path::Path};

use sqlx::{Connection, SqliteConnection, migrate::Migrator, sqlite::SqliteConnectOptions};

use crate::support::{
    daemon::{Daemon, once},
    store_contract::migrations,
};

const WRITTEN: &str = include_str!("../fixtures/schema-2.sql");
const CONFIG: &str = "reconcile_every = \"100ms\"\nrepublish_after = \"200ms\"\n";

/// The old database, with the migrations up to `schema`: each is one transaction, so a start is
/// killed between two.
async fn leave(file: &Path, schema: i64) {
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true);
    let mut old = SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::raw_sql(WRITTEN).execute(&mut old).await.unwrap();
    let migrator = Migrator::new(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/migrations/sqlite"
    )))
    .await
    .unwrap();
    migrator
        .run_direct(Some(schema), &mut old, false)
        .await
        .unwrap();
    old.close().await.unwrap();
}

fn set(keys: &[&str]) -> BTreeSet<String> {
    keys.iter().map(ToString::to_string).collect()
}

/// Every task of it is where it was, and goes to its end.
async fn goes_on(daemon: &Daemon, schema: i64) {
    let done = daemon.queue("done").await;
    assert_eq!(
        (&done["completed"], &done["dead"]),
        (&2.into(), &1.into()),
        "from schema {schema}: {done}"
    );
    assert_eq!(
        once(daemon.drain("w1", "open").await),
        set(&["a", "b", "c", "d"]),
        "from schema {schema}"
    );
    assert_eq!(
        once(daemon.drain("w1", "parked").await),
        set(&["p1", "p2", "p3", "p4", "p5"]),
        "from schema {schema}"
    );
    // The first worker has done x already.
    assert_eq!(
        once(daemon.work("w1", "pair", 1).await),
        set(&["y"]),
        "from schema {schema}"
    );
    assert_eq!(
        once(daemon.drain("w2", "pair").await),
        set(&["x", "y"]),
        "from schema {schema}"
    );
    let later = daemon.queue("later").await;
    assert_eq!(
        (&later["pending"], &later["completed"]),
        (&1.into(), &0.into()),
        "from schema {schema}: {later}"
    );
}

#[tokio::test]
async fn a_database_of_schema_2_goes_on_from_each_step_of_its_migration() {
    let newest = i64::try_from(migrations("sqlite")).unwrap();
    for schema in 2..=newest {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("taskd.db");
        leave(&file, schema).await;
        let url = format!("sqlite://{}", file.display());
        let mut daemon = Daemon::begin(CONFIG, &["--database-url", &url]);
        // Wherever in its start it is.
        daemon.kill9_and_restart();
        daemon.ready().await;
        goes_on(&daemon, schema).await;
        assert!(daemon.stop().await.success());
    }
}
