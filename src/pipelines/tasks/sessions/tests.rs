//! Sessions without a stream and without Redis: demand, ends, order.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use uuid::Uuid;

use super::{
    super::weights::Weights,
    book::{EndedLeases, HeldLease, Reported, Reports},
    registry::{Crowded, SessionLimits, Sessions},
    session::{Attached, Plan, Session},
};
use crate::{
    model::{
        ItemAnswer, ItemStatus, LeaseToken, LeasedTask, QueueName, ShardId, TaskBody, TaskId,
        WorkerName,
    },
    queue::{Claim, Code, Started},
    telemetry::metrics::SessionEnd,
};

const ROOM: SessionLimits = SessionLimits {
    of_process: 100,
    of_worker: None,
};

fn worker() -> WorkerName {
    WorkerName::new("w").unwrap()
}

fn plan() -> Plan {
    let claim = Claim {
        worker: worker(),
        max_tasks: 1,
        max_bytes: 1,
        is_first: true,
        lease: None,
        priority: None,
    };
    let queues = vec![QueueName::new("q").unwrap()];
    Plan {
        weights: Weights::default(),
        queues,
        claim,
        timeout: Duration::from_secs(2),
        tells_started: true,
        keep_leases: false,
    }
}

fn open() -> (Arc<Session>, Attached) {
    Session::open(Uuid::now_v7(), worker(), plan())
}

fn task(grant: u64) -> LeasedTask {
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    let token = LeaseToken {
        shard,
        generation: 7,
        grant,
        attempt: 1,
        leased_unix_ms: 0,
        trace: None,
    };
    let lease = Duration::from_secs(600);
    LeasedTask {
        id: TaskId::new(),
        token,
        expires_unix_ms: 1,
        lease,
        body: TaskBody::default(),
    }
}

#[test]
fn a_session_that_ended_takes_no_demand_and_ends_once() {
    let (session, attached) = open();
    let tasks = [task(1)];
    assert_eq!(
        (
            attached.want(3, 10),
            attached.hold(&tasks).is_some(),
            session.demand()
        ),
        (3, true, 2)
    );
    assert_eq!(
        session.end(SessionEnd::Closed).map(|held| held.len()),
        Some(1)
    );
    assert_eq!((attached.want(3, 10), session.demand()), (0, 0));
    assert!(attached.hold(&[task(2)]).is_none(), "these go back");
    assert!(
        session.end(SessionEnd::Closed).is_none(),
        "it has ended before"
    );
    assert!(session.attach_again(plan(), &HashSet::new()).is_none());
}

#[test]
fn a_stream_that_was_displaced_does_not_touch_the_demand_of_the_next() {
    let (session, old) = open();
    assert_eq!(old.want(3, 10), 3);
    let (new, _) = session.attach_again(plan(), &HashSet::new()).unwrap();
    assert_eq!(session.demand(), 0, "it begins anew");
    assert_eq!(
        (
            new.want(5, 10),
            old.want(2, 10),
            old.surrender(),
            session.demand()
        ),
        (5, 0, 0, 5)
    );
    drop(old);
    assert_eq!(
        (session.demand(), new.surrender(), new.surrender()),
        (5, 5, 0)
    );
}

#[test]
fn a_worker_that_came_back_in_the_last_moment_is_not_away() {
    let (session, attached) = open();
    attached.hold(&[task(1)]);
    drop(attached);
    let later = Instant::now() + Duration::from_secs(3);
    assert!(session.is_away_since(later));
    let back = session.attach_again(plan(), &HashSet::new());
    assert!(
        back.is_some() && session.end(SessionEnd::Away).is_none(),
        "it has a stream again"
    );
    drop(back);
    assert!(session.end(SessionEnd::Away).is_some());
}

#[test]
fn leases_that_an_operator_ended_are_told_by_task_and_grant() {
    let (session, attached) = open();
    let tasks: Vec<_> = (1..=4).map(task).collect();
    attached.hold(&tasks);
    // Another lease of the first task, and one of somebody else.
    session.tell_ended(&EndedLeases::lost(&[
        (tasks[0].id, 9),
        (tasks[1].id, 2),
        (TaskId::new(), 3),
    ]));
    session.tell_ended(&EndedLeases::cancelled(&[tasks[2].id]));
    let told = futures::executor::block_on(attached.ended());
    let told: Vec<_> = told
        .iter()
        .map(|answer| (answer.id.clone(), answer.status))
        .collect();
    let lost = |n: usize, status| (tasks[n].id.to_string(), status);
    assert_eq!(
        told,
        [
            lost(1, ItemStatus::LeaseLost),
            lost(2, ItemStatus::Cancelled)
        ]
    );
    assert_eq!(session.taken(), 2);
    // More tasks than the session has.
    let many: Vec<_> = (0..10)
        .map(|_| TaskId::new())
        .chain([tasks[3].id])
        .collect();
    session.tell_ended(&EndedLeases::cancelled(&many));
    assert_eq!(
        (
            futures::executor::block_on(attached.ended()).len(),
            session.taken()
        ),
        (1, 1)
    );
}

#[test]
fn the_end_of_a_lease_is_told_before_the_next_lease_of_its_task() {
    let (session, attached) = open();
    let old = task(1);
    let new = LeasedTask {
        token: LeaseToken {
            grant: 2,
            ..old.token.clone()
        },
        ..old.clone()
    };
    assert_eq!(attached.hold(std::slice::from_ref(&old)), Some(Vec::new()));
    session.tell_ended(&EndedLeases::lost(&[(old.id, 1)]));
    let ended = attached.hold(&[new]).unwrap();
    assert_eq!(
        ended,
        [ItemAnswer::new(old.id.to_string(), ItemStatus::LeaseLost)]
    );
    // A notice that is late names the old lease.
    session.tell_ended(&EndedLeases::lost(&[(old.id, 1)]));
    assert!(attached.ended().now_or_never().is_none());
}

#[test]
fn an_extension_under_way_does_not_keep_a_lease_of_a_session_that_was_taken_over() {
    let tasks: Vec<_> = (1..=3).map(task).collect();
    let (session, attached) = open();
    attached.hold(&tasks);
    attached.started(&[tasks[0].id.to_string()]);
    let held = session.end(SessionEnd::TakenOver).unwrap();
    let ids = |held: &[(TaskId, HeldLease)]| {
        held.iter()
            .map(|(id, held)| (*id, held.deadline_unix_ms))
            .collect::<Vec<_>>()
    };
    let of = |n: usize| {
        held.iter()
            .filter(|(id, _)| *id == tasks[n].id)
            .cloned()
            .collect::<Vec<_>>()
    };
    // taskd's own extension, and one of the worker.
    let late = session.kept(&of(0), &[(Code::Ok, 99)], Instant::now());
    assert_eq!(
        (ids(&late), late[0].1.started),
        (vec![(tasks[0].id, 99)], Started::Yes)
    );
    assert_eq!(
        session.kept(&of(1), &[(Code::Ok, 0)], Instant::now()).len(),
        0,
        "it was extended elsewhere"
    );
    let (reports, answers) = extensions(&tasks[2..], 98);
    let late = attached.extended(&reports, &answers);
    assert_eq!(
        (ids(&late), late[0].1.started),
        (vec![(tasks[2].id, 98)], Started::No)
    );

    // The leases of another session stay.
    let (session, attached) = open();
    attached.hold(&tasks[..1]);
    assert_eq!(
        session
            .kept(&of(0), &[(Code::Ok, 99)], Instant::now())
            .len(),
        0
    );
    assert_eq!(attached.extended(&reports, &answers).len(), 0);
    session.end(SessionEnd::Closed);
    assert_eq!(attached.extended(&reports, &answers).len(), 0);
}

#[test]
fn an_extension_by_the_worker_is_not_forgotten_for_a_shorter_one_of_taskd() {
    let task = [task(1)];
    let open = || {
        Session::open(
            Uuid::now_v7(),
            worker(),
            Plan {
                keep_leases: true,
                ..plan()
            },
        )
    };
    let held =
        |session: &Session| session.leases_to_keep(Instant::now() + Duration::from_secs(600));
    let deadline = |by_taskd: i64| {
        let (session, attached) = open();
        attached.hold(&task);
        let before = held(&session);
        let (reports, by_worker) = extensions(&task, 50);
        attached.extended(&reports, &by_worker);
        session.kept(&before, &[(Code::Ok, by_taskd)], Instant::now());
        held(&session)[0].1.deadline_unix_ms
    };
    assert_eq!((deadline(40), deadline(60)), (50, 60));
    // Redis's clock was set back: the book has the deadline that Redis has.
    let (session, attached) = open();
    attached.hold(&task);
    session.kept(&held(&session), &[(Code::Ok, -5)], Instant::now());
    assert_eq!(held(&session)[0].1.deadline_unix_ms, -5);
}

#[test]
fn sessions_of_a_worker_have_no_more_together_than_it_may() {
    const MOST: usize = 40;
    for _ in 0..50 {
        let sessions = Sessions::default();
        sessions
            .allotments
            .0
            .lock()
            .entry(worker())
            .or_default()
            .allowed = MOST;
        let open = || {
            sessions
                .add(worker(), 1, ROOM, |id| Session::open(id, worker(), plan()))
                .unwrap()
        };
        let attached: Vec<_> = (0..8).map(|_| open()).collect();
        std::thread::scope(|scope| {
            for one in &attached {
                scope.spawn(|| {
                    (0..20)
                        .filter_map(|_| sessions.want(one, 1, 100))
                        .sum::<u32>()
                });
            }
        });
        let all: u32 = attached.iter().map(Attached::demand).sum();
        assert_eq!(all as usize, MOST);
        // One that closes gives exactly its share back.
        let share = attached[0].demand();
        attached[0].session.end(SessionEnd::Closed);
        sessions.remove(&attached[0].session);
        assert_eq!(sessions.want(&attached[1], 100, 100), None);
        assert_eq!(sessions.want_rest(&attached[1], 100, 100), share);
    }
}

#[test]
fn a_worker_whose_last_session_ended_is_allowed_nothing() {
    let sessions = Sessions::default();
    let lock_of_allotment = sessions.allotments.lock_or_insert(&worker());
    sessions
        .allotments
        .change(&worker(), |allotment| allotment.allowed = 5);
    let open = || {
        sessions
            .add(worker(), 1, ROOM, |id| Session::open(id, worker(), plan()))
            .unwrap()
    };
    let old = open();
    assert!(!sessions.leave_allotment(&worker()));
    assert_eq!(sessions.want(&old, 3, 100), Some(3));
    old.session.end(SessionEnd::Closed);
    sessions.remove(&old.session);
    assert!(sessions.leave_allotment(&worker()));
    // The new session opens while Redis is told that nothing is used.
    let new = open();
    assert_eq!(
        (
            sessions.want(&new, 3, 100),
            sessions.want_rest(&new, 3, 100)
        ),
        (None, 0)
    );
    // The question of the new session waits for the turn, which must not be another one.
    let waits = sessions.allotments.lock_or_insert(&worker());
    sessions.allotments.forget(&worker(), &lock_of_allotment);
    assert!(sessions.allotments.lock_of_allotment(&worker()).is_some());
    drop(waits);
    sessions.allotments.forget(&worker(), &lock_of_allotment);
    assert!(sessions.allotments.lock_of_allotment(&worker()).is_none());
}

#[test]
fn a_process_has_no_more_sessions_than_it_may_and_orders_those_of_a_worker() {
    let sessions = Sessions::default();
    let room = SessionLimits {
        of_process: 3,
        of_worker: None,
    };
    let open = || {
        sessions.add(worker(), 1_800_000_000_000, room, |id| {
            Session::open(id, worker(), plan())
        })
    };
    let opened: Vec<_> = (0..3).map(|_| open().unwrap()).collect();
    assert_eq!(open().err(), Some(Crowded::Process(3)));
    assert!(
        opened.is_sorted_by(|one, two| one.session.id < two.session.id),
        "though the clock stands still"
    );
}

#[test]
fn a_worker_whose_sessions_are_bounded_leaves_room_for_others() {
    let sessions = Sessions::default();
    let open = |name: &str, of_worker| {
        let name = WorkerName::new(name).unwrap();
        let room = SessionLimits { of_worker, ..ROOM };
        sessions.add(name.clone(), 1, room, |id| Session::open(id, name, plan()))
    };
    let mut opened: Vec<_> = (0..2).map(|_| open("w", Some(2)).unwrap()).collect();
    assert_eq!(open("w", Some(2)).err(), Some(Crowded::Worker(2)));
    opened.push(open("v", Some(2)).unwrap());
    opened.push(open("w", None).unwrap());
}

/// Extensions of these tasks, and answers that name this deadline.
fn extensions(tasks: &[LeasedTask], deadline_unix_ms: i64) -> (Reports, Vec<ItemAnswer>) {
    let extensions = tasks.iter().map(|task| {
        let lease = Some((task.id, task.token.clone()));
        Reported {
            lease,
            report: Duration::from_secs(600),
        }
    });
    let completions = Vec::new();
    let rejections = Vec::new();
    let reports = Reports {
        completions,
        rejections,
        extensions: extensions.collect(),
    };
    let answers = tasks.iter().map(|task| {
        let lease_expires_unix_ms = Some(deadline_unix_ms);
        ItemAnswer {
            lease_expires_unix_ms,
            ..ItemAnswer::new(task.id.to_string(), ItemStatus::Ok)
        }
    });
    (reports, answers.collect())
}

/// Extends leases that the session does not have; answers whether their tasks count as started at
/// its end.
fn brought(session: &Session, attached: &Attached, tasks: &[LeasedTask]) -> Vec<Started> {
    let (reports, answers) = extensions(tasks, 1);
    attached.extended(&reports, &answers);
    let held = session.end(SessionEnd::Closed).unwrap();
    let started = |task: &LeasedTask| {
        held.iter()
            .find(|(id, _)| *id == task.id)
            .unwrap()
            .1
            .started
    };
    tasks.iter().map(started).collect()
}

#[test]
fn a_task_that_an_extension_brings_has_started_if_its_worker_said_so() {
    let tasks: Vec<_> = (1..=3).map(task).collect();
    let (session, attached) = open();
    attached.hold(&tasks[2..]);
    // The worker says it before taskd has answered the extension.
    attached.started(&[tasks[0].id.to_string()]);
    assert_eq!(
        brought(&session, &attached, &tasks),
        [Started::Yes, Started::No, Started::No]
    );

    let (session, attached) = Session::open(
        Uuid::now_v7(),
        worker(),
        Plan {
            tells_started: false,
            ..plan()
        },
    );
    assert_eq!(
        brought(&session, &attached, &tasks[..1]),
        [Started::Perhaps],
        "nobody knows"
    );

    // More than a session remembers.
    let (session, attached) = open();
    let many: Vec<_> = (0..1001).map(|_| TaskId::new().to_string()).collect();
    attached.started(&many);
    assert_eq!(
        brought(&session, &attached, &tasks[..1]),
        [Started::Perhaps]
    );
}
