//! All shards that ever existed, and whether each is open. The column `life` has a shard's
//! generation.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    model::{Offset, QueueName, ShardId},
    store::{
        Error, Opening, Result, StoredShard,
        sql::{
            backend::Backend,
            dialect::Dialect,
            meta,
            rows::{corrupt, number, queue_name},
            runner::Runner,
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

pub(crate) async fn shards<DB: Backend>(
    sql: &Runner<DB>,
    changed_after: Option<u64>,
) -> Result<Vec<StoredShard>> {
    let statement = changed_after.map_or_else(all_open, changed::<DB::Connection>);
    sql.read::<ShardColumns>("shards", statement)
        .await?
        .into_iter()
        .map(StoredShard::try_from)
        .collect()
}

/// The columns of a [`StoredShard`].
type ShardColumns = (String, i64, i64, i64, i64);

impl TryFrom<ShardColumns> for StoredShard {
    type Error = Error;

    fn try_from((queue, shard, generation, closed, version): ShardColumns) -> Result<Self> {
        let id = ShardId {
            queue: queue_name(&queue)?,
            number: number(shard)?,
        };
        Ok(Self {
            id,
            generation: number(generation)?,
            is_open: closed == 0,
            version: number(version)?,
        })
    }
}

fn select<'a>() -> Statement<'a> {
    Statement::new("SELECT queue, shard, life, closed, version FROM shards ")
}

/// The open shards, by queue and number.
fn all_open<'a>() -> Statement<'a> {
    select().sql("WHERE closed = 0 ORDER BY queue, shard")
}

/// The shards that changed after `version`.
fn changed<'a, S: Session>(version: u64) -> Statement<'a> {
    select()
        .sql(&S::by_index("shards_version"))
        .sql(" WHERE version > ? ORDER BY version")
        .bind(version)
}

/// Increments and returns the version of the shards.
///
/// Its row stays locked until the transaction ends, so that versions become visible in order.
pub(crate) async fn next_version<S: Session>(session: &mut S) -> Result<u64> {
    meta::raise(session, "shards_version").await?;
    meta::value(session, "shards_version").await
}

/// Opens the shards that are not open.
pub(crate) async fn open<S: Session>(session: &mut S, shards: &[ShardId]) -> Result<Vec<Opening>> {
    let version = next_version(session).await?;
    let mut sorted: Vec<&ShardId> = shards.iter().collect();
    sorted.sort_unstable();
    sorted.dedup();
    for piece in pieces(&sorted, |_| 0) {
        let rows = piece.iter().map(|id| {
            [
                (&id.queue).into(),
                id.number.into(),
                1_u32.into(),
                version.into(),
            ]
        });
        let add = Statement::new("INSERT INTO shards (queue, shard, life, version)").values(rows);
        session.execute(add.sql(&S::keep_first("life"))).await?;
    }
    let mut found = HashMap::new();
    for (number, queues) in by_number(sorted) {
        for queues in lists(&queues) {
            let reopen =
                Statement::new("UPDATE shards SET life = life + 1, closed = 0, version = ?")
                    .bind(version)
                    .sql(" WHERE closed = 1 AND shard = ? AND queue IN ")
                    .bind(number)
                    .list(queues);
            session.execute(reopen).await?;
            let now = select()
                .sql("WHERE shard = ? AND queue IN ")
                .bind(number)
                .list(queues);
            for columns in session.fetch::<ShardColumns>(now).await? {
                let shard = StoredShard::try_from(columns)?;
                found.insert(
                    shard.id,
                    Opening {
                        generation: shard.generation,
                        is_new: shard.version == version,
                    },
                );
            }
        }
    }
    let opening = |id| {
        found
            .get(id)
            .copied()
            .ok_or_else(|| corrupt(format!("no shard {id}")))
    };
    shards.iter().map(opening).collect()
}

/// Closes the shard if it has this generation. Returns whether it is now closed in this generation.
pub(crate) async fn close<S: Session>(
    session: &mut S,
    shard: &ShardId,
    generation: u64,
) -> Result<bool> {
    let version = next_version(session).await?;
    let close = Statement::new("UPDATE shards SET closed = 1, version = ?").bind(version);
    session
        .execute(in_generation(close, shard, generation))
        .await?;
    let now = find(session, shard).await?;
    Ok(!now.is_open && now.generation == generation)
}

/// Completes a statement that changes the shard, so that it only applies in this generation.
pub(crate) fn in_generation<'a>(
    change: Statement<'a>,
    shard: &'a ShardId,
    generation: u64,
) -> Statement<'a> {
    let of_shard = change
        .sql(" WHERE queue = ? AND shard = ?")
        .bind(&shard.queue)
        .bind(shard.number);
    of_shard.sql(" AND life = ?").bind(generation)
}

pub(crate) async fn find<S: Session>(session: &mut S, shard: &ShardId) -> Result<StoredShard> {
    let now = select()
        .sql("WHERE queue = ? AND shard = ?")
        .bind(&shard.queue)
        .bind(shard.number);
    let found: Option<ShardColumns> = session.fetch(now).await?.into_iter().next();
    found
        .ok_or_else(|| corrupt("no row of a shard that was just written"))?
        .try_into()
}

/// The queues of these shards, by shard number.
pub(crate) fn by_number<'a>(
    shards: impl IntoIterator<Item = &'a ShardId>,
) -> BTreeMap<u32, Vec<&'a QueueName>> {
    let mut by_number: BTreeMap<u32, Vec<&QueueName>> = BTreeMap::new();
    shards
        .into_iter()
        .for_each(|id| by_number.entry(id.number).or_default().push(&id.queue));
    by_number
}

/// The offsets at which a rebuild published the tasks of these shards, in this generation of the
/// topic.
pub(crate) async fn rebuilt_places<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    generation: &str,
    shards: &BTreeSet<&ShardId>,
) -> Result<HashMap<ShardId, Offset>> {
    let mut places = HashMap::new();
    for (number_, queues) in by_number(shards.iter().copied()) {
        for queues in lists(&queues) {
            let place = Statement::new("SELECT queue, rebuilt_major, rebuilt_minor FROM shards ")
                .sql(DB::Connection::BY_PRIMARY_KEY)
                .sql(" WHERE rebuilt_generation = ? AND shard = ?")
                .bind(generation.to_owned())
                .bind(number_)
                .sql(" AND queue IN ")
                .list(queues);
            for (queue, major, minor) in sql.read::<(String, i64, i64)>(operation, place).await? {
                let shard = ShardId {
                    queue: queue_name(&queue)?,
                    number: number_,
                };
                places.insert(
                    shard,
                    Offset {
                        major: number(major)?,
                        minor: number(minor)?,
                    },
                );
            }
        }
    }
    Ok(places)
}
