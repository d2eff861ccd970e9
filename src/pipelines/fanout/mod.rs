//! Fanout: moves records of topic `pipeline` into the queue, each partition in order. Each record
//! is enqueued exactly once, because the enqueue script stores its offset.
//!
//! Crash windows:
//!
//! - Before the script: nothing has happened.
//! - After the script, before the commit, which comes a little later: the records are delivered
//!   again, and the shards know their offsets.
//! - A reader has lost its partition and does not know it yet: the script refuses its epoch, and
//!   the reader joins the group again.
//! - The fanout parks a record of a full queue in SQL *before* the shard's offset passes it. If it
//!   is killed in between, the record is both parked and enqueued. When the parked copy arrives,
//!   the queue has a record of the task.
//! - It parks a task whose limit key has enough tasks in the shard in the same order: the script
//!   stores no offset for a group with such a task.
//! - While a shard is held ([`held_shards`]), nothing of its partition is committed: its records
//!   are delivered again, as after the script.

mod enqueue;
mod error;
mod groups;
mod held_shards;
mod owned;
mod reader;
mod setback;

use std::{collections::BTreeSet, time::Instant};

pub use self::error::Error;
use self::{groups::Groups, held_shards::HeldShards, owned::Owned, reader::Fanout};
use crate::{
    bus::{self, Message, Reader, Reading, Topic, Uncommitted},
    model::ShardId,
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
        let mut reader = self
            .0
            .bus
            .subscribe(Topic::Pipeline, Reading::Ordered)
            .await?;
        let mut done = Uncommitted::default();
        let mut held = HeldShards::new();
        let ended = self.read(&mut *reader, &mut held, &mut done, &cx).await;
        held.end().await;
        if let Err(Error::MadeAnew { partition }) = &ended {
            // Their offsets belong to the bus as it was before it was set back. Committing them
            // would skip records of the new one.
            done.retain(|message| message.partition != *partition);
        }
        // What is not committed is delivered again to the next reader, and a shard that was closed
        // and opened again would take it for new.
        if let Err(error) = done.commit(&mut *reader).await {
            tracing::debug!("the last records come again: {error}");
        }
        ended
    }

    async fn read(
        &self,
        reader: &mut dyn Reader,
        held: &mut HeldShards,
        done: &mut Uncommitted,
        cx: &Loop,
    ) -> Result<(), Error> {
        let max = self.0.settings.fanout.batch_max;
        let mut owned = Owned::default();
        loop {
            let may_read = held.may_read();
            let (messages, tried) = tokio::select! {
                messages = read_on(reader, may_read, max, cx) => (messages?, Vec::new()),
                tried = held.tried() => (Vec::new(), tried),
                () = done.wait_until_due() => (Vec::new(), Vec::new()),
                () = cx.stop.cancelled() => return Ok(()),
            };
            held.forget_lost(reader);
            for tried in tried {
                self.tried(tried, reader, &mut owned, held, done).await?;
            }
            if !messages.is_empty() {
                self.handle(messages, reader, &mut owned, held, done)
                    .await?;
            }
            done.commit_if_due(reader, max).await?;
            // A full reader does not count as making progress.
            if !held.is_full() {
                cx.beat();
            }
        }
    }

    async fn handle(
        &self,
        mut messages: Vec<Message>,
        reader: &mut dyn Reader,
        owned: &mut Owned,
        held: &mut HeldShards,
        uncommitted: &mut Uncommitted,
    ) -> Result<(), Error> {
        let queue = &self.0.queue;
        let started = Instant::now();
        let mut done = FanoutBatch {
            records: messages.len(),
            ..Default::default()
        };
        let mut groups = self.groups(&messages, &mut done).await?;
        for partition in groups
            .keys()
            .map(|shard| shard.number)
            .collect::<BTreeSet<_>>()
        {
            self.take_epoch(partition, reader.tenure(partition), owned)
                .await?;
        }
        groups.retain(|shard, _| !held.has(shard));
        // Opening new queues must not hold up the known ones.
        let (known, new): (Groups, Groups) = groups
            .into_iter()
            .partition(|(shard, _)| queue.knows(shard));
        let mut outcome = self.enqueue_all(known, owned, &mut done).await;
        let mut unopened: Groups = new
            .into_iter()
            .chain(std::mem::take(&mut outcome.gone))
            .collect();
        if !unopened.is_empty() {
            outcome
                .refused
                .extend(self.open(&mut unopened, owned).await?);
            outcome.add(self.enqueue_all(unopened, owned, &mut done).await);
        }
        outcome.failed?;
        if let Some((shard, _)) = outcome.gone.pop_first() {
            return Err(self.lost(shard).await);
        }
        let refused = (std::mem::take(&mut outcome.refused), outcome.has_done);
        self.hold(refused, &messages, owned, held).await?;
        if let Some(shortcut) = &self.0.shortcut {
            let read = messages
                .iter()
                .filter(|message| !outcome.behind.contains(&message.partition));
            read.for_each(|message| shortcut.note_read(message.partition, message.offset));
        }
        messages.retain(|message| !held.has_of(message.partition));
        uncommitted.add(messages);
        // Records that are to be read again must not be committed: they have to stay on the bus.
        uncommitted.retain(|message| !outcome.behind.contains(&message.partition));
        for partition in &outcome.behind {
            self.seek_back(*partition, reader, owned, held).await?;
        }
        metrics::fanout_batch(done, started.elapsed());
        Ok(())
    }

    /// Returns the error that ends the reader of a lost shard, after making sure that the loss is
    /// noticed.
    async fn lost(&self, shard: ShardId) -> Error {
        // The shard was empty, so its watchdog might not check it for a while.
        match self.0.queue.wake_everywhere(&shard.queue).await {
            Ok(()) => Error::ShardLost(shard),
            Err(error) => error.into(),
        }
    }
}

/// Returns the next records, or none if the reader is only to stay in its group.
async fn read_on(
    reader: &mut dyn Reader,
    may_read: bool,
    max: usize,
    cx: &Loop,
) -> bus::Result<Vec<Message>> {
    match may_read {
        true => cx.await_work(reader.next(max)).await,
        false => reader.stay().await.map(|()| Vec::new()),
    }
}
