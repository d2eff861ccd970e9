//! The watchers of whole queues.

use std::sync::Arc;

use super::{
    ring::{Place, Ring, TooSlow},
    watchers::{Full, Watchers},
};
use crate::model::{EventId, QueueName, Watched};

/// The interest of one call in a queue. It ends when this is dropped. It holds a position in the
/// ring, and no events.
pub struct QueueWatch {
    watchers: Watchers,
    queue: QueueName,
    ring: Arc<Ring>,
    place: Place,
    /// The process was receiving the queue's announcements before this began, or this resumes after
    /// an earlier event.
    has_begun: bool,
}

impl QueueWatch {
    pub(super) fn new(watchers: Watchers, queue: QueueName) -> Result<Self, Full> {
        let (ring, place, has_begun) = watchers.enter(&queue)?;
        Ok(Self {
            watchers,
            queue,
            ring,
            place,
            has_begun,
        })
    }

    /// Resumes after this event. Returns false if the process does not have it.
    pub fn resume(&mut self, last: &EventId) -> bool {
        let Some(place) = self.ring.behind(last) else {
            return false;
        };
        self.place = place;
        self.has_begun = true;
        true
    }

    /// Waits until the process receives the queue's announcements, and begins then. Without this,
    /// the first watch of a queue is told of a gap at that moment.
    pub async fn begin(&mut self) {
        if !self.has_begun {
            self.ring
                .until(|| self.watchers.is_heard(&self.queue))
                .await;
            self.place = self.ring.behind_gap();
            self.has_begun = true;
        }
    }

    /// Waits for the next events and gaps, and returns them in order. Cancel safe.
    pub async fn next(&mut self) -> Result<Vec<Watched>, TooSlow> {
        self.ring.next(&mut self.place).await
    }
}

impl Drop for QueueWatch {
    fn drop(&mut self) {
        self.watchers.leave(&self.queue);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            ring::ROOM,
            watchers::{Interest, Watch},
        },
        *,
    };
    use crate::model::{TaskEvent, TaskId, TaskStatus};

    fn queue() -> QueueName {
        QueueName::new("q").unwrap()
    }

    fn queued(at_unix_ms: i64) -> TaskEvent {
        TaskEvent {
            id: TaskId::new(),
            queue: queue(),
            status: TaskStatus::Queued,
            at_unix_ms,
        }
    }

    fn watch(watchers: &Watchers) -> QueueWatch {
        QueueWatch::new(watchers.clone(), queue()).unwrap()
    }

    /// Returns the next events and gaps.
    async fn told(watch: &mut QueueWatch) -> Vec<Watched> {
        watch.next().await.unwrap()
    }

    #[tokio::test]
    async fn watchers_that_do_not_read_share_the_events_and_are_cut() {
        let watchers = Watchers::default();
        let mut all: Vec<QueueWatch> = (0..1_000).map(|_| watch(&watchers)).collect();
        for n in 0..3 * i64::try_from(ROOM).unwrap() / 100 {
            watchers.tell((0..100).map(|_| queued(n)).collect(), true);
        }
        // The events that were told, and those that are still held.
        assert!(
            watchers.waiting() <= 2 * ROOM,
            "{} events",
            watchers.waiting()
        );
        assert!(
            all.iter()
                .all(|watch| Arc::ptr_eq(&watch.ring, &all[0].ring))
        );
        assert!(
            size_of::<QueueWatch>() <= 64,
            "{} bytes of a watcher",
            size_of::<QueueWatch>()
        );
        for watch in &mut all {
            assert_eq!(watch.next().await, Err(TooSlow));
        }
        let mut late = watch(&watchers);
        let next = queued(1_000);
        watchers.tell(vec![next.clone()], true);
        assert_eq!(told(&mut late).await, [Watched::Event(next)]);
        drop((all, late));
        watchers.stop_lingering(&queue());
        assert!(watchers.watched().is_empty());
        assert_eq!(watchers.waiting(), 0);
    }

    #[tokio::test]
    async fn the_first_watcher_of_a_queue_begins_where_the_process_hears_it_and_a_later_gap_is_told()
     {
        let watchers = Watchers::default();
        let mut first = watch(&watchers);
        let mut hasty = watch(&watchers);
        let before = queued(1);
        watchers.tell(vec![before], true);
        let begun = async {
            first.begin().await;
            told(&mut first).await
        };
        let next = queued(2);
        let hears = async {
            assert_eq!(watchers.unheard(), [queue()]);
            watchers.hears(queue());
            watchers.tell(vec![next.clone()], true);
        };
        let (of_first, ()) = tokio::join!(begun, hears);
        assert_eq!(of_first, [Watched::Event(next.clone())]);
        // This watcher did not wait for the beginning: something before the gap may be missing.
        assert_eq!(told(&mut hasty).await[0], Watched::Gap);
        let mut second = watch(&watchers);
        second.begin().await;
        watchers.missed(&queue());
        assert_eq!(
            (told(&mut first).await, told(&mut second).await),
            (vec![Watched::Gap], vec![Watched::Gap])
        );
        assert!(
            !second.resume(&next.event_id()),
            "nobody goes on behind an event from before a gap"
        );
        // When the connection has ended, the queue is not heard any more.
        watchers.hears_nothing();
        assert!(!watchers.is_heard(&queue()));
        drop((first, hasty, second));
        assert!(watchers.take_left().is_empty(), "nothing is heard");
        watchers.hears(queue());
        assert!(watchers.take_left().is_empty(), "the queue lingers");
        watchers.stop_lingering(&queue());
        assert!(watchers.watched().is_empty());
        assert_eq!(watchers.take_left(), [queue()]);
    }

    #[test]
    fn nobody_goes_on_behind_a_time_in_which_only_ends_were_watched() {
        let watchers = Watchers::default();
        let event = queued(1);
        let first = watch(&watchers);
        watchers.tell(vec![event.clone()], true);
        let ends = Watch::new(
            watchers.clone(),
            vec![(queue(), Vec::new())],
            Interest::Ends,
        )
        .unwrap();
        drop(first);
        assert!(
            watch(&watchers).resume(&event.event_id()),
            "the queue stays watched for a while"
        );
        watchers.stop_lingering(&queue());
        assert!(!watch(&watchers).resume(&event.event_id()));
        drop(ends);
    }
}
