//! The scripts of the watchdog, the forwarder and readers.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, body, change::live, changed, claim::claim, element, flat, id, lease};

pub(super) fn promote(call: &mut Call) {
    call.arg("t:wake").arg("q").arg(10).arg(600_000);
}

pub(super) fn expire(call: &mut Call) {
    call.arg(1)
        .arg("t:wake")
        .arg("q")
        .arg(&b"\x91\x00"[..])
        .arg(10)
        .arg(100)
        .arg(1000);
}

#[tokio::test]
async fn promote_takes_a_body_of_no_priority_for_medium() {
    let f = Fixture::new().await;
    for (letter, priority, member) in [('a', 0, id('a')), ('b', 9, lease('b', 1))] {
        // ["L", 1, 0, [""], [], [], 0]: before its time; or ["1"]: one replica in backoff.
        let waits: &[u8] = if letter == 'a' {
            &[0x91, 0xa0]
        } else {
            &[0x91, 0xa1, b'1']
        };
        let record = [&[0x97, 0xa1, b'L', 1, 0][..], waits, &[0x90, 0x90, 0]].concat();
        f.seed("HSET", "records", &[&id(letter), &record]).await;
        f.seed("HSET", "bodies", &[&id(letter), &body(priority)])
            .await;
        f.seed("ZADD", "delayed", &[NOW.to_string().as_bytes(), &member])
            .await;
    }
    let before = f.state().await;
    assert_eq!(
        flat(f.run(&scripts::PROMOTE, promote).await.expect("promote")),
        ["2", "0", "-1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &["a=1", r#"b=["L",1,0,[],[],[],0,1]"#]),
            ("delayed", &[]),
            ("m:T", &["1/0/a"]),
            ("mr:T", &["1/1/b"]),
            ("counters", &["open_bytes=826", "open=2"]),
        ],
    );
}

#[tokio::test]
async fn expire_counts_a_failure_and_at_the_last_one_the_task_is_dead() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    assert_eq!(
        flat(f.run(&scripts::EXPIRE, expire).await.expect("expire")),
        ["1", "0", "0", "0", "-1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[r#"a=["L",1,1,[],[],[],0,1,[],[1000000,"w","lease expired"]]"#],
            ),
            ("leases", &[]),
            ("mr:T", &["1/1/a"]),
            ("outbox", &["x=a w=w a=1 e=0 n=7 g=1 s=970000"]),
            (
                "counters",
                &["open_bytes=413", "live=1", "open=1", "outbox_bytes=34"],
            ),
        ],
    );
    f.run(&scripts::CLAIM, |call| claim(call, &[("v", 1)]))
        .await
        .expect("claim");
    f.seed(
        "ZADD",
        "leases",
        &[NOW.to_string().as_bytes(), &lease('a', 1)],
    )
    .await;
    f.seed("DEL", "undelivered", &[]).await;
    assert_eq!(
        flat(f.run(&scripts::EXPIRE, expire).await.expect("expire")),
        ["1", "1", "0", "0", "-1"]
    );
    let dead = f.state().await;
    assert_eq!(
        dead["records"],
        [format!(r#"a=["D",1,2,[],[],[],{NOW},1]"#)]
    );
    let history = r#"[1000000,"w","lease expired",1000000,"v","lease expired"]"#;
    let died = format!("d=a a=2 r=lease expired w=v h={history} x=a w=v a=2 e=1 n=7 g=1 s=970000");
    assert_eq!(
        dead["outbox"],
        ["x=a w=w a=1 e=0 n=7 g=1 s=970000", &died],
        "one entry a call"
    );
    assert_eq!((dead.get("bodies"), dead.get("leases")), (None, None));
}

#[tokio::test]
async fn sweep_moves_a_stuck_tail_so_that_the_spent_ones_behind_it_leave() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    for _ in 0..100 {
        // Elements of a task that is gone.
        f.seed("LPUSH", "m:T", &[&element(1, 0, 'x')]).await;
    }
    let before = f.state().await;
    let moved = f
        .run(&scripts::SWEEP, |call: &mut Call| {
            call.arg(512);
        })
        .await
        .expect("sweep");
    assert_eq!(flat(moved), ["101", "0"]);
    changed(
        &before,
        &f.state().await,
        &[("m:T", &["2/0/a"]), ("m:C", &["101"])],
    );
}

/// Dead for the third time long ago; of its earlier ends, two are listed.
const PAST_OLD: &[u8] = b"\x9d\xa1D\x01\x02\x90\x90\x90\x05\x00\x90\x90\x02\xc2\x02";
/// Sent again, and live; its end is listed.
const PAST_LIVE: &[u8] = b"\x9d\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x01\xc2\x01";
/// Dead a moment ago; an earlier end is listed, and it is reserved for v.
const PAST_YOUNG: &[u8] =
    b"\x9d\xa1D\x01\x02\x90\x90\x90\xce\x00\x0f\x42\x3f\x00\x90\x90\x01\x92\xa1v\x07\x01";

#[tokio::test]
async fn finals_drops_entries_of_past_ends_and_passes_none_that_is_young() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[
            &id('a'),
            PAST_OLD,
            &id('b'),
            PAST_LIVE,
            &id('c'),
            PAST_YOUNG,
        ],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[&id('x'), b"f5:1:w", &id('y'), b"f6:2:w"],
    )
    .await;
    let list = ['b', 'a', 'x', 'c', 'a', 'y', 'a', 'c', 'x'];
    for letter in list {
        f.seed("RPUSH", "finals", &[&id(letter)]).await;
    }
    let before = f.state().await;
    // The script looks at no more than its page.
    let finals = |most: u64| {
        move |call: &mut Call| {
            call.arg(60_000).arg(most);
        }
    };
    assert_eq!(
        flat(f.run(&scripts::FINALS, finals(4)).await.expect("finals")),
        ["3", "x"]
    );
    let records = [
        r#"a=["D",1,2,[],[],[],5,0,[],[],2,false,1]"#,
        r#"b=["L",1,0,[],[],[],0,0,[],[],1]"#,
        r#"c=["D",1,2,[],[],[],999999,0,[],[],1,["v",7]]"#,
        "x=f5:1:w",
        "y=f6:2:w",
    ];
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &records),
            ("finals", &["x", "a", "y", "a", "c", "x"]),
        ],
    );
    // The entry of its own end is named: all before it were dropped.
    assert_eq!(
        flat(f.run(&scripts::FINALS, finals(10)).await.expect("finals")),
        ["1", "xya"]
    );
    let state = f.state().await;
    assert_eq!(state["records"][0], r#"a=["D",1,2,[],[],[],5,0,[],[],2]"#);
    assert_eq!(state["finals"], ["x", "y", "a", "c", "x"]);
    let before = f.state().await;
    assert_eq!(
        flat(f.run(&scripts::FINALS, finals(10)).await.expect("finals")),
        ["0", "xya"]
    );
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn forget_drops_what_sql_has_and_keeps_the_rest_for_later() {
    let f = Fixture::new().await;
    for letter in ['a', 'b'] {
        f.seed("HSET", "records", &[&id(letter), b"f5:1:w"]).await;
        f.seed("RPUSH", "finals", &[&id(letter)]).await;
    }
    let due = f
        .run(&scripts::FINALS, |call: &mut Call| {
            call.arg(60_000).arg(10);
        })
        .await
        .expect("finals");
    assert_eq!(flat(due), ["0", "ab"]);
    let before = f.state().await;
    let forget = |call: &mut Call| {
        call.arg("01").arg(60_000).arg([id('a'), id('b')].concat());
    };
    assert_eq!(
        flat(f.run(&scripts::FORGET, forget).await.expect("forget")),
        ["1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &["a=f5:1:w"]),
            ("finals", &["a"]),
            ("counters", &["forgets=1"]),
        ],
    );
}

#[tokio::test]
async fn forget_keeps_a_record_that_has_ended_again_since_it_was_named() {
    // Of each form, and a cancelled one: they ended a moment ago, after finals.lua had named an
    // earlier end.
    let fresh: [&[u8]; 4] = [
        b"f999999:3:w",
        b"e\x02999999\nv\tc4\nu\tc5\n",
        b"\x97\xa1X\x01\x00\x90\x90\x90\xce\x00\x0f\x42\x3f",
        b"\x97\xa1D\x01\x02\x90\x90\x90\xce\x00\x0f\x42\x3f",
    ];
    for record in fresh {
        let f = Fixture::new().await;
        f.seed("HSET", "records", &[&id('a'), record, &id('b'), b"f5:1:w"])
            .await;
        f.seed("RPUSH", "finals", &[&id('b'), &id('a')]).await;
        let before = f.state().await;
        let forget = |call: &mut Call| {
            call.arg("11").arg(60_000).arg([id('b'), id('a')].concat());
        };
        assert_eq!(
            flat(f.run(&scripts::FORGET, forget).await.expect("forget")),
            ["1"]
        );
        let record = before["records"]
            .iter()
            .find(|record| record.starts_with("a="))
            .expect("a record")
            .as_str();
        changed(
            &before,
            &f.state().await,
            &[
                ("records", &[record]),
                ("finals", &["a"]),
                ("counters", &["forgets=1"]),
            ],
        );
        // A grace time later it goes.
        let later = |call: &mut Call| {
            call.arg("1").arg(1).arg(id('a'));
        };
        assert_eq!(
            flat(f.run(&scripts::FORGET, later).await.expect("forget")),
            ["1"]
        );
        assert!(!f.state().await.contains_key("records"));
    }
    // An entry of a past end leaves alone.
    for (record, left) in [
        (PAST_OLD, r#"["D",1,2,[],[],[],5,0,[],[],2,false,1]"#),
        (PAST_LIVE, r#"["L",1,0,[],[],[],0,0,[],[],1]"#),
    ] {
        let f = Fixture::new().await;
        f.seed("HSET", "records", &[&id('a'), record]).await;
        f.seed("RPUSH", "finals", &[&id('a'), &id('b'), &id('a')])
            .await;
        let before = f.state().await;
        let forget = |call: &mut Call| {
            call.arg("1").arg(60_000).arg(id('a'));
        };
        assert_eq!(
            flat(f.run(&scripts::FORGET, forget).await.expect("forget")),
            ["0"]
        );
        let record = format!("a={left}");
        changed(
            &before,
            &f.state().await,
            &[("records", &[&record]), ("finals", &["b", "a"])],
        );
    }
    // A live record stays, and is not listed any more.
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed("RPUSH", "finals", &[&id('a')]).await;
    let before = f.state().await;
    let forget = |call: &mut Call| {
        call.arg("1").arg(60_000).arg(id('a'));
    };
    assert_eq!(
        flat(f.run(&scripts::FORGET, forget).await.expect("forget")),
        ["0"]
    );
    changed(&before, &f.state().await, &[("finals", &[])]);
}

#[tokio::test]
async fn forget_stops_where_another_caller_was_faster() {
    let f = Fixture::new().await;
    for letter in ['b', 'c'] {
        f.seed("HSET", "records", &[&id(letter), b"f5:1:w"]).await;
        f.seed("RPUSH", "finals", &[&id(letter)]).await;
    }
    let before = f.state().await;
    let forget = |flags: &'static str, letters: &'static [char]| {
        move |call: &mut Call| {
            call.arg(flags).arg(60_000).arg(
                letters
                    .iter()
                    .flat_map(|letter| id(*letter))
                    .collect::<Vec<u8>>(),
            );
        }
    };
    assert_eq!(
        flat(
            f.run(&scripts::FORGET, forget("11", &['a', 'b']))
                .await
                .expect("forget")
        ),
        ["0"]
    );
    assert_eq!(f.state().await, before, "the list begins with another");
    assert_eq!(
        flat(
            f.run(&scripts::FORGET, forget("111", &['b', 'x', 'c']))
                .await
                .expect("forget")
        ),
        ["1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &["c=f5:1:w"]),
            ("finals", &["c"]),
            ("counters", &["forgets=1"]),
        ],
    );
    assert_eq!(
        flat(
            f.run(&scripts::FORGET, forget("11", &['c', 'x']))
                .await
                .expect("forget")
        ),
        ["1"]
    );
    let none = f.state().await;
    assert_eq!((none.get("records"), none.get("finals")), (None, None));
}

#[tokio::test]
async fn finals_name_what_is_damaged_or_gone_at_once_and_stop_at_the_first_that_waits() {
    let f = Fixture::new().await;
    let waits = format!("f{}:1:w", NOW - 5);
    // ["D", 1, 2, [], [], [], 5]
    let dead = b"\x97\xa1D\x01\x02\x90\x90\x90\x05";
    f.seed(
        "HSET",
        "records",
        &[
            &id('a'),
            b"f5:1:w",
            &id('b'),
            b"fx:1:w",
            &id('c'),
            b"f",
            &id('d'),
            dead,
        ],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[&id('e'), waits.as_bytes(), &id('f'), b"f5:1:w"],
    )
    .await;
    f.seed(
        "RPUSH",
        "finals",
        &[
            &id('a'),
            &id('b'),
            &id('c'),
            &id('d'),
            &id('z'),
            &id('e'),
            &id('f'),
        ],
    )
    .await;
    let before = f.state().await;
    let finals = |call: &mut Call| {
        call.arg(1000).arg(10);
    };
    assert_eq!(
        flat(f.run(&scripts::FINALS, finals).await.expect("finals")),
        ["0", "abcdz"]
    );
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn one_forwarder_at_a_time_has_the_outbox() {
    let f = Fixture::new().await;
    let read = async |forwarder: &str| {
        let outbox = |call: &mut Call| {
            call.arg(forwarder).arg(3_000).arg(10).arg(1 << 20);
        };
        flat(f.run(&scripts::OUTBOX, outbox).await.expect("outbox"))
    };
    let before = f.state().await;
    assert!(read("one").await.is_empty());
    changed(&before, &f.state().await, &[]);

    f.seed("XADD", "outbox", &[b"1-1", b"c", b"report"]).await;
    assert_eq!(read("one").await, ["1-1", "c", "report"]);
    let taken = f.state().await;
    changed(
        &before,
        &taken,
        &[
            ("outbox", &["c=report"]),
            ("counters", &["forwarder=1003000 one"]),
        ],
    );
    assert!(read("other").await.is_empty());
    assert_eq!(
        read("one").await,
        ["1-1", "c", "report"],
        "it may read again what it has not removed"
    );
    assert_eq!(f.state().await, taken);

    f.seed("HSET", "counters", &[b"forwarder", b"1000000 one"])
        .await;
    assert_eq!(
        read("other").await,
        ["1-1", "c", "report"],
        "the time of the one is over"
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("outbox", &["c=report"]),
            ("counters", &["forwarder=1003000 other"]),
        ],
    );
}

#[tokio::test]
async fn outbox_reads_all_or_none_where_it_is_asked_to() {
    let f = Fixture::new().await;
    for entry in ["1-1", "2-1"] {
        f.seed("XADD", "outbox", &[entry.as_bytes(), b"c", b"report"])
            .await;
    }
    f.seed("HSET", "counters", &[b"outbox_bytes", b"200"]).await;
    let before = f.state().await;
    let read = async |most: usize, bytes: usize| {
        let outbox = |call: &mut Call| {
            call.arg("one").arg(3_000).arg(most).arg(bytes).arg(1);
        };
        flat(f.run(&scripts::OUTBOX, outbox).await.expect("outbox"))
    };
    assert_eq!(read(10, 199).await, ["2"], "too many bytes");
    assert_eq!(read(1, 1000).await, ["2"], "too many entries");
    assert_eq!(f.state().await, before, "it has not taken the outbox");
    assert_eq!(
        read(2, 200).await,
        ["1-1", "c", "report", "2-1", "c", "report"]
    );
    let kept = ["forwarder=1003000 one", "outbox_bytes=200"];
    changed(&before, &f.state().await, &[("counters", &kept)]);
}

#[tokio::test]
async fn forwarded_removes_the_entries_named() {
    let f = Fixture::new().await;
    f.seed("XADD", "outbox", &[b"1-1", b"c", b"one"]).await;
    f.seed("XADD", "outbox", &[b"2-1", b"c", b"two"]).await;
    f.seed(
        "HSET",
        "counters",
        &[b"forwarder", b"1000000 me", b"outbox_bytes", b"6"],
    )
    .await;
    let before = f.state().await;
    let forwarded = async |forwarder: &str, entry: &str| {
        let forwarded = |call: &mut Call| {
            call.arg("t:wake")
                .arg("q")
                .arg(10)
                .arg(1000)
                .arg(forwarder)
                .arg(3)
                .arg(entry);
        };
        flat(
            f.run(&scripts::FORWARDED, forwarded)
                .await
                .expect("forwarded"),
        )
    };
    assert_eq!(forwarded("me", "1-1").await, ["1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("outbox", &["c=two"]),
            ("counters", &["forwarder=1000000 me", "outbox_bytes=3"]),
        ],
    );
    // One that was too slow: the outbox is another's now.
    assert_eq!(forwarded("slow", "1-1").await, ["1"]);
    // A stream that is empty is still there.
    let mut empty = before.clone();
    empty.insert("outbox".to_owned(), vec![]);
    empty.insert(
        "counters".to_owned(),
        vec!["forwarder=1000000 me".to_owned()],
    );
    assert_eq!(forwarded("slow", "2-1").await, ["0"]);
    assert_eq!(f.state().await, empty);
    assert_eq!(forwarded("me", "2-1").await, ["0"]);
    empty.remove("counters");
    assert_eq!(f.state().await, empty);
}

#[tokio::test]
async fn promote_drops_what_its_record_does_not_wait_for() {
    let f = Fixture::new().await;
    // Of another life of the task, of one that is done, of one that is gone.
    f.seed("HSET", "records", &[&id('a'), b"1", &id('b'), b"f5:1:w"])
        .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    for member in [lease('a', 3), id('a'), lease('b', 1), lease('c', 1)] {
        f.seed("ZADD", "delayed", &[NOW.to_string().as_bytes(), &member])
            .await;
    }
    let before = f.state().await;
    assert_eq!(
        flat(f.run(&scripts::PROMOTE, promote).await.expect("promote")),
        ["0", "0", "-1"]
    );
    changed(&before, &f.state().await, &[("delayed", &[])]);
}

#[tokio::test]
async fn a_clock_that_was_set_back_holds_nothing_longer_than_the_longest_of_its_kind() {
    let f = Fixture::new().await;
    let hour = 3_600_000;
    f.held('a', "w", 1).await;
    f.seed(
        "ZADD",
        "leases",
        &[(NOW + hour).to_string().as_bytes(), &lease('a', 1)],
    )
    .await;
    f.seed(
        "ZADD",
        "delayed",
        &[(NOW + hour).to_string().as_bytes(), &id('b')],
    )
    .await;
    f.seed(
        "HSET",
        "counters",
        &[b"longest_lease", b"30000", b"longest_delay", b"5"],
    )
    .await;
    f.run(&scripts::EXPIRE, expire).await.expect("expire");
    f.run(&scripts::PROMOTE, promote).await.expect("promote");
    let state = f.state().await;
    assert_eq!(
        state["leases"],
        [format!("a1={}", NOW + 30_000)],
        "the longest lease that was given"
    );
    assert_eq!(
        state["delayed"],
        [format!("b={}", NOW + 600_000)],
        "the horizon, which is longer than any backoff was"
    );
}

#[tokio::test]
async fn a_forwarder_of_the_future_does_not_keep_the_outbox() {
    let f = Fixture::new().await;
    f.seed("XADD", "outbox", &[b"1-1", b"c", b"report"]).await;
    f.seed(
        "HSET",
        "counters",
        &[b"forwarder", format!("{} one", NOW + 3_600_000).as_bytes()],
    )
    .await;
    let outbox = |call: &mut Call| {
        call.arg("other").arg(3_000).arg(10).arg(1 << 20);
    };
    assert_eq!(
        flat(f.run(&scripts::OUTBOX, outbox).await.expect("outbox")),
        ["1-1", "c", "report"]
    );
    assert_eq!(f.state().await["counters"], ["forwarder=1003000 other"]);
}

#[tokio::test]
async fn outbox_keeps_what_it_has_and_reads_by_bytes() {
    let f = Fixture::new().await;
    for entry in ["1-1", "2-1", "3-1", "4-1"] {
        f.seed("XADD", "outbox", &[entry.as_bytes(), b"c", &[b'.'; 100]])
            .await;
    }
    f.seed("HSET", "counters", &[b"outbox_bytes", b"400"]).await;
    let outbox = async |forwarder: &str, most: usize, bytes: usize| {
        let outbox = |call: &mut Call| {
            call.arg(forwarder).arg(3_000).arg(most).arg(bytes);
        };
        flat(f.run(&scripts::OUTBOX, outbox).await.expect("outbox")).len() / 3
    };
    assert_eq!(outbox("one", 0, 0).await, 0, "it has nothing to keep");
    assert_eq!(f.state().await["counters"], ["outbox_bytes=400"]);
    assert_eq!(outbox("one", 10, 250).await, 2);
    f.seed("HSET", "counters", &[b"forwarder", b"1000001 one"])
        .await;
    assert_eq!(outbox("one", 0, 0).await, 0);
    assert_eq!(
        f.state().await["counters"],
        ["forwarder=1003000 one", "outbox_bytes=400"],
        "kept for another while"
    );
    assert_eq!(outbox("one", 10, 1).await, 1, "one at least");
}

#[tokio::test]
async fn finals_take_a_time_of_the_future_for_now() {
    let f = Fixture::new().await;
    let future = format!("f{}:1:w", NOW + 3_600_000);
    f.seed(
        "HSET",
        "records",
        &[&id('a'), future.as_bytes(), &id('b'), b"f5:1:w"],
    )
    .await;
    f.seed("RPUSH", "finals", &[&id('a'), &id('b')]).await;
    let before = f.state().await;
    let finals = |call: &mut Call| {
        call.arg(60_000).arg(10);
    };
    assert_eq!(
        flat(f.run(&scripts::FINALS, finals).await.expect("finals")),
        ["0", ""],
        "the grace begins now"
    );
    changed(
        &before,
        &f.state().await,
        &[("records", &[&format!("a=f{NOW}:1:w"), "b=f5:1:w"])],
    );
}

#[tokio::test]
async fn a_lease_that_never_reached_its_worker_costs_nothing() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed("ZADD", "undelivered", &[NOW.to_string().as_bytes(), b"1"])
        .await;
    let before = f.state().await;
    assert_eq!(
        flat(f.run(&scripts::EXPIRE, expire).await.expect("expire")),
        ["0", "0", "1", "0", "-1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &[r#"a=["L",1,0,[],[],[],0,1]"#]),
            ("leases", &[]),
            ("undelivered", &[]),
            ("mr:T", &["1/1/a"]),
            ("counters", &["open_bytes=413", "live=1", "open=1"]),
        ],
    );
}

/// A notice has 8 values and a death 10, so entries of 6,000 values would end in the middle of
/// some.
#[tokio::test]
async fn a_thousand_leases_that_end_together_are_reported_in_whole_events() {
    let f = Fixture::new().await;
    for n in 0..1000_u64 {
        let id = [vec![b'a'; 8], n.to_be_bytes().to_vec()].concat();
        let lease = [&id[..], b"1"].concat();
        // Of every third this is the last failure.
        let attempts = if n % 3 == 0 { 1_u32 } else { 2 };
        let body = [
            &[2][..],
            &attempts.to_be_bytes(),
            &30_000_u32.to_be_bytes(),
            b"text",
        ]
        .concat();
        f.seed("HSET", "records", &[&id, b"h1:w"]).await;
        f.seed("HSET", "bodies", &[&id, &body]).await;
        f.seed("ZADD", "leases", &[NOW.to_string().as_bytes(), &lease])
            .await;
    }
    let all = |call: &mut Call| {
        call.arg(1)
            .arg("t:wake")
            .arg("q")
            .arg(&b"\x91\x00"[..])
            .arg(1000)
            .arg(100)
            .arg(1 << 20);
    };
    assert_eq!(
        flat(f.run(&scripts::EXPIRE, all).await.expect("expire")),
        ["1000", "334", "0", "1", "-1"]
    );
    let entries = f.state().await.remove("outbox").unwrap();
    assert!(
        (2..10).contains(&entries.len()),
        "{} entries",
        entries.len()
    );
    let (mut notices, mut deaths) = (0, 0);
    for entry in entries {
        let fields: Vec<&str> = entry
            .split('=')
            .map(|part| part.rsplit(' ').next().unwrap())
            .collect();
        assert!(["d", "x"].contains(&fields[0]), "{}", &entry[..40]);
        notices += fields.iter().filter(|field| **field == "e").count();
        deaths += fields.iter().filter(|field| **field == "h").count();
    }
    assert_eq!((notices, deaths), (1000, 334));
}

#[tokio::test]
async fn an_undelivered_grant_of_the_future_does_not_stay_for_ever() {
    let f = Fixture::new().await;
    f.seed("HSET", "counters", &[b"longest_lease", b"30000"])
        .await;
    f.seed(
        "ZADD",
        "undelivered",
        &[(NOW + 86_400_000).to_string().as_bytes(), b"1"],
    )
    .await;
    let before = f.state().await;
    let look = |call: &mut Call| {
        call.arg(0).arg(600_000);
    };
    assert_eq!(
        flat(f.run(&scripts::LOOK, look).await.expect("look"))[0],
        "1",
        "something is due"
    );
    f.run(&scripts::EXPIRE, expire).await.expect("expire");
    changed(
        &before,
        &f.state().await,
        &[("undelivered", &[&format!("1={}", NOW + 30_000)])],
    );
}

#[tokio::test]
async fn sweep_drops_elements_that_a_newer_one_has_replaced() {
    let f = Fixture::new().await;
    // ["L", 2, 1, [], [], [], 0, 3, ["w", 1], []]: the third offer counts.
    let record = b"\x9a\xa1L\x02\x01\x90\x90\x90\x00\x03\x92\xa1w\x01\x90";
    f.seed("HSET", "records", &[&id('a'), record]).await;
    f.seed(
        "LPUSH",
        "mr:T",
        &[
            &element(2, 1, 'a'),
            &element(2, 2, 'a'),
            &element(2, 3, 'a'),
        ],
    )
    .await;
    f.seed("HSET", "counters", &[b"open", b"1"]).await;
    let before = f.state().await;
    let sweep = |call: &mut Call| {
        call.arg(512);
    };
    assert_eq!(
        flat(f.run(&scripts::SWEEP, sweep).await.expect("sweep")),
        ["2", "0"]
    );
    changed(
        &before,
        &f.state().await,
        &[("mr:T", &["2/3/a"]), ("mr:C", &["2"])],
    );
}

/// Each worker that asks for a task that is reserved for another one leaves a pointer.
#[tokio::test]
async fn sweep_keeps_so_many_pointers_of_a_lane_and_no_more() {
    const MOST: usize = 10_000;
    let f = Fixture::new().await;
    live(&f, 'a', r#"["L",1,0,[],[],[],0,1,[],[],0,["gone",0]]"#).await;
    f.seed("LPUSH", "mr:T", &[&element(1, 1, 'a')]).await;
    f.seed("HSET", "counters", &[b"open", b"1"]).await;
    let names: Vec<_> = (0..MOST + 1500).map(|n| format!("w{n}")).collect();
    for names in names.chunks(500) {
        let pointers: Vec<&[u8]> = names
            .iter()
            .flat_map(|name| [name.as_bytes(), b"1"])
            .collect();
        f.seed("HSET", "mr:P", &pointers).await;
    }
    let sweep = async || {
        let sweep = |call: &mut Call| {
            call.arg(512);
        };
        flat(f.run(&scripts::SWEEP, sweep).await.expect("sweep"))
    };
    let mut before = f.state().await;
    let pointers = before.remove("mr:P").expect("pointers");
    for (dropped, left) in [("1000", MOST + 500), ("500", MOST), ("0", MOST)] {
        assert_eq!(sweep().await, ["0", dropped]);
        let mut after = f.state().await;
        let kept = after.remove("mr:P").expect("pointers");
        assert!(
            kept.len() == left && kept.iter().all(|pointer| pointers.contains(pointer)),
            "{}",
            kept.len()
        );
        assert_eq!(after, before);
    }
}

#[tokio::test]
async fn stats_count_and_change_nothing() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.waiting('b', 1, b"h5:w").await;
    f.held('c', "w", 1).await;
    f.seed("ZADD", "delayed", &[b"5", &id('d')]).await;
    f.seed("XADD", "outbox", &[b"*", b"c", b"report"]).await;
    f.seed("RPUSH", "finals", &[&id('e')]).await;
    f.seed("HSET", "counters", &[b"front4", b"1"]).await;
    let before = f.state().await;
    // The first 48 bits of the id are its time. One of two elements is ahead of the foremost
    // pointer.
    let created = u64::from_be_bytes([0, 0, b'a', b'a', b'a', b'a', b'a', b'a']).to_string();
    let expected = [
        "2", "1", "1", "3", "826", "1", "1", &created, "1", "0", "0", "0",
    ];
    assert_eq!(
        flat(f.run(&scripts::STATS, |_| {}).await.expect("stats")),
        expected
    );
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn the_extent_of_an_outbox_outlives_its_entries() {
    let f = Fixture::new().await;
    let extent = async || {
        flat(
            f.run(&scripts::OUTBOX_EXTENT, |_| {})
                .await
                .expect("extent"),
        )
    };
    assert_eq!(extent().await, ["0-0"]);
    f.seed("XADD", "outbox", &[b"5-1", b"c", b"report"]).await;
    f.seed("XADD", "outbox", &[b"7-2", b"c", b"report"]).await;
    let before = f.state().await;
    assert_eq!(extent().await, ["7-2", "5-1"]);
    assert_eq!(f.state().await, before);
    f.seed("XDEL", "outbox", &[b"5-1", b"7-2"]).await;
    assert_eq!(extent().await[0], "7-2", "and no first one");
}

#[tokio::test]
async fn books_count_and_change_nothing() {
    let f = Fixture::new().await;
    f.seed("HSET", "counters", &[b"grants", b"3"]).await;
    assert_eq!(
        flat(f.run(&scripts::BOOKS, |_| {}).await.expect("books")),
        ["0"],
        "an empty shard"
    );
    f.waiting('a', 1, b"1").await;
    f.held('c', "w", 1).await;
    f.seed("ZADD", "delayed", &[b"5", &id('d')]).await;
    f.seed("XADD", "outbox", &[b"*", b"c", b"report"]).await;
    f.seed("RPUSH", "finals", &[&id('e'), &id('f')]).await;
    f.seed("LPUSH", "lr:T", &[&element(1, 0, 'g')]).await;
    let before = f.state().await;
    let expected = [
        "2", "1", "1", "1", "1", "2", "0", "0", "0", "1", "1", "0", "0",
    ];
    assert_eq!(
        flat(f.run(&scripts::BOOKS, |_| {}).await.expect("books")),
        expected
    );
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn inspect_shows_each_record_and_changes_nothing() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    // ["L", 3, 1, ["9"], ["u", "1"], ["w", "2"], 0] and ["L", 2, 0, [""], [], [], 0]
    let both = b"\x97\xa1L\x03\x01\x91\xa19\x92\xa1u\xa11\x92\xa1w\xa12\x00";
    let scheduled = b"\x97\xa1L\x02\x00\x91\xa0\x90\x90\x00";
    f.seed(
        "HSET",
        "records",
        &[
            &id('a'),
            b"h5:w",
            &id('b'),
            both,
            &id('c'),
            scheduled,
            &id('x'),
            b"\xc1",
        ],
    )
    .await;
    // ["D", 1, 5, [], [], [], 7, 0, [], [], 3]
    f.seed(
        "HSET",
        "records",
        &[
            &id('d'),
            b"\x9b\xa1D\x01\x05\x90\x90\x90\x07\x00\x90\x90\x03",
        ],
    )
    .await;
    let before = f.state().await;
    let inspect = |call: &mut Call| {
        call.arg(id('a'))
            .arg(id('b'))
            .arg(id('c'))
            .arg(id('x'))
            .arg(id('z'))
            .arg(id('d'));
    };
    let answer = flat(f.run(&scripts::INSPECT, inspect).await.expect("inspect"));
    let a = ["L", "1", "0", "1", "0", "0", "0"];
    let b = ["L", "3", "1", "1", "1", "1", "0"];
    let c = ["L", "2", "0", "0", "0", "2", "0"];
    let d = ["D", "1", "0", "0", "5", "0", "3"];
    assert_eq!(
        answer,
        [&["topic/4-0"][..], &a, &b, &c, &["0", "0"], &d].concat()
    );
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn missing_names_the_tasks_without_a_record_and_changes_nothing() {
    let f = Fixture::new().await;
    let missing = async |ids: &[Vec<u8>]| {
        let ask = |call: &mut Call| {
            call.arg(ids.concat());
        };
        flat(f.run(&scripts::MISSING, ask).await.expect("missing"))
    };
    assert_eq!(missing(&[]).await, [""]);
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    // ["D", 1, 5, [], [], [], 7, 0, [], [], 3]
    let dead = b"\x9b\xa1D\x01\x05\x90\x90\x90\x07\x00\x90\x90\x03";
    f.seed(
        "HSET",
        "records",
        &[
            &id('a'),
            b"1",
            &id('b'),
            b"h5:w",
            &id('c'),
            b"f5:1:w",
            &id('d'),
            dead,
        ],
    )
    .await;
    let before = f.state().await;
    assert_eq!(missing(&['a', 'b', 'c', 'd'].map(id)).await, ["topic/4-0"]);
    assert_eq!(
        missing(&['y', 'a', 'z', 'b'].map(id)).await,
        ["topic/4-0", "1", "3"]
    );
    // More than Lua's stack holds.
    let many: Vec<_> = (0_u128..9000)
        .map(|n| n.to_be_bytes().to_vec())
        .chain([id('a')])
        .collect();
    let answer = missing(&many).await;
    assert_eq!((answer.len(), &answer[9000][..]), (9001, "9000"));
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn look_says_what_there_is_to_do() {
    let f = Fixture::new().await;
    let look = async || {
        let look = |call: &mut Call| {
            call.arg(60_000).arg(600_000);
        };
        let mut seen = flat(f.run(&scripts::LOOK, look).await.expect("look"));
        // What follows is of limit keys.
        seen.truncate(8);
        seen
    };
    assert_eq!(look().await, ["0"]);
    f.seed("HSET", "counters", &[b"grants", b"5", b"open", b"0"])
        .await;
    assert_eq!(look().await, ["0"], "counters are nothing to do");
    f.waiting('a', 1, b"1").await;
    assert_eq!(
        look().await,
        ["0", "0", "-1", "0", "0", "0", "0", "1"],
        "one that waits"
    );
    f.held('b', "w", 1).await;
    f.seed("HSET", "counters", &[b"longest_lease", b"30000"])
        .await;
    f.seed("LPUSH", "m:T", &[&element(1, 0, 'b')]).await;
    f.seed("HSET", "m:P", &[b"w", b"1"]).await;
    f.seed(
        "ZADD",
        "delayed",
        &[(NOW + 40).to_string().as_bytes(), &id('d')],
    )
    .await;
    f.seed("XADD", "outbox", &[b"*", b"c", b"report"]).await;
    f.seed("HSET", "records", &[&id('e'), b"f5:1:w"]).await;
    f.seed("RPUSH", "finals", &[&id('e')]).await;
    let before = f.state().await;
    assert_eq!(look().await, ["1", "0", "0", "1", "1", "1", "1", "1"]);
    f.seed(
        "ZADD",
        "leases",
        &[(NOW + 60).to_string().as_bytes(), &lease('b', 1)],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[&id('e'), format!("f{NOW}:1:w").as_bytes()],
    )
    .await;
    assert_eq!(look().await, ["0", "0", "40", "1", "1", "1", "0", "1"]);
    // Farther away than any that was given: a clock was set back.
    f.seed(
        "ZADD",
        "leases",
        &[(NOW + 31_000).to_string().as_bytes(), &lease('b', 1)],
    )
    .await;
    assert_eq!(look().await[0], "1");
    f.seed(
        "ZADD",
        "leases",
        &[NOW.to_string().as_bytes(), &lease('b', 1)],
    )
    .await;
    f.seed("HSET", "records", &[&id('e'), b"f5:1:w"]).await;
    assert_eq!(f.state().await, before);
}
