use std::{collections::HashSet, time::Duration};

use super::*;
use crate::{
    config::Settings,
    model::{
        Act, DeadLetter, Encoding, ExecutionId, ExecutionPages, ExecutionStatus, KeyHash,
        LeaseNumber, LetterCursor, LetterFilter, LetterKind, LetterPages, NewTask, Offset,
        QueueName, RowTree, ShardId, StoredStatus, TaskFilter, TaskId, TaskStatus, TreeSettings,
        WorkerName, WorkflowVersion, validate,
    },
    store::{
        Append, Deleted, Executions as _, Happening, NewExecution, NewRow, Operators as _,
        Outbox as _, Published, Rebuilt, Settlement, StartedExecution, StoredDefinition, Stretch,
        TaskSearch, Tasks as _, Turn, TurnedAway, Unpublished, Walked,
    },
};

fn row(key: &str) -> NewRow {
    let task = NewTask {
        queue: "q".into(),
        key: key.as_bytes().to_vec().into(),
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

fn completed(id: TaskId, discovered: Vec<NewRow>) -> Settlement {
    Settlement::Completed {
        id,
        worker: "w".into(),
        lease: LeaseNumber {
            generation: 1,
            grant: 1,
        },
        result: "r".into(),
        encoding: Encoding::Text,
        attempt: 1,
        leased_unix_ms: 0,
        at_unix_ms: 1,
        discovered,
        joining: None,
    }
}

/// The budget of a task of NUM = 1: statements, rows and waits for the disk, from the insert to the
/// result.
#[tokio::test]
async fn a_batch_costs_so_many_statements_and_rows_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    // Statements of insert, mark and settle. Rows in all: of a task, of its result, its change; and
    // of the batch the batch, its keys, its mark and the counts.
    for (tasks, statements) in [
        (1, [4, 1, 5]),
        (10, [7, 1, 8]),
        (100, [7, 1, 8]),
        (1000, [16, 1, 20]),
    ] {
        let rows: Vec<NewRow> = (0..tasks).map(|n| row(&format!("{tasks} {n}"))).collect();
        store.asked();
        let batch = store.insert(&rows).await.unwrap().batch;
        let insert = store.asked();
        let published = rows.iter().map(|row| (row.task.id, batch)).collect();
        let published = [Published {
            partition: 0,
            offset: Offset::default(),
            tasks: published,
        }];
        store.mark_published("g", &published).await.unwrap();
        let mark = store.asked();
        let reports: Vec<Settlement> = rows
            .iter()
            .map(|row| completed(row.task.id, vec![]))
            .collect();
        let settled = store.settle(&reports).await.unwrap();
        assert!(settled.answers.iter().all(|settled| !settled.repeated));
        let settle = store.asked();

        let all = [insert, mark, settle];
        assert_eq!(all.map(|asked| asked.commits), [1; 3], "{tasks}: {all:?}");
        let asked = all.map(|asked| asked.statements);
        assert!(
            asked
                .iter()
                .zip(statements)
                .all(|(asked, most)| *asked <= most),
            "{tasks}: {all:?}"
        );
        assert!(
            all.iter().map(|asked| asked.rows).sum::<u64>() <= 3 * tasks + 7,
            "{tasks}: {all:?}"
        );
    }
}

/// The budget of trees: a root costs its tree and its place in it, a result the tree's lock and its
/// count. A task in no tree costs neither, also beside one that is in a tree.
#[tokio::test]
async fn a_tree_costs_two_statements_at_each_of_its_changes() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let mut costs = Vec::new();
    for kinds in [[false, false], [true, true], [true, false]] {
        let mut rows = Vec::new();
        for (n, in_tree) in kinds.into_iter().enumerate() {
            let mut row = row(&format!("{kinds:?} {n}"));
            let root = RowTree::Root(TreeSettings::default());
            row.task.tree = in_tree.then(|| Box::new(root));
            rows.push(row);
        }
        store.asked();
        store.insert(&rows).await.unwrap();
        let insert = store.asked();
        let reports: Vec<Settlement> = rows
            .iter()
            .map(|row| completed(row.task.id, vec![]))
            .collect();
        let settled = store.settle(&reports).await.unwrap();
        assert!(settled.answers.iter().all(|settled| !settled.repeated));
        costs.push([insert, store.asked()]);
    }
    let more = |of: usize| {
        let plain = &costs[0];
        let cost = &costs[of];
        [0, 1].map(|at| {
            (
                cost[at].statements - plain[at].statements,
                cost[at].rows - plain[at].rows,
            )
        })
    };
    // Rows: each tree has one and its root has one in the list of tasks; a result writes the tree's.
    assert_eq!(
        more(1)[0],
        (2 * 2, 2 * 2),
        "a piece of two is two pieces: {costs:?}"
    );
    assert_eq!(more(2)[0].1, 2, "{costs:?}");
    assert_eq!(
        more(2)[1],
        (2, 1),
        "one tree to lock and to write: {costs:?}"
    );
}

fn execution() -> NewExecution {
    NewExecution {
        id: ExecutionId::new(),
        given: Some("given".into()),
        workflow: WorkflowVersion {
            namespace: "shop".into(),
            name: "order".into(),
            version: "1.0.0".into(),
        },
        hash: "hash".into(),
        input: "{}".into(),
        traceparent: String::new(),
        created_unix_ms: 1,
    }
}

/// Starts an execution of a definition.
async fn start(store: &SqliteStore) -> ExecutionId {
    let execution = execution();
    let definition = StoredDefinition {
        workflow: execution.workflow.clone(),
        hash: execution.hash.clone(),
        text: String::new(),
        documents: String::new(),
        deployed_by: String::new(),
        deployed_unix_ms: 1,
    };
    let act = Act::new("ops", "deploy workflow", "shop/order/1.0.0");
    store.keep_definition(&definition, &act).await.unwrap();
    let started = store.start_execution(&execution).await.unwrap();
    assert_eq!(started, StartedExecution::New);
    execution.id
}

fn append(execution: ExecutionId, seq: u64, steps: Vec<NewRow>) -> Append {
    Append {
        execution,
        seq,
        entries: vec!["entry".into(); 4],
        armed: vec![],
        disarmed: vec![],
        steps,
        cancelled: vec![],
        consumed: vec![Happening::Start],
        goes_on: false,
        status: ExecutionStatus::Waiting,
        summary: None,
        at_unix_ms: 1,
    }
}

/// The task of a step.
fn step(execution: ExecutionId, path: &str) -> NewRow {
    let mut row = row(path);
    row.task.id = TaskId::derived_from(&[execution.as_bytes(), path.as_bytes()], 1);
    row.task.key_hash = KeyHash::without_key(row.task.id);
    row
}

/// The budget of executions: the end of a step costs its row in the inbox, and nothing where no step
/// ends. An append costs what its parts cost.
#[tokio::test]
async fn a_step_costs_a_statement_when_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let id = start(&store).await;
    let step = step(id, "step");
    store.asked();
    store
        .append(&[append(id, 0, vec![step.clone()])])
        .await
        .unwrap();
    let of_append = store.asked();
    // The execution is locked and written; entries; the task, its batch and the counts; the inbox.
    assert_eq!((of_append.commits, of_append.statements), (1, 7));
    let plain = row("plain");
    store.insert(std::slice::from_ref(&plain)).await.unwrap();
    store.asked();
    let mut costs = Vec::new();
    for row in [&plain, &step] {
        store
            .settle(&[completed(row.task.id, vec![])])
            .await
            .unwrap();
        costs.push(store.asked());
    }
    let [of_plain, of_step] = costs[..] else {
        unreachable!("there are two");
    };
    assert_eq!(of_step.statements - of_plain.statements, 1);
    assert_eq!(of_step.rows - of_plain.rows, 1);
}

/// SQLite syncs its log at each commit: an insert or a result that taskd has confirmed survives a
/// loss of power.
#[tokio::test]
async fn a_commit_waits_for_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let pragmas = Work::new((), |connection: &mut Connection, (): &()| {
        let synchronous = connection
            .db
            .query_row("PRAGMA synchronous", (), |row| row.get::<_, i64>(0));
        let mode = connection
            .db
            .query_row("PRAGMA journal_mode", (), |row| row.get::<_, String>(0));
        futures::future::ready(Ok((synchronous.unwrap(), mode.unwrap()))).boxed()
    });
    // 2 is FULL.
    assert_eq!(
        store.database().transact(&pragmas).await.unwrap(),
        (2, "wal".to_owned())
    );
}

/// Each statement of a test is checked for scans.
#[tokio::test]
async fn a_place_is_found_without_a_scan() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let row = row("k");
    store.insert(std::slice::from_ref(&row)).await.unwrap();
    assert!(store.place("g", row.task.id).await.unwrap().is_some());
}

/// The cost of idempotency keys: a statement for each piece of a batch, and nothing where there are
/// none (the test above).
#[tokio::test]
async fn idempotency_keys_cost_a_statement_a_piece_and_no_scan() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let with_key = |key: &str| {
        let (queue, idempotency_key) = ("q".into(), format!("of {key}"));
        let task = NewTask {
            queue,
            key: key.to_owned().into(),
            idempotency_key,
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
    };
    let batch = |from: usize| {
        (from..from + 100)
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
    };
    store.asked();
    store
        .insert(&batch(0).iter().map(|key| row(key)).collect::<Vec<_>>())
        .await
        .unwrap();
    let without = store.asked();
    let keyed: Vec<NewRow> = batch(100).iter().map(|key| with_key(key)).collect();
    store.insert(&keyed).await.unwrap();
    assert_eq!(
        store.asked().statements,
        without.statements + 4,
        "a hundred rows are four pieces"
    );
    // Sent again, with new ids; and one that was a duplicate.
    store
        .insert(
            &batch(99)
                .iter()
                .map(|key| with_key(key))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    assert_eq!(store.remove_expired_keys(i64::MAX, 10).await.unwrap(), 10);
}

#[tokio::test]
async fn the_books_are_counted_without_a_scan() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let rows = [row("a"), row("b")];
    store.insert(&rows).await.unwrap();
    let queue = rows[0].task.queue.clone();
    store
        .unpublish(&[rows[0].task.id], Unpublished::Parked)
        .await
        .unwrap();
    let off_bus = [
        ((queue.clone(), Unpublished::Fresh), 1),
        ((queue.clone(), Unpublished::Parked), 1),
    ];
    assert_eq!(store.off_bus().await.unwrap(), off_bus.into());
    let away = [
        ((Some(queue.clone()), TurnedAway::Duplicate), 2),
        ((None, TurnedAway::Rejected), 1),
    ]
    .into();
    store.add_turned_away(&away).await.unwrap();
    assert_eq!(
        store
            .turned_away(std::slice::from_ref(&queue))
            .await
            .unwrap(),
        away
    );
    assert_eq!(store.wrong_counts().await.unwrap(), []);
    store.correct_count(&queue).await.unwrap();
    assert_eq!(store.stranded(None).await.unwrap(), (Vec::new(), None));
}

/// Workers end the tasks of a shard one behind the other: their rows share pages.
#[tokio::test]
async fn the_tasks_of_a_shard_that_came_together_lie_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("taskd.db");
    let store = SqliteStore::open(&path, None).await.unwrap();
    let in_shard = |n: usize| {
        let mut row = row(&n.to_string());
        (row.task.queue, row.task.partition) =
            (QueueName::new(["a", "b"][n % 2]).unwrap(), n as u32 / 2 % 2);
        row
    };
    let rows: Vec<NewRow> = (0..40).map(in_shard).collect();
    store.insert(&rows).await.unwrap();
    let reader = rusqlite::Connection::open(&path).unwrap();
    let mut by_number = reader
        .prepare("SELECT id FROM tasks ORDER BY number")
        .unwrap();
    let stored: Vec<Vec<u8>> = by_number
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    let mut expected: Vec<_> = rows
        .iter()
        .map(|row| (&row.task.queue, row.task.partition, row.task.id))
        .collect();
    expected.sort_unstable();
    assert_eq!(
        stored,
        expected
            .iter()
            .map(|(.., id)| id.0.as_bytes().to_vec())
            .collect::<Vec<_>>()
    );
}

/// The third is removed by hand.
#[tokio::test]
async fn a_task_with_the_number_of_a_removed_one_has_none_of_its_results() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("taskd.db");
    let store = SqliteStore::open(&path, None).await.unwrap();
    let file = rusqlite::Connection::open(&path).unwrap();
    let number = || {
        file.query_one("SELECT MAX(number) FROM tasks", [], |row| {
            row.get::<_, i64>(0)
        })
        .unwrap()
    };
    let mut numbers = Vec::new();
    for key in ["first", "second", "third", "fourth"] {
        let row = row(key);
        store.insert(std::slice::from_ref(&row)).await.unwrap();
        numbers.push(number());
        assert_eq!(store.results(row.task.id).await.unwrap(), []);
        let settled = store
            .settle(&[completed(row.task.id, Vec::new())])
            .await
            .unwrap()
            .answers;
        assert!(!settled[0].repeated && settled[0].status == Some(StoredStatus::Completed));
        assert_eq!(store.results(row.task.id).await.unwrap().len(), 1);
        match key {
            "third" => assert_eq!(file.execute("DELETE FROM tasks", []).unwrap(), 1),
            _ => assert_eq!(
                store
                    .remove_finished(Duration::from_secs(1), 10)
                    .await
                    .unwrap(),
                1
            ),
        }
    }
    assert!(
        numbers.iter().all(|number| *number == numbers[0]),
        "{numbers:?}"
    );
}

/// Transactions that gather behind another one wait for the disk together. One that fails undoes
/// only itself.
#[tokio::test]
async fn transactions_that_wait_together_commit_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("taskd.db");
    let store = SqliteStore::open(&path, None).await.unwrap();
    let refused = "CREATE TRIGGER refused BEFORE INSERT ON tasks WHEN new.task_key = X'2d' \
                   BEGIN SELECT RAISE(FAIL, 'no dash'); END";
    let rival = rusqlite::Connection::open(&path).unwrap();
    rival
        .execute_batch(&format!("{refused}; BEGIN IMMEDIATE"))
        .unwrap();
    store.asked();
    // The first may wait for the rival alone, and the others wait for the first.
    let insert = async |key: String| {
        store
            .insert(&[row(&key), row(&format!("{key}, too"))])
            .await
    };
    let keys = (0..10)
        .map(|n| n.to_string())
        .chain(["-".to_owned()])
        .chain((10..20).map(|n| n.to_string()));
    let commit = async {
        while store.database().writer.queued() < 21 {
            tokio::task::yield_now().await;
        }
        rival.execute_batch("COMMIT").unwrap();
    };
    let (inserted, ()) = futures::join!(futures::future::join_all(keys.map(insert)), commit);
    for (number, stored) in inserted.into_iter().enumerate() {
        assert_eq!(stored.is_ok(), number != 10, "{number}: {:?}", stored.err());
    }
    let asked = store.asked();
    // The transactions before the one that failed ran twice.
    let rows = 20 * (2 + 1 + 1 + 1);
    assert!((rows..=rows + rows / 2).contains(&asked.rows), "{asked:?}");
    assert!(asked.commits <= 2, "{asked:?}");
    assert_eq!(store.unfinished().await.unwrap()[0].1, 40);
}

/// On a full disk SQLite undoes all that commits together. Those that have room are stored all the
/// same.
#[tokio::test]
async fn a_transaction_without_room_takes_no_other_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("taskd.db");
    let store = SqliteStore::open(&path, Some(400)).await.unwrap();
    let rival = rusqlite::Connection::open(&path).unwrap();
    rival.execute_batch("BEGIN IMMEDIATE").unwrap();
    let large = |key: &str| {
        let mut row = row(key);
        row.task.payload = vec![0; 4000].into();
        row
    };
    let insert = async |number: usize| match number {
        5 => {
            store
                .insert(
                    &(0..1000)
                        .map(|n| large(&format!("large {n}")))
                        .collect::<Vec<_>>(),
                )
                .await
        }
        _ => store.insert(&[row(&number.to_string())]).await,
    };
    let commit = async {
        while store.database().writer.queued() < 10 {
            tokio::task::yield_now().await;
        }
        rival.execute_batch("COMMIT").unwrap();
    };
    let (inserted, ()) = futures::join!(futures::future::join_all((0..10).map(insert)), commit);
    for (number, stored) in inserted.into_iter().enumerate() {
        match number {
            5 => assert!(matches!(stored, Err(Error::Full(_))), "{:?}", stored.err()),
            _ => assert!(stored.is_ok(), "{number}: {:?}", stored.err()),
        }
    }
    assert_eq!(store.unfinished().await.unwrap()[0].1, 9);
    assert_eq!(
        store.database().writer.queued(),
        10,
        "none had to come again"
    );
}

#[tokio::test]
async fn no_statement_scans_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let rows: Vec<NewRow> = (0..30).map(|i| row(&i.to_string())).collect();
    let ids: Vec<TaskId> = rows.iter().map(|row| row.task.id).collect();
    let stored = store.insert(&rows).await.unwrap();
    let other = store.insert(&[row("0"), row("new")]).await.unwrap();
    let published = Published {
        partition: 0,
        offset: Offset::default(),
        tasks: vec![(ids[0], other.batch)],
    };
    store.mark_published("g", &[published]).await.unwrap();
    assert_eq!(store.remove_batches(None, 10).await.unwrap(), None);
    store.due(i64::MAX, 5, &HashSet::new()).await.unwrap();
    let tasks = vec![(ids[29], stored.batch)];
    store
        .mark_published(
            "g",
            &[Published {
                partition: 0,
                offset: Offset::default(),
                tasks,
            }],
        )
        .await
        .unwrap();
    let tasks = ids[..9].iter().map(|id| (*id, Turn::FIRST)).collect();
    let (partition, offset) = (0, Offset { major: 1, minor: 1 });
    store
        .mark_published(
            "g",
            &[Published {
                partition,
                offset,
                tasks,
            }],
        )
        .await
        .unwrap();
    // A late mark, and of one that came back.
    store
        .unpublish(&ids[..2], Unpublished::Parked)
        .await
        .unwrap();
    let tasks = vec![(ids[0], Turn::FIRST), (ids[20], Turn::FIRST)];
    store
        .mark_published(
            "g",
            &[Published {
                partition,
                offset: Offset::default(),
                tasks,
            }],
        )
        .await
        .unwrap();
    let completed = completed(ids[3], vec![row("1"), row("child")]);
    let (reason, history) = ("no luck".to_owned(), Vec::new());
    let died = Settlement::Died {
        id: ids[4],
        reason,
        attempts: 1,
        history,
        epoch: Some(0),
        at_unix_ms: 1,
    };
    store
        .settle(&[completed.clone(), completed, died])
        .await
        .unwrap();
    letters(&store, &rows[0].task.queue, ids[4]).await;
    let without: HashSet<TaskId> = [ids[10]].into();
    store.due(i64::MAX, 5, &without).await.unwrap();
    let queue = &rows[0].task.queue;
    assert_eq!(store.parked(queue, 5, &without).await.unwrap().len(), 2);
    assert_eq!(store.parked_queues().await.unwrap().len(), 1);
    store.states(&ids).await.unwrap();
    store.unfinished_among(&ids).await.unwrap();
    store
        .states_for(&WorkerName::new("w").unwrap(), &ids)
        .await
        .unwrap();
    let walked = Walked {
        queue: queue.clone(),
        id: ids[5],
    };
    let behind = Stretch {
        after: Some(&walked),
        ..Stretch::ALL
    };
    assert!(!store.on_bus(behind, 10).await.unwrap().tasks.is_empty());
    assert!(!store.published_among("g", &ids).await.unwrap().is_empty());
    let shard = ShardId {
        queue: queue.clone(),
        number: 0,
    };
    store
        .open_shards(std::slice::from_ref(&shard))
        .await
        .unwrap();
    assert_eq!(
        store.begin_rebuild(&[(shard.clone(), 1)]).await.unwrap(),
        [2]
    );
    let rebuilding = store.rebuilding().await.unwrap();
    assert_eq!(
        store
            .rebuild_page(&rebuilding, Some(&walked), 2)
            .await
            .unwrap()
            .tasks
            .len(),
        2
    );
    let offset = Some(Offset { major: 2, minor: 0 });
    store
        .end_rebuild(
            "g",
            &[Rebuilt {
                shard: shard.clone(),
                generation: 2,
                offset,
            }],
        )
        .await
        .unwrap();
    assert_eq!(
        store.published_among("g", &ids[6..7]).await.unwrap()[0].offset,
        offset
    );
    assert_eq!(store.rows(&ids[..3]).await.unwrap().len(), 3);
    store.bring_forward(-1, 0, None, 100).await.unwrap();
    store.oldest_waiting(i64::MAX).await.unwrap();
    assert_eq!(store.unfinished().await.unwrap().len(), 1);
    store
        .counts(Some(std::slice::from_ref(queue)))
        .await
        .unwrap();
    store.close_shard(&shard, 2).await.unwrap();
    store
        .open_shards(std::slice::from_ref(&shard))
        .await
        .unwrap();
    assert_eq!(store.shards(Some(1)).await.unwrap().len(), 1);
    searches(&store, queue, &rows[0].task.key).await;
    assert!(store.task(ids[3]).await.unwrap().is_some());
    assert_eq!(store.results(ids[3]).await.unwrap().len(), 1);
    assert_eq!(
        store
            .remove_finished(Duration::from_secs(1), 10)
            .await
            .unwrap(),
        2
    );
    store.insert(&[row("3"), row("4")]).await.unwrap();
    store.insert(&[row("3"), row("4")]).await.unwrap();
    executions(&store).await;
}

/// Everything that is done to executions.
async fn executions(store: &SqliteStore) {
    let id = start(store).await;
    let steps = ["a", "b", "c"].map(|path| step(id, path));
    let mut next = append(id, 0, steps.to_vec());
    next.armed = vec![(0, 1), (1, 2)];
    next.goes_on = true;
    store.append(&[next]).await.unwrap();
    let reports = steps.clone().map(|step| completed(step.task.id, vec![]));
    store.settle(&reports).await.unwrap();
    let mut next = append(id, 4, vec![]);
    next.disarmed = vec![0];
    next.cancelled = vec![steps[0].task.id];
    next.consumed = vec![
        Happening::GoOn,
        Happening::StepEnded {
            task: steps[0].task.id,
            status: StoredStatus::Completed,
        },
        Happening::StepEnded {
            task: steps[1].task.id,
            status: StoredStatus::Completed,
        },
    ];
    store.append(&[next]).await.unwrap();
    let day = Duration::from_secs(86_400);
    assert_eq!(store.remove_finished(day, 10).await.unwrap(), 2);
    let inbox = store.inbox(None, &[], 10).await.unwrap().rows;
    assert_eq!(inbox.len(), 1);
    assert_eq!(
        store.inbox(Some(&inbox[0]), &[], 10).await.unwrap().rows,
        []
    );
    let timers = store.due_timers(9, None, 10).await.unwrap();
    assert_eq!(timers.len(), 1);
    store.due_timers(9, Some(&timers[0]), 10).await.unwrap();
    assert_eq!(store.entries(id, 1, 10).await.unwrap().len(), 7);
    assert_eq!(store.executions_by_id(&[id]).await.unwrap().len(), 1);
    let given = store.execution_given("given").await.unwrap();
    assert_eq!(given, Some(id));
    assert!(store.execution(id).await.unwrap().is_some());
    let counts = store.execution_counts().await.unwrap();
    assert_eq!((counts.open, counts.timers), (1, 1));
    assert_eq!(store.open_executions(None, 10).await.unwrap().len(), 1);
    store.wake_executions(&[id]).await.unwrap();
    let act = Act::new("ops", "cancel execution", &id.to_string());
    store.cancel_execution(id, &act).await.unwrap();
    let workflow = execution().workflow;
    let names = Some((workflow.namespace.clone(), workflow.name.clone()));
    for workflow in [None, names] {
        for status in [None, Some(ExecutionStatus::Waiting)] {
            let pages = ExecutionPages {
                workflow: workflow.clone(),
                status,
                limit: 10,
                ..ExecutionPages::default()
            };
            assert_eq!(store.executions(&pages).await.unwrap().len(), 1);
        }
    }
    let deleted = store.delete_definition(&workflow, &act).await.unwrap();
    assert_eq!(deleted, Deleted::Running);
    let mut last = append(id, 8, vec![]);
    last.status = ExecutionStatus::Completed;
    last.summary = Some("{}".into());
    store.append(&[last]).await.unwrap();
    assert_eq!(store.remove_ended_executions(day, 10).await.unwrap(), 1);
    let deleted = store.delete_execution(id, &act).await.unwrap();
    assert_eq!(deleted, Deleted::Yes, "its act is recorded");
}

/// A list of tasks by each index.
async fn searches(store: &SqliteStore, queue: &QueueName, key: &bytes::Bytes) {
    let q = TaskFilter {
        queue: Some(queue.clone()),
        ..Default::default()
    };
    let filters = [
        TaskFilter::default(),
        q.clone(),
        TaskFilter {
            statuses: vec![TaskStatus::Queued, TaskStatus::Dead],
            ..q.clone()
        },
        TaskFilter {
            key: Some(key.clone()),
            ..q.clone()
        },
        TaskFilter {
            worker: WorkerName::new("w").ok(),
            headers: vec![("h".into(), "v".into())],
            ..q
        },
    ];
    for filter in filters {
        store
            .search(&TaskSearch {
                filter,
                limit: 2,
                look_at: 10,
                after: None,
                stays_in_queue: false,
            })
            .await
            .unwrap();
    }
}

/// Every statement about letters, where `dead` is a dead task. It is dead again in the end.
async fn letters(store: &SqliteStore, queue: &QueueName, dead: TaskId) {
    let record = DeadLetter {
        topic: "pipeline".into(),
        at_unix_ms: 1,
        ..Default::default()
    };
    store
        .keep_letters(std::slice::from_ref(&record))
        .await
        .unwrap();
    let after = Some(LetterCursor {
        at_unix_ms: i64::MAX,
        id: dead,
    });
    for (queue, kind, found) in [
        (None, None, 2),
        (Some(queue), None, 1),
        (None, Some(LetterKind::Record), 1),
    ] {
        for after in [None, after] {
            let filter = LetterFilter {
                queue: queue.cloned(),
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
            assert_eq!(page.letters.len(), found);
        }
    }
    let filter = LetterFilter {
        queue: Some(queue.clone()),
        kind: Some(LetterKind::Task),
        ..Default::default()
    };
    let page = store
        .letters(&LetterPages {
            filter,
            limit: 1,
            after: None,
        })
        .await
        .unwrap();
    assert_eq!(page.next.map(|next| next.id), Some(dead));
    assert!(
        store.letter(dead).await.unwrap().is_some()
            && store.letter(record.id()).await.unwrap().is_some()
    );
    assert_eq!(
        store
            .letter_kinds(&[dead, record.id()])
            .await
            .unwrap()
            .len(),
        2
    );
    assert_eq!(
        store
            .retry_with_acts(&[dead], 1, "ops", "retry")
            .await
            .unwrap()
            .len(),
        1
    );
    let (reason, history) = ("again".to_owned(), Vec::new());
    let died = Settlement::Died {
        id: dead,
        reason,
        attempts: 1,
        history,
        epoch: Some(1),
        at_unix_ms: 1,
    };
    store.settle(&[died]).await.unwrap();
    assert_eq!(
        store
            .remove_old_letters(Duration::from_secs(1), 5)
            .await
            .unwrap(),
        1
    );
    assert_eq!(store.purge(&[record.id()]).await.unwrap(), 0);
}

#[tokio::test]
async fn names_of_queues_are_listed_by_their_beginning_up_to_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let names = ["a", "a-z", "a.1", "a_", "ab", "b", "z9", "zz"];
    let of_queue = |name: &&str| {
        let mut row = row(name);
        row.task.queue = QueueName::new(name).unwrap();
        row
    };
    let rows: Vec<NewRow> = names.iter().map(of_queue).collect();
    store.insert(&rows).await.unwrap();
    let listed = async |beginning: &'static str, limit: u32| -> Vec<String> {
        let names = store.queue_names(beginning, limit).await.unwrap();
        names.iter().map(ToString::to_string).collect()
    };
    assert_eq!(listed("", 100).await, names);
    assert_eq!(listed("", 3).await, names[..3]);
    assert_eq!(listed("a", 100).await, names[..5]);
    assert_eq!(listed("a.", 100).await, ["a.1"]);
    assert_eq!(listed("z", 100).await, ["z9", "zz"]);
    assert!(listed("nothing", 100).await.is_empty());
}
