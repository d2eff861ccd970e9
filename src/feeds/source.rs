//! What a source is, of whatever kind.

use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use redis::RedisError;

use crate::{
    model::{Offset, QueueName},
    redis_pool::{self, Redis},
};

/// Why a feed cannot go on. The same call may succeed later.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot connect: {0}")]
    Connect(#[source] redis_pool::Error),
    #[error(
        "url names no Redis that a feed can read: expected redis://HOST:PORT, rediss://HOST:PORT or unix:///SOCKET"
    )]
    Url,
    /// The source does not know this reader any more: it has probably lost its data.
    #[error("the source has forgotten this reader, and is read as a new one")]
    Forgotten,
    /// [`Feed::open`] comes first.
    #[error("the feed is closed, and connects again")]
    Closed,
    /// The next read asks for one record.
    #[error(
        "the source did not answer in time: fewer records are read at once now; lower count if this stays"
    )]
    Slow,
    #[error(transparent)]
    Redis(#[from] RedisError),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A record that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedRecord {
    /// Which one it is. Its major part is the time of the record, if the source has one.
    pub reference: Offset,
    /// It was handed out before, so it may be stored already.
    pub may_be_repeated: bool,
    /// `None`: the source has only its reference left.
    pub content: Option<FeedContent>,
}

/// What a record says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeedContent {
    pub payload: Bytes,
    /// Names and values, which become headers.
    pub attributes: Vec<(String, Bytes)>,
}

/// Records that other readers had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// They are this reader's now.
    pub records: Vec<FeedRecord>,
    /// They become tasks of these queues, and are acknowledged then.
    pub to_queues: Vec<(QueueName, FeedRecord)>,
    /// There may be more.
    pub is_more: bool,
    /// Why the rule of some record could not be applied. The record stays with its reader.
    pub failed: Option<String>,
}

/// How many records are asked for at once. One after a read that took too long, because pages are
/// bounded by number only, and then more with each page.
pub(super) struct AtOnce {
    most: u32,
    now: AtomicU32,
}

impl AtOnce {
    pub(super) fn new(most: u32) -> Self {
        Self {
            most,
            now: AtomicU32::new(most),
        }
    }

    pub(super) fn get(&self) -> u32 {
        self.now.load(Ordering::Relaxed)
    }

    pub(super) fn shrink(&self) {
        self.now.store(1, Ordering::Relaxed);
    }

    pub(super) fn grow(&self) {
        let more = self.get().saturating_mul(2).min(self.most);
        self.now.store(more, Ordering::Relaxed);
    }
}

/// A source. `tests/it/feeds.rs` has the contract that all kinds fulfil.
#[async_trait]
pub trait Feed: Send + Sync {
    /// Connects, and returns whether the source knows this reader. If it does not, all its records
    /// are new, whatever their references, and [`Self::begin`] comes next.
    ///
    /// From then on [`Self::next`] returns all records again that are not acknowledged, and then the
    /// others.
    async fn open(&self) -> Result<bool>;

    /// Makes the source know this reader. Does nothing if it does.
    async fn begin(&self) -> Result<()>;

    /// Returns the next records, or none after a while. After an error, [`Self::open`] comes next.
    async fn next(&self) -> Result<Vec<FeedRecord>>;

    /// Acknowledges records: they never come again. Returns how many were not acknowledged before.
    async fn ack(&self, references: &[Offset]) -> Result<u64>;

    /// Tells the source that this reader still works on all records that it has, so that no other
    /// one gets them.
    async fn keep(&self) -> Result<()>;

    /// Does what the settings say with records that other readers have had for long. Returns those
    /// that this reader has now.
    async fn take_over(&self) -> Result<TakenOver> {
        Ok(TakenOver::default())
    }

    /// Returns how many records are not read yet; `None` if the source does not know.
    async fn health(&self) -> Result<Option<u64>>;

    /// Disconnects.
    async fn close(&self);
}

pub(super) async fn connect(url: &str) -> Result<Redis> {
    let connected = Redis::connect(url, "").await;
    connected.map_err(Error::Connect)
}
