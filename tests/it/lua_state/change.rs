//! The script that cancels tasks, over every form of a record.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, WEIGHT, body, changed, element, flat, id, lease, report::complete};

/// Each item: id, NUM, epoch.
fn cancel(call: &mut Call, items: &[(char, u32, u32)]) {
    for (letter, num, epoch) in items {
        call.arg(id(*letter)).arg(num).arg(epoch);
    }
}

impl Fixture {
    async fn cancelled(&self, items: &[(char, u32, u32)]) -> Vec<String> {
        flat(self.run(&scripts::CANCEL, |call| cancel(call, items)).await.expect("cancel"))
    }
}

#[tokio::test]
async fn cancel_ends_a_task_that_waits_and_one_that_is_held() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.held('b', "w", 4).await;
    f.waiting('c', 1, b"1").await;
    f.seed("HSET", "bodies", &[b"aaaaaaaaaaaaaaaah", b"head"]).await;
    let before = f.state().await;
    assert_eq!(f.cancelled(&[('a', 1, 0), ('b', 1, 0), ('a', 1, 0)]).await, ["7", "1", "1", "1"]);
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
            ("counters", &["open=1", &format!("open_bytes={WEIGHT}"), "live=1"]),
        ],
    );
    // The element that is left in the lane offers nothing.
    assert_eq!(after["m:T"], ["1/0/c", "1/0/a"]);
}

#[tokio::test]
async fn cancel_ends_all_leases_and_backoffs_of_a_task_of_several() {
    let f = Fixture::new().await;
    f.seed("HSET", "records", &[&id('a'), b"m\x04\x02\x01\nu\tc1\nw\th2\nv\th3\n"]).await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    // ["L", 3, 1, ["9"], [], ["w", "5"], 0, 1]: one replica is left.
    f.seed("HSET", "records", &[&id('b'), b"\x98\xa1L\x03\x01\x91\xa19\x90\x92\xa1w\xa15\x00\x01"]).await;
    f.seed("HSET", "bodies", &[&id('b'), &body(2)]).await;
    for (letter, grant) in [('a', 2), ('a', 3), ('b', 5)] {
        f.seed("ZADD", "leases", &[NOW.to_string().as_bytes(), &lease(letter, grant)]).await;
    }
    f.seed("ZADD", "delayed", &[NOW.to_string().as_bytes(), &lease('b', 9)]).await;
    f.seed("LPUSH", "mr:T", &[&element(3, 1, 'b')]).await;
    f.seed("HSET", "counters", &[b"live", b"2", b"open", b"2", b"open_bytes", b"826"]).await;
    let before = f.state().await;
    assert_eq!(f.cancelled(&[('a', 4, 0), ('b', 3, 0)]).await, ["7", "1", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[&format!(r#"a=["X",4,0,[],["u","1"],[],{NOW}]"#), &format!(r#"b=["X",3,1,[],[],[],{NOW},1]"#)],
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
    f.seed("HSET", "records", &[&id('a'), b"\x97\xa1L\x01\x00\x91\xa0\x90\x90\x00"]).await;
    f.seed("HSET", "bodies", &[&id('a'), &body(1)]).await;
    f.seed("ZADD", "delayed", &[(NOW + 9).to_string().as_bytes(), &id('a')]).await;
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
    let before = f.state().await;
    assert_eq!(f.cancelled(&[('a', 3, 0), ('b', 1, 2)]).await, ["7", "1", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[&format!(r#"a=["X",3,0,[],[],[],{NOW}]"#), &format!(r#"b=["X",1,0,[],[],[],{NOW},0,[],[],2]"#)],
            ),
            ("bodies", &[]),
            ("finals", &["a", "b"]),
        ],
    );
}

#[tokio::test]
async fn cancel_says_how_a_task_ended_before_and_changes_nothing() {
    let f = Fixture::new().await;
    f.seed("HSET", "records", &[&id('a'), b"f5:1:w", &id('b'), b"e\x025\nu\tc1\nw\tc2\n"]).await;
    // ["D", 1, 2, [], [], [], 5], ["X", …] and a live one of the task's second epoch.
    f.seed("HSET", "records", &[&id('c'), b"\x97\xa1D\x01\x02\x90\x90\x90\x05"]).await;
    f.seed("HSET", "records", &[&id('d'), b"\x97\xa1X\x01\x02\x90\x90\x90\x05"]).await;
    let again = b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x01";
    f.seed("HSET", "records", &[&id('e'), again]).await;
    f.seed("RPUSH", "finals", &[&id('a'), &id('b'), &id('c'), &id('d')]).await;
    let before = f.state().await;
    let items = [('a', 1, 0), ('b', 2, 0), ('c', 1, 0), ('d', 1, 0), ('e', 1, 0)];
    assert_eq!(f.cancelled(&items).await, ["7", "2", "2", "3", "1", "4"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn cancel_ends_a_task_that_was_sent_again_whatever_is_left_of_its_end() {
    let f = Fixture::new().await;
    // The end of the first epoch is still there, and the task of the second is on its way.
    f.seed("HSET", "records", &[&id('a'), b"\x98\xa1D\x01\x02\x90\x90\x90\x05\x03"]).await;
    // This one has arrived.
    f.seed("HSET", "records", &[&id('b'), b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x04\x90\x90\x01"]).await;
    f.seed("HSET", "bodies", &[&id('b'), &body(2)]).await;
    f.seed("HSET", "counters", &[b"live", b"1", b"open", b"1", b"open_bytes", b"413"]).await;
    f.seed("RPUSH", "finals", &[&id('a'), &id('z')]).await;
    let before = f.state().await;
    assert_eq!(f.cancelled(&[('a', 1, 1), ('b', 1, 1)]).await, ["7", "1", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[
                    &format!(r#"a=["X",1,0,[],[],[],{NOW},3,[],[],1]"#),
                    &format!(r#"b=["X",1,0,[],[],[],{NOW},4,[],[],1]"#),
                ],
            ),
            ("bodies", &[]),
            ("finals", &["z", "a", "b"]),
            ("counters", &["live=0", "open=0", "open_bytes=0"]),
        ],
    );
}

#[tokio::test]
async fn the_holder_of_a_cancelled_task_is_told_so() {
    let f = Fixture::new().await;
    f.held('a', "w", 4).await;
    assert_eq!(f.cancelled(&[('a', 1, 0)]).await, ["7", "1"]);
    let before = f.state().await;
    let answer = f.run(&scripts::COMPLETE, |call| complete(call, &[('a', "7", 4, "w")])).await.expect("complete");
    assert_eq!(flat(answer), ["6"]);
    let extend = |call: &mut Call| {
        call.arg(id('a')).arg("7").arg(4).arg("w").arg(1000);
    };
    assert_eq!(flat(f.run(&scripts::EXTEND, extend).await.expect("extend")), ["6", "0"]);
    let reject = |call: &mut Call| {
        call.arg(1).arg("wake").arg("q").arg(b"\x91\x01").arg(1000).arg(id('a')).arg("7").arg(4).arg("w").arg("retry");
        call.arg("").arg("no").arg("failed");
    };
    assert_eq!(flat(f.run(&scripts::REJECT, reject).await.expect("reject")), ["6", "0"]);
    assert_eq!(f.state().await, before);
}
