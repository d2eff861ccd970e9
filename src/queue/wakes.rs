//! Wakes for callers that wait for work: scripts publish the name of a queue that has something to hand out, and every
//! process listens.
//!
//! A wake wakes one waiter. A waiter that looks and leaves something passes the wake on ([`Waiter::pass`]). So a task
//! that comes alone costs one claim, however many callers wait. A waiter looks at most once for each wake, and one that
//! goes away unheard passes its wake on. A waiter that finds nothing for anybody says so ([`Waiter::found_empty`]): a
//! caller that comes before the next wake then waits without a look.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use parking_lot::Mutex;
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
pub struct Wakes {
    lines: Mutex<HashMap<QueueName, Line>>,
    /// Wakes arrive: without them, nobody knows of a queue that it is still empty.
    listens: AtomicBool,
}

/// The waiters of a queue. Those that have not looked since the last wake come first.
#[derive(Default)]
struct Line {
    /// The number of the last wake.
    wake: u64,
    /// The wake as of which the queue had nothing for anybody.
    empty: Option<u64>,
    places: VecDeque<Place>,
}

struct Place {
    waiter: Arc<Woken>,
    /// The wake for which the waiter has looked, or is about to.
    looked: u64,
}

impl Line {
    /// Wakes up to `most` waiters that have not looked since the last wake.
    fn rouse(&mut self, queue: &QueueName, most: usize) {
        for _ in 0..most {
            let Some(mut place) = self.places.pop_front_if(|place| place.looked < self.wake) else { return };
            place.looked = self.wake;
            place.waiter.note(queue);
            self.places.push_back(place);
        }
    }

    fn wake(&mut self, queue: &QueueName, most: usize) {
        self.wake += 1;
        self.rouse(queue, most);
    }
}

/// The queues for which a waiter was woken and has not looked yet.
#[derive(Default)]
struct Woken {
    queues: Mutex<Vec<QueueName>>,
    notify: Notify,
}

impl Woken {
    fn note(&self, queue: &QueueName) {
        let mut queues = self.queues.lock();
        if !queues.contains(queue) {
            queues.push(queue.clone());
        }
        self.notify.notify_one();
    }

    fn take(&self) -> Vec<QueueName> {
        std::mem::take(&mut *self.queues.lock())
    }

    async fn wait(&self) -> Vec<QueueName> {
        loop {
            let queues = self.take();
            if !queues.is_empty() {
                return queues;
            }
            self.notify.notified().await;
        }
    }
}

impl Wakes {
    /// Wakes a caller that waits for the queue.
    pub fn wake(&self, queue: &QueueName) {
        if let Some(line) = self.lines.lock().get_mut(queue) {
            line.wake(queue, 1);
        }
    }

    /// Wakes all callers, after a time in which wakes may have been missed.
    pub fn wake_all(&self) {
        self.lines.lock().iter_mut().for_each(|(queue, line)| line.wake(queue, line.places.len()));
    }

    /// The number of callers that look or wait for the queue.
    pub fn waiting(&self, queue: &QueueName) -> usize {
        self.lines.lock().get(queue).map_or(0, |line| line.places.len())
    }

    /// A place in the lines of these queues. Take it, *then* look for work, then wait, so that no wake is missed.
    pub fn waiter(self: &Arc<Self>, queues: &[QueueName]) -> Waiter {
        let woken = Arc::<Woken>::default();
        let mut lines = self.lines.lock();
        let mut looked = Vec::with_capacity(queues.len());
        for queue in queues {
            let line = lines.entry(queue.clone()).or_default();
            line.places.push_back(Place { waiter: Arc::clone(&woken), looked: line.wake });
            looked.push(line.wake);
        }
        drop(lines);
        let (wakes, queues) = (Arc::clone(self), queues.to_vec());
        Waiter { wakes, queues, woken, looked: Mutex::new(looked), answered: Mutex::default() }
    }

    /// Listens until the stop; an error when the connection ends, and then it is called again. `woken` hears of each
    /// queue, or with `None` of all of them, before the callers that wait.
    pub async fn listen(&self, redis: &Redis, cx: &Loop, woken: impl Fn(Option<&QueueName>)) -> Result<()> {
        let (mut sink, mut messages) = redis.pubsub().await?.split();
        in_time(sink.subscribe(keys::wake_channel(redis.prefix()))).await?;
        let _listens = Listens::begin(&self.listens);
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

/// Set while it lives.
struct Listens<'a>(&'a AtomicBool);

impl<'a> Listens<'a> {
    fn begin(listens: &'a AtomicBool) -> Self {
        listens.store(true, Ordering::SeqCst);
        Self(listens)
    }
}

impl Drop for Listens<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
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
    woken: Arc<Woken>,
    /// Per queue, the last wake when the present look began.
    looked: Mutex<Vec<u64>>,
    /// The wakes for which the present look is made.
    answered: Mutex<Vec<QueueName>>,
}

impl Waiter {
    /// Runs `look` and, when it found nothing, waits at most `limit` for a wake that came after the look began. Answers
    /// the queues that were woken; none when the time is over.
    pub async fn look_then_wait<T>(
        &self,
        look: impl Future<Output = Option<T>>,
        limit: Duration,
    ) -> Result<T, Vec<QueueName>> {
        *self.looked.lock() = {
            let lines = self.wakes.lines.lock();
            self.queues.iter().map(|queue| lines.get(queue).map_or(0, |line| line.wake)).collect()
        };
        let found = look.await;
        self.answered.lock().clear();
        if let Some(found) = found {
            return Ok(found);
        }
        let woken = tokio::time::timeout(limit, self.woken.wait()).await.unwrap_or_default();
        self.answered.lock().clone_from(&woken);
        Err(woken)
    }

    /// The queues that may have something: all but those that had nothing for anybody, as of the last wake.
    pub fn not_empty(&self) -> Vec<QueueName> {
        let lines = self.wakes.lines.lock();
        let is_empty = |queue: &QueueName| {
            lines.get(queue).is_some_and(|line| line.empty == Some(line.wake))
                && self.wakes.listens.load(Ordering::SeqCst)
        };
        self.queues.iter().filter(|queue| !is_empty(queue)).cloned().collect()
    }

    /// Notes that the present look found nothing in the queue, and that there was nothing for other workers either.
    pub fn found_empty(&self, queue: &QueueName) {
        let place = self.queues.iter().position(|one| one == queue);
        let looked = place.and_then(|place| self.looked.lock().get(place).copied());
        if let Some(line) = self.wakes.lines.lock().get_mut(queue) {
            line.empty = looked;
        }
    }

    /// Passes a wake on: up to `most` other callers that wait for the queue look for what is left.
    pub fn pass(&self, queue: &QueueName, most: usize) {
        if let Some(line) = self.wakes.lines.lock().get_mut(queue) {
            line.rouse(queue, most);
        }
    }
}

impl Drop for Waiter {
    /// Leaves the lines, and passes on the wakes for which it did not look to the end.
    fn drop(&mut self) {
        let mut lines = self.wakes.lines.lock();
        for queue in &self.queues {
            let Some(line) = lines.get_mut(queue) else { continue };
            // A waiter that was woken is at the back.
            if let Some(at) = line.places.iter().rposition(|place| Arc::ptr_eq(&place.waiter, &self.woken)) {
                line.places.remove(at);
            }
            // Names come from callers, so a name without a waiter is forgotten.
            if line.places.is_empty() {
                lines.remove(queue);
            }
        }
        for queue in self.woken.take().into_iter().chain(self.answered.lock().drain(..)) {
            if let Some(line) = lines.get_mut(&queue) {
                line.rouse(&queue, 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, future};

    use super::*;

    fn queue() -> QueueName {
        QueueName::new("q").unwrap()
    }

    /// The places of the waiters that were woken since the last call.
    fn woken(waiters: &[Waiter]) -> Vec<usize> {
        let woken = waiters.iter().enumerate().filter(|(_, waiter)| !waiter.woken.take().is_empty());
        woken.map(|(place, _)| place).collect()
    }

    #[test]
    fn a_wake_goes_to_one_and_is_passed_on_to_those_who_have_not_looked() {
        let wakes = Arc::<Wakes>::default();
        let waiters: Vec<Waiter> = (0..5).map(|_| wakes.waiter(&[queue()])).collect();
        wakes.wake(&queue());
        assert_eq!(woken(&waiters), [0]);
        waiters[0].pass(&queue(), 2);
        assert_eq!(woken(&waiters), [1, 2]);
        waiters[1].pass(&queue(), 9);
        assert_eq!(woken(&waiters), [3, 4]);
        waiters[4].pass(&queue(), 9);
        assert_eq!(woken(&waiters), [0; 0], "all have looked");
        wakes.wake(&queue());
        wakes.wake(&queue());
        assert_eq!(woken(&waiters), [0, 1]);
        wakes.wake_all();
        assert_eq!(woken(&waiters), [0, 1, 2, 3, 4]);
    }

    #[tokio::test]
    async fn who_goes_away_in_the_middle_of_a_look_passes_the_wake_on() {
        let wakes = Arc::<Wakes>::default();
        let mut waiters: Vec<Waiter> = (0..3).map(|_| wakes.waiter(&[queue()])).collect();
        wakes.wake(&queue());
        let look = async |waiter: &Waiter| waiter.look_then_wait(async { None::<()> }, Duration::ZERO).await;
        let cut_off = waiters.remove(0);
        assert_eq!(look(&cut_off).await, Err(vec![queue()]));
        assert_eq!(cut_off.look_then_wait(future::pending::<Option<()>>(), Duration::ZERO).now_or_never(), None);
        drop(cut_off);
        let looked = waiters.remove(0);
        assert_eq!(look(&looked).await, Err(vec![queue()]));
        assert_eq!(look(&looked).await, Err(Vec::new()));
        drop(looked);
        assert_eq!(woken(&waiters), [0; 0]);
    }

    #[test]
    fn who_goes_away_unheard_passes_the_wake_on() {
        let wakes = Arc::<Wakes>::default();
        let mut waiters: Vec<Waiter> = (0..3).map(|_| wakes.waiter(&[queue()])).collect();
        wakes.wake(&queue());
        drop(waiters.remove(0));
        assert_eq!(woken(&waiters), [0]);
        drop(waiters.remove(0));
        assert_eq!(woken(&waiters), [0; 0], "it had looked");
        waiters.clear();
        assert_eq!(wakes.waiting(&queue()), 0);
    }

    #[tokio::test]
    async fn a_wake_during_the_look_is_not_missed() {
        let wakes = Arc::<Wakes>::default();
        let waiter = wakes.waiter(&[queue()]);
        let look = async {
            wakes.wake(&queue());
            None::<()>
        };
        assert_eq!(waiter.look_then_wait(look, Duration::from_secs(60)).await, Err(vec![queue()]));
        assert_eq!(waiter.look_then_wait(async { None::<()> }, Duration::ZERO).await, Err(Vec::new()));
    }

    /// A wake in the middle of a look counts: the look may have been too early.
    #[tokio::test]
    async fn who_comes_to_a_queue_that_is_known_to_be_empty_does_not_look() {
        let wakes = Arc::<Wakes>::default();
        let waiter = wakes.waiter(&[queue()]);
        let look = async |during: &dyn Fn()| {
            let look = async {
                during();
                waiter.found_empty(&queue());
                None::<()>
            };
            drop(waiter.look_then_wait(look, Duration::ZERO).await);
        };
        look(&|| ()).await;
        assert_eq!(wakes.waiter(&[queue()]).not_empty(), [queue()], "nobody listens");
        wakes.listens.store(true, Ordering::SeqCst);
        assert_eq!(wakes.waiter(&[queue()]).not_empty(), []);
        wakes.wake(&queue());
        assert_eq!(wakes.waiter(&[queue()]).not_empty(), [queue()]);
        look(&|| wakes.wake(&queue())).await;
        assert_eq!(wakes.waiter(&[queue()]).not_empty(), [queue()]);
        look(&|| ()).await;
        assert_eq!(wakes.waiter(&[queue()]).not_empty(), []);
        drop(waiter);
        assert_eq!(wakes.waiter(&[queue()]).not_empty(), [queue()], "all have gone");
    }
}
