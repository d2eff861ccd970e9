//! The phase latency: tasks arrive at a fixed rate, however long the answers take, while workers
//! wait for them.

use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::{runtime::Handle, sync::mpsc};
use tokio_util::sync::CancellationToken;

use super::{
    args::{Phase, Work},
    process::{Habit, Processed, completions, count, process},
    run::Run,
    server::Server,
    work::{Inserted, Tasks, insert},
};
use crate::wire::pb::discovery_client::DiscoveryClient;

/// The time between the start of the clock and the first task.
pub(super) const LEAD: Duration = Duration::from_millis(100);

/// The result of inserting tasks at a fixed rate.
struct Sent {
    start: Instant,
    /// How much later than scheduled each call was made: the delay caused by the benchmark itself.
    late: Vec<Duration>,
    /// The time from the scheduled insert to the answer CREATED.
    created: Vec<Duration>,
    repeated: u32,
}

struct Answered {
    number: u32,
    sent: Instant,
    at: Instant,
    inserted: Inserted,
}

/// Measures the latency from insert to handler, and from rejection to handler.
pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    let work = &run.args.work;
    let total = work.samples() + 1;
    let tasks = run.tasks("latency", work);
    run.step("latency", completions(total, work));
    let processed = insert_to_handler(run, work, &tasks).await?;
    count(run, "latency", work, &tasks, total, processed).await?;

    // With a single replica, the next worker that gets the task can only get the rejected one.
    let work = Work {
        replicas: 1,
        ..work.clone()
    };
    let tasks = run.tasks("rejected", &work);
    run.step("latency of rejected tasks", completions(total, &work));
    let processed = rejection_to_handler(run, &work, &tasks).await?;
    count(run, "latency", &work, &tasks, total, processed)
        .await
        .map(drop)
}

/// Inserts one task per call at the given rate, and measures when each reached its workers.
pub(super) async fn insert_to_handler(
    run: &mut Run<'_>,
    work: &Work,
    tasks: &Tasks,
) -> anyhow::Result<Processed> {
    let before = run.server.usage().await;
    let (sent, processed) = send_and_process(run, work, tasks, Habit::NotesTimes).await?;
    let used = run.server.usage().await.since(before);
    let (samples, report) = (work.samples(), &mut *run.report);
    let took = processed.last.saturating_duration_since(sent.start);
    report.rate(Phase::Latency, "one a call", samples, took, Some(used));
    let handled = processed
        .handled
        .iter()
        .filter(|(number, _)| *number < samples);
    let handled = handled
        .map(|(number, at)| at.saturating_duration_since(due(sent.start, work.rate, *number)));
    report.latency("insert to CREATED", sent.created);
    report.latency("insert to handler", handled.collect());
    report.latency("due to sent (bench itself)", sent.late);
    Ok(processed)
}

/// Measures the time from a rejection until the next worker gets the task. Workers reject each task
/// once.
async fn rejection_to_handler(
    run: &mut Run<'_>,
    work: &Work,
    tasks: &Tasks,
) -> anyhow::Result<Processed> {
    let (_, processed) = send_and_process(run, work, tasks, Habit::PassesOn).await?;
    let samples = work.samples();
    let mut rejected = vec![None; samples as usize + 1];
    for (number, at) in &processed.passed_on {
        rejected[*number as usize] = Some(*at);
    }
    let again = processed
        .handled
        .iter()
        .filter(|(number, _)| *number < samples);
    let again = again
        .filter_map(|(number, at)| Some(at.saturating_duration_since(rejected[*number as usize]?)));
    run.report.latency("rejection to handler", again.collect());
    Ok(processed)
}

/// Inserts tasks at the given rate while workers wait. Inserts one task in advance, so that the
/// queue is already open when the clock starts.
async fn send_and_process(
    run: &mut Run<'_>,
    work: &Work,
    tasks: &Tasks,
    habit: Habit,
) -> anyhow::Result<(Sent, Processed)> {
    let (server, samples) = (&run.server, work.samples());
    insert(
        DiscoveryClient::new(server.channel(0)),
        tasks,
        vec![samples],
    )
    .await?;
    let workers = process(run, work, tasks, samples + 1, habit);
    let (sent, processed) = tokio::try_join!(send(server, tasks, work.rate, samples), workers)?;
    run.report.totals.repeated_calls += u64::from(sent.repeated);
    Ok((sent, processed))
}

/// Makes a call for each task at its scheduled time.
async fn send(server: &Server, tasks: &Tasks, rate: u32, samples: u32) -> anyhow::Result<Sent> {
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    let start = Instant::now() + LEAD;
    let (answers, mut answered) = mpsc::unbounded_channel();
    let clients: Vec<_> = (0..16)
        .map(|caller| DiscoveryClient::new(server.channel(caller)))
        .collect();
    let (tasks, runtime) = (tasks.clone(), Handle::current());
    // Use a thread, because the timers of the runtime have a resolution of a millisecond.
    let pace = move || {
        for number in 0..samples {
            std::thread::sleep(due(start, rate, number).saturating_duration_since(Instant::now()));
            if stop.is_cancelled() {
                return;
            }
            let client = clients[number as usize % clients.len()].clone();
            let (tasks, answers) = (tasks.clone(), answers.clone());
            runtime.spawn(async move {
                let sent = Instant::now();
                let inserted = insert(client, &tasks, vec![number]).await;
                let answer = inserted.map(|inserted| Answered {
                    number,
                    sent,
                    at: Instant::now(),
                    inserted,
                });
                // After a failure nobody receives it.
                drop(answers.send(answer));
            });
        }
    };
    std::thread::Builder::new()
        .name("bench-pace".to_owned())
        .spawn(pace)
        .context("cannot start a thread")?;
    let mut sent = Sent {
        start,
        late: Vec::new(),
        created: Vec::new(),
        repeated: 0,
    };
    while let Some(answer) = answered.recv().await {
        let Answered {
            number,
            sent: at_call,
            at,
            inserted,
        } = answer?;
        let due = due(start, rate, number);
        sent.late.push(at_call.saturating_duration_since(due));
        sent.created.push(at.saturating_duration_since(due));
        sent.repeated += inserted.repeated;
    }
    Ok(sent)
}

pub(super) fn due(start: Instant, rate: u32, number: u32) -> Instant {
    start + Duration::from_nanos(u64::from(number) * 1_000_000_000 / u64::from(rate))
}
