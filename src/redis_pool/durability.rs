//! How durable a write must be before it is acknowledged: WAIT and WAITAOF.

use std::time::Duration;

use redis::{Cmd, InfoDict, Value, aio::MultiplexedConnection};

use super::{check::version, error::Error, script::Batch, scripts};
use crate::config::RedisAccess;

/// The copies that a write waits for, in the same round trip.
#[derive(Clone, Debug)]
pub struct Durability {
    replicas: u32,
    aof: bool,
    timeout_ms: u64,
}

/// Fewer copies than requested were made in time. The write was made, but may yet be lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Shortfall {
    #[error("not yet durable (too many others wait for replicas): try again")]
    TooManyWait,
    #[error("not yet durable (not in the append-only file): try again")]
    NotInFile,
    #[error("not yet durable (on {has} of {wanted} replicas): try again")]
    Replicas { has: i64, wanted: u32 },
}

impl Durability {
    /// How many calls may wait on one connection, so that the last is answered within `time`: Redis
    /// serves them one after the other.
    pub(super) fn at_once(&self, time: Duration) -> usize {
        let calls = u64::try_from(time.as_millis()).unwrap_or(u64::MAX) / self.timeout_ms.max(1);
        usize::try_from(calls.clamp(1, 64)).unwrap_or(1)
    }

    /// Whether writes wait for the append-only file.
    pub fn needs_file(&self) -> bool {
        self.aof
    }

    pub(super) fn new(access: &RedisAccess) -> Option<Self> {
        let timeout_ms = u64::try_from(access.wait_timeout.as_millis()).unwrap_or(u64::MAX);
        let this = Self {
            replicas: access.wait_replicas,
            aof: access.wait_aof,
            timeout_ms,
        };
        (this.replicas > 0 || this.aof).then_some(this)
    }

    /// Appends the wait to the writes of `batch`, after one more write, to `key`
    /// (`lua/waited.lua`).
    pub fn ask(&self, batch: &mut Batch, key: &str) {
        batch.repeatable(scripts::WAITED.call(&[key]));
        let mut wait = Cmd::new();
        if self.aof {
            wait.arg("WAITAOF")
                .arg(1)
                .arg(self.replicas)
                .arg(self.timeout_ms);
        } else {
            wait.arg("WAIT").arg(self.replicas).arg(self.timeout_ms);
        }
        batch.command(wait);
    }

    /// Removes the answers to [`Self::ask`] from the end of a batch's answers, and checks them.
    pub fn judge_last(&self, answers: &mut Vec<Value>) -> Result<(), Shortfall> {
        let waited = answers.pop().unwrap_or(Value::Nil);
        answers.pop();
        self.judge(&waited)
    }

    fn judge(&self, answer: &Value) -> Result<(), Shortfall> {
        let (local, replicas) = match answer {
            Value::Int(replicas) => (1, *replicas),
            Value::Array(both) => match both[..] {
                [Value::Int(local), Value::Int(replicas)] => (local, replicas),
                _ => (0, 0),
            },
            _ => (0, 0),
        };
        if local < 1 {
            return Err(Shortfall::NotInFile);
        }
        if replicas < i64::from(self.replicas) {
            return Err(Shortfall::Replicas {
                has: replicas,
                wanted: self.replicas,
            });
        }
        Ok(())
    }

    /// Refuses a server that can never make writes this durable, and warns if it only cannot do so
    /// now.
    pub(super) async fn check(
        &self,
        server: &str,
        info: &InfoDict,
        conn: &mut MultiplexedConnection,
    ) -> Result<(), Error> {
        if self.aof {
            let known: Vec<Value> = redis::cmd("COMMAND")
                .arg("INFO")
                .arg("WAITAOF")
                .query_async(conn)
                .await?;
            if known.iter().all(|command| matches!(command, Value::Nil)) {
                return Err(Error::NoWaitAof {
                    version: version(info),
                });
            }
            if info.get::<String>("aof_enabled").as_deref() == Some("0") {
                return Err(Error::NoAof);
            }
        }
        let connected: u32 = info.get("connected_slaves").unwrap_or(0);
        if connected < self.replicas {
            tracing::warn!(
                "redis {server} has {connected} replicas, and completions wait for {}: until there are more, workers \
                 are told to try again",
                self.replicas
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_durable_enough_is_an_error() {
        let durability = |replicas, aof| Durability {
            replicas,
            aof,
            timeout_ms: 1,
        };
        let both = |local, replicas| Value::Array(vec![Value::Int(local), Value::Int(replicas)]);
        assert_eq!(durability(1, false).judge(&Value::Int(1)), Ok(()));
        assert_eq!(durability(0, true).judge(&both(1, 0)), Ok(()));
        let short = durability(2, false)
            .judge(&Value::Int(1))
            .unwrap_err()
            .to_string();
        assert_eq!(short, "not yet durable (on 1 of 2 replicas): try again");
        assert!(durability(1, true).judge(&both(1, 0)).is_err());
        let unsynced = durability(0, true)
            .judge(&both(0, 5))
            .unwrap_err()
            .to_string();
        assert_eq!(
            unsynced,
            "not yet durable (not in the append-only file): try again"
        );
        assert!(durability(0, true).judge(&Value::Nil).is_err());
    }
}
