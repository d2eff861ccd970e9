//! Who waits for work is woken by it: scripts publish the name of a queue that has something to hand out, every process listens.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{FutureExt, StreamExt};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::keys;
use crate::{model::QueueName, redis_pool::Redis, runtime::Beat};

/// How often the connection is asked whether it still is one, and how long it may take to say so: meanwhile wakes may be missed.
const PING_EVERY: Duration = Duration::from_secs(5);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Waiters by queue.
#[derive(Default)]
pub struct Wakes(Mutex<HashMap<QueueName, Arc<Notify>>>);

impl Wakes {
    fn lock(&self) -> MutexGuard<'_, HashMap<QueueName, Arc<Notify>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all who wait for the queue.
    pub fn wake(&self, queue: &QueueName) {
        let notify = self.lock().get(queue).cloned();
        if let Some(notify) = notify {
            notify.notify_waiters();
        }
    }

    /// Wakes everybody: after a time in which wakes may have been missed.
    pub fn wake_all(&self) {
        let all: Vec<_> = self.lock().values().cloned().collect();
        all.iter().for_each(|notify| notify.notify_waiters());
    }

    /// Whether somebody waits for the queue.
    pub fn is_awaited(&self, queue: &QueueName) -> bool {
        self.lock().contains_key(queue)
    }

    /// What to wait on for these queues. Take it, *then* look for work, then wait: a wake in between is not missed.
    pub fn waiter(self: &Arc<Self>, queues: &[QueueName]) -> Waiter {
        let mut map = self.lock();
        let notifies = queues.iter().map(|queue| Arc::clone(map.entry(queue.clone()).or_default())).collect();
        Waiter { wakes: Arc::clone(self), queues: queues.to_vec(), notifies }
    }

    /// Listens until the stop; an error when the connection ends, to be called again. Tells `woken` each queue, or `None` for all of them,
    /// before those who wait.
    pub async fn listen(
        &self,
        redis: &Redis,
        beat: &Beat,
        stop: &CancellationToken,
        woken: impl Fn(Option<&QueueName>),
    ) -> redis::RedisResult<()> {
        let (mut sink, mut messages) = redis.pubsub().await?.split();
        in_time(sink.subscribe(keys::wake_channel(redis.prefix()))).await?;
        woken(None);
        self.wake_all();
        let mut ping = tokio::time::interval(PING_EVERY);
        loop {
            let message = tokio::select! {
                message = beat.idle(messages.next()) => message,
                _ = ping.tick() => {
                    // A connection whose other end is gone without a word looks like one on which nothing happens.
                    let () = in_time(sink.ping::<redis::Value>()).await.map(drop)?;
                    continue;
                }
                () = stop.cancelled() => return Ok(()),
            };
            let Some(message) = message else {
                return Err((redis::ErrorKind::Io, "the wake channel was closed").into());
            };
            match message.get_payload::<String>().map(|name| QueueName::new(&name)) {
                Ok(Ok(queue)) => {
                    woken(Some(&queue));
                    self.wake(&queue);
                }
                other => tracing::warn!("ignored a wake that names no queue: {other:?}"),
            }
        }
    }
}

async fn in_time<T>(answer: impl Future<Output = redis::RedisResult<T>>) -> redis::RedisResult<T> {
    let silent = || (redis::ErrorKind::Io, "no answer on the wake channel").into();
    tokio::time::timeout(ANSWER_WITHIN, answer).await.unwrap_or_else(|_| Err(silent()))
}

/// One caller's interest in some queues.
pub struct Waiter {
    wakes: Arc<Wakes>,
    queues: Vec<QueueName>,
    notifies: Vec<Arc<Notify>>,
}

impl Waiter {
    /// Runs `look` and, when it found nothing, waits for a wake that came after the look began; at most `limit`. Answers the queues that were
    /// woken, none when the time is over.
    pub async fn look_then_wait<T>(
        &self,
        look: impl Future<Output = Option<T>>,
        limit: Duration,
    ) -> Result<T, Vec<QueueName>> {
        let mut notified: Vec<_> = self.notifies.iter().map(|notify| Box::pin(notify.notified())).collect();
        for notified in &mut notified {
            notified.as_mut().enable();
        }
        if let Some(found) = look.await {
            return Ok(found);
        }
        let numbered = notified.into_iter().enumerate().map(|(number, notified)| notified.map(move |()| number));
        let Ok((first, _, rest)) = tokio::time::timeout(limit, futures::future::select_all(numbered)).await else {
            return Err(Vec::new());
        };
        let others = rest.into_iter().filter_map(FutureExt::now_or_never);
        Err(std::iter::once(first).chain(others).map(|number| self.queues[number].clone()).collect())
    }
}

impl Drop for Waiter {
    /// Names come from callers: one that nobody waits for is forgotten.
    fn drop(&mut self) {
        let mut map = self.wakes.lock();
        self.notifies.clear();
        for queue in &self.queues {
            if map.get(queue).is_some_and(|notify| Arc::strong_count(notify) == 1) {
                map.remove(queue);
            }
        }
    }
}
