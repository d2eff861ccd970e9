//! What a task belongs to besides its queue: a sequence, a tree, an execution.
//!
//! The locking reads of all transactions that change statuses bring these columns along, so that the
//! steps hear of them with each change.

use super::{sequences::Member, step::InTree};
use crate::{
    model::{ExecutionId, QueueName},
    store::{
        Result,
        sql::rows::{columns, execution_id, task_id},
    },
};

/// The columns of `tasks` that [`BelongsColumns`] reads.
pub(crate) const BELONGS_COLUMNS: &str = "COALESCE(sequence, '') AS member_of, COALESCE(on_dead, 0) AS member_holds, \
     COALESCE(sequence_place, 0) AS member_place, tree AS in_tree, \
     execution AS step_of";

columns! {
    pub(crate) struct BelongsColumns {
        member_of: String,
        member_holds: i64,
        member_place: i64,
        in_tree: Option<Vec<u8>>,
        step_of: Option<Vec<u8>>,
    }
}

/// What a task belongs to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Belongs {
    pub(crate) member: Option<Member>,
    pub(crate) tree: Option<InTree>,
    /// The execution that it is a step of.
    pub(crate) execution: Option<ExecutionId>,
}

/// Reads the column, which has the id of the tree, and that of the subtree behind it.
fn in_tree(column: &[u8]) -> Result<Option<InTree>> {
    let (tree, subtree) = column.split_at(column.len().min(16));
    if tree.is_empty() {
        return Ok(None);
    }
    Ok(Some(InTree {
        tree: task_id(tree)?,
        subtree: match subtree {
            [] => None,
            subtree => Some(task_id(subtree)?),
        },
    }))
}

impl BelongsColumns {
    pub(crate) fn of(self, queue: &QueueName) -> Result<Belongs> {
        Ok(Belongs {
            member: Member::of(queue, &self.member_of, self.member_holds, self.member_place),
            tree: in_tree(self.in_tree.as_deref().unwrap_or_default())?,
            execution: match self.step_of.as_deref() {
                None | Some([]) => None,
                Some(id) => Some(execution_id(id)?),
            },
        })
    }
}
