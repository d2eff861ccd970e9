//! Fanout: topic `pipeline` into the queue, each partition in order, exactly once by the offset that the enqueue script
//! stores.
//!
//! Crash windows:
//!
//! - before the script: nothing happened.
//! - after the script, before the commit, which comes a little later: the records come again, and their offsets are
//!   known.
//! - a reader lost its partition and does not know it yet: the script refuses its epoch, and it joins anew.
//! - the fanout parks a record of a full queue in SQL *before* the offset passes it. Killed in between, the record is
//!   parked and enqueued; the parked copy finds the task's record in the queue.

mod enqueue;
mod error;
mod groups;
mod owned;
mod reader;
mod setback;

use std::{collections::BTreeSet, time::Instant};

pub use self::error::Error;
use self::{groups::Groups, owned::Owned, reader::Fanout};
use crate::{
    bus::{Message, Reading, Subscription, Topic, Uncommitted},
    pipelines::context::Context,
    runtime::{Loop, Supervisor},
    telemetry::metrics::{self, FanoutBatch},
};

/// Starts the pipeline.
pub fn start(context: &Context, supervisor: &Supervisor) {
    supervisor.spawn_loop("fanout", Fanout(context.clone()), Fanout::consume);
}

impl Fanout {
    async fn consume(self, cx: Loop) -> Result<(), Error> {
        let mut subscription = self.0.bus.subscribe(Topic::Pipeline, Reading::Ordered).await?;
        let mut done = Uncommitted::default();
        let ended = self.read(&mut *subscription, &mut done, &cx).await;
        if let Err(Error::MadeAnew { partition }) = &ended {
            // Their offsets belong to the bus of before. Committed, they would pass over records of the new one.
            done.retain(|message| message.partition != *partition);
        }
        // Otherwise the next reader gets them again, and a shard in its next life would take them for new.
        if let Err(error) = done.commit(&mut *subscription).await {
            tracing::debug!("the last records come again: {error}");
        }
        ended
    }

    async fn read(&self, subscription: &mut dyn Subscription, done: &mut Uncommitted, cx: &Loop) -> Result<(), Error> {
        let (max, mut owned) = (self.0.settings.fanout.batch_max, Owned::default());
        loop {
            let messages = tokio::select! {
                messages = cx.await_work(subscription.next(max)) => messages?,
                () = done.is_due() => Vec::new(),
                () = cx.stop.cancelled() => return Ok(()),
            };
            if !messages.is_empty() {
                self.handle(messages, subscription, &mut owned, done).await?;
            }
            done.commit_if_due(subscription, max).await?;
            cx.beat();
        }
    }

    async fn handle(
        &self,
        messages: Vec<Message>,
        subscription: &mut dyn Subscription,
        owned: &mut Owned,
        uncommitted: &mut Uncommitted,
    ) -> Result<(), Error> {
        let queue = &self.0.queue;
        let started = Instant::now();
        let mut done = FanoutBatch { records: messages.len(), ..Default::default() };
        let groups = self.groups(&messages, &mut done).await?;
        for partition in groups.keys().map(|shard| shard.number).collect::<BTreeSet<_>>() {
            self.take_epoch(partition, subscription.tenure(partition), owned).await?;
        }
        // New queues must not hold up the known ones.
        let (known, new): (Groups, Groups) = groups.into_iter().partition(|(shard, _)| queue.knows(shard));
        let mut outcome = self.enqueue_all(known, owned, &mut done).await;
        let unopened: Groups = new.into_iter().chain(std::mem::take(&mut outcome.gone)).collect();
        if !unopened.is_empty() {
            self.open(unopened.keys(), owned).await?;
            outcome.add(self.enqueue_all(unopened, owned, &mut done).await);
        }
        outcome.failed?;
        if let Some((shard, _)) = outcome.gone.pop_first() {
            // The shard was empty, so its watchdog may not look at it for a while.
            queue.wake_everywhere(&shard.queue).await?;
            return Err(Error::ShardLost(shard));
        }
        if let Some(shortcut) = &self.0.shortcut {
            let read = messages.iter().filter(|message| !outcome.behind.contains(&message.partition));
            read.for_each(|message| shortcut.has_read(message.partition, message.offset));
        }
        uncommitted.add(messages);
        // Records that are read again must stay on the bus.
        uncommitted.retain(|message| !outcome.behind.contains(&message.partition));
        for partition in &outcome.behind {
            let stored = self.fell_back_to(*partition, owned).await?;
            tracing::warn!(partition, "redis fell back: reading pipeline/{partition} again from {stored:?}");
            subscription.seek(*partition, stored).await?;
        }
        metrics::fanout_batch(done, started.elapsed());
        Ok(())
    }
}
