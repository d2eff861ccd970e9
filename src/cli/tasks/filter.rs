//! The flags that choose tasks.

use clap::Args;

use super::super::patience::time;
use crate::{
    model::TaskStatus,
    wire::{pb, time::timestamp},
};

#[derive(Args)]
pub(super) struct Filter {
    /// Tasks of this queue
    #[arg(long, value_name = "NAME")]
    pub(super) queue: Option<String>,

    /// Tasks with one of these statuses, with commas between; needs --queue
    #[arg(long, value_name = "STATUS", value_parser = statuses, requires = "queue")]
    pub(super) status: Option<Statuses>,

    /// The task with this key; needs --queue
    #[arg(long, value_name = "KEY", requires = "queue", conflicts_with_all = ["key_prefix", "worker"])]
    key: Option<String>,

    /// Tasks whose key begins so; needs --queue
    #[arg(long, value_name = "TEXT", requires = "queue")]
    key_prefix: Option<String>,

    /// Tasks with this header; may be repeated; needs --queue
    #[arg(long, value_name = "NAME=VALUE", value_parser = header, requires = "queue")]
    header: Vec<(String, String)>,

    /// Tasks that this worker has completed
    #[arg(long, value_name = "NAME")]
    worker: Option<String>,

    /// Inserted at this time or later: RFC 3339, or so long ago (2h, 7days)
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<i64>,

    /// Inserted before this time: RFC 3339, or so long ago
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<i64>,
}

/// The value of `--status`. clap would take a `Vec` for a flag that may be repeated.
#[derive(Clone)]
pub(super) struct Statuses(Vec<TaskStatus>);

fn statuses(text: &str) -> Result<Statuses, String> {
    TaskStatus::list(text).map(Statuses)
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is no header; write NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

impl Filter {
    pub(super) fn message(&self) -> pb::TaskFilter {
        let statuses = self.status.iter().flat_map(|statuses| &statuses.0);
        pb::TaskFilter {
            queue: self.queue.clone().unwrap_or_default(),
            statuses: statuses
                .map(|status| pb::TaskStatus::from(*status).into())
                .collect(),
            key: self.key.clone().unwrap_or_default().into(),
            key_prefix: self.key_prefix.clone().unwrap_or_default().into(),
            headers: self.header.iter().cloned().collect(),
            worker: self.worker.clone().unwrap_or_default(),
            since: self.since.map(timestamp),
            until: self.until.map(timestamp),
        }
    }
}
