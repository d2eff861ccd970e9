//! fsck: compares SQL, the bus and Redis with each other, and Redis with itself.
//!
//! A slice is checked in one script, so its findings hold at one moment. Pages that were read at
//! different moments only raise a suspicion, which a script that checks this one task has to
//! confirm. A repair is made in the same step as the finding.

mod checker;
mod error;
mod found;
mod published;
mod shard;

use std::collections::{BTreeMap, HashSet};

use self::checker::find;
pub use self::{
    checker::{Checker, Pace},
    error::Error,
    found::Found,
    published::{Failed, Published},
};
use crate::{
    model::{
        ExecutionId, ExecutionStatus, ExecutionSummary, Find, FindKind, QueueName, ShardId, TaskId,
    },
    store::{OpenExecution, Stretch, Unpublished, Walked, WrongTree},
};

/// How many trees are compared at a time.
const TREES_AT_ONCE: u32 = 200;
/// How many executions are looked at at a time.
const EXECUTIONS_AT_ONCE: u32 = 200;

fn says_of_tree(wrong: &WrongTree) -> String {
    let WrongTree {
        open,
        held,
        counted_open,
        counted_held,
        subtrees,
        is_over,
        ..
    } = wrong;
    if (open, held) == (counted_open, counted_held) && *subtrees > 0 {
        return format!("{subtrees} of its subtrees have wrong counts");
    }
    if (open, held) == (counted_open, counted_held) {
        return "the tree is open, and waits for nothing".to_owned();
    }
    let over = if *is_over {
        ", so it waits for nothing"
    } else {
        ""
    };
    format!(
        "the tree counts {open} unfinished tasks and {held} that hold it, and has {counted_open} and {counted_held}{over}"
    )
}

impl Checker {
    /// Checks a shard against itself and SQL. Finds nothing in a shard without a generation, which
    /// is left to the watchdog. An error comes with what was found, and repaired, before it.
    pub async fn shard(&self, shard: &ShardId, mends: bool) -> (Found, Result<(), Error>) {
        shard::Walk::new(self, shard, mends).run().await
    }

    /// Compares a page of the published tasks with Redis. Returns how many there were, and where
    /// the next page begins. Leaves out the tasks of the shards in `unchecked`, and adds the shards
    /// that Redis cannot serve.
    pub async fn published(
        &self,
        queue: Option<&QueueName>,
        after: Option<&Walked>,
        limit: u32,
        mends: bool,
        unchecked: &mut BTreeMap<ShardId, String>,
    ) -> Result<(Found, u64, Option<Walked>), Error> {
        let mut failed = Failed::OfCheck(unchecked);
        let page = self
            .published
            .page(
                Stretch {
                    queue,
                    after,
                    ..Stretch::ALL
                },
                limit,
                &mut failed,
            )
            .await?;
        // The fanout, or another watchdog, may have dealt with them since.
        let lost = self
            .published
            .still_missing(page.missing, &mut failed)
            .await?;
        let ids: Vec<TaskId> = lost.iter().map(|(_, id)| *id).collect();
        if mends {
            self.store.unpublish(&ids, Unpublished::Missing).await?;
        }
        let mut found = Found::default();
        for (shard, id) in lost {
            let says =
                "SQL shows it published, its offset has passed, and Redis has no record of it"
                    .to_owned();
            found.add(find(FindKind::LostTask, &shard, Some(id), says, mends));
        }
        Ok((found, page.tasks, page.next))
    }

    /// Counts the unfinished tasks of all queues again, and checks all sequences and trees. If a stored
    /// count is too high, also finds tasks that nobody would publish.
    pub async fn counts(&self, queue: Option<&QueueName>, mends: bool) -> Result<Found, Error> {
        let mut found = Found::default();
        let mut stranded = BTreeMap::new();
        let mut wrong = self.store.wrong_counts().await?;
        wrong.retain(|wrong| queue.is_none_or(|queue| wrong.queue == *queue));
        // Either the count is wrong, or a task is lost.
        if wrong
            .iter()
            .any(|wrong| !wrong.are_behind && wrong.kept > wrong.counted)
        {
            stranded = self.stranded(queue, mends, &mut found).await?;
        }
        for wrong in wrong {
            let mut counted = wrong.counted;
            let mut of = "unfinished tasks";
            if wrong.are_behind {
                of = "tasks that wait in sequences";
            } else {
                let stranded = stranded.get(&wrong.queue).copied().unwrap_or(0);
                counted = counted.saturating_add(stranded);
            }
            if wrong.kept == counted {
                continue;
            }
            if mends {
                self.store.correct_count(&wrong.queue).await?;
            }
            let says = format!(
                "SQL keeps a count of {} {of}, and has {counted}",
                wrong.kept
            );
            let kind = FindKind::WrongQueueCount;
            let queue = wrong.queue.as_str().to_owned();
            found.add(Find::new(kind, queue, None, None, says, mends));
        }
        found.absorb(self.sequences(queue, mends).await?);
        found.absorb(self.trees(queue, mends).await?);
        if queue.is_none() {
            found.absorb(self.executions(mends).await?);
        }
        Ok(found)
    }

    /// Checks all sequences: each with waiting tasks must have one that goes first.
    async fn sequences(&self, queue: Option<&QueueName>, mends: bool) -> Result<Found, Error> {
        let mut found = Found::default();
        let mut after = None;
        loop {
            let page = self.paced(self.store.broken_sequences(after)).await?;
            for broken in page.broken {
                if queue.is_some_and(|queue| broken.queue != *queue) {
                    continue;
                }
                // Somebody may have ended tasks of it since.
                if mends && !self.store.mend_sequence(broken.hash, &broken.queue).await? {
                    continue;
                }
                found.add(Find::new(
                    FindKind::BrokenSequence,
                    broken.queue.as_str().to_owned(),
                    None,
                    Some(broken.task),
                    broken.says.to_owned(),
                    mends,
                ));
            }
            let Some(next) = page.next else {
                return Ok(found);
            };
            after = Some(next);
        }
    }

    /// Compares all trees with their tasks. With a queue: those whose roots are in it.
    async fn trees(&self, queue: Option<&QueueName>, mends: bool) -> Result<Found, Error> {
        let mut found = Found::default();
        let mut after = None;
        loop {
            let compared = self
                .paced(self.store.wrong_trees(after, TREES_AT_ONCE))
                .await?;
            for wrong in compared.wrong {
                if queue.is_some_and(|queue| wrong.queue != *queue) {
                    continue;
                }
                if mends {
                    self.store.correct_tree(wrong.id).await?;
                }
                found.add(Find::new(
                    FindKind::WrongTree,
                    wrong.queue.as_str().to_owned(),
                    None,
                    Some(wrong.id),
                    says_of_tree(&wrong),
                    mends,
                ));
            }
            after = compared.last;
            if after.is_none() {
                return Ok(found);
            }
        }
    }

    /// Finds open executions that nothing would bring on.
    async fn executions(&self, mends: bool) -> Result<Found, Error> {
        let mut found = Found::default();
        let mut after = None;
        loop {
            let open = || self.store.open_executions(after, EXECUTIONS_AT_ONCE);
            let page = self.paced(async { open().await }).await?;
            let mut stranded = self.waiting_for_nothing(&page).await?;
            if !stranded.is_empty() {
                // The end of a step may have come since, and may have been consumed.
                let again = open().await?;
                stranded.retain(|one| again.contains(one));
            }
            let ids: Vec<ExecutionId> = stranded.iter().map(|one| one.id()).collect();
            if mends && !ids.is_empty() {
                self.store.wake_executions(&ids).await?;
            }
            for id in ids {
                let says = format!("execution {id} is open, and nothing will bring it on");
                let kind = FindKind::StrandedExecution;
                found.add(Find::new(kind, String::new(), None, None, says, mends));
            }
            after = page.last().map(OpenExecution::id);
            if after.is_none() {
                return Ok(found);
            }
        }
    }

    /// Those of these executions that wait for nothing, or for a step that has ended, and those that
    /// could go on at once.
    async fn waiting_for_nothing<'a>(
        &self,
        page: &'a [OpenExecution],
    ) -> Result<Vec<&'a OpenExecution>, Error> {
        let mut waiting = Vec::new();
        for one in page {
            if let OpenExecution::Quiet {
                summary,
                has_timer,
                status,
                ..
            } = one
            {
                let summary = match summary.is_empty() {
                    true => Ok(ExecutionSummary::default()),
                    false => serde_json::from_slice(summary),
                };
                // A later version may have written it.
                let Ok(summary) = summary else { continue };
                let waits = summary.waits.into_iter();
                let tasks = waits.filter_map(|wait| wait.task?.parse::<TaskId>().ok());
                // What could go on at once always has a row in its inbox.
                let stands_still = *status != ExecutionStatus::Waiting;
                waiting.push((one, stands_still, *has_timer, tasks.collect::<Vec<_>>()));
            }
        }
        let asked: Vec<TaskId> = waiting
            .iter()
            .flat_map(|(.., tasks)| tasks.clone())
            .collect();
        let unfinished = self.store.unfinished_among(&asked).await?;
        let unfinished: HashSet<TaskId> = unfinished.into_iter().collect();
        waiting.retain(|(_, stands_still, has_timer, tasks)| {
            *stands_still
                || (tasks.is_empty() && !has_timer)
                || tasks.iter().any(|task| !unfinished.contains(task))
        });
        Ok(waiting.into_iter().map(|(one, ..)| one).collect())
    }

    /// Goes over all tasks. Returns for each queue how many tasks nobody would publish.
    async fn stranded(
        &self,
        queue: Option<&QueueName>,
        mends: bool,
        found: &mut Found,
    ) -> Result<BTreeMap<QueueName, i64>, Error> {
        let mut counts = BTreeMap::new();
        let mut after = None;
        loop {
            let (mut page, next) = self.paced(self.store.stranded(after)).await?;
            page.retain(|(of, _)| queue.is_none_or(|queue| of == queue));
            let ids: Vec<TaskId> = page.iter().map(|(_, id)| *id).collect();
            if mends && !ids.is_empty() {
                self.store.unpublish(&ids, Unpublished::Missing).await?;
            }
            for (queue, id) in page {
                found.add(Find::new(
                    FindKind::StrandedTask,
                    queue.as_str().to_owned(),
                    None,
                    Some(id),
                    "it is unfinished, and neither on the bus nor in the outbox".to_owned(),
                    mends,
                ));
                *counts.entry(queue).or_default() += 1;
            }
            let Some(next) = next else { return Ok(counts) };
            after = Some(next);
        }
    }
}
