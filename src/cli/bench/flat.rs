//! The phase flat: checks that the speed stays the same with many waiting tasks, workers and
//! queues, and measures what waiting tasks and an idle taskd cost.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use indicatif::HumanCount;

use super::{
    args::{Phase, QUEUES_A_CALL, Work},
    insert::{Plan, insert_all},
    process::{Habit, process},
    run::Run,
    throughput,
    work::Tasks,
};
use crate::cli::queues::Counts;

/// The number of workers that many workers are compared with.
const FEW_WORKERS: u16 = 10;
/// How long taskd gets to finish what the start and the previous work left.
const QUIET: Duration = Duration::from_secs(2);

/// The tasks of a queue: those that wait, and those that are done.
struct Backlog {
    what: &'static str,
    tasks: Tasks,
    inserted: u32,
    done: Vec<u32>,
}

/// A figure that others are compared with: its name and its value.
type Reference = (String, f64);

pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    let (flat, batch, taken) = (&run.args.flat, run.args.work.batch, run.args.flat.taken);
    let (few, most) = match &flat.waiting[..] {
        [few, .., most] => (*few, *most),
        [only] => (*only, *only),
        [] => return Ok(()),
    };
    idle(run, "idle").await?;
    throughput::warm_up(run).await?;
    let mut one = Backlog::new(run, "waiting", 1);
    let first = in_front_of(run, &mut one).await?;
    idle(run, "idle, with the most waiting").await?;

    let mut ten = None;
    for workers in [FEW_WORKERS, flat.many_workers] {
        let rate = one
            .take(run, most, workers, 1, most / 2, taken.div_ceil(5))
            .await?;
        note(
            run,
            format!("{} workers, 1 a call", HumanCount(workers.into())),
            rate,
            &mut ten,
        );
    }

    let queues = flat.many_queues;
    let waiting = few.max(u32::from(queues) * u32::from(batch));
    let mut many = Backlog::new(run, "queues", queues);
    many.fill(run, waiting).await?;
    let workers = FEW_WORKERS.max(queues.div_ceil(QUEUES_A_CALL));
    let rate = many
        .take(run, waiting, workers, batch, few / 2, taken)
        .await?;
    let measure = format!(
        "{} wait in {} queues",
        HumanCount(waiting.into()),
        HumanCount(queues.into())
    );
    note(run, measure, rate, &mut Some(first));
    one.count(run);
    many.count(run);
    Ok(())
}

/// Takes tasks while few tasks wait, then while more do. Measures the memory of the tasks added
/// last.
async fn in_front_of(run: &mut Run<'_>, backlog: &mut Backlog) -> anyhow::Result<Reference> {
    let (flat, work) = (&run.args.flat, &run.args.work);
    let (mut first, mut bytes) = (None, [None; 2]);
    for waiting in &flat.waiting {
        let (before, added) = (
            run.server.redis_bytes(backlog.queue()).await?,
            waiting - backlog.waiting(),
        );
        backlog.fill(run, *waiting).await?;
        let after = run.server.redis_bytes(backlog.queue()).await?;
        if added > 0 {
            let a_task = |bytes: f64| bytes / f64::from(added) - work.payload.0 as f64;
            bytes = [after.0 - before.0, after.1 - before.1].map(|bytes| Some(a_task(bytes)));
        }
        let rate = backlog
            .take(
                run,
                *waiting,
                FEW_WORKERS,
                work.batch,
                flat.waiting[0] / 2,
                flat.taken,
            )
            .await?;
        note(
            run,
            format!("{} wait", HumanCount((*waiting).into())),
            rate,
            &mut first,
        );
    }
    let [all, own] = bytes;
    run.report.figure(
        Phase::Flat,
        "a waiting task in Redis, beside its payload",
        "bytes",
        all,
        None,
    );
    run.report.figure(
        Phase::Flat,
        "the same, keys of its queue alone",
        "bytes",
        own,
        None,
    );
    first.context("--waiting has a number")
}

/// Records a rate and compares it with the reference; the first rate becomes the reference.
fn note(run: &mut Run<'_>, measure: String, rate: f64, reference: &mut Option<Reference>) {
    let beside = reference.as_ref().map(|(name, rate)| (&**name, *rate));
    run.report
        .figure(Phase::Flat, &measure, "tasks/s", Some(rate), beside);
    reference.get_or_insert((measure, rate));
}

/// Measures a taskd that nobody calls.
async fn idle(run: &mut Run<'_>, what: &str) -> anyhow::Result<()> {
    let time = run.args.flat.idle.0;
    run.step(what, 0);
    tokio::time::sleep(QUIET.min(time)).await;
    let (before, began) = (run.server.usage().await, Instant::now());
    tokio::time::sleep(time).await;
    let (used, seconds) = (
        run.server.usage().await.since(before),
        began.elapsed().as_secs_f64(),
    );
    for (process, cpu) in [("taskd", used.taskd), ("Redis", used.redis)] {
        let percent = cpu.map(|cpu| cpu / seconds * 100.0);
        run.report.figure(
            Phase::Flat,
            &format!("{what}: CPU of {process}"),
            "% of a core",
            percent,
            None,
        );
    }
    let mib = run
        .server
        .resident_bytes()
        .map(|bytes| bytes / f64::from(1 << 20));
    run.report.figure(
        Phase::Flat,
        &format!("{what}: memory of taskd"),
        "MiB",
        mib,
        None,
    );
    Ok(())
}

impl Backlog {
    fn new(run: &Run<'_>, what: &'static str, queues: u16) -> Self {
        let tasks = run.tasks(
            what,
            &Work {
                queues,
                replicas: 1,
                ..run.args.work.clone()
            },
        );
        Self {
            what,
            tasks,
            inserted: 0,
            done: Vec::new(),
        }
    }

    fn queue(&self) -> &str {
        &self.tasks.queues[0]
    }

    fn waiting(&self) -> u32 {
        self.inserted - self.done.len() as u32
    }

    /// Inserts tasks until `waiting` of them wait, and until all of them can be claimed.
    async fn fill(&mut self, run: &mut Run<'_>, waiting: u32) -> anyhow::Result<()> {
        let missing = waiting.saturating_sub(self.waiting());
        run.step(
            &format!("{} wait", HumanCount(waiting.into())),
            missing.into(),
        );
        let work = Work {
            tasks: missing,
            ..run.args.work.clone()
        };
        insert_all(run, &work, &self.tasks, Plan::From(self.inserted)).await?;
        self.inserted += missing;
        self.settle(run).await
    }

    /// Lets workers complete `taken` tasks, about `part` at a time; the backlog is refilled in
    /// between. Returns the rate in tasks per second.
    async fn take(
        &mut self,
        run: &mut Run<'_>,
        waiting: u32,
        workers: u16,
        batch: u16,
        part: u32,
        taken: u32,
    ) -> anyhow::Result<f64> {
        let work = Work {
            workers,
            batch,
            replicas: 1,
            ..run.args.work.clone()
        };
        let (mut done, mut took) = (0, Duration::ZERO);
        while done < taken {
            let part = part.min(taken - done);
            if self.waiting() < waiting / 2 + part {
                self.fill(run, waiting).await?;
            }
            run.step(
                &format!("{} workers", HumanCount(workers.into())),
                part.into(),
            );
            let began = Instant::now();
            let processed = process(run, &work, &self.tasks, part, Habit::Finishes).await?;
            took += processed.last.saturating_duration_since(began);
            let before = self.done.len();
            self.done.extend(processed.credits.into_iter().flatten());
            ensure!(
                self.done.len() > before,
                "gave up: workers got no task of {}",
                self.queue()
            );
            done += (self.done.len() - before) as u32;
            self.settle(run).await?;
        }
        Ok(f64::from(done) / took.as_secs_f64())
    }

    /// Waits until SQL and the queue have the expected counts.
    async fn settle(&self, run: &Run<'_>) -> anyhow::Result<()> {
        let (waiting, done) = (u64::from(self.waiting()), self.done.len() as u64);
        let patience = run.args.work.give_up_after.0;
        let is_settled = |counts: &Counts| counts.waiting == waiting && counts.completed == done;
        let settled = run
            .server
            .wait_for(&self.tasks.queues, patience, is_settled)
            .await?;
        ensure!(
            settled.is_some(),
            "gave up: {waiting} tasks of {} do not come to wait",
            self.queue()
        );
        Ok(())
    }

    /// Adds to the totals, and reports tasks that were completed twice.
    fn count(&mut self, run: &mut Run<'_>) {
        let all = self.done.len();
        self.done.sort_unstable();
        self.done.dedup();
        let (totals, doubled) = (&mut run.report.totals, all - self.done.len());
        totals.tasks += self.done.len() as u64;
        totals.completions += all as u64;
        totals.doubled += doubled as u64;
        if doubled > 0 {
            run.report.wrong(format!(
                "flat, {}: {doubled} tasks were completed twice",
                self.what
            ));
        }
    }
}
