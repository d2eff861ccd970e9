//! State tests of the scripts: seed every key, run one script once, compare *every* key of the
//! shard, and the answer. Each script has its tests in the file that its users have in `src/queue`.
//!
//! Ids are sixteen times one letter and shown as that letter; elements are shown as `NUM/offer/id`,
//! records of several workers as `m<NUM>/<held>/<credited> <worker>:h<grant> …` and
//! `e<NUM> at <ms> <worker>:c<grant> …`. Stream ids and the order of hashes are not compared. The
//! script's clock is `NOW`.

#[path = "lua_state/backoff.rs"]
mod backoff;
#[path = "lua_state/change.rs"]
mod change;
#[path = "lua_state/check.rs"]
mod check;
#[path = "lua_state/claim.rs"]
mod claim;
#[path = "lua_state/commands.rs"]
mod commands;
#[path = "lua_state/damage.rs"]
mod damage;
#[path = "lua_state/deadline.rs"]
mod deadline;
#[path = "lua_state/enqueue.rs"]
mod enqueue;
#[path = "lua_state/explain.rs"]
mod explain;
#[path = "lua_state/feed_take.rs"]
mod feed_take;
#[path = "lua_state/fresh.rs"]
mod fresh;
#[path = "lua_state/limits.rs"]
mod limits;
#[path = "lua_state/past_ends.rs"]
mod past_ends;
#[path = "lua_state/random.rs"]
mod random;
#[path = "lua_state/report.rs"]
mod report;
#[path = "lua_state/session.rs"]
mod session;
#[path = "lua_state/shared.rs"]
mod shared;
#[path = "lua_state/upkeep.rs"]
mod upkeep;

use std::collections::BTreeMap;

use redis::Value;
use taskd::{
    model::{QueueName, ShardId},
    queue::keys::ShardKeys,
    redis_pool::{Call, Redis, Script, scripts},
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

fn element(num: u8, offer: u8, letter: char) -> Vec<u8> {
    [vec![0x93, num, offer, 0xb0], id(letter)].concat()
}

/// Priority, max_attempts 2, lease 30 s, and some text.
fn body(priority: u8) -> Vec<u8> {
    [
        &[priority][..],
        &2_u32.to_be_bytes(),
        &30_000_u32.to_be_bytes(),
        b"text",
    ]
    .concat()
}

/// The weight of an open task with such a body.
const WEIGHT: u64 = 413;

impl Fixture {
    /// A shard that was opened and holds nothing.
    async fn new() -> Self {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.expect("connect");
        let keys = ShardKeys::new(
            "t",
            &ShardId {
                queue: QueueName::new("q").expect("a name"),
                number: 0,
            },
        );
        let fixture = Self {
            _server: server,
            redis,
            keys,
        };
        fixture.seed("SET", "generation", &[b"7"]).await;
        fixture
    }

    async fn seed(&self, command: &str, key: &str, args: &[&[u8]]) {
        let mut command = redis::cmd(command);
        command.arg(format!("t:{{q:0}}:{key}")).arg(args);
        let _: Value = command
            .query_async(&mut self.redis.conn())
            .await
            .expect("seed");
    }

    /// A live task that waits in the medium lane with this record.
    async fn waiting(&self, letter: char, num: u8, record: &[u8]) {
        self.seed("HSET", "records", &[&id(letter), record]).await;
        self.seed("HSET", "bodies", &[&id(letter), &body(2)]).await;
        self.seed("LPUSH", "m:T", &[&element(num, 0, letter)]).await;
        for (field, by) in [("open", 1), ("live", 1), ("open_bytes", WEIGHT)] {
            self.seed(
                "HINCRBY",
                "counters",
                &[field.as_bytes(), by.to_string().as_bytes()],
            )
            .await;
        }
    }

    /// A task of NUM = 1 that `worker` holds by `grant` until `NOW`, out of its lane.
    async fn held(&self, letter: char, worker: &str, grant: u64) {
        self.seed(
            "HSET",
            "records",
            &[&id(letter), format!("h{grant}:{worker}").as_bytes()],
        )
        .await;
        self.seed("HSET", "bodies", &[&id(letter), &body(2)]).await;
        self.seed(
            "ZADD",
            "leases",
            &[NOW.to_string().as_bytes(), &lease(letter, grant)],
        )
        .await;
        self.seed("HINCRBY", "counters", &[b"live", b"1"]).await;
    }

    async fn run(
        &self,
        script: &'static Script,
        args: impl FnOnce(&mut Call),
    ) -> Result<Value, String> {
        let mut call = self.keys.call(script, Some(NOW));
        args(&mut call);
        call.run(&mut self.redis.conn())
            .await
            .map_err(|error| error.to_string())
    }

    /// Every key of this Redis.
    async fn state(&self) -> State {
        let mut conn = self.redis.conn();
        let names: Vec<String> = redis::cmd("KEYS")
            .arg("*")
            .query_async(&mut conn)
            .await
            .expect("keys");
        let mut state = State::new();
        for name in names {
            let kind: String = redis::cmd("TYPE")
                .arg(&name)
                .query_async(&mut conn)
                .await
                .expect("type");
            let (command, args): (&str, &[&str]) = match kind.as_str() {
                "string" => ("GET", &[]),
                "hash" => ("HGETALL", &[]),
                "list" => ("LRANGE", &["0", "-1"]),
                "set" => ("SMEMBERS", &[]),
                "zset" => ("ZRANGE", &["0", "-1", "WITHSCORES"]),
                "stream" => ("XRANGE", &["-", "+"]),
                other => panic!("a key of type {other}"),
            };
            let value: Value = redis::cmd(command)
                .arg(&name)
                .arg(args)
                .query_async(&mut conn)
                .await
                .expect("read");
            let mut shown = Vec::new();
            match kind.as_str() {
                "stream" => entries(value)
                    .into_iter()
                    .for_each(|fields| shown.push(pairs(&fields).join(" "))),
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
    let Value::Array(entries) = value else {
        panic!("{value:?}")
    };
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
    let letters =
        |at: usize| bytes.len() >= at + 16 && bytes[at..at + 16].iter().all(|b| *b == bytes[at]);
    if bytes.len() == 20 && bytes[0] == 0x93 && letters(4) {
        return format!("{}/{}/{}", bytes[1], bytes[2], bytes[4] as char);
    }
    if letters(0) && bytes[0].is_ascii_lowercase() {
        return format!("{}{}", bytes[0] as char, shown(&bytes[16..]));
    }
    if bytes.len() == 13 && bytes.ends_with(b"text") {
        return format!("body{}", bytes[0]);
    }
    if bytes.starts_with(b"\x1a") {
        let (reports, _) = taskd::wire::framed_reports(bytes.to_vec().into()).expect("frames");
        let reports: Vec<_> = reports
            .iter()
            .map(|report| String::from_utf8_lossy(report))
            .collect();
        return reports.join(",");
    }
    if matches!(bytes.first(), Some(b'm' | b'e')) && bytes.ends_with(b"\n") {
        let is_live = bytes[0] == b'm';
        let (numbers, entries) = bytes[1..].split_at(if is_live { 3 } else { 1 });
        let entries = String::from_utf8_lossy(entries)
            .trim_end()
            .replace('\n', " ")
            .replace('\t', ":");
        let numbers: Vec<_> = numbers.iter().map(u8::to_string).collect();
        return format!(
            "{}{}{}{entries}",
            bytes[0] as char,
            numbers.join("/"),
            if is_live { "" } else { " at " }
        );
    }
    // Records are arrays of seven to thirteen values, histories of three a failure.
    if matches!(bytes.first(), Some(0x93..=0x9d | 0xdc))
        && let Ok(value) = rmp_serde::from_slice::<serde_json::Value>(bytes)
    {
        return value.to_string();
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
            let mut values: Vec<_> = values.iter().map(|value| (*value).to_owned()).collect();
            if *key == "counters" {
                values.sort();
            }
            want.insert((*key).to_owned(), values);
        }
    }
    assert_eq!(
        after, &want,
        "after the script (left) and as it should be (right)"
    );
}

#[tokio::test]
async fn without_a_generation_every_script_is_refused() {
    let f = Fixture::new().await;
    f.seed("DEL", "generation", &[]).await;
    let before = f.state().await;
    for script in scripts::ALL
        .iter()
        .filter(|script| script.of_shard().is_some() && script.name != "open")
    {
        let error = f.run(script, |_| {}).await.expect_err(script.name);
        assert!(error.contains("NOGEN"), "{}: {error}", script.name);
    }
    assert_eq!(f.state().await, before);
}
