//! Random histories of sessions without streams beside a small model. One process serves them, so
//! the model knows exactly what each call is granted, wants and has; and after the end of all
//! sessions nothing is left.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};
use serde_json::{Value, json};

use crate::{
    shared_sessions::{Session, keys, leases},
    support::{daemon::Daemon, until},
};

const CONFIG: &str = "max_session_tasks = 7\nmax_worker_tasks = 10\n[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]\n\
                      max_attempts = 1000";
const WORKERS: [&str; 2] = ["ann", "bob"];
const SLOTS: usize = 4;

#[derive(Clone, Debug)]
enum Step {
    Insert(usize),
    /// Closes what is in the slot, and opens a session there.
    Open {
        slot: usize,
        worker: usize,
        want: usize,
        takeover: bool,
    },
    Want {
        slot: usize,
        want: usize,
    },
    Surrender(usize),
    /// Completes, rejects and starts some of its tasks, and reports the completions twice.
    Report {
        slot: usize,
        completed: usize,
        rejected: usize,
        started: usize,
    },
    /// Goes on with the session, with so many tasks.
    GoOn {
        slot: usize,
        keep: usize,
        want: usize,
    },
    Close(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let slot = || 0..SLOTS;
    let step = prop_oneof![
        2 => (1..6_usize).prop_map(Step::Insert),
        3 => (slot(), 0..WORKERS.len(), 0..9_usize, prop::bool::weighted(0.2))
            .prop_map(|(slot, worker, want, takeover)| Step::Open { slot, worker, want, takeover }),
        5 => (slot(), 0..9_usize).prop_map(|(slot, want)| Step::Want { slot, want }),
        1 => slot().prop_map(Step::Surrender),
        4 => (slot(), 0..5_usize, 0..2_usize, 0..2_usize)
            .prop_map(|(slot, completed, rejected, started)| Step::Report { slot, completed, rejected, started }),
        1 => (slot(), 0..4_usize, 0..4_usize).prop_map(|(slot, keep, want)| Step::GoOn { slot, keep, want }),
        1 => slot().prop_map(Step::Close),
    ];
    prop::collection::vec(step, 1..40)
}

struct Slot {
    name: &'static str,
    session: Session,
    demand: usize,
    in_hand: Vec<Value>,
}

struct Run<'a> {
    daemon: &'a Daemon,
    slots: BTreeMap<usize, Slot>,
    inserted: usize,
    completed: BTreeSet<String>,
}

impl Run<'_> {
    /// This slot, or the next one that has a session.
    fn used(&self, slot: usize) -> usize {
        self.slots
            .range(slot..)
            .chain(&self.slots)
            .next()
            .map_or(slot, |(used, _)| *used)
    }

    /// The part of a wish that a session may be granted.
    fn room(&self, name: &str, slot: Option<usize>, want: usize) -> usize {
        let taken = |slot: &Slot| slot.demand + slot.in_hand.len();
        let of_worker: usize = self
            .slots
            .values()
            .filter(|slot| slot.name == name)
            .map(taken)
            .sum();
        let own = slot.and_then(|slot| self.slots.get(&slot)).map_or(0, taken);
        want.min(7 - own).min(10 - of_worker)
    }

    async fn open(&mut self, slot: usize, name: &'static str, mut more: Value) -> Value {
        // No slow machine lets it time out.
        more["timeout"] = json!("10m");
        let (session, opened) = Session::open(self.daemon, name, more).await;
        let demand = usize::try_from(opened["granted"].as_u64().unwrap()).unwrap();
        let in_hand = self
            .slots
            .remove(&slot)
            .map(|before| before.in_hand)
            .unwrap_or_default();
        self.slots.insert(
            slot,
            Slot {
                name,
                session,
                demand,
                in_hand,
            },
        );
        opened
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Insert(count) => {
                let task = |n: usize| json!({"queue": "q", "key": format!("key-{n}")});
                let tasks: Vec<_> = (self.inserted..self.inserted + count).map(task).collect();
                self.daemon.insert(&tasks).await;
                self.inserted += count;
            }
            Step::Open {
                slot,
                worker,
                want,
                takeover,
            } => {
                self.close(slot).await;
                let name = WORKERS[worker];
                if takeover {
                    self.slots.retain(|_, other| other.name != name);
                }
                let granted = self.room(name, None, want);
                let opened = self
                    .open(slot, name, json!({"want": want, "takeover": takeover}))
                    .await;
                assert_eq!(
                    (&opened["granted"], &opened["resumed"]),
                    (&json!(granted), &json!(false))
                );
            }
            Step::Want { slot, want } => {
                let slot = self.used(slot);
                let Some(name) = self.slots.get(&slot).map(|slot| slot.name) else {
                    return;
                };
                let granted = self.room(name, Some(slot), want);
                let Some(slot) = self.slots.get_mut(&slot) else {
                    return;
                };
                // A task that has come to the queue may need a moment.
                let answer = slot
                    .session
                    .call(self.daemon, "want", json!({"want": want, "wait": "50ms"}))
                    .await;
                slot.demand += granted;
                let tasks: Vec<Value> = serde_json::from_value(answer["tasks"].clone()).unwrap();
                assert!(
                    tasks.len() <= slot.demand,
                    "never more than it wants: {answer}"
                );
                slot.demand -= tasks.len();
                slot.in_hand.extend(tasks);
                let (demand, in_hand) = (slot.demand, slot.in_hand.len());
                let said =
                    ["granted", "demand", "in_hand"].map(|name| answer[name].as_u64().unwrap());
                assert_eq!(
                    said.map(|n| usize::try_from(n).unwrap()),
                    [granted, demand, in_hand]
                );
            }
            Step::Surrender(slot) => {
                let slot = self.used(slot);
                let Some(slot) = self.slots.get_mut(&slot) else {
                    return;
                };
                let answer = slot.session.call(self.daemon, "surrender", json!({})).await;
                assert_eq!(
                    answer,
                    json!({"surrendered": slot.demand, "in_hand": slot.in_hand.len()})
                );
                slot.demand = 0;
            }
            Step::Report {
                slot,
                completed,
                rejected,
                started,
            } => {
                let slot = self.used(slot);
                let Some(slot) = self.slots.get_mut(&slot) else {
                    return;
                };
                let mut some = |most: usize| -> Vec<Value> {
                    let most = most.min(slot.in_hand.len());
                    slot.in_hand.drain(..most).collect()
                };
                let (done, back) = (some(completed), some(rejected));
                let started: Vec<_> = slot
                    .in_hand
                    .iter()
                    .take(started)
                    .map(|task| task["id"].clone())
                    .collect();
                let report = json!({"completions": leases(&done), "rejections": leases(&back), "started": started.clone()});
                let answer = slot.session.call(self.daemon, "report", report).await;
                let (counted, in_hand) = (done.len() + back.len(), slot.in_hand.len());
                let said =
                    ["counted", "demand", "in_hand"].map(|name| answer[name].as_u64().unwrap());
                assert_eq!(
                    said.map(|n| usize::try_from(n).unwrap()),
                    [counted, slot.demand, in_hand]
                );
                for (place, task) in done.iter().enumerate() {
                    assert_eq!(answer["completions"][place]["status"], "OK");
                    let id = task["id"].as_str().unwrap().to_owned();
                    assert!(self.completed.insert(id), "{task} was completed twice");
                }
                let again = slot
                    .session
                    .call(self.daemon, "report", json!({"completions": leases(&done)}))
                    .await;
                assert_eq!(again["counted"], 0);
            }
            Step::GoOn { slot, keep, want } => {
                let slot = self.used(slot);
                let Some(Slot {
                    name,
                    session,
                    demand,
                    in_hand,
                }) = self.slots.get_mut(&slot)
                else {
                    return;
                };
                in_hand.truncate(keep);
                *demand = 0;
                let holding: Vec<_> = in_hand.iter().map(|task| task["id"].clone()).collect();
                let (name, more) = (
                    *name,
                    json!({"session": session.id(), "holding": holding, "want": want}),
                );
                let granted = self.room(name, Some(slot), want);
                let opened = self.open(slot, name, more).await;
                assert_eq!(
                    (&opened["granted"], &opened["resumed"]),
                    (&json!(granted), &json!(true))
                );
            }
            Step::Close(slot) => self.close(slot).await,
        }
    }

    async fn close(&mut self, slot: usize) {
        let Some(Slot {
            session, in_hand, ..
        }) = self.slots.remove(&slot)
        else {
            return;
        };
        let closed = session.call(self.daemon, "close", json!({})).await;
        let ended = closed["offered"].as_u64().unwrap() + closed["failed"].as_u64().unwrap();
        assert_eq!(usize::try_from(ended).unwrap(), in_hand.len(), "{closed}");
    }
}

#[tokio::test]
async fn sessions_without_streams_are_as_their_model() {
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::default()
    });
    let (mut inserted, mut completed) = (0, BTreeSet::new());
    for _ in 0..15 {
        let steps = steps().new_tree(&mut runner).unwrap().current();
        println!("{steps:?}");
        let mut run = Run {
            daemon: &daemon,
            slots: BTreeMap::new(),
            inserted,
            completed,
        };
        for step in steps {
            run.step(step).await;
        }
        for slot in 0..SLOTS {
            run.close(slot).await;
        }
        (inserted, completed) = (run.inserted, run.completed);
        assert_eq!(keys(&daemon).await, Vec::<String>::new());
    }
    assert!(
        completed.len() > inserted / 20,
        "the sessions did {} of {inserted}",
        completed.len()
    );
    let rest = daemon
        .lease_all("last", "q", inserted - completed.len())
        .await;
    for some in rest.chunks(1000) {
        assert!(
            daemon
                .complete("last", some)
                .await
                .iter()
                .all(|status| status == "OK")
        );
    }
    until("SQL has all reports", async || {
        daemon.unfinished("q").await == 0
    })
    .await;
    assert!(daemon.stop().await.success());
}
