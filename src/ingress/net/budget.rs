//! One memory budget for all requests in flight, over HTTP and gRPC together: their bodies, their
//! decoded parts, and their answers until they are written.
//!
//! A request has a [`Share`] of the budget. The share grows as the body arrives, and is given back
//! when the answer has been written. A request that does not fit is told to try again. No request
//! waits for memory, because it would keep what it holds meanwhile.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::model::{self, Access, NoShare, Shares};

/// The bytes of one unit of the budget.
const UNIT: usize = 1 << 10;
/// Requests up to this size may use all of the budget.
const SMALL: usize = 64 << 10;
/// The approximate memory of an insert that waits, for each of its tasks.
pub(in crate::ingress) const WAITING_TASK: usize = 512;
/// Larger requests leave one part in this many of the budget free, so that a worker's report gets
/// through next to large uploads.
const KEPT_FOR_SMALL: usize = 8;
/// One answer counts as at most one part in this many of the budget.
const MOST_OF_ANSWER: usize = 4;

/// A request does not fit next to the others in flight.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum NoRoom {
    #[error(
        "the requests in hand have {0} bytes, all that they may have (request_budget); try again later"
    )]
    OfAll(usize),
    #[error(
        "the requests in hand of this token have {0} bytes, all that a token with a scope or a worker may have: half of \
         request_budget; try again later"
    )]
    OfToken(usize),
}

/// The budget of this process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Budget {
    shares: Shares,
    bytes: usize,
}

impl Budget {
    pub fn new(bytes: usize) -> Self {
        Self {
            shares: Shares::new(bytes / UNIT),
            bytes,
        }
    }

    /// Returns an empty share for a new request. [`Share::belongs_to`] then says whose it is.
    pub(in crate::ingress) fn share(&self) -> Share {
        self.share_of(&Access::Open)
    }

    fn share_of(&self, access: &Access) -> Share {
        let held = Held {
            bytes: 0,
            units: self.shares.empty(access),
        };
        Share {
            budget: self.clone(),
            held: Arc::new(Mutex::new(held)),
        }
    }

    /// The most bytes that an answer counts as.
    pub(in crate::ingress) fn most_of_answer(&self) -> usize {
        self.bytes / MOST_OF_ANSWER
    }

    /// Reserves memory for an answer, until it is written. A very large answer counts as a quarter
    /// of the budget, because otherwise it would never fit.
    pub(in crate::ingress) fn answer(
        &self,
        access: &Access,
        bytes: usize,
    ) -> Result<Share, NoRoom> {
        let share = self.share_of(access);
        share.grow(bytes.min(self.most_of_answer()))?;
        Ok(share)
    }

    /// Reserves memory for an answer that must get through next to large requests. Only the first
    /// [`SMALL`] bytes count.
    pub(in crate::ingress) fn small_answer(
        &self,
        access: &Access,
        bytes: usize,
    ) -> Result<Share, NoRoom> {
        self.answer(access, bytes.min(SMALL))
    }

    /// The bytes in use.
    pub(in crate::ingress) fn held(&self) -> usize {
        self.shares.held() * UNIT
    }
}

/// One request's part of the budget. Dropping the last clone gives it back.
#[derive(Clone, Debug)]
pub(in crate::ingress) struct Share {
    budget: Budget,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug)]
struct Held {
    bytes: usize,
    units: model::Share,
}

impl Share {
    /// Counts the request as one of this caller. The connection makes the share before it is known
    /// who calls, and nothing is read of the body before that.
    pub(in crate::ingress) fn belongs_to(&self, access: &Access) {
        let mut held = self.held.lock();
        let mut units = self.budget.shares.empty(access);
        if units.grow(held.units.units()).is_ok() {
            held.units = units;
        }
    }

    /// Reserves more bytes.
    pub(in crate::ingress) fn grow(&self, bytes: usize) -> Result<(), NoRoom> {
        let mut held = self.held.lock();
        let total = held.bytes + bytes;
        let more = total.div_ceil(UNIT).saturating_sub(held.units.units());
        if more > 0 {
            let kept = |most: usize| {
                if total > SMALL {
                    most / KEPT_FOR_SMALL
                } else {
                    0
                }
            };
            held.units
                .grow_leaving(more, kept)
                .map_err(|no_share| match no_share {
                    NoShare::OfAll(_) => NoRoom::OfAll(self.budget.bytes),
                    NoShare::OfToken(units) => NoRoom::OfToken(units * UNIT),
                })?;
        }
        held.bytes = total;
        Ok(())
    }

    /// Changes the share to the size of an answer.
    pub(in crate::ingress) fn become_answer(&self, bytes: usize) {
        let held = self.held.lock().bytes;
        self.change(held, bytes);
    }

    /// Holds `to` bytes in place of `from`. Returns `from` if there is no memory for more; the
    /// answer is sent all the same, because its operation has been done.
    pub(in crate::ingress) fn change(&self, from: usize, to: usize) -> usize {
        match to.checked_sub(from) {
            Some(more) if self.grow(more).is_err() => return from,
            Some(_) => {}
            None => self.shrink(from - to),
        }
        to
    }

    /// How many bytes this request could still get if it were alone.
    pub(in crate::ingress) fn left(&self) -> usize {
        let held = self.held.lock();
        let units = self.budget.bytes / UNIT;
        let most = (units - units / KEPT_FOR_SMALL).min(held.units.most()) * UNIT;
        most.saturating_sub(held.bytes)
    }

    /// Moves what the share holds into a new one. A stream does this for each of its messages.
    pub(in crate::ingress) fn part(&self) -> Self {
        let mut held = self.held.lock();
        let part = Held {
            bytes: std::mem::take(&mut held.bytes),
            units: held.units.split_off(),
        };
        Self {
            budget: self.budget.clone(),
            held: Arc::new(Mutex::new(part)),
        }
    }

    /// Gives bytes back. A request may be answered part by part.
    pub(in crate::ingress) fn shrink(&self, bytes: usize) {
        let mut held = self.held.lock();
        held.bytes = held.bytes.saturating_sub(bytes);
        let less = held.units.units().saturating_sub(held.bytes.div_ceil(UNIT));
        held.units.shrink(less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{AccessToken, Secret};

    fn token(queues: &str) -> Access {
        let token = AccessToken {
            name: queues.to_owned(),
            roles: "insert".parse().unwrap(),
            scope: queues.parse().unwrap(),
            worker: None,
            calls_per_second: None,
            created_unix_ms: 0,
            expires_unix_ms: None,
        };
        Access::ByToken(Secret::new().unwrap().hash(), Arc::new(token))
    }

    #[test]
    fn room_is_taken_as_a_request_grows_and_returns_with_its_end() {
        let budget = Budget::new(64 << 10);
        let (first, second) = (budget.share(), budget.share());
        first.grow(32 << 10).unwrap();
        first.grow(10).unwrap();
        assert_eq!(second.grow(32 << 10), Err(NoRoom::OfAll(64 << 10)));
        first.shrink(1 << 10);
        second.grow(32 << 10).unwrap();
        drop(second);
        first.grow(31 << 10).unwrap();
    }

    #[test]
    fn an_answer_that_is_larger_than_all_finds_room_when_there_is_some() {
        let budget = Budget::new(1 << 20);
        let answers: Vec<_> = (0..3)
            .map(|_| budget.answer(&Access::Open, 100 << 20).unwrap())
            .collect();
        assert!(budget.answer(&Access::Open, 100 << 20).is_err());
        budget.answer(&Access::Open, 1 << 10).unwrap();
        drop(answers);
        budget.answer(&Access::Open, 100 << 20).unwrap();
    }

    #[test]
    fn a_restricted_token_has_half_and_others_have_the_rest() {
        let budget = Budget::new(1 << 20);
        let (mine, other) = (token("a.*"), token("b.*"));
        let bodies: Vec<_> = (0..2).map(|_| budget.share()).collect();
        bodies.iter().for_each(|body| body.belongs_to(&mine));
        assert_eq!(
            bodies[0].left(),
            512 << 10,
            "a token that has nothing else in hand has all of its half"
        );
        bodies[0].grow(400 << 10).unwrap();
        let half = NoRoom::OfToken(512 << 10);
        assert_eq!(bodies[1].grow(100 << 10), Err(half));
        assert!(
            half.to_string().contains("half of request_budget"),
            "{half}"
        );
        bodies[1].grow(48 << 10).unwrap();
        assert_eq!(budget.answer(&mine, 200 << 10).err(), Some(half));
        // Small answers get through next to large ones.
        let small = budget.answer(&mine, 60 << 10).unwrap();
        assert_eq!(budget.answer(&mine, 60 << 10).err(), Some(half));
        let part = bodies[0].part();
        drop(small);
        assert_eq!(budget.held(), 448 << 10);
        budget.answer(&other, 256 << 10).unwrap();
        drop(part);
        bodies[0].grow(300 << 10).unwrap();
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
