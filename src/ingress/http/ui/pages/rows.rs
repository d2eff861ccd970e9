//! A queue as a row of numbers and a word for its state.

use crate::{
    ingress::http::ui::{
        charts::{self, Lately, Rates},
        format::{self, Moment},
        looks::{Heard, State},
    },
    model::{QueueBooks, QueueView},
};

/// A queue whose oldest task waits for less is not called unworked yet.
const UNWORKED_MS: u64 = 60_000;
/// A queue whose oldest task waits longer is slow.
const SLOW_MS: u64 = 3_600_000;

/// The state of a queue in a word: the first that is true. The worst comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QueueState {
    /// Tasks wait, no worker has one, and for a minute none has ended and no worker was heard.
    NotWorked,
    Unread,
    Parked,
    Slow,
    Paused,
    Ok,
    Idle,
}

impl QueueState {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::NotWorked => "not worked",
            Self::Unread => "unread shards",
            Self::Parked => "parked",
            Self::Slow => "slow",
            Self::Paused => "paused",
            Self::Ok => "ok",
            Self::Idle => "idle",
        }
    }

    pub(super) fn shape(self) -> &'static str {
        match self {
            Self::NotWorked => "▲",
            Self::Unread => "✕",
            Self::Parked => "■",
            Self::Slow => "◆",
            Self::Paused => "‖",
            Self::Ok => "●",
            Self::Idle => "○",
        }
    }

    pub(super) fn class(self) -> &'static str {
        match self {
            Self::NotWorked | Self::Unread => "bad",
            Self::Parked | Self::Slow | Self::Paused => "warn",
            Self::Ok => "ok",
            Self::Idle => "idle",
        }
    }
}

/// A queue, or a group of queues.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// The id of its element, and the link to its page from `/ui/` on.
    pub(super) id: String,
    pub(super) link: String,
    pub(super) name: String,
    /// How many queues are in the group; 0 for a queue.
    pub(super) queues: usize,
    pub(super) state: QueueState,
    pub(super) waiting: u64,
    pub(super) leased: u64,
    /// In SQL, or not due yet.
    pub(super) later: u64,
    pub(super) oldest_ms: Option<u64>,
    pub(super) inserted: Option<f64>,
    pub(super) done: Option<f64>,
    pub(super) completed: u64,
    pub(super) dead: u64,
    /// The most that waited in each minute of the last hour.
    pub(super) minutes: Vec<Option<u64>>,
}

impl Row {
    pub(super) fn new(
        view: &QueueView,
        rates: Option<&Rates>,
        lately: Option<&Lately>,
        books: Option<&QueueBooks>,
        heard: Option<&Heard>,
        sql: &State,
    ) -> Self {
        let name = view.queue.to_string();
        let of_history = lately.and_then(|lately| lately.rates(view, sql.at_unix_ms));
        // Old totals do not say whether a task has ended.
        let is_fresh = sql.failed.is_none();
        let rates = of_history.as_ref().or(rates);
        Self {
            id: format!("q-{name}"),
            link: format!("queues/{name}"),
            queues: 0,
            state: state(view, lately.filter(|_| is_fresh), books, heard),
            waiting: view.waiting,
            leased: view.leases,
            later: view.pending + view.delayed,
            oldest_ms: view.oldest_waiting_ms,
            inserted: rates.map(|rates| rates.inserted),
            done: rates.map(|rates| rates.completed),
            completed: view.completed,
            dead: view.dead,
            minutes: lately
                .map(|lately| lately.waiting.clone())
                .unwrap_or_default(),
            name,
        }
    }

    /// Adds a queue to the row of its group.
    pub(super) fn add(&mut self, other: &Self) {
        let sum = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or_default() + b.unwrap_or_default()),
        };
        self.queues += 1;
        self.state = self.state.min(other.state);
        self.waiting += other.waiting;
        self.leased += other.leased;
        self.later += other.later;
        self.oldest_ms = self.oldest_ms.max(other.oldest_ms);
        self.inserted = sum(self.inserted, other.inserted);
        self.done = sum(self.done, other.done);
        self.completed += other.completed;
        self.dead += other.dead;
        charts::add(&mut self.minutes, &other.minutes);
    }

    pub(super) fn waiting(&self) -> String {
        format::count(self.waiting)
    }

    pub(super) fn leased(&self) -> String {
        format::count(self.leased)
    }

    pub(super) fn later(&self) -> String {
        format::count(self.later)
    }

    pub(super) fn oldest(&self) -> String {
        self.oldest_ms.map_or_else(|| "–".to_owned(), format::age)
    }

    pub(super) fn inserted(&self) -> String {
        format::rate(self.inserted)
    }

    pub(super) fn done(&self) -> String {
        format::rate(self.done)
    }

    pub(super) fn completed(&self) -> String {
        format::count(self.completed)
    }

    pub(super) fn dead(&self) -> String {
        format::count(self.dead)
    }

    /// The line of the last hour, and its sentence.
    pub(super) fn hour(&self) -> Option<(String, String)> {
        charts::small(&self.minutes)
    }
}

fn state(
    view: &QueueView,
    lately: Option<&Lately>,
    books: Option<&QueueBooks>,
    heard: Option<&Heard>,
) -> QueueState {
    let is_heard = heard.is_some_and(|heard| heard.queues.contains(view.queue.as_str()));
    let unfinished = view.pending + view.waiting + view.assigned + view.delayed;
    // A worker that is heard may fail at each task, so that none ends.
    let is_quiet = !is_heard
        && match lately.and_then(|lately| lately.is_quiet(view)) {
            Some(is_quiet) => is_quiet,
            // Workers that are not in the list may be of this queue.
            None => heard.is_some_and(|heard| !heard.has_more),
        };
    let waits = view.waiting > 0 && view.oldest_waiting_ms.is_some_and(|ms| ms > UNWORKED_MS);
    if view.paused {
        QueueState::Paused
    } else if waits && view.leases == 0 && is_quiet {
        QueueState::NotWorked
    } else if view.unread_shards > 0 {
        QueueState::Unread
    } else if books.is_some_and(|books| books.held.parked > 0) {
        QueueState::Parked
    } else if view.oldest_waiting_ms.is_some_and(|ms| ms > SLOW_MS) {
        QueueState::Slow
    } else if unfinished == 0 {
        QueueState::Idle
    } else {
        QueueState::Ok
    }
}

/// A line above a page about something that is wrong, with the first thing to do.
pub(super) struct Banner {
    /// What it is about. Its numbers may change; a new name is announced.
    pub(super) name: String,
    /// `bad` or `warn`.
    pub(super) kind: &'static str,
    pub(super) since: Option<Moment>,
    pub(super) text: String,
    /// From `/ui/` on; empty if there is none.
    pub(super) link: String,
    pub(super) act: &'static str,
}

impl Banner {
    pub(super) fn new(
        name: impl Into<String>,
        kind: &'static str,
        text: String,
        link: &str,
        act: &'static str,
    ) -> Self {
        Self {
            name: name.into(),
            kind,
            since: None,
            text,
            link: link.to_owned(),
            act,
        }
    }

    pub(super) fn linked(self, link: &str, act: &'static str) -> Self {
        Self {
            link: link.to_owned(),
            act,
            ..self
        }
    }

    /// For what is old because a server does not answer.
    pub(super) fn of_failure(what: &'static str, failed: Option<&(i64, String)>) -> Option<Self> {
        let (since, why) = failed?;
        let text = format!(
            "{what} cannot be read; what is grey is older. taskd tries again. {}",
            format::line(why)
        );
        Some(Self {
            since: Some(Moment::new(*since)),
            ..Self::new(what, "bad", text, "", "")
        })
    }

    /// For the servers that the numbers of queues come from.
    pub(super) fn of_servers(sql: &State, redis: &State) -> Vec<Self> {
        let of_sql = Self::of_failure("The database", sql.failed.as_ref());
        let of_redis = Self::of_failure("Redis", redis.failed.as_ref());
        of_sql.into_iter().chain(of_redis).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{DepthEntry, QueueDepths, QueueName, SeenWorker, SeenWorkers};

    fn queue(waiting: u64, oldest_waiting_ms: Option<u64>) -> QueueView {
        QueueView {
            queue: QueueName::new("q").unwrap(),
            pending: 0,
            waiting,
            assigned: 0,
            delayed: 0,
            leases: 0,
            completed: 0,
            dead: 0,
            cancelled: 0,
            oldest_waiting_ms,
            paused: false,
            unread_shards: 0,
        }
    }

    #[test]
    fn the_worst_state_of_a_queue_is_its_word() {
        let now = 1_000_000;
        let heard = |queue: &str, ago| {
            let seen = SeenWorkers {
                workers: vec![SeenWorker {
                    worker: "w".to_owned(),
                    process: String::new(),
                    address: String::new(),
                    queues: vec![queue.to_owned()],
                    since_unix_ms: 0,
                    heard_unix_ms: now - ago,
                    in_hand: 0,
                    done: 0,
                    failed: 0,
                }],
                more: 0,
                unread_leases: 0,
            };
            Heard::new(&seen, now)
        };
        let of = |view: &QueueView, heard: &Heard| state(view, None, None, Some(heard));
        let old = queue(3, Some(61_000));
        assert_eq!(of(&old, &heard("q", 1000)), QueueState::Ok);
        assert_eq!(of(&old, &heard("q", 61_000)), QueueState::NotWorked);
        assert_eq!(of(&old, &heard("other", 0)), QueueState::NotWorked);
        let more = Heard {
            has_more: true,
            ..heard("other", 0)
        };
        assert_eq!(
            of(&old, &more),
            QueueState::Ok,
            "one of them may work there"
        );
        assert_eq!(state(&old, None, None, None), QueueState::Ok, "unknown");
        // No task has ended, but a worker that fails at each of them works.
        let depths = QueueDepths {
            waiting: 3,
            ..QueueDepths::default()
        };
        let entry = DepthEntry {
            at_unix_ms: now - 90_000,
            queues: vec![("q".to_owned(), depths)],
        };
        let all = Lately::of_all(&[Arc::new(entry)], now);
        let with_history = |heard: Option<&Heard>| state(&old, Some(&all["q"]), None, heard);
        assert_eq!(with_history(Some(&heard("q", 1000))), QueueState::Ok);
        assert_eq!(with_history(Some(&more)), QueueState::NotWorked);
        assert_eq!(with_history(None), QueueState::NotWorked);
        assert_eq!(
            of(&queue(3, Some(59_000)), &heard("other", 0)),
            QueueState::Ok
        );
        let leased = QueueView {
            leases: 1,
            ..old.clone()
        };
        assert_eq!(of(&leased, &heard("other", 0)), QueueState::Ok);
        let slow = QueueView {
            oldest_waiting_ms: Some(SLOW_MS + 1),
            ..leased
        };
        assert_eq!(of(&slow, &heard("q", 0)), QueueState::Slow);
        let paused = QueueView {
            paused: true,
            ..old
        };
        assert_eq!(of(&paused, &heard("other", 0)), QueueState::Paused);
        assert_eq!(of(&queue(0, None), &heard("q", 0)), QueueState::Idle);
    }
}
