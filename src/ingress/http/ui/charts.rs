//! Lines of how many tasks there were, as SVG. Each has a sentence that says the same.
//!
//! Times are cut into equal parts whose ends do not move, so a frame that is asked for again is the
//! same until the next part begins.

use std::{collections::HashMap, sync::Arc};

use super::format::{self, Moment};
use crate::model::{DepthEntry, DepthSpan, QueueDepths, QueueView};

/// The parts of the small line in the overview: minutes.
const MINUTES: usize = 60;
const SMALL: (f64, f64) = (60.0, 16.0);
const LARGE: (f64, f64) = (300.0, 64.0);
/// Rates, and whether anything has ended, are those since an entry that is this old.
const SINCE_MS: i64 = 60_000;
const OLDEST_MS: i64 = 180_000;

/// Tasks per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    pub(super) inserted: f64,
    pub(super) completed: f64,
}

/// How a queue was lately.
#[derive(Clone, Debug, Default)]
pub(super) struct Lately {
    /// The most tasks that waited, in SQL or in Redis, in each minute of the last hour; `None` is unknown.
    pub(super) waiting: Vec<Option<u64>>,
    /// The numbers of about a minute ago.
    before: Option<(i64, QueueDepths)>,
}

impl Lately {
    /// The history of each queue.
    pub(super) fn of_all(entries: &[Arc<DepthEntry>], now_unix_ms: i64) -> HashMap<String, Self> {
        let parts = Parts::new(DepthSpan::Hour, MINUTES, now_unix_ms);
        let mut all: HashMap<String, Self> = HashMap::new();
        for entry in entries {
            let part = parts.of(entry.at_unix_ms);
            let age = now_unix_ms - entry.at_unix_ms;
            let is_before = (SINCE_MS..OLDEST_MS).contains(&age);
            for (queue, depths) in &entry.queues {
                let of = all.entry(queue.clone()).or_insert_with(|| Self {
                    waiting: vec![None; MINUTES],
                    before: None,
                });
                if let Some(most) = part.and_then(|part| of.waiting.get_mut(part)) {
                    *most = (*most).max(Some(waiting(depths)));
                }
                // The entries come in the order of their times.
                if is_before {
                    of.before = Some((entry.at_unix_ms, *depths));
                }
            }
        }
        all
    }

    /// The rates from about a minute ago until the view, if that is known.
    pub(super) fn rates(&self, view: &QueueView, at_unix_ms: i64) -> Option<Rates> {
        let (before_unix_ms, before) = self.before?;
        let seconds = (at_unix_ms - before_unix_ms) as f64 / 1000.0;
        if seconds < 1.0 {
            return None;
        }
        let now = depths_of(view);
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        Some(Rates {
            inserted: rate(now.inserted(), before.inserted()),
            completed: rate(now.completed, before.completed),
        })
    }

    /// Whether no task has ended for a minute, if that is known.
    pub(super) fn is_quiet(&self, view: &QueueView) -> Option<bool> {
        let (_, before) = self.before?;
        Some(depths_of(view).ended() == before.ended())
    }
}

/// The tasks that wait: those above `high_water_tasks` do so in SQL.
fn waiting(depths: &QueueDepths) -> u64 {
    depths.waiting + depths.pending
}

fn depths_of(view: &QueueView) -> QueueDepths {
    QueueDepths {
        pending: view.pending,
        waiting: view.waiting,
        assigned: view.assigned,
        delayed: view.delayed,
        completed: view.completed,
        dead: view.dead,
        cancelled: view.cancelled,
    }
}

/// Adds the line of another queue.
pub(super) fn add(sum: &mut Vec<Option<u64>>, other: &[Option<u64>]) {
    if sum.is_empty() {
        sum.extend_from_slice(other);
        return;
    }
    for (sum, other) in sum.iter_mut().zip(other) {
        if let Some(other) = other {
            *sum = Some(sum.unwrap_or_default() + other);
        }
    }
}

/// The small line of the tasks that waited, and its sentence; `None` if nothing is known.
pub(super) fn small(waiting: &[Option<u64>]) -> Option<(String, String)> {
    let last = waiting.iter().rev().flatten().next()?;
    let most = waiting.iter().flatten().max()?;
    let values: Vec<Option<f64>> = waiting.iter().map(|n| n.map(|n| n as f64)).collect();
    let says = format!(
        "Waiting in the last hour: at most {}, at the end {}",
        format::count(*most),
        format::count(*last)
    );
    Some((path(&values, *most as f64, SMALL), says))
}

/// A chart of a page.
pub(super) struct Chart {
    pub(super) title: &'static str,
    pub(super) says: String,
    /// The class, the name and the path of each line.
    pub(super) lines: Vec<Line>,
    /// When the first entry was written, if that is within the span.
    pub(super) since: Option<Moment>,
}

pub(super) struct Line {
    pub(super) class: &'static str,
    pub(super) name: &'static str,
    pub(super) path: String,
}

/// The charts of a queue in a span: what waited, and what came in and was done.
pub(super) fn of_queue(
    entries: &[Arc<DepthEntry>],
    queue: &str,
    span: DepthSpan,
    now_unix_ms: i64,
) -> Vec<Chart> {
    let mut points: Vec<(i64, QueueDepths)> = Vec::new();
    for entry in entries {
        let found = entry.queues.iter().find(|(name, _)| name == queue);
        if let Some((_, depths)) = found {
            points.push((entry.at_unix_ms, *depths));
        }
    }
    let (count, waiting_title, rates_title, words) = match span {
        DepthSpan::Hour => (60, "Waiting, last hour", "Per second, last hour", "hour"),
        DepthSpan::Day => (96, "Waiting, last day", "Per second, last day", "day"),
    };
    let parts = Parts::new(span, count, now_unix_ms);
    let mut waited: Vec<Option<f64>> = vec![None; count];
    let mut inserted: Vec<Option<f64>> = vec![None; count];
    let mut done: Vec<Option<f64>> = vec![None; count];
    // The numbers at the end of the part before.
    let mut before: Option<(i64, QueueDepths)> = None;
    for (at, (end_unix_ms, depths)) in ends(&parts, &points) {
        if let Some((since, earlier)) = before {
            let seconds = (end_unix_ms - since).max(1) as f64 / 1000.0;
            let rate = |now: u64, then: u64| Some(now.saturating_sub(then) as f64 / seconds);
            inserted[at] = rate(depths.inserted(), earlier.inserted());
            done[at] = rate(depths.completed, earlier.completed);
        }
        before = Some((end_unix_ms, depths));
    }
    for (at, depths) in &points {
        if let Some(most) = parts.of(*at).and_then(|part| waited.get_mut(part)) {
            let number = waiting(depths) as f64;
            *most = Some(most.unwrap_or_default().max(number));
        }
    }
    let first = points.iter().find(|(at, _)| parts.of(*at).is_some());
    let Some((first, _)) = first else {
        return Vec::new();
    };
    let is_late = *first > parts.begin_unix_ms + parts.each_ms;
    let since = is_late.then(|| Moment::new(*first));
    let most = highest(&waited);
    let says = format!(
        "Waiting in the last {words}: at most {}, at the end {}",
        format::count(most as u64),
        format::count(last(&waited).unwrap_or_default() as u64)
    );
    let mut charts = vec![Chart {
        title: waiting_title,
        says,
        lines: vec![Line {
            class: "line-waiting",
            name: "waiting",
            path: path(&waited, most, LARGE),
        }],
        since: since.clone(),
    }];
    if inserted.iter().any(Option::is_some) {
        let most = highest(&inserted).max(highest(&done));
        let says = format!(
            "In and done per second in the last {words}: in at most {}, at the end {}; done at most {}, at the end {}",
            format::rate(Some(highest(&inserted))),
            format::rate(last(&inserted)),
            format::rate(Some(highest(&done))),
            format::rate(last(&done))
        );
        charts.push(Chart {
            title: rates_title,
            says,
            lines: vec![
                Line {
                    class: "line-in",
                    name: "in",
                    path: path(&inserted, most, LARGE),
                },
                Line {
                    class: "line-done",
                    name: "done",
                    path: path(&done, most, LARGE),
                },
            ],
            since,
        });
    }
    charts
}

fn highest(values: &[Option<f64>]) -> f64 {
    values.iter().flatten().copied().fold(0.0, f64::max)
}

fn last(values: &[Option<f64>]) -> Option<f64> {
    values.iter().rev().flatten().next().copied()
}

/// The last point of each part that has one, in order.
fn ends(parts: &Parts, points: &[(i64, QueueDepths)]) -> Vec<(usize, (i64, QueueDepths))> {
    let mut ends: Vec<(usize, (i64, QueueDepths))> = Vec::new();
    for point in points {
        let Some(part) = parts.of(point.0) else {
            continue;
        };
        match ends.last_mut() {
            Some((at, end)) if *at == part => *end = *point,
            _ => ends.push((part, *point)),
        }
    }
    ends
}

/// A span that ends with the part of the present time.
struct Parts {
    begin_unix_ms: i64,
    each_ms: i64,
    count: usize,
}

impl Parts {
    fn new(span: DepthSpan, count: usize, now_unix_ms: i64) -> Self {
        let count_ms = i64::try_from(count).unwrap_or(i64::MAX);
        let each_ms = span.ms() / count_ms;
        let end = (now_unix_ms.div_euclid(each_ms) + 1) * each_ms;
        Self {
            begin_unix_ms: end - count_ms * each_ms,
            each_ms,
            count,
        }
    }

    /// The part of a time, if it is within the span.
    fn of(&self, unix_ms: i64) -> Option<usize> {
        let part = (unix_ms - self.begin_unix_ms).div_euclid(self.each_ms);
        usize::try_from(part).ok().filter(|part| *part < self.count)
    }
}

/// A line through the values, with gaps for what is unknown.
fn path(values: &[Option<f64>], most: f64, (width, height): (f64, f64)) -> String {
    let mut text = String::new();
    let step = width / values.len().saturating_sub(1).max(1) as f64;
    let most = if most > 0.0 { most } else { 1.0 };
    let mut is_open = false;
    for (at, value) in values.iter().enumerate() {
        let Some(value) = value else {
            is_open = false;
            continue;
        };
        let x = tenths(at as f64 * step);
        let y = tenths(height - 1.0 - value / most * (height - 2.0));
        if is_open {
            text.push_str(&format!("L{x} {y}"));
        } else {
            // A point alone is a dot.
            text.push_str(&format!("M{x} {y}h.1"));
        }
        is_open = true;
    }
    text
}

fn tenths(number: f64) -> String {
    let text = format!("{number:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::QueueName;

    fn depths(waiting: u64, completed: u64) -> QueueDepths {
        QueueDepths {
            waiting,
            completed,
            ..QueueDepths::default()
        }
    }

    fn entry(at_unix_ms: i64, of: QueueDepths) -> Arc<DepthEntry> {
        Arc::new(DepthEntry {
            at_unix_ms,
            queues: vec![("q".to_owned(), of)],
        })
    }

    #[test]
    fn rates_and_quiet_are_those_of_the_last_minute() {
        let now = 3_600_000 * 10;
        let entries = [
            entry(now - 400_000, depths(1, 0)),
            entry(now - 100_000, depths(20, 0)),
            entry(now - 10_000, depths(5, 50)),
        ];
        let all = Lately::of_all(&entries, now);
        let lately = &all["q"];
        let view = QueueView {
            queue: QueueName::new("q").unwrap(),
            pending: 0,
            waiting: 30,
            assigned: 0,
            delayed: 0,
            leases: 0,
            completed: 100,
            dead: 0,
            cancelled: 0,
            oldest_waiting_ms: None,
            paused: false,
            unread_shards: 0,
        };
        let rates = lately.rates(&view, now).unwrap();
        assert_eq!((rates.inserted, rates.completed), (1.1, 1.0));
        assert_eq!(lately.is_quiet(&view), Some(false));
        let same = QueueView {
            completed: 0,
            ..view.clone()
        };
        assert_eq!(lately.is_quiet(&same), Some(true));
        let young = Lately::of_all(&entries[2..], now);
        assert!(young["q"].rates(&view, now).is_none());
        assert_eq!(young["q"].is_quiet(&view), None);
        assert_eq!(lately.waiting.iter().flatten().count(), 3);
        let (_, says) = small(&lately.waiting).unwrap();
        assert_eq!(says, "Waiting in the last hour: at most 20, at the end 5");
        assert!(small(&[None, None]).is_none());
        let mut sum = Vec::new();
        add(&mut sum, &[None, Some(1), Some(2)]);
        add(&mut sum, &[None, None, Some(3)]);
        assert_eq!(sum, [None, Some(1), Some(5)]);
    }

    #[test]
    fn a_chart_says_what_it_draws() {
        let now = 3_600_000 * 10;
        let at = |minutes: i64| now - minutes * 60_000;
        // A part of the tasks waits in SQL.
        let parked = QueueDepths {
            pending: 3,
            ..depths(5, 0)
        };
        let entries = [
            entry(at(90), depths(99, 0)),
            entry(at(3), parked),
            entry(at(2), depths(4, 120)),
            entry(at(0), depths(0, 240)),
        ];
        let charts = of_queue(&entries, "q", DepthSpan::Hour, now);
        let says: Vec<&str> = charts.iter().map(|chart| &chart.says[..]).collect();
        assert_eq!(
            says,
            [
                "Waiting in the last hour: at most 8, at the end 0",
                "In and done per second in the last hour: in at most 1.9, at the end 1.0; done at most 2.0, at the end 1.0",
            ]
        );
        assert!(
            charts[0].since.is_some(),
            "there is nothing of the first half"
        );
        assert!(of_queue(&entries, "other", DepthSpan::Hour, now).is_empty());
        assert_eq!(
            path(&[Some(0.0), None, Some(2.0), Some(1.0)], 2.0, (6.0, 4.0)),
            "M0 3h.1M4 1h.1L6 2"
        );
    }
}
