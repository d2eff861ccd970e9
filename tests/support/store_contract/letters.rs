//! Tests of dead letters: stored with the death, listed, sent again and purged.

use std::time::Duration;

use taskd::{
    model::{
        DeadLetter, Failure, LetterCursor, LetterFilter, LetterId, LetterKind, LetterPage,
        LetterPages, NewTask, StoredLetter, TaskId,
    },
    store::{Retried, Settled, Settlement, Store},
};

use super::*;

fn failure() -> Failure {
    Failure {
        at_unix_ms: NOW + 5,
        worker: "w".into(),
        reason: "timeout".into(),
    }
}

fn died_in(row: &NewRow, epoch: u32) -> Settlement {
    let (id, reason, at_unix_ms) = (row.task.id, "no luck".into(), NOW + 20);
    Settlement::Died {
        id,
        reason,
        attempts: 5,
        history: vec![failure()],
        epoch: Some(epoch),
        at_unix_ms,
    }
}

fn letter_of(row: &NewRow) -> StoredLetter {
    let letter = DeadLetter {
        reason: "no luck".into(),
        at_unix_ms: NOW + 20,
        task_id: Some(row.task.id),
        queue: row.task.queue.as_str().to_owned(),
        attempts: 5,
        task: Some(NewTask::from(&row.task)),
        history: vec![failure()],
        ..Default::default()
    };
    StoredLetter {
        id: row.task.id,
        kind: LetterKind::Task,
        letter,
    }
}

/// The letter as a list shows it.
fn brief(mut stored: StoredLetter) -> StoredLetter {
    stored.letter.value.clear();
    if let Some(task) = &mut stored.letter.task {
        let (queue, key) = (task.queue.clone(), task.key.clone());
        *task = NewTask {
            queue,
            key,
            ..Default::default()
        };
    }
    stored
}

async fn all(store: &dyn Store, filter: LetterFilter) -> Vec<StoredLetter> {
    store
        .letters(&LetterPages {
            filter,
            limit: 100,
            after: None,
        })
        .await
        .unwrap()
        .letters
}

async fn listed(store: &dyn Store) -> Vec<LetterId> {
    all(store, LetterFilter::default())
        .await
        .into_iter()
        .map(|letter| letter.id)
        .collect()
}

async fn state(store: &dyn Store, row: &NewRow) -> TaskState {
    store.states(&[row.task.id]).await.unwrap().remove(0)
}

pub(crate) async fn a_dead_task_has_its_letter_until_it_is_sent_again<D: Database>(db: &D) {
    let store = db.open().await;
    let (dead, other) = (replicated("dead", 2), replicated("other", 1));
    insert_new(&*store, &[dead.clone(), other.clone()]).await;
    publish(&*store, &[dead.clone(), other.clone()], at(1, 0)).await;
    // A worker is credited, then the task dies. The report of the death is delivered twice.
    store
        .settle(&[completed(&dead, "a"), died_in(&dead, 0), died_in(&dead, 0)])
        .await
        .unwrap();
    assert_eq!(
        store.letter(dead.task.id).await.unwrap(),
        Some(letter_of(&dead))
    );
    assert_eq!(
        all(&*store, LetterFilter::default()).await,
        [brief(letter_of(&dead))]
    );

    let ids = [dead.task.id, other.task.id, TaskId::new(), dead.task.id];
    let retried = store
        .retry_with_acts(&ids, NOW + 30, "ops", "retry")
        .await
        .unwrap();
    assert_eq!(
        retried,
        [Retried {
            id: dead.task.id,
            status: Unfinished
        }]
    );
    assert_eq!(
        (
            listed(&*store).await,
            store.letter(dead.task.id).await.unwrap()
        ),
        (vec![], None)
    );
    let workers = vec!["a".to_owned()];
    assert_eq!(
        state(&*store, &dead).await,
        TaskState {
            id: dead.task.id,
            status: Unfinished,
            workers,
            epoch: 1,
            is_behind: false,
            replicas: 2,
            priority: Priority::Medium
        }
    );
    let detail = detail_of(&*store, &dead).await;
    assert_eq!(
        (
            detail.attempts,
            detail.completed,
            &detail.reason[..],
            detail.unpublished
        ),
        (0, 1, "", true)
    );
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 2)]);
    let due = store.due(NOW, 10, &HashSet::new()).await.unwrap();
    assert_eq!(
        due.iter()
            .map(|row| (row.task.id, row.unpublished))
            .collect::<Vec<_>>(),
        [(dead.task.id, Missing)]
    );
    // The second time it is not dead any more. In its second life, its worker completes it.
    assert_eq!(
        store
            .retry_with_acts(&[dead.task.id], NOW + 40, "ops", "retry")
            .await
            .unwrap(),
        []
    );
    store.settle(&[completed(&dead, "b")]).await.unwrap();
    assert_eq!(state(&*store, &dead).await.status, Completed);
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 1), count("q", Completed, 1)]
    );
}

pub(crate) async fn a_task_that_is_sent_again_before_its_time_waits_for_it<D: Database>(db: &D) {
    let store = db.open().await;
    let (mut early, mut late) = (row("q", "early"), row("q", "late"));
    early.task.not_before_unix_ms = NOW + 1_000;
    late.task.not_before_unix_ms = NOW - 1_000;
    insert_new(&*store, &[early.clone(), late.clone()]).await;
    store
        .settle(&[died_in(&early, 0), died_in(&late, 0)])
        .await
        .unwrap();
    let ids = [early.task.id, late.task.id];
    assert_eq!(
        store
            .retry_with_acts(&ids, NOW, "ops", "retry")
            .await
            .unwrap()
            .len(),
        2
    );
    let due = async |now| {
        let due = store.due(now, 10, &HashSet::new()).await.unwrap();
        due.iter()
            .map(|row| (row.task.id, row.unpublished))
            .collect::<Vec<_>>()
    };
    assert_eq!(due(NOW + 999).await, [(late.task.id, Missing)]);
    assert_eq!(
        due(NOW + 1_000).await,
        [(late.task.id, Missing), (early.task.id, Scheduled)]
    );
}

pub(crate) async fn a_death_of_an_earlier_epoch_ends_nothing<D: Database>(db: &D) {
    let store = db.open().await;
    let task = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&task)).await;
    store.settle(&[died_in(&task, 0)]).await.unwrap();
    store
        .retry_with_acts(&[task.task.id], NOW, "ops", "retry")
        .await
        .unwrap();
    // The reader of reports was killed before it committed, so the report of the death is delivered
    // again.
    let answers = store.settle(&[died_in(&task, 0)]).await.unwrap().answers;
    assert_eq!(
        answers,
        [Settled {
            unknown: true,
            ..Settled::default()
        }]
    );
    assert_eq!(
        (state(&*store, &task).await.status, listed(&*store).await),
        (Unfinished, vec![])
    );
    // In its current epoch, it dies and gets a letter again.
    let answers = store.settle(&[died_in(&task, 1)]).await.unwrap().answers;
    assert_eq!(answers, [settled_dead(&task)]);
    assert_eq!(
        store.letter(task.task.id).await.unwrap(),
        Some(letter_of(&task))
    );
    // A task that was refused by the bus dies whatever its epoch is.
    store
        .retry_with_acts(&[task.task.id], NOW, "ops", "retry")
        .await
        .unwrap();
    assert_eq!(state(&*store, &task).await.epoch, 2);
    store.settle(&[died(&task)]).await.unwrap();
    assert_eq!(listed(&*store).await, [task.task.id]);
}

pub(crate) async fn completions_behind_the_death_count_when_a_task_is_sent_again<D: Database>(
    db: &D,
) {
    let store = db.open().await;
    let (half, whole) = (replicated("half", 3), replicated("whole", 2));
    insert_new(&*store, &[half.clone(), whole.clone()]).await;
    let late = |row: &NewRow| {
        [
            died_in(row, 0),
            completed(row, "late"),
            completed(row, "later"),
        ]
    };
    store.settle(&late(&half)).await.unwrap();
    store.settle(&late(&whole)).await.unwrap();
    let mut retried = store
        .retry_with_acts(&[half.task.id, whole.task.id], NOW, "ops", "retry")
        .await
        .unwrap();
    retried.sort_by_key(|retried| retried.id);
    let expected = [(&half, Unfinished), (&whole, Completed)].map(|(row, status)| Retried {
        id: row.task.id,
        status,
    });
    assert_eq!(retried, expected);
    assert_eq!(detail_of(&*store, &half).await.completed, 2);
    assert_eq!(
        store.results(whole.task.id).await.unwrap(),
        [result_of("late", false), result_of("later", false)]
    );
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 1), count("q", Completed, 1)]
    );
    let due = store.due(NOW + 60_000, 10, &HashSet::new()).await.unwrap();
    assert_eq!(
        due.iter().map(|row| row.task.id).collect::<Vec<_>>(),
        [half.task.id]
    );
    // A late completion from the first life is also a credit, because its worker has done a
    // replica.
    store.settle(&[completed(&half, "last")]).await.unwrap();
    assert_eq!(state(&*store, &half).await.status, Completed);
}

fn record(offset: u32) -> DeadLetter {
    DeadLetter {
        reason: "not a record".into(),
        at_unix_ms: NOW + i64::from(offset),
        topic: "pipeline".into(),
        partition: 3,
        offset: format!("{offset}-0"),
        value: vec![0xff; 100].into(),
        ..Default::default()
    }
}

fn unstored(queue: &str, parent_id: Option<TaskId>, at_unix_ms: i64) -> DeadLetter {
    let (queue, payload) = (queue.to_owned(), "payload".into());
    let task = NewTask {
        queue: queue.clone(),
        key: "key".into(),
        payload,
        ..Default::default()
    };
    DeadLetter {
        reason: "no room".into(),
        at_unix_ms,
        queue,
        task: Some(task),
        parent_id,
        ..Default::default()
    }
}

pub(crate) async fn letters_are_kept_once_and_listed_by_every_filter<D: Database>(db: &D) {
    let store = db.open().await;
    let dead = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&dead)).await;
    store.settle(&[died_in(&dead, 0)]).await.unwrap();
    // The queue names of discovered tasks may be invalid.
    let letters = [
        record(1),
        unstored("q", Some(dead.task.id), NOW + 2),
        unstored("r", None, NOW + 3),
        unstored("!", None, NOW),
    ];
    store.keep_letters(&letters).await.unwrap();
    store.keep_letters(&letters[..2]).await.unwrap();
    let again = DeadLetter {
        reason: "again".into(),
        ..letters[0].clone()
    };
    store.keep_letters(&[again]).await.unwrap();

    let stored = |letter: &DeadLetter| StoredLetter {
        id: letter.id(),
        kind: letter.kind(),
        letter: letter.clone(),
    };
    for letter in &letters {
        assert_eq!(
            store.letter(letter.id()).await.unwrap(),
            Some(stored(letter))
        );
    }
    let [poison, discovered, refused, odd] = letters.each_ref().map(DeadLetter::id);
    assert_eq!(
        listed(&*store).await,
        [dead.task.id, refused, discovered, poison, odd],
        "the newest first"
    );
    let shown = all(&*store, LetterFilter::default()).await;
    assert_eq!(
        (&shown[2], &shown[3]),
        (&brief(stored(&letters[1])), &brief(stored(&letters[0])))
    );

    let of = async |filter: LetterFilter| -> Vec<LetterId> {
        all(&*store, filter)
            .await
            .into_iter()
            .map(|letter| letter.id)
            .collect()
    };
    let (q, none) = (Some(queue("q")), LetterFilter::default());
    assert_eq!(
        of(LetterFilter {
            queue: q.clone(),
            ..none.clone()
        })
        .await,
        [dead.task.id, discovered]
    );
    assert_eq!(
        of(LetterFilter {
            kind: Some(LetterKind::Record),
            ..none.clone()
        })
        .await,
        [poison]
    );
    let both = LetterFilter {
        queue: q.clone(),
        kind: Some(LetterKind::Task),
        ..none.clone()
    };
    assert_eq!(of(both).await, [dead.task.id]);
    let since_unix_ms = Some(NOW + 2);
    assert_eq!(
        of(LetterFilter {
            since_unix_ms,
            ..none.clone()
        })
        .await,
        [dead.task.id, refused, discovered]
    );
    let between = LetterFilter {
        since_unix_ms,
        until_unix_ms: Some(NOW + 3),
        ..none.clone()
    };
    assert_eq!(of(between).await, [discovered]);
    assert_eq!(
        of(LetterFilter {
            queue: q,
            reason: "no r".into(),
            ..none
        })
        .await,
        [discovered]
    );

    let mut kinds = store
        .letter_kinds(&[poison, TaskId::new(), dead.task.id])
        .await
        .unwrap();
    kinds.sort_by_key(|(_, kind)| *kind);
    assert_eq!(
        kinds,
        [
            (dead.task.id, LetterKind::Task),
            (poison, LetterKind::Record)
        ]
    );
    assert_eq!(store.letter(TaskId::new()).await.unwrap(), None);
}

pub(crate) async fn letters_are_paged_and_purged_and_removed_by_age<D: Database>(db: &D) {
    let store = db.open().await;
    let dead = rows("q", 3);
    insert_new(&*store, &dead).await;
    store
        .settle(&dead.iter().map(|row| died_in(row, 0)).collect::<Vec<_>>())
        .await
        .unwrap();
    // Three letters with the same time, and three more.
    let records = [record(20), record(21), record(22)];
    store.keep_letters(&records).await.unwrap();
    let (mut after, mut seen): (Option<LetterCursor>, Vec<LetterId>) = (None, Vec::new());
    loop {
        let page = LetterPages {
            filter: LetterFilter::default(),
            limit: 2,
            after,
        };
        let LetterPage { letters, next } = store.letters(&page).await.unwrap();
        seen.extend(letters.iter().map(|letter| letter.id));
        after = next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, listed(&*store).await);
    assert_eq!(seen.len(), 6);

    let purged = [dead[0].task.id, records[0].id(), TaskId::new()];
    assert_eq!(store.purge(&purged).await.unwrap(), 2);
    assert_eq!(store.purge(&purged).await.unwrap(), 0);
    assert!(store.task(dead[0].task.id).await.unwrap().is_none());
    let stored = store.insert(&[row("q", "key 0")]).await.unwrap();
    assert_eq!(
        stored.answers,
        [Duplicate {
            id: dead[0].task.id,
            status: Dead
        }],
        "its key stays"
    );
    assert_eq!(listed(&*store).await.len(), 4);

    // The letter of a dead task is removed together with the task.
    assert_eq!(
        store
            .remove_old_letters(Duration::from_secs(1), 1)
            .await
            .unwrap(),
        1
    );
    assert_eq!(
        store
            .remove_old_letters(Duration::from_secs(1), 10)
            .await
            .unwrap(),
        1
    );
    assert_eq!(
        store
            .remove_old_letters(Duration::from_secs(1), 10)
            .await
            .unwrap(),
        0
    );
    assert_eq!(listed(&*store).await.len(), 2);
    assert_eq!(
        store
            .remove_finished(Duration::from_secs(1), 10)
            .await
            .unwrap(),
        2
    );
    assert_eq!(listed(&*store).await, []);
}
