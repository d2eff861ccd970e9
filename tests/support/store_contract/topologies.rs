//! Tests of topologies.

use taskd::{
    model::{Act, Position, PositionKey, QueueName, SubscriptionName, TopicName, TopologyName},
    store::{KeptSubscription, KeptTopology, Leaving, Store, StoredTopology},
};

use super::{subscriptions::subscription, *};

/// The subscription of a feed.
const NEWS: &str = "crawl.news";

fn topology(name: &str, version: u64, text: &str) -> StoredTopology {
    StoredTopology {
        name: TopologyName::new(name).unwrap(),
        version,
        text: text.to_owned(),
        applied_by: "ops".to_owned(),
        applied_unix_ms: NOW,
    }
}

async fn subscribe(store: &dyn Store, feed_of: Option<&StoredTopology>) -> KeptSubscription {
    let begin = Position::at_beginning(PositionKey {
        subscription: SubscriptionName::new(NEWS).unwrap(),
        topic: TopicName::new("news").unwrap(),
        partition: 0,
    });
    let act = Act::new("ops", "put subscription", NEWS);
    let (news, begins) = (subscription(NEWS, "news"), [begin]);
    let kept = store.keep_subscription(&news, Some(&begins), feed_of, &act);
    kept.await.unwrap()
}

pub(crate) async fn topologies_are_kept_by_version_with_their_acts<D: Database>(db: &D) {
    let store = db.open().await;
    let other = db.open().await;
    let act = |what: &str| Act::new("ops", what, "crawl");
    let none = Leaving::default();
    let before = other.topologies_version().await.unwrap();
    let apply = act("apply topology");
    let [first, second, third] =
        [(0, "a"), (0, "b"), (1, "b")].map(|(version, text)| topology("crawl", version, text));
    for _ in 0..2 {
        // The second time as if the COMMIT of the first was not answered.
        let kept = store.keep_topology(&first, &none, &apply);
        assert_eq!(kept.await.unwrap(), KeptTopology::Yes);
    }
    assert!(other.topologies_version().await.unwrap() > before);
    assert_eq!(
        other.topologies().await.unwrap(),
        [topology("crawl", 1, "a")]
    );
    // Two processes at once: both have read that there was none.
    let outrun = act("apply topology");
    let kept = store.keep_topology(&second, &none, &outrun);
    assert_eq!(kept.await.unwrap(), KeptTopology::Changed);

    // A stage that leaves with unfinished tasks.
    insert_new(&*store, &[row("crawl.parse", "k")]).await;
    let removed = ["crawl.none", "crawl.parse"].map(|name| QueueName::new(name).unwrap());
    let leaving = |queues: &[QueueName]| Leaving {
        queues: queues.to_vec(),
        subscriptions: vec![SubscriptionName::new(NEWS).unwrap()],
    };
    let in_force = topology("crawl", 7, "a");
    let kept = subscribe(&*store, Some(&in_force)).await;
    assert_eq!(kept, KeptSubscription::Yes);
    let (all, finished) = (leaving(&removed), leaving(&removed[..1]));
    let leave = act("apply topology");
    let kept = store.keep_topology(&third, &all, &leave);
    let unfinished = KeptTopology::Unfinished(vec![removed[1].clone()]);
    assert_eq!(kept.await.unwrap(), unfinished);
    let name = TopologyName::new("crawl").unwrap();
    let delete = act("delete topology");
    let deleted = store.delete_topology(&name, 1, &all, &delete);
    assert_eq!(deleted.await.unwrap(), unfinished);
    assert_eq!(
        store.topologies().await.unwrap(),
        [topology("crawl", 1, "a")]
    );
    assert_eq!(store.subscriptions().await.unwrap().len(), 1);

    let kept = store.keep_topology(&third, &finished, &leave);
    assert_eq!(kept.await.unwrap(), KeptTopology::Yes);
    assert_eq!(
        store.topologies().await.unwrap(),
        [topology("crawl", 2, "b")]
    );
    assert_eq!(store.subscriptions().await.unwrap(), []);
    assert_eq!(store.positions(None).await.unwrap(), []);
    // An apply of before that waited to make it.
    let kept = subscribe(&*store, Some(&in_force)).await;
    assert_eq!(kept, KeptSubscription::OtherFile);
    assert_eq!(store.subscriptions().await.unwrap(), []);
    assert_eq!(subscribe(&*store, None).await, KeptSubscription::Yes);
    let outrun = store.delete_topology(&name, 1, &none, &delete);
    assert_eq!(outrun.await.unwrap(), KeptTopology::Changed);
    for _ in 0..2 {
        let deleted = store.delete_topology(&name, 2, &finished, &delete);
        assert_eq!(deleted.await.unwrap(), KeptTopology::Yes);
    }
    assert_eq!(store.topologies().await.unwrap(), []);
    assert_eq!(store.subscriptions().await.unwrap(), []);
    assert_eq!(store.positions(None).await.unwrap(), []);
    let acts = store.acts(None, 10).await.unwrap();
    let done = acts.iter().map(|act| act.what.as_str());
    let done: Vec<_> = done.filter(|what| what.ends_with("topology")).collect();
    assert_eq!(
        done,
        ["delete topology", "apply topology", "apply topology"]
    );
}
