//! Pages of logs, each read once for all subscriptions that are at its place.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};

use crate::{
    bus::{self, Log, LogMessage, Logs},
    model::{Offset, TopicName},
};

/// The most records of a page.
pub(super) const PAGE: usize = 500;
/// How many pages are kept for other subscriptions, and for how long.
const KEPT: usize = 16;
const KEPT_FOR: Duration = Duration::from_millis(500);

/// A page that is read, or is being read. An error is for all that wait for it.
pub(super) type Page = Shared<BoxFuture<'static, Result<Arc<[LogMessage]>, Arc<bus::Error>>>>;

/// Partition and offset after which a page begins.
type Place = (TopicName, u32, Option<Offset>);

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
        let place = (topic.clone(), partition, after);
        if let Some((_, page)) = self.kept.get(&place) {
            return page.clone();
        }
        let logs = Arc::clone(logs);
        let log = Arc::clone(log);
        let read = async move {
            match logs.read(&log, partition, after, PAGE).await {
                Ok(messages) => Ok(messages.into()),
                Err(error) => Err(Arc::new(error)),
            }
        };
        let page = read.boxed().shared();
        if self.kept.len() < KEPT {
            self.kept.insert(place, (now, page.clone()));
        }
        page
    }

    /// Forgets the pages of some partitions, because they have new records.
    pub(super) fn forget(&mut self, topic: &TopicName, partitions: &BTreeSet<u32>) {
        self.kept
            .retain(|(of, partition, _), _| of != topic || !partitions.contains(partition));
    }

    pub(super) fn forget_all(&mut self) {
        self.kept.clear();
    }
}
