//! What the queue reports for the histories of tasks: rejected attempts, and the times at which
//! leases were given.

use std::sync::atomic::{AtomicBool, Ordering};

use super::types::Rejection;
use crate::{
    model::{AttemptState, FailedAttempt},
    wire,
};

/// Whether this process reports attempts for histories. It does, unless that is turned off.
#[derive(Default)]
pub struct History {
    is_off: AtomicBool,
}

impl History {
    /// Nothing is reported from now on.
    pub fn turn_off(&self) {
        self.is_off.store(true, Ordering::Relaxed);
    }

    pub fn is_on(&self) -> bool {
        !self.is_off.load(Ordering::Relaxed)
    }

    /// Returns a rejected attempt as `lua/reject.lua` takes it; empty if there is nothing to
    /// report.
    pub(super) fn rejected(&self, rejection: &Rejection) -> Vec<u8> {
        if !self.is_on() || rejection.mode.is_free() {
            return Vec::new();
        }
        let token = &rejection.token;
        wire::frame_failure(wire::failed_attempt(FailedAttempt {
            id: rejection.id,
            worker: rejection.worker.as_str().to_owned(),
            state: AttemptState::Rejected,
            leased_unix_ms: token.leased_unix_ms,
            // The forwarder adds the time.
            at_unix_ms: 0,
            attempt: token.attempt,
            lease: token.lease(),
            reason: FailedAttempt::cut(&rejection.reason).to_owned(),
        }))
    }
}
