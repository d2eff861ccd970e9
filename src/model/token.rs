//! The fencing token of a lease. It names its shard, so that a completion needs no lookup.

use std::{fmt, str::FromStr};

use super::{LeaseTrace, QueueName, ShardId};

/// `<queue>:<shard>:<generation>:<grant>:<attempt>`, and `:<trace>` of a sampled task; opaque to workers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseToken {
    pub shard: ShardId,
    /// The generation of the shard. A shard that Redis lost comes back with the next one.
    pub generation: u64,
    /// The number of the claim in its shard. All leases of one claim share it.
    pub grant: u64,
    /// 1 for the first try. The queue refuses an attempt that the task has not had.
    pub attempt: u32,
    /// Of a sampled task. It decides nothing.
    pub trace: Option<Box<LeaseTrace>>,
}

/// Tells the leases of a task apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseNumber {
    pub generation: u64,
    pub grant: u64,
}

impl LeaseNumber {
    /// The lease of a result that an older taskd stored without it. No shard has the generation 0.
    pub const UNKNOWN: Self = Self { generation: 0, grant: 0 };
}

impl LeaseToken {
    pub fn lease(&self) -> LeaseNumber {
        LeaseNumber { generation: self.generation, grant: self.grant }
    }
}

/// The text is no token of taskd.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("lease_token is not one that taskd gave out")]
pub struct InvalidToken;

impl fmt::Display for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.shard, self.generation, self.grant, self.attempt)?;
        self.trace.as_ref().map_or(Ok(()), |trace| write!(f, ":{trace}"))
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
        let trace = next().ok().map(|trace| trace.parse().map(Box::new).map_err(|_| InvalidToken)).transpose()?;
        if next().is_ok() {
            return Err(InvalidToken);
        }
        Ok(Self { shard: ShardId { queue, number }, generation, grant, attempt, trace })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_its_text_and_anything_else_is_refused() {
        let token: LeaseToken = "crawl.x:3:1:99:2".parse().unwrap();
        assert_eq!(token.to_string(), "crawl.x:3:1:99:2");
        let traced = "crawl.x:3:1:99:2:0af7651916cd43dd8448eb211c80319cb7ad6b716920333101-60a2418202240";
        assert_eq!(traced.parse::<LeaseToken>().unwrap().to_string(), traced);
        for bad in [
            "",
            &format!("{traced}:1"),
            "crawl",
            "crawl:3:1:9",
            "crawl:3:1:9:9:9",
            "cra wl:3:1:9:1",
            "crawl:-3:1:9:1",
            "crawl:3:1:x:1",
            ":3:1:9:1",
        ] {
            assert_eq!(bad.parse::<LeaseToken>(), Err(InvalidToken), "{bad:?}");
        }
    }
}
