//! Tests of subscriptions and their positions.

use taskd::{
    model::{
        Act, Matching, OnDead, Position, PositionKey, PositionMove, ReadCounts, ReadUpTo,
        SequenceBy, Subscription, SubscriptionName, Topic, TopicName, TopicPattern, TopicSettings,
    },
    store::{KeptSubscription, KeptTopic, Sought, Store},
};

use super::*;

fn act(what: &str) -> Act {
    Act::new("ops", what, "s")
}

pub(super) fn subscription(name: &str, topic: &str) -> Subscription {
    Subscription {
        name: SubscriptionName::new(name).unwrap(),
        topics: TopicPattern::new(topic).unwrap(),
        queue: queue("q"),
        start: "$".to_owned(),
        matching: Matching::read(&serde_json::json!({"type": ["a", {"prefix": "b"}]})).unwrap(),
        sequence: SequenceBy::Key,
        on_dead: OnDead::Hold,
        created_unix_ms: NOW,
        version: 1,
    }
}

fn key(subscription: &str, topic: &str, partition: u32) -> PositionKey {
    PositionKey {
        subscription: SubscriptionName::new(subscription).unwrap(),
        topic: TopicName::new(topic).unwrap(),
        partition,
    }
}

fn up_to(major: u64, count: u64, replay: u64) -> ReadUpTo {
    ReadUpTo {
        after: Some(Offset { major, minor: 3 }),
        count: Some(count),
        replay,
    }
}

fn position(key: PositionKey, up_to: ReadUpTo) -> Position {
    Position {
        key,
        up_to,
        counts: ReadCounts::default(),
    }
}

pub(crate) async fn subscriptions_are_kept_with_their_positions<D: Database>(db: &D) {
    let store = db.open().await;
    let first = store.feeds_version().await.unwrap();
    let put = act("put subscription");
    let one = subscription("s", "t*");
    let begins = [
        position(key("s", "t1", 0), up_to(7, 10, 0)),
        Position::at_beginning(key("s", "t1", 1)),
        position(
            key("s", "t2", 0),
            ReadUpTo {
                count: None,
                ..up_to(u64::from(u32::MAX) + 1, 0, 0)
            },
        ),
    ];
    for _ in 0..2 {
        // The second time as if the COMMIT of the first was not answered.
        let kept = store
            .keep_subscription(&one, Some(&begins), None, &put)
            .await
            .unwrap();
        assert_eq!(kept, KeptSubscription::Yes);
    }
    assert_eq!(
        store.subscriptions().await.unwrap(),
        std::slice::from_ref(&one)
    );
    assert_eq!(store.positions(None).await.unwrap(), begins);
    assert!(store.feeds_version().await.unwrap() > first);

    // What exists keeps its topic, its start and its positions.
    let moved = subscription("s", "u");
    let kept = store
        .keep_subscription(&moved, Some(&[]), None, &act("put subscription"))
        .await
        .unwrap();
    assert_eq!(kept, KeptSubscription::OfTopic("t*".to_owned()));
    let changed = Subscription {
        queue: queue("other"),
        start: "0".to_owned(),
        matching: Matching::default(),
        sequence: SequenceBy::None,
        on_dead: OnDead::Next,
        created_unix_ms: NOW + 1,
        ..one.clone()
    };
    let elsewhere = [position(key("s", "t1", 0), up_to(99, 99, 0))];
    // Somebody else has made it, or changed it, since the caller read it.
    let other = Subscription {
        version: 2,
        ..changed.clone()
    };
    for (late, positions) in [(&changed, Some(&elsewhere[..])), (&other, None)] {
        let kept = store
            .keep_subscription(late, positions, None, &act("put subscription"))
            .await;
        assert_eq!(kept.unwrap(), KeptSubscription::Changed);
    }
    assert_eq!(
        store.subscriptions().await.unwrap(),
        std::slice::from_ref(&one)
    );
    let kept = store
        .keep_subscription(&changed, None, None, &act("put subscription"))
        .await
        .unwrap();
    assert_eq!(kept, KeptSubscription::Yes);
    let expected = Subscription {
        start: one.start.clone(),
        created_unix_ms: NOW,
        version: 2,
        ..changed
    };
    assert_eq!(store.subscriptions().await.unwrap(), [expected]);
    assert_eq!(store.positions(None).await.unwrap(), begins);

    // A missing position is added, for subscriptions that exist.
    let more = [
        elsewhere[0].clone(),
        Position::at_beginning(key("s", "t3", 0)),
        Position::at_beginning(key("gone", "t3", 0)),
    ];
    store.add_positions(&more).await.unwrap();
    let of_s = SubscriptionName::new("s").unwrap();
    let all = store.positions(None).await.unwrap();
    assert_eq!(all, [&begins[..], &more[1..2]].concat());
    assert_eq!(store.positions(Some(&of_s)).await.unwrap(), all);

    let delete = act("delete subscription");
    for _ in 0..2 {
        assert!(store.delete_subscription(&of_s, &delete).await.unwrap());
    }
    let again = act("delete subscription");
    assert!(!store.delete_subscription(&of_s, &again).await.unwrap());
    assert_eq!(store.positions(None).await.unwrap(), []);
    // A change that comes after the deletion must not make it anew, without positions.
    let late = act("put subscription");
    let kept = store
        .keep_subscription(&one, None, None, &late)
        .await
        .unwrap();
    assert_eq!(kept, KeptSubscription::Gone);
    assert_eq!(store.subscriptions().await.unwrap(), []);
    let acts = store.acts(None, 10).await.unwrap();
    assert_eq!(acts.len(), 3, "{acts:?}");
}

pub(crate) async fn a_position_moves_only_from_where_it_was_read<D: Database>(db: &D) {
    let store = db.open().await;
    let one = subscription("s", "t");
    let begins = [
        Position::at_beginning(key("s", "t", 0)),
        Position::at_beginning(key("s", "t", 1)),
    ];
    store
        .keep_subscription(&one, Some(&begins), None, &act("put subscription"))
        .await
        .unwrap();
    let version = store.feeds_version().await.unwrap();
    let counts = ReadCounts {
        read: 10,
        duplicates: 1,
        filtered: 2,
        refused: 3,
        skipped: 4,
    };
    let step = |from: ReadUpTo, to: ReadUpTo| PositionMove {
        key: key("s", "t", 0),
        from,
        to,
        counts,
    };
    let beginning = begins[0].up_to;
    let first = step(beginning, up_to(5, 10, 0));
    assert!(store.move_position(&first).await.unwrap());
    // Another feeder that read the same page.
    assert!(!store.move_position(&first).await.unwrap());
    let second = step(up_to(5, 10, 0), up_to(9, 20, 0));
    assert!(store.move_position(&second).await.unwrap());
    let of_s = SubscriptionName::new("s").unwrap();
    let mut twice = counts;
    twice.add(&counts);
    let expected = [
        Position {
            key: key("s", "t", 0),
            up_to: up_to(9, 20, 0),
            counts: twice,
        },
        begins[1].clone(),
    ];
    assert_eq!(store.positions(Some(&of_s)).await.unwrap(), expected);
    assert_eq!(store.feeds_version().await.unwrap(), version);

    // A feeder that read before the subscription was sent back changes nothing.
    let seek = act("seek subscription");
    for _ in 0..2 {
        let back = [(key("s", "t", 0), up_to(5, 10, 0))];
        let sought = store.seek(&of_s, &back, &seek).await.unwrap();
        let expected = Sought::To {
            replay: 1,
            before: vec![0],
        };
        assert_eq!(sought, expected);
    }
    let late = step(up_to(5, 10, 0), up_to(9, 20, 0));
    assert!(!store.move_position(&late).await.unwrap());
    let positions = store.positions(Some(&of_s)).await.unwrap();
    assert_eq!(positions[0].up_to, up_to(5, 10, 1));
    assert_eq!(
        (positions[1].up_to.after, positions[1].up_to.replay),
        (None, 1)
    );
    assert_eq!(positions[0].counts, twice, "counts go on");
    assert!(store.feeds_version().await.unwrap() > version);

    // The log of one partition is made anew. The next tasks of both have the same number, which no
    // earlier task has.
    let anew = step(up_to(5, 10, 1), up_to(0, 0, 2));
    assert!(store.move_position(&anew).await.unwrap());
    let sought = store.seek(&of_s, &[], &act("seek again")).await.unwrap();
    let expected = Sought::To {
        replay: 3,
        before: vec![1, 2],
    };
    assert_eq!(sought, expected);
    for position in store.positions(Some(&of_s)).await.unwrap() {
        assert_eq!(position.up_to.replay, 3);
    }
    let unknown = SubscriptionName::new("unknown").unwrap();
    let sought = store.seek(&unknown, &[], &act("seek")).await.unwrap();
    assert_eq!(sought, Sought::Unknown);
}

pub(crate) async fn positions_leave_with_their_topic<D: Database>(db: &D) {
    let store = db.open().await;
    let topic = Topic {
        name: TopicName::new("t").unwrap(),
        settings: TopicSettings::default(),
        created_unix_ms: NOW,
        is_deleting: false,
    };
    let kept = store.keep_topic(&topic, None, &act("put topic")).await;
    assert_eq!(kept.unwrap(), KeptTopic::Yes);
    let begins = [Position::at_beginning(key("s", "t", 0))];
    store
        .keep_subscription(
            &subscription("s", "t"),
            Some(&begins),
            None,
            &act("put subscription"),
        )
        .await
        .unwrap();
    // Nobody deletes the topic.
    store.end_delete_topic(&topic).await.unwrap();
    assert_eq!(store.positions(None).await.unwrap(), begins);
    let before = store.feeds_version().await.unwrap();
    store
        .begin_delete_topic(&topic, &act("delete topic"))
        .await
        .unwrap();
    assert!(store.feeds_version().await.unwrap() > before);
    assert_eq!(store.positions(None).await.unwrap(), begins);
    store.end_delete_topic(&topic).await.unwrap();
    assert_eq!(store.positions(None).await.unwrap(), []);
    assert_eq!(store.subscriptions().await.unwrap().len(), 1);
}

pub(crate) async fn thousands_of_positions_are_added_and_sent_back<D: Database>(db: &D) {
    const MANY: u32 = 5_000;
    let store = db.open().await;
    let all = |up_to: fn(u32) -> ReadUpTo| -> Vec<Position> {
        let positions = (0..MANY).map(|part| position(key("s", "t", part), up_to(part)));
        positions.collect()
    };
    let one = subscription("s", "t");
    let begins = all(|part| up_to(u64::from(part), 1, 0));
    let first = &begins[..1_000];
    let put = act("put subscription");
    let kept = store.keep_subscription(&one, Some(first), None, &put).await;
    assert_eq!(kept.unwrap(), KeptSubscription::Yes);
    assert_eq!(store.positions(None).await.unwrap(), first);
    let before = store.feeds_version().await.unwrap();
    store.add_positions(&begins).await.unwrap();
    // In between, others change topics and subscriptions.
    let transactions = store.feeds_version().await.unwrap() - before;
    assert!(transactions > 1, "{transactions}");
    assert_eq!(store.positions(None).await.unwrap(), begins);
    let mut to: Vec<(PositionKey, ReadUpTo)> = Vec::new();
    for part in 0..MANY {
        to.push((key("s", "t", part), up_to(u64::from(part) + 7, 2, 0)));
    }
    // Its topic was deleted a moment ago.
    to.push((key("s", "u", 0), up_to(7, 2, 0)));
    let sought = store.seek(&one.name, &to, &act("seek")).await.unwrap();
    let expected = Sought::To {
        replay: 1,
        before: vec![0],
    };
    assert_eq!(sought, expected);
    let sent = all(|part| up_to(u64::from(part) + 7, 2, 1));
    assert_eq!(store.positions(None).await.unwrap(), sent);
}
