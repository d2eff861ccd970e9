//! Carries out pending changes of live work that were left over, because the process was killed or
//! a server was away.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead};
use crate::{
    model::{Change, ChangeKind, Requeue, TaskId, Update},
    pipelines::{
        changing::{Changing, STAYED_MS},
        context::Context,
    },
    runtime::{Clock, Loop},
    store::{KeptChange, KeptPages, Turn},
    telemetry::metrics::{self, Watched},
};

/// How often the watchdog checks for pending changes.
const EVERY: Duration = Duration::from_secs(1);
/// The most pending changes of one page.
const PAGE: u32 = 500;
/// How soon to ask the queue again about a task that has not arrived there. Its change stays
/// pending for a minute, and each question costs a transaction and moves the fence of the shard.
const ABSENT_AGAIN: Duration = Duration::from_secs(10);
/// The most such changes to remember. For any others the queue is asked every second.
const MOST_ABSENT: usize = 100_000;

/// The pending changes whose tasks had not arrived in their queue, and when that was asked.
#[derive(Default)]
struct Absent(HashMap<(TaskId, Turn), Instant>);

impl Absent {
    fn forget_old(&mut self, now: Instant) {
        self.0
            .retain(|_, asked| now.saturating_duration_since(*asked) < ABSENT_AGAIN);
    }

    fn has(&self, wish: &KeptChange) -> bool {
        self.0.contains_key(&(wish.task.id, wish.turn))
    }

    fn add(&mut self, wishes: Vec<(TaskId, Turn)>, now: Instant) {
        let room = MOST_ABSENT.saturating_sub(self.0.len());
        self.0
            .extend(wishes.into_iter().take(room).map(|wish| (wish, now)));
    }
}

#[derive(Clone)]
pub(super) struct Changes {
    changing: Changing,
    clock: Clock,
    lead: Lead,
}

impl Changes {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        Self {
            changing: context.changing(),
            clock: context.clock.clone(),
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut absent = Absent::default();
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            absent.forget_old(started);
            let mut failed = Ok(());
            for kind in ChangeKind::KEPT {
                let carried_out = self.carry_out(kind, &mut absent, &cx).await;
                // If SQL does not answer, each call to it takes long to fail.
                let is_sql_away = carried_out.as_ref().is_err_and(Error::is_of_store);
                failed = failed.and(carried_out);
                if is_sql_away || cx.stop.is_cancelled() {
                    break;
                }
            }
            failed?;
            metrics::watchdog_step("changes", started.elapsed());
            if !cx.idle(cx.pause(EVERY)).await {
                break;
            }
        }
        Ok(())
    }

    /// Carries out all pending changes of a kind. A shard that does not answer does not hold up
    /// others. Returns the first error.
    async fn carry_out(
        &self,
        kind: ChangeKind,
        absent: &mut Absent,
        cx: &Loop,
    ) -> Result<(), Error> {
        let change = match kind {
            ChangeKind::Cancel => Change::Cancel,
            // SQL has the new values.
            ChangeKind::Update => Change::Update(Update::default()),
            ChangeKind::Reservation | ChangeKind::Requeue | ChangeKind::Deadline => {
                Change::Requeue(Requeue::Free)
            }
        };
        let is_timed = kind == ChangeKind::Reservation;
        let upto_unix_ms = if is_timed {
            self.clock.now_unix_ms()
        } else {
            i64::MAX
        };
        let mut pages = KeptPages {
            kind,
            upto_unix_ms,
            after: None,
            limit: PAGE,
        };
        let mut failed = Ok(());
        loop {
            let page = self.changing.kept(&pages).await?;
            let now = self.clock.now_unix_ms();
            // A change with a time in the future was stored before the clock was set back.
            let mut due = page.changes;
            due.retain(|wish| {
                is_timed || !(now - STAYED_MS..=now).contains(&wish.at_unix_ms) && !absent.has(wish)
            });
            if !due.is_empty() {
                let done = self.changing.carry_out(due, &change).await;
                metrics::watchdog_handled(Watched::Changed, done.over);
                absent.add(done.absent, Instant::now());
                if let Some(error) = done.error.filter(|error| !error.is_without_generation()) {
                    failed = failed.and(Err(error.into()));
                }
            }
            cx.beat();
            pages.after = page.next;
            let is_sql_away = failed.as_ref().is_err_and(Error::is_of_store);
            if pages.after.is_none() || is_sql_away || cx.stop.is_cancelled() {
                return failed;
            }
        }
    }
}
