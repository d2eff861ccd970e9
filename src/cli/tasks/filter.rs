//! The flags that choose tasks.

use std::ffi::OsStr;

use anyhow::bail;
use clap::{
    Arg, Args, Command,
    builder::{PossibleValue, StringValueParser, TypedValueParser},
};

use super::super::{patience::time, values::header};
use crate::{
    model::TaskStatus,
    wire::{pb, time::timestamp},
};

#[derive(Args)]
pub(super) struct Filter {
    /// Tasks with one of these statuses, with commas between; needs a queue
    #[arg(long, value_name = "STATUS", value_parser = Statuses::parser(), hide_possible_values = true)]
    pub(super) status: Option<Statuses>,

    /// The task with this key; without a queue, in every queue
    #[arg(long, value_name = "KEY", conflicts_with_all = ["key_prefix", "worker"])]
    key: Option<String>,

    /// Tasks whose key begins so; needs a queue
    #[arg(long, value_name = "TEXT")]
    key_prefix: Option<String>,

    /// Tasks with this header; may be repeated; needs a queue
    #[arg(long, value_name = "NAME=VALUE", value_parser = header)]
    header: Vec<(String, String)>,

    /// Tasks that this worker has completed
    #[arg(long, value_name = "NAME")]
    worker: Option<String>,

    /// Tasks that died for a reason that begins so; needs a queue
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    /// Tasks of this tree; with it only --key needs a queue
    #[arg(long, value_name = "ID", conflicts_with = "worker")]
    tree: Option<String>,

    /// Inserted at this time or before, and not changed since: the as_of of a --dry-run
    #[arg(long, value_name = "TIME", value_parser = time)]
    as_of: Option<i64>,

    /// Inserted at this time or later: RFC 3339, or so long ago (2h, 7days)
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<i64>,

    /// Inserted before this time: RFC 3339, or so long ago
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<i64>,
}

/// The value of `--status`. It is a type of its own because clap takes a `Vec` for a flag that may
/// be repeated.
#[derive(Clone)]
pub(super) struct Statuses(Vec<TaskStatus>);

impl Statuses {
    /// Returns a parser that also names the statuses to shell completions.
    fn parser() -> impl TypedValueParser<Value = Self> {
        Listed
    }
}

const STATUSES: [&str; 8] = [
    "pending",
    "queued",
    "assigned",
    "delayed",
    "completed",
    "dead",
    "cancelled",
    "unfinished",
];

/// Parses a comma-separated list of statuses, in upper or lower case.
#[derive(Clone)]
struct Listed;

impl TypedValueParser for Listed {
    type Value = Statuses;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Statuses, clap::Error> {
        let read = |text: &str| TaskStatus::list(text).map(Statuses);
        StringValueParser::new()
            .try_map(move |text| read(&text))
            .parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(STATUSES.into_iter().map(PossibleValue::new)))
    }
}

impl Filter {
    /// Returns true if any flag of the filter is given.
    pub(super) fn chooses(&self) -> bool {
        self.of_queue().is_some()
            || self.key.is_some()
            || self.worker.is_some()
            || self.tree.is_some()
            || self.since.is_some()
            || self.until.is_some()
            || self.as_of.is_some()
    }

    /// Returns the first given flag that needs a queue.
    fn of_queue(&self) -> Option<&'static str> {
        [
            ("--status", self.status.is_some()),
            ("--key-prefix", self.key_prefix.is_some()),
            ("--header", !self.header.is_empty()),
            ("--reason", self.reason.is_some()),
        ]
        .into_iter()
        .find_map(|(flag, is_given)| is_given.then_some(flag))
    }

    pub(super) fn message(&self, queue: Option<&str>) -> anyhow::Result<pb::TaskFilter> {
        if let (Some(flag), None) = (self.of_queue(), queue)
            && self.tree.is_none()
        {
            bail!("{flag} needs a queue: write QUEUE {flag} …");
        }
        let statuses = self.status.iter().flat_map(|statuses| &statuses.0);
        Ok(pb::TaskFilter {
            queue: queue.unwrap_or_default().to_owned(),
            statuses: statuses
                .map(|status| pb::TaskStatus::from(*status).into())
                .collect(),
            key: self.key.clone().unwrap_or_default().into(),
            key_prefix: self.key_prefix.clone().unwrap_or_default().into(),
            headers: self.header.iter().cloned().collect(),
            worker: self.worker.clone().unwrap_or_default(),
            since: self.since.map(timestamp),
            until: self.until.map(timestamp),
            reason: self.reason.clone().unwrap_or_default(),
            as_of: self.as_of.map(timestamp),
            tree: self.tree.clone().unwrap_or_default(),
        })
    }
}
