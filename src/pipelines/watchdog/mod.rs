//! Watchdog: what ran out of time, stayed behind or got lost is found and put back.
//!
//! - leases and delays: each shard, when its next one is due, at the latest every `interval`;
//! - the outbox: rows that were stored and not published (`republish_after`), what was scheduled, what was parked and has room now;
//! - finals: records that SQL shows final and that are older than `grace` are forgotten; so are those whose report is lost (`unreported`);
//! - shards that Redis lost: a new generation, and all that SQL knows as unfinished goes out again;
//! - what finished longer ago than `retention` is removed from SQL;
//! - shards that had nothing for `forget_queues_after` are closed;
//! - tasks that SQL has and Redis does not: a page of SQL is compared with Redis every `reconcile_every`;
//! - the bus: what was read and is old is deleted, once a minute.
//!
//! Of many processes one at a time does this.

mod closing;
mod depths;
mod finals;
mod lead;
mod leases;
mod outbox;
mod reconcile;
mod retention;
mod unreported;

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::lead::Lead;
use crate::{
    bus::{Keep, Topic},
    config::Settings,
    coordination::Coordination,
    dedup::Filter,
    pipelines::outbox::Outbox,
    queue::{self, Queue},
    runtime::{Beat, Supervisor},
    telemetry::metrics,
};

#[derive(Clone)]
struct Watchdog {
    outbox: Outbox,
    filter: Filter,
    queue: Queue,
    settings: Arc<Settings>,
    lead: Lead,
    stop: CancellationToken,
    /// Held while a shard is closed or brought back: between the two steps of a closing it looks lost.
    shards: Arc<tokio::sync::Mutex<()>>,
}

pub fn start(
    outbox: Outbox,
    filter: Filter,
    queue: Queue,
    coordination: Coordination,
    settings: &Arc<Settings>,
    supervisor: &Supervisor,
) {
    let (lead, stop) = (Lead::start(coordination, settings.stall_after, supervisor), supervisor.stop_token());
    let settings_of = Arc::clone(settings);
    let watchdog = Watchdog { outbox, filter, queue, settings: settings_of, lead, stop, shards: Arc::default() };
    let spawn = |name: &'static str| (watchdog.clone(), Arc::new(supervisor.progress().register(name)));
    let (dog, beat) = spawn("watchdog/leases");
    supervisor.spawn("watchdog/leases", move || dog.clone().leases(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/outbox");
    supervisor.spawn("watchdog/outbox", move || dog.clone().publish_outbox(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/finals");
    supervisor.spawn("watchdog/finals", move || dog.clone().finals(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/reconcile");
    supervisor.spawn("watchdog/reconcile", move || dog.clone().reconcile(Arc::clone(&beat)));
    if !settings.watchdog.retention.is_zero() {
        let (dog, beat) = spawn("watchdog/retention");
        supervisor.spawn("watchdog/retention", move || dog.clone().remove_finished(Arc::clone(&beat)));
    }
    if !settings.watchdog.forget_queues_after.is_zero() {
        let (dog, beat) = spawn("watchdog/closing");
        supervisor.spawn("watchdog/closing", move || dog.clone().close_idle(Arc::clone(&beat)));
    }
    let (dog, beat) = spawn("watchdog/depths");
    supervisor.spawn("watchdog/depths", move || dog.clone().depths(Arc::clone(&beat)));
    let (dog, beat) = spawn("watchdog/trim");
    supervisor.spawn("watchdog/trim", move || dog.clone().trim(Arc::clone(&beat)));
}

/// How often the topics are trimmed.
const TRIM_EVERY: Duration = Duration::from_secs(60);

impl Watchdog {
    /// Waits; false at the stop.
    async fn pause(&self, duration: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(duration) => true,
            () = self.stop.cancelled() => false,
        }
    }

    // --- what was read

    async fn trim(self, beat: Arc<Beat>) -> anyhow::Result<()> {
        let keep = Keep { age: self.settings.topic_retention, records: self.settings.topic_retention_records };
        while self.lead.wait(&beat, &self.stop).await {
            let started = Instant::now();
            for topic in Topic::ALL {
                let trimmed = self.outbox.bus.trim(topic, keep).await?;
                if trimmed > 0 {
                    tracing::debug!(%topic, "deleted {trimmed} old records of {topic}");
                }
            }
            metrics::watchdog_step("trim", started.elapsed());
            beat.idle(self.pause(TRIM_EVERY)).await;
        }
        Ok(())
    }
}

fn is_lost(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(queue::Error::NoGeneration))
}

fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
