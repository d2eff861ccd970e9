//! A task for one worker to which nothing has happened yet has no record, only a body. For every
//! script it is the same task as one with the record `1`.

use redis::Value;
use taskd::redis_pool::{Call, Script, scripts};

use super::{
    Fixture, NOW, State, WEIGHT, body,
    change::{cancel, update},
    changed,
    check::{check, recount, suspects},
    claim::claim,
    deadline::deadline,
    element,
    enqueue::enqueue,
    explain::explain,
    flat, id,
    report::complete,
    session::end,
};

pub(super) type Case = (&'static str, &'static Script, Box<dyn Fn(&mut Call)>);

pub(super) fn case(
    name: &'static str,
    script: &'static Script,
    args: impl Fn(&mut Call) + 'static,
) -> Case {
    (name, script, Box::new(args))
}

/// Calls that meet the task `a`, and some that name a lease of it that nobody has.
pub(super) fn cases() -> Vec<Case> {
    let requeue = |mode: &'static str| {
        move |call: &mut Call| {
            call.arg("wake")
                .arg("q")
                .arg(id('a'))
                .arg(0)
                .arg(mode)
                .arg("w")
                .arg(NOW + 9);
        }
    };
    let reject = |mode: &'static str| {
        move |call: &mut Call| {
            call.arg(1)
                .arg("t:wake")
                .arg("q")
                .arg(&b"\x91\x00"[..])
                .arg(1000);
            call.arg(id('a'))
                .arg("7")
                .arg(1)
                .arg("w")
                .arg(mode)
                .arg("")
                .arg("no reason")
                .arg("failed");
        }
    };
    let extend = |call: &mut Call| {
        call.arg(id('a')).arg("7").arg(1).arg("w").arg(5000);
    };
    let expire = |call: &mut Call| {
        call.arg(1)
            .arg("t:wake")
            .arg("q")
            .arg(&b"\x91\x00"[..])
            .arg(10)
            .arg(100)
            .arg(1000);
    };
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(10).arg(600_000);
    };
    let ids = |call: &mut Call| {
        call.arg(id('a')).arg(id('b')).arg(id('z'));
    };
    let missing = |call: &mut Call| {
        call.arg(['a', 'b', 'c', 'z'].map(id).concat());
    };
    let few = |number: u32| {
        move |call: &mut Call| {
            call.arg(number);
        }
    };
    let times = |call: &mut Call| {
        call.arg(60_000).arg(600_000);
    };
    // At most five bytes: each claim asks for the size of the body.
    let weighed = |call: &mut Call| {
        call.arg(100)
            .arg(100)
            .arg(1000)
            .arg(5)
            .arg("")
            .arg(0)
            .arg("w")
            .arg("2 5 1 0 0");
    };
    let again = [("1-0", 'a', 1, 0), ("2-0", 'x', 1, 0)];
    vec![
        case("claim", &scripts::CLAIM, |call| claim(call, &[("w", 1)])),
        case("claim of all", &scripts::CLAIM, |call| {
            claim(call, &[("w", 9), ("v", 9)])
        }),
        case("claim by weight", &scripts::CLAIM, weighed),
        case("complete", &scripts::COMPLETE, |call| {
            complete(call, &[('a', "7", 1, "w")])
        }),
        case("complete of another life", &scripts::COMPLETE, |call| {
            complete(call, &[('a', "6", 1, "w")])
        }),
        case("reject", &scripts::REJECT, reject("retry")),
        case("release", &scripts::REJECT, reject("release")),
        case("extend", &scripts::EXTEND, extend),
        case("session_end", &scripts::SESSION_END, |call| {
            end(call, 1000, &[('a', 1, "w", NOW, 1)])
        }),
        case("expire", &scripts::EXPIRE, expire),
        case("promote", &scripts::PROMOTE, promote),
        case("cancel", &scripts::CANCEL, |call| {
            cancel(call, &[('a', 1, 0)])
        }),
        case("deadline", &scripts::DEADLINE, |call| {
            deadline(call, [1000, 1 << 20], &[('a', 1)])
        }),
        case("change of NUM", &scripts::CHANGE, |call| {
            update(call, &[('a', 2, 2, 0)])
        }),
        case("change of nothing", &scripts::CHANGE, |call| {
            update(call, &[('a', 1, 2, 0)])
        }),
        case("change of the priority", &scripts::CHANGE, |call| {
            update(call, &[('a', 1, 3, 0)])
        }),
        case("requeue", &scripts::REQUEUE, requeue("all")),
        case("requeue away", &scripts::REQUEUE, requeue("away")),
        case("requeue to", &scripts::REQUEUE, requeue("to")),
        case("requeue free", &scripts::REQUEUE, requeue("free")),
        case("enqueue again", &scripts::ENQUEUE, move |call| {
            enqueue(call, "", "2-0", 100, &again)
        }),
        case("sweep", &scripts::SWEEP, few(512)),
        case("stats", &scripts::STATS, |_| {}),
        case("books", &scripts::BOOKS, |_| {}),
        case("look", &scripts::LOOK, times),
        case("inspect", &scripts::INSPECT, ids),
        case("missing", &scripts::MISSING, missing),
        case("explain", &scripts::EXPLAIN, |call| explain('a', "w")(call)),
        case("check of leases", &scripts::CHECK, check("leases", 1)),
        case("check of delays", &scripts::CHECK, check("delayed", 1)),
        case(
            "check_task",
            &scripts::CHECK_TASK,
            suspects(1, "m", "a", 1000),
        ),
        case(
            "check_task of one that ended",
            &scripts::CHECK_TASK,
            suspects(1, "e", "a", 1000),
        ),
        case(
            "check_task of one that is listed",
            &scripts::CHECK_TASK,
            suspects(1, "l", "a", 1000),
        ),
        case("recount", &scripts::RECOUNT, |call| recount(call, 1, 100)),
        case("close", &scripts::CLOSE, few(0)),
    ]
}

/// `a` waits and nothing has happened to it, `b` is held, `c` is for three, and `z` is nobody.
async fn shard(large: bool) -> Fixture {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.held('b', "v", 2).await;
    f.waiting('c', 3, b"3").await;
    f.seed(
        "HSET",
        "counters",
        &[b"largest_body", if large { b"5000" } else { b"13" }],
    )
    .await;
    f
}

/// The state without records that say nothing.
fn plain(mut state: State) -> State {
    if let Some(records) = state.get_mut("records") {
        records.retain(|record| !record.ends_with("=1"));
    }
    state.retain(|key, values| key != "records" || !values.is_empty());
    state
}

#[tokio::test]
async fn a_body_alone_is_a_task_to_which_nothing_has_happened() {
    for large in [false, true] {
        for (name, script, args) in cases() {
            let (with, without) = (shard(large).await, shard(large).await);
            without.seed("HDEL", "records", &[&id('a')]).await;
            let answers = (
                with.run(script, &args).await,
                without.run(script, &args).await,
            );
            let shown = |answer: Result<Value, String>| answer.map(flat);
            assert_eq!(shown(answers.1), shown(answers.0), "{name}");
            assert_eq!(
                plain(without.state().await),
                plain(with.state().await),
                "{name}"
            );
        }
    }
}

#[tokio::test]
async fn an_element_without_record_and_body_is_spent() {
    for large in ["13", "5000"] {
        let f = Fixture::new().await;
        f.seed("LPUSH", "m:T", &[&element(1, 0, 'z')]).await;
        f.waiting('a', 1, b"1").await;
        f.seed("HDEL", "records", &[&id('a')]).await;
        f.seed("HSET", "counters", &[b"largest_body", large.as_bytes()])
            .await;
        let before = f.state().await;
        let answer = flat(
            f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
                .await
                .expect("claim"),
        );
        assert_eq!(answer[4..], ["a", "body2", "1", "0"]);
        changed(
            &before,
            &f.state().await,
            &[
                ("records", &["a=h1:w"]),
                ("leases", &[&format!("a1={}", NOW + 30_000)]),
                ("undelivered", &[&format!("1={}", NOW + 30_000)]),
                ("m:T", &[]),
                ("m:C", &["2"]),
                (
                    "counters",
                    &[
                        "grants=1",
                        &format!("largest_body={large}"),
                        "live=1",
                        "longest_lease=30000",
                        "open=0",
                        "open_bytes=0",
                    ],
                ),
            ],
        );
    }
}

/// Its body alone looks like a task to which nothing has happened.
#[tokio::test]
async fn a_task_that_lost_its_record_goes_where_something_shows_the_loss() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    f.seed("HDEL", "records", &[&id('a')]).await;
    let before = f.state().await;
    let expire = |call: &mut Call| {
        call.arg(1)
            .arg("t:wake")
            .arg("q")
            .arg(&b"\x91\x00"[..])
            .arg(10)
            .arg(100)
            .arg(1000);
    };
    assert_eq!(
        flat(f.run(&scripts::EXPIRE, expire).await.expect("expire")),
        ["0", "0", "0", "0", "-1"]
    );
    changed(
        &before,
        &f.state().await,
        &[("bodies", &[]), ("leases", &[]), ("counters", &["live=0"])],
    );

    let f = Fixture::new().await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    f.seed("ZADD", "delayed", &[b"5", &id('a')]).await;
    f.seed("HSET", "counters", &[b"live", b"1"]).await;
    let before = f.state().await;
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(10).arg(600_000);
    };
    assert_eq!(
        flat(f.run(&scripts::PROMOTE, promote).await.expect("promote")),
        ["0", "0", "-1"]
    );
    changed(
        &before,
        &f.state().await,
        &[("bodies", &[]), ("delayed", &[]), ("counters", &["live=0"])],
    );

    // Its record alone knew who had completed it.
    for large in ["13", "5000"] {
        let f = Fixture::new().await;
        f.waiting('a', 3, b"3").await;
        f.seed("HDEL", "records", &[&id('a')]).await;
        f.seed("HSET", "counters", &[b"largest_body", large.as_bytes()])
            .await;
        let before = f.state().await;
        assert_eq!(
            flat(
                f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)]))
                    .await
                    .expect("claim")
            ),
            ["7", "0"]
        );
        let counters = [
            &format!("largest_body={large}")[..],
            "live=0",
            "open=0",
            "open_bytes=0",
        ];
        let expected: [(&str, &[&str]); 4] = [
            ("bodies", &[]),
            ("m:T", &[]),
            ("m:C", &["1"]),
            ("counters", &counters),
        ];
        changed(&before, &f.state().await, &expected);
    }
}

#[tokio::test]
async fn fsck_knows_a_task_by_its_body_alone() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.seed("HDEL", "records", &[&id('a')]).await;
    let before = f.state().await;
    let answer = flat(
        f.run(&scripts::CHECK, check("bodies", 1))
            .await
            .expect("check"),
    );
    assert_eq!(answer, ["0", "a", "o", "0", "0", "0"]);
    assert_eq!(
        flat(
            f.run(&scripts::RECOUNT, |call| recount(call, 1, 100))
                .await
                .expect("recount")
        ),
        ["1"]
    );
    assert_eq!(f.state().await, before);

    // No lane has it.
    f.seed("DEL", "m:T", &[]).await;
    let look = async || {
        flat(
            f.run(&scripts::CHECK_TASK, suspects(1, "m", "a", 1000))
                .await
                .expect("check_task"),
        )
    };
    assert_eq!(look().await[3..5], ["open_without_element", "a"]);
    assert_eq!(f.state().await, before);

    // A body that is too short for its head is damage, and the task begins anew.
    f.seed("HSET", "bodies", &[&id('a'), b"short"]).await;
    let answer = flat(
        f.run(&scripts::CHECK, check("bodies", 1))
            .await
            .expect("check"),
    );
    assert_eq!(answer[1..3], ["lost_payload", "a"]);
    let left = f.state().await;
    assert_eq!(
        (left.get("records"), left.get("bodies"), &left["m:T"][..]),
        (None, None, &["1/0/\0".to_owned()][..])
    );
    assert_eq!(
        left["counters"],
        ["live=0", "open=0", &format!("open_bytes={}", WEIGHT - 405)]
    );

    // A field that is no id belongs to no task.
    f.seed("HSET", "bodies", &[b"short", b"text"]).await;
    let answer = flat(
        f.run(&scripts::CHECK, check("bodies", 1))
            .await
            .expect("check"),
    );
    assert_eq!(
        (&answer[1][..], f.state().await),
        ("body_without_task", left)
    );
}
