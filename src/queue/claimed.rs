//! The answer of `lua/claim.lua`: the tasks of all requests of a call, one after the other.

use std::{collections::HashMap, time::Duration};

use redis::Value;

use super::{
    error::{Error, Result},
    types::Leased,
    wire::{bytes, items, ms, number, task_ids},
};
use crate::model::{LeaseToken, ShardId, TaskId};

/// The head of a body: priority, max_attempts, lease (`wire::body_blob`).
const HEAD_BYTES: usize = 9;
/// The bit next to those of the priorities with elements: a worker rests from a task.
const RESTS: u8 = 8;

#[derive(Default)]
pub(super) struct Claimed {
    generation: u64,
    /// Redis's clock, to which a lease is added.
    pub(super) now_unix_ms: i64,
    /// The grant of the next request with tasks.
    grant: u64,
    ids: Vec<TaskId>,
    bodies: std::vec::IntoIter<Value>,
    counts: std::vec::IntoIter<Value>,
    /// The indices, from 1, of requests whose scan ended at a limit of the call.
    with_more: Vec<usize>,
    /// The attempts other than the first, by index in `ids`, from 1.
    attempts: HashMap<usize, u32>,
    place: usize,
    /// The tokens contain the times at which their leases were given.
    pub(super) tells_time: bool,
    /// The priorities that have elements, in the format of a peek; `None` if not known.
    pub(super) left: Option<u8>,
    /// Claims pause, or one of the workers rests from a task: nothing wakes the callers when that
    /// is over.
    pub(super) again_soon: bool,
    /// When time alone lets a limit key of the call go on.
    pub(super) next_start_ms: Option<i64>,
    /// The call found all lanes empty, and wrote nothing.
    pub(super) wrote_nothing: bool,
}

impl Claimed {
    pub(super) fn read(answer: Value) -> Result<Self> {
        let mut parts = items(answer)?.into_iter();
        let generation = number(parts.next())?;
        let kind = number::<u8>(parts.next())?;
        if parts.len() == 0 {
            let is_empty = kind == 2;
            let again_soon = matches!(kind, 1 | 3);
            let left = is_empty.then_some(0);
            return Ok(Self {
                generation,
                left,
                again_soon,
                wrote_nothing: is_empty,
                ..Self::default()
            });
        }
        let mut next = || {
            parts
                .next()
                .ok_or_else(|| Error::Answer("a part of a claim's answer is missing".into()))
        };
        let now_unix_ms = number(Some(next()?))?;
        let grant = number(Some(next()?))?;
        let ids = task_ids(Some(next()?))?;
        let mut list = || Ok::<_, Error>(items(next()?)?.into_iter());
        let bodies = list()?;
        let counts = list()?;
        let with_more = list()?
            .map(|place| number(Some(place)))
            .collect::<Result<_>>()?;
        let attempts = list()?
            .map(|value| number(Some(value)))
            .collect::<Result<Vec<u32>>>()?;
        let left: u8 = number(Some(next()?))?;
        let again_soon = left & RESTS != 0;
        let left = Some(left & !RESTS);
        // Only a shard with limit keys answers it.
        let next_start_ms = match parts.next() {
            Some(wait) => Some(number(Some(wait))?).filter(|wait| *wait >= 0),
            None => None,
        };
        let attempts = attempts
            .chunks_exact(2)
            .map(|pair| (pair[0] as usize, pair[1]))
            .collect();
        Ok(Self {
            generation,
            now_unix_ms,
            grant,
            ids,
            bodies,
            counts,
            with_more,
            attempts,
            left,
            again_soon,
            next_start_ms,
            ..Self::default()
        })
    }

    /// Sets the first grant, if the call was made with this secret.
    pub(super) fn with_secret(self, secret: Option<u64>) -> Self {
        match secret {
            Some(secret) => Self {
                grant: secret + 1,
                ..self
            },
            None => self,
        }
    }

    /// Returns the leases of the next request, which asked for leases of this length, or of the
    /// tasks' own if `None`.
    pub(super) fn next_request(
        &mut self,
        shard: &ShardId,
        lease: Option<Duration>,
    ) -> Result<Vec<Leased>> {
        let count = self
            .counts
            .next()
            .map_or(Ok(0), |count| number(Some(count)))?;
        let mut leased = Vec::with_capacity(count);
        for _ in 0..count {
            let missing = || Error::Answer("fewer ids than a claim's answer counts".into());
            let id = *self.ids.get(self.place).ok_or_else(missing)?;
            let body = self.bodies.next();
            self.place += 1;
            // The body is damaged: the script has not leased this task.
            let body = if matches!(body, Some(Value::Nil)) {
                continue;
            } else {
                bytes(body)?
            };
            let Some(own_ms) = body.get(HEAD_BYTES - 4..HEAD_BYTES) else {
                continue;
            };
            let own_ms = own_ms
                .iter()
                .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            let lease_ms = lease.map(ms).filter(|ms| *ms > 0).unwrap_or(own_ms);
            let expires_unix_ms = self.now_unix_ms.saturating_add_unsigned(lease_ms);
            let attempt = self.attempts.get(&self.place).copied().unwrap_or(1);
            let generation = self.generation;
            let grant = self.grant;
            let leased_unix_ms = if self.tells_time { self.now_unix_ms } else { 0 };
            let token = LeaseToken {
                shard: shard.clone(),
                generation,
                grant,
                attempt,
                trace: None,
                leased_unix_ms,
            };
            leased.push(Leased {
                id,
                token,
                body,
                expires_unix_ms,
                lease: Duration::from_millis(lease_ms),
            });
        }
        self.grant += u64::from(count > 0);
        Ok(leased)
    }

    /// Returns whether the request at this index (from 0) has to ask again.
    pub(super) fn has_more(&self, place: usize) -> bool {
        self.with_more.contains(&(place + 1))
    }
}
