//! `check`, `check_order`, `check_task` and `recount`: a shard is seeded whole, then damaged. Each
//! damage is named and changes nothing until it is to be mended; then the shard is as its undamaged
//! twin, but for what the test names.

use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, State, WEIGHT, body, changed, element, flat, id, lease};

/// The element of no task.
const SPENT: &str = "1/0/\0";

/// A shard with a task of each state: 'a' waits, 'b' is held by w, 'c' is in backoff since grant 2,
/// 'd' waits for its time, 'e' is final, 'f' is for two, of whom v has completed it and u holds it.
async fn whole() -> Fixture {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.held('b', "w", 1).await;
    // ["L", 1, 1, ["2"], [], [], 0, 0, [], []] and ["L", 1, 0, [""], [], [], 0]
    f.seed(
        "HSET",
        "records",
        &[
            &id('c'),
            b"\x9a\xa1L\x01\x01\x91\xa12\x90\x90\x00\x00\x90\x90",
        ],
    )
    .await;
    f.seed("ZADD", "delayed", &[b"2000000", &lease('c', 2)])
        .await;
    f.seed(
        "HSET",
        "records",
        &[&id('d'), b"\x97\xa1L\x01\x00\x91\xa0\x90\x90\x00"],
    )
    .await;
    f.seed("ZADD", "delayed", &[b"3000000", &id('d')]).await;
    f.seed("HSET", "records", &[&id('e'), b"f900000:3:w"]).await;
    f.seed("RPUSH", "finals", &[&id('e')]).await;
    f.seed(
        "HSET",
        "records",
        &[&id('f'), b"m\x02\x01\x01\nv\tc4\nu\th5\n"],
    )
    .await;
    f.seed("ZADD", "leases", &[b"1500000", &lease('f', 5)])
        .await;
    for letter in ['c', 'd', 'f'] {
        f.seed("HSET", "bodies", &[&id(letter), &body(2)]).await;
    }
    f.seed("HINCRBY", "counters", &[b"live", b"3"]).await;
    f.seed("SET", "m:C", &[b"7"]).await;
    f.seed("HSET", "m:P", &[b"u", b"8"]).await;
    f
}

/// Elements of lanes that a call may pass.
const PASSED: usize = 100_000;

pub(super) fn check(part: &str, mends: u8) -> impl Fn(&mut Call) {
    check_within(part, mends, PASSED)
}

fn check_within(part: &str, mends: u8, passed: usize) -> impl Fn(&mut Call) {
    let part = part.to_owned();
    move |call| {
        call.arg(&part).arg("0").arg(100).arg(mends).arg(passed);
    }
}

/// The finds of all parts: kind and task.
async fn all(f: &Fixture, mends: u8) -> Vec<String> {
    let mut found = Vec::new();
    for part in [
        "records", "leases", "delayed", "bodies", "1", "2", "3", "4", "5", "6",
    ] {
        let answer = f
            .run(&scripts::CHECK, check(part, mends))
            .await
            .expect(part);
        let redis::Value::Array(mut parts) = answer else {
            panic!("{answer:?}")
        };
        found.extend(
            flat(parts.remove(1))
                .chunks(3)
                .map(|find| format!("{} {}", find[0], find[1])),
        );
    }
    found
}

/// Damages a shard: this is found and changes nothing, and is mended. The state before the damage,
/// and at the end.
async fn mended(f: &Fixture, damage: impl AsyncFnOnce(), expected: &[&str]) -> (State, State) {
    assert_eq!(all(f, 1).await, [""; 0], "nothing is damaged yet");
    let twin = f.state().await;
    damage().await;
    let before = f.state().await;
    assert_eq!(all(f, 0).await, expected);
    assert_eq!(f.state().await, before, "it only reports");
    assert_eq!(all(f, 1).await, expected);
    assert_eq!(all(f, 1).await, [""; 0], "all is mended");
    (twin, f.state().await)
}

#[tokio::test]
async fn a_whole_shard_has_no_finds_and_tells_its_tasks() {
    let f = whole().await;
    let answer = flat(
        f.run(&scripts::CHECK, check("records", 0))
            .await
            .expect("check"),
    );
    let mut tasks: Vec<_> = answer[1..answer.len() - 1]
        .chunks(4)
        .map(|task| task.join(" "))
        .collect();
    tasks.sort();
    assert_eq!(
        tasks,
        [
            "a o 0 0", "b l 0 0", "c l 0 0", "d l 0 0", "e f 0 0", "f l 0 0"
        ]
    );
    assert_eq!(
        flat(
            f.run(&scripts::RECOUNT, |call| recount(call, 0, 100))
                .await
                .expect("recount")
        ),
        ["1"]
    );
}

#[tokio::test]
async fn leases_are_as_records_say() {
    let f = whole().await;
    let damage = async || f.seed("ZREM", "leases", &[&lease('b', 1)]).await;
    let (twin, after) = mended(&f, damage, &["held_without_lease b"]).await;
    // The lease in the body's head, from now on. When it was claimed is not known.
    changed(
        &twin,
        &after,
        &[("leases", &["b1=1029999.5", "f5=1500000"])],
    );

    let f = whole().await;
    let damage = async || {
        f.seed(
            "ZADD",
            "leases",
            &[
                b"5000",
                &lease('a', 9),
                b"6000",
                &lease('b', 2),
                b"7000",
                &lease('z', 1),
            ],
        )
        .await;
    };
    let (twin, after) = mended(
        &f,
        damage,
        &[
            "lease_without_holder a",
            "lease_without_holder b",
            "lease_without_holder z",
        ],
    )
    .await;
    changed(&twin, &after, &[]);
}

#[tokio::test]
async fn backoffs_end_and_times_come() {
    let f = whole().await;
    let damage = async || f.seed("ZREM", "delayed", &[&lease('c', 2)]).await;
    let (twin, after) = mended(&f, damage, &["waits_without_delay c"]).await;
    changed(
        &twin,
        &after,
        &[("delayed", &[&format!("c2={NOW}"), "d=3000000"])],
    );

    // Nothing in Redis says when its time is: it goes, and comes back from SQL.
    let f = whole().await;
    let damage = async || f.seed("ZREM", "delayed", &[&id('d')]).await;
    let (twin, after) = mended(&f, damage, &["waits_without_delay d"]).await;
    let without = |key: &str| {
        twin[key]
            .iter()
            .filter(|entry| !entry.starts_with("d="))
            .cloned()
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (&after["records"], &after["bodies"]),
        (&without("records"), &without("bodies"))
    );
    assert_eq!(after["delayed"], without("delayed"));

    let f = whole().await;
    let damage = async || {
        f.seed(
            "ZADD",
            "delayed",
            &[b"1", &lease('c', 1), b"2", &lease('a', 1), b"3", &id('e')],
        )
        .await
    };
    let finds = [
        "delay_without_task c",
        "delay_without_task a",
        "delay_without_task e",
    ];
    let (twin, after) = mended(&f, damage, &finds).await;
    changed(&twin, &after, &[]);
}

#[tokio::test]
async fn a_live_task_has_its_body_and_no_other_has_one() {
    for lost in [&b"short"[..], b""] {
        let f = whole().await;
        let damage = async || match lost {
            b"" => f.seed("HDEL", "bodies", &[&id('a')]).await,
            lost => f.seed("HSET", "bodies", &[&id('a'), lost]).await,
        };
        let (twin, after) = mended(&f, damage, &["lost_payload a"]).await;
        // The recount takes away the rest of its weight.
        let bytes = (13 - lost.len()).to_string();
        let expected = format!("open_bytes={bytes}");
        changed(
            &twin,
            &after,
            &[
                ("records", &rest(&twin, "records", 'a')),
                ("bodies", &rest(&twin, "bodies", 'a')),
                ("m:T", &[SPENT]),
                ("counters", &["live=4", "open=0", &expected]),
            ],
        );
        let answer = flat(
            f.run(&scripts::RECOUNT, |call| recount(call, 1, 100))
                .await
                .expect("recount"),
        );
        assert_eq!(answer, ["1", "open_bytes", &bytes, "0"]);
    }

    let f = whole().await;
    let damage = async || {
        f.seed(
            "HSET",
            "bodies",
            &[&[&id('z')[..], b"h"].concat(), b"head", &id('e'), b"left"],
        )
        .await;
    };
    let finds = ["body_without_task e", "body_without_task z"];
    let (twin, after) = mended(&f, damage, &finds).await;
    changed(&twin, &after, &[]);
}

/// The entries of a key that do not begin with the letter.
fn rest<'a>(state: &'a State, key: &str, letter: char) -> Vec<&'a str> {
    state[key]
        .iter()
        .map(String::as_str)
        .filter(|entry| !entry.starts_with(letter))
        .collect()
}

#[tokio::test]
async fn a_record_that_cannot_be_read_goes_with_all_that_belongs_to_it() {
    for damage in [&b"\x97\xa1L\x01"[..], b"\xc1", b"h5", b"3x", b"m\x02", b""] {
        let f = whole().await;
        let plant = async || f.seed("HSET", "records", &[&id('b'), damage]).await;
        let finds = ["unreadable_record b", "lease_without_holder b"];
        assert_eq!(all(&f, 1).await, [""; 0]);
        let twin = f.state().await;
        plant().await;
        assert_eq!(
            flat(
                f.run(&scripts::RECOUNT, |call| recount(call, 0, 100))
                    .await
                    .expect("recount")
            ),
            ["0"]
        );
        assert_eq!(all(&f, 1).await, finds, "{damage:?}");
        assert_eq!(all(&f, 1).await, [""; 0]);
        let after = f.state().await;
        let (records, bodies) = (rest(&twin, "records", 'b'), rest(&twin, "bodies", 'b'));
        changed(
            &twin,
            &after,
            &[
                ("records", &records),
                ("bodies", &bodies),
                ("leases", &["f5=1500000"]),
            ],
        );
        // Nobody knows in which state it was: the recount does.
        let answer = flat(
            f.run(&scripts::RECOUNT, |call| recount(call, 1, 100))
                .await
                .expect("recount"),
        );
        assert_eq!(answer, ["1", "live", "5", "4"]);
    }
}

#[tokio::test]
async fn a_pointer_lies_in_its_lane() {
    let f = whole().await;
    let damage = async || {
        f.seed("HSET", "m:P", &[b"v", b"9", b"x", b"none", b"y", b"3"])
            .await
    };
    let (twin, after) = mended(
        &f,
        damage,
        &["pointer_out_of_range ", "pointer_out_of_range "],
    )
    .await;
    changed(&twin, &after, &[("m:P", &["u=8", "y=3"])]);
}

pub(super) fn recount(call: &mut Call, mends: u8, most: usize) {
    call.arg(mends).arg(most);
}

#[tokio::test]
async fn counters_are_counted_again() {
    let f = whole().await;
    f.seed("XADD", "outbox", &[b"*", b"b", b"reports"]).await;
    f.seed(
        "XADD",
        "outbox",
        &[b"*", b"x", &id('b'), b"w", b"w", b"a", b"1", b"e", b"0"],
    )
    .await;
    f.seed(
        "HSET",
        "counters",
        &[b"outbox_bytes", b"30", b"grants", b"5"],
    )
    .await;
    let twin = f.state().await;
    let counted = async |mends| {
        flat(
            f.run(&scripts::RECOUNT, |call| recount(call, mends, 100))
                .await
                .expect("recount"),
        )
    };
    assert_eq!(counted(1).await, ["1"]);
    let wrong = [
        &b"live"[..],
        b"9",
        b"open",
        b"0",
        b"open_bytes",
        b"-4",
        b"outbox_bytes",
        b"1",
        b"front4",
        b"99",
    ];
    f.seed("HSET", "counters", &wrong).await;
    let before = f.state().await;
    let weight = WEIGHT.to_string();
    let finds = [
        ["live", "9", "5"],
        ["open", "0", "1"],
        ["open_bytes", "-4", &weight],
        ["outbox_bytes", "1", "30"],
        ["front4", "99", "8"],
    ];
    let finds: Vec<&str> = std::iter::once("1")
        .chain(finds.into_iter().flatten())
        .collect();
    assert_eq!(counted(0).await, finds);
    assert_eq!(f.state().await, before);
    assert_eq!(counted(1).await, finds);
    let mut counters: Vec<&str> = twin["counters"].iter().map(String::as_str).collect();
    counters.push("front4=8");
    changed(&twin, &f.state().await, &[("counters", &counters)]);
    // More than a step may read.
    assert_eq!(
        flat(
            f.run(&scripts::RECOUNT, |call| recount(call, 1, 5))
                .await
                .expect("recount")
        ),
        ["0"]
    );
}

#[tokio::test]
async fn pages_of_lanes_and_of_the_list_go_on_where_they_ended() {
    let f = Fixture::new().await;
    for letter in ['a', 'b', 'c', 'd'] {
        f.seed("LPUSH", "m:T", &[&element(1, 2, letter)]).await;
        f.seed("RPUSH", "finals", &[&id(letter)]).await;
    }
    f.seed("LPUSH", "m:T", &[b"no element"]).await;
    f.seed("SET", "m:C", &[b"10"]).await;
    let page = async |lane: usize, from: u64| {
        let page = |call: &mut Call| {
            call.arg(lane).arg(from).arg(2);
        };
        flat(
            f.run(&scripts::CHECK_ORDER, page)
                .await
                .expect("check_order"),
        )
    };
    // From the tail on; places that have gone are behind.
    assert_eq!(page(4, 0).await, ["12", "a", "2", "b", "2"]);
    assert_eq!(page(4, 12).await, ["14", "c", "2", "d", "2"]);
    assert_eq!(page(4, 14).await, ["-1"]);
    f.seed("RPOP", "m:T", &[]).await;
    f.seed("SET", "m:C", &[b"11"]).await;
    assert_eq!(
        page(4, 12).await,
        ["14", "c", "2", "d", "2"],
        "a place does not move"
    );
    assert_eq!(page(3, 0).await, ["-1"]);
    // From the end on.
    assert_eq!(page(0, 0).await, ["2", "c", "0", "d", "0"]);
    assert_eq!(page(0, 2).await, ["4", "a", "0", "b", "0"]);
    assert_eq!(page(0, 4).await, ["-1"]);
}

pub(super) fn suspects(mends: u8, why: &str, letters: &str, passed: usize) -> impl Fn(&mut Call) {
    let (why, letters) = (why.to_owned(), letters.to_owned());
    move |call| {
        call.arg(mends).arg(passed).arg(&why);
        for letter in letters.chars() {
            call.arg(id(letter));
        }
    }
}

/// Looks at tasks again: how many were dealt with, how many of them not told, and the finds.
async fn look_within(
    f: &Fixture,
    mends: u8,
    why: &str,
    letters: &str,
    passed: usize,
) -> (u64, u64, Vec<String>) {
    let answer = f
        .run(&scripts::CHECK_TASK, suspects(mends, why, letters, passed))
        .await
        .expect("check_task");
    let answer = flat(answer);
    let finds = answer[3..]
        .chunks(3)
        .map(|find| format!("{} {}", find[0], find[1]));
    (
        answer[0].parse().expect("a number"),
        answer[1].parse().expect("a number"),
        finds.collect(),
    )
}

/// The finds of a look that deals with all of them.
async fn look(f: &Fixture, mends: u8, why: &str, letters: &str) -> Vec<String> {
    let (dealt_with, untold, finds) = look_within(f, mends, why, letters, PASSED).await;
    assert_eq!((dealt_with, untold), (letters.len() as u64, 0));
    finds
}

#[tokio::test]
async fn a_suspicion_that_is_wrong_changes_nothing() {
    let f = whole().await;
    let before = f.state().await;
    for (why, letters) in [
        ("mmmmmm", "abcdef"),
        ("tttttt", "abcdef"),
        ("llllll", "abcdef"),
        ("uuuuuu", "abcdef"),
        ("ee", "ez"),
    ] {
        assert_eq!(look(&f, 1, why, letters).await, [""; 0], "{why}");
    }
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn an_open_task_is_in_a_lane_once() {
    let f = whole().await;
    let twin = f.state().await;
    f.seed("DEL", "m:T", &[]).await;
    let before = f.state().await;
    assert_eq!(look(&f, 0, "m", "a").await, ["open_without_element a"]);
    assert_eq!(f.state().await, before);
    assert_eq!(look(&f, 1, "m", "a").await, ["open_without_element a"]);
    assert_eq!(f.state().await, twin);

    // Also when the lane is that of retries, and the priority that of the body.
    let f = whole().await;
    f.seed(
        "HSET",
        "records",
        &[&id('a'), b"\x9a\xa1L\x01\x01\x90\x90\x90\x00\x03\x90\x90"],
    )
    .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(3)]).await;
    let before = f.state().await;
    assert_eq!(look(&f, 1, "m", "a").await, ["open_without_element a"]);
    changed(&before, &f.state().await, &[("lr:T", &["1/3/a"])]);

    // The earlier of two is spent.
    let f = whole().await;
    f.seed("LPUSH", "m:T", &[&element(1, 0, 'x'), &element(1, 0, 'a')])
        .await;
    let before = f.state().await;
    assert_eq!(look(&f, 0, "t", "a").await, ["element_twice a"]);
    assert_eq!(f.state().await, before);
    assert_eq!(look(&f, 1, "t", "a").await, ["element_twice a"]);
    changed(
        &before,
        &f.state().await,
        &[("m:T", &["1/0/a", "1/0/x", SPENT])],
    );
    assert_eq!(look(&f, 1, "t", "a").await, [""; 0]);

    // An element that names another NUM offers it, too.
    let f = whole().await;
    f.seed("DEL", "m:T", &[]).await;
    f.seed("LPUSH", "m:T", &[&element(3, 0, 'a')]).await;
    assert_eq!(look(&f, 1, "m", "a").await, [""; 0]);
}

#[tokio::test]
async fn a_lane_that_is_longer_than_the_bound_is_not_told() {
    let f = whole().await;
    // Four elements before that of 'a' from the head, and none of 'y'.
    f.waiting('y', 1, b"1").await;
    for letter in ['t', 'u', 'v', 'w'] {
        f.seed("LPUSH", "m:T", &[&element(1, 0, letter)]).await;
    }
    f.seed("LREM", "m:T", &[b"0", &element(1, 0, 'y')]).await;
    let before = f.state().await;
    // Nothing is found and mended by a look that did not see all.
    assert_eq!(look_within(&f, 1, "m", "y", 4).await, (1, 1, vec![]));
    assert_eq!(look_within(&f, 1, "t", "a", 4).await, (1, 1, vec![]));
    assert_eq!(f.state().await, before);
    // A task that finds no room any more needs a call of its own.
    assert_eq!(
        look_within(&f, 0, "mmm", "ymy", 210).await,
        (2, 0, vec!["open_without_element y".into()])
    );
    assert_eq!(look_within(&f, 0, "tm", "ay", 9).await, (1, 0, vec![]));
    // A task that offers nothing costs nothing.
    assert_eq!(look_within(&f, 0, "mmm", "bcd", 1).await, (3, 0, vec![]));
    assert_eq!(
        look_within(&f, 1, "m", "y", 210).await,
        (1, 0, vec!["open_without_element y".into()])
    );

    // Nor is a list of final records.
    let f = whole().await;
    f.seed("RPUSH", "finals", &[&id('s'), &id('t'), &id('a')])
        .await;
    let before = f.state().await;
    assert_eq!(look_within(&f, 1, "l", "a", 3).await, (1, 1, vec![]));
    assert_eq!(
        look_within(&f, 1, "uu", "eb", 1).await,
        (1, 0, vec![]),
        "the first has taken all"
    );
    assert_eq!(f.state().await, before);
    assert_eq!(
        look_within(&f, 1, "l", "a", 4).await,
        (1, 0, vec!["live_among_finals a".into()])
    );
}

#[tokio::test]
async fn a_repair_drops_so_many_tasks_a_call_and_reports_the_others_with_the_next() {
    let f = Fixture::new().await;
    let letters: Vec<char> = ('a'..='t').collect();
    for letter in &letters {
        f.waiting(*letter, 1, b"\xc1").await;
    }
    let ask = async |mends, passed| {
        let answer = f
            .run(&scripts::CHECK, check_within("records", mends, passed))
            .await
            .expect("check");
        let redis::Value::Array(parts) = answer else {
            panic!("{answer:?}")
        };
        let finds = flat(parts[1].clone()).len() / 3;
        (flat(parts[0].clone()), finds, flat(parts[3].clone()))
    };
    let whole = f.state().await;
    assert_eq!(
        ask(0, PASSED).await,
        (vec!["0".into()], 20, vec!["0".into()]),
        "a look has no such bound"
    );
    assert_eq!(f.state().await, whole);
    assert_eq!(
        ask(1, PASSED).await,
        (vec!["0".into()], 16, vec!["1".into()]),
        "the same cursor again"
    );
    assert_eq!(f.state().await["records"].len(), 4);
    // One at least, however long the lanes are.
    assert_eq!(ask(1, 1).await, (vec!["0".into()], 1, vec!["1".into()]));
    assert_eq!(
        ask(1, PASSED).await,
        (vec!["0".into()], 3, vec!["0".into()])
    );
    let after = f.state().await;
    assert_eq!((after.get("records"), after.get("bodies")), (None, None));
    // The lane keeps its length. The element that the call did not reach is of no task.
    assert_eq!(
        after["m:T"]
            .iter()
            .filter(|element| *element == SPENT)
            .count(),
        19
    );
    assert_eq!(after["m:T"].len(), 20);
}

#[tokio::test]
async fn the_list_of_final_records_has_all_of_them_and_no_other() {
    let f = whole().await;
    let twin = f.state().await;
    f.seed("DEL", "finals", &[]).await;
    assert_eq!(look(&f, 1, "u", "e").await, ["final_not_listed e"]);
    assert_eq!(f.state().await, twin);
    f.seed("RPUSH", "finals", &[&id('a'), &id('a')]).await;
    assert_eq!(look(&f, 1, "l", "a").await, ["live_among_finals a"]);
    assert_eq!(f.state().await, twin);

    // ["L", 1, …, false, 1] and ["D", …]: a past end is listed.
    let f = Fixture::new().await;
    f.seed(
        "HSET",
        "records",
        &[
            &id('v'),
            b"\x9d\xa1L\x01\x00\x91\xa0\x90\x90\x00\x00\x90\x90\x01\xc2\x01",
        ],
    )
    .await;
    f.seed(
        "HSET",
        "records",
        &[
            &id('w'),
            b"\x9d\xa1D\x01\x02\x90\x90\x90\x05\x00\x90\x90\x01\xc2\x01",
        ],
    )
    .await;
    f.seed("RPUSH", "finals", &[&id('v'), &id('w'), &id('w')])
        .await;
    let twin = f.state().await;
    assert!(look(&f, 1, "lu", "vw").await.is_empty());
    assert_eq!(f.state().await, twin);
    f.seed("LREM", "finals", &[b"1", &id('w')]).await;
    assert_eq!(look(&f, 1, "u", "w").await, ["final_not_listed w"]);
    assert_eq!(f.state().await, twin);
    // Nor does it count past ends that are gone.
    f.seed("DEL", "finals", &[]).await;
    f.seed("RPUSH", "finals", &[&id('v')]).await;
    assert_eq!(look(&f, 1, "u", "w").await, ["final_not_listed w"]);
    let records = [
        twin["records"][0].as_str(),
        r#"w=["D",1,2,[],[],[],5,0,[],[],1]"#,
    ];
    changed(
        &twin,
        &f.state().await,
        &[("records", &records), ("finals", &["v", "w"])],
    );
    let twin = f.state().await;
    f.seed("RPUSH", "finals", &[&id('v')]).await;
    assert_eq!(look(&f, 1, "l", "v").await, ["live_among_finals v"]);
    let record = r#"v=["L",1,0,[""],[],[],0,0,[],[],1]"#;
    changed(
        &twin,
        &f.state().await,
        &[
            ("records", &[record, &twin["records"][1]]),
            ("finals", &["w"]),
        ],
    );
}

#[tokio::test]
async fn a_task_that_ended_in_sql_leaves_with_all_that_it_has() {
    let f = whole().await;
    let twin = f.state().await;
    assert_eq!(
        look(&f, 1, "eee", "afc").await,
        ["ended_and_live a", "ended_and_live f", "ended_and_live c"]
    );
    let left = |key: &str| -> Vec<&str> {
        twin[key]
            .iter()
            .map(String::as_str)
            .filter(|entry| !entry.starts_with(['a', 'c', 'f']))
            .collect()
    };
    let (records, bodies) = (left("records"), left("bodies"));
    changed(
        &twin,
        &f.state().await,
        &[
            ("records", &records),
            ("bodies", &bodies),
            ("leases", &[&format!("b1={NOW}")]),
            ("delayed", &["d=3000000"]),
            ("m:T", &[SPENT]),
            ("counters", &["live=2", "open=0", "open_bytes=0"]),
        ],
    );
    assert_eq!(
        flat(
            f.run(&scripts::RECOUNT, |call| recount(call, 1, 100))
                .await
                .expect("recount")
        ),
        ["1"]
    );
}

#[tokio::test]
async fn a_dump_changes_nothing() {
    let f = whole().await;
    let before = f.state().await;
    let dump = |call: &mut Call| {
        call.arg(100);
    };
    let dump = f.run(&scripts::DUMP, dump).await.expect("dump");
    let redis::Value::BulkString(packed) = dump else {
        panic!("{dump:?}")
    };
    let shown: serde_json::Value = rmp_serde::from_slice(&packed).expect("msgpack");
    assert_eq!(
        (&shown["generation"], &shown["records_count"]),
        (&"7".into(), &6.into())
    );
    assert_eq!(
        (&shown["counters"]["live"], &shown["now_ms"]),
        (&"5".into(), &NOW.into())
    );
    assert_eq!(
        shown["lanes"][0]["pointers"][0],
        serde_json::json!({"worker": "u", "passed": "8"})
    );
    assert_eq!(f.state().await, before);
}
