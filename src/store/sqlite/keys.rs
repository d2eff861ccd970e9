//! Finds the task that owns a key, without an index in which every insert would hit a random page.
//!
//! Keys are hashes. In an index with millions of them, each key would be on a different page, which
//! would cost more than the rest of the insert. So the latest keys are kept in memory, sorted (the
//! idea of a log-structured merge tree: O'Neil et al., 1996). Each transaction appends one row with
//! all of its keys to `new_keys`, from which a start reads them. When there are [`MOST`] keys, they
//! move to `seen` in the order of that table, where several of them share a page. A few move with
//! each insert, in its transaction, so that nobody waits for all of them. A filter
//! ([`super::known`]) tells which keys may be in `seen`.
//!
//! Only one thread of one process writes at a time, so the keys in memory can decide which keys are
//! new. `PRAGMA data_version` tells whether another process has written since; if so, its rows of
//! `new_keys` are read first.
//!
//! Crash windows: a key and its task are committed together. If the process is killed during a
//! move, the rows of `new_keys` still exist, because they are deleted last. The next start moves
//! their keys again, which changes nothing.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::Arc,
};

use parking_lot::RwLock;
use rusqlite::Connection as Db;

use super::known::Known;
use crate::{
    model::{KeyHash, TaskId},
    store::sql::Recent,
};

/// How many keys to keep in memory before they move. This takes about 30 MB. While they move, up to
/// half as many new ones accumulate.
pub(super) const MOST: usize = 400_000;
/// The minimum number of keys to move at a time. Each changes a page, or half a page in a table of
/// ten million keys.
const STEP: usize = 128;
/// How many keys to move in one transaction at a start.
const AT_START: usize = 20_000;
/// The size of a key and its task in a row of `new_keys`, in bytes.
const PAIR: usize = 32 + 16;

/// The keys in memory. The writer changes them after each commit, and readers look keys up.
#[derive(Default)]
pub(super) struct Latest {
    new: BTreeMap<KeyHash, TaskId>,
    /// The keys that are moving to `seen`. They stay until all of them are there.
    moving: BTreeMap<KeyHash, TaskId>,
    /// The last row of `new_keys` whose keys are here.
    last_row: i64,
    /// How often the writing connection was opened.
    lives: u64,
}

impl Latest {
    pub(super) fn owner(&self, key: &KeyHash) -> Option<TaskId> {
        self.new.get(key).or_else(|| self.moving.get(key)).copied()
    }

    /// The tasks that own these keys. The remaining keys may be in `seen`.
    pub(super) fn recent(&self, keys: &[KeyHash]) -> Recent {
        let mut recent = Recent::default();
        for key in keys {
            match self.owner(key) {
                Some(id) => drop(recent.owners.insert(*key, id)),
                None => recent.others.push(*key),
            }
        }
        recent
    }

    /// Forgets all keys, because the writing connection is being opened again, and the file may not
    /// have everything that the previous connection added here.
    pub(super) fn begin_anew(&mut self) {
        *self = Self {
            lives: self.lives + 1,
            ..Self::default()
        };
    }

    /// Adds the keys that others have committed. Returns how many there are.
    pub(super) fn catch_up(latest: &RwLock<Self>, db: &Db) -> rusqlite::Result<usize> {
        let (known, lives) = {
            let latest = latest.read();
            (latest.last_row, latest.lives)
        };
        let mut select =
            db.prepare_cached("SELECT seq, keys FROM new_keys WHERE seq > ? ORDER BY seq")?;
        let rows = select.query_map((known,), |row| {
            Ok((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?))
        })?;
        let rows = rows.collect::<rusqlite::Result<Vec<_>>>()?;
        let (mut latest, mut count) = (latest.write(), 0);
        if latest.lives != lives {
            return Ok(0);
        }
        for (seq, keys) in rows {
            if seq > latest.last_row {
                latest.last_row = seq;
                count += keys.len() / PAIR;
                latest.new.extend(pairs(&keys));
            }
        }
        Ok(count)
    }
}

/// The keys as seen by the writing connection.
#[derive(Default)]
pub(super) struct Keys {
    latest: Arc<RwLock<Latest>>,
    known: Known,
    most: usize,
    /// SQLite's `data_version`. If it changes, another connection has written.
    version: Option<i64>,
    /// The last row of `new_keys` that this connection has seen.
    last_row: i64,
    /// The keys of transactions that are not committed yet.
    taken: Taken,
    /// The move in progress.
    moved: Option<Move>,
    /// The state of the move once the running transaction has committed.
    next: Option<Move>,
    /// The number of keys by which the move lags behind the inserts.
    owed: usize,
}

#[derive(Default)]
struct Taken {
    owners: HashMap<KeyHash, TaskId>,
    in_order: Vec<KeyHash>,
    last_row: Option<i64>,
}

/// The state of a move.
#[derive(Clone, Copy)]
enum Move {
    /// Keys up to this one are in `seen`.
    Keys {
        last: Option<KeyHash>,
        rows_to: i64,
    },
    /// All keys are in `seen`, and the rows of `new_keys` up to `from` are deleted.
    Rows {
        from: i64,
        rows_to: i64,
    },
    Done,
}

impl Keys {
    /// `most` is the number of keys to keep in memory before they move.
    pub(super) fn new(latest: &Arc<RwLock<Latest>>, known: Known, most: usize) -> Self {
        Self {
            latest: Arc::clone(latest),
            known,
            most,
            ..Self::default()
        }
    }

    /// Reads what others have committed, at the beginning of a transaction that writes.
    pub(super) fn begin(&mut self, db: &Db) -> rusqlite::Result<()> {
        let version = db
            .prepare_cached("PRAGMA data_version")?
            .query_row((), |row| row.get(0))?;
        if self.version != Some(version) {
            self.owed += 2 * Latest::catch_up(&self.latest, db)?;
            let last = db
                .prepare_cached("SELECT COALESCE(MAX(seq), 0) FROM new_keys")?
                .query_row((), |row| row.get(0))?;
            if self.version.replace(version).is_some() && last != self.last_row {
                // Other processes may have moved keys to `seen` that were never in this memory.
                self.known.give_up();
            }
            self.last_row = last;
        }
        Ok(())
    }

    /// The tasks that own these keys. The remaining keys may be in `seen`.
    pub(super) fn recent(&self, keys: &[KeyHash]) -> Recent {
        let mut recent = self.latest.read().recent(keys);
        if !self.taken.owners.is_empty() {
            recent.owners.extend(
                keys.iter()
                    .filter_map(|key| Some((*key, *self.taken.owners.get(key)?))),
            );
            recent
                .others
                .retain(|key| !self.taken.owners.contains_key(key));
        }
        self.known.retain(&mut recent.others);
        recent
    }

    /// Assigns the keys to these tasks, as part of the running transaction.
    pub(super) fn take(&mut self, db: &Db, keys: &[(KeyHash, TaskId)]) -> rusqlite::Result<()> {
        let mut row = Vec::with_capacity(PAIR * keys.len());
        for (key, id) in keys {
            row.extend_from_slice(&key.0);
            row.extend_from_slice(id.as_bytes());
        }
        db.prepare_cached("INSERT INTO new_keys (keys) VALUES (?)")?
            .execute([row])?;
        self.taken.last_row = Some(db.last_insert_rowid());
        self.taken.owners.extend(keys.iter().copied());
        self.taken.in_order.extend(keys.iter().map(|(key, _)| *key));
        Ok(())
    }

    /// The number of uncommitted keys, and the last row that has some. [`Self::give_back`] can
    /// return to this point.
    pub(super) fn taken(&self) -> (usize, Option<i64>) {
        (self.taken.in_order.len(), self.taken.last_row)
    }

    /// Forgets the keys taken after that point, because their transaction was rolled back. The
    /// number of its row becomes free again.
    pub(super) fn give_back(&mut self, (count, last_row): (usize, Option<i64>)) {
        for key in self.taken.in_order.drain(count..) {
            self.taken.owners.remove(&key);
        }
        self.taken.last_row = last_row;
    }

    /// Moves the keys of earlier runs if they fill the memory. Otherwise more and more of them
    /// would accumulate over runs that are too short to move them.
    pub(super) fn finish(&mut self, db: &Db) -> rusqlite::Result<()> {
        self.committed();
        while self.moved.is_some() {
            self.owed = AT_START;
            db.execute_batch("BEGIN IMMEDIATE")?;
            match self.step(db).and_then(|()| db.execute_batch("COMMIT")) {
                Ok(()) => self.committed(),
                Err(error) => {
                    self.undone();
                    return db.execute_batch("ROLLBACK").and(Err(error));
                }
            }
        }
        Ok(())
    }

    /// If a move is in progress, moves twice as many keys as the running transaction took.
    pub(super) fn step(&mut self, db: &Db) -> rusqlite::Result<()> {
        let Some(moved) = self.moved else {
            return Ok(());
        };
        self.owed += 2 * self.taken.in_order.len();
        if self.owed < STEP.min(self.most / 8) {
            return Ok(());
        }
        let count = std::mem::take(&mut self.owed);
        self.next = Some(match moved {
            Move::Keys { last, rows_to } => self.move_keys(db, last, rows_to, count)?,
            Move::Rows { from, rows_to } => {
                // Rows are deleted faster than they are added, so that memory never stays full.
                let until = rows_to.min(from.saturating_add(4 * count as i64));
                // The last row stays, so that no number is used twice.
                db.prepare_cached(
                    "DELETE FROM new_keys WHERE seq <= ? AND seq < (SELECT MAX(seq) FROM new_keys)",
                )?
                .execute([until])?;
                if until < rows_to {
                    Move::Rows {
                        from: until,
                        rows_to,
                    }
                } else {
                    Move::Done
                }
            }
            Move::Done => Move::Done,
        });
        Ok(())
    }

    fn move_keys(
        &self,
        db: &Db,
        last: Option<KeyHash>,
        rows_to: i64,
        count: usize,
    ) -> rusqlite::Result<Move> {
        // If somebody deleted a task from the file, its key may belong to another task by now.
        let mut insert = db.prepare_cached(
            "INSERT INTO seen (key_hash, task_id, status) VALUES (?, ?, 0) \
             ON CONFLICT (key_hash) DO UPDATE SET task_id = excluded.task_id WHERE status = 0",
        )?;
        let behind = last.map_or(Bound::Unbounded, Bound::Excluded);
        let next: Vec<(KeyHash, TaskId)> = {
            let latest = self.latest.read();
            latest
                .moving
                .range((behind, Bound::Unbounded))
                .take(count)
                .map(|(key, id)| (*key, *id))
                .collect()
        };
        self.known.add(next.iter().map(|(key, _)| key));
        for (key, id) in &next {
            insert.execute((&key.0[..], &id.as_bytes()[..]))?;
        }
        if next.len() == count {
            return Ok(Move::Keys {
                last: next.last().map(|(key, _)| *key),
                rows_to,
            });
        }
        let first: Option<i64> =
            db.query_row("SELECT MIN(seq) FROM new_keys", (), |row| row.get(0))?;
        Ok(Move::Rows {
            from: first.map_or(rows_to, |first| first - 1),
            rows_to,
        })
    }

    /// The transactions have been committed.
    pub(super) fn committed(&mut self) {
        let Taken {
            owners, last_row, ..
        } = std::mem::take(&mut self.taken);
        self.last_row = last_row.unwrap_or(self.last_row);
        let mut latest = self.latest.write();
        latest.last_row = latest.last_row.max(self.last_row);
        latest.new.extend(owners);
        match self.next.take() {
            Some(Move::Done) => self.moved = None,
            Some(next) => self.moved = Some(next),
            None => {}
        }
        let is_full = latest.new.len() >= self.most;
        match self.moved {
            Some(Move::Rows { .. }) => {
                let moved = std::mem::take(&mut latest.moving);
                // Free the memory after the lock is released, so that readers do not wait for it.
                drop(latest);
                drop(moved);
            }
            None if is_full => {
                latest.moving = std::mem::take(&mut latest.new);
                (self.moved, self.owed) = (
                    Some(Move::Keys {
                        last: None,
                        rows_to: latest.last_row,
                    }),
                    0,
                );
            }
            _ => {}
        }
    }

    /// The transactions have been rolled back.
    pub(super) fn undone(&mut self) {
        (self.taken, self.next) = (Taken::default(), None);
    }
}

/// Decodes the keys and tasks of a row of `new_keys`.
fn pairs(row: &[u8]) -> impl Iterator<Item = (KeyHash, TaskId)> {
    row.chunks_exact(PAIR).filter_map(|pair| {
        let (key, id) = pair.split_at_checked(32)?;
        Some((KeyHash(key.try_into().ok()?), TaskId::from_slice(id)?))
    })
}

#[cfg(test)]
mod tests;
