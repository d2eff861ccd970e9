//! A task's own backoff: reject and expire read it in the body.

use redis::Value;
use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, body, changed, flat, id, lease};

/// The body of `super::body(2)` with a backoff before its text.
pub(super) fn body_with(
    kind: u8,
    initial: u32,
    longest: u32,
    percent: u8,
    gives_up: u64,
) -> Vec<u8> {
    let (head, text) = (&body(2)[..9], &body(2)[9..]);
    let waits = [initial.to_be_bytes(), longest.to_be_bytes()].concat();
    [
        head,
        &[0x7a, 18, kind],
        &waits,
        &[percent],
        &gives_up.to_be_bytes(),
        text,
    ]
    .concat()
}

impl Fixture {
    /// A task of NUM = 1 that `w` holds by grant 1 after so many failures.
    async fn failed(&self, letter: char, failures: u8, body: &[u8]) {
        self.held(letter, "w", 1).await;
        self.seed("HSET", "bodies", &[&id(letter), body]).await;
        if failures > 0 {
            // ["L", 1, failures, [], [], ["w", "1"], 0, failures]
            let record = [
                b"\x98\xa1L\x01",
                &[failures][..],
                b"\x90\x90\x92\xa1w\xa11\x00",
                &[failures],
            ]
            .concat();
            self.seed("HSET", "records", &[&id(letter), &record]).await;
        }
    }

    async fn due(&self, letter: char) -> i64 {
        let delayed = self.state().await;
        let delayed = delayed.get("delayed").into_iter().flatten();
        let mut due =
            delayed.filter_map(|one| one.strip_prefix(&format!("{letter}1="))?.parse().ok());
        due.next_back()
            .unwrap_or_else(|| panic!("{letter} waits for nothing"))
    }
}

/// The waits of the queue are a second.
fn reject(call: &mut Call, letter: char, delay: &str) {
    call.arg(1)
        .arg("t:wake")
        .arg("q")
        .arg(&b"\x91\xcd\x03\xe8"[..])
        .arg(1000);
    call.arg(id(letter))
        .arg("7")
        .arg(1)
        .arg("w")
        .arg("retry")
        .arg(delay)
        .arg("no reason")
        .arg("");
}

fn expire(call: &mut Call) {
    call.arg(1)
        .arg("t:wake")
        .arg("q")
        .arg(&b"\x91\xcd\x03\xe8"[..])
        .arg(10)
        .arg(1000)
        .arg(1000);
}

#[tokio::test]
async fn a_wait_grows_as_the_task_says() {
    let f = Fixture::new().await;
    // Kind, failures before, the wait. max_attempts is 2, but for this it is 250.
    let cases: [(char, u8, u8, u64); 11] = [
        ('a', 1, 0, 70),
        ('b', 1, 9, 70),
        ('c', 2, 0, 70),
        ('d', 2, 2, 210),
        ('e', 2, 9, 600),
        ('f', 3, 0, 70),
        ('g', 3, 1, 140),
        ('h', 3, 3, 560),
        ('i', 3, 4, 600),
        ('j', 3, 120, 600),
        // Of a later version.
        ('k', 9, 3, 70),
    ];
    for (letter, kind, failures, wait) in cases {
        let mut body = body_with(kind, 70, 600, 0, 0);
        body[4] = 250;
        f.failed(letter, failures, &body).await;
        let answer = f
            .run(&scripts::REJECT, |call| reject(call, letter, ""))
            .await
            .expect("reject");
        assert_eq!(flat(answer), ["1", "0"]);
        assert_eq!(f.due(letter).await, NOW + wait as i64, "{letter}");
    }
    // A rejection that says when, and waits of the queue.
    f.failed('l', 0, &body_with(1, 70, 600, 0, 0)).await;
    f.run(&scripts::REJECT, |call| reject(call, 'l', "5000"))
        .await
        .expect("reject");
    assert_eq!(f.due('l').await, NOW + 5000);
    f.failed('m', 0, &body_with(0, 0, 0, 0, NOW as u64 + 2000))
        .await;
    f.run(&scripts::REJECT, |call| reject(call, 'm', ""))
        .await
        .expect("reject");
    assert!((NOW + 800..=NOW + 1200).contains(&f.due('m').await));
    // The jitter is the share that it says.
    for (n, letter) in ('n'..='z').enumerate() {
        f.failed(letter, 0, &body_with(1, 1_000_000, 1_000_000, 50, 0))
            .await;
        let seeded = |call: &mut Call| {
            call.arg(n)
                .arg("t:wake")
                .arg("q")
                .arg(&b"\x91\xcd\x03\xe8"[..])
                .arg(1000);
            call.arg(id(letter))
                .arg("7")
                .arg(1)
                .arg("w")
                .arg("retry")
                .arg("")
                .arg("no reason")
                .arg("");
        };
        f.run(&scripts::REJECT, seeded).await.expect("reject");
    }
    let mut waits = Vec::new();
    for letter in 'n'..='z' {
        waits.push(f.due(letter).await - NOW);
    }
    assert!(
        waits
            .iter()
            .all(|wait| (500_000..=1_500_000).contains(wait)),
        "{waits:?}"
    );
    assert!(
        waits
            .iter()
            .any(|wait| !(800_000..=1_200_000).contains(wait)),
        "more than a fifth: {waits:?}"
    );
}

#[tokio::test]
async fn a_rejected_task_gives_up_when_its_next_attempt_would_be_too_late() {
    let f = Fixture::new().await;
    let at = NOW as u64 + 100;
    f.failed('a', 0, &body_with(1, 100, 100, 0, at)).await;
    f.failed('b', 0, &body_with(1, 101, 101, 0, at)).await;
    let before = f.state().await;
    let answer = f
        .run(&scripts::REJECT, |call| reject(call, 'a', ""))
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "0"], "just in time");
    let answer = f
        .run(&scripts::REJECT, |call| reject(call, 'b', ""))
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "1"]);
    let bodies = String::from_utf8_lossy(&body_with(1, 100, 100, 0, at)).into_owned();
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[
                    r#"a=["L",1,1,["1"],[],[],0,0,[],[1000000,"w","no reason"]]"#,
                    &format!(r#"b=["D",1,1,[],[],[],{NOW},0]"#),
                ],
            ),
            ("bodies", &[&format!("a={bodies}")]),
            ("leases", &[]),
            ("delayed", &[&format!("a1={}", NOW + 100)]),
            ("finals", &["b"]),
            (
                "outbox",
                &[concat!(
                    "d=b a=1 r=no reason (the next attempt would begin after give_up_after) w=w ",
                    r#"h=[1000000,"w","no reason"]"#
                )],
            ),
            (
                "counters",
                &["longest_delay=100", "live=1", "outbox_bytes=101"],
            ),
        ],
    );
    // The delay of a rejection counts, too. A release counts for nothing.
    f.failed('c', 0, &body_with(1, 0, 0, 0, at)).await;
    let answer = f
        .run(&scripts::REJECT, |call| reject(call, 'c', "101"))
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "1"]);
    f.failed('d', 0, &body_with(1, 0, 0, 0, 1)).await;
    let release = |call: &mut Call| {
        call.arg(1)
            .arg("t:wake")
            .arg("q")
            .arg(&b"\x91\xcd\x03\xe8"[..])
            .arg(1000);
        call.arg(id('d'))
            .arg("7")
            .arg(1)
            .arg("w")
            .arg("release")
            .arg("")
            .arg("")
            .arg("");
    };
    assert_eq!(
        flat(f.run(&scripts::REJECT, release).await.expect("reject")),
        ["1", "0"]
    );
    // An operator has sent it again: ["L", 1, 0, [], [], ["w", "1"], 0, 1, [], [], 2].
    f.failed('e', 0, &body_with(1, 50, 50, 0, 1)).await;
    let record = b"\x9b\xa1L\x01\x00\x90\x90\x92\xa1w\xa11\x00\x01\x90\x90\x02";
    f.seed("HSET", "records", &[&id('e'), record]).await;
    assert_eq!(
        flat(
            f.run(&scripts::REJECT, |call| reject(call, 'e', ""))
                .await
                .expect("reject")
        ),
        ["1", "0"]
    );
    assert_eq!(f.due('e').await, NOW + 50);
}

#[tokio::test]
async fn an_expired_lease_waits_as_the_task_says_or_is_the_last() {
    let f = Fixture::new().await;
    f.failed('a', 0, &body_with(1, 70, 600, 0, 0)).await;
    f.failed('b', 0, &body_with(1, 70, 600, 0, NOW as u64 + 69))
        .await;
    // A large body, whose head stands apart.
    let large = [body_with(1, 90, 600, 0, 0), vec![b'.'; 1200]].concat();
    f.failed('c', 0, &large).await;
    f.seed(
        "HSET",
        "bodies",
        &[&[&id('c')[..], b"h"].concat(), &large[..29]],
    )
    .await;
    // The head alone has no backoff: the waits of the queue.
    f.failed('d', 0, &large).await;
    f.seed(
        "HSET",
        "bodies",
        &[&[&id('d')[..], b"h"].concat(), &large[..9]],
    )
    .await;
    let answer = f.run(&scripts::EXPIRE, expire).await.expect("expire");
    assert_eq!(flat(answer), ["4", "1", "0", "0", "-1"]);
    assert_eq!((f.due('a').await, f.due('c').await), (NOW + 70, NOW + 90));
    assert!((NOW + 800..=NOW + 1200).contains(&f.due('d').await));
    let state = f.state().await;
    assert_eq!(state["finals"], ["b"]);
    let died = "d=b a=1 r=lease expired (the next attempt would begin after give_up_after) w=w";
    assert!(state["outbox"][0].contains(died), "{state:?}");
    // An undelivered lease is no failure, however late it is.
    f.failed('e', 0, &body_with(1, 70, 600, 0, 1)).await;
    f.seed("ZADD", "undelivered", &[NOW.to_string().as_bytes(), b"1"])
        .await;
    f.seed(
        "ZADD",
        "leases",
        &[NOW.to_string().as_bytes(), &lease('e', 1)],
    )
    .await;
    assert_eq!(
        flat(f.run(&scripts::EXPIRE, expire).await.expect("expire"))[..3],
        ["0", "0", "1"]
    );
}

#[tokio::test]
async fn a_change_of_a_large_body_keeps_its_backoff() {
    let f = Fixture::new().await;
    let large = [body_with(1, 90, 600, 0, 0), vec![b'.'; 1200]].concat();
    f.waiting('a', 1, b"1").await;
    f.seed("HSET", "bodies", &[&id('a'), &large]).await;
    f.seed(
        "HSET",
        "bodies",
        &[&[&id('a')[..], b"h"].concat(), &large[..29]],
    )
    .await;
    let change = |call: &mut Call| {
        call.arg("t:wake").arg("q");
        call.arg(id('a')).arg(1).arg(3).arg(0).arg("tail");
    };
    assert_eq!(
        flat(f.run(&scripts::CHANGE, change).await.expect("change"))[..2],
        ["7", "1"]
    );
    let field = [&id('a')[..], b"h"].concat();
    let head: Value = redis::cmd("HGET")
        .arg("t:{q:0}:bodies")
        .arg(field)
        .query_async(&mut f.redis.conn())
        .await
        .expect("a head");
    assert_eq!(head, Value::BulkString([&[3][..], &large[1..29]].concat()));
}
