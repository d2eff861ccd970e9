//! Trees: converts messages to and from `model`.

use super::{
    pb,
    time::{duration, read_duration, timestamp, unix_ms},
};
use crate::model::{
    ECHO, NewTree, QueueName, TaskId, TaskTree, TreeFile, TreeList, TreeOnDead, TreePages,
    TreeQueue, TreeState, TreeView, TreeWait, shorten,
};

impl From<TreeOnDead> for pb::TreeOnDead {
    fn from(on_dead: TreeOnDead) -> Self {
        match on_dead {
            TreeOnDead::Count => Self::Count,
            TreeOnDead::Ignore => Self::Ignore,
            TreeOnDead::Hold => Self::Hold,
        }
    }
}

impl From<TreeState> for pb::TreeState {
    fn from(state: TreeState) -> Self {
        match state {
            TreeState::Open => Self::Open,
            TreeState::Done => Self::Done,
            TreeState::Failed => Self::Failed,
        }
    }
}

fn read_on_dead(number: i32) -> Result<Option<TreeOnDead>, String> {
    match pb::TreeOnDead::try_from(number) {
        Ok(pb::TreeOnDead::Unspecified) => Ok(None),
        Ok(pb::TreeOnDead::Count) => Ok(Some(TreeOnDead::Count)),
        Ok(pb::TreeOnDead::Ignore) => Ok(Some(TreeOnDead::Ignore)),
        Ok(pb::TreeOnDead::Hold) => Ok(Some(TreeOnDead::Hold)),
        Err(_) => Err(format!(
            "tree.on_dead {number} is unknown; expected COUNT, IGNORE or HOLD"
        )),
    }
}

/// Reads a state; 0 stands for none.
pub(super) fn read_state(number: i32) -> Result<Option<TreeState>, String> {
    match pb::TreeState::try_from(number) {
        Ok(pb::TreeState::Unspecified) => Ok(None),
        Ok(pb::TreeState::Open) => Ok(Some(TreeState::Open)),
        Ok(pb::TreeState::Done) => Ok(Some(TreeState::Done)),
        Ok(pb::TreeState::Failed) => Ok(Some(TreeState::Failed)),
        Err(_) => Err(format!(
            "state {number} is unknown; expected OPEN, DONE or FAILED"
        )),
    }
}

/// Reads what a task to insert has to do with trees.
pub(super) fn read_tree(tree: pb::TaskTree) -> Result<Box<TaskTree>, String> {
    let pb::TaskTree {
        id,
        then,
        timeout,
        on_dead,
    } = tree;
    let new = NewTree {
        then,
        timeout: timeout
            .map(|timeout| read_duration("tree.timeout", timeout))
            .transpose()?,
        on_dead: read_on_dead(on_dead)?,
        feed: None,
    };
    if id.is_empty() {
        return Ok(Box::new(TaskTree::Root(new)));
    }
    if new != NewTree::default() {
        return Err(
            "tree.id joins a tree that exists: then, timeout and on_dead are for a new one".into(),
        );
    }
    let tree: TaskId = id
        .parse()
        .map_err(|_| format!("tree.id {:?} is not the id of a tree", shorten(&id, ECHO)))?;
    Ok(Box::new(TaskTree::Joins {
        tree,
        deadline_unix_ms: 0,
    }))
}

/// Writes what a task to insert has to do with trees. A task that returns to its tree joins it: its
/// letter names the tree.
impl From<TaskTree> for pb::TaskTree {
    fn from(tree: TaskTree) -> Self {
        match tree {
            TaskTree::Root(NewTree {
                then,
                timeout,
                on_dead,
                feed: _,
            }) => Self {
                id: String::new(),
                then,
                timeout: timeout.and_then(duration),
                on_dead: on_dead
                    .map_or(pb::TreeOnDead::Unspecified, Into::into)
                    .into(),
            },
            TaskTree::Joins { tree, .. } | TaskTree::Returns { tree, .. } => Self {
                id: tree.to_string(),
                ..Self::default()
            },
        }
    }
}

impl From<TreeView> for pb::Tree {
    fn from(tree: TreeView) -> Self {
        Self {
            id: tree.id.to_string(),
            queue: tree.queue.as_str().to_owned(),
            state: pb::TreeState::from(tree.state).into(),
            epoch: tree.epoch,
            tasks: tree.tasks,
            open: tree.open,
            held: tree.held,
            completed: tree.completed,
            dead: tree.dead,
            cancelled: tree.cancelled,
            letters: tree.letters,
            late: tree.late,
            joins: tree.joins,
            cancelling: tree.cancelling,
            on_dead: pb::TreeOnDead::from(tree.on_dead).into(),
            then: tree.then.unwrap_or_default(),
            deadline: tree.deadline_unix_ms.map(timestamp),
            opened_at: Some(timestamp(tree.opened_unix_ms)),
            ended_at: tree.ended_unix_ms.map(timestamp),
            queues: Vec::new(),
            at_least: false,
            waits_for: Vec::new(),
            reasons: Vec::new(),
        }
    }
}

impl From<TreeFile> for pb::Tree {
    fn from(file: TreeFile) -> Self {
        let queue = |queue: TreeQueue| pb::TreeQueue {
            queue: queue.queue.as_str().to_owned(),
            unfinished: queue.unfinished,
            completed: queue.completed,
            dead: queue.dead,
            cancelled: queue.cancelled,
        };
        let mut waits_for = Vec::with_capacity(file.waits_for.len());
        let mut reasons = Vec::with_capacity(file.waits_for.len());
        for TreeWait { task, says, next } in file.waits_for {
            reasons.push(pb::TreeReason {
                task: task.id.to_string(),
                says,
                next,
            });
            waits_for.push(task.into());
        }
        Self {
            queues: file.queues.into_iter().map(queue).collect(),
            at_least: file.at_least,
            waits_for,
            reasons,
            ..file.tree.into()
        }
    }
}

impl TryFrom<pb::ListTreesRequest> for TreePages {
    type Error = String;

    fn try_from(request: pb::ListTreesRequest) -> Result<Self, String> {
        let pb::ListTreesRequest {
            queue,
            state,
            since,
            limit,
            cursor,
        } = request;
        let queue = (!queue.is_empty())
            .then(|| QueueName::new(&queue))
            .transpose()
            .map_err(|error| error.to_string())?;
        let after = if cursor.is_empty() {
            None
        } else {
            Some(cursor.parse()?)
        };
        Ok(Self {
            queue,
            state: read_state(state)?,
            since_unix_ms: since.map(unix_ms),
            limit,
            after,
        })
    }
}

impl From<TreeList> for pb::ListTreesResponse {
    fn from(list: TreeList) -> Self {
        Self {
            trees: list.trees.into_iter().map(Into::into).collect(),
            cursor: list.next.map(|next| next.to_string()).unwrap_or_default(),
        }
    }
}

/// How long a question about a tree waits for its end.
pub fn tree_wait(request: &pb::GetTreeRequest) -> Result<Option<std::time::Duration>, String> {
    request
        .wait
        .map(|wait| read_duration("wait", wait))
        .transpose()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_tree_of_a_task_is_read_as_it_was_written() {
        for tree in [
            TaskTree::Root(NewTree::default()),
            TaskTree::Root(NewTree {
                then: "reports".into(),
                timeout: Some(Duration::from_secs(60)),
                on_dead: Some(TreeOnDead::Hold),
                feed: None,
            }),
            TaskTree::Joins {
                tree: TaskId::new(),
                deadline_unix_ms: 0,
            },
        ] {
            assert_eq!(*read_tree(tree.clone().into()).unwrap(), tree);
        }
    }

    #[test]
    fn a_wrong_tree_is_named() {
        let both = pb::TaskTree {
            id: TaskId::new().to_string(),
            then: "reports".into(),
            ..Default::default()
        };
        assert!(read_tree(both).unwrap_err().starts_with("tree.id joins"));
        let id = pb::TaskTree {
            id: "x".into(),
            ..Default::default()
        };
        assert_eq!(
            read_tree(id).unwrap_err(),
            "tree.id \"x\" is not the id of a tree"
        );
        let on_dead = pb::TaskTree {
            on_dead: 9,
            ..Default::default()
        };
        assert!(read_tree(on_dead).unwrap_err().contains("COUNT, IGNORE"));
    }
}
