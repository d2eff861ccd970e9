//! The script that ends the leases of a session.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, changed, flat, id, lease};

/// Each item: id, grant, worker, deadline, started. The failed attempt of `a` is `of a;`.
pub(super) fn end(call: &mut Call, most_bytes: u64, items: &[(char, u64, &str, i64, u8)]) {
    // msgpack [50]
    call.arg(1)
        .arg("t:wake")
        .arg("q")
        .arg(&b"\x91\x32"[..])
        .arg(most_bytes)
        .arg("over");
    for (letter, grant, worker, deadline, started) in items {
        call.arg(id(*letter))
            .arg("7")
            .arg(*grant)
            .arg(*worker)
            .arg(*deadline)
            .arg(*started);
        call.arg(if *started > 0 {
            format!("of {letter};")
        } else {
            String::new()
        });
    }
}

impl Fixture {
    async fn ended(&self, items: &[(char, u64, &str, i64, u8)]) -> Vec<String> {
        flat(
            self.run(&scripts::SESSION_END, |call| end(call, 1000, items))
                .await
                .expect("session_end"),
        )
    }
}

#[tokio::test]
async fn a_lease_that_was_not_started_is_offered_again_at_no_cost() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.held('b', "w", 1).await;
    let before = f.state().await;
    assert_eq!(f.ended(&[('a', 1, "w", NOW, 0)]).await, ["1", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &[r#"a=["L",1,0,[],[],[],0,1]"#, "b=h1:w"]),
            ("leases", &[&format!("b1={NOW}")]),
            ("mr:T", &["1/1/a"]),
            ("counters", &["open=1", "open_bytes=413", "live=2"]),
        ],
    );
}

#[tokio::test]
async fn a_lease_that_was_started_is_a_failure_with_its_backoff() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    assert_eq!(f.ended(&[('a', 1, "w", NOW, 1)]).await, ["1", "2"]);
    let after = f.state().await;
    assert_eq!(
        after["records"],
        [r#"a=["L",1,1,["1"],[],[],0,0,[],[1000000,"w","over"]]"#]
    );
    assert_eq!(after["outbox"], ["b=of a;"]);
    assert_eq!((after.get("leases"), after.get("mr:T")), (None, None));
    let due: i64 = after["delayed"][0]
        .strip_prefix("a1=")
        .unwrap()
        .parse()
        .unwrap();
    assert!(
        (NOW + 40..=NOW + 60).contains(&due),
        "the backoff of 50 ms, jittered: {due}"
    );
}

#[tokio::test]
async fn the_last_failure_kills_the_task() {
    let f = Fixture::new().await;
    f.held('a', "w", 4).await;
    // It has failed once, and may fail twice: ["L", 1, 1, [], [], ["w", "4"], 0, 1]
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"\x98\xa1L\x01\x01\x90\x90\x92\xa1w\xa14\x00\x01"],
    )
    .await;
    assert_eq!(f.ended(&[('a', 4, "w", NOW, 1)]).await, ["1", "3"]);
    let after = f.state().await;
    assert_eq!(
        after["records"],
        [format!(r#"a=["D",1,2,[],[],[],{NOW},1]"#)]
    );
    assert_eq!(
        (
            after.get("bodies"),
            after.get("leases"),
            &after["finals"][..]
        ),
        (None, None, &["a".to_owned()][..])
    );
}

#[tokio::test]
async fn a_lease_whose_grant_did_not_arrive_costs_nothing_and_so_do_all_of_its_claim() {
    let f = Fixture::new().await;
    for letter in ['a', 'b'] {
        f.held(letter, "w", 1).await;
    }
    f.seed("ZADD", "undelivered", &[NOW.to_string().as_bytes(), b"1"])
        .await;
    assert_eq!(
        f.ended(&[('a', 1, "w", NOW, 1), ('b', 1, "w", NOW, 1)])
            .await,
        ["1", "1", "1", "1"]
    );
    let after = f.state().await;
    assert_eq!(after["mr:T"], ["1/1/b", "1/1/a"]);
    // Another call may end more leases of the grant.
    assert_eq!(after["undelivered"], [format!("1={NOW}")]);
    assert_eq!((after.get("outbox"), after.get("leases")), (None, None));
}

#[tokio::test]
async fn a_worker_that_said_that_it_started_had_the_task() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed("ZADD", "undelivered", &[NOW.to_string().as_bytes(), b"1"])
        .await;
    assert_eq!(f.ended(&[('a', 1, "w", NOW, 2)]).await, ["1", "2"]);
    assert_eq!(f.state().await["undelivered"], [format!("1={NOW}")]);
}

/// Extended elsewhere, reported, another's, and unknown: nothing changes.
#[tokio::test]
async fn a_lease_that_is_no_longer_the_sessions_stays_as_it_is() {
    let f = Fixture::new().await;
    for letter in ['a', 'b', 'c'] {
        f.held(letter, "w", 1).await;
    }
    f.seed(
        "ZADD",
        "leases",
        &[(NOW + 1).to_string().as_bytes(), &lease('a', 1)],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[&id('c'), format!("f{NOW}:1:w").as_bytes()],
    )
    .await;
    let before = f.state().await;
    let items = [
        ('a', 1, "w", NOW, 1),
        ('b', 2, "w", NOW, 1),
        ('b', 1, "v", NOW, 1),
        ('c', 1, "w", NOW, 1),
        ('z', 1, "w", NOW, 1),
    ];
    assert_eq!(
        f.ended(&items).await,
        ["3", "0", "3", "0", "3", "0", "4", "0", "5", "0"]
    );
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn a_lease_that_a_clock_set_back_has_moved_ends_with_its_session() {
    // Its session knows a deadline of 30 s from NOW. The clock stepped back by 3 s, and `expire`
    // moved the lease.
    let known = NOW + 30_000;
    let moved = NOW + 27_000;
    let seed = async |f: &Fixture, deadline: String| {
        f.held('a', "w", 1).await;
        f.seed("ZADD", "leases", &[deadline.as_bytes(), &lease('a', 1)])
            .await;
    };
    let f = Fixture::new().await;
    seed(&f, moved.to_string()).await;
    let keep = |call: &mut Call| {
        // msgpack [known]
        let packed = rmp_serde::to_vec(&[known]).expect("packed");
        call.arg(id('a'))
            .arg("7")
            .arg(1)
            .arg("w")
            .arg(60_000)
            .arg(packed);
    };
    let kept = flat(f.run(&scripts::EXTEND, keep).await.expect("extend"));
    assert_eq!(
        kept,
        ["1", &(NOW + 60_000).to_string()],
        "the process of its session keeps it"
    );
    let f = Fixture::new().await;
    seed(&f, moved.to_string()).await;
    assert_eq!(f.ended(&[('a', 1, "w", known, 0)]).await, ["1", "1"]);
    // An extension by another way, to an earlier or a later time.
    for extended in [moved, known + 1] {
        let f = Fixture::new().await;
        seed(&f, format!("{}.5", extended - 1)).await;
        assert_eq!(f.ended(&[('a', 1, "w", known, 0)]).await, ["3", "0"]);
        assert_eq!(
            flat(f.run(&scripts::EXTEND, keep).await.expect("extend")),
            ["1", "0"]
        );
    }
}

/// Only the generation of the token is another one.
#[tokio::test]
async fn a_token_of_an_earlier_life_of_the_shard_ends_and_extends_nothing() {
    for record in ["h1:w".as_bytes(), b"m\x02\x01\x00\nw\th1\n"] {
        let f = Fixture::new().await;
        f.held('a', "w", 1).await;
        f.seed("HSET", "records", &[&id('a'), record]).await;
        let before = f.state().await;
        for mode in ["retry", "never", "release", "put_off", "rest"] {
            let reject = |call: &mut Call| {
                call.arg(1)
                    .arg("t:wake")
                    .arg("q")
                    .arg(&b"\x91\x32"[..])
                    .arg(1000);
                call.arg(id('a'))
                    .arg("6")
                    .arg(1)
                    .arg("w")
                    .arg(mode)
                    .arg("50")
                    .arg("no reason")
                    .arg("");
            };
            let answer = flat(f.run(&scripts::REJECT, reject).await.expect("reject"));
            assert_eq!(answer, ["3", "0"], "{mode}");
        }
        for started in 0..3 {
            let end = |call: &mut Call| {
                call.arg(1)
                    .arg("t:wake")
                    .arg("q")
                    .arg(&b"\x91\x32"[..])
                    .arg(1000)
                    .arg("over");
                call.arg(id('a'))
                    .arg("6")
                    .arg(1)
                    .arg("w")
                    .arg(NOW)
                    .arg(started)
                    .arg("");
            };
            let answer = flat(
                f.run(&scripts::SESSION_END, end)
                    .await
                    .expect("session_end"),
            );
            assert_eq!(answer, ["3", "0"], "{started}");
        }
        let extend = |call: &mut Call| {
            call.arg(id('a')).arg("6").arg(1).arg("w").arg(5000);
        };
        assert_eq!(
            flat(f.run(&scripts::EXTEND, extend).await.expect("extend")),
            ["3", "0"]
        );
        assert_eq!(f.state().await, before);
    }
}

#[tokio::test]
async fn a_second_end_does_nothing_and_a_full_outbox_gets_no_history() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed("HSET", "counters", &[b"outbox_bytes", b"1000"])
        .await;
    let items = [('a', 1, "w", NOW, 1)];
    assert_eq!(f.ended(&items).await, ["1", "2"]);
    let after = f.state().await;
    assert_eq!(after.get("outbox"), None);
    assert_eq!(f.ended(&items).await, ["3", "0"]);
    assert_eq!(f.state().await, after);
}
