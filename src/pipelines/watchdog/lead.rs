//! Leadership: one watchdog at a time does the periodic work, under a lease in Redis.
//!
//! The lease saves work; it does not have to be exact. A holder that was stopped for a while may
//! finish a step while the next holder is at work. The data keeps both from doing harm: a task's
//! turn in the outbox, a shard's generation, a lease's grant.
//!
//! A holder may reach Redis but not the database or Kafka. If one of its loops makes no progress
//! for `stall_after`, it steps back for a moment, so that another process can take the lease.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::{
    coordination::{self, Coordination},
    model::FindKind,
    runtime::{Loop, Progress, Supervisor},
    telemetry::metrics,
};

/// The work that the lease is for.
const WORK: &str = "watchdog";
/// How long a holder that has stopped renewing keeps the lease.
const LEASE: Duration = Duration::from_secs(4);
const RENEW: Duration = Duration::from_secs(1);
/// How long a stalled holder steps back. Other processes try every [`RENEW`]; if there are none,
/// nothing is delayed for longer.
const STAND_BACK: Duration = Duration::from_secs(3);

/// Whether this process leads. Clones share it.
#[derive(Clone)]
pub(super) struct Lead {
    /// When the lease ends by this process's clock, counted from before the request. So it ends
    /// here before it ends in Redis.
    until: Arc<watch::Sender<Option<Instant>>>,
}

impl Default for Lead {
    fn default() -> Self {
        Self {
            until: Arc::new(watch::Sender::new(None)),
        }
    }
}

impl Lead {
    /// Keeps requesting the lease until the stop, and then gives it back. Steps back if one of
    /// `loops` stalls.
    pub(super) fn keep(
        self,
        coordination: Coordination,
        loops: Vec<&'static str>,
        stall_after: Duration,
        supervisor: &Supervisor,
    ) {
        let stalls = Stalls {
            progress: supervisor.progress().clone(),
            loops: loops.into(),
            after: stall_after,
        };
        let candidate = Candidate {
            coordination,
            stalls,
            lead: self,
        };
        supervisor.spawn_loop("watchdog/lead", candidate, Candidate::run);
    }

    /// Waits until this process leads. Returns false at the stop, even while it leads: otherwise a
    /// loop without pauses would starve the loop that gives the lease back.
    pub(super) async fn wait(&self, cx: &Loop) -> bool {
        let mut until = self.until.subscribe();
        loop {
            if cx.stop.is_cancelled() {
                return false;
            }
            if until
                .borrow_and_update()
                .is_some_and(|until| cx.clock().now() < until)
            {
                return true;
            }
            tokio::select! {
                changed = cx.idle(until.changed()) => if changed.is_err() { return false },
                () = cx.stop.cancelled() => return false,
            }
        }
    }

    /// True if this process leads.
    pub(super) fn is_held(&self, cx: &Loop) -> bool {
        self.until
            .borrow()
            .is_some_and(|until| cx.clock().now() < until)
    }
}

/// The progress of this process's watchdog.
#[derive(Clone)]
struct Stalls {
    progress: Progress,
    loops: Arc<[&'static str]>,
    after: Duration,
}

impl Stalls {
    /// Returns the first of the loops that makes no progress.
    fn first(&self) -> Option<String> {
        let mut stalled = self.progress.stalled(self.after).into_iter();
        stalled.find_map(|(name, _)| self.loops.contains(&name.as_str()).then_some(name))
    }
}

#[derive(Clone)]
struct Candidate {
    coordination: Coordination,
    stalls: Stalls,
    lead: Lead,
}

impl Candidate {
    async fn run(self, cx: Loop) -> coordination::Result<()> {
        let until = &self.lead.until;
        let mut since = cx.clock().now();
        loop {
            let asked = cx.clock().now();
            let leads = match self.coordination.lease(WORK, LEASE).await {
                Err(error) if !self.lead.is_held(&cx) => {
                    self.tell(false);
                    forget_finds();
                    return Err(error);
                }
                asked => asked?,
            };
            let led = until.borrow().is_some_and(|until| asked < until);
            if leads != led {
                tracing::debug!(
                    "this process {} the watchdog's work",
                    if leads { "does" } else { "leaves" }
                );
                since = asked;
            }
            self.tell(leads);
            if until.send_replace(leads.then(|| asked + LEASE)).is_some() && !leads {
                forget_finds();
            }
            cx.beat();
            let mut pause = RENEW;
            // The loops of a new holder have not had time for a round yet.
            if leads
                && cx.clock().now() - since > self.stalls.after
                && let Some(stalled) = self.stalls.first()
            {
                tracing::debug!(
                    "{stalled} does not come round: another process may do the watchdog's work"
                );
                self.give_back().await?;
                pause = STAND_BACK;
            }
            if !cx.pause(pause).await {
                return self.give_back().await;
            }
        }
    }

    fn tell(&self, leads: bool) {
        metrics::watchdog_leads(leads);
        self.coordination.standing().set_leads(leads);
    }

    async fn give_back(&self) -> coordination::Result<()> {
        self.lead.until.send_replace(None);
        self.tell(false);
        forget_finds();
        self.coordination.release(WORK).await
    }
}

/// Resets the metrics of findings, because the process that leads now checks for them.
fn forget_finds() {
    FindKind::ALL
        .iter()
        .for_each(|kind| metrics::invariant_violations(kind.as_str(), 0));
    metrics::fsck_unchecked(0, 0);
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::runtime::Clock;

    #[tokio::test]
    async fn a_lead_that_nobody_renews_ends_with_its_lease() {
        let clock = Clock::of_this_machine();
        let beat = Arc::new(
            Supervisor::with_clock(clock.clone())
                .progress()
                .register("watchdog/test"),
        );
        let lead = Lead::default();
        let cx = Loop {
            beat,
            stop: CancellationToken::new(),
        };
        lead.until.send_replace(Some(clock.now() + LEASE));
        assert!(lead.wait(&cx).await);
        clock.advance(LEASE);
        let mut waits = std::pin::pin!(lead.wait(&cx));
        assert!(
            futures::poll!(&mut waits).is_pending(),
            "another process may lead by now"
        );
        lead.until.send_replace(Some(clock.now() + LEASE));
        assert!(waits.await);
        cx.stop.cancel();
        assert!(!lead.wait(&cx).await, "nothing begins behind the stop");
    }
}
