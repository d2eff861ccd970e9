//! Idempotency keys: a repeated insert gets the answer of the first one.
//!
//! The transaction that stores a task first takes its idempotency key, so either both are stored or
//! neither. If inserts with the same key are concurrent, the unique index lets one of them take it,
//! and the others wait until that one ends. `created` says whether the task of the row was stored.
//! If it was a duplicate instead, a repeated insert looks up its task key again, which remains a
//! duplicate.

use std::collections::{BTreeMap, HashMap};

use crate::{
    model::{Idempotency, KeyHash, TaskId},
    store::{
        Inserted, NewRow, Result,
        sql::{
            backend::Backend,
            dialect::Dialect,
            rows::{corrupt, key_hash, task_id},
            runner::Runner,
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

/// What the idempotency keys of an insert decide about its rows.
#[derive(Default)]
pub(crate) struct Keys {
    /// The answers of the rows that are not inserted, by index.
    answers: HashMap<usize, Inserted>,
    /// Rows that repeat an earlier row of this insert, with the same key and the same task: index →
    /// index of the earlier row.
    followers: HashMap<usize, usize>,
    /// The rows that hold their key now.
    leaders: Vec<usize>,
}

/// The task that holds an idempotency key.
struct Holder {
    task: TaskId,
    fingerprint: Vec<u8>,
    expires_ms: i64,
    created: bool,
}

impl Holder {
    fn of(row: &NewRow, key: &Idempotency) -> Self {
        let (fingerprint, expires_ms) = (key.fingerprint.to_vec(), key.expires_unix_ms);
        Self {
            task: row.task.id,
            fingerprint,
            expires_ms,
            created: true,
        }
    }
}

impl Keys {
    /// The rows that still have to be inserted, so that their task keys decide about them.
    pub(crate) fn unanswered<'a>(&self, rows: &[&'a NewRow]) -> Vec<&'a NewRow> {
        let is_open = |place: &usize| {
            !self.answers.contains_key(place) && !self.followers.contains_key(place)
        };
        rows.iter()
            .enumerate()
            .filter(|(place, _)| is_open(place))
            .map(|(_, row)| *row)
            .collect()
    }

    /// Completes the answers of an insert, and records which of its tasks were duplicates.
    pub(crate) async fn finish<S: Session>(
        self,
        session: &mut S,
        rows: &[&NewRow],
        answers: &mut [Inserted],
    ) -> Result<()> {
        for (place, answer) in self.answers {
            answers[place] = answer;
        }
        for (place, leader) in self.followers {
            answers[place] = match answers[leader] {
                Inserted::New => Inserted::Repeated {
                    id: rows[leader].task.id,
                },
                known => known,
            };
        }
        let known = self
            .leaders
            .into_iter()
            .filter(|place| answers[*place] != Inserted::New);
        let mut known: Vec<KeyHash> = known
            .filter_map(|place| key_of(rows[place]).map(hash_of))
            .collect();
        known.sort_unstable();
        for hashes in lists(&known) {
            let statement =
                Statement::new("UPDATE idempotency_keys SET created = 0 WHERE hash IN ")
                    .list(hashes);
            session.execute(statement).await?;
        }
        Ok(())
    }
}

fn key_of(row: &NewRow) -> Option<&Idempotency> {
    row.task.idempotency.as_deref()
}

fn hash_of(key: &Idempotency) -> KeyHash {
    KeyHash(key.hash)
}

/// Takes the idempotency keys of new rows, and decides about rows whose keys were already taken.
/// Most inserts have no such keys.
pub(crate) async fn take<S: Session>(session: &mut S, rows: &[&NewRow]) -> Result<Keys> {
    let mut keys = Keys::default();
    // Sorted by hash, because every transaction takes them in this order.
    let mut first: BTreeMap<KeyHash, usize> = BTreeMap::new();
    for (place, row) in rows.iter().enumerate() {
        if let Some(key) = key_of(row) {
            first.entry(hash_of(key)).or_insert(place);
        }
    }
    if first.is_empty() {
        return Ok(keys);
    }
    let holders = holders(session, rows, &first).await?;
    for (place, row) in rows.iter().enumerate() {
        let Some(key) = key_of(row) else { continue };
        let (leader, holder) = (first[&hash_of(key)], &holders[&hash_of(key)]);
        if holder.fingerprint != key.fingerprint {
            keys.answers.insert(place, Inserted::KeyReused);
        } else if holder.task != rows[leader].task.id {
            // Otherwise the task key belongs to another task, so that inserting the row again
            // yields that duplicate again.
            if holder.created {
                keys.answers
                    .insert(place, Inserted::Repeated { id: holder.task });
            }
        } else if place == leader {
            keys.leaders.push(place);
        } else {
            keys.followers.insert(place, leader);
        }
    }
    Ok(keys)
}

/// Takes the keys that are free, and returns the holder of each key. Nobody else can take them
/// until the transaction ends.
async fn holders<S: Session>(
    session: &mut S,
    rows: &[&NewRow],
    first: &BTreeMap<KeyHash, usize>,
) -> Result<HashMap<KeyHash, Holder>> {
    let wanted: Vec<(&NewRow, &Idempotency)> = first
        .values()
        .filter_map(|place| Some((rows[*place], key_of(rows[*place])?)))
        .collect();
    let mut inserted = 0;
    for piece in pieces(&wanted, |_| 0) {
        let values = piece.iter().map(|(row, key)| {
            [
                (&key.hash[..]).into(),
                (&row.task.id).into(),
                (&key.fingerprint[..]).into(),
                key.expires_unix_ms.into(),
                true.into(),
            ]
        });
        let insert = Statement::new(
            "INSERT INTO idempotency_keys (hash, task_id, fingerprint, expires_ms, created)",
        );
        inserted += session
            .execute(insert.values(values).sql(&S::keep_first("created")))
            .await?;
    }
    let mut holders: HashMap<KeyHash, Holder> = wanted
        .iter()
        .map(|(row, key)| (hash_of(key), Holder::of(row, key)))
        .collect();
    if S::COUNTS_INSERTED && inserted == wanted.len() as u64 {
        return Ok(holders);
    }
    let hashes: Vec<KeyHash> = first.keys().copied().collect();
    let mut found = 0;
    for hashes in lists(&hashes) {
        let taken = Statement::new(
            "SELECT hash, task_id, fingerprint, expires_ms, created FROM idempotency_keys ",
        )
        .sql(S::BY_PRIMARY_KEY)
        .sql(" WHERE hash IN ")
        .list(hashes);
        for (hash, task, fingerprint, expires_ms, created) in session
            .fetch::<(Vec<u8>, Vec<u8>, Vec<u8>, i64, i64)>(taken)
            .await?
        {
            let holder = Holder {
                task: task_id(&task)?,
                fingerprint,
                expires_ms,
                created: created != 0,
            };
            holders.insert(key_hash(&hash)?, holder);
            found += 1;
        }
    }
    if found != hashes.len() {
        return Err(corrupt("an idempotency key without a row"));
    }
    // These keys have expired, but the watchdog has not removed them yet.
    for (row, key) in wanted {
        if holders
            .get(&hash_of(key))
            .is_some_and(|holder| holder.expires_ms <= row.task.created_unix_ms)
        {
            let replace = "UPDATE idempotency_keys SET task_id = ?, fingerprint = ?, expires_ms = ?, created = 1 \
                           WHERE hash = ?";
            let replace = Statement::new(replace)
                .bind(&row.task.id)
                .bind(&key.fingerprint[..])
                .bind(key.expires_unix_ms)
                .bind(&key.hash[..]);
            session.execute(replace).await?;
            holders.insert(hash_of(key), Holder::of(row, key));
        }
    }
    Ok(holders)
}

/// Removes idempotency keys whose windows have ended.
pub(crate) async fn remove_expired_keys<DB: Backend>(
    sql: &Runner<DB>,
    now_unix_ms: i64,
    limit: u32,
) -> Result<u64> {
    const NAME: &str = "remove_expired_keys";
    let expired = Statement::new("SELECT hash FROM idempotency_keys ")
        .sql(&DB::Connection::by_index("idempotency_keys_expire"))
        .sql(" WHERE expires_ms <= ? ORDER BY expires_ms LIMIT ?")
        .bind(now_unix_ms)
        .bind(limit);
    let expired = sql.read::<(Vec<u8>,)>(NAME, expired).await?;
    let mut hashes = expired
        .into_iter()
        .map(|(hash,)| key_hash(&hash))
        .collect::<Result<Vec<_>>>()?;
    if hashes.is_empty() {
        return Ok(0);
    }
    hashes.sort_unstable();
    sql.run(NAME, (hashes, now_unix_ms), |session, (hashes, now)| {
        Box::pin(remove(session, hashes, *now))
    })
    .await
}

async fn remove<S: Session>(session: &mut S, hashes: &[KeyHash], now_unix_ms: i64) -> Result<u64> {
    let mut removed = 0;
    for hashes in lists(hashes) {
        // An insert may have taken one of them again since it was read.
        let remove =
            Statement::new("DELETE FROM idempotency_keys WHERE expires_ms <= ? AND hash IN ")
                .bind(now_unix_ms)
                .list(hashes);
        removed += session.execute(remove).await?;
    }
    Ok(removed)
}
