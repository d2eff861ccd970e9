//! Tells which partitions of topics have new records: this process at once, the others by the
//! channel of the wakes. A message may get lost, so whoever waits for records also looks for them now and then.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::{error::Result, keys};
use crate::{model::TopicName, redis_pool::Redis, runtime::Loop};

/// The first byte of a message. It is followed by the process that sent it, and the topics with
/// their partitions: `topic:0,3`.
const MARK: u8 = b'#';

/// The topics with new records, as this process hears of them. Clones share them.
#[derive(Clone, Default)]
pub struct PublishedTopics(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// Those of this process that the others have not been told yet.
    untold: Mutex<Partitions>,
    tell: Notify,
    heard: Mutex<Heard>,
    hear: Notify,
    waiting: Mutex<HashMap<TopicName, watch::Sender<Told>>>,
}

/// Some partitions of topics.
type Partitions = BTreeMap<TopicName, BTreeSet<u32>>;

/// What was heard since the last time.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Heard {
    pub partitions: BTreeMap<TopicName, BTreeSet<u32>>,
    /// Messages may have been missed: any topic may have new records.
    pub is_incomplete: bool,
}

/// How often this process has heard of each partition of a topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    partitions: BTreeMap<u32, u64>,
    /// How often messages may have been missed.
    gaps: u64,
}

impl Told {
    /// The partitions of which it has heard since `before`. `None`: it may be any.
    pub fn since(&self, before: &Self) -> Option<BTreeSet<u32>> {
        if self.gaps != before.gaps {
            return None;
        }
        let mut news = BTreeSet::new();
        for (partition, times) in &self.partitions {
            if before.partitions.get(partition) != Some(times) {
                news.insert(*partition);
            }
        }
        Some(news)
    }
}

impl PublishedTopics {
    /// This process has published to partitions of a topic.
    pub fn published(&self, topic: &TopicName, partitions: &BTreeSet<u32>) {
        if partitions.is_empty() {
            return;
        }
        self.hear(topic, partitions);
        let mut untold = self.0.untold.lock();
        untold.entry(topic.clone()).or_default().extend(partitions);
        self.0.tell.notify_one();
    }

    /// Returns what changes with the next record of a topic.
    pub fn watch(&self, topic: &TopicName) -> watch::Receiver<Told> {
        let mut waiting = self.0.waiting.lock();
        waiting.entry(topic.clone()).or_default().subscribe()
    }

    /// Waits for partitions with new records. Only one caller may wait at a time.
    pub async fn next(&self) -> Heard {
        loop {
            let heard = mem::take(&mut *self.0.heard.lock());
            if heard != Heard::default() {
                return heard;
            }
            self.0.hear.notified().await;
        }
    }

    fn hear(&self, topic: &TopicName, partitions: &BTreeSet<u32>) {
        let mut heard = self.0.heard.lock();
        let of_topic = heard.partitions.entry(topic.clone()).or_default();
        of_topic.extend(partitions);
        drop(heard);
        self.0.hear.notify_one();
        let mut waiting = self.0.waiting.lock();
        let Some(sender) = waiting.get(topic) else {
            return;
        };
        if sender.receiver_count() == 0 {
            waiting.remove(topic);
            return;
        }
        sender.send_modify(|told| {
            for partition in partitions {
                *told.partitions.entry(*partition).or_default() += 1;
            }
        });
    }

    pub(super) fn missed_some(&self) {
        self.0.heard.lock().is_incomplete = true;
        self.0.hear.notify_one();
        self.0.waiting.lock().retain(|_, sender| {
            sender.send_modify(|told| told.gaps += 1);
            sender.receiver_count() > 0
        });
    }

    /// Reads a message of the channel. Returns whether it was one about topics.
    pub(super) fn read(&self, message: &[u8], own_process: &str) -> bool {
        let Some((&MARK, rest)) = message.split_first() else {
            return false;
        };
        let text = String::from_utf8_lossy(rest);
        let mut words = text.split(' ');
        if words.next() != Some(own_process) {
            for (topic, partitions) in words.filter_map(read_word) {
                self.hear(&topic, &partitions);
            }
        }
        true
    }

    /// Tells the other processes, until the stop. What piles up meanwhile goes in one message.
    pub(super) async fn tell(&self, redis: &Redis, process: &str, cx: &Loop) -> Result<()> {
        loop {
            tokio::select! {
                () = cx.idle(self.0.tell.notified()) => {}
                () = cx.stop.cancelled() => return Ok(()),
            }
            let topics = mem::take(&mut *self.0.untold.lock());
            if topics.is_empty() {
                continue;
            }
            let mut message = format!("{}{process}", char::from(MARK));
            for (topic, partitions) in &topics {
                let partitions: Vec<String> = partitions.iter().map(u32::to_string).collect();
                message.push_str(&format!(" {topic}:{}", partitions.join(",")));
            }
            let mut publish = redis::cmd("PUBLISH");
            publish.arg(keys::wake_channel(redis.prefix())).arg(message);
            if let Err(error) = publish.exec_async(&mut redis.conn()).await {
                let mut untold = self.0.untold.lock();
                for (topic, partitions) in topics {
                    untold.entry(topic).or_default().extend(partitions);
                }
                drop(untold);
                self.0.tell.notify_one();
                return Err(error.into());
            }
            cx.beat();
        }
    }
}

/// Reads `topic:0,3`.
fn read_word(word: &str) -> Option<(TopicName, BTreeSet<u32>)> {
    let (topic, partitions) = word.split_once(':')?;
    let partitions: Result<BTreeSet<u32>, _> = partitions.split(',').map(str::parse).collect();
    Some((TopicName::new(topic).ok()?, partitions.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn partitions_of_other_processes_are_heard() {
        let topics = PublishedTopics::default();
        let topic = |name: &str| TopicName::new(name).unwrap();
        let mut watched = topics.watch(&topic("a"));
        let before = watched.borrow_and_update().clone();
        assert!(topics.read(b"#other a:0,3 b:1 c d:x", "me"));
        assert!(topics.read(b"#me c:0", "me"), "its own are heard already");
        assert!(!topics.read(b"a queue", "me"));
        let heard = topics.next().await;
        let expected = [(topic("a"), [0, 3].into()), (topic("b"), [1].into())];
        assert_eq!(heard.partitions, expected.into());
        assert!(!heard.is_incomplete);
        watched.changed().await.unwrap();
        let told = watched.borrow_and_update().clone();
        assert_eq!(told.since(&before), Some([0, 3].into()));
        topics.published(&topic("a"), &[3].into());
        let more = watched.borrow_and_update().clone();
        assert_eq!(more.since(&told), Some([3].into()));
        topics.missed_some();
        let heard = topics.next().await;
        assert!(heard.is_incomplete && heard.partitions.contains_key(&topic("a")));
        watched.changed().await.unwrap();
        assert_eq!(watched.borrow().since(&more), None, "it may be any");
    }
}
