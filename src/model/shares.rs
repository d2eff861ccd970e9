//! A limit that all callers share and that no single restricted token can use up.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use super::{Access, SecretHash};

/// A number of units (calls, connections, bytes) that all callers together may hold at a time.
///
/// A token that is restricted to some queues or to one worker may hold at most half of them, so
/// that it cannot lock out everybody else. A caller without such a restriction may use all of them,
/// because it owns the installation. Cheap to clone; clones share the units.
#[derive(Clone, Debug)]
pub struct Shares(Arc<Bound>);

#[derive(Debug)]
struct Bound {
    most: usize,
    held: Mutex<HeldUnits>,
}

#[derive(Debug, Default)]
struct HeldUnits {
    by_all: usize,
    /// Only restricted tokens that hold something have an entry.
    by_token: HashMap<SecretHash, usize>,
}

/// There are not enough free units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoShare {
    /// All callers together hold too many of the given total of units.
    OfAll(usize),
    /// This restricted token holds too many of the given number of units, which is half of the
    /// total.
    OfToken(usize),
}

impl NoShare {
    /// The maximum number of units that the caller may hold.
    pub fn most(self) -> usize {
        match self {
            Self::OfAll(most) | Self::OfToken(most) => most,
        }
    }
}

impl Shares {
    pub fn new(most: usize) -> Self {
        Self(Arc::new(Bound {
            most,
            held: Mutex::default(),
        }))
    }

    /// Takes `units` for a caller. They are released when the returned share is dropped.
    pub fn take(&self, access: &Access, units: usize) -> Result<Share, NoShare> {
        let mut share = self.empty(access);
        share.grow(units)?;
        Ok(share)
    }

    /// Creates a share without units for a caller.
    pub fn empty(&self, access: &Access) -> Share {
        Share {
            shares: self.clone(),
            token: access.restricted(),
            units: 0,
        }
    }

    /// The number of units that all callers hold at present.
    pub fn held(&self) -> usize {
        self.0.held.lock().by_all
    }

    /// The maximum number of units that this caller may hold at a time.
    pub fn most_of(&self, access: &Access) -> usize {
        self.most_of_token(access.restricted().as_ref())
    }

    fn most_of_token(&self, token: Option<&SecretHash>) -> usize {
        if token.is_some() {
            (self.0.most / 2).max(1)
        } else {
            self.0.most
        }
    }
}

/// Units that one caller holds. Dropping the share releases them.
#[derive(Debug)]
pub struct Share {
    shares: Shares,
    token: Option<SecretHash>,
    units: usize,
}

impl Share {
    /// Takes more units. On error the share is unchanged.
    pub fn grow(&mut self, units: usize) -> Result<(), NoShare> {
        self.grow_leaving(units, |_| 0)
    }

    /// Takes more units, but leaves `kept` of the total free for smaller calls. It also leaves
    /// `kept` of a restricted token's half free, unless this share is all that the token holds. On
    /// error the share is unchanged.
    pub fn grow_leaving(
        &mut self,
        units: usize,
        kept: impl Fn(usize) -> usize,
    ) -> Result<(), NoShare> {
        let bound = &*self.shares.0;
        let most_of_token = self.shares.most_of_token(self.token.as_ref());
        let mut held = bound.held.lock();
        let of_token = self
            .token
            .map(|token| held.by_token.get(&token).copied().unwrap_or_default());
        let is_too_much = |of_token: usize| {
            let kept = if of_token > self.units {
                kept(most_of_token)
            } else {
                0
            };
            of_token.saturating_add(units).saturating_add(kept) > most_of_token
        };
        if of_token.is_some_and(is_too_much) {
            return Err(NoShare::OfToken(most_of_token));
        }
        if held
            .by_all
            .saturating_add(units)
            .saturating_add(kept(bound.most))
            > bound.most
        {
            return Err(NoShare::OfAll(bound.most));
        }
        if let (Some(token), Some(of_token)) = (self.token, of_token)
            && units > 0
        {
            held.by_token.insert(token, of_token + units);
        }
        held.by_all += units;
        self.units += units;
        Ok(())
    }

    /// Releases at most `units` units.
    pub fn shrink(&mut self, units: usize) {
        let units = units.min(self.units);
        self.units -= units;
        let mut held = self.shares.0.held.lock();
        held.by_all -= units;
        if let Some(token) = self.token {
            held.give_back(&token, units);
        }
    }

    /// Transfers the units to another caller. On error they stay with the present one.
    pub fn pass_to(&mut self, access: &Access) -> Result<(), NoShare> {
        let token = access.restricted();
        if token == self.token {
            return Ok(());
        }
        let mut held = self.shares.0.held.lock();
        if let Some(token) = token {
            let most_of_token = self.shares.most_of_token(Some(&token));
            let of_token = held.by_token.get(&token).copied().unwrap_or_default() + self.units;
            if of_token > most_of_token {
                return Err(NoShare::OfToken(most_of_token));
            }
            if self.units > 0 {
                held.by_token.insert(token, of_token);
            }
        }
        if let Some(before) = self.token {
            held.give_back(&before, self.units);
        }
        self.token = token;
        Ok(())
    }

    pub fn units(&self) -> usize {
        self.units
    }

    /// The maximum number of units that the caller may hold at a time.
    pub fn most(&self) -> usize {
        self.shares.most_of_token(self.token.as_ref())
    }

    /// Moves all units into a new share of the same caller.
    pub fn split_off(&mut self) -> Self {
        let units = std::mem::take(&mut self.units);
        Self {
            shares: self.shares.clone(),
            token: self.token,
            units,
        }
    }
}

impl HeldUnits {
    fn give_back(&mut self, token: &SecretHash, units: usize) {
        if let Some(of_token) = self.by_token.get_mut(token) {
            *of_token -= units;
            if *of_token == 0 {
                self.by_token.remove(token);
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(self.units);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{AccessToken, Scope, Secret};

    fn token(queues: &str) -> Access {
        let secret = Secret::new().unwrap();
        let token = AccessToken {
            name: queues.to_owned(),
            roles: "insert".parse().unwrap(),
            scope: queues.parse::<Scope>().unwrap(),
            worker: None,
            calls_per_second: None,
            created_unix_ms: 0,
            expires_unix_ms: None,
        };
        Access::ByToken(secret.hash(), Arc::new(token))
    }

    #[test]
    fn a_restricted_token_holds_at_most_half() {
        let shares = Shares::new(10);
        let mine = token("a.*");
        let other = token("b.*");
        let mut first = shares.take(&mine, 3).unwrap();
        let second = shares.take(&mine, 2).unwrap();
        assert_eq!(shares.take(&mine, 1).err(), Some(NoShare::OfToken(5)));
        let _others = shares.take(&other, 5).unwrap();
        assert_eq!(
            shares.take(&Access::Open, 1).err(),
            Some(NoShare::OfAll(10))
        );
        drop(second);
        first.grow(2).unwrap();
        assert_eq!(first.grow(1), Err(NoShare::OfToken(5)));
        assert_eq!((first.units(), shares.held()), (5, 10));
        first.shrink(9);
        assert_eq!((first.units(), shares.held()), (0, 5));
    }

    #[test]
    fn units_that_are_passed_on_count_for_their_new_caller() {
        let shares = Shares::new(4);
        let mine = token("a.*");
        let other = token("b.*");
        let mut share = shares.take(&mine, 2).unwrap();
        let held = shares.take(&other, 1).unwrap();
        assert_eq!(share.pass_to(&other), Err(NoShare::OfToken(2)));
        drop(held);
        share.pass_to(&other).unwrap();
        assert_eq!(shares.take(&other, 1).err(), Some(NoShare::OfToken(2)));
        shares.take(&mine, 2).unwrap();
        share.pass_to(&Access::Open).unwrap();
        assert_eq!(shares.held(), 2);
        drop(share);
        assert!(shares.held() == 0 && shares.0.held.lock().by_token.is_empty());
    }

    #[test]
    fn a_large_call_leaves_a_part_to_small_ones() {
        let shares = Shares::new(16);
        let eighth = |most: usize| most / 8;
        let mine = token("a.*");
        let mut alone = shares.empty(&mine);
        alone.grow_leaving(8, eighth).unwrap();
        alone.shrink(4);
        let mut second = shares.empty(&mine);
        assert_eq!(second.grow_leaving(4, eighth), Err(NoShare::OfToken(8)));
        second.grow_leaving(3, eighth).unwrap();
        let mut moved = second.split_off();
        assert_eq!((second.units(), moved.units(), moved.most()), (0, 3, 8));
        moved.grow(1).unwrap();
        let mut other = shares.empty(&Access::Open);
        assert_eq!(other.grow_leaving(7, eighth), Err(NoShare::OfAll(16)));
        other.grow_leaving(6, eighth).unwrap();
        assert_eq!(shares.held(), 14);
    }

    #[test]
    fn an_unrestricted_caller_may_hold_everything() {
        for access in [Access::Open, token("*")] {
            let shares = Shares::new(3);
            let all = shares.take(&access, 3).unwrap();
            assert_eq!(shares.take(&access, 1).err(), Some(NoShare::OfAll(3)));
            drop(all);
            assert_eq!(shares.held(), 0);
        }
    }
}
