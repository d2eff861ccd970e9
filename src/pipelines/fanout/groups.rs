//! Groups the records of a batch by shard.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use super::{error::Error, reader::Fanout};
use crate::{
    bus::{Message, Topic},
    model::{Offset, PipelineTask, ShardId, TaskId, millis},
    pipelines::shortcut::Enqueues,
    queue::EnqueueTask,
    store::TaskState,
    telemetry::metrics::{self, FanoutBatch},
    wire,
};

/// The records of one shard in one batch.
#[derive(Default)]
pub(super) struct Group {
    pub(super) tasks: Vec<EnqueueTask>,
    pub(super) upto: Offset,
    /// SQL was asked about at least one of the tasks.
    pub(super) again: bool,
    pub(super) traced: Enqueues,
}

pub(super) type Groups = BTreeMap<ShardId, Group>;

impl Fanout {
    /// Groups the batch by shard. Leaves out tasks that SQL shows as final, and sends records that
    /// cannot be enqueued to `dead-letters`.
    pub(super) async fn groups(
        &self,
        messages: &[Message],
        done: &mut FanoutBatch,
    ) -> Result<Groups, Error> {
        // A fresh record is published up to `republish_after` after its insert. A task that was
        // cancelled in between has a final record only for the grace time.
        let kept = &self.0.settings.watchdog;
        let grace = kept.grace.saturating_sub(kept.republish_after);
        let grace_ms = millis(grace);
        let now = self.0.clock.now_unix_ms();
        // A record with a time in the future was published before the clock was set back.
        let recent = now.saturating_sub(grace_ms)..=now.saturating_add(grace_ms);
        let mut records = Vec::with_capacity(messages.len());
        let mut poison = Vec::new();
        let mut ask = Vec::new();
        for message in messages {
            match wire::read_pipeline_record(&message.value) {
                Ok(task) => {
                    if task.again || !recent.contains(&task.published_unix_ms) {
                        ask.push(task.id);
                    }
                    records.push((message, task));
                }
                Err(reason) => poison.push((message.clone(), reason)),
            }
        }
        if let Some(oldest) = records.iter().map(|(_, task)| task.published_unix_ms).min() {
            let age_ms = u64::try_from(now.saturating_sub(oldest)).unwrap_or(0);
            metrics::fanout_oldest(Duration::from_millis(age_ms));
        }
        done.poison = poison.len();
        self.0.letters.bury(Topic::Pipeline, &poison).await?;
        let states = if ask.is_empty() {
            Vec::new()
        } else {
            self.0.store.states(&ask).await?
        };
        let mut states: HashMap<TaskId, TaskState> =
            states.into_iter().map(|state| (state.id, state)).collect();
        let asked: HashSet<_> = ask.into_iter().collect();

        let mut groups = Groups::new();
        for (message, task) in records {
            let PipelineTask {
                id,
                queue,
                mut replicas,
                not_before_unix_ms,
                mut body,
                traceparent,
                ..
            } = task;
            let group = groups
                .entry(ShardId {
                    queue,
                    number: message.partition,
                })
                .or_default();
            group.upto = message.offset;
            let mut credited = Vec::new();
            let mut epoch = 0;
            if asked.contains(&id) {
                group.again = true;
                match states.remove(&id) {
                    Some(state) if !state.status.is_final() && !state.is_behind => {
                        // A task that was sent again comes from the outbox, so SQL is asked about
                        // it.
                        credited = state.workers;
                        epoch = state.epoch;
                        if replicas != state.replicas
                            || body.first() != Some(&(state.priority as u8))
                        {
                            // An operator has changed it since it was published.
                            replicas = state.replicas;
                            body = wire::with_body_values(&body, replicas, state.priority);
                        }
                    }
                    // The task is final or removed, is twice in this batch, belongs to a store that
                    // was replaced, or was sent again and waits behind others of its sequence.
                    _ => {
                        done.again_final += 1;
                        continue;
                    }
                }
            }
            let offset = message.offset;
            group.traced.add(group.tasks.len(), &traceparent);
            group.tasks.push(EnqueueTask {
                offset,
                id,
                replicas,
                not_before_unix_ms,
                body,
                credited,
                epoch,
            });
        }
        Ok(groups)
    }
}
