//! Rounds: each steps the executions to which something came.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream};
use serde_json::Value;

use super::{
    error::Failure,
    hot::Hot,
    inputs::{Arrivals, Incoming, step_ends},
    job::{Job, Live, Stepped},
    programs::Programs,
};
use crate::{
    config::Workflows,
    model::{ExecutionId, TaskId, TaskRow, millis},
    pipelines::{
        context::{Context, Patience, ToMark},
        discovery::announce_new_tasks,
        publishing,
        shortcut::Moment,
    },
    store::{self, Append, Appended, Inserted, ListedExecution, Store, Stored, Turn},
    telemetry::metrics,
    workflow::{
        expression::{Bounds, with_stack},
        machine::{Entry, Limits, State},
        program::Program,
    },
};

/// How many events one execution appends at once, so that a long one holds up no other.
const EVENTS_AT_ONCE: usize = 250;
/// For how long a round steps executions. The others have their turn in the next round.
const STEPS_FOR: Duration = Duration::from_millis(200);
/// How far ahead timers are read, so that they fire in time.
const AHEAD: Duration = Duration::from_secs(1);
/// How many logs are read at the same time, and how many entries at once.
const LOADED_AT_ONCE: usize = 8;
const ENTRIES_AT_ONCE: u32 = 1_000;
/// For how long an execution is left alone whose append the database refuses.
const HELD_FOR: Duration = Duration::from_secs(10);

pub(super) struct Rounds {
    context: Context,
    to_mark: ToMark,
    patience: Patience,
    limits: Limits,
    hot: Hot,
    programs: Programs,
    /// Executions whose appends are refused, and until when they are left alone.
    held: HashMap<ExecutionId, Instant>,
    /// The execution that was stepped last. The next round begins after it.
    last: Option<ExecutionId>,
}

/// Whether the database has taken an append.
type Answer = Result<Appended, store::Error>;

impl Rounds {
    pub(super) fn new(context: Context, to_mark: ToMark, patience: Patience) -> Self {
        let Workflows {
            max_steps,
            max_state,
            max_depth,
            expr_fuel,
            expr_memory,
            ..
        } = context.settings.workflows;
        let limits = Limits {
            state: max_state,
            steps: max_steps,
            depth: max_depth,
            expressions: Bounds {
                fuel: expr_fuel,
                memory: expr_memory,
                output: max_state,
            },
            batch_events: EVENTS_AT_ONCE,
            ..Limits::default()
        };
        Self {
            context,
            to_mark,
            patience,
            limits,
            hot: Hot::default(),
            programs: Programs::default(),
            held: HashMap::new(),
            last: None,
        }
    }

    /// Forgets the states: another process may step executions from now on.
    pub(super) fn forget(&mut self) {
        self.hot.clear();
        self.held.clear();
    }

    /// Steps executions. Returns after what time there is more to do, if that is known.
    pub(super) async fn round(&mut self) -> Result<Option<Duration>, Failure> {
        let now = self.context.clock.now();
        self.held.retain(|_, until| *until > now);
        let held: HashSet<ExecutionId> = self.held.keys().copied().collect();
        let now_unix_ms = self.context.clock.now_unix_ms();
        let ahead = now_unix_ms + millis(AHEAD);
        let store = Arc::clone(&self.context.store);
        let arrivals = Arrivals::read(&*store, &held, now_unix_ms, ahead).await?;
        let mut is_full = arrivals.is_full;
        let next_due = arrivals.next_due_unix_ms;
        if !arrivals.by_execution.is_empty() {
            let jobs = self.jobs(arrivals).await?;
            is_full |= self.step(jobs).await?;
        }
        if is_full {
            return Ok(Some(Duration::ZERO));
        }
        let left = next_due.map(|due| due - self.context.clock.now_unix_ms());
        Ok(left.map(|left| Duration::from_millis(left.max(1).unsigned_abs())))
    }

    /// Makes jobs of what came, in turn.
    async fn jobs(&mut self, arrivals: Arrivals) -> Result<Vec<Job>, Failure> {
        let store = Arc::clone(&self.context.store);
        let mut cold = Vec::new();
        let mut jobs = Vec::new();
        for (id, incoming) in arrivals.by_execution {
            match self.hot.take(id) {
                Some(live) => {
                    let seq = live.state.events();
                    jobs.push(job(id, seq, Ok(live), incoming, Value::Null));
                }
                None => cold.push((id, incoming)),
            }
        }
        jobs.extend(self.load(cold).await?);
        let asked: Vec<Vec<TaskId>> = jobs.iter().map(Job::asks_about).collect();
        let mut ends = step_ends(&*store, &asked.concat()).await?;
        for (job, asked) in jobs.iter_mut().zip(asked) {
            let of_job = asked.into_iter();
            job.ends = of_job
                .filter_map(|task| Some((task, ends.remove(&task)?)))
                .collect();
        }
        jobs.sort_by_key(|job| job.id);
        let first = jobs.partition_point(|job| Some(job.id) <= self.last);
        jobs.rotate_left(first);
        Ok(jobs)
    }

    /// Reads executions from SQL.
    async fn load(&mut self, cold: Vec<(ExecutionId, Incoming)>) -> Result<Vec<Job>, Failure> {
        if cold.is_empty() {
            return Ok(Vec::new());
        }
        let store = Arc::clone(&self.context.store);
        let ids: Vec<ExecutionId> = cold.iter().map(|(id, _)| *id).collect();
        let listed = store.executions_by_id(&ids).await?;
        let mut listed: HashMap<ExecutionId, ListedExecution> =
            listed.into_iter().map(|one| (one.id, one)).collect();
        let mut loading = Vec::new();
        for (id, incoming) in cold {
            // It is gone, or has ended since.
            let Some(listed) = listed.remove(&id).filter(|one| !one.status.is_final()) else {
                continue;
            };
            let programs = &mut self.programs;
            let program = programs
                .get(&*store, &listed.workflow, &listed.hash)
                .await?;
            loading.push(load(&*store, listed, program, incoming));
        }
        let mut loading = stream::iter(loading).buffer_unordered(LOADED_AT_ONCE);
        let mut jobs = Vec::new();
        while let Some(job) = loading.next().await {
            jobs.push(job?);
        }
        Ok(jobs)
    }

    /// Steps executions, and stores and publishes what comes of it. Returns whether there is more to
    /// do at once.
    async fn step(&mut self, jobs: Vec<Job>) -> Result<bool, Failure> {
        let context = self.context.clone();
        let limits = self.limits;
        let stepping = tokio::task::spawn_blocking(move || {
            with_stack(|| {
                let until = Instant::now() + STEPS_FOR;
                let mut jobs = jobs.into_iter();
                let mut stepped = Vec::new();
                while (stepped.is_empty() || Instant::now() < until)
                    && let Some(job) = jobs.next()
                {
                    stepped.push(job.run(&context, &limits));
                }
                (stepped, jobs.collect::<Vec<_>>())
            })
        });
        let (stepped, left) = match stepping.await {
            Ok(Ok(done)) => done,
            Ok(Err(error)) => return Err(Failure::Stack(error.to_string())),
            Err(error) => return Err(Failure::Stack(error.to_string())),
        };
        let mut is_full = !left.is_empty();
        for job in left {
            if let Ok(live) = job.live {
                self.hot.put(job.id, live);
            }
        }
        let Some(last) = stepped.last() else {
            return Ok(is_full);
        };
        self.last = Some(last.append.execution);
        is_full |= stepped.iter().any(|one| one.append.look_again);
        self.store(stepped).await?;
        Ok(is_full)
    }

    async fn store(&mut self, stepped: Vec<Stepped>) -> Result<(), Failure> {
        let mut appends = Vec::with_capacity(stepped.len());
        let mut others = Vec::with_capacity(stepped.len());
        for Stepped {
            append,
            live,
            fallback,
        } in stepped
        {
            appends.push(append);
            others.push((live, fallback));
        }
        let before = self.context.moment();
        let started = Instant::now();
        let stored = self.context.store.append(&appends).await;
        metrics::workflow_append(started.elapsed());
        let stored = match stored {
            Ok(stored) => stored,
            Err(error) if !error.is_refusal() => return Err(error.into()),
            // One execution that the database refuses is no reason to hold up the others.
            Err(error) => {
                tracing::warn!(
                    "could not store {} appends together: {error}",
                    appends.len()
                );
                for (append, (live, fallback)) in appends.into_iter().zip(others) {
                    let id = append.execution;
                    let now = self.context.clock.now_unix_ms();
                    let Err(error) = self.store_one(append, live, before).await? else {
                        continue;
                    };
                    let reason = format!("the database refuses what it does: {error}");
                    tracing::warn!("execution {id} faults: {reason}");
                    let fault = fallback.fault(&reason, now);
                    if let Err(error) = self.store_one(fault, None, before).await? {
                        tracing::error!("execution {id} cannot even fault: {error}");
                        let until = self.context.clock.now() + HELD_FOR;
                        self.held.insert(id, until);
                    }
                }
                return Ok(());
            }
        };
        let lives: Vec<_> = others.into_iter().map(|(live, _)| live).collect();
        self.follow(&appends, lives, stored, before).await
    }

    /// Stores one append alone. The inner error is a refusal.
    async fn store_one(
        &mut self,
        append: Append,
        live: Option<Live>,
        before: Option<Moment>,
    ) -> Result<Answer, Failure> {
        let appends = [append];
        let stored = match self.context.store.append(&appends).await {
            Ok(stored) => stored,
            Err(error) if error.is_refusal() => return Ok(Err(error)),
            Err(error) => return Err(error.into()),
        };
        let answer = stored.answers.first().cloned().unwrap_or(Appended::Lost);
        self.follow(&appends, vec![live], stored, before).await?;
        Ok(Ok(answer))
    }

    /// Does what comes after the append: keeps the states, and publishes the tasks of new steps.
    async fn follow(
        &mut self,
        appends: &[Append],
        lives: Vec<Option<Live>>,
        stored: Stored<Appended>,
        before: Option<Moment>,
    ) -> Result<(), Failure> {
        let mut new: Vec<(&TaskRow, Option<Turn>)> = Vec::new();
        for ((append, live), answer) in appends.iter().zip(lives).zip(&stored.answers) {
            let Appended::Yes { steps } = answer else {
                metrics::workflow_conflict();
                continue;
            };
            for (row, inserted) in append.steps.iter().zip(steps) {
                if *inserted == Inserted::New {
                    new.push((&row.task, stored.turn_of(row)));
                }
            }
            match live {
                Some(live) => self.hot.put(append.execution, live),
                None => metrics::workflow_ended(append.status.as_str()),
            }
        }
        announce_new_tasks(&self.context, new.iter().map(|(row, _)| *row));
        let Context {
            gates, settings, ..
        } = &self.context;
        let goes_out =
            |(row, turn): &(&TaskRow, Turn)| publishing::goes_out_now(row, *turn, gates, settings);
        let now = new.into_iter().filter_map(|(row, turn)| Some((row, turn?)));
        let publish: Vec<_> = now.filter(goes_out).collect();
        let released = stored.released.iter().map(|row| (&row.task, row.turn));
        let released: Vec<_> = released.filter(goes_out).collect();
        self.patience
            .publish(&self.context, &publish, &released, before, &self.to_mark)
            .await?;
        Ok(())
    }
}

fn job(
    id: ExecutionId,
    seq: u64,
    live: Result<Live, String>,
    incoming: Incoming,
    input: Value,
) -> Job {
    Job {
        id,
        seq,
        live,
        incoming,
        ends: HashMap::new(),
        input,
    }
}

/// Reads the log of an execution, and its input if it has not begun.
async fn load(
    store: &dyn Store,
    listed: ListedExecution,
    program: Result<Arc<Program>, String>,
    incoming: Incoming,
) -> Result<Job, Failure> {
    let (id, seq) = (listed.id, listed.seq);
    let program = match program {
        Ok(program) => program,
        Err(why) => return Ok(job(id, seq, Err(why), incoming, Value::Null)),
    };
    let mut input = Value::Null;
    if seq == 0 {
        let stored = store.execution(id).await?;
        let text = stored.map(|stored| stored.input).unwrap_or_default();
        match serde_json::from_slice(&text) {
            Ok(read) => input = read,
            Err(error) => {
                let why = format!("its input is not JSON: {error}");
                return Ok(job(id, seq, Err(why), incoming, Value::Null));
            }
        }
    }
    let state = match fold(store, id, seq).await? {
        Ok(state) => state,
        Err(why) => return Ok(job(id, seq, Err(why), incoming, Value::Null)),
    };
    let live = Live::new(id, state, program, listed.traceparent);
    Ok(job(id, seq, Ok(live), incoming, input))
}

/// Folds the log of an execution up to an entry. The inner error says why it cannot be read.
async fn fold(
    store: &dyn Store,
    id: ExecutionId,
    up_to: u64,
) -> Result<Result<State, String>, Failure> {
    let mut state = State::new();
    while state.events() < up_to {
        let page = store.entries(id, state.events(), ENTRIES_AT_ONCE).await?;
        if page.is_empty() {
            let why = format!("its log ends after {} of {up_to} events", state.events());
            return Ok(Err(why));
        }
        for stored in page {
            // Somebody else appends meanwhile. This one's append will be lost.
            if state.events() == up_to {
                break;
            }
            let applied = serde_json::from_slice::<Entry>(&stored.entry)
                .map_err(|error| error.to_string())
                .and_then(|entry| state.apply(&entry).map_err(|error| error.to_string()));
            if let Err(why) = applied {
                return Ok(Err(format!("event {} of its log: {why}", stored.seq)));
            }
        }
    }
    Ok(Ok(state))
}
