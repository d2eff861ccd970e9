//! Counts the parts of a request before they are built: a few bytes of JSON or protobuf become
//! hundreds in memory.

use super::net::budget::{NoRoom, Share};
use crate::{config::Settings, model::TaskFilter};

/// The most discovered tasks in all completions of a call.
pub(super) const MAX_DISCOVERED: usize = 50_000;
/// The approximate memory of a part, in addition to its bytes. Its answer takes less.
const TASK: usize = 400;
const ITEM: usize = 512;
const HEADER: usize = 128;
/// The most memory of a request: `FREE`, plus `TIMES` its length.
const FREE: usize = 24 << 20;
const TIMES: usize = 4;
/// How many bytes a request reserves from the budget at a time.
const STEP: usize = 16 << 10;

/// Why taskd does not read the rest of a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Excess {
    #[error("more than {0} tasks in one request (discovery_buffer); NDJSON over HTTP has no limit")]
    Tasks(usize),
    #[error("more than {0} items in one call (max_items)")]
    Items(usize),
    #[error(
        "more than {MAX_DISCOVERED} discovered tasks in one call; complete fewer tasks at once"
    )]
    Discovered,
    #[error("more than {0} queues")]
    Queues(usize),
    #[error("more than {0} {1} in a filter")]
    Filter(usize, &'static str),
    #[error("its parts would take more than {0} bytes of memory; send fewer at once")]
    Memory(usize),
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
}

/// The most queues of one call.
pub(super) const MAX_QUEUES: usize = 100;
/// The most bytes of a filter's statuses. There are seven, and a client may repeat them.
const MAX_STATUSES: usize = 100;

/// The counts of one request so far.
pub(super) struct Tally<'a> {
    share: &'a Share,
    max_tasks: usize,
    max_items: usize,
    max_memory: usize,
    tasks: usize,
    items: usize,
    discovered: usize,
    queues: usize,
    filter_statuses: usize,
    filter_headers: usize,
    memory: usize,
    /// The part of `memory` that has been reserved from the budget.
    taken: usize,
}

impl<'a> Tally<'a> {
    /// An empty tally for a request of `bytes` bytes.
    pub(super) fn new(settings: &Settings, share: &'a Share, bytes: usize) -> Self {
        Self {
            share,
            max_tasks: settings.discovery.buffer,
            max_items: settings.limits.max_items,
            // A request that would not fit even if it were alone must not be told to try again.
            max_memory: share.left().min(FREE + bytes.saturating_mul(TIMES)),
            tasks: 0,
            items: 0,
            discovered: 0,
            queues: 0,
            filter_statuses: 0,
            filter_headers: 0,
            memory: 0,
            taken: 0,
        }
    }

    pub(super) fn task(&mut self) -> Result<(), Excess> {
        self.tasks += 1;
        let max = self.max_tasks;
        if self.tasks > max {
            Err(Excess::Tasks(max))
        } else {
            self.takes(TASK)
        }
    }

    pub(super) fn item(&mut self) -> Result<(), Excess> {
        self.items += 1;
        let max = self.max_items;
        if self.items > max {
            Err(Excess::Items(max))
        } else {
            self.takes(ITEM)
        }
    }

    pub(super) fn discovered(&mut self) -> Result<(), Excess> {
        self.discovered += 1;
        if self.discovered > MAX_DISCOVERED {
            Err(Excess::Discovered)
        } else {
            self.takes(TASK)
        }
    }

    pub(super) fn queue(&mut self) -> Result<(), Excess> {
        self.queues += 1;
        if self.queues > MAX_QUEUES {
            Err(Excess::Queues(MAX_QUEUES))
        } else {
            Ok(())
        }
    }

    pub(super) fn filter_statuses(&mut self, count: usize) -> Result<(), Excess> {
        self.filter_statuses += count;
        if self.filter_statuses > MAX_STATUSES {
            Err(Excess::Filter(MAX_STATUSES, "statuses"))
        } else {
            Ok(())
        }
    }

    pub(super) fn filter_header(&mut self) -> Result<(), Excess> {
        self.filter_headers += 1;
        let max = TaskFilter::MOST_HEADERS;
        if self.filter_headers > max {
            Err(Excess::Filter(max, "headers"))
        } else {
            Ok(())
        }
    }

    pub(super) fn header(&mut self) -> Result<(), Excess> {
        self.takes(HEADER)
    }

    /// Counts a task of a stream, which may have any number.
    pub(super) fn line(&mut self) -> Result<(), Excess> {
        self.takes(TASK)
    }

    /// Counts an unreadable part, whose answer contains the reason.
    pub(super) fn unreadable(&mut self, why: &str) -> Result<(), Excess> {
        self.takes(why.len())
    }

    /// Leaves the memory with the request until its answer is written. Returns how many bytes that
    /// is.
    pub(super) fn keep(mut self) -> usize {
        std::mem::take(&mut self.taken)
    }

    fn takes(&mut self, bytes: usize) -> Result<(), Excess> {
        self.memory += bytes;
        if self.memory > self.max_memory {
            return Err(Excess::Memory(self.max_memory));
        }
        if self.memory - self.taken >= STEP {
            self.share.grow(self.memory - self.taken)?;
            self.taken = self.memory;
        }
        Ok(())
    }
}

impl Drop for Tally<'_> {
    fn drop(&mut self) {
        self.share.shrink(self.taken);
    }
}
