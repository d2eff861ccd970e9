//! Pages of logs, each read once for all subscriptions that are at its place.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{
    FutureExt as _, TryFutureExt as _,
    future::{BoxFuture, Shared},
};

use crate::{
    bus::{self, Log, LogMessage, Logs, PAGE_BYTES},
    model::{Offset, OwnTopic, TopicName},
    wire::own_topics::own_record,
};

/// The most records of a page.
pub(super) const PAGE: usize = 1000;
/// How many pages are kept for other subscriptions, and for how long.
const KEPT: usize = 16;
const KEPT_FOR: Duration = Duration::from_millis(500);

/// The records of a page.
pub(super) struct Records {
    pub(super) messages: Vec<LogMessage>,
    /// The page has as much as any page may have, so there may be another one.
    pub(super) is_full: bool,
}

/// A page that is read, or is being read. An error is for all that wait for it.
pub(super) type Page = Shared<BoxFuture<'static, Result<Arc<Records>, Arc<bus::Error>>>>;

/// Partition and offset after which a page begins.
type Place = (TopicName, u32, Option<Offset>);

/// Returns the page after an offset. It is read when somebody waits for it.
pub(super) fn page(
    logs: &Arc<dyn Logs>,
    log: &Arc<Log>,
    partition: u32,
    after: Option<Offset>,
) -> Page {
    let (logs, log) = (Arc::clone(logs), Arc::clone(log));
    let read = async move {
        let mut messages = logs.read(&log, partition, after, PAGE).await?;
        let bytes: usize = messages.iter().map(|one| one.record.bytes()).sum();
        let is_full = messages.len() >= PAGE || bytes >= PAGE_BYTES;
        if let Some(own) = OwnTopic::of(&log.name).filter(|_| log.is_report) {
            for message in &mut messages {
                show(own, message);
            }
        }
        Ok(Arc::new(Records { messages, is_full }))
    };
    read.map_err(Arc::new).boxed().shared()
}

/// Makes a record of one of taskd's own topics one that others can read.
fn show(own: OwnTopic, message: &mut LogMessage) {
    match own_record(own, &message.record.value) {
        Ok(shown) => {
            message.record.value = shown.value;
            message.record.key = shown.key;
            message.record.attributes = shown.attributes;
        }
        // Another program, or a later version, may have written it.
        Err(why) => {
            let (topic, offset) = (own.as_str(), message.offset);
            tracing::warn!("the record of {topic} at {offset} stays as it is: {why}");
        }
    }
}

#[derive(Default)]
pub(super) struct Pages {
    kept: HashMap<Place, (Instant, Page)>,
}

impl Pages {
    /// Returns the page after an offset.
    pub(super) fn get(
        &mut self,
        logs: &Arc<dyn Logs>,
        topic: &TopicName,
        log: &Arc<Log>,
        partition: u32,
        after: Option<Offset>,
    ) -> Page {
        let now = Instant::now();
        self.kept
            .retain(|_, (at, _)| now.duration_since(*at) < KEPT_FOR);
        if let Some((_, page)) = self.kept.get(&(topic.clone(), partition, after)) {
            return page.clone();
        }
        let page = page(logs, log, partition, after);
        self.keep(topic, partition, after, page.clone());
        page
    }

    /// Keeps a page. If there are too many, the oldest one goes.
    pub(super) fn keep(
        &mut self,
        topic: &TopicName,
        partition: u32,
        after: Option<Offset>,
        page: Page,
    ) {
        if self.kept.len() >= KEPT {
            let oldest = self.kept.iter().min_by_key(|(_, (at, _))| *at);
            if let Some(place) = oldest.map(|(place, _)| place.clone()) {
                self.kept.remove(&place);
            }
        }
        let place = (topic.clone(), partition, after);
        self.kept.insert(place, (Instant::now(), page));
    }

    /// Forgets the pages of some partitions that may have new records. A full page has none.
    pub(super) fn forget(&mut self, topic: &TopicName, partitions: &BTreeSet<u32>) {
        self.kept.retain(|(of, partition, _), (_, page)| {
            let is_full = matches!(page.peek(), Some(Ok(records)) if records.is_full);
            is_full || of != topic || !partitions.contains(partition)
        });
    }

    pub(super) fn forget_all(&mut self) {
        self.kept.clear();
    }
}
