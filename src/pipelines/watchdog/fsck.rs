//! fsck in the background: checks all shards in turn, in small slices, in a hundredth of the time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead};
use crate::{
    coordination::Standing,
    model::{Find, FindKind, ShardId},
    pipelines::{
        checking::{Checker, Found, Pace},
        context::Context,
    },
    queue::{Failing, Holding, Upkeep},
    runtime::Loop,
    telemetry::metrics,
};

/// The pause between two rounds.
const EVERY: Duration = Duration::from_secs(10);
/// How often SQL counts the unfinished tasks again, at most; and the pause after that, as a
/// multiple of the time that it took.
const COUNTS_EVERY: Duration = Duration::from_secs(60);
const COUNTS_SHARE: u32 = 999;
/// The same while there is something to repair.
const COUNTS_SHARE_OF_FINDS: u32 = 20;
/// The most findings of a round that are logged one by one.
const LOGGED: usize = 100;

#[derive(Clone)]
pub(super) struct Fsck {
    checker: Checker,
    queue: Upkeep,
    mends: bool,
    lead: Lead,
    standing: Arc<Standing>,
}

impl Fsck {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context {
            store,
            bus,
            queue,
            settings,
            ..
        } = context.clone();
        let checker = Checker::new(store, queue.shards, bus, Pace::BESIDE);
        Self {
            checker,
            queue: queue.upkeep,
            mends: settings.watchdog.repair,
            lead: lead.clone(),
            standing: Arc::clone(context.coordination.standing()),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut known = BTreeSet::new();
        let mut failing = Failing::default();
        // The findings of the last count.
        let mut counted = Found::default();
        let mut counts_at = cx.clock().now();
        // Let the loops that serve requests start first.
        while cx.idle(cx.pause(EVERY)).await && self.lead.wait(&cx).await {
            let mut all = Found::default();
            for shard in self.in_use(&mut failing).await? {
                // The check pauses most of the time, and a large shard takes long. It may be
                // stopped after any step.
                let began = Instant::now();
                let check = cx.idle(self.checker.shard(&shard, self.mends));
                let Some((found, ended)) = cx.stop.run_until_cancelled(check).await else {
                    return Ok(());
                };
                let ended = ended.map_err(Error::from);
                if ended.as_ref().is_err_and(Error::is_of_store) {
                    return ended;
                }
                if failing.note(&shard, began, ended).is_some() {
                    all.absorb(found);
                }
                cx.beat();
            }
            let failed: Vec<ShardId> = failing.failed().cloned().collect();
            failing.end_round("check")?;
            // The findings of a shard stay until it is checked again.
            let stay = |find: &&Find| failed.iter().any(|shard| is_in(find, shard));
            let finds = known.iter().filter(stay).cloned().collect();
            all.absorb(Found {
                finds,
                ..Found::default()
            });
            if counts_at <= cx.clock().now() {
                let began = Instant::now();
                let counts = cx.idle(self.checker.counts(None, self.mends));
                let Some(counts) = cx.stop.run_until_cancelled(counts).await else {
                    return Ok(());
                };
                match counts {
                    Ok(found) => counted = found,
                    // The count is one statement over all unfinished tasks. If the database cannot
                    // do that, the shards are checked nevertheless.
                    Err(error) => {
                        tracing::warn!("fsck: cannot count the unfinished tasks again: {error}")
                    }
                }
                let share = if counted.is_empty() {
                    COUNTS_SHARE
                } else {
                    COUNTS_SHARE_OF_FINDS
                };
                counts_at = cx.clock().now() + COUNTS_EVERY.max(began.elapsed() * share);
            }
            all.absorb(counted.clone());
            if self.mends {
                // They have been repaired, so show them only once.
                counted = Found::default();
            }
            if self.lead.is_held(&cx) {
                known = report(all, failed.len(), &known, &self.standing);
            } else {
                // Another process leads, and shows its own findings.
                known = BTreeSet::new();
                counted = Found::default();
                counts_at = cx.clock().now();
            }
            cx.beat();
        }
        Ok(())
    }

    /// The shards that are not empty.
    async fn in_use(&self, failing: &mut Failing<Error>) -> Result<Vec<ShardId>, Error> {
        let began = Instant::now();
        let shards = self.queue.shards();
        let holdings = self.queue.holdings(&shards).await?;
        let is_in_use =
            |holding: Option<Holding>| holding.is_some_and(|holding| holding != Holding::default());
        let mut in_use = Vec::new();
        for (shard, holding) in shards.into_iter().zip(holdings) {
            match holding {
                Ok(holding) if is_in_use(holding) => in_use.push(shard),
                Ok(_) => {}
                Err(error) => drop(failing.note::<()>(&shard, began, Err(error.into()))),
            }
        }
        Ok(in_use)
    }
}

fn is_in(find: &Find, shard: &ShardId) -> bool {
    find.queue == shard.queue.as_str() && find.shard == Some(shard.number)
}

/// Shows the findings of a round, and logs those that the previous round did not have. Returns
/// them.
fn report(
    found: Found,
    failed: usize,
    known: &BTreeSet<Find>,
    standing: &Standing,
) -> BTreeSet<Find> {
    let Found {
        finds,
        more,
        unchecked,
    } = found;
    let mut by_kind: BTreeMap<FindKind, u64> =
        FindKind::ALL.iter().map(|kind| (*kind, 0)).collect();
    let counts = finds.iter().map(|find| (find.kind, 1)).chain(more);
    counts.for_each(|(kind, count)| *by_kind.entry(kind).or_default() += count);
    standing.set_differences(by_kind.values().sum());
    for (kind, count) in by_kind {
        metrics::invariant_violations(kind.as_str(), count);
    }
    metrics::fsck_unchecked(unchecked, failed);
    for find in finds.difference(known).take(LOGGED) {
        let Find {
            kind,
            queue,
            shard,
            task,
            says,
            mended,
            ..
        } = find;
        let kind = kind.as_str();
        let shard = shard.map(|shard| format!(":{shard}")).unwrap_or_default();
        let task = task.map(|task| format!(" {task}")).unwrap_or_default();
        let end = if *mended {
            "mended"
        } else {
            "taskd fsck --repair mends it"
        };
        tracing::warn!(kind, "fsck: {kind} {queue}{shard}{task}: {says}; {end}");
    }
    finds
}
