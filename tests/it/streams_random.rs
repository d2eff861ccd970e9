//! Random histories of sessions beside a small model: taskd never sends more than the demand, the
//! demand is never another than what was granted less what was sent and surrendered, and after the
//! end of all sessions nothing is left.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::json;
use taskd::wire::pb::{self, ItemStatus};

use crate::support::{
    daemon::Daemon,
    session::{Worker, completion, long_opening as opening, seconds},
    until,
};

const CONFIG: &str =
    "max_session_tasks = 12\n[queues.q]\nlease = \"10m\"\nbackoff = [\"0s\"]\nmax_attempts = 1000";
const WORKERS: [&str; 3] = ["ann", "bob", "cat"];
const SLOTS: usize = 5;

#[derive(Clone, Debug)]
enum Step {
    Insert(usize),
    /// Closes what is in the slot, and opens a session there.
    Open {
        slot: usize,
        worker: usize,
        want: u32,
        takeover: bool,
    },
    Want {
        slot: usize,
        want: u32,
        surrender: bool,
    },
    /// Waits a little for tasks, and completes some.
    Complete {
        slot: usize,
        most: usize,
        want: u32,
    },
    Start {
        slot: usize,
        most: usize,
    },
    Reject {
        slot: usize,
        most: usize,
    },
    /// Cuts the stream and goes on with the session; keeps so many tasks.
    Resume {
        slot: usize,
        keep: usize,
        want: u32,
    },
    Close {
        slot: usize,
    },
    /// Its worker is killed, and does not come back.
    Vanish {
        slot: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let slot = || 0..SLOTS;
    let step = prop_oneof![
        2 => (1..8_usize).prop_map(Step::Insert),
        3 => (slot(), 0..WORKERS.len(), 0..6_u32, prop::bool::weighted(0.2))
            .prop_map(|(slot, worker, want, takeover)| Step::Open { slot, worker, want, takeover }),
        3 => (slot(), 0..20_u32, any::<bool>())
            .prop_map(|(slot, want, surrender)| Step::Want { slot, want, surrender }),
        5 => (slot(), 1..6_usize, 0..6_u32).prop_map(|(slot, most, want)| Step::Complete { slot, most, want }),
        1 => (slot(), 1..4_usize).prop_map(|(slot, most)| Step::Start { slot, most }),
        1 => (slot(), 1..4_usize).prop_map(|(slot, most)| Step::Reject { slot, most }),
        2 => (slot(), 0..4_usize, 0..6_u32).prop_map(|(slot, keep, want)| Step::Resume { slot, keep, want }),
        1 => slot().prop_map(|slot| Step::Close { slot }),
        1 => slot().prop_map(|slot| Step::Vanish { slot }),
    ];
    prop::collection::vec(step, 1..40)
}

/// A stream with what the worker knows.
struct Slot {
    name: &'static str,
    worker: Worker,
    /// Granted, less what was surrendered.
    granted: u32,
    received: u32,
    in_hand: Vec<pb::LeasedTask>,
}

impl Slot {
    async fn open(daemon: &Daemon, name: &'static str, open: pb::OpenSession) -> Self {
        let worker = Worker::open(daemon.grpc_port(), open).await.unwrap();
        let granted = worker.opened.granted;
        Self {
            name,
            worker,
            granted,
            received: 0,
            in_hand: Vec::new(),
        }
    }

    /// Sends a frame, and checks the demand behind its answer. `None`: the session was taken over.
    async fn ask(&mut self, frame: pb::WorkerFrame) -> Option<pb::FrameAnswer> {
        let answer = match self.worker.ask(frame).await {
            Ok(answer) => answer,
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::Aborted, "{status}");
                return None;
            }
        };
        let came: Vec<_> = self.worker.tasks.drain(..).collect();
        self.received += u32::try_from(came.len()).unwrap();
        self.in_hand.extend(came);
        self.granted += answer.granted;
        self.granted -= answer.surrendered;
        let demand = self
            .granted
            .checked_sub(self.received)
            .expect("no more tasks than the demand");
        assert_eq!(self.worker.demand, demand, "of {}", self.name);
        assert!(
            self.in_hand.len() + demand as usize <= 12,
            "{} and {demand}",
            self.in_hand.len()
        );
        Some(answer)
    }
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
                let open = pb::OpenSession {
                    takeover,
                    ..opening(name, want)
                };
                let opened = Slot::open(self.daemon, name, open).await;
                if takeover {
                    let others: Vec<_> = self
                        .slots
                        .extract_if(.., |_, other| other.name == name)
                        .collect();
                    for (_, other) in others {
                        assert_eq!(
                            other.worker.end().await.unwrap_err().code(),
                            tonic::Code::Aborted
                        );
                    }
                }
                self.slots.insert(slot, opened);
            }
            Step::Want {
                slot,
                want,
                surrender,
            } => {
                let slot = self.used(slot);
                let Some(slot) = self.slots.get_mut(&slot) else {
                    return;
                };
                slot.ask(pb::WorkerFrame {
                    want,
                    surrender,
                    ..Default::default()
                })
                .await
                .expect("not taken over");
            }
            Step::Complete { slot, most, want } => {
                let slot = self.used(slot);
                let Some(slot) = self.slots.get_mut(&slot) else {
                    return;
                };
                // There may be none for it.
                for _ in 0..50 {
                    if slot.in_hand.is_empty() && slot.worker.demand > 0 {
                        slot.ask(pb::WorkerFrame::default())
                            .await
                            .expect("not taken over");
                    }
                }
                let most = most.min(slot.in_hand.len());
                let tasks: Vec<_> = slot.in_hand.drain(..most).collect();
                let completions = tasks.iter().map(completion).collect();
                let frame = pb::WorkerFrame {
                    completions,
                    want,
                    ..Default::default()
                };
                let answer = slot.ask(frame).await.expect("not taken over");
                for (task, result) in tasks.iter().zip(&answer.completions) {
                    assert_eq!(result.status(), ItemStatus::Ok, "{result:?}");
                    assert!(
                        self.completed.insert(task.id.clone()),
                        "{} was completed twice",
                        task.id
                    );
                }
            }
            Step::Start { slot, most } => {
                let slot = self.used(slot);
                let Some(slot) = self.slots.get_mut(&slot) else {
                    return;
                };
                let started = slot
                    .in_hand
                    .iter()
                    .take(most)
                    .map(|task| task.id.clone())
                    .collect();
                slot.ask(pb::WorkerFrame {
                    started,
                    ..Default::default()
                })
                .await
                .expect("not taken over");
            }
            Step::Reject { slot, most } => {
                let slot = self.used(slot);
                let Some(slot) = self.slots.get_mut(&slot) else {
                    return;
                };
                let most = most.min(slot.in_hand.len());
                let rejection = |task: pb::LeasedTask| pb::Rejection {
                    id: task.id,
                    lease_token: task.lease_token,
                    ..Default::default()
                };
                let rejections = slot.in_hand.drain(..most).map(rejection).collect();
                let frame = pb::WorkerFrame {
                    rejections,
                    ..Default::default()
                };
                let answer = slot.ask(frame).await.expect("not taken over");
                assert!(
                    answer
                        .rejections
                        .iter()
                        .all(|result| result.status() == ItemStatus::Ok),
                    "{answer:?}"
                );
            }
            Step::Resume { slot, keep, want } => {
                let slot = self.used(slot);
                let Some(Slot {
                    name,
                    worker,
                    mut in_hand,
                    ..
                }) = self.slots.remove(&slot)
                else {
                    return;
                };
                in_hand.truncate(keep);
                let (session, holding) = (
                    worker.opened.session.clone(),
                    in_hand.iter().map(|t| t.id.clone()).collect(),
                );
                drop(worker);
                let open = pb::OpenSession {
                    session,
                    holding,
                    ..opening(name, want)
                };
                let resumed = Slot::open(self.daemon, name, open).await;
                // A session with nothing in hand is not kept.
                assert!(resumed.worker.opened.resumed || in_hand.is_empty());
                self.slots.insert(slot, Slot { in_hand, ..resumed });
            }
            Step::Close { slot } => self.close(slot).await,
            Step::Vanish { slot } => {
                let Some(Slot {
                    name,
                    worker,
                    in_hand,
                    ..
                }) = self.slots.remove(&slot)
                else {
                    return;
                };
                let session = worker.opened.session.clone();
                let holding = in_hand.iter().map(|task| task.id.clone()).collect();
                drop(worker);
                // With a short time-out: what it had in hand comes back soon.
                let timeout = seconds(2);
                let open = pb::OpenSession {
                    session,
                    holding,
                    timeout,
                    ..opening(name, 3)
                };
                drop(Slot::open(self.daemon, name, open).await);
            }
        }
    }

    async fn close(&mut self, slot: usize) {
        if let Some(slot) = self.slots.remove(&slot) {
            slot.worker.close().await;
        }
    }
}

#[test]
fn random_sessions_get_no_more_than_they_want_and_leave_nothing() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut daemon = runtime.block_on(Daemon::start(CONFIG, &[]));
    let config = Config {
        cases: 24,
        failure_persistence: None,
        max_shrink_iters: 0,
        ..Config::default()
    };
    let state = std::cell::RefCell::new((0, BTreeSet::new()));
    TestRunner::new(config)
        .run(&steps(), |steps| {
            runtime.block_on(async {
                let (inserted, completed) = state.take();
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
                state.replace((run.inserted, run.completed));
            });
            Ok(())
        })
        .unwrap();
    let (inserted, completed) = state.into_inner();
    runtime.block_on(async {
        until("no lease is left", async || {
            daemon.queue("q").await["leases"].as_u64() == Some(0)
        })
        .await;
        // Whatever was not completed is still there, each task once.
        let drained = daemon.drain("last", "q").await;
        assert_eq!(drained.len() + completed.len(), inserted);
        assert!(
            completed.len() > inserted / 20,
            "the sessions did {} of {inserted}",
            completed.len()
        );
        // A grant that did not arrive is known as undelivered until its lease would have run out;
        // it names nobody. A session that vanished without a task has its place until it is silent
        // for too long.
        until("no lease, no pointer and no session is left", async || {
            let keys: Vec<String> = redis::cmd("KEYS")
                .arg("*")
                .query_async(&mut daemon.redis().await)
                .await
                .unwrap();
            let names = |key: &String| WORKERS.iter().any(|worker| key.contains(worker));
            !keys
                .iter()
                .any(|key| names(key) || key.ends_with(":leases") || key.ends_with(":P"))
        })
        .await;
        let metrics = reqwest::get(format!("{}/metrics", daemon.http()))
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        let open = metrics
            .lines()
            .find_map(|line| line.strip_prefix("taskd_sessions_open_sessions "));
        assert_eq!(open, Some("0"), "no session is left");
        assert!(daemon.stop().await.success());
    });
}
