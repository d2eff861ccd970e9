//! The progress of a worker: a line on a terminal, JSON lines elsewhere.

use std::{
    io::{self, IsTerminal as _},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use indicatif::HumanCount;
use serde_json::{Value, json};
use taskd_client::{Ended, Event, Summary, TaskInfo};
use tokio::time::sleep;

use super::output::{Output, Said};
use crate::cli::{ask::printable, patience::progress_bar};

/// How often to repeat that taskd does not answer.
const TELL_EVERY: Duration = Duration::from_secs(10);
/// How long taskd may fail to answer before the worker gives up. If no call has failed for this
/// long, taskd counts as available again.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
/// The lines of a command, and the characters of a line, that a terminal shows.
const MOST_PRINTED: usize = 100;
const LONGEST_PRINTED: usize = 1000;
const LOOK_EVERY: Duration = Duration::from_millis(50);
const SHORTEST_LOOK: Duration = Duration::from_millis(1);

pub(super) struct Show {
    /// Prints JSON lines, and no progress bar.
    is_json: bool,
    shows_results: bool,
    output: Output,
    state: Mutex<State>,
}

struct State {
    running: u64,
    completed: u64,
    failed: u64,
    given_back: u64,
    lost: u64,
    told: Option<Instant>,
    /// When the last event of a task happened.
    at: Instant,
    /// Failed calls since the last event of a task.
    away: Option<Away>,
}

/// A series of failed calls.
struct Away {
    first: Instant,
    last: Instant,
    why: String,
}

impl Show {
    pub(super) fn new(is_json: bool, shows_results: bool) -> io::Result<Self> {
        let is_json = is_json || !io::stdout().is_terminal();
        let bar = (!is_json)
            .then(progress_bar)
            .inspect(|bar| bar.enable_steady_tick(Duration::from_millis(100)));
        let running = 0;
        let completed = 0;
        let failed = 0;
        let given_back = 0;
        let lost = 0;
        let told = None;
        let state = State {
            running,
            completed,
            failed,
            given_back,
            lost,
            told,
            at: Instant::now(),
            away: None,
        };
        Ok(Self {
            is_json,
            shows_results,
            output: Output::new(bar)?,
            state: state.into(),
        })
    }

    pub(super) fn up(&self, worker: &str) {
        if self.is_json {
            self.line(&json!({"event": "up", "worker": worker}));
        } else {
            self.output
                .say(Said::Bar(format!("{worker} waits for tasks")));
        }
    }

    pub(super) fn event(&self, event: &Event<'_>) {
        let mut state = self.state();
        match event {
            Event::Started(task) => {
                state.running += 1;
                state.at = Instant::now();
                state.away = None;
                self.draw(&state, &task.key());
            }
            Event::Ended {
                task,
                ended,
                reason,
                took,
            } => {
                state.running -= u64::from(took.is_some());
                state.at = Instant::now();
                state.away = None;
                let (count, status) = match ended {
                    Ended::Completed => (&mut state.completed, "completed"),
                    Ended::Rejected => (&mut state.failed, "rejected"),
                    Ended::GivenBack => (&mut state.given_back, "given_back"),
                    Ended::Lost => (&mut state.lost, "lost"),
                };
                *count += 1;
                if self.is_json {
                    self.line(&json!({
                        "event": "task", "status": status, "id": task.id(), "queue": task.queue(),
                        "key": task.key(), "attempt": task.attempt(), "reason": reason,
                        "seconds": took.unwrap_or_default().as_secs_f64(),
                    }));
                } else if *ended != Ended::Completed {
                    let above =
                        format!("{} {status}: {}", printable(&task.key()), printable(reason));
                    self.output.say(Said::Above(above));
                }
                self.draw(&state, &task.key());
            }
            Event::NotStored { task, reason } => self.not_stored(task, reason),
            Event::Away(error) => self.away(&mut state, &error.to_string()),
            Event::Draining(0) => self.say("draining", "takes no more tasks"),
            Event::Draining(tasks) => {
                let what = format!(
                    "takes no more tasks, and finishes {tasks}; a second Ctrl-C ends them at once"
                );
                self.say("draining", &what);
            }
            _ => {}
        }
    }

    /// Records a call that failed and may succeed later.
    fn away(&self, state: &mut State, why: &str) {
        state.fails(why, Instant::now());
        if state.told.is_some_and(|told| told.elapsed() < TELL_EVERY) {
            return;
        }
        state.told = Some(Instant::now());
        self.say("away", why);
    }

    /// What the command of a task has printed, which becomes its result. JSON lines leave it out,
    /// unless it is asked for.
    pub(super) fn printed(&self, task: &TaskInfo, printed: &[u8]) {
        if self.is_json && self.shows_results {
            let result = String::from_utf8_lossy(printed);
            self.line(&json!({
                "event": "result", "id": task.id(), "queue": task.queue(), "key": task.key(),
                "result": result.strip_suffix('\n').unwrap_or(&result),
            }));
            return;
        }
        if self.is_json || printed.is_empty() {
            return;
        }
        let key = printable(&task.key());
        let Ok(text) = std::str::from_utf8(printed) else {
            let bytes = printed.len();
            self.output
                .say(Said::Above(format!("{key}: {bytes} bytes")));
            return;
        };
        for line in text.lines().take(MOST_PRINTED) {
            let line: String = printable(line).chars().take(LONGEST_PRINTED).collect();
            self.output.say(Said::Above(format!("{key}: {line}")));
        }
        let more = text.lines().count().saturating_sub(MOST_PRINTED);
        if more > 0 {
            self.output
                .say(Said::Above(format!("{key}: and {more} more lines")));
        }
    }

    /// Reports discovered tasks that are invalid and were not stored.
    pub(super) fn not_stored(&self, task: &TaskInfo, reason: &str) {
        if self.is_json {
            self.line(&json!({
                "event": "not_stored", "id": task.id(), "queue": task.queue(), "key": task.key(), "reason": reason,
            }));
        } else {
            self.output.say(Said::Above(format!(
                "{}: {}",
                printable(&task.key()),
                printable(reason)
            )));
        }
    }

    /// Waits until no task has run for this time and the queues are drained. Fails, with the
    /// reason, if taskd has not answered for a minute.
    pub(super) async fn idle(
        &self,
        time: Duration,
        are_drained: impl AsyncFn() -> Result<bool, String>,
    ) -> Result<(), String> {
        loop {
            sleep(time.clamp(SHORTEST_LOOK, LOOK_EVERY)).await;
            if let Some(why) = self.state().gives_up(Instant::now()) {
                return Err(why);
            }
            if self.state().is_idle(time, Instant::now()) {
                match are_drained().await {
                    // A task may have come while taskd was asked.
                    Ok(true) if self.state().is_idle(time, Instant::now()) => return Ok(()),
                    Ok(_) => {}
                    Err(why) => self.away(&mut self.state(), &why),
                }
            }
        }
    }

    /// Prints the last line; without a summary after an error.
    pub(super) async fn finish(&self, summary: Option<&Summary>) {
        self.output.say(Said::Finish);
        if let Some(Summary {
            completed,
            rejected,
            given_back,
            lost,
            ..
        }) = summary
        {
            if self.is_json {
                self.line(&json!({
                    "event": "summary", "completed": completed, "rejected": rejected, "given_back": given_back,
                    "lost": lost,
                }));
            } else {
                self.output.say(Said::Line(format!(
                    "{completed} completed, {rejected} rejected, {given_back} given back, {lost} lost"
                )));
            }
        }
        self.output.end().await;
    }

    fn draw(&self, state: &State, key: &str) {
        if self.is_json {
            return;
        }
        let State {
            running,
            completed,
            failed,
            given_back,
            lost,
            ..
        } = state;
        let completed = HumanCount(*completed);
        let failed = HumanCount(*failed);
        let key: String = printable(key).chars().take(60).collect();
        let ends = format!(
            "{completed} completed  {failed} rejected  {given_back} given back  {lost} lost"
        );
        self.output
            .say(Said::Bar(format!("{running} running  {ends}  {key}")));
    }

    fn say(&self, event: &str, what: &str) {
        if self.is_json {
            self.line(&json!({"event": event, "message": what}));
        } else {
            self.output
                .say(Said::Above(format!("taskd: {}", printable(what))));
        }
    }

    fn line(&self, value: &Value) {
        self.output.say(Said::Line(value.to_string()));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn fails(&mut self, why: &str, now: Instant) {
        let before = self
            .away
            .take()
            .filter(|away| now - away.last < GIVE_UP_AFTER);
        let first = before.map_or(now, |away| away.first);
        self.away = Some(Away {
            first,
            last: now,
            why: why.to_owned(),
        });
    }

    /// Returns why calls fail, if they have done so for too long.
    fn gives_up(&self, now: Instant) -> Option<String> {
        let away = self.away.as_ref()?;
        (now - away.first >= GIVE_UP_AFTER && now - away.last < GIVE_UP_AFTER)
            .then(|| away.why.clone())
    }

    /// True if for this time no task has run and no call has failed.
    fn is_idle(&self, time: Duration, now: Instant) -> bool {
        let since = self.away.as_ref().map_or(self.at, |away| away.last);
        self.running == 0 && now - since >= time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(3);

    #[test]
    fn a_worker_is_idle_while_calls_do_not_fail_and_gives_up_if_they_fail_for_a_minute() {
        let show = Show::new(true, false).unwrap();
        let mut state = show.state();
        let began = state.at;
        let after = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(
            [2, 3].map(|seconds| state.is_idle(TIME, after(seconds))),
            [false, true]
        );
        // A task whose handler has ended still counts as running until its report is answered.
        state.running = 1;
        for seconds in (2..62).step_by(10) {
            state.fails("away", after(seconds));
            assert_eq!(state.gives_up(after(seconds)), None);
        }
        assert!(!state.is_idle(TIME, after(60)));
        assert_eq!(state.gives_up(after(62)), Some("away".to_owned()));
        // A failure after a minute without one starts a new series.
        assert_eq!(state.gives_up(after(112)), None);
        state.fails("away", after(112));
        assert_eq!(state.gives_up(after(112)), None);
        state.running = 0;
        assert_eq!(
            [114, 115].map(|seconds| state.is_idle(TIME, after(seconds))),
            [false, true]
        );
    }
}
