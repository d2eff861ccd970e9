//! The flags of `change` and `requeue`, shared by the commands for single tasks and those for
//! filters.

use anyhow::Context as _;
use clap::{Args, ValueEnum};

use crate::{config::Time, wire::pb};

/// The new values of tasks.
#[derive(Args, Clone)]
#[group(required = true, multiple = true)]
pub(super) struct Values {
    /// high, medium or low
    #[arg(long, value_enum)]
    priority: Option<Level>,

    /// How many distinct workers do it
    #[arg(long, value_name = "NUM", value_parser = clap::value_parser!(u32).range(1..))]
    replicas: Option<u32>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Level {
    High,
    Medium,
    Low,
}

impl From<Level> for pb::Priority {
    fn from(level: Level) -> Self {
        match level {
            Level::High => Self::High,
            Level::Medium => Self::Medium,
            Level::Low => Self::Low,
        }
    }
}

/// Reads `NAME=VALUE`.
pub(super) fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is no header; write NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// For whom tasks are.
#[derive(Args, Clone)]
#[group(skip)]
pub(super) struct Whom {
    /// Only this worker gets the tasks
    #[arg(long, value_name = "WORKER")]
    to: Option<String>,

    /// How long they are reserved; without it until they are requeued again
    #[arg(long = "for", value_name = "TIME", requires = "to")]
    reserved_for: Option<Time>,

    /// Only the lease of this worker ends, and it does not get the tasks again
    #[arg(long, value_name = "WORKER", conflicts_with = "to")]
    away_from: Option<String>,
}

impl Values {
    /// Returns a request with these values. The caller adds the tasks.
    pub(super) fn message(&self) -> pb::ChangeTasksRequest {
        let priority = self
            .priority
            .map_or(pb::Priority::Unspecified, pb::Priority::from);
        let replicas = self.replicas.unwrap_or_default();
        pb::ChangeTasksRequest {
            priority: priority.into(),
            replicas,
            ..Default::default()
        }
    }
}

impl Whom {
    /// Returns a request for these workers. The caller adds the tasks.
    pub(super) fn message(&self) -> anyhow::Result<pb::RequeueTasksRequest> {
        let name = |worker: &Option<String>| worker.clone().unwrap_or_default();
        let reserved_for = self
            .reserved_for
            .map(|time| prost_types::Duration::try_from(time.0))
            .transpose();
        let reserved_for = reserved_for.context("--for is too long")?;
        let to = name(&self.to);
        let away_from = name(&self.away_from);
        Ok(pb::RequeueTasksRequest {
            to,
            away_from,
            reserved_for,
            ..Default::default()
        })
    }
}
