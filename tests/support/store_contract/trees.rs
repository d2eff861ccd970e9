//! Tests of trees: what counts in them, when they end, and what their ends store.

use std::time::Duration;

use taskd::{
    config::{EventQueues, QueueSettings, Queues},
    model::{
        Act, BulkAction, BulkChange, BulkProgress, BulkState, Change, DeadLetter, EventRecord,
        FeedCounts, FeedRef, KeyHash, NewTask, RowTree, Scope, SecretHash, SubscriptionName,
        TaskCursor, TaskFilter, ThenTask, TreeOnDead, TreePages, TreeSettings, TreeState, TreeView,
        Update,
    },
    store::{
        AddedBulk, Decided, EndedChange, Inserted::TreeClosed, Stored, StoredFeed, TaskSearch,
        TreeCount, Wanted,
    },
    wire,
};
use uuid::Uuid;

use super::*;

/// The root of a tree.
pub(super) fn root(key: &str, settings: TreeSettings) -> NewRow {
    fresh(TaskRow {
        tree: Some(Box::new(RowTree::Root(settings))),
        ..task("q", key)
    })
}

pub(super) fn on_dead(on_dead: TreeOnDead) -> TreeSettings {
    TreeSettings {
        on_dead,
        ..TreeSettings::default()
    }
}

/// Settings with a task at the end, in queue `reports`.
fn with_then() -> TreeSettings {
    TreeSettings {
        then: Some(ThenTask::from(&TaskRow {
            partition: 3,
            ..task("reports", "then")
        })),
        ..TreeSettings::default()
    }
}

/// A task that joins the tree of this root.
fn joining(root: &NewRow, key: &str) -> NewRow {
    fresh(TaskRow {
        tree: Some(Box::new(RowTree::Joins(root.task.id))),
        ..task("q", key)
    })
}

pub(super) async fn tree_of(store: &dyn Store, root: &NewRow) -> TreeView {
    store
        .trees_by_id(&[root.task.id])
        .await
        .unwrap()
        .pop()
        .expect("the tree is there")
}

/// State, epoch, and the tasks in all, open, completed, dead and cancelled.
type Numbers = (TreeState, u32, [u64; 5]);

async fn numbers(store: &dyn Store, root: &NewRow) -> Numbers {
    let tree = tree_of(store, root).await;
    let counts = [
        tree.tasks,
        tree.open,
        tree.completed,
        tree.dead,
        tree.cancelled,
    ];
    (tree.state, tree.epoch, counts)
}

/// The tasks in queue `reports` that wait to be published.
async fn ends(store: &dyn Store) -> Vec<TaskRow> {
    let rows = outbox(store).await.into_iter();
    let mut tasks: Vec<TaskRow> = rows
        .map(|row| row.task)
        .filter(|task| task.queue == queue("reports"))
        .collect();
    tasks.sort_by_key(|task| task.created_unix_ms);
    tasks
}

/// The record of a feed that hears of the end of its tree.
fn of_feed(feed: &str, reference: &str) -> TreeSettings {
    TreeSettings {
        feed: Some(FeedRef {
            feed: SubscriptionName::new(feed).unwrap(),
            reference: reference.to_owned(),
        }),
        ..TreeSettings::default()
    }
}

pub(super) async fn settle(store: &dyn Store, reports: &[Settlement]) -> Stored<Settled> {
    store.settle(reports).await.unwrap()
}

/// Cancels a task, as the queue decides it.
pub(super) async fn cancel(store: &dyn Store, row: &NewRow, at_unix_ms: i64) {
    let shard = ShardId {
        queue: row.task.queue.clone(),
        number: row.task.partition,
    };
    store.open_shards(&[shard]).await.unwrap();
    let wanted = store
        .want(&[row.task.id], &Change::Cancel, at_unix_ms, &[])
        .await
        .unwrap();
    let [Wanted::Kept(kept)] = &wanted[..] else {
        panic!("{wanted:?}");
    };
    let end = EndedChange {
        id: row.task.id,
        turn: Some(kept.turn),
        end: Decided::Cancelled {
            epoch: kept.task.epoch,
            generation: 1,
        },
    };
    store.end_changes(&[end], at_unix_ms).await.unwrap();
}

/// Adds the bulk change that cancels a tree, and marks the tree. The token may have this many.
pub(super) async fn cancel_tree(store: &dyn Store, root: &NewRow, most_of_token: u32) -> AddedBulk {
    let tree = root.task.id;
    let bulk = BulkChange {
        id: Uuid::now_v7(),
        change: BulkAction::Cancel,
        filter: TaskFilter {
            tree: Some(tree),
            ..TaskFilter::default()
        },
        who: "ops".into(),
        scope: Scope::default(),
        token: Some(SecretHash([1; 32])),
        state: BulkState::Running,
        progress: BulkProgress::default(),
        created_unix_ms: NOW,
        updated_unix_ms: NOW,
    };
    let start = Act::at_time(NOW, "ops", "start bulk change", &bulk.id.to_string());
    let mark = Act::at_time(NOW, "ops", "cancel tree", &tree.to_string());
    let added = store.cancel_tree(tree, &bulk, most_of_token, &start, &mark);
    added.await.unwrap()
}

pub(super) async fn send_again(store: &dyn Store, row: &NewRow, at_unix_ms: i64) {
    let retried = store
        .retry_with_acts(&[row.task.id], at_unix_ms, "ops", "retry")
        .await
        .unwrap();
    assert_eq!(retried.len(), 1);
}

pub(crate) async fn a_tree_begins_with_its_root_and_ends_with_its_last_task<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("root", with_then());
    insert_new(&*store, std::slice::from_ref(&first)).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Open, 0, [1, 1, 0, 0, 0])
    );
    // The same insert again, and another task with its key, begin nothing.
    insert_new(&*store, std::slice::from_ref(&first)).await;
    let other = root("root", TreeSettings::default());
    let answers = store.insert(&[other]).await.unwrap().answers;
    assert!(matches!(answers[..], [Duplicate { id, .. }] if id == first.task.id));
    assert_eq!(store.open_trees().await.unwrap(), 1);
    let of_queues = store.open_trees_of(&[queue("q"), queue("other")]).await;
    assert_eq!(of_queues.unwrap(), [(queue("q"), 1)]);

    // What is discovered joins the tree, in whatever queue. A duplicate counts nowhere.
    let found = [row("q", "a"), row("other", "b"), row("q", "root")];
    settle(&*store, &[discovering(&first, "w", found.to_vec())]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Open, 0, [3, 2, 1, 0, 0])
    );
    assert_eq!(
        detail_of(&*store, &found[0]).await.tree,
        Some(first.task.id)
    );
    let found_more = row("q", "c");
    let reports = [
        discovering(&found[0], "w", vec![found_more.clone()]),
        completed(&found[1], "w"),
    ];
    settle(&*store, &reports).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Open, 0, [4, 1, 3, 0, 0])
    );
    assert_eq!(ends(&*store).await, []);

    let stored = settle(&*store, &[completed(&found_more, "w")]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Done, 0, [4, 0, 4, 0, 0])
    );
    let tree = tree_of(&*store, &first).await;
    assert_eq!(tree.ended_unix_ms, Some(NOW + 10));
    // The settlement answers the task of the end, which is in the outbox, too.
    let stored_ends = ends(&*store).await;
    let [then] = &stored_ends[..] else {
        panic!("{stored_ends:?}");
    };
    assert_eq!(stored.released.len(), 1);
    assert_eq!(stored.released[0].task, *then);
    assert_eq!((then.partition, then.has_key()), (3, false));
    let payload: serde_json::Value = serde_json::from_slice(&then.payload).unwrap();
    assert_eq!(payload["tree"], first.task.id.to_string());
    assert_eq!(
        (&payload["state"], &payload["tasks"], &payload["completed"]),
        (&"DONE".into(), &4.into(), &4.into())
    );
    assert_eq!(detail_of(&*store, &fresh(then.clone())).await.tree, None);
    assert_eq!(store.open_trees().await.unwrap(), 0);
    assert_eq!(store.open_trees_of(&[queue("q")]).await.unwrap(), []);
    // All reports again change nothing.
    let again = [
        discovering(&first, "w", found.to_vec()),
        completed(&found_more, "w"),
    ];
    assert_eq!(settle(&*store, &again).await.released, []);
    assert_eq!(ends(&*store).await.len(), 1);
}

pub(crate) async fn a_repeated_or_surplus_report_adds_nothing_to_a_tree<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("root", TreeSettings::default());
    let rest = joining(&first, "rest");
    insert_new(&*store, &[first.clone(), rest.clone()]).await;
    let found = row("q", "found");
    let report = discovering(&first, "w", vec![found.clone()]);
    settle(&*store, std::slice::from_ref(&report)).await;
    settle(&*store, &[report.clone(), report]).await;
    let expected = (TreeState::Open, 0, [3, 2, 1, 0, 0]);
    assert_eq!(numbers(&*store, &first).await, expected);

    // The worker of a lost lease: what it discovered is stored outside of the tree.
    let late = row("q", "late");
    let surplus = discovering(&first, "other", vec![late.clone()]);
    for _ in 0..2 {
        settle(&*store, std::slice::from_ref(&surplus)).await;
        assert_eq!(numbers(&*store, &first).await, expected);
        assert_eq!(tree_of(&*store, &first).await.late, 1);
    }
    assert_eq!(detail_of(&*store, &late).await.tree, None);
    assert_eq!(detail_of(&*store, &late).await.status, Unfinished);
    settle(&*store, &[completed(&found, "w"), completed(&rest, "w")]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Done, 0, [3, 0, 3, 0, 0])
    );
}

pub(crate) async fn every_way_to_end_a_task_ends_its_tree<D: Database>(db: &D) {
    let store = db.open().await;
    let failed = |counts: [u64; 5]| (TreeState::Failed, 0, counts);

    let dead = root("dead", with_then());
    insert_new(&*store, std::slice::from_ref(&dead)).await;
    settle(&*store, &[died(&dead)]).await;
    assert_eq!(numbers(&*store, &dead).await, failed([1, 0, 0, 1, 0]));

    let cancelled = root("cancelled", with_then());
    insert_new(&*store, std::slice::from_ref(&cancelled)).await;
    cancel(&*store, &cancelled, NOW + 30).await;
    assert_eq!(numbers(&*store, &cancelled).await, failed([1, 0, 0, 0, 1]));

    // A lower NUM completes the last task.
    let lowered = fresh(TaskRow {
        replicas: 2,
        ..root("lowered", with_then()).task
    });
    insert_new(&*store, std::slice::from_ref(&lowered)).await;
    settle(&*store, &[completed(&lowered, "w")]).await;
    let num = Change::Update(Update {
        replicas: Some(1),
        priority: None,
    });
    let wanted = store
        .want(&[lowered.task.id], &num, NOW + 40, &[])
        .await
        .unwrap();
    let [Wanted::Kept(kept)] = &wanted[..] else {
        panic!("{wanted:?}");
    };
    let end = EndedChange {
        id: lowered.task.id,
        turn: Some(kept.turn),
        end: Decided::Updated {
            replicas: 1,
            priority: kept.task.priority,
        },
    };
    store.end_changes(&[end], NOW + 40).await.unwrap();
    assert_eq!(
        numbers(&*store, &lowered).await,
        (TreeState::Done, 0, [1, 0, 1, 0, 0])
    );

    // A purge of what holds the tree.
    let held = root(
        "held",
        TreeSettings {
            on_dead: TreeOnDead::Hold,
            ..with_then()
        },
    );
    insert_new(&*store, std::slice::from_ref(&held)).await;
    settle(&*store, &[died(&held)]).await;
    let tree = tree_of(&*store, &held).await;
    assert_eq!((tree.state, tree.open, tree.held), (TreeState::Open, 0, 1));
    assert_eq!(ends(&*store).await.len(), 3);
    assert_eq!(store.purge(&[held.task.id]).await.unwrap(), 1);
    assert_eq!(numbers(&*store, &held).await, failed([1, 0, 0, 1, 0]));
    assert_eq!(ends(&*store).await.len(), 4);
    // The watchdog publishes them at once, because nobody else does.
    let due = due_rows(&*store, NOW + 50, 100).await;
    let due = due.iter().filter(|row| row.task.queue == queue("reports"));
    assert!(due.count() >= 3, "only a settlement publishes by itself");
}

pub(crate) async fn dead_tasks_count_or_are_ignored_or_hold<D: Database>(db: &D) {
    let store = db.open().await;
    let [count, ignore, hold] =
        [TreeOnDead::Count, TreeOnDead::Ignore, TreeOnDead::Hold].map(on_dead);
    let count = root("count", count);
    let ignore = root("ignore", ignore);
    let hold = root("hold", hold);
    let roots = [count.clone(), ignore.clone(), hold.clone()];
    insert_new(&*store, &roots).await;
    let children: Vec<NewRow> = roots
        .iter()
        .map(|root| joining(root, &format!("child of {}", root.task.id)))
        .collect();
    insert_new(&*store, &children).await;
    let reports: Vec<Settlement> = roots
        .iter()
        .map(died)
        .chain(children.iter().map(|row| completed(row, "w")))
        .collect();
    settle(&*store, &reports).await;
    let states: Vec<TreeState> = [
        tree_of(&*store, &count).await.state,
        tree_of(&*store, &ignore).await.state,
        tree_of(&*store, &hold).await.state,
    ]
    .to_vec();
    assert_eq!(
        states,
        [TreeState::Failed, TreeState::Done, TreeState::Open]
    );
    // A cancelled task holds nothing, because somebody wanted its end.
    send_again(&*store, &hold, NOW + 100).await;
    let tree = tree_of(&*store, &hold).await;
    assert_eq!((tree.open, tree.held, tree.dead, tree.epoch), (1, 0, 0, 0));
    cancel(&*store, &hold, NOW + 110).await;
    assert_eq!(
        numbers(&*store, &hold).await,
        (TreeState::Failed, 0, [2, 0, 1, 0, 1])
    );
    // A tree that only a dead task holds ends when it is cancelled.
    let settings = TreeSettings {
        on_dead: TreeOnDead::Hold,
        ..with_then()
    };
    let held = root("held and cancelled", settings);
    insert_new(&*store, std::slice::from_ref(&held)).await;
    settle(&*store, &[died(&held)]).await;
    assert_eq!(tree_of(&*store, &held).await.state, TreeState::Open);
    assert_eq!(cancel_tree(&*store, &held, 10).await, AddedBulk::Yes);
    assert_eq!(
        numbers(&*store, &held).await,
        (TreeState::Failed, 0, [1, 0, 0, 1, 0])
    );
    assert_eq!(ends(&*store).await.len(), 1);
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    // Sent again, it may hold its tree again.
    send_again(&*store, &held, NOW + 200).await;
    assert!(!tree_of(&*store, &held).await.cancelling);
    let again = Settlement::Died {
        id: held.task.id,
        reason: "again".into(),
        attempts: 1,
        epoch: Some(1),
        history: Vec::new(),
        at_unix_ms: NOW + 210,
    };
    settle(&*store, &[again]).await;
    let tree = tree_of(&*store, &held).await;
    assert_eq!((tree.state, tree.epoch, tree.held), (TreeState::Open, 1, 1));
}

pub(crate) async fn a_task_that_is_sent_again_opens_the_next_epoch<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("root", with_then());
    insert_new(&*store, std::slice::from_ref(&first)).await;
    let found = row("q", "found");
    settle(&*store, &[discovering(&first, "w", vec![found.clone()])]).await;
    settle(&*store, &[died(&found)]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Failed, 0, [2, 0, 1, 1, 0])
    );
    send_again(&*store, &found, NOW + 100).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Open, 1, [2, 1, 1, 0, 0])
    );
    assert_eq!(tree_of(&*store, &first).await.ended_unix_ms, None);
    settle(&*store, &[completed(&found, "w")]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Done, 1, [2, 0, 2, 0, 0])
    );
    // A completed task with more replicas is open, too.
    let more = Change::Update(Update {
        replicas: Some(2),
        priority: None,
    });
    let wanted = store
        .want(&[first.task.id], &more, NOW + 200, &[])
        .await
        .unwrap();
    assert_eq!(wanted, [Wanted::Reopened]);
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Open, 2, [2, 1, 1, 0, 0])
    );
    settle(&*store, &[completed(&first, "w2")]).await;
    let epochs: Vec<serde_json::Value> = ends(&*store)
        .await
        .iter()
        .map(|task| serde_json::from_slice::<serde_json::Value>(&task.payload).unwrap())
        .map(|payload| payload["epoch"].clone())
        .collect();
    assert_eq!(epochs.len(), 3, "one task for each end");
    for epoch in 0..3 {
        assert!(epochs.contains(&epoch.into()), "{epochs:?}");
    }
    // A late completion of a dead task counts when it is sent again: the tree ends at once, in its
    // next epoch.
    let late = root("late", TreeSettings::default());
    insert_new(&*store, std::slice::from_ref(&late)).await;
    settle(&*store, &[died(&late), completed(&late, "w")]).await;
    assert_eq!(tree_of(&*store, &late).await.state, TreeState::Failed);
    send_again(&*store, &late, NOW + 300).await;
    assert_eq!(
        numbers(&*store, &late).await,
        (TreeState::Done, 1, [1, 0, 1, 0, 0])
    );
    // With a higher NUM, a surplus report counts. Nothing was unfinished, so the tree does not end
    // once more.
    let twice = root("twice", TreeSettings::default());
    insert_new(&*store, std::slice::from_ref(&twice)).await;
    let reports = [completed(&twice, "w"), completed(&twice, "w2")];
    settle(&*store, &reports).await;
    let wanted = store.want(&[twice.task.id], &more, NOW + 400, &[]).await;
    wanted.unwrap();
    assert_eq!(
        numbers(&*store, &twice).await,
        (TreeState::Done, 0, [1, 0, 1, 0, 0])
    );
}

pub(crate) async fn letters_count_in_their_tree<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("root", TreeSettings::default());
    let plain = row("q", "plain");
    insert_new(&*store, &[first.clone(), plain.clone()]).await;
    let letter = |parent: &NewRow, key: &str| DeadLetter {
        reason: "no room".into(),
        at_unix_ms: NOW + 5,
        queue: "full".into(),
        task: Some(NewTask {
            queue: "full".into(),
            key: Bytes::copy_from_slice(key.as_bytes()),
            ..NewTask::default()
        }),
        parent_id: Some(parent.task.id),
        ..DeadLetter::default()
    };
    let letters = [
        letter(&first, "a"),
        letter(&first, "b"),
        letter(&plain, "c"),
    ];
    // A report that comes again brings the same letters, perhaps at another time.
    store.keep_letters(&letters).await.unwrap();
    let again = letters.clone().map(|letter| DeadLetter {
        at_unix_ms: NOW + 6,
        ..letter
    });
    store.keep_letters(&again).await.unwrap();
    assert_eq!(tree_of(&*store, &first).await.letters, 2);
    let kept = store.letter(letters[0].id()).await.unwrap().unwrap();
    assert_eq!(kept.letter.tree, Some(first.task.id));
    let kept = store.letter(letters[2].id()).await.unwrap().unwrap();
    assert_eq!(kept.letter.tree, None);
    settle(&*store, &[completed(&first, "w")]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Failed, 0, [1, 0, 1, 0, 0])
    );

    // A report about an ended task brings nothing to the tree.
    let late = letter(&first, "late");
    store
        .keep_letters(std::slice::from_ref(&late))
        .await
        .unwrap();
    assert_eq!(tree_of(&*store, &first).await.letters, 2);
    let kept = store.letter(late.id()).await.unwrap().unwrap();
    assert_eq!(kept.letter.tree, None);

    // Sent again, the task joins its tree, and the tree is open again.
    let sent_again = |letter: &DeadLetter| {
        let returns = RowTree::Returns {
            tree: first.task.id,
            letter: letter.id(),
        };
        Some(Box::new(returns))
    };
    let returns = fresh(TaskRow {
        tree: sent_again(&letters[0]),
        ..task("full", "a")
    });
    insert_new(&*store, std::slice::from_ref(&returns)).await;
    let tree = tree_of(&*store, &first).await;
    assert_eq!(
        (tree.state, tree.epoch, tree.letters, tree.open),
        (TreeState::Open, 1, 1, 1)
    );
    assert_eq!(store.letter(letters[0].id()).await.unwrap(), None);
    // The same letter again is a duplicate, and changes nothing.
    let twice = fresh(TaskRow {
        tree: sent_again(&letters[0]),
        ..task("full", "a")
    });
    store.insert(&[twice]).await.unwrap();
    assert_eq!(tree_of(&*store, &first).await.letters, 1);
    settle(&*store, &[completed(&returns, "w")]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Failed, 1, [2, 0, 2, 0, 0]),
        "one letter is left"
    );
    // Another task has its key by now. So the letter goes, and nothing of the tree has failed.
    insert_new(&*store, &[row("full", "b")]).await;
    let duplicate = fresh(TaskRow {
        tree: sent_again(&letters[1]),
        ..task("full", "b")
    });
    let stored = store.insert(&[duplicate]).await.unwrap();
    assert!(matches!(stored.answers[..], [Duplicate { .. }]));
    assert_eq!(store.letter(letters[1].id()).await.unwrap(), None);
    assert_eq!(tree_of(&*store, &first).await.letters, 0);
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Done, 2, [2, 0, 2, 0, 0])
    );

    // A letter that goes lifts no mark, and a tree that stays FAILED does not end again.
    let other = root("other", TreeSettings::default());
    let marked = root("marked", TreeSettings::default());
    insert_new(&*store, &[other.clone(), marked.clone()]).await;
    let letters = [
        letter(&other, "d"),
        letter(&other, "e"),
        letter(&marked, "f"),
    ];
    store.keep_letters(&letters).await.unwrap();
    settle(&*store, &[completed(&other, "w")]).await;
    assert_eq!(cancel_tree(&*store, &marked, 10).await, AddedBulk::Yes);
    for (of, letter, key) in [(&other, &letters[0], "d"), (&marked, &letters[2], "f")] {
        insert_new(&*store, &[row("full", key)]).await;
        let returns = RowTree::Returns {
            tree: of.task.id,
            letter: letter.id(),
        };
        let duplicate = fresh(TaskRow {
            tree: Some(Box::new(returns)),
            ..task("full", key)
        });
        let stored = store.insert(&[duplicate]).await.unwrap();
        assert!(matches!(stored.answers[..], [Duplicate { .. }]));
    }
    let tree = tree_of(&*store, &other).await;
    assert_eq!(
        (tree.state, tree.epoch, tree.letters),
        (TreeState::Failed, 0, 1)
    );
    let tree = tree_of(&*store, &marked).await;
    assert_eq!((tree.cancelling, tree.letters), (true, 0));
}

pub(crate) async fn the_deadline_of_a_tree_is_that_of_its_tasks<D: Database>(db: &D) {
    let store = db.open().await;
    let settings = TreeSettings {
        deadline_unix_ms: NOW + 1_000,
        ..TreeSettings::default()
    };
    let first = root("root", settings);
    insert_new(&*store, std::slice::from_ref(&first)).await;
    let deadline = |key: &str, deadline_unix_ms: i64| {
        fresh(TaskRow {
            deadline_unix_ms,
            ..task("q", key)
        })
    };
    let found = [
        deadline("none", 0),
        deadline("earlier", NOW + 500),
        deadline("later", NOW + 5_000),
    ];
    let stored = settle(&*store, &[discovering(&first, "w", found.to_vec())]).await;
    let mut deadlines = Vec::new();
    for row in &found {
        deadlines.push(detail_of(&*store, row).await.task.deadline_unix_ms);
    }
    assert_eq!(deadlines, [NOW + 1_000, NOW + 500, NOW + 1_000]);
    assert_eq!(
        stored.answers[0].tree_deadline_unix_ms,
        NOW + 1_000,
        "for who publishes them"
    );
    let due = store.due_deadlines(NOW + 1_000, NOW + 2_000, 10).await;
    assert_eq!(due.unwrap().overdue.len(), 3);
    // A task that is sent again after it has no deadline, and neither has what it discovers.
    settle(&*store, &found.each_ref().map(died)).await;
    send_again(&*store, &found[0], NOW + 3_000).await;
    let child = row("q", "child");
    settle(&*store, &[discovering(&found[0], "w", vec![child.clone()])]).await;
    assert_eq!(detail_of(&*store, &child).await.task.deadline_unix_ms, 0);
    assert_eq!(tree_of(&*store, &first).await.deadline_unix_ms, None);
}

pub(crate) async fn nothing_is_added_to_a_cancelled_tree<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("root", TreeSettings::default());
    let rest = joining(&first, "rest");
    insert_new(&*store, &[first.clone(), rest.clone()]).await;
    // Without a bulk change that cancels its tasks, a tree goes on.
    let refused = cancel_tree(&*store, &first, 0).await;
    assert_eq!(refused, AddedBulk::NoRoomForToken);
    assert!(!tree_of(&*store, &first).await.cancelling);
    assert_eq!(cancel_tree(&*store, &first, 10).await, AddedBulk::Yes);
    assert!(tree_of(&*store, &first).await.cancelling);
    assert_eq!(cancel_tree(&*store, &first, 10).await, AddedBulk::Yes);
    let acts = store.acts_on(&first.task.id.to_string(), 10).await.unwrap();
    assert_eq!(acts.len(), 1, "the second call changed nothing");
    let late = joining(&first, "late");
    let stored = store.insert(std::slice::from_ref(&late)).await.unwrap();
    assert_eq!(stored.answers, [TreeClosed]);
    assert_eq!(store.task(late.task.id).await.unwrap(), None);
    let found = row("q", "found");
    let stored = settle(&*store, &[discovering(&first, "w", vec![found.clone()])]).await;
    assert_eq!(stored.answers[0].discovered, []);
    assert_eq!(store.task(found.task.id).await.unwrap(), None);
    cancel(&*store, &rest, NOW + 30).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Failed, 0, [2, 0, 1, 0, 1])
    );
    // An ended tree takes nothing of inserts, either.
    let stored = store.insert(&[late, row("q", "plain")]).await.unwrap();
    assert_eq!(stored.answers, [TreeClosed, New]);
    // What was stored before is a duplicate, and the insert itself may come again.
    let other = joining(&first, "rest");
    let stored = store.insert(&[rest.clone(), other]).await.unwrap();
    assert!(
        matches!(stored.answers[..], [New, Duplicate { id, status: StoredStatus::Cancelled }] if id == rest.task.id),
        "{stored:?}"
    );
    assert_eq!(tree_of(&*store, &first).await.epoch, 0);
    // What is sent again lifts the mark.
    send_again(&*store, &rest, NOW + 40).await;
    assert!(!tree_of(&*store, &first).await.cancelling);
    settle(&*store, &[discovering(&rest, "w", vec![found.clone()])]).await;
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Open, 1, [3, 1, 2, 0, 0])
    );
    // What the worker of a cancelled task discovers is dropped, too.
    assert_eq!(cancel_tree(&*store, &first, 10).await, AddedBulk::Yes);
    cancel(&*store, &found, NOW + 50).await;
    let more = row("q", "more");
    let stored = settle(&*store, &[discovering(&found, "w", vec![more.clone()])]).await;
    assert!(stored.answers[0].surplus);
    assert_eq!(store.task(more.task.id).await.unwrap(), None);
    assert_eq!(tree_of(&*store, &first).await.late, 1);
}

pub(crate) async fn trees_are_listed_and_their_tasks_counted<D: Database>(db: &D) {
    let store = db.open().await;
    let of_q: Vec<NewRow> = (0..3)
        .map(|n| root(&format!("root {n}"), TreeSettings::default()))
        .collect();
    let other = fresh(TaskRow {
        tree: Some(Box::new(RowTree::Root(TreeSettings::default()))),
        ..task("other", "root")
    });
    let roots = [&of_q[..], std::slice::from_ref(&other)].concat();
    insert_new(&*store, &roots).await;
    settle(&*store, &[completed(&of_q[0], "w"), died(&of_q[1])]).await;
    let list = async |pages: TreePages| -> Vec<TaskId> {
        let trees = store.trees(&pages).await.unwrap();
        trees.iter().map(|tree| tree.id).collect()
    };
    let mut newest: Vec<TaskId> = roots.iter().map(|root| root.task.id).collect();
    newest.sort_unstable_by(|a, b| b.cmp(a));
    let all = TreePages {
        limit: 10,
        ..TreePages::default()
    };
    assert_eq!(list(all.clone()).await, newest);
    let second = TreePages {
        limit: 2,
        after: Some(TaskCursor(newest[0])),
        ..TreePages::default()
    };
    assert_eq!(list(second).await, newest[1..3]);
    let failed = TreePages {
        state: Some(TreeState::Failed),
        ..all.clone()
    };
    assert_eq!(list(failed).await, [of_q[1].task.id]);
    let open_of_q = TreePages {
        queue: Some(queue("q")),
        state: Some(TreeState::Open),
        ..all.clone()
    };
    assert_eq!(list(open_of_q).await, [of_q[2].task.id]);
    let since = TreePages {
        since_unix_ms: Some(i64::MAX / 2),
        ..all
    };
    assert_eq!(list(since).await, []);

    // The tasks of a tree, by queue and status, and the oldest that it waits for.
    let children = [joining(&of_q[2], "a"), joining(&of_q[2], "b")];
    insert_new(&*store, &children).await;
    settle(&*store, &[completed(&children[0], "w")]).await;
    let count = |status, count| TreeCount {
        queue: queue("q"),
        status,
        count,
    };
    assert_eq!(
        store.tree_counts(of_q[2].task.id).await.unwrap(),
        (vec![count(Unfinished, 2), count(Completed, 1)], false)
    );
    let mut waits = vec![of_q[2].task.id, children[1].task.id];
    waits.sort_unstable();
    let waits_for = store
        .tree_waits_for(of_q[2].task.id, false, 10)
        .await
        .unwrap();
    assert_eq!(waits_for, waits);
    let trees: BTreeMap<TaskId, TaskId> = store
        .trees_of(&[children[0].task.id, of_q[2].task.id, TaskId::new()])
        .await
        .unwrap()
        .into_iter()
        .collect();
    assert_eq!(trees[&children[0].task.id], of_q[2].task.id);
    assert_eq!(trees.len(), 2);
    // A list of tasks of a tree needs no queue, and finds the newest first.
    let search = TaskSearch {
        filter: TaskFilter {
            tree: Some(of_q[2].task.id),
            statuses: vec![taskd::model::TaskStatus::Completed],
            ..TaskFilter::default()
        },
        limit: 10,
        look_at: 100,
        after: None,
        stays_in_queue: false,
    };
    let page = store.search(&search).await.unwrap();
    let found: Vec<TaskId> = page.tasks.iter().map(|task| task.id).collect();
    assert_eq!(found, [children[0].task.id]);
    assert_eq!(page.tasks[0].tree, Some(of_q[2].task.id));
}

pub(crate) async fn ended_trees_are_removed_after_their_tasks<D: Database>(db: &D) {
    let store = db.open().await;
    let ended = root("ended", TreeSettings::default());
    let open = root("open", TreeSettings::default());
    insert_new(&*store, &[ended.clone(), open.clone()]).await;
    let children: Vec<NewRow> = (0..5)
        .map(|n| joining(&ended, &format!("child {n}")))
        .collect();
    insert_new(&*store, &children).await;
    let mut reports: Vec<Settlement> = children[..4]
        .iter()
        .map(|row| completed(row, "w"))
        .collect();
    reports.extend([completed(&ended, "w"), died(&children[4])]);
    settle(&*store, &reports).await;
    // A task that is removed leaves the list of its tree.
    const LISTED: &str = "SELECT COUNT(*) FROM tree_tasks";
    assert_eq!(db.number(LISTED).await, 7);
    assert_eq!(store.remove_finished(Duration::ZERO, 2).await.unwrap(), 2);
    assert_eq!(db.number(LISTED).await, 5);
    // NOW is long ago by the database's clock, but a task may be sent again as long as it is there.
    let hour = Duration::from_secs(3600);
    assert_eq!(store.remove_ended_trees(hour, 3).await.unwrap(), 0);
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    assert_eq!(tree_of(&*store, &ended).await.state, TreeState::Failed);
    send_again(&*store, &children[4], NOW + 100).await;
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    store.correct_tree(ended.task.id).await.unwrap();
    assert_eq!(
        tree_of(&*store, &ended).await.state,
        TreeState::Open,
        "a task of it is unfinished"
    );
    settle(&*store, &[completed(&children[4], "w")]).await;
    while store.remove_finished(Duration::ZERO, 10).await.unwrap() > 0 {}
    // An insert that comes again is a duplicate, whatever was removed.
    let again = [joining(&ended, "child 0"), joining(&ended, "other")];
    let is_known = |answers: &[Inserted]| {
        let status = StoredStatus::Completed;
        matches!(answers, [Duplicate { status: known, .. }, TreeClosed] if *known == status)
    };
    let stored = store.insert(&again).await.unwrap();
    assert!(is_known(&stored.answers), "{stored:?}");
    assert_eq!(store.remove_ended_trees(hour, 3).await.unwrap(), 1);
    let stored = store.insert(&again).await.unwrap();
    assert!(is_known(&stored.answers), "{stored:?}");
    assert_eq!(store.remove_ended_trees(hour, 3).await.unwrap(), 0);
    assert_eq!(db.number(LISTED).await, 1);
    assert_eq!(store.trees_by_id(&[ended.task.id]).await.unwrap(), []);
    assert_eq!(tree_of(&*store, &open).await.state, TreeState::Open);
}

pub(crate) async fn a_root_without_a_key_comes_again_after_its_removal<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("root", TreeSettings::default());
    let keyless = fresh(TaskRow {
        key: Bytes::new(),
        key_hash: KeyHash::without_key(first.task.id),
        ..first.task
    });
    insert_new(&*store, std::slice::from_ref(&keyless)).await;
    settle(&*store, &[completed(&keyless, "w")]).await;
    assert_eq!(store.remove_finished(Duration::ZERO, 2).await.unwrap(), 1);
    // Its tree is still there.
    insert_new(&*store, std::slice::from_ref(&keyless)).await;
    assert_eq!(
        numbers(&*store, &keyless).await,
        (TreeState::Open, 1, [2, 1, 1, 0, 0])
    );
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    settle(&*store, &[completed(&keyless, "w")]).await;
    assert_eq!(
        numbers(&*store, &keyless).await,
        (TreeState::Done, 1, [2, 0, 2, 0, 0])
    );
}

pub(crate) async fn a_wrong_tree_is_found_and_corrected<D: Database>(db: &D) {
    let store = db.open().await;
    let [stuck, short, right] = ["stuck", "short", "right"].map(|key| root(key, with_then()));
    insert_new(&*store, &[stuck.clone(), short.clone(), right.clone()]).await;
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    settle(&*store, &[completed(&right, "w")]).await;
    let hex = |row: &NewRow| row.task.id.0.simple().to_string();
    // The end of one was not counted, and another one counts too much.
    db.execute(&format!(
        "UPDATE tasks SET status = 1 WHERE id = x'{}'",
        hex(&stuck)
    ))
    .await;
    db.execute(&format!(
        "UPDATE trees SET open_tasks = 7 WHERE id = x'{}'",
        hex(&short)
    ))
    .await;
    let compared = store.wrong_trees(None, 10).await.unwrap();
    assert_eq!(compared.last, None);
    let mut found: Vec<_> = compared
        .wrong
        .iter()
        .map(|wrong| (wrong.id, wrong.open, wrong.counted_open, wrong.is_over))
        .collect();
    found.sort_unstable();
    let mut expected = vec![(stuck.task.id, 1, 0, true), (short.task.id, 7, 1, false)];
    expected.sort_unstable();
    assert_eq!(found, expected);
    let mut last = None;
    let mut pages = 0;
    loop {
        let page = store.wrong_trees(last, 1).await.unwrap();
        pages += page.wrong.len();
        last = page.last;
        if last.is_none() {
            break;
        }
    }
    assert_eq!(pages, 2, "page by page");
    for wrong in &compared.wrong {
        store.correct_tree(wrong.id).await.unwrap();
    }
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    let tree = tree_of(&*store, &stuck).await;
    assert_eq!(tree.state, TreeState::Done);
    assert!(tree.ended_unix_ms > Some(NOW), "by the database's clock");
    assert_eq!(ends(&*store).await.len(), 2, "one of it, one of `right`");
    assert_eq!(tree_of(&*store, &short).await.open, 1);
    store.correct_tree(TaskId::new()).await.unwrap();
}

pub(crate) async fn the_end_of_a_tree_is_an_event_of_its_root<D: Database>(db: &D) {
    let store = db.open().await;
    let on = QueueSettings {
        events: true,
        ..Default::default()
    };
    store.keep_events_of(EventQueues::of(&Queues {
        named: [(queue("q"), on)].into(),
        ..Default::default()
    }));
    let first = root("root", TreeSettings::default());
    insert_new(&*store, std::slice::from_ref(&first)).await;
    settle(&*store, &[died(&first)]).await;
    let kept = store.kept_events(100).await.unwrap();
    let mut events: Vec<EventRecord> = Vec::new();
    for row in kept {
        for record in wire::read_kept_events(row.events).unwrap() {
            let (_, numbered) = wire::numbered_event(&record, 1).unwrap();
            events.push(wire::read_event_record(&numbered).unwrap().1);
        }
    }
    let ends: Vec<&EventRecord> = events.iter().filter(|event| event.tree.is_some()).collect();
    let [end] = &ends[..] else {
        panic!("{events:?}");
    };
    assert_eq!(end.id, first.task.id);
    assert_eq!(end.tree, Some(TreeState::Failed));
    assert_eq!(end.at_unix_ms, NOW + 20);
    assert_eq!(events.len(), 3, "inserted, died, and the end of the tree");
}

pub(crate) async fn the_end_of_a_tree_is_an_ack_for_its_feed<D: Database>(db: &D) {
    let store = db.open().await;
    let feed = SubscriptionName::new("t.f").unwrap();
    let roots = ["1:1", "1:2", "1:3"].map(|reference| root(reference, of_feed("t.f", reference)));
    insert_new(&*store, &roots).await;
    let other = root("other", of_feed("t.other", "1:1"));
    insert_new(&*store, std::slice::from_ref(&other)).await;
    assert_eq!(store.due_acks(&feed, 1, 10).await.unwrap(), [] as [&str; 0]);
    let all: Vec<TaskId> = roots
        .iter()
        .chain([&other])
        .map(|row| row.task.id)
        .collect();
    let open = store.open_of_feed(&feed, &all).await.unwrap();
    assert_eq!(open.len(), 3, "{open:?}");
    let settled = [completed(&roots[0], "w"), died(&roots[1])];
    settle(&*store, &settled).await;
    settle(&*store, &settled).await;
    let open = store.open_of_feed(&feed, &all).await.unwrap();
    assert_eq!(open, [roots[2].task.id]);
    cancel(&*store, &roots[2], NOW + 20).await;
    assert_eq!(store.count_acks(&feed, 1).await.unwrap(), 3);
    assert_eq!(store.due_acks(&feed, 1, 2).await.unwrap().len(), 2);
    let due = store.due_acks(&feed, 1, 10).await.unwrap();
    assert_eq!(due, ["1:1", "1:2", "1:3"]);
    store.remove_acks(&feed, &due[..2]).await.unwrap();
    store.remove_acks(&feed, &due[..2]).await.unwrap();
    assert_eq!(store.due_acks(&feed, 1, 10).await.unwrap(), ["1:3"]);
    assert_eq!(store.due_among(&feed, &due).await.unwrap(), ["1:3"]);
    // A tree that is opened again ends again, and the source forgets its record once more.
    send_again(&*store, &roots[1], NOW + 30).await;
    settle(&*store, &[completed(&roots[1], "w")]).await;
    let later = root("12:5", of_feed("t.f", "12:5"));
    insert_new(&*store, std::slice::from_ref(&later)).await;
    settle(&*store, &[completed(&later, "w")]).await;
    let due = store.due_acks(&feed, 1, 10).await.unwrap();
    assert_eq!(due, ["1:2", "1:3"]);
    assert_eq!(store.due_acks(&feed, 12, 10).await.unwrap(), ["12:5"]);
    assert_eq!(store.count_acks(&feed, 12).await.unwrap(), 1);
}

pub(crate) async fn a_feed_is_stored_with_each_source<D: Database>(db: &D) {
    let store = db.open().await;
    let feed = SubscriptionName::new("t.f").unwrap();
    // What is stored of a feed is replaced, but not by an earlier run.
    let mut stored = StoredFeed {
        name: feed.clone(),
        source: "a".into(),
        run: 7,
        counts: FeedCounts {
            trees: 3,
            ..FeedCounts::default()
        },
        acks_pending: 2,
        held: "it waits".into(),
    };
    assert_eq!(store.keep_feed(&stored).await.unwrap(), 7);
    stored.counts.acknowledged = 1;
    stored.held = String::new();
    assert_eq!(store.keep_feed(&stored).await.unwrap(), 7);
    let earlier = StoredFeed {
        run: 6,
        ..stored.clone()
    };
    assert_eq!(store.keep_feed(&earlier).await.unwrap(), 7);
    assert_eq!(store.feeds().await.unwrap(), [stored.clone()]);
    let other = StoredFeed {
        source: "b".into(),
        ..earlier
    };
    assert_eq!(store.keep_feed(&other).await.unwrap(), 6);
    let acks = ["5:1", "6:1", "7:1"].map(ToOwned::to_owned);
    let roots = [0, 1, 2].map(|at: usize| root(&acks[at], of_feed("t.f", &acks[at])));
    insert_new(&*store, &roots).await;
    settle(
        &*store,
        &[0, 1, 2].map(|at: usize| completed(&roots[at], "w")),
    )
    .await;

    let age = Duration::from_secs(60);
    store.forget_feeds(&[], age).await.unwrap();
    assert_eq!(store.feeds().await.unwrap().len(), 2, "they are too young");
    let known = [(feed.clone(), "a".to_owned())];
    store.forget_feeds(&known, Duration::ZERO).await.unwrap();
    assert_eq!(store.feeds().await.unwrap(), [stored]);
    assert_eq!(store.due_among(&feed, &acks).await.unwrap(), ["7:1"]);
    store.forget_feeds(&[], Duration::ZERO).await.unwrap();
    assert_eq!(store.feeds().await.unwrap(), []);
    assert_eq!(
        store.due_among(&feed, &acks).await.unwrap(),
        [] as [&str; 0]
    );
}

pub(crate) async fn two_settlers_end_a_tree_once<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("root", with_then());
    insert_new(&*store, std::slice::from_ref(&first)).await;
    let found: Vec<NewRow> = (0..64).map(|n| row("q", format!("found {n}"))).collect();
    settle(&*store, &[discovering(&first, "w", found.clone())]).await;
    let settlers = found.chunks(4).map(|rows| {
        let store = Arc::clone(&store);
        let rows = rows.to_vec();
        async move {
            let mut ended = 0;
            for row in rows {
                // Each discovers a key of its own, and one that many discover.
                let more = vec![
                    super::row("q", format!("more of {}", row.task.id)),
                    super::row("q", "shared"),
                ];
                let found = more[0].clone();
                let shared = more[1].clone();
                let stored = settle(&*store, &[discovering(&row, "w", more)]).await;
                let is_new = stored.answers[0].discovered[1] == New;
                ended += stored.released.len();
                let mut rest = vec![completed(&found, "w")];
                if is_new {
                    rest.push(completed(&shared, "w"));
                }
                ended += settle(&*store, &rest).await.released.len();
            }
            ended
        }
    });
    let ended: usize = join_all(settlers).await.into_iter().sum();
    assert_eq!(ended, 1, "one of them saw zero");
    assert_eq!(
        numbers(&*store, &first).await,
        (TreeState::Done, 0, [130, 0, 130, 0, 0])
    );
    assert_eq!(ends(&*store).await.len(), 1);
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
}
