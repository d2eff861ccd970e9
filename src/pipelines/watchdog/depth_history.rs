//! Writes how many tasks the queues have: every ten seconds for the last hour, every five minutes
//! for the last day. The leader does it, so it is written once however many processes there are.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use super::error::Error;
use crate::{
    coordination::Coordination,
    model::{DepthEntry, DepthSpan, QueueDepths, QueueName, StoredStatus},
    runtime::Clock,
    store::Store,
};

/// The most queues of an entry, and its most bytes. With all entries of both spans that is less
/// than 8 MB.
const QUEUES: usize = 200;
const BYTES: usize = 12_000;
/// What an entry has beside its queues, with the sum of the others.
const BESIDE: usize = 200;

pub(super) struct DepthHistory {
    store: Arc<dyn Store>,
    coordination: Coordination,
    clock: Clock,
    /// When the next entry of each span is due; `None` while another process leads.
    due: Option<[i64; 2]>,
    /// The queues that have a place in the last entry.
    kept: HashSet<QueueName>,
}

impl DepthHistory {
    pub(super) fn new(store: Arc<dyn Store>, coordination: Coordination, clock: Clock) -> Self {
        Self {
            store,
            coordination,
            clock,
            due: None,
            kept: HashSet::new(),
        }
    }

    /// Says that another process leads.
    pub(super) fn leave(&mut self) {
        self.due = None;
    }

    /// True if an entry is due.
    pub(super) async fn is_due(&mut self) -> Result<bool, Error> {
        let mut due = match self.due {
            Some(due) => due,
            None => {
                let mut due = [0; 2];
                for (due, span) in due.iter_mut().zip(DepthSpan::ALL) {
                    // The previous leader has written it.
                    let Some(last) = self.coordination.last_depths(span).await? else {
                        continue;
                    };
                    *due = last.at_unix_ms + span.step_ms();
                    if span == DepthSpan::Hour {
                        self.kept = queues_of(&last);
                    }
                }
                due
            }
        };
        let now = self.clock.now_unix_ms();
        for (due, span) in due.iter_mut().zip(DepthSpan::ALL) {
            *due = within_a_step(*due, span, now);
        }
        self.due = Some(due);
        Ok(due.into_iter().any(|due| due <= now))
    }

    /// Writes the entries that are due. `depths` are those of all queues that are not empty, as
    /// Redis has them; the other `queues` are empty. The caller may stop it at any time.
    pub(super) async fn write(
        &mut self,
        depths: BTreeMap<QueueName, QueueDepths>,
        queues: BTreeSet<QueueName>,
    ) -> Result<(), Error> {
        let now = self.clock.now_unix_ms();
        let Some(due) = self.due else {
            return Ok(());
        };
        let mut unfinished: HashMap<QueueName, u64> = HashMap::new();
        let mut all = depths;
        for queue in queues {
            all.entry(queue).or_default();
        }
        let names: Vec<QueueName> = all.keys().cloned().collect();
        if !names.is_empty() {
            for count in self.store.counts(Some(&names)).await? {
                let Some(of) = all.get_mut(&count.queue) else {
                    continue;
                };
                match count.status {
                    StoredStatus::Unfinished => {
                        unfinished.insert(count.queue, count.count);
                    }
                    StoredStatus::Completed => of.completed = count.count,
                    StoredStatus::Dead => of.dead = count.count,
                    StoredStatus::Cancelled => of.cancelled = count.count,
                }
            }
        }
        for (queue, depths) in &mut all {
            // Zeros have no row.
            depths.set_unfinished(unfinished.get(queue).copied().unwrap_or(0));
        }
        let entry = entry(now, all, &mut self.kept);
        let mut next = due;
        let mut spans = Vec::new();
        for (due, span) in next.iter_mut().zip(DepthSpan::ALL) {
            if *due <= now {
                spans.push(span);
                *due = next_due(*due, span, now);
            }
        }
        self.coordination.add_depths(&spans, &entry).await?;
        self.due = Some(next);
        Ok(())
    }
}

/// Returns when the entry after one that was due is due.
fn next_due(due: i64, span: DepthSpan, now: i64) -> i64 {
    let after = due + span.step_ms();
    if after > now {
        within_a_step(after, span, now)
    } else {
        // Those that were missed are not made up for.
        now + span.step_ms()
    }
}

/// An entry is due within a step. If its time is later, then the clock was ahead when the entry
/// before it was written.
fn within_a_step(due: i64, span: DepthSpan, now: i64) -> i64 {
    due.min(now + span.step_ms())
}

/// The queues that have a place in an entry.
fn queues_of(entry: &DepthEntry) -> HashSet<QueueName> {
    let names = entry.queues.iter();
    // The sum of the others has no name.
    names
        .filter_map(|(name, _)| QueueName::new(name).ok())
        .collect()
}

/// Makes an entry with the queues that have a place: first those that have tasks, and of these
/// first those of the entry before. `kept` are the queues of the last entry.
fn entry(
    at_unix_ms: i64,
    all: BTreeMap<QueueName, QueueDepths>,
    kept: &mut HashSet<QueueName>,
) -> DepthEntry {
    let mut list: Vec<(QueueName, QueueDepths)> = all.into_iter().collect();
    list.sort_by_cached_key(|(queue, depths)| {
        let has_tasks = depths.unfinished() > 0;
        (Reverse(has_tasks), Reverse(kept.contains(queue)))
    });
    kept.clear();
    let mut entry = DepthEntry {
        at_unix_ms,
        queues: Vec::new(),
    };
    let mut others = QueueDepths::default();
    let mut has_others = false;
    let mut bytes = BESIDE;
    for (queue, depths) in list {
        let text = serde_json::to_string(&(queue.as_str(), depths)).unwrap_or_default();
        let with_it = bytes + text.len() + 1;
        if entry.queues.len() < QUEUES && with_it <= BYTES {
            bytes = with_it;
            entry.queues.push((queue.to_string(), depths));
            kept.insert(queue);
        } else {
            others.add(&depths);
            has_others = true;
        }
    }
    if has_others {
        entry.queues.push((String::new(), others));
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(waiting: u64) -> QueueDepths {
        QueueDepths {
            waiting,
            completed: 1_000_000_000,
            ..QueueDepths::default()
        }
    }

    #[test]
    fn an_entry_is_small_and_counts_every_task() {
        let mut kept = HashSet::new();
        let name = |number| QueueName::new(&format!("site-{number}.pages.example")).unwrap();
        let all: BTreeMap<_, _> = (0..1000).map(|n| (name(n), waiting(n))).collect();
        let first = entry(1, all.clone(), &mut kept);
        let text = serde_json::to_string(&first).unwrap();
        assert!(text.len() <= BYTES, "{} bytes", text.len());
        let entries: i64 = DepthSpan::ALL.iter().map(|span| span.entries()).sum();
        assert!(entries as usize * BYTES < 8_000_000);
        assert!(first.queues.len() > 150, "{} queues", first.queues.len());
        let sum: u64 = first.queues.iter().map(|(_, of)| of.waiting).sum();
        assert_eq!(sum, (0..1000).sum::<u64>());
        assert_eq!(first.queues.last().unwrap().0, "", "the others");
        assert_eq!(serde_json::from_str::<DepthEntry>(&text).unwrap(), first);

        // They keep their places while they have tasks.
        let mut later = all.clone();
        later.insert(QueueName::new("a-new-one").unwrap(), waiting(1));
        let second = entry(2, later, &mut kept);
        let names = |entry: &DepthEntry| -> BTreeSet<String> {
            entry.queues.iter().map(|(name, _)| name.clone()).collect()
        };
        assert_eq!(names(&first), names(&second));
        let mut emptied = all;
        emptied.insert(name(1), waiting(0));
        assert!(!names(&entry(3, emptied, &mut kept)).contains(name(1).as_str()));
    }

    /// Returns the times of the entries while a leader looks every two seconds from `from_ms` until
    /// `until_ms`, and when the next one is due.
    fn entries_between(mut due: i64, from_ms: i64, until_ms: i64) -> (Vec<i64>, i64) {
        let span = DepthSpan::Hour;
        let mut entries = Vec::new();
        for now in (from_ms..until_ms).step_by(2000) {
            due = within_a_step(due, span, now);
            if due <= now {
                entries.push(now);
                due = next_due(due, span, now);
            }
        }
        (entries, due)
    }

    #[test]
    fn a_clock_that_steps_back_changes_no_step() {
        let hour = 3_600_000;
        let (entries, due) = entries_between(0, hour, hour + 30_000);
        assert_eq!(entries, [hour, hour + 10_000, hour + 20_000]);
        let (entries, due) = entries_between(due, 0, 40_000);
        assert_eq!(entries, [10_000, 20_000, 30_000]);
        // The process stood still for a while.
        let (entries, _) = entries_between(due, hour + 1000, hour + 22_000);
        assert_eq!(entries, [hour + 1000, hour + 11_000, hour + 21_000]);
    }

    #[test]
    fn a_new_leader_gives_the_same_queues_their_places() {
        let name = |number| QueueName::new(&format!("site-{number}.pages.example")).unwrap();
        let all: BTreeMap<_, _> = (0..1000).map(|n| (name(n), waiting(1))).collect();
        let places: HashSet<QueueName> = (500..600).map(name).collect();
        let mut kept = places.clone();
        let entry = entry(1, all, &mut kept);
        assert!(places.is_subset(&queues_of(&entry)));
        assert_eq!(queues_of(&entry), kept, "the next leader begins with these");
    }

    #[test]
    fn tasks_that_end_between_two_reads_are_counted_once() {
        let mut depths = QueueDepths {
            waiting: 3,
            assigned: 5,
            delayed: 1,
            completed: 100,
            ..QueueDepths::default()
        };
        depths.set_unfinished(11);
        assert_eq!((depths.pending, depths.inserted()), (2, 111));
        // Two of the assigned ones and the pending ones have ended.
        depths.completed = 104;
        depths.set_unfinished(7);
        assert_eq!((depths.pending, depths.assigned), (0, 3));
        assert_eq!(depths.inserted(), 111);
    }
}
