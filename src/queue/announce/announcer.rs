//! The interface of announcements: steps announce, and watchers register.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use super::{
    queue_watch::QueueWatch,
    watchers::{Full, Interest, News, Watch, Watchers},
};
use crate::{
    config::EventQueues,
    model::{QueueName, TaskEvent, TaskId, TaskStatus},
    redis_pool::Redis,
    runtime::Clock,
    telemetry::metrics,
};

/// The most announcements of a queue that wait for the tick. Further ones are dropped.
const MOST_WAITING: usize = 20_000;

/// Announces changes of tasks, and lets callers watch them. Clones share their state.
#[derive(Clone)]
pub struct Announcer(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) redis: Redis,
    clock: Clock,
    /// Somebody watches something.
    pub(super) is_wanted: AtomicBool,
    /// The queues that other processes or this one watch.
    pub(super) wanted: RwLock<HashMap<QueueName, Interest>>,
    /// The queues of which everything is announced, watched or not.
    always: OnceLock<EventQueues>,
    pub(super) waiting: Mutex<HashMap<QueueName, Vec<News>>>,
    /// Queues of which announcements were lost on the way out. Their watchers are told of a gap.
    pub(super) gaps: Mutex<HashSet<QueueName>>,
    pub(super) announced: Notify,
    /// Notified when the wanted queues may have changed.
    pub(super) look: Notify,
    pub(super) watchers: Watchers,
}

impl Announcer {
    pub(in crate::queue) fn new(redis: Redis, clock: Clock) -> Self {
        let announced = Notify::new();
        let look = Notify::new();
        Self(Arc::new(Inner {
            redis,
            clock,
            is_wanted: AtomicBool::new(false),
            wanted: Default::default(),
            always: OnceLock::new(),
            waiting: Default::default(),
            gaps: Default::default(),
            announced,
            look,
            watchers: Default::default(),
        }))
    }

    /// Announces everything of these queues from now on, watched or not.
    pub fn always_announce(&self, queues: EventQueues) {
        if queues.are_some_on() && self.0.always.set(queues).is_err() {
            tracing::debug!("this process knows already what it always announces");
        }
    }

    /// The present time of announcements. A step that others may follow up at once reads it before
    /// it begins, so that what they announce is later.
    pub fn now_unix_ms(&self) -> i64 {
        self.0.clock.now_unix_ms()
    }

    /// Notifies those that watch the queue, at the next tick. If nobody watches anything, this only
    /// reads two flags.
    pub fn announce(
        &self,
        queue: &QueueName,
        at_unix_ms: i64,
        news: impl Iterator<Item = (TaskId, Option<TaskStatus>)>,
    ) {
        if !self.is_wanted() {
            return;
        }
        let interest = match self
            .0
            .always
            .get()
            .is_some_and(|always| always.is_on(queue))
        {
            true => Some(Interest::All),
            false => self.0.wanted.read().get(queue).copied(),
        };
        let Some(interest) = interest else { return };
        let news = news.map(|(id, status)| News {
            id,
            status,
            at_unix_ms,
        });
        let news = news.filter(|news| interest == Interest::All || news.is_end());
        let mut waiting = self.0.waiting.lock();
        let of_queue = waiting.entry(queue.clone()).or_default();
        let mut dropped = 0;
        for one in news {
            if of_queue.len() < MOST_WAITING {
                of_queue.push(one);
            } else {
                dropped += 1;
            }
        }
        drop(waiting);
        if dropped > 0 {
            metrics::events_dropped(dropped);
            self.0.gaps.lock().insert(queue.clone());
        }
        self.0.announced.notify_one();
    }

    /// Returns whether a process watches something, or something is always announced.
    pub fn is_wanted(&self) -> bool {
        self.0.is_wanted.load(Ordering::Relaxed) || self.0.always.get().is_some()
    }

    /// Watches tasks. Start to watch, *then* read the tasks.
    pub fn watch(
        &self,
        of: Vec<(QueueName, Vec<TaskId>)>,
        interest: Interest,
    ) -> Result<Watch, Full> {
        let queues: Vec<QueueName> = of.iter().map(|(queue, _)| queue.clone()).collect();
        let watch = Watch::new(self.0.watchers.clone(), of, interest)?;
        self.want(&queues, interest);
        Ok(watch)
    }

    /// Watches all tasks of a queue.
    pub fn watch_queue(&self, queue: QueueName) -> Result<QueueWatch, Full> {
        let watch = QueueWatch::new(self.0.watchers.clone(), queue.clone())?;
        self.want(&[queue], Interest::All);
        Ok(watch)
    }

    /// Makes the steps of this process announce at once, before Redis knows of the interest. Redis
    /// is told of what is new.
    fn want(&self, queues: &[QueueName], interest: Interest) {
        let mut wanted = self.0.wanted.write();
        let mut is_new = false;
        for queue in queues {
            let known = wanted.insert(queue.clone(), interest);
            match known.filter(|known| *known >= interest) {
                Some(known) => _ = wanted.insert(queue.clone(), known),
                None => is_new = true,
            }
        }
        self.0
            .is_wanted
            .store(!wanted.is_empty(), Ordering::Relaxed);
        drop(wanted);
        if is_new {
            self.0.look.notify_one();
        }
    }

    // --- for the process's reader of SQL and Redis

    /// Waits until a watcher needs to know the status of a task.
    pub async fn asked(&self) {
        self.0.watchers.asked().await;
    }

    /// Takes the tasks about which watchers ask; with `all`, all that are watched.
    pub fn take_asked(&self, all: bool) -> Vec<TaskId> {
        self.0.watchers.take_asked(all)
    }

    /// Sends the watchers what SQL and Redis say.
    pub fn tell(&self, events: Vec<TaskEvent>) {
        self.0.watchers.tell(events, false);
    }
}
