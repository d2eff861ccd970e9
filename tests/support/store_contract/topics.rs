//! Tests of topics of users.

use std::time::Duration;

use taskd::{
    model::{Act, Topic, TopicName, TopicSettings},
    store::{KeptTopic, Store},
};

use super::*;

fn topic(name: &str, partitions: u32) -> Topic {
    Topic {
        name: TopicName::new(name).unwrap(),
        settings: TopicSettings {
            partitions,
            retention_age: Duration::from_millis(86_400_001),
            retention_records: 1 << 39,
            retention_bytes: 1 << 50,
            is_attached: name == "b",
        },
        created_unix_ms: NOW,
        is_deleting: false,
    }
}

pub(crate) async fn topics_are_kept_changed_and_deleted_with_their_acts<D: Database>(db: &D) {
    let store = db.open().await;
    let act = |what: &str| Act::new("ops", what, "b");
    let put = act("put topic");
    for _ in 0..2 {
        // The second time as if the COMMIT of the first was not answered.
        let kept = store.keep_topic(&topic("b", 2), None, &put).await.unwrap();
        assert_eq!(kept, KeptTopic::Yes);
    }
    let another = act("put topic");
    let kept = store.keep_topic(&topic("a", 1), None, &another).await;
    assert_eq!(kept.unwrap(), KeptTopic::Yes);
    assert_eq!(
        store.topics().await.unwrap(),
        [topic("a", 1), topic("b", 2)]
    );
    let fewer = store
        .keep_topic(&topic("b", 1), Some(&topic("b", 2)), &act("put topic"))
        .await
        .unwrap();
    assert_eq!(fewer, KeptTopic::Fewer(2));
    // Two processes at once: what the caller has read is no longer so.
    for known in [None, Some(&topic("b", 1)), Some(&topic("a", 1))] {
        let kept = store
            .keep_topic(&topic("b", 3), known, &act("put topic"))
            .await;
        assert_eq!(kept.unwrap(), KeptTopic::Changed);
    }
    let kept = store
        .keep_topic(&topic("c", 1), Some(&topic("c", 1)), &act("put topic"))
        .await;
    assert_eq!(kept.unwrap(), KeptTopic::Changed);
    assert_eq!(store.topics().await.unwrap()[1], topic("b", 2));
    // What changes are the settings, not the time.
    let mut more = topic("b", 256);
    more.settings.retention_records = 7;
    let later = Topic {
        created_unix_ms: NOW + 1,
        ..more.clone()
    };
    let kept = store
        .keep_topic(&later, Some(&topic("b", 2)), &act("put topic"))
        .await;
    assert_eq!(kept.unwrap(), KeptTopic::Yes);
    assert_eq!(store.topics().await.unwrap()[1], more);

    let delete = act("delete topic");
    // Not one that was made at another time.
    assert!(!store.begin_delete_topic(&later, &delete).await.unwrap());
    assert!(!store.topics().await.unwrap()[1].is_deleting);
    for _ in 0..2 {
        assert!(store.begin_delete_topic(&more, &delete).await.unwrap());
    }
    assert!(store.topics().await.unwrap()[1].is_deleting);
    let kept = store
        .keep_topic(&topic("b", 256), Some(&more), &act("put topic"))
        .await
        .unwrap();
    assert_eq!(kept, KeptTopic::Deleting);
    // One that nobody deletes stays, and so does one that is not the one that was deleted.
    store.end_delete_topic(&topic("a", 1)).await.unwrap();
    store.end_delete_topic(&later).await.unwrap();
    assert_eq!(store.topics().await.unwrap().len(), 2);
    store.end_delete_topic(&more).await.unwrap();
    assert_eq!(store.topics().await.unwrap(), [topic("a", 1)]);
    let delete = act("delete topic");
    assert!(!store.begin_delete_topic(&more, &delete).await.unwrap());
    let acts = store.acts(None, 10).await.unwrap();
    let acts: Vec<_> = acts.iter().map(|act| act.what.as_str()).collect();
    let put = "put topic";
    assert_eq!(acts, ["delete topic", put, put, put]);
}
