//! Wakes the callers that wait for work. A script that puts tasks into a queue publishes the queue's
//! name, and every process listens.
//!
//! A wake goes to the caller that has waited longest, with a *baton*: the duty to wake others if it
//! does not leave the queue empty. If that caller took tasks, it wakes [`HEIRS`] others, each with a
//! baton of its own; if it took none, it wakes all, because what is left may be for any of them. So
//! one task wakes one caller, many tasks wake all callers in a few steps, and two tasks do not wake
//! ten thousand sessions.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, StreamExt};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, futures::Notified};

use super::{
    error::{Error, Result},
    keys,
    published::PublishedTopics,
    session_notices::SessionNotice,
    wake_message::WakeMessage,
};
use crate::{model::QueueName, redis_pool::Redis, runtime::Loop};

/// How often the connection is pinged, and how long the answer may take. For as long, wakes may be
/// missed without notice.
pub(super) const PING_EVERY: Duration = Duration::from_secs(5);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How many callers get a baton from one that took tasks and left some. Each of those does the same,
/// so ten thousand callers are awake after three steps.
const HEIRS: usize = 32;

/// The callers that wait for one queue.
#[derive(Default)]
struct Waiting {
    notify: Notify,
    /// Batons that no caller has taken yet.
    batons: AtomicUsize,
}

impl Waiting {
    fn listen(&self) -> Pin<Box<Notified<'_>>> {
        let mut notified = Box::pin(self.notify.notified());
        notified.as_mut().enable();
        notified
    }

    fn give_batons(&self, count: usize) {
        // Batons that nobody has taken wait for the next callers. Do not let them pile up.
        let more = |batons: usize| (batons < HEIRS).then_some(batons + count);
        self.batons
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
            .ok();
        // If nobody waits at this moment, the next caller that does is woken at once.
        (0..count).for_each(|_| self.notify.notify_one());
    }
}

/// Waiters by queue.
#[derive(Default)]
pub struct Wakes(Mutex<HashMap<QueueName, Arc<Waiting>>>);

impl Wakes {
    fn lock(&self) -> MutexGuard<'_, HashMap<QueueName, Arc<Waiting>>> {
        self.0.lock()
    }

    /// Calls `notify` for the callers that wait for the queue, without holding the lock.
    fn notify(&self, queue: &QueueName, notify: impl FnOnce(&Arc<Waiting>)) {
        let Some(waiting) = self.lock().get(queue).cloned() else {
            return;
        };
        notify(&waiting);
        drop(waiting);
        // If the last caller went away meanwhile, it left the entry in the map because this used it.
        self.forget_unused(&mut self.lock(), queue);
    }

    /// Forgets a queue for which nobody waits.
    fn forget_unused(&self, map: &mut HashMap<QueueName, Arc<Waiting>>, queue: &QueueName) {
        if map
            .get(queue)
            .is_some_and(|waiting| Arc::strong_count(waiting) == 1)
        {
            map.remove(queue);
        }
    }

    /// Wakes all callers that wait for the queue.
    pub fn wake(&self, queue: &QueueName) {
        self.notify(queue, |waiting| waiting.notify.notify_waiters());
    }

    /// Wakes one caller, with a baton.
    pub(super) fn wake_one(&self, queue: &QueueName) {
        self.notify(queue, |waiting| waiting.give_batons(1));
    }

    /// Wakes [`HEIRS`] callers, each with a baton. If there are no more than that, wakes all of them
    /// without batons, because nobody is left to wake.
    fn wake_some(&self, queue: &QueueName) {
        // The map and this function have a reference each.
        self.notify(queue, |waiting| {
            match Arc::strong_count(waiting).saturating_sub(2) > HEIRS {
                true => waiting.give_batons(HEIRS),
                false => waiting.notify.notify_waiters(),
            }
        });
    }

    /// Wakes all callers, after a time in which wakes may have been missed.
    pub fn wake_all(&self) {
        let all: Vec<_> = self.lock().values().cloned().collect();
        all.iter()
            .for_each(|waiting| waiting.notify.notify_waiters());
    }

    /// Whether a caller waits for the queue.
    pub fn is_awaited(&self, queue: &QueueName) -> bool {
        self.lock().contains_key(queue)
    }

    /// A waiter for these queues. Take it, *then* look for work, then wait, so that no wake is
    /// missed.
    pub fn waiter(self: &Arc<Self>, queues: &[QueueName]) -> Waiter {
        let mut map = self.lock();
        let waiting = queues
            .iter()
            .map(|queue| Arc::clone(map.entry(queue.clone()).or_default()))
            .collect();
        Waiter {
            wakes: Arc::clone(self),
            queues: queues.to_vec(),
            waiting,
        }
    }

    /// Listens until the process stops. Returns an error if the connection ends; the caller then
    /// calls this again. Before waiting callers are woken, `woken` gets the wake, or `None` if some
    /// may have been missed. `told` gets the notices about sessions, `published`
    /// those about topics.
    pub(super) async fn listen(
        &self,
        redis: &Redis,
        process: &str,
        cx: &Loop,
        woken: impl Fn(Option<&WakeMessage>),
        told: impl Fn(SessionNotice),
        published: &PublishedTopics,
    ) -> Result<()> {
        let (mut sink, mut messages) = redis.pubsub().await?.split();
        in_time(sink.subscribe(keys::wake_channel(redis.prefix()))).await?;
        woken(None);
        published.missed_some();
        self.wake_all();
        let mut ping = tokio::time::interval(PING_EVERY);
        loop {
            let message = tokio::select! {
                message = cx.idle(messages.next()) => message,
                _ = ping.tick() => {
                    // Without a ping, a connection whose server vanished looks like one on which
                    // nothing happens.
                    in_time(sink.ping::<redis::Value>()).await?;
                    continue;
                }
                () = cx.stop.cancelled() => return Ok(()),
            };
            let Some(message) = message else {
                return Err(Error::WakesClosed);
            };
            if published.read(message.get_payload_bytes(), process) {
                continue;
            }
            if let Some(notice) = SessionNotice::read(message.get_payload_bytes()) {
                told(notice);
                continue;
            }
            match message
                .get_payload::<String>()
                .map(|wake| WakeMessage::read(&wake))
            {
                Ok(Ok(WakeMessage {
                    not_for: Some(own), ..
                })) if own == process => {}
                Ok(Ok(wake)) => {
                    woken(Some(&wake));
                    self.wake_one(&wake.queue);
                }
                other => tracing::warn!("ignored a wake that names no queue: {other:?}"),
            }
        }
    }
}

/// Waits for an answer of the connection. Returns an error if it takes too long.
pub(super) async fn in_time<T>(answer: impl Future<Output = redis::RedisResult<T>>) -> Result<T> {
    let answer = tokio::time::timeout(ANSWER_WITHIN, answer)
        .await
        .map_err(|_| Error::WakesSilent)?;
    Ok(answer?)
}

/// One caller's interest in some queues.
pub struct Waiter {
    wakes: Arc<Wakes>,
    queues: Vec<QueueName>,
    waiting: Vec<Arc<Waiting>>,
}

/// The wakes that a caller listens to, one for each of its queues.
pub type Listening<'a> = Vec<Pin<Box<Notified<'a>>>>;

impl Waiter {
    /// Starts to listen. Wakes that come while the caller is looking for work are kept.
    pub fn listen(&self) -> Listening<'_> {
        self.waiting
            .iter()
            .map(|waiting| waiting.listen())
            .collect()
    }

    /// Runs `look`. If that finds nothing, waits for a wake since `look` began, at most for the time
    /// that it returned. Returns the queues that were woken; none if the time is over.
    pub async fn look_then_wait<'a, T>(
        &'a self,
        listening: &mut Listening<'a>,
        look: impl Future<Output = Result<T, Duration>>,
    ) -> Result<T, Vec<QueueName>> {
        let limit = match look.await {
            Ok(found) => return Ok(found),
            Err(limit) => limit,
        };
        let numbered = listening
            .iter_mut()
            .enumerate()
            .map(|(number, heard)| heard.as_mut().map(move |()| number));
        let Ok((first, _, rest)) =
            tokio::time::timeout(limit, futures::future::select_all(numbered)).await
        else {
            return Err(Vec::new());
        };
        let others = rest.into_iter().filter_map(FutureExt::now_or_never);
        let woken: Vec<_> = std::iter::once(first).chain(others).collect();
        woken
            .iter()
            .for_each(|number| listening[*number] = self.waiting[*number].listen());
        Err(woken
            .into_iter()
            .map(|number| self.queues[number].clone())
            .collect())
    }
}

impl Waiter {
    /// Takes a baton for each of these queues that has one left.
    pub fn take_batons(&self, queues: &[QueueName]) -> Batons {
        let takes = |queue: &QueueName| {
            let waiting = &self.waiting[self.queues.iter().position(|of| of == queue)?];
            let less = |batons: usize| batons.checked_sub(1);
            waiting
                .batons
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
                .ok()
        };
        let taken = queues
            .iter()
            .filter(|queue| takes(queue).is_some())
            .cloned()
            .collect();
        Batons {
            wakes: Arc::clone(&self.wakes),
            queues: taken,
        }
    }
}

/// The duty to wake other callers of some queues.
///
/// If dropped, as when its caller goes away, wakes all of them.
pub struct Batons {
    wakes: Arc<Wakes>,
    queues: Vec<QueueName>,
}

impl Batons {
    pub fn queues(&self) -> &[QueueName] {
        &self.queues
    }

    /// Wakes callers of the queues that are not known to be empty. If this caller `took` nothing,
    /// what is left may not be for the callers next in line, so all are woken. The chain of batons
    /// ends, because each link takes tasks.
    pub fn pass_on(&mut self, took: bool, is_empty: impl Fn(&QueueName) -> bool) {
        let queues = std::mem::take(&mut self.queues).into_iter();
        queues
            .filter(|queue| !is_empty(queue))
            .for_each(|queue| match took {
                true => self.wakes.wake_some(&queue),
                false => self.wakes.wake(&queue),
            });
    }
}

impl Drop for Batons {
    fn drop(&mut self) {
        self.pass_on(false, |_| false);
    }
}

impl Drop for Waiter {
    /// Removes the queues that nobody waits for: their names come from callers, and would pile up.
    fn drop(&mut self) {
        let mut map = self.wakes.lock();
        self.waiting.clear();
        for queue in &self.queues {
            self.wakes.forget_unused(&mut map, queue);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn queue(name: &str) -> QueueName {
        QueueName::new(name).unwrap()
    }

    /// Waits for a wake, after a look that found nothing.
    async fn woken(waiter: &Waiter) -> Batons {
        let nothing = std::future::ready(Err::<(), _>(LONG));
        waiter.take_batons(
            &waiter
                .look_then_wait(&mut waiter.listen(), nothing)
                .await
                .unwrap_err(),
        )
    }

    #[tokio::test]
    async fn one_caller_is_woken_and_wakes_the_others_where_something_is_left() {
        let wakes = Arc::<Wakes>::default();
        let waiters: Vec<_> = (0..3)
            .map(|_| wakes.waiter(&[queue("other"), queue("q")]))
            .collect();
        let mut all: Vec<_> = waiters
            .iter()
            .map(|waiter| Box::pin(woken(waiter)))
            .collect();
        assert!(
            all.iter_mut().all(|one| one.now_or_never().is_none()),
            "nobody is woken yet"
        );

        wakes.wake_one(&queue("q"));
        let mut first = all
            .remove(0)
            .now_or_never()
            .expect("the one that has waited longest");
        assert!(all.iter_mut().all(|one| one.now_or_never().is_none()));
        assert_eq!(first.queues, [queue("q")]);
        first.pass_on(false, |_| true);
        assert!(
            all.iter_mut().all(|one| one.now_or_never().is_none()),
            "it left nothing"
        );

        wakes.wake_one(&queue("q"));
        drop(all.remove(0).now_or_never().expect("the next one"));
        let mut last = all.remove(0).now_or_never().expect("its caller went away");
        assert!(
            last.queues.is_empty(),
            "the others have no baton, so this ends"
        );
        last.pass_on(false, |_| false);
    }

    #[tokio::test]
    async fn a_wake_while_nobody_waits_is_for_the_next_caller_which_wakes_all() {
        let wakes = Arc::<Wakes>::default();
        let waiters: Vec<_> = (0..10).map(|_| wakes.waiter(&[queue("q")])).collect();
        wakes.wake_one(&queue("q"));
        let mut first = woken(&waiters[0])
            .now_or_never()
            .expect("it was woken before");
        let mut others: Vec<_> = waiters[1..]
            .iter()
            .map(|waiter| Box::pin(woken(waiter)))
            .collect();
        assert!(others.iter_mut().all(|one| one.now_or_never().is_none()));
        first.pass_on(false, |_| false);
        assert!(others.iter_mut().all(|one| one.now_or_never().is_some()));
        assert_eq!(waiters[0].waiting[0].batons.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_name_without_a_waiter_is_forgotten_though_a_wake_was_using_it() {
        let wakes = Arc::<Wakes>::default();
        let mut waiter = Some(wakes.waiter(&[queue("q")]));
        // The waiter goes away in the middle of the wake.
        wakes.notify(&queue("q"), |_| drop(waiter.take()));
        assert!(!wakes.is_awaited(&queue("q")));
    }

    #[tokio::test]
    async fn between_two_looks_a_caller_hears_the_wakes_of_its_other_queues() {
        let wakes = Arc::<Wakes>::default();
        let waiter = wakes.waiter(&[queue("a"), queue("b")]);
        let mut listening = waiter.listen();
        let mut next = async || {
            waiter
                .look_then_wait(&mut listening, std::future::ready(Err::<(), _>(LONG)))
                .await
        };
        wakes.wake(&queue("a"));
        assert_eq!(next().now_or_never(), Some(Err(vec![queue("a")])));
        wakes.wake(&queue("b"));
        assert_eq!(next().now_or_never(), Some(Err(vec![queue("b")])));
        assert_eq!(next().now_or_never(), None);
    }

    /// Takes out the callers that are awake now.
    fn get_up<F: Future<Output = Batons>>(asleep: &mut Vec<Pin<Box<F>>>) -> Vec<Batons> {
        let mut awake = Vec::new();
        asleep.retain_mut(|one| match one.as_mut().now_or_never() {
            Some(batons) => {
                awake.push(batons);
                false
            }
            None => true,
        });
        awake
    }

    #[tokio::test]
    async fn of_many_callers_those_are_woken_that_may_find_something() {
        let wakes = Arc::<Wakes>::default();
        let waiters: Vec<_> = (0..2000).map(|_| wakes.waiter(&[queue("q")])).collect();
        let mut asleep: Vec<_> = waiters
            .iter()
            .map(|waiter| Box::pin(woken(waiter)))
            .collect();
        assert!(get_up(&mut asleep).is_empty());
        wakes.wake_one(&queue("q"));
        // The first one leaves something, one of its heirs does too, and the heirs of that one find
        // nothing.
        let mut first = get_up(&mut asleep);
        assert_eq!(first.len(), 1);
        first[0].pass_on(true, |_| false);
        let mut heirs = get_up(&mut asleep);
        assert_eq!(heirs.len(), HEIRS);
        assert!(heirs.iter().all(|batons| batons.queues() == [queue("q")]));
        heirs[0].pass_on(true, |_| false);
        heirs
            .iter_mut()
            .for_each(|batons| batons.pass_on(false, |_| true));
        let mut third = get_up(&mut asleep);
        assert_eq!(third.len(), HEIRS);
        third
            .iter_mut()
            .for_each(|batons| batons.pass_on(false, |_| true));
        assert!(get_up(&mut asleep).is_empty(), "{} sleep on", asleep.len());
        // Something is left that the next caller may not be allowed to have: all are woken.
        wakes.wake_one(&queue("q"));
        get_up(&mut asleep)[0].pass_on(false, |_| false);
        let all = get_up(&mut asleep);
        assert!(asleep.is_empty());
        assert!(
            all.iter().all(|batons| batons.queues().is_empty()),
            "they have no batons, so this ends"
        );
    }

    #[tokio::test]
    async fn every_caller_is_woken_while_each_finds_something() {
        let wakes = Arc::<Wakes>::default();
        let waiters: Vec<_> = (0..500).map(|_| wakes.waiter(&[queue("q")])).collect();
        let mut asleep: Vec<_> = waiters
            .iter()
            .map(|waiter| Box::pin(woken(waiter)))
            .collect();
        assert!(get_up(&mut asleep).is_empty());
        wakes.wake_one(&queue("q"));
        while !asleep.is_empty() {
            let mut awake = get_up(&mut asleep);
            assert!(!awake.is_empty(), "{} sleep on", asleep.len());
            awake
                .iter_mut()
                .for_each(|batons| batons.pass_on(true, |_| false));
        }
    }
}
