//! The store's contract on SQLite, and what only SQLite can do.

use std::{
    fs::Permissions,
    os::unix::fs::{PermissionsExt as _, symlink},
    process::Command,
};

use futures::future::join_all;
use taskd::{
    model::StoredStatus::{Completed, Unfinished},
    store::{Error, Store, Tasks, sqlite::SqliteStore},
};

use crate::support::{
    sqlite::SqliteFile,
    store_contract::{
        Database, completed, count, counts, detail, detail_completed, detail_of, insert_new,
        migrations, rows,
    },
    until,
};

store_contract!(SqliteFile);

#[tokio::test]
async fn a_full_database_says_so_and_goes_on_when_there_is_room() {
    let file = SqliteFile::create().await;
    let store = SqliteStore::open(&file.path(), Some(100)).await.unwrap();
    let (stored, mut refused) = (rows("q", 10), rows("refused", 100));
    insert_new(&store, &stored).await;
    for row in &mut refused {
        row.task.payload = vec![1; 10_000].into();
    }

    let mut huge = rows("huge", 1);
    huge[0].task.payload = vec![1; 1 << 20].into();

    // In a statement of many rows, and in one of a single row. Either makes SQLite end the
    // transaction by itself.
    for batch in [&refused, &huge, &refused, &huge] {
        let error = store.insert(batch).await.unwrap_err();
        assert!(matches!(error, Error::Full(_)), "{error:?}");
        assert!(error.is_transient());
    }
    assert_eq!(
        counts(&store).await,
        [count("q", Unfinished, 10)],
        "nothing of it was stored"
    );

    // There is room for small things still, and for everything once the limit is gone.
    store.settle(&[completed(&stored[0], "w")]).await.unwrap();
    store.close().await;
    let store = file.open().await;
    insert_new(&*store, &refused).await;
    assert_eq!(
        detail_of(&*store, &stored[0]).await,
        detail_completed(&stored[0])
    );
    assert_eq!(detail_of(&*store, &refused[99]).await, detail(&refused[99]));
    let expected = [
        count("q", Unfinished, 9),
        count("q", Completed, 1),
        count("refused", Unfinished, 100),
    ];
    assert_eq!(counts(&*store).await, expected);
}

/// The writer would copy the log when it has thousands of pages. These are some hundreds.
#[tokio::test]
async fn the_log_is_copied_into_the_file_while_it_is_short() {
    let file = SqliteFile::create().await;
    let store = file.open().await;
    let of_file = || file.path().metadata().unwrap().len();
    let before = of_file();
    insert_new(&*store, &rows("q", 1000)).await;
    until("a checkpoint", async || of_file() > before).await;
    store.close().await;
}

#[tokio::test]
async fn the_lock_of_migrations_follows_no_link() {
    let file = SqliteFile::create().await;
    let folder = file.path().parent().unwrap().to_owned();
    let (of_another, lock) = (folder.join("of another"), folder.join("taskd.db-migration"));
    std::fs::write(&of_another, "").unwrap();
    std::fs::set_permissions(&of_another, Permissions::from_mode(0o400)).unwrap();
    symlink(&of_another, &lock).unwrap();
    let refused = SqliteStore::open(&file.path(), None)
        .await
        .map(drop)
        .unwrap_err();
    assert!(refused.to_string().contains("cannot lock"), "{refused}");
    // Another name of the file is no link, and keeps its mode.
    std::fs::remove_file(&lock).unwrap();
    std::fs::set_permissions(&of_another, Permissions::from_mode(0o600)).unwrap();
    std::fs::hard_link(&of_another, &lock).unwrap();
    SqliteStore::open(&file.path(), None).await.unwrap();
    assert_eq!(
        of_another.metadata().unwrap().permissions().mode() & 0o777,
        0o600
    );
}

#[tokio::test]
async fn migrations_are_applied_once() {
    let file = SqliteFile::create().await;
    let path = file.path();
    // All at once, as when a command meets the first start of a taskd.
    let stores = join_all((0..4).map(|_| SqliteStore::open(&path, None))).await;
    let mut migrated: Vec<usize> = stores
        .into_iter()
        .map(|store| store.unwrap().migrated())
        .collect();
    migrated.sort_unstable();
    assert_eq!(migrated, [0, 0, 0, migrations("sqlite")]);
    assert_eq!(SqliteStore::open(&path, None).await.unwrap().migrated(), 0);
}

#[tokio::test]
async fn a_taskd_that_is_too_old_for_the_database_says_so_in_one_line() {
    let file = SqliteFile::create().await;
    file.open().await.close().await;
    let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES (9000, 'of a newer taskd', TRUE, X'00', 0)";
    file.execute(newer).await;
    let migrate = || {
        let url = format!("sqlite://{}", file.path().display());
        let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
            .args(["migrate", "--database-url", &url])
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, said) = migrate();
    assert_eq!(code, Some(0), "{said}");
    file.execute("UPDATE meta SET value = '9000' WHERE name = 'lowest_schema'")
        .await;
    let (code, said) = migrate();
    assert_eq!(code, Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains(
            "the database has schema 9000, which needs a taskd that knows schema 9000 or later"
        ),
        "{said}"
    );
}
