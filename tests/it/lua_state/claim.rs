//! The scripts that give tasks to workers: claim, delivered, peek.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, WEIGHT, body, changed, element, flat, id};

pub(super) fn claim(call: &mut Call, requests: &[(&str, u64)]) {
    claim_saying(call, &[], requests);
}

/// With grants that have reached their workers.
fn claim_saying(call: &mut Call, delivered: &[u64], requests: &[(&str, u64)]) {
    call.arg(100)
        .arg(10)
        .arg(1000)
        .arg(1 << 20)
        .arg("")
        .arg(delivered.len())
        .arg(delivered);
    for (worker, most) in requests {
        call.arg(*worker).arg(ask(*most, 1 << 20, true, 0));
    }
}

/// The wishes of a request; a task goes for its own lease.
fn ask(most: u64, bytes: u64, is_first: bool, priority: u8) -> String {
    format!("{most} {bytes} {} 0 {priority}", u8::from(is_first))
}

#[tokio::test]
async fn claim_takes_the_oldest_and_what_is_spent_leaves_the_tail() {
    let f = Fixture::new().await;
    for letter in ['a', 'b', 'c'] {
        f.waiting(letter, 1, b"1").await;
    }
    let before = f.state().await;
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1), ("v", 1)]))
        .await
        .expect("claim");
    let until = (NOW + 30_000).to_string();
    assert_eq!(
        flat(answer),
        [
            "7",
            "0",
            &NOW.to_string(),
            "1",
            "ab",
            "body2",
            "body2",
            "1",
            "1",
            "2"
        ]
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &["a=h1:w", "b=h2:v", "c=1"]),
            ("leases", &[&format!("a1={until}"), &format!("b2={until}")]),
            ("m:T", &["1/0/c"]),
            ("m:C", &["2"]),
            (
                "undelivered",
                &[&format!("1={until}"), &format!("2={until}")],
            ),
            (
                "counters",
                &[
                    "open_bytes=413",
                    "longest_lease=30000",
                    "live=3",
                    "grants=2",
                    "open=1",
                ],
            ),
        ],
    );
}

/// The answer to one claim by each worker at this time.
async fn claimed_at(f: &Fixture, now: i64, workers: &[&str]) -> Vec<String> {
    let mut call = f.keys.call(&scripts::CLAIM, Some(now));
    claim(
        &mut call,
        &workers
            .iter()
            .map(|worker| (*worker, 1))
            .collect::<Vec<_>>(),
    );
    flat(call.run(&mut f.redis.conn()).await.expect("claim"))
}

#[tokio::test]
async fn a_worker_that_gives_a_task_back_rests_from_it_and_takes_others() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed("HSET", "counters", &[b"grants", b"1"]).await;
    let rest = |call: &mut Call| super::report::reject(call, 'a', 1, "w", "rest", "1000");
    assert_eq!(
        flat(f.run(&scripts::REJECT, rest).await.expect("reject")),
        ["1", "0"]
    );
    let state = f.state().await;
    assert_eq!(
        state["records"],
        [format!(
            r#"a=["L",1,0,[],[],[],0,1,["\tw",{}]]"#,
            NOW + 1000
        )]
    );
    assert_eq!(
        (&state["mr:T"][..], state.get("delayed")),
        (&["1/1/a".to_owned()][..], None)
    );
    assert_eq!(
        claimed_at(&f, NOW + 999, &["w"]).await,
        ["7", "3"],
        "it rests, and asks again soon"
    );
    assert_eq!(f.state().await.get("mr:P"), None, "its pointer stays");

    // What comes behind is for it, and leaves its pointer where it was.
    f.waiting('b', 1, b"1").await;
    let got = claimed_at(&f, NOW + 999, &["w"]).await;
    assert_eq!(
        (&got[4..6], got.last().unwrap().as_str()),
        (&["b".to_owned(), "body2".to_owned()][..], "10")
    );
    // Its rest is over. Another one would have had the task before.
    let got = claimed_at(&f, NOW + 1000, &["w"]).await;
    assert_eq!((got[4].as_str(), got.last().unwrap().as_str()), ("a", "0"));
}

#[tokio::test]
async fn others_get_a_task_at_once_from_which_a_worker_rests() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.run(&scripts::REJECT, |call| {
        super::report::reject(call, 'a', 1, "w", "rest", "1000")
    })
    .await
    .expect("reject");
    let got = claimed_at(&f, NOW, &["w", "v"]).await;
    assert_eq!(
        (got[4].as_str(), &got[6..8]),
        ("a", &["0".to_owned(), "1".to_owned()][..])
    );
    // It gives it back, too: both rest, each as long as it said.
    f.run(&scripts::REJECT, |call| {
        super::report::reject(call, 'a', 1, "v", "rest", "500")
    })
    .await
    .expect("reject");
    assert_eq!(claimed_at(&f, NOW + 499, &["w", "v"]).await, ["7", "3"]);
    assert_eq!(
        claimed_at(&f, NOW + 500, &["w", "v"]).await[6..8],
        ["0", "1"]
    );
}

#[tokio::test]
async fn a_record_keeps_the_last_rests() {
    let f = Fixture::new().await;
    f.held('a', "w0", 1).await;
    f.seed("HSET", "counters", &[b"grants", b"1"]).await;
    for n in 0..40 {
        let worker = format!("w{n}");
        let rest =
            |call: &mut Call| super::report::reject(call, 'a', n + 1, &worker, "rest", "1000");
        assert_eq!(
            flat(f.run(&scripts::REJECT, rest).await.expect("reject")),
            ["1", "0"],
            "{n}"
        );
        let next = format!("w{}", n + 1);
        let got = claimed_at(&f, NOW, &[&next]).await;
        assert_eq!(got[4], "a", "{next}");
    }
    let records = f.state().await["records"].concat();
    assert_eq!(records.matches("\\tw").count(), 16, "{records}");
}

#[tokio::test]
async fn a_task_that_is_put_off_waits_at_no_cost() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let put_off = |call: &mut Call| super::report::reject(call, 'a', 1, "w", "put_off", "60000");
    assert_eq!(
        flat(f.run(&scripts::REJECT, put_off).await.expect("reject")),
        ["1", "0"]
    );
    let state = f.state().await;
    assert_eq!(state["records"], [r#"a=["L",1,0,["1"],[],[],0]"#]);
    assert_eq!(state["delayed"], [format!("a1={}", NOW + 60_000)]);
    assert_eq!((state.get("mr:T"), state.get("outbox")), (None, None));
}

#[tokio::test]
async fn claim_of_an_empty_shard_writes_nothing() {
    let f = Fixture::new().await;
    f.seed("ZADD", "undelivered", &[b"5", b"1"]).await;
    f.seed("XADD", "outbox", &[b"*", b"c", b"report"]).await;
    f.seed("HSET", "counters", &[b"outbox_bytes", b"1000"])
        .await;
    let before = f.state().await;
    let ask = || {
        f.run(&scripts::CLAIM, |call| {
            claim_saying(call, &[1], &[("w", 1)])
        })
    };
    assert_eq!(
        flat(ask().await.expect("claim")),
        ["7", "2"],
        "also where claims pause"
    );
    assert_eq!(
        f.state().await,
        before,
        "the caller notes the deliveries later"
    );

    f.waiting('a', 1, b"1").await;
    let before = f.state().await;
    assert_eq!(flat(ask().await.expect("claim")), ["7", "1"]);
    changed(&before, &f.state().await, &[("undelivered", &[])]);
}

#[tokio::test]
async fn claim_of_several_requests_gives_each_its_grant_and_its_lease() {
    let f = Fixture::new().await;
    for letter in ['a', 'b', 'c', 'd'] {
        f.waiting(letter, 1, b"1").await;
    }
    // b asks for a lease of its own length.
    let short = [
        &[2][..],
        &2_u32.to_be_bytes(),
        &9_000_u32.to_be_bytes(),
        b"text",
    ]
    .concat();
    f.seed("HSET", "bodies", &[&id('b'), &short]).await;
    let before = f.state().await;
    let requests = |call: &mut Call| {
        call.arg(100).arg(10).arg(1000).arg(1 << 20).arg("").arg(0);
        call.arg("w")
            .arg("2 1000 1 0 0")
            .arg("none")
            .arg("0 1000 1 0 0")
            .arg("v")
            .arg("1 1000 1 5000 0");
        call.arg("w")
            .arg("9 1000 1 0 2")
            .arg("u")
            .arg("1 1000 1 0 0");
    };
    let answer = f.run(&scripts::CLAIM, requests).await.expect("claim");
    let bodies = ["body2"; 4];
    let expected = [
        &["7", "0", "1000000", "1", "abcd"],
        &bodies[..],
        &["2", "0", "1", "1", "0", "0"],
    ]
    .concat();
    assert_eq!(flat(answer), expected);
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &["a=h1:w", "b=h1:w", "c=h2:v", "d=h3:w"]),
            (
                "leases",
                &["c2=1004999.5", "b1=1009000", "a1=1030000", "d3=1030000"],
            ),
            ("m:T", &[]),
            ("m:C", &["4"]),
            // A grant is undelivered until the last of its leases ends.
            ("undelivered", &["2=1004999.5", "1=1030000", "3=1030000"]),
            (
                "counters",
                &[
                    "open_bytes=0",
                    "longest_lease=30000",
                    "live=4",
                    "grants=3",
                    "open=0",
                ],
            ),
        ],
    );
}

#[tokio::test]
async fn claim_finds_a_task_behind_many_spent_elements() {
    let f = Fixture::new().await;
    let spent = vec![element(1, 0, 'x'); 300];
    f.seed(
        "LPUSH",
        "m:T",
        &spent.iter().map(Vec::as_slice).collect::<Vec<_>>(),
    )
    .await;
    f.waiting('a', 1, b"1").await;
    for _ in 0..3 {
        let answer = f
            .run(&scripts::CLAIM, |call| claim(call, &[("w", 1), ("v", 0)]))
            .await
            .expect("claim");
        assert_eq!(
            flat(answer),
            ["7", "0", "1000000", "1", "", "0", "0", "1", "2"],
            "a hundred elements: ask again"
        );
    }
    assert_eq!(f.state().await["m:T"], ["1/0/a"]);
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1), ("v", 1)]))
        .await
        .expect("claim");
    assert_eq!(
        flat(answer)[4..],
        ["a", "body2", "1", "0", "0"],
        "and all lanes are empty now"
    );
}

#[tokio::test]
async fn claim_of_a_worker_that_passes_many_tasks_leaves_the_others_their_part() {
    let f = Fixture::new().await;
    for letter in 'a'..='i' {
        f.waiting(letter, 2, b"m\x02\x01\0\nw\th1\n").await;
    }
    let ten = |call: &mut Call| {
        call.arg(10).arg(10).arg(1000).arg(1 << 20).arg("").arg(0);
        call.arg("w")
            .arg(ask(1, 1000, true, 0))
            .arg("v")
            .arg(ask(2, 1000, true, 0));
    };
    let answer = f.run(&scripts::CLAIM, ten).await.expect("claim");
    let tasks = ["ab", "body2", "body2"];
    assert_eq!(
        flat(answer)[4..],
        [&tasks[..], &["0", "2", "1", "2"]].concat(),
        "w asks again"
    );
    assert_eq!(f.state().await["m:P"], ["w=5"], "half of the budget");
}

#[tokio::test]
async fn claim_passes_what_the_worker_holds_and_keeps_its_pointer() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    f.waiting('b', 2, b"2").await;
    let first = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(first)[4], "a");
    let before = f.state().await;
    assert_eq!(before["m:P"], ["w=1"]);
    // From the beginning, as if the pointer had been dropped: its record refuses what w holds.
    f.seed("DEL", "m:P", &[]).await;
    let again = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 2)]))
        .await
        .expect("claim");
    assert_eq!(flat(again)[4..], ["b", "body2", "1", "2"]);
    let until = (NOW + 30_000).to_string();
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &["a=m2/1/0 w:h1", "b=m2/1/0 w:h2"]),
            ("leases", &[&format!("a1={until}"), &format!("b2={until}")]),
            ("m:P", &["w=2"]),
            (
                "undelivered",
                &[&format!("1={until}"), &format!("2={until}")],
            ),
            (
                "counters",
                &[
                    "open_bytes=826",
                    "front4=2",
                    "longest_lease=30000",
                    "live=2",
                    "grants=2",
                    "open=2",
                ],
            ),
        ],
    );
}

#[tokio::test]
async fn claim_pauses_while_the_outbox_is_full() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    for _ in 0..10 {
        f.seed("XADD", "outbox", &[b"*", b"c", b"report"]).await;
    }
    let before = f.state().await;
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(answer), ["7", "1"]);
    assert_eq!(f.state().await, before);

    f.seed("DEL", "outbox", &[]).await;
    f.seed("HSET", "counters", &[b"outbox_bytes", b"1000"])
        .await;
    let before = f.state().await;
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(answer), ["7", "1"], "or has so many bytes");
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn claim_notes_what_was_delivered_before() {
    let f = Fixture::new().await;
    for (grant, deadline) in [("1", "5"), ("2", "6")] {
        f.seed(
            "ZADD",
            "undelivered",
            &[deadline.as_bytes(), grant.as_bytes()],
        )
        .await;
    }
    f.waiting('a', 1, b"1").await;
    let before = f.state().await;
    f.run(&scripts::CLAIM, |call| {
        claim_saying(call, &[2, 9], &[("w", 0)])
    })
    .await
    .expect("claim");
    changed(&before, &f.state().await, &[("undelivered", &["1=5"])]);
}

#[tokio::test]
async fn delivered_names_grants_that_count_from_now_on() {
    let f = Fixture::new().await;
    for (grant, deadline) in [("1", "5"), ("2", "6")] {
        f.seed(
            "ZADD",
            "undelivered",
            &[deadline.as_bytes(), grant.as_bytes()],
        )
        .await;
    }
    let before = f.state().await;
    let delivered = |call: &mut Call| {
        call.arg(&[1, 9]);
    };
    assert_eq!(
        flat(
            f.run(&scripts::DELIVERED, delivered)
                .await
                .expect("delivered")
        ),
        ["1"]
    );
    changed(&before, &f.state().await, &[("undelivered", &["2=6"])]);
}

#[tokio::test]
async fn claim_bounds_the_bytes_of_all_requests_together() {
    let f = Fixture::new().await;
    for letter in ['a', 'b', 'c', 'd'] {
        f.waiting(letter, 1, b"1").await;
    }
    f.seed("HSET", "counters", &[b"largest_body", b"13"]).await;
    // Two bodies of 13 bytes fit into 30; each request would get one.
    let narrow = |call: &mut Call| {
        call.arg(100).arg(10).arg(1000).arg(30).arg("").arg(0);
        for worker in ["u", "v", "w"] {
            call.arg(worker).arg(ask(1, 1 << 20, true, 0));
        }
    };
    let answer = flat(f.run(&scripts::CLAIM, narrow).await.expect("claim"));
    let now = NOW.to_string();
    let expected = [
        "7", "0", &now, "1", "ab", "body2", "body2", "1", "1", "0", "3", "2",
    ];
    assert_eq!(answer, expected, "the third is told to ask again");
    assert_eq!(f.state().await["m:T"], ["1/0/d", "1/0/c"]);

    // A body that is larger than the whole bound goes, alone.
    let alone = |call: &mut Call| {
        call.arg(100).arg(10).arg(1000).arg(5).arg("").arg(0);
        for worker in ["u", "v"] {
            call.arg(worker).arg(ask(2, 1 << 20, true, 0));
        }
    };
    let answer = flat(f.run(&scripts::CLAIM, alone).await.expect("claim"));
    assert_eq!(
        answer,
        ["7", "0", &now, "3", "c", "body2", "1", "0", "1", "2", "2"],
        "and both ask again"
    );
}

#[tokio::test]
async fn claim_adds_nothing_large_to_what_the_caller_has() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.seed("HSET", "counters", &[b"largest_body", b"13"]).await;
    let narrow = |is_first: bool| {
        move |call: &mut Call| {
            call.arg(100)
                .arg(10)
                .arg(1000)
                .arg(1 << 20)
                .arg("")
                .arg(0)
                .arg("w")
                .arg(ask(9, 12, is_first, 0));
        }
    };
    let before = f.state().await;
    assert_eq!(
        flat(f.run(&scripts::CLAIM, narrow(false)).await.expect("claim")),
        ["7", "0"]
    );
    changed(&before, &f.state().await, &[]);
    assert_eq!(
        flat(f.run(&scripts::CLAIM, narrow(true)).await.expect("claim"))[4],
        "a",
        "alone it goes"
    );
}

#[tokio::test]
async fn claim_takes_the_priority_that_the_caller_names() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.seed("HSET", "records", &[&id('h'), b"1"]).await;
    f.seed("HSET", "bodies", &[&id('h'), &body(1)]).await;
    f.seed("LPUSH", "h:T", &[&element(1, 0, 'h')]).await;
    let only = |priority: u8| {
        move |call: &mut Call| {
            call.arg(100)
                .arg(10)
                .arg(1000)
                .arg(1 << 20)
                .arg("")
                .arg(0)
                .arg("w")
                .arg(ask(9, 1 << 20, true, priority));
        }
    };
    let low = flat(f.run(&scripts::CLAIM, only(3)).await.expect("claim"));
    assert_eq!(low, ["7", "0"]);
    let medium = flat(f.run(&scripts::CLAIM, only(2)).await.expect("claim"));
    assert_eq!(medium[4..6], ["a", "body2"]);
    assert_eq!(
        medium[6..],
        ["1", "1"],
        "and nothing else; the one of high priority is left"
    );
}

#[tokio::test]
async fn claim_at_full_memory_keeps_to_so_many_leases() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.waiting('b', 1, b"1").await;
    let before = f.state().await;
    let with = |leases: u64| {
        move |call: &mut Call| {
            call.arg(100)
                .arg(10)
                .arg(1000)
                .arg(1 << 20)
                .arg(leases)
                .arg(0)
                .arg("v")
                .arg(ask(1, 1 << 20, true, 0));
        }
    };
    let paused = f
        .run(&scripts::CLAIM_AT_FULL_MEMORY, with(1))
        .await
        .expect("claim");
    assert_eq!(flat(paused), ["7", "1"]);
    assert_eq!(f.state().await, before);
    let one_more = f
        .run(&scripts::CLAIM_AT_FULL_MEMORY, with(2))
        .await
        .expect("claim");
    assert_eq!(flat(one_more)[4], "b");
}

#[tokio::test]
async fn claim_passes_a_task_that_the_worker_failed_for_good() {
    let f = Fixture::new().await;
    // ["L", 2, 2, [], [], [], 0, 1, ["w", -1], []]: w has had its two failures, element 1 is the
    // newest.
    let record = b"\x9a\xa1L\x02\x02\x90\x90\x90\x00\x01\x92\xa1w\xff\x90";
    f.seed("HSET", "records", &[&id('a'), record]).await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    f.seed("LPUSH", "mr:T", &[&element(2, 1, 'a')]).await;
    let before = f.state().await;
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(answer), ["7", "0"]);
    changed(
        &before,
        &f.state().await,
        &[("mr:P", &["w=1"]), ("counters", &["front3=1"])],
    );
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("v", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(answer)[4], "a", "others get it");
}

#[tokio::test]
async fn claim_takes_a_task_by_its_newest_element_only() {
    let f = Fixture::new().await;
    // ["L", 2, 1, [], [], [], 0, 2, ["w", 1], []]
    let record = b"\x9a\xa1L\x02\x01\x90\x90\x90\x00\x02\x92\xa1w\x01\x90";
    f.seed("HSET", "records", &[&id('a'), record]).await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    f.seed("LPUSH", "mr:T", &[&element(2, 1, 'a'), &element(2, 2, 'a')])
        .await;
    f.seed("LPUSH", "m:T", &[&element(2, 0, 'a')]).await;
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("v", 9)]))
        .await
        .expect("claim");
    assert_eq!(
        flat(answer)[4..],
        ["a", "body2", "1", "1", "2", "2"],
        "of the first task the attempt is the second"
    );
    let after = f.state().await;
    // Elements 1 and 0 were spent at the tails of their lanes; 2 still offers the other replica.
    assert_eq!(
        (&after["mr:T"][..], after.get("m:T")),
        (&["2/2/a".to_owned()][..], None)
    );
}

#[tokio::test]
async fn claim_begins_at_the_tail_where_a_pointer_lies_beyond_the_head() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.seed("HSET", "m:P", &[b"w", b"1000"]).await;
    let answer = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(answer)[4], "a");
}

#[tokio::test]
async fn claim_says_of_which_priorities_there_are_elements_left() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.waiting('b', 1, b"1").await;
    f.seed("LPUSH", "lr:T", &[&element(1, 0, 'x')]).await;
    let left = async |priority| {
        let request = |call: &mut Call| {
            call.arg(100)
                .arg(10)
                .arg(1000)
                .arg(1 << 20)
                .arg("")
                .arg(0)
                .arg("w")
                .arg(ask(1, 1 << 20, true, priority));
        };
        flat(f.run(&scripts::CLAIM, request).await.expect("claim"))
            .pop()
            .unwrap()
    };
    assert_eq!(
        left(2).await,
        "6",
        "one of medium priority, and what no request asked for"
    );
    assert_eq!(left(0).await, "4");
}

#[tokio::test]
async fn peek_says_of_which_priorities_there_are_elements() {
    let f = Fixture::new().await;
    let peek = async || flat(f.run(&scripts::PEEK, |_| {}).await.expect("peek"));
    assert_eq!(peek().await, ["0"]);
    f.waiting('a', 1, b"1").await;
    f.seed("LPUSH", "lr:T", &[&element(1, 0, 'b')]).await;
    let before = f.state().await;
    assert_eq!(peek().await, ["6"]);
    assert_eq!(f.state().await, before);
    assert_eq!(
        before["counters"],
        ["live=1", "open=1", &format!("open_bytes={WEIGHT}")]
    );
}
