//! Changes of live work: the wishes that SQL keeps, and the ends that follow from the queue's decisions.
//!
//! A transaction locks tasks first, in the order of ids, then wishes, then reads the generations of their shards. A
//! rebuild raises the generation of a shard in SQL before it opens it in Redis. So a decision of the generation before
//! either is in SQL before the walk of the rebuild begins, or counts for nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use async_trait::async_trait;

use super::{
    SqlStore, access,
    backend::Backend,
    counts::Counts,
    outbox,
    rows::{corrupt, from_row, key_hash, number, queue_name, status, task_id},
    session::Session,
    shards,
    statement::{Statement, lists, pieces},
};
use crate::model::{
    Act, Change, ChangeKind, ChangingTask, KeyHash, OwnedTask, Priority, QueueName, ShardId, StoredStatus, TaskAct,
    TaskId,
};
use crate::store::{
    ChangeEnd, Changes, Decided, EndedChange, KeptChange, KeptChanges, KeptPages, Result, Turn, Wanted,
};

#[async_trait]
impl<DB: Backend> Changes for SqlStore<DB> {
    async fn queues_of(&self, ids: &[TaskId]) -> Result<Vec<OwnedTask>> {
        let mut owned = Vec::with_capacity(ids.len());
        for ids in lists(ids) {
            let found = Statement::new("SELECT id, queue FROM tasks WHERE id IN ").list(ids);
            for (id, queue) in self.sql.read::<(Vec<u8>, String)>("queues_of", found).await? {
                owned.push((task_id(&id)?, queue_name(&queue)?));
            }
        }
        Ok(owned)
    }

    async fn want(&self, ids: &[TaskId], change: &Change, at_unix_ms: i64, acts: &[TaskAct]) -> Result<Vec<Wanted>> {
        let input = (ids.to_vec(), change.clone(), at_unix_ms, acts.to_vec());
        let want = self.sql.run("want_change", input, |session, (ids, change, at_unix_ms, acts)| {
            Box::pin(want(session, ids, change, *at_unix_ms, acts))
        });
        want.await
    }

    async fn kept_changes(&self, pages: &KeptPages) -> Result<KeptChanges> {
        self.sql.run("kept_changes", *pages, |session, pages| Box::pin(kept(session, pages))).await
    }

    async fn end_changes(&self, ended: &[EndedChange], at_unix_ms: i64) -> Result<Vec<ChangeEnd>> {
        let end = self.sql.run("end_changes", (ended.to_vec(), at_unix_ms), |session, (ended, at_unix_ms)| {
            Box::pin(end(session, ended, *at_unix_ms))
        });
        end.await
    }
}

struct TargetColumns {
    id: Vec<u8>,
    key_hash: Vec<u8>,
    queue: String,
    shard: i64,
    replicas: i64,
    priority: i64,
    epoch: i64,
    status: i64,
    on_bus: i64,
}
from_row!(TargetColumns { id, key_hash, queue, shard, replicas, priority, epoch, status, on_bus });

/// A task that a change is about.
struct Target {
    task: ChangingTask,
    key_hash: KeyHash,
    status: StoredStatus,
    /// It may have a row in the outbox.
    off_bus: bool,
}

impl TargetColumns {
    fn into_target(self) -> Result<Target> {
        let task = ChangingTask {
            id: task_id(&self.id)?,
            shard: ShardId { queue: queue_name(&self.queue)?, number: number(self.shard)? },
            replicas: number(self.replicas)?,
            priority: Priority::from_number(self.priority),
            epoch: number(self.epoch)?,
        };
        let (key_hash, status) = (key_hash(&self.key_hash)?, status(self.status)?);
        Ok(Target { task, key_hash, status, off_bus: self.on_bus == 0 })
    }
}

/// The tasks among `ids`, locked.
async fn targets<S: Session>(session: &mut S, ids: &BTreeSet<TaskId>) -> Result<HashMap<TaskId, Target>> {
    let (ids, mut targets) = (Vec::from_iter(ids.iter().copied()), HashMap::new());
    for ids in lists(&ids) {
        let found =
            Statement::new("SELECT id, key_hash, queue, shard, replicas, priority, epoch, status, on_bus FROM tasks ")
                .sql(S::BY_PRIMARY_KEY)
                .sql(" WHERE id IN ")
                .list(ids)
                .sql(" ORDER BY id")
                .sql(S::FOR_UPDATE);
        for columns in session.fetch::<TargetColumns>(found).await? {
            let target = columns.into_target()?;
            targets.insert(target.task.id, target);
        }
    }
    Ok(targets)
}

fn kind_of(change: &Change) -> ChangeKind {
    match change {
        Change::Cancel => ChangeKind::Cancel,
    }
}

async fn want<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    change: &Change,
    at_unix_ms: i64,
    acts: &[TaskAct],
) -> Result<Vec<Wanted>> {
    let targets = targets(session, &ids.iter().copied().collect()).await?;
    let kind = kind_of(change);
    let mut kept: BTreeMap<TaskId, KeptChange> = BTreeMap::new();
    for target in targets.values().filter(|target| !target.status.is_final()) {
        let task = target.task.clone();
        kept.insert(task.id, KeptChange { task, kind, turn: outbox::new_turn(), at_unix_ms });
    }
    let rows: Vec<&KeptChange> = kept.values().collect();
    for piece in pieces(&rows, |_| 0) {
        let rows = piece.iter().map(|kept| {
            [(&kept.task.id).into(), i64::from(kept.kind as u8).into(), kept.turn.into(), kept.at_unix_ms.into()]
        });
        let keep = Statement::new("INSERT INTO changes (task_id, kind, turn, at_ms)")
            .values(rows)
            .sql(&S::replace("task_id, kind", &["turn", "at_ms"]));
        session.execute(keep).await?;
    }
    let acts: Vec<Act> = acts.iter().filter(|(id, _)| kept.contains_key(id)).map(|(_, act)| act.clone()).collect();
    access::keep_all(session, &acts).await?;
    let wanted = |id: &TaskId| match (targets.get(id), kept.get(id)) {
        (None, _) => Wanted::Unknown,
        (_, Some(kept)) => Wanted::Kept(kept.clone()),
        (Some(target), None) => Wanted::Final(target.status),
    };
    Ok(ids.iter().map(wanted).collect())
}

struct KeptColumns {
    task_id: Vec<u8>,
    turn: i64,
    at_ms: i64,
    queue: Option<String>,
    shard: Option<i64>,
    replicas: Option<i64>,
    priority: Option<i64>,
    epoch: Option<i64>,
    status: Option<i64>,
}
from_row!(KeptColumns { task_id, turn, at_ms, queue, shard, replicas, priority, epoch, status });

async fn kept<S: Session>(session: &mut S, pages: &KeptPages) -> Result<KeptChanges> {
    let KeptPages { kind, upto_unix_ms, after, limit } = pages;
    let (at_ms, id) = after.unwrap_or((i64::MIN, TaskId(uuid::Uuid::nil())));
    let page =
        Statement::new("SELECT task_id, turn, at_ms, queue, shard, replicas, priority, epoch, status FROM changes ")
            .sql(&S::by_index("changes_at"))
            .sql(" LEFT JOIN tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(
                " ON id = task_id WHERE kind = ? AND at_ms >= ? AND at_ms <= ? AND (at_ms > ? OR task_id > ?) \
         ORDER BY at_ms, task_id LIMIT ?",
            )
            .bind(i64::from(*kind as u8))
            .bind(at_ms)
            .bind(*upto_unix_ms)
            .bind(at_ms)
            .bind(&id)
            .bind(*limit);
    let page: Vec<KeptColumns> = session.fetch(page).await?;
    let mut kept = KeptChanges::default();
    if page.len() == *limit as usize {
        kept.next =
            page.last().map(|last| Ok::<_, crate::store::Error>((last.at_ms, task_id(&last.task_id)?))).transpose()?;
    }
    let mut over = Vec::new();
    for columns in page {
        let (id, turn) = (task_id(&columns.task_id)?, Turn(columns.turn));
        let (Some(queue), Some(shard), Some(0)) = (columns.queue, columns.shard, columns.status) else {
            over.push((id, turn));
            continue;
        };
        let number_of = |column: Option<i64>| column.ok_or_else(|| corrupt("a task without a number"));
        let task = ChangingTask {
            id,
            shard: ShardId { queue: queue_name(&queue)?, number: number(shard)? },
            replicas: number(number_of(columns.replicas)?)?,
            priority: Priority::from_number(number_of(columns.priority)?),
            epoch: number(number_of(columns.epoch)?)?,
        };
        kept.changes.push(KeptChange { task, kind: *kind, turn, at_unix_ms: columns.at_ms });
    }
    remove_turns(session, &over).await?;
    Ok(kept)
}

/// Removes wishes, unless later ones have replaced them.
async fn remove_turns<S: Session>(session: &mut S, wishes: &[(TaskId, Turn)]) -> Result<()> {
    let mut wishes = wishes.to_vec();
    wishes.sort_unstable();
    for wishes in lists(&wishes) {
        let (ids, turns): (Vec<TaskId>, Vec<Turn>) = wishes.iter().copied().unzip();
        // A turn is random, so no other row has it.
        let remove = Statement::new("DELETE FROM changes WHERE task_id IN ").list(&ids);
        session.execute(remove.sql(" AND turn IN ").list(&turns)).await?;
    }
    Ok(())
}

/// Removes the wishes about these tasks, because they are final.
pub(super) async fn remove<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<()> {
    for ids in lists(ids) {
        session.execute(Statement::new("DELETE FROM changes WHERE task_id IN ").list(ids)).await?;
    }
    Ok(())
}

async fn end<S: Session>(session: &mut S, ended: &[EndedChange], at_unix_ms: i64) -> Result<Vec<ChangeEnd>> {
    let mut targets = targets(session, &ended.iter().map(|ended| ended.id).collect()).await?;
    let generations = generations(session, targets.values().map(|target| target.task.shard.clone()).collect()).await?;
    let (mut cancelled, mut over, mut counts) = (BTreeSet::new(), Vec::new(), Counts::default());
    for EndedChange { id, turn, end } in ended {
        let target = targets.get_mut(id);
        let unfinished = target.filter(|target| !target.status.is_final());
        match (end, unfinished) {
            (Decided::Cancelled { epoch, generation }, Some(target)) => {
                let is_present = generations.get(&target.task.shard) == Some(generation);
                if target.task.epoch == *epoch && is_present {
                    counts.moved(&target.task.shard.queue, target.status, StoredStatus::Cancelled);
                    target.status = StoredStatus::Cancelled;
                    cancelled.insert(*id);
                }
            }
            (Decided::Cancelled { .. }, None) | (Decided::Over, _) => over.extend(turn.map(|turn| (*id, turn))),
        }
    }
    let off_bus: Vec<TaskId> = cancelled.iter().filter(|id| targets[id].off_bus).copied().collect();
    let cancelled = Vec::from_iter(cancelled);
    for ids in lists(&cancelled) {
        let cancel = Statement::new(
            "UPDATE tasks SET status = 3, on_bus = 0, \
             updated_ms = CASE WHEN updated_ms > ? THEN updated_ms ELSE ? END WHERE id IN ",
        );
        session.execute(cancel.bind(at_unix_ms).bind(at_unix_ms).list(ids)).await?;
    }
    outbox::remove(session, &off_bus).await?;
    remove(session, &cancelled).await?;
    remove_turns(session, &over).await?;
    counts.store(session).await?;
    let end = |ended: &EndedChange| {
        let target = targets.get(&ended.id);
        let is_freed = |status: StoredStatus| matches!(status, StoredStatus::Dead | StoredStatus::Cancelled);
        let freed = target.filter(|target| is_freed(target.status));
        let key: Option<(QueueName, KeyHash)> = freed.map(|target| (target.task.shard.queue.clone(), target.key_hash));
        ChangeEnd { status: target.map(|target| target.status), key }
    };
    Ok(ended.iter().map(end).collect())
}

/// The generations of these shards. No rebuild raises them before the transaction ends.
async fn generations<S: Session>(session: &mut S, of: BTreeSet<ShardId>) -> Result<HashMap<ShardId, u64>> {
    let mut generations = HashMap::new();
    for (number_, queues) in shards::by_number(&of) {
        for queues in lists(&queues) {
            let found = Statement::new("SELECT queue, life FROM shards ")
                .sql(S::BY_PRIMARY_KEY)
                .sql(" WHERE shard = ?")
                .bind(number_)
                .sql(" AND queue IN ")
                .list(queues)
                .sql(S::FOR_SHARE);
            for (queue, generation) in session.fetch::<(String, i64)>(found).await? {
                let shard = ShardId { queue: queue_name(&queue)?, number: number_ };
                generations.insert(shard, number(generation)?);
            }
        }
    }
    Ok(generations)
}
