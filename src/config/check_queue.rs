//! Checks of the settings of a queue.

use std::time::Duration;

use super::{
    check::{Checker, DAY, MOST, SHORTEST_LEASE},
    error::Error,
    settings::{QueueSettings, Settings},
    units::{ByteSize, Time},
};
use crate::model::{LimitBy, LimitFrom};

impl Checker<'_> {
    pub(super) fn queue(
        &self,
        name: &str,
        queue: &QueueSettings,
        settings: &Settings,
    ) -> Result<(), Error> {
        // An error in an inherited value is reported where the value was set.
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
        self.queue_retention(name, &key("retention"), queue, settings)?;
        self.range(&key("high_water_tasks"), queue.high_water_tasks, 1..=MOST)?;
        self.range(&key("high_water_bytes"), queue.high_water_bytes, 1..=MOST)?;
        self.range(&key("max_unfinished"), queue.max_unfinished, 1..=MOST)?;
        self.range(&key("filter_keys"), queue.filter_keys, 1..=MOST)?;
        self.key_limits(key, queue)?;
        self.enrichment(key, queue)
    }

    fn queue_retention(
        &self,
        name: &str,
        key: &str,
        queue: &QueueSettings,
        settings: &Settings,
    ) -> Result<(), Error> {
        let own = queue.retention;
        if own.is_zero() {
            return Ok(());
        }
        if name == "default" {
            let why = "is for a queue with a name: set the retention of all queues instead";
            return self.fail(key, Time(own), why);
        }
        let of_all = settings.watchdog.retention;
        let longest = if of_all.is_zero() {
            36_500 * DAY
        } else {
            of_all
        };
        let shortest = settings.watchdog.shortest_retention();
        if !(shortest..=longest).contains(&own) {
            let why = format!(
                "must be 0s (as long as retention), or {}, twice grace and republish_after, to {}",
                Time(shortest),
                self.shown("retention", Time(of_all)),
            );
            return self.fail(key, Time(own), &why);
        }
        Ok(())
    }

    fn key_limits(&self, key: impl Fn(&str) -> String, queue: &QueueSettings) -> Result<(), Error> {
        let has_limit = queue.limit_at_a_time.0 > 0 || queue.limit_pace.0.is_some();
        if has_limit && queue.limit_by == LimitBy::Nothing {
            let (name, written) = match queue.limit_pace.0 {
                Some(pace) => ("limit_pace", pace.to_string()),
                None => ("limit_at_a_time", queue.limit_at_a_time.0.to_string()),
            };
            let why =
                "needs limit_by = host, host_port, header:NAME or given: what has these limits";
            return self.fail(&key(name), written, why);
        }
        if let Some(pace) = queue.limit_pace.0 {
            let within = Duration::from_millis(1)..=DAY;
            if pace.starts == 0 || !within.contains(&pace.within) {
                let why = "must be at least one start within 1ms to 1day";
                return self.fail(&key("limit_pace"), pace, why);
            }
        }
        self.range(&key("limit_burst"), queue.limit_burst, 1..=1000)?;
        if !(0.0..=1.0).contains(&queue.limit_jitter) {
            return self.fail(&key("limit_jitter"), queue.limit_jitter, "must be 0 to 1");
        }
        let needs_pace = [
            ("limit_burst", queue.limit_burst > 1),
            ("limit_jitter", queue.limit_jitter > 0.0),
            ("limit_from", queue.limit_from == LimitFrom::End),
        ];
        for (name, is_set) in needs_pace {
            if is_set && queue.limit_pace.0.is_none() {
                let written = match name {
                    "limit_burst" => queue.limit_burst.to_string(),
                    "limit_jitter" => queue.limit_jitter.to_string(),
                    _ => "end".to_owned(),
                };
                return self.fail(&key(name), written, "needs a limit_pace, such as \"10/1m\"");
            }
        }
        Ok(())
    }

    fn enrichment(&self, key: impl Fn(&str) -> String, queue: &QueueSettings) -> Result<(), Error> {
        // Far below the time after which a loop that waits for an endpoint counts as stalled.
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
