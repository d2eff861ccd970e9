//! Changes of live work: pending changes, and what the queue's decisions do to tasks.
//!
//! A transaction first locks tasks, sorted by id. One that ends changes then reads the generations
//! of their shards, and keeps others from changing them. Pending changes come last. A rebuild
//! raises the generation of a shard in SQL before it opens the shard in Redis. So a decision of the
//! previous generation is either in SQL before the walk of the rebuild begins, or has no effect.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use crate::{
    config::EventQueues,
    model::{
        Act, Change, ChangeKind, ChangingTask, KeyHash, Priority, QueueName, Requeue, ShardId,
        StoredStatus, TaskAct, TaskId, Update,
    },
    store::{
        ChangeEnd, Decided, EndedChange, KeptChange, KeptChanges, KeptPages, Result, Turn, Wanted,
        sql::{
            access::tokens,
            outbox::{entries, shards},
            pages,
            rows::{columns, corrupt, key_hash, number, queue_name, status, task_id},
            session::Session,
            statement::{Statement, lists},
            tasks::{
                again,
                belongs::{BELONGS_COLUMNS, Belongs, BelongsColumns},
                pending,
                steps::Steps,
                trees::Ends,
            },
        },
    },
};

columns! {
    struct TargetColumns {
        #[flatten]
        belongs: BelongsColumns,
        id: Vec<u8>,
        key_hash: Vec<u8>,
        queue: String,
        shard: i64,
        replicas: i64,
        priority: i64,
        epoch: i64,
        status: i64,
        completed: i64,
        on_bus: i64,
    }
}

/// A task that is to be changed.
struct Target {
    task: ChangingTask,
    key_hash: KeyHash,
    status: StoredStatus,
    completed: u32,
    /// The task may have a row in the outbox.
    off_bus: bool,
    belongs: Belongs,
}

impl TargetColumns {
    fn into_target(self) -> Result<Target> {
        let task = ChangingTask {
            id: task_id(&self.id)?,
            shard: ShardId {
                queue: queue_name(&self.queue)?,
                number: number(self.shard)?,
            },
            replicas: number(self.replicas)?,
            priority: Priority::from_number(self.priority),
            epoch: number(self.epoch)?,
        };
        let (key_hash, status) = (key_hash(&self.key_hash)?, status(self.status)?);
        let belongs = self.belongs.of(&task.shard.queue)?;
        Ok(Target {
            task,
            key_hash,
            status,
            completed: number(self.completed)?,
            off_bus: self.on_bus == 0,
            belongs,
        })
    }
}

/// Those of `ids` that exist, locked; with `as_of_ms`, those that have not changed since.
async fn targets<S: Session>(
    session: &mut S,
    ids: &BTreeSet<TaskId>,
    as_of_ms: Option<i64>,
) -> Result<HashMap<TaskId, Target>> {
    let (ids, mut targets) = (Vec::from_iter(ids.iter().copied()), HashMap::new());
    for ids in lists(&ids) {
        let found = Statement::new(format!(
            "SELECT id, key_hash, queue, shard, replicas, priority, epoch, status, completed, on_bus, \
             {BELONGS_COLUMNS} FROM tasks ",
        ))
        .sql(S::BY_PRIMARY_KEY)
        .sql(" WHERE id IN ")
        .list(ids)
        .append(again::unchanged_since(as_of_ms))
        .sql(" ORDER BY id")
        .sql(S::FOR_UPDATE);
        for columns in session.fetch::<TargetColumns>(found).await? {
            let target = columns.into_target()?;
            targets.insert(target.task.id, target);
        }
    }
    Ok(targets)
}

/// The tasks that a change is wanted for. An earlier attempt of the same call, the answer to whose
/// COMMIT was lost, may have reopened some of them, which then have changed since `as_of_ms`: their
/// acts are recorded. These are locked after the others; if that meets another transaction, the
/// database ends one of the two, which is tried again.
async fn wanted_targets<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    acts: &[TaskAct],
    as_of_ms: Option<i64>,
) -> Result<HashMap<TaskId, Target>> {
    let mut found = targets(session, &ids.iter().copied().collect(), as_of_ms).await?;
    if as_of_ms.is_none() || found.len() == ids.len() {
        return Ok(found);
    }
    let others: Vec<&TaskAct> = acts
        .iter()
        .filter(|(id, _)| !found.contains_key(id))
        .collect();
    let recorded = tokens::recorded(session, others.iter().map(|(_, act)| act)).await?;
    let before: BTreeSet<TaskId> = others
        .into_iter()
        .filter(|(_, act)| recorded.contains(&act.id))
        .map(|(id, _)| *id)
        .collect();
    if !before.is_empty() {
        found.extend(targets(session, &before, None).await?);
    }
    Ok(found)
}

pub(crate) async fn want<S: Session>(
    session: &mut S,
    ids: &[TaskId],
    change: &Change,
    (now_ms, as_of_ms): (i64, Option<i64>),
    acts: &[TaskAct],
    events: &Arc<EventQueues>,
) -> Result<(Vec<Wanted>, Ends)> {
    let mut targets = wanted_targets(session, ids, acts, as_of_ms).await?;
    let mut steps = Steps::new(events);
    let mut reopened = BTreeSet::new();
    if let Change::Update(update) = change {
        reopened = store_update(session, &mut targets, update, now_ms, &mut steps).await?;
    }
    // Of a requeue, SQL only stores the end of the reservation.
    let (kind, at_unix_ms) = match change {
        Change::Requeue(Requeue::To {
            until_unix_ms: Some(until),
            ..
        }) => (ChangeKind::Reservation, *until),
        other => (other.kind(), now_ms),
    };
    let mut kept: BTreeMap<TaskId, KeptChange> = BTreeMap::new();
    for target in targets.values().filter(|target| !target.status.is_final()) {
        let (task, turn) = (target.task.clone(), entries::new_turn());
        kept.insert(
            task.id,
            KeptChange {
                task,
                kind,
                turn,
                at_unix_ms,
                is_second: false,
            },
        );
    }
    if matches!(kind, ChangeKind::Update | ChangeKind::Reservation) {
        pending::note_earlier(session, kind, &mut kept, now_ms).await?;
    }
    let is_kept =
        |kept: &&KeptChange| kind != ChangeKind::Requeue && !reopened.contains(&kept.task.id);
    let rows: Vec<&KeptChange> = kept.values().filter(is_kept).collect();
    let rows: Vec<_> = rows
        .into_iter()
        .map(|kept| (kept.task.id, kept.turn, kept.at_unix_ms))
        .collect();
    pending::keep(session, kind, &rows).await?;
    let acts: Vec<Act> = acts
        .iter()
        .filter(|(id, _)| kept.contains_key(id) || reopened.contains(id))
        .map(|(_, act)| act.clone())
        .collect();
    tokens::keep_all(session, &acts).await?;
    let ended = steps.store(session).await?;
    let wanted = |id: &TaskId| match (targets.get(id), kept.get(id)) {
        (None, _) => Wanted::Unknown,
        _ if reopened.contains(id) => Wanted::Reopened,
        (_, Some(kept)) => Wanted::Kept(kept.clone()),
        (Some(target), None) => Wanted::Final(target.status),
    };
    Ok((ids.iter().map(wanted).collect(), ended))
}

/// Stores new values, and reopens completed tasks that now have more replicas. Returns the reopened
/// ones.
async fn store_update<S: Session>(
    session: &mut S,
    targets: &mut HashMap<TaskId, Target>,
    update: &Update,
    now_ms: i64,
    steps: &mut Steps,
) -> Result<BTreeSet<TaskId>> {
    let may_reopen = |target: &Target| {
        target.status == StoredStatus::Completed
            && update
                .replicas
                .is_some_and(|new| new > target.task.replicas)
    };
    let mut changed: Vec<TaskId> = Vec::new();
    let mut reopened = BTreeSet::new();
    for (id, target) in targets.iter_mut() {
        if may_reopen(target) {
            reopened.insert(*id);
        } else if target.status.is_final() {
            continue;
        }
        changed.push(*id);
        target.task.replicas = update.replicas.unwrap_or(target.task.replicas);
        target.task.priority = update.priority.unwrap_or(target.task.priority);
    }
    changed.sort_unstable();
    for ids in lists(&changed) {
        if let Some(replicas) = update.replicas {
            let set = Statement::new("UPDATE tasks SET replicas = ? WHERE id IN ").bind(replicas);
            session.execute(set.list(ids)).await?;
        }
        if let Some(priority) = update.priority {
            let set = Statement::new("UPDATE tasks SET priority = ? WHERE id IN ").bind(priority);
            session.execute(set.list(ids)).await?;
        }
    }
    let ids = Vec::from_iter(reopened.iter().copied());
    again::reopen(session, &ids, now_ms, steps).await?;
    // After the rows of sequences.
    if let Some(priority) = update.priority {
        for ids in lists(&changed) {
            let set =
                Statement::new("UPDATE outbox SET priority = ? WHERE task_id IN ").bind(priority);
            session.execute(set.list(ids)).await?;
        }
    }
    Ok(reopened)
}

columns! {
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
}

pub(crate) async fn kept<S: Session>(session: &mut S, asked: &KeptPages) -> Result<KeptChanges> {
    let KeptPages {
        kind,
        upto_unix_ms,
        after,
        limit,
    } = asked;
    let (at_ms, id) = after.unwrap_or((i64::MIN, TaskId::FIRST));
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
    let mut kept = KeptChanges {
        changes: Vec::with_capacity(page.len()),
        next: pages::next(&page, *limit as usize, |last| {
            Ok((last.at_ms, task_id(&last.task_id)?))
        })?,
    };
    let mut over = Vec::new();
    for columns in page {
        let (id, turn) = (task_id(&columns.task_id)?, Turn(columns.turn));
        // A task may have been completed with a lower NUM that the queue has not replaced yet.
        let is_wanted = |stored: i64| stored == 0 || stored == 1 && *kind == ChangeKind::Update;
        let status = columns.status.filter(|stored| is_wanted(*stored));
        let (Some(queue), Some(shard), Some(_)) = (columns.queue, columns.shard, status) else {
            over.push((id, turn));
            continue;
        };
        let number_of =
            |column: Option<i64>| column.ok_or_else(|| corrupt("a task without a number"));
        let task = ChangingTask {
            id,
            shard: ShardId {
                queue: queue_name(&queue)?,
                number: number(shard)?,
            },
            replicas: number(number_of(columns.replicas)?)?,
            priority: Priority::from_number(number_of(columns.priority)?),
            epoch: number(number_of(columns.epoch)?)?,
        };
        let at_unix_ms = columns.at_ms;
        kept.changes.push(KeptChange {
            task,
            kind: *kind,
            turn,
            at_unix_ms,
            is_second: false,
        });
    }
    pending::remove_turns(session, &over).await?;
    Ok(kept)
}

pub(crate) async fn end<S: Session>(
    session: &mut S,
    ended: &[EndedChange],
    at_unix_ms: i64,
    events: &Arc<EventQueues>,
) -> Result<(Vec<ChangeEnd>, Ends)> {
    let mut targets = targets(session, &ended.iter().map(|ended| ended.id).collect(), None).await?;
    let generations = generations(
        session,
        targets
            .values()
            .map(|target| target.task.shard.clone())
            .collect(),
    )
    .await?;
    let mut cancelled = BTreeSet::new();
    let mut completed = BTreeSet::new();
    let mut reopened = BTreeSet::new();
    let mut over = Vec::new();
    let mut outdated = Vec::new();
    let mut moved = Vec::new();
    let mut steps = Steps::new(events);
    for EndedChange { id, turn, end } in ended {
        let target = targets.get_mut(id);
        let unfinished = target.filter(|target| !target.status.is_final());
        match (end, unfinished) {
            (Decided::Cancelled { epoch, generation }, Some(target)) => {
                // SQL raises a generation before Redis has it. If the one in SQL is lower than that
                // of Redis, SQL was set back.
                let is_present = generations
                    .get(&target.task.shard)
                    .is_some_and(|present| present <= generation);
                if target.task.epoch == *epoch && is_present {
                    steps.moved(
                        *id,
                        &target.task.shard.queue,
                        target.status,
                        StoredStatus::Cancelled,
                        &target.belongs,
                        at_unix_ms,
                    );
                    target.status = StoredStatus::Cancelled;
                    cancelled.insert(*id);
                }
            }
            (Decided::Updated { replicas, priority }, Some(target)) => {
                over.extend(turn.map(|turn| (*id, turn)));
                if (target.task.replicas, target.task.priority) != (*replicas, *priority) {
                    // There were two changes at the same time: the queue has the values of the
                    // earlier one, and the pending change of the later one may already be gone.
                    outdated.push((*id, entries::new_turn(), at_unix_ms));
                }
                if target.completed >= target.task.replicas {
                    steps.moved(
                        *id,
                        &target.task.shard.queue,
                        target.status,
                        StoredStatus::Completed,
                        &target.belongs,
                        at_unix_ms,
                    );
                    target.status = StoredStatus::Completed;
                    completed.insert(*id);
                }
            }
            (Decided::CompletedBefore { epoch, credited }, Some(target)) => {
                // Otherwise the last reports have not reached SQL yet, and the pending change
                // stays.
                if target.task.epoch == *epoch && target.completed >= *credited {
                    reopened.insert(*id);
                    over.extend(turn.map(|turn| (*id, turn)));
                }
            }
            (Decided::ReservedUntil(until_unix_ms), Some(_)) => {
                moved.extend(turn.map(|turn| (*id, turn, *until_unix_ms)));
            }
            (_, None) | (Decided::Over, _) => over.extend(turn.map(|turn| (*id, turn))),
        }
    }
    store_ends(
        session,
        &targets,
        [&completed, &cancelled],
        at_unix_ms,
        &mut steps,
    )
    .await?;
    let [cancelled, reopened] = [cancelled, reopened].map(Vec::from_iter);
    again::reopen(session, &reopened, at_unix_ms, &mut steps).await?;
    pending::remove(session, &cancelled).await?;
    pending::remove_turns(session, &over).await?;
    pending::keep(session, ChangeKind::Update, &outdated).await?;
    pending::postpone(session, ChangeKind::Reservation, &moved).await?;
    let ended_trees = steps.store(session).await?;
    let end = |ended: &EndedChange| {
        let target = targets.get(&ended.id);
        let is_freed =
            |status: StoredStatus| matches!(status, StoredStatus::Dead | StoredStatus::Cancelled);
        let has_key = |target: &&Target| target.key_hash.task_without_key().is_none();
        let freed = target
            .filter(|target| is_freed(target.status))
            .filter(has_key);
        let key: Option<(QueueName, KeyHash)> =
            freed.map(|target| (target.task.shard.queue.clone(), target.key_hash));
        ChangeEnd {
            status: target.map(|target| target.status),
            key,
        }
    };
    Ok((ended.iter().map(end).collect(), ended_trees))
}

/// Makes the given tasks Completed or Cancelled.
async fn store_ends<S: Session>(
    session: &mut S,
    targets: &HashMap<TaskId, Target>,
    [completed, cancelled]: [&BTreeSet<TaskId>; 2],
    at_unix_ms: i64,
    steps: &mut Steps,
) -> Result<()> {
    for (status, ids) in [
        (StoredStatus::Completed, completed),
        (StoredStatus::Cancelled, cancelled),
    ] {
        for ids in lists(&Vec::from_iter(ids)) {
            let end = Statement::new(
                "UPDATE tasks SET status = ?, on_bus = 0, \
                 updated_ms = CASE WHEN updated_ms > ? THEN updated_ms ELSE ? END, era = ",
            );
            let end = end
                .sql(S::ERA)
                .sql(" WHERE id IN ")
                .bind(status)
                .bind(at_unix_ms)
                .bind(at_unix_ms)
                .bind_era(session.era());
            session.execute(end.list(ids)).await?;
        }
    }
    steps.sequences(session, &[], None).await?;
    let off_bus = completed
        .iter()
        .chain(cancelled)
        .filter(|id| targets[id].off_bus);
    entries::remove(session, &Vec::from_iter(off_bus.copied())).await
}

/// The generations of these shards. No rebuild can raise them before the transaction ends.
async fn generations<S: Session>(
    session: &mut S,
    of: BTreeSet<ShardId>,
) -> Result<HashMap<ShardId, u64>> {
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
                let shard = ShardId {
                    queue: queue_name(&queue)?,
                    number: number_,
                };
                generations.insert(shard, number(generation)?);
            }
        }
    }
    Ok(generations)
}
