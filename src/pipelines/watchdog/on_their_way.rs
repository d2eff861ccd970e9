//! Released tasks that went by the bus, until the fanout has read them.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

use super::error::Error;
use crate::{
    bus::{Bus, Topic},
    pipelines::publishing::Last,
    runtime::Clock,
};

/// If released tasks take longer than this, check whether the topic was created again. Then no
/// reader ever reaches their offsets.
const LATE: Duration = Duration::from_secs(10);

/// Released tasks that the fanout has not read yet, by queue or by shard, and since when.
#[derive(Clone)]
pub(super) struct OnTheirWay<K>(HashMap<K, (Last, Instant)>);

impl<K: Eq + Hash> OnTheirWay<K> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn has(&self, of: &K) -> bool {
        self.0.contains_key(of)
    }

    /// Adds tasks that were published up to these offsets.
    pub(super) fn add(&mut self, of: K, last: Last, now: Instant) {
        let (known, _) = self.0.entry(of).or_insert_with(|| (Last::new(), now));
        known.extend(last);
    }

    /// Forgets tasks that the fanout has read, or that are gone because the topic was created
    /// again.
    pub(super) async fn follow(&mut self, bus: &dyn Bus, clock: &Clock) -> Result<(), Error> {
        if self.0.is_empty() {
            return Ok(());
        }
        let committed = bus.committed(Topic::Pipeline).await?;
        let read = |partition: u32| committed.get(partition as usize).copied().flatten();
        self.0.retain(|_, (released, _)| {
            released.retain(|partition, last| read(*partition) < Some(*last));
            !released.is_empty()
        });
        let now = clock.now();
        for (released, since) in self.0.values_mut().filter(|(_, since)| now - *since > LATE) {
            for (partition, last) in released.clone() {
                if bus.lies_beyond(Topic::Pipeline, partition, last).await? {
                    released.remove(&partition);
                }
            }
            *since = now;
        }
        self.0.retain(|_, (released, _)| !released.is_empty());
        Ok(())
    }
}
