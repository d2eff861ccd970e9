//! The workers that this process hears, and what it tells the other processes of itself.
//!
//! A call of a worker costs a look-up and a few counters here. Every few seconds the process writes
//! one bounded value to Redis, which expires if the process does not write the next one.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    coordination::{self, Coordination, Standing},
    model::{
        Caller, HeardWorker, Item, ItemAnswer, ItemStatus, Presence, QueueName, WorkerCounts,
        WorkerName,
    },
    runtime::{Clock, Loop, Progress, Supervisor},
};

/// How often a process writes its value. `Coordination::announce` lets it live three times as long.
const WRITE_EVERY: Duration = Duration::from_secs(5);
/// How long a worker stays without a call.
const STAYS_MS: i64 = 10 * 60 * 1000;
/// The workers in the value of a process: those that it heard last.
const MOST_REPORTED: usize = 1_000;
/// The workers that a process remembers. Beyond it the half that it heard last stays.
const MOST_KNOWN: usize = 10_000;
/// The queues of a worker.
pub(super) const MOST_QUEUES: usize = 16;

/// The workers that this process hears. Clones share them.
#[derive(Clone)]
pub struct HeardWorkers {
    known: Arc<Mutex<HashMap<String, Arc<Heard>>>>,
    clock: Clock,
    own: Arc<OnceLock<Own>>,
}

/// What this process tells the others of itself, without its workers.
struct Own {
    presence: Presence,
    standing: Arc<Standing>,
    progress: Progress,
    stall_after: Duration,
}

/// A worker that this process has heard.
pub(super) struct Heard {
    since_unix_ms: i64,
    heard_unix_ms: AtomicI64,
    calls: Mutex<Calls>,
}

/// What the calls of a worker have told of it.
#[derive(Default)]
struct Calls {
    peer: Option<SocketAddr>,
    queues: Vec<Arc<QueueCounts>>,
}

pub(super) struct QueueCounts {
    queue: String,
    done: AtomicU64,
    failed: AtomicU64,
}

/// The queues of the items of a call, in order.
pub(super) enum QueuesOfItems {
    /// All items are of one queue, as they are for most workers. `None`: they are not counted.
    One(Option<Arc<QueueCounts>>),
    Each(Vec<Option<Arc<QueueCounts>>>),
}

impl Calls {
    /// The counts of a queue; `None`: the name is invalid, or the worker has too many queues.
    fn of(&mut self, queue: &str) -> Option<Arc<QueueCounts>> {
        if let Some(counts) = self.queues.iter().find(|counts| counts.queue == queue) {
            return Some(Arc::clone(counts));
        }
        if self.queues.len() >= MOST_QUEUES || QueueName::new(queue).is_err() {
            return None;
        }
        let counts = Arc::new(QueueCounts {
            queue: queue.to_owned(),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        self.queues.push(Arc::clone(&counts));
        Some(counts)
    }
}

impl HeardWorkers {
    pub fn new(clock: Clock) -> Self {
        Self {
            known: Arc::default(),
            clock,
            own: Arc::default(),
        }
    }

    /// Hears a call of a worker. `None`: the name is not one that a worker may have.
    pub(super) fn hear<'a>(
        &self,
        caller: &Caller,
        worker: &str,
        queues: impl IntoIterator<Item = &'a str>,
    ) -> Option<Arc<Heard>> {
        let heard = self.heard(worker)?;
        self.hear_again(&heard);
        let mut calls = heard.calls.lock();
        calls.peer = caller.client.peer;
        for queue in queues {
            calls.of(queue);
        }
        drop(calls);
        Some(heard)
    }

    /// Notes that a worker was heard just now. Its stream calls this for each frame.
    pub(super) fn hear_again(&self, heard: &Heard) {
        let now = self.clock.now_unix_ms();
        heard.heard_unix_ms.store(now, Relaxed);
    }

    /// Hears a report, and answers the queues of its items: their lease tokens name them.
    pub(super) fn hear_report<T>(
        &self,
        caller: &Caller,
        worker: &str,
        items: &[Item<T>],
    ) -> QueuesOfItems {
        let Some(heard) = self.hear(caller, worker, []) else {
            return QueuesOfItems::One(None);
        };
        let mut calls = heard.calls.lock();
        let first = items.first().map_or("", queue_of);
        if items.iter().all(|item| queue_of(item) == first) {
            return QueuesOfItems::One(calls.of(first));
        }
        let each = items.iter().map(|item| calls.of(queue_of(item)));
        QueuesOfItems::Each(each.collect())
    }

    fn heard(&self, worker: &str) -> Option<Arc<Heard>> {
        let mut known = self.known.lock();
        if let Some(heard) = known.get(worker) {
            return Some(Arc::clone(heard));
        }
        WorkerName::new(worker).ok()?;
        if known.len() >= MOST_KNOWN {
            forget_half(&mut known);
        }
        let now = self.clock.now_unix_ms();
        let heard = Arc::new(Heard {
            since_unix_ms: now,
            heard_unix_ms: AtomicI64::new(now),
            calls: Mutex::default(),
        });
        known.insert(worker.to_owned(), Arc::clone(&heard));
        Some(heard)
    }

    /// The workers for the value of this process, and how many more it has heard.
    fn reported(&self) -> (Vec<HeardWorker>, u64) {
        let now = self.clock.now_unix_ms();
        let mut known = self.known.lock();
        known.retain(|_, heard| now - heard.heard_unix_ms.load(Relaxed) < STAYS_MS);
        let mut latest: Vec<(i64, &String, &Arc<Heard>)> = known
            .iter()
            .map(|(name, heard)| (heard.heard_unix_ms.load(Relaxed), name, heard))
            .collect();
        latest.sort_unstable_by_key(|(at, name, _)| (-at, *name));
        let more = latest.len().saturating_sub(MOST_REPORTED) as u64;
        latest.truncate(MOST_REPORTED);
        let workers = latest.into_iter().map(|(at, name, heard)| {
            let calls = heard.calls.lock();
            let queues = calls.queues.iter().map(|counts| WorkerCounts {
                queue: counts.queue.clone(),
                done: counts.done.load(Relaxed),
                failed: counts.failed.load(Relaxed),
            });
            HeardWorker {
                worker: name.clone(),
                address: calls.peer.map(|peer| peer.to_string()).unwrap_or_default(),
                since_unix_ms: heard.since_unix_ms,
                heard_unix_ms: at,
                queues: queues.collect(),
            }
        });
        (workers.collect(), more)
    }

    /// Writes the value of this process to Redis every few seconds, until the stop.
    pub fn announce(
        &self,
        presence: Presence,
        stall_after: Duration,
        coordination: Coordination,
        supervisor: &Supervisor,
    ) {
        self.own.get_or_init(|| Own {
            presence,
            standing: Arc::clone(coordination.standing()),
            progress: supervisor.progress().clone(),
            stall_after,
        });
        let shared = (self.clone(), coordination);
        supervisor.spawn_loop(
            "presence",
            shared,
            |(workers, coordination), cx| async move {
                workers.keep_announcing(&coordination, &cx).await;
                Ok::<_, coordination::Error>(())
            },
        );
    }

    /// What this process tells the others of itself now.
    fn presence(&self) -> Option<Presence> {
        let own = self.own.get()?;
        let (workers, more) = self.reported();
        let stalled = own.progress.stalled(own.stall_after);
        Some(Presence {
            heard_unix_ms: self.clock.now_unix_ms(),
            workers,
            more,
            leads: own.standing.leads(),
            stalled: stalled.into_iter().map(|(name, _)| name).collect(),
            differences: own.standing.differences(),
            ..own.presence.clone()
        })
    }

    /// Puts what this process knows of itself now in the place of what it has told the others.
    pub(super) fn with_own(&self, mut processes: Vec<Presence>) -> Vec<Presence> {
        if let Some(own) = self.presence() {
            processes.retain(|one| one.process != own.process);
            processes.push(own);
        }
        processes
    }

    async fn keep_announcing(&self, coordination: &Coordination, cx: &Loop) {
        while let Some(presence) = self.presence() {
            // A process that cannot write is one that the others do not see. Whatever keeps it
            // from that, the other loops say it.
            if let Err(error) = coordination.announce(&presence).await {
                tracing::debug!("cannot tell the others of this process: {error}");
            }
            cx.beat();
            if !cx.pause(WRITE_EVERY).await {
                break;
            }
        }
        let Some(own) = self.own.get() else { return };
        if let Err(error) = coordination.leave(&own.presence.process).await {
            tracing::debug!("cannot take this process off the list: {error}");
        }
    }
}

impl QueuesOfItems {
    /// Counts the reports that taskd has taken.
    pub(super) fn count(&self, answers: &[ItemAnswer], is_done: bool) {
        for (place, answer) in answers.iter().enumerate() {
            if answer.status != ItemStatus::Ok {
                continue;
            }
            let counts = match self {
                Self::One(counts) => counts.as_ref(),
                Self::Each(each) => each.get(place).and_then(Option::as_ref),
            };
            if let Some(counts) = counts {
                let count = if is_done {
                    &counts.done
                } else {
                    &counts.failed
                };
                count.fetch_add(1, Relaxed);
            }
        }
    }
}

fn queue_of<T>(item: &Item<T>) -> &str {
    item.lease_token.split(':').next().unwrap_or_default()
}

fn forget_half(known: &mut HashMap<String, Arc<Heard>>) {
    let mut times: Vec<i64> = known
        .values()
        .map(|heard| heard.heard_unix_ms.load(Relaxed))
        .collect();
    times.sort_unstable();
    let middle = times[times.len() / 2];
    // Many may have been heard at the same time as the middle one: no more than half stay.
    let mut room = known.len() / 2;
    known.retain(|_, heard| {
        let stays = heard.heard_unix_ms.load(Relaxed) >= middle && room > 0;
        room -= usize::from(stays);
        stays
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_remembers_the_workers_that_it_heard_last() {
        let clock = Clock::of_this_machine();
        let workers = HeardWorkers::new(clock.clone());
        for n in 0..MOST_KNOWN {
            workers.heard(&format!("w-{n}")).unwrap();
            if n == MOST_KNOWN / 4 {
                clock.advance(Duration::from_secs(1));
            }
        }
        workers.heard("one more").unwrap();
        let names = workers.known.lock();
        assert!(names.len() <= MOST_KNOWN / 2 + 1 && names.contains_key("one more"));
        assert!(!names.contains_key("w-0"));
        drop(names);
        assert!(workers.heard("a\nb").is_none());
        let (reported, more) = workers.reported();
        assert_eq!(reported.len(), MOST_REPORTED);
        assert!(more > 0);
        clock.advance(Duration::from_millis(STAYS_MS.unsigned_abs()));
        assert!(workers.reported().0.is_empty());
    }
}
