//! The settings and states of trees: a task, its root, and all that is discovered from it.

use std::{fmt, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{SubscriptionName, millis};

/// The maximum time-out of a tree.
const LONGEST: Duration = Duration::from_secs(3650 * 24 * 3600);

/// What dead tasks mean for the end of their tree. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum TreeOnDead {
    /// The tree ends as failed.
    #[default]
    Count = 0,
    /// The tree ends as done, whatever became of its tasks.
    Ignore = 1,
    /// The tree stays open until the task is sent again, or its letter is purged.
    Hold = 2,
}

impl TreeOnDead {
    pub const ALL: [Self; 3] = [Self::Count, Self::Ignore, Self::Hold];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Ignore => "ignore",
            Self::Hold => "hold",
        }
    }

    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known as i64 == number)
    }
}

/// Whether a tree waits for tasks, and how it ended. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[repr(u8)]
pub enum TreeState {
    /// A task of it is unfinished, or dead and holds it.
    Open = 0,
    /// Nothing of it is unfinished.
    Done = 1,
    /// Nothing of it is unfinished, and a task is dead or cancelled, or became a letter.
    Failed = 2,
}

impl TreeState {
    pub const ALL: [Self; 3] = [Self::Open, Self::Done, Self::Failed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "OPEN",
            Self::Done => "DONE",
            Self::Failed => "FAILED",
        }
    }

    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known as i64 == number)
    }

    /// Reads a state as callers write it.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|known| known.as_str().eq_ignore_ascii_case(text))
            .ok_or_else(|| format!("state {text:?} is unknown; expected OPEN, DONE or FAILED"))
    }
}

impl fmt::Display for TreeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The record of a feed that a tree came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedRef {
    pub feed: SubscriptionName,
    /// Which record it is, for the source.
    pub reference: String,
}

/// A tree to begin.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewTree {
    /// The queue that gets a task when the tree has ended. Empty: none.
    pub then: String,
    /// All tasks of the tree must have their completions within this time.
    pub timeout: Option<Duration>,
    /// `None`: as its topology says, or `count`.
    pub on_dead: Option<TreeOnDead>,
    /// The record of a feed that hears of the end. Set inside of the process only.
    pub feed: Option<FeedRef>,
}

impl NewTree {
    /// The deadline of the tree; 0: it has none.
    pub fn deadline_unix_ms(&self, now_unix_ms: i64) -> Result<i64, String> {
        let Some(timeout) = self.timeout else {
            return Ok(0);
        };
        if timeout < Duration::from_millis(1) || timeout > LONGEST {
            return Err(format!(
                "tree.timeout is {}; must be 1ms to 3650days",
                humantime::format_duration(timeout)
            ));
        }
        Ok(now_unix_ms.saturating_add(millis(timeout)))
    }
}

/// What a tree keeps from its beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TreeSettings {
    pub on_dead: TreeOnDead,
    /// 0: it has none.
    pub deadline_unix_ms: i64,
    /// The task of its end.
    pub then: Option<ThenTask>,
    /// The record of a feed that hears of the end.
    pub feed: Option<FeedRef>,
}

/// The task that is stored when a tree or a subtree ends, as far as it is known at its beginning:
/// with the settings that its queue has then. SQL stores it as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ThenTask {
    pub queue: String,
    pub shard: u32,
    pub replicas: u32,
    pub(super) priority: i64,
    pub max_attempts: u32,
    pub lease_ms: u32,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub limit_key: String,
    /// [`super::Backoff::packed`]; `None`: that of its queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) backoff: Option<Vec<u8>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_out_has_bounds() {
        let timeout = |seconds| NewTree {
            timeout: Some(Duration::from_secs(seconds)),
            ..NewTree::default()
        };
        assert_eq!(timeout(2).deadline_unix_ms(1_000), Ok(3_000));
        assert_eq!(NewTree::default().deadline_unix_ms(1_000), Ok(0));
        assert!(timeout(0).deadline_unix_ms(1_000).is_err());
    }
}
