//! Removes old records that everybody has read from the bus. When Redis has little memory left,
//! topics of users lose what all their subscriptions have read.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead};
use crate::{
    bus::{self, Bus, Keep, Log, Retention, Topic},
    model::{self, Offset, TopicName},
    pipelines::{admission::Gates, context::Context},
    runtime::Loop,
    store::Store,
    telemetry::metrics,
};

const EVERY: Duration = Duration::from_secs(60);
/// How often to look whether Redis has little memory left.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Until then other processes may publish to a topic that is being deleted.
const BEFORE_DELETION: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(super) struct Trim {
    bus: Arc<dyn Bus>,
    store: Arc<dyn Store>,
    keep: Keep,
    gates: Gates,
    lead: Lead,
}

impl Trim {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context {
            bus,
            store,
            settings,
            gates,
            ..
        } = context.clone();
        let keep = Keep {
            age: settings.topic_retention,
            records: settings.topic_retention_records,
        };
        Self {
            bus,
            store,
            keep,
            gates,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut round_at = cx.clock().now();
        while self.lead.wait(&cx).await {
            if cx.clock().now() < round_at {
                if self.gates.logs_are_large() && !self.bus.has_other_readers() {
                    self.trim_read(&cx).await?;
                }
                cx.beat();
                cx.idle(cx.pause(LOOK_EVERY)).await;
                continue;
            }
            let started = Instant::now();
            let mut failed = Ok(());
            for topic in Topic::ALL {
                let trimmed = self.bus.trim(topic, self.keep).await;
                failed = failed.and(judge(topic.as_str(), trimmed)?);
                cx.beat();
            }
            for log in &Log::REPORTS {
                let trimmed = self.bus.logs().trim(log, self.of_reports(log)).await;
                failed = failed.and(judge(&log.name, trimmed)?);
                cx.beat();
            }
            for topic in self.store.topics().await? {
                let log = Log::from(&topic);
                let trimmed = if topic.is_deleting {
                    cx.idle(cx.pause(BEFORE_DELETION)).await;
                    self.end_delete(&topic).await?
                } else {
                    self.bus.logs().trim(&log, log.keep).await
                };
                failed = failed.and(judge(&log.name, trimmed)?);
                cx.beat();
            }
            failed?;
            metrics::watchdog_step("trim", started.elapsed());
            round_at = cx.clock().now() + EVERY;
        }
        Ok(())
    }

    /// Deletes what all subscriptions of a topic have read, of the largest topics first, until Redis
    /// has memory again.
    async fn trim_read(&self, cx: &Loop) -> Result<(), Error> {
        let logs = self.bus.logs();
        let subscriptions = self.store.subscriptions().await?;
        let mut read: BTreeMap<TopicName, BTreeMap<u32, Vec<Option<Offset>>>> = BTreeMap::new();
        for position in self.store.positions(None).await? {
            let of_topic = read.entry(position.key.topic).or_default();
            let of_partition = of_topic.entry(position.key.partition).or_default();
            of_partition.push(position.up_to.after);
        }
        let mut largest = Vec::new();
        for topic in self.store.topics().await? {
            let Some(read) = read.remove(&topic.name).filter(|_| !topic.is_deleting) else {
                continue;
            };
            let of_topic = subscriptions
                .iter()
                .filter(|subscription| subscription.topics.includes(&topic.name))
                .count();
            let log = Log::from(&topic);
            match logs.size(&log).await {
                Ok(size) => largest.push((size, log, of_topic, read)),
                Err(error) => judge(&log.name, Err(error))?.unwrap_or_default(),
            }
            cx.beat();
        }
        largest.sort_unstable_by_key(|(size, ..)| std::cmp::Reverse(*size));
        for (_, log, of_topic, read) in largest {
            let mut has_trimmed = false;
            for (partition, places) in read {
                // A subscription that was made a moment ago may have no position yet.
                let least = places.iter().min().copied().flatten();
                if let Some(up_to) = least.filter(|_| places.len() >= of_topic) {
                    let trimmed = match logs.trim_to(&log, partition, up_to).await {
                        Ok(trimmed) => trimmed,
                        Err(error) => {
                            judge(&log.name, Err(error))?.unwrap_or_default();
                            0
                        }
                    };
                    if trimmed > 0 {
                        has_trimmed = true;
                        let topic = &log.name;
                        tracing::info!(%topic, "deleted {trimmed} records of {topic} that all subscriptions have read: redis has little memory left");
                    }
                }
                cx.beat();
            }
            if has_trimmed {
                // Until the next check of memory: smaller topics may keep their records.
                cx.idle(cx.pause(LOOK_EVERY)).await;
            }
            if !self.gates.logs_are_large() {
                break;
            }
        }
        Ok(())
    }

    /// Ends the deletion of a topic that somebody has begun, unless the topic was made anew since.
    async fn end_delete(&self, topic: &model::Topic) -> Result<bus::Result<u64>, Error> {
        if !self.store.topics().await?.contains(topic) {
            return Ok(Ok(0));
        }
        if let Err(error) = self.bus.logs().delete(&Log::from(topic)).await {
            return Ok(Err(error));
        }
        self.store.end_delete_topic(topic).await?;
        Ok(Ok(0))
    }

    fn of_reports(&self, log: &Log) -> Retention {
        Retention {
            age: self.keep.age,
            records: self.keep.records,
            bytes: log.keep.bytes,
        }
    }
}

/// Returns an inner error if the leader of this topic is away, but perhaps not those of other
/// topics, and an outer one if the bus must be opened again.
fn judge(topic: &str, trimmed: bus::Result<u64>) -> bus::Result<bus::Result<()>> {
    match trimmed {
        Ok(0) => Ok(Ok(())),
        Ok(count) => {
            tracing::debug!(%topic, "deleted {count} old records of {topic}");
            Ok(Ok(()))
        }
        Err(error) if error.is_lost() => Err(error),
        Err(error) => Ok(Err(error)),
    }
}
