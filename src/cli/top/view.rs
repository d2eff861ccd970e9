//! The lines of the screen.

use std::{cmp::Reverse, time::Duration};

use clap::ValueEnum;

use super::latency::{CALLS, Calls, Latency};
use crate::{
    cli::{
        ask::cut,
        queues::{Queue, QueuesSnapshot, Rates, per_second},
    },
    config::Time,
};

/// The column that queues are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, ValueEnum)]
pub(super) enum Key {
    #[default]
    Waiting,
    Pending,
    #[value(alias = "leased")]
    Leases,
    Delayed,
    In,
    #[value(alias = "done")]
    Completed,
    Dead,
    Oldest,
    Queue,
}

impl Key {
    const ALL: [(Self, &'static str); 9] = [
        (Self::Queue, "queue"),
        (Self::Pending, "pending"),
        (Self::Waiting, "waiting"),
        (Self::Leases, "leases"),
        (Self::Delayed, "delayed"),
        (Self::In, "in/s"),
        (Self::Completed, "compl/s"),
        (Self::Dead, "dead"),
        (Self::Oldest, "oldest"),
    ];

    fn next(self) -> Self {
        let at = Self::ALL
            .iter()
            .position(|(key, _)| *key == self)
            .unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()].0
    }

    fn name(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(key, _)| *key == self)
            .map_or("", |(_, name)| name)
    }
}

/// The width of a number column, including the space before it.
const NUMBER: usize = 8;
/// How many number columns there are.
const NUMBERS: usize = 8;
/// The minimum width of the name column.
const NAME: usize = 12;

/// The result of one snapshot.
pub(super) struct Seen {
    pub(super) queues: QueuesSnapshot,
    /// The error says why latencies are missing, for example because the token does not cover all
    /// queues.
    pub(super) calls: Result<Calls, String>,
}

/// Everything that the screen shows.
pub(super) struct View {
    url: String,
    pub(super) every: Duration,
    sort: Key,
    pub(super) is_paused: bool,
    now: Option<Seen>,
    before: Option<Seen>,
    failure: Option<String>,
}

impl View {
    pub(super) fn new(url: &str, every: Duration, sort: Key) -> Self {
        Self {
            url: url.to_owned(),
            every,
            sort,
            is_paused: false,
            now: None,
            before: None,
            failure: None,
        }
    }

    pub(super) fn see(&mut self, seen: Seen) {
        self.before = self.now.replace(seen);
        self.failure = None;
    }

    /// Keeps the last snapshot on the screen, and shows why the next one failed.
    pub(super) fn fail(&mut self, why: String) {
        self.failure = Some(why);
    }

    pub(super) fn sort_by_next(&mut self) {
        self.sort = self.sort.next();
    }

    /// The lines for a screen of this size, each at most `width` wide and at most `height` in
    /// number.
    pub(super) fn lines(&self, width: usize, height: usize) -> Vec<String> {
        let every = Time(self.every);
        let state = if self.is_paused {
            "paused".to_owned()
        } else {
            format!("every {every}")
        };
        let sort = self.sort.name();
        let mut lines = vec![format!(
            "taskd top  {}  {state}, by {sort}   s sort  p pause  q quit",
            self.url
        )];
        lines.push(self.failure.clone().unwrap_or_default());
        if let Some(now) = &self.now {
            lines.extend(self.calls(now));
            lines.push(String::new());
            lines.extend(self.queues(now, width, height.saturating_sub(lines.len())));
        }
        lines.truncate(height);
        lines.iter().map(|line| cut(line, width)).collect()
    }

    fn calls(&self, now: &Seen) -> Vec<String> {
        let calls = match &now.calls {
            Ok(calls) => calls,
            Err(why) => return vec![format!("no latencies: {why}")],
        };
        let Some(before) = &self.before else {
            return vec!["calls: after the next look".to_owned()];
        };
        let elapsed = now.queues.at - before.queues.at;
        let mut lines = vec![format!(
            "{:<10}{:>NUMBER$}{:>NUMBER$}{:>NUMBER$}",
            "call", "calls/s", "p50 <", "p99 <"
        )];
        for name in CALLS {
            let latency = calls.since(before.calls.as_ref().ok(), name);
            let rate = number(per_second(
                latency.as_ref().map_or(0, |latency| latency.calls),
                elapsed,
            ));
            let bound = |of: fn(&Latency) -> Option<Duration>| match &latency {
                Some(latency) => {
                    of(latency).map_or("more".to_owned(), |bound| format!("{bound:?}"))
                }
                None => "-".to_owned(),
            };
            let median = bound(|latency| latency.median);
            let p99 = bound(|latency| latency.p99);
            lines.push(format!(
                "{name:<10}{rate:>NUMBER$}{median:>NUMBER$}{p99:>NUMBER$}"
            ));
        }
        lines
    }

    fn queues(&self, now: &Seen, width: usize, height: usize) -> Vec<String> {
        let before = self.before.as_ref().map(|before| &before.queues);
        let mut rows: Vec<(&Queue, Rates)> = now
            .queues
            .queues
            .iter()
            .map(|queue| (queue, now.queues.rates(queue, before).unwrap_or_default()))
            .collect();
        // Rates are finite and never negative, so their bits sort like the numbers.
        rows.sort_by_cached_key(|(queue, rates)| {
            let by = match self.sort {
                Key::Waiting => queue.counts.waiting,
                Key::Pending => queue.counts.pending,
                Key::Leases => queue.leases,
                Key::Delayed => queue.counts.delayed,
                Key::In => rates.inserted.to_bits(),
                Key::Completed => rates.completed.to_bits(),
                Key::Dead => queue.counts.dead,
                Key::Oldest => queue.oldest_waiting_ms.unwrap_or_default(),
                Key::Queue => 0,
            };
            (Reverse(by), queue.queue.clone())
        });
        let name = width.saturating_sub(NUMBER * NUMBERS).max(NAME);
        let row = |cells: [String; NUMBERS + 1]| {
            let [first, others @ ..] = cells;
            let others: String = others
                .iter()
                .map(|cell| format!("{cell:>NUMBER$}"))
                .collect();
            format!("{:<name$}{others}", cut(&first, name))
        };
        let mut lines = vec![row(Key::ALL.map(|(_, name)| name.to_owned()))];
        // Leave one line for the header, and one for the note about rows that do not fit.
        let fit = height.saturating_sub(2);
        lines.extend(rows.iter().take(fit).map(|(queue, rates)| {
            let oldest = queue.oldest_waiting_ms.map_or("-".to_owned(), age);
            row([
                match queue.mark() {
                    "" => queue.queue.clone(),
                    mark => format!("{}{mark}", cut(&queue.queue, name - mark.len())),
                },
                number(queue.counts.pending as f64),
                number(queue.counts.waiting as f64),
                number(queue.leases as f64),
                number(queue.counts.delayed as f64),
                number(rates.inserted),
                number(rates.completed),
                number(queue.counts.dead as f64),
                oldest,
            ])
        }));
        match rows.len().saturating_sub(fit) {
            0 if rows.is_empty() => lines.push("no queue is open".to_owned()),
            0 => {}
            more => lines.push(format!("… and {more} more")),
        }
        lines
    }
}

/// Formats a number in at most seven characters.
fn number(value: f64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")];
    match UNITS.into_iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) => format!("{:.1}{name}", value / if name == "k" { 1e3 } else { unit }),
        None if value > 0.0 && value < 10.0 && value.fract() > 0.0 => format!("{value:.1}"),
        None => format!("{value:.0}"),
    }
}

/// Formats an age in its largest unit.
fn age(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7200 => format!("{}m", seconds / 60),
        seconds @ 7200..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::cli::queues::Counts;

    fn queue(name: &str, waiting: u64, dead: u64) -> Queue {
        let counts = Counts {
            waiting,
            dead,
            ..Counts::default()
        };
        Queue {
            queue: name.to_owned(),
            counts,
            oldest_waiting_ms: Some(61_000),
            ..Queue::default()
        }
    }

    fn seen(at: Instant, queues: Vec<Queue>) -> Seen {
        Seen {
            queues: QueuesSnapshot { at, queues },
            calls: Ok(Calls::default()),
        }
    }

    fn names(lines: &[String]) -> Vec<&str> {
        let header = lines
            .iter()
            .position(|line| line.starts_with("queue "))
            .unwrap();
        lines[header + 1..]
            .iter()
            .map(|line| line.split(' ').next().unwrap())
            .collect()
    }

    #[test]
    fn queues_are_sorted_by_the_key() {
        let mut view = View::new("http://h", Duration::from_secs(1), Key::Waiting);
        let at = Instant::now();
        view.see(seen(
            at,
            vec![queue("a", 1, 9), queue("b", 5, 0), queue("c", 5, 1)],
        ));
        view.see(seen(
            at + Duration::from_secs(1),
            vec![queue("a", 1, 9), queue("b", 5, 0), queue("c", 9, 1)],
        ));
        assert_eq!(names(&view.lines(80, 24)), ["c", "b", "a"]);
        for (key, want) in [
            (Key::Dead, ["a", "c", "b"]),
            (Key::Queue, ["a", "b", "c"]),
            (Key::In, ["c", "a", "b"]),
        ] {
            view.sort = key;
            assert_eq!(names(&view.lines(80, 24)), want, "{key:?}");
        }
        for _ in Key::ALL {
            view.sort_by_next();
        }
        assert_eq!(view.sort, Key::In, "the keys go round");
    }

    #[test]
    fn a_paused_queue_is_marked() {
        let mut view = View::new("http://h", Duration::from_secs(1), Key::Waiting);
        let paused = |name: &str| Queue {
            paused: true,
            ..queue(name, 1, 0)
        };
        let unread = Queue {
            unread_shards: 1,
            ..paused("c")
        };
        view.see(seen(
            Instant::now(),
            vec![
                paused("a"),
                paused(&"x".repeat(60)),
                queue("b", 1, 0),
                unread,
            ],
        ));
        let lines = view.lines(80, 24).join("\n");
        assert!(
            lines.contains("\na (paused)  ")
                && lines.contains("xxx… (paused)")
                && !lines.contains("b ("),
            "{lines}"
        );
        assert!(lines.contains("\nc (unread)  "), "{lines}");
    }

    #[test]
    fn no_screen_is_too_small() {
        let mut view = View::new(
            "http://127.0.0.1:7600",
            Duration::from_secs(1),
            Key::Waiting,
        );
        let queues: Vec<_> = (0..100)
            .map(|n| queue(&format!("{n}-{}", "x".repeat(60)), n, 0))
            .collect();
        view.see(seen(Instant::now(), queues));
        view.fail("a reason ".repeat(30));
        for (width, height) in [(1, 1), (10, 3), (80, 24), (200, 60)] {
            let lines = view.lines(width, height);
            assert!(lines.len() <= height, "{width} x {height}");
            assert!(
                lines.iter().all(|line| line.chars().count() <= width),
                "{width} x {height}: {lines:?}"
            );
        }
        let lines = view.lines(80, 24);
        assert_eq!(lines.last().unwrap(), "… and 82 more", "{lines:#?}");
        assert!(
            lines[0].ends_with("q quit"),
            "80 columns have the keys: {lines:#?}"
        );
    }

    #[test]
    fn numbers_are_short() {
        for (value, want) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (9999.0, "9999"),
            (12_345.0, "12.3k"),
            (1_234_567.0, "1.2M"),
            (5e9, "5.0G"),
            (1.8e19, "18000000.0T"),
        ] {
            assert_eq!(number(value), want);
        }
        assert_eq!(
            [1_000, 7_199_000, 86_400_000, 999_999_999_999].map(age),
            ["1s", "119m", "24h", "11574d"]
        );
    }
}
