//! The lists of the tasks of trees.

use crate::{
    model::TaskId,
    store::{
        Result,
        sql::{
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

/// Adds tasks to the lists of their trees. The pairs are sorted.
pub(super) async fn add_members<S: Session>(
    session: &mut S,
    joined: &[(TaskId, TaskId)],
) -> Result<()> {
    for piece in pieces(joined, |_| 0) {
        let rows = piece.iter().map(|(tree, task)| [tree.into(), task.into()]);
        let join = Statement::new("INSERT INTO tree_tasks (tree, task)").values(rows);
        session.execute(join.sql(&S::keep_first("task"))).await?;
    }
    Ok(())
}

/// Removes tasks from the lists of their trees. The pairs are sorted.
pub(super) async fn remove_members<S: Session>(
    session: &mut S,
    left: &[(TaskId, TaskId)],
) -> Result<()> {
    for of_tree in left.chunk_by(|(a, _), (b, _)| a == b) {
        let tree = &of_tree[0].0;
        let tasks: Vec<TaskId> = of_tree.iter().map(|(_, task)| *task).collect();
        for tasks in lists(&tasks) {
            let leave = Statement::new("DELETE FROM tree_tasks WHERE tree = ? AND task IN ")
                .bind(tree)
                .list(tasks);
            session.execute(leave).await?;
        }
    }
    Ok(())
}
