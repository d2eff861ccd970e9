//! The forwarder: moves reports from the shards' outboxes to the bus.
//!
//! Crash window: if the process is killed between publish and removal, a report is on the bus
//! twice. SQL credits it once. A few reports are removed only by the next read, up to 20 ms later.

mod groups;
mod records;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt, future::join_all};
use parking_lot::Mutex;
use tokio::sync::Notify;

use self::{
    groups::{Due, Group, READ_BYTES, TOGETHER, groups},
    records::{Packed, Records},
};
use crate::{
    bus::{self, Bus, Log, Topic},
    config::Settings,
    model::ShardId,
    pipelines::publishing::Reporting,
    queue::{self, FailedRound, Failing, LookFor, OutboxEntry, Upkeep},
    runtime::{Loop, LoopError, Supervisor, tick},
    telemetry::metrics,
};

/// About how many entries to read from a shard in one turn.
const ENTRIES: usize = 1000;
/// The most turns at the same time.
const AT_ONCE: usize = 8;
/// Fewer entries and bytes than these are left to the next read to remove. With more, claims may
/// have paused until they are removed.
const FEW_ENTRIES: usize = 100;
const FEW_BYTES: usize = 64 << 10;
/// How often the forwarder checks for the entries of a process that died.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often the forwarder extends its ownership of an outbox while it publishes.
const KEEP_EVERY: Duration = Duration::from_secs(1);

/// The shards to whose outboxes this process has added something.
#[derive(Default)]
pub(super) struct Reported {
    shards: Mutex<Due>,
    notify: Notify,
}

impl Reported {
    pub(super) fn add(&self, shards: impl IntoIterator<Item = (ShardId, usize)>) {
        let mut due = self.shards.lock();
        for (shard, bytes) in shards {
            let sum = due.entry(shard).or_default();
            *sum = sum.saturating_add(bytes);
        }
        self.notify.notify_one();
    }

    fn take(&self) -> Due {
        std::mem::take(&mut *self.shards.lock())
    }
}

/// The entries of a shard's outbox.
struct Read {
    shard: ShardId,
    entries: Vec<OutboxEntry>,
}

/// Why reports stay in their outbox.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The shard is at fault.
    #[error(transparent)]
    Queue(#[from] queue::Error),
    #[error("cannot forward reports of {0}: {1}")]
    Bus(ShardId, #[source] bus::Error),
    /// The partition that it shares with another shard of its turn accepts nothing now.
    #[error("reports of {0}, which has its turn with it, cannot be forwarded")]
    Beside(ShardId),
    /// No shard's turn succeeded.
    #[error("cannot {step} {shard}: {cause}")]
    AllShards {
        step: &'static str,
        shard: ShardId,
        #[source]
        cause: Box<Error>,
    },
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        matches!(self, Self::Bus(_, error) if error.ends_round())
    }
}

impl From<FailedRound<Error>> for Error {
    fn from(FailedRound { step, shard, cause }: FailedRound<Error>) -> Self {
        Self::AllShards {
            step,
            shard,
            cause: Box::new(cause),
        }
    }
}

pub(super) fn start(
    queue: Upkeep,
    bus: Arc<dyn Bus>,
    reported: Arc<Reported>,
    settings: &Settings,
    supervisor: &Supervisor,
) {
    // If this process also tends leases, the snapshots of that are recent enough.
    let max_age = 2 * LOOK_EVERY;
    let look_for = LookFor {
        max_age,
        grace: settings.watchdog.grace,
        horizon: settings.watchdog.horizon,
    };
    let expirations = Arc::new(Reporting::new(Log::EXPIRATIONS));
    let forwarder = Forwarder {
        queue,
        bus,
        expirations,
        reported,
        look_for,
        published: Arc::default(),
    };
    supervisor.spawn_loop("tasks/forward", forwarder, Forwarder::run);
}

#[derive(Clone)]
struct Forwarder {
    queue: Upkeep,
    bus: Arc<dyn Bus>,
    expirations: Arc<Reporting>,
    reported: Arc<Reported>,
    look_for: LookFor,
    /// The entries that are on the bus and still in their outboxes. Their contents are dropped.
    published: Arc<Mutex<BTreeMap<ShardId, Vec<OutboxEntry>>>>,
}

impl Forwarder {
    /// Forwards in rounds. A round gives one turn to every shard that has something, so no busy
    /// shard holds up others. Many shards with a few reports share a turn.
    ///
    /// Rounds are a tick apart as long as each forwards everything. So reports that come one by one
    /// share a record of the bus, a transaction and their fsyncs.
    async fn run(self, cx: Loop) -> Result<(), Error> {
        let mut due = Due::new();
        let mut looked = None::<Instant>;
        let mut failing = Failing::default();
        loop {
            let stopping = cx.stop.is_cancelled();
            for (shard, bytes) in self.reported.take() {
                due.entry(shard).or_insert(bytes);
            }
            for shard in self.published.lock().keys() {
                due.entry(shard.clone()).or_insert(0);
            }
            if stopping || looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
                looked = Some(Instant::now());
                for shard in self.look(stopping).await {
                    due.entry(shard).or_insert(READ_BYTES);
                }
            }
            due = self.round(due, &mut failing, &cx).await?;
            cx.beat();
            if !due.is_empty() {
                continue;
            }
            if stopping {
                return Ok(());
            }
            let is_behind = !self.published.lock().is_empty();
            let reported = async {
                if !is_behind {
                    self.reported.notify.notified().await;
                }
                tick().await;
            };
            tokio::select! {
                () = reported => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
                // The next round forwards the reports that came before the stop.
                () = cx.stop.cancelled() => {}
            }
        }
    }

    /// Returns the shards that have something in their outbox, whichever process put it there. The
    /// last time, asks Redis and accepts no older snapshot.
    async fn look(&self, is_last: bool) -> impl Iterator<Item = ShardId> {
        let max_age = if is_last {
            Duration::ZERO
        } else {
            self.look_for.max_age
        };
        let looks = self
            .queue
            .look(LookFor {
                max_age,
                ..self.look_for
            })
            .await
            .into_iter();
        // A shard that does not answer may have something.
        let due = looks.filter(|(_, look)| look.as_ref().map_or(true, |look| look.outbox > 0));
        due.map(|(shard, _)| shard)
    }

    /// Gives each shard one turn. Returns the shards that have more.
    async fn round(
        &self,
        mut due: Due,
        failing: &mut Failing<Error>,
        cx: &Loop,
    ) -> Result<Due, Error> {
        due.retain(|shard, _| !failing.leaves_out(shard));
        let partitions = self.bus.partitions(Topic::TaskResults);
        // In a cluster, a node that does not answer must not hold up the shards of other nodes.
        let most = if self.queue.is_cluster() { 1 } else { TOGETHER };
        let turns = groups(due, partitions, most)
            .into_iter()
            .map(|group| self.turn(group, cx));
        let mut turns = futures::stream::iter(turns).buffer_unordered(AT_ONCE);
        let mut more = Due::new();
        while let Some((began, outcomes)) = turns.next().await {
            cx.beat();
            for (shard, left) in outcomes {
                match left {
                    Ok(has_more) => {
                        failing.note(&shard, began, Ok(()));
                        if has_more {
                            more.insert(shard, READ_BYTES);
                        }
                    }
                    // Redis lost the shard: the watchdog brings it back.
                    Err(Error::Queue(queue::Error::NoGeneration)) => {}
                    // Nothing can be forwarded over this bus any more.
                    Err(error) if error.ends_round() => return Err(error),
                    // The report stays until the topic's limit is raised. Each retry publishes the
                    // reports before it again.
                    Err(error @ Error::Bus(_, bus::Error::TooLarge { .. })) => {
                        failing.needs_help(&shard, error)
                    }
                    // A shard that is damaged, or whose partition accepts nothing, must not hold up
                    // the others.
                    Err(error) => _ = failing.note::<()>(&shard, began, Err(error)),
                }
            }
        }
        failing.end_round("forward reports of")?;
        Ok(more)
    }

    /// Forwards some reports of each shard. Returns when the turn began, and for each shard whether
    /// it has more.
    async fn turn(
        &self,
        Group { partition, shards }: Group,
        cx: &Loop,
    ) -> (Instant, Vec<(ShardId, Result<bool, Error>)>) {
        let started = Instant::now();
        let published = |shard: ShardId| {
            let published = self.published.lock().remove(&shard).unwrap_or_default();
            (shard, published)
        };
        let asked: Vec<_> = shards.into_iter().map(published).collect();
        let found = match &asked[..] {
            [(shard, published)] => {
                let found = self
                    .queue
                    .outbox_behind(shard, published, ENTRIES, READ_BYTES)
                    .await;
                vec![found.map(Some)]
            }
            several => {
                self.queue
                    .outboxes_behind(several, ENTRIES, READ_BYTES / several.len())
                    .await
            }
        };
        let mut outcomes = Vec::with_capacity(asked.len());
        let mut reads = Vec::new();
        for ((shard, published), found) in asked.into_iter().zip(found) {
            match found {
                // The shard has too much for a shared turn: its next turn is its own.
                Ok(None) => outcomes.push((shard, Ok(true))),
                Ok(Some(entries)) if entries.is_empty() => outcomes.push((shard, Ok(false))),
                Ok(Some(entries)) => reads.push(Read { shard, entries }),
                Err(error) => {
                    if !published.is_empty() && !matches!(error, queue::Error::NoGeneration) {
                        self.published.lock().insert(shard.clone(), published);
                    }
                    outcomes.push((shard, Err(error.into())));
                }
            }
        }
        let keep = async {
            loop {
                tokio::time::sleep(KEEP_EVERY).await;
                let kept =
                    join_all(reads.iter().map(|read| self.queue.keep_outbox(&read.shard))).await;
                // If this fails, another process may publish the same entries, which then count
                // once.
                kept.into_iter()
                    .filter_map(Result::err)
                    .for_each(|e| tracing::debug!("could not keep an outbox: {e}"));
            }
        };
        let publish = self.publish_reads(&reads, partition, started, cx);
        let published = tokio::select! {
            published = publish => published,
            () = keep => unreachable!("it has no end"),
        };
        let conclude = reads
            .into_iter()
            .zip(published)
            .map(|(read, published)| async {
                match published {
                    Ok(()) => self.conclude(read, cx).await,
                    Err(error) => (read.shard, Err(error)),
                }
            });
        outcomes.extend(join_all(conclude).await);
        (started, outcomes)
    }

    /// Publishes what was read, however long the bus takes. Returns an outcome for each shard.
    async fn publish_reads(
        &self,
        reads: &[Read],
        partition: u32,
        started: Instant,
        cx: &Loop,
    ) -> Vec<Result<(), Error>> {
        match self
            .publish(reads, partition, Packed::Densely, started)
            .await
        {
            Ok(()) => return reads.iter().map(|_| Ok(())).collect(),
            // They may fit into smaller records.
            Err(bus::Error::TooLarge { .. }) => {}
            Err(error) => return refused(reads, error),
        }
        let mut published = Vec::with_capacity(reads.len());
        for (place, read) in reads.iter().enumerate() {
            match self
                .publish(
                    std::slice::from_ref(read),
                    partition,
                    Packed::Loosely,
                    started,
                )
                .await
            {
                Ok(()) => published.push(Ok(())),
                Err(error @ bus::Error::TooLarge { .. }) => {
                    published.push(Err(Error::Bus(read.shard.clone(), error)))
                }
                Err(error) => {
                    published.extend(refused(&reads[place..], error));
                    break;
                }
            }
            cx.beat();
        }
        published
    }

    /// Removes what is on the bus from the outbox, or leaves that to the next read. Returns whether
    /// the outbox has more.
    async fn conclude(
        &self,
        Read { shard, mut entries }: Read,
        cx: &Loop,
    ) -> (ShardId, Result<bool, Error>) {
        let are_few = entries.len() < FEW_ENTRIES
            && entries.iter().map(|entry| entry.bytes).sum::<usize>() < FEW_BYTES;
        if are_few && !cx.stop.is_cancelled() {
            entries
                .iter_mut()
                .for_each(|entry| (entry.events, entry.failures) = Default::default());
            self.published.lock().insert(shard.clone(), entries);
            return (shard, Ok(false));
        }
        let left = self.queue.forwarded(&shard, &entries).await;
        (shard, left.map(|left| left > 0).map_err(Error::from))
    }

    /// Publishes the reports of these shards.
    async fn publish(
        &self,
        reads: &[Read],
        partition: u32,
        packed: Packed,
        started: Instant,
    ) -> bus::Result<()> {
        let of = match reads {
            [] => return Ok(()),
            [alone] => Some(&alone.shard),
            _ => None,
        };
        let mut records = Records::new(of, partition, packed, self.queue.history().is_on());
        let mut count = 0;
        for Read { shard, entries } in reads {
            for entry in entries {
                count += entry
                    .events
                    .iter()
                    .map(|event| records.add(shard, event, entry.at_unix_ms))
                    .sum::<usize>();
                entry
                    .failures
                    .iter()
                    .for_each(|failure| records.failure(failure, entry.at_unix_ms));
            }
        }
        let (results, expirations) = records.finish();
        // A client of the bus may put several records into one request, which the topic may refuse
        // as too large.
        let together = |count: usize| match packed {
            Packed::Densely => count.max(1),
            Packed::Loosely => 1,
        };
        for some in results.chunks(together(results.len())) {
            self.bus.publish(Topic::TaskResults, some).await?;
        }
        // These come last: they may be refused for a long time, and each retry would publish the
        // task results again.
        let report = async {
            let logs = self.bus.logs();
            for some in expirations.chunks(together(expirations.len())) {
                logs.append(&Log::EXPIRATIONS, some).await?;
            }
            Ok(())
        };
        self.expirations.publish(expirations.len(), report).await?;
        metrics::results_forwarded(count, started.elapsed());
        Ok(())
    }
}

/// The outcomes of shards whose partition accepts nothing now. The first one carries the cause.
fn refused(reads: &[Read], error: bus::Error) -> Vec<Result<(), Error>> {
    let Some((first, others)) = reads.split_first() else {
        return Vec::new();
    };
    let beside = others
        .iter()
        .map(|_| Err(Error::Beside(first.shard.clone())));
    std::iter::once(Err(Error::Bus(first.shard.clone(), error)))
        .chain(beside)
        .collect()
}
