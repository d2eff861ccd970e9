//! Reads one feed: each record opens a tree, and is acknowledged.
//!
//! Each effect may be repeated, and the acknowledgement comes last. Crash windows
//! (`docs/internals`, "A record of a feed"):
//!
//! - After records were read: nothing is promised, and the source hands them out again.
//! - After the insert: the records are read again. Their tasks have the same ids, so those that are
//!   stored stay as they are.
//! - After the acknowledgement, before its row is removed: it is sent again, and changes nothing.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    super::{
        error::{Error, Unavailable},
        insert::Handle,
    },
    record_task::{record_task, reference_of, task_of},
};
use crate::{
    feeds::{self, Feed, FeedRecord},
    model::{
        DeadLetter, FeedAck, FeedCounts, FeedSettings, InsertAnswer, InsertStatus, NewTask, Offset,
        QueueName, TaskId, Topology, TreeState, feed_held, in_short,
    },
    pipelines::context::Context,
    runtime::{LastSaid, Loop, pauses},
    store::StoredFeed,
    telemetry::metrics::{self, FeedHold, FeedResult},
};

/// How long a feed waits that cannot insert, at first and at most.
const HELD_FIRST: Duration = Duration::from_millis(50);
const HELD_MOST: Duration = Duration::from_secs(1);
/// How often the state of a feed is stored, if it has changed.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How often records whose trees are open are claimed again.
const KEEP_EVERY: Duration = Duration::from_secs(10);
/// How often to look for records that other readers have had for long.
const TAKE_OVER_EVERY: Duration = Duration::from_secs(5);
/// How many records may wait to be acknowledged, and how many may have open trees, before no more
/// are read.
const MOST_DUE: usize = 10_000;
const MOST_OPEN: usize = 100_000;
/// How long a stop waits for the last acknowledgements.
const LAST_ACKS: Duration = Duration::from_secs(2);

/// Why a feed cannot go on: one line for people.
type Why = String;

/// The reading of one feed by this process.
pub(super) struct Reader {
    context: Context,
    handle: Handle,
    topology: Arc<Topology>,
    /// The place of the feed in the topology.
    place: usize,
    cx: Loop,
    state: Mutex<State>,
    /// There are enough acknowledgements for a batch.
    batch: Notify,
}

#[derive(Default)]
struct State {
    /// What SQL had is known.
    is_read: bool,
    run: u64,
    counts: FeedCounts,
    /// Records to acknowledge that do not wait for a tree.
    due: BTreeSet<Offset>,
    /// Records whose trees are open, or have ended and are not acknowledged.
    open: BTreeSet<Offset>,
    /// How many rows of acknowledgements SQL has.
    rows: u64,
    held: Option<(FeedHold, Why)>,
    /// Why the last acknowledgement failed.
    ack_error: Option<Why>,
    /// What SQL has.
    stored: Option<StoredFeed>,
}

/// A record on its way into SQL.
struct Taken {
    reference: Offset,
    id: TaskId,
    task: NewTask,
}

impl Reader {
    pub(super) fn new(
        context: Context,
        handle: Handle,
        topology: Arc<Topology>,
        place: usize,
        cx: Loop,
    ) -> Self {
        Self {
            context,
            handle,
            topology,
            place,
            cx,
            state: Mutex::default(),
            batch: Notify::new(),
        }
    }

    fn settings(&self) -> &FeedSettings {
        &self.topology.feeds[self.place]
    }

    fn name(&self) -> &str {
        self.settings().name.as_str()
    }

    /// Reads until the stop. After an error it begins again after a pause; pauses grow until a record
    /// comes.
    pub(super) async fn run(self) {
        let Some(feed) = feeds::feed(self.settings()) else {
            return;
        };
        let mut waits = pauses();
        let mut said = LastSaid::nothing();
        while !self.cx.stop.is_cancelled() {
            let before = self.state.lock().counts;
            let Err(why) = self.read_and_acknowledge(&*feed).await else {
                break;
            };
            if self.state.lock().counts != before {
                waits = pauses();
            }
            if said.is_news(&why) {
                tracing::warn!("feed {} waits: {why}", self.name());
            }
            self.hold(FeedHold::Source, why);
            self.tell(None).await;
            self.cx.beat();
            self.cx.pause(waits.next().unwrap_or(HELD_MOST)).await;
        }
        let last = tokio::time::timeout(LAST_ACKS, async {
            while matches!(self.acknowledge_some(&*feed).await, Ok(sent) if sent > 0) {}
        });
        // What is not acknowledged now is read again.
        drop(last.await);
        feed.close().await;
        self.tell(None).await;
        metrics::feed_held(self.name(), None);
        metrics::feed_left(self.name(), 0, Some(0));
    }

    /// Returns at the stop.
    async fn read_and_acknowledge(&self, feed: &dyn Feed) -> Result<(), Why> {
        self.begin(feed).await?;
        tokio::select! {
            read = self.read(feed) => read,
            () = self.acknowledge(feed) => Ok(()),
            () = self.keep_telling(feed) => Ok(()),
        }
    }

    /// Opens the feed. If its source does not know taskd, a new run begins, whose records are new.
    async fn begin(&self, feed: &dyn Feed) -> Result<(), Why> {
        let stored = self.context.store.feeds().await;
        let stored = stored.map_err(|error| in_short(&error))?;
        let stored = stored
            .into_iter()
            .find(|one| one.name == self.settings().name);
        let known_run = stored.as_ref().map_or(0, |stored| stored.run);
        let counts = {
            let mut state = self.state.lock();
            if !state.is_read {
                state.counts = stored
                    .as_ref()
                    .map(|stored| stored.counts)
                    .unwrap_or_default();
                state.is_read = true;
            }
            state.run = known_run;
            state.stored = stored;
            state.counts
        };
        let is_known = feed.open().await.map_err(|error| in_short(&error))?;
        if is_known && known_run > 0 {
            return Ok(());
        }
        // Stored before the source knows taskd, so that no record of the new run gets an old id.
        let now_ms = self.context.clock.now_unix_ms().max(0).unsigned_abs();
        let run = now_ms.max(known_run + 1);
        let new = StoredFeed {
            name: self.settings().name.clone(),
            run,
            counts,
            acks_pending: 0,
            held: String::new(),
        };
        let kept = self.context.store.keep_feed(&new).await;
        kept.map_err(|error| in_short(&error))?;
        feed.begin().await.map_err(|error| in_short(&error))?;
        *self.state.lock() = State {
            is_read: true,
            run,
            counts,
            stored: Some(new),
            ..State::default()
        };
        Ok(())
    }

    async fn read(&self, feed: &dyn Feed) -> Result<(), Why> {
        let mut looked_at: Option<Instant> = None;
        while self.wait_for_room(false).await {
            if looked_at.is_none_or(|at| at.elapsed() >= TAKE_OVER_EVERY) {
                let taken = feed.take_over().await.map_err(|error| in_short(&error))?;
                looked_at = (!taken.is_more).then(Instant::now);
                self.send_to_queues(feed, taken.to_queues).await?;
                if !self.take(taken.records).await? {
                    break;
                }
            }
            let records = feed.next().await.map_err(|error| in_short(&error))?;
            self.cx.beat();
            self.go_on();
            if !records.is_empty() && !self.take(records).await? {
                break;
            }
        }
        Ok(())
    }

    /// Inserts tasks of records that go to queues, and acknowledges these. Those that a queue does not
    /// take now stay where they are, and are found again.
    async fn send_to_queues(
        &self,
        feed: &dyn Feed,
        records: Vec<(QueueName, FeedRecord)>,
    ) -> Result<(), Why> {
        let run = self.state.lock().run;
        for (queue, record) in records {
            let at = record.reference;
            let content = record.content.unwrap_or_default();
            let (id, task) = task_of(self.settings(), run, at, content, &queue);
            let answers = Box::pin(self.handle.insert_records(&[id], vec![task])).await;
            let is_stored = |answer: &InsertAnswer| answer.status != InsertStatus::TryLater;
            if answers.is_ok_and(|answers| answers.iter().all(is_stored)) {
                self.send(feed, &[at]).await?;
            }
        }
        Ok(())
    }

    /// Inserts the trees of records. Returns false if the stop came before all were stored.
    async fn take(&self, records: Vec<FeedRecord>) -> Result<bool, Why> {
        let run = self.state.lock().run;
        let mut may_be_stored = records.iter().any(|record| record.may_be_repeated);
        let mut rest = Vec::with_capacity(records.len());
        for record in records {
            let reference = record.reference;
            let Some(content) = record.content else {
                self.due([reference]);
                continue;
            };
            let (id, task) = record_task(&self.topology, self.settings(), run, reference, content)?;
            rest.push(Taken {
                reference,
                id,
                task,
            });
        }
        let mut at_once = rest.len();
        loop {
            if may_be_stored {
                self.take_out_stored(&mut rest).await?;
            }
            if rest.is_empty() {
                return Ok(true);
            }
            at_once = at_once.min(rest.len());
            let ids: Vec<TaskId> = rest[..at_once].iter().map(|taken| taken.id).collect();
            let tasks = rest[..at_once].iter().map(|taken| taken.task.clone());
            let inserted = Box::pin(self.handle.insert_records(&ids, tasks.collect())).await;
            may_be_stored = true;
            let (hold, why) = match inserted {
                Ok(answers) => {
                    let mut later = None;
                    let mut done = HashSet::new();
                    for (taken, answer) in rest.iter().zip(answers) {
                        match answer.status {
                            InsertStatus::Created => {
                                self.stored(taken.reference);
                                done.insert(taken.id);
                            }
                            InsertStatus::Rejected => {
                                self.refused(taken.reference);
                                done.insert(taken.id);
                            }
                            InsertStatus::Duplicate => {}
                            InsertStatus::TryLater => later = Some(answer.error),
                        }
                    }
                    rest.retain(|taken| !done.contains(&taken.id));
                    let Some(why) = later else { continue };
                    (self.hold_of(FeedHold::QueueFull), why)
                }
                Err(Error::Unavailable(Unavailable::Store(error))) if error.is_refusal() => {
                    if at_once > 1 {
                        at_once /= 2;
                        continue;
                    }
                    let taken = rest.remove(0);
                    self.bury(taken, &error.to_string()).await?;
                    continue;
                }
                Err(error @ Error::Busy(_)) => {
                    (self.hold_of(FeedHold::QueueFull), error.to_string())
                }
                Err(error) => (FeedHold::Store, error.to_string()),
            };
            self.hold(hold, why);
            self.cx.beat();
            self.cx.pause(HELD_FIRST).await;
            if !self.wait_for_room(true).await {
                return Ok(false);
            }
        }
    }

    /// The reason for which nothing can be inserted, or this one.
    fn hold_of(&self, otherwise: FeedHold) -> FeedHold {
        self.full(false).map_or(otherwise, |(hold, _)| hold)
    }

    /// Takes out the records whose tasks are stored. Such a task may be completed, and must not go to
    /// its queue again.
    async fn take_out_stored(&self, rest: &mut Vec<Taken>) -> Result<(), Why> {
        let ids: Vec<TaskId> = rest.iter().map(|taken| taken.id).collect();
        let store = &self.context.store;
        let stored = store.queues_of(&ids).await;
        let stored = stored.map_err(|error| in_short(&error))?;
        let stored: Vec<TaskId> = stored.into_iter().map(|(id, _)| id).collect();
        if stored.is_empty() {
            return Ok(());
        }
        let mut open = HashSet::new();
        if self.settings().ack == FeedAck::Done {
            let trees = store.trees_by_id(&stored).await;
            for tree in trees.map_err(|error| in_short(&error))? {
                if tree.state == TreeState::Open {
                    open.insert(tree.id);
                }
            }
        }
        let by_id: HashMap<TaskId, Offset> = rest
            .iter()
            .map(|taken| (taken.id, taken.reference))
            .collect();
        let stored_references = stored.iter().filter_map(|id| by_id.get(id).copied());
        if self.settings().ack == FeedAck::Done {
            let run = self.state.lock().run;
            let ended = stored.iter().filter(|id| !open.contains(*id));
            let ended = ended.filter_map(|id| by_id.get(id));
            let ended: Vec<String> = ended.map(|at| format!("{run}:{at}")).collect();
            if !ended.is_empty() {
                // Most are there since the trees ended.
                let added = store.add_acks(&self.settings().name, &ended).await;
                added.map_err(|error| in_short(&error))?;
            }
            self.state.lock().open.extend(stored_references);
        } else {
            self.due(stored_references);
        }
        let stored: HashSet<TaskId> = stored.into_iter().collect();
        rest.retain(|taken| !stored.contains(&taken.id));
        let count = stored.len() as u64;
        self.state.lock().counts.duplicates += count;
        metrics::feed_records(self.name(), FeedResult::Duplicate, count);
        Ok(())
    }

    /// A record has a tree.
    fn stored(&self, reference: Offset) {
        self.state.lock().counts.trees += 1;
        metrics::feed_records(self.name(), FeedResult::Tree, 1);
        match self.settings().ack {
            FeedAck::Done => {
                self.state.lock().open.insert(reference);
            }
            FeedAck::Stored | FeedAck::None => self.due([reference]),
        }
    }

    /// A record has a dead letter.
    fn refused(&self, reference: Offset) {
        self.state.lock().counts.refused += 1;
        metrics::feed_records(self.name(), FeedResult::Refused, 1);
        self.due([reference]);
    }

    /// Keeps a record that SQL refuses as a letter.
    async fn bury(&self, taken: Taken, why: &str) -> Result<(), Why> {
        let letter = DeadLetter {
            reason: why.to_owned(),
            at_unix_ms: self.context.clock.now_unix_ms(),
            queue: taken.task.queue.clone(),
            task: Some(taken.task),
            ..DeadLetter::default()
        };
        let sent = self.context.letters.send_once(vec![letter]).await;
        sent.map_err(|error| in_short(&error))?;
        self.refused(taken.reference);
        Ok(())
    }

    /// Adds records to acknowledge.
    fn due(&self, references: impl IntoIterator<Item = Offset>) {
        if self.settings().ack == FeedAck::None {
            return;
        }
        let mut state = self.state.lock();
        state.due.extend(references);
        if state.due.len() >= self.settings().ack_batch as usize {
            self.batch.notify_one();
        }
    }

    /// Acknowledges records until the reading ends, and claims those whose trees are open.
    async fn acknowledge(&self, feed: &dyn Feed) {
        let mut waits = pauses();
        let mut kept_at: Option<Instant> = None;
        loop {
            let wait = self.cx.clock().sleep(self.settings().ack_interval);
            tokio::select! {
                () = self.batch.notified() => {}
                () = wait => {}
            }
            let sent = loop {
                match self.acknowledge_some(feed).await {
                    Ok(0) => break Ok(()),
                    Ok(_) => {}
                    Err(why) => break Err(why),
                }
            };
            if sent.is_ok() && kept_at.is_none_or(|at| at.elapsed() >= KEEP_EVERY) {
                let open: Vec<Offset> = self.state.lock().open.iter().copied().collect();
                // Otherwise they are claimed the next time.
                if open.is_empty() || feed.keep(&open).await.is_ok() {
                    kept_at = Some(Instant::now());
                }
            }
            let wait = match &sent {
                Ok(()) => {
                    waits = pauses();
                    None
                }
                Err(_) => waits.next(),
            };
            self.state.lock().ack_error = sent.err();
            if let Some(wait) = wait {
                self.cx.clock().sleep(wait).await;
            }
        }
    }

    /// Acknowledges a batch. Returns how many records it had.
    async fn acknowledge_some(&self, feed: &dyn Feed) -> Result<usize, Why> {
        let most = self.settings().ack_batch;
        let (due, run, waits_for_trees) = {
            let state = self.state.lock();
            let due: Vec<Offset> = state.due.iter().take(most as usize).copied().collect();
            (due, state.run, !state.open.is_empty() || state.rows > 0)
        };
        if !due.is_empty() {
            self.send(feed, &due).await?;
            let mut state = self.state.lock();
            for reference in &due {
                state.due.remove(reference);
            }
            return Ok(due.len());
        }
        if self.settings().ack != FeedAck::Done || !waits_for_trees {
            return Ok(0);
        }
        let name = &self.settings().name;
        let store = &self.context.store;
        let rows = store.due_acks(name, most).await;
        let rows = rows.map_err(|error| in_short(&error))?;
        if rows.is_empty() {
            return Ok(0);
        }
        // The source has lost those of other runs.
        let due = rows.iter().filter_map(|row| reference_of(row, run));
        let due: Vec<Offset> = due.collect();
        if !due.is_empty() {
            self.send(feed, &due).await?;
        }
        let removed = store.remove_acks(name, &rows).await;
        removed.map_err(|error| in_short(&error))?;
        let mut state = self.state.lock();
        for reference in &due {
            state.open.remove(reference);
        }
        Ok(rows.len())
    }

    async fn send(&self, feed: &dyn Feed, due: &[Offset]) -> Result<(), Why> {
        let sent = feed.ack(due).await;
        let count = sent.map_err(|error| format!("cannot acknowledge: {}", in_short(&error)))?;
        self.state.lock().counts.acknowledged += count;
        metrics::feed_records(self.name(), FeedResult::Acknowledged, count);
        Ok(())
    }

    /// Waits until something can be inserted, and with `again` until there is room for a while:
    /// otherwise each record would wait for its own room. Returns false if the stop comes first.
    async fn wait_for_room(&self, mut again: bool) -> bool {
        let mut wait = HELD_FIRST;
        while !self.cx.stop.is_cancelled() {
            let Some((hold, why)) = self.full(again) else {
                return true;
            };
            again = true;
            self.hold(hold, why);
            self.cx.beat();
            if !self.cx.pause(wait).await {
                return false;
            }
            wait = (wait * 2).min(HELD_MOST);
            if hold == FeedHold::MaxOpen {
                let stages = self.handle.stages();
                let open = self.context.occupancy.open_trees();
                let counted = open.refresh(&stages, &*self.context.store).await;
                if let Err(error) = counted {
                    self.hold(FeedHold::Store, in_short(&error));
                }
            }
        }
        false
    }

    /// Why nothing can be inserted now. With `again`, what was full counts as full until a tenth of it
    /// is free.
    fn full(&self, again: bool) -> Option<(FeedHold, Why)> {
        let is_full = |count: u64, most: u64| match again {
            true => count.saturating_mul(10) > most.saturating_mul(9),
            false => count >= most,
        };
        let (due, open, ack_error) = {
            let state = self.state.lock();
            (state.due.len(), state.open.len(), state.ack_error.clone())
        };
        if is_full(due as u64, MOST_DUE as u64) {
            let why = ack_error.unwrap_or_default();
            let why = format!("{due} records wait to be acknowledged. {why}");
            return Some((FeedHold::Acks, why));
        }
        if is_full(open as u64, MOST_OPEN as u64) {
            let why = format!("the trees of {open} records are open");
            return Some((FeedHold::Acks, why));
        }
        if let Some(shortage) = self.context.gates.shortage() {
            return Some((FeedHold::Memory, shortage.why));
        }
        let Topology { name, max_open, .. } = &*self.topology;
        let open = self.context.occupancy.open_trees().of(name);
        if *max_open > 0 && is_full(open, u64::from(*max_open)) {
            let why =
                format!("{open} trees of topology {name} are open; its max_open is {max_open}");
            return Some((FeedHold::MaxOpen, why));
        }
        let queue = &self.topology.stages[self.settings().into].queue;
        let most = self.context.settings.queues.get(queue).max_unfinished;
        let unfinished = self.context.occupancy.unfinished_of(queue);
        if is_full(unfinished, most) {
            let why = format!(
                "queue {queue} has {unfinished} unfinished tasks; its max_unfinished is {most}"
            );
            return Some((FeedHold::QueueFull, why));
        }
        None
    }

    fn hold(&self, hold: FeedHold, why: Why) {
        self.state.lock().held = Some((hold, why));
    }

    /// Nothing holds the feed any more.
    fn go_on(&self) {
        self.state.lock().held = None;
    }

    async fn keep_telling(&self, feed: &dyn Feed) {
        loop {
            self.tell(Some(feed)).await;
            self.cx.clock().sleep(TELL_EVERY).await;
        }
    }

    /// Shows the state of the feed to all processes, and in the metrics.
    async fn tell(&self, feed: Option<&dyn Feed>) {
        let store = &self.context.store;
        let name = &self.settings().name;
        if self.settings().ack == FeedAck::Done
            && let Ok(rows) = store.count_acks(name).await
        {
            self.state.lock().rows = rows;
        }
        let behind = match feed {
            // Whoever reads says why it does not answer.
            Some(feed) => feed.health().await.ok().flatten(),
            None => None,
        };
        let (present, hold, is_stored) = {
            let state = self.state.lock();
            let held = state.held.clone();
            let held = held.or_else(|| Some((FeedHold::Acks, state.ack_error.clone()?)));
            let present = StoredFeed {
                name: name.clone(),
                run: state.run,
                counts: state.counts,
                acks_pending: state.due.len() as u64 + state.rows,
                held: held
                    .as_ref()
                    .map(|(_, why)| feed_held(why))
                    .unwrap_or_default(),
            };
            let is_stored = !state.is_read || state.stored.as_ref() == Some(&present);
            (present, held.map(|(hold, _)| hold), is_stored)
        };
        metrics::feed_held(self.name(), hold);
        metrics::feed_left(self.name(), present.acks_pending, behind);
        if is_stored {
            return;
        }
        // Otherwise it is told the next time.
        if store.keep_feed(&present).await.is_ok() {
            self.state.lock().stored = Some(present);
        }
    }
}
