//! The topics of the bus.

use std::{borrow::Cow, fmt};

/// The topics. Their names are public, prefixed with `Settings::topic_prefix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Topic {
    Pipeline,
    TaskResults,
}

/// The name of a topic or of a log, without the prefix.
pub type TopicName = Cow<'static, str>;

impl Topic {
    pub const ALL: [Self; 2] = [Self::Pipeline, Self::TaskResults];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pipeline => "pipeline",
            Self::TaskResults => "task-results",
        }
    }
}

impl From<Topic> for TopicName {
    fn from(topic: Topic) -> Self {
        topic.as_str().into()
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
