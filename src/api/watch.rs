//! Watching tasks and queues: the current status first, then each change, in order.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt as _;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::Instrument as _;

use super::{
    access::{Authentication, reaches},
    error::Error,
    handle::{Api, span},
    query::task_id,
    reader::Reader,
    waits::Wait,
    watching::{Statuses, WatchedTask},
};
use crate::{
    model::{
        Caller, ECHO, EventId, QueueName, TaskEvent, TaskId, TaskStatus, WatchEnd, Watched, shorten,
    },
    queue::{Interest, QueueWatch, TooSlow, Watch, WatcherNews},
    telemetry::metrics::{self, WatchOver},
};

/// How long, at least, an event of a task is held back, because an earlier event may arrive after
/// it: each process sends its events at its own tick. Events of a queue are held back in
/// `queue/announce/ring.rs`.
const HOLD: Duration = Duration::from_millis(50);
/// How far the clocks of two processes may differ.
const SKEW_MS: i64 = 50;
/// How long after its time stamp the step takes effect that puts a task into the queue, at most.
const LONGEST_STEP_MS: i64 = 1_000;
/// After this long without an event, a watcher is sent a sign of life.
const BEAT_EVERY: Duration = Duration::from_secs(15);
/// How long a watch of a queue waits until this process receives the events of the queue.
const BEGIN_WITHIN: Duration = Duration::from_secs(2);
/// How many parts a watch returns before it yields to other calls, because thousands of watches may
/// have as many.
const GIVE_AT_ONCE: u32 = 16;
/// The tasks whose keys are read at once.
const KEYS_AT_ONCE: usize = 500;
/// How often a watch checks its token.
const CHECK_EVERY: Duration = Duration::from_millis(250);

impl Api {
    /// Watches a task until it is final. `last` is the last event that the caller has seen.
    pub async fn watch_task(
        &self,
        caller: &Caller,
        id: &str,
        last: Option<&str>,
    ) -> Result<Watching, Error> {
        let id = task_id(id)?;
        let last = event_id(last)?;
        let query = self.query()?;
        let wait = self.waits.of_tasks(&caller.access, 1)?;
        let begin = async {
            let queue = query.queue_of(caller, id).await?;
            let announcer = query.queue.announcer();
            let watch = announcer.watch(vec![(queue, vec![id])], Interest::All)?;
            // Read after the watch has begun, so that nothing is missed in between.
            let Statuses { mut looks, failed } = query.statuses(&[id]).await?;
            let now = looks
                .pop()
                .ok_or_else(|| failed.map_or(Error::NoSuchTask(id), Error::from))?;
            Ok::<_, Error>((watch, now))
        };
        let (
            watch,
            WatchedTask {
                event: now,
                is_ending,
            },
        ) = begin.instrument(span("watch_task", caller)).await?;
        // The event that the caller has seen, if there is nothing newer to tell. A task whose end
        // is on its way to SQL shows as assigned, which is no news after any event.
        let seen = last.filter(|last| last.task == id && (last.status == now.status || is_ending));
        // If there is nothing to tell, the watch continues from the event that the caller has seen.
        let begun = match &seen {
            // A final status is of an earlier life of the task, so the watch continues from now.
            // The caller may have sent any time, so at most the present one counts.
            Some(seen) if is_ending && !seen.status.is_final() => TaskEvent {
                status: seen.status,
                at_unix_ms: seen.at_unix_ms.min(now.at_unix_ms),
                ..now.clone()
            },
            _ => now.clone(),
        };
        let life = Life {
            id,
            last: Some(begun),
        };
        let of_task = OfTask {
            watch,
            life,
            held: Vec::new(),
            hear_at: Instant::now(),
        };
        let mut watching = self.watching(caller, query.clone(), Source::Task(of_task), wait);
        watching.over = now.status.is_final().then_some(WatchOver::Final);
        watching
            .ready
            .extend(seen.is_none().then_some(Watched::Event(now)));
        Ok(watching)
    }

    /// Watches all tasks of a queue, from now on or from after the event `last`.
    pub async fn watch_queue(
        &self,
        caller: &Caller,
        queue: &str,
        last: Option<&str>,
    ) -> Result<Watching, Error> {
        let queue = QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?;
        reaches(caller, queue.as_str())?;
        let last = event_id(last)?;
        let query = self.query()?;
        // A name that nobody uses yet may be made up.
        let is_new = query.queue.shards_of(&queue).is_empty()
            && !query.settings.queues.named.contains_key(&queue);
        let wait = match is_new {
            true => self.waits.of_new_queue(&caller.access)?,
            false => self.wait(caller)?,
        };
        let mut watch = query.queue.announcer().watch_queue(queue)?;
        let has_resumed = last.is_some_and(|last| watch.resume(&last));
        if !has_resumed {
            // The caller takes our answer as the beginning of the watch. If it is sent before this
            // process receives the events of the queue, a gap follows.
            let begin = timeout(BEGIN_WITHIN, watch.begin());
            _ = self.stop.run_until_cancelled(begin).await;
        }
        let mut watching = self.watching(caller, query.clone(), Source::Queue(watch), wait);
        watching
            .ready
            .extend((last.is_some() && !has_resumed).then_some(Watched::Gap));
        Ok(watching)
    }

    fn watching(&self, caller: &Caller, reader: Reader, source: Source, wait: Wait) -> Watching {
        let now = Instant::now();
        Watching {
            authentication: self.authentication.clone(),
            caller: caller.clone(),
            stop: self.stop.clone(),
            source,
            reader,
            ready: VecDeque::new(),
            keys: BTreeMap::new(),
            key: None,
            given: 0,
            over: None,
            beat_at: now + BEAT_EVERY,
            check_at: now + CHECK_EVERY,
            _wait: wait,
        }
    }
}

fn event_id(text: Option<&str>) -> Result<Option<EventId>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let wrong = |()| {
        let text = shorten(text, ECHO);
        Error::Invalid(format!(
            "{text:?} is no event of taskd; send the id of the last event that you have seen"
        ))
    };
    text.parse().map(Some).map_err(wrong)
}

/// The part of a task's life that its watcher has seen.
struct Life {
    id: TaskId,
    last: Option<TaskEvent>,
}

impl Life {
    /// True if the event is new, and not older than what the watcher has seen. `is_truth`: it was
    /// read from SQL and Redis, and is no hint.
    fn is_news(&self, event: &TaskEvent, is_truth: bool) -> bool {
        let Some(last) = &self.last else { return true };
        if event.id != self.id || event.status == last.status {
            return false;
        }
        if is_truth && !event.status.is_final() {
            // What was read may be older than events that have arrived since. And a step takes its
            // time stamp before it is carried out, so a task may have been read as pending after
            // that time and before the step.
            let margin = if event.status == TaskStatus::Pending {
                LONGEST_STEP_MS
            } else {
                0
            };
            return event.at_unix_ms >= last.at_unix_ms + margin;
        }
        // Clocks differ: a later status may have a slightly earlier time.
        let goes_on = event.status.rank() > last.status.rank()
            && event.at_unix_ms + SKEW_MS >= last.at_unix_ms;
        event.status.is_final() || event.order() > last.order() || goes_on
    }
}

/// A watch of one task.
struct OfTask {
    watch: Watch,
    life: Life,
    /// Events that are held back for earlier ones; true if the event was read, false if it came as
    /// a hint.
    held: Vec<(TaskEvent, bool)>,
    /// When the held events are due, if there are any.
    hear_at: Instant,
}

impl OfTask {
    /// Returns the next events, perhaps none. Cancel safe.
    async fn next(&mut self) -> Vec<TaskEvent> {
        if self.held.is_empty() {
            let (told, has_overflowed) = self.watch.told().await;
            self.hold(told, has_overflowed);
        }
        sleep_until(self.hear_at).await;
        self.hear()
    }

    /// Holds back what has arrived.
    fn hold(&mut self, told: Vec<WatcherNews>, has_overflowed: bool) {
        if has_overflowed {
            // Hints were lost, so the task is read again.
            self.watch.ask(&[self.life.id]);
        }
        self.hear_at = Instant::now() + HOLD;
        self.held.extend(told.into_iter().map(|told| match told {
            WatcherNews::Hint(event) => (event, false),
            WatcherNews::Truth(event) => (event, true),
        }));
    }

    /// Takes the held events, in order, and with them those that have arrived since and belong
    /// before the last of them. The rest is held back in turn.
    fn hear(&mut self) -> Vec<TaskEvent> {
        let upto = self.held.iter().map(|(event, _)| event.order()).max();
        if let Some((more, has_overflowed)) = self.watch.told().now_or_never() {
            self.hold(more, has_overflowed);
        }
        let mut events = std::mem::take(&mut self.held);
        events.sort_by_key(|(event, _)| event.order());
        self.held =
            events.split_off(events.partition_point(|(event, _)| Some(event.order()) <= upto));
        let mut news = Vec::new();
        for (event, is_truth) in events {
            if self.life.is_news(&event, is_truth) {
                self.life.last = Some(event.clone());
                news.push(event);
            }
        }
        news
    }
}

/// Where the events come from.
enum Source {
    Task(OfTask),
    Queue(QueueWatch),
}

impl Source {
    /// Returns the next parts, perhaps none. Cancel safe.
    async fn next(&mut self) -> Result<Vec<Watched>, TooSlow> {
        match self {
            Self::Task(of_task) => Ok(of_task
                .next()
                .await
                .into_iter()
                .map(Watched::Event)
                .collect()),
            Self::Queue(watch) => watch.next().await,
        }
    }

    fn is_end(&self, part: &Watched) -> bool {
        matches!((self, part), (Self::Task(_), Watched::Event(event)) if event.status.is_final())
    }
}

/// A running watch. [`Self::next`] returns its events.
pub struct Watching {
    authentication: Authentication,
    caller: Caller,
    stop: tokio_util::sync::CancellationToken,
    source: Source,
    reader: Reader,
    ready: VecDeque<Watched>,
    /// The keys of the tasks in `ready`, as far as they were read.
    keys: BTreeMap<TaskId, Option<Bytes>>,
    /// The key of the last event that it gave.
    key: Option<Bytes>,
    /// How many parts it has returned since it yielded.
    given: u32,
    /// Set if nothing follows what is ready.
    over: Option<WatchOver>,
    beat_at: Instant,
    check_at: Instant,
    _wait: Wait,
}

impl Watching {
    /// True if nothing follows: the caller has seen the end.
    pub fn is_over(&self) -> bool {
        self.over.is_some() && self.ready.is_empty()
    }

    /// Returns the next part, or `None` after the last one.
    pub async fn next(&mut self) -> Option<Watched> {
        loop {
            if self.given >= GIVE_AT_ONCE {
                self.given = 0;
                tokio::task::yield_now().await;
            }
            self.read_keys().await;
            if let Some(next) = self.ready.pop_front() {
                self.given += 1;
                self.key = None;
                if let Watched::Event(event) = &next {
                    metrics::event_sent();
                    self.key = self.keys.get(&event.id).cloned().flatten();
                }
                self.beat_at = Instant::now() + BEAT_EVERY;
                return Some(next);
            }
            // They are read again with the next events.
            self.keys.clear();
            if self.over.is_some() {
                return None;
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => self.end(WatchEnd::Stopping),
                () = sleep_until(self.check_at) => {
                    self.check_at = Instant::now() + CHECK_EVERY;
                    if self.authentication.still_valid(&self.caller).is_err() {
                        self.end(WatchEnd::Unauthenticated);
                    }
                }
                next = self.source.next() => match next {
                    Ok(parts) => self.take(parts),
                    Err(TooSlow) => self.end(WatchEnd::TooSlow),
                },
                () = sleep_until(self.beat_at) => self.ready.push_back(Watched::Beat),
            }
        }
    }

    /// The key of the task of the last event, if SQL could be asked for it.
    pub fn key(&self) -> Option<&Bytes> {
        self.key.as_ref()
    }

    /// Reads the keys of the events that are ready, unless that of the next one is known.
    async fn read_keys(&mut self) {
        let Some(Watched::Event(next)) = self.ready.front() else {
            return;
        };
        if self.keys.contains_key(&next.id) {
            return;
        }
        let ids: BTreeSet<TaskId> = self
            .ready
            .iter()
            .filter_map(|part| match part {
                Watched::Event(event) => Some(event.id),
                _ => None,
            })
            .collect();
        let ids: Vec<TaskId> = ids.into_iter().take(KEYS_AT_ONCE).collect();
        // The next event is among them, or the next read begins with it.
        let ids = match ids.contains(&next.id) {
            true => ids,
            false => vec![next.id],
        };
        let known = self.reader.keys(&ids).await;
        self.keys = ids
            .into_iter()
            .map(|id| (id, known.get(&id).cloned()))
            .collect();
    }

    /// Adds parts, up to the end of the task.
    fn take(&mut self, parts: Vec<Watched>) {
        for part in parts {
            let is_end = self.source.is_end(&part);
            self.ready.push_back(part);
            if is_end {
                self.over = Some(WatchOver::Final);
                return;
            }
        }
    }

    fn end(&mut self, end: WatchEnd) {
        self.over = Some(match end {
            WatchEnd::Stopping => WatchOver::Stopping,
            WatchEnd::Unauthenticated => WatchOver::Unauthenticated,
            WatchEnd::TooSlow => WatchOver::TooSlow,
        });
        self.ready.push_back(Watched::End(end));
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        metrics::watch_ended(self.over.unwrap_or(WatchOver::Left));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: TaskId, status: TaskStatus, at_unix_ms: i64) -> TaskEvent {
        TaskEvent {
            id,
            queue: QueueName::new("q").unwrap(),
            status,
            at_unix_ms,
        }
    }

    #[test]
    fn a_watcher_of_a_task_sees_what_is_new_and_no_step_back() {
        use TaskStatus::{Assigned, Completed, Delayed, Pending, Queued};
        let id = TaskId::new();
        let mut life = Life { id, last: None };
        assert!(life.is_news(&event(id, Queued, 1000), true), "the first");
        life.last = Some(event(id, Assigned, 1000));
        for (status, at, is_truth, is_news) in [
            (Assigned, 2000, true, false),
            (Queued, 990, false, false),
            (Pending, 1000, false, false),
            (Queued, 1001, false, true),
            (Delayed, 1000, true, true),
            (Queued, 999, true, false),
            (Pending, 1900, true, false),
            (Pending, 2000, true, true),
            (Completed, 1, false, true),
        ] {
            assert_eq!(
                life.is_news(&event(id, status, at), is_truth),
                is_news,
                "{status:?} at {at}"
            );
        }
        life.last = Some(event(id, Queued, 1000));
        assert!(
            life.is_news(&event(id, Assigned, 960), false),
            "the clocks of two processes differ"
        );
        assert!(!life.is_news(&event(id, Assigned, 940), false));
        assert!(
            !life.is_news(&event(TaskId::new(), Assigned, 2000), false),
            "another task"
        );
    }
}
