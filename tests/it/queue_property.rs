//! The queue beside a small model: random histories step by step, the shortest history of each
//! rule, and many workers at once.
//!
//! In the model a worker may claim each open task that it neither holds nor was credited with. A
//! worker that asks gets all of these, wherever the pointers are. Nothing sleeps: true deadlines
//! are an hour off, and a step makes time pass by writing a score into the past.

#[path = "queue_property/checked.rs"]
mod checked;
#[path = "queue_property/model.rs"]
mod model;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use taskd::{
    model::{LeaseToken, Requeue, ShardId, TaskId, WorkerName},
    queue::{
        Claim, Code, Completion, EnqueueTask, Event, Leased, OUTBOX_FULL, Queue, RecordStatus,
        RejectMode, Rejection, Shard, Stats,
    },
    redis_pool::Redis,
    runtime::Progress,
};
use tokio_util::sync::CancellationToken;

use self::{
    checked::{ANY_WEIGHT, Ask, Checked, NewTask, Room, WORKERS},
    model::{HOUR, Lease, Own},
};
use crate::support::redis::{Fsync, RedisServer};

// --- random histories

/// One step. A number picks among the things that are there, and counts round.
#[derive(Clone, Debug)]
enum Step {
    Enqueue {
        tasks: Vec<NewTask>,
        room: Room,
    },
    /// New tasks, and perhaps a known one: they have waited for room then.
    EnqueueFromStore {
        tasks: Vec<NewTask>,
        known: Option<usize>,
        room: Room,
    },
    SendAgain {
        which: usize,
        credited: u8,
        later: bool,
        room: Room,
    },
    EnqueueAgain {
        which: usize,
        same_offset: bool,
    },
    RedisFellBack,
    Cancel {
        which: usize,
        new: Option<NewTask>,
    },
    DeadlinePasses {
        which: usize,
        new: Option<NewTask>,
    },
    Change {
        which: usize,
        replicas: u32,
        priority: u8,
    },
    Requeue {
        which: usize,
        how: Requeue,
    },
    Claim(Vec<(usize, usize, usize)>),
    ClaimLookingAt {
        elements: usize,
        worker: usize,
        most: usize,
    },
    ClaimUndelivered {
        most: usize,
    },
    Complete(Vec<Shown>),
    Reject(Vec<(Shown, RejectMode)>),
    Extend(Vec<Shown>),
    LeasesRunOut {
        some: u64,
    },
    Expire {
        most: usize,
    },
    WaitsEnd {
        some: u64,
    },
    Promote {
        most: usize,
    },
    Crash {
        worker: usize,
    },
    LosePointer {
        lane: usize,
        worker: usize,
    },
    /// Of tasks that are forgotten: so many that a sweep moves what is live.
    SpentElements {
        lane: usize,
        count: usize,
    },
    Sweep {
        most: usize,
    },
    Forward {
        most: usize,
    },
    Forget {
        most: usize,
        settled: u8,
        sent_again: bool,
    },
}

/// A lease that was handed out at some time, mostly as it was.
#[derive(Clone, Debug)]
struct Shown {
    lease: usize,
    by: Option<usize>,
    of: Option<usize>,
}

fn shown() -> impl Strategy<Value = Shown> {
    let seldom = || prop::option::weighted(0.1, any::<usize>());
    // Counted from the latest: those before have mostly ended.
    (0..12_usize, seldom(), seldom()).prop_map(|(lease, by, of)| Shown { lease, by, of })
}

fn credited() -> impl Strategy<Value = u8> {
    prop_oneof![4 => Just(0), 1 => 0..64_u8]
}

fn room() -> impl Strategy<Value = Room> {
    let ahead = prop_oneof![4 => Just(u64::MAX), 1 => 0..8_u64];
    let live = prop_oneof![8 => Just(u64::MAX), 1 => 0..8_u64];
    (ahead, live).prop_map(|(ahead, live)| Room { ahead, live })
}

fn new_task() -> impl Strategy<Value = NewTask> {
    let backoff = prop_oneof![
        6 => Just(Own::Nothing),
        1 => Just(Own::GivesUp),
        1 => Just(Own::AtOnce),
        1 => Just(Own::Hours),
    ];
    (
        1..=4_u32,
        1..=3_u8,
        1..=3_u8,
        0..40_usize,
        credited(),
        prop::bool::weighted(0.2),
        backoff,
    )
        .prop_map(
            |(replicas, priority, max_attempts, size, credited, later, backoff)| NewTask {
                replicas,
                priority,
                max_attempts,
                size,
                credited,
                later,
                backoff,
            },
        )
}

/// A reservation ends before now, or never.
fn requeue() -> impl Strategy<Value = Requeue> {
    let worker = || (0..6_usize).prop_map(|n| WorkerName::new(WORKERS[n]).expect("a name"));
    prop_oneof![
        2 => Just(Requeue::All),
        2 => worker().prop_map(Requeue::AwayFrom),
        2 => (worker(), prop::option::of(Just(1)))
            .prop_map(|(worker, until_unix_ms)| Requeue::To { worker, until_unix_ms }),
        1 => Just(Requeue::Free),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let mode = prop_oneof![
        3 => Just(RejectMode::Retry(None)),
        3 => Just(RejectMode::Retry(Some(Duration::ZERO))),
        1 => Just(RejectMode::Retry(Some(HOUR))),
        1 => Just(RejectMode::Never),
        1 => Just(RejectMode::Release),
        1 => Just(RejectMode::PutOff(Duration::ZERO)),
        1 => Just(RejectMode::PutOff(HOUR)),
        2 => Just(RejectMode::Rest(HOUR)),
    ];
    let weight = prop_oneof![3 => Just(ANY_WEIGHT), 1 => 1..120_usize];
    prop_oneof![
        6 => (vec(new_task(), 1..5), room()).prop_map(|(tasks, room)| Step::Enqueue { tasks, room }),
        2 => (vec(new_task(), 1..3), prop::option::of(any::<usize>()), room())
            .prop_map(|(tasks, known, room)| Step::EnqueueFromStore { tasks, known, room }),
        2 => (any::<usize>(), credited(), prop::bool::weighted(0.2), room())
            .prop_map(|(which, credited, later, room)| Step::SendAgain { which, credited, later, room }),
        1 => any::<(usize, bool)>().prop_map(|(which, same_offset)| Step::EnqueueAgain { which, same_offset }),
        1 => Just(Step::RedisFellBack),
        2 => (any::<usize>(), prop::option::weighted(0.2, new_task()))
            .prop_map(|(which, new)| Step::Cancel { which, new }),
        1 => (any::<usize>(), prop::option::weighted(0.2, new_task()))
            .prop_map(|(which, new)| Step::DeadlinePasses { which, new }),
        3 => (any::<usize>(), 1..=4_u32, 1..=3_u8)
            .prop_map(|(which, replicas, priority)| Step::Change { which, replicas, priority }),
        4 => (any::<usize>(), requeue()).prop_map(|(which, how)| Step::Requeue { which, how }),
        9 => vec((0..8_usize, 0..4_usize, weight), 1..4).prop_map(Step::Claim),
        3 => (0..6_usize, 0..8_usize, 1..4_usize)
            .prop_map(|(elements, worker, most)| Step::ClaimLookingAt { elements, worker, most }),
        1 => (1..4_usize).prop_map(|most| Step::ClaimUndelivered { most }),
        5 => vec(shown(), 1..4).prop_map(Step::Complete),
        5 => vec((shown(), mode), 1..3).prop_map(Step::Reject),
        1 => vec(shown(), 1..3).prop_map(Step::Extend),
        3 => any::<u64>().prop_map(|some| Step::LeasesRunOut { some }),
        2 => (1..5_usize).prop_map(|most| Step::Expire { most }),
        2 => any::<u64>().prop_map(|some| Step::WaitsEnd { some }),
        2 => (1..5_usize).prop_map(|most| Step::Promote { most }),
        1 => (0..6_usize).prop_map(|worker| Step::Crash { worker }),
        1 => (0..6_usize, 0..6_usize).prop_map(|(lane, worker)| Step::LosePointer { lane, worker }),
        1 => (0..6_usize, 20..90_usize).prop_map(|(lane, count)| Step::SpentElements { lane, count }),
        2 => (1..100_usize).prop_map(|most| Step::Sweep { most }),
        1 => (1..5_usize).prop_map(|most| Step::Forward { most }),
        1 => (1..5_usize, any::<u8>(), prop::bool::weighted(0.2))
            .prop_map(|(most, settled, sent_again)| Step::Forget { most, settled, sent_again }),
    ]
}

async fn take(c: &mut Checked, step: &Step) {
    let known = |c: &Checked, shown: &Shown| {
        let at = |back: usize| &c.known[c.known.len() - 1 - back % c.known.len()];
        let mut lease = at(shown.lease).clone();
        lease.worker = shown
            .by
            .map_or(lease.worker, |other| WORKERS[other % 6].into());
        lease.grant = shown.of.map_or(lease.grant, |other| at(other).grant);
        lease
    };
    let some = |members: Vec<Vec<u8>>, some: u64| {
        let chosen = members
            .into_iter()
            .enumerate()
            .filter(|(i, _)| some >> (i % 64) & 1 == 1);
        chosen.map(|(_, member)| member).collect::<Vec<_>>()
    };
    match step {
        Step::Enqueue { tasks, room } => {
            let mut records: Vec<_> = tasks.iter().map(|new| c.record(new)).collect();
            let twice = records[0].clone();
            records.push(EnqueueTask {
                offset: c.next_offset(),
                ..twice
            });
            c.enqueue(&records, *room).await;
        }
        Step::EnqueueFromStore { tasks, known, room } => {
            let mut records: Vec<_> = tasks.iter().map(|new| c.record(new)).collect();
            let known = known.filter(|_| !c.records.is_empty());
            records.extend(known.map(|which| c.records[which % c.records.len()].clone()));
            c.enqueue_from_store(&records, known.is_some(), *room).await;
        }
        Step::SendAgain {
            which,
            credited,
            later,
            room,
        } => {
            let ids = c.given_up();
            if !ids.is_empty() {
                c.send_again(ids[which % ids.len()], *credited, *later, *room)
                    .await;
            }
        }
        Step::EnqueueAgain { which, same_offset } if !c.records.is_empty() => {
            let mut record = c.records[which % c.records.len()].clone();
            if !same_offset {
                record.offset = c.next_offset();
            }
            c.enqueue(&[record], Room::ANY).await;
        }
        Step::Cancel { which, new } if new.is_some() || !c.records.is_empty() => {
            c.end(*which, new.as_ref(), RecordStatus::Cancelled).await;
        }
        Step::DeadlinePasses { which, new } if new.is_some() || !c.records.is_empty() => {
            c.end(*which, new.as_ref(), RecordStatus::Dead).await;
        }
        Step::Change {
            which,
            replicas,
            priority,
        } if !c.records.is_empty() => {
            c.change(*which, *replicas, *priority).await;
        }
        Step::Requeue { which, how } if !c.records.is_empty() => {
            let id = c.records[which % c.records.len()].id;
            c.requeue(id, how).await;
        }
        Step::RedisFellBack => c.read_on_after_redis_fell_back().await,
        Step::Claim(asks) => {
            let asks: Vec<_> = asks
                .iter()
                .map(|(worker, most, weight)| ask(c, *worker, *most, *weight))
                .collect();
            c.claim(&asks).await;
        }
        Step::ClaimLookingAt {
            elements,
            worker,
            most,
        } => {
            let ask = ask(c, *worker, *most, ANY_WEIGHT);
            c.claim_looking_at(*elements, &ask).await;
        }
        Step::ClaimUndelivered { most } => c.claim_undelivered(*most).await,
        Step::Complete(all) if !c.known.is_empty() => {
            let leases: Vec<_> = all.iter().map(|shown| known(c, shown)).collect();
            c.complete(&leases).await;
        }
        Step::Reject(all) if !c.known.is_empty() => {
            let items: Vec<_> = all
                .iter()
                .map(|(shown, mode)| (known(c, shown), *mode))
                .collect();
            c.reject(&items).await;
        }
        Step::Extend(all) if !c.known.is_empty() => {
            let leases: Vec<_> = all.iter().map(|shown| known(c, shown)).collect();
            c.extend(&leases).await;
        }
        Step::LeasesRunOut { some: which } => {
            c.make_due(
                "leases",
                &some(c.model.leases.keys().cloned().collect(), *which),
            )
            .await;
        }
        Step::Expire { most } => drop(c.expire(*most).await),
        Step::WaitsEnd { some: which } => {
            c.make_due(
                "delayed",
                &some(c.model.waits.keys().cloned().collect(), *which),
            )
            .await;
        }
        Step::Promote { most } => drop(c.promote(*most).await),
        Step::Crash { worker } => c.known.retain(|lease| lease.worker != WORKERS[*worker]),
        Step::LosePointer { lane, worker } => c.lose_pointer(*lane, WORKERS[*worker]).await,
        Step::SpentElements { lane, count } => c.leave_spent_elements(*lane, *count).await,
        Step::Sweep { most } => drop(c.sweep(*most).await),
        Step::Forward { most } => c.forward(*most).await,
        Step::Forget {
            most,
            settled,
            sent_again,
        } => c.forget(*most, *settled, *sent_again).await,
        // There is nothing yet that they could be about.
        Step::Cancel { .. } | Step::DeadlinePasses { .. } => {}
        Step::EnqueueAgain { .. } | Step::Change { .. } | Step::Requeue { .. } => {}
        Step::Complete(_) | Step::Reject(_) | Step::Extend(_) => {}
    }
}

fn ask(c: &mut Checked, worker: usize, most: usize, most_bytes: usize) -> Ask {
    let worker = WORKERS
        .get(worker)
        .map_or_else(|| c.newcomer(), |name| (*name).into());
    Ask {
        worker,
        most,
        most_bytes,
    }
}

#[test]
fn random_histories_agree_with_the_model() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = runtime
        .block_on(Redis::connect(&server.url(), "t"))
        .expect("connect");
    let config = Config {
        cases: 64,
        ..Config::with_source_file(file!())
    };
    let agree = |steps: Vec<Step>| {
        runtime.block_on(async {
            let mut c = Checked::new(&redis).await;
            for step in &steps {
                take(&mut c, step).await;
            }
            c.finish().await;
        });
        Ok(())
    };
    TestRunner::new(config)
        .run(&vec(step(), 1..=80), agree)
        .unwrap_or_else(|failure| panic!("{failure}"));
}

// --- the shortest history of each rule

fn task(replicas: u32) -> NewTask {
    NewTask {
        replicas,
        priority: 2,
        max_attempts: 9,
        size: 4,
        credited: 0,
        later: false,
        backoff: Own::Nothing,
    }
}

const LATER: RejectMode = RejectMode::Retry(Some(HOUR));

#[tokio::test]
async fn a_retry_is_not_stranded_where_both_workers_have_passed() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(2)]).await;
    let a = c.claim_one("a").await;
    c.reject(&[(a, LATER)]).await;
    c.waits_end().await;
    let b = c.claim_one("b").await;
    assert!(c.claim_by("b", 1).await.is_empty());
    c.complete(&[b]).await;
    let a = c.claim_one("a").await;
    assert_eq!(c.complete(&[a]).await, [Code::Ok]);
    c.finish().await;
}

#[tokio::test]
async fn an_expiry_handled_twice_puts_out_one_replica() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(1)]).await;
    let a = c.claim_one("a").await;
    c.leases_run_out().await;
    assert_eq!(c.expire(9).await.expired, 0);
    assert_eq!(c.reject(&[(a, LATER)]).await, [(Code::LeaseLost, false)]);
    c.waits_end().await;
    c.claim_one("b").await;
    assert!(c.claim_by("c", 9).await.is_empty());
    c.finish().await;
}

#[tokio::test]
async fn a_task_delivered_again_at_a_new_offset_is_enqueued_once() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(1)]).await;
    for live in [true, false] {
        let again = EnqueueTask {
            offset: c.next_offset(),
            ..c.records[0].clone()
        };
        c.enqueue(&[again], Room::ANY).await;
        if live {
            let a = c.claim_one("a").await;
            assert!(c.claim_by("b", 9).await.is_empty());
            c.complete(&[a]).await;
        }
    }
    c.finish().await;
}

#[tokio::test]
async fn a_pointer_moves_beyond_what_is_spent_even_when_nothing_was_taken() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(1), task(2)]).await;
    let small = |worker: &str| Ask {
        worker: worker.into(),
        most: 1,
        most_bytes: ANY_WEIGHT,
    };
    // a is gone for good with t0; b gives t1 back, twice.
    c.claim_one("a").await;
    let mut b = c.claim_one("b").await;
    let given_up = b.id;
    for _ in 0..2 {
        c.reject(&[(b, LATER)]).await;
        c.waits_end().await;
        b = c.claim_one("b").await;
        assert_eq!(b.id, given_up);
    }
    c.leases_run_out().await;
    c.waits_end().await;
    // One element a call: it ends only if each call begins where the one before ended.
    for worker in ["c", "b", "d"] {
        let mut calls = 0;
        loop {
            let (got, more) = c.claim_looking_at(1, &small(worker)).await;
            c.complete(&got).await;
            if got.is_empty() && !more {
                break;
            }
            calls += 1;
            assert!(
                calls < 12,
                "{worker} looks at the same elements again and again"
            );
        }
    }
    assert_eq!(c.model.finals.len(), 2);
    c.finish().await;
}

#[tokio::test]
async fn the_record_refuses_a_second_replica_to_its_holder() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(2)]).await;
    let a = c.claim_one("a").await;
    c.reject(&[(a, LATER)]).await;
    c.claim_one("b").await;
    c.waits_end().await;
    assert!(c.claim_by("b", 9).await.is_empty());
    c.claim_one("a").await;
    c.finish().await;
}

#[tokio::test]
async fn the_count_of_the_gone_survives_an_empty_lane() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(2)]).await;
    for _ in 0..2 {
        let a = c.claim_one("a").await;
        c.reject(&[(a, LATER)]).await;
        if c.model.tasks.values().all(|task| task.failures == 1) {
            c.waits_end().await;
        }
    }
    let b = c.claim_one("b").await;
    c.complete(&[b]).await;
    c.waits_end().await;
    c.claim_one("a").await;
    c.finish().await;
}

#[tokio::test]
async fn a_token_counts_for_its_worker_its_grant_and_its_life_of_the_shard_only() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(1), task(1)]).await;
    let [first, second]: [Lease; 2] = [c.claim_one("a").await, c.claim_one("a").await];
    let strange = [
        Lease {
            grant: second.grant,
            ..first.clone()
        },
        Lease {
            worker: "b".into(),
            ..first.clone()
        },
    ];
    assert_eq!(c.complete(&strange).await, [Code::LeaseLost; 2]);
    let token = LeaseToken {
        generation: 1,
        ..first.token(&c.shard)
    };
    let worker = WorkerName::new("a").expect("a name");
    let earlier = Completion {
        id: first.id,
        token,
        worker,
        report: first.report(),
        limit: Default::default(),
    };
    assert_eq!(
        c.queue.worker.complete(earlier).await.expect("complete"),
        Code::LeaseLost
    );
    assert_eq!(
        c.complete(&[first.clone(), first]).await,
        [Code::Ok, Code::Repeat]
    );
    c.finish().await;
}

#[tokio::test]
async fn a_forgotten_task_that_is_sent_again_goes_to_the_end_of_its_lane() {
    let (_server, mut c) = Checked::alone().await;
    // The element of its first life stays in the lane: an open task stands before it.
    let [first, again]: [TaskId; 2] = c.put(&[task(1), task(1)]).await.try_into().expect("two");
    c.end(1, None, RecordStatus::Dead).await;
    c.forget(1, 1, false).await;
    assert!(!c.model.tasks.contains_key(&again));
    let [other]: [TaskId; 1] = c.put(&[task(1)]).await.try_into().expect("one");
    c.send_again(again, 0, false, Room::ANY).await;
    for expected in [first, other, again] {
        assert_eq!(c.claim_one("a").await.id, expected);
    }
    c.finish().await;
}

#[tokio::test]
async fn one_claim_in_ten_begins_with_a_lower_priority() {
    let (_server, mut c) = Checked::alone().await;
    let of = |priority| NewTask {
        priority,
        ..task(1)
    };
    c.put(&[vec![of(3); 9], vec![of(2); 9], vec![of(1); 40]].concat())
        .await;
    let mut lower = Vec::new();
    for n in 0..40 {
        let lease = c.claim_one("a").await;
        let priority = c.model.tasks[&lease.id].priority;
        if priority > 1 {
            lower.push((n, priority));
        }
    }
    assert_eq!(lower, [(9, 2), (19, 3), (28, 2), (38, 3)]);
    c.finish().await;
}

#[tokio::test]
async fn workers_that_come_in_turn_all_begin_with_a_lower_priority_now_and_then() {
    let (_server, mut c) = Checked::alone().await;
    let of = |priority| NewTask {
        priority,
        ..task(2)
    };
    c.put(&[vec![of(3); 9], vec![of(1); 40]].concat()).await;
    let mut lower = Vec::new();
    for n in 0..80 {
        let worker = ["a", "b"][n % 2];
        let lease = c.claim_one(worker).await;
        if c.model.tasks[&lease.id].priority > 1 {
            lower.push(worker);
        }
    }
    assert!(lower.contains(&"a") && lower.contains(&"b"), "{lower:?}");
    c.finish().await;
}

#[tokio::test]
async fn elements_of_one_live_task_do_not_pile_up() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[task(2)]).await;
    for _ in 0..100 {
        c.claim_undelivered(1).await;
    }
    c.sweep(1000).await;
    let standing: usize = (0..6).map(|lane| c.model.standing(lane).len()).sum();
    assert!(standing <= 66, "{standing} elements for one task");
    c.finish().await;
}

#[tokio::test]
async fn a_full_outbox_pauses_claims_and_expiries() {
    let (_server, mut c) = Checked::alone().await;
    c.put(&[
        NewTask {
            max_attempts: 1,
            ..task(1)
        },
        task(1),
    ])
    .await;
    c.claim_one("a").await;
    let lease: Vec<_> = c.model.leases.keys().cloned().collect();
    c.make_due("leases", &lease).await;
    let full = "for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'b', '') end";
    let mut eval = redis::cmd("EVAL");
    eval.arg(full).arg(1).arg("t:{q:0}:outbox").arg(OUTBOX_FULL);
    let () = eval.query_async(&mut c.redis.conn()).await.expect("eval");
    let shard = c.queue.shards_of(&c.shard.queue).remove(0);
    let worker = WorkerName::new("b").expect("a name");
    let claim = Claim {
        worker,
        max_tasks: 9,
        max_bytes: ANY_WEIGHT,
        is_first: true,
        lease: None,
        priority: None,
    };
    assert!(
        c.queue
            .worker
            .claim(&shard, claim)
            .await
            .expect("claim")
            .is_empty()
    );
    assert_eq!(
        c.queue
            .upkeep
            .expire(&c.shard, 9, &[])
            .await
            .expect("expire")
            .expired,
        0
    );
    let first = c
        .queue
        .upkeep
        .outbox(&c.shard, 1, ANY_WEIGHT)
        .await
        .expect("outbox")
        .remove(0);
    let left = c
        .queue
        .upkeep
        .forwarded(&c.shard, &[first])
        .await
        .expect("forwarded");
    assert_eq!(left, OUTBOX_FULL - 1);
    let () = redis::cmd("DEL")
        .arg("t:{q:0}:outbox")
        .query_async(&mut c.redis.conn())
        .await
        .expect("del");
    c.finish().await;
}

// --- many workers at once

/// Repeatable choices.
struct Dice(u64);

impl Dice {
    /// One of `sides`, from 0. (splitmix64)
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides
    }
}

async fn live(queue: &Queue, shard: &ShardId) -> u64 {
    queue.stats(shard).await.expect("stats").live
}

/// Claims, completes (one in four twice at once), rejects and forgets until nothing is live.
/// Answers the reports of the completions that were answered OK.
async fn work(queue: Queue, shard: Arc<Shard>, name: WorkerName, mut dice: Dice) -> Vec<String> {
    let (mut credits, mut late) = (Vec::new(), Vec::<Leased>::new());
    loop {
        let most = 1 + usize::try_from(dice.roll(5)).expect("few");
        let claim = Claim {
            worker: name.clone(),
            max_tasks: most,
            max_bytes: ANY_WEIGHT,
            is_first: true,
            lease: Some(HOUR),
            priority: None,
        };
        let granted = queue.worker.claim(&shard, claim).await.expect("claim");
        if granted.is_empty() && !granted.more && live(&queue, &shard.id).await == 0 {
            return credits;
        }
        if dice.roll(8) == 0 {
            continue;
        }
        let mut tasks = granted.deliver();
        // Some report long after; their leases may have run out.
        if dice.roll(4) == 0 {
            std::mem::swap(&mut late, &mut tasks);
        }
        for task in tasks {
            let (id, token) = (task.id, task.token);
            let report = format!("{id} {name}");
            let completion = Completion {
                id,
                token: token.clone(),
                worker: name.clone(),
                report: report.clone().into(),
                limit: Default::default(),
            };
            let codes = match dice.roll(12) {
                0 => continue,
                1 | 2 => {
                    let mode = if dice.roll(2) == 0 {
                        RejectMode::Release
                    } else {
                        RejectMode::Retry(Some(Duration::ZERO))
                    };
                    let back = Rejection {
                        id,
                        token,
                        worker: name.clone(),
                        mode,
                        reason: "no luck".into(),
                        limit: Default::default(),
                    };
                    queue
                        .worker
                        .reject(&shard.id, &[back], &[HOUR])
                        .await
                        .expect("hand back");
                    continue;
                }
                3..6 => {
                    let (one, other) = tokio::join!(
                        queue.worker.complete(completion.clone()),
                        queue.worker.complete(completion)
                    );
                    vec![one.expect("complete"), other.expect("complete")]
                }
                _ => vec![queue.worker.complete(completion).await.expect("complete")],
            };
            credits.extend(
                codes
                    .iter()
                    .filter(|code| **code == Code::Ok)
                    .map(|_| report.clone()),
            );
        }
    }
}

/// Ends leases at random, sweeps, and forwards, until nothing is live; answers the reports that it
/// forwarded.
async fn watch(redis: Redis, queue: Queue, shard: ShardId, mut dice: Dice) -> Vec<String> {
    let (mut conn, mut forwarded) = (redis.conn(), Vec::new());
    loop {
        let done = live(&queue, &shard).await == 0;
        let mut range = redis::cmd("ZRANGE");
        let leases: Vec<Vec<u8>> = range
            .arg("t:{q:0}:leases")
            .arg(0)
            .arg(-1)
            .query_async(&mut conn)
            .await
            .expect("zrange");
        for lease in leases.iter().filter(|_| dice.roll(16) == 0) {
            let mut past = redis::cmd("ZADD");
            let () = past
                .arg("t:{q:0}:leases")
                .arg("XX")
                .arg(1)
                .arg(lease)
                .query_async(&mut conn)
                .await
                .expect("zadd");
        }
        queue
            .upkeep
            .expire(&shard, 100, &[Duration::ZERO])
            .await
            .expect("expire");
        queue.upkeep.sweep(&shard, 64).await.expect("sweep");
        let entries = queue
            .upkeep
            .outbox(&shard, 50, ANY_WEIGHT)
            .await
            .expect("outbox");
        if entries.is_empty() && done {
            return forwarded;
        }
        queue
            .upkeep
            .forwarded(&shard, &entries)
            .await
            .expect("forwarded");
        for event in entries.into_iter().flat_map(|entry| entry.events) {
            if let Event::Completed(report) = event {
                forwarded.push(String::from_utf8_lossy(&report).into_owned());
            }
        }
    }
}

async fn run_at_once(redis: &Redis, seed: u64) {
    let mut c = Checked::new(redis).await;
    let new = |n: u8| NewTask {
        priority: n % 3 + 1,
        max_attempts: u8::MAX,
        ..task(u32::from(n % 4) + 1)
    };
    let ids = c.put(&(0..200).map(new).collect::<Vec<_>>()).await;
    let (queue, shard) = (c.queue.clone(), c.queue.shards_of(&c.shard.queue).remove(0));
    let (stop, process) = (CancellationToken::new(), queue.clone());
    let stopped = stop.clone();
    let releases = tokio::spawn(async move {
        process
            .worker
            .settle_deliveries(
                &Progress::default().register("release"),
                &stopped,
                std::future::ready(()),
            )
            .await;
    });
    let watch = tokio::spawn(watch(
        redis.clone(),
        queue.clone(),
        c.shard.clone(),
        Dice(!seed),
    ));
    let start = |n: u64| {
        let name = WorkerName::new(&format!("worker-{n}")).expect("a name");
        tokio::spawn(work(
            queue.clone(),
            Arc::clone(&shard),
            name,
            Dice(seed.wrapping_mul(16) + n),
        ))
    };
    let workers: Vec<_> = (0..16).map(start).collect();
    let mut credits = Vec::new();
    for worker in workers {
        credits.extend(worker.await.expect("a worker"));
    }
    let mut reports = watch.await.expect("the watch");
    stop.cancel();
    releases.await.expect("the releases");

    for (n, id) in ids.iter().enumerate() {
        let of_task = credits
            .iter()
            .filter(|credit| credit.starts_with(&id.to_string()))
            .count();
        assert_eq!(of_task, n % 4 + 1, "{id} is done as often as it asks");
    }
    credits.sort();
    reports.sort();
    assert_eq!(
        reports, credits,
        "what was answered OK stands in the outbox, and nothing else"
    );
    let distinct: BTreeSet<_> = credits.iter().collect();
    assert_eq!(distinct.len(), credits.len(), "distinct workers");
    let stats = queue.stats(&c.shard).await.expect("stats");
    assert_eq!(
        Stats { ahead: 0, ..stats },
        Stats {
            finals: 200,
            ..Stats::default()
        }
    );
}

#[test]
fn many_workers_at_once_are_credited_once_each() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime.expect("a runtime");
    let server = RedisServer::start(Fsync::EverySecond);
    let redis = runtime
        .block_on(Redis::connect(&server.url(), "t"))
        .expect("connect");
    let run = |seed| {
        // A broken rule may leave a task that nobody can end.
        let run = async {
            tokio::time::timeout(Duration::from_secs(120), run_at_once(&redis, seed)).await
        };
        runtime.block_on(run).expect("all tasks end");
        Ok(())
    };
    let config = Config {
        cases: 4,
        ..Config::with_source_file(file!())
    };
    TestRunner::new(config)
        .run(&any::<u64>().no_shrink(), run)
        .unwrap_or_else(|failure| panic!("{failure}"));
}
