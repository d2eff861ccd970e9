//! Counts the calls of this process that wait: for tasks, for the ends of tasks, for events, for
//! the next line of an insert.

use super::error::Error;
use crate::model::{Access, NoShare, Share, Shares};

/// The most calls that wait in a process. Each takes about 10 KiB.
const MOST: usize = 20_000;
/// The most tasks that are watched in a process. One call may watch a thousand.
const MOST_TASKS: usize = 100_000;
/// The most watches of queues without an open shard: all processes read the names of all watched
/// queues each second, and a caller may make up any number of names.
const MOST_NEW_QUEUES: usize = 1_000;

/// The calls that wait, and what they watch. Clones share the counts.
#[derive(Clone)]
pub struct Waits {
    calls: Shares,
    tasks: Shares,
    new_queues: Shares,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            calls: Shares::new(MOST),
            tasks: Shares::new(MOST_TASKS),
            new_queues: Shares::new(MOST_NEW_QUEUES),
        }
    }
}

/// A call that waits, until this is dropped.
pub struct Wait {
    _call: Share,
    _watched: Option<Share>,
}

impl Waits {
    /// The number of calls that wait now.
    pub fn held(&self) -> usize {
        self.calls.held()
    }

    /// Counts a call that waits.
    pub(super) fn call(&self, access: &Access) -> Result<Wait, Error> {
        let call = self
            .calls
            .take(access, 1)
            .map_err(|no_share| refusal(no_share, "calls wait"))?;
        Ok(Wait {
            _call: call,
            _watched: None,
        })
    }

    /// Counts a call that waits for what becomes of this number of tasks.
    pub(super) fn of_tasks(&self, access: &Access, tasks: usize) -> Result<Wait, Error> {
        let call = self.call(access)?;
        let watched = self
            .tasks
            .take(access, tasks)
            .map_err(|no_share| refusal(no_share, "tasks are watched"))?;
        Ok(Wait {
            _watched: Some(watched),
            ..call
        })
    }

    /// Counts a call that waits for what becomes of a queue without open shards.
    pub(super) fn of_new_queue(&self, access: &Access) -> Result<Wait, Error> {
        let call = self.call(access)?;
        let watched = self.new_queues.take(access, 1);
        let watched =
            watched.map_err(|no_share| refusal(no_share, "watches are of queues without tasks"))?;
        Ok(Wait {
            _watched: Some(watched),
            ..call
        })
    }
}

fn refusal(no_share: NoShare, what: &str) -> Error {
    let most = no_share.most();
    Error::ManyWaits(match no_share {
        NoShare::OfAll(_) => format!("{what} already, {most} in this process; try again later"),
        NoShare::OfToken(_) => {
            format!(
                "{what} already, {most} for this token, which is half of all in this process; try again later"
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{AccessToken, Scope, SecretHash};

    fn of_token(byte: u8, queues: &str) -> Access {
        let token = AccessToken {
            name: byte.to_string(),
            roles: "read".parse().unwrap(),
            scope: queues.parse::<Scope>().unwrap(),
            worker: None,
            calls_per_second: None,
            created_unix_ms: 0,
            expires_unix_ms: None,
        };
        Access::ByToken(SecretHash([byte; 32]), Arc::new(token))
    }

    fn why(refused: Result<Wait, Error>) -> String {
        refused.err().expect("there is no room").to_string()
    }

    #[test]
    fn the_tasks_of_calls_count_and_not_only_the_calls() {
        let waits = Waits::default();
        let mine = of_token(1, "a.*");
        let other = of_token(2, "b.*");
        let mut held: Vec<Wait> = (0..50)
            .map(|_| waits.of_tasks(&mine, 1_000).unwrap())
            .collect();
        let said = "tasks are watched already, 50000 for this token, which is half of all in this process; try again later";
        assert_eq!(why(waits.of_tasks(&mine, 1)), said);
        held.push(waits.call(&mine).unwrap());
        held.extend((0..50).map(|_| waits.of_tasks(&other, 1_000).unwrap()));
        let said = "tasks are watched already, 100000 in this process; try again later";
        assert_eq!(why(waits.of_tasks(&Access::Open, 1)), said);
        assert_eq!(
            waits.calls.held(),
            101,
            "a call that was refused does not wait"
        );
        drop(held);
        assert_eq!((waits.calls.held(), waits.tasks.held()), (0, 0));
    }

    #[test]
    fn a_restricted_token_has_half_of_the_calls() {
        let waits = Waits::default();
        let mine = of_token(1, "a.*");
        let held: Vec<Wait> = (0..MOST / 2).map(|_| waits.call(&mine).unwrap()).collect();
        assert!(why(waits.call(&mine)).starts_with("calls wait already, 10000 for this token"));
        let others: Vec<Wait> = (0..MOST / 2)
            .map(|_| waits.call(&of_token(2, "*")).unwrap())
            .collect();
        assert!(
            why(waits.call(&Access::Open)).starts_with("calls wait already, 20000 in this process")
        );
        drop((held, others));
        let held: Vec<Wait> = (0..MOST_NEW_QUEUES / 2)
            .map(|_| waits.of_new_queue(&mine).unwrap())
            .collect();
        assert!(
            why(waits.of_new_queue(&mine))
                .starts_with("watches are of queues without tasks already, 500 for")
        );
        drop((waits.call(&mine).unwrap(), held));
    }
}
