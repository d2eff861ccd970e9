//! Steps executions of workflows.
//!
//! An execution is the fold of its log. A round reads what came to executions (their inboxes and
//! their due timers), lets the machine step each of them until it waits, stores all that in one
//! transaction, and publishes the tasks of their steps. One process at a time does so, under a lease
//! in Redis. The lease only saves work: an append whose execution has more entries than it expected
//! is lost, and the execution is folded again. Crash windows:
//!
//! - Before the append: nothing has happened. What came to the execution is still there.
//! - After the append, before the steps are published or marked: the watchdog publishes their batch
//!   (again), as for any batch.
//! - The answer to an append is lost: the executions are folded again.
//!
//! An execution that a bug of the machine ends faults, and one whose log cannot be read waits for a
//! version that can. Others go on.

mod calls;
mod error;
mod hot;
mod inputs;
mod job;
mod programs;
mod rounds;
mod row;

use std::{
    pin::pin,
    time::{Duration, Instant},
};

pub use self::calls::start_calls;
use self::{error::Failure, rounds::Rounds};
use crate::{
    pipelines::context::{Context, Patience, ToMark},
    runtime::{Loop, Supervisor},
    telemetry::metrics,
};

/// The work that the lease is for.
const WORK: &str = "workflow";
/// How long a process that has stopped renewing keeps the lease.
const LEASE: Duration = Duration::from_secs(4);
const RENEW: Duration = Duration::from_secs(1);
/// How often to look for what other processes have brought to open executions, and whether any are open.
const LOOK_OPEN: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_secs(1);
/// How often open executions are counted, and the pause after that as a multiple of the time that it
/// took.
const COUNT: Duration = Duration::from_secs(5);
const COUNT_SHARE: u32 = 99;

/// Starts the loop that steps executions.
pub fn start(context: &Context, supervisor: &Supervisor) {
    let to_mark = context.start_marking_published("workflow/mark-published", supervisor);
    let stepper = Stepper {
        context: context.clone(),
        to_mark,
    };
    supervisor.spawn_loop("workflow/step", stepper, |stepper, cx| async move {
        stepper.run(cx).await
    });
}

#[derive(Clone)]
struct Stepper {
    context: Context,
    to_mark: ToMark,
}

impl Stepper {
    async fn run(self, cx: Loop) -> Result<(), Failure> {
        let Self { context, to_mark } = self;
        let clock = cx.clock().clone();
        let mut rounds = Rounds::new(context.clone(), to_mark, Patience::default());
        let mut lease = Lease::new(&context, &cx);
        let mut count_at = clock.now();
        while !cx.stop.is_cancelled() {
            if lease.renew().await? {
                rounds.forget();
            }
            let mut pause = RENEW;
            if lease.is_held {
                if clock.now() >= count_at {
                    let began = Instant::now();
                    let are_open = lease.keep(count(&context)).await?;
                    // With a million of them it takes a while.
                    let pause = match are_open {
                        true => COUNT.max(began.elapsed() * COUNT_SHARE),
                        false => LOOK.max(began.elapsed()),
                    };
                    count_at = clock.now() + pause;
                }
                // Without open executions there is nothing to read.
                if context.executions.are_open() {
                    let next = lease.keep(rounds.round()).await?;
                    pause = next.unwrap_or(LOOK_OPEN).min(LOOK_OPEN);
                }
            }
            let pause = pause.min(lease.renew_at.saturating_duration_since(clock.now()));
            if !pause.is_zero() {
                tokio::select! {
                    () = clock.sleep(pause) => {}
                    () = context.executions.woken(), if lease.is_held => {}
                    () = cx.stop.cancelled() => {}
                }
            }
        }
        lease.release().await
    }
}

/// The right to step executions.
struct Lease<'a> {
    context: &'a Context,
    cx: &'a Loop,
    is_held: bool,
    renew_at: Instant,
}

impl<'a> Lease<'a> {
    fn new(context: &'a Context, cx: &'a Loop) -> Self {
        Self {
            context,
            cx,
            is_held: false,
            renew_at: cx.clock().now(),
        }
    }

    /// Asks for the lease if it is time. Returns whether this process has got or lost it.
    async fn renew(&mut self) -> Result<bool, Failure> {
        self.cx.beat();
        if self.cx.clock().now() < self.renew_at {
            return Ok(false);
        }
        self.renew_at = self.cx.clock().now() + RENEW;
        let is_held = self.context.coordination.lease(WORK, LEASE).await?;
        let was_held = std::mem::replace(&mut self.is_held, is_held);
        if was_held != is_held {
            let does = if is_held { "steps" } else { "does not step" };
            tracing::debug!("this process {does} executions of workflows");
            if !is_held {
                metrics::workflow_open(0, 0);
            }
        }
        Ok(was_held != is_held)
    }

    /// Does work, and keeps the lease meanwhile. If another process gets it, the work goes on: it does
    /// no harm.
    async fn keep<T>(
        &mut self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = self.cx.clock().sleep(RENEW) => {
                    self.cx.beat();
                    self.renew_at = self.cx.clock().now() + RENEW;
                    self.context.coordination.lease(WORK, LEASE).await?;
                }
            }
        }
    }

    async fn release(self) -> Result<(), Failure> {
        if self.is_held {
            self.context.coordination.release(WORK).await?;
        }
        Ok(())
    }
}

/// Counts what is open. Returns whether anything is.
async fn count(context: &Context) -> Result<bool, Failure> {
    // A start during the count sets it again.
    context.executions.set_open(false);
    let counts = context.store.execution_counts().await?;
    if counts.open > 0 {
        context.executions.set_open(true);
    }
    metrics::workflow_open(counts.open, counts.timers);
    Ok(context.executions.are_open())
}
