//! Tests of task deadlines.

use taskd::{
    model::ChangingTask,
    store::{DueDeadlines, Overdue, TaskSearch},
};

use super::*;

const DAY: i64 = 24 * 3_600_000;

/// A task with a deadline this long after [`NOW`].
fn within(key: &str, ms: i64) -> NewRow {
    fresh(TaskRow {
        deadline_unix_ms: NOW + ms,
        ..task("q", key)
    })
}

fn overdue(row: &NewRow) -> Overdue {
    let TaskRow {
        id,
        queue,
        partition,
        replicas,
        priority,
        deadline_unix_ms,
        ..
    } = row.task.clone();
    let shard = ShardId {
        queue,
        number: partition,
    };
    Overdue {
        task: ChangingTask {
            id,
            shard,
            replicas,
            priority,
            epoch: 0,
        },
        deadline_unix_ms,
    }
}

async fn due(store: &dyn Store, now: i64, limit: u32) -> (Vec<Overdue>, bool) {
    let DueDeadlines {
        overdue, is_full, ..
    } = store.due_deadlines(now, now + DAY, limit).await.unwrap();
    (overdue, is_full)
}

const KEPT: &str = "SELECT COUNT(*) FROM changes";

pub(crate) async fn a_deadline_comes_until_its_task_is_final<D: Database>(db: &D) {
    let store = db.open().await;
    let rows = [
        within("late", 300),
        within("early", 100),
        row("q", "none"),
        within("done", 200),
    ];
    let parked = NewRow {
        unpublished: Parked,
        ..within("parked", 400)
    };
    insert_new(
        &*store,
        &[&rows[..], std::slice::from_ref(&parked)].concat(),
    )
    .await;
    let [late, early, none, done] = &rows;
    // A duplicate stores no deadline, and a repeated call changes nothing.
    let again = within("early", 50);
    let answers = store.insert(&[again, late.clone()]).await.unwrap().answers;
    assert_eq!(
        answers,
        [
            Duplicate {
                id: early.task.id,
                status: Unfinished
            },
            New
        ]
    );
    assert_eq!(db.number(KEPT).await, 4);
    for row in [late, none] {
        assert_eq!(detail_of(&*store, row).await.task, row.task);
    }
    let filter = taskd::model::TaskFilter::default();
    let search = TaskSearch {
        filter,
        limit: 10,
        look_at: 10,
        after: None,
        stays_in_queue: false,
    };
    let listed = store.search(&search).await.unwrap().tasks;
    let listed: BTreeMap<TaskId, i64> = listed
        .into_iter()
        .map(|task| (task.id, task.deadline_unix_ms))
        .collect();
    assert_eq!(
        (listed[&late.task.id], listed[&none.task.id]),
        (NOW + 300, 0)
    );

    store.settle(&[completed(done, "w")]).await.unwrap();
    assert_eq!(due(&*store, NOW + 99, 10).await, (vec![], false));
    // The earliest come first; each is returned once, until it is due again.
    assert_eq!(
        due(&*store, NOW + 400, 1).await,
        (vec![overdue(early)], true)
    );
    assert_eq!(
        due(&*store, NOW + 400, 10).await,
        (vec![overdue(late), overdue(&parked)], false)
    );
    assert_eq!(due(&*store, NOW + 400, 10).await, (vec![], false));
    assert_eq!(
        db.number(KEPT).await,
        3,
        "that of the completed task is gone"
    );
    let (again, _) = due(&*store, NOW + 400 + DAY, 10).await;
    assert_eq!(again.len(), 3, "{again:?}");
    // Dead tasks leave the outbox.
    store
        .settle(&[died(early), died(late), died(&parked)])
        .await
        .unwrap();
    assert_eq!(due(&*store, NOW + 400 + 2 * DAY, 10).await, (vec![], false));
    assert_eq!(
        (
            db.number(KEPT).await,
            db.number("SELECT COUNT(*) FROM outbox").await
        ),
        (0, 0)
    );
    // A deadline that is not due is removed together with its task.
    let gone = within("gone", 100);
    insert_new(&*store, std::slice::from_ref(&gone)).await;
    store.settle(&[completed(&gone, "w")]).await.unwrap();
    db.execute("UPDATE tasks SET updated_ms = 1 WHERE status <> 0")
        .await;
    store
        .remove_finished(std::time::Duration::from_secs(60), 10)
        .await
        .unwrap();
    assert_eq!(db.number(KEPT).await, 0);
}

pub(crate) async fn a_deadline_that_cannot_be_read_holds_up_no_other<D: Database>(db: &D) {
    let store = db.open().await;
    let (first, unread, last) = (
        within("first", 100),
        within("unread", 200),
        within("last", 300),
    );
    let done = within("done", 400);
    insert_new(
        &*store,
        &[first.clone(), unread.clone(), last.clone(), done.clone()],
    )
    .await;
    store.settle(&[completed(&done, "w")]).await.unwrap();
    let set = async |queue: &str| {
        let deadline = unread.task.deadline_unix_ms;
        db.execute(&format!(
            "UPDATE tasks SET queue = '{queue}' WHERE deadline_ms = {deadline}"
        ))
        .await;
    };
    set("no name").await;
    let page = store.due_deadlines(NOW + 400, NOW + 500, 10).await.unwrap();
    assert_eq!(
        (page.overdue, db.number(KEPT).await),
        (vec![overdue(&first), overdue(&last)], 3)
    );
    let page = store
        .due_deadlines(NOW + 500, NOW + 2 * DAY, 10)
        .await
        .unwrap();
    assert_eq!(page.overdue.len(), 2, "it is not looked at each time");
    set("q").await;
    let (again, _) = due(&*store, NOW + 400 + DAY, 10).await;
    assert_eq!(again, [overdue(&unread)]);
}

pub(crate) async fn a_deadline_ends_with_the_first_life_of_its_task<D: Database>(db: &D) {
    let store = db.open().await;
    let (dead, reopened, child) = (
        within("dead", 100),
        within("reopened", 100),
        within("child", 100),
    );
    insert_new(&*store, &[dead.clone(), reopened.clone()]).await;
    store
        .settle(&[
            died(&dead),
            discovering(&reopened, "w", vec![child.clone()]),
        ])
        .await
        .unwrap();
    assert_eq!(db.number(KEPT).await, 3);
    store
        .retry_with_acts(&[dead.task.id], NOW, "ops", "retry")
        .await
        .unwrap();
    let more = taskd::model::Update {
        replicas: Some(2),
        priority: None,
    };
    store
        .want(
            &[reopened.task.id],
            &taskd::model::Change::Update(more),
            NOW,
            &[],
        )
        .await
        .unwrap();
    assert_eq!(
        due(&*store, NOW + 100, 10).await,
        (vec![overdue(&child)], false)
    );
    assert_eq!(db.number(KEPT).await, 1);
    assert_eq!(
        detail_of(&*store, &dead).await.task.deadline_unix_ms,
        NOW + 100,
        "what the insert said stays"
    );
}
