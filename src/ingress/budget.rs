//! One budget for the bytes of all requests in hand, over HTTP and gRPC together: their bodies, their decoded parts,
//! and their answers until they are written.
//!
//! A request has a [`Share`] of the budget. The share grows as the body comes in, and returns when the answer is
//! written. taskd tells a request that finds no room to try again. No request waits for room: it would keep what it
//! holds.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The bytes of one unit of the budget.
const UNIT: usize = 1 << 10;
/// The size up to which requests may use all of the budget.
const SMALL: usize = 64 << 10;
/// The memory of an insert that waits, for each of its tasks, about.
pub(super) const WAITING_TASK: usize = 512;
/// The part of the budget that larger requests leave: a worker's report gets through beside large uploads.
const KEPT_FOR_SMALL: usize = 8;

/// A request does not fit beside the others in hand.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("the requests in hand have {0} bytes, all that they may have (request_budget); try again later")]
pub struct NoRoom(usize);

/// The budget of this process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Budget {
    room: Arc<Semaphore>,
    bytes: usize,
}

impl Budget {
    pub fn new(bytes: usize) -> Self {
        Self { room: Arc::new(Semaphore::new(bytes / UNIT)), bytes }
    }

    /// An empty share, for a new request.
    pub(super) fn share(&self) -> Share {
        Share { budget: self.clone(), held: Arc::default() }
    }

    /// Room for an answer, until it is written. A very large answer counts as a quarter of the budget: otherwise it
    /// would never find room.
    pub(super) fn answer(&self, bytes: usize) -> Result<Share, NoRoom> {
        let share = self.share();
        share.grow(bytes.min(self.bytes / 4))?;
        Ok(share)
    }

    /// Room for an answer that must get through beside large requests. A part of a large answer does not count.
    pub(super) fn small_answer(&self, bytes: usize) -> Result<Share, NoRoom> {
        self.answer(bytes.min(SMALL))
    }

    /// The taken bytes.
    pub(super) fn held(&self) -> usize {
        self.bytes.saturating_sub(self.room.available_permits() * UNIT)
    }
}

/// One request's part of the budget. The drop of the last clone gives it back.
#[derive(Clone, Debug)]
pub(super) struct Share {
    budget: Budget,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl Held {
    fn units(&self) -> usize {
        self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }
}

impl Share {
    /// Takes room for more bytes.
    pub(super) fn grow(&self, bytes: usize) -> Result<(), NoRoom> {
        let mut held = self.held.lock();
        let total = held.bytes + bytes;
        let more = total.div_ceil(UNIT).saturating_sub(held.units());
        if more > 0 {
            let room = &self.budget.room;
            let kept = if total > SMALL { self.budget.bytes / UNIT / KEPT_FOR_SMALL } else { 0 };
            let no_room = NoRoom(self.budget.bytes);
            // Other requests may take room meanwhile, so the kept part has about its size.
            if room.available_permits() < more + kept {
                return Err(no_room);
            }
            let more = u32::try_from(more).map_err(|_| no_room)?;
            let permit = Arc::clone(room).try_acquire_many_owned(more).map_err(|_| no_room)?;
            match &mut held.permit {
                Some(all) => all.merge(permit),
                none => *none = Some(permit),
            }
        }
        held.bytes = total;
        Ok(())
    }

    /// Changes the share to that of an answer of `bytes` bytes.
    pub(super) fn become_answer(&self, bytes: usize) {
        let held = self.held.lock().bytes;
        self.change(held, bytes);
    }

    /// Holds `to` bytes in place of `from`; answers the bytes that it holds. An answer that finds no room goes out all
    /// the same: its operation has happened.
    pub(super) fn change(&self, from: usize, to: usize) -> usize {
        match to.checked_sub(from) {
            Some(more) if self.grow(more).is_err() => return from,
            Some(_) => {}
            None => self.shrink(from - to),
        }
        to
    }

    /// The bytes for which this request alone would find room.
    pub(super) fn left(&self) -> usize {
        let units = self.budget.bytes / UNIT;
        let most = (units - units / KEPT_FOR_SMALL) * UNIT;
        most.saturating_sub(self.held.lock().bytes)
    }

    /// Moves what it holds into a share of its own. A stream does so for each of its messages.
    pub(super) fn part(&self) -> Self {
        let held = std::mem::take(&mut *self.held.lock());
        Self { budget: self.budget.clone(), held: Arc::new(Mutex::new(held)) }
    }

    /// Gives room back. A request may be answered part by part.
    pub(super) fn shrink(&self, bytes: usize) {
        let mut held = self.held.lock();
        held.bytes = held.bytes.saturating_sub(bytes);
        let less = held.units() - held.bytes.div_ceil(UNIT).min(held.units());
        drop(held.permit.as_mut().and_then(|permit| permit.split(less)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_as_a_request_grows_and_returns_with_its_end() {
        let budget = Budget::new(64 << 10);
        let (first, second) = (budget.share(), budget.share());
        first.grow(32 << 10).unwrap();
        first.grow(10).unwrap();
        assert_eq!(second.grow(32 << 10), Err(NoRoom(64 << 10)));
        first.shrink(1 << 10);
        second.grow(32 << 10).unwrap();
        drop(second);
        first.grow(31 << 10).unwrap();
    }

    #[test]
    fn an_answer_that_is_larger_than_all_finds_room_when_there_is_some() {
        let budget = Budget::new(1 << 20);
        let answers: Vec<_> = (0..3).map(|_| budget.answer(100 << 20).unwrap()).collect();
        assert!(budget.answer(100 << 20).is_err());
        budget.answer(1 << 10).unwrap();
        drop(answers);
        budget.answer(100 << 20).unwrap();
    }

    #[test]
    fn large_requests_leave_room_for_small_ones() {
        let budget = Budget::new(1 << 20);
        let large = budget.share();
        let mut chunks = 0;
        while large.grow(16 << 10).is_ok() {
            chunks += 1;
        }
        assert_eq!(chunks, 56, "seven of eight parts");
        budget.share().grow(64 << 10).unwrap();
    }
}
