//! The topics that a process knows.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::error::Error;
use crate::{
    bus::{Log, Logs},
    model::{Offset, Topic, TopicName},
    store::Store,
};

/// How long a process uses the topics that it read from SQL, how long if a call asks for one that is
/// not among them, and how long while SQL is away.
const FRESH: Duration = Duration::from_secs(1);
const NEWEST: Duration = Duration::from_millis(20);
const STALE: Duration = Duration::from_secs(60);
/// How long the ends of a topic stay for which nobody asks. Longer than calls wait between two looks.
const ENDS_STAY: Duration = Duration::from_secs(10);
/// After this, all processes know that a topic is being deleted, if SQL answers them.
pub(super) const KNOWN_FOR: Duration = Duration::from_secs(2);

/// The topics, as SQL had them a moment ago.
/// Nothing runs while nobody uses topics.
#[derive(Clone, Default)]
pub struct KnownTopics(Arc<Shared>);

#[derive(Default)]
struct Shared {
    known: Mutex<Known>,
    /// The ends of the partitions of topics that calls wait for.
    ends: Mutex<HashMap<TopicName, Ends>>,
    /// Counts the calls with records without a key, which take turns over the partitions.
    turn: AtomicU32,
}

/// The ends of the partitions of a topic.
#[derive(Default)]
struct Ends {
    looked: Arc<Looked>,
    /// When somebody last asked for them.
    asked: Option<Instant>,
}

/// The ends that the last look has found, and when. Held during a look, for all that want one.
type Looked = tokio::sync::Mutex<Option<(Instant, Arc<[Option<Offset>]>)>>;

#[derive(Default)]
struct Known {
    topics: Option<Arc<BTreeMap<TopicName, Topic>>>,
    /// When SQL was last asked for them, and when it last answered.
    asked: Option<Instant>,
    answered: Option<Instant>,
    /// Counts the changes that this process has made: an answer from before one is not kept.
    changes: u64,
}

impl Known {
    fn asked_within(&self, time: Duration) -> Option<Arc<BTreeMap<TopicName, Topic>>> {
        self.asked.filter(|at| at.elapsed() < time)?;
        self.topics.clone()
    }
}

impl KnownTopics {
    pub(super) async fn all(
        &self,
        store: &dyn Store,
    ) -> Result<Arc<BTreeMap<TopicName, Topic>>, Error> {
        self.asked_within(FRESH, store).await
    }

    /// The topics with those that another process made a moment ago.
    pub(super) async fn newest(
        &self,
        store: &dyn Store,
    ) -> Result<Arc<BTreeMap<TopicName, Topic>>, Error> {
        self.asked_within(NEWEST, store).await
    }

    async fn asked_within(
        &self,
        time: Duration,
        store: &dyn Store,
    ) -> Result<Arc<BTreeMap<TopicName, Topic>>, Error> {
        let changes = {
            let mut known = self.0.known.lock();
            if let Some(topics) = known.asked_within(time) {
                return Ok(topics);
            }
            // Other calls use what is known meanwhile.
            known.asked = Some(Instant::now());
            known.changes
        };
        let answer = store.topics().await;
        let mut known = self.0.known.lock();
        match answer {
            Ok(topics) => {
                let topics = topics.into_iter().map(|topic| (topic.name.clone(), topic));
                let topics = Arc::new(topics.collect());
                if known.changes == changes {
                    known.topics = Some(Arc::clone(&topics));
                    known.answered = Some(Instant::now());
                }
                Ok(topics)
            }
            // Records still go to topics and come from them while SQL is away.
            Err(error) => {
                if known.answered.is_none_or(|at| at.elapsed() >= STALE) {
                    known.topics = None;
                }
                known.topics.clone().ok_or_else(|| error.into())
            }
        }
    }

    /// The ends of the partitions of a log, which somebody has asked for at most `within` ago.
    pub(super) async fn ends(
        &self,
        logs: &dyn Logs,
        log: &Log,
        topic: &TopicName,
        within: Duration,
    ) -> Result<Arc<[Option<Offset>]>, Error> {
        let looked = {
            let mut ends = self.0.ends.lock();
            // Between two looks nobody holds those that calls wait for.
            ends.retain(|_, ends| ends.asked.is_some_and(|at| at.elapsed() < ENDS_STAY));
            let ends = ends.entry(topic.clone()).or_default();
            ends.asked = Some(Instant::now());
            Arc::clone(&ends.looked)
        };
        let mut looked = looked.lock().await;
        if let Some((at, ends)) = &*looked
            && at.elapsed() < within
            && ends.len() >= log.partitions as usize
        {
            return Ok(Arc::clone(ends));
        }
        let ends: Arc<[Option<Offset>]> = logs.ends(log).await?.into();
        *looked = Some((Instant::now(), Arc::clone(&ends)));
        Ok(ends)
    }

    pub(super) fn forget(&self) {
        let mut known = self.0.known.lock();
        known.topics = None;
        known.changes += 1;
    }

    /// The turn of a call with records without a key.
    pub(super) fn turn(&self) -> u32 {
        self.0.turn.fetch_add(1, Ordering::Relaxed)
    }
}
