//! Clients that end without a wait.

use std::ops::Deref;

/// Ends on a thread of its own, which nobody awaits.
///
/// librdkafka joins threads that sleep until a time of day. A clock that was set back could delay a
/// stop for as long.
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
