//! The model: records and offers, but no pointers and no counters.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use bytes::Bytes;
use taskd::{
    model::{ChangingTask, Failure, LeaseToken, Offset, Requeue, ShardId, TaskId},
    queue::{Arbitrated, Code, EnqueueTask, Event, NEVER, RecordStatus, RejectMode},
    wire,
};

pub(super) const GENERATION: u64 = 7;
pub(super) const HOUR: Duration = Duration::from_secs(3600);
/// No name of a worker.
pub(super) const ANYBODY: &str = "";
/// The second failure of a replica is offered again at once.
pub(super) const BACKOFF: [Duration; 3] = [HOUR, Duration::ZERO, HOUR];

/// The backoff that a task brings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Own {
    Nothing,
    /// The waits of the queue, and a limit in time that is over.
    GivesUp,
    /// Constant, without a wait.
    AtOnce,
    /// Exponential.
    Hours,
}

impl Own {
    /// The field of the body that the scripts read.
    pub(super) fn field(self) -> Vec<u8> {
        let [kind, wait, limit]: [u64; 3] = match self {
            Self::Nothing => return Vec::new(),
            Self::GivesUp => [0, 0, 1],
            Self::AtOnce => [1, 0, 0],
            Self::Hours => [3, 3_600_000, 0],
        };
        let waits = [1, 2].map(|_| (wait as u32).to_be_bytes()).concat();
        [
            &[0x7a, 18, kind as u8][..],
            &waits,
            &[20],
            &limit.to_be_bytes(),
        ]
        .concat()
    }

    /// The one in a body.
    fn of(body: &[u8]) -> Self {
        match body.get(9..12) {
            Some([0x7a, 18, 0]) => Self::GivesUp,
            Some([0x7a, 18, 1]) => Self::AtOnce,
            Some([0x7a, 18, 3]) => Self::Hours,
            _ => Self::Nothing,
        }
    }
}

/// Higher than each offer of an earlier life: its elements may stay in a lane after its record is
/// forgotten.
fn first_offer(epoch: u32) -> u64 {
    u64::from(epoch) << 32
}

#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) body: Bytes,
    pub(super) replicas: usize,
    pub(super) priority: usize,
    pub(super) max_attempts: u32,
    pub(super) backoff: Own,
    pub(super) status: RecordStatus,
    pub(super) credited: Vec<(String, u64)>,
    pub(super) held: Vec<(String, u64)>,
    pub(super) waiting: usize,
    /// Whose replicas are in backoff: they have passed the elements that stand. `ANYBODY` where a
    /// reservation ended.
    pub(super) gave_back: Vec<(String, u64)>,
    /// Its time has not come; all that is left of it waits.
    pub(super) scheduled: bool,
    pub(super) failures: u32,
    /// Failures that count, by worker; only of tasks for several. `None` bars the worker: it has
    /// failed too often, or the task was taken from it. The first pair of a worker counts.
    pub(super) failed: Vec<(String, Option<u32>)>,
    /// Workers that gave it back before they had started. In a test their rest does not end.
    pub(super) resting: BTreeSet<String>,
    /// Only this worker may get it; `Some(true)`: for ever.
    pub(super) reserved: Option<(String, bool)>,
    /// It was reserved, or sent again: its record never has a short form again.
    pub(super) has_epoch: bool,
    /// An operator gave it a lower NUM: it may have more credits.
    pub(super) lowered: bool,
    /// It died because its deadline passed.
    pub(super) is_overdue: bool,
    /// The last ones; times are not compared.
    pub(super) history: Vec<Failure>,
    /// The newest offer: elements of others are spent. 0: the first element of a task that was
    /// never sent again.
    pub(super) offer: u64,
    /// How often it was sent again.
    pub(super) epoch: u32,
    /// Its entries of `finals` from before it was sent again.
    past: usize,
}

impl Task {
    fn new(record: &EnqueueTask) -> Self {
        let (replicas, waits) = (record.replicas as usize, record.not_before_unix_ms > 0);
        Self {
            body: record.body.clone(),
            replicas,
            priority: usize::from(record.body[0]),
            max_attempts: u32::from(record.body[4]),
            backoff: Own::of(&record.body),
            status: RecordStatus::Live,
            credited: record
                .credited
                .iter()
                .map(|worker| (worker.clone(), 0))
                .collect(),
            held: Vec::new(),
            waiting: 0,
            gave_back: Vec::new(),
            scheduled: waits,
            failures: 0,
            failed: Vec::new(),
            resting: BTreeSet::new(),
            reserved: None,
            has_epoch: record.epoch > 0,
            lowered: false,
            is_overdue: false,
            history: Vec::new(),
            offer: first_offer(record.epoch),
            epoch: record.epoch,
            past: 0,
        }
    }

    pub(super) fn needs_workers(&self) -> bool {
        self.credited.len() < self.replicas
    }

    pub(super) fn left(&self) -> usize {
        let live = self.status == RecordStatus::Live;
        let out = self.credited.len() + self.held.len() + self.waiting;
        if live {
            self.replicas.checked_sub(out).expect("no more than NUM")
        } else {
            0
        }
    }

    pub(super) fn open_to(&self, worker: &str) -> bool {
        self.would_be_open_to(worker) && !self.resting.contains(worker)
    }

    /// Only the rest of the worker is in its way.
    pub(super) fn rests(&self, worker: &str) -> bool {
        self.would_be_open_to(worker) && self.resting.contains(worker)
    }

    fn would_be_open_to(&self, worker: &str) -> bool {
        let may = !self.is_barred(worker)
            && self
                .reserved
                .as_ref()
                .is_none_or(|(only, _)| only == worker);
        self.left() > 0
            && may
            && self
                .credited
                .iter()
                .chain(&self.held)
                .all(|(other, _)| other != worker)
    }

    pub(super) fn is_offered_by(&self, offer: u64) -> bool {
        self.left() > 0 && (self.offer == 0 || self.offer == offer)
    }

    /// Of a task for several, one worker's failures count for one replica at most.
    fn blame(&mut self, worker: &str, failures: u32, reason: &str) {
        if failures == 0 {
            return;
        }
        let mut counted = failures;
        if self.replicas > 1 {
            let max = self.max_attempts;
            let before = self.failed_of(worker);
            let after = before.map_or(max, |before| (before + failures).min(max));
            counted = before.map_or(0, |before| after - before);
            let pair = self
                .failed
                .iter_mut()
                .find(|(other, _)| other == worker)
                .expect("a pair");
            pair.1 = (after < max).then_some(after);
        }
        self.failures += counted;
        self.history.push(Failure {
            at_unix_ms: 0,
            worker: worker.into(),
            reason: reason.into(),
        });
        if self.history.len() > 10 {
            self.history.remove(0);
        }
    }

    /// The failures of the worker; `None`: it is barred. Its pair is there afterwards.
    fn failed_of(&mut self, worker: &str) -> Option<u32> {
        match self.failed.iter().find(|(other, _)| other == worker) {
            Some((_, failed)) => *failed,
            None => {
                self.failed.push((worker.to_owned(), Some(0)));
                Some(0)
            }
        }
    }

    fn is_barred(&self, worker: &str) -> bool {
        self.failed
            .iter()
            .find(|(other, _)| other == worker)
            .is_some_and(|(_, failed)| failed.is_none())
    }

    fn bar(&mut self, worker: &str) {
        if self.is_barred(worker) {
            return;
        }
        // At any NUM: it may become higher before the worker may get the task again.
        self.failed_of(worker);
        self.failed.insert(0, (worker.to_owned(), None));
    }

    fn lift(&mut self, worker: &str) {
        if !self.is_barred(worker) {
            return;
        }
        let place =
            |failed: &[(String, Option<u32>)]| failed.iter().position(|(other, _)| other == worker);
        self.failed.remove(place(&self.failed).expect("a bar"));
        match place(&self.failed) {
            Some(at) if self.failed[at].1 == Some(0) => drop(self.failed.remove(at)),
            None => self
                .failed
                .push((worker.to_owned(), Some(self.max_attempts))),
            _ => {}
        }
    }

    /// Answers whether the first of its entries of `finals` was of a past end.
    fn drop_past_end(&mut self) -> bool {
        let had_one = self.past > 0;
        self.past -= usize::from(had_one);
        had_one
    }

    /// The answer to a change of a task that is final.
    fn ended(&self) -> Option<Arbitrated> {
        Some(match self.status {
            RecordStatus::Live => return None,
            RecordStatus::Completed => Arbitrated::Completed {
                credited: u32::try_from(self.credited.len()).expect("few"),
            },
            RecordStatus::Dead => Arbitrated::Dead,
            RecordStatus::Cancelled => Arbitrated::Cancelled,
        })
    }

    pub(super) fn lane(&self, retry: bool) -> usize {
        self.priority * 2 - 1 - usize::from(retry)
    }
}

/// A lease, as its worker shows it.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub(super) id: TaskId,
    pub(super) worker: String,
    pub(super) grant: u64,
}

impl Lease {
    pub(super) fn token(&self, shard: &ShardId) -> LeaseToken {
        LeaseToken {
            shard: shard.clone(),
            generation: GENERATION,
            grant: self.grant,
            attempt: 1,
            trace: None,
            leased_unix_ms: 0,
        }
    }

    /// One of a kind, so that a report that comes twice is seen.
    pub(super) fn report(&self) -> Bytes {
        format!("{} {} {}", self.id, self.worker, self.grant).into()
    }
}

pub(super) fn member(id: TaskId, grant: u64) -> Vec<u8> {
    [id.as_bytes(), grant.to_string().as_bytes()].concat()
}

pub(super) fn id_of(member: &[u8]) -> TaskId {
    TaskId::from_slice(&member[..16]).expect("16 bytes")
}

/// Members of a zset: the score that a step wrote, or none while the true one is an hour off.
pub(super) type Timers = BTreeMap<Vec<u8>, Option<u64>>;

pub(super) fn due(timers: &Timers, most: usize) -> Vec<Vec<u8>> {
    let mut due: Vec<_> = timers
        .iter()
        .filter_map(|(member, score)| Some(((*score)?, member.clone())))
        .collect();
    due.sort();
    due.into_iter()
        .take(most)
        .map(|(_, member)| member)
        .collect()
}

/// The reason of a task whose deadline passed.
pub(super) const OVERDUE: &str = "too late";

#[derive(Default)]
pub(super) struct Model {
    pub(super) tasks: BTreeMap<TaskId, Task>,
    /// By lane, every element that was ever offered, oldest first, and how many of them have left
    /// the tail.
    pub(super) offers: [Vec<(TaskId, u64)>; 6],
    pub(super) gone: [usize; 6],
    pub(super) leases: Timers,
    pub(super) waits: Timers,
    pub(super) outbox: VecDeque<Event>,
    pub(super) finals: VecDeque<TaskId>,
    pub(super) grants: u64,
    /// Grants that were never delivered.
    pub(super) unseen: BTreeSet<u64>,
    pub(super) offset: Option<Offset>,
    pub(super) forgotten: Vec<Task>,
    /// Since the fence was read: a task came that may have come before, or one ended that never
    /// came.
    pub(super) has_moved: bool,
    pub(super) has_forgotten: bool,
}

impl Model {
    /// Strict, but one claim in ten begins with medium or with low.
    pub(super) fn lanes(&self) -> [usize; 6] {
        match (self.grants + self.grants / 20) % 20 {
            9 => [2, 3, 4, 5, 0, 1],
            19 => [4, 5, 2, 3, 0, 1],
            _ => [0, 1, 2, 3, 4, 5],
        }
    }

    /// The elements of a lane, oldest first.
    pub(super) fn standing(&self, lane: usize) -> &[(TaskId, u64)] {
        &self.offers[lane][self.gone[lane]..]
    }

    /// The tasks that this worker may claim if it has passed nothing.
    pub(super) fn open_to(&self, worker: &str) -> Vec<TaskId> {
        let mut open = Vec::new();
        for (id, offer) in self
            .lanes()
            .into_iter()
            .flat_map(|lane| self.standing(lane))
        {
            let may = |task: &Task| task.open_to(worker) && task.is_offered_by(*offer);
            if self.tasks.get(id).is_some_and(may) && !open.contains(id) {
                open.push(*id);
            }
        }
        open
    }

    pub(super) fn code(&self, lease: &Lease) -> Code {
        let Some(task) = self.tasks.get(&lease.id) else {
            return Code::UnknownTask;
        };
        match task
            .credited
            .iter()
            .find(|(worker, _)| *worker == lease.worker)
        {
            Some((_, grant)) if *grant == lease.grant => Code::Repeat,
            _ if task.status == RecordStatus::Cancelled => Code::Cancelled,
            Some(_) => Code::AlreadyCompleted,
            None if task.status == RecordStatus::Completed => Code::AlreadyCompleted,
            None if task.held.contains(&(lease.worker.clone(), lease.grant)) => Code::Ok,
            None => Code::LeaseLost,
        }
    }

    /// The task to which a record leads; none where the record is known. A task that ended is known
    /// unless it was sent again. It keeps the credits whose reports SQL may not have yet.
    pub(super) fn arriving(&self, new: &EnqueueTask) -> Option<Task> {
        let mut task = Task::new(new);
        let Some(before) = self.tasks.get(&new.id) else {
            return Some(task);
        };
        if before.status == RecordStatus::Live || new.epoch <= before.epoch {
            return None;
        }
        let more = before
            .credited
            .iter()
            .filter(|(worker, _)| !new.credited.contains(worker));
        task.credited
            .extend(more.map(|(worker, _)| (worker.clone(), 0)));
        task.past = before.past + 1;
        task.needs_workers().then_some(task)
    }

    pub(super) fn enqueue(&mut self, id: TaskId, mut task: Task) {
        if task.scheduled {
            task.waiting = task.replicas - task.credited.len();
            self.waits.insert(id.as_bytes().to_vec(), None);
        } else {
            self.offers[task.lane(false)].push((id, task.offer));
        }
        self.tasks.insert(id, task);
    }

    pub(super) fn lease(&mut self, lease: &Lease) {
        let task = self.tasks.get_mut(&lease.id).expect("a record");
        assert!(task.open_to(&lease.worker), "{lease:?} of {task:?}");
        task.held.push((lease.worker.clone(), lease.grant));
        self.leases.insert(member(lease.id, lease.grant), None);
    }

    /// Answers the member of `delayed` that is due at once, where a reservation has ended.
    pub(super) fn credit(&mut self, lease: &Lease) -> Option<Vec<u8>> {
        let mut released = None;
        let task = self.tasks.get_mut(&lease.id).expect("a record");
        task.held.retain(|(_, grant)| *grant != lease.grant);
        task.credited.push((lease.worker.clone(), lease.grant));
        self.leases.remove(&member(lease.id, lease.grant));
        if task.credited.len() == task.replicas {
            task.status = RecordStatus::Completed;
            self.finals.push_back(lease.id);
        } else if task
            .reserved
            .as_ref()
            .is_some_and(|(only, _)| *only == lease.worker)
        {
            // Others may have what is left, by way of the backoffs.
            task.reserved = None;
            if task.left() > 0 {
                task.waiting += 1;
                task.gave_back.push((ANYBODY.to_owned(), lease.grant));
                self.waits.insert(member(lease.id, lease.grant), None);
                released = Some(member(lease.id, lease.grant));
            }
        }
        self.outbox.push_back(Event::Completed(lease.report()));
        released
    }

    /// A task that is live, or one that has not arrived, is cancelled, or dead because its deadline
    /// passed. A task that was sent again has no deadline.
    pub(super) fn end(&mut self, new: &EnqueueTask, status: RecordStatus) -> Arbitrated {
        let (before, cancels) = (self.tasks.get(&new.id), status == RecordStatus::Cancelled);
        let epoch = if cancels { new.epoch } else { 0 };
        let has_arrived = match before {
            Some(task) if task.epoch > epoch => return Arbitrated::SentAgain,
            Some(task) if task.epoch == epoch || task.status == RecordStatus::Live => match task
                .ended()
            {
                Some(Arbitrated::Completed { .. }) => return Arbitrated::Completed { credited: 0 },
                Some(Arbitrated::Cancelled) if cancels => return Arbitrated::Done,
                Some(ended) => return ended,
                None => true,
            },
            _ => false,
        };
        if !has_arrived {
            let mut task = Task::new(&EnqueueTask {
                credited: Vec::new(),
                epoch,
                ..new.clone()
            });
            task.past = before.map_or(0, |before| before.past + 1);
            self.tasks.insert(new.id, task);
            self.has_moved = true;
        }
        let task = self.tasks.get_mut(&new.id).expect("a record");
        (task.epoch, task.has_epoch) = (epoch, task.has_epoch || epoch > 0);
        for (_, grant) in task.held.drain(..) {
            self.leases.remove(&member(new.id, grant));
        }
        (task.status, task.waiting) = (status, 0);
        self.waits.retain(|member, _| id_of(member) != new.id);
        self.finals.push_back(new.id);
        if status == RecordStatus::Dead {
            task.is_overdue = true;
            let (id, attempts, history) = (new.id, task.failures, task.history.clone());
            self.outbox.push_back(Event::Died {
                id,
                attempts,
                reason: OVERDUE.into(),
                history,
                epoch: 0,
            });
        }
        Arbitrated::Done
    }

    /// Reads the first entries of `finals`. Those of past ends leave it.
    pub(super) fn read_finals(&mut self, most: usize) -> Vec<TaskId> {
        let mut first: Vec<_> = self.finals.drain(..most.min(self.finals.len())).collect();
        first.retain(|id| !self.tasks.get_mut(id).expect("a record").drop_past_end());
        first
            .iter()
            .rev()
            .for_each(|id| self.finals.push_front(*id));
        first
    }

    /// Answers how many were forgotten.
    pub(super) fn forget(&mut self, finals: &[(TaskId, bool)]) -> u64 {
        let mut forgotten = 0;
        for (id, settled) in finals {
            if self.finals.front() != Some(id) {
                break;
            }
            self.finals.pop_front();
            if self.tasks.get_mut(id).expect("a record").drop_past_end() {
                continue;
            }
            if *settled {
                forgotten += 1;
                self.forgotten.extend(self.tasks.remove(id));
            } else {
                self.finals.push_back(*id);
            }
        }
        self.has_forgotten |= forgotten > 0;
        forgotten
    }

    fn offer(&mut self, id: TaskId) {
        let task = self.tasks.get_mut(&id).expect("a record");
        if task.left() > 0 {
            task.offer += 1;
            self.offers[task.lane(true)].push((id, task.offer));
        }
    }

    /// Gives a task another NUM and priority. A final record of an earlier epoch does not count.
    pub(super) fn change(&mut self, task: &ChangingTask, body: &Bytes) -> Arbitrated {
        let (id, replicas, priority, epoch) = (task.id, task.replicas, task.priority, task.epoch);
        let Some(task) = self.tasks.get_mut(&id) else {
            self.has_moved = true;
            return Arbitrated::Absent;
        };
        if let Some(answer) = task.ended() {
            return if task.epoch == epoch {
                answer
            } else {
                Arbitrated::Absent
            };
        }
        let to = (replicas as usize, priority as usize);
        if (task.replicas, task.priority) == to {
            return Arbitrated::Done;
        }
        task.lowered |= to.0 < task.replicas;
        (task.replicas, task.priority) = to;
        task.body = wire::with_body_values(body, replicas, priority);
        if task.scheduled {
            task.waiting = task.replicas.saturating_sub(task.credited.len());
        } else {
            let is_beyond =
                |task: &Task| task.credited.len() + task.held.len() + task.waiting > task.replicas;
            while is_beyond(task) && task.waiting > 0 {
                let (_, grant) = task.gave_back.pop().expect("who gave it back");
                task.waiting -= 1;
                self.waits.remove(&member(id, grant));
            }
            while is_beyond(task) && !task.held.is_empty() {
                let (_, grant) = task.held.pop().expect("a holder");
                self.leases.remove(&member(id, grant));
            }
        }
        if task.credited.len() >= task.replicas {
            (task.status, task.waiting) = (RecordStatus::Completed, 0);
            self.waits.retain(|member, _| id_of(member) != id);
            self.finals.push_back(id);
            return Arbitrated::Completed {
                credited: u32::try_from(task.credited.len()).expect("few"),
            };
        }
        self.offer(id);
        Arbitrated::Done
    }

    pub(super) fn requeue(&mut self, id: TaskId, epoch: u32, requeue: &Requeue) -> Arbitrated {
        let Some(task) = self.tasks.get_mut(&id) else {
            return Arbitrated::Absent;
        };
        if let Some(answer) = task.ended() {
            return match answer {
                _ if task.epoch < epoch => Arbitrated::Absent,
                Arbitrated::Completed { .. } => Arbitrated::Completed { credited: 0 },
                other => other,
            };
        }
        if let Requeue::To { worker, .. } = requeue
            && task
                .credited
                .iter()
                .any(|(other, _)| other == worker.as_str())
        {
            return Arbitrated::CompletedByWorker;
        }
        match requeue {
            Requeue::Free => match task.reserved.take() {
                None => return Arbitrated::Done,
                Some((worker, true)) => {
                    task.reserved = Some((worker, true));
                    return Arbitrated::Reserved {
                        until_unix_ms: NEVER,
                    };
                }
                Some(_) => {}
            },
            _ if task.scheduled => return Arbitrated::NotDue,
            Requeue::AwayFrom(worker) => {
                let worker = worker.as_str();
                if let Some(at) = task.held.iter().position(|(other, _)| other == worker) {
                    let (_, grant) = task.held.remove(at);
                    self.leases.remove(&member(id, grant));
                }
                task.bar(worker);
                task.reserved.take_if(|(only, _)| only == worker);
            }
            Requeue::All | Requeue::To { .. } => {
                for (_, grant) in task.held.drain(..) {
                    self.leases.remove(&member(id, grant));
                }
                task.waiting = 0;
                task.gave_back.clear();
                self.waits.retain(|member, _| id_of(member) != id);
                task.reserved = None;
                if let Requeue::To {
                    worker,
                    until_unix_ms,
                } = requeue
                {
                    task.lift(worker.as_str());
                    task.reserved = Some((worker.as_str().to_owned(), until_unix_ms.is_none()));
                    task.has_epoch = true;
                } else {
                    let barred = task.failed.iter().filter(|(_, failed)| failed.is_none());
                    let barred: Vec<String> = barred.map(|(worker, _)| worker.clone()).collect();
                    barred.iter().for_each(|worker| task.lift(worker));
                }
            }
        }
        self.offer(id);
        Arbitrated::Done
    }

    /// Answers whether the task is dead.
    pub(super) fn reject(
        &mut self,
        id: TaskId,
        grant: u64,
        mode: RejectMode,
        reason: &str,
    ) -> bool {
        let task = self.tasks.get_mut(&id).expect("a record");
        let at = task
            .held
            .iter()
            .position(|(_, other)| *other == grant)
            .expect("a holder");
        let mut holder = task.held.remove(at);
        self.leases.remove(&member(id, grant));
        let failures = match mode {
            RejectMode::Release | RejectMode::PutOff(_) | RejectMode::Rest(_) => 0,
            RejectMode::Retry(_) => 1,
            RejectMode::Never => task.max_attempts,
        };
        task.blame(&holder.0, failures, reason);
        if task
            .reserved
            .as_ref()
            .is_some_and(|(only, _)| *only == holder.0)
            && task.is_barred(&holder.0)
        {
            task.reserved = None;
            holder.0 = ANYBODY.to_owned();
        }
        if matches!(mode, RejectMode::Rest(_)) {
            task.resting.insert(holder.0.clone());
        }
        if mode == RejectMode::Release {
            // taskd gives back all of a grant.
            self.unseen.remove(&grant);
        }
        let num = u32::try_from(task.replicas).expect("few");
        let has_failed = task.failures >= task.max_attempts * num;
        // An operator who sends a task again lifts its limit in time.
        let gives_up = task.backoff == Own::GivesUp && task.epoch == 0;
        if failures > 0 && (has_failed || gives_up) {
            for (_, other) in task.held.drain(..) {
                self.leases.remove(&member(id, other));
            }
            (task.status, task.waiting) = (RecordStatus::Dead, 0);
            self.finals.push_back(id);
            self.waits.retain(|member, _| id_of(member) != id);
            let why = if has_failed {
                ""
            } else {
                " (the next attempt would begin after give_up_after)"
            };
            let (attempts, reason, history) = (
                task.failures,
                format!("{reason}{why}"),
                task.history.clone(),
            );
            self.outbox.push_back(Event::Died {
                id,
                attempts,
                reason,
                history,
                epoch: task.epoch,
            });
            return true;
        }
        let at_once = match mode {
            RejectMode::Release | RejectMode::Rest(_) => true,
            RejectMode::Retry(Some(delay)) | RejectMode::PutOff(delay) => delay.is_zero(),
            RejectMode::Retry(None) | RejectMode::Never => match task.backoff {
                Own::AtOnce => true,
                Own::Hours => false,
                Own::Nothing | Own::GivesUp => {
                    BACKOFF[task.failures.div_ceil(num).min(3) as usize - 1].is_zero()
                }
            },
        };
        if at_once {
            task.offer += 1;
            self.offers[task.lane(true)].push((id, task.offer));
        } else {
            task.waiting += 1;
            task.gave_back.push(holder);
            self.waits.insert(member(id, grant), None);
        }
        false
    }

    /// Whether the member of D was worth something.
    pub(super) fn promote(&mut self, wait: &[u8]) -> bool {
        self.waits.remove(wait);
        let id = id_of(wait);
        let Some(task) = self.tasks.get_mut(&id).filter(|task| task.waiting > 0) else {
            return false;
        };
        let first = wait.len() == 16;
        task.waiting = if first { 0 } else { task.waiting - 1 };
        task.scheduled &= !first;
        task.gave_back
            .retain(|(_, grant)| member(id, *grant) != wait);
        task.offer += u64::from(!first);
        self.offers[task.lane(!first)].push((id, task.offer));
        true
    }
}
