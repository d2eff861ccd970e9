//! The steps that run just before the commit of a transaction that changes the status of tasks.
//!
//! There are five kinds of such transactions: inserts, settlements, retries, changes and removals.
//! Each creates [`Steps`], tells them of every task that it adds, ends, reopens or removes, and
//! stores them last.

use std::{collections::HashSet, sync::Arc};

use crate::{
    config::EventQueues,
    model::{QueueName, StoredStatus, TaskId, TaskRow},
    store::{
        NewRow, Result,
        sql::{
            executions::ends::Ends as StepEnds,
            session::Session,
            tasks::{
                belongs::Belongs,
                counts::Counts,
                events::Events,
                sequences::{Released, Sequences},
                step::{StatusChange, Step},
                trees::{Ends, Trees},
            },
        },
    },
};

/// The steps of a transaction, in order.
///
/// To add a step, add a field, and call it in [`Self::hear`] for each change and in
/// [`Self::store`].
pub(crate) struct Steps {
    /// Carried out before the outbox changes, or else first.
    sequences: Sequences,
    /// Stored before the events and the counts, because the end of a tree may add a task.
    trees: Trees,
    step_ends: StepEnds,
    events: Events,
    /// Stored last, so that the transaction locks the few rows of the counts only briefly.
    counts: Counts,
}

impl Steps {
    /// The steps of a transaction that stores the events of these queues.
    pub(crate) fn new(events: &Arc<EventQueues>) -> Self {
        Self {
            sequences: Sequences::default(),
            trees: Trees::default(),
            step_ends: StepEnds::default(),
            events: Events::in_queues(events),
            counts: Counts::default(),
        }
    }

    /// Records that the transaction adds a task.
    pub(crate) fn added(&mut self, task: &TaskRow) {
        self.hear(&StatusChange::Added(task));
    }

    /// Records that the transaction ends a task or makes it unfinished again, at this time.
    pub(crate) fn moved(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        from: StoredStatus,
        to: StoredStatus,
        belongs: &Belongs,
        at_ms: i64,
    ) {
        if let Some(member) = &belongs.member {
            self.sequences.moved(id, queue, from, to, member);
        }
        self.hear(&StatusChange::Moved {
            id,
            queue,
            from,
            to,
            tree: belongs.tree.map(|in_tree| (in_tree, at_ms)),
            step_of: belongs.execution.map(|execution| (execution, at_ms)),
        });
    }

    /// Records that the transaction removes a finished task.
    pub(crate) fn removed(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        status: StoredStatus,
        belongs: &Belongs,
    ) {
        let member = belongs.member.as_ref();
        if let Some(member) = member.filter(|member| member.held_when(status)) {
            self.sequences.removed(id, queue, member);
        }
        self.hear(&StatusChange::Removed {
            id,
            status,
            tree: belongs.tree,
        });
    }

    /// The trees of the transaction.
    pub(crate) fn trees(&mut self) -> &mut Trees {
        &mut self.trees
    }

    /// Records that a letter of this tree is gone because its task was sent again.
    pub(crate) fn letter_gone(&mut self, tree: TaskId, at_ms: i64) {
        self.trees.letter_gone(tree, at_ms);
    }

    /// Records what ended in trees, with the tasks that are stored for it.
    pub(crate) fn ended(&mut self, ends: &Ends) {
        for end in &ends.trees {
            self.events.tree_ended(end);
        }
        for (task, _) in &ends.made {
            self.added(task);
        }
    }

    /// Carries out what was recorded of sequences, and adds these new rows to theirs: see
    /// [`Sequences::apply`]. Must come before the transaction changes outbox rows of these tasks.
    pub(crate) async fn sequences<S: Session>(
        &mut self,
        session: &mut S,
        added: &[&NewRow],
        at_ms: Option<i64>,
    ) -> Result<HashSet<TaskId>> {
        self.sequences
            .apply(session, added, at_ms, &mut self.counts)
            .await
    }

    /// The tasks whose turn in their sequences has come.
    pub(crate) fn take_released(&mut self) -> Vec<Released> {
        self.sequences.take_released()
    }

    /// Records which worker got the last credit of a task.
    pub(crate) fn completed_by(
        &mut self,
        id: TaskId,
        queue: &QueueName,
        worker: &str,
        attempt: u32,
    ) {
        self.events.completed_by(id, queue, worker, attempt);
    }

    fn hear(&mut self, change: &StatusChange<'_>) {
        self.trees.hear(change);
        self.step_ends.hear(change);
        self.events.hear(change);
        self.counts.hear(change);
    }

    /// Runs the steps, as the last statements of the transaction. Returns what ends in trees.
    pub(crate) async fn store<S: Session>(self, session: &mut S) -> Result<Ends> {
        self.store_and_publish(session, None).await
    }

    /// Does the same for a caller that publishes the tasks of these ends itself, at this time.
    pub(crate) async fn store_and_publish<S: Session>(
        mut self,
        session: &mut S,
        at_ms: Option<i64>,
    ) -> Result<Ends> {
        self.sequences(session, &[], None).await?;
        let ends = std::mem::take(&mut self.trees)
            .store(session, at_ms)
            .await?;
        self.ended(&ends);
        self.step_ends.store(session).await?;
        self.events.store(session).await?;
        self.counts.store(session).await?;
        Ok(ends)
    }
}
