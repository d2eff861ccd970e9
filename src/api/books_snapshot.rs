//! Decides whether the books balance. One snapshot of moving numbers cannot tell, so a difference
//! counts only if two snapshots have it.
//!
//! A count of the outbox may take long, so several snapshots use the same one. If the result
//! depends on an old count, whether there is a difference or not, the outbox is counted again
//! first.

use std::time::{Duration, Instant};

use super::error::Error;
use crate::{
    model::{Books, BooksState, QueueBooks, QueueName, ShardId},
    queue,
};

/// How long callers share a snapshot, and the time between two snapshots that confirm a difference.
pub(super) const SHARED_FOR: Duration = Duration::from_secs(1);
/// How long a snapshot may confirm a later one.
const CONFIRMS_FOR: Duration = Duration::from_secs(10);

/// The numbers of all queues at about one moment.
pub(super) struct BooksSnapshot {
    pub(super) at: Instant,
    pub(super) books: Books,
    /// True if the outbox was counted for this snapshot.
    pub(super) is_recent: bool,
    /// The queues whose numbers add up only with an older count of the outbox. Their state is
    /// `Moving`: a task that has left the outbox since may hide another one whose end is on its
    /// way.
    pub(super) unsure: Vec<QueueName>,
    /// The shards that could not be read. The numbers of their queues are wrong.
    pub(super) unread: Vec<Unread>,
}

/// A shard that could not be read, and why.
#[derive(Clone)]
pub(super) struct Unread {
    pub(super) shard: ShardId,
    pub(super) cause: queue::Error,
}

impl From<Unread> for Error {
    fn from(Unread { shard, cause }: Unread) -> Self {
        Self::Shard { shard, cause }
    }
}

/// Which count of the outbox a snapshot uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counts {
    /// The last one, unless it is old.
    Shared,
    Anew,
}

/// Takes snapshots. The tests have an implementation of their own.
pub(super) trait TakeSnapshot: Send {
    /// Takes a snapshot. A queue is `Unbalanced` if nothing that moves explains its difference.
    fn take(&mut self, counts: Counts)
    -> impl Future<Output = Result<BooksSnapshot, Error>> + Send;

    /// Waits before the second snapshot.
    fn wait(&self) -> impl Future<Output = ()> + Send;

    /// True if the outbox may be counted again already.
    fn may_count(&self) -> bool;
}

/// Takes snapshots, at most three, until the states are certain. Returns the last one. `last` is
/// the snapshot of the previous call.
pub(super) async fn decide(
    last: Option<&BooksSnapshot>,
    looks: &mut impl TakeSnapshot,
) -> Result<BooksSnapshot, Error> {
    let mut look = looks.take(Counts::Shared).await?;
    let is_known =
        |look: &BooksSnapshot| last.is_some_and(|last| look.doubts().all(|of| last.confirms(of)));
    if !look.is_recent {
        look.keep_balanced(last);
        let hangs_on_count = !look.unsure.is_empty() || look.has_doubts() && !is_known(&look);
        if hangs_on_count && looks.may_count() {
            look = looks.take(Counts::Anew).await?;
        } else {
            // Without a new count, only differences that were confirmed before are certain.
            look.keep_doubts(|of| last.is_some_and(|last| last.confirms(of)));
            return Ok(look);
        }
    }
    if look.has_doubts() {
        let seen = last.filter(|last| last.at.elapsed() < CONFIRMS_FOR);
        if seen.is_none_or(|seen| !look.doubts().all(|of| seen.has_same(of))) {
            looks.wait().await;
            let first = std::mem::replace(&mut look, looks.take(Counts::Anew).await?);
            look.keep_doubts(|of| first.has_same(of));
        }
    }
    Ok(look)
}

impl BooksSnapshot {
    fn doubts(&self) -> impl Iterator<Item = &QueueBooks> {
        self.books
            .queues
            .iter()
            .filter(|of| of.state == BooksState::Unbalanced)
    }

    fn has_doubts(&self) -> bool {
        self.doubts().next().is_some()
    }

    fn of(&self, queue: &QueueBooks) -> Option<&QueueBooks> {
        // The queues are sorted.
        let place = self
            .books
            .queues
            .binary_search_by(|of| of.queue.cmp(&queue.queue))
            .ok()?;
        self.books.queues.get(place)
    }

    /// True if this snapshot has the same numbers.
    fn has_same(&self, queue: &QueueBooks) -> bool {
        self.of(queue).is_some_and(|of| {
            QueueBooks {
                state: queue.state,
                ..of.clone()
            } == *queue
        })
    }

    /// True if this snapshot has the same numbers and the same state.
    fn confirms(&self, queue: &QueueBooks) -> bool {
        self.of(queue).is_some_and(|of| of == queue)
    }

    /// Marks an unsure queue as balanced if it was balanced in the last snapshot and all its
    /// numbers are the same.
    fn keep_balanced(&mut self, last: Option<&Self>) {
        let Some(last) = last else { return };
        let Self { books, unsure, .. } = self;
        for of in books
            .queues
            .iter_mut()
            .filter(|of| unsure.contains(&of.queue))
        {
            let balanced = QueueBooks {
                state: BooksState::Balanced,
                ..of.clone()
            };
            if last.confirms(&balanced) {
                *of = balanced;
            }
        }
        let is_settled = |queue: &QueueName| {
            books
                .queues
                .iter()
                .any(|of| of.queue == *queue && of.state == BooksState::Balanced)
        };
        unsure.retain(|queue| !is_settled(queue));
    }

    /// Sets queues whose difference `is_sure` does not confirm back to `Moving`.
    fn keep_doubts(&mut self, is_sure: impl Fn(&QueueBooks) -> bool) {
        let doubts = self
            .books
            .queues
            .iter_mut()
            .filter(|of| of.state == BooksState::Unbalanced);
        doubts
            .filter(|of| !is_sure(of))
            .for_each(|of| of.state = BooksState::Moving);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::model::UnfinishedTasks;

    /// Snapshots that a test has prepared, and which counts were requested.
    struct Script {
        looks: VecDeque<BooksSnapshot>,
        asked: Vec<Counts>,
        may_count: bool,
    }

    impl TakeSnapshot for Script {
        async fn take(&mut self, counts: Counts) -> Result<BooksSnapshot, Error> {
            self.asked.push(counts);
            Ok(self.looks.pop_front().expect("another look"))
        }

        async fn wait(&self) {}

        fn may_count(&self) -> bool {
            self.may_count
        }
    }

    fn look(state: BooksState, completed: u64, is_recent: bool) -> BooksSnapshot {
        let queue = QueueName::new("q").unwrap();
        let held = UnfinishedTasks {
            total: 3,
            between: 3,
            ..UnfinishedTasks::default()
        };
        let of = QueueBooks {
            queue,
            state,
            duplicates: 0,
            rejected: 0,
            completed,
            dead: 0,
            cancelled: 0,
            held,
        };
        let books = Books {
            at_unix_ms: 0,
            bus: None,
            rejected_elsewhere: 0,
            queues: vec![of],
        };
        BooksSnapshot {
            at: Instant::now(),
            books,
            is_recent,
            unsure: Vec::new(),
            unread: Vec::new(),
        }
    }

    /// Returns the state that is decided, and which counts were requested.
    async fn decided(
        last: Option<BooksSnapshot>,
        looks: Vec<BooksSnapshot>,
        may_count: bool,
    ) -> (BooksState, Vec<Counts>) {
        let mut script = Script {
            looks: looks.into(),
            asked: Vec::new(),
            may_count,
        };
        let look = decide(last.as_ref(), &mut script).await.unwrap();
        assert!(script.looks.is_empty());
        (look.books.queues[0].state, script.asked)
    }

    use BooksState::{Balanced, Moving, Unbalanced};
    use Counts::{Anew, Shared};

    #[tokio::test]
    async fn a_difference_is_seen_twice_before_it_counts() {
        let recent = |state, completed| look(state, completed, true);
        let two = vec![recent(Unbalanced, 0), recent(Unbalanced, 0)];
        assert_eq!(
            decided(None, two, true).await,
            (Unbalanced, vec![Shared, Anew])
        );
        let changed = vec![recent(Unbalanced, 0), recent(Unbalanced, 1)];
        assert_eq!(
            decided(None, changed, true).await,
            (Moving, vec![Shared, Anew])
        );
        let gone = vec![recent(Unbalanced, 0), recent(Balanced, 0)];
        assert_eq!(
            decided(None, gone, true).await,
            (Balanced, vec![Shared, Anew])
        );
        // The previous snapshot counts as the first of the two, if it had the same numbers.
        for before in [Unbalanced, Moving] {
            let last = Some(recent(before, 0));
            assert_eq!(
                decided(last, vec![recent(Unbalanced, 0)], true).await,
                (Unbalanced, vec![Shared])
            );
        }
        let two = vec![recent(Unbalanced, 0), recent(Unbalanced, 0)];
        assert_eq!(
            decided(Some(recent(Moving, 7)), two, true).await,
            (Unbalanced, vec![Shared, Anew])
        );
    }

    #[tokio::test]
    async fn a_difference_that_hangs_on_an_old_count_is_counted_again_before_anything_is_said() {
        let old = |state, completed| look(state, completed, false);
        let recent = |state, completed| look(state, completed, true);
        let three = vec![
            old(Unbalanced, 0),
            recent(Unbalanced, 0),
            recent(Unbalanced, 0),
        ];
        assert_eq!(
            decided(None, three, true).await,
            (Unbalanced, vec![Shared, Anew, Anew])
        );
        let explained = vec![old(Unbalanced, 0), recent(Moving, 0)];
        assert_eq!(
            decided(None, explained, true).await,
            (Moving, vec![Shared, Anew])
        );
        // The last snapshot was confirmed, and nothing has changed: no count is needed.
        let last = Some(recent(Unbalanced, 0));
        assert_eq!(
            decided(last, vec![old(Unbalanced, 0)], true).await,
            (Unbalanced, vec![Shared])
        );
        // Too soon after the last count.
        let last = || Some(recent(Balanced, 0));
        assert_eq!(
            decided(last(), vec![old(Unbalanced, 0)], false).await,
            (Moving, vec![Shared])
        );
        assert_eq!(
            decided(last(), vec![old(Moving, 0)], true).await,
            (Moving, vec![Shared])
        );
    }

    #[tokio::test]
    async fn a_queue_is_balanced_by_numbers_of_one_time_only() {
        let unsure = |completed| {
            let mut look = look(Moving, completed, false);
            look.unsure = look
                .books
                .queues
                .iter()
                .map(|of| of.queue.clone())
                .collect();
            look
        };
        let recent = |state, completed| look(state, completed, true);
        // The outbox is counted with the rest before the state is decided.
        let counted = vec![unsure(0), recent(Balanced, 0)];
        assert_eq!(
            decided(None, counted, true).await,
            (Balanced, vec![Shared, Anew])
        );
        let moved = vec![unsure(1), recent(Moving, 1)];
        assert_eq!(
            decided(Some(recent(Balanced, 0)), moved, true).await,
            (Moving, vec![Shared, Anew])
        );
        // Too soon after the last count.
        assert_eq!(
            decided(Some(recent(Balanced, 0)), vec![unsure(1)], false).await,
            (Moving, vec![Shared])
        );
        // Nothing has changed since it was balanced: no count is needed.
        assert_eq!(
            decided(Some(recent(Balanced, 0)), vec![unsure(0)], true).await,
            (Balanced, vec![Shared])
        );
    }
}
