//! The list of final records beside the records, over random histories of tasks that end and are
//! sent again: it has each final task once, and each past end, and at the end nothing is left of
//! any.

use std::collections::BTreeMap;

use proptest::{
    collection::vec,
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use serde_json::Value;
use taskd::redis_pool::{Call, scripts};

use super::{Fixture, body, enqueue::enqueue_bodies, flat, id};

const CASES: usize = 150;
const LETTERS: [char; 3] = ['a', 'b', 'c'];

#[derive(Clone, Debug)]
enum Step {
    /// The task is sent again, and arrives.
    Arrive(char),
    /// It is cancelled in its epoch, or in the next one, which has not arrived.
    Cancel { letter: char, ahead: bool },
    /// Names final records that are due; `young`: those of this moment are not.
    Name { most: u64, young: bool },
    /// Forgets what was named last, as far as the bits say that SQL has it.
    Forget { settled: u8, young: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let letter = || prop::sample::select(&LETTERS[..]);
    vec(
        prop_oneof![
            4 => letter().prop_map(Step::Arrive),
            4 => (letter(), any::<bool>()).prop_map(|(letter, ahead)| Step::Cancel { letter, ahead }),
            2 => (1..6_u64, prop::bool::weighted(0.3)).prop_map(|(most, young)| Step::Name { most, young }),
            2 => (any::<u8>(), prop::bool::weighted(0.3)).prop_map(|(settled, young)| Step::Forget { settled, young }),
        ],
        1..40,
    )
}

/// Where each task is, by its record: its epoch, and how many entries of the list are its own.
struct Shard<'a> {
    f: &'a Fixture,
    offset: u64,
    epochs: BTreeMap<char, u32>,
    named: String,
}

impl Shard<'_> {
    async fn step(&mut self, step: &Step) {
        match *step {
            Step::Arrive(letter) => {
                self.offset += 1;
                let (offset, epoch) = (format!("{}-0", self.offset), self.epochs[&letter] + 1);
                let arrive = |call: &mut Call| {
                    enqueue_bodies(call, 1000, &[(&offset, letter, body(2))]);
                    call.arg(1).arg(1).arg(0).arg("").arg(epoch);
                };
                let answer = flat(
                    self.f
                        .run(&scripts::ENQUEUE, arrive)
                        .await
                        .expect("enqueue"),
                );
                if answer[2] == "1" {
                    self.epochs.insert(letter, epoch);
                }
            }
            Step::Cancel { letter, ahead } => {
                let epoch = self.epochs[&letter] + u32::from(ahead);
                if self.f.cancelled(&[(letter, 1, epoch)]).await[1] == "1" {
                    self.epochs.insert(letter, epoch);
                }
            }
            Step::Name { most, young } => {
                let name = |call: &mut Call| {
                    call.arg(u8::from(young)).arg(most);
                };
                self.named =
                    flat(self.f.run(&scripts::FINALS, name).await.expect("finals")).remove(1);
            }
            Step::Forget { settled, young } => {
                let flags: String = (0..self.named.len())
                    .map(|i| {
                        if settled >> (i % 8) & 1 == 1 {
                            '1'
                        } else {
                            '0'
                        }
                    })
                    .collect();
                let forget = |call: &mut Call| {
                    call.arg(flags)
                        .arg(u8::from(young))
                        .arg(self.named.chars().flat_map(id).collect::<Vec<u8>>());
                };
                self.f.run(&scripts::FORGET, forget).await.expect("forget");
            }
        }
    }

    /// Panics where the list does not have a task as often as its record says.
    async fn check(&self, steps: &[Step]) {
        let state = self.f.state().await;
        let values = |key: &str| state.get(key).cloned().unwrap_or_default();
        for letter in LETTERS {
            let records = values("records");
            let record = records
                .iter()
                .find_map(|record| record.strip_prefix(&format!("{letter}=")));
            let record: Option<Value> = record.and_then(|record| serde_json::from_str(record).ok());
            let own = record.map_or(0, |t| t[12].as_u64().unwrap_or(0) + u64::from(t[0] != "L"));
            let listed = values("finals")
                .iter()
                .filter(|entry| **entry == letter.to_string())
                .count();
            assert_eq!(listed as u64, own, "{letter} in {state:?} after {steps:?}");
        }
    }
}

#[tokio::test]
async fn forget_counts_down_each_of_two_past_ends_of_a_task() {
    let f = Fixture::new().await;
    // Between the naming and the forgetting it was sent again twice: ["L", 1, 0, [], [], [], 0, 0,
    // [], [], 2, false, 2]
    let record = rmp_serde::to_vec(&serde_json::json!([
        "L",
        1,
        0,
        [],
        [],
        [],
        0,
        0,
        [],
        [],
        2,
        false,
        2
    ]));
    f.seed("HSET", "records", &[&id('a'), &record.expect("packed")])
        .await;
    f.seed("RPUSH", "finals", &[&id('a'), &id('a')]).await;
    let forget = |call: &mut Call| {
        call.arg("11").arg(0).arg([id('a'), id('a')].concat());
    };
    assert_eq!(
        flat(f.run(&scripts::FORGET, forget).await.expect("forget")),
        ["0"]
    );
    let state = f.state().await;
    assert_eq!(state["records"], [r#"a=["L",1,0,[],[],[],0,0,[],[],2]"#]);
    assert_eq!(state.get("finals"), None);
}

#[tokio::test]
async fn the_list_has_each_final_task_once_and_each_past_end_until_all_are_gone() {
    let f = Fixture::new().await;
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[11; 32]);
    let mut runner = TestRunner::new_with_rng(
        Config {
            failure_persistence: None,
            ..Config::default()
        },
        rng,
    );
    let (mut most_past, forget_all) = (
        0,
        Step::Forget {
            settled: 255,
            young: false,
        },
    );
    for _ in 0..CASES {
        let steps = steps().new_tree(&mut runner).expect("steps").current();
        let _: () = redis::cmd("FLUSHALL")
            .query_async(&mut f.redis.conn())
            .await
            .expect("flush");
        f.seed("SET", "generation", &[b"7"]).await;
        let epochs = LETTERS.map(|letter| (letter, 0)).into();
        let mut shard = Shard {
            f: &f,
            offset: 0,
            epochs,
            named: String::new(),
        };
        for step in &steps {
            shard.step(step).await;
            shard.check(&steps).await;
            most_past = most_past.max(f.state().await.get("finals").map_or(0, Vec::len));
        }
        for letter in LETTERS {
            shard
                .step(&Step::Cancel {
                    letter,
                    ahead: false,
                })
                .await;
        }
        // Each look drops the past ends of its page, and each pair forgets one task at least.
        for _ in 0..=steps.len() + LETTERS.len() {
            shard
                .step(&Step::Name {
                    most: 2,
                    young: false,
                })
                .await;
            shard.step(&forget_all).await;
        }
        let state = f.state().await;
        assert!(
            !state.contains_key("finals") && !state.contains_key("records"),
            "{state:?} after {steps:?}"
        );
    }
    assert!(
        most_past > 2 * LETTERS.len(),
        "the histories are too simple: {most_past}"
    );
}
