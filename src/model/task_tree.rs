//! The tree of a task to insert.

use super::{ECHO, LetterId, NewTree, TaskId, shorten};

/// What a task to insert has to do with trees, not validated yet.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskTree {
    /// It becomes the root of a tree.
    Root(NewTree),
    /// It joins an open tree.
    Joins {
        tree: TaskId,
        /// The tree's deadline; 0: it has none. Set inside of the process only.
        deadline_unix_ms: i64,
    },
    /// A task that was discovered in this tree, and became this letter instead. Set inside of the
    /// process only.
    Returns {
        tree: TaskId,
        letter: LetterId,
        /// As in [`Self::Joins`].
        deadline_unix_ms: i64,
    },
}

impl TaskTree {
    /// Reads `new`, or the id of a tree.
    pub fn from_text(text: &str) -> Result<Self, String> {
        if text == "new" {
            return Ok(Self::Root(NewTree::default()));
        }
        let tree = text.parse().map_err(|_| {
            format!(
                "tree {:?} is neither \"new\" nor the id of a tree",
                shorten(text, ECHO)
            )
        })?;
        Ok(Self::Joins {
            tree,
            deadline_unix_ms: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_new_or_an_id() {
        let root = TaskTree::Root(NewTree::default());
        assert_eq!(TaskTree::from_text("new"), Ok(root));
        let tree = TaskId::new();
        let joins = TaskTree::Joins {
            tree,
            deadline_unix_ms: 0,
        };
        assert_eq!(TaskTree::from_text(&tree.to_string()), Ok(joins));
        let error = TaskTree::from_text("old").unwrap_err();
        assert_eq!(
            error,
            "tree \"old\" is neither \"new\" nor the id of a tree"
        );
    }
}
