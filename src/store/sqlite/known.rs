//! A filter of the keys in `seen`, so that an insert need not look up a key that is new.
//!
//! It consists of Bloom filters (B. H. Bloom, Space/time trade-offs in hash coding, 1970), each for
//! twice as many keys as the one before. A thread reads the existing keys after a start. Until it
//! has finished, every key may be in `seen`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use fastbloom::BloomFilter;
use parking_lot::Mutex;
use rusqlite::{Connection as Db, OptionalExtension};

use crate::model::KeyHash;

/// The number of keys in the first filter, which takes 1.5 MB.
const FIRST: usize = 1 << 20;
/// With 12 bits per key, the filter has 0.3 % false positives.
const BITS: usize = 12;
/// The number of keys to read at a time.
const PAGE: u32 = 10_000;

/// The filter. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Known(Arc<Mutex<Filters>>);

#[derive(Default)]
struct Filters {
    all: Vec<BloomFilter>,
    /// How many more keys fit into the last filter.
    room: usize,
    state: State,
}

#[derive(Default, PartialEq, Eq)]
enum State {
    /// Some keys of `seen` are not in the filter yet.
    #[default]
    InPart,
    Whole,
    GivenUp,
}

impl Filters {
    fn may_have(&self, key: &[u8; 32]) -> bool {
        self.all.iter().any(|filter| filter.contains(key))
    }

    fn add<'k>(&mut self, keys: impl Iterator<Item = &'k [u8; 32]>) {
        if self.state == State::GivenUp {
            return;
        }
        for key in keys {
            // Keys of a transaction that was rolled back are added again.
            if self.may_have(key) {
                continue;
            }
            if self.room == 0 {
                self.room = FIRST << self.all.len();
                let bits = BloomFilter::with_num_bits(BITS * self.room).seed(&0);
                self.all.push(bits.expected_items(self.room));
            }
            if let Some(last) = self.all.last_mut() {
                last.insert(key);
            }
            self.room -= 1;
        }
    }
}

impl Known {
    /// A filter that never excludes a key.
    pub(super) fn of_every_key() -> Self {
        let known = Self::default();
        known.give_up();
        known
    }

    /// Adds keys that are being moved to `seen`.
    pub(super) fn add<'k>(&self, keys: impl Iterator<Item = &'k KeyHash>) {
        self.0.lock().add(keys.map(|key| &key.0));
    }

    /// Drops the keys that are certainly not in `seen`.
    pub(super) fn retain(&self, keys: &mut Vec<KeyHash>) {
        let filters = self.0.lock();
        if filters.state == State::Whole {
            keys.retain(|key| filters.may_have(&key.0));
        }
    }

    /// From now on every key may be in `seen`, because somebody else has written to the file.
    pub(super) fn give_up(&self) {
        *self.0.lock() = Filters {
            state: State::GivenUp,
            ..Filters::default()
        };
    }

    fn mark_complete(&self) {
        let mut filters = self.0.lock();
        if filters.state == State::InPart {
            filters.state = State::Whole;
        }
    }

    /// Reads a page of the keys after `behind`. Returns the last of them.
    fn read_page(&self, db: &Db, behind: Option<[u8; 32]>) -> rusqlite::Result<Option<[u8; 32]>> {
        let select = "SELECT key_hash FROM seen WHERE key_hash > ? ORDER BY key_hash LIMIT ?";
        let mut select = db.prepare_cached(select)?;
        let behind = behind.as_ref().map_or(&[][..], |behind| behind);
        let keys = select.query_map((behind, PAGE), |row| row.get::<_, [u8; 32]>(0))?;
        let keys = keys.collect::<rusqlite::Result<Vec<_>>>()?;
        self.0.lock().add(keys.iter());
        Ok(keys.last().copied())
    }

    fn read(&self, db: &Db, is_stopped: &AtomicBool) -> rusqlite::Result<()> {
        let mut behind = None;
        while !is_stopped.load(Ordering::Relaxed) {
            behind = self.read_page(db, behind)?;
            if behind.is_none() {
                self.mark_complete();
                return Ok(());
            }
        }
        Ok(())
    }
}

/// The thread that reads the existing keys after a start.
pub(super) struct Reading {
    is_stopped: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reading {
    /// Starts the thread, unless there is nothing to read. It opens its own connection; if that
    /// fails, inserts look up all keys.
    pub(super) fn start(
        known: Known,
        db: &Db,
        open: impl FnOnce() -> rusqlite::Result<Db> + Send + 'static,
    ) -> std::io::Result<Self> {
        let is_stopped = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&is_stopped);
        let some = db
            .query_row("SELECT 1 FROM seen LIMIT 1", (), |_| Ok(()))
            .optional();
        if matches!(some, Ok(None)) {
            known.mark_complete();
            return Ok(Self {
                is_stopped,
                thread: Mutex::default(),
            });
        }
        let thread = thread::Builder::new()
            .name("taskd-sqlite-keys".into())
            .spawn(move || {
                if let Err(error) = open().and_then(|db| known.read(&db, &stopped)) {
                    tracing::warn!(
                        "no filter of old keys, each insert looks for them in SQLite: {error}"
                    );
                }
            })?;
        Ok(Self {
            is_stopped,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Stops the thread and waits for it.
    pub(super) async fn close(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && let Ok(Err(_)) = tokio::task::spawn_blocking(|| thread.join()).await
        {
            tracing::error!("a thread of SQLite panicked");
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }
}
