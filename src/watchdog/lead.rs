//! One watchdog at a time does the periodic work: under a lease in Redis, which others get when its holder has died.
//!
//! The lease saves work, and does not have to be right. A holder that was stopped for a while may end a step that it had begun beside the
//! next one; what keeps both from doing harm is in the data: a task's turn in the outbox, a shard's generation, a lease's grant.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    queue::Queue,
    supervise::{Beat, Supervisor},
    telemetry::metrics,
};

/// When a holder that says nothing any more has lost it.
const LEASE: Duration = Duration::from_secs(4);
const RENEW: Duration = Duration::from_secs(1);

/// Whether this process leads. Clones share it.
#[derive(Clone)]
pub(super) struct Lead {
    /// By this machine's clock, from before the question was sent: so it ends here before it ends in Redis.
    until: Arc<watch::Sender<Option<Instant>>>,
}

impl Lead {
    /// Keeps asking for it until the stop, and gives it back then.
    pub(super) fn start(queue: Queue, supervisor: &Supervisor) -> Self {
        let lead = Self { until: Arc::new(watch::Sender::new(None)) };
        let (beat, stop) = (Arc::new(supervisor.progress().register("watchdog/lead")), supervisor.stop_token());
        let until = Arc::clone(&lead.until);
        supervisor
            .spawn("watchdog/lead", move || keep(queue.clone(), Arc::clone(&until), Arc::clone(&beat), stop.clone()));
        lead
    }

    /// Waits until this process leads; false at the stop.
    pub(super) async fn wait(&self, beat: &Beat, stop: &CancellationToken) -> bool {
        let mut until = self.until.subscribe();
        loop {
            if until.borrow_and_update().is_some_and(|until| Instant::now() < until) {
                return true;
            }
            tokio::select! {
                changed = beat.idle(until.changed()) => if changed.is_err() { return false },
                () = stop.cancelled() => return false,
            }
        }
    }
}

async fn keep(
    queue: Queue,
    until: Arc<watch::Sender<Option<Instant>>>,
    beat: Arc<Beat>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    loop {
        let asked = Instant::now();
        let leads = queue.lease("watchdog", LEASE).await?;
        if leads != until.borrow().is_some() {
            tracing::debug!("this process {} the watchdog's work", if leads { "does" } else { "leaves" });
        }
        metrics::watchdog_leads(leads);
        until.send_replace(leads.then(|| asked + LEASE));
        beat.beat();
        if stop.run_until_cancelled(tokio::time::sleep(RENEW)).await.is_none() {
            until.send_replace(None);
            queue.lease("watchdog", Duration::ZERO).await?;
            return Ok(());
        }
    }
}
