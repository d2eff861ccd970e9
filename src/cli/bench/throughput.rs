//! The phases insert, duplicates and process.

use std::time::Instant;

use super::{
    args::{Phase, Work},
    insert::{self, Plan, SETTLE, insert_all},
    process::{Habit, complete_all},
    run::Run,
};

/// The most tasks with which taskd is warmed up before it is measured.
const WARM_UP: u32 = 1000;

/// Makes every part of taskd run once.
pub(super) async fn warm_up(run: &mut Run<'_>) -> anyhow::Result<()> {
    let work = Work {
        tasks: run.args.work.tasks.min(WARM_UP),
        ..run.args.work.clone()
    };
    let tasks = run.tasks("warm-up", &work);
    run.step("warm-up", work.tasks.into());
    insert_all(run, &work, &tasks, Plan::From(0)).await?;
    complete_all(run, "warm-up", &work, &tasks, work.tasks, Habit::Plain)
        .await
        .map(drop)
}

/// Measures the phases on the same tasks. Phases that were not selected but are needed run
/// unmeasured.
pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    let work = &run.args.work;
    let tasks = run.tasks("tasks", work);
    let mut total = work.tasks;
    if run.args.wants(Phase::Insert) {
        run.step("insert", work.tasks.into());
        insert::new(run, work, &tasks).await?;
    } else {
        run.step("insert (not measured)", work.tasks.into());
        insert_all(run, work, &tasks, Plan::From(0)).await?;
    }
    if run.args.wants(Phase::Duplicates) {
        run.step("duplicates", work.tasks.into());
        insert::known(run, work, &tasks).await?;
        total += Plan::Known.new_tasks(work.tasks);
    }
    if !run.args.wants(Phase::Process) {
        return complete_all(
            run,
            "process (not measured)",
            work,
            &tasks,
            total,
            Habit::Plain,
        )
        .await
        .map(drop);
    }
    // The phase measures the workers, not how the last tasks get into the queue.
    let wanted = u64::from(total);
    run.server
        .wait_for(&tasks.queues, SETTLE, |counts| counts.waiting == wanted)
        .await?;
    let habit = if work.failing {
        Habit::PassesOn
    } else {
        Habit::Plain
    };
    let (before, began) = (run.server.usage().await, Instant::now());
    if let Some((done, at, usage)) =
        complete_all(run, "process", work, &tasks, total, habit).await?
    {
        let (done, used) = (done.saturating_duration_since(began), usage.since(before));
        run.report
            .rate(Phase::Process, "completed", total, done, None);
        run.report.rate(
            Phase::Process,
            "settled in SQL",
            total,
            at - began,
            Some(used),
        );
    }
    Ok(())
}
