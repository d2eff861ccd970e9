//! Leases on their way to their workers: those that arrived are reported, the others are released.

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream::FuturesUnordered};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    calls::MAX_COMBINED,
    error::{Error, Result},
    shard::Shard,
    types::Rejection,
    worker::WorkerQueue,
};
use crate::{
    model::ShardId,
    redis_pool::scripts,
    runtime::{Beat, tick_after},
};

/// How long deliveries gather before they are reported at the next tick, unless a claim reports
/// them before.
const DELIVERIES_GATHER: Duration = Duration::from_millis(30);

/// How long to wait after an error before they are reported again.
const DELIVERIES_AGAIN: Duration = Duration::from_secs(1);

/// Leases that wait for a call of their shard, so that one shard that hangs holds up no other.
#[derive(Default)]
struct Releases {
    /// For each shard with a call in flight, the leases that wait.
    waiting: HashMap<ShardId, Vec<Rejection>>,
}

impl Releases {
    /// Returns the leases that may be released now; `None` if they wait for the shard's call in
    /// flight.
    fn begin(&mut self, shard: &ShardId, items: Vec<Rejection>) -> Option<Vec<Rejection>> {
        if let Some(waiting) = self.waiting.get_mut(shard) {
            waiting.extend(items);
            return None;
        }
        self.waiting.insert(shard.clone(), Vec::new());
        Some(items)
    }

    /// Ends a call of the shard. Returns the leases that have waited for it, up to one call's
    /// worth.
    fn next(&mut self, shard: &ShardId) -> Option<Vec<Rejection>> {
        let waiting = self.waiting.get_mut(shard)?;
        if waiting.is_empty() {
            self.waiting.remove(shard);
            return None;
        }
        let rest = waiting.split_off(waiting.len().min(MAX_COMBINED));
        Some(std::mem::replace(waiting, rest))
    }
}

impl WorkerQueue {
    /// Releases what could not be delivered, and reports what was. At the stop, waits until nobody
    /// claims any more (`claims_end`), and handles what is left. Runs once.
    pub async fn settle_deliveries(
        &self,
        beat: &Beat,
        stop: &CancellationToken,
        claims_end: impl Future<Output = ()>,
    ) {
        let Some(mut released) = self.released() else {
            return;
        };
        let mut releases = Releases::default();
        let mut releasing = FuturesUnordered::new();
        // Shards whose deliveries are being reported.
        let mut reporting = FuturesUnordered::new();
        let mut are_reporting = HashSet::new();
        loop {
            tokio::select! {
                Some((shard, items)) = beat.idle(released.recv()) => {
                    if let Some(items) = releases.begin(&shard, items) {
                        releasing.push(self.release(shard, items));
                    }
                }
                Some(shard) = releasing.next() => {
                    if let Some(items) = releases.next(&shard) {
                        releasing.push(self.release(shard, items));
                    }
                }
                () = self.delivered().notified() => {
                    let gathered = tick_after(Instant::now() + DELIVERIES_GATHER);
                    stop.run_until_cancelled(tokio::time::sleep_until(gathered)).await;
                    for shard in self.all() {
                        if shard.cache.has_delivered() && are_reporting.insert(shard.id.clone()) {
                            reporting.push(self.report_or_wait(shard, stop));
                        }
                    }
                    beat.beat();
                }
                Some(shard) = reporting.next() => {
                    are_reporting.remove(&shard.id);
                    // The loop has been notified of deliveries since then already, and has skipped
                    // them.
                    if shard.cache.has_delivered() {
                        self.delivered().notify_one();
                    }
                }
                () = stop.cancelled() => break,
            }
        }
        claims_end.await;
        // A claim continues without its caller, and its leases are for nobody.
        self.drained().await;
        loop {
            while let Ok((shard, items)) = released.try_recv() {
                if let Some(items) = releases.begin(&shard, items) {
                    releasing.push(self.release(shard, items));
                }
            }
            let Some(shard) = releasing.next().await else {
                break;
            };
            if let Some(items) = releases.next(&shard) {
                releasing.push(self.release(shard, items));
            }
        }
        while reporting.next().await.is_some() {}
        self.report_deliveries().await;
    }

    /// Reports the deliveries of a shard. After an error waits for a moment, before the shard may
    /// get its next turn.
    async fn report_or_wait(&self, shard: Arc<Shard>, stop: &CancellationToken) -> Arc<Shard> {
        if self.report_delivered(&shard).await.is_err() {
            stop.run_until_cancelled(tokio::time::sleep(DELIVERIES_AGAIN))
                .await;
        }
        shard
    }

    async fn release(&self, shard: ShardId, items: Vec<Rejection>) -> ShardId {
        // After an error the leases run out: later, and at no cost.
        if let Err(error) = self.reject(&shard, &items, &[Duration::ZERO]).await {
            tracing::warn!(%shard, "could not give back {} undelivered leases of {shard}: {error}", items.len());
        }
        shard
    }

    /// Reports the deliveries that no claim has reported. Returns whether all are reported now.
    pub async fn report_deliveries(&self) -> bool {
        let mut all = true;
        for shard in self.all() {
            if let Err(error) = self.report_delivered(&shard).await {
                // If such a lease runs out, it costs its task no attempt.
                tracing::debug!(shard = %shard.id, "could not report deliveries of {}: {error}", shard.id);
                all = false;
            }
        }
        all
    }

    /// Reports the grants whose answers have reached their workers.
    async fn report_delivered(&self, shard: &Shard) -> Result<()> {
        loop {
            let grants = shard.cache.take_delivered();
            if grants.is_empty() {
                return Ok(());
            }
            let reported = self.call(&scripts::DELIVERED, &shard.id, grants.len(), |call| {
                call.arg(&grants);
            });
            match reported.await {
                Ok(_) => {}
                // The shard is gone, and its leases with it.
                Err(Error::NoGeneration) => return Ok(()),
                Err(error) => {
                    shard.cache.put_back_delivered(grants);
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{LeaseToken, QueueName, TaskId, WorkerName},
        queue::RejectMode,
    };

    #[test]
    fn a_shard_that_hangs_holds_up_its_own_leases_only() {
        let shard = |number| ShardId {
            queue: QueueName::new("q").unwrap(),
            number,
        };
        let leases = |count: usize| -> Vec<Rejection> {
            let token = LeaseToken {
                shard: shard(0),
                generation: 1,
                grant: 1,
                attempt: 1,
                trace: None,
                leased_unix_ms: 0,
            };
            let lease = Rejection {
                id: TaskId::new(),
                token,
                worker: WorkerName::new("w").unwrap(),
                mode: RejectMode::Release,
                reason: String::new(),
                limit: Default::default(),
            };
            vec![lease; count]
        };
        let mut releases = Releases::default();
        let count = |leases: Option<Vec<Rejection>>| leases.map(|leases| leases.len());
        assert_eq!(count(releases.begin(&shard(0), leases(2))), Some(2));
        for _ in 0..3 {
            assert_eq!(
                count(releases.begin(&shard(0), leases(400))),
                None,
                "its call hangs"
            );
            assert_eq!(
                count(releases.begin(&shard(1), leases(1))),
                Some(1),
                "another shard goes on"
            );
            assert_eq!(count(releases.next(&shard(1))), None);
        }
        let calls: Vec<_> = std::iter::from_fn(|| count(releases.next(&shard(0)))).collect();
        assert_eq!(
            calls,
            [1000, 200],
            "then they go together, as many as a call takes"
        );
        assert_eq!(count(releases.begin(&shard(0), leases(1))), Some(1));
    }
}
