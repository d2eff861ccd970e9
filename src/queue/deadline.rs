//! Ends tasks whose deadline has passed.

use super::{
    change::{Arbitrated, ArbitratedTasks, Changer, arbitrated},
    error::Result,
    types::{OUTBOX_FULL, OUTBOX_FULL_BYTES},
    wire::{numbers, unsigned},
};
use crate::{
    model::{ChangingTask, ShardId},
    redis_pool::scripts,
};

impl Changer {
    /// Ends tasks of one shard, also those that have not arrived, each for its reason. At most
    /// 1,000.
    pub async fn end_overdue(
        &self,
        shard: &ShardId,
        tasks: &[(&ChangingTask, String)],
    ) -> Result<ArbitratedTasks> {
        let value = self
            .call(&scripts::DEADLINE, shard, tasks.len(), |call| {
                call.arg(self.wake_channel())
                    .arg(OUTBOX_FULL)
                    .arg(OUTBOX_FULL_BYTES);
                for (task, reason) in tasks {
                    call.arg(task.id.as_bytes())
                        .arg(task.replicas)
                        .arg(reason.as_str());
                }
            })
            .await?;
        self.note_ended(shard);
        let numbers = numbers(value, tasks.len() + 1)?;
        let answer = |number: &i64| match number {
            0 => Ok(Arbitrated::OutboxFull),
            number => arbitrated(*number, 0),
        };
        let answers = numbers[1..].iter().map(answer).collect::<Result<_>>()?;
        Ok(ArbitratedTasks {
            generation: unsigned(numbers[0]),
            answers,
        })
    }
}
