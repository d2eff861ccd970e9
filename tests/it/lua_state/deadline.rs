//! `deadline.lua`: the end of tasks whose deadline has passed.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, WEIGHT, body, changed, element, flat, id, lease};

/// Each item: id, NUM.
pub(super) fn deadline(call: &mut Call, bounds: [u32; 2], items: &[(char, u32)]) {
    call.arg("t:wake").arg(bounds[0]).arg(bounds[1]);
    for (letter, num) in items {
        call.arg(id(*letter)).arg(num).arg("too late");
    }
}

impl Fixture {
    async fn overdue(&self, items: &[(char, u32)]) -> Vec<String> {
        flat(
            self.run(&scripts::DEADLINE, |call| {
                deadline(call, [1000, 1 << 20], items)
            })
            .await
            .expect("deadline"),
        )
    }
}

/// The entry of a death without failures.
fn death(letter: char, attempts: u32, log: &str) -> String {
    format!("d={letter} a={attempts} r=too late w= h={log}")
}

#[tokio::test]
async fn a_deadline_ends_a_task_that_waits_one_that_is_held_and_one_that_has_not_arrived() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.held('b', "w", 4).await;
    f.waiting('c', 1, b"1").await;
    f.seed("HSET", "bodies", &[b"aaaaaaaaaaaaaaaah", b"head"])
        .await;
    let before = f.state().await;
    assert_eq!(
        f.overdue(&[('a', 1), ('b', 1), ('z', 3), ('a', 1)]).await,
        ["7", "1", "1", "1", "3"]
    );
    let d = |num: u32| format!(r#"["D",{num},0,[],[],[],{NOW}]"#);
    let after = f.state().await;
    let entry = [
        death('a', 0, "\u{fffd}"),
        death('b', 0, "\u{fffd}"),
        death('z', 0, "\u{fffd}"),
    ]
    .join(" ");
    let bytes = after["counters"]
        .iter()
        .find(|one| one.starts_with("outbox_bytes="))
        .expect("bytes")
        .clone();
    let mut expected = before.clone();
    expected.insert("outbox".into(), vec![entry]);
    changed(
        &expected,
        &after,
        &[
            (
                "records",
                &[
                    &format!("a={}", d(1)),
                    &format!("b={}", d(1)),
                    "c=1",
                    &format!("z={}", d(3)),
                ],
            ),
            ("bodies", &["c=body2"]),
            ("leases", &[]),
            ("finals", &["a", "b", "z"]),
            (
                "counters",
                &[
                    "open=1",
                    &format!("open_bytes={WEIGHT}"),
                    "live=1",
                    "fence=1",
                    &bytes,
                ],
            ),
        ],
    );
    // The element that is left in the lane offers nothing.
    assert_eq!(after["m:T"], ["1/0/c", "1/0/a"]);
}

#[tokio::test]
async fn a_deadline_keeps_the_credits_and_tells_the_failures() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"m\x04\x02\x01\nu\tc1\nw\th2\nv\th3\n"],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    // ["L", 3, 1, ["9"], [], ["w", "5"], 0, 1, [], [5, "w", "no"]]: one replica is left.
    let record = b"\x9a\xa1L\x03\x01\x91\xa19\x90\x92\xa1w\xa15\x00\x01\x90\x93\x05\xa1w\xa2no";
    f.seed("HSET", "records", &[&id('b'), record]).await;
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
    // Before its time, and reserved by an operator.
    f.seed(
        "HSET",
        "records",
        &[&id('c'), b"\x97\xa1L\x01\x00\x91\xa0\x90\x90\x00"],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('c'), &body(1)]).await;
    f.seed(
        "ZADD",
        "delayed",
        &[(NOW + 9).to_string().as_bytes(), &id('c')],
    )
    .await;
    f.seed("HINCRBY", "counters", &[b"live", b"1"]).await;
    let before = f.state().await;
    assert_eq!(
        f.overdue(&[('a', 4), ('b', 3), ('c', 1)]).await,
        ["7", "1", "1", "1"]
    );
    let after = f.state().await;
    let bytes = after["counters"]
        .iter()
        .find(|one| one.starts_with("outbox_bytes="))
        .expect("bytes")
        .clone();
    let entry = [
        death('a', 0, "\u{fffd}"),
        death('b', 1, r#"[5,"w","no"]"#),
        death('c', 0, "\u{fffd}"),
    ]
    .join(" ");
    let mut expected = before.clone();
    expected.insert("outbox".into(), vec![entry]);
    changed(
        &expected,
        &after,
        &[
            (
                "records",
                &[
                    &format!(r#"a=["D",4,0,[],["u","1"],[],{NOW}]"#),
                    &format!(r#"b=["D",3,1,[],[],[],{NOW},1]"#),
                    &format!(r#"c=["D",1,0,[],[],[],{NOW}]"#),
                ],
            ),
            ("bodies", &[]),
            ("leases", &[]),
            ("delayed", &[]),
            ("finals", &["a", "b", "c"]),
            ("counters", &["live=0", "open=0", "open_bytes=0", &bytes]),
        ],
    );
}

#[tokio::test]
async fn a_deadline_ends_a_task_whose_record_cannot_be_read() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"\xc1").await;
    assert_eq!(f.overdue(&[('a', 1)]).await, ["7", "1"]);
    let after = f.state().await;
    assert_eq!(
        (after["records"].join(" "), after.get("bodies")),
        (format!(r#"a=["D",1,0,[],[],[],{NOW}]"#), None)
    );
    assert!(
        after["counters"].contains(&"live=0".to_owned()),
        "{:?}",
        after["counters"]
    );
}

#[tokio::test]
async fn a_deadline_changes_no_end_and_no_later_epoch() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"f5:1:w", &id('b'), b"e\x025\nu\tc1\nw\tc2\n"],
    )
    .await;
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
    f.seed(
        "HSET",
        "records",
        &[
            &id('e'),
            b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x01",
        ],
    )
    .await;
    f.seed("RPUSH", "finals", &[&id('a'), &id('b'), &id('c'), &id('d')])
        .await;
    let before = f.state().await;
    let items = [('a', 1), ('b', 2), ('c', 1), ('d', 1), ('e', 1)];
    assert_eq!(f.overdue(&items).await, ["7", "2", "2", "3", "6", "4"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn a_full_outbox_puts_deadlines_off() {
    let f = Fixture::new().await;
    f.held('a', "w", 4).await;
    f.seed("XADD", "outbox", &[b"*", b"b", b"frames"]).await;
    f.seed("HSET", "counters", &[b"outbox_bytes", b"6"]).await;
    let before = f.state().await;
    for bounds in [[1, 100], [100, 6]] {
        let answer = f
            .run(&scripts::DEADLINE, |call| {
                deadline(call, bounds, &[('a', 1), ('z', 1)])
            })
            .await;
        assert_eq!(flat(answer.expect("deadline")), ["7", "0", "0"]);
    }
    assert_eq!(f.state().await, before);
}
