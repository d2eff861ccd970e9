//! One watchdog at a time does the periodic work: under a lease in Redis, which others get when its holder has died.
//!
//! The lease saves work, and does not have to be right. A holder that was stopped for a while may end a step that it had begun beside the
//! next one; what keeps both from doing harm is in the data: a task's turn in the outbox, a shard's generation, a lease's grant.
//!
//! A holder may reach Redis and not what its work needs: the database, Kafka. When a loop of its watchdog has not come round for `stall_after`
//! it stands back for a moment, in which another may take the lease.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    coordination::Coordination,
    runtime::{Beat, Progress, Supervisor},
    telemetry::metrics,
};

/// When a holder that says nothing any more has lost it.
const LEASE: Duration = Duration::from_secs(4);
const RENEW: Duration = Duration::from_secs(1);
/// How long a holder that is stalled stands back: others ask every [`RENEW`]. Where nobody else is there, nothing waits longer.
const STAND_BACK: Duration = Duration::from_secs(3);

/// Whether this process leads. Clones share it.
#[derive(Clone)]
pub(super) struct Lead {
    /// By this machine's clock, from before the question was sent: so it ends here before it ends in Redis.
    until: Arc<watch::Sender<Option<Instant>>>,
}

impl Lead {
    /// Keeps asking for it until the stop, and gives it back then.
    pub(super) fn start(coordination: Coordination, stall_after: Duration, supervisor: &Supervisor) -> Self {
        let lead = Self { until: Arc::new(watch::Sender::new(None)) };
        let (beat, stop) = (Arc::new(supervisor.progress().register("watchdog/lead")), supervisor.stop_token());
        let (until, progress) = (Arc::clone(&lead.until), supervisor.progress().clone());
        supervisor.spawn("watchdog/lead", move || {
            let stalls = Stalls { progress: progress.clone(), after: stall_after };
            keep(coordination.clone(), stalls, Arc::clone(&until), Arc::clone(&beat), stop.clone())
        });
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

/// Whether the watchdog of this process does what it should.
struct Stalls {
    progress: Progress,
    after: Duration,
}

impl Stalls {
    /// The first of its loops that has not come round for too long.
    fn first(&self) -> Option<String> {
        let mut stalled = self.progress.stalled(self.after).into_iter();
        stalled.find_map(|(name, _)| name.starts_with("watchdog/").then_some(name))
    }
}

async fn keep(
    coordination: Coordination,
    stalls: Stalls,
    until: Arc<watch::Sender<Option<Instant>>>,
    beat: Arc<Beat>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut since = Instant::now();
    loop {
        let asked = Instant::now();
        let leads = coordination.lease("watchdog", LEASE).await?;
        let led = until.borrow().is_some_and(|until| asked < until);
        if leads != led {
            tracing::debug!("this process {} the watchdog's work", if leads { "does" } else { "leaves" });
            since = asked;
        }
        metrics::watchdog_leads(leads);
        until.send_replace(leads.then(|| asked + LEASE));
        beat.beat();
        let mut pause = RENEW;
        // Who has just got it has had no time to come round.
        if leads
            && since.elapsed() > stalls.after
            && let Some(stalled) = stalls.first()
        {
            tracing::debug!("{stalled} does not come round: another process may do the watchdog's work");
            until.send_replace(None);
            coordination.release("watchdog").await?;
            metrics::watchdog_leads(false);
            pause = STAND_BACK;
        }
        if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            until.send_replace(None);
            coordination.release("watchdog").await?;
            return Ok(());
        }
    }
}
