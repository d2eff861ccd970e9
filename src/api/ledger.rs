//! Counts the tasks of each queue in SQL, on the bus and in Redis, for the books: `GET /v1/books`
//! compares how many unfinished tasks SQL has with how many can be found.
//!
//! The servers are asked one after the other, so a task that moves meanwhile may be counted twice
//! or not at all. So a difference is reported only if nothing moves: no record waits on the bus, no
//! report waits in a shard, and a second snapshot, a second later, has the same numbers
//! (`books_snapshot.rs`).

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use super::{
    books_snapshot::{BooksSnapshot, Counts, SHARED_FOR, TakeSnapshot, Unread, decide},
    error::Error,
};
use crate::{
    bus::{Bus, Topic},
    model::{Books, BooksState, BusBacklog, QueueBooks, QueueName, StoredStatus, UnfinishedTasks},
    queue::{Holding, Shards, keys::LANES},
    runtime::Clock,
    store::{OffBusCounts, QueueCount, Store, TurnedAway, TurnedAwayCounts, Unpublished},
};

/// The pause after a count of the outbox, as a multiple of the time that the count took. So
/// counting takes a tenth of the time.
const SHARE: u32 = 9;
/// The same while the state of a queue depends on an old count of the outbox: the pause is shorter.
const SHARE_IN_DOUBT: u32 = 3;
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The last books of this process. Calls at about the same time share one snapshot.
pub struct Ledger {
    sources: Sources,
    seen: Mutex<LastSeen>,
}

struct Sources {
    store: Arc<dyn Store>,
    queue: Shards,
    bus: Arc<dyn Bus>,
    clock: Clock,
}

#[derive(Default)]
struct LastSeen {
    last: Option<Arc<BooksSnapshot>>,
    off_bus: Option<OutboxCount>,
}

/// A count of the tasks in SQL that are not on the bus.
#[derive(Clone)]
struct OutboxCount {
    began: Instant,
    took: Duration,
    counts: Arc<OffBusCounts>,
}

impl OutboxCount {
    fn is_older_than(&self, share: u32) -> bool {
        self.began.elapsed() >= self.took + (self.took * share).min(LONGEST_PAUSE)
    }
}

impl Ledger {
    pub fn new(store: Arc<dyn Store>, queue: Shards, bus: Arc<dyn Bus>, clock: Clock) -> Self {
        Self {
            sources: Sources {
                store,
                queue,
                bus,
                clock,
            },
            seen: Mutex::default(),
        }
    }

    /// Returns the books of a queue that had no open shard and no unfinished task in the snapshot.
    pub(super) async fn of_idle(&self, queue: &QueueName) -> Result<QueueBooks, Error> {
        let queues = std::slice::from_ref(queue);
        let counts = self.sources.store.counts(Some(queues)).await?;
        let away = self.sources.store.turned_away(queues).await?;
        let mut books = empty(queue);
        counts
            .iter()
            .for_each(|count| set_stored(&mut books, count));
        set_refused(&mut books, &away);
        if books.held.total > 0 {
            // They were inserted after the snapshot.
            books.held.between = i64::try_from(books.held.total).unwrap_or(i64::MAX);
            books.state = BooksState::Moving;
        }
        Ok(books)
    }

    /// Returns a snapshot of all queues that have unfinished tasks or an open shard.
    pub(super) async fn look(&self) -> Result<Arc<BooksSnapshot>, Error> {
        // A second caller waits for the snapshot of the first.
        let mut seen = self.seen.lock().await;
        if let Some(last) = seen
            .last
            .as_ref()
            .filter(|last| last.at.elapsed() < SHARED_FOR)
        {
            return Ok(Arc::clone(last));
        }
        let LastSeen { last, off_bus } = &mut *seen;
        let look = decide(
            last.as_deref(),
            &mut SnapshotReader {
                sources: &self.sources,
                off_bus,
            },
        )
        .await?;
        let look = Arc::new(look);
        *last = Some(Arc::clone(&look));
        Ok(look)
    }
}

/// Takes snapshots for one caller.
struct SnapshotReader<'a> {
    sources: &'a Sources,
    off_bus: &'a mut Option<OutboxCount>,
}

impl TakeSnapshot for SnapshotReader<'_> {
    /// Reads all numbers.
    async fn take(&mut self, counts: Counts) -> Result<BooksSnapshot, Error> {
        let at = Instant::now();
        let sources = self.sources;
        let off_bus = self.count_off_bus(counts).await?;
        let shards = sources.queue.shards();
        let mut names: Vec<QueueName> = shards.iter().map(|shard| shard.queue.clone()).collect();
        names.extend(
            sources
                .store
                .unfinished()
                .await?
                .into_iter()
                .map(|(queue, _)| queue),
        );
        names.sort_unstable();
        names.dedup();
        let away = sources.store.turned_away(&names).await?;
        let mut queues: BTreeMap<&QueueName, QueueBooks> =
            names.iter().map(|name| (name, empty(name))).collect();
        for count in sources.store.counts(Some(&names)).await? {
            if let Some(of) = queues.get_mut(&count.queue) {
                set_stored(of, &count);
            }
        }
        let pipeline = sources.bus.backlog(Topic::Pipeline).await?;
        let mut unread = Vec::new();
        for (shard, holding) in shards.iter().zip(sources.queue.holdings(&shards).await?) {
            let Some(of) = queues.get_mut(&shard.queue) else {
                continue;
            };
            match holding {
                Ok(holding) => add_shard(&mut of.held, holding),
                Err(cause) => unread.push(Unread {
                    shard: shard.clone(),
                    cause,
                }),
            }
        }
        let task_results = sources.bus.backlog(Topic::TaskResults).await?;
        let flows = pipeline + task_results > 0;
        let is_recent = off_bus.began >= at;
        let settle = |mut of: QueueBooks| {
            set_refused(&mut of, &away);
            set_off_bus(&mut of, &off_bus.counts);
            // The numbers of a queue with an unreadable shard are wrong, and are not shown.
            of.state = match unread.iter().any(|unread| unread.shard.queue == of.queue) {
                true => BooksState::Moving,
                false => state(&of.held, flows, is_recent),
            };
            of
        };
        let queues: Vec<QueueBooks> = queues.into_values().map(settle).collect();
        // Rejected tasks of queues that this process does not know.
        let elsewhere = away
            .get(&(None, TurnedAway::Rejected))
            .copied()
            .unwrap_or(0);
        let at_unix_ms = sources.clock.now_unix_ms();
        let bus = Some(BusBacklog {
            pipeline,
            task_results,
        });
        let needs_old_count =
            |of: &&QueueBooks| of.state == BooksState::Moving && is_unsure(&of.held, is_recent);
        let unsure = queues
            .iter()
            .filter(needs_old_count)
            .map(|of: &QueueBooks| of.queue.clone())
            .collect();
        let books = Books {
            at_unix_ms,
            bus,
            rejected_elsewhere: elsewhere,
            queues,
        };
        Ok(BooksSnapshot {
            at,
            books,
            is_recent,
            unsure,
            unread,
        })
    }

    async fn wait(&self) {
        tokio::time::sleep(SHARED_FOR).await;
    }

    fn may_count(&self) -> bool {
        self.off_bus
            .as_ref()
            .is_none_or(|counted| counted.is_older_than(SHARE_IN_DOUBT))
    }
}

impl SnapshotReader<'_> {
    async fn count_off_bus(&mut self, counts: Counts) -> Result<OutboxCount, Error> {
        let shared = self
            .off_bus
            .as_ref()
            .filter(|counted| counts == Counts::Shared && !counted.is_older_than(SHARE));
        if let Some(counted) = shared {
            return Ok(counted.clone());
        }
        let began = Instant::now();
        let counts = Arc::new(self.sources.store.off_bus().await?);
        let counted = OutboxCount {
            began,
            took: began.elapsed(),
            counts,
        };
        *self.off_bus = Some(counted.clone());
        Ok(counted)
    }
}

fn empty(queue: &QueueName) -> QueueBooks {
    QueueBooks {
        queue: queue.clone(),
        state: BooksState::Balanced,
        duplicates: 0,
        rejected: 0,
        completed: 0,
        dead: 0,
        cancelled: 0,
        held: UnfinishedTasks::default(),
    }
}

fn set_stored(of: &mut QueueBooks, count: &QueueCount) {
    match count.status {
        StoredStatus::Unfinished => of.held.total = count.count,
        StoredStatus::Completed => of.completed = count.count,
        StoredStatus::Dead => of.dead = count.count,
        StoredStatus::Cancelled => of.cancelled = count.count,
    }
}

fn set_refused(of: &mut QueueBooks, away: &TurnedAwayCounts) {
    let count = |why| {
        away.get(&(Some(of.queue.clone()), why))
            .copied()
            .unwrap_or(0)
    };
    of.duplicates = count(TurnedAway::Duplicate);
    of.rejected = count(TurnedAway::Rejected);
}

fn add_shard(held: &mut UnfinishedTasks, holding: Option<Holding>) {
    let Some(Holding {
        live,
        open,
        leases,
        delayed,
        outbox,
        lanes,
        behind,
        ..
    }) = holding
    else {
        held.lost_shards += 1;
        return;
    };
    // Tasks without a replica to claim: all are leased, credited or delayed. `delayed` counts
    // replicas, which belong to at most that many tasks.
    let nothing_left = live.saturating_sub(open);
    let delayed = delayed.min(nothing_left);
    held.waiting += live - nothing_left;
    held.delayed += delayed;
    held.assigned += nothing_left - delayed;
    held.leases += leases;
    held.behind_limits += behind;
    held.reports += outbox;
    for (lane, length) in LANES
        .into_iter()
        .zip(lanes)
        .filter(|(_, length)| *length > 0)
    {
        *held.lanes.entry(lane).or_default() += length;
    }
}

fn set_off_bus(of: &mut QueueBooks, counts: &OffBusCounts) {
    let count = |why| counts.get(&(of.queue.clone(), why)).copied().unwrap_or(0);
    let fresh = count(Unpublished::Fresh);
    let parked = count(Unpublished::Parked);
    let crowded = count(Unpublished::Crowded);
    let behind = count(Unpublished::Behind);
    let scheduled = count(Unpublished::Scheduled);
    let missing = count(Unpublished::Missing);
    let held = &mut of.held;
    held.fresh = fresh;
    held.parked = parked;
    held.crowded = crowded;
    held.behind = behind;
    held.scheduled = scheduled;
    held.missing = missing;
    let known = i64::try_from(held.off_bus() + held.live()).unwrap_or(i64::MAX);
    held.between = i64::try_from(held.total)
        .unwrap_or(i64::MAX)
        .saturating_sub(known);
}

/// Whether the numbers add up only because of an older count of the outbox. If that count was zero,
/// they add up without it.
fn is_unsure(held: &UnfinishedTasks, is_recent: bool) -> bool {
    !is_recent && held.between == 0 && held.off_bus() > 0
}

/// Returns the state of a queue according to one snapshot; `Unbalanced` must be confirmed by a
/// second one. `flows` means that something is on the bus, `is_recent` that the outbox was counted
/// for this snapshot, so that its numbers can explain a difference.
fn state(held: &UnfinishedTasks, flows: bool, is_recent: bool) -> BooksState {
    let leaves_outbox = held.fresh + held.missing > 0;
    // A task that was parked by a fanout that died right after may be enqueued as well. Its parked
    // or crowded copy is removed when there is room.
    let is_parked_twice = held.parked + held.crowded > 0 && held.between < 0;
    match held.between {
        0 if is_unsure(held, is_recent) => BooksState::Moving,
        0 => BooksState::Balanced,
        // The difference may be a task on its way. An old count of the outbox cannot tell.
        _ if flows || held.reports > 0 || is_recent && (leaves_outbox || is_parked_twice) => {
            BooksState::Moving
        }
        _ => BooksState::Unbalanced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn books(total: u64, off_bus: &[(Unpublished, u64)], holding: Holding) -> QueueBooks {
        let queue = QueueName::new("q").unwrap();
        let mut of = empty(&queue);
        of.held.total = total;
        add_shard(&mut of.held, Some(holding));
        let counts = off_bus
            .iter()
            .map(|(why, count)| ((queue.clone(), *why), *count))
            .collect();
        set_off_bus(&mut of, &counts);
        of
    }

    #[test]
    fn a_difference_counts_where_nothing_moves() {
        let ten = Holding {
            live: 10,
            open: 5,
            delayed: 3,
            leases: 2,
            ..Holding::default()
        };
        let of = books(
            15,
            &[(Unpublished::Scheduled, 4), (Unpublished::Parked, 1)],
            ten,
        );
        assert_eq!(
            (
                of.held.waiting,
                of.held.delayed,
                of.held.assigned,
                of.held.between
            ),
            (5, 3, 2, 0)
        );
        assert_eq!(state(&of.held, true, true), BooksState::Balanced);

        let lost = books(11, &[], ten);
        assert_eq!(
            (lost.held.between, state(&lost.held, false, true)),
            (1, BooksState::Unbalanced)
        );
        assert_eq!(state(&lost.held, true, true), BooksState::Moving);
        let reported = books(11, &[], Holding { outbox: 1, ..ten });
        assert_eq!(state(&reported.held, false, true), BooksState::Moving);
        let fresh = books(12, &[(Unpublished::Fresh, 1)], ten);
        assert_eq!(state(&fresh.held, false, true), BooksState::Moving);
        let twice = books(10, &[(Unpublished::Parked, 1)], ten);
        assert_eq!(
            (twice.held.between, state(&twice.held, false, true)),
            (-1, BooksState::Moving)
        );
        // An older count may include a task that has left the outbox since, which hides one that is
        // missing.
        let made_up = books(11, &[(Unpublished::Fresh, 1)], ten);
        assert_eq!(
            (made_up.held.between, state(&made_up.held, false, true)),
            (0, BooksState::Balanced)
        );
        assert_eq!(state(&made_up.held, false, false), BooksState::Moving);
        let all_live = books(10, &[], ten);
        assert_eq!(state(&all_live.held, false, false), BooksState::Balanced);
        // The numbers of an older count cannot explain a difference.
        assert_eq!(
            [
                state(&fresh.held, false, false),
                state(&twice.held, false, false)
            ],
            [BooksState::Unbalanced; 2]
        );
    }
}
