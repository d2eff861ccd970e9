//! Wakes for callers that wait for work: scripts publish the name of a queue that has something to hand out, and every
//! process listens.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::{
    error::{Error, Result},
    keys,
};
use crate::{model::QueueName, redis_pool::Redis, runtime::Loop};

/// How often the connection is pinged, and how long its answer may take. Wakes may be missed meanwhile.
const PING_EVERY: Duration = Duration::from_secs(5);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Waiters by queue.
#[derive(Default)]
pub struct Wakes(Mutex<HashMap<QueueName, Arc<Notify>>>);

impl Wakes {
    fn lock(&self) -> MutexGuard<'_, HashMap<QueueName, Arc<Notify>>> {
        self.0.lock()
    }

    /// Wakes all callers that wait for the queue.
    pub fn wake(&self, queue: &QueueName) {
        let notify = self.lock().get(queue).cloned();
        if let Some(notify) = notify {
            notify.notify_waiters();
        }
    }

    /// Wakes all callers, after a time in which wakes may have been missed.
    pub fn wake_all(&self) {
        let all: Vec<_> = self.lock().values().cloned().collect();
        all.iter().for_each(|notify| notify.notify_waiters());
    }

    /// Whether a caller waits for the queue.
    pub fn is_awaited(&self, queue: &QueueName) -> bool {
        self.lock().contains_key(queue)
    }

    /// A waiter for these queues. Take it, *then* look for work, then wait, so that no wake is missed.
    pub fn waiter(self: &Arc<Self>, queues: &[QueueName]) -> Waiter {
        let mut map = self.lock();
        let notifies = queues.iter().map(|queue| Arc::clone(map.entry(queue.clone()).or_default())).collect();
        Waiter { wakes: Arc::clone(self), queues: queues.to_vec(), notifies }
    }

    /// Listens until the stop; an error when the connection ends, and then it is called again. `woken` hears of each
    /// queue, or with `None` of all of them, before the callers that wait.
    pub async fn listen(&self, redis: &Redis, cx: &Loop, woken: impl Fn(Option<&QueueName>)) -> Result<()> {
        let (mut sink, mut messages) = redis.pubsub().await?.split();
        in_time(sink.subscribe(keys::wake_channel(redis.prefix()))).await?;
        woken(None);
        self.wake_all();
        let mut ping = tokio::time::interval(PING_EVERY);
        loop {
            let message = tokio::select! {
                message = cx.idle(messages.next()) => message,
                _ = ping.tick() => {
                    // Without a ping, a connection whose server vanished looks like one on which nothing happens.
                    in_time(sink.ping::<redis::Value>()).await?;
                    continue;
                }
                () = cx.stop.cancelled() => return Ok(()),
            };
            let Some(message) = message else { return Err(Error::WakesClosed) };
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

async fn in_time<T>(answer: impl Future<Output = redis::RedisResult<T>>) -> Result<T> {
    let answer = tokio::time::timeout(ANSWER_WITHIN, answer).await.map_err(|_| Error::WakesSilent)?;
    Ok(answer?)
}

/// One caller's interest in some queues.
pub struct Waiter {
    wakes: Arc<Wakes>,
    queues: Vec<QueueName>,
    notifies: Vec<Arc<Notify>>,
}

impl Waiter {
    /// Runs `look` and, when it found nothing, waits at most `limit` for a wake that came after the look began. Answers
    /// the queues that were woken; none when the time is over.
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
    /// Names come from callers, so a name without a waiter is forgotten.
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
