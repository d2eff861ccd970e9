//! Workers that get tasks and complete them until all are done, for the phases process and latency.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    args::Work,
    ledger::{Credits, Verdict},
    progress::{LOOK_EVERY, Stall},
    run::Run,
    server::{Server, Usage},
    work::{Leased, Tasks, Worker},
};
use crate::cli::queues::Counts;

/// How long an answer may be on its way.
const IN_FLIGHT: Duration = Duration::from_secs(1);

/// What workers do besides completing tasks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Habit {
    Plain,
    /// They complete every task they get, even if more tasks wait than they are meant to complete.
    Finishes,
    /// They record when they got each task.
    NotesTimes,
    /// They reject the first attempt of each task, and record when.
    PassesOn,
}

/// The results of all workers.
pub(super) struct Processed {
    /// When the last completion was answered with OK.
    pub(super) last: Instant,
    pub(super) credits: Vec<Credits>,
    /// When a worker got each task, with the task's number.
    pub(super) handled: Vec<(u32, Instant)>,
    /// When a worker rejected a task, with the task's number.
    pub(super) passed_on: Vec<(u32, Instant)>,
    pub(super) repeated: u32,
}

/// The tokens that stop workers.
#[derive(Clone)]
struct Ends {
    /// Get no more tasks.
    all_done: CancellationToken,
    /// Stop immediately.
    give_up: CancellationToken,
}

/// Lets the workers complete `total` tasks, or as many as they get before progress stalls.
pub(super) async fn process(
    run: &Run<'_>,
    work: &Work,
    tasks: &Tasks,
    total: u32,
    habit: Habit,
) -> anyhow::Result<Processed> {
    let (server, bar) = (&run.server, run.bar);
    let give_up = CancellationToken::new();
    let ends = Ends {
        all_done: give_up.child_token(),
        give_up,
    };
    let last = Arc::new(Mutex::new(Instant::now()));
    let wanted = completions(total, work);
    let mut workers = JoinSet::new();
    for number in 0..work.workers {
        let worker = Worker::new(server.channel(number.into()), number, tasks, work);
        let (bar, last) = (bar.clone(), Arc::clone(&last));
        let done = move |count: usize| {
            let mut last = last.lock();
            bar.inc(count as u64);
            *last = Instant::now();
            bar.position() >= wanted
        };
        workers.spawn(Working::new(worker, habit).run(ends.clone(), done));
    }
    let mut stall = Stall::new(work.give_up_after.0);
    let mut all = Processed::default();
    loop {
        tokio::select! {
            ended = workers.join_next() => match ended {
                Some(ended) => all.add(ended??),
                None => break,
            },
            () = tokio::time::sleep(LOOK_EVERY) => if stall.is_stuck(bar.position()) {
                ends.give_up.cancel();
            }
        }
    }
    all.last = *last.lock();
    Ok(all)
}

impl Default for Processed {
    fn default() -> Self {
        let [handled, passed_on] = [(); 2].map(|()| Vec::new());
        Self {
            last: Instant::now(),
            credits: Vec::new(),
            handled,
            passed_on,
            repeated: 0,
        }
    }
}

impl Processed {
    fn add(&mut self, one: Working) {
        self.credits.push(one.credits);
        self.handled.extend(one.handled);
        self.passed_on.extend(one.passed_on);
        self.repeated += one.worker.repeated;
    }
}

/// A worker and its results.
struct Working {
    worker: Worker,
    habit: Habit,
    credits: Credits,
    handled: Vec<(u32, Instant)>,
    passed_on: Vec<(u32, Instant)>,
}

impl Working {
    fn new(mut worker: Worker, habit: Habit) -> Self {
        // Otherwise it would end up with leased tasks that it does not complete.
        worker.asks_next &= habit != Habit::Finishes;
        Self {
            worker,
            habit,
            credits: Vec::new(),
            handled: Vec::new(),
            passed_on: Vec::new(),
        }
    }

    /// Works until a token stops it. `done` counts completions, and returns whether these were the
    /// last.
    async fn run(mut self, ends: Ends, done: impl Fn(usize) -> bool) -> anyhow::Result<Self> {
        while let Some(tasks) = self.get(&ends.all_done).await {
            let mut tasks = tasks?;
            let at = Instant::now();
            if self.habit == Habit::PassesOn {
                tasks = self.pass_on(tasks).await?;
            }
            if matches!(self.habit, Habit::NotesTimes | Habit::PassesOn) {
                self.handled
                    .extend(tasks.iter().map(|task| (task.number, at)));
            }
            if tasks.is_empty() {
                continue;
            }
            let Some(completed) = ends
                .give_up
                .run_until_cancelled(self.worker.complete(tasks))
                .await
            else {
                break;
            };
            let completed = completed?;
            let count = completed.len();
            self.credits.extend(completed);
            if done(count) {
                ends.all_done.cancel();
            }
        }
        Ok(self)
    }

    /// Gets the next tasks; `None` at the end.
    async fn get(&mut self, all_done: &CancellationToken) -> Option<anyhow::Result<Vec<Leased>>> {
        match self.habit {
            Habit::Finishes if all_done.is_cancelled() => None,
            // Do not cancel the call at once: an answer in flight would leave its tasks leased.
            Habit::Finishes => {
                let in_vain = async {
                    all_done.cancelled().await;
                    tokio::time::sleep(IN_FLIGHT).await;
                };
                tokio::select! {
                    leased = self.worker.get() => Some(leased),
                    () = in_vain => None,
                }
            }
            Habit::Plain | Habit::NotesTimes | Habit::PassesOn => {
                all_done.run_until_cancelled(self.worker.get()).await
            }
        }
    }

    /// Rejects first attempts; returns the remaining tasks, which are to be completed.
    async fn pass_on(&mut self, tasks: Vec<Leased>) -> anyhow::Result<Vec<Leased>> {
        let (first, rest): (Vec<_>, Vec<_>) = tasks.into_iter().partition(|task| task.attempt == 1);
        if !first.is_empty() {
            let now = Instant::now();
            self.passed_on
                .extend(first.iter().map(|task| (task.number, now)));
            self.worker.pass_on(&first).await?;
        }
        Ok(rest)
    }
}

/// Lets workers complete all tasks, and checks the counts. Returns the time of the last completion,
/// and the time and CPU usage when SQL showed all tasks as completed.
pub(super) async fn complete_all(
    run: &mut Run<'_>,
    phase: &str,
    work: &Work,
    tasks: &Tasks,
    total: u32,
    habit: Habit,
) -> anyhow::Result<Option<(Instant, Instant, Usage)>> {
    run.step(phase, completions(total, work));
    let processed = process(run, work, tasks, total, habit).await?;
    let last = processed.last;
    let settled = count(run, phase, work, tasks, total, processed).await?;
    Ok(settled.map(|(at, usage)| (last, at, usage)))
}

/// Checks that each task was completed the right number of times. Returns the time and CPU usage
/// when SQL showed all tasks as completed.
pub(super) async fn count(
    run: &mut Run<'_>,
    phase: &str,
    work: &Work,
    tasks: &Tasks,
    total: u32,
    processed: Processed,
) -> anyhow::Result<Option<(Instant, Usage)>> {
    let totals = &mut run.report.totals;
    totals.tasks += u64::from(total);
    totals.completions += processed
        .credits
        .iter()
        .map(|credits| credits.len() as u64)
        .sum::<u64>();
    totals.repeated_calls += u64::from(processed.repeated);
    match check(&run.server, work, tasks, total, processed.credits).await? {
        Ok(at) => Ok(Some((at, run.server.usage().await))),
        Err(verdict) => {
            let totals = &mut run.report.totals;
            totals.lost += verdict.lost.len() as u64;
            totals.doubled += verdict.doubled.len() as u64;
            run.report.wrong(verdict.describe(phase, &tasks.queues[0]));
            Ok(None)
        }
    }
}

/// The number of completions that the tasks need.
pub(super) fn completions(tasks: u32, work: &Work) -> u64 {
    u64::from(tasks) * u64::from(work.replicas)
}

/// Compares the completions of the workers with the tasks and with SQL. Returns when SQL showed all
/// tasks as completed, or what is wrong.
async fn check(
    server: &Server,
    work: &Work,
    tasks: &Tasks,
    total: u32,
    credits: Vec<Credits>,
) -> anyhow::Result<Result<Instant, Verdict>> {
    let mut verdict = Verdict::of(total, work.replicas, credits);
    let wanted = u64::from(total);
    let is_settled = |counts: &Counts| counts.completed == wanted && counts.all() == wanted;
    // After a loss, waiting is useless: a lost task would stay unfinished forever.
    let settled = if verdict.is_right() {
        server
            .wait_for(&tasks.queues, work.give_up_after.0, is_settled)
            .await?
    } else {
        None
    };
    if let Some(at) = settled {
        return Ok(Ok(at));
    }
    let counts = server.counts(&tasks.queues).await?;
    verdict.sql = (!is_settled(&counts)).then_some(counts);
    Ok(Err(verdict))
}
