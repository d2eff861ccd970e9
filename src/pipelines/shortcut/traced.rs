//! The span `enqueue`: a task goes into the queue.

use std::time::SystemTime;

use crate::{
    model::{ShardId, TraceContext},
    queue::EnqueueTask,
    telemetry::traces::{self, Begun, Hop},
};

/// The sampled tasks of a group, by index. Most groups have none.
#[derive(Default)]
pub struct Enqueues(Vec<(usize, TraceContext)>);

impl Enqueues {
    /// Adds the task at this index. `traceparent` is empty unless the task is sampled.
    pub fn add(&mut self, place: usize, traceparent: &str) {
        if let Some(context) = TraceContext::sampled(traceparent).filter(|_| traces::is_on()) {
            self.0.push((place, context));
        }
    }

    /// Records that the first tasks of the group were handled, and that the others are parked.
    ///
    /// The queue counts the tasks that it knew already, but does not name them: they were delivered
    /// again by the bus, and are rare.
    pub fn end(
        &self,
        shard: &ShardId,
        tasks: &[EnqueueTask],
        dealt_with: usize,
        added: usize,
        since: SystemTime,
    ) {
        for (place, context) in &self.0 {
            let outcome = match *place {
                place if place >= dealt_with => "parked",
                _ if added == 0 => "repeated",
                _ => "enqueued",
            };
            let begun = Begun::child(*context).since(since);
            begun.end(
                Hop::Enqueue,
                tasks[*place].id,
                &shard.queue,
                outcome,
                String::new(),
            );
        }
    }
}
