//! Publishes rows from SQL to the bus: batches and rows that nobody published, due scheduled rows,
//! and parked rows.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;

use super::{error::Error, lead::Lead, parked::Parked, republish::Republish, shared::Forgets};
use crate::{
    bus::{self, Bus, Topic},
    config::Settings,
    model::{TaskId, TaskRow, millis},
    pipelines::{admission::Gates, context::Context, publishing},
    queue::Failing,
    runtime::{Clock, Loop},
    store::{self, PAGE_BYTES, Turn, Unpublished},
    telemetry::metrics::{self, Republished},
};

/// How many rows are read together after the clock has jumped. Most are scheduled, and stay as they
/// are.
const LOOKED_AT_ONCE: usize = 10_000;
/// How often to retry refused rows, and to read which queues other processes have parked.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long to put off the rows of a partition that accepts nothing while others do.
const AWAY_FOR: Duration = Duration::from_secs(30);
/// The pause of a loop that has nothing to do.
const IDLE: Duration = Duration::from_millis(200);

#[derive(Clone)]
pub(super) struct Outbox {
    store: Arc<dyn store::Outbox>,
    bus: Arc<dyn Bus>,
    gates: Gates,
    clock: Clock,
    settings: Arc<Settings>,
    republish: Republish,
    parked: Parked,
    lead: Lead,
}

/// The state of the loop.
struct Rounds {
    looked: Instant,
    /// Rows that SQL refuses to mark. They are left out until they are retried, so that the log
    /// names each only every few seconds.
    refused: HashSet<TaskId>,
    failing: Failing<Error>,
    /// Partitions of the bus that accepted nothing, and since when.
    away: BTreeMap<u32, Instant>,
    /// The number of clock jumps when rows were last brought forward. `None` at first, because an
    /// earlier process may have missed a jump.
    steps: Option<u64>,
}

impl Outbox {
    pub(super) fn new(context: &Context, lead: &Lead, forgets: &Forgets) -> Self {
        let Context {
            store,
            bus,
            gates,
            clock,
            settings,
            ..
        } = context.clone();
        let republish = Republish::new(context);
        let parked = Parked::new(context, forgets);
        Self {
            store,
            bus,
            gates,
            clock,
            settings,
            republish,
            parked,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(mut self, cx: Loop) -> Result<(), Error> {
        self.parked.close_gates().await?;
        let refused = HashSet::new();
        let failing = Failing::default();
        let away = BTreeMap::new();
        let mut rounds = Rounds {
            looked: self.clock.now(),
            refused,
            failing,
            away,
            steps: None,
        };
        while self.lead.wait(&cx).await {
            if self.gates.is_short() {
                // The fanout would park every task again.
                cx.beat();
                cx.pause(IDLE).await;
                continue;
            }
            let started = Instant::now();
            let has_more = self.round(&mut rounds, &cx).await?;
            metrics::watchdog_step("outbox", started.elapsed());
            cx.beat();
            let wait = match (has_more, self.parked.are_on_their_way()) {
                (true, _) => Duration::from_millis(1),
                (false, true) => Duration::from_millis(20),
                (false, false) => IDLE,
            };
            cx.pause(wait).await;
        }
        Ok(())
    }

    /// Publishes a page of due rows, and releases parked rows. Returns whether there may be more of
    /// either.
    async fn round(&mut self, rounds: &mut Rounds, cx: &Loop) -> Result<bool, Error> {
        let steps = Some(self.clock.steps());
        if rounds.steps != steps {
            self.bring_forward(cx).await?;
            rounds.steps = steps;
        }
        let is_full = self.publish_due(rounds, cx).await?;
        let has_more = self
            .parked
            .release(&mut rounds.refused, &mut rounds.failing, cx)
            .await?;
        if self.clock.now() - rounds.looked > LOOK_EVERY {
            rounds.looked = self.clock.now();
            rounds.refused.clear();
            self.parked.close_gates().await?;
        }
        Ok(is_full || has_more)
    }

    /// Publishes a page of due rows. Returns whether it was full.
    async fn publish_due(&self, rounds: &mut Rounds, cx: &Loop) -> Result<bool, Error> {
        let limit = self.settings.watchdog.batch_max;
        let mut due = self
            .store
            .due(self.clock.now_unix_ms(), limit, &rounds.refused)
            .await?;
        let is_full = due.len() == limit
            || due.iter().map(|row| row.task.weight()).sum::<usize>() >= PAGE_BYTES;
        rounds.away.retain(|_, since| since.elapsed() < AWAY_FOR);
        let away = due.extract_if(.., |row| rounds.away.contains_key(&row.task.partition));
        self.put_off(away.map(|row| row.task.id).collect()).await?;
        let mut by_reason: BTreeMap<Unpublished, Vec<(&TaskRow, Turn)>> = BTreeMap::new();
        for row in &due {
            // A scheduled task that was sent again was in the queue before, so the fanout must ask
            // SQL about it.
            let reason = match row.unpublished {
                Unpublished::Scheduled if !row.is_as_new => Unpublished::Missing,
                reason => reason,
            };
            by_reason
                .entry(reason)
                .or_default()
                .push((&row.task, row.turn));
        }
        for (reason, rows) in by_reason {
            match self
                .republish
                .publish(&rows, republished(reason), &mut rounds.refused)
                .await
            {
                Err(Error::Publish(publishing::Error::Bus(error))) if error.is_transient() => {
                    cx.beat();
                    self.publish_apart(&rows, republished(reason), error, rounds)
                        .await?;
                }
                published => _ = published?,
            }
        }
        Ok(is_full)
    }

    /// Publishes the rows of each partition separately, and puts off those of partitions that
    /// accept nothing. Returns an error if no partition accepts anything: then the bus is away.
    async fn publish_apart(
        &self,
        rows: &[(&TaskRow, Turn)],
        why: Republished,
        error: bus::Error,
        rounds: &mut Rounds,
    ) -> Result<(), Error> {
        let mut partitions: BTreeMap<u32, Vec<(&TaskRow, Turn)>> = BTreeMap::new();
        for (row, turn) in rows {
            partitions
                .entry(row.partition)
                .or_default()
                .push((*row, *turn));
        }
        let mut away = Vec::new();
        if partitions.len() == 1 {
            // This partition has just been tried.
            away.extend(partitions.keys());
        } else {
            let publish = partitions.iter().map(|(partition, rows)| async move {
                let mut refused = HashSet::new();
                let published = self.republish.publish(rows, why, &mut refused).await;
                (*partition, refused, published)
            });
            for (partition, refused, published) in join_all(publish).await {
                rounds.refused.extend(refused);
                match published {
                    Err(Error::Publish(publishing::Error::Bus(error))) if error.is_transient() => {
                        away.push(partition)
                    }
                    published => _ = published?,
                }
            }
        }
        if away.is_empty() {
            return Ok(());
        }
        if away.len() == partitions.len()
            && (away.len() > 1 || self.bus.partitions(Topic::Pipeline) == 1)
        {
            return Err(publishing::Error::Bus(error).into());
        }
        tracing::warn!(
            "partitions {away:?} of the bus take nothing, and their tasks wait for {AWAY_FOR:?}: {error}"
        );
        let rows = rows.iter().filter(|(row, _)| away.contains(&row.partition));
        self.put_off(rows.map(|(row, _)| row.id).collect()).await?;
        rounds.away.extend(
            away.into_iter()
                .map(|partition| (partition, Instant::now())),
        );
        Ok(())
    }

    async fn put_off(&self, ids: Vec<TaskId>) -> Result<(), Error> {
        let until = self.clock.now_unix_ms().saturating_add(millis(AWAY_FOR));
        if ids.is_empty() {
            Ok(())
        } else {
            Ok(self.store.put_off(&ids, until).await?)
        }
    }

    /// Makes fresh rows that are due much later due now: they were stored while the clock was
    /// ahead.
    async fn bring_forward(&self, cx: &Loop) -> Result<(), Error> {
        let now = self.clock.now_unix_ms();
        // Twice the time, because rows that are stored in the meantime are due a little later than
        // the others.
        let twice = 2 * self.settings.watchdog.republish_after;
        let soon = now.saturating_add(millis(twice));
        let mut after = None;
        let mut rows = 0;
        loop {
            let page = self
                .store
                .bring_forward(soon, now, after, LOOKED_AT_ONCE)
                .await?;
            after = page.next;
            rows += page.rows;
            cx.beat();
            if after.is_none() || cx.stop.is_cancelled() {
                break;
            }
        }
        if rows > 0 {
            tracing::info!(
                "{rows} tasks were due at a time that the clock has stepped back from: they are due now"
            );
        }
        Ok(())
    }
}

fn republished(reason: Unpublished) -> Republished {
    match reason {
        Unpublished::Fresh => Republished::Unpublished,
        Unpublished::Parked => Republished::Unparked,
        // A row that waits behind others is never due.
        Unpublished::Behind | Unpublished::Missing => Republished::Missing,
        Unpublished::Crowded => Republished::Refilled,
        Unpublished::Scheduled => Republished::Scheduled,
    }
}
