//! The number of watches that each token has.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use super::error::Error;
use crate::model::{Access, Caller, SecretHash};

/// The watches of one token in a process, at most.
const MOST_OF_TOKEN: usize = 1_000;

/// How many watches each token has in this process.
#[derive(Clone, Default)]
pub struct Watchers(Arc<Mutex<HashMap<SecretHash, usize>>>);

/// A watch that counts for its token.
pub(super) struct Counted {
    watchers: Watchers,
    token: Option<SecretHash>,
}

impl Watchers {
    pub(super) fn admit(&self, caller: &Caller) -> Result<Counted, Error> {
        let token = match &caller.access {
            Access::ByToken(hash, _) => Some(*hash),
            Access::Open => None,
        };
        if let Some(hash) = token {
            let mut counts = self.0.lock();
            let count = counts.entry(hash).or_default();
            if *count >= MOST_OF_TOKEN {
                let why = format!("{MOST_OF_TOKEN} calls of this token watch tasks already; try again later");
                return Err(Error::ManyWatchers(why));
            }
            *count += 1;
        }
        Ok(Counted { watchers: self.clone(), token })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Some(token) = self.token else { return };
        let mut counts = self.watchers.0.lock();
        if let Some(count) = counts.get_mut(&token) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&token);
            }
        }
    }
}
