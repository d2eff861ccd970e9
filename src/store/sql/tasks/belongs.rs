//! What a task belongs to besides its queue: a sequence, a tree.
//!
//! The locking reads of all transactions that change statuses bring these columns along, so that the
//! steps hear of them with each change.

use super::sequences::Member;
use crate::{
    model::{QueueName, TaskId},
    store::{
        Result,
        sql::rows::{columns, tree_of},
    },
};

/// The columns of `tasks` that [`BelongsColumns`] reads.
pub(crate) const BELONGS_COLUMNS: &str = "COALESCE(sequence, '') AS member_of, COALESCE(on_dead, 0) AS member_holds, \
     COALESCE(sequence_place, 0) AS member_place, tree AS in_tree";

columns! {
    pub(crate) struct BelongsColumns {
        member_of: String,
        member_holds: i64,
        member_place: i64,
        in_tree: Option<Vec<u8>>,
    }
}

/// What a task belongs to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Belongs {
    pub(crate) member: Option<Member>,
    pub(crate) tree: Option<TaskId>,
}

impl BelongsColumns {
    pub(crate) fn of(self, queue: &QueueName) -> Result<Belongs> {
        Ok(Belongs {
            member: Member::of(queue, &self.member_of, self.member_holds, self.member_place),
            tree: tree_of(self.in_tree.as_deref())?,
        })
    }
}
