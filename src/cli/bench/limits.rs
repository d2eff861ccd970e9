//! The phase limits: what limits per key cost, beside tasks without limits in the same run, and how
//! well their times are kept.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use indicatif::HumanCount;
use tokio::time::MissedTickBehavior;

use super::{
    args::{Phase, Work},
    insert::{Plan, SETTLE, insert_all},
    process::{Habit, Processed, complete_all, count, process},
    report::quantile,
    run::Run,
    throughput,
    work::{Leased, Tasks, Worker, insert},
};
use crate::{cli::queues::Counts, wire::pb::discovery_client::DiscoveryClient};

/// The start of the names of the queues: the benchmark's own taskd has limits for some of them.
pub(super) const NAME: &str = "bench";
/// A limited key has all workers to itself, or shares them with nine.
const FEW_KEYS: u32 = 10;
/// How long the counts of tasks with few limit keys stay the same before all are where they wait:
/// some wait in SQL.
const SETTLE_OF_FEW: Duration = Duration::from_secs(1);
/// How often tasks are completed with and without others that are blocked, in turn: one pass differs
/// from the next by more than what is measured.
const PASSES: u32 = 3;
/// The time between two starts of a key in the queue bench-paced.
const PACE: Duration = Duration::from_secs(1);
/// The tasks of the paced keys come over one interval, at so many moments.
const CALLS_AN_INTERVAL: u32 = 50;
const TASKS_A_CALL: usize = 500;
/// The tasks that wait behind each key whose memory is measured.
const BEHIND_A_KEY: u32 = 64;

pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    throughput::warm_up(run).await?;
    speed(run).await?;
    blocked(run).await?;
    paced(run).await?;
    bytes(run).await
}

/// The shape of the work: one worker a task, one queue.
fn one_queue(run: &Run<'_>) -> Work {
    Work {
        replicas: 1,
        queues: 1,
        ..run.args.work.clone()
    }
}

/// Tasks without limits, with a limit key each, and with few limit keys.
async fn speed(run: &mut Run<'_>) -> anyhow::Result<()> {
    let work = one_queue(run);
    let each = work.tasks;
    let free = run.tasks("free", &work);
    let many = run.tasks("many", &work).limited("key", each);
    let few = run.tasks("few", &work).limited("key", FEW_KEYS);
    let (claimable, completed) = through(run, "no limits", &work, &free, SETTLE).await?;
    let claimable_beside = claimable.map(|rate| ("insert, no limits".to_owned(), rate));
    let completed_beside = Some(("process, no limits".to_owned(), completed));
    note(run, "insert, no limits", claimable, None);
    note(run, "process, no limits", Some(completed), None);

    let keys = format!("{} limit keys", HumanCount(each.into()));
    let (claimable, completed) = through(run, &keys, &work, &many, SETTLE).await?;
    note(run, &format!("insert, {keys}"), claimable, claimable_beside);
    let measure = format!("process, {keys}");
    note(run, &measure, Some(completed), completed_beside.clone());

    let keys = format!("{} limit keys", HumanCount(FEW_KEYS.into()));
    let (_, completed) = through(run, &keys, &work, &few, SETTLE_OF_FEW).await?;
    let measure = format!("process, {keys}");
    note(run, &measure, Some(completed), completed_beside);
    Ok(())
}

/// Inserts tasks and completes them. Returns how many became claimable in a second (unknown, if
/// some of them have to wait), and how many were completed.
async fn through(
    run: &mut Run<'_>,
    what: &str,
    work: &Work,
    tasks: &Tasks,
    patience: Duration,
) -> anyhow::Result<(Option<f64>, f64)> {
    let total = work.tasks;
    run.step(&format!("insert, {what}"), total.into());
    let before = run.server.usage().await;
    let began = Instant::now();
    insert_all(run, work, tasks, Plan::From(0)).await?;
    let wanted = u64::from(total);
    let claimable = run
        .server
        .wait_for(&tasks.queues, patience, |counts| counts.waiting == wanted)
        .await?;
    let claimable = claimable.map(|at| f64::from(total) / (at - began).as_secs_f64());
    let began = Instant::now();
    let done = complete_all(run, what, work, tasks, total, Habit::Plain).await?;
    let (last, _, usage) = done.context("not every task was completed once")?;
    let took = last.saturating_duration_since(began);
    let redis = usage.since(before).redis;
    let redis = redis.map(|seconds| seconds * 1e6 / f64::from(total));
    let measure = format!("CPU of Redis, insert and process, {what}");
    run.report
        .figure(Phase::Limits, &measure, "µs/task", redis, None);
    Ok((claimable, f64::from(total) / took.as_secs_f64()))
}

fn note(run: &mut Run<'_>, measure: &str, rate: Option<f64>, beside: Option<(String, f64)>) {
    let beside = beside.as_ref().map(|(name, rate)| (name.as_str(), *rate));
    run.report
        .figure(Phase::Limits, measure, "tasks/s", rate, beside);
}

/// Tasks whose limit keys are free, in a queue of theirs and in one with very many that wait behind
/// another key.
async fn blocked(run: &mut Run<'_>) -> anyhow::Result<()> {
    let work = one_queue(run);
    let alone = run.tasks("unblocked", &work).limited("free", work.tasks);
    let beside = run.tasks("blocked", &work).limited("free", work.tasks);

    // One task of the key is leased, so that all others wait.
    let first = PASSES * work.tasks;
    let key = run.tasks("blocked", &work).limited("busy", 1);
    let client = DiscoveryClient::new(run.server.channel(0));
    insert(client, &key, vec![first]).await?;
    lease(run, &key, &work, 1).await?;
    let blocked = run.args.limits.blocked;
    let what = format!("{} blocked", HumanCount(blocked.into()));
    run.step(&what, blocked.into());
    let others = Work {
        tasks: blocked,
        ..work.clone()
    };
    insert_all(run, &others, &key, Plan::From(first + 1)).await?;
    // Some of them may wait in SQL.
    let all = u64::from(blocked);
    let is_there = |counts: &Counts| counts.waiting + counts.pending == all;
    run.server.wait_for(&key.queues, SETTLE, is_there).await?;
    let mut rates_alone = Vec::new();
    let mut rates_beside = Vec::new();
    for pass in 0..PASSES {
        let first = pass * work.tasks;
        rates_alone.push(free_keys(run, &work, &alone, first).await?);
        rates_beside.push(free_keys(run, &work, &beside, first).await?);
    }
    let [alone, beside] = [rates_alone, rates_beside].map(|mut rates: Vec<f64>| {
        rates.sort_unstable_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    let none = "process, none blocked";
    note(run, none, Some(alone), None);
    let compared = Some((none.to_owned(), alone));
    note(run, &format!("process, {what}"), Some(beside), compared);
    Ok(())
}

/// Inserts and completes tasks, numbered from `first`; how many a second.
async fn free_keys(
    run: &mut Run<'_>,
    work: &Work,
    tasks: &Tasks,
    first: u32,
) -> anyhow::Result<f64> {
    let total = work.tasks;
    let counts = run.server.counts(&tasks.queues).await?;
    insert_all(run, work, tasks, Plan::From(first)).await?;
    let wanted = counts.waiting + u64::from(total);
    run.server
        .wait_for(&tasks.queues, SETTLE, |counts| counts.waiting >= wanted)
        .await?;
    run.step("claims", total.into());
    let began = Instant::now();
    let done = process(run, work, tasks, total, Habit::Finishes).await?;
    let took = done.last.saturating_duration_since(began);
    let completed: usize = done.credits.iter().map(Vec::len).sum();
    ensure!(
        completed == total as usize,
        "gave up: {completed} of {total} tasks were completed"
    );
    let totals = &mut run.report.totals;
    totals.tasks += u64::from(total);
    totals.completions += u64::from(total);
    Ok(f64::from(total) / took.as_secs_f64())
}

/// Leases as many tasks. They stay leased.
async fn lease(run: &Run<'_>, tasks: &Tasks, work: &Work, most: usize) -> anyhow::Result<()> {
    let work = Work {
        batch: work.batch.min(u16::try_from(most).unwrap_or(u16::MAX)),
        stream: false,
        next: false,
        ..work.clone()
    };
    let mut leased: Vec<Leased> = Vec::new();
    let mut worker = Worker::new(run.server.channel(0), work.workers, tasks, &work);
    while leased.len() < most {
        let more = worker.get().await?;
        ensure!(
            !more.is_empty(),
            "gave up: a worker got no task of {}",
            tasks.queues[0]
        );
        leased.extend(more);
    }
    Ok(())
}

/// Keys that may start one task a second: how many starts there are, and how late.
async fn paced(run: &mut Run<'_>) -> anyhow::Result<()> {
    let keys = run.args.limits.paced_keys;
    let rounds = run.args.work.duration.0.as_secs().max(1) as u32 + 1;
    let total = keys * rounds;
    let work = Work {
        tasks: total,
        ..one_queue(run)
    };
    let tasks = run.tasks("paced", &work).limited("key", keys);
    run.step("paced", total.into());
    let shared: &Run<'_> = run;
    // The keys begin one after the other, as in a crawl, and not all at once.
    let sending = async {
        let mut calls = tokio::time::interval(PACE / CALLS_AN_INTERVAL);
        calls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let all: Vec<u32> = (0..keys).collect();
        for some in all.chunks(keys.div_ceil(CALLS_AN_INTERVAL) as usize) {
            calls.tick().await;
            let rounds =
                (0..rounds).flat_map(|round| some.iter().map(move |key| key + round * keys));
            let numbers: Vec<u32> = rounds.collect();
            for numbers in numbers.chunks(TASKS_A_CALL) {
                let client = DiscoveryClient::new(shared.server.channel(0));
                insert(client, &tasks, numbers.to_vec()).await?;
            }
        }
        anyhow::Ok(())
    };
    let working = process(shared, &work, &tasks, total, Habit::NotesTimes);
    let ((), processed) = tokio::try_join!(sending, working)?;
    let (share, mut late) = punctuality(&processed, keys);
    late.sort_unstable();
    let p99 = quantile(&late, 0.99).map(|late| late.as_secs_f64() * 1e3);
    let what = format!("{} limit keys at 1/s", HumanCount(keys.into()));
    let figures = [("starts", "of all", share), ("late, p99", "ms", p99)];
    for (measure, unit, value) in figures {
        let measure = format!("{what}: {measure}");
        run.report
            .figure(Phase::Limits, &measure, unit, value, None);
    }
    count(run, "limits", &work, &tasks, total, processed)
        .await
        .map(drop)
}

/// The starts per key and interval, and how much too late each was.
fn punctuality(processed: &Processed, keys: u32) -> (Option<f64>, Vec<Duration>) {
    let mut of_keys = vec![Vec::new(); keys as usize];
    for (number, at) in &processed.handled {
        of_keys[(number % keys) as usize].push(*at);
    }
    let mut late = Vec::new();
    let mut time = Duration::ZERO;
    for mut starts in of_keys {
        starts.sort_unstable();
        for pair in starts.windows(2) {
            let gap = pair[1] - pair[0];
            time += gap;
            late.push(gap.saturating_sub(PACE));
        }
    }
    let intervals = time.as_secs_f64() / PACE.as_secs_f64();
    let share = (!late.is_empty()).then(|| late.len() as f64 / intervals);
    (share, late)
}

/// The memory of a leased key and of a task behind it, beside that of tasks without limits.
async fn bytes(run: &mut Run<'_>) -> anyhow::Result<()> {
    let keys = (run.args.work.tasks / BEHIND_A_KEY).max(1);
    let work = one_queue(run);
    let free = run.tasks("free-bytes", &work);
    let limited = run.tasks("bytes", &work).limited("key", keys);
    let (free_leased, free_waiting) = of_tasks(run, &work, &free, keys).await?;
    let (leased, waiting) = of_tasks(run, &work, &limited, keys).await?;
    let figures = [
        (
            "a busy key in Redis, beside a lease without limits",
            leased - free_leased,
        ),
        (
            "a task behind its key, beside one without limits",
            waiting - free_waiting,
        ),
    ];
    for (measure, bytes) in figures {
        run.report
            .figure(Phase::Limits, measure, "bytes", Some(bytes), None);
    }
    Ok(())
}

/// The bytes of a leased task, and of one that waits.
async fn of_tasks(
    run: &mut Run<'_>,
    work: &Work,
    tasks: &Tasks,
    leased: u32,
) -> anyhow::Result<(f64, f64)> {
    let first = Work {
        tasks: leased,
        ..work.clone()
    };
    let waiting = leased * BEHIND_A_KEY;
    let others = Work {
        tasks: waiting,
        ..work.clone()
    };
    run.step("memory", u64::from(leased) + u64::from(waiting));
    let empty = run.server.redis_bytes(&tasks.queues[0]).await?.1;
    insert_all(run, &first, tasks, Plan::From(0)).await?;
    lease(run, tasks, work, leased as usize).await?;
    let busy = run.server.redis_bytes(&tasks.queues[0]).await?.1;
    insert_all(run, &others, tasks, Plan::From(leased)).await?;
    let wanted = u64::from(waiting);
    let all = run
        .server
        .wait_for(&tasks.queues, SETTLE, |counts| counts.waiting == wanted)
        .await?;
    all.context("gave up: not all tasks come to wait in Redis")?;
    let full = run.server.redis_bytes(&tasks.queues[0]).await?.1;
    Ok((
        (busy - empty) / f64::from(leased),
        (full - busy) / f64::from(waiting),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_late_by_what_is_more_than_the_pace() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let processed = Processed {
            handled: vec![(0, at(0)), (3, at(2100)), (1, at(5)), (2, at(1100))],
            ..Processed::default()
        };
        let (share, mut late) = punctuality(&processed, 2);
        late.sort_unstable();
        assert_eq!(late, [100, 1095].map(Duration::from_millis));
        let share = share.expect("two intervals");
        assert!((share - 2.0 / 3.195).abs() < 1e-6, "{share}");
        assert_eq!(punctuality(&Processed::default(), 2), (None, Vec::new()));
    }
}
