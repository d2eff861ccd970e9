//! The fencing token of a lease. It contains the id of its shard, so that a completion needs no
//! lookup.

use std::{
    fmt::{self, Write},
    str::FromStr,
};

use super::{LeaseTrace, QueueName, ShardId};

/// Longer than most tokens.
const USUAL_BYTES: usize = 64;

/// `<queue>:<shard>:<generation>:<grant>:<attempt>:<leased_unix_ms>`, followed by `:<trace>` for a
/// sampled task. Opaque to workers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseToken {
    pub shard: ShardId,
    /// The generation of the shard. After Redis has lost a shard, it is rebuilt with the next
    /// generation.
    pub generation: u64,
    /// The number of the claim in its shard, which cannot be guessed. All leases of one claim share
    /// it.
    pub grant: u64,
    /// 1 for the first attempt. The queue rejects the number of an attempt that the task has not
    /// had yet.
    pub attempt: u32,
    /// When the lease was granted, by the clock of Redis, or 0 if unknown. Only used for the
    /// history of the task.
    pub leased_unix_ms: i64,
    /// Only for a sampled task, and only used for tracing.
    pub trace: Option<Box<LeaseTrace>>,
}

/// Distinguishes the leases of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseNumber {
    pub generation: u64,
    pub grant: u64,
}

impl LeaseToken {
    /// Formats the token. Unlike `to_string`, it allocates only once, because this runs for each
    /// leased task.
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(USUAL_BYTES);
        // Writing to a `String` cannot fail.
        write!(text, "{self}").ok();
        text
    }

    pub fn lease(&self) -> LeaseNumber {
        LeaseNumber {
            generation: self.generation,
            grant: self.grant,
        }
    }
}

/// The text is not a token of taskd.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("lease_token is not one that taskd gave out")]
pub struct InvalidToken;

impl fmt::Display for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}:{}:{}:{}",
            self.shard, self.generation, self.grant, self.attempt, self.leased_unix_ms
        )?;
        match &self.trace {
            Some(trace) => write!(f, ":{trace}"),
            None => Ok(()),
        }
    }
}

impl FromStr for LeaseToken {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let mut parts = text.split(':');
        let mut next = || parts.next().ok_or(InvalidToken);
        let queue = QueueName::new(next()?).map_err(|_| InvalidToken)?;
        let number = next()?.parse().map_err(|_| InvalidToken)?;
        let generation = next()?.parse().map_err(|_| InvalidToken)?;
        let grant = next()?.parse().map_err(|_| InvalidToken)?;
        let attempt = next()?.parse().map_err(|_| InvalidToken)?;
        let leased_unix_ms = next()?.parse().map_err(|_| InvalidToken)?;
        let trace = match parts.next() {
            Some(trace) => Some(Box::new(trace.parse().map_err(|_| InvalidToken)?)),
            None => None,
        };
        if parts.next().is_some() {
            return Err(InvalidToken);
        }
        Ok(Self {
            shard: ShardId { queue, number },
            generation,
            grant,
            attempt,
            trace,
            leased_unix_ms,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_its_text_and_anything_else_is_refused() {
        let untimed = "crawl.x:3:1:99:2:0";
        let timed = "crawl.x:3:1:99:2:1764000000000";
        let traced = "crawl.x:3:1:99:2:1764000000000:0af7651916cd43dd8448eb211c80319cb7ad6b716920333101-60a2418202240";
        for good in [untimed, timed, traced] {
            let token: LeaseToken = good.parse().unwrap();
            assert_eq!((&*token.to_string(), &*token.text()), (good, good));
            assert_eq!(
                (token.trace.is_some(), token.leased_unix_ms > 0),
                (good == traced, good != untimed)
            );
        }
        for bad in [
            "",
            &format!("{traced}:x"),
            "crawl",
            "crawl:3:1:9",
            "crawl:3:1:9:9",
            "crawl:3:1:9:9:x",
            "crawl:3:1:9:9:9:9",
            "cra wl:3:1:9:1:0",
            "crawl:-3:1:9:1:0",
            "crawl:3:1:x:1:0",
            ":3:1:9:1:0",
        ] {
            assert_eq!(bad.parse::<LeaseToken>(), Err(InvalidToken), "{bad:?}");
        }
    }
}
