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
//! An execution whose log cannot be read, or that a bug of the machine ends, faults. Others go on.

mod calls;
mod error;
mod hot;
mod inputs;
mod job;
mod programs;
mod rounds;
mod row;

use std::time::Duration;

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
/// How often ended executions are removed, and open ones counted, while some are open.
const UPKEEP: Duration = Duration::from_secs(5);
/// How many ended executions are removed at once.
const REMOVED_AT_ONCE: u32 = 100;

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
        let (mut renew_at, mut upkeep_at) = (clock.now(), clock.now());
        let mut leads = false;
        while !cx.stop.is_cancelled() {
            if clock.now() >= renew_at {
                renew_at = clock.now() + RENEW;
                let led =
                    std::mem::replace(&mut leads, context.coordination.lease(WORK, LEASE).await?);
                if led != leads {
                    let does = if leads { "steps" } else { "does not step" };
                    tracing::debug!("this process {does} executions of workflows");
                    rounds.forget();
                }
            }
            cx.beat();
            let mut pause = RENEW;
            if leads {
                if clock.now() >= upkeep_at {
                    let is_full = upkeep(&context, &cx).await?;
                    let next = match context.executions.are_open() {
                        _ if is_full => Duration::ZERO,
                        true => UPKEEP,
                        false => LOOK,
                    };
                    upkeep_at = clock.now() + next;
                }
                // Without open executions there is nothing to read.
                if context.executions.are_open() {
                    pause = rounds.round().await?.unwrap_or(LOOK_OPEN).min(LOOK_OPEN);
                }
            }
            let pause = pause.min(renew_at.saturating_duration_since(clock.now()));
            if !pause.is_zero() {
                tokio::select! {
                    () = clock.sleep(pause) => {}
                    () = context.executions.woken(), if leads => {}
                    () = cx.stop.cancelled() => {}
                }
            }
        }
        if leads {
            context.coordination.release(WORK).await?;
        }
        Ok(())
    }
}

/// Removes ended executions, and counts those that are open. Returns whether more are to be removed.
async fn upkeep(context: &Context, cx: &Loop) -> Result<bool, Failure> {
    let store = &context.store;
    let counts = store.execution_counts().await?;
    context.executions.set_open(counts.open > 0);
    metrics::workflow_open(counts.open, counts.timers);
    let retention = context.settings.watchdog.retention;
    if retention.is_zero() {
        return Ok(false);
    }
    // The database's clock decides, and does not know of the time that a test has skipped.
    let age = retention.saturating_sub(cx.clock().skipped());
    let removed = store.remove_ended_executions(age, REMOVED_AT_ONCE).await?;
    Ok(removed >= u64::from(REMOVED_AT_ONCE))
}
