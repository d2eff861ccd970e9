//! Combines concurrent requests into one call. While a call is in flight, new callers gather, and
//! the next call serves all of them. On an idle queue nobody waits; on a busy one, many workers
//! that ask for one task each share one Redis call.
//!
//! A second call starts in parallel once half as many callers wait as are in flight. With a single
//! call, all callers would wait for the same answer and then come back at the same time: Redis
//! would be idle while taskd works, and taskd would be idle while Redis works.

use std::{collections::VecDeque, future::Future, panic::AssertUnwindSafe, pin::Pin, sync::Arc};

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use super::error::{Error, Result};

/// The most callers that may wait for one combiner. Further ones are refused.
const MAX_WAITING: usize = 20_000;
/// The usual bound on calls in flight. It is 1 for calls that would only wait for each other.
pub(super) const CALLS: usize = 2;
/// The fewest callers for which a second call in parallel is worth its cost.
const WORTH_A_CALL: usize = 4;
/// Callers that have given up are removed only when at least this many are waiting.
const FEW: usize = 256;
/// The same threshold for the weight of the waiting callers, in full calls.
const FEW_CALLS: usize = 4;

type Run<Q, A> =
    dyn Fn(Vec<Q>) -> Pin<Box<dyn Future<Output = Result<Vec<A>>> + Send>> + Send + Sync;

struct Waiting<Q, A> {
    callers: VecDeque<(Q, usize, oneshot::Sender<Result<A>>)>,
    /// The sum of the callers' weights.
    weight: usize,
    /// The number of callers, and the weight, at which those that have given up are removed. The
    /// memory of a live request is accounted for elsewhere; that of abandoned ones is not, and
    /// must not pile up here.
    many: usize,
    heavy: usize,
    /// The number of calls in flight.
    running: usize,
    /// The number of callers in these calls.
    under_way: usize,
}

/// Combines calls of type `Q`, each answered with an `A`.
pub(super) struct Combiner<Q, A> {
    waiting: Mutex<Waiting<Q, A>>,
    /// The most calls in flight.
    calls: usize,
    run: Box<Run<Q, A>>,
    /// The maximum total weight of the callers in one call. A single caller may exceed it.
    max_weight: usize,
    tasks: TaskTracker,
}

impl<Q: Send + 'static, A: Send + 'static> Combiner<Q, A> {
    /// `run` returns one answer per question, in order. `tasks` tracks the calls in flight, so that
    /// a shutdown can wait for them.
    pub(super) fn new<F, Fut>(
        max_weight: usize,
        calls: usize,
        tasks: TaskTracker,
        run: F,
    ) -> Arc<Self>
    where
        F: Fn(Vec<Q>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<A>>> + Send + 'static,
    {
        let many = FEW;
        let heavy = FEW_CALLS * max_weight;
        let waiting = Waiting {
            callers: VecDeque::new(),
            weight: 0,
            many,
            heavy,
            running: 0,
            under_way: 0,
        };
        let waiting = Mutex::new(waiting);
        Arc::new(Self {
            waiting,
            calls,
            run: Box::new(move |batch| Box::pin(run(batch))),
            max_weight,
            tasks,
        })
    }

    /// Waits for the answer to `question`. If the caller gives up, the answer is dropped; the
    /// answer to a claim releases its leases when it is dropped.
    pub(super) async fn call(self: &Arc<Self>, question: Q, weight: usize) -> Result<A> {
        let (sender, receiver) = oneshot::channel();
        let start = {
            let mut waiting = self.waiting.lock();
            if waiting.callers.len() >= waiting.many || waiting.weight >= waiting.heavy {
                waiting.forget_those_that_gave_up(self.max_weight);
            }
            if waiting.callers.len() >= MAX_WAITING {
                return Err(Error::Busy);
            }
            waiting.weight += weight;
            waiting.callers.push_back((question, weight, sender));
            let start = waiting.are_enough(self.calls);
            waiting.running += usize::from(start);
            start
        };
        if start {
            // Not in the caller's own future: it may be dropped, and other callers wait for this
            // call too.
            self.tasks.spawn(Arc::clone(self).drain());
        }
        receiver.await.unwrap_or(Err(Error::Stopped))
    }

    /// Holds back the callers that gather from now on, for a call that somebody else makes. Returns
    /// `None` if a call is in flight.
    pub(super) fn hold(self: &Arc<Self>) -> Option<CombinerHold<Q, A>> {
        let mut waiting = self.waiting.lock();
        let is_free = waiting.running == 0;
        if is_free {
            waiting.running = self.calls;
        }
        is_free.then(|| CombinerHold(Arc::clone(self)))
    }

    async fn drain(self: Arc<Self>) {
        // Callers that were woken together arrive right after each other: let them join this call.
        tokio::task::yield_now().await;
        let mut before = 0;
        while let Some((questions, askers)) = self.next_batch(before) {
            before = questions.len();
            // After a panic here, no one would run the next batch, and its callers would wait for
            // ever.
            let answers = AssertUnwindSafe(async { (self.run)(questions).await })
                .catch_unwind()
                .await;
            askers.tell(answers.unwrap_or_else(|_| Err(Error::Answer("the call panicked".into()))));
        }
    }

    /// Ends a call with `before` callers and takes the next batch. `None` ends the loop.
    fn next_batch(&self, before: usize) -> Option<(Vec<Q>, Askers<A>)> {
        let mut waiting = self.waiting.lock();
        waiting.under_way -= before;
        waiting.running -= 1;
        let batch = if waiting.are_enough(self.calls) {
            waiting.take(self.max_weight)
        } else {
            None
        };
        if let Some((questions, _)) = &batch {
            waiting.running += 1;
            waiting.under_way += questions.len();
        }
        batch
    }
}

impl<Q, A> Waiting<Q, A> {
    /// Returns whether enough callers wait to start another call, given those in flight.
    fn are_enough(&self, calls: usize) -> bool {
        match self.running {
            0 => !self.callers.is_empty(),
            running if running >= calls => false,
            _ => self.callers.len() >= WORTH_A_CALL.max(self.under_way / 2),
        }
    }

    /// Visits every caller, so it does not run again before twice as many are waiting.
    fn forget_those_that_gave_up(&mut self, max_weight: usize) {
        self.callers.retain(|(_, _, sender)| !sender.is_closed());
        self.weight = self.callers.iter().map(|(_, weight, _)| weight).sum();
        self.many = FEW.max(2 * self.callers.len());
        self.heavy = (FEW_CALLS * max_weight).max(2 * self.weight);
    }

    fn take(&mut self, max_weight: usize) -> Option<(Vec<Q>, Askers<A>)> {
        let mut questions = Vec::new();
        let mut senders = Vec::new();
        let mut weight = 0;
        while let Some(&(_, next, _)) = self.callers.front() {
            if !senders.is_empty() && weight + next > max_weight {
                break;
            }
            weight += next;
            let Some((question, _, sender)) = self.callers.pop_front() else {
                break;
            };
            self.weight -= next;
            // A caller that has given up needs no answer.
            if !sender.is_closed() {
                questions.push(question);
                senders.push(sender);
            }
        }
        (!senders.is_empty()).then_some((questions, Askers(senders)))
    }
}

/// The callers of one call.
pub(super) struct Askers<A>(Vec<oneshot::Sender<Result<A>>>);

impl<A> Askers<A> {
    /// Answers each caller, in the order of their questions.
    pub(super) fn tell(self, answers: Result<Vec<A>>) {
        let expected = self.0.len();
        let error = match answers {
            Ok(answers) if answers.len() == expected => {
                let pairs = self.0.into_iter().zip(answers);
                return pairs.for_each(|(sender, answer)| drop(sender.send(Ok(answer))));
            }
            Ok(answers) => {
                Error::Answer(format!("{} answers to {expected} questions", answers.len()))
            }
            Err(error) => error,
        };
        self.0
            .into_iter()
            .for_each(|sender| drop(sender.send(Err(error.clone()))));
    }
}

/// Holds back the calls of a combiner, so that its callers gather. Dropping it starts a call for
/// those that are left.
pub(super) struct CombinerHold<Q: Send + 'static, A: Send + 'static>(Arc<Combiner<Q, A>>);

impl<Q: Send + 'static, A: Send + 'static> CombinerHold<Q, A> {
    /// Takes the callers that have gathered, up to the weight of one call.
    pub(super) fn gathered(&self) -> Option<(Vec<Q>, Askers<A>)> {
        self.0.waiting.lock().take(self.0.max_weight)
    }
}

impl<Q: Send + 'static, A: Send + 'static> Drop for CombinerHold<Q, A> {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting.lock();
        waiting.running = usize::from(!waiting.callers.is_empty());
        if waiting.running > 0 {
            self.0.tasks.spawn(Arc::clone(&self.0).drain());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use tokio::sync::{
        Semaphore,
        mpsc::{UnboundedReceiver, unbounded_channel},
    };

    use super::*;

    /// Returns a combiner, a channel with the size of each call that starts, and a semaphore: each
    /// permit lets one call end.
    fn held_up(
        calls: usize,
    ) -> (
        Arc<Combiner<usize, usize>>,
        UnboundedReceiver<usize>,
        Arc<Semaphore>,
    ) {
        let (started, starts) = unbounded_channel();
        let ends = Arc::new(Semaphore::new(0));
        let end = Arc::clone(&ends);
        let combiner = Combiner::new(
            100,
            calls,
            TaskTracker::new(),
            move |numbers: Vec<usize>| {
                let started = started.clone();
                let end = Arc::clone(&end);
                async move {
                    started.send(numbers.len()).unwrap();
                    end.acquire().await.unwrap().forget();
                    Ok(numbers)
                }
            },
        );
        (combiner, starts, ends)
    }

    /// Yields often enough for a pending call to start.
    async fn turns() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_call_that_panics_fails_its_callers_and_nobody_after_them() {
        let combiner = Combiner::new(
            10,
            CALLS,
            TaskTracker::new(),
            |numbers: Vec<i32>| async move {
                assert!(
                    numbers.iter().all(|number| *number > 0),
                    "as it is meant to"
                );
                Ok(numbers)
            },
        );
        assert!(matches!(combiner.call(0, 1).await, Err(Error::Answer(_))));
        assert_eq!(combiner.call(7, 1).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn enough_callers_go_beside_the_call_under_way() {
        let (combiner, mut starts, ends) = held_up(CALLS);
        let mut calls = futures::stream::FuturesUnordered::new();
        let ask = |callers: usize| {
            for number in 0..callers {
                let mut call = Box::pin(combiner.call(number, 1));
                assert!(call.as_mut().now_or_never().is_none());
                calls.push(call);
            }
        };
        ask(10);
        assert_eq!(starts.recv().await, Some(10));
        ask(4);
        turns().await;
        assert!(
            starts.try_recv().is_err(),
            "fewer than half of the ten wait"
        );
        ask(1);
        assert_eq!(starts.recv().await, Some(5));
        ask(20);
        turns().await;
        assert!(starts.try_recv().is_err(), "there are two calls");
        ends.add_permits(3);
        assert_eq!(starts.recv().await, Some(20));
        while let Some(answer) = calls.next().await {
            answer.unwrap();
        }
        drop(combiner.hold().expect("no call is under way"));
    }

    #[tokio::test]
    async fn where_calls_wait_for_each_other_there_is_one_at_a_time() {
        let (combiner, mut starts, ends) = held_up(1);
        let first = combiner.call(0, 1);
        let mut calls: Vec<_> = std::iter::once(first)
            .chain((0..20).map(|n| combiner.call(n, 1)))
            .map(Box::pin)
            .collect();
        assert!(calls[0].as_mut().now_or_never().is_none());
        assert_eq!(starts.recv().await, Some(1));
        assert!(
            calls[1..]
                .iter_mut()
                .all(|call| call.now_or_never().is_none())
        );
        turns().await;
        assert!(starts.try_recv().is_err(), "the others wait for its end");
        ends.add_permits(2);
        assert_eq!(starts.recv().await, Some(20));
        assert!(
            futures::future::join_all(calls)
                .await
                .iter()
                .all(Result::is_ok)
        );
    }

    #[tokio::test]
    async fn callers_that_gave_up_do_not_pile_up() {
        let combiner = Combiner::new(
            10,
            CALLS,
            TaskTracker::new(),
            |numbers: Vec<i32>| async move { Ok(numbers) },
        );
        let held = combiner.hold().unwrap();
        let mut waits = Box::pin(combiner.call(1, 1));
        assert!(waits.as_mut().now_or_never().is_none());
        for number in 0..100_000 {
            assert!(combiner.call(number, 1).now_or_never().is_none());
        }
        assert!(combiner.waiting.lock().callers.len() <= 2 * FEW);
        for number in 0..100 {
            assert!(combiner.call(number, 9).now_or_never().is_none());
        }
        let heavy: Vec<_> = combiner
            .waiting
            .lock()
            .callers
            .iter()
            .map(|(_, weight, _)| *weight)
            .collect();
        assert!(
            heavy.iter().sum::<usize>() <= FEW_CALLS * 10 + 9,
            "few large ones are many, too"
        );
        drop(held);
        assert_eq!(waits.await.unwrap(), 1);
    }

    #[tokio::test]
    async fn callers_of_a_held_combiner_wait_for_its_holder() {
        let combiner = Combiner::new(2, 1, TaskTracker::new(), |numbers: Vec<i32>| async move {
            Ok(numbers)
        });
        let held = combiner.hold().unwrap();
        assert!(combiner.hold().is_none() && held.gathered().is_none());
        let mut calls: Vec<_> = (0..3)
            .map(|number| Box::pin(combiner.call(number, 1)))
            .collect();
        assert!(calls.iter_mut().all(|call| call.now_or_never().is_none()));
        let (numbers, askers) = held.gathered().unwrap();
        assert_eq!(numbers, [0, 1], "as much as one call takes");
        askers.tell(Ok(vec![10, 11]));
        drop(held);
        let answers = futures::future::join_all(calls).await;
        assert_eq!(
            answers.into_iter().map(Result::unwrap).collect::<Vec<_>>(),
            [10, 11, 2]
        );
        drop(combiner.hold());
        assert_eq!(combiner.call(7, 1).await.unwrap(), 7, "nobody was left");
    }
}
