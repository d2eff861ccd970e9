//! State tests of the scripts of the bus, `lease.lua` and `name.lua`: seed every key, run one
//! script once, compare *every* key, and the answer.
//!
//! These scripts ask Redis for the time, unless a test names it. A deadline is shown as `past`,
//! `soon` (within the [`LIVES`] from now that a reader may have) or `far`, and a key's time to live
//! in the same way.

use std::collections::BTreeMap;

use redis::{FromRedisValue, Value};
use taskd::redis_pool::{Redis, Script, scripts};

use crate::support::redis::{Fsync, RedisServer};

const LIVES: i64 = 60_000;
const HOUR: i64 = 3_600_000;

struct Fixture {
    _server: RedisServer,
    redis: Redis,
}

type State = BTreeMap<String, Vec<String>>;

impl Fixture {
    async fn new() -> Self {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.expect("connect");
        Self {
            _server: server,
            redis,
        }
    }

    async fn ask<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let answer = redis::cmd(words[0])
            .arg(&words[1..])
            .query_async(&mut self.redis.conn())
            .await;
        answer.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    async fn seed(&self, command: &str) {
        let _: Value = self.ask(&command.split(' ').collect::<Vec<_>>()).await;
    }

    /// A reader with a deadline so many milliseconds from now.
    async fn reader(&self, name: &str, from_now: i64) {
        let score = (self.now().await + from_now).to_string();
        let _: Value = self.ask(&["ZADD", "readers", &score, name]).await;
    }

    async fn now(&self) -> i64 {
        let (secs, micros): (i64, i64) = self.ask(&["TIME"]).await;
        secs * 1000 + micros / 1000
    }

    /// The answer, as words in brackets.
    async fn run(&self, script: &'static Script, keys: &[&str], args: &[&str]) -> String {
        let mut call = script.call(keys);
        call.arg(args);
        match call.run(&mut self.redis.conn()).await {
            Ok(value) => shown(&value),
            Err(error) => error.to_string(),
        }
    }

    /// Every key of this Redis. Keys that expire have `expires …` in front.
    async fn state(&self) -> State {
        let (mut state, now) = (State::new(), self.now().await);
        let mut names: Vec<String> = self.ask(&["KEYS", "*"]).await;
        names.sort();
        for name in names {
            let kind: String = self.ask(&["TYPE", &name]).await;
            let mut lines = Vec::new();
            let ttl: i64 = self.ask(&["PTTL", &name]).await;
            if ttl >= 0 {
                lines.push(format!("expires {}", when(ttl)));
            }
            match kind.as_str() {
                "string" => lines.push(self.ask(&["GET", &name]).await),
                "hash" => {
                    let fields: BTreeMap<String, String> = self.ask(&["HGETALL", &name]).await;
                    lines.extend(
                        fields
                            .into_iter()
                            .map(|(field, value)| format!("{field}={value}")),
                    );
                }
                "zset" => {
                    let members: Vec<(String, f64)> =
                        self.ask(&["ZRANGE", &name, "0", "-1", "WITHSCORES"]).await;
                    let mut readers: Vec<_> = members
                        .into_iter()
                        .map(|(reader, at)| format!("{reader} {}", when(at as i64 - now)))
                        .collect();
                    readers.sort();
                    lines.extend(readers);
                }
                "stream" => lines.extend(self.stream(&name).await),
                other => panic!("a key of type {other}"),
            }
            state.insert(name, lines);
        }
        state
    }

    /// Its entries, then the consumers of its group with what they hold.
    async fn stream(&self, name: &str) -> Vec<String> {
        let entries: Value = self.ask(&["XRANGE", name, "-", "+"]).await;
        let Value::Array(entries) = entries else {
            panic!("{entries:?}")
        };
        let mut lines: Vec<_> = entries.iter().map(shown).collect();
        let groups: Vec<Value> = self.ask(&["XINFO", "GROUPS", name]).await;
        if !groups.is_empty() {
            let consumers: Vec<Value> = self.ask(&["XINFO", "CONSUMERS", name, "g"]).await;
            for consumer in consumers {
                let Value::Array(fields) = consumer else {
                    panic!("{consumer:?}")
                };
                let consumer = shown(&fields[1]);
                let held: Vec<Vec<Value>> = self
                    .ask(&["XPENDING", name, "g", "-", "+", "100", &consumer])
                    .await;
                let ids: Vec<_> = held.iter().map(|one| shown(&one[0])).collect();
                lines.push(format!("{consumer} holds [{}]", ids.join(" ")));
            }
        }
        lines
    }
}

fn when(from_now: i64) -> &'static str {
    match from_now {
        ..=0 => "past",
        1..=LIVES => "soon",
        _ => "far",
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Nil => "-".into(),
        Value::Int(number) => number.to_string(),
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::Okay => "OK".into(),
        Value::Array(items) => format!(
            "[{}]",
            items.iter().map(shown).collect::<Vec<_>>().join(" ")
        ),
        other => panic!("{other:?}"),
    }
}

fn state(lines: &[(&str, &[&str])]) -> State {
    let line = |(key, lines): &(&str, &[&str])| {
        (
            key.to_string(),
            lines.iter().map(ToString::to_string).collect(),
        )
    };
    lines.iter().map(line).collect()
}

// --- bus_begin.lua

#[tokio::test]
async fn what_all_agree_on_is_written_once() {
    let f = Fixture::new().await;
    let keys = ["generation", "partitions"];
    assert_eq!(
        f.run(
            &scripts::BUS_BEGIN,
            &keys,
            &["one", "pipeline", "3", "expirations", "1"]
        )
        .await,
        "[one 3 1]"
    );
    let after = state(&[
        ("generation", &["one"]),
        ("partitions", &["expirations=1", "pipeline=3"]),
    ]);
    assert_eq!(f.state().await, after);
    // Another process, configured in another way.
    assert_eq!(
        f.run(
            &scripts::BUS_BEGIN,
            &keys,
            &["two", "pipeline", "9", "expirations", "1"]
        )
        .await,
        "[one 3 1]"
    );
    assert_eq!(f.state().await, after);
}

// --- bus_commit.lua

#[tokio::test]
async fn a_commit_moves_forward_and_drops_what_it_passes() {
    let f = Fixture::new().await;
    for id in ["5-0", "5-1", "5-18446744073709551615", "6-0"] {
        f.seed(&format!("XADD s {id} v x")).await;
    }
    let keys = ["s", "committed"];
    assert_eq!(f.run(&scripts::BUS_COMMIT, &keys, &["5", "1"]).await, "1");
    let last = "[5-18446744073709551615 [v x]]";
    let after = state(&[("committed", &["5-1"]), ("s", &[last, "[6-0 [v x]]"])]);
    assert_eq!(f.state().await, after);
    for late in [["5", "1"], ["5", "0"], ["4", "9"]] {
        assert_eq!(
            f.run(&scripts::BUS_COMMIT, &keys, &late).await,
            "0",
            "{late:?}"
        );
        assert_eq!(f.state().await, after);
    }
    // Ids are numbers, not text.
    assert_eq!(f.run(&scripts::BUS_COMMIT, &keys, &["10", "0"]).await, "1");
    assert_eq!(
        f.state().await,
        state(&[("committed", &["10-0"]), ("s", &[])])
    );
    assert_eq!(f.run(&scripts::BUS_COMMIT, &keys, &["9", "0"]).await, "0");
}

// --- bus_extent.lua

#[tokio::test]
async fn an_extent_is_told_and_changes_nothing() {
    let f = Fixture::new().await;
    let keys = ["s", "committed"];
    assert_eq!(
        f.run(&scripts::BUS_EXTENT, &keys, &[]).await,
        "[0-0 - 0-0 - 0]"
    );
    assert_eq!(f.state().await, State::new(), "asking creates nothing");
    for id in ["1-0", "2-0", "3-0"] {
        f.seed(&format!("XADD s {id} v x")).await;
    }
    assert_eq!(
        f.run(&scripts::BUS_EXTENT, &keys, &[]).await,
        "[3-0 1-0 0-0 - 3]"
    );
    f.seed("XDEL s 1-0").await;
    f.seed("SET committed 1-0").await;
    let before = f.state().await;
    assert_eq!(
        f.run(&scripts::BUS_EXTENT, &keys, &[]).await,
        "[3-0 2-0 1-0 1-0 3]"
    );
    f.seed("XTRIM s MAXLEN 0").await;
    assert_eq!(
        f.run(&scripts::BUS_EXTENT, &keys, &[]).await,
        "[3-0 - 1-0 1-0 3]"
    );
    assert_eq!(before.keys().collect::<Vec<_>>(), ["committed", "s"]);
}

// --- bus_group.lua

#[tokio::test]
async fn the_group_is_created_where_it_is_missing() {
    let f = Fixture::new().await;
    f.seed("XADD a 1-0 v x").await;
    f.seed("XGROUP CREATE a g 1-0").await;
    f.seed("XADD b 1-0 v y").await;
    assert_eq!(
        f.run(&scripts::BUS_GROUP, &["a", "b", "c"], &["g"]).await,
        "OK"
    );
    let after = state(&[("a", &["[1-0 [v x]]"]), ("b", &["[1-0 [v y]]"]), ("c", &[])]);
    assert_eq!(f.state().await, after);
    let next = async |stream: &str| -> Value {
        f.ask(&[
            "XREADGROUP",
            "GROUP",
            "g",
            "c",
            "COUNT",
            "9",
            "STREAMS",
            stream,
            ">",
        ])
        .await
    };
    assert_eq!(next("a").await, Value::Nil, "it keeps its place");
    assert_eq!(
        shown(&next("b").await),
        "[[b [[1-0 [v y]]]]]",
        "it begins with the first entry"
    );
    f.seed("SET string x").await;
    assert!(
        f.run(&scripts::BUS_GROUP, &["string"], &["g"])
            .await
            .contains("WRONGTYPE")
    );
}

// --- bus_own.lua

const OWN: [&str; 2] = ["readers", "owners"];

async fn own(f: &Fixture, reader: &str, partitions: &str) -> String {
    f.run(
        &scripts::BUS_OWN,
        &OWN,
        &["", reader, &LIVES.to_string(), partitions],
    )
    .await
}

#[tokio::test]
async fn readers_share_the_partitions() {
    let f = Fixture::new().await;
    assert_eq!(own(&f, "a", "3").await, "[0 1 1 2 2 3]");
    let alone = [
        ("readers", &["a soon"][..]),
        ("owners", &["0=1 a", "1=2 a", "2=3 a", "n=3"]),
    ];
    assert_eq!(f.state().await, state(&alone));
    assert_eq!(
        own(&f, "b", "3").await,
        "[]",
        "nothing is taken away from a reader that lives"
    );
    assert_eq!(
        own(&f, "a", "3").await,
        "[0 1 1 2]",
        "it gives back what is more than its share"
    );
    let given = [
        ("readers", &["a soon", "b soon"][..]),
        ("owners", &["0=1 a", "1=2 a", "n=3"]),
    ];
    assert_eq!(f.state().await, state(&given));
    assert_eq!(own(&f, "b", "3").await, "[2 4]");
    assert_eq!(
        f.run(&scripts::BUS_OWN, &OWN, &["", "a", "0", "3"]).await,
        "[]",
        "it leaves"
    );
    let left = [("readers", &["b soon"][..]), ("owners", &["2=4 b", "n=4"])];
    assert_eq!(f.state().await, state(&left));
}

#[tokio::test]
async fn a_dead_readers_partitions_are_taken() {
    let f = Fixture::new().await;
    f.reader("dead", -1).await;
    f.seed("HSET owners 0 1_dead n 1").await;
    let _: Value = f.ask(&["HSET", "owners", "0", "1 dead"]).await;
    assert_eq!(own(&f, "alive", "1").await, "[0 2]");
    assert_eq!(
        f.state().await,
        state(&[
            ("readers", &["alive soon"]),
            ("owners", &["0=2 alive", "n=2"])
        ])
    );
}

/// The clock was set back by an hour: a deadline of before counts as one of now, and passes when
/// others do.
#[tokio::test]
async fn a_reader_does_not_live_longer_than_anybody_writes() {
    let f = Fixture::new().await;
    f.reader("dead", HOUR).await;
    let _: Value = f.ask(&["HSET", "owners", "0", "1 dead", "n", "1"]).await;
    assert_eq!(own(&f, "alive", "1").await, "[]");
    let after = state(&[
        ("readers", &["alive soon", "dead soon"]),
        ("owners", &["0=1 dead", "n=1"]),
    ]);
    assert_eq!(f.state().await, after);
}

// --- bus_take_over.lua

const TAKE: [&str; 2] = ["s", "readers"];

/// Three entries, two of which `holder` holds.
async fn held_by(holder: &str) -> Fixture {
    let f = Fixture::new().await;
    for id in ["1-0", "2-0", "3-0"] {
        f.seed(&format!("XADD s {id} v x")).await;
    }
    f.seed("XGROUP CREATE s g 0").await;
    f.seed(&format!("XREADGROUP GROUP g {holder} COUNT 2 STREAMS s >"))
        .await;
    f
}

async fn take_over(f: &Fixture, most: &str) -> String {
    f.run(
        &scripts::BUS_TAKE_OVER,
        &TAKE,
        &["", "g", "me", &LIVES.to_string(), most],
    )
    .await
}

const ENTRIES: [&str; 3] = ["[1-0 [v x]]", "[2-0 [v x]]", "[3-0 [v x]]"];

#[tokio::test]
async fn what_a_dead_reader_holds_is_taken_over() {
    let f = held_by("dead").await;
    f.reader("dead", -1).await;
    assert_eq!(
        take_over(&f, "1").await,
        "[1 [[1-0 [v x]]]]",
        "there is more"
    );
    let [a, b, c] = ENTRIES;
    let half = state(&[
        ("readers", &["me soon"]),
        ("s", &[a, b, c, "dead holds [2-0]", "me holds [1-0]"]),
    ]);
    assert_eq!(f.state().await, half);
    assert_eq!(take_over(&f, "9").await, "[0 [[2-0 [v x]]]]");
    // One that holds nothing any more is forgotten.
    let all = state(&[
        ("readers", &["me soon"]),
        ("s", &[a, b, c, "me holds [1-0 2-0]"]),
    ]);
    assert_eq!(f.state().await, all);
    assert_eq!(take_over(&f, "9").await, "[0 []]");
    assert_eq!(f.state().await, all);
}

#[tokio::test]
async fn a_deleted_entry_of_a_dead_reader_is_nobodys() {
    let f = held_by("dead").await;
    f.seed("XDEL s 1-0").await;
    assert_eq!(take_over(&f, "9").await, "[0 [[2-0 [v x]]]]");
    let [_, b, c] = ENTRIES;
    assert_eq!(
        f.state().await,
        state(&[("readers", &["me soon"]), ("s", &[b, c, "me holds [2-0]"])])
    );
}

#[tokio::test]
async fn a_living_reader_keeps_what_it_holds() {
    let f = held_by("slow").await;
    f.seed("XGROUP CREATECONSUMER s g idle").await;
    f.reader("slow", LIVES / 2).await;
    assert_eq!(take_over(&f, "9").await, "[0 []]");
    let [a, b, c] = ENTRIES;
    let after = state(&[
        ("readers", &["me soon", "slow soon"]),
        ("s", &[a, b, c, "slow holds [1-0 2-0]"]),
    ]);
    assert_eq!(
        f.state().await,
        after,
        "only the one that holds nothing and does not live is gone"
    );
}

/// The clock was set back: what had a deadline in the future has one of now.
#[tokio::test]
async fn a_shared_reader_does_not_live_longer_than_anybody_writes() {
    let f = held_by("dead").await;
    f.reader("dead", HOUR).await;
    assert_eq!(take_over(&f, "9").await, "[0 []]");
    assert_eq!(f.state().await["readers"], ["dead soon", "me soon"]);
}

// --- bus_publish.lua

/// `above` a bound of ten bytes and three records.
async fn publish(f: &Fixture, above: &str, records: &[&str]) -> String {
    let mut args = vec!["10", "3", above];
    if above == "trim" {
        args.push("0");
        for record in records {
            args.extend([record, "", "", ""]);
        }
    } else {
        args.extend(records);
    }
    f.run(&scripts::BUS_PUBLISH, &["s"], &args).await
}

/// The entries without their ids.
async fn values(f: &Fixture) -> Vec<String> {
    let lines = f.state().await.remove("s").unwrap_or_default();
    lines
        .into_iter()
        .map(|line| {
            line.split_once(' ')
                .expect("an id and its fields")
                .1
                .to_owned()
        })
        .collect()
}

#[tokio::test]
async fn what_is_above_the_bound_is_refused_as_a_whole() {
    let f = Fixture::new().await;
    let answer = publish(&f, "refuse", &["12345", "67"]).await;
    assert_eq!(answer.matches('-').count(), 2, "two ids: {answer}");
    let two = ["[v 12345 before 0 0]]", "[v 67 before 5 1]]"];
    assert_eq!(values(&f).await, two);
    let answer = publish(&f, "refuse", &["8", "901"]).await;
    assert!(
        answer.contains("FULL") && answer.contains("11 bytes are not read yet; at most 10"),
        "{answer}"
    );
    assert_eq!(values(&f).await, two);
    publish(&f, "refuse", &["890"]).await;
    assert_eq!(values(&f).await.len(), 3, "it has just room");
    // The number of records has no bound here.
    publish(&f, "refuse", &[""]).await;
    assert_eq!(values(&f).await.len(), 4);
}

#[tokio::test]
async fn room_comes_back_in_whichever_order_entries_leave() {
    let f = Fixture::new().await;
    publish(&f, "refuse", &["12345", "67890"]).await;
    assert!(publish(&f, "refuse", &["x"]).await.contains("FULL"));
    let ids: Vec<Vec<Value>> = f.ask(&["XRANGE", "s", "-", "+"]).await;
    // The second leaves, the first is held by somebody.
    let _: Value = f.ask(&["XDEL", "s", &shown(&ids[1][0])]).await;
    publish(&f, "refuse", &["abcde"]).await;
    assert_eq!(
        values(&f).await,
        ["[v 12345 before 0 0]]", "[v abcde before 5 1]]"]
    );
    f.seed("XTRIM s MAXLEN 0").await;
    publish(&f, "refuse", &["more than ten bytes"]).await;
    assert_eq!(
        values(&f).await,
        ["[v more than ten bytes before 0 0]]"],
        "an empty partition takes anything"
    );
}

#[tokio::test]
async fn the_oldest_go_by_bytes_and_by_number_and_the_newest_stays() {
    let f = Fixture::new().await;
    for record in ["1", "2", "3", "4"] {
        publish(&f, "trim", &[record]).await;
    }
    assert_eq!(
        values(&f).await,
        [
            "[v 2 before 1 1]]",
            "[v 3 before 2 2]]",
            "[v 4 before 3 3]]"
        ]
    );
    publish(&f, "trim", &["123456789"]).await;
    assert_eq!(
        values(&f).await,
        ["[v 4 before 3 3]]", "[v 123456789 before 4 4]]"]
    );
    publish(&f, "trim", &["more than ten bytes"]).await;
    assert_eq!(values(&f).await, ["[v more than ten bytes before 13 5]]"]);
    // Somebody has put in what has no note; it goes like the others.
    f.seed("XADD s * who knows").await;
    publish(&f, "trim", &["1", "2", "3", "4"]).await;
    assert_eq!(values(&f).await.len(), 3);
}

#[tokio::test]
async fn the_parts_of_a_record_are_fields_that_count_for_the_bound() {
    let f = Fixture::new().await;
    let args = ["10", "3", "trim", "0"];
    let records = ["v1", "k1", "a1", "i1", "v2", "", "", "i2"];
    f.run(
        &scripts::BUS_PUBLISH,
        &["s"],
        &[&args[..], &records].concat(),
    )
    .await;
    assert_eq!(
        values(&f).await,
        [
            "[v v1 before 0 0 k k1 a a1 i i1]]",
            "[v v2 before 8 1 i i2]]"
        ]
    );
    publish(&f, "trim", &["3"]).await;
    assert_eq!(
        values(&f).await,
        ["[v v2 before 8 1 i i2]]", "[v 3 before 12 2]]"]
    );
}

#[tokio::test]
async fn records_of_a_log_leave_by_age_in_the_same_step() {
    let f = Fixture::new().await;
    // Redis trims whole nodes, which have a hundred entries.
    for second in 1..=150 {
        f.seed(&format!("XADD s {second}-0 v x")).await;
    }
    let hour = HOUR.to_string();
    let args = ["1000", "0", "trim", &hour, "new", "", "", ""];
    f.run(&scripts::BUS_PUBLISH, &["s"], &args).await;
    let left = values(&f).await;
    assert!(left.len() <= 51, "{} are left", left.len());
    assert!(left.last().expect("one").starts_with("[v new before"));
}

// --- lease.lua

async fn lease(f: &Fixture, process: &str, ms: &str) -> String {
    f.run(&scripts::LEASE, &["lease"], &["", process, ms]).await
}

#[tokio::test]
async fn a_lease_is_taken_kept_and_given_back_by_its_holder() {
    let f = Fixture::new().await;
    assert_eq!(lease(&f, "a", "4000").await, "1");
    let held = state(&[("lease", &["expires soon", "a"])]);
    assert_eq!(f.state().await, held);
    for (process, ms) in [("b", "4000"), ("b", "0")] {
        assert_eq!(lease(&f, process, ms).await, "0");
        assert_eq!(f.state().await, held);
    }
    assert_eq!(lease(&f, "a", "4000").await, "1");
    assert_eq!(lease(&f, "a", "0").await, "0");
    assert_eq!(f.state().await, State::new());
}

/// The clock was set back by an hour, and the holder is dead.
#[tokio::test]
async fn a_lease_does_not_last_longer_than_anybody_asks_for() {
    let f = Fixture::new().await;
    f.seed(&format!("SET lease dead PX {HOUR}")).await;
    assert_eq!(lease(&f, "b", "4000").await, "0");
    assert_eq!(
        f.state().await,
        state(&[("lease", &["expires soon", "dead"])])
    );
}

// --- name.lua

#[tokio::test]
async fn the_first_name_stays() {
    let f = Fixture::new().await;
    for name in ["one", "two"] {
        assert_eq!(f.run(&scripts::NAME, &["redis-name"], &[name]).await, "one");
        assert_eq!(f.state().await, state(&[("redis-name", &["one"])]));
    }
}
