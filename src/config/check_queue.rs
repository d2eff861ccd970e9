//! Checks of the settings of a queue.

use std::time::Duration;

use super::{
    check::{Checker, DAY, MOST, SHORTEST_LEASE},
    error::Error,
    settings::{QueueSettings, Settings},
    units::{ByteSize, Time},
};

impl Checker<'_> {
    pub(super) fn queue(
        &self,
        name: &str,
        queue: &QueueSettings,
        settings: &Settings,
    ) -> Result<(), Error> {
        // An inherited value is at fault where it was set.
        let key = |key: &str| {
            let own = format!("queues.{name}.{key}");
            let inherited = format!("queues.default.{key}");
            if self.origins.describe(&own).is_none() && self.origins.describe(&inherited).is_some()
            {
                inherited
            } else {
                own
            }
        };
        let limits = &settings.limits;
        if queue.replicas == 0 || queue.replicas > limits.max_replicas {
            let why = format!(
                "must be 1 to {}",
                self.shown("max_replicas", limits.max_replicas)
            );
            return self.fail(&key("replicas"), queue.replicas, &why);
        }
        if queue.lease < SHORTEST_LEASE || queue.lease > limits.max_lease {
            let why = format!(
                "must be 100ms to {}",
                self.shown("max_lease", Time(limits.max_lease))
            );
            return self.fail(&key("lease"), Time(queue.lease), &why);
        }
        self.range(&key("max_attempts"), queue.max_attempts, 1..=1000)?;
        if queue.backoff.is_empty() {
            return self.fail(
                &key("backoff"),
                "[]",
                "must hold at least one wait, such as [\"1s\", \"5s\"]",
            );
        }
        queue
            .backoff
            .iter()
            .try_for_each(|wait| self.time(&key("backoff"), *wait, Duration::ZERO..=DAY))?;
        let window = Duration::from_secs(1)..=30 * DAY;
        self.time(&key("idempotency_window"), queue.idempotency_window, window)?;
        self.range(&key("high_water_tasks"), queue.high_water_tasks, 1..=MOST)?;
        self.range(&key("high_water_bytes"), queue.high_water_bytes, 1..=MOST)?;
        self.range(&key("max_unfinished"), queue.max_unfinished, 1..=MOST)?;
        self.range(&key("filter_keys"), queue.filter_keys, 1..=MOST)?;
        self.enrichment(key, queue)
    }

    fn enrichment(&self, key: impl Fn(&str) -> String, queue: &QueueSettings) -> Result<(), Error> {
        // Far below the time after which a loop that waits for an endpoint seems to hang.
        let timeout = Duration::from_millis(10)..=Duration::from_secs(5);
        self.time(&key("enrich_timeout"), queue.enrich_timeout, timeout)?;
        self.time(
            &key("enrich_pause"),
            queue.enrich_pause,
            Duration::from_millis(100)..=DAY,
        )?;
        self.range(
            &key("enrich_batch_tasks"),
            queue.enrich_batch_tasks,
            1..=1000,
        )?;
        self.range(&key("enrich_concurrency"), queue.enrich_concurrency, 1..=64)?;
        self.range(&key("enrich_failures"), queue.enrich_failures, 1..=1000)?;
        let sizes = [
            ("enrich_batch_bytes", queue.enrich_batch_bytes),
            ("enrich_answer_bytes", queue.enrich_answer_bytes),
        ];
        for (name, bytes) in sizes {
            if !(1 << 10..=64 << 20).contains(&bytes) {
                return self.fail(&key(name), ByteSize(bytes as u64), "must be 1KiB to 64MiB");
            }
        }
        Ok(())
    }
}
