//! Discovered tasks for which there is no room, or that are not valid any more. Their worker's completion was answered
//! long ago, so nobody can be told to try later: what of them is new goes to `dead-letters`, with all that inserts it
//! again, and the crawl goes on.
//!
//! Letters are sent before the report is settled: killed in between, the report comes again, and so do its letters.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;

use super::Parts;
use crate::{
    model::{self, KeyHash, QueueName, TaskId, TaskRow},
    store::{NewRow, Settlement},
    telemetry::metrics::{self, Lettered},
    wire::pb,
};

/// A discovered task that is not stored.
pub(super) struct Unstored {
    pub(super) parent: TaskId,
    pub(super) task: pb::NewTask,
    /// `None`: what there is of it is not a key.
    pub(super) key: Option<(QueueName, KeyHash)>,
    pub(super) why: Lettered,
    pub(super) reason: String,
}

/// Takes what has no room out of the reports: what is new of the queues that have their `max_unfinished`, or are beyond
/// `max_queues`.
pub(super) async fn make_room(parts: &Parts, reports: &mut [&mut Settlement]) -> anyhow::Result<Vec<Unstored>> {
    let full = full_queues(parts, reports);
    if full.is_empty() {
        return Ok(Vec::new());
    }
    let rows = reports.iter().flat_map(|report| discovered(report)).map(|row| &row.task);
    let keys: BTreeMap<KeyHash, QueueName> =
        rows.filter(|task| full.contains_key(&task.queue)).map(|task| (task.key_hash, task.queue.clone())).collect();
    let keys: Vec<(QueueName, KeyHash)> = keys.into_iter().map(|(hash, queue)| (queue, hash)).collect();
    let known = known(parts, &keys).await?;
    let mut room = room_left(parts, &full).await?;
    let (mut unstored, mut stay, mut gone) = (Vec::new(), HashSet::new(), HashSet::new());
    let mut stays = |parent: TaskId, task: &TaskRow| {
        let Some((why, reason)) = full.get(&task.queue) else { return true };
        if known.contains(&task.key_hash) || stay.contains(&task.key_hash) {
            return true;
        }
        match room.get_mut(&task.queue).filter(|left| **left > 0 && !gone.contains(&task.key_hash)) {
            Some(left) => {
                *left -= 1;
                stay.insert(task.key_hash)
            }
            None => {
                // Several may have discovered it.
                if gone.insert(task.key_hash) {
                    let key = Some((task.queue.clone(), task.key_hash));
                    let task = model::NewTask::from(task).into();
                    unstored.push(Unstored { parent, task, key, why: *why, reason: reason.clone() });
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

/// Those that have no room for all, and why. Takes the room of the others; of new names the first.
fn full_queues(parts: &Parts, reports: &[&mut Settlement]) -> FullQueues {
    let (mut counts, mut places): (Vec<(&QueueName, u64)>, HashMap<&QueueName, usize>) = Default::default();
    for row in reports.iter().flat_map(|report| discovered(report)) {
        let place = *places.entry(&row.task.queue).or_insert_with(|| {
            counts.push((&row.task.queue, 0));
            counts.len() - 1
        });
        counts[place].1 += 1;
    }
    let queues = &parts.settings.queues;
    let mut full = FullQueues::new();
    for (queue, count) in counts {
        if let Err(reason) = parts.let_in(queue) {
            full.insert(queue.clone(), (Lettered::MaxQueues, reason));
        } else if !parts.outbox.gates.admit_all(queue, count, queues) {
            let max = queues.get(queue).max_unfinished;
            let reason = format!("queue {queue} has {max} unfinished tasks, its max_unfinished");
            full.insert(queue.clone(), (Lettered::MaxUnfinished, reason));
        }
    }
    full
}

/// The room that each full queue has by SQL's present count; a queue beyond `max_queues` has none.
async fn room_left(parts: &Parts, full: &FullQueues) -> anyhow::Result<HashMap<QueueName, u64>> {
    let unfinished: HashMap<QueueName, u64> = parts.outbox.store.unfinished().await?.into_iter().collect();
    let with_a_name = full.iter().filter(|(_, (why, _))| *why == Lettered::MaxUnfinished);
    let room = |queue: &QueueName| {
        let max = parts.settings.queues.get(queue).max_unfinished;
        max.saturating_sub(unfinished.get(queue).copied().unwrap_or(0))
    };
    Ok(with_a_name.map(|(queue, _)| (queue.clone(), room(queue))).collect())
}

/// Parent, queue and key.
type Letter = (TaskId, String, Bytes);

/// The letters of reports that are not settled yet: while SQL is full these are tried again and again.
#[derive(Clone, Default)]
pub(super) struct Sent(Arc<Mutex<HashSet<Letter>>>);

impl Sent {
    /// The reports are settled.
    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn has(&self, letter: &Letter) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(letter)
    }

    fn add(&self, letters: Vec<Letter>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(letters);
    }
}

/// Sends what is new of it.
pub(super) async fn send(parts: &Parts, unstored: Vec<Unstored>, sent: &Sent) -> anyhow::Result<()> {
    if unstored.is_empty() {
        return Ok(());
    }
    let keys: Vec<(QueueName, KeyHash)> = unstored.iter().filter_map(|one| one.key.clone()).collect();
    let known = known(parts, &keys).await?;
    let at_unix_ms = parts.outbox.clock.now_unix_ms();
    let (mut letters, mut names) = (Vec::new(), Vec::new());
    for Unstored { parent, task, key, why, reason } in unstored {
        let name = (parent, task.queue.clone(), task.key.clone());
        if key.is_some_and(|(_, hash)| known.contains(&hash)) || sent.has(&name) {
            continue;
        }
        names.push(name);
        tracing::warn!(%parent, "a task that {parent} discovered goes to dead-letters: {reason}");
        metrics::discovery_lettered(why, 1);
        letters.push(pb::DeadLetter {
            reason,
            at_unix_ms,
            queue: task.queue.clone(),
            task: Some(task),
            parent_id: Bytes::copy_from_slice(parent.as_bytes()),
            ..Default::default()
        });
    }
    parts.outbox.send_letters(letters).await?;
    sent.add(names);
    Ok(())
}

/// Keys of tasks that are stored, or were.
async fn known(parts: &Parts, keys: &[(QueueName, KeyHash)]) -> anyhow::Result<HashSet<KeyHash>> {
    let seen = parts.filter.seen(keys).await.unwrap_or_else(|error| {
        tracing::debug!("the filter does not answer, SQL decides: {error}");
        vec![None; keys.len()]
    });
    let (mut known, mut unseen) = (HashSet::new(), Vec::new());
    for ((_, hash), seen) in keys.iter().zip(seen) {
        match seen {
            Some(_) => drop(known.insert(*hash)),
            None => unseen.push(*hash),
        }
    }
    known.extend(parts.outbox.store.owners(&unseen).await?.into_iter().map(|(hash, _)| hash));
    Ok(known)
}

pub(super) fn discovered(report: &Settlement) -> &[NewRow] {
    match report {
        Settlement::Completed { discovered, .. } => discovered,
        Settlement::Died { .. } => &[],
    }
}
