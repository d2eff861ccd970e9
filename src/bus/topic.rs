//! The topics of the bus.

use std::fmt;

/// The topics. Their names are public, prefixed with `Settings::topic_prefix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Topic {
    Pipeline,
    TaskResults,
    Expirations,
    DeadLetters,
    Events,
}

impl Topic {
    pub const ALL: [Self; 5] = [
        Self::Pipeline,
        Self::TaskResults,
        Self::Expirations,
        Self::DeadLetters,
        Self::Events,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pipeline => "pipeline",
            Self::TaskResults => "task-results",
            Self::Expirations => "expirations",
            Self::DeadLetters => "dead-letters",
            Self::Events => "events",
        }
    }

    /// True for topics that taskd itself reads. The others are for people.
    pub fn is_read(self) -> bool {
        matches!(self, Self::Pipeline | Self::TaskResults)
    }

    /// The number of partitions: one for topics that only people read, the configured number for
    /// the others.
    pub fn partitions(self, configured: u32) -> u32 {
        if self.is_read() { configured } else { 1 }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
