//! The tasks that the ends of trees and of subtrees make.

use super::{members::add_members, new_rows::insert_rows, pending};
use crate::{
    model::{TaskId, TaskRow},
    store::{
        NewRow, Result, Turn, Unpublished,
        sql::{
            outbox::{
                batches,
                entries::{self, Entry},
            },
            session::Session,
        },
    },
};

/// Stores these tasks, with rows in the outbox that are due then. Returns them with their turns, by
/// their ids.
pub(super) async fn store_made<S: Session>(
    session: &mut S,
    mut tasks: Vec<TaskRow>,
    due_ms: i64,
) -> Result<Vec<(TaskRow, Turn)>> {
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    let mut joined: Vec<(TaskId, TaskId)> = Vec::new();
    for task in &tasks {
        joined.extend(task.tree.as_ref().map(|tree| (tree.id(task.id), task.id)));
    }
    joined.sort_unstable();
    add_members(session, &joined).await?;
    // Each has an id of its own and no key, so nothing that is stored can be in its way.
    tasks.sort_unstable_by_key(|task| task.id);
    let mut rows = Vec::with_capacity(tasks.len());
    let mut entries = Vec::with_capacity(tasks.len());
    for task in tasks {
        let row = NewRow {
            task,
            // It has a row of its own in the outbox, and is in no batch.
            unpublished: Unpublished::Missing,
            due_unix_ms: due_ms,
        };
        entries.push(Entry::released(
            row.task.id,
            row.task.queue.clone(),
            row.task.priority,
            row.task.weight(),
            Unpublished::Fresh,
            row.due_unix_ms,
            entries::new_turn(),
        ));
        rows.push(row);
    }
    let new: Vec<&NewRow> = rows.iter().collect();
    insert_rows(session, &new, batches::new_batch()).await?;
    pending::keep_deadlines(session, &new).await?;
    entries::put(session, &entries).await?;
    let made = rows.into_iter().zip(&entries).map(|(row, entry)| {
        let mut task = row.task;
        // Its tree has counted it.
        task.tree = None;
        (task, entry.turn())
    });
    Ok(made.collect())
}
