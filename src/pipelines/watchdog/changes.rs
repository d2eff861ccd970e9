//! Changes of live work that somebody wanted and did not carry out: the process was killed, or a server was away.

use std::time::{Duration, Instant};

use super::{context::Context, error::Error, lead::Lead};
use crate::{
    model::ChangeKind,
    pipelines::changing::Changing,
    runtime::{Clock, Loop},
    store::KeptPages,
    telemetry::metrics::{self, Watched},
};

/// How often the watchdog looks for wishes.
const EVERY: Duration = Duration::from_secs(1);
/// The age at which the process that stored a wish is taken for dead. Two processes that carry it out do no harm.
const STAYED_MS: i64 = 2000;
/// The wishes of one page.
const PAGE: u32 = 500;

#[derive(Clone)]
pub(super) struct Changes {
    changing: Changing,
    clock: Clock,
    lead: Lead,
}

impl Changes {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        Self { changing: context.changing(), clock: context.clock.clone(), lead: lead.clone() }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            for kind in ChangeKind::ALL {
                self.carry_out(kind, &cx).await?;
            }
            metrics::watchdog_step("changes", started.elapsed());
            if !cx.idle(cx.pause(EVERY)).await {
                break;
            }
        }
        Ok(())
    }

    async fn carry_out(&self, kind: ChangeKind, cx: &Loop) -> Result<(), Error> {
        let mut pages = KeptPages { kind, upto_unix_ms: i64::MAX, after: None, limit: PAGE };
        loop {
            let page = self.changing.kept(&pages).await?;
            let now = self.clock.now_unix_ms();
            // A wish of the future was stored before the clock stepped back.
            let mut due = page.changes;
            due.retain(|wish| !(now - STAYED_MS..=now).contains(&wish.at_unix_ms));
            if !due.is_empty() {
                let done = self.changing.carry_out(due).await;
                metrics::watchdog_handled(Watched::Changed, done.changed.len());
                if let Some(error) = done.error.filter(|error| !error.is_without_generation()) {
                    return Err(error.into());
                }
            }
            cx.beat();
            pages.after = page.next;
            if pages.after.is_none() {
                return Ok(());
            }
        }
    }
}
