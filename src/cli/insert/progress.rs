//! Counts the outcome of the lines and notices when taskd falls silent, for the progress bar,
//! stderr and the summary.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use anyhow::bail;
use indicatif::{HumanCount, ProgressBar};
use serde::Serialize;
use tonic::{Code, Status};

use crate::{
    cli::{ask::printable, client, print::say},
    config::Time,
    wire::pb,
};

/// How often to tell the user that the insert waits for taskd.
const TELL_EVERY: Duration = Duration::from_secs(10);
/// The most rejections to show; further ones are only counted.
const REPORTED: u64 = 100;

/// The outcome of all lines.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    pub lines: u64,
    pub created: u64,
    pub duplicate: u64,
    /// Duplicates of tasks that are final, by status.
    pub duplicate_completed: u64,
    pub duplicate_dead: u64,
    pub duplicate_cancelled: u64,
    pub rejected: u64,
    /// With `--wait`: tasks that were completed, and others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_completed: Option<u64>,
    /// The tree of the tasks: that of the first one, if they are in several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<String>,
    #[serde(skip)]
    pub has_several_trees: bool,
    pub seconds: f64,
    pub lines_per_second: f64,
}

/// The progress of all batches in flight.
pub(super) struct Progress<'a> {
    /// The URL of taskd, for messages.
    server: &'a str,
    give_up_after: Time,
    bar: &'a ProgressBar,
    started: Instant,
    state: RefCell<State>,
}

struct State {
    summary: Summary,
    /// Batches that wait for an answer.
    waiting: usize,
    /// The time of the last answer, or the beginning of the wait for one.
    since: Instant,
    /// Why the last request failed.
    why: String,
    /// When the user was last told about the wait; `None` after an answer.
    told: Option<Instant>,
}

/// A batch that waits for answers, until it is dropped.
pub(super) struct Waiting<'a>(&'a Progress<'a>);

impl<'a> Progress<'a> {
    pub(super) fn new(server: &'a str, give_up_after: Time, bar: &'a ProgressBar) -> Self {
        let started = Instant::now();
        let state = State {
            summary: Summary::default(),
            waiting: 0,
            since: started,
            why: String::new(),
            told: None,
        };
        Self {
            server,
            give_up_after,
            bar,
            started,
            state: state.into(),
        }
    }

    pub(super) fn read(&self, bytes: usize) {
        self.bar.inc(bytes as u64);
    }

    pub(super) fn wait(&self) -> Waiting<'_> {
        let mut state = self.state.borrow_mut();
        if state.waiting == 0 {
            state.since = Instant::now();
        }
        state.waiting += 1;
        Waiting(self)
    }

    /// Counts the answers to a request, and returns the tasks to send again.
    pub(super) fn answered(
        &self,
        sent: Vec<(u64, pb::NewTask)>,
        results: Vec<pb::InsertResult>,
    ) -> Vec<(u64, pb::NewTask)> {
        let all = sent.len();
        let mut again = Vec::new();
        for ((number, task), result) in sent.into_iter().zip(results) {
            self.note_tree(&result.tree);
            match result.status() {
                pb::InsertStatus::Created => self.state.borrow_mut().summary.created += 1,
                pb::InsertStatus::Duplicate => {
                    let summary = &mut self.state.borrow_mut().summary;
                    summary.duplicate += 1;
                    match result.task_status() {
                        pb::TaskStatus::Completed => summary.duplicate_completed += 1,
                        pb::TaskStatus::Dead => summary.duplicate_dead += 1,
                        pb::TaskStatus::Cancelled => summary.duplicate_cancelled += 1,
                        _ => {}
                    }
                }
                pb::InsertStatus::TryLater => {
                    again.push((number, task));
                    self.state.borrow_mut().why = result.error;
                }
                pb::InsertStatus::Rejected | pb::InsertStatus::Unspecified => {
                    self.rejected(number, &result.error)
                }
            }
        }
        if again.len() < all {
            self.heard();
        }
        again
    }

    fn note_tree(&self, tree: &str) {
        if tree.is_empty() {
            return;
        }
        let summary = &mut self.state.borrow_mut().summary;
        match &summary.tree {
            Some(first) => summary.has_several_trees |= first != tree,
            None => summary.tree = Some(tree.to_owned()),
        }
    }

    /// Counts a task whose wait is over.
    pub(super) fn ended(&self, is_completed: bool) {
        let mut state = self.state.borrow_mut();
        let [completed, not] = [u64::from(is_completed), u64::from(!is_completed)];
        let summary = &mut state.summary;
        summary.completed = Some(summary.completed.unwrap_or(0) + completed);
        summary.not_completed = Some(summary.not_completed.unwrap_or(0) + not);
    }

    pub(super) fn rejected(&self, number: u64, why: &str) {
        let before = self.state.borrow().summary.rejected;
        match before {
            ..REPORTED => self.say(&format!("line {number}: {why}")),
            REPORTED => self.say("further rejected lines are only counted"),
            _ => {}
        }
        self.state.borrow_mut().summary.rejected += 1;
    }

    /// Records why a request failed, and tells the user. If the server is only busy, the user is
    /// told by [`Self::look`] if that lasts.
    pub(super) fn failed(&self, status: &Status) {
        self.state.borrow_mut().why = client::why(status);
        if status.code() != Code::ResourceExhausted && self.state.borrow().told.is_none() {
            self.tell();
        }
    }

    /// Tells the user from time to time that taskd does not answer. Fails after `give_up_after`.
    pub(super) fn look(&self) -> anyhow::Result<()> {
        let state = self.state.borrow();
        if state.waiting == 0 {
            return Ok(());
        }
        let Time(limit) = self.give_up_after;
        if state.since.elapsed() >= limit {
            bail!(
                "gave up: taskd at {} took no line for {}: {}; inserting the same file again makes no task twice",
                self.server,
                self.give_up_after,
                state.why()
            );
        }
        let told = state.told.unwrap_or(state.since);
        drop(state);
        if told.elapsed() >= TELL_EVERY {
            self.tell();
        }
        Ok(())
    }

    pub(super) fn summary(&self) -> Summary {
        let mut summary = self.state.borrow().summary.clone();
        summary.lines = summary.created + summary.duplicate + summary.rejected;
        summary.seconds = self.started.elapsed().as_secs_f64();
        summary.lines_per_second = summary.lines as f64 / summary.seconds.max(0.001);
        summary
    }

    fn tell(&self) {
        let mut state = self.state.borrow_mut();
        state.told = Some(Instant::now());
        self.say(&format!(
            "waiting for taskd at {}: {}",
            self.server,
            state.why()
        ));
    }

    pub(super) fn heard(&self) {
        let mut state = self.state.borrow_mut();
        state.since = Instant::now();
        state.why.clear();
        if state.told.take().is_some() {
            self.say("taskd is back");
        }
        drop(state);
        let Summary {
            lines,
            lines_per_second,
            ..
        } = self.summary();
        self.bar.set_message(format!(
            "{} lines, {}/s",
            HumanCount(lines),
            HumanCount(lines_per_second as u64)
        ));
    }

    /// Prints a line on stderr, even without a bar.
    pub(super) fn say(&self, line: &str) {
        self.bar.suspend(|| say(printable(line)));
    }
}

impl State {
    fn why(&self) -> &str {
        if self.why.is_empty() {
            "no answer"
        } else {
            &self.why
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.borrow_mut().waiting -= 1;
    }
}
