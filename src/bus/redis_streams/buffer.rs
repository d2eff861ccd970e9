//! Records that were read from Redis and not yet returned.

use std::collections::VecDeque;

use crate::bus::Message;

/// Approximate limit for the bytes of one read of all partitions. A read can only limit the number
/// of records, and a record can have a few MiB.
const READ_BYTES: usize = 16 << 20;
/// Size assumed for smaller records, because the next ones may be larger.
const SMALLEST: usize = 4 << 10;
/// The number of records in the first read of all partitions.
const FIRST: usize = 64;

pub(super) struct Buffer {
    messages: VecDeque<Message>,
    partitions: usize,
    /// How many records to read from each partition: few at first, then as many of the last average
    /// size as fit into [`READ_BYTES`].
    count: usize,
}

impl Buffer {
    pub(super) fn new(partitions: usize) -> Self {
        Self {
            messages: VecDeque::new(),
            partitions: partitions.max(1),
            count: (FIRST / partitions.max(1)).max(1),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn take(&mut self, max: usize) -> Vec<Message> {
        let some = self.messages.len().min(max.max(1));
        self.messages.drain(..some).collect()
    }

    /// How many records to read from each partition for a caller that wants `max`.
    pub(super) fn count(&self, max: usize) -> usize {
        self.count.min(max).max(1)
    }

    pub(super) fn add(&mut self, messages: Vec<Message>) {
        let bytes: usize = messages.iter().map(|m| m.value.len()).sum();
        if let Some(size) = bytes.checked_div(messages.len()) {
            let fits = READ_BYTES / self.partitions / size.max(SMALLEST);
            self.count = fits.clamp(1, self.count * 2);
        }
        self.messages.extend(messages);
    }

    pub(super) fn retain(&mut self, keep: impl FnMut(&Message) -> bool) {
        self.messages.retain(keep);
    }

    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }
}
