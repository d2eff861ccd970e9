//! Notifies those that watch tasks: of new ones, and of ends that SQL has stored.

use std::iter;

use crate::{
    model::{TaskId, TaskRow, TaskStatus},
    pipelines::context::Context,
    store::{Settled, Settlement},
};

/// Notifies watchers of tasks that are new in SQL.
pub fn new_tasks<'a>(context: &Context, rows: impl Iterator<Item = &'a TaskRow>) {
    let announcer = context.queue.announcer();
    if !announcer.is_wanted() {
        return;
    }
    let now = announcer.now_unix_ms();
    for row in rows {
        let status = if row.not_before_unix_ms > now {
            TaskStatus::Delayed
        } else {
            TaskStatus::Pending
        };
        announcer.announce(
            &row.queue,
            row.created_unix_ms,
            iter::once((row.id, Some(status))),
        );
    }
}

/// Notifies watchers of settled reports. Repeats the notification of a repeated report, because the
/// first may have been lost. A credit that does not complete its task may have changed the status,
/// too.
pub(super) fn settled(context: &Context, reports: &[Settlement], settled: &[Settled]) {
    let announcer = context.queue.announcer();
    if !announcer.is_wanted() {
        return;
    }
    let now = announcer.now_unix_ms();
    for (report, settled) in reports.iter().zip(settled) {
        let (Some(task), Some(status)) = (&settled.task, settled.status) else {
            continue;
        };
        announcer.announce(
            &task.queue,
            now,
            iter::once((id_of(report), TaskStatus::of_end(status))),
        );
    }
}

fn id_of(report: &Settlement) -> TaskId {
    match report {
        Settlement::Completed { id, .. } | Settlement::Died { id, .. } => *id,
    }
}
