//! Records and bodies of random bytes: no script raises an error, and no worker gets such a task
//! for ever.

use proptest::{
    collection::vec,
    prelude::*,
    sample::{Index, select},
    strategy::ValueTree as _,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use redis::Value;
use serde_json::json;
use taskd::redis_pool::{Call, Script, scripts};

use super::{
    Fixture, NOW, body,
    claim::claim,
    deadline::deadline,
    element,
    explain::packed,
    fresh::{Case, case, cases},
    id, lease,
    upkeep::{expire, promote},
};

const CASES: usize = 1000;

/// Records that a script wrote. The grant of `w` is 1, and that of a replica in backoff 2.
fn samples() -> Vec<Vec<u8>> {
    let text: [&[u8]; 5] = [
        b"3",
        b"h1:w",
        b"f5:1:w",
        b"m\x03\x01\x01\nw\th1\nv\tc2\n",
        b"e\x025\nw\tc1\nv\tc2\n",
    ];
    let msgpack = [
        json!(["L", 1, 0, [""], [], [], 0]),
        json!(["L", 1, 1, [], [], ["w", "1"], 0, 0, [], [1, "w", "no"]]),
        json!([
            "L",
            5,
            3,
            ["2"],
            ["u", "9"],
            ["w", "1"],
            0,
            0,
            ["w", 1, "x", -1],
            [1, "x", "no"]
        ]),
        json!([
            "L",
            5,
            3,
            ["2"],
            ["u", "9"],
            ["v", "8"],
            0,
            2,
            ["x", -1],
            [1, "x", "no"],
            0,
            ["w", 5]
        ]),
        json!([
            "L",
            3,
            0,
            [],
            ["u", "0"],
            ["w", "1"],
            0,
            0,
            [],
            [],
            1,
            false,
            2
        ]),
        json!(["D", 1, 2, [], [], [], 5, 0, [], [], 1, false, 1]),
    ];
    text.iter()
        .map(|record| record.to_vec())
        .chain(msgpack.iter().map(packed))
        .collect()
}

/// Random bytes, or a record in which some bytes are others.
fn records() -> impl Strategy<Value = Vec<u8>> {
    let damaged = (select(samples()), vec((any::<Index>(), any::<u8>()), 0..4));
    let damaged = damaged.prop_map(|(mut record, changes)| {
        for (at, byte) in changes {
            let at = at.index(record.len());
            record[at] = byte;
        }
        record
    });
    prop_oneof![1 => vec(any::<u8>(), 0..40), 3 => damaged]
}

/// All scripts that may meet the task `a`.
fn steps() -> Vec<Case> {
    let finals = |call: &mut Call| {
        call.arg(100).arg(10);
    };
    let forget = |call: &mut Call| {
        call.arg("1").arg(100).arg(id('a'));
    };
    let delivered = |call: &mut Call| {
        call.arg(1).arg(2);
    };
    let mut steps = cases();
    // It needs an empty shard.
    steps.retain(|(name, ..)| *name != "close");
    steps.push(case("deadline of a", &scripts::DEADLINE, |call| {
        deadline(call, [100, 1 << 20], &[('a', 2)])
    }));
    steps.push(case("finals", &scripts::FINALS, finals));
    steps.push(case("forget", &scripts::FORGET, forget));
    steps.push(case("delivered", &scripts::DELIVERED, delivered));
    steps
}

/// How often `w` gets `a` that lets each lease run out; 10 at most.
async fn times_that_it_is_claimed(f: &Fixture) -> i64 {
    for times in 0..10 {
        // A full outbox pauses claims.
        f.seed("DEL", "outbox", &[]).await;
        f.seed("HDEL", "counters", &[b"outbox_bytes"]).await;
        // Its grants have reached the worker.
        f.seed("DEL", "undelivered", &[]).await;
        let run = async |script: &'static Script, args: fn(&mut Call)| {
            let mut call = f.keys.call(script, Some(NOW + 600_000 * (times + 1)));
            args(&mut call);
            call.run(&mut f.redis.conn()).await.expect("an answer")
        };
        run(&scripts::EXPIRE, expire).await;
        run(&scripts::PROMOTE, promote).await;
        let answer = run(&scripts::CLAIM, |call| claim(call, &[("w", 9)])).await;
        let Value::Array(parts) = answer else {
            panic!("{answer:?}")
        };
        let ids = match parts.get(4) {
            Some(Value::BulkString(ids)) => ids,
            _ => return times,
        };
        if !ids.chunks(16).any(|other| other == id('a')) {
            return times;
        }
    }
    10
}

#[tokio::test]
async fn no_record_of_any_bytes_raises_an_error() {
    let f = Fixture::new().await;
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(
        Config {
            failure_persistence: None,
            ..Config::default()
        },
        rng,
    );
    let steps = steps();
    // In another order each time: the first script may mend what the others would meet.
    let drawn = (
        records(),
        Just((0..steps.len()).collect::<Vec<_>>()).prop_shuffle(),
    );
    let redis = f.redis.clone();
    for number in 0..CASES {
        let (record, order) = drawn.new_tree(&mut runner).expect("a record").current();
        let _: () = redis::cmd("FLUSHALL")
            .query_async(&mut redis.conn())
            .await
            .expect("flush");
        f.seed("SET", "generation", &[b"7"]).await;
        f.waiting('a', 2, &record).await;
        f.seed("LPUSH", "mr:T", &[&element(5, 2, 'a')]).await;
        let damaged_body = number % 3 == 0;
        f.seed(
            "HSET",
            "bodies",
            &[
                &id('a'),
                &if damaged_body {
                    record.clone()
                } else {
                    body(2)
                },
            ],
        )
        .await;
        f.seed(
            "ZADD",
            "leases",
            &[NOW.to_string().as_bytes(), &lease('a', 1)],
        )
        .await;
        f.seed("ZADD", "delayed", &[b"5", &lease('a', 2)]).await;
        f.seed("RPUSH", "finals", &[&id('a')]).await;
        let mut done = Vec::new();
        // Some orders end early: what is left then meets the claims.
        for step in order.into_iter().skip(number % 2 * 30) {
            let (name, script, args) = &steps[step];
            done.push(*name);
            let answer = f.run(script, args).await;
            assert!(answer.is_ok(), "{record:?} by {done:?}: {answer:?}");
        }
        // Its body allows two attempts, and a change of NUM a few more.
        if !damaged_body {
            let times = times_that_it_is_claimed(&f).await;
            assert!(
                times < 10,
                "{record:?} by {done:?} is claimed again and again"
            );
        }
    }
}
