//! The time of tasks from their insert to their completion, by queue and priority, with exemplars.

use std::{
    collections::HashMap,
    fmt::Write as _,
    sync::OnceLock,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ::metrics::{Unit, describe_histogram, histogram};
use parking_lot::Mutex;

use crate::model::{Priority, TraceId};

pub const TASKS_LATENCY: &str = "taskd_tasks_latency_seconds";

/// From a task that is completed at once to one that waits for a day.
pub(super) const BUCKETS: [f64; 13] = [
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, 86_400.0,
];

/// The most queues with series of their own. Each has up to 48 series.
const MOST_QUEUES: usize = 100;
/// The label that all further queues share. No queue can have this name.
pub const OTHER_QUEUES: &str = "(others)";

static QUEUES: Mutex<Option<Queues>> = Mutex::new(None);
static FORGET: OnceLock<Duration> = OnceLock::new();

/// The queues with series of their own, and when each had its last completion.
type Queues = HashMap<String, Instant>;

/// A sampled task as the exemplar of its bucket: the last one.
#[derive(Clone, Copy, Debug)]
struct Exemplar {
    trace: TraceId,
    seconds: f64,
    at: SystemTime,
}

type Exemplars = HashMap<(String, Priority), [Option<Exemplar>; BUCKETS.len() + 1]>;

static EXEMPLARS: Mutex<Option<Exemplars>> = Mutex::new(None);

pub(super) fn describe() {
    describe_histogram!(
        TASKS_LATENCY,
        Unit::Seconds,
        "From the insert of a task to its last completion, by queue"
    );
}

/// Sets after which time without a completion a queue loses its series. Zero: never.
pub(super) fn forget_after(forget: Duration) {
    // The first recorder of a process sets it.
    FORGET.get_or_init(|| forget);
}

/// Tasks of a queue and a priority were completed: how long each took, and its trace if it is
/// sampled.
pub fn tasks_completed(
    queue: &str,
    priority: Priority,
    tasks: impl IntoIterator<Item = (Duration, Option<TraceId>)>,
) {
    let queue = label_of(queue);
    let series = histogram!(TASKS_LATENCY, "queue" => queue.clone(), "priority" => name(priority));
    for (took, trace) in tasks {
        series.record(took);
        if let Some(trace) = trace {
            let seconds = took.as_secs_f64();
            let at = SystemTime::now();
            let bucket = BUCKETS
                .iter()
                .position(|bound| seconds <= *bound)
                .unwrap_or(BUCKETS.len());
            let mut exemplars = EXEMPLARS.lock();
            let of_series = exemplars
                .get_or_insert_default()
                .entry((queue.clone(), priority))
                .or_default();
            of_series[bucket] = Some(Exemplar { trace, seconds, at });
        }
    }
}

/// Returns the label of a queue: its name if it may have series of its own, else [`OTHER_QUEUES`].
fn label_of(queue: &str) -> String {
    let mut queues = QUEUES.lock();
    let queues = queues.get_or_insert_default();
    if let Some(last) = queues.get_mut(queue) {
        *last = Instant::now();
        return queue.to_owned();
    }
    if queues.len() >= MOST_QUEUES {
        let forget = FORGET.get().copied().unwrap_or_default();
        queues.retain(|_, last| forget.is_zero() || last.elapsed() < forget);
        if queues.len() >= MOST_QUEUES {
            return OTHER_QUEUES.to_owned();
        }
        // The series of the other queues are gone, or will be dropped at the next rendering.
        if let Some(exemplars) = &mut *EXEMPLARS.lock() {
            exemplars.retain(|(queue, _), _| queue == OTHER_QUEUES || queues.contains_key(queue));
        }
    }
    queues.insert(queue.to_owned(), Instant::now());
    queue.to_owned()
}

fn name(priority: Priority) -> &'static str {
    match priority {
        Priority::High => "high",
        Priority::Medium => "medium",
        Priority::Low => "low",
    }
}

/// Appends the exemplar of its bucket to a line of the histogram. Other lines stay as they are.
pub(super) fn add_exemplar(line: &mut String) {
    let Some(exemplar) = exemplar_of(line) else {
        return;
    };
    let at = exemplar
        .at
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64();
    // Writing to a string does not fail.
    write!(
        line,
        " # {{trace_id=\"{}\"}} {} {at:.3}",
        exemplar.trace, exemplar.seconds
    )
    .ok();
}

fn exemplar_of(line: &str) -> Option<Exemplar> {
    let labels = line.strip_prefix(TASKS_LATENCY)?.strip_prefix("_bucket{")?;
    // No queue has quotes or braces in its name.
    let value = |name: &str| {
        let from = labels.find(&format!("{name}=\""))? + name.len() + 2;
        labels[from..].split('"').next()
    };
    let priority = Priority::ALL
        .into_iter()
        .find(|priority| Some(self::name(*priority)) == value("priority"))?;
    let bucket = match value("le")? {
        "+Inf" => BUCKETS.len(),
        bound => {
            let bound: f64 = bound.parse().ok()?;
            BUCKETS.iter().position(|one| *one == bound)?
        }
    };
    let exemplars = EXEMPLARS.lock();
    exemplars
        .as_ref()?
        .get(&(value("queue")?.to_owned(), priority))?[bucket]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_shows_its_last_sampled_task() {
        let trace = |byte| Some(TraceId([byte; 16]));
        let ms = Duration::from_millis;
        let tasks = [
            (ms(70), trace(1)),
            (ms(80), trace(2)),
            (ms(90), None),
            (Duration::from_secs(90_000), trace(3)),
        ];
        tasks_completed("exemplar", Priority::High, tasks);
        let shown = |queue: &str, le: &str| {
            let mut line = format!(
                "{TASKS_LATENCY}_bucket{{queue=\"{queue}\",priority=\"high\",le=\"{le}\"}} 3"
            );
            add_exemplar(&mut line);
            line.split_once(" # ")
                .map(|(_, exemplar)| exemplar.rsplit_once(' ').unwrap().0.to_owned())
        };
        let exemplar = |byte: u8, seconds: &str| {
            Some(format!(
                "{{trace_id=\"{}\"}} {seconds}",
                TraceId([byte; 16])
            ))
        };
        assert_eq!(shown("exemplar", "0.1"), exemplar(2, "0.08"));
        assert_eq!(shown("exemplar", "+Inf"), exemplar(3, "90000"));
        assert_eq!(
            (shown("exemplar", "0.05"), shown("another", "0.1")),
            (None, None)
        );
    }

    #[test]
    fn queues_beyond_the_limit_share_their_series() {
        let labels: Vec<_> = (0..2 * MOST_QUEUES)
            .map(|n| label_of(&format!("many-{n}")))
            .collect();
        assert_eq!(labels[2 * MOST_QUEUES - 1], OTHER_QUEUES);
        let own = labels.iter().filter(|label| *label != OTHER_QUEUES).count();
        assert!((MOST_QUEUES - 5..=MOST_QUEUES).contains(&own), "{own}");
        assert_eq!(label_of("many-0"), labels[0], "a queue keeps its series");
    }
}
