//! Clients that are dropped without waiting for them.

use std::ops::Deref;

/// Drops the client on a separate thread that nobody joins.
///
/// librdkafka joins threads that sleep until a point of wall-clock time. If the clock was set back,
/// that could delay a stop by the same amount.
pub(super) struct Detached<T: Send + 'static>(Option<T>);

impl<T: Send> Detached<T> {
    pub(super) fn new(client: T) -> Self {
        Self(Some(client))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("is there until the drop")
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let client = self.0.take();
        std::thread::spawn(move || drop(client));
    }
}
