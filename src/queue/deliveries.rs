//! Leases on their way to their workers: those that arrived are reported, the others are released.

use std::{future::Future, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
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

/// How long deliveries gather before the next tick reports them, where no claim takes them along.
const DELIVERIES_GATHER: Duration = Duration::from_millis(30);

/// How long after an error they are reported again.
const DELIVERIES_AGAIN: Duration = Duration::from_secs(1);

impl WorkerQueue {
    /// Releases what could not be delivered and reports what was; at the stop, what is left when nobody claims any more
    /// (`claims_end`). Runs once.
    pub async fn settle_deliveries(&self, beat: &Beat, stop: &CancellationToken, claims_end: impl Future<Output = ()>) {
        let Some(mut released) = self.released() else { return };
        loop {
            tokio::select! {
                Some((shard, items)) = beat.idle(released.recv()) => self.release(&shard, &items).await,
                () = self.delivered().notified() => {
                    let gathered = tick_after(Instant::now() + DELIVERIES_GATHER);
                    stop.run_until_cancelled(tokio::time::sleep_until(gathered)).await;
                    if !self.report_deliveries().await {
                        stop.run_until_cancelled(tokio::time::sleep(DELIVERIES_AGAIN)).await;
                    }
                    beat.beat();
                }
                () = stop.cancelled() => break,
            }
        }
        claims_end.await;
        // A claim goes on without its caller, and leases for nobody.
        self.drained().await;
        while let Ok((shard, items)) = released.try_recv() {
            self.release(&shard, &items).await;
        }
        self.report_deliveries().await;
    }

    async fn release(&self, shard: &ShardId, items: &[Rejection]) {
        // At an error the leases run out by themselves: later, and at no cost.
        if let Err(error) = self.reject(shard, items, &[Duration::ZERO]).await {
            tracing::warn!(%shard, "could not give back {} undelivered leases of {shard}: {error}", items.len());
        }
    }

    /// Reports the deliveries that no claim has taken along; whether all are reported.
    pub async fn report_deliveries(&self) -> bool {
        let mut all = true;
        for shard in self.all() {
            if let Err(error) = self.report_delivered(&shard).await {
                // A lease of theirs that runs out costs nothing.
                tracing::debug!(shard = %shard.id, "could not report deliveries of {}: {error}", shard.id);
                all = false;
            }
        }
        all
    }

    /// Reports the grants whose answers have reached their workers.
    async fn report_delivered(&self, shard: &Shard) -> Result<()> {
        loop {
            let grants = shard.notes.take_delivered();
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
                    shard.notes.put_back_delivered(grants);
                    return Err(error);
                }
            }
        }
    }
}
