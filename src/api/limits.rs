//! Limit keys of a queue, and their own limits.

use std::fmt;

use tracing::Instrument as _;

use super::{
    access::{reaches, who},
    error::Error,
    handle::{Api, span},
    query::{LISTED, bounded},
    reader::Reader,
};
use crate::{
    model::{
        ALL_LIMIT_KEYS, Act, Caller, LimitBy, LimitKeyPage, LimitKeyPages, LimitKeyState,
        LimitKeyView, LimitsCleared, MOST_AT_A_TIME, OwnLimits, QueueName, SetLimits, ShardId,
        check_limit_key,
    },
    queue::{self, LimitKey},
    store::LimitSetting,
};

/// The script calls of one page. A page may end early, because few limit keys match.
const CALLS_OF_PAGE: u32 = 20;

impl Api {
    /// Returns a page of the limit keys of a queue that are in a state.
    pub async fn limit_keys(
        &self,
        caller: &Caller,
        pages: &LimitKeyPages,
    ) -> Result<LimitKeyPage, Error> {
        let queue = queue_name(caller, &pages.queue)?;
        let state: LimitKeyState = pages.state.parse().map_err(Error::Invalid)?;
        let limit = bounded(pages.limit, LISTED)?;
        let query = self.query()?;
        let read = async {
            match state {
                LimitKeyState::Own => query.own_limits(&queue, &pages.cursor, limit).await,
                state => query.live_keys(&queue, state, &pages.cursor, limit).await,
            }
        };
        read.instrument(span("limit_keys", caller)).await
    }

    /// Returns one limit key.
    pub async fn limit_key(
        &self,
        caller: &Caller,
        queue: &str,
        limit_key: &str,
    ) -> Result<LimitKeyView, Error> {
        let queue = queue_name(caller, queue)?;
        check_limit_key(limit_key).map_err(Error::Invalid)?;
        let read = self.query()?.limit_key(&queue, limit_key);
        read.instrument(span("limit_key", caller)).await
    }

    /// Gives a limit key own limits, which replace those that it had. Answers once the shards know
    /// them; if one is away, it is told when it is back, by any process.
    pub async fn set_limits(
        &self,
        caller: &Caller,
        set: &SetLimits,
    ) -> Result<LimitKeyView, Error> {
        let queue = queue_name(caller, &set.queue)?;
        check_limit_key(&set.limit_key).map_err(Error::Invalid)?;
        let query = self.query()?;
        let settings = query.settings.queues.get(&queue);
        if settings.limit_by == LimitBy::Nothing {
            return Err(Error::Invalid(format!(
                "queue {queue} has no limit_by: its tasks have no limit keys"
            )));
        }
        let now = query.now_unix_ms();
        let has_pace = settings.limit_pace.0.is_some();
        let values = set.values(has_pace, now).map_err(Error::Invalid)?;
        let write = async {
            let act = act(caller, "set limits", &queue, &set.limit_key, now);
            let limits = OwnLimits {
                queue: queue.clone(),
                limit_key: set.limit_key.clone(),
                values,
                at_unix_ms: now,
                who: act.who.clone(),
            };
            match query.store().set_limits(&limits, &act).await? {
                LimitSetting::NoRoom => Err(Error::ManyOwnLimits),
                LimitSetting::Done | LimitSetting::Already => {
                    query.await_limits().await;
                    query.limit_key(&queue, &set.limit_key).await
                }
            }
        };
        write.instrument(span("set_limits", caller)).await
    }

    /// Removes the own limits of a limit key.
    pub async fn clear_limits(
        &self,
        caller: &Caller,
        queue: &str,
        limit_key: &str,
    ) -> Result<LimitsCleared, Error> {
        let queue = queue_name(caller, queue)?;
        check_limit_key(limit_key).map_err(Error::Invalid)?;
        let query = self.query()?;
        let write = async {
            let now = query.now_unix_ms();
            let act = act(caller, "clear limits", &queue, limit_key, now);
            let done = query.store().clear_limits(&queue, limit_key, now, &act);
            let changed = done.await? == LimitSetting::Done;
            query.await_limits().await;
            Ok(LimitsCleared {
                changed,
                queue: queue.clone(),
                limit_key: limit_key.to_owned(),
            })
        };
        write.instrument(span("clear_limits", caller)).await
    }
}

fn queue_name(caller: &Caller, queue: &str) -> Result<QueueName, Error> {
    let queue = QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?;
    reaches(caller, queue.as_str())?;
    Ok(queue)
}

fn act(caller: &Caller, what: &str, queue: &QueueName, limit_key: &str, now: i64) -> Act {
    Act::at_time(now, who(caller), what, &format!("{queue} {limit_key}"))
}

impl Reader {
    /// Waits until the shards know the change that was just made. It is in SQL, so this may fail.
    async fn await_limits(&self) {
        if let Ok(version) = self.store().limits_version().await {
            self.queue.await_limits(version).await;
        }
    }

    async fn own_limits(
        &self,
        queue: &QueueName,
        cursor: &str,
        limit: u32,
    ) -> Result<LimitKeyPage, Error> {
        let after = Some(cursor).filter(|cursor| !cursor.is_empty());
        let own = self.store().own_limits(queue, after, limit).await?;
        let cursor = (own.len() == limit as usize)
            .then(|| own.last().map(|last| last.limit_key.clone()))
            .flatten();
        let mut limits = Vec::with_capacity(own.len());
        for own in own {
            limits.push(self.with_live(own).await?);
        }
        Ok(LimitKeyPage { limits, cursor })
    }

    /// Own limits, with what Redis has of the limit key.
    async fn with_live(&self, own: OwnLimits) -> Result<LimitKeyView, Error> {
        let mut view = self.live_view(&own.queue, &own.limit_key).await?;
        view.own = Some(own.into());
        Ok(view)
    }

    async fn limit_key(&self, queue: &QueueName, limit_key: &str) -> Result<LimitKeyView, Error> {
        let mut view = self.live_view(queue, limit_key).await?;
        let own = self.store().own_limits_of(queue, limit_key).await?;
        view.own = own.map(Into::into);
        Ok(view)
    }

    /// What Redis has of the limit key; if it has nothing, the limits of the queue.
    async fn live_view(&self, queue: &QueueName, limit_key: &str) -> Result<LimitKeyView, Error> {
        let live = match limit_key {
            ALL_LIMIT_KEYS => None,
            key => self.queue.limit_key(queue, key).await?,
        };
        let now = self.now_unix_ms();
        Ok(match live {
            Some(live) => view(queue, limit_key, live, now),
            None => self.idle_view(queue, limit_key),
        })
    }

    fn idle_view(&self, queue: &QueueName, limit_key: &str) -> LimitKeyView {
        let limits = self.settings.queues.get(queue).key_limits();
        let limits = limits.unwrap_or_default();
        LimitKeyView {
            queue: queue.clone(),
            limit_key: limit_key.to_owned(),
            running: 0,
            waiting: 0,
            at_a_time: Some(u64::from(match limits.at_a_time {
                0 => MOST_AT_A_TIME,
                number => number,
            })),
            pace_ms: limits.pace.map_or(0, |pace| pace.interval_ms()),
            burst: limits.burst,
            next_start_unix_ms: None,
            held_until_unix_ms: None,
            own: None,
        }
    }

    /// Limit keys of which Redis has tasks or times, shard by shard.
    async fn live_keys(
        &self,
        queue: &QueueName,
        state: LimitKeyState,
        cursor: &str,
        limit: u32,
    ) -> Result<LimitKeyPage, Error> {
        let mut place = Place::read(cursor)?;
        let mut shards: Vec<ShardId> = self.queue.shards();
        shards.retain(|shard| shard.queue == *queue);
        shards.sort_unstable();
        let mut page = LimitKeyPage::default();
        for _ in 0..CALLS_OF_PAGE {
            let Some(shard) = shards.iter().find(|shard| shard.number >= place.shard) else {
                return Ok(page);
            };
            if shard.number > place.shard {
                place = Place::beginning_of(shard.number);
            }
            let missing = limit as usize - page.limits.len();
            let keys = match self.queue.limit_keys(shard, state, place.at, missing).await {
                Ok(keys) => keys,
                // It was just closed, or Redis lost it.
                Err(queue::Error::NoGeneration) => queue::LimitKeys::default(),
                Err(error) => return Err(error.into()),
            };
            let found = keys.keys.len();
            for key in keys.keys.into_iter().skip(place.skip).take(missing) {
                let name = key.name.clone();
                page.limits.push(view(queue, &name, key, keys.now_unix_ms));
            }
            if found > place.skip + missing {
                place.skip += missing;
            } else if let Some(at) = keys.next {
                place.at = at;
                place.skip = 0;
            } else {
                place = Place::beginning_of(shard.number + 1);
            }
            if page.limits.len() >= limit as usize {
                break;
            }
        }
        if shards.iter().any(|shard| shard.number >= place.shard) {
            page.cursor = Some(place.to_string());
        }
        Ok(page)
    }
}

/// Where a page of the limit keys of a queue begins.
#[derive(Clone, Copy)]
struct Place {
    shard: u32,
    /// A cursor of HSCAN.
    at: u64,
    /// The keys there that an earlier page had: HSCAN shows all of a small hash at once.
    skip: usize,
}

impl Place {
    fn beginning_of(shard: u32) -> Self {
        Self {
            shard,
            at: 0,
            skip: 0,
        }
    }

    fn read(cursor: &str) -> Result<Self, Error> {
        if cursor.is_empty() {
            return Ok(Self::beginning_of(0));
        }
        let parts: Result<Vec<u64>, _> = cursor.split('.').map(str::parse).collect();
        let read = || {
            let [shard, at, skip] = parts.ok()?[..] else {
                return None;
            };
            Some(Self {
                shard: u32::try_from(shard).ok()?,
                at,
                skip: usize::try_from(skip).ok()?,
            })
        };
        read().ok_or_else(|| {
            Error::Invalid("the cursor is not one of a list of limit keys in this state".into())
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.shard, self.at, self.skip)
    }
}

fn view(queue: &QueueName, limit_key: &str, live: LimitKey, now_unix_ms: i64) -> LimitKeyView {
    let later = |at: i64| Some(at).filter(|at| *at > now_unix_ms);
    LimitKeyView {
        queue: queue.clone(),
        limit_key: limit_key.to_owned(),
        running: live.leased,
        waiting: live.waiting,
        at_a_time: Some(u64::try_from(live.at_a_time).unwrap_or(0)),
        pace_ms: live.pace_ms,
        burst: live.burst,
        next_start_unix_ms: later(live.next_start_unix_ms),
        held_until_unix_ms: later(live.hold_until_unix_ms),
        own: None,
    }
}
