//! Tests of access tokens and operators' acts.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::join_all;
use taskd::{
    model::{AccessToken, Act, Secret, WorkerName},
    store::{ACTS_STAY, AddedToken},
};
use uuid::{Timestamp, Uuid};

use super::{Database, NOW, died, insert_new, row};

fn token(name: &str) -> AccessToken {
    AccessToken {
        name: name.to_owned(),
        roles: "insert,work".parse().unwrap(),
        scope: "a,b*".parse().unwrap(),
        worker: Some(WorkerName::new("wörker").unwrap()),
        calls_per_second: Some(7.try_into().unwrap()),
        created_unix_ms: NOW,
        expires_unix_ms: Some(NOW + 1),
    }
}

fn plain(name: &str) -> AccessToken {
    AccessToken {
        scope: Default::default(),
        worker: None,
        calls_per_second: None,
        expires_unix_ms: None,
        ..token(name)
    }
}

pub(crate) async fn tokens_come_and_go_with_their_acts(db: &impl Database) {
    let store = db.open().await;
    assert_eq!(
        (
            store.tokens().await.unwrap(),
            store.acts(None, 10).await.unwrap()
        ),
        (vec![], vec![])
    );
    let [one, two] = [Secret::new().unwrap().hash(), Secret::new().unwrap().hash()];
    let [make_b, make_a, end_b] =
        ["make b", "make a", "end b"].map(|what| Act::new("me", what, "on this"));
    let mut versions = vec![store.tokens_version().await.unwrap()];
    // A repeated call changes nothing, because it has already taken effect.
    for _ in 0..2 {
        assert_eq!(
            store.add_token(one, &token("b"), &make_b).await.unwrap(),
            AddedToken::Yes
        );
    }
    versions.push(store.tokens_version().await.unwrap());
    assert_eq!(
        store.add_token(two, &plain("b"), &make_a).await.unwrap(),
        AddedToken::NameTaken
    );
    assert_eq!(
        store.add_token(two, &plain("a"), &make_a).await.unwrap(),
        AddedToken::Yes
    );
    versions.push(store.tokens_version().await.unwrap());
    let other = db.open().await;
    assert_eq!(
        other.tokens().await.unwrap(),
        [(two, plain("a")), (one, token("b"))]
    );

    for _ in 0..2 {
        assert!(store.revoke_token("b", &end_b).await.unwrap());
    }
    versions.push(store.tokens_version().await.unwrap());
    assert!(
        !store
            .revoke_token("b", &Act::new("me", "again", "b"))
            .await
            .unwrap()
    );
    assert_eq!(store.tokens().await.unwrap(), [(two, plain("a"))]);
    assert!(
        versions.is_sorted_by(|one, next| one < next),
        "{versions:?}"
    );

    assert_eq!(
        store.acts(None, 2).await.unwrap(),
        [end_b.clone(), make_a.clone()]
    );
    assert_eq!(
        store.acts(Some(end_b.id), 10).await.unwrap(),
        [make_a.clone(), make_b.clone()]
    );
    assert_eq!(store.acts(Some(make_b.id), 10).await.unwrap(), []);
}

pub(crate) async fn old_acts_go_a_few_at_a_time(db: &impl Database) {
    let store = db.open().await;
    let act_at = |seconds: u64| {
        let id = Uuid::new_v7(Timestamp::from_unix_time(seconds, 0, 0, 0));
        Act {
            id,
            ..Act::new("me", "cancel", "a task")
        }
    };
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let before = |seconds: u64| act_at(now - ACTS_STAY.as_secs() - seconds);
    let left = async || store.acts(None, 10_000).await.unwrap().len();
    store.keep_acts(&[act_at(now)]).await.unwrap();
    store
        .keep_acts(&[act_at(now + 2 * ACTS_STAY.as_secs())])
        .await
        .unwrap();
    assert_eq!(left().await, 2, "of a process whose clock is ahead");
    let old: Vec<Act> = (0..2500).map(|n| before(10_000 - n)).collect();
    store.keep_acts(&old).await.unwrap();
    assert_eq!(left().await, 2502, "each is as old as those before it");
    for expected in [503, 4] {
        store
            .keep_acts(&[Act::new("me", "pause", "a queue")])
            .await
            .unwrap();
        assert_eq!(left().await, expected);
    }
    // Sending a task again also records an act.
    store.keep_acts(&[before(10)]).await.unwrap();
    assert_eq!(left().await, 5);
    let task = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&task)).await;
    store.settle(&[died(&task)]).await.unwrap();
    assert_eq!(
        store
            .retry_with_acts(
                &[task.task.id],
                i64::try_from(now * 1000).unwrap(),
                "me",
                "retry"
            )
            .await
            .unwrap()
            .len(),
        1
    );
    assert_eq!(left().await, 5);
}

pub(crate) async fn of_concurrent_tokens_one_gets_the_name(db: &impl Database) {
    let store = db.open().await;
    let add = |n: usize| {
        let store = &store;
        async move {
            let act = Act::new("me", "make", &n.to_string());
            store
                .add_token(Secret::new().unwrap().hash(), &plain("x"), &act)
                .await
                .unwrap()
        }
    };
    let added = join_all((0..10).map(add)).await;
    assert_eq!(
        added
            .iter()
            .filter(|added| **added == AddedToken::Yes)
            .count(),
        1,
        "{added:?}"
    );
    assert_eq!(
        (
            store.tokens().await.unwrap().len(),
            store.acts(None, 10).await.unwrap().len()
        ),
        (1, 1)
    );
}
