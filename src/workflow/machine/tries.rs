//! What a `try` does with an error: catch it, try again, or let it through.

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{
    problem::Problem,
    scope::{Scope, View},
};
use crate::workflow::{
    definition::{ErrorFilter, RetryBackoff},
    program::{Retry, Try},
};

/// The longest wait before a retry: ten years.
const LONGEST_WAIT_MS: u64 = 3650 * 24 * 60 * 60 * 1000;

impl View<'_> {
    /// Whether a `try` catches an error.
    pub(super) fn catches(
        &self,
        path: &str,
        try_: &Try,
        error: &Problem,
        input: &Value,
    ) -> Result<bool, Problem> {
        if try_
            .errors
            .as_ref()
            .is_some_and(|filter| !fits(filter, error))
        {
            return Ok(false);
        }
        let scope = Scope::at(path);
        if let Some(when) = &try_.when
            && !self.is_true(when, "catch.when", input, &scope)?
        {
            return Ok(false);
        }
        if let Some(except) = &try_.except_when
            && self.is_true(except, "catch.exceptWhen", input, &scope)?
        {
            return Ok(false);
        }
        Ok(true)
    }

    /// The number of the next attempt and the wait before it in milliseconds. `None`: no more
    /// attempts.
    pub(super) fn wait_before_retry(
        &self,
        path: &str,
        retry: &Retry,
        input: &Value,
    ) -> Result<Option<(u32, u64)>, Problem> {
        let Some(frame) = self.state.frames.get(path) else {
            return Ok(None);
        };
        let scope = Scope::at(path);
        if let Some(when) = &retry.when
            && !self.is_true(when, "retry.when", input, &scope)?
        {
            return Ok(None);
        }
        if let Some(except) = &retry.except_when
            && self.is_true(except, "retry.exceptWhen", input, &scope)?
        {
            return Ok(None);
        }
        if retry
            .attempts
            .is_some_and(|most| u64::from(frame.retries) >= most)
        {
            return Ok(None);
        }
        let attempt = frame.retries.saturating_add(1);
        let delay = match &retry.delay {
            Some(delay) => self.length(delay, "retry.delay", input, &scope)?,
            None => 0,
        };
        let factor = match retry.backoff {
            RetryBackoff::Constant => 1,
            RetryBackoff::Linear => u64::from(attempt),
            RetryBackoff::Exponential => 1_u64.checked_shl(attempt - 1).unwrap_or(u64::MAX),
        };
        let mut wait = delay.saturating_mul(factor);
        if let Some((from, to)) = &retry.jitter {
            let from = self.length(from, "retry.jitter.from", input, &scope)?;
            let to = self.length(to, "retry.jitter.to", input, &scope)?;
            let jitter = jitter(&self.state.execution, path, attempt, from, to);
            wait = wait.saturating_add(jitter);
        }
        let wait = wait.min(LONGEST_WAIT_MS);
        if let Some(duration) = &retry.duration {
            let duration = self.length(duration, "retry.limit.duration", input, &scope)?;
            let elapsed = u64::try_from(self.now - frame.started_at).unwrap_or(0);
            if elapsed.saturating_add(wait) > duration {
                return Ok(None);
            }
        }
        Ok(Some((attempt, wait)))
    }
}

/// A number from `from` to `to` that looks random, but is always the same for the same retry.
pub(super) fn jitter(execution: &str, path: &str, attempt: u32, from: u64, to: u64) -> u64 {
    let Some(span) = to.checked_sub(from) else {
        return from;
    };
    let hash = Sha256::new()
        .chain_update((execution.len() as u64).to_be_bytes())
        .chain_update(execution)
        .chain_update(path)
        .chain_update(attempt.to_be_bytes())
        .finalize();
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash[..8]);
    from + u64::from_be_bytes(bytes) % span.saturating_add(1)
}

fn fits(filter: &ErrorFilter, error: &Problem) -> bool {
    let same = |filter: &Option<String>, text: &Option<String>| {
        filter.is_none() || filter.as_deref() == text.as_deref()
    };
    let type_ = filter.type_.as_ref();
    type_.is_none_or(|type_| Problem::is_same_type(type_, &error.type_))
        && filter.status.is_none_or(|status| status == error.status)
        && same(&filter.instance, &error.instance)
        && same(&filter.title, &error.title)
        && same(&filter.detail, &error.detail)
}
