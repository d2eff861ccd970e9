//! The watchers of this process.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    mailbox::{Mailbox, WatcherNews},
    ring::{Place, Ring, Total},
};
use crate::{
    model::{QueueName, TaskEvent, TaskId, TaskStatus},
    telemetry::metrics,
};

/// The most watchers of a process: as many as calls may wait.
const MOST: usize = 20_000;
/// The most tasks about which watchers ask. The others are found by the periodic check of all
/// watched tasks.
const MOST_ASKED: usize = 20_000;
/// How long a queue stays watched after its last watcher, because the next one may come soon.
const LINGER: Duration = Duration::from_secs(30);
/// Up to this many watched queues, one may linger. All processes read the names of all watched
/// queues.
const MOST_LINGERING: usize = 1_000;

/// An announcement of a task by a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct News {
    pub(super) id: TaskId,
    /// `None` if the step changed the task, but does not know its status.
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

/// The process has as many watchers as it may have.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "{MOST} calls watch tasks already, and there may be no more in this process; try again later"
)]
pub struct Full;

/// The watchers of a task.
type OfTask = Arc<Vec<Arc<Mailbox>>>;

/// A queue of which something is watched.
#[derive(Default)]
struct OfQueue {
    /// The events, if the whole queue has had a watcher.
    ring: Option<Arc<Ring>>,
    /// The watchers of the whole queue.
    whole: usize,
    all: usize,
    ends: usize,
    /// Since when nobody watches, and what was watched last.
    left: Option<(Instant, Option<Interest>)>,
}

impl OfQueue {
    fn count(&mut self, interest: Interest) -> &mut usize {
        match interest {
            Interest::Ends => &mut self.ends,
            Interest::All => &mut self.all,
        }
    }

    fn interest(&self) -> Option<Interest> {
        let lingers = self
            .left
            .and_then(|(since, interest)| interest.filter(|_| since.elapsed() < LINGER));
        let now = if self.all > 0 {
            Some(Interest::All)
        } else {
            (self.ends > 0).then_some(Interest::Ends)
        };
        now.max(lingers)
    }

    /// Drops the ring while nobody watches all events. Steps then announce only ends, so the ring
    /// would have gaps.
    fn forget_unless_all(&mut self) {
        if self.interest() != Some(Interest::All) {
            self.ring = None;
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
    /// The queues whose channels this process is subscribed to.
    heard: HashSet<QueueName>,
}

impl Map {
    fn count_one(&mut self) -> Result<(), Full> {
        if self.watchers >= MOST {
            return Err(Full);
        }
        self.watchers += 1;
        metrics::watchers(self.watchers);
        Ok(())
    }

    fn discount_one(&mut self) {
        self.watchers -= 1;
        metrics::watchers(self.watchers);
    }

    fn enter(&mut self, queue: &QueueName, interest: Interest) -> &mut OfQueue {
        let of_queue = self.queues.entry(queue.clone()).or_default();
        of_queue.forget_unless_all();
        *of_queue.count(interest) += 1;
        of_queue
    }

    fn leave(&mut self, queue: &QueueName, interest: Interest) {
        let lingers = self.queues.len() <= MOST_LINGERING;
        let Some(of_queue) = self.queues.get_mut(queue) else {
            return;
        };
        let before = of_queue.interest();
        *of_queue.count(interest) -= 1;
        if of_queue.interest() != before {
            of_queue.left = lingers.then(|| (Instant::now(), before));
        }
        if of_queue.interest().is_none() {
            self.queues.remove(queue);
        }
    }
}

/// The watchers of this process. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Watchers(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Events are passed on after this lock is released.
    map: Mutex<Map>,
    /// The events of all queues.
    total: Arc<Total>,
    asked: Notify,
    changed: Notify,
}

impl Watchers {
    /// The queues of which something is watched, or was a moment ago.
    pub(super) fn watched(&self) -> HashMap<QueueName, Interest> {
        let mut map = self.0.map.lock();
        map.queues
            .retain(|_, of_queue| of_queue.interest().is_some());
        map.queues.values_mut().for_each(OfQueue::forget_unless_all);
        if self.0.total.is_crowded() {
            map.queues
                .values()
                .filter_map(|of_queue| of_queue.ring.as_ref())
                .for_each(|ring| ring.shrink());
        }
        map.queues
            .iter()
            .filter_map(|(queue, of)| Some((queue.clone(), of.interest()?)))
            .collect()
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

    /// Passes on what was received over the channel of a queue.
    pub(super) fn hear(&self, queue: &QueueName, news: Vec<News>) {
        let mut unclear = Vec::new();
        let mut hints = Vec::with_capacity(news.len());
        {
            let map = self.0.map.lock();
            let watches_all = map
                .queues
                .get(queue)
                .is_some_and(|of_queue| of_queue.whole > 0);
            for News {
                id,
                status,
                at_unix_ms,
            } in news
            {
                match status {
                    Some(status) => hints.push(TaskEvent {
                        id,
                        queue: queue.clone(),
                        status,
                        at_unix_ms,
                    }),
                    None if watches_all || map.tasks.contains_key(&id) => unclear.push(id),
                    None => {}
                }
            }
        }
        self.tell(hints, true);
        if !unclear.is_empty() {
            self.ask(&unclear);
        }
    }

    pub(super) fn tell(&self, events: Vec<TaskEvent>, are_hints: bool) {
        let mut to_tasks: Vec<(OfTask, WatcherNews)> = Vec::new();
        let mut to_queues: Vec<(Arc<Ring>, Vec<TaskEvent>)> = Vec::new();
        {
            let map = self.0.map.lock();
            for event in events {
                if let Some(boxes) = map.tasks.get(&event.id) {
                    let told = if are_hints {
                        WatcherNews::Hint(event.clone())
                    } else {
                        WatcherNews::Truth(event.clone())
                    };
                    to_tasks.push((Arc::clone(boxes), told));
                }
                let Some(ring) = map
                    .queues
                    .get(&event.queue)
                    .and_then(|of_queue| of_queue.ring.as_ref())
                else {
                    continue;
                };
                match to_queues
                    .last_mut()
                    .filter(|(last, _)| Arc::ptr_eq(last, ring))
                {
                    Some((_, events)) => events.push(event),
                    None => to_queues.push((Arc::clone(ring), vec![event])),
                }
            }
        }
        for (boxes, told) in to_tasks {
            boxes.iter().for_each(|mailbox| mailbox.put(told.clone()));
        }
        let now = tokio::time::Instant::now();
        for (ring, events) in to_queues {
            ring.tell(events, now);
        }
    }

    /// Announcements of the queue may have been missed.
    pub(super) fn missed(&self, queue: &QueueName) {
        let ring = self
            .0
            .map
            .lock()
            .queues
            .get(queue)
            .and_then(|of_queue| of_queue.ring.clone());
        if let Some(ring) = ring {
            ring.gap();
        }
    }

    // --- the channels that this process is subscribed to

    /// The queues that are watched, and whose channels are not subscribed yet.
    pub(super) fn unheard(&self) -> Vec<QueueName> {
        let map = self.0.map.lock();
        map.queues
            .keys()
            .filter(|queue| !map.heard.contains(*queue))
            .cloned()
            .collect()
    }

    /// Records that the channel of the queue is subscribed from now on. Earlier announcements were
    /// missed.
    pub(super) fn hears(&self, queue: QueueName) {
        let mut map = self.0.map.lock();
        // Add the gap before anybody learns that the queue is heard: a watcher that waits for that
        // begins after the gap.
        if let Some(ring) = map
            .queues
            .get(&queue)
            .and_then(|of_queue| of_queue.ring.as_ref())
        {
            ring.gap();
        }
        map.heard.insert(queue);
    }

    /// Returns the queues whose channels are subscribed although nobody watches them any more, and
    /// counts them as unsubscribed.
    pub(super) fn take_left(&self) -> Vec<QueueName> {
        let mut map = self.0.map.lock();
        let Map { heard, queues, .. } = &mut *map;
        heard
            .extract_if(|queue| !queues.contains_key(queue))
            .collect()
    }

    /// Records that the connection has ended, so that no channel is subscribed.
    pub(super) fn hears_nothing(&self) {
        self.0.map.lock().heard.clear();
    }

    pub(super) fn is_heard(&self, queue: &QueueName) -> bool {
        self.0.map.lock().heard.contains(queue)
    }

    // --- watchers of queues

    /// Registers a watcher of a queue. The returned flag says whether the queue's channel is
    /// already subscribed.
    pub(super) fn enter(&self, queue: &QueueName) -> Result<(Arc<Ring>, Place, bool), Full> {
        let mut map = self.0.map.lock();
        map.count_one()?;
        let is_heard = map.heard.contains(queue);
        let of_queue = map.enter(queue, Interest::All);
        of_queue.whole += 1;
        let ring = of_queue
            .ring
            .get_or_insert_with(|| Arc::new(Ring::new(Arc::clone(&self.0.total))));
        let place = ring.end();
        let ring = Arc::clone(ring);
        self.0.changed.notify_one();
        Ok((ring, place, is_heard))
    }

    pub(super) fn leave(&self, queue: &QueueName) {
        let mut map = self.0.map.lock();
        map.discount_one();
        if let Some(of_queue) = map.queues.get_mut(queue) {
            of_queue.whole -= 1;
        }
        map.leave(queue, Interest::All);
    }

    /// Waits until another watcher is registered.
    pub(super) async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

/// The interest of one call in tasks. It ends when this is dropped.
pub struct Watch {
    watchers: Watchers,
    mailbox: Arc<Mailbox>,
    of: Vec<(QueueName, Vec<TaskId>)>,
    interest: Interest,
}

impl Watch {
    pub(super) fn new(
        watchers: Watchers,
        of: Vec<(QueueName, Vec<TaskId>)>,
        interest: Interest,
    ) -> Result<Self, Full> {
        let mailbox = Arc::new(Mailbox::new(of.iter().map(|(_, ids)| ids.len()).sum()));
        {
            let mut map = watchers.0.map.lock();
            map.count_one()?;
            for (queue, ids) in &of {
                map.enter(queue, interest);
                for id in ids {
                    Arc::make_mut(map.tasks.entry(*id).or_default()).push(Arc::clone(&mailbox));
                }
            }
            watchers.0.changed.notify_one();
        }
        Ok(Self {
            watchers,
            mailbox,
            of,
            interest,
        })
    }

    /// Waits for events. Returns those since the last call, and whether some were dropped.
    pub async fn told(&self) -> (Vec<WatcherNews>, bool) {
        self.mailbox.told().await
    }

    /// Asks for the statuses of tasks.
    pub fn ask(&self, ids: &[TaskId]) {
        self.watchers.ask(ids);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut map = self.watchers.0.map.lock();
        map.discount_one();
        for (queue, ids) in &self.of {
            for id in ids {
                if let Some(boxes) = map.tasks.get_mut(id) {
                    Arc::make_mut(boxes).retain(|mailbox| !Arc::ptr_eq(mailbox, &self.mailbox));
                    if boxes.is_empty() {
                        map.tasks.remove(id);
                    }
                }
            }
            map.leave(queue, self.interest);
        }
    }
}

#[cfg(test)]
impl Watchers {
    /// The events that wait for watchers of queues, in all rings.
    pub(super) fn waiting(&self) -> usize {
        self.0.total.events()
    }

    /// Drops the interest that lingers after the last watcher of a queue left.
    pub(super) fn stop_lingering(&self, queue: &QueueName) {
        if let Some(of_queue) = self.0.map.lock().queues.get_mut(queue) {
            of_queue.left = None;
        }
    }
}
