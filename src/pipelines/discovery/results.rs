//! The results side: reports of workers become results, statuses and new tasks.

use std::{
    collections::HashMap,
    ops::Range,
    pin::pin,
    sync::Arc,
    time::{Instant, SystemTime},
};

use futures::{StreamExt, stream::FuturesOrdered};
use tokio::sync::RwLock;

use super::{
    announce, enrich,
    error::Failure,
    history, latency,
    learnt::Learnt,
    origin::{Origin, alone},
    reports::Reports,
    room::{self, Sent, discovered},
    schema,
    seen::{self, Asking},
    steps::Began,
    traced::{self, Discoveries},
    trees,
    turned_away::Tally,
};
use crate::{
    bus::{Message, Reader, Reading, Topic, Uncommitted},
    enrichment::Enrichment,
    model::{DeadLetter, KeyHash, NewTask, QueueName, StoredStatus, TaskId, TaskRow},
    pipelines::{
        context::{Context, Patience, ToMark},
        publishing,
    },
    runtime::{Loop, Supervisor},
    store::{Inserted, Settled, Settlement, Stored, Turn},
    telemetry::{
        metrics::{self, Source},
        traces,
    },
};

/// The most records of `task-results` that are read at once. Each has up to a thousand reports.
const RECORDS: usize = 32;
/// How many reads may be in flight: while SQL settles the reports of one, the next is read and
/// decoded.
const AT_ONCE: usize = 2;
/// The most reports in one transaction. A retry after a statement timeout would be as large.
const SETTLED_AT_ONCE: usize = 4000;
/// The most dead tasks whose rows are read at once. Each may have 8 MiB.
const LETTERS_AT_ONCE: usize = 8;
/// The most discovered tasks in one transaction, unless a single report has more.
const DISCOVERED_AT_ONCE: usize = 5000;

pub(super) fn start(
    context: &Context,
    enrichment: &Enrichment,
    to_mark: ToMark,
    tally: Tally,
    supervisor: &Supervisor,
) {
    let context = context.clone();
    let enrichment = enrichment.clone();
    let sent = Sent::default();
    let results = Arc::new(Results {
        context,
        enrichment,
        sent,
        to_mark,
        tally,
        asking: Asking::default(),
        patience: Patience::default(),
        turn: RwLock::default(),
    });
    supervisor.spawn_loop("discovery/results", results, |results, cx| async move {
        results.consume(cx).await
    });
}

struct Results {
    context: Context,
    enrichment: Enrichment,
    sent: Sent,
    to_mark: ToMark,
    tally: Tally,
    asking: Asking,
    patience: Patience,
    /// Reads that bring discovered tasks are settled one at a time, because whether their queues
    /// have capacity left is known only after the tasks before them are stored.
    turn: RwLock<()>,
}

impl Results {
    async fn consume(&self, cx: Loop) -> Result<(), Failure> {
        let mut reader = self
            .context
            .bus
            .subscribe(Topic::TaskResults, Reading::Shared)
            .await?;
        let mut done = Uncommitted::default();
        let ended = self.read_on(&mut *reader, &mut done, &cx).await;
        // What is not committed is delivered again.
        if let Err(error) = done.commit(&mut *reader).await {
            tracing::debug!("the last reports come again: {error}");
        }
        ended
    }

    async fn read_on(
        &self,
        reader: &mut dyn Reader,
        done: &mut Uncommitted,
        cx: &Loop,
    ) -> Result<(), Failure> {
        // In order, because on Kafka the commit of a record commits all records before it.
        let mut under_way = FuturesOrdered::new();
        let mut handled = Vec::new();
        // At the end, also after an error, nothing more is read, and the batches in flight are
        // finished. If one were dropped after its SQL commit, its metrics, its spans and the
        // publishing of its new tasks would be missing.
        let mut end = None;
        let mut is_gap = false;
        while end.is_none() || !under_way.is_empty() {
            let count = under_way.len();
            let reads_on = end.is_none();
            let next = async {
                match count {
                    0 => cx.await_work(reader.next(RECORDS)).await,
                    _ => reader.next(RECORDS).await,
                }
            };
            tokio::select! {
                messages = next, if count < AT_ONCE && reads_on => match messages {
                    Ok(none) if none.is_empty() => {}
                    Ok(messages) => under_way.push_back(self.handle(messages)),
                    Err(error) => end = Some(Err(error.into())),
                },
                Some(one) = under_way.next() => handled.push(one),
                () = done.wait_until_due() => {}
                () = cx.stop.cancelled(), if reads_on => end = Some(Ok(())),
            }
            let committed = {
                let mut commit = pin!(done.commit_if_due(reader, RECORDS));
                loop {
                    tokio::select! {
                        committed = &mut commit => break committed,
                        // Go on with the batches in flight: a transaction of MySQL holds locks, and
                        // must not stand still during the commit.
                        Some(one) = under_way.next() => handled.push(one),
                    }
                }
            };
            if let Err(error) = committed {
                end = Some(Err(error.into()));
            }
            let has_handled = !handled.is_empty();
            for one in handled.drain(..) {
                match one {
                    Ok(messages) if !is_gap => done.add(messages),
                    Ok(_come_again) => {}
                    Err(error) => (end, is_gap) = (Some(Err(error)), true),
                }
            }
            // Reports that were only read are no progress.
            if end.is_none() && (has_handled || under_way.is_empty()) {
                cx.beat();
            }
        }
        end.unwrap_or(Ok(()))
    }

    /// Handles the reports of some records. Returns the records, which may then be committed.
    async fn handle(&self, messages: Vec<Message>) -> Result<Vec<Message>, Failure> {
        let reports = Reports::read(&self.context, &messages);
        // The lock must be requested in the order of the reads, so nothing may be awaited before.
        if reports.have_discovered() {
            let _alone = self.turn.write().await;
            self.store(reports).await?;
            self.sent.clear();
        } else {
            let _together = self.turn.read().await;
            self.store(reports).await?;
        }
        Ok(messages)
    }

    async fn store(&self, reports: Reports<'_>) -> Result<(), Failure> {
        let Reports {
            mut settlements,
            origins,
            mut unstored,
            mut discoveries,
            failures,
            poison,
        } = reports;
        self.context
            .letters
            .bury(Topic::TaskResults, &poison)
            .await?;
        history::keep(&self.context, &failures).await?;
        unstored.extend(schema::take_misfits(&self.context.settings, &mut settlements).await);
        unstored.extend(room::make_room(&self.context, &mut settlements).await?);
        unstored.extend(
            enrich::enrich_discovered(&self.context, &self.enrichment, &mut settlements).await?,
        );
        room::send(&self.context, unstored, &self.sent, &self.tally).await?;
        self.settle(&settlements, &origins, &mut discoveries).await
    }

    /// Settles the reports piece by piece. After a crash in between, those of the earlier pieces
    /// are `repeated`.
    async fn settle(
        &self,
        settlements: &[Settlement],
        origins: &[Origin<'_>],
        discoveries: &mut Discoveries,
    ) -> Result<(), Failure> {
        let mut rest = pieces(settlements);
        rest.reverse();
        while let Some(piece) = rest.pop() {
            let began = (Instant::now(), self.context.moment());
            let since = traces::now();
            let reports = &settlements[piece.clone()];
            let origins = &origins[piece.clone()];
            let rows: Vec<&TaskRow> = reports
                .iter()
                .flat_map(discovered)
                .map(|row| &row.task)
                .collect();
            let seen = self.asking.owners(&self.context, &rows).await;
            let era = self.context.filter.era();
            let without = seen::without(reports, &seen);
            match self.context.store.settle(&without).await {
                Ok(mut stored) => {
                    let learnt =
                        Learnt::of(&self.context, era, discovered_in(&without, &stored.answers));
                    seen::add_answers(reports, &seen, &mut stored.answers);
                    let traces = origins.iter().map(|origin| origin.trace);
                    traced::settled(reports, traces.clone(), &stored.answers, discoveries, since);
                    latency::completed(reports, traces, &stored.answers);
                    let reports = trees::with_deadlines(reports, &stored.answers);
                    self.follow(&reports, stored, learnt, began).await?;
                }
                Err(error) if !error.is_refusal() => return Err(error.into()),
                Err(error) => match origins {
                    [origin] => {
                        let letter = (alone(origin.message, origin.index), error.to_string());
                        self.context
                            .letters
                            .bury(Topic::TaskResults, &[letter])
                            .await?;
                    }
                    // Try both halves, the first one first, until the refused report is alone.
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
    async fn follow(
        &self,
        reports: &[Settlement],
        stored: Stored<Settled>,
        learnt: Learnt,
        began: Began,
    ) -> Result<(), Failure> {
        let (started, before) = began;
        let Context {
            gates, settings, ..
        } = &self.context;
        let is_step = |settled: &Settled| settled.task.as_ref().is_some_and(|task| task.is_step);
        if stored.answers.iter().any(is_step) {
            self.context.executions.wake();
        }
        announce::settled(&self.context, reports, &stored.answers);
        let (new, duplicates) = new_tasks(reports, &stored);
        announce::new_tasks(&self.context, new.iter().map(|(row, _)| *row));
        duplicates
            .iter()
            .for_each(|task| self.tally.duplicate(&task.queue));
        let duplicates = duplicates.len();
        if new.len() + duplicates > 0 {
            self.asking.note(duplicates);
        }
        metrics::discovery_batch(
            Source::Results,
            new.len() + duplicates,
            new.len(),
            duplicates,
            started.elapsed(),
        );
        let goes_out =
            |(row, turn): &(&TaskRow, Turn)| publishing::goes_out_now(row, *turn, gates, settings);
        let now = new
            .iter()
            .filter_map(|(row, turn)| turn.map(|turn| (*row, turn)));
        let publish: Vec<_> = now.filter(goes_out).collect();
        let released = stored.released.iter().map(|row| (&row.task, row.turn));
        let released: Vec<_> = released.filter(goes_out).collect();
        self.patience
            .publish(&self.context, &publish, &released, before, &self.to_mark)
            .await?;
        self.context.mark(&learnt).await;
        self.send_letters(reports, &stored.answers, traces::now() - started.elapsed())
            .await?;
        let closed: Vec<(QueueName, KeyHash)> = stored
            .answers
            .into_iter()
            .filter_map(|one| one.key)
            .collect();
        if let Err(error) = self.context.filter.forget(&closed).await {
            tracing::debug!(
                "could not take {} keys out of the filter: {error}",
                closed.len()
            );
        }
        Ok(())
    }

    /// Sends the letters of tasks that are dead, with their rows from SQL.
    ///
    /// Includes repeated reports, because their letters may not have been sent.
    async fn send_letters(
        &self,
        reports: &[Settlement],
        settled: &[Settled],
        since: SystemTime,
    ) -> Result<(), Failure> {
        let reports = reports.iter().zip(settled);
        let dead: Vec<_> = reports
            .filter(|(_, settled)| settled.status == Some(StoredStatus::Dead))
            .collect();
        for dead in dead.chunks(LETTERS_AT_ONCE) {
            let mut letters: HashMap<TaskId, DeadLetter> = HashMap::new();
            let is_new = |id| {
                dead.iter().any(|(report, settled)| {
                    matches!(report, Settlement::Died { id: died, .. } if *died == id)
                        && !settled.repeated
                })
            };
            for (report, _) in dead {
                // A completion of a dead task is no death.
                let Settlement::Died {
                    id,
                    reason,
                    attempts,
                    history,
                    at_unix_ms,
                    ..
                } = report
                else {
                    continue;
                };
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
            self.context
                .letters
                .send(letters.into_values().collect())
                .await?;
        }
        Ok(())
    }
}

/// Splits the reports into the ranges that one transaction each settles, in order.
fn pieces(reports: &[Settlement]) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < reports.len() {
        let mut rows = 0;
        let fits = reports[start..]
            .iter()
            .take(SETTLED_AT_ONCE)
            .take_while(|report| {
                rows += discovered(report).len() + parts(report);
                rows <= DISCOVERED_AT_ONCE
            });
        let end = start + fits.count().max(1);
        pieces.push(start..end);
        start = end;
    }
    pieces
}

/// How many outputs went into joins.
fn parts(report: &Settlement) -> usize {
    match report {
        Settlement::Completed {
            joining: Some(joining),
            ..
        } => joining.parts.len(),
        _ => 0,
    }
}

/// The discovered tasks, each with its answer.
fn discovered_in<'r>(
    reports: &'r [Settlement],
    settled: &'r [Settled],
) -> impl Iterator<Item = (&'r TaskRow, Inserted)> {
    let pairs = reports.iter().zip(settled);
    pairs.flat_map(|(report, settled)| {
        discovered(report)
            .iter()
            .map(|row| &row.task)
            .zip(settled.discovered.iter().copied())
    })
}

/// The discovered tasks that were new, each with its turn if it may be published now, and the
/// others.
fn new_tasks<'a>(
    reports: &'a [Settlement],
    stored: &Stored<Settled>,
) -> (Vec<(&'a TaskRow, Option<Turn>)>, Vec<&'a TaskRow>) {
    let mut duplicates = Vec::new();
    let mut new = Vec::new();
    for (report, settled) in reports.iter().zip(&stored.answers) {
        for (row, inserted) in discovered(report).iter().zip(&settled.discovered) {
            match inserted {
                Inserted::New => new.push((&row.task, stored.turn_of(row))),
                Inserted::Duplicate { .. }
                | Inserted::Repeated { .. }
                | Inserted::KeyReused
                | Inserted::TreeClosed => {
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
        model::{Encoding, LeaseNumber, validate},
        store::{NewRow, Unpublished},
    };

    fn sizes(discovered: &[usize]) -> Vec<usize> {
        let task = NewTask {
            queue: "q".into(),
            key: "k".into(),
            ..Default::default()
        };
        let task = validate::task_row(
            task,
            TaskId::new(),
            &Settings::default().task_rules("q"),
            1,
            1,
        )
        .unwrap();
        let row = NewRow {
            task,
            unpublished: Unpublished::Fresh,
            due_unix_ms: 0,
        };
        let report = |discovered: &usize| {
            let id = TaskId::new();
            let worker = "w".to_owned();
            let discovered = vec![row.clone(); *discovered];
            let lease = LeaseNumber::default();
            let result = "".into();
            let encoding = Encoding::Bytes;
            let attempt = 1;
            let leased_unix_ms = 0;
            let at_unix_ms = 1;
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
                joining: None,
            }
        };
        let reports: Vec<_> = discovered.iter().map(report).collect();
        pieces(&reports)
            .into_iter()
            .map(|piece| piece.len())
            .collect()
    }

    #[test]
    fn a_transaction_settles_so_much_and_no_more() {
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[0; 10_000]), [4000, 4000, 2000]);
        assert_eq!(sizes(&[2000, 2000, 2000, 1000]), [2, 2]);
        assert_eq!(
            sizes(&[1, 9000, 1]),
            [1, 1, 1],
            "one report goes, whatever it discovered"
        );
    }
}
