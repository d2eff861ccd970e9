//! Tests of paused queues.

use taskd::{
    model::{Act, PausedQueue},
    store::{Pausing, Store},
};

use super::*;

fn act(what: &str, queue: &str) -> Act {
    Act::new("ops", what, queue)
}

fn paused(name: &str) -> PausedQueue {
    PausedQueue {
        queue: queue(name),
        at_unix_ms: NOW,
        who: "ops".into(),
    }
}

pub(crate) async fn queues_are_paused_and_resumed_with_their_acts<D: Database>(db: &D) {
    let store = db.open().await;
    let first = store.pauses_version().await.unwrap();
    let pause = act("pause queue", "b");
    assert_eq!(
        store.pause(&paused("b"), &pause).await.unwrap(),
        Pausing::Done
    );
    // The same call is repeated because its COMMIT was not answered.
    assert_eq!(
        store.pause(&paused("b"), &pause).await.unwrap(),
        Pausing::Done
    );
    assert_eq!(
        store
            .pause(&paused("b"), &act("pause queue", "b"))
            .await
            .unwrap(),
        Pausing::Already
    );
    assert_eq!(
        store
            .pause(&paused("a"), &act("pause queue", "a"))
            .await
            .unwrap(),
        Pausing::Done
    );
    assert_eq!(
        store
            .pause(&paused("B"), &act("pause queue", "B"))
            .await
            .unwrap(),
        Pausing::Done
    );
    assert_eq!(
        store.paused_queues().await.unwrap(),
        [paused("B"), paused("a"), paused("b")]
    );
    let second = store.pauses_version().await.unwrap();
    assert!(second > first);

    assert_eq!(
        store
            .resume(&queue("b"), &act("resume queue", "b"))
            .await
            .unwrap(),
        Pausing::Done
    );
    assert_eq!(
        store
            .resume(&queue("b"), &act("resume queue", "b"))
            .await
            .unwrap(),
        Pausing::Already
    );
    assert_eq!(
        store.paused_queues().await.unwrap(),
        [paused("B"), paused("a")]
    );
    assert!(store.pauses_version().await.unwrap() > second);
    let acts: Vec<_> = store
        .acts(None, 10)
        .await
        .unwrap()
        .into_iter()
        .map(|act| (act.what, act.target))
        .collect();
    let expected = [
        ("resume queue", "b"),
        ("pause queue", "B"),
        ("pause queue", "a"),
        ("pause queue", "b"),
    ];
    assert_eq!(
        acts,
        expected.map(|(what, target)| (what.to_owned(), target.to_owned()))
    );
}
