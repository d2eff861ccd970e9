//! Records and bodies of random bytes: no script raises an error, and no script gives such a task to a worker for ever.

use proptest::{
    collection::vec,
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use taskd::redis_pool::{Call, Script, scripts};

use super::{Fixture, NOW, body, claim::claim, id, lease, report::complete};

const CASES: usize = 300;

/// Records that a script wrote.
const SAMPLES: [&[u8]; 7] = [
    b"3",
    b"h5:w",
    b"m\x03\x01\x01w\th5\nv\tc2\n",
    b"e\x02w\tc1\n",
    b"\x97\xa1L\x05\x01\x90\x90\x90\x00",
    b"\x9a\xa1L\x05\x03\x91\xa19\x92\xa1u\xa11\x94\xa1w\xa12\xa1v\xa13\x00\x02\x92\xa1x\xff\x93\x01\xa1x\xa1y",
    b"\x9d\xa1D\x01\x02\x90\x90\x90\x05\x00\x90\x90\x01\xc2\x02",
];

/// Random bytes, or a record in which some bytes are others.
fn records() -> impl Strategy<Value = Vec<u8>> {
    let damaged = (prop::sample::select(&SAMPLES[..]), vec((any::<prop::sample::Index>(), any::<u8>()), 0..4));
    let damaged = damaged.prop_map(|(sample, changes)| {
        let mut record = sample.to_vec();
        for (at, byte) in changes {
            let at = at.index(record.len());
            record[at] = byte;
        }
        record
    });
    prop_oneof![vec(any::<u8>(), 0..40), damaged]
}

/// A script, and what writes its arguments.
type Step = (&'static Script, fn(&mut Call));

#[tokio::test]
async fn no_record_of_any_bytes_raises_an_error() {
    let f = Fixture::new().await;
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config { failure_persistence: None, ..Config::default() }, rng);
    let explain: fn(&mut Call) = |call| {
        call.arg(id('a')).arg("w").arg(2).arg(100);
    };
    let expire: fn(&mut Call) = |call| {
        call.arg(1).arg("t:wake").arg("q").arg(&b"\x91\x00"[..]).arg(10).arg(100).arg(1000);
    };
    let promote: fn(&mut Call) = |call| {
        call.arg("t:wake").arg("q").arg(10).arg(600_000);
    };
    let deadline: fn(&mut Call) = |call| {
        call.arg("t:wake").arg(100).arg(1000).arg(id('a')).arg(2).arg("too late");
    };
    let claim: fn(&mut Call) = |call| claim(call, &[("w", 9), ("v", 9)]);
    let complete: fn(&mut Call) = |call| complete(call, &[('a', "7", 5, "w"), ('a', "7", 2, "v")]);
    let finals: fn(&mut Call) = |call| {
        call.arg(100).arg(10);
    };
    let forget: fn(&mut Call) = |call| {
        call.arg("1").arg(100).arg(id('a'));
    };
    let steps: [Step; 8] = [
        (&scripts::EXPLAIN, explain),
        (&scripts::CLAIM, claim),
        (&scripts::COMPLETE, complete),
        (&scripts::EXPIRE, expire),
        (&scripts::PROMOTE, promote),
        (&scripts::DEADLINE, deadline),
        (&scripts::FINALS, finals),
        (&scripts::FORGET, forget),
    ];
    let redis = f.redis.clone();
    for case in 0..CASES {
        let record = records().new_tree(&mut runner).expect("a record").current();
        // The scripts in another order each time: the first of them may mend what the others would meet.
        for turn in 0..steps.len() {
            let _: () = redis::cmd("FLUSHALL").query_async(&mut redis.conn()).await.expect("flush");
            f.seed("SET", "generation", &[b"7"]).await;
            f.waiting('a', 2, &record).await;
            f.seed("HSET", "bodies", &[&id('a'), &if case % 3 == 0 { record.clone() } else { body(2) }]).await;
            f.seed("ZADD", "leases", &[NOW.to_string().as_bytes(), &lease('a', 5)]).await;
            f.seed("ZADD", "delayed", &[b"5", &lease('a', 1)]).await;
            f.seed("RPUSH", "finals", &[&id('a')]).await;
            for step in 0..steps.len() {
                let (script, args) = steps[(turn + step) % steps.len()];
                let answer = f.run(script, args).await;
                assert!(answer.is_ok(), "{record:?} in step {step} from {turn}: {answer:?}");
            }
        }
    }
}
