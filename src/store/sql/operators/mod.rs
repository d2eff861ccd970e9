//! What operators see and do: bulk changes, letters, changes, histories, events, books, pauses and
//! own limits.

mod books;
pub(crate) mod bulk;
mod changes;
mod check;
mod events;
mod history;
mod holds;
mod letters;
mod limits;
mod pauses;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use uuid::Uuid;

use crate::{
    config::EventQueues,
    model::{
        Act, BulkChange, Change, ChangedLimits, DeadLetter, FailedAttempt, LetterId, LetterKind,
        LetterPage, LetterPages, LimitHold, OwnLimits, OwnValues, PausedQueue, QueueName,
        StoredLetter, TaskAct, TaskCursor, TaskId,
    },
    store::{
        AddedBulk, Attempts, ChangeEnd, EndedChange, KeptChanges, KeptEvents, KeptPages,
        LimitSetting, OffBusCounts, Operators, Pausing, Result, Retried, TurnedAwayCounts, Wanted,
        WrongCount,
        sql::{SqlStore, access::tokens, backend::Backend, meta, tasks::trees::note_ends},
    },
};

#[async_trait]
impl<DB: Backend> Operators for SqlStore<DB> {
    async fn add_bulk_change(
        &self,
        bulk: &BulkChange,
        most_of_token: u32,
        act: &Act,
    ) -> Result<AddedBulk> {
        let input = (bulk.clone(), most_of_token, act.clone());
        self.sql
            .run(
                "add_bulk_change",
                input,
                |session, (bulk, most_of_token, act)| {
                    Box::pin(bulk::add(session, bulk, *most_of_token, act))
                },
            )
            .await
    }

    async fn bulk_change(&self, id: Uuid) -> Result<Option<BulkChange>> {
        bulk::bulk_change(&self.sql, id).await
    }

    async fn bulk_changes(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<BulkChange>> {
        bulk::bulk_changes(&self.sql, before, limit).await
    }

    async fn running_bulk_changes(&self) -> Result<Vec<BulkChange>> {
        bulk::running_bulk_changes(&self.sql).await
    }

    async fn advance_bulk_change(
        &self,
        bulk: &BulkChange,
        from: Option<TaskCursor>,
    ) -> Result<bool> {
        bulk::advance_bulk_change(&self.sql, bulk, from).await
    }

    async fn stop_bulk_change(
        &self,
        id: Uuid,
        at_unix_ms: i64,
        why: Option<&str>,
        act: &Act,
    ) -> Result<Option<BulkChange>> {
        bulk::stop_bulk_change(&self.sql, id, at_unix_ms, why, act).await
    }

    async fn retry_as_of(
        &self,
        ids: &[TaskId],
        now_unix_ms: i64,
        who: &str,
        what: &str,
        as_of_unix_ms: Option<i64>,
    ) -> Result<Vec<Retried>> {
        // Every attempt uses the same acts, so that it recognises what an earlier attempt has done.
        let acts: bulk::Acts = ids
            .iter()
            .map(|id| (*id, Act::at_time(now_unix_ms, who, what, &id.to_string())))
            .collect();
        let input = (acts, now_unix_ms, as_of_unix_ms, self.event_queues());
        let (retried, ended) = self
            .sql
            .run_in_era("retry", input, |session, (acts, now, as_of, events)| {
                Box::pin(bulk::retry(session, acts, *now, *as_of, events))
            })
            .await?;
        note_ends(&ended);
        Ok(retried)
    }

    async fn keep_letters(&self, letters: &[DeadLetter]) -> Result<()> {
        letters::keep_letters(&self.sql, letters).await
    }

    async fn letters(&self, pages: &LetterPages) -> Result<LetterPage> {
        letters::letters(&self.sql, pages).await
    }

    async fn letter(&self, id: LetterId) -> Result<Option<StoredLetter>> {
        letters::letter(&self.sql, id).await
    }

    async fn letter_kinds(&self, ids: &[LetterId]) -> Result<Vec<(LetterId, LetterKind)>> {
        letters::letter_kinds(&self.sql, ids).await
    }

    async fn purge(&self, ids: &[LetterId]) -> Result<u64> {
        letters::purge(&self.sql, ids, self.event_queues()).await
    }

    async fn remove_old_letters(&self, age: Duration, limit: u32) -> Result<u64> {
        letters::remove_old_letters(&self.sql, age, limit, self.event_queues()).await
    }

    async fn want_as_of(
        &self,
        ids: &[TaskId],
        change: &Change,
        at_unix_ms: i64,
        acts: &[TaskAct],
        as_of_unix_ms: Option<i64>,
    ) -> Result<Vec<Wanted>> {
        let input = (
            ids.to_vec(),
            change.clone(),
            (at_unix_ms, as_of_unix_ms),
            acts.to_vec(),
            self.event_queues(),
        );
        let (wanted, ended) = self
            .sql
            .run_in_era(
                "want_change",
                input,
                |session, (ids, change, times, acts, events)| {
                    Box::pin(changes::want(session, ids, change, *times, acts, events))
                },
            )
            .await?;
        note_ends(&ended);
        Ok(wanted)
    }

    async fn kept_changes(&self, pages: &KeptPages) -> Result<KeptChanges> {
        self.sql
            .run("kept_changes", *pages, |session, pages| {
                Box::pin(changes::kept(session, pages))
            })
            .await
    }

    async fn end_changes(&self, ended: &[EndedChange], at_unix_ms: i64) -> Result<Vec<ChangeEnd>> {
        let input = (ended.to_vec(), at_unix_ms, self.event_queues());
        let (ends, trees) = self
            .sql
            .run_in_era(
                "end_changes",
                input,
                |session, (ended, at_unix_ms, events)| {
                    Box::pin(changes::end(session, ended, *at_unix_ms, events))
                },
            )
            .await?;
        note_ends(&trees);
        Ok(ends)
    }

    async fn keep_failures(&self, failures: &[FailedAttempt]) -> Result<()> {
        history::keep_failures(&self.sql, failures).await
    }

    async fn attempts(&self, id: TaskId, limit: u32) -> Result<Attempts> {
        history::attempts(&self.sql, id, limit).await
    }

    async fn remove_old_failures(&self, age: Duration, limit: u32) -> Result<u64> {
        history::remove_old_failures(&self.sql, age, limit).await
    }

    async fn keep_acts(&self, acts: &[Act]) -> Result<()> {
        self.sql
            .run("keep_acts", acts.to_vec(), |session, acts| {
                Box::pin(tokens::keep_all(session, acts))
            })
            .await
    }

    async fn acts_on(&self, target: &str, limit: u32) -> Result<Vec<Act>> {
        history::acts_on(&self.sql, target, limit).await
    }

    fn keep_events_of(&self, queues: EventQueues) {
        *self.events.write() = Arc::new(queues);
    }

    async fn kept_events(&self, limit: u32) -> Result<Vec<KeptEvents>> {
        events::kept_events(&self.sql, limit).await
    }

    async fn remove_events(&self, numbers: &[i64]) -> Result<()> {
        self.sql
            .run("remove_events", numbers.to_vec(), |session, numbers| {
                Box::pin(events::remove(session, numbers))
            })
            .await
    }

    async fn add_turned_away(&self, counts: &TurnedAwayCounts) -> Result<()> {
        self.sql
            .run("add_turned_away", counts.clone(), |session, counts| {
                Box::pin(books::add(session, counts))
            })
            .await
    }

    async fn turned_away(&self, queues: &[QueueName]) -> Result<TurnedAwayCounts> {
        books::turned_away(&self.sql, queues).await
    }

    async fn off_bus(&self) -> Result<OffBusCounts> {
        books::off_bus(&self.sql).await
    }

    async fn pauses_version(&self) -> Result<u64> {
        meta::read(&self.sql, pauses::VERSION, pauses::VERSION).await
    }

    async fn paused_queues(&self) -> Result<Vec<PausedQueue>> {
        pauses::paused_queues(&self.sql).await
    }

    async fn pause(&self, paused: &PausedQueue, act: &Act) -> Result<Pausing> {
        self.sql
            .run(
                "pause",
                (paused.clone(), act.clone()),
                |session, (paused, act)| Box::pin(pauses::pause(session, paused, act)),
            )
            .await
    }

    async fn resume(&self, queue: &QueueName, act: &Act) -> Result<Pausing> {
        self.sql
            .run(
                "resume",
                (queue.clone(), act.clone()),
                |session, (queue, act)| Box::pin(pauses::resume(session, queue, act)),
            )
            .await
    }

    async fn limits_version(&self) -> Result<u64> {
        meta::read(&self.sql, limits::VERSION, limits::VERSION).await
    }

    async fn changed_limits(&self, after: u64, limit: u32) -> Result<Vec<ChangedLimits>> {
        limits::changed(&self.sql, after, limit).await
    }

    async fn own_limits(
        &self,
        queue: &QueueName,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<OwnLimits>> {
        limits::of_queue(&self.sql, queue, after, limit).await
    }

    async fn own_limits_of(&self, queue: &QueueName, limit_key: &str) -> Result<Option<OwnLimits>> {
        limits::of_key(&self.sql, queue, limit_key).await
    }

    async fn set_limits(&self, limits: &OwnLimits, act: &Act) -> Result<LimitSetting> {
        self.sql
            .run(
                "set_limits",
                (limits.clone(), act.clone()),
                |session, (limits, act)| Box::pin(limits::set(session, limits, act)),
            )
            .await
    }

    async fn clear_limits(
        &self,
        queue: &QueueName,
        limit_key: &str,
        at_unix_ms: i64,
        act: &Act,
    ) -> Result<LimitSetting> {
        let cleared = OwnLimits {
            queue: queue.clone(),
            limit_key: limit_key.to_owned(),
            values: OwnValues::default(),
            at_unix_ms,
            who: act.who.clone(),
        };
        self.sql
            .run(
                "clear_limits",
                (cleared, act.clone()),
                |session, (cleared, act)| Box::pin(limits::clear(session, cleared, act)),
            )
            .await
    }

    async fn keep_holds(
        &self,
        queue: &QueueName,
        holds: &[LimitHold],
        now_unix_ms: i64,
    ) -> Result<()> {
        self.sql
            .run(
                "keep_holds",
                (queue.clone(), holds.to_vec(), now_unix_ms),
                |session, (queue, holds, now)| Box::pin(holds::keep(session, queue, holds, *now)),
            )
            .await
    }

    async fn holds(&self, queue: &QueueName, now_unix_ms: i64) -> Result<Vec<LimitHold>> {
        holds::of_queue(&self.sql, queue, now_unix_ms).await
    }

    async fn wrong_counts(&self) -> Result<Vec<WrongCount>> {
        check::wrong_counts(&self.sql).await
    }

    async fn correct_count(&self, queue: &QueueName) -> Result<()> {
        self.sql
            .run("correct_count", queue.clone(), |session, queue| {
                Box::pin(check::correct(session, queue))
            })
            .await
    }

    async fn stranded(
        &self,
        after: Option<TaskId>,
    ) -> Result<(Vec<(QueueName, TaskId)>, Option<TaskId>)> {
        check::stranded(&self.sql, after).await
    }
}
