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
    inputs::{Arrivals, Ends, Incoming},
    job::{Job, Live, Seen, Stepped},
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
/// After how many entries a round reads no other log, and after how many bytes of appends it steps no
/// other execution.
const ENTRIES_OF_ROUND: u64 = 20_000;
const BYTES_OF_APPENDS: usize = 16 << 20;
/// After how many bytes of states and inputs in memory a round reads no other execution, and what one
/// byte of JSON may take: `[0,0,…]`.
const BYTES_OF_LOADED: usize = 64 << 20;
const MOST_OF_A_BYTE: usize = 16;
/// For how long an execution is left alone that cannot be read, or whose append the database refuses.
const HELD_FOR: Duration = Duration::from_secs(10);

pub(super) struct Rounds {
    context: Context,
    to_mark: ToMark,
    patience: Patience,
    limits: Limits,
    hot: Hot,
    programs: Programs,
    /// Executions that cannot be stepped now, and until when they are left alone.
    held: HashMap<ExecutionId, Instant>,
    /// Those for which the last round had no time or no room, and their turns in the next one.
    left: HashMap<ExecutionId, usize>,
}

/// Whether the database has taken an append.
type Answer = Result<Appended, store::Error>;
/// The state after an append, unless the execution has ended, and what metrics count then.
type After = (Option<Live>, Seen);

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
            expressions: Bounds::new(expr_fuel, expr_memory, max_state),
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
            left: HashMap::new(),
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
        let has_any = !arrivals.by_execution.is_empty();
        if has_any {
            let (jobs, cut, has_more) = self.jobs(arrivals).await?;
            is_full |= has_more;
            is_full |= self.step(jobs, cut).await?;
        }
        // What fills it may all be left alone now.
        if is_full && has_any {
            return Ok(Some(Duration::ZERO));
        }
        let left = next_due.map(|due| due - self.context.clock.now_unix_ms());
        Ok(left.map(|left| Duration::from_millis(left.max(1).unsigned_abs())))
    }

    /// The place of an execution in a round: first those that were left, in their order.
    fn turn(&self, id: ExecutionId) -> (usize, ExecutionId) {
        (self.left.get(&id).copied().unwrap_or(usize::MAX), id)
    }

    /// Makes jobs of what came, in turn. Returns the executions for which there is no room, too, and
    /// whether something waits for the next round.
    async fn jobs(
        &mut self,
        arrivals: Arrivals,
    ) -> Result<(Vec<Job>, Vec<ExecutionId>, bool), Failure> {
        let store = Arc::clone(&self.context.store);
        let mut cold = Vec::new();
        let mut jobs = Vec::new();
        for (id, incoming) in arrivals.by_execution {
            match self.hot.take(id) {
                Some(live) => {
                    let seq = live.state.events();
                    jobs.push(job(id, seq, live, incoming, Value::Null));
                }
                None => cold.push((id, incoming)),
            }
        }
        cold.sort_by_key(|(id, _)| self.turn(*id));
        let (loaded, cut) = self.load(cold).await?;
        jobs.extend(loaded);
        let mut asked: Vec<(usize, TaskId)> = Vec::new();
        let mut looked_at: Vec<(usize, TaskId)> = Vec::new();
        for (place, job) in jobs.iter().enumerate() {
            asked.extend(job.ended().map(|task| (place, task)));
            looked_at.extend(job.to_look_at().map(|task| (place, task)));
        }
        let ids: Vec<TaskId> = looked_at.iter().map(|(_, task)| *task).collect();
        let unfinished = store.unfinished_among(&ids).await?;
        let unfinished: HashSet<TaskId> = unfinished.into_iter().collect();
        looked_at.retain(|(_, task)| !unfinished.contains(task));
        asked.extend(looked_at);
        let ids: Vec<TaskId> = asked.iter().map(|(_, task)| *task).collect();
        let mut ends = Ends::read(&*store, &ids, &self.context.settings).await?;
        for (place, task) in asked {
            if let Some(end) = ends.by_task.remove(&task) {
                jobs[place].ends.insert(task, end);
            }
        }
        for job in &mut jobs {
            job.looks_on = ends.is_full;
        }
        jobs.sort_by_key(|job| self.turn(job.id));
        let has_more = ends.is_full || !cut.is_empty();
        Ok((jobs, cut, has_more))
    }

    /// Reads executions from SQL. Returns those for which there is no room, too.
    async fn load(
        &mut self,
        cold: Vec<(ExecutionId, Incoming)>,
    ) -> Result<(Vec<Job>, Vec<ExecutionId>), Failure> {
        if cold.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let store = Arc::clone(&self.context.store);
        let ids: Vec<ExecutionId> = cold.iter().map(|(id, _)| *id).collect();
        let listed = store.executions_by_id(&ids).await?;
        let mut listed: HashMap<ExecutionId, ListedExecution> =
            listed.into_iter().map(|one| (one.id, one)).collect();
        let mut loading = Vec::new();
        let (mut order, mut cut) = (Vec::new(), Vec::new());
        let mut entries = 0;
        for (id, incoming) in cold {
            // It is gone, or has ended since.
            let Some(listed) = listed.remove(&id).filter(|one| !one.status.is_final()) else {
                continue;
            };
            if entries >= ENTRIES_OF_ROUND {
                cut.push(id);
                continue;
            }
            entries += listed.seq;
            let programs = &mut self.programs;
            let program = programs
                .get(&*store, &listed.workflow, &listed.hash)
                .await?;
            loading.push(load(&*store, listed, program, incoming));
            order.push(id);
        }
        // In order: otherwise small logs could cut off a large one in every round.
        let mut loading = stream::iter(loading).buffered(LOADED_AT_ONCE);
        let mut jobs = Vec::new();
        let (mut bytes, mut loaded) = (0, 0);
        while bytes <= BYTES_OF_LOADED
            && let Some(one) = loading.next().await
        {
            loaded += 1;
            match one? {
                Ok((job, of_input)) => {
                    bytes += job.live.state.bytes() + of_input * MOST_OF_A_BYTE;
                    jobs.push(job);
                }
                // A later version may have written it, and this one must not end it.
                Err((id, why)) => {
                    tracing::warn!("execution {id} waits: {why}");
                    let until = self.context.clock.now() + HELD_FOR;
                    self.held.insert(id, until);
                }
            }
        }
        cut.splice(0..0, order.drain(loaded..));
        Ok((jobs, cut))
    }

    /// Steps executions, and stores and publishes what comes of it. Those for which there was no room
    /// have their turn in the next round first. Returns whether there is more to do at once.
    async fn step(&mut self, jobs: Vec<Job>, cut: Vec<ExecutionId>) -> Result<bool, Failure> {
        let context = self.context.clone();
        let limits = self.limits;
        let stepping = tokio::task::spawn_blocking(move || {
            with_stack(|| {
                let until = Instant::now() + STEPS_FOR;
                let mut jobs = jobs.into_iter();
                let mut stepped = Vec::new();
                let mut bytes = 0;
                while (stepped.is_empty() || Instant::now() < until)
                    && bytes < BYTES_OF_APPENDS
                    && let Some(job) = jobs.next()
                {
                    let one = job.run(&context, &limits, until);
                    bytes += one.bytes;
                    stepped.push(one);
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
        let turns = cut.into_iter().chain(left.iter().map(|job| job.id));
        self.left = turns.enumerate().map(|(turn, id)| (id, turn)).collect();
        for job in left {
            // One that has not begun is read again, with its input.
            if job.live.state.events() > 0 {
                self.hot.put(job.id, job.live);
            }
        }
        if stepped.is_empty() {
            return Ok(is_full);
        }
        is_full |= stepped.iter().any(|one| one.append.goes_on);
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
            seen,
            ..
        } in stepped
        {
            appends.push(append);
            others.push(((live, seen), fallback));
        }
        let before = self.context.moment();
        let started = Instant::now();
        let stored = self.context.store.append(&appends).await;
        metrics::workflow_append(started.elapsed());
        let stored = match stored {
            Ok(stored) => stored,
            Err(error) if is_outage(&error) => return Err(error.into()),
            // One execution that the database refuses is no reason to hold up the others.
            Err(error) => {
                tracing::warn!(
                    "could not store {} appends together: {error}",
                    appends.len()
                );
                for (append, (after, fallback)) in appends.into_iter().zip(others) {
                    let id = append.execution;
                    let now = self.context.clock.now_unix_ms();
                    let Err(mut error) = self.store_one(append, after, before).await? else {
                        continue;
                    };
                    if error.is_refusal() {
                        let reason = format!("the database refuses what it does: {error}");
                        tracing::warn!("execution {id} faults: {reason}");
                        let fault = fallback.fault(&reason, now);
                        match self.store_one(fault, After::default(), before).await? {
                            Ok(_) => continue,
                            Err(of_fault) => error = of_fault,
                        }
                    }
                    tracing::error!("execution {id} waits: {error}");
                    let until = self.context.clock.now() + HELD_FOR;
                    self.held.insert(id, until);
                }
                return Ok(());
            }
        };
        let after: Vec<_> = others.into_iter().map(|(after, _)| after).collect();
        self.follow(&appends, after, stored, before).await
    }

    /// Stores one append alone. The inner error is the append's own.
    async fn store_one(
        &mut self,
        append: Append,
        after: After,
        before: Option<Moment>,
    ) -> Result<Answer, Failure> {
        let appends = [append];
        let stored = match self.context.store.append(&appends).await {
            Ok(stored) => stored,
            Err(error) if is_outage(&error) => return Err(error.into()),
            Err(error) => return Ok(Err(error)),
        };
        let answer = stored.answers.first().cloned().unwrap_or(Appended::Lost);
        self.follow(&appends, vec![after], stored, before).await?;
        Ok(Ok(answer))
    }

    /// Does what comes after the append: keeps the states, and publishes the tasks of new steps.
    async fn follow(
        &mut self,
        appends: &[Append],
        after: Vec<After>,
        stored: Stored<Appended>,
        before: Option<Moment>,
    ) -> Result<(), Failure> {
        let mut new: Vec<(&TaskRow, Option<Turn>)> = Vec::new();
        for ((append, (live, seen)), answer) in appends.iter().zip(after).zip(&stored.answers) {
            let Appended::Yes { steps } = answer else {
                metrics::workflow_conflict();
                continue;
            };
            count(seen);
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

fn count(seen: Seen) {
    for (kind, outcome) in seen.steps {
        metrics::workflow_step(kind, outcome);
    }
    seen.late.into_iter().for_each(metrics::workflow_timer);
    for (bound, evaluations) in seen.refused {
        metrics::workflow_refused(bound, evaluations);
    }
}

fn job(id: ExecutionId, seq: u64, live: Live, incoming: Incoming, input: Value) -> Job {
    Job {
        id,
        seq,
        live,
        incoming,
        ends: HashMap::new(),
        looks_on: false,
        input,
    }
}

/// Whether the database takes nothing now. Otherwise it is the append that it does not take.
fn is_outage(error: &store::Error) -> bool {
    error.is_transient() && !matches!(error, store::Error::GaveUp { .. })
}

/// Reads the log of an execution, and its input if it has not begun, with the bytes of that. The inner
/// error says why it cannot be stepped.
async fn load(
    store: &dyn Store,
    listed: ListedExecution,
    program: Result<Arc<Program>, String>,
    incoming: Incoming,
) -> Result<Result<(Job, usize), (ExecutionId, String)>, Failure> {
    let (id, seq) = (listed.id, listed.seq);
    let program = match program {
        Ok(program) => program,
        Err(why) => return Ok(Err((id, why))),
    };
    let mut input = Value::Null;
    let mut of_input = 0;
    if seq == 0 {
        let stored = store.execution(id).await?;
        let text = stored.map(|stored| stored.input).unwrap_or_default();
        of_input = text.len();
        match serde_json::from_slice(&text) {
            Ok(read) => input = read,
            Err(error) => {
                let why = format!("its input is not JSON: {error}");
                return Ok(Err((id, why)));
            }
        }
    }
    let state = match fold(store, id, seq).await? {
        Ok(state) => state,
        Err(why) => return Ok(Err((id, why))),
    };
    let live = Live::new(id, state, program, listed.traceparent);
    Ok(Ok((job(id, seq, live, incoming, input), of_input)))
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
        let applying = tokio::task::spawn_blocking(move || {
            for stored in page {
                // Somebody else appends meanwhile. This one's append will be lost.
                if state.events() == up_to {
                    break;
                }
                serde_json::from_slice::<Entry>(&stored.entry)
                    .map_err(|error| error.to_string())
                    .and_then(|entry| state.apply(&entry).map_err(|error| error.to_string()))
                    .map_err(|why| format!("event {} of its log: {why}", stored.seq))?;
            }
            Ok(state)
        });
        let applied = applying.await;
        match applied.map_err(|error| Failure::Stack(error.to_string()))? {
            Ok(folded) => state = folded,
            Err(why) => return Ok(Err(why)),
        }
    }
    Ok(Ok(state))
}
