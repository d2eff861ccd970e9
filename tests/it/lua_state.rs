//! State tests of the scripts: seed every key, run one script once, compare *every* key of the shard, and the answer.
//!
//! Ids are sixteen times one letter and shown as that letter; elements are shown as `NUM/taken/id`; stream ids and the order of hashes are
//! not compared. The script's clock is `NOW`.

use std::collections::BTreeMap;

use redis::Value;
use taskd::{
    model::{QueueName, ShardId},
    queue::{
        keys::ShardKeys,
        scripts::{self, Call, Script},
    },
    redis_pool::Redis,
};

use crate::support::redis::{Fsync, RedisServer};

const NOW: i64 = 1_000_000;

struct Fixture {
    _server: RedisServer,
    redis: Redis,
    keys: ShardKeys,
}

type State = BTreeMap<String, Vec<String>>;

fn id(letter: char) -> Vec<u8> {
    vec![letter as u8; 16]
}

/// An id or a lease `letter` + grant.
fn lease(letter: char, grant: u64) -> Vec<u8> {
    [id(letter), grant.to_string().into_bytes()].concat()
}

fn element(num: u8, taken: u8, letter: char) -> Vec<u8> {
    [vec![0x93, num, taken, 0xb0], id(letter)].concat()
}

/// Priority, max_attempts 2, lease 30 s, and some text.
fn body(priority: u8) -> Vec<u8> {
    [&[priority][..], &2_u32.to_be_bytes(), &30_000_u32.to_be_bytes(), b"text"].concat()
}

const BODY_BYTES: &str = "13";

impl Fixture {
    /// A shard that was opened and holds nothing.
    async fn new() -> Self {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.expect("connect");
        let keys = ShardKeys::new("t", &ShardId { queue: QueueName::new("q").expect("a name"), number: 0 });
        let fixture = Self { _server: server, redis, keys };
        fixture.seed("SET", "g", &[b"7"]).await;
        fixture
    }

    async fn seed(&self, command: &str, key: &str, args: &[&[u8]]) {
        let mut command = redis::cmd(command);
        command.arg(format!("t:{{q:0}}:{key}")).arg(args);
        let _: Value = command.query_async(&mut self.redis.conn()).await.expect("seed");
    }

    /// A live task that waits in the medium lane with this record.
    async fn waiting(&self, letter: char, num: u8, record: &[u8]) {
        self.seed("HSET", "R", &[&id(letter), record]).await;
        self.seed("HSET", "B", &[&id(letter), &body(2)]).await;
        self.seed("LPUSH", "m:T", &[&element(num, 0, letter)]).await;
        for (field, by) in [("open", "1"), ("live", "1"), ("bytes", BODY_BYTES)] {
            self.seed("HINCRBY", "M", &[field.as_bytes(), by.as_bytes()]).await;
        }
    }

    /// A task of NUM = 1 that `worker` holds by `grant` until `NOW`, out of its lane.
    async fn held(&self, letter: char, worker: &str, grant: u64) {
        self.seed("HSET", "R", &[&id(letter), format!("h{grant}:{worker}").as_bytes()]).await;
        self.seed("HSET", "B", &[&id(letter), &body(2)]).await;
        self.seed("ZADD", "L", &[NOW.to_string().as_bytes(), &lease(letter, grant)]).await;
        self.seed("HINCRBY", "M", &[b"live", b"1"]).await;
    }

    async fn run(&self, script: &'static Script, args: impl FnOnce(&mut Call)) -> Result<Value, String> {
        let mut call = script.on(&self.keys, Some(NOW));
        args(&mut call);
        call.run(&mut self.redis.conn()).await.map_err(|error| error.to_string())
    }

    /// Every key of this Redis.
    async fn state(&self) -> State {
        let mut conn = self.redis.conn();
        let names: Vec<String> = redis::cmd("KEYS").arg("*").query_async(&mut conn).await.expect("keys");
        let mut state = State::new();
        for name in names {
            let kind: String = redis::cmd("TYPE").arg(&name).query_async(&mut conn).await.expect("type");
            let (command, args): (&str, &[&str]) = match kind.as_str() {
                "string" => ("GET", &[]),
                "hash" => ("HGETALL", &[]),
                "list" => ("LRANGE", &["0", "-1"]),
                "zset" => ("ZRANGE", &["0", "-1", "WITHSCORES"]),
                "stream" => ("XRANGE", &["-", "+"]),
                other => panic!("a key of type {other}"),
            };
            let value: Value = redis::cmd(command).arg(&name).arg(args).query_async(&mut conn).await.expect("read");
            let mut shown = Vec::new();
            match kind.as_str() {
                "stream" => entries(value).into_iter().for_each(|fields| shown.push(pairs(&fields).join(" "))),
                "hash" | "zset" => shown = pairs(&flat(value)),
                _ => shown = flat(value),
            }
            if kind == "hash" {
                shown.sort();
            }
            state.insert(name.trim_start_matches("t:{q:0}:").to_owned(), shown);
        }
        state
    }
}

/// A stream's entries without their ids.
fn entries(value: Value) -> Vec<Vec<String>> {
    let Value::Array(entries) = value else { panic!("{value:?}") };
    let fields = |entry| match entry {
        Value::Array(mut parts) => flat(parts.pop().expect("fields")),
        other => panic!("{other:?}"),
    };
    entries.into_iter().map(fields).collect()
}

fn pairs(flat: &[String]) -> Vec<String> {
    flat.chunks(2).map(|pair| pair.join("=")).collect()
}

fn flat(value: Value) -> Vec<String> {
    match value {
        Value::Array(items) => items.into_iter().flat_map(flat).collect(),
        Value::Int(number) => vec![number.to_string()],
        Value::BulkString(bytes) => vec![shown(&bytes)],
        Value::SimpleString(text) => vec![text],
        Value::Nil => vec!["nil".into()],
        other => panic!("{other:?}"),
    }
}

fn shown(bytes: &[u8]) -> String {
    let letters = |at: usize| bytes.len() >= at + 16 && bytes[at..at + 16].iter().all(|b| *b == bytes[at]);
    if bytes.len() == 20 && bytes[0] == 0x93 && letters(4) {
        return format!("{}/{}/{}", bytes[1], bytes[2], bytes[4] as char);
    }
    if letters(0) && bytes[0].is_ascii_lowercase() {
        return format!("{}{}", bytes[0] as char, String::from_utf8_lossy(&bytes[16..]));
    }
    if bytes.len() == 13 && bytes.ends_with(b"text") {
        return format!("body{}", bytes[0]);
    }
    if bytes.first() == Some(&0x97) {
        let record: (String, u32, u32, u32, Vec<String>, Vec<String>, u64) =
            rmp_serde::from_slice(bytes).expect("a record");
        return format!("{record:?}");
    }
    String::from_utf8_lossy(bytes).into_owned()
}

/// `expected` is what differs from `before`; an empty list says that the key is gone.
#[track_caller]
fn changed(before: &State, after: &State, expected: &[(&str, &[&str])]) {
    let mut want = before.clone();
    for (key, values) in expected {
        if values.is_empty() {
            assert!(want.remove(*key).is_some(), "{key} was not there before");
        } else {
            want.insert((*key).to_owned(), values.iter().map(|value| (*value).to_owned()).collect());
        }
    }
    assert_eq!(after, &want, "after the script (left) and as it should be (right)");
}

#[tokio::test]
async fn without_a_generation_every_script_is_refused() {
    let f = Fixture::new().await;
    f.seed("DEL", "g", &[]).await;
    let before = f.state().await;
    for script in [
        &scripts::ENQUEUE,
        &scripts::CLAIM,
        &scripts::COMPLETE,
        &scripts::REJECT,
        &scripts::EXTEND,
        &scripts::EXPIRE,
        &scripts::PROMOTE,
        &scripts::SWEEP,
        &scripts::INSPECT,
        &scripts::STATS,
        &scripts::FINALS,
        &scripts::FORGET,
        &scripts::OUTBOX,
        &scripts::FORWARDED,
        &scripts::CLOSE,
    ] {
        let error = f.run(script, |_| {}).await.expect_err(script.name);
        assert!(error.contains("NOGEN"), "{}: {error}", script.name);
    }
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn open_empties_what_is_left_of_an_old_life_but_the_outbox() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.held('b', "w", 1).await;
    for (command, key, args) in [
        ("ZADD", "D", &[&b"5"[..], b"c"][..]),
        ("RPUSH", "F", &[b"d"]),
        ("SET", "O", &[b"topic/4-0"]),
        ("SET", "m:C", &[b"3"]),
        ("HSET", "m:P", &[b"w", b"4"]),
        ("XADD", "S", &[b"*", b"c", b"report"]),
        ("DEL", "g", &[]),
    ] {
        f.seed(command, key, args).await;
    }
    let open = |call: &mut Call| {
        call.arg(8).arg("another/9-1");
    };
    assert_eq!(flat(f.run(&scripts::OPEN, open).await.expect("open")), ["1"]);
    let opened: State = [("g", "8"), ("O", "another/9-1"), ("S", "c=report")]
        .map(|(key, value)| (key.to_owned(), vec![value.to_owned()]))
        .into();
    assert_eq!(f.state().await, opened);
}

#[tokio::test]
async fn open_leaves_a_shard_that_somebody_else_has_opened() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    f.seed("SET", "O", &[b"topic/4-0"]).await;
    let before = f.state().await;
    let open = |call: &mut Call| {
        call.arg(8).arg("");
    };
    assert_eq!(flat(f.run(&scripts::OPEN, open).await.expect("open")), ["0"]);
    assert_eq!(f.state().await, before);
}

fn close(call: &mut Call) {
    call.arg(5000);
}

#[tokio::test]
async fn close_leaves_a_shard_in_which_anything_is() {
    for (command, key, args) in [
        ("HSET", "R", &[&b"a"[..], b"1"][..]),
        ("HSET", "B", &[b"a", b"body"]),
        ("ZADD", "L", &[b"5", b"a"]),
        ("ZADD", "D", &[b"5", b"a"]),
        ("RPUSH", "F", &[b"a"]),
        ("XADD", "S", &[b"*", b"c", b"report"]),
    ] {
        let f = Fixture::new().await;
        f.seed("HSET", "M", &[b"n", b"3", b"idle", format!("{} 3 ", NOW - 5000).as_bytes()]).await;
        f.seed(command, key, args).await;
        let before = f.state().await;
        assert_eq!(flat(f.run(&scripts::CLOSE, close).await.expect("close")), ["-2", "0"], "{key}");
        assert_eq!(f.state().await, before);
    }
}

#[tokio::test]
async fn close_waits_until_nothing_has_happened_for_long_and_removes_all_keys() {
    let f = Fixture::new().await;
    f.seed("SET", "O", &[b"topic/4-0"]).await;
    f.seed("HSET", "M", &[b"n", b"3", b"open", b"0"]).await;
    // Spent elements that were not swept hold nothing up; a stream may be there and empty.
    f.seed("LPUSH", "m:T", &[&element(1, 0, 'a')]).await;
    f.seed("SET", "m:C", &[b"9"]).await;
    f.seed("HSET", "m:P", &[b"w", b"9"]).await;
    f.seed("XADD", "S", &[b"1-1", b"c", b"report"]).await;
    f.seed("XDEL", "S", &[b"1-1"]).await;
    let before = f.state().await;
    let run = async || flat(f.run(&scripts::CLOSE, close).await.expect("close"));
    let idle = |since: i64, mark: &str| format!("idle={since} {mark}");
    assert_eq!(run().await, ["5000", "0"]);
    changed(&before, &f.state().await, &[("M", &[&idle(NOW, "3 topic/4-0"), "n=3", "open=0"])]);

    // Something happened since, or the clock stepped back: the time begins anew.
    for seen in ["2 topic/4-0", "3 topic/3-0", "3 topic/4-0"] {
        let at = if seen == "3 topic/4-0" { NOW + 1 } else { NOW - 6000 };
        f.seed("HSET", "M", &[b"idle", format!("{at} {seen}").as_bytes()]).await;
        assert_eq!(run().await, ["5000", "0"], "{seen}");
        changed(&before, &f.state().await, &[("M", &[&idle(NOW, "3 topic/4-0"), "n=3", "open=0"])]);
    }
    f.seed("HSET", "M", &[b"idle", format!("{} 3 topic/4-0", NOW - 4000).as_bytes()]).await;
    let waits = f.state().await;
    assert_eq!(run().await, ["1000", "0"]);
    assert_eq!(f.state().await, waits);

    f.seed("HSET", "M", &[b"idle", format!("{} 3 topic/4-0", NOW - 5000).as_bytes()]).await;
    assert_eq!(run().await, ["-1", "7"]);
    assert_eq!(f.state().await, State::new());
}

fn enqueue(call: &mut Call, predecessor: &str, upto: &str, high_tasks: u64, tasks: &[(&str, char, u64, i64)]) {
    enqueue_as(call, 0, predecessor, upto, high_tasks, tasks);
}

fn enqueue_as(call: &mut Call, epoch: u64, after: &str, upto: &str, high_tasks: u64, tasks: &[(&str, char, u64, i64)]) {
    call.arg("t:wake").arg("q").arg("topic").arg(after).arg(upto).arg(high_tasks).arg(1 << 20).arg(epoch);
    for (offset, letter, num, not_before) in tasks {
        call.arg(*offset).arg(id(*letter)).arg(*num).arg(*not_before).arg(body(2)).arg("");
    }
}

#[tokio::test]
async fn enqueue_puts_what_is_new_and_stores_the_offset() {
    let f = Fixture::new().await;
    f.seed("SET", "O", &[b"topic/4-0"]).await;
    f.seed("HSET", "R", &[&id('f'), b"f5:1:w"]).await;
    let before = f.state().await;
    let tasks =
        [("4-0", 'x', 1, 0), ("5-0", 'a', 1, 0), ("6-0", 'f', 1, 0), ("7-0", 'b', 3, 0), ("8-0", 'd', 2, NOW + 5)];
    let answer = f.run(&scripts::ENQUEUE, |call| enqueue(call, "4-0", "9-0", 100, &tasks)).await.expect("enqueue");
    assert_eq!(flat(answer), ["ok", "5", "3", "2"]);
    let delayed = r#"("L", 2, 0, 2, [], [], 0)"#;
    changed(
        &before,
        &f.state().await,
        &[
            ("O", &["topic/9-0"]),
            ("R", &["a=1", "b=3", &format!("d={delayed}"), "f=f5:1:w"]),
            ("B", &["a=body2", "b=body2", "d=body2"]),
            ("m:T", &["3/0/b", "1/0/a"]),
            ("D", &[&format!("d={}", NOW + 5)]),
            ("M", &["big=13", "bytes=39", "live=3", "open=2"]),
        ],
    );
}

#[tokio::test]
async fn enqueue_refuses_when_redis_fell_back_behind_the_predecessor() {
    let f = Fixture::new().await;
    f.seed("SET", "O", &[b"topic/4-0"]).await;
    let before = f.state().await;
    let tasks = [("6-0", 'a', 1, 0)];
    let answer = f.run(&scripts::ENQUEUE, |call| enqueue(call, "5-0", "6-0", 100, &tasks)).await.expect("enqueue");
    assert_eq!(flat(answer), ["behind", "4-0"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn enqueue_refuses_who_comes_with_the_epoch_of_an_owner_before() {
    let f = Fixture::new().await;
    f.seed("SET", "O", &[b"topic/4-0"]).await;
    f.seed("HSET", "M", &[b"epoch", b"7"]).await;
    let before = f.state().await;
    let tasks = [("5-0", 'a', 1, 0)];
    let run = async |epoch| {
        f.run(&scripts::ENQUEUE, |call| enqueue_as(call, epoch, "", "5-0", 100, &tasks)).await.expect("enqueue")
    };
    assert_eq!(flat(run(6).await), ["fenced", "7"]);
    assert_eq!(f.state().await, before);

    assert_eq!(flat(run(8).await), ["ok", "1", "1", "0"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("O", &["topic/5-0"]),
            ("R", &["a=1"]),
            ("B", &["a=body2"]),
            ("m:T", &["1/0/a"]),
            ("M", &["big=13", "bytes=13", "epoch=8", "live=1", "open=1"]),
        ],
    );
}

#[tokio::test]
async fn enqueue_stops_at_the_high_water_and_stores_how_far_it_came() {
    let f = Fixture::new().await;
    let before = f.state().await;
    let tasks = [("1-0", 'a', 1, 0), ("2-0", 'b', 1, 0)];
    let answer = f.run(&scripts::ENQUEUE, |call| enqueue(call, "", "2-0", 1, &tasks)).await.expect("enqueue");
    assert_eq!(flat(answer), ["ok", "1", "1", "0"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("O", &["topic/1-0"]),
            ("R", &["a=1"]),
            ("B", &["a=body2"]),
            ("m:T", &["1/0/a"]),
            ("M", &["big=13", "bytes=13", "live=1", "open=1"]),
        ],
    );
}

#[tokio::test]
async fn enqueue_refuses_a_batch_with_a_task_of_no_priority() {
    let f = Fixture::new().await;
    let before = f.state().await;
    for (priority, not_before) in [(0, 0), (0, NOW + 5), (4, NOW + 5)] {
        let enqueue = |call: &mut Call| {
            enqueue(call, "", "2-0", 100, &[("1-0", 'a', 1, 0)]);
            call.arg("2-0").arg(id('b')).arg(1).arg(not_before).arg(body(priority)).arg("");
        };
        let error = f.run(&scripts::ENQUEUE, enqueue).await.expect_err("no lane");
        assert!(error.contains("BADTASK"), "{error}");
        assert_eq!(f.state().await, before);
    }
}

#[tokio::test]
async fn promote_takes_a_body_of_no_priority_for_medium() {
    let f = Fixture::new().await;
    for (letter, priority, member) in [('a', 0, id('a')), ('b', 9, lease('b', 1))] {
        // ["L", 1, 0, 1, [], [], 0]: one replica in the zset of delays.
        let record = [0x97, 0xa1, b'L', 1, 0, 1, 0x90, 0x90, 0];
        f.seed("HSET", "R", &[&id(letter), &record]).await;
        f.seed("HSET", "B", &[&id(letter), &body(priority)]).await;
        f.seed("ZADD", "D", &[NOW.to_string().as_bytes(), &member]).await;
    }
    let before = f.state().await;
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(10);
    };
    assert_eq!(flat(f.run(&scripts::PROMOTE, promote).await.expect("promote")), ["2", "0", "-1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("R", &["a=1", "b=1"]),
            ("D", &[]),
            ("m:T", &["1/0/a"]),
            ("mr:T", &["1/0/b"]),
            ("M", &["bytes=13", "open=2"]),
        ],
    );
}

fn claim(call: &mut Call, requests: &[(&str, u64)]) {
    call.arg(100).arg(10);
    for (worker, most) in requests {
        call.arg(*worker).arg(*most).arg(1 << 20).arg(0);
    }
}

#[tokio::test]
async fn claim_takes_the_oldest_and_what_is_spent_leaves_the_tail() {
    let f = Fixture::new().await;
    for letter in ['a', 'b', 'c'] {
        f.waiting(letter, 1, b"1").await;
    }
    let before = f.state().await;
    let answer = f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1), ("v", 1)])).await.expect("claim");
    let until = (NOW + 30_000).to_string();
    assert_eq!(flat(answer), ["7", "0", "1", "0", "a", "body2", "1", &until, "2", "0", "b", "body2", "1", &until]);
    changed(
        &before,
        &f.state().await,
        &[
            ("R", &["a=h1:w", "b=h2:v", "c=1"]),
            ("L", &[&format!("a1={until}"), &format!("b2={until}")]),
            ("m:T", &["1/0/c"]),
            ("m:C", &["2"]),
            ("M", &["bytes=13", "live=3", "n=2", "open=1"]),
        ],
    );
}

#[tokio::test]
async fn claim_passes_what_the_worker_holds_and_keeps_its_pointer() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    f.waiting('b', 2, b"2").await;
    let first = f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)])).await.expect("claim");
    assert_eq!(flat(first)[4], "a");
    let before = f.state().await;
    assert_eq!(before["m:P"], ["w=1"]);
    // From the beginning, as if the pointer had been dropped: its record refuses what w holds.
    f.seed("DEL", "m:P", &[]).await;
    let again = f.run(&scripts::CLAIM, |call| claim(call, &[("w", 2)])).await.expect("claim");
    assert_eq!(flat(again)[4..], ["b", "body2", "1", &(NOW + 30_000).to_string()]);
    let until = (NOW + 30_000).to_string();
    changed(
        &before,
        &f.state().await,
        &[
            ("R", &[r#"a=("L", 2, 0, 0, [], ["w", "1"], 0)"#, r#"b=("L", 2, 0, 0, [], ["w", "2"], 0)"#]),
            ("L", &[&format!("a1={until}"), &format!("b2={until}")]),
            ("m:P", &["w=2"]),
            ("M", &["bytes=26", "f4=2", "live=2", "n=2", "open=2"]),
        ],
    );
}

#[tokio::test]
async fn claim_pauses_while_the_outbox_is_full() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    for _ in 0..10 {
        f.seed("XADD", "S", &[b"*", b"c", b"report"]).await;
    }
    let before = f.state().await;
    let answer = f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)])).await.expect("claim");
    assert_eq!(flat(answer), ["7", "1"]);
    assert_eq!(f.state().await, before);
}

fn complete(call: &mut Call, items: &[(char, &str, u64, &str)]) {
    for (letter, life, grant, worker) in items {
        call.arg(id(*letter)).arg(*life).arg(*grant).arg(*worker).arg("report");
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
    let answer = f.run(&scripts::COMPLETE, |call| complete(call, &items)).await.expect("complete");
    assert_eq!(flat(answer), ["1", "2", "4", "3", "3", "5"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("R", &[&format!("a=f{NOW}:1:w"), "b=h2:w"]),
            ("B", &["b=body2"]),
            ("L", &[&format!("b2={NOW}")]),
            ("F", &["a"]),
            ("S", &["c=report"]),
            ("M", &["live=1"]),
        ],
    );
}

#[tokio::test]
async fn complete_credits_distinct_workers_until_there_are_num() {
    let f = Fixture::new().await;
    f.waiting('a', 2, b"2").await;
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1), ("v", 1)])).await.expect("claim");
    let items = [('a', "7", 1, "w"), ('a', "7", 1, "w"), ('a', "7", 2, "v")];
    let before = f.state().await;
    let answer = f.run(&scripts::COMPLETE, |call| complete(call, &items)).await.expect("complete");
    assert_eq!(flat(answer), ["1", "2", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("R", &[&format!(r#"a=("F", 2, 0, 0, ["w", "1", "v", "2"], [], {NOW})"#)]),
            ("B", &[]),
            ("L", &[]),
            ("F", &["a"]),
            ("S", &["c=report c=report"]),
            ("M", &["bytes=0", "live=0", "n=2", "open=0"]),
        ],
    );
}

fn reject(call: &mut Call, letter: char, grant: u64, worker: &str, mode: &str, delay: &str) {
    // msgpack [1000]
    call.arg(1).arg("t:wake").arg("q").arg(&b"\x91\xcd\x03\xe8"[..]);
    call.arg(id(letter)).arg("7").arg(grant).arg(worker).arg(mode).arg(delay).arg("no reason");
}

#[tokio::test]
async fn reject_waits_then_promote_offers_a_new_element_in_the_retry_lane() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let answer = f.run(&scripts::REJECT, |call| reject(call, 'a', 1, "w", "retry", "50")).await.expect("reject");
    assert_eq!(flat(answer), ["1", "0"]);
    let waiting = f.state().await;
    changed(
        &before,
        &waiting,
        &[("R", &[r#"a=("L", 1, 1, 1, [], [], 0)"#]), ("L", &[]), ("D", &[&format!("a1={}", NOW + 50)])],
    );
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(10);
    };
    let early = f.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(flat(early), ["0", "0", &(NOW + 50).to_string()]);
    assert_eq!(f.state().await, waiting, "nothing before its time");
    f.seed("ZADD", "D", &[NOW.to_string().as_bytes(), &lease('a', 1)]).await;
    let due = f.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(flat(due), ["1", "0", "-1"]);
    changed(
        &waiting,
        &f.state().await,
        &[
            ("R", &[r#"a=("L", 1, 1, 0, [], [], 0)"#]),
            ("D", &[]),
            ("mr:T", &["1/0/a"]),
            ("M", &["bytes=13", "live=1", "open=1"]),
        ],
    );
}

#[tokio::test]
async fn reject_for_good_kills_a_task_of_one_and_not_of_two() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let answer = f.run(&scripts::REJECT, |call| reject(call, 'a', 1, "w", "never", "")).await.expect("reject");
    assert_eq!(flat(answer), ["1", "1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("R", &[&format!(r#"a=("D", 1, 2, 0, [], [], {NOW})"#)]),
            ("B", &[]),
            ("L", &[]),
            ("F", &["a"]),
            ("S", &["d=a a=2 r=no reason w=w"]),
            ("M", &["live=0"]),
        ],
    );

    f.waiting('b', 2, b"2").await;
    f.run(&scripts::CLAIM, |call| claim(call, &[("w", 1)])).await.expect("claim");
    let answer = f.run(&scripts::REJECT, |call| reject(call, 'b', 1, "w", "never", "0")).await.expect("reject");
    assert_eq!(flat(answer), ["1", "0"], "one worker alone does not kill what two are asked to do");
}

#[tokio::test]
async fn release_costs_nothing_and_offers_at_once() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let before = f.state().await;
    let answer = f.run(&scripts::REJECT, |call| reject(call, 'a', 1, "w", "release", "")).await.expect("reject");
    assert_eq!(flat(answer), ["1", "0"]);
    changed(
        &before,
        &f.state().await,
        &[("R", &["a=1"]), ("L", &[]), ("mr:T", &["1/0/a"]), ("M", &["bytes=13", "live=1", "open=1"])],
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
    assert_eq!(flat(f.run(&scripts::EXTEND, extend("v")).await.expect("extend")), ["3", "0"]);
    assert_eq!(f.state().await, before);
    let until = (NOW + 5000).to_string();
    assert_eq!(flat(f.run(&scripts::EXTEND, extend("w")).await.expect("extend")), ["1", &until]);
    changed(&before, &f.state().await, &[("L", &[&format!("a1={until}")])]);
}

#[tokio::test]
async fn expire_counts_a_failure_and_at_the_last_one_the_task_is_dead() {
    let f = Fixture::new().await;
    f.held('a', "w", 1).await;
    let expire = |call: &mut Call| {
        call.arg(1).arg("t:wake").arg("q").arg(&b"\x91\x00"[..]).arg(10).arg(100);
    };
    let before = f.state().await;
    assert_eq!(flat(f.run(&scripts::EXPIRE, expire).await.expect("expire")), ["1", "0", "0", "-1"]);
    changed(
        &before,
        &f.state().await,
        &[
            ("R", &[r#"a=("L", 1, 1, 0, [], [], 0)"#]),
            ("L", &[]),
            ("mr:T", &["1/0/a"]),
            ("S", &["x=a w=w a=1 e=0"]),
            ("M", &["bytes=13", "live=1", "open=1"]),
        ],
    );
    f.run(&scripts::CLAIM, |call| claim(call, &[("v", 1)])).await.expect("claim");
    f.seed("ZADD", "L", &[NOW.to_string().as_bytes(), &lease('a', 1)]).await;
    assert_eq!(flat(f.run(&scripts::EXPIRE, expire).await.expect("expire")), ["1", "1", "0", "-1"]);
    let dead = f.state().await;
    assert_eq!(dead["R"], [format!(r#"a=("D", 1, 2, 0, [], [], {NOW})"#)]);
    assert_eq!(dead["S"], ["x=a w=w a=1 e=0", "d=a a=2 r=lease expired w=v", "x=a w=v a=2 e=1"]);
    assert_eq!((dead.get("B"), dead.get("L")), (None, None));
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
    assert_eq!(flat(moved), ["101"]);
    changed(&before, &f.state().await, &[("m:T", &["2/0/a"]), ("m:C", &["101"])]);
}

#[tokio::test]
async fn forget_drops_what_sql_has_and_keeps_the_rest_for_later() {
    let f = Fixture::new().await;
    for letter in ['a', 'b'] {
        f.seed("HSET", "R", &[&id(letter), b"f5:1:w"]).await;
        f.seed("RPUSH", "F", &[&id(letter)]).await;
    }
    let due = f
        .run(&scripts::FINALS, |call: &mut Call| {
            call.arg(60_000).arg(10);
        })
        .await
        .expect("finals");
    assert_eq!(flat(due), ["a", "b"]);
    let before = f.state().await;
    let forget = |call: &mut Call| {
        call.arg(id('a')).arg("0").arg(id('b')).arg("1");
    };
    assert_eq!(flat(f.run(&scripts::FORGET, forget).await.expect("forget")), ["1"]);
    changed(&before, &f.state().await, &[("R", &["a=f5:1:w"]), ("F", &["a"])]);
}

#[tokio::test]
async fn one_forwarder_at_a_time_has_the_outbox() {
    let f = Fixture::new().await;
    let read = async |forwarder: &str| {
        let outbox = |call: &mut Call| {
            call.arg(forwarder).arg(3_000).arg(10);
        };
        flat(f.run(&scripts::OUTBOX, outbox).await.expect("outbox"))
    };
    let before = f.state().await;
    assert!(read("one").await.is_empty());
    changed(&before, &f.state().await, &[]);

    f.seed("XADD", "S", &[b"1-1", b"c", b"report"]).await;
    assert_eq!(read("one").await, ["1-1", "c", "report"]);
    let taken = f.state().await;
    changed(&before, &taken, &[("S", &["c=report"]), ("M", &["forwarder=1003000 one"])]);
    assert!(read("other").await.is_empty());
    assert_eq!(read("one").await, ["1-1", "c", "report"], "it may read again what it has not removed");
    assert_eq!(f.state().await, taken);

    f.seed("HSET", "M", &[b"forwarder", b"1000000 one"]).await;
    assert_eq!(read("other").await, ["1-1", "c", "report"], "the time of the one is over");
    changed(&before, &f.state().await, &[("S", &["c=report"]), ("M", &["forwarder=1003000 other"])]);
}

#[tokio::test]
async fn forwarded_removes_the_entries_named() {
    let f = Fixture::new().await;
    f.seed("XADD", "S", &[b"1-1", b"c", b"one"]).await;
    f.seed("XADD", "S", &[b"2-1", b"c", b"two"]).await;
    f.seed("HSET", "M", &[b"forwarder", b"1000000 me"]).await;
    let before = f.state().await;
    let forwarded = async |forwarder: &str, entry: &str| {
        let forwarded = |call: &mut Call| {
            call.arg("t:wake").arg("q").arg(10).arg(forwarder).arg(entry);
        };
        flat(f.run(&scripts::FORWARDED, forwarded).await.expect("forwarded"))
    };
    assert_eq!(forwarded("me", "1-1").await, ["1"]);
    changed(&before, &f.state().await, &[("S", &["c=two"])]);
    // One that was too slow: the outbox is another's now.
    assert_eq!(forwarded("slow", "1-1").await, ["1"]);
    // A stream that is empty is still there.
    let mut empty = before.clone();
    empty.insert("S".to_owned(), vec![]);
    assert_eq!(forwarded("slow", "2-1").await, ["0"]);
    assert_eq!(f.state().await, empty);
    assert_eq!(forwarded("me", "2-1").await, ["0"]);
    empty.remove("M");
    assert_eq!(f.state().await, empty);
}
