//! Discovered tasks that cannot be stored, because their queues are full or because they are not
//! valid any more.
//!
//! taskd answered the worker's completion long ago, so it cannot ask anybody to try later. It sends
//! those of these tasks that are new to `dead-letters`, with everything that is needed to insert
//! them again, and the crawl goes on. Letters are sent before the report is settled. After a crash
//! in between, the report is delivered again, and its letters are sent again.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use bytes::Bytes;
use parking_lot::Mutex;

use super::{error::Failure, turned_away::Tally};
use crate::{
    model::{DeadLetter, KeyHash, NewTask, QueueName, RecordedValues, TaskId, TaskRow},
    pipelines::context::Context,
    store::{NewRow, Settlement},
    telemetry::metrics::{self, Lettered},
};

/// A discovered task that is not stored.
pub(super) struct Unstored {
    pub(super) parent: TaskId,
    pub(super) task: NewTask,
    /// The values of an unreadable task.
    pub(super) values: Option<RecordedValues>,
    /// `None` when its queue or its key is not valid.
    pub(super) key: Option<(QueueName, KeyHash)>,
    pub(super) why: Lettered,
    pub(super) reason: String,
    /// The reason for the log, if `reason` contains parts of the payload.
    pub(super) logged: Option<String>,
}

impl Unstored {
    /// A task that was valid.
    pub(super) fn of_row(parent: TaskId, row: &TaskRow, why: Lettered, reason: String) -> Self {
        let key = Some((row.queue.clone(), row.key_hash));
        Self {
            parent,
            task: NewTask::from(row),
            values: None,
            key,
            why,
            reason,
            logged: None,
        }
    }
}

/// Removes the new tasks that cannot be stored from the reports and returns them: their queues have
/// `max_unfinished` tasks, or are beyond `max_queues`.
pub(super) async fn make_room(
    context: &Context,
    reports: &mut [Settlement],
) -> Result<Vec<Unstored>, Failure> {
    let full = full_queues(context, reports);
    if full.is_empty() {
        return Ok(Vec::new());
    }
    let rows = reports.iter().flat_map(discovered).map(|row| &row.task);
    let keys: BTreeMap<KeyHash, QueueName> = rows
        .filter(|task| full.contains_key(&task.queue))
        .map(|task| (task.key_hash, task.queue.clone()))
        .collect();
    let keys: Vec<(QueueName, KeyHash)> = keys
        .into_iter()
        .map(|(hash, queue)| (queue, hash))
        .collect();
    let known = known(context, &keys).await?;
    let mut room = room_left(context, &full).await?;
    let mut unstored = Vec::new();
    let mut stay = HashSet::new();
    let mut gone = HashSet::new();
    let mut stays = |parent: TaskId, task: &TaskRow| {
        let Some((why, reason)) = full.get(&task.queue) else {
            return true;
        };
        if known.contains(&task.key_hash) || stay.contains(&task.key_hash) {
            return true;
        }
        match room
            .get_mut(&task.queue)
            .filter(|left| **left > 0 && !gone.contains(&task.key_hash))
        {
            Some(left) => {
                *left -= 1;
                stay.insert(task.key_hash)
            }
            None => {
                // Several reports may have discovered the task. One letter is enough.
                if gone.insert(task.key_hash) {
                    unstored.push(Unstored::of_row(parent, task, *why, reason.clone()));
                }
                false
            }
        }
    };
    for report in reports {
        if let Settlement::Completed { id, discovered, .. } = report {
            discovered.retain(|row| stays(*id, &row.task));
        }
    }
    Ok(unstored)
}

type FullQueues = HashMap<QueueName, (Lettered, String)>;

/// Returns the queues that cannot take all their tasks, each with the reason. Reserves capacity in
/// the other queues, and admits new names in the order in which they come.
fn full_queues(context: &Context, reports: &[Settlement]) -> FullQueues {
    let mut counts: Vec<(&QueueName, u64)> = Vec::new();
    let mut places: HashMap<&QueueName, usize> = HashMap::new();
    for row in reports.iter().flat_map(discovered) {
        let place = *places.entry(&row.task.queue).or_insert_with(|| {
            counts.push((&row.task.queue, 0));
            counts.len() - 1
        });
        counts[place].1 += 1;
    }
    let queues = &context.settings.queues;
    let mut full = FullQueues::new();
    for (queue, count) in counts {
        if let Err(reason) = context.let_in_discovered(queue) {
            full.insert(queue.clone(), (Lettered::MaxQueues, reason));
        } else if !context.occupancy.admit_all(queue, count, queues) {
            let max = queues.get(queue).max_unfinished;
            let reason = format!("queue {queue} has {max} unfinished tasks, its max_unfinished");
            full.insert(queue.clone(), (Lettered::MaxUnfinished, reason));
        }
    }
    full
}

/// Returns how many tasks each full queue can take by SQL's present count. Leaves out queues beyond
/// `max_queues`.
async fn room_left(
    context: &Context,
    full: &FullQueues,
) -> Result<HashMap<QueueName, u64>, Failure> {
    let unfinished: HashMap<QueueName, u64> =
        context.store.unfinished().await?.into_iter().collect();
    let with_a_name = full
        .iter()
        .filter(|(_, (why, _))| *why == Lettered::MaxUnfinished);
    let room = |queue: &QueueName| {
        let max = context.settings.queues.get(queue).max_unfinished;
        max.saturating_sub(unfinished.get(queue).copied().unwrap_or(0))
    };
    Ok(with_a_name
        .map(|(queue, _)| (queue.clone(), room(queue)))
        .collect())
}

/// Parent, queue and key.
type Letter = (TaskId, String, Bytes);

/// The letters that were sent for reports that are not settled yet. While SQL is full, the same
/// reports are retried again and again, and their letters must not be sent each time.
#[derive(Clone, Default)]
pub(super) struct Sent(Arc<Mutex<HashSet<Letter>>>);

impl Sent {
    /// Forgets the letters, because their reports are settled.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    fn has(&self, letter: &Letter) -> bool {
        self.0.lock().contains(letter)
    }

    fn add(&self, letters: Vec<Letter>) {
        self.0.lock().extend(letters);
    }
}

/// Sends letters for the tasks that are new.
pub(super) async fn send(
    context: &Context,
    unstored: Vec<Unstored>,
    sent: &Sent,
    tally: &Tally,
) -> Result<(), Failure> {
    if unstored.is_empty() {
        return Ok(());
    }
    let keys: Vec<(QueueName, KeyHash)> =
        unstored.iter().filter_map(|one| one.key.clone()).collect();
    let known = known(context, &keys).await?;
    let at_unix_ms = context.clock.now_unix_ms();
    let mut letters = Vec::new();
    let mut names = Vec::new();
    // One line for each parent: a page may have thousands of wrong links.
    let mut lines: BTreeMap<TaskId, (usize, String)> = BTreeMap::new();
    for Unstored {
        parent,
        task,
        values,
        key,
        why,
        reason,
        logged,
    } in unstored
    {
        let name = (parent, task.queue.clone(), task.key.clone());
        if key.is_some_and(|(_, hash)| known.contains(&hash)) || sent.has(&name) {
            continue;
        }
        names.push(name);
        let line = lines
            .entry(parent)
            .or_insert_with(|| (0, logged.unwrap_or_else(|| reason.clone())));
        line.0 += 1;
        metrics::discovery_lettered(why, 1);
        letters.push(DeadLetter {
            reason,
            at_unix_ms,
            queue: task.queue.clone(),
            task: Some(task),
            values,
            parent_id: Some(parent),
            ..Default::default()
        });
    }
    for (parent, (count, first)) in lines {
        match count {
            1 => {
                tracing::warn!(%parent, "a task that {parent} discovered goes to dead-letters: {first}")
            }
            _ => tracing::warn!(
                %parent,
                "{count} tasks that {parent} discovered go to dead-letters; the first: {first}"
            ),
        }
    }
    context.letters.send(letters).await?;
    names.iter().for_each(|(_, queue, _)| tally.rejected(queue));
    sent.add(names);
    Ok(())
}

/// The keys of tasks that are stored, or were.
pub(super) async fn known(
    context: &Context,
    keys: &[(QueueName, KeyHash)],
) -> Result<HashSet<KeyHash>, Failure> {
    let seen = context.filter.seen(keys).await.unwrap_or_else(|error| {
        tracing::debug!("the filter does not answer, SQL decides: {error}");
        vec![None; keys.len()]
    });
    let mut known = HashSet::new();
    let mut unseen = Vec::new();
    for ((_, hash), seen) in keys.iter().zip(seen) {
        match seen {
            Some(_) => drop(known.insert(*hash)),
            None => unseen.push(*hash),
        }
    }
    known.extend(
        context
            .store
            .key_owners(&unseen)
            .await?
            .into_iter()
            .map(|(hash, ..)| hash),
    );
    Ok(known)
}

pub(super) fn discovered(report: &Settlement) -> &[NewRow] {
    match report {
        Settlement::Completed { discovered, .. } => discovered,
        Settlement::Died { .. } => &[],
    }
}
