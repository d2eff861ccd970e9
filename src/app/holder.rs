//! One Redis per database: a row names the Redis that holds the tasks of this database.
//!
//! The ownership key protects a Redis from a second database. This row protects a database from a
//! second Redis, which a single process with a wrong `redis_url` would bring: each would take the
//! tasks of the other for lost, and workers would get them twice. The processes of a Redis renew
//! the row as long as they run, so another Redis may follow when they have stopped.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::connect::Unreachable;
use crate::{
    coordination::{self, Coordination},
    runtime::{Loop, LoopError, Supervisor},
    store::{self, Store},
};

/// How often a process reads the row. It renews the row if nobody has since it last read it.
const RENEW_EVERY: Duration = Duration::from_secs(2);
/// When nobody has renewed the row for this long, the processes of its Redis have stopped.
const SILENCE: Duration = Duration::from_secs(5);
/// How long a starting process watches the row of another Redis. A process whose Redis was emptied
/// may renew the row in its old name for two more seconds.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "another taskd runs on this database with another Redis, and both would hand out its tasks; give all processes \
         the same --redis-url and --redis-prefix, or this one a database of its own"
    )]
    OfAnother,
    #[error("redis has forgotten its name")]
    Renamed,
    #[error(transparent)]
    Coordination(#[from] coordination::Error),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        matches!(self, Self::OfAnother | Self::Renamed)
    }
}

impl From<Error> for Unreachable {
    fn from(error: Error) -> Self {
        match error {
            Error::OfAnother => Self::Ever(error.into()),
            _ => Self::Yet(error.into()),
        }
    }
}

/// The value of the row: the name of a Redis, and how often its processes have renewed the row.
fn row(redis: &str, renewed: u64) -> String {
    format!("{redis} {renewed}")
}

fn parts(row: &str) -> (&str, u64) {
    let (redis, renewed) = row.split_once(' ').unwrap_or((row, ""));
    (redis, renewed.parse().unwrap_or(0))
}

/// What this process remembers, from round to round, of the Redis of its database.
#[derive(Default)]
pub(super) struct Holder {
    /// The name of Redis in the last round. If Redis has lost its data and got a new name, the
    /// process may take over the row that still has this one.
    last: Mutex<String>,
}

impl Holder {
    /// Writes the name of this Redis into the row. Fails if processes of another Redis keep
    /// renewing it.
    pub(super) async fn take(
        &self,
        store: &dyn Store,
        coordination: &Coordination,
    ) -> Result<(), Error> {
        let began = Instant::now();
        let mut looked = None::<(String, Instant)>;
        loop {
            let redis = coordination.redis_name().await?;
            let seen = store.holder().await?;
            let (holder, renewed) = parts(&seen);
            if holder == redis {
                *self.last.lock() = redis;
                return Ok(());
            }
            let is_free = holder.is_empty() || *self.last.lock() == holder;
            let is_silent =
                matches!(&looked, Some((row, at)) if *row == seen && at.elapsed() >= SILENCE);
            if is_free || is_silent {
                // If two processes get here, one of them writes. Both read the row again.
                store
                    .replace_holder(&seen, &row(&redis, renewed + 1))
                    .await?;
                continue;
            }
            if began.elapsed() >= PATIENCE {
                return Err(Error::OfAnother);
            }
            if looked.is_none() {
                let silence = humantime::format_duration(SILENCE);
                tracing::warn!(
                    "this database was used with another Redis: looking for {silence} if it still is"
                );
            }
            if looked.as_ref().is_none_or(|(row, _)| *row != seen) {
                looked = Some((seen, Instant::now()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Renews the row while this process runs. Ends the round if the row names another Redis, or
    /// Redis has another name.
    pub(super) fn keep(
        &self,
        store: &Arc<dyn Store>,
        coordination: &Coordination,
        supervisor: &Supervisor,
    ) {
        let redis: Arc<str> = self.last.lock().as_str().into();
        supervisor.spawn_loop(
            "holder",
            (redis, Arc::clone(store), coordination.clone()),
            renew,
        );
    }
}

async fn renew(
    (redis, store, coordination): (Arc<str>, Arc<dyn Store>, Coordination),
    cx: Loop,
) -> Result<(), Error> {
    let mut last = String::new();
    while cx.pause(RENEW_EVERY).await {
        // Asked each time: after Redis was emptied or set back, the row must not be renewed in the
        // name of the previous one.
        if *coordination.redis_name().await? != *redis {
            return Err(Error::Renamed);
        }
        let seen = store.holder().await?;
        let (holder, renewed) = parts(&seen);
        if holder != &*redis {
            return Err(Error::OfAnother);
        }
        let renewed = row(holder, renewed + 1);
        // If another process was first, its write serves as well.
        last = if seen == last && store.replace_holder(&seen, &renewed).await? {
            renewed
        } else {
            seen
        };
        cx.beat();
    }
    Ok(())
}
