//! The counts behind the books.
//!
//! SQL, the bus and Redis are asked one after the other, so tasks that move meanwhile may be counted twice or not at
//! all. A difference counts only where nothing moves: no record waits on the bus, no report in a shard, and a second
//! look, a second later, finds the same numbers.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use super::error::Error;
use crate::{
    bus::{Bus, Topic},
    model::{Books, BooksState, Held, QueueBooks, QueueName, StoredStatus},
    queue::{Holding, Shards, keys::LANES},
    runtime::Clock,
    store::{OffBusCounts, QueueCount, Store, TurnedAway, TurnedAwayCounts, Unpublished},
};

/// How long a look is shared. Two looks that are this far apart confirm a difference.
const SHARED_FOR: Duration = Duration::from_secs(1);
/// How long a look may confirm a later one.
const CONFIRMS_FOR: Duration = Duration::from_secs(10);
/// The pause after the outbox was counted, in the time that this took: counting takes a tenth of the time.
const SHARE: u32 = 9;
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The books as this process saw them last. All callers share a look.
pub struct Ledger {
    sources: Sources,
    seen: Mutex<Seen>,
}

struct Sources {
    store: Arc<dyn Store>,
    queue: Shards,
    bus: Arc<dyn Bus>,
    clock: Clock,
}

#[derive(Default)]
struct Seen {
    last: Option<Arc<Look>>,
    off_bus: Option<OffBus>,
}

struct Look {
    at: Instant,
    books: Books,
}

/// The count of what waits off the bus.
#[derive(Clone)]
struct OffBus {
    began: Instant,
    took: Duration,
    counts: Arc<OffBusCounts>,
}

impl OffBus {
    fn is_due(&self) -> bool {
        self.began.elapsed() >= self.took + (self.took * SHARE).min(LONGEST_PAUSE)
    }
}

impl Ledger {
    pub fn new(store: Arc<dyn Store>, queue: Shards, bus: Arc<dyn Bus>, clock: Clock) -> Self {
        Self { sources: Sources { store, queue, bus, clock }, seen: Mutex::default() }
    }

    /// The books of all queues that have unfinished tasks or an open shard.
    pub(super) async fn books(&self) -> Result<Books, Error> {
        Ok(self.look().await?.books.clone())
    }

    /// The books of a queue that has no open shard and had no unfinished task.
    pub(super) async fn of_idle(&self, queue: &QueueName) -> Result<QueueBooks, Error> {
        let queues = std::slice::from_ref(queue);
        let counts = self.sources.store.counts(Some(queues)).await?;
        let away = self.sources.store.turned_away(queues).await?;
        let mut books = empty(queue);
        counts.iter().for_each(|count| enter(&mut books, count));
        turn_away(&mut books, &away);
        if books.held.total > 0 {
            // They came since the look.
            books.held.between = i64::try_from(books.held.total).unwrap_or(i64::MAX);
            books.state = BooksState::Moving;
        }
        Ok(books)
    }

    async fn look(&self) -> Result<Arc<Look>, Error> {
        // The second caller waits for the look of the first.
        let mut seen = self.seen.lock().await;
        if let Some(last) = seen.last.as_ref().filter(|last| last.at.elapsed() < SHARED_FOR) {
            return Ok(Arc::clone(last));
        }
        let mut look = seen.take(&self.sources).await?;
        let before = seen.last.take().filter(|before| before.at.elapsed() < CONFIRMS_FOR);
        if look.has_doubts() {
            let before = match before {
                Some(before) => before,
                None => {
                    let first = Arc::new(look);
                    tokio::time::sleep(SHARED_FOR).await;
                    look = seen.take(&self.sources).await?;
                    first
                }
            };
            look.confirm(&before);
        }
        let look = Arc::new(look);
        seen.last = Some(Arc::clone(&look));
        Ok(look)
    }
}

impl Seen {
    /// Reads all numbers. A difference is `Moving` where something moves, else `Unbalanced`, to be confirmed.
    async fn take(&mut self, sources: &Sources) -> Result<Look, Error> {
        let at = Instant::now();
        let off_bus = self.off_bus(&sources.store).await?;
        let shards = sources.queue.shards();
        let mut names: Vec<QueueName> = shards.iter().map(|shard| shard.queue.clone()).collect();
        names.extend(sources.store.unfinished().await?.into_iter().map(|(queue, _)| queue));
        names.sort_unstable();
        names.dedup();
        let away = sources.store.turned_away(&names).await?;
        let mut queues: BTreeMap<&QueueName, QueueBooks> = names.iter().map(|name| (name, empty(name))).collect();
        for count in sources.store.counts(Some(&names)).await? {
            if let Some(of) = queues.get_mut(&count.queue) {
                enter(of, &count);
            }
        }
        let pipeline = sources.bus.backlog(Topic::Pipeline).await?;
        for (shard, holding) in shards.iter().zip(sources.queue.holdings(&shards).await?) {
            if let Some(of) = queues.get_mut(&shard.queue) {
                hold(&mut of.held, holding);
            }
        }
        let task_results = sources.bus.backlog(Topic::TaskResults).await?;
        let is_recent = off_bus.began >= at;
        let flows = pipeline + task_results > 0;
        let settle = |mut of: QueueBooks| {
            turn_away(&mut of, &away);
            wait_off_bus(&mut of, &off_bus.counts);
            of.state = state(&of.held, flows || !is_recent);
            of
        };
        let queues = queues.into_values().map(settle).collect();
        let elsewhere = away.get(&(None, TurnedAway::Rejected)).copied().unwrap_or(0);
        let at_unix_ms = sources.clock.now_unix_ms();
        Ok(Look { at, books: Books { at_unix_ms, pipeline, task_results, rejected_elsewhere: elsewhere, queues } })
    }

    async fn off_bus(&mut self, store: &Arc<dyn Store>) -> Result<OffBus, Error> {
        if let Some(counted) = self.off_bus.as_ref().filter(|counted| !counted.is_due()) {
            return Ok(counted.clone());
        }
        let began = Instant::now();
        let counts = Arc::new(store.off_bus().await?);
        let counted = OffBus { began, took: began.elapsed(), counts };
        self.off_bus = Some(counted.clone());
        Ok(counted)
    }
}

impl Look {
    fn has_doubts(&self) -> bool {
        self.books.queues.iter().any(|of| of.state == BooksState::Unbalanced)
    }

    /// Takes back a difference that was not there, or not the same, in the look before.
    fn confirm(&mut self, before: &Self) {
        let before: BTreeMap<_, _> = before.books.queues.iter().map(|of| (&of.queue, of)).collect();
        for of in self.books.queues.iter_mut().filter(|of| of.state == BooksState::Unbalanced) {
            let has_same = |before: &&&QueueBooks| QueueBooks { state: of.state, ..(**before).clone() } == *of;
            if before.get(&of.queue).filter(has_same).is_none() {
                of.state = BooksState::Moving;
            }
        }
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
        held: Held::default(),
    }
}

fn enter(of: &mut QueueBooks, count: &QueueCount) {
    match count.status {
        StoredStatus::Unfinished => of.held.total = count.count,
        StoredStatus::Completed => of.completed = count.count,
        StoredStatus::Dead => of.dead = count.count,
        StoredStatus::Cancelled => of.cancelled = count.count,
    }
}

fn turn_away(of: &mut QueueBooks, away: &TurnedAwayCounts) {
    let count = |why| away.get(&(Some(of.queue.clone()), why)).copied().unwrap_or(0);
    (of.duplicates, of.rejected) = (count(TurnedAway::Duplicate), count(TurnedAway::Rejected));
}

fn hold(held: &mut Held, holding: Option<Holding>) {
    let Some(Holding { live, open, leases, delayed, outbox, lanes, .. }) = holding else {
        held.lost_shards += 1;
        return;
    };
    // `delayed` counts replicas. They belong to as many tasks at most.
    let nothing_left = live.saturating_sub(open);
    let delayed = delayed.min(nothing_left);
    held.queued += live - nothing_left;
    held.delayed += delayed;
    held.assigned += nothing_left - delayed;
    held.leases += leases;
    held.reports += outbox;
    for (lane, length) in LANES.into_iter().zip(lanes).filter(|(_, length)| *length > 0) {
        *held.lanes.entry(lane).or_default() += length;
    }
}

fn wait_off_bus(of: &mut QueueBooks, counts: &OffBusCounts) {
    let count = |why| counts.get(&(of.queue.clone(), why)).copied().unwrap_or(0);
    let (fresh, parked) = (count(Unpublished::Fresh), count(Unpublished::Parked));
    let (scheduled, missing) = (count(Unpublished::Scheduled), count(Unpublished::Missing));
    let held = &mut of.held;
    (held.fresh, held.parked, held.scheduled, held.missing) = (fresh, parked, scheduled, missing);
    let known = i64::try_from(held.off_bus() + held.live()).unwrap_or(i64::MAX);
    held.between = i64::try_from(held.total).unwrap_or(i64::MAX).saturating_sub(known);
}

/// Whether the places add up. `flows`: something is on the bus, or a count is old.
fn state(held: &Held, flows: bool) -> BooksState {
    let is_on_its_way = flows || held.reports > 0 || held.fresh + held.missing > 0;
    // A task that was parked by a fanout which then died may be enqueued, too. Its parked copy goes when there is room.
    let is_parked_twice = held.parked > 0 && held.between < 0;
    match held.between {
        0 => BooksState::Balanced,
        _ if is_on_its_way || is_parked_twice => BooksState::Moving,
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
        hold(&mut of.held, Some(holding));
        let counts = off_bus.iter().map(|(why, count)| ((queue.clone(), *why), *count)).collect();
        wait_off_bus(&mut of, &counts);
        of
    }

    #[test]
    fn a_difference_counts_where_nothing_moves() {
        let ten = Holding { live: 10, open: 5, delayed: 3, leases: 2, ..Holding::default() };
        let of = books(15, &[(Unpublished::Scheduled, 4), (Unpublished::Parked, 1)], ten);
        assert_eq!((of.held.queued, of.held.delayed, of.held.assigned, of.held.between), (5, 3, 2, 0));
        assert_eq!(state(&of.held, true), BooksState::Balanced);

        let lost = books(11, &[], ten);
        assert_eq!((lost.held.between, state(&lost.held, false)), (1, BooksState::Unbalanced));
        assert_eq!(state(&lost.held, true), BooksState::Moving);
        let reported = books(11, &[], Holding { outbox: 1, ..ten });
        assert_eq!(state(&reported.held, false), BooksState::Moving);
        let fresh = books(12, &[(Unpublished::Fresh, 1)], ten);
        assert_eq!(state(&fresh.held, false), BooksState::Moving);
        let twice = books(10, &[(Unpublished::Parked, 1)], ten);
        assert_eq!((twice.held.between, state(&twice.held, false)), (-1, BooksState::Moving));
    }

    #[test]
    fn a_difference_that_changes_is_no_difference() {
        let look = |of: QueueBooks| {
            let books = Books { at_unix_ms: 0, pipeline: 0, task_results: 0, rejected_elsewhere: 0, queues: vec![of] };
            Look { at: Instant::now(), books }
        };
        let unbalanced = || QueueBooks { state: BooksState::Unbalanced, ..books(3, &[], Holding::default()) };
        let confirmed = |before: QueueBooks| {
            let mut later = look(unbalanced());
            later.confirm(&look(before));
            later.books.queues[0].state
        };
        assert_eq!(confirmed(unbalanced()), BooksState::Unbalanced);
        assert_eq!(confirmed(QueueBooks { completed: 1, ..unbalanced() }), BooksState::Moving);
        assert_eq!(confirmed(QueueBooks { state: BooksState::Moving, ..unbalanced() }), BooksState::Unbalanced);
    }
}
