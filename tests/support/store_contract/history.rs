//! Tests of the histories of tasks: their attempts, and what operators did to them.

use std::time::Duration;

use taskd::{
    model::{Act, Attempt, AttemptState, FailedAttempt, now_unix_ms},
    store::{Attempts, FAILURES_STAY, Settlement},
};

use super::*;

fn failed(row: &NewRow, worker: &str, grant: u64, at_unix_ms: i64) -> FailedAttempt {
    FailedAttempt {
        id: row.task.id,
        worker: worker.into(),
        state: if grant.is_multiple_of(2) {
            AttemptState::Expired
        } else {
            AttemptState::Rejected
        },
        leased_unix_ms: at_unix_ms - 5,
        at_unix_ms,
        attempt: 1,
        lease: LeaseNumber {
            generation: 1,
            grant,
        },
        reason: format!("reason {grant}"),
    }
}

fn shown(failure: &FailedAttempt) -> Attempt {
    Attempt {
        worker: failure.worker.clone(),
        state: failure.state,
        from_unix_ms: Some(failure.leased_unix_ms),
        until_unix_ms: Some(failure.at_unix_ms),
        expires_unix_ms: None,
        attempt: failure.attempt,
        reason: failure.reason.clone(),
        surplus: false,
    }
}

/// The completion with a lease from this time.
fn lease_given(mut report: Settlement, unix_ms: i64) -> Settlement {
    if let Settlement::Completed { leased_unix_ms, .. } = &mut report {
        *leased_unix_ms = unix_ms;
    }
    report
}

async fn attempts(store: &dyn Store, row: &NewRow) -> Attempts {
    store.attempts(row.task.id, 10).await.unwrap()
}

pub(crate) async fn an_attempt_is_kept_once_and_told_in_its_order(db: &impl Database) {
    let store = db.open().await;
    let [one, other] = ["one", "other"].map(|key| row("q", key));
    insert_new(&*store, &[one.clone(), other.clone()]).await;
    let [first, second, third] =
        [(2, NOW), (1, NOW), (3, NOW + 1)].map(|(grant, at)| failed(&one, "w", grant, at));
    let unknown = FailedAttempt {
        leased_unix_ms: 0,
        ..failed(&other, "v \u{1f600}", 1, NOW)
    };
    // One failure occurs twice in a call, and then all of them are repeated.
    store
        .keep_failures(&[third.clone(), first.clone(), first.clone(), unknown.clone()])
        .await
        .unwrap();
    store
        .keep_failures(&[first.clone(), second.clone(), third.clone()])
        .await
        .unwrap();
    let Attempts {
        failed,
        completed: none,
        results,
    } = attempts(&*store, &one).await;
    assert_eq!((none, results), (vec![], 0));
    assert_eq!(failed.last(), Some(&shown(&third)));
    let both = |one: &Attempt| *one == shown(&first) || *one == shown(&second);
    assert!(
        failed.len() == 3 && failed[..2].iter().all(both) && failed[0] != failed[1],
        "{failed:?}"
    );
    assert_eq!(
        attempts(&*store, &other).await.failed,
        [Attempt {
            from_unix_ms: None,
            ..shown(&unknown)
        }]
    );

    // The second worker made up its token.
    let reports = [
        (completed(&one, "w"), NOW + 4),
        (completed(&one, "v"), NOW + 11),
    ];
    store
        .settle(&reports.map(|(report, leased)| lease_given(report, leased)))
        .await
        .unwrap();
    let over = attempts(&*store, &one).await;
    let done = |worker: &str, from_unix_ms, surplus| Attempt {
        worker: worker.into(),
        state: AttemptState::Completed,
        from_unix_ms,
        until_unix_ms: Some(NOW + 10),
        expires_unix_ms: None,
        attempt: 2,
        reason: String::new(),
        surplus,
    };
    assert_eq!(
        over.completed,
        [done("v", None, true), done("w", Some(NOW + 4), false)]
    );
    assert_eq!((over.failed.len(), over.results), (3, 2));
    assert_eq!(
        store.attempts(one.task.id, 1).await.unwrap().completed,
        [done("w", Some(NOW + 4), false)]
    );
}

pub(crate) async fn a_task_keeps_its_last_failures_and_takes_them_with_it(db: &impl Database) {
    let store = db.open().await;
    let [many, few, gone] = ["many", "few", "gone"].map(|key| row("q", key));
    insert_new(&*store, &[many.clone(), few.clone()]).await;
    let count = i64::from(FAILURES_STAY) + 20;
    let of_many: Vec<_> = (0..count)
        .map(|n| failed(&many, "w", n.unsigned_abs(), NOW + n))
        .collect();
    for part in of_many.chunks(50) {
        store.keep_failures(part).await.unwrap();
    }
    // The earliest ones are repeated and removed again. A task that was never stored has no
    // history.
    let again = [
        of_many[0].clone(),
        failed(&few, "w", 1, NOW),
        failed(&gone, "w", 1, NOW),
    ];
    store.keep_failures(&again).await.unwrap();
    let kept = attempts(&*store, &many).await.failed;
    assert_eq!(kept, of_many[20..].iter().map(shown).collect::<Vec<_>>());
    assert_eq!(attempts(&*store, &gone).await, Attempts::default());

    store.settle(&[died(&many)]).await.unwrap();
    assert_eq!(store.remove_finished(AGE, 10).await.unwrap(), 1);
    store.keep_failures(&of_many[..1]).await.unwrap();
    assert_eq!(attempts(&*store, &many).await, Attempts::default());
    assert_eq!(db.number("SELECT COUNT(*) FROM history").await, 1);
}

pub(crate) async fn old_failures_are_removed_in_slices(db: &impl Database) {
    let store = db.open().await;
    let one = row("q", "one");
    insert_new(&*store, std::slice::from_ref(&one)).await;
    let recent = failed(&one, "w", 99, now_unix_ms());
    let mut failures: Vec<_> = (0..5)
        .map(|n| failed(&one, "w", n, NOW + n as i64))
        .collect();
    failures.push(recent.clone());
    store.keep_failures(&failures).await.unwrap();
    assert_eq!(
        store.remove_old_failures(Duration::MAX, 10).await.unwrap(),
        0
    );
    assert_eq!(store.remove_old_failures(AGE, 3).await.unwrap(), 3);
    let left = attempts(&*store, &one).await.failed;
    assert_eq!(
        left,
        [&failures[3], &failures[4], &recent].map(shown),
        "the oldest went first"
    );
    assert_eq!(store.remove_old_failures(AGE, 3).await.unwrap(), 2);
    assert_eq!(store.remove_old_failures(AGE, 3).await.unwrap(), 0);
}

pub(crate) async fn acts_are_found_by_their_target(db: &impl Database) {
    let store = db.open().await;
    let [one, other] = [
        "0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44",
        "0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a45",
    ];
    let acts = [
        Act::new("ann", "first", one),
        Act::new("ann", "second", other),
        Act::new("bob", "third", one),
    ];
    store.keep_acts(&acts[..2]).await.unwrap();
    // Repeated, as after a lost answer.
    store.keep_acts(&acts).await.unwrap();
    store.keep_acts(&[]).await.unwrap();
    assert_eq!(
        store.acts_on(one, 10).await.unwrap(),
        [acts[0].clone(), acts[2].clone()]
    );
    assert_eq!(store.acts_on(one, 1).await.unwrap(), [acts[2].clone()]);
    assert_eq!(store.acts_on("nobody", 10).await.unwrap(), []);
    assert_eq!(store.acts(None, 10).await.unwrap().len(), 3);
}
