//! The wishes about tasks that need none any more.

use super::{
    session::Session,
    statement::{Statement, lists},
};
use crate::{model::TaskId, store::Result};

/// Removes the wishes about these tasks, because they are final.
pub(super) async fn remove<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<()> {
    for ids in lists(ids) {
        session.execute(Statement::new("DELETE FROM changes WHERE task_id IN ").list(ids)).await?;
    }
    Ok(())
}
