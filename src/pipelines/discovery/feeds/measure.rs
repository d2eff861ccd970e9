//! What subscriptions have left to read, for the metrics.

use std::{collections::HashMap, sync::Arc};

use crate::{
    bus::{Log, LogEnd, LogMessage, Logs},
    model::{Offset, SubscriptionName},
    runtime::Clock,
};

/// How many topics and places are asked for at most. A subscription with one beyond is not measured.
const TOPICS: usize = 32;
const PLACES: usize = 256;

/// A partition that a subscription may not have read to its end.
pub(super) struct Unread {
    pub(super) log: Arc<Log>,
    pub(super) partition: u32,
    pub(super) after: Option<Offset>,
}

/// What a subscription has left to read.
pub(super) struct Left {
    pub(super) records: u64,
    /// The age of the oldest.
    pub(super) oldest_seconds: i64,
}

/// What those subscriptions have left to read of which all partitions were measured.
pub(super) type Measured = Vec<(SubscriptionName, Left)>;

/// Counts the unread records of subscriptions, and finds the oldest of each.
pub(super) async fn measure(
    logs: Arc<dyn Logs>,
    unread: Vec<(SubscriptionName, Vec<Unread>)>,
    clock: Clock,
) -> Measured {
    let mut measure = Measure {
        logs,
        ends: HashMap::new(),
        nexts: HashMap::new(),
    };
    let mut measured = Vec::new();
    for (subscription, unread) in unread {
        if let Some((records, oldest)) = measure.all(&unread).await {
            let age_ms = oldest.map_or(0, |oldest| clock.now_unix_ms() - oldest);
            let left = Left {
                records,
                oldest_seconds: age_ms.max(0) / 1000,
            };
            measured.push((subscription, left));
        }
    }
    measured
}

/// What was asked for, once for all subscriptions. `None`: there was no answer.
struct Measure {
    logs: Arc<dyn Logs>,
    ends: HashMap<String, Option<Vec<LogEnd>>>,
    nexts: HashMap<(String, u32, Option<Offset>), Option<Option<LogMessage>>>,
}

impl Measure {
    /// How many records of these partitions are unread, and when the oldest was published. `None` if
    /// some partition cannot be measured.
    async fn all(&mut self, unread: &[Unread]) -> Option<(u64, Option<i64>)> {
        let mut records = 0;
        let mut oldest: Option<i64> = None;
        for one in unread {
            let end = self.end(one).await?;
            if one.after >= end.last {
                continue;
            }
            let Some((number, published)) = self.next(one).await? else {
                continue;
            };
            records += end.count.saturating_sub(number);
            oldest = Some(oldest.map_or(published, |old| old.min(published)));
        }
        Some((records, oldest))
    }

    async fn end(&mut self, one: &Unread) -> Option<LogEnd> {
        let topic = one.log.name.to_string();
        if !self.ends.contains_key(&topic) {
            if self.ends.len() >= TOPICS {
                return None;
            }
            let ends = self.logs.counted_ends(&one.log).await.ok();
            self.ends.insert(topic.clone(), ends);
        }
        let ends = self.ends.get(&topic)?.as_ref()?;
        ends.get(one.partition as usize).copied()
    }

    /// The number of the next record, and when it was published.
    async fn next(&mut self, one: &Unread) -> Option<Option<(u64, i64)>> {
        let place = (one.log.name.to_string(), one.partition, one.after);
        if !self.nexts.contains_key(&place) {
            if self.nexts.len() >= PLACES {
                return None;
            }
            let read = self.logs.read(&one.log, one.partition, one.after, 1).await;
            let next = read.ok().map(|mut page| page.pop());
            self.nexts.insert(place.clone(), next);
        }
        let next = self.nexts.get(&place)?.as_ref()?;
        Some(
            next.as_ref()
                .map(|next| (next.number, next.published_unix_ms)),
        )
    }
}
