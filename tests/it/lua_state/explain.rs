//! The script that tells where a task is and why a worker may not get it; and that claim decides by
//! the same reason.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use taskd::redis_pool::{Call, scripts};

use super::{Fixture, NOW, body, claim::claim, element, flat, id, lease};

pub(super) fn explain(letter: char, worker: &'static str) -> impl FnOnce(&mut Call) {
    move |call| {
        call.arg(id(letter)).arg(worker).arg(2).arg(100);
    }
}

impl Fixture {
    async fn explained(&self, letter: char, worker: &'static str) -> Vec<String> {
        flat(
            self.run(&scripts::EXPLAIN, explain(letter, worker))
                .await
                .expect("explain"),
        )
    }
}

#[tokio::test]
async fn explain_shows_a_task_with_its_leases_and_failures_and_changes_nothing() {
    let f = Fixture::new().await;
    f.seed("SET", "offset", &[b"topic/4-0"]).await;
    f.seed("XADD", "outbox", &[b"*", b"c", b"report"]).await;
    f.seed("HSET", "counters", &[b"outbox_bytes", b"6"]).await;
    // u has completed it, w and v hold it, one replica is in backoff, and x has failed it for good.
    let failed = json!([
        "L",
        5,
        3,
        ["9"],
        ["u", "1"],
        ["w", "2", "v", "3"],
        0,
        2,
        ["x", -1],
        [NOW, "x", "no luck"]
    ]);
    f.seed("HSET", "records", &[&id('a'), &packed(&failed)])
        .await;
    f.seed(
        "ZADD",
        "leases",
        &[(NOW + 5).to_string().as_bytes(), &lease('a', 2)],
    )
    .await;
    // The second was extended, so its beginning is not known.
    f.seed("ZADD", "leases", &[b"1000006.5", &lease('a', 3)])
        .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    f.seed(
        "ZADD",
        "undelivered",
        &[(NOW + 7).to_string().as_bytes(), b"3"],
    )
    .await;
    f.seed(
        "ZADD",
        "delayed",
        &[(NOW + 60).to_string().as_bytes(), &lease('a', 9)],
    )
    .await;
    // Its newest offer is in the retry lane, behind two others; w has passed one of them.
    f.seed(
        "LPUSH",
        "mr:T",
        &[
            &element(5, 1, 'a'),
            &element(1, 1, 'b'),
            &element(5, 2, 'a'),
        ],
    )
    .await;
    f.seed("SET", "mr:C", &[b"10"]).await;
    f.seed("HSET", "mr:P", &[b"w", b"11"]).await;
    let before = f.state().await;

    let now = NOW.to_string();
    let (first, second, due) = (
        (NOW + 5).to_string(),
        (NOW + 7).to_string(),
        (NOW + 60).to_string(),
    );
    let shard = [&now, "topic/4-0", "1", "6", "2"];
    let began = (NOW + 5 - 30_000).to_string();
    let held = ["w", &first, "0", &began, "v", &second, "1", "-1"];
    let task = [
        &["L", "5", "3", "1", "0", "0", "u"],
        &held[..],
        &[&due, &now, "x", "no luck"],
    ]
    .concat();
    for (worker, bar, ahead) in [
        ("w", "holds", "1"),
        ("u", "completed", "2"),
        ("x", "refused", "2"),
        ("n", "", "2"),
        ("", "", "2"),
    ] {
        let expected = [&shard[..], &task, &[bar, "2", ahead]].concat();
        assert_eq!(f.explained('a', worker).await, expected, "for {worker}");
    }
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn explain_of_a_task_without_a_record_tells_of_the_shard() {
    let f = Fixture::new().await;
    f.seed("HSET", "records", &[&id('a'), b"\xc1"]).await;
    let before = f.state().await;
    for letter in ['a', 'b'] {
        assert_eq!(
            f.explained(letter, "w").await,
            [&NOW.to_string()[..], "", "0", "0", "0", "0"]
        );
    }
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn explain_finds_a_place_within_its_bound_only() {
    let f = Fixture::new().await;
    f.waiting('a', 1, b"1").await;
    let others = vec![element(1, 0, 'x'); 150];
    f.seed(
        "LPUSH",
        "m:T",
        &others.iter().map(Vec::as_slice).collect::<Vec<_>>(),
    )
    .await;
    f.waiting('b', 1, b"1").await;
    let place = async |letter| f.explained(letter, "w").await.split_off(11);
    assert_eq!(place('a').await, ["", "0", "0"]);
    assert_eq!(place('b').await, ["", "-1", "-1"]);
    // Claims look at the retry lane first.
    f.seed(
        "LPUSH",
        "mr:T",
        &[
            &element(1, 1, 'x'),
            &element(1, 1, 'y'),
            &element(1, 1, 'z'),
        ],
    )
    .await;
    f.seed("SET", "mr:C", &[b"5"]).await;
    f.seed("HSET", "mr:P", &[b"w", b"7"]).await;
    assert_eq!(place('a').await, ["", "3", "1"]);
}

#[tokio::test]
async fn explain_finds_a_task_that_was_sent_again_in_the_lane_of_new_ones() {
    let f = Fixture::new().await;
    let sent_again = json!(["L", 1, 0, [], [], [], 0, 1, [], [], 1]);
    f.seed("HSET", "records", &[&id('a'), &packed(&sent_again)])
        .await;
    f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
    f.seed("LPUSH", "m:T", &[&element(1, 0, 'x'), &element(1, 1, 'a')])
        .await;
    f.seed("LPUSH", "mr:T", &[&element(1, 1, 'y'), &element(1, 1, 'z')])
        .await;
    f.seed("HSET", "mr:P", &[b"w", b"1"]).await;
    assert_eq!(f.explained('a', "w").await[11..], ["", "3", "2"]);
}

/// The states of one worker in a record.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Nothing,
    Credited,
    Held,
    FailedOnce,
    Refused,
}
use Part::{Credited, FailedOnce, Held, Nothing, Refused};

pub(super) fn packed(record: &Json) -> Vec<u8> {
    rmp_serde::to_vec(record).expect("JSON can be packed")
}

/// The forms of a live record: msgpack, and text if it has one. With the newest offer.
fn forms(num: usize, parts: [(&str, Part); 3], waits: &[&str]) -> Option<(Vec<Vec<u8>>, u8)> {
    let of = |wanted: Part| {
        parts
            .iter()
            .filter(move |(_, part)| *part == wanted)
            .map(|(name, _)| *name)
    };
    let (held, credited) = (of(Held).count(), of(Credited).count());
    let is_scheduled = waits == [""];
    let waiting = if is_scheduled { 0 } else { waits.len() };
    if held + credited + waiting > num || credited == num || is_scheduled && held > 0 {
        return None;
    }
    let with_grant = |wanted| of(wanted).flat_map(|name| [name, "1"]).collect::<Vec<_>>();
    let failed: Vec<Json> = of(FailedOnce)
        .flat_map(|name| [json!(name), json!(1)])
        .collect();
    let refused = of(Refused).flat_map(|name| [json!(name), json!(-1)]);
    let failed: Vec<Json> = failed.into_iter().chain(refused).collect();
    let offer = u8::from(!failed.is_empty());
    if num == 1 && offer > 0 {
        // Of a task for one worker, nobody keeps who failed.
        return None;
    }
    let fails = failed.len() / 2;
    let long = json!([
        "L",
        num,
        fails,
        waits,
        with_grant(Credited),
        with_grant(Held),
        0,
        offer,
        failed,
        []
    ]);
    let mut forms = vec![packed(&long)];
    if fails == 0 && waits.is_empty() {
        let entries: String = of(Credited).map(|name| format!("{name}\tc1\n")).collect();
        let entries = entries
            + &of(Held)
                .map(|name| format!("{name}\th1\n"))
                .collect::<String>();
        let numbers = [num, held, credited].map(|number| u8::try_from(number).expect("few"));
        forms.push(match (held + credited, num) {
            (0, _) => num.to_string().into_bytes(),
            (_, 1) => format!("h1:{}", of(Held).next().expect("one holds it")).into_bytes(),
            _ => [b"m", &numbers[..], b"\n", entries.as_bytes()].concat(),
        });
    }
    Some((forms, offer))
}

#[tokio::test]
async fn claim_gives_a_task_exactly_where_explain_knows_no_reason_against_it() {
    let f = Fixture::new().await;
    let states = [Nothing, Credited, Held, FailedOnce, Refused];
    let (mut records, mut reasons) = (0, BTreeMap::<String, usize>::new());
    for (num, of_three) in (1..=3).flat_map(|num| (0..125).map(move |of_three| (num, of_three))) {
        let [a, b, c] = [of_three / 25, of_three / 5 % 5, of_three % 5].map(|state| states[state]);
        for waits in [&[][..], &["9"], &[""]] {
            let parts = [("a", a), ("b", b), ("c", c)];
            let Some((forms, offer)) = forms(num, parts, waits) else {
                continue;
            };
            let mut of_forms = Vec::new();
            for record in forms {
                records += 1;
                of_forms.push([
                    f.agree(num, &record, offer, "a").await,
                    f.agree(num, &record, offer, "n").await,
                ]);
            }
            assert!(
                of_forms.windows(2).all(|pair| pair[0] == pair[1]),
                "{num} {parts:?} {waits:?}: {of_forms:?}"
            );
            of_forms
                .into_iter()
                .flatten()
                .for_each(|reason| *reasons.entry(reason).or_default() += 1);
        }
    }
    for ended in [
        &b"f5:1:a"[..],
        b"e\x025\na\tc1\nb\tc1\n",
        &packed(&json!(["D", 1, 5, [], [], [], 5])),
    ] {
        let is_credited = ended[0] != 0x97;
        assert_eq!(
            f.agree(1, ended, 0, "a").await,
            if is_credited { "completed" } else { "final" }
        );
        assert_eq!(f.agree(1, ended, 0, "n").await, "final");
    }
    println!("{records} records: {reasons:?}");
    let all = [
        "",
        "backoff",
        "completed",
        "holds",
        "leased",
        "refused",
        "scheduled",
    ];
    assert_eq!(
        reasons.keys().collect::<Vec<_>>(),
        all,
        "every reason was met"
    );
}

#[tokio::test]
async fn claim_and_explain_agree_about_reservations() {
    let f = Fixture::new().await;
    let mut reasons = BTreeMap::<String, usize>::new();
    for (num, reserved) in [(1, "a"), (1, "n"), (2, "a"), (2, "n")] {
        for (credited, held) in [("", ""), ("a", ""), ("b", ""), ("", "a"), ("", "b")] {
            let pair = |name: &str| {
                if name.is_empty() {
                    json!([])
                } else {
                    json!([name, "1"])
                }
            };
            if num == 1 && !credited.is_empty() {
                continue;
            }
            let record = json!([
                "L",
                num,
                0,
                [],
                pair(credited),
                pair(held),
                0,
                1,
                [],
                [],
                0,
                [reserved, NOW + 9]
            ]);
            for worker in ["a", "n"] {
                let reason = f.agree(num, &packed(&record), 1, worker).await;
                assert!(
                    worker == reserved || !reason.is_empty(),
                    "{record} for {worker}: {reason:?}"
                );
                *reasons.entry(reason).or_default() += 1;
            }
        }
    }
    assert_eq!(
        reasons.keys().collect::<Vec<_>>(),
        ["", "completed", "holds", "leased", "reserved"]
    );
}

impl Fixture {
    /// Explains the task with this record, then lets the worker claim it. Answers the reason
    /// against it.
    async fn agree(&self, num: usize, record: &[u8], offer: u8, worker: &'static str) -> String {
        for key in [
            "leases",
            "undelivered",
            "counters",
            "m:C",
            "m:P",
            "mr:C",
            "mr:P",
            "m:T",
            "mr:T",
        ] {
            self.seed("DEL", key, &[]).await;
        }
        self.seed("HSET", "records", &[&id('t'), record]).await;
        self.seed("HSET", "bodies", &[&id('t'), &body(2)]).await;
        let lane = if offer > 0 { "mr:T" } else { "m:T" };
        self.seed(
            "LPUSH",
            lane,
            &[&element(u8::try_from(num).expect("few"), offer, 't')],
        )
        .await;
        let explained = self.explained('t', worker).await;
        // An array of twelve ends with a reservation: its worker and its end.
        let reservation = if record.first() == Some(&0x9c) { 2 } else { 0 };
        let bar = explained[explained.len() - 3 - reservation].clone();
        let claimed = flat(
            self.run(&scripts::CLAIM, |call| claim(call, &[(worker, 1)]))
                .await
                .expect("claim"),
        );
        let is_given = claimed.len() > 2;
        assert_eq!(
            is_given,
            bar.is_empty(),
            "{} for {worker}: {bar:?}, {claimed:?}",
            String::from_utf8_lossy(record)
        );
        bar
    }
}
