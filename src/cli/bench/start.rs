//! The phase start: the time until taskd is ready, and the time to rebuild after Redis has lost
//! everything.

use std::time::Instant;

use anyhow::{Context, ensure};

use super::{
    args::{Phase, Work},
    insert::{Plan, SETTLE, insert_all},
    process::{Habit, complete_all},
    run::Run,
    throughput,
    work::Worker,
};

pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    let seconds = run.server.ready_after.map(|time| time.as_secs_f64());
    run.report.figure(
        Phase::Start,
        "from start to ready, empty folder",
        "s",
        seconds,
        None,
    );
    throughput::warm_up(run).await?;

    let work = Work {
        replicas: 1,
        ..run.args.work.clone()
    };
    let (tasks, total) = (run.tasks("rebuilt", &work), u64::from(work.tasks));
    run.step("insert", total);
    insert_all(run, &work, &tasks, Plan::From(0)).await?;
    let all = run
        .server
        .wait_for(&tasks.queues, SETTLE, |counts| counts.waiting == total)
        .await?;
    all.context("gave up: not all tasks can be claimed before the loss")?;
    // Lease one task. Otherwise the counts before the loss would equal those after the rebuild, and
    // the wait below would end at once.
    let one = Work {
        batch: 1,
        stream: false,
        next: false,
        ..work.clone()
    };
    let held = Worker::new(run.server.channel(0), work.workers, &tasks, &one)
        .get()
        .await?;
    ensure!(!held.is_empty(), "a worker got no task");
    run.step("rebuild", 0);
    let (before, began) = (run.server.usage().await, Instant::now());
    run.server.empty_redis().await?;
    let back = run
        .server
        .wait_for(&tasks.queues, work.give_up_after.0, |counts| {
            counts.waiting == total
        })
        .await?;
    let back = back.context("gave up: not all tasks can be claimed again after the loss")?;
    let used = run.server.usage().await.since(before);
    run.report.rate(
        Phase::Start,
        "claimable again after FLUSHALL",
        work.tasks,
        back - began,
        Some(used),
    );
    complete_all(run, "start", &work, &tasks, work.tasks, Habit::Plain)
        .await
        .map(drop)
}
