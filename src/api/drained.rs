//! Whether a queue is drained: nothing of it is unfinished, or on its way.
//!
//! SQL counts a task as unfinished from the answer to its insert until its end, and stores an end
//! in one transaction with the tasks that it discovered. So by SQL's counts alone a queue never
//! looks drained between a task and what it discovered in the same queue. What the tasks of other
//! queues discovered for this one reaches SQL only with their reports. So a queue is drained if
//! nothing is unfinished, then all reports are settled that taskd had accepted before, and then
//! the counts are still the same.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::Instrument as _;

use super::{
    access::reaches,
    error::Error,
    handle::{Api, span},
    reader::Reader,
};
use crate::model::{Caller, OneQueue, QueueName, StoredStatus};

/// How often a call looks again while a queue is not drained.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long a look may take, at least: also a call that does not wait gets an answer.
const LOOK_WITHIN: Duration = Duration::from_secs(10);

impl Api {
    /// One queue. With `wait`: when it is drained, or after this time.
    pub async fn queue(
        &self,
        caller: &Caller,
        queue: &str,
        wait: Option<Duration>,
    ) -> Result<OneQueue, Error> {
        let queue = QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?;
        reaches(caller, queue.as_str())?;
        let query = self.query()?;
        let read = async {
            let drained = match wait {
                Some(wait) => Some(self.wait_until_drained(caller, &queue, wait).await?),
                None if query.counts_of(&queue).await?.is_empty() => {
                    return Err(Error::NoSuchQueue(queue));
                }
                None => None,
            };
            let view = query.queue_view(&queue).await?;
            Ok(OneQueue { view, drained })
        };
        read.instrument(span("queue", caller)).await
    }

    /// Waits until the queue is drained. False: the time is over, or this process stops.
    async fn wait_until_drained(
        &self,
        caller: &Caller,
        queue: &QueueName,
        wait: Duration,
    ) -> Result<bool, Error> {
        let query = self.query()?;
        let _wait = self.waits.call(&caller.access)?;
        let wait = wait.min(query.settings.limits.max_wait);
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Ok(false),
            drained = query.wait_until_drained(queue, wait) => drained,
            denied = self.authentication.revoked(&caller.access) => Err(denied.into()),
        }
    }
}

impl Reader {
    async fn wait_until_drained(&self, queue: &QueueName, wait: Duration) -> Result<bool, Error> {
        let began = Instant::now();
        let until = began + wait;
        let limit = until.max(began + LOOK_WITHIN);
        let mut answer = timeout_at(limit, self.is_drained(queue)).await;
        loop {
            match answer {
                Ok(Ok(true)) => return Ok(true),
                Ok(Err(error @ Error::NoSuchQueue(_))) => return Err(error),
                // Reports are not settled in time.
                Err(_elapsed) => return Ok(false),
                // A server that does not answer now may answer later.
                Ok(Err(error)) if Instant::now() >= until => return Err(error),
                Ok(Ok(false)) if Instant::now() >= until => return Ok(false),
                Ok(_) => sleep_until(until.min(Instant::now() + LOOK_EVERY)).await,
            }
            // This process reads the counts of all queues anyway.
            answer = match self.occupancy.unfinished_of(queue) {
                0 => timeout_at(limit, self.is_drained(queue)).await,
                _ => Ok(Ok(false)),
            };
        }
    }

    async fn is_drained(&self, queue: &QueueName) -> Result<bool, Error> {
        let before = self.counts_of(queue).await?;
        if before.contains_key(&StoredStatus::Unfinished) {
            return Ok(false);
        }
        self.settled.wait().await?;
        let now = self.counts_of(queue).await?;
        if now.is_empty() {
            return Err(Error::NoSuchQueue(queue.clone()));
        }
        Ok(now == before)
    }

    /// The tasks that the queue ever had, by status; empty: it never had one.
    pub(super) async fn counts_of(
        &self,
        queue: &QueueName,
    ) -> Result<BTreeMap<StoredStatus, u64>, Error> {
        let counts = self.store.counts(Some(std::slice::from_ref(queue))).await?;
        Ok(counts
            .into_iter()
            .filter(|count| count.count > 0)
            .map(|count| (count.status, count.count))
            .collect())
    }
}
