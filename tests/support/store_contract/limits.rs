//! Tests of own limits of limit keys.

use taskd::{
    model::{Act, LimitHold, OwnLimits, OwnValues},
    store::{LimitSetting, Store},
};

use super::*;

fn act(what: &str, key: &str) -> Act {
    Act::new("ops", what, &format!("q {key}"))
}

fn limits(name: &str, key: &str, at_a_time: u32) -> OwnLimits {
    OwnLimits {
        queue: queue(name),
        limit_key: key.into(),
        values: OwnValues {
            at_a_time: Some(at_a_time),
            ..OwnValues::default()
        },
        at_unix_ms: NOW,
        who: "ops".into(),
    }
}

async fn set(store: &dyn Store, limits: &OwnLimits) -> LimitSetting {
    let act = act("set limits", &limits.limit_key);
    store.set_limits(limits, &act).await.unwrap()
}

/// The keys that changed after a version, each with whether it is cleared.
async fn changed(store: &dyn Store, after: u64) -> Vec<(String, bool)> {
    let changes = store.changed_limits(after, 100).await.unwrap();
    assert!(changes.is_sorted_by_key(|change| change.version));
    changes
        .into_iter()
        .map(|change| (change.limits.limit_key, change.is_cleared))
        .collect()
}

pub(crate) async fn own_limits_are_set_and_cleared_with_their_acts<D: Database>(db: &D) {
    let store = db.open().await;
    let first = store.limits_version().await.unwrap();
    let first_set = act("set limits", "b");
    let whole = OwnLimits {
        values: OwnValues {
            at_a_time: Some(0),
            pace: Some("10/1m".parse().unwrap()),
            burst: Some(3),
            hold_until_unix_ms: Some(NOW + 5),
        },
        ..limits("q", "b", 0)
    };
    // The second call is the first one repeated, because its COMMIT was not answered.
    for _ in 0..2 {
        assert_eq!(
            store.set_limits(&whole, &first_set).await.unwrap(),
            LimitSetting::Done
        );
    }
    for key in ["B", "a", "a ", "*", "日本"] {
        assert_eq!(set(&*store, &limits("q", key, 1)).await, LimitSetting::Done);
    }
    assert_eq!(
        set(&*store, &limits("other", "a", 9)).await,
        LimitSetting::Done
    );
    let q = queue("q");
    let listed = store.own_limits(&q, None, 4).await.unwrap();
    let keys: Vec<_> = listed.iter().map(|limits| &*limits.limit_key).collect();
    assert_eq!(keys, ["*", "B", "a", "a "]);
    let rest = store.own_limits(&q, Some("a "), 4).await.unwrap();
    assert_eq!(rest, [whole.clone(), limits("q", "日本", 1)]);
    assert_eq!(store.own_limits_of(&q, "b").await.unwrap(), Some(whole));
    assert_eq!(store.own_limits_of(&q, "c").await.unwrap(), None);

    // A change moves to the end, a cleared one stays known.
    let second = store.limits_version().await.unwrap();
    assert!(second > first);
    assert_eq!(changed(&*store, first).await.len(), 7);
    assert_eq!(changed(&*store, second).await, []);
    assert_eq!(set(&*store, &limits("q", "a", 2)).await, LimitSetting::Done);
    let clear = act("clear limits", "B");
    for _ in 0..2 {
        assert_eq!(
            store.clear_limits(&q, "B", NOW, &clear).await.unwrap(),
            LimitSetting::Done
        );
    }
    let again = act("clear limits", "B");
    assert_eq!(
        store.clear_limits(&q, "B", NOW, &again).await.unwrap(),
        LimitSetting::Already
    );
    let expected = [("a".to_owned(), false), ("B".to_owned(), true)];
    assert_eq!(changed(&*store, second).await, expected);
    assert_eq!(store.own_limits_of(&q, "B").await.unwrap(), None);
    // A day later nobody needs to learn of it any more.
    let later = OwnLimits {
        at_unix_ms: NOW + 24 * 3_600_000 + 1,
        ..limits("q", "z", 1)
    };
    assert_eq!(set(&*store, &later).await, LimitSetting::Done);
    let expected = [("a".to_owned(), false), ("z".to_owned(), false)];
    assert_eq!(changed(&*store, second).await, expected);
    let acts = store.acts(None, 100).await.unwrap();
    let count = |what: &str| acts.iter().filter(|act| act.what == what).count();
    assert_eq!((count("set limits"), count("clear limits")), (9, 1));
}

pub(crate) async fn holds_are_kept_until_they_are_over<D: Database>(db: &D) {
    let store = db.open().await;
    let hold = |first: u8, until_unix_ms: i64| LimitHold {
        hash: [first, 0, 1, 2, 3, 4, 5, 255],
        until_unix_ms,
    };
    let q = queue("q");
    let other = queue("other");
    let holds = [hold(1, NOW + 10), hold(2, NOW + 20), hold(1, NOW + 30)];
    for _ in 0..2 {
        store.keep_holds(&q, &holds, NOW).await.unwrap();
    }
    store
        .keep_holds(&other, &[hold(1, NOW + 40)], NOW)
        .await
        .unwrap();
    let mut kept = store.holds(&q, NOW).await.unwrap();
    kept.sort_by_key(|hold| hold.hash);
    assert_eq!(kept, [hold(1, NOW + 30), hold(2, NOW + 20)]);
    assert_eq!(
        store.holds(&q, NOW + 20).await.unwrap(),
        [hold(1, NOW + 30)]
    );
    // An operator ends one.
    store.keep_holds(&q, &[hold(1, 0)], NOW).await.unwrap();
    assert_eq!(store.holds(&q, NOW).await.unwrap(), [hold(2, NOW + 20)]);
    assert_eq!(store.holds(&q, -1).await.unwrap().len(), 2);
    // What is over goes with the next ones.
    store.keep_holds(&q, &[], NOW + 20).await.unwrap();
    assert_eq!(store.holds(&q, -1).await.unwrap(), []);
    assert_eq!(store.holds(&other, -1).await.unwrap().len(), 1);
}
