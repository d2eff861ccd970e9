//! `taskd bench`: measures a taskd through gRPC, as its users call it, and counts that no task is lost or doubled.

mod args;
mod flat;
mod http;
mod insert;
mod latency;
mod ledger;
mod machine;
mod own;
mod process;
mod progress;
mod report;
mod server;
mod start;
mod work;

use std::time::Instant;

use anyhow::bail;
use indicatif::ProgressBar;
use tokio::signal::unix::{SignalKind, signal};
use uuid::Uuid;

pub use self::args::Bench;
use self::{
    args::{Part, Phase, Work},
    insert::Plan,
    process::{Habit, Processed, process},
    report::Report,
    server::{Server, Usage},
    work::Tasks,
};

/// The most tasks that warm a taskd up before its figures.
const WARM_UP: u32 = 1000;

/// Measures, and prints the figures. True if every task was completed exactly NUM times.
///
/// `Err`: taskd could not be reached or started, or gave up.
pub async fn run(args: Bench) -> anyhow::Result<bool> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    // A taskd that this command started ends with the future.
    tokio::select! {
        result = measure(&args) => result,
        _ = interrupt.recv() => bail!("stopped"),
        _ = terminate.recv() => bail!("stopped"),
    }
}

async fn measure(args: &Bench) -> anyhow::Result<bool> {
    let bar = progress::bar();
    let mut report = Report::default();
    let mut conditions = None;
    for number in 1..=args.runs {
        for part in args.parts() {
            progress::step(&bar, format!("run {number} of {}: start", args.runs), 0);
            let server = Server::open(args, part).await?;
            if conditions.is_none() {
                conditions = Some(server.conditions(args).await?);
            }
            let name = format!("bench-{}", &Uuid::new_v4().simple().to_string()[..12]);
            let mut run = Run { args, server, name, number, bar: &bar, report: &mut report };
            match part {
                Part::Calls => run.calls().await?,
                Part::Flat => flat::measure(&mut run).await?,
                Part::Start => start::measure(&mut run).await?,
            }
            run.server.close().await?;
        }
    }
    bar.finish_and_clear();
    let Some(conditions) = conditions else { bail!("no run") };
    let text = match args.json {
        true => report.json(&conditions, args).to_string(),
        false => report.text(&conditions, args),
    };
    println!("{text}");
    report.mistakes().iter().for_each(|line| eprintln!("taskd: {line}"));
    Ok(report.mistakes().is_empty())
}

/// One run on one taskd, in queues of its own.
struct Run<'a> {
    args: &'a Bench,
    server: Server,
    name: String,
    number: u16,
    bar: &'a ProgressBar,
    report: &'a mut Report,
}

impl Run<'_> {
    async fn calls(&mut self) -> anyhow::Result<()> {
        self.warm_up().await?;
        let wants = |phase| self.args.wants(phase);
        if wants(Phase::Insert) || wants(Phase::Duplicates) || wants(Phase::Process) {
            self.throughput().await?;
        }
        if wants(Phase::Latency) {
            self.latency().await?;
        }
        Ok(())
    }

    /// Lets every part of taskd work once.
    async fn warm_up(&mut self) -> anyhow::Result<()> {
        let work = Work { tasks: self.args.work.tasks.min(WARM_UP), ..self.args.work.clone() };
        let tasks = self.tasks("warm-up", &work);
        self.step("warm-up", work.tasks.into());
        insert::insert_all(self, &work, &tasks, Plan::From(0)).await?;
        self.process("warm-up", &work, &tasks, work.tasks, Habit::Plain).await.map(drop)
    }

    /// The phases insert, duplicates and process, on the same tasks. Phases that nobody asked for run unreported.
    async fn throughput(&mut self) -> anyhow::Result<()> {
        let work = &self.args.work;
        let tasks = self.tasks("tasks", work);
        let mut total = work.tasks;
        if self.args.wants(Phase::Insert) {
            self.step("insert", work.tasks.into());
            insert::new(self, work, &tasks).await?;
        } else {
            self.step("insert (not measured)", work.tasks.into());
            insert::insert_all(self, work, &tasks, Plan::From(0)).await?;
        }
        if self.args.wants(Phase::Duplicates) {
            self.step("duplicates", work.tasks.into());
            insert::known(self, work, &tasks).await?;
            total += Plan::Known.new_tasks(work.tasks);
        }
        if !self.args.wants(Phase::Process) {
            return self.process("process (not measured)", work, &tasks, total, Habit::Plain).await.map(drop);
        }
        // The phase measures workers, not the way of the last tasks into the queue.
        let wanted = u64::from(total);
        self.server.wait_for(&tasks.queues, insert::SETTLE, |counts| counts.queued == wanted).await?;
        let (before, began) = (self.server.usage().await, Instant::now());
        if let Some((done, at, usage)) = self.process("process", work, &tasks, total, Habit::Plain).await? {
            let (done, used) = (done.saturating_duration_since(began), usage.since(before));
            self.report.rate(Phase::Process, "completed", total, done, None);
            self.report.rate(Phase::Process, "settled in SQL", total, at - began, Some(used));
        }
        Ok(())
    }

    async fn latency(&mut self) -> anyhow::Result<()> {
        let work = &self.args.work;
        let total = work.samples() + 1;
        let tasks = self.tasks("latency", work);
        self.step("latency", completions(total, work));
        let processed = latency::insert_to_handler(self, work, &tasks).await?;
        self.count("latency", work, &tasks, total, processed).await?;

        // A replica alone: the next worker with the task is then the one that was waited for.
        let work = Work { replicas: 1, ..work.clone() };
        let tasks = self.tasks("rejected", &work);
        self.step("latency of rejected tasks", completions(total, &work));
        let processed = latency::rejection_to_handler(self, &work, &tasks).await?;
        self.count("latency", &work, &tasks, total, processed).await.map(drop)
    }

    /// Lets workers complete all tasks, and counts. The last completion; the time and the CPU when SQL showed all.
    async fn process(
        &mut self,
        phase: &str,
        work: &Work,
        tasks: &Tasks,
        total: u32,
        habit: Habit,
    ) -> anyhow::Result<Option<(Instant, Instant, Usage)>> {
        self.step(phase, completions(total, work));
        let processed = process(self, work, tasks, total, habit).await?;
        let last = processed.last;
        let settled = self.count(phase, work, tasks, total, processed).await?;
        Ok(settled.map(|(at, usage)| (last, at, usage)))
    }

    /// Checks that each task was completed as often as it must be; the time and the CPU when SQL showed it.
    async fn count(
        &mut self,
        phase: &str,
        work: &Work,
        tasks: &Tasks,
        total: u32,
        processed: Processed,
    ) -> anyhow::Result<Option<(Instant, Usage)>> {
        let totals = &mut self.report.totals;
        totals.tasks += u64::from(total);
        totals.completions += processed.credits.iter().map(|credits| credits.len() as u64).sum::<u64>();
        totals.repeated_calls += u64::from(processed.repeated);
        match process::check(&self.server, work, tasks, total, processed.credits).await? {
            Ok(at) => Ok(Some((at, self.server.usage().await))),
            Err(verdict) => {
                let totals = &mut self.report.totals;
                totals.lost += verdict.lost.len() as u64;
                totals.doubled += verdict.doubled.len() as u64;
                self.report.wrong(verdict.describe(phase, &tasks.queues[0]));
                Ok(None)
            }
        }
    }

    fn tasks(&self, what: &str, work: &Work) -> Tasks {
        Tasks::new(&format!("{}-{what}", self.name), work)
    }

    fn step(&self, what: &str, total: u64) {
        progress::step(self.bar, format!("run {} of {}: {what}", self.number, self.args.runs), total);
    }
}

fn completions(tasks: u32, work: &Work) -> u64 {
    u64::from(tasks) * u64::from(work.replicas)
}
