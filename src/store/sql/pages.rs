//! Pages of the outbox, with their tasks.

use std::collections::{HashMap, HashSet};

use super::{
    Backend, SqlStore,
    outbox::{self, Listed},
    retry::repeating,
    statement::{Statement, lists},
};
use crate::model::{TaskId, TaskRow};
use crate::store::{OutboxRow, PAGE_BYTES, Result};

impl<DB: Backend> SqlStore<DB> {
    /// A page of the outbox without what is final, or has no task any more, which is removed.
    pub(super) async fn outbox_page<'a>(
        &self,
        list: impl Fn(usize) -> Statement<'a> + Send + Sync,
        limit: usize,
        without: &HashSet<TaskId>,
    ) -> Result<Vec<OutboxRow>> {
        loop {
            let listed: Vec<outbox::ListedColumns> = self.read(list(limit + without.len())).await?;
            let listed = listed.into_iter().map(Listed::try_from).collect::<Result<Vec<_>>>()?;
            let page = first_of(listed, limit, without);
            let mut tasks = self.unfinished_of(&page).await?;
            let (mut rows, mut over) = (Vec::with_capacity(page.len()), Vec::new());
            for row in page {
                match tasks.remove(&row.task) {
                    Some(task) => rows.push(row.with(task)),
                    None => over.push((row.task, row.turn)),
                }
            }
            if !over.is_empty() {
                repeating(|| async {
                    let mut tx = self.begin().await?;
                    outbox::remove_over(&mut *tx, &over).await?;
                    Ok(tx.commit().await?)
                })
                .await?;
            }
            if !rows.is_empty() || over.is_empty() {
                return Ok(rows);
            }
        }
    }

    /// Those tasks of a page that are unfinished.
    async fn unfinished_of(&self, page: &[Listed]) -> Result<HashMap<TaskId, TaskRow>> {
        let ids: Vec<TaskId> = page.iter().map(|row| row.task).collect();
        let mut tasks = HashMap::with_capacity(ids.len());
        for ids in lists(&ids) {
            for columns in self.read::<outbox::UnfinishedColumns>(outbox::tasks(ids)).await? {
                if !columns.is_final() {
                    let task: TaskRow = columns.task.try_into()?;
                    tasks.insert(task.id, task);
                }
            }
        }
        Ok(tasks)
    }
}

/// The rows up to the one that makes it [`PAGE_BYTES`].
fn first_of(listed: Vec<Listed>, limit: usize, without: &HashSet<TaskId>) -> Vec<Listed> {
    let mut bytes = 0;
    let wanted = listed.into_iter().filter(|row| !without.contains(&row.task)).take(limit);
    let fits = |row: &Listed| {
        let is_room = bytes < PAGE_BYTES;
        bytes += row.bytes;
        is_room
    };
    wanted.take_while(fits).collect()
}
