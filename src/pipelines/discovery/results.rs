//! The results side: reports of workers become results, statuses and new tasks.

use std::{
    collections::HashMap,
    ops::Range,
    time::{Instant, SystemTime},
};

use super::{
    announce,
    context::{Began, Context},
    enrich,
    error::Failure,
    history, latency,
    mark_published::ToMark,
    origin::{Origin, alone},
    room::{self, Sent, Unstored, discovered},
    schema,
    traced::{self, Discoveries},
    turned_away::Tally,
};
use crate::{
    bus::{Message, Reading, Subscription, Topic, Uncommitted},
    enrichment::Enrichment,
    model::{
        Completed, DeadLetter, Died, DiscoveredTask, KeyHash, NewTask, QueueName, Report, StoredStatus, TaskId,
        TaskRow, TraceContext, What, WorkerName, validate,
    },
    pipelines::publishing,
    runtime::{Loop, Policy, Supervisor},
    store::{Inserted, Settled, Settlement, Stored, Turn},
    telemetry::metrics::{self, Lettered, Source},
    wire,
};

/// Records of `task-results` that are read at once. Each has up to a thousand reports.
const RECORDS: usize = 64;
/// Reports in one transaction. A retry after a statement timeout would be as large.
const SETTLED_AT_ONCE: usize = 1000;
/// Dead tasks whose rows are read at once. Each may have 8 MiB.
const LETTERS_AT_ONCE: usize = 8;
/// Discovered tasks in one transaction, unless a single report has more.
const DISCOVERED_AT_ONCE: usize = 5000;

pub(super) fn start(
    context: &Context,
    enrichment: &Enrichment,
    to_mark: ToMark,
    tally: Tally,
    supervisor: &Supervisor,
) {
    let (context, enrichment, sent) = (context.clone(), enrichment.clone(), Sent::default());
    supervisor.spawn_loop("discovery/results", Policy::Restart, move |cx| {
        let (context, enrichment, tally) = (context.clone(), enrichment.clone(), tally.clone());
        let results = Results { context, enrichment, sent: sent.clone(), to_mark: to_mark.clone(), tally };
        async move { results.consume(cx).await }
    });
}

struct Results {
    context: Context,
    enrichment: Enrichment,
    sent: Sent,
    to_mark: ToMark,
    tally: Tally,
}

impl Results {
    async fn consume(&self, cx: Loop) -> Result<(), Failure> {
        let mut subscription = self.context.bus.subscribe(Topic::TaskResults, Reading::Shared).await?;
        let mut done = Uncommitted::default();
        let ended = self.read_on(&mut *subscription, &mut done, &cx).await;
        // Otherwise they come again.
        if let Err(error) = done.commit(&mut *subscription).await {
            tracing::debug!("the last reports come again: {error}");
        }
        ended
    }

    async fn read_on(
        &self,
        subscription: &mut dyn Subscription,
        done: &mut Uncommitted,
        cx: &Loop,
    ) -> Result<(), Failure> {
        loop {
            let messages = tokio::select! {
                messages = cx.idle(subscription.next(RECORDS)) => messages?,
                () = done.is_due() => Vec::new(),
                () = cx.stop.cancelled() => return Ok(()),
            };
            if !messages.is_empty() {
                self.handle(&messages).await?;
                self.sent.clear();
                done.add(messages);
            }
            done.commit_if_due(subscription, RECORDS).await?;
            cx.beat();
        }
    }

    async fn handle(&self, messages: &[Message]) -> Result<(), Failure> {
        let (mut reports, mut poison, mut failures) = (Reports::default(), Vec::new(), Vec::new());
        for message in messages {
            match wire::read_reports(&message.value) {
                Ok(batch) => {
                    failures.extend(batch.failures);
                    for (index, report) in batch.reports.into_iter().enumerate() {
                        let read = report.and_then(|report| self.read(report, message, index, &mut reports));
                        if let Err(reason) = read {
                            poison.push((alone(message, index), reason));
                        }
                    }
                }
                Err(reason) => poison.push((message.clone(), reason)),
            }
        }
        self.context.letters.bury(Topic::TaskResults, &poison).await?;
        history::keep(&self.context, &failures).await?;
        let Reports { mut settlements, origins, mut unstored, mut discoveries } = reports;
        unstored.extend(schema::take_misfits(&self.context.settings, &mut settlements).await);
        unstored.extend(room::make_room(&self.context, &mut settlements).await?);
        unstored.extend(enrich::enrich_discovered(&self.context, &self.enrichment, &mut settlements).await?);
        room::send(&self.context, unstored, &self.sent, &self.tally).await?;
        self.settle(&settlements, &origins, &mut discoveries).await
    }

    /// Settles the reports piece by piece. After a crash in between, the pieces before it are `repeated`.
    async fn settle(
        &self,
        settlements: &[Settlement],
        origins: &[Origin<'_>],
        discoveries: &mut Discoveries,
    ) -> Result<(), Failure> {
        let mut rest = pieces(settlements);
        rest.reverse();
        while let Some(piece) = rest.pop() {
            let (began, since) = ((Instant::now(), self.context.moment()), SystemTime::now());
            let (reports, origins) = (&settlements[piece.clone()], &origins[piece.clone()]);
            match self.context.store.settle(reports).await {
                Ok(stored) => {
                    let traces = origins.iter().map(|origin| origin.trace);
                    traced::settled(reports, traces.clone(), &stored.answers, discoveries, since);
                    latency::completed(reports, traces, &stored.answers);
                    self.follow(reports, stored, began).await?;
                }
                Err(error) if !error.is_refusal() => return Err(error.into()),
                Err(error) => match origins {
                    [origin] => {
                        let letter = (alone(origin.message, origin.index), error.to_string());
                        self.context.letters.bury(Topic::TaskResults, &[letter]).await?;
                    }
                    // Halves, the first one first, until the refused report is alone.
                    _ => {
                        let half = piece.start + piece.len() / 2;
                        rest.extend([half..piece.end, piece.start..half]);
                    }
                },
            }
        }
        Ok(())
    }

    /// Does what comes after the SQL commit: publish, mark, letters, filter.
    async fn follow(&self, reports: &[Settlement], stored: Stored<Settled>, began: Began) -> Result<(), Failure> {
        let (started, before) = began;
        let Context { gates, settings, .. } = &self.context;
        announce::settled(&self.context, reports, &stored.answers);
        let (new, duplicates) = new_tasks(reports, &stored);
        announce::new_tasks(&self.context, new.iter().map(|(row, _)| *row));
        duplicates.iter().for_each(|task| self.tally.duplicate(&task.queue));
        let duplicates = duplicates.len();
        metrics::discovery_batch(Source::Results, new.len() + duplicates, new.len(), duplicates, started.elapsed());
        let goes_out = |(row, _): &(&TaskRow, Turn)| publishing::goes_out_now(row, gates, settings);
        let publish: Vec<_> = new.iter().copied().filter(goes_out).collect();
        self.context.publish(&publish, before, &self.to_mark).await?;
        self.context.mark(&new.iter().map(|(row, _)| *row).collect::<Vec<_>>()).await;
        self.send_letters(reports, &stored.answers, SystemTime::now() - started.elapsed()).await?;
        let closed: Vec<(QueueName, KeyHash)> = stored.answers.into_iter().filter_map(|one| one.key).collect();
        if let Err(error) = self.context.filter.forget(&closed).await {
            tracing::debug!("could not take {} keys out of the filter: {error}", closed.len());
        }
        Ok(())
    }

    /// Sends the letters of tasks that are dead, with their rows from SQL.
    ///
    /// A repeated report counts too: perhaps its letter was not sent.
    async fn send_letters(
        &self,
        reports: &[Settlement],
        settled: &[Settled],
        since: SystemTime,
    ) -> Result<(), Failure> {
        let reports = reports.iter().zip(settled);
        let dead: Vec<_> = reports.filter(|(_, settled)| settled.status == Some(StoredStatus::Dead)).collect();
        for dead in dead.chunks(LETTERS_AT_ONCE) {
            let mut letters: HashMap<TaskId, DeadLetter> = HashMap::new();
            let is_new = |id| {
                dead.iter().any(|(report, settled)| {
                    matches!(report, Settlement::Died { id: died, .. } if *died == id) && !settled.repeated
                })
            };
            for (report, _) in dead {
                // A completion of a dead task is no death.
                let Settlement::Died { id, reason, attempts, history, at_unix_ms, .. } = report else { continue };
                let letter = DeadLetter {
                    reason: reason.clone(),
                    at_unix_ms: *at_unix_ms,
                    task_id: Some(*id),
                    attempts: *attempts,
                    history: history.clone(),
                    ..Default::default()
                };
                letters.insert(*id, letter);
            }
            let ids: Vec<TaskId> = letters.keys().copied().collect();
            for row in self.context.store.rows(&ids).await? {
                if let Some(letter) = letters.get_mut(&row.id) {
                    if is_new(row.id) {
                        traced::died(&row, &letter.reason, since);
                    }
                    letter.queue = row.queue.as_str().to_owned();
                    letter.task = Some(NewTask::from(&row));
                }
            }
            self.context.letters.send(letters.into_values().collect()).await?;
        }
        Ok(())
    }

    /// Adds a report to `reports`. Its discovered tasks that are not valid any more become `unstored`.
    fn read<'m>(
        &self,
        report: Report,
        message: &'m Message,
        index: usize,
        reports: &mut Reports<'m>,
    ) -> Result<(), String> {
        let Report { id, at_unix_ms, what } = report;
        let mut trace = None;
        let settlement = match what {
            What::Completed(done) => {
                trace = TraceContext::sampled(&done.traceparent);
                self.completed(id, done, at_unix_ms, trace, reports)?
            }
            What::Died(Died { reason, attempts, history, epoch }) => {
                Settlement::Died { id, reason, attempts, history, epoch: Some(epoch), at_unix_ms }
            }
        };
        reports.settlements.push(settlement);
        reports.origins.push(Origin { message, index, trace });
        Ok(())
    }

    fn completed(
        &self,
        id: TaskId,
        done: Completed,
        at_unix_ms: i64,
        trace: Option<TraceContext>,
        reports: &mut Reports<'_>,
    ) -> Result<Settlement, String> {
        WorkerName::new(&done.worker).map_err(|error| error.to_string())?;
        let Context { gates, settings, .. } = &self.context;
        let Completed { worker, result, result_encoding: encoding, attempt, lease, leased_unix_ms, discovered, .. } =
            done;
        let rows = discovered.into_iter().enumerate().filter_map(|(index, task)| {
            let index = u32::try_from(index).ok()?;
            self.row(task, id, TaskId::derived(id, &worker, index, at_unix_ms), trace, reports)
        });
        let discovered = rows.map(|row| publishing::new_row(row, gates, settings)).collect();
        Ok(Settlement::Completed {
            id,
            worker,
            lease,
            result,
            encoding,
            attempt,
            leased_unix_ms,
            at_unix_ms,
            discovered,
        })
    }

    /// Makes a row of a discovered task. The tasks service checked it before it answered OK, but settings may have
    /// changed since, and a later version may have written it.
    fn row(
        &self,
        task: DiscoveredTask,
        parent: TaskId,
        id: TaskId,
        trace: Option<TraceContext>,
        reports: &mut Reports<'_>,
    ) -> Option<TaskRow> {
        let (task, values, reason) = match task {
            Ok(mut task) => {
                // The ids of discovered tasks make their reports repeatable.
                task.idempotency_key.clear();
                let rules = self.context.settings.task_rules(&task.queue).for_accepted();
                match validate::check(&task, &rules, self.context.clock.now_unix_ms()) {
                    Ok(checked) => {
                        reports.discoveries.begin(id, &mut task, trace, self.context.settings.traces.discovered);
                        return Some(checked.row(task, id, self.context.bus.partitions(Topic::Pipeline)));
                    }
                    Err(reason) => (task, None, reason),
                }
            }
            Err(unreadable) => (unreadable.task, Some(unreadable.values), unreadable.reason),
        };
        let key = QueueName::new(&task.queue).ok().filter(|_| !task.key.is_empty());
        let key = key.map(|queue| (queue.clone(), KeyHash::new(&queue, &task.key)));
        reports.unstored.push(Unstored { parent, task, values, key, why: Lettered::Invalid, reason, logged: None });
        None
    }
}

/// The reports of some messages.
#[derive(Default)]
struct Reports<'m> {
    settlements: Vec<Settlement>,
    /// One per settlement.
    origins: Vec<Origin<'m>>,
    unstored: Vec<Unstored>,
    discoveries: Discoveries,
}

/// The reports that one transaction settles, in order.
fn pieces(reports: &[Settlement]) -> Vec<Range<usize>> {
    let (mut pieces, mut start) = (Vec::new(), 0);
    while start < reports.len() {
        let mut rows = 0;
        let fits = reports[start..].iter().take(SETTLED_AT_ONCE).take_while(|report| {
            rows += discovered(report).len();
            rows <= DISCOVERED_AT_ONCE
        });
        let end = start + fits.count().max(1);
        pieces.push(start..end);
        start = end;
    }
    pieces
}

/// The discovered tasks that were new, each with its turn, and the others.
fn new_tasks<'a>(reports: &'a [Settlement], stored: &Stored<Settled>) -> (Vec<(&'a TaskRow, Turn)>, Vec<&'a TaskRow>) {
    let (mut new, mut duplicates) = (Vec::new(), Vec::new());
    for (report, settled) in reports.iter().zip(&stored.answers) {
        for (row, inserted) in discovered(report).iter().zip(&settled.discovered) {
            match inserted {
                Inserted::New => new.push((&row.task, stored.turn_of(row))),
                Inserted::Duplicate { .. } | Inserted::Repeated { .. } | Inserted::KeyReused => {
                    duplicates.push(&row.task);
                }
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
        model::{Encoding, LeaseNumber},
        store::{NewRow, Unpublished},
    };

    fn sizes(discovered: &[usize]) -> Vec<usize> {
        let task = NewTask { queue: "q".into(), key: "k".into(), ..Default::default() };
        let task = validate::task_row(task, TaskId::new(), &Settings::default().task_rules("q"), 1, 1).unwrap();
        let row = NewRow { task, unpublished: Unpublished::Fresh, due_unix_ms: 0 };
        let report = |discovered: &usize| {
            let (id, worker, discovered) = (TaskId::new(), "w".to_owned(), vec![row.clone(); *discovered]);
            let (lease, result, encoding) = (LeaseNumber::UNKNOWN, "".into(), Encoding::Bytes);
            let (attempt, leased_unix_ms, at_unix_ms) = (1, 0, 1);
            Settlement::Completed {
                id,
                worker,
                lease,
                result,
                encoding,
                attempt,
                leased_unix_ms,
                at_unix_ms,
                discovered,
            }
        };
        let reports: Vec<_> = discovered.iter().map(report).collect();
        pieces(&reports).into_iter().map(|piece| piece.len()).collect()
    }

    #[test]
    fn a_transaction_settles_so_much_and_no_more() {
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[0; 2500]), [1000, 1000, 500]);
        assert_eq!(sizes(&[2000, 2000, 2000, 1000]), [2, 2]);
        assert_eq!(sizes(&[1, 9000, 1]), [1, 1, 1], "one report goes, whatever it discovered");
    }
}
