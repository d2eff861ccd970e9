//! Reads published tasks that are unfinished, and their offsets.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    model::{Offset, ShardId, TaskId},
    store::{
        PublishedTask, Result, Stretch, Turn, WalkedPage,
        sql::{
            backend::Backend,
            dialect::Dialect,
            outbox::{
                batches, shards,
                walk::{QUEUES, Walk},
            },
            queue_counts::{self, CountColumns},
            rows::{number, queue_name, task_id},
            runner::Runner,
            statement::{Statement, lists},
        },
    },
};

/// Id, queue, shard, batch, and the offset of the task itself: topic generation, major, minor.
type PublishedColumns = (Vec<u8>, String, i64, i64, String, i64, i64);

/// On SQLite, the index of unfinished tasks covers these columns.
const WALKED: &str = "queue, id, on_bus, shard";

type WalkedColumns = (String, Vec<u8>, i64, i64);

const PUBLISHED_NAME: &str = "published";

const PUBLISHED: &str = "id, queue, shard, insertion, pub_generation, pub_major, pub_minor";

pub(crate) async fn on_bus<DB: Backend>(
    sql: &Runner<DB>,
    stretch: Stretch<'_>,
    limit: u32,
) -> Result<WalkedPage> {
    const NAME: &str = "walk_on_bus";
    let Stretch { queue, after, upto } = stretch;
    let queues = match queue {
        Some(queue) => vec![(queue.clone(), 0)],
        None => {
            let first = after.map_or("", |after| after.queue.as_str());
            let found = queue_counts::queues_from::<DB::Connection>(first, QUEUES + 1);
            let found: Vec<CountColumns> = sql.read(NAME, found).await?;
            let counted =
                |(queue, _, count): CountColumns| Ok((queue_name(&queue)?, count.max(0) as u64));
            found.into_iter().map(counted).collect::<Result<_>>()?
        }
    };
    let walk = Walk {
        name: NAME,
        queues: &queues,
        after,
        upto: &upto,
    };
    let page = walk
        .page::<_, WalkedColumns>(sql, WALKED, limit as usize, |row| (&row.0, &row.1))
        .await?;
    let mut tasks = BTreeMap::<ShardId, Vec<TaskId>>::new();
    for of_queue in page.rows.chunk_by(|row, next| row.0 == next.0) {
        let queue = queue_name(&of_queue[0].0)?;
        for (_, id, _, shard) in of_queue.iter().filter(|row| row.2 != 0) {
            let shard = ShardId {
                queue: queue.clone(),
                number: number(*shard)?,
            };
            tasks.entry(shard).or_default().push(task_id(id)?);
        }
    }
    Ok(WalkedPage {
        tasks,
        next: page.next,
    })
}

/// The condition that a task is on the bus and not in a batch that is still to be published.
fn published_sql<DB: Backend>() -> String {
    let by_key = DB::Connection::BY_PRIMARY_KEY;
    // Do not use EXISTS here: MariaDB might turn it into a join that reads all batches.
    let of_batch = format!("(SELECT generation FROM batches {by_key} WHERE batch = insertion)");
    format!("on_bus = 1 AND (pub_generation <> '' OR COALESCE({of_batch}, 'none') <> '')")
}

pub(crate) async fn published_among<DB: Backend>(
    sql: &Runner<DB>,
    generation: &str,
    ids: &[TaskId],
) -> Result<Vec<PublishedTask>> {
    let mut found = Vec::new();
    for ids in lists(ids) {
        let (by_key, published_sql) = (DB::Connection::BY_PRIMARY_KEY, published_sql::<DB>());
        let some =
            format!("SELECT {PUBLISHED} FROM tasks {by_key} WHERE {published_sql} AND id IN ");
        let some = Statement::new(some).list(ids);
        found.extend(sql.read(PUBLISHED_NAME, some).await?);
    }
    with_places(sql, generation, found).await
}

async fn with_places<DB: Backend>(
    sql: &Runner<DB>,
    generation: &str,
    page: Vec<PublishedColumns>,
) -> Result<Vec<PublishedTask>> {
    const NAME: &str = PUBLISHED_NAME;
    let batches: BTreeSet<Turn> = page
        .iter()
        .map(|columns| Turn(columns.3))
        .filter(|turn| turn.is_batch())
        .collect();
    let batches = batches::places_of(sql, NAME, generation, &Vec::from_iter(batches)).await?;
    let published = |(id, queue, shard, batch, at, major, minor): PublishedColumns| {
        let shard = ShardId {
            queue: queue_name(&queue)?,
            number: number(shard)?,
        };
        let own = Offset {
            major: number(major)?,
            minor: number(minor)?,
        };
        let own = (at == generation).then_some(own);
        let of_batch = batches
            .get(&Turn(batch))
            .and_then(|places| places.get(&shard.number))
            .copied();
        Ok(PublishedTask {
            id: task_id(&id)?,
            shard,
            offset: own.max(of_batch),
        })
    };
    let mut page = page
        .into_iter()
        .map(published)
        .collect::<Result<Vec<_>>>()?;
    let of_page: BTreeSet<&ShardId> = page.iter().map(|task| &task.shard).collect();
    let rebuilt = shards::rebuilt_places(sql, NAME, generation, &of_page).await?;
    // A task that came back may have several offsets. The latest one counts: the task is at or
    // before it.
    page.iter_mut()
        .for_each(|task| task.offset = task.offset.max(rebuilt.get(&task.shard).copied()));
    Ok(page)
}
