//! One step of a subscription in a partition: read a page, insert its tasks, move the position.
//!
//! Each effect may be repeated, and the position moves last. It moves while the next step has begun.
//! Crash windows (`docs/internals`, "A record of a topic"):
//!
//! - After the page was read: nothing has happened.
//! - After the insert: this page, and the next one if it was inserted, are read again. Its tasks have the same ids, so those that are
//!   stored stay as they are.
//! - Two feeders at once: both insert the same ids, and the position moves only from the place that
//!   was read, so its counts count once.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use futures::{
    FutureExt as _,
    future::{BoxFuture, Either, Shared, select},
};

use super::{
    super::{
        error::{Error, Unavailable},
        insert::Handle,
    },
    pages::{self, PAGE, Page},
    record_task::record_task,
};
use crate::{
    bus::{Log, LogMessage, LogRecord},
    model::{
        InsertStatus, NewTask, OWN_QUEUE, PositionKey, PositionMove, QueueName, ReadCounts,
        ReadUpTo, Subscription, TaskId, in_short,
    },
    pipelines::context::Context,
    telemetry::metrics,
};

/// The move of a position, behind those before it.
pub(super) type Moving = Shared<BoxFuture<'static, Moved>>;

#[derive(Clone, PartialEq, Eq)]
pub(super) enum Moved {
    Done,
    /// Somebody else has moved the position.
    Elsewhere,
    Failed(String),
}

/// A step to do.
pub(super) struct Step {
    /// Unique in this process.
    pub(super) number: u64,
    pub(super) key: PositionKey,
    pub(super) subscription: Arc<Subscription>,
    pub(super) log: Arc<Log>,
    pub(super) from: ReadUpTo,
    pub(super) page: Page,
    /// In a topic of taskd itself: the queues whose tasks make no others. See [`super`].
    pub(super) left_out: Option<Arc<BTreeSet<QueueName>>>,
    /// The most records to take of the page.
    pub(super) most: usize,
    /// So many of the next records may have been inserted before, by another feeder or in vain.
    pub(super) may_be_repeated: usize,
    /// The move of the step before this one.
    pub(super) before: Option<Moving>,
    /// If there are no records, also check whether the log ends before the position.
    pub(super) is_look: bool,
}

/// What became of a step.
pub(super) enum Outcome {
    /// The tasks up to here are inserted, and the position moves. So many of the next records may
    /// have been inserted before.
    Inserted {
        to: ReadUpTo,
        may_be_repeated: usize,
        moving: Moving,
        /// The page behind it, if it is being read.
        next: Option<Page>,
    },
    /// There are no more records.
    AtEnd,
    /// Nothing can be inserted now. Some of the page may have been.
    Held(String),
    /// Somebody else has moved the position.
    Elsewhere,
    /// SQL refuses some record of the page: take fewer.
    Refused,
}

impl Step {
    pub(super) async fn run(self, context: Context, handle: Handle) -> (Self, Outcome) {
        let outcome = self.go(&context, &handle).await;
        (self, outcome)
    }

    async fn go(&self, context: &Context, handle: &Handle) -> Outcome {
        let records = match self.page.clone().await {
            Ok(records) => records,
            Err(error) => return Outcome::Held(in_short(&*error)),
        };
        let mut page = &records.messages[..records.messages.len().min(self.most)];
        let (Some(first), Some(last)) = (page.first(), page.last()) else {
            return match self.is_here().await {
                Ok(()) => self.at_end(context).await,
                Err(outcome) => outcome,
            };
        };
        let is_whole = page.len() == records.messages.len();
        let mut next = (records.is_full && is_whole).then(|| {
            let logs = context.bus.logs();
            pages::page(&logs, &self.log, self.key.partition, Some(last.offset))
        });
        let chosen = self.chosen(handle, page);
        let places: Vec<usize> = chosen.iter().map(|one| one.place).collect();
        let insert = Box::pin(self.insert(context, handle, chosen));
        let inserted = match while_read(next.as_ref(), insert).await {
            Ok(inserted) => inserted,
            Err(outcome) => return outcome,
        };
        // So at most one page is inserted beyond the next one after the position.
        if let Err(outcome) = self.is_here().await {
            return outcome;
        }
        let mut may_be_repeated = self.may_be_repeated.saturating_sub(page.len());
        if let Some((place, why)) = inserted.held {
            // What was inserted before it counts, so that it is not inserted again much later.
            page = &page[..place];
            next = None;
            may_be_repeated = PAGE;
            if page.is_empty() {
                return Outcome::Held(why);
            }
        }
        let Some(last) = page.last() else {
            return Outcome::AtEnd;
        };
        let matched = places.iter().filter(|place| **place < page.len()).count();
        let counts = ReadCounts {
            read: page.len() as u64,
            duplicates: inserted.duplicates,
            filtered: (page.len() - matched) as u64,
            refused: inserted.refused,
            skipped: self.skipped(context, first).await,
        };
        let to = ReadUpTo {
            after: Some(last.offset),
            count: Some(last.number + 1),
            replay: self.from.replay,
        };
        self.go_to(context, to, counts, may_be_repeated, next)
    }

    /// How many records have left before they were read.
    async fn skipped(&self, context: &Context, first: &LogMessage) -> u64 {
        let PositionKey {
            subscription,
            topic,
            partition,
        } = &self.key;
        let Some(count) = self.from.count else {
            return 0;
        };
        let mut skipped = first.number.saturating_sub(count);
        if skipped > 0 && self.log.is_attached {
            // A topic of somebody else may be compacted, or have transactions, whose offsets are no
            // records. Only what lies before its beginning was deleted by retention.
            let begins = context.bus.logs().first(&self.log).await;
            let begins = begins
                .ok()
                .and_then(|begins| begins.into_iter().nth(*partition as usize));
            let begin = begins.flatten().map_or(first.number, |begin| begin.major);
            skipped = begin.min(first.number).saturating_sub(count);
        }
        if skipped > 0 {
            tracing::warn!(
                "subscription {subscription} missed {skipped} records of topic {topic}, partition \
                 {partition}: retention deleted them before {}",
                first.offset
            );
        }
        if first.number < count {
            tracing::warn!(
                "topic {topic}, partition {partition}, has lost its records: subscription \
                 {subscription} goes on at {}",
                first.offset
            );
        }
        skipped
    }

    /// The records that match, with their tasks.
    fn chosen(&self, handle: &Handle, page: &[LogMessage]) -> Vec<Chosen> {
        let mut chosen = Vec::with_capacity(page.len());
        for (place, message) in page.iter().enumerate() {
            let record = &message.record;
            let matching = &self.subscription.matching;
            if self.is_left_out(record) || !matching.matches(&record.key, &record.attributes) {
                continue;
            }
            let replay = self.from.replay;
            let (id, mut task) = record_task(&self.subscription, replay, &self.key.topic, message);
            self.open_tree(handle, &mut task);
            chosen.push(Chosen { place, id, task });
        }
        chosen
    }

    /// If the subscription is a feed of a topology, its records open trees.
    fn open_tree(&self, handle: &Handle, task: &mut NewTask) {
        let stages = handle.stages();
        let Some((topology, stage)) = stages.of(&task.queue) else {
            return;
        };
        let name = &self.subscription.name;
        // A stage takes these tasks: it is for one worker, and so are they.
        if topology.feeds.iter().any(|feed| feed.name == *name)
            && let Err(error) = topology.complete_insert(stage, task)
        {
            tracing::warn!("a record of feed {name} opens no tree: {error}");
        }
    }

    fn is_left_out(&self, record: &LogRecord) -> bool {
        let Some(queues) = &self.left_out else {
            return false;
        };
        let mut attributes = record.attributes.iter();
        let of_queue = attributes.find(|(name, _)| name == OWN_QUEUE);
        of_queue.is_some_and(|(_, of)| queues.iter().any(|queue| queue.as_str() == of))
    }

    async fn insert(
        &self,
        context: &Context,
        handle: &Handle,
        mut chosen: Vec<Chosen>,
    ) -> Result<Inserted, Outcome> {
        if self.may_be_repeated > 0 && !chosen.is_empty() {
            // A task that is stored may be completed, and must not go to its queue again.
            let ids: Vec<TaskId> = chosen.iter().map(|one| one.id).collect();
            let stored = context.store.queues_of(&ids).await;
            let stored = stored.map_err(|error| Outcome::Held(in_short(&error)))?;
            let stored: HashSet<TaskId> = stored.into_iter().map(|(id, _)| id).collect();
            chosen.retain(|one| !stored.contains(&one.id));
        }
        let mut inserted = Inserted::default();
        if chosen.is_empty() {
            return Ok(inserted);
        }
        let mut ids = Vec::with_capacity(chosen.len());
        let mut tasks = Vec::with_capacity(chosen.len());
        let mut places = Vec::with_capacity(chosen.len());
        for Chosen { place, id, task } in chosen {
            places.push(place);
            ids.push(id);
            tasks.push(task);
        }
        let alone = (tasks.len() == 1).then(|| tasks[0].clone());
        let answers = match handle.insert_records(&ids, tasks).await {
            Ok(answers) => answers,
            Err(Error::Unavailable(Unavailable::Store(error))) if error.is_refusal() => {
                let Some(task) = alone else {
                    return Err(Outcome::Refused);
                };
                let buried = handle.bury(task, &error.to_string()).await;
                buried.map_err(|error| Outcome::Held(in_short(&error)))?;
                inserted.refused += 1;
                return Ok(inserted);
            }
            Err(error) => return Err(Outcome::Held(error.to_string())),
        };
        for ((place, id), answer) in places.into_iter().zip(&ids).zip(answers) {
            match answer.status {
                InsertStatus::Created => {}
                InsertStatus::Duplicate if answer.id == Some(*id) => {}
                InsertStatus::Duplicate => inserted.duplicates += 1,
                InsertStatus::Rejected => inserted.refused += 1,
                InsertStatus::TryLater => {
                    inserted.held = Some((place, answer.error));
                    break;
                }
            }
        }
        Ok(inserted)
    }

    /// There are no records after the position. Checks whether the log ends before it.
    ///
    /// On Kafka, offsets count the records, so such a log was made anew, and all of it is new. In
    /// Redis they are times. A stream that lost its newest records, for example in a failover, ends
    /// before the position, and everything up to its end was read: reading it again would give each
    /// record that is left a second task. Only a stream that was deleted, and got records by a clock
    /// that was set back, may have as many records as the position has counted, and end before it. A
    /// stream that does not exist says nothing: its next records lie after the position.
    async fn at_end(&self, context: &Context) -> Outcome {
        let Some(after) = self.from.after.filter(|_| self.is_look) else {
            return Outcome::AtEnd;
        };
        let logs = context.bus.logs();
        let end = match logs.counted_end(&self.log, self.key.partition).await {
            Ok(end) => end,
            Err(error) => return Outcome::Held(in_short(&error)),
        };
        let Some(last) = end.last.filter(|last| *last < after) else {
            return Outcome::AtEnd;
        };
        let PositionKey {
            subscription,
            topic,
            partition,
        } = &self.key;
        let offsets_count = context.bus.has_other_readers();
        let has_as_many = self.from.count.is_some_and(|count| end.count >= count);
        let to = if offsets_count || has_as_many {
            tracing::warn!(
                "topic {topic}, partition {partition}, ends before the position of subscription \
                 {subscription}: it was made anew, and is read from its beginning"
            );
            ReadUpTo {
                after: None,
                count: Some(0),
                replay: self.from.replay + 1,
            }
        } else {
            tracing::warn!(
                "topic {topic}, partition {partition}, has lost its newest records: subscription \
                 {subscription} goes on after {last}, and had read up to {after}"
            );
            ReadUpTo {
                after: Some(last),
                count: Some(end.count),
                replay: self.from.replay,
            }
        };
        self.go_to(context, to, ReadCounts::default(), PAGE, None)
    }

    /// Moves the position, as soon as somebody waits for it.
    fn go_to(
        &self,
        context: &Context,
        to: ReadUpTo,
        counts: ReadCounts,
        may_be_repeated: usize,
        next: Option<Page>,
    ) -> Outcome {
        let moved = PositionMove {
            key: self.key.clone(),
            from: self.from,
            to,
            counts,
        };
        let store = Arc::clone(&context.store);
        let moving = async move {
            match store.move_position(&moved).await {
                Ok(true) => {
                    metrics::subscription_read(moved.key.subscription.as_str(), &counts);
                    Moved::Done
                }
                Ok(false) => Moved::Elsewhere,
                Err(error) => Moved::Failed(in_short(&error)),
            }
        };
        Outcome::Inserted {
            to,
            may_be_repeated,
            moving: moving.boxed().shared(),
            next,
        }
    }

    /// Waits until the position has moved to where this step begins.
    async fn is_here(&self) -> Result<(), Outcome> {
        let Some(before) = &self.before else {
            return Ok(());
        };
        match before.clone().await {
            Moved::Done => Ok(()),
            Moved::Elsewhere => Err(Outcome::Elsewhere),
            Moved::Failed(why) => Err(Outcome::Held(why)),
        }
    }
}

/// Waits for `act`, and meanwhile has the page read.
async fn while_read<T>(page: Option<&Page>, act: impl Future<Output = T> + Unpin) -> T {
    let Some(page) = page else {
        return act.await;
    };
    match select(act, page.clone()).await {
        Either::Left((done, _)) => done,
        Either::Right((_, act)) => act.await,
    }
}

/// A record of the page that matches, with its task.
struct Chosen {
    place: usize,
    id: TaskId,
    task: NewTask,
}

/// What an insert left out.
#[derive(Default)]
struct Inserted {
    duplicates: u64,
    refused: u64,
    /// The first record of the page that cannot be inserted now, and why.
    held: Option<(usize, String)>,
}
