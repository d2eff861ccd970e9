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
        let kept = store.keep_topic(&topic("b", 2), &put).await.unwrap();
        assert_eq!(kept, KeptTopic::Yes);
    }
    let another = act("put topic");
    store.keep_topic(&topic("a", 1), &another).await.unwrap();
    assert_eq!(
        store.topics().await.unwrap(),
        [topic("a", 1), topic("b", 2)]
    );
    let fewer = store
        .keep_topic(&topic("b", 1), &act("put topic"))
        .await
        .unwrap();
    assert_eq!(fewer, KeptTopic::Fewer(2));
    // Two processes at once: one attaches it, and the other one makes it.
    let mut other = topic("b", 3);
    other.settings.is_attached = false;
    let kept = store.keep_topic(&other, &act("put topic")).await.unwrap();
    assert_eq!(kept, KeptTopic::Other);
    assert_eq!(store.topics().await.unwrap()[1], topic("b", 2));
    // What changes are the settings, not the time.
    let mut more = topic("b", 256);
    more.settings.retention_records = 7;
    let later = Topic {
        created_unix_ms: NOW + 1,
        ..more.clone()
    };
    let kept = store.keep_topic(&later, &act("put topic")).await.unwrap();
    assert_eq!(kept, KeptTopic::Yes);
    assert_eq!(store.topics().await.unwrap()[1], more);

    let delete = act("delete topic");
    for _ in 0..2 {
        assert!(store.begin_delete_topic(&more.name, &delete).await.unwrap());
    }
    assert!(store.topics().await.unwrap()[1].is_deleting);
    let kept = store
        .keep_topic(&topic("b", 256), &act("put topic"))
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
    assert!(!store.begin_delete_topic(&more.name, &delete).await.unwrap());
    let acts = store.acts(None, 10).await.unwrap();
    let acts: Vec<_> = acts.iter().map(|act| act.what.as_str()).collect();
    let put = "put topic";
    assert_eq!(acts, ["delete topic", put, put, put]);
}
