//! The scripts that end or extend a lease for its worker: complete, reject, extend.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, body, changed, claim::claim, flat, id, lease};

pub(super) fn complete(call: &mut Call, items: &[(char, &str, u64, &str)]) {
    complete_at(call, 1, items);
}

/// Each item: id, generation, grant, worker.
fn complete_at(call: &mut Call, attempt: u32, items: &[(char, &str, u64, &str)]) {
    call.arg(1000).arg("7").arg(
        items
            .iter()
            .flat_map(|(letter, ..)| id(*letter))
            .collect::<Vec<u8>>(),
    );
    let held: Vec<_> = items
        .iter()
        .map(|(_, _, grant, worker)| format!("h{grant}:{worker}"))
        .collect();
    reports(call, items.len(), &held);
    for (place, (_, generation, ..)) in items.iter().enumerate() {
        if *generation != "7" || attempt != 1 {
            call.arg(place + 1).arg(*generation).arg(attempt);
        }
    }
}

#[tokio::test]
async fn complete_answers_each_item_and_only_the_right_token_counts() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.held('b', "w", 2).await;
    let before = f.state().await;
    let items = [
        ('a', "7", 1, "w"),
        ('a', "7", 1, "w"),
        ('a', "7", 9, "v"),
        ('b', "7", 2, "v"),
        ('b', "6", 2, "w"),
        ('z', "7", 1, "w"),
    ];
    let answer = f
        .run(&scripts::COMPLETE, |call| complete(call, &items))
        .await
        .expect("complete");
    assert_eq!(flat(answer), ["124335"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &[&format!("a=f{NOW}:1:w"), "b=h2:w"]),
            ("bodies", &["b=body2"]),
            ("leases", &[&format!("b2={NOW}")]),
            ("finals", &["a"]),
            ("outbox", &["b=report0"]),
            ("counters", &["live=1", "outbox_bytes=9"]),
        ],
    );
}

/// Tokens as the records have them, of the first attempt.
pub(super) fn complete_all(call: &mut Call, ids: &[Vec<u8>], held: &[String]) {
    call.arg(1 << 20).arg("7").arg(ids.concat());
    reports(call, ids.len(), held);
}

/// A report for each (`report0`, `report1`, …) with their lengths, and the tokens by runs.
fn reports(call: &mut Call, count: usize, held: &[String]) {
    let reports: Vec<_> = (0..count)
        .map(|n| format!("\u{1a}{}report{n}", if n < 10 { '\u{7}' } else { '\u{8}' }))
        .collect();
    let runs: Vec<_> = held.chunk_by(PartialEq::eq).collect();
    let numbers = reports
        .iter()
        .map(String::len)
        .chain(runs.iter().map(|run| run.len()));
    let numbers: Vec<u8> = numbers
        .flat_map(|number| (number as u32).to_be_bytes())
        .collect();
    call.arg(reports.concat()).arg(numbers);
    for run in runs {
        call.arg(&run[0]);
    }
}

#[tokio::test]
async fn complete_takes_a_repeat_and_other_workers_in_one_call() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.held('b', "v:1", 2).await;
    f.held('c', "w", 1).await;
    let before = f.state().await;
    let items = [
        ('c', "6", 1, "w"),
        ('b', "7", 2, "v:1"),
        ('a', "7", 1, "w"),
        ('b', "7", 2, "v:1"),
        ('c', "7", 1, "w"),
    ];
    let answer = f
        .run(&scripts::COMPLETE, |call| complete(call, &items))
        .await
        .expect("complete");
    assert_eq!(flat(answer), ["31121"]);
    changed(
        &before,
        &f.state().await,
        &[
            (
                "records",
                &[
                    &format!("a=f{NOW}:1:w"),
                    &format!("b=f{NOW}:2:v:1"),
                    &format!("c=f{NOW}:1:w"),
                ],
            ),
            ("bodies", &[]),
            ("leases", &[]),
            ("finals", &["b", "a", "c"]),
            ("outbox", &["b=report1,report2,report4"]),
            ("counters", &["live=0", "outbox_bytes=27"]),
        ],
    );
}

#[tokio::test]
async fn complete_goes_on_with_records_that_an_earlier_version_packed() {
    let f = Fixture::new().await;
    // ["L", 3, 0, [], ["u", "1"], ["w", "2", "v", "3"], 0]
    let record = b"\x97\xa1L\x03\x00\x90\x92\xa1u\xa11\x94\xa1w\xa12\xa1v\xa13\x00";
    f.held('a', "w", 2).await;
    f.seed("HSET", "records", &[&id('a'), record]).await;
    let answer = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 1, "u"), ('a', "7", 2, "w")])
        })
        .await;
    assert_eq!(flat(answer.expect("complete")), ["21"]);
    assert_eq!(f.state().await["records"], ["a=m3/1/2 u:c1 w:c2 v:h3"]);
    let inspect = |call: &mut Call| {
        call.arg(id('a'));
    };
    let answer = f.run(&scripts::INSPECT, inspect).await.expect("inspect");
    assert_eq!(flat(answer), ["", "L", "3", "2", "1", "0", "0", "0"]);
    let answer = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 3, "v"), ('a', "7", 1, "u")])
        })
        .await;
    assert_eq!(flat(answer.expect("complete")), ["12"]);
    assert_eq!(
        f.state().await["records"],
        [format!("a=e3 at {NOW} u:c1 w:c2 v:c3")]
    );
    let late = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 9, "x"), ('a', "7", 9, "u")])
        })
        .await;
    assert_eq!(flat(late.expect("complete")), ["44"], "all three are done");
}

#[tokio::test]
async fn a_task_of_several_that_is_rejected_is_packed_from_then_on() {
    let f = Fixture::new().await;
    f.waiting('a', 3, b"3").await;
    f.run(&scripts::CLAIM, |call| {
        claim(call, &[("w", 1), ("v:1", 1), ("v", 1)])
    })
    .await
    .expect("claim");
    assert_eq!(f.state().await["records"], ["a=m3/3/0 w:h1 v:1:h2 v:h3"]);
    let lost = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 2, "v"), ('a', "7", 1, "x")])
        })
        .await;
    assert_eq!(
        flat(lost.expect("complete")),
        ["33"],
        "nobody holds it by these tokens"
    );
    f.run(&scripts::COMPLETE, |call| {
        complete(call, &[('a', "7", 2, "v:1")])
    })
    .await
    .expect("complete");
    assert_eq!(f.state().await["records"], ["a=m3/2/1 w:h1 v:1:c2 v:h3"]);
    f.run(&scripts::REJECT, |call| {
        reject(call, 'a', 3, "v", "release", "")
    })
    .await
    .expect("reject");
    assert_eq!(
        f.state().await["records"],
        [r#"a=["L",3,0,[],["v:1","2"],["w","1"],0,1]"#]
    );
}

#[tokio::test]
async fn complete_takes_a_later_attempt_of_a_task_that_failed_before() {
    let f = Fixture::new().await;
    // ["L", 1, 1, [], [], ["w", "3"], 0, 1]
    f.held('a', "w", 3).await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"\x98\xa1L\x01\x01\x90\x90\x92\xa1w\xa13\x00\x01"],
    )
    .await;
    f.held('b', "w", 3).await;
    let items = [('b', "7", 3, "w"), ('a', "7", 3, "w")];
    let none = f
        .run(&scripts::COMPLETE, |call| complete_at(call, 3, &items))
        .await
        .expect("complete");
    assert_eq!(flat(none), ["33"], "there was no third attempt");
    let second = f
        .run(&scripts::COMPLETE, |call| complete_at(call, 2, &items))
        .await
        .expect("complete");
    assert_eq!(flat(second), ["31"], "of a there was a second one");
    assert_eq!(
        f.state().await["records"],
        [&format!("a=f{NOW}:3:w"), "b=h3:w"]
    );
}

#[tokio::test]
async fn complete_credits_distinct_workers_until_there_are_num() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1), ("v", 1)]))
        .await
        .expect("claim");
    let items = [('a', "7", 1, "w"), ('a', "7", 1, "w"), ('a', "7", 2, "v")];
    let before = f.state().await;
    let answer = f
        .run(&scripts::COMPLETE, |call| complete(call, &items))
        .await
        .expect("complete");
    assert_eq!(flat(answer), ["121"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &[&format!("a=e2 at {NOW} w:c1 v:c2")]),
            ("bodies", &[]),
            ("leases", &[]),
            ("finals", &["a"]),
            ("outbox", &["b=report0,report2"]),
            (
                "counters",
                &[
                    "open_bytes=0",
                    "longest_lease=30000",
                    "live=0",
                    "grants=2",
                    "open=0",
                    "outbox_bytes=18",
                ],
            ),
        ],
    );
}

pub(super) fn reject(
    call: &mut Call,
    letter: char,
    grant: u64,
    worker: &str,
    mode: &str,
    delay: &str,
) {
    // msgpack [1000]
    call.arg(1)
        .arg("t:wake")
        .arg("q")
        .arg(&b"\x91\xcd\x03\xe8"[..])
        .arg(1000);
    call.arg(id(letter))
        .arg("7")
        .arg(grant)
        .arg(worker)
        .arg(mode)
        .arg(delay)
        .arg("no reason")
        .arg("");
}

/// Rejects the first grants of the letters, with `failed` for the history of each.
fn reject_each(call: &mut Call, most_bytes: u64, mode: &str, failed: &[(char, &str)]) {
    call.arg(1)
        .arg("t:wake")
        .arg("q")
        .arg(&b"\x91\xcd\x03\xe8"[..])
        .arg(most_bytes);
    for (letter, failed) in failed {
        call.arg(id(*letter))
            .arg("7")
            .arg(1)
            .arg("w")
            .arg(mode)
            .arg("50")
            .arg("no reason")
            .arg(failed);
    }
}

#[tokio::test]
async fn reject_reports_each_failed_attempt_in_one_entry() {
    let f = Fixture::new().await;
    for letter in ['a', 'b'] {
        f.held(letter, "w", 1).await;
    }
    let before = f.state().await;
    // The second token is lost, so nothing is known of an attempt.
    let failed = [('a', "of a;"), ('c', "of c;"), ('b', "of b;")];
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject_each(call, 1, "retry", &failed)
        })
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "0", "5", "0", "1", "0"]);
    let record =
        |letter| format!(r#"{letter}=["L",1,1,["1"],[],[],0,0,[],[1000000,"w","no reason"]]"#);
    let due = NOW + 50;
    let after = f.state().await;
    changed(
        &before,
        &after,
        &[
            ("records", &[&record('a'), &record('b')]),
            ("leases", &[]),
            ("delayed", &[&format!("a1={due}"), &format!("b1={due}")]),
            ("outbox", &["b=of a;of b;"]),
            (
                "counters",
                &["longest_delay=50", "live=2", "outbox_bytes=10"],
            ),
        ],
    );

    // A death stands in the same entry, before it.
    f.held('d', "w", 1).await;
    f.run(&scripts::REJECT, |call| {
        reject_each(call, 11, "never", &[('d', "of d;")])
    })
    .await
    .expect("reject");
    let state = f.state().await;
    assert_eq!(
        state["outbox"][1],
        r#"d=d a=2 r=no reason w=w h=[1000000,"w","no reason"] b=of d;"#
    );
    // The outbox has its bytes: the rejection counts, and nothing is reported.
    f.held('e', "w", 1).await;
    f.run(&scripts::REJECT, |call| {
        reject_each(call, 65, "retry", &[('e', "of e;")])
    })
    .await
    .expect("reject");
    let full = f.state().await;
    assert_eq!(
        (&full["outbox"], full["delayed"].len()),
        (&state["outbox"], 3)
    );
}

#[tokio::test]
async fn reject_waits_then_promote_offers_a_new_element_in_the_retry_lane() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject(call, 'a', 1, "w", "retry", "50")
        })
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "0"]);
    let waiting = f.state().await;
    changed(
        &before,
        &waiting,
        &[
            (
                "records",
                &[r#"a=["L",1,1,["1"],[],[],0,0,[],[1000000,"w","no reason"]]"#],
            ),
            ("leases", &[]),
            ("delayed", &[&format!("a1={}", NOW + 50)]),
            ("counters", &["longest_delay=50", "live=1"]),
        ],
    );
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(10).arg(600_000);
    };
    let early = f.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(flat(early), ["0", "0", &(NOW + 50).to_string()]);
    assert_eq!(f.state().await, waiting, "nothing before its time");
    f.seed(
        "ZADD",
        "delayed",
        &[NOW.to_string().as_bytes(), &lease('a', 1)],
    )
    .await;
    let due = f.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(flat(due), ["1", "0", "-1"]);
    changed(
        &waiting,
        &f.state().await,
        &[
            (
                "records",
                &[r#"a=["L",1,1,[],[],[],0,1,[],[1000000,"w","no reason"]]"#],
            ),
            ("delayed", &[]),
            ("mr:T", &["1/1/a"]),
            (
                "counters",
                &["open_bytes=413", "longest_delay=50", "live=1", "open=1"],
            ),
        ],
    );
}

#[tokio::test]
async fn reject_for_good_kills_a_task_of_one_and_not_of_two() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject(call, 'a', 1, "w", "never", "")
        })
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &[&format!(r#"a=["D",1,2,[],[],[],{NOW},0]"#)]),
            ("bodies", &[]),
            ("leases", &[]),
            ("finals", &["a"]),
            (
                "outbox",
                &[r#"d=a a=2 r=no reason w=w h=[1000000,"w","no reason"]"#],
            ),
            // The entry's bytes: names and values.
            ("counters", &["live=0", "outbox_bytes=50"]),
        ],
    );

    f.waiting('b', 2, b"2").await;
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject(call, 'b', 1, "w", "never", "0")
        })
        .await
        .expect("reject");
    assert_eq!(
        flat(answer),
        ["1", "0"],
        "one worker alone does not kill what two are asked to do"
    );
    let record = &f.state().await["records"][1];
    assert_eq!(
        record, r#"b=["L",2,2,[],[],[],0,1,["w",-1],[1000000,"w","no reason"]]"#,
        "and is asked no more"
    );
}

#[tokio::test]
async fn release_costs_nothing_and_offers_at_once() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject(call, 'a', 1, "w", "release", "")
        })
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "0"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("records", &[r#"a=["L",1,0,[],[],[],0,1]"#]),
            ("leases", &[]),
            ("mr:T", &["1/1/a"]),
            ("counters", &["open_bytes=413", "live=1", "open=1"]),
        ],
    );
}

#[tokio::test]
async fn extend_moves_the_deadline_of_the_holder_only() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let extend = |worker: &'static str| {
        move |call: &mut Call| {
            call.arg(id('a')).arg("7").arg(1).arg(worker).arg(5000);
        }
    };
    assert_eq!(
        flat(f.run(&scripts::EXTEND, extend("v")).await.expect("extend")),
        ["3", "0"]
    );
    assert_eq!(f.state().await, before);
    let until = (NOW + 5000).to_string();
    assert_eq!(
        flat(f.run(&scripts::EXTEND, extend("w")).await.expect("extend")),
        ["1", &until]
    );
    changed(
        &before,
        &f.state().await,
        &[
            ("leases", &["a1=1004999.5"]),
            ("counters", &["longest_lease=5000", "live=1"]),
        ],
    );

    // A worker that extends its lease has received it.
    f.seed("ZADD", "undelivered", &[b"5", b"1"]).await;
    f.run(&scripts::EXTEND, extend("w")).await.expect("extend");
    assert_eq!(f.state().await.get("undelivered"), None);

    // Where taskd extends by itself, the worker may not have it yet.
    f.seed("ZADD", "undelivered", &[b"5", b"1"]).await;
    let keep = |call: &mut Call| {
        extend("w")(call);
        call.arg("");
    };
    assert_eq!(
        flat(f.run(&scripts::EXTEND, keep).await.expect("extend")),
        ["1", &until]
    );
    assert_eq!(f.state().await["undelivered"], [format!("1={until}")]);

    // A lease with another deadline than taskd knows belongs to another session by now.
    let before = f.state().await;
    let known = |deadline: i64| {
        move |call: &mut Call| {
            call.arg(id('a')).arg("7").arg(1).arg("w").arg(9000);
            call.arg(rmp_serde::to_vec(&[deadline]).unwrap());
        }
    };
    for other in [NOW + 4999, NOW + 5001] {
        assert_eq!(
            flat(f.run(&scripts::EXTEND, known(other)).await.expect("extend")),
            ["1", "0"]
        );
        assert_eq!(f.state().await, before);
    }
    let later = (NOW + 9000).to_string();
    assert_eq!(
        flat(
            f.run(&scripts::EXTEND, known(NOW + 5000))
                .await
                .expect("extend")
        ),
        ["1", &later]
    );
}

#[tokio::test]
async fn complete_takes_no_attempt_that_there_was_not() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let complete = |call: &mut Call| complete_at(call, u32::MAX, &[('a', "7", 1, "w")]);
    assert_eq!(
        flat(f.run(&scripts::COMPLETE, complete).await.expect("complete")),
        ["3"]
    );
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn complete_is_refused_when_the_outbox_has_all_the_bytes_it_may_have() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed("HSET", "counters", &[b"outbox_bytes", b"1000"])
        .await;
    let before = f.state().await;
    let error = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 1, "w")])
        })
        .await
        .expect_err("full");
    assert!(error.contains("FULL"), "{error}");
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn complete_drops_the_head_of_a_large_body_too() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed(
        "HSET",
        "bodies",
        &[&[id('a'), b"h".to_vec()].concat(), b"head"],
    )
    .await;
    f.seed("HSET", "counters", &[b"largest_body", b"1025"])
        .await;
    f.run(&scripts::COMPLETE, |call| {
        complete(call, &[('a', "7", 1, "w")])
    })
    .await
    .expect("complete");
    assert_eq!(f.state().await.get("bodies"), None);
}

#[tokio::test]
async fn reject_reads_the_head_of_a_large_body_and_not_all_of_it() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    // The head says high and ten attempts, the body itself is another's.
    let head = [&[1][..], &10_u32.to_be_bytes(), &30_000_u32.to_be_bytes()].concat();
    f.seed(
        "HSET",
        "bodies",
        &[&id('a'), &[body(2), vec![b'.'; 1200]].concat()],
    )
    .await;
    f.seed(
        "HSET",
        "bodies",
        &[&[id('a'), b"h".to_vec()].concat(), &head],
    )
    .await;
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject(call, 'a', 1, "w", "retry", "0")
        })
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "0"]);
    assert_eq!(f.state().await["hr:T"], ["1/1/a"]);
}

#[tokio::test]
async fn a_task_that_dies_takes_its_backoffs_with_it() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1), ("v", 1)]))
        .await
        .expect("claim");
    f.run(&scripts::REJECT, |call| {
        reject(call, 'a', 1, "w", "never", "3600000")
    })
    .await
    .expect("reject");
    assert_eq!(
        f.state().await["delayed"],
        [format!("a1={}", NOW + 3_600_000)]
    );
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject(call, 'a', 2, "v", "never", "")
        })
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "1"], "each has had its failures");
    let dead = f.state().await;
    assert_eq!(
        (dead.get("delayed"), dead.get("leases"), dead.get("bodies")),
        (None, None, None)
    );
    assert_eq!(
        dead["records"],
        [format!(r#"a=["D",2,4,[],[],[],{NOW},0]"#)]
    );
}

#[tokio::test]
async fn a_task_that_was_sent_again_keeps_its_epoch_to_its_end() {
    let f = Fixture::new().await;
    // ["L", 1, 0, [], [], [], 0, 0, [], [], 2]
    f.waiting('a', 1, b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x02")
        .await;
    let before = f.state().await;
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    assert_eq!(
        f.state().await["records"],
        [r#"a=["L",1,0,[],[],["w","1"],0,0,[],[],2]"#]
    );
    f.run(&scripts::REJECT, |call| {
        reject(call, 'a', 1, "w", "retry", "0")
    })
    .await
    .expect("reject");
    let rejected =
        r#"a=["L",1,1,[],[],[],0,1,[],[1000000,"w",""],2]"#.replace("1000000", &NOW.to_string());
    let shown = f.state().await["records"][0].clone();
    assert!(
        shown.starts_with(&rejected[..30]) && shown.ends_with(",2]"),
        "{shown}"
    );
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    let answer = f
        .run(&scripts::REJECT, |call| {
            reject(call, 'a', 2, "w", "never", "")
        })
        .await
        .expect("reject");
    assert_eq!(flat(answer), ["1", "1"]);
    let after = f.state().await;
    assert_eq!(
        after["records"],
        [format!(r#"a=["D",1,3,[],[],[],{NOW},1,[],[],2]"#)]
    );
    assert_eq!(
        (
            after.get("leases"),
            after.get("bodies"),
            &after["finals"][..]
        ),
        (None, None, &["a".to_owned()][..])
    );
    assert!(
        after["outbox"][0].starts_with("d=a a=3 ") && after["outbox"][0].ends_with(" e=2"),
        "{:?}",
        after["outbox"]
    );
    assert_ne!(before, after);

    // A completion is final in the same form, which `finals` and `forget` read.
    f.waiting('b', 1, b"\x9b\xa1L\x01\x00\x90\x90\x90\x00\x00\x90\x90\x02")
        .await;
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    let done = f
        .run(&scripts::COMPLETE, |call| {
            complete(call, &[('b', "7", 3, "w")])
        })
        .await
        .expect("complete");
    assert_eq!(flat(done), ["1"]);
    assert_eq!(
        f.state().await["records"][1],
        format!(r#"b=["F",1,0,[],["w","3"],[],{NOW},0,[],[],2]"#)
    );
    let finals = |call: &mut Call| {
        call.arg(-1).arg(10);
    };
    assert_eq!(
        flat(f.run(&scripts::FINALS, finals).await.expect("finals")),
        ["0", "ab"]
    );
}

#[tokio::test]
async fn one_worker_alone_does_not_kill_a_task_for_several() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    // Two attempts a replica: four failures would be death, and w may have two.
    for _ in 0..2 {
        f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
            .await
            .expect("claim");
        let grant = f.state().await["leases"][0][1..]
            .split('=')
            .next()
            .expect("a grant")
            .parse()
            .expect("a number");
        let answer = f
            .run(&scripts::REJECT, |call| {
                reject(call, 'a', grant, "w", "retry", "0")
            })
            .await
            .expect("reject");
        assert_eq!(flat(answer), ["1", "0"]);
    }
    let none = f
        .run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(none), ["7", "0"], "it is asked no more");
    let other = f
        .run(&scripts::CLAIM, |call| claim(call, &[("v", 1)]))
        .await
        .expect("claim");
    assert_eq!(flat(other)[4], "a");
}

#[tokio::test]
async fn the_failures_of_a_worker_count_for_one_replica_at_most() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    // Two attempts a replica: one failure, then two more, of which one counts.
    for (grant, mode) in [(1, "retry"), (2, "never")] {
        f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
            .await
            .expect("claim");
        let answer = f
            .run(&scripts::REJECT, |call| {
                reject(call, 'a', grant, "w", mode, "0")
            })
            .await
            .expect("reject");
        assert_eq!(flat(answer), ["1", "0"]);
    }
    let record = &f.state().await["records"][0];
    assert!(
        record.starts_with(r#"a=["L",2,2,[],[],[],0,2,["w",-1],"#),
        "{record}"
    );
}

#[tokio::test]
async fn the_history_of_a_task_ends_with_its_last_failures() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed(
        "HSET",
        "bodies",
        &[
            &id('a'),
            &[&[2][..], &99_u32.to_be_bytes(), &30_000_u32.to_be_bytes()].concat(),
        ],
    )
    .await;
    let back = |call: &mut Call, reason: &str| {
        call.arg(1)
            .arg("t:wake")
            .arg("q")
            .arg(&b"\x91\x00"[..])
            .arg(1000);
        let grant = if reason == "0" {
            "1".to_owned()
        } else {
            reason.to_owned()
        };
        call.arg(id('a'))
            .arg("7")
            .arg(grant)
            .arg("w")
            .arg("retry")
            .arg("0")
            .arg(format!("{reason}{}", "!".repeat(300)))
            .arg("");
    };
    for n in 0..12 {
        f.run(&scripts::REJECT, |call| back(call, &n.to_string()))
            .await
            .expect("reject");
        f.seed("HSET", "counters", &[b"grants", n.to_string().as_bytes()])
            .await;
        f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
            .await
            .expect("claim");
    }
    let record = f.state().await["records"][0].clone();
    let reasons: Vec<_> = record.matches("!\"").collect();
    assert_eq!(reasons.len(), 10, "{record}");
    assert!(record.len() < 10 * 300, "each cut at 256 bytes");
}
