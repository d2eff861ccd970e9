//! What new tasks have to do with trees, as SQL stores it.

use std::borrow::Cow;

use crate::{
    config::Settings,
    model::{
        Join, Joining, LimitBy, NewJoin, NewTask, NewTree, RowTree, TaskId, TaskRow, TaskTree,
        ThenTask, TreeSettings,
        validate::{self, Partitions, TaskRules},
    },
    pipelines::context::Context,
    store::{Settled, Settlement},
};

/// A tree to store with a row, and the deadline that the tree has; 0: none.
pub(super) struct Joined {
    tree: RowTree,
    deadline_unix_ms: i64,
}

/// Decides what the task with this id has to do with trees. An error is one line for its sender.
pub(super) fn row_tree(
    context: &Context,
    tree: TaskTree,
    id: TaskId,
    now_unix_ms: i64,
) -> Result<Joined, String> {
    let new = match tree {
        TaskTree::Joins {
            tree,
            deadline_unix_ms,
        } => {
            return Ok(Joined {
                tree: RowTree::Joins(tree),
                deadline_unix_ms,
            });
        }
        TaskTree::Returns {
            tree,
            letter,
            deadline_unix_ms,
        } => {
            return Ok(Joined {
                tree: RowTree::Returns { tree, letter },
                // One that has passed does not count any more.
                deadline_unix_ms: if deadline_unix_ms > now_unix_ms {
                    deadline_unix_ms
                } else {
                    0
                },
            });
        }
        TaskTree::Root(new) => new,
    };
    let settings = tree_settings(&new, now_unix_ms, |then| {
        then_row(context, then, id, now_unix_ms)
    })?;
    Ok(Joined {
        deadline_unix_ms: settings.deadline_unix_ms,
        tree: RowTree::Root(settings),
    })
}

/// What SQL keeps of a tree that begins now. `then_row` makes the task of a queue for its end.
pub fn tree_settings(
    new: &NewTree,
    now_unix_ms: i64,
    then_row: impl FnOnce(&str) -> Result<TaskRow, String>,
) -> Result<TreeSettings, String> {
    let deadline_unix_ms = new.deadline_unix_ms(now_unix_ms)?;
    let then = match new.then.as_str() {
        "" => None,
        queue => {
            let row = then_row(queue).map_err(|why| format!("tree.then: {why}"))?;
            Some(ThenTask::from(&row))
        }
    };
    Ok(TreeSettings {
        on_dead: new.on_dead.unwrap_or_default(),
        deadline_unix_ms,
        then,
        feed: new.feed.clone(),
    })
}

/// Puts a row into its tree: it has no deadline that is later than that of the tree.
pub(super) fn join(row: &mut TaskRow, joined: Option<Joined>) {
    let Some(Joined {
        tree,
        deadline_unix_ms,
    }) = joined
    else {
        return;
    };
    row.tree = Some(Box::new(tree));
    bound(row, deadline_unix_ms);
}

/// Gives a task the deadline of its tree, unless its own is earlier.
pub(super) fn bound(row: &mut TaskRow, tree_deadline_unix_ms: i64) {
    let own = row.deadline_unix_ms;
    if tree_deadline_unix_ms > 0 && (own == 0 || own > tree_deadline_unix_ms) {
        row.deadline_unix_ms = tree_deadline_unix_ms;
    }
}

/// What a completion of this task says of joins, as SQL stores it: with the present settings of the
/// queues of the joins.
pub fn joining(
    settings: &Settings,
    partitions: Partitions,
    joining: Joining<NewJoin>,
    fork: TaskId,
    at_unix_ms: i64,
) -> Result<Option<Box<Joining<Join>>>, String> {
    if joining.joins.is_empty() && joining.parts.is_empty() {
        return Ok(None);
    }
    let mut joins = Vec::with_capacity(joining.joins.len());
    for NewJoin { task, from } in joining.joins {
        let rules = TaskRules {
            // It has neither key nor headers to take a limit key from.
            limit_by: LimitBy::Given,
            ..settings.task_rules(&task.queue).for_accepted()
        };
        let mut task = NewTask {
            // It takes no key; the id of the fork's task only chooses its shard.
            id: Some(fork),
            ..task
        };
        let checked = match validate::check(&task, &rules, at_unix_ms) {
            Ok(checked) => checked,
            Err(reason) => {
                let queue = std::mem::take(&mut task.queue);
                tracing::warn!(%queue, "the task of a join has the settings of its queue: {reason}");
                task = NewTask {
                    id: task.id,
                    queue,
                    ..NewTask::default()
                };
                validate::check(&task, &rules, at_unix_ms)?
            }
        };
        joins.push(Join {
            max_bytes: rules.max_payload_bytes,
            task: ThenTask::from(&checked.row(task, fork, partitions)),
            from,
        });
    }
    Ok(Some(Box::new(Joining {
        ways: Vec::new(),
        joins,
        parts: joining.parts,
    })))
}

/// The task of the end of a tree, with the present settings of its queue.
fn then_row(
    context: &Context,
    queue: &str,
    tree: TaskId,
    now_unix_ms: i64,
) -> Result<TaskRow, String> {
    let task = NewTask {
        // It takes no key; the id of the tree only chooses its shard.
        id: Some(tree),
        queue: queue.to_owned(),
        ..NewTask::default()
    };
    let rules = context.settings.task_rules(queue);
    let checked = validate::check(&task, &rules, now_unix_ms)?;
    context.let_in(checked.queue(), None)?;
    Ok(checked.row(task, tree, context.partitions()))
}

/// The reports with the deadlines that SQL gave their discovered tasks, for who publishes these.
pub(super) fn with_deadlines<'r>(
    reports: &'r [Settlement],
    settled: &[Settled],
) -> Cow<'r, [Settlement]> {
    if settled.iter().all(|one| one.tree_deadline_unix_ms == 0) {
        return Cow::Borrowed(reports);
    }
    let mut reports = reports.to_vec();
    for (report, settled) in reports.iter_mut().zip(settled) {
        if let Settlement::Completed { discovered, .. } = report {
            for row in discovered {
                bound(&mut row.task, settled.tree_deadline_unix_ms);
            }
        }
    }
    Cow::Owned(reports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_needs_nothing_to_take_a_limit_key_from() {
        let mut settings = Settings::default();
        settings.queues.default.limit_by = LimitBy::Host;
        let begun = Joining {
            joins: vec![NewJoin {
                task: NewTask {
                    queue: "crawl.page".into(),
                    ..NewTask::default()
                },
                from: vec!["index".into()],
            }],
            ..Joining::default()
        };
        let stored = joining(&settings, 4.into(), begun, TaskId::new(), 0).unwrap();
        assert_eq!(stored.unwrap().joins[0].task.limit_key, "");
    }
}
