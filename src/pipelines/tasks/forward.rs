//! The forwarder: from the shards' outboxes to the bus, then removed.
//!
//! Crash window: killed between publish and removal, the bus has a report twice. SQL credits it
//! once. The removal of a few reports lags up to 20 ms: it goes with the next read.

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
    bus::{self, Bus, Topic},
    config::Settings,
    model::ShardId,
    pipelines::publishing::Reporting,
    queue::{self, FailedRound, Failing, LookFor, OutboxEntry, Upkeep},
    runtime::{Loop, LoopError, Supervisor, tick},
    telemetry::metrics,
};

/// The entries read from a shard in one turn, about.
const ENTRIES: usize = 1000;
/// The turns at once.
const AT_ONCE: usize = 8;
/// Fewer entries and bytes than these are removed by the next read. With more, claims may have
/// paused, and wait for the removal.
const FEW_ENTRIES: usize = 100;
const FEW_BYTES: usize = 64 << 10;
/// How often the forwarder looks for the entries of a process that died.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often the forwarder renews its hold on an outbox while it publishes.
const KEEP_EVERY: Duration = Duration::from_secs(1);

/// The shards in whose outboxes this process has put something.
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

/// The reason why reports stay in their outbox.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The shard is at fault.
    #[error(transparent)]
    Queue(#[from] queue::Error),
    #[error("cannot forward reports of {0}: {1}")]
    Bus(ShardId, #[source] bus::Error),
    /// The partition of both takes nothing now.
    #[error("reports of {0}, which has its turn with it, cannot be forwarded")]
    Beside(ShardId),
    /// No shard's turn went well.
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
    // Where leases are tended, too, their looks will do.
    let max_age = 2 * LOOK_EVERY;
    let look_for = LookFor {
        max_age,
        grace: settings.watchdog.grace,
        horizon: settings.watchdog.horizon,
    };
    let expirations = Arc::new(Reporting::new(Topic::Expirations));
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
    /// The entries that are on the bus and still in their outboxes, without their events.
    published: Arc<Mutex<BTreeMap<ShardId, Vec<OutboxEntry>>>>,
}

impl Forwarder {
    /// Forwards in rounds. A round gives one turn to every shard that has something, so no busy
    /// shard holds up others. Many shards with a few reports have a turn together.
    ///
    /// Rounds are a tick apart while each forwards everything. So reports that come one by one
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

    /// The shards that have something in their outbox, whoever put it there. The last look is at
    /// Redis.
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

    /// Gives each shard one turn; answers the shards that have more.
    async fn round(
        &self,
        mut due: Due,
        failing: &mut Failing<Error>,
        cx: &Loop,
    ) -> Result<Due, Error> {
        due.retain(|shard, _| !failing.leaves_out(shard));
        let partitions = self.bus.partitions(Topic::TaskResults);
        // On a cluster a node that does not answer must not hold up shards of others.
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
                    // No process will ever forward anything over this bus.
                    Err(error) if error.ends_round() => return Err(error),
                    // The report stays until the bound of the topic is raised. Each try publishes
                    // the earlier ones.
                    Err(error @ Error::Bus(_, bus::Error::TooLarge { .. })) => {
                        failing.needs_help(&shard, error)
                    }
                    // A shard that is damaged, or whose partition takes nothing, does not hold up
                    // the others.
                    Err(error) => _ = failing.note::<()>(&shard, began, Err(error)),
                }
            }
        }
        failing.end_round("forward reports of")?;
        Ok(more)
    }

    /// Forwards some reports of each shard. Answers when the turn began, and whether each shard has
    /// more.
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
                // The shard has too much: it has the next turn alone.
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
                // Otherwise another process publishes the same, and it counts once.
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

    /// Publishes what the shards had, however long the bus takes. Answers for each shard.
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
            // In smaller records, they may fit.
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

    /// Removes what is on the bus from the outbox, or leaves it to the next read; whether the
    /// outbox has more.
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
        for (topic, records) in records.finish() {
            // A client of the bus may put several records into one request, which the topic refuses
            // as one.
            let together = match packed {
                Packed::Densely => records.len(),
                Packed::Loosely => 1,
            };
            let publish = async {
                for some in records.chunks(together.max(1)) {
                    self.bus.publish(topic, some).await?;
                }
                Ok(())
            };
            match topic {
                Topic::Expirations => self.expirations.publish(records.len(), publish).await?,
                _ => publish.await?,
            }
        }
        metrics::results_forwarded(count, started.elapsed());
        Ok(())
    }
}

/// The outcomes of shards whose partition takes nothing now: the first one tells why.
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
