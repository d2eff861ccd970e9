//! Shards that are being rebuilt: their marks, and their tasks page by page.
//!
//! A rebuild changes no row of a task. The row of its shard says that it is being rebuilt. At the
//! end, the same row says up to which offset all tasks of the shard were published. See the
//! migration `rebuild_shards`.

use std::collections::{BTreeSet, HashMap};

use crate::{
    model::{Offset, QueueName, ShardId, TaskId, TaskRow},
    store::{
        PAGE_BYTES, RebuildPage, Rebuilding, Rebuilt, Result, Walked,
        sql::{
            backend::Backend,
            dialect::Dialect,
            outbox::{
                entries,
                shards::{find, in_generation, next_version},
                walk::{self, Walk},
            },
            queue_counts::{self, CountColumns},
            rows::{number, queue_name, task_id},
            runner::Runner,
            session::Session,
            statement::{Statement, lists},
        },
    },
};

/// How many tasks to weigh before the size of the page is checked again. Weighing reads whole
/// payloads.
const WEIGHED_AT_ONCE: usize = 16;

/// Id, queue, shard, and whether the task is on the bus.
type Listed = (Vec<u8>, String, i64, i64);

fn place((id, queue, ..): &Listed) -> (&str, &[u8]) {
    (queue, id)
}

pub(crate) async fn rebuilding<DB: Backend>(sql: &Runner<DB>) -> Result<Rebuilding> {
    const NAME: &str = "rebuilding";
    let marked = Statement::new("SELECT queue, shard, life FROM shards ")
        .sql(&DB::Connection::by_index("shards_rebuilding"))
        // SQLite only uses a partial index for a condition that repeats the one of the index.
        .sql(" WHERE rebuilding = 1 AND closed = 0");
    let mut rebuilding = Rebuilding::default();
    for (queue, shard, generation) in sql.read::<(String, i64, i64)>(NAME, marked).await? {
        let shard = ShardId {
            queue: queue_name(&queue)?,
            number: number(shard)?,
        };
        rebuilding.shards.insert(shard, number(generation)?);
    }
    if !rebuilding.shards.is_empty() {
        rebuilding.upto = walk::last_id(sql).await?;
        let counts = sql
            .read::<CountColumns>(NAME, queue_counts::unfinished::<DB::Connection>())
            .await?;
        let counts: HashMap<String, i64> = counts
            .into_iter()
            .map(|(queue, _, count)| (queue, count))
            .collect();
        let queues: BTreeSet<&QueueName> =
            rebuilding.shards.keys().map(|shard| &shard.queue).collect();
        let count = |queue: &QueueName| {
            counts
                .get(queue.as_str())
                .map_or(0, |count| (*count).max(0) as u64)
        };
        let counted = |queue: &QueueName| (queue.clone(), count(queue));
        rebuilding.queues = queues.into_iter().map(counted).collect();
        rebuilding.queues.sort_by_key(|(_, count)| *count);
    }
    Ok(rebuilding)
}

/// One walk covers all shards of a queue. No index begins with queue and shard, so a walk for each
/// shard would also read the whole queue.
pub(crate) async fn rebuild_page<DB: Backend>(
    sql: &Runner<DB>,
    of: &Rebuilding,
    after: Option<&Walked>,
    limit: u32,
) -> Result<RebuildPage> {
    const NAME: &str = "rebuild_page";
    let Some(upto) = &of.upto else {
        return Ok(RebuildPage::default());
    };
    let walk = Walk {
        name: NAME,
        queues: &of.queues,
        after,
        upto,
    };
    // The index covers these columns.
    let read = walk
        .page::<_, Listed>(sql, "id, queue, shard, on_bus", limit as usize, place)
        .await?;
    let (mut next, mut of_shards) = (read.next, Vec::with_capacity(read.rows.len()));
    for (id, queue, shard, on_bus) in read.rows {
        let shard = ShardId {
            queue: queue_name(&queue)?,
            number: number(shard)?,
        };
        if on_bus != 0 && of.shards.contains_key(&shard) {
            of_shards.push(Walked {
                queue: shard.queue,
                id: task_id(&id)?,
            });
        }
    }
    let (mut page, mut bytes, mut fit) = (
        RebuildPage::default(),
        0,
        Vec::with_capacity(of_shards.len()),
    );
    'page: for some in of_shards.chunks(WEIGHED_AT_ONCE) {
        let weigh = Statement::new(
            "SELECT id, completed, LENGTH(task_key) + LENGTH(headers) + LENGTH(payload) FROM tasks WHERE id IN ",
        );
        let ids: Vec<TaskId> = some.iter().map(|walked| walked.id).collect();
        let weights = sql
            .read::<(Vec<u8>, i64, i64)>(NAME, weigh.list(&ids))
            .await?;
        for walked in some {
            if bytes >= PAGE_BYTES {
                next = fit.last().cloned();
                break 'page;
            }
            if let Some((_, completed, weight)) =
                weights.iter().find(|(id, ..)| *id == walked.id.as_bytes())
            {
                bytes += number::<usize>(*weight)?;
                page.credited += number::<u64>(*completed)?;
                fit.push(walked.clone());
            }
        }
    }
    page.next = next;
    page.tasks = unfinished(sql, NAME, &fit).await?;
    Ok(page)
}

/// Raises the generations and marks the shards in one step, so that a shard that is opened in Redis
/// afterwards is already marked.
pub(crate) async fn begin<S: Session>(
    session: &mut S,
    lost: &[(ShardId, u64)],
) -> Result<Vec<u64>> {
    let version = next_version(session).await?;
    let mut generations = Vec::with_capacity(lost.len());
    for (shard, from) in lost {
        let raise =
            Statement::new("UPDATE shards SET life = ?, closed = 0, version = ?, rebuilding = 1");
        session
            .execute(in_generation(
                raise.bind(from + 1).bind(version),
                shard,
                *from,
            ))
            .await?;
        generations.push(find(session, shard).await?.generation);
    }
    Ok(generations)
}

/// Those of these tasks that are unfinished, in the same order.
async fn unfinished<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    walked: &[Walked],
) -> Result<Vec<TaskRow>> {
    let ids: Vec<TaskId> = walked.iter().map(|walked| walked.id).collect();
    let mut tasks: Vec<TaskRow> = Vec::with_capacity(ids.len());
    for ids in lists(&ids) {
        let found = sql
            .read::<entries::UnfinishedColumns>(operation, entries::tasks(ids))
            .await?;
        for columns in found.into_iter().filter(|columns| !columns.is_final()) {
            tasks.push(columns.task.try_into()?);
        }
    }
    let turns: HashMap<TaskId, usize> = ids.into_iter().zip(0..).collect();
    tasks.sort_unstable_by_key(|task| turns.get(&task.id).copied());
    Ok(tasks)
}

/// Removes the marks and stores the offsets. A shard that was lost again in the meantime keeps its
/// mark.
pub(crate) async fn end<S: Session>(
    session: &mut S,
    generation: &str,
    rebuilt: &[Rebuilt],
) -> Result<()> {
    for Rebuilt {
        shard,
        generation: of_shard,
        offset,
    } in rebuilt
    {
        let mut end = Statement::new("UPDATE shards SET rebuilding = 0");
        if let Some(Offset { major, minor }) = *offset {
            end = end.sql(", rebuilt_generation = ?, rebuilt_major = ?, rebuilt_minor = ?");
            end = end.bind(generation.to_owned()).bind(major).bind(minor);
        }
        session
            .execute(in_generation(end, shard, *of_shard).sql(" AND rebuilding = 1"))
            .await?;
    }
    Ok(())
}
