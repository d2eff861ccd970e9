//! The progress of a worker: a line on a terminal, JSON lines elsewhere.

use std::{
    io::{self, IsTerminal as _, Write as _},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{HumanCount, ProgressBar};
use serde_json::{Value, json};
use taskd_client::{Ended, Event, Summary};

use crate::cli::print::print;
use crate::cli::{ask::printable, patience::progress_bar};

/// How often to tell that taskd does not answer.
const TELL_EVERY: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(50);
const SHORTEST_LOOK: Duration = Duration::from_millis(1);

pub(super) struct Show {
    /// `None`: JSON lines.
    bar: Option<ProgressBar>,
    state: Mutex<State>,
}

struct State {
    running: u64,
    completed: u64,
    failed: u64,
    given_back: u64,
    lost: u64,
    told: Option<Instant>,
    /// Of the last event of a task.
    at: Instant,
}

impl Show {
    pub(super) fn new(worker: &str, is_json: bool) -> Self {
        let bar = (!is_json && io::stdout().is_terminal()).then(progress_bar);
        let (running, completed, failed, given_back, lost, told) = (0, 0, 0, 0, 0, None);
        let state = State { running, completed, failed, given_back, lost, told, at: Instant::now() };
        let show = Self { bar, state: state.into() };
        match &show.bar {
            Some(bar) => {
                bar.enable_steady_tick(Duration::from_millis(100));
                bar.set_message(format!("{worker} waits for tasks"));
            }
            None => line(&json!({"event": "up", "worker": worker})),
        }
        show
    }

    pub(super) fn event(&self, event: &Event<'_>) {
        let mut state = self.state();
        match event {
            Event::Started(task) => {
                (state.running, state.at) = (state.running + 1, Instant::now());
                self.draw(&state, &task.key());
            }
            Event::Ended { task, ended, reason, took } => {
                state.running -= u64::from(took.is_some());
                state.at = Instant::now();
                let (count, status) = match ended {
                    Ended::Completed => (&mut state.completed, "completed"),
                    Ended::Rejected => (&mut state.failed, "rejected"),
                    Ended::GivenBack => (&mut state.given_back, "given_back"),
                    Ended::Lost => (&mut state.lost, "lost"),
                };
                *count += 1;
                match &self.bar {
                    Some(bar) if *ended != Ended::Completed => {
                        bar.println(format!("{} {status}: {}", printable(&task.key()), printable(reason)));
                    }
                    Some(_) => {}
                    None => line(&json!({
                        "event": "task", "status": status, "id": task.id(), "queue": task.queue(),
                        "key": task.key(), "attempt": task.attempt(), "reason": reason,
                        "seconds": took.unwrap_or_default().as_secs_f64(),
                    })),
                }
                self.draw(&state, &task.key());
            }
            Event::Away(error) => {
                if state.told.is_some_and(|told| told.elapsed() < TELL_EVERY) {
                    return;
                }
                state.told = Some(Instant::now());
                self.say("away", &error.to_string());
            }
            Event::Draining(0) => self.say("draining", "takes no more tasks"),
            Event::Draining(tasks) => {
                let what = format!("takes no more tasks, and finishes {tasks}; a second Ctrl-C ends them at once");
                self.say("draining", &what);
            }
            _ => {}
        }
    }

    /// Until no task has run for so long.
    pub(super) async fn idle(&self, time: Duration) {
        loop {
            tokio::time::sleep(time.clamp(SHORTEST_LOOK, LOOK_EVERY)).await;
            let state = self.state();
            if state.running == 0 && state.at.elapsed() >= time {
                return;
            }
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    pub(super) fn summary(&self, summary: &Summary) {
        let Summary { completed, rejected, given_back, lost, .. } = summary;
        match self.bar {
            Some(_) => drop(print(format_args!(
                "{completed} completed, {rejected} rejected, {given_back} given back, {lost} lost"
            ))),
            None => line(&json!({
                "event": "summary", "completed": completed, "rejected": rejected, "given_back": given_back,
                "lost": lost,
            })),
        }
    }

    fn draw(&self, state: &State, key: &str) {
        let Some(bar) = &self.bar else { return };
        let State { running, completed, failed, given_back, lost, .. } = state;
        let (completed, failed) = (HumanCount(*completed), HumanCount(*failed));
        let key: String = printable(key).chars().take(60).collect();
        let ends = format!("{completed} completed  {failed} rejected  {given_back} given back  {lost} lost");
        bar.set_message(format!("{running} running  {ends}  {key}"));
    }

    fn say(&self, event: &str, what: &str) {
        match &self.bar {
            Some(bar) => bar.println(format!("taskd: {}", printable(what))),
            None => line(&json!({"event": event, "message": what})),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A JSON line on stdout. A reader that went away is no failure: the work goes on.
fn line(value: &Value) {
    writeln!(io::stdout(), "{value}").ok();
}
