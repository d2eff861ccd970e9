use std::{collections::HashMap, path::Path, sync::Arc, time::Duration};

use futures::{FutureExt as _, future::ready};
use proptest::{
    prelude::{Just, Strategy, any},
    prop_oneof,
    test_runner::{Config, TestRunner},
};

use super::{
    super::{Backend as _, Connection, Work},
    Keys, Known as Filter,
};
use crate::{
    config::Settings,
    model::{Encoding, KeyHash, LeaseNumber, NewTask, StoredStatus, TaskId, validate},
    store::{
        Inserted, NewRow, Settlement, Store as _, Tasks as _, Unpublished, sqlite::SqliteStore,
    },
};

/// Keys in memory before they move.
const MOST: usize = 50;

fn row(key: u32) -> NewRow {
    let task = NewTask {
        queue: "q".into(),
        key: key.to_string().into(),
        ..Default::default()
    };
    let task = validate::task_row(
        task,
        TaskId::new(),
        &Settings::default().task_rules("q"),
        1,
        1,
    )
    .unwrap();
    NewRow {
        task,
        unpublished: Unpublished::Fresh,
        due_unix_ms: 0,
    }
}

/// The tasks by key, each with the status that the store must tell.
type Known = HashMap<u32, (TaskId, StoredStatus)>;

async fn open(path: &Path) -> SqliteStore {
    SqliteStore::open_with(path, None, MOST).await.unwrap()
}

/// Inserts tasks with these keys, and checks each answer.
async fn insert(store: &SqliteStore, keys: impl Iterator<Item = u32>, known: &mut Known) {
    let (keys, rows): (Vec<u32>, Vec<NewRow>) = keys.map(|key| (key, row(key))).unzip();
    let answers = store.insert(&rows).await.unwrap().answers;
    for ((key, row), answer) in keys.into_iter().zip(&rows).zip(answers) {
        match known.get(&key) {
            Some(&(id, status)) => assert_eq!(answer, Inserted::Duplicate { id, status }, "{key}"),
            None => {
                assert_eq!(answer, Inserted::New, "{key}");
                known.insert(key, (row.task.id, StoredStatus::Unfinished));
            }
        }
    }
}

async fn complete(store: &SqliteStore, key: u32, known: &mut Known) {
    let task = known.get_mut(&key).expect("a known key");
    let report = Settlement::Completed {
        id: task.0,
        worker: "w".into(),
        lease: LeaseNumber {
            generation: 1,
            grant: 1,
        },
        result: "".into(),
        encoding: Encoding::Text,
        attempt: 1,
        leased_unix_ms: 0,
        at_unix_ms: 1,
        discovered: vec![],
        joining: None,
    };
    store.settle(&[report]).await.unwrap();
    task.1 = StoredStatus::Completed;
}

/// Copies the file and its log as a kill would leave them now.
fn copy(file: &Path, to: &Path) {
    for end in ["", "-wal"] {
        let name = |path: &Path| format!("{}{end}", path.display());
        std::fs::copy(name(file), name(to)).unwrap();
    }
}

async fn number(store: &SqliteStore, select: &'static str) -> i64 {
    let count = move |connection: &super::super::Connection| {
        connection.db.query_row(select, (), |row| row.get(0))
    };
    store.database().readers.run(count).await.unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    /// As many tasks, from the key of this number on, of those that are there and one more.
    Insert(u32, u32),
    Complete(u32),
    RemoveFinished,
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (any::<u32>(), 1..30u32).prop_map(|(from, count)| Step::Insert(from, count)),
        4 => any::<u32>().prop_map(Step::Complete),
        2 => Just(Step::RemoveFinished),
        1 => Just(Step::Kill),
    ]
}

/// Tasks come, some again, are completed and removed, and taskd is killed at any time. No key is
/// ever new twice.
async fn live(steps: Vec<Step>) {
    let (dir, mut known) = (tempfile::tempdir().unwrap(), Known::new());
    let mut file = dir.path().join("first.db");
    let mut store = open(&file).await;
    for (at, step) in steps.into_iter().enumerate() {
        let count = known.len() as u32;
        match step {
            Step::Insert(from, many) => {
                let from = from % (count + 1);
                insert(&store, from..from + many, &mut known).await;
            }
            Step::Complete(key) if count > 0 => complete(&store, key % count, &mut known).await,
            Step::Complete(_) => {}
            Step::RemoveFinished => drop(store.remove_finished(Duration::ZERO, 100).await.unwrap()),
            Step::Kill => {
                let killed = dir.path().join(format!("{at}.db"));
                copy(&file, &killed);
                (store, file) = (open(&killed).await, killed);
            }
        }
    }
    let keys: Vec<_> = known.keys().map(|key| row(*key).task.key_hash).collect();
    let owners = store.key_owners(&keys).await.unwrap();
    let owners: HashMap<_, _> = owners
        .into_iter()
        .map(|(hash, id, status)| (hash, (id, status)))
        .collect();
    assert_eq!(
        owners,
        known
            .iter()
            .map(|(key, owner)| (row(*key).task.key_hash, *owner))
            .collect()
    );
    // Without kills the moves come to their ends.
    for at in 0..50 {
        let from = known.len() as u32;
        insert(&store, from..from + 1 + at, &mut known).await;
    }
    let (seen, all) = (
        number(&store, "SELECT COUNT(*) FROM seen").await,
        known.len() as i64,
    );
    let latest = number(
        &store,
        "SELECT COALESCE(SUM(LENGTH(keys)), 0) / 48 FROM new_keys",
    )
    .await;
    assert!(
        seen + 4 * MOST as i64 >= all && latest <= 6 * MOST as i64,
        "{all} keys: {seen} moved, {latest} did not"
    );
}

#[test]
fn a_key_stays_known_wherever_it_is_and_whenever_taskd_is_killed() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut runner = TestRunner::new(Config {
        cases: 24,
        ..Config::default()
    });
    let lives = proptest::collection::vec(step(), 100..200);
    let run = |steps| {
        runtime.block_on(live(steps));
        Ok(())
    };
    runner.run(&lives, run).unwrap();
}

#[tokio::test]
async fn processes_that_share_a_file_know_the_keys_of_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let (file, mut known) = (dir.path().join("taskd.db"), Known::new());
    let stores = [open(&file).await, open(&file).await];
    for turn in 0..60 {
        for store in &stores {
            // Each second one has been inserted by the other.
            insert(store, turn * 10..turn * 10 + 15, &mut known).await;
        }
        let keys = [row(turn * 10 + 14).task.key_hash];
        for store in &stores {
            let id = known[&(turn * 10 + 14)].0;
            assert_eq!(
                store.key_owners(&keys).await.unwrap(),
                [(keys[0], id, StoredStatus::Unfinished)]
            );
        }
    }
    insert(&stores[0], 0..600, &mut known).await;
    insert(&stores[1], 0..600, &mut known).await;
}

#[tokio::test]
async fn a_key_without_a_task_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let (file, mut known) = (dir.path().join("taskd.db"), Known::new());
    let store = open(&file).await;
    for moved in [false, true] {
        insert(&store, 0..1, &mut known).await;
        if moved {
            insert(&store, 1..20 * MOST as u32, &mut known).await;
        }
        let rival = rusqlite::Connection::open(&file).unwrap();
        rival
            .execute(
                "DELETE FROM tasks WHERE id = ?",
                [&known[&0].0.as_bytes()[..]],
            )
            .unwrap();
        known.remove(&0);
        assert_eq!(store.key_owners(&[row(0).task.key_hash]).await.unwrap(), []);
    }
    insert(&store, 0..1, &mut known).await;
    insert(&store, 30 * MOST as u32..50 * MOST as u32, &mut known).await;
    insert(&store, 0..2, &mut known).await;
}

/// Each life is too short to move the keys of those before it.
#[tokio::test]
async fn short_lives_do_not_leave_ever_more_keys_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (file, mut known) = (dir.path().join("taskd.db"), Known::new());
    for life in 0..20 {
        let store = open(&file).await;
        for key in 0..10 {
            insert(&store, life * 10 + key..life * 10 + key + 1, &mut known).await;
        }
        let latest = number(&store, "SELECT SUM(LENGTH(keys)) / 48 FROM new_keys").await;
        assert!(latest <= 2 * MOST as i64, "{life}: {latest}");
        store.close().await;
    }
    insert(&open(&file).await, 0..200, &mut known).await;
}

#[test]
fn the_row_of_an_undone_transaction_is_not_the_last_one() {
    let db = rusqlite::Connection::open_in_memory().unwrap();
    db.execute_batch(
        "CREATE TABLE new_keys (seq INTEGER NOT NULL PRIMARY KEY, keys BLOB NOT NULL)",
    )
    .unwrap();
    let latest = Arc::default();
    let mut keys = Keys::new(&latest, Filter::default(), MOST);
    let pair = |key| (row(key).task.key_hash, TaskId::new());
    keys.begin(&db).unwrap();
    db.execute_batch("BEGIN").unwrap();
    keys.take(&db, &[pair(1)]).unwrap();
    let place = keys.taken();
    db.execute_batch("SAVEPOINT second").unwrap();
    keys.take(&db, &[pair(2)]).unwrap();
    keys.give_back(place);
    db.execute_batch("ROLLBACK TO second; COMMIT").unwrap();
    keys.committed();
    let last = latest.read().last_row;
    assert_eq!(
        last,
        db.query_row("SELECT MAX(seq) FROM new_keys", (), |row| row
            .get::<_, i64>(0))
            .unwrap()
    );
    let recent = keys.recent(&[pair(1).0, pair(2).0]);
    assert_eq!((recent.owners.len(), recent.others.len()), (1, 1));
}

/// Of a thousand new keys, the filter takes three for keys of earlier tasks. Only `seen` knows.
#[tokio::test]
async fn a_new_key_is_new_also_if_the_filter_takes_it_for_an_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir.path().join("taskd.db")).await;
    let hashes: Vec<KeyHash> = (0..20).map(|key| row(key).task.key_hash).collect();
    let hit = Work::new(
        hashes,
        |connection: &mut Connection, hashes: &Vec<KeyHash>| {
            connection.keys.known.add(hashes[..10].iter());
            let doubtful = connection.keys.recent(hashes).others;
            ready(Ok(doubtful)).boxed()
        },
    );
    let doubtful = store.database().transact(&hit).await.unwrap();
    assert_eq!(
        doubtful.len(),
        10,
        "the filter has the first ten keys, and no others"
    );
    let mut known = Known::new();
    insert(&store, 0..20, &mut known).await;
    // Each key is known once it has a task.
    insert(&store, 0..20, &mut known).await;
}
