//! The names of readers.

use std::sync::{Arc, PoisonError};

use super::Streams;
use crate::bus::Topic;

/// One per living reader of this process. A reader that follows another gets its name, and with it at once the partitions of that one,
/// or what it had not acknowledged.
pub(super) struct Consumer {
    streams: Arc<Streams>,
    topic: Topic,
    number: u32,
    pub(super) name: String,
}

impl Consumer {
    pub(super) fn new(streams: Arc<Streams>, topic: Topic, process: &str) -> Self {
        let number = {
            let mut taken = streams.consumers.lock().unwrap_or_else(PoisonError::into_inner);
            let free = (0..).find(|number| taken.insert((topic, *number)));
            free.expect("a process has fewer than 2^32 readers")
        };
        let name = format!("{process}-{number}");
        Self { streams, topic, number, name }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let mut taken = self.streams.consumers.lock().unwrap_or_else(PoisonError::into_inner);
        taken.remove(&(self.topic, self.number));
    }
}
