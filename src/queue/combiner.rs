//! Combines concurrent callers into one call: while a call is under way, the next callers gather, and then go together.
//! An idle queue costs no wait; a busy one costs one Redis call for many workers that ask for one task each.

use std::{collections::VecDeque, future::Future, panic::AssertUnwindSafe, pin::Pin, sync::Arc};

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use super::error::{Error, Result};

/// Callers that may wait for one combiner. More are refused.
const MAX_WAITING: usize = 20_000;

type Run<Q, A> = dyn Fn(Vec<Q>) -> Pin<Box<dyn Future<Output = Result<Vec<A>>> + Send>> + Send + Sync;

struct Waiting<Q, A> {
    callers: VecDeque<(Q, usize, oneshot::Sender<Result<A>>)>,
    running: bool,
}

/// Combines calls of type `Q`, each answered with an `A`.
pub(super) struct Combiner<Q, A> {
    waiting: Mutex<Waiting<Q, A>>,
    run: Box<Run<Q, A>>,
    /// The sum of the callers' weights in one call, at most. A caller alone goes whatever it weighs.
    max_weight: usize,
    tasks: TaskTracker,
}

impl<Q: Send + 'static, A: Send + 'static> Combiner<Q, A> {
    /// `run` gives an answer per question, in order. `tasks` awaits the calls under way at a stop.
    pub(super) fn new<F, Fut>(max_weight: usize, tasks: TaskTracker, run: F) -> Arc<Self>
    where
        F: Fn(Vec<Q>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<A>>> + Send + 'static,
    {
        let waiting = Mutex::new(Waiting { callers: VecDeque::new(), running: false });
        Arc::new(Self { waiting, run: Box::new(move |batch| Box::pin(run(batch))), max_weight, tasks })
    }

    /// The answer to `question`. When the caller gives up, the answer is dropped; a claim's answer then releases its
    /// leases.
    pub(super) async fn call(self: &Arc<Self>, question: Q, weight: usize) -> Result<A> {
        let (sender, receiver) = oneshot::channel();
        let start = {
            let mut waiting = self.waiting.lock();
            if waiting.callers.len() >= MAX_WAITING {
                return Err(Error::Busy);
            }
            waiting.callers.push_back((question, weight, sender));
            !std::mem::replace(&mut waiting.running, true)
        };
        if start {
            // Not in the caller's own future: it may be dropped, and other callers wait for this call too.
            self.tasks.spawn(Arc::clone(self).drain());
        }
        receiver.await.unwrap_or(Err(Error::Stopped))
    }

    async fn drain(self: Arc<Self>) {
        // Callers that were woken together come one right after the other.
        tokio::task::yield_now().await;
        while let Some(batch) = self.next_batch() {
            let (questions, senders): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
            let expected = senders.len();
            // After a panic here, no one would run the next batch, and its callers would wait for ever.
            let answers = AssertUnwindSafe(async { (self.run)(questions).await }).catch_unwind().await;
            match answers.unwrap_or_else(|_| Err(Error::Answer("the call panicked".into()))) {
                Ok(answers) if answers.len() == expected => {
                    for (sender, answer) in senders.into_iter().zip(answers) {
                        drop(sender.send(Ok(answer)));
                    }
                }
                Ok(answers) => {
                    let error = Error::Answer(format!("{} answers to {expected} questions", answers.len()));
                    senders.into_iter().for_each(|sender| drop(sender.send(Err(error.clone()))));
                }
                Err(error) => senders.into_iter().for_each(|sender| drop(sender.send(Err(error.clone())))),
            }
        }
    }

    fn next_batch(&self) -> Option<Vec<(Q, oneshot::Sender<Result<A>>)>> {
        let mut waiting = self.waiting.lock();
        let (mut batch, mut weight) = (Vec::new(), 0);
        while let Some((_, next, _)) = waiting.callers.front() {
            if !batch.is_empty() && weight + next > self.max_weight {
                break;
            }
            weight += next;
            let Some((question, _, sender)) = waiting.callers.pop_front() else { break };
            // A caller that has given up meanwhile needs no call.
            if !sender.is_closed() {
                batch.push((question, sender));
            }
        }
        if batch.is_empty() {
            waiting.running = false;
            return None;
        }
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_that_panics_fails_its_callers_and_nobody_after_them() {
        let combiner = Combiner::new(10, TaskTracker::new(), |numbers: Vec<i32>| async move {
            assert!(numbers.iter().all(|number| *number > 0), "as it is meant to");
            Ok(numbers)
        });
        assert!(matches!(combiner.call(0, 1).await, Err(Error::Answer(_))));
        assert_eq!(combiner.call(7, 1).await.unwrap(), 7);
    }
}
