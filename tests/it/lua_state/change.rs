//! The scripts that cancel, change and requeue tasks, over every form of a record.

use futures::StreamExt as _;
use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, WEIGHT, body, changed, element, flat, id, lease, report::complete};

/// Each item: id, NUM, epoch.
pub(super) fn cancel(call: &mut Call, items: &[(char, u32, u32)]) {
    call.arg("t:wake");
    for (letter, num, epoch) in items {
        call.arg(id(*letter)).arg(num).arg(epoch);
    }
}

impl Fixture {
    pub(super) async fn cancelled(&self, items: &[(char, u32, u32)]) -> Vec<String> {
        flat(
            self.run(&scripts::CANCEL, |call| cancel(call, items))
                .await
                .expect("cancel"),
        )
    }
}

#[tokio::test]
async fn cancel_ends_a_task_that_waits_and_one_that_is_held() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.held('b', "w", 4).await;
    f.waiting('c', 1, b"1").await;
    f.seed("HSET", "bodies", &[b"aaaaaaaaaaaaaaaah", b"head"])
        .await;
    let before = f.state().await;
    assert_eq!(
        f.cancelled(&[('a', 1, 0), ('b', 1, 0), ('a', 1, 0)]).await,
        ["7", "1", "1", "1"]
    );
    let x = format!(r#"["X",1,0,[],[],[],{NOW}]"#);
    let after = f.state().await;
    changed(
        &before,
        &after,
        &[
            ("records", &[&format!("a={x}"), &format!("b={x}"), "c=1"]),
            ("bodies", &["c=body2"]),
            ("leases", &[]),
            ("finals", &["a", "b"]),
            (
                "counters",
                &["open=1", &format!("open_bytes={WEIGHT}"), "live=1"],
            ),
        ],
    );
    // The element that is left in the lane offers nothing.
    assert_eq!(after["m:T"], ["1/0/c", "1/0/a"]);
}

#[tokio::test]
async fn cancel_ends_all_leases_and_backoffs_of_a_task_of_several() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"m\x04\x02\x01\nu\tc1\nw\th2\nv\th3\n"],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    // ["L", 3, 1, ["9"], [], ["w", "5"], 0, 1]: one replica is left.
    f.seed(
        "HSET",
        "records",
        &[
            &id('b'),
            b"\x98\xa1L\x03\x01\x91\xa19\x90\x92\xa1w\xa15\x00\x01",
        ],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('b'), &body(2)]).await;
    for (letter, grant) in [('a', 2), ('a', 3), ('b', 5)] {
        f.seed(
            "ZADD",
            "leases",
            &[NOW.to_string().as_bytes(), &lease(letter, grant)],
        )
        .await;
    }
    f.seed(
        "ZADD",
        "delayed",
        &[NOW.to_string().as_bytes(), &lease('b', 9)],
    )
    .await;
    f.seed("LPUSH", "mr:T", &[&element(3, 1, 'b')]).await;
    f.seed(
        "HSET",
        "counters",
        &[b"live", b"2", b"open", b"2", b"open_bytes", b"826"],
    )
    .await;
    let before = f.state().await;
    assert_eq!(
        f.cancelled(&[('a', 4, 0), ('b', 3, 0)]).await,
        ["7", "1", "1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[
                    &format!(r#"a=["X",4,0,[],["u","1"],[],{NOW}]"#),
                    &format!(r#"b=["X",3,1,[],[],[],{NOW},1]"#),
                ],
            ),
            ("bodies", &[]),
            ("leases", &[]),
            ("delayed", &[]),
            ("finals", &["a", "b"]),
            ("counters", &["live=0", "open=0", "open_bytes=0"]),
        ],
    );
}

#[tokio::test]
async fn cancel_ends_a_task_before_its_time() {
    let f = Fixture::new().await;
    // ["L", 1, 0, [""], [], [], 0]
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"\x97\xa1L\x01\x00\x91\xa0\x90\x90\x00"],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(1)]).await;
    f.seed(
        "ZADD",
        "delayed",
        &[(NOW + 9).to_string().as_bytes(), &id('a')],
    )
    .await;
    f.seed("HSET", "counters", &[b"live", b"1"]).await;
    let before = f.state().await;
    assert_eq!(f.cancelled(&[('a', 1, 0)]).await, ["7", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &[&format!(r#"a=["X",1,0,[],[],[],{NOW}]"#)]),
            ("bodies", &[]),
            ("delayed", &[]),
            ("finals", &["a"]),
            ("counters", &["live=0"]),
        ],
    );
}

#[tokio::test]
async fn cancel_keeps_a_final_record_for_a_task_that_has_not_arrived() {
    let f = Fixture::new().await;
    // A record that cannot be read counts as none.
    f.seed("HSET", "records", &[&id('b'), b"\xc1"]).await;
    f.seed("HSET", "bodies", &[&id('b'), &body(2)]).await;
    f.seed("HSET", "counters", &[b"live", b"1"]).await;
    let before = f.state().await;
    assert_eq!(
        f.cancelled(&[('a', 3, 0), ('b', 1, 2)]).await,
        ["7", "1", "1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[
                    &format!(r#"a=["X",3,0,[],[],[],{NOW}]"#),
                    &format!(r#"b=["X",1,0,[],[],[],{NOW},0,[],[],2]"#),
                ],
            ),
            ("bodies", &[]),
            ("finals", &["a", "b"]),
            ("counters", &["fence=2", "live=0"]),
        ],
    );
}

#[tokio::test]
async fn cancel_says_how_a_task_ended_before_and_changes_nothing() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"f5:1:w", &id('b'), b"e\x025\nu\tc1\nw\tc2\n"],
    )
    .await;
    // ["D", 1, 2, [], [], [], 5], ["X", …] and a live one of the task's second epoch.
    f.seed(
        "HSET",
        "records",
        &[&id('c'), b"\x97\xa1D\x01\x02\x90\x90\x90\x05"],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[&id('d'), b"\x97\xa1X\x01\x02\x90\x90\x90\x05"],
    )
    .await;
    let again = b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x01";
    f.seed("HSET", "records", &[&id('e'), again]).await;
    f.seed("RPUSH", "finals", &[&id('a'), &id('b'), &id('c'), &id('d')])
        .await;
    let before = f.state().await;
    let items = [
        ('a', 1, 0),
        ('b', 2, 0),
        ('c', 1, 0),
        ('d', 1, 0),
        ('e', 1, 0),
    ];
    assert_eq!(f.cancelled(&items).await, ["7", "2", "2", "3", "1", "4"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn cancel_ends_a_task_that_was_sent_again_whatever_is_left_of_its_end() {
    let f = Fixture::new().await;
    // The end of the first epoch is still there, and the task of the second is on its way. Its
    // entry in the list stays.
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"\x98\xa1D\x01\x02\x90\x90\x90\x05\x03"],
    )
    .await;
    // This one has arrived.
    f.seed(
        "HSET",
        "records",
        &[
            &id('b'),
            b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x04\x90\x90\x01",
        ],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('b'), &body(2)]).await;
    f.seed(
        "HSET",
        "counters",
        &[b"live", b"1", b"open", b"1", b"open_bytes", b"413"],
    )
    .await;
    f.seed("RPUSH", "finals", &[&id('a'), &id('z')]).await;
    let before = f.state().await;
    assert_eq!(
        f.cancelled(&[('a', 1, 1), ('b', 1, 1)]).await,
        ["7", "1", "1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[
                    &format!(r#"a=["X",1,0,[],[],[],{NOW},3,[],[],1,false,1]"#),
                    &format!(r#"b=["X",1,0,[],[],[],{NOW},4,[],[],1]"#),
                ],
            ),
            ("bodies", &[]),
            ("finals", &["a", "z", "a", "b"]),
            ("counters", &["live=0", "open=0", "open_bytes=0", "fence=1"]),
        ],
    );
}

#[tokio::test]
async fn the_holder_of_a_cancelled_task_is_told_so() {
    let f = Fixture::new().await;
    f.held('a', "w", 4).await;
    assert_eq!(f.cancelled(&[('a', 1, 0)]).await, ["7", "1"]);
    let before = f.state().await;
    let answer = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 4, "w")])
        })
        .await
        .expect("complete");
    assert_eq!(flat(answer), ["6"]);
    let extend = |call: &mut Call| {
        call.arg(id('a')).arg("7").arg(4).arg("w").arg(1000);
    };
    assert_eq!(
        flat(f.run(&scripts::EXTEND, extend).await.expect("extend")),
        ["6", "0"]
    );
    let reject = |call: &mut Call| {
        call.arg(1)
            .arg("wake")
            .arg("q")
            .arg(b"\x91\x01")
            .arg(1000)
            .arg(id('a'))
            .arg("7")
            .arg(4)
            .arg("w")
            .arg("retry");
        call.arg("").arg("no").arg("failed");
    };
    assert_eq!(
        flat(f.run(&scripts::REJECT, reject).await.expect("reject")),
        ["6", "0"]
    );
    assert_eq!(f.state().await, before);
}

/// Each item: id, NUM, priority, epoch.
pub(super) fn update(call: &mut Call, items: &[(char, u32, u8, u32)]) {
    call.arg("wake").arg("q");
    for (letter, num, priority, epoch) in items {
        call.arg(id(*letter))
            .arg(num)
            .arg(priority)
            .arg(epoch)
            .arg("+tail");
    }
}

impl Fixture {
    async fn updated(&self, items: &[(char, u32, u8, u32)]) -> Vec<String> {
        flat(
            self.run(&scripts::CHANGE, |call| update(call, items))
                .await
                .expect("change"),
        )
    }

    async fn requeued(&self, letter: char, mode: &str, worker: &str, until: i64) -> Vec<String> {
        let requeue = |call: &mut Call| {
            call.arg("wake")
                .arg("q")
                .arg(id(letter))
                .arg(0)
                .arg(mode)
                .arg(worker)
                .arg(until);
        };
        flat(self.run(&scripts::REQUEUE, requeue).await.expect("requeue"))
    }
}

/// The bytes of a body that was changed.
const TAIL: u64 = 5;

#[tokio::test]
async fn change_moves_a_waiting_task_to_another_lane_once() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.waiting('b', 1, b"1").await;
    let before = f.state().await;
    for _ in 0..2 {
        assert_eq!(
            f.updated(&[('a', 1, 1, 0), ('b', 1, 2, 0)]).await,
            ["7", "1", "0", "1", "0"]
        );
    }
    let after = f.state().await;
    assert_eq!(after["hr:T"], ["1/1/a"]);
    let mut expected = before.clone();
    expected.insert("hr:T".into(), vec!["1/1/a".into()]);
    changed(
        &expected,
        &after,
        &[
            ("records", &[r#"a=["L",1,0,[],[],[],0,1]"#, "b=1"]),
            ("bodies", &[&after["bodies"][0], "b=body2"]),
            (
                "counters",
                &[
                    "largest_body=18",
                    "live=2",
                    "open=2",
                    &format!("open_bytes={}", 2 * WEIGHT + TAIL),
                ],
            ),
        ],
    );
    assert!(
        after["bodies"][0].starts_with("a=\u{1}") && after["bodies"][0].ends_with("text+tail"),
        "{after:?}"
    );
}

#[tokio::test]
async fn a_higher_num_is_offered_and_a_lower_one_ends_what_is_out() {
    let f = Fixture::new().await;
    f.held('a', "w", 4).await;
    assert_eq!(f.updated(&[('a', 3, 2, 0)]).await, ["7", "1", "0"]);
    let state = f.state().await;
    assert_eq!(state["records"], [r#"a=["L",3,0,[],[],["w","4"],0,1]"#]);
    assert_eq!(
        (
            &state["mr:T"][..],
            state["counters"].contains(&"open=1".to_owned())
        ),
        (&["3/1/a".to_owned()][..], true)
    );

    // u and v have completed it, w holds it and one replica waits: with NUM 2 it is completed.
    f.seed("DEL", "mr:T", &[]).await;
    f.seed(
        "HSET",
        "counters",
        &[b"open", b"0", b"open_bytes", b"0", b"live", b"1"],
    )
    .await;
    let record = br#"["L",4,1,["9"],["u","1","v","2"],["w","4"],0,1]"#;
    let record: serde_json::Value = serde_json::from_slice(record).expect("JSON");
    f.seed(
        "HSET",
        "records",
        &[&id('a'), &rmp_serde::to_vec(&record).expect("packed")],
    )
    .await;
    f.seed(
        "ZADD",
        "delayed",
        &[NOW.to_string().as_bytes(), &lease('a', 9)],
    )
    .await;
    assert_eq!(f.updated(&[('a', 3, 2, 0)]).await, ["7", "1", "2"]);
    let state = f.state().await;
    assert_eq!(
        state["records"],
        [r#"a=["L",3,1,[],["u","1","v","2"],["w","4"],0,1]"#],
        "what waits comes back first"
    );
    assert!(!state.contains_key("delayed") && state["leases"].len() == 1);
    assert_eq!(f.updated(&[('a', 2, 2, 0)]).await, ["7", "2", "2"]);
    let state = f.state().await;
    assert_eq!(
        state["records"],
        [format!(r#"a=["F",2,1,[],["u","1","v","2"],[],{NOW},1]"#)]
    );
    assert_eq!(
        (&state["finals"][..], state.contains_key("leases")),
        (&["a".to_owned()][..], false)
    );
    assert!(state["counters"].contains(&"live=0".to_owned()));
    // The same again, and a NUM that the completed task does not reach.
    assert_eq!(f.updated(&[('a', 2, 2, 0)]).await, ["7", "2", "2"]);
    assert_eq!(f.updated(&[('a', 9, 2, 0)]).await, ["7", "2", "2"]);
    assert_eq!(f.state().await, state);
}

#[tokio::test]
async fn a_num_below_the_credits_leaves_a_record_that_can_be_read() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"m\x04\x01\x02\nu\tc1\nv\tc2\nw\th3\n"],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    f.seed(
        "HSET",
        "counters",
        &[b"open", b"1", b"open_bytes", b"413", b"live", b"1"],
    )
    .await;
    assert_eq!(f.updated(&[('a', 1, 2, 0)]).await, ["7", "2", "2"]);
    assert_eq!(
        f.state().await["records"],
        [format!(r#"a=["F",1,0,[],["u","1","v","2"],[],{NOW}]"#)]
    );
    let answer = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 2, "v"), ('a', "7", 3, "w")])
        })
        .await;
    assert_eq!(flat(answer.expect("complete")), ["24"]);
}

#[tokio::test]
async fn change_of_a_task_that_is_not_there_only_moves_the_fence() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[&id('b'), b"\x97\xa1D\x01\x02\x90\x90\x90\x05"],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[&id('c'), b"\x97\xa1X\x01\x02\x90\x90\x90\x05"],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[
            &id('d'),
            b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x01",
        ],
    )
    .await;
    let before = f.state().await;
    let items = [
        ('a', 2, 1, 0),
        ('b', 2, 1, 0),
        ('b', 2, 1, 1),
        ('c', 2, 1, 0),
        ('d', 2, 1, 0),
        ('e', 2, 1, 0),
    ];
    let expected = [
        "7", "5", "0", "3", "0", "5", "0", "6", "0", "4", "0", "5", "0",
    ];
    assert_eq!(f.updated(&items).await, expected);
    // It may be on its way from SQL past the bus, with the NUM that it had. One move will do for
    // all of a call.
    changed(&before, &f.state().await, &[("counters", &["fence=1"])]);
}

#[tokio::test]
async fn requeue_ends_leases_and_backoffs_and_offers_the_task_anew() {
    let f = Fixture::new().await;
    f.held('a', "w", 4).await;
    let before = f.state().await;
    assert_eq!(f.requeued('a', "all", "", 0).await, ["7", "1", "0"]);
    let mut expected = before.clone();
    expected.insert("mr:T".into(), vec!["1/1/a".into()]);
    let bytes = format!("open_bytes={WEIGHT}");
    changed(
        &expected,
        &f.state().await,
        &[
            ("records", &[r#"a=["L",1,0,[],[],[],0,1]"#]),
            ("leases", &[]),
            ("counters", &["live=1", "open=1", &bytes]),
        ],
    );
    // Its time has not come: it stays as it is.
    f.seed(
        "HSET",
        "records",
        &[&id('b'), b"\x97\xa1L\x01\x00\x91\xa0\x90\x90\x00"],
    )
    .await;
    let before = f.state().await;
    assert_eq!(f.requeued('b', "all", "", 0).await, ["7", "7", "0"]);
    assert_eq!(f.requeued('c', "all", "", 0).await, ["7", "5", "0"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn a_worker_from_whom_a_task_was_taken_does_not_get_it_again() {
    let f = Fixture::new().await;
    f.held('a', "w", 4).await;
    assert_eq!(f.requeued('a', "away", "w", 0).await, ["7", "1", "0"]);
    let state = f.state().await;
    assert_eq!(
        state["records"],
        [r#"a=["L",1,0,[],[],[],0,1,["w",-1,"w",0]]"#]
    );
    assert!(!state.contains_key("leases"));
    let got = async |worker| {
        let answer = f
            .run(&scripts::CLAIM, |call| {
                super::claim::claim(call, &[(worker, 1)])
            })
            .await
            .expect("claim");
        flat(answer).len() > 2
    };
    assert_eq!((got("w").await, got("v").await), (false, true));
    // Not even when v gives it back, and when w is not its holder.
    assert_eq!(f.requeued('a', "away", "x", 0).await, ["7", "1", "0"]);
    assert_eq!(
        f.state().await["records"],
        [r#"a=["L",1,0,[],[],["v","1"],0,1,["x",-1,"w",-1,"w",0,"x",0]]"#]
    );
}

#[tokio::test]
async fn a_reserved_task_goes_to_its_worker_until_the_end() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    assert_eq!(f.requeued('a', "to", "w", NOW + 9).await, ["7", "1", "0"]);
    let reserved = format!(r#"a=["L",1,0,[],[],[],0,1,[],[],0,["w",{}]]"#, NOW + 9);
    assert_eq!(f.state().await["records"], std::slice::from_ref(&reserved));
    let got = async |worker| {
        let answer = f
            .run(&scripts::CLAIM, |call| {
                super::claim::claim(call, &[(worker, 1)])
            })
            .await
            .expect("claim");
        flat(answer).len() > 2
    };
    assert!(!got("v").await);
    // Its time is not over.
    let until = (NOW + 9).to_string();
    assert_eq!(f.requeued('a', "free", "", 0).await, ["7", "9", &until]);
    assert_eq!(f.state().await["records"], [reserved]);
    assert_eq!(f.requeued('a', "to", "w", NOW).await, ["7", "1", "0"]);
    assert_eq!(f.requeued('a', "free", "", 0).await, ["7", "1", "0"]);
    assert_eq!(
        f.state().await["records"],
        [r#"a=["L",1,0,[],[],[],0,3,[],[],0]"#]
    );
    assert!(got("v").await);
    // A worker that has completed it cannot do it twice.
    f.seed("HSET", "records", &[&id('b'), b"m\x02\x00\x01\nw\tc1\n"])
        .await;
    assert_eq!(f.requeued('b', "to", "w", NOW + 9).await, ["7", "8", "0"]);
}

/// A live task with this record, as JSON.
pub(super) async fn live(f: &Fixture, letter: char, record: &str) {
    let record: serde_json::Value = serde_json::from_str(record).expect("JSON");
    f.seed(
        "HSET",
        "records",
        &[&id(letter), &rmp_serde::to_vec(&record).expect("packed")],
    )
    .await;
    f.seed("HSET", "bodies", &[&id(letter), &body(2)]).await;
    f.seed("HINCRBY", "counters", &[b"live", b"1"]).await;
}

#[tokio::test]
async fn a_reservation_ends_when_its_worker_has_done_its_replica() {
    let f = Fixture::new().await;
    live(
        &f,
        'a',
        r#"["L",2,0,[],[],["w","4"],0,1,[],[],0,["w",900]]"#,
    )
    .await;
    live(
        &f,
        'b',
        r#"["L",3,0,[],["v","2"],["w","5"],0,1,[],[],0,["w",900]]"#,
    )
    .await;
    live(
        &f,
        'c',
        r#"["L",3,0,[],[],["v","6"],0,1,[],[],0,["w",900]]"#,
    )
    .await;
    live(
        &f,
        'd',
        r#"["L",1,0,[],[],["w","7"],0,1,[],[],0,["w",900]]"#,
    )
    .await;
    for (letter, grant) in [('a', 4), ('b', 5), ('c', 6), ('d', 7)] {
        f.seed(
            "ZADD",
            "leases",
            &[NOW.to_string().as_bytes(), &lease(letter, grant)],
        )
        .await;
    }
    f.seed(
        "HSET",
        "counters",
        &[
            b"open",
            b"3",
            b"open_bytes",
            (3 * WEIGHT).to_string().as_bytes(),
        ],
    )
    .await;
    let items = [
        ('a', "7", 4, "w"),
        ('b', "7", 5, "w"),
        ('c', "7", 6, "v"),
        ('d', "7", 7, "w"),
    ];
    let answer = f
        .run(&scripts::COMPLETE, |call| complete(call, &items))
        .await
        .expect("complete");
    assert_eq!(flat(answer), ["11110"], "a task is due behind the codes");
    let state = f.state().await;
    let expected = [
        r#"a=["L",2,0,["4"],["w","4"],[],0,1,[],[],0]"#.to_owned(),
        r#"b=["L",3,0,["5"],["v","2","w","5"],[],0,1,[],[],0]"#.to_owned(),
        // The worker of the reservation has not had it yet.
        r#"c=["L",3,0,[],["v","6"],[],0,1,[],[],0,["w",900]]"#.to_owned(),
        format!(r#"d=["F",1,0,[],["w","7"],[],{NOW},1,[],[],0]"#),
    ];
    assert_eq!(state["records"], expected);
    assert_eq!(state["delayed"], [format!("a4={NOW}"), format!("b5={NOW}")]);
    // c has two replicas left. The others come back with the promotion.
    let bytes = format!("open_bytes={WEIGHT}");
    assert!(
        ["open=1", &bytes]
            .iter()
            .all(|count| state["counters"].contains(&(*count).to_owned())),
        "{state:?}"
    );
    let promote = |call: &mut Call| {
        call.arg("wake").arg("q").arg(10).arg(1000);
    };
    f.run(&scripts::PROMOTE, promote).await.expect("promote");
    let state = f.state().await;
    assert_eq!(state["mr:T"], ["3/2/b", "2/2/a"]);
    assert_eq!(
        state["records"][0],
        r#"a=["L",2,0,[],["w","4"],[],0,2,[],[],0]"#
    );
    assert!(
        state["counters"].contains(&"open=3".to_owned()) && !state.contains_key("delayed"),
        "{state:?}"
    );
}

fn reject<'a>(
    letter: char,
    grant: u64,
    worker: &'a str,
    mode: &'a str,
) -> impl FnOnce(&mut Call) + 'a {
    move |call| {
        call.arg(1).arg("wake").arg("q").arg(b"\x91\x01").arg(1000);
        call.arg(id(letter))
            .arg("7")
            .arg(grant)
            .arg(worker)
            .arg(mode)
            .arg("0")
            .arg("no")
            .arg("");
    }
}

#[tokio::test]
async fn a_reservation_ends_when_its_worker_is_refused() {
    let f = Fixture::new().await;
    let reserved = r#"["L",2,0,[],[],["w","4"],0,1,[],[],0,["w",900]]"#;
    live(&f, 'a', reserved).await;
    live(&f, 'b', reserved).await;
    for letter in ['a', 'b'] {
        f.seed(
            "ZADD",
            "leases",
            &[NOW.to_string().as_bytes(), &lease(letter, 4)],
        )
        .await;
    }
    f.run(&scripts::REJECT, reject('a', 4, "w", "never"))
        .await
        .expect("reject");
    f.run(&scripts::REJECT, reject('b', 4, "w", "retry"))
        .await
        .expect("reject");
    let log = format!(r#"[{NOW},"w","no"]"#);
    let expected = [
        format!(r#"a=["L",2,2,[],[],[],0,2,["w",-1],{log},0]"#),
        format!(r#"b=["L",2,1,[],[],[],0,2,["w",1],{log},0,["w",900]]"#),
    ];
    assert_eq!(f.state().await["records"], expected);
}

#[tokio::test]
async fn a_requeue_for_all_lets_everybody_have_it_who_was_refused() {
    let f = Fixture::new().await;
    // An operator took it from w. With NUM 2, v had failed it twice, as often as it may; x once; u
    // was taken away.
    live(&f, 'a', r#"["L",1,0,[],[],[],0,1,["w",-1,"w",0]]"#).await;
    live(&f, 'b', r#"["L",2,3,[],[],[],0,1,["v",-1,"x",1]]"#).await;
    assert_eq!(f.requeued('b', "away", "u", 0).await, ["7", "1", "0"]);
    assert_eq!(f.requeued('b', "away", "x", 0).await, ["7", "1", "0"]);
    let away = r#"b=["L",2,3,[],[],[],0,3,["x",-1,"u",-1,"v",-1,"x",1,"u",0]]"#;
    assert_eq!(f.state().await["records"][1], away);
    for letter in ['a', 'b'] {
        assert_eq!(f.requeued(letter, "all", "", 0).await, ["7", "1", "0"]);
    }
    let state = f.state().await;
    assert_eq!(state["records"][0], r#"a=["L",1,0,[],[],[],0,2,[]]"#);
    assert_eq!(
        state["records"][1],
        r#"b=["L",2,3,[],[],[],0,4,["x",1,"v",2]]"#
    );
    // The failures of v have counted, and one worker alone must not kill the task: one more bars
    // it, at no cost.
    let claim = |call: &mut Call| super::claim::claim(call, &[("v", 2)]);
    f.run(&scripts::CLAIM, claim).await.expect("claim");
    assert!(
        f.state().await["records"][1].contains(r#"["v","1"]"#),
        "{:?}",
        f.state().await
    );
    f.run(&scripts::REJECT, reject('b', 1, "v", "retry"))
        .await
        .expect("reject");
    let state = f.state().await;
    assert!(
        state["records"][1].starts_with(r#"b=["L",2,3,[],[],[],0,5,["x",1,"v",-1],"#),
        "{state:?}"
    );
    // A reservation for it lifts this, too.
    assert_eq!(f.requeued('b', "to", "v", NOW + 9).await, ["7", "1", "0"]);
    assert!(f.state().await["records"][1].contains(r#"["x",1,"v",2]"#));
}

#[tokio::test]
async fn a_worker_from_whom_a_task_for_one_was_taken_may_fail_it_as_often_as_others_do() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    let before = f.state().await;
    assert_eq!(f.requeued('a', "away", "w", 0).await, ["7", "1", "0"]);
    assert_eq!(f.updated(&[('a', 2, 2, 0)]).await, ["7", "1", "0"]);
    assert_eq!(f.requeued('a', "all", "", 0).await, ["7", "1", "0"]);
    let after = f.state().await;
    let mut expected = before;
    expected.insert(
        "mr:T".into(),
        ["2/3/a", "2/2/a", "1/1/a"].map(Into::into).into(),
    );
    let counters = [
        "live=1",
        "open=1",
        &format!("open_bytes={}", WEIGHT + TAIL),
        "largest_body=18",
    ];
    let records = r#"a=["L",2,0,[],[],[],0,3,[]]"#;
    let bodies: &[&str] = &[&after["bodies"][0]];
    changed(
        &expected,
        &after,
        &[
            ("records", &[records]),
            ("bodies", bodies),
            ("counters", &counters),
        ],
    );

    // It fails the task for the first time, of two.
    let claim = |call: &mut Call| super::claim::claim(call, &[("w", 1)]);
    f.run(&scripts::CLAIM, claim).await.expect("claim");
    f.run(&scripts::REJECT, reject('a', 1, "w", "retry"))
        .await
        .expect("reject");
    let log = format!(r#"[{NOW},"w","no"]"#);
    assert_eq!(
        f.state().await["records"],
        [format!(r#"a=["L",2,1,[],[],[],0,4,["w",1],{log}]"#)]
    );
}

/// The failures at a higher NUM count when that comes again.
#[tokio::test]
async fn a_lower_num_forgets_no_failures_of_a_worker_that_was_refused() {
    let f = Fixture::new().await;
    live(&f, 'a', r#"["L",2,2,[],[],[],0,1,["w",-1],[]]"#).await;
    f.seed(
        "HSET",
        "counters",
        &[b"open", b"1", b"open_bytes", WEIGHT.to_string().as_bytes()],
    )
    .await;
    let before = f.state().await;
    assert_eq!(f.updated(&[('a', 1, 2, 0)]).await, ["7", "1", "0"]);
    assert_eq!(f.requeued('a', "all", "", 0).await, ["7", "1", "0"]);
    assert_eq!(f.updated(&[('a', 2, 2, 0)]).await, ["7", "1", "0"]);
    let after = f.state().await;
    let mut expected = before;
    expected.insert(
        "mr:T".into(),
        ["2/4/a", "1/3/a", "1/2/a"].map(Into::into).into(),
    );
    let counters = [
        "live=1",
        "open=1",
        &format!("open_bytes={}", WEIGHT + 2 * TAIL),
        "largest_body=23",
    ];
    let records = r#"a=["L",2,2,[],[],[],0,4,["w",2],[]]"#;
    let bodies: &[&str] = &[&after["bodies"][0]];
    changed(
        &expected,
        &after,
        &[
            ("records", &[records]),
            ("bodies", bodies),
            ("counters", &counters),
        ],
    );

    // One more bars it, at no cost: it cannot kill the task alone.
    let claim = |call: &mut Call| super::claim::claim(call, &[("w", 1)]);
    f.run(&scripts::CLAIM, claim).await.expect("claim");
    f.run(&scripts::REJECT, reject('a', 1, "w", "retry"))
        .await
        .expect("reject");
    let log = format!(r#"[{NOW},"w","no"]"#);
    assert_eq!(
        f.state().await["records"],
        [format!(r#"a=["L",2,2,[],[],[],0,5,["w",-1],{log}]"#)]
    );
}

#[tokio::test]
async fn a_body_keeps_one_tail_however_often_it_is_changed() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    let head = [&[2][..], &2_u32.to_be_bytes(), &30_000_u32.to_be_bytes()].concat();
    // A key, a payload that ends like a tail, a header, NUM, priority, the encoding of the payload.
    let fields =
        b"\x0a\x01k\x12\x06xy\x28\x07\x30\x02\x1a\x06\x0a\x01h\x12\x01v\x28\x03\x30\x02\x38\x01";
    f.seed("HSET", "bodies", &[&id('a'), &[&head[..], fields].concat()])
        .await;
    let bytes = 409 + fields.len() as u64;
    f.seed(
        "HSET",
        "counters",
        &[b"open_bytes", bytes.to_string().as_bytes()],
    )
    .await;
    for (num, priority) in [(2, 1), (3, 3), (300, 2), (4, 1)] {
        let tail: &[u8] = if num == 300 {
            b"\x28\xac\x02\x30\x02"
        } else {
            &[0x28, num as u8, 0x30, priority]
        };
        let change = |call: &mut Call| {
            call.arg("wake")
                .arg("q")
                .arg(id('a'))
                .arg(num)
                .arg(priority)
                .arg(0)
                .arg(tail);
        };
        assert_eq!(
            flat(f.run(&scripts::CHANGE, change).await.expect("change")),
            ["7", "1", "0"]
        );
        let body: Vec<u8> = redis::cmd("HGET")
            .arg("t:{q:0}:bodies")
            .arg(id('a'))
            .query_async(&mut f.redis.conn())
            .await
            .expect("a body");
        assert_eq!(body, [&[priority][..], &head[1..], fields, tail].concat());
        let bytes = format!("open_bytes={}", bytes + tail.len() as u64);
        assert!(
            f.state().await["counters"].contains(&bytes),
            "{bytes}: {:?}",
            f.state().await
        );
    }
}

/// Sessions hear which leases a requeue or a change has ended, by id and grant, and of no other.
#[tokio::test]
async fn leases_that_end_before_their_time_are_told() {
    let f = Fixture::new().await;
    // The grants of a call with a secret have 15 digits.
    let long = [100_000_000_000_001, 920_000_000_009_999, (1 << 53) - 1];
    for (letter, grant) in [
        ('a', 4),
        ('b', 5),
        ('c', 300),
        ('d', 6),
        ('f', long[0]),
        ('g', long[1]),
        ('h', long[2]),
    ] {
        f.held(letter, "w", grant).await;
    }
    let (mut sink, mut messages) = f.redis.pubsub().await.expect("pubsub").split();
    sink.subscribe("wake").await.expect("subscribed");
    let lease = |letter: char, grant: u64| [&id(letter)[..], &grant.to_be_bytes()].concat();
    f.requeued('a', "all", "", 0).await;
    f.requeued('b', "away", "v", 0).await;
    f.requeued('c', "away", "w", 0).await;
    f.requeued('d', "to", "v", NOW + 9).await;
    // NUM 3 with three holders becomes 1: the last two end.
    f.seed(
        "HSET",
        "records",
        &[&id('e'), b"m\x03\x03\x00\nu\th7\nv\th8\nw\th9\n"],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('e'), &body(2)]).await;
    assert_eq!(f.updated(&[('e', 1, 2, 0)]).await, ["7", "1", "0"]);
    for letter in ['f', 'g', 'h'] {
        f.requeued(letter, "all", "", 0).await;
    }
    let _: redis::Value = redis::cmd("PUBLISH")
        .arg("wake")
        .arg("end")
        .query_async(&mut f.redis.conn())
        .await
        .expect("publish");
    let mut told = Vec::new();
    while let Some(message) = messages.next().await {
        match message.get_payload_bytes() {
            b"end" => break,
            [b'?', leases @ ..] => told.extend(leases.chunks(24).map(<[u8]>::to_vec)),
            wake => assert_eq!(wake, b"q"),
        }
    }
    let short = [
        lease('a', 4),
        lease('c', 300),
        lease('d', 6),
        lease('e', 9),
        lease('e', 8),
    ];
    let long = [
        lease('f', long[0]),
        lease('g', long[1]),
        lease('h', long[2]),
    ];
    assert_eq!(told, [&short[..], &long].concat());
}
