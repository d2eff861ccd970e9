//! What is to be published, what has been published, and where: the outbox, batches and shards.

pub(crate) mod batches;
pub(crate) mod entries;
pub(crate) mod pages;
pub(crate) mod place;
pub(crate) mod published;
pub(crate) mod rebuild;
pub(crate) mod shards;
pub(crate) mod walk;

use std::collections::HashSet;

use async_trait::async_trait;

use crate::{
    model::{LimitHash, QueueName, ShardId, TaskId},
    store::{
        BroughtForward, Opening, Outbox, OutboxRow, Published, PublishedTask, RebuildPage,
        Rebuilding, Rebuilt, Result, StoredShard, Stretch, Turn, Unpublished, Walked, WalkedPage,
        sql::{SqlStore, backend::Backend},
    },
};

#[async_trait]
impl<DB: Backend> Outbox for SqlStore<DB> {
    async fn mark_published(&self, generation: &str, published: &[Published]) -> Result<()> {
        self.sql
            .run(
                "mark_published",
                (generation.to_owned(), published.to_vec()),
                |session, input| Box::pin(entries::mark_published(session, &input.0, &input.1)),
            )
            .await
    }

    async fn unpublish(&self, ids: &[TaskId], why: Unpublished) -> Result<()> {
        self.sql
            .run("unpublish", (ids.to_vec(), why), |session, (ids, why)| {
                Box::pin(entries::unpublish(session, ids, *why, 0))
            })
            .await
    }

    async fn put_off(&self, ids: &[TaskId], until_unix_ms: i64) -> Result<()> {
        self.sql
            .run(
                "put_off",
                (ids.to_vec(), until_unix_ms),
                |session, (ids, until)| {
                    Box::pin(entries::unpublish(session, ids, Unpublished::Fresh, *until))
                },
            )
            .await
    }

    async fn due(
        &self,
        now_unix_ms: i64,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>> {
        pages::page(&self.sql, pages::Of::Due(now_unix_ms), limit, without).await
    }

    async fn bring_forward(
        &self,
        later_than_unix_ms: i64,
        to_unix_ms: i64,
        after: Option<(i64, TaskId)>,
        limit: usize,
    ) -> Result<BroughtForward> {
        pages::bring_forward(&self.sql, later_than_unix_ms, to_unix_ms, after, limit).await
    }

    async fn oldest_waiting(&self, now_unix_ms: i64) -> Result<Vec<(QueueName, i64)>> {
        pages::oldest_waiting(&self.sql, now_unix_ms).await
    }

    async fn parked_queues(&self) -> Result<Vec<QueueName>> {
        pages::parked_queues(&self.sql).await
    }

    async fn parked(
        &self,
        queue: &QueueName,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>> {
        pages::page(&self.sql, pages::Of::Parked(queue), limit, without).await
    }

    async fn crowded_queues(&self) -> Result<Vec<QueueName>> {
        pages::crowded_queues(&self.sql).await
    }

    async fn crowded_keys(
        &self,
        queue: &QueueName,
        after: Option<&LimitHash>,
        limit: usize,
    ) -> Result<Vec<LimitHash>> {
        pages::crowded_keys(&self.sql, queue, after, limit).await
    }

    async fn crowded(
        &self,
        queue: &QueueName,
        key: &LimitHash,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>> {
        pages::page(&self.sql, pages::Of::Crowded(queue, key), limit, without).await
    }

    async fn count_crowded(&self, queue: &QueueName, key: &LimitHash, most: u64) -> Result<u64> {
        pages::count_crowded(&self.sql, queue, key, most).await
    }

    async fn remove_batches(&self, after: Option<Turn>, limit: u32) -> Result<Option<Turn>> {
        pages::remove_batches(&self.sql, after, limit).await
    }

    async fn shards(&self, changed_after: Option<u64>) -> Result<Vec<StoredShard>> {
        shards::shards(&self.sql, changed_after).await
    }

    async fn open_shards(&self, shards: &[ShardId]) -> Result<Vec<Opening>> {
        self.sql
            .run("open_shards", shards.to_vec(), |session, shards| {
                Box::pin(shards::open(session, shards))
            })
            .await
    }

    async fn close_shard(&self, shard: &ShardId, generation: u64) -> Result<bool> {
        self.sql
            .run(
                "close_shard",
                (shard.clone(), generation),
                |session, (shard, generation)| Box::pin(shards::close(session, shard, *generation)),
            )
            .await
    }

    async fn begin_rebuild(&self, lost: &[(ShardId, u64)]) -> Result<Vec<u64>> {
        self.sql
            .run("begin_rebuild", lost.to_vec(), |session, lost| {
                Box::pin(rebuild::begin(session, lost))
            })
            .await
    }

    async fn rebuilding(&self) -> Result<Rebuilding> {
        rebuild::rebuilding(&self.sql).await
    }

    async fn rebuild_page(
        &self,
        of: &Rebuilding,
        after: Option<&Walked>,
        limit: u32,
    ) -> Result<RebuildPage> {
        rebuild::rebuild_page(&self.sql, of, after, limit).await
    }

    async fn end_rebuild(&self, generation: &str, rebuilt: &[Rebuilt]) -> Result<()> {
        let input = (generation.to_owned(), rebuilt.to_vec());
        self.sql
            .run("end_rebuild", input, |session, (generation, rebuilt)| {
                Box::pin(rebuild::end(session, generation, rebuilt))
            })
            .await
    }

    async fn published_among(
        &self,
        generation: &str,
        ids: &[TaskId],
    ) -> Result<Vec<PublishedTask>> {
        published::published_among(&self.sql, generation, ids).await
    }

    async fn on_bus(&self, stretch: Stretch<'_>, limit: u32) -> Result<WalkedPage> {
        published::on_bus(&self.sql, stretch, limit).await
    }

    async fn last_id(&self) -> Result<Option<TaskId>> {
        walk::last_id(&self.sql).await
    }
}
