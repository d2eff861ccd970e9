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
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    super::{
        error::{Error, Unavailable},
        insert::{Handle, is_too_large},
    },
    record_task::{record_task, reference_in, reference_of, task_of},
};
use crate::{
    feeds::{self, Feed, FeedRecord, TakenOver},
    model::{
        FeedAck, FeedCounts, FeedSettings, InsertStatus, NewTask, Offset, QueueName, TaskId,
        Topology, in_short, shorten,
    },
    pipelines::context::Context,
    runtime::{LastSaid, Loop, pauses},
    store::{self, StoredFeed},
    telemetry::metrics::{self, FeedHold, FeedResult},
};

/// How long a feed waits that cannot insert, at first and at most.
const HELD_FIRST: Duration = Duration::from_millis(50);
const HELD_MOST: Duration = Duration::from_secs(1);
/// How often the state of a feed is stored, if it has changed.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How often the records that this reader has are claimed again.
const KEEP_EVERY: Duration = Duration::from_secs(10);
/// How often to look for records that other readers have had for long.
const TAKE_OVER_EVERY: Duration = Duration::from_secs(5);
/// How many records may wait to be acknowledged before no more are read.
const MOST_DUE: usize = 10_000;
/// The most characters of the reason that a feed waits, as it is stored.
const MAX_HELD: usize = 300;
/// How long a stop waits for the last acknowledgements.
const LAST_ACKS: Duration = Duration::from_secs(2);

/// Why a feed cannot go on: one line for people.
type Why = String;

/// Why the reading ends, and begins again after a pause.
struct Halt {
    hold: FeedHold,
    why: Why,
}

impl Halt {
    fn of_source(error: feeds::Error) -> Self {
        let why = in_short(&error);
        Self {
            hold: FeedHold::Source,
            why,
        }
    }

    fn of_store(error: store::Error) -> Self {
        let why = in_short(&error);
        Self {
            hold: FeedHold::Store,
            why,
        }
    }
}

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
    /// Records that are too large even for their letters. They stay in the source.
    too_large: BTreeSet<Offset>,
    /// How many rows of acknowledgements SQL has.
    rows: u64,
    held: Option<(FeedHold, Why)>,
    /// Why the last acknowledgement failed.
    ack_error: Option<Why>,
    /// Why a record that another reader had was not taken over.
    rule_error: Option<Why>,
    /// What SQL has.
    in_sql: Option<StoredFeed>,
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
            let Err(Halt { hold, why }) = self.read_and_acknowledge(&*feed).await else {
                break;
            };
            if self.state.lock().counts != before {
                waits = pauses();
            }
            if said.is_news(&why) {
                tracing::warn!("feed {} waits: {why}", self.name());
            }
            self.hold(hold, why);
            // Its error would be the same.
            drop(self.tell(None).await);
            self.cx.beat();
            self.cx.pause(waits.next().unwrap_or(HELD_MOST)).await;
        }
        let last = tokio::time::timeout(LAST_ACKS, async {
            while matches!(self.acknowledge_some(&*feed).await, Ok(sent) if sent > 0) {}
        });
        // What is not acknowledged now is read again.
        drop(last.await);
        feed.close().await;
        drop(self.tell(None).await);
        metrics::feed_held(self.name(), None);
        metrics::feed_left(self.name(), 0, Some(0));
    }

    /// Returns at the stop.
    async fn read_and_acknowledge(&self, feed: &dyn Feed) -> Result<(), Halt> {
        self.begin(feed).await?;
        // Otherwise the source would hand them out again, perhaps after their trees have left SQL.
        let sent = self.acknowledge_all(feed).await;
        self.state.lock().ack_error = sent.err();
        tokio::select! {
            read = self.read(feed) => read,
            () = self.acknowledge(feed) => Ok(()),
            () = self.keep(feed) => Ok(()),
            halt = self.keep_telling(feed) => Err(halt),
        }
    }

    /// Opens the feed. If its source does not know taskd, a new run begins, whose records are new.
    async fn begin(&self, feed: &dyn Feed) -> Result<(), Halt> {
        let name = &self.settings().name;
        let source = self.settings().source.identity();
        let feeds = self.context.store.feeds().await.map_err(Halt::of_store)?;
        let last_run = feeds.iter().filter(|one| one.name == *name);
        let last_run = last_run.map(|one| one.run).max().unwrap_or(0);
        let stored = feeds
            .into_iter()
            .find(|one| one.name == *name && one.source == source);
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
            state.in_sql = stored;
            state.counts
        };
        let is_known = feed.open().await.map_err(Halt::of_source)?;
        if is_known && known_run > 0 {
            return Ok(());
        }
        // Stored before the source knows taskd, so that no record of the new run gets an old id.
        let now_ms = self.context.clock.now_unix_ms().max(0).unsigned_abs();
        let mut new = StoredFeed {
            name: name.clone(),
            source,
            run: now_ms.max(last_run + 1),
            counts,
            acks_pending: 0,
            held: String::new(),
        };
        let kept = self.context.store.keep_feed(&new).await;
        // Another process may have begun a later run meanwhile.
        new.run = kept.map_err(Halt::of_store)?;
        feed.begin().await.map_err(Halt::of_source)?;
        *self.state.lock() = State {
            is_read: true,
            run: new.run,
            counts,
            in_sql: Some(new),
            ..State::default()
        };
        Ok(())
    }

    async fn read(&self, feed: &dyn Feed) -> Result<(), Halt> {
        let mut looked_at: Option<Instant> = None;
        while self.wait_for_room(false).await {
            if looked_at.is_none_or(|at| at.elapsed() >= TAKE_OVER_EVERY) {
                let taken = match feed.take_over().await {
                    Ok(taken) => taken,
                    // If the source is away, the next read says it; otherwise only the rules wait.
                    Err(error) => TakenOver {
                        failed: Some(in_short(&error)),
                        ..TakenOver::default()
                    },
                };
                looked_at = (!taken.is_more).then(Instant::now);
                self.state.lock().rule_error = taken.failed;
                self.send_to_queues(feed, taken.to_queues).await;
                if !self.take(taken.records).await? {
                    break;
                }
            }
            let records = feed.next().await.map_err(Halt::of_source)?;
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
    async fn send_to_queues(&self, feed: &dyn Feed, records: Vec<(QueueName, FeedRecord)>) {
        let run = self.state.lock().run;
        for (queue, record) in records {
            let at = record.reference;
            let content = record.content.unwrap_or_default();
            let (id, task) = task_of(self.settings(), run, at, content, &queue);
            let failed = if is_too_large(&task) {
                Some("it is too large for a task".to_owned())
            } else {
                let answers = Box::pin(self.handle.insert_records(&[id], vec![task])).await;
                match answers.map(|mut answers| answers.pop()) {
                    Ok(Some(answer)) if answer.status == InsertStatus::TryLater => {
                        Some(answer.error)
                    }
                    Ok(_) => self.send(feed, &[at]).await.err(),
                    Err(error) => Some(error.to_string()),
                }
            };
            if let Some(why) = failed {
                let why = format!("a rule of pending fails for {at}: {why}");
                self.state.lock().rule_error.get_or_insert(why);
            }
        }
    }

    /// Inserts the trees of records. Returns false if the stop came before all were stored.
    async fn take(&self, records: Vec<FeedRecord>) -> Result<bool, Halt> {
        let run = self.state.lock().run;
        let mut may_be_stored = records.iter().any(|record| record.may_be_repeated);
        let mut rest = Vec::with_capacity(records.len());
        for record in records {
            let reference = record.reference;
            let Some(content) = record.content else {
                self.due([reference]);
                continue;
            };
            if self.state.lock().too_large.contains(&reference) {
                continue;
            }
            let task = record_task(&self.topology, self.settings(), run, reference, content);
            let (id, task) = task.map_err(|why| Halt {
                hold: FeedHold::QueueFull,
                why,
            })?;
            rest.push(Taken {
                reference,
                id,
                task,
            });
        }
        let mut at_once = rest.len();
        let mut wait = HELD_FIRST;
        while !rest.is_empty() {
            let left = rest.len();
            let held = self.insert(&mut rest, &mut at_once, may_be_stored).await;
            may_be_stored = true;
            if rest.len() < left {
                wait = HELD_FIRST;
            }
            let Some((hold, why)) = held else { continue };
            self.hold(hold, why);
            self.cx.beat();
            self.cx.pause(wait).await;
            wait = (wait * 2).min(HELD_MOST);
            if !self.wait_for_room(true).await {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Inserts up to `at_once` of the records, and takes out those that are stored or have a letter.
    /// Returns why others have to wait, if they do.
    async fn insert(
        &self,
        rest: &mut Vec<Taken>,
        at_once: &mut usize,
        may_be_stored: bool,
    ) -> Option<(FeedHold, Why)> {
        if may_be_stored && let Err(error) = self.take_out_stored(rest).await {
            return Some((FeedHold::Store, in_short(&error)));
        }
        *at_once = (*at_once).min(rest.len());
        if *at_once == 0 {
            return None;
        }
        let ids: Vec<TaskId> = rest[..*at_once].iter().map(|taken| taken.id).collect();
        let tasks = rest[..*at_once].iter().map(|taken| taken.task.clone());
        match Box::pin(self.handle.insert_records(&ids, tasks.collect())).await {
            Ok(answers) => {
                let mut later = None;
                let mut done = HashSet::new();
                for (taken, answer) in rest.iter().zip(answers) {
                    match answer.status {
                        InsertStatus::Created => {
                            self.opened_tree(taken.reference);
                            done.insert(taken.id);
                        }
                        InsertStatus::Rejected => {
                            self.refused(taken);
                            done.insert(taken.id);
                        }
                        InsertStatus::Duplicate => {}
                        InsertStatus::TryLater => later = Some(answer.error),
                    }
                }
                rest.retain(|taken| !done.contains(&taken.id));
                Some((self.hold_of(FeedHold::QueueFull), later?))
            }
            Err(Error::Unavailable(Unavailable::Store(error))) if error.is_refusal() => {
                if *at_once > 1 {
                    *at_once /= 2;
                    return None;
                }
                let why = error.to_string();
                let taken = &rest[0];
                if let Err(error) = self.handle.bury(taken.task.clone(), &why).await {
                    return Some((FeedHold::Store, in_short(&error)));
                }
                self.refused(taken);
                rest.remove(0);
                None
            }
            Err(error @ Error::Busy(_)) => {
                Some((self.hold_of(FeedHold::QueueFull), error.to_string()))
            }
            Err(error) => Some((FeedHold::Store, error.to_string())),
        }
    }

    /// The reason for which nothing can be inserted, or this one.
    fn hold_of(&self, otherwise: FeedHold) -> FeedHold {
        self.full(false).map_or(otherwise, |(hold, _)| hold)
    }

    /// Takes out the records that are stored. Their tasks may be completed, and must not go to their
    /// queue again.
    async fn take_out_stored(&self, rest: &mut Vec<Taken>) -> store::Result<()> {
        let store = &self.context.store;
        let name = &self.settings().name;
        let run = self.state.lock().run;
        let ids: Vec<TaskId> = rest.iter().map(|taken| taken.id).collect();
        let references: Vec<String> = rest
            .iter()
            .map(|taken| reference_in(run, taken.reference))
            .collect();
        // A root may leave SQL before its tree ends, and a tree before its record is acknowledged.
        let due: HashSet<String> = store
            .due_among(name, &references)
            .await?
            .into_iter()
            .collect();
        let mut stored: HashSet<TaskId> = HashSet::new();
        for (id, _) in store.queues_of(&ids).await? {
            stored.insert(id);
        }
        for tree in store.trees_by_id(&ids).await? {
            stored.insert(tree.id);
        }
        for (id, reference) in ids.iter().zip(&references) {
            if due.contains(reference) {
                stored.insert(*id);
            }
        }
        if stored.is_empty() {
            return Ok(());
        }
        // The rows of the others acknowledge them, as soon as they are there.
        let mut waiting = HashSet::new();
        if self.settings().ack == FeedAck::Done {
            waiting.extend(store.open_of_feed(name, &ids).await?);
        }
        let mut ended = Vec::new();
        for (taken, reference) in rest.iter().zip(&references) {
            let has_row = due.contains(reference) || waiting.contains(&taken.id);
            if stored.contains(&taken.id) && !has_row {
                ended.push(taken.reference);
            }
        }
        self.due(ended);
        rest.retain(|taken| !stored.contains(&taken.id));
        let count = stored.len() as u64;
        self.state.lock().counts.duplicates += count;
        metrics::feed_records(self.name(), FeedResult::Duplicate, count);
        Ok(())
    }

    /// A record has a tree.
    fn opened_tree(&self, reference: Offset) {
        self.state.lock().counts.trees += 1;
        metrics::feed_records(self.name(), FeedResult::Tree, 1);
        // Otherwise the end of the tree acknowledges it.
        if self.settings().ack != FeedAck::Done {
            self.due([reference]);
        }
    }

    /// A record has a dead letter. One without the payload is no reason to acknowledge the record.
    fn refused(&self, taken: &Taken) {
        self.state.lock().counts.refused += 1;
        metrics::feed_records(self.name(), FeedResult::Refused, 1);
        if is_too_large(&taken.task) {
            self.state.lock().too_large.insert(taken.reference);
        } else {
            self.due([taken.reference]);
        }
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

    /// Acknowledges records until the reading ends.
    async fn acknowledge(&self, feed: &dyn Feed) {
        let mut waits = pauses();
        loop {
            let wait = self.cx.clock().sleep(self.settings().ack_interval);
            tokio::select! {
                () = self.batch.notified() => {}
                () = wait => {}
            }
            let sent = self.acknowledge_all(feed).await;
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

    /// Acknowledges all that is due.
    async fn acknowledge_all(&self, feed: &dyn Feed) -> Result<(), Why> {
        while self.acknowledge_some(feed).await? > 0 {
            self.cx.beat();
        }
        Ok(())
    }

    /// Claims all records that this reader has, until the reading ends: those whose trees are open, and
    /// those that wait to be inserted.
    async fn keep(&self, feed: &dyn Feed) {
        loop {
            // Otherwise they are claimed the next time.
            drop(feed.keep().await);
            self.cx.clock().sleep(KEEP_EVERY).await;
        }
    }

    /// Acknowledges a batch. Returns how many records it had.
    async fn acknowledge_some(&self, feed: &dyn Feed) -> Result<usize, Why> {
        let most = self.settings().ack_batch;
        let (due, run, rows) = {
            let state = self.state.lock();
            let due: Vec<Offset> = state.due.iter().take(most as usize).copied().collect();
            (due, state.run, state.rows)
        };
        if !due.is_empty() {
            self.send(feed, &due).await?;
            let mut state = self.state.lock();
            for reference in &due {
                state.due.remove(reference);
            }
            return Ok(due.len());
        }
        // Trees that began with another `ack` leave rows, too.
        if self.settings().ack != FeedAck::Done && rows == 0 {
            return Ok(0);
        }
        let name = &self.settings().name;
        let store = &self.context.store;
        let rows = store.due_acks(name, run, most).await;
        let rows = rows.map_err(|error| in_short(&error))?;
        if rows.is_empty() {
            self.state.lock().rows = 0;
            return Ok(0);
        }
        let due = rows.iter().filter_map(|row| reference_of(row));
        let due: Vec<Offset> = due.collect();
        if !due.is_empty() {
            self.send(feed, &due).await?;
        }
        let removed = store.remove_acks(name, &rows).await;
        removed.map_err(|error| in_short(&error))?;
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
        let (due, ack_error) = {
            let state = self.state.lock();
            (state.due.len(), state.ack_error.clone())
        };
        if is_full(due as u64, MOST_DUE as u64) {
            let why = ack_error.unwrap_or_default();
            let why = format!("{due} records wait to be acknowledged. {why}");
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

    /// Returns if the reading must begin again.
    async fn keep_telling(&self, feed: &dyn Feed) -> Halt {
        loop {
            if let Err(halt) = self.tell(Some(feed)).await {
                return halt;
            }
            self.cx.clock().sleep(TELL_EVERY).await;
        }
    }

    /// Shows the state of the feed to all processes, and in the metrics. Fails if another process has
    /// begun a later run.
    async fn tell(&self, feed: Option<&dyn Feed>) -> Result<(), Halt> {
        let store = &self.context.store;
        let name = &self.settings().name;
        let run = self.state.lock().run;
        if let Ok(rows) = store.count_acks(name, run).await {
            self.state.lock().rows = rows;
        }
        let behind = match feed {
            // Whoever reads says why it does not answer.
            Some(feed) => feed.health().await.ok().flatten(),
            None => None,
        };
        let (present, hold, is_stored) = {
            let state = self.state.lock();
            let fails = state.ack_error.clone().or(state.rule_error.clone());
            let held = state.held.clone();
            let held = held.or_else(|| Some((FeedHold::Acks, fails?)));
            let why = held.as_ref().map_or("", |(_, why)| why.as_str());
            let present = StoredFeed {
                name: name.clone(),
                source: self.settings().source.identity(),
                run: state.run,
                counts: state.counts,
                acks_pending: state.due.len() as u64 + state.rows,
                held: shorten(why, MAX_HELD).into_owned(),
            };
            let is_stored = !state.is_read || state.in_sql.as_ref() == Some(&present);
            (present, held.map(|(hold, _)| hold), is_stored)
        };
        metrics::feed_held(self.name(), hold);
        metrics::feed_left(self.name(), present.acks_pending, behind);
        if is_stored {
            return Ok(());
        }
        match store.keep_feed(&present).await {
            Ok(run) if run > present.run => Err(Halt {
                hold: FeedHold::Source,
                why: "another process has begun to read the source anew, and this one follows"
                    .to_owned(),
            }),
            Ok(_) => {
                self.state.lock().in_sql = Some(present);
                Ok(())
            }
            // It is told the next time.
            Err(_) => Ok(()),
        }
    }
}
