//! The queue beside the model.

use std::{collections::BTreeSet, time::Duration};

use bytes::Bytes;
use futures::future::join_all;
use redis::Value;
use taskd::{
    model::{
        ChangingTask, LeaseNumber, Offset, Priority, QueueName, Requeue, ShardId, TaskId,
        WorkerName,
    },
    queue::{
        ArbitratedTasks, Claim, Code, Completion, Enqueue, EnqueueTask, Enqueued, Event, Expired,
        Extension, Fence, Inspected, OUTBOX_FULL, OUTBOX_FULL_BYTES, Promoted, Queue, RecordStatus,
        RejectMode, Rejection, Source, Stats,
        keys::{LANES, ShardKeys},
    },
    redis_pool::{Redis, scripts},
    runtime::Progress,
};
use tokio_util::sync::CancellationToken;

use super::model::{
    ANYBODY, BACKOFF, GENERATION, HOUR, Lease, Model, OVERDUE, Own, Task, due, id_of, member,
};
use crate::support::redis::{Fsync, RedisServer};

pub(super) const WORKERS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
pub(super) const ANY_WEIGHT: usize = 1 << 20;
/// More than there is of anything.
const ALL: usize = 1 << 40;
/// The time of a task that waits for its time (ms).
const LATER: i64 = i64::MAX >> 12;
/// Nothing is scheduled so far away.
const FAR: Duration = Duration::from_secs(1 << 40);

/// A task to put in; `credited` has a bit per worker of [`WORKERS`].
#[derive(Clone, Debug)]
pub(super) struct NewTask {
    pub(super) replicas: u32,
    pub(super) priority: u8,
    pub(super) max_attempts: u8,
    pub(super) size: usize,
    pub(super) credited: u8,
    pub(super) later: bool,
    pub(super) backoff: Own,
}

pub(super) struct Ask {
    pub(super) worker: String,
    pub(super) most: usize,
    pub(super) most_bytes: usize,
}

/// The answer to one claim: its grant, whether the scan ended early, and id, body and attempt of
/// each task.
type Got = (u64, bool, Vec<(TaskId, Bytes, u32)>);

/// Every call goes to both, and their answers and states are compared.
pub(super) struct Checked {
    pub(super) redis: Redis,
    pub(super) queue: Queue,
    pub(super) shard: ShardId,
    keys: ShardKeys,
    pub(super) model: Model,
    /// Every lease that was ever handed out to somebody who still knows it.
    pub(super) known: Vec<Lease>,
    /// Every task ever, as it stood on `pipeline`.
    pub(super) records: Vec<EnqueueTask>,
    /// As the shard told it last.
    fence: Fence,
    seen: BTreeSet<String>,
    added: usize,
    next: u64,
    clock: u64,
}

/// The most elements ahead and the most live tasks that a batch may lead to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) ahead: u64,
    pub(super) live: u64,
}

impl Room {
    pub(super) const ANY: Self = Self {
        ahead: u64::MAX,
        live: u64::MAX,
    };

    fn batch<'a>(self, source: Source<'a>, tasks: &'a [EnqueueTask]) -> Enqueue<'a> {
        let (high_water_tasks, live_tasks_max) = (self.ahead, self.live);
        Enqueue {
            source,
            tasks,
            high_water_tasks,
            high_water_bytes: u64::MAX,
            live_tasks_max,
        }
    }
}

/// Those of the bits.
fn workers(bits: u8) -> Vec<String> {
    (0..6)
        .filter(|w| bits >> w & 1 == 1)
        .map(|w| WORKERS[w].to_owned())
        .collect()
}

fn worker(name: &str) -> WorkerName {
    WorkerName::new(name).expect("a name")
}

impl Checked {
    /// With a shard that was opened and holds nothing, on a server that holds nothing else.
    pub(super) async fn new(redis: &Redis) -> Self {
        let () = redis::cmd("FLUSHALL")
            .query_async(&mut redis.conn())
            .await
            .expect("flush");
        let shard = ShardId {
            queue: QueueName::new("q").expect("a name"),
            number: 0,
        };
        let queue = Queue::new(redis.clone());
        queue.add_shard(&shard);
        queue
            .upkeep
            .open_shard(&shard, GENERATION, "topic", None)
            .await
            .expect("open");
        let keys = ShardKeys::new(redis.prefix(), &shard);
        let (model, known, records, fence, seen) = Default::default();
        let redis = redis.clone();
        Self {
            redis,
            queue,
            shard,
            keys,
            model,
            known,
            records,
            fence,
            seen,
            added: 0,
            next: 0,
            clock: 0,
        }
    }

    pub(super) async fn alone() -> (RedisServer, Self) {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.expect("connect");
        let checked = Self::new(&redis).await;
        (server, checked)
    }

    fn serial(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn newcomer(&mut self) -> String {
        format!("newcomer-{}", self.serial())
    }

    /// Three to a major, because offsets are pairs.
    pub(super) fn next_offset(&mut self) -> Offset {
        let serial = self.serial();
        Offset {
            major: serial / 3,
            minor: serial % 3,
        }
    }

    pub(super) fn record(&mut self, new: &NewTask) -> EnqueueTask {
        let offset = self.next_offset();
        // The first 48 bits are the time it was made.
        let id = id_of(&[&self.next.to_be_bytes()[2..], &[7; 10][..]].concat());
        let head = [
            &[new.priority][..],
            &u32::from(new.max_attempts).to_be_bytes(),
            &3_600_000_u32.to_be_bytes(),
        ];
        // A body of protobuf: a change finds the values of the one before.
        let size = u8::try_from(new.size).expect("one byte");
        let body = [
            head.concat(),
            new.backoff.field(),
            vec![0x12, size],
            vec![b'-'; new.size],
        ]
        .concat()
        .into();
        let credited = workers(new.credited);
        let not_before_unix_ms = if new.later { LATER } else { 0 };
        EnqueueTask {
            offset,
            id,
            replicas: new.replicas,
            not_before_unix_ms,
            body,
            credited,
            epoch: 0,
        }
    }

    pub(super) async fn put(&mut self, tasks: &[NewTask]) -> Vec<TaskId> {
        let records: Vec<_> = tasks.iter().map(|new| self.record(new)).collect();
        self.enqueue(&records, Room::ANY).await;
        records.iter().map(|record| record.id).collect()
    }

    /// Records of a partition.
    pub(super) async fn enqueue(&mut self, records: &[EnqueueTask], room: Room) {
        let upto = records.last().expect("not empty").offset;
        let source = Source::Partition {
            topic_generation: "topic",
            epoch: 1,
            predecessor: self.model.offset,
            upto,
            again: records[0].epoch > 0,
        };
        let (dealt_with, added) = self.taken_in(records, room, true).await;
        self.model.has_moved |= added > 0 && records[0].epoch > 0;
        let answer = self
            .queue
            .enqueuer
            .enqueue(&self.shard, &room.batch(source, records))
            .await
            .expect("enqueue");
        assert_eq!(
            answer,
            Enqueued::Done {
                dealt_with,
                added,
                crowded: Vec::new(),
            }
        );
        self.compare(false).await;
    }

    /// Tasks that were never on the bus. They are new, or they have waited for room, and the queue
    /// may know them.
    pub(super) async fn enqueue_from_store(
        &mut self,
        records: &[EnqueueTask],
        have_waited: bool,
        room: Room,
    ) {
        let fence = self.fence.clone();
        let source = if have_waited {
            Source::Waiting(&fence)
        } else {
            Source::Store(&fence)
        };
        let is_old = fence == Fence::default()
            || self.model.has_moved
            || have_waited && self.model.has_forgotten;
        let (dealt_with, added) = if is_old {
            (0, 0)
        } else {
            self.taken_in(records, room, false).await
        };
        let answer = self
            .queue
            .enqueuer
            .enqueue(&self.shard, &room.batch(source, records))
            .await
            .expect("enqueue");
        if is_old {
            let Enqueued::Moved(now) = answer else {
                panic!("{fence:?} is old: {answer:?}")
            };
            assert_ne!(now, fence);
            (self.fence, self.model.has_moved, self.model.has_forgotten) = (now, false, false);
        } else {
            assert_eq!(
                answer,
                Enqueued::Done {
                    dealt_with,
                    added,
                    crowded: Vec::new(),
                }
            );
            self.model.has_moved |= have_waited && added > 0;
        }
        self.compare(false).await;
    }

    /// The model takes what the queue has to take. Answers how many are dealt with, and how many
    /// added.
    async fn taken_in(
        &mut self,
        records: &[EnqueueTask],
        room: Room,
        are_of_bus: bool,
    ) -> (usize, usize) {
        let stats = self.queue.stats(&self.shard).await.expect("stats");
        let (mut ahead, mut live, mut added) = (stats.ahead, stats.live, 0);
        for (dealt_with, new) in records.iter().enumerate() {
            if are_of_bus && Some(new.offset) <= self.model.offset {
                continue;
            }
            if let Some(task) = self.model.arriving(new) {
                if ahead >= room.ahead || live >= room.live {
                    return (dealt_with, added);
                }
                if task.needs_workers() {
                    if !self.model.tasks.contains_key(&new.id) {
                        self.added += 1;
                        self.records.push(new.clone());
                    }
                    self.model.enqueue(new.id, task);
                    (added, live, ahead) = (
                        added + 1,
                        live + 1,
                        ahead + u64::from(new.not_before_unix_ms == 0),
                    );
                }
            }
            if are_of_bus {
                self.model.offset = Some(new.offset);
            }
        }
        (records.len(), added)
    }

    /// The tasks that an operator may send again.
    pub(super) fn given_up(&self) -> Vec<TaskId> {
        let is_given_up = |id: &TaskId| {
            let status = self.model.tasks.get(id).map(|task| task.status);
            matches!(
                status,
                None | Some(RecordStatus::Dead | RecordStatus::Cancelled)
            )
        };
        self.records
            .iter()
            .map(|record| record.id)
            .filter(is_given_up)
            .collect()
    }

    /// Sends a task again, with the credits that SQL has (as in [`NewTask`]).
    pub(super) async fn send_again(&mut self, id: TaskId, credited: u8, later: bool, room: Room) {
        let mut record = self
            .records
            .iter()
            .find(|record| record.id == id)
            .expect("a record")
            .clone();
        record.epoch += 1;
        record.offset = self.next_offset();
        record.credited = workers(credited);
        record.not_before_unix_ms = if later { LATER } else { 0 };
        for other in self
            .records
            .iter_mut()
            .filter(|other| other.id == record.id)
        {
            *other = record.clone();
        }
        self.enqueue(&[record], room).await;
    }

    /// The epoch of a task in SQL.
    fn epoch_of(&self, id: TaskId) -> u32 {
        self.records
            .iter()
            .find(|record| record.id == id)
            .map_or(0, |record| record.epoch)
    }

    pub(super) async fn read_on_after_redis_fell_back(&mut self) {
        let upto = self.next_offset();
        let source = Source::Partition {
            topic_generation: "topic",
            epoch: 1,
            predecessor: Some(upto),
            upto,
            again: false,
        };
        let batch = Room::ANY.batch(source, &[]);
        let answer = self
            .queue
            .enqueuer
            .enqueue(&self.shard, &batch)
            .await
            .expect("enqueue");
        assert_eq!(answer, Enqueued::Behind(self.model.offset));
        self.compare(false).await;
    }

    /// Checks the answer to this request against the tasks open to the worker; the model follows.
    fn granted(&mut self, ask: &Ask, (grant, more, got): Got) -> Vec<Lease> {
        let open = self.model.open_to(&ask.worker);
        let (tasks, lanes) = (&self.model.tasks, self.model.lanes());
        let ids: Vec<_> = got.iter().map(|(id, ..)| *id).collect();
        // It does not look beyond the bound of a call while it rests.
        let rests = tasks.values().any(|task| task.rests(&ask.worker));
        let said = format!("{ids:?} of {open:?} for {}", ask.worker);
        assert!(
            ids.len() <= ask.most && ids.iter().all(|id| open.contains(id)),
            "{said}"
        );
        let weight = |ids: &[TaskId]| ids.iter().map(|id| tasks[id].body.len()).sum::<usize>();
        assert!(ids.len() < 2 || weight(&ids) <= ask.most_bytes, "{said}");
        if self.seen.insert(ask.worker.clone()) {
            // A worker that has passed nothing gets the oldest of each lane first, as many as fit.
            assert_eq!(ids, open[..ids.len()]);
            let fits = |n: &usize| *n == 1 || weight(&open[..*n]) <= ask.most_bytes;
            let most = (1..=open.len().min(ask.most)).take_while(fits).count();
            assert!(more || rests || ids.len() == most, "{most} fit: {said}");
        } else {
            let rank = |id: &TaskId| {
                lanes
                    .iter()
                    .position(|lane| *lane == tasks[id].lane(false))
                    .expect("a lane")
            };
            assert!(ids.is_sorted_by_key(rank), "{said}");
            let heaviest = open
                .iter()
                .map(|id| tasks[id].body.len())
                .max()
                .unwrap_or(0);
            let heavy = !ids.is_empty() && weight(&ids) + heaviest > ask.most_bytes;
            let ended = more || rests || heavy || ids.len() == ask.most;
            let from = ids.last().map_or(0, rank);
            for id in open.iter().filter(|id| !ids.contains(id)) {
                // It sees again what it gave back itself when the wait is over; and what it passed
                // while that was reserved for another one.
                let passed = tasks[id]
                    .gave_back
                    .iter()
                    .any(|(worker, _)| worker == ANYBODY || *worker == ask.worker);
                assert!(
                    passed || (ended && (rests || rank(id) >= from)),
                    "not {id}: {said}"
                );
            }
        }
        for (id, body, attempt) in &got {
            assert_eq!((body, *attempt), (&tasks[id].body, tasks[id].failures + 1));
        }
        let lease = |id| Lease {
            id,
            worker: ask.worker.clone(),
            grant,
        };
        let leases: Vec<_> = ids.into_iter().map(lease).collect();
        if !leases.is_empty() {
            self.model.grants += 1;
            assert_eq!(grant, self.model.grants);
        }
        leases.iter().for_each(|lease| self.model.lease(lease));
        leases
    }

    fn claim_of(ask: &Ask) -> Claim {
        Claim {
            worker: worker(&ask.worker),
            max_tasks: ask.most,
            max_bytes: ask.most_bytes,
            is_first: true,
            lease: None,
            priority: None,
        }
    }

    /// Concurrent requests: one call of the script.
    pub(super) async fn claim(&mut self, asks: &[Ask]) -> Vec<Lease> {
        let shard = self.queue.shards_of(&self.shard.queue).remove(0);
        let answers = join_all(
            asks.iter()
                .map(|ask| self.queue.worker.claim(&shard, Self::claim_of(ask))),
        )
        .await;
        let mut leases = Vec::new();
        for (ask, answer) in asks.iter().zip(answers) {
            let granted = answer.expect("claim");
            let (more, tasks) = (granted.more, granted.deliver());
            let grant = tasks.first().map_or(0, |task| task.token.grant);
            assert!(tasks.iter().all(|task| task.token.grant == grant));
            let got = tasks
                .into_iter()
                .map(|task| (task.id, task.body, task.token.attempt))
                .collect();
            leases.extend(self.granted(ask, (grant, more, got)));
        }
        self.queue.worker.report_deliveries().await;
        self.known.extend(leases.clone());
        self.compare(false).await;
        leases
    }

    pub(super) async fn claim_by(&mut self, name: &str, most: usize) -> Vec<Lease> {
        self.claim(&[Ask {
            worker: name.into(),
            most,
            most_bytes: ANY_WEIGHT,
        }])
        .await
    }

    pub(super) async fn claim_one(&mut self, name: &str) -> Lease {
        self.claim_by(name, 1)
            .await
            .pop()
            .unwrap_or_else(|| panic!("{name} gets nothing"))
    }

    /// With a scan bound that the queue would not use; answers whether to ask again.
    pub(super) async fn claim_looking_at(
        &mut self,
        elements: usize,
        ask: &Ask,
    ) -> (Vec<Lease>, bool) {
        let mut call = self.keys.call(&scripts::CLAIM, None);
        call.arg(elements)
            .arg(OUTBOX_FULL)
            .arg(OUTBOX_FULL_BYTES)
            .arg(ANY_WEIGHT)
            .arg("")
            .arg(0);
        call.arg(&ask.worker)
            .arg(format!("{} {} 1 0 0", ask.most, ask.most_bytes));
        let value = call.run(&mut self.redis.conn()).await.expect("claim");
        let ((grant, more, got), left) = claimed(value);
        let leases = self.granted(ask, (grant, more, got));
        // Nobody says that they were delivered: if they run out, it costs nothing.
        self.model
            .unseen
            .extend(leases.iter().map(|lease| lease.grant));
        self.known.extend(leases.clone());
        self.compare(false).await;
        if let Some(left) = left {
            let stands = |lane: &usize| !self.model.standing(*lane).is_empty();
            let standing = (0..6)
                .filter(stands)
                .map(|lane| 1 << (lane / 2))
                .fold(0, |sum: u8, priority| sum | priority);
            assert_eq!(left, standing, "what a claim says about the lanes");
        }
        (leases, more)
    }

    /// A process claims, delivers nothing and stops.
    pub(super) async fn claim_undelivered(&mut self, most: usize) {
        let process = Queue::new(self.redis.clone());
        process.add_shard(&self.shard);
        let ask = Ask {
            worker: self.newcomer(),
            most,
            most_bytes: ANY_WEIGHT,
        };
        // Nobody can look into what was not delivered; what a newcomer gets is known.
        let open = self.model.open_to(&ask.worker);
        let granted = process
            .worker
            .claim(
                &process.shards_of(&self.shard.queue)[0],
                Self::claim_of(&ask),
            )
            .await;
        let granted = granted.expect("claim");
        let grant = self.model.grants + 1;
        let got = |id: &TaskId| {
            (
                *id,
                self.model.tasks[id].body.clone(),
                self.model.tasks[id].failures + 1,
            )
        };
        let got = open.iter().take(granted.len()).map(got).collect();
        let leases = self.granted(&ask, (grant, granted.more, got));
        self.compare(false).await;
        drop(granted);
        let stop = CancellationToken::new();
        stop.cancel();
        process
            .worker
            .settle_deliveries(
                &Progress::default().register("release"),
                &stop,
                std::future::ready(()),
            )
            .await;
        for lease in leases {
            self.model
                .reject(lease.id, lease.grant, RejectMode::Release, "");
        }
        self.compare(false).await;
    }

    pub(super) async fn complete(&mut self, leases: &[Lease]) -> Vec<Code> {
        let completion = |lease: &Lease| {
            let (token, worker) = (lease.token(&self.shard), worker(&lease.worker));
            self.queue.worker.complete(Completion {
                id: lease.id,
                token,
                worker,
                report: lease.report(),
                limit: Default::default(),
            })
        };
        let answers = join_all(leases.iter().map(completion)).await;
        let (mut codes, mut released) = (Vec::new(), Vec::new());
        for (lease, answer) in leases.iter().zip(answers) {
            let code = answer.expect("complete");
            assert_eq!(code, self.model.code(lease), "{lease:?}");
            if code == Code::Ok {
                released.extend(self.model.credit(lease));
            }
            codes.push(code);
        }
        released.retain(|wait| self.model.waits.contains_key(wait));
        self.make_due("delayed", &released).await;
        self.compare(false).await;
        codes
    }

    pub(super) async fn reject(&mut self, items: &[(Lease, RejectMode)]) -> Vec<(Code, bool)> {
        let item = |(lease, mode): &(Lease, RejectMode)| Rejection {
            id: lease.id,
            token: lease.token(&self.shard),
            worker: worker(&lease.worker),
            mode: *mode,
            reason: "no luck".into(),
            limit: Default::default(),
        };
        let back: Vec<_> = items.iter().map(item).collect();
        let answers = self
            .queue
            .worker
            .reject(&self.shard, &back, &BACKOFF)
            .await
            .expect("reject");
        for ((lease, mode), answer) in items.iter().zip(&answers) {
            let code = self.code_of_no_completion(lease);
            let dead =
                code == Code::Ok && self.model.reject(lease.id, lease.grant, *mode, "no luck");
            assert_eq!(*answer, (code, dead), "{lease:?} {mode:?}");
        }
        self.compare(false).await;
        answers
    }

    fn code_of_no_completion(&self, lease: &Lease) -> Code {
        match self.model.code(lease) {
            _ if self.is_cancelled(lease.id) => Code::Cancelled,
            Code::Repeat => Code::AlreadyCompleted,
            code => code,
        }
    }

    fn is_cancelled(&self, id: TaskId) -> bool {
        self.model
            .tasks
            .get(&id)
            .is_some_and(|task| task.status == RecordStatus::Cancelled)
    }

    /// Ends a task that stood on `pipeline`, or one that has not come: cancelled, or dead at its
    /// deadline.
    pub(super) async fn end(&mut self, which: usize, new: Option<&NewTask>, status: RecordStatus) {
        let record = match new {
            Some(new) => {
                let record = self.record(new);
                self.records.push(record.clone());
                record
            }
            None => self.records[which % self.records.len()].clone(),
        };
        self.added += usize::from(!self.model.tasks.contains_key(&record.id));
        let priority = Priority::from_number(record.body[0].into());
        let (id, shard, replicas, epoch) =
            (record.id, self.shard.clone(), record.replicas, record.epoch);
        let task = ChangingTask {
            id,
            shard,
            replicas,
            priority,
            epoch,
        };
        let changer = self.queue.upkeep.changer();
        let answer = match status {
            RecordStatus::Dead => changer
                .end_overdue(&self.shard, &[(&task, OVERDUE.into())])
                .await
                .expect("deadline"),
            _ => changer.cancel(&self.shard, &[&task]).await.expect("cancel"),
        };
        let expected = self.model.end(&record, status);
        assert_eq!(
            answer,
            ArbitratedTasks {
                generation: GENERATION,
                answers: vec![expected]
            },
            "{status:?} {record:?}"
        );
        self.compare(false).await;
    }

    /// Gives a task that stood on `pipeline` another NUM and priority.
    pub(super) async fn change(&mut self, which: usize, replicas: u32, priority: u8) {
        let record = self.records[which % self.records.len()].clone();
        let (shard, priority) = (self.shard.clone(), Priority::from_number(priority.into()));
        let task = ChangingTask {
            id: record.id,
            shard,
            replicas,
            priority,
            epoch: record.epoch,
        };
        let answer = self
            .queue
            .upkeep
            .changer()
            .update(&self.shard, &[&task])
            .await
            .expect("change");
        let expected = self.model.change(&task, &record.body);
        assert_eq!(
            answer,
            ArbitratedTasks {
                generation: GENERATION,
                answers: vec![expected]
            },
            "{task:?}"
        );
        self.compare(false).await;
    }

    pub(super) async fn requeue(&mut self, id: TaskId, requeue: &Requeue) {
        let (shard, epoch) = (self.shard.clone(), self.epoch_of(id));
        let task = ChangingTask {
            id,
            shard,
            replicas: 1,
            priority: Priority::High,
            epoch,
        };
        let answer = self
            .queue
            .upkeep
            .changer()
            .requeue(&self.shard, &[&task], requeue)
            .await
            .expect("requeue");
        let expected = self.model.requeue(id, epoch, requeue);
        assert_eq!(
            answer,
            ArbitratedTasks {
                generation: GENERATION,
                answers: vec![expected]
            },
            "{id} {requeue:?}"
        );
        self.compare(false).await;
    }

    pub(super) async fn extend(&mut self, leases: &[Lease]) {
        let extension = |lease: &Lease| {
            let (token, worker) = (lease.token(&self.shard), worker(&lease.worker));
            Extension {
                id: lease.id,
                token,
                worker,
                by: HOUR,
            }
        };
        let items: Vec<_> = leases.iter().map(extension).collect();
        let answers = self
            .queue
            .worker
            .extend(&self.shard, &items)
            .await
            .expect("extend");
        for (lease, (code, deadline)) in leases.iter().zip(answers) {
            assert_eq!(code, self.code_of_no_completion(lease), "{lease:?}");
            assert_eq!(deadline > 0, code == Code::Ok);
            if code == Code::Ok {
                self.model
                    .leases
                    .insert(member(lease.id, lease.grant), None);
                self.model.unseen.remove(&lease.grant);
            }
        }
        self.compare(false).await;
    }

    /// Writes scores of the past into the zset `leases` or `delayed`, one after the other.
    pub(super) async fn make_due(&mut self, zset: &str, members: &[Vec<u8>]) {
        for member in members {
            self.clock += 1;
            let mut command = redis::cmd("ZADD");
            command
                .arg(format!("t:{{q:0}}:{zset}"))
                .arg("XX")
                .arg(self.clock)
                .arg(member);
            let () = command
                .query_async(&mut self.redis.conn())
                .await
                .expect("zadd");
            let timers = if zset == "leases" {
                &mut self.model.leases
            } else {
                &mut self.model.waits
            };
            timers.insert(member.clone(), Some(self.clock));
        }
    }

    pub(super) async fn expire(&mut self, most: usize) -> Expired {
        let due = due(&self.model.leases, most);
        let mut expected = Expired {
            more: due.len() == most,
            ..Expired::default()
        };
        for lease in due {
            let (id, grant) = (
                id_of(&lease),
                String::from_utf8_lossy(&lease[16..])
                    .parse()
                    .expect("a grant"),
            );
            let holder = self.model.tasks[&id]
                .held
                .iter()
                .find(|(_, other)| *other == grant);
            // A task that died a moment ago has closed its other leases.
            let Some((worker, _)) = holder.cloned() else {
                continue;
            };
            if self.model.unseen.contains(&grant) {
                self.model.reject(id, grant, RejectMode::Release, "");
                self.model.unseen.insert(grant);
                expected.undelivered += 1;
                continue;
            }
            let dead = self
                .model
                .reject(id, grant, RejectMode::Retry(None), "lease expired");
            let attempts = self.model.tasks[&id].failures;
            let lease = LeaseNumber {
                generation: GENERATION,
                grant,
            };
            // The test writes deadlines before the first lease could have begun.
            let leased_unix_ms = 0;
            self.model.outbox.push_back(Event::Expired {
                id,
                worker,
                attempts,
                dead,
                lease,
                leased_unix_ms,
            });
            expected.expired += 1;
            expected.dead += u64::from(dead);
        }
        let answer = self
            .queue
            .upkeep
            .expire(&self.shard, most, &BACKOFF)
            .await
            .expect("expire");
        assert_eq!(
            answer,
            Expired {
                next_unix_ms: answer.next_unix_ms,
                ..expected
            }
        );
        assert_eq!(answer.next_unix_ms.is_none(), self.model.leases.is_empty());
        self.compare(false).await;
        answer
    }

    pub(super) async fn leases_run_out(&mut self) {
        let all: Vec<_> = self.model.leases.keys().cloned().collect();
        self.make_due("leases", &all).await;
        while self.expire(7).await.more {}
    }

    pub(super) async fn promote(&mut self, most: usize) -> Promoted {
        let due = due(&self.model.waits, most);
        let promoted = due.iter().filter(|wait| self.model.promote(wait)).count() as u64;
        let answer = self
            .queue
            .upkeep
            .promote(&self.shard, most, FAR)
            .await
            .expect("promote");
        assert_eq!(
            answer,
            Promoted {
                promoted,
                more: due.len() == most,
                next_unix_ms: answer.next_unix_ms,
                now_unix_ms: answer.now_unix_ms,
            }
        );
        assert_eq!(answer.next_unix_ms.is_none(), self.model.waits.is_empty());
        self.compare(false).await;
        answer
    }

    pub(super) async fn waits_end(&mut self) {
        let all: Vec<_> = self.model.waits.keys().cloned().collect();
        self.make_due("delayed", &all).await;
        while self.promote(7).await.more {}
    }

    pub(super) async fn sweep(&mut self, most: usize) -> u64 {
        let swept = self
            .queue
            .upkeep
            .sweep(&self.shard, most)
            .await
            .expect("sweep");
        self.compare(true).await;
        swept.moved
    }

    async fn sweep_to_the_end(&mut self) {
        let mut sweeps = 0;
        while self.sweep(2000).await > 0 {
            sweeps += 1;
            assert!(
                sweeps < 9,
                "a sweep moves the same elements again and again"
            );
        }
        let standing: usize = (0..6).map(|lane| self.model.standing(lane).len()).sum();
        let open = self
            .model
            .tasks
            .values()
            .filter(|task| task.left() > 0)
            .count();
        assert!(
            standing <= 2 * open + 64,
            "{standing} elements for {open} open tasks"
        );
    }

    pub(super) async fn lose_pointer(&mut self, lane: usize, name: &str) {
        let mut command = redis::cmd("HDEL");
        command
            .arg(format!("t:{{q:0}}:{}:P", LANES[lane]))
            .arg(name);
        let () = command
            .query_async(&mut self.redis.conn())
            .await
            .expect("hdel");
    }

    pub(super) async fn leave_spent_elements(&mut self, lane: usize, count: usize) {
        let forgotten = TaskId::derived(TaskId::new(), "", 0, 0);
        let element = [&[0x93, 1, 0, 0xb0][..], forgotten.as_bytes()].concat();
        let mut command = redis::cmd("LPUSH");
        command
            .arg(format!("t:{{q:0}}:{}:T", LANES[lane]))
            .arg(vec![element; count]);
        let () = command
            .query_async(&mut self.redis.conn())
            .await
            .expect("lpush");
        self.model.offers[lane].extend(vec![(forgotten, 0); count]);
        self.compare(false).await;
    }

    pub(super) async fn forward(&mut self, most: usize) {
        let entries = self
            .queue
            .upkeep
            .outbox(&self.shard, most, ANY_WEIGHT)
            .await
            .expect("outbox");
        if !entries.is_empty() {
            self.queue
                .upkeep
                .forwarded(&self.shard, &entries)
                .await
                .expect("forwarded");
        }
        let events = entries.into_iter().flat_map(|entry| entry.events).count();
        self.model.outbox.drain(..events);
        self.compare(false).await;
    }

    /// By two watchdogs that have read the same final records. `sent_again`: meanwhile the first of
    /// these tasks is.
    pub(super) async fn forget(&mut self, most: usize, settled: u8, sent_again: bool) {
        let finals = self
            .queue
            .upkeep
            .finals(&self.shard, Duration::ZERO, most)
            .await
            .expect("finals")
            .ids;
        assert_eq!(finals, self.model.read_finals(most));
        self.compare(false).await;
        if let Some(first) = finals
            .first()
            .filter(|first| sent_again && self.given_up().contains(first))
        {
            self.send_again(*first, 0, false, Room::ANY).await;
        }
        let finals: Vec<_> = finals
            .into_iter()
            .enumerate()
            .map(|(i, id)| (id, settled >> (i % 8) & 1 == 1))
            .collect();
        for _ in 0..2 {
            let forgotten = self.model.forget(&finals);
            let answer = self
                .queue
                .upkeep
                .forget(&self.shard, Duration::ZERO, &finals)
                .await
                .expect("forget");
            assert_eq!(answer, forgotten);
        }
        self.compare(false).await;
    }

    // --- comparing

    async fn compare(&mut self, swept: bool) {
        let mut pipe = redis::pipe();
        let key = |name: &str| format!("t:{{q:0}}:{name}");
        for lane in LANES {
            pipe.cmd("LRANGE").arg(key(lane) + ":T").arg(0).arg(-1);
        }
        pipe.cmd("ZRANGE")
            .arg(key("leases"))
            .arg(0)
            .arg(-1)
            .cmd("ZRANGE")
            .arg(key("delayed"))
            .arg(0)
            .arg(-1);
        pipe.cmd("HKEYS")
            .arg(key("bodies"))
            .cmd("LRANGE")
            .arg(key("finals"))
            .arg(0)
            .arg(-1);
        let mut conn = self.redis.conn();
        let mut read: Vec<Vec<Vec<u8>>> = pipe.query_async(&mut conn).await.expect("read");
        let left_tail = LANES.map(|lane| key(lane) + ":C");
        let gone: Vec<Option<usize>> = redis::cmd("MGET")
            .arg(&left_tail)
            .query_async(&mut conn)
            .await
            .expect("C");
        let [leases, waits, bodies, finals] = <[_; 4]>::try_from(read.split_off(6))
            .expect("four")
            .map(|list| list.into_iter());
        self.compare_lanes(&read, &gone, swept);
        let model = &self.model;
        let set = |list: std::vec::IntoIter<Vec<u8>>| list.collect::<BTreeSet<_>>();
        assert!(set(leases).iter().eq(model.leases.keys()), "leases");
        assert!(set(waits).iter().eq(model.waits.keys()), "waits");
        let live = || {
            model
                .tasks
                .iter()
                .filter(|(_, task)| task.status == RecordStatus::Live)
        };
        assert!(
            set(bodies)
                .iter()
                .map(|id| id_of(id))
                .eq(live().map(|(id, _)| *id)),
            "bodies"
        );
        assert!(
            finals.map(|id| id_of(&id)).eq(model.finals.iter().copied()),
            "finals"
        );

        let ids: Vec<_> = self.records.iter().map(|record| record.id).collect();
        let (offset, records) = self
            .queue
            .inspect(&self.shard, &ids)
            .await
            .expect("inspect");
        assert_eq!(
            offset,
            model.offset.map(|offset| ("topic".to_owned(), offset))
        );
        let short = |task: &Task| {
            let is_one = task.replicas == 1 && task.credited.len() == 1 && !task.has_epoch;
            is_one && task.status == RecordStatus::Completed
        };
        let number = |n: usize| u32::try_from(n).expect("few");
        for (id, record) in ids.iter().zip(records) {
            let expected = model.tasks.get(id).map(|task| Inspected {
                status: task.status,
                replicas: number(task.replicas),
                credited: number(task.credited.len()),
                held: number(task.held.len()),
                // The short form of a record has no room for them.
                failures: if short(task) { 0 } else { task.failures },
                waiting: number(task.waiting),
                epoch: task.epoch,
            });
            assert_eq!(record, expected, "the record of {id}");
        }

        let outbox = self
            .queue
            .upkeep
            .outbox(&self.shard, ALL, ALL)
            .await
            .expect("outbox");
        let entries = outbox.len() as u64;
        let bytes: usize = outbox.iter().map(|entry| entry.bytes).sum();
        let events: Vec<_> = outbox
            .into_iter()
            .flat_map(|entry| entry.events)
            .map(without_times)
            .collect();
        assert_eq!(model.outbox, events, "the outbox");
        let counted: Option<usize> = redis::cmd("HGET")
            .arg(key("counters"))
            .arg("outbox_bytes")
            .query_async(&mut conn)
            .await
            .expect("out");
        assert_eq!(counted.unwrap_or(0), bytes, "bytes of the outbox");
        let waiting = |task: &&Task| task.left() > 0;
        let stats = self.queue.stats(&self.shard).await.expect("stats");
        let expected = Stats {
            open: live().filter(|(_, task)| task.left() > 0).count() as u64,
            leases: model.leases.len() as u64,
            delayed: model.waits.len() as u64,
            live: live().count() as u64,
            waiting_bytes: live()
                .map(|(_, task)| task)
                .filter(waiting)
                .map(|task| task.body.len() as u64 + 400)
                .sum(),
            outbox: entries,
            finals: model.finals.len() as u64,
            oldest_created_unix_ms: self.oldest_near_a_tail(),
            ahead: stats.ahead,
            ..Stats::default()
        };
        assert_eq!(stats, expected);
    }

    /// The time in the id of what is open within 32 elements of a tail.
    fn oldest_near_a_tail(&self) -> Option<i64> {
        let open = |(id, offer): &&(TaskId, u64)| {
            self.model
                .tasks
                .get(id)
                .is_some_and(|task| task.is_offered_by(*offer))
        };
        let first = (0..6).filter_map(|lane| self.model.standing(lane).iter().take(32).find(open));
        first
            .map(|(id, _)| i64::try_from(id.0.as_u128() >> 80).expect("48 bits"))
            .min()
    }

    /// An element leaves the tail when it is spent; a sweep may also put it in front again. A task
    /// with something left is offered.
    fn compare_lanes(&mut self, lanes: &[Vec<Vec<u8>>], gone: &[Option<usize>], swept: bool) {
        let model = &mut self.model;
        let live = |(id, offer): &(TaskId, u64)| {
            model
                .tasks
                .get(id)
                .is_some_and(|task| task.is_offered_by(*offer))
        };
        let mut offered = BTreeSet::<TaskId>::new();
        for lane in 0..6 {
            let (offers, now) = (&mut model.offers[lane], gone[lane].unwrap_or(0));
            let mut moved = Vec::new();
            for element in &offers[model.gone[lane]..now] {
                if live(element) {
                    assert!(
                        swept,
                        "{element:?} left the tail of {} with something left",
                        LANES[lane]
                    );
                    moved.push(*element);
                }
            }
            offers.append(&mut moved);
            model.gone[lane] = now;
            let standing = lanes[lane]
                .iter()
                .rev()
                .map(|element| (id_of(&element[element.len() - 16..]), offer(element)));
            assert!(
                standing.eq(offers[now..].iter().copied()),
                "{}: {:?}",
                LANES[lane],
                &offers[now..]
            );
            offered.extend(
                offers[now..]
                    .iter()
                    .filter(|element| live(element))
                    .map(|(id, _)| *id),
            );
        }
        let open = model
            .tasks
            .iter()
            .filter(|(_, task)| task.left() > 0)
            .map(|(id, _)| *id);
        assert!(
            open.into_iter().all(|id| offered.contains(&id)),
            "open, but in no lane"
        );
    }

    /// Newcomers do all the rest; nothing stays but what never disappears.
    pub(super) async fn finish(&mut self) {
        // A task that is reserved for a worker that does not come is for everybody now.
        let is_reserved =
            |task: &Task| task.status == RecordStatus::Live && task.reserved.is_some();
        let reserved = self
            .model
            .tasks
            .iter()
            .filter(|(_, task)| is_reserved(task))
            .map(|(id, _)| *id);
        for id in reserved.collect::<Vec<_>>() {
            self.requeue(id, &Requeue::All).await;
        }
        for round in 0.. {
            self.sweep_to_the_end().await;
            self.leases_run_out().await;
            self.waits_end().await;
            if self
                .model
                .tasks
                .values()
                .all(|task| task.status != RecordStatus::Live)
            {
                break;
            }
            assert!(round < 5, "each newcomer does a replica of each");
            let name = self.newcomer();
            let leases = self.claim_by(&name, 1000).await;
            self.complete(&leases).await;
        }
        self.forward(ALL).await;
        // The time of what was never delivered is over.
        for grant in &self.model.unseen {
            let mut past = redis::cmd("ZADD");
            past.arg("t:{q:0}:undelivered").arg("XX").arg(1).arg(*grant);
            let () = past
                .query_async(&mut self.redis.conn())
                .await
                .expect("zadd");
        }
        self.expire(7).await;
        self.forget(1000, 0xff, false).await;
        self.sweep_to_the_end().await;
        assert_eq!(
            self.model.forgotten.len(),
            self.added,
            "each task ended once"
        );
        for task in &self.model.forgotten {
            let workers: BTreeSet<_> = task.credited.iter().map(|(worker, _)| worker).collect();
            assert_eq!(workers.len(), task.credited.len(), "distinct: {task:?}");
            match task.status {
                RecordStatus::Completed if task.lowered => assert!(workers.len() >= task.replicas),
                RecordStatus::Completed => assert_eq!(workers.len(), task.replicas),
                RecordStatus::Cancelled => {}
                RecordStatus::Dead if task.is_overdue => {}
                RecordStatus::Dead if task.backoff == Own::GivesUp => {
                    assert!(!task.history.is_empty())
                }
                _ => assert!(
                    task.failures >= task.max_attempts * u32::try_from(task.replicas).expect("few")
                ),
            }
        }
        let keys: Vec<String> = redis::cmd("KEYS")
            .arg("*")
            .query_async(&mut self.redis.conn())
            .await
            .expect("keys");
        let short = |key: &String| key.trim_start_matches("t:{q:0}:").to_owned();
        let never = |key: &String| {
            ["generation", "counters", "offset", "outbox"].contains(&key.as_str())
                || key.ends_with(":C")
        };
        let left: Vec<_> = keys.iter().map(short).filter(|key| !never(key)).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

/// The tasks of the only request of a claim, and the priorities of which it says that there are
/// elements.
fn claimed(answer: Value) -> (Got, Option<u8>) {
    let mut parts: Vec<Value> = redis::from_redis_value(answer).expect("an answer");
    if parts.len() == 2 {
        return (
            (0, false, Vec::new()),
            (parts[1] == Value::Int(2)).then_some(0),
        );
    }
    type Parts = (u64, Bytes, Vec<Bytes>, Vec<usize>, Vec<usize>, Vec<u32>, u8);
    let parts = Value::Array(parts.split_off(3));
    let parts: Parts = redis::from_redis_value(parts).expect("an answer");
    let (grant, ids, bodies, counts, more, attempts, left) = parts;
    let ids: Vec<_> = ids.chunks(16).collect();
    assert_eq!(counts, [ids.len()]);
    let attempt = |place| {
        attempts
            .chunks(2)
            .find(|pair| pair[0] == place)
            .map_or(1, |pair| pair[1])
    };
    let got = ids
        .iter()
        .zip(bodies)
        .enumerate()
        .map(|(i, (id, body))| (id_of(id), body, attempt(i as u32 + 1)));
    // Without the mark that the worker rests.
    ((grant, more == [1], got.collect()), Some(left % 8))
}

/// Times are not compared.
fn without_times(event: Event) -> Event {
    match event {
        Event::Died {
            id,
            attempts,
            reason,
            mut history,
            epoch,
        } => {
            history
                .iter_mut()
                .for_each(|failure| failure.at_unix_ms = 0);
            Event::Died {
                id,
                attempts,
                reason,
                history,
                epoch,
            }
        }
        other => other,
    }
}

/// The second value of an element.
fn offer(element: &[u8]) -> u64 {
    let mut read = element;
    assert_eq!(rmp::decode::read_array_len(&mut read).expect("an array"), 3);
    let _num: u32 = rmp::decode::read_int(&mut read).expect("NUM");
    rmp::decode::read_int(&mut read).expect("an offer")
}
