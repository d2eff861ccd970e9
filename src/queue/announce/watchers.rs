//! The watchers of this process.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    model::{EventId, QueueName, TaskEvent, TaskId, TaskStatus},
    telemetry::metrics,
};

/// The watchers of a process, at most.
const MOST: usize = 10_000;
/// The events that may wait for a watcher of a queue. It is cut behind that.
const ROOM_OF_QUEUE: usize = 10_000;
/// The events that may wait for a watcher of tasks, beside two for each task. It reads the tasks anew behind that.
const ROOM: usize = 64;
/// The tasks about which watchers ask, at most. The safety net finds the others.
const MOST_ASKED: usize = 20_000;
/// How long a queue stays watched without a watcher: the next one may come soon.
const LINGER: Duration = Duration::from_secs(30);
/// The watched queues up to which one lingers. All processes read the names of all.
const MOST_LINGERING: usize = 1_000;
/// The last events of a watched queue, for watchers that come again.
const RECENT: usize = 1_000;

/// A step's news of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct News {
    pub(super) id: TaskId,
    /// `None`: the step changed the task, and does not know its status.
    pub(super) status: Option<TaskStatus>,
    pub(super) at_unix_ms: i64,
}

impl News {
    pub(super) fn is_end(&self) -> bool {
        self.status.is_some_and(TaskStatus::is_final)
    }
}

/// The changes of a queue that somebody wants to hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Interest {
    Ends,
    All,
}

/// A word to a watcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// A step said so.
    Hint(TaskEvent),
    /// SQL and Redis say so.
    Truth(TaskEvent),
    /// Hints before this may be missing.
    Gap,
}

/// The process has no room for another watcher.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{MOST} calls watch tasks already, and there may be no more in this process; try again later")]
pub struct Full;

/// The words that wait for one watcher.
struct Mailbox {
    told: Mutex<VecDeque<Told>>,
    room: usize,
    has_overflowed: AtomicBool,
    notify: Notify,
}

impl Mailbox {
    fn put(&self, told: Told) {
        let mut waiting = self.told.lock();
        if waiting.len() < self.room {
            waiting.push_back(told);
        } else {
            self.has_overflowed.store(true, Ordering::Relaxed);
            metrics::events_dropped(1);
        }
        drop(waiting);
        self.notify.notify_one();
    }
}

/// A task that is watched.
struct OfTask {
    boxes: Vec<Arc<Mailbox>>,
}

/// A queue of which something is watched.
#[derive(Default)]
struct OfQueue {
    boxes: Vec<Arc<Mailbox>>,
    all: usize,
    ends: usize,
    /// Since when nobody watches.
    left: Option<(Instant, Option<Interest>)>,
    recent: VecDeque<TaskEvent>,
    /// The last of them of each task.
    last: HashMap<TaskId, (TaskStatus, i64)>,
}

impl OfQueue {
    /// True for what was told before, and for what came before the end of its task.
    fn knows(&self, event: &TaskEvent) -> bool {
        let is_known = |(status, at): &(TaskStatus, i64)| {
            *status == event.status || (status.is_final() && event.at_unix_ms <= *at)
        };
        self.last.get(&event.id).is_some_and(is_known)
    }

    fn note(&mut self, event: TaskEvent) {
        if self.recent.len() >= RECENT
            && let Some(old) = self.recent.pop_front()
            && self.last.get(&old.id) == Some(&(old.status, old.at_unix_ms))
        {
            self.last.remove(&old.id);
        }
        self.last.insert(event.id, (event.status, event.at_unix_ms));
        self.recent.push_back(event);
    }

    fn count(&mut self, interest: Interest) -> &mut usize {
        match interest {
            Interest::Ends => &mut self.ends,
            Interest::All => &mut self.all,
        }
    }

    fn interest(&self) -> Option<Interest> {
        let lingers = self.left.and_then(|(since, interest)| interest.filter(|_| since.elapsed() < LINGER));
        let now = if self.all > 0 { Some(Interest::All) } else { (self.ends > 0).then_some(Interest::Ends) };
        now.max(lingers)
    }

    /// Steps tell only ends while nobody watches all: then nobody can go on behind an event of before.
    fn forget_unless_all(&mut self) {
        if self.interest() != Some(Interest::All) {
            self.recent.clear();
            self.last.clear();
        }
    }
}

#[derive(Default)]
struct Map {
    tasks: HashMap<TaskId, OfTask>,
    queues: HashMap<QueueName, OfQueue>,
    watchers: usize,
    /// Tasks whose status is asked for.
    asked: HashSet<TaskId>,
}

/// Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Watchers(Arc<Inner>);

#[derive(Default)]
struct Inner {
    map: Mutex<Map>,
    asked: Notify,
    changed: Notify,
}

impl Watchers {
    /// The queues of which something is watched, or was a moment ago.
    pub(super) fn watched(&self) -> HashMap<QueueName, Interest> {
        let mut map = self.0.map.lock();
        map.queues.retain(|_, of_queue| of_queue.interest().is_some());
        map.queues.values_mut().for_each(OfQueue::forget_unless_all);
        map.queues.iter().filter_map(|(queue, of)| Some((queue.clone(), of.interest()?))).collect()
    }

    pub(super) async fn asked(&self) {
        self.0.asked.notified().await;
    }

    pub(super) fn take_asked(&self, all: bool) -> Vec<TaskId> {
        let mut map = self.0.map.lock();
        let mut asked: HashSet<TaskId> = std::mem::take(&mut map.asked);
        if all {
            asked.extend(map.tasks.keys());
        }
        asked.into_iter().collect()
    }

    pub(super) fn ask(&self, ids: &[TaskId]) {
        let mut map = self.0.map.lock();
        for id in ids {
            if map.asked.len() < MOST_ASKED {
                map.asked.insert(*id);
            }
        }
        drop(map);
        self.0.asked.notify_one();
    }

    /// Tells what came over the channel of a queue.
    pub(super) fn hear(&self, queue: &QueueName, news: Vec<News>) {
        let mut unclear = Vec::new();
        let mut hints = Vec::with_capacity(news.len());
        {
            let map = self.0.map.lock();
            let watches_all = map.queues.get(queue).is_some_and(|of_queue| !of_queue.boxes.is_empty());
            for News { id, status, at_unix_ms } in news {
                match status {
                    Some(status) => hints.push(TaskEvent { id, queue: queue.clone(), status, at_unix_ms }),
                    None if watches_all || map.tasks.contains_key(&id) => unclear.push(id),
                    None => {}
                }
            }
        }
        self.tell(hints.into_iter(), true);
        if !unclear.is_empty() {
            self.ask(&unclear);
        }
    }

    pub(super) fn tell(&self, events: impl Iterator<Item = TaskEvent>, are_hints: bool) {
        let mut map = self.0.map.lock();
        let Map { tasks, queues, .. } = &mut *map;
        for event in events {
            let told = if are_hints { Told::Hint(event.clone()) } else { Told::Truth(event.clone()) };
            if let Some(of_task) = tasks.get_mut(&event.id) {
                of_task.boxes.iter().for_each(|mailbox| mailbox.put(told.clone()));
            }
            let Some(of_queue) = queues.get_mut(&event.queue) else { continue };
            if of_queue.boxes.is_empty() && of_queue.recent.is_empty() {
                continue;
            }
            if of_queue.knows(&event) {
                continue;
            }
            of_queue.note(event);
            of_queue.boxes.iter().for_each(|mailbox| mailbox.put(told.clone()));
        }
    }

    /// Announcements of the queue may have been missed.
    pub(super) fn missed(&self, queue: &QueueName) {
        let mut map = self.0.map.lock();
        if let Some(of_queue) = map.queues.get_mut(queue) {
            // Nobody can go on behind an event of before.
            of_queue.recent.clear();
            of_queue.last.clear();
            of_queue.boxes.iter().for_each(|mailbox| mailbox.put(Told::Gap));
        }
    }

    /// Waits for another watcher.
    pub(super) async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

/// A queue, and the tasks of it that are meant; `None`: all.
type OfQueueWatched = (QueueName, Option<Vec<TaskId>>);

/// The interest of one call. It ends when this is dropped.
pub struct Watch {
    watchers: Watchers,
    mailbox: Arc<Mailbox>,
    of: Vec<OfQueueWatched>,
    interest: Interest,
}

impl Watch {
    pub(super) fn new(watchers: Watchers, of: Vec<OfQueueWatched>, interest: Interest) -> Result<Self, Full> {
        let rooms = of.iter().map(|(_, ids)| ids.as_ref().map_or(ROOM_OF_QUEUE, |ids| 2 * ids.len()));
        let mailbox = Arc::new(Mailbox {
            told: Mutex::default(),
            room: ROOM + rooms.sum::<usize>(),
            has_overflowed: AtomicBool::new(false),
            notify: Notify::new(),
        });
        {
            let mut map = watchers.0.map.lock();
            if map.watchers >= MOST {
                return Err(Full);
            }
            map.watchers += 1;
            metrics::watchers(map.watchers);
            for (queue, ids) in &of {
                let of_queue = map.queues.entry(queue.clone()).or_default();
                of_queue.forget_unless_all();
                *of_queue.count(interest) += 1;
                if ids.is_none() {
                    of_queue.boxes.push(Arc::clone(&mailbox));
                }
                for id in ids.iter().flatten() {
                    let new = || OfTask { boxes: Vec::new() };
                    map.tasks.entry(*id).or_insert_with(new).boxes.push(Arc::clone(&mailbox));
                }
            }
            watchers.0.changed.notify_one();
        }
        Ok(Self { watchers, mailbox, of, interest })
    }

    /// The words since the last call; waits until there is one. The second part: some were dropped.
    pub async fn told(&self) -> (Vec<Told>, bool) {
        loop {
            let told: Vec<_> = self.mailbox.told.lock().drain(..).collect();
            let has_overflowed = self.mailbox.has_overflowed.swap(false, Ordering::Relaxed);
            if !told.is_empty() || has_overflowed {
                return (told, has_overflowed);
            }
            self.mailbox.notify.notified().await;
        }
    }

    /// Asks for the statuses of tasks.
    pub fn ask(&self, ids: &[TaskId]) {
        self.watchers.ask(ids);
    }

    /// The events of a queue behind this one, as far as this process has heard them. `None`: it does not know it.
    pub fn since(&self, last: &EventId) -> Option<Vec<TaskEvent>> {
        let map = self.watchers.0.map.lock();
        let (queue, _) = self.of.first()?;
        let recent = &map.queues.get(queue)?.recent;
        let place = recent.iter().position(|event| event.event_id() == *last)?;
        // Those that wait already are among them.
        self.mailbox.told.lock().clear();
        Some(recent.iter().skip(place + 1).cloned().collect())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut map = self.watchers.0.map.lock();
        map.watchers -= 1;
        metrics::watchers(map.watchers);
        let is_other = |mailbox: &Arc<Mailbox>| !Arc::ptr_eq(mailbox, &self.mailbox);
        let lingers = map.queues.len() <= MOST_LINGERING;
        for (queue, ids) in &self.of {
            for id in ids.iter().flatten() {
                if let Some(of_task) = map.tasks.get_mut(id) {
                    of_task.boxes.retain(is_other);
                    if of_task.boxes.is_empty() {
                        map.tasks.remove(id);
                    }
                }
            }
            if let Some(of_queue) = map.queues.get_mut(queue) {
                of_queue.boxes.retain(is_other);
                let before = of_queue.interest();
                *of_queue.count(self.interest) -= 1;
                if of_queue.interest() != before {
                    of_queue.left = lingers.then(|| (Instant::now(), before));
                }
                if of_queue.interest().is_none() {
                    map.queues.remove(queue);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_goes_on_behind_a_time_in_which_only_ends_were_watched() {
        let (watchers, queue) = (Watchers::default(), QueueName::new("q").unwrap());
        let event = TaskEvent { id: TaskId::new(), queue: queue.clone(), status: TaskStatus::Queued, at_unix_ms: 1 };
        let all = || Watch::new(watchers.clone(), vec![(queue.clone(), None)], Interest::All).unwrap();
        let first = all();
        watchers.tell([event.clone()].into_iter(), true);
        let ends = Watch::new(watchers.clone(), vec![(queue.clone(), Some(Vec::new()))], Interest::Ends).unwrap();
        drop(first);
        assert_eq!(all().since(&event.event_id()), Some(Vec::new()), "the queue stays watched for a while");
        watchers.0.map.lock().queues.get_mut(&queue).unwrap().left = None;
        assert_eq!(all().since(&event.event_id()), None);
        drop(ends);
    }
}
