//! Limits per key: gate, release, enter, start, pass and end (`lua/lib/limits.lua`), in each script
//! that has a part in them.

use std::{collections::BTreeMap, ops::Range};

use redis::Value;
use taskd::{
    model::LimitHold,
    redis_pool::{Call, Script, scripts},
};

use super::{Fixture, NOW, flat, id, report::complete_all};

/// The limits of a queue: at a time, ms between two starts, burst, jitter, from the end.
type Limits = (u32, u64, u32, u32, u8);

const TWO: Limits = (2, 0, 1, 0, 0);

/// An entry of the hash `limits`.
#[derive(Debug, PartialEq)]
struct Entry {
    leased: String,
    /// Priority and letter of each.
    offered: String,
    next: u64,
    waiting: u64,
}

fn packed(limits: Limits) -> Vec<u8> {
    let (at_a_time, pace, burst, jitter, from_end) = limits;
    rmp_serde::to_vec(&(at_a_time, pace, burst, jitter, from_end, "t:wake", "q")).expect("packed")
}

/// A body with a limit key, whose hash is its first letter eight times.
fn body(priority: u8, key: &str) -> Vec<u8> {
    let limit = [key[..1].repeat(8).as_bytes(), key.as_bytes()].concat();
    let head = [
        &[priority][..],
        &2_u32.to_be_bytes(),
        &30_000_u32.to_be_bytes(),
    ]
    .concat();
    let field = [
        &[114, u8::try_from(limit.len()).expect("short")][..],
        &limit,
    ]
    .concat();
    [head, field, b"\x0a\x01k".to_vec()].concat()
}

fn letters(ids: &[u8], width: usize) -> String {
    ids.chunks(width)
        .map(|item| match width {
            16 => (item[0] as char).to_string(),
            _ => format!("{}{}", item[0], item[1] as char),
        })
        .collect::<Vec<_>>()
        .join(" ")
}

struct Shard {
    f: Fixture,
    limits: Limits,
    /// Whether the settings of the caller have limits.
    knows_limits: bool,
    now: i64,
    offset: u64,
}

impl Shard {
    async fn new(limits: Limits) -> Self {
        let f = Fixture::new().await;
        // It has had limited tasks for long.
        f.seed("HSET", "counters", &[b"limited", b"1"]).await;
        Self {
            f,
            limits,
            knows_limits: true,
            now: NOW,
            offset: 0,
        }
    }

    /// The limits of the queue, as calls send them.
    fn text(&self) -> Vec<u8> {
        if self.knows_limits {
            packed(self.limits)
        } else {
            Vec::new()
        }
    }

    /// Promotes; answers what the script does.
    async fn promote(&self) -> Vec<String> {
        let limits = self.text();
        self.run(&scripts::PROMOTE, |call| {
            call.arg("t:wake").arg("q").arg(100).arg(1000).arg(limits);
        })
        .await
        .expect("promote")
    }

    /// Looks; answers whether a delay is over, and when the next one is (ms).
    async fn look(&self) -> (String, String) {
        let limits = self.text();
        let mut seen = self
            .run(&scripts::LOOK, |call| {
                call.arg(1000).arg(1000).arg(limits);
            })
            .await
            .expect("look");
        (seen.swap_remove(1), seen.swap_remove(2))
    }

    async fn run(
        &self,
        script: &'static Script,
        args: impl FnOnce(&mut Call),
    ) -> Result<Vec<String>, String> {
        let mut call = self.f.keys.call(script, Some(self.now));
        args(&mut call);
        call.run(&mut self.f.redis.conn())
            .await
            .map(flat)
            .map_err(|error| error.to_string())
    }

    /// Enqueues tasks: letter and priority. Answers when time lets a key go on.
    async fn enqueue(&mut self, key: &str, num: u64, tasks: &[(char, u8)]) -> i64 {
        self.offset += 1;
        let offset = format!("{}-0", self.offset);
        let offsets = vec![offset.clone(); tasks.len()].join(" ");
        let limits = self.text();
        let answer = self
            .run(&scripts::ENQUEUE_LIMITED, |call| {
                call.arg("t:wake")
                    .arg("q")
                    .arg("topic")
                    .arg("")
                    .arg(&offset);
                call.arg(1000).arg(1 << 20).arg(0).arg(10_000);
                call.arg(offsets).arg(num).arg(0).arg(tasks.len());
                for (letter, priority) in tasks {
                    call.arg(id(*letter)).arg(body(*priority, key));
                }
                call.arg(limits);
            })
            .await
            .expect("enqueue");
        assert_eq!(answer[..2], ["ok".to_owned(), tasks.len().to_string()]);
        self.at(answer[4].parse().expect("a time"))
    }

    /// The time that is so many ms away; -1: none.
    fn at(&self, wait: i64) -> i64 {
        if wait < 0 { wait } else { self.now + wait }
    }

    /// Claims; answers the letters of the tasks, and when time lets a key go on.
    async fn claim(&self, worker: &str, most: u64) -> (String, Option<i64>) {
        let limits = self.text();
        let answer = self
            .run(&scripts::CLAIM_LIMITED, |call| {
                call.arg(100).arg(10_000).arg(1 << 20).arg(1 << 20);
                call.arg("").arg(0).arg(worker);
                call.arg(format!("{most} 1048576 1 0 0")).arg(limits);
            })
            .await
            .expect("claim");
        if answer.len() <= 2 {
            return (String::new(), None);
        }
        // Ids of one letter each are shown as those letters.
        let next = answer.last().and_then(|next| next.parse().ok());
        let next = next.map(|wait| self.at(wait));
        (answer[4].clone(), next)
    }

    async fn complete(&self, letter: char, grant: u64, worker: &str) -> String {
        let answer = self
            .run(&scripts::COMPLETE_LIMITED, |call| {
                complete_all(call, &[id(letter)], &[format!("h{grant}:{worker}")]);
            })
            .await
            .expect("complete");
        answer[0].clone()
    }

    async fn read(&self, command: &str, key: &str, args: &[&str]) -> Value {
        let mut command = redis::cmd(command);
        command.arg(format!("t:{{q:0}}:{key}")).arg(args);
        command
            .query_async(&mut self.f.redis.conn())
            .await
            .expect("read")
    }

    /// The entry of a limit key, by its first letter.
    async fn entry(&self, key: char) -> Option<Entry> {
        let field = key.to_string().repeat(8);
        let Value::BulkString(text) = self.read("HGET", "limits", &[&field]).await else {
            return None;
        };
        let short = |leased: &[u8], offered: &[u8]| Entry {
            leased: letters(leased, 16),
            offered: letters(offered, 17),
            next: 0,
            waiting: 0,
        };
        match text[0] {
            b'l' => return Some(short(&text[1..], b"")),
            b'o' => return Some(short(b"", &text[1..])),
            _ => {}
        }
        let entry: Vec<rmp_value::Value> = rmp_value::read(&text);
        Some(Entry {
            leased: letters(entry[0].bytes(), 16),
            offered: letters(entry[1].bytes(), 17),
            next: entry[2].number(),
            waiting: entry[4].number(),
        })
    }

    /// The letters in the lanes that have elements, the foremost first.
    async fn lanes(&self) -> BTreeMap<&'static str, String> {
        let mut lanes = BTreeMap::new();
        for lane in taskd::queue::keys::LANES {
            let key = format!("{lane}:T");
            let Value::Array(elements) = self.read("LRANGE", &key, &["0", "-1"]).await else {
                panic!("no list");
            };
            let letter = |element: &Value| match element {
                Value::BulkString(bytes) => bytes[bytes.len() - 1] as char,
                other => panic!("{other:?}"),
            };
            let letters: String = elements.iter().rev().map(letter).collect();
            if !letters.is_empty() {
                lanes.insert(lane, letters);
            }
        }
        lanes
    }

    async fn counter(&self, field: &str) -> i64 {
        match self.read("HGET", "counters", &[field]).await {
            Value::BulkString(text) => String::from_utf8_lossy(&text).parse().expect("a number"),
            _ => 0,
        }
    }

    /// Nothing is left of any key: an idle key costs nothing.
    async fn is_gone(&self) {
        let limits = flat(self.read("HKEYS", "limits", &[]).await);
        assert_eq!(limits, [String::new()], "only the limits of the queue stay");
        for key in ["lines", "starts", "crowded"] {
            assert_eq!(flat(self.read("EXISTS", key, &[]).await), ["0"], "{key}");
        }
        assert_eq!(self.counter("behind").await, 0);
    }
}

/// Only what an entry has: numbers and texts.
mod rmp_value {
    pub(super) enum Value {
        Number(u64),
        Bytes(Vec<u8>),
    }

    impl Value {
        pub(super) fn bytes(&self) -> &[u8] {
            match self {
                Self::Bytes(bytes) => bytes,
                Self::Number(_) => panic!("a number"),
            }
        }

        pub(super) fn number(&self) -> u64 {
            match self {
                Self::Number(number) => *number,
                Self::Bytes(_) => panic!("a text"),
            }
        }
    }

    /// An array as Redis's cmsgpack writes it.
    pub(super) fn read(bytes: &[u8]) -> Vec<Value> {
        let mut rest = &bytes[1..];
        let mut values = Vec::new();
        let take = |rest: &mut &[u8], count: usize| -> Vec<u8> {
            let (first, behind) = rest.split_at(count);
            *rest = behind;
            first.to_vec()
        };
        let number = |bytes: Vec<u8>| {
            bytes
                .into_iter()
                .fold(0, |sum, byte| sum << 8 | u64::from(byte))
        };
        while !rest.is_empty() {
            let kind = take(&mut rest, 1)[0];
            values.push(match kind {
                0..=0x7f => Value::Number(kind.into()),
                0xe0..=0xff => Value::Number(0),
                0xa0..=0xbf => Value::Bytes(take(&mut rest, usize::from(kind) - 0xa0)),
                0xd9 => {
                    let length = number(take(&mut rest, 1));
                    Value::Bytes(take(&mut rest, usize::try_from(length).expect("short")))
                }
                0xda => {
                    let length = number(take(&mut rest, 2));
                    Value::Bytes(take(&mut rest, usize::try_from(length).expect("short")))
                }
                0xcc..=0xcf => Value::Number(number(take(&mut rest, 1 << (kind - 0xcc)))),
                0xd0 => Value::Number(number(take(&mut rest, 1))),
                other => panic!("a value of kind {other:x}"),
            });
        }
        values
    }
}

fn lanes(of: &[(&'static str, &str)]) -> BTreeMap<&'static str, String> {
    of.iter()
        .map(|(lane, letters)| (*lane, (*letters).to_owned()))
        .collect()
}

#[tokio::test]
async fn only_what_may_start_stands_in_a_lane_and_each_end_releases_the_next() {
    let mut s = Shard::new(TWO).await;
    let tasks = ['a', 'b', 'c', 'd', 'e'].map(|letter| (letter, 2));
    assert_eq!(s.enqueue("x", 1, &tasks).await, -1);
    s.enqueue("y", 1, &[('f', 2)]).await;
    assert_eq!(s.lanes().await, lanes(&[("m", "abf")]));
    assert_eq!(s.counter("open").await, 6);
    assert_eq!(s.counter("behind").await, 3);
    assert_eq!(s.claim("w", 5).await.0, "abf");
    let entry = s.entry('x').await.expect("busy");
    assert_eq!(
        (&*entry.leased, &*entry.offered, entry.waiting),
        ("a b", "", 3)
    );
    assert_eq!(s.claim("v", 5).await.0, "");
    // Each completion releases one.
    assert_eq!(s.complete('a', 1, "w").await, "1");
    assert_eq!(s.lanes().await, lanes(&[("m", "c")]));
    assert_eq!(
        s.complete('a', 1, "w").await,
        "2",
        "a repeat releases nothing"
    );
    assert_eq!(s.lanes().await, lanes(&[("m", "c")]));
    assert_eq!(s.complete('b', 1, "w").await, "1");
    assert_eq!(s.claim("v", 5).await.0, "cd");
    for (letter, grant, worker) in [('c', 2, "v"), ('d', 2, "v"), ('f', 1, "w")] {
        s.complete(letter, grant, worker).await;
    }
    assert_eq!(s.claim("w", 5).await.0, "e");
    s.complete('e', 3, "w").await;
    s.is_gone().await;
    assert_eq!(s.counter("open").await, 0);
}

#[tokio::test]
async fn a_plain_call_that_meets_a_limited_shard_changes_nothing() {
    let mut s = Shard::new(TWO).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2), ('c', 2)]).await;
    let before = s.f.state().await;
    let claim = |call: &mut Call| super::claim::claim(call, &[("w", 1)]);
    let error = s.run(&scripts::CLAIM, claim).await.expect_err("refused");
    assert!(error.contains("LIMITED"), "{error}");
    let complete = |call: &mut Call| complete_all(call, &[id('a')], &["h1:w".to_owned()]);
    let error = s.run(&scripts::COMPLETE, complete).await;
    assert!(error.expect_err("refused").contains("LIMITED"));
    assert_eq!(s.f.state().await, before);
}

#[tokio::test]
async fn the_gate_holds_when_the_limit_falls_and_nothing_is_lost() {
    let mut s = Shard::new(TWO).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    assert_eq!(s.lanes().await, lanes(&[("m", "ab")]));
    s.limits = (1, 0, 1, 0, 0);
    // The element of b leaves, and b waits behind its key.
    assert_eq!(s.claim("w", 5).await.0, "a");
    let entry = s.entry('x').await.expect("busy");
    assert_eq!(
        (&*entry.leased, &*entry.offered, entry.waiting),
        ("a", "", 1)
    );
    assert_eq!(s.lanes().await, lanes(&[]));
    s.complete('a', 1, "w").await;
    assert_eq!(s.lanes().await, lanes(&[("mr", "b")]), "as a new offer");
    assert_eq!(s.claim("w", 5).await.0, "b");
    s.complete('b', 2, "w").await;
    s.is_gone().await;
}

#[tokio::test]
async fn a_task_that_its_worker_may_not_have_does_not_stop_its_key() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x", 2, &[('a', 2)]).await;
    s.enqueue("x", 1, &[('b', 2), ('c', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    // The rest of NUM comes first, as a new offer.
    assert_eq!(s.lanes().await, lanes(&[]));
    s.complete('a', 1, "w").await;
    assert_eq!(s.lanes().await, lanes(&[("mr", "a")]));
    // The worker passes it, and so b gets the place.
    assert_eq!(s.claim("w", 1).await.0, "");
    assert_eq!(s.lanes().await, lanes(&[("m", "b"), ("mr", "a")]));
    assert_eq!(s.claim("w", 1).await.0, "b");
    // The passed element goes through the gate.
    assert_eq!(s.claim("v", 1).await.0, "");
    s.complete('b', 2, "w").await;
    assert_eq!(s.claim("v", 1).await.0, "a");
    s.complete('a', 3, "v").await;
    assert_eq!(s.claim("w", 1).await.0, "c");
    s.complete('c', 4, "w").await;
    s.is_gone().await;
}

#[tokio::test]
async fn priorities_overtake_within_a_key_and_the_foremost_line_goes_first() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 3), ('b', 3)]).await;
    assert_eq!(s.lanes().await, lanes(&[("l", "a")]));
    // A high one comes while a low one is offered: the first that is claimed starts.
    s.enqueue("x", 1, &[('c', 1)]).await;
    assert_eq!(s.lanes().await, lanes(&[("h", "c"), ("l", "a")]));
    assert_eq!(s.claim("w", 2).await.0, "c");
    assert_eq!(s.lanes().await, lanes(&[]), "a went back");
    s.complete('c', 1, "w").await;
    assert_eq!(s.claim("w", 1).await.0, "a", "the foremost");
}

#[tokio::test]
async fn every_script_that_ends_a_lease_releases_the_next_task() {
    for script in [
        "reject",
        "put_off",
        "expire",
        "session_end",
        "cancel",
        "deadline",
        "change",
        "requeue",
        "away",
    ] {
        let mut s = Shard::new((1, 0, 1, 0, 0)).await;
        let num = if script == "change" { 2 } else { 1 };
        s.enqueue("x", num, &[('a', 2)]).await;
        s.enqueue("x", 1, &[('b', 2)]).await;
        assert_eq!(s.claim("w", 1).await.0, "a");
        let backoff = rmp_serde::to_vec(&[1000]).expect("packed");
        let (ran, expected): (_, &[(&str, &str)]) = match script {
            "reject" | "put_off" => (
                s.run(&scripts::REJECT, |call| {
                    call.arg(1).arg("t:wake").arg("q").arg(backoff).arg(1000);
                    call.arg(id('a')).arg("7").arg(1).arg("w");
                    let mode = if script == "reject" {
                        "retry"
                    } else {
                        "put_off"
                    };
                    call.arg(mode).arg(500).arg("why").arg("");
                })
                .await,
                &[("m", "b")],
            ),
            "expire" => {
                s.now += 40_000;
                // Its grant never arrived: it is offered again at once, as the foremost.
                let expire = |call: &mut Call| {
                    call.arg(1).arg("t:wake").arg("q").arg(backoff).arg(10);
                    call.arg(1000).arg(1000);
                };
                (s.run(&scripts::EXPIRE, expire).await, &[("mr", "a")])
            }
            "session_end" => (
                s.run(&scripts::SESSION_END, |call| {
                    call.arg(1).arg("t:wake").arg("q").arg(backoff).arg(1000);
                    call.arg("over").arg(id('a')).arg("7").arg(1).arg("w");
                    call.arg(NOW + 30_000).arg(2).arg("");
                })
                .await,
                &[("m", "b")],
            ),
            "cancel" => (
                s.run(&scripts::CANCEL, |call| {
                    call.arg("t:wake").arg(id('a')).arg(1).arg(0);
                })
                .await,
                &[("m", "b")],
            ),
            "deadline" => (
                s.run(&scripts::DEADLINE, |call| {
                    call.arg("t:wake").arg(1000).arg(1000);
                    call.arg(id('a')).arg(1).arg("late");
                })
                .await,
                &[("m", "b")],
            ),
            "change" => (
                s.run(&scripts::CHANGE, |call| {
                    call.arg("t:wake").arg("q");
                    call.arg(id('a')).arg(1).arg(1).arg(0).arg("");
                })
                .await,
                // The lease goes on, and nothing is left of it to offer.
                &[],
            ),
            mode => (
                s.run(&scripts::REQUEUE, |call| {
                    call.arg("t:wake").arg("q").arg(id('a')).arg(0);
                    let mode = if mode == "away" { "away" } else { "all" };
                    call.arg(mode).arg("w").arg(0);
                })
                .await,
                &[("mr", "a")],
            ),
        };
        ran.unwrap_or_else(|error| panic!("{script}: {error}"));
        assert_eq!(s.lanes().await, lanes(expected), "{script}");
        let entry = s.entry('x').await.expect("busy");
        let leased = if script == "change" { "a" } else { "" };
        assert_eq!(entry.leased, leased, "{script}");
    }
}

#[tokio::test]
async fn what_waits_behind_its_key_may_be_cancelled_changed_and_requeued() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    let tasks = ['a', 'b', 'c', 'd', 'e'].map(|letter| (letter, 2));
    s.enqueue("x", 1, &tasks).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.run(&scripts::CANCEL, |call| {
        call.arg("t:wake").arg(id('b')).arg(1).arg(0);
    })
    .await
    .expect("cancel");
    s.run(&scripts::CHANGE, |call| {
        call.arg("t:wake").arg("q");
        call.arg(id('d')).arg(1).arg(1).arg(0).arg("");
    })
    .await
    .expect("change");
    s.run(&scripts::REQUEUE, |call| {
        call.arg("t:wake").arg("q").arg(id('e')).arg(0);
        call.arg("all").arg("").arg(0);
    })
    .await
    .expect("requeue");
    assert_eq!(s.counter("open").await, 3);
    // d has another priority now, e is the foremost of its own; b is skipped.
    for (grant, expected) in (2..).zip(["d", "e", "c"]) {
        let last = ['a', 'd', 'e'][grant - 2];
        s.complete(last, grant as u64 - 1, "w").await;
        assert_eq!(s.claim("w", 1).await.0, expected);
    }
    s.complete('c', 4, "w").await;
    s.is_gone().await;
}

#[tokio::test]
async fn starts_are_so_far_apart_and_the_time_releases_the_next() {
    // At most two at once, then one each second.
    let mut s = Shard::new((0, 1000, 2, 0, 0)).await;
    let tasks = ['a', 'b', 'c', 'd'].map(|letter| (letter, 2));
    assert_eq!(s.enqueue("x", 1, &tasks).await, -1);
    let (got, next) = s.claim("w", 5).await;
    assert_eq!((&*got, next), ("ab", Some(NOW + 1000)));
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(100).arg(1000);
    };
    s.now = NOW + 999;
    let promoted = s.run(&scripts::PROMOTE, promote).await.expect("promote");
    let (next, now) = ((NOW + 1000).to_string(), s.now.to_string());
    assert_eq!(promoted, ["0", "0", &*next, &*now]);
    assert_eq!(s.lanes().await, lanes(&[]), "a millisecond too early");
    s.now = NOW + 1000;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(s.lanes().await, lanes(&[("m", "c")]));
    assert_eq!(s.claim("w", 5).await, ("c".into(), Some(NOW + 2000)));
    for (letter, grant) in [('a', 1), ('b', 1), ('c', 2)] {
        s.complete(letter, grant, "w").await;
    }
    // After a long pause no more than the burst comes at once.
    s.now = NOW + 100_000;
    s.enqueue("x", 1, &[('e', 2), ('f', 2)]).await;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(s.claim("w", 5).await.0, "de");
    for (letter, grant) in [('d', 3), ('e', 3)] {
        s.complete(letter, grant, "w").await;
    }
    s.now = NOW + 102_000;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(s.claim("w", 5).await.0, "f");
    s.complete('f', 4, "w").await;
    // The limits of an idle key hold until its time is over.
    assert!(s.entry('x').await.is_some_and(|entry| entry.next > 0));
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    s.now = NOW + 200_000;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    s.is_gone().await;
}

#[tokio::test]
async fn a_pace_may_count_from_the_end_and_a_jitter_only_makes_it_longer() {
    let mut s = Shard::new((1, 1000, 1, 0, 1)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.now = NOW + 5000;
    assert_eq!(s.complete('a', 1, "w").await, "1 1001");
    assert_eq!(s.lanes().await, lanes(&[]));

    for letter in ['a', 'b', 'c', 'd'] {
        let mut s = Shard::new((0, 1000, 1, 50, 0)).await;
        s.enqueue("x", 1, &[(letter, 2), ('z', 2)]).await;
        let next = s.claim("w", 1).await.1.expect("z waits");
        assert!((NOW + 1001..=NOW + 1501).contains(&next), "{next}");
    }
}

/// A completion with a hold and a pace (ms).
fn reporting(call: &mut Call, letter: char, grant: u64, hold: u64, pace: u64) {
    complete_all(call, &[id(letter)], &[format!("h{grant}:w")]);
    call.arg(1).arg("7").arg(1).arg(hold).arg(pace);
}

#[tokio::test]
async fn a_report_holds_its_key_or_slows_it_from_the_step_that_ends_the_lease() {
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(100).arg(1000);
    };
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    let tasks = ['a', 'b', 'c', 'd'].map(|letter| (letter, 2));
    s.enqueue("x", 1, &tasks).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    let held = s
        .run(&scripts::COMPLETE_LIMITED, |call| {
            reporting(call, 'a', 1, 5000, 0);
        })
        .await;
    assert_eq!(held.expect("complete"), ["1 5001"]);
    assert_eq!(s.lanes().await, lanes(&[]));
    s.now = NOW + 5001;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(s.claim("w", 1).await.0, "b");
    // A rejection that costs no attempt and asks for a pace.
    s.run(&scripts::REJECT, |call| {
        let backoff = rmp_serde::to_vec(&[1000]).expect("packed");
        call.arg(1).arg("t:wake").arg("q").arg(backoff).arg(1000);
        call.arg(id('b')).arg("7").arg(2).arg("w");
        call.arg("put_off 0 3000").arg(60_000).arg("busy").arg("");
    })
    .await
    .expect("reject");
    assert_eq!(s.lanes().await, lanes(&[]));
    s.now += 3001;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(s.claim("w", 1).await.0, "c");
    s.complete('c', 3, "w").await;
    assert_eq!(
        s.lanes().await,
        lanes(&[]),
        "three seconds from start to start"
    );
}

#[tokio::test]
async fn a_report_about_the_limit_key_of_a_task_without_one_changes_nothing() {
    let s = Shard::new(TWO).await;
    s.f.held('a', "w", 1).await;
    let before = s.f.state().await;
    let answer = s
        .run(&scripts::COMPLETE_LIMITED, |call| {
            reporting(call, 'a', 1, 5000, 0);
        })
        .await;
    assert_eq!(answer.expect("complete"), ["7"]);
    let answer = s
        .run(&scripts::REJECT, |call| {
            let backoff = rmp_serde::to_vec(&[1000]).expect("packed");
            call.arg(1).arg("t:wake").arg("q").arg(backoff).arg(1000);
            call.arg(id('a')).arg("7").arg(1).arg("w");
            call.arg("retry 5000 0").arg("").arg("why").arg("");
        })
        .await;
    assert_eq!(answer.expect("reject"), ["7", "0"]);
    assert_eq!(s.f.state().await, before);
}

#[tokio::test]
async fn nothing_starts_for_an_interval_in_a_shard_that_redis_lost() {
    for burst in [1, 5] {
        let mut s = Shard::new((0, 1000, burst, 0, 0)).await;
        s.f.seed("DEL", "counters", &[]).await;
        let next = s.enqueue("x", 1, &[('a', 2)]).await;
        assert_eq!(next, NOW + 1001);
        s.now += 500;
        let next = s.enqueue("y", 1, &[('b', 2)]).await;
        assert_eq!(next, NOW + 1001, "since the first limited task");
        assert_eq!(s.lanes().await, lanes(&[]));
    }
}

#[tokio::test]
async fn a_clock_that_was_set_back_does_not_stop_a_key() {
    let mut s = Shard::new((0, 1000, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.now = NOW - 100_000;
    let promote = |call: &mut Call| {
        call.arg("t:wake").arg("q").arg(100).arg(1000);
    };
    let next = s.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert!(
        next[2].parse::<i64>().expect("a time") <= s.now + 2001,
        "{next:?}"
    );
    s.now += 2001;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    s.now += 1001;
    s.run(&scripts::PROMOTE, promote).await.expect("promote");
    assert_eq!(s.claim("w", 1).await.0, "b");
}

impl Shard {
    /// Enqueues so many tasks, of numbers from the first on, and answers how many the shard took
    /// and how many are crowded. `most_live` says how full the shard is.
    async fn crowd(&mut self, key: &str, numbers: Range<u32>, most_live: u64) -> (usize, usize) {
        self.offset += 1;
        let offset = format!("{}-0", self.offset);
        let answer = self
            .enqueue_numbers(key, numbers, most_live, &offset, 0)
            .await;
        let crowded = answer.len() - 5;
        let stored = flat(self.read("GET", "offset", &[]).await);
        let is_stored = stored == [format!("topic/{offset}")];
        assert_eq!(is_stored, crowded == 0, "{stored:?}: {answer:?}");
        (answer[2].parse().expect("a number"), crowded)
    }

    async fn enqueue_numbers(
        &self,
        key: &str,
        numbers: Range<u32>,
        most_live: u64,
        offset: &str,
        again: u8,
    ) -> Vec<String> {
        let limits = packed(self.limits);
        let ids: Vec<Vec<u8>> = numbers
            .map(|n| [&b"0123456789ab"[..], &n.to_be_bytes()].concat())
            .collect();
        let answer = self.run(&scripts::ENQUEUE_LIMITED, |call| {
            call.arg("t:wake").arg("q").arg("topic").arg("").arg(offset);
            call.arg(10).arg(1 << 30).arg(0).arg(most_live);
            call.arg(vec![offset; ids.len()].join(" "));
            call.arg(1).arg(again).arg(ids.len());
            for id in &ids {
                call.arg(id).arg(body(2, key));
            }
            call.arg(limits);
        });
        answer.await.expect("enqueue")
    }

    /// The limit keys that take tasks from SQL, and how many tasks.
    async fn uncrowded(&self, most_live: u64, crowded: &str, empty: &str) -> Vec<String> {
        let answer = self.run(&scripts::CROWDED, |call| {
            call.arg(1 << 30).arg(most_live).arg(10);
            call.arg(crowded).arg(empty);
        });
        answer.await.expect("crowded")
    }

    /// The limit keys with tasks in SQL, each with how many wait here.
    async fn marks(&self) -> Vec<String> {
        flat(
            self.read("ZRANGE", "crowded", &["0", "-1", "WITHSCORES"])
                .await,
        )
    }
}

#[tokio::test]
async fn enough_of_a_key_wait_in_the_shard_and_the_others_are_left_to_sql() {
    let (x, y) = ("x".repeat(8), "y".repeat(8));
    // A shard that is half full leaves each key less.
    for (most_live, bound) in [(1_000_000, 4096), (100, 64)] {
        let mut s = Shard::new(TWO).await;
        // The first two stand in a lane.
        let mut next = 0;
        while next < bound + 2 {
            let upto = (next + if next == 0 { 2 } else { 1000 }).min(bound + 2);
            let taken = s.crowd("x", next..upto, most_live).await;
            assert_eq!(taken, ((upto - next) as usize, 0), "{next} of {bound}");
            next = upto;
        }
        assert_eq!(s.marks().await, Vec::<String>::new());
        assert_eq!(s.crowd("x", next..next + 3, most_live).await, (0, 3));
        assert_eq!(s.marks().await, [x.clone(), bound.to_string()]);
        assert_eq!(s.counter("live").await, i64::from(bound) + 2);
        assert_eq!(s.counter("behind").await, i64::from(bound));
        // Those that it has are known, and not crowded.
        assert_eq!(s.crowd("x", 0..2, most_live).await, (0, 0));
        // Those of another key have room.
        assert_eq!(s.crowd("y", 9000..9010, most_live).await, (10, 0));
        // What goes to SQL needs no room: the call gets past it in a full shard, too.
        let live = s.counter("live").await.unsigned_abs();
        let answer = s.enqueue_numbers("x", 8000..8002, live, "9999-0", 0).await;
        assert_eq!(answer, ["ok", "2", "0", "0", "-1", "1", "2"]);
        let half = (bound / 2).to_string();
        let uncrowded = s.uncrowded(most_live, "", "").await;
        assert_eq!(uncrowded, [half.clone(), "1".to_owned()]);

        // Half of those that wait, and some more, may start.
        s.limits = (bound / 2 + 10, 0, 1, 0, 0);
        let mut waiting = s.entry('x').await.expect("busy").waiting;
        while waiting > u64::from(bound / 2) {
            let before = waiting;
            s.claim("w", 1000).await;
            waiting = s.entry('x').await.expect("busy").waiting;
            assert!(waiting < before, "{waiting}");
        }
        assert_eq!(s.marks().await, [x.clone(), waiting.to_string()]);
        let uncrowded = s.uncrowded(most_live, "", "").await;
        assert_eq!(uncrowded, [half.clone(), x.clone(), "1".to_owned()]);
        // New tasks do not overtake those in SQL, which are told by the flag `again`.
        s.limits = (1, 0, 1, 0, 0);
        assert_eq!(s.crowd("x", 6000..6001, most_live).await, (0, 1));
        s.offset += 1;
        let offset = format!("{}-0", s.offset);
        let answer = s
            .enqueue_numbers("x", 6000..6001, most_live, &offset, 1)
            .await;
        assert_eq!(answer, ["ok", "1", "1", "0", "-1"]);

        // SQL has no task of this key any more, and the walk finds one of the other.
        let uncrowded = s.uncrowded(most_live, &y, &x).await;
        assert_eq!(uncrowded, [half, y.clone(), "1".to_owned()]);
        assert_eq!(s.marks().await[0], y);
        assert_eq!(s.crowd("x", 6001..6002, most_live).await, (1, 0));
        assert_eq!(s.crowd("y", 7000..7001, most_live).await, (0, 1));
    }
}

impl Shard {
    /// What the check of the entries of limit keys finds: kind and letter of the task.
    async fn check(&self, mends: u8) -> Vec<String> {
        let answer = self.run(&scripts::CHECK, |call| {
            call.arg("limits").arg("0").arg(100).arg(mends).arg(1000);
        });
        let answer = answer.await.expect("check");
        assert_eq!(
            (&*answer[0], answer.last().expect("a flag").as_str()),
            ("0", "0")
        );
        let finds = answer[1..answer.len() - 1].chunks(3);
        finds
            .map(|find| format!("{} {}", find[0], find[1]))
            .collect()
    }
}

#[tokio::test]
async fn a_lease_that_is_not_there_and_a_key_that_nothing_wakes_are_found_and_mended() {
    let mut s = Shard::new(TWO).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2), ('c', 2), ('d', 2)])
        .await;
    assert_eq!(s.claim("w", 5).await.0, "ab");
    assert_eq!(s.check(1).await, Vec::<String>::new());
    // Both leases are lost, and with them what would let the next tasks start.
    s.f.seed("HDEL", "records", &[&id('a'), &id('b')]).await;
    let finds = ["limit_without_lease a", "limit_without_lease b"];
    for mends in [0, 1] {
        let mut found = s.check(mends).await;
        found.sort_unstable();
        assert_eq!(found, finds);
    }
    assert_eq!(s.check(0).await, Vec::<String>::new());
    assert_eq!(s.lanes().await, lanes(&[("m", "cd")]));

    let mut s = Shard::new((0, 1000, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.complete('a', 1, "w").await;
    assert_eq!(s.check(1).await, Vec::<String>::new(), "its time wakes it");
    s.f.seed("DEL", "starts", &[]).await;
    for mends in [0, 1] {
        assert_eq!(s.check(mends).await, ["limit_asleep "]);
    }
    assert_eq!(s.check(0).await, Vec::<String>::new());
    assert_eq!(flat(s.read("EXISTS", "starts", &[]).await), ["1"]);
}

#[tokio::test]
async fn a_place_of_an_offered_task_that_is_gone_is_given_back() {
    for script in [
        "claim",
        "claim of a final one",
        "cancel",
        "deadline",
        "check",
    ] {
        let mut s = Shard::new((1, 0, 1, 0, 0)).await;
        s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
        assert_eq!(s.lanes().await, lanes(&[("m", "a")]));
        let unreadable =
            async |s: &Shard| s.f.seed("HSET", "records", &[&id('a'), b"kaputt"]).await;
        match script {
            "cancel" => {
                unreadable(&s).await;
                s.run(&scripts::CANCEL, |call| {
                    call.arg("t:wake").arg(id('a')).arg(1).arg(0);
                })
                .await
                .expect("cancel");
            }
            "deadline" => {
                unreadable(&s).await;
                s.run(&scripts::DEADLINE, |call| {
                    call.arg("t:wake").arg(1000).arg(1000);
                    call.arg(id('a')).arg(1).arg("late");
                })
                .await
                .expect("deadline");
            }
            "claim of a final one" => {
                let ended = rmp_serde::to_vec(&("X", 1, 0, [(); 0], [(); 0], [(); 0], NOW))
                    .expect("packed");
                s.f.seed("HSET", "records", &[&id('a'), &ended]).await;
                assert_eq!(s.claim("w", 1).await.0, "");
            }
            "claim" => {
                s.f.seed("HDEL", "bodies", &[&id('a')]).await;
                assert_eq!(s.claim("w", 1).await.0, "");
            }
            _ => {
                s.f.seed("HDEL", "bodies", &[&id('a')]).await;
                for mends in [0, 1] {
                    assert_eq!(s.check(mends).await, ["limit_without_offer a"]);
                }
                assert_eq!(s.check(0).await, Vec::<String>::new());
            }
        }
        let entry = s.entry('x').await.expect("b is offered");
        assert_eq!(entry.offered, "2b", "{script}");
    }
}

#[tokio::test]
async fn a_full_shard_leaves_the_place_of_a_task_that_it_does_not_take() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.f.seed("HSET", "records", &[&id('a'), b"kaputt"]).await;
    let limits = s.text();
    let answer = s.run(&scripts::ENQUEUE_LIMITED, |call| {
        call.arg("t:wake").arg("q").arg("topic").arg("").arg("9-0");
        call.arg(1000).arg(1 << 20).arg(0).arg(1).arg("9-0");
        call.arg(1).arg(1).arg(1);
        call.arg(id('a')).arg(body(2, "x")).arg(limits);
    });
    assert_eq!(answer.await.expect("enqueue")[..2], ["ok", "0"]);
    assert_eq!(s.entry('x').await.expect("busy").leased, "a");
    assert_eq!(s.lanes().await, lanes(&[]));
}

#[tokio::test]
async fn a_key_with_many_leases_counts_each_of_them() {
    let mut s = Shard::new((100, 0, 1, 0, 0)).await;
    assert_eq!(s.crowd("x", 0..120, 1_000_000).await, (120, 0));
    let ids: Vec<Vec<u8>> = (0..120_u32)
        .map(|n| [&b"0123456789ab"[..], &n.to_be_bytes()].concat())
        .collect();
    let complete = async |s: &Shard, ids: &[Vec<u8>], grant: u64| {
        let held = vec![format!("h{grant}:w"); ids.len()];
        let answer = s.run(&scripts::COMPLETE_LIMITED, |call| {
            complete_all(call, ids, &held);
        });
        assert_eq!(answer.await.expect("complete"), ["1".repeat(ids.len())]);
    };
    assert_eq!(s.claim("w", 1000).await.0.len(), 100 * 16);
    let mut ended = ids[30..80].to_vec();
    ended.reverse();
    complete(&s, &ended, 1).await;
    let entry = s.entry('x').await.expect("busy");
    assert_eq!(entry.leased.split(' ').count(), 50);
    assert_eq!((entry.offered.split(' ').count(), entry.waiting), (20, 0));
    assert_eq!(s.claim("w", 1000).await.0.len(), 20 * 16);
    complete(&s, &ids[80..100], 1).await;
    complete(&s, &ids[..30], 1).await;
    complete(&s, &ids[100..], 2).await;
    s.is_gone().await;
}

#[tokio::test]
async fn lines_are_as_long_as_they_have_to_be() {
    for count in [1_u32, 64, 65, 1000] {
        let mut s = Shard::new((1, 0, 1, 0, 0)).await;
        let limits = packed(s.limits);
        let ids: Vec<Vec<u8>> = (0..count)
            .map(|n| [&b"0123456789ab"[..], &n.to_be_bytes()].concat())
            .collect();
        s.run(&scripts::ENQUEUE_LIMITED, |call| {
            call.arg("t:wake").arg("q").arg("topic").arg("").arg("1-0");
            call.arg(10).arg(1 << 30).arg(0).arg(10_000);
            call.arg(vec!["1-0"; ids.len()].join(" "));
            call.arg(1).arg(0).arg(ids.len());
            for id in &ids {
                call.arg(id).arg(body(2, "x"));
            }
            call.arg(limits);
        })
        .await
        .expect("enqueue");
        assert_eq!(
            s.entry('x').await.expect("busy").waiting,
            u64::from(count) - 1,
            "no high water of lanes counts them"
        );
        s.now += 1;
        for (n, id) in ids.iter().enumerate() {
            let limits = packed(s.limits);
            let answer = s
                .run(&scripts::CLAIM_LIMITED, |call| {
                    call.arg(100).arg(10_000).arg(1 << 20).arg(1 << 20);
                    call.arg("").arg(0).arg("w");
                    call.arg("9 1048576 1 0 0").arg(limits);
                })
                .await
                .expect("claim");
            assert_eq!(answer[4], String::from_utf8_lossy(id), "in their order");
            s.run(&scripts::COMPLETE_LIMITED, |call| {
                complete_all(call, std::slice::from_ref(id), &[format!("h{}:w", n + 1)]);
            })
            .await
            .expect("complete");
        }
        s.is_gone().await;
    }
}

#[tokio::test]
async fn a_caller_whose_settings_have_no_limits_leaves_those_of_the_shard() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    s.knows_limits = false;
    s.enqueue("x", 1, &[('c', 2)]).await;
    assert_eq!(s.claim("w", 5).await.0, "a");
    s.promote().await;
    assert_eq!(s.lanes().await, lanes(&[]), "one at a time");
    s.complete('a', 1, "w").await;
    assert_eq!(s.claim("w", 5).await.0, "b");
}

#[tokio::test]
async fn a_damaged_record_of_a_leased_task_frees_its_place() {
    for damage in [&b"kaputt"[..], b"k", b"\x97nonsense"] {
        for script in ["check", "enqueue", "claim"] {
            let mut s = Shard::new((1, 0, 1, 0, 0)).await;
            s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
            assert_eq!(s.claim("w", 1).await.0, "a");
            s.f.seed("HSET", "records", &[&id('a'), damage]).await;
            match script {
                "check" => {
                    let records = super::check::check("records", 1);
                    s.run(&scripts::CHECK, records).await.expect("check");
                }
                "enqueue" => {
                    s.enqueue("x", 1, &[('a', 2)]).await;
                }
                _ => {
                    // An element of it is still in a lane.
                    let element =
                        [&[0x94, 1, 0, 0xa8][..], &[b'x'; 8], &[0xb0], &id('a')[..]].concat();
                    s.f.seed("LPUSH", "m:T", &[&element]).await;
                    s.claim("v", 1).await;
                }
            }
            let entry = s.entry('x').await.expect("b waits or runs");
            assert!(
                !entry.leased.contains('a'),
                "{script} {damage:?}: {entry:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_pace_that_a_worker_asks_for_has_the_jitter_of_the_queue() {
    let mut s = Shard::new((1, 1000, 1, 50, 0)).await;
    s.enqueue("x", 1, &[('a', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.enqueue("x", 1, &[('g', 2), ('z', 2)]).await;
    let pace = 3_000_000;
    s.run(&scripts::COMPLETE_LIMITED, |call| {
        reporting(call, 'a', 1, 0, pace);
    })
    .await
    .expect("complete");
    s.now += 3_000_001;
    s.promote().await;
    let (started, next) = s.claim("w", 1).await;
    assert_eq!(started, "g");
    let wait = next.expect("z waits") - s.now;
    assert!((4_000_000..4_500_002).contains(&wait), "{wait}");
    // Not a time that only a clock which was set back could have written.
    assert_eq!(s.look().await.0, "0");
}

#[tokio::test]
async fn new_limits_of_a_queue_reach_keys_that_wait() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    for (key, first, second) in [("x", 'a', 'b'), ("y", 'c', 'd')] {
        s.enqueue(key, 1, &[(first, 2), (second, 2)]).await;
    }
    assert_eq!(s.claim("w", 5).await.0, "ac");
    assert_eq!(s.look().await.0, "0");
    s.limits = TWO;
    assert_eq!(s.look().await.0, "1", "promote takes them");
    assert_eq!(s.promote().await[1], "1", "there is more to do");
    assert_eq!(s.look().await.0, "1");
    assert_eq!(s.promote().await[1], "0");
    assert_eq!(s.lanes().await, lanes(&[("m", "bd")]));
    assert_eq!(s.look().await.0, "0");

    // Processes with different settings do not make the shard walk over its keys without end.
    s.limits = (1, 0, 1, 0, 0);
    assert_eq!(s.promote().await[1], "0", "it has changed a moment ago");
    s.limits = TWO;
    assert_eq!(s.promote().await[1], "0");
    s.limits = (1, 0, 1, 0, 0);
    s.now += 1000;
    assert_eq!(s.promote().await[1], "1");
}

/// What an operator set for a limit key, as processes tell it: version, name (its first letter
/// eight times), and the limits, or that they were cleared.
async fn tell_own(s: &Shard, from: u64, upto: u64, changes: &[(u64, &str, Option<Own>)]) -> String {
    let limits = s.text();
    let answer = s
        .run(&scripts::OWN_LIMITS, |call| {
            call.arg(from).arg(upto).arg(limits);
            for (version, key, own) in changes {
                let (at_a_time, pace, burst, hold) = own.unwrap_or((-1, -1, 0, 0));
                let replaces_hold = u8::from(hold > 0);
                call.arg(key.repeat(8)).arg(
                    rmp_serde::to_vec(&(
                        *version,
                        u8::from(own.is_none()),
                        replaces_hold,
                        at_a_time,
                        pace,
                        burst,
                        hold,
                    ))
                    .expect("packed"),
                );
            }
        })
        .await
        .expect("own limits");
    answer[..2].join(" ")
}

/// At a time (-1 as the queue), ms between starts (-1), burst (0), end of the hold (ms, 0).
type Own = (i64, i64, u32, i64);

#[tokio::test]
async fn own_limits_of_a_key_count_for_it_alone_and_an_older_change_never_wins() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    let tasks = ['a', 'b', 'c', 'd'].map(|letter| (letter, 2));
    s.enqueue("x", 1, &tasks).await;
    s.enqueue("y", 1, &[('e', 2), ('f', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    let three = Some((3, -1, 0, 0));
    assert_eq!(tell_own(&s, 0, 3, &[(2, "x", three)]).await, "1 -1");
    assert_eq!(s.lanes().await, lanes(&[("m", "ebc")]), "released at once");
    // The same again, and an older one.
    let one = Some((1, -1, 0, 0));
    assert_eq!(tell_own(&s, 0, 3, &[(2, "x", three)]).await, "0 -1");
    assert_eq!(tell_own(&s, 0, 2, &[(1, "x", one)]).await, "0 -1");
    // A caller that believes that the shard knows more than it does.
    let before = s.f.state().await;
    assert_eq!(tell_own(&s, 4, 5, &[(5, "x", one)]).await, "-1 -1");
    assert_eq!(s.f.state().await, before);
    assert_eq!(s.claim("w", 9).await.0, "ebc");
    // 0 at a time: what runs goes on, and nothing starts.
    let none = Some((0, -1, 0, 0));
    assert_eq!(tell_own(&s, 3, 4, &[(4, "x", none)]).await, "1 -1");
    for (letter, grant) in [('a', 1), ('b', 2), ('c', 2), ('e', 2)] {
        assert_eq!(s.complete(letter, grant, "w").await, "1");
    }
    assert_eq!(s.lanes().await, lanes(&[("m", "f")]));
    let explained = s
        .run(&scripts::EXPLAIN, |call| {
            call.arg(id('d')).arg("").arg(2).arg(100);
        })
        .await
        .expect("explain");
    let limit = &explained[explained.len() - 5..];
    assert_eq!(limit, ["0", "-1", "0", "0", "1"], "{explained:?}");
    // Those of all keys count for keys that have none.
    assert_eq!(tell_own(&s, 4, 5, &[(5, "", none)]).await, "1 -1");
    assert_eq!(tell_own(&s, 5, 6, &[(6, "x", one)]).await, "1 -1");
    assert_eq!(s.claim("w", 9).await.0, "d", "f goes back");
    assert_eq!(s.complete('d', 3, "w").await, "1");
    assert_eq!(
        tell_own(&s, 6, 7, &[(7, "x", None), (7, "", None)]).await,
        "2 -1"
    );
    while s.promote().await[1] == "1" {}
    assert_eq!(s.claim("w", 9).await.0, "f");
    assert_eq!(s.complete('f', 4, "w").await, "1");
    let limits = flat(s.read("HKEYS", "limits", &[]).await);
    assert_eq!(
        limits.len(),
        2,
        "those of the queue and the version: {limits:?}"
    );
}

#[tokio::test]
async fn an_operator_holds_a_key_and_ends_the_hold_of_a_worker() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.run(&scripts::COMPLETE_LIMITED, |call| {
        reporting(call, 'a', 1, 3_600_000, 0);
    })
    .await
    .expect("complete");
    assert_eq!(s.lanes().await, lanes(&[]));
    let hold = s.now + 5000;
    let told = tell_own(&s, 0, 1, &[(1, "x", Some((-1, -1, 0, hold)))]).await;
    assert_eq!(told, "1 5000");
    assert_eq!(s.look().await, ("0".into(), "5000".into()));
    s.now = hold;
    s.promote().await;
    assert_eq!(s.claim("w", 1).await.0, "b");
}

#[tokio::test]
async fn a_hold_of_all_keys_ends_those_of_workers() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2)]).await;
    s.enqueue("y", 1, &[('c', 2), ('d', 2)]).await;
    for (letter, grant) in [('a', 1), ('c', 2)] {
        assert_eq!(s.claim("w", 1).await.0, letter.to_string());
        s.run(&scripts::COMPLETE_LIMITED, |call| {
            reporting(call, letter, grant, 3_600_000, 0);
        })
        .await
        .expect("complete");
    }
    assert_eq!(s.lanes().await, lanes(&[]));
    // Other limits of all keys leave the holds.
    let two = Some((2, -1, 0, 0));
    assert_eq!(tell_own(&s, 0, 1, &[(1, "", two)]).await, "1 -1");
    while s.promote().await[1] == "1" {}
    assert_eq!(s.lanes().await, lanes(&[]));
    let over = Some((-1, -1, 0, s.now));
    assert_eq!(tell_own(&s, 1, 2, &[(2, "", over)]).await, "1 -1");
    while s.promote().await[1] == "1" {}
    let (started, _) = s.claim("w", 9).await;
    assert!(started == "bd" || started == "db", "{started}");
    assert_eq!(
        s.read("HGET", "counters", &["limits_unhold"]).await,
        Value::Nil
    );
}

/// What `lua/holds.lua` hands out when the calls up to this one are in SQL: the last call, and per
/// limit key its name (a letter) and the end of its hold.
async fn long_holds(s: &Shard, stored: u64) -> (i64, Vec<(char, i64)>) {
    let mut call = s.f.keys.call(&scripts::HOLDS, Some(s.now));
    call.arg(stored).arg(100);
    let answer = call.run(&mut s.f.redis.conn()).await.expect("holds");
    let Value::Array(answer) = answer else {
        panic!("{answer:?}");
    };
    let [Value::Int(last), Value::BulkString(text)] = &answer[..] else {
        panic!("{answer:?}");
    };
    let holds = LimitHold::read_all(text).expect("whole holds");
    let named = holds
        .iter()
        .map(|hold| (char::from(hold.hash[0]), hold.until_unix_ms));
    (*last, named.collect())
}

#[tokio::test]
async fn a_long_hold_is_handed_out_until_sql_has_it_and_comes_back_with_the_shard() {
    let mut s = Shard::new((1, 1000, 1, 0, 0)).await;
    let tasks = ['a', 'b', 'c'].map(|letter| (letter, 2));
    s.enqueue("x", 1, &tasks).await;
    s.enqueue("y", 1, &[('d', 2), ('e', 2)]).await;
    let report = async |s: &Shard, letter: char, grant: u64, hold: u64| {
        let answer = s.run(&scripts::COMPLETE_LIMITED, |call| {
            reporting(call, letter, grant, hold, 0);
        });
        answer.await.expect("complete");
    };
    assert_eq!(s.claim("w", 9).await.0, "ad");
    report(&s, 'a', 1, 9999).await;
    assert_eq!(long_holds(&s, 0).await, (0, vec![]), "a short one");
    report(&s, 'd', 1, 60_000).await;
    let until = NOW + 60_001;
    for _ in 0..2 {
        assert_eq!(long_holds(&s, 0).await, (1, vec![('y', until)]));
    }
    // An operator ends it before SQL has it.
    let over = Some((-1, -1, 0, s.now));
    tell_own(&s, 0, 1, &[(1, "y", over)]).await;
    let ended = vec![('y', until), ('y', 0)];
    assert_eq!(long_holds(&s, 0).await, (2, ended));
    assert_eq!(long_holds(&s, 1).await, (2, vec![('y', 0)]));
    assert_eq!(long_holds(&s, 2).await, (2, vec![]));
    s.now += 10_000;
    s.promote().await;
    assert_eq!(s.claim("w", 9).await.0, "eb");
    report(&s, 'b', 2, 3_600_000).await;
    let until = s.now + 3_600_001;
    assert_eq!(long_holds(&s, 2).await, (3, vec![('x', until)]));
    assert_eq!(long_holds(&s, 3).await, (3, vec![]));

    // Redis loses the shard, and it opens with what SQL has.
    let opened = s.run(&scripts::OPEN, |call| {
        call.arg(8).arg("").arg("xxxxxxxx");
        let entry = ("", "", -1, until, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0);
        call.arg(rmp_serde::to_vec(&entry).expect("packed"));
    });
    opened.await.expect("open");
    assert_eq!(s.enqueue("x", 1, &[('c', 2)]).await, until);
    assert_eq!(s.enqueue("z", 1, &[('f', 2)]).await, s.now + 1001);
    s.now += 1001;
    s.promote().await;
    assert_eq!(s.claim("w", 9).await.0, "f");
    s.now = until;
    s.promote().await;
    assert_eq!(s.claim("w", 9).await.0, "c");

    // The interval after the loss counts although the hold ends before it.
    let mut s = Shard::new((1, 60_000, 1, 0, 0)).await;
    let opened = s.run(&scripts::OPEN, |call| {
        call.arg(8).arg("").arg("xxxxxxxx");
        let entry = ("", "", -1, NOW + 1000, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0);
        call.arg(rmp_serde::to_vec(&entry).expect("packed"));
    });
    opened.await.expect("open");
    assert_eq!(s.enqueue("x", 1, &[('c', 2)]).await, NOW + 60_001);
    // One without tasks goes when its time is over.
    let opened = s.run(&scripts::OPEN, |call| {
        call.arg(9).arg("").arg("xxxxxxxx");
        let entry = ("", "", -1, NOW + 1000, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0);
        call.arg(rmp_serde::to_vec(&entry).expect("packed"));
    });
    opened.await.expect("open");
    s.now += 60_001;
    while s.promote().await[1] == "1" {}
    assert!(s.entry('x').await.is_none());
    let closing = |call: &mut Call| {
        call.arg(0);
    };
    // It is idle from the first look on.
    assert_eq!(
        s.run(&scripts::CLOSE, closing).await.expect("close")[0],
        "0"
    );
    assert_eq!(
        s.run(&scripts::CLOSE, closing).await.expect("close")[0],
        "-1"
    );
}

#[tokio::test]
async fn a_shard_forgets_the_own_limits_that_sql_does_not_have_any_more() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2)]).await;
    s.enqueue("y", 1, &[('b', 2)]).await;
    s.enqueue("z", 1, &[('c', 2)]).await;
    let none = Some((0, -1, 0, 0));
    let changes = [(6, "x", none), (7, "y", none), (9, "", none)];
    assert_eq!(tell_own(&s, 0, 9, &changes).await, "3 -1");
    while s.promote().await[1] == "1" {}
    assert_eq!(s.claim("w", 9).await.0, "");
    // A caller that knows less: the shard says which version it knows. A call without changes only
    // asks for that.
    let known = async |upto: u64| {
        let asked = s.run(&scripts::OWN_LIMITS, |call| {
            call.arg(0).arg(upto).arg("");
        });
        asked.await.expect("own limits").join(" ")
    };
    assert_eq!(known(5).await, "0 -1 9");
    assert_eq!(known(12).await, "0 -1 9");
    let only = async |version: u64, stay: &[&str]| {
        let asked = s.run(&scripts::OWN_LIMITS, |call| {
            call.arg("only").arg(version).arg("");
            for key in stay {
                call.arg(key.repeat(8));
            }
        });
        asked.await.expect("own limits").join(" ")
    };
    let before = s.f.state().await;
    assert_eq!(only(8, &["x"]).await, "0 -1 9", "it has changed since");
    assert_eq!(s.f.state().await, before);
    assert_eq!(only(9, &["x"]).await, "2 -1 9");
    while s.promote().await[1] == "1" {}
    let (started, _) = s.claim("w", 9).await;
    assert!(started == "bc" || started == "cb", "{started}");
    // It is told all from the beginning.
    assert_eq!(tell_own(&s, 5, 5, &[(3, "x", none)]).await, "-1 -1");
    let one = Some((1, -1, 0, 0));
    assert_eq!(tell_own(&s, 0, 5, &[(3, "x", one)]).await, "1 -1");
    assert_eq!(s.claim("w", 9).await.0, "a");
}

#[tokio::test]
async fn an_own_pace_replaces_that_of_the_queue_and_of_a_worker() {
    let mut s = Shard::new((1, 1000, 1, 0, 0)).await;
    s.enqueue("x", 1, &[('a', 2), ('b', 2), ('c', 2)]).await;
    assert_eq!(
        tell_own(&s, 0, 1, &[(1, "x", Some((-1, 5000, 0, 0)))]).await,
        "1 -1"
    );
    assert_eq!(s.claim("w", 1).await.0, "a");
    s.run(&scripts::COMPLETE_LIMITED, |call| {
        reporting(call, 'a', 1, 0, 60_000);
    })
    .await
    .expect("complete");
    s.now += 5001;
    s.promote().await;
    let (started, next) = s.claim("w", 1).await;
    assert_eq!(started, "b");
    s.complete('b', 2, "w").await;
    assert_eq!(next, Some(s.now + 5001));
}

#[tokio::test]
async fn a_shard_opens_with_own_limits_and_an_interval_in_which_nothing_starts() {
    let mut s = Shard::new((0, 1000, 1, 0, 0)).await;
    let open = |call: &mut Call| {
        let own = |own: Own| rmp_serde::to_vec(&own).expect("packed");
        call.arg(8).arg("");
        call.arg("o")
            .arg(rmp_serde::to_vec(&(9, 2)).expect("packed"));
        call.arg("xxxxxxxxo").arg(own((0, -1, 0, 0)));
        call.arg("yyyyyyyyo").arg(own((-1, 10_000, 0, 0)));
    };
    s.run(&scripts::OPEN, open).await.expect("open");
    assert_eq!(s.enqueue("x", 1, &[('a', 2)]).await, NOW + 1001);
    assert_eq!(s.enqueue("y", 1, &[('b', 2)]).await, NOW + 10_001);
    assert_eq!(s.enqueue("z", 1, &[('c', 2)]).await, NOW + 1001);
    s.now += 1001;
    s.promote().await;
    assert_eq!(s.claim("w", 9).await.0, "c");
    s.now += 9000;
    s.promote().await;
    assert_eq!(s.claim("w", 9).await.0, "b", "a never starts");
    // The shard knows all up to the version with which it opened.
    assert_eq!(tell_own(&s, 0, 9, &[(9, "x", None)]).await, "0 -1");
    assert_eq!(tell_own(&s, 9, 10, &[(10, "x", None)]).await, "1 -1");
    assert_eq!(s.claim("w", 9).await.0, "a");
}

#[tokio::test]
async fn limit_keys_are_listed_by_what_they_do_with_their_names() {
    let mut s = Shard::new((1, 0, 1, 0, 0)).await;
    s.enqueue("x.example", 1, &[('a', 2), ('b', 2)]).await;
    s.enqueue("y.example", 1, &[('c', 2)]).await;
    s.enqueue("z.example", 1, &[('d', 2)]).await;
    assert_eq!(s.claim("w", 2).await.0, "ac");
    s.run(&scripts::COMPLETE_LIMITED, |call| {
        reporting(call, 'c', 1, 5000, 0);
    })
    .await
    .expect("complete");
    let before = s.f.state().await;
    let held = (NOW + 5001).to_string();
    for (state, expected) in [
        (
            "running",
            "0 1000000 xxxxxxxx x.example 1 0 1 0 0 1 0 1".to_owned(),
        ),
        (
            "held",
            format!("0 1000000 yyyyyyyy  0 0 0 {held} {held} 1 0 1"),
        ),
    ] {
        let listed = s
            .run(&scripts::LIMIT_KEYS, |call| {
                call.arg(0).arg(100).arg(state);
            })
            .await
            .expect("limit keys");
        assert_eq!(listed.join(" "), expected);
    }
    let waiting = s.run(&scripts::LIMIT_KEYS, |call| {
        call.arg(0).arg(100).arg("waiting");
    });
    let mut waiting: Vec<_> = waiting.await.expect("limit keys");
    waiting.retain(|value| value.ends_with(".example"));
    assert_eq!(waiting, ["x.example"]);
    let named = s.run(&scripts::LIMIT_KEYS, |call| {
        call.arg("").arg(0).arg("").arg("zzzzzzzz").arg("uuuuuuuu");
    });
    assert_eq!(
        named.await.expect("limit keys").join(" "),
        "0 1000000 zzzzzzzz z.example 0 1 0 0 0 1 0 1 uuuuuuuu  0 0 0 0 0 1 0 1"
    );
    assert_eq!(s.f.state().await, before);
}
