//! Shards open, are filled by the fanout, and close: open, enqueue, close.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, State, WEIGHT, backoff::body_with, body, changed, element, flat, id};

#[tokio::test]
async fn open_empties_what_is_left_of_an_old_life_but_the_outbox() {
    // A lost generation, and one whose opening came late, which SQL counts as lost.
    for (left, args) in [("DEL", &[][..]), ("SET", &[&b"7"[..]])] {
        let f = Fixture::new().await;
        f.waiting('a', 1, b"1").await;
        f.held('b', "w", 1).await;
        for (command, key, args) in [
            ("ZADD", "delayed", &[&b"5"[..], b"c"][..]),
            ("RPUSH", "finals", &[b"d"]),
            ("SET", "offset", &[b"topic/4-0"]),
            ("SET", "m:C", &[b"3"]),
            ("HSET", "m:P", &[b"w", b"4"]),
            ("XADD", "outbox", &[b"*", b"c", b"report"]),
            (left, "generation", args),
        ] {
            f.seed(command, key, args).await;
        }
        let open = |call: &mut Call| {
            call.arg(8).arg("another/9-1");
        };
        assert_eq!(
            flat(f.run(&scripts::OPEN, open).await.expect("open")),
            ["1"]
        );
        let opened: State = [
            ("generation", "8"),
            ("offset", "another/9-1"),
            ("outbox", "c=report"),
        ]
        .map(|(key, value)| (key.to_owned(), vec![value.to_owned()]))
        .into();
        assert_eq!(f.state().await, opened);
    }
}

#[tokio::test]
async fn open_leaves_a_shard_that_somebody_else_has_opened() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    let before = f.state().await;
    // In this generation, and in a later one.
    for generation in [7, 6] {
        let open = |call: &mut Call| {
            call.arg(generation).arg("");
        };
        assert_eq!(
            flat(f.run(&scripts::OPEN, open).await.expect("open")),
            ["0"]
        );
        assert_eq!(f.state().await, before);
    }
}

pub(super) fn enqueue(
    call: &mut Call,
    predecessor: &str,
    upto: &str,
    high_tasks: u64,
    tasks: &[(&str, char, u64, i64)],
) {
    enqueue_as(call, 0, predecessor, upto, high_tasks, tasks);
}

fn enqueue_as(
    call: &mut Call,
    epoch: u64,
    after: &str,
    upto: &str,
    high_tasks: u64,
    tasks: &[(&str, char, u64, i64)],
) {
    call.arg("t:wake")
        .arg("q")
        .arg("topic")
        .arg(after)
        .arg(upto)
        .arg(high_tasks)
        .arg(1 << 20)
        .arg(epoch)
        .arg(1000);
    argue(
        call,
        &tasks
            .iter()
            .map(|(offset, letter, ..)| (*offset, *letter, body(2)))
            .collect::<Vec<_>>(),
    );
    for (place, (_, _, num, not_before)) in tasks.iter().enumerate() {
        if *num != 1 || *not_before != 0 {
            call.arg(place + 1)
                .arg(*num)
                .arg(*not_before)
                .arg("")
                .arg(0);
        }
    }
}

/// Tasks with these bodies; NUM of most is 1.
fn argue(call: &mut Call, tasks: &[(&str, char, Vec<u8>)]) {
    let offsets: Vec<_> = tasks.iter().map(|(offset, ..)| *offset).collect();
    call.arg(offsets.join(" ")).arg(1).arg(0).arg(tasks.len());
    for (_, letter, body) in tasks {
        call.arg(id(*letter)).arg(body);
    }
}

/// New tasks of NUM = 1 with one body.
pub(super) fn enqueue_all(call: &mut Call, ids: &[Vec<u8>], body: &[u8]) {
    call.arg("t:wake")
        .arg("q")
        .arg("topic")
        .arg("")
        .arg(format!("{}-0", ids.len()))
        .arg(1000)
        .arg(1 << 20)
        .arg(0);
    let offsets: Vec<_> = (1..=ids.len()).map(|major| format!("{major}-0")).collect();
    call.arg(1000)
        .arg(offsets.join(" "))
        .arg(1)
        .arg(0)
        .arg(ids.len());
    for id in ids {
        call.arg(id).arg(body);
    }
}

/// Without epoch and high water.
pub(super) fn enqueue_bodies(call: &mut Call, live_max: u64, tasks: &[(&str, char, Vec<u8>)]) {
    let upto = tasks.last().expect("a task").0;
    call.arg("t:wake")
        .arg("q")
        .arg("topic")
        .arg("")
        .arg(upto)
        .arg(100)
        .arg(1 << 20)
        .arg(0)
        .arg(live_max);
    argue(call, tasks);
}

#[tokio::test]
async fn enqueue_puts_what_is_new_and_stores_the_offset() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    f.seed("HSET", "records", &[&id('f'), b"f5:1:w"]).await;
    let before = f.state().await;
    let tasks = [
        ("4-0", 'x', 1, 0),
        ("5-0", 'a', 1, 0),
        ("6-0", 'f', 1, 0),
        ("7-0", 'b', 3, 0),
        ("8-0", 'd', 2, NOW + 5),
    ];
    let answer = f
        .run(&scripts::ENQUEUE, |call| {
            enqueue(call, "4-0", "9-0", 100, &tasks)
        })
        .await
        .expect("enqueue");
    assert_eq!(flat(answer), ["ok", "5", "3", "2"]);
    let delayed = r#"["L",2,0,[""],[],[],0]"#;
    changed(
        &before,
        &f.state().await,
        &[
            ("offset", &["topic/9-0"]),
            ("records", &["b=3", &format!("d={delayed}"), "f=f5:1:w"]),
            ("bodies", &["a=body2", "b=body2", "d=body2"]),
            ("m:T", &["3/0/b", "1/0/a"]),
            ("delayed", &[&format!("d={}", NOW + 5)]),
            (
                "counters",
                &[
                    "largest_body=13",
                    &format!("open_bytes={}", 2 * WEIGHT),
                    "live=3",
                    "open=2",
                ],
            ),
        ],
    );
}

#[tokio::test]
async fn enqueue_refuses_when_redis_fell_back_behind_the_predecessor() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    let before = f.state().await;
    let tasks = [("6-0", 'a', 1, 0)];
    let answer = f
        .run(&scripts::ENQUEUE, |call| {
            enqueue(call, "5-0", "6-0", 100, &tasks)
        })
        .await
        .expect("enqueue");
    assert_eq!(flat(answer), ["behind", "4-0"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn enqueue_refuses_who_comes_with_the_epoch_of_an_owner_before() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    f.seed("HSET", "counters", &[b"epoch", b"7"]).await;
    let before = f.state().await;
    let tasks = [("5-0", 'a', 1, 0)];
    let run = async |epoch| {
        f.run(&scripts::ENQUEUE, |call| {
            enqueue_as(call, epoch, "", "5-0", 100, &tasks)
        })
        .await
        .expect("enqueue")
    };
    assert_eq!(flat(run(6).await), ["fenced", "7"]);
    assert_eq!(f.state().await, before);

    assert_eq!(flat(run(8).await), ["ok", "1", "1", "0"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("offset", &["topic/5-0"]),
            ("bodies", &["a=body2"]),
            ("m:T", &["1/0/a"]),
            (
                "counters",
                &[
                    "largest_body=13",
                    "open_bytes=413",
                    "epoch=8",
                    "live=1",
                    "open=1",
                ],
            ),
        ],
    );
}

/// Tasks that were never on the bus, by who knows this fence.
fn enqueue_stored(call: &mut Call, fence: &str, high_tasks: u64, letters: &[char]) {
    call.arg("t:wake")
        .arg("q")
        .arg("")
        .arg(fence)
        .arg("")
        .arg(high_tasks)
        .arg(1 << 20)
        .arg(0)
        .arg(1000);
    call.arg("").arg(1).arg(0).arg(letters.len());
    for letter in letters {
        call.arg(id(*letter)).arg(body(2));
    }
}

#[tokio::test]
async fn enqueue_takes_tasks_of_the_store_while_the_fence_stands() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    f.seed(
        "HSET",
        "counters",
        &[b"epoch", b"7", b"fence", b"2", b"forgets", b"4"],
    )
    .await;
    f.seed("HSET", "records", &[&id('f'), b"f5:1:w"]).await;
    let before = f.state().await;
    let run = async |fence: &str, high_tasks| {
        let letters = ['a', 'f', 'b', 'c'];
        f.run(&scripts::ENQUEUE, |call| {
            enqueue_stored(call, fence, high_tasks, &letters)
        })
        .await
        .expect("enqueue")
    };
    // One of the shard's life before, an older one, none; of tasks that were read before some were
    // forgotten.
    for other in ["6/2", "7/1", "", "6/2/4", "7/1/4", "7/2/3"] {
        assert_eq!(flat(run(other, 100).await), ["moved", "7/2/4"]);
        assert_eq!(f.state().await, before);
    }

    // New tasks. Two are not known, one is, and then the queue is full. Neither the offset nor the
    // epoch nor the fence moves.
    assert_eq!(flat(run("7/2", 2).await), ["ok", "3", "2", "1"]);
    let (all, bytes) = (
        [
            "largest_body=13",
            "epoch=7",
            "fence=2",
            "forgets=4",
            "live=2",
            "open=2",
        ],
        format!("open_bytes={}", 2 * WEIGHT),
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("bodies", &["a=body2", "b=body2"]),
            ("m:T", &["1/0/b", "1/0/a"]),
            ("counters", &[&all[..], &[&bytes]].concat()),
        ],
    );
    // Tasks that were read from SQL while this fence stood: all of them are known.
    let before = f.state().await;
    assert_eq!(flat(run("7/2/4", 2).await), ["ok", "3", "0", "3"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn the_fence_moves_when_a_task_comes_that_may_have_come_before() {
    let f = Fixture::new().await;
    let fence = async |at: &str| {
        let asked = f
            .run(&scripts::PASS, |call| enqueue_stored(call, at, 100, &[]))
            .await
            .expect("enqueue");
        flat(asked)
    };
    let again = |call: &mut Call, offset: &str| {
        call.arg("t:wake")
            .arg("q")
            .arg("topic")
            .arg("")
            .arg(offset)
            .arg(100)
            .arg(1 << 20)
            .arg(0)
            .arg(1000);
        call.arg(offset)
            .arg(1)
            .arg(1)
            .arg(1)
            .arg(id('a'))
            .arg(body(2));
    };
    assert_eq!(fence("").await, ["moved", "7/0/0"]);
    f.run(&scripts::ENQUEUE, |call| again(call, "5-0"))
        .await
        .expect("enqueue");
    assert_eq!(fence("").await, ["moved", "7/1/0"]);
    // It is there by now, so nobody can take it for new.
    f.run(&scripts::ENQUEUE, |call| again(call, "6-0"))
        .await
        .expect("enqueue");
    assert_eq!(fence("7/1").await, ["ok", "0", "0", "0"]);
}

#[tokio::test]
async fn enqueue_stops_at_the_high_water_and_stores_how_far_it_came() {
    let f = Fixture::new().await;
    let before = f.state().await;
    let tasks = [("1-0", 'a', 1, 0), ("2-0", 'b', 1, 0)];
    let answer = f
        .run(&scripts::ENQUEUE, |call| {
            enqueue(call, "", "2-0", 1, &tasks)
        })
        .await
        .expect("enqueue");
    assert_eq!(flat(answer), ["ok", "1", "1", "0"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("offset", &["topic/1-0"]),
            ("bodies", &["a=body2"]),
            ("m:T", &["1/0/a"]),
            (
                "counters",
                &["largest_body=13", "open_bytes=413", "live=1", "open=1"],
            ),
        ],
    );
}

#[tokio::test]
async fn enqueue_takes_tasks_that_are_not_like_most() {
    let f = Fixture::new().await;
    let before = f.state().await;
    let tasks = [('a', 3), ('b', 1), ('c', 2), ('d', 200), ('e', 3), ('b', 3)];
    let enqueue = |call: &mut Call| {
        call.arg("t:wake")
            .arg("q")
            .arg("topic")
            .arg("")
            .arg("6-0")
            .arg(100)
            .arg(1 << 20)
            .arg(0)
            .arg(100);
        // Most have NUM 3. Of c one worker is credited, of e all three are; b is there twice.
        call.arg("1-0 2-0 3-0 4-0 5-0 6-0").arg(3).arg(0).arg(6);
        for (letter, _) in tasks {
            call.arg(id(letter)).arg(body(2));
        }
        call.arg(2).arg(1).arg(NOW).arg("").arg(0);
        call.arg(3).arg(2).arg(0).arg(&b"\x91\xa1w"[..]).arg(0);
        call.arg(4).arg(200).arg(0).arg("").arg(0);
        call.arg(5)
            .arg(3)
            .arg(0)
            .arg(&b"\x93\xa1u\xa1v\xa1w"[..])
            .arg(0);
    };
    assert_eq!(
        flat(f.run(&scripts::ENQUEUE, enqueue).await.expect("enqueue")),
        ["ok", "6", "4", "2"]
    );
    let after = f.state().await;
    changed(
        &before,
        &after,
        &[
            ("offset", &["topic/6-0"]),
            ("records", &["a=3", "c=m2/0/1 w:c0", "d=200"]),
            ("bodies", &["a=body2", "b=body2", "c=body2", "d=body2"]),
            (
                "m:T",
                &[r#"[200,0,"dddddddddddddddd"]"#, "2/0/c", "1/0/b", "3/0/a"],
            ),
            (
                "counters",
                &[
                    "largest_body=13",
                    &format!("open_bytes={}", 4 * WEIGHT),
                    "live=4",
                    "open=4",
                ],
            ),
        ],
    );
    let inspect = |call: &mut Call| {
        call.arg(id('c'));
    };
    let record = f.run(&scripts::INSPECT, inspect).await.expect("inspect");
    assert_eq!(
        flat(record),
        ["topic/6-0", "L", "2", "1", "0", "0", "0", "0"],
        "w is credited"
    );
}

#[tokio::test]
async fn enqueue_deals_with_each_offset_where_the_first_is_known() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/9-1"]).await;
    // Ten counts more than nine, and as a number.
    let tasks = [
        ("9-0", 'a', 1, 0),
        ("9-1", 'b', 1, 0),
        ("9-2", 'c', 1, 0),
        ("10-0", 'd', 1, 0),
        ("11-0", 'e', 1, 0),
    ];
    let answer = f
        .run(&scripts::ENQUEUE, |call| {
            enqueue(call, "9-1", "12-3", 2, &tasks)
        })
        .await
        .expect("enqueue");
    assert_eq!(flat(answer), ["ok", "4", "2", "2"]);
    let after = f.state().await;
    assert_eq!(
        (&after["offset"][..], &after["m:T"][..]),
        (
            &["topic/10-0".into()][..],
            &["1/0/d".into(), "1/0/c".into()][..]
        )
    );
}

#[tokio::test]
async fn enqueue_counts_what_is_ahead_of_the_foremost_worker_only() {
    let f = Fixture::new().await;
    for letter in ['a', 'b', 'c'] {
        f.waiting(letter, 2, b"2").await;
    }
    // Somebody has passed two of the three.
    f.seed("SET", "m:C", &[b"5"]).await;
    f.seed("HSET", "counters", &[b"front4", b"7"]).await;
    let tasks = [("1-0", 'd', 1, 0), ("2-0", 'e', 1, 0), ("3-0", 'f', 1, 0)];
    let answer = f
        .run(&scripts::ENQUEUE, |call| {
            enqueue(call, "", "3-0", 3, &tasks)
        })
        .await
        .expect("enqueue");
    assert_eq!(
        flat(answer),
        ["ok", "2", "2", "0"],
        "one of three is ahead, so two more"
    );
}

#[tokio::test]
async fn enqueue_refuses_a_batch_with_a_task_of_no_priority() {
    let f = Fixture::new().await;
    let before = f.state().await;
    for (priority, not_before) in [(0, 0), (0, NOW + 5), (4, NOW + 5)] {
        let enqueue = |call: &mut Call| {
            enqueue_bodies(
                call,
                1000,
                &[("1-0", 'a', body(2)), ("2-0", 'b', body(priority))],
            );
            call.arg(2).arg(1).arg(not_before).arg("").arg(0);
        };
        let error = f
            .run(&scripts::ENQUEUE, enqueue)
            .await
            .expect_err("no lane");
        assert!(error.contains("BADTASK"), "{error}");
        assert_eq!(f.state().await, before);
    }
}

#[tokio::test]
async fn enqueue_counts_what_waits_for_its_time_against_the_bound_on_live_tasks_only() {
    let f = Fixture::new().await;
    let later = NOW + 600_000;
    let tasks = [
        ("1-0", 'a', 1, later),
        ("2-0", 'b', 1, later),
        ("3-0", 'c', 1, 0),
        ("4-0", 'd', 1, 0),
    ];
    // High water 1: the two that wait are ahead of no worker, the third is the first in a lane, the
    // fourth is one too many.
    let answer = f
        .run(&scripts::ENQUEUE, |call| {
            enqueue(call, "", "4-0", 1, &tasks)
        })
        .await
        .expect("enqueue");
    assert_eq!(flat(answer), ["ok", "3", "3", "0"]);
    let before = f.state().await;
    assert_eq!(
        before["counters"],
        ["largest_body=13", "live=3", "open=1", "open_bytes=413"]
    );

    let bounded = |call: &mut Call| {
        enqueue_bodies(call, 3, &[("5-0", 'e', body(2))]);
        call.arg(1).arg(1).arg(later).arg("").arg(0);
    };
    assert_eq!(
        flat(f.run(&scripts::ENQUEUE, bounded).await.expect("enqueue")),
        ["ok", "0", "0", "0"]
    );
    changed(&before, &f.state().await, &[]);
}

#[tokio::test]
async fn enqueue_keeps_the_head_of_a_large_body_apart() {
    let f = Fixture::new().await;
    let before = f.state().await;
    let large = [body(2), vec![b'.'; 1200]].concat();
    let enqueue = |call: &mut Call| enqueue_bodies(call, 1000, &[("1-0", 'a', large.clone())]);
    f.run(&scripts::ENQUEUE, enqueue).await.expect("enqueue");
    let head = String::from_utf8_lossy(&large[..9]).into_owned();
    let whole = String::from_utf8_lossy(&large).into_owned();
    let bytes = large.len();
    changed(
        &before,
        &f.state().await,
        &[
            ("offset", &["topic/1-0"]),
            ("bodies", &[&format!("a={whole}"), &format!("ah={head}")]),
            ("m:T", &["1/0/a"]),
            (
                "counters",
                &[
                    &format!("largest_body={bytes}"),
                    &format!("open_bytes={}", bytes + 400),
                    "live=1",
                    "open=1",
                ],
            ),
        ],
    );
}

#[tokio::test]
async fn enqueue_keeps_the_backoff_of_a_large_body_with_its_head() {
    let f = Fixture::new().await;
    let before = f.state().await;
    let large = [body_with(3, 1, 2, 3, 4), vec![b'.'; 1200]].concat();
    let enqueue = |call: &mut Call| enqueue_bodies(call, 1000, &[("1-0", 'a', large.clone())]);
    f.run(&scripts::ENQUEUE, enqueue).await.expect("enqueue");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let bytes = large.len();
    changed(
        &before,
        &f.state().await,
        &[
            ("offset", &["topic/1-0"]),
            (
                "bodies",
                &[
                    &format!("a={}", text(&large)),
                    &format!("ah={}", text(&large[..29])),
                ],
            ),
            ("m:T", &["1/0/a"]),
            (
                "counters",
                &[
                    &format!("largest_body={bytes}"),
                    &format!("open_bytes={}", bytes + 400),
                    "live=1",
                    "open=1",
                ],
            ),
        ],
    );
}

/// One task of NUM `num` in this epoch, with these credited workers.
fn enqueue_again(call: &mut Call, letter: char, num: u64, epoch: u32, credited: &[u8]) {
    enqueue_bodies(call, 1000, &[("5-0", letter, body(2))]);
    call.arg(1).arg(num).arg(0).arg(credited).arg(epoch);
}

#[tokio::test]
async fn enqueue_gives_a_task_that_was_sent_again_a_record_of_its_epoch() {
    let f = Fixture::new().await;
    // a died a moment ago, after two offers, and c has its first record; x was completed meanwhile.
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"\x98\xa1D\x02\x04\x90\x90\x90\x05\x02"],
    )
    .await;
    f.seed("LPUSH", "m:T", &[&element(2, 0, 'a'), &element(2, 2, 'a')])
        .await;
    for letter in ['x', 'a', 'y'] {
        f.seed("RPUSH", "finals", &[&id(letter)]).await;
    }
    let before = f.state().await;
    let run = |call: &mut Call| enqueue_again(call, 'a', 2, 1, b"\x91\xa1w");
    assert_eq!(
        flat(f.run(&scripts::ENQUEUE, run).await.expect("enqueue")),
        ["ok", "1", "1", "0"]
    );
    let record = r#"a=["L",2,0,[],["w","0"],[],0,4294967296,[],[],1,false,1]"#;
    changed(
        &before,
        &f.state().await,
        &[
            ("offset", &["topic/5-0"]),
            ("records", &[record]),
            ("bodies", &["a=body2"]),
            (
                "m:T",
                &[r#"[2,4294967296,"aaaaaaaaaaaaaaaa"]"#, "2/2/a", "2/0/a"],
            ),
            (
                "counters",
                &["largest_body=13", "open_bytes=413", "live=1", "open=1"],
            ),
        ],
    );
    // It is cancelled, and sent again: a second entry is of a past end.
    assert_eq!(f.cancelled(&[('a', 2, 1)]).await, ["7", "1"]);
    let again = |call: &mut Call| {
        enqueue_bodies(call, 1000, &[("6-0", 'a', body(2))]);
        call.arg(1).arg(2).arg(0).arg("").arg(2);
    };
    f.run(&scripts::ENQUEUE, again).await.expect("enqueue");
    let twice = f.state().await;
    assert_eq!(
        twice["records"],
        [r#"a=["L",2,0,[],["w","0"],[],0,8589934592,[],[],2,false,2]"#]
    );
    assert_eq!(twice["finals"], ["x", "a", "y", "a"]);
}

#[tokio::test]
async fn enqueue_keeps_the_credits_of_an_earlier_epoch_whose_reports_are_on_their_way() {
    let f = Fixture::new().await;
    // u and v have completed it, then it was cancelled. SQL knows of u and x.
    let record = rmp_serde::to_vec(&serde_json::json!([
        "X",
        4,
        0,
        [],
        ["u", "1", "v", "2"],
        [],
        5
    ]))
    .expect("packed");
    f.seed("HSET", "records", &[&id('a'), &record]).await;
    f.seed("RPUSH", "finals", &[&id('a')]).await;
    let credited = rmp_serde::to_vec(&["u", "x"]).expect("packed");
    f.run(&scripts::ENQUEUE, |call| {
        enqueue_again(call, 'a', 4, 1, &credited)
    })
    .await
    .expect("enqueue");
    let expected = r#"a=["L",4,0,[],["u","0","x","0","v","0"],[],0,4294967296,[],[],1,false,1]"#;
    assert_eq!(f.state().await["records"], [expected]);
}

#[tokio::test]
async fn enqueue_ignores_a_task_whose_record_is_not_of_an_earlier_epoch() {
    for (record, epoch) in [
        (&b"f5:1:w"[..], 0),
        // Live, before it died for those who sent it again: Redis was set back.
        (b"1", 1),
        (b"h3:w", 1),
        // Final, and live, of that epoch and of a later one.
        (b"\x9b\xa1D\x01\x01\x90\x90\x90\x05\x00\x90\x90\x01", 1),
        (b"\x9b\xa1L\x01\x01\x90\x90\x90\x05\x00\x90\x90\x01", 1),
        (b"\x9b\xa1D\x01\x01\x90\x90\x90\x05\x00\x90\x90\x02", 1),
    ] {
        let f = Fixture::new().await;
        f.seed("HSET", "records", &[&id('a'), record]).await;
        f.seed("RPUSH", "finals", &[&id('a')]).await;
        let before = f.state().await;
        let run = |call: &mut Call| enqueue_again(call, 'a', 1, epoch, b"");
        assert_eq!(
            flat(f.run(&scripts::ENQUEUE, run).await.expect("enqueue")),
            ["ok", "1", "0", "1"],
            "{record:?}"
        );
        changed(&before, &f.state().await, &[("offset", &["topic/5-0"])]);
    }
}

#[tokio::test]
async fn enqueue_changes_nothing_of_a_task_that_was_sent_again_and_finds_no_room() {
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"\x97\xa1D\x01\x01\x90\x90\x90\x05"],
    )
    .await;
    f.seed("RPUSH", "finals", &[&id('a')]).await;
    let before = f.state().await;
    let full = |call: &mut Call| {
        enqueue_bodies(call, 0, &[("5-0", 'a', body(2))]);
        call.arg(1).arg(1).arg(0).arg("").arg(1);
    };
    assert_eq!(
        flat(f.run(&scripts::ENQUEUE, full).await.expect("enqueue")),
        ["ok", "0", "0", "0"]
    );
    assert_eq!(f.state().await, before);
}

fn close(call: &mut Call) {
    call.arg(5000);
}

#[tokio::test]
async fn close_leaves_a_shard_in_which_anything_is() {
    for (command, key, args) in [
        ("HSET", "records", &[&b"a"[..], b"1"][..]),
        ("HSET", "bodies", &[b"a", b"body"]),
        ("ZADD", "leases", &[b"5", b"a"]),
        ("ZADD", "delayed", &[b"5", b"a"]),
        ("RPUSH", "finals", &[b"a"]),
        ("XADD", "outbox", &[b"*", b"c", b"report"]),
    ] {
        let f = Fixture::new().await;
        f.seed(
            "HSET",
            "counters",
            &[
                b"grants",
                b"3",
                b"idle_since",
                format!("{} 3 0 ", NOW - 5000).as_bytes(),
            ],
        )
        .await;
        f.seed(command, key, args).await;
        let before = f.state().await;
        assert_eq!(
            flat(f.run(&scripts::CLOSE, close).await.expect("close")),
            ["-2", "0"],
            "{key}"
        );
        assert_eq!(f.state().await, before);
    }
}

#[tokio::test]
async fn close_waits_until_nothing_has_happened_for_long_and_removes_all_keys() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    f.seed("HSET", "counters", &[b"grants", b"3", b"open", b"0"])
        .await;
    // Spent elements that are not swept, and an empty stream, do not keep the shard open.
    f.seed("LPUSH", "m:T", &[&element(1, 0, 'a')]).await;
    f.seed("SET", "m:C", &[b"9"]).await;
    f.seed("HSET", "m:P", &[b"w", b"9"]).await;
    f.seed("XADD", "outbox", &[b"1-1", b"c", b"report"]).await;
    f.seed("XDEL", "outbox", &[b"1-1"]).await;
    let before = f.state().await;
    let run = async || flat(f.run(&scripts::CLOSE, close).await.expect("close"));
    let idle = |since: i64, mark: &str| format!("idle_since={since} {mark}");
    assert_eq!(run().await, ["5000", "0"]);
    changed(
        &before,
        &f.state().await,
        &[(
            "counters",
            &[&idle(NOW, "3 0 topic/4-0"), "grants=3", "open=0"],
        )],
    );

    // Something happened since, or the clock stepped back: the time begins anew.
    for seen in [
        "2 0 topic/4-0",
        "3 0 topic/3-0",
        "3 1 topic/4-0",
        "3 0 topic/4-0",
    ] {
        let at = if seen == "3 0 topic/4-0" {
            NOW + 1
        } else {
            NOW - 6000
        };
        f.seed(
            "HSET",
            "counters",
            &[b"idle_since", format!("{at} {seen}").as_bytes()],
        )
        .await;
        assert_eq!(run().await, ["5000", "0"], "{seen}");
        changed(
            &before,
            &f.state().await,
            &[(
                "counters",
                &[&idle(NOW, "3 0 topic/4-0"), "grants=3", "open=0"],
            )],
        );
    }
    f.seed(
        "HSET",
        "counters",
        &[
            b"idle_since",
            format!("{} 3 0 topic/4-0", NOW - 4000).as_bytes(),
        ],
    )
    .await;
    let waits = f.state().await;
    assert_eq!(run().await, ["1000", "0"]);
    assert_eq!(f.state().await, waits);

    f.seed(
        "HSET",
        "counters",
        &[
            b"idle_since",
            format!("{} 3 0 topic/4-0", NOW - 5000).as_bytes(),
        ],
    )
    .await;
    assert_eq!(run().await, ["-1", "7"]);
    assert_eq!(f.state().await, State::new());
}
