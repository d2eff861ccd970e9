//! The phase topics: records published beside tasks inserted; what one subscription makes of them,
//! and ten; tasks in sequences beside tasks in none; how soon a handler has a record; what idle
//! subscriptions cost.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use indicatif::HumanCount;
use tokio::task::JoinSet;
use tonic::Response;

use super::{
    args::{Phase, Work},
    insert::{Plan, SETTLE, insert_all},
    latency,
    process::{Habit, complete_all, completions, count, process},
    progress,
    run::Run,
    throughput,
    work::{Tasks, key},
};
use crate::{
    cli::{client::Taskd, queues::Counts},
    wire::pb::{self, topics_client::TopicsClient},
};

/// Subscriptions of one topic that are compared with one.
const MANY: u16 = 10;
/// Sequences that are compared with none. A sequence has ten tasks, or at least two.
const SEQUENCES: u32 = 10_000;
/// Topics with a subscription each that nobody uses.
const IDLE: u32 = 500;
/// The start of a subscription of what is published from now on.
const NEW: &str = "$";
/// How long new subscriptions settle before records come, or their CPU is looked at.
const CALM: Duration = Duration::from_secs(3);
/// The partitions of a topic that has records.
const PARTITIONS: u32 = 4;

pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    throughput::warm_up(run).await?;
    // A record becomes one task in a queue.
    let work = Work {
        replicas: 1,
        queues: 1,
        ..run.args.work.clone()
    };
    let inserted = insert(run, &work).await?;
    let topic = topic_of(run, "records");
    put_topic(run, &topic, PARTITIONS).await?;
    let published = per_second(work.tasks, publish(run, &work, &topic).await?);
    let redis = alone(run, &work).await?;
    note(
        run,
        "records published",
        published,
        Some(("tasks inserted", inserted.accepted)),
    );
    let reference = Some(("XADD alone", redis));
    note(run, "records published, and XADD", published, reference);

    let one = claimable(run, &work, "one", 1).await?;
    let reference = Some(("tasks inserted claimable", inserted.claimable));
    note(run, "tasks of records claimable", one, reference);
    let behind = caught_up(run, &work).await?;
    note(
        run,
        "tasks of published records claimable",
        behind,
        reference,
    );
    let tasks = run.tasks("one", &work);
    let of_records = processed(run, "records", &work, &tasks).await?;
    let reference = Some(("inserted tasks processed", inserted.processed));
    note(run, "tasks of records processed", of_records, reference);

    let few = Work {
        tasks: (work.tasks / u32::from(MANY)).max(1),
        ..work.clone()
    };
    let many = claimable(run, &few, "many", MANY).await?;
    let reference = Some(("one subscription", one));
    note(run, "tasks of ten subscriptions claimable", many, reference);
    sequences(run, &work, &inserted).await?;
    handlers(run, &work).await?;
    idle(run).await
}

fn note(run: &mut Run<'_>, measure: &str, rate: f64, reference: Option<(&str, f64)>) {
    run.report
        .figure(Phase::Topics, measure, "/s", Some(rate), reference);
}

/// What inserted tasks reach, a second.
struct OfTasks {
    accepted: f64,
    claimable: f64,
    processed: f64,
}

async fn insert(run: &mut Run<'_>, work: &Work) -> anyhow::Result<OfTasks> {
    let tasks = run.tasks("inserted", work);
    let total = u64::from(work.tasks);
    run.step("insert", total);
    let began = Instant::now();
    insert_all(run, work, &tasks, Plan::From(0)).await?;
    let accepted = per_second(work.tasks, began.elapsed());
    let at = run
        .server
        .wait_for(&tasks.queues, SETTLE, |counts| counts.waiting == total)
        .await?;
    let at = at.context("gave up: not all tasks can be claimed")?;
    Ok(OfTasks {
        accepted,
        claimable: per_second(work.tasks, at - began),
        processed: processed(run, "process", work, &tasks).await?,
    })
}

/// Processes tasks that can be claimed. Returns how many a second.
async fn processed(
    run: &mut Run<'_>,
    what: &str,
    work: &Work,
    tasks: &Tasks,
) -> anyhow::Result<f64> {
    let began = Instant::now();
    let done = complete_all(run, what, work, tasks, work.tasks, Habit::Plain).await?;
    let (last, ..) = done.context("not every task was completed once")?;
    Ok(per_second(work.tasks, last - began))
}

/// Inserts and processes tasks of sequences.
async fn sequences(run: &mut Run<'_>, work: &Work, inserted: &OfTasks) -> anyhow::Result<()> {
    let count = SEQUENCES.min(work.tasks.div_ceil(2));
    let tasks = run.tasks("sequences", work).in_sequences(count);
    run.step("insert, sequences", work.tasks.into());
    let began = Instant::now();
    insert_all(run, work, &tasks, Plan::From(0)).await?;
    let accepted = per_second(work.tasks, began.elapsed());
    let all = u64::from(work.tasks);
    let heads = u64::from(count);
    let are_there = |counts: &Counts| counts.waiting >= heads && counts.all() == all;
    let at = run
        .server
        .wait_for(&tasks.queues, SETTLE, are_there)
        .await?;
    at.context("gave up: not every sequence has a task that can be claimed")?;
    let done = processed(run, "process, sequences", work, &tasks).await?;
    let count = HumanCount(count.into());
    let reference = Some(("tasks inserted", inserted.accepted));
    let measure = format!("tasks inserted, {count} sequences");
    note(run, &measure, accepted, reference);
    let reference = Some(("inserted tasks processed", inserted.processed));
    let measure = format!("tasks processed, {count} sequences");
    note(run, &measure, done, reference);
    Ok(())
}

fn topic_of(run: &Run<'_>, what: &str) -> String {
    format!("{}-{what}", run.name)
}

/// Publishes as many records as the work has tasks. Returns how long it took.
async fn publish(run: &Run<'_>, work: &Work, topic: &str) -> anyhow::Result<Duration> {
    run.step("publish", work.tasks.into());
    let total = work.tasks;
    let batch = u32::from(work.batch);
    let payload = payload(work);
    let next = Arc::new(AtomicU32::new(0));
    let began = Instant::now();
    let mut callers = JoinSet::new();
    for caller in 0..usize::from(work.concurrency) {
        let client = TopicsClient::new(run.server.channel(caller));
        let next = Arc::clone(&next);
        let topic = topic.to_owned();
        let bar = run.bar.clone();
        let payload = payload.clone();
        callers.spawn(async move {
            loop {
                let first = next.fetch_add(batch, Ordering::Relaxed);
                if first >= total {
                    return anyhow::Ok(());
                }
                let numbers: Vec<u32> = (first..total.min(first + batch)).collect();
                let count = numbers.len() as u64;
                publish_records(client.clone(), &topic, &payload, numbers).await?;
                bar.inc(count);
            }
        });
    }
    while let Some(done) =
        progress::next_moving(&mut callers, run.bar, work.give_up_after.0).await?
    {
        done?;
    }
    Ok(began.elapsed())
}

async fn publish_records(
    mut client: TopicsClient<Taskd>,
    topic: &str,
    payload: &[u8],
    numbers: Vec<u32>,
) -> anyhow::Result<()> {
    let record = |number: &u32| pb::NewRecord {
        value: payload.to_vec().into(),
        // Workers know the tasks by their keys.
        key: key(*number).into(),
        ..Default::default()
    };
    let request = pb::PublishRequest {
        topic: topic.to_owned(),
        records: numbers.iter().map(record).collect(),
    };
    let answer = client.publish(request).await.map(Response::into_inner);
    let answer = answer.context("taskd did not take records")?;
    let not_stored = answer
        .results
        .iter()
        .find(|result| result.status() != pb::PublishStatus::Stored);
    match not_stored {
        Some(result) => bail!("taskd did not store a record: {}", result.error),
        None => Ok(()),
    }
}

fn payload(work: &Work) -> Vec<u8> {
    vec![b'x'; usize::try_from(work.payload.0).unwrap_or_default()]
}

async fn put_topic(run: &Run<'_>, topic: &str, partitions: u32) -> anyhow::Result<()> {
    let mut client = TopicsClient::new(run.server.channel(0));
    let put = pb::PutTopicRequest {
        topic: topic.to_owned(),
        partitions: Some(partitions),
        retention_records: Some(100_000_000),
        retention_bytes: Some(64 << 30),
        ..Default::default()
    };
    client.put_topic(put).await.context("no topic")?;
    Ok(())
}

/// Makes a subscription that begins at `start`.
async fn subscribe(run: &Run<'_>, name: &str, topic: &str, start: &str) -> anyhow::Result<()> {
    let mut client = TopicsClient::new(run.server.channel(0));
    let put = pb::PutSubscriptionRequest {
        subscription: name.to_owned(),
        topic: Some(topic.to_owned()),
        start: Some(start.to_owned()),
        ..Default::default()
    };
    client
        .put_subscription(put)
        .await
        .context("no subscription")?;
    Ok(())
}

/// Publishes records to a topic with so many subscriptions. Returns how many of their tasks a second
/// can be claimed, from the first publish.
async fn claimable(
    run: &Run<'_>,
    work: &Work,
    what: &str,
    subscriptions: u16,
) -> anyhow::Result<f64> {
    let topic = topic_of(run, what);
    put_topic(run, &topic, PARTITIONS).await?;
    let of_each = Work {
        queues: subscriptions,
        ..work.clone()
    };
    let tasks = run.tasks(what, &of_each);
    for queue in &tasks.queues {
        subscribe(run, queue, &topic, NEW).await?;
    }
    // Until the feeder knows them.
    tokio::time::sleep(CALM).await;
    let began = Instant::now();
    publish(run, work, &topic).await?;
    let total = u64::from(work.tasks) * u64::from(subscriptions);
    let at = run
        .server
        .wait_for(&tasks.queues, work.give_up_after.0, |counts| {
            counts.waiting == total
        })
        .await?;
    let at = at.context("gave up: not all records became tasks that can be claimed")?;
    Ok(total as f64 / (at - began).as_secs_f64())
}

/// Subscribes to a topic that has records. Returns how many of their tasks a second can be claimed,
/// from the first one that can be.
async fn caught_up(run: &Run<'_>, work: &Work) -> anyhow::Result<f64> {
    let topic = topic_of(run, "behind");
    put_topic(run, &topic, PARTITIONS).await?;
    publish(run, work, &topic).await?;
    let tasks = run.tasks("behind", work);
    // Until the feeder knows the subscription, nothing happens.
    let begun = Cell::new((Instant::now(), 0));
    subscribe(run, &tasks.queues[0], &topic, "0").await?;
    let total = u64::from(work.tasks);
    let all_wait = |counts: &Counts| {
        if counts.waiting > 0 && counts.waiting < total && begun.get().1 == 0 {
            begun.set((Instant::now(), counts.waiting));
        }
        counts.waiting == total
    };
    let patience = work.give_up_after.0;
    let at = run
        .server
        .wait_for(&tasks.queues, patience, all_wait)
        .await?;
    let at = at.context("gave up: not all records became tasks that can be claimed")?;
    let (began, before) = begun.get();
    Ok((total - before) as f64 / (at - began).as_secs_f64())
}

/// Appends the same records to a stream of Redis, without taskd.
async fn alone(run: &Run<'_>, work: &Work) -> anyhow::Result<f64> {
    run.step("XADD alone", 0);
    let batch = u32::from(work.batch);
    let took = run
        .server
        .append_alone(work.tasks, batch, work.concurrency, &payload(work))
        .await?;
    Ok(per_second(work.tasks, took))
}

/// Inserts tasks and publishes records at a fixed rate, one a call, while workers wait.
async fn handlers(run: &mut Run<'_>, work: &Work) -> anyhow::Result<()> {
    let samples = work.samples();
    let total = samples + 1;
    let tasks = run.tasks("latency", work);
    run.step("latency of tasks", completions(total, work));
    let processed = latency::insert_to_handler(run, work, &tasks).await?;
    count(run, "topics", work, &tasks, total, processed).await?;

    let topic = topic_of(run, "heard");
    put_topic(run, &topic, PARTITIONS).await?;
    subscribe(run, &topic, &topic, NEW).await?;
    let tasks = run.tasks("heard", work);
    run.step("latency of records", completions(total, work));
    // One in advance, so that the feeder knows the subscription, and the queue is open, when the clock
    // starts.
    let payload = payload(work);
    let client = TopicsClient::new(run.server.channel(0));
    publish_records(client, &topic, &payload, vec![samples]).await?;
    let patience = work.give_up_after.0;
    let is_known = |counts: &Counts| counts.waiting == 1;
    let known = run.server.wait_for(&tasks.queues, patience, is_known);
    known.await?.context("gave up: the record is no task")?;
    let workers = process(run, work, &tasks, total, Habit::NotesTimes);
    let publishing = publish_at_a_rate(run, work, &topic, &payload);
    let (start, processed) = tokio::try_join!(publishing, workers)?;
    let mut handled = Vec::new();
    for (number, at) in &processed.handled {
        if *number < samples {
            let due = latency::due(start, work.rate, *number);
            handled.push(at.saturating_duration_since(due));
        }
    }
    run.report.latency("publish to handler", handled);
    count(run, "topics", work, &tasks, total, processed).await?;
    Ok(())
}

/// Publishes one record a call at its time. Returns when the first was due.
async fn publish_at_a_rate(
    run: &Run<'_>,
    work: &Work,
    topic: &str,
    payload: &[u8],
) -> anyhow::Result<Instant> {
    let start = Instant::now() + latency::LEAD;
    let mut calls = JoinSet::new();
    for number in 0..work.samples() {
        let due = latency::due(start, work.rate, number);
        tokio::time::sleep_until(due.into()).await;
        let client = TopicsClient::new(run.server.channel(number as usize));
        let topic = topic.to_owned();
        let payload = payload.to_vec();
        calls.spawn(async move { publish_records(client, &topic, &payload, vec![number]).await });
        while let Some(done) = calls.try_join_next() {
            done??;
        }
    }
    while let Some(done) = calls.join_next().await {
        done??;
    }
    Ok(start)
}

/// Makes topics with subscriptions that nobody uses.
async fn idle(run: &mut Run<'_>) -> anyhow::Result<()> {
    let before = run.idle_cpu().await;
    run.step("idle subscriptions", IDLE.into());
    for number in 0..IDLE {
        let topic = topic_of(run, &format!("idle-{number}"));
        put_topic(run, &topic, 1).await?;
        subscribe(run, &topic, &topic, NEW).await?;
        run.bar.inc(1);
    }
    tokio::time::sleep(CALM).await;
    let after = run.idle_cpu().await;
    let used = after.zip(before).map(|(after, before)| after - before);
    let measure = format!("CPU of {IDLE} idle subscriptions");
    run.report
        .figure(Phase::Topics, &measure, "% of a core", used, None);
    Ok(())
}

fn per_second(count: u32, took: Duration) -> f64 {
    f64::from(count) / took.as_secs_f64()
}
