//! How many tasks there were in the last hour and in the last day, as the leader wrote it.

use std::{collections::HashMap, sync::Arc};

use tracing::Instrument as _;

use super::{
    access::{reaches, reaches_everything},
    error::Error,
    handle::{Api, span},
};
use crate::model::{
    Caller, DepthEntries, DepthEntry, History, HistoryPoint, QueueDepths, QueueName,
};

impl Api {
    /// The depths of a queue, or of all queues that the caller reaches.
    pub async fn depth_history(&self, caller: &Caller, queue: &str) -> Result<History, Error> {
        let queue = Some(queue)
            .filter(|queue| !queue.is_empty())
            .map(QueueName::new)
            .transpose();
        let queue = queue.map_err(|error| Error::Invalid(error.to_string()))?;
        if let Some(queue) = &queue {
            reaches(caller, queue.as_str())?;
        }
        let entries = self.read_depths(caller).await?;
        if let Some(queue) = queue {
            return Ok(History {
                hour: points_of(&entries.hour, queue.as_str()),
                day: points_of(&entries.day, queue.as_str()),
                partial: false,
            });
        }
        let sees_all = caller.access.reaches_everything();
        let is_asked = |name: &str| match name {
            OTHERS => sees_all,
            name => caller.access.reaches(name),
        };
        let mut all = entries.hour.iter().chain(&entries.day);
        Ok(History {
            hour: sums(&entries.hour, sees_all, is_asked),
            day: sums(&entries.day, sees_all, is_asked),
            partial: all.any(|entry| !has_all_queues(entry)),
        })
    }

    /// The depths of all queues.
    pub async fn all_depths(&self, caller: &Caller) -> Result<DepthEntries, Error> {
        reaches_everything(caller)?;
        self.read_depths(caller).await
    }

    async fn read_depths(&self, caller: &Caller) -> Result<DepthEntries, Error> {
        let query = self.query()?;
        let read = query.depths.get(&query.coordination, query.now_unix_ms());
        read.instrument(span("history", caller)).await
    }
}

/// The name of the sum of the queues that have no place in an entry.
const OTHERS: &str = "";

fn has_all_queues(entry: &DepthEntry) -> bool {
    entry.queues.iter().all(|(queue, _)| queue != OTHERS)
}

/// The numbers of a queue in each entry that has it.
fn points_of(entries: &[Arc<DepthEntry>], queue: &str) -> Vec<HistoryPoint> {
    let mut points = Vec::new();
    for entry in entries {
        let found = entry.queues.iter().find(|(name, _)| name == queue);
        if let Some((_, depths)) = found {
            points.push(HistoryPoint::new(entry.at_unix_ms, depths));
        }
    }
    points
}

/// The sums of the queues that are asked for, in each entry that has one of them. For a caller that
/// sees all queues, an entry without queues is a point, too: there was no task.
fn sums(
    entries: &[Arc<DepthEntry>],
    sees_all: bool,
    is_asked: impl Fn(&str) -> bool,
) -> Vec<HistoryPoint> {
    let mut points = Vec::new();
    let mut totals = Totals::default();
    for entry in entries {
        let mut sum = sees_all.then(QueueDepths::default);
        for (queue, depths) in &entry.queues {
            if is_asked(queue) {
                sum.get_or_insert_default().add(depths);
                totals.count(queue, depths);
            }
        }
        totals.end_entry(entry);
        if let Some(sum) = sum {
            let mut point = HistoryPoint::new(entry.at_unix_ms, &sum);
            totals.write(&mut point);
            points.push(point);
        }
    }
    points
}

/// The totals of several queues, of which each entry may have others: a queue is closed when it is
/// empty, and is opened again with its old totals. So they are sums of the differences of each
/// queue.
#[derive(Default)]
struct Totals<'a> {
    last: HashMap<&'a str, QueueDepths>,
    /// True if the entry before had a place for each queue; `None` for the first entry.
    had_all: Option<bool>,
    sum: Sum,
    /// The most of `sum` until now, for the totals that do not fall.
    inserted: i64,
    completed: i64,
}

#[derive(Default)]
struct Sum {
    inserted: i64,
    completed: i64,
    dead: i64,
    cancelled: i64,
}

impl<'a> Totals<'a> {
    fn count(&mut self, queue: &'a str, depths: &QueueDepths) {
        if queue == OTHERS {
            // Its queues change.
            return;
        }
        let nothing = QueueDepths::default();
        match (self.last.insert(queue, *depths), self.had_all) {
            (Some(before), _) => self.add(depths, &before),
            (None, None) => self.add(depths, &nothing),
            // It was closed until then, so what it has is new. What has ended may be old.
            (None, Some(true)) => self.sum.inserted += signed(depths.unfinished()),
            (None, Some(false)) => {}
        }
    }

    fn add(&mut self, now: &QueueDepths, before: &QueueDepths) {
        self.sum.inserted += signed(now.inserted()) - signed(before.inserted());
        self.sum.completed += signed(now.completed) - signed(before.completed);
        self.sum.dead += signed(now.dead) - signed(before.dead);
        self.sum.cancelled += signed(now.cancelled) - signed(before.cancelled);
    }

    fn end_entry(&mut self, entry: &DepthEntry) {
        self.had_all = Some(has_all_queues(entry));
        self.inserted = self.inserted.max(self.sum.inserted);
        self.completed = self.completed.max(self.sum.completed);
    }

    fn write(&self, point: &mut HistoryPoint) {
        point.inserted = unsigned(self.inserted);
        point.completed = unsigned(self.completed);
        point.dead = unsigned(self.sum.dead);
        point.cancelled = unsigned(self.sum.cancelled);
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at_unix_ms: i64, queues: &[(&str, u64, u64)]) -> Arc<DepthEntry> {
        let depths = |(name, waiting, completed): &(&str, u64, u64)| {
            let depths = QueueDepths {
                waiting: *waiting,
                completed: *completed,
                ..QueueDepths::default()
            };
            ((*name).to_owned(), depths)
        };
        Arc::new(DepthEntry {
            at_unix_ms,
            queues: queues.iter().map(depths).collect(),
        })
    }

    #[test]
    fn totals_of_several_queues_count_what_happened_in_each() {
        let entries = [
            entry(1, &[("a", 5, 100), ("b", 1, 1000)]),
            // A queue is closed, ...
            entry(2, &[("a", 4, 101)]),
            // ... and opened again, and another one is opened.
            entry(3, &[("a", 4, 102), ("b", 2, 1001), ("c", 3, 9)]),
            // The others have no place any more, or another one.
            entry(4, &[("a", 0, 106), ("", 7, 5000)]),
            entry(5, &[("a", 0, 106), ("d", 8, 70), ("", 1, 9)]),
            entry(6, &[("a", 0, 106), ("d", 6, 73), ("", 1, 9)]),
        ];
        let points = sums(&entries, true, |_| true);
        let waiting: Vec<u64> = points.iter().map(|point| point.waiting).collect();
        assert_eq!(waiting, [6, 4, 9, 7, 9, 7]);
        let totals = points.iter().map(|point| (point.inserted, point.completed));
        assert_eq!(
            totals.collect::<Vec<_>>(),
            [
                (1106, 1100),
                (1106, 1101),
                (1112, 1103),
                (1112, 1107),
                (1112, 1107),
                (1113, 1110),
            ]
        );
        let mine = sums(&entries, false, |name| name == "d");
        let totals = mine.iter().map(|point| (point.at_unix_ms, point.completed));
        assert_eq!(totals.collect::<Vec<_>>(), [(5, 0), (6, 3)]);
        assert!(sums(&entries, false, |name| name == "never").is_empty());
        assert_eq!(sums(&[entry(1, &[])], true, |_| true).len(), 1);
        assert_eq!(points_of(&entries, "b").len(), 2);
    }
}
