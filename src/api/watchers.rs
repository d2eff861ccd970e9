//! The number of watches that each token has, and of the tasks that are watched.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use super::error::Error;
use crate::model::{Access, Caller, SecretHash};

/// The watches of one token in a process, at most.
const MOST_OF_TOKEN: usize = 1_000;

/// The tasks that are watched in a process, and those of one token, at most. One call may watch a thousand.
const MOST_TASKS: usize = 100_000;
const MOST_TASKS_OF_TOKEN: usize = 20_000;

/// How many watches each token has in this process. Clones are the same.
#[derive(Clone, Default)]
pub struct Watchers(Arc<Mutex<Counts>>);

#[derive(Default)]
struct Counts {
    /// Of all calls, also of those without token.
    tasks: usize,
    tokens: HashMap<SecretHash, OfToken>,
}

#[derive(Default)]
struct OfToken {
    calls: usize,
    tasks: usize,
}

/// A watch that counts for its token.
pub(super) struct Counted {
    watchers: Watchers,
    token: Option<SecretHash>,
    tasks: usize,
}

impl Watchers {
    /// Takes a place for a call that watches so many tasks; 0: a whole queue.
    pub(super) fn admit(&self, caller: &Caller, tasks: usize) -> Result<Counted, Error> {
        let token = match &caller.access {
            Access::ByToken(hash, _) => Some(*hash),
            Access::Open => None,
        };
        let mut counts = self.0.lock();
        let refuse = |why: String| Err(Error::ManyWatchers(format!("{why} already; try again later")));
        if counts.tasks + tasks > MOST_TASKS {
            return refuse(format!("calls watch {} tasks of at most {MOST_TASKS} in this process", counts.tasks));
        }
        if let Some(hash) = token {
            let of_token = counts.tokens.entry(hash).or_default();
            if of_token.calls >= MOST_OF_TOKEN {
                return refuse(format!("{MOST_OF_TOKEN} calls of this token watch tasks"));
            }
            if of_token.tasks + tasks > MOST_TASKS_OF_TOKEN {
                let watched = of_token.tasks;
                return refuse(format!("calls of this token watch {watched} tasks of at most {MOST_TASKS_OF_TOKEN}"));
            }
            of_token.calls += 1;
            of_token.tasks += tasks;
        }
        counts.tasks += tasks;
        Ok(Counted { watchers: self.clone(), token, tasks })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.watchers.0.lock();
        counts.tasks -= self.tasks;
        let Some(token) = self.token else { return };
        if let Some(of_token) = counts.tokens.get_mut(&token) {
            of_token.calls -= 1;
            of_token.tasks -= self.tasks;
            if of_token.calls == 0 {
                counts.tokens.remove(&token);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{AccessToken, Client, Protocol, Scope};

    fn caller(access: Access) -> Caller {
        Caller { client: Client { protocol: Protocol::Http, peer: None }, access }
    }

    fn of_token(byte: u8) -> Caller {
        let token = AccessToken {
            name: byte.to_string(),
            roles: "read".parse().unwrap(),
            scope: Scope::default(),
            worker: None,
            calls_per_second: None,
            created_unix_ms: 0,
            expires_unix_ms: None,
        };
        caller(Access::ByToken(SecretHash([byte; 32]), Arc::new(token)))
    }

    #[test]
    fn the_tasks_of_calls_count_and_not_only_the_calls() {
        let watchers = Watchers::default();
        let refused = |caller: &Caller, tasks| watchers.admit(caller, tasks).err().map(|error| error.to_string());
        let mut held: Vec<_> = (0..20).map(|_| watchers.admit(&of_token(1), 1_000).unwrap()).collect();
        let why = refused(&of_token(1), 1).unwrap();
        assert!(why.contains("calls of this token watch 20000 tasks of at most 20000"), "{why}");
        // A queue is no task.
        held.push(watchers.admit(&of_token(1), 0).unwrap());
        for n in 2..=5 {
            held.extend((0..20).map(|_| watchers.admit(&of_token(n), 1_000).unwrap()));
        }
        let why = refused(&caller(Access::Open), 1).unwrap();
        assert!(why.contains("calls watch 100000 tasks of at most 100000"), "{why}");
        drop(held);
        assert_eq!(refused(&of_token(1), 1_000), None);
        assert!(watchers.0.lock().tokens.is_empty() && watchers.0.lock().tasks == 0);
        let calls: Vec<_> = (0..MOST_OF_TOKEN).map(|_| watchers.admit(&of_token(1), 0).unwrap()).collect();
        assert!(refused(&of_token(1), 0).unwrap().contains("1000 calls of this token watch tasks already"));
        drop(calls);
    }
}
