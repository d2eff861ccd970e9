//! The names of readers.

use std::sync::Arc;

use super::streams::Streams;
use crate::bus::Topic;

/// The name of a live reader of this process.
///
/// The name of a reader that ended is reused by the next reader, which so takes over its partitions
/// or unacknowledged records without waiting.
pub(super) struct Consumer {
    streams: Arc<Streams>,
    topic: Topic,
    number: u32,
    pub(super) name: String,
}

impl Consumer {
    pub(super) fn new(streams: Arc<Streams>, topic: Topic, process: &str) -> Self {
        let number = {
            let mut taken = streams.consumers.lock();
            let free = (0..).find(|number| taken.insert((topic, *number)));
            free.expect("a process has fewer than 2^32 readers")
        };
        let name = format!("{process}-{number}");
        Self {
            streams,
            topic,
            number,
            name,
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let mut taken = self.streams.consumers.lock();
        taken.remove(&(self.topic, self.number));
    }
}
