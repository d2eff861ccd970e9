//! The results side: what workers reported becomes results, statuses and new tasks.

use std::{collections::HashMap, sync::Arc, time::Instant};

use bytes::Bytes;
use prost::Message as _;
use tokio_util::sync::CancellationToken;

use super::{
    Parts,
    room::{self, Sent, Unstored, discovered},
};
use crate::{
    bus::{Message, Reading, Topic},
    model::{self, Encoding, KeyHash, LeaseNumber, QueueName, StoredStatus, TaskId, TaskRow, WorkerName, validate},
    runtime::{Beat, Supervisor},
    store::{Inserted, Settled, Settlement},
    telemetry::metrics::{self, Lettered, Source},
    wire::pb,
};

/// Records of `task-results` read at once; each has up to a thousand reports.
const RECORDS: usize = 64;

/// Reports in one transaction. One that ran into the statement timeout would be repeated as large as it was.
const SETTLED_AT_ONCE: usize = 1000;
/// Dead tasks whose rows are read at once: each may have 8 MiB.
const LETTERS_AT_ONCE: usize = 8;
/// Discovered tasks in one transaction, unless a single report has more.
const DISCOVERED_AT_ONCE: usize = 5000;

pub(super) fn start(parts: &Parts, supervisor: &Supervisor) {
    let (parts, sent, stop) = (parts.clone(), Sent::default(), supervisor.stop_token());
    let beat = Arc::new(supervisor.progress().register("discovery/results"));
    supervisor
        .spawn("discovery/results", move || consume(parts.clone(), sent.clone(), Arc::clone(&beat), stop.clone()));
}

async fn consume(parts: Parts, sent: Sent, beat: Arc<Beat>, stop: CancellationToken) -> anyhow::Result<()> {
    let mut subscription = parts.outbox.bus.subscribe(Topic::TaskResults, Reading::Shared).await?;
    loop {
        let messages = tokio::select! {
            messages = beat.idle(subscription.next(RECORDS)) => messages?,
            () = stop.cancelled() => return Ok(()),
        };
        handle(&parts, &messages, &sent).await?;
        sent.clear();
        subscription.commit(&messages).await?;
        beat.beat();
    }
}

async fn handle(parts: &Parts, messages: &[Message], sent: &Sent) -> anyhow::Result<()> {
    let (mut reports, mut poison, mut unstored) = (Vec::new(), Vec::new(), Vec::new());
    for message in messages {
        match pb::ReportBatch::decode(message.value.clone()) {
            Ok(batch) => {
                for (index, report) in batch.reports.into_iter().enumerate() {
                    match settlement(parts, report, &mut unstored) {
                        Ok((settlement, history)) => reports.push(Reported { settlement, history, message, index }),
                        Err(reason) => poison.push((alone(message, index), reason)),
                    }
                }
            }
            Err(error) => poison.push((message.clone(), error.to_string())),
        }
    }
    parts.outbox.bury(Topic::TaskResults, &poison).await?;
    let mut settlements: Vec<_> = reports.iter_mut().map(|report| &mut report.settlement).collect();
    unstored.extend(room::make_room(parts, &mut settlements).await?);
    room::send(parts, unstored, sent).await?;
    // Each piece may be settled again: after a crash in between, those before it are `repeated`.
    let mut rest = pieces(&reports);
    rest.reverse();
    while let Some(some) = rest.pop() {
        let started = Instant::now();
        match parts.outbox.store.settle(some.iter().map(|report| report.settlement.clone()).collect()).await {
            Ok(settled) => follow(parts, some, settled, started).await?,
            Err(error) if !error.is_refusal() => return Err(error.into()),
            // Halves, the first one first, until the report that is refused stands alone.
            Err(error) => match some {
                [report] => {
                    let letter = (alone(report.message, report.index), error.to_string());
                    parts.outbox.bury(Topic::TaskResults, &[letter]).await?;
                }
                _ => {
                    let (first, second) = some.split_at(some.len() / 2);
                    rest.extend([second, first]);
                }
            },
        }
    }
    Ok(())
}

/// A report, and where it stood.
struct Reported<'a> {
    settlement: Settlement,
    /// Of a task that died.
    history: Vec<pb::Failure>,
    message: &'a Message,
    index: usize,
}

/// What one transaction settles. In order.
fn pieces<'a, 'm>(reports: &'a [Reported<'m>]) -> Vec<&'a [Reported<'m>]> {
    let (mut pieces, mut rest) = (Vec::new(), reports);
    while !rest.is_empty() {
        let mut rows = 0;
        let fits = rest.iter().take(SETTLED_AT_ONCE).take_while(|report| {
            rows += discovered(&report.settlement).len();
            rows <= DISCOVERED_AT_ONCE
        });
        let (piece, behind) = rest.split_at(fits.count().max(1));
        pieces.push(piece);
        rest = behind;
    }
    pieces
}

/// The message with only this report of it.
fn alone(message: &Message, index: usize) -> Message {
    let mut alone = message.clone();
    if let Ok(mut batch) = pb::EncodedReportBatch::decode(message.value.clone()) {
        batch.reports = batch.reports.get(index).cloned().into_iter().collect();
        alone.value = batch.encode_to_vec().into();
    }
    alone
}

/// What comes after the SQL commit.
async fn follow(
    parts: &Parts,
    reports: &[Reported<'_>],
    settled: Vec<Settled>,
    started: Instant,
) -> anyhow::Result<()> {
    let (new, duplicates) = new_tasks(reports, &settled);
    metrics::discovery_batch(Source::Results, new.len() + duplicates, new.len(), duplicates, started.elapsed());
    let publish: Vec<_> = new.iter().filter(|row| parts.outbox.goes_out_now(row, &parts.settings)).cloned().collect();
    parts.publish(&publish).await?;
    parts.mark(&new).await;
    send_letters(parts, reports, &settled).await?;
    let closed: Vec<(QueueName, model::KeyHash)> = settled.into_iter().filter_map(|one| one.key).collect();
    if let Err(error) = parts.filter.forget(&closed).await {
        tracing::debug!("could not take {} keys out of the filter: {error}", closed.len());
    }
    Ok(())
}

/// Of tasks that are dead, with what SQL has of them. A report that comes again is perhaps one whose letter was not
/// sent.
async fn send_letters(parts: &Parts, reports: &[Reported<'_>], settled: &[Settled]) -> anyhow::Result<()> {
    let is_dead = |settled: &Settled| settled.status == Some(StoredStatus::Dead);
    let dead: Vec<_> = reports.iter().zip(settled).filter(|(_, settled)| is_dead(settled)).collect();
    for dead in dead.chunks(LETTERS_AT_ONCE) {
        let mut letters: HashMap<TaskId, pb::DeadLetter> = HashMap::new();
        for (report, _) in dead {
            // Another report of a task that is dead is no death.
            let Settlement::Died { id, reason, attempts, at_unix_ms } = &report.settlement else { continue };
            let letter = pb::DeadLetter {
                reason: reason.clone(),
                at_unix_ms: *at_unix_ms,
                task_id: Bytes::copy_from_slice(id.as_bytes()),
                attempts: *attempts,
                history: report.history.clone(),
                ..Default::default()
            };
            letters.insert(*id, letter);
        }
        let ids: Vec<TaskId> = letters.keys().copied().collect();
        for row in parts.outbox.store.rows(&ids).await? {
            if let Some(letter) = letters.get_mut(&row.id) {
                letter.queue = row.queue.as_str().to_owned();
                letter.task = Some(model::NewTask::from(&row).into());
            }
        }
        parts.outbox.send_letters(letters.into_values().collect()).await?;
    }
    Ok(())
}

/// With the history of its failures; what it discovered and cannot be stored is added to `unstored`.
fn settlement(
    parts: &Parts,
    report: pb::Report,
    unstored: &mut Vec<Unstored>,
) -> Result<(Settlement, Vec<pb::Failure>), String> {
    let id = TaskId::from_slice(&report.task_id).ok_or("a report whose task_id has not 16 bytes")?;
    let at_unix_ms = report.at_unix_ms;
    match report.what {
        Some(pb::report::What::Completed(done)) => {
            WorkerName::new(&done.worker).map_err(|error| error.to_string())?;
            let encoding = Encoding::from_number(done.result_encoding.into());
            let rows = done.discovered.into_iter().enumerate().filter_map(|(index, task)| {
                let index = u32::try_from(index).ok()?;
                row(parts, task, id, TaskId::derived(id, &done.worker, index, at_unix_ms), unstored)
            });
            let discovered = rows.map(|row| parts.outbox.new_row(row, &parts.settings)).collect();
            let lease = LeaseNumber { generation: done.generation, grant: done.grant };
            let (worker, result, attempt) = (done.worker, done.result, done.attempt);
            let settlement =
                Settlement::Completed { id, worker, lease, result, encoding, attempt, at_unix_ms, discovered };
            Ok((settlement, Vec::new()))
        }
        Some(pb::report::What::Died(died)) => {
            let settlement = Settlement::Died { id, reason: died.reason, attempts: died.attempts, at_unix_ms };
            Ok((settlement, died.history))
        }
        None => Err("a report of a kind that this version does not know".into()),
    }
}

/// A discovered task. The tasks service has checked it before it answered OK; settings may have changed since.
fn row(parts: &Parts, task: pb::NewTask, parent: TaskId, id: TaskId, unstored: &mut Vec<Unstored>) -> Option<TaskRow> {
    let settings = &parts.settings;
    let queue = QueueName::new(&task.queue);
    let partitions = parts.outbox.bus.partitions(Topic::Pipeline);
    let now = parts.outbox.clock.now_unix_ms();
    let rules = settings.task_rules(&task.queue);
    let new = model::NewTask::try_from(task.clone());
    match new.and_then(|new| validate::task_row(new, id, &rules, partitions, now)) {
        Ok(row) => Some(row),
        Err(reason) => {
            let key = queue.ok().filter(|_| !task.key.is_empty());
            let key = key.map(|queue| (queue.clone(), KeyHash::new(&queue, &task.key)));
            unstored.push(Unstored { parent, task, key, why: Lettered::Invalid, reason });
            None
        }
    }
}

/// The rows that were new, and how many were not.
fn new_tasks(reports: &[Reported<'_>], settled: &[Settled]) -> (Vec<TaskRow>, usize) {
    let (mut new, mut duplicates) = (Vec::new(), 0);
    for (report, settled) in reports.iter().zip(settled) {
        for (row, inserted) in discovered(&report.settlement).iter().zip(&settled.discovered) {
            match inserted {
                Inserted::New => new.push(row.task.clone()),
                Inserted::Duplicate { .. } => duplicates += 1,
            }
        }
    }
    (new, duplicates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Settings,
        model::{NewTask, Offset},
        store::{NewRow, Unpublished},
    };

    fn sizes(discovered: &[usize]) -> Vec<usize> {
        let message = Message { partition: 0, offset: Offset { major: 1, minor: 0 }, value: "".into() };
        let task = NewTask { queue: "q".into(), key: "k".into(), ..Default::default() };
        let task = validate::task_row(task, TaskId::new(), &Settings::default().task_rules("q"), 1, 1).unwrap();
        let row = NewRow { task, unpublished: Unpublished::Fresh, due_unix_ms: 0 };
        let report = |discovered: &usize| {
            let (id, worker, discovered) = (TaskId::new(), "w".to_owned(), vec![row.clone(); *discovered]);
            let (lease, result, encoding) = (LeaseNumber::UNKNOWN, "".into(), Encoding::Bytes);
            let (attempt, at_unix_ms) = (1, 1);
            let settlement =
                Settlement::Completed { id, worker, lease, result, encoding, attempt, at_unix_ms, discovered };
            Reported { settlement, history: Vec::new(), message: &message, index: 0 }
        };
        let reports: Vec<_> = discovered.iter().map(report).collect();
        pieces(&reports).into_iter().map(<[_]>::len).collect()
    }

    #[test]
    fn a_transaction_settles_so_much_and_no_more() {
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[0; 2500]), [1000, 1000, 500]);
        assert_eq!(sizes(&[2000, 2000, 2000, 1000]), [2, 2]);
        assert_eq!(sizes(&[1, 9000, 1]), [1, 1, 1], "one report goes, whatever it discovered");
    }
}
