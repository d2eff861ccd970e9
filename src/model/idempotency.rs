//! Idempotency keys: a repeated insert gets the answer of the first one.

use std::time::Duration;

use sha2::{Digest, Sha256};

use super::{names::QueueName, unix_time::millis};

/// The maximum length of an idempotency key.
pub const MAX_IDEMPOTENCY_KEY_BYTES: usize = 256;

/// The idempotency key of a task to be stored in SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idempotency {
    /// SHA-256 of the queue and the idempotency key.
    pub hash: [u8; 32],
    /// SHA-256 of the task's queue, key and payload, as the caller sent them. It differs if the key
    /// is reused for a different task.
    pub fingerprint: [u8; 32],
    /// The end of the window, in which the idempotency key belongs to this task.
    pub expires_unix_ms: i64,
}

impl Idempotency {
    /// Returns `None` if the task has no idempotency key.
    pub(super) fn new(
        text: &str,
        queue: &QueueName,
        key_hash: &[u8; 32],
        payload: &[u8],
        now_unix_ms: i64,
        window: Duration,
    ) -> Option<Box<Self>> {
        if text.is_empty() {
            return None;
        }
        let window_ms = millis(window);
        Some(Box::new(Self {
            // The NUL separates the parts, because no queue name contains one.
            hash: Sha256::new()
                .chain_update(queue.as_str())
                .chain_update([0])
                .chain_update(text)
                .finalize()
                .into(),
            fingerprint: Sha256::new()
                .chain_update(key_hash)
                .chain_update(payload)
                .finalize()
                .into(),
            expires_unix_ms: now_unix_ms.saturating_add(window_ms),
        }))
    }
}

/// Validates an idempotency key.
pub(super) fn check(text: &str) -> Result<(), String> {
    if text.len() > MAX_IDEMPOTENCY_KEY_BYTES {
        return Err(format!(
            "idempotency_key has {} bytes; at most {MAX_IDEMPOTENCY_KEY_BYTES}",
            text.len()
        ));
    }
    if text.chars().any(char::is_control) {
        return Err("idempotency_key contains a control character".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, queue: &str, key: &str, payload: &str) -> Option<Box<Idempotency>> {
        let queue = QueueName::new(queue).unwrap();
        let key_hash = Sha256::new().chain_update(key).finalize().into();
        Idempotency::new(
            text,
            &queue,
            &key_hash,
            payload.as_bytes(),
            1_000,
            Duration::from_secs(2),
        )
    }

    #[test]
    fn the_key_is_of_its_queue_and_the_fingerprint_of_the_task() {
        assert_eq!(of("", "q", "k", "p"), None);
        let first = of("i", "q", "k", "p").unwrap();
        assert_eq!(first.expires_unix_ms, 3_000);
        assert_eq!(of("i", "q", "k", "p").unwrap(), first);
        for other in [of("i", "q", "l", "p"), of("i", "q", "k", "r")].map(Option::unwrap) {
            assert_eq!(other.hash, first.hash);
            assert_ne!(other.fingerprint, first.fingerprint);
        }
        assert_ne!(of("j", "q", "k", "p").unwrap().hash, first.hash);
        assert_ne!(of("i", "r", "k", "p").unwrap().hash, first.hash);
    }

    #[test]
    fn a_wrong_key_is_named() {
        check(&"i".repeat(256)).unwrap();
        assert_eq!(
            check(&"i".repeat(257)).unwrap_err(),
            "idempotency_key has 257 bytes; at most 256"
        );
        assert_eq!(
            check("a\nb").unwrap_err(),
            "idempotency_key contains a control character"
        );
    }
}
